"""A Python function on the program's cases: `run`, `bisect` and `shrink`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .contract import Contract, Problem, contract_of
from .fitting import fits
from .fresh import COUNT, FRESH, Caller, Law, run_fresh
from .judging import asked_folder, cache_folder, heard, place_of
from .layouts import FAR, HEADS_FIRST, LAYOUTS, layouts_of
from .limits import LONGEST, seconds
from .program import environment, program
from .provenance import kernels_of, note_options, surroundings
from .records import FAIL, NOT_JUDGED, PASS, forget, identity, own_folder, own_record, trusted
from .server import About, Finished, Server, run_program
from .themes import case_paths
from .words import folder_and_design, names_of

NO_CHECK = "not checked"
LONG = 131072  # more than 65,536, and eight windows of 16K


@dataclass(frozen=True)
class Check:
    """verdict: "bitwise", "within bounds" (of the declared design, of both calls), "fail" or
    "skipped"; why: where and by how much; case: the law of inputs."""

    name: str
    verdict: str
    why: str = ""
    case: str = ""


_STATUS = {"fail": FAIL, NO_CHECK: NOT_JUDGED, "not judged": NOT_JUDGED}


@dataclass(frozen=True)
class Run:
    """The result of the program.

    - status: 0 if every judged output passed, 1 if one, a layout or a check failed, 2 if the
      program could not judge
    - record: as in harness/record/record.h
    - raised: tracebacks of the function's exceptions
    - kernels: names of the CUDA kernels that ran in the first call
    - checks: results of `check` on one long sequence (set large)
    - layouts: {layout: "pass" | "fail" | "fail: EXCEPTION" | "refused: WHY" | "not judged: WHY"} of
      memory layouts other than contiguous"""

    status: int
    text: str
    record: dict[str, Any] | None
    raised: list[str]
    kernels: list[str]
    layouts: dict[str, str] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Did all that was judged pass, in every layout that fn does not refuse?"""
        return self.status == PASS and not self._failed()

    def _failed(self) -> list[tuple[str, int]]:
        """Lines of the layouts and checks that did not pass, and the status of each."""
        found = [(f"layout {n}: {x}", x.split(":")[0]) for n, x in self.layouts.items()]
        found += [(f"{x.name}: {x.why}", x.verdict) for x in self.checks]
        return [(line, _STATUS[verdict]) for line, verdict in found if verdict in _STATUS]

    def _whole(self, tokens: int) -> Run:
        """The same, whose status and text say what failed beside the cases."""
        failed, of = self._failed(), {x.name for x in self.checks}
        if not failed:
            return self
        lines = [f"check of {tokens} tokens: " * (x.split(":")[0] in of) + x for x, _ in failed]
        status = FAIL if FAIL in (self.status, *dict(failed).values()) else NOT_JUDGED
        if status != self.status:
            lines.append(f"VERDICT: {'FAIL' if status == FAIL else 'NOT JUDGED'} (in no case)")
        return replace(self, status=status, text=self.text + "".join(x + "\n" for x in lines))

    def _failed_runs(self) -> list[dict[str, Any]]:
        runs = self.record["runs"] if self.record else []
        return [r for r in runs if r["verdict"] == "fail"]

    def failures(self) -> list[str]:
        """One line a case, layout or check that failed."""
        said = []
        for r in self._failed_runs():
            wrong = [place_of(t) for t in r["tensors"] if t["verdict"] == "fail"]
            said.append(f"{r['case']}: {(wrong or [r['why']])[0]}")
        return said + [line for line, _ in self._failed()]

    @property
    def command(self) -> str:
        """The call that repeats a failure; of fresh problems the seed that draws them again."""
        record = self.record or {}
        if "seed" in record:
            return f"seed={record['seed']}"
        notes = record.get("provenance", {}).get("notes", {})
        case = next((r["case"] for r in self._failed_runs()), "")
        again: str = notes.get("again-all") or notes.get("again", "")
        return again.replace("{case}", repr(case)) if case else ""

    def verdicts(self) -> dict[str, str]:
        """{run ID: "pass" | "fail" | "skipped: WHY" | "unjudged"}."""
        runs = self.record["runs"] if self.record else []
        return {
            r["id"]: r["verdict"] + (f": {r['why']}" if r["verdict"] == "skipped" else "")
            for r in runs
        }


