"""GDN and KDA with their adjoint in numpy, one token at a time and in chunks, and the faults of
public reports by name. Written from the formulas at the head of harness/deltaproof_subject.h:
nothing here is a report's code, nor that of ref/ or harness/."""

import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from recurrences import log_decay, sigmoid, softplus

F4 = np.float32
EPS = F4(1e-6)
FORMATS = {"bf16": ml_dtypes.bfloat16, "float16": np.float16}


def _rounded(x: Any, form: str) -> Any:
    with np.errstate(over="ignore"):
        return x.astype(FORMATS[form]).astype(F4)


def _read(fault: str, x: dict[str, Any]) -> dict[str, Any]:
    """The inputs as a wrong kernel reads them."""
    name, _, form = fault.partition("-")
    if form in FORMATS and name in ("q", "v", "do") and name in x:
        return x | {name: _rounded(x[name], form)}
    if fault == "bound-5":
        return x | {"lower_bound": -5}
    if fault == "a-log-above-0" and "A_log" in x:
        return x | {"A_log": np.maximum(x["A_log"], 0)}
    return x


class Inputs:
    """The inputs of a call, activated: q, k, v [T,HV,..], lg [T,HV,K or 1], b [T,HV], S0, cu."""

    def __init__(self, fault: str, last: Any, x: dict[str, Any]) -> None:
        self.x, self.fault = _read(fault, x), fault
        x = self.x
        q, k, v = (x[n].astype(F4) for n in ("q", "k", "v"))
        self.T, self.H, self.K = q.shape
        self.HV, self.V = v.shape[1:]
        self.rq, self.rk = (self._norm(y) if x["l2norm"] else F4(1) for y in (q, k))
        if fault == "keys-normed":
            self.rk = self._norm(k)
        head = np.arange(self.HV)
        head = head % self.H if fault == "heads-tiled" else head // (self.HV // self.H)
        self.q, self.k, self.v = (q * self.rq)[:, head], (k * self.rk)[:, head], v
        self.lg = log_decay(*self._gate())
        self.lg = self.lg * F4(np.log(2) if fault == "base-2" else 1)
        b = x["beta"].astype(F4)
        s = sigmoid(b)
        self.b = {"plain": b, "sigmoid": s, "sigmoid2": 2 * s}[x["beta_form"]]
        if fault == "beta-bf16":
            self.b = self.b.astype(ml_dtypes.bfloat16).astype(F4)
        self.cu = [0, self.T] if x.get("cu_seqlens") is None else [int(n) for n in x["cu_seqlens"]]
        self.S0 = self._states(last)
        self._lose_channels()

    def lengths(self) -> list[int]:
        return [e - a for a, e in zip(self.cu, self.cu[1:], strict=False)]

    def _norm(self, y: Any) -> Any:
        squares = (y * y).sum(-1, keepdims=True)
        if self.fault == "l2-float16":
            squares = _rounded(squares, "float16")
        if self.fault == "l2-clamp":
            return 1 / np.maximum(np.sqrt(squares), EPS)
        if self.fault == "l2-outside":
            return 1 / (np.sqrt(squares) + EPS)
        if self.fault == "l2-eps":
            return 1 / np.sqrt(squares + F4(1e-5))
        return 1 / np.sqrt(squares + EPS)

    def _gate(self) -> tuple[Any, ...]:
        x, fault = self.x, self.fault
        g, A, bias = (
            x["g"].astype(F4).reshape(self.T, self.HV, -1),
            x.get("A_log"),
            x.get("dt_bias"),
        )
        if fault == "a-log-twice" and A is not None:
            A = -np.exp(A.astype(F4))
        if fault == "dt-bias-per-head" and bias is not None and g.shape[-1] > 1:
            bias = bias.reshape(-1)[: self.HV, None] * np.ones((1, self.K), F4)
        return g, x["gate"], x["lower_bound"], A, bias

    def _states(self, last: Any) -> Any:
        x, n = self.x, len(self.cu) - 1
        S = np.zeros((n, self.HV, self.K, self.V), F4)
        if x.get("initial_state") is not None:
            S = x["initial_state"].astype(F4).copy()
        if x.get("pool") is not None:
            for i, slot in enumerate(x["read_slot"]):
                S[i] = x["pool"][slot] if slot >= 0 else 0
        steps = n == self.T and last is not None and last.shape[1:] == S.shape[1:]
        if self.fault == "first-token-stale" and steps and not S.any():
            S = np.resize(last, S.shape).astype(F4)
        if self.fault == "state-turned" and self.K == self.V:
            S = S.swapaxes(-1, -2).copy()
        if self.fault == "s0-ignored":
            S[:] = 0
        if self.fault == "s0-lost-multi":
            S[[i for i, m in enumerate(self.lengths()) if m > 1]] = 0
        return S

    def _lose_channels(self) -> None:
        lost = {"dk-tail": self.K // 32 * 32, "k-over-128": 128}.get(self.fault, self.K)
        self.q[..., lost:] = 0
        if self.fault == "wrap":  # an offset of 13 bits
            self.v = self.v[np.arange(self.T) % (2**13 // (self.HV * self.V))]
        self.k[..., lost if self.fault == "dk-tail" else self.K :] = 0


def forward(c: Inputs, steps: list[Any]) -> tuple[Any, Any]:
    """o, final states; steps gets the state before every token."""
    fault, x = c.fault, c.x
    o, final = np.zeros((c.T, c.HV, c.V), F4), c.S0.copy()
    cu = [0, c.T] if fault == "cu-ignored" else c.cu
    for n, (a, e) in enumerate(zip(cu, cu[1:], strict=False)):
        S = c.S0[n].copy()
        for t in range(a, e):
            steps.append(S)
            before, S = S, S * np.exp(c.lg[t])[..., None]
            read = np.einsum("hk,hkv->hv", c.k[t], before if fault == "undecayed" else S)
            padded = fault == "beta-pad" and c.HV > 1 and t - a >= (e - a) // 64 * 64
            write = (np.roll(c.b[t], 1) if padded else c.b[t])[:, None] * (c.v[t] - read)
            S = S + c.k[t][..., None] * write[:, None]
            o[t] = F4(x["scale"]) * np.einsum("hk,hkv->hv", c.q[t], S)
            if fault == "diag-two":
                o[t] += F4(x["scale"]) * (c.q[t] * c.k[t]).sum(-1)[:, None] * write
            if fault == "tail" and t >= 300:
                o[t] = 0
            if fault == "window" and t % 256 == 255:
                S = 0 * S
        final[n] = S
    if fault == "cu-ignored":
        final[:] = final[0]
    if fault == "scale-twice":
        o *= F4(x["scale"])
    if fault == "v-over-128":
        o[..., 128:] = 0
    return o, _states_lost(c, final)


def _states_lost(c: Inputs, final: Any) -> Any:
    """Final states as a server's faults leave them."""
    lengths, T = c.lengths(), c.T
    for n, m in enumerate(lengths):
        if c.fault == "empty-zero" and not m:
            final[n] = 0
        if c.fault == "empty-runs" and not m and c.cu[n] < T:
            t = c.cu[n]
            S = c.S0[n] * np.exp(c.lg[t])[..., None]
            read = np.einsum("hk,hkv->hv", c.k[t], S)
            final[n] = S + c.k[t][..., None] * (c.b[t][:, None] * (c.v[t] - read))[:, None]
        if c.fault == "channels-dead" and m and (c.lg[c.cu[n] : c.cu[n] + m].sum(0) < -20).all():
            final[n] = 0
        if c.fault == "mixed-decode-lost" and m == 1 and max(lengths) > 1:
            final[n] = c.S0[n]
    return final.swapaxes(-1, -2).copy() if c.fault == "final-turned" else final


def into_pool(c: Inputs, final: Any) -> Any:
    pool = c.x["pool"].astype(F4).copy()
    for n, slot in enumerate(c.x["write_slot"]):
        if c.fault == "pad-slot-0" and slot < 0:  # a padded lane's state, decayed by its token
            pool[0] = pool[0] * F4(0.9)
        elif slot >= 0:
            pool[slot % 4 if c.fault == "slot-wraps-4" else slot] = final[n]
    return pool


def backward(c: Inputs, steps: list[Any]) -> dict[str, Any]:
    """The adjoint of forward without a fault, on its states."""
    x, sc = c.x, F4(c.x["scale"])
    do, dht = x["do"].astype(F4), x.get("dht")
    dq, dk = np.zeros_like(c.q), np.zeros_like(c.k)
    dv, db, dlg = np.zeros_like(c.v), np.zeros_like(c.b), np.zeros((c.T, c.HV, c.K), F4)
    ds0 = np.zeros_like(c.S0)
    for n, (a, e) in enumerate(zip(c.cu, c.cu[1:], strict=False)):
        dS = ds0[n] if dht is None else dht[n].astype(F4)
        for t in range(e - 1, a - 1, -1):
            held, b = steps[t] * np.exp(c.lg[t])[..., None], c.b[t][:, None]
            error = c.v[t] - np.einsum("hk,hkv->hv", c.k[t], held)
            S = held + c.k[t][..., None] * (b * error)[:, None]
            dq[t] = sc * np.einsum("hkv,hv->hk", S, do[t])
            dS = dS + sc * c.q[t][..., None] * do[t][:, None]
            write = np.einsum("hkv,hk->hv", dS, c.k[t])
            db[t], dv[t] = (write * error).sum(-1), b * write
            dk[t] = np.einsum("hkv,hv->hk", dS, b * error) - np.einsum("hkv,hv->hk", held, dv[t])
            dheld = dS - c.k[t][..., None] * dv[t][:, None]
            dlg[t] = (dheld * held).sum(-1)
            dS = np.exp(c.lg[t])[..., None] * dheld
        ds0[n] = dS
    if c.fault == "grads-of-row0":
        for a, e in zip(c.cu[1:], c.cu[2:], strict=False):
            for y in (dq, dk, dv, dlg, db):
                y[a:e] = y[c.cu[0] : c.cu[0] + e - a]
    made = {"dv": dv, "ds0": ds0, "dbeta": _of_beta(c, db)}
    made |= {"dq": _of_rows(c, dq, "q", c.rq), "dk": _of_rows(c, dk, "k", c.rk)}
    return made | _of_gate(c, dlg)


def _of_beta(c: Inputs, db: Any) -> Any:
    form = c.x["beta_form"]
    return {"plain": db, "sigmoid": db * c.b * (1 - c.b), "sigmoid2": db * c.b * (1 - c.b / 2)}[
        form
    ]


def _of_rows(c: Inputs, d: Any, name: str, r: Any) -> Any:
    """The gradient of q or k, before the norm."""
    tiled = c.fault == "heads-tiled"
    d = d.reshape(c.T, -1, c.H, c.K).sum(1) if tiled else d.reshape(c.T, c.H, -1, c.K).sum(2)
    y = c.x[name].astype(F4)
    return r * d - r**3 * y * (y * d).sum(-1, keepdims=True) if c.x["l2norm"] else d


def _of_gate(c: Inputs, dlg: Any) -> dict[str, Any]:
    g, gate, bound, A_log, bias = c._gate()
    dlg = dlg if g.shape[-1] > 1 else dlg.sum(-1, keepdims=True)
    if gate == "log":
        return {"dg": dlg.reshape(c.x["g"].shape)}
    rate = F4(1) if A_log is None else np.exp(A_log.astype(F4))[:, None]
    z = g + (F4(0) if bias is None else bias.astype(F4).reshape(g.shape[1:]))
    if gate == "softplus":
        draw, dA = dlg * -rate * sigmoid(z), dlg * -rate * softplus(z)
    else:
        s = sigmoid(rate * z)
        slope = dlg * F4(bound) * s * (1 - s)
        draw, dA = slope * rate, slope * rate * z
    out = {"dg": draw.reshape(c.x["g"].shape)}
    out |= {} if A_log is None else {"dA_log": dA.sum((0, 2))}
    return out | ({} if bias is None else {"ddt_bias": draw.sum(0).reshape(bias.shape)})


def with_inputs(body: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """A function in the sense of deltaproof/contract.py that passes its inputs by name to body."""

    def kernel(
        q: Any,
        k: Any,
        v: Any,
        g: Any,
        beta: Any,
        scale: float,
        gate: str,
        beta_form: str,
        l2norm: bool,
        lower_bound: float,
        **arrays: Any,
    ) -> dict[str, Any]:
        x = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "scale": scale, "gate": gate, **arrays}
        return body(x | {"beta_form": beta_form, "l2norm": l2norm, "lower_bound": lower_bound})

    return kernel


CHUNKED = ("", "w-ungated", "equal-sums", "stale-tail", "h-late", "h-turned")


def by_chunks(fault: str = "", C: int = 64) -> Callable[..., dict[str, Any]]:
    """The chunk form: every chunk is solved at once, and passes the state h on. Faults:

    - w is made without the decay that its Gram matrix has
    - exp is guarded by a sum below 0, not up to it
    - a ragged tail decays by the chunk before
    - h is returned one chunk late, or read transposed"""

    def kernel(x: dict[str, Any]) -> dict[str, Any]:
        c = Inputs("", None, x)
        o, final, shown = np.zeros((c.T, c.HV, c.V), F4), c.S0.copy(), []
        for n, (a, e) in enumerate(zip(c.cu, c.cu[1:], strict=False)):
            S, last = c.S0[n].copy(), None
            for t in range(a, e, C):
                at, before = slice(t, min(t + C, e)), S
                o[at], S, last = _chunk(c, at, S, fault, last)
                shown.append(S if fault == "h-late" else before)
            final[n] = S
        h = np.stack(shown) if shown else np.zeros((0, *c.S0.shape[1:]), F4)
        return {"o": o, "final_state": final, "h": h}

    return with_inputs(kernel)


def _chunk(c: Inputs, at: slice, S: Any, fault: str, last: Any) -> tuple[Any, Any, Any]:
    """o and the state behind a chunk; S [HV,K,V]. last: the decay of the chunk before."""
    q, k, v, b = (np.moveaxis(y[at], 1, 0) for y in (c.q, c.k, c.v, c.b[..., None]))
    G = np.cumsum(np.moveaxis(c.lg[at], 1, 0) * np.ones(c.K, F4), 1)
    down = G[:, :, None] - G[:, None]  # [HV,C,C,K]
    n = len(G[0])
    lower, below = np.tri(n, k=-1, dtype=bool), np.tri(n, dtype=bool)
    live = (down < 0) | np.eye(n, dtype=bool)[..., None] if fault == "equal-sums" else True
    decay = np.where(below[..., None] & live, np.exp(np.minimum(down, 0)), 0).astype(F4)
    gram = np.einsum("hik,hjk,hijk->hij", k, k, decay)
    T = np.linalg.inv(np.eye(n, dtype=F4) + b * np.where(lower, gram, 0))
    w = T @ (b * (k if fault == "w-ungated" else k * np.exp(G)))
    new = T @ (b * v) - w @ S
    read = S.swapaxes(-1, -2) if fault == "h-turned" and c.K == c.V else S
    o = (q * np.exp(G)) @ read + np.einsum("hik,hjk,hijk->hij", q, k, decay) @ new
    end = np.exp(G[:, -1])
    ragged = fault == "stale-tail" and n < 64 and last is not None
    S = (last if ragged else end)[..., None] * S
    S = S + np.swapaxes(k * np.exp(G[:, -1:] - G), -1, -2) @ new
    return np.moveaxis(F4(c.x["scale"]) * o, 0, 1), S, end


def make(fault: str = "") -> Callable[..., dict[str, Any]]:
    """A function in the sense of deltaproof/contract.py that gives back what it is asked for."""
    memory: dict[str, Any] = {"calls": 0}
    if fault in CHUNKED[1:]:
        return by_chunks(fault)

    def kernel(x: dict[str, Any]) -> dict[str, Any]:
        c, steps = Inputs(fault, memory.get("last"), x), []
        o, final = forward(c, steps)
        memory["last"] = final.copy()
        memory["calls"] += 1
        if fault == "hang":
            time.sleep(30)
        if (fault == "race" and memory["calls"] % 10 == 0) or (
            fault == "first-call" and memory["calls"] == 1
        ):
            o[-1] = o[-1] * F4(1.01)
        out = {"o": o, "final_state": final}
        if x.get("pool") is not None:
            out["pool"] = into_pool(c, final)
        return out | (backward(c, steps) if x.get("do") is not None else {})

    return with_inputs(kernel)
