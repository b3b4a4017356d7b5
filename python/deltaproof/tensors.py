"""Arrays of numpy, ml_dtypes and PyTorch as safetensors files, by the safetensors library.

PyTorch is never imported here: a tensor is known by its methods, so that a program without PyTorch
needs none.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy

from .words import text_of

Array = Any  # numpy array (bf16: dtype ml_dtypes.bfloat16) or PyTorch tensor, on any device
Tensors = Mapping[str, Array]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {
    "F16": np.dtype(np.float16),
    "BF16": BFLOAT16,
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}


def to_bf16(x: npt.ArrayLike) -> npt.NDArray[Any]:
    """The nearest bf16 numbers, ties to even, as an array of dtype ml_dtypes.bfloat16."""
    return np.asarray(x, dtype=np.float32).astype(BFLOAT16)


def is_torch(x: Array) -> bool:
    """Is it a PyTorch tensor?"""
    return hasattr(x, "detach") and hasattr(x, "storage_offset")


def copy_of(x: Array) -> Array:
    """A PyTorch tensor in memory that no kernel knows, without a history; others as they are."""
    return x.detach().clone() if is_torch(x) else x


def to_numpy(x: Array, name: str = "array") -> npt.NDArray[Any]:
    """The same numbers as a contiguous numpy array in host memory. ValueError: a dtype that no
    tensor of a kernel has, or none that has numbers in memory (sparse, meta, masked ..)."""
    if x is None:
        raise ValueError(f"{name}: is None: give an array, or leave it out")
    try:
        x = _from_torch(x) if is_torch(x) else x
        if isinstance(x, np.ma.MaskedArray):
            raise TypeError("a masked array: say what its masked entries are")
        if hasattr(x, "__dlpack__") and not hasattr(x, "__array__"):
            x = np.from_dlpack(x)
        x = np.asarray(x)
        x = x.astype(x.dtype.newbyteorder("="), copy=False)
    except Exception as e:
        raise ValueError(f"{name}: {_kind(x)} cannot be read: {text_of(e)}") from e
    if x.dtype not in DTYPES.values():
        known = ", ".join(d.name for d in DTYPES.values())
        raise ValueError(f"{name}: dtype {x.dtype} is none of {known}")
    return x if x.flags.c_contiguous else x.copy(order="C")


def _kind(x: Array) -> str:
    said = []
    for n in ("dtype", "layout", "device"):
        with suppress(Exception):  # what has such an attribute may raise anything
            said.append(str(getattr(x, n)))
    return type(x).__name__ + (f" ({', '.join(said)})" if said else "")


def _from_torch(x: Array) -> npt.NDArray[Any]:
    """Views that stand for the negative or the conjugate of what is in memory are resolved."""
    x = x.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if str(x.dtype) != "torch.bfloat16":
        return np.asarray(x.numpy())
    import torch

    return x.view(torch.int16).numpy().view(BFLOAT16)  # type: ignore[no-any-return]


def save(path: str, tensors: Tensors, metadata: Mapping[str, Any] | None = None) -> None:
    """Write {name: array} as safetensors, whole or not at all. metadata: settings that
    `deltaproof judge` reads, such as gate or cu_seqlens; values are written as text."""
    arrays = {name: to_numpy(x, name) for name, x in tensors.items()}
    text = {str(k): str(v) for k, v in metadata.items()} if metadata else None
    part = f"{path}.{threading.get_native_id()}.part"
    try:
        safetensors.numpy.save_file(arrays, part, metadata=text)
        os.replace(part, path)
    finally:
        if os.path.exists(part):
            os.remove(part)


def load(path: str) -> dict[str, npt.NDArray[Any]]:
    """{name: array} of a safetensors file; bf16 as dtype ml_dtypes.bfloat16."""
    with open(path, "rb") as f:
        content = safetensors.deserialize(f.read())
    return {
        name: np.frombuffer(bytes(x["data"]), DTYPES[x["dtype"]]).reshape(x["shape"])
        for name, x in content
    }
