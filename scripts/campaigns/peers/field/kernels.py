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


class Inputs:
    """Tensors of a case on the device, and its settings. tokens first: q [T,H,K], g [T,HV,K]."""

    def __init__(self, path):
        x, self.meta = load(path)
        self.x = {n: t.cuda() for n, t in x.items()}
        self.T, self.H, self.K = self.x["q"].shape
        self.HV, self.V = self.x["v"].shape[-2:]
        self.cu = self.x.pop("cu_seqlens", torch.tensor([0, self.T], device="cuda")).long()
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
    op: str  # which recurrence: kda, gdn or gdn2
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
    "fla-chunk-gdn2": (fla_chunk_gdn2, FLA),
    "fla-fused-recurrent-gdn2": (fla_recurrent_gdn2, FLA),
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
