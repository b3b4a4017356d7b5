"""`deltaproof cp-check`: compare a function on one rank and on N, and name the difference.

    torchrun --nproc-per-node 4 -m deltaproof.cp_check my.py:attention --layout zigzag

    def attention(q, k, v, g, beta, cu_seqlens, group):
        context = build_cp_context(cu_seqlens, group) if group else None   # FLA's, for example
        return chunk_kda(q, k, v, g, beta, cp_context=context,
                         cu_seqlens=None if group else cu_seqlens)[0]

The function gets this rank's tokens [1,T,H,..] as --layout says, the bounds of all sequences and
the process group, and returns o. The group is None where one rank has all tokens. Both results are
judged against the truth, with the gradients of autograd (--forward: without). With a gate in the
kernel (--gate) the function may take A_log and dt_bias; their gradients are summed over the ranks.
Verdicts:

    right      both pass; the text says whether the bits are equal
    alone      wrong on one rank already
    layout     the ranks' result is one rank's with the tokens in another layout, or other bounds
    exchange   wrong where a sequence crosses ranks; the text says if no state crosses
    rounding   near one rank's result, but beyond the limits of --base; the text names a format of
               the chain of M that would explain it
    ranks      wrong, and none of these
    calls      the first call is right; one with the same inputs, or with v and do negated, is not
    untold     the judge could not judge

Exit status 0: right; 1: any other; 2: it could not be told. Ranks on CPUs meet over gloo."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .judging import Judgement, judge
from .records import NOT_JUDGED
from .tensors import copy_of
from .vocabulary import BETAS, GATES

if TYPE_CHECKING:
    import torch

LAYOUTS = ("contiguous", "zigzag", "sequence-zigzag")
NAMES = ("q", "k", "v", "g", "beta")
PARAMETERS = ("A_log", "dt_bias")  # whole on every rank; their gradients are sums over ranks
CALLED = ("with the same inputs", "with v and do negated")
CLAIMS = ("tf32x3", "tf32", "tf32rz", "bf16")
NEAR = 0.05  # of the largest number: what rounding may be, and another order of tokens is not
SAME = 0.01  # a hypothesis that holds leaves less than this, of the largest number
Tensors = dict[str, Any]


def places(cu: list[int], N: int, layout: str) -> list[list[int]]:
    """Which tokens each rank has, in its order."""
    units = list(zip(cu, cu[1:], strict=False)) if layout == "sequence-zigzag" else [(0, cu[-1])]
    each = N if layout == "contiguous" else 2 * N
    found: list[list[int]] = [[] for _ in range(N)]
    for a, b in units:
        part = (b - a) // each
        for rank in range(N):
            for i in (rank,) if each == N else (rank, each - 1 - rank):
                found[rank] += range(a + i * part, a + (i + 1) * part)
    return found


@dataclass
class Ranks:
    """The function, the inputs of all tokens, and how one rank and all are asked."""

    function: Callable[..., Any]
    inputs: Tensors
    do: Any
    cu: list[int]
    layout: str
    backward: bool
    group: Any
    rank: int
    N: int

    def call(self, inputs: Tensors, do: Any, cu: list[int], group: Any) -> Tensors:
        import torch

        x = {n: t.detach().clone().requires_grad_(self.backward) for n, t in inputs.items()}
        known = x | {"cu_seqlens": torch.tensor(cu, device=do.device), "group": group}
        wanted = inspect.signature(self.function).parameters
        result = self.function(**{n: t for n, t in known.items() if n in wanted})
        o = result[0] if isinstance(result, tuple) else result
        found = {"o": copy_of(o)}
        if self.backward:
            asked = [x[n] for n in x if n in wanted]
            grads = torch.autograd.grad(o, asked, do.to(o.dtype))
            found |= {f"d{n}": d for n, d in zip((n for n in x if n in wanted), grads, strict=True)}
        return found

    def rows(self, at: list[int]) -> Tensors:
        return {n: t if n in PARAMETERS else t[:, at] for n, t in self.inputs.items()}

    def alone(self, order: list[int] | None = None, cu: list[int] | None = None) -> Tensors:
        """One rank's result, of the tokens in that order."""
        at = order or list(range(self.cu[-1]))
        inputs = self.rows(at)
        return self.call(inputs, self.do[:, at], cu or self.cu, None)

    def together(self, sign: int = 1) -> list[Tensors] | None:
        """Each rank's own rows, on rank 0; every rank calls it. With sign -1 v and do are negated,
        and so are o and dv, which makes them those of sign 1."""
        import torch.distributed as dist

        at = places(self.cu, self.N, self.layout)[self.rank]
        x = self.rows(at)
        own = self.call(x | {"v": sign * x["v"]}, sign * self.do[:, at], self.cu, self.group)
        own |= {n: sign * own[n] for n in ("o", "dv") if n in own}
        every: list[Any] = [None] * self.N
        dist.all_gather_object(every, {n: t.cpu() for n, t in own.items()})
        return every if self.rank == 0 else None


