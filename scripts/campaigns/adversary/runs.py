"""Runs of the program with the plug-in, remembered in OUT/results.jsonl, a line a run."""

import hashlib
import json
import math
import os
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from plugin import Stop

KEY = [
    "program",
    "plugin",
    "problem",
    "text",
    "design",
    "declared",
    "ranks",
    "fault",
    "size",
    "seed",
]
LIMIT = 600  # seconds that one run of a design may take
GRACE = 2  # seconds that runs may go on when the time is over


class TimeOver(Exception):
    """A run that was ended because the time is over; nothing of it is kept."""


def number(x):
    return math.nan if x is None else float("%.4g" % float(x))


def judged(row):
    return row["verdict"] in ("pass", "fail")


def summary(t):
    """The fields of one tensor of a record that the tables need. The ratio of error to expected
    error is `times` for the whole tensor, `window` for its worst window."""
    e = t.get("expected") or {}
    ratio = {k: number(e[k]["ratio"]) for k in ("tensor", "window") if k in e}
    return {
        "verdict": t["verdict"],
        "tier": t.get("tier"),
        "level": e.get("level"),
        "bound": number(t.get("ratio")),
        "excess": number(e.get("excess")),
        "expected": number(e.get("rel")),
        "times": ratio.get("tensor", math.nan),
        "window": ratio.get("window", math.nan),
    }


def parse_said(stderr, what):
    """{'token': '5', ..} of the line 'adversary: WHAT token=5 ..' of the plug-in, or None."""
    for line in stderr.split("\n"):
        if line.startswith("adversary: %s " % what):
            return dict(pair.split("=") for pair in line.split()[2:])
    return None


class Results:
    """Rows of OUT/results.jsonl by what was run."""

    def __init__(self, folder):
        self.path = os.path.join(folder, "results.jsonl")
        self.rows, self.new, self.lock = {}, 0, threading.Lock()
        if os.path.exists(self.path):
            self.load()

    def load(self):
        whole = 0
        with open(self.path, "rb+") as f:
            for n, line in enumerate(f, 1):
                if not line.endswith(b"\n"):  # cut short when the program was ended
                    f.truncate(whole)
                    break
                whole += len(line)
                try:
                    row = json.loads(line)
                    self.rows[tuple(row[k] for k in KEY)] = row
                except (ValueError, KeyError, TypeError):
                    raise Stop("%s: line %d is no result" % (self.path, n)) from None

    def add(self, key, row):
        row = dict(zip(KEY, key, strict=False), **row)
        with self.lock:
            self.rows[key] = row
            self.new += 1
            with open(self.path, "a") as f:
                f.write(json.dumps(row) + "\n")
        return row


