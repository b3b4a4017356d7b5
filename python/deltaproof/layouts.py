"""Memory layouts in which a kernel may be given an array. Everything around the array's own
entries is NaN, so that an entry which is read from outside of it shows in the results.

    contiguous   row-major, at an aligned address, NaN behind the end
    strided      heads are slices of a wider tensor, as q k v of one projection are
    offset       the array begins one row behind the begin of its memory
    unaligned    the array begins one entry behind it: not aligned to 16 bytes
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .tensors import is_torch

LAYOUTS = ("contiguous", "strided", "offset", "unaligned")
TAIL = 64  # entries of NaN behind the end


def _strides(shape: tuple[int, ...], layout: str) -> list[int]:
    """In entries. strided: between rows of the last axis three times what they need."""
    wide = 3 if layout == "strided" and len(shape) > 1 else 1
    out, step = [1] * len(shape), 1
    for i in reversed(range(len(shape))):
        out[i] = step
        step *= shape[i] * (wide if i == len(shape) - 1 else 1)
    return out


def _first(shape: tuple[int, ...], layout: str) -> int:
    """Entries before the array."""
    if layout == "offset":
        return shape[-1] if len(shape) > 1 else 1
    return 1 if layout == "unaligned" else 0


def arrange(x: Any, layout: str) -> Any:
    """The same numbers in that layout, on the same device."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout}: must be one of {' '.join(LAYOUTS)}")
    shape = tuple(x.shape)
    if not shape or 0 in shape:
        return x
    strides, first = _strides(shape, layout), _first(shape, layout)
    size = first + 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + TAIL
    if is_torch(x):
        return _torch_array(x, shape, strides, first, size)
    memory = np.full(size, np.nan, x.dtype)
    view = np.lib.stride_tricks.as_strided(
        memory[first:], shape, [s * x.dtype.itemsize for s in strides]
    )
    view[...] = x
    return view


def _torch_array(x: Any, shape: tuple[int, ...], strides: list[int], first: int, size: int) -> Any:
    memory = x.new_full((size,), float("nan"))
    view = memory.as_strided(shape, strides, first)
    view.copy_(x)
    return view
