"""Fresh problems: drawn from laws (laws.py) or made by functions, called before any truth of them
exists, then judged.

Problems come in pairs of the same shapes and settings with other values. The function is called on
the first of a pair twice, on the second at the same addresses, and on the first at other addresses.
All calls of all problems are made before the first of them is judged. The program has not begun
while the function runs, so there is no truth to be read. A Problem holds neither a name nor a seed.
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from . import laws as law_files
from .contract import INTEGERS, WIDE, Contract, Problem, Unsupported
from .judging import Judgement, judge
from .limits import within
from .program import ran
from .records import FAIL, NOT_JUDGED, PASS, forget
from .tensors import BFLOAT16, Tensors, load, to_numpy
from .vocabulary import GRADIENT_OF, INPUTS, RESULTS
from .words import safe, text_of

Results = dict[str, np.ndarray[Any, Any]]
Law = law_files.Law | Callable[[np.random.Generator], Tensors]
FRESH = "fresh"
COUNT = 20
SCALES = ("0.05", "0.31", "1")  # of every fourth pair, where the function takes one
WORDS = ("PASS", "FAIL", "COULD NOT JUDGE")


@dataclass(frozen=True)
class Drawn:
    """name: of the law, and a number. inputs: as `judge` takes them; settings: gate, beta, l2norm,
    scale, lower_bound."""

    name: str
    inputs: Tensors
    settings: Mapping[str, Any]
    problem: Problem


@dataclass(frozen=True)
class Call:
    """results: None where the call failed; why: then, or what else is wrong with it."""

    results: Results | None
    why: str = ""
    skipped: bool = False


class Caller:
    """Calls a function of this process; `raised` fills with tracebacks."""

    def __init__(self, contract: Contract, limit: float) -> None:
        self.contract, self.limit = contract, limit
        self.raised: list[str] = []

    def __call__(self, problem: Problem, layout: str = "", apart: bool = False) -> Call:
        """layout: of memory; apart: at addresses of which no call has been."""
        own = self.contract
        if layout or apart:
            own = replace(own, memory=layout or own.memory)
        try:
            return Call(within(self.limit, lambda: own.call(problem)))
        except (Unsupported, NotImplementedError) as e:
            return Call(None, text_of(e), skipped=True)
        except (Exception, SystemExit, GeneratorExit) as e:
            self.raised.append(safe(traceback.format_exc()))
            return Call(None, text_of(e))

    def close(self) -> None:
        pass


# ---- drawing ----------------------------------------------------------------------------------


def draw(
    contract: Contract, laws: Sequence[Law], seed: int, count: int, backward: bool
) -> Iterator[Drawn]:
    """`count` problems in pairs of one shape. The second packs its sequences in another order."""
    if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 1:
        raise ValueError(f"count={count!r}: must be a whole number from 1 on")
    rng = random.Random(seed)
    for i in range(0, count, 2):
        law, pair = rng.choice(laws), (rng.getrandbits(31), rng.getrandbits(31))
        keys = {}
        if isinstance(law, law_files.Law):
            keys = law.draw(rng, _form(contract, rng) | {"backward": "yes" if backward else "no"})
        if keys and contract.takes("scale") and not pair[0] % 4:
            keys.setdefault("scale", SCALES[pair[0] // 4 % len(SCALES)])
        for j, number in enumerate(pair[: count - i]):
            if isinstance(law, law_files.Law):
                own = {**keys, **(_repacked(keys) if j else {}), "seed": str(number)}
                yield _generated(f"{law.name}-{i + j}", own, contract)
            else:
                made = law(np.random.default_rng(number))
                name = f"{getattr(law, '__name__', 'law')}-{i + j}"
                if not isinstance(made, Mapping) or not {"q", "k", "v", "g"} <= made.keys():
                    raise ValueError(f"{name}: must return arrays q, k, v, g, .. by name")
                yield _problem(name, made, _settings(contract), contract)


def _repacked(keys: Mapping[str, str]) -> dict[str, str]:
    """The last sequence before all others: a number of tokens is another sequence's."""
    ends = [int(x) for x in keys.get("cu_seqlens", "0").split(",")]
    if len(ends) < 3:
        return {}
    last = ends[-1] - ends[-2]
    return {"cu_seqlens": ",".join(map(str, [0, *(x + last for x in ends[:-1])]))}


