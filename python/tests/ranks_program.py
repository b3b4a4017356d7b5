"""Context parallelism of deltaproof.ops, a rank of it, over gloo, with DELTAPROOF_OPS_DEVICE=cuda
over NCCL on a device each: `test_ops_ranks.py` starts it by torchrun. Each rank computes all tokens
alone and its own among others, and compares."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from deltaproof import ops
from deltaproof.ops import context

HV, K, V = 2, 32, 16
Tensors = dict[str, Any]
PARAMETERS = ("A_log", "dt_bias", "weight", "bias")


def mine(x: Any, cu: list[int], layout: str) -> Any:
    """This rank's rows of all."""
    rank, N = dist.get_rank(), dist.get_world_size()
    rows = [(0, cu[-1])] if layout != "sequence-zigzag" else list(zip(cu, cu[1:], strict=False))
    each = N if layout == "contiguous" else 2 * N
    slots = [rank] if layout == "contiguous" else [rank, 2 * N - 1 - rank]
    at = [
        t
        for a, b in rows
        for s in slots
        for t in range(a + (b - a) // each * s, a + (b - a) // each * (s + 1))
    ]
    return x[:, at]


def of_fla(cu: list[int], layout: str) -> Any:
    """This rank, as FLA's build_cp_context describes it."""
    rank, N = dist.get_rank(), dist.get_world_size()
    slots = [rank] if layout == "contiguous" else [rank, 2 * N - 1 - rank]
    part = cu[-1] // (N * len(slots))
    local, first = [0], []
    for i, s in enumerate(slots):
        inside = [b for b in cu if s * part < b < (s + 1) * part]
        local += [i * part + b - s * part for b in inside] + [(i + 1) * part]
        first.append(s * part in cu)
    return SimpleNamespace(
        group=dist.group.WORLD, layout=layout, cu_seqlens=torch.tensor(local), cu_seqlens_cpu=None,
        is_first_rank=first[0], is_first_by_part=tuple(first),
    )  # fmt: skip


def of_rows(B: int, T: int) -> Tensors:
    unit = F.normalize(torch.randn(B, T, HV, K), dim=-1)
    return {
        "q": torch.randn(B, T, HV, K),
        "k": unit,
        "v": torch.randn(B, T, HV, V),
        "g": -torch.rand(B, T, HV, K),
        "beta": torch.rand(B, T, HV),
    }


def results(f: Callable[..., Any], x: Tensors, do: Any, **more: Any) -> Tensors:
    x = {n: t.clone().requires_grad_() for n, t in x.items()}
    o = f(**x, **more)[0]
    grads = torch.autograd.grad(o, list(x.values()), do)
    return {"o": o.detach()} | {f"d{n}": d for n, d in zip(x, grads, strict=True)}


def compare(what: str, f: Any, x: Tensors, do: Any, cu: Any, layout: str, given: Any) -> None:
    alone = {} if cu is None else {"cu_seqlens": torch.tensor(cu)}
    whole = results(f, x, do, **alone)
    rows = [0, do.shape[1]] if cu is None else cu
    own = {n: t if n in PARAMETERS else mine(t, rows, layout) for n, t in x.items()}
    found = results(f, own, mine(do, rows, layout), cp_context=given)
    for name, t in found.items():
        want = whole[name]
        if name[1:] in PARAMETERS:
            dist.all_reduce(t)
        else:
            want = mine(want, rows, layout)
        off = (want - t).abs().max().item() / want.abs().max().item()
        assert off < 3e-5, f"{what}, {layout}: {name} is {off:.1e} off"


def recurrences() -> None:
    N = dist.get_world_size()
    T = 32 * N
    cu = [0, 4 * N, 4 * N, 18 * N, T]
    gates = {"A_log": torch.randn(HV), "dt_bias": torch.randn(HV * K)}

    def kda(**a: Any) -> Any:
        return ops.chunk_kda(**a, use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True)

    x, do = of_rows(1, T) | gates, torch.randn(1, T, HV, V)
    for layout in context.LAYOUTS:
        compare("kda", kda, x, do, cu, layout, ops.cp_context(dist.group.WORLD, cu, layout))
    for layout in ("contiguous", "zigzag"):
        compare("FLA's object", kda, x, do, cu, layout, of_fla(cu, layout))
        given = ops.cp_context(dist.group.WORLD, None, layout)
        compare("rows", kda, of_rows(2, T) | gates, torch.randn(2, T, HV, V), None, layout, given)
    given = ops.cp_context(dist.group.WORLD, cu, windows=True)
    compare("windows", kda, x, do, cu, "contiguous", given)
    one_gate = of_rows(1, T)
    one_gate["g"] = one_gate["g"][..., 0].contiguous()
    for name, f, x in (
        ("gdn", ops.chunk_gated_delta_rule, one_gate),
        ("gdn2", _gdn2, of_rows(1, T) | {"w": torch.rand(1, T, HV, V)}),
        ("dplr", _dplr, of_rows(1, T)),
    ):
        compare(name, f, x, do, None, "contiguous", dist.group.WORLD)


def _gdn2(q: Any, k: Any, v: Any, g: Any, beta: Any, w: Any, **more: Any) -> Any:
    return ops.chunk_gdn2(q, k, v, g, beta.unsqueeze(-1).expand_as(k), w, **more)


def _dplr(q: Any, k: Any, v: Any, g: Any, beta: Any, **more: Any) -> Any:
    return ops.chunk_dplr_delta_rule(q, k, v, -k, k * beta.unsqueeze(-1), g, **more)


def convolutions() -> None:
    T = 8 * dist.get_world_size()
    cu = [0, 1, T // 2 + 1, T]
    x = {"x": torch.randn(1, T, 8), "weight": torch.randn(8, 4), "bias": torch.randn(8)}
    for layout in ("contiguous", "zigzag"):
        given = ops.cp_context(dist.group.WORLD, cu, layout)
        for activation in (None, "silu"):

            def conv(activation: Any = activation, **a: Any) -> Any:
                return ops.causal_conv1d(**a, activation=activation)

            compare("convolution", conv, x, torch.randn(1, T, 8), cu, layout, given)


def compiled() -> None:
    T = 8 * dist.get_world_size()
    given = ops.cp_context(dist.group.WORLD, [0, T])
    x = {n: mine(t, [0, T], "contiguous").requires_grad_() for n, t in of_rows(1, T).items()}

    def step(**a: Any) -> Any:
        return ops.chunk_kda(**a, cp_context=given)[0].sin().sum()

    made = torch.compile(step, backend="aot_eager")
    own, other = (torch.autograd.grad(f(**x), list(x.values())) for f in (step, made))
    assert all(torch.equal(a, b) for a, b in zip(own, other, strict=True)), "torch.compile"


def refused(kind: type[Exception], words: str, **more: Any) -> None:
    x = of_rows(1, 8)
    try:
        ops.chunk_kda(**x, **more)
    except kind as e:
        assert words in str(e), e
    else:
        raise AssertionError(f"{more} is taken")


def refusals() -> None:
    N, group = dist.get_world_size(), dist.group.WORLD
    state = torch.zeros(1, HV, K, V)
    refused(NotImplementedError, "states with cp_context", cp_context=group, initial_state=state)
    refused(NotImplementedError, "cp_context of object", cp_context=object())
    refused(ValueError, "do not divide", cp_context=ops.cp_context(group, [0, 8 * N + 1], "zigzag"))
    refused(ValueError, "q: has 8 tokens where", cp_context=ops.cp_context(group, [0, 16 * N]))


if __name__ == "__main__":
    if os.environ.get("DELTAPROOF_OPS_DEVICE") == "cuda":
        torch.set_default_device(f"cuda:{os.environ['LOCAL_RANK']}")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    else:
        dist.init_process_group("gloo")
    torch.manual_seed(3)
    if os.environ.get("DP_TEST_NCCL"):
        context._by_group = lambda r: context._by_nccl(r, "cpu", 0)
    recurrences()
    convolutions()
    compiled()
    refusals()
    dist.barrier()
    print("all right")
    os._exit(0)
