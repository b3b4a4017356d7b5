"""KDA and GDN on ranks, FLA's and ours, for `deltaproof cp-check`:

torchrun --nproc-per-node 2 -m deltaproof.cp_check scripts/campaigns/ops/cp.py:fla_kda \\
    --base bf16 --claim tf32x3 --width 128 --tokens 512 [--layout zigzag]
"""

import os

LAYOUT = os.environ.get("CP_LAYOUT", "contiguous")  # that of --layout


def fla_kda(q, k, v, g, beta, cu_seqlens, group):
    from fla.ops.cp import build_cp_context
    from fla.ops.kda import chunk_kda

    if group is None:
        return chunk_kda(q, k, v, g, beta, cu_seqlens=cu_seqlens)[0]
    context = build_cp_context(cu_seqlens, group, layout=LAYOUT)
    return chunk_kda(q, k, v, g, beta, cp_context=context)[0]


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
