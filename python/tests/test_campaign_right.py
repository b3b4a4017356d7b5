"""scripts/campaigns/right, in its least form: one recurrence, the smoke set, a format."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from deltaproof.program import environment

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts/campaigns/right"
pytestmark = pytest.mark.skipif(not SCRIPTS.exists(), reason="no source tree")


def ran(*command: Any) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, check=False,
        env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")
def test_right_kernels_pass_and_are_not_run_again(tmp_path: Path) -> None:
    rows, page = tmp_path / "rows.json", tmp_path / "page.md"
    command = (SCRIPTS / "run", rows, "--sets=smoke", "--models=gdn2,rwkv7", f"--page={page}")
    assert ran(*command).count("3 pass") == 16
    assert ran(*command) == ""
    assert all(x["status"] == 0 for x in json.loads(rows.read_text()).values())
    assert "| rwkv7 |" in page.read_text()


def test_short_states_right_and_wrong(tmp_path: Path) -> None:
    rows, page = tmp_path / "rows.json", tmp_path / "page.md"
    told = ("--formats=int8-row", "--seeds=1", "--wrong-seeds=1", "--parts=1")
    ran(SCRIPTS / "states", rows, *told, f"--page={page}")
    found = json.loads(rows.read_text())
    assert len(found) == 18 and all(x["runs"] == 1 for x in found.values())
    for key, x in found.items():
        form, fault, part, _ = key.split("|")
        assert form == "int8-row" and not x["other"] and not x["raised"], (key, x)
        assert (x["fail"] == 1) if part == "1" and fault else (not x["fail"] or fault), (key, x)
    assert "| int8-row | 1, 0 | 1, 0 |" in page.read_text()
