"""Truth packs in the layouts of other projects: their formulas written again, and the real
functions where they are installed. DELTAPROOF_GGML is a folder with ggml's include and lib."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import adapters_onnx
import deltaproof
from deltaproof import packs
from deltaproof.adapters import onnx_problem
from deltaproof.pack_readers import deltaproof_layouts as layouts
from deltaproof.pack_readers import deltaproof_pack as reader

HERE = os.path.dirname(reader.__file__)
ROWS = "K = 16\nV = 16\nbackward = no\n"
CASES = {  # text, query heads a value head
    "linear": (f"op = gla\nT = 40\nH = 2\n{ROWS}g_scale = 0\n", 2),
    "gated": (f"op = gla\nT = 40\nH = 2\n{ROWS}g_scale = 0.1\ns0_scale = 1\n", 1),
    "gated-head": (f"op = ssd\nT = 40\nH = 2\n{ROWS}g_scale = 0.1\n", 1),
    "delta": (f"op = gdn\nT = 40\nH = 1\nHV = 3\n{ROWS}g_scale = 0\ns0_scale = 1\n", 1),
    "gated-delta": (
        f"op = kda\nT = 80\nH = 2\n{ROWS}g_scale = 0.1\ns0_scale = 1\ncu_seqlens = 0,40,80\n", 3,
    ),
    "gdn": (f"op = gdn\nT = 80\nH = 2\nHV = 4\n{ROWS}g_scale = 0.1\ns0_scale = 1\n"
            "cu_seqlens = 0,40,80\n", 1),
    "kda": (f"op = kda\nT = 70\nH = 2\n{ROWS}g_scale = 0.1\n", 1),
}  # fmt: skip
RULES = {"linear": "linear", "gated": "gated", "gated-head": "gated", "delta": "delta"}
DELTA = ("gdn", "kda", "delta")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """{case: (file, pack, settings)}."""
    folder, out = tmp_path_factory.mktemp("packs"), {}
    for name, (text, queries) in CASES.items():
        (folder / f"{name}.case").write_text("reason = r\nsource = s\n" + text)
        at = str(folder / name)
        index = packs.pack([f"{folder}/{name}.case"], "fp32", "recurrent", at, queries)
        file = f"{at}/{name}.pack"
        out[name] = (file, reader.read(file), index["cases"][name]["settings"])
    return out


def red(pack: Any, got: dict[str, Any]) -> dict[str, list[str]]:
    return {n: b for n, x in got.items() if (b := reader.check(pack, n, np.asarray(x)))}


def holds(pack: Any, o: Any, state: Any) -> None:
    """Green as it is; red with another head's results, or a little larger."""
    o, state = np.asarray(o), np.asarray(state)
    assert not red(pack, {"o": o, "final_state": state})
    assert red(pack, {"o": o.reshape(pack["truth.o"].shape)[:, ::-1]})
    assert red(pack, {"o": o * 1.0001}) and red(pack, {"final_state": state * 1.0001})


# ---- ONNX ----------------------------------------------------------------------------------------


def evaluators() -> list[Any]:
    return [adapters_onnx.formulas, adapters_onnx.reference, adapters_onnx.runtime]


@pytest.mark.parametrize("evaluate", evaluators())
@pytest.mark.parametrize("case", CASES)
def test_linear_attention_of_onnx(case: str, evaluate: Any, made: Any) -> None:
    _, pack, told = made[case]
    feeds, attributes = layouts.onnx(pack, told)
    assert attributes["update_rule"] == RULES.get(case, "gated_delta")
    assert attributes["q_num_heads"] == attributes["kv_num_heads"] * CASES[case][1]
    holds(pack, *evaluate(feeds, attributes))


@pytest.mark.parametrize("case", ["linear", "gated-delta", "gdn"])
def test_a_node_of_onnx_is_judged(case: str, made: Any) -> None:
    """And by `judge`, without a pack: from a node's inputs, attributes and outputs."""
    feeds, attributes = layouts.onnx(*made[case][1:])
    o, state = adapters_onnx.formulas(feeds, attributes)
    for factor, status in ((1, 0), (1.0001, 1)):
        outputs = {"output": o * np.float32(factor), "present_state": state}
        inputs, results, settings = onnx_problem(feeds, attributes, outputs)
        found = deltaproof.judge(inputs, results, base="fp32", design="recurrent", **settings)
        assert found.status == status, found.text


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_the_node_tests_of_onnx_hold_and_pass_what_is_wrong() -> None:
    """Their outputs are right; their tolerance of 1e-3 passes results that are 0.0005 too large."""
    names = set()
    for name, feeds, attributes, outputs in adapters_onnx.node_tests():
        base, design = adapters_onnx.base_of(feeds)
        for factor, status in ((1, 0), (1.0005, 1)):
            made = {n: (x * factor).astype(x.dtype) for n, x in outputs.items()}
            inputs, results, settings = onnx_problem(feeds, attributes, made)
            found = deltaproof.judge(inputs, results, base=base, design=design, **settings)
            assert found.status == status, (name, factor, found.text)
            names.add(name)
        want = outputs["output"]
        assert want.dtype == np.float16 or np.allclose(want * 1.0005, want, rtol=1e-3, atol=1e-7)
    assert len(names) >= 14


