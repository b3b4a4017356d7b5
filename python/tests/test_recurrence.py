"""Recurrences of a user's own, by rows and names: numpy kernels that share no code with the
program, forward and backward, right and wrong."""

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltaproof import Recurrence, assert_explained, check, differ, judge, run, shrink, to_bf16
from deltaproof.program import program

RWKV7 = Recurrence(
    "rwkv7",
    query="r",
    gate="w",
    keys=("k", "kk", "a"),
    values=("v",),
    rows=({"write": "kk*a", "read": "kk"}, {"write": "k", "value": "v"}),
    undecayed=True,
)
COMBA = Recurrence(
    "comba",
    query="q",
    gate="g",
    keys=("k", "p"),
    values=("v",),
    number="beta",
    rows=({"write": "k", "read": "p", "value": "v", "strength": "beta"},),
    per_head=True,
    undecayed=True,
)
T, H, K, V = 70, 2, 16, 24
Arrays = dict[str, np.ndarray]


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def made(rng: np.random.Generator, **shapes: tuple[int, ...]) -> Arrays:
    return {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}


def rwkv7_inputs() -> Arrays:
    rng = np.random.default_rng(5)
    keys = (T, H, K)
    x = made(rng, r=keys, w=keys, k=keys, kk=keys, a=keys, v=(T, H, V), do=(T, H, V))
    x["w"] = (-0.6065 / (1 + np.exp(-x["w"]))).astype(np.float32)
    x["kk"], x["k"] = unit(x["kk"]), unit(x["k"])
    x["a"] = (1 / (1 + np.exp(-x["a"]))).astype(np.float32)
    x["initial_state"] = rng.standard_normal((1, H, K, V)).astype(np.float32)
    return x


def rwkv7(x: Arrays, decayed: bool = False) -> Arrays:
    """S <- diag(exp w) S - (kk a)' (kk S) + k' v; wrong where kk reads the decayed state."""
    S, scale = x["initial_state"][0].astype(np.float64), K**-0.5
    y = {f"d{n}": np.zeros(x[n].shape) for n in ("r", "w", "k", "kk", "a", "v")}
    y["o"] = np.zeros((T, H, V))
    states = [S]
    for t in range(T):
        d = np.exp(x["w"][t].astype(np.float64))[..., None]
        read = np.einsum("hk,hkv->hv", x["kk"][t], d * S if decayed else S)
        S = d * S - (x["kk"][t] * x["a"][t])[..., None] * read[:, None, :]
        S = S + x["k"][t][..., None] * x["v"][t][:, None, :]
        y["o"][t] = scale * np.einsum("hk,hkv->hv", x["r"][t], S)
        states.append(S)
    G = np.zeros_like(S)
    for t in reversed(range(T)):
        d, S = np.exp(x["w"][t].astype(np.float64))[..., None], states[t]
        do, b = x["do"][t].astype(np.float64), x["kk"][t] * x["a"][t]
        y["dr"][t] = scale * np.einsum("hkv,hv->hk", states[t + 1], do)
        G = G + scale * x["r"][t][..., None] * do[:, None, :]
        y["dk"][t] = np.einsum("hkv,hv->hk", G, x["v"][t])
        y["dv"][t] = np.einsum("hkv,hk->hv", G, x["k"][t])
        db = -np.einsum("hkv,hv->hk", G, np.einsum("hk,hkv->hv", x["kk"][t], S))
        dread = -np.einsum("hkv,hk->hv", G, b)
        y["da"][t] = db * x["kk"][t]
        y["dkk"][t] = db * x["a"][t] + np.einsum("hkv,hv->hk", S, dread)
        y["dw"][t] = (G * S * d).sum(-1)
        G = d * G + x["kk"][t][..., None] * dread[:, None, :]
    y |= {"final_state": states[-1][None], "dh0": G[None]}
    return {n: a.astype(np.float32) for n, a in y.items()}


def comba_inputs() -> Arrays:
    rng = np.random.default_rng(6)
    x = made(rng, q=(T, H, K), k=(T, H, K), v=(T, H, V), g=(T, H), beta=(T, H), do=(T, H, V))
    x["g"] = -0.1 * np.abs(x["g"])
    x["beta"] = (1 / (1 + np.exp(-x["beta"]))).astype(np.float32)
    x["k"] = unit(x["k"])
    x["p"] = (0.7 * x["k"]).astype(np.float32)
    return x


