"""Sentences on the M chain alone, and its table of growth."""

from typing import Any

from markupsafe import Markup

from read.record import Case, Record, Run
from say.markup import H, join, link
from say.names import FORMATS, finite, formats_of, in_order, near, plural, sci, whole, words
from say.select import chain_cases, chain_title


def chain_errors(rec: Record, case: Case) -> dict[str, Any]:
    """{format: ({chunks: rel}, run)}"""
    return {
        f: ({p["chunks"]: p["rel"] for p in r["chain"]}, r)
        for f in formats_of(rec.of(case["name"]))
        for r in [
            next(
                (r for r in rec.of(case["name"]) if r["policy"].get("chain") == f and r["chain"]),
                None,
            )
        ]
        if r
    }


def overtaking(a: dict[int, float], b: dict[int, float]) -> tuple[int, int | None] | None:
    """The first chunk count n from which a stays above b to the end of the common grid. Returns (n,
    the count before it or None), or None if a ends below b."""
    ns = sorted(n for n in a if n in b and finite(a[n]) and finite(b[n]) and max(a[n], b[n]) > 0)
    above = [a[n] > b[n] for n in ns]
    if not above or not above[-1]:
        return None
    first = len(above) - 1
    while first > 0 and above[first - 1]:
        first -= 1
    return ns[first], ns[first - 1] if first else None


def overtake_sentence(case: Case, errs: dict[str, Any], fast: str, slow: str) -> Markup | None:
    if fast not in errs or slow not in errs:
        return None
    (a, ra), (b, _) = errs[fast], errs[slow]
    hit = overtaking(a, b)
    if not hit:
        return None
    n, before = hit
    end = max(k for k in a if k in b and finite(a[k]) and finite(b[k]))
    tail = f", and reaches {sci(a[end])} against {sci(b[end])} at {whole(end)}" if end > n else ""
    here = link(ra, chain_title(case))
    if before is None:
        return H(
            "{}: <b>{} is worse than {} from {} on</b>, the fewest measured ({} against {}){}.",
            here,
            words(fast),
            words(slow),
            plural(n, "chunk"),
            sci(a[n]),
            sci(b[n]),
            tail,
        )
    return H(
        "{}: <b>{} overtakes {} at {}</b> ({} against {}; at {} still {} against {}){}.",
        here,
        words(fast),
        words(slow),
        plural(n, "chunk"),
        sci(a[n]),
        sci(b[n]),
        whole(before),
        sci(a[before]),
        sci(b[before]),
        tail,
    )


SLOPE_KINDS = ((0.5, "unbiased rounding"), (1.0, "a bias"))


def slope_kind(s: float) -> str | None:
    """Which law of math.md j.7 a slope over 16..256 chunks follows; within 0.1 of 0.5 or 1, else
    none."""
    return next((text for at, text in SLOPE_KINDS if abs(s - at) <= 0.1), None)


def growth(rec: Record) -> tuple[list[Case], list[Any]]:
    """Table of the growth of errors in the regime that neither stalls nor forgets, a column a case.
    Returns (cases, [(format, [(run, slope, law or None, (effective bits, place) or None)])]); a
    missing run is None."""
    cases = [
        (c, chain_errors(rec, c)) for c in chain_cases(rec) if c.get("regime") in ("reflect", None)
    ]
    cases = [
        (c, e)
        for c, e in sorted(cases, key=lambda x: x[0].get("K") or 0)
        if any(finite(r.get("slope")) for _, r in e.values())
    ]
    rows = [
        (
            f,
            [
                (e[f][1], e[f][1]["slope"], slope_kind(e[f][1]["slope"]), bits_of(e[f][1]))
                if f in e and finite(e[f][1].get("slope"))
                else None
                for _, e in cases
            ],
        )
        for f in in_order([f for _, e in cases for f in e], FORMATS)
    ]
    return [c for c, _ in cases], [r for r in rows if any(r[1])]


