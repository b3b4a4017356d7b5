"""Mamba-3, which looks back at the previous token and rotates its keys: numpy kernels, right and
wrong (mamba3.py)."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltaproof import Recurrence, assert_explained, check, judge, run, to_bf16
from deltaproof.program import ran
from mamba3 import Arrays, inputs, kernel

SAID: dict[str, Any] = {"recurrence": "mamba3", "base": "fp32", "gate": "log", "why": 0}
CU = [0, 23, 24, 70]
GRADIENTS = {"dC", "dg", "dB", "dx", "dgamma", "dbeta", "dtheta"}


def failed(found: Any) -> set[str]:
    return {n for n, t in found.tensors.items() if t["verdict"] == "fail"}


def test_packed_sequences_pass_forward_and_backward() -> None:
    x = inputs(70, 2, 16, 24, 5, seqs=3)  # 5 of 8 pairs turn
    got = assert_explained(x, kernel(x, CU), cu_seqlens=CU, **SAID)
    assert set(got) == GRADIENTS | {"o", "final_state", "ds0"}


@pytest.mark.parametrize("wrong", ["rotation", "border", "tap"])
def test_wrong_kernels_fail(wrong: str) -> None:
    x = inputs(70, 2, 16, 24, 8, seqs=3)
    found = judge(x, kernel(x, CU, wrong=wrong), cu_seqlens=CU, **SAID)
    assert failed(found) >= {"o", "dB", "dx", "dbeta", "dtheta"}


@pytest.mark.parametrize("name", sorted(GRADIENTS))
def test_a_gradient_that_is_a_thousandth_too_large_fails_alone(name: str) -> None:
    x = inputs(70, 2, 16, 24, 5, seqs=3)
    y = kernel(x, CU)
    y[name] *= np.float32(1.001)
    assert failed(judge(x, y, cu_seqlens=CU, **SAID)) == {name}


def of_rank(ranks: int) -> Recurrence:
    rows: list[dict[str, str]] = []
    for i in range(1, ranks + 1):
        rows += [
            {"write": f"B{i}", "value": f"x{i}", "strength": "gamma"},
            {"write": f"prev(B{i})*exp(g)", "value": f"prev(x{i})", "strength": "beta"},
        ]
    keys = tuple(f"B{i}" for i in range(1, ranks + 1))
    values = tuple(f"x{i}" for i in range(1, ranks + 1))
    return Recurrence(
        "mimo",
        query="C",
        gate="g",
        keys=keys,
        values=values,
        rows=rows,
        number=("gamma", "beta"),
        per_head=True,
        angle="theta",
        turned=keys,
    )


@pytest.mark.parametrize("ranks", [4])
def test_a_rank_is_a_write_and_a_query_head_of_a_value_head(ranks: int) -> None:
    x, cu = inputs(40, 2, 8, 12, 4, seqs=2, ranks=ranks), [0, 15, 40]
    said = SAID | {"recurrence": of_rank(ranks), "cu_seqlens": cu}
    y = kernel(x, cu, ranks=ranks)
    del y["dg"]  # of raw gates alone, with several query heads
    got = assert_explained(x, y, **said)
    assert {"o", "dC", "dB1", "dB2", "dx1", "dx2", "dgamma", "dbeta", "dtheta"} <= set(got)
    y["dtheta"][:, :, 0] *= np.float32(1.01)
    assert failed(judge(x, y, **said)) == {"dtheta"}
    border = kernel(x, cu, ranks=ranks, wrong="border")
    del border["dg"]
    assert failed(judge(x, border, **said)) >= {"o", "dB1", "dx2", "dtheta"}


def test_a_sequence_goes_on_where_its_last_token_comes_first() -> None:
    """As cases/mamba3.recurrence says: numbers and gate 0, for an angle their sum so far."""
    x, cut = inputs(60, 2, 16, 24, 8), 40
    whole = kernel(x)
    head = kernel({n: a if n in ("initial_state", "dht") else a[:cut] for n, a in x.items()})
    rest: Arrays = {n: a[cut - 1 :].copy() for n, a in x.items() if n not in ("dht", "do")}
    rest["initial_state"] = head["final_state"]
    for name in ("g", "gamma", "beta"):
        rest[name][0] = 0
    rest["theta"][0] = x["theta"][:cut].astype(np.float64).sum(0)
    o = np.concatenate([kernel_o(rest)[:1], whole["o"][cut:]])
    out = {"o": o, "final_state": whole["final_state"]}
    assert judge(rest, out, **SAID).passed
    rest["theta"][0] = 0
    assert judge(rest, out, **SAID).status == 1


def kernel_o(x: Arrays) -> np.ndarray:
    return kernel(x | {"do": np.zeros(x["x"].shape)})["o"]


def test_bf16_rounds_what_turns() -> None:
    x = {n: to_bf16(a) if n in ("C", "B", "x") else a for n, a in inputs(70, 2, 16, 24, 8).items()}
    y = kernel({n: np.asarray(a, np.float32) for n, a in x.items()})
    y = {n: a if n in ("final_state", "dh0") else to_bf16(a) for n, a in y.items()}
    assert_explained(x, y, **(SAID | {"base": "bf16"}))


def subject(
    C: Any, B: Any, x: Any, g: Any, gamma: Any, beta: Any, theta: Any, **more: Any
) -> Arrays:
    shape = (1, B.shape[1], B.shape[2], x.shape[2])
    given = {"C": C, "B": B, "x": x, "g": g, "gamma": gamma, "beta": beta, "theta": theta}
    given |= {"do": np.zeros(x.shape), "initial_state": np.zeros(shape)}
    y = kernel(given | {n: a for n, a in more.items() if a is not None and n in given})
    return {n: y[n] for n in ("o", "final_state")}


def test_cases_run_and_checks_hold_but_for_what_a_halo_breaks() -> None:
    own: dict[str, Any] = {"base": "fp32", "outputs": ("o", "final_state"), "recurrence": MAMBA3}

    def right(
        C: Any, B: Any, x: Any, g: Any, gamma: Any, beta: Any, theta: Any, initial_state: Any = None
    ) -> Arrays:
        return subject(C, B, x, g, gamma, beta, theta, initial_state=initial_state)

    found = run(right, "dplr-weak", layouts=(), **own)
    assert found.passed, found.text
    verdicts = {x.name: x.verdict for x in check(right, **own)}
    assert set(verdicts.values()) <= {"bitwise", "within bounds", "skipped"}, verdicts
    assert verdicts["prefix"] == "skipped"


MAMBA3 = Recurrence(
    "mamba3",
    query="C",
    gate="g",
    keys=("B",),
    values=("x",),
    number=("gamma", "beta"),
    rows=(
        {"write": "B", "value": "x", "strength": "gamma"},
        {"write": "prev(B)*exp(g)", "value": "prev(x)", "strength": "beta"},
    ),
    per_head=True,
    angle="theta",
    turned=("B",),
)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"turned": ("x",)}, r"recurrence:7: 'x' is none of keys"),
        ({"rows": (*MAMBA3.rows, {"write": "B", "read": "B"})}, "'B' turns, so it may stand in"),
        ({"rows": (*MAMBA3.rows, {"write": "B*B", "value": "x"})}, "'B' turns, so only numbers"),
        ({"per_head": False}, "'B' turns, so only numbers and a gate per head"),
        ({"rows": ({"write": "prev(D)", "value": "x"},)}, r"has 'prev\(D\)', which is no factor"),
    ],
)
def test_what_cannot_turn_or_look_back_is_named(more: dict[str, Any], why: str) -> None:
    x = inputs(10, 1, 4, 4, 2)
    own = Recurrence(**(vars(MAMBA3) | more))
    out = {"o": np.zeros((10, 1, 4), np.float32)}
    with pytest.raises(ValueError, match=why):
        assert_explained(x, out, **(SAID | {"recurrence": own}))


SESSION = """reason = calls that go on
source = cases/mamba3.recurrence
op = dplr
T = 120
cu_seqlens = 0,50,50,72,120
H = 2
K = 16
V = 24
g_scale = 0.05
s0_scale = 0.5
session = 20,1,7,4x1,9
base = fp32
"""
HALO = ("previous_B", "previous_x", "previous_theta")


def goes_on(x: Arrays, wrong: str) -> Arrays:
    """Each sequence begins with the token before it, whose numbers and gate are 0."""
    cu, n = x["cu_seqlens"], len(x["cu_seqlens"]) - 1
    before = {h: np.zeros_like(x[h]) if h == wrong else x[h] for h in HALO}
    made: dict[str, list[np.ndarray]] = {"o": [], "final_state": []}
    for i in range(n):
        own = {t: x[t][cu[i] : cu[i + 1]] for t in ("C", "B", "x", "g", "gamma", "beta", "theta")}
        first = {
            t: before.get(f"previous_{t}", np.zeros((n, *a.shape[1:])))[i] for t, a in own.items()
        }
        y = subject(**{t: np.concatenate([first[t][None], a]) for t, a in own.items()},
                    initial_state=x["initial_state"][i : i + 1])  # fmt: skip
        made["o"].append(y["o"][1:])
        made["final_state"].append(y["final_state"])
    return {t: np.concatenate(a) for t, a in made.items()}


@pytest.mark.parametrize("wrong", ["", *HALO])
def test_a_session_gives_calls_the_token_before_them(wrong: str, tmp_path: Path) -> None:
    case = tmp_path / "goes-on.case"
    case.write_text(SESSION)

    def kernel_of_calls(
        C: Any, B: Any, x: Any, g: Any, gamma: Any, beta: Any, theta: Any, cu_seqlens: Any,
        initial_state: Any, previous_B: Any, previous_x: Any, previous_theta: Any,
    ) -> Arrays:  # fmt: skip
        return goes_on(dict(locals()), wrong)

    own: dict[str, Any] = {"base": "fp32", "outputs": ("o", "final_state"), "recurrence": MAMBA3}
    found = run(kernel_of_calls, str(case), layouts=(), **own)
    assert found.status == (1 if wrong else 0), found.text
    assert not wrong or "times its bound" in found.text or "expected" in found.text, found.text


def test_the_serving_set_rolls_nothing_back_and_skips_by_own_names() -> None:
    def kernel_of_calls(
        C: Any, B: Any, x: Any, g: Any, gamma: Any, beta: Any, theta: Any, previous_B: Any,
        previous_x: Any, previous_theta: Any, initial_state: Any, cu_seqlens: Any = None,
    ) -> Arrays:  # fmt: skip
        cu_seqlens = [0, len(C)] if cu_seqlens is None else cu_seqlens
        return goes_on(dict(locals()), "")

    own: dict[str, Any] = {"base": "fp32", "outputs": ("o", "final_state"), "recurrence": MAMBA3}
    found = run(kernel_of_calls, "serving", layouts=(), **own)
    said = found.verdicts()
    assert found.passed and list(said.values()).count("pass") == 7, found.text
    lone = next(x for n, x in said.items() if n.startswith("dplr-batch-decode"))
    assert "the function requires `previous_B`" in lone

    def lacks(
        C: Any, B: Any, x: Any, g: Any, gamma: Any, beta: Any, theta: Any, initial_state: Any
    ) -> Arrays:
        return subject(C, B, x, g, gamma, beta, theta, initial_state=initial_state)

    found = run(lacks, "serving", layouts=(), **own)
    assert found.status == 2 and "takes no `previous_B`" in found.text
    assert "widths=" not in found.text


@pytest.mark.parametrize("gate", ["log", "softplus"])
def test_the_token_before_a_call_does_not_decay(gate: str, tmp_path: Path) -> None:
    (tmp_path / "goes-on.case").write_text(f"{SESSION}gate = {gate}\n")
    how = ["--recurrence", "mamba3", "--backend", "sim", "--cache", "none"]
    done = ran("run", "goes-on", "--cases", str(tmp_path), *how)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("fault", ["", "decay-bf16"])
def test_sums_of_angles_that_tie_are_no_fault(fault: str) -> None:
    """fp32 holds the sums of these bf16 angles, but for one half of a unit in rank 4."""
    how = ["--recurrence", "mamba3", "--ranks", "4", "--own", "zigzag", "--base", "fp32"]
    more = ["--chain", "fp32", "--backend", "sim", *(["--fault", fault] if fault else [])]
    done = ran("run", "dplr-weak", *how, *more)
    assert done.returncode == (1 if fault else 0), done.stdout + done.stderr
