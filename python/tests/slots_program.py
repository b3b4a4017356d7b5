"""A program of --serve whose states, those of convolutions too, lie in slots, or which replays
tokens from rings. Its argument is a fault: conv-in-read-slot, conv-of-next, conv-short, or one of
test_drafts.py or test_rings.py."""

import sys
from dataclasses import dataclass
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


@dataclass
class Ring:
    """Slots of rings [N], tokens that they hold [N]."""

    slot: Any
    held: Any
    fault: str = ""
    most: int = 5


def rings(
    x: dict[str, Any], cu: Any, pool: Any, read_slot: Any, write_slot: Any, ring: Ring
) -> dict[str, Any]:
    """GDN or KDA from the state of each sequence and the tokens of its ring. A ring holds rows of
    k, v, g, beta in float32, one token behind the other."""
    row = right("gdn" if x["g"].ndim == 2 else "kda")
    of_tokens = ("k", "v", "g", "beta")
    out, o = pool.astype(F4).copy(), np.zeros_like(x["v"], F4)
    sizes = [x[n][0].size for n in of_tokens]
    ends, rest = np.cumsum([0, *sizes]), {n: y for n, y in x.items() if n not in (*of_tokens, "q")}
    for i, (a, e) in enumerate(zip(cu, cu[1:], strict=False)):
        if read_slot[i] < 0:
            continue
        at = ring.slot[(i + 1) % len(ring.slot)] if ring.fault == "slot" else ring.slot[i]
        kept = out[at].reshape(-1)[: ring.most * ends[-1]].reshape(ring.most, -1)
        new = np.concatenate([x[n][a:e].reshape(e - a, -1).astype(F4) for n in of_tokens], 1)
        held = int(ring.held[i])
        old = kept[: max(held + {"late": 1, "early": -1}.get(ring.fault, 0), 0) if held else 0]
        if ring.fault == "stale" and held > 1:
            old = np.concatenate([old[:1], old[:1], old[2:]])
        rows = np.concatenate([old, new])
        one = {
            n: rows[:, p:q].reshape(-1, *x[n].shape[1:])
            for n, p, q in zip(of_tokens, ends, ends[1:], strict=False)
        }
        q = np.concatenate([np.zeros((len(old), *x["q"].shape[1:]), F4), x["q"][a:e]])
        made = row(q=q, **one, **rest, initial_state=out[read_slot[i]][None])
        o[a:e] = made["o"][len(old) :]
        if write_slot[i] >= 0:
            if ring.fault != "no state":
                out[write_slot[i]] = made["final_state"][0]
            continue
        if ring.fault == "state":
            out[read_slot[i]] = made["final_state"][0]
        flat = out[at].reshape(-1)
        for j, y in enumerate(new):
            place = (held + j) % (3 if ring.fault == "over" else ring.most)
            flat[place * ends[-1] : (place + 1) * ends[-1]] = y
    return {"o": o, "pool": out}


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
    if "ring_slot" in x:
        ring = Ring(x["ring_slot"], x["ring_tokens"], fault)
        given = tokens | form | of_heads
        return rings(given, cu, x["pool"], x["read_slot"], x["write_slot"], ring)
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


if __name__ == "__main__":
    main()
