#!/usr/bin/env python3
"""museum.py PROGRAM [OPTION..] [CASE..]: every deliberate fault against every case that could show
it. Which verdict goes red, and where does it point? `deltaproof museum --help` has the options.

A run of a fault acts when the fault changed any number (`acted` of the record; of chains and
convolutions: always). It is red when its verdict fails. Faults of single runs (race, order) are red
when `check --only repeat` fails. One red run of each case is located by `deltaproof bisect stage`.
That is right if it names the fault's own stage, and the fault did act on that rank and head. FLA:
relative RMS error of a whole tensor above LIMITS, or not finite. Runs above these without the fault
do not count.

museum.json:
{"schema": "deltaproof-museum", "schema_version": 1, "commit", "seconds", "cases",
  "clean": {"runs", "red"},
  "faults": [{"name", "bug", "stage", "what", "source", "runs", "acted", "red",
              "seen": {"id", "T", "tensor", "tier", "ratio"} | null,
                        the red run of the smallest problem
              "ranks": smallest number of ranks that was red,
              "located": {"by", "stage", "tensor", "rank", "head", "right"} | null,
              "locations": {"right", "of", "astray"},
                        astray: first run located wrongly, and where; ""
              "fla": {"red", "of"}}],
                        of the red runs that FLA's own thresholds pass without the fault
  "bugs": [{"number", "what", "note", "faults": [names]}]}

--shrink DIR: the largest red problem of each fault by `deltaproof shrink`, as DIR/FAULT.case.
--kernels: kernels.py. Exit status 0: every fault was seen and nothing was red without one (with
--shrink: each got 20 times smaller). 1: not so. 2: could not run.
"""

import argparse
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

# Where this program's own modules are: -I leaves that out.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import kernels
from read import files, many
from read.runs import CannotRun, Program
from say.bugs import BUGS
from say.fla import fla_sees

Row = dict[str, Any]
MOST_TOKENS, MOST_FACTORS = 8192, 64 * 64  # of a look of minutes
QUERY_HEADS = re.compile("d?[qk]|d(x|w|bias)_[qk]")
BESIDE = {"y": "conv_fwd", "M": "pre_process_fwd", "pool": "calls"}
BESIDE |= dict.fromkeys(("dx", "dw", "dbias"), "conv_bwd")
BESIDE |= dict.fromkeys(("o_drafted", "state_drafted", "state_within"), "calls")


def policy(run: Row) -> tuple[Any, ...]:
    return (run["ranks"], *(run["policy"].get(k) for k in ("own", "base", "chain", "merge")))


def options_of(run: Row, words: Iterable[str]) -> list[str]:
    """The run's policy as options of another command."""
    out = ["--ranks", str(run["ranks"])]
    for word in words:
        key = {"exchange": "merge"}.get(word, word)
        if run["policy"].get(key):
            out += [f"--{word}", run["policy"][key]]
    return out


def speaks(run: Row) -> Row | None:
    """The tensor that carries the failure."""
    name = run.get("why", "").split(":")[0]
    failing = [t for t in run["tensors"] if t["verdict"] == "fail"]
    return next((t for t in failing if t["name"] == name), failing[0] if failing else None)


