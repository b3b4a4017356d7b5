#!/usr/bin/env python3
"""harness/fuzz/fuzz_report.py [LIBFUZZER OPTIONS] [FOLDER]: the report's reader of records under
atheris (pip install atheris): any JSON is refused by
record.py with file and field, or becomes a page. One in 500 has its figures drawn too."""

import json
import os
import random
import sys
from typing import Any

import atheris

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "..", "reports"))
with atheris.instrument_imports(include=["read", "say", "draw", "page"]):
    from draw.plots import plots
    from draw.style import plt
    from page.page import page
    from page.render import own_text
    from read import record
    from read.checks import Malformed

VALUES = [
    None,
    True,
    0,
    1,
    -1,
    2,
    3,
    64,
    4096,
    4097,
    2**53,
    2**63,
    10**30,
    0.0,
    0.5,
    1.0,
    1e-7,
    1e-300,
    1e300,
    -1.0,
    "",
    "nan",
    "inf",
    "-inf",
    "pass",
    "fail",
    "skipped",
    "unjudged",
    "error",
    "fp32",
    "bf16",
    "tf32rz",
    "fp64",
    "allgather",
    "ring",
    "sim",
    "o",
    "S_in",
    "dq",
    "reflect",
    "mild",
    "chain",
    "kda",
    "conv",
    "<b>",
    "$",
    "a\nb",
    "\ud800",
    "expected",
    "bound",
    "exact",
    "window",
    [],
    {},
    [0.1],
    [None],
    [[0.1]],
]
KEYS = [
    "schema",
    "schema_version",
    "program",
    "commit",
    "created",
    "seconds",
    "totals",
    "errors",
    "verdict",
    "cases",
    "runs",
    "id",
    "case",
    "op",
    "ranks",
    "backend",
    "policy",
    "base",
    "chain",
    "merge",
    "truth",
    "kind",
    "bits",
    "radius",
    "audit",
    "tensors",
    "name",
    "rel_fro",
    "per_rank",
    "per_head",
    "worst_token",
    "windows",
    "size",
    "rel",
    "bound",
    "ratio",
    "per_rank_ratio",
    "expected",
    "excess",
    "level",
    "tensor",
    "rank",
    "limit",
    "tier",
    "why",
    "slope",
    "condition",
    "T",
    "H",
    "HV",
    "K",
    "V",
    "R",
    "Nseq",
    "regime",
    "reason",
    "source",
    "warnings",
    "chunks",
    "effect",
    "norm",
    "model",
    "effective",
    "biased",
    "like",
    "wrong",
    "says",
]
draws = 0


def places(x: Any, out: list[Any]) -> list[Any]:
    if isinstance(x, (dict, list)):
        out.append(x)
        for v in x.values() if isinstance(x, dict) else x:
            places(v, out)
    return out


def change(x: Any, rng: random.Random) -> None:
    at = rng.choice(places(x, []))
    value = json.loads(json.dumps(rng.choice(VALUES)))
    if isinstance(at, dict):
        key = rng.choice(list(at) or KEYS) if rng.random() < 0.7 else rng.choice(KEYS)
        if rng.random() < 0.15:
            at.pop(key, None)
        else:
            at[key] = value
    elif at and rng.random() < 0.3:
        at.append(json.loads(json.dumps(rng.choice(at))))
    elif at and rng.random() < 0.3:
        at.pop(rng.randrange(len(at)))
    elif at:
        at[rng.randrange(len(at))] = value
    else:
        at.append(value)


def mutate(data: bytes, most: int, seed: int) -> bytes:
    rng = random.Random(seed)
    try:
        x = json.loads(data)
        for _ in range(rng.choice([1, 1, 1, 2, 4])):
            change(x, rng)
        out = json.dumps(x).encode()
        return out if len(out) <= most else data
    except (ValueError, RecursionError, IndexError):
        return atheris.Mutate(data, len(data))


def one(data: bytes) -> tuple[str, str, int | None]:
    global draws
    try:
        rec = record.checked(
            json.loads(data.decode("utf-8", "replace"), parse_constant=lambda _: None), "fuzz"
        )
    except (ValueError, RecursionError):
        return
    except Malformed as e:
        if not str(e).startswith("fuzz: "):
            raise
        return
    drawn = plots(rec)
    draws += 1
    shown = [(p, p.table() if p.table else "data:image/svg+xml,x") for p in drawn]
    if draws % 500 == 0:
        for p in drawn:
            plt.close(p.draw())
    html = page(rec, shown).replace(own_text("page.js"), "")
    if '<b>"' in html or html.count("<script") != 2:
        raise RuntimeError("text became markup")


if __name__ == "__main__":
    atheris.Setup(sys.argv, one, custom_mutator=mutate)
    atheris.Fuzz()
