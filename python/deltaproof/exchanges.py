"""Tensors that ranks of a context-parallel kernel exchange, as `deltaproof judge` reads them.

    with exchanges() as kept:          # fla.ops.cp: KDA, GDN, GDN-2 and whatever else calls it
        o, _ = chunk_kda(.., cp_context=context)
        o.backward(do)
    tensors = kept.of_all_ranks()      # rank 0: {"M": [N,HV,K,K], "H": .., "S_in": ..}

The tensors go into the file of outputs beside o and the gradients; `judge --ranks N` judges each.
With exchanges(chain=True) `kept.chain` is what `judge` takes for a chain of M alone. It holds the
factors, made of the kernel's own w and kg, and the kernel's M after each of them.

`megatron_exchanges` keeps the tensors of Megatron's chunkwise context parallelism, `halos` those
of FLA's convolution. `of_cudnn` names what cuDNN's summaries return.

                         transition, state         layout                   backward
  here                   M, H: S = M S_in + H      [HV,K,K], [HV,K,V]       dM = M', dH
  FLA, Megatron packed   hm: H then M in a row     [HV,K,V+K]               dH then M'
  Megatron unpacked      transition, state_update  [HV,K,K], [HV,K,V]       transition,
                                                                            local_state_grad
  cuDNN (1.32)           second, first result:     [N,HV,K,K], [N,HV,V,K]   M, dH'
                         X = X_in M' + H'
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

# A pass: names of the transition, of the state that it makes from zeros, of the merged state.
PASSES = {"fwd": ("M", "H", "S_in"), "bwd": ("dM", "dH", "dS_out")}


@dataclass
class Kept:
    """Tensors of this rank, by the names of PASSES, of the last forward and backward pass.

    M, dM [HV,K,K]; H, dH [HV,K,V]; S_in, dS_out [HV,K,V], or [HV,V,K] where the kernel lays states
    out so. H and M are zeros on a rank that sends nothing, and S_in is missing on one that receives
    nothing; `judge` looks at neither. `gathered`: what this rank got from all, in their order.
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


def _factor(k: Any, w: Any, g: Any, gk: Any) -> Any:
    """The matrix M [K,K] of a chunk: diag(exp2 of the last gate) - k' w. Keys k [L,K] beside
    gates gk [L,K] are decayed to the chunk's end already. Gates g [L] decay w here."""
    torch = import_module("torch")
    if gk is not None:
        return torch.diag(torch.exp2(gk[-1])) - k.T @ w
    g = k.new_zeros(len(k)) if g is None else g
    eye = torch.eye(k.shape[1], dtype=k.dtype, device=k.device)
    return torch.exp2(g[-1]) * eye - k.T @ (torch.exp2(g[-1] - g)[:, None] * w)


