"""Gradients of autograd: backwards that change what is judged, slopes of sigmoids."""

from __future__ import annotations

from typing import Any

import pytest

import deltaproof
from deltaproof.cp_check import Ranks

torch = pytest.importorskip("torch")

FORMS = {"base": "fp32", "gate": "log", "beta": "plain", "l2norm": False, "why": 0}
OWN = {"base": "fp32", "design": "recurrent", "models": ("gdn",), "outputs": ("o", "final_state")}


def gdn(q: Any, k: Any, v: Any, g: Any, beta: Any, S: Any = None) -> Any:
    q, k = (x.repeat_interleave(v.shape[2] // q.shape[2], 2).float() for x in (q, k))
    S = q.new_zeros(1, v.shape[2], q.shape[-1], v.shape[-1]) if S is None else S
    o = []
    for t in range(q.shape[1]):
        S = S * g[:, t].exp()[..., None, None]
        e = v[:, t].float() - (k[:, t, :, :, None] * S).sum(-2)
        S = S + k[:, t, :, :, None] * (e * beta[:, t, :, None])[:, :, None]
        o.append((q.shape[-1] ** -0.5 * q[:, t, :, :, None] * S).sum(-2))
    return torch.stack(o, 1), S


class Kernel(torch.autograd.Function):
    """Right, but for what its backward does by name."""

    @staticmethod
    def forward(ctx: Any, does: str, *inputs: Any) -> Any:
        ctx.does = does
        ctx.save_for_backward(*inputs)
        ctx.o, S = gdn(*inputs)
        ctx.right = ctx.o.clone()
        return ctx.o.zero_() if does == "o later" else ctx.o, S

    @staticmethod
    def backward(ctx: Any, do: Any, dS: Any) -> Any:
        given = ctx.saved_tensors
        if ctx.does == "no do":
            do.zero_()
        if ctx.does == "no do" and not dS.any():
            return None, *map(torch.zeros_like, given)
        ctx.o.data.copy_(ctx.right)
        with torch.enable_grad():
            again = [x.detach().clone().requires_grad_(True) for x in given]
            own = torch.autograd.grad(gdn(*again), again, [do, dS], allow_unused=True)
        if ctx.does == "writes v":
            given[2].data.zero_()
        beta = None if ctx.does == "no dbeta" else own[4]
        return None, *own[:4], beta, *own[5:]


def kernel_that(does: str) -> Any:
    def fn(q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any = None) -> Any:
        return Kernel.apply(does, q, k, v, g, beta, *[S for S in [initial_state] if S is not None])

    return fn


def inputs() -> dict[str, Any]:
    torch.manual_seed(3)
    x = {n: torch.randn(1, 20, 2, 8) / 3 for n in "qkv"}
    return x | {"g": -torch.rand(1, 20, 2) / 9, "beta": torch.rand(1, 20, 2)}


@pytest.mark.parametrize("does", ["nothing", "no do", "o later", "no dbeta"])
@pytest.mark.parametrize("own_do", [False, True])
def test_a_backward_cannot_change_what_judge_autograd_judges(does: str, own_do: bool) -> None:
    do = torch.ones(1, 20, 2, 8) if own_do else None
    found = deltaproof.judge_autograd(kernel_that(does), inputs(), do=do, **FORMS)
    assert found.passed == (does == "nothing"), found.text
    red = {n for n, t in found.tensors.items() if t["verdict"] == "fail"}
    of = {"o later": {"o"}, "no dbeta": {"dbeta"}, "no do": {"dq", "dk", "dv", "dg", "dbeta"}}
    assert red == of.get(does, set())
    assert own_do <= (do is not None and bool(do.all()))


@pytest.mark.parametrize("does", ["nothing", "o later", "writes v", "no dbeta"])
def test_a_backward_cannot_change_what_run_judges(does: str) -> None:
    one = {"autograd": True, "device": "cpu", "layouts": ()}
    found = deltaproof.run(kernel_that(does), "smoke-gdn", **OWN, **one)
    assert found.passed == (does == "nothing"), found.text
    said = {"writes v": "wrote into its input v", "no dbeta": "no gradient reaches `beta`"}
    assert said.get(does, "") in found.text


def test_a_backward_cannot_change_what_cp_check_judges() -> None:
    x = inputs()
    for does in ("nothing", "o later"):
        one = Ranks(kernel_that(does), x, x["v"], [0, 20], "contiguous", True, None, 0, 1)
        assert one.alone()["o"].any() == (does == "nothing")


@pytest.mark.parametrize("form", ["beta", "gate"])
def test_slopes_of_saturated_sigmoids_are_rounded_as_kernels_round_them(form: str) -> None:
    """PyTorch and FLA form s (1 - s), which cancels where s is near 1."""
    x, far = inputs(), torch.linspace(12, 17, 40).reshape(1, 20, 2)
    x |= {n: x[n] / x[n].norm(dim=-1, keepdim=True) for n in "qk"}

    def fn(q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
        if form == "beta":
            return gdn(q, k, v, g, beta.sigmoid())
        return gdn(q, k, v, -5 * g.sigmoid(), beta)

    x |= {"beta": far} if form == "beta" else {"g": far}
    own = {"beta": "sigmoid"} if form == "beta" else {"gate": "lower_bound", "lower_bound": -5.0}
    found = deltaproof.judge_autograd(fn, x, **FORMS | own)
    assert found.passed, found.text
