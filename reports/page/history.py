"""The page over many records: the series that moved most, as panels and as a table."""

import math

from draw.files import svg
from draw.history import Panel, Series, draw_history
from page.render import data_uri, plain_page
from read.record import Record

PANELS, LINES, ROWS = 24, 6, 2000  # tensors shown, runs in one panel, rows of the table
Name = tuple[str, str]  # tensor, ID of the run


def series(records: list[Record]) -> dict[Name, Series]:
    """{(tensor, id): [error or None, one a record]}."""
    out: dict[Name, Series] = {}
    for i, rec in enumerate(records):
        for run in rec.runs:
            for t in run["tensors"]:
                values = out.setdefault((t["name"], run["id"]), [None] * len(records))
                values[i] = t.get("rel_fro")
    return out


def moved(values: Series) -> float:
    """Spread of a series in decades; failing to be a number, or leaving 0, counts as most."""
    known = [v for v in values if v is not None]
    same = lambda v: v == known[0] or (math.isnan(v) and math.isnan(known[0]))
    if len(known) < 2 or all(same(v) for v in known):
        return 0.0
    if any(not math.isfinite(v) or v == 0 for v in known):
        return math.inf
    return math.log10(max(known) / min(known))


def page(records: list[Record]) -> str:
    everything = series(records)
    labels = [(r.program.get("commit") or "?")[:9] for r in records]
    order = sorted(
        ((name, values) for name, values in everything.items() if moved(values) > 0),
        key=lambda kv: (-moved(kv[1]), kv[0]),
    )
    panels = choose(order)
    rows = [
        (name, run_id, ["–" if v is None else format(v, ".3g") for v in values])
        for (name, run_id), values in order[:ROWS]
    ]
    return plain_page(
        "history.html",
        labels=labels,
        verdicts=[
            (label, r.created or "", r.verdict) for label, r in zip(labels, records, strict=True)
        ],
        rows=rows,
        all_rows=len(order),
        of=len(everything),
        lines=LINES,
        image=data_uri(svg(draw_history(panels, labels))) if panels else None,
    )


def choose(order: list[tuple[Name, Series]]) -> list[Panel]:
    """The tensors that moved most, of each the runs that moved most."""
    panels: dict[str, list[tuple[str, Series]]] = {}
    for (name, run_id), values in order:
        if len(panels) == PANELS and name not in panels:
            continue
        if len(panels.setdefault(name, [])) < LINES:
            panels[name].append((run_id, values))
    return list(panels.items())
