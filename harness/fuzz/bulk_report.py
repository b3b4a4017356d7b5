#!/usr/bin/env python3
"""harness/fuzz/bulk_report.py [N] [--seed S] [--jobs J] [--seeds FOLDER] [--keep FOLDER]

N (default 10,000,000) executions of the report's reader of records, held to the same properties
as by fuzz_report.py (report_target.py). Needs nothing but what the report needs.

An execution changes a record in up to four places and reads it; one in eight goes through its text,
changed there too. A record is kept for further changes if its refusal has new words (numbers and
quoted values aside), or if its page has other fields. One in 40 accepted
records becomes a page, as does every record with inserted markup. One in 50 pages has its figures
drawn.

First each of the faults below is put into the reader and must be found. Prints how many executions,
refusals, kinds of refusal, pages; of 100,000 executions or more the lines of reports/ that the
kept records reach. A finding is left in the --keep folder (default build/fuzz/report) as
finding-N.json. Exit status 1: a finding, or a fault that was not found."""

import argparse
import copy
import hashlib
import json
import os
import random
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
REPORTS = os.path.realpath(os.path.join(HERE, "..", "..", "reports"))
sys.path.insert(0, REPORTS)
import report_target
from report_inputs import change, names, places

from page import page as page_module
from read import record
from read.checks import Malformed

HANG = 200  # seconds that one execution may take
TEXT, PAGE, DRAW = 8, 40, 50  # one in so many: executions, accepted records, pages
POOL = 2000  # records kept at most
VARIES = re.compile(r'"(?:[^"\\]|\\.)*"|-?[0-9][-+.0-9eE]*|found .*', re.DOTALL)


class Hang(Exception):
    """An execution that takes longer than HANG seconds."""


def _hangs(*_: Any) -> None:
    raise Hang(f"takes longer than {HANG} seconds")


@dataclass
class Tree:
    """A record to be changed, and its containers."""

    root: Any
    at: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.at = places(self.root)


