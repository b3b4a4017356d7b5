#!/usr/bin/env python3
"""Each operator of deltaproof.ops on a set of cases, with the gradients that autograd makes.

    python3 scripts/campaigns/ops/judged.py [--out FILE] [--set standard] [--only kda/bf16 ..]
        [--limit SECONDS] [--cpu]

A row for each recurrence and base: how many cases passed, failed, were skipped, and which failed.
A later call with the same --out makes the rows that are not there; none is begun behind --limit."""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from rows import add, known

from deltaproof import ops, run


def form(gate, beta_form, lower_bound, A_log, HV, device):
    """FLA's words for the forms of gate and beta."""
    words = {}
    if gate != "log":
        words |= {"use_gate_in_kernel": True}
        words["A_log"] = torch.zeros(HV, device=device) if A_log is None else A_log
    if gate == "lower_bound":
        words["lower_bound"] = lower_bound
    if beta_form in ("sigmoid", "sigmoid2"):
        words["use_beta_sigmoid_in_kernel"] = True
        words["allow_neg_eigval"] = beta_form == "sigmoid2"
    return words


def gated(f):
    """KDA, MKDA or GDN as the contract of `deltaproof.run` calls it."""

    def called(q, k, v, g, beta, A_log=None, dt_bias=None, initial_state=None, cu_seqlens=None,
               scale=1.0, lower_bound=0.0, gate="log", beta_form="plain",
               l2norm=False):  # fmt: skip
        if gate == "lower_bound" and f is ops.chunk_gated_delta_rule:
            raise NotImplementedError("FLA's function of GDN has no lower bound")
        return f(
            q, k, v, g, beta, scale, initial_state, True, use_qk_l2norm_in_kernel=bool(l2norm),
            cu_seqlens=cu_seqlens,
            **form(gate, beta_form, lower_bound, A_log, v.shape[2], v.device),
            **({} if gate == "log" else {"dt_bias": dt_bias}),
        )  # fmt: skip

    return called


def gdn2(q, k, v, g, b, w, initial_state=None, cu_seqlens=None, scale=1.0, l2norm=False):
    return ops.chunk_gdn2(
        q, k, v, g, b, w, scale, initial_state, True, bool(l2norm), cu_seqlens=cu_seqlens
    )


def gla(q, k, v, g, initial_state=None, cu_seqlens=None, scale=1.0):
    return ops.chunk_gla(q, k, v, g, scale, initial_state, True, cu_seqlens=cu_seqlens)


def ssd(q, k, v, g, initial_state=None, cu_seqlens=None, scale=1.0):
    return ops.chunk_simple_gla(
        q, k, v, g, None, scale, initial_state, True, cu_seqlens=cu_seqlens
    )  # fmt: skip


def product(q, k, v, g, beta, initial_state=None, cu_seqlens=None, scale=1.0, l2norm=False):
    n = beta.shape[-1]
    k, v, beta = (x.transpose(2, 3).flatten(1, 2) for x in (k, v, beta))
    return ops.chunk_gated_delta_product(
        q, k, v, g, beta, n, scale, initial_state, True, bool(l2norm), cu_seqlens
    )


def dplr(q, k, v, g, lr_a, lr_b, initial_state=None, cu_seqlens=None, scale=1.0):
    return ops.chunk_dplr_delta_rule(
        q, k, v, lr_a, lr_b, g, scale, initial_state, True, cu_seqlens
    )  # fmt: skip


MODELS = {
    "kda": gated(ops.chunk_kda),
    "gdn": gated(ops.chunk_gated_delta_rule),
    "mkda": gated(ops.chunk_mkda),
    "gdn2": gdn2,
    "gla": gla,
    "ssd": ssd,
    "gated-deltaproduct": product,
    "dplr": dplr,
}

# b, w, a and b of FLA's functions are fp32 arrays in cases of bf16, and theirs are of one type
PAIRS = [f"{m}/fp32" for m in MODELS]
PAIRS += [f"{m}/bf16" for m in MODELS if m not in ("gdn2", "dplr")]


def judged(model, base, args):
    contract = {"outputs": ("o", "final_state"), "models": (model,), "autograd": True}
    contract["device"] = "cpu" if args.cpu or not torch.cuda.is_available() else "cuda"
    function = MODELS[model]
    if model not in ("kda", "gdn", "mkda"):
        contract["gate"] = "log"
        contract["beta"] = "none" if model in ("gla", "ssd") else "plain"
        if model in ("gla", "ssd", "dplr"):
            contract["l2norm"] = False
    start = time.monotonic()
    found = run(function, args.set, base=base, layouts=("contiguous",), limit=120.0, **contract)
    each = found.verdicts()
    kinds = Counter(v.split(":")[0] for v in each.values())
    failed = [x.strip() for x in found.text.splitlines() if x.startswith("fail ")]
    said = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items())) or f"status {found.status}"
    row = f"{model}/{base}: {said}; {time.monotonic() - start:.0f} s"
    return "\n    ".join(
        [
            row,
            *(" ".join(x.split()) for x in failed),
            *(x.strip().splitlines()[-1] for x in found.raised[:3]),
        ]
    )


def main():
    a = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    a.add_argument("--out", type=Path, help="file that rows are added to")
    a.add_argument("--set", default="standard")
    a.add_argument("--only", nargs="+", metavar="MODEL/BASE")
    a.add_argument("--limit", type=float, default=420)
    a.add_argument("--cpu", action="store_true")
    args = a.parse_args()
    start = time.monotonic()
    done = known(args.out)
    for name in args.only or PAIRS:
        if f"{name}: " in done:
            continue
        if time.monotonic() - start > args.limit:
            print("the time is up: call again with the same --out")
            return
        add(args.out, judged(*name.split("/"), args))


if __name__ == "__main__":
    sys.exit(main())
