"""The KDA task of a public benchmark of kernels (kernelbench.com, hard/02_kda_cutlass at c7d9221)
in our own words. It has four laws of inputs, a criterion, and kernels that it passes or that were
submitted to it. A third of its log decays are above 0."""

from collections.abc import Callable
from typing import Any

import numpy as np

from deltaproof import to_bf16
from kernels import kda

T, H, K, V, CHUNK = 256, 1, 128, 64, 64
Arrays = dict[str, np.ndarray]
ATOL = RTOL = 0.05  # of its task in bf16


def _normal(rng: np.random.Generator, scale: float, T: int = T, H: int = H, V: int = V) -> Arrays:
    x = {n: rng.standard_normal((T, H, d)) * 0.1 for n, d in (("q", K), ("k", K), ("v", V))}
    out = {n: to_bf16(to_bf16(y).astype(np.float32) * scale) for n, y in x.items()}
    g = rng.standard_normal((T, H, K)) * 0.1 - 0.05
    out["g"] = g.astype(np.float32)
    out["beta"] = to_bf16(1 / (1 + np.exp(-rng.standard_normal((T, H)))))
    return out


def nominal(rng: np.random.Generator, **sizes: int) -> Arrays:
    return _normal(rng, 1, **sizes)


def small(rng: np.random.Generator, **sizes: int) -> Arrays:
    return _normal(rng, 0.01, **sizes)


def large(rng: np.random.Generator, **sizes: int) -> Arrays:
    return _normal(rng, 2, **sizes)


def long_memory(rng: np.random.Generator, T: int = 512, H: int = 2, V: int = V) -> Arrays:
    """Values are written in the first chunks, at most eight, and read behind them alone."""
    x = {n: y.astype(np.float32) for n, y in _normal(rng, 1, T, H, V).items()}
    split = min(8 * CHUNK, T - CHUNK)
    signs = (-1.0) ** np.arange(K) * (-1.0) ** (np.arange(T) // CHUNK)[:, None, None]
    x["k"] = signs * 0.04 * np.ones((T, H, K))
    x["k"][0] *= 0.05
    x["q"][:split], x["v"][split:] = 0, 0
    x["q"], x["v"] = x["q"] * 8, x["v"] * 8
    out = {n: to_bf16(y) for n, y in x.items()}
    return out | {
        "g": np.full((T, H, K), -0.003, np.float32),
        "beta": to_bf16(np.full((T, H), 0.8)),
    }


LAWS = (nominal, small, large, long_memory)


def _chunked(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, beta: np.ndarray,
    keeps: float = 1, inverse: Callable[[Any], Any] = lambda A: np.linalg.inv(np.eye(len(A)) + A),
) -> np.ndarray:  # fmt: skip
    """KDA by chunks in doubles; keeps: what is carried of a state; inverse: of I + A."""
    q, k, v, g = (x.astype(np.float64) for x in (q, k, v, g))
    o = np.zeros(v.shape)
    for h in range(q.shape[1]):
        S = np.zeros((q.shape[-1], v.shape[-1]))
        for t in range(0, len(q), CHUNK):
            c, G = slice(t, t + CHUNK), np.cumsum(g[t : t + CHUNK, h], 0)
            up, down, b = np.exp(G), np.exp(-G), beta[c, h, None].astype(np.float64)
            A = np.tril(b * (k[c, h] * up) @ (k[c, h] * down).T, -1)
            u = inverse(A) @ (b * (v[c, h] - (k[c, h] * up) @ S))
            P = np.tril((q[c, h] * up) @ (k[c, h] * down).T)
            o[c, h] = ((q[c, h] * up) @ S + P @ u) * q.shape[-1] ** -0.5
            S = keeps * up[-1][:, None] * (S + (k[c, h] * down).T @ u)
    return o


def right(q: Any, k: Any, v: Any, g: Any, beta: Any) -> np.ndarray:
    return _chunked(q, k, v, g, beta)


def right_by_tokens(q: Any, k: Any, v: Any, g: Any, beta: Any) -> np.ndarray:
    return to_bf16(kda(q, k, v, g, beta)[0]).astype(np.float32)


def zeros(q: Any, k: Any, v: Any, g: Any, beta: Any) -> np.ndarray:
    return np.zeros_like(v)


def state_dropped(q: Any, k: Any, v: Any, g: Any, beta: Any) -> np.ndarray:
    return _chunked(q, k, v, g, beta, keeps=0)


def state_fades(q: Any, k: Any, v: Any, g: Any, beta: Any) -> np.ndarray:
    return _chunked(q, k, v, g, beta, keeps=0.9)


def inverse_cut(q: Any, k: Any, v: Any, g: Any, beta: Any) -> np.ndarray:
    return _chunked(q, k, v, g, beta, inverse=lambda A: np.eye(len(A)) - A)


def no_decay(q: Any, k: Any, v: Any, g: Any, beta: Any) -> np.ndarray:
    return _chunked(q, k, v, 0 * g, beta)


def no_delta(q: Any, k: Any, v: Any, g: Any, beta: Any) -> np.ndarray:
    """The value is written, nothing is erased."""
    o, S = np.zeros(v.shape), np.zeros((q.shape[1], q.shape[-1], v.shape[-1]))
    for t in range(len(q)):
        S = S * np.exp(g[t])[..., None] + k[t][..., None] * (beta[t][:, None] * v[t])[:, None]
        o[t] = np.einsum("hk,hkv->hv", q[t], S) * q.shape[-1] ** -0.5
    return o


def no_beta(q: Any, k: Any, v: Any, g: Any, beta: Any) -> np.ndarray:
    return _chunked(q, k, v, g, np.ones_like(beta))


RIGHT = (right, right_by_tokens)
WRONG = (zeros, state_dropped, state_fades, inverse_cut, no_decay, no_delta, no_beta)
