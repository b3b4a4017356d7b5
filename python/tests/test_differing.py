"""Two functions on the same inputs."""

import numpy as np
import pytest

import deltaproof
from deltaproof import differ
from kernels import kda, wrong_at_70


def in_double(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, beta: np.ndarray
) -> np.ndarray:
    return kda(q, k, v, g, beta, dtype=np.float64)[0]


def refuses(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, beta: np.ndarray
) -> np.ndarray:
    raise deltaproof.Unsupported("not on a Monday")


def breaks(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, beta: np.ndarray
) -> np.ndarray:
    raise ValueError("no luck")


def o_of_kda(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, beta: np.ndarray
) -> np.ndarray:
    return kda(q, k, v, g, beta)[0]


def test_the_same_function_twice_has_the_same_bits() -> None:
    found = differ(kda, kda, base="fp32", tokens=160, heads=2, outputs=("o", "final_state"))
    assert found.passed and found.verdict == "same", found.text
    assert {t["name"]: t["different"] for t in found.tensors} == {"o": 0, "final_state": 0}


def test_another_arithmetic_is_within_both_bounds_and_not_the_same_bits() -> None:
    found = differ(o_of_kda, in_double, base="fp32", tokens=160, heads=2)
    assert found.passed and found.verdict == "within", found.text
    assert "A: o_of_kda" in found.text and "B: in_double" in found.text
    assert 0 < found.tensors[0]["worst_row"]["share"] < 0.5
    claimed = differ(o_of_kda, in_double, base="fp32", tokens=160, heads=2, bitwise=True)
    assert claimed.status == 1 and claimed.verdict == "within"


def test_a_wrong_row_is_beyond_both_bounds_where_it_is() -> None:
    found = differ(o_of_kda, wrong_at_70, base="fp32", tokens=160, heads=2)
    row = found.tensors[0]["worst_row"]
    assert found.status == 1 and found.first_beyond == "o", found.text
    assert (row["token"], row["head"]) == (70, 1), row
    assert "BEYOND BOTH BOUNDS: B breaks its own" in found.text


@pytest.mark.parametrize("case", [["t1", "t63"], "smoke", []])
def test_several_cases_are_refused(case: str | list[str]) -> None:
    """The verdict and the tensors would be those of the first."""
    with pytest.raises(ValueError, match="on one case"):
        differ(o_of_kda, in_double, case, base="fp32")


def test_a_recurrent_design_needs_no_truth() -> None:
    sides = {"base": "fp32", "design": ("recurrent", None), "tokens": 160, "heads": 2}
    found = differ(o_of_kda, in_double, truth=False, **sides)
    assert (found.status, found.verdict) == (0, "within"), found.text


def test_a_design_without_a_bound_is_judged_by_the_truth() -> None:
    kept_short = ("recurrent,state=bf16", None)
    sides = {"base": "fp32", "design": kept_short, "tokens": 160, "heads": 2}
    assert differ(o_of_kda, in_double, **sides).passed
    found = differ(o_of_kda, in_double, truth=False, **sides)
    assert (found.status, found.verdict) == (2, "unbounded"), found.text


def test_a_function_without_a_result_is_named() -> None:
    found = differ(o_of_kda, breaks, base="fp32", tokens=96, heads=2)
    assert (found.status, found.verdict) == (1, "no result"), found.text
    assert "B, breaks: failed" in found.text and "ValueError: no luck" in found.raised[0]
    assert differ(o_of_kda, refuses, base="fp32", tokens=96, heads=2).verdict == "refused"
    with pytest.raises(RuntimeError, match="no-such-case"):
        differ(kda, kda, "no-such-case", base="fp32")
