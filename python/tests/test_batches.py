"""Functions with an axis of batch: sequences of one length are its rows, and sequences of any
lengths where the function takes a mask."""

from typing import Any

import numpy as np
import pytest

import deltaproof
from recurrences import right
from test_sets import fixed

OWN: dict[str, Any] = {
    "base": "fp32",
    "outputs": ("o", "final_state"),
    "models": ("gdn",),
    "layouts": (),
}
FORM: dict[str, Any] = {"lower_bound": 0}
TOKENS = ("q", "k", "v", "g", "beta")


def rows_of(fault: str, masks: bool = False) -> Any:
    """GDN over the rows of a batch, one by one. Faults: every row begins from the first one's
    state; padding is computed like tokens; its o is not zero."""
    row = right("gdn")
    seen: list[tuple[int, ...]] = []

    def batch(
        q: Any,
        k: Any,
        v: Any,
        g: Any,
        beta: Any,
        scale: float,
        gate: str,
        beta_form: str,
        l2norm: bool,
        A_log: Any = None,
        dt_bias: Any = None,
        initial_state: Any = None,
        attention_mask: Any = None,
    ) -> Any:
        seen.append(q.shape)
        how = {"scale": scale, "gate": gate, "beta_form": beta_form, "l2norm": l2norm}
        x = dict(zip(TOKENS, (q, k, v, g, beta), strict=True))
        o, states = np.full_like(v, 1 if fault == "not zero" else 0), []
        for b in range(len(q)):
            live = attention_mask[b] > 0 if masks and fault != "runs" else slice(None)
            state = None
            if initial_state is not None:
                state = initial_state[0 if fault == "first state" else b][None]
            own = {n: y[b][live] for n, y in x.items()}
            made = row(**own, **how, **FORM, A_log=A_log, dt_bias=dt_bias, initial_state=state)
            o[b][live] = made["o"]
            states.append(made["final_state"][0])
        return o, np.stack(states)

    def unmasked(
        q: Any,
        k: Any,
        v: Any,
        g: Any,
        beta: Any,
        scale: float,
        gate: str,
        beta_form: str,
        l2norm: bool,
        A_log: Any = None,
        dt_bias: Any = None,
        initial_state: Any = None,
    ) -> Any:
        return batch(
            q, k, v, g, beta, scale, gate, beta_form, l2norm, A_log, dt_bias, initial_state
        )

    return (batch if masks else unmasked), seen


def test_sequences_of_one_length_are_rows_of_a_batch() -> None:
    kernel, seen = rows_of("")
    found = deltaproof.run(kernel, ["gdn-rows", "gdn-packed-ones"], batch=True, **OWN)
    assert found.passed and {(3, 70, 1, 16), (8, 1, 1, 16)} <= set(seen), found.text
    found = deltaproof.run(kernel, "gdn-packed-inside", batch=True, **OWN)
    assert "takes no `cu_seqlens`" in found.text
    found = deltaproof.run(rows_of("first state")[0], "gdn-rows", batch=True, **OWN)
    assert found.status == 1 and "sequence" in found.text, found.text


@pytest.mark.parametrize("fault", ["", "runs", "not zero"])
def test_a_mask_leaves_out_what_stands_in_front_of_a_row(fault: str) -> None:
    for masked in ("any", "zero"):
        kernel, seen = rows_of(fault, masks=True)
        found = deltaproof.run(
            kernel, ["gdn-packed-inside", "gdn-packed-empty", "gdn-t65"], masked=masked, **OWN
        )
        right = not fault or (fault, masked) == ("not zero", "any")
        assert found.passed == right, found.text
        assert seen[0][:2] == (4, 76)
    if fault == "not zero":
        assert any("is not 0 where attention_mask is" in x for x in found.raised)


def test_a_setting_of_masks_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="masked='nan': must be 'any' or 'zero'"):
        deltaproof.run(fixed, "gdn-t1", masked="nan", **OWN)