@dataclass
class Done:
    """The outcome of some executions."""

    executions: int = 0
    refused: int = 0
    pages: int = 0
    kinds: set[str] = field(default_factory=set)
    kept: list[str] = field(default_factory=list)
    findings: list[tuple[str, str]] = field(default_factory=list)  # (input, what happened)

    def add(self, other: "Done") -> None:
        for name in ("executions", "refused", "pages"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.kinds |= other.kinds
        self.kept += other.kept
        self.findings += other.findings


def kind_of(refusal: str) -> str:
    return VARIES.sub("#", refusal)


def fields_of(root: Any) -> str:
    """Which fields a record has, at which level: records that differ in it are made differently."""
    shapes = {",".join(sorted(x)) for x in places(root) if isinstance(x, dict)}
    return "page " + hashlib.md5(" ".join(sorted(shapes)).encode()).hexdigest()


def change_text(data: bytes, rng: random.Random) -> bytes:
    text = bytearray(data)
    for _ in range(rng.choice([0, 1, 1, 2])):
        at = rng.randrange(len(text) + 1)
        match rng.randrange(4):
            case 0:
                text[at : at + 1] = rng.choice(b'{}[]",:\\0-e.\x00\x80\xff').to_bytes(1, "big")
            case 1:
                del text[at : at + rng.choice([1, 4, 64])]
            case 2:
                text[at:at] = text[at : at + rng.choice([4, 64])]
            case _:
                text[at:at] = rng.choice([b"[" * 3000, b"NaN", b"1e999", b"\\ud800", b"9" * 5000])
    return bytes(text)


class Fuzzer:
    def __init__(self, seeds: list[Any], seed: int) -> None:
        self.rng, self.done = random.Random(seed), Done()
        self.pool = [Tree(copy.deepcopy(x)) for x in seeds]
        self.keys = sorted(set().union(*(names(x) for x in seeds)))

    def keep(self, tree: Tree, kind: str) -> None:
        if kind in self.done.kinds:
            return
        self.done.kinds.add(kind)
        self.done.kept.append(json.dumps(tree.root))
        new = Tree(json.loads(self.done.kept[-1]))
        if len(new.at) > 600:  # large ones cost more than they find
            return
        if len(self.pool) < POOL:
            self.pool.append(new)
        else:
            self.pool[self.rng.randrange(POOL)] = new

    def judge(self, tree: Tree, text: bytes | None, always: bool) -> None:
        got = report_target.checked(tree.root) if text is None else report_target.read(text)
        if isinstance(got, str):
            self.done.refused += 1
            if text is None:
                self.keep(tree, kind_of(got))
        elif always or self.rng.randrange(PAGE) == 0:
            self.done.pages += 1
            report_target.shown(got, draw=self.done.pages % DRAW == 0)
            if text is None:
                self.keep(tree, fields_of(tree.root))

    def one(self) -> None:
        tree = self.rng.choice(self.pool)
        times = self.rng.choice([1, 1, 1, 2, 4])
        changes = [change(tree.at, self.rng, self.keys) for _ in range(times)]
        text = None
        if self.rng.randrange(TEXT) == 0:
            text = change_text(json.dumps(tree.root).encode(), self.rng)
        signal.setitimer(signal.ITIMER_REAL, HANG)
        try:
            self.judge(tree, text, any(c.markup() for c in changes))
        except Exception:
            found = json.dumps(tree.root) if text is None else text.decode("utf-8", "replace")
            self.done.findings.append((found, traceback.format_exc()))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        self.done.executions += 1
        for c in reversed(changes):
            c.undo()


def part(seeds: list[Any], n: int, seed: int, findings: int = 20) -> Done:
    """n executions, or until so many findings."""
    signal.signal(signal.SIGALRM, _hangs)
    fuzzer = Fuzzer(seeds, seed)
    for _ in range(n):
        fuzzer.one()
        if len(fuzzer.done.findings) >= findings:
            break
    return fuzzer.done


# ---- faults that must be found -----------------------------------------------------------------


def _no_file(d: Any, path: str) -> Any:
    try:
        return RIGHT(d, path)
    except Malformed as e:
        raise Malformed(str(e).removeprefix(path + ": ")) from e


def _index(d: Any, path: str) -> Any:
    rec = RIGHT(d, path)
    for run in rec.runs:
        for t in run["tensors"]:
            t["verdict"], t["tier"]
    return rec


def _hang(d: Any, path: str) -> Any:
    rec = RIGHT(d, path)
    if rec.totals["pass"] > 63:
        signal.raise_signal(signal.SIGALRM)  # as if HANG seconds had passed
    return rec


def _markup(rec: Any, shown: Any) -> str:
    return RIGHT_PAGE(rec, shown) + "".join(r["case"] for r in rec.runs)


RIGHT, RIGHT_PAGE = record.checked, page_module.page
FAULTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "a refusal without its file": (record, "checked", _no_file),
    "a field that may be absent is taken for granted": (record, "checked", _index),
    "an input on which the reader hangs": (record, "checked", _hang),
    "a text that is not escaped": (report_target, "page", _markup),
}


@contextmanager
def fault(name: str) -> Iterator[None]:
    where, what, wrong = FAULTS[name]
    right = getattr(where, what)
    setattr(where, what, wrong)
    try:
        yield
    finally:
        setattr(where, what, right)


def faults_missed(seeds: list[Any]) -> list[str]:
    missed = []
    for name in FAULTS:
        with fault(name):
            # from the start again and again: what is kept on the way leads away from some
            tried = (part(seeds, 2000, seed, findings=1) for seed in range(1, 1001))
            if not any(x.findings for x in tried):
                missed.append(name)
    return missed


# ---- what the kept records reach -----------------------------------------------------------------


