#!/usr/bin/env python3
"""Time of a whole layer of FLA (KimiDeltaAttention, GatedDeltaNet) with FLA's kernels and with
deltaproof.ops, by CUDA events and by wall clock.

    python3 scripts/campaigns/ops/layer.py [--limit SECONDS] [--out FILE] [--size large]

Projections, convolutions, recurrence, norm and output, bf16, hidden 2048, 16 heads of 128. Forward
without gradients, and forward with backward: medians of 20 behind 5, with FLA's kernels tuned
before. `events` is the time between two CUDA events around a call whose stream is busy, so that
host time does not show. `wall` is from an idle device to an idle device, `host` until the call
returns. Ours and FLA's calls alternate in one process. Without a device: --size tiny."""

import argparse
import sys
import time
from pathlib import Path
from statistics import median

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import swap
from compiling import CONFIGS, compile_fla, keep
from rows import add, known

ON_DEVICE = torch.cuda.is_available()
DEVICE = "cuda" if ON_DEVICE else "cpu"
SIZES = {
    "large": {"hidden": 2048, "heads": 16, "head_dim": 128, "T": (8192, 2048, 512)},
    "tiny": {"hidden": 32, "heads": 2, "head_dim": 16, "T": (32,)},
}


def layer_of(kind, size):
    from fla.layers import GatedDeltaNet, KimiDeltaAttention

    torch.manual_seed(1)
    common = {
        "hidden_size": size["hidden"],
        "num_heads": size["heads"],
        "head_dim": size["head_dim"],
        "expand_v": 1,
        "layer_idx": 0,
    }
    made = KimiDeltaAttention(**common) if kind == "kda" else GatedDeltaNet(**common)
    return made.to(DEVICE, torch.bfloat16).train()


def wait():
    if ON_DEVICE:
        torch.cuda.synchronize()
    return time.perf_counter()


def once(f, busy):
    """(ms by events, ms by wall clock, ms on the host) of one call."""
    wait()
    start = time.perf_counter()
    f()
    host = time.perf_counter() - start
    wall = wait() - start
    if not ON_DEVICE:
        return wall * 1e3, wall * 1e3, host * 1e3
    a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    busy()
    a.record()
    f()
    b.record()
    wait()
    return a.elapsed_time(b), wall * 1e3, host * 1e3


def calls(layer, x):
    def forward():
        with torch.no_grad():
            layer(x)

    def both():
        layer.zero_grad(set_to_none=True)
        layer(x)[0].float().square().mean().backward()

    return {"forward": forward, "both": both}


def bits(layer, x, pairs):
    """How far the output of ours is from FLA's, of its largest number."""
    outs = []
    with torch.no_grad():
        for turn in (swap.back, swap_again):
            turn(pairs)
            outs.append(layer(x)[0].float())
    return ((outs[0] - outs[1]).abs().max() / outs[0].abs().max()).item()


def swap_again(pairs):
    swap.put({id(theirs): ours for theirs, ours in pairs.values()})


def measure(kind, size, T, pairs, runs):
    layer = layer_of(kind, size)
    x = torch.randn(1, T, size["hidden"], device=DEVICE, dtype=torch.bfloat16)
    big = torch.randn(4096, 4096, device=DEVICE, dtype=torch.bfloat16) if ON_DEVICE else None

    def busy():
        for _ in range(40):
            big @ big

    sides = {"ours": swap_again, "fla": swap.back} if ON_DEVICE else {"ours": swap_again}
    rows = []
    for what, call in calls(layer, x).items():
        times, refused = {whose: [] for whose in sides}, {}
        for n in range(runs + 5):
            for whose in sides.keys() - refused.keys():
                sides[whose](pairs)
                try:
                    found = once(call, busy)
                except RuntimeError as e:
                    refused[whose] = str(e)
                    continue
                if n >= 5:
                    times[whose].append(found)
        said = [f"{whose} {row_of(times[whose], refused.get(whose))}" for whose in sides]
        rows.append(f"{kind} {what:8} T {T:6}   " + "   ".join(said))
    if ON_DEVICE:
        rows.append(f"{kind} o of ours from FLA's, of the largest: {bits(layer, x, pairs):.2e}")
    return rows


def row_of(found, refused):
    if refused is not None:
        return f"RuntimeError: {refused[:100]}"
    return " ".join(f"{median(t):9.3f}" for t in zip(*found, strict=True))


def compile_one(kind, config):
    layer = layer_of(kind, SIZES["large"])
    x = torch.randn(1, 512, 2048, device=DEVICE, dtype=torch.bfloat16)
    for call in calls(layer, x).values():
        call()
    wait()


def main():
    a = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    a.add_argument("--out", type=Path, help="file that rows are added to")
    a.add_argument("--limit", type=float, default=500)
    a.add_argument("--size", choices=SIZES, default="large")
    a.add_argument("--configs", type=int, default=CONFIGS, help="of each of FLA's kernels")
    a.add_argument("--compile", nargs=2)
    args = a.parse_args()
    if args.compile:
        keep(args.configs, int(args.compile[1]))
        return compile_one(*args.compile)
    start, size = time.monotonic(), SIZES[args.size]
    if not ON_DEVICE:
        swap.tiny_triton()
    else:
        done = compile_fla(__file__, ("kda", "gdn"), args.configs, args.limit * 0.6)
        print(f"FLA compiled: {done} of {2 * args.configs}, {time.monotonic() - start:.0f} s")
        keep(args.configs)
    import fla.layers  # noqa: F401

    pairs = swap.swap()
    name = torch.cuda.get_device_name() if ON_DEVICE else "CPU"
    print(f"{name}, PyTorch {torch.__version__}; ms of each: events, wall, host", flush=True)
    done = known(args.out)
    for kind in ("kda", "gdn"):
        for T in size["T"]:
            if f"{kind} both     T {T:6}" in done:
                continue
            if time.monotonic() - start > args.limit:
                print("the time is up: call again with the same --out")
                return
            rows = measure(kind, size, T, pairs, 20 if ON_DEVICE else 1)
            add(args.out, *rows)


if __name__ == "__main__":
    main()
