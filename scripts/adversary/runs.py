"""Runs of the program with the plug-in, one at a time, remembered in OUT/results.jsonl."""
import hashlib
import json
import math
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from plugin import Stop

KEY = "program plugin problem text design fault size seed ranks".split()
LIMIT = 600                                # seconds that one run of a design may take


def number(x):
    return math.nan if x is None else float(x)


def judged(row):
    return row["verdict"] in ("pass", "fail")


def columns(row):
    return dict(zip(KEY, row["key"]))


def summary(t):
    """Of one tensor of a record: what the tables need. times, window: error over the expected one,
    of the whole tensor and of its worst window of tokens and head."""
    e = t.get("expected") or {}
    level = {k: number(e[k]["ratio"]) for k in ("tensor", "window") if k in e}
    return {"verdict": t["verdict"], "tier": t.get("tier"), "rel": number(t["rel_fro"]),
            "bound": number(t.get("ratio")), "excess": number(e.get("excess")),
            "expected": number(e.get("rel")), "times": level.get("tensor", math.nan),
            "window": level.get("window", math.nan)}


def parse_place(stderr):
    for line in stderr.split("\n"):
        if line.startswith("adversary: place "):
            return dict(pair.split("=") for pair in line.split()[2:])
    return None


class Runner:
    """Runs the program on one problem, design and fault at a time, and remembers."""

    def __init__(self, a, plugin):
        self.a, self.plugin, self.lock = a, plugin, threading.Lock()
        self.path = os.path.join(a.out, "results.jsonl")
        self.done, self.new = {}, 0
        self.program = self.name_program()
        self.load()

    def name_program(self):
        """Its version, and a hash of its file: the same text for the same verdicts."""
        try:
            done = subprocess.run([self.a.program, "--version"], capture_output=True, text=True)
            with open(self.a.program, "rb") as f:
                binary = hashlib.sha1(f.read()).hexdigest()[:8]
        except OSError as e:
            raise Stop("%s: %s (make GPU=0 builds it)" % (self.a.program, e.strerror))
        return "%s %s" % (done.stdout.strip(), binary)

    def load(self):
        if not os.path.exists(self.path):
            return
        whole = 0
        with open(self.path, "rb+") as f:
            for n, line in enumerate(f, 1):
                if not line.endswith(b"\n"):                 # cut short when the program was ended
                    f.truncate(whole)
                    break
                whole += len(line)
                try:
                    row = json.loads(line)
                    self.done[tuple(row["key"])] = row
                except (ValueError, KeyError, TypeError):
                    raise Stop("%s: line %d is no result" % (self.path, n))

    def run(self, problem, design, fault="", size=0.0, seed=1, ranks=1, units=None):
        """units: the errors, relative to their tensors, that sizes are multiples of."""
        key = (self.program, self.plugin.hash, problem.name, problem.hash, design, fault, size,
               seed, ranks)
        if key in self.done:
            return self.done[key]
        row = self.run_now(problem, design, fault, size, seed, ranks, units or {})
        row["key"] = list(key)
        with self.lock:
            self.done[key] = row
            self.new += 1
            with open(self.path, "a") as f:
                f.write(json.dumps(row) + "\n")
        return row

    def run_now(self, problem, design, fault, size, seed, ranks, units):
        base = self.plugin.base(design)
        command = [self.a.program, "run", problem.name, "--cases", problem.folder, "--base", base,
                   "--ranks", str(ranks), "--chain", "fp32", "--subject", self.plugin.library,
                   "--limit", str(LIMIT), "--json", "-"]
        if self.a.cache:
            command += ["--cache", self.a.cache]
        env = dict(os.environ, ADVERSARY_DESIGN=design, ADVERSARY_SEED=str(seed))
        env.setdefault("OMP_NUM_THREADS", "1")
        env["ADVERSARY_FAULT"] = "%s:%.17g" % (fault, size) if fault else ""
        env["ADVERSARY_EXPECTED"] = ",".join("%s=%.6g" % u for u in units.items())
        t0 = time.time()
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        try:
            runs = json.loads(done.stdout)["runs"]
        except ValueError:
            raise Stop("%s\nwrote no record (status %d):\n%s"
                       % (" ".join(command), done.returncode, done.stderr))
        row = {"design": design, "base": base, "seconds": round(time.time() - t0, 3)}
        return dict(row, **self.result(problem, design, runs, done.stderr))

    def result(self, problem, design, runs, stderr):
        if not runs:
            return {"verdict": "none", "why": "the case has no such run", "tensors": {}}
        r = runs[0]
        if r.get("outcome") not in ("returned", "unsupported"):
            raise Stop("%s with %s: the plug-in %s: %s"
                       % (problem.name, design, r.get("outcome"), r.get("why")))
        return {"verdict": r["verdict"], "tier": r.get("tier"), "why": r.get("why", ""),
                "place": parse_place(stderr),
                "tensors": {t["name"]: summary(t) for t in r["tensors"]}}


def for_each_problem(a, runner, problems, work):
    """work(problem) for all, --jobs at a time; none is begun after --seconds."""
    t0 = time.time()

    def one(problem):
        if time.time() - t0 > a.seconds:
            return 0
        work(problem)
        print("%7.0f s  %s (%d new runs)" % (time.time() - t0, problem.name, runner.new),
              file=sys.stderr, flush=True)
        return 1
    with ThreadPoolExecutor(a.jobs) as pool:
        finished = sum(pool.map(one, problems))
    print("%d of %d problems, %d new runs" % (finished, len(problems), runner.new), file=sys.stderr)
