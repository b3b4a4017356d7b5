"""Public references in PyTorch, as functions in the sense of deltaproof/contract.py: transformers'
functions of Qwen3-Next and Kimi Linear, FLA's naive functions. Steps that they lack come first:
gates from raw numbers, betas, norms, sequences one by one, heads repeated, tokens filled up to a
chunk."""

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest

from deltaproof import Recurrence

torch = pytest.importorskip("torch", reason="PyTorch is not installed")


def naive_of_fla(folder: str) -> ModuleType:
    """fla/ops/FOLDER/naive.py by itself: it needs no Triton."""
    found = importlib.util.find_spec("fla") or importlib.util.find_spec("flash-linear-attention")
    if found is None or not found.submodule_search_locations:
        pytest.skip("FLA (fla-core) is not installed")
    path = os.path.join(found.submodule_search_locations[0], "ops", folder, "naive.py")
    spec = importlib.util.spec_from_file_location("naive_" + folder.replace("/", "_"), path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def of_transformers(model: str, name: str) -> Any:
    """The function of transformers itself, not a kernel that replaces it."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    module = f"transformers.models.{model}.modeling_{model}"
    try:
        fn = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as e:
        pytest.skip(f"this transformers has no {module}.{name}: {e}")
    return getattr(fn, "__wrapped__", fn)


@dataclass(frozen=True)
class Reference:
    """A public reference. Its package and module are `where`. It computes `chunk` tokens at once
    (0: one), with `fill` only whole chunks. It takes a scale if `scaled`, and arrays [B,H,T,..] if
    `heads_first`."""

    model: str
    where: str
    name: str
    chunk: int = 0
    fill: bool = False
    scaled: bool = True
    heads_first: bool = False

    def load(self) -> Any:
        package, module = self.where.split(":")
        if package == "fla":
            return getattr(naive_of_fla(module), self.name)
        return of_transformers(module, self.name)


QWEN, KIMI = "transformers:qwen3_next", "transformers:kimi_linear"
REFERENCES = (
    Reference("gdn", QWEN, "torch_recurrent_gated_delta_rule", scaled=False),
    Reference("gdn", QWEN, "torch_chunk_gated_delta_rule", 64, scaled=False),
    Reference("kda", KIMI, "recurrent_kimi_delta_attention", scaled=False),
    Reference("kda", KIMI, "chunk_kimi_delta_attention", 64, scaled=False),
    Reference("gdn", "fla:gated_delta_rule", "naive_recurrent_gated_delta_rule"),
    Reference("gdn", "fla:gated_delta_rule", "naive_chunk_gated_delta_rule", 64),
    Reference("kda", "fla:kda", "naive_recurrent_kda"),
    Reference("kda", "fla:kda", "naive_chunk_kda", 64, fill=True),
    Reference("gla", "fla:gla", "naive_recurrent_gla", scaled=False),
    Reference("ssd", "fla:simple_gla", "naive_recurrent_simple_gla"),
    Reference("ssd", "fla:simple_gla", "naive_chunk_simple_gla", 64),
    Reference("gdn2", "fla:gdn2", "naive_recurrent_gdn2"),
    Reference("gdn2", "fla:gdn2", "naive_chunk_gdn2", 64),
    Reference(
        "gated-deltaproduct", "fla:gated_delta_product", "naive_recurrent_gated_delta_product"
    ),
    Reference(
        "dplr", "fla:generalized_delta_rule/dplr", "dplr_recurrence", scaled=False, heads_first=True
    ),
    Reference(
        "dplr",
        "fla:generalized_delta_rule/dplr",
        "dplr_chunkwise",
        32,
        fill=True,
        scaled=False,
        heads_first=True,
    ),
    Reference("comba-decayed", "fla:comba", "naive_recurrent_comba"),
    Reference("comba", "fla:comba", "naive_chunk_comba", 64),
)
_ROWS = ({"write": "k", "read": "p", "value": "v", "strength": "beta"},)
_COMBA: Any = {"number": "beta", "per_head": True}
OWN = {
    "comba": Recurrence("comba", "q", "g", ("k", "p"), ("v",), _ROWS, undecayed=True, **_COMBA),
    "comba-decayed": Recurrence("decayed", "q", "g", ("k", "p"), ("v",), _ROWS, **_COMBA),
}


def _activated(x: dict[str, Any]) -> dict[str, Any]:
    """q, k, g, beta as the recurrence takes them, in fp32."""
    y = {n: t.float() for n, t in x.items() if torch.is_tensor(t) and n != "cu_seqlens"}
    if x["l2norm"]:
        for n in ("q", "k"):
            y[n] = y[n] * torch.rsqrt((y[n] * y[n]).sum(-1, keepdim=True) + 1e-6)
    z = y["g"] + (y["dt_bias"].reshape(y["g"].shape[2:]) if "dt_bias" in y else 0)
    rate = y["A_log"].exp().reshape(-1, *(1,) * (z.ndim - 3)) if "A_log" in y else 1
    if x["gate"] == "softplus":
        y["g"] = -rate * torch.nn.functional.softplus(z)
    if x["gate"] == "lower_bound":
        y["g"] = x["lower_bound"] * torch.sigmoid(rate * z)
    if "beta" in y and x["beta_form"] != "plain":
        y["beta"] = torch.sigmoid(y["beta"]) * (2 if x["beta_form"] == "sigmoid2" else 1)
    return y


def _one(ref: Reference, fn: Any, y: dict[str, Any], scale: float, state: Any) -> tuple[Any, Any]:
    """Sequences of one length [B,T,..] by the reference."""
    tokens, K = y["q"].shape[1], y["q"].shape[-1]
    if not ref.scaled:  # its own is K^-1/2
        y["q"] = y["q"] * (scale * K**0.5)
    if ref.fill:
        for n, t in y.items():
            zeros = t.new_zeros((len(t), -tokens % ref.chunk, *t.shape[2:]))
            y[n] = torch.cat([t, zeros], 1)
    if ref.heads_first:
        y = {n: t.transpose(1, 2) for n, t in y.items()}
    own = {"output_final_state": True, "initial_state": state}
    own |= {"scale": scale} if ref.scaled else {}
    q, k, v = y["q"], y["k"], y["v"]
    if ref.model == "gla":
        o, final = fn(q, k, v, y["g"], **own)
    elif ref.model == "ssd":
        o, final = fn(q, k, v, g=y["g"], **own)
    elif ref.model == "gdn2":
        o, final = fn(q, k, v, y["g"], y["b"], y["w"], **own)
    elif ref.model == "dplr":
        o, final = fn(q, k, v, y["lr_a"], y["lr_b"], y["g"], **own)
    elif ref.model == "gated-deltaproduct":
        R = y["beta"].shape[3]
        k, v = (t.transpose(2, 3).flatten(1, 2) for t in (k, v))
        beta = y["beta"].transpose(2, 3).flatten(1, 2)
        o, final = fn(q, k, v, y["g"], beta, num_householder=R, **own)
    else:
        own |= {"p": y["p"]} if "p" in y else {}
        o, final = fn(q, k, v, g=y["g"], beta=y["beta"], **own)
    return (o.transpose(1, 2) if ref.heads_first else o)[:, :tokens], final


def _packed(ref: Reference, fn: Any, x: dict[str, Any]) -> Any:
    """All sequences. x: what the kernel gets, by name."""
    y = _activated(x)
    v, cu_seqlens, given = x["v"], x["cu_seqlens"], x["initial_state"]
    for n in ("q", "k"):
        y[n] = y[n].repeat_interleave(v.shape[2] // y[n].shape[2], 2)
    of_tokens = {n: t for n, t in y.items() if n not in ("A_log", "dt_bias", "initial_state")}
    if cu_seqlens is None:
        return _one(ref, fn, of_tokens, x["scale"], y.get("initial_state"))
    o, final, cu = [], [], [int(n) for n in cu_seqlens]
    for i, (a, e) in enumerate(zip(cu, cu[1:], strict=False)):
        state = y["initial_state"][i : i + 1] if given is not None else None
        if a == e:
            shape = (1, v.shape[2], y["q"].shape[-1], v.shape[-1])
            final.append(torch.zeros(shape) if state is None else state)
            continue
        made = _one(ref, fn, {n: t[:, a:e] for n, t in of_tokens.items()}, x["scale"], state)
        o.append(made[0])
        final.append(made[1])
    return torch.cat(o, 1), torch.cat(final)


def kernel_of(ref: Reference, fn: Any = None) -> Callable[..., Any]:
    """The reference, or another function in its place, in every form with packed sequences."""
    fn = fn or ref.load()

    def kernel(
        q: Any, k: Any, v: Any, g: Any, scale: float, gate: str, beta_form: str, l2norm: bool,
        lower_bound: float, beta: Any = None, b: Any = None, w: Any = None, lr_a: Any = None,
        lr_b: Any = None, A_log: Any = None, dt_bias: Any = None, initial_state: Any = None,
        cu_seqlens: Any = None,
    ) -> Any:  # fmt: skip
        x = dict(locals())
        return _packed(ref, fn, {n: t for n, t in x.items() if n not in ("ref", "fn")})

    def comba(
        q: Any, k: Any, p: Any, v: Any, g: Any, beta: Any, scale: float, gate: str,
        lower_bound: float, A_log: Any = None, dt_bias: Any = None, initial_state: Any = None,
        cu_seqlens: Any = None,
    ) -> Any:  # fmt: skip
        x = dict(locals()) | {"l2norm": False, "beta_form": "plain"}
        return _packed(ref, fn, {n: t for n, t in x.items() if n not in ("ref", "fn")})

    own = comba if ref.model in OWN else kernel
    own.__name__ = ref.name
    return own
