#!/usr/bin/env python3
"""The smallest input of each failure of the field table: DIR/shrunk/KERNEL.CASE.case (and what it
refers to), and a line of what is left. Needs a CUDA GPU and the kernels.

    python3 shrink.py DIR --program build/deltaproof --cases FOLDER... [--have FOLDER]
                      [--jobs N] [--seconds S]

DIR/judged has the verdicts (judge.py). The smallest case that a search has found after --seconds is
its result. Cases of --have are not searched again.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import shutil
import subprocess
import sys

from claims import KERNELS

HERE = pathlib.Path(__file__).resolve().parent
TOP = HERE.parent.parent.parent.parent
BY_NAME = {k.name: k for k in KERNELS}


def failures(args):
    """(kernel, case) of what failed, in the order of their names."""
    for path in sorted((args.folder / "judged").glob("*.json")):
        kernel, _, case = path.name.removesuffix(".json").partition(".")
        if args.have and (args.have / f"{kernel}.{case}.case").is_file():
            continue
        runs = json.loads(path.read_text())["runs"]
        if runs and runs[0]["verdict"] == "fail" and kernel in BY_NAME:
            yield kernel, case


# What a case says of how it is run, or that only sessions have: what failed is one call, one rank.
RUN = ("session", "ranks", "base", "chain", "merge", "payload", "own", "smoke")


def case_file(args, kernel, case):
    """Its path: of a case whose inputs are drawn a copy for the run that failed."""
    path = next(f for f in args.cases if (f / f"{case}.case").is_file()) / f"{case}.case"
    lines = path.read_text().splitlines()
    if any(line.startswith("data") for line in lines):
        return path.resolve()
    one = (args.folder / "shrunk" / kernel / path.name).resolve()
    one.parent.mkdir(exist_ok=True)
    kept = [line for line in lines if not line.startswith(RUN)]
    one.write_text("\n".join([*kept, f"base = {BY_NAME[kernel].claims['base']}"]) + "\n")
    return one


def command_of(args, kernel, case, out):
    """Runs in TOP, so that the case names no folder of this machine."""
    claims = BY_NAME[kernel].claims
    python = "python3" if shutil.which("python3") == sys.executable else sys.executable
    program = HERE.relative_to(TOP) / "program.py"
    words = [
        str(pathlib.Path(args.program).resolve()),
        "shrink",
        str(case_file(args, kernel, case)),
        "--base",
        claims["base"],
    ]
    words += ["--ranks", "1", "--seconds", str(args.seconds), "--limit", "90"]
    words += ["--cache", str((args.folder / "cache").resolve()), "--output", str(out.resolve())]
    words += ["--design", claims["design"]] if "design" in claims else []
    return [*words, "--serve", f"{python} {program} {kernel}"]


def shrink(args, kernel, case):
    out = args.folder / "shrunk" / f"{kernel}.{case}.case"
    log = out.with_suffix(".txt")
    with log.open("w") as f:
        p = subprocess.run(
            command_of(args, kernel, case, out), stdout=f, stderr=subprocess.STDOUT, cwd=TOP
        )
    said = [line for line in log.read_text().splitlines() if "numbers" in line]
    return said[-1] if out.is_file() and said else f"status {p.returncode}"


def main():
    a = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    a.add_argument("folder", type=pathlib.Path)
    a.add_argument("--program", required=True)
    a.add_argument("--cases", nargs="+", type=pathlib.Path, required=True)
    a.add_argument("--have", type=pathlib.Path)
    a.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    a.add_argument("--seconds", type=float, default=150)
    args = a.parse_args()
    (args.folder / "shrunk").mkdir(exist_ok=True)
    found = list(failures(args))
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for (kernel, case), said in zip(
            found, pool.map(lambda f: shrink(args, *f), found), strict=True
        ):
            print(f"{kernel:26} {case:22} {said}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
