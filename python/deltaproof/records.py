"""Records that the program writes, each told from every other. A call has an identity, made of all
its inputs and a nonce. The program writes it into the record (a note `call`); a record without it
belongs to another call."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import signal
from collections.abc import Iterator, Sequence
from typing import Any

from .program import LOST

PASS, FAIL, NOT_JUDGED = 0, 1, 2  # exit statuses of the program
WRITTEN = ("results.json", "results.json.gz", "junit.xml", "summary.md", "report.html")


def identity(words: Sequence[str], files: Sequence[str] = ()) -> str:
    """32 hexadecimal digits of the words, the files' contents and a nonce."""
    h = hashlib.blake2b(secrets.token_bytes(16), digest_size=16)
    for path in files:
        with open(path, "rb") as f:
            h.update(hashlib.file_digest(f, "blake2b").digest())
    h.update("\0".join(words).encode("utf-8", "surrogatepass"))
    return h.hexdigest()


@contextlib.contextmanager
def own_folder(folder: str, *more: str) -> Iterator[None]:
    """Makes the folder for one call and removes files of an earlier call and the files `more`. The
    folder is locked against other calls until this one ends (on file systems that have locks)."""
    os.makedirs(folder, exist_ok=True)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        for name in (*WRITTEN, *more):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(folder, name))
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)  # a child that was forked meanwhile holds it too
        os.close(fd)


def forget(*folders: Any) -> None:
    """Remove what earlier calls wrote to these folders. A call that raises for an argument would
    otherwise leave their verdict as its own."""
    for folder in folders:
        if isinstance(folder, str | os.PathLike) and os.path.isdir(folder):
            with own_folder(os.fspath(folder)):
                pass


def own_record(path: str, call: str) -> dict[str, Any] | None:
    """The record at `path` if it is whole and of this call."""
    try:
        with open(path, encoding="utf-8") as f:
            record: dict[str, Any] = json.load(f, parse_constant=_refuse)
        whole = [_is_whole(run) for run in record["runs"]]
        said = record["provenance"]["notes"]["call"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record if said == call and all(whole) else None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _is_whole(run: dict[str, Any]) -> bool:
    """Has the run a verdict, and tensors with name and verdict?"""
    of = [run["verdict"], *(t[n] for t in run["tensors"] for n in ("name", "verdict"))]
    return all(isinstance(x, str) for x in of)


def ended(status: int) -> str:
    """How a program ended that has no exit status of its own."""
    if status == LOST:
        return "unseen, as SIGCHLD is ignored,"
    if status >= 0:
        return f"with the status {status}"
    return f"by the signal {signal.Signals(-status).name}"


def trusted(status: int, record: dict[str, Any] | None) -> tuple[int, str]:
    """(status, why it is NOT_JUDGED in place of what the program returned, or "")."""
    if status not in (PASS, FAIL, NOT_JUDGED):
        return NOT_JUDGED, f"the program ended {ended(status)} before it was done"
    if status == NOT_JUDGED:
        return status, ""
    if record is None:
        return NOT_JUDGED, f"the program ended {ended(status)} and left no record of this call"
    verdicts = {r["verdict"] for r in record["runs"]}
    failed = "fail" in verdicts or record.get("verdict") == "fail"
    if failed != (status == FAIL) or not verdicts:
        return NOT_JUDGED, f"the program ended {ended(status)}, its record says {sorted(verdicts)}"
    return status, ""