def bits_of(run: Run) -> tuple[float, str] | None:
    """Effective bits (math.md j.7), where the record has them, and where the rounding takes
    place."""
    b = run.get("bits")
    if not b or not finite(b["effective"]):
        return None
    place = (
        "truncated operands, biased"
        if b.get("biased") and finite(b.get("truncated"))
        else b["model"] + (", biased" if b.get("biased") else "")
    )
    return b["effective"], place


def other_biases(with_errors: list[Any]) -> Markup | None:
    """Slopes of a bias where none is expected: formats that round to nearest, outside the regimes
    that stall or forget."""
    odd = [
        H("{} in {} ({:.2f})", words(f), link(r, chain_title(c)), r["slope"])
        for c, e in with_errors
        if c.get("regime") in ("reflect", "subspace", "corr")
        for f, (_, r) in e.items()
        if f != "tf32rz" and finite(r.get("slope")) and slope_kind(r["slope"]) == "a bias"
    ]
    return (
        H("A slope near 1 although the format rounds to nearest: {}.", join(", ", odd))
        if odd
        else None
    )


def lost_sentence(case: Case, errs: dict[str, Any]) -> Markup | None:
    """Formats whose M ends wrong by more than M itself."""
    lost = [
        (f, e[max(e)], r) for f, (e, r) in errs.items() if finite(e[max(e)]) and e[max(e)] > 1.5
    ]
    if not lost:
        return None
    p = max(lost[0][2]["chain"], key=lambda p: p["chunks"])
    norm = f" (|M|_F = {sci(p['norm'])})" if finite(p.get("norm")) else ""
    return H(
        "{}: after {}{} M is lost, its error in units of its own norm being {}.",
        chain_title(case),
        plural(p["chunks"], "chunk"),
        norm,
        ", ".join(f"{near(x)} with {words(f)}" for f, x, _ in lost),
    )


def vanished_sentence(rec: Record, cases: list[Case]) -> Markup | None:
    """Regimes that forget: |M|_F at the end below 1e-6."""
    gone = []
    for c in cases:
        for _f, (_e, r) in chain_errors(rec, c).items():
            p = max(r["chain"], key=lambda p: p["chunks"])
            if finite(p.get("norm")) and p["norm"] < 1e-6:
                gone.append(
                    f"{chain_title(c)} (|M|_F = {sci(p['norm'])} after "
                    f"{plural(p['chunks'], 'chunk')})"
                )
                break
    return (
        H("Where the state forgets, the format of M does not matter: {}.", "; ".join(gone))
        if gone
        else None
    )


def chain_sentences(rec: Record) -> list[Markup]:
    cases, out = chain_cases(rec), []
    with_errors = [(c, chain_errors(rec, c)) for c in cases]
    first = sorted(
        with_errors,
        key=lambda ce: (
            ce[0].get("regime") != "reflect",
            -max((n for e, _ in ce[1].values() for n in e), default=0),
        ),
    )
    hits = [s for c, e in first for s in [overtake_sentence(c, e, "tf32rz", "bf16")] if s]
    out += hits[:2] + ([also_overtakes(first)] if len(hits) > 2 else [])
    out += [s for s in [other_biases(with_errors)] if s]
    out += [s for c, e in with_errors for s in [lost_sentence(c, e)] if s]
    gone = vanished_sentence(rec, cases)
    return out + ([gone] if gone else [])


def also_overtakes(first: list[Any]) -> Markup:
    """The regimes that did not get a sentence of their own, by chunk count."""
    hits = [
        (c, overtaking(e["tf32rz"][0], e["bf16"][0]))
        for c, e in first
        if "tf32rz" in e and "bf16" in e
    ]
    at = {}
    for c, hit in [h for h in hits if h[1]][2:]:
        at.setdefault(hit[0], []).append(chain_title(c))
    return H(
        "It also does so {}.",
        "; ".join(
            f"at {plural(n, 'chunk')} in {', '.join(names)}" for n, names in sorted(at.items())
        ),
    )
