"""The pytest plug-in: a fixture `deltaproof`, the option --deltaproof-report DIR, and a summary.

The summary names, for every test in which an output was not explained, tensor, rank, head, token
and the command that judges the same files again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

import deltaproof

from . import judging
from .judging import Judgement


@dataclass
class Session:
    """What was judged, by test."""

    report: str | None
    test: str = ""
    judged: int = 0
    failed: list[tuple[str, Judgement]] = field(default_factory=list)
    reports: list[str] = field(default_factory=list)

    def hear(self, found: Judgement) -> None:
        self.judged += 1
        if found.status == judging.FAIL:
            self.failed.append((self.test, found))

    def folder(self) -> str | None:
        """A new folder for the next report of the running test; None: no reports are wanted."""
        if self.report is None:
            return None
        stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", self.test).strip("-") or "test"
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
    if not session.judged:
        return
    terminalreporter.section("deltaproof")
    for test, found in session.failed:
        for line in found.failures():
            terminalreporter.write_line(f"{test}: {line}", red=True)
        terminalreporter.write_line(f"    again: {found.command}")
    terminalreporter.write_line(f"{session.judged} judged, {len(session.failed)} failed")
    for path in session.reports:
        page = os.path.join(path, "report.html")
        made = os.path.exists(page)
        terminalreporter.write_line(f"report: {page}" if made else f"no report in {path}")
