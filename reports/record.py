"""Reads a record (harness/record.h) and checks its form. Nothing here judges a number.

    load(path) -> Record      raises Malformed, whose text names file and field

Guarantees to the rest of the report: every number is a float or an int ("nan", "inf", "-inf" are already floats), a list has the
right kind of entries or None in them, an absent optional field is absent, also where the file says null. Fields that the tables below do not name are kept
and ignored, so that a later writer does not break this reader.
"""
import json
import math
import re

import files

SCHEMA, SCHEMA_VERSION = "deltaproof-record", 1
VERDICTS = ("pass", "fail", "skipped", "unjudged")
OVERALL = ("pass", "fail", "error")
SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
MOST = 2 ** 53                   # of integers: what a double holds exactly
RANKS = 4096
# What ref/text.h calls no text: control characters, halves of surrogate pairs, U+FFFE and U+FFFF.
NO_TEXT = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


class Malformed(Exception):
    """Text: `file: field: what was expected, what was found`."""


class Reject(Exception):
    def __init__(self, field, text):
        super().__init__(f"{field}: {text}")


def _show(x):
    try:
        s = json.dumps(x) if not isinstance(x, float) or math.isfinite(x) else str(x)
    except ValueError:                                           # an integer of thousands of digits
        s = "a number of thousands of digits"
    return s if len(s) <= 60 else s[:57] + "..."


# A checker takes (value, field name) and returns the value to keep.
def number(x, f):
    if isinstance(x, str) and x in SPECIAL:
        return SPECIAL[x]
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        raise Reject(f, f'expected a number, "nan", "inf" or "-inf", found {_show(x)}')
    if not abs(x) <= 1.7976931348623157e308:
        raise Reject(f, f"{_show(x)} is more than a double holds")
    return float(x)


def integer_from(least, most):
    def run(x, f):
        if isinstance(x, bool) or not isinstance(x, int) or x < least:
            raise Reject(f, f"expected an integer >= {least}, found {_show(x)}" if least > -MOST else f"expected an integer, found {_show(x)}")
        if x > most:
            raise Reject(f, f"expected an integer up to {most}, found {_show(x)}")
        return x
    return run


count, positive, integer, rank_count = integer_from(0, MOST), integer_from(1, MOST), integer_from(-MOST, MOST), integer_from(0, RANKS)


def text(x, f):
    if not isinstance(x, str):
        raise Reject(f, f"expected a string, found {_show(x)}")
    bad = NO_TEXT.search(x)
    if bad:
        raise Reject(f, f"has the character U+{ord(bad[0]):04X}, which is no text")
    return x


def boolean(x, f):
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


def list_of(check, hole=False, most=None):
    def run(x, f):
        if not isinstance(x, list):
            raise Reject(f, f"expected a list, found {_show(x)}")
        if most and len(x) > most:
            raise Reject(f, f"expected at most {most} entries, found {len(x)}")
        return [None if hole and v is None else check(v, f"{f}[{i}]") for i, v in enumerate(x)]
    return run


def object_of(fields, required=()):
    def run(x, f):
        if not isinstance(x, dict):
            raise Reject(f or "record", f"expected an object, found {_show(x)}")
        dot = f + "." if f else ""
        for k in required:
            if x.get(k) is None:
                raise Reject(dot + k, "missing")
        return {k: fields[k](v, dot + k) if k in fields else v for k, v in x.items() if v is not None}     # null is absent
    return run


def _texts(x, f):
    """policy: names to names."""
    if not isinstance(x, dict):
        raise Reject(f, f"expected an object, found {_show(x)}")
    return {text(k, f): text(v, f"{f}.{k}") for k, v in x.items() if v is not None}


_numbers = list_of(number, hole=True)
_of_ranks = list_of(number, hole=True, most=RANKS)
_worst = object_of({"rank": integer, "sequence": integer, "token": integer, "head": integer, "index": integer, "got": text, "want": text, "rel": number})
_failed = object_of({"rank": integer, "sequence": integer, "token": integer, "head": integer, "index": integer, "got": text, "want": text, "error": number,
                     "bound": number, "size": number, "scale": number, "times": number, "marginal": boolean})
_windows = object_of({"size": positive, "rel": _numbers}, ("size", "rel"))
_level = object_of({"ratio": number, "median": number, "limit": number, "units": count, "freedom": number, "draw": number}, ("limit",))
LEVELS = ("row", "window", "rank", "tensor", "every", "sum", "factor", "offset", "truncation")
_levels = object_of({"rel": number, "excess": number, "level": text} | {x: _level for x in LEVELS}, ("excess", "level"))


