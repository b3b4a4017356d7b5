"""judge and assert_explained on a recurrence in numpy: what must pass passes, what must raise
raises and says why."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import deltaproof
from deltaproof import assert_explained, judge, to_bf16
from deltaproof.provenance import short_name
from kernels import deltaproduct, dplr, inputs, kda

SAID: dict[str, Any] = {"gate": "log", "beta": "plain", "l2norm": False}


def impostor(
    folder: Path, monkeypatch: pytest.MonkeyPatch, record: Any, end: str, own: bool = True
) -> None:
    """A program that writes this record, as that of its own call or of another, and ends so."""
    record = record | {"provenance": {"notes": {"call": "CALL"}}}
    fake = folder / "fake"
    fake.write_text(f"""#!/bin/sh
for a in "$@"; do
    case $a in --json=*) to=${{a#--json=}};; --note=call=*) call=${{a#--note=call=}};; esac
done
{"" if own else "call=other"}
echo '{json.dumps(record)}' | sed "s/CALL/$call/" >"$to"
{end}
""")
    fake.chmod(0o700)
    monkeypatch.setenv("DELTAPROOF", str(fake))


@pytest.fixture
def x() -> dict[str, np.ndarray]:
    return inputs()


def test_a_right_kernel_passes_and_its_figures_come_back(x: dict[str, np.ndarray]) -> None:
    o, state = kda(**x)
    got = assert_explained(x, {"o": o, "final_state": state}, base="fp32", **SAID)
    assert got["o"]["verdict"] == "pass" and 0 < got["o"]["rel_fro"] < 1e-6
    assert got["final_state"]["ratio"] < 1


def test_sequences_that_two_places_tell_apart_are_refused(x: dict[str, np.ndarray]) -> None:
    more = x | {"cu_seqlens": np.array([0, 100])}
    for cu, status in (([0, 100], 0), ([0, 30, 100], 2), ([0], 2)):
        found = judge(more, {"o": kda(**x)[0]}, base="fp32", cu_seqlens=cu, **SAID)
        assert found.status == status, found.text
        assert status == 0 or "has others in its tensor cu_seqlens" in found.text, found.text


@pytest.mark.parametrize("design", [None, "recurrent"])
def test_fp32_arithmetic_is_no_fp64(x: dict[str, np.ndarray], design: str | None) -> None:
    """Whatever type holds the outputs. A kernel in fp64 whose outputs are stored in fp32 passes,
    and the text says an error above its own as the smallest that fails."""
    narrow, wide = (kda(**x, dtype=t)[0] for t in (np.float32, np.float64))
    for o in (narrow.astype(np.float32), narrow.astype(np.float32).astype(np.float64)):
        assert judge(x, {"o": o}, base="fp64", design=design, **SAID).status == 1
    assert judge(x, {"o": wide}, base="fp64", design=design, **SAID).passed
    found = judge(x, {"o": wide.astype(np.float32)}, base="fp64", design=design, **SAID)
    said = re.search(r"error (\S+); smallest error that fails: (\S+) of o", found.text)
    assert found.passed and said and float(said[1]) < float(said[2]), found.text


def test_zeros_behind_gates_that_grow_now_and_then_fail() -> None:
    """Decays forget on the whole. The truth's radius grows with each gate above 0, by norms."""
    x = inputs(T=700)
    rng = np.random.default_rng(7)
    x["g"] = rng.normal(-0.4, 0.4, x["g"].shape).astype(np.float32)
    o, _ = kda(**x)
    late = np.where(np.arange(700)[:, None, None] < 600, o, 0)
    told: dict[str, Any] = {"base": "fp32", **SAID}
    assert judge(x, {"o": late}, **told).status == 1
    right = judge(x, {"o": o}, **told)
    truth = right.record["runs"][0]["truth"]
    assert right.passed and truth["bits"] > 192 and truth["radius"] < 1e-8, right.text


@pytest.mark.parametrize("carried", ["float32", "bfloat16"])
def test_fp64_with_states_that_are_carried_short_passes_as_declared(
    x: dict[str, np.ndarray], carried: str
) -> None:
    state, o = None, []
    for t in range(len(x["q"])):
        one = {n: a[t : t + 1] for n, a in x.items()}
        y, state = kda(**one, initial_state=state, dtype=np.float64)
        state = state.astype(getattr(ml_dtypes, carried, carried)).astype(np.float64)
        o.append(y)
    short = {"float32": "fp32", "bfloat16": "bf16"}[carried]
    said = SAID | {"base": "fp64", "design": f"recurrent,state={short}"}
    found = judge(x, {"o": np.concatenate(o)}, **said)
    assert found.passed, found.text
    assert judge(x, {"o": np.concatenate(o)}, **said | {"design": "recurrent"}).status == 1


def test_gates_above_0_are_judged_and_the_record_asks_whether_they_are_decays(
    x: dict[str, np.ndarray],
) -> None:
    decays = x | {"g": np.abs(x["g"])}
    o, state = kda(**decays)
    found = judge(decays, {"o": o, "final_state": state}, base="fp32", **SAID)
    assert found.passed and found.record, found.text
    (warning,) = found.record["cases"][0]["warnings"]
    assert warning.endswith("with --gate exp g is the decay")


def test_a_batch_axis_of_one_changes_nothing(x: dict[str, np.ndarray]) -> None:
    o, _ = kda(**x)
    assert_explained({n: a[None] for n, a in x.items()}, {"o": o[None]}, base="fp32", **SAID)


def test_keys_of_gated_deltaproduct_stand_on_an_axis_or_are_tokens_as_in_fla() -> None:
    rng, T, H, R, K, V = np.random.default_rng(3), 70, 2, 3, 16, 8
    q, k = rng.normal(size=(T, H, K)), rng.normal(size=(T, H, R, K)) / 8
    v, beta = rng.normal(size=(T, H, R, V)), rng.uniform(0, 1, (T, H, R))
    own = {"q": q, "k": k, "v": v, "g": -rng.uniform(0, 0.1, (T, H)), "beta": beta}
    own = {n: y.astype(np.float32) for n, y in own.items()}
    fla = {n: y[None] for n, y in own.items()}
    for name, y in own.items():
        if name in ("k", "v", "beta"):
            turned = np.moveaxis(y, 2, 1)
            fla[name] = turned.reshape(1, T * R, *turned.shape[2:]).copy()
    o, state = deltaproduct(**own)
    for x, right in ((own, o), (fla, o[None])):
        assert_explained(x, {"o": right, "final_state": state}, base="fp32", **SAID)
    o, _ = deltaproduct(**own, turns=False)
    assert not judge(fla, {"o": o[None]}, base="fp32", **SAID).passed


def test_factors_of_dplr_have_fla_s_names_too() -> None:
    rng, T, H, K, V = np.random.default_rng(4), 70, 2, 16, 8
    u = rng.normal(size=(T, H, K))
    u /= np.linalg.norm(u, axis=-1, keepdims=True)
    own = {"q": rng.normal(size=(T, H, K)), "k": rng.normal(size=(T, H, K)) / 8}
    own |= {"v": rng.normal(size=(T, H, V)), "g": -rng.uniform(0, 0.6, (T, H, K))}
    own |= {"lr_a": -u, "lr_b": u * rng.uniform(0, 1, (T, H, K))}
    own = {n: y.astype(np.float32) for n, y in own.items()}
    fla = {{"lr_a": "a", "lr_b": "b"}.get(n, n): y for n, y in own.items()}
    o, state = dplr(**own)
    for x in (own, fla):
        assert_explained(x, {"o": o, "final_state": state}, base="fp32", **SAID)
    o, _ = dplr(**own, decayed=True)
    assert not judge(fla, {"o": o}, base="fp32", **SAID).passed


def test_a_wrong_row_is_named_and_its_command_judges_it_again(x: dict[str, np.ndarray]) -> None:
    o, _ = kda(**x)
    o[70, 1] *= 1.001
    with pytest.raises(AssertionError, match=r"(?s)not explained.*o, rank 0, head 1.*token 70"):
        assert_explained(x, {"o": o}, base="fp32", **SAID)
    found = judge(x, {"o": o}, base="fp32", **SAID)
    assert found.failures()[0].startswith("o, rank 0, head 1, sequence 0, token 70: ")
    again = found.command.replace("deltaproof", deltaproof.program(), 1)
    done = subprocess.run(again, shell=True, text=True, capture_output=True, check=False)
    assert done.returncode == 1 and "token 70" in done.stdout, done.stdout + done.stderr


def test_a_format_that_is_claimed_must_be_delivered(x: dict[str, np.ndarray]) -> None:
    o, _ = kda(**x)
    with pytest.raises(AssertionError, match="fail     o"):
        assert_explained(x, {"o": to_bf16(o).astype(np.float32)}, base="fp32", **SAID)
    assert_explained(x, {"o": to_bf16(o)}, base="fp32", **SAID)  # said to be bf16: one rounding
    short = {n: to_bf16(a) for n, a in x.items()}
    wide = {n: a.astype(np.float32) for n, a in short.items()}
    rounded = to_bf16(kda(**wide)[0])
    assert_explained(short, {"o": rounded}, base="bf16", **SAID)
    with pytest.raises(AssertionError, match="fail     o"):  # other inputs than it was given
        assert_explained(x, {"o": rounded}, base="fp32", **SAID)


def test_nan_fails(x: dict[str, np.ndarray]) -> None:
    o, _ = kda(**x)
    o[3, 0, 2] = np.nan
    with pytest.raises(AssertionError, match="fail     o"):
        assert_explained(x, {"o": o}, base="fp32", **SAID)


def test_what_cannot_be_judged_is_a_value_error(x: dict[str, np.ndarray]) -> None:
    o, _ = kda(**x)
    with pytest.raises(ValueError, match=re.escape("shape [50,2,8]")):
        assert_explained(x, {"o": o[:50]}, base="fp32", **SAID)
    with pytest.raises(ValueError, match="tensor out is not known"):
        assert_explained(x, {"out": o}, base="fp32", **SAID)
    with pytest.raises(ValueError, match="complex"):
        assert_explained(x, {"o": o.astype(complex)}, base="fp32", **SAID)


def test_a_bound_that_says_nothing_does_not_pass_unseen(
    x: dict[str, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = {"verdict": "unjudged", "tensors": [{"name": "o", "verdict": "pass"}]}
    run["tensors"] += [{"name": "dg", "verdict": "unjudged"}]
    impostor(tmp_path, monkeypatch, {"verdict": "error", "runs": [run]}, "exit 2")
    with pytest.raises(AssertionError, match="dg: not judged"):
        assert_explained(x, {"o": x["v"]}, base="fp32", **SAID)
    run["tensors"][1]["allowed"] = True
    impostor(
        tmp_path, monkeypatch, {"verdict": "pass", "runs": [run | {"verdict": "pass"}]}, "exit 0"
    )
    assert_explained(x, {"o": x["v"]}, base="fp32", unjudged=("dg",), **SAID)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("design", [None, "chunk=64"])
def test_sums_of_gates_that_are_below_what_exp_can_show(design: str | None, dtype: Any) -> None:
    """As kernels by chunks add them: what a gate of -1e4 rounds off is off behind it."""
    x = inputs(T=64)
    x["g"][np.random.default_rng(3).random(x["g"].shape) < 0.02] = -1e4
    q, k, v, g = (x[n].astype(dtype) for n in "qkvg")
    sums = np.cumsum(g, 0, dtype=dtype)
    with np.errstate(over="ignore"):
        decay = np.tril(np.exp(sums[:, None] - sums[None]).transpose(2, 3, 0, 1))
    scores = np.einsum("thk,shk,hkts->hts", q, k, decay)
    o = np.einsum("hts,shv->thv", scores, v) * dtype(0.25)
    base = {np.float32: "fp32", np.float64: "fp64"}[dtype]
    said = SAID | {"beta": "none", "base": base, "design": design}
    x.pop("beta")
    assert judge(x, {"o": o}, **said).passed
    o[40:] *= dtype(1.01)
    assert judge(x, {"o": o}, **said).status == 1


@pytest.mark.parametrize("size", [1e-37, 1e-38])
@pytest.mark.parametrize("right", [0, 1])
def test_what_may_underflow_is_no_pass(x: dict[str, np.ndarray], size: float, right: int) -> None:
    """Zeros are within what fp32 does to such numbers; right outputs say no more."""
    small = x | {"v": x["v"] * np.float32(size)}
    made = dict(zip(("o", "final_state"), kda(**small), strict=True))
    made = {n: np.float32(right) * a for n, a in made.items()}
    found = judge(small, made, base="fp32", **SAID)
    assert found.status == 2 and not found.passed, found.text
    assert {t["verdict"] for t in found.tensors.values()} == {"unjudged"}
    assert "no larger than what may underflow" in found.text


@pytest.mark.parametrize("batch", [False, True])
def test_one_token_of_several_heads_is_a_step(batch: bool) -> None:
    x = inputs(T=1, H=3)
    x["initial_state"] = np.random.default_rng(2).standard_normal((1, 3, 16, 8)).astype(np.float32)
    o, state = kda(**x)
    own = {n: a[None] if batch and n != "initial_state" else a for n, a in x.items()}
    made = {"o": o[None] if batch else o, "final_state": state}
    assert_explained(own, made, base="fp32", **SAID)
    made["o"] = made["o"][..., ::-1, :].copy()
    with pytest.raises(AssertionError, match="o, .*head"):
        assert_explained(own, made, base="fp32", **SAID)


def test_zeros_are_no_pass_on_states_that_grow(x: dict[str, np.ndarray]) -> None:
    rng = np.random.default_rng(0)
    grown = {n: rng.standard_normal(x[n].shape).astype(np.float32) for n in ("q", "k", "v")}
    said = SAID | {"l2norm": False, "base": "bf16"}
    zeros = {"o": np.zeros_like(x["v"])}
    found = judge(x | grown, zeros, **said)
    assert found.status != 0 and not found.passed, found.text


def test_a_state_that_grows_is_judged_and_says_what_the_inputs_need_where_it_overflows() -> None:
    rng = np.random.default_rng(0)
    x = {n: rng.standard_normal((120, 1, 64)).astype(np.float32) for n in ("q", "k", "v")}
    x |= {"g": np.full((120, 1), -0.1, np.float32), "beta": np.full((120, 1), 0.5, np.float32)}
    zeros = {"final_state": np.zeros((1, 1, 64, 64), np.float32)}
    told: dict[str, Any] = SAID | {"l2norm": False, "base": "bf16"}
    assert judge({n: y[:64] for n, y in x.items()}, zeros, **told).status == 1
    found = judge(x | {"k": 4 * x["k"]}, zeros, **told)
    said = r"sum of beta \|k\|\^2 is [\d.]+ at token \d+, at most 2 contracts: normalise keys"
    assert found.status == 1 and re.search(said, found.text), found.text


@pytest.mark.parametrize("end", ["exit 0", "exit 1", "exit 2", "exit 3", "kill -9 $$"])
@pytest.mark.parametrize("verdict", ["pass", "fail"])
@pytest.mark.parametrize("own", [True, False])
def test_a_pass_is_a_status_and_a_record_of_this_call(
    x: dict[str, np.ndarray],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    end: str,
    verdict: str,
    own: bool,
) -> None:
    run = {"verdict": verdict, "tensors": [{"name": "o", "verdict": verdict}]}
    impostor(tmp_path, monkeypatch, {"verdict": verdict, "runs": [run]}, end, own)
    found = judge(x, {"o": x["v"]}, base="fp32", **SAID)
    right = own and {"pass": "exit 0", "fail": "exit 1"}[verdict] == end
    assert found.passed == (right and verdict == "pass")
    assert found.status == ((verdict == "fail") if right else 2), found.text
    if not found.passed:
        with pytest.raises(AssertionError if right else ValueError):
            assert_explained(x, {"o": x["v"]}, base="fp32", **SAID)


def test_a_record_of_an_earlier_call_is_none_of_this_one(
    x: dict[str, np.ndarray], tmp_path: Path
) -> None:
    o, _ = kda(**x)
    settings = SAID | {"base": "fp32", "out": str(tmp_path)}
    assert_explained(x, {"o": o}, **settings)
    record = tmp_path / "results.json"
    earlier = record.read_text()
    wrongs: list[dict[str, Any]]
    wrongs = [{"label": "a\nb"}, {"ranks": 0}, {"scale": 1j}, {"design": 5}, {"kernels": 5}]
    for wrong in wrongs:
        with pytest.raises((TypeError, ValueError)):
            assert_explained(x, {"o": 2 * o}, **settings | wrong)
        assert not record.exists(), wrong
        record.write_text(earlier)


def test_a_run_that_raises_leaves_no_record_of_an_earlier_one(tmp_path: Path) -> None:
    told: dict[str, Any] = {"base": "fp32", "report": str(tmp_path)}
    assert deltaproof.run(kda, "t1", **told).record
    record = tmp_path / "results.json"
    earlier = record.read_text()
    for wrong in ({"base": "fp12"}, {"limit": "soon"}, {"layouts": ["diagonal"]}, {"gate": 5}):
        with pytest.raises((TypeError, ValueError)):
            deltaproof.run(kda, "t1", **told | wrong)
        assert not record.exists(), wrong
        record.write_text(earlier)


@pytest.mark.parametrize("name", ["q", "k", "v", "o"])
def test_an_axis_that_is_left_out_is_no_head(x: dict[str, np.ndarray], name: str) -> None:
    x = {n: a[:, :1] for n, a in x.items()}
    given = x | {"o": kda(**x)[0]}
    given[name] = given[name][:, 0]
    outputs = {"o": given.pop("o")}
    with pytest.raises(ValueError, match=rf"{name} has the shape \[100, \d+\], must be \[T,H"):
        judge(given, outputs, base="fp32", **SAID)


def test_numbers_of_numpy_are_settings(x: dict[str, np.ndarray]) -> None:
    o, _ = kda(**x)
    numbers = {"scale": np.float32(0.25), "ranks": np.int64(1), "l2norm": np.bool_(False)}
    cu = np.array([0, 100])
    assert_explained(x, {"o": o}, base="fp32", cu_seqlens=cu, **SAID | numbers)
    with pytest.raises(TypeError, match="cu_seqlens: .*0.5"):
        judge(x, {"o": o}, base="fp32", cu_seqlens=[0, 0.5], **SAID)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"cu_seqlens": [[0, 100]]}, r"cu_seqlens: \[0, 100\] is no whole number"),
        ({"scale": 1j}, "scale=1j: must be a number"),
        ({"base": b"fp32"}, "base=b'fp32': must be"),
        ({"label": "a\0b"}, "label=.*zero byte"),
        ({"label": "\ud800"}, "label=.*UTF-8"),
        ({"unjudged": 5}, "unjudged=5: must be one name or several"),
        ({"ranks": 0}, "ranks=0: must be a whole number from 1 to 4096"),
        ({"ranks": 2.5}, "ranks: 2.5 is no whole number"),
        ({"ranks": True}, "ranks: True is no whole number"),
        ({"scale": True}, "scale=True: must be no truth value"),
        ({"kernels": [5]}, "kernels=.*5 is no text"),
        ({"inputs": None}, "inputs: must be {name: array}, is NoneType"),
        ({"outputs": [("o", 1)]}, "outputs: must be {name: array}, is list"),
        ({"outputs": {1: 2}}, "outputs: must be {name: array}, is dict of 1"),
    ],
)
def test_an_argument_that_cannot_be_used_is_named(
    x: dict[str, np.ndarray], wrong: dict[str, Any], named: str
) -> None:
    given = {"inputs": x, "outputs": {"o": kda(**x)[0]}, "base": "fp32"} | SAID | wrong
    with pytest.raises((TypeError, ValueError), match=named):
        judge(**given)


