"""The museum of the CUDA kernels: faults of gpu/fault.cuh, in a build that can switch them on.

Each fault runs through a list of small problems, smallest first, until one is red; without a fault
all must be green. `right` says whether the first wrong tensor of the pipeline is one that can show
the fault first.

kernels.json:
{"schema": "deltaproof-museum-kernels", "schema_version": 1, "commit", "seconds",
  "clean": {"runs", "red"},
  "faults": [{"name", "bug", "what", "shows", "runs", "red",
              "seen": {"id", "T", "ranks", "tensor", "tier", "rank", "head", "says",
                       "source"} | null,
              "right", "fla"}]}
"""

import argparse
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from read.runs import CannotRun, Program
from say.fla import fla_sees

Row = dict[str, Any]
FIELDS = ("fast", "name", "bug", "shows", "what")


def on(case: str, ranks: int, **how: str) -> tuple[str, list[str]]:
    """A case on ranks, with other options than PLAIN."""
    plain = {"way": "plain", "own": "even", "exchange": "allgather", "payload": "full"}
    words = ["--ranks", str(ranks)]
    return case, words + [w for k, v in {**plain, **how}.items() for w in (f"--{k}", v)]


# Smallest first. Last come problems for faults that only packed sequences, several keys, grouped
# heads or ranks with several parts can show. Faults of sent data have an exchange of their own.
SETS = {
    "fast": [
        on("strong-wide", 1),
        on("strong-keys", 1),
        on("gdn-wide", 1),
        on("mkda2-wide", 1),
        on("mkda4-wide", 1),
        on("k64-v128", 2),
        on("k128-v64", 3),
        on("wide-values-gdn", 1),
        on("segments", 3, way="segments"),
        # enough heads for plans without w and u (`gpu/fast/bare.cuh`)
        on("many-heads-wide", 3, way="segments"),
        on("many-heads-gdn", 3, way="segments"),
    ],
    "stages": [
        on("smoke-kda", 1),
        on("smoke-gdn", 1),
        on("smoke-mkda2", 1),
        on("smoke-kda", 2),
        on("smoke-kda", 4),
        on("exact-packed", 2),
        on("exact-kda", 2, own="zigzag"),
        on("smoke-kda", 2, own="zigzag"),
    ],
    "conv": [on("smoke-conv", 1), on("smoke-conv", 3), on("smoke-conv", 2, own="zigzag")],
    "slots": [on("session-slots", 1)],
    "tokens": [
        on("smoke-gdn2", 1),
        on("smoke-dplr", 1),
        on("smoke-deltaproduct", 1),
        on("smoke-gla", 4),
    ],
    "sent": [
        on("smoke-kda", 4, payload="m-i"),
        on("smoke-kda", 4, exchange="ring"),
        on("smoke-kda", 4, exchange="scan"),
        on("smoke-kda", 4, exchange="serial"),
        on("smoke-kda", 2, own="zigzag", exchange="ring"),
        on("smoke-kda", 2, own="zigzag", exchange="scan"),
        on("smoke-kda", 2, exchange="heads"),
        # value heads of one query head on both ranks
        on("initial-state", 2, exchange="heads"),
    ],
}
# causality-chunk on one rank; results in fp32 and many heads show what bf16 rounds away
BITS = ["strong-wide", "strong-keys", "k64-v128", "mkda2-wide", "k64-fp32"]
BITS += ["exchange-heads-wide", "many-heads-wide"]


def kind(fault: Row) -> str:
    """The set that the fault runs."""
    if fault["fast"]:
        return "fast"
    if "pool" in fault["shows"].split():
        return "slots"
    of = fault["name"].split("-")[0]
    beside = "conv" if fault["shows"] in ("y", "dx") else "stages"
    return {"token": "tokens", "sent": "sent"}.get(of, beside)


