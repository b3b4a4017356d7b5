"""Properties that the fuzzers of the report's readers check on any input. It is refused by
Malformed with the name of its file, or becomes a page in which no text of the record is markup.

read(data) parses and checks as `deltaproof report` does; checked(tree) does it without the text;
shown(rec) makes the page, and compares the record with itself."""

import contextlib
import io
from typing import Any

from report_inputs import MARKUP

import compare
from draw.plots import plots
from draw.style import plt
from page.page import page
from page.render import own_text
from read import record
from read.checks import Malformed

FILE = "fuzz"


def _refused(e: Malformed) -> str:
    """The refusal's text, which must name the file."""
    if not str(e).startswith(FILE + ": "):
        raise RuntimeError(f"a refusal without its file: {e}")
    return str(e)


def read(data: bytes) -> record.Record | str:
    """The record in the text data, or why it is none."""
    try:
        return record.checked(record.parsed(data, FILE), FILE)
    except Malformed as e:
        return _refused(e)


def checked(tree: Any) -> record.Record | str:
    """The record in what JSON held, or why it is none; tree stays as it is."""
    try:
        return record.checked(tree, FILE)
    except Malformed as e:
        return _refused(e)


def shown(rec: record.Record, draw: bool) -> None:
    """The page of rec; with draw also its figures."""
    drawn = plots(rec)
    if draw:
        for p in drawn:
            plt.close(p.draw())
    tables = [(p, p.table() if p.table else "data:image/svg+xml,x") for p in drawn]
    html = page(rec, tables).replace(own_text("page.js"), "")
    if any(text in html for text in MARKUP) or html.count("<script") != 2:
        raise RuntimeError("text became markup")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        if compare.Comparison(rec, rec, [], compare.arguments([])).run() == 1:
            raise RuntimeError("a record is worse than itself")
