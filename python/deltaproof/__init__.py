"""Checks kernels of delta-rule linear attention (GDN, KDA, MKDA, ..) against a reference of known
error. Limits are derived from the number formats that the kernel claims.

    import deltaproof

    def test_my_kernel():
        o, state = my_kernel(q, k, v, g, beta)
        deltaproof.assert_explained(dict(q=q, k=k, v=v, g=g, beta=beta),
                                    dict(o=o, final_state=state),
                                    base="bf16", gate="log", beta="plain", l2norm=False)

`judge` and `assert_explained` judge arrays, `judge_autograd` a PyTorch function with its gradients,
`run` a function on the program's cases. `check` tests properties that must hold between calls of a
function. `differ` compares two functions. `bisect` finds the wrong stage, `shrink` the smallest
failing input. `assert_close` is FLA's criterion, with a message about the difference. `Recurrence`
defines a recurrence of your own, by rows and names. Arrays are numpy's (bf16: ml_dtypes.bfloat16)
or PyTorch's.
"""

from .autograd import judge_autograd
from .capturing import capture
from .checking import Check, check
from .closeness import assert_close, explain_difference
from .contract import Unsupported
from .differing import Difference, differ
from .judging import Judgement, assert_explained, judge
from .prices import exchange_prices, pieces
from .program import header, program
from .recurrence import Recurrence
from .running import Run, bisect, run, shrink
from .tensors import load, save, to_bf16

__all__ = [
    "Check",
    "Difference",
    "Judgement",
    "Recurrence",
    "Run",
    "Unsupported",
    "assert_close",
    "assert_explained",
    "bisect",
    "capture",
    "check",
    "differ",
    "exchange_prices",
    "explain_difference",
    "header",
    "judge",
    "judge_autograd",
    "load",
    "pieces",
    "program",
    "run",
    "save",
    "shrink",
    "to_bf16",
]
