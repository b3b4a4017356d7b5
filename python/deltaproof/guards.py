"""Arrays that a call of a kernel must leave as they were or must not hand back: looked at in the
kernel's process, where the function could deceive it (docs: python/THREATS.md)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from .tensors import is_torch, to_numpy

MAY_CHANGE = ("pool",)  # which a function with slots writes
WAIT = 0.02  # seconds in which work that a call left behind may touch its results


class Broken(Exception):
    """The call is wrong, whatever its numbers are."""


def bits(x: Any) -> bytes:
    return to_numpy(x).tobytes() if hasattr(x, "shape") else repr(x).encode()


def inputs_of(given: Mapping[str, Any]) -> dict[str, bytes]:
    return {n: bits(x) for n, x in given.items() if n not in MAY_CHANGE}


def look(given: Mapping[str, Any], before: Mapping[str, bytes], result: Mapping[str, Any]) -> None:
    """Broken: an input changed; a result is no plain array, or changes after the call returned."""
    for n, x in before.items():
        if bits(given[n]) != x:
            raise Broken(f"the call wrote into its input {n}")
    plain = {n: x for n, x in result.items() if x is not None}
    for n, x in plain.items():
        kind = type(x)
        known = kind is np.ndarray or (is_torch(x) and kind.__module__.startswith("torch"))
        if not known:
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
