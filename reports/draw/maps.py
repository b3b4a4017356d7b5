"""Maps of error over limit: case by tensor, and rank by tensor."""

import math
from typing import Any

from matplotlib.figure import Figure

from draw.heat import draw_overview, draw_rank_maps, heat_table
from draw.plot import Plot
from read.record import NO_RANKS, Record, Run, Tensor, tensor
from say.names import bases_of, finite
from say.select import heads, judged_recurrences, tensor_order, top_ranks, without_error
from say.verdicts import by_draws, over_limit, rank_over_limit, severity, vacuous, worst_tensor


def map_plots(rec: Record) -> list[Plot]:
    return overview_map(rec) + rank_maps(rec)


def tensors_of(runs: list[Run]) -> list[str]:
    return tensor_order(runs)


def overview_rows(rec: Record) -> list[tuple[str, list[Run]]]:
    """[(label, [runs])] one row per recurrence or conv case and base."""
    out = []
    for c in rec.cases.values():
        runs = [r for r in rec.of(c["name"]) if r["tensors"]]
        for b in bases_of(runs) or ([None] if runs else []):
            some = [r for r in runs if r["policy"].get("base") == b]
            if some and c["op"] not in NO_RANKS:
                out.append((c["name"] + (f"  {b}" if b else ""), some))
    return out


def overview_map(rec: Record) -> list[Plot]:
    rows = overview_rows(rec)
    if not rows:
        return []
    cap = (
        "Error over the limit that decided, the largest over all runs, ranks and heads of a "
        "case and "
        "base policy. 1 is the limit: below it the number formats explain the error. The "
        "mark is the "
        "verdict: failures are white on black, framed, and lead to their run. Dotted: passes, but "
        "every such bound exceeds the tensor's own norm, so that it proves nothing. Hatched: "
        "unjudged or skipped; blank: the case has no such tensor."
    )
    out = []
    for part in range(0, len(rows), 40):
        some = rows[part : part + 40]
        out.append(
            Plot(
                "bounds-cases" + (f"-{part // 40 + 1}" if len(rows) > 40 else ""),
                "Error over limit, all cases",
                cap,
                lambda some=some: overview(some),
                lambda some=some: overview_table(some),
            )
        )
    return out


def cell(t: Tensor | None, rank: int | None = None) -> tuple[str | None, float | None]:
    """(kind, error over limit) of a tensor, or of one rank of it. The kind is the verdict's:
    'fail',
    'pass', 'empty' (passes under a bound above its own norm), 'hatch' (unjudged, skipped) or None
    (no such tensor)."""
    if t is None or (rank is not None and at(t.get("per_rank"), rank) is None):
        return None, None
    x = over_limit(t) if rank is None else rank_over_limit(t, rank)
    if t["verdict"] == "fail" and (rank is None or rank in failing_ranks(t)):
        return "fail", math.nan if x is None else x
    if t["verdict"] in ("unjudged", "skipped") or x is None:
        return "hatch", None
    return ("empty" if vacuous(t) else "pass"), x


def failing_ranks(t: Tensor) -> list[int]:
    """Ranks with failures in a failed tensor: the rank of the failing row and all ranks beyond
    their limits. Every rank if the record does not say."""
    n = len(t.get("per_rank") or [])
    beyond = [r for r in range(n) if not (rank_over_limit(t, r) or 0) <= 1]
    at_row = (t.get("failed") or {}).get("rank")
    if at_row is not None and by_draws(t):  # a rank's own limit is not in the record
        return [at_row]
    some = beyond + ([at_row] if at_row is not None else [])
    return some or list(range(n))


def at(values: Any, i: int) -> Any:
    return values[i] if values is not None and i < len(values) else None


RANK_OF_KIND = ("hatch", "empty", "pass", "fail")  # which of several cells stands for all


def merge_cells(cells: list[Any]) -> Any:
    """The worst of several cells (kind, ratio, run). Failures come first, then the largest ratio
    under a useful bound. A passing nan or inf (on purpose) counts least."""
    cells = [c for c in cells if c[0]]
    return max(
        cells,
        key=lambda c: (RANK_OF_KIND.index(c[0]), c[1] if finite(c[1]) else -1.0),
        default=(None, None, None),
    )


