"""Public kernels as one table: what each is called, how it declares its rounding, and how it is run
on the inputs of a case.

An adapter takes `Inputs` and returns {name: tensor} in the layouts that `deltaproof judge` reads.
If the kernel's contract excludes the inputs, it raises NotServed, or the kernel's own exception
passes through. The table quotes the reason. Their code is imported as installed where they are
measured, never kept or built here.
"""

import dataclasses
import importlib.metadata
import os
import pathlib
import sys
import typing

import torch

sys.path[:0] = [
    str(pathlib.Path(__file__).resolve().parent),
    str(pathlib.Path(__file__).resolve().parent.parent),
]
from claims import KERNELS
from fla_dump import TOKENS, batched, flags, load


class NotServed(Exception):
    pass


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # naive.py runs without one


class Inputs:
    """Tensors of a case on the device, and its settings. tokens first: q [T,H,K], g [T,HV,K]."""

    def __init__(self, path):
        x, self.meta = load(path)
        self.x = {n: t.to(DEVICE) for n, t in x.items()}
        self.T, self.H, self.K = self.x["r" if "r" in x else "q"].shape
        self.HV, self.V = self.x["v"].shape[1], self.x["v"].shape[-1]
        self.cu = self.x.pop("cu_seqlens", torch.tensor([0, self.T], device=DEVICE)).long()
        self.scale = float(self.meta["scale"])
        self.gate, self.beta, self.l2norm = (
            self.meta["gate"],
            self.meta["beta"],
            self.meta["l2norm"] == "1",
        )

    def __getitem__(self, name):
        return self.x.get(name)

    @property
    def backward(self):
        return "do" in self.x


@dataclasses.dataclass
class Kernel:
    name: str
    project: str
    op: str  # which recurrence, by the word of case files
    claims: dict  # metadata of the output file: base, design
    call: typing.Callable
    version: typing.Callable


def unless(ok, reason):
    if not ok:
        raise NotServed(reason)


def vk(state):
    return None if state is None else state.float().transpose(-1, -2).contiguous()


# ---- flash-linear-attention
# --------------------------------------------------------------------------------------------------


def fla_inputs(x):
    given = {n: x[n] for n in TOKENS if x[n] is not None}
    t = {n: y.contiguous() for n, y in batched(given, x.T).items()}
    t |= {n: x[n].flatten() for n in ("A_log", "dt_bias") if x[n] is not None}
    if x["initial_state"] is not None:
        t["initial_state"] = x["initial_state"]
    return t


def fla_run(f, x, t, gradients, **settings):
    """Forward, and gradients where the case has them; {name: tensor}."""
    do = t.pop("do", None)
    gradients = gradients and do is not None
    for name in t:
        t[name].requires_grad_(gradients)
    o, state = f(**t, **settings, cu_seqlens=x.cu, output_final_state=True)
    out = {"o": o, "final_state": state}
    if gradients:
        dht = x["dht"]
        torch.autograd.backward(
            (o,) if dht is None else (o, state), (do,) if dht is None else (do, dht)
        )
        out |= {
            "dh0" if n == "initial_state" else f"d{n}": v.grad
            for n, v in t.items()
            if v.grad is not None
        }
    return {n: v.detach() for n, v in out.items() if v is not None}


def fla_settings(x):
    return flags(x.meta) | {"scale": x.scale}


def fla_chunk_kda(x):
    from fla.ops.kda import chunk_kda

    return fla_run(chunk_kda, x, fla_inputs(x), True, **fla_settings(x))


def fla_recurrent_kda(x):
    from fla.ops.kda import fused_recurrent_kda

    settings = fla_settings(x)
    settings.pop("safe_gate", None)
    unless(
        x.gate != "softplus" or x["A_log"] is not None,
        "gate = softplus without A_log (documented for a lower bound alone)",
    )
    with torch.no_grad():
        return fla_run(fused_recurrent_kda, x, fla_inputs(x), False, **settings)


