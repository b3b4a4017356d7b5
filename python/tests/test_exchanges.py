"""The hooks of `deltaproof.exchanges` keep the tensors of ranks, and `judge` judges them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deltaproof.exchanges import (
    _factor,
    exchanges,
    halo_faults,
    halos,
    megatron_exchanges,
    of_cudnn,
    stacked,
)
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


Steps = dict[str, np.ndarray]
NAMES = ("M", "H", "S_in", "dM", "dH", "dS_out")


def of_ranks(x: dict[str, np.ndarray]) -> Steps:
    """All that ranks exchange, forward and backward, in fp64; GDN-2 where keys have erase gates."""
    erase = x.get("erase", np.repeat(x.get("beta", np.ones((T, 1)))[..., None], K, -1))
    write = x.get("write", np.repeat(x.get("beta", np.ones((T, 1)))[..., None], V, -1))
    k, g, q = (x[n][:, 0].astype(float) for n in ("k", "g", "q"))
    erase, write = erase[:, 0].astype(float), write[:, 0].astype(float)
    v, do = (x[n][:, 0].astype(float) for n in ("v", "do"))
    out = {n: np.zeros((RANKS, 1, K, K if n[-1] == "M" else V)) for n in NAMES}
    step = [(np.eye(K) - np.outer(k[t], erase[t] * k[t])) * np.exp(g[t]) for t in range(T)]
    S, dS = np.zeros((K, V)), np.zeros((K, V))
    tokens = [range(r * T // RANKS, (r + 1) * T // RANKS) for r in range(RANKS)]
    for r in range(RANKS):
        M, H, out["S_in"][r, 0] = np.eye(K), np.zeros((K, V)), S
        for t in tokens[r]:
            M, H = step[t] @ M, step[t] @ H + np.outer(k[t], write[t] * v[t])
        out["M"][r, 0], out["H"][r, 0] = M, H
        S = M @ S + H
    for r in reversed(range(RANKS)):
        dH, out["dS_out"][r, 0] = np.zeros((K, V)), dS
        for t in reversed(tokens[r]):
            dH = step[t].T @ (dH + K**-0.5 * np.outer(q[t], do[t]))
        out["dM"][r, 0], out["dH"][r, 0] = out["M"][r, 0].T, dH
        dS = out["dM"][r, 0] @ dS + dH
    return {n: a.astype(np.float32) for n, a in out.items()}


def gated(x: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same as GDN-2."""
    rng = np.random.default_rng(7)
    x = {n: a for n, a in x.items() if n != "beta"}
    sizes = (("erase", K), ("write", V))
    return x | {n: rng.uniform(0.1, 0.9, (T, 1, d)).astype(np.float32) for n, d in sizes}


