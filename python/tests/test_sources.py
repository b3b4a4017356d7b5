"""reports/sources.md names statements of the source documents, tests, files and commands: they are
there, and commands print what stands behind their arrows."""

import re
import shlex
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from deltaproof.program import environment, program

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "reports" / "sources.md"
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="no source tree beside these tests")
TEXT = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""
ROWS = re.findall(r"^\| ([A-EU]\d+) \| (.+?) \| ([a-z ]+) \| (.+) \|$", TEXT, re.M)
COMMANDS = re.findall(r"`deltaproof ([^`]+)`(?: → ([^|,;`\n]+))?", "\n".join(r[3] for r in ROWS))


def test_every_statement_stands_there_once_and_is_counted() -> None:
    numbers = [r[0] for r in ROWS]
    assert len(numbers) == len(set(numbers)) == 171
    stands = Counter(r[2] for r in ROWS)
    said = re.search(
        r"(\d+) hold\. In (\d+) .*?(\d+) are there in part,\s+(\d+) is missing", TEXT, re.S
    )
    assert said
    assert [int(x) for x in said.groups()] == [
        stands[x] for x in ("holds", "wrong", "partly", "missing")
    ]


def test_tests_and_files_that_it_names_are_there() -> None:
    sources = (ROOT / "harness" / "tests").glob("test_*.c")
    known = {
        f"{group}.{name}"
        for path in sources
        for group, name in re.findall(
            r"^DP_TEST\((\w+),\s*(\w+)\)", path.read_text(encoding="utf-8"), re.M
        )
    }
    for number, _, _, where in ROWS:
        for name in re.findall(r"`([^`]+)`", where):
            if re.fullmatch(r"\w+\.\w{8,}", name):
                assert name in known, f"{number}: no test {name}"
            elif "/" in name and " " not in name:
                assert (ROOT / name).is_file(), f"{number}: no file {name}"
    for name in re.findall(r"\]\(([\w/.-]+)\)", TEXT):
        assert (PAGE.parent / name).is_file(), name


@pytest.mark.parametrize(("command", "says"), sorted(set(COMMANDS)))
def test_a_command_prints_what_it_says(command: str, says: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [program(), *shlex.split(command)],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert says.strip() in done.stdout
