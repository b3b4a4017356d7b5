"""One row of a tensor, one run and one case in words."""

from typing import Any

from read.record import Case, Run, Tensor
from say.names import finite, near, plural, sci, whole
from say.verdicts import place, vacuous

SHAPE = ("T", "Nseq", "H", "HV", "K", "V", "R", "D", "W")


def place_text(w: dict[str, Any]) -> str:
    """rank 1, sequence 0, token 130, head 0, entry 7: what does not apply (-1) is left out."""
    names = (("rank",) * 2, ("sequence",) * 2, ("token",) * 2, ("head",) * 2, ("entry", "index"))
    some = [(said, w.get(key)) for said, key in names]
    return ", ".join(f"{said} {whole(x)}" for said, x in some if x is not None and x >= 0)


def place_short(w: dict[str, Any]) -> str:
    """r1 s0 t130 h0 [7]"""
    keys = (("r", "rank"), ("s", "sequence"), ("t", "token"), ("h", "head"))
    at = [f"{k}{w[n]}" for k, n in keys if w.get(n) is not None and w[n] >= 0]
    if w.get("index") is not None and w["index"] >= 0:
        at.append(f"[{w['index']}]")
    return " ".join(at)


def decimal(hexadecimal: str) -> str:
    """0x1.8p-3 -> 0.1875; nine digits tell all fp32 apart."""
    try:
        return f"{float.fromhex(hexadecimal):.9g}"
    except (ValueError, OverflowError):
        return hexadecimal


def both(hexadecimal: str | None) -> str:
    """0.1875 (0x1.8p-3)"""
    if not hexadecimal:
        return "–"
    d = decimal(hexadecimal)
    return d if d == hexadecimal else f"{d} ({hexadecimal})"


def numbers_of_row(t: Tensor) -> list[tuple[str, str]]:
    """[(name, number)] of the row that carries the failure, else of the worst row."""
    w = place(t)
    rows = [
        ("at", place_text(w)),
        ("got", both(w.get("got")) if w.get("got") else ""),
        ("want", both(w.get("want")) if w.get("want") else ""),
        ("error of the row", sci(w.get("error"), 3) if w.get("error") is not None else ""),
        ("its bound", sci(w.get("bound"), 3) if w.get("bound") is not None else ""),
        ("size of the row", sci(w.get("size"), 3) if w.get("size") is not None else ""),
        ("error over its limit", near(w.get("times")) if w.get("times") is not None else ""),
        ("row error", sci(w.get("rel"), 3) if w.get("rel") is not None else ""),
    ]
    return [(k, v) for k, v in rows if v]


def decided_by(t: Tensor) -> str:
    """The basis of a verdict."""
    e = t.get("expected")
    if t.get("tier") in ("expected", "sum") and e:
        return f"{t['tier']}, {e['level']}"
    return (t.get("tier") or "") + (" (bound > 1)" if vacuous(t) else "")


def shape(case: Case) -> str:
    sizes = [(k, case.get(k)) for k in SHAPE]
    return ", ".join(f"{k} {whole(v)}" for k, v in sizes if isinstance(v, int))


def case_facts(case: Case) -> str:
    facts = [f"op {case['op']}", shape(case)]
    facts += [f"{k} {case[k]}" for k in ("regime", "session") if case.get(k)]
    if case.get("session_state", "returned") != "returned":
        facts.append(f"state kept in {case['session_state']} between calls")
    if case.get("session_slots"):
        facts.append(f"states in a pool of {case['session_slots']} slots")
    facts += [f"source {case['source']}"] if case.get("source") else []
    return "; ".join(f for f in facts if f)


def truth_text(truth: dict[str, Any]) -> str:
    if not truth:
        return ""
    bits = truth.get("bits") if truth["kind"] != "fp64" else None
    return truth["kind"] + (f" {bits} bits" if bits else "")


def audit_text(truth: dict[str, Any]) -> str:
    """MPFR's findings in random columns of a double-double truth."""
    a = truth.get("audit")
    if not a:
        return ""
    columns, tokens = plural(a["columns"], "column"), plural(a.get("tokens") or 0, "token")
    return (
        f"audited by MPFR: {columns}, {tokens}, seed {a.get('seed')}, "
        f"largest difference {sci(a['worst'])} of both radii"
    )


def condition_text(c: dict[str, Any] | None) -> str:
    """How ill-conditioned the problem's own triangular systems are, and where."""
    if not c:
        return ""
    at = f"rank {c.get('rank')}, head {c.get('head')}, chunk at token {c.get('token')}"
    entry = sci(c.get("entry"))
    return f"condition {sci(c['condition'])} ({at}), largest entry of an inverse {entry}"


def run_facts(run: Run) -> str:
    truth, outcome = run["truth"], run.get("outcome")
    facts = [
        f"truth {truth_text(truth)}" if truth else "",
        f"radius {sci(truth.get('radius'))}" if finite(truth.get("radius")) else "",
        f"on {truth['device']}" if truth.get("device") else "",
        audit_text(truth),
        "truth from the cache" if truth.get("cached") else "",
        f"path {run['path']}" if run.get("path") else "",
        f"the subject's process: {outcome}" if outcome and outcome != "returned" else "",
        f"{run['seconds']:.2f} s" if finite(run.get("seconds")) else "",
        f"slope {run['slope']:.2f}" if finite(run.get("slope")) else "",
        condition_text(run.get("condition")),
    ]
    return ", ".join(f for f in facts if f)
