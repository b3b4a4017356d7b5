#!/usr/bin/env python3
"""K = 128, V = 256: deltaproof.ops beside FLA, time and distance from fp64.

    python3 scripts/campaigns/ops/wide.py [--out FILE] [--limit SECONDS] [--configs 6] [--kinds gdn]

T 8,192, 4 and 32 heads, bf16, gates of -0.05 rand, L2 norm in the kernel. Times are ms
of a forward without gradients, and of a forward with its backward: medians of 10 by CUDA events.
Distances of o and all gradients are relative, of 512 tokens and 2 heads, from the recurrence in
fp64. FLA's kernels choose among 6 of their configurations, compiled in parallel before."""

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peers"))
from bench_ops import functions
from clocks import by_queue
from compiling import compile_fla, keep
from rows import add, known

K, V = 128, 256
ON_DEVICE = torch.cuda.is_available()
DEVICE = "cuda" if ON_DEVICE else "cpu"


def inputs(kind, T, HV):
    torch.manual_seed(2)
    here = {"device": DEVICE, "dtype": torch.bfloat16}
    x = {n: torch.randn(1, T, HV, w, **here) for n, w in (("q", K), ("k", K), ("v", V))}
    gate = (K,) if kind == "kda" else ()
    x["g"] = -0.05 * torch.rand(1, T, HV, *gate, device=DEVICE)
    x["beta"] = torch.rand(1, T, HV, **here)
    return x, torch.randn(1, T, HV, V, **here)


def ways(kind, whose, T, HV):
    x, do = inputs(kind, T, HV)
    x = {n: t.requires_grad_() for n, t in x.items()}
    chunk = functions(kind, whose)[0]

    def forward():
        return chunk(**x, use_qk_l2norm_in_kernel=True)[0]

    def alone():
        with torch.no_grad():
            return forward()

    return alone, lambda: (o := forward(), *torch.autograd.grad(o, list(x.values()), do))


def recurrence(q, k, v, g, beta):
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    g = g if g.dim() == 4 else g.unsqueeze(-1)
    S, rows = torch.zeros(1, q.shape[2], K, V, dtype=q.dtype, device=q.device), []
    for t in range(q.shape[1]):
        S = S * g[:, t].exp().unsqueeze(-1)
        e = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S)
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t] * beta[:, t].unsqueeze(-1), e)
        rows.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S) * K**-0.5)
    return torch.stack(rows, 1)


def right(kind, T):
    x, do = inputs(kind, T, 2)
    x = {n: t.double().requires_grad_() for n, t in x.items()}
    o = recurrence(**x)
    return o, *torch.autograd.grad(o, list(x.values()), do.double())


def distances(kind, whose, want, T):
    found = ways(kind, whose, T, 2)[1]()
    names = ("o", "dq", "dk", "dv", "dg", "dbeta")
    each = zip(names, found, want, strict=True)
    return " ".join(f"{n} {((a.double() - b).norm() / b.norm()).item():.1e}" for n, a, b in each)


def row(kind, whose, want, T):
    try:
        said = [f"distance {distances(kind, whose, want, T)}"]
        for HV in (4, 32) if ON_DEVICE else ():
            alone, both = ways(kind, whose, 8192, HV)
            times = [1e3 * by_queue(torch, f, 10) for f in (alone, both)]
            said.append(f"HV {HV:2} forward {times[0]:7.3f} both {times[1]:7.3f}")
    except Exception as e:
        said = [f"{type(e).__name__}: {str(e)[:120]}"]
    return f"{kind} {whose:4} " + "   ".join(said)


def main():
    a = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    a.add_argument("--out", type=Path, help="file that rows are added to")
    a.add_argument("--limit", type=float, default=200)
    a.add_argument("--configs", type=int, default=6)
    a.add_argument("--tokens", type=int, default=512)
    a.add_argument("--kinds", nargs="+", default=["kda", "gdn"])
    a.add_argument("--compile", nargs=2)
    args = a.parse_args()
    if args.compile:
        keep(args.configs, int(args.compile[1]))
        for HV in (2, 4, 32):
            ways(args.compile[0], "fla", 512, HV)[1]()
        return
    start = time.monotonic()
    if ON_DEVICE:
        compile_fla(__file__, args.kinds, args.configs, args.limit * 0.6)
        keep(args.configs)
        add(args.out, f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
    for kind in args.kinds:
        want = right(kind, args.tokens)
        for whose in ("ours", "fla") if ON_DEVICE else ("ours",):
            if f"{kind} {whose}" not in known(args.out) and time.monotonic() - start < args.limit:
                add(args.out, row(kind, whose, want, args.tokens))


if __name__ == "__main__":
    main()
