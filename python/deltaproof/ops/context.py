"""Context parallelism: which rank has which tokens, and what ranks reach each other by.

    from deltaproof.ops import cp_context
    o, _ = chunk_kda(q, k, v, g, beta, cp_context=cp_context(group, cu_seqlens, "zigzag"))

`cp_context=` of a function takes one of these, FLA's object (`build_cp_context`), or a process
group of PyTorch. Each rank passes and gets its own tokens, in their order. Ranks on CPUs meet by
the group itself (gloo). Ranks on CUDA devices meet by an NCCL communicator, which the first call of
a group makes. A gradient of a parameter (A_log, dt_bias, weight, bias) is the sum over all ranks on
rank 0, and zeros elsewhere. So a trainer's sum over the group is right."""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import kernels as c
from .checks import need, refuse

LAYOUTS = ("contiguous", "zigzag", "sequence-zigzag")
KEPT = 4096
LIMIT_S = 600.0  # until a rank on a device that nobody answers ends


@dataclass(frozen=True)
class Context:
    """How the tokens of all ranks lie: see cp_context."""

    group: Any
    cu_seqlens: tuple[int, ...] | None
    layout: str
    windows: bool = False


def cp_context(
    group: Any,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    layout: str = "contiguous",
    windows: bool = False,
) -> Context:
    """The context of the tokens of all ranks of `group`. With cu_seqlens [N+1] they are packed
    sequences, else rows of a batch, each of which is cut by itself. The layout is one of:

    - contiguous: N ranks, N equal parts; rank r has part r
    - zigzag: 2 N equal parts; rank r has the r-th, then the r-th from the end
    - sequence-zigzag: zigzag in every sequence (Megatron's packed sequences)

    windows: forwards of the fast path store states into each other's device memory. Ranks are on
    one host with a device each, their layout is contiguous; elsewhere they gather. All ranks make
    the same calls, `clear_plans` too, which waits for them. The bits are those of a gather."""
    need(layout in LAYOUTS, "layout", f"{layout!r} is none of {LAYOUTS}")
    if cu_seqlens is None:
        return Context(group, None, layout, windows)
    numbers = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens
    return Context(group, tuple(map(int, numbers)), layout, windows)


@dataclass(frozen=True)
class Ranks:
    """One rank's share of one partition: what plans are made of."""

    group: Any
    rank: int
    N: int
    cu: tuple[int, ...]
    cut: tuple[int, ...]  # () where rank r owns the r-th of N equal parts
    owner: tuple[int, ...]
    windows: bool = False

    @property
    def tokens(self) -> int:
        if not self.cut:
            return self.cu[-1] // self.N
        ends = zip(self.cut, self.cut[1:], self.owner, strict=False)
        return sum(b - a for a, b, who in ends if who == self.rank)

    def owners(self) -> Any:
        """dpg_owners, which reads arrays that it holds on to."""
        if not self.cut:
            return c.dpg_owners()
        cut = (ctypes.c_int64 * len(self.cut))(*self.cut)
        owner = (ctypes.c_int * len(self.owner))(*self.owner)
        made = c.dpg_owners(
            parts=len(owner), cut=ctypes.addressof(cut), owner=ctypes.addressof(owner)
        )
        made.keep = cut, owner
        return made


