"""Functions of a few tokens: FLA 0.6's fused_recurrent_*, and a pool of states as vLLM and SGLang
pass it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from . import checks
from . import kernels as c
from .checks import need, refuse
from .chunked import Gate, beta_form, gate_of, needs_gradients, parameters, run
from .plans import PLANS, bounds, is_current, stream_of
from .registered import Step, alone, decode


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: torch.LongTensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """KDA token by token in fp32, arguments and results as chunk_kda's. Up to 8 tokens a sequence
    without gradients are one kernel; more, and gradients, the recurrence over whole sequences.

    With ssm_state_indices (keyword) initial_state is a pool [slots,HV,K,V], fp32, bf16 or fp16. It
    is written in place, and returned. If ssm_state_indices is [N], it has each sequence's slot. If
    it is [N,T], the state after each token goes to a slot of its own. Then num_accepted_tokens [N]
    is the number of accepted tokens: the state is read from ssm_state_indices[n, accepted - 1]. A
    slot below 0 is padding: o is 0, no state is written. Up to 8 tokens a sequence."""
    given = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    settings = (
        "kda", scale, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound, state_v_first,
    )  # fmt: skip
    known = Known(settings, given, cu_seqlens, kwargs)
    if known.step is not None and (made := known.call()) is not None:
        return made
    gate = gate_of(use_gate_in_kernel, {"A_log": A_log, "dt_bias": dt_bias}, lower_bound)
    return _recur(
        "kda", q, k, v, g, beta, gate, beta_form(use_beta_sigmoid_in_kernel, allow_neg_eigval),
        scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, state_v_first,
        cu_seqlens, kwargs, known,
    )  # fmt: skip


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.LongTensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet token by token, as fused_recurrent_kda. g [B,T,HV] or gk [B,T,HV,K], neither:
    no decay; beta None: ones."""
    given = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    settings = (
        "gdn", scale, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, None, state_v_first,
    )  # fmt: skip
    others = cu_seqlens if gk is None and gv is None else gk
    known = Known(settings, given, others, kwargs)
    if known.step is not None and (made := known.call()) is not None:
        return made
    refuse(gv is None, "gv", "the kernels have no decay of value channels")
    refuse(g is None or gk is None, "g with gk", "the kernels take one decay: pass their sum as gk")
    need(not use_gate_in_kernel or g is not None, "g", "goes with use_gate_in_kernel=True")
    gate = gate_of(use_gate_in_kernel, {"A_log": A_log, "dt_bias": dt_bias})
    if beta is None:
        beta = torch.ones(v.shape[:3], dtype=torch.float32, device=v.device)
    decay = g if gk is None else gk
    if decay is None:
        decay = torch.zeros(v.shape[:3], dtype=torch.float32, device=v.device)
    return _recur(
        "gdn" if gk is None else "kda", q, k, v, decay, beta, gate,
        beta_form(use_beta_sigmoid_in_kernel, allow_neg_eigval), scale, initial_state,
        output_final_state, use_qk_l2norm_in_kernel, state_v_first, cu_seqlens, kwargs, known,
    )  # fmt: skip


class Known:
    """A call by what its checks look at. If an earlier call had the same, and none of its tensors
    was converted, its step is called again without checks."""

    _steps: dict[Hashable, tuple[Step, Tensor | None]] = {}
    step: Any
    key: Hashable | None

    def __init__(
        self, settings: tuple[Any, ...], given: tuple[Any, ...], other: Any,
        kwargs: dict[str, Any],
    ) -> None:  # fmt: skip
        self.step = self.key = None
        slots, accepted = kwargs.get("ssm_state_indices"), kwargs.get("num_accepted_tokens")
        self.pool, self.final = slots is not None, settings[2]
        some = self.pool + (accepted is not None)
        if other is not None or len(kwargs) != some or not (alone() and is_current(given[0])):
            return
        self.given = (*given, slots, accepted)
        plain = all(type(x) in _PLAIN for x in (*self.given, *settings))
        if torch._C._is_any_autocast_enabled() or not plain:
            return
        learns = torch.is_grad_enabled()
        self.key = settings, tuple(
            None if x is None
            else (x.shape, x.dtype, x.device, x.is_contiguous(), learns and x.requires_grad)
            for x in self.given
        )  # fmt: skip
        self.step = self._steps.get(self.key)

    @classmethod
    def clear(cls) -> None:
        cls._steps.clear()

    def call(self) -> tuple[Tensor, Tensor | None] | None:
        """None: an address is not of 16 bytes."""
        *given, state, slot, accepted = self.given
        if any(x is not None and x.data_ptr() % 16 for x in self.given):
            return None
        step, own = self.step
        if self.pool:
            start, states = None, state
        else:
            start, slot = state, own
            states = step.zeros() if state is None else torch.empty_like(state)
        o = step((*given, states, start, slot, accepted), stream_of(step.device))
        return o, states if self.final or self.pool else None

    def keep(self, used: tuple[Tensor | None, ...], settings: tuple[Any, ...]) -> None:
        """used: what the step was called with, in its order."""
        if self.key is None:
            return
        *rows, states, start, own, accepted = used
        taken = (*rows, states if self.pool else start, own if self.pool else None, accepted)
        if not all(map(_the_same, self.given, taken)):
            return
        if len(self._steps) >= PLANS:
            self._steps.clear()
        self._steps[self.key] = Step(used, None, *settings), own