def comba(x: Arrays) -> Arrays:
    """S <- exp(g) S + k' beta (v - p S), S before its decay."""
    S, scale = np.zeros((H, K, V)), K**-0.5
    y = {f"d{n}": np.zeros(x[n].shape) for n in ("q", "k", "p", "v", "g", "beta")}
    y["o"], states, left = np.zeros((T, H, V)), [S], []
    for t in range(T):
        left.append(x["v"][t] - np.einsum("hk,hkv->hv", x["p"][t], S))
        u = x["beta"][t][:, None] * left[t]
        S = np.exp(x["g"][t].astype(np.float64))[:, None, None] * S
        S = S + x["k"][t][..., None] * u[:, None, :]
        y["o"][t] = scale * np.einsum("hk,hkv->hv", x["q"][t], S)
        states.append(S)
    G = np.zeros_like(S)
    for t in reversed(range(T)):
        d, do = np.exp(x["g"][t].astype(np.float64)), x["do"][t].astype(np.float64)
        y["dq"][t] = scale * np.einsum("hkv,hv->hk", states[t + 1], do)
        G = G + scale * x["q"][t][..., None] * do[:, None, :]
        y["dk"][t] = np.einsum("hkv,hv->hk", G, x["beta"][t][:, None] * left[t])
        du = np.einsum("hkv,hk->hv", G, x["k"][t])
        y["dbeta"][t] = (du * left[t]).sum(-1)
        y["dv"][t] = x["beta"][t][:, None] * du
        y["dp"][t] = -np.einsum("hkv,hv->hk", states[t], y["dv"][t])
        y["dg"][t] = d * (G * states[t]).sum((-1, -2))
        G = d[:, None, None] * G - x["p"][t][..., None] * y["dv"][t][:, None, :]
    return {n: a.astype(np.float32) for n, a in y.items()}


SAID: dict[str, Any] = {"base": "fp32", "gate": "log"}


def test_rwkv7_by_its_own_names_passes_forward_and_backward() -> None:
    x = rwkv7_inputs()
    got = assert_explained(x, rwkv7(x), recurrence=RWKV7, **SAID)
    assert set(got) == {"o", "final_state", "dr", "dw", "dk", "dkk", "da", "dv", "ds0"}


@pytest.mark.parametrize("name", ["rwkv7", "comba"])
def test_recurrences_that_come_with_the_program_have_names(name: str) -> None:
    x = rwkv7_inputs() if name == "rwkv7" else comba_inputs()
    y = rwkv7(x) if name == "rwkv7" else comba(x)
    assert len(assert_explained(x, y, recurrence=name, **SAID)) == len(y)


def test_rwkv7_that_reads_the_decayed_state_fails() -> None:
    x = rwkv7_inputs()
    found = judge(x, rwkv7(x, decayed=True), recurrence=RWKV7, **SAID)
    assert found.status == 1 and found.tensors["o"]["verdict"] == "fail"
    y = {n: rwkv7(x, decayed=True)[n] for n in ("o", "final_state")}
    found = judge(x, y, recurrence=RWKV7, **SAID)
    assert "fits: passes with `reads decayed`" in found.text, found.text


@pytest.mark.parametrize("name", ["dkk", "da", "dw", "dv"])
def test_a_gradient_that_is_a_percent_too_large_fails_alone(name: str) -> None:
    x = rwkv7_inputs()
    y = rwkv7(x)
    y[name] *= np.float32(1.01)
    found = judge(x, y, recurrence=RWKV7, **SAID)
    assert {n for n, t in found.tensors.items() if t["verdict"] == "fail"} == {name}


def test_comba_has_a_number_and_one_gate_a_head() -> None:
    x = comba_inputs()
    y = comba(x)
    got = assert_explained(x, y, recurrence=COMBA, **SAID)
    assert set(got) == {"o", "dq", "dk", "dp", "dv", "dg", "dbeta"}
    y["dp"] += 0.02 * y["dk"]
    assert judge(x, y, recurrence=COMBA, **SAID).tensors["dp"]["verdict"] == "fail"


