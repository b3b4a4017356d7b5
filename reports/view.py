"""What findings, figures and page share: names of formats and bases, how numbers are written, which cases to look at first."""
import math
import re

from record import tensor

# name in the record -> (in words, short label)
FORMATS = {
    "fp64": ("fp64", "fp64"), "fp32": ("fp32", "fp32"), "tf32x3": ("3xTF32", "3xTF32"), "tf32": ("tf32 to nearest", "tf32"),
    "tf32rz": ("tf32 with truncated operands", "tf32 trunc."), "bf16": ("bf16 operands", "bf16 op."), "bf16st": ("bf16 storage", "bf16 store"),
}
GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta")
TENSOR_ORDER = ("o", "final_state", "S_in", "M", "H") + GRADIENTS + ("dA_log", "ddt_bias", "ds0", "dS_out", "dM", "dH", "y", "dx", "dw", "dbias")


def words(fmt):
    return FORMATS.get(fmt, (fmt, fmt))[0]


def short(fmt):
    return FORMATS.get(fmt, (fmt, fmt))[1]


def in_order(names, order):
    """Known names in the given order, then the unknown ones as they come; each once."""
    names, order = list(dict.fromkeys(names)), list(order)
    return sorted(names, key=lambda x: order.index(x) if x in order else len(order) + names.index(x))


def formats_of(runs):
    return in_order([r["policy"]["chain"] for r in runs if r["policy"].get("chain")], FORMATS)


def bases_of(runs):
    return in_order([r["policy"]["base"] for r in runs if r["policy"].get("base")], ("fp64", "fp32", "bf16"))


def finite(x):
    return x is not None and math.isfinite(x)


def sci(x, digits=2):
    """3.9e-3 the way the field writes it, 0.94 and 5.7 plainly; nan and inf as words; None as a dash."""
    if x is None:
        return "–"
    if not math.isfinite(x):
        return "nan" if x != x else ("inf" if x > 0 else "-inf")
    if x == 0:
        return "0"
    m, e = f"{x:.{digits - 1}e}".split("e")
    if -1 <= int(e) <= 2:
        return f"{x:.{max(digits - 1 - int(e), 0)}f}"
    return f"{m}e{int(e)}"


def near(x):
    """A factor, ratio or slope near 1: 0.31, 3.4, 12, 3.0e-4."""
    if not finite(x) or x == 0 or abs(x) < 5e-3 or abs(x) >= 1e5:
        return sci(x)
    return f"{x:,.0f}" if abs(x) >= 99.5 else f"{x:.2f}" if abs(x) < 0.995 else f"{x:.3g}"


def whole(n):
    return f"{n:,}"


def plural(n, noun):
    return f"{whole(n)} {noun}" + ("" if n == 1 else "s")


def policy_text(run):
    p = run["policy"]
    known = [f"base {p['base']}"] if p.get("base") else []
    if p.get("chain"):
        known.append(f"chain {p['chain']}")
    if p.get("merge"):
        known.append(p["merge"])
    return ", ".join(known + [f"{k} {v}" for k, v in p.items() if k not in ("base", "chain", "merge")]) or "all policies"


def is_real(case):
    """Real activations come from a tensor file; generated inputs name their formula."""
    return bool(re.search(r"safetensors|kda-lm|real (head|activ)|trained", " ".join(str(case.get(k) or "") for k in ("source", "data", "reason"))))


def judged_recurrences(rec):
    return [c for c in rec.cases.values() if c["op"] not in ("chain", "conv") and any(r["tensors"] for r in rec.of(c["name"]))]


def heads(rec):
    """Recurrence cases that the long-range figures show: real heads, or else those with the most ranks. Most sensitive to the chain first."""
    cs = [c for c in judged_recurrences(rec) if not without_error(rec, c)]
    chosen = [c for c in cs if is_real(c)]
    if not chosen:
        most = max((len(formats_of(rec.of(c["name"]))) * max(r["ranks"] for r in rec.of(c["name"])) for c in cs), default=0)
        chosen = [c for c in cs if len(formats_of(rec.of(c["name"]))) * max(r["ranks"] for r in rec.of(c["name"])) == most][:2]
    return sorted(chosen, key=lambda c: -chain_sensitivity(rec, c["name"]))


