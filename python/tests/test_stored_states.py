"""Kernels that keep their states in fp8, int8 or fp16 between calls, by the conversions of numpy
and ml_dtypes, and what they may get wrong."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import deltaproof
from kernels import kda
from recurrences import FORM, in_slots, right, taking

F4 = np.float32
FORMATS = {"e4m3": (ml_dtypes.float8_e4m3fn, 448), "e5m2": (ml_dtypes.float8_e5m2, 57344)}
CASES = ["gdn-slots", "gdn-pieces"]


def quantized(S: Any, form: str, fault: str = "") -> Any:
    """S [N,HV,K,V] as it is read again. Faults: one scale for all shares; toward zero; read by
    another scale than it was stored by."""
    number, share = form.split("-")
    axes = {"tensor": (1, 2, 3), "head": (2, 3), "row": (3,), "block": (4,)}[share]
    parts = S.astype(F4)
    if share == "block":
        V = S.shape[-1]
        parts = np.pad(parts, [(0, 0)] * 3 + [(0, -V % 32)])
        parts = parts.reshape(*S.shape[:3], -1, 32)
    most = FORMATS[number][1] if number in FORMATS else 127
    scale = np.abs(parts).max(axes, keepdims=True) / F4(most)
    scale = np.where(scale == 0, F4(1), scale)
    if fault == "one scale":
        scale = np.broadcast_to(scale.max(), scale.shape)
    y = parts / scale
    if number == "int8":
        y = np.trunc(y) if fault == "truncated" else np.rint(y)
    elif fault == "truncated":
        y = (y * F4(0.9375)).astype(FORMATS[number][0]).astype(F4)
    else:
        y = y.astype(FORMATS[number][0]).astype(F4)
    if fault == "scale of before":
        y = y * F4(1.03)
    return (y * scale).reshape(*S.shape[:3], -1)[..., : S.shape[-1]].astype(F4)


def stochastic(S: Any, draws: Any) -> Any:
    """fp16, up or down by chance."""
    down = np.abs(S).astype(np.float16)
    down = np.where(down.astype(F4) > np.abs(S), np.nextafter(down, np.float16(0)), down)
    up = np.nextafter(down, np.float16(np.inf))
    share = (np.abs(S) - down) / (up.astype(F4) - down.astype(F4))
    return np.sign(S) * np.where(draws.random(S.shape) < share, up, down).astype(F4)


def storing(store: Any, pool: bool = True) -> Any:
    """GDN whose states go through `store` behind every call."""
    row = right("gdn")

    def step(x: dict[str, Any], states: Any) -> tuple[Any, Any]:
        made = row(**x, **FORM, initial_state=states)
        return made["o"], store(made["final_state"])

    def plain(x: dict[str, Any], initial_state: Any) -> Any:
        return step(x, initial_state)

    return in_slots(step) if pool else taking(plain, optional=("initial_state",))


def judged(form: str, store: Any, declared: bool, cases: Any = CASES) -> Any:
    return deltaproof.run(
        storing(store), cases, base="fp32", models=("gdn",), layouts=(),
        outputs=("o", "final_state", "pool"), design="recurrent" if declared else None,
        out={"final_state": form},
    )  # fmt: skip


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("form", ["e4m3-row", "e4m3-head", "e5m2-block", "int8-row", "int8-tensor"])
def test_states_of_a_format_pass_by_its_design(form: str, declared: bool) -> None:
    found = judged(form, lambda S: quantized(S, form), declared)
    assert found.passed and len(found.verdicts()) == 2, found.text


@pytest.mark.parametrize(
    "form, other, fault",
    [
        ("e4m3-row", "e4m3-row", "truncated"),
        ("int8-row", "int8-row", "truncated"),
        ("int8-row", "int8-row", "scale of before"),
        ("fp16sr", "e4m3-row", ""),
        ("e4m3-block", "e4m3-block", "scale of before"),
        ("int8-head", "int8-head", "one scale"),
        ("e4m3-row", "e5m2-row", ""),
        ("e4m3-block", "e5m2-block", ""),
    ],
)
def test_states_that_are_stored_otherwise_are_red(form: str, other: str, fault: str) -> None:
    found = judged(form, lambda S: quantized(S, other, fault), True)
    assert found.status == 1, found.text


def test_chance_in_fp16_passes_and_truncation_is_red() -> None:
    draws = np.random.default_rng(1)
    found = judged("fp16sr", lambda S: stochastic(S, draws), True)
    assert found.passed, found.text
    cut = judged("fp16sr", lambda S: stochastic(S * F4(1 - 2**-11), draws), True)
    assert cut.status == 1, cut.text


def test_states_that_the_server_stores_are_the_kernels_no_more() -> None:
    """The case says the format: the kernel returns what it computed."""
    for case in ("gdn-kept-e4m3", "gdn-kept-int8"):
        own = {"base": "fp32", "models": ("gdn",), "layouts": ()}
        own |= {"outputs": ("o", "final_state", "pool")}
        found = deltaproof.run(storing(lambda S: S), case, **own)
        assert found.passed, found.text
        short = storing(lambda S: quantized(S, "e5m2-row", "truncated"))
        found = deltaproof.run(short, case, **own)
        assert found.status == 1, found.text


def test_a_file_says_in_which_format_its_state_lies() -> None:
    r = np.random.default_rng(2)
    T, H, K, V = 48, 2, 16, 32
    x = {n: r.standard_normal((T, H, K)).astype(F4) / F4(4) for n in ("q", "k")}
    x |= {"v": r.standard_normal((T, H, V)).astype(F4), "beta": r.random((T, H)).astype(F4)}
    x["g"] = -r.random((T, H)).astype(F4) / 10
    form = {"gate": "log", "beta_form": "plain", "l2norm": False}
    made = right("gdn")(**x, **form, lower_bound=0, scale=K**-0.5)
    made["final_state"] = quantized(made["final_state"], "e4m3-row")
    said: dict[str, Any] = {"base": "fp32", "gate": "log", "beta": "plain", "l2norm": False}
    said["why"] = 0
    right_one = deltaproof.judge(x, made, out={"final_state": "e4m3-row"}, **said)
    assert right_one.status == 0, right_one.text
    assert deltaproof.judge(x, made, **said).status == 1


def gdn_problem(seed: int, T: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inputs of two heads with a gradient of o, and how they are judged."""
    r = np.random.default_rng(seed)
    H, K, V = 2, 16, 64
    x = {n: r.standard_normal((T, H, K)).astype(F4) / F4(4) for n in ("q", "k")}
    x |= {n: r.standard_normal((T, H, V)).astype(F4) for n in ("v", "do")}
    x |= {"beta": r.random((T, H)).astype(F4), "g": -r.random((T, H)).astype(F4) / F4(10)}
    return x, {"base": "fp32", "gate": "log", "beta": "plain", "l2norm": False}


