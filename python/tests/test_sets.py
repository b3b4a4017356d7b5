"""The sets of cases that `run` knows by name: enough of them for every recurrence, in the form that
a function computes. Right kernels pass them."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import deltaproof
from deltaproof.contract import Contract
from deltaproof.themes import LOWER_BOUND, SETS, THEMES, case_paths
from recurrences import MODELS, right
from wrong_kernels import make

FORMS: tuple[dict[str, Any], ...] = (
    {},
    {"gate": "softplus", "beta": "sigmoid", "l2norm": True},
    {"gate": "lower_bound", "beta": "sigmoid2"},
)


def fixed(q: Any, k: Any, v: Any, g: Any, scale: float, **arrays: Any) -> Any:
    raise AssertionError


def keys_of(path: str) -> dict[str, str]:
    with open(path, encoding="utf-8") as f:
        return dict(x.strip().split(" = ", 1) for x in f)  # type: ignore[misc]


@pytest.mark.parametrize("model", MODELS)
def test_a_standard_set_has_25_cases_of_the_form_that_a_function_computes(
    model: str, tmp_path: Any
) -> None:
    every = Contract(right(model), ("o", "final_state"), (model,))
    assert len(case_paths("standard", every, str(tmp_path))) >= 25
    for form in FORMS:
        if model == "dplr" and form.get("l2norm"):
            continue
        one = Contract(fixed, ("o", "final_state"), (model,), **form)
        own = {"gate": one.gate, "l2norm": ("no", "yes")[one.l2norm]}
        own |= {} if model in ("gdn2", "gla", "ssd", "dplr") else {"beta": one.beta}
        served = [
            path
            for path in case_paths("standard", one, str(tmp_path))
            if "/" in path and all(keys_of(path)[n] == x for n, x in own.items())
        ]
        assert len(served) >= 25, (form, len(served))


SHAPES: dict[str, Callable[[Any], bool]] = {
    "more than one token, less than a tile": lambda x: 1 < x.T < 16,
    "less than a chunk": lambda x: 16 < x.T < 63,
    "a state before few tokens": lambda x: 1 < x.T < 63 and x.state,
    "one head": lambda x: x.HV == 1,
    "as many heads, an odd number": lambda x: x.H == x.HV == 3,
    "five value heads a key head": lambda x: x.HV == 5 * x.H,
    "eight, 32 in all": lambda x: x.HV == 8 * x.H >= 32,
    "16 key heads, several chunks, a state": lambda x: x.H >= 16 and x.T > 64 and x.state,
    "three value heads a key head, log gates": lambda x: x.HV == 3 * x.H and x.gate == "log",
    "rows of a batch of grouped heads": lambda x: x.HV > x.H > 1 and {*x.lengths} == {70},
    "more sequences than two warps have lanes": lambda x: len(x.lengths) > 64,
    "one token behind many": lambda x: x.packed and x.T > 64 and x.lengths[-1] == 1,
    "a packed sequence of several chunks": lambda x: x.packed and max(x.lengths) > 256,
    "raw gates of several chunks": lambda x: x.gate == "softplus" and max(x.lengths) > 256,
    "16 tokens": lambda x: 16 in x.lengths,
    "K = V = 64 of three chunks": lambda x: x.K == x.V == 64 and max(x.lengths) > 128,
    "K = V = 128 of three chunks, packed": lambda x: (
        x.K == x.V == 128 and x.packed and max(x.lengths) > 128 and x.gate == "softplus"
    ),
    "K = V = 128 of heads": lambda x: x.K == x.V == 128 and x.HV > x.H and x.gate == "log",
    "K = V = 128 of one token": lambda x: x.K == x.V == 128 and x.T == 1,
    "K = 128, V = 256": lambda x: (x.K, x.V) == (128, 256),
    "K below 16": lambda x: x.K < 16,
    "K = V = 64 of heads, not packed": lambda x: x.K == x.V == 64 and x.HV > 1 and not x.packed,
    "K = 128 above V": lambda x: x.K == 128 > x.V,
    "K and V between 64 and 128, no powers of 2": lambda x: 64 < x.K < 128 and 64 < x.V < 128,
    "V > K": lambda x: x.V > x.K,
    "a gradient of a state without a first": lambda x: x.dstate and not x.state,
    "one of few tokens": lambda x: x.dstate and x.T < 64,
    "one of grouped heads": lambda x: x.dstate and x.HV > x.H > 1,
    "gradients of several chunks, all equal": lambda x: x.T > 64 and "do[*,*,*] 1" in x.override,
    "gradients of A_log without dt_bias": lambda x: x.rates,
    "scales of one shape": lambda x: (x.T, x.HV, x.K, x.V) == (65, 2, 32, 32) and x.scale,
    "as many heads, several chunks": lambda x: x.HV == x.H > 1 and x.T > 64 and not x.packed,
    "as many heads, packed": lambda x: x.HV == x.H > 1 and x.packed,
    "as many heads and a state": lambda x: x.HV == x.H > 1 and x.state and not x.packed,
    "one token and a state": lambda x: x.T == 1 and x.state,
    "no gradient of a last state": lambda x: x.state and x.T > 64 and not x.dstate,
    "whole chunks and a state": lambda x: x.T in (128, 192) and x.state and not x.packed,
    "another scale and a state": lambda x: x.scale and x.state and not x.packed,
    "another scale, packed": lambda x: x.scale and x.packed,
    "another scale, log gates": lambda x: x.scale and x.gate == "log" and x.K == 128,
    "another scale, a bounded gate": lambda x: x.scale and x.bound,
    "one chunk and a state": lambda x: x.T == 64 and x.state,
    "norms of many chunks": lambda x: x.normed and x.T > 256,
    "many sequences of killing gates": lambda x: x.uniform == "20" and len(x.lengths) > 5,
    "packed without a state": lambda x: x.packed and not x.state and x.gate == "softplus",
    "raw gates without parameters, a state": lambda x: x.bare and x.state,
    "K = V = 64, of packed heads with states": lambda x: (
        x.K == x.V == 64 and x.HV > 1 and x.packed and x.state
    ),
    "K = V = 128 and a state": lambda x: x.K == x.V == 128 and x.state,
    "K above 128 and a state": lambda x: x.K > 128 and x.state,
    "V above 128, packed, and a state": lambda x: x.V > 128 and x.packed and x.state,
    "16 chunks of heads with a state": lambda x: x.T >= 1024 and x.HV > 1 and x.state,
    "one of a bounded gate, packed": lambda x: x.bound and x.packed and x.dstate and x.HV > x.H > 1,
    "a bounded gate of K = V = 128": lambda x: x.bound and x.K == x.V == 128,
    "betas up to 2 and a state": lambda x: x.beta == "sigmoid2" and x.packed and x.state,
    "log gates, normed keys and a state": lambda x: x.gate == "log" and x.normed and x.state,
    "log gates and raw betas": lambda x: x.gate == "log" and x.beta == "sigmoid",
    "strong gates, packed": lambda x: x.packed and x.uniform == "5" and x.state,
}
SESSIONS: dict[str, Callable[[Any], bool]] = {
    "one sequence": lambda x: not x.packed and x.H > 1,
    "as many heads": lambda x: x.packed and x.HV == x.H > 1 and not x.slots,
    "grouped heads in slots": lambda x: x.slots and x.HV > x.H > 1,
    "K = V = 128 in slots": lambda x: x.slots and x.K == x.V == 128,
    "a bounded gate, betas up to 2": lambda x: x.bound and x.beta == "sigmoid2" and x.K == 64,
}


def shape_of(path: str) -> SimpleNamespace:
    x = keys_of(path)
    ends = [int(n) for n in x.get("cu_seqlens", f"0,{x['T']}").split(",")]
    sizes = {n: int(x[n]) for n in ("T", "H", "HV", "K", "V")}
    more = {"state": "s0_scale" in x, "dstate": x.get("dstate") == "yes", "scale": "scale" in x}
    more |= {"rates": x.get("gate_params") == "rates", "packed": "cu_seqlens" in x}
    more |= {"uniform": x.get("g_uniform"), "slots": "session_slots" in x}
    more |= {"gate": x["gate"], "bound": x["gate"] == "lower_bound", "beta": x["beta"]}
    more |= {"normed": x["l2norm"] == "yes", "bare": x.get("gate_params") == "no"}
    lengths = [e - a for a, e in zip(ends, ends[1:], strict=False)]
    return SimpleNamespace(**sizes, **more, lengths=lengths, override=x.get("override", ""))


@pytest.mark.parametrize("own", ["standard", "training"])
def test_faults_of_common_shapes_show_in_a_case(own: str, tmp_path: Any) -> None:
    """A kernel that is wrong in one of these shapes alone had passed."""
    outputs = ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta")
    for model in ("gdn", "kda"):
        paths = case_paths(own, Contract(make(), outputs, (model,), base="fp32"), str(tmp_path))
        shapes = [shape_of(x) for x in paths if "/" in x]
        unseen = {n for n, has in SHAPES.items() if not any(map(has, shapes))}
        assert own == "training" or not unseen, unseen
        assert not {n for n in unseen if "gradient" in n or n.startswith("one of")}, unseen
        paths = case_paths("serving", Contract(make(), ("o", "pool"), (model,)), str(tmp_path))
        sessions = [shape_of(x) for x in paths if "session" in keys_of(x)]
        assert all(any(map(has, sessions)) for has in SESSIONS.values())
        at = [x.split("/")[-1] for x in paths].index(f"{model}-first-one.case")
        before, one = ((x.HV, x.K, x.V) for x in map(shape_of, paths[at - 1 : at + 1]))
        assert before == one, "a state that was left behind would not fit"


def test_what_a_function_does_not_take_is_left_out(tmp_path: Any) -> None:
    """Themes about something else keep their cases. Two bounds stand beside one shape."""

    def few(q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
        raise AssertionError

    names = ["kda-t1", "kda-wide", "kda-states-raw", "kda-reflected", "kda-lower-bound"]
    for fn in (few, make()):
        paths = case_paths(names, Contract(fn), str(tmp_path))
        one, wide, raw, *bounds = map(keys_of, paths)
        has = ["s0_scale" in one, "cu_seqlens" in wide, "scale" in raw]
        has.append(len({x.get("lower_bound") for x in bounds} - {None}) == 2)
        assert has == [fn is not few] * 4, has


def test_names_of_themes_are_names_of_no_other_case(tmp_path: Any) -> None:
    assert len({t.name for t in THEMES}) == len(THEMES)
    assert {s for t in THEMES for s in t.sets} == set(SETS)
    kernel = Contract(fixed, models=MODELS, gate="lower_bound")
    (path,) = case_paths("gdn-t65", kernel, str(tmp_path))
    assert keys_of(path)["lower_bound"] == str(LOWER_BOUND) and path.endswith("/gdn-t65.case")
    assert case_paths(["t65", path], kernel, str(tmp_path)) == ["t65", path]


def test_a_kernel_of_slots_alone_has_a_serving_set_that_it_computes(tmp_path: Any) -> None:
    def slots(q: Any, k: Any, v: Any, g: Any, beta: Any, pool: Any, **own: Any) -> Any:
        raise AssertionError

    def both(q: Any, k: Any, v: Any, g: Any, beta: Any, pool: Any, initial_state: Any) -> Any:
        raise AssertionError

    few, all_of = (
        case_paths("serving", Contract(fn, ("o", "pool"), ("kda",)), str(tmp_path))
        for fn in (slots, both)
    )
    assert 4 <= len(few) < len(all_of) and set(few) < set(all_of)
    assert all("session_slots" in keys_of(path) for path in few)


@pytest.mark.parametrize("model", MODELS)
def test_a_right_kernel_passes_the_smoke_set_of_its_recurrence(model: str) -> None:
    found = deltaproof.run(
        right(model),
        "smoke",
        base="fp32",
        outputs=("o", "final_state"),
        models=(model,),
        layouts=(),
    )
    assert found.passed, found.text
    assert list(found.verdicts().values()) == ["pass"] * 3


def test_a_right_kernel_passes_the_standard_and_the_serving_set() -> None:
    for name in ("standard", "serving"):
        found = deltaproof.run(
            right("gdn"),
            name,
            base="fp32",
            outputs=("o", "final_state"),
            models=("gdn",),
            layouts=(),
        )
        assert found.passed, found.text
        assert all(x == "pass" for x in found.verdicts().values())


@pytest.mark.parametrize(("gate", "base"), [("softplus", "fp16"), ("lower_bound", "fp32")])
def test_gradients_of_a_right_kernel_of_raw_gates_are_judged(gate: str, base: str) -> None:
    """Where gates kill, hold or spread, they neither vanish unallowed nor underflow."""
    form: dict[str, Any] = {"gate": gate, "beta": "sigmoid", "l2norm": True}

    def kernel(q: Any, k: Any, v: Any, g: Any, beta: Any, scale: float, **more: Any) -> Any:
        said = {"gate": gate, "beta_form": "sigmoid", "l2norm": True, "lower_bound": LOWER_BOUND}
        return make()(q, k, v, g, beta, scale, **said, **more)

    outputs = ("o", "dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias")
    own: dict[str, Any] = {"base": base, "models": ("gdn",), "outputs": outputs, "layouts": ()}
    names = ["gdn-killing", "gdn-no-decay", "gdn-heads"]
    found = deltaproof.run(kernel, names, **form, **own)
    assert found.passed, found.text


def test_a_function_of_one_width_is_asked_for_it() -> None:
    def kernel(q: Any, v: Any, **more: Any) -> Any:
        if (q.shape[-1], v.shape[-1]) != (128, 128):
            raise deltaproof.Unsupported("K = V = 128 alone")
        said = {"gate": "log", "beta_form": "plain", "l2norm": False, "lower_bound": 0}
        return make()(q, v=v, **(said | {"scale": 128**-0.5} | more))

    own: dict[str, Any] = {"base": "fp32", "models": ("gdn",), "outputs": ("o", "final_state")}
    names = ["gdn-t1", "gdn-t63", "gdn-packed-ones", "gdn-tails"]
    found = deltaproof.run(kernel, names, **own, layouts=())
    assert "3 of 4 cases were not served: widths=(128, 128) asks" in found.text
    found = deltaproof.run(kernel, names[:3], **own, layouts=("strided",), widths=(128, 128))
    assert list(found.verdicts().values()) == ["pass"] * 3, found.text
    assert found.layouts == {"strided": "pass"} and "not served" not in found.text
    for wrong in (128, (128,), (0, 64), ("128", 128)):
        with pytest.raises(ValueError, match="widths="):
            deltaproof.run(kernel, "smoke", **own, widths=wrong)
