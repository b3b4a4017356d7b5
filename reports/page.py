"""The page: one file, no scripts, nothing fetched from elsewhere.   page(rec, figures) -> str
   figures: [(Plot, HTML)] in the order of the page"""
import html
import re

from findings import findings, growth, ranking
from figures import shades
from museum import kernels_section, section as museum_section
from record import VERDICTS
from view import TENSOR_ORDER, chain_title, finite, heads, near, plural, policy_text, sci, severity, short, vacuous, whole, worst_tensor

esc = html.escape
CSS = """
:root { --ink: #1a1a1a; --soft: #595959; --line: #d4d4d4; --pale: #f4f4f2; }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0 auto; max-width: 62rem; padding: 2rem 1.5rem 4rem; color: var(--ink); background: #fff; font: 16px/1.5 "DejaVu Sans", Verdana, "Segoe UI", system-ui, sans-serif; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .25rem; }
h2 { font-size: 1.3rem; margin: 2.75rem 0 .75rem; padding-top: .5rem; border-top: 2px solid var(--ink); }
h3 { font-size: 1.05rem; margin: 1.75rem 0 .4rem; }
p, ul { margin: .5rem 0; max-width: 52rem; } li { margin: .35rem 0; }
a { color: #00507f; text-underline-offset: 2px; } a:target, :target { scroll-margin-top: 1rem; }
.soft { color: var(--soft); } .small { font-size: .84rem; }
.verdict { font-size: 1.15rem; font-weight: 700; border: 2px solid var(--ink); padding: .55rem .9rem; margin: 1rem 0; display: inline-block; }
.verdict.fail { background: #000; color: #fff; outline: 3px solid #D55E00; } .verdict.error { background: #fff; outline: 3px solid #D55E00; } .verdict.pass { background: #e7f1ec; }
.warn { border-left: 4px solid #D55E00; padding: .3rem .8rem; }
dl.meta { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; font-size: .9rem; margin: .75rem 0; } dl.meta dt { color: var(--soft); } dl.meta dd { margin: 0; }
.w { white-space: nowrap; } code, .num { font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: .86em; }
code.id { user-select: all; -webkit-user-select: all; background: var(--pale); padding: .1em .35em; overflow-wrap: anywhere; }
figure { margin: 1.5rem 0 2rem; break-inside: avoid; } figure img { width: 100%; height: auto; display: block; } figcaption { font-size: .86rem; line-height: 1.45; margin-top: .5rem; max-width: 56rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .84rem; margin: .6rem 0; } caption { text-align: left; font-size: .86rem; padding-bottom: .35rem; }
th, td { padding: .22rem .55rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); } thead th { border-bottom: 1.5px solid var(--ink); font-weight: 600; vertical-align: bottom; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; } td .x { color: var(--soft); font-size: .88em; }
table.c td, table.c th, table.t td:nth-child(-n+4), table.t th:nth-child(-n+4) { text-align: right; white-space: nowrap; } table.t td:first-child, table.t th:first-child { text-align: left; }
td.v { white-space: nowrap; } .f { font-weight: 700; background: #000; color: #fff; padding: 0 .35em; } .u { font-style: italic; }
details { margin: .4rem 0; } summary { cursor: pointer; padding: .15rem 0; } details details { margin-left: 1rem; } details[open] > summary { font-weight: 600; }
section.run { border-top: 1px solid var(--line); margin: .6rem 0 0 1rem; padding-top: .5rem; } section.run h4 { margin: 0; font-size: .9rem; font-weight: 400; } section.run p { margin: .2rem 0; }
table.h { font-size: .68rem; border-collapse: separate; border-spacing: 1px; } table.h td { padding: .05rem .2rem; border: 0; text-align: right; min-width: 1.9rem; white-space: nowrap; } table.h th { padding: .05rem .4rem; border: 0; font-weight: 400; white-space: nowrap; }
table.h thead th { height: 4.6rem; padding: 0 .1rem; } table.h thead span { writing-mode: vertical-rl; transform: rotate(180deg); } table.h a { color: inherit; text-decoration: none; } table.h td a { display: block; } table.h caption { font-weight: 600; }
.hf { background: #000; color: #fff; outline: 2px solid #D55E00; font-weight: 700; } .he { color: var(--soft); background: radial-gradient(#b5b5b5 .8px, #fff 1px) 0 0 / 5px 5px; } .hh { background: repeating-linear-gradient(45deg, #fff 0 3px, #ccc 3px 4px); }
.top { float: right; font-size: .8rem; font-weight: 400; }
@page { size: A4; margin: 15mm; }
@media print { body { font-size: 10pt; padding: 0; max-width: none; } a { color: inherit; text-decoration: none; } .top, .screen { display: none; } h2, h2 + p, h3, caption { break-after: avoid; }
  tr { break-inside: avoid; } thead { display: table-header-group; } table { font-size: 8pt; } th, td { padding: 1pt 4pt; } .wide { overflow: visible; } figure img { max-height: 245mm; object-fit: contain; object-position: left top; } }
"""


