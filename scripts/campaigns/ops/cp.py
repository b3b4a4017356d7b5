"""KDA and GDN on ranks, FLA's and ours, for `deltaproof cp-check`:

torchrun --nproc-per-node 2 -m deltaproof.cp_check scripts/campaigns/ops/cp.py:fla_kda \\
    --base bf16 --claim tf32x3 --width 128 --tokens 512 [--layout zigzag]

FLA's kernels take the first of their configurations: each is compiled once and none is timed."""

import os
import sys
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

LAYOUT = os.environ.get("CP_LAYOUT", "contiguous")  # that of --layout


@cache
def _fla_ops():
    from compiling import keep

    keep(1)
    import fla.ops.cp
    import fla.ops.gated_delta_rule
    import fla.ops.kda

    return fla.ops


def _fla(function, inputs, cu_seqlens, group):
    if group is None:
        return function(*inputs, cu_seqlens=cu_seqlens)[0]
    context = _fla_ops().cp.build_cp_context(cu_seqlens, group, layout=LAYOUT)
    return function(*inputs, cp_context=context)[0]


def fla_kda(q, k, v, g, beta, cu_seqlens, group):
    return _fla(_fla_ops().kda.chunk_kda, (q, k, v, g, beta), cu_seqlens, group)


def fla_gdn(q, k, v, g, beta, cu_seqlens, group):
    function = _fla_ops().gated_delta_rule.chunk_gated_delta_rule
    return _fla(function, (q, k, v, g, beta), cu_seqlens, group)


def our_kda(q, k, v, g, beta, cu_seqlens, group):
    from deltaproof.ops import chunk_kda, cp_context

    if group is None:
        return chunk_kda(q, k, v, g, beta, cu_seqlens=cu_seqlens)[0]
    return chunk_kda(q, k, v, g, beta, cp_context=cp_context(group, cu_seqlens, LAYOUT))[0]


def our_gdn(q, k, v, g, beta, cu_seqlens, group):
    from deltaproof.ops import chunk_gated_delta_rule, cp_context

    if group is None:
        return chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=cu_seqlens)[0]
    context = cp_context(group, cu_seqlens, LAYOUT)
    return chunk_gated_delta_rule(q, k, v, g, beta, cp_context=context)[0]
