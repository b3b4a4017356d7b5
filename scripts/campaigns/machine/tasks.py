"""Tasks of public benchmarks, a row each in TASKS. A row says which sources are solutions, and how
they are loaded. Laws of inputs, the benchmark's own criterion and the arrays to judge follow.

kda           kernelbench.com, hard/02_kda_cutlass: forward(q, k, v, g, beta) -> o
gdn-prefill   MLSys 2026 FlashInfer contest, gdn_prefill_qk4_v8_d128_k_last:
              run(q, k, v, state, A_log, a, dt_bias, b, cu_seqlens, scale) -> output, new_state
gdn-decode    the same without cu_seqlens, one token of each sequence: ..decode_qk4_v8_d128_k_last

Both GDN tasks: q k [..,4,128], v output [..,8,128] in bf16, states [N,8,V,K] in fp32, raw a and b.
Columns of v, o and states do not mix, so an eighth of them is kept."""

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import benchmark
from deltaproof import to_bf16
from deltaproof.adapters import kernelbench

Arrays = dict[str, np.ndarray]
COLUMN = slice(None, None, 8)
SEED = 20261127


@dataclass(frozen=True)
class Task:
    name: str
    source: str  # of the files that `fetch` takes
    load: Callable[[str, str], Callable[..., Any]]  # (file, folder to build in)
    laws: Mapping[str, Callable[[int], Arrays]]  # inputs of so many tokens of one call, 0: all
    smaller: tuple[int, ...]  # tokens of a sequence, or sequences, of shorter calls
    outputs: tuple[str, ...]
    passes: Callable[[Any, Any, str], bool]  # (got, want, law): the task's own criterion
    reference: Callable[[Mapping[str, Any]], dict[str, Any]]  # of fp64 tensors, as fp64 tensors
    kept: Callable[[Arrays, bool], tuple[Arrays, Any]]  # inputs to judge, and their outputs' place
    settings: Mapping[str, Any]
    design: str


# KDA

B, T, H, KEPT = 2, 1024, 8, (0, 7)


def _kda_inputs(law: Any) -> Callable[[int], Arrays]:
    def inputs(tokens: int) -> Arrays:
        """[B,T,..], the same for every solution; tokens: of head 0 of the second sequence alone."""
        rng = np.random.default_rng(SEED)
        rows = [law(rng, T=T, H=H, V=128) for _ in range(B)]
        x = {n: np.stack([r[n] for r in rows]) for n in rows[0]}
        return {n: y[1:, :tokens, :1] for n, y in x.items()} if tokens else x

    return inputs


def _module(path: str, name: str = "solution") -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _kda_load(path: str, _: str) -> Callable[..., Any]:
    kernel = kernelbench(_module(path))
    return lambda **x: {"o": kernel(**x)}


def _kda_passes(got: Any, want: Any, law: str) -> bool:
    atol = {"small": 5e-4}.get(law, 0.05)
    return bool(np.allclose(got, want, rtol=0.05, atol=atol))


def _kda_kept(x: Arrays, whole: bool) -> tuple[Arrays, Any]:
    heads = list(KEPT) if whole else [0]
    row = 1 if whole else 0
    given = {n: y[row][:, heads] for n, y in x.items()}
    given["v"] = given["v"][..., COLUMN]
    return given, lambda out: {"o": out["o"][row][:, heads][..., COLUMN]}


def _scan(q: Any, k: Any, v: Any, g: Any, beta: Any, S: Any) -> tuple[Any, Any]:
    """[B,T,H,..] and S [B,H,K,V] in fp64; g: log decays, or [B,T,H,1]."""
    import torch

    o = []
    for t in range(q.shape[1]):
        S = S * g[:, t].exp()[..., None]
        e = beta[:, t][..., None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S))
        S = S + k[:, t][..., None] * e[:, :, None]
        o.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S) * q.shape[-1] ** -0.5)
    return torch.stack(o, 1), S


def _kda_reference(x: Mapping[str, Any]) -> dict[str, Any]:
    S = x["v"].new_zeros((*x["v"].shape[::2], x["k"].shape[-1], x["v"].shape[-1]))
    return {"o": _scan(**x, S=S)[0]}


# GDN

LENGTHS = (1, 64, 65, 190, 320)  # tokens of the prefill's sequences
SEQUENCES = 64  # of the decode


