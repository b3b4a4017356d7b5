"""Checks of what JSON holds. A check takes (value, name of the field) and returns the value to
keep,
or raises Reject. schema.py and museum.py build their tables from these."""

import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


MOST = 2**53  # of integers: what a double holds exactly


NO_TEXT = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


class Malformed(Exception):
    """Text: `file: field: what was expected, what was found`."""


class Reject(Exception):
    """A field that is not as it must be."""

    def __init__(self, field: str, text: str) -> None:
        super().__init__(f"{field}: {text}")


def _show(x: Any) -> str:
    try:
        s = json.dumps(x) if not isinstance(x, float) or math.isfinite(x) else str(x)
    except ValueError:  # an integer of thousands of digits
        s = "a number of thousands of digits"
    return s if len(s) <= 60 else s[:57] + "..."


def number(x: Any, f: str) -> float:
    if isinstance(x, str) and x in SPECIAL:
        return SPECIAL[x]
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        raise Reject(f, f'expected a number, "nan", "inf" or "-inf", found {_show(x)}')
    if not abs(x) <= 1.7976931348623157e308:
        raise Reject(f, f"{_show(x)} is more than a double holds")
    return float(x)


# (value, field) -> the value to keep
Check = Callable[[Any, str], Any]


def integer_from(least: int, most: int) -> Check:
    def run(x: Any, f: str) -> Any:
        if isinstance(x, bool) or not isinstance(x, int) or x < least:
            raise Reject(
                f,
                f"expected an integer >= {least}, found {_show(x)}"
                if least > -MOST
                else f"expected an integer, found {_show(x)}",
            )
        if x > most:
            raise Reject(f, f"expected an integer up to {most}, found {_show(x)}")
        return x

    return run


count = integer_from(0, MOST)


def text(x: Any, f: str) -> str:
    if not isinstance(x, str):
        raise Reject(f, f"expected a string, found {_show(x)}")
    bad = NO_TEXT.search(x)
    if bad:
        raise Reject(f, f"has the character U+{ord(bad[0]):04X}, which is no text")
    return x


def boolean(x: Any, f: str) -> bool:
    if not isinstance(x, bool):
        raise Reject(f, f"expected true or false, found {_show(x)}")
    return x


def list_of(check: Check, hole: bool = False, most: int | None = None) -> Check:
    def run(x: Any, f: str) -> Any:
        if not isinstance(x, list):
            raise Reject(f, f"expected a list, found {_show(x)}")
        if most and len(x) > most:
            raise Reject(f, f"expected at most {most} entries, found {len(x)}")
        return [None if hole and v is None else check(v, f"{f}[{i}]") for i, v in enumerate(x)]

    return run


def object_of(
    fields: dict[str, Check],
    required: tuple[str, ...] = (),
    never_null: frozenset[str] = frozenset(),
) -> Check:
    def run(x: Any, f: str) -> Any:
        if not isinstance(x, dict):
            raise Reject(f or "record", f"expected an object, found {_show(x)}")
        dot = f + "." if f else ""
        for k in required:
            if x.get(k) is None:
                raise Reject(dot + k, "missing")
        return {
            k: fields[k](v, dot + k) if k in fields else v
            for k, v in x.items()
            if v is not None or k in never_null
        }  # any other null is absent

    return run


def one_of(values: Sequence[str]) -> Check:
    def run(x: Any, f: str) -> str:
        if x not in values:
            raise Reject(f, f"expected one of {', '.join(values)}, found {_show(x)}")
        return x

    return run


def texts(x: Any, f: str) -> dict[str, str]:
    """policy: names to names."""
    if not isinstance(x, dict):
        raise Reject(f, f"expected an object, found {_show(x)}")
    return {text(k, f): text(v, f"{f}.{k}") for k, v in x.items()}


positive = integer_from(1, MOST)
integer = integer_from(-MOST, MOST)
