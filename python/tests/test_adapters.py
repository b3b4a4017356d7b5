"""Kernels in the forms of public benchmarks, scored as files; the real ones: ADAPTERS.md."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deltaproof.score import score_file

HERE = os.path.dirname(os.path.abspath(__file__))
CHUNKS = "T: 64 | 128\nH: 1 | 2\nK = 16\nV = 16\ng_scale: 0.02 | 0.2\n"
GPU_MODE = f"""
import sys
sys.path.insert(0, {HERE!r})
from task import input_t, output_t
from kernels import kda

def custom_kernel(data: input_t) -> output_t:
    q, k, v, g, beta = data
    return kda(q, k, v, g, beta)[0]
"""
KERNELBENCH = """
import torch

class Model(torch.nn.Module):
    def __init__(self, B, T, H, K, V, chunk_size=64):
        super().__init__()
        assert T % chunk_size == 0
        self.register_buffer("S", torch.zeros(B, H, K, V))

    def forward(self, q, k, v, g, beta):
        assert beta.dtype == torch.bfloat16 == q.dtype and g.dtype == torch.float32
        q, k, v, beta = (x.float() for x in (q, k, v, beta))
        S, o = self.S, []
        for t in range(q.shape[1]):
            S = S * g[:, t].exp()[..., None]
            e = beta[:, t][..., None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S))
            S = S + k[:, t][..., None] * e[:, :, None]
            o.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S) * q.shape[-1] ** -0.5)
        return FACTOR * torch.stack(o, 1).bfloat16()

FACTOR = 1
"""


def scored(tmp_path: Path, text: str, **told: Any) -> dict[str, Any]:
    (tmp_path / "chunks.law").write_text(CHUNKS)
    (tmp_path / "solution.py").write_text(text)
    told = {"laws": [str(tmp_path)], "count": 2, **told}
    return score_file(str(tmp_path / "solution.py"), "kda-forward", **told)[0]


def test_a_submission_to_gpu_mode_is_scored(tmp_path: Path) -> None:
    assert scored(tmp_path, GPU_MODE, base="fp32")["score"] < 1
    wrong = GPU_MODE.replace("beta)[0]", "beta)[0] * 1.001")
    assert scored(tmp_path, wrong, base="fp32")["score"] > 1


def test_a_model_of_kernelbench_is_scored(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    assert scored(tmp_path, KERNELBENCH, device="cpu")["score"] < 1
    wrong = KERNELBENCH.replace("FACTOR = 1", "FACTOR = 0")
    assert scored(tmp_path, wrong, device="cpu")["score"] > 1


def test_flashinfer_bench_takes_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("flashinfer_bench", reason="flashinfer-bench is not installed")
    from flashinfer_bench.bench.config import BenchmarkConfig
    from flashinfer_bench.bench.evaluators import registry
    from flashinfer_bench.data import Definition

    from deltaproof.adapters import flashinfer_evaluator

    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    evaluator = flashinfer_evaluator("bf16", gate="log", beta="plain", l2norm=False)
    monkeypatch.setattr(registry, "_EVALUATORS", [evaluator])
    rows = {n: {"shape": ["T", "H", "K"], "dtype": "bfloat16"} for n in ("q", "k", "v", "o")}
    rows["g"] = {**rows["q"], "dtype": "float32"}
    rows["beta"] = {"shape": ["T", "H"], "dtype": "float32"}
    definition = Definition(
        name="kda", op_type="kda", outputs={"o": rows.pop("o")}, inputs=rows,
        axes={"T": {"type": "var"}, "H": {"type": "var"}, "K": {"type": "var"}},
        reference="def run(q, k, v, g, beta):\n    return v\n",
    )  # fmt: skip
    assert registry.resolve_evaluator(definition) is evaluator
    x = {n: (0.1 * torch.randn(96, 2, 16)).bfloat16() for n in ("q", "k", "v")}
    x |= {"g": -0.1 * torch.rand(96, 2, 16), "beta": torch.rand(96, 2)}
    scope: dict[str, Any] = {}
    exec(KERNELBENCH, scope)

    def right(*given: Any) -> Any:
        q, k, v, g, beta = (y[None] for y in given)
        return scope["Model"](1, 64, 2, 16, 16)(q, k, v, g, beta.bfloat16())[0]

    x["beta"] = x["beta"].bfloat16().float()
    for kernel, passes in ((right, True), (lambda *given: torch.zeros_like(given[2]), False)):
        kernel.metadata = SimpleNamespace(destination_passing_style=False)
        errors, evaluation = evaluator.check_correctness(
            definition=definition, sol_runnable=kernel, inputs=[[x[n] for n in rows]],
            ref_outputs=[[right(*(x[n] for n in rows))]], cfg=BenchmarkConfig(),
            log_path=str(tmp_path / "log"), device="cpu",
        )  # fmt: skip
        assert (evaluation is None) == passes, errors.extra
        assert errors.extra["deltaproof"]["status"] == (0 if passes else 1)