def adjoint(
    x: dict[str, Any], form: str, fault: str = "", reads_kept: bool = False
) -> dict[str, Any]:
    """GDN token by token in fp32. The state is stored after each token. Gradients take a store as
    it is read. reads_kept: o and dq read the stored state. fault: of quantized."""
    T, H, K = x["q"].shape
    S = np.zeros((H, K, x["v"].shape[2]), F4)
    G, kept = np.zeros_like(S), []
    y = {n: np.zeros_like(x[m]) for n, m in (("o", "v"), *(("d" + n, n) for n in NAMES))}
    scale = F4(K**-0.5)
    for t in range(T):
        q, k, v, g, beta = (x[n][t] for n in NAMES)
        decayed = S * np.exp(g)[:, None, None]
        left = v - np.einsum("hk,hkv->hv", k, decayed)
        after = decayed + k[:, :, None] * (beta[:, None] * left)[:, None]
        S = quantized(after[None], form, fault)[0]
        read = S if reads_kept else after
        y["o"][t] = scale * np.einsum("hk,hkv->hv", q, read)
        kept.append((decayed, left, read))
    for t in reversed(range(T)):
        q, k, v, g, beta = (x[n][t] for n in NAMES)
        decayed, left, read = kept[t]
        G = G + scale * q[:, :, None] * x["do"][t][:, None]
        dU = np.einsum("hk,hkv->hv", k, G)
        y["dq"][t] = scale * np.einsum("hkv,hv->hk", read, x["do"][t])
        y["dbeta"][t] = (left * dU).sum(1)
        y["dv"][t] = beta[:, None] * dU
        y["dk"][t] = np.einsum("hkv,hv->hk", G, beta[:, None] * left)
        y["dk"][t] -= np.einsum("hkv,hv->hk", decayed, y["dv"][t])
        G = G - k[:, :, None] * y["dv"][t][:, None]
        y["dg"][t] = (G * decayed).sum((1, 2))
        G = G * np.exp(g)[:, None, None]
    return y | {"final_state": S[None]}