def _prefixes(form: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The chain of M of head 0. `factors` [n,K,K] of the chunks are made in fp64, rounded to fp32.
    `M` [n,K,K] is the kernel's, of the first 1 .. n of them. The first factor is the kernel's own M
    of one chunk, from which its chain goes on."""
    torch = import_module("torch")
    hm = options["hm"]
    first, end = options["cu_seqlens"].tolist()
    chunk = options.get("chunk_size", 64)
    factors, M = [], []
    for t in range(first, end, chunk):
        last = min(t + chunk, end)
        rows = (options.get(name) for name in ("k", "w", "g", "gk"))
        factors.append(_factor(*(x if x is None else x[0, t:last, 0].double() for x in rows)))
        part = torch.zeros_like(hm)
        until = torch.tensor([first, last], dtype=torch.long, device=hm.device)
        form(**options | {"hm": part, "cu_seqlens": until})
        M.append(_halves(part)[0][0])
    factors[0] = M[0]
    return {"factors": torch.stack([f.float() for f in factors]).cpu(), "M": torch.stack(M).cpu()}


@contextmanager
def _replaced(module: Any, **own: Any) -> Iterator[None]:
    """Functions of a module are others within the block."""
    plain = {name: getattr(module, name) for name in own}
    try:
        for name, f in own.items():
            setattr(module, name, f)
        yield
    finally:
        for name, f in plain.items():
            setattr(module, name, f)


@contextmanager
def exchanges(module: str = "fla.ops.cp.chunk_delta_h", chain: bool = False) -> Iterator[Kept]:
    """Keeps what FLA's context parallelism exchanges within the block; nothing else changes.

    chain: M is formed again for every prefix of the rank's chunks. module: where
    `all_gather_into_tensor`, `chunk_cp_merge` and `chunk_cp_fwd_h` are looked up. ImportError: FLA
    is not installed; AttributeError: its version has no such functions (0.6 has). ValueError, in
    the call: the layout is zigzag, which has two chains."""
    where = import_module(module)
    names = ("all_gather_into_tensor", "chunk_cp_merge", "chunk_cp_fwd_h")
    gather, merge, form = [getattr(where, name) for name in names]
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

    with _replaced(where, **dict(zip(names, (gathering, merging, forming), strict=True))):
        yield kept


def _of_megatron(summary: Any) -> tuple[Any, Any]:
    """A summary of Megatron, packed or in parts, as (M, H) of one sequence."""
    if hasattr(summary, "packed"):
        M, H = _halves(summary.packed)
    else:
        M = summary.transition
        H = getattr(summary, "state_update", None)
        H = summary.local_state_grad if H is None else H
    if M.ndim == 4 and M.shape[0] != 1:
        raise ValueError(f"exchanges: {M.shape[0]} sequences side by side; one at a time is kept")
    return tuple(x[0] if x.ndim == 4 else x for x in (M, H))


@contextmanager
def megatron_exchanges(
    module: str = "megatron.core.ops.ssm.context_parallel.chunkwise",
    merging: str = "megatron.core.ops.ssm.context_parallel.gdp",
) -> Iterator[Kept]:
    """Keeps what Megatron's chunkwise context parallelism exchanges within the block.

    module: where `_all_gather_forward_summary` and `_all_gather_backward_summary` are. merging:
    where `_build_initial_state` and `_build_final_state_grad` are, whose results are S_in and
    dS_out; "": they are not kept. ImportError, AttributeError: as of `exchanges`."""
    where = import_module(module)
    kept = Kept()

    def gathering(direction: str, gather: Any) -> Any:
        def of_ranks(summary: Any, *args: Any, **options: Any) -> Any:
            M, H, _ = PASSES[direction]
            kept.rank[M], kept.rank[H] = (x.clone() for x in _of_megatron(summary))
            kept.calls += 1
            return gather(summary, *args, **options)

        return of_ranks

    def building(name: str, at: int, build: Any) -> Any:
        def of_rank(*args: Any, **options: Any) -> Any:
            made = build(*args, **options)
            kept.rank[name] = made[at].clone()
            return made

        return of_rank

    gathers = {
        f"_all_gather_{of}_summary": gathering(by, getattr(where, f"_all_gather_{of}_summary"))
        for of, by in (("forward", "fwd"), ("backward", "bwd"))
    }
    with ExitStack() as stack:
        stack.enter_context(_replaced(where, **gathers))
        if merging:
            merges = import_module(merging)
            built = {
                name: building(of, at, getattr(merges, name))
                for name, of, at in (
                    ("_build_initial_state", "S_in", 0),
                    ("_build_final_state_grad", "dS_out", -1),
                )
            }
            stack.enter_context(_replaced(merges, **built))
        yield kept


def of_cudnn(forward: Any = None, backward: Any = None) -> dict[str, Any]:
    """Tensors of this rank, by the names of PASSES, from what cuDNN's `.._summary` returned, and
    `.._summary_bwd` with output_transition=True. Each is (state [N,HV,V,K], transition
    [N,HV,K,K]) of the rank's N sequences. The last goes on to the next rank, the first one back.
    ValueError: no transition, which `output_transition=False` leaves out."""
    found = {}
    for name, made, at in (("fwd", forward, -1), ("bwd", backward, 0)):
        if made is None:
            continue
        M, H, _ = PASSES[name]
        if not isinstance(made, tuple) or made[1].ndim != 4:
            raise ValueError(f"exchanges: of cuDNN {name}: no transition: output_transition=True")
        found[H], found[M] = (x[at].swapaxes(-1, -2) for x in made)
    return found


@dataclass
class Halos:
    """Rows of this rank's convolutions, [W-1,D] each, a call after the other.

    `forward`: (the last rows, as sent; the rows received from the rank before). `backward`: (the
    gradient of received rows, as sent; the gradient received from the rank behind)."""

    forward: list[tuple[Any, Any]] = field(default_factory=list)
    backward: list[tuple[Any, Any]] = field(default_factory=list)

    def faults(self, group: Any = None) -> list[str]:
        """Calls in which a rank got other bits than its neighbour sent, or any where it has none;
        on the first rank, [] on the others."""
        dist = import_module("torch.distributed")
        parts: list[Any] = [None] * dist.get_world_size(group)
        mine = [
            [tuple(x.detach().cpu() for x in pair) for pair in way]
            for way in (self.forward, self.backward)
        ]
        dist.all_gather_object(parts, mine, group=group)
        return [] if dist.get_rank(group) else halo_faults(parts)


def halo_faults(parts: list[Any]) -> list[str]:
    """The same of [rank][forward, backward][call] (sent, got)."""
    found = []
    for way, name, by in ((0, "forward", -1), (1, "backward", 1)):
        for call in range(len(parts[0][way])):
            for rank, mine in enumerate(parts):
                got = mine[way][call][1]
                there = 0 <= rank + by < len(parts)
                want = parts[rank + by][way][call][0] if there else got * 0
                if got.shape != want.shape or not bool((got == want).all()):
                    whose = f"what rank {rank + by} sent" if there else "zeros"
                    found.append(f"{name} call {call}: rank {rank} did not get {whose}")
    return found


@contextmanager
def halos(module: str = "fla.modules.causal_conv1d.cp") -> Iterator[Halos]:
    """Keeps what ranks of FLA's causal convolution exchange within the block. module: where
    `conv_cp_send_recv_fwd` and `conv_cp_send_recv_bwd` are looked up. Layout zigzag exchanges
    otherwise and leaves both lists empty."""
    where = import_module(module)
    kept = Halos()

    def keeping(way: list[Any], send: Any) -> Any:
        def sending(rows: Any, *args: Any, **options: Any) -> Any:
            sent = rows.clone()
            got = send(rows, *args, **options)
            way.append((sent, got.clone()))
            return got

        return sending

    forward = keeping(kept.forward, where.conv_cp_send_recv_fwd)
    backward = keeping(kept.backward, where.conv_cp_send_recv_bwd)
    with _replaced(where, conv_cp_send_recv_fwd=forward, conv_cp_send_recv_bwd=backward):
        yield kept
