"""The pytest plug-in: a fixture `deltaproof`, the option --deltaproof-report DIR, and a summary.

For every test with an unexplained output the summary names tensor, rank, head, token and the
command that judges the same files again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from glob import escape, glob
from itertools import count
from typing import Any, BinaryIO

import pytest

import deltaproof

from . import judging
from .records import forget
from .running import Check

SOUND = ("bitwise", "within bounds")  # verdicts of a check


@dataclass
class Judged:
    """Judgements by test."""

    passed: int = 0
    failed: list[tuple[str, list[str], str]] = field(default_factory=list)
    unjudged: list[str] = field(default_factory=list)  # tests, one for each that is not known
    silent: list[str] = field(default_factory=list)  # tests that took the fixture alone
    reports: list[str] = field(default_factory=list)

    def add(self, more: dict[str, Any]) -> None:
        for n, x in more.items():
            setattr(self, n, getattr(self, n) + (x if n == "passed" else [*x]))


@dataclass
class _Checks:
    """Results of `check`, told as a judgement is."""

    found: list[Check]
    command = ""

    @property
    def passed(self) -> bool:
        return not self.failures() and any(x.verdict in SOUND for x in self.found)

    @property
    def status(self) -> int:
        return judging.FAIL if self.failures() else 0 if self.passed else judging.NOT_JUDGED

    def failures(self) -> list[str]:
        several = len({x.case for x in self.found}) > 1
        of = lambda x: f"check {x.name}" + f" of {x.case}" * several
        return [f"{of(x)}: {x.why}" for x in self.found if x.verdict == "fail"]


@dataclass(eq=False)  # pytest before 8.4 takes a hash of it
class Session:
    """Judgements of a test session.

    - since: those since the last phase of a test ended
    - judged: the earlier ones, including those of pytest-xdist's workers in the process that writes
      the summary
    - said: a file in memory, lines [test, judgements] of processes that a test forked, and of each
      folder of a report; read: so many bytes of it
    - folders: of reports, taken by this process or another"""

    report: str | None
    test: str = ""
    called: bool = False
    quiet: bool = False  # a test that takes the fixture and passed
    since: Judged = field(default_factory=Judged)
    judged: Judged = field(default_factory=Judged)
    folders: set[str] = field(default_factory=set)
    said: int = field(default_factory=lambda: os.memfd_create("deltaproof"))
    read: int = 0
    process: int = field(default_factory=os.getpid)

    def hear(self, found: Any) -> None:
        self.called = True
        if isinstance(found, list):
            found = _Checks(found)
        test = self.test or "outside of tests"
        if found.status == judging.FAIL:
            told = {"failed": [(test, found.failures(), found.command)]}
        else:
            told = {"passed": 1} if found.passed else {"unjudged": [test]}
        if self._is_own():
            self.since.add(told)
            return
        with self._said() as f:
            self._tell(f, told)

    def _is_own(self) -> bool:
        """Is this no process that a test forked?"""
        return os.getpid() == self.process

    @contextlib.contextmanager
    def _said(self) -> Iterator[BinaryIO]:
        """The file, locked, when this process knows all that it says."""
        with open(f"/proc/{self.process}/fd/{self.said}", "a+b") as f:
            fcntl.flock(f, fcntl.LOCK_EX)
            f.seek(self.read)
            lines = f.read()
            self.read += len(lines)
            for test, told in map(json.loads, lines.splitlines()):
                self.folders.update(told.get("reports", ()))
                self.called |= test == self.test
                if self._is_own():
                    self.since.add(told)
            yield f

    def _tell(self, f: BinaryIO, told: dict[str, Any]) -> None:
        f.write(json.dumps([self.test, told]).encode() + b"\n")

    def take(self) -> dict[str, Any]:
        with self._said():
            pass
        told, self.since = vars(self.since), Judged()
        return told

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The report of a phase; a worker sends it at once, and may end without a word."""
        self.judged.add(getattr(report, "deltaproof", {}))

    def begin(self, test: str) -> None:
        """The test's folders lose what earlier sessions wrote there: this one may end sooner."""
        self.test, self.called, self.quiet = test, False, False
        for path in self._folders():
            if not os.path.isdir(path):
                break
            if path not in self.folders:
                forget(path, *(x.path for x in os.scandir(path) if x.is_dir()))

    def folder(self) -> str | None:
        """A new folder for the next report of the running test; None: no reports are wanted."""
        with self._said() as f:
            path = next((x for x in self._folders() if x not in self.folders), None)
            if path:
                self._tell(f, {"reports": [path]})
        return path

    def _folders(self) -> Iterator[str]:
        """Folders of the running test, without an end."""
        if self.report is None:
            return
        stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", self.test).strip("-")[:150] or "test"
        if stem != self.test.replace("::", "-"):  # others may have this name, too
            name = self.test.encode("utf-8", "surrogatepass")
            stem += "-" + hashlib.blake2b(name, digest_size=4).hexdigest()
        path = os.path.join(self.report, stem)
        yield path
        for n in count(2):
            yield f"{path}-{n}"


