"""The pytest plug-in: a fixture `deltaproof`, the option --deltaproof-report DIR, and a summary.

The summary names, for every test in which an output was not explained, tensor, rank, head, token
and the command that judges the same files again.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

import deltaproof

from . import judging
from .judging import Judgement


@dataclass
class Session:
    """What was judged, by test."""

    report: str | None
    test: str = ""
    passed: int = 0
    failed: list[tuple[str, list[str], str]] = field(default_factory=list)
    unjudged: list[str] = field(default_factory=list)  # tests, one for each that is not known
    reports: list[str] = field(default_factory=list)

    def hear(self, found: Judgement) -> None:
        if found.status == judging.FAIL:
            self.failed.append((self.test, found.failures(), found.command))
        elif found.passed:
            self.passed += 1
        else:
            self.unjudged.append(self.test)

    def told(self) -> dict[str, Any]:
        """What a worker of pytest-xdist tells the controller."""
        names = ("passed", "failed", "unjudged", "reports")
        return {n: getattr(self, n) for n in names}

    def add(self, told: dict[str, Any]) -> None:
        for n, x in told.items():
            setattr(self, n, getattr(self, n) + (x if n == "passed" else [*x]))

    def folder(self) -> str | None:
        """A new folder for the next report of the running test; None: no reports are wanted."""
        if self.report is None:
            return None
        stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", self.test).strip("-")[:150] or "test"
        if stem != self.test.replace("::", "-"):  # others may have this name, too
            name = self.test.encode("utf-8", "surrogatepass")
            stem += "-" + hashlib.blake2b(name, digest_size=4).hexdigest()
        path, n = os.path.join(self.report, stem), 1
        while path in self.reports:
            n += 1
            path = os.path.join(self.report, f"{stem}-{n}")
        self.reports.append(path)
        return path


_key = pytest.StashKey[Session]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("deltaproof")
    group.addoption(
        "--deltaproof-report",
        metavar="DIR",
        help="for everything that is judged: files, record and report.html below DIR",
    )


def pytest_configure(config: pytest.Config) -> None:
    session = Session(config.getoption("--deltaproof-report"))
    config.stash[_key] = session
    judging.listeners.append(session.hear)
    judging.report_folders.append(session.folder)


def pytest_unconfigure(config: pytest.Config) -> None:
    session = config.stash[_key]
    judging.listeners.remove(session.hear)
    judging.report_folders.remove(session.folder)


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["deltaproof"] = session.config.stash[_key].told()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """A worker of pytest-xdist has ended: the summary is the controller's."""
    told = getattr(node, "workeroutput", {}).get("deltaproof")
    if told:
        node.config.stash[_key].add(told)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    item.config.stash[_key].test = item.nodeid
    return (yield)


@pytest.fixture(name="deltaproof")
def _module() -> object:
    """The module: deltaproof.assert_explained(inputs, outputs, ..), .judge, .run, .check, .."""
    return deltaproof


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    session = terminalreporter.config.stash[_key]
    judged = session.passed + len(session.failed)
    if not judged + len(session.unjudged):
        return
    terminalreporter.section("deltaproof")
    for test, lines, command in session.failed:
        for line in lines:
            terminalreporter.write_line(f"{test}: {line}", red=True)
        terminalreporter.write_line(f"    again: {command}")
    for test in session.unjudged:
        terminalreporter.write_line(f"{test}: could not be judged", yellow=True)
    lost = f", {len(session.unjudged)} could not be judged" if session.unjudged else ""
    terminalreporter.write_line(f"{judged} judged, {len(session.failed)} failed{lost}")
    for path in session.reports:
        page = os.path.join(path, "report.html")
        made = os.path.exists(page)
        terminalreporter.write_line(f"report: {page}" if made else f"no report in {path}")
