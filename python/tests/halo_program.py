"""Rows that ranks of FLA's causal convolution exchange, kept by deltaproof.exchanges, over gloo.

`test_exchanges.py` starts it by torchrun. The convolution needs a device, its exchange does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from fla.modules.causal_conv1d.cp import CausalConv1dFunctionCP as Conv
from fla.ops.cp import comm

from deltaproof.exchanges import Halos, halos

T, D, W = 8, 4, 4


def gathered(inp: Any, group: Any = None, **_: Any) -> tuple[Any, None]:
    """FLA's gather in a form that gloo takes."""
    parts = [torch.empty_like(inp) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, inp, group=group)
    return torch.stack(parts), None


def once(rank: int, wrong: bool) -> Halos:
    """One exchange in each direction; wrong: the last rank sends rows of its own making."""
    x = torch.arange(float(T * D)).reshape(1, T, D) + 100 * rank
    weight, before = torch.ones(D, W), W - 1 if rank else 0
    context = SimpleNamespace(
        layout="contiguous", is_first_rank=not rank, pre_num_conv_tokens=before, group=None
    )
    cu = torch.tensor([0, T])
    with halos() as kept:
        state = Conv._prepare_initial_state_for_cp(x, weight, cu, context, dist.group.WORLD)
        dx = torch.zeros(1, T, D)
        dh0 = torch.full((1, D, W), 1.0 + rank) if rank else None
        Conv._correct_dx_for_cp(dx, dh0, W, dist.group.WORLD, context)
    if rank:
        assert torch.equal(state[0, :, 1:].T, x[0, -(W - 1) :] - 100)
    behind = 2.0 + rank if rank + 1 < dist.get_world_size() else 0.0
    assert torch.equal(dx[0, -(W - 1) :], torch.full((W - 1, D), behind))
    if wrong and rank == 1:
        kept.forward[0] = (kept.forward[0][0] + 1, kept.forward[0][1])
    return kept


def main() -> None:
    dist.init_process_group("gloo")
    comm.all_gather_into_tensor = gathered
    rank = dist.get_rank()
    kept = once(rank, wrong=False)
    assert len(kept.forward) == len(kept.backward) == 1
    assert kept.faults() == []
    found = once(rank, wrong=True).faults()
    said = "forward call 0: rank 2 did not get what rank 1 sent"
    assert found == ([] if rank else [said]), found
    print("all right", flush=True)
    dist.destroy_process_group()


main()