NAMES = ("q", "k", "v", "g", "beta")


def batch(x: dict[str, Any]) -> dict[str, Any]:
    return {n: a if n == "final_state" else a[None] for n, a in x.items()}


@pytest.mark.parametrize("T, ranks", [(1, 1), (36, 3)])
@pytest.mark.parametrize("form", ["e4m3-row", "e5m2-block", "int8-head"])
def test_gradients_of_short_states_have_bounds_on_ranks(form: str, T: int, ranks: int) -> None:
    """A state that is stored after each token; of one token, too."""
    x, said = gdn_problem(4, T)
    said["why"] = 0
    said |= {"design": f"recurrent,state={form}", "ranks": ranks}
    said |= {"claim": "fp32"} if ranks > 2 else {}
    if form == "e5m2-block":  # two bits: zeros would pass in a quarter of dg
        said["unjudged"] = ("dg",)
    found = deltaproof.judge(batch(x), batch(adjoint(x, form)), **said)
    assert found.status == 0, found.text
    for name in ("o", "final_state", "dq", "dk", "dg", "dbeta"):
        assert found.tensors[name]["ratio"] <= 1, (name, found.text)
    if T > 1:
        wrong = deltaproof.judge(batch(x), batch(adjoint(x, form, "truncated")), **said)
        assert wrong.status == 1, wrong.text


@pytest.mark.parametrize("T", [1, 36])
@pytest.mark.parametrize("form", ["e4m3-row", "int8-head"])
def test_a_kernel_may_read_the_state_as_it_is_kept(form: str, T: int) -> None:
    """Without a word for it the first token, which no store precedes, is beyond its bound."""
    x, said = gdn_problem(5, T)
    said["why"] = 0
    made, design = batch(adjoint(x, form, reads_kept=True)), f"recurrent,state={form}"
    found = deltaproof.judge(batch(x), made, design=f"{design},read=kept", **said)
    assert found.status == 0, found.text
    assert max(found.tensors[n]["ratio"] for n in ("o", "dq")) <= 1, found.text
    assert deltaproof.judge(batch(x), made, design=design, **said).status == 1
    wrong = batch(adjoint(x, form, "truncated", reads_kept=True))
    if T > 1:
        assert deltaproof.judge(batch(x), wrong, design=f"{design},read=kept", **said).status == 1


def test_a_format_of_states_is_refused_by_name() -> None:
    found = judged("e4m3", lambda S: S, True)
    assert found.status == 2, found.text
    assert "final_state=e4m3: final_state is fp64, fp32, bf16, fp16 or one of" in found.text


# Rows of a token by name: S <- diag(exp g) S + sum of write' strength (value - read S before the
# decay). Which gradients of rows make those of inputs stands in the last column.
OF_ROWS: dict[str, Any] = {
    "dplr": lambda x: [(x["lr_b"], -x["lr_a"], None, None), (x["k"], None, x["v"], None)],
    "rwkv7": lambda x: [(x["kk"] * x["a"], x["kk"], None, None), (x["k"], None, x["v"], None)],
    "comba": lambda x: [(x["k"], x["p"], x["v"], x["beta"])],
}
BACK: dict[str, Any] = {
    "dplr": lambda x, d: {
        "dlr_b": d[0][0], "dlr_a": -d[0][1], "dk": d[1][0], "dv": d[1][2]
    },
    "rwkv7": lambda x, d: {
        "dkk": x["a"] * d[0][0] + d[0][1], "da": x["kk"] * d[0][0], "dk": d[1][0], "dv": d[1][2]
    },
    "comba": lambda x, d: {
        "dk": d[0][0], "dp": d[0][1], "dv": d[0][2], "dbeta": d[0][3]
    },
}  # fmt: skip