def _form(contract: Contract, rng: random.Random) -> dict[str, str]:
    """Keys of a problem that the function computes: one of its recurrences, its own settings."""
    op, own = rng.choice(contract.models), contract.form()
    if op in ("gdn2", "gla", "ssd", "dplr"):
        own["beta"] = "plain"
    if op == "dplr":
        own["l2norm"] = "no"
    if contract.base in WIDE:
        own["dtype"] = contract.base
    return {"op": op, **own}


def _settings(contract: Contract) -> dict[str, Any]:
    return {"gate": contract.gate, "beta": contract.beta, "l2norm": contract.l2norm}


def _generated(name: str, keys: Mapping[str, str], contract: Contract) -> Drawn:
    """The program makes the inputs, in files that are gone before the function is called."""
    for key in keys:
        if key == "recurrence" or key.startswith("session"):
            raise ValueError(f"{name}: {key}: fresh problems are single calls, of a known model")
    folder = tempfile.mkdtemp(prefix="deltaproof-")
    try:
        case, made = os.path.join(folder, "fresh.case"), os.path.join(folder, "inputs")
        with open(case, "w", encoding="utf-8") as f:
            f.write(law_files.case_text({"reason": "fresh", "source": name, **keys}))
        done = ran("inputs", case, "--output", made)
        if done.returncode:
            raise ValueError(f"{name}: {(done.stderr or done.stdout).strip()}")
        inputs = load(made)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    settings: dict[str, Any] = {
        "gate": keys.get("gate", "log"),
        "l2norm": keys.get("l2norm") == "yes",
    }
    settings["beta"] = "none" if keys["op"] in ("gla", "ssd") else keys["beta"]
    settings |= {n: float(keys[n]) for n in ("lower_bound", "scale") if n in keys}
    return _problem(name, inputs, settings, contract, keys["op"])


def _problem(
    name: str, inputs: Tensors, settings: Mapping[str, Any], contract: Contract, op: str = ""
) -> Drawn:
    """The inputs as a call of the function: every axis is there, numbers are doubles."""
    given = {n: to_numpy(x, n).copy() for n, x in inputs.items()}
    op = op or contract.models[0]
    turned = [n for n, axes in INPUTS.items() if "T" in axes and n in given]
    q, v = given["q"], given["v"]
    batch = q.ndim == 4 and op not in ("mkda", "gated-deltaproduct")
    if batch and len(q) > 1:
        lengths = np.full(len(q), q.shape[1])
        given["cu_seqlens"] = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    if batch:
        flat = {n: given[n].reshape(-1, *given[n].shape[2:]) for n in turned}
        given |= {n: x for n, x in flat.items() if INPUTS[n].startswith("T,")}
        q, v = given["q"], given["v"]
    sizes = {"T": len(q), "H": q.shape[1], "K": q.shape[-1], "HV": v.shape[1], "V": v.shape[-1]}
    sizes["R"] = v.shape[2] if v.ndim == 4 else 1
    g = given["g"]
    sizes["Kg"] = g.shape[-1] if g.ndim == 3 else 1
    sizes["Nseq"] = max(len(given.get("cu_seqlens", ())) - 1, 1)
    arrays = {n: x for n, x in given.items() if n in INTEGERS}
    for n, x in given.items():
        if n in INPUTS:
            shape = tuple(sizes[a] for a in INPUTS[n].split(","))
            arrays[n] = x.astype(np.float64).reshape(shape)
    scale = settings.get("scale", sizes["K"] ** -0.5)
    told = {
        "recurrence": op, "gate": settings["gate"], "l2norm": settings["l2norm"], "chunk": 0,
        "beta_form": settings["beta"], "scale": scale, "R": sizes["R"], "Kg": sizes["Kg"],
        "lower_bound": settings.get("lower_bound", 0.0), "backward": "do" in given,
    }  # fmt: skip
    short = "bf16" if q.dtype == BFLOAT16 else {4: "fp32", 8: "fp64"}.get(q.dtype.itemsize, "fp32")
    wanted = {
        n: tuple(sizes[a] for a in RESULTS[n].split(","))
        for n in contract.writes()
        if n in RESULTS and (n not in GRADIENT_OF or GRADIENT_OF[n] in given and "do" in given)
    }
    return Drawn(name, given, settings, Problem(arrays, told, short, wanted))


