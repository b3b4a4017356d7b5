"""harness/subject/example_program.py with a fault of the pool, chosen by $SLOTS. The word 'pool':
the pool is not written; 'other shape': an axis is missing; 'all slots': every slot changes."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "subject"))
import example_program as example

right = example.forward
how = os.environ.get("SLOTS", "")


def forward(x: example.Arrays, meta: example.Meta) -> example.Arrays:
    out = right(x, meta)
    pool = out.get("pool")
    if pool is None or not how:
        return out
    if how == "'pool'":
        del out["pool"]
    elif how == "other shape":
        out["pool"] = pool[..., 0]
    else:
        out["pool"] = pool + 1
    return out


example.forward = forward
sys.exit(example.main())
