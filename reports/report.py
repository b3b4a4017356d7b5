#!/usr/bin/env python3
"""report.py DIR: reads DIR/results.json (and DIR/museum.json, DIR/kernels.json, DIR/carry.json
where there are any) and writes DIR/junit.xml and DIR/summary.md (ci.py), DIR/report.html,
DIR/figures/*.png and *.pdf.

Reads records only; no verdict is decided here. Exit status 0, or 2 when the record cannot be read
(the message names file and field) or the report cannot be written. Runs isolated (python -I), from
any folder.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # figures are drawn in forks

import contextlib
import gc
import re
import signal
import sys
import traceback
from types import FrameType
from typing import NoReturn

# Where this program's own modules are: -I leaves that out.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import ci
from read import carry, files, many, museum, record
from read.checks import Malformed


def remove_old(folder: str, page: str) -> None:
    """An earlier page and the figures that it shows, before anything is read: nothing else in the
    folder is this program's (harness/commands/write_record.h)."""
    text = files.remove_page(page)
    for name in re.findall(r'href="figures/([A-Za-z0-9._-]+\.(?:png|pdf))"', text):
        with contextlib.suppress(OSError):
            os.remove(os.path.join(folder, name))


def make(folder: str) -> int:
    """Exit status."""
    figures_folder, out = os.path.join(folder, "figures"), os.path.join(folder, "report.html")
    try:
        remove_old(figures_folder, out)
    except OSError as e:
        print(f"report: {out}: {e.strerror}", file=sys.stderr)
        return 2
    try:
        rec = record.load(os.path.join(folder, "results.json"))
        faults = museum.load(os.path.join(folder, "museum.json"))
        kernels = museum.load_kernels(os.path.join(folder, "kernels.json"))
        carried = carry.load(os.path.join(folder, "carry.json"))
    except Malformed as e:
        print(f"report: {e}", file=sys.stderr)
        return 2
    try:
        ci.write(rec, folder)
    except OSError as e:
        print(f"report: {e.filename}: {e.strerror}", file=sys.stderr)
        return 2
    from draw.files import draw_all  # imports matplotlib, the others Jinja2
    from page.page import page
    from page.render import data_uri

    try:
        figures = draw_all(rec, figures_folder)
        shown = [(p, data_uri(x) if isinstance(x, str) else x) for p, x in figures]
        files.write(out, page(rec, shown, faults, kernels, carried).encode())
    except OSError as e:
        print(f"report: {e.filename or out}: {e.strerror}", file=sys.stderr)
        return 2
    return 0


def end(number: int, _: FrameType | None) -> NoReturn:
    """Removes a file in progress; a second signal does not interrupt that."""
    for s in (signal.SIGINT, signal.SIGTERM):
        signal.signal(s, lambda *_: None)
    sys.exit(128 + number)


def main(argv: list[str]) -> int:
    for s in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(s) != signal.SIG_IGN:
            signal.signal(s, end)
    if len(argv) != 2 or argv[1].startswith("-"):
        asked = argv[1:] in (["-h"], ["--help"])
        print((__doc__ or "").strip(), file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    gc.disable()  # a record is a tree of millions of objects, and this process is short
    folder = os.path.abspath(argv[1])
    # matplotlib reads a matplotlibrc of the present folder
    os.chdir(os.path.dirname(os.path.abspath(__file__)))
    try:
        return make(folder)
    except ImportError as e:
        many.say_missing("report", e)
    except Exception as e:  # a record that the checks of read/ should have refused
        at = traceback.extract_tb(e.__traceback__)[-1]
        print(
            f"report: {folder}: cannot be shown: {type(e).__name__}: {e} "
            f"({os.path.basename(at.filename)}:{at.lineno}, a fault of the report)",
            file=sys.stderr,
        )
    return 2


if __name__ == "__main__":
    status = main(sys.argv)
    sys.stdout.flush()
    os._exit(status)  # to take all modules down takes a tenth of a page's time
