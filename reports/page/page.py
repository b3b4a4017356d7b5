"""The page: one file, no scripts, nothing fetched from elsewhere (and a policy that forbids it).   page(rec, figures) -> str
   figures: [(Plot, what stands in the page: data_uri() of its picture, or the tables that show the same)] in the order of the page.

What is shown is chosen and put into words here and in findings.py; how it stands in the page is in templates/page.html, which escapes all that is put into it."""

import os
import re

from figures import shades
from findings import findings, growth, ranking
from markup import H, policy, render
from markupsafe import Markup
from museum import kernels_section
from museum import section as museum_section
from record import VERDICTS
from view import (
    TENSOR_ORDER,
    chain_title,
    finite,
    heads,
    near,
    plural,
    policy_text,
    sci,
    severity,
    short,
    vacuous,
    whole,
    worst_tensor,
)

with open(
    os.path.join(os.path.dirname(os.path.abspath(__file__)), "templates", "page.css"),
    encoding="utf-8",
) as _f:
    CSS = _f.read()


def page(rec, figures, museum=None, kernels=None):
    css = Markup(CSS + (shades() if figures else ""))  # both are this program's own
    show = {
        "sci": sci,
        "near": near,
        "whole": whole,
        "plural": plural,
        "short": short,
        "finite": finite,
        "chain_title": chain_title,
        "policy_text": policy_text,
        "truth_text": truth_text,
    }
    return str(
        render(
            "page.html",
            rec=rec,
            css=css,
            policy=policy(css),
            contents=contents(figures, museum, kernels),
            meta=meta(rec),
            verdict=verdict_text(rec),
            next=next_step(rec),
            warnings=contradiction(rec),
            findings=findings_section(rec),
            figures=figures_section(figures),
            museum=museum_section(museum) if museum else "",
            kernels=kernels_section(kernels) if kernels else "",
            summary=[summary_row(rec, c) for c in rec.cases.values()],
            cases=[case_section(rec, c) for c in rec.cases.values()],
            VERDICTS=VERDICTS,
            **show,
        )
    )


# ---- head -------------------------------------------------------------------------------------------------------------------------------


def verdict_text(rec):
    c = rec.counts()
    return f"{rec.verdict.upper()} ({whole(c['pass'])} passed, {whole(c['fail'])} failed, {whole(c['skipped'])} skipped, {whole(c['unjudged'])} unjudged)"


def code(text):
    return H('<code class="id">{}</code>', text)


def meta(rec):
    p = rec.program
    rows = [
        (
            "Program",
            f"deltaproof {p.get('version', '')}".strip()
            + (f", commit {p['commit']}" if p.get("commit") else ""),
        ),
        (
            "Made",
            " in ".join(
                x
                for x in (rec.created, f"{rec.seconds:.1f} s" if finite(rec.seconds) else None)
                if x
            ),
        ),
        (
            "Machine",
            ", ".join(
                x
                for x in (
                    plural(p["cores"], "core") if p.get("cores") else None,
                    p.get("compiler"),
                    p.get("blas"),
                    f"MPFR {p['mpfr']}" if p.get("mpfr") else None,
                )
                if x
            ),
        ),
        (
            "Scope",
            f"{plural(len(rec.cases), 'case')}, {plural(len(rec.runs), 'run')}, {plural(sum(len(r['tensors']) for r in rec.runs), 'tensor')} compared with a truth",
        ),
        ("All again", code(p["command"]) if p.get("command") else None),
        (
            "One run again",
            H(
                "<code class=\"id\">deltaproof run --id '…'</code> with an ID from the tables; it gives the same bits"
            ),
        ),
    ]
    return [(k, v) for k, v in rows if v]


def contents(figures, museum, kernels):
    names = [
        ("findings", "Findings"),
        ("figures", "Figures") if figures else None,
        ("museum", "Deliberate faults") if museum else None,
        ("kernels", "Faults of the kernels") if kernels else None,
        ("verdicts", "Verdicts by case"),
        ("details", "Cases, runs and tensors"),
        ("limits", "What this report assumes"),
    ]
    return [x for x in names if x]


def quoted(run_id):
    """As a shell takes it between single quotes."""
    return run_id.replace("'", "'\\''")


