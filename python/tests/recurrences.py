"""All eight recurrences in numpy, one token at a time, from the formulas at the head of
harness/deltaproof_subject.h. Nothing here is the code of ref/ or harness/."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

F4 = np.float32
TOKENS = ("q", "k", "v", "g", "beta")
FORM: dict[str, Any] = {"lower_bound": 0}
ROW = (*TOKENS, "scale", "gate", "beta_form", "l2norm", "A_log", "dt_bias", "cu_seqlens")
MODELS = ("kda", "gdn", "mkda", "gdn2", "gla", "ssd", "gated-deltaproduct", "dplr")


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def softplus(x: Any) -> Any:
    return np.where(x > 20, x, np.log1p(np.exp(np.minimum(x, 20))))


def log_decay(g: Any, gate: str, bound: float, A_log: Any, dt_bias: Any) -> Any:
    """g [T,HV,Kg] of any form as log decay."""
    rate = np.exp(A_log.astype(F4))[:, None] if A_log is not None else F4(1)
    bias = dt_bias.astype(F4).reshape(g.shape[1:]) if dt_bias is not None else F4(0)
    if gate == "softplus":
        return -rate * softplus(g + bias).astype(F4)
    if gate == "lower_bound":
        return F4(bound) * sigmoid(rate * (g + bias))
    return g


def unit(x: Any) -> Any:
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + F4(1e-6))


def step(model: str, S: Any, decay: Any, k: Any, v: Any, more: dict[str, Any]) -> Any:
    """One token: S [HV,K,V], decay [HV,K or 1], k [HV,R,K], v [HV,R,V]."""
    before, S = S, S * decay[..., None]
    if model == "dplr":
        read = np.einsum("hk,hkv->hv", more["lr_a"], before)
        S = S + more["lr_b"][..., None] * read[:, None]
    held = S
    for j in range(k.shape[1]):
        key, e = k[:, j], v[:, j]
        if model == "gdn2":
            e = more["w"] * e - np.einsum("hk,hkv->hv", more["b"] * key, S)
        elif "beta" in more:
            seen = S if model == "gated-deltaproduct" else held
            e = more["beta"][:, j, None] * (e - np.einsum("hk,hkv->hv", key, seen))
        S = S + key[..., None] * e[:, None]
    return S


def right(model: str) -> Callable[..., dict[str, Any]]:
    """A function of that recurrence in every form, with packed sequences and states."""

    def kernel(
        q: Any,
        k: Any,
        v: Any,
        g: Any,
        scale: float,
        gate: str,
        beta_form: str,
        l2norm: bool,
        lower_bound: float,
        beta: Any = None,
        b: Any = None,
        w: Any = None,
        lr_a: Any = None,
        lr_b: Any = None,
        A_log: Any = None,
        dt_bias: Any = None,
        initial_state: Any = None,
        cu_seqlens: Any = None,
    ) -> dict[str, Any]:
        T, H, K = q.shape
        if k.ndim == 3:  # one key a token
            k, v, beta = k[:, :, None], v[:, :, None], None if beta is None else beta[..., None]
        HV, V = v.shape[1], v.shape[-1]
        q, k, v = q.astype(F4), k.astype(F4), v.astype(F4)
        if l2norm:
            q, k = unit(q), unit(k)
        q, k = np.repeat(q, HV // H, 1), np.repeat(k, HV // H, 1)
        g = g.astype(F4) if g.ndim == 3 else g.astype(F4)[..., None]
        lg = log_decay(g, gate, lower_bound, A_log, dt_bias)
        decay = np.exp(lg, dtype=np.float64).astype(F4)  # rounded once: fp32's own is off by 2 ulp
        of_token = {"b": b, "w": w, "lr_a": lr_a, "lr_b": lr_b}
        if beta is not None:
            s = sigmoid(beta.astype(F4))
            of_token["beta"] = {"plain": beta.astype(F4), "sigmoid": s, "sigmoid2": 2 * s}[
                beta_form
            ]
        cu = [0, T] if cu_seqlens is None else [int(n) for n in cu_seqlens]
        o, final = np.zeros((T, HV, V), F4), np.zeros((len(cu) - 1, HV, K, V), F4)
        for n in range(len(cu) - 1):
            S = final[n] if initial_state is None else initial_state[n].astype(F4)
            for t in range(cu[n], cu[n + 1]):
                more = {x: y[t].astype(F4) for x, y in of_token.items() if y is not None}
                S = step(model, S, decay[t], k[t], v[t], more)
                o[t] = F4(scale) * np.einsum("hk,hkv->hv", q[t], S)
            final[n] = S
        return {"o": o, "final_state": final}

    return kernel


def taking(body: Callable[..., Any], *required: str, optional: tuple[str, ...] = ()) -> Any:
    """A function whose parameters are ROW, `required` and `optional` (absent: None), as
    deltaproof/contract.py reads them. It returns body(x, ..): x is ROW by name, the others follow
    as keywords."""

    def kernel(**given: Any) -> Any:
        others = {n: given.get(n) for n in (*required, *optional)}
        return body({n: given.get(n) for n in ROW}, **others)

    free = ("A_log", "dt_bias", "cu_seqlens", *optional)
    names = dict.fromkeys((*ROW, *required, *optional))
    kernel.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                n,
                inspect.Parameter.KEYWORD_ONLY,
                default=None if n in free and n not in required else inspect.Parameter.empty,
            )
            for n in names
        ]
    )
    return kernel


def by_token(x: dict[str, Any], t: int) -> dict[str, Any]:
    """ROW for token t alone."""
    own = {n: y for n, y in x.items() if n not in TOKENS and n != "cu_seqlens"}
    return own | {n: x[n][t : t + 1] for n in TOKENS}


def boundaries(x: dict[str, Any]) -> list[int]:
    """Boundaries of the packed sequences."""
    cu = x["cu_seqlens"]
    return [0, len(x["q"])] if cu is None else [int(n) for n in cu]


def in_slots(step: Callable[[dict[str, Any], Any], tuple[Any, Any]]) -> Callable[..., Any]:
    """A kernel of step(x, states [N,HV,K,V]) -> (o, states behind), which takes states from a pool
    and leaves them there where it gets one."""

    def kernel(
        x: dict[str, Any], initial_state: Any, pool: Any, read_slot: Any, write_slot: Any
    ) -> Any:
        if pool is None:
            o, final = step(x, initial_state)
            return {"o": o, "final_state": final}
        o, final = step(x, np.nan_to_num(pool[read_slot]))
        out, live = pool.copy(), write_slot >= 0
        out[write_slot[live]] = final[live]
        return {"o": o, "pool": out}

    return taking(kernel, optional=("initial_state", "pool", "read_slot", "write_slot"))
