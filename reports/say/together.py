"""The runs of a kernel over many cases together (harness/verdict/pooled.h).

together(rec) -> {"rows": [...], "failed": how many}, failures first; None: nothing is pooled
"""

from typing import Any

from read.record import Record
from say.names import near, sci, whole


def failed_together(rec: Record) -> int:
    return sum(p["verdict"] == "fail" for p in rec.pooled)


def together(rec: Record) -> dict[str, Any] | None:
    if not rec.pooled:
        return None
    order = sorted(rec.pooled, key=lambda p: (p["verdict"] != "fail", p.get("chance") or 0.0))
    return {"rows": [_row(p) for p in order], "failed": failed_together(rec)}


def _row(p: dict[str, Any]) -> dict[str, Any]:
    freedom = p.get("freedom")
    return {
        "tensor": p["tensor"],
        "kernel": _kernel(p),
        "verdict": p["verdict"],
        "cases": whole(p["cases"]),
        "freedom": near(freedom) if freedom is not None else "–",
        "ratio": near(p.get("ratio")) if p.get("ratio") is not None else "–",
        "chance": sci(p.get("chance")),
        "detects": near(p.get("detects")) if p.get("detects") is not None else "–",
    }


def _kernel(p: dict[str, Any]) -> str:
    words = [p.get("backend"), p.get("way"), f"base {p['base']}" if p.get("base") else None]
    words += ["undeclared" if p.get("undeclared") else None]
    words += [f"fault {p['fault']}" if p.get("fault") else None]
    return ", ".join(w for w in words if w)