# ---- calling ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    """A call to be judged. again: why it is wrong whatever its numbers are."""

    name: str
    of: Drawn
    call: Call
    again: str = ""
    layout: str = ""


def call_all(call: Caller, drawn: Sequence[Drawn], layouts: Sequence[str]) -> list[Made]:
    """Every call of every problem, and of one that is served in each layout: the first of those
    that have most arrays."""
    out, served = [], []
    for i in range(0, len(drawn), 2):
        one, *rest = drawn[i : i + 2]
        first = call(one.problem)
        if first.results is None:
            out += [Made(x.name, x, first) for x in (one, *rest)]
            continue
        differs = _differs(first, call(one.problem), "called again with the same inputs")
        others = [Made(x.name, x, call(x.problem)) for x in rest]
        apart = _differs(first, call(one.problem, apart=True), "called at other addresses")
        out += [Made(one.name, one, first, differs or apart), *others]
        served.append(one)
    if served:
        most = max(served, key=lambda x: len(x.problem.arrays))
        laid = [(x, call(most.problem, layout=x)) for x in layouts]
        out += [Made(f"{most.name}-{x}", most, made, layout=x) for x, made in laid]
    return out


def _differs(first: Call, second: Call, how: str) -> str:
    if second.results is None:
        return f"{how}: {second.why}"
    for n, x in (first.results or {}).items():
        same = (x == second.results[n]) | (np.isnan(x) & np.isnan(second.results[n]))
        if not same.all():
            return f"not repeatable: {how}, {n} has other bits in {int((~same).sum())} entries"
    return ""


# ---- judging ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """Runs of all calls, as a record has them, their texts and status."""

    status: int
    runs: list[dict[str, Any]]
    text: str
    layouts: dict[str, str]
    seed: int


def judge_all(made: Sequence[Made], report: str | None, seed: int, **options: Any) -> Found:
    runs, text, tried = [], [], {}
    for x in made:
        run, said = _judged(x, report, options)
        if x.layout:
            skipped = run["verdict"] == "skipped"
            tried[x.layout] = f"refused: {run['why']}" if skipped else run["verdict"]
        runs.append(run)
        text.append(said)
    verdicts = [r["verdict"] for r in runs]
    passed, failed = verdicts.count("pass"), verdicts.count("fail")
    status = FAIL if failed else PASS if passed else NOT_JUDGED
    status = NOT_JUDGED if not failed and "unjudged" in verdicts else status
    text.append(
        f"VERDICT: {WORDS[status]} ({passed} passed, {failed} failed, "
        f"{verdicts.count('skipped')} skipped, {verdicts.count('unjudged')} unjudged; fresh "
        f"problems of seed {seed})\n"
    )
    return Found(status, runs, "".join(text), tried, seed)


