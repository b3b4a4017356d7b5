"""States behind every N-th token (Contract.checkpoints): a checkpoint is the final state of the
tokens before it. A case whose packed sequences are the beginnings of one another, each N tokens
longer, has a truth of all of them. The function gets the longest alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .tensors import BFLOAT16
from .vocabulary import TOKENS

if TYPE_CHECKING:
    from .contract import Problem

Array = npt.NDArray[Any]
Call = Callable[["Problem"], Mapping[str, Array]]
LENGTHS = (2, 1, 0)  # whole steps of N of the sequences, and tokens behind them
BEHIND = (5, 0, 3)
NAME = "nested.safetensors"


def nested(op: str, raw: bool, N: int) -> dict[str, Array]:
    """Inputs of such a case: one key head, two value heads, K = 16, V = 24, a state before each."""
    draws = np.random.default_rng(N)
    H, HV, K, V = 1, 2, 16, 24
    lengths = [n * N + rest for n, rest in zip(LENGTHS, BEHIND, strict=True)]
    out: dict[str, list[Array]] = {}
    ends = [0]
    for n in lengths:
        x = {m: draws.standard_normal((n, H, K)) / K**0.5 for m in ("q", "k")}
        x["v"] = draws.standard_normal((n, HV, V))
        width = (n, HV, 1 if op == "gdn" else K)
        x["g"] = draws.standard_normal(width) - 4 if raw else -0.02 * draws.exponential(size=width)
        x["beta"] = draws.standard_normal((n, HV)) if raw else 0.2 + 0.7 * draws.random((n, HV))
        state = 0.5 * draws.standard_normal((1, HV, K, V))
        for end in (*range(N, n + 1, N), n):
            for name, y in x.items():
                out.setdefault(name, []).append(y[:end])
            out.setdefault("initial_state", []).append(state)
            ends.append(ends[-1] + end)
    arrays = {name: np.concatenate(y).astype(BFLOAT16) for name, y in out.items()}
    return arrays | {"cu_seqlens": np.array(ends, np.int64)}


def _longest(problem: Problem, N: int) -> list[list[int]]:
    """Packed sequences in groups: the beginnings of one, N tokens apart, and itself."""
    cu = problem.arrays.get("cu_seqlens", [0, len(problem.arrays["q"])])
    groups: list[list[int]] = []
    at: list[int] = []
    for i, (a, e) in enumerate(zip(cu, cu[1:], strict=False)):
        at.append(i)
        more = i + 2 < len(cu) and e - a == len(at) * N and _begins(problem, cu, i)
        if not more:
            groups.append(at)
            at = []
    return groups


def _begins(problem: Problem, cu: Any, i: int) -> bool:
    """Is sequence i the beginning of the next one?"""
    a, e, end = (int(x) for x in cu[i : i + 3])
    state = problem.arrays.get("initial_state")
    same = [
        np.array_equal(x[a:e], x[e : 2 * e - a]) for n, x in problem.arrays.items() if n in TOKENS
    ]
    return (
        end - e >= e - a > 0 and all(same) and (state is None or (state[i] == state[i + 1]).all())
    )


def by_checkpoints(call: Call, problem: Problem, N: int) -> dict[str, Array]:
    """The call with the longest sequences, and what it made as the case has it."""
    groups = _longest(problem, N)
    if all(len(g) == 1 for g in groups) or "pool" in problem.arrays:
        return dict(call(problem))
    cu = problem.arrays["cu_seqlens"]
    last = [g[-1] for g in groups]
    rows = np.concatenate([np.arange(cu[i], cu[i + 1]) for i in last])
    arrays = {n: x[rows] if n in TOKENS else x for n, x in problem.arrays.items()}
    if "initial_state" in arrays:
        arrays["initial_state"] = arrays["initial_state"][last]
    lengths = [int(cu[i + 1] - cu[i]) for i in last]
    ends = np.cumsum([0, *lengths])
    arrays["cu_seqlens"] = ends
    if len(last) == 1:
        del arrays["cu_seqlens"]
    wanted = dict(problem.wanted)
    states = wanted.get("final_state", (0,))[1:]
    if "o" in wanted:
        wanted["o"] = (len(rows), *wanted["o"][1:])
    if "final_state" in wanted:
        wanted["final_state"] = (len(last), *states)
        wanted["checkpoints"] = (sum(n // N for n in lengths), *states)
    made = dict(call(replace(problem, arrays=arrays, wanted=wanted)))
    if "o" in made:
        parts = [(ends[j], cu[i + 1] - cu[i]) for j, g in enumerate(groups) for i in g]
        made["o"] = np.concatenate([made["o"][a : a + n] for a, n in parts])
    if "final_state" in made:
        made["final_state"] = _states(
            groups, made.pop("checkpoints"), made["final_state"], lengths, N
        )
    return made


def _states(
    groups: list[list[int]], checkpoints: Array, final: Array, lengths: list[int], N: int
) -> Array:
    out, at = [], 0
    for j, g in enumerate(groups):
        out += [*checkpoints[at : at + len(g) - 1], final[j]]
        at += lengths[j] // N
    return np.stack(out)