def test_bf16_is_judged_by_its_own_limits() -> None:
    x = {n: to_bf16(a) if n != "initial_state" else a for n, a in rwkv7_inputs().items()}
    y = rwkv7({n: np.asarray(a, np.float32) for n, a in x.items()})
    y = {n: a if n in ("final_state", "dh0") else to_bf16(a) for n, a in y.items()}
    got = assert_explained(x, y, recurrence=RWKV7, base="bf16", gate="log")
    assert got["da"]["ratio"] < 1


def test_a_scale_that_is_not_said_is_named() -> None:
    x = rwkv7_inputs()
    o = rwkv7(x)["o"] * np.float32(K**0.5)
    found = judge(x, {"o": o}, recurrence=RWKV7, base="fp32", gate="log")
    assert "fits: passes with scale=1" in " ".join(found.text.split()), found.text


def test_what_is_wrong_in_rows_is_named() -> None:
    x = comba_inputs()
    wrong = Recurrence("mine", "q", "g", ("k", "p"), ("v",), ({"write": "k", "read": "c"},))
    with pytest.raises(ValueError, match=r"rows.recurrence:6: 'read=c' has 'c', which is no fact"):
        assert_explained(x, {"o": x["v"]}, recurrence=wrong, **SAID)
    with pytest.raises(ValueError, match="tensor beta is not an input"):
        row = {"write": "k", "read": "p", "value": "v"}
        few = Recurrence("mine", "q", "g", ("k", "p"), ("v",), (row,))
        assert_explained(x, {"o": x["v"]}, recurrence=few, **SAID)
    with pytest.raises(ValueError, match="'writes' is none of write, read, value, strength"):
        Recurrence("mine", "q", "g", ("k",), ("v",), ({"writes": "k"},)).text()
    with pytest.raises(ValueError, match="eps=0.1: goes with norm"):
        Recurrence("mine", "q", "g", ("k",), ("v",), ({"write": "k"},), eps=0.1).text()
    normed = Recurrence("mine", "q", "g", "k", "v", (), norm=("q",), eps=np.float32(0.5))
    assert "norm q eps 0.5" in normed.text()


def comba_queries(gate: str, n: int = 3) -> tuple[Arrays, Arrays]:
    """n query heads a value head, of a log gate or a raw one: one pass a query head; what is no
    query's adds up. The raw gate with a lower bound has a rate of e^-9."""
    x = comba_inputs()
    rng = np.random.default_rng(8)
    x |= made(rng, q=(T, H * n, K), do=(T, H * n, V))
    own, slope = dict(x), 1.0
    if gate == "softplus":
        x["g"] = made(rng, g=(T, H))["g"]
        own["g"] = -np.log1p(np.exp(x["g"].astype(np.float64)))
        slope = -1 / (1 + np.exp(-x["g"].astype(np.float64)))
    if gate == "lower_bound":
        x |= {"g": made(rng, g=(T, H))["g"], "A_log": np.full(H, -9, np.float32)}
        s = 1 / (1 + np.exp(-np.exp(-9) * x["g"].astype(np.float64)))
        own["g"], slope = -2 * s, -2 * np.exp(-9) * s * (1 - s)
    passes = [comba(own | {s: x[s][:, j::n] for s in ("q", "do")}) for j in range(n)]
    y = {}
    for name in passes[0]:
        if name in ("o", "dq"):
            rows = np.stack([p[name] for p in passes], 2)
            y[name] = rows.reshape(T, H * n, rows.shape[-1])
        else:
            y[name] = sum(p[name] for p in passes)
    y["dg"] = (y["dg"] * slope).astype(np.float32)
    return x, y


@pytest.mark.parametrize("gate", ["log", "softplus", "lower_bound"])
def test_several_query_heads_a_value_head_forward_and_backward(gate: str) -> None:
    x, y = comba_queries(gate)
    said = {"recurrence": COMBA, "base": "fp32", "gate": gate}
    if gate == "lower_bound":
        said["lower_bound"] = -2
    if gate == "log":
        with pytest.raises(ValueError, match="dg: .* it is judged of raw gates alone"):
            assert_explained(x, y, **said)
        del y["dg"]
    got = assert_explained(x, y, **said)
    assert set(got) == set(y)
    tiled = y | {"o": y["o"].reshape(T, H, 3, V).swapaxes(1, 2).reshape(T, H * 3, V)}
    assert judge(x, tiled, **said).tensors["o"]["verdict"] == "fail"
    y["dk"] = y["dk"] * np.float32(0.99)
    found = judge(x, y, **said)
    assert {n for n, t in found.tensors.items() if t["verdict"] == "fail"} == {"dk"}


