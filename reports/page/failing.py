"""Failed runs as the page shows them: one card for those that fail alike, the smallest split
first."""

from typing import Any

from draw.strips import strips
from read.record import Case, Record, Run, Tensor
from say.commands import again, wrong_stage
from say.failures import failure
from say.names import near, plural, sci, whole
from say.rows import decided_by, numbers_of_row, place_text, shape
from say.verdicts import over_limit, place, relative_limit, severity, worst_rank

CARDS, ALIKE = 12, 12
CHUNK = 64
FORMS = ("inputs", "gate", "beta", "l2norm", "scale")


def failing(rec: Record) -> tuple[list[dict[str, Any]], int]:
    """(cards, how many kinds of failure have none)"""
    groups: dict[Any, list[Run]] = {}
    for r in rec.runs:
        if r["verdict"] == "fail":
            t = first_tensor(r)
            key = (r["case"], t["name"] if t else "", t.get("tier") if t else "", _fault(r))
            groups.setdefault(key, []).append(r)
    kinds = sorted(groups.values(), key=lambda runs: min(_size(r) for r in runs))
    return [_card(rec, runs, i) for i, runs in enumerate(kinds[:CARDS], 1)], len(kinds[CARDS:])


def first_tensor(run: Run) -> Tensor | None:
    """The failed tensor that is farthest beyond its limit."""
    failed = [t for t in run["tensors"] if t["verdict"] == "fail"]
    return max(failed, key=_severity, default=None)


def _severity(t: Tensor) -> tuple[bool, bool, float]:
    return severity(t | {"ratio": t.get("ratio")})


def _fault(run: Run) -> str:
    return run["policy"].get("fault") or ""


def _size(run: Run) -> tuple[int, int]:
    return run["ranks"], len(run["id"])


def _card(rec: Record, runs: list[Run], number: int) -> dict[str, Any]:
    run = min(runs, key=_size)
    t = first_tensor(run)
    case = rec.cases[run["case"]]
    others = [x for x in run["tensors"] if x["verdict"] == "fail" and x is not t]
    return {
        "number": number,
        "run": run,
        "tensor": t,
        "at": _where(t, run) if t else "",
        "says": failure(run, t),
        "numbers": _numbers(t) if t else [],
        "strips": strips(t, case) if t else [],
        "profiles": [
            {"name": x["name"], "strips": strips(x, case), "begins": _begins(x)} for x in others
        ],
        "begins": _begins(t) if t else "",
        "settings": _settings(run, case),
        "fits": _fits(rec, run["case"]),
        "others": ", ".join(f"{x['name']} ({near(over_limit(x))})" for x in others),
        "warnings": case.get("warnings") or [],
        "again": again(rec, run),
        "stage": wrong_stage(rec, run),
        "alike": [r for r in runs if r is not run][:ALIKE],
        "more": max(len(runs) - 1 - ALIKE, 0),
        "case": list(rec.cases).index(run["case"]),
    }


def _fits(rec: Record, case: str) -> list[str]:
    """Mistakes that explain a failure: of a judgement, or of that case of a run."""
    notes = rec.provenance.get("notes") or {}
    return (notes.get("fits") or notes.get(f"fits {case}") or "").split("; ")


def _begins(t: Tensor) -> str:
    """Where the error begins to be too large, and over how much; "" where the record has no errors
    along tokens."""
    return "; ".join(x for x in (_first_row(t), _first_window(t)) if x)


def _first_row(t: Tensor) -> str:
    """The first row beyond its bound, and whether a chunk begins there."""
    first = t.get("first_over") or {}
    token = first.get("token", -1)
    if token < 0:
        return ""
    border = token and token % CHUNK == 0 and first.get("sequence") == 0
    return (
        f"the first row of {t['name']} beyond its bound is token {whole(token)}, head "
        f"{whole(first['head'])}{', a chunk border' if border else ''}, of "
        f"{plural(first['rows'], 'such row')}"
    )


def _first_window(t: Tensor) -> str:
    windows, limit = t.get("windows"), relative_limit(t, "window")
    if not windows or (limit is None and t.get("tier") != "exact"):
        return ""
    size, errors = windows["size"], windows["rel"]
    over = [i for i, x in enumerate(errors) if x is not None and not x <= (limit or 0.0)]
    if not over:
        return ""
    first, last = over[0] * size, (over[0] + 1) * size - 1
    return (
        f"{t['name']} is first beyond its limit at tokens {whole(first)} to {whole(last)}, "
        f"in {whole(len(over))} of {whole(len(errors))} windows of {size} tokens"
    )


def _settings(run: Run, case: Case) -> list[tuple[str, str]]:
    policy = [(k.replace("_", " "), str(v)) for k, v in run["policy"].items() if v]
    forms = [(k, str(case[k])) for k in FORMS if case.get(k) is not None]
    sizes = [("op", case["op"]), ("shape", shape(case)), *forms, ("ranks", whole(run["ranks"]))]
    return sizes + policy


def _where(t: Tensor, run: Run) -> str:
    """The row of the failure; the rank where the record has no more."""
    rank = worst_rank(t) if run["ranks"] > 1 else None
    return place_text(place(t)) or (f"rank {rank}" if rank is not None else "")


def _numbers(t: Tensor) -> list[tuple[str, str]]:
    over, ratio = over_limit(t), t.get("ratio")
    rows = [
        ("judged by", decided_by(t)),
        ("relative error of the tensor", sci(t.get("rel_fro"), 3)),
        ("error / limit", near(over) if over is not None else ""),
        ("error / bound", near(ratio) if ratio is not None and ratio != over else ""),
    ]
    return [(k, v) for k, v in rows if v and v != "–"] + numbers_of_row(t)