def _judged(x: Made, report: str | None, options: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    run: dict[str, Any] = {"id": f"{FRESH}:{x.name}", "case": x.name, "tensors": []}
    if x.call.results is None:
        run |= {"verdict": "skipped" if x.call.skipped else "fail", "why": x.call.why}
        return run, f"{run['verdict']:<8} {run['id']}  {x.call.why}\n"
    found = _judge(x, report, options)
    run["tensors"] = list(found.tensors.values())
    verdict = {PASS: "pass", FAIL: "fail"}.get(found.status, "unjudged")
    why = "; ".join(found.failures()) if verdict == "fail" else ""
    if x.again:
        verdict, why = "fail", "; ".join(w for w in (x.again, why) if w)
    run |= {"verdict": verdict, "why": why}
    worst = "  ".join(f"{t['name']} {share(t):.2g} of its limit" for t in run["tensors"])
    lines = f"{verdict:<8} {run['id']}  {why or worst}\n"
    if verdict == "unjudged":
        lines += found.text
    return run, lines + (f"again: {found.command}\n" if found.folder else "")


def _judge(x: Made, report: str | None, options: Mapping[str, Any]) -> Judgement:
    given = {n: y for n, y in x.of.inputs.items() if n != "cu_seqlens"}
    made = x.call.results or {}
    if len(given["q"]) == 1:  # one token is told from one head by the axis of batch
        given, made = with_batch(given), with_batch(made)
    cu = x.of.inputs.get("cu_seqlens")
    cu_seqlens = None if cu is None else [int(n) for n in cu]
    folder = os.path.join(report, x.name) if report else None
    told = {**x.of.settings, **options}
    return judge(
        given, made, cu_seqlens=cu_seqlens, report=folder, why=None if folder else 0, **told
    )


def with_batch(arrays: Tensors) -> dict[str, Any]:
    """Arrays of tokens as rows of a batch of one."""
    axes = {**INPUTS, **RESULTS}
    return {n: x[None] if axes[n].startswith("T,") else x for n, x in arrays.items()}


def share(tensor: Mapping[str, Any]) -> float:
    """Its largest error over the limit of that, of all levels that look at it: above 1 fails."""
    expected = tensor.get("expected") or {}
    levels = [x for x in expected.values() if isinstance(x, Mapping) and "limit" in x]
    parts = [float(x["ratio"]) / float(x["limit"]) for x in levels if float(x["limit"]) > 0]
    return max([float(tensor.get("ratio") or 0), *parts])


def run_fresh(
    call: Any,  # Caller, or kernel_process.KernelProcess
    contract: Contract,
    *,
    seed: int | None,
    count: int,
    laws: str | Sequence[str | Law] | None,
    layouts: Sequence[str],
    report: str | None,
    **options: Any,
) -> Found:
    """Draw, call, end the caller, judge. seed: None: one that nobody knows before."""
    if report and os.path.isdir(report):
        forget(*(x.path for x in os.scandir(report) if x.is_dir()))
    if not isinstance(seed, int | np.integer | None):
        raise ValueError(f"seed={seed!r}: must be a whole number")
    seed = secrets.randbits(48) if seed is None else int(seed)
    backward = bool(set(contract.writes()) & set(GRADIENT_OF))
    try:
        drawn = list(draw(contract, laws_of(laws), seed, count, backward))
        made = call_all(call, drawn, layouts)
    finally:
        call.close()
    cache = tempfile.mkdtemp(prefix="deltaproof-")  # truths of a seed are for no later run of it
    try:
        return judge_all(made, report, seed, cache=cache, **options)
    finally:
        shutil.rmtree(cache, ignore_errors=True)


def laws_of(asked: str | Sequence[str | Law] | None) -> list[Law]:
    """Laws by name, file, folder or as functions; None: those of this package."""
    if asked is None:
        return [*law_files.read_all([x for x in law_files.names() if x != "soak"])]
    out: list[Law] = []
    for x in [asked] if isinstance(asked, str) or callable(asked) else asked:
        out += law_files.read_all(x) if isinstance(x, str) else [x]
    if not out:
        raise ValueError(f"laws={asked!r}: no law")
    return out
