"""Sentences on failed runs."""

from markupsafe import Markup

from read.record import Record, Run, Tensor
from say.markup import H, link
from say.names import finite, near, plural, sci
from say.verdicts import by_draws, severity, worst_rank, worst_tensor


def failures(rec: Record, most: int = 8) -> list[Markup]:
    bad = [r for r in rec.runs if r["verdict"] == "fail"]
    bad.sort(
        key=lambda r: severity(worst_tensor(r)) if worst_tensor(r) else (False, False, 0.0),
        reverse=True,
    )
    out = [failure(r) for r in bad[:most]]
    if len(bad) > most:
        out.append(H("{} fail: see the table of verdicts.", plural(len(bad) - most, "more run")))
    return out


def failure(run: Run, tensor: Tensor | None = None) -> Markup:
    """The tier of the run: of that tensor, else of the worst one."""
    t = tensor or worst_tensor(run)
    where = H("{}: ", link(run, run["id"]))
    if "nothing rounds" in (run.get("why") or ""):  # an exact case says whose data stands where
        return where + run["why"] + "."
    bits = run.get("bits") or {}
    if bits.get("wrong") and bits.get("says"):
        where += H("<b>{}</b>. ", bits["says"])
        if t is None or t["verdict"] != "fail":
            return where + "Within its worst-case bound."
    if t is None or t["verdict"] != "fail" or not finite(t.get("ratio")) or by_draws(t):
        t = tensor or next((t for t in run["tensors"] if t["verdict"] == "fail"), {})
        return (
            where
            + (H("<b>{}</b>: ", t["name"]) if t else "")
            + (t.get("why") or run.get("why") or "no reason recorded")
            + "."
        )
    rank = worst_rank(t)
    at = f" at rank {rank}" if rank is not None and run["ranks"] > 1 else ""
    return where + H(
        "error of <b>{}</b> is {} times its bound{} (relative error {}).",
        t["name"],
        near(t["ratio"]),
        at,
        sci(t.get("rel_fro")),
    )
