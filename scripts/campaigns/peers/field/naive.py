#!/usr/bin/env python3
"""Is a case's tensor where a function of FLA wants it? Runs the adapters of kernels.py on a CPU
with FLA's naive references in place of its kernels, and judges the results as fp32.

    python3 naive.py DIR --program build/deltaproof [--cases CASE,...]     (DIR: inputs.py)

Comba's naive reference decays a state before it is read, its kernels afterwards: here `before`
makes it one of them.
"""

import argparse
import importlib
import json
import pathlib
import subprocess
import sys

import torch
from fla.ops.comba.naive import naive_recurrent_comba
from fla.ops.gated_delta_product.naive import naive_recurrent_gated_delta_product
from fla.ops.gated_delta_rule import naive_recurrent_gated_delta_rule
from fla.ops.generalized_delta_rule.dplr.naive import dplr_recurrence
from fla.ops.gla.naive import naive_recurrent_gla
from fla.ops.simple_gla.naive import naive_recurrent_simple_gla

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from fla_dump import save

from kernels import BY_NAME, Inputs, NotServed


def packed(f):
    """f(tokens.., scale, initial_state) of each sequence."""

    def g(*, cu_seqlens, scale, initial_state, output_final_state, num_householder=1, **x):
        for n in ("safe_gate", "lower_bound", "chunk_size"):
            x.pop(n, None)
        parts = []
        for i, (a, b) in enumerate(zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True)):
            T = int(cu_seqlens[-1])
            one = {n: t[:, a * (t.shape[1] // T) : b * (t.shape[1] // T)] for n, t in x.items()}
            s0 = None if initial_state is None else initial_state[i : i + 1]
            parts.append(f(R=num_householder, scale=scale, s0=s0, **one))
        return torch.cat([o for o, _ in parts], 1), torch.cat([s for _, s in parts])

    return g


def by_heads(x):
    return {n: t.transpose(1, 2).float() for n, t in x.items()}


def dplr(q, k, v, a, b, gk, scale, s0, R):
    x = by_heads({"q": q * scale * q.shape[-1] ** 0.5, "k": k, "v": v, "beta": b, "gk": gk})
    o, s = dplr_recurrence(alpha=a.transpose(1, 2).float(), initial_state=s0, **x)
    return o.transpose(1, 2), s


def rwkv7(r, w, k, v, scale, s0, R, a, b=None, kk=None):
    if kk is not None:
        a, b = -kk.float(), kk.float() * a.float()
    return dplr(r.float(), k, v, a, b, w, scale, s0, R)


def before(q, k, v, p, g, beta, scale, s0, R):
    """exp(g) (S - ..) = exp(g) S - exp(g) ..: read before the decay is p exp(-g) after it."""
    p = p.float() * (-g.float()).exp().unsqueeze(-1)
    return naive_recurrent_comba(q, k, v, p, beta, g, scale, s0, True)


def oja(q, k, v, gv, beta, scale, s0, R):
    """FLA has no naive one: its fused kernel's loop."""
    x = by_heads({"q": q, "k": k, "v": v, "gv": gv, "beta": beta})
    h, o = s0, []
    for t in range(q.shape[1]):
        q_, k_, v_, g_, b_ = (y[:, :, t] for y in x.values())
        h = h * g_.exp().unsqueeze(-2)
        u = b_.unsqueeze(-1) * (k_ - (h * v_.unsqueeze(-2)).sum(-1))
        h = h + u.unsqueeze(-1) * v_.unsqueeze(-2)
        o.append((h * (q_ * scale).unsqueeze(-1)).sum(-2))
    return torch.stack(o, 1), h


def gla(q, k, v, scale, s0, R, g=None, gk=None):
    g = gk if g is None else g
    return naive_recurrent_gla(q.float() * scale * q.shape[-1] ** 0.5, k, v, g, s0, True)


def ssd(q, k, v, g, scale, s0, R):
    return naive_recurrent_simple_gla(q.float(), k, v, g, scale, s0)


def deltaproduct(q, k, v, g, beta, scale, s0, R):
    return naive_recurrent_gated_delta_product(q, k, v, g, beta, scale, None, s0, True, R)


def gdn(q, k, v, g, beta, scale, s0, R):
    return naive_recurrent_gated_delta_rule(q, k, v, beta, g, scale, s0, True)


NAIVE = {
    "generalized_delta_rule": ("chunk_dplr_delta_rule fused_recurrent_dplr_delta_rule", dplr),
    "rwkv7": ("chunk_rwkv7 fused_mul_recurrent_rwkv7", rwkv7),
    "comba": ("chunk_comba fused_recurrent_comba", before),
    "gated_oja_rule": ("chunk_gated_oja_rule fused_recurrent_gated_oja_rule", oja),
    "gla": ("chunk_gla fused_recurrent_gla", gla),
    "simple_gla": ("chunk_simple_gla fused_recurrent_simple_gla", ssd),
    "gated_delta_product": ("chunk_gated_delta_product", deltaproduct),
    "gated_delta_rule": ("fused_recurrent_gated_delta_rule", gdn),
}


def judged(args, kernel, case):
    """The verdict, and what failed."""
    given, out = args.folder / "in" / f"{case}.safetensors", args.folder / "naive.safetensors"
    x = Inputs(given)
    x.x = {n: t.float() for n, t in x.x.items()}  # nothing rounds to bf16 in between
    try:
        save(out, kernel.call(x), {"base": "fp32", "design": "recurrent", "ranks": "1"})
    except NotServed as e:
        return f"not served: {e}"
    words = f"judge --recurrence {kernel.op} --inputs {given} --tokens {x.T} --outputs {out}"
    cache = ["--cache", str(args.folder / "cache")]
    p = subprocess.run(
        [args.program, *words.split(), "--why", "0", "--json", "-", *cache],
        capture_output=True,
        text=True,
    )
    if not p.stdout.startswith("{"):
        return p.stderr.strip()
    run = json.loads(p.stdout)["runs"][0]
    red = {t["name"]: t["rel_fro"] for t in run["tensors"] if t["verdict"] != "pass"}
    return f"{run['verdict']}, {len(run['tensors'])} tensors {red or ''}"


def main():
    a = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    a.add_argument("folder", type=pathlib.Path)
    a.add_argument("--program", required=True)
    args = a.parse_args()
    for module, (names, f) in NAIVE.items():
        for name in names.split():
            setattr(importlib.import_module(f"fla.ops.{module}"), name, packed(f))
    ops = json.loads((args.folder / "cases.json").read_text())
    for kernel in BY_NAME.values():
        whole = kernel.op in ("kda", "gdn", "gdn2") and kernel.name != "fla-fused-recurrent-gdn"
        for case in () if whole else (c for c, op in ops.items() if op == kernel.op):
            print(f"{kernel.name:30} {case:26} {judged(args, kernel, case)}", flush=True)


if __name__ == "__main__":
    main()
