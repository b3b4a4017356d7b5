"""A decode step of GDN in float32 whose sigmoid(beta) passes through bf16: the error of its state
after T tokens. Beside it stand the same step with beta in float32, and what `judge` says."""

import numpy as np

import deltaproof
from deltaproof import to_bf16


def problem(T: int, rate: float) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    x = {n: rng.standard_normal((1, T, 2, 64)) for n in "qkv"}
    x |= {n: x[n] / np.sqrt((x[n] ** 2).sum(-1, keepdims=True)) for n in "qk"}
    x = {n: to_bf16(y) for n, y in x.items()}
    x["g"] = -rate * rng.exponential(size=(1, T, 2)).astype(np.float32)
    return x | {"beta": to_bf16(rng.standard_normal((1, T, 2))).astype(np.float32)}


def decode(x: dict[str, np.ndarray], rounded: bool) -> dict[str, np.ndarray]:
    q, k, v, g, b = (x[n][0].astype(np.float32) for n in ("q", "k", "v", "g", "beta"))
    beta = np.float32(1) / (1 + np.exp(-b))
    beta = to_bf16(beta).astype(np.float32) if rounded else beta
    S, o = np.zeros((2, 64, 64), np.float32), np.zeros_like(v)
    for t in range(len(q)):
        S = S * np.exp(g[t])[:, None, None]
        e = beta[t][:, None] * (v[t] - np.einsum("hk,hkv->hv", k[t], S))
        S = S + k[t][..., None] * e[:, None]
        o[t] = np.einsum("hk,hkv->hv", q[t], S) * np.float32(0.125)
    return {"o": o[None], "final_state": S[None]}


def main() -> None:
    told = {"base": "fp32", "design": "recurrent", "gate": "log", "beta": "sigmoid"}
    print("rate    T    state off, beta fp32    bf16   times its limit")
    for rate in (0.02, 0.0005):
        for T in (64, 256, 1024, 4096):
            x = problem(T, rate)
            found = [deltaproof.judge(x, decode(x, r), l2norm=False, **told) for r in (False, True)]
            assert found[0].passed and not found[1].passed
            a, b = (f.tensors["final_state"] for f in found)
            times = found[1].failures()[-1].split(": ")[-1].split()[0]
            print(f"{rate:<6g}{T:6d}{a['rel_fro']:18.1e}{b['rel_fro']:12.1e}   {times}")


if __name__ == "__main__":
    main()