def test_a_tensor_that_may_be_unjudged_is_one_that_is_there(x: dict[str, np.ndarray]) -> None:
    o = kda(**x)[0]
    found = judge(x, {"o": o}, base="fp32", unjudged=["dg", "final_sate"], **SAID)
    assert found.status == 2 and "--unjudged final_sate: " in found.text, found.text
    assert judge(x, {"o": o}, base="fp32", unjudged=["dg"], **SAID).passed


def test_an_argument_that_cannot_be_used_is_told_to_the_plug_in(
    x: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(deltaproof.judging, "listeners", [told.append])
    for wrong in ({"inputs": None}, {"scale": 1j}, {"design": 5}):
        with pytest.raises(TypeError):
            judge(**{"inputs": x, "outputs": {"o": x["v"]}, "base": "fp32"} | SAID | wrong)
    assert [found.status for found in told] == [2, 2, 2]


def test_one_name_may_be_unjudged_without_a_list(x: dict[str, np.ndarray]) -> None:
    small = x | {"v": x["v"] * np.float32(1e-37)}
    o, state = kda(**small)
    found = judge(small | {"g": 0 * x["g"]}, {"final_state": 0 * state}, base="fp32",
                  unjudged="final_state", **SAID)  # fmt: skip
    assert found.tensors["final_state"].get("allowed"), found.text


def test_what_is_no_array_of_numbers_is_named(x: dict[str, np.ndarray]) -> None:
    fp8 = x["v"].astype(ml_dtypes.float8_e4m3fn)
    for y in (None, [[1], [2, 3]], "text", fp8, np.ma.masked_array(x["v"])):
        with pytest.raises(ValueError, match="^v: "):
            judge(x | {"v": y}, {"o": x["v"]}, base="fp32", **SAID)


def test_tensors_that_hold_no_numbers_are_named(x: dict[str, np.ndarray]) -> None:
    torch = pytest.importorskip("torch")
    v = torch.tensor(x["v"])
    meta, sparse = torch.empty(v.shape, device="meta"), v.to_sparse()
    for y in (v.to(torch.float8_e4m3fn), sparse, meta, v.to(torch.complex64).conj()):
        with pytest.raises(ValueError, match="^v: "):
            judge(x | {"v": y}, {"o": x["v"]}, base="fp32", **SAID)
    turned = torch.complex(torch.zeros_like(v), -v).conj().imag  # a view that stands for v
    assert turned.is_neg()
    assert_explained(x | {"v": turned}, {"o": kda(**x)[0]}, base="fp32", **SAID)


def test_the_record_says_whence_the_numbers_come(x: dict[str, np.ndarray], tmp_path: Path) -> None:
    o, _ = kda(**x)
    settings = SAID | {"label": "a trial", "kernel_commit": "abc123", "kernels": ["k_fast"]}
    found = judge(x, {"o": o}, base="fp32", out=str(tmp_path), **settings)
    assert found.record is not None
    said = found.record["provenance"]
    assert said["label"] == "a trial" and said["kernel_commit"] == "abc123"
    assert said["notes"]["numpy"] == np.__version__ and said["notes"]["kernel0"] == "k_fast"
    files = {f["role"]: f for f in said["files"]}
    assert files["inputs"]["bytes"] == os.path.getsize(files["inputs"]["path"])
    assert len(files["outputs"]["xxh128"]) == 32
    assert files["inputs"]["xxh128"] != files["outputs"]["xxh128"]
    assert (tmp_path / "report.html").stat().st_size > 1000


def test_an_interpreter_that_cannot_draw_makes_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    own = sys.modules["deltaproof.program"]
    monkeypatch.delenv("DP_PYTHON", raising=False)
    monkeypatch.setattr(own, "find_spec", lambda name: name == "jinja2")
    assert "DP_PYTHON" not in own.environment()
    monkeypatch.setattr(own, "find_spec", lambda name: True)
    assert own.environment()["DP_PYTHON"] == sys.executable
    monkeypatch.setenv("DP_PYTHON", "/a")
    assert own.environment()["DP_PYTHON"] == "/a"


def test_files_go_when_all_passed(x: dict[str, np.ndarray]) -> None:
    found = judge(x, {"o": kda(**x)[0]}, base="fp32", **SAID)
    assert found.passed and found.folder is None


def test_pytorch_tensors_are_taken_as_they_are(x: dict[str, np.ndarray]) -> None:
    torch = pytest.importorskip("torch")
    t = {n: torch.tensor(a).bfloat16() for n, a in x.items()}
    o = torch.tensor(kda(**{n: a.float().numpy() for n, a in t.items()})[0]).bfloat16()
    assert_explained(t, {"o": o}, base="bf16", **SAID)


def test_no_program_says_how_to_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["deltaproof.program"], "_HERE", "/nowhere/a")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.delenv("DELTAPROOF", raising=False)
    with pytest.raises(FileNotFoundError, match="name it with the variable DELTAPROOF"):
        deltaproof.program()


