"""The error of carried states over steps, a panel a case. A line is the head with the largest last
error in a format; thin: its sound bound."""

from typing import Any

from matplotlib.figure import Figure

from draw import style
from draw.style import plt

COLUMNS = 2
LOOK = {
    "fp32": style.LOOK["fp32"],
    "fp16": style.LOOK["tf32"],
    "bf16": style.LOOK["bf16"],
    "bf16rz": style.LOOK["tf32rz"],
    "bf16sr": style.LOOK["bf16st"],
    "fp8": ("#000000", (0, (1, 1)), "*"),
    "int8": style.LOOK["tf32x3"],
    "int8ef": ("#666666", "-", "P"),
}


def worst(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By format: the head whose last error is largest; an error of None overflowed."""
    out: dict[str, dict[str, Any]] = {}
    for r in rows:
        last = r["error"][-1] if r["error"] else 0
        best = out.get(r["format"])
        if best is None or (last or 1e300) > (best["error"][-1] or 1e300):
            out[r["format"]] = r
    return out


def panel(ax: Any, case: str, rows: list[dict[str, Any]]) -> None:
    ends = []
    for name, r in worst(rows).items():
        colour, dash, marker = LOOK.get(name, style.look(name))
        at = [(s, e, b) for s, e, b in zip(r["step"], r["error"], r["sound"], strict=True) if e]
        if not at:
            continue
        steps, errors, sound = zip(*at, strict=True)
        ax.plot(steps, errors, color=colour, linestyle=dash, marker=marker, markevery=8)
        ax.plot(steps, [b or float("nan") for b in sound], color=colour, linewidth=0.5)
        ends.append((steps[-1], errors[-1], name, colour))
    ax.set(xscale="log", yscale="log", title=case, ylabel="error of the state, of its norm")
    every = rows[0]["every"]
    ax.set_xlabel(f"steps of one token, stored after {'each' if every == 1 else f'every {every}'}")
    style.decades(ax.xaxis)
    style.decades(ax.yaxis)
    ax.axhline(1, color=style.GREY, linewidth=0.5)
    ax.figure.canvas.draw()
    style.end_labels(ax, ends)


def figure(found: list[dict[str, Any]]) -> Figure:
    cases: dict[str, list[dict[str, Any]]] = {}
    for r in found:
        cases.setdefault(r["case"], []).append(r)
    rows = -(-len(cases) // COLUMNS)
    fig, axes = plt.subplots(
        rows, min(COLUMNS, len(cases)), figsize=(style.WIDTH, 2.6 * rows), squeeze=False
    )
    fig.subplots_adjust(left=0.09, right=0.93, top=1 - 0.3 / (2.6 * rows), wspace=0.42, hspace=0.45)
    fig.subplots_adjust(bottom=0.45 / (2.6 * rows))
    for ax in axes.flat[len(cases) :]:
        ax.remove()
    for ax, (case, part) in zip(axes.flat, cases.items(), strict=False):
        panel(ax, case, part)
    return fig
