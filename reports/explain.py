#!/usr/bin/env python3
"""explain.py RECORD ID [TENSOR]: what was compared in a run of a record, which limit decided, how
that limit was derived and where. It explains TENSOR, else those that failed, else the one nearest
to its limit. Exit status 0 explained, 2 not.
"""

import contextlib
import math
import os
import sys
import textwrap
from typing import Any

# Where this program's own modules are: -I leaves that out.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from read import many, record
from read.checks import Malformed
from read.record import Record, Run, Tensor
from say.verdicts import place

TIERS = {
    "exact": (
        "on these inputs nothing rounds in any format, so any error at all is a fault",
        "ref/inputs/inputs_exact.c; cases/README.md, keys = exact",
    ),
    "bound": (
        "a bound of the rounding errors that the claimed formats can make of these inputs: the "
        "smaller of a worst case and of 6 standard deviations of independent roundings",
        "ref/bound/bound.c, above each function; ref/METHOD.md",
    ),
    "expected": (
        "errors of right kernels of this design on nearby inputs, drawn several times, times an "
        "allowance for other orders of summation",
        "harness/verdict/levels.h; ref/METHOD.md; reports/verdicts.md",
    ),
    "sum": (
        "the error that draws make in a head's sum over all its tokens",
        "harness/verdict/compare.c",
    ),
}


def say(word: str, text: str) -> None:
    """A line of the explanation, behind its word."""
    print(textwrap.fill(text, 80, initial_indent=f"{word:<13}", subsequent_indent=" " * 13,
                        break_long_words=False, break_on_hyphens=False))  # fmt: skip


def number(x: float | None) -> str:
    return "none" if x is None else f"{x:.4g}"


def explain_truth(run: Run) -> None:
    t = run["truth"]
    say(
        "truth",
        f"the step recurrence in {t['kind']} at {t.get('bits', 0)} bits; its own error is "
        f"at most {number(t.get('radius'))} of the tensor (ref/truth/truth.h)",
    )


def explain_claim(run: Run) -> None:
    words = (("base", "base"), ("chain", "chain of M"), ("design", "design"))
    said = ", ".join(f"{what} {run['policy'][k]}" for k, what in words if run["policy"].get(k))
    if said:
        say("claim", f"{said}: limits are derived from these formats")


def explain_calls(case: dict[str, Any], run: Run) -> None:
    """The calls of a session, which the record keeps with its case."""
    if not case.get("session"):
        return
    after = f"; after a window: {run['rollback']}" if run.get("rollback") else ""
    say(
        "session", f"{case['session']}; state between calls: {case.get('session_state', '')}{after}"
    )
    if case.get("session_prefix"):
        say(
            "",
            f"all sequences share the first {case['session_prefix']} tokens: they are computed "
            "once, and each sequence continues from their state",
        )
    if case.get("session_slots"):
        say(
            "",
            f"states lie in a pool of {case['session_slots']} slots; slots that a call does not "
            "write must keep their bits",
        )
    say(
        "",
        "o of accepted tokens and the last state are judged by the whole case, each window by the "
        f"state that it began from: {run.get('windows_judged', 0)} of {run.get('windows', 0)} "
        "(cases/README.md, Sessions)",
    )


def explain_level(t: Tensor) -> None:
    e = t.get("expected")
    if not e:
        return
    level = e[e["level"]]
    say(
        "expected",
        f"error expected of this design: {number(e.get('rel'))} of the tensor; level {e['level']} "
        f"is nearest to its limit: {number(level.get('ratio'))} times its expected error (limit "
        f"{number(level.get('limit'))})",
    )


def factor(x: float) -> str:
    """The smallest factor that the limits would have seen; the record holds nine digits of it."""
    return f"{x:.3g}" if x > 1.01 else f"1 + {max(x - 1, 5e-9):.2g}"


def explain_power(t: Tensor) -> None:
    if "seen" not in t:
        say("power", "no factor of the tensor would have failed")
        return
    head = ""
    if "seen_head" in t:
        head = f"; head {t.get('blind_head', 0)} alone times {factor(t['seen_head'])}"
    say("power", f"the tensor times {factor(t['seen'])}, or more, would have failed{head}")


def entry(hexadecimal: str) -> float:
    with contextlib.suppress(ValueError, OverflowError):
        return float.fromhex(hexadecimal)
    return math.nan


def explain_place(t: Tensor) -> None:
    row = place(t)
    if not row:
        return
    keys = ("rank", "head", "sequence", "token", "index")
    at = ", ".join(f"{k} {row[k]}" for k in keys if row.get(k, -1) >= 0)
    got, want = (f"{entry(row.get(k) or '0'):.6g}" for k in ("got", "want"))
    say("place", f"{at}: got {got}, truth {want}")
    if "times" in row:
        error, times = number(row.get("error")), number(row["times"])
        say("", f"error of the row {error}, {times} times its limit")


def explain_tensor(t: Tensor) -> None:
    print(f"\n{t['name']} {t['verdict']}")
    of_all = number(t.get("rel_fro"))
    say("compared", f"every row with the truth; error of all, |got - truth| / |truth|: {of_all}")
    if t.get("bound") is not None:
        say("bound", f"the largest share of a row's bound: {number(t.get('ratio'))}")
    explain_level(t)
    if t["verdict"] != "fail":
        explain_power(t)
    if t.get("tier") in TIERS:
        what, where = TIERS[t["tier"]]
        say("decided by", f"{t['tier']}: {what}")
        say("derived in", where)
    explain_place(t)
    if t.get("why"):
        say("why", t["why"])


def wanted(run: Run, name: str) -> list[Tensor]:
    if name:
        return [t for t in run["tensors"] if t["name"] == name]
    if run["verdict"] == "fail":
        return [t for t in run["tensors"] if t["verdict"] == "fail"]
    return sorted(run["tensors"], key=lambda t: -(t.get("ratio") or 0))[:1]


def explain(rec: Record, run: Run, name: str) -> int:
    print(run["id"])
    said = run["verdict"] + (f": {run['why']}" if run.get("why") else "")
    print(textwrap.fill(said, 80, break_long_words=False, break_on_hyphens=False) + "\n")
    if run["truth"]:
        explain_truth(run)
    explain_claim(run)
    explain_calls(rec.cases[run["case"]], run)
    tensors = wanted(run, name)
    for t in tensors:
        explain_tensor(t)
    if name and not tensors:
        print(f"deltaproof: explain: the run has no tensor {name}", file=sys.stderr)
        return 2
    return 0


def main(argv: list[str]) -> int:
    path, run_id, name = [*argv[1:], ""][:3]
    path = os.path.join(path, many.NAME) if os.path.isdir(path) else path
    try:
        rec = record.load(path)
        run = next((r for r in rec.runs if r["id"] == run_id), None)
        if run is None:
            raise Malformed(f"{path}: has no run {run_id}")
    except Malformed as e:
        print(f"deltaproof: explain: {e}", file=sys.stderr)
        return 2
    return explain(rec, run, name)


if __name__ == "__main__":
    many.end(main)