def row_adjoint(model: str, x: dict[str, Any], form: str, fault: str = "") -> dict[str, Any]:
    """A recurrence of rows token by token in fp32, its state stored after each, and gradients that
    take a store as it is read."""
    q, g = (x["r"], x["w"]) if model == "rwkv7" else (x["q"], x["g"])
    (T, H, K), V = q.shape, x["v"].shape[2]
    S, scale, kept = np.zeros((H, K, V), F4), F4(K**-0.5), []
    D = np.exp(g) if g.ndim == 3 else np.exp(g)[..., None] * np.ones(K, F4)
    o = np.zeros_like(x["v"])
    for t in range(T):
        after = S * D[t][..., None]
        for write, read, value, beta in OF_ROWS[model](x):
            E = 0 if value is None else value[t]
            E = E if read is None else E - np.einsum("hk,hkv->hv", read[t], S)
            after = (
                after + write[t][..., None] * (E if beta is None else beta[t][:, None] * E)[:, None]
            )
        o[t] = scale * np.einsum("hk,hkv->hv", q[t], after)
        kept.append((S, after))
        S = quantized(after[None], form, fault)[0]
    made, G = {"o": o, "final_state": S[None]}, np.zeros_like(S)
    dq, dg = np.zeros_like(q), np.zeros_like(D)
    of = [[np.zeros_like(q), np.zeros_like(q), np.zeros_like(o), np.zeros((T, H), F4)]
          for _ in OF_ROWS[model](x)]  # fmt: skip
    for t in reversed(range(T)):
        S, after = kept[t]
        G = G + scale * q[t][..., None] * x["do"][t][:, None]
        dq[t] = scale * np.einsum("hkv,hv->hk", after, x["do"][t])
        dS = G * D[t][..., None]
        dg[t] = D[t] * (G * S).sum(-1)
        for d, (write, read, value, beta) in zip(of, OF_ROWS[model](x), strict=True):
            E = np.zeros((H, V), F4) if value is None else value[t]
            E = E if read is None else E - np.einsum("hk,hkv->hv", read[t], S)
            b = np.ones(H, F4) if beta is None else beta[t]
            dU = np.einsum("hk,hkv->hv", write[t], G)
            d[0][t] = np.einsum("hkv,hv->hk", G, b[:, None] * E)
            d[2][t], d[3][t] = b[:, None] * dU, (dU * E).sum(-1)
            if read is not None:
                d[1][t] = -np.einsum("hkv,hv->hk", S, d[2][t])
                dS = dS - read[t][..., None] * d[2][t][:, None]
        G = dS
    names = ("dr", "dw") if model == "rwkv7" else ("dq", "dg")
    made |= {names[0]: dq, names[1]: dg if g.ndim == 3 else dg.sum(-1)}
    return made | BACK[model](x, of)


def row_inputs(model: str, T: int) -> dict[str, Any]:
    r = np.random.default_rng(5)
    H, K, V = 2, 16, 32

    def unit() -> Any:
        y = r.standard_normal((T, H, K)).astype(F4)
        return y / np.linalg.norm(y, axis=-1, keepdims=True)

    gate = -r.random((T, H, K)).astype(F4) / F4(10)
    x = {n: r.standard_normal((T, H, V)).astype(F4) for n in ("v", "do")}
    if model == "dplr":
        u = unit()
        part = r.random((T, H, 1)).astype(F4)
        return x | {"q": unit(), "k": unit(), "lr_a": -u, "lr_b": u * part, "g": gate}
    if model == "rwkv7":
        a = r.random((T, H, K)).astype(F4)
        return x | {"r": unit(), "w": gate, "k": unit(), "kk": unit(), "a": a}
    beta = r.random((T, H)).astype(F4)
    return x | {"q": unit(), "g": gate[..., 0].copy(), "k": unit(), "p": unit(), "beta": beta}


