"""The tutorials: their commands run, and print what the pages say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TREE = Path(os.environ.get("DELTAPROOF_TREE") or Path(__file__).resolve().parents[2])
TOOL = TREE / "scripts/tutorials"
PAGES = [x.name for x in sorted((TREE / "tutorials").glob("*.md")) if x.name != "README.md"]
pytestmark = pytest.mark.skipif(not TOOL.is_file(), reason="no source tree here")


def told(page: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, TOOL, page]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)


@pytest.mark.parametrize("page", PAGES)
def test_a_tutorial_prints_what_its_page_says(page: str) -> None:
    found = told(TREE / "tutorials" / page)
    if found.returncode == 77:
        pytest.skip(found.stdout.strip())
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize(
    ("output", "right"),
    [
        ("error 1.02e-3, 12 rows (3.4 s)", True),
        ("error 2.00e-3, 12 rows (3.4 s)", False),
        ("error 1.02e-3, 13 rows (3.4 s)", False),
        ("errors 1.02e-3, 12 rows (3.4 s)", False),
    ],
)
def test_words_and_whole_numbers_count_and_seconds_do_not(
    tmp_path: Path, output: str, right: bool
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"```console\n$ echo 'error 1.00e-3, 12 rows (9.1 s)'\n{output}\n```\n")
    found = told(page)
    assert found.returncode == (0 if right else 1), found.stdout + found.stderr
