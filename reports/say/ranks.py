"""Sentences on recurrences that are split over ranks, and the table of the chain formats."""

import math
from typing import Any

from markupsafe import Markup

from read.record import NO_STAGES, Case, Record, Run, tensor
from say.bounds import name_list
from say.markup import H, link
from say.names import bases_of, finite, near, plural, sci, whole, words
from say.select import (
    gradients,
    heads,
    judged_recurrences,
    one_per_format,
    top_ranks,
    without_error,
)


def rank_sentences(rec: Record) -> list[Markup]:
    out = []
    for c in heads(rec):
        out += ranking_sentences(rec, c)
    out += [s for c in heads(rec)[:1] for s in [effect_sentence(rec, c)] if s]
    out += two_ranks(rec)
    out += [s for c in heads(rec) for s in [cost_of_split(rec, c)] if s][:2]
    out += [s for c in heads(rec)[:1] for s in [volume(rec, c)] if s]
    out += [s for s in [exact_split(rec), exact_cases(rec), merge_orders(rec)] if s]
    return out


def exact_cases(rec: Record) -> Markup | None:
    """Cases on whose inputs nothing rounds: any error is a fault."""
    cs = [c for c in judged_recurrences(rec) if without_error(rec, c)]
    runs = [r for c in cs for r in rec.of(c["name"]) if r["tensors"]]
    formats = {r["policy"].get("chain") for r in runs} - {None}
    return (
        H(
            "{}: every entry of {} in {} equals the truth, over up to {} and in {} of the chain.",
            name_list([c["name"] for c in cs]),
            plural(sum(len(r["tensors"]) for r in runs), "tensor"),
            plural(len(runs), "run"),
            plural(max(r["ranks"] for r in runs), "rank"),
            plural(len(formats), "format"),
        )
        if cs
        else None
    )


def rel(run: Run, name: str) -> float | None:
    t = tensor(run, name)
    return t.get("rel_fro") if t else None


def excess(x: float | None, ref: float | None) -> str:
    """How much more than the reference: a factor from 2 on, else per cent."""
    if not finite(x) or not finite(ref) or ref <= 0:
        return "–"
    f = x / ref
    return (
        f"{near(f)} times"
        if f >= 2 or f < 0.5
        else "the same"
        if abs(f - 1) < 5e-4
        else f"{(f - 1) * 100:+.1f}%".replace("-", "\u2212")
    )


def ranking_sentences(rec: Record, case: Case) -> list[Markup]:
    """One sentence a base policy, on the effect of the chain's worst format on S_in, o and a
    gradient. All formats are in the tables of ranking()."""
    out, n = [], top_ranks(rec, case["name"])
    for base in bases_of(rec.of(case["name"])):
        runs = {
            f: r
            for f, r in one_per_format(rec, case["name"], n, base).items()
            if finite(rel(r, "S_in"))
        }
        if (
            n < 3
            or len(runs) < 2
            or base == "fp64"
            or all(r["verdict"] == "fail" for r in runs.values())
        ):  # what is wrong throughout says nothing about formats
            continue
        by = sorted(runs, key=lambda f: rel(runs[f], "S_in"))
        lo, hi = rel(runs[by[0]], "S_in"), rel(runs[by[-1]], "S_in")
        if hi <= lo * 1.01:
            out.append(
                H(
                    "{}, {} ranks, base {}: {} chain formats give the same S_in within 1% "
                    "({} to {}): the format of M does not matter on this head.",
                    link(runs[by[-1]], case["name"]),
                    n,
                    base,
                    "both" if len(by) == 2 else f"all {len(by)}",
                    sci(lo, 3),
                    sci(hi, 3),
                )
            )
            continue
        if worst_effect(runs, by[-1]):
            out.append(
                H(
                    "{}, {} ranks, base {}: {}",
                    link(runs[by[-1]], case["name"]),
                    n,
                    base,
                    worst_effect(runs, by[-1]),
                )
            )
    return out


def worst_effect(runs: dict[str, Run], bad: str) -> Markup | str:
    ref = runs.get("fp32")
    if ref is None or bad == "fp32":
        return ""
    parts = [f"S_in {excess(rel(runs[bad], 'S_in'), rel(ref, 'S_in'))}"]
    if finite(rel(runs[bad], "o")):
        parts.append(
            f"o {excess(rel(runs[bad], 'o'), rel(ref, 'o'))} ({sci(rel(ref, 'o'))} to "
            f"{sci(rel(runs[bad], 'o'))})"
        )
    g = max(
        (
            (rel(runs[bad], k) / rel(ref, k), k)
            for k in gradients(runs.values())
            if finite(rel(runs[bad], k)) and finite(rel(ref, k)) and rel(ref, k) > 0
        ),
        default=None,
    )
    if g:
        parts.append(
            f"{g[1]} {excess(rel(runs[bad], g[1]), rel(ref, g[1]))} ({sci(rel(ref, g[1]))} "
            f"to {sci(rel(runs[bad], g[1]))}, the most of the gradients)"
        )
    return H("<b>against the fp32 chain, {} costs</b> {}.", words(bad), ", ".join(parts))


