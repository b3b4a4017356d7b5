"""All results as the page's filter reads them (templates/page.js): tables of columns, texts once
each, deflated and in base64. Results of a large record that do not fit are left out in the order of
LEVELS. The page says so; results.json has all.

results(rec, room) -> Results
"""

import base64
import json
import zlib
from dataclasses import dataclass
from typing import Any

from read.record import NO_RANKS, VERDICTS, Record, Run, Tensor
from say.commands import again
from say.names import sci, whole
from say.rows import case_facts, decided_by, place_short, run_facts
from say.select import tensor_order
from say.verdicts import over_limit, place, severity

# What is left out of runs that pass, each beside all before it.
LEVELS = (
    "",
    "the error of each rank",
    "the worst row's numbers",
    "truth, time and condition",
    "all tensors but the one nearest to its limit",
)


@dataclass
class Results:
    data: str  # base64 of deflated JSON
    left_out: list[str]
    runs: int
    tensors: int


class Texts:
    """Texts by number."""

    def __init__(self) -> None:
        self.number: dict[str, int] = {"": 0}

    def __call__(self, text: str | None) -> int:
        return self.number.setdefault(text or "", len(self.number))


def results(rec: Record, room: int) -> Results:
    """The most that fits into `room` bytes; at the last level whatever there is."""
    for level in range(len(LEVELS)):
        table = _table(rec, level)
        text = json.dumps(table, separators=(",", ":"), ensure_ascii=False)
        data = base64.b64encode(zlib.compress(text.encode(), 9)).decode()
        if len(data) <= room:
            break
    return Results(data, list(LEVELS[1 : level + 1]), len(rec.runs), len(table["rows"]["run"]))


def _table(rec: Record, level: int) -> dict[str, Any]:
    texts = Texts()
    cases = {name: i for i, name in enumerate(rec.cases)}
    runs = _columns([_run(rec, r, cases, texts, level) for r in rec.runs])
    rows = _columns([x for r in rec.runs for x in _rows(r, texts, level)])
    about = [
        [c["name"], (c.get("reason") or "").rstrip("."), case_facts(c), c.get("warnings") or []]
        for c in rec.cases.values()
    ]
    return {
        "verdicts": VERDICTS,
        "order": tensor_order(rec.runs),
        "cases": about,
        "runs": runs,
        "rows": rows,
        "texts": list(texts.number),
    }


def _columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    names = rows[0] if rows else {"run": 0}
    return {k: [x[k] for x in rows] for k in names}


def _run(rec: Record, run: Run, cases: dict[str, int], texts: Texts, level: int) -> dict[str, Any]:
    short = level >= 3 and run["verdict"] == "pass"
    replay = again(rec, run)
    plain = f"deltaproof run --id '{run['id']}'"
    p = run["policy"]
    return {
        "id": run["id"],
        "case": cases[run["case"]],
        "ranks": run["ranks"],
        "backend": texts(run.get("backend")),
        "base": texts(p.get("base")),
        "chain": texts(p.get("chain")),
        "policy": texts(", ".join(f"{k} {v}" for k, v in p.items() if k not in ("base", "chain"))),
        "verdict": VERDICTS.index(run["verdict"]),
        "why": texts(run.get("why")),
        "facts": "" if short else run_facts(run),
        "again": 0 if replay == plain else texts(replay),
        "points": 0 if short or not run["chain"] else chain_points(run),
    }


def _rows(run: Run, texts: Texts, level: int) -> list[dict[str, Any]]:
    tensors = run["tensors"]
    passed = run["verdict"] == "pass"
    if level >= 4 and passed and tensors:
        tensors = [max(tensors, key=_nearest)]
    if not tensors:
        return [_row(run, {"name": "", "verdict": run["verdict"]}, texts, 0)]
    return [_row(run, t, texts, level if t["verdict"] == "pass" else 0) for t in tensors]


def _nearest(t: Tensor) -> Any:
    return severity(t) if t.get("ratio") is not None else (t["verdict"] == "fail", False, -2.0)


def _row(run: Run, t: Tensor, texts: Texts, level: int) -> dict[str, Any]:
    w = place(t)
    over = over_limit(t)
    number = lambda x: "" if x is None else sci(x)
    split = level < 1 and run["ranks"] > 1
    return {
        "run": run["n"],
        "name": texts(t["name"]),
        "verdict": VERDICTS.index(t["verdict"]),
        "error": "" if t.get("rel_fro") is None else sci(t["rel_fro"], 3),
        "bound": number(t.get("bound")),
        "ratio": number(t.get("ratio")),
        "over": number(over),
        "by": texts(decided_by(t)),
        "rank": w.get("rank", -1) if w.get("rank") is not None else -1,
        "at": place_short(w),
        "got": w.get("got") or "" if level < 2 else "",
        "want": w.get("want") or "" if level < 2 else "",
        "row": number(w.get("rel")) if level < 2 else "",
        "ranks": " ".join(sci(x) for x in t.get("per_rank") or []) if split else "",
        "why": texts(t.get("why")),
    }


def chain_points(run: Run) -> list[list[Any]]:
    """M after so many chunks; of a split run only the last point of each rank, the figures show the
    rest."""
    points = run["chain"]
    if run["op"] not in NO_RANKS:
        last: dict[int, Any] = {}
        for p in points:
            rank = p.get("rank", 0)
            if rank not in last or p["chunks"] >= last[rank]["chunks"]:
                last[rank] = p
        points = [last[rank] for rank in sorted(last)]
    numbers = ("effect", "bound", "norm")
    return [
        [p.get("rank", 0), whole(p["chunks"]), sci(p["rel"], 3), *(sci(p.get(k)) for k in numbers)]
        for p in points
    ]