def _cut(units: list[tuple[int, int]], N: int, zigzag: bool) -> tuple[list[int], list[int]]:
    """Each unit of tokens [a, b) in N equal parts, or 2N that go forth and back."""
    each = 2 * N if zigzag else N
    cut, owner = [0], []
    for a, b in units:
        if (b - a) % each:
            raise ValueError(
                f"cp_context: {b - a} tokens do not divide by {each}, parts of {N} ranks"
            )
        for i in range(each if b > a else 0):
            cut.append(a + (b - a) // each * (i + 1))
            owner.append(min(i, each - 1 - i) if zigzag else i)
    return cut, owner


# ---- which rank has what ----------------------------------------------------------------------

_known: OrderedDict[int, Ranks] = OrderedDict()
_ids: dict[Any, int] = {}
_lock = threading.Lock()


def ranks(number: int) -> Ranks | None:
    """The partition that number_of named, None for 0."""
    return _known[number] if number else None


def number_of(given: Any, cu_seqlens: Tensor | None, B: int, L: int) -> int:
    """A number for what `cp_context` says of B rows of L tokens; 0: there is one rank."""
    context = _context(given, cu_seqlens)
    group, flat = context.group, context.cu_seqlens
    rank, N = dist.get_rank(group), dist.get_world_size(group)
    need(rank >= 0, "cp_context", "this rank is not of its group")
    if flat is None:
        flat = tuple(range(0, B * L * N + 1, L * N))
    else:
        need(B == 1, "cu_seqlens", "goes with a batch of 1: flatten variable-length inputs first")
    key = (id(group), flat, context.layout, context.windows, B)
    with _lock:
        number = _ids.get(key)
        if number is None:
            number = _ids[key] = len(_ids) + 1
            _known[number] = _ranks(group, rank, N, flat, context, B)
    found = _known[number]
    need(found.tokens == B * L, "q", f"has {L} tokens where the rank has {found.tokens // B}")
    return number


def _ranks(group: Any, rank: int, N: int, cu: tuple[int, ...], context: Context, B: int) -> Ranks:
    if len(_ids) > KEPT:
        raise RuntimeError(
            f"deltaproof.ops: more than {KEPT} partitions: clear_plans() forgets all"
        )
    rows = list(zip(cu, cu[1:], strict=False))
    whole = context.cu_seqlens is not None and context.layout != "sequence-zigzag"
    zigzag = context.layout != "contiguous"
    cut, owner = _cut([(0, cu[-1])] if whole else rows, N, zigzag)
    if (whole or B == 1) and not zigzag:
        return Ranks(group, rank, N, cu, (), (), context.windows)
    return Ranks(group, rank, N, cu, tuple(cut), tuple(owner))


def forget() -> None:
    with _lock:
        _ids.clear()
        _known.clear()


def _context(given: Any, cu_seqlens: Tensor | None) -> Context:
    if isinstance(given, Context):
        return given
    if isinstance(given, dist.ProcessGroup):
        return cp_context(given, cu_seqlens)
    group = getattr(given, "group", None)
    refuse(
        isinstance(group, dist.ProcessGroup) and hasattr(given, "is_first_rank"),
        f"cp_context of {type(given).__name__}",
        "it is none of cp_context(..), FLA's object and a process group",
    )
    found = getattr(given, "_deltaproof_context", None)
    if found is None:
        found = given._deltaproof_context = _of_fla(given)
    return found


def _of_fla(given: Any) -> Context:
    """FLA's object knows this rank's sequences alone: each tells the others where its own begin."""
    zigzag = given.layout == "zigzag"
    local = given.cu_seqlens_cpu if given.cu_seqlens_cpu is not None else given.cu_seqlens
    begins, L = local.tolist()[:-1], int(local[-1])
    firsts = given.is_first_by_part if zigzag else (given.is_first_rank,)
    N, rank = dist.get_world_size(given.group), dist.get_rank(given.group)
    slots = (rank, 2 * N - 1 - rank) if zigzag else (rank,)
    part = L // len(slots)
    own = []
    for i, (slot, first) in enumerate(zip(slots, firsts, strict=True)):
        own += [slot * part + b - i * part for b in begins if i * part < b < (i + 1) * part]
        own += [slot * part] if first else []
    every: list[Any] = [None] * N
    dist.all_gather_object(every, own, group=given.group)
    cu = sorted({b for each in every for b in each} | {L * N})
    return Context(given.group, tuple(cu), "zigzag" if zigzag else "contiguous")


# ---- what they reach each other by ------------------------------------------------------------

_comms: dict[Any, Any] = {}
FLOATS = ctypes.c_float


def communicator(r: Ranks | None, kind: str, index: int) -> int | None:
    """Address of the dpg_comm of a group, which its first call makes, and which stays, as the group
    does that its key is of."""
    if r is None or r.N == 1:
        return None
    key = (id(r.group), kind, index)
    if key not in _comms:
        _comms[key] = _by_group(r) if kind == "cpu" else _by_nccl(r, kind, index)
    return ctypes.addressof(_comms[key])


def _by_nccl(r: Ranks, kind: str, index: int) -> Any:
    lib, err, made = c.library(kind), c.dp_err(), c.dpg_comm()
    name = ctypes.create_string_buffer(c.COMM_ID)
    if r.rank == 0:
        c.succeed(lib.dpg_comm_id(name, ctypes.addressof(err)), err)
    said = [name.raw]
    dist.broadcast_object_list(said, src=dist.get_global_rank(r.group, 0), group=r.group)
    at = ctypes.addressof(made), said[0], r.rank, r.N, index, LIMIT_S, ctypes.addressof(err)
    c.succeed(lib.dpg_comm_apart(*at), err)
    made.keep = r.group
    return made


def _by_group(r: Ranks) -> Any:
    """Gathers by the process group: of tensors of the host."""
    group, N = r.group, r.N

    def gather(_: Any, send: int, recv: int, count: int, stream: Any, err: int) -> int:
        return _told(err, lambda: _gather(send, recv, count, N, group))

    def wait(_: Any, stream: Any, err: int) -> int:
        return _told(err, lambda: dist.barrier(group))

    made = c.dpg_comm(rank=r.rank, N=N)
    made.all_gather, made.wait = c.GATHER(gather), c.WAIT(wait)
    made.keep = group
    return made


def _gather(send: int, recv: int, count: int, N: int, group: Any) -> None:
    if count:
        own = torch.frombuffer((FLOATS * count).from_address(send), dtype=torch.float32)
        every = torch.frombuffer((FLOATS * (count * N)).from_address(recv), dtype=torch.float32)
        dist.all_gather_into_tensor(every, own.clone(), group=group)


def _told(err: int, f: Any) -> int:
    try:
        f()
    except Exception as e:
        said = c.dp_err.from_address(err)
        said.code, said.msg = c.DEVICE, f"between ranks: {e}".encode()[:1000]
        return c.DEVICE
    return c.OK


def of_rank_0(r: Ranks | None, *sums: Tensor) -> None:
    """Sums over ranks, which all have, stay on rank 0."""
    if r is not None and r.rank:
        for x in sums:
            x.zero_()
