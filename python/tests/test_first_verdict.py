"""A first judgement: all missing settings at once, batches, fp16, FLA's inner names, and the one
mistake that explains a failure."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from deltaproof import judge, run, to_bf16
from kernels import by_products, inputs, kda

Arrays = dict[str, np.ndarray]
SAID: dict[str, Any] = {"base": "fp32", "gate": "log", "beta": "plain", "l2norm": False}


def fits(x: Arrays, outputs: Arrays, **other: Any) -> list[str]:
    """The program's lines on outputs that fail."""
    found = judge(x, outputs, **(SAID | other))
    assert found.status == 1, found.text
    return [n.removeprefix("fits: ") for n in found.text.splitlines() if n.startswith("fits: ")]


def o_of(x: Arrays) -> np.ndarray:
    return kda(**x)[0]


def test_all_that_is_missing_is_said_at_once() -> None:
    x = inputs()
    found = judge(x, {"oo": x["v"], "dq": x["q"]}, gate="sine")
    assert found.status == 2 and "6 things are missing or wrong" in found.text
    for part in (
        "tensor oo is not known",
        "dq is a gradient",
        "'sine' is not known",
        'give beta="plain" or "sigmoid"',
    ):
        assert part in found.text, found.text
    assert 'gate_dtype="fp32" or "bf16" or "fp16"' in found.text
    assert "give l2norm=True or False" in found.text and 'base="bf16" or "fp16"' in found.text
    assert " --" not in found.text, found.text
    del x["k"], x["beta"]
    found = judge(x, {"o": x["v"]}, **SAID)
    assert "tensor k is missing" in found.text and "tensor beta is missing" in found.text


def test_a_batch_is_judged_as_packed_sequences() -> None:
    one = inputs()
    x = {n: np.stack([a, a[::-1]]) for n, a in one.items()}
    both = [kda(**{n: np.ascontiguousarray(a[b]) for n, a in x.items()}) for b in (0, 1)]
    o, state = np.stack([r[0] for r in both]), np.concatenate([r[1] for r in both])
    found = judge(x, {"o": o, "ht": state}, **SAID)
    assert found.passed and "token t of batch b is token 100 b + t" in found.text, found.text
    o[1, 70, 1] *= 1.01
    place = judge(x, {"o": o}, **SAID).failures()[0]
    assert place.startswith("o, rank 0, head 1, sequence 1, token 170")
    found = judge(x, {"o": o[:, :50]}, **SAID)
    assert found.status == 2 and "q has a batch axis, [2,100,..]" in found.text
    found = judge(x, {"o": o}, ranks=2, **SAID)
    assert found.status == 2 and "ranks splits one sequence" in found.text


@pytest.mark.filterwarnings("ignore:overflow")
def test_rows_beyond_the_range_of_fp16_are_not_judged_and_all_others_are() -> None:
    x = {n: half(a) if n in "qkv" else a for n, a in inputs(T=64).items()}
    x |= {"q": half(x["q"] * 16), "v": half(x["v"] * 1e4)}
    o = kda(**{n: a.astype(np.float64) for n, a in x.items()})[0]  # two numbers above 65504
    right = judge(x, {"o": half(o)}, **SAID | {"base": "fp16"})
    assert right.status == 2 and "the truth of 2 of 128 rows leaves the range" in right.text
    o[3] *= 1.05
    wrong = judge(x, {"o": half(o)}, **SAID | {"base": "fp16"})
    assert wrong.status == 1 and "token 3, entry" in wrong.text, wrong.text
    o[3, 0, 0] = np.inf
    wild = judge(x, {"o": half(o)}, **SAID | {"base": "fp16"})
    assert wild.status == 1 and ": inf, truth" in wild.text, wild.text


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_truth_beyond_fp64_of_finite_inputs_is_not_judged(value: float) -> None:
    x = inputs()
    found = judge(x | {"g": x["g"] * 0 + 99.0}, {"ht": np.full((1, 2, 16, 8), value)}, **SAID)
    assert found.status == 2 and "leaves the range of their format" in found.text, found.text


@pytest.mark.parametrize("first", [64, 110])
def test_zeros_behind_a_token_do_not_pass_where_the_state_grows(first: int) -> None:
    x = inputs(T=130)
    x = {n: to_bf16(a).astype(np.float64) if n in "qkv" else a.astype(float) for n, a in x.items()}
    x |= {"k": 2 * x["k"], "beta": x["beta"] * 0 + 1, "g": 0.01 * x["g"]}
    o = kda(**x)[0]
    bf16 = SAID | {"base": "bf16", "why": 0}
    assert judge(x, {"o": to_bf16(o)}, **bf16).passed
    o[first:] = 0
    found = judge(x, {"o": to_bf16(o)}, **bf16)
    assert found.status == 2 and "zeros would pass in rows that hold" in found.text, found.text