def without_error(rec, case):
    """Every entry of every run equals the truth."""
    e = [t.get("rel_fro") for r in rec.of(case["name"]) for t in r["tensors"]]
    return bool(e) and all(x == 0 for x in e)


def chain_sensitivity(rec, case):
    """Largest over smallest error of S_in between chain formats (fp64 apart) at the most ranks, over the base policies."""
    n = top_ranks(rec, case)
    best = 1.0
    for base in bases_of(rec.of(case)):
        e = [tensor(r, "S_in")["rel_fro"] for r in rec.of(case, ranks=n, base=base) if tensor(r, "S_in") and r["policy"].get("chain") != "fp64"]
        e = [x for x in e if finite(x) and x > 0]
        best = max([best] + ([max(e) / min(e)] if e else []))
    return best


def top_ranks(rec, case):
    return max((r["ranks"] for r in rec.of(case) if r["tensors"]), default=0)


def first_merge(rec, case):
    ms = in_order([r["policy"]["merge"] for r in rec.of(case) if r["tensors"] and r["policy"].get("merge")], ("allgather", "ring"))
    return ms[0] if ms else None


def one_per_format(rec, case, ranks, base):
    """{format: run} of one case, rank count and base, in the first merge order, that has tensors."""
    merge = first_merge(rec, case)
    runs = [r for r in rec.of(case, ranks=ranks, base=base) if r["tensors"] and r["policy"].get("merge") == merge]
    by = {r["policy"].get("chain"): r for r in reversed(runs)}
    return {f: by[f] for f in formats_of(runs)}


REGIMES = ("reflect", "subspace", "corr", "slow", "mixed", "mild", "strong")


def chain_cases(rec):
    """Cases of the M chain alone: widths with the longest chains first, within a width in the order above (those that forget least first)."""
    cs = [c for c in rec.cases.values() if c["op"] == "chain" and any(r["chain"] for r in rec.of(c["name"]))]
    longest = {}
    for c in cs:
        n = max(p["chunks"] for r in rec.of(c["name"]) for p in r["chain"])
        longest[c.get("K")] = max(n, longest.get(c.get("K"), 0))
    place = lambda c: REGIMES.index(c["regime"]) if c.get("regime") in REGIMES else len(REGIMES)
    return sorted(cs, key=lambda c: (-longest[c.get("K")], c.get("K") or 0, place(c)))


def chain_title(case):
    name = case.get("regime") or case["name"]
    return f"{name}, K = {case['K']}" if case.get("K") else name


def severity(t):
    """Order of judged tensors: fails first, passes that prove something before those that do not, then by ratio; a passing nan or inf is last."""
    if t["verdict"] == "fail" and by_draws(t):
        return True, False, t["expected"]["excess"]
    return t["verdict"] == "fail", not vacuous(t), t["ratio"] if finite(t["ratio"]) else math.inf if t["verdict"] == "fail" else -1.0


def by_draws(t):
    """Did draws decide: of the tensor itself, or of what its sum is made of?"""
    return t.get("tier") in ("expected", "sum")


def worst_tensor(run):
    """The judged tensor nearest to its bound, or farthest beyond it."""
    return max((t for t in run["tensors"] if t.get("ratio") is not None and t["verdict"] in ("pass", "fail")), key=severity, default=None)


def vacuous(t):
    """A pass under a bound larger than the tensor itself (bound / |want|_F > 1), with nothing expected to judge by: true, and worth nothing."""
    return t["verdict"] == "pass" and not by_draws(t) and t.get("bound") is not None and not t["bound"] <= 1


def worst_rank(t):
    """First rank with the largest ratio, or None."""
    rs = [(x, -i) for i, x in enumerate(t.get("per_rank_ratio") or []) if x is not None and x == x]
    return -max(rs)[1] if rs else None
