"""Processes with a mark in their environment, which all that they start inherit."""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path


def marked(mark: str) -> list[int]:
    found = []
    for p in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if mark.encode() in Path(f"/proc/{p}/environ").read_bytes():
                found.append(int(p))
    return found


def becomes(holds: Callable[[], bool], seconds: float) -> bool:
    """Does it hold at some time in so many seconds?"""
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.05)
    return holds()