def gdn(rng: Any, N: int, T: int, v: float = 1, rates: tuple[float, float] = (1, 16),
        step: tuple[float, float] = (1e-3, 0.1), repeated: bool = False, a: float = 0,
        b: float = 0) -> Arrays:  # fmt: skip
    """Inputs as Qwen3-Next makes them: unit q and k, -exp(A_log) softplus(a + dt_bias), sigmoid(b).

    - v: scale of v and of states.
    - rates, step: ranges of exp(A_log) and softplus(dt_bias).
    - repeated: all keys of a head are one key.
    - a, b: means."""
    q, k = (rng.standard_normal((T, 4, 128)) for _ in range(2))
    k = k[:1].repeat(T, 0) if repeated else k
    x = {n: y / np.linalg.norm(y, axis=-1, keepdims=True) for n, y in (("q", q), ("k", k))}
    x |= {"v": rng.standard_normal((T, 8, 128)) * v, "a": rng.standard_normal((T, 8)) + a,
          "b": rng.standard_normal((T, 8)) + b}  # fmt: skip
    dt = np.exp(rng.uniform(*np.log(step), 8))
    return {n: to_bf16(y) for n, y in x.items()} | {
        "state": (rng.standard_normal((N, 8, 128, 128)) * 0.1 * v).astype(np.float32),
        "A_log": np.log(rng.uniform(*rates, 8)).astype(np.float32),
        "dt_bias": np.log(np.expm1(dt)).astype(np.float32),
    }


GDN_LAWS: dict[str, dict[str, Any]] = {
    "nominal": {},
    "small": {"v": 0.01},
    "forgetting": {"rates": (8, 64), "step": (0.1, 4)},
    "long_memory": {"rates": (1e-4, 1e-3), "b": 1},
    "repeated": {"rates": (1e-4, 1e-3), "b": 4, "repeated": True},
    "large": {"v": 30},
    "wide_gates": {"rates": (1e-4, 1e-3), "a": 100},
}


def _prefill_inputs(law: Mapping[str, Any]) -> Callable[[int], Arrays]:
    def inputs(tokens: int) -> Arrays:
        """tokens: of the longest sequence alone."""
        x = gdn(np.random.default_rng(SEED), len(LENGTHS), sum(LENGTHS), **law)
        if not tokens:
            return x | {"cu_seqlens": np.cumsum([0, *LENGTHS])}
        cut = {n: x[n][-LENGTHS[-1] :][:tokens] for n in ("q", "k", "v", "a", "b")}
        return x | cut | {"state": x["state"][-1:], "cu_seqlens": np.array([0, tokens])}

    return inputs


def _decode_inputs(law: Mapping[str, Any]) -> Callable[[int], Arrays]:
    def inputs(sequences: int) -> Arrays:
        """[N,1,..] of the first sequences."""
        x = gdn(np.random.default_rng(SEED), SEQUENCES, SEQUENCES, **law)
        n = sequences or SEQUENCES
        x |= {m: x[m][:n, None] for m in ("q", "k", "v", "a", "b")}
        return x | {"state": x["state"][:n]}

    return inputs


def _gdn_load(order: tuple[str, ...]) -> Callable[[str, str], Callable[..., Any]]:
    """A file in the form Solution of flashinfer-bench, or Python with a function run."""

    def load(path: str, folder: str) -> Callable[..., Any]:
        if path.endswith(".py"):
            spec, entry = {"destination_passing_style": False}, _module(path).run
        else:
            with open(path, encoding="utf-8") as f:
                solution = json.load(f)
            spec, entry = solution["spec"], _entry(solution, folder)

        def kernel(**x: Any) -> Any:
            import torch

            given = [0.08838834764831845 if n == "scale" else x[n] for n in order]
            if not spec.get("destination_passing_style", True):
                return dict(zip(("o", "final_state"), entry(*given), strict=True))
            nan = float("nan")
            o, s = torch.full_like(x["v"], nan), torch.full_like(x["state"], nan)
            entry(*given, o, s)
            return {"o": o, "final_state": s}

        return kernel

    return load


def _entry(solution: Mapping[str, Any], folder: str) -> Any:
    """Its function, built as flashinfer-bench builds it."""
    spec, package = solution["spec"], os.path.join(os.path.abspath(folder), "solution")
    for s in solution["sources"]:
        path = os.path.join(package, s["path"])
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as f:
            f.write(s["content"])
    file, name = spec["entry_point"].split("::")
    files = [os.path.join(package, s["path"]) for s in solution["sources"]]
    made = [p for p in files if p.endswith((".cu", ".cpp"))]
    if spec["language"] != "cuda":
        sys.path[:0] = [package, folder]
        return getattr(importlib.import_module(f"solution.{file[:-3].replace('/', '.')}"), name)
    if spec.get("binding") == "torch":
        from torch.utils.cpp_extension import load

        return getattr(load("solution_ext", made, extra_include_paths=[package]), name)
    import tvm_ffi.cpp

    cuda, cpp = ([p for p in made if p.endswith(end)] for end in (".cu", ".cpp"))
    return tvm_ffi.cpp.load(
        "solution_ext", cpp_files=cpp, cuda_files=cuda, extra_include_paths=[package],
        build_directory=package,
    )[name]  # fmt: skip


