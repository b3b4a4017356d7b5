"""The page: one file that needs nothing else and fetches nothing (its policy forbids it).

page(rec, figures) -> str
figures: [(Plot, what stands in the page: data_uri() of its picture, or the tables that show the
same)]

The texts are made in say/; their place in the page is in templates/, which escape all of them. The
one script (templates/page.js) filters; failures, findings, figures and the verdicts by case stand
in the page without it.
"""

import re
from typing import Any

from markupsafe import Markup

from draw.heat import shades
from draw.plot import Plot
from page import museum as museum_page
from page.carry import carried as carried_section
from page.failing import failing
from page.render import own_text, policy, render
from page.results import results
from read.record import NO_RANKS, VERDICTS, Case, Record, Run, Tensor
from say.chain import growth
from say.commands import all_again
from say.findings import CHAIN, RANKS, findings
from say.markup import H
from say.names import finite, near, plural, sci, short, whole
from say.ranks import ranking
from say.select import chain_title, heads
from say.together import failed_together, together
from say.verdicts import over_limit, severity, vacuous, verdict_word, worst_tensor

MOST_BYTES = 1_900_000  # of a page; the table of all results gets what the rest leaves
LEAST_ROOM = 300_000
CASES = 300  # rows of the table of cases


def page(
    rec: Record,
    figures: list[tuple[Plot, Any]],
    museum: dict[str, Any] | None = None,
    kernels: dict[str, Any] | None = None,
    carried: list[dict[str, Any]] | None = None,
) -> str:
    css, script = own_text("page.css") + Markup(shades()), own_text("page.js")
    cards, more_kinds = failing(rec)
    said = findings_section(rec, bool(cards))
    summary = [summary_row(rec, i, c) for i, c in enumerate(rec.cases.values())]
    values = {
        "rec": rec,
        "css": css,
        "script": script,
        "policy": policy(css, script),
        "verdict": verdict_text(rec),
        "counts": rec.counts(),
        "contents": contents(rec, figures, museum, kernels, carried, cards, said),
        "meta": meta(rec),
        "warnings": contradiction(rec) + meaningless(rec),
        "cards": cards,
        "more_kinds": more_kinds,
        "findings": said,
        "figures": figures_section(figures),
        "together": together(rec),
        "museum": museum_page.faults(museum) if museum else "",
        "kernels": museum_page.kernels(kernels) if kernels else "",
        "carried": carried_section(carried) if carried else "",
        "wrong": in_order_of_verdicts(summary)[:CASES],
        "right": [s for s in summary if s["verdict"] == "pass"][:CASES],
        "all_right": sum(s["verdict"] == "pass" for s in summary),
        "all_cases": len(summary),
        "VERDICTS": VERDICTS,
        "sci": sci,
        "near": near,
        "whole": whole,
        "plural": plural,
    }
    without = len(str(render("page.html", results=None, **values)).encode())
    found = results(rec, max(MOST_BYTES - without, LEAST_ROOM))
    return str(render("page.html", results=found, **values))


# ---- head ----


def verdict_text(rec: Record) -> str:
    c = rec.counts()
    numbers = ", ".join(
        f"{whole(c[v])} {said}"
        for v, said in zip(VERDICTS, ("passed", "failed", "skipped", "unjudged"), strict=True)
    )
    pooled = failed_together(rec)
    if pooled:
        numbers += f"; {plural(pooled, 'tensor')} over all cases together"
    return f"{verdict_word(rec.verdict)} ({numbers})"


def meta(rec: Record) -> list[tuple[str, Any]]:
    p = rec.program
    program = f"deltaproof {p.get('version', '')}".strip()
    seconds = f"{rec.seconds:.1f} s" if finite(rec.seconds) else None
    machine = [
        plural(p["cores"], "core") if p.get("cores") else None,
        p.get("device") if p.get("device") != "none" else None,
        p.get("compiler"),
        p.get("blas"),
        f"MPFR {p['mpfr']}" if p.get("mpfr") else None,
    ]
    compared = plural(sum(len(r["tensors"]) for r in rec.runs), "tensor")
    cases, runs = plural(len(rec.cases), "case"), plural(len(rec.runs), "run")
    command = all_again(rec)
    again = H('<code class="id">{}</code>', command) if command else None
    rows = [
        ("Program", program + (f", commit {p['commit']}" if p.get("commit") else "")),
        ("Made", " in ".join(x for x in (rec.created, seconds) if x)),
        ("Machine", ", ".join(x for x in machine if x)),
        ("Scope", f"{cases}, {runs}, {compared} compared with a truth"),
        ("All again", again),
    ]
    return [(k, v) for k, v in rows if v]