def test_fp16_is_judged_by_what_fp16_makes() -> None:
    x = {n: a.astype(np.float16) for n, a in inputs().items()}
    o = kda(**x)[0]
    half = SAID | {"base": "fp16"}
    found = judge(x, {"o": o.astype(np.float16)}, **half)
    assert found.passed, found.text
    assert found.record is not None
    assert found.record["runs"][0]["policy"]["design"] == "undeclared,factors=fp16,out=fp16"
    found = judge(x, {"o": to_bf16(o).astype(np.float32)}, **half)
    assert found.status == 1, "three bits fewer than fp16 must not pass as fp16: " + found.text


def test_inner_names_of_fla_are_known() -> None:
    x = inputs() | {"do": np.ones((100, 2, 8), np.float32), "h0": np.zeros((1, 2, 16, 8))}
    x["A_log"] = np.zeros(2, np.float32)
    zero = np.zeros((100, 2), np.float32)
    made = {"db": zero, "dA": zero[0], "dh0": np.zeros((1, 2, 16, 8))}
    found = judge(x, made, **(SAID | {"gate": "softplus"}))
    assert {"dbeta", "dA_log", "ds0"} <= set(found.tensors), found.text


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def with_eps(x: Arrays, eps: float) -> Arrays:
    def norm(a: np.ndarray) -> np.ndarray:
        return (a / np.sqrt((a * a).sum(-1, keepdims=True) + eps)).astype(np.float32)

    return x | {"q": norm(x["q"]), "k": norm(x["k"])}


def one_before(a: np.ndarray) -> np.ndarray:
    return np.concatenate([0 * a[:1], a[:-1]])


def short(a: np.ndarray) -> np.ndarray:
    return to_bf16(a).astype(np.float32)


def half(a: np.ndarray) -> np.ndarray:
    return a.astype(np.float16).astype(np.float32)


def in_bf16_behind_softplus(x: Arrays) -> np.ndarray:
    return o_of(x | {"g": short(-np.log1p(np.exp(x["g"])))})


def with_state_in(store: Callable[[np.ndarray], np.ndarray], x: Arrays, kept: bool) -> np.ndarray:
    """o of a state that is stored after each token; kept: o reads the stored state."""
    o, S = np.empty_like(x["v"]), None
    for t in range(len(o)):
        made, S = kda(**{n: a[t : t + 1] for n, a in x.items()}, initial_state=S)
        S = store(S)
        read = np.einsum("hk,hkv->hv", x["q"][t], S[0]) / np.float32(np.sqrt(x["q"].shape[-1]))
        o[t] = read if kept else made[0]
    return o


def halves(x: Arrays) -> np.ndarray:
    parts = [{n: a[i : i + 50] for n, a in x.items()} for i in (0, 50)]
    return np.concatenate([o_of(p) for p in parts])


@pytest.mark.parametrize(
    ("words", "make", "other"),
    [
        ("passes with scale=1: q is not multiplied", lambda x: 4 * o_of(x), {}),
        ("o is one token late", lambda x: np.roll(o_of(x), 1, 0), {}),
        ('beta="plain": as if beta were not sigmoided', o_of, {"beta": "sigmoid"}),
        ('beta="sigmoid"', lambda x: o_of(x | {"beta": sigmoid(x["beta"])}), {}),
        ("eps = 1e-5", lambda x: o_of(with_eps(x, 1e-5)), {"l2norm": True}),
        ("without eps", lambda x: o_of(with_eps(x, 0)), {"l2norm": True}),
        ("exp2(g) for exp(g)", lambda x: o_of(x | {"g": x["g"] * np.float32(np.log(2))}), {}),
        ('passes with gate_dtype="bf16"', lambda x: o_of(x | {"g": short(x["g"])}), {}),
        ('passes with gate_dtype="fp16"', lambda x: o_of(x | {"g": half(x["g"])}), {}),
        ('passes with gate_dtype="fp32"', o_of, {"gate_dtype": "bf16"}),
        ("activated gate were kept in bf16", in_bf16_behind_softplus, {"gate": "softplus"}),
        ("every gate were that", lambda x: o_of(x | {"g": one_before(x["g"])}), {}),
        ("rank 1 started from zero", halves, {"ranks": 2}),
        ('passes with design="out=fp16"', lambda x: half(o_of(x)), {}),
        ('passes with design="out=bf16"', lambda x: short(o_of(x)), {}),
        ('design="recurrent,state=fp16,read=kept"', lambda x: with_state_in(half, x, True), {}),
        ('"recurrent,state=bf16": its state', lambda x: with_state_in(short, x, False), {}),
        ('"recurrent,state=bf16,read=kept"', lambda x: with_state_in(short, x, True), {}),
        (
            '"recurrent,state=bf16,read=kept": its state is kept in bf16, and o reads it as kept',
            lambda x: with_state_in(short, x, True),
            {"design": "recurrent,state=bf16"},
        ),
        (
            '"recurrent,state=bf16": its state is kept in bf16, and o reads it before that',
            lambda x: with_state_in(short, x, False),
            {"design": "recurrent"},
        ),
        (
            '"recurrent,state=bf16,read=kept,o=bf16"',
            lambda x: short(with_state_in(short, x, True)),
            {"out": {"o": "bf16"}},
        ),
        ("products round their operands to tf32", lambda x: by_products(**x), {}),
        ("truncate their operands to tf32", lambda x: by_products(**x, half=0), {}),
    ],
)
def test_the_mistake_that_explains_a_failure_is_named(
    words: str, make: Callable[[Arrays], np.ndarray], other: dict[str, Any]
) -> None:
    x = inputs(V=16)
    if "l2norm" in other:
        x = x | {"q": x["q"] / 100, "k": x["k"] / 100}
    said = fits(x, {"o": make(x)}, **other)
    assert any(words in n for n in said), said
    assert len(said) <= 2, said


