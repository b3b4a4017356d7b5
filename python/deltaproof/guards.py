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
    """Bytes of the inputs that a call must not change. Without guards: none of large calls."""
    if not guards and sum(getattr(x, "nbytes", 0) for x in given.values()) > MOST:
        return {}
    return {n: around(x) for n, x in given.items() if n not in MAY_CHANGE}


def look_at_inputs(
    given: Mapping[str, Any], before: Mapping[str, bytes], result: Mapping[str, Any] | None = None
) -> None:
    """Broken: an input, or what lies beside it, changed. result: the call may have written it in
    place of the initial state."""
    for n, x in before.items():
        if around(given[n]) != x and not (result and n in IN_PLACE and _holds(given[n], result)):
            raise Broken(f"the call wrote into its input {n}, or beside it")


def _holds(state: Any, result: Mapping[str, Any]) -> bool:
    """Is it the final state, in whatever format? A call that returns none may have it there."""
    final = next((x for n, x in result.items() if n.startswith("final_state")), None)
    if final is None:
        return True
    x, y = (to_numpy(z).astype(np.float64) for z in (state, final))
    least = 2**-6 * np.abs(y[np.isfinite(y)]).max(initial=0)
    return x.shape == y.shape and np.allclose(x, y, 2**-6, least, equal_nan=True)


def kept_of(given: Mapping[str, Any], result: Mapping[str, Any]) -> list[tuple[str, Any, bytes]]:
    """Results that no later call may change: name, array and its bytes. None that lie in an input,
    and none of large calls."""
    kept = {n: x.detach() if is_torch(x) else x for n, x in result.items() if _plain(x)}
    if sum(x.nbytes for x in kept.values()) > MOST:
        return []
    inputs = [x for x in given.values() if hasattr(x, "shape")]
    own = {n: x for n, x in kept.items() if not any(_share(x, y) for y in inputs)}
    return [(n, x, bits(x)) for n, x in own.items()]


def look_at_kept(kept: list[tuple[str, Any, bytes]]) -> None:
    """Broken: a result of the call before changed. None is kept any more."""
    looked, kept[:] = list(kept), []
    for n, x, was in looked:
        if bits(x) != was:
            raise Broken(f"{n} of the call before changed in this call: both are in one memory")


def _share(x: Any, y: Any) -> bool:
    if is_torch(x) and is_torch(y):
        return bool(x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr())
    return not is_torch(x) and not is_torch(y) and np.may_share_memory(x, y)


def _plain(x: Any) -> bool:
    """Is it an array of numpy or a tensor of PyTorch, and of no class of its own?"""
    known = (("numpy", "ndarray"), ("torch", "Tensor"), ("torch.nn", "Parameter"))
    return type(x) in [getattr(sys.modules[m], name) for m, name in known if m in sys.modules]


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
