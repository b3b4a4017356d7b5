"""Memory of a CUDA device that ends where addresses begin which nothing is mapped to, by the
driver's virtual memory management. A kernel that reads or writes there gets an illegal address, and
its process has no device any more. No call frees the memory: the process of a kernel
ends soon."""

from __future__ import annotations

import ctypes
from typing import Any

from .words import Unsupported

BEFORE = 4096  # bytes of NaN before the array
ALIGNED = 16  # bytes, which kernels may ask of an address
PINNED, DEVICE, READ_WRITE = 1, 1, 3  # of cuda.h


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int), ("handles", ctypes.c_int), ("location", ctypes.c_int * 2),
        ("windows", ctypes.c_void_p), ("flags", ctypes.c_ubyte * 8),
    )  # fmt: skip


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", ctypes.c_int * 2), ("flags", ctypes.c_int))


def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as e:
        raise Unsupported(f"layout guarded: {e}") from e


def reserve(size: int, device: int, driver: Any = None) -> int:
    """The first address of `size` bytes, a multiple of ALIGNED, behind which nothing is mapped."""
    cuda = driver or _driver()
    u64, which = ctypes.c_uint64, (ctypes.c_int * 2)(DEVICE, device)
    made = _Properties(type=PINNED, location=which)
    grain, base, handle = ctypes.c_size_t(), u64(), u64()

    def ask(name: str, *args: Any) -> None:
        status = getattr(cuda, name)(*args)
        if status:
            raise Unsupported(f"layout guarded: {name} answers {status}")

    ask("cuMemGetAllocationGranularity", ctypes.byref(grain), ctypes.byref(made), 0)
    inner = -(-size // grain.value) * grain.value
    whole = ctypes.c_size_t(inner + 2 * grain.value)
    ask("cuMemAddressReserve", ctypes.byref(base), whole, ctypes.c_size_t(0), u64(0), u64(0))
    ask("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(inner), ctypes.byref(made), u64(0))
    first = u64(base.value + grain.value)
    ask("cuMemMap", first, ctypes.c_size_t(inner), ctypes.c_size_t(0), handle, u64(0))
    access = _Access(location=which, flags=READ_WRITE)
    ask("cuMemSetAccess", first, ctypes.c_size_t(inner), ctypes.byref(access), ctypes.c_size_t(1))
    return first.value + inner - size


def guarded(x: Any) -> Any:
    """The tensor in such memory, with NaN before it, and behind it up to ALIGNED."""
    import torch

    own = x.numel() * x.element_size()
    size = BEFORE + -(-own // ALIGNED) * ALIGNED
    at = reserve(size, x.device.index or 0)
    held = {"shape": (size,), "typestr": "|u1", "data": (at, False), "version": 3}
    memory = torch.as_tensor(
        type("Memory", (), {"__cuda_array_interface__": held})(), device=x.device
    )
    memory.fill_(0xFF)
    made = memory[BEFORE : BEFORE + own].view(x.dtype).view(x.shape)
    return made.copy_(x)
