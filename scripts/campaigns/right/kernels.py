"""Right kernels of every recurrence in PyTorch, token by token and in chunks. They are written from
the formulas at the head of harness/deltaproof_subject.h and share no code with ref/ or harness/."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch

OWN = ("rwkv7", "comba")
INF = float("inf")


@dataclass
class Rows:
    """Tokens [T] of all heads, R rows a token: S <- diag(exp g) S; S <- S + write' (value - read
    S).

    Nothing is erased where read is None. Rows read the state before its decay (before) or after
    it. in_turn: each row reads the state that the row before it left."""

    g: Any  # [HV,T,K or 1]
    q: Any  # [HV,T,K]
    write: Any  # [HV,T,R,K]
    read: Any
    value: Any  # [HV,T,R,V]
    before: bool = False
    in_turn: bool = False

    def part(self, a: int, e: int) -> "Rows":
        x = {n: y[:, a:e] for n, y in vars(self).items() if torch.is_tensor(y)}
        return Rows(**{**vars(self), **x})


@dataclass
class Form:
    """chunk: tokens of one, 0: token by token; short: o leaves in bf16, and products of chunks take
    bf16 operands."""

    chunk: int = 0
    short: bool = False

    def operand(self, x: Any) -> Any:
        return x.to(torch.bfloat16).float() if self.short else x


def by_token(x: Rows, scale: float, S: Any) -> tuple[Any, Any]:
    o = []
    for t in range(x.q.shape[1]):
        held = S
        S = S * x.g[:, t].exp().unsqueeze(-1)
        seen = held if x.before else S
        for j in range(x.write.shape[2]):
            e = x.value[:, t, j]
            if x.read is not None:
                at = S if x.in_turn else seen
                e = e - (x.read[:, t, j].unsqueeze(1) @ at).squeeze(1)
            S = S + x.write[:, t, j].unsqueeze(-1) * e.unsqueeze(1)
        o.append(scale * (x.q[:, t].unsqueeze(1) @ S).squeeze(1))
    return torch.stack(o, 1), S


def scores(left: Any, right: Any, at: Any, G: Any, visible: Any) -> Any:
    """left [HV,M,K] by right [HV,N,K], with the decay of each pair by itself."""
    far = (at.unsqueeze(2) - G.unsqueeze(1)).masked_fill(~visible[None, :, :, None], -INF)
    return (left.unsqueeze(2) * far.exp() * right.unsqueeze(1)).sum(-1)


def one_chunk(x: Rows, scale: float, S: Any, form: Form) -> tuple[Any, Any]:
    b, (HV, C, R, K) = form.operand, x.write.shape
    token = torch.arange(C).repeat_interleave(R)
    row = torch.arange(C * R)
    G = x.g.cumsum(1)
    Gw = G[:, token]
    write, value = x.write.reshape(HV, C * R, K), x.value.reshape(HV, C * R, -1)
    if x.read is None:
        new = b(value)
    else:
        read = x.read.reshape(HV, C * R, K)
        earlier = torch.cat([torch.zeros_like(G[:, :1]), G[:, :-1]], 1)
        at = earlier[:, token] if x.before else Gw
        visible = token[:, None] > token[None]
        if x.in_turn:
            visible = row[:, None] > row[None]
        A = scores(read, write, at, Gw, visible)
        eye = torch.eye(C * R)
        if form.short:
            inverse = b(torch.linalg.solve_triangular(eye + A, eye, upper=False))
            new = b(inverse @ b(value)) - b(inverse @ b(read * at.exp())) @ b(S)
        else:
            right = value - (read * at.exp()) @ S
            new = torch.linalg.solve_triangular(eye + A, right, upper=False)
        new = b(new)
    P = scores(x.q, write, G, Gw, torch.arange(C)[:, None] >= token[None])
    o = scale * (b(x.q * G.exp()) @ b(S) + b(P) @ new)
    end = G[:, -1:]
    S = S * end.exp().transpose(1, 2) + b(write * (end - Gw).exp()).transpose(1, 2) @ new
    return o, S


def sequence(x: Rows, scale: float, S: Any, form: Form) -> tuple[Any, Any]:
    if not form.chunk:
        return by_token(x, scale, S)
    o, T = [], x.q.shape[1]
    for t in range(0, T, form.chunk):
        made, S = one_chunk(x.part(t, min(t + form.chunk, T)), scale, S, form)
        o.append(made)
    return torch.cat(o, 1), S


def packed(x: Rows, scale: float, cu: list[int], states: Any, form: Form) -> tuple[Any, Any]:
    """o [T,HV,V], states [N,HV,K,V] behind each sequence."""
    o, final = [], []
    for n, (a, e) in enumerate(zip(cu, cu[1:], strict=False)):
        S = states[n] if states is not None else x.q.new_zeros(len(x.q), x.q.shape[-1],
                                                              x.value.shape[-1])  # fmt: skip
        if a < e:
            made, S = sequence(x.part(a, e), scale, S, form)
            o.append(made.transpose(0, 1))
        final.append(S)
    return torch.cat(o), torch.stack(final)


def norm(x: Any) -> Any:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def gates(y: dict[str, Any]) -> Any:
    """Log decay [T,HV,K or 1] of a gate in any form."""
    g = y["g"] if y["g"].ndim == 3 else y["g"].unsqueeze(-1)
    bias = 0 if y.get("dt_bias") is None else y["dt_bias"].reshape(g.shape[1:])
    rate = 1 if y.get("A_log") is None else y["A_log"].exp()[:, None]
    if y["gate"] == "softplus":
        return -rate * torch.nn.functional.softplus(g + bias)
    if y["gate"] == "lower_bound":
        return y["lower_bound"] * torch.sigmoid(rate * (g + bias))
    return g


def heads_first(y: dict[str, Any], names: str) -> list[Any]:
    """[HV,T,..] of tensors of tokens; those of H heads are repeated."""
    HV = y["v"].shape[1]
    return [y[n].repeat_interleave(HV // y[n].shape[1], 1).transpose(0, 1) for n in names.split()]


def rows_of(model: str, y: dict[str, Any]) -> Rows:
    y["g"] = gates(y)
    if y.get("l2norm"):
        y["q"], y["k"] = norm(y["q"]), norm(y["k"])
    q, k, v, g = heads_first(y, "q k v g")
    if k.ndim == 3:
        k, v = k.unsqueeze(2), v.unsqueeze(2)
    if model in ("gla", "ssd"):
        return Rows(g, q, k, None, v)
    if model == "gdn2":
        b, w = heads_first(y, "b w")
        return Rows(g, q, k, b.unsqueeze(2) * k, w.unsqueeze(2) * v)
    if model == "dplr":
        a, b = heads_first(y, "lr_a lr_b")
        write = torch.stack([b, k[:, :, 0]], 2)
        read = torch.stack([-a, torch.zeros_like(a)], 2)
        return Rows(g, q, write, read, torch.cat([torch.zeros_like(v), v], 2), before=True)
    beta = y["beta"] if y["beta"].ndim == 3 else y["beta"].unsqueeze(-1)
    if y["beta_form"] != "plain":
        beta = torch.sigmoid(beta) * (2 if y["beta_form"] == "sigmoid2" else 1)
    beta = beta.transpose(0, 1).unsqueeze(-1)
    return Rows(g, q, k, beta * k, beta * v, in_turn=model == "gated-deltaproduct")


def own_rows(model: str, y: dict[str, Any]) -> Rows:
    """rwkv7 and comba by their own names (cases/*.recurrence)."""
    if model == "rwkv7":
        y["g"] = gates({**y, "g": y["w"]})
        r, k, kk, a, v, g = heads_first(y, "r k kk a v g")
        write, read = torch.stack([kk * a, k], 2), torch.stack([kk, torch.zeros_like(k)], 2)
        return Rows(g, r, write, read, torch.stack([torch.zeros_like(v), v], 2), before=True)
    y["g"] = gates(y)
    beta = y["beta"].transpose(0, 1).unsqueeze(-1)
    q, k, p, v, g = heads_first(y, "q k p v g")
    return Rows(g, q, k.unsqueeze(2), (beta * p).unsqueeze(2), (beta * v).unsqueeze(2), before=True)


def body(model: str, form: Form, given: dict[str, Any]) -> Any:
    y = {n: x.float() if torch.is_tensor(x) and x.is_floating_point() else x
         for n, x in given.items()}  # fmt: skip
    cu = [0, len(y["v"])] if y.get("cu_seqlens") is None else [int(n) for n in y["cu_seqlens"]]
    pool, states = y.get("pool"), y.get("initial_state")
    if pool is not None:
        states = torch.nan_to_num(pool[y["read_slot"].long()])
    x = own_rows(model, y) if model in OWN else rows_of(model, y)
    o, final = packed(x, y["scale"], cu, states, form)
    o = o.to(torch.bfloat16) if form.short else o
    if pool is None:
        return {"o": o, "final_state": final}
    out, to = pool.clone(), y["write_slot"].long()
    out[to[to >= 0]] = final[to >= 0]
    return {"o": o, "pool": out}


PARAMETERS = {
    "gdn2": ("b", "w", "l2norm"),
    "gla": ("l2norm",),
    "ssd": ("l2norm",),
    "dplr": ("lr_a", "lr_b"),
}
NAMES = {"rwkv7": ("r", "w", "k", "kk", "a", "v"), "comba": ("q", "k", "p", "v", "g", "beta")}


def kernel(model: str, form: Form, pool: bool = False) -> Any:
    """A function that deltaproof.run calls; with pool it keeps states in slots, too."""
    named = PARAMETERS.get(model, ("beta", "beta_form", "l2norm"))
    needs = NAMES.get(model, ("q", "k", "v", "g", *named)) + ("scale", "gate", "lower_bound")
    may = ("A_log", "dt_bias", "initial_state", "cu_seqlens")
    may += ("pool", "read_slot", "write_slot") if pool else ()

    def right(**given: Any) -> Any:
        return body(model, form, given)

    own = inspect.Parameter
    right.__name__ = f"{model}-{f'chunk{form.chunk}' if form.chunk else 'recurrent'}"
    right.__signature__ = inspect.Signature(
        [own(n, own.KEYWORD_ONLY) for n in needs]
        + [own(n, own.KEYWORD_ONLY, default=None) for n in may]
    )
    return right
