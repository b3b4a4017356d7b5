"""Carried states in words and cells: how long o stays within what is needed, by format and case."""

from typing import Any

from say.names import plural, sci, whole

Rows = list[dict[str, Any]]


def _rank(r: dict[str, Any]) -> tuple[bool, int, float]:
    """Larger: the head that stands for a case and format, as `deltaproof carry` prints it."""
    return r["exceeded"] > 0, -r["exceeded"], r.get("largest_o") or 0.0


def worst(rows: Rows) -> dict[tuple[str, str], dict[str, Any]]:
    out: dict[tuple[str, str], dict[str, Any]] = {}
    for r in rows:
        key = r["case"], r["format"]
        if key not in out or _rank(r) > _rank(out[key]):
            out[key] = r
    return out


def lasts(r: dict[str, Any]) -> str:
    return f"all {whole(r['steps'])}" if not r["exceeded"] else whole(r["exceeded"] - 1)


def sentences(rows: Rows) -> list[str]:
    found, out = worst(rows), []
    for case in dict.fromkeys(r["case"] for r in rows):
        of = {f: r for (c, f), r in found.items() if c == case}
        good = [f for f, r in of.items() if not r["exceeded"]]
        bad = sorted((r["exceeded"] - 1, f) for f, r in of.items() if r["exceeded"])
        one = next(iter(of.values()))
        said = f"{case}: o stays within {one['need']:g} for all {plural(one['steps'], 'step')} "
        said += f"with the state in {', '.join(good)}" if good else "in none of the formats"
        if bad:
            said += f"; {bad[-1][1]} lasts {plural(bad[-1][0], 'step')}, "
            said += f"{bad[0][1]} {whole(bad[0][0])}"
        out.append(said + ".")
    return out


def table(rows: Rows) -> dict[str, Any]:
    """Rows of formats, columns of cases: steps, and the largest error of o."""
    found = worst(rows)
    cases = list(dict.fromkeys(r["case"] for r in rows))
    formats = list(dict.fromkeys(r["format"] for r in rows))
    lines = [(f, [cell(found[c, f]) if (c, f) in found else None for c in cases]) for f in formats]
    return {"cases": cases, "rows": lines}


def cell(r: dict[str, Any]) -> dict[str, Any]:
    return {"lasts": lasts(r), "short": r["exceeded"] > 0, "error": sci(r.get("largest_o"))}


def details(rows: Rows) -> list[tuple[str, str, list[str]]]:
    keys = ("largest_o", "slope", "bias", "of_sound", "of_probable")
    return [
        (c, f, [whole(r["head"]), sci(last(r)), *(sci(r.get(k)) for k in keys)])
        for (c, f), r in worst(rows).items()
    ]


def last(r: dict[str, Any]) -> float | None:
    """Error of the state at the end; None: beyond all numbers, or no step."""
    return r["error"][-1] if r["error"] else None
