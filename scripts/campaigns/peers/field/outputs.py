#!/usr/bin/env python3
"""Run public kernels on the inputs of cases and write their outputs to
DIR/out/KERNEL/CASE.safetensors. DIR/out/KERNEL.json says for each case whether the kernel served
it, or why not. Needs a CUDA GPU, PyTorch and the kernels.

    python3 outputs.py DIR [--kernels NAME,...] [--jobs N]         (DIR/in/CASE.safetensors: \\
        `deltaproof inputs CASE -o ...`)

Each kernel runs in processes of its own. If it ends the process, as a CUDA error does, only that
case is lost, and recorded as lost.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
COMPILED = ("fla-", "flashqla-")  # anew for every shape, by Triton and TileLang
REFUSALS = (
    "NotServed",
    "ValueError",
    "NotImplementedError",
    "AssertionError",
    "TypeError",
    "cudnnGraphNotSupportedError",
)


def one_line(e):
    return f"{type(e).__name__}: {' '.join(str(e).split())[:300]}".removeprefix("NotServed: ")


def serve(kernel, path, out):
    import torch
    from fla_dump import save

    from kernels import Inputs

    result = kernel.call(Inputs(path))
    torch.cuda.synchronize()
    save(
        out,
        result,
        kernel.claims
        | {
            "producer": f"{kernel.project} {kernel.version()}, {torch.cuda.get_device_name()}",
            "ranks": "1",
        },
    )


def child(folder, name, cases):
    """One line of JSON a case on standard output: [case, status, reason]."""
    from fla_dump import first_config_only

    from kernels import BY_NAME

    if name.startswith("fla"):
        first_config_only()
    for case in cases:
        print(json.dumps([case, "started", ""]), flush=True)
        status, why = "served", ""
        try:
            serve(
                BY_NAME[name],
                folder / "in" / f"{case}.safetensors",
                folder / "out" / name / f"{case}.safetensors",
            )
        except Exception as e:  # whatever a kernel raises is its answer
            status, why = "not served" if type(e).__name__ in REFUSALS else "error", one_line(e)
        print(json.dumps([case, status, why]), flush=True)
        if "CUDA error" in why or "AcceleratorError" in why:
            os._exit(3)  # this process's device is lost


def run_cases(folder, name, cases, limit):
    """{case: (status, reason)} of cases in one process after another."""
    got = {}
    while rest := [c for c in cases if c not in got]:
        try:
            p = subprocess.run(
                [sys.executable, __file__, str(folder), "--child", name, *rest],
                capture_output=True,
                text=True,
                timeout=limit,
            )
            text, errors = p.stdout, p.stderr
        except subprocess.TimeoutExpired as e:
            text, errors = (e.stdout or b"").decode(), f"not finished in {limit} s"
        lines = [json.loads(x) for x in text.splitlines() if x.startswith('["')]
        got |= {c: (s, w) for c, s, w in lines if s != "started"}
        started = [c for c, s, _ in lines if s == "started" and c not in got] or [
            c for c in rest if c not in got
        ][:1]
        for c in started:
            got[c] = (
                "error",
                "its process ended: " + (errors.strip().splitlines() or ["no message"])[-1][:300],
            )
    return got


def main():
    a = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    a.add_argument("folder", type=pathlib.Path)
    a.add_argument("--kernels", help="default: all")
    a.add_argument(
        "--jobs",
        type=int,
        default=max(1, (os.cpu_count() or 2) // 2),
        help="processes at once (default: half of the cores)",
    )
    a.add_argument(
        "--limit", type=float, default=400, help="seconds a process may take (default: 400)"
    )
    a.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    args = a.parse_args()
    if args.child:
        return child(args.folder, args.child[0], args.child[1:])
    from kernels import BY_NAME

    ops = json.loads((args.folder / "cases.json").read_text())
    names = args.kernels.split(",") if args.kernels else list(BY_NAME)
    jobs = []
    for name in names:
        (args.folder / "out" / name).mkdir(parents=True, exist_ok=True)
        cases = [c for c, op in ops.items() if op == BY_NAME[name].op]
        compiled = name.startswith(COMPILED)
        parts = max(1, min(args.jobs // 2, len(cases) // 6)) if compiled else 1
        jobs += [(name, cases[i::parts]) for i in range(parts)]
    done = {n: {} for n in names}
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for (name, _), got in zip(
            jobs, pool.map(lambda j: run_cases(args.folder, *j, args.limit), jobs), strict=False
        ):
            done[name] |= got
    for name, got in done.items():
        version = ""
        try:
            version = BY_NAME[name].version()
        except Exception as e:
            version = one_line(e)
        (args.folder / "out" / f"{name}.json").write_text(
            json.dumps({"version": version, "cases": dict(sorted(got.items()))}, indent=1) + "\n"
        )
        counts = {
            s: sum(x[0] == s for x in got.values()) for s in ("served", "not served", "error")
        }
        print(f"{name:26} {counts}")
        for case, (s, why) in got.items():
            if s == "error":
                print(f"    {case}: {why[:200]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
