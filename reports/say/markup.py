"""Markup that escapes by default.

H("<b>{}</b>", x)    markup in the first argument, which is a constant of this program; whatever is
                     put into it is escaped unless it is markup itself
"""

from collections.abc import Iterable
from typing import Any

from markupsafe import Markup

from read.record import Run


def H(text: str, *args: Any, **kwargs: Any) -> Markup:
    return Markup(text).format(*args, **kwargs)


def join(between: str, parts: Iterable[Any]) -> Markup:
    return Markup(between).join(parts)


def link(run: Run, text: str) -> Markup:
    """To the run among all results."""
    return H('<a href="#run-{}">{}</a>', run["n"], text)
