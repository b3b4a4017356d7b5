"""The time limit of a call of a function. It is interrupted where it can be, and fails in any case.
The next call begins when it has returned."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
LONGEST = 86400.0  # seconds


class TooLong(Exception):
    """A call took longer than its limit."""


class _Interrupt(BaseException):
    """Not an Exception, so that a function which catches those ends all the same."""


def seconds(limit: Any) -> float:
    """A limit as a number. ValueError: it is none from above 0 to LONGEST."""
    try:
        x = float(limit)
    except (TypeError, ValueError):
        x = 0.0
    if not 0 < x <= LONGEST:
        raise ValueError(f"limit={limit!r}: must be seconds, above 0 and up to {LONGEST:.0f}")
    return x


def within(limit: float, call: Callable[[], T]) -> T:
    """The result of call(); TooLong if it takes longer. In the main thread it is interrupted, as by
    Ctrl-C: Python code and sleeps end at once, foreign code when it returns."""
    start = time.monotonic()
    try:
        result = _interrupted(limit, call) if _may_interrupt() else call()
    except _Interrupt:
        raise TooLong(_said(start, limit)) from None
    if time.monotonic() - start > limit:
        raise TooLong(_said(start, limit))
    return result


def _said(start: float, limit: float) -> str:
    return f"the call took {time.monotonic() - start:.1f} s, limit={limit:g}"


def _may_interrupt() -> bool:
    own = threading.current_thread() is threading.main_thread()
    return own and signal.getsignal(signal.SIGALRM) is not None


def _interrupted(limit: float, call: Callable[[], T]) -> T:
    """The alarm is sent by a thread, so that a timer which somebody else set stays: its signal goes
    to the handler that was there."""
    over, main = threading.Event(), threading.get_ident()
    running = True

    def ring() -> None:
        if not done.wait(limit):
            over.set()
            signal.pthread_kill(main, signal.SIGALRM)

    def heard(number: int, frame: FrameType | None) -> None:
        if over.is_set():
            over.clear()
            if running:
                raise _Interrupt
        elif callable(before):
            before(number, frame)

    done = threading.Event()
    before = signal.signal(signal.SIGALRM, heard)
    thread = threading.Thread(target=ring, daemon=True)
    thread.start()
    try:
        return call()
    finally:
        running = False
        done.set()
        thread.join()
        signal.signal(signal.SIGALRM, before)