def test_gates_are_judged_as_the_kernel_reads_them() -> None:
    x = inputs(V=16)
    o = o_of(x | {"g": short(x["g"])})
    assert judge(x, {"o": o}, **SAID).status == 1
    assert judge(x, {"o": o}, gate_dtype="bf16", **SAID).passed
    assert judge(x | {"g": to_bf16(x["g"])}, {"o": o}, **SAID).passed
    o = o_of(x | {"g": half(x["g"])})
    assert judge(x, {"o": o}, gate_dtype="fp16", **SAID).passed
    assert judge(x, {"o": o_of(x)}, gate_dtype="fp16", **SAID).status == 1
    found = judge(x, {"o": o}, gate_dtype="fp8", **SAID)
    assert found.status == 2 and 'gate_dtype="fp32" or "bf16" or "fp16"' in found.text


def test_a_state_in_bf16_is_named_in_base_bf16_too() -> None:
    x = inputs(T=150, H=1, V=8)
    x |= {n: short(x[n]) for n in "qkv"} | {"g": 0 * x["g"], "beta": x["beta"] / 8}
    o = to_bf16(with_state_in(short, x, kept=True))
    said = fits(x | {n: to_bf16(x[n]) for n in "qkv"}, {"o": o}, base="bf16")
    assert len(said) == 1 and 'design="recurrent,state=bf16,read=kept"' in said[0], said


def test_a_setting_is_named_where_its_opposite_overflows() -> None:
    x = inputs(T=130, V=16)
    large = x | {"q": 30 * x["q"], "k": 30 * x["k"]}
    said = fits(large, {"o": o_of(x)})
    assert said == ["passes with l2norm=True: as if q and k were normalised"], said
    decays = x | {"g": np.exp(x["g"])}
    assert fits(decays, {"o": o_of(x)}) == ['passes with gate="exp": g is the decay itself']


def test_a_kernel_in_fp64_may_read_gates_in_fp32_and_says_so() -> None:
    x = {n: a.astype(np.float64) for n, a in inputs(V=16).items()}
    x["g"] = x["g"] * (1 + 2**-30)
    read = kda(**x | {"g": x["g"].astype(np.float32)}, dtype=np.float64)[0]
    assert fits(x, {"o": read}, base="fp64") == ['passes with gate_dtype="fp32"']
    assert judge(x, {"o": read}, gate_dtype="fp32", **(SAID | {"base": "fp64"})).passed
    said = fits(x, {"o": kda(**x, dtype=np.float64)[0]}, base="fp64", gate_dtype="fp16")
    assert said == ['passes with gate_dtype="fp64": as the file holds g']


def test_a_turned_state_is_recognised_where_its_shape_hides_it() -> None:
    x = inputs(V=16)
    o, state = kda(**x)
    assert fits(x, {"o": o, "final_state": np.swapaxes(state, -1, -2)}) == [
        'passes with state_layout="vk"'
    ]


def test_nothing_is_said_where_nothing_fits() -> None:
    x = inputs(V=16)
    o = o_of(x)
    o[70, 1] += 0.3
    assert fits(x, {"o": o}) == []


