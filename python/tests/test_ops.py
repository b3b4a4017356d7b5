"""deltaproof.ops on tensors of the CPU: the kernels translated for it, the functions of PyTorch
around them. DELTAPROOF_OPS_DEVICE=cuda: on a device. Skipped where PyTorch or the library is not
there."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import deltaproof
import fla_signatures

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
try:
    from deltaproof import ops
    from deltaproof.ops import kernels, plans

    DEVICE = os.environ.get("DELTAPROOF_OPS_DEVICE", "cpu")
    kernels.library(DEVICE)
except ImportError as no:
    if os.environ.get("DELTAPROOF_OPS"):
        raise
    pytest.skip(str(no), allow_module_level=True)
on_a_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="sets the number of multiprocessors")
on_a_device = pytest.mark.skipif(DEVICE == "cpu", reason="of CUDA alone: DELTAPROOF_OPS_DEVICE")

Inputs = dict[str, Any]


@pytest.fixture(autouse=True)
def device() -> Any:
    torch.backends.cudnn.allow_tf32 = False
    with torch.device(DEVICE):
        yield DEVICE


def unit(*shape: int) -> Any:
    return torch.nn.functional.normalize(torch.randn(*shape), dim=-1)


def inputs(*, B: int = 1, T: int = 40, H: int = 1, HV: int = 2, K: int = 32, V: int = 16) -> Inputs:
    torch.manual_seed(7)
    q, k, v = torch.randn(B, T, H, K), unit(B, T, H, K), torch.randn(B, T, HV, V)
    return {"q": q, "k": k, "v": v, "g": -torch.rand(B, T, HV, K), "beta": torch.rand(B, T, HV)}


def of_model(name: str, K: int, V: int) -> tuple[Callable[..., Any], Inputs]:
    """A function and what it takes."""
    x = inputs(K=K, V=V)
    T, HV = 40, 2
    if name in ("kda", "kda-tokens"):
        return (ops.chunk_kda if name == "kda" else ops.fused_recurrent_kda), x
    if name == "mkda":
        keys = {"k": unit(1, T, 1, 2, K), "v": torch.randn(1, T, HV, 2, V)}
        return ops.chunk_mkda, x | keys | {"beta": torch.rand(1, T, HV, 2) / 2}
    one_gate = {"g": x["g"][..., 0].contiguous()}
    if name == "gdn":
        return ops.chunk_gated_delta_rule, x | one_gate
    beta = x.pop("beta")
    x |= {"q": torch.randn(1, T, HV, K), "k": unit(1, T, HV, K)}
    if name == "gdn2":
        return ops.chunk_gdn2, x | {"b": torch.rand(1, T, HV, K), "w": torch.rand(1, T, HV, V)}
    if name == "gla":
        return ops.chunk_gla, x
    if name == "ssd":
        return ops.chunk_simple_gla, x | one_gate
    if name == "dplr":
        u = unit(1, T, HV, K)

        def dplr(q: Any, k: Any, v: Any, g: Any, lr_a: Any, lr_b: Any) -> Any:
            return ops.chunk_dplr_delta_rule(q, k, v, lr_a, lr_b, g)

        return dplr, x | {"lr_a": -u, "lr_b": u * torch.rand(1, T, HV, 1)}

    def product(q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
        return ops.chunk_gated_delta_product(q, k, v, g, beta, 2)

    two = {"k": unit(1, 2 * T, HV, K), "v": torch.randn(1, 2 * T, HV, V)}
    return product, x | one_gate | two | {"beta": beta.repeat_interleave(2, 1)}


@pytest.mark.parametrize(("K", "V"), [(32, 16), (20, 12)])
@pytest.mark.parametrize(
    "name", ["kda", "kda-tokens", "gdn", "mkda", "gdn2", "gla", "ssd", "dplr", "product"]
)
def test_each_function_and_its_gradients_are_judged_right(name: str, K: int, V: int) -> None:
    fn, x = of_model(name, K, V)
    form = "none" if name in ("gla", "ssd") else "plain"
    said = {"base": "fp32", "gate": "log", "beta": form, "l2norm": False}
    if name in ("dplr", "gdn2"):
        said.pop("beta")
    found = deltaproof.judge_autograd(fn, x, **said)
    assert found.passed, found.text
    assert "dk" in found.tensors and "dg" in found.tensors


def test_bf16_is_judged_right_by_bf16() -> None:
    x = inputs(V=32)
    x |= {n: x[n].bfloat16() for n in ("q", "k", "v")}
    said = {"base": "bf16", "gate": "log", "beta": "plain", "l2norm": False}
    assert deltaproof.judge_autograd(ops.chunk_kda, x, **said).passed


def test_an_exact_gradient_of_257_may_be_256_in_bf16() -> None:
    def kda(q: Any, k: Any, v: Any, g: Any, beta: Any, scale: Any, initial_state: Any) -> Any:
        return ops.chunk_kda(q, k, v, g, beta, scale, initial_state, True)

    told: dict[str, Any] = {"outputs": ("o", "final_state"), "device": DEVICE, "autograd": True}
    told["layouts"] = ("contiguous",)
    assert deltaproof.run(kda, ["kda-exact"], base="bf16", **told).passed

    def doubled(*a: Any, **b: Any) -> Any:
        o, s = kda(*a, **b)
        return o, s * 2

    doubled.__signature__ = inspect.signature(kda)  # type: ignore[attr-defined]
    assert deltaproof.run(doubled, ["kda-exact"], base="bf16", **told).status == 1


def test_gate_beta_and_norm_in_the_kernel_are_judged_right() -> None:
    x = inputs()
    x["beta"] = torch.randn(1, 40, 2)
    x |= {"A_log": torch.randn(2), "dt_bias": torch.randn(2, 32), "g": torch.randn(1, 40, 2, 32)}
    said = {"base": "fp32", "beta": "sigmoid2", "l2norm": True}
    every: Inputs = {
        "use_gate_in_kernel": True,
        "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": True,
    }
    for gate, more in (("softplus", {}), ("lower_bound", {"lower_bound": -5.0})):
        safe = {"safe_gate": True} | more if more else {}
        found = deltaproof.judge_autograd(
            lambda safe=safe, **a: ops.chunk_kda(**a, **every, **safe), x, gate=gate, **said, **more
        )
        assert found.passed, found.text


def test_signatures_are_those_of_fla() -> None:
    table = Path(__file__).with_name("fla_signatures.txt").read_text(encoding="utf-8").splitlines()
    for line in table:
        name, theirs = line.split(" ", 1)
        ours = [
            p.replace(annotation=inspect.Parameter.empty)
            for p in inspect.signature(getattr(ops, name)).parameters.values()
        ]
        text = ", ".join(str(p) for p in ours)
        assert text == theirs.replace('"', "'"), name
    assert len(table) == sum(map(len, fla_signatures.FILES.values()))


def states(x: Inputs, n: int) -> Any:
    return torch.randn(n, x["v"].shape[2], x["q"].shape[3], x["v"].shape[3])


def test_packed_sequences_are_those_alone_and_an_empty_one_keeps_its_state() -> None:
    x = inputs(T=30)
    s0 = states(x, 3).requires_grad_()
    cu = torch.tensor([0, 7, 7, 30])
    o, s = ops.chunk_kda(**x, initial_state=s0, output_final_state=True, cu_seqlens=cu)
    for n, (a, b) in enumerate(((0, 7), (7, 30))):
        part = {m: y[:, a:b] for m, y in x.items()}
        alone, end = ops.chunk_kda(
            **part, initial_state=s0[2 * n : 2 * n + 1], output_final_state=True
        )
        assert torch.equal(o[:, a:b], alone) and torch.equal(s[2 * n], end[0])
    assert torch.equal(s[1], s0[1])
    s.sum().backward()
    assert torch.equal(s0.grad[1], torch.ones_like(s0[1]))


def test_a_state_with_v_first_is_the_same_one_turned() -> None:
    x = inputs()
    s0 = states(x, 1)
    o, s = ops.chunk_kda(**x, initial_state=s0, output_final_state=True)
    turned = s0.transpose(-1, -2).contiguous()
    o2, s2 = ops.chunk_kda(**x, initial_state=turned, output_final_state=True, state_v_first=True)
    assert torch.equal(o, o2) and torch.equal(s, s2.transpose(-1, -2))
    few = {n: y[:, :3] for n, y in x.items()} | {"v": torch.randn(1, 3, 2, 32)}
    s0 = torch.randn(1, 2, 32, 32)
    o, s = ops.fused_recurrent_kda(**few, initial_state=s0, output_final_state=True)
    turned = s0.transpose(-1, -2)
    o2, s2 = ops.fused_recurrent_kda(
        **few, initial_state=turned, output_final_state=True, state_v_first=True
    )
    torch.testing.assert_close((o, s), (o2, s2.transpose(-1, -2)), rtol=2e-6, atol=2e-6)


def test_views_are_taken_as_their_copies() -> None:
    x = inputs()
    wide = torch.randn(1, 40, 67)
    q, k = wide[..., 1:33].unsqueeze(2), wide[..., 33:65].unsqueeze(2)
    x |= {"q": q, "k": k}
    own = x | {"q": q.contiguous(), "k": k.contiguous()}
    norm = {"use_qk_l2norm_in_kernel": True}
    assert torch.equal(ops.chunk_kda(**x, **norm)[0], ops.chunk_kda(**own, **norm)[0])


def test_what_is_wrong_is_named_and_what_is_not_served_says_why() -> None:
    x = inputs()
    wrong: list[tuple[str, Inputs]] = [
        ("k", {"k": x["k"][:, 1:]}),
        ("v", {"v": x["v"][..., 0]}),
        ("g", {"g": x["g"][..., 0]}),
        ("beta", {"beta": x["beta"][..., :1]}),
        ("q", {"q": x["q"][0]}),
        ("k", {"k": x["k"].bfloat16()}),
        ("beta", {"beta": x["beta"].long()}),
        ("beta", {"beta": x["beta"].to("meta")}),
        ("initial_state", {"initial_state": states(x, 2)}),
        ("cu_seqlens", {"cu_seqlens": torch.tensor([0, 50])}),
        ("cu_seqlens", {"cu_seqlens": torch.tensor([0.0, 40.0])}),
        ("A_log", {"use_gate_in_kernel": True}),
        ("lower_bound", {"use_gate_in_kernel": True, "safe_gate": True, "A_log": torch.ones(2)}),
        ("dt_bias", {"use_gate_in_kernel": True, "A_log": torch.ones(2), "dt_bias": torch.ones(3)}),
        ("allow_neg_eigval", {"allow_neg_eigval": True}),
        ("chunk_size", {"chunk_size": 48}),
        ("return_intermediate_states", {"return_intermediate_states": True}),
    ]
    for name, change in wrong:
        with pytest.raises(ValueError, match=f"^{name}: "):
            ops.chunk_kda(**{**x, **change})
    for change in (
        {n: x[n].double() for n in ("q", "k", "v")},
        {"cp_context": object()},
        {n: x[n].repeat(1, 1, 1, 10) for n in ("q", "k", "g")},
    ):
        with pytest.raises(NotImplementedError, match=r"deltaproof.ops: .*"):
            ops.chunk_kda(**{**x, **change})
    with pytest.raises(TypeError, match="unexpected argument 'surprise'"):
        ops.chunk_kda(**x, surprise=1)
    asked = {"return_intermediate_states": True}
    with torch.inference_mode():
        for change in ({"chunk_size": 32}, {"cp_context": object()}):
            with pytest.raises(NotImplementedError, match="return_intermediate_states with"):
                ops.chunk_kda(**x, **asked, **change)
        with pytest.raises(ValueError, match="^return_intermediate_states: "):
            ops.chunk_kda(**x, **asked, disable_recompute=True)


def test_states_gates_and_norms_of_rows_of_any_width() -> None:
    x = inputs(K=20, V=12) | {"A_log": torch.randn(2), "dt_bias": torch.randn(2, 20)}
    s0 = states(x, 1).transpose(-1, -2)
    how: Inputs = {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True}
    how |= {"output_final_state": True, "state_v_first": True}
    o, s = ops.chunk_kda(**x, **how, initial_state=s0)
    wide = {n: torch.nn.functional.pad(x[n], (0, 12)) for n in ("q", "k", "g", "dt_bias")}
    wide["v"] = torch.nn.functional.pad(x["v"], (0, 4))
    s0 = torch.nn.functional.pad(s0, (0, 12, 0, 4))
    o2, s2 = ops.chunk_kda(**{**x, **wide}, **how, initial_state=s0, scale=20**-0.5)
    assert o.shape == (1, 40, 2, 12) and s.shape == (1, 2, 12, 20)
    torch.testing.assert_close((o, s), (o2[..., :12], s2[..., :12, :20]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("T", [3, 12])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps_take_keys_in_fp32_beside_shorter_values(dtype: torch.dtype, T: int) -> None:
    x = inputs(T=T, V=32) | {"v": torch.randn(1, T, 2, 32).to(dtype)}
    o, s = ops.fused_recurrent_kda(**x, output_final_state=True)
    o2, s2 = ops.fused_recurrent_kda(**x | {"v": x["v"].float()}, output_final_state=True)
    assert o.dtype == dtype
    assert torch.equal(o, o2.to(dtype)) and torch.equal(s, s2)


def test_autocast_makes_types_one() -> None:
    x = inputs(V=32)
    x["q"] = x["q"].bfloat16()
    with torch.autocast(DEVICE, torch.bfloat16):
        o, _ = ops.chunk_kda(**x)
    assert o.dtype == torch.bfloat16


@pytest.mark.parametrize("tokens", [1, 40])
def test_fp16_is_computed_in_fp32(tokens: int) -> None:
    x = {n: t[:, :tokens].half() for n, t in inputs(V=32).items()}
    wide = {n: t.float() for n, t in x.items()}
    for f in (ops.chunk_kda, ops.fused_recurrent_kda):
        learned = [{n: t.requires_grad_() for n, t in y.items()} for y in (dict(x), dict(wide))]
        for a, b in zip(*(both_ways(f, y) for y in learned), strict=True):
            assert a.dtype == torch.float16 and torch.equal(a, b.half())
        with torch.no_grad():
            assert torch.equal(f(**x)[0], f(**wide)[0].half())
    rows, w = torch.randn(1, 9, 8).half(), torch.randn(8, 4)
    y, end = ops.causal_conv1d(rows, w, output_final_state=True, activation="silu")
    right = ops.causal_conv1d(rows.float(), w, activation="silu")[0]
    assert torch.equal(y, right.half()) and end.dtype == torch.float16


def both_ways(f: Any, x: Inputs) -> tuple[Any, ...]:
    o = f(**x)[0]
    return o, *torch.autograd.grad(o, list(x.values()), torch.ones_like(o))


def test_gate_and_beta_of_two_types_are_taken() -> None:
    x = inputs()
    x["beta"] = x["beta"].bfloat16().requires_grad_()
    o, _ = ops.chunk_kda(**x)
    assert torch.equal(o, ops.chunk_kda(**x | {"beta": x["beta"].float()})[0])
    o.sum().backward()
    assert x["beta"].grad.dtype == torch.bfloat16


def test_a_step_and_drafts_write_their_slots_and_no_other() -> None:
    x = inputs(B=3, T=3, V=32)
    pool = torch.randn(12, 2, 32, 32)
    was, slots = pool.clone(), torch.tensor([[4, 1, 2], [0, 7, 5], [-1, -1, -1]])
    accepted = torch.tensor([1, 3, 1])
    o, same = ops.fused_recurrent_kda(
        **x, initial_state=pool, ssm_state_indices=slots, num_accepted_tokens=accepted
    )
    assert same is pool
    start = torch.stack([was[4], was[5], torch.zeros_like(was[0])])
    right, end = ops.fused_recurrent_kda(**x, initial_state=start, output_final_state=True)
    assert torch.equal(o[:2], right[:2]) and o[2].abs().max() == 0
    assert torch.equal(pool[2], end[0]) and torch.equal(pool[5], end[1])
    others = [3, 6, 8, 9, 10, 11]
    assert torch.equal(pool[others], was[others])


def test_a_step_without_checks_has_the_bits_of_one_with_them() -> None:
    """The second call of a shape alone finds the step of the first."""
    steps = ops.decoding.Known._steps
    ops.clear_plans()
    x, state = inputs(B=3, T=2, V=32), torch.randn(3, 2, 32, 32)
    turned = {n: t.flip(0).contiguous() for n, t in x.items()}
    gate = {"A_log": torch.zeros(2), "use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True}

    def step(x: Inputs, state: Any, **more: Any) -> Any:
        return ops.fused_recurrent_kda(
            **x, **gate, **more, initial_state=state, output_final_state=True
        )

    step(turned, state)
    was = state.clone()
    known = step(x, state)
    assert len(steps) == 1 and torch.equal(state, was)
    odd = torch.empty(state.numel() + 1)[1:].view_as(state).copy_(state)
    narrow = {n: t.bfloat16() if n in ("g", "beta") else t for n, t in x.items()}
    assert torch.equal(step(narrow, state)[0], step(narrow, odd)[0])
    with pytest.raises(ValueError, match="initial_state"):
        step(x, state[:2])
    with pytest.raises(TypeError, match="unexpected"):
        step(x, state, wrong=1)
    ops.clear_plans()
    for checked in (step(x, state), step(x, odd), step(x, state.double().float())):
        assert all(torch.equal(a, b) for a, b in zip(checked, known, strict=True))
    learned = step(x | {"v": x["v"].clone().requires_grad_()}, state)
    assert learned[0].requires_grad and not step(x, state)[0].requires_grad
    ops.clear_plans()
    for given in (torch.zeros_like(state), None, None):
        made = step(x, given, state_v_first=True)
        assert made[1].shape == (3, 2, 32, 32)
        known = known if given is None else made
        assert all(torch.equal(a, b) for a, b in zip(made, known, strict=True))
    assert len(steps) == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_pool_is_written_by_a_step_without_checks(dtype: str) -> None:
    x, pool = inputs(B=2, T=1, V=32), torch.randn(6, 2, 32, 32).to(getattr(torch, dtype))
    right = pool.clone()
    for slots in ([4, 1], [3, 0]):
        at = torch.tensor(slots, dtype=torch.int32)
        o, same = ops.fused_recurrent_kda(**x, initial_state=pool, ssm_state_indices=at)
        want, end = ops.fused_recurrent_kda(
            **x, initial_state=right[at.long()], output_final_state=True
        )
        right[at.long()] = end.to(right.dtype)
        assert same is pool and torch.equal(o, want) and torch.equal(pool, right)


def test_requests_of_several_lengths_are_those_alone() -> None:
    x = inputs(T=9, V=32)
    pool, cu, slots = torch.randn(6, 2, 32, 32), [0, 3, 4, 9], [4, 1, 2]
    was, gate = pool.clone(), {"use_gate_in_kernel": True, "A_log": torch.zeros(2)}
    o, _ = ops.fused_recurrent_kda(
        **x,
        **gate,
        initial_state=pool,
        ssm_state_indices=torch.tensor(slots),
        cu_seqlens=torch.tensor(cu),
    )
    for n, slot in enumerate(slots):
        part = {m: y[:, cu[n] : cu[n + 1]] for m, y in x.items()}
        alone, end = ops.fused_recurrent_kda(
            **part, **gate, initial_state=was[slot : slot + 1], output_final_state=True
        )
        assert torch.equal(o[:, cu[n] : cu[n + 1]], alone) and torch.equal(pool[slot], end[0])


def test_the_recurrence_of_gdn_takes_either_gate_or_none() -> None:
    x = inputs(T=4, V=32)
    g, both = x.pop("g"), {"output_final_state": True}
    one = ops.fused_recurrent_gated_delta_rule(**x, gk=g, **both)
    two = ops.fused_recurrent_kda(**x, g=g, **both)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    none = ops.fused_recurrent_gated_delta_rule(**x)[0]
    zeros = ops.fused_recurrent_gated_delta_rule(**x, g=torch.zeros(1, 4, 2))[0]
    assert torch.equal(none, zeros)
    with pytest.raises(NotImplementedError, match="gv"):
        ops.fused_recurrent_gated_delta_rule(**x, gv=x["v"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "fn", ["chunk_kda", "chunk_gated_delta_rule", "fused_recurrent_kda", "chunk_gdn2", "wide"]
)
def test_parameters_are_read_in_their_type_and_so_are_their_gradients(
    fn: str, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of those in fp32; a gradient is that one, rounded once."""
    monkeypatch.setenv("DP_CPU_CAPABILITY", "90")  # the fast path, if it takes the call
    ops.clear_plans()
    wide = fn == "wide"
    x = inputs(T=70, K=64, V=192 if wide else 64)
    op = getattr(ops, "chunk_kda" if wide else fn)
    Kg = 64
    if fn == "chunk_gated_delta_rule":
        x["g"], Kg = x["g"][..., 0], 1
    if fn == "chunk_gdn2":
        x.pop("beta")
        x |= {n: unit(1, 70, 2, 64) for n in ("q", "k")}
        x |= {"b": torch.rand(1, 70, 2, 64), "w": torch.rand(1, 70, 2, 64)}
    x = {n: a.bfloat16() for n, a in x.items()}
    own = {"A_log": torch.randn(2), "dt_bias": torch.randn(2 * Kg)}
    own["dt_bias"][:2] = torch.tensor([0.0, 3e-6])
    own = {n: a.to(dtype) for n, a in own.items()}

    def both(a: Inputs) -> tuple[Any, ...]:
        leaves = {n: y.clone().requires_grad_() for n, y in a.items()}
        o = op(**x, **leaves, use_gate_in_kernel=True)[0]
        (o.float() * torch.arange(o.numel(), device=DEVICE).reshape(o.shape).sin()).sum().backward()
        return o, *(y.grad for y in leaves.values())

    wanted, got = both({n: a.float() for n, a in own.items()}), both(own)
    assert torch.equal(wanted[0], got[0])
    for a, b in zip(wanted[1:], got[1:], strict=True):
        assert b.dtype == dtype and torch.equal(a.to(dtype), b)
    if fn == "fused_recurrent_kda":
        step = {n: a[:, :2] for n, a in x.items()} | {"use_gate_in_kernel": True}
        own32 = {n: a.float() for n, a in own.items()}
        assert torch.equal(op(**step, **own)[0], op(**step, **own32)[0])
    ops.clear_plans()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_the_convolution_are_read_in_their_type(dtype: Any) -> None:
    x, w, b = torch.randn(2, 9, 12), torch.randn(12, 4).to(dtype), torch.randn(12).to(dtype)
    kept = []
    for to in (dtype, torch.float32):
        leaves = [a.clone().to(to).requires_grad_() for a in (w, b)]
        y = ops.causal_conv1d(x, *leaves, activation="silu")[0]
        (y * y.detach().cos()).sum().backward()
        kept.append((y, *(a.grad for a in leaves)))
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(*kept, strict=True))
    assert kept[0][1].dtype == dtype