def test_kernels_are_named_without_their_arguments() -> None:
    functor = "at::native::FillFunctor<c10::BFloat16>"
    fill = f"void at::native::vectorized_elementwise_kernel<8, {functor}, std::array<char*, 1ul> >"
    assert short_name(f"{fill}(int, {functor}, std::array<char*, 1ul>)") == fill[5:]
    long = f"void at::reduce<128, f<float>::operator()(at::T&)::{{lambda(float)#1}}, {functor * 4}>"
    assert short_name(long + "(int)") == "at::reduce<..>"
    assert short_name("(anonymous namespace)::k_fast(int)") == "{anonymous}::k_fast"
    assert short_name("chunk_kda_fwd_kernel") == "chunk_kda_fwd_kernel"


class Exported:
    """An array of another library, known by DLPack alone."""

    def __init__(self, x: np.ndarray) -> None:
        self.__dlpack__, self.__dlpack_device__ = x.__dlpack__, x.__dlpack_device__


@pytest.mark.parametrize("form", [Exported, lambda x: x.astype(x.dtype.newbyteorder(">"))])
def test_arrays_of_other_libraries_and_byte_orders_are_read(form: Any) -> None:
    x = inputs(T=20)
    o, _ = kda(**x)
    given = {n: form(y) for n, y in x.items()}
    assert judge(given, {"o": form(o)}, base="fp32", **SAID).status == 0
    assert judge(given, {"o": form(o * np.float32(1.1))}, base="fp32", why=0, **SAID).status == 1
    with pytest.raises(ValueError, match="complex64 is none of"):
        judge(given, {"o": form(o.astype(np.complex64))}, base="fp32", **SAID)


def test_the_command_does_not_start_itself(tmp_path: Path) -> None:
    command = tmp_path / "deltaproof"
    command.write_text(f"#!{sys.executable}\nfrom deltaproof.program import main\nmain()\n")
    command.chmod(0o755)
    env = dict(os.environ) | {"DELTAPROOF": str(command)}
    done = subprocess.run([command], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "is the command, not the program" in done.stderr
