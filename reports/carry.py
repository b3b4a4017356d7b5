#!/usr/bin/env python3
"""carry.py CARRY.json OUT: the error of carried states over steps, a panel a case.

CARRY.json: what `deltaproof carry --json` writes. OUT: .png, .svg or .pdf. A line is the head with
the largest last error in a format; thin: its sound bound. Exit status 0, or 2 when the file cannot
be read. (A page of a record whose folder has a carry.json shows it too: report.py.)
"""

import os
import sys

# Where this program's own modules are: -I leaves that out.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from draw.carried import figure
from read import carry
from read.checks import Malformed


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        found = carry.load(sys.argv[1])
        if not found:
            raise Malformed(f"{sys.argv[1]}: {'no such file' if found is None else 'no case'}")
        figure(found).savefig(sys.argv[2], dpi=150)
    except (OSError, ValueError, Malformed) as e:
        print(f"carry.py: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
