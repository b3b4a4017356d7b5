"""DIR/carry.json, what `deltaproof carry --json` writes (harness/commands/cmd_carry.c), read and
checked.

load(path) -> [one head in one format], or None when there is no such file
"""

import os
from typing import Any

from read.checks import Malformed, Reject, count, list_of, number, object_of, positive, text
from read.record import load_json

MOST = 1 << 16  # heads times formats


_reals = list_of(number, hole=True)
_names = ("case", "format", "head", "steps", "every", "need", "step", "error", "sound", "exceeded")
ROW = object_of(
    {
        "case": text,
        "format": text,
        "head": count,
        "steps": positive,
        "every": positive,
        "need": number,
        "step": list_of(positive),
        "error": _reals,
        "sound": _reals,
        "probable": _reals,
        "exceeded": count,
        "largest_o": number,
        "of_sound": number,
        "of_probable": number,
        "slope": number,
        "bias": number,
    },
    _names,
)
ROWS = list_of(ROW, most=MOST)


def load(path: str) -> list[dict[str, Any]] | None:
    if not os.path.lexists(path):
        return None
    try:
        rows: list[dict[str, Any]] = ROWS(load_json(path), "carry")
    except Reject as e:
        raise Malformed(f"{path}: {e}") from e
    for i, r in enumerate(rows):
        if not len(r["step"]) == len(r["error"]) == len(r["sound"]):
            raise Malformed(f"{path}: carry[{i}]: step, error and sound have other lengths")
    return rows
