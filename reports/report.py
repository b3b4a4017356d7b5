#!/usr/bin/env python3
"""report.py DIR: reads DIR/results.json (and DIR/museum.json, DIR/kernels.json where there are any), writes DIR/report.html, DIR/figures/*.png and *.pdf.

Reads records only; no verdict is decided here. Exit status 0, or 2 when the record cannot be read (the message names file and field)
or the report cannot be written. Runs isolated (python -I), from any folder.
"""

import io
import multiprocessing
import os
import re
import signal
import sys
import traceback

sys.path.insert(
    0, os.path.dirname(os.path.abspath(__file__))
)  # where this program's own modules are; -I leaves that out

import files
import record

PNG_DPI = 180


def render(job):
    """Worker: draws one figure, writes its PNG and PDF, returns what the page shows: its tables, or the address of the SVG."""
    plot, folder = PLOTS[job[0]], job[1]
    fig = plot.draw()
    stem = os.path.join(folder, plot.name)
    files.write(stem + ".png", saved(fig, "png", dpi=PNG_DPI))
    files.write(
        stem + ".pdf", saved(fig, "pdf", metadata={"CreationDate": None, "Title": plot.title})
    )
    svg = (
        None
        if plot.table
        else saved(
            fig, "svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        ).decode()
    )
    figures_module.plt.close(fig)
    return plot.table() if plot.table else data_uri(shorten(svg))


def saved(fig, kind, **options):
    out = io.BytesIO()
    fig.savefig(out, format=kind, **options)
    return out.getvalue()


def shorten(svg):
    """The same picture in fewer bytes: coordinates in 0.1 pt (0.01 below 10) instead of 1e-6, short glyph names, no comments, metadata or unused ids, single
    quotes (the text is percent-encoded into an attribute)."""
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.S)
    svg = re.sub(
        r' (?:d|x|y)="[^"]*"|translate\([^)]*\)',
        lambda m: re.sub(r"(\d\d\.\d|\.\d\d)\d+", r"\1", m[0]),
        svg,
    )
    svg = (
        re.sub(r' id="[a-zA-Z0-9]+_[0-9_]+"', "", svg)
        .replace("DejaVuSans-", "D")
        .replace("xlink:href", "href")
    )
    svg = re.sub(r"<g>\s*(<g [^>]*>(?:\s*<use [^>]*>)*\s*</g>)\s*</g>", r"\1", svg)
    return re.sub(r">\s+<", "><", re.sub(r"\s+", " ", svg.replace("'", "").replace('"', "'")))


def draw_all(rec, folder):
    """[(plot, what the page shows)]; the plots are made before the fork, so that workers inherit record and closures."""
    global PLOTS, figures_module, data_uri
    import figures as figures_module
    from markup import data_uri

    PLOTS = figures_module.plots(rec)
    os.makedirs(folder, exist_ok=True)
    jobs = [(i, folder) for i in range(len(PLOTS))]
    workers = min(len(jobs), os.cpu_count() or 1, 8)
    if workers < 2:
        return [(PLOTS[i], render((i, f))) for i, f in jobs]
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        return list(zip(PLOTS, pool.map(render, jobs, chunksize=1)))


def own_figures(page):
    """Files that an earlier page of this folder shows: no other file in it is this program's."""
    try:
        text = files.read(page).decode("utf-8", "replace")
    except OSError:
        return set()
    return (
        set(re.findall(r'href="figures/([A-Za-z0-9._-]+\.(?:png|pdf))"', text))
        if "<title>deltaproof report" in text
        else set()
    )


def remove_old(folder, old, figures):
    """Figures of an earlier record in the same folder would be taken for this one's."""
    for name in old - {f"{p.name}.{e}" for p, _ in figures for e in ("png", "pdf")}:
        if os.path.lexists(os.path.join(folder, name)):
            os.remove(os.path.join(folder, name))


def make(folder):
    """Exit status."""
    from museum import load as load_museum
    from museum import load_kernels

    try:
        rec = record.load(os.path.join(folder, "results.json"))
        museum, kernels = (
            load_museum(os.path.join(folder, "museum.json")),
            load_kernels(os.path.join(folder, "kernels.json")),
        )
    except record.Malformed as e:
        print(f"report: {e}", file=sys.stderr)
        return 2
    from page import page

    figures_folder, out = os.path.join(folder, "figures"), os.path.join(folder, "report.html")
    try:
        old = own_figures(out)
        figures = draw_all(rec, figures_folder)
        files.write(out, page(rec, figures, museum, kernels).encode())
        remove_old(figures_folder, old, figures)
    except OSError as e:
        print(f"report: {e.filename or out}: {e.strerror}", file=sys.stderr)
        return 2
    return 0


def main(argv):
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # what is being written is removed on the way out
    if len(argv) != 2 or argv[1].startswith("-"):
        print(
            __doc__.strip(), file=sys.stderr if argv[1:] not in (["-h"], ["--help"]) else sys.stdout
        )
        return 0 if argv[1:] in (["-h"], ["--help"]) else 2
    folder = os.path.abspath(argv[1])
    os.chdir(
        os.path.dirname(os.path.abspath(__file__))
    )  # matplotlib reads a matplotlibrc of the present folder
    try:
        return make(folder)
    except ImportError as e:
        print(
            f"report: {sys.executable} has no {e.name}: `make setup` finds or makes a Python that has it (or set DP_PYTHON)",
            file=sys.stderr,
        )
    except KeyboardInterrupt:
        return 130
    except Exception as e:  # a record that the checks of record.py should have refused
        at = traceback.extract_tb(e.__traceback__)[-1]
        print(
            f"report: {folder}: cannot be shown: {type(e).__name__}: {e} ({os.path.basename(at.filename)}:{at.lineno}, a fault of the report)",
            file=sys.stderr,
        )
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv))