def contents(
    rec: Record,
    figures: list[Any],
    museum: Any,
    kernels: Any,
    carried: Any,
    failures: list[Any],
    findings: list[Any],
) -> list[tuple[str, str]]:
    names = [
        ("failures", "Failures", failures),
        ("figures", "Figures", figures),
        ("findings", "Findings", findings),
        ("together", "All cases together", rec.pooled),
        ("verdicts", "Verdicts by case", True),
        ("results", "All results", True),
        ("carry", "Sessions by format", carried),
        ("museum", "Deliberate faults", museum),
        ("kernels", "Faults of the kernels", kernels),
        ("limits", "What this report assumes", True),
    ]
    return [(anchor, text) for anchor, text, there in names if there]


def contradiction(rec: Record) -> list[str]:
    """A record whose totals or verdict disagree with its own runs says so at the top; the page
    counts runs."""
    c, out = rec.counts(), []
    if any(rec.totals[v] != c[v] for v in VERDICTS):
        totals = ", ".join(f"{v} {rec.totals[v]}" for v in VERDICTS)
        out.append(
            f"The record's totals ({totals}) disagree with its runs; "
            "the numbers here count the runs."
        )
    if rec.verdict != rec.said:
        but = "results fail" if rec.verdict == "fail" else "nothing is judged"
        out.append(f"The record's verdict is pass although {but}.")
    twice = len(rec.runs) - len({r["id"] for r in rec.runs})
    if twice:
        out.append(f"{plural(twice, 'run')} in the record beside one of the same ID.")
    if rec.errors:
        cases, verb = plural(rec.errors, "case"), "is" if rec.errors == 1 else "are"
        out.append(
            f"{cases} could not be judged at all and {verb} not in this record; "
            "the run's own output names the reason."
        )
    return out


def meaningless(rec: Record, most: int = 5) -> list[str]:
    """Cases on which an error says little of a kernel, and why: an ill-conditioned problem, and
    what the program warned of."""
    out = []
    for name, case in rec.cases.items():
        found = [r.get("condition") or {} for r in rec.runs if r["case"] == name]
        worst = max((c["condition"] for c in found if c.get("ill")), default=None)
        if worst is not None:
            out.append(
                f"{name} is ill-conditioned: its own systems have condition {sci(worst)}, which "
                "multiplies the rounding errors of any kernel."
            )
        out += [f"{name}: {w}" for w in case.get("warnings") or []]
    more = len(out) - most
    return out[:most] + ([f"{plural(more, 'more warning')} like these."] if more > 0 else [])


# ---- findings and figures ----


def findings_section(rec: Record, cards: bool) -> list[dict[str, Any]]:
    out = []
    for heading, sentences in findings(rec):
        if heading == "Failures" and cards:
            continue
        table = growth(rec) if heading == CHAIN else None
        ranks = [(c, *t) for c in heads(rec) for t in ranking(rec, c)] if heading == RANKS else []
        out.append(
            {
                "heading": heading,
                "sentences": [keep(s) for s in sentences],
                "growth": growth_table(*table) if table and table[1] else None,
                "rankings": [ranking_table(*r) for r in ranks if r[1] != "fp64"],
            }
        )
    return out


def keep(sentence: str) -> Markup:
    """Browsers break lines after the hyphen of 1.2e-3; not here. Attributes hold no such numbers
    after a blank or bracket."""
    span = r'<span class="w">\1</span>'
    return Markup(re.sub(r"(?<=[ (])(\d[\d.]*e-\d+)", span, str(H("{}", sentence))))


def growth_table(cases: list[Case], rows: list[Any]) -> dict[str, Any]:
    def cell(x: Any) -> dict[str, Any] | None:
        if not x:
            return None
        run, slope, law, bits = x
        return {
            "bias": law == "a bias",
            "n": run["n"],
            "slope": f"{slope:.2f}",
            "bits": f"{bits[0]:.1f}" if bits else "–",
        }

    def places(xs: list[Any]) -> str:
        return ", ".join(dict.fromkeys(x[3][1] for x in xs if x and x[3])) or "–"

    lines = [(short(f), [cell(x) for x in xs], places(xs)) for f, xs in rows]
    return {"cases": [chain_title(c) for c in cases], "rows": lines}


