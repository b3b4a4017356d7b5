#!/usr/bin/env python3
"""A program to copy: the forward step recurrence of ref/math.md b in fp32 with numpy, as a subject.

    deltaproof run smoke-kda --base fp32 --run 'python3 harness/subject/example_program.py IN OUT'
    deltaproof check smoke-kda --base fp32 --serve 'python3 harness/subject/example_program.py'

With two paths it answers one call; without, one call for each line that it reads, until its input
ends. Its contract: harness/library/command.h."""

import json
import sys

import numpy as np

Arrays = dict[str, np.ndarray]
Meta = dict[str, str]
UNSUPPORTED = 77  # exit status: this problem is not for us


class Unsupported(Exception):
    pass


def read(path: str) -> tuple[Arrays, Meta]:
    """{name: array}, and the metadata, of a safetensors file."""
    with open(path, "rb") as f:
        data = f.read()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    meta = header.pop("__metadata__", {})
    kinds = {"F64": "<f8", "F32": "<f4", "BF16": "<u2", "I64": "<i8"}
    tensors = {}
    for name, t in header.items():
        a, b = (8 + size + x for x in t["data_offsets"])
        x = np.frombuffer(data[a:b], kinds[t["dtype"]])
        if t["dtype"] == "BF16":  # the upper half of an fp32
            x = (x.astype("<u4") << 16).view("<f4")
        tensors[name] = x.reshape(t["shape"])
    return tensors, meta


def write(path: str, tensors: Arrays, meta: Meta) -> None:
    """fp32 tensors as a safetensors file."""
    header, parts, at = {"__metadata__": meta}, [], 0
    for name, x in tensors.items():
        parts.append(np.ascontiguousarray(x, "<f4").tobytes())
        header[name] = {
            "dtype": "F32",
            "shape": x.shape,
            "data_offsets": [at, at + len(parts[-1])],
        }
        at += len(parts[-1])
    head = json.dumps(header).encode()
    with open(path, "wb") as f:
        f.write(len(head).to_bytes(8, "little") + head + b"".join(parts))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def activated(x: Arrays, meta: Meta, K: int) -> tuple[np.ndarray, ...]:
    """q, k, log decay and beta (GDN-2, GLA, SSD: 1) as the recurrence takes them."""
    q, k, g = (x[n].astype("f4") for n in ("q", "k", "g"))
    beta = x["beta"].astype("f4") if "beta" in x else np.ones(x["v"].shape[:2], "f4")
    if meta["l2norm"] == "1":
        q, k = (y / np.sqrt((y * y).sum(-1, keepdims=True) + np.float32(1e-6)) for y in (q, k))
    if g.ndim == 2:  # GDN: one gate a head
        g = g[:, :, None]
    if meta["gate"] != "log":
        A = np.exp(x["A_log"].astype("f4"))[:, None] if "A_log" in x else np.float32(1)
        g = g + (x["dt_bias"].astype("f4").reshape(g.shape[1:]) if "dt_bias" in x else 0)
        if meta["gate"] == "softplus":
            g = -A * np.logaddexp(np.float32(0), g)
        else:
            g = np.float32(meta["lower_bound"]) * sigmoid(A * g)
    if meta["beta"] not in ("plain", "none"):
        beta = sigmoid(beta) * np.float32(2 if meta["beta"] == "sigmoid2" else 1)
    return q, k, np.broadcast_to(g, (*g.shape[:2], K)), beta


def convolved(x: Arrays, meta: Meta, name: str) -> tuple[np.ndarray, Arrays]:
    """q, k or v [T, D] of the causal convolution of x_q .., and the last W - 1 inputs of every
    sequence. The inputs before the call are conv_state_q .. [N, W - 1, D], or conv_pool_q ..
    [slots, W - 1, D] in slots."""
    x_, w = x[f"x_{name}"].astype("f4"), x[f"w_{name}"].astype("f4")
    T, W = len(x_), w.shape[1]
    cu = x["cu_seqlens"].tolist() if "cu_seqlens" in x else [0, T]
    kind, own = ("pool" if "pool" in x else "state"), np.arange(len(cu) - 1)
    reads, writes = (x.get(n, own) for n in ("read_slot", "write_slot"))
    none = np.zeros((len(cu) - 1, W - 1, x_.shape[1]), "f4")
    before = x.get(f"conv_{kind}_{name}", none).astype("f4")
    y, after = np.zeros_like(x_), before.copy()
    for n, (first, end) in enumerate(zip(cu, cu[1:], strict=False)):
        if reads[n] < 0:
            continue
        all_ = np.concatenate([before[reads[n]], x_[first:end]])
        for t in range(end - first):
            y[first + t] = np.einsum("wd,dw->d", all_[t : t + W], w) + x.get(f"bias_{name}", 0)
        after[writes[n]] = all_[len(all_) - (W - 1) :]
    return y * sigmoid(y) if meta["activation"] == "silu" else y, {f"conv_{kind}_{name}": after}