def effect_sentence(rec: Record, case: Case) -> Markup | None:
    """The error of M that moves the state most on a head at the most ranks, beside its own relative
    size."""
    n = top_ranks(rec, case["name"])
    for base in ("fp32", "fp64", "bf16"):
        pts = [
            (p["effect"], p["rel"], p, f, r)
            for f, r in one_per_format(rec, case["name"], n, base).items()
            for p in r["chain"]
            if finite(p["rel"]) and finite(p.get("effect"))
        ]
        if pts:
            effect, e, p, f, r = max(pts, key=lambda x: x[0])
            return H(
                "{}, {} ranks, base {}: the error of M that moves the state most is that of "
                "rank {} (chain: {}): {} of M after {}, {} of the state (|dM S_in| / |S_in|).",
                link(r, case["name"]),
                n,
                base,
                p.get("rank", 0),
                words(f),
                sci(e),
                plural(p["chunks"], "chunk"),
                sci(effect),
            )
    return None


def two_ranks(rec: Record) -> list[Markup]:
    """With 2 ranks and no initial state S_in of rank 1 is H of rank 0. The record's numbers must
    then not depend on the chain."""
    same, differ = {}, []
    for name in rec.cases:
        for base in bases_of(rec.of(name)):
            runs = {
                f: r for f, r in one_per_format(rec, name, 2, base).items() if tensor(r, "S_in")
            }
            if len(runs) < 2:
                continue
            errs = [tensor(r, "S_in").get("rel_fro") for r in runs.values()]
            if len(set(map(str, errs))) == 1:
                same.setdefault(name, []).append((base, len(runs), errs[0]))
            else:
                differ.append((name, base, runs, [e for e in errs if finite(e)]))
    return [
        s
        for s in [
            two_ranks_sentence(rec, same),
            two_ranks_differ(differ, True),
            two_ranks_differ(differ, False),
        ]
        if s
    ]


def two_ranks_differ(differ: list[Any], started: bool, most: int = 4) -> Markup | None:
    """An initial state is what M of rank 0 can multiply; its gradient ds0 shows that the case has
    one."""
    some = [
        (name, base, errs)
        for name, base, runs, errs in differ
        if errs and any(tensor(r, "ds0") for r in runs.values()) == started
    ]
    if not some:
        return None
    listed = ", ".join(
        f"{n} base {b} {sci(min(e))} to {sci(max(e))}" for n, b, e in some[:most]
    ) + (f" and {len(some) - most} more" if len(some) > most else "")
    if started:
        return H(
            "With an initial state M of rank 0 counts with 2 ranks too: S_in depends on the "
            "format of the chain in {}.",
            listed,
        )
    return H(
        "2 ranks: S_in depends on the format of the chain in {}, although M of rank 0 has "
        "nothing to multiply unless the case has an initial state.",
        listed,
    )


def two_ranks_sentence(rec: Record, same: dict[str, Any]) -> Markup | None:
    if not same:
        return None
    order = [c["name"] for c in heads(rec) if c["name"] in same] or list(same)
    name = order[0]
    numbers = ", ".join(f"base {b} {sci(e, 3)}" for b, _, e in same[name])
    more = (
        f" The same holds in {plural(len(same) - 1, 'other case')} without an initial state."
        if len(same) > 1
        else ""
    )
    return H(
        "{}, 2 ranks: <b>M is never used: all {} chain formats give the same S_in</b> ({}).{}",
        name,
        same[name][0][1],
        numbers,
        more,
    )


def cost_of_split(rec: Record, case: Case) -> Markup | None:
    """Most ranks against one rank, fp32 chain, the base that kernels use."""
    n = top_ranks(rec, case["name"])
    base = next((b for b in ("bf16", "fp32") if one_per_format(rec, case["name"], 1, b)), None)
    one = next(iter(one_per_format(rec, case["name"], 1, base).values()), None) if base else None
    many = one_per_format(rec, case["name"], n, base).get("fp32") if base else None
    if not one or not many or n < 2 or "fail" in (one["verdict"], many["verdict"]):
        return None
    parts = [
        f"{t} {sci(rel(one, t))} to {sci(rel(many, t))} ({excess(rel(many, t), rel(one, t))})"
        for t in ["o"] + gradients([many])
        if finite(rel(one, t)) and finite(rel(many, t))
    ]
    return (
        H(
            "{}, base {}, fp32 chain, from 1 rank to {}: {}.",
            link(many, case["name"]),
            base,
            n,
            ", ".join(parts),
        )
        if parts
        else None
    )


