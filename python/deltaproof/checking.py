"""`check`: what must hold between calls of one kernel, whatever the truth is."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from .contract import contract_of
from .judging import cache_folder, heard
from .limits import LONGEST, seconds
from .records import FAIL, PASS, ended
from .running import Check, kernel_name, own_rows, small_case
from .server import About, Server, run_program
from .themes import case_paths
from .vocabulary import GRADIENT_OF
from .words import truth_of

WORDS = {"pass": "bitwise", "fail": "fail", "skipped": "skipped"}


@heard
def check(
    fn: Callable[..., Any],
    *,
    base: str,
    case: str | Sequence[str] | None = None,
    tokens: int = 192,
    heads: int = 2,
    bitwise: bool = False,
    design: str | None = None,
    limit: float = 60.0,
    **contract: Any,
) -> list[Check]:
    """All of `deltaproof check` on inputs by the law of `case`. (Default: a small one that the
    contract serves. Several, or those of a set, are checked one after the other.) They have one
    sequence of `tokens` tokens and `heads` heads, K and V of the case.

    base, design, limit, contract: as `run` takes them. Gradients are checked where fn returns them.
    With bitwise fn claims equal bits wherever it does the same arithmetic. Else rows that differ
    must be within the sum of both calls' bounds. A check whose call fn does not serve is skipped,
    with the reason. RuntimeError: the program could not check."""
    kernel = contract_of("check", fn, base, contract)
    about = About(kernel_name(fn), base, design=design)
    with tempfile.TemporaryDirectory(prefix="deltaproof-") as folder:
        path = os.path.join(folder, "checks.json")
        asked = small_case(kernel) if case is None else case
        paths = case_paths(asked, kernel, cache_folder())
        command = ["check", *paths, f"--tokens={tokens}", f"--heads={heads}"]
        command += own_rows(kernel)
        command += ["--every", "--block", str(heads), "--ranks=1", f"--json={path}"]
        command += [f"--limit={LONGEST:.0f}"] + ["--bitwise"] * truth_of("bitwise", bitwise)
        command += [] if set(GRADIENT_OF) & set(kernel.writes()) else ["--forward"]
        done = run_program(command, Server(kernel, about, seconds(limit)))
        if done.status not in (PASS, FAIL) or not os.path.exists(path):
            how = f"the program ended {ended(done.status)}"
            raise RuntimeError("\n".join([done.text.strip(), *done.raised[-1:], how]))
        with open(path, encoding="utf-8") as f:
            found = json.load(f)
    return [_check(x) for x in found]


def _check(x: dict[str, Any]) -> Check:
    word = "within bounds" if x["within_bounds"] else WORDS[x["verdict"]]
    return Check(x["check"], word, x.get("why", ""), x["case"])
