"""Public references (references.py): right ones pass the sets of their recurrence, declared and
not; where one is red, the fault is its own. Skipped, with the reason, where PyTorch, transformers
or FLA are missing."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch

import deltaproof
from references import OWN as RECURRENCES
from references import REFERENCES, Reference, kernel_of

CALLS: dict[str, Any] = {"base": "fp32", "device": "cpu", "batch": True, "layouts": ()}
CALLS |= {"limit": 120}
BY_NAME = {r.name: r for r in REFERENCES}


def judged(ref: Reference, cases: Any, declared: bool = False, **own: Any) -> Any:
    design = (f"chunk={ref.chunk}" if ref.chunk else "recurrent") if declared else None
    rows = RECURRENCES.get(ref.model)
    own = {"outputs": ("o", "final_state"), **CALLS, **own}
    own |= {"recurrence": rows} if rows else {"models": (ref.model,)}
    return deltaproof.run(kernel_of(ref), cases, design=design, **own)


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("ref", REFERENCES, ids=lambda r: r.name)
def test_a_reference_passes_the_sets_of_its_recurrence(ref: Reference, declared: bool) -> None:
    for name in ("standard", "serving"):
        found = judged(ref, name, declared)
        assert found.passed and not found.raised, found.text


# Chunk forms that take exp of sums above the diagonal, and mask the product: inf there, whose
# gradient is 0 * inf.
OVERFLOW = ("naive_chunk_kda", "naive_chunk_gdn2")


@pytest.mark.parametrize("ref", REFERENCES, ids=lambda r: r.name)
def test_gradients_of_a_reference_pass_the_training_set(ref: Reference) -> None:
    found = judged(ref, "training", autograd=True)
    if ref.name not in OVERFLOW:
        assert found.passed and not found.raised, found.text
        return
    red = {n.split(":")[0] for n, x in found.verdicts().items() if x != "pass"}
    assert red == {f"{ref.model}-{x}" for x in ("heads", "strong", "softplus-rates")}, red
    seen = [x for x in found.text.splitlines() if x.startswith("fail") and "are NaN or Inf" in x]
    assert len(seen) == len(red), found.text


RECURRENT = [r for r in REFERENCES if not r.chunk and r.where.startswith("fla") and r.model not in
             RECURRENCES]  # fmt: skip


@pytest.mark.parametrize("name", ["v", "g"])
@pytest.mark.parametrize("ref", RECURRENT, ids=lambda r: r.model)
def test_a_gradient_that_is_5_percent_off_is_red(ref: Reference, name: str) -> None:
    """In every recurrence."""
    fn = ref.load()

    def leaky(*given: Any, **named: Any) -> Any:
        places = {"v": 2, "k": 1, "g": 5 if ref.model == "dplr" else 3}
        given, at = (list(given), places[name])
        if at < len(given):
            given[at] = given[at].detach() * 0.05 + given[at] * 0.95
        else:
            named[name] = named[name].detach() * 0.05 + named[name] * 0.95
        return fn(*given, **named)

    own = {**CALLS, "outputs": ("o", "final_state"), "models": (ref.model,), "autograd": True}
    found = deltaproof.run(kernel_of(ref, leaky), f"{ref.model}-smoke", **own)
    assert found.status == 1 and f"(d{name}: " in found.text, found.text


def test_naive_kda_of_fla_has_nan_where_a_gate_is_minus_infinity() -> None:
    """Its chunk form computes exp(g - g) of sums that are -inf, which is NaN. A gate of -inf clears
    a channel, as in its own recurrent form."""
    assert judged(BY_NAME["naive_recurrent_kda"], "gate-minus-inf").passed
    found = judged(BY_NAME["naive_chunk_kda"], "gate-minus-inf")
    assert found.status == 1 and "NaN" in found.text, found.text
    q, k, v, beta = (torch.ones(1, 64, 1, 4) for _ in range(4))
    g = torch.zeros(1, 64, 1, 4)
    g[0, 5, 0, 0] = -np.inf
    both = [BY_NAME[n].load() for n in ("naive_recurrent_kda", "naive_chunk_kda")]
    o = [fn(q, k, v, g, beta[..., 0] / 4)[0] for fn in both]
    assert torch.isfinite(o[0]).all() and torch.isnan(o[1]).any()


def test_the_two_references_of_comba_are_two_recurrences() -> None:
    """FLA's recurrent form reads the state after its decay, the chunk form before."""
    named = {"comba": "naive_recurrent_comba", "comba-decayed": "naive_chunk_comba"}
    for rows, name in named.items():
        other = Reference(rows, "fla:comba", name)
        found = judged(other, "dplr-mild")
        assert found.status == 1, found.text


def test_a_reference_with_a_fault_is_red() -> None:
    """The wrappers hide nothing."""
    ref = BY_NAME["torch_recurrent_gated_delta_rule"]
    fn = ref.load()

    def late(q: Any, k: Any, v: Any, **own: Any) -> Any:
        return fn(q, k.roll(1, 1), v, **own)

    own = {**CALLS, "outputs": ("o", "final_state"), "models": (ref.model,)}
    found = deltaproof.run(kernel_of(ref, late), "gdn-smoke", **own)
    assert found.status == 1, found.text
