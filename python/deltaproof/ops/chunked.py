"""Functions of whole sequences, with gradients: FLA 0.6's names, arguments, layouts and results.

A recurrence is a row of MODELS of `kernels.py`; the functions differ in their arguments. Beside
FLA's own limits: see the table of python/README.md."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import checks
from . import kernels as c
from .checks import need, refuse
from .context import number_of
from .registered import How, chunk


@dataclass(frozen=True)
class Gate:
    """How g becomes the decay: as it is, or in the kernel."""

    in_kernel: bool = False
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    lower_bound: float | None = None

    @property
    def form(self) -> int:
        if not self.in_kernel:
            return c.GATES.index("log")
        return c.GATES.index("softplus" if self.lower_bound is None else "lower_bound")


def beta_form(sigmoid: bool, allow_neg_eigval: bool) -> int:
    need(
        sigmoid or not allow_neg_eigval,
        "allow_neg_eigval",
        "requires use_beta_sigmoid_in_kernel=True",
    )
    return c.BETAS.index(("plain", "sigmoid", "sigmoid2")[sigmoid + allow_neg_eigval])


def gate_of(
    in_kernel: bool, kwargs: dict[str, Any], lower_bound: float | None = None, safe: bool = False
) -> Gate:
    """A_log and dt_bias of kwargs, which are left out where the gate is not in the kernel."""
    A_log, dt_bias = kwargs.pop("A_log", None), kwargs.pop("dt_bias", None)
    if not in_kernel:
        return Gate()
    need(A_log is not None or lower_bound is not None, "A_log", "goes with use_gate_in_kernel=True")
    need(not safe or lower_bound is not None, "lower_bound", "goes with safe_gate=True")
    low = -5.0 if safe else -float("inf")
    need(
        lower_bound is None or low <= lower_bound < 0,
        "lower_bound",
        f"{lower_bound} is not in [{low}, 0)",
    )
    return Gate(True, A_log, dt_bias, lower_bound)


def parameters(gate: Gate, HV: int, Kg: int) -> tuple[Tensor | None, Tensor | None]:
    """A_log [HV] and dt_bias [HV][Kg], from any shape of as many numbers."""
    found = []
    for name, x, n in (("A_log", gate.A_log, HV), ("dt_bias", gate.dt_bias, HV * Kg)):
        if x is not None:
            if x.numel() != n:
                raise ValueError(f"{name}: has {x.numel()} numbers in place of {n}")
            x = x.reshape(HV, -1) if name == "dt_bias" else x.reshape(HV)
            refuse(
                x.dtype in checks.TYPES, f"{name} in {x.dtype}", "parameters are fp32, bf16, fp16"
            )
        found.append(x)
    return found[0], found[1]


def needs_gradients(*given: Tensor | None) -> bool:
    if not torch.is_grad_enabled():
        return False
    return any(x is not None and x.requires_grad for x in given)


def state_in(x: Tensor | None, v_first: bool, N: int, HV: int, K: int, V: int) -> Tensor | None:
    if x is None:
        return None
    if v_first:
        checks.shaped("initial_state", x, N=N, HV=HV, V=V, K=K)
        x = x.transpose(-1, -2)
    else:
        checks.shaped("initial_state", x, N=N, HV=HV, K=K, V=V)
    return x.float()


def run(
    model: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, s1: Tensor | None = None,
    s2: Tensor | None = None, *, gate: Gate | None = None, beta: int = 0,
    scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, l2norm: bool = False, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, by_tokens: bool = False,
    cp_context: Any = None, states: bool = False,
) -> Any:  # fmt: skip
    """Checks all arguments and runs the recurrence. Shapes: q [B,T,H,K], k [B,T,H,K] or
    [B,T,H,R,K], v likewise, g [B,T,HV,K] or [B,T,HV]. With by_tokens it runs token by token in
    fp32, whatever the recurrence. states: o, the final state, the states before every 64 tokens."""
    gate = gate or Gate()
    for name, x in (("q", q), ("k", k), ("v", v), ("g", g)):
        need(isinstance(x, Tensor), name, "is no tensor")
    checks.placed(
        q.device, k=k, v=v, g=g, beta=s1, s2=s2, A_log=gate.A_log, dt_bias=gate.dt_bias,
        initial_state=initial_state,
    )  # fmt: skip
    checks.of_numbers(q=q, k=k, v=v, g=g, beta=s1, initial_state=initial_state)
    h = How(
        c.MODELS.index(model), gate=gate.form, beta=beta, l2norm=int(l2norm),
        final=int(output_final_state),
    )  # fmt: skip
    need(q.dim() == 4, "q", "is not [B, T, H, K]")
    many = model in ("mkda", "gated-deltaproduct")
    need(v.dim() == (5 if many else 4), "v", "is not [B, T, HV, R, V]" if many else _V)
    B, T, H, K = q.shape
    HV, R, V = v.shape[2], v.shape[3] if many else 1, v.shape[-1]
    keys = {"R": R} if many else {}
    need(T > 0, "q", "has no tokens")
    need(H > 0 and HV % H == 0, "v", "its heads are no multiple of those of q")
    checks.shaped("k", k, B=B, T=T, H=H, **keys, K=K)
    checks.shaped("v", v, B=B, T=T, HV=HV, **keys, V=V)
    checks.shaped("g", g, B=B, T=T, HV=HV, **({} if h.one_gate else {"K": K}))
    ranks = 0
    if cp_context is not None:
        refuse(not states, "return_intermediate_states with cp_context", "ranks keep no states")
        refuse(initial_state is None and not output_final_state, "states with cp_context", _CP)
        bounds = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
        ranks = number_of(cp_context, bounds, B, T)
        cu_seqlens = cu_seqlens_cpu = None
    N = checks.sequences(q, cu_seqlens, cu_seqlens_cpu, initial_state)
    if h.strengths == ("beta",):
        checks.shaped("beta", s1, B=B, T=T, HV=HV, **keys)
        q, k, v = checks.alike(q=q, k=k, v=v)
        dtype = q.dtype
        q, k, v = checks.computable(q, k, v)
        g, s1 = checks.gates(g, s1)
    else:
        widths = {"erase": K, "write": V, "lr_a": K, "lr_b": K}
        FLA = {"erase": "b", "write": "w", "lr_a": "a", "lr_b": "b"}
        own: dict[str, Any] = dict(zip((FLA[n] for n in h.strengths), (s1, s2), strict=False))
        for n in h.strengths:
            checks.shaped(FLA[n], own[FLA[n]], B=B, T=T, HV=HV, width=widths[n])
        q, k, v, *rest = checks.alike(q=q, k=k, v=v, **own)
        dtype = q.dtype
        q, k, v, *rest = checks.computable(q, k, v, *rest)
        s1, s2 = rest if rest else (None, None)
        g, _ = checks.gates(g, None)
    A_log, dt_bias = parameters(gate, HV, 1 if h.one_gate else K)
    s0 = state_in(initial_state, state_v_first, N, HV, K, V)
    every = _whole_rows((q, k, v, g, s1, s2, A_log, dt_bias, s0), h, K, V)
    wanted = needs_gradients(*every)
    alone = ("gdn2", "gated-deltaproduct", "dplr") + (("gla", "ssd") if wanted else ())
    h = How(  # torch.compile of 2.6 refuses _replace()
        h.model, R, h.gate, h.beta, h.l2norm,
        path=c.TOKEN if by_tokens or model in alone else c.AUTO, backward=int(wanted),
        final=h.final, ranks=ranks, states=states * (1 + state_v_first),
    )  # fmt: skip
    o, final, kept = chunk(
        *every, cu_seqlens, cu_seqlens_cpu, K**-0.5 if scale is None else float(scale),
        float(gate.lower_bound or 0), list(h),
    )  # fmt: skip
    if K % 16 or V % 16:
        o, final = o[..., :V], final[..., :K, :V] if output_final_state else final
        if states:
            kept = kept[..., :V, :K] if state_v_first else kept[..., :K, :V]
    o = o.to(dtype)
    if not output_final_state:
        final = None
    elif state_v_first:
        final = final.transpose(-1, -2).contiguous()
    return (o, final, kept.to(dtype)) if states else (o, final)


def _whole_rows(
    given: tuple[Tensor | None, ...], h: How, K: int, V: int
) -> tuple[Tensor | None, ...]:
    """Channels of zeros up to the multiple of 16 that the kernels take. A key of zeros writes
    nothing and a value of zeros is one: no other channel sees them, and their gradients are 0."""
    more = {K: -K % 16, V: -V % 16}
    if not any(more.values()):
        return given
    q, k, v, g, s1, s2, A_log, dt_bias, s0 = given

    def wide(x: Tensor | None, width: int) -> Tensor | None:
        return None if x is None else pad(x, (0, more[width]))

    if h.strengths != ("beta",):
        widths = [V if n == "write" else K for n in h.strengths]
        s1, s2 = (wide(x, w) for x, w in zip_longest((s1, s2), widths))
    if not h.one_gate:
        g, dt_bias = wide(g, K), wide(dt_bias, K)
    s0 = None if s0 is None else pad(s0, (0, more[V], 0, more[K]))
    return wide(q, K), wide(k, K), wide(v, V), g, s1, s2, A_log, dt_bias, s0


_V = "is not [B, T, HV, V]"
_CP = "initial_state and output_final_state go with one rank, as they do in FLA"
_GRAPH = "plans go by the numbers of cu_seqlens; without it a call can be captured as it is"


def _checked_states(wanted: bool, disable_recompute: bool, kwargs: dict[str, Any]) -> bool:
    """return_intermediate_states, for inference alone as in FLA."""
    name = "return_intermediate_states"
    if wanted:
        need(torch.is_inference_mode_enabled(), name, "goes with torch.inference_mode()")
        need(not disable_recompute, name, "goes with disable_recompute=False")
        refuse(kwargs.get("chunk_size", 64) in (64, None), f"{name} with chunk_size", _BEFORE)
    return wanted


_BEFORE = "states are kept before every 64 tokens"


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.LongTensor | None = None,
    cu_seqlens_cpu: torch.LongTensor | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    **kwargs: Any,
) -> Any:
    """Kimi Delta Attention. q k [B,T,H,K], v [B,T,HV,V], g [B,T,HV,K], beta [B,T,HV]; with
    use_gate_in_kernel A_log [HV] and dt_bias [HV*K]. Returns o [B,T,HV,V] and, asked for, the final
    state [N,HV,K,V] in fp32 (state_v_first: [N,HV,V,K]), else None.

    disable_recompute is taken and changes nothing: the backward recomputes what it needs. With
    return_intermediate_states (in inference mode) a third result holds the states before every 64
    tokens of each sequence, [B,chunks,HV,K,V] in the type of q."""
    refuse(not (use_graph and cu_seqlens is not None), "use_graph with cu_seqlens", _GRAPH)
    return _kda(
        "kda", q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, safe_gate, lower_bound,
        disable_recompute, return_intermediate_states, state_v_first, cu_seqlens, cu_seqlens_cpu,
        cp_context, kwargs,
    )  # fmt: skip


def chunk_mkda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.LongTensor | None = None,
    cu_seqlens_cpu: torch.LongTensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> Any:
    """KDA with R keys a token, R in {1, 2, 4}, which all read the state before the token. As
    chunk_kda, with k [B,T,H,R,K], v [B,T,HV,R,V], beta [B,T,HV,R]."""
    return _kda(
        "mkda", q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, safe_gate, lower_bound,
        disable_recompute, return_intermediate_states, state_v_first, cu_seqlens, cu_seqlens_cpu,
        cp_context, kwargs,
    )  # fmt: skip


def _kda(
    model: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None,
    initial_state: Tensor | None, output_final_state: bool, l2norm: bool, gate_in_kernel: bool,
    beta_sigmoid: bool, allow_neg_eigval: bool, safe_gate: bool, lower_bound: float | None,
    disable_recompute: bool, return_intermediate_states: bool, state_v_first: bool,
    cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None, cp_context: Any,
    kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    state_v_first = checks.old_names(kwargs, state_v_first)
    states = _checked_states(return_intermediate_states, disable_recompute, kwargs)
    checks.chunk_size(kwargs, (32, 64), "either 32 or 64")
    gate = gate_of(gate_in_kernel, kwargs, lower_bound, safe_gate)
    checks.none_left(kwargs)
    return run(
        model, q, k, v, g, beta, gate=gate, beta=beta_form(beta_sigmoid, allow_neg_eigval),
        scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        l2norm=l2norm, state_v_first=state_v_first, cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu, cp_context=cp_context, states=states,
    )  # fmt: skip


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.LongTensor | None = None,
    cu_seqlens_cpu: torch.LongTensor | None = None,
    chunk_indices: torch.LongTensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet. As chunk_kda, with g [B,T,HV]; use_gate_in_kernel, A_log [HV] and dt_bias
    [HV] are keyword arguments. chunk_indices is not needed and not read."""
    state_v_first = checks.old_names(kwargs, state_v_first)
    checks.chunk_size(kwargs, (16, 32, 64), "16, 32 or 64")
    gate = gate_of(bool(kwargs.pop("use_gate_in_kernel", False)), kwargs)
    checks.none_left(kwargs)
    return run(
        "gdn", q, k, v, g, beta, gate=gate,
        beta=beta_form(use_beta_sigmoid_in_kernel, allow_neg_eigval), scale=scale,
        initial_state=initial_state, output_final_state=output_final_state,
        l2norm=use_qk_l2norm_in_kernel, state_v_first=state_v_first, cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu, cp_context=cp_context,
    )  # fmt: skip


