"""Which cases and runs a reader should see first."""

import re
from collections.abc import Iterable
from functools import lru_cache

from read.record import NO_RANKS, NO_STAGES, Case, Record, Run, tensor
from say.names import bases_of, finite, formats_of, in_order


def is_real(case: Case) -> bool:
    """Real activations come from a tensor file; generated inputs name their formula."""
    return bool(
        re.search(
            r"safetensors|kda-lm|real (head|activ)|trained",
            " ".join(str(case.get(k) or "") for k in ("source", "data", "reason")),
        )
    )


@lru_cache(maxsize=1)
def judged_recurrences(rec: Record) -> list[Case]:
    return [
        c
        for c in rec.cases.values()
        if c["op"] not in NO_STAGES and any(r["tensors"] for r in rec.of(c["name"]))
    ]


@lru_cache(maxsize=1)
def heads(rec: Record) -> list[Case]:
    """Recurrence cases that the long-range figures show: real heads, or else those with the most
    ranks. Most sensitive to the chain first."""
    cs = [c for c in judged_recurrences(rec) if not without_error(rec, c)]
    chosen = [c for c in cs if is_real(c)]
    if not chosen:
        most = max(
            (
                len(formats_of(rec.of(c["name"]))) * max(r["ranks"] for r in rec.of(c["name"]))
                for c in cs
            ),
            default=0,
        )
        chosen = [
            c
            for c in cs
            if len(formats_of(rec.of(c["name"]))) * max(r["ranks"] for r in rec.of(c["name"]))
            == most
        ][:2]
    return sorted(chosen, key=lambda c: -chain_sensitivity(rec, c["name"]))


def without_error(rec: Record, case: Case) -> bool:
    """Every entry of every run equals the truth."""
    e = [t.get("rel_fro") for r in rec.of(case["name"]) for t in r["tensors"]]
    return bool(e) and all(x == 0 for x in e)


def chain_sensitivity(rec: Record, case: str) -> float:
    """Largest over smallest error of S_in between chain formats (fp64 apart) at the most ranks,
    over the base policies."""
    n = top_ranks(rec, case)
    best = 1.0
    for base in bases_of(rec.of(case)):
        e = [
            tensor(r, "S_in")["rel_fro"]
            for r in rec.of(case, ranks=n, base=base)
            if tensor(r, "S_in") and r["policy"].get("chain") != "fp64"
        ]
        e = [x for x in e if finite(x) and x > 0]
        best = max([best] + ([max(e) / min(e)] if e else []))
    return best


def top_ranks(rec: Record, case: str) -> int:
    return max((r["ranks"] for r in rec.of(case) if r["tensors"]), default=0)


def first_merge(rec: Record, case: str) -> str | None:
    ms = in_order(
        [r["policy"]["merge"] for r in rec.of(case) if r["tensors"] and r["policy"].get("merge")],
        ("allgather", "ring"),
    )
    return ms[0] if ms else None


def one_per_format(rec: Record, case: str, ranks: int, base: str) -> dict[str, Run]:
    """{format: run} of one case, rank count and base, in the first merge order, that has
    tensors."""
    merge = first_merge(rec, case)
    runs = [
        r
        for r in rec.of(case, ranks=ranks, base=base)
        if r["tensors"] and r["policy"].get("merge") == merge
    ]
    by = {r["policy"].get("chain"): r for r in reversed(runs)}
    return {f: by[f] for f in formats_of(runs)}


REGIMES = ("reflect", "subspace", "corr", "slow", "mixed", "mild", "strong")


def chain_cases(rec: Record) -> list[Case]:
    """Cases of the M chain alone: widths with the longest chains first, within a width in the order
    above (those that forget least first)."""
    cs = [
        c
        for c in rec.cases.values()
        if c["op"] in NO_RANKS and any(r["chain"] for r in rec.of(c["name"]))
    ]
    longest = {}
    for c in cs:
        n = max(p["chunks"] for r in rec.of(c["name"]) for p in r["chain"])
        longest[c.get("K")] = max(n, longest.get(c.get("K"), 0))
    place = lambda c: REGIMES.index(c["regime"]) if c.get("regime") in REGIMES else len(REGIMES)
    return sorted(cs, key=lambda c: (-longest[c.get("K")], c.get("K") or 0, place(c)))


def chain_title(case: Case) -> str:
    name = case.get("regime") or case["name"]
    return f"{name}, K = {case['K']}" if case.get("K") else name


def tensor_order(runs: Iterable[Run]) -> list[str]:
    """Names of all tensors in the order in which the fullest runs list them: the pipeline's."""
    fullest = sorted(runs, key=lambda r: -len(r["tensors"]))
    return list(dict.fromkeys(t["name"] for r in fullest for t in r["tensors"]))


def gradients(runs: Iterable[Run]) -> list[str]:
    """Gradients that have tokens."""
    some = [t["name"] for r in runs for t in r["tensors"] if t.get("windows")]
    return [x for x in dict.fromkeys(some) if x.startswith("d")]