def page(rec, figures, museum=None, kernels=None):
    parts = [header(rec), contents(figures, museum, kernels), findings_section(rec), figures_section(figures), museum_section(museum) if museum else "", kernels_section(kernels) if kernels else "", summary_section(rec), details_section(rec), footer(rec)]
    title = f"deltaproof report: {rec.verdict.upper()}"
    return (f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{esc(title)}</title>\n'
            f"<style>{CSS}{shades() if figures else ''}</style>\n</head>\n<body>\n" + "\n".join(parts) + "\n</body>\n</html>\n")


# ---- head -------------------------------------------------------------------------------------------------------------------------------

def header(rec):
    c, p = rec.counts(), rec.program
    total = f"{whole(c['pass'])} passed, {whole(c['fail'])} failed, {whole(c['skipped'])} skipped, {whole(c['unjudged'])} unjudged"
    rows = [("Program", f"deltaproof {p.get('version', '')}".strip() + (f", commit {p['commit']}" if p.get("commit") else "")),
            ("Made", " in ".join(x for x in (rec.created, f"{rec.seconds:.1f} s" if finite(rec.seconds) else None) if x)),
            ("Machine", ", ".join(x for x in (plural(p["cores"], "core") if p.get("cores") else None, p.get("compiler"), p.get("blas"), f"MPFR {p['mpfr']}" if p.get("mpfr") else None) if x)),
            ("Scope", f"{plural(len(rec.cases), 'case')}, {plural(len(rec.runs), 'run')}, {plural(sum(len(r['tensors']) for r in rec.runs), 'tensor')} compared with a truth"),
            ("All again", f'<code class="id">{esc(p["command"], quote=False)}</code>' if p.get("command") else None),
            ("One run again", "<code class=\"id\">deltaproof run --id '…'</code> with an ID from the tables; it gives the same bits")]
    meta = "".join(f"<dt>{k}</dt><dd>{v if v.startswith('<code') else esc(v)}</dd>" for k, v in rows if v)
    return (f'<header id="top"><h1>deltaproof: delta-rule attention under context parallelism</h1>\n<p class="soft">Errors against a truth of proven precision, judged against derived bounds.</p>\n'
            f'<p class="verdict {esc(rec.verdict)}">VERDICT: {esc(rec.verdict.upper())} ({total})</p>{next_step(rec)}{contradiction(rec)}\n<dl class="meta">{meta}</dl></header>')


def contents(figures, museum, kernels):
    names = [("findings", "Findings"), ("figures", "Figures") if figures else None, ("museum", "Deliberate faults") if museum else None, ("kernels", "Faults of the kernels") if kernels else None,
             ("verdicts", "Verdicts by case"), ("details", "Cases, runs and tensors"), ("limits", "What this report assumes")]
    return '<p class="screen">' + " · ".join(f'<a href="#{i}">{t}</a>' for i, t in filter(None, names)) + "</p>"


