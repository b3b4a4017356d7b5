"""`deltaproof score FILE.py --task TASK`: score a kernel of a file on fresh problems, in a process
of its own.

The score of a tensor is its largest error over its limit, of all levels and problems: at most 1
passes. The score of a kernel is the largest of its tensors, or inf if a call fails. The power is
the factor by which the expected error must grow to be detected in the whole tensor, a window, or a
row. `seen` is the smallest factor on the tensor that would fail.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from .fresh import COUNT, Found, run_fresh, share
from .kernel_process import KernelProcess
from .layouts import GUARDED, LAYOUTS
from .limits import seconds
from .records import FAIL, NOT_JUDGED

TASKS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tasks")
SCHEMA = "deltaproof.score/1"
LAYED = (*LAYOUTS[1:], GUARDED)
FORMS = {"l2norm": ("yes|no", "yes or no"), "count": (r"[1-9]\d*", "a whole number from 1 on")}
KEYS = ("models", "outputs", "gate", "beta", "l2norm", "base", "design", "laws", "count")


def read_task(name: str) -> dict[str, str]:
    """A task of this package by its name, or a file. ValueError: file, line, key."""
    path = name if os.path.isfile(name) else os.path.join(TASKS, f"{name}.task")
    if not os.path.isfile(path):
        there = " ".join(sorted(x.removesuffix(".task") for x in os.listdir(TASKS)))
        raise ValueError(f"task {name}: no such file, and there are {there}")
    out: dict[str, str] = {}
    with open(path, encoding="utf-8", errors="replace") as f:
        for i, line in enumerate(f, 1):
            key, is_, value = (x.strip() for x in line.split("#")[0].partition("="))
            if key and (not is_ or key not in KEYS):
                raise ValueError(f"{path}:{i}: {key!r} is none of {' '.join(KEYS)}")
            if key in out:
                raise ValueError(f"{path}:{i}: {key} stands twice")
            form, said = FORMS.get(key, (".*", ""))
            if not re.fullmatch(form, value):
                raise ValueError(f"{path}:{i}: {key} = {value}: must be {said}")
            out |= {key: value} if key else {}
    return out


def of_run(run: Mapping[str, Any]) -> float:
    """The score of a call: inf where it failed whatever its numbers are; nan: none was judged."""
    if run["verdict"] in ("skipped", "unjudged"):
        return math.nan
    shares = [share(t) for t in run["tensors"]]
    unsaid = run["verdict"] == "fail" and max(shares, default=0) <= 1
    return math.inf if unsaid else max(shares)


def _power(tensors: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The worst of all problems."""
    rows = [t["expected"]["power"] for t in tensors if (t.get("expected") or {}).get("power")]
    out = {n: max(float(r[i]) for r in rows) for i, n in enumerate(("whole", "window", "row"))
           if rows}  # fmt: skip
    seen = [float(t["seen"]) for t in tensors if t.get("seen") is not None]
    return out | ({"seen": max(seen)} if seen else {})


def score(found: Found) -> dict[str, Any]:
    """The score of what was found, in an order that does not change."""
    by: dict[str, list[tuple[float, str, Any]]] = {}
    for run in found.runs:
        for t in run["tensors"]:
            by.setdefault(t["name"], []).append((share(t), run["id"], t))
    tensors = {}
    for n in sorted(by):
        worst = max(by[n], key=lambda x: x[0])
        power = _power([t for _, _, t in by[n]])
        tensors[n] = {"score": worst[0], "at": worst[1], "power": power}
    runs = [
        {"id": r["id"], "verdict": r["verdict"], "score": of_run(r), "why": r.get("why", "")}
        for r in found.runs
    ]
    numbers = [r["score"] for r in runs if not math.isnan(r["score"])]
    return {
        "schema": SCHEMA,
        "score": max(numbers, default=math.nan),
        "status": found.status,
        "seed": found.seed,
        "tensors": tensors,
        "runs": runs,
    }


