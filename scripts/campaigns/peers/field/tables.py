"""One table of the lines of JSON that speed.py writes, one a kernel and row.
Standard library only."""

import json

from rows import BY_NAME, ROWS, floor_bytes

OURS = "deltaproof"


def read_lines(path):
    """Entries of a file of lines; the last one may be cut off."""
    if not path.is_file():
        return []
    out = []
    for line in path.read_text().splitlines():
        try:
            out.append(json.loads(line))
        except ValueError:
            continue
    return [e for e in out if "row" in e]


def merged(entries):
    """{row: {kernel: entry}}: a later time replaces an earlier one, and never a reason a time."""
    got = {}
    for e in entries:
        of_row = got.setdefault(e["row"], {})
        if "us" in e or "us" not in of_row.get(e["kernel"], {}):
            of_row[e["kernel"]] = e
    return got


def measured(entries):
    """(kernel, row) that need no second try: timed, or refused by the kernel."""
    return {(e["kernel"], e["row"]) for e in entries if "us" in e or e.get("refused")}


def as_rows(entries, rate):
    """Rows of speed.json, in the order of rows.py."""
    times = merged(entries)
    return [
        {
            "row": r.name,
            "floor_us": round(1e6 * floor_bytes(r) / rate, 2) if rate else None,
            "times": times[r.name],
        }
        for r in ROWS
        if r.name in times
    ]


def number(us):
    return f"{us / 1000:.3f} ms" if us >= 100 else f"{us:.2f} us"


def fastest(times):
    """The kernel with the least time, and None where nothing was timed."""
    timed = {k: e["us"] for k, e in times.items() if "us" in e}
    return min(timed, key=timed.get) if timed else None


def cell(name, times, best):
    """A time, bold where it is the least; * where the clock is not a graph."""
    e = times.get(name, {})
    if "us" not in e:
        return "-"
    text = number(e["us"]) + ("" if e["clock"] == "graph" else "*")
    return f"**{text}**" if name == best else text


def page_rows(rows):
    """Markdown: ours, then the peers in the order of their times; the fastest in bold."""
    lines = ["| row | floor | deltaproof | others |", "|---|---|---|---|"]
    for r in rows:
        times, best = r["times"], fastest(r["times"])
        if best is None:
            continue
        others = sorted(
            (k for k, e in times.items() if k != OURS and "us" in e), key=lambda k: times[k]["us"]
        )
        floor = number(r["floor_us"]) if r.get("floor_us") else "-"
        text = ", ".join(f"{k} {cell(k, times, best)}" for k in others) or "-"
        lines.append(f"| {r['row']} | {floor} | {cell(OURS, times, best)} | {text} |")
    return lines


def contracts(rows):
    """A table: the contracts of each kernel's times, and the reasons of rows without one."""
    seen = {}
    for r in rows:
        for kernel, e in r["times"].items():
            of_kernel = seen.setdefault(kernel, {})
            text = e.get("contract") or f"not timed: {e.get('why', '')}"
            of_kernel[text] = of_kernel.get(text, 0) + 1
    return ["| kernel | contract, or why it was not timed | rows |", "|---|---|---|"] + [
        f"| {kernel} | {text.replace('|', '/')} | {n} |"
        for kernel, of_kernel in seen.items()
        for text, n in of_kernel.items()
    ]


def ms_of(rows, kernel, name):
    """'0.50 (3.1x)' of a row of a kernel, or '-'."""
    for r in rows:
        e = r["times"].get(kernel, {}) if r.get("row") == name else {}
        if "us" in e:
            floor = f" ({e['us'] / r['floor_us']:.1f}x)" if r.get("floor_us") else ""
            return f"{e['us'] / 1000:.2f}{floor}"
    return "-"


def standard(rows, kernel, op, given, parts):
    """{'8192': 'forward / backward', '131072': ..}: the two shapes of the field table."""
    out = {}
    for T, HV in ((8192, 64), (131072, 8)):
        cells = []
        for part in ("forward", "backward"):
            name = f"{op} {part} 1 x {T}, heads {HV}" + (", rows given" if given else "")
            known = part in parts and name in BY_NAME
            cells.append(ms_of(rows, kernel, name) if known else "-")
        out[str(T)] = " / ".join(cells)
    return out