def next_step(rec):
    """After a failure: the run to start with, and the command that names its stage."""
    bad = [r for r in rec.runs if r["verdict"] == "fail"]
    if not bad:
        return ""
    r = min(bad, key=lambda x: (x["ranks"], len(x["id"])))       # the smallest split
    fault = " --fault " + r["id"].split("fault=")[1] if ",fault=" in r["id"] else ""
    again = f"deltaproof run --id '{r['id']}'"
    stage = f"deltaproof bisect stage {r['case']} --ranks {r['ranks']} --base {r['policy'].get('base', 'fp32')}{fault}" if r.get("backend") == "sim" and r["op"] not in ("chain", "conv") else ""
    return (f'<p class="warn">Start with <a href="#run-{r["n"]}">{esc(r["id"])}</a>: {esc(r.get("why") or "")}.<br>The same bits again: <code class="id">{esc(again)}</code>'
            + (f'<br>The stage that is wrong: <code class="id">{esc(stage)}</code>' if stage else "") + "</p>")


def contradiction(rec):
    """A record whose totals or verdict disagree with its own runs says so at the top; the page counts runs."""
    c, out = rec.counts(), []
    if any(rec.totals[v] != c[v] for v in VERDICTS):
        out.append("The record's totals (" + ", ".join(f"{v} {rec.totals[v]}" for v in VERDICTS) + ") disagree with its runs; the numbers here count the runs.")
    if rec.verdict == "pass" and c["fail"]:
        out.append("The record's verdict is pass although runs fail.")
    if rec.errors:
        out.append(f"{plural(rec.errors, 'case')} could not be judged at all and {'is' if rec.errors == 1 else 'are'} not in this record; the run's own output names the reason.")
    return "".join(f'<p class="warn">{x}</p>' for x in out)


def findings_section(rec):
    out = ['<h2 id="findings">Findings</h2>']
    for heading, sentences in findings(rec):
        out.append(f"<h3>{heading}</h3>\n<ul>\n" + "\n".join(f"<li>{keep(s)}</li>" for s in sentences) + "\n</ul>")
        if heading == "The M chain alone":
            out.append(growth_table(*growth(rec)))
        if heading == "Split over ranks":
            out += [ranking_table(c, *t) for c in heads(rec) for t in ranking(rec, c) if t[0] != "fp64"]
    return "\n".join(out)


def keep(sentence):
    """Browsers break lines after the hyphen of 1.2e-3; not here. Attributes hold no such numbers after a blank or bracket."""
    return re.sub(r"(?<=[ (])(\d[\d.]*e-\d+)", r'<span class="w">\1</span>', sentence)


def growth_table(cases, rows):
    if not rows:
        return ""
    head = "".join(f'<th class="n">{esc(chain_title(c))}:<br>slope</th><th class="n">bits</th>' for c in cases)
    cell = lambda x: (f'<td class="n">{"<b>bias</b> " if x[2] == "a bias" else ""}<a href="#run-{x[0]["n"]}">{x[1]:.2f}</a></td><td class="n">{f"{x[3][0]:.1f}" if x[3] else "–"}</td>' if x else "<td></td><td></td>")
    place = lambda xs: ", ".join(dict.fromkeys(esc(x[3][1]) for x in xs if x and x[3])) or "–"
    body = "".join(f'<tr><td class="v">{esc(short(f))}</td>{"".join(map(cell, xs))}<td class="v">{place(xs)}</td></tr>' for f, xs in rows)
    return ('<div class="wide"><table><caption>How the error of M grows. Slope of log error over log chunks, 16 to 256 chunks or as many as there are:<br>0.5 is unbiased rounding, 1 a bias. '
            f'Effective bits are read from the error.</caption><thead><tr><th>chain</th>{head}<th>rounded</th></tr></thead><tbody>{body}</tbody></table></div>')


