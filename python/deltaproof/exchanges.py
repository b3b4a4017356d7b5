"""Tensors that ranks of a context-parallel kernel exchange, as `deltaproof judge` reads them.

    with exchanges() as kept:          # fla.ops.cp: KDA, GDN and whatever else calls it
        o, _ = chunk_kda(.., cp_context=context)
        o.backward(do)
    tensors = kept.of_all_ranks()      # rank 0: {"M": [N,HV,K,K], "H": .., "S_in": ..}

The tensors go into the file of outputs beside o and the gradients; `judge --ranks N` judges each.
With exchanges(chain=True) `kept.chain` is what `judge` takes for a chain of M alone: its factors,
made of the kernel's own w and kg, and the kernel's M after each of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

# A pass: names of the transition, of the state that it makes from zeros, of the merged state.
PASSES = {"fwd": ("M", "H", "S_in"), "bwd": ("dM", "dH", "dS_out")}


@dataclass
class Kept:
    """Tensors of this rank, by the names of PASSES, of the last forward and backward pass.

    M, dM [HV,K,K]; H, dH [HV,K,V]; S_in, dS_out [HV,K,V], or [HV,V,K] where the kernel lays states
    out so. H and M are zeros on a rank that hands nothing on, and S_in is missing on one that
    takes nothing; `judge` looks at neither. gathered: what this rank got from all, in their order.
    """

    rank: dict[str, Any] = field(default_factory=dict)
    gathered: dict[str, Any] = field(default_factory=dict)
    calls: int = 0
    chain: dict[str, Any] = field(default_factory=dict)

    def of_all_ranks(self, group: Any = None) -> dict[str, Any]:
        """Stacked over the ranks of a process group, [N,..], on the CPU of its first rank; {} on
        the others. RuntimeError: no rank handed anything on."""
        dist = import_module("torch.distributed")
        mine = {name: t.detach().float().cpu() for name, t in self.rank.items()}
        ranks = dist.get_world_size(group)
        parts: list[Any] = [None] * ranks
        dist.all_gather_object(parts, mine, group=group)
        if dist.get_rank(group):
            return {}
        if not any(parts):
            raise RuntimeError("nothing was handed on: the call had no cp_context of several ranks")
        return stacked(parts)

    def as_received(self) -> dict[str, Any]:
        """M and H of all ranks as this rank received them: what the exchange itself changed is the
        difference to `of_all_ranks`."""
        return dict(self.gathered)


def stacked(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """{name: [N,..]} of the ranks' own; a rank that lacks one has zeros."""
    torch = import_module("torch")
    shapes = {name: t for part in parts for name, t in part.items()}
    return {
        name: torch.stack([part.get(name, torch.zeros_like(t)) for part in parts])
        for name, t in shapes.items()
    }


def _halves(hm: Any) -> tuple[Any, Any]:
    """FLA's summary [..,HV,K,V+K] as (M, H): the state first, the transition behind it."""
    K = hm.shape[-2]
    return hm[..., hm.shape[-1] - K :], hm[..., : hm.shape[-1] - K]


def _pass_of(caller: str) -> str:
    """fwd or bwd, from the name of the function that exchanges."""
    return "bwd" if "bwd" in caller else "fwd"


def _prefixes(form: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The chain of M of head 0: `factors` [n,K,K] of the chunks, made in fp64 and rounded to fp32,
    and the kernel's `M` [n,K,K] of the first 1 .. n of them. The first factor is the kernel's own M
    of one chunk, from which its chain goes on. ValueError: a gate of one number a head."""
    torch = import_module("torch")
    k, w, gk, hm = (options[name] for name in ("k", "w", "gk", "hm"))
    if gk is None:
        raise ValueError("exchanges: chain=True takes gates of K numbers a head (KDA)")
    first, end = options["cu_seqlens"].tolist()
    chunk = options.get("chunk_size", 64)
    factors, M = [], []
    for t in range(first, end, chunk):
        last = min(t + chunk, end)
        kg, wc = (x[0, t:last, 0].double() for x in (k, w))
        factors.append(torch.diag(torch.exp2(gk[0, last - 1, 0].double())) - kg.T @ wc)
        part = torch.zeros_like(hm)
        until = torch.tensor([first, last], dtype=torch.long, device=hm.device)
        form(**options | {"hm": part, "cu_seqlens": until})
        M.append(_halves(part)[0][0])
    factors[0] = M[0]
    return {"factors": torch.stack([f.float() for f in factors]).cpu(), "M": torch.stack(M).cpu()}


@contextmanager
def exchanges(module: str = "fla.ops.cp.chunk_delta_h", chain: bool = False) -> Iterator[Kept]:
    """Keeps what FLA's context parallelism hands on within the block; nothing else changes.

    chain: M is formed again for every prefix of the rank's chunks. module: where
    `all_gather_into_tensor`, `chunk_cp_merge` and `chunk_cp_fwd_h` are looked up. ImportError: FLA
    is not installed; AttributeError: its version has no such functions (0.6 has). ValueError, in
    the call: the layout is zigzag, which has two chains."""
    where = import_module(module)
    names = ("all_gather_into_tensor", "chunk_cp_merge", "chunk_cp_fwd_h")
    gather, merge, form = plain = [getattr(where, name) for name in names]
    kept = Kept()

    def gathering(inp: Any, *args: Any, **options: Any) -> Any:
        M, H, _ = PASSES[_pass_of(sys._getframe(1).f_code.co_name)]
        if inp.dim() != 3:
            raise ValueError(f"exchanges: a summary of shape {tuple(inp.shape)}, not [HV,K,V+K]")
        made = gather(inp, *args, **options)
        kept.calls += 1
        kept.rank[M], kept.rank[H] = (x.clone() for x in _halves(inp))
        kept.gathered[M], kept.gathered[H] = (x.clone() for x in _halves(made[0]))
        return made

    def merging(h: Any, *args: Any, **options: Any) -> Any:
        made = merge(h, *args, **options)
        kept.rank[PASSES[_pass_of(sys._getframe(1).f_code.co_name)][2]] = h.clone()
        return made

    def forming(**options: Any) -> Any:
        made = form(**options)
        if chain:
            kept.chain = _prefixes(form, options)
        return made

    try:
        for name, own in zip(names, (gathering, merging, forming), strict=True):
            setattr(where, name, own)
        yield kept
    finally:
        for name, own in zip(names, plain, strict=True):
            setattr(where, name, own)
