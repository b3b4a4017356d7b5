"""Draws the figures in parallel, writes each as PNG and PDF and shortens its SVG for the page."""

import io
import os
import re
from typing import Any

from fontTools.subset import Options
from matplotlib.figure import Figure

from draw import forks
from draw.plot import Plot
from draw.plots import plots
from draw.style import plt
from read import files
from read.record import Record

PNG_DPI = 180
# Text of a PDF is laid out already: to shorten these tables took half of the time of its fonts.
Options._drop_tables_default = [*Options._drop_tables_default, "GDEF", "GPOS", "GSUB"]


def draw_all(rec: Record, folder: str) -> list[tuple[Plot, Any]]:
    """[(plot, what the page shows: its tables, or its picture as SVG)]"""
    all_plots = plots(rec)
    os.makedirs(folder, exist_ok=True)
    workers = min(len(all_plots), os.cpu_count() or 1, 8)
    drawn = forks.results(workers if workers > 1 else 0, all_plots, _draw)
    for plot, (png, pdf, _) in zip(all_plots, drawn, strict=True):
        files.write(os.path.join(folder, plot.name + ".png"), png)
        files.write(os.path.join(folder, plot.name + ".pdf"), pdf)
    return [(plot, shown) for plot, (_, _, shown) in zip(all_plots, drawn, strict=True)]


def _draw(plot: Plot) -> tuple[bytes, bytes, Any]:
    """(PNG, PDF, what the page shows)"""
    fig = plot.draw()
    png = saved(fig, "png", dpi=PNG_DPI)
    pdf = saved(fig, "pdf", metadata={"CreationDate": None, "Title": plot.title})
    shown = plot.table() if plot.table else svg(fig)
    plt.close(fig)
    return png, pdf, shown


def saved(fig: Figure, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    fig.savefig(out, format=kind, **options)
    return out.getvalue()


def svg(fig: Figure) -> str:
    """The picture for the page."""
    none = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    return shortened(saved(fig, "svg", metadata=none).decode())


def shortened(text: str) -> str:
    """The picture in a third of the bytes. Coordinates are in 0.1 pt (0.01 below 10) instead of
    1e-6. Styles and names occur once each. Comments, metadata, unused names and rotations by 0 are
    removed. Single quotes: it is percent-encoded into an attribute."""
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
