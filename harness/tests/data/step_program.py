"""harness/subject/example_program.py with a fault of the convolutions, chosen by $STEP.

- zeros: each call begins from zeros
- missing: conv_state_k is not returned
- late: conv_state_k lacks the last token
- slot: conv_pool_k is written to the slot after the right one
- dirty: conv_pool_k is written to both slots"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "subject"))
import example_program as example
import numpy as np

right = example.with_convolutions
how = os.environ.get("STEP", "")


def with_convolutions(x: example.Arrays, meta: example.Meta) -> example.Arrays:
    if how == "zeros":
        x = {n: y * 0 if n.startswith("conv_state") else y for n, y in x.items()}
    out = right(x, meta)
    if how == "missing":
        del out["conv_state_k"]
    if how == "late":
        out["conv_state_k"] = np.roll(out["conv_state_k"], 1, axis=1)
    if how in ("slot", "dirty") and "pool" in x:
        is_, to = out["conv_pool_k"], x["write_slot"]
        right_, to = is_.copy(), to[to >= 0]
        is_[(to + 1) % len(is_)] = right_[to]
        if how == "slot":
            is_[to] = x["conv_pool_k"][to]
    return out


example.with_convolutions = with_convolutions
sys.exit(example.main())
