"""Many records, and the one page that a program makes of them.

- find(paths): every results.json (or .gz) below folders, and the named files
- load(who, paths): [(path, record)] of readable records; messages name the others, as `who`
- write_page(who, out, make): writes the text of make() to file `out`. Returns exit status 0, or 2
  with the reason, as make() may import modules that this Python does not have
- end(main): ends the program with main's exit status, 2 where a file or standard output fails
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

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


def load(who: str, paths: list[str]) -> list[tuple[str, record.Record]]:
    records = []
    for path in find(paths):
        try:
            records.append((path, record.load(path)))
        except Malformed as e:
            print(f"{who}: left out: {e}", file=sys.stderr)
    return records


def say_missing(who: str, e: ImportError) -> None:
    print(
        f"{who}: {sys.executable} has no {e.name}: `make setup` finds or makes a Python that has "
        "it (or set DP_PYTHON)",
        file=sys.stderr,
    )


def remove_old(who: str, out: str) -> int:
    """Removes an earlier command's page before anything is read; exit status."""
    try:
        files.remove_page(out)
    except OSError as e:
        print(f"{who}: {out}: {e.strerror}", file=sys.stderr)
        return 2
    return 0


def write_page(who: str, out: str, make: Callable[[], str]) -> int:
    try:
        files.write(out, make().encode())
    except OSError as e:
        print(f"{who}: {out}: {e.strerror}", file=sys.stderr)
        return 2
    except ImportError as e:
        say_missing(who, e)
        return 2
    return 0


def _interrupt(number: int, _: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt(number)


def end(main: Callable[[list[str]], int]) -> NoReturn:
    """A signal ends it as Ctrl-C does, so that no temporary folder stays."""
    for s in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(s) == signal.SIG_DFL:
            signal.signal(s, _interrupt)
    try:
        status = main(sys.argv)
        sys.stdout.flush()
    except KeyboardInterrupt as e:
        status = 128 + (e.args or (signal.SIGINT,))[0]
    except OSError as e:
        print(f"deltaproof: {e.filename or 'standard output'}: {e.strerror}", file=sys.stderr)
        status = 2
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)