def chunk_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    cu_seqlens: torch.LongTensor | None = None,
    cu_seqlens_cpu: torch.LongTensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cp_context: Any = None,
    **kwargs: Any,
) -> Any:
    """Gated DeltaNet-2, token by token in fp32: b [B,T,H,K] erases, w [B,T,H,V] writes."""
    state_v_first = checks.old_names(kwargs, state_v_first)
    states = _checked_states(return_intermediate_states, disable_recompute, kwargs)
    checks.chunk_size(kwargs, (64,), "64 for GDN-2")
    gate = gate_of(use_gate_in_kernel, kwargs, lower_bound, safe_gate)
    checks.none_left(kwargs)
    return run(
        "gdn2", q, k, v, g, b, w, gate=gate, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, l2norm=use_qk_l2norm_in_kernel,
        state_v_first=state_v_first, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu,
        cp_context=cp_context, states=states,
    )  # fmt: skip


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: int | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.LongTensor | None = None,
    cu_seqlens_cpu: torch.LongTensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated linear attention: g [B,T,H,K]. In bf16 a call without gradients takes
    tensor cores if K is 64 or 128 and V a multiple of 64. Else it runs token by token in fp32."""
    return run(
        "gla", q, k, v, g, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, state_v_first=state_v_first, cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
    )  # fmt: skip


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.LongTensor | None = None,
    cu_seqlens_cpu: torch.LongTensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention with a decay a head (Mamba-2's SSD), computed as chunk_gla: g [B,T,H], None:
    no decay."""
    state_v_first = checks.old_names(kwargs, state_v_first)
    kwargs.pop("chunk_size", None)
    checks.none_left(kwargs)
    refuse(g_gamma is None, "g_gamma", "the kernels take a decay of each token: pass g")
    if g is None:
        g = torch.zeros(v.shape[:3], device=q.device)
    return run(
        "ssd", q, k, v, g, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, state_v_first=state_v_first, cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
    )  # fmt: skip


