"""Figure of the error of S_in, rank by rank."""

import math
from collections.abc import Iterator
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from draw import style
from draw.plot import Plot
from draw.style import GREY
from read.record import Case, Record, Run, Tensor, tensor
from say.names import bases_of, finite, sci, short, whole
from say.select import heads, one_per_format, top_ranks


def state_panels(rec: Record) -> Iterator[Any]:
    """(case, base, ranks, {format: run}) of the heads, each at its most ranks."""
    for case in heads(rec):
        n = top_ranks(rec, case["name"])
        for base in bases_of(rec.of(case["name"])):
            runs = one_per_format(rec, case["name"], n, base)
            if n > 2 and any(
                finite(e) and e > 0
                for r in runs.values()
                for e in ((tensor(r, "S_in") or {}).get("per_rank") or [])[2:]
            ):
                yield case, base, n, runs


def state_plots(rec: Record) -> list[Plot]:
    panels = list(state_panels(rec))
    cap = (
        "Error of the state S_in with which a rank starts, rank by rank (top axis: what lies "
        "before it), one panel per head and base policy. Filled: measured; hollow on a thin "
        "line: its bound (math.md j.6); above 1 it says nothing. Rank 1 starts from H of "
        "rank 0 alone, without M; from rank 2 on the M chain enters."
        + (
            " The fp64 chain is drawn only where it stands alone."
            if any("fp64" in runs for _, _, _, runs in panels)
            else ""
        )
        + (
            " Where a line enters from below, the error at rank 1 lies below the panel."
            if any(base == "fp64" for _, base, _, _ in panels)
            else ""
        )
    )
    out = []
    for part in range(0, len(panels), 6):
        some = panels[part : part + 6]
        out.append(
            Plot(
                "state-over-ranks" + (f"-{part // 6 + 1}" if len(panels) > 6 else ""),
                "Error of S_in over the ranks",
                cap,
                lambda some=some: draw_state(some),
            )
        )
    return out


def rank_bounds(t: Tensor, heads_: int) -> list[float | None]:
    """Bound per rank, relative: with one head it is error over ratio; with more only the bound of
    the whole tensor is in the record."""
    rel, ratio = t.get("per_rank") or [], t.get("per_rank_ratio") or []
    if heads_ == 1 and len(ratio) == len(rel):
        return [
            e / q if finite(e) and finite(q) and q > 0 else None
            for e, q in zip(rel, ratio, strict=True)
        ]
    return [t["bound"] if finite(e) and finite(t.get("bound")) else None for e in rel]


def draw_state(panels: list[Any]) -> Figure:
    cols = min(2, len(panels))
    rows = (len(panels) + cols - 1) // cols
    fig, axs = style.inch_grid(
        rows,
        cols,
        1.75 if rows > 2 else 2.3,
        left=0.68,
        right=0.95,
        wgap=1.6,
        hgap=1.05,
        top=0.62,
        bottom=0.45,
    )
    for i, ax in enumerate(axs.flat):
        if i >= len(panels):
            ax.set_visible(False)
            continue
        case, base, n, runs = panels[i]
        state_panel(ax, case, runs, n)
        ax.set_title(f"{case['name']}, base {base}", pad=24)
        ax.set_xlabel("rank")
        if i % cols == 0:
            ax.set_ylabel(
                r"$\|\hat S_{\rm in} - S_{\rm in}\|_F\,/\,\|S_{\rm in}\|_F$", parse_math=True
            )
    return fig


def state_panel(ax: Axes, case: Case, runs: dict[str, Run], n: int) -> None:
    ax.set_yscale("log")
    ends, ys, bounds = [], [], []
    for fmt, run in runs.items():
        if fmt == "fp64" and len(runs) > 1:
            continue
        t = tensor(run, "S_in")
        pts = [(r, e) for r, e in enumerate((t or {}).get("per_rank") or []) if finite(e) and e > 0]
        if not pts:
            continue
        bds = [
            (r, b) for r, b in enumerate(rank_bounds(t, case.get("HV") or 1)) if finite(b) and b > 0
        ]
        if bds:
            ax.plot(*zip(*bds, strict=True), **style.bound_style(fmt))
        ax.plot(*zip(*pts, strict=True), **style.line_style(fmt))
        ys += [e for r, e in pts if r > 1] + [b for _, b in bds if b <= 1]
        bounds += [b for r, b in bds if r > 1]
        ends.append((*pts[-1], short(fmt), style.look(fmt)[0]))
    ax.set_xlim(0.7, n - 0.7)
    ax.set_ylim(
        10.0 ** math.floor(math.log10(min(ys)) - 0.4), 10.0 ** math.ceil(math.log10(max(ys)) + 0.3)
    )
    if bounds and min(bounds) > 1:
        ax.text(
            0.03,
            0.97,
            f"bounds {sci(min(bounds), 1)} to {sci(max(bounds), 1)}: above the panel",
            transform=ax.transAxes,
            va="top",
            fontsize=7,
            color=GREY,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
        )
    style.decades(ax.yaxis)
    style.plain_ticks(ax.xaxis, range(1, n))
    if case.get("T"):
        top = ax.secondary_xaxis("top")
        unit = 1 if case["T"] // n % 64 else 64
        top.set_xticks(range(1, n), [whole(r * case["T"] // n // unit) for r in range(1, n)])
        top.tick_params(length=2, pad=1, labelsize=7)
        top.set_xlabel(
            "chunks before the rank" if unit == 64 else "tokens before the rank",
            fontsize=7,
            labelpad=2,
        )
        top.spines["top"].set_visible(False)
    style.end_labels(ax, ends)