@pytest.mark.parametrize("name", ["l2norm", "autograd", "batch"])
def test_what_is_true_or_false_is_no_text(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name}='no': must be True or False"):
        run(kda, "t65", base="fp32", **{name: "no"})
    if name == "l2norm":
        with pytest.raises(TypeError, match="l2norm='no': must be True or False"):
            judge(inputs(), {"o": o_of(inputs())}, **(SAID | {"l2norm": "no"}))


def test_decays_in_place_of_their_logarithms_are_judged() -> None:
    x = inputs()
    o, state = kda(**x)
    decays = x | {"g": np.exp(x["g"])}
    found = judge(decays, {"o": o, "final_state": state}, **(SAID | {"gate": "exp"}))
    assert found.passed, found.text
    found = judge(decays, {"o": o}, **SAID)
    assert found.status == 1 and 'with gate="exp" g is the decay' in found.text, found.text
    found = judge(x, {"o": o}, **(SAID | {"gate": "exp"}))
    assert found.status == 2 and "tensor g: entry 0 is -" in found.text, found.text


def mamba(groups: int = 1) -> tuple[Arrays, Arrays]:
    """Inputs in Mamba-2's names, and what its recurrence makes of them."""
    rng, T, HV, V, K = np.random.default_rng(5), 70, 2, 8, 16
    x, dt = rng.normal(size=(T, HV, V)), rng.uniform(0.01, 0.1, (T, HV))
    given = {"x": x, "dt": dt, "A": -rng.uniform(1, 4, HV)}
    given |= {n: rng.normal(size=(T, groups, K)) for n in "BC"}
    given = {n: a.astype(np.float32) for n, a in given.items()}
    B, C = (np.repeat(given[n], HV // groups, axis=1) for n in "BC")
    S, y = np.zeros((HV, V, K)), np.zeros((T, HV, V))
    for t in range(T):
        step = given["dt"][t].astype(np.float64)
        S *= np.exp(step * given["A"])[:, None, None]
        S += np.einsum("h,hv,hk->hvk", step, given["x"][t], B[t])
        y[t] = np.einsum("hvk,hk->hv", S, C[t])
    return given, {"y": y.astype(np.float32), "final_states": S[None].astype(np.float32)}


@pytest.mark.parametrize("groups", [1, 2])
def test_mamba_is_judged_in_its_own_names(groups: int) -> None:
    given, made = mamba(groups)
    found = judge(given, made, base="fp32", layout="mamba")
    assert found.passed and set(found.tensors) == {"o", "final_state"}, found.text
    batch = {n: a if n == "A" else a[None] for n, a in given.items()}
    assert judge(batch, {"out": made["y"][None]}, base="fp32", layout="mamba").passed
    found = judge(given, {"y": made["y"] * np.float32(1.01)}, base="fp32", layout="mamba")
    assert found.status == 1, found.text
    found = judge(given, made, base="fp32")
    assert found.status == 2 and 'give layout="mamba"' in found.text, found.text
    del given["dt"]
    found = judge(given, made, base="fp32", layout="mamba")
    assert found.status == 2 and "tensor dt is missing" in found.text, found.text


def test_a_claim_that_says_more_is_named() -> None:
    x = inputs()
    o, state = kda(**x)
    found = judge(x, {"o": o, "final_state": state}, **(SAID | {"base": "bf16"}))
    assert found.passed and 'tighter claim: passes with base="fp32", too' in found.text
    rounded = to_bf16(o).astype(np.float32)
    found = judge(x, {"o": rounded, "final_state": state}, **(SAID | {"base": "bf16"}))
    assert 'passes with base="fp32" design="out=bf16", too' in found.text, found.text
    times = float(found.text.split(" that are ")[1].split()[0])
    assert times > 400 and "errors of final_state" in found.text, found.text
    assert judge(x, {"o": rounded, "final_state": state}, design="out=bf16", **SAID).passed
    short = {"o": to_bf16(o), "final_state": to_bf16(state)}
    found = judge(x, short, **(SAID | {"base": "bf16"}))
    assert "tighter claim" not in found.text, found.text
    assert "tighter claim" not in judge(x, {"o": o}, **SAID).text


@pytest.mark.parametrize(
    ("order", "told"),
    [
        ((2, 1, 0), "heads 0 and 2 of {} are in each other's place"),
        ((2, 0, 1), "every head of {} is the one before it"),
        ((1, 2, 0), "every head of {} is the one behind it"),
    ],
)
def test_heads_in_another_order_are_named(order: tuple[int, ...], told: str) -> None:
    x = inputs(H=3)
    o, state = kda(**x)
    assert fits(x, {"o": o[:, order], "ht": state}) == [told.format("o")]
    assert fits(x, {"o": o, "ht": state[:, order]}) == [told.format("final_state")]
    assert fits(x, {"ht": state * 2}) == ["final_state is exactly 2 times too large"]
