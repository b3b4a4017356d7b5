"""Strips of error over limit along tokens, ranks and heads of one tensor, as paths for inline SVG.

Every number comes from the record. Where draws decide, the record has one limit for the whole
tensor. A strip then shows where the error lies, and the verdict names the row that fails.
"""

import math
from dataclasses import dataclass

from read.record import Case, Tensor
from say.names import finite, near, sci, whole
from say.verdicts import by_draws, place, relative_limit

MOST = 256  # bars of a strip; more are drawn as the largest of neighbours
HEIGHT = 100


@dataclass
class Strip:
    title: str  # along what
    what: str  # what a bar is, with its unit
    first: str  # labels of the axis along the strip
    last: str
    top: str  # and of the axis across it
    bottom: str
    within: str  # path of the bars up to the limit
    beyond: str  # path of the others
    limit: float | None  # height of the limit's line; None: the limit is 0 or unknown
    mark: float | None  # where the failed row lies
    bars: int
    says: str  # the picture in words


def strips(t: Tensor, case: Case) -> list[Strip]:
    return [s for s in (_tokens(t, case), _ranks(t), _heads(t)) if s]


def _tokens(t: Tensor, case: Case) -> Strip | None:
    windows = t.get("windows")
    if not windows or len(windows["rel"]) < 2:
        return None
    size, tokens = windows["size"], case.get("T") or windows["size"] * len(windows["rel"])
    token = place(t).get("token")
    mark = token / size if token is not None and token >= 0 else None
    ends = ("token 0", whole(tokens))
    return _strip(t, "window", f"tokens, {size} a bar", windows["rel"], ends, mark)


def _ranks(t: Tensor) -> Strip | None:
    per_rank = t.get("per_rank") or []
    if len(per_rank) < 2:
        return None
    ends = ("rank 0", str(len(per_rank) - 1))
    rank = place(t).get("rank")
    mark = rank + 0.5 if rank is not None and rank >= 0 else None
    ratio = t.get("per_rank_ratio")
    if ratio and not by_draws(t) and t.get("tier") != "exact":
        return _strip(t, "rank", "ranks", ratio, ends, mark, "error / bound of the rank")
    return _strip(t, "rank", "ranks", per_rank, ends, mark)


def _heads(t: Tensor) -> Strip | None:
    per_head = [h or [] for h in t.get("per_head") or []]
    heads = max((len(h) for h in per_head), default=0)
    if heads < 2:
        return None
    values = [h[i] if i < len(h) else None for h in per_head for i in range(heads)]
    at = place(t)
    rank, head = at.get("rank"), at.get("head")
    known = rank is not None and head is not None and rank >= 0 and head >= 0
    mark = rank * heads + head + 0.5 if known else None
    title = "heads" if len(per_head) == 1 else f"heads, {heads} on each of {len(per_head)} ranks"
    last = str(heads - 1) if len(per_head) == 1 else f"rank {len(per_head) - 1}, {heads - 1}"
    return _strip(
        t, "rank", title, values, ("head 0" if len(per_head) == 1 else "rank 0, head 0", last), mark
    )


def _strip(
    t: Tensor,
    level: str,
    title: str,
    values: list[float | None],
    ends: tuple[str, str],
    mark: float | None,
    what: str = "",
) -> Strip | None:
    limit = None if t.get("tier") == "exact" else relative_limit(t, level)
    if not what:
        what = "relative error / limit of the tensor" if limit else "relative error"
        values = [v / limit if limit and v is not None else v for v in values]
        judged = limit is not None or t.get("tier") == "exact"
    else:
        judged = True
    bars = _binned(values)
    sizes = [v for v in bars if finite(v) and v > 0]
    if not sizes and not any(v is not None and not finite(v) for v in bars):
        return None
    exact = t.get("tier") == "exact"
    one = judged and not exact
    unit = "×" if one else ""
    high = math.ceil(math.log10(max([*sizes, 1.0] if one else sizes or [1.0])) + 0.02)
    low = max(min(math.floor(math.log10(min(sizes, default=1.0))), high - 1), high - 6)
    over = [v is not None and (v > 0 if exact else judged and not v <= 1) for v in bars]
    paths = [_path(bars, [x is side for x in over], low, high) for side in (False, True)]
    worst = max(range(len(bars)), key=lambda i: _order(bars[i]))
    return Strip(
        title,
        what,
        *ends,
        top=sci(10.0**high, 1) + unit,
        bottom=sci(10.0**low, 1) + unit,
        within=paths[0],
        beyond=paths[1],
        limit=_height(1.0, low, high) if one else None,
        mark=None if mark is None else mark * len(bars) / len(values),
        bars=len(bars),
        says=f"{title}: largest {near(bars[worst])} at bar {worst + 1} of {len(bars)}",
    )


def _binned(values: list[float | None]) -> list[float | None]:
    step = math.ceil(len(values) / MOST)
    return [max(values[i : i + step], key=_order) for i in range(0, len(values), step)]


def _order(v: float | None) -> float:
    return -1.0 if v is None else v if finite(v) else math.inf


def _height(v: float, low: int, high: int) -> float:
    if not finite(v):
        return 0.0
    if v <= 0:
        return float(HEIGHT)
    at = (math.log10(v) - low) / (high - low)
    return round(HEIGHT * (1 - min(max(at, 0.02), 1)), 1)


def _path(bars: list[float | None], chosen: list[bool], low: int, high: int) -> str:
    some = [
        (i, v) for i, (v, c) in enumerate(zip(bars, chosen, strict=True)) if c and v is not None
    ]
    return "".join(
        f"M{i + 0.08:g} {HEIGHT}V{_height(v, low, high):g}h.84V{HEIGHT}z" for i, v in some
    )