def chunk_gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    num_householder: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.LongTensor | None = None,
    cu_seqlens_cpu: torch.LongTensor | None = None,
    cp_context: Any = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaProduct, token by token in fp32: num_householder (up to 8) keys a token, one after
    the other. Shapes: k [B,T*n,H,K], v [B,T*n,H,V], beta [B,T*n,H], g [B,T,H], None: no decay."""
    B, T, H, _ = q.shape
    n = num_householder
    refuse(1 <= n <= 8, f"num_householder = {n}", "the kernels take 1 to 8 keys a token")
    for name, x in (("k", k), ("v", v), ("beta", beta)):
        need(
            x.dim() >= 3 and x.shape[:2] == (B, T * n),
            name,
            f"has shape {list(x.shape)} in place of [B, T * num_householder, ..] = [{B}, {T * n}]",
        )
    k, v = (x.unflatten(1, (T, n)).transpose(2, 3) for x in (k, v))
    beta = beta.unflatten(1, (T, n)).transpose(2, 3)
    if g is None:
        g = torch.zeros(B, T, H, device=q.device)
    return run(
        "gated-deltaproduct", q, k, v, g, beta, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, l2norm=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu,
        cp_context=cp_context,
    )  # fmt: skip


def chunk_dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.LongTensor | None = None,
    cu_seqlens_cpu: torch.LongTensor | None = None,
    safe_gate: bool = False,
    chunk_size: int | None = None,
    disable_recompute: bool = False,
    cp_context: Any = None,
    lower_bound: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """S <- (diag(exp gk) + b a') S + k v', token by token in fp32; all [B,T,H,..]. safe_gate,
    chunk_size, lower_bound and disable_recompute are taken and change nothing."""
    state_v_first = checks.old_names(kwargs, False)
    checks.none_left(kwargs)
    return run(
        "dplr", q, k, v, gk, a, b, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, state_v_first=state_v_first, cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu, cp_context=cp_context,
    )  # fmt: skip


def chunk_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.LongTensor | None = None,
    cu_seqlens_cpu: torch.LongTensor | None = None,
    safe_gate: bool = False,
    chunk_size: int | None = None,
    disable_recompute: bool = False,
    cp_context: Any = None,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """RWKV-7: chunk_dplr_delta_rule of r, with the decay w in log space."""
    return chunk_dplr_delta_rule(
        r, k, v, a, b, w, scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu,
        cp_context=cp_context,
    )  # fmt: skip
