"""deltaproof.ops on several ranks, over gloo and by the kernels' own communicator."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
try:
    from deltaproof.ops import kernels

    kernels.library("cpu")
except ImportError as no:
    if os.environ.get("DELTAPROOF_OPS"):
        raise
    pytest.skip(str(no), allow_module_level=True)
if not torch.distributed.is_gloo_available():
    pytest.skip("this PyTorch has no gloo", allow_module_level=True)

PROGRAM = Path(__file__).with_name("ranks_program.py")


def on_ranks(N: int, **more: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    env = os.environ | {"OMP_NUM_THREADS": "1"} | more
    done = subprocess.run(
        [*command, str(N), str(PROGRAM)], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("all right") == N


@pytest.mark.parametrize("N", [2, 3])
def test_ranks_compute_what_one_does(N: int) -> None:
    on_ranks(N)


def test_ranks_meet_by_a_communicator_of_their_own() -> None:
    """That of CUDA devices, on the stand-in for NCCL of the tests of the kernels."""
    if torch.distributed.is_nccl_available():
        pytest.skip("this PyTorch brings its own NCCL, which the stand-in cannot replace")
    folder = Path(os.environ.get("DELTAPROOF_OPS", "")).parent / "cpu"
    if not (folder / "libnccl.so.2").exists():
        pytest.skip(f"no libnccl.so.2 of gpu/tests/cpu in {folder}")
    on_ranks(2, DP_TEST_NCCL="1", LD_LIBRARY_PATH=str(folder))
