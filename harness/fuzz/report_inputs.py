"""Changed records for the fuzzers of the report's readers: what fuzz_report.py (atheris) and
bulk_report.py (without it) try.

    change(places(x), rng, keys)    changes one container of x; returns what can be taken back
"""

import copy
import random
from dataclasses import dataclass
from typing import Any

VALUES: list[Any] = [None, True, 0, 1, -1, 2, 3, 64, 4096, 4097, 2**53, 2**63, 10**30]
VALUES += [0.0, 0.5, 1.0, 1e-7, 1e-300, 1e300, -1.0]
VALUES += ["", "nan", "inf", "-inf", "pass", "fail", "skipped", "unjudged", "error"]
VALUES += ["fp32", "bf16", "tf32rz", "fp64", "allgather", "ring", "sim", "cuda", "files"]
VALUES += ["o", "S_in", "dq", "reflect", "mild", "chain", "kda", "conv", "step"]
VALUES += ["$", "a\nb", "\ud800", "expected", "bound", "exact", "window"]
VALUES += [[], {}, [0.1], [None], [[0.1]], [[0.1], [0.2, 0.3]]]
MARKUP = ("<i7>", 'x" onload="')  # must not stand in a page as they are
VALUES += MARKUP


def places(x: Any) -> list[Any]:
    """Every object and list in x, x first."""
    found = []
    if isinstance(x, (dict, list)):
        found.append(x)
        for v in x.values() if isinstance(x, dict) else x:
            found += places(v)
    return found


def names(x: Any) -> set[str]:
    """The names of all fields in x."""
    return {k for at in places(x) if isinstance(at, dict) for k in at}


def _change_object(at: dict[str, Any], rng: random.Random, keys: list[str]) -> None:
    key = rng.choice(list(at) or keys) if rng.random() < 0.7 else rng.choice(keys)
    if rng.random() < 0.15:
        at.pop(key, None)
    else:
        at[key] = copy.deepcopy(rng.choice(VALUES))


def _change_list(at: list[Any], rng: random.Random) -> None:
    how = rng.random() if at else 1.0
    if how < 0.3:
        at.append(copy.deepcopy(rng.choice(at)))
    elif how < 0.5:
        at.pop(rng.randrange(len(at)))
    elif at:
        at[rng.randrange(len(at))] = copy.deepcopy(rng.choice(VALUES))
    else:
        at.append(copy.deepcopy(rng.choice(VALUES)))


@dataclass
class Change:
    """One container, and what it held before."""

    at: Any
    before: Any

    def undo(self) -> None:
        self.at.clear()
        if isinstance(self.at, dict):
            self.at.update(self.before)
        else:
            self.at.extend(self.before)

    def markup(self) -> bool:
        """Whether the container holds more of MARKUP than before."""
        return _markup_in(self.at) > _markup_in(self.before)


def _markup_in(at: Any) -> int:
    values = at.values() if isinstance(at, dict) else at
    return sum(isinstance(v, str) and v in MARKUP for v in values)


def change(of: list[Any], rng: random.Random, keys: list[str]) -> Change:
    """One change in one of the containers `of`."""
    at = rng.choice(of)
    before = at.copy()
    if isinstance(at, dict):
        _change_object(at, rng, keys)
    else:
        _change_list(at, rng)
    return Change(at, before)
