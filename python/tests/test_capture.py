"""Calls captured in a running program, judged as a folder: a small module of numpy, and a model of
transformers where that is installed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deltaproof
from deltaproof import captures, to_bf16

MODULE = """
import numpy as np
from kernels import kda as _kda

def chunk_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, **_):
    f = lambda x: np.asarray(x, np.float32)[0]
    o, s = _kda(f(q), f(k), f(v), f(g), f(beta), initial_state, scale=scale)
    return o[None] * FACTOR, s if output_final_state else None

FACTOR = 1.0

class Layer:
    training = False
    def __init__(self, layer_idx):
        self.layer_idx = layer_idx
    def forward(self, *a, **b):
        return chunk_kda(*a, **b)
"""


def arrays(T: int, H: int = 2) -> dict[str, Any]:
    rng = np.random.default_rng(T)
    x = {n: to_bf16(rng.standard_normal((1, T, H, 16)) / 4) for n in "qkv"}
    x["g"] = -0.1 * rng.exponential(size=(1, T, H, 16)).astype(np.float32)
    x["beta"] = rng.uniform(0.2, 0.9, (1, T, H)).astype(np.float32)
    return x


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module with a function that others have imported by name."""
    (tmp_path / "served.py").write_text(MODULE)
    (tmp_path / "client.py").write_text("from served import chunk_kda\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("served", "client"):
        sys.modules.pop(name, None)
    import client  # noqa: F401
    import served

    yield served
    for name in ("served", "client"):
        sys.modules.pop(name, None)


def test_sampled_calls_are_kept_by_layer_and_judged(served: Any, tmp_path: Path) -> None:
    import client

    out, x, plain = str(tmp_path / "out"), arrays(40), client.chunk_kda
    with deltaproof.capture("served.chunk_kda", out=out, every=2) as found:
        assert client.chunk_kda is not plain
        for layer in (0, 1):
            for _ in range(3):
                served.Layer(layer).forward(**x, output_final_state=True)
    assert client.chunk_kda is plain and (found.calls, found.kept, found.errors) == (6, 4, 0)
    status, rows, lines = captures.judge_folder(out)
    assert status == 0 and len(rows) == 4, lines
    assert {r["layer"] for r in rows} == {"Layer.0", "Layer.1"}
    told = json.loads((tmp_path / "out" / f"capture-{os.getpid()}.json").read_text())
    assert told == {"calls": 6, "kept": 4, "too_large": 0, "errors": 0, "said": []}


def test_a_wrong_layer_is_named_and_shrunk_to_kilobytes(served: Any, tmp_path: Path) -> None:
    out, x = str(tmp_path / "out"), arrays(60)
    with deltaproof.capture("served.chunk_kda", out=out):
        for layer in range(4):
            served.FACTOR = 1.1 if layer == 2 else 1.0
            served.Layer(layer).forward(**x)
    status, rows, lines = captures.judge_folder(out)
    assert status == 1 and [r["status"] for r in rows] == [0, 0, 1, 0], lines
    assert any(x.startswith("Layer.2: ") and x.endswith("outlier") for x in lines), lines
    (small,) = [r["small"] for r in rows if "small" in r]
    assert os.path.getsize(small) < 20_000
    assert captures.judged(captures.read(small), None).status == 1


def test_a_wrong_rank_is_named(
    served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, x = str(tmp_path / "out"), arrays(20, 1)
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        served.FACTOR = 1.1 if rank == 1 else 1.0
        with deltaproof.capture("served.chunk_kda", out=out):
            served.Layer(0).forward(**x)
    status, rows, lines = captures.judge_folder(out)
    assert status == 1 and [r["rank"] for r in rows if r["status"]] == ["1"], lines
    assert any(x.startswith("rank 1: ") and x.endswith("outlier") for x in lines), lines


def test_a_hook_never_stops_the_run_and_sizes_are_limited(served: Any, tmp_path: Path) -> None:
    x = arrays(40)
    with deltaproof.capture("served.chunk_kda", out=str(tmp_path / "a"), most=12_000) as found:
        o, _ = served.chunk_kda(**x)
    assert found.kept == 1 and o.shape == x["v"].shape  # one head of two
    (kept,) = captures.folder(str(tmp_path / "a"))
    assert kept.inputs["q"].shape == (1, 40, 1, 16) and captures.judged(kept, None).passed
    with deltaproof.capture("served.chunk_kda", out=str(tmp_path / "b"), most=10) as found:
        served.chunk_kda(**x)
    assert (found.kept, found.too_large) == (0, 1)
    with deltaproof.capture("served.chunk_kda", out=str(tmp_path / "c")) as found:
        os.rmdir(tmp_path / "c")
        (tmp_path / "c").write_text("no folder")
        served.chunk_kda(**x)
        os.remove(tmp_path / "c")
        os.mkdir(tmp_path / "c")
    assert found.errors == 1 and found.said
    with pytest.raises(ValueError, match="'served': must be fla or transformers or a dotted name"):
        deltaproof.capture("served", out=str(tmp_path / "d"))
    with pytest.raises(ValueError, match="every=0"):
        deltaproof.capture("fla", out=str(tmp_path / "d"), every=0)
    with pytest.raises(ValueError, match="no file"):
        captures.judge_folder(str(tmp_path / "b"))


def test_a_server_is_captured_by_its_environment(tmp_path: Path) -> None:
    """And `judge DIR`, `differ DIR DIR` are commands."""
    (tmp_path / "served.py").write_text(MODULE)
    np.savez(tmp_path / "x.npz", **{n: np.asarray(x, np.float32) for n, x in arrays(30).items()})
    (tmp_path / "main.py").write_text(
        "import numpy as np, served, sys\nserved.FACTOR = float(sys.argv[1])\n"
        "served.chunk_kda(**np.load('x.npz'))\n"
    )
    run = [sys.executable, "-m", "deltaproof"]
    site = subprocess.check_output([*run, "capture-path"], text=True).strip()
    path = os.pathsep.join([site, str(tmp_path), os.path.dirname(os.path.abspath(__file__))])
    for out, factor in (("a", "1"), ("b", "1.2")):
        env = os.environ | {"DELTAPROOF_CAPTURE": "served.chunk_kda", "PYTHONPATH": path}
        env |= {"DELTAPROOF_CAPTURE_OUT": out}
        command = [sys.executable, "main.py", factor]
        subprocess.run(command, cwd=tmp_path, env=env, check=True)
    own = os.environ | {"PYTHONPATH": path}
    said = [
        subprocess.run([*run, *a], cwd=tmp_path, capture_output=True, text=True, env=own)
        for a in (["judge", "a"], ["judge", "b"], ["differ", "a", "a"], ["differ", "a", "b"])
    ]
    assert [x.returncode for x in said] == [0, 1, 0, 1], [x.stdout + x.stderr for x in said]
    assert "same bits  chunk_kda-none-0-0" in said[2].stdout
    assert "beyond its limits in b  chunk_kda-none-0-0" in said[3].stdout


def _model(kind: str) -> Any:
    """A small model of random weights; its name of the layer that is captured."""
    import transformers

    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 64, "intermediate_size": 64}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    sizes |= {"num_experts": 2, "moe_intermediate_size": 32}
    if kind == "KimiLinear":
        linear = {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 2, "head_dim": 32}
        sizes |= {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16}
        sizes |= {"v_head_dim": 16, "q_lora_rank": None, "linear_attn_config": linear}
        sizes |= {"num_local_experts": 2, "num_experts_per_tok": 1, "pad_token_id": 0}
        sizes |= {"bos_token_id": 1, "eos_token_id": 2}
    else:
        sizes |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32}
        sizes |= {"linear_value_head_dim": 32, "num_experts_per_tok": 1}
        sizes |= {"shared_expert_intermediate_size": 32}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def _generated(model: Any, folder: str, tokens: int = 3) -> Any:
    import torch

    torch.manual_seed(2)
    with deltaproof.capture("transformers", out=folder) as found, torch.no_grad():
        try:
            given = torch.randint(0, 64, (1, 70))
            made = model.generate(given, max_new_tokens=tokens, do_sample=False)
        except RuntimeError as e:
            if "driver" in str(e):
                pytest.skip("transformers takes FLA here, which needs a device")
            raise
    return found, made


@pytest.mark.parametrize("kind", ["Qwen3Next", "KimiLinear"])
def test_a_model_of_transformers_is_captured_and_judged(kind: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(1)
    found, _ = _generated(_model(kind), str(tmp_path))
    assert found.kept == 9 and not found.errors, found.said
    status, rows, lines = captures.judge_folder(str(tmp_path))
    assert status == 0 and len({r["layer"] for r in rows}) == 3, lines


def test_trainer_and_rollout_of_a_model_are_compared(tmp_path: Path) -> None:
    """The prompt and what was generated at once, against prompt and single tokens."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(1)
    model = _model("Qwen3Next")
    rollout, trainer = str(tmp_path / "rollout"), str(tmp_path / "trainer")
    _, made = _generated(model, rollout)
    with deltaproof.capture("transformers", out=trainer), torch.no_grad():
        model(made[:, :-1], use_cache=False)
    status, lines = captures.differ_folders(rollout, trainer)
    assert status == 0 and lines[-1].startswith("3 sequences compared"), lines
