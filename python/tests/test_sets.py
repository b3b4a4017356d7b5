"""The sets of cases that `run` knows by name: enough of them for every recurrence, in the form that
a function computes. Right kernels pass them."""

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


@pytest.mark.parametrize("gate", ["softplus", "lower_bound"])
@pytest.mark.parametrize("base", ["fp16", "fp32"])
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