class Kernels:
    def __init__(self, program: Program, args: argparse.Namespace) -> None:
        self.program, self.start = program, time.time()
        listed = program.call("--version", fault="list").stdout.splitlines()
        known = [dict(zip(FIELDS, x.split("\t"), strict=True)) for x in listed if "\t" in x]
        if not known:
            raise CannotRun(
                "the kernels of this build have no faults to switch on (`make museum` builds those "
                "that have)"
            )
        self.rows = [new_row(x) for x in known if x["shows"] != "-"]
        if args.fault is not None:
            names = args.fault.split(",")
            for name in names:
                if name not in [r["name"] for r in self.rows]:
                    raise CannotRun(f"--fault '{name}': the kernels have none of that name")
            self.rows = [r for r in self.rows if r["name"] in names]
        self.clean = new_row(dict.fromkeys(FIELDS, ""))
        self.order = [t["name"] for t in program.json("list", "--tensors")]

    def run(self) -> None:
        """Without a fault first, so that truths are in the cache."""
        for k in SETS:
            if any(kind(r) == k for r in self.rows):
                for problem in SETS[k]:
                    self.problem(self.clean, k, problem)
        if any(not r["shows"] for r in self.rows):
            for case in BITS:
                self.check(self.clean, case)
        with ThreadPoolExecutor(min(16, len(os.sched_getaffinity(0)))) as pool:
            list(pool.map(self.of_fault, self.rows))
        self.seconds = time.time() - self.start

    def of_fault(self, row: Row) -> None:
        """Stops at the first red problem."""
        if not row["shows"]:
            for case in BITS:
                if not row["red"]:
                    self.check(row, case)
            return
        for problem in SETS[kind(row)]:
            if not row["red"]:
                self.problem(row, kind(row), problem)
        if row["red"] and kind(row) == "stages":
            self.ask_exact(row)

    def problem(self, row: Row, of: str, problem: tuple[str, list[str]]) -> None:
        case, words = problem
        if of != "conv":
            words = [*words, "--base", "bf16" if of == "fast" else "fp32", "--chain", "fp32"]
        made = self.record(row, case, words)
        if "died" in made:
            died(row, made["died"])
        elif not made["runs"]:
            raise CannotRun(f"{case}: {row['name']}: nothing ran")
        for run in made["runs"]:
            row["runs"] += 1
            if run["verdict"] == "fail":
                note(row, run, made["cases"][0].get("T", 0), self.order)

    def record(self, row: Row, case: str, words: list[str]) -> Row:
        return self.program.record(
            os.path.join(self.program.cases, case + ".case"),
            *("--backend", "cuda", *words),
            alone=bool(row["name"]),
            fault=row["name"] or None,
        )

    def check(self, row: Row, case: str) -> None:
        """Later data must not be seen: no verdict of a tensor, a check between two runs."""
        path = os.path.join(self.program.cases, case + ".case")
        words = ["--backend", "cuda", "--base", "bf16", "--chain", "fp32", "--ranks", "1"]
        made = self.program.call(
            *("check", path, *words, "--only", "causality-chunk"),
            alone=bool(row["name"]),
            fault=row["name"] or None,
        )
        row["runs"] += 1
        if made.returncode < 0:
            died(row, -made.returncode)
        elif made.returncode == 1:
            row["red"] += 1
            row["right"] = True
            says = next((x for x in made.stdout.splitlines() if x.startswith("fail")), "")
            row["seen"] = {
                **{"id": f"check {case} --only causality-chunk", "T": 0, "ranks": 1},
                **{"tensor": "", "tier": "bits", "rank": -1, "head": -1},
                **{"says": " ".join(says.split()[1:]), "source": ""},
            }
        elif made.returncode:
            raise CannotRun(f"{case}: causality-chunk: {made.stdout}{made.stderr}")

    def ask_exact(self, row: Row) -> None:
        """The place whose data an exact case holds, when it says so."""
        for case, ranks in (("exact-kda", "4"), ("exact-packed", "2")):
            words = ["--ranks", ranks, "--base", "fp32", "--chain", "fp32"]
            for run in self.record(row, case, words)["runs"][:1]:
                if "holds" in run.get("why", ""):
                    row["seen"]["source"] = run["why"].split(": ", 1)[-1]
                    return

    # ---- table and record ----------------------------------------------------------------------

    def print(self) -> None:
        line = "{:<20} {:>3}  {:<58} {:<12} {:<6} {:<16} {:<5} {:<4} {}"
        print(
            line.format(
                *("fault of the kernels", "bug", "smallest problem that shows it", "first wrong"),
                *("tier", "worst at", "right", "FLA", "whose data the exact cases find, or why"),
            )
        )
        for r in self.rows:
            s = r["seen"] or dict.fromkeys(("tensor", "tier", "source", "says"), "")
            at = f"rank {s['rank']}, head {s['head']}" if s.get("rank", -1) >= 0 else ""
            yes = ["yes" if r[k] else "no" for k in ("right", "fla")]
            cells = [r["name"], r["bug"] or "", s.get("id", "NOT SEEN"), s["tensor"], s["tier"], at]
            print(line.format(*cells, *yes, (s["source"] or s["says"])[:150]).rstrip())
        print(
            "right: the first wrong tensor is one that can show this fault first; FLA: above the "
            "thresholds of FLA's tests on the same data\n"
            f"MUSEUM OF KERNELS: {sum(r['red'] > 0 for r in self.rows)} of {len(self.rows)} faults "
            f"seen, {sum(r['right'] for r in self.rows)} at the right tensor; without a fault "
            f"{self.clean['red']} of {self.clean['runs']} runs red ({self.seconds:.0f} s)"
        )

    def as_json(self) -> Row:
        return {
            "schema": "deltaproof-museum-kernels",
            "schema_version": 1,
            "commit": self.program.commit,
            "seconds": round(self.seconds, 1),
            "clean": {k: self.clean[k] for k in ("runs", "red")},
            "faults": [{k: v for k, v in r.items() if k != "fast"} for r in self.rows],
        }

    def missed(self) -> bool:
        return bool(self.clean["red"]) or not all(r["red"] for r in self.rows)


def new_row(fault: dict[str, str]) -> Row:
    none = {"runs": 0, "red": 0, "seen": None, "right": False, "fla": False}
    return {**fault, "bug": int(fault["bug"] or 0), "fast": fault["fast"] == "1", **none}


def note(row: Row, run: Row, T: int, order: list[str]) -> None:
    """order: tensors as the pipeline makes them."""
    row["red"] += 1
    row["fla"] |= fla_sees(run)
    if row["seen"]:
        return
    failing = {t["name"]: t for t in run["tensors"] if t["verdict"] == "fail"}
    name = next((x for x in [*order, *failing] if x in failing), "")
    t = failing.get(name, {"name": ""})
    at = t.get("failed", {})
    row["right"] = t["name"] in row["shows"].split()
    row["seen"] = {
        **{"id": run["id"], "T": T, "ranks": run["ranks"], "tensor": t["name"]},
        **{"tier": run.get("tier") or "bound", "says": t.get("why") or run.get("why", "")},
        **{k: at.get(k, -1) for k in ("rank", "head")},
        "source": "",
    }


def died(row: Row, by: int) -> None:
    """No verdict, but not unseen: the program that runs a subject reports it."""
    row["red"] += 1
    row["seen"] = {
        **{"id": "", "T": 0, "ranks": 0, "tensor": "", "tier": "crash", "rank": -1, "head": -1},
        **{"says": signal.strsignal(by) or "", "source": ""},
    }
