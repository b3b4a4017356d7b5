"""Plans of the kernels, made once for a shape and kept. At most PLANS of them are kept; the least
recently used one goes first.

A plan belongs to a device and a stream. One that a CUDA graph was captured with stays for good,
since the graph reads its tables. A call waits for nothing; the first one of a shape allocates the
plan's tables, which CUDA does not allow during capture."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch

from .kernels import dp_err, library, succeed

PLANS = 256
_POINTER = ctypes.c_void_p


class Plan:
    """A handle of the C library with its destructor, and room for the error of a call."""

    workspace: int  # bytes
    saved: int

    def __init__(self, kind: str, create: Callable[[Any, Any, Any], int], destroy: str) -> None:
        self.lib = library(kind)
        self.handle, self.err, self.lock = _POINTER(), dp_err(), threading.Lock()
        self.err_at, self.stays = ctypes.addressof(self.err), False
        succeed(create(self.lib, ctypes.addressof(self.handle), self.err_at), self.err)
        weakref.finalize(
            self, getattr(self.lib, destroy), _POINTER(self.handle.value)
        ).atexit = False

    def run(self, function: Any, *arguments: Any) -> None:
        """function(handle, *arguments, err), one host thread at a time."""
        with self.lock:
            succeed(function(self.handle, *arguments, self.err_at), self.err)


_plans: OrderedDict[Hashable, Plan] = OrderedDict()
_lock = threading.Lock()


def plan(key: Hashable, capturing: bool, make: Callable[[], Plan]) -> Plan:
    """The plan of that key, made if there is none."""
    with _lock:
        found = _plans.get(key)
        if found is None:
            if capturing:
                raise RuntimeError(
                    "deltaproof.ops: the first call of a shape on a stream cannot be captured; "
                    "make one before the capture, on the same stream"
                )
            found = _plans[key] = make()
            _drop()
        else:
            _plans.move_to_end(key)
        found.stays |= capturing
        return found


def _drop() -> None:
    spare = len(_plans) - PLANS
    old = [k for k, p in _plans.items() if not p.stays][: max(spare, 0)]
    for key in old:
        del _plans[key]


def clear() -> None:
    """Forgets all plans, those of captured graphs too."""
    with _lock:
        _plans.clear()


def stream_of(device: torch.device) -> int:
    """The current stream of a device, on which the library works from now on."""
    if device.type != "cuda":
        return 0
    succeed(library("cuda").dpg_use_device(device.index, None), _no_message)
    return torch._C._cuda_getCurrentRawStream(device.index)


def is_current(x: torch.Tensor) -> bool:
    """Lies x on the current device, or none of CUDA."""
    return not x.is_cuda or x.device.index == torch._C._cuda_getDevice()


def guarded(run: Callable[..., Any]) -> Callable[..., Any]:
    """run with the device of its first tensor current, and the one before it afterwards."""

    def call(x: torch.Tensor, *rest: Any) -> Any:
        if is_current(x):
            return run(x, *rest)
        with torch.cuda.device(x.device):
            return run(x, *rest)

    return call


class Place:
    """Where a call goes: the library, the stream that it is enqueued on."""

    __slots__ = ("capturing", "device", "index", "kind", "stream")

    def __init__(self, x: torch.Tensor) -> None:
        self.device, self.kind = x.device, x.device.type
        self.index, self.capturing = x.device.index or 0, False
        self.stream = stream_of(x.device)
        if self.kind == "cuda":
            self.capturing = torch.cuda.is_current_stream_capturing()

    @property
    def key(self) -> Hashable:
        return self.kind, self.index, self.stream

    def bytes(self, n: int, room: torch.Tensor | None = None) -> tuple[torch.Tensor, int]:
        """n bytes of PyTorch's allocator, or of the argument, and the place of an address of 256
        bytes among them."""
        if room is None:
            room = torch.empty(n + 256, dtype=torch.uint8, device=self.device)
        return room, (room.data_ptr() + 255) // 256 * 256


_no_message = dp_err(msg=b"the device of the tensors cannot be used")

# Bounds of sequences read from a tensor on a device, by the tensor: (it, version, bounds).
_bounds: OrderedDict[int, tuple[Any, int | None, tuple[int, ...]]] = OrderedDict()


def bounds(cu: torch.Tensor | None, cpu: torch.Tensor | None, B: int, T: int) -> tuple[int, ...]:
    """cu_seqlens as numbers. They come from the host's copy, else from the tensor, which waits for
    a device once for each tensor. Without either they are B sequences of T tokens."""
    if cu is None and cpu is None:
        return tuple(range(0, B * T + 1, T)) if T else (0,) * (B + 1)
    host = cpu if cpu is not None else cu
    assert host is not None
    found = tuple(host.tolist()) if host.device.type == "cpu" else _read(host)
    if (
        found[0] != 0
        or found[-1] != T
        or any(a > b for a, b in zip(found, found[1:], strict=False))
    ):
        raise ValueError(f"cu_seqlens: does not rise from 0 to T = {T}: {_short(found)}")
    return found


def _short(x: tuple[int, ...]) -> str:
    return str(list(x)) if len(x) <= 8 else f"{x[0]}, {x[1]}, .. {x[-2]}, {x[-1]}"


def _read(cu: torch.Tensor) -> tuple[int, ...]:
    version = None if cu.is_inference() else cu._version  # None: it may have changed
    with _lock:
        known = _bounds.get(id(cu))
    if known is not None and known[0]() is cu and known[1] == version is not None:
        return known[2]
    if torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(
            "cu_seqlens: a plan goes by its numbers, which cannot be read from the device during "
            "capture: pass cu_seqlens_cpu"
        )
    found = tuple(cu.tolist())
    with _lock:
        _bounds[id(cu)] = weakref.ref(cu), version, found
        while len(_bounds) > PLANS:
            _bounds.popitem(last=False)
    return found
