"""Checks of arguments that every function of `deltaproof.ops` makes. ValueError names the wrong
argument, NotImplementedError says why a call is not served."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

TYPES = (torch.bfloat16, torch.float32, torch.float16)


def refuse(served: bool, what: str, why: str) -> None:
    if not served:
        raise NotImplementedError(f"deltaproof.ops: {what}: {why}")


def need(good: bool, argument: str, why: str) -> None:
    if not good:
        raise ValueError(f"{argument}: {why}")


def shaped(name: str, x: object, **axes: int) -> None:
    """x has these axes, in their order."""
    wanted = tuple(axes.values())
    if not isinstance(x, Tensor):
        raise ValueError(f"{name}: is a {type(x).__name__} and no tensor")
    if x.shape != wanted:
        raise ValueError(
            f"{name}: has shape {list(x.shape)} in place of [{', '.join(axes)}] = {list(wanted)}"
        )


def placed(device: torch.device, **tensors: Tensor | None) -> None:
    """All that are there lie on that device, which is a CPU or a CUDA device."""
    refuse(device.type in ("cpu", "cuda"), device.type, "the kernels run on CUDA and CPU devices")
    for name, x in tensors.items():
        if x is not None and x.device != device:
            raise ValueError(f"{name}: lies on {x.device}, other tensors on {device}")


def of_numbers(**tensors: Tensor | None) -> None:
    for name, x in tensors.items():
        if x is not None and not x.is_floating_point():
            raise ValueError(f"{name}: is {x.dtype}")


def alike(**tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors of one type, bf16, fp32 or fp16, the first one's; autocast makes all its own."""
    first = next(iter(tensors.values()))
    kind = first.device.type
    if torch.is_autocast_enabled(kind):
        to = torch.get_autocast_dtype(kind)
        if any(x.dtype != first.dtype for x in tensors.values()):
            tensors = {n: x.to(to) for n, x in tensors.items()}
            first = next(iter(tensors.values()))
    for name, x in tensors.items():
        if x.dtype != first.dtype:
            raise ValueError(f"{name}: is {x.dtype} where others are {first.dtype}")
    refuse(
        first.dtype in TYPES,
        f"{first.dtype}",
        "the kernels compute in fp32: a cast is up to the caller, as it rounds",
    )
    return tuple(tensors.values())


def computable(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The kernels compute fp16 in fp32, where it has the same numbers."""
    return tuple(x.float() if x.dtype == torch.float16 else x for x in tensors)


def gates(g: Tensor, beta: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """g and beta in one type, bf16 or fp32: fp32 where they differ."""
    kinds = {x.dtype for x in (g, beta) if x is not None}
    if kinds != {torch.bfloat16}:
        return g.float(), None if beta is None else beta.float()
    return g, beta


def sequences(
    q: Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    initial_state: Tensor | None,
) -> int:
    """How many there are."""
    if cu_seqlens is None:
        need(cu_seqlens_cpu is None, "cu_seqlens_cpu", "is given without cu_seqlens")
        return q.shape[0]
    need(
        q.shape[0] == 1,
        "cu_seqlens",
        "goes with a batch of 1: flatten variable-length inputs first",
    )
    for name, cu in (("cu_seqlens", cu_seqlens), ("cu_seqlens_cpu", cu_seqlens_cpu)):
        if cu is None:
            continue
        need(
            cu.dim() == 1 and cu.shape[0] > 1 and cu.dtype in (torch.int32, torch.int64),
            name,
            f"is {list(cu.shape)} of {cu.dtype} in place of [N+1] of int32 or int64",
        )
        need(cu.shape == cu_seqlens.shape, name, "has not the shape of cu_seqlens")
    if cu_seqlens_cpu is not None:
        need(cu_seqlens_cpu.device.type == "cpu", "cu_seqlens_cpu", "does not lie on the CPU")
    N = cu_seqlens.shape[0] - 1
    if initial_state is not None:
        need(
            initial_state.shape[0] == N,
            "initial_state",
            f"has {initial_state.shape[0]} states for {N} sequences",
        )
    return N


def old_names(kwargs: dict[str, Any], state_v_first: bool) -> bool:
    """state_v_first, by its old name too."""
    if "head_first" in kwargs:
        raise DeprecationWarning("head_first has been removed: inputs are [B, T, H, ...]")
    if "transpose_state_layout" not in kwargs:
        return state_v_first
    need(not state_v_first, "transpose_state_layout", "is the old name of state_v_first: give one")
    warnings.warn(
        "transpose_state_layout is deprecated: its name is state_v_first",
        DeprecationWarning,
        stacklevel=4,
    )
    return bool(kwargs.pop("transpose_state_layout"))


def chunk_size(kwargs: dict[str, Any], sizes: tuple[int, ...], words: str) -> None:
    size = kwargs.pop("chunk_size", None)
    need(size is None or size in sizes, "chunk_size", f"{size}: `chunk_size` must be {words}")


def none_left(kwargs: Mapping[str, Any]) -> None:
    for name in kwargs:
        raise TypeError(f"unexpected argument {name!r}")
