"""The museum's records, DIR/museum.json and DIR/kernels.json (formats: the
heads of reports/museum.py and kernels.py), read and checked.

load(path), load_kernels(path) -> dict, or None when there is no such file
"""

import os
from typing import Any

from read.checks import Check, Malformed, Reject, boolean, count, integer, list_of, object_of, text
from read.record import load_json

RUNS = object_of({"runs": count, "red": count}, ("runs", "red"))
LOCATIONS = object_of({"right": count, "of": count}, ("right", "of"))
FLA = object_of({"red": count, "of": count}, ("red", "of"))
SEEN = object_of({"id": text, "T": count, "tensor": text, "tier": text}, ("id", "tensor", "tier"))
PLACE = object_of({"stage": text, "rank": integer, "head": integer}, ("stage", "rank", "head"))
FAULT = object_of(
    {
        "name": text,
        "bug": count,
        "stage": text,
        "what": text,
        "source": text,
        "runs": count,
        "acted": count,
        "red": count,
        "seen": SEEN,
        "located": PLACE,
        "locations": LOCATIONS,
        "fla": FLA,
    },
    ("name", "bug", "stage", "what", "source", "runs", "acted", "red", "locations", "fla"),
)
BUG = object_of(
    {"number": count, "what": text, "note": text, "faults": list_of(text)},
    ("number", "what", "note", "faults"),
)
MUSEUM = object_of(
    {"faults": list_of(FAULT), "bugs": list_of(BUG), "cases": count, "clean": RUNS},
    ("faults", "bugs", "cases", "clean"),
)
SHOWN = object_of(
    {
        "id": text,
        "T": count,
        "tensor": text,
        "tier": text,
        "rank": integer,
        "head": integer,
        "says": text,
        "source": text,
    },
    ("id", "tensor", "tier", "rank", "head", "says", "source"),
)
KERNEL = object_of(
    {
        "name": text,
        "bug": count,
        "what": text,
        "red": count,
        "right": boolean,
        "fla": boolean,
        "seen": SHOWN,
    },
    ("name", "bug", "what", "red", "right", "fla"),
)
KERNELS = object_of({"faults": list_of(KERNEL), "clean": RUNS}, ("faults", "clean"))


def read(path: str, schema: str, check: Check) -> dict[str, Any] | None:
    if not os.path.lexists(path):
        return None
    m = load_json(path)
    if (
        not isinstance(m, dict)
        or m.get("schema") != schema
        or m.get("schema_version") != 1
        or isinstance(m.get("schema_version"), bool)
    ):
        raise Malformed(f'{path}: schema: expected "{schema}", version 1')
    try:
        return check(m, "")
    except Reject as e:
        raise Malformed(f"{path}: {e}") from e


def load_kernels(path: str) -> dict[str, Any] | None:
    return read(path, "deltaproof-museum-kernels", KERNELS)


def load(path: str) -> dict[str, Any] | None:
    return read(path, "deltaproof-museum", MUSEUM)
