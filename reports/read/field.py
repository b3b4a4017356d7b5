"""field.json, what scripts/campaigns/peers/field/judge.py writes of public kernels and ours, read
and checked.

load(path) -> the whole of it
"""

from typing import Any

from read.checks import (
    Malformed,
    Reject,
    count,
    integer,
    list_of,
    number,
    object_of,
    text,
    texts,
)
from read.record import load_json

ROW = object_of({"sequence": integer, "token": integer, "head": integer, "index": integer}, ())
TENSOR = object_of(
    {
        "name": text,
        "error": number,
        "over_expected": number,
        "of_bound": number,
        "verdict": text,
        "row": ROW,
        "why": text,
    },
    ("name", "verdict"),
)
JUDGED = object_of(
    {"case": text, "verdict": text, "tensors": list_of(TENSOR)}, ("case", "verdict", "tensors")
)
_kernel = {
    "kernel": text,
    "version": text,
    "declared": text,
    "served": count,
    "judged": list_of(JUDGED),
    "reasons": text,
    "speed": texts,
}
KERNEL = object_of(_kernel, tuple(_kernel))
SPEED = object_of(
    {"device": text, "torch": text, "date": text, "driver": text, "where": text, "runs": count}, ()
)
_all = {
    "speed": SPEED,
    "left_out": texts,
    "notes": texts,
    "kernels": list_of(KERNEL),
}
FIELD = object_of(_all, tuple(_all))


def load(path: str) -> dict[str, Any]:
    d = load_json(path)
    if not isinstance(d, dict) or d.get("schema") != "deltaproof-field":
        raise Malformed(f'{path}: schema: expected "deltaproof-field"')
    if d.get("schema_version") != 1 or isinstance(d.get("schema_version"), bool):
        raise Malformed(f"{path}: schema_version: this program reads version 1")
    try:
        found: dict[str, Any] = FIELD(d, "")
    except Reject as e:
        raise Malformed(f"{path}: {e}") from e
    return found
