"""The figures of a report. plots(rec) lists them; each Plot draws itself when its turn comes (report.py does that in parallel)."""
import math
import re
from dataclasses import dataclass
from typing import Callable

import numpy as np

import style
from style import GREY, INK, plt
from view import (GRADIENTS, TENSOR_ORDER, bases_of, chain_cases, chain_title, finite, formats_of, heads, in_order, judged_recurrences, near, one_per_format,
                  sci, severity, short, top_ranks, vacuous, whole, worst_tensor, without_error)
from record import tensor


@dataclass
class Plot:
    name: str                    # file stem and anchor: letters, digits, '.', '-', '_'
    title: str
    caption: str                 # plain text; what to see
    draw: Callable               # () -> matplotlib figure
    table: Callable = None       # () -> tables (heat_table) that show the same in the page, cells being links


def plots(rec):
    out = chain_plots(rec) + state_plots(rec)
    for case in heads(rec):
        out += token_plots(rec, case)
    out += map_plots(rec)
    taken = set()
    for plot in out:
        plot.name = stem(plot.name, taken)
    return out


def stem(name, taken):
    """A name of a case may hold what means something to a file system or is too long for it; two of them may become one."""
    short = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:100].lstrip(".") or "figure"
    out, n = short, 1
    while out in taken:
        n += 1
        out = f"{short}-{n}"
    taken.add(out)
    return out


# ---- 1. the M chain alone ---------------------------------------------------------------------------------------------------------------

def chain_series(rec, case):
    """{format: (chunks, rel, bound)} of the runs of a chain case, rank 0, sorted by chunks."""
    out = {}
    for fmt in formats_of(rec.of(case["name"])):
        run = next((r for r in rec.of(case["name"]) if r["policy"].get("chain") == fmt and r["chain"]), None)
        if run:
            pts = sorted((p for p in run["chain"] if p["chunks"] > 0), key=lambda p: p["chunks"])
            out[fmt] = [p["chunks"] for p in pts], [p["rel"] for p in pts], [p.get("bound") for p in pts], run.get("slope")
    return out


def drawn(fmt, series):
    """fp64 lies nine decades lower: it is named, not drawn. A chain whose errors are all 0 or not finite has no line."""
    return fmt != "fp64" and any(finite(y) and y > 0 for y in series[1])


def chain_plots(rec):
    alive, dead = [], []
    for c in chain_cases(rec):
        (alive if any(drawn(f, s) for f, s in chain_series(rec, c).items()) else dead).append(c)
    out = []
    for K in dict.fromkeys(c.get("K") for c in alive):
        group = [c for c in alive if c.get("K") == K]
        gone = [chain_title(c) for c in dead if c.get("K") == K]
        for part in range(0, len(group), 6):
            some = group[part:part + 6]
            stem = f"chain-k{K}" + (f"-{part // 6 + 1}" if len(group) > 6 else "")
            caption = (
                "Relative error of M, the product of the chunk matrices, against the number of chunks; one panel per regime. Filled markers: measured against the "
                "truth. Hollow markers on a thin line: its bound (running normwise, math.md j.3); where it leaves the panel it says nothing. Labels: format and slope of "
                "the measured line over 16 to 256 chunks; 0.5 is unbiased rounding, 1 is a bias; an arrow gives the last value of a line that leaves the panel." + fp64_note(rec, some))
            if gone:
                caption += f" Not drawn: {', '.join(gone)} (every error is 0 or not finite: M has underflowed)."
            out.append(Plot(stem, f"Error of M against chunks, K = {K}", caption, lambda some=some: draw_chain(rec, some)))
    return out


def fp64_note(rec, cases):
    worst = [y for c in cases for f, s in chain_series(rec, c).items() if f == "fp64" for y in s[1] if finite(y)]
    return f" fp64 stays below {sci(max(worst))} and is not drawn." if worst and max(worst) > 0 else ""


CEILING = 30.0                                                        # a relative error above it is written, not drawn


