"""Inputs of a truth pack in the layouts of other projects, as numpy arrays of float32. Copy me:
numpy alone. `pack` is what `read` returns, `told` the settings of the case in pack.json. Results
are checked as they come, but for states (see each function)."""

import numpy as np

ONNX = ("query", "key", "value", "past_state", "decay", "beta")  # in the operator's order


def _rows(pack, told, repeat=True):
    """{name: array [B,T,..]} of equally long sequences, `initial_state` [B,HV,K,V]. repeat: q and
    k get a head for each value head."""
    x = {n[3:]: y.astype(np.float32) for n, y in pack.items() if n.startswith("in.")}
    lengths = np.diff(x.pop("cu_seqlens", np.array([0, len(x["q"])])))
    if (lengths != lengths[0]).any():
        raise ValueError("sequences of several lengths are no rows of a batch")
    if told["l2norm"] == "1":  # as transformers and FLA do it
        for n in "qk":
            x[n] = x[n] / np.sqrt((x[n] ** 2).sum(-1, keepdims=True) + np.float32(1e-6))
    for n in ("q", "k", "v", "g", "beta"):
        if n in x:
            x[n] = x[n].reshape(len(lengths), -1, *x[n].shape[1:])
            if n in "qk" and repeat:
                x[n] = np.repeat(x[n], max(x["v"].shape[-2] // x[n].shape[2], 1), 2)
    return x


def onnx(pack, told):
    """(inputs of LinearAttention, opset 27, by name, attributes). Results need no change."""
    x = _rows(pack, told)
    erases, decays = told["recurrence"] in ("kda", "gdn"), bool(x["g"].any())
    rule = "_".join(["gated"] * decays + ["delta"] * erases) or "linear"
    names = dict(zip(("q", "k", "v", "initial_state", "g", "beta"), ONNX, strict=False))
    names = {n: y for n, y in names.items() if (n != "g" or decays) and (n != "beta" or erases)}
    flat = {n: x[n].reshape(*x[n].shape[:2], -1) if n in "qkvg" else x[n] for n in names if n in x}
    heads = {"q_num_heads": x["q"].shape[2], "kv_num_heads": x["v"].shape[2]}
    attributes = {"update_rule": rule, "scale": float(told["scale"]), **heads}
    return {names[n]: y for n, y in flat.items()}, attributes


def mlx(pack, told):
    """Arguments of mx.fast.gated_delta_update and mlx_lm's gated_delta_ops: g is the decay itself,
    q has the scale in it, states are [B,HV,V,K]. Check state.swapaxes(-1, -2)."""
    x = _rows(pack, told, repeat=False)
    state = x.get("initial_state", np.zeros((len(x["q"]), x["v"].shape[2], *_widths(x))))
    q = x["q"] * np.float32(told["scale"])
    return [q, x["k"], x["v"], np.exp(x["g"]), x["beta"], state.swapaxes(-1, -2).copy()]


def transformers(pack, told):
    """Arguments of transformers' and FLA's functions by name, but for the scale, which must be
    K^-1/2. Results need no change."""
    x = _rows(pack, told)
    if abs(float(told["scale"]) * x["q"].shape[-1] ** 0.5 - 1) > 1e-12:
        raise ValueError(f"scale {told['scale']}: is not K^-1/2")
    names = {"q": "query", "k": "key", "v": "value", "g": "g", "beta": "beta"}
    return {names.get(n, n): y for n, y in x.items() if n in (*names, "initial_state")}


def _widths(x):
    return x["q"].shape[-1], x["v"].shape[-1]