def test_batches_and_packed_sequences_of_several_query_heads() -> None:
    x, y = comba_queries("log")
    x.pop("do")
    out = {"o": np.stack([y["o"], y["o"]])}
    assert judge({n: np.stack([a, a]) for n, a in x.items()}, out, recurrence=COMBA, **SAID).passed
    later, n = np.zeros_like(y["o"][40:]), y["o"].shape[1] // H
    for j in range(n):  # nothing of the first 40 tokens is left
        own = {name: a.copy() for name, a in x.items()} | {"do": np.zeros((T, H, V))}
        own["q"] = x["q"][:, j::n]
        own["v"][:40] = 0
        later[:, j::n] = comba(own)["o"][40:]
    ends = np.concatenate([y["o"][:40], later])
    said = {"recurrence": COMBA, **SAID}
    assert judge(x, {"o": ends}, cu_seqlens=[0, 40, T], **said).passed
    assert judge(x | {"cu_seqlens": np.array([0, 40, T])}, {"o": ends}, **said).passed
    assert judge(x, {"o": ends}, **said).status == 1


def comba_kernel(
    q: Any,
    k: Any,
    p: Any,
    v: Any,
    g: Any,
    beta: Any,
    scale: Any,
    do: Any = None,
    initial_state: Any = None,
    wrong: float = 1,
) -> Arrays:
    """comba of any sizes, from any state; wrong: a factor of what p reads."""
    S = np.zeros((*q.shape[1:], v.shape[-1])) if initial_state is None else initial_state[0]
    o = np.zeros(v.shape)
    for t in range(len(q)):
        left = v[t] - wrong * np.einsum("hk,hkv->hv", p[t], S)
        S = np.exp(g[t].astype(np.float64))[:, None, None] * S
        S = S + k[t][..., None] * (beta[t][:, None] * left)[:, None, :]
        o[t] = scale * np.einsum("hk,hkv->hv", q[t], S)
    return {"o": o, "final_state": S[None]}


def rwkv7_kernel(r: Any, w: Any, k: Any, kk: Any, a: Any, v: Any, do: Any) -> Arrays:
    """rwkv7 of any sizes, with gradients; wrong: dkk lacks what goes through the write."""
    global T, H, K, V
    kept, (T, H, K), V = (T, H, K, V), r.shape, v.shape[-1]
    x = {"r": r, "w": w, "k": k, "kk": kk, "a": a, "v": v, "do": do}
    try:
        return rwkv7(x | {"initial_state": np.zeros((1, H, K, V))})
    finally:
        T, H, K, V = kept


OWN: dict[str, Any] = {"base": "fp32", "outputs": ("o", "final_state"), "layouts": ()}


def test_the_smoke_set_of_a_recurrence_of_one_s_own_and_its_checks() -> None:
    found = run(comba_kernel, "smoke", recurrence=COMBA, **OWN)
    ran = [n for n, x in found.verdicts().items() if not x.startswith("skipped")]
    assert found.passed and len(ran) == 3, found.text

    def wrong(q: Any, k: Any, p: Any, v: Any, g: Any, beta: Any, scale: Any) -> Arrays:
        return comba_kernel(q, k, p, v, g, beta, scale, wrong=1.01)

    assert run(wrong, "smoke", recurrence=COMBA, **OWN).status == 1
    said: dict[str, Any] = {"base": "fp32", "outputs": ("o", "final_state"), "recurrence": COMBA}
    assert differ(comba_kernel, comba_kernel, "dplr-t65", **said).verdict == "same"
    assert differ(comba_kernel, wrong, "dplr-t65", **said).verdict == "beyond"
    with pytest.raises(ValueError, match=r"recurrence='comba': fresh problems are of known recurr"):
        run(comba_kernel, "fresh", **said)
    checks = check(comba_kernel, **said)
    assert {x.verdict for x in checks} <= {"bitwise", "within bounds", "skipped"}
    assert {x.name: x.verdict for x in checks}["sign-kv"] == "bitwise"