def next_step(rec):
    """After a failure: the run to start with, and the command that names its stage."""
    bad = [r for r in rec.runs if r["verdict"] == "fail"]
    if not bad:
        return None
    r = min(bad, key=lambda x: (x["ranks"], len(x["id"])))  # the smallest split
    fault = " --fault " + r["id"].split("fault=")[1] if ",fault=" in r["id"] else ""
    stage = (
        f"deltaproof bisect stage {r['case']} --ranks {r['ranks']} --base {r['policy'].get('base', 'fp32')}{fault}"
        if r.get("backend") == "sim" and r["op"] not in ("chain", "conv")
        else ""
    )
    return {"run": r, "again": f"deltaproof run --id '{quoted(r['id'])}'", "stage": stage}


def contradiction(rec):
    """A record whose totals or verdict disagree with its own runs says so at the top; the page counts runs."""
    c, out = rec.counts(), []
    if any(rec.totals[v] != c[v] for v in VERDICTS):
        out.append(
            "The record's totals ("
            + ", ".join(f"{v} {rec.totals[v]}" for v in VERDICTS)
            + ") disagree with its runs; the numbers here count the runs."
        )
    if rec.verdict == "pass" and c["fail"]:
        out.append("The record's verdict is pass although runs fail.")
    if rec.errors:
        out.append(
            f"{plural(rec.errors, 'case')} could not be judged at all and {'is' if rec.errors == 1 else 'are'} not in this record; the run's own output names the reason."
        )
    return out


# ---- findings and figures ---------------------------------------------------------------------------------------------------------------


def findings_section(rec):
    """[(heading, sentences, (growth table) or None, [ranking tables])]"""
    out = []
    for heading, sentences in findings(rec):
        table = growth(rec) if heading == "The M chain alone" else None
        ranks = (
            [(c, *t) for c in heads(rec) for t in ranking(rec, c) if t[0] != "fp64"]
            if heading == "Split over ranks"
            else []
        )
        out.append(
            (
                heading,
                [keep(s) for s in sentences],
                growth_table(*table) if table and table[1] else None,
                [ranking_table(*r) for r in ranks],
            )
        )
    return out


def keep(sentence):
    """Browsers break lines after the hyphen of 1.2e-3; not here. Attributes hold no such numbers after a blank or bracket."""
    return Markup(
        re.sub(r"(?<=[ (])(\d[\d.]*e-\d+)", r'<span class="w">\1</span>', str(H("{}", sentence)))
    )


def growth_table(cases, rows):
    cell = lambda x: (
        x
        and {
            "bias": x[2] == "a bias",
            "n": x[0]["n"],
            "slope": f"{x[1]:.2f}",
            "bits": f"{x[3][0]:.1f}" if x[3] else "–",
        }
    )
    place = lambda xs: ", ".join(dict.fromkeys(x[3][1] for x in xs if x and x[3])) or "–"
    return {
        "cases": [chain_title(c) for c in cases],
        "rows": [(short(f), [cell(x) for x in xs], place(xs)) for f, xs in rows],
    }


def ranking_table(case, base, ranks, cols, rows):
    return {
        "case": case["name"],
        "base": base,
        "ranks": ranks,
        "cols": cols,
        "rows": [
            (short(f), r["n"], [(sci(e), excess_mark(x, f)) for e, x in cells])
            for f, r, cells in rows
        ],
    }


def excess_mark(x, fmt):
    return (
        ""
        if x is None or fmt == "fp32"
        else f"({'=' if abs(x - 1) < 5e-3 else '×' + (f'{x:.2f}' if x < 9.95 else near(x))})"
    )


def figures_section(figures):
    said = {}
    return [
        {
            "number": i,
            "name": plot.name,
            "title": plot.title,
            "caption": keep(fresh(plot.caption, i, said)),
            "shown": shown,
            "is_table": bool(plot.table),
        }
        for i, (plot, shown) in enumerate(figures, 1)
    ]


def fresh(caption, i, said):
    """What earlier captions have not said: sentences that stand there already become a reference to the first of them."""
    sentences = re.split(r"(?<=\.) ", caption)
    old = [said[s] for s in sentences if s in said]
    left = [s for s in sentences if s not in said]
    for s in left:
        said[s] = i
    return " ".join(([f"Read as figure {old[0]}."] if old else []) + left)


