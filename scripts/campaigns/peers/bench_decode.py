#!/usr/bin/env python3
"""A step of serving KDA: our decode kernel and FLA's fused_recurrent_kda_fwd on the same GPU, one
after the other, in one table.

    python3 scripts/campaigns/peers/bench_decode.py build/gpu/bench_decode [--runs 50]

K = V = 128, 32 heads, bf16 inputs, fp32 states in slots, gate, norms and sigmoid in the kernel. A
call has one token of B requests, or windows of 4 tokens with all states kept. Medians of a CUDA
graph of 8 calls, each on slots of its own. Ours are the lines of bench_decode, which this starts;
FLA's need PyTorch and FLA (pip install flash-linear-attention), else their column says why it is
empty. Before it is timed FLA's output is compared with an fp64 recurrence of the same inputs: the
column `off`.
"""

import argparse
import re
import subprocess
import sys

from clocks import by_graph

HEADS, WIDTH, CALLS = 32, 128, 8
SHAPES = [(B, T) for T in (1, 4) for B in (1, 8, 32, 128)]


def inputs(B, T):
    import torch

    torch.manual_seed(B + 1000 * T)

    def bf16(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    rows = (B, T, HEADS)
    return {
        "q": bf16(*rows, WIDTH),
        "k": bf16(*rows, WIDTH),
        "v": bf16(*rows, WIDTH),
        "g": bf16(*rows, WIDTH),
        "beta": bf16(*rows),
    }


def call(x, state, slot, A_log, bias):
    """FLA on a batch, states in place."""
    import torch
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    B, T = x["q"].shape[:2]
    flat = {n: t.reshape(1, B * T, *t.shape[2:]) for n, t in x.items()}
    more = {}
    if T > 1:
        more["num_accepted_tokens"] = torch.ones(B, dtype=torch.int32, device="cuda")
    cu = torch.arange(0, B * T + 1, T, dtype=torch.int32, device="cuda")

    def run():
        return fused_recurrent_kda_fwd(
            **flat,
            A_log=A_log,
            dt_bias=bias,
            initial_state=state,
            scale=0.088,
            inplace_final_state=True,
            cu_seqlens=cu,
            ssm_state_indices=slot,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            lower_bound=-5.0,
            **more,
        )[0]

    return run


def reference(x, state, A_log, bias):
    """o in fp64, from states [B][HEADS][K][V]."""
    import torch

    d = {n: t.double() for n, t in x.items()}
    norm = {n: d[n] / torch.sqrt((d[n] ** 2).sum(-1, keepdim=True) + 1e-6) for n in ("q", "k")}
    S, out = state.double(), []
    a = A_log.double().exp()[:, None]
    for t in range(x["q"].shape[1]):
        g = -5.0 * torch.sigmoid(a * (d["g"][:, t] + bias.double().reshape(HEADS, WIDTH)))
        k, beta = norm["k"][:, t], torch.sigmoid(d["beta"][:, t])
        S = S * g.exp()[..., None]
        E = d["v"][:, t] - torch.einsum("bhk,bhkv->bhv", k, S)
        S = S + torch.einsum("bhk,bhv->bhkv", k * beta[..., None], E)
        out.append(0.088 * torch.einsum("bhk,bhkv->bhv", norm["q"][:, t], S))
    return torch.stack(out, 1)


def time_fla(B, T, runs):
    """(us of a call, relative error of o)"""
    import torch

    kept = T
    A_log = torch.zeros(HEADS, device="cuda")
    bias = torch.full((HEADS * WIDTH,), -4.0, device="cuda")
    state = torch.randn(B * kept * CALLS, HEADS, WIDTH, WIDTH, device="cuda")
    slots = torch.arange(B * kept * CALLS, dtype=torch.int32, device="cuda").reshape(CALLS, B, kept)
    batches = [inputs(B, T) for _ in range(CALLS)]
    steps = [
        call(x, state, s if T > 1 else s[:, 0].contiguous(), A_log, bias)
        for x, s in zip(batches, slots, strict=True)
    ]
    want = reference(batches[0], state[slots[0][:, 0].long()].clone(), A_log, bias)
    got = steps[0]().reshape(want.shape).double()
    off = ((got - want).norm() / want.norm()).item()

    return 1e6 * by_graph(torch, steps, runs), off


def main():
    a = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    a.add_argument("program", metavar="BENCH_DECODE")
    a.add_argument("--runs", type=int, default=50)
    args = a.parse_args()
    done = subprocess.run([args.program, str(args.runs)], capture_output=True, text=True)
    if done.returncode:
        print(done.stderr, file=sys.stderr, end="")
        return 2
    print(done.stdout, end="")
    found = re.findall(r"decode B=(\d+) T=(\d+) states fp32 (\S+) us (\S+) GB/s", done.stdout)
    ours = {(int(B), int(T)): (float(us), rate) for B, T, us, rate in found}
    why = ""
    try:
        import fla
        import torch

        print(f"FLA {fla.__version__}, PyTorch {torch.__version__}")
    except ImportError as e:
        why = f"none: {e}"
    print("\n  B  T   ours us  GB/s   FLA us      off   ours / FLA")
    for shape in SHAPES:
        us, rate = ours[shape]
        cells = why
        if not why:
            theirs, off = time_fla(*shape, args.runs)
            cells = f"{theirs:7.2f}  {off:7.1e}   {us / theirs:.2f}"
        print(f"{shape[0]:>3} {shape[1]:>2}  {us:8.2f}  {rate:>4}  {cells}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