def ranking_table(case, base, ranks, cols, rows):
    head = "".join(f'<th class="n">{t}</th>' for t in cols)
    body = "".join(f'<tr><td class="v"><a href="#run-{r["n"]}">{esc(short(f))}</a></td>' + "".join(f'<td class="n">{sci(e)}{excess_mark(x, f)}</td>' for e, x in cells) + "</tr>"
                   for f, r, cells in rows)
    return (f'<div class="wide"><table><caption><b>{esc(case["name"])}</b>, {ranks} ranks, base {esc(base)}: relative error by format of the M chain; in brackets the factor over the fp32 chain.</caption>'
            f"<thead><tr><th>chain</th>{head}</tr></thead><tbody>{body}</tbody></table></div>")


def excess_mark(x, fmt):
    return "" if x is None or fmt == "fp32" else f' <span class="x">({"=" if abs(x - 1) < 5e-3 else "×" + (f"{x:.2f}" if x < 9.95 else near(x))})</span>'


def figures_section(figures):
    if not figures:
        return ""
    out, said = ['<h2 id="figures">Figures</h2>'], {}
    for i, (plot, picture) in enumerate(figures, 1):
        files = f'<span class="soft screen"> Files: <a href="figures/{plot.name}.png">PNG</a>, <a href="figures/{plot.name}.pdf">PDF</a>.</span>'
        out.append(f'<figure id="{esc(plot.name)}">{picture}<figcaption><b>Figure {i}. {esc(plot.title)}.</b> {keep(esc(fresh(plot.caption, i, said)))}{files}</figcaption></figure>')
    return "\n".join(out)


def fresh(caption, i, said):
    """What earlier captions have not said: sentences that stand there already become a reference to the first of them."""
    sentences = re.split(r"(?<=\.) ", caption)
    old = [said[s] for s in sentences if s in said]
    left = [s for s in sentences if s not in said]
    for s in left:
        said[s] = i
    return " ".join(([f"Read as figure {old[0]}."] if old else []) + left)


# ---- verdicts ---------------------------------------------------------------------------------------------------------------------------

def verdict_mark(v):
    return '<span class="f">FAIL</span>' if v == "fail" else f'<span class="u">{v}</span>' if v in ("skipped", "unjudged") else v


def shape(case):
    names = [(k, case.get(k)) for k in ("T", "Nseq", "H", "HV", "K", "V", "R", "D", "W")]
    return ", ".join(f"{k} {whole(v)}" for k, v in names if isinstance(v, int))


def case_anchor(name):
    return "case-" + esc(name, quote=True)


def worst_of(runs):
    """(run, tensor) nearest to or farthest beyond its bound, over runs; fails first."""
    pairs = [(r, worst_tensor(r)) for r in runs]
    pairs = [(r, t) for r, t in pairs if t]
    return max(pairs, key=lambda rt: severity(rt[1]), default=(None, None))


def summary_section(rec):
    rows = "".join(summary_row(rec, c) for c in rec.cases.values())
    return ('<h2 id="verdicts">Verdicts by case</h2>\n<p class="small">Each row counts the runs of one case (rank counts × policies) by verdict and names the tensor nearest to its bound over all of them, with ranks, base and chain. '
            "Error and ratio (error / bound) are that tensor's; follow the links for the runs, their tensors and their replay IDs. bound &gt; 1: how many of the judged tensors pass under a bound "
            "above their own norm, which proves nothing.</p>\n"
            '<div class="wide"><table><thead><tr><th>case</th><th>op</th><th>verdict</th><th class="n">pass</th><th class="n">fail</th><th class="n">skip</th><th class="n">unj.</th>'
            f'<th>nearest to its bound</th><th class="n">rel. error</th><th class="n">ratio</th><th class="n">bound &gt; 1</th></tr></thead><tbody>{rows}</tbody></table></div>')


def case_verdict(counts):
    return next((v for v in ("fail", "pass", "unjudged", "skipped") if counts[v]), "skipped")


