"""The program's texts, in the words of a Python caller: its options are arguments here."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from .vocabulary import LEAVING

MANY = 4  # names of which a person sees the nearest at once
_WHOLE = re.compile(r"[-+]?\d[\d.e+-]*$|[A-Z]+$")
# Of these the program's words are texts of one word each.
_TEXTS = ("base", "claim", "gate", "gate-dtype", "beta", "state-layout", "layout", "design")
_PLAIN = ("lower-bound", "scale", "ranks", "tokens", "limit", "heads", "tries")
_OPTION = re.compile(r"--([a-z][a-z0-9-]*)(?: ([^\s;:)]+))?")
_SHELL = ("again: ", "explain: ", "deltaproof ")


class Unsupported(Exception):
    """The kernel does not serve this problem, and says why: the run is skipped."""


def _value(option: str, value: str) -> str | None:
    """As Python writes it; None: the word behind the option is none of its values."""
    if option == "l2norm":
        named = {"0": "False", "1": "True", "0|1": "True or False"}
        return named.get(value)
    if option in _TEXTS:
        if _WHOLE.match(value):
            return value
        return " or ".join(f'"{x}"' for x in value.split("|"))
    if option == "cu-seqlens" and re.match(r"[\d,.T]+$|LIST$", value):
        return value if value == "LIST" else f"[{value.replace(',', ', ')}]"
    return value if option in _PLAIN and _WHOLE.match(value) else None


def _argument(found: re.Match[str]) -> str:
    option, value = found[1], found[2]
    name = option.replace("-", "_")
    if option not in (*_TEXTS, *_PLAIN, "l2norm", "cu-seqlens", "bitwise"):
        return found[0]
    bare = (value or "").rstrip(",")
    said = _value(option, bare) if bare else None
    if said is None:
        return name + (f" {value}" if value else "")
    return f"{name}={said}{(value or '')[len(bare) :]}"


def in_python(text: str) -> str:
    """The text with --option VALUE as option=value, but for lines that are commands of a shell."""
    lines = text.splitlines(keepends=True)
    return "".join(x if x.strip().startswith(_SHELL) else _OPTION.sub(_argument, x) for x in lines)


def truth_of(name: str, x: object) -> bool:
    """A setting that is true or false. TypeError: it is neither; text such as "no" is true to
    Python, which is not what it says."""
    n = plain_number(x)
    if isinstance(n, bool) or (isinstance(n, int | float) and n in (0, 1)):
        return bool(n)
    raise TypeError(f"{name}={x!r}: must be True or False")


def one_of(name: str, x: object, known: Sequence[str]) -> None:
    """ValueError, with the name of the argument: x is none of them."""
    if x not in known:
        like = get_close_matches(str(x), known, 1) if len(known) > MANY else ()
        hint = f"; did you mean {like[0]}?" if like else ""
        raise ValueError(f"{name}={x!r}: must be {', '.join(known[:-1])} or {known[-1]}{hint}")


def names_of(name: str, x: object, known: Sequence[str] = ()) -> list[str]:
    """One name or several, as a list. TypeError: they are no texts; ValueError: they cannot be
    written in a command, or are none of those that are known."""
    if not isinstance(x, str | Iterable) or isinstance(x, bytes):
        raise TypeError(f"{name}={x!r}: must be one name or several")
    names = [x] if isinstance(x, str) else list(x)
    for one in names:
        if not isinstance(one, str):
            raise TypeError(f"{name}={x!r}: {one!r} is no text")
        if "\0" in one or not is_utf8(one):
            raise ValueError(f"{name}={x!r}: {one!r} is no UTF-8 without a zero byte")
        if known:
            one_of(name, one, known)
    return names


def is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def folder_and_design(
    out: str | Mapping[str, str] | None, report: str | None, design: str | None
) -> tuple[str | None, str | None]:
    """out is the folder of the report, or {tensor: format of its results}, words of a design. They
    leave a kernel that declares none undeclared."""
    names_of("design", [] if design is None else design)
    if not isinstance(out, Mapping | str | os.PathLike | None):
        raise TypeError(f"out={out!r}: must be a folder, or {{tensor: format}}")
    if not isinstance(report, str | os.PathLike | None):
        raise TypeError(f"report={report!r}: must be a folder")
    folder = report if out is None or isinstance(out, Mapping) else out
    if folder == "" or (folder is out and report is not None and report != out):
        raise ValueError(f"out={out!r}, report={report!r}: name one folder")
    if not isinstance(out, Mapping):
        return folder, design
    known = (*LEAVING, "final_state")
    for name in out:
        if name not in known:
            raise ValueError(f"out: {name!r} is none of {' '.join(known)}")
    words = [f"{name}={form}" for name, form in out.items()]
    return report, ",".join(["undeclared" if design is None else design, *words]).strip(",")


def plain_number(x: Any) -> Any:
    """A number of numpy or PyTorch as Python's own; all else as it is."""
    return x.item() if hasattr(x, "item") and getattr(x, "ndim", None) == 0 else x


def safe(text: str) -> str:
    """The text as UTF-8 can say it and a terminal shows it: all else is written as an escape."""
    shown = (c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
    return "".join(shown)


def one_line(text: object) -> str:
    return safe(" ".join(str(text).split()))


def text_of(e: BaseException) -> str:
    """`Name: text` of what was raised, in one line, whatever its text is."""
    name = type(e).__name__
    try:
        said = str(e)
    except Exception as why:
        said = f"(its text raises {type(why).__name__})"
    return one_line(f"{name}: {said}")