# ---- MLX -----------------------------------------------------------------------------------------


def mlx_formulas(q: Any, k: Any, v: Any, g: Any, beta: Any, S: Any) -> tuple[Any, Any]:
    """Written from mlx_lm's text of shapes: S [B,HV,V,K]."""
    q, k = (np.repeat(x, v.shape[2] // x.shape[2], 2) for x in (q, k))
    g, o = g if g.ndim == 4 else g[..., None], np.zeros_like(v)
    for t in range(q.shape[1]):
        S = S * g[:, t, :, None]
        e = (v[:, t] - np.einsum("bhvk,bhk->bhv", S, k[:, t])) * beta[:, t, :, None]
        S = S + e[..., None] * k[:, t, :, None]
        o[:, t] = np.einsum("bhvk,bhk->bhv", S, q[:, t])
    return o, S


def mlx_function(name: str) -> Any:
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
    module: Any = mx.fast
    if name == "gated_delta_ops":
        module = pytest.importorskip("mlx_lm.models.gated_delta", reason="mlx_lm is not installed")

    def call(*given: Any) -> tuple[Any, Any]:
        o, state = getattr(module, name)(*(mx.array(np.asarray(x, np.float32)) for x in given))
        return np.array(o), np.array(state)

    return call


@pytest.mark.parametrize("function", ["formulas", "gated_delta_ops", "gated_delta_update"])
@pytest.mark.parametrize("case", DELTA)
def test_gated_delta_of_mlx(case: str, function: str, made: Any) -> None:
    call = mlx_formulas if function == "formulas" else mlx_function(function)
    _, pack, told = made[case]
    o, state = call(*layouts.mlx(pack, told))
    holds(pack, o, state.swapaxes(-1, -2))


# ---- transformers --------------------------------------------------------------------------------

TRANSFORMERS = {
    "qwen3_next": ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
    "kimi_linear": ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
}


@pytest.mark.parametrize(("model", "case"), [("qwen3_next", "gdn"), ("kimi_linear", "kda")])
def test_functions_of_transformers(model: str, case: str, made: Any) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    path = f"transformers.models.{model}.modeling_{model}"
    module = pytest.importorskip(path, reason=f"transformers has no {model}")
    _, pack, told = made[case]
    given = {n: torch.tensor(x) for n, x in layouts.transformers(pack, told).items()}
    given.setdefault("initial_state", None)
    for name in TRANSFORMERS[model]:
        fn = getattr(module, name)
        holds(pack, *getattr(fn, "__wrapped__", fn)(**given, output_final_state=True))


def test_what_a_layout_cannot_say_is_refused(made: Any) -> None:
    _, pack, told = made["kda"]
    with pytest.raises(ValueError, match="scale 0.5: is not K"):
        layouts.transformers(pack, told | {"scale": "0.5"})
    with pytest.raises(ValueError, match="sequences of several lengths"):
        layouts.onnx(pack | {"in.cu_seqlens": np.array([0, 30, 70])}, told)
    with pytest.raises(ValueError, match="several query heads need log gates"):
        packs.pack(["smoke-kda"], "fp32", "recurrent", os.devnull + "x", 2)


# ---- ggml ----------------------------------------------------------------------------------------


def ggml_program(folder: Path, real: bool) -> str:
    """A program that computes a pack by ggml_gated_delta_net and checks it; not real: by its
    formulas."""
    home = os.environ.get("DELTAPROOF_GGML", "")
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    if real and not home:
        pytest.skip("DELTAPROOF_GGML names no folder of ggml")
    source = os.path.join(os.path.dirname(os.path.abspath(__file__)), "ggml_pack.c")
    program = str(folder / "ggml_pack")
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", f"-I{HERE}"]
    libs = ["-lm"]
    if real:
        flags += ["-DREAL", f"-I{home}/include"]
        libs += [f"-L{home}/lib", f"-Wl,-rpath,{home}/lib", "-lggml-cpu", "-lggml-base"]
    subprocess.run(["cc", *flags, source, "-o", program, *libs], check=True)
    return program


@pytest.mark.parametrize("real", [False, True], ids=["formulas", "ggml"])
def test_gated_delta_net_of_ggml(real: bool, made: Any, tmp_path: Path) -> None:
    program = ggml_program(tmp_path, real)
    for case in DELTA:
        for factor, status in (("1", 0), ("1.0001", 1)):
            done = subprocess.run([program, made[case][0], factor], capture_output=True, text=True)
            assert done.returncode == status, (case, factor, done.stdout, done.stderr)