def summary_row(rec, case):
    runs = rec.of(case["name"])
    c, (r, t) = rec.counts(runs), worst_of(runs)
    worst = f'<td class="v">{esc(t["name"])}, <a href="#run-{r["n"]}">{esc(run_label(r))}</a></td><td class="n">{sci(t.get("rel_fro"))}</td><td class="n">{near(t["ratio"])}</td>' if t else "<td>–</td><td></td><td></td>"
    return (f'<tr><td class="v"><a href="#{case_anchor(case["name"])}">{esc(case["name"])}</a></td><td>{esc(case["op"])}</td><td class="v">{verdict_mark(case_verdict(c))}</td>'
            + "".join(f'<td class="n">{c[v] or "–"}</td>' for v in VERDICTS) + worst + f'<td class="n">{empty_count(runs)}</td></tr>')


def run_label(run):
    """8 ranks, bf16 / tf32rz: base and chain; the merge order only when it is not all-gather, the backend only when it is not the simulation."""
    p = run["policy"]
    names = [v for k, v in p.items() if (k, v) != ("merge", "allgather")] + ([run["backend"]] if run.get("backend") not in (None, "sim") else [])
    return (plural(run["ranks"], "rank") + ", " if run["op"] != "chain" else "") + " / ".join(names)


def details_section(rec):
    return '<h2 id="details">Cases, runs and tensors</h2>\n<p class="small screen">Open a case for its runs; a click selects a whole replay ID.</p>\n' + "\n".join(case_section(rec, c) for c in rec.cases.values())


def case_section(rec, case):
    runs = rec.of(case["name"])
    counts = rec.counts(runs)
    facts = [f"op {case['op']}", shape(case), f"regime {case['regime']}" if case.get("regime") else "", f"source: {case['source']}" if case.get("source") else ""]
    warnings = "".join(f'<p class="warn small">{esc(w)}</p>' for w in case.get("warnings") or [] if w)
    tally = ", ".join(f"{n} {v}" for v, n in counts.items() if n)
    is_open = " open" if counts["fail"] else ""
    body = (f"<details{is_open}><summary>{plural(len(runs), 'run')}: {tally}</summary>\n{run_table(runs)}\n{''.join(run_section(r, twin) for r, twin in with_twins(runs))}</details>") if runs else '<p class="small">No runs.</p>'
    return (f'<h3 id="{case_anchor(case["name"])}">{esc(case["name"])}<a class="top" href="#verdicts">to the summary</a></h3>\n'
            f'<p class="small">{esc((case.get("reason") or "").rstrip("."))}{". " if case.get("reason") else ""}<span class="soft">{esc("; ".join(f for f in facts if f))}</span></p>{warnings}\n{body}')


def truth_text(truth):
    if not truth:
        return "–"
    return truth["kind"] + (f" {truth['bits']} bits" if truth.get("bits") and truth["kind"] != "fp64" else "")


def audit_text(truth):
    """What MPFR found in random columns of a double-double truth."""
    a = truth.get("audit")
    return f"audited by MPFR: {plural(a['columns'], 'column')}, {plural(a.get('tokens') or 0, 'token')}, seed {a.get('seed')}, largest difference {sci(a['worst'])} of both radii" if a else ""


def empty_count(runs):
    """`3 of 12`: passes under a bound above the tensor's own norm, of all judged tensors; blank when there are none."""
    judged = [t for r in runs for t in r["tensors"] if t["verdict"] in ("pass", "fail")]
    n = sum(vacuous(t) for t in judged)
    return f"{whole(n)} of {whole(len(judged))}" if n else ""


def run_table(runs):
    rows = []
    for r in runs:
        t = worst_tensor(r)
        cells = (f'<td>{esc(t["name"])}</td><td class="n">{sci(t.get("rel_fro"))}</td><td class="n">{near(t["ratio"])}</td><td class="n">{empty_count([r])}</td>' if t
                 else f'<td colspan="4">{esc(r.get("why") or "–")}</td>')
        slope = f', slope {r["slope"]:.2f}' if finite(r.get("slope")) else ""
        rows.append(f'<tr><td class="n">{r["ranks"]}</td><td><a href="#run-{r["n"]}">{esc(policy_text(r))}</a>{slope}</td><td>{esc(r.get("backend") or "–")}</td><td>{esc(truth_text(r["truth"]))}</td>'
                    f'{cells}<td class="v">{verdict_mark(r["verdict"])}</td></tr>')
    return ('<div class="wide"><table><thead><tr><th class="n">ranks</th><th>policy</th><th>backend</th><th>truth</th><th>worst tensor</th><th class="n">rel. error</th>'
            f'<th class="n">error / bound</th><th class="n">bound &gt; 1</th><th>verdict</th></tr></thead><tbody>{"".join(rows)}</tbody></table></div>')


