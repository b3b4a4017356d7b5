"""Kernels that roll back by themselves, by the calls of vLLM and SGLang, and their errors. A call
has a slot for every drafted token, counts of accepted tokens, and trees."""

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import deltaproof
from deltaproof.contract import Contract
from deltaproof.program import environment, program
from deltaproof.themes import case_paths
from recurrences import FORM, boundaries, by_token, right, taking

F4 = np.float32
OWN: dict[str, Any] = {"base": "fp32", "models": ("gdn",), "layouts": (), "outputs": ("o", "pool")}


def verify(fault: str = "", trees: bool = False, seen: list[Any] | None = None) -> Any:
    """GDN over slots of drafted tokens. Faults:

    - it begins from the slot of the last draft, of the first, or of one too early
    - a token's state is written to the next one's slot, a longer call's state to the last slot
    - a row without tokens of its own writes
    - parents are ignored, or a rejected branch is 1% off"""
    row = right("gdn")

    def sequence(x: dict[str, Any], a: int, e: int, S: Any, parents: Any) -> tuple[Any, Any]:
        """o [n,HV,V] and the state behind every token [n,HV,K,V]."""
        o, states = [], []
        for j in range(e - a):
            p = j - 1 if parents is None or fault == "chain" else parents[a + j]
            state = (S if p < 0 else states[p])[None]
            made = row(**by_token(x, a + j), **FORM, initial_state=state)
            o.append(made["o"][0])
            states.append(made["final_state"][0])
        return np.stack(o), np.stack(states)

    def kernel(
        x: dict[str, Any], pool: Any, draft_slots: Any, accepted: Any, parents: Any = None
    ) -> Any:
        out, o, slots = pool.copy(), np.zeros_like(x["v"]), draft_slots
        D, cu = slots.shape[1], boundaries(x)
        for i, (a, e) in enumerate(zip(cu, cu[1:], strict=False)):
            at = {"last": D - 1, "early": max(accepted[i] - 2, 0), "first": 0}.get(fault)
            begin = slots[i, accepted[i] - 1 if at is None else at]
            if accepted[i] == 0:
                if fault == "padding":
                    out[slots[i, 0]] = 0
                continue
            if seen is not None:
                seen.append((i, e - a, accepted[i]))
            made, states = sequence(x, a, e, pool[begin], parents)
            if fault == "branch" and parents is not None and e - a > 1 and parents[a + 1] < 0:
                made[0], states[0] = made[0] * F4(1.01), states[0] * F4(1.01)
            o[a:e] = made
            if e - a > D:
                out[slots[i, -1 if fault == "long" else 0]] = states[-1]
                continue
            for j, S in enumerate(states):
                out[slots[i, (j + 1) % D if fault == "next" else j]] = S
        return o, out

    takes = ("pool", "draft_slots", "accepted", *(("parents",) if trees else ()))
    return taking(kernel, *takes)


@pytest.mark.parametrize("trees", [False, True])
def test_a_kernel_rolls_back_by_itself(trees: bool) -> None:
    """A window, a prompt and a single token come in one call; nothing is called again."""
    seen: list[Any] = []
    found = deltaproof.run(verify(trees=trees, seen=seen), "gdn-draft-slots", **OWN)
    assert found.passed, found.text
    places = {(0, 1, 4), (0, 4, 2)} if trees else {(0, 1, 2), (0, 4, 1)}
    assert {(1, 20, 1), *places} <= set(seen), seen
    assert found.record is not None
    judged = [t["name"] for t in found.record["runs"][0]["tensors"]]
    assert ("state_within" in judged) == (not trees) and "state_drafted" in judged, judged


@pytest.mark.parametrize(
    "fault, says",
    [("last", "NaN"), ("early", ""), ("first", ""), ("next", ""), ("long", ""),
     ("padding", "call")],
)  # fmt: skip
def test_what_a_rollback_gets_wrong_is_red(fault: str, says: str) -> None:
    """vllm#56419, #40738."""
    found = deltaproof.run(verify(fault), "gdn-draft-slots", **OWN)
    assert found.status == 1 and says in found.text, found.text
    assert "token" in found.text or "slot" in found.text


def test_parents_that_are_ignored_are_red() -> None:
    found = deltaproof.run(verify("chain", trees=True), "gdn-draft-slots", **OWN)
    assert found.status == 1 and "token" in found.text, found.text