def fla_chunk_gdn(x, gradients=True):
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    unless(x.gate != "lower_bound", "gate = lower_bound")
    t = fla_inputs(x)
    t["g"] = x["g"].reshape(1, x.T, x.HV)
    return fla_run(chunk_gated_delta_rule, x, t, gradients, **fla_settings(x))


def fla_chunk_gdn_forward(x):
    with torch.no_grad():
        return fla_chunk_gdn(x, False)


def fla_chunk_gdn2(x):
    from fla.ops.gdn2 import chunk_gdn2

    unless(x.H == x.HV, "grouped value heads")
    return fla_run(chunk_gdn2, x, fla_inputs(x), True, **fla_settings(x))


def fla_recurrent_gdn2(x):
    from fla.ops.gdn2 import fused_recurrent_gdn2

    settings = fla_settings(x)
    settings.pop("safe_gate", None)
    with torch.no_grad():
        return fla_run(fused_recurrent_gdn2, x, fla_inputs(x), False, **settings)


# ---- FLA's functions that take what the caller has made: log gates, betas, unit rows
# --------------------------------------------------------------------------------------------------

GATES = ("g", "w", "gv")


def caller(x, rows, gradients):
    """Leaves of a case, and what the caller makes of them: {name: tensor} twice. Unit rows have
    the format `rows`, by default that of their inputs."""
    leaves = {
        n: t.clone().requires_grad_(gradients) for n, t in x.x.items() if n not in ("do", "dht")
    }
    made = dict(leaves)
    gate = next(n for n in GATES if n in made)
    if x.gate != "log":
        raw = made[gate].float() + made["dt_bias"].reshape(made[gate].shape[1:])
        rate = made["A_log"].exp().reshape(-1, *[1] * (raw.dim() - 2))
        made[gate] = (
            -rate * torch.nn.functional.softplus(raw)
            if x.gate == "softplus"
            else float(x.meta["lower_bound"]) * (rate * raw).sigmoid()
        )
    if x.beta.startswith("sigmoid"):
        made["beta"] = (1 + (x.beta == "sigmoid2")) * made["beta"].float().sigmoid()
    for n in ("q", "k") if x.l2norm else ():
        y = made[n].float()
        y = y * (y.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
        made[n] = y.to(rows or made[n].dtype)
    return leaves, made


def fla_made(x, f, arguments, gradients=True, rows=None, turned=False, **settings):
    """f on arguments(made), which lack their batch axis; {name: tensor}. turned: its states are
    transposed."""
    gradients = gradients and x.backward
    leaves, made = caller(x, rows, gradients)
    turn = vk if turned else lambda state: state
    with torch.set_grad_enabled(gradients):
        o, state = f(
            **{n: t.unsqueeze(0).contiguous() for n, t in arguments(made).items()},
            initial_state=turn(leaves.get("initial_state")),
            scale=x.scale,
            cu_seqlens=x.cu,
            output_final_state=True,
            **settings,
        )
        state = turn(state)
    out = {"o": o, "final_state": state}
    if gradients:
        dht = torch.zeros_like(state) if x["dht"] is None else x["dht"]
        torch.autograd.backward((o, state), (x["do"].unsqueeze(0).to(o.dtype), dht))
        out |= {
            "dh0" if n == "initial_state" else f"d{n}": t.grad
            for n, t in leaves.items()
            if t.grad is not None
        }
    return {n: t.detach() for n, t in out.items()}


def of_each(x, made, *names, rows=None, **also):
    """Queries and keys once for each value head, as these functions want them. In the format `rows`
    nothing rounds their gradients before they are added up."""
    heads = {
        n: made[n].to(rows or made[n].dtype).repeat_interleave(x.HV // x.H, 1) for n in ("q", "k")
    }
    return heads | {n: made[n] for n in names} | {n: made[m] for n, m in also.items()}


def fla_chunk_dplr(x, **settings):
    from fla.ops.generalized_delta_rule import chunk_dplr_delta_rule

    return fla_made(x, chunk_dplr_delta_rule, lambda t: dplr(x, t), **settings)


def dplr(x, t):
    return of_each(x, t, "v", a="lr_a", b="lr_b", gk="g")


def least_gate(x):
    return min(caller(x, None, False)[1][n].min().item() for n in GATES if n in x.x)


def fla_chunk_dplr_safe(x):
    least = least_gate(x)
    unless(least >= -5, f"log gates to {least:.3g} (safe_gate: -5 or more)")
    return fla_chunk_dplr(x, safe_gate=True)


def fla_recurrent_dplr(x):
    from fla.ops.generalized_delta_rule import fused_recurrent_dplr_delta_rule as f

    return fla_made(x, f, lambda t: dplr(x, t), False, torch.float32)


RWKV7_LEAST = -0.6065306597126334  # of a log gate, and the settings of FLA's layer


def fla_chunk_rwkv7(x):
    from fla.ops.rwkv7 import chunk_rwkv7

    least = least_gate(x)
    unless(least >= RWKV7_LEAST, f"log gates to {least:.3g} (its layer has -0.607 or more)")

    def arguments(t):
        return {n: t[n] for n in "rwkv"} | {"a": -t["kk"], "b": t["kk"] * t["a"]}

    safe = {"safe_gate": True, "lower_bound": RWKV7_LEAST, "chunk_size": 64}
    return fla_made(x, chunk_rwkv7, arguments, **safe)


def fla_recurrent_rwkv7(x):
    from fla.ops.rwkv7 import fused_mul_recurrent_rwkv7 as f

    names = ("r", "w", "k", "v", "kk", "a")
    return fla_made(x, f, lambda t: {n: t[n] for n in names}, False)


def comba(t):
    return {n: t[n] for n in ("q", "k", "v", "p", "g", "beta")}


def fla_chunk_comba(x):
    from fla.ops.comba import chunk_comba

    return fla_made(x, chunk_comba, comba, False)


def fla_recurrent_comba(x):
    from fla.ops.comba import fused_recurrent_comba

    return fla_made(x, fused_recurrent_comba, comba, False)


def oja(t):
    return {n: t[n] for n in ("q", "k", "v", "gv", "beta")}


def fla_chunk_oja(x):
    from fla.ops.gated_oja_rule import chunk_gated_oja_rule

    return fla_made(x, chunk_gated_oja_rule, oja, turned=True)


def fla_recurrent_oja(x):
    from fla.ops.gated_oja_rule import fused_recurrent_gated_oja_rule as f

    return fla_made(x, f, oja, False, turned=True)


def fla_chunk_gla(x):
    from fla.ops.gla import chunk_gla

    return fla_made(x, chunk_gla, lambda t: of_each(x, t, "v", "g"))


def fla_recurrent_gla(x):
    from fla.ops.gla import fused_recurrent_gla as f

    rows = torch.float32
    return fla_made(x, f, lambda t: of_each(x, t, "v", rows=rows, gk="g"), True, rows)


def fla_chunk_ssd(x):
    from fla.ops.simple_gla import chunk_simple_gla

    return fla_made(x, chunk_simple_gla, lambda t: of_each(x, t, "v", "g"), False)


def fla_recurrent_ssd(x):
    from fla.ops.simple_gla import fused_recurrent_simple_gla as f

    rows = torch.float32
    return fla_made(x, f, lambda t: of_each(x, t, "v", "g", rows=rows), True, rows)


def fla_chunk_deltaproduct(x):
    from fla.ops.gated_delta_product import chunk_gated_delta_product

    R = x["k"].shape[2]

    def in_turn(t):  # [T,H,R,..] -> [T R,H,..]
        return t.transpose(1, 2).flatten(0, 1)

    def arguments(t):
        heads = of_each(x, t, "g")
        return heads | {"k": in_turn(heads["k"])} | {n: in_turn(t[n]) for n in ("v", "beta")}

    return fla_made(x, chunk_gated_delta_product, arguments, False, num_householder=R)


def fla_recurrent_gdn(x):
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule as f

    return fla_made(x, f, lambda t: of_each(x, t, "v", "g", "beta"), False, torch.float32)


# ---- FlashQLA
# --------------------------------------------------------------------------------------------------


FLASHQLA = os.environ.get("FLASHQLA", "")  # a folder of its own: FLA runs TileLang if it finds it


def find_flashqla():
    if FLASHQLA and FLASHQLA not in sys.path:
        sys.path.insert(0, FLASHQLA)


def flashqla():
    find_flashqla()
    from flash_qla import chunk_gated_delta_rule

    return chunk_gated_delta_rule


def flashqla_version():
    find_flashqla()
    return importlib.metadata.version("flash-qla")


def flashqla_gdn(x, gradients=True):
    chunk_gated_delta_rule = flashqla()
    unless(x.gate == "log" and x.beta == "plain", "it takes log gates and plain beta")
    unless(x.K == 128 and x.V == 128, f"K = {x.K}, V = {x.V} (it takes 128)")
    t = fla_inputs(x)
    t |= {"g": x["g"].reshape(1, x.T, x.HV).float(), "beta": x["beta"].unsqueeze(0).float()}
    settings = {"scale": x.scale, "use_qk_l2norm_in_kernel": x.l2norm}
    return fla_run(chunk_gated_delta_rule, x, t, gradients, **settings)


def flashqla_gdn_forward(x):
    with torch.no_grad():
        return flashqla_gdn(x, False)


# ---- cuDNN frontend, Hopper engines
# --------------------------------------------------------------------------------------

CUDNN_PLAN, CUDNN_DSL_PLAN = "kda_hopper_cuda", "kda_hopper"


def cudnn_inputs(x):
    """Inputs as the op documents them: THD, fp32 gate and beta, states [N,HV,V,K]; keys that the
    caller has normalised where the kernel does not."""
    if not x.l2norm:
        longest = x["k"].float().norm(dim=-1).max().item()
        unless(
            longest <= 1.01,
            f"keys of norm up to {longest:.2g} without the L2 norm (its seed truncation takes "
            "keys as unit)",
        )
    if x.beta == "plain":
        top = x["beta"].float().max().item()
        unless(top <= 1.0, f"beta up to {top:.3g} (it takes beta in (0, 1))")
    unless(x.gate != "softplus", "gate = softplus (it takes log gates, or its lower-bound gate)")
    t = {n: x[n].contiguous() for n in ("q", "k", "v")}
    t |= {n: x[n].float().contiguous() for n in ("g", "beta")}
    t |= {"cu_seqlens": x.cu.int(), "initial_state": vk(x["initial_state"])}
    return t


def cudnn_forward(x, plan=CUDNN_PLAN):
    from cudnn.linear_attention.ops import kimi_delta_attention

    bounded = x.gate == "lower_bound"
    settings = {
        "use_qk_l2norm_in_kernel": x.l2norm,
        "use_beta_sigmoid_in_kernel": x.beta != "plain",
        "allow_neg_eigval": x.beta == "sigmoid2",
        "safe_gate": bounded,
    }
    if bounded:
        settings |= {
            "gate_lower_bound": float(x.meta["lower_bound"]),
            "a_log": x["A_log"],
            "dt_bias": x["dt_bias"],
        }
    with torch.no_grad():
        o, state = kimi_delta_attention(
            **cudnn_inputs(x),
            scale=x.scale,
            output_final_state=True,
            plan_name=plan,
            **settings,
        )
    return {"o": o, "final_state": vk(state)}


def cudnn_dsl_forward(x):
    return cudnn_forward(x, CUDNN_DSL_PLAN)


def cudnn_backward(x):
    from cudnn.linear_attention.ops import kimi_delta_attention

    unless(x.backward, "the case has no gradients")
    unless(
        x.gate == "log" and x.beta == "plain" and not x.l2norm,
        "its backward takes log gates, plain beta and normalised keys",
    )
    t = cudnn_inputs(x)
    leaves = [n for n in ("q", "k", "v", "g", "beta", "initial_state") if t[n] is not None]
    for n in leaves:
        t[n].requires_grad_(True)
    o, state = kimi_delta_attention(
        **t, scale=x.scale, output_final_state=True, plan_name=CUDNN_PLAN
    )
    dht = vk(x["dht"])
    torch.autograd.backward(
        (o,) if dht is None else (o, state), (x["do"],) if dht is None else (x["do"], dht)
    )
    out = {f"d{n}": t[n].grad for n in leaves if n != "initial_state"}
    if "initial_state" in leaves:
        out["dh0"] = vk(t["initial_state"].grad)
    return out


# ---- FlashKDA
# --------------------------------------------------------------------------------------------------


def flashkda_forward(x):
    unless(x.K == 128 and x.V == 128, f"K = {x.K}, V = {x.V} (it takes 128)")
    unless(x.H == x.HV, "grouped value heads")
    unless(x.gate == "lower_bound", f"gate = {x.gate} (it takes the lower-bound gate)")
    unless(x.beta == "sigmoid" and x.l2norm, "it takes beta logits and applies the L2 norm")
    import flash_kda

    one = {n: x[n].unsqueeze(0).contiguous() for n in ("q", "k", "v", "g", "beta")}
    out = torch.empty_like(one["v"])
    state = torch.empty(len(x.cu) - 1, x.HV, x.V, x.K, device="cuda")
    flash_kda.fwd(
        **one,
        scale=x.scale,
        out=out,
        A_log=x["A_log"],
        dt_bias=x["dt_bias"].reshape(x.HV, x.K),
        lower_bound=float(x.meta["lower_bound"]),
        initial_state=vk(x["initial_state"]),
        final_state=state,
        cu_seqlens=x.cu,
    )
    return {"o": out[0], "final_state": vk(state)}


# ---- FlashInfer
# --------------------------------------------------------------------------------------------------


def flashinfer_gdn(x, use_cp=False):
    """States [N,HV,V,K], gates as factors, sequences by cu_seqlens. With context parallelism it
    needs the longest one."""
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    unless(x.gate == "log" and x.beta == "plain", "it takes gates and betas that are made")
    unless(x.K == 128 and x.V == 128, f"K = {x.K}, V = {x.V} (it takes 128)")
    N = len(x.cu) - 1
    state = torch.empty(N, x.HV, 128, 128, device="cuda")
    with torch.no_grad():
        o, state = chunk_gated_delta_rule(
            *(x[n].contiguous() for n in ("q", "k", "v")),
            x["g"].reshape(x.T, x.HV).float().exp(),
            x["beta"].float().contiguous(),
            scale=x.scale,
            initial_state=vk(x["initial_state"]),
            output_final_state=True,
            output_state=state,
            cu_seqlens=x.cu,
            use_qk_l2norm_in_kernel=x.l2norm,
            use_cp=use_cp,
            max_seqlen=int(x.cu.diff().max()),
        )
    return {"o": o, "final_state": vk(state)}


def flashinfer_cp_gdn(x):
    return flashinfer_gdn(x, True)


# ---- jax-linear-attention
# --------------------------------------------------------------------------------------------------


def jla(x, kind):
    """Forward, and gradients where the case has them, through NumPy: no process keeps both
    libraries' memory for long."""
    import jax
    import ml_dtypes
    import numpy
    from jla.ops import linear_attention

    unless(x.gate == "log" and x.beta == "plain", "it takes log gates and plain beta")
    unless(len(x.cu) == 2, "packed sequences: it takes segments without states")

    def there(t):
        if t.dtype == torch.bfloat16:
            return t.cpu().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return t.float().cpu().numpy()

    def back(a):
        return torch.from_numpy(numpy.asarray(a, dtype=numpy.float32)).cuda()

    given = {n: jax.numpy.asarray(there(x[n]))[None] for n in ("q", "k", "v", "g", "beta")}
    given["g"] = given["g"].astype(jax.numpy.float32)
    if kind == "gated_deltanet":
        given["g"] = given["g"].reshape(1, x.T, x.HV)
    if x["initial_state"] is not None:
        given["initial_state"] = jax.numpy.asarray(there(x["initial_state"]))

    def f(given):
        return linear_attention(
            kind,
            impl="mosaic_gpu",
            scale=x.scale,
            use_qk_l2norm=x.l2norm,
            output_final_state=True,
            **given,
        )

    (o, state), pull = jax.vjp(f, given)
    out = {"o": back(o)[0].bfloat16(), "final_state": back(state)}
    if not x.backward:
        return out
    d_state = jax.numpy.zeros_like(state)
    if x["dht"] is not None:
        d_state = jax.numpy.asarray(there(x["dht"]))
    grads = pull((jax.numpy.asarray(there(x["do"]))[None].astype(o.dtype), d_state))[0]
    if "initial_state" in grads:
        out["dh0"] = back(grads.pop("initial_state"))
    return out | {f"d{n}": back(g)[0].reshape(x[n].shape) for n, g in grads.items()}


def jla_kda(x):
    unless(x.H == x.HV, "grouped value heads")
    return jla(x, "kda")


def jla_gdn(x):
    return jla(x, "gated_deltanet")


def of_wheel(name):
    return lambda: importlib.metadata.version(name)


FLA, CUDNN = of_wheel("flash-linear-attention"), of_wheel("nvidia-cudnn-frontend")
FLASHINFER, JLA = of_wheel("flashinfer-python"), of_wheel("jax-linear-attention")
CALLS = {
    "fla-chunk-kda": (fla_chunk_kda, FLA),
    "fla-fused-recurrent-kda": (fla_recurrent_kda, FLA),
    "fla-chunk-gdn": (fla_chunk_gdn, FLA),
    "fla-chunk-gdn-forward": (fla_chunk_gdn_forward, FLA),
    "fla-fused-recurrent-gdn": (fla_recurrent_gdn, FLA),
    "fla-chunk-gdn2": (fla_chunk_gdn2, FLA),
    "fla-fused-recurrent-gdn2": (fla_recurrent_gdn2, FLA),
    "fla-chunk-dplr": (fla_chunk_dplr, FLA),
    "fla-chunk-dplr-safe": (fla_chunk_dplr_safe, FLA),
    "fla-fused-recurrent-dplr": (fla_recurrent_dplr, FLA),
    "fla-chunk-rwkv7": (fla_chunk_rwkv7, FLA),
    "fla-fused-recurrent-rwkv7": (fla_recurrent_rwkv7, FLA),
    "fla-chunk-comba-forward": (fla_chunk_comba, FLA),
    "fla-fused-recurrent-comba": (fla_recurrent_comba, FLA),
    "fla-chunk-oja": (fla_chunk_oja, FLA),
    "fla-fused-recurrent-oja": (fla_recurrent_oja, FLA),
    "fla-chunk-gla": (fla_chunk_gla, FLA),
    "fla-fused-recurrent-gla": (fla_recurrent_gla, FLA),
    "fla-chunk-ssd-forward": (fla_chunk_ssd, FLA),
    "fla-fused-recurrent-ssd": (fla_recurrent_ssd, FLA),
    "fla-chunk-deltaproduct-forward": (fla_chunk_deltaproduct, FLA),
    "flashqla-gdn": (flashqla_gdn, flashqla_version),
    "flashqla-gdn-forward": (flashqla_gdn_forward, flashqla_version),
    "cudnn-hopper-forward": (cudnn_forward, CUDNN),
    "cudnn-hopper-dsl-forward": (cudnn_dsl_forward, CUDNN),
    "cudnn-hopper-backward": (cudnn_backward, CUDNN),
    "flashkda-forward": (flashkda_forward, of_wheel("flash-kda")),
    "flashinfer-gdn-forward": (flashinfer_gdn, FLASHINFER),
    "flashinfer-cp-gdn-forward": (flashinfer_cp_gdn, FLASHINFER),
    "jla-kda": (jla_kda, JLA),
    "jla-gdn": (jla_gdn, JLA),
}
BY_NAME = {k.name: Kernel(k.name, k.project, k.op, k.claims, *CALLS[k.name]) for k in KERNELS}