def assembled(parts: list[Tensors], at: list[list[int]]) -> Tensors:
    """All tokens in their order, of rows that lie as `at` says."""
    import torch

    order = torch.tensor([t for rank in at for t in rank]).argsort()
    return {
        n: sum(p[n] for p in parts)
        if n[1:] in PARAMETERS
        else torch.cat([p[n] for p in parts], 1)[:, order]
        for n in parts[0]
    }


def off(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """How far each token of a is from b's, as a part of b's largest number."""
    a, b = (x.detach().double().cpu().flatten(2) for x in (a, b))
    return (a - b).abs().amax((0, 2)) / b.abs().max().clamp_min(1e-300)


@dataclass
class Finding:
    verdict: str
    text: str


class Diagnosis:
    """On rank 0: what both results and their verdicts say."""

    def __init__(self, ranks: Ranks, one: Tensors, calls: list[list[Tensors]], said: Any) -> None:
        self.ranks, self.one, self.judge = ranks, one, said
        self.parts, *self.again = calls
        self.at = places(ranks.cu, ranks.N, ranks.layout)
        self.many = assembled(self.parts, self.at)
        self.owner = {t: (r, i) for r, own in enumerate(self.at) for i, t in enumerate(own)}

    def where(self, token: int) -> str:
        rank, row = self.owner[token]
        return f"rank {rank}, token {token} (its row {row})"

    def worst(self) -> tuple[str, torch.Tensor]:
        """The first output whose rows differ by more than rounding, else the one furthest off."""
        each = {n: off(t, self.one[n]) for n, t in self.many.items() if n[1:] not in PARAMETERS}
        bad = [n for n in each if each[n].max() > NEAR]
        name = bad[0] if bad else max(each, key=lambda n: each[n].max().item())
        return name, each[name]

    def find(self) -> Finding:
        first = self.judge(self.one, None)
        if first.status == NOT_JUDGED:
            return Finding("untold", _failures(first))
        if not first.passed:
            return Finding("alone", f"one rank is wrong already: {_failures(first)}")
        judged = self.judge(self.many, None)
        name, rows = self.worst()
        if judged.passed and rows.max() <= NEAR:
            same = all((t == self.one[n].cpu()).all() for n, t in self.many.items())
            bits = "the bits of one rank" if same else f"{name} differs by {rows.max():.1e} at most"
            text = f"one rank and {self.ranks.N} pass; {bits}"
            return self.calls() or Finding("right", text)
        token = int((rows > NEAR).nonzero()[0]) if rows.max() > NEAR else int(rows.argmax())
        place = f"{name} at {self.where(token)}, by {rows[token]:.2g} of its largest number"
        if rows.max() <= NEAR:
            return self.sums() or self.rounding(place, judged)
        return self.layout(place) or self.exchange(name, rows, place)

    def calls(self) -> Finding | None:
        """Is a further call wrong, where the first is right?"""
        for parts, how in zip(self.again, CALLED, strict=True):
            many = assembled(parts, self.at)
            if all((t == self.many[n]).all() for n, t in many.items()):
                continue
            judged = self.judge(many, None)
            if not judged.passed:
                return Finding("calls", f"called again {how}: {_failures(judged)}")
        return None

    def sums(self) -> Finding | None:
        """Is a parameter's gradient, summed over the ranks, another than one rank's?"""

        def near(t: Any, name: str) -> bool:
            whole = self.one[name].cpu()
            return bool((t - whole).abs().max() <= NEAR * whole.abs().max())

        for name in (n for n in self.many if n[1:] in PARAMETERS):
            if near(self.many[name], name):
                continue
            if all(near(p[name], name) for p in self.parts):
                text = "is the whole sum on every rank: a sum over ranks has it so many times"
            else:
                text = "of the ranks does not add up to one rank's"
            return Finding("exchange", f"{name} {text}; everything else is right")
        return None

    def rounding(self, place: str, judged: Judgement) -> Finding:
        text = f"furthest from one rank: {place}; {_failures(judged)}"
        for claim in CLAIMS:
            if self.judge(self.many, claim).passed:
                return Finding("rounding", f"{text}; explained by a chain of M in {claim}")
        return Finding("rounding", f"{text}; no format of the chain of M explains it")

    def matches(self, whole: Tensors, at: list[list[int]]) -> bool:
        return all(
            bool((off(p["o"], whole["o"][:, own]) < SAME).all())
            for p, own in zip(self.parts, at, strict=True)
        )

    def layout(self, place: str) -> Finding | None:
        """Would one rank compute this, if tokens lay otherwise?"""
        r = self.ranks
        given = [t for own in self.at for t in own]
        for other in (x for x in LAYOUTS if x != r.layout and _divides(r.cu, r.N, x)):
            at = places(r.cu, r.N, other)
            if self.matches(self.one, at):
                text = f"the function's rows come as {other}, not as {r.layout}"
                return Finding("layout", f"{text}; first: {place}")
            # rank r's rows, taken for those of the other layout
            order = [0] * len(given)
            for have, take in zip(given, (t for own in at for t in own), strict=True):
                order[take] = have
            if self.matches(r.alone(order), at):
                text = f"the function takes its rows for {other}, and they are {r.layout}"
                return Finding("layout", f"{text}; first: {place}")
        if len(r.cu) > 2 and self.matches(r.alone(cu=[0, r.cu[-1]]), self.at):
            text = "on several ranks the function takes all sequences for one"
            return Finding("layout", f"{text}; first: {place}")
        return None

    def starts(self) -> list[int]:
        """Where rows of a rank go on that are not the next token."""
        return sorted(
            t for own in self.at for i, t in enumerate(own) if i == 0 or own[i - 1] != t - 1
        )

    def exchange(self, name: str, rows: torch.Tensor, place: str) -> Finding:
        r = self.ranks
        cut = sorted({*r.cu, *self.starts()})
        if self.matches(r.alone(cu=cut), self.at):
            return Finding("exchange", f"nothing crosses from rank to rank; first: {place}")
        reached = set()
        for a, b in zip(r.cu, r.cu[1:], strict=False):
            inside = [t for t in self.starts() if a < t < b]
            if inside:
                reached |= set(range(a, b) if name != "o" else range(inside[0], b))
        wrong = set((rows > NEAR).nonzero().flatten().tolist())
        if wrong <= reached:
            text = f"{len(wrong)} tokens, all of sequences that several ranks share"
            return Finding("exchange", f"{text}; first: {place}")
        first = self.where(min(wrong - reached))
        text = f"tokens that need no other rank are wrong, first {name} at {first}"
        return Finding("ranks", f"{text}; first of all: {place}")


def _divides(cu: list[int], N: int, layout: str) -> bool:
    units = zip(cu, cu[1:], strict=False) if layout == "sequence-zigzag" else [(0, cu[-1])]
    return all((b - a) % (N if layout == "contiguous" else 2 * N) == 0 for a, b in units)


def _failures(found: Judgement) -> str:
    said = found.failures()
    if said:
        return "; ".join(x.replace(", rank 0", "") for x in said[:4])  # judged as one rank's
    return found.text.strip().splitlines()[-1] if found.text.strip() else "not judged"


# ---- the command ------------------------------------------------------------------------------


def function_of(spec: str) -> Callable[..., Any]:
    """The function that PATH.py:NAME or MODULE:NAME names."""
    where, _, name = spec.rpartition(":")
    if not where:
        raise SystemExit(f"cp-check: {spec}: give FILE.py:FUNCTION or MODULE:FUNCTION")
    if where.endswith(".py"):
        path = Path(where)
        if not path.exists():
            raise SystemExit(f"cp-check: {where}: no such file")
        sys.path.insert(0, str(path.parent))
        found = importlib.util.spec_from_file_location(path.stem, path)
        assert found is not None and found.loader is not None
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
    else:
        module = importlib.import_module(where)
    if not hasattr(module, name):
        raise SystemExit(f"cp-check: {where} has no {name}")
    return getattr(module, name)


def bounds(T: int, N: int) -> list[int]:
    """One sequence within a rank, one that all ranks share, one within a rank; each a multiple of
    2N tokens."""
    short = max(T // 8 // (2 * N), 1) * 2 * N
    return [0, short, T - short, T]


def drawn(args: argparse.Namespace, N: int, device: str) -> tuple[Tensors, Any, list[int]]:
    import torch
    import torch.nn.functional as F

    T = -(-args.tokens * N // (16 * N)) * 16 * N
    H, HV, K, V = args.heads, args.heads, args.width, args.width
    draw = torch.Generator().manual_seed(args.seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(1, T, *shape, generator=draw)

    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[args.base]
    Kg = (K,) if args.model == "kda" else ()
    x = {
        "q": normal(H, K).to(dtype),
        "k": F.normalize(normal(H, K), dim=-1).to(dtype),
        "v": normal(HV, V).to(dtype),
        "g": normal(HV, *Kg),
        "beta": normal(HV),
    }
    if args.gate == "log":
        x["g"] = -0.1 * x["g"].abs()
    else:
        x |= {"A_log": normal(HV)[0, 0] / 2, "dt_bias": normal(HV, *Kg)[0, 0] - 3}
    if args.beta == "plain":
        x["beta"] = x["beta"].sigmoid()
    do = normal(HV, V).to(dtype)
    return {n: t.to(device) for n, t in x.items()}, do.to(device), bounds(T, N)


def arguments(given: list[str] | None) -> argparse.Namespace:
    a = argparse.ArgumentParser(
        prog="deltaproof cp-check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    a.add_argument("function", help="FILE.py:FUNCTION or MODULE:FUNCTION")
    a.add_argument("--layout", choices=LAYOUTS, default="contiguous", help="tokens of a rank")
    a.add_argument("--base", choices=("bf16", "fp32"), default="fp32", help="formats claimed")
    a.add_argument("--claim", choices=CLAIMS, help="format of the chain of M")
    a.add_argument("--model", choices=("kda", "gdn"), default="kda",
                   help="kda: g [T,HV,K]; gdn: g [T,HV]")  # fmt: skip
    a.add_argument("--gate", choices=GATES, default="log",
                   help="log: g is the log decay; else the kernel activates g")  # fmt: skip
    a.add_argument("--lower-bound", type=float, default=-5.0, help="of gate lower_bound")
    a.add_argument("--beta", choices=BETAS[:-1], default="plain",
                   help="the kernel's activation of beta")  # fmt: skip
    a.add_argument("--l2norm", action="store_true", help="the kernel normalises q and k")
    a.add_argument("--tokens", type=int, default=64, help="tokens of a rank")
    a.add_argument("--heads", type=int, default=2, help="value heads")
    a.add_argument("--width", type=int, default=32, help="K and V")
    a.add_argument("--seed", type=int, default=1, help="of the random inputs")
    a.add_argument("--forward", action="store_true", help="forward only, no gradients")
    a.add_argument("--cpu", action="store_true", help="ranks on CPUs, even if there are GPUs")
    return a.parse_args(given)


def main(given: list[str] | None = None) -> int:
    args = arguments(given)
    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        raise SystemExit("cp-check: needs PyTorch: pip install 'deltaproof[torch]'") from None
    if "RANK" not in os.environ:
        raise SystemExit(
            "cp-check: start it by torchrun: torchrun --nproc-per-node 2 -m deltaproof.cp_check .."
        )
    function = function_of(args.function)
    on_devices = torch.cuda.is_available() and not args.cpu
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if on_devices else "cpu"
    if on_devices:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_devices else "gloo")
    rank, N = dist.get_rank(), dist.get_world_size()
    if N < 2:
        raise SystemExit("cp-check: one rank alone has nobody to differ from")
    x, do, cu = drawn(args, N, device)
    ranks = Ranks(function, x, do, cu, args.layout, not args.forward, dist.group.WORLD, rank, N)
    try:
        calls = [ranks.together(sign) for sign in (1, 1, -1)]
    except Exception:
        print(f"cp-check: the function raised on rank {rank}", file=sys.stderr)
        raise
    status = 0
    parts = [c for c in calls if c is not None]
    if parts:
        found = Diagnosis(ranks, ranks.alone(), parts, _judge(args, x, do, cu, N)).find()
        print(f"cp-check: {found.verdict}: {found.text}", flush=True)
        status = {"right": 0, "untold": 2}.get(found.verdict, 1)
    told = [status]
    dist.broadcast_object_list(told, src=0)
    dist.barrier()
    return told[0]


def _judge(
    args: argparse.Namespace, x: Tensors, do: Any, cu: list[int], N: int
) -> Callable[[Tensors, str | None], Judgement]:
    inputs = {n: (t if n in PARAMETERS else t[0]).cpu() for n, t in x.items()}
    inputs["do"] = do[0].cpu()
    form = {"gate": args.gate, "beta": args.beta, "l2norm": args.l2norm}
    if args.gate == "lower_bound":
        form["lower_bound"] = args.lower_bound

    def judged(outputs: Tensors, claim: str | None) -> Judgement:
        said = claim or args.claim
        chain: Any = {"claim": said, "ranks": N} if said else {}
        return judge(
            inputs,
            {n: (t if n[1:] in PARAMETERS else t[0]).cpu() for n, t in outputs.items()},
            base=args.base,
            cu_seqlens=cu,
            **form,
            **chain,
        )

    return judged


def command(given: list[str] | None = None) -> None:
    """Ends this process: a rank whose peers are gone cannot take leave of them."""
    try:
        status = main(given)
    except SystemExit as e:
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
        status = e.code if isinstance(e.code, int) else 2 if e.code else 0
    except Exception:
        traceback.print_exc()
        status = 2
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    command()
