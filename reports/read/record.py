"""The record of a run (format: the head of harness/record/record.h), read and checked. Nothing is
judged here.

    load(path) -> Record      raises Malformed, whose text names file and field

A loaded record guarantees: every number is a float or an int ("nan", "inf", "-inf" are floats
already). Entries of a list have the right kind, or are None. An absent optional field is absent,
also where the file says null. Fields that the tables do not name are kept and ignored, so that a
later writer does not break this reader.
"""

import json
from typing import Any

from read import files
from read.checks import (
    Check,
    Malformed,
    Reject,
    _show,
    boolean,
    count,
    integer,
    integer_from,
    list_of,
    number,
    object_of,
    positive,
    text,
    texts,
)

SCHEMA, SCHEMA_VERSION = "deltaproof-record", 1
# Operations of the program without stages, and those without ranks either, whose runs multiply one
# chain of M (harness/case/operations.c; a test compares). All others are recurrences.
NO_STAGES = ("chain", "conv", "session", "step session")
NO_RANKS = ("chain",)
VERDICTS = ("pass", "fail", "skipped", "unjudged")
OVERALL = ("pass", "fail", "error")
RANKS = 4096

Case = dict[str, Any]
Run = dict[str, Any]
Tensor = dict[str, Any]

rank_count = integer_from(0, RANKS)


def one_of(values: tuple[str, ...]) -> Check:
    def run(x: Any, f: str) -> str:
        if x not in values:
            raise Reject(f, f"expected one of {', '.join(values)}, found {_show(x)}")
        return x

    return run


_numbers = list_of(number, hole=True)
_of_ranks = list_of(number, hole=True, most=RANKS)
_worst = object_of(
    {
        "rank": integer,
        "sequence": integer,
        "token": integer,
        "head": integer,
        "index": integer,
        "got": text,
        "want": text,
        "rel": number,
    }
)
_failed = object_of(
    {
        "rank": integer,
        "sequence": integer,
        "token": integer,
        "head": integer,
        "index": integer,
        "got": text,
        "want": text,
        "error": number,
        "bound": number,
        "size": number,
        "scale": number,
        "times": number,
        "marginal": boolean,
    }
)
_windows = object_of({"size": positive, "rel": _numbers}, ("size", "rel"))
_level = object_of(
    {
        "ratio": number,
        "median": number,
        "limit": number,
        "units": count,
        "freedom": number,
        "draw": number,
    },
    ("limit",),
)


def _expected(x: Any, f: str) -> dict[str, Any]:
    """Beside rel, excess and level every object is a level (harness/verdict/levels.h); level names
    one."""
    if not isinstance(x, dict):
        raise Reject(f, f"expected an object, found {_show(x)}")
    levels = {k: _level for k, v in x.items() if isinstance(v, dict)}
    fields = {"rel": number, "excess": number, "level": text}
    e = object_of(levels | fields, ("excess", "level"))(x, f)
    if not isinstance(e.get(e["level"]), dict):
        raise Reject(f + ".level", f"expected the name of a level, found {_show(e['level'])}")
    return e


_fields = object_of(
    {
        "name": text,
        "rel_fro": number,
        "per_rank": _of_ranks,
        "per_head": list_of(_numbers, hole=True),
        "worst_token": _worst,
        "failed": _failed,
        "windows": _windows,
        "first_over": object_of(
            {
                "rank": integer,
                "sequence": integer,
                "token": integer,
                "head": integer,
                "rows": count,
            },
            ("rows",),
        ),
        "bound": number,
        "ratio": number,
        "per_rank_ratio": _of_ranks,
        "expected": _expected,
        "tier": text,
        "verdict": one_of(VERDICTS),
        "why": text,
    },
    ("name", "verdict"),
)


def _tensor(x: Any, f: str) -> Tensor:
    """The deciding limit must be there."""
    t = _fields(x, f)
    if t.get("tier") == "expected" and not t.get("expected"):
        raise Reject(f + ".expected", "missing, but tier is expected")
    if t.get("ratio") is not None and t.get("bound") is None:
        raise Reject(f + ".bound", "missing, but there is a ratio")
    return t