def draw_chain(rec, cases):
    rows = (len(cases) + 1) // 2
    fig, axs = style.inch_grid(rows, 2, 2.0 if rows > 2 else 2.3, left=0.68, right=1.12, wgap=1.72, hgap=0.52, top=0.28, bottom=0.45)
    series = [{f: s for f, s in chain_series(rec, c).items() if drawn(f, s)} for c in cases]
    ys = [y for some in series for s in some.values() for y in s[1] if finite(y) and y > 0]
    low, high = 10.0 ** math.floor(math.log10(min(ys)) - 0.1), min(10.0 ** math.ceil(math.log10(max(ys)) + 0.2), CEILING)
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


def chain_panel(ax, series):
    ends, xs = [], []
    high = ax.get_ylim()[1]
    for fmt, (n, rel, bound, slope) in series.items():
        pts = [(a, b) for a, b in zip(n, rel) if finite(b) and b > 0]
        bds = [(a, b) for a, b in zip(n, bound) if finite(b) and b > 0]
        if bds:
            ax.plot(*zip(*bds), **style.bound_style(fmt))
        ax.plot(*zip(*pts), **style.line_style(fmt))
        xs += n
        x, y = pts[-1]
        text = f"{short(fmt)} \u2191{sci(y)}" if y > high else short(fmt) + (f"  {slope:.2f}" if finite(slope) else "")
        ends.append((x, min(y, high), text, style.look(fmt)[0]))
    ax.set_xlim(min(xs) * 0.8, max(xs) * 1.25)
    step = 4 if max(xs) / min(xs) <= 300 else 8
    style.decades(ax.yaxis, 9)
    style.plain_ticks(ax.xaxis, [step ** k for k in range(0, 12) if min(xs) * 0.8 <= step ** k <= max(xs) * 1.25])
    style.end_labels(ax, ends)


# ---- 2. S_in over the ranks -------------------------------------------------------------------------------------------------------------

def state_panels(rec):
    """(case, base, ranks, {format: run}) of the heads, each at its most ranks."""
    for case in heads(rec):
        n = top_ranks(rec, case["name"])
        for base in bases_of(rec.of(case["name"])):
            runs = one_per_format(rec, case["name"], n, base)
            if n > 2 and any(finite(e) and e > 0 for r in runs.values() for e in ((tensor(r, "S_in") or {}).get("per_rank") or [])[2:]):
                yield case, base, n, runs


def state_plots(rec):
    panels = list(state_panels(rec))
    cap = ("Error of the state S_in with which a rank starts, rank by rank (top axis: what lies before it), one panel per head and base policy. Filled: measured; hollow on a thin "
           "line: its bound (math.md j.6); above 1 it says nothing. Rank 1 starts from H of rank 0 alone, without M; from rank 2 on the M chain enters."
           + (" The fp64 chain is drawn only where it stands alone." if any("fp64" in runs for _, _, _, runs in panels) else "")
           + (" Where a line enters from below, the error at rank 1 lies below the panel." if any(base == "fp64" for _, base, _, _ in panels) else ""))
    out = []
    for part in range(0, len(panels), 6):
        some = panels[part:part + 6]
        out.append(Plot("state-over-ranks" + (f"-{part // 6 + 1}" if len(panels) > 6 else ""), "Error of S_in over the ranks", cap, lambda some=some: draw_state(some)))
    return out


def rank_bounds(t, heads_):
    """Bound per rank, relative: with one head it is error over ratio; with more only the bound of the whole tensor is in the record."""
    rel, ratio = t.get("per_rank") or [], t.get("per_rank_ratio") or []
    if heads_ == 1 and len(ratio) == len(rel):
        return [e / q if finite(e) and finite(q) and q > 0 else None for e, q in zip(rel, ratio)]
    return [t["bound"] if finite(e) and finite(t.get("bound")) else None for e in rel]


