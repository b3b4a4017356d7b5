"""Figures of the M chain alone: error against the number of chunks, a panel per regime."""

import math
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from draw import style
from draw.plot import Plot
from read.record import Case, Record
from say.names import finite, formats_of, sci, short
from say.select import chain_cases, chain_title


def chain_series(rec: Record, case: Case) -> dict[str, Any]:
    """{format: (chunks, rel, bound)} of the runs of a chain case, rank 0, sorted by chunks."""
    out = {}
    for fmt in formats_of(rec.of(case["name"])):
        run = next(
            (r for r in rec.of(case["name"]) if r["policy"].get("chain") == fmt and r["chain"]),
            None,
        )
        if run:
            pts = sorted((p for p in run["chain"] if p["chunks"] > 0), key=lambda p: p["chunks"])
            out[fmt] = (
                [p["chunks"] for p in pts],
                [p["rel"] for p in pts],
                [p.get("bound") for p in pts],
                run.get("slope"),
            )
    return out


def drawn(fmt: str, series: dict[str, Any]) -> bool:
    """fp64 lies nine decades lower: it is named, not drawn. A chain whose errors are all 0 or not
    finite has no line."""
    return fmt != "fp64" and any(finite(y) and y > 0 for y in series[1])


def chain_plots(rec: Record) -> list[Plot]:
    alive, dead = [], []
    for c in chain_cases(rec):
        (alive if any(drawn(f, s) for f, s in chain_series(rec, c).items()) else dead).append(c)
    out = []
    for K in dict.fromkeys(c.get("K") for c in alive):
        group = [c for c in alive if c.get("K") == K]
        gone = [chain_title(c) for c in dead if c.get("K") == K]
        for part in range(0, len(group), 6):
            some = group[part : part + 6]
            stem = f"chain-k{K}" + (f"-{part // 6 + 1}" if len(group) > 6 else "")
            caption = (
                "Relative error of M, the product of the chunk matrices, against the number "
                "of chunks; one panel per regime. Filled markers: measured against the "
                "truth. Hollow markers on a thin line: its bound (running normwise, math.md "
                "j.3); where it leaves the panel it says nothing. Labels: format and slope of "
                "the measured line over 16 to 256 chunks; 0.5 is unbiased rounding, 1 is a "
                "bias; an arrow gives the last value of a line that leaves the panel."
                + fp64_note(rec, some)
            )
            if gone:
                caption += f" Not drawn: {', '.join(gone)} (every error is 0 or not finite: M has "
                caption += "underflowed)."
            out.append(
                Plot(
                    stem,
                    f"Error of M against chunks, K = {K}",
                    caption,
                    lambda some=some: draw_chain(rec, some),
                )
            )
    return out


def fp64_note(rec: Record, cases: list[Case]) -> str:
    worst = [
        y
        for c in cases
        for f, s in chain_series(rec, c).items()
        if f == "fp64"
        for y in s[1]
        if finite(y)
    ]
    return (
        f" fp64 stays below {sci(max(worst))} and is not drawn." if worst and max(worst) > 0 else ""
    )


CEILING = 30.0  # a relative error above it is written, not drawn


def draw_chain(rec: Record, cases: list[Case]) -> Figure:
    rows = (len(cases) + 1) // 2
    fig, axs = style.inch_grid(
        rows,
        2,
        2.0 if rows > 2 else 2.3,
        left=0.68,
        right=1.12,
        wgap=1.72,
        hgap=0.52,
        top=0.28,
        bottom=0.45,
    )
    series = [{f: s for f, s in chain_series(rec, c).items() if drawn(f, s)} for c in cases]
    ys = [y for some in series for s in some.values() for y in s[1] if finite(y) and y > 0]
    low, high = (
        10.0 ** math.floor(math.log10(min(ys)) - 0.1),
        min(10.0 ** math.ceil(math.log10(max(ys)) + 0.2), CEILING),
    )
    for i, ax in enumerate(axs.flat):
        if i >= len(cases):
            ax.set_visible(False)
            continue
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_ylim(low, high)
        chain_panel(ax, series[i])
        ax.set_title(chain_title(cases[i]))
        if i + 2 >= len(cases):
            ax.set_xlabel("chunks of 64 tokens")
        if i % 2 == 0:
            ax.set_ylabel(r"$\|\hat M - M\|_F\,/\,\|M\|_F$", parse_math=True)
    return fig


def chain_panel(ax: Axes, series: dict[str, Any]) -> None:
    ends, xs = [], []
    high = ax.get_ylim()[1]
    for fmt, (n, rel, bound, slope) in series.items():
        pts = [(a, b) for a, b in zip(n, rel, strict=True) if finite(b) and b > 0]
        bds = [(a, b) for a, b in zip(n, bound, strict=True) if finite(b) and b > 0]
        if bds:
            ax.plot(*zip(*bds, strict=True), **style.bound_style(fmt))
        ax.plot(*zip(*pts, strict=True), **style.line_style(fmt))
        xs += n
        x, y = pts[-1]
        text = (
            f"{short(fmt)} \u2191{sci(y)}"
            if y > high
            else short(fmt) + (f"  {slope:.2f}" if finite(slope) else "")
        )
        ends.append((x, min(y, high), text, style.look(fmt)[0]))
    ax.set_xlim(min(xs) * 0.8, max(xs) * 1.25)
    step = 4 if max(xs) / min(xs) <= 300 else 8
    style.decades(ax.yaxis, 9)
    style.plain_ticks(
        ax.xaxis, [step**k for k in range(0, 12) if min(xs) * 0.8 <= step**k <= max(xs) * 1.25]
    )
    style.end_labels(ax, ends)
