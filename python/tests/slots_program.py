"""A program of --serve whose states, those of convolutions too, lie in slots. Its argument is a
fault: conv-in-read-slot, conv-of-next, conv-short, or one of test_drafts.py."""

import sys
from typing import Any

import ml_dtypes  # noqa: F401 (numpy has bfloat16 by it)
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from recurrences import right, sigmoid

F4 = np.float32


def convolved(x: dict[str, Any], name: str, cu: Any, fault: str) -> tuple[Any, Any]:
    """q, k or v of the convolution, and its pool [slots, W-1, D]."""
    given, w = x[f"x_{name}"].astype(F4), x[f"w_{name}"].astype(F4)
    pool, W = x[f"conv_pool_{name}"].astype(F4), w.shape[1]
    out, y = pool.copy(), np.zeros_like(given)
    for n, (a, e) in enumerate(zip(cu, cu[1:], strict=False)):
        if x["read_slot"][n] < 0:
            continue
        rows = np.concatenate([pool[x["read_slot"][n]], given[a:e]])
        for t in range(e - a):
            y[a + t] = (rows[t : t + W] * w.T).sum(0)
        kept = rows[len(rows) - W + 1 :]
        if fault == "conv-short":
            kept = np.concatenate([0 * kept[:1], kept[1:]])
        slot = x["read_slot" if fault == "conv-in-read-slot" else "write_slot"][n]
        out[(slot + 1) % len(out) if fault == "conv-of-next" else slot] = kept
    return y * sigmoid(y), out


def answer(x: dict[str, Any], meta: dict[str, str], fault: str) -> dict[str, Any]:
    T = len(x["beta"])
    cu = [int(n) for n in x.get("cu_seqlens", [0, T])]
    form = {"gate": meta["gate"], "beta_form": meta["beta"], "l2norm": meta["l2norm"] == "1"}
    form |= {"scale": float(meta["scale"]), "lower_bound": 0}
    own = {}
    for name in ("q", "k", "v"):
        if f"x_{name}" in x:
            y, own[f"conv_pool_{name}"] = convolved(x, name, cu, fault)
            heads = x["beta"].shape[1] if name == "v" else y.shape[1] // x["pool"].shape[2]
            own[name] = x[name] = y.reshape(T, heads, -1)
    of_heads = {n: x[n] for n in ("A_log", "dt_bias") if n in x}
    tokens = {n: x[n] for n in ("q", "k", "v", "g", "beta")}
    o, pool = np.zeros((T, *own.get("v", x["v"]).shape[1:]), F4), x["pool"].astype(F4)
    out = pool.copy()
    for i, (a, e) in enumerate(zip(cu, cu[1:], strict=False)):
        if x["read_slot"][i] < 0:
            continue
        S, D = pool[x["read_slot"][i]], 0
        if "draft_slot" in x:
            D, at = x["draft_slot"].shape[1], x["accepted"][i] - 1
            S = pool[x["draft_slot"][i, max(at - 1, 0) if fault == "early" else at]]
        for t in range(a, e):
            one = {n: y[t : t + 1] for n, y in tokens.items()}
            made = right("gdn" if x["g"].ndim == 2 else "kda")(
                **one, **form, **of_heads, initial_state=S[None]
            )
            o[t], S = made["o"][0], made["final_state"][0]
            if e - a <= D:
                out[x["draft_slot"][i, t - a]] = S
        if e - a > D:
            out[x["draft_slot"][i, 0] if D else x["write_slot"][i]] = S
    return {"o": o, "pool": out, **own}


def main() -> None:
    fault = sys.argv[1] if len(sys.argv) > 1 else ""
    for line in sys.stdin:
        given, made = line.split()
        with safe_open(given, "np") as f:
            x = {n: f.get_tensor(n) for n in f.keys()}  # noqa: SIM118
            meta = f.metadata()
        save_file({n: np.ascontiguousarray(y) for n, y in answer(x, meta, fault).items()}, made)
        print("ok", flush=True)


main()
