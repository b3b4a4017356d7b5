#!/usr/bin/env python3
"""history.py OUT.html RECORD...: errors over many records, one panel a tensor, the series that
moved
most first.

A RECORD is a results.json, or a folder in which every results.json below is taken. Records stand in
the order of their `created`; the axis names their commits. A series is one tensor of one run (its
ID); a panel shows the runs of a tensor that moved most, as error over its first value. The table
below the panels has the series that moved. Reads records only. Exit status 0, or 2 when fewer than
two records can be read.
"""

import os
import sys
from collections.abc import Iterator

# Where this program's own modules are: -I leaves that out.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from read import files, record
from read.checks import Malformed

NAME = "results.json"


def find(paths: list[str]) -> Iterator[str]:
    for p in paths:
        if os.path.isdir(p):
            yield from (
                os.path.join(d, name)
                for d, _, names in sorted(os.walk(p))
                for name in (NAME, NAME + ".gz")
                if name in names
            )
        else:
            yield p


def load(paths: list[str]) -> list[record.Record]:
    """Those that can be read, by time."""
    records = []
    for path in find(paths):
        try:
            records.append(record.load(path))
        except Malformed as e:
            print(f"history: left out: {e}", file=sys.stderr)
    return sorted(records, key=lambda r: r.created or "")


def main(argv: list[str]) -> int:
    args = argv[2:] if argv[1:2] == ["--"] else argv[1:]
    if len(args) < 2:
        print((__doc__ or "").strip(), file=sys.stderr)
        return 2
    out, paths = os.path.abspath(args[0]), [os.path.abspath(p) for p in args[1:]]
    # matplotlib reads a matplotlibrc of the present folder
    os.chdir(os.path.dirname(os.path.abspath(__file__)))
    records = load(paths)
    if len(records) < 2:
        print(f"history: {len(records)} record(s) can be read, two are needed", file=sys.stderr)
        return 2
    try:
        from page.history import page  # imports matplotlib and Jinja2

        files.write(out, page(records).encode())
    except OSError as e:
        print(f"history: {out}: {e.strerror}", file=sys.stderr)
        return 2
    except ImportError as e:
        print(
            f"history: {sys.executable} has no {e.name}: `make setup` finds or makes a Python that "
            "has it (or set DP_PYTHON)",
            file=sys.stderr,
        )
        return 2
    print(f"{args[0]}: {len(records)} records")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv))
    except KeyboardInterrupt:
        sys.exit(130)
