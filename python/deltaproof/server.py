"""Runs the program with a Python function as its subject. The program loads bridge.so, which sends
every call over a Unix socket to this process. The function runs here, in the thread that called.
The protocol: the head of python/bridge.c.

The function is not isolated: if it ends this process, it ends. A call that takes longer than the
limit fails, by name. The program continues when the function has returned (limits.py), and waits
for it as long as it can.
"""

from __future__ import annotations

import os
import selectors
import shutil
import socket
import subprocess
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import numpy as np

from .contract import INTEGERS, Contract, Problem, Unsupported
from .limits import LONGEST, within
from .program import bridge, children, environment, known, program
from .words import in_python, safe, text_of

WHOLE = ("R", "Kg", "chunk", "l2norm", "backward")
REAL = ("scale", "lower_bound")


@dataclass(frozen=True)
class About:
    """The function's description for the program: its name, claimed formats and design ("-": not
    declared). The format of the chain of M is `chain`, of all else `base`."""

    name: str
    base: str
    chain: str = "fp32"
    design: str | None = None

    def __post_init__(self) -> None:
        if self.base == "fp16":  # as `judge` has it
            words = "factors=fp16,out=fp16" + (f",{self.design}" if self.design else "")
            object.__setattr__(self, "base", "bf16")
            object.__setattr__(self, "design", words)


class Server:
    """Answers the calls of one program. raised: what the function raised, with its traceback, in
    order. limit: seconds of one call."""

    def __init__(self, contract: Contract, about: About, limit: float = LONGEST) -> None:
        self.contract, self.about, self.limit = contract, about, limit
        self.raised: list[str] = []
        self.call: Callable[[Problem], dict[str, Any]] = contract.call
        self.calls = 0  # that were answered, and the last of them
        self.last: tuple[Problem, dict[str, np.ndarray[Any, Any]]] | None = None

    def answer(self, connection: socket.socket) -> None:
        """One connection: one call. A program that went away meanwhile has its reasons, and says
        them."""
        try:
            with connection, connection.makefile("rwb") as stream:
                f = cast(BinaryIO, stream)
                kind, problem = _read_problem(f)
                if kind == "about":
                    f.write(self._about())
                elif kind == "run":
                    self._run(f, problem)
                f.flush()
                # a child that the function forked holds the connection, too
                connection.shutdown(socket.SHUT_RDWR)
        except (BrokenPipeError, ConnectionResetError, EOFError, _Gone):
            pass

    def _about(self) -> bytes:
        a = self.about
        writes = " ".join(self.contract.said())
        design = "-" if a.design is None else a.design
        return "".join(f"{x}\n" for x in (a.name, a.base, a.chain, writes, design)).encode()

    def _run(self, f: BinaryIO, problem: Problem) -> None:
        try:
            results = within(self.limit, lambda: self.call(problem))
        except (Unsupported, NotImplementedError) as e:
            f.write(b"unsupported " + _line(e))
            return
        except (Exception, SystemExit, GeneratorExit) as e:  # an exit of the function's is no pass
            self.raised.append(safe(traceback.format_exc()))
            f.write(b"failed " + _line(e))
            return
        self.calls, self.last = self.calls + 1, (problem, results)
        f.write(b"ok but ds0\n" if "ds0" in set(problem.wanted) - set(results) else b"ok\n")
        for x in results.values():
            f.write(np.ascontiguousarray(x, np.float64).tobytes())


class _Gone(Exception):
    """The program ended inside a call."""


def _line(e: BaseException) -> bytes:
    """As much as the program reads of a line, no character cut."""
    text = "".join(c if c.isprintable() else " " for c in text_of(e))
    return text.encode()[:240].decode(errors="ignore").encode() + b"\n"


def _setting(name: str, value: str) -> Any:
    if name in ("l2norm", "backward"):
        return value == "1"
    if name in WHOLE:
        return int(value)
    return float(value) if name in REAL else value


def _read_problem(f: BinaryIO) -> tuple[str, Problem]:
    kind = f.readline().decode().strip()
    settings: dict[str, Any] = {}
    shapes: dict[str, dict[str, tuple[int, ...]]] = {"in": {}, "out": {}}
    for line in iter(lambda: f.readline().decode().strip(), ""):
        key, *rest = line.split(" ")
        if key in shapes:
            shapes[key][rest[0]] = tuple(int(n) for n in rest[2:])
        else:
            settings[key] = _setting(key, rest[0])
    arrays = {n: _read_array(f, s) for n, s in shapes["in"].items()}
    for name in INTEGERS:
        x = np.array([int(n) for n in settings.pop(name, "").split(",") if n], np.int64)
        if len(x) > (2 if name == "cu_seqlens" else 0):
            arrays[name] = x
    if "draft_slots" in arrays:
        arrays["draft_slots"] = arrays["draft_slots"].reshape(len(arrays["accepted"]), -1)
    input_format = settings.pop("input_format", "")
    return kind, Problem(arrays, settings, input_format, shapes["out"])


def _read_array(f: BinaryIO, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    n = int(np.prod(shape, dtype=np.int64))
    data = f.read(8 * n)
    if len(data) != 8 * n:
        raise _Gone
    return np.frombuffer(data, np.float64).reshape(shape)


@dataclass(frozen=True)
class Finished:
    """Exit status and all that the program printed; what the function raised, with tracebacks."""

    status: int
    text: str
    raised: list[str]


def run_program(arguments: Sequence[str], *servers: Server) -> Finished:
    """`deltaproof ARGUMENTS --subject bridge.so`, a subject for each server, in their order; the
    functions are called in this thread."""
    with tempfile.TemporaryDirectory(prefix="deltaproof-") as folder, ExitStack() as stack:
        path = os.path.join(folder, "socket")
        listening = {}
        subjects = [bridge()]
        for i, server in enumerate(servers):
            suffix = f"-{i}" if i else ""
            if i:  # a copy, which connects to a socket of its own
                subjects.append(shutil.copy(bridge(), os.path.join(folder, f"bridge{suffix}.so")))
            one = stack.enter_context(socket.socket(socket.AF_UNIX))
            one.bind(path + suffix)
            one.listen()
            listening[one] = server
        with (
            children(),
            subprocess.Popen(
                [program(), *arguments, *(f"--subject={x}" for x in subjects)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="backslashreplace",
                env=environment() | {"DELTAPROOF_BRIDGE": path},
            ) as process,
        ):
            text = _serve(process, listening)
            raised = [x for server in servers for x in server.raised]
            return Finished(known(process.wait()), in_python(text), raised)


def _serve(process: subprocess.Popen[str], listening: dict[socket.socket, Server]) -> str:
    """Answers until the program's output ends; returns that."""
    said: list[str] = []
    over, ended = os.pipe()

    def read() -> None:
        said.append(process.stdout.read() if process.stdout else "")
        os.write(ended, b".")  # its end alone would not be seen: a child may hold it, too

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        with selectors.DefaultSelector() as select:
            select.register(over, selectors.EVENT_READ)
            for one in listening:
                select.register(one, selectors.EVENT_READ)
            while over not in (ready := [key.fileobj for key, _ in select.select()]):
                for called in (cast(socket.socket, x) for x in ready):
                    listening[called].answer(called.accept()[0])
    except BaseException:
        process.kill()
        raise
    finally:
        reader.join()
        os.close(over)
        os.close(ended)
    return "".join(said)
