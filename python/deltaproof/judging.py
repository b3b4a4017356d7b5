"""Judge arrays of any kernel. `judge` returns what was found; `assert_explained` raises if an
output is not explained by the formats that the kernel claims."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from .program import ran
from .provenance import note_options, surroundings
from .records import FAIL, NOT_JUDGED, PASS, forget, identity, own_folder, own_record, trusted
from .recurrence import Recurrence
from .tensors import Tensors, save
from .vocabulary import least_axes
from .words import folder_and_design, in_python, names_of, plain_number, truth_of


@dataclass(frozen=True)
class Judgement:
    """The program's answer on one pair of files.

    status: 0 no output failed, 1 an output failed, 2 it could not be judged (`text` says why).
    Field record is the program's own of this very call; None: it left none, or was ended early.
    Field tensors is {name: as the record has it}, e.g. ["o"]["verdict"], ["rel_fro"], ["ratio"].
    Field command judges the same files again; it works as long as `folder`, which holds them,
    exists.
    """

    status: int
    record: dict[str, Any] | None
    text: str
    command: str
    folder: str | None
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Was every output looked at and found right?"""
        looked_at = [t for t in self.tensors.values() if not t.get("allowed")]
        verdicts = {t["verdict"] for t in looked_at}
        return self.status == PASS and verdicts == {"pass"}

    def failures(self) -> list[str]:
        """One line a failed output: tensor, rank, head, token, error over its limit."""
        return [place_of(t) for t in self.tensors.values() if t["verdict"] == "fail"]


def place_of(t: Mapping[str, Any]) -> str:
    row = t.get("failed") or t.get("worst_token") or {}
    parts = [t["name"]]
    for key in ("rank", "head", "sequence", "token"):
        if row.get(key) is not None and (row[key] >= 0):
            parts.append(f"{key} {row[key]}")
    times = float(row.get("times") or 0)  # the record writes inf as text
    return ", ".join(parts) + (f": {times:.3g} times its limit" if times else "")


# Called with what judge, run, check and differ find in this process: the pytest plug-in listens.
listeners: list[Callable[[Any], None]] = []
# Asked for a folder of report where `out` names none: the plug-in's --deltaproof-report.
report_folders: list[Callable[[], str | None]] = []


_calls = threading.local()
P = ParamSpec("P")
Found = TypeVar("Found")


def asked_folder() -> str | None:
    return next((x for x in (ask() for ask in report_folders) if x), None)


def heard(call: Callable[P, Found]) -> Callable[P, Found]:
    """The listeners get what the call finds, or why it was refused; nothing of calls inside it."""

    @wraps(call)
    def tells(*given: P.args, **named: P.kwargs) -> Found:
        __tracebackhide__ = True
        if getattr(_calls, "inside", False):
            return call(*given, **named)
        _calls.inside = True
        found: Any = None
        try:
            return (found := call(*given, **named))
        except BaseException as e:
            found = Judgement(NOT_JUDGED, None, str(e), "", None)
            raise
        finally:
            _calls.inside = False
            for listener in listeners:
                listener(found)

    return tells


def cache_folder() -> str:
    """Where truths are kept, so that inputs that do not change are paid for once."""
    return os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "deltaproof"
    )


def _options(**settings: Any) -> list[str]:
    """--name=value of every setting that has a value."""
    out = []
    for name, value in settings.items():
        if value is None:
            continue
        value = plain_number(value)
        if isinstance(value, bool):
            if name != "l2norm":
                raise TypeError(f"{name}={value!r}: must be no truth value")
            value = int(value)
        elif isinstance(value, str):
            names_of(name, value)
        elif not isinstance(value, int | float):
            value = ",".join(_whole(name, x) for x in _entries(name, value))
        out.append(f"--{name.replace('_', '-')}={value}")
    return out


def _entries(name: str, value: Any) -> Iterable[Any]:
    if isinstance(value, bytes | Mapping) or not isinstance(value, Iterable):
        raise TypeError(f"{name}={value!r}: must be a number, a text or a list of numbers")
    return value


def _whole(name: str, x: Any) -> str:
    n = plain_number(x)
    if isinstance(n, bool) or not isinstance(n, int | float) or n != int(n):
        raise TypeError(f"{name}: {x!r} is no whole number")
    return str(int(n))


def _check_axes(tensors: Tensors, what: str) -> None:
    """An array that lacks axes would be taken for one of other sizes."""
    for name, x in tensors.items():
        shape, least = getattr(x, "shape", None), least_axes(name)
        if shape is not None and len(shape) < least[0]:
            raise ValueError(
                f"{what}: {name} has the shape {list(shape)}, must be {least[1]}: an axis that "
                "is 1 long is written, too"
            )