def _expected(x, f):
    """level: the name of one of the levels that are there."""
    e = _levels(x, f)
    if not isinstance(e.get(e["level"]), dict):
        raise Reject(f + ".level", f"expected the name of a level, found {_show(e['level'])}")
    return e


_fields = object_of({
    "name": text, "rel_fro": number, "per_rank": _of_ranks, "per_head": list_of(_numbers, hole=True), "worst_token": _worst, "failed": _failed, "windows": _windows,
    "bound": number, "ratio": number, "per_rank_ratio": _of_ranks, "expected": _expected, "tier": text, "verdict": _verdict, "why": text}, ("name", "verdict"))


def _tensor(x, f):
    """What decided must be there."""
    t = _fields(x, f)
    if t.get("tier") == "expected" and not t.get("expected"):
        raise Reject(f + ".expected", "missing, but tier is expected")
    if t.get("ratio") is not None and t.get("bound") is None:
        raise Reject(f + ".bound", "missing, but there is a ratio")
    return t


_chain = object_of({"rank": rank_count, "chunks": count, "rel": number, "effect": number, "bound": number, "abs": number, "norm": number},
                 ("chunks",))
_bits = object_of({"store": number, "operand": number, "accumulate": number, "truncated": number, "model": text, "effective": number, "slope": number, "biased": boolean,
                 "like": text, "wrong": boolean, "says": text}, ("model", "effective"))
_condition = object_of({"condition": number, "inverse": number, "entry": number, "rank": rank_count, "head": count, "token": count, "ill": boolean}, ("condition",))
_audit = object_of({"columns": count, "tokens": count, "seed": text, "worst": number}, ("columns", "worst"))
_truth = object_of({"kind": text, "bits": count, "radius": number, "cached": boolean, "device": text, "audit": _audit}, ("kind",))
_run = object_of({
    "id": text, "case": text, "op": text, "ranks": rank_count, "backend": text, "policy": _texts, "truth": _truth, "tensors": list_of(_tensor),
    "chain": list_of(_chain), "slope": number, "bits": _bits, "condition": _condition, "verdict": _verdict, "why": text, "seconds": number}, ("id", "case", "op", "verdict"))
_case = object_of({
    "name": text, "op": text, "reason": text, "source": text, "T": count, "H": count, "HV": count, "K": count, "V": count, "R": count,
    "Nseq": count, "regime": text, "data": text, "warnings": list_of(text)}, ("name", "op"))
_program = object_of({"version": text, "commit": text, "compiler": text, "blas": text, "mpfr": text, "cores": count, "device": text, "command": text})
_totals = object_of({v: count for v in VERDICTS}, VERDICTS)
_record = object_of({
    "schema": text, "program": _program, "created": text, "seconds": number, "totals": _totals, "errors": count, "verdict": _overall, "cases": list_of(_case),
    "runs": list_of(_run)}, ("schema", "schema_version", "totals", "verdict", "cases", "runs"))


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
            for x in r["chain"]:
                x.setdefault("rel", None)
            for x in r["tensors"]:
                x.setdefault("rel_fro", None)
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


def _refuse_twice(pairs):
    d = dict(pairs)
    if len(d) != len(pairs):
        raise ValueError("an object has a name twice")
    return d


def load_json(path):
    try:
        return json.loads(files.read(path).decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_refuse_twice)
    except OSError as e:
        raise Malformed(f"{path}: {e.strerror}")
    except (ValueError, RecursionError, MemoryError) as e:
        raise Malformed(f"{path}: not JSON: {e}")


def load(path):
    return checked(load_json(path), path)


def checked(d, path):
    """The record in d, which was read from path."""
    try:
        if not isinstance(d, dict) or d.get("schema") != SCHEMA:
            raise Reject("schema", f'expected "{SCHEMA}", found {_show(d.get("schema") if isinstance(d, dict) else d)}')
        if d.get("schema_version") != SCHEMA_VERSION or isinstance(d.get("schema_version"), bool):
            raise Reject("schema_version", f"this program reads version {SCHEMA_VERSION}, found {_show(d.get('schema_version'))}")
        return Record(_record(d, ""))
    except Reject as e:
        raise Malformed(f"{path}: {e}")