def with_convolutions(x: Arrays, meta: Meta) -> Arrays:
    """forward after the convolutions of a layer; also their results and the states that they pass
    on."""
    K = x["g"].shape[2]
    own, x = {}, dict(x)
    for name in ("q", "k", "v"):
        if f"x_{name}" in x:
            y, handed_on = convolved(x, meta, name)
            own |= handed_on
            heads = x["beta"].shape[1] if name == "v" else y.shape[1] // K
            own[name] = x[name] = y.reshape(len(y), heads, -1)
    return forward(x, meta) | own


def slots(x: Arrays, sequences: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, str]:
    """The array of states [slots, HV, K, V] to begin from and to write to. Then the slot that each
    sequence reads and the one that it writes (-1: padding), and the array's name in OUT."""
    if "pool" in x:
        return x["pool"].astype("f4"), x["read_slot"], x["write_slot"], "pool"
    if "initial_state" in x:
        states = x["initial_state"].astype("f4")
    else:
        states = np.zeros((sequences, x["v"].shape[1], x["q"].shape[2], x["v"].shape[2]), "f4")
    own = np.arange(sequences)
    return states, own, own, "final_state"


def forward(x: Arrays, meta: Meta) -> Arrays:
    """o [T, HV, V], and final_state [N, HV, K, V] or the pool of states."""
    if x["k"].ndim == 4:
        raise Unsupported("takes one key a token")
    T, HV, V = x["v"].shape
    H, K = x["q"].shape[1:]
    q, k, g, beta = activated(x, meta, K)
    q, k = (np.repeat(y, HV // H, axis=1) for y in (q, k))
    v, scale = x["v"].astype("f4"), np.float32(meta["scale"])
    erasing = 0 * k if meta["beta"] == "none" else k  # GLA, SSD erase nothing
    if "b" in x:  # GDN-2: erase and write in place of beta
        erasing, v = x["b"].astype("f4") * k, x["w"].astype("f4") * v
    cu = x["cu_seqlens"].tolist() if "cu_seqlens" in x else [0, T]
    states, reads, writes, name = slots(x, len(cu) - 1)
    o, after = np.zeros((T, HV, V), "f4"), states.copy()
    for n, (first, end) in enumerate(zip(cu, cu[1:], strict=False)):
        if reads[n] < 0:  # padding: nothing is written for it
            continue
        S = states[reads[n]]
        for t in range(first, end):
            S = np.exp(g[t])[:, :, None] * S
            e = v[t] - np.einsum("hk,hkv->hv", erasing[t], S)
            S = S + k[t][:, :, None] * (beta[t][:, None] * e)[:, None, :]
            o[t] = scale * np.einsum("hk,hkv->hv", q[t], S)
        after[writes[n]] = S
    return {"o": o, name: after}


def call(in_path: str, out_path: str) -> None:
    x, meta = read(in_path)
    run = with_convolutions if "activation" in meta else forward
    write(out_path, run(x, meta), {"state_layout": "kv"})


def serve() -> None:
    for line in sys.stdin:
        try:
            call(*line.split())
            answer = "ok"
        except Unsupported as e:
            answer = f"unsupported {e}"
        except Exception as e:
            answer = f"failed {type(e).__name__}: {e}"
        print(answer, flush=True)


def main() -> int:
    if len(sys.argv) < 3:
        serve()
        return 0
    try:
        call(sys.argv[1], sys.argv[2])
    except Unsupported as e:
        print(e, file=sys.stderr)
        return UNSUPPORTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
