#!/usr/bin/env python3
"""FLA's own tests of the operators, run on deltaproof.ops.

    python3 scripts/campaigns/ops/fla_tests.py TESTS --out DIR [--limit SECONDS] [-k WORDS]
        [--half bfloat16] [--whose fla]

TESTS: folder `tests` of a checkout of FLA, which is read and never kept here. FLA's functions are
replaced by ours of the same name (`swap.py`). Results go to DIR/results.jsonl, a line a test.
DIR/table.txt is written behind each test. A later call with the same DIR goes on where this one
stopped, behind a crash too; a test that SIGTERM cuts runs again. Kinds:

    passed      with a call of ours in it
    failed      likewise, or an error or a crash
    not served  one of ours raised NotImplementedError: the reason is kept
    skipped     by FLA's own condition
    no call     passed without a call of ours: of FLA's other kernels
    broke first failed before a call of ours

Most of FLA's tests ask for fp16, which ours do not take. The option --half names the type that
replaces it in the tests' parameters, for reference and ours. The tests' bounds stay as they are.
--whose fla runs FLA's own functions likewise, to tell a failure of the type from ours. FLA's
kernels choose among two of their configurations, since each is compiled by its first test."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
FILES = (
    "ops/test_kda.py",
    "ops/test_gdn.py",
    "ops/test_gdn_kernels.py",
    "modules/test_conv.py",
    "ops/test_gdn2.py",
    "ops/test_simple_gla.py",
    "ops/test_gla.py",
    "ops/test_gdp.py",
    "ops/test_delta_product.py",
    "ops/test_dplr_delta.py",
    "ops/test_rwkv7.py",
    "models/test_modeling_kda.py",
    "models/test_modeling_gated_deltanet.py",
    "context_parallel/test_cp_kda.py",
    "context_parallel/test_cp_gdn.py",
    "context_parallel/test_cp_conv.py",
    "context_parallel/test_cp_dplr.py",
)
KINDS = ("passed", "failed", "not served", "skipped", "no call", "broke first")
A_TEST_S = 120


def read(out):
    """{test: (kind, why, seconds)}; one that began and did not end is a crash."""
    found = {}
    for line in (out / "results.jsonl").open() if (out / "results.jsonl").exists() else ():
        r = json.loads(line)
        found[r["test"]] = (r["kind"], r["why"], r["s"])
    return {
        t: ("failed", "the process ended within it", 0) if r[0] == "began" else r
        for t, r in found.items()
        if r[0] != "cut"
    }


class Recorder:
    """pytest's plugin: leaves out what has a result, writes one for each test that ran."""

    def __init__(self, args):
        self.args, self.done, self.called, self.running = args, read(args.out), False, None
        self.until = time.monotonic() + args.limit
        self.file = (args.out / "results.jsonl").open("a")

    def write(self, test, kind, why="", s=0.0):
        said = {"test": test, "kind": kind, "why": why[:400], "s": round(s, 2)}
        print(json.dumps(said), file=self.file, flush=True)
        if kind != "began":
            (self.args.out / "table.txt").write_text(table(self.args.out))

    def cut(self, *_):
        """SIGTERM of a limit from outside: the test in progress is no crash."""
        if self.running:
            self.write(self.running, "cut")
        os._exit(143)

    def wrap(self, name, function):
        import functools

        import pytest

        @functools.wraps(function)
        def ours(*a, **k):
            self.called = True
            try:
                return function(*a, **k)
            except NotImplementedError as e:
                pytest.skip(f"not served: {e}")

        return ours

    def pytest_collection_modifyitems(self, items):
        import torch

        items[:] = [i for i in items if i.nodeid not in self.done]
        for params in (i.callspec.params for i in items if hasattr(i, "callspec")):
            for name, value in params.items():
                if value is torch.float16:
                    params[name] = getattr(torch, self.args.half)

    def pytest_runtest_logstart(self, nodeid):
        self.called, self.running = False, nodeid
        self.write(nodeid, "began")
        signal.signal(signal.SIGTERM, self.cut)

    def pytest_runtest_setup(self):
        signal.signal(signal.SIGALRM, self.late)
        signal.alarm(A_TEST_S)

    @staticmethod
    def late(*_):
        raise TimeoutError(f"no end within {A_TEST_S} s")

    def pytest_runtest_logreport(self, report):
        if report.when != "call" and report.outcome == "passed":
            return
        signal.alarm(0)
        why = report.longrepr
        why = why[2] if isinstance(why, tuple) else str(why or "")
        kind = report.outcome
        if kind == "failed" and "NotImplementedError: deltaproof.ops" in why:
            kind, why = "skipped", f"not served: {why}"
        if kind == "skipped":
            kind = "not served" if "not served: " in why else "skipped"
            why = why.split("not served: ")[-1]
        elif not self.called and "no end within" not in why:
            kind = "no call" if kind == "passed" else "broke first"
        self.write(report.nodeid, kind, why[-400:], report.duration)
        self.broken = kind == "failed" and "CUDA error" in why

    def pytest_runtest_logfinish(self, nodeid):
        session, self.running = self.session, None
        if time.monotonic() > self.until or getattr(self, "broken", False):
            session.shouldstop = "the time is up, or the device's context is broken"

    def pytest_sessionstart(self, session):
        self.session = session


