#!/usr/bin/env python3
"""pieces.py RESULTS.json: error of o by the number of pieces that a sequence is cut into.

RESULTS.json: what `deltaproof run --out DIR` left there. Prints a Markdown table for each case and
base. A row is a format of the chain of M, a column a number of pieces (ranks), an entry the
relative error of o. Exit status 0, or 2 when the file cannot be read.
"""

import os
import sys

# Where this program's own modules are: -I leaves that out.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from read.checks import Malformed
from read.record import load

Errors = dict[tuple[str, str], dict[str, dict[int, float]]]


def errors_of(runs: list[dict]) -> Errors:
    """(case, base): chain: ranks: relative error of o, of simulated ranks."""
    found: Errors = {}
    for r in runs:
        p = r["policy"]
        for t in r["tensors"]:
            if t["name"] == "o" and "chain" in p and r.get("backend", "sim") == "sim":
                row = found.setdefault((r["case"], p["base"]), {}).setdefault(p["chain"], {})
                row[r["ranks"]] = t["rel_fro"]
    return found


def table(rows: dict[str, dict[int, float]]) -> str:
    pieces = sorted({n for row in rows.values() for n in row})
    lines = ["| chain | " + " | ".join(map(str, pieces)) + " |", "|---" * (len(pieces) + 1) + "|"]
    first = next(iter(rows.values()))  # below 3 pieces no M is used: one format is run
    for chain, row in rows.items():
        at = [row.get(n, first.get(n) if n < 3 else None) for n in pieces]
        shown = " | ".join("" if x is None else f"{x:.2e}" for x in at)
        lines.append(f"| {chain} | {shown} |")
    return "\n".join(lines)


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        found = errors_of(load(sys.argv[1]).runs)
    except (OSError, ValueError, Malformed) as e:
        print(f"pieces.py: {e}", file=sys.stderr)
        return 2
    for (case, base), rows in found.items():
        print(f"{case}, base {base}, pieces:\n\n{table(rows)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
