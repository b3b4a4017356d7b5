"""scripts/campaigns/adversary: the twins of RWKV-7, Comba, Oja and Mamba-3 that need numpy."""

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deltaproof.program import environment, program

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts/campaigns/adversary"
pytestmark = pytest.mark.skipif(not SCRIPTS.exists(), reason="no source tree")
FOUR = ("rwkv7", "comba", "oja", "mamba3")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and text of a run of a token-by-token kernel of each and one in chunks."""
    out = tmp_path_factory.mktemp("adversary")
    command: list[Any] = [sys.executable, SCRIPTS / "run", "files", "--out", out, "--seed", "3"]
    command += ["--program", program(), "--recurrences", *FOUR, "--formats", "bf16", "--declared"]
    command += ["--designs", "recurrent", "chunk64"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    return out, done.stdout


def test_twins_pass_token_by_token_and_in_chunks(run: tuple[Path, str]) -> None:
    assert "all: 0 failed, 0 not judged, of 8" in run[1], run[1]


@pytest.mark.parametrize("op", FOUR)
def test_a_twin_of_another_rule_stops(op: str, run: tuple[Path, str], monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    twins, files = (importlib.import_module(name) for name in ("twins", "files"))
    tensors = files.read_safetensors(str(run[0] / f"cases/{op}-0003.safetensors"))
    right = twins.STEPS[op]
    monkeypatch.setitem(twins.STEPS, op, lambda S, x, i, _: right(S, x, i, True))
    with pytest.raises(files.Stop, match="of loop and chunks differ"):
        twins.Twin("", op, "", *tensors)
