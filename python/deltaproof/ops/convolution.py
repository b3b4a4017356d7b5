"""causal_conv1d under FLA 0.6's name."""

from __future__ import annotations

from typing import Any

import torch

from . import checks
from .checks import need, refuse
from .context import number_of

Tensor = torch.Tensor


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
    """Causal convolution of x [B,T,D] with weight [D,W], 2 <= W <= 8, bias [D]; activation
    None, "silu", "swish"; then residual [B,T,D] is added. Returns y [B,T,D] and, asked for, the
    last W rows of each sequence [N,D,W], else None. initial_state [N,D,W] are the rows before it,
    whose first one is not read. cp_context: x has a rank's rows of several (`context.py`). backend
    is taken and changes nothing."""
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
    if bias is not None:
        checks.shaped("bias", bias, D=D)
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
    rows = x
    if initial_state is not None or output_final_state:
        refuse(
            cu_seqlens is None,
            "initial_state and output_final_state with cu_seqlens",
            "the kernels start each packed sequence from zeros",
        )
        before = x.new_zeros(B, W, D)
        if initial_state is not None:
            checks.shaped("initial_state", initial_state, N=N, D=D, W=W)
            before = initial_state.to(x.dtype).transpose(1, 2)
        rows = torch.cat([before, x], 1)
    skipped = W - 1 if initial_state is not None else 0
    y, _ = torch.ops.deltaproof.conv(
        rows[:, 1:] if skipped else x, weight.float(), None if bias is None else bias.float(),
        cu_seqlens, cu_seqlens_cpu, int(activation is not None), number,
    )  # fmt: skip
    y = y[:, skipped:]
    if residual is not None:
        y = y + residual
    return y, rows[:, -W:].transpose(1, 2).contiguous() if output_final_state else None
