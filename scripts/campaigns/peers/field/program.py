#!/usr/bin/env python3
"""A public kernel of kernels.py as a program that deltaproof runs (--run, --serve):

    deltaproof shrink field-least-moved --cases scripts/campaigns/peers/field/cases --base bf16 \\
        --design chunk=16,scores=gated --writes o,final_state \\
        --serve 'python3 scripts/campaigns/peers/field/program.py cudnn-hopper-forward'

program.py KERNEL IN OUT answers one call, program.py KERNEL a call for each line `IN OUT` that it
reads. A problem that a kernel refuses is skipped. Needs a CUDA GPU.
"""

import os
import pathlib
import sys

sys.path[:0] = [
    str(pathlib.Path(__file__).resolve().parent),
    str(pathlib.Path(__file__).resolve().parent.parent),
]
from fla_dump import first_config_only, save
from outputs import REFUSALS, one_line

from kernels import BY_NAME, Inputs

UNSUPPORTED = 77


def answer(kernel, given, out):
    """'ok', 'unsupported WHY' or 'failed WHY'."""
    try:
        save(out, kernel.call(Inputs(given)))
        return "ok"
    except Exception as e:  # whatever a kernel raises is its answer
        kind = "unsupported" if type(e).__name__ in REFUSALS else "failed"
        return f"{kind} {one_line(e)}"


def main():
    kernel, paths = BY_NAME[sys.argv[1]], sys.argv[2:]
    if kernel.name.startswith("fla"):
        first_config_only()
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what kernels print is no answer
    if paths:
        what, _, why = answer(kernel, *paths).partition(" ")
        print(why, file=sys.stderr)
        return {"ok": 0, "unsupported": UNSUPPORTED}.get(what, 1)
    for line in sys.stdin:
        print(answer(kernel, *line.split()), file=said, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
