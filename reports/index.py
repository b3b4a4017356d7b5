#!/usr/bin/env python3
"""index.py FOLDER: FOLDER/index.html over every results.json (or .gz) below it.

One row a record, by kernel and machine, the newest first: commits, verdict, totals, the error
nearest to its limit and how it moved since the record before, links to page and record. Reads
records only. Exit status 0, or 2 when there is none.
"""

import os
import sys

# Where this program's own modules are: -I leaves that out.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from history import find
from read import files, record
from read.checks import Malformed


def main(argv: list[str]) -> int:
    args = argv[2:] if argv[1:2] == ["--"] else argv[1:]
    if len(args) != 1 or not os.path.isdir(args[0]):
        print((__doc__ or "").strip(), file=sys.stderr)
        return 2
    folder = os.path.abspath(args[0])
    records = []
    for path in find([folder]):
        try:
            records.append((os.path.relpath(path, folder), record.load(path)))
        except Malformed as e:
            print(f"index: left out: {e}", file=sys.stderr)
    if not records:
        print(f"index: {folder}: no results.json below it can be read", file=sys.stderr)
        return 2
    out = os.path.join(folder, "index.html")
    try:
        from page.index import page  # imports Jinja2

        files.write(out, page(folder, records).encode())
    except OSError as e:
        print(f"index: {out}: {e.strerror}", file=sys.stderr)
        return 2
    except ImportError as e:
        print(
            f"index: {sys.executable} has no {e.name}: `make setup` finds or makes a Python that "
            "has it (or set DP_PYTHON)",
            file=sys.stderr,
        )
        return 2
    print(f"{os.path.join(args[0], 'index.html')}: {len(records)} records")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv))
    except KeyboardInterrupt:
        sys.exit(130)
