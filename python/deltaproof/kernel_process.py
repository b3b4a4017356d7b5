"""A kernel of a file in a process of its own, which holds neither a name nor a seed nor a truth.
`KernelProcess` is the judge's side, `main` the kernel's.

The judge's process cannot be read by others of its user, unless they are root. The kernel's process
gets a new session, an empty folder, an environment without the program's names, and each problem
through a pipe. It answers with numbers, never with objects. When all calls are made the whole
session is killed. Its limits: python/THREATS.md.
"""

from __future__ import annotations

import ctypes
import importlib.util
import inspect
import json
import os
import pickle
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np

from .contract import Contract, Problem, Unsupported
from .fresh import Call
from .limits import TooLong, within
from .provenance import kernels_of
from .records import ended
from .words import one_line, safe, text_of

PR_SET_DUMPABLE, PR_SET_PDEATHSIG = 4, 1
LEAST_ENVIRONMENT = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "TMPDIR")
LONGEST_LINE = 1 << 20
LISTED = ("kernels", "modules", "parameters")  # fields of an answer that are lists


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


class KernelProcess:
    """Calls like fresh.Caller. settings: of Contract, without its function."""

    def __init__(self, file: str, function: str | None, limit: float, **settings: Any) -> None:
        self.file, self.function, self.limit = os.path.abspath(file), function, limit
        self.settings = {**settings, "guards": True}
        self.raised: list[str] = []
        self.kernels: list[str] = []
        self.modules: list[str] = []
        self.process: subprocess.Popen[bytes] | None = None
        self.folder = tempfile.mkdtemp(prefix="deltaproof-")
        _prctl(PR_SET_DUMPABLE, 0)
        parameters = self._start()
        self.contract = Contract(_stub(parameters), **self.settings)

    def _start(self) -> list[Any]:
        """The function's parameters. ValueError: why there is no such function."""
        own = {n: x for n, x in os.environ.items() if n in LEAST_ENVIRONMENT}
        path = os.pathsep.join([os.path.dirname(os.path.dirname(os.path.abspath(__file__)))])
        self.log = open(os.path.join(self.folder, ".said"), "w+b")  # noqa: SIM115
        work = os.path.join(self.folder, "work")
        os.makedirs(work, exist_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "deltaproof.kernel_process"], cwd=work,
            env={**own, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, start_new_session=True,
        )  # fmt: skip
        os.unlink(self.log.name)
        self._send((self.file, self.function, self.settings))
        said = self._answer(max(self.limit, 60.0))
        if "parameters" not in said:
            self.close()
            raise ValueError(f"{self.file}: {one_line(said.get('why', 'no answer'))}")
        return list(said["parameters"])

    def _send(self, what: Any) -> None:
        """OSError; TooLong where the process reads nothing for as long as a call may take."""
        assert self.process and self.process.stdin
        fd, left = self.process.stdin.fileno(), memoryview(pickle.dumps(what))
        os.set_blocking(fd, False)
        while left:
            if not select.select([], [fd], [], self.limit + 5)[1]:
                raise TooLong(f"the kernel's process read nothing for {self.limit + 5:g} s")
            left = left[os.write(fd, left[: 1 << 16]) :]

    def _read(self, n: int, until: float) -> bytes:
        """Exactly n bytes. EOFError, TooLong."""
        assert self.process and self.process.stdout
        fd, parts = self.process.stdout.fileno(), []
        while n:
            if not select.select([fd], [], [], max(until, 0))[0]:
                raise TooLong(f"the call took more than {self.limit:g} s")
            part = os.read(fd, min(n, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            n -= len(part)
        return b"".join(parts)

    def _answer(self, limit: float) -> dict[str, Any]:
        """A line of JSON. Another answer is the kernel's doing."""
        try:
            size = int.from_bytes(self._read(4, limit), "little")
            said = json.loads(self._read(size, 5)) if size < LONGEST_LINE else None
            if isinstance(said, dict) and all(isinstance(said.get(n, []), list) for n in LISTED):
                return said
            return {"why": "the kernel's process lied", "ends": True}  # what follows is no answer
        except TooLong as e:
            self._kill()
            return {"why": str(e)}
        except (EOFError, ValueError, OSError):
            self._kill()
            status = self.process.returncode if self.process else 0
            return {"why": f"the kernel's process ended {ended(status)}{self._last_words()}"}

    def _last_words(self) -> str:
        self.log.seek(0)
        lines = self.log.read()[-4096:].decode(errors="replace").strip().splitlines()
        return f": {one_line(lines[-1])}" if lines else ""

    def __call__(self, problem: Problem, layout: str = "", apart: bool = False) -> Call:
        if self.process is None or self.process.poll() is not None:
            self._start()
        try:
            self._send((problem, layout, apart))
            said = self._answer(self.limit + 5)
        except TooLong as e:
            said = {"why": str(e), "ends": True}
        except OSError:
            said = self._answer(0)
        if "why" in said:
            if said.get("raised"):
                self.raised.append(safe(str(said["raised"])))
            if said.get("ends"):
                self._kill()
            return Call(None, one_line(said["why"]), bool(said.get("skipped")))
        results = {}
        try:
            for n, shape in problem.wanted.items():
                size = 8 * int(np.prod(shape, dtype=np.int64))
                results[n] = np.frombuffer(self._read(size, 60), np.float64).reshape(shape)
        except (EOFError, TooLong):
            self._kill()
            return Call(None, "the kernel's process ended before it had sent its results")
        kernels, self.modules = ([one_line(x) for x in said.get(n, [])] for n in LISTED[:2])
        self.kernels += [x for x in kernels if x not in self.kernels]
        return Call(results)

    def _kill(self) -> None:
        """The kernel's process and all that it started in its session."""
        if self.process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            with suppress(OSError):
                if stream:
                    stream.close()

    def close(self) -> None:
        self._kill()
        self.process = None
        self.log.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _stub(parameters: list[Any]) -> Callable[..., Any]:
    """A function of the same parameters, which is never called."""

    def stub(**_: Any) -> Any:
        raise AssertionError

    kinds = {k.name: k for k in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)}
    own = [
        inspect.Parameter(
            str(name),
            kinds[kind],
            default=None if optional else inspect.Parameter.empty,
        )
        for name, kind, optional in parameters
    ]
    stub.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    return stub


# ---- the kernel's side --------------------------------------------------------------------------


def load(file: str, function: str | None) -> Callable[..., Any]:
    """The function of that name, else the only public one that the file defines."""
    spec = importlib.util.spec_from_file_location("kernel", file)
    if spec is None or spec.loader is None:
        raise ValueError("no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules["kernel"] = module
    sys.path.insert(0, os.path.dirname(file))
    task = ModuleType("task")  # of GPU MODE's tasks, which submissions import types from
    task.input_t = task.output_t = Any  # type: ignore[attr-defined]
    sys.modules.setdefault("task", task)
    spec.loader.exec_module(module)
    if function:
        found = getattr(module, function, None)
        if not callable(found):
            raise ValueError(f"defines no function {function}")
        return found  # type: ignore[no-any-return]
    if hasattr(module, "custom_kernel"):
        from .adapters import gpu_mode

        return gpu_mode(module)
    if hasattr(module, "ModelNew") or hasattr(module, "Model"):
        from .adapters import kernelbench

        return kernelbench(module)
    own = [
        x for n, x in vars(module).items()
        if inspect.isfunction(x) and x.__module__ == "kernel" and not n.startswith("_")
    ]  # fmt: skip
    if len(own) != 1:
        names = " ".join(x.__name__ for x in own) or "none"
        raise ValueError(f"which function is the kernel? It defines {names}: --function")
    return own[0]


def _parameters(fn: Callable[..., Any]) -> list[Any]:
    rest = inspect.Parameter.VAR_KEYWORD
    return [
        (p.name, rest.name if p.kind is rest else "KEYWORD_ONLY", p.default is not p.empty)
        for p in inspect.signature(fn).parameters.values()
        if p.kind is not inspect.Parameter.VAR_POSITIONAL
    ]


def _foreign() -> list[str]:
    """Modules that are none of Python's own."""
    own = set(sys.stdlib_module_names) | {"kernel", "deltaproof", "__mp_main__"}
    return sorted({n.split(".")[0] for n in sys.modules} - own)


def _say(f: BinaryIO, what: dict[str, Any]) -> None:
    text = json.dumps(what).encode()
    f.write(len(text).to_bytes(4, "little") + text)
    f.flush()


def _lost_device() -> bool:
    """Does every call fail from now on, as behind an illegal address?"""
    torch = sys.modules.get("torch")
    try:
        if torch and torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _serve(contract: Contract, request: Any, f: BinaryIO, limit: float, first: bool) -> None:
    problem, layout, apart = request
    own = replace(contract, memory=layout or contract.memory) if layout or apart else contract
    names: list[str] = []
    try:
        if first and contract.device not in (None, "cpu"):
            results, names = kernels_of(lambda: own.call(problem))
        else:
            results = within(limit, lambda: own.call(problem))
    except (Unsupported, NotImplementedError) as e:
        return _say(f, {"why": text_of(e)[:400], "skipped": True})
    except (Exception, SystemExit, GeneratorExit) as e:
        why = text_of(e)[:400]
        raised = safe(traceback.format_exc())[-8000:]
        return _say(f, {"why": why, "raised": raised, "ends": _lost_device()})
    _say(f, {"kernels": names, "modules": _foreign()})
    for n in problem.wanted:
        f.write(np.ascontiguousarray(results[n], np.float64).tobytes())
    f.flush()


def main() -> None:
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    answers, requests = os.fdopen(os.dup(1), "wb"), os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)  # what a kernel prints is no answer
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    file, function, settings = pickle.load(requests)
    try:
        fn = load(file, function)
        contract = Contract(fn, **settings)
    except BaseException as e:
        return _say(answers, {"why": text_of(e)[:400]})
    _say(answers, {"parameters": _parameters(fn)})
    first = True
    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return None
        _serve(contract, request, answers, 86400.0, first)
        first = False


if __name__ == "__main__":
    main()
