"""Chunks against single tokens, of transformers' functions, on one head's problem at four lengths.
Prints the error of each, their difference, and what `judge` says of each."""

from typing import Any

import numpy as np
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as model

import deltaproof
from deltaproof import to_bf16

CHUNK, STEP = (getattr(model, f"torch_{n}_gated_delta_rule") for n in ("chunk", "recurrent"))


def problem(T: int, rate: float) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(T)
    x = {n: rng.standard_normal((1, T, 2, 64)) for n in "qkv"}
    x |= {n: x[n] / np.sqrt((x[n] ** 2).sum(-1, keepdims=True)) for n in "qk"}
    x = {n: to_bf16(y) for n, y in x.items()}
    x["g"] = -rate * rng.exponential(size=(1, T, 2)).astype(np.float32)
    return x | {"beta": to_bf16(rng.uniform(0.2, 0.95, (1, T, 2))).astype(np.float32)}


def called(fn: Any, x: dict[str, np.ndarray]) -> tuple[Any, Any]:
    given = {n: torch.from_numpy(y.astype(np.float32)) for n, y in x.items()}
    given = {n: y.bfloat16() if n in "qkv" else y for n, y in given.items()}
    args = dict(zip(("query", "key", "value"), (given.pop(n) for n in "qkv"), strict=True))
    fn = getattr(fn, "__wrapped__", fn)
    o, state = fn(**args, **given, initial_state=None, output_final_state=True)
    return to_bf16(o.float().numpy()), state.numpy()


def main() -> None:
    print("rate    T      state off, chunk  single   differ   o differs  judged")
    for rate in (0.02, 0.001):
        for T in (64, 256, 1024, 4096):
            x = problem(T, rate)
            made, found = [called(fn, x) for fn in (CHUNK, STEP)], []
            for (o, state), design in zip(made, ("chunk=64", "recurrent"), strict=True):
                told = {"gate": "log", "beta": "plain", "l2norm": False}
                own = f"{design},out=bf16"
                outputs = {"o": o, "final_state": state}
                found.append(deltaproof.judge(x, outputs, base="fp32", design=own, **told))
            size = np.linalg.norm(made[0][1])
            off = [f.tensors["final_state"]["rel_fro"] for f in found]
            apart = np.linalg.norm(made[0][1] - made[1][1]) / size
            oo = [m[0].astype(np.float64) for m in made]
            low = np.linalg.norm(oo[0] - oo[1]) / np.linalg.norm(oo[0])
            said = " ".join("pass" if f.passed else "fail" for f in found)
            print(f"{rate:<6g}{T:6d}{off[0]:16.1e}{off[1]:9.1e}{apart:9.1e}{low:10.1e}   {said}")


if __name__ == "__main__":
    main()
