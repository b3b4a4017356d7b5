"""Where the program `deltaproof` lies, how it is started, and the command of that name."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from importlib.util import find_spec
from typing import Any

LOST = 255  # the exit status of a process that nobody may know

_HERE = os.path.dirname(os.path.abspath(__file__))


def _candidates() -> list[tuple[str, str]]:
    """(program, bridge) in the order in which they are tried: of the wheel, of a source tree."""
    tree = os.path.join(_HERE, "..", "..", "build")
    return [
        (os.path.join(_HERE, "bin", "deltaproof"), os.path.join(_HERE, "lib", "bridge.so")),
        (os.path.join(tree, "deltaproof"), os.path.join(tree, "bridge.so")),
    ]


def program() -> str:
    """The path of the program: $DELTAPROOF, else the one of this package, else build/deltaproof of
    this file's source tree. Else it is `deltaproof` on the PATH. FileNotFoundError."""
    given = os.environ.get("DELTAPROOF")
    if given:
        return given
    for path, _ in _candidates():
        if os.access(path, os.X_OK):
            return os.path.normpath(path)
    found = shutil.which("deltaproof")
    if found:
        return found
    raise FileNotFoundError(
        "the program deltaproof is not built (make), nor on the PATH; name it with the variable "
        "DELTAPROOF"
    )


def bridge() -> str:
    """The path of the shared library through which the program calls a Python function:
    $DELTAPROOF_BRIDGE_LIBRARY, else bridge.so of this package or of the build folder."""
    given = os.environ.get("DELTAPROOF_BRIDGE_LIBRARY")
    beside = os.path.join(os.path.dirname(program()), "bridge.so")
    for path in [given, beside] + [b for _, b in _candidates()]:
        if path and os.path.exists(path):
            return os.path.normpath(path)
    raise FileNotFoundError(
        "bridge.so is not built (make); name it with the variable DELTAPROOF_BRIDGE_LIBRARY"
    )


def header() -> str:
    """The path of deltaproof_subject.h, the C interface of a kernel in a shared library."""
    own = resources.files("deltaproof") / "include" / "deltaproof_subject.h"
    return str(own) if own.is_file() else os.path.join(_HERE, "..", "..", "harness", own.name)


def _draws() -> bool:
    """Can this interpreter make the report? That of a source tree may lack the modules."""
    return all(find_spec(name) for name in ("matplotlib", "jinja2"))


def environment() -> dict[str, str]:
    """This process's environment, with this interpreter as the one that makes the report, if it
    can; else the program finds its own. A program that a rank of a training starts is one process,
    no part of its job, and ends with this one."""
    own = {"DP_PYTHON": sys.executable} if _draws() else {}
    return own | dict(os.environ) | {"DELTAPROOF_ALONE": str(os.getpid())}


@contextmanager
def children() -> Iterator[None]:
    """Where SIGCHLD is ignored a process leaves no exit status: meanwhile it is not, if this is the
    main thread."""
    own = threading.current_thread() is threading.main_thread()
    if not own or signal.getsignal(signal.SIGCHLD) != signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def known(status: int) -> int:
    """The exit status of a child that has ended, or LOST: Python takes 0 for what is lost."""
    return LOST if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN else status


def ran(*arguments: str, **streams: Any) -> subprocess.CompletedProcess[str]:
    """The program with these arguments, when it has ended, and the texts that it printed."""
    streams = streams or {"capture_output": True}
    words, env = [program(), *arguments], environment()
    with children():
        done = subprocess.run(words, text=True, check=False, env=env, **streams)
        done.returncode = known(done.returncode)
    if done.returncode == LOST and done.stderr is not None:
        done.stderr += "the program ended unseen, as SIGCHLD is ignored\n"
    return done


def put(path: str, text: str) -> str:
    """Writes the file where there is none, with its folder, whole or not at all; returns path."""
    if not os.path.exists(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        own = f"{path}.{threading.get_native_id()}"
        with open(own, "w", encoding="utf-8", newline="") as f:
            f.write(text)
        os.replace(own, path)
    return path


def main() -> None:
    """The command `deltaproof`: becomes the program, but for those that are Python's."""
    if sys.argv[1:2] == ["cp-check"]:
        from .cp_check import command

        command(sys.argv[2:])
    if sys.argv[1:2] == ["score"]:
        from .score import main as score

        sys.exit(score(sys.argv[2:]))
    if sys.argv[1:2] == ["pack"]:
        from .packs import main as pack

        sys.exit(pack(sys.argv[2:]))
    if sys.argv[1:2] == ["capture-path"]:
        print(os.pathsep.join([os.path.join(_HERE, "capture_site"), os.path.dirname(_HERE)]))
        sys.exit(0)
    folders = [os.path.isdir(x) for x in sys.argv[2:3] + sys.argv[3:4]]
    if (
        sys.argv[1:2] == ["judge"]
        and folders[:1] == [True]
        or (sys.argv[1:2] == ["differ"] and folders == [True, True])
    ):
        from .captures import main as captured

        sys.exit(captured(sys.argv[1], sys.argv[2:]))
    path = program()
    if os.path.realpath(path) == os.path.realpath(sys.argv[0]):  # which would start itself forever
        print(f"{path}: is the command, not the program: unset DELTAPROOF", file=sys.stderr)
        sys.exit(2)
    os.execve(path, ["deltaproof"] + sys.argv[1:], environment())