# ---- verdicts ---------------------------------------------------------------------------------------------------------------------------


def shape(case):
    names = [(k, case.get(k)) for k in ("T", "Nseq", "H", "HV", "K", "V", "R", "D", "W")]
    return ", ".join(f"{k} {whole(v)}" for k, v in names if isinstance(v, int))


def worst_of(runs):
    """(run, tensor) nearest to or farthest beyond its bound, over runs; fails first."""
    pairs = [(r, worst_tensor(r)) for r in runs]
    pairs = [(r, t) for r, t in pairs if t]
    return max(pairs, key=lambda rt: severity(rt[1]), default=(None, None))


def case_verdict(counts):
    return next((v for v in ("fail", "pass", "unjudged", "skipped") if counts[v]), "skipped")


def summary_row(rec, case):
    runs = rec.of(case["name"])
    c, (r, t) = rec.counts(runs), worst_of(runs)
    return {
        "case": case,
        "verdict": case_verdict(c),
        "counts": c,
        "run": r,
        "label": run_label(r) if r else "",
        "tensor": t,
        "empty": empty_count(runs),
    }


def run_label(run):
    """8 ranks, bf16 / tf32rz: base and chain; the merge order only when it is not all-gather, the backend only when it is not the simulation."""
    p = run["policy"]
    names = [v for k, v in p.items() if (k, v) != ("merge", "allgather")] + (
        [run["backend"]] if run.get("backend") not in (None, "sim") else []
    )
    return (plural(run["ranks"], "rank") + ", " if run["op"] != "chain" else "") + " / ".join(names)


def empty_count(runs):
    """`3 of 12`: passes under a bound above the tensor's own norm, of all judged tensors; blank when there are none."""
    judged = [t for r in runs for t in r["tensors"] if t["verdict"] in ("pass", "fail")]
    n = sum(vacuous(t) for t in judged)
    return f"{whole(n)} of {whole(len(judged))}" if n else ""


# ---- details ----------------------------------------------------------------------------------------------------------------------------


def case_section(rec, case):
    runs = rec.of(case["name"])
    counts = rec.counts(runs)
    facts = [
        f"op {case['op']}",
        shape(case),
        f"regime {case['regime']}" if case.get("regime") else "",
        f"source: {case['source']}" if case.get("source") else "",
    ]
    return {
        "case": case,
        "reason": (case.get("reason") or "").rstrip("."),
        "facts": "; ".join(f for f in facts if f),
        "warnings": [w for w in case.get("warnings") or [] if w],
        "open": bool(counts["fail"]),
        "tally": ", ".join(f"{n} {v}" for v, n in counts.items() if n),
        "rows": [run_row(r) for r in runs],
        "runs": [run_section(r, twin) for r, twin in with_twins(runs)],
    }


def truth_text(truth):
    if not truth:
        return "–"
    return truth["kind"] + (
        f" {truth['bits']} bits" if truth.get("bits") and truth["kind"] != "fp64" else ""
    )


def audit_text(truth):
    """What MPFR found in random columns of a double-double truth."""
    a = truth.get("audit")
    return (
        f"audited by MPFR: {plural(a['columns'], 'column')}, {plural(a.get('tokens') or 0, 'token')}, seed {a.get('seed')}, largest difference {sci(a['worst'])} of both radii"
        if a
        else ""
    )


def run_row(run):
    return {
        "run": run,
        "tensor": worst_tensor(run),
        "empty": empty_count([run]),
        "slope": f", slope {run['slope']:.2f}" if finite(run.get("slope")) else "",
    }


def with_twins(runs):
    """[(run, earlier run or None)]: the earlier run of the same ranks and policy but for the merge order, when every tensor is the same in every digit."""
    first = {}
    for r in runs:
        key = (
            r["ranks"],
            r.get("backend"),
            *sorted((k, v) for k, v in r["policy"].items() if k != "merge"),
        )
        twin = first.setdefault(key, r)
        yield (
            r,
            twin
            if twin is not r and r["tensors"] and repr(twin["tensors"]) == repr(r["tensors"])
            else None,
        )


