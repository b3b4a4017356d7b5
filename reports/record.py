"""Reads a record (harness/record.h) and checks its form. Nothing here judges a number.

    load(path) -> Record      raises Malformed, whose text names file and field

Guarantees to the rest of the report: every number is a float or an int ("nan", "inf", "-inf" are already floats), a list has the
right kind of entries or None in them, an absent optional field is absent or None. Fields that the tables below do not name are kept
and ignored, so that a later writer does not break this reader.
"""
import json
import math

SCHEMA, SCHEMA_VERSION = "deltaproof-record", 1
VERDICTS = ("pass", "fail", "skipped", "unjudged")
OVERALL = ("pass", "fail", "error")
SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class Malformed(Exception):
    """Text: `file: field: what was expected, what was found`."""


class Reject(Exception):
    def __init__(self, field, text):
        super().__init__(f"{field}: {text}")


def _show(x):
    s = json.dumps(x) if not isinstance(x, float) or math.isfinite(x) else str(x)
    return s if len(s) <= 60 else s[:57] + "..."


# A checker takes (value, field name) and returns the value to keep.
def _number(x, f):
    if isinstance(x, str) and x in SPECIAL:
        return SPECIAL[x]
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        raise Reject(f, f'expected a number, "nan", "inf" or "-inf", found {_show(x)}')
    return float(x)


def _count(x, f):
    if isinstance(x, bool) or not isinstance(x, int) or x < 0:
        raise Reject(f, f"expected an integer >= 0, found {_show(x)}")
    return x


def _text(x, f):
    if not isinstance(x, str):
        raise Reject(f, f"expected a string, found {_show(x)}")
    return x


def _bool(x, f):
    if not isinstance(x, bool):
        raise Reject(f, f"expected true or false, found {_show(x)}")
    return x


def _verdict(x, f):
    if x not in VERDICTS:
        raise Reject(f, f"expected one of {', '.join(VERDICTS)}, found {_show(x)}")
    return x


def _overall(x, f):
    if x not in OVERALL:
        raise Reject(f, f"expected one of {', '.join(OVERALL)}, found {_show(x)}")
    return x


def _integer(x, f):
    if isinstance(x, bool) or not isinstance(x, int):
        raise Reject(f, f"expected an integer, found {_show(x)}")
    return x


def _list(check, hole=False):
    def run(x, f):
        if not isinstance(x, list):
            raise Reject(f, f"expected a list, found {_show(x)}")
        return [None if hole and v is None else check(v, f"{f}[{i}]") for i, v in enumerate(x)]
    return run


def _object(fields, required=()):
    def run(x, f):
        if not isinstance(x, dict):
            raise Reject(f or "record", f"expected an object, found {_show(x)}")
        dot = f + "." if f else ""
        for k in required:
            if x.get(k) is None:
                raise Reject(dot + k, "missing")
        return {k: fields[k](v, dot + k) if k in fields and v is not None else v for k, v in x.items()}
    return run


def _texts(x, f):
    """policy: names to names."""
    if not isinstance(x, dict):
        raise Reject(f, f"expected an object, found {_show(x)}")
    return {k: _text(v, f"{f}.{k}") for k, v in x.items() if v is not None}


_numbers = _list(_number, hole=True)
_worst = _object({"rank": _integer, "sequence": _integer, "token": _integer, "head": _integer, "index": _integer, "got": _text, "want": _text, "rel": _number})
_failed = _object({"rank": _integer, "sequence": _integer, "token": _integer, "head": _integer, "index": _integer, "got": _text, "want": _text, "error": _number,
                   "bound": _number, "size": _number, "scale": _number, "times": _number, "marginal": _bool})
_windows = _object({"size": _count, "rel": _numbers}, ("size", "rel"))
_level = _object({"ratio": _number, "median": _number, "limit": _number, "units": _count, "freedom": _number, "draw": _number}, ("limit",))
LEVELS = ("row", "window", "rank", "tensor", "every", "sum", "factor", "offset", "truncation")
_expected = _object({"rel": _number, "excess": _number, "level": _text} | {x: _level for x in LEVELS}, ("excess", "level"))
_tensor = _object({
    "name": _text, "rel_fro": _number, "per_rank": _numbers, "per_head": _list(_numbers, hole=True), "worst_token": _worst, "failed": _failed, "windows": _windows,
    "bound": _number, "ratio": _number, "per_rank_ratio": _numbers, "expected": _expected, "tier": _text, "verdict": _verdict, "why": _text}, ("name", "verdict"))
