"""`check`: what must hold between calls of one kernel, whatever the truth is.

Each check calls the function on inputs and on changed inputs whose results are related exactly.
Where both calls do the same arithmetic on an entry the relation must hold bit for bit; a kernel
that splits its work differently, or adds in another order from call to call, need not give the same
bits: then both results are judged against the truth of their own inputs (`judge`), and the check
holds "within bounds" where both pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .contract import Contract, Problem, Unsupported
from .judging import judge
from .tensors import BFLOAT16

Real = npt.NDArray[np.float64]
Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Size:
    """Of the problem that is checked. T: a multiple of 4, at least 8."""

    T: int = 192
    H: int = 2
    HV: int = 2
    K: int = 64
    V: int = 64


@dataclass(frozen=True)
class Check:
    """verdict: "bitwise", "within bounds", "fail" or "skipped"; why: where and by how much."""

    name: str
    verdict: str
    why: str = ""


class _Kernel:
    """The function under its contract on the arrays of a problem."""

    def __init__(self, contract: Contract, base: str, size: Size, seed: int) -> None:
        self.contract, self.base, self.size = contract, base, size
        self.format = "bf16" if base == "bf16" else "fp32"
        self.inputs = self._draw(np.random.default_rng(seed))

    def _draw(self, rng: np.random.Generator) -> Arrays:
        s, c = self.size, self.contract
        q, k = (rng.normal(size=(s.T, s.H, s.K)) for _ in range(2))
        if not c.l2norm:
            q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
        width = 1 if "kda" not in c.models else s.K
        g = rng.normal(size=(s.T, s.HV, width))
        beta = rng.normal(size=(s.T, s.HV, 1))
        out = {"q": q, "k": k[:, :, None], "v": rng.normal(size=(s.T, s.HV, 1, s.V))}
        out["g"] = -0.05 * np.abs(g) if c.gate == "log" else g - 2
        out["beta"] = 1 / (1 + np.exp(-beta)) if c.beta == "plain" else beta
        return {n: self.round(x) for n, x in out.items()}

    def round(self, x: Real) -> Real:
        to = BFLOAT16 if self.format == "bf16" else np.float32
        return x.astype(np.float32).astype(to).astype(np.float64)

    def settings(self) -> dict[str, Any]:
        c, kda = self.contract, "kda" in self.contract.models
        return {
            "gate": c.gate,
            "beta_form": c.beta,
            "l2norm": c.l2norm,
            "backward": False,
            "scale": self.size.K**-0.5,
            "lower_bound": -5.0,
            "R": 1,
            "Kg": self.size.K if kda else 1,
        }

    def __call__(self, arrays: Mapping[str, npt.NDArray[Any]], state: bool = False) -> Arrays:
        T, HV, V = arrays["v"].shape[0], arrays["v"].shape[1], self.size.V
        N = len(arrays["cu_seqlens"]) - 1 if "cu_seqlens" in arrays else 1
        wanted: dict[str, tuple[int, ...]] = {"o": (T, HV, V)}
        if state:
            if "final_state" not in self.contract.outputs:
                raise Unsupported("the function returns no final_state")
            wanted["final_state"] = (N, HV, self.size.K, V)
        return self.contract.call(Problem(arrays, self.settings(), self.format, wanted))

    def explained(self, arrays: Mapping[str, npt.NDArray[Any]], o: Real) -> bool:
        """Is o what the claimed formats make of these inputs?"""
        c = self.contract
        inputs = {n: x if n == "cu_seqlens" else x.astype(np.float32) for n, x in arrays.items()}
        inputs = {
            n: x.astype(BFLOAT16) if self.format == "bf16" and n != "cu_seqlens" else x
            for n, x in inputs.items()
        }
        bound = -5.0 if c.gate == "lower_bound" else None
        found = judge(
            inputs,
            {"o": o},
            base=self.base,
            gate=c.gate,
            beta=c.beta,
            l2norm=c.l2norm,
            lower_bound=bound,
        )
        return found.passed


def _compare(
    kernel: _Kernel,
    name: str,
    one: tuple[Mapping[str, npt.NDArray[Any]], Real],
    other: tuple[Mapping[str, npt.NDArray[Any]], Real],
    pair: tuple[Real, Real],
) -> Check:
    """pair: the parts of both results that must agree."""
    a, b = pair
    if np.array_equal(a, b, equal_nan=True):
        return Check(name, "bitwise")
    wrong = np.abs(a - b)
    at = [int(i) for i in np.unravel_index(int(np.argmax(wrong)), wrong.shape)]
    where = f"largest difference {wrong.max():.3g} at {at} (values of rms {np.std(a):.3g})"
    both = [kernel.explained(x, o) for x, o in (one, other)]
    return Check(name, "within bounds" if all(both) else "fail", where)


def _repeat(k: _Kernel) -> Check:
    x = k.inputs
    a, b = k(x)["o"], k(x)["o"]
    return _compare(k, "repeat", (x, a), (x, b), (a, b))


def _causality(k: _Kernel, name: str, t: int) -> Check:
    """Nothing before token t knows what comes from t on."""
    rng = np.random.default_rng(7)
    x = k.inputs
    y = {n: a.copy() for n, a in x.items()}
    for n in y:
        order = rng.permutation(k.size.T - t) + t
        y[n][t:] = x[n][order]
    a, b = k(x)["o"], k(y)["o"]
    return _compare(k, name, (x, a), (y, b), (a[:t], b[:t]))


def _heads(k: _Kernel) -> Check:
    """Heads do not see each other: turned round in all inputs, they are turned round in o."""
    x = k.inputs
    y = {n: np.ascontiguousarray(a[:, ::-1]) for n, a in x.items()}
    a, b = k(x)["o"], k(y)["o"]
    return _compare(k, "heads", (x, a), (y, b), (a, b[:, ::-1]))


def _prefix(k: _Kernel) -> Check:
    """The first half alone gives the first half."""
    x, T = k.inputs, k.size.T // 2
    y = {n: a[:T] for n, a in x.items()}
    a, b = k(x)["o"], k(y)["o"]
    return _compare(k, "prefix", (x, a), (y, b), (a[:T], b))


def _packed(k: _Kernel) -> Check:
    """Two sequences packed are those two alone."""
    x, T = k.inputs, k.size.T // 4 + 1
    cu = np.array([0, T, k.size.T], np.int64)
    y = {n: a[T:] for n, a in x.items()}
    packed = {**x, "cu_seqlens": cu}
    a, b = k(packed)["o"], k(y)["o"]
    return _compare(k, "packed", (packed, a), (y, b), (a[T:], b))


def _pieces(k: _Kernel) -> Check:
    """Two calls with the state carried between them are one call."""
    x, T = k.inputs, k.size.T // 2
    first = k({n: a[:T] for n, a in x.items()}, state=True)
    y = {n: a[T:] for n, a in x.items()} | {"initial_state": first["final_state"]}
    a, b = k(x)["o"], k(y)["o"]
    return _compare(k, "pieces", (x, a), (y, b), (a[T:], b))


def _scaled(k: _Kernel, name: str, array: str, factor: float) -> Check:
    """o is linear in v and in q; powers of two and signs round nothing."""
    x = k.inputs
    y = dict(x)
    y[array] = x[array] * np.float64(factor)
    a, b = k(x)["o"], k(y)["o"]
    return _compare(k, name, (x, a), (y, b), (a * factor, b))


CHECKS: dict[str, Callable[[_Kernel], Check]] = {
    "repeat": _repeat,
    "causality": lambda k: _causality(k, "causality", k.size.T // 2),
    "causality-inside": lambda k: _causality(k, "causality-inside", k.size.T // 2 + 5),
    "heads": _heads,
    "prefix": _prefix,
    "packed": _packed,
    "pieces": _pieces,
    "scale-v": lambda k: _scaled(k, "scale-v", "v", 2.0),
    "sign-v": lambda k: _scaled(k, "sign-v", "v", -1.0),
    "sign-q": lambda k: _scaled(k, "sign-q", "q", -1.0),
}


def check(
    fn: Callable[..., Any],
    *,
    base: str,
    size: Size | None = None,
    seed: int = 0,
    **contract: Any,
) -> list[Check]:
    """All checks of CHECKS on inputs drawn by `seed`, one result each.

    fn and contract: as `run` takes them (fn must return o; final_state where it is among outputs).
    A check whose call fn does not serve is skipped, with the reason."""
    own = size or Size()
    if own.T < 8 or own.T % 4:
        raise ValueError(f"T = {own.T}: must be a multiple of 4, at least 8")
    kernel = _Kernel(Contract(fn, **contract), base, own, seed)
    out = []
    for name, one in CHECKS.items():
        try:
            out.append(one(kernel))
        except (Unsupported, NotImplementedError) as e:
            out.append(Check(name, "skipped", str(e)))
    return out