def with_twins(runs):
    """[(run, earlier run or None)]: the earlier run of the same ranks and policy but for the merge order, when every tensor is the same in every digit."""
    first = {}
    for r in runs:
        key = (r["ranks"], r.get("backend"), *sorted((k, v) for k, v in r["policy"].items() if k != "merge"))
        twin = first.setdefault(key, r)
        yield r, twin if twin is not r and r["tensors"] and repr(twin["tensors"]) == repr(r["tensors"]) else None


def condition_text(c):
    """How ill-conditioned the problem's own triangular systems are, and where."""
    return f"condition {sci(c['condition'])} (rank {c.get('rank')}, head {c.get('head')}, chunk at token {c.get('token')}), largest entry of an inverse {sci(c.get('entry'))}" if c else ""


def run_section(run, twin=None):
    t = run["truth"]
    facts = [f"truth {truth_text(t)}" if t else "", f"radius {sci(t.get('radius'))}" if finite(t.get("radius")) else "",
             f"on {t['device']}" if t.get("device") else "", audit_text(t),
             "truth from the cache" if t.get("cached") else "", f"{run['seconds']:.2f} s" if finite(run.get("seconds")) else "", f"slope {run['slope']:.2f}" if finite(run.get("slope")) else "",
             condition_text(run.get("condition"))]
    why = f'<p class="small">{verdict_mark(run["verdict"])}: {esc(run["why"])}</p>' if run.get("why") and (run["verdict"] != "pass" or (run.get("condition") or {}).get("ill")) else ""
    replay = run["id"].replace("'", "'\\''")
    n = len(run["tensors"])
    what = [plural(n, "tensor") if n else "", "M over chunks" if run["chain"] else ""]
    if n and run["verdict"] == "pass" and all(t.get("rel_fro") == 0 for t in run["tensors"]):
        tables = f'<p class="small">Every entry of {plural(n, "tensor")} equals the truth.</p>'
    elif twin:
        tables = f'<p class="small">Every tensor is the same in every digit as with <a href="#run-{twin["n"]}">{esc(policy_text(twin))}</a>.</p>'
    else:
        tables = (f'<details{" open" if run["verdict"] == "fail" else ""}><summary>{" and ".join(w for w in what if w)}</summary>{tensor_table(run)}{chain_table(run)}</details>'
                  if any(what) else "")
    return (f'<section class="run" id="run-{run["n"]}"><h4><code class="id">deltaproof run --id \'{esc(replay, quote=False)}\'</code></h4>'
            f'<p class="small soft">{esc(", ".join(f for f in facts if f))}</p>{why}{tables}</section>')


def tensor_table(run):
    if not run["tensors"]:
        return ""
    ts = sorted(run["tensors"], key=lambda t: (TENSOR_ORDER.index(t["name"]) if t["name"] in TENSOR_ORDER else len(TENSOR_ORDER)))
    split = run["ranks"] > 1
    return ('<div class="wide"><table class="t"><thead><tr><th>tensor<th>rel. error<th>bound<th>error / bound<th>error / expected' + ("<th>rank by rank" if split else "")
            + "<th>worst token: rank, sequence, token, head [entry]; got, want; row error<th>verdict</thead><tbody>" + "".join(tensor_row(t, split) for t in ts) + "</tbody></table></div>")