def _once_with_names(contract: Contract, server: Server) -> list[str]:
    """The first call is made under the profiler, and judged as all others are; the list fills
    then."""
    kernels: list[str] = []

    def first(problem: Problem) -> dict[str, Any]:
        server.call = contract.call
        result, names = kernels_of(lambda: contract.call(problem))
        kernels.extend(names)
        return result  # type: ignore[no-any-return]

    if contract.device not in (None, "cpu"):
        server.call = first
    return kernels


def _one_run(
    names: Sequence[str],
    contract: Contract,
    about: About,
    limit: float,
    options: Sequence[str],
    out: str | None = None,
) -> Run:
    folder = os.path.abspath(out) if out else tempfile.mkdtemp(prefix="deltaproof-")
    path, status = os.path.join(folder, "results.json"), NOT_JUDGED
    command = [
        "run",
        *names,
        *own_rows(contract),
        f"--out={folder}" if out else f"--json={path}",
        *options,
    ]
    command += [f"--limit={LONGEST:.0f}"]
    server = Server(contract, about, limit)
    kernels = _once_with_names(contract, server)
    try:
        with own_folder(folder):
            call = identity(command)
            done = run_program([*command, f"--note=call={call}"], server)
            record = own_record(path, call)
        status, why = trusted(done.status, record)
    finally:
        if not out and status != FAIL:  # of a failure, `explain` reads the record
            shutil.rmtree(folder, ignore_errors=True)
    text = done.text + (f"could not judge: {why}\n" if why else "")
    return Run(status, text, None if why else record, done.raised, kernels)


def own_rows(contract: Contract) -> list[str]:
    """The option that names the recurrence of the function's own."""
    own = contract.recurrence
    return [f"--recurrence={own.file(os.path.join(cache_folder(), 'rows'))}"] if own else []


def _again(fn: Callable[..., Any], cases: Sequence[str], **given: Any) -> list[str]:
    """Notes by which the program says how to repeat a run of fn: by this call, where {case} stands
    for a case's name. A case that is a file is named by its path."""
    words = [f"{n}={x!r}" for n, x in given.items() if x is not None]
    name = getattr(fn, "__name__", kernel_name(fn))
    call = lambda case: f"deltaproof.run({', '.join([name, case, *words])})"
    files = {os.path.basename(x).removesuffix(".case"): x for x in cases if os.path.isfile(x)}
    if not files:
        return [f"--note=again={call('{case}')}"]
    if len(cases) == 1:
        return [f"--note=again={call(repr(cases[0]))}"]
    whole = f"--note=again-all={call(repr(list(cases)))}"
    return [f"--note=again={call(f'{files!r}.get({{case}}, {{case}})')}", whole]


def small_case(contract: Contract) -> str:
    """A small case that such a function serves, with its forms of gate, beta and norm."""
    return f"{contract.models[0]}-smoke"


def _layout(
    contract: Contract, about: About, limit: float, layout: str, options: Sequence[str], cache: str
) -> str:
    """A small case with every array in that layout. Where the function takes states, also one of
    packed sequences, or of rows (heads-first). A function refuses a layout by NotImplementedError
    or Unsupported; whatever else it raises is a failure."""
    cases = case_paths(small_case(contract), contract, cache)
    rows = layout == HEADS_FIRST and contract.has_batch()
    if contract.takes("initial_state") and (rows or contract.takes("cu_seqlens")):
        packed = f"{contract.models[0]}-{'rows' if rows else 'packed-inside'}"
        cases += [x for x in case_paths(packed, contract, cache) if os.path.isfile(x)]
    options = [*options, "--again=0"]
    got = _one_run(cases, replace(contract, memory=layout), about, limit, options)
    if got.raised:
        return "fail: " + got.raised[-1].strip().splitlines()[-1]
    verdicts = list(got.verdicts().values())
    why = [v.removeprefix("skipped: ") for v in verdicts if v.startswith("skipped")]
    if len(why) == len(verdicts) and why:
        return f"refused: {why[0]}"
    return {PASS: "pass", FAIL: "fail"}.get(got.status, f"not judged: {got.text.strip()}")