def with_gradient(x: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return x | {"do": np.random.default_rng(9).standard_normal((T, 1, V)).astype(np.float32)}


@pytest.mark.parametrize("of", [dict, gated])
def test_what_ranks_hand_on_is_judged_both_ways_of_gdn2_too(of: Any) -> None:
    x = with_gradient(of(inputs()))
    said = {n: s for n, s in SAID.items() if n != "beta" or "beta" in x}
    made = of_ranks(x)
    found = judge(x, made, base="fp32", **said)
    assert found.passed and set(NAMES) == set(found.tensors), found.text
    wrong = judge(x, made | {"dM": made["M"]}, base="fp32", **said)
    assert [n for n, t in wrong.tensors.items() if t["verdict"] == "fail"] == ["dM"], wrong.text


def test_summaries_of_cudnn_are_turned() -> None:
    """cuDNN's states are [V,K]: X = X_in M' + X_H; its backward's transition is M."""
    x = with_gradient(inputs())
    made = of_ranks(x)
    parts = []
    for r in range(RANKS):
        state, dstate = (np.swapaxes(made[n][r], -1, -2) for n in ("H", "dH"))
        stored = np.swapaxes(made["M"][r], -1, -2)
        other = np.ones_like
        forward = np.stack([other(state), state]), np.stack([other(stored), stored])
        backward = np.stack([dstate, other(state)]), np.stack([made["M"][r], other(stored)])
        parts.append(of_cudnn(forward, backward))
    found = {n: np.stack([part[n] for part in parts]) for n in parts[0]}
    verdict = judge(x, found, base="fp32", **SAID)
    assert verdict.passed and set(verdict.tensors) == {"M", "H", "dM", "dH"}, verdict.text
    turned = found | {"M": found["M"].swapaxes(-1, -2)}
    assert judge(x, turned, base="fp32", **SAID).tensors["M"]["verdict"] == "fail"
    with pytest.raises(ValueError, match="output_transition=True"):
        of_cudnn(backward=np.zeros((1, 1, V, K)))


class Array(np.ndarray):
    """A tensor, as far as the hooks ask."""

    def dim(self) -> int:
        return self.ndim

    def clone(self) -> Array:
        return self.copy().view(Array)


def module_of(monkeypatch: pytest.MonkeyPatch, name: str, source: str, **own: Any) -> ModuleType:
    """A module of a source, whose functions find `own`; it can be imported in the test."""
    m = ModuleType(name)
    m.__dict__.update(own)
    exec(source, m.__dict__)
    monkeypatch.setitem(sys.modules, name, m)
    return m


def fake_fla(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module that exchanges as fla.ops.cp.chunk_delta_h does."""

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
    own = {"chunk_cp_fwd_h": None, "all_gather_into_tensor": all_gather_into_tensor}
    return module_of(monkeypatch, "of_a_test", source, chunk_cp_merge=chunk_cp_merge, **own)


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


@pytest.mark.parametrize("gates", [0, 1, K])
def test_factors_of_a_chain_are_the_products_of_its_tokens(gates: int) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    rng = np.random.default_rng(gates)
    L, eye = 5, np.eye(K)
    k = rng.standard_normal((L, K)) / np.sqrt(K)
    beta = rng.uniform(0.2, 1, (L, 1))
    g = -rng.uniform(0, 0.5, (L, max(gates, 1))) * (gates > 0)
    G = np.cumsum(g, axis=0)
    want, w = eye, np.zeros((L, K))
    for t in range(L):  # w = beta (k exp2(G) - k (what earlier tokens wrote))
        want = (eye - beta[t] * np.outer(k[t], k[t])) @ (np.exp2(g[t])[:, None] * want)
        seen = sum((k[t] * np.exp2(G[t] - G[j]) @ k[j] * w[j] for j in range(t)), np.zeros(K))
        w[t] = beta[t] * (k[t] * np.exp2(G[t]) - seen)
    kg = k * np.exp2(G[-1] - G) if gates > 1 else k
    given = [kg, w, G[:, 0] if gates == 1 else None, G if gates > 1 else None]
    made = _factor(*(x if x is None else torch.from_numpy(x) for x in given))
    assert np.abs(made.numpy() - want).max() < 1e-14


def test_two_chains_of_a_zigzag_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    m = fake_fla(monkeypatch)
    with exchanges(m.__name__), pytest.raises(ValueError, match=r"summary of shape \(2, 1, 16, 24"):
        m.fwd_pre(np.zeros((2, 1, K, V + K)).view(Array), None)


def test_a_rank_without_a_tensor_has_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = SimpleNamespace(stack=np.stack, zeros_like=np.zeros_like)
    monkeypatch.setitem(sys.modules, "torch", torch)
    got = stacked([{"M": np.ones(2)}, {"M": np.ones(2), "S_in": np.ones(3)}])
    assert got["S_in"].tolist() == [[0, 0, 0], [1, 1, 1]] and got["M"].sum() == 4


def fake_megatron(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module that exchanges as Megatron's chunkwise context parallelism does."""
    source = """
def _all_gather_forward_summary(summary, group):
    return summary
_all_gather_backward_summary = _all_gather_forward_summary
def _build_initial_state(inputs, summaries):
    return summaries
_build_final_state_grad = _build_initial_state
def run(forward, backward, states):
    _all_gather_forward_summary(forward, None)
    _build_initial_state(None, states)
    _all_gather_backward_summary(backward, None)
    _build_final_state_grad(None, states)
"""
    return module_of(monkeypatch, "megatron_of_a_test", source)


def test_summaries_of_megatron_packed_and_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    m = fake_megatron(monkeypatch)
    before = m._all_gather_forward_summary, m._build_initial_state
    hm = np.arange(2.0 * K * (V + K)).reshape(1, 2, K, V + K).view(Array)
    M, H = hm[..., V:], hm[..., :V]
    packed = SimpleNamespace(packed=hm), SimpleNamespace(packed=hm[0] + 1)
    apart = (
        SimpleNamespace(transition=M, state_update=H),
        SimpleNamespace(transition=M[0] + 1, local_state_grad=H[0] + 1),
    )
    for forward, backward in (packed, apart):
        with megatron_exchanges(m.__name__, m.__name__) as kept:
            m.run(forward, backward, np.stack([H[0], 2 * H[0]]).view(Array))
        assert kept.calls == 2 and set(kept.rank) == set(NAMES)
        assert np.array_equal(kept.rank["M"], M[0]) and np.array_equal(kept.rank["H"], H[0])
        assert np.array_equal(kept.rank["dM"], M[0] + 1)
        assert np.array_equal(kept.rank["dH"], H[0] + 1)
        assert np.array_equal(kept.rank["S_in"], H[0])
        assert np.array_equal(kept.rank["dS_out"], 2 * H[0])
    assert (m._all_gather_forward_summary, m._build_initial_state) == before
    two = SimpleNamespace(packed=np.zeros((2, 1, K, V + K)).view(Array))
    with (
        megatron_exchanges(m.__name__, "") as kept,
        pytest.raises(ValueError, match="2 sequences side by side"),
    ):
        m.run(two, two, None)


def test_halos_name_the_rank_that_got_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks, whose neighbours' rows come as they were sent; then one that got its own."""
    m = ModuleType("conv_of_a_test")
    sent = [np.full((3, 4), 1.0 + r).view(Array) for r in range(RANKS)]
    monkeypatch.setitem(sys.modules, m.__name__, m)

    def got(r: int) -> Array:
        return sent[r] if 0 <= r < RANKS else np.zeros((3, 4)).view(Array)

    def parts_of(forward: Any, backward: Any) -> list[Any]:
        parts = []
        for r in range(RANKS):
            m.__dict__["conv_cp_send_recv_fwd"] = lambda x, group, r=r: got(forward(r))
            m.__dict__["conv_cp_send_recv_bwd"] = lambda x, group, r=r: got(backward(r))
            with halos(m.__name__) as kept:
                m.conv_cp_send_recv_fwd(sent[r], None)
                m.conv_cp_send_recv_bwd(sent[r], None)
            parts.append((kept.forward, kept.backward))
        return parts

    assert halo_faults(parts_of(lambda r: r - 1, lambda r: r + 1)) == []
    assert halo_faults(parts_of(lambda r: r, lambda r: r + 1)) == [
        "forward call 0: rank 0 did not get zeros",
        "forward call 0: rank 1 did not get what rank 0 sent",
        "forward call 0: rank 2 did not get what rank 1 sent",
    ]


PROGRAM = Path(__file__).with_name("halo_program.py")


def test_halos_of_fla_on_ranks_over_gloo() -> None:
    """FLA's own exchange of its convolution, three ranks on the CPU."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("fla", reason="FLA is not installed")
    if not torch.distributed.is_gloo_available():
        pytest.skip("this PyTorch has no gloo")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "3", str(PROGRAM)], env=env, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("all right") == RANKS


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
