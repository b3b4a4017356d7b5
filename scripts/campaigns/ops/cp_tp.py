#!/usr/bin/env python3
"""KDA on N cards: tokens divided (context parallelism) beside heads divided (tensor parallelism).

    torchrun --standalone --nproc-per-node 2 scripts/campaigns/ops/cp_tp.py [--out FILE]

chunk_kda of deltaproof.ops, bf16, HV = 32, K = V = 128, gates of -0.05 a token and channel.

- cp: a rank has all heads and T / N tokens, with the exchange of M and H.
- windows: cp by windows, whose o must have the bits of cp.
- tp: a rank has HV / N heads and all tokens, without the exchange of its projections.
- one: all tokens and heads on each card.

Medians of 10 behind 3, of the slowest rank, from an idle device to an idle device. Without a
device: --tokens 256, on CPUs."""

import argparse
import os
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from rows import add

from deltaproof import ops

ON_DEVICE = torch.cuda.is_available()
HV, K, V = (32, 128, 128) if ON_DEVICE else (4, 16, 16)


def inputs(tokens, heads, device):
    torch.manual_seed(1)

    def normal(width):
        return torch.randn(1, tokens, heads, width, device=device, dtype=torch.bfloat16)

    q, k = (torch.nn.functional.normalize(normal(K), dim=-1) for _ in range(2))
    g = -0.05 * torch.rand(1, tokens, heads, K, device=device)
    x = (q, k, normal(V), g, torch.rand(1, tokens, heads, device=device).to(torch.bfloat16))
    return [y.requires_grad_() for y in x], normal(V)


def idle(device):
    if ON_DEVICE:
        torch.cuda.synchronize(device)
    return time.perf_counter()


def measured(tokens, heads, context, device, runs):
    """o; milliseconds of forward, and of forward and backward, of the slowest rank."""
    x, do = inputs(tokens, heads, device)

    def forward():
        with torch.no_grad():
            ops.chunk_kda(*x, cp_context=context)

    def both():
        o = ops.chunk_kda(*x, cp_context=context)[0]
        torch.autograd.grad(o, x, do)

    found = [ops.chunk_kda(*x, cp_context=context)[0].detach()]
    for call in (forward, both):
        times = []
        for _ in range(runs + 3):
            dist.barrier()
            start = idle(device)
            call()
            slowest = torch.tensor([idle(device) - start], device=device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            times.append(slowest.item() * 1e3)
        found.append(median(times[3:]))
    return found


def main():
    a = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    a.add_argument("--out", type=Path, help="file that rows are added to")
    a.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768, 131072])
    a.add_argument("--runs", type=int, default=10)
    args = a.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank) if ON_DEVICE else torch.device("cpu")
    if ON_DEVICE:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if ON_DEVICE else "gloo")
    N = dist.get_world_size()
    if rank == 0:
        name = torch.cuda.get_device_name() if ON_DEVICE else "CPU"
        add(args.out, f"{N} x {name}, HV {HV}; ms of forward, of forward and backward")
    for T in args.tokens:
        cp, windows = (
            (T // N, HV, ops.cp_context(dist.group.WORLD, torch.tensor([0, T]), windows=by))
            for by in (False, True)
        )
        sides = {"cp": cp, "windows": windows, "tp": (T, HV // N, None), "one": (T, HV, None)}
        rows, o = [f"T {T:7}"], {}
        for name, side in sides.items():
            o[name], forward, both = measured(*side, device, args.runs)
            rows.append(f"{name} {forward:8.3f} {both:8.3f}")
        if not torch.equal(o["cp"], o["windows"]):
            rows.append(f"rank {rank}: windows have other bits")
        if rank == 0 or len(rows) > 5:
            add(args.out, "   ".join(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
