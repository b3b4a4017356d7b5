"""Work in forks of this process that never outlive it.

    results(count, jobs, work)   [work(job) of every job], by so many forks

A fork has the signals' own dispositions, and so ends at once and quietly. It is killed when this
process ends. It writes no file: what it makes comes back over a pipe. A job whose fork was killed,
or which raised there, is done again here.
"""

import contextlib
import ctypes
import os
import signal
import struct
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

JOB = struct.Struct("=i")
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_PDEATHSIG = 1


def results(count: int, jobs: Sequence[Any], work: Callable[[Any], Any]) -> list[Any]:
    done: dict[int, Any] = {}
    forks: dict[int, Connection] = {}
    queue = _queue(len(jobs))
    try:
        for _ in range(count):
            _fork(forks, queue, jobs, work)
        waiting = list(forks.values())
        while waiting:
            for pipe in wait(waiting):
                assert isinstance(pipe, Connection)
                try:
                    i, result = pipe.recv()
                    done[i] = result
                except (EOFError, OSError):
                    waiting.remove(pipe)
    finally:
        _end(forks)
        os.close(queue)
    return [done[i] if i in done else work(job) for i, job in enumerate(jobs)]


def _queue(n: int) -> int:
    """A pipe that holds the numbers 0 to n - 1, which the forks share."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):  # those that it has no room for are done here
        for i in range(n):
            os.write(write, JOB.pack(i))
    os.close(write)
    return read


def _fork(
    forks: dict[int, Connection], queue: int, jobs: Sequence[Any], work: Callable[[Any], Any]
) -> None:
    """No signal ends this process between a fork and the note of it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    parent = os.getpid()
    back, pipe = Pipe(duplex=False)
    pid = os.fork()
    if not pid:
        try:
            for s in ENDING:
                if signal.getsignal(s) == signal.SIG_IGN:
                    continue
                signal.signal(s, signal.SIG_DFL)
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            if os.getppid() == parent:
                _serve(pipe, queue, jobs, work)
        finally:
            os._exit(0)
    forks[pid] = back
    pipe.close()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(pipe: Connection, queue: int, jobs: Sequence[Any], work: Callable[[Any], Any]) -> None:
    with contextlib.suppress(Exception):  # this process does the job again, and is told why
        while one := os.read(queue, JOB.size):
            (i,) = JOB.unpack(one)
            pipe.send((i, work(jobs[i])))


def _end(forks: dict[int, Connection]) -> None:
    """A signal that arrives before it is blocked raises here; the forks end nevertheless."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    finally:
        for pid, back in forks.items():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            back.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
