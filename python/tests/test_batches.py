"""Functions with an axis of batch: sequences of one length are its rows, and sequences of any
lengths where the function takes a mask."""

import ctypes
import inspect
from typing import Any

import numpy as np
import pytest

import deltaproof
from recurrences import FORM, TOKENS, boundaries, right, taking
from test_sets import fixed

OWN: dict[str, Any] = {
    "base": "fp32",
    "outputs": ("o", "final_state"),
    "models": ("gdn",),
    "layouts": (),
}


def rows_of(fault: str, masks: bool = False) -> Any:
    """GDN over the rows of a batch, one by one. Faults: every row begins from the first one's
    state or by its strides; padding is computed like tokens; its o is not zero."""
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
        if fault == "strides":
            dense = (q.shape[1] * q.strides[1], *q.strides[1:])
            q = np.lib.stride_tricks.as_strided(q, strides=dense)
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

    if not masks:
        own = inspect.signature(batch)
        fewer = [x for x in own.parameters.values() if x.name != "attention_mask"]
        batch.__signature__ = own.replace(parameters=fewer)  # type: ignore[attr-defined]
    return batch, seen


def test_sequences_of_one_length_are_rows_of_a_batch() -> None:
    kernel, seen = rows_of("")
    found = deltaproof.run(kernel, ["gdn-rows", "gdn-packed-ones"], batch=True, **OWN)
    assert found.passed and {(3, 70, 2, 16), (65, 1, 4, 16)} <= set(seen), found.text
    found = deltaproof.run(kernel, "gdn-packed-inside", batch=True, **OWN)
    assert "takes no `cu_seqlens`" in found.text
    found = deltaproof.run(rows_of("first state")[0], "gdn-rows", batch=True, **OWN)
    assert found.status == 1 and "sequence" in found.text, found.text
    for fault in ("", "strides"):
        found = deltaproof.run(
            rows_of(fault)[0], "gdn-rows", batch=True, **OWN | {"layouts": ("heads-first",)}
        )
        assert found.layouts == {"heads-first": "fail" if fault else "pass"}, found.text
        assert list(found.verdicts().values()) == ["pass"]


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


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("dirty", [False, True])
def test_what_lies_where_no_state_is_means_nothing(pool: bool, dirty: bool) -> None:
    """vllm#51562: a chunk of one token is taken for a decode step, and begins from what is
    there."""
    row = right("gdn")
    seen: list[Any] = []

    def step(x: dict[str, Any], has: Any, states: Any) -> Any:
        lengths = np.diff(boundaries(x))
        seen.append(list(has))
        live = [h or (dirty and n == 1) for h, n in zip(has, lengths, strict=True)]
        states = np.where(np.array(live)[:, None, None, None], states, 0).astype(np.float32)
        made = row(**x, **FORM, initial_state=states)
        return made["o"], made["final_state"]

    def plain(x: dict[str, Any], initial_state: Any, has_initial_state: Any) -> Any:
        return step(x, has_initial_state, initial_state)

    def slots(
        x: dict[str, Any], pool: Any, read_slot: Any, write_slot: Any, has_initial_state: Any
    ) -> Any:
        o, final = step(x, has_initial_state, pool[read_slot])
        out, live = pool.copy(), read_slot >= 0
        out[write_slot[live]] = final[live]
        return o, out

    in_slots = taking(slots, "pool", "read_slot", "write_slot", "has_initial_state")
    kernel = in_slots if pool else taking(plain, "initial_state", "has_initial_state")
    own = {**OWN, "outputs": ("o", "pool" if pool else "final_state")}
    name = "gdn-first-one-slots" if pool else "gdn-first-one"
    found = deltaproof.run(kernel, name, **own)
    assert found.passed == (not dirty), found.text
    assert list(seen[0]) == [False] * 3
    if dirty:
        assert "token 0" in found.text and "NaN" in found.text, found.text


@pytest.mark.parametrize("tokens, call", [(100, 1), (92, 2)])
def test_the_call_that_leaves_a_wrong_state_is_named(tokens: int, call: int) -> None:
    """Two sequences change their states: o is wrong one call later, or never."""
    row = right("gdn")

    def swaps(x: dict[str, Any], initial_state: Any) -> Any:
        made = row(**x, **FORM, initial_state=initial_state)
        final = made["final_state"]
        return made["o"], final[::-1].copy() if len(x["q"]) == tokens else final

    kernel = taking(swaps, optional=("initial_state",))
    found = deltaproof.run(kernel, "gdn-pieces", **OWN)
    says = f"call {call} is the first that leaves a wrong state: sequence 0, head 0"
    assert found.status == 1 and says in found.text, found.text


@pytest.mark.parametrize("bits", [32, 64])
def test_an_offset_of_32_bits_wraps_in_a_far_layout(bits: int) -> None:
    """mamba#884, #1015, vllm#35275."""
    row = right("kda")

    def by_offsets(q: Any, k: Any, v: Any, g: Any, beta: Any, scale: float) -> Any:
        start, item = v.ctypes.data, v.itemsize
        taken = np.empty(v.shape, v.dtype)
        for t in range(len(v)):
            offset = (t * v.strides[0] // item + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)
            at = (ctypes.c_char * (v[t].size * item)).from_address(start + offset * item)
            taken[t] = np.frombuffer(at, v.dtype).reshape(v[t].shape)
        form = {"gate": "log", "beta_form": "plain", "l2norm": False}
        return row(q, k, taken, g, scale, lower_bound=0, beta=beta, **form)["o"]

    own = {**OWN, "models": ("kda",), "outputs": ("o",), "layouts": ("offset", "far")}
    found = deltaproof.run(by_offsets, "beta-zero", **own)
    assert found.layouts == {"offset": "pass", "far": "pass" if bits == 64 else "fail"}
