"""`assert_close` of FLA's tests, with the same criterion. Its message describes a difference: where
it is, and which simple change of one array would remove it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from .tensors import Array, to_numpy

Real = npt.NDArray[np.float64]
SAME = 0.1  # a hypothesis fits that leaves less than this part of the difference


def _rms(x: Real) -> float:
    return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0


def error_ratio(ref: Real, tri: Real) -> float:
    """rms(ref - tri) / rms(ref), as FLA's get_err_ratio."""
    return _rms(ref - tri) / (_rms(ref) + 1e-8)


def _factor(ref: Real, tri: Real) -> tuple[str, Real]:
    c = float(np.vdot(ref, tri) / np.vdot(ref, ref)) if np.any(ref) else 1.0
    named = {0.5: "1/2", 2.0: "2", -1.0: "-1", 0.0: "0"}
    for n in (16, 32, 64, 128, 256):
        named |= {n**0.5: f"sqrt({n})", n**-0.5: f"1/sqrt({n})"}
    near = [text for x, text in named.items() if abs(c - x) < 2e-3 * abs(x)]
    return f"{c:.4g} times the reference" + (f" ({near[0]})" if near else ""), c * ref


def _token_axis(x: Real) -> int:
    """1 of [B,T,..], 0 of [T,H,..]; B is 1 or the shorter one."""
    return 1 if x.ndim >= 4 else 0


def _shifted(by: int) -> Callable[[Real, Real], tuple[str, Real]]:
    def fit(ref: Real, tri: Real) -> tuple[str, Real]:
        when = "late" if by > 0 else "early"
        moved = np.roll(ref, by, axis=_token_axis(ref))
        return f"one token {when}", moved

    return fit


def _turned(ref: Real, tri: Real) -> tuple[str, Real]:
    if ref.ndim < 2 or ref.shape[-1] != ref.shape[-2]:
        return "", ref
    return "the last two axes exchanged ([K,V] and [V,K])", np.swapaxes(ref, -1, -2)


def _offset(ref: Real, tri: Real) -> tuple[str, Real]:
    c = float(np.mean(tri - ref))
    return f"the reference plus {c:.3g} in every entry", ref + c


HYPOTHESES = (_factor, _shifted(1), _shifted(-1), _turned, _offset)


def _looks_like(ref: Real, tri: Real) -> list[str]:
    before = _rms(ref - tri)
    out = []
    for hypothesis in HYPOTHESES:
        text, other = hypothesis(ref, tri)
        if text and _rms(other - tri) < SAME * before:
            out.append(f"it looks like {text}")
    return out


def _where(ref: Real, tri: Real) -> list[str]:
    """The worst entry, and the axis along which the difference is confined to one place."""
    wrong = np.abs(ref - tri)
    at = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
    place = [int(i) for i in at]
    lines = [f"largest at {place}: {tri[at]:.6g}, reference {ref[at]:.6g}"]
    for axis in range(wrong.ndim):
        rest = tuple(i for i in range(wrong.ndim) if i != axis)
        squares = np.sqrt(np.sum(np.square(ref - tri), axis=rest))
        bad = np.flatnonzero(squares > 1e-3 * squares.max())
        if 0 < len(bad) < 0.5 * wrong.shape[axis]:
            lines.append(f"axis {axis}: only {_range(bad)} of {wrong.shape[axis]}")
    return lines


def _range(indices: npt.NDArray[Any]) -> str:
    first, last = int(indices[0]), int(indices[-1])
    if first == last:
        return f"index {first}"
    whole = len(indices) == last - first + 1
    return f"indices {first} to {last}" + ("" if whole else f" ({len(indices)} of them)")


def explain_difference(name: str, ref: Array, tri: Array) -> str:
    """Lines on how tri differs from ref, arrays of one shape."""
    a, b = (to_numpy(x, name).astype(np.float64) for x in (ref, tri))
    if a.shape != b.shape:
        return f"{name}: shape {list(b.shape)}, reference {list(a.shape)}"
    bad = ~np.isfinite(b) & np.isfinite(a)
    if bad.any():
        at = [int(i) for i in np.argwhere(bad)[0]]
        return f"{name}: {int(bad.sum())} of {b.size} entries are NaN or Inf, the first at {at}"
    lines = [f"{name}: rms of the difference {error_ratio(a, b):.3g} of the reference's"]
    if (a != b).any():
        lines += _where(a, b) + _looks_like(a, b)
    return "\n  ".join(lines)


def assert_close(
    name: str,
    ref: Array,
    tri: Array,
    ratio: float = 0.005,
    warning: bool = False,
    err_atol: float = 1e-6,
) -> None:
    """FLA's assert_close: AssertionError where rms(ref - tri) is `ratio` of rms(ref) or more and
    some entry differs by more than err_atol; NaN and Inf always fail. The message says where the
    difference is and what it looks like. warning: print it instead of raising.

    Neither array is the truth here, and `ratio` is typed, not derived: `judge` and
    `assert_explained` compare with the truth, by bounds of the formats."""
    __tracebackhide__ = True
    a, b = (to_numpy(x, name).astype(np.float64) for x in (ref, tri))
    same_shape = a.shape == b.shape
    finite = same_shape and bool(np.isfinite(b[np.isfinite(a)]).all())
    if finite and (np.abs(a - b).max(initial=0) <= err_atol or error_ratio(a, b) < ratio):
        return
    text = explain_difference(name, ref, tri) + f"\n  the limit is {ratio:g} (typed, not derived)"
    if not (warning and finite):
        raise AssertionError(text)
    print(text)
