"""Calls of public kernels, and of ours, on a row of rows.py.

PEERS[name](row) gives (call, contract), or raises NotServed. A call does one pass and waits for
nothing. A list of calls has data of its own for each. Kernels are imported as installed."""

import importlib
import importlib.metadata
import importlib.util
import os
import sys
import types

LOWER = -5.0
JAX = "jax-linear-attention"


def slots_of(r):
    """Calls of a decode graph, each on states of its own, so that no state stays in L2."""
    return 8 if r.B <= 32 else 2


class NotServed(Exception):
    pass


def served(ok, why):
    if not ok:
        raise NotServed(why)


def of_wheel(name):
    """The version of an installed distribution, and '' where there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


# ---- inputs
# --------------------------------------------------------------------------------------------------


def numbers(*shape, dtype="bfloat16", scale=1.0):
    import torch

    return torch.randn(*shape, device="cuda", dtype=getattr(torch, dtype)) * scale


def inputs(r):
    """q, k, v, g, beta [1, tokens, heads, ..], raw or as the row gives them, and of gates."""
    import torch

    torch.manual_seed(1)
    n, kda = r.tokens, r.op == "kda"
    x = {"q": numbers(1, n, r.H, 128), "k": numbers(1, n, r.H, 128)}
    x["v"] = numbers(1, n, r.HV, 64 if r.op == "ssd" else 128)
    x["g"] = numbers(1, n, r.HV, *([128] if kda else []))
    x["beta"] = numbers(1, n, r.HV)
    if r.given:
        for name in ("q", "k"):
            x[name] = torch.nn.functional.normalize(x[name].float(), dim=-1).bfloat16()
    if r.given or not kda:
        x["g"] = LOWER * torch.sigmoid(x["g"].float() + r.bias)
        x["beta"] = torch.sigmoid(x["beta"].float())
    else:
        x["A_log"] = torch.zeros(r.HV, device="cuda")
        x["dt_bias"] = torch.full((r.HV * 128,), r.bias, device="cuda")
    return x


def starts(r, dtype="int64"):
    """cu_seqlens of B sequences, on the device and here."""
    import torch

    cu = torch.arange(0, r.tokens + 1, r.T, dtype=getattr(torch, dtype))
    return cu.cuda(), cu


def packed(r):
    """[tokens, heads, ..] without a batch, as libraries of serving take rows."""
    return {n: t[0] if t.dim() > 2 else t for n, t in inputs(r).items()}


def of_row(r):
    """The contract of a row in words."""
    inside = "gate and sigmoid inside" if r.op == "kda" and not r.given else "log gates given"
    norm = "" if r.op == "ssd" else ", rows given" if r.given else ", norm inside"
    return inside + norm + (", states out" if r.states else "")


def backward_of(forward, leaves, do):
    """A call of the backward alone: its forward runs once on each stream that asks."""
    import torch

    held = {}

    def call():
        stream = torch.cuda.current_stream().cuda_stream
        if stream not in held:
            held.clear()
            held[stream] = forward()
        return torch.autograd.grad(held[stream], leaves, do, retain_graph=True)

    return call


def decode_inputs(r):
    """A list of batches: q, k, v, g, beta [B, 1, heads, ..], and the parameters of gates."""
    import torch

    torch.manual_seed(1)
    kda = r.op == "kda"
    batches = [
        {
            "q": numbers(r.B, 1, r.H, 128),
            "k": numbers(r.B, 1, r.H, 128),
            "v": numbers(r.B, 1, r.HV, 128),
            "g": numbers(r.B, 1, r.HV, *([128] if kda else [])),
            "beta": numbers(r.B, 1, r.HV),
        }
        for _ in range(slots_of(r))
    ]
    gate = {
        "A_log": torch.zeros(r.HV, device="cuda"),
        "dt_bias": torch.full((r.HV * (128 if kda else 1),), -4.0, device="cuda"),
    }
    return batches, gate


def pool(r):
    """States of every batch, and the slots of each."""
    import torch

    batches = slots_of(r)
    type_ = torch.float32 if r.dtype == "fp32" else torch.bfloat16
    states = torch.randn(batches * r.B, r.HV, 128, 128, device="cuda").to(type_)
    slots = torch.arange(batches * r.B, dtype=torch.int32, device="cuda").reshape(batches, r.B)
    return states, slots


INSIDE = {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True}
IN_PLACE = "all inside, states in place"


# ---- FLA's functions: ours have their names and arguments
# --------------------------------------------------------------------------------------------------


def fla_like(r, chunk):
    """Forward or backward of a function with the arguments of FLA's chunk_*."""
    import torch

    x, settings = inputs(r), {}
    if r.op != "ssd":
        settings["use_qk_l2norm_in_kernel"] = not r.given
    if r.op == "kda" and not r.given:
        settings |= {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
        settings |= {"lower_bound": LOWER, "safe_gate": True}
    if r.op == "ssd":
        del x["beta"]
    if r.B > 1:
        settings["cu_seqlens"], settings["cu_seqlens_cpu"] = starts(r)
    settings["output_final_state"] = r.states
    if r.part == "forward":

        def call():
            with torch.no_grad():
                return chunk(**x, **settings)

        return call, of_row(r)
    leaves = [t.requires_grad_(True) for t in x.values()]
    do = torch.randn_like(x["v"])
    return backward_of(lambda: chunk(**x, **settings)[0], leaves, do), of_row(r)


def deltaproof(r):
    from deltaproof import ops

    if r.part == "decode":
        return deltaproof_decode(r)
    chunk = {"kda": ops.chunk_kda, "gdn": ops.chunk_gated_delta_rule, "ssd": ops.chunk_simple_gla}
    return fla_like(r, chunk[r.op])


def deltaproof_vk(r):
    """States [V][K], as FlashInfer has them."""
    served(r.part == "decode", "decode alone: forwards have states [K][V]")
    return deltaproof_decode(r, v_first=True)


def deltaproof_decode(r, v_first=False):
    import torch

    from deltaproof import ops

    batches, gate = decode_inputs(r)
    states, slots = pool(r)
    kda = r.op == "kda"
    f = ops.fused_recurrent_kda if kda else ops.fused_recurrent_gated_delta_rule
    more = {**INSIDE, "use_beta_sigmoid_in_kernel": True}
    more |= {"lower_bound": LOWER} if kda else {}
    more["state_v_first"] = v_first

    def step(x, s):
        with torch.no_grad():
            return f(**x, **gate, **more, initial_state=states, ssm_state_indices=s)

    return [lambda x=x, s=s: step(x, s) for x, s in zip(batches, slots, strict=True)], (
        IN_PLACE + (" [V][K]" if v_first else "")
    )


def fla(r):
    if r.part == "decode":
        return fla_decode(r)
    if r.op == "kda":
        from fla.ops.kda import chunk_kda as chunk
    elif r.op == "gdn":
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as chunk
    else:
        from fla.ops.simple_gla import chunk_simple_gla

        def chunk(q, k, **more):
            return chunk_simple_gla(q.expand(-1, -1, r.HV, -1), k.expand(-1, -1, r.HV, -1), **more)

    call, contract = fla_like(r, chunk)
    return call, contract + (", q and k copied to every head" if r.op == "ssd" else "")


def fla_decode(r):
    """KDA in place; GDN writes states of their own, as its function does."""
    import torch

    served(r.dtype == "fp32", "states in fp32 alone")
    batches, gate = decode_inputs(r)
    states, slots = pool(r)
    if r.op == "kda":
        from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd as f

        cu = torch.arange(0, r.B + 1, dtype=torch.int32, device="cuda")

        def step(x, s):
            flat = {n: t.transpose(0, 1).contiguous() for n, t in x.items()}
            return lambda: f(
                **flat,
                **gate,
                **INSIDE,
                use_beta_sigmoid_in_kernel=True,
                lower_bound=LOWER,
                initial_state=states,
                scale=128**-0.5,
                inplace_final_state=True,
                cu_seqlens=cu,
                ssm_state_indices=s,
            )

        return [step(x, s) for x, s in zip(batches, slots, strict=True)], IN_PLACE
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule as f

    def gdn_step(x, s):
        with torch.no_grad():
            return f(
                **x,
                **gate,
                **INSIDE,
                use_beta_sigmoid_in_kernel=True,
                initial_state=s,
                output_final_state=True,
            )

    each = states.reshape(-1, r.B, *states.shape[1:])
    calls = [lambda x=x, s=s: gdn_step(x, s) for x, s in zip(batches, each, strict=True)]
    return calls, "all inside, states to a place of their own"


# ---- FlashInfer
# --------------------------------------------------------------------------------------------------


def flashinfer_prefill(r, use_cp):
    import torch
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    served(r.op == "gdn" and r.part == "forward", "GDN forward alone")
    x = packed(r)
    cu, _ = starts(r)
    alpha, out = x["g"].exp(), torch.empty_like(x["v"])
    state = torch.empty(r.B, r.HV, 128, 128, device="cuda")

    def call():
        return chunk_gated_delta_rule(
            x["q"],
            x["k"],
            x["v"],
            alpha,
            x["beta"],
            output=out,
            output_state=state,
            output_final_state=True,
            cu_seqlens=cu,
            use_qk_l2norm_in_kernel=not r.given,
            use_cp=use_cp,
            max_seqlen=r.T,
        )

    norm = "rows given" if r.given else "norm by a kernel before"
    return call, f"exp of log gates given, {norm}, states out always"


def flashinfer(r):
    if r.part == "decode":
        return flashinfer_decode(r)
    return flashinfer_prefill(r, False)


def flashinfer_cp(r):
    served(r.part == "forward", "prefill alone")
    return flashinfer_prefill(r, True)


def flashinfer_decode(r):
    import torch

    batches, gate = decode_inputs(r)
    states, slots = pool(r)
    each = states.reshape(-1, r.B, *states.shape[1:])
    out = torch.empty(r.B, 1, r.HV, 128, device="cuda", dtype=torch.bfloat16)
    calls = []
    if r.op == "kda":
        from flashinfer.kda_decode import recurrent_kda

        served(r.dtype == "bf16", "KDA states in bf16 alone")
        for x, s in zip(batches, each, strict=True):
            calls.append(
                lambda x=x, s=s: recurrent_kda(
                    **x,
                    **gate,
                    **INSIDE,
                    lower_bound=LOWER,
                    beta_is_logit=True,
                    initial_state=s,
                    output=out,
                )
            )
        return calls, IN_PLACE
    from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose as f

    for x, s, at in zip(batches, each, slots, strict=True):
        x = {"a": x.pop("g"), "b": x.pop("beta"), **x, **gate, "output": out}
        # a pool with slots in bf16, as its callers pass it; its fp32 kernel takes the states
        where = (
            {"state": s}
            if r.dtype == "fp32"
            else {"state": None, "initial_state": states, "initial_state_indices": at}
        )
        calls.append(lambda x=x, where=where: f(**x, **where, use_qk_l2norm=True))
    return calls, IN_PLACE


# ---- cuDNN frontend, FlashKDA, FlashQLA, mamba_ssm
# --------------------------------------------------------------------------------------------------


def cudnn(r, plan="kda_hopper_cuda"):
    import torch
    from cudnn.linear_attention.ops import kimi_delta_attention

    served(r.op == "kda" and r.part != "decode", "KDA forward and backward alone, on Hopper")
    x = packed(r)
    x["cu_seqlens"], _ = starts(r, "int32")
    settings = {"plan_name": plan, "use_qk_l2norm_in_kernel": not r.given}
    if not r.given:
        served(r.part == "forward", "its backward takes log gates, plain beta and unit keys")
        x |= {"g": x["g"].float(), "beta": x["beta"].float()}
        x |= {"a_log": x.pop("A_log"), "dt_bias": x["dt_bias"].reshape(r.HV, 128)}
        settings |= {"safe_gate": True, "gate_lower_bound": LOWER}
        settings["use_beta_sigmoid_in_kernel"] = True
    settings["output_final_state"] = r.states

    def forward():
        return kimi_delta_attention(**x, **settings)

    if r.part == "backward":
        leaves = [x[n].requires_grad_(True) for n in ("q", "k", "v", "g", "beta")]
        do = torch.randn_like(x["v"])
        return backward_of(lambda: forward()[0], leaves, do), of_row(r) + "; fp32 g and beta"

    def call():
        with torch.no_grad():
            return forward()

    return call, of_row(r) + "; fp32 g and beta"


def cudnn_dsl(r):
    served(r.part == "forward", "forward alone")
    return cudnn(r, "kda_hopper")


def flashkda(r):
    import flash_kda
    import torch

    served(r.op == "kda" and r.part == "forward", "KDA forward alone")
    served(not r.given, "it has the gate and the norm inside")
    served(r.H == r.HV, "heads alike alone")
    x = inputs(r)
    x["dt_bias"] = x["dt_bias"].reshape(r.HV, 128)
    x["out"] = torch.empty_like(x["v"])
    if r.B > 1:
        x["cu_seqlens"], _ = starts(r)
    if r.states:
        x["final_state"] = torch.empty(r.B, r.HV, 128, 128, device="cuda")
    return lambda: flash_kda.fwd(**x, scale=128**-0.5, lower_bound=LOWER), of_row(r)


def flashqla(r):
    import torch

    folder = os.environ.get("FLASHQLA", "")  # of its own: FLA runs TileLang where it finds it
    if folder and folder not in sys.path:
        sys.path.insert(0, folder)
    from flash_qla import chunk_gated_delta_rule

    served(r.op == "gdn" and r.part == "forward", "GDN forward alone is timed")
    x = inputs(r)
    more = {"cu_seqlens": starts(r)[0]} if r.B > 1 else {}
    more |= {"use_qk_l2norm_in_kernel": not r.given, "output_final_state": r.states}

    def call():
        with torch.no_grad():
            return chunk_gated_delta_rule(**x, **more)

    return call, of_row(r)


def without_extension(name):
    """A package whose own __init__ needs a compiled extension, as its folder alone: Triton's
    kernels in it need none."""
    if name in sys.modules:
        return
    found = importlib.util.find_spec(name)
    served(found, f"no module {name}")
    module = types.ModuleType(name)
    module.__path__ = list(found.submodule_search_locations)
    sys.modules[name] = module


def mamba(r):
    import torch

    served(r.op == "ssd" and r.part == "forward", "SSD forward alone")
    without_extension("mamba_ssm")
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    x = inputs(r)
    dt, A = -x["g"], torch.full((r.HV,), -1.0, device="cuda")

    def call():
        with torch.no_grad():
            return mamba_chunk_scan_combined(x["v"], dt, A, x["k"], x["q"], 256)

    return call, "dt and A inside"


PEERS = {
    "deltaproof": deltaproof,
    "deltaproof-vk": deltaproof_vk,
    "flashinfer": flashinfer,
    "flashinfer-cp": flashinfer_cp,
    "cudnn-hopper": cudnn,
    "cudnn-hopper-dsl": cudnn_dsl,
    "flashkda": flashkda,
    "mamba-ssm": mamba,
    JAX: None,  # timed_jax.py: a process without PyTorch
    "fla": fla,
    "flashqla": flashqla,
}
# recurrences of the kernels that compile just in time and keep that on disk, so that all compile at
# once before any is timed
COMPILED = {"fla": ("kda", "gdn", "ssd"), "flashqla": ("gdn",), "mamba-ssm": ("ssd",)}
WHEELS = {
    "deltaproof": "deltaproof",
    "deltaproof-vk": "deltaproof",
    "flashinfer": "flashinfer-python",
    "flashinfer-cp": "flashinfer-python",
    "cudnn-hopper": "nvidia-cudnn-frontend",
    "cudnn-hopper-dsl": "nvidia-cudnn-frontend",
    "flashkda": "flash-kda",
    "mamba-ssm": "mamba-ssm",
    JAX: "jax-linear-attention",
    "fla": "flash-linear-attention",
    "flashqla": "flash-qla",
}
