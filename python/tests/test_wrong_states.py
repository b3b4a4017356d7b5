"""A wrong state of a session is named in the call that left it, whatever is wrong with it and
whichever call that is. States are returned by calls, in a pool, or of a kernel in bf16."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import deltaproof
from recurrences import FORM, in_slots, right

F4 = np.float32
CASE = """reason = a wrong state is named in the call that left it
source = a server's state cache
op = gdn
T = 44
cu_seqlens = 0,16,28,44
HV = 2
K = 16
V = 16
g_scale = 0.02
s0_scale = 0.5
session = 8,3,2x1,6
"""
CALLS = 5
FAULTS = ("swapped", "stale", "turned", "heads", "5 percent", "a column")


def spoilt(fault: str, before: Any, S: Any, live: Any) -> Any:
    """States [N,HV,K,V] as they are left; live [N]: who has tokens."""
    S = S.copy()
    at = int(np.flatnonzero(live)[0])
    if fault == "swapped":
        S[[at, (at + 1) % len(S)]] = S[[(at + 1) % len(S), at]]
    if fault == "stale":
        S[at] = before[at]
    if fault == "turned":
        S[at] = S[at].swapaxes(-1, -2)
    if fault == "heads":
        S[at] = S[at, ::-1]
    if fault == "5 percent":
        S[at] *= F4(1.05)
    if fault == "a column":
        S[at, 0, :, 3] = 0
    return S


def serving(fault: str, wrong: int, bf16: bool = False) -> Any:
    """GDN that leaves one wrong state, in call `wrong`, counted from 0."""
    row, calls = right("gdn"), []

    def live(x: dict[str, Any]) -> Any:
        return np.diff(x["cu_seqlens"]) > 0

    def made(x: dict[str, Any], states: Any) -> tuple[Any, Any]:
        out = row(**x, **FORM, initial_state=states)
        final = out["final_state"]
        if len(calls) == wrong:
            final = spoilt(fault, states, final, live(x))
        calls.append(len(x["q"]))
        o = out["o"].astype(ml_dtypes.bfloat16) if bf16 else out["o"]
        return o, final

    return in_slots(made)


def judged(kernel: Any, case: Any, base: str = "fp32") -> Any:
    own: dict[str, Any] = {"models": ("gdn",), "layouts": ()}
    own["outputs"] = ("o", "final_state", "pool")
    return deltaproof.run(kernel, str(case), base=base, **own)


@pytest.mark.parametrize("slots", [0, 5])
@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_the_first_wrong_call_is_named(fault: str, slots: int, tmp_path: Any) -> None:
    """Two sequences whose states change places in each of the calls, others in some."""
    case = tmp_path / "states.case"
    case.write_text(CASE + (f"session_slots = {slots}\n" if slots else ""))
    for call in range(CALLS) if fault == "swapped" else (0, 2, CALLS - 1)[: 3 if fault else 1]:
        found = judged(serving(fault, call), case)
        says = f"call {call + 1} is the first that leaves a wrong state: sequence "
        assert found.passed == (not fault), (call, found.text)
        assert (says in found.text) == bool(fault), (call, found.text)


@pytest.mark.parametrize("fault", ["swapped", "stale", "heads"])
def test_the_first_wrong_call_of_a_kernel_in_bf16_is_named(fault: str, tmp_path: Any) -> None:
    case = tmp_path / "states.case"
    case.write_text(CASE)
    found = judged(serving(fault, 3, bf16=True), case, "bf16")
    says = "call 4 is the first that leaves a wrong state: sequence "
    assert found.status == 1 and says in found.text, found.text