class Runner:
    """Runs the program on one problem, design and fault at a time, and remembers."""

    def __init__(self, a, plugin):
        self.a, self.plugin = a, plugin
        self.end = time.time() + a.seconds
        self.results = Results(a.out)
        self.program = self.name_program()
        self.asks = "--design" in self.say("run", "--help")  # does it know of declared designs?

    def say(self, *arguments):
        try:
            done = subprocess.run([self.a.program, *arguments], capture_output=True, text=True)
        except OSError as e:
            raise Stop("%s: %s (make GPU=0 builds it)" % (self.a.program, e.strerror)) from e
        return done.stdout + done.stderr

    def name_program(self):
        """Its version, and a hash of its file: the same text for the same verdicts."""
        version = self.say("--version").strip()
        with open(self.a.program, "rb") as f:
            return "%s %s" % (version, hashlib.sha1(f.read()).hexdigest()[:8])

    def rows(self):
        """Results of this program and this plug-in."""
        return [
            r
            for r in self.results.rows.values()
            if r["program"] == self.program and r["plugin"] == self.plugin.hash
        ]

    def run(self, problem, design, declared=True, ranks=1, fault="", size=0.0, seed=1, units=None):
        """units: the errors, relative to their tensors, that sizes are multiples of."""
        declared = bool(declared and self.asks and self.plugin.declares(design) is not None)
        key = (
            self.program,
            self.plugin.hash,
            problem.name,
            problem.hash,
            design,
            declared,
            ranks,
            fault,
            size,
            seed,
        )
        row = self.results.rows.get(key)
        if row and row["verdict"] != "error":  # an error may have been the machine's
            return row
        t0 = time.time()
        row = self.run_now(problem, key, units or {})
        row["seconds"] = round(time.time() - t0, 2)
        return self.results.add(key, row)

    def environment(self, key, units):
        k = dict(zip(KEY, key, strict=False))
        env = dict(os.environ, ADVERSARY_DESIGN=k["design"], ADVERSARY_SEED=str(k["seed"]))
        env.setdefault("OMP_NUM_THREADS", "1")
        env["ADVERSARY_DECLARED"] = "1" if k["declared"] else "0"
        env["ADVERSARY_FAULT"] = "%s:%.17g" % (k["fault"], k["size"]) if k["fault"] else ""
        env["ADVERSARY_EXPECTED"] = ",".join("%s=%.6g" % u for u in units.items())
        return env

    def run_now(self, problem, key, units):
        k = dict(zip(KEY, key, strict=False))
        command = [
            self.a.program,
            "run",
            problem.name,
            "--cases",
            problem.folder,
            "--base",
            self.plugin.base(k["design"]),
            "--ranks",
            str(k["ranks"]),
            "--chain",
            "fp32",
            "--subject",
            self.plugin.library,
            "--limit",
            str(LIMIT),
            "--json",
            "-",
        ]
        if self.a.cache:
            command += ["--cache", self.a.cache]
        left = min(self.end - time.time() + GRACE, 1e6)
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=max(left, 0.1),
                env=self.environment(key, units),
            )
        except subprocess.TimeoutExpired:
            raise TimeOver from None
        row = {"base": self.plugin.base(k["design"]), "tensors": {}}
        try:
            runs = json.loads(done.stdout)["runs"]
        except ValueError:
            said = (done.stderr.strip().split("\n") or [""])[-1]
            return dict(row, verdict="error", why="status %d: %s" % (done.returncode, said[:200]))
        return dict(row, **self.result(runs, done.stderr, k["fault"]))

    def result(self, runs, stderr, fault):
        if not runs:
            return {"verdict": "none", "why": "the case has no such run"}
        r = runs[0]
        why = r.get("why", "")
        if r.get("outcome") not in ("returned", "unsupported"):
            return {"verdict": "error", "why": "the plug-in %s: %s" % (r.get("outcome"), why)}
        tensors = {t["name"]: summary(t) for t in r["tensors"]}
        if fault:  # thousands of lines: what tables show
            mine = fault.partition(".")[2]
            tensors = {n: t for n, t in tensors.items() if n == mine or t["verdict"] == "fail"}
        return {
            "verdict": r["verdict"],
            "tier": r.get("tier"),
            "why": why,
            "settled": r.get("settled", False),
            "place": parse_said(stderr, "place"),
            "grown": number((parse_said(stderr, "powers") or {}).get("grown", 0)),
            "tensors": tensors,
        }


def for_each(a, runner, what, tasks, work):
    """Runs work(task) for all tasks, --jobs at a time, in a random order. The order depends only on
    `what` and the number of tasks, so that tasks left out at the end of time are no special part.
    Prints how many were done."""
    tasks = list(tasks)
    random.Random("%s %d" % (what, len(tasks))).shuffle(tasks)
    told = [time.time(), 0]

    def one(task):
        if time.time() > runner.end:
            return
        try:
            work(task)
        except TimeOver:
            return
        with runner.results.lock:
            told[1] += 1
            if time.time() > told[0] + 30:
                told[0] = time.time()
                print(
                    "%s: %d of %d, %.0f s left"
                    % (what, told[1], len(tasks), runner.end - time.time()),
                    file=sys.stderr,
                    flush=True,
                )

    with ThreadPoolExecutor(a.jobs) as pool:
        for _ in pool.map(one, tasks):
            pass
    print(
        "%s: %d of %d done, %d new runs" % (what, told[1], len(tasks), runner.results.new),
        file=sys.stderr,
        flush=True,
    )
