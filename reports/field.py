#!/usr/bin/env python3
"""field.py FIELD.json OUT.html: the page of the field, public kernels and ours on every case that
they serve (reports/field.json, which scripts/campaigns/peers/run_field.sh --judge writes).

Reads that file only; no verdict is decided here. Exit status 0, or 2 when it cannot be read (the
message names file and field) or the page cannot be written.
"""

import os
import sys

# Where this program's own modules are: -I leaves that out.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from read import field, many
from read.checks import Malformed


def main(argv: list[str]) -> int:
    if len(argv) != 3 or argv[1].startswith("-"):
        asked = argv[1:] in (["-h"], ["--help"])
        print((__doc__ or "").strip(), file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    try:
        found = field.load(argv[1])
    except Malformed as e:
        print(f"field: {e}", file=sys.stderr)
        return 2

    def page() -> str:
        from page.field import page as of  # imports Jinja2

        return of(found)

    return many.write_page("field", argv[2], page)


if __name__ == "__main__":
    many.end(main)
