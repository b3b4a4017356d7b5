"""The record of a run (format: the head of harness/record/record.h), read and checked by its
schema (record.schema.json). Nothing is judged here.

    load(path) -> Record      raises Malformed, whose text names file and field

A loaded record guarantees: every number is a float or an int ("nan", "inf", "-inf" are floats
already). Entries of a list have the right kind, or are None. A number or word that may be null is
absent where it is. Other nulls are refused. Fields that the schema does not name are
kept and ignored, so that a later writer does not break this reader.
"""

import json
from pathlib import Path
from typing import Any

from read import files, schema
from read.checks import Malformed, Reject, _show, texts

SCHEMA, SCHEMA_VERSION = "deltaproof-record", 1
# Operations of the program without stages, and those without ranks either, whose runs multiply one
# chain of M (harness/case/operations.c; a test compares). All others are recurrences.
NO_STAGES = ("chain", "conv", "session", "step session")
NO_RANKS = ("chain",)
VERDICTS = ("pass", "fail", "skipped", "unjudged")
JUDGED = ("pass", "unjudged")  # runs of a record that passes: tensors may be unjudged by consent

Case = dict[str, Any]
Run = dict[str, Any]
Tensor = dict[str, Any]

# Fields without which there is no page.
NEED = {
    "record": ("schema", "schema_version", "totals", "verdict", "cases", "runs"),
    "totals": VERDICTS,
    "case": ("name", "op"),
    "run": ("id", "case", "op", "tensors", "verdict"),
    "exchange": ("bytes", "buffer_bytes", "share"),
    "truth": ("kind",),
    "audit": ("columns", "worst"),
    "tensor": ("name", "verdict"),
    "windows": ("size", "rel"),
    "first_over": ("rows",),
    "expected": ("excess", "level"),
    "level": ("limit",),
    "chain_point": ("chunks",),
    "bits": ("model", "effective"),
    "condition": ("condition",),
    "pooled": ("tensor", "cases", "verdict"),
}


def _expected(x: Any, f: str) -> dict[str, Any]:
    """A later writer's levels are levels, too; level names one."""
    e = _of["expected"](x, f)
    later = {k: v for k, v in e.items() if isinstance(v, dict) and k not in LEVELS}
    e |= {k: _of["level"](v, f"{f}.{k}") for k, v in later.items()}
    if not isinstance(e.get(e["level"]), dict):
        raise Reject(f + ".level", f"expected the name of a level, found {_show(e['level'])}")
    return e


def _tensor(x: Any, f: str) -> Tensor:
    """The deciding limit must be there."""
    t = _of["tensor"](x, f)
    if t.get("tier") == "expected" and not t.get("expected"):
        raise Reject(f + ".expected", "missing, but tier is expected")
    if t.get("ratio") is not None and t.get("bound") is None:
        raise Reject(f + ".bound", "missing, but there is a ratio")
    return t


# `deltaproof list --schema` prints the file (a test compares).
_SCHEMA = json.loads((Path(__file__).parent / "record.schema.json").read_bytes())
LEVELS = _SCHEMA["$defs"]["expected"]["properties"]["level"]["enum"]
_of = schema.of(_SCHEMA, NEED, {"policy": texts, "expected": _expected, "tensor": _tensor})


class Record:
    """The checked record: .program .created .seconds .verdict .totals .errors .cases {name: case}
    .runs (in file order, with run["n"] = index) .pooled (tensors over many cases). The cases stand
    in .listed as they are written; .digest is "" where there is none. A run fails if a tensor of it
    does, the record if anything in it does. None passes without a run. .said is its own word."""

    def __init__(self, d: dict[str, Any]) -> None:
        self._of: dict[str, list[Run]] = {}  # by case
        self.program, self.created, self.seconds = (
            d.get("program") or {},
            d.get("created"),
            d.get("seconds"),
        )
        self.provenance = d.get("provenance") or {}
        self.pooled = d.get("pooled") or []
        self.listed = {"cases": d["cases"], "pooled": self.pooled}
        self.digest = (d.get("digest") or {}).get("value") or ""
        self.said, self.totals, self.errors = d["verdict"], d["totals"], d.get("errors") or 0
        self.cases, self.runs = {c["name"]: c for c in d["cases"]}, d["runs"]
        for n, r in enumerate(self.runs):
            r["n"], r["ranks"] = n, r.get("ranks") or 1
            for k, empty in (("policy", {}), ("truth", {}), ("chain", [])):
                r[k] = r.get(k) or empty
            for x in r["chain"]:
                x.setdefault("rel", None)
            for x in r["tensors"]:
                x.setdefault("rel_fro", None)
            if r["verdict"] == "pass" and _fails(r["tensors"]):
                r["verdict"] = "fail"
            self._of.setdefault(r["case"], []).append(r)
            self.cases.setdefault(r["case"], {"name": r["case"], "op": r["op"]})
        self.verdict = self.said
        if self.said == "pass" and not any(r["verdict"] in JUDGED for r in self.runs):
            self.verdict = "error"
        if self.said == "pass" and (_fails(self.runs) or _fails(self.pooled)):
            self.verdict = "fail"

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


def _fails(some: list[Any]) -> bool:
    return any(x["verdict"] == "fail" for x in some)


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
        return Record(_of["record"](d, ""))
    except Reject as e:
        raise Malformed(f"{path}: {e}") from e