def _check_names(tensors: Tensors, what: str) -> None:
    if not isinstance(tensors, Mapping) or not all(isinstance(name, str) for name in tensors):
        raise TypeError(f"{what}: must be {{name: array}}, is {_short(tensors)}")


def _short(x: Any) -> str:
    keys = [repr(name) for name in x] if isinstance(x, Mapping) else []
    return f"{type(x).__name__} of {', '.join(keys)}" if keys else type(x).__name__


def _is_one_token(inputs: Tensors, own: bool) -> bool:
    """In a file [1,H,K] may also be [B,T,K] without an axis of heads. Arrays have that axis."""
    states = ("initial_state", "dht")
    arrays = [x for n, x in inputs.items() if n in ("q", "C") or (own and n not in states)]
    shapes = [x.shape for x in arrays if hasattr(x, "shape")]
    return 3 in map(len, shapes) and all(s[0] == 1 and len(s) < 4 for s in shapes if len(s) > 2)


def _shortened(text: str, folder: str) -> str:
    """Files of the folder by their names, but in commands, which work from anywhere."""
    lines = text.splitlines(keepends=True)
    return "".join(
        x if x.startswith("explain: ") else x.replace(folder + os.sep, "") for x in lines
    )


@heard
def judge(
    inputs: Tensors,
    outputs: Tensors,
    *,
    base: str | None = None,
    claim: str | None = None,
    design: str | None = None,
    gate: str | None = None,
    gate_dtype: str | None = None,
    lower_bound: float | None = None,
    beta: str | None = None,
    l2norm: bool | None = None,
    scale: float | None = None,
    cu_seqlens: Sequence[int] | None = None,
    state_layout: str | None = None,
    layout: str | None = None,
    ranks: int | None = None,
    kernel_commit: str | None = None,
    unjudged: Collection[str] = (),
    label: str | None = None,
    kernels: Sequence[str] = (),
    out: str | Mapping[str, str] | None = None,
    report: str | None = None,
    cache: str | None = None,
    recurrence: Recurrence | str | None = None,
    why: float | None = None,
) -> Judgement:
    """Compare outputs of a kernel with the truth of its inputs.

    - inputs: "q" [T,H,K], "k" [T,H,K], "v" [T,HV,V], "g" [T,HV,K] or, GDN, [T,HV], "beta" [T,HV].
      Without "g" nothing decays. Optional are "A_log" [HV], "dt_bias" [HV,K], "initial_state"
      [N,HV,K,V], "do" [T,HV,V], "dht" [N,HV,K,V], "cu_seqlens" [N+1]. A batch axis may come first.
    - outputs: any of "o" [T,HV,V], "final_state" [N,HV,K,V], "dq" .. "dbeta", "dA_log",
      "ddt_bias", "dh0", and any stage (`deltaproof judge --help`). Gradients need "do".
    - Several query heads a value head: q [T,n HV,K] and o [T,n HV,V] beside k [T,HV,K]. Then dg
      must be of raw gates.
    - base: claimed formats of everything but the chain of M, "bf16" "fp32" "fp64".
    - claim: claimed format of the chain, from 3 ranks on.
    - design: where the kernel rounds (ref/vocabulary/design.h).
    - gate: "log" (g is the natural log of a step's decay), "exp" (g is that decay), "softplus",
      "lower_bound".
    - gate_dtype: the format in which the kernel reads g, if coarser than the array: "fp32" "bf16"
      "fp16".
    - beta: "plain" "sigmoid" "sigmoid2" "none" (GLA, SSD: nothing is erased).
    - l2norm: does the kernel normalise q and k?
    - scale: of q in o, default K^-1/2.
    - layout: "mamba" has inputs x dt A B C and outputs y (or out), final_states, dB, dC. Then
      q = C, k = B, v = x dt, g = A dt, beta="none", scale 1, states [N,HV,V,K].
    - unjudged: names of outputs that may be unjudged, because no limit on such inputs would detect
      that they are zero.
    - kernel_commit, label, kernels (names of CUDA kernels that ran): for the record.
    - recurrence: a user's own, the path of its text, or the name of one of the program. Inputs and
      gradients then have its names; beta and l2norm are none.
    - out: formats of outputs, if not the base's: {"o": "fp32", "dq": "bf16"}; or a folder, as
      report.
    - report: a folder that gets the files, results.json, junit.xml and report.html. With None the
      files stay in a temporary folder if an output fails, and are removed otherwise.
    - why: seconds of the search for a mistake that fits a failure, default 20; 0: none.
    """
    forget(out, report)
    for what, tensors in (("inputs", inputs), ("outputs", outputs)):
        _check_names(tensors, what)
    folder, design = folder_and_design(out, report, design)
    folder = folder or asked_folder()
    if ranks is not None and not 1 <= int(_whole("ranks", ranks)) <= 4096:
        raise ValueError(f"ranks={ranks!r}: must be a whole number from 1 to 4096")
    told = _options(
        base=base,
        claim=claim,
        design=design,
        gate=gate,
        gate_dtype=gate_dtype,
        lower_bound=lower_bound,
        beta=beta,
        l2norm=None if l2norm is None else truth_of("l2norm", l2norm),
        scale=scale,
        cu_seqlens=cu_seqlens,
        state_layout=state_layout,
        layout=layout,
        ranks=ranks,
        tokens=1 if _is_one_token(inputs, recurrence is not None) else None,
        unjudged=",".join(names_of("unjudged", unjudged)) or None,
        kernel_commit=kernel_commit,
        label=label,
    )
    notes = note_options(surroundings(), names_of("kernels", kernels))
    more = [f"--cache={cache or cache_folder()}", *_options(why=why), *notes]
    return _judged(inputs, outputs, told, more, folder, recurrence)


