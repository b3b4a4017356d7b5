"""Arrays that a call of a kernel must leave unchanged or must not return. They are checked in the
kernel's process, where the function could deceive the check (python/THREATS.md)."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from .tensors import is_torch, to_numpy

MAY_CHANGE = ("pool",)  # which a function with slots writes
IN_PLACE = (*MAY_CHANGE, "initial_state", "initial_states")  # kernels of servers write these, too
MOST = 1 << 26  # bytes of inputs that every call may be asked to keep
WAIT = 0.02  # seconds in which work that a call left behind may touch its results


class Broken(Exception):
    """The call is wrong, whatever its numbers are."""


def bits(x: Any) -> bytes:
    if isinstance(x, np.ndarray):
        return x.tobytes()
    x = x.int() if str(getattr(x, "dtype", "")) == "torch.bool" else x
    return to_numpy(x).tobytes() if hasattr(x, "shape") else repr(x).encode()


def around(x: Any) -> bytes:
    """All memory that the array is part of, but for that which would be large: then its own."""
    own, most = bits(x), 8 * getattr(x, "nbytes", 0) + 4096
    if is_torch(x) and x.untyped_storage().nbytes() <= most:
        import torch

        return bits(torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage()))
    whole, at = x, x
    while getattr(at, "base", None) is not None:
        at = at.base
        whole = at if isinstance(at, np.ndarray) else whole
    return whole.tobytes() if isinstance(whole, np.ndarray) and whole.nbytes <= most else own


def inputs_of(given: Mapping[str, Any], guards: bool = True) -> dict[str, bytes]:
    """Bytes of the inputs that a call must not change. Without guards: none of states, and none of
    large calls."""
    if not guards and sum(getattr(x, "nbytes", 0) for x in given.values()) > MOST:
        return {}
    change = MAY_CHANGE if guards else IN_PLACE
    return {n: around(x) for n, x in given.items() if n not in change}


def look_at_inputs(given: Mapping[str, Any], before: Mapping[str, bytes]) -> None:
    """Broken: an input, or what lies beside it, changed."""
    for n, x in before.items():
        if around(given[n]) != x:
            raise Broken(f"the call wrote into its input {n}, or beside it")


def _plain(x: Any) -> bool:
    """Is it an array of numpy or a tensor of PyTorch, and of no class of its own?"""
    torch = sys.modules.get("torch")
    known = (np.ndarray, *((torch.Tensor, torch.nn.Parameter) if torch else ()))
    return type(x) in known


def look(given: Mapping[str, Any], before: Mapping[str, bytes], result: Mapping[str, Any]) -> None:
    """Broken: an input changed; a result is no plain array, or changes after the call returned."""
    look_at_inputs(given, before)
    plain = {n: x for n, x in result.items() if x is not None}
    for n, x in plain.items():
        if not _plain(x):
            kind = type(x)
            raise Broken(f"{n} is a {kind.__module__}.{kind.__name__}, which is no plain array")
    first = {n: bits(x) for n, x in plain.items()}
    time.sleep(WAIT)
    _finish(plain.values())
    for n, x in plain.items():
        if bits(x) != first[n]:
            raise Broken(f"{n} changed after the call returned")


def _finish(results: Any) -> None:
    if any(is_torch(x) and x.is_cuda for x in results):
        import torch

        torch.cuda.synchronize()
