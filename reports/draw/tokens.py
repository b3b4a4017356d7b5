"""Figures of the error over tokens and ranks, one row a tensor."""

import math
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from draw import style
from draw.plot import Plot
from draw.style import GREY, plt
from read.record import Case, Record, Run, tensor
from say.names import bases_of, finite, sci, short
from say.select import gradients, one_per_format, top_ranks


def token_plots(rec: Record, case: Case) -> list[Plot]:
    out, n = [], top_ranks(rec, case["name"])
    for base in bases_of(rec.of(case["name"])):
        runs = one_per_format(rec, case["name"], n, base)
        names = [
            t
            for t in ["o"] + gradients(runs.values())
            if any(
                finite(v) and v > 0
                for r in runs.values()
                for v in ((tensor(r, t) or {}).get("windows") or {"rel": []})["rel"]
            )
        ]  # exact cases have no error to draw
        if n < 2 or not names or base == "fp64":
            continue
        cap = (
            f"{n} ranks. Left: relative error of o and of each gradient in windows of "
            f"{window(runs, names)} tokens, one line per format of the M chain; "
            "grey band: the same computation on one rank; vertical lines: rank boundaries. "
            "Right: the error of each whole rank; bars: fp32 chain, markers: the other formats. "
            "o is read left to right (the state flows to later ranks), gradients right to left."
        )
        out.append(
            Plot(
                f"tokens-{case['name']}-{base}",
                f"Error over tokens and ranks, {case['name']}, base {base}",
                cap,
                lambda runs=runs, base=base, names=names: draw_tokens(
                    rec, case, n, base, runs, names
                ),
            )
        )
    return out


def window(runs: dict[str, Run], names: list[str]) -> int:
    return next(
        tensor(r, t)["windows"]["size"]
        for r in runs.values()
        for t in names
        if (tensor(r, t) or {}).get("windows")
    )


def draw_tokens(
    rec: Record, case: Case, n: int, base: str, runs: dict[str, Run], names: list[str]
) -> Figure:
    single = next(iter(one_per_format(rec, case["name"], 1, base).values()), None)
    fig, axs = style.inch_grid(
        len(names),
        2,
        1.12,
        left=0.62,
        right=0.12,
        wgap=0.32,
        hgap=0.2,
        top=0.72,
        bottom=0.42,
        ratios=[2.3, 1],
        sharey="row",
    )
    handles = {}
    for row, name in zip(axs, names, strict=True):
        token_panel(row[0], case, n, name, runs, single, handles)
        rank_panel(row[1], n, name, runs, handles)
        row[0].set_ylabel(name, fontsize=8.5, fontweight="bold")
        fit_rows(row[0], name, runs, single)
    for ax in axs[:-1].flat:
        ax.tick_params(labelbottom=False)
    axs[-1][0].set_xlabel("token")
    axs[-1][1].set_xlabel("rank")
    axs[0][0].set_title("relative error per window of tokens", fontsize=8)
    axs[0][1].set_title("relative error per rank", fontsize=8)
    style.legend_above(fig, list(handles.values()), list(handles), 4, 0.995)
    return fig


def token_panel(
    ax: Axes, case: Case, n: int, name: str, runs: dict[str, Run], single: Run | None, handles: Any
) -> None:
    ax.set_yscale("log")
    T = case.get("T") or 0
    w1 = (tensor(single, name) or {}).get("windows") if single else None
    if w1:
        x, y = mids(w1, T)
        handles["1 rank"] = ax.plot(x, y, color="#b5b5b5", linewidth=3.2, zorder=1)[0]
    for fmt, run in runs.items():
        w = (tensor(run, name) or {}).get("windows")
        if w:
            x, y = mids(w, T)
            c, dash, m = style.look(fmt)
            ax.plot(
                x,
                y,
                color=c,
                linestyle=dash,
                linewidth=0.9,
                marker=m,
                markersize=2.6,
                markevery=(marker_phase(fmt), max(len(x) // 8, 1)),
            )
    for r in range(1, n):
        ax.axvline(r * T / n, color=GREY, linewidth=0.6, linestyle=(0, (4, 3)), zorder=0.5)
    ax.grid(axis="x", visible=False)
    ax.set_xlim(0, T or None)
    style.plain_ticks(ax.xaxis, [r * T // n for r in range(0, n + 1, max(1, n // 4))])


def marker_phase(fmt: str) -> int:
    """Markers of different formats stand at different windows, so that lines on top of each other
    can be told apart."""
    return list(style.LOOK).index(fmt) * 2 if fmt in style.LOOK else 1


def mids(w: dict[str, Any], T: int) -> tuple[list[float], list[float]]:
    s = w["size"]
    x = [(min((i + 1) * s, T) + i * s) / 2 if T else (i + 0.5) * s for i in range(len(w["rel"]))]
    return x, [v if finite(v) and v > 0 else np.nan for v in w["rel"]]


def rank_panel(ax: Axes, n: int, name: str, runs: dict[str, Run], handles: Any) -> None:
    ref = "fp32" if "fp32" in runs else next(iter(runs))
    others = [f for f in runs if f != ref]
    for fmt, run in runs.items():
        e = [
            v if finite(v) and v > 0 else np.nan
            for v in (tensor(run, name) or {}).get("per_rank") or [None] * n
        ]
        c, dash, m = style.look(fmt)
        if fmt == ref:
            ax.bar(
                range(len(e)),
                e,
                width=0.86,
                color="#d9d9d9",
                edgecolor=GREY,
                linewidth=0.5,
                zorder=1,
            )
        else:
            at = [r + (others.index(fmt) + 0.5) / len(others) * 0.8 - 0.4 for r in range(len(e))]
            ax.plot(at, e, color=c, marker=m, linestyle="none", markersize=3.2, markeredgewidth=0)
        handles.setdefault(
            f"{short(fmt)} chain",
            plt.Line2D([], [], color=c, linestyle=dash, marker=m, linewidth=1.1, markersize=3.6),
        )
    ax.grid(axis="x", visible=False)
    ax.set_xlim(-0.7, n - 0.3)
    style.plain_ticks(ax.xaxis, range(n))


def fit_rows(ax: Axes, name: str, runs: dict[str, Run], single: Run | None) -> None:
    """Limits from the data of both panels of the row, at least half a decade, so that bars start on
    a stated line."""
    vals = []
    for run in list(runs.values()) + ([single] if single else []):
        t = tensor(run, name) or {}
        vals += [
            v
            for v in (t.get("windows") or {"rel": []})["rel"] + (t.get("per_rank") or [])
            if finite(v) and v > 0
        ]
    lo, hi = math.log10(min(vals)), math.log10(max(vals))
    mid, half = (lo + hi) / 2, max((hi - lo) / 2 * 1.12, 0.3)
    ax.set_ylim(10.0 ** (mid - half), 10.0 ** (mid + half))
    inside = lambda ms: [
        m * 10.0**e
        for e in range(math.floor(mid - half), math.ceil(mid + half) + 1)
        for m in ms
        if mid - half <= math.log10(m) + e <= mid + half
    ]
    ticks = next(
        t
        for t in (inside((1,)), inside((1, 2, 5)), inside((1, 2, 3, 5, 7)))
        if len(t) >= 3 or len(t) == len(inside((1, 2, 3, 5, 7)))
    )
    ax.yaxis.set_major_locator(
        style.matplotlib.ticker.FixedLocator(ticks[:: max(1, math.ceil(len(ticks) / 4))])
    )
    ax.yaxis.set_major_formatter(style.FuncFormatter(lambda v, _: sci(v, 1)))
    ax.yaxis.set_minor_locator(style.NullLocator())
