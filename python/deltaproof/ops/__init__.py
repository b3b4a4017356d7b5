"""The kernels as operators of PyTorch, under the names and with the arguments of FLA 0.6:

    from deltaproof.ops import chunk_kda  # in place of fla.ops.kda

Tensors on a CUDA device run on the CUDA kernels. Tensors on a CPU run on the same kernels
translated for it, slowly, to try code without a device. Forward and backward, torch.compile,
autocast, views, any stream. Which arguments are served: python/README.md. NotImplementedError: this
one is not, and why; ValueError: an argument has a wrong shape, type or device, and which.
ImportError: PyTorch or the library of the kernels is not there.

`cp_context` says which rank has which tokens (context parallelism: `context.py`), `clear_plans()`
frees what calls leave for the next one of their shape."""

try:
    import torch as _torch  # noqa: F401
except ImportError as e:
    raise ImportError("deltaproof.ops needs PyTorch: pip install 'deltaproof[torch]'") from e

from .chunked import (
    chunk_dplr_delta_rule,
    chunk_gated_delta_product,
    chunk_gated_delta_rule,
    chunk_gdn2,
    chunk_gla,
    chunk_kda,
    chunk_mkda,
    chunk_rwkv7,
    chunk_simple_gla,
)
from .context import cp_context, forget
from .convolution import causal_conv1d
from .decoding import Known, fused_recurrent_gated_delta_rule, fused_recurrent_kda
from .plans import clear


def clear_plans() -> None:
    """Frees what calls leave on the device for the next one of their shape, and forgets which
    ranks have what."""
    clear()
    forget()
    Known.clear()


chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule

__all__ = [
    "causal_conv1d",
    "chunk_dplr_delta_rule",
    "chunk_gated_delta_product",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_gdn2",
    "chunk_gla",
    "chunk_kda",
    "chunk_mkda",
    "chunk_rwkv7",
    "chunk_simple_gla",
    "clear_plans",
    "cp_context",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "fused_recurrent_kda",
]