_chain = object_of(
    {
        "rank": rank_count,
        "chunks": count,
        "rel": number,
        "effect": number,
        "bound": number,
        "abs": number,
        "norm": number,
    },
    ("chunks",),
)
_bits = object_of(
    {
        "store": number,
        "operand": number,
        "accumulate": number,
        "truncated": number,
        "model": text,
        "effective": number,
        "slope": number,
        "biased": boolean,
        "like": text,
        "wrong": boolean,
        "says": text,
    },
    ("model", "effective"),
)
_condition = object_of(
    {
        "condition": number,
        "inverse": number,
        "entry": number,
        "rank": rank_count,
        "head": count,
        "token": count,
        "ill": boolean,
    },
    ("condition",),
)
_audit = object_of(
    {"columns": count, "tokens": count, "seed": text, "worst": number}, ("columns", "worst")
)
_truth = object_of(
    {
        "kind": text,
        "bits": count,
        "radius": number,
        "cached": boolean,
        "device": text,
        "audit": _audit,
    },
    ("kind",),
)
_exchange = object_of(
    {
        "messages": count,
        "bytes": count,
        "buffer_bytes": count,
        "kept_bytes": count,
        "share": number,
    },
    ("bytes", "buffer_bytes", "share"),
)
_run = object_of(
    {
        "id": text,
        "case": text,
        "op": text,
        "ranks": rank_count,
        "backend": text,
        "path": text,
        "outcome": text,
        "way": text,
        "rollback": text,
        "windows": count,
        "windows_judged": count,
        "policy": texts,
        "exchange": _exchange,
        "truth": _truth,
        "tensors": list_of(_tensor),
        "chain": list_of(_chain),
        "slope": number,
        "bits": _bits,
        "condition": _condition,
        "verdict": one_of(VERDICTS),
        "why": text,
        "seconds": number,
    },
    ("id", "case", "op", "verdict"),
)
_case = object_of(
    {
        "name": text,
        "op": text,
        "reason": text,
        "source": text,
        "T": count,
        "H": count,
        "HV": count,
        "K": count,
        "V": count,
        "R": count,
        "Nseq": count,
        "inputs": text,
        "gate": text,
        "beta": text,
        "l2norm": boolean,
        "scale": number,
        "regime": text,
        "data": text,
        "session": text,
        "session_state": text,
        "session_slots": count,
        "warnings": list_of(text),
    },
    ("name", "op"),
)
_program = object_of(
    {
        "version": text,
        "commit": text,
        "compiler": text,
        "blas": text,
        "mpfr": text,
        "cores": count,
        "device": text,
        "command": text,
    }
)
_file = object_of({"role": text, "path": text, "bytes": count, "xxh128": text})


def _notes(x: Any, f: str) -> dict[str, str]:
    """Whatever keys, texts."""
    if not isinstance(x, dict):
        raise Reject(f, f"expected an object, found {_show(x)}")
    return {k: text(v, f"{f}.{k}") for k, v in x.items()}


_provenance = object_of(
    {"label": text, "kernel_commit": text, "files": list_of(_file), "notes": _notes}
)
_pooled = object_of(
    {
        "tensor": text,
        "backend": text,
        "way": text,
        "base": text,
        "undeclared": boolean,
        "fault": text,
        "cases": count,
        "ratio": number,
        "freedom": number,
        "chance": number,
        "detects": number,
        "verdict": one_of(VERDICTS),
        "says": text,
    },
    ("tensor", "cases", "verdict"),
)
_totals = object_of(dict.fromkeys(VERDICTS, count), VERDICTS)
_record = object_of(
    {
        "schema": text,
        "program": _program,
        "created": text,
        "provenance": _provenance,
        "seconds": number,
        "totals": _totals,
        "errors": count,
        "verdict": one_of(OVERALL),
        "cases": list_of(_case),
        "runs": list_of(_run),
        "pooled": list_of(_pooled),
    },
    ("schema", "schema_version", "totals", "verdict", "cases", "runs"),
)


