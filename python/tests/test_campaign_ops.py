"""scripts/campaigns/ops, by a stand-in for FLA that has its names alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
try:
    from deltaproof.ops import kernels

    kernels.library("cpu")
except ImportError as no:
    pytest.skip(str(no), allow_module_level=True)

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts/campaigns/ops"
pytestmark = pytest.mark.skipif(not SCRIPTS.exists(), reason="no source tree")
TESTS = """
import pytest, torch
from fla.ops.kda import chunk_kda
x = {n: torch.ones(1, 2, 1, 16) for n in "qkvg"}

@pytest.mark.parametrize("dtype", [torch.float16])
def test_half_is_of_another_type(dtype):
    assert dtype == torch.bfloat16
    q, k, v = (x[n].to(dtype) for n in "qkv")
    assert chunk_kda(q, k, v, -x["g"], torch.ones(1, 2, 1))[0].dtype == dtype

def test_refusals_are_not_served():
    chunk_kda(**x, beta=torch.ones(1, 2, 1), return_intermediate_states=True)

def test_errors_fail():
    chunk_kda(**x, beta=torch.ones(1, 2))

def test_without_a_call():
    pass

def test_broken():
    assert False
"""
CUT = """
import os, time
from fla.ops.kda import chunk_kda

def test_short():
    pass

def test_long():
    time.sleep(0 if os.environ.get("SHORT") else 600)
"""


def stand_in(root: Path) -> None:
    sys.path.insert(0, str(SCRIPTS))
    import swap

    for module, names in {**swap.NAMES, "fla.utils": ()}.items():
        path = root.joinpath(*module.split("."))
        path.mkdir(parents=True)
        for folder in (path, *path.relative_to(root).parents):
            (root / folder / "__init__.py").touch()
        text = "".join(f"def {n}(*a, **k):\n    raise AssertionError('FLA\\'s')\n" for n in names)
        (path / "__init__.py").write_text(text)


def test_flas_tests_run_on_ours_and_go_on_where_they_stopped(tmp_path: Path) -> None:
    stand_in(tmp_path / "site")
    ops = tmp_path / "fla/tests/ops"
    ops.mkdir(parents=True)
    (ops / "test_kda.py").write_text(TESTS)
    paths = [str(tmp_path / "site"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, str(SCRIPTS / "fla_tests.py"), str(ops.parent), "--out"]
    command += [str(tmp_path / "out"), "--limit", "100"]

    theirs = [*command[:-3], str(tmp_path / "theirs"), "--limit", "60", "--whose", "fla"]
    said = subprocess.run([*theirs, "-k", "half"], env=env, capture_output=True, text=True)
    assert "AssertionError: FLA's" in said.stdout, said.stdout + said.stderr

    first = subprocess.run([*command, "-k", "half"], env=env, capture_output=True, text=True)
    log = (tmp_path / "out/log.txt").read_text()
    assert "all done" in first.stdout, first.stdout + first.stderr + log
    subprocess.run(command, env=env, check=True, capture_output=True)
    found = [json.loads(line) for line in (tmp_path / "out/results.jsonl").open()]
    kinds = {r["test"].split("::")[1].split("[")[0]: r["kind"] for r in found}
    assert kinds == {
        "test_half_is_of_another_type": "passed",
        "test_refusals_are_not_served": "not served",
        "test_errors_fail": "failed",
        "test_without_a_call": "no call",
        "test_broken": "broke first",
    }
    assert len(found) == 2 * len(kinds)


def test_a_run_that_is_cut_leaves_its_table_and_no_crash(tmp_path: Path) -> None:
    stand_in(tmp_path / "site")
    ops, out = tmp_path / "fla/tests/ops", tmp_path / "out"
    ops.mkdir(parents=True)
    (ops / "test_kda.py").write_text(CUT)
    paths = [str(tmp_path / "site"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, str(SCRIPTS / "fla_tests.py"), str(ops.parent), "--out", str(out)]

    def counts() -> list[str]:
        return (out / "table.txt").read_text().splitlines()[1].split()[1:]

    run = subprocess.Popen(command, env=env, start_new_session=True, stdout=subprocess.DEVNULL)
    until, results = time.monotonic() + 500, out / "results.jsonl"
    while not (results.exists() and "test_long" in results.read_text()):
        assert time.monotonic() < until and run.poll() is None
        time.sleep(0.1)
    os.killpg(run.pid, signal.SIGTERM)
    run.wait(300)
    while "cut" not in results.read_text():
        assert time.monotonic() < until
        time.sleep(0.1)
    assert counts() == ["0", "0", "0", "0", "1", "0"]
    subprocess.run(command, env=env | {"SHORT": "1"}, check=True, capture_output=True)
    assert counts() == ["0", "0", "0", "0", "2", "0"], (out / "log.txt").read_text()


def test_an_operator_is_judged_on_a_set(tmp_path: Path) -> None:
    out = tmp_path / "judged.txt"
    command = [sys.executable, str(SCRIPTS / "judged.py"), "--cpu", "--set", "smoke", "--only"]
    command += ["gla/fp32", "--out", str(out)]
    for _ in range(2):
        subprocess.run(command, check=True, capture_output=True)
    rows = out.read_text().splitlines()
    assert len(rows) == 1 and rows[0].startswith("gla/fp32: 3 pass; "), rows
