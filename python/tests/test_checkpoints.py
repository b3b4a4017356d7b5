"""States behind every N tokens, as a result (flashinfer#4896, sglang#31833)."""

from typing import Any

import numpy as np
import pytest

import deltaproof
from recurrences import right
from test_batches import FORM, ROW


def checkpointed(model: str, N: int, fault: str = "") -> Any:
    """Faults: a checkpoint of one token early; those of the sequence before; the last one again."""
    row = right(model)

    def kernel(
        q: Any, k: Any, v: Any, g: Any, beta: Any, scale: float, gate: str, beta_form: str,
        l2norm: bool, initial_state: Any = None, A_log: Any = None, dt_bias: Any = None,
        cu_seqlens: Any = None,
    ) -> Any:  # fmt: skip
        x = {n: y for n, y in dict(locals()).items() if n in ROW and n != "cu_seqlens"}
        tokens = ("q", "k", "v", "g", "beta")
        own = {n: y for n, y in x.items() if n not in tokens}
        cu = [0, len(q)] if cu_seqlens is None else [int(n) for n in cu_seqlens]
        o, final, kept = [np.zeros((0, *v.shape[1:]), np.float32)], [], []
        shape = (1, v.shape[1], q.shape[-1], v.shape[-1])
        for i, (a, e) in enumerate(zip(cu, cu[1:], strict=False)):
            S = np.zeros(shape, np.float32) if initial_state is None else initial_state[i][None]
            for t in range(a, e):
                one = {n: x[n][t : t + 1] for n in tokens}
                made = row(**own, **one, **FORM, initial_state=S)
                early, S = S, made["final_state"]
                o.append(made["o"])
                if (t - a + 1) % N == 0:
                    kept.append((early if fault == "early" else S)[0])
            final.append(S[0])
        states = np.stack(kept) if kept else np.zeros((0, *shape[1:]), np.float32)
        if fault == "shifted":
            states = np.roll(states, 1, 0)
        return np.concatenate(o), np.stack(final), states

    return kernel


@pytest.mark.parametrize("fault", ["", "early", "shifted"])
@pytest.mark.parametrize("model, N", [("gdn", 64), ("kda", 16)])
def test_states_behind_every_n_tokens(model: str, N: int, fault: str) -> None:
    own: dict[str, Any] = {"base": "fp32", "models": (model,), "layouts": ()}
    own |= {"outputs": ("o", "final_state", "checkpoints"), "checkpoints": N}
    cases = [f"{model}-checkpoints", f"{model}-packed-inside"]
    found = deltaproof.run(checkpointed(model, N, fault), cases, **own)
    assert list(found.verdicts().values()) == ["fail" if fault else "pass", "pass"], found.text
    assert not fault or "final_state" in found.text


def test_checkpoints_without_their_distance_are_refused() -> None:
    with pytest.raises(ValueError, match="checkpoints=0: must be the number of tokens"):
        deltaproof.run(checkpointed("gdn", 64), "gdn-t1", base="fp32", outputs=("o", "checkpoints"))
