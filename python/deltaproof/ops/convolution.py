"""causal_conv1d under FLA 0.6's name."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from . import checks
from .checks import need, refuse
from .context import number_of
from .plans import bounds
from .registered import conv


def causal_conv1d(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = "triton",
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: torch.LongTensor | None = None,
    chunk_indices: torch.LongTensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Causal convolution of x [B,T,D] with weight [D,W], 2 <= W <= 8, bias [D]; activation None,
    "silu", "swish"; then residual [B,T,D] is added. Returns y [B,T,D] and, if wanted, the last W
    rows of each sequence [N,D,W], else None. The rows before it are initial_state [N,D,W], whose
    first one is not read. With cp_context x has one rank's rows (`context.py`). The argument
    backend changes nothing."""
    checks.none_left(kwargs)
    refuse(weight is not None, "weight=None", "nothing would be convolved")
    assert weight is not None
    need(x.dim() == 3, "x", f"has shape {list(x.shape)} in place of [B, T, D]")
    B, T, D = x.shape
    need(weight.dim() == 2 and weight.shape[0] == D, "weight", f"has shape {list(weight.shape)}")
    W = weight.shape[1]
    refuse(2 <= W <= 8, f"W = {W}", "the kernels take 2 to 8 rows")
    need(activation in (None, "silu", "swish"), "activation", f"{activation!r} is not served")
    checks.placed(
        x.device, weight=weight, bias=bias, residual=residual, initial_state=initial_state
    )
    (x,) = checks.alike(x=x)
    dtype = x.dtype
    (x,) = checks.computable(x)
    refuse(weight.dtype in checks.TYPES, f"weight in {weight.dtype}", "it is fp32, bf16 or fp16")
    if bias is not None:
        checks.shaped("bias", bias, D=D)
        if bias.dtype != weight.dtype:
            weight, bias = weight.float(), bias.float()
    if residual is not None:
        checks.shaped("residual", residual, B=B, T=T, D=D)
    need(T > 0, "x", "has no tokens")
    number = 0
    if cp_context is not None:
        refuse(
            initial_state is None and not output_final_state,
            "initial_state and output_final_state with cp_context",
            "the kernels exchange the rows before, and keep none",
        )
        number = number_of(
            cp_context, cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu, B, T
        )
        cu_seqlens = cu_seqlens_cpu = None
    N = checks.sequences(x, cu_seqlens, cu_seqlens_cpu, initial_state)
    y, final = _convolve(
        x, weight, bias, initial_state, bool(output_final_state), cu_seqlens, cu_seqlens_cpu,
        int(activation is not None), number, N,
    )  # fmt: skip
    y, final = y.to(dtype), None if final is None else final.to(dtype)
    return y if residual is None else y + residual, final


def _convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None, keep: bool,
    cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None, silu: int, number: int, N: int,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """y and the last rows. Where a state is passed or kept, W rows stand before each sequence,
    of which a token sees the last W - 1."""
    W, D = weight.shape[1], x.shape[2]
    if initial_state is None and not keep:
        return conv(x, weight, bias, cu_seqlens, cu_seqlens_cpu, silu, number)[0], None
    before = x.new_zeros(N, W, D)
    if initial_state is not None:
        checks.shaped("initial_state", initial_state, N=N, D=D, W=W)
        before = initial_state.to(x.dtype).transpose(1, 2)
    if cu_seqlens is None:
        rows = torch.cat([before, x], 1)
        y, last = conv(rows, weight, bias, None, None, silu, 0)[0][:, W:], rows[:, -W:]
    else:
        cu = bounds(cu_seqlens, cu_seqlens_cpu, 1, x.shape[1])
        own, others, ends, longer = _places(cu, W, x.device)
        rows = x.new_empty(len(own) + N * W, D)
        rows = rows.index_copy(0, own, x[0]).index_copy(0, others, before.flatten(0, 1))
        y, _ = conv(rows.unsqueeze(0), weight, bias, longer, longer, silu, 0)
        y, last = y[:, own], rows[ends].view(N, W, D)
    return y, last.transpose(1, 2).contiguous() if keep else None


@lru_cache(maxsize=64)
def _places(
    cu: tuple[int, ...], W: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Places of rows when W others stand before each sequence: of tokens, of the others, of the
    last W of each sequence. Then the bounds, on the host."""
    starts = [b + n * W for n, b in enumerate(cu)]  # of the others of sequence n
    own = [t + (n + 1) * W for n in range(len(cu) - 1) for t in range(cu[n], cu[n + 1])]
    others = [s + i for s in starts[:-1] for i in range(W)]
    last = [s - W + i for s in starts[1:] for i in range(W)]
    return (
        torch.tensor(own, dtype=torch.int64, device=device),
        torch.tensor(others, dtype=torch.int64, device=device),
        torch.tensor(last, dtype=torch.int64, device=device),
        torch.tensor(starts, dtype=torch.int64),
    )