def condition_text(c):
    """How ill-conditioned the problem's own triangular systems are, and where."""
    return (
        f"condition {sci(c['condition'])} (rank {c.get('rank')}, head {c.get('head')}, chunk at token {c.get('token')}), largest entry of an inverse {sci(c.get('entry'))}"
        if c
        else ""
    )


def run_section(run, twin=None):
    t = run["truth"]
    facts = [
        f"truth {truth_text(t)}" if t else "",
        f"radius {sci(t.get('radius'))}" if finite(t.get("radius")) else "",
        f"on {t['device']}" if t.get("device") else "",
        audit_text(t),
        "truth from the cache" if t.get("cached") else "",
        f"{run['seconds']:.2f} s" if finite(run.get("seconds")) else "",
        f"slope {run['slope']:.2f}" if finite(run.get("slope")) else "",
        condition_text(run.get("condition")),
    ]
    n = len(run["tensors"])
    exact = n and run["verdict"] == "pass" and all(t.get("rel_fro") == 0 for t in run["tensors"])
    what = [plural(n, "tensor") if n else "", "M over chunks" if run["chain"] else ""]
    return {
        "run": run,
        "replay": quoted(run["id"]),
        "facts": ", ".join(f for f in facts if f),
        "says_why": bool(run.get("why"))
        and (run["verdict"] != "pass" or bool((run.get("condition") or {}).get("ill"))),
        "exact": plural(n, "tensor") if exact else "",
        "twin": None if exact else twin,
        "what": " and ".join(w for w in what if w),
        "split": run["ranks"] > 1,
        "tensors": []
        if exact or twin
        else [tensor_row(t) for t in in_pipeline_order(run["tensors"])],
        "chain": [] if exact or twin else chain_points(run),
    }


def in_pipeline_order(tensors):
    return sorted(
        tensors,
        key=lambda t: (
            TENSOR_ORDER.index(t["name"]) if t["name"] in TENSOR_ORDER else len(TENSOR_ORDER)
        ),
    )


def tensor_row(t):
    """End tags of cells are left out in the template, as HTML allows: there are thousands."""
    why = f": {t['why']}" if t.get("why") and t["verdict"] != "pass" else ""
    return {
        "t": t,
        "ratio": near(t["ratio"]) if t.get("ratio") is not None else "–",
        "expected": over_expected(t),
        "ranks": " ".join(sci(x) for x in t.get("per_rank") or []),
        "worst": worst_token(t.get("worst_token")),
        "by": (" by " + t["tier"] if t.get("tier") else "")
        + why
        + (" (bound > 1)" if vacuous(t) else ""),
    }


def over_expected(t):
    """Error over what the formats make of these inputs, whole tensor; in brackets the largest of a window, rank or tensor against its own limit."""
    e = t.get("expected")
    return (
        f"{near(e['tensor']['ratio'])} ({near(e['excess'])})"
        if e and e.get("tensor") and e["tensor"].get("ratio") is not None
        else "–"
    )


def worst_token(w):
    """r1 s0 t130 h0 [7]; 0x1.8p-3, 0x1.81p-3; 1.2e-2 as the column's head explains; places that do not apply (-1) are left out."""
    if not w:
        return ""
    at = " ".join(
        f"{k}{w[n]}"
        for k, n in (("r", "rank"), ("s", "sequence"), ("t", "token"), ("h", "head"))
        if w.get(n) is not None and w[n] >= 0
    )
    at += f" [{w['index']}]" if w.get("index") is not None and w["index"] >= 0 else ""
    return "; ".join(
        x
        for x in (
            at,
            ", ".join(w[k] for k in ("got", "want") if w.get(k)),
            sci(w["rel"]) if w.get("rel") is not None else "",
        )
        if x
    )


def chain_points(run):
    """M after so many chunks; of a split run only the last point of each rank, the figures show the rest."""
    pts = run["chain"]
    if run["op"] != "chain":
        last = {}
        for p in pts:
            if p.get("rank", 0) not in last or p["chunks"] >= last[p.get("rank", 0)]["chunks"]:
                last[p.get("rank", 0)] = p
        pts = [last[rank] for rank in sorted(last)]
    return [
        (
            p.get("rank", 0),
            whole(p["chunks"]),
            sci(p["rel"], 3),
            sci(p.get("effect")),
            sci(p.get("bound")),
            sci(p.get("norm")),
        )
        for p in pts
    ]
