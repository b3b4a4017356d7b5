"""A Python function on the program's cases: `run`, `bisect` and `shrink`."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .contract import Contract, Problem
from .fitting import fits
from .judging import FAIL, NOT_JUDGED, PASS, cache_folder
from .layouts import LAYOUTS
from .provenance import kernels_of, note_options, surroundings
from .server import About, Finished, Server, run_program

# Sets of cases by the models that they need; a few seconds each where the truth is cached.
CASES: dict[str, tuple[str, ...]] = {
    "smoke": ("smoke-kda", "smoke-gdn", "t1", "t65"),
    "standard": (
        *("smoke-kda", "smoke-gdn", "smoke-mkda2", "t1", "t63", "t64", "t65"),
        *("packed-inside", "packed-across", "packed-empty", "packed-ones", "initial-state"),
        *("no-decay", "beta-zero", "beta-decades", "strong-uniform", "held-gates", "lower-bound"),
        *("small-norms", "softplus-ends", "exact-kda", "exact-gdn", "exact-packed", "weak-heads"),
        *("near-symmetric", "kda-corr", "kda-typical"),
    ),
}


@dataclass(frozen=True)
class Run:
    """What the program found. status: 0 all that was judged passed, 1 something failed, 2 it could
    not judge; record: as harness/record/record.h describes it; raised: tracebacks of what the
    function raised; kernels: CUDA kernels that ran in the first call, by name; layouts: {layout:
    "pass" | "fail" | "refused: .."} of memory layouts other than contiguous."""

    status: int
    text: str
    record: dict[str, Any] | None
    raised: list[str]
    kernels: list[str]
    layouts: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return self.status == PASS and not any(x == "fail" for x in self.layouts.values())

    def verdicts(self) -> dict[str, str]:
        """{run ID: "pass" | "fail" | "skipped: WHY" | "unjudged"}."""
        runs = self.record["runs"] if self.record else []
        return {
            r["id"]: r["verdict"] + (f": {r['why']}" if r["verdict"] == "skipped" else "")
            for r in runs
        }


def _names(cases: str | Sequence[str]) -> list[str]:
    if isinstance(cases, str):
        return list(CASES.get(cases, (cases,)))
    return list(cases)


def _once_with_names(contract: Contract, server: Server) -> list[str]:
    """The function of the first call is run under the profiler; the list fills then."""
    kernels: list[str] = []

    def first(problem: Problem) -> None:
        server.before_call = lambda problem: None
        _, names = kernels_of(lambda: contract.call(problem))
        kernels.extend(names)

    if contract.device not in (None, "cpu"):
        server.before_call = first
    return kernels


def _start(command: Sequence[str], contract: Contract, about: About) -> tuple[Finished, list[str]]:
    server = Server(contract, about)
    kernels = _once_with_names(contract, server)
    return run_program(command, server), kernels


def _one_run(
    names: Sequence[str], contract: Contract, about: About, options: Sequence[str], out: str | None
) -> Run:
    folder = os.path.abspath(out) if out else tempfile.mkdtemp(prefix="deltaproof-")
    path, status = os.path.join(folder, "results.json"), NOT_JUDGED
    to = f"--out={folder}" if out else f"--json={path}"
    try:
        done, kernels = _start(["run", *names, to, *options], contract, about)
        record, status = None, done.status
        if os.path.exists(path):
            with open(path, encoding="utf-8") as f:
                record = json.load(f)
    finally:
        if not out and status != FAIL:  # of a failure, `explain` reads the record
            shutil.rmtree(folder, ignore_errors=True)
    return Run(done.status, done.text, record, done.raised, kernels)


def _again(fn: Callable[..., Any], **given: Any) -> list[str]:
    """The note by which the program says how a run of fn is had again: by this call."""
    words = [f"{n}={x!r}" for n, x in given.items() if x is not None]
    name = getattr(fn, "__name__", kernel_name(fn))
    return [f"--note=again=deltaproof.run({', '.join([name, '{case}', *words])})"]


def small_case(contract: Contract) -> str:
    """A small case that such a function serves."""
    first = contract.models[0]
    small = {"mkda": "smoke-mkda2", "gated-deltaproduct": "deltaproduct-weak"}
    forms = {"softplus": "smoke-kda", "log": "beta-zero", "lower_bound": "lower-bound"}
    return forms[contract.gate] if "kda" in contract.models else small.get(first, f"smoke-{first}")


def _layout(contract: Contract, about: About, layout: str, options: Sequence[str]) -> str:
    """One small case with every array in that layout. A function that raises refuses the layout,
    and does so loudly, which is no failure."""
    case = small_case(contract)
    got = _one_run([case], replace(contract, layout=layout), about, options, None)
    if got.raised:
        return "refused: " + got.raised[-1].strip().splitlines()[-1]
    return {PASS: "pass", FAIL: "fail"}.get(got.status, f"not judged: {got.text.strip()}")


def run(
    fn: Callable[..., Any],
    cases: str | Sequence[str] = "standard",
    *,
    base: str,
    design: str | None = None,
    layouts: Sequence[str] = LAYOUTS,
    limit: float = 60.0,
    out: str | None = None,
    label: str | None = None,
    kernel_commit: str | None = None,
    cache: str | None = None,
    **contract: Any,
) -> Run:
    """Run fn on cases and judge every output.

    fn: called as contract.py says. cases: "standard", "smoke", one name or several (`deltaproof
    list`). base: formats that fn claims, "bf16" "fp32" "fp64"; design: how it computes. contract:
    outputs, models, gate, beta, l2norm, autograd, device, batch, state_layout (class Contract). Of
    a case that fails the text says which common mistake fits it. layouts: memory
    layouts that are tried on one small case after the cases. limit: seconds of one call. out: a
    folder for record and report. Nothing of what fn does not serve is judged: such runs are skipped
    with their reason (Run.verdicts())."""
    kernel = Contract(fn, **contract)
    about = About(kernel_name(fn), base, design=design)
    options = [f"--limit={limit}", f"--cache={cache or cache_folder()}"]
    options += note_options(surroundings(), [])
    options += _again(fn, base=base, design=design, **contract, layouts=())
    for name, value in (("label", label), ("kernel-commit", kernel_commit)):
        options += [] if value is None else [f"--{name}={value}"]
    found = _one_run(_names(cases), kernel, about, options, out)
    if not found.raised:
        found = replace(
            found, text=found.text + _fits(_names(cases), found, kernel, about, options)
        )
    tried = {x: _layout(kernel, about, x, options) for x in layouts if x != "contiguous"}
    return replace(found, layouts=tried)


def _fits(
    names: Sequence[str], found: Run, contract: Contract, about: About, options: Sequence[str]
) -> str:
    """Of the first case that failed, which common mistakes fit it."""
    runs = found.record["runs"] if found.record else []
    failed = next((r["case"] for r in runs if r["verdict"] == "fail"), None)
    for name in names:
        if failed and os.path.basename(name).removesuffix(".case") == failed:
            return "".join(f"{failed} {x}\n" for x in fits(contract, about, name, options))
    return ""


def kernel_name(fn: Callable[..., Any]) -> str:
    name = getattr(fn, "__name__", type(fn).__name__)
    return "".join(c if c.isalnum() or c in "_-" else "-" for c in name)[:60] or "python"


def bisect(
    fn: Callable[..., Any], case: str, *, base: str, design: str | None = None, **contract: Any
) -> Finished:
    """`deltaproof bisect stage CASE`: every stage that fn returns beside its results (outputs=("o",
    "w", "u", ..), or a dict) is judged, and the first wrong one is blamed. Status 0: nothing is
    wrong, 1: found, see text."""
    about = About(kernel_name(fn), base, design=design)
    return run_program(["bisect", "stage", case], Server(Contract(fn, **contract), about))


def shrink(
    fn: Callable[..., Any],
    case: str,
    *,
    base: str,
    design: str | None = None,
    output: str | None = None,
    tries: int = 2000,
    **contract: Any,
) -> Finished:
    """`deltaproof shrink CASE`: the smallest part of the case on which fn still fails for the same
    reason, as a new case file (output, default CASE.min.case here)."""
    about = About(kernel_name(fn), base, design=design)
    to = [] if output is None else [f"--output={output}"]
    command = ["shrink", case, f"--tries={tries}", *to]
    return run_program(command, Server(Contract(fn, **contract), about))
