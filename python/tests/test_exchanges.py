"""The hooks of `deltaproof.exchanges` keep the tensors of ranks, and `judge` judges them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deltaproof.exchanges import exchanges, stacked
from deltaproof.judging import judge
from deltaproof.tensors import load

T, K, V, RANKS = 96, 16, 8, 3
SAID: dict[str, Any] = {
    "gate": "log",
    "beta": "plain",
    "l2norm": False,
    "ranks": RANKS,
    "claim": "fp32",
}


def inputs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    x = {n: rng.standard_normal((T, 1, d)).astype(np.float32) for n, d in (("q", K), ("v", V))}
    k = rng.standard_normal((T, 1, K))
    x["k"] = (k / np.linalg.norm(k, axis=-1, keepdims=True)).astype(np.float32)
    x["g"] = -rng.uniform(0, 0.02, (T, 1, K)).astype(np.float32)
    x["beta"] = rng.uniform(0.3, 0.9, (T, 1)).astype(np.float32)
    return x


def handed_on(x: dict[str, np.ndarray], chain: Any) -> dict[str, np.ndarray]:
    """M, H and S_in of each rank in fp64, M stored by `chain` after every 16 tokens."""
    out = {n: np.zeros((RANKS, 1, K, d)) for n, d in (("M", K), ("H", V), ("S_in", V))}
    S = np.zeros((K, V))
    for r in range(RANKS):
        M, H = np.eye(K), np.zeros((K, V))
        for t in range(r * T // RANKS, (r + 1) * T // RANKS):
            k, beta = x["k"][t, 0].astype(float)[:, None], float(x["beta"][t, 0])
            step = (np.eye(K) - beta * k @ k.T) * np.exp(x["g"][t, 0].astype(float))
            M, H = step @ M, step @ H + beta * k @ x["v"][t].astype(float)
            M = chain(M) if t % 16 == 15 else M
        out["S_in"][r, 0] = S
        out["M"][r, 0], out["H"][r, 0] = M, H
        S = M @ S + H
    return {n: a.astype(np.float32) for n, a in out.items()}


def test_a_chain_of_fp32_passes_and_one_of_bf16_fails_by_its_name() -> None:
    x = inputs()
    found = judge(x, handed_on(x, lambda M: M), base="fp32", **SAID)
    assert found.passed and {"M", "H", "S_in"} == set(found.tensors), found.text

    def short(M: np.ndarray) -> np.ndarray:
        return (M.astype(np.float32).view(np.uint32) + 0x8000 & 0xFFFF0000).view(np.float32)

    found = judge(x, handed_on(x, short), base="fp32", **SAID)
    assert found.tensors["M"]["verdict"] == "fail", found.text
    assert found.tensors["H"]["verdict"] == "pass", found.text


class Array(np.ndarray):
    """A tensor, as far as the hooks ask."""

    def dim(self) -> int:
        return self.ndim

    def clone(self) -> Array:
        return self.copy().view(Array)


def fake_fla(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module that exchanges as fla.ops.cp.chunk_delta_h does."""
    m = ModuleType("of_a_test")

    def all_gather_into_tensor(inp: Array, group: Any = None) -> tuple[Array, None]:
        return np.stack([inp, inp]).view(Array), None

    def chunk_cp_merge(h: Array, ag_hm: Array) -> None:
        h += ag_hm[0, ..., :V]

    source = """
def fwd_pre(hm, h):
    ag_hm, _ = all_gather_into_tensor(hm, group=None)
    chunk_cp_merge(h=h, ag_hm=ag_hm)
def bwd_pre(hm, h):
    fwd = all_gather_into_tensor(hm)
    chunk_cp_merge(h, fwd[0])
"""
    m.__dict__.update(
        chunk_cp_fwd_h=None,
        all_gather_into_tensor=all_gather_into_tensor,
        chunk_cp_merge=chunk_cp_merge,
    )
    exec(source, m.__dict__)
    monkeypatch.setitem(sys.modules, m.__name__, m)
    return m


def test_hooks_keep_what_is_handed_on_and_go_away(monkeypatch: pytest.MonkeyPatch) -> None:
    m = fake_fla(monkeypatch)
    before = m.all_gather_into_tensor, m.chunk_cp_merge
    hm = np.arange(2.0 * K * (V + K)).reshape(2, K, V + K).view(Array)
    with pytest.raises(ZeroDivisionError), exchanges(m.__name__) as kept:
        m.fwd_pre(hm, np.zeros((2, K, V)).view(Array))
        hm += 1
        m.bwd_pre(hm, np.zeros((2, K, V)).view(Array))
        hm += 1
        _ = 1 / 0
    assert (m.all_gather_into_tensor, m.chunk_cp_merge) == before
    assert kept.calls == 2 and set(kept.rank) == {"M", "H", "S_in", "dM", "dH", "dS_out"}
    assert np.array_equal(kept.rank["H"], hm[..., :V] - 2)
    assert np.array_equal(kept.rank["M"], hm[..., V:] - 2)
    assert np.array_equal(kept.rank["S_in"], kept.rank["H"])
    assert np.array_equal(kept.rank["dM"], hm[..., V:] - 1)
    assert kept.as_received()["dM"].shape == (2, *hm[..., V:].shape)


def test_two_chains_of_a_zigzag_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    m = fake_fla(monkeypatch)
    with exchanges(m.__name__), pytest.raises(ValueError, match=r"summary of shape \(2, 1, 16, 24"):
        m.fwd_pre(np.zeros((2, 1, K, V + K)).view(Array), None)


def test_a_rank_without_a_tensor_has_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = SimpleNamespace(stack=np.stack, zeros_like=np.zeros_like)
    monkeypatch.setitem(sys.modules, "torch", torch)
    got = stacked([{"M": np.ones(2)}, {"M": np.ones(2), "S_in": np.ones(3)}])
    assert got["S_in"].tolist() == [[0, 0, 0], [1, 1, 1]] and got["M"].sum() == 4


DATA = Path(__file__).parents[2] / "cases/data/kda-lm-layer3-long"


@pytest.mark.skipif(not Path(f"{DATA}.safetensors").exists(), reason="needs a source tree")
def test_the_chain_of_fla_on_a_trained_head_is_what_it_claims() -> None:
    """reports/chain.md: FLA 0.6, two ranks, the first 2,048 tokens, an H200."""
    whole = load(f"{DATA}.safetensors")
    x = {n: t if n in ("A_log", "dt_bias") else t[:2048, None] for n, t in whole.items()}
    made = load(f"{DATA}.fla-cp2-chain.safetensors")
    said: dict[str, Any] = {"gate": "softplus", "beta": "sigmoid", "l2norm": True, "base": "bf16"}
    said |= {"ranks": 2, "claim": "tf32x3", "design": "exp=fast,inputs=stored,scores=tf32"}
    found = judge(x, made, **said)
    assert found.passed and set(found.tensors) == set(made), found.text
    assert abs(found.tensors["M"]["rel_fro"] / 3.599e-3 - 1) < 1e-3
    found = judge(x, made | {"M": made["M"] * np.float32(1.02), "dM": made["M"]}, **said)
    assert [n for n, t in found.tensors.items() if t["verdict"] == "fail"] == ["M", "dM"]
