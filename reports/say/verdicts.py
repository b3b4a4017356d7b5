"""A record's verdict as order and marks of the page."""

import math

from read.record import Run, Tensor
from say.names import finite


def verdict_word(verdict: str) -> str:
    """A record's verdict, in the words of the program's last line."""
    return {"error": "COULD NOT JUDGE"}.get(verdict, verdict.upper())


def severity(t: Tensor) -> tuple[bool, bool, float]:
    """Order of judged tensors: fails first, passes that prove something before those that do not,
    then by ratio; a passing nan or inf is last."""
    if t["verdict"] == "fail" and by_draws(t):
        x = over_limit(t)
        return True, False, x if x is not None and x == x else math.inf
    return (
        t["verdict"] == "fail",
        not vacuous(t),
        t["ratio"] if finite(t["ratio"]) else math.inf if t["verdict"] == "fail" else -1.0,
    )


def by_draws(t: Tensor) -> bool:
    """Did draws decide: of the tensor itself, or of what its sum is made of?"""
    return t.get("tier") in ("expected", "sum")


def worst_tensor(run: Run) -> Tensor | None:
    """The judged tensor nearest to its bound, or farthest beyond it."""
    return max(
        (
            t
            for t in run["tensors"]
            if t.get("ratio") is not None and t["verdict"] in ("pass", "fail")
        ),
        key=severity,
        default=None,
    )


def vacuous(t: Tensor) -> bool:
    """A pass under a bound larger than the tensor itself (bound / |want|_F > 1), with nothing
    expected to judge by: true, and worth nothing."""
    return (
        t["verdict"] == "pass"
        and not by_draws(t)
        and t.get("bound") is not None
        and not t["bound"] <= 1
    )


def worst_rank(t: Tensor) -> int | None:
    """First rank with the largest ratio, or None."""
    rs = [(x, -i) for i, x in enumerate(t.get("per_rank_ratio") or []) if x is not None and x == x]
    return -max(rs)[1] if rs else None


def over_limit(t: Tensor) -> float | None:
    """Error over the limit that decided, 1 being the limit. If draws decided, it is the largest
    over the levels, else error over bound; of an exact case 0 or inf. None: nothing to divide
    by."""
    expected = t.get("expected")
    if by_draws(t) and expected:
        return expected["excess"]
    if t.get("tier") == "exact":
        return 0.0 if t.get("rel_fro") == 0 else math.inf
    return t.get("ratio")


def rank_over_limit(t: Tensor, rank: int) -> float | None:
    """The same for one rank. Where draws decided, the record has a limit for the whole tensor
    alone:
    the rank's relative error is held against that."""
    per_rank = t.get("per_rank") or []
    e = per_rank[rank] if rank < len(per_rank) else None
    limit = relative_limit(t, "rank")
    if by_draws(t) and limit:
        return None if e is None else e / limit
    if t.get("tier") == "exact":
        return None if e is None else 0.0 if e == 0 else math.inf
    ratio = t.get("per_rank_ratio") or []
    return ratio[rank] if rank < len(ratio) else None


def relative_limit(t: Tensor, level: str) -> float | None:
    """Limit of the tensor's relative error. Where draws decided: what they expect of the tensor,
    times the factor that the level allows (the deciding level's where there is no such level)."""
    expected = t.get("expected")
    if by_draws(t) and expected:
        at = expected.get(level) or expected[expected["level"]]
        limit = (expected.get("rel") or math.nan) * at["limit"]
    else:
        limit = t.get("bound") if t.get("bound") is not None else math.nan
    return limit if finite(limit) and limit > 0 else None


def place(t: Tensor) -> dict:
    """The row that carries the failure, else the worst row: {} where the record has neither."""
    return t.get("failed") or t.get("worst_token") or {}