class Record:
    """The checked record: .program .created .seconds .verdict .totals .errors .cases {name: case}
    .runs (in file order, with run["n"] = index) .pooled (tensors over many cases)."""

    def __init__(self, d: dict[str, Any]) -> None:
        self._of: dict[str, list[Run]] = {}  # by case
        self.program, self.created, self.seconds = (
            d.get("program") or {},
            d.get("created"),
            d.get("seconds"),
        )
        self.provenance = d.get("provenance") or {}
        self.pooled = d.get("pooled") or []
        self.verdict, self.totals, self.errors = d["verdict"], d["totals"], d.get("errors") or 0
        self.cases, self.runs = {c["name"]: c for c in d["cases"]}, d["runs"]
        for n, r in enumerate(self.runs):
            r["n"], r["ranks"] = n, r.get("ranks") or 1
            for k, empty in (("policy", {}), ("truth", {}), ("tensors", []), ("chain", [])):
                r[k] = r.get(k) or empty
            for x in r["chain"]:
                x.setdefault("rel", None)
            for x in r["tensors"]:
                x.setdefault("rel_fro", None)
            self._of.setdefault(r["case"], []).append(r)
            self.cases.setdefault(r["case"], {"name": r["case"], "op": r["op"]})

    def of(self, case: str, **want: Any) -> list[Run]:
        """Runs of a case; keywords select ranks, op, backend, or entries of the policy."""
        return [
            r
            for r in self._of.get(case, [])
            if all((r.get(k) if k in r else r["policy"].get(k)) == v for k, v in want.items())
        ]

    def counts(self, runs: list[Run] | None = None) -> dict[str, int]:
        runs = self.runs if runs is None else runs
        return {v: sum(r["verdict"] == v for r in runs) for v in VERDICTS}


def operation(case: Case) -> str:
    """The operation's name in the table of operations: a session is one of its own, whatever its
    model."""
    return "session" if "session" in case else case["op"]


def tensor(run: Run, name: str) -> Tensor | None:
    return next((t for t in run["tensors"] if t["name"] == name), None)


def _refuse_constant(name: str) -> None:
    raise ValueError(f'{name} is not JSON; non-finite numbers are the strings "nan", "inf", "-inf"')


def _refuse_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    d = dict(pairs)
    if len(d) != len(pairs):
        raise ValueError("an object has a name twice")
    return d


def parsed(data: bytes, path: str) -> Any:
    """The content of the JSON text data, which was read from path."""
    try:
        return json.loads(
            data.decode("utf-8"),
            parse_constant=_refuse_constant,
            object_pairs_hook=_refuse_twice,
        )
    except (ValueError, RecursionError, MemoryError) as e:
        raise Malformed(f"{path}: not JSON: {e}") from e


def load_json(path: str) -> Any:
    try:
        return parsed(files.read(path), path)
    except OSError as e:
        raise Malformed(f"{path}: {e.strerror}") from e
    except (ValueError, MemoryError) as e:
        raise Malformed(f"{path}: not JSON: {e}") from e


def load(path: str) -> Record:
    return checked(load_json(path), path)


def checked(d: Any, path: str) -> Record:
    """The record in d, which was read from path."""
    try:
        if not isinstance(d, dict) or d.get("schema") != SCHEMA:
            raise Reject(
                "schema",
                f'expected "{SCHEMA}", found '
                f"{_show(d.get('schema') if isinstance(d, dict) else d)}",
            )
        if d.get("schema_version") != SCHEMA_VERSION or isinstance(d.get("schema_version"), bool):
            raise Reject(
                "schema_version",
                f"this program reads version {SCHEMA_VERSION}, found "
                f"{_show(d.get('schema_version'))}",
            )
        return Record(_record(d, ""))
    except Reject as e:
        raise Malformed(f"{path}: {e}") from e
