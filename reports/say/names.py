"""Names of formats and bases, and how numbers and policies are written."""

import math
from collections.abc import Iterable

from read.record import Run

FORMATS = {
    "fp64": ("fp64", "fp64"),
    "fp32": ("fp32", "fp32"),
    "tf32x3": ("3xTF32", "3xTF32"),
    "tf32": ("tf32 to nearest", "tf32"),
    "tf32rz": ("tf32 with truncated operands", "tf32 trunc."),
    "bf16": ("bf16 operands", "bf16 op."),
    "bf16st": ("bf16 storage", "bf16 store"),
}


BASES = ("fp64", "fp32", "bf16")


def words(fmt: str) -> str:
    return FORMATS.get(fmt, (fmt, fmt))[0]


def short(fmt: str) -> str:
    return FORMATS.get(fmt, (fmt, fmt))[1]


def in_order(names: Iterable[str], order: Iterable[str]) -> list[str]:
    """Known names in this order, then the unknown ones as they come; each once."""
    names, order = list(dict.fromkeys(names)), list(order)
    return sorted(
        names, key=lambda x: order.index(x) if x in order else len(order) + names.index(x)
    )


def formats_of(runs: list[Run]) -> list[str]:
    return in_order([r["policy"]["chain"] for r in runs if r["policy"].get("chain")], FORMATS)


def bases_of(runs: list[Run]) -> list[str]:
    return in_order(
        [r["policy"]["base"] for r in runs if r["policy"].get("base")], ("fp64", "fp32", "bf16")
    )


def finite(x: float | None) -> bool:
    return x is not None and math.isfinite(x)


def sci(x: float | None, digits: int = 2) -> str:
    """3.9e-3 in the field's notation, 0.94 and 5.7 plainly; nan and inf as words; None as a
    dash."""
    if x is None:
        return "–"
    if not math.isfinite(x):
        return "nan" if x != x else ("inf" if x > 0 else "-inf")
    if x == 0:
        return "0"
    m, e = f"{x:.{digits - 1}e}".split("e")
    if -1 <= int(e) <= 2:
        return f"{x:.{max(digits - 1 - int(e), 0)}f}"
    return f"{m}e{int(e)}"


def near(x: float | None) -> str:
    """A factor, ratio or slope near 1: 0.31, 3.4, 12, 3.0e-4."""
    if not finite(x) or x == 0 or abs(x) < 5e-3 or abs(x) >= 1e5:
        return sci(x)
    return f"{x:,.0f}" if abs(x) >= 99.5 else f"{x:.2f}" if abs(x) < 0.995 else f"{x:.3g}"


def whole(n: int) -> str:
    return f"{n:,}"


def plural(n: int, noun: str) -> str:
    return f"{whole(n)} {noun}" + ("" if n == 1 else "s")


def policy_text(run: Run) -> str:
    p = run["policy"]
    known = [f"base {p['base']}"] if p.get("base") else []
    if p.get("chain"):
        known.append(f"chain {p['chain']}")
    if p.get("merge"):
        known.append(p["merge"])
    return (
        ", ".join(known + [f"{k} {v}" for k, v in p.items() if k not in ("base", "chain", "merge")])
        or "all policies"
    )
