"""Figure of errors over many records: a panel a tensor, each line error over its first value."""

import math
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from draw.style import inch_grid, look, plain_ticks

COLUMNS = 3
TICKS = (1e-6, 1e-4, 0.01, 0.1, 0.5, 1, 2, 10, 100, 1e4, 1e6)
Series = list[float | None]
Panel = tuple[str, list[tuple[str, Series]]]


def draw_history(panels: list[Panel], labels: list[str]) -> Figure:
    rows = math.ceil(len(panels) / COLUMNS)
    fig, axs = inch_grid(rows, COLUMNS, 1.25, hgap=0.75, wgap=0.55, bottom=0.75)
    flat = list(axs.flat)
    for i, (ax, (name, runs)) in enumerate(zip(flat, panels, strict=False)):
        for run_id, values in runs:
            _line(ax, run_id, values)
        ax.set_title(name)
        if i % COLUMNS == 0:
            ax.set_ylabel("error / first error")
        _scales(ax, labels)
    for ax in flat[len(panels) :]:
        ax.set_visible(False)
    return fig


def _line(ax: Axes, run_id: str, values: Series) -> None:
    at = [(i, v) for i, v in enumerate(values) if v is not None and math.isfinite(v) and v > 0]
    first = at[0][1] if at else 1.0
    colour, dash, mark = look(
        next((p[6:] for p in run_id.split(",") if p.startswith("chain=")), "")
    )
    how: dict[str, Any] = {"color": colour, "linestyle": dash, "marker": mark}
    ax.plot([i for i, _ in at], [v / first for _, v in at], markersize=3, linewidth=1, **how)


def _scales(ax: Axes, labels: list[str]) -> None:
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    low, high = min(low, 0.5), max(high, 2)
    ax.set_ylim(low, high)
    plain_ticks(ax.yaxis, [t for t in TICKS if low <= t <= high], "{:g}")
    ax.set_xlim(-0.3, len(labels) - 0.7)
    step = max(1, math.ceil(len(labels) / 8))
    some = range(0, len(labels), step)
    ax.set_xticks(some, [labels[i] for i in some], rotation=60, ha="right", fontsize=6)
