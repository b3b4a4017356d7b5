"""The gated Oja rule, which reads along the values: FLA's loop and its chunk form in numpy, forward
and backward, right and wrong. No code is shared with the program."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltaproof import Recurrence, assert_explained, check, judge, run, to_bf16
from deltaproof.program import program

OJA = Recurrence(
    "oja",
    query="q",
    gate="gv",
    keys=("v",),
    values=("k",),
    number="beta",
    rows=({"write": "v", "read": "v", "value": "k", "strength": "beta"},),
    along_values=True,
)
T, H, K, V = 150, 2, 24, 16  # FLA's K and V
CU = (0, 70, 70, T)
Arrays = dict[str, np.ndarray]
WRONG = ("zeros", "heads", "gate", "beta", "delta", "undecayed", "late", "scale", "state")
SAID: dict[str, Any] = {"recurrence": OJA, "gate": "log", "state_layout": "vk", "cu_seqlens": CU}


def inputs(base: str = "fp32", states: bool = True) -> Arrays:
    rng = np.random.default_rng(11)
    key, value = (T, H, K), (T, H, V)
    shapes = {"q": key, "k": key, "v": value, "gv": value, "beta": (T, H), "do": value}
    x = {n: rng.standard_normal(s) for n, s in shapes.items()}
    x["v"] /= np.linalg.norm(x["v"], axis=-1, keepdims=True)
    x["gv"] = -0.1 * np.abs(x["gv"])
    x["beta"] = 1 / (1 + np.exp(-x["beta"]))
    if base == "bf16":
        x = {n: to_bf16(a).astype(np.float32) for n, a in x.items()}
    if states:
        x |= {n: rng.standard_normal((len(CU) - 1, H, K, V)) for n in ("initial_state", "dht")}
    return {n: np.ascontiguousarray(a, np.float32) for n, a in x.items()}


def oja(x: Arrays, wrong: str = "", cu: Sequence[int] = CU, scale: float = K**-0.5) -> Arrays:
    """fused_recurrent_oja_fwd_kernel of FLA 0.6 and its adjoint, token by token in fp64."""
    x = {n: a.astype(np.float64) for n, a in x.items()}
    s = V**-0.5 if wrong == "scale" else scale
    y = {f"d{n}": np.zeros(x[n].shape) for n in ("q", "k", "v", "gv", "beta")}
    y |= {"o": np.zeros(x["v"].shape), "final_state": x["initial_state"].copy()}
    y["dh0"] = x["dht"].copy()
    for n, (a, b) in enumerate(zip(cu, cu[1:], strict=False)):
        h, kept = x["initial_state"][n], []
        for t in range(a, b):
            q, k, v, beta = (x[i][t] for i in ("q", "k", "v", "beta"))
            d = np.exp(0 * x["gv"][t] if wrong == "gate" else x["gv"][t])[:, None, :]
            seen = h if wrong == "undecayed" else h * d
            left = k - (0 if wrong == "delta" else np.einsum("hkv,hv->hk", seen, v))
            u = left * (1 if wrong == "beta" else beta[:, None])
            new = h * d + u[..., None] * v[:, None, :]
            y["o"][t] = s * np.einsum("hkv,hk->hv", h if wrong == "late" else new, q)
            kept.append((h, d, left, u, new))
            h = np.zeros_like(new) if wrong == "state" and (t - a) % 64 == 63 else new
        y["final_state"][n], G = h, x["dht"][n]
        for t in reversed(range(a, b)):
            h, d, left, u, new = kept[t - a]
            v, do = x["v"][t], x["do"][t]
            y["dq"][t] = s * np.einsum("hkv,hv->hk", new, do)
            G = G + s * x["q"][t][..., None] * do[:, None, :]
            du = np.einsum("hkv,hv->hk", G, v)
            y["dbeta"][t] = (du * left).sum(-1)
            y["dk"][t] = x["beta"][t][:, None] * du
            y["dv"][t] = np.einsum("hkv,hk->hv", G, u) - np.einsum("hkv,hk->hv", h * d, y["dk"][t])
            G = (G - y["dk"][t][..., None] * v[:, None, :]) * d
            y["dgv"][t] = (G * h).sum(1)
        y["dh0"][n] = G
    if wrong == "zeros":
        y["o"] *= 0
    if wrong == "heads":
        y["o"] = y["o"][:, ::-1]
    return {n: np.ascontiguousarray(a, np.float32) for n, a in y.items()}


def chunked(x: Arrays, base: str) -> Arrays:
    """chunk_oja_fwd of FLA 0.6 in fp32, what it stores and multiplies in the format of the base."""
    r = (lambda a: to_bf16(a).astype(np.float32)) if base == "bf16" else np.float32
    o, final = np.zeros(x["v"].shape, np.float32), x["initial_state"].copy()
    ends = list(enumerate(zip(CU, CU[1:], strict=False)))
    pieces = [(n, t, min(t + 64, b)) for n, (a, b) in ends for t in range(a, b, 64)]
    for h in range(H):
        for n, a, b in pieces:
            S, i = final[n, h], np.arange(b - a)
            q, k, v, beta = (x[m][a:b, h] for m in ("q", "k", "v", "beta"))
            g = np.cumsum(x["gv"][a:b, h], 0, dtype=np.float32)
            pair = np.exp(np.minimum(g[:, None] - g[None], 0)) * (i[:, None] >= i)[..., None]
            A = beta[:, None] * np.einsum("iv,ijv,jv->ij", v, pair, v) * (i[:, None] > i)
            inverse = r(np.linalg.inv(np.eye(b - a, dtype=np.float32) + A))
            w = r(inverse @ r(beta[:, None] * np.exp(g) * v))
            new = r(r(inverse @ r(beta[:, None] * k)) - w @ r(S).T)
            scores = r(np.float32(K**-0.5) * (q @ new.T))
            o[a:b, h] = np.exp(g) * (np.float32(K**-0.5) * (q @ r(S)))
            o[a:b, h] += np.einsum("ij,ijv,jv->iv", scores, pair, v)
            final[n, h] = np.exp(g[-1]) * S + new.T @ r(np.exp(g[-1] - g) * v)
    return {"o": o, "final_state": final}


def stored(y: Arrays, base: str) -> dict[str, Any]:
    wide = ("final_state", "dh0")
    return {n: a if n in wide or base == "fp32" else to_bf16(a) for n, a in y.items()}


@pytest.mark.parametrize("base", ["fp32", "bf16"])
def test_fla_s_loop_passes_forward_and_backward(base: str) -> None:
    x = inputs(base)
    y = stored(oja(x), base)
    assert set(assert_explained(x, y, base=base, **SAID)) == {
        *("o", "final_state", "dq", "dk", "dv", "dgv", "dbeta", "ds0"),
    }
    said = SAID | {"recurrence": "oja"}  # the one that comes with the program
    forward = {n: y[n] for n in ("o", "final_state")}
    assert len(assert_explained(without(x, "do", "dht"), forward, base=base, **said)) == 2


def without(x: Arrays, *names: str) -> Arrays:
    return {n: a for n, a in x.items() if n not in names}


@pytest.mark.parametrize("base", ["fp32", "bf16"])
def test_fla_s_chunk_form_passes(base: str) -> None:
    x = without(inputs(base), "do", "dht")
    got = assert_explained(x, stored(chunked(x, base), base), base=base, **SAID)
    assert set(got) == {"o", "final_state"}


@pytest.mark.parametrize("base", ["fp32", "bf16"])
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_kernels_fail(wrong: str, base: str) -> None:
    x = inputs(base)
    y = {"o": oja(x, wrong)["o"]}
    found = judge(without(x, "do", "dht"), stored(y, base), base=base, **SAID)
    assert found.status == 1 and found.tensors["o"]["verdict"] == "fail", found.text


@pytest.mark.parametrize("name", ["dq", "dk", "dv", "dgv", "dbeta", "dh0"])
def test_a_gradient_that_is_a_percent_too_large_fails_alone(name: str) -> None:
    x = inputs()
    y = oja(x)
    y[name] *= np.float32(1.01)
    found = judge(x, y, base="fp32", **SAID)
    name = {"dh0": "ds0"}.get(name, name)
    assert {n for n, t in found.tensors.items() if t["verdict"] == "fail"} == {name}


def kernel(
    q: Any,
    k: Any,
    v: Any,
    gv: Any,
    beta: Any,
    scale: Any,
    do: Any,
    initial_state: Any = None,
    cu_seqlens: Any = None,
    wrong: str = "",
) -> Arrays:
    """oja of any sizes."""
    x = {"q": q, "k": k, "v": v, "gv": gv, "beta": beta, "do": do}
    cu = [0, len(q)] if cu_seqlens is None else [int(t) for t in cu_seqlens]
    zeros = np.zeros((len(cu) - 1, *q.shape[1:], v.shape[-1]))
    states = {"initial_state": zeros if initial_state is None else initial_state, "dht": zeros}
    return oja(x | states, wrong, cu, scale)


OWN: dict[str, Any] = {"base": "fp32", "recurrence": OJA, "state_layout": "vk"}
OUTPUTS = ("o", "final_state", "dq", "dk", "dv", "dgv", "dbeta")


def test_sets_of_cases_and_checks() -> None:
    found = run(kernel, "smoke", layouts=(), outputs=OUTPUTS, **OWN)
    assert found.passed, found.text

    def wrong(q: Any, k: Any, v: Any, gv: Any, beta: Any, scale: Any, do: Any) -> Arrays:
        return kernel(q, k, v, gv, beta, scale, do, wrong="undecayed")

    assert run(wrong, "smoke", layouts=(), outputs=OUTPUTS, **OWN).status == 1
    checks = check(kernel, outputs=("o", "final_state"), **OWN)
    assert {x.verdict for x in checks} <= {"bitwise", "within bounds", "skipped"}
    assert {x.name: x.verdict for x in checks}["prefix"] != "skipped"


def test_ranks_pass_and_a_wrong_merge_is_found() -> None:
    said = ["run", "dplr-weak", "--recurrence", "oja", "--ranks", "1,4"]
    done = subprocess.run([program(), *said], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said = ["bisect", "stage", "dplr-weak", "--recurrence", "oja", "--ranks", "3", "--base", "fp32"]
    said += ["--fault", "merge-scaled"]
    wrong = subprocess.run([program(), *said], capture_output=True, text=True, check=False)
    assert wrong.returncode == 1 and "WRONG STAGE: merge_fwd" in wrong.stdout


@pytest.mark.parametrize("said", ["run {session}", "check dplr-weak --forward"])
def test_calls_without_gradients_are_refused(said: str, tmp_path: Path) -> None:
    text = "reason = here\nsource = own\nop = gdn\nT = 140\nH = 2\nHV = 2\nK = 32\nV = 32\n"
    text += "session = 96,24x1,4,1\nbase = fp32\n"
    session = tmp_path / "session.case"
    session.write_text(text, encoding="utf-8")
    line = [program(), *said.format(session=session).split(), "--recurrence", "oja"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "o of oja reads along values, which needs gradients" in done.stderr


def test_gradients_without_do_and_a_missing_query_are_refused() -> None:
    x = without(inputs(), "do", "dht")
    with pytest.raises(ValueError, match="tensor dk is a gradient, but .* has no tensor do"):
        assert_explained(x, {"dk": x["k"]}, base="fp32", **SAID)
    with pytest.raises(ValueError, match="tensor q is missing"):
        assert_explained(without(x, "q"), {"o": x["v"]}, base="fp32", **SAID)
    with pytest.raises(ValueError, match="tensor o: shape"):
        assert_explained(x, {"o": x["k"]}, base="fp32", **SAID)
    with pytest.raises(ValueError, match="tensor do is missing, and q and v do not fit"):
        assert_explained(x | {"v": x["v"][:0]}, {"o": x["v"]}, base="fp32", **SAID)