def _forbidden(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    return [n for n in names for p in patterns if fnmatch.fnmatch(n.lower(), f"*{p.lower()}*")]


def score_file(
    file: str, task: str, *, function: str | None = None, seed: int | None = None,
    count: int | None = None, device: str | None = None, limit: float = 600.0,
    forbid: Sequence[str] = (), report: str | None = None, laws: Sequence[str] | None = None,
    **more: Any,
) -> tuple[dict[str, Any], str]:  # fmt: skip
    """(the score, what was printed). more: base, design, outputs, in place of the task's."""
    told = read_task(task) | {n: x for n, x in more.items() if x is not None}
    if "base" not in told:
        raise ValueError(f"task {task}: base is missing")
    if "" in forbid:
        raise ValueError("forbid='': is a part of every name")
    with open(file, "rb") as f:
        digest = hashlib.sha256(f.read()).hexdigest()
    contract = {
        "models": told.get("models", "kda").split(), "gate": told.get("gate", "log"),
        "outputs": told.get("outputs", "o").replace(",", " ").split(), "device": device,
        "beta": told.get("beta", "plain"), "l2norm": told.get("l2norm") == "yes",
        "base": told["base"],
    }  # fmt: skip
    call = KernelProcess(file, function, seconds(limit), **contract)
    asked = list(laws or told.get("laws", "").split()) or None
    count = int(told.get("count", COUNT)) if count is None else count
    found = run_fresh(
        call, call.contract, seed=seed, count=count, laws=asked,
        layouts=LAYED, report=report, base=told["base"], design=told.get("design"),
    )  # fmt: skip
    out = {"kernel": os.path.basename(file), "sha256": digest, "task": task, "base": told["base"]}
    out |= score(found) | {"kernels": call.kernels, "modules": call.modules}
    used = _forbidden([*call.kernels, *call.modules], forbid)
    text = found.text
    if used:
        out |= {"score": math.inf, "status": FAIL, "forbidden": used}
        text += f"forbidden: {', '.join(used)}\n"
    said = [(x.split("\n") or [""])[-1] for x in (y.strip() for y in call.raised[-3:])]
    return out, text + "".join(f"raised: {x}\n" for x in said)


def as_json(scored: Mapping[str, Any]) -> str:
    """Numbers that JSON has not are words: "inf", "nan"."""

    def plain(x: Any) -> Any:
        if isinstance(x, Mapping):
            return {k: plain(y) for k, y in x.items()}
        if isinstance(x, list):
            return [plain(y) for y in x]
        return str(x) if isinstance(x, float) and not math.isfinite(x) else x

    return json.dumps(plain(scored), indent=1)


def main(arguments: Sequence[str]) -> int:
    ap = argparse.ArgumentParser("deltaproof score", description=__doc__)
    ap.add_argument("file", metavar="FILE.py")
    ap.add_argument(
        "--task",
        required=True,
        help="what the function computes: a name of deltaproof/tasks, or a file",
    )
    ap.add_argument("--function", help="name of the function, if the file defines several")
    ap.add_argument("--seed", type=int, help="default: a new one for each score")
    ap.add_argument("--count", type=int, help="number of problems")
    ap.add_argument("--laws", nargs="+", help="names, files or folders, in place of the task's")
    ap.add_argument("--device", help="device of PyTorch tensors, e.g. cuda; default: numpy arrays")
    ap.add_argument("--base", help="formats that the kernel claims, in place of the task's")
    ap.add_argument("--design", help="how the kernel computes, in place of the task's")
    ap.add_argument("--outputs", help="names of its results, with commas between")
    ap.add_argument("--forbid", nargs="+", default=[], metavar="NAME",
                    help="modules and CUDA kernels that the kernel must not use")  # fmt: skip
    ap.add_argument("--limit", type=float, default=600.0, help="most seconds of one call")
    ap.add_argument("--json", metavar="FILE", help="write the score there")
    ap.add_argument(
        "--report", metavar="DIR", help="write files and pages of every judgement there"
    )
    told = vars(ap.parse_args(arguments))
    file, task, path = told.pop("file"), told.pop("task"), told.pop("json")
    try:
        if path:  # no score of an earlier call stays
            open(path, "w", encoding="utf-8").close()
        scored, text = score_file(file, task, **told)
    except (ValueError, OSError) as e:
        print(f"deltaproof score: {e}", file=sys.stderr)
        return NOT_JUDGED
    print(text, end="")
    for n, t in scored["tensors"].items():
        power = ", ".join(f"{k} {x:.3g}" for k, x in t["power"].items())
        print(f"{n}: {t['score']:.3g} of its limit, at {t['at']} (power: {power})")
    print(f"SCORE: {scored['score']:.3g} (at most 1 passes)")
    if path:
        with open(path, "w", encoding="utf-8") as f:
            f.write(as_json(scored) + "\n")
    return int(scored["status"])