class Museum:
    def __init__(self, program: Program, args: argparse.Namespace) -> None:
        self.program, self.args, self.start = program, args, time.time()
        known = {f["name"]: f for f in program.json("list", "--faults")}
        names = list(known if args.fault is None else dict.fromkeys(args.fault.split(",")))
        for name in names:
            if name not in known:
                raise CannotRun(f"--fault '{name}': not known (see list --faults)")
        self.rows = [new_row(known[name]) for name in names]
        self.cases = self.find_cases()
        self.clean: dict[str, list[Row]] = {}
        self.heads: dict[str, Row] = {}
        self.locate = args.locate or sys.maxsize
        self.policies = [] if args.all else ["--base", "fp32,bf16", "--chain", "fp32"]
        self.policies += [] if args.all else ["--exchange", "allgather"]

    def find_cases(self) -> list[Row]:
        """The command's cases, or all, with those of folder museum, which other commands leave out.
        A fault of each can show there."""
        home = self.program.cases
        folders: dict[str, list[Row]] = {}

        def those_of(folder: str) -> list[Row]:
            if folder not in folders:
                folders[folder] = self.program.json("list", "--cases", folder)
                for c in folders[folder]:
                    c["path"] = os.path.join(folder, c["name"] + ".case")
            return folders[folder]

        if self.args.names:
            cases = []
            for name in self.args.names:
                path = name if os.path.exists(name) else os.path.join(home, name)
                folder, base = os.path.split(path.removesuffix(".case"))
                cases += [c for c in those_of(folder or ".") if c["name"] == base]
                if not cases or cases[-1]["name"] != base:
                    raise CannotRun(f"{name}: no such case")
        else:
            more = os.path.join(home, "museum")
            cases = those_of(home) + (those_of(more) if os.path.isdir(more) else [])
        kinds = 0
        for row in self.rows:
            kinds |= row["kind"]
        all_sizes = self.args.all or self.args.names
        cases = [c for c in cases if c["kinds"] & kinds and (all_sizes or small(c))]
        if not cases:
            raise CannotRun("none of these cases can show such a fault")
        return cases

    # ---- runs ----------------------------------------------------------------------------------

    def record(self, cases: list[Row], *options: str, alone: bool = False) -> Row:
        words = [c["path"] for c in cases]
        r = self.program.record(*words, "--backend", "sim", *self.policies, *options, alone=alone)
        if "died" in r:
            raise CannotRun(f"`run` was ended: {signal.strsignal(r['died'])}")
        if r["errors"] > r.get("empty", 0):
            raise CannotRun(f"{r['errors']} cases could not be judged: {r['said'].strip()}")
        return r

    def run(self) -> None:
        """Without a fault first: the runs with faults then find truths and draws in the cache."""
        clean = self.record(self.cases)
        if not clean["runs"]:
            raise CannotRun(f"no run without a fault: {clean['said'].strip()}")
        self.heads = {c["name"]: c for c in clean["cases"]}
        for r in clean["runs"]:
            self.clean.setdefault(r["case"], []).append(r)
        self.red = [r for r in clean["runs"] if r["verdict"] == "fail"]
        self.runs = len(clean["runs"])
        each(self.of_fault, self.rows, self.args.quiet)
        self.seconds = time.time() - self.start

    def of_fault(self, row: Row) -> None:
        cases = [c for c in self.cases if c["kinds"] & row["kind"] and c["name"] in self.clean]
        if not cases:
            return
        of_case: dict[str, list[Row]] = {}
        words = ["--base", "fp32"] if row["by_run"] and not self.args.all else []
        made = self.record(cases, "--fault", row["name"], *words, alone=len(self.rows) > 1)
        for r in made["runs"]:
            if r["verdict"] != "skipped":
                of_case.setdefault(r["case"], []).append(r)
        for c in cases:
            self.of_case(row, c, of_case.get(c["name"], []))

    def of_case(self, row: Row, case: Row, runs: list[Row]) -> None:
        """Counts the runs of one case, and localises the red run with the most ranks."""
        without = {policy(r): r for r in self.clean[case["name"]]}
        red = []
        for r in runs:
            row["runs"] += 1
            row["acted"] += row["by_run"] or any(r.get("acted", [1]))
            if row["by_run"]:
                r["again"] = self.differs(case, r)
            if r.get("again") or (r["verdict"] == "fail" and not row["by_run"]):
                red.append(r)
                clean = without.get(policy(r))
                if not row["by_run"] and case["recurrence"] and clean and not fla_sees(clean):
                    row["fla"]["of"] += 1
                    row["fla"]["red"] += fla_sees(r)
        row["red"] += len(red)
        if not red:
            return
        row["ranks"] = min([r["ranks"] for r in red] + ([row["ranks"]] if row["ranks"] else []))
        T = self.heads[case["name"]].get("T") or case["T"]
        smaller = not row["seen"] or row["seen"]["T"] > T
        if row["locations"]["of"] < self.locate:
            at = self.place(row, case, max(red, key=lambda r: r["ranks"]))
            now = row["located"]
            if not now or not now["stage"] or (at["right"] and not now["right"] and smaller):
                row["located"] = at
        if smaller:
            row["seen"] = self.seen(row, T, red[0])
        if not row["largest"] or row["largest"][0] < T:
            most = max(red, key=lambda r: (r["ranks"], r["policy"].get("base") == "fp32"))
            row["largest"] = (T, case, most)

    @staticmethod
    def seen(row: Row, T: int, run: Row) -> Row:
        if row["by_run"]:
            how = {"tensor": run["again"][0], "tier": "repeat", "ratio": None}
        elif t := speaks(run):
            how = {"tensor": t["name"], "tier": run.get("tier") or t.get("tier") or "bound"}
            how["ratio"] = t.get("failed", {}).get("times")
        else:
            how = {"tensor": run["op"], "tier": "bits", "ratio": None}
        return {"id": run["id"], "T": T, **how}

    def differs(self, case: Row, run: Row) -> tuple[str, dict[str, int]] | None:
        """The stage and place in which repeated runs differ first."""
        words = options_of(run, ("base", "chain", "exchange", "payload", "fault"))
        made = self.program.call("check", case["path"], "--only", "repeat", *words, alone=True)
        at = re.search(r"first in\s+(\w+),\s+rank\s+(\d+),\s+head\s+(\d+)", made.stdout)
        if made.returncode != 1 or not at:
            return None
        return at[1], {"rank": int(at[2]), "head": int(at[3])}

    # ---- places --------------------------------------------------------------------------------

    def place(self, row: Row, case: Row, run: Row) -> Row:
        at = self.by_stages(row, case, run) if case["stages"] else self.by_verdict(run)
        own = at["stage"] in row["stage"].split("/")
        at["right"] = own and (not case["stages"] or self.acted(run, at))
        row["locations"]["of"] += 1
        row["locations"]["right"] += at["right"]
        if not at["right"] and not row["locations"]["astray"]:
            row["locations"]["astray"] = (
                f"{run['id']}: {at['stage'] or 'no stage'}, {at['tensor']}, rank {at['rank']}, "
                f"head {at['head']}"
            )
        return at

    def by_stages(self, row: Row, case: Row, run: Row) -> Row:
        words = options_of(run, ("own", "base", "chain", "exchange", "payload", "fault"))
        words += ["--runs", "4" if row["by_run"] else "1"]
        made = self.program.call("bisect", "stage", case["path"], *words, alone=True)
        at: Row = {"by": "bisect stage", "stage": None, "tensor": "", "rank": -1, "head": -1}
        if made.returncode == 1:
            at["stage"] = re.search(r"^WRONG STAGE: (\S+)", made.stdout, re.M)[1]
            where = re.search(r"^  (?:first wrong row|where most): (.*)", made.stdout, re.M)[1]
            at["tensor"] = where.split(",")[0]
            for k in ("rank", "head"):
                n = re.search(rf", {k} (\d+)", where)
                at[k] = int(n[1]) if n else -1
        return at

    def by_verdict(self, run: Row) -> Row:
        """One stage, no ranks that matter to it."""
        failing = [t for t in run["tensors"] if t["verdict"] == "fail"]
        t = failing[0] if failing else {"name": ""}
        stage = "calls" if self.heads[run["case"]].get("session") else BESIDE.get(t["name"])
        place = t.get("failed", {})
        at = {k: place.get(k, -1) for k in ("rank", "head")}
        return {"by": "verdict", "stage": stage if failing else None, "tensor": "", **at}

    def acted(self, run: Row, at: Row) -> bool:
        """Did it act there? Sums over ranks have rank -1, what all heads share has head -1. A fault
        of single runs acts where these differ."""
        if run.get("again"):
            return all(at[k] in (-1, there) for k, there in run["again"][1].items())
        c = self.heads[run["case"]]
        of = c["HV"] // c["H"] if QUERY_HEADS.fullmatch(at["tensor"]) else 1
        return "acted" not in run or any(
            hit and at["rank"] in (-1, i // c["HV"]) and at["head"] in (-1, i % c["HV"] // of)
            for i, hit in enumerate(run["acted"])
        )

    # ---- what is left of it --------------------------------------------------------------------

    def shrink(self, folder: str) -> bool:
        print(f"{'fault':<21} {'case':<20} {'before':>9} {'left':>6} {'smaller':>8}  what fails")
        good = [self.shrunk(row, folder) for row in self.rows if row["largest"]]
        none = [row["name"] for row in self.rows if not row["largest"]]
        for name in none:
            print(f"{name:<21} no case shows it")
        print(f"{sum(good)} of {len(self.rows)} faults: 20 times smaller, failing alike")
        return all(good) and not none

    def shrunk(self, row: Row, folder: str) -> bool:
        _, case, run = row["largest"]
        words = options_of(run, ("base", "chain", "exchange", "payload", "fault"))
        path = os.path.join(folder, row["name"] + ".case")
        made = self.program.call("shrink", case["path"], *words, "--output", path)
        got = re.search(r"^(\d+) numbers, .*: (\S+)x smaller", made.stdout, re.M)
        after = re.search(r"^after:  (.*)", made.stdout, re.M)
        if made.returncode or not got or not after:
            print(f"{row['name']:<21} {case['name']:<20} {made.stderr.strip()[:100]}")
            return False
        left, times = int(got[1]), float(got[2])
        print(
            f"{row['name']:<21} {case['name']:<20} {left * times:9.0f} {left:6} {times:7.0f}x  "
            f"{after[1]}"
        )
        return times >= 20

    # ---- table and record ----------------------------------------------------------------------

    def print(self) -> None:
        line = "{:<21} {:>3}  {:<11} {:<46} {:<12} {:<7} {:<34} {:<5} {:>5} {:>2} {}"
        print(
            line.format(
                *("fault", "bug", "red/acted", "smallest problem that shows it", "worst tensor"),
                *("tier", "located at", "right", "T", "N", "FLA"),
            )
        )
        for r in self.rows:
            seen, at, of = r["seen"], r["located"], r["locations"]["of"]
            cells = [r["name"], r["bug"] or "", f"{r['red']}/{r['acted']}"]
            cells += (
                [cut(seen["id"]), seen["tensor"], seen["tier"]] if seen else ["NOT SEEN", "", ""]
            )
            known = at and at["stage"]
            cells += [f"{at['stage']}, rank {at['rank']}, head {at['head']}" if known else ""]
            cells += [f"{r['locations']['right']}/{of}" if of else ""]
            cells += [seen["T"], r["ranks"]] if seen else ["", ""]
            cells += [f"{r['fla']['red']}/{r['fla']['of']}" if r["fla"]["of"] else ""]
            print(line.format(*cells).rstrip())
        for r in self.rows:
            if not r["red"]:
                how = f"{r['acted']} of {r['runs']} runs differ, none fails"
                print(f"not seen: {r['name']}: {how if r['runs'] else 'no case has a run of it'}")
            if r["locations"]["astray"]:
                print(f"located wrongly: {r['name']}: {r['locations']['astray']}")
        for number, (what, note) in BUGS.items() if not self.args.fault else ():
            if not any(r["bug"] == number for r in self.rows):
                print(f"bug {number} ({what}): {note}")
        self.print_sums()

    def print_sums(self) -> None:
        why = f": {self.red[0]['id']}: {self.red[0].get('why', '')}" if self.red else ""
        places = [r["locations"] for r in self.rows]
        print(
            "red/acted: runs whose verdict fails, of those where the fault changed anything; "
            "right: located at the fault's own stage, where it acted; T, N: smallest problem and "
            "number\nof ranks that show it; FLA: red runs above the thresholds of FLA's tests, of "
            "those below them without the fault\n"
            f"{len(self.cases)} cases, {self.runs} runs without a fault: {len(self.red)} red{why}\n"
            f"MUSEUM: {sum(r['red'] > 0 for r in self.rows)} of {len(self.rows)} faults seen, "
            f"{sum(x['right'] for x in places)} of {sum(x['of'] for x in places)} red runs located "
            f"at the right stage, rank and head ({self.seconds:.0f} s)"
        )

    def as_json(self) -> Row:
        return {
            "schema": "deltaproof-museum",
            "schema_version": 1,
            "commit": self.program.commit,
            "seconds": round(self.seconds, 1),
            "cases": len(self.cases),
            "clean": {"runs": self.runs, "red": len(self.red)},
            "faults": [{k: v for k, v in r.items() if k not in HIDDEN} for r in self.rows],
            "bugs": [
                {
                    "number": n,
                    "what": what,
                    "note": note,
                    "faults": [r["name"] for r in self.rows if r["bug"] == n],
                }
                for n, (what, note) in BUGS.items()
            ],
        }

    def missed(self) -> bool:
        return bool(self.red) or not all(r["red"] for r in self.rows)


HIDDEN = ("kind", "by_run", "largest")


def new_row(fault: Row) -> Row:
    none = {"runs": 0, "acted": 0, "red": 0, "seen": None, "ranks": None, "located": None}
    counts = {"locations": {"right": 0, "of": 0, "astray": ""}, "fla": {"red": 0, "of": 0}}
    return {**fault, **none, **counts, "largest": None}


def small(c: Row) -> bool:
    return not c["data"] and c["T"] <= (MOST_FACTORS if c["factors"] else MOST_TOKENS)


def cut(run_id: str) -> str:
    """Without what the table says beside it, or all runs have."""
    case, _, rest = run_id.partition(":")
    keep = (x for x in rest.split(",") if x != "merge=allgather" and not x.startswith("fault="))
    return f"{case}:{','.join(keep)}"


def each(work: Callable[[Row], None], rows: list[Row], quiet: bool) -> None:
    """A process a core. An interrupt ends those that run."""
    done = 0

    def timed(row: Row) -> None:
        start = time.time()
        work(row)
        if not quiet:
            print(f"{row['name']:<24} {time.time() - start:6.1f} s", file=sys.stderr)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        try:
            for _ in pool.map(timed, rows):
                done += 1
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            Program.stop()
            print(
                f"deltaproof: museum: interrupted: {done} of {len(rows)} faults are done, nothing "
                "is written",
                file=sys.stderr,
            )
            raise


def counted(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}: must be a number from 0 on")
    return int(text)


def arguments(words: list[str]) -> argparse.Namespace:
    """`deltaproof museum --help` describes them (harness/commands/cmd_museum.c)."""
    p = argparse.ArgumentParser(prog="deltaproof museum", add_help=False)
    for flag in ("--all", "--kernels"):
        p.add_argument(flag, action="store_true")
    for word in ("--fault", "--out", "--cache", "--shrink", "--recurrence"):
        p.add_argument(word)
    p.add_argument("--cases", "-c")
    p.add_argument("--locate", type=counted, default=3)
    p.add_argument("names", nargs="*", metavar="CASE")
    a = p.parse_intermixed_args(words)
    a.quiet = not sys.stderr.isatty()
    if a.all:
        a.locate = 0
    if a.kernels and (a.names or a.all or a.shrink):
        p.error("--kernels has a list of problems of its own")
    return a


def main(argv: list[str]) -> int:
    a = arguments(argv[2:])
    file = a.out and os.path.join(a.out, "kernels.json" if a.kernels else "museum.json")
    try:
        for folder in filter(None, (a.out, a.shrink)):
            os.makedirs(folder, exist_ok=True)
        if file and (os.path.isdir(file) or not os.access(a.out, os.W_OK)):
            raise CannotRun(f"{file}: cannot be written")
        program = Program(argv[1], a)
        of = kernels.Kernels(program, a) if a.kernels else Museum(program, a)
        of.run()
        if file:
            files.write(file, (json.dumps(of.as_json(), indent=1) + "\n").encode())
        good = of.shrink(a.shrink) if a.shrink else (of.print(), not of.missed())[1]
        if file:
            print(f"record: {file}")
    except CannotRun as e:
        print(f"deltaproof: museum: {e}", file=sys.stderr)
        return 2
    return 0 if good else 1


if __name__ == "__main__":
    many.end(main)
