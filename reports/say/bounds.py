"""Sentences on how near errors come to their bounds, and on what was skipped or is unjudged."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable

from markupsafe import Markup

from read.record import NO_RANKS, NO_STAGES, Record, Run, Tensor
from say.chain import chain_errors
from say.markup import H, join, link
from say.names import finite, near, plural, sci, whole, words
from say.select import chain_cases, chain_title
from say.verdicts import vacuous, worst_rank


def bound_sentences(rec: Record, most: int = 4) -> list[Markup]:
    """Sentences about bounds: the passing tensors nearest to theirs (one a kind of case and
    tensor), loose bounds of the chain, passes that prove nothing."""
    near_ones = {}
    for r in rec.runs:
        for t in r["tensors"]:
            if t["verdict"] == "pass" and finite(t.get("ratio")) and not vacuous(t):
                k = (
                    "recurrence" if r["op"] not in NO_STAGES else r["op"],
                    t["name"] if r["op"] != "conv" else "",
                )
                if k not in near_ones or t["ratio"] > near_ones[k][1]["ratio"]:
                    near_ones[k] = (r, t)
    top = sorted(near_ones.values(), key=lambda rt: -rt[1]["ratio"])[:most]
    said = H("Nearest to a bound, of those that pass: {}.", join("; ", (nearest(*x) for x in top)))
    return [said] * bool(top) + [s for s in (chain_looseness(rec), empty_passes(rec)) if s]


def empty_passes(rec: Record, most: int = 4) -> Markup | None:
    """Passes that a reader must not count: recurrences and convolutions by case and base, tensors
    whose bound exceeds their own norm."""
    judged, empty = 0, {}
    for r in rec.runs:
        if r["op"] in NO_RANKS:
            continue
        for t in r["tensors"]:
            judged += t["verdict"] in ("pass", "fail")
            if vacuous(t):
                names = empty.setdefault((r["case"], r["policy"].get("base")), {})
                names[t["name"]] = max(
                    names.get(t["name"], 0.0), t["bound"] if finite(t["bound"]) else math.inf
                )
    count = sum(vacuous(t) for r in rec.runs if r["op"] not in NO_RANKS for t in r["tensors"])
    if not count:
        return None
    groups = sorted(empty.items(), key=lambda kv: -max(kv[1].values()))
    listed = "; ".join(
        case
        + (f" base {base}" if base else "")
        + f": {name_list(names)} (up to {sci(max(names.values()))})"
        for (case, base), names in groups[:most]
    )
    more = (
        f"; and {plural(len(groups) - most, 'more group')} of case and base"
        if len(groups) > most
        else ""
    )
    return H(
        "<b>{} of {} {} under a bound larger than the tensor itself</b>, which proves "
        "nothing; bound over norm in brackets: {}{}.",
        whole(count),
        plural(judged, "judged tensor"),
        "passes" if count == 1 else "pass",
        listed,
        more,
    )


def name_list(names: Iterable[str], most: int = 6) -> str:
    names = list(names)
    return ", ".join(names) if len(names) <= most else f"{len(names)} tensors"


def nearest(run: Run, t: Tensor) -> Markup:
    rank = worst_rank(t)
    return H(
        "{} at {} of it{} ({})",
        t["name"],
        near(t["ratio"]),
        f", rank {rank}" if rank is not None and run["ranks"] > 1 else "",
        link(run, run["id"]),
    )


def chain_looseness(rec: Record) -> Markup | None:
    loose = [
        (p["bound"] / p["rel"], c, f, p["chunks"])
        for c in chain_cases(rec)
        if c.get("regime") == "reflect"
        for f, (_, r) in chain_errors(rec, c).items()
        for p in r["chain"]
        if finite(p.get("bound")) and finite(p["rel"]) and p["rel"] > 0 and f != "fp64"
    ]
    if not loose:
        return None
    (lo, lc, lf, ln), (hi, hc, hf, hn) = (
        min(loose, key=lambda x: x[0]),
        max(loose, key=lambda x: x[0]),
    )
    return H(
        "Bounds of the M chain in reflect are {} times the error ({}, {}, {}) to {} times "
        "({}, {}, {}).",
        near(lo),
        chain_title(lc),
        words(lf),
        plural(ln, "chunk"),
        near(hi),
        chain_title(hc),
        words(hf),
        plural(hn, "chunk"),
    )


def unjudged_sentences(rec: Record) -> list[Markup]:
    out = []
    for verdict in ("skipped", "unjudged"):
        runs = Counter(
            r.get("why") or "no reason recorded"
            for r in rec.runs
            if r["verdict"] == verdict and not r["tensors"]
        )
        out += [H("{} {}: {}.", plural(n, "run"), verdict, why) for why, n in runs.most_common(4)]
        out += more_reasons(runs, 4)
        loose, other = defaultdict(list), Counter()
        for t in (t for r in rec.runs for t in r["tensors"] if t["verdict"] == verdict):
            if finite(t.get("bound")) and t["bound"] >= 1:
                loose[t["name"]].append(t["bound"])
            else:
                other[t["name"], t.get("why") or "no reason recorded"] += 1
        out += [
            H(
                "{} {} in {}: within its bound, but the bound is {} to {} times the tensor "
                "itself and proves nothing.",
                n,
                verdict,
                plural(len(b), "run"),
                near(min(b)),
                near(max(b)),
            )
            for n, b in sorted(loose.items(), key=lambda x: -len(x[1]))
        ]
        out += [
            H("{} {} in {}: {}.", name, verdict, plural(n, "run"), why)
            for (name, why), n in other.most_common(6)
        ]
        out += more_reasons(other, 6)
    return out


def more_reasons(counter: Counter, shown: int) -> list[Markup]:
    rest = len(counter) - shown
    return (
        [H("{}: see the details of the cases.", plural(rest, "further reason"))] if rest > 0 else []
    )