def draw_state(panels):
    cols = min(2, len(panels))
    rows = (len(panels) + cols - 1) // cols
    fig, axs = style.inch_grid(rows, cols, 1.75 if rows > 2 else 2.3, left=0.68, right=0.95, wgap=1.6, hgap=1.05, top=0.62, bottom=0.45)
    for i, ax in enumerate(axs.flat):
        if i >= len(panels):
            ax.set_visible(False)
            continue
        case, base, n, runs = panels[i]
        state_panel(ax, case, runs, n)
        ax.set_title(f"{case['name']}, base {base}", pad=24)
        ax.set_xlabel("rank")
        if i % cols == 0:
            ax.set_ylabel(r"$\|\hat S_{\rm in} - S_{\rm in}\|_F\,/\,\|S_{\rm in}\|_F$", parse_math=True)
    return fig


def state_panel(ax, case, runs, n):
    ax.set_yscale("log")
    ends, ys, bounds = [], [], []
    for fmt, run in runs.items():
        if fmt == "fp64" and len(runs) > 1:
            continue
        t = tensor(run, "S_in")
        pts = [(r, e) for r, e in enumerate((t or {}).get("per_rank") or []) if finite(e) and e > 0]
        if not pts:
            continue
        bds = [(r, b) for r, b in enumerate(rank_bounds(t, case.get("HV") or 1)) if finite(b) and b > 0]
        if bds:
            ax.plot(*zip(*bds), **style.bound_style(fmt))
        ax.plot(*zip(*pts), **style.line_style(fmt))
        ys += [e for r, e in pts if r > 1] + [b for _, b in bds if b <= 1]
        bounds += [b for r, b in bds if r > 1]
        ends.append((*pts[-1], short(fmt), style.look(fmt)[0]))
    ax.set_xlim(0.7, n - 0.7)
    ax.set_ylim(10.0 ** math.floor(math.log10(min(ys)) - 0.4), 10.0 ** math.ceil(math.log10(max(ys)) + 0.3))
    if bounds and min(bounds) > 1:
        ax.text(0.03, 0.97, f"bounds {sci(min(bounds), 1)} to {sci(max(bounds), 1)}: above the panel", transform=ax.transAxes, va="top", fontsize=7, color=GREY,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5})
    style.decades(ax.yaxis)
    style.plain_ticks(ax.xaxis, range(1, n))
    if case.get("T"):
        top = ax.secondary_xaxis("top")
        unit = 1 if case["T"] // n % 64 else 64
        top.set_xticks(range(1, n), [whole(r * case["T"] // n // unit) for r in range(1, n)])
        top.tick_params(length=2, pad=1, labelsize=7)
        top.set_xlabel("chunks before the rank" if unit == 64 else "tokens before the rank", fontsize=7, labelpad=2)
        top.spines["top"].set_visible(False)
    style.end_labels(ax, ends)


# ---- 3. tokens and ranks ----------------------------------------------------------------------------------------------------------------

def token_plots(rec, case):
    out, n = [], top_ranks(rec, case["name"])
    for base in bases_of(rec.of(case["name"])):
        runs = one_per_format(rec, case["name"], n, base)
        names = [t for t in ("o",) + GRADIENTS if any(finite(v) and v > 0 for r in runs.values() for v in ((tensor(r, t) or {}).get("windows") or {"rel": []})["rel"])]    # exact cases have no error to draw
        if n < 2 or not names or base == "fp64":
            continue
        cap = (f"{n} ranks. Left: relative error of o and of each gradient in windows of {window(runs, names)} tokens, one line per format of the M chain; "
               "grey band: the same computation on one rank; vertical lines: rank boundaries. Right: the error of each whole rank; bars: fp32 chain, markers: the other formats. "
               "o is read left to right (the state flows to later ranks), gradients right to left.")
        out.append(Plot(f"tokens-{case['name']}-{base}", f"Error over tokens and ranks, {case['name']}, base {base}", cap,
                        lambda runs=runs, base=base, names=names: draw_tokens(rec, case, n, base, runs, names)))
    return out


def window(runs, names):
    return next(tensor(r, t)["windows"]["size"] for r in runs.values() for t in names if (tensor(r, t) or {}).get("windows"))


def draw_tokens(rec, case, n, base, runs, names):
    single = next(iter(one_per_format(rec, case["name"], 1, base).values()), None)
    fig, axs = style.inch_grid(len(names), 2, 1.12, left=0.62, right=0.12, wgap=0.32, hgap=0.2, top=0.72, bottom=0.42, ratios=[2.3, 1], sharey="row")
    handles = {}
    for row, name in zip(axs, names):
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


def token_panel(ax, case, n, name, runs, single, handles):
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
            ax.plot(x, y, color=c, linestyle=dash, linewidth=0.9, marker=m, markersize=2.6, markevery=(marker_phase(fmt), max(len(x) // 8, 1)))
    for r in range(1, n):
        ax.axvline(r * T / n, color=GREY, linewidth=0.6, linestyle=(0, (4, 3)), zorder=0.5)
    ax.grid(axis="x", visible=False)
    ax.set_xlim(0, T or None)
    style.plain_ticks(ax.xaxis, [r * T // n for r in range(0, n + 1, max(1, n // 4))])


def marker_phase(fmt):
    """Markers of different formats stand at different windows, so that lines on top of each other can be told apart."""
    return list(style.LOOK).index(fmt) * 2 if fmt in style.LOOK else 1


def mids(w, T):
    s = w["size"]
    x = [(min((i + 1) * s, T) + i * s) / 2 if T else (i + 0.5) * s for i in range(len(w["rel"]))]
    return x, [v if finite(v) and v > 0 else np.nan for v in w["rel"]]


def rank_panel(ax, n, name, runs, handles):
    ref = "fp32" if "fp32" in runs else next(iter(runs))
    others = [f for f in runs if f != ref]
    for fmt, run in runs.items():
        e = [v if finite(v) and v > 0 else np.nan for v in (tensor(run, name) or {}).get("per_rank") or [None] * n]
        c, dash, m = style.look(fmt)
        if fmt == ref:
            ax.bar(range(len(e)), e, width=0.86, color="#d9d9d9", edgecolor=GREY, linewidth=0.5, zorder=1)
        else:
            at = [r + (others.index(fmt) + 0.5) / len(others) * 0.8 - 0.4 for r in range(len(e))]
            ax.plot(at, e, color=c, marker=m, linestyle="none", markersize=3.2, markeredgewidth=0)
        handles.setdefault(f"{short(fmt)} chain", plt.Line2D([], [], color=c, linestyle=dash, marker=m, linewidth=1.1, markersize=3.6))
    ax.grid(axis="x", visible=False)
    ax.set_xlim(-0.7, n - 0.3)
    style.plain_ticks(ax.xaxis, range(n))


def fit_rows(ax, name, runs, single):
    """Limits from the data of both panels of the row, at least half a decade, so that bars start on a stated line."""
    vals = []
    for run in list(runs.values()) + ([single] if single else []):
        t = tensor(run, name) or {}
        vals += [v for v in (t.get("windows") or {"rel": []})["rel"] + (t.get("per_rank") or []) if finite(v) and v > 0]
    lo, hi = math.log10(min(vals)), math.log10(max(vals))
    mid, half = (lo + hi) / 2, max((hi - lo) / 2 * 1.12, 0.3)
    ax.set_ylim(10.0 ** (mid - half), 10.0 ** (mid + half))
    inside = lambda ms: [m * 10.0 ** e for e in range(math.floor(mid - half), math.ceil(mid + half) + 1) for m in ms if mid - half <= math.log10(m) + e <= mid + half]
    ticks = next(t for t in (inside((1,)), inside((1, 2, 5)), inside((1, 2, 3, 5, 7))) if len(t) >= 3 or len(t) == len(inside((1, 2, 3, 5, 7))))
    ax.yaxis.set_major_locator(style.matplotlib.ticker.FixedLocator(ticks[::max(1, math.ceil(len(ticks) / 4))]))
    ax.yaxis.set_major_formatter(style.FuncFormatter(lambda v, _: sci(v, 1)))
    ax.yaxis.set_minor_locator(style.NullLocator())


# ---- 4. error over bound ----------------------------------------------------------------------------------------------------------------

def map_plots(rec):
    return overview_map(rec) + rank_maps(rec)


def tensors_of(runs):
    return in_order([t["name"] for r in runs for t in r["tensors"]], TENSOR_ORDER)


def overview_rows(rec):
    """[(label, [runs])] one row per recurrence or conv case and base."""
    out = []
    for c in rec.cases.values():
        runs = [r for r in rec.of(c["name"]) if r["tensors"]]
        for b in bases_of(runs) or ([None] if runs else []):
            some = [r for r in runs if r["policy"].get("base") == b]
            if some and c["op"] != "chain":
                out.append((c["name"] + (f"  {b}" if b else ""), some))
    return out


def overview_map(rec):
    rows = overview_rows(rec)
    if not rows:
        return []
    cap = ("Error over bound, the largest over all runs, ranks and heads of a case and base policy. 1 is the bound: below it the number format explains the error; failures are "
           "white on black, framed. Dotted: passes, but every such bound exceeds the tensor's own norm, so that it proves nothing. Hatched: unjudged or skipped; blank: the case has no such tensor.")
    out = []
    for part in range(0, len(rows), 40):
        some = rows[part:part + 40]
        out.append(Plot("bounds-cases" + (f"-{part // 40 + 1}" if len(rows) > 40 else ""), "Error over bound, all cases", cap, lambda some=some: draw_overview(some), lambda some=some: overview_table(some)))
    return out


def cell(t, rank=None):
    """(kind, ratio) of a tensor, or of one rank of it. kind: 'fail', 'pass', 'empty' (passes under a bound above its own norm), 'hatch' (unjudged,
    skipped) or None (no such tensor)."""
    if t is None or (rank is not None and at(t.get("per_rank"), rank) is None):
        return None, None
    x = t.get("ratio") if rank is None else at(t.get("per_rank_ratio"), rank)
    here = rank is None or x is None or not x <= 1 or (t.get("failed") or {}).get("rank") == rank
    if t["verdict"] == "fail" and here:                          # of whichever tier
        return "fail", math.nan if x is None else x
    if t["verdict"] in ("unjudged", "skipped") or x is None:
        return "hatch", None
    return ("empty" if (vacuous(t) if rank is None else at(t["per_rank"], rank) > x) else "pass"), x


def at(values, i):
    return values[i] if values is not None and i < len(values) else None


RANK_OF_KIND = ("hatch", "empty", "pass", "fail")                      # which of several cells stands for all


def merge_cells(cells):
    """The worst of several, (kind, ratio, run): failures first, then the largest ratio under a useful bound; a passing nan or inf (on purpose) counts least."""
    cells = [c for c in cells if c[0]]
    return max(cells, key=lambda c: (RANK_OF_KIND.index(c[0]), c[1] if finite(c[1]) else -1.0), default=(None, None, None))


def overview_grid(rows):
    """(tensors, rows of (kind, ratio, run))"""
    names = tensors_of([r for _, rs in rows for r in rs])
    return names, [[merge_cells([(*cell(tensor(r, t)), r) for r in rs]) for t in names] for _, rs in rows]


def overview_table(rows):
    names, grid = overview_grid(rows)
    return [heat_table("", None, names, [(k, line) for (k, _), line in zip(rows, grid)])]


def rank_tables(runs):
    """One table a run; a click leads to the run."""
    out = []
    for run in runs:
        names = tensors_of([run])
        out.append(heat_table(run["id"], run["n"], names, [(f"rank {r}", [(*cell(tensor(run, t), r), None) for t in names]) for r in range(run["ranks"])]))
    return out


def heat_table(caption, run, names, rows):
    """Cells as in heat(): class h0 to h10 by shade, hf fail, he empty, hh hatch; run: number of the one that the caption leads to, or None."""
    def one(kind, x, to):
        text = "" if kind in (None, "hatch") else ratio_text(x)
        look = {"fail": "hf", "empty": "he", "hatch": "hh"}.get(kind) or (f"h{round(10 * level(x))}" if kind else "")
        return look, text, to["n"] if to else None
    return {"caption": caption, "run": run, "names": names, "rows": [(label, [one(*c) for c in line]) for label, line in rows]}


def draw_overview(rows):
    names, grid = overview_grid(rows)
    fig, axs = style.inch_grid(1, 1, 0.185 * len(rows), left=1.75, right=max(0.1, style.WIDTH - 1.75 - CELL * len(names)), top=0.55, bottom=0.62)
    heat(axs[0][0], grid, names, [k for k, _ in rows], size=6.5 if len(names) <= 16 else 5.5)
    scale_key(fig)
    return fig


CMAP = style.matplotlib.colors.LinearSegmentedColormap.from_list("ratio", ["#ffffff", "#dfe9f3", "#9ec3e0", "#4a90c2", "#14507f"])
LOWEST = -5                                                           # decades below the bound at which the scale ends


def shade(x):
    """(fill, ink) of a ratio: light far below the bound, dark near it; lightness is monotone, so grey prints keep the order."""
    if not finite(x):
        return "#ffffff", INK
    z = level(x)
    return CMAP(z), "#ffffff" if z > 0.66 else INK


def level(x):
    """Place of a ratio on the scale: 0 at 10^LOWEST and below, 1 at the bound."""
    return 0.0 if not finite(x) or x <= 0 else min(max(1 - math.log10(x) / LOWEST, 0), 1)


def shades():
    """CSS of the classes of heat_table."""
    hexes = [style.matplotlib.colors.to_hex(CMAP(i / 10)) for i in range(11)]
    return "\n".join(f".h{i} {{ background: {c};{' color: #fff;' if i > 6 else ''} }}" for i, c in enumerate(hexes))


def ratio_text(x):
    if not finite(x):
        return sci(x)
    return "0" if x == 0 else (f"{x:.2f}"[1:] if x < 0.995 else near(x)) if x >= 0.01 else sci(x, 1)


def draw_cell(ax, x, y, width, kind, ratio=None):
    look = {"fail": {"facecolor": "#000000", "edgecolor": "#D55E00", "linewidth": 1.8, "zorder": 3},
            "empty": {"facecolor": "#ffffff", "edgecolor": "#d2d2d2", "linewidth": 0.5, "hatch": "....", "zorder": 1},
            "hatch": {"facecolor": "#ffffff", "edgecolor": "#aaaaaa", "linewidth": 0, "hatch": "////"}}.get(kind)
    ax.add_patch(style.matplotlib.patches.Rectangle((x, y), width, 1, clip_on=False, **(look or {"facecolor": shade(ratio)[0], "edgecolor": "white", "linewidth": 0.6, "zorder": 2})))


CELL = 0.46                                                           # widest cell, inches


def heat(ax, grid, cols, rows, size):
    for i, line in enumerate(grid):
        for j, (kind, x, *_) in enumerate(line):
            if kind:
                draw_cell(ax, j, i, 1, kind, x)
            if kind and kind != "hatch":
                ink = {"fail": "#ffffff", "empty": GREY}.get(kind) or shade(x)[1]
                ax.text(j + 0.5, i + 0.52, ratio_text(x), ha="center", va="center", fontsize=size, color=ink, zorder=4, fontweight="bold" if kind == "fail" else "normal")
    ax.set_xlim(0, len(cols))
    ax.set_ylim(len(rows), 0)
    ax.grid(False)
    for s in ax.spines.values():
        s.set_visible(False)
    ax.set_xticks([j + 0.4 for j in range(len(cols))], cols, fontsize=7, rotation=35, ha="left", rotation_mode="anchor")
    ax.set_yticks([i + 0.5 for i in range(len(rows))], rows, fontsize=7)
    ax.tick_params(length=0, pad=2)
    ax.xaxis.tick_top()


def scale_key(fig):
    """Strip of the shades that the cells use, at the foot of the figure."""
    h = fig.get_size_inches()[1]
    ax = fig.add_axes([0.25, 0.3 / h, 0.62, 0.13 / h])
    n = 11
    for i in range(n):
        draw_cell(ax, i, 0, 1, "pass", 10.0 ** (LOWEST * (1 - i / (n - 1))))
    for i, kind in enumerate(("fail", "empty", "hatch")):
        draw_cell(ax, n + 1.5 + 3.5 * i, 0, 2, kind)
    ax.set_xlim(0, n + 12)
    ax.set_ylim(0, 1)
    ax.set_xticks([2 * i + 0.5 for i in range(6)] + [n + 2.5 + 3.5 * i for i in range(3)], [f"1e{i + LOWEST:.0f}" for i in range(5)] + ["1", "fail", "bound > 1", "unjudged"], fontsize=7)
    ax.set_yticks([])
    ax.tick_params(length=0, pad=2)
    ax.grid(False)
    for s in ax.spines.values():
        s.set_visible(False)
    ax.text(-0.4, 0.5, "error / bound", ha="right", va="center", fontsize=7, color=INK)


def worst_run(runs):
    """The run whose worst tensor is nearest to its bound; on a tie, the one with more ranks."""
    return max(runs, key=lambda r: (run_severity(r), r["ranks"]), default=None)


def run_severity(run):
    t = worst_tensor(run)
    return severity(t) if t else (False, False, -2.0)


def map_choice(rec, most=8):
    """Runs for the rank x tensor maps: worst run of each head and base at the most ranks, then the worst split run of each other case and base."""
    split = lambda c, b, n=1: [r for r in rec.of(c["name"], base=b) if r["ranks"] > 1 and r["ranks"] >= n and any(t.get("per_rank_ratio") for t in r["tensors"])]
    most_split = lambda c, b: split(c, b, top_ranks(rec, c["name"]))
    first = [worst_run(most_split(c, b)) for c in heads(rec) for b in bases_of(rec.of(c["name"])) if most_split(c, b)]
    rest = [worst_run(split(c, b)) for c in judged_recurrences(rec) if c not in heads(rec) and not without_error(rec, c) for b in bases_of(rec.of(c["name"])) if split(c, b)]
    rest.sort(key=run_severity, reverse=True)
    return (first + rest)[:most]


def rank_maps(rec):
    runs = map_choice(rec)
    if not runs:
        return []
    cap = ("Error over bound, rank by rank, for the run of each case and base policy that comes closest to a bound (the heads of the figures above: among the runs with the most ranks). Cells as in the figure before; "
           "blank: the rank has no such tensor (rank 0 starts from no S_in, the last rank ends in no dS_out).")
    out = []
    for part in range(0, len(runs), 4):
        some = runs[part:part + 4]
        out.append(Plot("bounds-ranks" + (f"-{part // 4 + 1}" if len(runs) > 4 else ""), "Error over bound, rank by tensor", cap, lambda some=some: draw_rank_maps(some), lambda some=some: rank_tables(some)))
    return out


def draw_rank_maps(runs):
    heights = [0.17 * r["ranks"] for r in runs]
    top, gap, bottom = 0.72, 0.88, 0.62
    h = top + sum(heights) + gap * (len(runs) - 1) + bottom
    fig = plt.figure(figsize=(style.WIDTH, h))
    y = h - top
    for run, hh in zip(runs, heights):
        y -= hh
        names = tensors_of([run])
        ax = fig.add_axes([0.75 / style.WIDTH, y / h, min(style.WIDTH - 0.85, CELL * len(names)) / style.WIDTH, hh / h])
        grid = [[cell(tensor(run, t), r) for t in names] for r in range(run["ranks"])]
        heat(ax, grid, names, [f"rank {r}" for r in range(run["ranks"])], size=6.5)
        ax.set_title(run["id"], fontsize=7.5, pad=6)
        y -= gap
    scale_key(fig)
    return fig
