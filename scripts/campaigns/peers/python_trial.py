#!/usr/bin/env python3
"""FLA's chunk_kda judged by the Python module as its user would: on a CUDA device, with PyTorch,
Triton, FLA and the wheel of deltaproof installed.

    python3 scripts/campaigns/peers/python_trial.py

Prints the verdicts of judge_autograd, run and check, and the names of the CUDA kernels that ran.
Then the verdicts of the function with dv multiplied by 1.02, or with o of one token lost. Autograd
goes back through the loss, so gradients of that token fail too. Exit status 0: the right one passed
everywhere and both wrong ones failed, first in the tensor that is wrong, 1: not so. Kernels are not
tuned: each keeps one configuration."""

import functools
import sys
import time

import torch
from bench_fla import cut_configs

import deltaproof

cut_configs(1, None)
from fla.ops.kda import chunk_kda

wrong = []


def kernel(q, k, v, g, beta, scale, initial_state=None, cu_seqlens=None):
    """FLA's contract: log gates, plain beta, no norms; states fp32."""
    return chunk_kda(
        q, k, v, g, beta, scale=scale, initial_state=initial_state, output_final_state=True,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.long(),
    )  # fmt: skip


class Scaled(torch.autograd.Function):
    """The identity, whose gradient is multiplied by 1.02."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        return dx * 1.02


def dv_too_large(q, k, v, g, beta, scale):
    return kernel(q, k, Scaled.apply(v), g, beta, scale)


def token_lost(q, k, v, g, beta, scale):
    o, state = kernel(q, k, v, g, beta, scale)
    o = o.clone()
    o[:, 77] = 0
    return o, state


def expect(what, right):
    print(("as expected: " if right else "NOT AS EXPECTED: ") + what, flush=True)
    if not right:
        wrong.append(what)


def inputs(T=256, HV=2, K=128):
    torch.manual_seed(1)
    normal = lambda *shape: torch.randn(1, T, HV, *shape, device="cuda")
    unit = lambda x: torch.nn.functional.normalize(x, dim=-1).bfloat16()
    return {
        "q": unit(normal(K)),
        "k": unit(normal(K)),
        "v": normal(K).bfloat16(),
        "g": torch.nn.functional.logsigmoid(normal(K)),
        "beta": normal().sigmoid(),
    }


def judge_both_ways():
    settings = {"base": "bf16", "gate": "log", "beta": "plain", "l2norm": False}
    for fn, tensor in ((kernel, None), (dv_too_large, "dv"), (token_lost, "o")):
        started = time.time()
        j = deltaproof.judge_autograd(functools.partial(fn, scale=128**-0.5), inputs(), **settings)
        failed = [n for n, t in j.tensors.items() if t["verdict"] == "fail"]
        for line in j.failures():
            print("   ", line)
        names = j.record["provenance"]["notes"] if j.record else {}
        kernels = [v for k, v in sorted(names.items()) if k.startswith("kernel")]
        print(f"    {len(kernels)} kernels are recorded, {time.time() - started:.1f} s")
        print("   ", ", ".join(kernels[:6]))
        expect(
            f"judge_autograd of {fn.__name__}: failed {failed or 'nothing'}",
            failed[:1] == ([tensor] if tensor else []) and bool(kernels) and bool(j.tensors),
        )


def run_on_cases():
    for fn, right in ((kernel, True), (token_lost, False)):
        started = time.time()
        r = deltaproof.run(
            fn, ("beta-zero", "no-decay", "packed-inside"),
            base="bf16", outputs=("o", "final_state"), device="cuda",
        )  # fmt: skip
        words = [x.split(":")[0] for x in r.verdicts().values()]
        counts = {w: words.count(w) for w in sorted(set(words))}
        print(f"    {counts}, layouts {r.layouts}, {time.time() - started:.1f} s")
        print("   ", ", ".join(r.kernels[:6]) or "no kernel is named")
        want = "pass" if right else "fail"
        expect(f"run of {fn.__name__}", r.passed == right and want in words and bool(r.kernels))
        for text in r.raised[:2]:
            print(text)


def main():
    judge_both_ways()
    run_on_cases()
    started = time.time()
    checks = deltaproof.check(kernel, base="bf16", outputs=("o", "final_state"), device="cuda")
    for c in checks:
        print("   ", c.name, c.verdict, c.why)
    print(f"    {time.time() - started:.1f} s")
    expect("check", bool(checks) and all(c.verdict != "fail" for c in checks))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