def overview_grid(rows: list[Any]) -> tuple[list[str], list[Any]]:
    """(tensors, rows of (kind, ratio, run))"""
    names = tensors_of([r for _, rs in rows for r in rs])
    return names, [
        [merge_cells([(*cell(tensor(r, t)), r) for r in rs]) for t in names] for _, rs in rows
    ]


def overview(rows: list[tuple[str, list[Run]]]) -> Figure:
    names, grid = overview_grid(rows)
    return draw_overview(names, [label for label, _ in rows], grid)


def overview_table(rows: list[tuple[str, list[Run]]]) -> list[dict[str, Any]]:
    names, grid = overview_grid(rows)
    labels = [label for label, _ in rows]
    return [heat_table("", None, names, list(zip(labels, grid, strict=True)))]


def rank_grid(run: Run) -> tuple[list[str], list[Any]]:
    """(tensors, a line of (kind, ratio, run) a rank)"""
    names = tensors_of([run])
    of = {t["name"]: t for t in run["tensors"]}
    return names, [[(*cell(of[t], r), run) for t in names] for r in range(run["ranks"])]


def rank_maps_figure(runs: list[Run]) -> Figure:
    return draw_rank_maps([(run["id"], *rank_grid(run)) for run in runs])


def rank_tables(runs: list[Run]) -> list[dict[str, Any]]:
    """One table a run; a click leads to the run."""
    out = []
    for run in runs:
        names, grid = rank_grid(run)
        lines = [(f"rank {r}", line) for r, line in enumerate(grid)]
        out.append(heat_table(run["id"], run["n"], names, lines))
    return out


def worst_run(runs: list[Run]) -> Run | None:
    """The run whose worst tensor is nearest to its bound; on a tie, the one with more ranks."""
    return max(runs, key=lambda r: (run_severity(r), r["ranks"]), default=None)


def run_severity(run: Run) -> tuple[bool, bool, float]:
    t = worst_tensor(run)
    return severity(t) if t else (False, False, -2.0)


def map_choice(rec: Record, most: int = 8) -> list[Run]:
    """Runs for the maps of rank by tensor. First is the worst run of each head and base at the most
    ranks, then the worst split run of each other case and base."""
    split = lambda c, b, n=1: [
        r
        for r in rec.of(c["name"], base=b)
        if r["ranks"] > 1 and r["ranks"] >= n and any(t.get("per_rank_ratio") for t in r["tensors"])
    ]
    most_split = lambda c, b: split(c, b, top_ranks(rec, c["name"]))
    first = [
        worst_run(most_split(c, b))
        for c in heads(rec)
        for b in bases_of(rec.of(c["name"]))
        if most_split(c, b)
    ]
    rest = [
        worst_run(split(c, b))
        for c in judged_recurrences(rec)
        if c not in heads(rec) and not without_error(rec, c)
        for b in bases_of(rec.of(c["name"]))
        if split(c, b)
    ]
    rest.sort(key=run_severity, reverse=True)
    return (first + rest)[:most]


def rank_maps(rec: Record) -> list[Plot]:
    runs = map_choice(rec)
    if not runs:
        return []
    cap = (
        "Error over limit, rank by rank, for the run of each case and base policy that comes "
        "closest "
        "to a bound (the heads of the figures above: among the runs with the most ranks). "
        "Where draws "
        "decide, a rank's relative error is held against the limit of the whole tensor. "
        "Cells as in "
        "the figure before; blank: the rank has no such tensor (rank 0 starts from no S_in, "
        "the last "
        "rank ends in no dS_out)."
    )
    out = []
    for part in range(0, len(runs), 4):
        some = runs[part : part + 4]
        out.append(
            Plot(
                "bounds-ranks" + (f"-{part // 4 + 1}" if len(runs) > 4 else ""),
                "Error over limit, rank by tensor",
                cap,
                lambda some=some: rank_maps_figure(some),
                lambda some=some: rank_tables(some),
            )
        )
    return out
