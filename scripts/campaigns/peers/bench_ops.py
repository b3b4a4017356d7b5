#!/usr/bin/env python3
"""deltaproof.ops beside FLA's functions of the same names, in one process on one GPU.

    python3 scripts/campaigns/peers/bench_ops.py [--limit SECONDS] [--configs N]

Medians of 20 calls after warm-up by CUDA events, K = V = 128, bf16, gate, beta and L2 norm in the
kernel. Then the host time of a call that finds its plan: 200 calls of a short shape, without
waiting. FLA's kernels are compiled first, one process a configuration and core (bench_fla.py says
why). After --limit seconds FLA tunes with the compiled ones."""

import argparse
import os
import subprocess
import sys
import time

import torch
from bench_fla import cut_configs, median

CUDA = {"device": "cuda"}


def tensors(kind, B, T, HV):
    torch.manual_seed(1)
    bf16 = CUDA | {"dtype": torch.bfloat16}
    x = {n: torch.randn(B, T, HV, 128, **bf16) for n in ("q", "k", "v")}
    gate = (128,) if kind == "kda" else ()
    x["g"] = torch.randn(B, T, HV, *gate, **bf16)
    x["beta"] = torch.randn(B, T, HV, **bf16)
    x["A_log"] = torch.zeros(HV, **CUDA)
    x["dt_bias"] = torch.full((HV * (128 if gate else 1),), -4.0, **CUDA)
    return x


OPTIONS = {
    "use_gate_in_kernel": True,
    "use_qk_l2norm_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}
BOUND = {"kda": {"lower_bound": -5.0, "safe_gate": True}, "gdn": {}}


def functions(kind, whose):
    """(chunk, fused_recurrent) of FLA or ours."""
    if whose == "ours":
        from deltaproof import ops

        if kind == "kda":
            return ops.chunk_kda, ops.fused_recurrent_kda
        return ops.chunk_gated_delta_rule, ops.fused_recurrent_gated_delta_rule
    if kind == "kda":
        from fla.ops.kda import chunk_kda, fused_recurrent_kda

        return chunk_kda, fused_recurrent_kda
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

    return chunk_gated_delta_rule, fused_recurrent_gated_delta_rule


def both_ways(kind, whose, B, T, HV):
    x = {n: t.requires_grad_() for n, t in tensors(kind, B, T, HV).items()}
    chunk = functions(kind, whose)[0]

    def forward():
        return chunk(**x, **OPTIONS, **BOUND[kind])[0]

    do = torch.randn(B, T, HV, 128, device="cuda", dtype=torch.bfloat16)
    return forward, lambda o: torch.autograd.grad(o, list(x.values()), do, retain_graph=True)


def compile_fla(args, start):
    jobs = [(k, HV, i) for k in ("kda", "gdn") for HV in (64, 4) for i in range(args.configs)]
    running = []
    for job in jobs:
        while len(running) >= len(os.sched_getaffinity(0)):
            running = [p for p in running if p.poll() is None]
            time.sleep(0.1)
            if time.monotonic() - start > args.limit:
                break
        if time.monotonic() - start > args.limit:
            break
        command = [sys.executable, __file__, "--child", *map(str, job)]
        running.append(
            subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        )
    for p in running:
        try:
            p.wait(max(0.1, args.limit - (time.monotonic() - start)))
        except subprocess.TimeoutExpired:
            p.kill()


def child(kind, HV, config):
    cut_configs(0, int(config))
    forward, backward = both_ways(kind, "fla", 1, 1024, int(HV))
    backward(forward())
    functions(kind, "fla")[1](**tensors(kind, 4, 1, int(HV)), **OPTIONS)


def host_us(f):
    for _ in range(20):
        f()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(200):
        f()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return spent / 200 * 1e6


def of_each(f):
    """Results of f("ours") and f("fla"), or the reasons of their failures."""
    found = []
    for whose in ("ours", "fla"):
        try:
            found.append(f"{f(whose):12.3f}")
        except Exception as e:
            found.append(f"{type(e).__name__}: {str(e).splitlines()[0][:60]}")
    return "  ".join(found)


def timed(kind, whose, T, HV, what):
    forward, backward = both_ways(kind, whose, 1, T, HV)
    if what == "forward":
        with torch.no_grad():
            return median(forward, 20)
    if what == "both":
        return median(lambda: backward(forward()), 20)
    o = forward()
    return median(lambda: backward(o), 20)


def memory(kind, whose, T, HV):
    forward, backward = both_ways(kind, whose, 1, T, HV)
    backward(forward())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    backward(forward())
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e9


def step(kind, whose, B):
    x = tensors(kind, B, 1, 64)
    state = torch.zeros(B, 64, 128, 128, device="cuda")
    recur = functions(kind, whose)[1]
    return lambda: recur(**x, **OPTIONS, initial_state=state, output_final_state=True)


def step_in_place(whose, B):
    """KDA on a pool of states, as serving frameworks call it."""
    x = tensors("kda", B, 1, 64)
    pool = torch.zeros(B, 64, 128, 128, device="cuda")
    slots = torch.arange(B, dtype=torch.int32, device="cuda")
    if whose == "ours":
        recur, more = functions("kda", whose)[1], {}
    else:
        from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd as recur

        more = {"inplace_final_state": True}
        more["cu_seqlens"] = torch.arange(B + 1, dtype=torch.int32, device="cuda")
        x = {n: t.transpose(0, 1).contiguous() if t.dim() > 2 else t for n, t in x.items()}
    return lambda: recur(**x, **OPTIONS, **more, initial_state=pool, ssm_state_indices=slots)


def host(kind, whose, what):
    if what == "step":
        return host_us(step(kind, whose, 4))
    if what == "step in place":
        return host_us(step_in_place(whose, 4))
    forward, backward = both_ways(kind, whose, 1, 64, 4)
    if what == "forward":
        with torch.no_grad():
            return host_us(forward)
    return host_us(lambda: backward(forward()))


def main():
    a = argparse.ArgumentParser(description=__doc__)
    a.add_argument("--limit", type=float, default=240)
    a.add_argument("--configs", type=int, default=24)
    a.add_argument("--child", nargs=3)
    args = a.parse_args()
    if args.child:
        return child(*args.child)
    start = time.monotonic()
    compile_fla(args, start)
    print(f"FLA compiled, {time.monotonic() - start:.0f} s; {torch.cuda.get_device_name()}")
    print(f"{'':44}  deltaproof.ops  FLA", flush=True)
    for kind in ("kda", "gdn"):
        for what in ("forward", "backward", "both"):
            for T in (8192, 1024):
                row = of_each(lambda w: timed(kind, w, T, 64, what))  # noqa: B023
                print(f"{kind} {what:9} T {T:6} HV 64, ms           {row}", flush=True)
        row = of_each(lambda w: memory(kind, w, 8192, 64))  # noqa: B023
        print(f"{kind} both      T   8192 HV 64, GB at most  {row}", flush=True)
        row = of_each(lambda w: median(step(kind, w, 64), 20))  # noqa: B023
        print(f"{kind} one token B     64 HV 64, ms           {row}", flush=True)
        if kind == "kda":
            row = of_each(lambda w: median(step_in_place(w, 64), 20))
            print(f"{kind} the same, a pool in place, ms          {row}", flush=True)
        for what in ("forward", "both", "step", *(["step in place"] if kind == "kda" else [])):
            row = of_each(lambda w: host(kind, w, what))  # noqa: B023
            print(f"{kind} {what:13} host, us a call        {row}", flush=True)


if __name__ == "__main__":
    main()