def _path_or_name(recurrence: str) -> str:
    """A file from anywhere; one that is none is a name that the program knows."""
    return os.path.abspath(recurrence) if os.path.exists(recurrence) else recurrence


def _judged(
    inputs: Tensors,
    outputs: Tensors,
    told: list[str],
    more: list[str],
    out: str | None,
    recurrence: Recurrence | str | None,
) -> Judgement:
    if recurrence is None:
        _check_axes(inputs, "inputs")
        _check_axes(outputs, "outputs")
    folder = os.path.abspath(out) if out else tempfile.mkdtemp(prefix="deltaproof-")
    given, made = files = [os.path.join(folder, f"{x}.safetensors") for x in ("inputs", "outputs")]
    json_path = os.path.join(folder, "results.json")
    record_to = [f"--out={folder}"] if out else [f"--json={json_path}"]
    replay = ["judge", f"--inputs={given}", f"--outputs={made}", *told]
    rows = os.path.join(folder, "rows.recurrence")
    if isinstance(recurrence, Recurrence):
        files = [*files, rows]
    if recurrence is not None:
        of = rows if isinstance(recurrence, Recurrence) else _path_or_name(recurrence)
        replay.append(f"--recurrence={of}")
    keep = bool(out)
    try:
        with own_folder(folder, *map(os.path.basename, files)):
            save(given, inputs)
            save(made, outputs)
            if isinstance(recurrence, Recurrence):
                with open(rows, "w", encoding="utf-8") as f:
                    f.write(recurrence.text())
            call = identity(replay, files)
            both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            words = [*replay, *record_to, *more, f"--note=call={call}"]
            done = ran(*words, errors="backslashreplace", **both)
            record = own_record(json_path, call)
        status, why = trusted(done.returncode, record)
        record = None if why else record
        keep = keep or (status == FAIL)
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    runs = record["runs"] if record else []
    text = in_python(_shortened(done.stdout, folder))
    return Judgement(
        status=status,
        record=record,
        text=text + (f"could not judge: {why}" if why else ""),
        command="deltaproof " + shlex.join(replay),
        folder=folder if keep else None,
        tensors={t["name"]: t for t in runs[0]["tensors"]} if runs else {},
    )


def explain(found: Judgement) -> str:
    """Text of a failure: what failed where, the program's table, how to see it again."""
    lines = ["deltaproof: not explained by the claimed formats", *found.failures(), found.text]
    if found.folder:
        lines.append(f"again: {found.command}")
    return "\n".join(lines)


def assert_explained(
    inputs: Tensors, outputs: Tensors, **settings: Any
) -> dict[str, dict[str, Any]]:
    """Raise AssertionError unless every output is as close to the truth as the claimed formats
    explain. Raise ValueError when that cannot be judged, with every missing setting.

    inputs, outputs, settings: as `judge` takes them. An output that is unjudged raises, unless
    `unjudged` names it, since it was not tested.
    Returns {output: {"rel_fro", "ratio", "bound", ..}} as the record has them."""
    __tracebackhide__ = True  # pytest shows the caller's line
    found = judge(inputs, outputs, **settings)
    if found.status == FAIL:
        raise AssertionError(explain(found))
    blind = [n for n, t in found.tensors.items() if t["verdict"] == "unjudged"]
    if blind and not found.passed:
        raise AssertionError(
            f"deltaproof: {', '.join(blind)}: not judged (name such outputs in `unjudged` to let "
            f"them pass)\n{found.text}"
        )
    if not found.passed:
        raise ValueError(found.text.strip())
    return found.tensors
