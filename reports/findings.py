"""What the record says, in sentences: each names case, policy and numbers, and is left out when its data are missing.

    findings(rec) -> [(heading, [sentence, ...])]     sentences are markup (markup.py): what comes from the record is escaped when H puts it in
    ranking(rec, case) -> table of the chain formats on one head at the most ranks
"""
import math
from collections import Counter, defaultdict

from markup import H, join
from record import tensor
from view import (FORMATS, GRADIENTS, TENSOR_ORDER, bases_of, by_draws, chain_cases, chain_title, finite, formats_of, heads, in_order, judged_recurrences, near, one_per_format, plural, sci, severity, top_ranks, vacuous, whole, without_error, words,
                  worst_rank, worst_tensor)


def link(run, text):
    return H('<a href="#run-{}">{}</a>', run["n"], text)


def findings(rec):
    groups = [("Failures", failures(rec)), ("The M chain alone", chain_sentences(rec)), ("Split over ranks", rank_sentences(rec)),
              ("How near to the bounds", bound_sentences(rec)), ("Skipped and unjudged", unjudged_sentences(rec))]
    return [(h, s) for h, s in groups if s]


# ---- failures ---------------------------------------------------------------------------------------------------------------------------

def failures(rec, most=8):
    bad = [r for r in rec.runs if r["verdict"] == "fail"]
    bad.sort(key=lambda r: severity(worst_tensor(r)) if worst_tensor(r) else (False, False, 0.0), reverse=True)
    out = [failure(r) for r in bad[:most]]
    if len(bad) > most:
        out.append(H("{} fail: see the table of verdicts.", plural(len(bad) - most, "more run")))
    return out


def failure(run):
    t = worst_tensor(run)
    where = H("{}: ", link(run, run["id"]))
    if "nothing rounds" in (run.get("why") or ""):               # an exact case says whose data stands where
        return where + run["why"] + "."
    bits = run.get("bits") or {}
    if bits.get("wrong") and bits.get("says"):
        where += H("<b>{}</b>. ", bits["says"])
        if t is None or t["verdict"] != "fail":
            return where + "Within its worst-case bound."
    if t is None or t["verdict"] != "fail" or not finite(t["ratio"]) or by_draws(t):
        t = next((t for t in run["tensors"] if t["verdict"] == "fail"), {})
        return where + (H("<b>{}</b>: ", t["name"]) if t else "") + (t.get("why") or run.get("why") or "no reason recorded") + "."
    rank = worst_rank(t)
    at = f" at rank {rank}" if rank is not None and run["ranks"] > 1 else ""
    return where + H("error of <b>{}</b> is {} times its bound{} (relative error {}).", t["name"], near(t["ratio"]), at, sci(t.get("rel_fro")))


# ---- the M chain alone ------------------------------------------------------------------------------------------------------------------

def chain_errors(rec, case):
    """{format: ({chunks: rel}, run)}"""
    return {f: ({p["chunks"]: p["rel"] for p in r["chain"]}, r) for f in formats_of(rec.of(case["name"]))
            for r in [next((r for r in rec.of(case["name"]) if r["policy"].get("chain") == f and r["chain"]), None)] if r}


def overtaking(a, b):
    """First chunk count from which a stays above b to the end of the common grid: (n, the count before it or None), or None if a ends below b."""
    ns = sorted(n for n in a if n in b and finite(a[n]) and finite(b[n]) and max(a[n], b[n]) > 0)
    above = [a[n] > b[n] for n in ns]
    if not above or not above[-1]:
        return None
    first = len(above) - 1
    while first > 0 and above[first - 1]:
        first -= 1
    return ns[first], ns[first - 1] if first else None


def overtake_sentence(case, errs, fast, slow):
    if fast not in errs or slow not in errs:
        return None
    (a, ra), (b, _) = errs[fast], errs[slow]
    hit = overtaking(a, b)
    if not hit:
        return None
    n, before = hit
    end = max(k for k in a if k in b and finite(a[k]) and finite(b[k]))
    tail = f", and reaches {sci(a[end])} against {sci(b[end])} at {whole(end)}" if end > n else ""
    here = link(ra, chain_title(case))
    if before is None:
        return H("{}: <b>{} is worse than {} from {} on</b>, the fewest measured ({} against {}){}.", here, words(fast), words(slow), plural(n, "chunk"), sci(a[n]), sci(b[n]), tail)
    return H("{}: <b>{} overtakes {} at {}</b> ({} against {}; at {} still {} against {}){}.", here, words(fast), words(slow), plural(n, "chunk"), sci(a[n]), sci(b[n]), whole(before), sci(a[before]), sci(b[before]),
             tail)


