"""Heads that are laid out otherwise: a gate per value channel, several query heads a key head."""

from typing import Any

import numpy as np
import pytest

import deltaproof
from recurrences import FORM, right, taking

F4 = np.float32
OWN: dict[str, Any] = {
    "base": "fp32",
    "outputs": ("o", "final_state"),
    "models": ("gdn",),
    "layouts": (),
}


def value_gates(fault: str = "") -> Any:
    """GDN whose gates decay columns of the state. Faults: they decay rows; one for all."""

    def kernel(
        q: Any, k: Any, v: Any, gv: Any, beta: Any, scale: float, initial_state: Any
    ) -> tuple[Any, Any]:
        S, o = initial_state[0].astype(F4), np.zeros_like(v)
        decay = np.exp(gv if fault != "one" else gv * 0 + gv.mean(-1, keepdims=True))
        for t in range(len(q)):
            rows = np.resize(decay[t], (len(S), S.shape[1]))[..., None]
            S = S * (rows if fault == "rows" else decay[t][:, None])
            e = beta[t][:, None] * (v[t] - np.einsum("hk,hkv->hv", k[t], S))
            S = S + k[t][..., None] * e[:, None]
            o[t] = F4(scale) * np.einsum("hk,hkv->hv", q[t], S)
        return o, S[None]

    return kernel


@pytest.mark.parametrize("fault", ["", "rows", "one"])
def test_a_gate_per_value_channel(fault: str) -> None:
    """fla#623."""
    found = deltaproof.run(value_gates(fault), "gdn-value-gates", **OWN)
    assert found.status == bool(fault) and len(found.verdicts()) == 1, found.text
    assert not fault or "token" in found.text, found.text


def test_value_gates_stand_in_the_set_of_a_function_that_takes_them() -> None:
    found = deltaproof.run(value_gates("rows"), "standard", **OWN)
    ran = [n for n, x in found.verdicts().items() if not x.startswith("skipped")]
    assert len(ran) == 1 and ran[0].startswith("gdn-value-gates") and found.status == 1


def queries(fault: str = "", n: int = 2) -> Any:
    """GDN of n query heads a key head. Fault: heads of q are tiled over those of k."""
    row = right("gdn")

    def kernel(x: dict[str, Any], initial_state: Any) -> Any:
        q, k, v = x["q"], x["k"], x["v"]
        o, H = np.zeros((len(v), q.shape[1], v.shape[-1]), F4), k.shape[1]
        for j in range(n):
            at = np.arange(H) + j * H if fault == "tiled" else np.arange(H) * n + j
            made = row(**x | {"q": q[:, at]}, **FORM, initial_state=initial_state)
            o[:, at] = made["o"]
        return o, made["final_state"]

    return taking(kernel, optional=("initial_state",))


@pytest.mark.parametrize("fault", ["", "tiled"])
def test_several_query_heads_a_key_head(fault: str) -> None:
    """flashinfer#3886."""
    cases = ["gdn-queries", "gdn-packed-inside"]
    found = deltaproof.run(queries(fault), cases, queries=2, **OWN)
    assert found.status == bool(fault), found.text
    assert list(found.verdicts().values())[0] == ("fail" if fault else "pass"), found.text
    found = deltaproof.run(queries(n=3), "gdn-t65", queries=3, **OWN)
    assert found.status == 2 and "grouped value heads" in found.text, found.text


def test_a_number_of_queries_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="queries=0: must be a whole number from 1 on"):
        deltaproof.run(queries(), "gdn-t65", queries=0, **OWN)