def spawned(recorder, pairs):
    """The workers that FLA's tests of context parallelism start swap as well. Functions among their
    arguments travel by name."""
    import swap
    import torch.multiprocessing as mp

    start, names = mp.start_processes, {id(ours): name for name, (_, ours) in pairs.items()}

    def ours(fn, args=(), **k):
        recorder.called = True
        args = tuple(swap.Name(names[id(a)]) if id(a) in names else a for a in args)
        return start(swap.Swapped(fn, recorder.args.whose), args, **k)

    mp.start_processes = ours


def child(args):
    sys.path.insert(0, str(HERE))
    import swap
    import torch
    from compiling import keep

    if torch.cuda.is_available():
        keep(2)
    else:
        swap.tiny_triton()
    import pytest

    recorder = Recorder(args)
    spawned(recorder, swap.swap(recorder.wrap, args.whose))
    chosen = [args.tests / f for f in FILES if (args.tests / f).exists()]
    options = ["-q", "--no-header", "-p", "no:cacheprovider", "--tb=short"]
    words = ["-k", args.k] if args.k else []
    os.chdir(args.tests.parent)
    return int(pytest.main([*options, *words, *map(str, chosen)], plugins=[recorder]))


def table(out):
    found = read(out)
    files = {}
    for test, (kind, _, _) in found.items():
        files.setdefault(test.split("::")[0], Counter())[kind] += 1
    lines = [f"{'file':42}" + "".join(f"{k:>13}" for k in KINDS)]
    for file, kinds in files.items():
        lines.append(f"{file:42}" + "".join(f"{kinds[k]:13}" for k in KINDS))
    total = sum(files.values(), Counter())
    lines.append(f"{'all':42}" + "".join(f"{total[k]:13}" for k in KINDS))
    for kind in ("not served", "failed", "broke first"):
        why = Counter(
            w.splitlines()[-1][:150] if w else "" for k, w, _ in found.values() if k == kind
        )
        lines += ["", f"{kind}:"] + [f"{n:5}  {w}" for w, n in why.most_common()]
    lines += [f"       {t}" for t, r in found.items() if r[0] == "failed"]
    return "\n".join(lines) + "\n"


def main():
    a = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    a.add_argument("tests", type=Path)
    a.add_argument("--out", type=Path, required=True)
    a.add_argument("--limit", type=float, default=500)
    a.add_argument("-k", help="pytest's -k")
    a.add_argument("--half", default="bfloat16", choices=("float16", "bfloat16", "float32"))
    a.add_argument("--whose", default="ours", choices=("ours", "fla"))
    a.add_argument("--child", action="store_true")
    args = a.parse_args()
    args.tests, args.out = args.tests.resolve(), args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.child:
        return child(args)
    start, status = time.monotonic(), 2
    while (left := args.limit - (time.monotonic() - start)) > 5:
        before = len(read(args.out))
        command = [sys.executable, __file__, str(args.tests), "--out", str(args.out), "--child"]
        command += [
            "--limit",
            str(left),
            "--half",
            args.half,
            "--whose",
            args.whose,
            *(["-k", args.k] if args.k else []),
        ]
        with (args.out / "log.txt").open("a") as log:
            status = subprocess.run(command, stdout=log, stderr=log).returncode
        if len(read(args.out)) == before:
            break
    text = table(args.out)
    (args.out / "table.txt").write_text(text)
    print(text)
    print("all done" if status == 5 else "more to do: call again with the same --out")
    return 0


if __name__ == "__main__":
    sys.exit(main())
