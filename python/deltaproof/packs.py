"""`deltaproof pack CASES --base .. --design .. -o DIR`: inputs, truth and limits of cases as files
that any test suite reads without this program (pack_readers/README.md says the layout)."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import struct
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from safetensors import safe_open

from .heads import more_queries, of_one_query, one_query
from .judging import cache_folder
from .program import ran
from .records import NOT_JUDGED
from .tensors import load, save
from .vocabulary import RESULTS

FORMAT, VERSION, MAGIC = "deltaproof-pack", 1, b"DPPACK01"
SETTINGS = ("gate", "beta", "l2norm", "scale", "lower_bound", "recurrence")
NAME, AXES = 48, 5


def _program(*arguments: str) -> None:
    """ValueError: what it says."""
    done = ran(*arguments)
    if done.returncode:
        said = (done.stderr + done.stdout).strip().splitlines()
        raise ValueError(said[-1] if said else f"the program ended with {done.returncode}")


def _metadata(path: str) -> dict[str, str]:
    with safe_open(path, "numpy") as f:
        return f.metadata() or {}


def _inputs(case: str, path: str, queries: int) -> tuple[dict[str, Any], dict[str, str], str]:
    """Writes the inputs of a case with so many query heads a value head. Returns them, their
    settings, and the file of the same problem with one."""
    _program("inputs", case, f"--output={path}")
    inputs, told = load(path), _metadata(path)
    if queries == 1:
        return inputs, told, path
    if told["gate"] != "log":
        raise ValueError(f"{case}: several query heads need log gates, these are {told['gate']}")
    inputs = more_queries(inputs, queries)
    save(f"{path}.one", one_query(inputs, queries), told)
    save(path, inputs, told)
    return inputs, told, f"{path}.one"


def _truth(inputs: Mapping[str, Any], queries: int, path: str) -> dict[str, Any]:
    """Results and their low parts, from the file that the program wrote."""
    T, HV = inputs["v"].shape[:2]
    out = {n: x for n, x in load(path).items() if n.removesuffix(".lo") in RESULTS}
    for n, x in out.items():
        if not np.isfinite(x).all():
            raise ValueError(f"{n}: the truth is not finite: no pack")
        if queries > 1 and n.startswith("o"):
            out[n] = of_one_query(x, T, HV, queries).reshape(T, HV * queries, -1)
    return out


def _limits(inputs: Mapping[str, Any], queries: int, path: str) -> dict[str, Any]:
    T, HV = inputs["v"].shape[:2]
    out = {f"limit.{n}": x for n, x in load(path).items()}
    for n in [f"limit.o.{x}" for x in ("bound", "row", "window", "unit") if queries > 1]:
        out[n] = of_one_query(out[n], T, HV, queries)
    return out


def make(
    case: str, base: str, design: str, queries: int = 1
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(arrays of the pack of one case, its row of pack.json)."""
    folder = tempfile.mkdtemp(prefix="deltaproof-")
    try:
        at = {n: os.path.join(folder, n) for n in ("in", "truth", "out", "limits", "record")}
        cache = f"--cache={cache_folder()}"
        inputs, told, alone = _inputs(case, at["in"], queries)
        _program("truth", f"--inputs={alone}", cache, f"--output={at['truth']}")
        truth = _truth(inputs, queries, at["truth"])
        results = {n: x for n, x in truth.items() if not n.endswith(".lo")}
        save(at["out"], results)
        _program("judge", f"--inputs={at['in']}", f"--outputs={at['out']}", f"--base={base}",
                 f"--design={design}", f"--limits={at['limits']}", f"--json={at['record']}",
                 "--unjudged=" + ",".join(results), cache)  # fmt: skip
        with open(at["record"], encoding="utf-8") as f:
            (run,) = json.load(f)["runs"]
        arrays = {f"in.{n}": x for n, x in inputs.items()}
        arrays |= {f"truth.{n}": x for n, x in truth.items()}
        arrays |= _limits(inputs, queries, at["limits"])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    tensors = {}
    for t in run["tensors"]:
        power = (t.get("expected") or {}).get("power") or [None] * 3
        tensors[t["name"]] = {
            "verdict": t["verdict"], "seen": t.get("seen"),
            "power": dict(zip(("whole", "window", "row"), power[:3], strict=True)),
        }  # fmt: skip
    return arrays, {"settings": {n: told[n] for n in SETTINGS if n in told}, "tensors": tensors}


def flat(path: str, arrays: Mapping[str, Any]) -> None:
    """NAME.pack: every array as doubles."""
    offset = 16 + (NAME + 8 * (AXES + 2)) * len(arrays)
    head, data = [MAGIC, struct.pack("<Q", len(arrays))], []
    for n, x in arrays.items():
        y = np.ascontiguousarray(x, "<f8")
        name = n.encode()
        if len(name) >= NAME or y.ndim > AXES:
            raise ValueError(f"{n}: a name of {len(name)} bytes and {y.ndim} axes do not fit")
        dims = [*y.shape, *[1] * (AXES - y.ndim)]
        head += [name.ljust(NAME, b"\0"), struct.pack("<7Q", y.ndim, *dims, offset)]
        data.append(y.tobytes())
        offset += y.nbytes
    with open(path, "wb") as f:
        f.write(b"".join(head + data))


def pack(
    cases: Sequence[str], base: str, design: str, out: str, queries: int = 1
) -> dict[str, Any]:
    """Writes the folder; returns what is in pack.json."""
    os.makedirs(out, exist_ok=True)
    index: dict[str, Any] = {"format": FORMAT, "version": VERSION, "base": base, "design": design}
    index["cases"] = {}
    for case in cases:
        name = os.path.basename(case).removesuffix(".case")
        arrays, row = make(case, base, design, queries)
        told = {"format": FORMAT, "version": VERSION, "case": name, "base": base, "design": design}
        save(os.path.join(out, f"{name}.safetensors"), arrays, told | row["settings"])
        flat(os.path.join(out, f"{name}.pack"), arrays)
        index["cases"][name] = row
    with open(os.path.join(out, "pack.json"), "w", encoding="utf-8") as f:
        json.dump(index, f, indent=1)
        f.write("\n")
    return index


def main(arguments: Sequence[str]) -> int:
    ap = argparse.ArgumentParser("deltaproof pack", description=__doc__)
    ap.add_argument(
        "cases", nargs="+", metavar="CASE", help="names of `deltaproof list`, or case files"
    )
    ap.add_argument("--base", required=True, help="formats that kernels claim: bf16, fp32, ..")
    ap.add_argument("--design", required=True, help="how kernels compute: recurrent, chunk=64, ..")
    ap.add_argument("--queries", type=int, default=1, metavar="N",
                    help="query heads a value head (log gates, forward)")  # fmt: skip
    ap.add_argument("-o", "--output", required=True, metavar="DIR", help="folder to write")
    a = ap.parse_args(arguments)
    try:
        index = pack(a.cases, a.base, a.design, a.output, a.queries)
    except (ValueError, OSError) as e:
        print(f"deltaproof pack: {e}", file=sys.stderr)
        return NOT_JUDGED
    for name, row in index["cases"].items():
        for n, t in row["tensors"].items():
            said = "" if t["seen"] is None else f", a factor of {float(t['seen']):.4g} is seen"
            print(f"{name}: {n} {t['verdict']}{said}")
    return 0