SLOPE_KINDS = ((0.5, "unbiased rounding"), (1.0, "a bias"))


def slope_kind(s):
    """Which law of math.md j.7 a slope over 16..256 chunks follows; within 0.1 of 0.5 or 1, else none."""
    return next((text for at, text in SLOPE_KINDS if abs(s - at) <= 0.1), None)


def growth(rec):
    """Table of how errors grow in the regime that neither stalls nor forgets: (cases, [(format, [(run, slope, law or None, (effective bits, place) or None)])]), a column a case; None where there is none."""
    cases = [(c, chain_errors(rec, c)) for c in chain_cases(rec) if c.get("regime") in ("reflect", None)]
    cases = [(c, e) for c, e in sorted(cases, key=lambda x: x[0].get("K") or 0) if any(finite(r.get("slope")) for _, r in e.values())]
    rows = [(f, [(e[f][1], e[f][1]["slope"], slope_kind(e[f][1]["slope"]), bits_of(e[f][1])) if f in e and finite(e[f][1].get("slope")) else None for _, e in cases])
            for f in in_order([f for _, e in cases for f in e], FORMATS)]
    return [c for c, _ in cases], [r for r in rows if any(r[1])]


def bits_of(run):
    """Effective bits (math.md j.7), where the record has them, and where the rounding takes place."""
    b = run.get("bits")
    if not b or not finite(b["effective"]):
        return None
    place = "truncated operands, biased" if b.get("biased") and finite(b.get("truncated")) else b["model"] + (", biased" if b.get("biased") else "")
    return b["effective"], place


def other_biases(with_errors):
    """Slopes of a bias where none is expected: formats that round to nearest, outside the regimes that stall or forget."""
    odd = [H("{} in {} ({:.2f})", words(f), link(r, chain_title(c)), r["slope"]) for c, e in with_errors if c.get("regime") in ("reflect", "subspace", "corr") for f, (_, r) in e.items()
           if f != "tf32rz" and finite(r.get("slope")) and slope_kind(r["slope"]) == "a bias"]
    return H("A slope near 1 although the format rounds to nearest: {}.", join(", ", odd)) if odd else None


def lost_sentence(case, errs):
    """Formats whose M ends wrong by more than M itself."""
    lost = [(f, e[max(e)], r) for f, (e, r) in errs.items() if finite(e[max(e)]) and e[max(e)] > 1.5]
    if not lost:
        return None
    p = max(lost[0][2]["chain"], key=lambda p: p["chunks"])
    norm = f" (|M|_F = {sci(p['norm'])})" if finite(p.get("norm")) else ""
    return H("{}: after {}{} M is lost, its error in units of its own norm being {}.", chain_title(case), plural(p["chunks"], "chunk"), norm,
             ", ".join(f"{near(x)} with {words(f)}" for f, x, _ in lost))


def vanished_sentence(rec, cases):
    """Regimes that forget: |M|_F at the end below 1e-6."""
    gone = []
    for c in cases:
        for f, (e, r) in chain_errors(rec, c).items():
            p = max(r["chain"], key=lambda p: p["chunks"])
            if finite(p.get("norm")) and p["norm"] < 1e-6:
                gone.append(f"{chain_title(c)} (|M|_F = {sci(p['norm'])} after {plural(p['chunks'], 'chunk')})")
                break
    return H("Where the state forgets, the format of M does not matter: {}.", "; ".join(gone)) if gone else None


