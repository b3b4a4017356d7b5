#!/usr/bin/env python3
"""report.py DIR: reads DIR/results.json (and DIR/museum.json, DIR/kernels.json where there are any), writes DIR/report.html, DIR/figures/*.png and *.pdf.

Reads records only; no verdict is decided here. Exit status 0, or 2 when the record cannot be read (the message names file and field)
or the report cannot be written.
"""
import io
import multiprocessing
import os
import re
import sys
from html import escape
from urllib.parse import quote

import record
from museum import load as load_museum, load_kernels

PNG_DPI = 180


def render(job):
    """Worker: draws one figure, writes its PNG and PDF, returns what the page shows: its table, or the SVG as an image."""
    plot, folder = PLOTS[job[0]], job[1]
    fig = plot.draw()
    stem = os.path.join(folder, plot.name)
    fig.savefig(stem + ".png", dpi=PNG_DPI)
    fig.savefig(stem + ".pdf", metadata={"CreationDate": None, "Title": plot.title})
    if plot.table:
        figures_module.plt.close(fig)
        return plot.table()
    svg = io.BytesIO()
    fig.savefig(svg, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    figures_module.plt.close(fig)
    uri = "data:image/svg+xml," + quote(shorten(svg.getvalue().decode()), safe=" !'()*+,-./;=<>?@[]^_`{|}~$")
    return f'<img src="{uri}" alt="{escape(plot.title)}">'


def shorten(svg):
    """The same picture in fewer bytes: coordinates in 0.1 pt (0.01 below 10) instead of 1e-6, short glyph names, no comments, metadata or unused ids, single
    quotes (the text is percent-encoded into an attribute)."""
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", svg[svg.index("<svg"):], flags=re.S)
    svg = re.sub(r' (?:d|x|y)="[^"]*"|translate\([^)]*\)', lambda m: re.sub(r"(\d\d\.\d|\.\d\d)\d+", r"\1", m[0]), svg)
    svg = re.sub(r' id="[a-zA-Z0-9]+_[0-9_]+"', "", svg).replace("DejaVuSans-", "D").replace("xlink:href", "href")
    svg = re.sub(r"<g>\s*(<g [^>]*>(?:\s*<use [^>]*>)*\s*</g>)\s*</g>", r"\1", svg)
    return re.sub(r">\s+<", "><", re.sub(r"\s+", " ", svg.replace("'", "").replace('"', "'")))


def draw_all(rec, folder):
    """[(plot, HTML)]; the plots are made before the fork, so that workers inherit record and closures."""
    global PLOTS, figures_module
    import figures as figures_module
    PLOTS = figures_module.plots(rec)
    os.makedirs(folder, exist_ok=True)
    jobs = [(i, folder) for i in range(len(PLOTS))]
    workers = min(len(jobs), os.cpu_count() or 1, 8)
    if workers < 2:
        return [(PLOTS[i], render((i, f))) for i, f in jobs]
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        return list(zip(PLOTS, pool.map(render, jobs, chunksize=1)))


def remove_old(folder, figures):
    """Figures of an earlier record in the same folder would be taken for this one's."""
    keep = {f"{p.name}.{e}" for p, _ in figures for e in ("png", "pdf")}
    for name in os.listdir(folder):
        if name.endswith((".png", ".pdf")) and name not in keep:
            os.remove(os.path.join(folder, name))


def main(argv):
    if len(argv) != 2 or argv[1].startswith("-"):
        print(__doc__.strip(), file=sys.stderr if argv[1:] not in (["-h"], ["--help"]) else sys.stdout)
        return 0 if argv[1:] in (["-h"], ["--help"]) else 2
    try:
        rec = record.load(os.path.join(argv[1], "results.json"))
        museum = load_museum(os.path.join(argv[1], "museum.json"))
        kernels = load_kernels(os.path.join(argv[1], "kernels.json"))
    except record.Malformed as e:
        print(f"report: {e}", file=sys.stderr)
        return 2
    try:
        from page import page
    except ImportError as e:
        print(f"report: {sys.executable} has no {e.name}: `make setup` finds or makes a Python that has it (or set DP_PYTHON)", file=sys.stderr)
        return 2
    folder = os.path.join(argv[1], "figures")
    out = os.path.join(argv[1], "report.html")
    try:
        figures = draw_all(rec, folder)
        remove_old(folder, figures)
        with open(out + ".part", "w", encoding="utf-8") as f:
            f.write(page(rec, figures, museum, kernels))
        os.replace(out + ".part", out)
    except OSError as e:
        print(f"report: {e.filename or out}: {e.strerror}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
