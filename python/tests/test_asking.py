"""A function is asked what it serves before truth and draws are computed, and is called no more
often for that."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deltaproof
from kernels import gla, in_slots, kda

OWN: dict[str, Any] = {"base": "fp32", "outputs": ("o", "final_state"), "layouts": ()}


def kept(folder: Path) -> list[Path]:
    return [x for x in folder.rglob("*") if x.is_file()]


@pytest.mark.parametrize("case", ["t65", "session-slots"])
def test_what_is_refused_costs_no_truth(case: str, tmp_path: Path) -> None:
    found = deltaproof.run(gla, case, models=("gla",), cache=str(tmp_path), **OWN)
    assert list(found.verdicts().values())[0].startswith("skipped: "), found.text
    assert not kept(tmp_path)


def test_what_is_served_is_called_once(tmp_path: Path) -> None:
    calls = []

    def counted(q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any = None) -> Any:
        calls.append(np.asarray(q).tobytes())
        return kda(q, k, v, g, beta, initial_state)

    found = deltaproof.run(counted, "t65", cache=str(tmp_path), **OWN)
    assert found.passed and len(calls) == 3, found.text  # the first run is made again, twice
    assert kept(tmp_path)


def test_every_call_of_a_session_is_made_once(tmp_path: Path) -> None:
    calls = []

    def counted(q: Any, k: Any, v: Any, g: Any, beta: Any, **slots: Any) -> Any:
        slots.pop("scale", None)
        calls.append(np.asarray(q).tobytes())
        return in_slots(q, k, v, g, beta, **slots)

    own = OWN | {"outputs": ("o", "pool")}
    found = deltaproof.run(counted, "session-slots", cache=str(tmp_path), **own)
    assert found.passed and len(set(calls)) == len(calls), found.text