def chain_sentences(rec):
    cases, out = chain_cases(rec), []
    with_errors = [(c, chain_errors(rec, c)) for c in cases]
    first = sorted(with_errors, key=lambda ce: (ce[0].get("regime") != "reflect", -max((n for e, _ in ce[1].values() for n in e), default=0)))
    hits = [s for c, e in first for s in [overtake_sentence(c, e, "tf32rz", "bf16")] if s]
    out += hits[:2] + ([also_overtakes(first)] if len(hits) > 2 else [])
    out += [s for s in [other_biases(with_errors)] if s]
    out += [s for c, e in with_errors for s in [lost_sentence(c, e)] if s]
    gone = vanished_sentence(rec, cases)
    return out + ([gone] if gone else [])


def also_overtakes(first):
    """The regimes that did not get a sentence of their own, by chunk count."""
    hits = [(c, overtaking(e["tf32rz"][0], e["bf16"][0])) for c, e in first if "tf32rz" in e and "bf16" in e]
    at = {}
    for c, hit in [h for h in hits if h[1]][2:]:
        at.setdefault(hit[0], []).append(chain_title(c))
    return H("It also does so {}.", "; ".join(f"at {plural(n, 'chunk')} in {', '.join(names)}" for n, names in sorted(at.items())))


# ---- split over ranks -------------------------------------------------------------------------------------------------------------------

def rank_sentences(rec):
    out = []
    for c in heads(rec):
        out += ranking_sentences(rec, c)
    out += [s for c in heads(rec)[:1] for s in [effect_sentence(rec, c)] if s]
    out += two_ranks(rec)
    out += [s for c in heads(rec) for s in [cost_of_split(rec, c)] if s][:2]
    out += [s for s in [exact_split(rec), exact_cases(rec), merge_orders(rec)] if s]
    return out


def exact_cases(rec):
    """Cases on whose inputs nothing rounds: any error is a fault."""
    cs = [c for c in judged_recurrences(rec) if without_error(rec, c)]
    runs = [r for c in cs for r in rec.of(c["name"]) if r["tensors"]]
    formats = {r["policy"].get("chain") for r in runs} - {None}
    return H("{}: every entry of {} in {} equals the truth, over up to {} and in {} of the chain.", name_list([c["name"] for c in cs]), plural(sum(len(r["tensors"]) for r in runs), "tensor"),
             plural(len(runs), "run"), plural(max(r["ranks"] for r in runs), "rank"), plural(len(formats), "format")) if cs else None


def rel(run, name):
    t = tensor(run, name)
    return t.get("rel_fro") if t else None


def excess(x, ref):
    """How much more than the reference: a factor from 2 on, else per cent."""
    if not finite(x) or not finite(ref) or ref <= 0:
        return "–"
    f = x / ref
    return f"{near(f)} times" if f >= 2 or f < 0.5 else "the same" if abs(f - 1) < 5e-4 else f"{(f - 1) * 100:+.1f}%".replace("-", "\u2212")


def ranking_sentences(rec, case):
    """One sentence a base policy: what the worst format of the chain does to S_in, o and a gradient; all formats are in the tables of ranking()."""
    out, n = [], top_ranks(rec, case["name"])
    for base in bases_of(rec.of(case["name"])):
        runs = {f: r for f, r in one_per_format(rec, case["name"], n, base).items() if finite(rel(r, "S_in"))}
        if n < 3 or len(runs) < 2 or base == "fp64" or all(r["verdict"] == "fail" for r in runs.values()):    # what is wrong throughout says nothing about formats
            continue
        by = sorted(runs, key=lambda f: rel(runs[f], "S_in"))
        lo, hi = rel(runs[by[0]], "S_in"), rel(runs[by[-1]], "S_in")
        if hi <= lo * 1.01:
            out.append(H("{}, {} ranks, base {}: {} chain formats give the same S_in within 1% ({} to {}): the format of M does not matter on this head.", link(runs[by[-1]], case["name"]), n, base,
                         "both" if len(by) == 2 else f"all {len(by)}", sci(lo, 3), sci(hi, 3)))
            continue
        if worst_effect(runs, by[-1]):
            out.append(H("{}, {} ranks, base {}: {}", link(runs[by[-1]], case["name"]), n, base, worst_effect(runs, by[-1])))
    return out