@pytest.mark.parametrize("model", OF_ROWS)
@pytest.mark.parametrize("form, T", [("e4m3-row", 36), ("int8-block", 36), ("e5m2-head", 1)])
def test_gradients_of_rows_in_short_states_have_bounds(model: str, form: str, T: int) -> None:
    from test_recurrence import COMBA, RWKV7

    own = {"rwkv7": {"recurrence": RWKV7}, "comba": {"recurrence": COMBA}}
    said: dict[str, Any] = {"base": "fp32", "gate": "log", "design": f"recurrent,state={form}"}
    said["why"] = 0
    said |= own.get(model, {"l2norm": False})
    x = row_inputs(model, T)
    found = deltaproof.judge(batch(x), batch(row_adjoint(model, x, form)), **said)
    assert found.status == 0, found.text
    for name, tensor in found.tensors.items():
        assert tensor["ratio"] is not None and tensor["ratio"] <= 1, (name, tensor, found.text)
    if T > 1:
        wrong = row_adjoint(model, x, form, "scale of before")
        assert deltaproof.judge(batch(x), batch(wrong), **said).status == 1


@pytest.mark.parametrize("name", ["o", "final_state"])
def test_a_result_kept_in_fp16_is_asked_for_nothing_beyond_its_range(name: str) -> None:
    def kept(q, k, v, g, beta, initial_state=None, cu_seqlens=None):  # noqa: ANN001, ANN202
        o, state = kda(q, k, v, g, beta, initial_state, cu_seqlens)
        made = {"o": o, "final_state": state}
        with np.errstate(over="ignore"):
            return made | {name: made[name].astype(np.float16)}

    own: dict[str, Any] = {"base": "fp32", "outputs": ("o", "final_state"), "layouts": ()}
    found = deltaproof.run(kept, ("kda-mild", "kda-exact-packed"), out={name: "fp16"}, **own)
    verdicts = list(found.verdicts().values())
    assert verdicts[0] == "pass" and "leave the range of fp16" in verdicts[1], found.text


@pytest.mark.parametrize("form", ["e4m3-row", "e5m2-head", "int8-tensor", "int8-block"])
def test_numbers_that_are_exact_in_bf16_are_not_over_a_scale(form: str) -> None:
    def kept(fault: str) -> Any:
        def fn(q, k, v, g, beta, initial_state=None, cu_seqlens=None):  # noqa: ANN001, ANN202
            o, state = kda(q, k, v, g, beta, initial_state, cu_seqlens)
            state = quantized(state, form).reshape(state.shape)
            return o * F4(1 + 2**-20 * (fault == "o")), state * F4(1 + 0.5 * (fault == "state"))

        return fn

    own: dict[str, Any] = {"base": "bf16", "outputs": ("o", "final_state"), "layouts": ()}
    for fault in ("", "o", "state"):
        found = deltaproof.run(kept(fault), "kda-exact", out={"final_state": form}, **own)
        assert found.passed == (not fault), found.text
        assert ("nothing rounds in this case" in found.text) == (fault == "o"), found.text


@pytest.mark.parametrize("slots", ["", "session_slots = 5\n"])
@pytest.mark.parametrize("form", ["e4m3-row", "int8-head"])
def test_calls_that_read_such_states_again_round(form: str, slots: str, tmp_path: Path) -> None:
    case = tmp_path / "exact.case"
    case.write_text(
        "reason = r\nsource = s\nop = gdn\nT = 48\ncu_seqlens = 0,16,32,48\nH = 1\nHV = 2\n"
        f"K = 16\nV = 16\nkeys = exact\nbase = fp32\nsession = 10,5,1\n{slots}"
    )
    for times in (1, 1.25):
        store = lambda S, c=times: quantized(S, form) * F4(c)
        found = judged(form, store, False, [str(case)])
        assert found.passed == (times == 1), found.text