@heard
def run(
    fn: Callable[..., Any],
    cases: str | Sequence[str] = "standard",
    *,
    base: str,
    design: str | None = None,
    layouts: Sequence[str] | None = None,
    limit: float = 60.0,
    tokens: int = LONG,
    seed: int | None = None,
    count: int = COUNT,
    laws: str | Sequence[str | Law] | None = None,
    out: str | Mapping[str, str] | None = None,
    report: str | None = None,
    label: str | None = None,
    kernel_commit: str | None = None,
    cache: str | None = None,
    **contract: Any,
) -> Run:
    """Run fn on cases and judge every output.

    The text names common mistakes that fit a failing case. If a case's errors are far below its
    claim, the text names a tighter claim that it would pass. Problems that fn does not support are
    skipped with their reason (Run.verdicts()).

    - fn: called as contract.py says.
    - cases: a set of its recurrences' cases, "smoke", "standard", "serving", "training", "large"
      (themes.py), or names of a set's cases or of `deltaproof list`. With "fresh" they are `count`
      problems drawn from `laws` by `seed` (None: a new one; fresh.py, laws.py). No truth of fresh
      problems exists while fn runs.
    - base: formats that fn claims, "bf16" "fp16" "fp32" "fp64"; design: where it rounds.
    - contract: outputs, models, gate, beta, l2norm, autograd, device, batch, state_layout (class
      Contract). With layout "mamba" fn takes x, dt, A, B, C and returns y (mamba.py).
    - layouts: memory layouts to try on two small cases after the cases (layouts.py; None: all that
      cost no memory). fn refuses one by NotImplementedError or Unsupported.
    - tokens: length of the sequence of the set large, on which `check` looks for faults beyond the
      length of any truth.
    - limit: seconds of one call; a longer call fails, and the other runs continue.
    - out, report: as in `judge`."""
    forget(out, report)
    kernel = contract_of("run", fn, base, contract)
    folder, design = folder_and_design(out, report, design)
    folder = folder or asked_folder()
    kernel = replace(kernel, narrow="fp16" in (design or ""))
    about = About(kernel_name(fn), base, design=design)
    limit = seconds(limit)
    cache = cache or cache_folder()
    if layouts is not None:
        layouts = names_of("layouts", layouts, (*LAYOUTS, FAR))
    cases = names_of("cases", cases)
    if FRESH in cases:
        if cases != [FRESH]:
            raise ValueError(f"cases={cases!r}: fresh problems are a run of their own")
        if kernel.widths:
            raise ValueError(f"widths={kernel.widths}: laws say the sizes of fresh problems")
        if own := kernel.recurrence:
            raise ValueError(f"recurrence={own.name!r}: fresh problems are of known recurrences")
        told = {"base": base, "design": design, "label": label, "kernel_commit": kernel_commit}
        drawn = {"seed": seed, "count": count, "laws": laws, "report": folder}
        return _fresh(kernel, limit, layouts, **drawn, **told)
    for name, value, usual in (("seed", seed, None), ("count", count, COUNT), ("laws", laws, None)):
        if value != usual:
            raise ValueError(f"{name}={value!r}: is of fresh problems, not of cases")
    names = case_paths(cases, kernel, cache)
    options = [f"--cache={cache}"]
    options += note_options(surroundings(), [])
    options += _again(fn, cases, base=base, design=design, **contract, layouts=())
    for name, value in (("label", label), ("kernel_commit", kernel_commit)):
        said = [] if value is None else names_of(name, str(value))
        options += [f"--{name.replace('_', '-')}={x}" for x in said]
    found = _one_run(names, kernel, about, limit, options, folder)
    if not found.raised and not kernel.recurrence:  # mistakes have other names
        say = _tighter if found.status == PASS and base == "bf16" else _fits
        paths = {os.path.basename(name).removesuffix(".case"): name for name in names}
        case, lines = say(found, paths, asked_of(found, kernel, about, limit, options))
        found = replace(found, text=_before_verdict(found.text, [f"{case} {x}" for x in lines]))
        if folder and lines and found.status == FAIL:
            _tell_page(folder, case, lines)
    found = replace(found, text=_before_verdict(found.text, _few_served(found.record, kernel)))
    layouts = layouts_of(kernel.device, cases) if layouts is None else layouts
    tried = {
        x: _layout(kernel, about, limit, x, options, cache) for x in layouts if x != "contiguous"
    }
    large = _checked(fn, tokens, limit, base, design, contract) if "large" in cases else []
    return replace(found, layouts=tried, checks=large)._whole(tokens)


