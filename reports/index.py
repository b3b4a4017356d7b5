#!/usr/bin/env python3
"""index.py FOLDER: FOLDER/index.html over every results.json (or .gz) below it.

One row a record, by kernel and machine, the newest first. It has commits, verdict, totals, the
error nearest to its limit and its change since the previous record, the addresses of page and
record. Reads records only. Exit status 0, or 2 when there is none.
"""

import os
import sys

# Where this program's own modules are: -I leaves that out.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from read import many, record


def main(argv: list[str]) -> int:
    args = argv[2:] if argv[1:2] == ["--"] else argv[1:]
    if len(args) != 1 or not os.path.isdir(args[0]):
        print((__doc__ or "").strip(), file=sys.stderr)
        return 2
    folder = os.path.abspath(args[0])
    out = os.path.join(folder, "index.html")
    if many.remove_old("index", out):
        return 2
    records = many.load("index", [folder])
    if not records:
        print(f"index: {folder}: no results.json below it can be read", file=sys.stderr)
        return 2
    status = many.write_page("index", out, lambda: page(folder, records))
    if not status:
        print(f"{os.path.join(args[0], 'index.html')}: {len(records)} records")
    return status


def page(folder: str, records: list[tuple[str, record.Record]]) -> str:
    from page.index import page as of  # imports Jinja2

    return of(folder, [(os.path.relpath(path, folder), rec) for path, rec in records])


if __name__ == "__main__":
    many.end(main)
