"""Functions in the names of Mamba-2's state space duality (layout="mamba"), as `judge` takes files
of them (harness/run/judge.h). They have x, dt, A, B, C in place of v, g, k, q, with q = C, k
= B,
v = x dt, g = A dt. States are [V,K]; results are y or out, final_states, dB, dC.

A case says v and g. A function gets A = -1, -2, -4, -1, .. by heads (0 in a head without decay), dt
= g / A (1) and x = v / dt. In the cases of a set v is such a product of an x in bf16. In other
cases x is the nearest number of 24 bits."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .program import put, ran
from .tensors import BFLOAT16, is_torch, load, save

SAID = ("models", "gate", "beta", "l2norm", "state_layout", "queries", "checkpoints")
GIVEN = {
    "x": "v",
    "dt": "g",
    "B": "k",
    "C": "q",
    "initial_states": "initial_state",
    "dout": "do",
    "dfinal_states": "dht",
}
MADE = {
    "y": "o",
    "out": "o",
    "final_states": "final_state",
    "dB": "dk",
    "dC": "dq",
    "dinitial_states": "ds0",
}
OF_LAW = frozenset(  # keys of a case that say how inputs are drawn
    ("g_scale", "g_uniform", "g_mean", "g_head_spread", "g_hold", "keys", "s0_scale", "dstate")
    + ("v_from_k", "repeat", "qk_decades", "k_scale", "v_scale", "override", "seed", "scale")
    + ("dtype",)
)

Array = npt.NDArray[Any]


def _rates(g: Array) -> Array:
    heads = g.reshape(-1, g.shape[-1])
    return np.where(heads.any(0), -(2.0 ** (np.arange(heads.shape[1]) % 3)), 0).astype(np.float32)


def _steps(g: Array) -> tuple[Array, Array]:
    """(A, dt)"""
    A = _rates(g)
    return A, np.where(A == 0, 1, g.astype(np.float64) / np.where(A == 0, 1, A)).astype(np.float32)


def _over(v: Array, dt: Array) -> Array:
    steps = dt.astype(np.float64)[..., None]
    return np.where(steps == 0, 0, v.astype(np.float64) / np.where(steps == 0, 1, steps))


def as_function(
    fn: Callable[..., Any], outputs: Sequence[str], base: str
) -> tuple[Callable[..., Any], list[str]]:
    """fn as one of q, k, v, g, and what that returns."""
    own = inspect.signature(fn).parameters
    keeps = {n: p for n, p in own.items() if n not in ("A", "scale")}
    named = [p.replace(name=GIVEN.get(n, n)) for n, p in keeps.items()]
    scale = inspect.Parameter("scale", inspect.Parameter.KEYWORD_ONLY)
    at = next((i for i, p in enumerate(named) if p.kind is p.VAR_KEYWORD), len(named))

    def called(**given: Any) -> Any:
        scale = given.pop("scale")
        result = fn(**_translated(given, scale, base))
        result = result if isinstance(result, Mapping | tuple | list) else (result,)
        if not isinstance(result, Mapping):
            if len(result) != len(outputs):
                raise ValueError(
                    f"the function returns {len(result)} arrays, outputs names {len(outputs)}: "
                    f"{' '.join(outputs)}"
                )
            result = dict(zip(outputs, result, strict=True))
        return {MADE.get(n, n): x * scale if n == "dC" else x for n, x in result.items()}

    called.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [*named[:at], scale, *named[at:]]
    )
    return called, [MADE.get(n, n) for n in outputs]


def _translated(given: dict[str, Any], scale: float, base: str) -> dict[str, Any]:
    back = {own: n for n, own in GIVEN.items()}
    like = given["v"]
    v, g = (np.asarray(x.detach().cpu() if is_torch(x) else x) for x in (like, given["g"]))
    A, dt = _steps(g)
    x = _over(v, dt)
    rounded = x.astype(np.float32).astype(BFLOAT16).astype(np.float32)
    product = (rounded * dt[..., None]).astype(np.float32)
    out = {back.get(n, n): y for n, y in given.items()}
    out |= {"A": _placed(A, like), "dt": _placed(dt, like)}
    out["x"] = _placed(rounded if (product == v).all() else x.astype(np.float32), like)
    out["C"] = out["C"] * scale if scale != 1 else out["C"]
    if base == "bf16":
        out |= {n: _short(out[n]) for n in ("x", "B", "C", "dout") if n in out}
    return out


def _placed(x: Array, like: Any) -> Any:
    if not is_torch(like):
        return x
    import torch

    return torch.from_numpy(x).to(like.device)


def _short(x: Any) -> Any:
    """In bf16, if that holds it."""
    if not is_torch(x):
        return x
    import torch

    y = x.to(torch.bfloat16)
    return y if bool((y.to(x.dtype) == x).all()) else x


def exact_case(path: str) -> str:
    """The case with inputs of its own: v that is x dt, of x in bf16, and scale 1."""
    name = os.path.basename(path)
    folder = os.path.join(os.path.dirname(path), "mamba")
    to, data = os.path.join(folder, name), name.removesuffix(".case") + ".safetensors"
    if os.path.exists(to):
        return to
    os.makedirs(folder, exist_ok=True)
    drawn = os.path.join(folder, f"{data}.{threading.get_native_id()}")
    done = ran("inputs", path, f"--output={drawn}")
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr.strip()}")
    arrays = load(drawn)
    os.unlink(drawn)
    A, dt = _steps(arrays["g"].astype(np.float64))
    x = _over(arrays["v"], dt).astype(BFLOAT16).astype(np.float32)
    arrays |= {"v": x * dt[..., None], "g": dt * A}
    if "dht" in arrays:
        arrays["dstate"] = arrays.pop("dht")
    save(os.path.join(folder, data), arrays)
    with open(path, encoding="utf-8") as f:
        lines = [x for x in f if x.split(" = ")[0].strip() not in OF_LAW]
    return put(to, "".join([*lines, "scale = 1\n", f"data = {data}\n"]))
