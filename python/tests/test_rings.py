"""Kernels that write their states in some calls alone and replay the tokens since from a ring.
Right and wrong ones are functions, and a program that reads files."""

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
from recurrences import FORM, boundaries, taking
from slots_program import Ring, rings

F4 = np.float32
CASE = """reason = tokens are replayed from a ring in place of a state write
source = ReplaySSM
op = {op}
T = 70
cu_seqlens = 0,26,26,44,70
H = 1
HV = 2
K = 16
V = 16
g_scale = 0.02
s0_scale = 0.5
session = 9,2,4x1,3,1
session_slots = 6
session_ring = 5
base = fp32
"""
# Eleven tokens that all sequences share: a state of them lies in a slot that stays.
SHARED = CASE.replace("0,26,26,44,70", "0,26,44,70") + "session_prefix = 11\n"
FAULTS = ("late", "early", "stale", "over", "state", "no state", "slot")


def replaying(fault: str = "", seen: list[Any] | None = None) -> Any:
    def kernel(
        x: dict[str, Any], pool: Any, read_slot: Any, write_slot: Any, ring_slot: Any,
        ring_tokens: Any,
    ) -> Any:  # fmt: skip
        if seen is not None:
            seen.append((tuple(ring_tokens), tuple(write_slot)))
        ring = Ring(ring_slot, ring_tokens, fault)
        own = {n: y for n, y in (x | FORM).items() if n != "cu_seqlens"}
        return rings(own, boundaries(x), pool, read_slot, write_slot, ring)

    return taking(kernel, "pool", "read_slot", "write_slot", "ring_slot", "ring_tokens")


def judged(tmp_path: Any, kernel: Any, op: str = "gdn", text: str = CASE) -> Any:
    case = tmp_path / "ring.case"
    case.write_text(text.format(op=op))
    own: dict[str, Any] = {"models": (op,), "layouts": (), "outputs": ("o", "pool")}
    return deltaproof.run(kernel, str(case), base="fp32", design="recurrent", **own)


@pytest.mark.parametrize("op", ["gdn", "kda"])
def test_a_kernel_that_replays_tokens_passes(op: str, tmp_path: Any) -> None:
    seen: list[Any] = []
    found = judged(tmp_path, replaying(seen=seen), op)
    assert found.passed, found.text
    assert {n for held, _ in seen for n in held} == set(range(6)), seen
    assert any(w < 0 and h for held, write in seen for h, w in zip(held, write, strict=True))


@pytest.mark.parametrize("op", ["gdn", "kda"])
def test_continuations_of_a_prefix_replay_tokens_from_its_slot(op: str, tmp_path: Any) -> None:
    seen: list[Any] = []
    found = judged(tmp_path, replaying(seen=seen), op, SHARED)
    assert found.passed, found.text
    behind = [(held, write) for held, write in seen if all(w < 0 for w in write)]
    assert any(all(held) for held, _ in behind), seen
    for fault in FAULTS[:-1]:  # rings that change places are none, while every sequence has tokens
        found = judged(tmp_path, replaying(fault), op, SHARED)
        assert found.status == 1, (fault, found.text)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_ring_gets_wrong_is_red(fault: str, tmp_path: Any) -> None:
    """Replays one token too many or too few, the tokens of before a flush, a ring one token short,
    or the next sequence's ring. Writes the state in each call, or never."""
    found = judged(tmp_path, replaying(fault))
    assert found.status == 1, found.text
    says = "pool: slot" if fault == "state" else "call"
    assert says in found.text, found.text


@pytest.mark.parametrize("case", ["gdn-ring", "gdn-ring-prefix"])
def test_the_serving_set_has_a_ring(case: str, tmp_path: Any) -> None:
    contract = Contract(replaying(), outputs=("o", "pool"), models=("gdn",), base="fp32")
    paths = case_paths("serving", contract, str(tmp_path))
    assert any(x.endswith(f"/{case}.case") for x in paths)
    own: dict[str, Any] = {"models": ("gdn",), "layouts": (), "outputs": ("o", "pool")}
    found = deltaproof.run(replaying(), case, base="fp32", **own)
    assert found.passed, found.text


def test_a_kernel_without_rings_gets_its_states(tmp_path: Any) -> None:
    from test_stored_states import storing

    case = tmp_path / "ring.case"
    case.write_text(CASE.format(op="gdn"))
    own: dict[str, Any] = {"models": ("gdn",), "layouts": ()}
    own["outputs"] = ("o", "final_state", "pool")
    found = deltaproof.run(storing(lambda S: S), str(case), base="fp32", **own)
    assert found.passed, found.text


@pytest.mark.parametrize("text", [CASE, SHARED], ids=["", "prefix"])
@pytest.mark.parametrize("fault", ["", "late", "over"])
def test_a_program_replays_tokens_from_files(fault: str, text: str, tmp_path: Any) -> None:
    case = tmp_path / "ring.case"
    case.write_text(text.format(op="gdn"))
    here = os.path.dirname(os.path.abspath(__file__))
    served = f"{sys.executable} {here}/slots_program.py {fault}"
    done = subprocess.run(
        [program(), "run", str(case), "--base=fp32", "--writes=o,pool,ring",
         f"--serve={served}"],
        capture_output=True, text=True, check=False, env=environment(),
    )  # fmt: skip
    assert done.returncode == bool(fault), done.stdout + done.stderr


@pytest.mark.parametrize(
    "change, says",
    [
        ("session_slots = 0", "session_slots is missing"),
        ("session = 9,4-2,1", "beside drafted tokens"),
    ],
)
def test_sessions_without_rings_are_refused(change: str, says: str, tmp_path: Any) -> None:
    name = change.split(" ")[0]
    lines = [x for x in CASE.format(op="gdn").splitlines() if not x.startswith(name + " ")]
    case = tmp_path / "ring.case"
    case.write_text("\n".join([*lines, change]) + "\n")
    done = subprocess.run(
        [program(), "run", str(case)], capture_output=True, text=True, check=False,
        env=environment(),
    )  # fmt: skip
    assert done.returncode == 2 and says in done.stdout + done.stderr, done
