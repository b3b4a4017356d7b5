"""scripts/python/deltaproof.py on a recurrence in numpy: what must pass passes, what must raise
raises. Run by harness/tests/test_python.c."""

import os
import sys
from typing import Any

import numpy as np

sys.path.insert(
    0,
    os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "..", "scripts", "python"),
)
from deltaproof import assert_explained, to_bf16


def kda(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    beta: np.ndarray,
    dtype: Any = np.float32,
) -> tuple[np.ndarray, np.ndarray]:
    """Step by step, ref/math.md b."""
    T, H, K = q.shape
    q, k, v, g, beta = (x.astype(dtype) for x in (q, k, v, g, beta))
    S, o = np.zeros((H, K, v.shape[-1]), dtype), np.zeros_like(v)
    for t in range(T):
        S *= np.exp(g[t])[..., None]
        e = beta[t][:, None] * (v[t] - np.einsum("hk,hkv->hv", k[t], S))
        S += k[t][..., None] * e[:, None, :]
        o[t] = np.einsum("hk,hkv->hv", q[t], S) * dtype(K) ** dtype(-0.5)
    return o, S[None]


def raises(kind: str | None, words: list[str], *args: Any, **kwargs: Any) -> None:
    try:
        assert_explained(*args, **kwargs)
    except kind as e:
        missing = [w for w in words if w not in str(e)]
        assert not missing, f"{missing} not in: {e}"
        return
    raise SystemExit(f"nothing was raised where {kind.__name__} with {words} should be")


cache = {"cache": sys.argv[1]}
rng = np.random.default_rng(1)
T, H, K, V = 100, 2, 16, 8
unit = lambda x: (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)
x = dict(
    q=unit(rng.normal(size=(T, H, K))),
    k=unit(rng.normal(size=(T, H, K))),
    v=rng.normal(size=(T, H, V)).astype(np.float32),
    g=-0.02 * rng.exponential(size=(T, H, K)).astype(np.float32),
    beta=rng.uniform(size=(T, H)).astype(np.float32),
)
said = dict(gate="log", beta="plain", l2norm=False, **cache)
o, state = kda(**x)

got = assert_explained(x, dict(o=o, final_state=state), base="fp32", **said)
assert (
    got["o"]["verdict"] == "pass"
    and 0 < got["o"]["rel_fro"] < 1e-6
    and got["final_state"]["ratio"] < 1
), got["o"]
assert_explained(
    {n: a[None] for n, a in x.items()}, dict(o=o[None]), base="fp32", **said
)  # a batch axis

wrong = o.copy()
wrong[70, 1] *= 1.001
raises(
    AssertionError,
    ["not explained", "fail     o", "token 70", "head 1"],
    x,
    dict(o=wrong),
    base="fp32",
    **said,
)
rounded = to_bf16(o)
raises(
    AssertionError,
    ["fail     o"],
    x,
    dict(o=(rounded.bits.astype(np.uint32) << 16).view(np.float32)),
    base="fp32",
    **said,
)  # fp32 claimed, bf16 delivered
assert_explained(x, dict(o=rounded), base="fp32", **said)  # said to be bf16: one rounding on top
short = {n: to_bf16(a) for n, a in x.items()}
wide = {n: (b.bits.astype(np.uint32) << 16).view(np.float32) for n, b in short.items()}
assert_explained(short, dict(o=to_bf16(kda(**wide)[0])), base="bf16", **said)
raises(
    AssertionError, ["fail     o"], x, dict(o=to_bf16(kda(**wide)[0])), base="fp32", **said
)  # other inputs than those it is judged by
raises(
    ValueError, ["tensor o: shape [50,2,8]", "[100,2,8]"], x, dict(o=o[:50]), base="fp32", **said
)
raises(ValueError, ["--gate"], x, dict(o=o), base="fp32", **cache)
raises(ValueError, ["tensor out is not known"], x, dict(out=o), base="fp32", **said)
raises(ValueError, ["complex"], x, dict(o=o.astype(complex)), base="fp32", **said)
nan = o.copy()
nan[3, 0, 2] = np.nan
raises(AssertionError, ["fail     o"], x, dict(o=nan), base="fp32", **said)

# A bound that says nothing must not pass unseen: a program that finds one.
program = os.environ["DELTAPROOF"]
fake = os.path.join(sys.argv[1], "fake")
with open(fake, "w") as f:
    f.write("""#!/bin/sh
while [ "$1" != --json ]; do shift; done
echo '{"runs": [{"tensors": [{"name": "o", "verdict": "pass"}, {"name": "dg", "verdict":
"unjudged"}]}]}' >"$2"
""")
os.chmod(fake, 0o700)
os.environ["DELTAPROOF"] = fake
raises(AssertionError, ["dg: the bound is too wide"], x, dict(o=o), base="fp32", **said)
assert (
    assert_explained(x, dict(o=o), base="fp32", unjudged=("dg",), **said)["o"]["verdict"] == "pass"
)
os.environ["DELTAPROOF"] = program

try:
    import torch
except ImportError:
    print("all as it should be; without PyTorch")
    sys.exit(0)
t = {n: torch.tensor(a).bfloat16() for n, a in x.items()}
assert_explained(
    t,
    dict(o=torch.tensor(kda(**{n: a.float().numpy() for n, a in t.items()})[0]).bfloat16()),
    base="bf16",
    **said,
)
print("all as it should be; with PyTorch")
