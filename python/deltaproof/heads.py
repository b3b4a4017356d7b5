"""Functions whose heads are laid out otherwise than a case's: one problem as another that has the
same numbers.

A gate per value channel (`gv`). Columns of a state never meet. So value heads of width 1 that share
a key head are its value channels, each with a gate of its own.

Several query heads a key head (Contract.queries). A token without gate and beta changes no state.
So tokens that only read are further queries of the token before them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from .contract import Problem

Array = npt.NDArray[Any]
Call = Callable[["Problem"], Mapping[str, Array]]
OF_HEADS = ("v", "g", "beta", "do", "o", "dv", "dg", "dbeta")  # [T,HV,..] and R, Kg, V are 1
OF_STATES = ("initial_state", "dht", "final_state", "ds0")  # [N,HV,K,1]


def has_columns(problem: Problem) -> bool:
    """Are value heads of width 1 columns of a key head's values?"""
    v, q = problem.arrays["v"], problem.arrays["q"]
    one = problem.settings["R"] == problem.settings["Kg"] == 1
    return bool(one and v.shape[-1] == 1 and v.shape[1] > q.shape[1])


def by_columns(call: Call, problem: Problem) -> dict[str, Array]:
    """The call with v, gv [T,H,V], beta [T,H] (or [T,H,V] where columns differ), states [N,H,K,V],
    and its results in the case's form."""
    H = problem.arrays["q"].shape[1]
    arrays = {n: _as_columns(n, x, H) for n, x in problem.arrays.items()}
    arrays["gv"] = arrays.pop("g")
    beta = arrays["beta"]
    if (beta == beta[..., :1]).all():
        arrays["beta"] = beta[..., 0]
    wanted = {n: _as_columns(n, np.empty(s), H).shape for n, s in problem.wanted.items()}
    made = call(replace(problem, arrays=arrays, wanted=wanted))
    return {n: _of_columns(n, x, problem.wanted[n]) for n, x in made.items()}


def _as_columns(name: str, x: Array, H: int) -> Array:
    if name in OF_HEADS:
        return x.reshape(len(x), H, -1)
    if name in OF_STATES:
        return np.swapaxes(x.reshape(len(x), H, -1, x.shape[2]), -1, -2)
    return x


def _of_columns(name: str, x: Array, shape: tuple[int, ...]) -> Array:
    return (np.swapaxes(x, -1, -2) if name in OF_STATES else x).reshape(shape)


def _readers(problem: Problem, n: int) -> bool:
    """Do all tokens but every n-th one only read?"""
    g, beta, cu = (problem.arrays.get(x) for x in ("g", "beta", "cu_seqlens"))
    if g is None or beta is None or len(g) % n or (cu is not None and (cu % n).any()):
        return False
    plain = problem.settings["gate"] == "log" and problem.settings["beta_form"] == "plain"
    rest = np.arange(len(g)) % n > 0
    return bool(plain and not g[rest].any() and not beta[rest].any())


def by_queries(call: Call, problem: Problem, n: int) -> dict[str, Array]:
    """The call with q [T,H*n,K], and o [T,HV*n,V] of each of them. Where no tokens only read, all
    query heads of a key head are alike, and o of another one is taken for each token."""
    fold = n if _readers(problem, n) else 1
    arrays = {}
    for name, x in problem.arrays.items():
        if name == "q":
            y = x.reshape(len(x) // fold, fold, *x.shape[1:]).swapaxes(1, 2)
            arrays[name] = np.repeat(y, n // fold, 2).reshape(len(y), -1, x.shape[-1])
        elif name == "cu_seqlens":
            arrays[name] = x // fold
        else:
            arrays[name] = x[::fold] if len(x) == len(problem.arrays["q"]) else x
    wanted = dict(problem.wanted)
    if "o" in wanted:
        T, HV, V = wanted["o"]
        wanted["o"] = (T // fold, HV * n, V)
    made = dict(call(replace(problem, arrays=arrays, wanted=wanted)))
    if "o" in wanted:
        o = made["o"].reshape(T // fold, HV, n, V)
        at = np.arange(T)
        made["o"] = o[at // fold, :, at % n]
    return made


def more_queries(inputs: Mapping[str, Array], n: int) -> dict[str, Array]:
    """Inputs of a file, [T,H,..], with n query heads a value head, and H = HV. Query head h n + j
    reads what head h of the case reads j tokens before. Gradients are left out."""
    HV = inputs["v"].shape[1]
    out = {x: y for x, y in inputs.items() if x not in ("do", "dht")}
    q, k = (np.repeat(inputs[x], HV // inputs[x].shape[1], 1) for x in ("q", "k"))
    out["k"] = k
    out["q"] = np.stack([np.roll(q, j, 0) for j in range(n)], 2).reshape(len(q), HV * n, -1)
    return out


def one_query(inputs: Mapping[str, Array], n: int) -> dict[str, Array]:
    """The same problem in n times as many tokens of one query head a value head."""
    T, HV = inputs["v"].shape[:2]
    out = dict(inputs)
    for name in ("k", "v", "g", "beta"):
        if name in inputs:
            x = inputs[name]
            out[name] = np.zeros((T, n, *x.shape[1:]), x.dtype)
            out[name][:, 0] = x
            out[name] = out[name].reshape(T * n, *x.shape[1:])
    out["q"] = inputs["q"].reshape(T, HV, n, -1).swapaxes(1, 2).reshape(T * n, HV, -1)
    if "cu_seqlens" in inputs:
        out["cu_seqlens"] = inputs["cu_seqlens"] * n
    return out


def of_one_query(x: Array, T: int, HV: int, n: int) -> Array:
    """Numbers of o's rows, or of equal parts of these, of `one_query` in the order of o of n query
    heads."""
    return x.reshape(T, n, HV, -1).swapaxes(1, 2).reshape(-1)