def _gdn_passes(got: Any, want: Any, _: str) -> bool:
    """Every entry within 0.01, or within 1%."""
    off = np.abs(got - want)
    return bool(np.all((off <= 0.01) | (off <= 0.01 * np.abs(want))))


def _gdn_reference(x: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    packed = "cu_seqlens" in x
    q, k, v, a, b = (x[n][None] if packed else x[n] for n in ("q", "k", "v", "a", "b"))
    q, k = (y.repeat_interleave(2, -2) for y in (q, k))
    step = torch.logaddexp(a + x["dt_bias"], torch.zeros_like(a))
    g = (-x["A_log"].exp() * step)[..., None]
    rows, S0 = (q, k, v, g, b.sigmoid()), x["state"].transpose(-1, -2)
    cu = x["cu_seqlens"].long().tolist() if packed else []
    cuts = [slice(i, j) for i, j in zip(cu, cu[1:], strict=False)]
    found = [_scan(*(y[:, c] for y in rows), S=S0[i : i + 1]) for i, c in enumerate(cuts)]
    o, S = zip(*(found or [_scan(*rows, S=S0)]), strict=True)
    o = torch.cat(o, 1)
    return {"o": o[0] if packed else o, "final_state": torch.cat(S).transpose(-1, -2)}


def _gdn_kept(x: Arrays, _: bool) -> tuple[Arrays, Any]:
    n = len(x["state"])
    cu = x.get("cu_seqlens", np.arange(n + 1))
    rows = list(range(n)) if "cu_seqlens" in x else sorted({0, n - 1})
    at = np.concatenate([np.arange(cu[i], cu[i + 1]) for i in rows])
    heads = list(KEPT)

    def tokens(y: Any) -> Any:
        return y.reshape(-1, *y.shape[-2:])[at] if y.ndim > 2 else y

    def values(y: Any) -> Any:
        return tokens(y)[:, heads][..., COLUMN]

    def states(y: Any) -> Any:
        return np.swapaxes(y[rows][:, heads][:, :, COLUMN], -1, -2)

    lengths = [int(cu[i + 1] - cu[i]) for i in rows]
    given = {n: tokens(x[n])[:, [h // 2 for h in heads]] for n in ("q", "k")}
    given |= {"v": values(x["v"]), "initial_state": states(x["state"])}
    given |= {m: x[n].reshape(-1, 8)[at][:, heads] for n, m in (("a", "g"), ("b", "beta"))}
    given |= {n: x[n][heads] for n in ("A_log", "dt_bias")}
    given["cu_seqlens"] = np.cumsum([0, *lengths])
    return given, lambda out: {"o": values(out["o"]), "final_state": states(out["final_state"])}


ORDER = ("q", "k", "v", "state", "A_log", "a", "dt_bias", "b")
RAW = {"gate": "softplus", "beta": "sigmoid", "l2norm": False}
GDN = {"outputs": ("o", "final_state"), "passes": _gdn_passes, "kept": _gdn_kept, "settings": RAW,
       "reference": _gdn_reference}  # fmt: skip
TASKS = {
    t.name: t
    for t in (
        Task("kda", r"02_kda_cutlass.*solution\.py(\.txt)?$", _kda_load,
             {law.__name__: _kda_inputs(law) for law in benchmark.LAWS}, (64, 128, 256, 512),
             ("o",), _kda_passes, _kda_reference, _kda_kept,
             {"gate": "log", "beta": "plain", "l2norm": False}, "chunk=64"),
        Task("gdn-prefill", "gdn_prefill_qk4_v8_d128_k_last",
             _gdn_load((*ORDER, "cu_seqlens", "scale")),
             {n: _prefill_inputs(x) for n, x in GDN_LAWS.items()}, (1, 16, 64, 128), **GDN,
             design="chunk=64"),
        Task("gdn-decode", "gdn_decode_qk4_v8_d128_k_last", _gdn_load((*ORDER, "scale")),
             {n: _decode_inputs(x) for n, x in GDN_LAWS.items()}, (1, 4, 8, 16), **GDN,
             design="recurrent"),
    )
}  # fmt: skip
