"""The museum's outputs against packs: `run --limits` writes results, truth and limits of simulated
ranks with a deliberate fault, which are read as a pack."""

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from deltaproof.pack_readers import deltaproof_pack as reader
from deltaproof.program import ran
from deltaproof.tensors import load

LEVELS = ("row", "window", "rank", "tensor")  # of those that judge looks at, what a pack carries
RESULTS = ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "ds0")


def faults() -> list[str]:
    return [x.split()[0] for x in ran("list", "--faults").stdout.splitlines() if x.strip()]


def by_judge(tensor: dict[str, Any]) -> bool | None:
    """Is it red by its bound or a level that packs carry? None: within 1% of a limit."""
    found = tensor.get("expected") or {}
    shares = [float(tensor.get("ratio") or 0)]
    shares += [float(found[n]["ratio"]) / float(found[n]["limit"]) for n in LEVELS if n in found]
    return None if abs(max(shares) - 1) < 0.01 else max(shares) > 1


def compared(folder: str, run: Sequence[str]) -> Iterator[tuple[str, str, bool | None, list[str]]]:
    """(tensor, judge's verdict, the same by a pack's levels alone, what the pack finds)."""
    limits, record = (os.path.join(folder, n) for n in ("limits", "record"))
    ran("run", *run, f"--limits={limits}", f"--json={record}")
    if not os.path.exists(record):
        return
    x = load(limits)
    with open(record, encoding="utf-8") as f:
        tensors = [t for r in json.load(f)["runs"] for t in r.get("tensors", [])]
    for t in tensors:
        name = t["name"]
        if name not in RESULTS or f"{name}.result" not in x:
            continue
        pack = {f"limit.{n}": y for n, y in x.items()}
        pack |= {f"truth.{name}": x[f"{name}.truth"], f"truth.{name}.lo": x[f"{name}.truth_lo"]}
        yield name, t["verdict"], by_judge(t), reader.check(pack, name, x[f"{name}.result"])
