"""`differ`: two functions on the same inputs, and whether both bounds allow what they differ by."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .contract import contract_of
from .judging import cache_folder, heard
from .limits import LONGEST, seconds
from .records import FAIL, NOT_JUDGED, PASS, ended
from .running import kernel_name, own_rows, small_case
from .server import About, Server, run_program
from .themes import case_paths
from .vocabulary import GRADIENT_OF


@dataclass(frozen=True)
class Difference:
    """The result of a comparison; A is the first function, B the second.

    - status: 0 if nothing is wrong, 1 if something is, 2 if not decided
    - verdict: "same", "within" (both bounds), "beyond" (them), "unbounded" (a design has no bound:
      the truth decided), "no result" or "refused"
    - tensors: every result and stage, as in `deltaproof differ --json`
    - text: the program's output; raised: tracebacks"""

    status: int
    verdict: str
    tensors: list[dict[str, Any]]
    first_beyond: str | None
    text: str
    raised: list[str]

    command = ""

    @property
    def passed(self) -> bool:
        return self.status == PASS

    def failures(self) -> list[str]:
        """One line: the verdict, and where it begins."""
        where = f", first {self.first_beyond}" if self.first_beyond else ""
        return [f"differ: {self.verdict}{where}"]


def _pair(x: Any) -> tuple[Any, Any]:
    return x if isinstance(x, tuple) else (x, x)


@heard
def differ(
    a: Callable[..., Any],
    b: Callable[..., Any],
    case: str | None = None,
    *,
    base: str | tuple[str, str],
    design: str | None | tuple[str | None, str | None] = None,
    tokens: int | None = None,
    heads: int | None = None,
    bitwise: bool = False,
    truth: bool = True,
    limit: float = 60.0,
    cache: str | None = None,
    **contract: Any,
) -> Difference:
    """`deltaproof differ`: prefill against decode, trainer against rollout.

    - case: a name, or a file of inputs (default: a small case that the contract serves)
    - base, design: the claim of both functions, or a pair of claims
    - tokens, heads: another size, by the case's law of inputs
    - bitwise: results must be equal bit for bit
    - truth: computed if a bound is broken, or if a design has none
    - limit, contract: as in `run`; both functions have one contract

    RuntimeError: the program could not compare."""
    both = zip((a, b), _pair(base), strict=True)
    kernels = [contract_of("differ", fn, said, contract) for fn, said in both]
    servers = [
        Server(kernel, About(kernel_name(fn), said, design=how), seconds(limit))
        for kernel, fn, said, how in zip(kernels, (a, b), _pair(base), _pair(design), strict=True)
    ]
    with tempfile.TemporaryDirectory(prefix="deltaproof-") as folder:
        path = os.path.join(folder, "differ.json")
        asked = small_case(kernels[0]) if case is None else case
        paths = case_paths(asked, kernels[0], cache_folder())
        if len(paths) != 1:
            raise ValueError(f"case={case!r}: differ compares on one case, these are {len(paths)}")
        command = ["differ", *paths, "--ranks=1", f"--json={path}"]
        command += [f"--limit={LONGEST:.0f}", f"--cache={cache or cache_folder()}"]
        command += ["--bitwise"] * bitwise + ["--no-truth"] * (not truth)
        command += [] if tokens is None else [f"--tokens={tokens}"]
        command += [] if heads is None else [f"--heads={heads}"]
        command += own_rows(kernels[0])
        backward = any(set(GRADIENT_OF) & set(kernel.writes()) for kernel in kernels)
        command += [] if backward else ["--forward"]
        done = run_program(command, *servers)
        if done.status not in (PASS, FAIL, NOT_JUDGED) or not os.path.exists(path):
            how = f"the program ended {ended(done.status)}"
            raise RuntimeError("\n".join([done.text.strip(), *done.raised[-1:], how]))
        with open(path, encoding="utf-8") as f:
            found = json.load(f)[0]
    return Difference(
        done.status,
        found["verdict"],
        found.get("tensors", []),
        found.get("first_beyond"),
        done.text,
        done.raised,
    )
