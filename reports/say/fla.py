"""Whether the thresholds of FLA's tests see a run."""

import re
from typing import Any

NOT_COMPARED = re.compile("dv_local|dM|dH|dS_out|dh|dv_new|d(x|w|bias)(_[qkv])?")


def fla_limit(tensor: str) -> float | None:
    """The largest relative RMS error of the tensor; None: FLA's tests do not compare it."""
    if tensor in ("o", "final_state"):
        return 5e-3
    if tensor in ("dg", "dA_log", "ddt_bias"):
        return 2e-2
    return 8e-3 if tensor.startswith("d") and not NOT_COMPARED.fullmatch(tensor) else None


def fla_sees(run: dict[str, Any]) -> bool:
    limits = ((fla_limit(t["name"]), t["rel_fro"]) for t in run["tensors"])
    return any(limit and not (x is not None and float(x) <= limit) for limit, x in limits)
