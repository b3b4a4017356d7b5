"""Properties that must hold between calls, and how two arrays differ."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import deltaproof
from deltaproof import assert_close, check
from kernels import (
    by_chunks,
    forgets_by_chunks,
    inputs,
    kda,
    looks_ahead,
    unsteady,
    without_packing,
)

KEPT = ("o", "final_state")


def verdicts(fn, **contract) -> dict[str, str]:  # noqa: ANN001, ANN003
    return {c.name: c.verdict for c in check(fn, base="fp32", **contract)}


def test_a_right_kernel_holds_everything() -> None:
    found = verdicts(kda, tokens=160, outputs=("o", "final_state"))
    skipped = {"anticausality", "scale-do", "chunk-size"}
    skipped |= {"ranks", "exact-cp", "transpose", "ranks-bound"}
    other = {n: v for n, v in found.items() if v != "bitwise"}
    assert other == dict.fromkeys(skipped, "skipped") | {"reference": "within bounds"}


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_states_that_grow_leave_no_room_for_scaled_values(tmp_path: Path) -> None:
    """Betas of 5 make states grow to 1e38 in 190 tokens, those of values times 8 in fewer."""
    case = tmp_path / "grows.case"
    case.write_text(
        "reason = r\nsource = s\nop = kda\nT = 96\nK = 8\nV = 8\ng_scale = 0\n"
        "beta_lo = 5\nbeta_hi = 5\n"
    )
    found = {c.name: c for c in check(kda, base="fp32", case=str(case), outputs=KEPT)}
    assert not [c for c in found.values() if c.verdict == "fail"], found
    why = found["scale-v"].why
    assert found["scale-v"].verdict == "skipped" and "may overflow" in why, found


def test_a_race_of_one_call_in_sixty_is_seen() -> None:
    calls = 0

    def races(q, k, v, g, beta):  # noqa: ANN001, ANN202
        nonlocal calls
        calls += 1
        o, state = kda(q, k, v, g, beta)
        o[:8] *= 1 + np.float32(0.3) * (calls % 60 == 59)
        return o, state

    found = check(races, base="fp32", tokens=32, outputs=KEPT)
    assert [c.name for c in found if c.verdict == "fail"] == ["repeat"], found
    assert "not repeatable, 1 of 57: o: " in found[0].why, found


def test_a_kernel_that_looks_ahead_is_not_causal() -> None:
    found = {c.name: c for c in check(looks_ahead, base="fp32", tokens=128)}
    assert found["causality"].verdict == "fail", found
    assert "o: rank 0, head 0, token 63: differ by" in found["causality"].why
    assert found["repeat"].verdict == "bitwise"
    assert found["packed"].verdict == "skipped" and "cu_seqlens" in found["packed"].why


@pytest.mark.parametrize(("factor", "why"), [(0, "o is zero"), (np.nan, "o has entries that")])
def test_zeros_and_nan_keep_other_properties_which_prove_nothing(factor: float, why: str) -> None:
    def fn(q, k, v, g, beta, initial_state=None):  # noqa: ANN001, ANN202
        return [x * np.float32(factor) for x in kda(q, k, v, g, beta, initial_state)]

    found = {c.name: c for c in check(fn, base="fp32", tokens=32, outputs=KEPT)}
    assert [n for n, c in found.items() if c.verdict != "skipped"] == ["reference"], found
    assert found["reference"].verdict == "fail" and why in found["repeat"].why, found


@pytest.mark.parametrize("factor", [2, -1, 1.001])
def test_a_factor_on_all_heads_is_seen_by_the_reference_alone(factor: float) -> None:
    def fn(q, k, v, g, beta, initial_state=None):  # noqa: ANN001, ANN202
        o, state = kda(q, k, v, g, beta, initial_state)
        return o * np.float32(factor), state

    found = check(fn, base="fp32", tokens=160, outputs=KEPT)
    assert [c.name for c in found if c.verdict == "fail"] == ["reference"], found


def test_zeros_of_a_head_are_seen_where_another_comes_first() -> None:
    """Other properties, which zeros keep, prove nothing."""

    def fn(q, k, v, g, beta):  # noqa: ANN001, ANN202
        o, _ = kda(q, k, v, g, beta)
        o[:, 1] = 0
        return o

    found = check(fn, base="fp32", tokens=32)
    seen = {c.name for c in found if c.verdict != "skipped"}
    assert seen == {"head-order", "reference"}, found
    assert "o of head 1 is zero" in found[0].why, found


@pytest.mark.parametrize(
    ("heads", "wrong"),
    [
        (2, lambda o, n: o[:, 0]),  # views, which change their sign
        (3, lambda o, n: o[:, 1]),
        (3, lambda o, n: o[:, -1]),
        (2, lambda o, n: o[: 99 * (n == 2)]),
        (12, lambda o, n: o[: 99 * (n > 8)]),
    ],
)
def test_what_depends_on_the_place_or_the_number_of_heads_is_seen(
    heads: int, wrong: Callable[[np.ndarray, int], np.ndarray]
) -> None:
    def fn(q, k, v, g, beta):  # noqa: ANN001, ANN202
        o, state = kda(q, k, v, g, beta)
        wrong(o, o.shape[1])[...] *= -1
        return o, state

    found = check(fn, base="fp32", tokens=32, heads=heads, outputs=KEPT)
    failed = {c.name: c.why for c in found if c.verdict == "fail"}
    assert list(failed) == ["head-order", "reference"], found
    assert f"where the last of {heads} " in failed["head-order"]


@pytest.mark.parametrize("error", [deltaproof.Unsupported, ValueError])
@pytest.mark.parametrize("flips", [False, True])
def test_a_kernel_of_so_many_heads_alone_is_asked_for_their_order(
    error: type[Exception], flips: bool
) -> None:
    def fn(q, k, v, g, beta):  # noqa: ANN001, ANN202
        if v.shape[1] != 4:
            raise error("four heads")
        o, state = kda(q, k, v, g, beta)
        o[:, 2] *= -1 if flips else 1
        return o, state

    found = {c.name: c for c in check(fn, base="fp32", tokens=32, heads=4, outputs=KEPT)}
    assert found["head-order"].verdict == ("fail" if flips else "bitwise"), found
    assert flips or "not alone: " in found["head-order"].why, found


def test_a_kernel_without_packing_is_seen() -> None:
    found = verdicts(without_packing, tokens=160)
    assert found["packed"] == "fail" and found["causality"] == "bitwise"
    assert found["sequence-order"] == "fail"


def test_a_kernel_is_asked_for_other_chunks_where_its_design_names_them() -> None:
    right = {c.name: c for c in check(by_chunks, base="fp32", design="chunks=16:32", tokens=48)}
    assert right["chunk-size"].verdict == "within bounds", right
    assert "of the sum of both bounds" in right["chunk-size"].why
    wrong = {
        c.name: c for c in check(forgets_by_chunks, base="fp32", design="chunks=16", tokens=48)
    }
    assert wrong["chunk-size"].verdict == "fail"
    assert "token 16: chunks of 16 and of 64 differ by" in wrong["chunk-size"].why
    assert {n for n, c in wrong.items() if c.verdict == "fail"} == {"chunk-size"}
    deaf = check(looks_ahead, base="fp32", design="chunks=16", tokens=48)
    assert "takes no `chunk`" in {c.name: c.why for c in deaf}["chunk-size"]


def test_a_kernel_that_is_not_steady_is_within_bounds_unless_it_claims_bits() -> None:
    assert verdicts(unsteady, tokens=80)["repeat"] == "within bounds"
    assert verdicts(unsteady, tokens=80, bitwise=True)["repeat"] == "fail"


@pytest.mark.parametrize("bitwise", [True, False])
def test_a_race_is_no_matter_of_causality(bitwise: bool) -> None:
    rng = np.random.default_rng(5)

    def races(q, k, v, g, beta, cu_seqlens=None):  # noqa: ANN001, ANN202
        o, state = kda(q, k, v, g, beta, cu_seqlens=cu_seqlens)
        if rng.random() < 0.15:
            t = rng.integers(0, len(o))
            o[t : t + 8] *= np.float32(1.25)
        return o, state

    found = check(races, base="fp32", outputs=("o", "final_state"), tokens=96, bitwise=bitwise)
    failed = [c for c in found if c.verdict == "fail"]
    assert [c.name for c in failed] == ["repeat"] and "not repeatable, " in failed[0].why, found
    more = [c for c in found if "not repeatable" in c.why or "(repeat)" in c.why]
    assert {c.verdict for c in more} <= {"skipped", "fail"}


def test_what_cannot_be_checked_says_why() -> None:
    with pytest.raises(RuntimeError, match="no-such-case"):
        check(kda, base="fp32", case="no-such-case")
    with pytest.raises(RuntimeError, match="name a case"):
        check(kda, base="fp32", case=[])


def test_checks_of_several_cases_say_whose_they_are(tmp_path: Path) -> None:
    def wrong_where_wide(q, k, v, g, beta):  # noqa: ANN001, ANN202
        o, state = kda(q, k, v, g, beta)
        o[:-1] += o[1:] * np.float32(v.shape[-1] > 16)
        return o, state

    wide = tmp_path / "wide.case"
    wide.write_text("reason = r\nsource = s\nop = kda\nT = 96\nK = 16\nV = 32\n")
    cases = ["beta-zero", "wide"]
    found = check(
        wrong_where_wide, base="fp32", case=[cases[0], str(wide)], tokens=40, outputs=KEPT
    )
    assert [c.case for c in found] == [x for x in cases for _ in range(len(found) // 2)], found
    assert {c.case for c in found if c.verdict == "fail"} == {"wide"}, found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda o: o * 4.0, "4 times the reference (sqrt(16))"),
        (lambda o: np.roll(o, 1, axis=0), "one token late"),
        (lambda o: np.roll(o, -1, axis=0), "one token early"),
        (lambda o: o + 0.3, "plus 0.3 in every entry"),
    ],
)
def test_assert_close_says_what_a_difference_looks_like(change, words: str) -> None:  # noqa: ANN001
    o, _ = kda(**inputs())
    with pytest.raises(AssertionError) as e:
        assert_close("o", o, change(o))
    assert words in str(e.value) and str(e.value).count("looks like") == 1, e.value


def test_assert_close_names_the_place_and_the_turned_state() -> None:
    o, state = kda(**inputs(V=16))
    other = o.copy()
    other[60:70, 1] += 1
    with pytest.raises(AssertionError) as e:
        assert_close("o", o, other)
    assert "axis 0: only indices 60 to 69 of 100" in str(e.value)
    assert "looks like" not in str(e.value)
    with pytest.raises(AssertionError, match="last two axes exchanged"):
        assert_close("final_state", state, np.swapaxes(state, -1, -2))
    other[3, 0, 2] = np.nan
    with pytest.raises(AssertionError, match=r"1 of 3200 entries are NaN or Inf.*\[3, 0, 2\]"):
        assert_close("o", o, other, warning=True)
    assert_close("o", o, o * 1.001)
    assert "looks like" not in deltaproof.explain_difference("o", o, o)