@pytest.mark.parametrize("base", ["fp32", "bf16"])
def test_states_between_chunks_are_judged_right(base: str) -> None:
    """The state behind 64 tokens is that before the next chunk, or the final one."""

    def kda(
        q: Any, k: Any, v: Any, g: Any, beta: Any, scale: Any, initial_state: Any = None,
        cu_seqlens: Any = None,
    ) -> Any:  # fmt: skip
        if base == "fp32":
            q, k, v = q.float(), k.float(), v.float()
        with torch.inference_mode():
            o, final, h = ops.chunk_kda(
                q, k, v, g, beta, scale, initial_state, True, cu_seqlens=cu_seqlens,
                return_intermediate_states=True,
            )  # fmt: skip
        assert h.dtype == q.dtype
        cu = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
        kept, at = [], 0
        for i, n in enumerate(b - a for a, b in zip(cu, cu[1:], strict=False)):
            own = [*h[0, at : at + -(-n // 64)], final[i].to(h.dtype)]
            kept += own[1 : 1 + n // 64]
            at += -(-n // 64)
        assert at == h.shape[1]
        return o, final, torch.stack(kept) if kept else final[:0].to(h.dtype)

    told: dict[str, Any] = {"outputs": ("o", "final_state", "checkpoints"), "checkpoints": 64}
    told |= {"device": DEVICE, "layouts": ("contiguous",)}
    cases = ["kda-checkpoints", "packed-inside"]
    found = deltaproof.run(kda, cases, base=base, **told)
    assert found.passed and set(found.verdicts().values()) == {"pass"}, found.text


@pytest.mark.parametrize(
    "fn, K, V, dtype",
    [
        ("chunk_kda", 20, 12, torch.float32),
        ("chunk_kda", 64, 192, torch.bfloat16),
        ("chunk_mkda", 64, 64, torch.bfloat16),
        ("chunk_gdn2", 20, 12, torch.float32),
    ],
)
def test_states_between_chunks_are_final_states_of_what_came_before(
    fn: str, K: int, V: int, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DP_CPU_CAPABILITY", "90")  # the fast path, if it takes the call
    ops.clear_plans()
    x, T = inputs(B=2, T=150, K=K, V=V), 150
    if fn == "chunk_mkda":
        x |= {"k": unit(2, T, 1, 2, K), "v": torch.randn(2, T, 2, 2, V)}
        x |= {"beta": torch.rand(2, T, 2, 2) / 2}
    if fn == "chunk_gdn2":
        x.pop("beta")
        x |= {"q": torch.randn(2, T, 2, K), "k": unit(2, T, 2, K)}
        x |= {"b": torch.rand(2, T, 2, K), "w": torch.rand(2, T, 2, V)}
    op, x = getattr(ops, fn), {n: a.to(dtype) for n, a in x.items()}
    asked = {"return_intermediate_states": True, "initial_state": torch.randn(2, 2, K, V)}
    with torch.inference_mode():
        o, final, h = op(**x, **asked)
        turned = asked | {"initial_state": asked["initial_state"].mT, "state_v_first": True}
        assert final is None and h.shape == (2, 3, 2, K, V)
        assert torch.equal(h.mT, op(**x, **turned)[2])
    ops.clear_plans()
    assert torch.equal(h[:, 0], asked["initial_state"].to(dtype))
    for i in (1, 2):
        before = {n: a[:, : 64 * i] for n, a in x.items()}
        wanted = op(**before, initial_state=asked["initial_state"], output_final_state=True)[1]
        near = 1e-5 if dtype == torch.float32 else 2**-6
        torch.testing.assert_close(h[:, i].float(), wanted, rtol=near, atol=near)


def convolved(x: Any, w: Any, b: Any, before: Any, residual: Any) -> tuple[Any, Any]:
    """By PyTorch: y and the last rows."""
    rows = x.transpose(1, 2)
    rows = torch.cat([torch.zeros(2, 6, 4) if before is None else before, rows], -1)
    y = torch.nn.functional.conv1d(rows[..., 1:], w[:, None], b, groups=6)
    return torch.nn.functional.silu(y).transpose(1, 2) + residual, rows[..., -4:]


@pytest.mark.parametrize("first", [False, True])
def test_the_convolution_and_its_gradients_are_pytorch_s(first: bool) -> None:
    torch.manual_seed(3)
    x, w, b, r = (torch.randn(*s) for s in ((2, 11, 6), (6, 4), (6,), (2, 11, 6)))
    before = torch.randn(2, 6, 4) if first else None
    leaves = [t.requires_grad_() for t in (x, w, b, r, before) if t is not None]
    ours = ops.causal_conv1d(x, w, b, r, before, True, "silu")
    theirs = convolved(x, w, b, before, r)
    grads = [torch.autograd.grad(y.sin().sum() + s.cos().sum(), leaves) for y, s in (ours, theirs)]
    for a, c in (((*ours, *grads[0]), (*theirs, *grads[1])),):
        for one, other in zip(a, c, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_packed_rows_of_the_convolution_go_on_from_a_state() -> None:
    torch.manual_seed(3)
    x, w, b, before = (torch.randn(*s) for s in ((1, 12, 6), (6, 4), (6,), (4, 6, 4)))
    cu = [0, 5, 5, 7, 12]
    leaves = [t.requires_grad_() for t in (x, w, b, before)]
    y, last = ops.causal_conv1d(
        x, w, b, None, before, True, "silu", cu_seqlens=torch.tensor(cu), cu_seqlens_cpu=None
    )
    each = [
        ops.causal_conv1d(x[:, i:j], w, b, None, before[n : n + 1], True, "silu")
        for n, (i, j) in enumerate(zip(cu, cu[1:], strict=False))
        if j > i
    ]
    alone = torch.cat([t for t, _ in each], 1), torch.cat([s for _, s in each])
    for one, other in zip((y, last[[0, 2, 3]]), alone, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(last[1], before[1])
    pairs = ((y, last[[0, 2, 3]]), alone)
    grads = [torch.autograd.grad(a.sin().sum() + s.cos().sum(), leaves) for a, s in pairs]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=on_a_device)])
def test_functions_compile_whole_and_keep_their_bits(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # PyTorch 2.6 cuts the graph where an output's size is not known, 2.11 does not
    monkeypatch.setattr(torch._dynamo.config, "capture_dynamic_output_shape_ops", True)
    x = {n: y.requires_grad_() for n, y in inputs().items()}
    leaves = list(x.values())

    def step(*given: Any) -> Any:
        o, s = ops.chunk_kda(*given, use_qk_l2norm_in_kernel=True, output_final_state=True)
        return o.sum() + s.sum()

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    own, made = (torch.autograd.grad(f(*leaves), leaves) for f in (step, compiled))
    assert all(torch.equal(a, b) for a, b in zip(own, made, strict=True))


def test_operators_are_registered_as_pytorch_asks() -> None:
    x = inputs()
    how = [1, 1, 0, 0, 0, 0, 0, 1, 0]
    every = (*x.values(), None, None, None, None, None, None, 0.2, 0.0, how)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.deltaproof.chunk, every, test_utils=tests)
    more = (torch.randn(1, 9, 6), torch.randn(6, 4), torch.randn(6), None, None, 1, 0)
    torch.library.opcheck(torch.ops.deltaproof.conv, more, test_utils=tests)


def test_plans_are_kept_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    ops.clear_plans()
    monkeypatch.setattr(plans, "PLANS", 3)
    x = inputs()
    for T in (5, 6, 7, 8, 5):
        ops.chunk_kda(**{n: y[:, :T] for n, y in x.items()})
    assert [k[2][-1] for k in plans._plans] == [7, 8, 5]
    ops.chunk_kda(**{n: y[:, :7] for n, y in x.items()})
    assert [k[2][-1] for k in plans._plans] == [8, 5, 7]


@on_a_device
def test_a_graph_of_both_ways_gives_the_bits_of_calls() -> None:
    x = {n: y.requires_grad_() for n, y in inputs(T=300, K=64, V=64).items()}
    leaves, cu = list(x.values()), torch.tensor([0, 100, 300])
    host = cu.cpu()

    def step() -> Any:
        o, s = ops.chunk_kda(*leaves, cu_seqlens=cu, cu_seqlens_cpu=host, output_final_state=True)
        return o, *torch.autograd.grad(o.sin().sum() + s.sum(), leaves)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        own = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        made = step()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(own, made, strict=True))


@on_a_device
def test_a_cached_call_waits_for_nothing_and_takes_bounds_on_either_device() -> None:
    x = inputs(T=300, K=64, V=64)
    cu = torch.tensor([0, 100, 300])
    on_host = cu.cpu()
    first = ops.chunk_kda(**x, cu_seqlens=cu)[0]
    try:
        torch.cuda.set_sync_debug_mode("error")
        again = ops.chunk_kda(**x, cu_seqlens=cu)[0]
        host = ops.chunk_kda(**x, cu_seqlens=cu.clone(), cu_seqlens_cpu=on_host)[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first, again) and torch.equal(first, host)


def test_bounds_of_an_inference_tensor_are_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no version by which a change shows."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with torch.inference_mode():
        cu = torch.tensor([0, 3, 9])
    assert plans._read(cu) == (0, 3, 9)
    with torch.inference_mode():
        cu[1] = 4
    assert plans._read(cu) == (0, 4, 9)


@pytest.mark.skipif(DEVICE == "cpu" or torch.cuda.device_count() < 2, reason="of two devices")
def test_a_call_leaves_the_current_device() -> None:
    with torch.cuda.device(0):
        for op in (ops.chunk_kda, ops.fused_recurrent_kda, ops.fused_recurrent_kda):
            x = {n: a[:, :2].to("cuda:1") for n, a in inputs(V=32).items()}
            assert op(**x)[0].device.index == 1 and torch.empty(1, device="cuda").device.index == 0


@on_a_device
def test_the_fast_path_is_judged_right_in_bf16() -> None:
    x = inputs(T=300, K=128, V=128, H=2, HV=4)
    x |= {n: x[n].bfloat16() for n in ("q", "k", "v")}
    said = {"base": "bf16", "gate": "log", "beta": "plain", "l2norm": False}
    found = deltaproof.judge_autograd(ops.chunk_kda, x, **said)
    assert found.passed, found.text
    one_gate = x | {"g": x["g"][..., 0].contiguous()}
    found = deltaproof.judge_autograd(ops.chunk_gated_delta_rule, one_gate, **said)
    assert found.passed, found.text


def test_a_dispatch_mode_sees_the_operator_and_gets_the_bits_of_a_plain_call() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Names(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    x = [torch.randn(1, 24, 2, 32, dtype=torch.float32).requires_grad_() for _ in range(4)]
    x.append(torch.rand(1, 24, 2).requires_grad_())
    do = torch.randn(1, 24, 2, 32)

    def gradients() -> Any:
        q, k, v, g, beta = x
        o, _ = ops.chunk_kda(q, k, v, -g.abs(), beta, use_qk_l2norm_in_kernel=True)
        return torch.autograd.grad(o, x, do)

    plain = gradients()
    with Names() as seen:
        watched = gradients()
    assert {"deltaproof.chunk.default", "deltaproof.chunk_backward.default"} <= set(seen.names)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


@on_a_cpu
@pytest.mark.parametrize("op", ("chunk_gated_delta_rule", "chunk_kda"))
def test_gates_of_fp32_take_the_kernels_of_gates_in_bf16(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward alone stores no w and u, whatever the type of its gates."""
    monkeypatch.setenv("DP_CPU_CAPABILITY", "90")
    monkeypatch.setenv("DP_CPU_MULTIPROCESSORS", "1")
    made = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(1, 150, 4, 64, generator=made).bfloat16() for _ in range(3))
    of_gate = (64,) if op == "chunk_kda" else ()
    g, beta = (torch.rand(1, 150, 4, *more, generator=made).bfloat16() for more in (of_gate, ()))
    found = []
    for to in (torch.bfloat16, torch.float32):
        ops.clear_plans()
        o, s = getattr(ops, op)(
            q, k, v, (-g / 8).to(to), beta.to(to), output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        found.append((o, s, next(iter(plans._plans.values())).workspace))
    ops.clear_plans()
    assert found[0][2] == found[1][2]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True) if torch.is_tensor(a))


@on_a_cpu
def test_a_convolution_of_few_tokens_has_the_bits_of_longer_strips(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a device of many multiprocessors a thread takes 8 tokens, on one of one 64."""
    made = torch.Generator().manual_seed(6)
    x, w = torch.randn(1, 150, 64, generator=made), torch.randn(64, 4, generator=made)
    cu, found = torch.tensor([0, 2, 75, 150]), []
    for sms in ("1", "132"):
        monkeypatch.setenv("DP_CPU_MULTIPROCESSORS", sms)
        ops.clear_plans()
        found.append(ops.causal_conv1d(x.bfloat16(), w, activation="silu", cu_seqlens=cu)[0])
    ops.clear_plans()
    assert torch.equal(*found)


@on_a_cpu
@pytest.mark.parametrize("op", ("chunk_gated_delta_rule", "chunk_kda"))
@pytest.mark.parametrize("longest, few", ((96, "1"), (1500, "12")))
def test_heads_in_turn_in_a_block_have_the_bits_of_a_block_each(
    op: str, longest: int, few: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short sequences with states in and out, on devices that run few and 24 heads at once. One
    kernel does it, or two where one sequence is long."""
    monkeypatch.setenv("DP_CPU_CAPABILITY", "90")
    made = torch.Generator().manual_seed(5)
    cu = torch.tensor([0, 80, 150, 151, 241, 307, 307 + longest])
    T = int(cu[-1])
    q, k, v = (torch.randn(1, T, 4, 64, generator=made).bfloat16() for _ in range(3))
    of_gate = (64,) if op == "chunk_kda" else ()
    g = -torch.rand(1, T, 4, *of_gate, generator=made) / 8
    beta, h0 = torch.rand(1, T, 4, generator=made), torch.randn(6, 4, 64, 64, generator=made)
    found = []
    for at_once in ("24", few):
        monkeypatch.setenv("DP_CPU_MULTIPROCESSORS", at_once)
        ops.clear_plans()
        o, s = getattr(ops, op)(
            q, k, v, g, beta, initial_state=h0, output_final_state=True, cu_seqlens=cu,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        found.append((o, s, next(iter(plans._plans.values())).workspace))
    ops.clear_plans()
    assert found[0][2] == found[1][2]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True) if torch.is_tensor(a))