def lines_reached(kept: list[str]) -> tuple[int, int]:
    """(lines of the readers and of what is said and drawn that reading and showing them reaches,
    lines that the modules have)."""
    reached: set[tuple[str, int]] = set()

    def trace(frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(REPORTS):
            return None
        if event == "line":
            reached.add((frame.f_code.co_filename, frame.f_lineno))
        return trace

    sys.settrace(trace)
    try:
        for text in kept:
            got = report_target.read(text.encode())
            if not isinstance(got, str):
                report_target.shown(got, draw=False)
    finally:
        sys.settrace(None)
    files = {f for f, _ in reached if f.endswith(".py")}
    lines = {(f, line) for f in files for line in _lines_of(f)}
    return len(reached & lines), len(lines)


def _lines_of(path: str) -> set[int]:
    """Lines of functions that hold code: what runs at import is left out."""

    def inside(code: Any) -> set[int]:
        found = {line for _, _, line in code.co_lines() if line} - {code.co_firstlineno}
        return found.union(*(inside(c) for c in code.co_consts if hasattr(c, "co_lines")))

    with open(path, encoding="utf-8") as f:
        module = compile(f.read(), path, "exec")
    return set().union(*(inside(c) for c in module.co_consts if hasattr(c, "co_lines")))


# ---- the command ---------------------------------------------------------------------------------


def seeds_of(folder: str) -> list[Any]:
    """Every record of the folder ("": none), two that a NUL parts are two; runs of the tests'
    record."""
    texts = []
    for name in sorted(os.listdir(folder)) if folder else []:
        with open(os.path.join(folder, name), encoding="utf-8") as f:
            texts += f.read().split("\0")
    small = os.path.join(HERE, "..", "tests", "data", "record-small.json")
    with open(small, encoding="utf-8") as f:
        whole = json.load(f)
    for run in whole["runs"]:
        one = {**whole, "runs": [{**run, "tensors": run.get("tensors", [])[:2]}]}
        one["cases"] = [c for c in whole["cases"] if c["name"] == run["case"]]
        texts.append(json.dumps(one))
    return [json.loads(x) for x in texts]


def main() -> int:
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("n", nargs="?", type=int, default=10_000_000)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--jobs", type=int, default=2)
    ap.add_argument("--seeds", metavar="FOLDER", default="build/fuzz/seeds/record")
    ap.add_argument("--keep", metavar="FOLDER", default="build/fuzz/report")
    a = ap.parse_args()
    seeds, started, cpu = seeds_of(a.seeds), time.time(), time.process_time()
    signal.signal(signal.SIGALRM, _hangs)
    missed = faults_missed(seeds)
    for name in missed:
        print(f"not found: {name}")
    if missed:
        return 1
    total, each = Done(), 100_000
    tasks = [(each, i) for i in range(a.n // each)] + ([(a.n % each, -1)] if a.n % each else [])
    with ProcessPoolExecutor(a.jobs) as pool:
        parts = [pool.submit(part, seeds, n, 7919 * a.seed + i) for n, i in tasks]
        for p in parts:
            total.add(p.result())
    os.makedirs(a.keep, exist_ok=True)
    for i, (found, why) in enumerate(total.findings):
        path = os.path.join(a.keep, f"finding-{i}.json")
        with open(path, "w", encoding="utf-8") as f:
            f.write(found)
        print(f"{path}:\n{why}")
    kept = list(dict.fromkeys(total.kept))
    sample = random.Random(1).sample(kept, min(len(kept), 3000))
    lines = ""
    if a.n >= 100_000:
        reached, of = lines_reached(sample)
        lines = f"{reached} of {of} lines reached; "
    words = sum(not k.startswith("page ") for k in total.kinds)
    used = time.process_time() - cpu + sum(os.times()[2:4])
    print(
        f"{total.executions} executions, {len(seeds)} seeds, {total.refused} refused in"
        f" {words} kinds of words, {total.pages} pages;"
        f" {len(FAULTS)} of {len(FAULTS)} faults found, {len(total.findings)} findings;"
        f" {lines}{time.time() - started:.0f} s, {used:.0f} s of CPU"
    )
    return 1 if total.findings else 0


if __name__ == "__main__":
    sys.exit(main())
