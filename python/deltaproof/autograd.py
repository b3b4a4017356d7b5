"""Judge a PyTorch function and the gradients that autograd makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .judging import Judgement, judge
from .provenance import kernels_of
from .recurrence import Recurrence
from .tensors import Tensors, copy_of
from .vocabulary import GRADIENT_OF


def judge_autograd(
    fn: Callable[..., Any],
    inputs: Tensors,
    *,
    do: Any = None,
    dht: Any = None,
    seed: int = 0,
    **settings: Any,
) -> Judgement:
    """Call fn(**inputs) -> o or (o, final_state), go back through it, and judge o, final_state and
    the gradients of every floating input. An input that no gradient reaches has zeros.

    inputs: PyTorch tensors by name, in the shapes of `judge`; settings too. Argument do is the
    gradient of o, in its shape; None: drawn from the normal distribution by `seed`, in the dtype of
    o. Argument dht is the gradient of final_state; None: zeros. On a CUDA device the names of the
    kernels that ran are recorded."""
    import torch

    own = settings.get("recurrence")
    named = {f"d{n}": n for n in own.inputs} if isinstance(own, Recurrence) else {}
    gradient_of = GRADIENT_OF | named
    given = {n: copy_of(x) for n, x in inputs.items()}
    for n in gradient_of.values():
        if n in given:
            given[n].requires_grad_(True)
    made: dict[str, Any] = {}
    seeds: dict[str, Any] = {}

    def both_ways() -> None:
        result = fn(**given)
        o, state = result if isinstance(result, tuple) else (result, None)
        seeds["do"] = _normal(o, seed) if do is None else do
        made["o"] = copy_of(o)
        if state is not None:
            made["final_state"] = copy_of(state)
        if dht is not None:
            seeds["dht"] = dht
        ends = [o] if dht is None else [o, state]
        torch.autograd.backward(ends, [copy_of(x) for x in seeds.values()])

    _, kernels = kernels_of(both_ways)
    for gradient, n in gradient_of.items():
        if n in given:
            reached = given[n].grad
            made[gradient] = torch.zeros_like(given[n]) if reached is None else reached
    return judge({**inputs, **seeds}, made, kernels=kernels, **settings)


def _normal(o: Any, seed: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randn(o.shape, generator=generator, device="cpu").to(o.dtype).to(o.device)
