"""Verdicts on unwritten entries say nothing of the problem's condition, whatever that is. A kernel
on one rank is asked for nothing of ranks."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import deltaproof
from recurrences import right

F4 = np.float32
FORM: dict[str, Any] = {"scale": 16**-0.5, "gate": "log", "beta_form": "plain", "l2norm": False}
Results = dict[str, Any]


def rows(value: float) -> Callable[[Results], None]:
    def spoil(y: Results) -> None:
        y["o"][len(y["o"]) // 2, -1] = value

    return spoil


def some_rows_of_0(y: Results) -> None:
    y["o"][40:50] = 0


def an_unwritten_column_beside_wrong_rows(y: Results) -> None:
    y["final_state"][0, 0, :, 2] = np.nan
    y["o"] *= F4(1.5)


def wrong_rows(y: Results) -> None:
    y["o"] *= F4(1.5)


UNWRITTEN = {
    "NaN": rows(np.nan),
    "Inf": rows(np.inf),
    "a row of 0": rows(0),
    "rows of 0": some_rows_of_0,
    "a column of a state": an_unwritten_column_beside_wrong_rows,
}


def spoilt(spoil: Callable[[Results], None], **x: Any) -> Results:
    y = {n: a.copy() for n, a in right("kda")(**x, lower_bound=0).items()}
    spoil(y)
    return y


def kernel(spoil: Callable[[Results], None]) -> Callable[..., Any]:
    def spoils(q: Any, k: Any, v: Any, g: Any, beta: Any, scale: float, gate: str, beta_form: str,
               l2norm: bool, A_log: Any = None, dt_bias: Any = None, initial_state: Any = None,
               cu_seqlens: Any = None) -> Any:  # fmt: skip
        return spoilt(spoil, **{n: x for n, x in locals().items() if n != "spoil"})

    return spoils


def inputs(hard: bool) -> dict[str, Any]:
    """hard: keys that are nearly parallel, and betas near 2."""
    r, shape = np.random.default_rng(1), (96, 2, 16)
    x = {n: r.normal(size=shape).astype(F4) for n in ("q", "k", "v")}
    if hard:
        x["k"] = x["k"][:1] + F4(1e-3) * x["k"]
    x["k"] /= np.linalg.norm(x["k"], axis=-1, keepdims=True)
    lo, hi = (1.8, 2) if hard else (0, 1)
    g = F4(-0.001) * r.exponential(size=shape).astype(F4)
    return x | {"beta": r.uniform(lo, hi, shape[:2]).astype(F4), "g": g}


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("name", UNWRITTEN)
def test_judge_says_nothing_of_the_condition(name: str, hard: bool) -> None:
    x = inputs(hard)
    said: dict[str, Any] = {"base": "fp32", "gate": "log", "beta": "plain", "l2norm": False}
    said["why"] = 0
    of = lambda spoil: deltaproof.judge(x, spoilt(spoil, **x, **FORM), **said)
    found = of(UNWRITTEN[name])
    assert found.status == 1 and "condition" not in found.text, found.text
    assert "condition" in of(wrong_rows).text


@pytest.mark.parametrize("case", ["kda-smoke", "ill-conditioned"])
@pytest.mark.parametrize("name", UNWRITTEN)
def test_run_and_bisect_say_nothing_of_the_condition(name: str, case: str) -> None:
    own: dict[str, Any] = {"base": "fp32", "outputs": ("o", "final_state")}
    found = deltaproof.run(kernel(UNWRITTEN[name]), case, layouts=(), **own)
    said = found.text.replace("ill-conditioned", "case")
    assert found.status == 1 and "condition" not in said, found.text
    stage = deltaproof.bisect(kernel(UNWRITTEN[name]), case, **own)
    asked = stage.text.split("to tell which, show")[1:]
    assert stage.status == 1, stage.text
    assert not {"M", "H", "S_in"} & set(" ".join(asked).replace(")", " ").split()), stage.text
