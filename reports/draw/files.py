"""Draws the figures in parallel, writes each as PNG and PDF and shortens its SVG for the page."""

import io
import multiprocessing
import os
import re
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from matplotlib.figure import Figure

from draw.plot import Plot
from draw.plots import plots
from draw.style import plt
from read import files
from read.record import Record

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
    fork = multiprocessing.get_context("fork")
    try:
        with ProcessPoolExecutor(workers, mp_context=fork) as pool:
            return list(zip(_plots, pool.map(_draw, jobs), strict=True))
    except BrokenProcessPool:  # a worker was killed: a multiprocessing.Pool would wait for ever
        return list(zip(_plots, map(_draw, jobs), strict=True))


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
    """The picture for the page."""
    none = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    return shortened(saved(fig, "svg", metadata=none).decode())


def shortened(text: str) -> str:
    """The same picture in a third of the bytes: coordinates in 0.1 pt (0.01 below 10) instead of
    1e-6, styles and names once each, no comments, metadata, unused names or turns by nothing.
    Single
    quotes: it is percent-encoded into an attribute."""
    text = re.sub(
        r"<!--.*?-->|<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.S
    )
    text = re.sub(r' transform="rotate\(-?0 [^)]*\)"', "", text)
    text = re.sub(
        r' (?:d|x|y|transform|width|height)="[^"]*"',
        lambda m: re.sub(r"(\d\d\.\d|\.\d\d)\d+", r"\1", m[0]),
        text,
    )
    text = _once(text, r"(?:m|p|C)[0-9a-f_]{6,}", "m")  # of markers, clips and collections
    used = set(re.findall(r"#([\w.-]+)", text))
    text = re.sub(r' id="([\w.-]+)"', lambda m: m[0] if m[1] in used else "", text)
    styles: dict[str, str] = {}
    text = re.sub(
        r' style="([^"]*)"',
        lambda m: f' class="{styles.setdefault(re.sub(": ", ":", m[1]), f"c{len(styles)}")}"',
        text,
    )
    rules = "".join(f".{name}{{{rule}}}" for rule, name in styles.items())
    text = text.replace("</style>", rules + "</style>", 1).replace("xlink:href", "href")
    text = re.sub(r"<g>\s*(<(?:path|use|text)[^>]*(?:/>|>[^<]*</text>))\s*</g>", r"\1", text)
    text = re.sub(r"\s+", " ", text.replace("'", "").replace('"', "'"))
    return re.sub(r">\s+<", "><", text)


def _once(text: str, pattern: str, prefix: str) -> str:
    """Names of a pattern, in ids and where they are used, by number."""
    number: dict[str, str] = {}
    uses = rf'((?: id="|href="#|url\(#)){pattern}'
    return re.sub(
        uses, lambda m: m[1] + number.setdefault(m[0][len(m[1]) :], f"{prefix}{len(number)}"), text
    )


def remove_old(folder: str, old: set[str], figures: list[tuple[Plot, Any]]) -> None:
    """Figures of an earlier record in the same folder would be taken for this one's."""
    for name in old - {f"{p.name}.{e}" for p, _ in figures for e in ("png", "pdf")}:
        if os.path.lexists(os.path.join(folder, name)):
            os.remove(os.path.join(folder, name))
