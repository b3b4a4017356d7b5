"""The page over many records: a table a kernel and machine, the newest record first."""

import os
from dataclasses import dataclass
from urllib.parse import quote

from page.render import plain_page
from read.record import Record
from say.names import finite

Key = tuple[str, str]  # kernel, machine


@dataclass(frozen=True)
class Row:
    """One record in the table. The largest error over its limit among all judged tensors is
    `nearest`. Its change from the previous record, in percent, is `moved`."""

    created: str
    kernel_commit: str
    commit: str
    verdict: str
    totals: dict[str, int]
    nearest: str
    moved: str
    link: str
    page: str | None


def kernel(rec: Record) -> str:
    """The subject: the label, else libraries and files by name, else the backends."""
    label = rec.provenance.get("label")
    if label:
        return str(label)
    own = {r.get("path") or r["case"] for r in rec.runs if r.get("backend") in ("subject", "file")}
    names = own or {r.get("backend") or "sim" for r in rec.runs}
    return " ".join(sorted(str(n) for n in names)) or "nothing"


def machine(rec: Record) -> str:
    notes = rec.provenance.get("notes", {})
    return str(notes.get("gpu") or rec.program.get("device") or f"{rec.program.get('cores')} cores")


def nearest(rec: Record) -> tuple[float, str]:
    """(error over its limit, tensor and run) of what stands nearest."""
    best, where = 0.0, ""
    for run in rec.runs:
        for t in run["tensors"]:
            excess = (t.get("expected") or {}).get("excess")
            for share in (t.get("ratio"), excess):
                if t["verdict"] in ("pass", "fail") and finite(share) and share > best:
                    best, where = float(share), f"{t['name']} of {run['case']}"
    return best, where


def rows_of(folder: str, records: list[tuple[str, Record]]) -> list[Row]:
    """Records of one kernel on one machine, newest first."""
    out: list[Row] = []
    before = 0.0
    for path, rec in sorted(records, key=lambda x: x[1].created or ""):
        share, where = nearest(rec)
        report = os.path.join(os.path.dirname(path), "report.html")
        out.append(
            Row(
                created=(rec.created or "?").replace("T", " ").removesuffix("Z"),
                kernel_commit=str(rec.provenance.get("kernel_commit", ""))[:12],
                commit=str(rec.program.get("commit") or "?")[:12],
                verdict=rec.verdict,
                totals=rec.totals,
                nearest=f"{share:.2g}, {where}" if where else "nothing judged",
                moved=f"{100 * (share / before - 1):+.0f}%" if before and share else "",
                link=quote(path),
                page=quote(report) if os.path.exists(os.path.join(folder, report)) else None,
            )
        )
        before = share
    return out[::-1]


def page(folder: str, records: list[tuple[str, Record]]) -> str:
    groups: dict[Key, list[tuple[str, Record]]] = {}
    for path, rec in records:
        groups.setdefault((kernel(rec), machine(rec)), []).append((path, rec))
    return plain_page(
        "index.html",
        count=len(records),
        failing=sum(rec.verdict != "pass" for _, rec in records),
        groups=[(k, rows_of(folder, v)) for k, v in sorted(groups.items())],
    )
