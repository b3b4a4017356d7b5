"""Style of figures: Okabe-Ito colours, one marker and dash per format (so that grey prints and
colour-blind readers lose nothing). Labels stand at line ends instead of legends where lines end
apart."""

import math
from collections.abc import Iterable
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# a matplotlibrc of the present folder or of the user does not change a report, nor run TeX
matplotlib.rcdefaults()
matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator  # noqa: E402

WIDTH = 7.1  # inches: A4 less 15 mm on either side
INK, GREY = "#1a1a1a", "#666666"
# text.parse_math: names of cases and tensors are no formulas; the two axis labels that are say so.
plt.rcParams.update(
    {
        "font.family": "DejaVu Sans",
        "font.size": 8,
        "axes.labelsize": 8,
        "axes.titlesize": 8.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlepad": 5,
        "xtick.labelsize": 7.5,
        "ytick.labelsize": 7.5,
        "legend.fontsize": 7.5,
        "axes.linewidth": 0.6,
        "axes.edgecolor": GREY,
        "axes.labelcolor": INK,
        "xtick.color": GREY,
        "ytick.color": GREY,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
        "xtick.major.width": 0.6,
        "ytick.major.width": 0.6,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#e4e4e4",
        "grid.linewidth": 0.5,
        "axes.axisbelow": True,
        "lines.linewidth": 1.3,
        "lines.markersize": 4,
        "legend.frameon": False,
        "text.parse_math": False,
        "mathtext.fontset": "dejavusans",
        "svg.hashsalt": "deltaproof",
        "svg.fonttype": "none",  # text stays text: smaller, and selectable
        "pdf.fonttype": 42,
        "hatch.linewidth": 0.5,
        "figure.dpi": 100,
    }
)

#           colour     dash                     marker
LOOK = {
    "fp64": ("#000000", (0, (1, 1)), "."),
    "fp32": ("#0072B2", "-", "o"),
    "tf32x3": ("#56B4E9", (0, (5, 2)), "s"),
    "tf32": ("#009E73", (0, (6, 1.5, 1, 1.5)), "^"),
    "tf32rz": ("#D55E00", "-", "v"),
    "bf16": ("#B07D00", (0, (3, 1.2)), "D"),
    "bf16st": ("#CC79A7", (0, (1.2, 1)), "X"),
}
SPARE = [("#333333", (0, (8, 2)), "P"), ("#777777", (0, (2, 2)), "*"), ("#999999", "-", "h")]


def look(fmt: str) -> tuple[Any, ...]:
    """A format added later gets a grey look of its own, the same in every figure."""
    return LOOK.get(fmt) or SPARE[sum(fmt.encode()) % len(SPARE)]


def line_style(fmt: str, **over: Any) -> dict[str, Any]:
    c, dash, m = look(fmt)
    return {
        "color": c,
        "linestyle": dash,
        "marker": m,
        "markeredgecolor": "white",
        "markeredgewidth": 0.3,
        **over,
    }


def bound_style(fmt: str) -> dict[str, Any]:
    c, _, m = look(fmt)
    return {
        "color": c,
        "linestyle": "-",
        "linewidth": 0.5,
        "marker": m,
        "markersize": 3.2,
        "markerfacecolor": "white",
        "markeredgecolor": c,
        "markeredgewidth": 0.6,
        "zorder": 1.5,
    }


def plain_ticks(axis: Any, values: Iterable[float], text: str = "{:,.0f}") -> None:
    axis.set_major_locator(matplotlib.ticker.FixedLocator(list(values)))
    axis.set_major_formatter(FuncFormatter(lambda v, _: text.format(v)))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def power_of_ten(x: float) -> str:
    """10⁻³, in characters: labels are no formulas here."""
    return "10" + f"{round(math.log10(x))}".translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def decades(axis: Any, most: int = 7) -> None:
    axis.set_major_locator(LogLocator(base=10, numticks=most))
    axis.set_major_formatter(FuncFormatter(lambda x, _: power_of_ten(x)))
    axis.set_minor_locator(NullLocator())


def spread(ys: list[float], gap: float) -> list[float]:
    """Positions nearest to ys (least squares) that keep their order and stand at least `gap` apart:
    pool adjacent violators."""
    order = sorted(range(len(ys)), key=lambda i: ys[i])
    blocks = []
    for n, i in enumerate(order):
        blocks.append([ys[i] - n * gap, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            b, a = blocks.pop(), blocks.pop()
            blocks.append([(a[0] * a[1] + b[0] * b[1]) / (a[1] + b[1]), a[1] + b[1]])
    flat = [v for v, k in blocks for _ in range(k)]
    out = [0.0] * len(ys)
    for n, i in enumerate(order):
        out[i] = flat[n] + n * gap
    return out


def end_labels(ax: Axes, ends: list[Any], size: float = 7, pad: float = 11) -> None:
    """ends: [(x, y, text, colour)]: writes each text right of the axes at the height of its line's
    end, without overlap, with a leader."""
    if not ends:
        return
    height = ax.get_window_extent().height / ax.figure.dpi * 72
    frac = [
        ax.transAxes.inverted().transform(ax.transData.transform((x, y)))[1] for x, y, _, _ in ends
    ]
    at = spread([min(max(f, 0), 1) for f in frac], size * 1.25 / height)
    low, high = min(at), max(at)
    shift = max(0, -low) - max(0, high - 1)
    for (x, y, text, colour), f in zip(ends, at, strict=True):
        ax.annotate(
            text,
            xy=(x, y),
            xycoords="data",
            xytext=(ax.bbox.width / ax.figure.dpi * 72 + pad, (f + shift) * height),
            textcoords="axes points",
            fontsize=size,
            color=INK,
            va="center",
            ha="left",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.6,
                "shrinkA": 1,
                "shrinkB": 2.5,
            },
        )


def legend_above(fig: Figure, handles: Any, labels: Any, ncol: int, y: float) -> None:
    fig.legend(
        handles,
        labels,
        loc="upper left",
        ncol=ncol,
        bbox_to_anchor=(0.06, y),
        handlelength=2.6,
        columnspacing=1.4,
        borderaxespad=0,
    )


def inch_grid(
    rows: list[Any],
    cols: list[str],
    panel_h: Any,
    left: Any = 0.62,
    right: Any = 0.15,
    top: Any = 0.3,
    bottom: Any = 0.45,
    wgap: Any = 0.5,
    hgap: Any = 0.55,
    ratios: Any = None,
    sharex: Any = False,
    sharey: Any = False,
) -> tuple[Figure, Any]:
    """A figure of WIDTH inches with all gaps in inches, so that nothing has to be measured
    afterwards."""
    h = top + bottom + rows * panel_h + (rows - 1) * hgap
    w = (WIDTH - left - right - (cols - 1) * wgap) / cols
    fig, axs = plt.subplots(
        rows,
        cols,
        figsize=(WIDTH, h),
        squeeze=False,
        sharex=sharex,
        sharey=sharey,
        gridspec_kw={
            "left": left / WIDTH,
            "right": 1 - right / WIDTH,
            "top": 1 - top / h,
            "bottom": bottom / h,
            "wspace": wgap / w,
            "hspace": hgap / panel_h,
            "width_ratios": ratios,
        },
    )
    return fig, axs
