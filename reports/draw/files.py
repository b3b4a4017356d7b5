"""Draws the figures in parallel, writes each as PNG and PDF and shortens its SVG for the page."""

import io
import multiprocessing
import os
import re
from typing import Any

from matplotlib.figure import Figure
from read import files
from read.record import Record

from draw.plot import Plot
from draw.plots import plots
from draw.style import plt

PNG_DPI = 180
_plots: list[Plot] = []  # of this run: workers inherit record and closures over the fork


def draw_all(rec: Record, folder: str) -> list[tuple[Plot, Any]]:
    """[(plot, what the page shows: its tables, or its picture as SVG)]"""
    _plots[:] = plots(rec)
    os.makedirs(folder, exist_ok=True)
    jobs = [(i, folder) for i in range(len(_plots))]
    workers = min(len(jobs), os.cpu_count() or 1, 8)
    if workers < 2:
        return list(zip(_plots, map(_draw, jobs), strict=True))
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        return list(zip(_plots, pool.map(_draw, jobs, chunksize=1), strict=True))


def _draw(job: tuple[int, str]) -> Any:
    plot, folder = _plots[job[0]], job[1]
    fig = plot.draw()
    stem = os.path.join(folder, plot.name)
    files.write(stem + ".png", saved(fig, "png", dpi=PNG_DPI))
    about = {"CreationDate": None, "Title": plot.title}
    files.write(stem + ".pdf", saved(fig, "pdf", metadata=about))
    shown = plot.table() if plot.table else svg(fig)
    plt.close(fig)
    return shown


def saved(fig: Figure, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    fig.savefig(out, format=kind, **options)
    return out.getvalue()


def svg(fig: Figure) -> str:
    """The same picture in fewer bytes: coordinates in 0.1 pt (0.01 below 10) instead of 1e-6, no
    comments, metadata or unused ids, single quotes (it is percent-encoded into an attribute)."""
    none = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    text = saved(fig, "svg", metadata=none).decode()
    text = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.S)
    text = re.sub(
        r' (?:d|x|y)="[^"]*"|translate\([^)]*\)',
        lambda m: re.sub(r"(\d\d\.\d|\.\d\d)\d+", r"\1", m[0]),
        text,
    )
    text = re.sub(r' id="[a-zA-Z0-9]+_[0-9_]+"', "", text).replace("xlink:href", "href")
    text = re.sub(r"\s+", " ", text.replace("'", "").replace('"', "'"))
    return re.sub(r">\s+<", "><", text)


def remove_old(folder: str, old: set[str], figures: list[tuple[Plot, Any]]) -> None:
    """Figures of an earlier record in the same folder would be taken for this one's."""
    for name in old - {f"{p.name}.{e}" for p, _ in figures for e in ("png", "pdf")}:
        if os.path.lexists(os.path.join(folder, name)):
            os.remove(os.path.join(folder, name))
