"""Memory layouts of the arrays that a kernel gets. Everything around the array's own entries is
NaN, so that an entry which is read from outside of it shows in the results.

    contiguous   row-major, at an aligned address, NaN behind the end
    strided      heads are slices of wider heads; of k and v, all heads of a token are a slice of
                 a wider token, as q k v of one projection are
    heads-first  all tokens of a head lie together, and are a slice of more tokens, as in a cache of
                 heads; arrays without tokens as they are
    offset       the array begins one row behind the begin of its memory
    unaligned    the array begins one entry behind it: not aligned to 16 bytes

    guarded      the array ends where a page begins that nobody may touch, and such a page lies
                 before it: the process of a kernel that reads or writes there ends, or loses its
                 device (device_pages.py). Where the kernel has a process of its own

    far          the last token lies more than 2^31 entries behind the first: offsets of 32 bits
                 wrap, into zeros. A function that copies its inputs first passes. Memory of a CPU
                 is reserved alone; on a device a tensor takes 4 GiB in bf16, 8 in fp32, so there
                 `far` is tried with the set `large`, or where it is asked for by name
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import device_pages
from .tensors import is_torch
from .words import Unsupported

LAYOUTS = ("contiguous", "strided", "heads-first", "offset", "unaligned")
FAR, GUARDED, HEADS_FIRST = "far", "guarded", "heads-first"
TAIL = 64  # entries of NaN behind the end
WRAPS = 2**31
NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # of Linux, which Python names from 3.13 on


def layouts_of(device: str | None, cases: Sequence[str]) -> tuple[str, ...]:
    """Layouts that `run` tries by itself."""
    large = "large" in cases
    return (*LAYOUTS, FAR) if device in (None, "cpu") or large else LAYOUTS


def _strides(shape: tuple[int, ...], layout: str, apart: int) -> list[int]:
    """In entries. strided: between rows of the last `apart` axes three times what they need."""
    wide = 3 if layout == "strided" and len(shape) > 1 else 1
    out, step = [1] * len(shape), 1
    longest = next((i for i, n in enumerate(shape) if n > 1), None)
    for i in reversed(range(len(shape))):
        out[i] = step
        if layout == FAR and i == longest:
            out[i] = max(step, WRAPS // (shape[i] - 1) + 1)
        step *= shape[i] * (wide if i == len(shape) - apart else 1)
    return out


def _first(shape: tuple[int, ...], layout: str) -> int:
    """Entries before the array."""
    if layout == "offset":
        return shape[-1] if len(shape) > 1 else 1
    return 1 if layout == "unaligned" else 0


def arrange(x: Any, layout: str, apart: int = 1, tokens: int | None = None) -> Any:
    """The same numbers in that layout, on the same device. A row has `apart` axes (strided); the
    axis `tokens` is that of tokens, before that of heads (heads-first)."""
    known = (*LAYOUTS, GUARDED, FAR)
    if layout not in known:
        raise ValueError(f"layout {layout}: must be one of {' '.join(known)}")
    shape = tuple(x.shape)
    if not shape or 0 in shape:
        return x
    if layout == GUARDED:
        return _guarded(x, shape)
    if layout == HEADS_FIRST:
        at = (tokens, tokens + 1) if tokens is not None else (0, 0)
        y = arrange(x.swapaxes(*at), "strided" if at[1] else "contiguous", x.ndim - at[1])
        return y.swapaxes(*at)
    strides, first = _strides(shape, layout, apart), _first(shape, layout)
    size = first + 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + TAIL
    if layout == FAR and (not is_torch(x) or x.device.type == "cpu"):
        return _reserved(x, shape, strides)
    if is_torch(x):
        return _torch_array(x, shape, strides, first, size)
    memory = np.full(size, np.nan, x.dtype)
    view = np.lib.stride_tricks.as_strided(
        memory[first:], shape, [s * x.dtype.itemsize for s in strides]
    )
    view[...] = x
    return view


def _reserved(x: Any, shape: tuple[int, ...], strides: list[int]) -> Any:
    """Behind 2^31 entries that offsets below 0 reach; pages that nobody touches take no memory."""
    size = x.element_size() if is_torch(x) else x.dtype.itemsize
    entries = WRAPS + 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + TAIL
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    try:
        memory = np.frombuffer(mmap.mmap(-1, entries * size, flags), np.uint8)
    except (OSError, ValueError, OverflowError) as e:
        gib = entries * size / 2**30
        raise Unsupported(f"layout far: {gib:.0f} GiB cannot be reserved here: {e}") from e
    if is_torch(x):
        import torch

        far = torch.from_numpy(memory).view(x.dtype).as_strided(shape, strides, WRAPS)
        return far.copy_(x)
    view = np.lib.stride_tricks.as_strided(
        memory.view(x.dtype)[WRAPS:], shape, [s * size for s in strides]
    )
    view[...] = x
    return view


def _guarded(x: Any, shape: tuple[int, ...]) -> Any:
    if is_torch(x) and x.device.type != "cpu":
        return device_pages.guarded(x)
    size = x.element_size() if is_torch(x) else x.dtype.itemsize
    page, n = mmap.PAGESIZE, int(np.prod(shape))
    inner = -(-n * size // page) * page
    memory = mmap.mmap(-1, inner + 2 * page, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    begin = np.frombuffer(memory, np.uint8).ctypes.data
    libc = ctypes.CDLL(None, use_errno=True)
    for at in (begin, begin + page + inner):
        if libc.mprotect(ctypes.c_void_p(at), ctypes.c_size_t(page), 0):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    between = np.frombuffer(memory, np.uint8, inner, page)
    if is_torch(x):
        import torch

        flat = torch.from_numpy(between).view(x.dtype)
        flat.fill_(float("nan"))
        flat[-n:] = x.reshape(-1)
        return flat[-n:].view(shape)
    own = between.view(x.dtype)
    own[:] = np.nan
    own[-n:] = x.reshape(-1)
    return own[-n:].reshape(shape)


def _torch_array(x: Any, shape: tuple[int, ...], strides: list[int], first: int, size: int) -> Any:
    far = size > WRAPS
    try:
        memory = x.new_zeros((size,)) if far else x.new_full((size,), float("nan"))
    except RuntimeError as e:
        if not far or "out of memory" not in str(e):
            raise
        raise Unsupported("layout far: the device has no memory for it") from e
    view = memory.as_strided(shape, strides, first)
    view.copy_(x)
    return view