def test_what_a_tree_makes_of_rejected_tokens_is_judged() -> None:
    """The first branch, on which nothing depends."""
    found = deltaproof.run(verify("branch", trees=True), "gdn-draft-slots", **OWN)
    assert found.status == 1 and "_drafted: " in found.text, found.text


def test_sessions_without_such_slots_are_skipped_with_the_reason() -> None:
    found = deltaproof.run(verify(), ["gdn-slots", "gdn-slots-prefix", "gdn-t1"], **OWN)
    why = list(found.verdicts().values())
    assert "a window of which no token is accepted" in why[0], why
    assert "slots of drafted tokens beside those of a prefix" in why[1], why
    assert "the function requires `pool`" in why[2], why


@pytest.mark.parametrize("fault", ["", "shifted", "of the first"])
def test_one_slot_with_a_list_of_checkpoints(fault: str) -> None:
    """As SGLang verifies: the states behind all drafted tokens, of which one is taken."""
    row = right("gdn")

    def step(x: dict[str, Any], initial_state: Any) -> Any:
        cu = boundaries(x)
        o, final, states = np.zeros_like(x["v"]), initial_state.astype(F4), []
        for i, (a, e) in enumerate(zip(cu, cu[1:], strict=False)):
            for t in range(a, e):
                made = row(**by_token(x, t), **FORM, initial_state=final[i][None])
                before, final[i], o[t] = final[i].copy(), made["final_state"][0], made["o"][0]
                states.append(before if fault == "shifted" else final[i].copy())
            if fault == "of the first" and e - a > 2:
                states[-1] = states[a - e]
        return {"o": o, "final_state": final, "states": np.stack(states)}

    own = OWN | {"outputs": ("o", "final_state", "states")}
    found = deltaproof.run(taking(step, "initial_state"), "gdn-drafts", **own)
    assert found.status == bool(fault), found.text
    assert found.record is not None
    names = [t["name"] for t in found.record["runs"][0]["tensors"]]
    assert "state_within" in names and (not fault or "token" in found.text), found.text


def test_prompts_and_single_tokens_come_in_one_call() -> None:
    row, lengths = right("gdn"), []

    def step(x: dict[str, Any], initial_state: Any) -> Any:
        lengths.append(tuple(int(n) for n in np.diff(x["cu_seqlens"])))
        return row(**x, **FORM, initial_state=initial_state)

    own = OWN | {"outputs": ("o", "final_state")}
    found = deltaproof.run(taking(step, optional=("initial_state",)), "gdn-staggered", **own)
    assert found.passed, found.text
    assert (20, 0, 0) in lengths and (1, 20, 0) in lengths, lengths


CONVOLVED = """reason = states of convolutions lie in slots, too
source = vllm#56196
op = step
T = 60
cu_seqlens = 0,22,40,60
H = 1
HV = 2
K = 8
V = 16
W = 4
gate = softplus
beta = sigmoid
l2norm = yes
g_mean = -3
session = 10,2,4-3,1,4-0,5,1
session_slots = 5
base = fp32
"""


@pytest.mark.parametrize("fault", ["", "conv-in-read-slot", "conv-of-next", "conv-short"])
def test_states_of_convolutions_lie_in_slots(fault: str, tmp_path: Any) -> None:
    """vllm#56196: one of them goes to another slot."""
    case = tmp_path / "convolved.case"
    case.write_text(CONVOLVED)
    here = os.path.dirname(os.path.abspath(__file__))
    served = f"{sys.executable} {here}/slots_program.py {fault}"
    done = subprocess.run(
        [program(), "run", str(case), "--base=fp32", "--writes=o,pool", f"--serve={served}"],
        capture_output=True, text=True, check=False, env=environment(),
    )  # fmt: skip
    assert done.returncode == bool(fault), done.stdout + done.stderr
    assert not fault or "conv_" in done.stdout, done.stdout
    assert not fault or "call" in done.stdout


def test_a_program_is_told_the_slots_of_drafted_tokens(tmp_path: Any) -> None:
    contract = Contract(verify(), outputs=("o", "pool"), models=("gdn",))
    (case,) = case_paths("gdn-draft-slots", contract, str(tmp_path))
    here = os.path.dirname(os.path.abspath(__file__))
    for fault in ("", "early"):
        served = f"{sys.executable} {here}/slots_program.py {fault}"
        done = subprocess.run(
            [program(), "run", case, "--base=fp32", "--writes=o,pool,drafts", f"--serve={served}"],
            capture_output=True, text=True, check=False, env=environment(),
        )  # fmt: skip
        assert done.returncode == bool(fault), done.stdout + done.stderr
