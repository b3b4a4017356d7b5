"""States behind every N tokens, as a result (flashinfer#4896, sglang#31833)."""

from typing import Any

import numpy as np
import pytest

import deltaproof
from recurrences import FORM, boundaries, by_token, right, taking


def checkpointed(model: str, N: int, fault: str = "") -> Any:
    """Faults: a checkpoint of one token early; those of the sequence before; the last one again."""
    row = right(model)

    def kernel(x: dict[str, Any], initial_state: Any) -> Any:
        q, v, cu = x["q"], x["v"], boundaries(x)
        o, final, kept = [np.zeros((0, *v.shape[1:]), np.float32)], [], []
        shape = (1, v.shape[1], q.shape[-1], v.shape[-1])
        for i, (a, e) in enumerate(zip(cu, cu[1:], strict=False)):
            S = np.zeros(shape, np.float32) if initial_state is None else initial_state[i][None]
            for t in range(a, e):
                made = row(**by_token(x, t), **FORM, initial_state=S)
                early, S = S, made["final_state"]
                o.append(made["o"])
                if (t - a + 1) % N == 0:
                    kept.append((early if fault == "early" else S)[0])
            final.append(S[0])
        states = np.stack(kept) if kept else np.zeros((0, *shape[1:]), np.float32)
        if fault == "shifted":
            states = np.roll(states, 1, 0)
        return np.concatenate(o), np.stack(final), states

    return taking(kernel, optional=("initial_state",))


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