def worst_effect(runs, bad):
    ref = runs.get("fp32")
    if ref is None or bad == "fp32":
        return ""
    parts = [f"S_in {excess(rel(runs[bad], 'S_in'), rel(ref, 'S_in'))}"]
    if finite(rel(runs[bad], "o")):
        parts.append(f"o {excess(rel(runs[bad], 'o'), rel(ref, 'o'))} ({sci(rel(ref, 'o'))} to {sci(rel(runs[bad], 'o'))})")
    g = max(((rel(runs[bad], k) / rel(ref, k), k) for k in GRADIENTS if finite(rel(runs[bad], k)) and finite(rel(ref, k)) and rel(ref, k) > 0), default=None)
    if g:
        parts.append(f"{g[1]} {excess(rel(runs[bad], g[1]), rel(ref, g[1]))} ({sci(rel(ref, g[1]))} to {sci(rel(runs[bad], g[1]))}, the most of the gradients)")
    return H("<b>against the fp32 chain, {} costs</b> {}.", words(bad), ", ".join(parts))


def effect_sentence(rec, case):
    """The error of M that moves the state most on a head at the most ranks, beside its own relative size."""
    n = top_ranks(rec, case["name"])
    for base in ("fp32", "fp64", "bf16"):
        pts = [(p["effect"], p["rel"], p, f, r) for f, r in one_per_format(rec, case["name"], n, base).items() for p in r["chain"] if finite(p["rel"]) and finite(p.get("effect"))]
        if pts:
            effect, e, p, f, r = max(pts, key=lambda x: x[0])
            return H("{}, {} ranks, base {}: the error of M that moves the state most is that of rank {} (chain: {}): {} of M after {}, {} of the state (|dM S_in| / |S_in|).", link(r, case["name"]), n, base,
                     p.get("rank", 0), words(f), sci(e), plural(p["chunks"], "chunk"), sci(effect))
    return None


def two_ranks(rec):
    """With 2 ranks and no initial state S_in of rank 1 is H of rank 0: the record must show the same numbers whatever the chain."""
    same, differ = {}, []
    for name in rec.cases:
        for base in bases_of(rec.of(name)):
            runs = {f: r for f, r in one_per_format(rec, name, 2, base).items() if tensor(r, "S_in")}
            if len(runs) < 2:
                continue
            errs = [tensor(r, "S_in").get("rel_fro") for r in runs.values()]
            if len(set(map(str, errs))) == 1:
                same.setdefault(name, []).append((base, len(runs), errs[0]))
            else:
                differ.append((name, base, runs, [e for e in errs if finite(e)]))
    return [s for s in [two_ranks_sentence(rec, same), two_ranks_differ(differ, True), two_ranks_differ(differ, False)] if s]


def two_ranks_differ(differ, started, most=4):
    """An initial state is what M of rank 0 can multiply; its gradient ds0 shows that the case has one."""
    some = [(name, base, errs) for name, base, runs, errs in differ if errs and any(tensor(r, "ds0") for r in runs.values()) == started]
    if not some:
        return None
    listed = ", ".join(f"{n} base {b} {sci(min(e))} to {sci(max(e))}" for n, b, e in some[:most]) + (f" and {len(some) - most} more" if len(some) > most else "")
    if started:
        return H("With an initial state M of rank 0 counts with 2 ranks too: S_in depends on the format of the chain in {}.", listed)
    return H("2 ranks: S_in depends on the format of the chain in {}, although M of rank 0 has nothing to multiply unless the case has an initial state.", listed)


def two_ranks_sentence(rec, same):
    if not same:
        return None
    order = [c["name"] for c in heads(rec) if c["name"] in same] or list(same)
    name = order[0]
    numbers = ", ".join(f"base {b} {sci(e, 3)}" for b, _, e in same[name])
    more = f" The same holds in {plural(len(same) - 1, 'other case')} without an initial state." if len(same) > 1 else ""
    return H("{}, 2 ranks: <b>M is never used: all {} chain formats give the same S_in</b> ({}).{}", name, same[name][0][1], numbers, more)


