"""KDA in numpy, one token at a time (ref/math.md b): right, and wrong on purpose."""

from typing import Any

import numpy as np


def kda(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    beta: np.ndarray,
    initial_state: np.ndarray | None = None,
    cu_seqlens: np.ndarray | None = None,
    scale: float | None = None,
    dtype: Any = np.float32,
) -> tuple[np.ndarray, np.ndarray]:
    """q k [T,H,K], v [T,HV,V], g [T,HV,K], beta [T,HV] -> o [T,HV,V], final_state [N,HV,K,V]."""
    T, H, K = q.shape
    HV = v.shape[1]
    scale = K**-0.5 if scale is None else scale
    q, k = (np.repeat(x, HV // H, axis=1).astype(dtype) for x in (q, k))
    v, g, beta = (x.astype(dtype) for x in (v, g, beta))
    cu = [0, T] if cu_seqlens is None else [int(x) for x in cu_seqlens]
    o, states = np.zeros_like(v), []
    for i in range(len(cu) - 1):
        S = np.zeros((HV, K, v.shape[-1]), dtype)
        if initial_state is not None:
            S += initial_state[i]
        for t in range(cu[i], cu[i + 1]):
            S *= np.exp(g[t])[..., None]
            e = beta[t][:, None] * (v[t] - np.einsum("hk,hkv->hv", k[t], S))
            S += k[t][..., None] * e[:, None, :]
            o[t] = np.einsum("hk,hkv->hv", q[t], S) * dtype(scale)
        states.append(S)
    return o, np.stack(states)


def gla(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    initial_state: np.ndarray | None = None,
    cu_seqlens: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """g [T,HV,K] or, SSD, [T,HV]; nothing is erased: the sum over tokens, as it stands."""
    T, H, K = q.shape
    HV = v.shape[1]
    q, k = (np.repeat(x, HV // H, axis=1) for x in (q, k))
    decay = np.exp(g if g.ndim == 3 else g[..., None]) * np.ones(K, np.float32)
    cu = [0, T] if cu_seqlens is None else [int(x) for x in cu_seqlens]
    o, states = np.zeros_like(v), np.zeros((len(cu) - 1, HV, K, v.shape[-1]), np.float32)
    states += 0 if initial_state is None else initial_state
    for i, S in enumerate(states):
        for t in range(cu[i], cu[i + 1]):
            S *= decay[t][..., None]
            S += k[t][..., None] * v[t][:, None, :]
            o[t] = np.einsum("hk,hkv->hv", q[t], S) * np.float32(K**-0.5)
    return o, states


def deltaproduct(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    beta: np.ndarray,
    initial_state: np.ndarray | None = None,
    turns: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """Gated DeltaProduct: k [T,H,R,K], v [T,HV,R,V], g [T,HV], beta [T,HV,R]. Without the second
    form all keys of a token read the same state."""
    T, H, R, K = k.shape
    HV = v.shape[1]
    q, k = (np.repeat(x, HV // H, axis=1) for x in (q, k))
    o = np.zeros((T, HV, v.shape[-1]), np.float32)
    S = np.zeros((HV, K, v.shape[-1]), np.float32)
    S += 0 if initial_state is None else initial_state[0]
    for t in range(T):
        S = S * np.exp(g[t])[:, None, None]
        read = S
        for j in range(R):
            e = v[t, :, j] - np.einsum("hk,hkv->hv", k[t, :, j], S if turns else read)
            S = S + k[t, :, j, :, None] * (beta[t, :, j, None] * e)[:, None, :]
        o[t] = np.einsum("hk,hkv->hv", q[t], S) * np.float32(K**-0.5)
    return o, S[None]


def dplr(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    lr_a: np.ndarray,
    lr_b: np.ndarray,
    initial_state: np.ndarray | None = None,
    decayed: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """q k g lr_a lr_b [T,H,K], v [T,H,V]; lr_a reads the state before its decay, or after."""
    T, H, K = q.shape
    o, S = np.zeros_like(v), np.zeros((H, K, v.shape[-1]), np.float32)
    S += 0 if initial_state is None else initial_state[0]
    for t in range(T):
        after = S * np.exp(g[t])[..., None]
        p = np.einsum("hk,hkv->hv", lr_a[t], after if decayed else S)
        S = after + lr_b[t][..., None] * p[:, None, :] + k[t][..., None] * v[t][:, None, :]
        o[t] = np.einsum("hk,hkv->hv", q[t], S) * np.float32(K**-0.5)
    return o, S[None]


def in_slots(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    beta: np.ndarray,
    pool: np.ndarray,
    read_slot: np.ndarray,
    write_slot: np.ndarray,
    cu_seqlens: np.ndarray,
    in_place: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """kda with its states in slots; in_place: written where they were read."""
    o, final = kda(q, k, v, g, beta, pool[read_slot], cu_seqlens)
    goes = read_slot >= 0
    out = pool.copy()
    out[(read_slot if in_place else write_slot)[goes]] = final[goes]
    return o, out


def wrong_at_70(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, beta: np.ndarray
) -> np.ndarray:
    """o of token 70, head 1 is 1% too large."""
    o, _ = kda(q, k, v, g, beta)
    if o.shape[0] > 70:
        o[70, -1] *= 1.01
    return o


def by_chunks(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    beta: np.ndarray,
    chunk: int = 64,
    keeps: float = 1 + 2**-23,
) -> np.ndarray:
    """A kernel that passes the state from chunk to chunk. A chunk shorter than its own length
    multiplies the state by `keeps`."""
    state, o = None, []
    for t in range(0, len(q), chunk):
        one = slice(t, t + chunk)
        x, state = kda(q[one], k[one], v[one], g[one], beta[one], state, scale=q.shape[-1] ** -0.5)
        state = state * np.float32(keeps if chunk < 64 else 1)
        o.append(x)
    return np.concatenate(o)


def tf32(x: np.ndarray, half: int = 0x1000) -> np.ndarray:
    """Rounded to 10 stored bits; half = 0: truncated, as tensor cores take raw fp32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + np.uint32(half)) & np.uint32(0xFFFFE000)).view(np.float32)


def by_products(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, beta: np.ndarray, half: int = 0x1000
) -> np.ndarray:
    """o of one chunk, all tokens, by products whose operands are tf32."""
    T, H, K = q.shape
    o, G = np.zeros_like(v), np.cumsum(g, 0, dtype=np.float32)
    for h in range(H):
        up, down, b = np.exp(G[:, h]), np.exp(-G[:, h]), beta[:, h, None]
        keys = tf32(k[:, h] * down, half)
        L = np.tril(tf32(k[:, h] * up, half) @ keys.T, -1)
        P = np.tril(tf32(q[:, h] * up, half) @ keys.T)
        u = np.linalg.inv(np.eye(T, dtype=np.float32) + b * L)
        u = tf32(u, half) @ tf32(b * v[:, h], half)
        o[:, h] = np.float32(K**-0.5) * (tf32(P, half) @ tf32(u, half))
    return o


def forgets_by_chunks(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, beta: np.ndarray, chunk: int = 64
) -> np.ndarray:
    """Chunks shorter than its own lose a tenth of the state between them."""
    return by_chunks(q, k, v, g, beta, chunk, keeps=0.9)


def looks_ahead(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, beta: np.ndarray
) -> np.ndarray:
    """The last token of a chunk of 64 sees the value of the next one."""
    o, _ = kda(q, k, v, g, beta)
    o[63:-1:64] += 0.01 * v[64::64]
    return o


def unsteady(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, beta: np.ndarray
) -> np.ndarray:
    """Adds up in another order from call to call, as it were: the last bit of o moves."""
    o, _ = kda(q, k, v, g, beta)
    unsteady.calls += 1  # type: ignore[attr-defined]
    return o * np.float32(1 + unsteady.calls % 2 * 2**-23)  # type: ignore[attr-defined]


unsteady.calls = 0  # type: ignore[attr-defined]


def without_packing(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    beta: np.ndarray,
    initial_state: np.ndarray | None = None,
    cu_seqlens: np.ndarray | None = None,
) -> np.ndarray:
    """Sequences that are packed run into each other."""
    first = None if initial_state is None else initial_state[:1]
    return kda(q, k, v, g, beta, first)[0]


def inputs(T: int = 100, H: int = 2, K: int = 16, V: int = 8) -> dict[str, np.ndarray]:
    """Unit keys and queries, gates that forget slowly."""
    rng = np.random.default_rng(1)

    def unit(x: np.ndarray) -> np.ndarray:
        return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)

    return {
        "q": unit(rng.normal(size=(T, H, K))),
        "k": unit(rng.normal(size=(T, H, K))),
        "v": rng.normal(size=(T, H, V)).astype(np.float32),
        "g": -0.02 * rng.exponential(size=(T, H, K)).astype(np.float32),
        "beta": rng.uniform(size=(T, H)).astype(np.float32),
    }
