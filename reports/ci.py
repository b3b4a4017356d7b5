#!/usr/bin/env python3
"""ci.py DIR: DIR/junit.xml and DIR/summary.md of the record DIR/results.json, for a CI system.
JUnit has the failed tensors and the command of each failure, the summary a table of causes in
Markdown. report.py writes both before its page. Exit status 0, or 2 when the record cannot be read
or they cannot be written.
"""

import os
import re
import sys
from collections import Counter
from xml.sax.saxutils import escape, quoteattr

# Where this program's own modules are: -I leaves that out.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from read import files, many, record
from read.checks import Malformed
from read.record import Record, Run, Tensor
from say.together import failed_together

# ---- JUnit ---------------------------------------------------------------------------------------


def tag(element: str, /, **attributes: object) -> str:
    """<element a="1", still open; those that are None are left out."""
    some = (f"{k}={quoteattr(str(v))}" for k, v in attributes.items() if v is not None)
    return "<" + " ".join([element, *some])


def junit_case(r: Run) -> str:
    begin = tag("testcase", classname=r["case"], name=r["id"], time=f"{r.get('seconds') or 0:.3f}")
    why = r.get("why") or ""
    if r["verdict"] == "pass":
        return f"  {begin}/>"
    if r["verdict"] != "fail":
        unjudged = "unjudged: " if r["verdict"] == "unjudged" else ""
        return f"  {begin}>{tag('skipped', message=unjudged + why)}/></testcase>"
    failed = [t for t in r["tensors"] if t["verdict"] == "fail"]
    body = [f"{t['name']}: {t.get('why') or ''}" for t in failed]
    body.append(f"deltaproof run --id '{r['id']}'")
    failure = tag("failure", type=r.get("tier"), message=why)
    return f"  {begin}>{failure}>{escape(chr(10).join(body))}\n</failure></testcase>"


def junit(rec: Record) -> str:
    n, together, could_not = rec.counts(), failed_together(rec), int(rec.errors > 0)
    lines = ['<?xml version="1.0" encoding="UTF-8"?>']
    suite = tag(
        "testsuite",
        name="deltaproof",
        tests=len(rec.runs) + together + could_not,
        failures=n["fail"] + together,
        errors=could_not,
        skipped=n["skipped"] + n["unjudged"],
        time=f"{rec.seconds or 0:.3f}",
        timestamp=(rec.created or "").removesuffix("Z"),
    )
    lines += [suite + ">", "  <properties>"]
    known = {k: rec.program.get(k) for k in ("version", "commit", "device", "command")}
    known |= {"verdict": rec.verdict}
    known |= {k: rec.provenance.get(k) for k in ("label", "kernel_commit")}
    lines += [f"    {tag('property', name=k, value=v)}/>" for k, v in known.items() if v]
    lines += ["  </properties>", *map(junit_case, rec.runs)]
    for p in rec.pooled:
        if p["verdict"] == "fail":
            name = f"{p['tensor']} {p.get('backend')} {p.get('base')}"
            begin = tag("testcase", classname="all cases together", name=name)
            lines.append(f"  {begin}>{tag('failure', message=p.get('says'))}/></testcase>")
    if rec.errors:
        begin = tag("testcase", classname="deltaproof", name="all can be judged")
        error = tag("error", message=f"{rec.errors} could not be judged: see the log")
        lines.append(f"  {begin}>{error}/></testcase>")
    return "\n".join([*lines, "</testsuite>", ""])


# ---- the summary ---------------------------------------------------------------------------------


def cell(text: str) -> str:
    """One line, in which nothing ends a cell of a table or begins markup."""
    return re.sub(r"([|<>&`*_\[\]\\])", r"\\\1", text).replace("\n", " ")


def row(*cells: str) -> str:
    return "| " + " | ".join(map(cell, cells)) + " |"


def speaks(r: Run) -> Tensor | None:
    """The tensor that a failed run's reason is about; None: it failed as a whole."""
    why = r.get("why") or ""
    failed = (t for t in r["tensors"] if t["verdict"] == "fail")
    return next((t for t in failed if why.startswith(t["name"] + ": ")), None)


def causes(rec: Record) -> list[str]:
    """Runs of one case in which the same tensor fails by the same kind of limit are a row."""
    first: dict[tuple[str, str, str], Run] = {}
    runs: Counter[tuple[str, str, str]] = Counter()
    for r in rec.runs:
        if r["verdict"] == "fail":
            t = speaks(r) or {"name": "the run"}
            cause = (r["case"], t["name"], t.get("tier") or "")
            first.setdefault(cause, r)
            runs[cause] += 1
    judged = Counter(r["case"] for r in rec.runs if r["verdict"] in ("pass", "fail"))
    return [
        row(c[0], c[1], f"{runs[c]} of {judged[c[0]]}", r["id"], r.get("why") or "")
        for c, r in first.items()
    ]


def not_judged(rec: Record) -> list[str]:
    """Runs that were not judged, by their reason; a run without one does not count."""
    some = [r for r in rec.runs if r["verdict"] in ("skipped", "unjudged") and r.get("why")]
    runs = Counter((r["verdict"], r["why"]) for r in some)
    first = {(r["verdict"], r["why"]): r["id"] for r in reversed(some)}
    return [row(verdict, str(n), first[verdict, why], why) for (verdict, why), n in runs.items()]


def summary(rec: Record) -> str:
    words = {"pass": "passed", "fail": "failed"}
    totals = ", ".join(f"{n} {words.get(k, k)}" for k, n in rec.counts().items())
    tables = (
        ("| case | tensor | runs | first of them | why |\n|---|---|---|---|---|", causes(rec)),
        (
            "| many cases together |\n|---|",
            [row(p.get("says") or "") for p in rec.pooled if p["verdict"] == "fail"],
        ),
        ("| not judged | runs | first of them | why |\n|---|---|---|---|", not_judged(rec)),
    )
    parts = [f"## deltaproof: {rec.verdict}", totals]
    return "\n\n".join(parts + ["\n".join([head, *rows]) for head, rows in tables if rows]) + "\n"


def write(rec: Record, folder: str) -> None:
    """Both files. OSError: one cannot be written."""
    files.write(os.path.join(folder, "junit.xml"), junit(rec).encode())
    files.write(os.path.join(folder, "summary.md"), summary(rec).encode())


def main(argv: list[str]) -> int:
    try:
        write(record.load(os.path.join(argv[1], many.NAME)), argv[1])
    except (Malformed, OSError) as e:
        print(f"report: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    many.end(main)