def volume(rec: Record, case: Case) -> Markup | None:
    """Bytes, buffers and share of the time of the exchange of the most ranks."""
    run = max(
        (r for r in rec.of(case["name"]) if r.get("exchange")),
        key=lambda r: r["ranks"],
        default=None,
    )
    if run is None:
        return None
    x = run["exchange"]
    return H(
        "{}, {} ranks, {}: {} of {} bytes in one direction, a buffer of {} bytes a rank, {} bytes "
        "of entering state kept for the backward; predicted, it takes {} times what pre-scan and "
        "state pass take.",
        link(run, case["name"]),
        run["ranks"],
        run["policy"].get("merge", "allgather"),
        plural(x.get("messages", 0), "message"),
        whole(x["bytes"]),
        whole(x["buffer_bytes"]),
        whole(x.get("kept_bytes", 0)),
        near(x["share"]) if finite(x["share"]) else "–",
    )


def exact_split(rec: Record) -> Markup | None:
    runs = [
        r
        for r in rec.runs
        if r["policy"].get("base") == "fp64"
        and r["policy"].get("chain", "fp64") == "fp64"
        and r["ranks"] > 1
        and r["op"] not in NO_STAGES
    ]
    errs = [
        (t["rel_fro"], t["name"], r) for r in runs for t in r["tensors"] if finite(t.get("rel_fro"))
    ]
    if not errs:
        return None
    e, name, r = max(errs, key=lambda x: x[0])
    few, most = min(x["ranks"] for x in runs), max(x["ranks"] for x in runs)
    if e >= 1e-9:
        return H(
            "All fp64, split over ranks: relative error up to {} ({}, {}).",
            sci(e),
            name,
            link(r, r["id"]),
        )
    return H(
        "All fp64, {} ranks, {}: the largest relative error is {} ({}, {}): the split itself "
        "loses nothing.",
        few if few == most else f"{few} to {most}",
        plural(len({x["case"] for x in runs}), "case"),
        sci(e),
        name,
        link(r, r["id"]),
    )


def merge_orders(rec: Record) -> Markup | None:
    """all-gather against ring: how many pairs of runs agree in every error."""
    pairs = {}
    for r in rec.runs:
        m = r["policy"].get("merge")
        if m in ("allgather", "ring") and r["tensors"]:
            key = (
                r["case"],
                r["ranks"],
                r.get("backend"),
                *[(k, v) for k, v in sorted(r["policy"].items()) if k != "merge"],
            )
            pairs.setdefault(key, {})[m] = r
    both = [p for p in pairs.values() if len(p) == 2]
    if not both:
        return None
    same = sum(
        [t.get("rel_fro") for t in p["ring"]["tensors"]]
        == [t.get("rel_fro") for t in p["allgather"]["tensors"]]
        for p in both
    )
    return H(
        "Merging by ring and by all-gather gives identical errors in {} of {} of runs.",
        whole(same),
        plural(len(both), "pair"),
    )


def ranking(rec: Record, case: Case) -> list[Any]:
    """[(base, ranks, columns, [(format, run, [(error, excess over the fp32 chain or None)])])],
    formats by error of S_in; only bases where they differ."""
    out, n = [], top_ranks(rec, case["name"])
    for base in bases_of(rec.of(case["name"])):
        runs = one_per_format(rec, case["name"], n, base)
        cols = [
            t
            for t in ["S_in", "o"] + gradients(runs.values())
            if any(finite(rel(r, t)) for r in runs.values())
        ]
        states = [rel(r, "S_in") for r in runs.values() if finite(rel(r, "S_in"))]
        if n < 3 or len(states) < 2 or max(states) <= min(states) * 1.01:
            continue
        ref = runs.get("fp32")
        rows = [(f, runs[f], [_beside(runs[f], ref, t) for t in cols]) for f in _by_state(runs)]
        out.append((base, n, cols, rows))
    return out


def _by_state(runs: dict[str, Run]) -> list[str]:
    """Formats by error of S_in, those without a number last."""
    error = {f: rel(r, "S_in") for f, r in runs.items()}
    return sorted(runs, key=lambda f: error[f] if finite(error[f]) else math.inf)


def _beside(run: Run, ref: Run | None, name: str) -> tuple[float | None, float | None]:
    """(error, factor over that of the reference, or None)"""
    e, of = rel(run, name), rel(ref, name) if ref else None
    return e, e / of if finite(e) and finite(of) and of > 0 else None
