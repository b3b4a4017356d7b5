#!/usr/bin/env python3
"""harness/fuzz/fuzz_report.py [LIBFUZZER OPTIONS] [FOLDER]: the report's reader of records under
atheris (pip install atheris): coverage leads the search. One page in 500 has its figures drawn
too. bulk_report.py does a hundred times as many in the same time, without that lead."""

import json
import os
import random
import sys

import atheris

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "..", "reports"))
with atheris.instrument_imports(include=["read", "say", "draw", "page"]):
    import report_target
from report_inputs import change, names, places

pages = 0
keys: set[str] = set()


def mutate(data: bytes, most: int, seed: int) -> bytes:
    rng = random.Random(seed)
    try:
        x = json.loads(data)
        keys.update(names(x))
        for _ in range(rng.choice([1, 1, 1, 2, 4])):
            change(places(x), rng, sorted(keys))
        out = json.dumps(x).encode()
        return out if len(out) <= most else data
    except (ValueError, RecursionError, IndexError):
        return atheris.Mutate(data, len(data))


def one(data: bytes) -> None:
    global pages
    rec = report_target.read(data)
    if not isinstance(rec, str):
        pages += 1
        report_target.shown(rec, draw=pages % 500 == 0)


if __name__ == "__main__":
    atheris.Setup(sys.argv, one, custom_mutator=mutate)
    atheris.Fuzz()