_chain = _object({"rank": _count, "chunks": _count, "rel": _number, "effect": _number, "bound": _number, "abs": _number, "norm": _number},
                 ("chunks",))
_bits = _object({"store": _number, "operand": _number, "accumulate": _number, "truncated": _number, "model": _text, "effective": _number, "slope": _number, "biased": _bool,
                 "like": _text, "wrong": _bool, "says": _text}, ("model", "effective"))
_condition = _object({"condition": _number, "inverse": _number, "entry": _number, "rank": _count, "head": _count, "token": _count, "ill": _bool}, ("condition",))
_audit = _object({"columns": _count, "tokens": _count, "seed": _text, "worst": _number}, ("columns", "worst"))
_truth = _object({"kind": _text, "bits": _count, "radius": _number, "cached": _bool, "device": _text, "audit": _audit}, ("kind",))
_run = _object({
    "id": _text, "case": _text, "op": _text, "ranks": _count, "backend": _text, "policy": _texts, "truth": _truth, "tensors": _list(_tensor),
    "chain": _list(_chain), "slope": _number, "bits": _bits, "condition": _condition, "verdict": _verdict, "why": _text, "seconds": _number}, ("id", "case", "op", "verdict"))
_case = _object({
    "name": _text, "op": _text, "reason": _text, "source": _text, "T": _count, "H": _count, "HV": _count, "K": _count, "V": _count, "R": _count,
    "Nseq": _count, "regime": _text, "data": _text, "warnings": _list(_text)}, ("name", "op"))
_program = _object({"version": _text, "commit": _text, "compiler": _text, "blas": _text, "mpfr": _text, "cores": _count, "command": _text})
_totals = _object({v: _count for v in VERDICTS}, VERDICTS)
_record = _object({
    "schema": _text, "program": _program, "created": _text, "seconds": _number, "totals": _totals, "errors": _count, "verdict": _overall, "cases": _list(_case),
    "runs": _list(_run)}, ("schema", "schema_version", "totals", "verdict", "cases", "runs"))


class Record:
    """The checked record: .program .created .seconds .verdict .totals .errors .cases {name: case} .runs (in file order, with run["n"] = index)."""

    def __init__(self, d):
        self.program, self.created, self.seconds = d.get("program") or {}, d.get("created"), d.get("seconds")
        self.verdict, self.totals, self.errors = d["verdict"], d["totals"], d.get("errors") or 0
        self.cases, self.runs = {c["name"]: c for c in d["cases"]}, d["runs"]
        for n, r in enumerate(self.runs):
            r["n"], r["ranks"] = n, r.get("ranks") or 1
            for k, empty in (("policy", {}), ("truth", {}), ("tensors", []), ("chain", [])):
                r[k] = r.get(k) or empty
            for p in r["chain"]:
                p.setdefault("rel", None)
            self.cases.setdefault(r["case"], {"name": r["case"], "op": r["op"]})

    def of(self, case, **want):
        """Runs of a case; keywords select ranks, op, backend, or entries of the policy."""
        return [r for r in self.runs if r["case"] == case and all((r.get(k) if k in r else r["policy"].get(k)) == v for k, v in want.items())]

    def counts(self, runs=None):
        runs = self.runs if runs is None else runs
        return {v: sum(r["verdict"] == v for r in runs) for v in VERDICTS}


def tensor(run, name):
    return next((t for t in run["tensors"] if t["name"] == name), None)


def _refuse_constant(name):
    raise ValueError(f'{name} is not JSON; non-finite numbers are the strings "nan", "inf", "-inf"')


def load(path):
    try:
        with open(path, encoding="utf-8") as f:
            d = json.load(f, parse_constant=_refuse_constant)
    except OSError as e:
        raise Malformed(f"{path}: {e.strerror}")
    except (ValueError, RecursionError) as e:
        raise Malformed(f"{path}: not JSON: {e}")
    try:
        if not isinstance(d, dict) or d.get("schema") != SCHEMA:
            raise Reject("schema", f'expected "{SCHEMA}", found {_show(d.get("schema") if isinstance(d, dict) else d)}')
        if d.get("schema_version") != SCHEMA_VERSION or isinstance(d.get("schema_version"), bool):
            raise Reject("schema_version", f"this program reads version {SCHEMA_VERSION}, found {_show(d.get('schema_version'))}")
        return Record(_record(d, ""))
    except Reject as e:
        raise Malformed(f"{path}: {e}")