def _fresh(contract: Contract, limit: float, layouts: Sequence[str] | None, **options: Any) -> Run:
    call = Caller(replace(contract, guards=True), limit)
    tried = LAYOUTS if layouts is None else layouts
    tried = [x for x in tried if x not in ("contiguous", FAR)]
    found = run_fresh(call, contract, layouts=tried, **options)
    record = {"runs": found.runs, "seed": found.seed}
    return Run(found.status, found.text, record, call.raised, [], found.layouts)._whole(0)


def _checked(
    fn: Callable[..., Any],
    tokens: int,
    limit: float,
    base: str,
    design: str | None,
    contract: dict[str, Any],
) -> list[Check]:
    from .checking import check

    try:
        return check(fn, tokens=tokens, limit=limit, base=base, design=design, **contract)
    except RuntimeError as e:
        return [Check("check", NO_CHECK, str(e))]


Ask = Callable[[str], list[str]]


def asked_of(
    found: Run, kernel: Contract, about: About, limit: float, options: Sequence[str]
) -> Ask:
    """The search of fitting.fits, without a run of sessions, which have no such lines."""
    cases = found.record["cases"] if found.record else []
    sessions = {f"{x['name']}.case" for x in cases if x.get("session")}

    def ask(path: str) -> list[str]:
        no_lines = os.path.basename(path).removesuffix(".case") + ".case" in sessions
        return [] if no_lines else fits(kernel, about, path, limit, options)

    return ask


def _before_verdict(text: str, more: list[str]) -> str:
    """The lines where a reader of the last line has read them."""
    at = text.rfind("VERDICT: ") if "VERDICT: " in text else len(text)
    return text[:at] + "".join(x + "\n" for x in more) + text[at:]


def _few_served(record: dict[str, Any] | None, contract: Contract) -> list[str]:
    """Says how to be asked more, where most cases were skipped and all others have one K and V.
    Cases that need another parameter do not count."""
    if not record or contract.widths:
        return []
    lacks = {r["case"] for r in record["runs"] if "the function " in r.get("why", "")}
    cases = {c["name"]: (c.get("K"), c.get("V")) for c in record["cases"] if c["name"] not in lacks}
    served = {r["case"] for r in record["runs"] if r["verdict"] != "skipped"} & set(cases)
    widths, n = {cases[name] for name in served}, len(cases)
    if len(widths) != 1 or 2 * len(served) > n or n < 4:
        return []
    left = f"{n - len(served)} of {n} cases were not served"
    return [f"{left}: widths={widths.pop()} asks for them in these"]