_key = pytest.StashKey[Session]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("deltaproof")
    group.addoption(
        "--deltaproof-report",
        metavar="DIR",
        help="for everything that is judged: files, record and report.html below DIR",
    )


def pytest_configure(config: pytest.Config) -> None:
    report = config.getoption("--deltaproof-report")
    if report == "" or (report and os.path.lexists(report) and not os.path.isdir(report)):
        raise pytest.UsageError(f"--deltaproof-report={report}: must be a folder")
    session = Session(report)
    config.stash[_key] = session
    judging.listeners.append(session.hear)
    judging.report_folders.append(session.folder)
    config.pluginmanager.register(session)


def pytest_unconfigure(config: pytest.Config) -> None:
    session = config.stash.get(_key, None)
    if session is None:  # refused
        return
    judging.listeners.remove(session.hear)
    judging.report_folders.remove(session.folder)
    if session._is_own():
        os.close(session.said)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Judgements outside of tests."""
    own = session.config.stash[_key]
    output = getattr(session.config, "workeroutput", None)
    if output is None:
        own.judged.add(own.take())
    else:
        output["deltaproof"] = own.take()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """A worker of pytest-xdist has ended: the summary is the controller's."""
    node.config.stash[_key].judged.add(getattr(node, "workeroutput", {}).get("deltaproof", {}))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: Any = yield
    session = item.config.stash[_key]
    if report.when == "call":
        session.quiet = "deltaproof" in getattr(item, "fixturenames", ()) and report.passed
    report.deltaproof = told = session.take()
    if report.when == "teardown" and session.quiet and not session.called:
        told["silent"] = [item.nodeid]
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    item.config.stash[_key].begin(item.nodeid)
    return (yield)


@pytest.fixture(name="deltaproof")
def _module() -> object:
    """The module: deltaproof.assert_explained(inputs, outputs, ..), .judge, .run, .check, .."""
    return deltaproof


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    session = terminalreporter.config.stash[_key].judged
    judged = session.passed + len(session.failed)
    if not judged + len(session.unjudged) + len(session.silent):
        return
    terminalreporter.section("deltaproof")
    for test, lines, command in session.failed:
        for line in lines:
            terminalreporter.write_line(f"{test}: {line}", red=True)
        if command:
            terminalreporter.write_line(f"    again: {command}")
    for test in session.unjudged:
        terminalreporter.write_line(f"{test}: could not be judged", yellow=True)
    for test in session.silent:
        line = f"{test}: takes deltaproof, judges nothing in this process"
        terminalreporter.write_line(line, yellow=True)
    lost = f", {len(session.unjudged)} could not be judged" if session.unjudged else ""
    lost += f", {len(session.silent)} judged nothing" if session.silent else ""
    terminalreporter.write_line(f"{judged} judged, {len(session.failed)} failed{lost}")
    for path in session.reports:
        ends = ("report.html", os.path.join("*", "report.html"))  # fresh problems: a folder each
        made = [os.path.join(path, x) for x in ends if glob(os.path.join(escape(path), x))]
        terminalreporter.write_line(f"report: {made[0]}" if made else f"no report in {path}")