def cost_of_split(rec, case):
    """Most ranks against one rank, fp32 chain, the base that kernels use."""
    n = top_ranks(rec, case["name"])
    base = next((b for b in ("bf16", "fp32") if one_per_format(rec, case["name"], 1, b)), None)
    one = next(iter(one_per_format(rec, case["name"], 1, base).values()), None) if base else None
    many = one_per_format(rec, case["name"], n, base).get("fp32") if base else None
    if not one or not many or n < 2 or "fail" in (one["verdict"], many["verdict"]):
        return None
    parts = [f"{t} {sci(rel(one, t))} to {sci(rel(many, t))} ({excess(rel(many, t), rel(one, t))})" for t in ("o",) + GRADIENTS if finite(rel(one, t)) and finite(rel(many, t))]
    return H("{}, base {}, fp32 chain, from 1 rank to {}: {}.", link(many, case["name"]), base, n, ", ".join(parts)) if parts else None


def exact_split(rec):
    runs = [r for r in rec.runs if r["policy"].get("base") == "fp64" and r["policy"].get("chain", "fp64") == "fp64" and r["ranks"] > 1 and r["op"] not in ("chain", "conv")]
    errs = [(t["rel_fro"], t["name"], r) for r in runs for t in r["tensors"] if finite(t.get("rel_fro"))]
    if not errs:
        return None
    e, name, r = max(errs, key=lambda x: x[0])
    few, most = min(x["ranks"] for x in runs), max(x["ranks"] for x in runs)
    if e >= 1e-9:
        return H("All fp64, split over ranks: relative error up to {} ({}, {}).", sci(e), name, link(r, r["id"]))
    return H("All fp64, {} ranks, {}: the largest relative error is {} ({}, {}): the split itself loses nothing.", few if few == most else f"{few} to {most}", plural(len({x["case"] for x in runs}), "case"), sci(e),
             name, link(r, r["id"]))


def merge_orders(rec):
    """all-gather against ring: how many pairs of runs agree in every error."""
    pairs = {}
    for r in rec.runs:
        m = r["policy"].get("merge")
        if m in ("allgather", "ring") and r["tensors"]:
            key = (r["case"], r["ranks"], r.get("backend"), *[(k, v) for k, v in sorted(r["policy"].items()) if k != "merge"])
            pairs.setdefault(key, {})[m] = r
    both = [p for p in pairs.values() if len(p) == 2]
    if not both:
        return None
    same = sum([t.get("rel_fro") for t in p["ring"]["tensors"]] == [t.get("rel_fro") for t in p["allgather"]["tensors"]] for p in both)
    return H("Merging by ring and by all-gather gives identical errors in {} of {} of runs.", whole(same), plural(len(both), "pair"))


# ---- bounds, unjudged -------------------------------------------------------------------------------------------------------------------

def bound_sentences(rec, most=4):
    """The passing tensors nearest to their bounds, one a kind of case and tensor, the looseness of the chain's bounds, and the passes that prove nothing."""
    near_ones = {}
    for r in rec.runs:
        for t in r["tensors"]:
            if t["verdict"] == "pass" and finite(t.get("ratio")) and not vacuous(t):
                k = ("recurrence" if r["op"] not in ("chain", "conv") else r["op"], t["name"] if r["op"] != "conv" else "")
                if k not in near_ones or t["ratio"] > near_ones[k][1]["ratio"]:
                    near_ones[k] = (r, t)
    top = sorted(near_ones.values(), key=lambda rt: -rt[1]["ratio"])[:most]
    out = [H("Nearest to a bound: {}.", join("; ", (nearest(r, t) for r, t in top)))] if top else []
    return out + [s for s in (chain_looseness(rec), empty_passes(rec)) if s]


def empty_passes(rec, most=4):
    """Passes that a reader must not count: recurrences and convolutions by case and base, tensors whose bound exceeds their own norm."""
    judged, empty = 0, {}
    for r in rec.runs:
        if r["op"] == "chain":
            continue
        for t in r["tensors"]:
            judged += t["verdict"] in ("pass", "fail")
            if vacuous(t):
                names = empty.setdefault((r["case"], r["policy"].get("base")), {})
                names[t["name"]] = max(names.get(t["name"], 0.0), t["bound"] if finite(t["bound"]) else math.inf)
    count = sum(vacuous(t) for r in rec.runs if r["op"] != "chain" for t in r["tensors"])
    if not count:
        return None
    groups = sorted(empty.items(), key=lambda kv: -max(kv[1].values()))
    listed = "; ".join(case + (f" base {base}" if base else "") + f": {name_list(names)} (up to {sci(max(names.values()))})" for (case, base), names in groups[:most])
    more = f"; and {plural(len(groups) - most, 'more group')} of case and base" if len(groups) > most else ""
    return H("<b>{} of {} {} under a bound larger than the tensor itself</b>, which proves nothing; bound over norm in brackets: {}{}.", whole(count), plural(judged, "judged tensor"),
             "passes" if count == 1 else "pass", listed, more)


