"""How a map of error over limit looks: as a figure, and as a table of the page."""

import math
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from draw import style
from draw.style import GREY, INK, plt
from read.record import Run
from say.names import finite, near, sci

CMAP = style.matplotlib.colors.LinearSegmentedColormap.from_list(
    "ratio", ["#ffffff", "#dfe9f3", "#9ec3e0", "#4a90c2", "#14507f"]
)


LOWEST = -5  # decades below the limit at which the scale ends


def shade(x: float | None) -> tuple[Any, str]:
    """(fill, ink) of a ratio: light far below the limit, dark near it; lightness is monotone, so
    grey
    prints keep the order."""
    if not finite(x):
        return "#ffffff", INK
    fill = CMAP(level(x))
    return fill, ink_on(fill)


def ink_on(fill: Any) -> str:
    """White or black, whichever stands out more: 4.58:1 (WCAG's contrast) on any fill, at least."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in fill[:3]]
    luminance = sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return "#ffffff" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 else "#000000"


def level(x: float | None) -> float:
    """Place of a ratio on the scale: 0 at 10^LOWEST and below, 1 at the limit."""
    return 0.0 if not finite(x) or x <= 0 else min(max(1 - math.log10(x) / LOWEST, 0), 1)


def shades() -> str:
    """CSS of the classes of heat_table."""
    fills = [CMAP(i / 10) for i in range(11)]
    to_hex = style.matplotlib.colors.to_hex
    rule = ".h{} {{ background: {}; color: {}; }}\n"
    return "".join(rule.format(i, to_hex(c), ink_on(c)) for i, c in enumerate(fills))


def ratio_text(x: float | None) -> str:
    if not finite(x):
        return sci(x)
    return "0" if x == 0 else (f"{x:.2f}"[1:] if x < 0.995 else near(x)) if x >= 0.01 else sci(x, 1)


def draw_cell(
    ax: Axes, x: float, y: float, width: float, kind: str | None, ratio: float | None = None
) -> None:
    look = {
        "fail": {"facecolor": "#000000", "edgecolor": "#D55E00", "linewidth": 1.8, "zorder": 3},
        "empty": {
            "facecolor": "#ffffff",
            "edgecolor": "#d2d2d2",
            "linewidth": 0.5,
            "hatch": "....",
            "zorder": 1,
        },
        "hatch": {"facecolor": "#ffffff", "edgecolor": "#aaaaaa", "linewidth": 0, "hatch": "////"},
    }.get(kind)
    ax.add_patch(
        style.matplotlib.patches.Rectangle(
            (x, y),
            width,
            1,
            clip_on=False,
            **(
                look
                or {
                    "facecolor": shade(ratio)[0],
                    "edgecolor": "white",
                    "linewidth": 0.6,
                    "zorder": 2,
                }
            ),
        )
    )


CELL = 0.46  # widest cell, inches


def heat(ax: Axes, grid: list[Any], cols: list[str], rows: list[str], size: float) -> None:
    for i, line in enumerate(grid):
        for j, (kind, x, *_) in enumerate(line):
            if kind:
                draw_cell(ax, j, i, 1, kind, x)
            if kind and kind != "hatch":
                ink = {"fail": "#ffffff", "empty": GREY}.get(kind) or shade(x)[1]
                ax.text(
                    j + 0.5,
                    i + 0.52,
                    ratio_text(x),
                    ha="center",
                    va="center",
                    fontsize=size,
                    color=ink,
                    zorder=4,
                    fontweight="bold" if kind == "fail" else "normal",
                )
    ax.set_xlim(0, len(cols))
    ax.set_ylim(len(rows), 0)
    ax.grid(False)
    for s in ax.spines.values():
        s.set_visible(False)
    ax.set_xticks(
        [j + 0.4 for j in range(len(cols))],
        cols,
        fontsize=7,
        rotation=35,
        ha="left",
        rotation_mode="anchor",
    )
    ax.set_yticks([i + 0.5 for i in range(len(rows))], rows, fontsize=7)
    ax.tick_params(length=0, pad=2)
    ax.xaxis.tick_top()


def scale_key(fig: Figure) -> None:
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
    ax.set_xticks(
        [2 * i + 0.5 for i in range(6)] + [n + 2.5 + 3.5 * i for i in range(3)],
        [f"1e{i + LOWEST:.0f}" for i in range(5)] + ["1", "fail", "bound > 1", "unjudged"],
        fontsize=7,
    )
    ax.set_yticks([])
    ax.tick_params(length=0, pad=2)
    ax.grid(False)
    for s in ax.spines.values():
        s.set_visible(False)
    ax.text(-0.4, 0.5, "error / limit", ha="right", va="center", fontsize=7, color=INK)


def draw_overview(names: list[str], rows: list[str], grid: list[Any]) -> Figure:
    fig, axs = style.inch_grid(
        1,
        1,
        0.185 * len(rows),
        left=1.75,
        right=max(0.1, style.WIDTH - 1.75 - CELL * len(names)),
        top=0.55,
        bottom=0.62,
    )
    heat(axs[0][0], grid, names, rows, size=6.5 if len(names) <= 16 else 5.5)
    scale_key(fig)
    return fig


def draw_rank_maps(maps: list[tuple[str, list[str], list[Any]]]) -> Figure:
    """One map a run: (its ID, tensors, a line of cells a rank)."""
    heights = [0.17 * len(grid) for _, _, grid in maps]
    top, gap, bottom = 0.72, 0.88, 0.62
    h = top + sum(heights) + gap * (len(maps) - 1) + bottom
    fig = plt.figure(figsize=(style.WIDTH, h))
    y = h - top
    for (title, names, grid), high in zip(maps, heights, strict=True):
        y -= high
        width = min(style.WIDTH - 0.85, CELL * len(names))
        ax = fig.add_axes([0.75 / style.WIDTH, y / h, width / style.WIDTH, high / h])
        heat(ax, grid, names, [f"rank {r}" for r in range(len(grid))], size=6.5)
        ax.set_title(title, fontsize=7.5, pad=6)
        y -= gap
    scale_key(fig)
    return fig


def heat_table(caption: str, run: int | None, names: list[str], rows: list[Any]) -> dict[str, Any]:
    """The same cells as a table. Classes: h0 to h10 by shade, hf fail, he empty, hh hatch. A failed
    cell leads to its run, the caption to run (a number, or None)."""

    def one(kind: str | None, x: float | None, to: Run | None) -> tuple[str, str, int | None]:
        text = {None: "", "hatch": "–"}.get(kind, ratio_text(x))
        look = {"fail": "hf", "empty": "he", "hatch": "hh"}.get(kind) or (
            f"h{round(10 * level(x))}" if kind else ""
        )
        return look, text, to["n"] if to and kind == "fail" else None

    body = [(label, [one(*c) for c in line]) for label, line in rows]
    return {"caption": caption, "run": run, "names": names, "rows": body}