def _fits(found: Run, paths: Mapping[str, str], ask: Ask) -> tuple[str, list[str]]:
    """The first failing case, and lines of the common mistakes that fit it. If several would, only
    those that fit the next failures, too. None where calls with the same inputs differ. paths: of
    the cases by name; ask: lines of a case (fitting.fits)."""
    runs = found.record["runs"] if found.record else []
    failed = [r for r in runs if r["verdict"] == "fail"]
    cases = [r["case"] for r in failed if r["case"] in paths]
    if not cases or failed[0]["why"].startswith("not repeatable"):
        return "", []
    lines = ask(paths[cases[0]])
    for case in cases[1 : 1 + MOST_ASKED]:
        said = _several(lines)
        also = _several(ask(paths[case])) if said[1:] else []
        both = [x for x in said if x in also]
        if both:
            lines = ["fits: " + SEVERAL * (len(both) > 1) + "; ".join(both)]
    return cases[0], lines


def _tighter(found: Run, paths: Mapping[str, str], ask: Ask) -> tuple[str, list[str]]:
    """The first case with an error below a thousandth of its claim's expectation, and the line of a
    tighter claim that it would pass."""
    for run in found.record["runs"] if found.record else []:
        of = [(t["rel_fro"], t.get("expected", {}).get("rel")) for t in run["tensors"]]
        far = [0 < float(x or 0) < 1e-3 * float(y or 0) for x, y in of]
        if run["case"] in paths and any(far):
            return run["case"], ask(paths[run["case"]])
    return "", []


SEVERAL, MOST_ASKED = "several would fit: ", 3


def _several(lines: Sequence[str]) -> list[str]:
    """The mistakes of which one line says that they, or that one, would explain all failures."""
    said = lines[0].removeprefix("fits: ").removeprefix(SEVERAL) if len(lines) == 1 else ""
    return said.split("; ") if said else []


def _tell_page(folder: str, case: str, lines: Sequence[str]) -> None:
    """Puts them into the record and makes its page anew; who made the record has ended."""
    path = os.path.join(folder, "results.json")
    with open(path, encoding="utf-8") as f:
        record = json.load(f)
    said = "; ".join(x.removeprefix("fits: ") for x in lines)
    record["provenance"]["notes"][f"fits {case}"] = said
    with open(path + ".new", "w", encoding="utf-8") as f:
        json.dump(record, f, separators=(",", ":"), ensure_ascii=False)
        f.write("\n")
    os.replace(path + ".new", path)
    subprocess.run(
        [program(), "report", folder], capture_output=True, check=False, env=environment()
    )


def kernel_name(fn: Callable[..., Any]) -> str:
    name = getattr(fn, "__name__", type(fn).__name__)
    return "".join(c if c.isalnum() or c in "_-" else "-" for c in name)[:60] or "python"


def bisect(
    fn: Callable[..., Any], case: str, *, base: str, design: str | None = None, **contract: Any
) -> Finished:
    """`deltaproof bisect stage CASE`: judges every stage that fn returns beside its results
    (outputs=("o", "w", "u", ..), or a dict), and blames the first wrong one. Common mistakes that
    fit follow (lines "fits: .."). Status 0: nothing is wrong, 1: found, see text."""
    kernel = contract_of("bisect", fn, base, contract)
    about = About(kernel_name(fn), base, design=design)
    paths = case_paths(case, kernel, cache_folder())
    found = run_program(["bisect", "stage", *paths, *own_rows(kernel)], Server(kernel, about))
    if found.status != FAIL or found.raised or len(paths) != 1 or kernel.recurrence:
        return found
    lines = fits(kernel, about, paths[0], LONGEST, [f"--cache={cache_folder()}"])
    return replace(found, text=found.text + "".join(f"{x}\n" for x in lines))


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
    kernel = contract_of("shrink", fn, base, contract)
    about = About(kernel_name(fn), base, design=design)
    to = [] if output is None else [f"--output={output}"]
    command = ["shrink", *case_paths(case, kernel, cache_folder()), f"--tries={tries}", *to]
    command += own_rows(kernel)
    return run_program(command, Server(kernel, about))
