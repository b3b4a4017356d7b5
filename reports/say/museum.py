"""The museum's records in words; nothing is counted here that they do not say."""

import re
from typing import Any

from say.names import plural, whole


def sentences(m: dict[str, Any]) -> list[str]:
    f = [x for x in m["faults"] if x["runs"]]
    seen = [x for x in f if x["red"]]
    right, of = sum(x["locations"]["right"] for x in f), sum(x["locations"]["of"] for x in f)
    known = [x for x in seen if x["fla"]["of"]]
    none, some = (
        [x["name"] for x in known if not x["fla"]["red"]],
        [x["name"] for x in known if 0 < x["fla"]["red"] < x["fla"]["of"]],
    )
    unseen = [x["name"] for x in f if not x["red"]]
    out = [
        f"{len(seen)} of {plural(len(f), 'fault')} turn a verdict red"
        + (f"; not seen: {', '.join(unseen)}" if unseen else "")
        + ".",
        f"Without a fault {m['clean'].get('red')} of "
        f"{plural(m['clean'].get('runs', 0), 'run')} of {plural(m['cases'], 'case')} were red.",
    ]
    if of:
        out.append(
            f"Of {plural(of, 'red run')} that were looked into, {whole(right)} "
            f"({100 * right / of:.0f}%) were located at the fault's own stage, on a rank and "
            "head where it had acted."
        )
    if none:
        out.append(
            "The thresholds of FLA's own tests (relative RMS error of a whole tensor) see "
            f"no red run of {', '.join(none)}"
            + (f", and only some of {', '.join(some)}" if some else "")
            + "."
        )
    return out


def problem_of(run_id: str, T: int = None) -> str:
    """'smoke-kda:backend=cuda,ranks=2,base=fp32,chain=fp32' -> 'smoke-kda, 2 ranks, fp32': what the
    museum does not vary is left out."""
    case, _, rest = run_id.partition(":")
    key = dict(x.split("=", 1) for x in rest.split(",") if "=" in x)
    chain = [f"{key['chain']} chain"] if key.get("chain", "fp32") != "fp32" else []
    return ", ".join(
        [case]
        + ([f"T {T}"] if T else [])
        + (
            [plural(int(key["ranks"]), "rank")]
            if re.fullmatch("[0-9]{1,6}", key.get("ranks", ""))
            else []
        )
        + ([key["base"]] if key.get("base") else [])
        + chain
    )


def place_of(p: dict[str, Any] | None) -> str:
    return (
        p["stage"] + "".join(f", {k} {p[k]}" for k in ("rank", "head") if p[k] >= 0) if p else "–"
    )