def _the_same(x: Tensor | None, y: Tensor | None) -> bool:
    """The numbers that one holds are those of the other, one after the other."""
    if x is None or y is None:
        return x is y
    return x.data_ptr() == y.data_ptr() != 0 and x.dtype == y.dtype and x.is_contiguous()


_PLAIN = {torch.Tensor, torch.nn.Parameter, type(None), str, bool, int, float}


def _recur(
    model: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, gate: Gate, form: int,
    scale: float | None, initial_state: Tensor | None, output_final_state: bool, l2norm: bool,
    state_v_first: bool, cu_seqlens: Tensor | None, kwargs: dict[str, Any], known: Known,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    kinds = {q.dtype, k.dtype, v.dtype}
    if len(kinds) > 1 and kinds <= set(checks.TYPES):
        o, state = _recur(
            model, q.float(), k.float(), v.float(), g, beta, gate, form, scale, initial_state,
            output_final_state, l2norm, state_v_first, cu_seqlens, kwargs, known,
        )  # fmt: skip
        return o.to(v.dtype), state
    state_v_first = checks.old_names(kwargs, state_v_first)
    cu_cpu = kwargs.pop("cu_seqlens_cpu", None)
    slots, accepted = (kwargs.pop(n, None) for n in ("ssm_state_indices", "num_accepted_tokens"))
    in_place = kwargs.pop("inplace_final_state", slots is not None)
    checks.none_left(kwargs)
    refuse(
        in_place == (slots is not None),
        "inplace_final_state",
        "states are written in place where ssm_state_indices says where, and only there",
    )
    need(accepted is None or slots is not None, "num_accepted_tokens", "needs ssm_state_indices")
    refuse(
        beta.dim() != v.dim(), "beta [B,T,HV,V]", "the kernels have one beta a value head and token"
    )
    each = (q, k, v, g, beta, gate.A_log, gate.dt_bias, initial_state)
    if slots is None and (
        needs_gradients(*each) or cu_seqlens is not None or not _one_kernel(q, v)
    ):
        return run(
            model, q, k, v, g, beta, gate=gate, beta=form, scale=scale,
            initial_state=initial_state, output_final_state=output_final_state, l2norm=l2norm,
            state_v_first=state_v_first, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_cpu,
            by_tokens=True,
        )  # fmt: skip
    return _decode(
        model, q, k, v, g, beta, gate, form, scale, initial_state, output_final_state, l2norm,
        state_v_first, cu_seqlens, cu_cpu, slots, accepted, known,
    )  # fmt: skip


def _one_kernel(q: Tensor, v: Tensor) -> bool:
    return (
        q.dim() == 4
        and 1 <= q.shape[1] <= c.DECODE_TOKENS
        and q.shape[-1] in (32, 64, 128, 256)
        and v.shape[-1] % 32 == 0
    )


def _sides(v_first: bool, K: int, V: int) -> dict[str, int]:
    return {"V": V, "K": K} if v_first else {"K": K, "V": V}


@lru_cache(maxsize=64)
def _count(n: int, device: torch.device) -> Tensor:
    return torch.arange(n, dtype=torch.int32, device=device)


def _decode(
    model: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, gate: Gate, form: int,
    scale: float | None, states: Tensor | None, output_final_state: bool, l2norm: bool,
    v_first: bool, cu: Tensor | None, cu_cpu: Tensor | None, slots: Tensor | None,
    accepted: Tensor | None, known: Known,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    need(q.dim() == 4, "q", "is not [B, T, H, K]")
    checks.placed(
        q.device, k=k, v=v, g=g, beta=beta, A_log=gate.A_log, dt_bias=gate.dt_bias,
        initial_state=states, ssm_state_indices=slots, num_accepted_tokens=accepted,
    )  # fmt: skip
    B, T, H, K = q.shape
    need(v.dim() == 4, "v", "is not [B, T, HV, V]")
    HV, V = v.shape[2], v.shape[3]
    need(H > 0 and HV % H == 0, "v", "its heads are no multiple of those of q")
    checks.shaped("k", k, B=B, T=T, H=H, K=K)
    checks.shaped("v", v, B=B, T=T, HV=HV, V=V)
    checks.shaped("g", g, B=B, T=T, HV=HV, **({"K": K} if model == "kda" else {}))
    checks.shaped("beta", beta, B=B, T=T, HV=HV)
    q, k, v = checks.alike(q=q, k=k, v=v)
    dtype = q.dtype
    q, k, v = checks.computable(q, k, v)
    g, strength = checks.gates(g, beta)
    A_log, dt_bias = parameters(gate, HV, K if model == "kda" else 1)
    rows: tuple[Any, ...] = (q, k, v, g, strength)
    length = at = start = None
    if slots is not None:
        if cu is not None:
            checks.sequences(q, cu, cu_cpu, None)
            rows, length, at = _padded(rows, bounds(cu, cu_cpu, B, T), q.device)
        states = _pool(states, slots, accepted, rows[0].shape[:2], v_first, HV, K, V)
        slot = slots.to(torch.int32).contiguous()
        accepted = None if accepted is None else accepted.to(torch.int32).contiguous()
    elif states is None:
        states = torch.zeros(B, HV, *_sides(v_first, K, V).values(), device=q.device)
        slot = _count(B, q.device)
    else:
        checks.shaped("initial_state", states, N=B, HV=HV, **_sides(v_first, K, V))
        start = states.to(torch.float32).contiguous()
        states, slot = torch.empty_like(start), _count(B, q.device)
    given = (*rows, A_log, dt_bias, states, start, slot, accepted)
    settings = (
        K**-0.5 if scale is None else float(scale), float(gate.lower_bound or 0),
        [gate.form, form, int(l2norm), 1, c.VK if v_first else c.KV],
    )  # fmt: skip
    o = decode(*given, length, *settings)
    if cu is None:
        known.keep(given, settings)
    if at is not None:
        o = o.flatten(0, 1)[at].unsqueeze(0)
    return o.to(dtype), states if output_final_state or slots is not None else None


def _padded(
    rows: tuple[Tensor, ...], cu: tuple[int, ...], device: torch.device
) -> tuple[tuple[Tensor, ...], Tensor | None, Tensor | None]:
    """Packed sequences as a batch: rows of it, lengths, where each token lies; None and None
    where all are as long."""
    longest = max(b - a for a, b in zip(cu, cu[1:], strict=False))
    N = len(cu) - 1
    if cu[-1] == N * longest:
        return tuple(x.unflatten(1, (N, longest)).squeeze(0) for x in rows), None, None
    at, length = _places(cu, longest, device)
    padded = tuple(
        x.new_zeros(N * longest, *x.shape[2:]).index_copy(0, at, x[0]).unflatten(0, (N, longest))
        for x in rows
    )
    return padded, length, at


@lru_cache(maxsize=64)
def _places(cu: tuple[int, ...], longest: int, device: torch.device) -> tuple[Tensor, Tensor]:
    lengths = [b - a for a, b in zip(cu, cu[1:], strict=False)]
    at = [i * longest + t for i, n in enumerate(lengths) for t in range(n)]
    return (
        torch.tensor(at, dtype=torch.int64, device=device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
    )


def _pool(
    states: Tensor | None, slots: Tensor, accepted: Tensor | None, batch: Sequence[int],
    v_first: bool, HV: int, K: int, V: int,
) -> Tensor:  # fmt: skip
    N, T = batch
    need(states is not None, "initial_state", "is the pool that ssm_state_indices points into")
    assert states is not None
    refuse(T <= c.DECODE_TOKENS, "ssm_state_indices", "the kernel takes up to 8 tokens a sequence")
    sides = _sides(v_first, K, V)
    checks.shaped("initial_state", states, slots=states.shape[0], HV=HV, **sides)
    need(
        states.dtype in checks.TYPES and states.is_contiguous(),
        "initial_state",
        "is a pool, which is contiguous, of fp32, bf16 or fp16",
    )
    if slots.shape not in ((N,), (N, 1), (N, T)):
        raise ValueError(
            f"ssm_state_indices: has shape {list(slots.shape)} in place of [{N}] or [{N}, {T}]"
        )
    if accepted is not None:
        checks.shaped("num_accepted_tokens", accepted, N=N)
    return states
