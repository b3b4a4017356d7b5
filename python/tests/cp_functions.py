"""Functions on several ranks, right and wrong ones: what `test_cp_check.py` has cp-check tell."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def _ours(q: Any, k: Any, v: Any, g: Any, beta: Any, cu: Any, context: Any) -> Any:
    from deltaproof import ops

    if context is None:
        return ops.chunk_kda(q, k, v, g, beta, cu_seqlens=cu)[0]
    return ops.chunk_kda(q, k, v, g, beta, cp_context=context)[0]


def _context(group: Any, cu: Any, layout: str = "contiguous") -> Any:
    from deltaproof import ops

    return None if group is None else ops.cp_context(group, cu, layout)


def right(q: Any, k: Any, v: Any, g: Any, beta: Any, cu_seqlens: Any, group: Any) -> Any:
    return _ours(q, k, v, g, beta, cu_seqlens, _context(group, cu_seqlens))


def takes_zigzag(q: Any, k: Any, v: Any, g: Any, beta: Any, cu_seqlens: Any, group: Any) -> Any:
    return _ours(q, k, v, g, beta, cu_seqlens, _context(group, cu_seqlens, "zigzag"))


def one_sequence(q: Any, k: Any, v: Any, g: Any, beta: Any, cu_seqlens: Any, group: Any) -> Any:
    whole = [0, q.shape[1] * dist.get_world_size()]
    return _ours(q, k, v, g, beta, cu_seqlens, _context(group, whole))


def gives_reversed(q: Any, k: Any, v: Any, g: Any, beta: Any, cu_seqlens: Any, group: Any) -> Any:
    o = right(q, k, v, g, beta, cu_seqlens, group)
    return o if group is None else o.flip(1)


def _recur(x: tuple[Any, ...], cu: list[int], begin: int, state: Any) -> tuple[Any, Any]:
    """KDA token by token, from token `begin` of all and the state before it."""
    q, k, v, g, beta = (t[0].float() for t in x)
    rows = []
    for t in range(len(q)):
        if begin + t in cu:
            state = torch.zeros_like(state)
        state = state * g[t].exp().unsqueeze(-1)
        read = torch.einsum("hk,hkv->hv", k[t], state)
        state = state + torch.einsum("hk,hv->hkv", k[t], beta[t, :, None] * (v[t] - read))
        rows.append(torch.einsum("hk,hkv->hv", q[t] * k.shape[-1] ** -0.5, state))
    return torch.stack(rows)[None], state


def _handed(x: tuple[Any, ...], cu: Any, group: Any, change: Any) -> Any:
    """The same on ranks, the state handed on as `change` makes it."""
    _, L, H, K = x[0].shape
    state = torch.zeros(H, K, x[2].shape[-1])
    rank, N = (0, 1) if group is None else (dist.get_rank(), dist.get_world_size())
    if rank:
        dist.recv(state, rank - 1)
    o, state = _recur(x, cu.tolist(), rank * L, state)
    if rank + 1 < N:
        dist.send(change(state).contiguous(), rank + 1)
    return o


def coarse(q: Any, k: Any, v: Any, g: Any, beta: Any, cu_seqlens: Any, group: Any) -> Any:
    return _handed((q, k, v, g, beta), cu_seqlens, group, lambda s: s.bfloat16().float())


def turned(q: Any, k: Any, v: Any, g: Any, beta: Any, cu_seqlens: Any, group: Any) -> Any:
    return _handed((q, k, v, g, beta), cu_seqlens, group, lambda s: s.transpose(-1, -2))


KEPT: dict[Any, Any] = {}


def remembers(q: Any, k: Any, v: Any, g: Any, beta: Any, cu_seqlens: Any, group: Any) -> Any:
    """The result by shape, as of a graph whose inputs are not copied in."""
    o = _handed((q, k, v, g, beta), cu_seqlens, group, lambda s: s)
    return KEPT.setdefault((v.shape, group is None), o)


def second(q: Any, k: Any, v: Any, g: Any, beta: Any, cu_seqlens: Any, group: Any) -> Any:
    """The second call on ranks sends what its buffer held before."""
    KEPT["calls"] = KEPT.get("calls", 0) + (group is not None)
    late = KEPT["calls"] == 2
    return _handed((q, k, v, g, beta), cu_seqlens, group, lambda s: s * (0 if late else 1))


def nothing(q: Any, k: Any, v: Any, g: Any, beta: Any, cu_seqlens: Any, group: Any) -> Any:
    return _handed((q, k, v, g, beta), cu_seqlens, group, torch.zeros_like)


def wrong_alone(q: Any, k: Any, v: Any, g: Any, beta: Any, cu_seqlens: Any, group: Any) -> Any:
    return 2 * _handed((q, k, v, g, beta), cu_seqlens, group, lambda s: s)


def layer(
    q: Any, k: Any, v: Any, g: Any, beta: Any, A_log: Any, dt_bias: Any, cu_seqlens: Any, group: Any
) -> Any:
    """Gate, beta and norm in the kernel; dt_bias [HV,K] goes in as [HV*K]."""
    from deltaproof import ops

    own: dict[str, Any] = {"cu_seqlens": cu_seqlens}
    if group is not None:
        own = {"cp_context": _context(group, cu_seqlens)}
    return ops.chunk_kda(
        q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias.flatten(), use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True, **own,
    )  # fmt: skip


class _Whole(torch.autograd.Function):
    """Makes the gradient of a parameter the whole sum on every rank."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, d: Any) -> Any:
        d = d.clone()
        dist.all_reduce(d)
        return d


def layer_of_sums(
    q: Any, k: Any, v: Any, g: Any, beta: Any, A_log: Any, dt_bias: Any, cu_seqlens: Any, group: Any
) -> Any:
    if group is not None:
        A_log = _Whole.apply(A_log)
    return layer(q, k, v, g, beta, A_log, dt_bias, cu_seqlens, group)
