#!/usr/bin/env python3
"""Host time of small calls: deltaproof.ops, the C entry within it, and FLA's functions.

    python3 scripts/campaigns/ops/entry.py [--out FILE] [--runs 5]

A row holds microseconds a call: ours, of which the C entry, FLA's. Each is the least of 5 rounds of
200 calls of `bench_ops.py`, which are not waited for; ours and FLA's alternate. A forward has 64
tokens and 4 heads, a step 4 requests and 64 heads."""

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peers"))
import bench_ops as b
from rows import add

from deltaproof.ops import clear_plans, kernels

spent = [0.0]


def timed(entry):
    def call(*given):
        start = time.perf_counter()
        status = entry(*given)
        spent[0] += time.perf_counter() - start
        return status

    return call


def round_of(call, n=200):
    spent[0] = 0.0
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(n):
        call()
    took = time.perf_counter() - start
    torch.cuda.synchronize()
    return took / n * 1e6, spent[0] / n * 1e6


def calls(kind, whose):
    """{what: call}; a pool in place is of KDA alone in FLA."""
    forward, backward = b.both_ways(kind, whose, 1, 64, 4)

    def alone():
        with torch.no_grad():
            return forward()

    made = {"step": b.step(kind, whose, 4)}
    if kind == "kda":
        made["step in place"] = b.step_in_place(whose, 4)
    return made | {"forward": alone, "both": lambda: backward(forward())}


def main():
    a = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    a.add_argument("--out", type=Path, help="file that rows are added to")
    a.add_argument("--runs", type=int, default=5)
    args = a.parse_args()
    b.cut_configs(1, None)
    add(args.out, f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}; us a call")
    add(args.out, f"{'':22}{'ours':>9}{'entry':>9}{'FLA':>9}")
    lib, plain = kernels.library("cuda"), {}
    for kind in ("kda", "gdn"):
        sides = {whose: calls(kind, whose) for whose in ("ours", "fla")}
        for what in sides["ours"]:
            best, refused = {}, {}
            for _ in range(args.runs + 1):
                for whose in ("ours", "fla"):
                    try:
                        found = round_of(sides[whose][what])
                    except RuntimeError as e:
                        refused[whose] = str(e)[:40]
                        continue
                    best[whose] = min(best.get(whose, found), found)
            for name in ("dpg_forward", "dpg_backward", "dpg_decode_run"):
                plain[name] = getattr(lib, name)
                setattr(lib, name, timed(plain[name]))
            clear_plans()
            entry = min(round_of(sides["ours"][what])[1] for _ in range(args.runs))
            for name, f in plain.items():
                setattr(lib, name, f)
            clear_plans()
            theirs = f"{best['fla'][0]:9.1f}" if "fla" in best else f"   {refused['fla']}"
            add(args.out, f"{kind + ' ' + what:22}{best['ours'][0]:9.1f}{entry:9.1f}{theirs}")


if __name__ == "__main__":
    main()