def ranking_table(
    case: Case, base: str, ranks: int, cols: list[str], rows: list[Any]
) -> dict[str, Any]:
    lines = [
        (short(f), r["n"], [(sci(e), excess_mark(x, f)) for e, x in cells]) for f, r, cells in rows
    ]
    return {"case": case["name"], "base": base, "ranks": ranks, "cols": cols, "rows": lines}


def excess_mark(x: float | None, fmt: str) -> str:
    if x is None or fmt == "fp32":
        return ""
    if abs(x - 1) < 5e-3:
        return "(=)"
    return f"(×{f'{x:.2f}' if x < 9.95 else near(x)})"


def figures_section(figures: list[tuple[Plot, Any]]) -> list[dict[str, Any]]:
    said: dict[str, int] = {}
    return [
        {
            "number": i,
            "name": plot.name,
            "title": plot.title,
            "caption": keep(fresh(plot.caption, i, said)),
            "shown": shown,
            "is_table": bool(plot.table),
            "fails": bool(plot.table) and any(_fails(t) for t in shown),
            "part": "" if not plot.table else extent(shown),
        }
        for i, (plot, shown) in enumerate(figures, 1)
    ]


def _fails(table: dict[str, Any]) -> bool:
    return any(look == "hf" for _, cells in table["rows"] for look, _, _ in cells)


def extent(tables: list[dict[str, Any]]) -> str:
    """The content of a map: from which row to which, or of which runs."""
    if tables[0]["caption"]:
        return plural(len(tables), "run")
    labels = [label for label, _ in tables[0]["rows"]]
    return labels[0] if len(labels) == 1 else f"{labels[0]} to {labels[-1]}"


def fresh(caption: str, i: int, said: dict[str, int]) -> str:
    """Text that earlier captions have not said: sentences that stand there already become a
    reference to the first of them."""
    sentences = re.split(r"(?<=\.) ", caption)
    old = [said[s] for s in sentences if s in said]
    left = [s for s in sentences if s not in said]
    for s in left:
        said[s] = i
    return " ".join(([f"Read as figure {old[0]}."] if old else []) + left)


# ---- verdicts by case ----


def summary_row(rec: Record, number: int, case: Case) -> dict[str, Any]:
    runs = rec.of(case["name"])
    counts, (r, t) = rec.counts(runs), worst_of(runs)
    return {
        "number": number,
        "case": case,
        "verdict": case_verdict(counts),
        "counts": counts,
        "run": r,
        "label": run_label(r) if r else "",
        "tensor": t,
        "over": over_limit(t) if t else None,
        "empty": empty_count(runs),
    }


def in_order_of_verdicts(summary: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results that do not pass, failures first."""
    order = ("fail", "unjudged", "skipped")
    wrong = [s for s in summary if s["verdict"] != "pass"]
    return sorted(wrong, key=lambda s: order.index(s["verdict"]))


def worst_of(runs: list[Run]) -> tuple[Run | None, Tensor | None]:
    """(run, tensor) nearest to or farthest beyond its bound, over runs; fails first."""
    pairs = [(r, worst_tensor(r)) for r in runs]
    return max(
        ((r, t) for r, t in pairs if t), key=lambda rt: severity(rt[1]), default=(None, None)
    )


def case_verdict(counts: dict[str, int]) -> str:
    return next((v for v in ("fail", "pass", "unjudged", "skipped") if counts[v]), "skipped")


def run_label(run: Run) -> str:
    """8 ranks, bf16 / tf32rz: base and chain; the merge order only when it is not all-gather, the
    backend only when it is not the simulation. Not the many words of the design that explains."""
    left = {"explained_by", "merge" if run["policy"].get("merge") == "allgather" else ""}
    names = [v for k, v in run["policy"].items() if v and k not in left]
    if run.get("backend") not in (None, "sim"):
        names.append(run["backend"])
    ranks = plural(run["ranks"], "rank") + ", " if run["op"] not in NO_RANKS else ""
    return ranks + " / ".join(names)


def empty_count(runs: list[Run]) -> str:
    """`3 of 12`: passes under a bound above the tensor's own norm, of all judged tensors; blank
    when
    there are none."""
    judged = [t for r in runs for t in r["tensors"] if t["verdict"] in ("pass", "fail")]
    n = sum(vacuous(t) for t in judged)
    return f"{whole(n)} of {whole(len(judged))}" if n else ""
