"""Rows of a user's own that cancel: a kernel that fuses their products leaves a rounding."""

from typing import Any

import numpy as np
import pytest

from deltaproof import Recurrence, judge

T, H, K, V = 2, 2, 16, 8
F4 = np.float32
Arrays = dict[str, np.ndarray]
PAIR = ({"write": "a", "value": "v*v"}, {"write": "-a", "value": "v*v"})
THIRD = {"write": "k", "value": "v"}
SAID: dict[str, Any] = {"base": "fp32", "gate": "log"}


def rows_of(third: bool) -> Recurrence:
    rows, keys = (*PAIR, THIRD) if third else PAIR, ("a", "k") if third else ("a",)
    return Recurrence("cancels", query="q", gate="g", keys=keys, values=("v",), rows=rows)


def inputs(third: float) -> Arrays:
    rng = np.random.default_rng(7)
    x = {n: (rng.standard_normal((T, H, K)) / 4).astype(F4) for n in ("q", "a", "k")}
    x["k"] *= F4(third)
    x["v"] = rng.standard_normal((T, H, V)).astype(F4)
    x["g"] = (-0.1 * rng.random((T, H, K))).astype(F4)
    return x if third else {n: y for n, y in x.items() if n != "k"}


def fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    return (x.astype(np.float64) * y + z).astype(F4)


def fused(x: Arrays) -> Arrays:
    S, o = np.zeros((H, K, V), F4), np.zeros((T, H, V), F4)
    for t in range(T):
        S = S * np.exp(x["g"][t], dtype=np.float64).astype(F4)[..., None]
        square = (x["v"][t] * x["v"][t])[:, None]
        a = np.broadcast_to(x["a"][t][..., None], S.shape)
        S = fma(-a, square, fma(a, square, S))
        if "k" in x:
            S = fma(np.broadcast_to(x["k"][t][..., None], S.shape), x["v"][t][:, None], S)
        o[t] = F4(K**-0.5) * np.einsum("hk,hkv->hv", x["q"][t], S)
    return {"o": o, "final_state": S[None]}


@pytest.mark.parametrize("third", [0, 1e-2, 1])
def test_a_fused_kernel_is_right(third: float) -> None:
    y = fused(x := inputs(third))
    assert third or np.abs(y["o"]).max() > 0
    found = judge(x, y, recurrence=rows_of(third > 0), **SAID)
    assert found.status == 0, found.text


@pytest.mark.parametrize("third", [0, 1e-2, 1])
def test_a_pair_that_does_not_cancel_is_wrong(third: float) -> None:
    x = inputs(third)
    y = fused(x)
    y["o"][1, 0] += F4(1e-4) * x["v"][1, 0] ** 2
    found = judge(x, y, recurrence=rows_of(third > 0), **SAID)
    assert found.status == 1 and found.tensors["o"]["verdict"] == "fail", found.text


@pytest.mark.parametrize("fault", ["zeros", "garbage", "heads", "row", "state"])
def test_what_is_wrong_beside_a_pair_fails(fault: str) -> None:
    y = fused(x := inputs(1))
    noise = np.random.default_rng(1).standard_normal(y["o"].shape).astype(F4)
    y["o"] = {
        "zeros": 0 * y["o"],
        "garbage": y["o"] + F4(1e-2) * noise,
        "heads": y["o"][:, ::-1],
        "row": y["o"] * np.arange(T, dtype=F4)[:, None, None],
        "state": y["o"],
    }[fault]
    y["final_state"] = y["final_state"] * F4(1.001 if fault == "state" else 1)
    found = judge(x, y, recurrence=rows_of(True), **SAID)
    bad = "final_state" if fault == "state" else "o"
    assert found.status == 1 and found.tensors[bad]["verdict"] == "fail", found.text