def name_list(names, most=6):
    return ", ".join(in_order(names, TENSOR_ORDER)) if len(names) <= most else f"{len(names)} tensors"


def nearest(run, t):
    rank = worst_rank(t)
    return H("{} at {} of it{} ({})", t["name"], near(t["ratio"]), f", rank {rank}" if rank is not None and run["ranks"] > 1 else "", link(run, run["id"]))


def chain_looseness(rec):
    loose = [(p["bound"] / p["rel"], c, f, p["chunks"]) for c in chain_cases(rec) if c.get("regime") == "reflect" for f, (_, r) in chain_errors(rec, c).items()
             for p in r["chain"] if finite(p.get("bound")) and finite(p["rel"]) and p["rel"] > 0 and f != "fp64"]
    if not loose:
        return None
    (lo, lc, lf, ln), (hi, hc, hf, hn) = min(loose, key=lambda x: x[0]), max(loose, key=lambda x: x[0])
    return H("Bounds of the M chain in reflect are {} times the error ({}, {}, {}) to {} times ({}, {}, {}).", near(lo), chain_title(lc), words(lf), plural(ln, "chunk"), near(hi), chain_title(hc), words(hf),
             plural(hn, "chunk"))


def unjudged_sentences(rec):
    out = []
    for verdict in ("skipped", "unjudged"):
        runs = Counter(r.get("why") or "no reason recorded" for r in rec.runs if r["verdict"] == verdict and not r["tensors"])
        out += [H("{} {}: {}.", plural(n, "run"), verdict, why) for why, n in runs.most_common(4)]
        out += more_reasons(runs, 4)
        loose, other = defaultdict(list), Counter()
        for t in (t for r in rec.runs for t in r["tensors"] if t["verdict"] == verdict):
            if finite(t.get("bound")) and t["bound"] >= 1:
                loose[t["name"]].append(t["bound"])
            else:
                other[t["name"], t.get("why") or "no reason recorded"] += 1
        out += [H("{} {} in {}: within its bound, but the bound is {} to {} times the tensor itself and proves nothing.", n, verdict, plural(len(b), "run"), near(min(b)), near(max(b)))
                for n, b in sorted(loose.items(), key=lambda x: -len(x[1]))]
        out += [H("{} {} in {}: {}.", name, verdict, plural(n, "run"), why) for (name, why), n in other.most_common(6)]
        out += more_reasons(other, 6)
    return out


def more_reasons(counter, shown):
    rest = len(counter) - shown
    return [H("{}: see the details of the cases.", plural(rest, "further reason"))] if rest > 0 else []


# ---- table of the chain formats on one head ----------------------------------------------------------------------------------------------

def ranking(rec, case):
    """[(base, ranks, columns, [(format, run, [(error, excess over the fp32 chain or None)])])], formats by error of S_in; only bases where they differ."""
    out, n = [], top_ranks(rec, case["name"])
    for base in bases_of(rec.of(case["name"])):
        runs = one_per_format(rec, case["name"], n, base)
        cols = [t for t in ("S_in", "o") + GRADIENTS if any(finite(rel(r, t)) for r in runs.values())]
        states = [rel(r, "S_in") for r in runs.values() if finite(rel(r, "S_in"))]
        if n < 3 or len(states) < 2 or max(states) <= min(states) * 1.01:
            continue
        ref = runs.get("fp32")
        key = lambda f: rel(runs[f], "S_in") if finite(rel(runs[f], "S_in")) else math.inf
        rows = [(f, runs[f], [(rel(runs[f], t), rel(runs[f], t) / rel(ref, t) if ref and finite(rel(runs[f], t)) and finite(rel(ref, t)) and rel(ref, t) > 0 else None)
                              for t in cols]) for f in sorted(runs, key=key)]
        out.append((base, n, cols, rows))
    return out
