"""Prices of an exchange of states and of a cut inside a card, by the program's formulas."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .program import ran


def _listed(*options: str) -> dict[str, Any]:
    done = ran("list", *options, "--json=-")
    if done.returncode:
        raise ValueError(done.stderr.strip())
    return json.loads(done.stdout)


def pieces(
    lengths: Sequence[int],
    heads: int,
    device: str | int = "h200",
    *,
    K: int = 128,
    V: int = 128,
    one_gate: bool = False,
) -> dict[str, Any]:
    """The number of pieces into which a card cuts sequences of so many tokens. The key "guards" is
    by cuLA's published guards, "forward" and "backward" by our kernels' rule. The key "difference"
    says why they differ.

    device: a100, h100, h200, b200, gb200, or its number of multiprocessors."""
    sizes = [f"--heads={int(heads)}", f"--K={int(K)}", f"--V={int(V)}", f"--device={device}"]
    tokens = ",".join(str(int(n)) for n in lengths)
    return _listed(f"--pieces={tokens}", *sizes, *(["--one-gate"] if one_gate else []))


def exchange_prices(
    ranks: Sequence[int], heads: int, tokens: int, *, K: int = 128, V: int = 128
) -> dict[str, Any]:
    """Predicted messages, bytes, buffer a rank and time of every exchange of states, for `tokens`
    tokens a rank. Also of every split into cp x tp ranks (`deltaproof list --exchanges`)."""
    of = ",".join(str(int(n)) for n in ranks)
    sizes = [f"--heads={int(heads)}", f"--tokens={int(tokens)}", f"--K={int(K)}", f"--V={int(V)}"]
    return _listed("--exchanges", f"--ranks={of}", *sizes)