@pytest.mark.parametrize("first", ["cases", "recurrence"])
def test_a_name_is_looked_for_in_the_folder_of_cases(first: str, tmp_path: Path) -> None:
    (tmp_path / "kept.recurrence").write_text(RWKV7.text())
    case = tmp_path / "small.case"
    case.write_text("reason = small\nsource = here\nop = dplr\nT = 70\nH = 2\nK = 16\nV = 24\n")
    said = {"cases": [f"--cases={tmp_path}"], "recurrence": ["--recurrence=kept"]}
    words = ["check", str(case), "--only=repeat", "--ranks=1", *said.pop(first), *said.popitem()[1]]
    done = subprocess.run([program(), *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "1 held" in done.stdout, done.stdout + done.stderr
    (tmp_path / "kept.recurrence").unlink()
    gone = subprocess.run([program(), *words], capture_output=True, text=True, check=False)
    assert gone.returncode == 2 and "--recurrence: kept: " in gone.stderr, gone.stderr


@pytest.mark.parametrize("name", ["rwkv7", "comba", "mamba3"])
def test_bisect_of_the_simulated_ranks_finds_what_is_wrong_alone(name: str) -> None:
    said = ["bisect", "stage", "dplr-weak", "--recurrence", name, "--ranks", "3", "--base", "fp32"]
    right = subprocess.run([program(), *said], capture_output=True, text=True, check=False)
    assert right.returncode == 0, right.stdout + right.stderr
    said += ["--fault", "merge-scaled"]
    wrong = subprocess.run([program(), *said], capture_output=True, text=True, check=False)
    assert wrong.returncode == 1 and "WRONG STAGE: merge_fwd" in wrong.stdout


def test_a_key_of_the_token_before_alone_is_a_vector(tmp_path: Path) -> None:
    # else its state grows 16-fold a token, beyond fp32
    names = "query q\ngate g per channel\nkeys k\nvalues v\nnumber b\nreads undecayed\n"
    row = "row write=prev(k)*exp(g) read=prev(k) value=prev(v) strength=prev(b)\n"
    (tmp_path / "own.recurrence").write_text(f"recurrence before\n{names}{row}")
    words = ["run", "dplr-weak", "--recurrence", str(tmp_path / "own.recurrence"), "--ranks=1"]
    done = subprocess.run([program(), *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_gradients_of_one_s_own_names_run_and_shrink(tmp_path: Path) -> None:
    own = {
        "base": "fp32",
        "recurrence": RWKV7,
        "outputs": ("o", "dr", "dw", "dk", "dkk", "da", "dv"),
    }

    def lacks(r: Any, w: Any, k: Any, kk: Any, a: Any, v: Any, do: Any) -> Arrays:
        y = rwkv7_kernel(r, w, k, kk, a, v, do)
        y["dkk"][-1] *= 1.1
        return y

    assert run(rwkv7_kernel, "dplr-t65", layouts=(), **own).passed
    found = run(lacks, "dplr-t65", layouts=(), **own)
    assert found.status == 1 and "dkk" in found.text
    small = shrink(lacks, "dplr-t65", output=str(tmp_path / "small.case"), tries=60, **own)
    assert small.status == 0 and (tmp_path / "small.case").exists(), small.text


def test_an_input_may_have_the_name_of_another_one_s_gradient() -> None:
    """As p and dp: results alone are gradients."""
    named: dict[str, Any] = vars(COMBA) | {"keys": ("k", "dk")}
    named["rows"] = tuple({n: x.replace("p", "dk") for n, x in y.items()} for y in COMBA.rows)

    def renamed(q: Any, k: Any, dk: Any, v: Any, g: Any, beta: Any, scale: Any) -> Arrays:
        return comba_kernel(q, k, dk, v, g, beta, scale)

    found = run(renamed, "dplr-t65", recurrence=Recurrence(**named), **OWN)
    assert found.passed, found.text


def test_inputs_of_a_case_with_rows_of_its_own_have_their_names(tmp_path: Path) -> None:
    case = "reason = a\nsource = b\nop = dplr\nT = 2\nK = 2\nV = 3\nrecurrence = oja\n"
    (tmp_path / "own.case").write_text(case)
    files = [tmp_path / "said", tmp_path / "read"]
    for path, said in zip(files, (["--recurrence", "oja"], []), strict=True):
        words = ["inputs", "own", "--cases", str(tmp_path), "-o", str(path), *said]
        subprocess.run([program(), *words], check=True)
    assert files[0].read_bytes() == files[1].read_bytes()