def tensor_row(t, split):
    """End tags of cells are left out, as HTML allows: there are thousands."""
    ranks = f'<td class="num">{" ".join(sci(x) for x in t.get("per_rank") or [])}' if split else ""
    why = f": {esc(t['why'])}" if t.get("why") and t["verdict"] != "pass" else ""
    return (f'<tr><td>{esc(t["name"])}<td>{sci(t.get("rel_fro"), 3)}<td>{sci(t.get("bound"))}<td>{near(t["ratio"]) if t.get("ratio") is not None else "–"}<td>{over_expected(t)}'
            f'{ranks}<td class="num">{worst_token(t.get("worst_token"))}<td>{verdict_mark(t["verdict"])}{" by " + esc(t["tier"]) if t.get("tier") else ""}{why}{" (bound &gt; 1)" if vacuous(t) else ""}')


def over_expected(t):
    """Error over what the formats make of these inputs, whole tensor; in brackets the largest of a window, rank or tensor against its own limit."""
    e = t.get("expected")
    return f'{near(e["tensor"]["ratio"])} ({near(e["excess"])})' if e and e.get("tensor") and e["tensor"].get("ratio") is not None else "–"


def worst_token(w):
    """r1 s0 t130 h0 [7]; 0x1.8p-3, 0x1.81p-3; 1.2e-2 as the column's head explains; places that do not apply (-1) are left out."""
    if not w:
        return ""
    at = " ".join(f"{k}{w[n]}" for k, n in (("r", "rank"), ("s", "sequence"), ("t", "token"), ("h", "head")) if w.get(n) is not None and w[n] >= 0)
    at += f" [{w['index']}]" if w.get("index") is not None and w["index"] >= 0 else ""
    return "; ".join(esc(x) for x in (at, ", ".join(w[k] for k in ("got", "want") if w.get(k)), sci(w["rel"]) if w.get("rel") is not None else "") if x)


def chain_table(run):
    """M after so many chunks; of a split run only the last point of each rank, the figures show the rest."""
    pts = run["chain"]
    if run["op"] != "chain":
        last = {}
        for p in pts:
            if p.get("rank", 0) not in last or p["chunks"] >= last[p.get("rank", 0)]["chunks"]:
                last[p.get("rank", 0)] = p
        pts = [last[rank] for rank in sorted(last)]
    if not pts:
        return ""
    rows = "".join(f'<tr><td>{p.get("rank", 0)}<td>{whole(p["chunks"])}<td>{sci(p["rel"], 3)}<td>{sci(p.get("effect"))}<td>{sci(p.get("bound"))}<td>{sci(p.get("norm"))}' for p in pts)
    return f'<table class="c"><thead><tr><th>rank<th>chunks<th>|dM| / |M|<th>|dM S_in| / |S_in|<th>bound / |M|<th>|M|</thead><tbody>{rows}</tbody></table>'


# ---- foot -------------------------------------------------------------------------------------------------------------------------------

def footer(rec):
    notes = [
        "<b>Errors</b> are relative Frobenius norms against a truth, |got - want|_F / |want|_F. An MPFR or double-double truth carries a proven error radius, shown with each run.",
        "<b>Bounds</b> are computed from the inputs and the truth, never from the result under test. They assume that every operation follows its number format: operands rounded as the format says, products "
        "accumulated with the stated unit roundoff, in any order. M, H, S_in and the state have worst-case or running bounds; those of o and the gradients are first order in the unit roundoff. "
        "A tensor core that truncates inside its accumulator is outside these assumptions.",
        "<b>error / bound</b> far below 1 does not make a format good; it says that the error is explained by the format. Whether the error is acceptable is the reader's decision.",
        "<b>unjudged</b>: the numbers are measured, but there is no bound to judge them by, so the tensor neither passes nor fails. A tensor that passes under a bound above its own norm passes formally only: "
        "such cells are dotted in the figures, and the findings count them. <b>skipped</b>: not run, for the reason given.",
        "<b>Simulated ranks</b> round every stage as the policy says, in one process. They show what the formats do, not what a given kernel does; kernels are judged when they run as a backend of their own.",
        "A relative error of M means little once |M| is tiny; its effect on the state, |dM S_in| / |S_in|, stands beside it in the details."]
    return '<h2 id="limits">What this report assumes, and what it cannot say</h2>\n<ul class="small">' + "".join(f"<li>{n}</li>" for n in notes) + "</ul>"
