"""deltaproof cp-check on two ranks over gloo: what each function of cp_functions.py is told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
if not torch.distributed.is_gloo_available():
    pytest.skip("this PyTorch has no gloo", allow_module_level=True)

FUNCTIONS = Path(__file__).with_name("cp_functions.py")


def told(function: str, *options: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += [str(ranks), "-m", "deltaproof.cp_check", f"{FUNCTIONS}:{function}", "--cpu"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *options], env=env, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize(
    "function, verdict, words",
    [
        ("coarse", "rounding", "rank 1, token "),
        ("turned", "exchange", "first: o at rank 1, token 64 (its row 0)"),
        ("nothing", "exchange", "nothing crosses from rank to rank; first: o at rank 1, token 64"),
        ("wrong_alone", "alone", "one rank is wrong already: o, head 0"),
        ("remembers", "calls", "called again with v and do negated: o, head 0"),
        ("second", "calls", "again with the same inputs: o, head 1, sequence 1, token 64"),
    ],
)
def test_a_function_without_gradients_is_told(function: str, verdict: str, words: str) -> None:
    found = told(function, "--forward")
    assert f"cp-check: {verdict}: " in found.stdout, found.stdout + found.stderr[-2000:]
    assert words in found.stdout
    assert found.returncode == 1


@pytest.fixture
def kernels_of_the_cpu() -> None:
    try:
        from deltaproof.ops import kernels

        kernels.library("cpu")
    except ImportError as no:
        pytest.skip(str(no))


@pytest.mark.parametrize(
    "function, verdict, words",
    [
        ("right", "right", "one rank and 2 pass"),
        ("takes_zigzag", "layout", "takes its rows for zigzag, and they are contiguous; first: o"),
        ("one_sequence", "layout", "takes all sequences for one; first: o at rank 0, token 16"),
        ("gives_reversed", "ranks", "first of all: o at rank 0, token 0"),
    ],
)
@pytest.mark.usefixtures("kernels_of_the_cpu")
def test_a_function_with_gradients_is_told(function: str, verdict: str, words: str) -> None:
    found = told(function)
    assert f"cp-check: {verdict}: " in found.stdout, found.stdout + found.stderr[-2000:]
    assert words in found.stdout
    assert (found.returncode == 0) == (verdict == "right")


@pytest.mark.usefixtures("kernels_of_the_cpu")
def test_the_tensor_cores_path_is_right_on_ranks() -> None:
    found = told("right", "--base", "bf16", "--claim", "tf32x3", "--width", "64")
    assert "cp-check: right: " in found.stdout, found.stdout + found.stderr[-2000:]


@pytest.mark.usefixtures("kernels_of_the_cpu")
@pytest.mark.parametrize(
    "function, words",
    [
        ("layer", "cp-check: right: one rank and 2 pass"),
        ("layer_of_sums", "cp-check: exchange: dA_log is the whole sum on every rank"),
    ],
)
def test_gradients_of_parameters_are_summed_over_ranks(function: str, words: str) -> None:
    found = told(function, "--gate", "softplus", "--beta", "sigmoid", "--l2norm")
    assert words in found.stdout, found.stdout + found.stderr[-2000:]


def test_a_name_that_is_not_there_is_said() -> None:
    found = told("missing")
    assert "cp_functions.py has no missing" in found.stderr


def test_the_command_asks_for_torchrun() -> None:
    start = "import sys; from deltaproof.program import main; main()"
    env = {n: v for n, v in os.environ.items() if n != "RANK"}
    found = subprocess.run(
        [sys.executable, "-c", start, "cp-check", f"{FUNCTIONS}:right"],
        env=env, capture_output=True, text=True,
    )  # fmt: skip
    assert found.returncode == 2
    assert "start it by torchrun" in found.stderr
