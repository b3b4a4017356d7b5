#!/usr/bin/env python3
"""history.py OUT.html RECORD...: errors over many records, one panel a tensor, the series that
moved most first.

A RECORD is a results.json, or a folder in which every results.json below is taken. Records stand in
the order of their `created`; the axis names their commits. A series is one tensor of one run (its
ID). A panel shows the runs of a tensor that moved most, as error over its first value. The table
below the panels has the series that moved. Reads records only. Exit status 0, or 2 when fewer than
two records can be read.
"""

import os
import sys

# Where this program's own modules are: -I leaves that out.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from read import many, record


def main(argv: list[str]) -> int:
    args = argv[2:] if argv[1:2] == ["--"] else argv[1:]
    if len(args) < 2:
        print((__doc__ or "").strip(), file=sys.stderr)
        return 2
    out, paths = os.path.abspath(args[0]), [os.path.abspath(p) for p in args[1:]]
    if many.remove_old("history", out):
        return 2
    # matplotlib reads a matplotlibrc of the present folder
    os.chdir(os.path.dirname(os.path.abspath(__file__)))
    records = sorted((r for _, r in many.load("history", paths)), key=lambda r: r.created or "")
    if len(records) < 2:
        print(f"history: {len(records)} record(s) can be read, two are needed", file=sys.stderr)
        return 2
    status = many.write_page("history", out, lambda: page(records))
    if not status:
        print(f"{args[0]}: {len(records)} records")
    return status


def page(records: list[record.Record]) -> str:
    from page.history import page as of  # imports matplotlib and Jinja2

    return of(records)


if __name__ == "__main__":
    many.end(main)
