#!/usr/bin/env python3
"""compare.py OLD NEW [--again RECORD]... [--worse X] [--verbose] [--json FILE]: two records side by
side. compare.py --history OUT.html RECORD...: history.py.

A record is a results.json, or the folder that holds it. Listed are runs and tensors that appeared,
vanished or are no longer judged, changed verdicts, and errors that moved, against run-to-run noise.

An error (a tensor's rel_fro, or its share on one rank) has moved when |ln(new / old)| exceeds twice
its noise. Noise is the largest |ln| between OLD and any record of --again, further runs of OLD's
program. Simulated runs and judged files repeat bit for bit, and have none; that of other backends
counts as unknown, 0, and the summary says so. It has become worse when it grew by more than the
factor --worse. Verdicts do not depend on that factor.

NEW is worse when an error became worse, or a verdict: of the record, a run, a tensor, or what is
pooled over cases. It is worse when a judged run or tensor, a case or such a row is gone. It is
worse when more cases could not be judged at all. Records are the same when nothing of that differs,
nor their digests. Exit status 0 nothing worse, 1 worse, 2 they cannot be compared.
"""

import argparse
import contextlib
import gc
import json
import math
import os
import sys
from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple, TextIO

# Where this program's own modules are: -I leaves that out.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import history
from read import files, many, record
from read.checks import Malformed
from read.record import Record, Run, Tensor

BADNESS = ("pass", "unjudged", "skipped", "fail", "error")
REPEAT = ("sim", "lapack", "file")  # backends whose runs repeat bit for bit
SAID = {"pass": "pass", "fail": "fail", "skipped": "are skipped", "unjudged": "are unjudged"}
# Parts of a record beside its runs: its word, and the fields that name an entry.
PARTS = (
    ("cases", "case", ("name",)),
    ("pooled", "all cases of", ("tensor", "backend", "way", "base", "undeclared", "fault")),
)


class Move(NamedTuple):
    """The share of a tensor that moved most; rank None: the whole tensor."""

    id: str
    tensor: str
    rank: int | None
    old: float
    new: float
    by: float  # ln(new / old)
    noise: float


def growth(old: float, new: float) -> float:
    """ln(new / old); an error that is no number any more has grown without end."""
    if old == new or (old != old and new != new):
        return 0.0
    if old != old or new == 0:
        return -math.inf
    if new != new or old == 0 or math.isinf(new):
        return math.inf
    return -math.inf if math.isinf(old) else math.log(new) - math.log(old)


def errors(t: Tensor) -> list[float]:
    """The whole tensor's, then those of its ranks where it has several."""
    per_rank = t.get("per_rank") or []
    all_of = [t.get("rel_fro"), *(per_rank if len(per_rank) > 1 else [])]
    return [math.nan if x is None else x for x in all_of]


def percent(by: float) -> str:
    if math.isinf(by):
        return "from 0 or to no number" if by > 0 else "to 0 or to a number"
    return f"x {math.exp(by):.3g}" if by > math.log(10) else f"{100 * math.expm1(by):+.3g}%"


def is_judged(x: Run | Tensor) -> bool:
    return x["verdict"] in ("pass", "fail")


def is_worse(old: str, new: str) -> bool:
    return BADNESS.index(new) > BADNESS.index(old)


def by_id(rec: Record) -> dict[str, Run]:
    """Runs by ID; ID#2, ID#3 .. for those that come again."""
    seen: dict[str, int] = {}
    out = {}
    for r in rec.runs:
        n = seen[r["id"]] = seen.get(r["id"], 0) + 1
        out[r["id"] if n == 1 else f"{r['id']}#{n}"] = r
    return out


def tensors(run: Run | None) -> dict[str, Tensor]:
    return {t["name"]: t for t in run["tensors"]} if run else {}


def named(entries: list[dict[str, Any]], fields: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """{"o sim fp32": entry}"""
    return {
        " ".join(k if x[k] is True else str(x[k]) for k in fields if x.get(k)): x for x in entries
    }


class Comparison:
    def __init__(
        self, old: Record, new: Record, again: list[Record], a: argparse.Namespace
    ) -> None:
        self.old, self.new, self.args = old, new, a
        self.out: TextIO = sys.stderr if a.json == "-" else sys.stdout
        self.again = [by_id(r) for r in again]
        self.verdicts: list[dict[str, Any]] = []
        self.tensors: list[dict[str, Any]] = []
        self.appeared: list[str] = []
        self.vanished: list[str] = []
        self.moves: list[Move] = []
        self.both = self.noisy = self.worse = self.lost = self.gone = self.other = 0
        self.record_worse = False

    def say(self, word: str, text: str) -> None:
        print(f"{word:<7} {text}", file=self.out)

    # ---- the record, its cases, what is pooled

    def of_record(self) -> None:
        a, b = self.old, self.new
        self.record_worse = is_worse(a.verdict, b.verdict) or b.errors > a.errors
        if (a.verdict, a.errors) != (b.verdict, b.errors):
            self.other += 1
            self.say(
                "worse" if self.record_worse else "better",
                f"the record: {a.verdict} -> {b.verdict}, cases that could not be judged: "
                f"{a.errors} -> {b.errors}",
            )
        for k, said in SAID.items():
            if a.totals[k] != b.totals[k]:
                self.other += 1
                self.say("changed", f"the record: runs that {said}: {a.totals[k]} -> {b.totals[k]}")

    def of_part(self, part: str, word: str, fields: tuple[str, ...]) -> None:
        old, new = (named(x.listed[part], fields) for x in (self.old, self.new))
        for name, x in old.items():
            if name not in new:
                self.part_missing("gone", f"{word} {name}", x, self.vanished)
                self.gone += 1
            elif x != new[name]:
                self.other += 1
                if x.get("verdict") != new[name].get("verdict"):
                    self.verdict(f"{word} {name}", None, x, new[name])
                else:
                    self.say("changed", f"{word} {name}")
        for name, x in new.items():
            if name not in old:
                self.part_missing("new", f"{word} {name}", x, self.appeared)

    def part_missing(self, word: str, name: str, x: dict[str, Any], kept: list[str]) -> None:
        self.say(word, name + (f" ({x['verdict']})" if "verdict" in x else ""))
        kept.append(name)
        self.other += 1

    # ---- runs and their tensors

    def of_runs(self) -> None:
        old, new = by_id(self.old), by_id(self.new)
        for key, a in old.items():
            if key in new:
                self.of_run(key, a, new[key])
        self.vanished += self.missing("gone", old, new)
        self.gone += sum(old[k]["verdict"] != "skipped" for k in self.vanished)
        self.appeared += self.missing("new", new, old)

    def missing(self, word: str, here: dict[str, Run], there: dict[str, Run]) -> list[str]:
        """IDs that only one record has: a line each up to three of a case, one line above."""
        keys = [k for k in here if k not in there]
        for case, group in groupby(keys, lambda k: k.partition(":")[0]):
            of_case = list(group)
            if len(of_case) > 3 and not self.args.verbose:
                self.say(word, f"{case}: {len(of_case)} runs")
            else:
                for k in of_case:
                    self.say(word, f"{k} ({here[k]['verdict']})")
        return keys

    def of_run(self, key: str, a: Run, b: Run) -> None:
        same = a["verdict"] == b["verdict"]
        self.both += 1
        self.noisy += a.get("backend", "") not in REPEAT
        if not same:
            self.verdict(key, None, a, b)
        # a run without any tensor says by its verdict why they are gone
        told = not b["tensors"] and is_worse(a["verdict"], b["verdict"])
        now = tensors(b)
        for name, t in tensors(a).items():
            if name in now or not told:
                self.of_tensor(key, t, now.get(name), same)

    def of_tensor(self, key: str, a: Tensor, b: Tensor | None, same_verdict: bool) -> None:
        if is_judged(a) and (b is None or not is_judged(b)):
            self.tensor_lost(key, a, b)
        elif b and same_verdict and is_judged(a) and a["verdict"] != b["verdict"]:
            self.verdict(key, a["name"], a, b)
        if b:
            self.of_errors(key, a, b)

    def verdict(self, key: str, name: str | None, a: dict[str, Any], b: dict[str, Any]) -> None:
        old, new = a["verdict"], b["verdict"]
        worse = is_worse(old, new)
        self.worse += worse
        why = (b if worse else a).get("why") or ""
        x = {"id": key, "old": old, "new": new, "worse": worse, "why": why}
        (self.tensors if name else self.verdicts).append(x | ({"tensor": name} if name else {}))
        what = f"{key} {name}" if name else key
        self.say(
            "worse" if worse else "better", f"{what}: {old} -> {new}" + (f" ({why})" if why else "")
        )

    def tensor_lost(self, key: str, a: Tensor, b: Tensor | None) -> None:
        now, why = (b["verdict"], b.get("why") or "") if b else ("gone", "")
        x = {"id": key, "tensor": a["name"], "old": a["verdict"], "new": now}
        self.tensors.append(x | {"worse": True, "why": why})
        more = f": {why}" if why else ""
        self.say("gone", f"{key} {a['name']}: is not judged any more ({now}{more})")
        self.lost += 1

    def noise(self, key: str, name: str, old: list[float], rank: int) -> float:
        others = (tensors(runs.get(key)).get(name) for runs in self.again)
        found = [errors(t) for t in others if t]
        return max((abs(growth(old[rank], x[rank])) for x in found if rank < len(x)), default=0.0)

    def of_errors(self, key: str, a: Tensor, b: Tensor) -> None:
        """The share that moved most, an increase before a decrease."""
        old, new = errors(a), errors(b)
        best = None
        for i, x in enumerate(old):
            y = new[i] if i < len(new) else math.nan
            by, noise = growth(x, y), self.noise(key, a["name"], old, i)
            if abs(by) <= 2 * noise + 1e-12:
                continue
            if best and (by <= best.by if best.by > 0 else best.by <= by <= 0):
                continue
            best = Move(key, a["name"], i - 1 if i else None, x, y, by, noise)
        if best:
            self.moves.append(best)

    # ---- output

    def grown(self, m: Move) -> bool:
        return m.by > math.log(self.args.worse)

    def print_moves(self) -> None:
        self.moves.sort(key=lambda m: (-m.by, m.id, m.tensor))
        for i, m in enumerate(self.moves):
            if self.args.verbose or i < 10 or i >= len(self.moves) - 10:
                word = "worse" if self.grown(m) else "up" if m.by > 0 else "down"
                rank = f", rank {m.rank}" if m.rank is not None else ""
                noise = percent(m.noise).removeprefix("+") if m.noise else "0"
                self.say(
                    word,
                    f"{m.id} {m.tensor}{rank}: {m.old:.4g} -> {m.new:.4g}, {percent(m.by)} "
                    f"(noise {noise})",
                )
            elif i == 10:
                self.say("", f".. {len(self.moves) - 20} more, --verbose prints them")

    def digests(self) -> str:
        a, b = self.old.digest, self.new.digest
        if not a or not b:
            none = "NEW" if a else "OLD" if b else "neither record"
            print(f"digest: {none} has none", file=self.out)
            return "unknown"
        if a == b:
            what = f"the same, {a}: every bit of every result of simulated ranks"
        else:
            what = f"{a} and {b}: results of simulated ranks differ, or their runs do"
        print(f"digest: {what}", file=self.out)
        return "same" if a == b else "different"

    def summary(self, worse: bool, grew: bool) -> None:
        changed, up = len(self.verdicts) + len(self.tensors), sum(m.by > 0 for m in self.moves)
        listed = changed or self.moves or self.appeared or self.vanished or self.other
        print(
            f"{self.both} runs in both; verdicts: {changed} changed, {self.worse + self.lost} "
            f"for the worse; errors: {up} moved up, {sum(map(self.grown, self.moves))} by more "
            f"than {self.args.worse:g}, {len(self.moves) - up} down; runs and cases: "
            f"{len(self.appeared)} appeared, {len(self.vanished)} vanished",
            file=self.out,
        )
        n = len(self.again)
        if n:
            further = f"{n} further record{'s' if n > 1 else ''} of it"
            print(f"noise: measured between OLD and {further}", file=self.out)
        elif self.noisy:
            print(
                f"noise: unknown for {self.noisy} runs on devices or of libraries, taken as 0 "
                "(give --again RECORD)",
                file=self.out,
            )
        word = "NOT WORSE" if listed or self.old.digest != self.new.digest else "SAME"
        if worse:
            word = "GONE: what was judged is not judged any more, nothing else is worse"
        old, new = (r.program.get("commit", "") for r in (self.old, self.new))
        print(f"COMPARE: {'WORSE' if grew else word} ({old} -> {new})", file=self.out)

    def as_json(self, worse: bool, digest: str) -> dict[str, Any]:
        def moved(m: Move) -> Iterator[tuple[str, Any]]:
            yield from (("id", m.id), ("tensor", m.tensor), ("rank", m.rank))
            shown = {"old": m.old, "new": m.new, "ln_growth": m.by, "ln_noise": m.noise}
            yield from ((k, x if math.isfinite(x) else str(x)) for k, x in shown.items())
            yield "worse", self.grown(m)

        return {
            "schema": "deltaproof-comparison",
            "schema_version": 1,
            "old": self.old.program.get("commit", ""),
            "new": self.new.program.get("commit", ""),
            "worse": worse,
            "digest": digest,
            "moved": [dict(moved(m)) for m in self.moves],
            "verdicts": self.verdicts,
            "tensors": self.tensors,
            "appeared": self.appeared,
            "vanished": self.vanished,
        }

    def run(self) -> int:
        self.of_record()
        self.of_runs()
        for part in PARTS:
            self.of_part(*part)
        self.print_moves()
        grew = bool(self.worse or any(map(self.grown, self.moves)) or self.record_worse)
        worse = bool(grew or self.lost or self.gone)
        digest = self.digests()
        if self.both:
            self.summary(worse, grew)
        else:
            print("deltaproof: compare: the records have no run in common", file=sys.stderr)
        write(self.args.json, self.as_json(worse, digest))
        return 2 if not self.both else int(worse)


def write(path: str | None, comparison: dict[str, Any]) -> None:
    text = json.dumps(comparison, indent=1) + "\n"
    if path == "-":
        print(text, end="")
    elif path:
        files.write(path, text.encode())


def forget(words: list[str]) -> None:
    """An earlier comparison, or history, would stand for one that is refused."""
    p = argparse.ArgumentParser(add_help=False)
    p.add_argument("--json")
    p.add_argument("--history")
    path = (a := p.parse_known_args(words)[0]).json
    with contextlib.suppress(OSError, ValueError, TypeError):
        with open(path, encoding="utf-8") as f:
            own = '"deltaproof-comparison"' in f.read(64)
        if own:
            os.unlink(path)
    with contextlib.suppress(OSError):
        files.remove_page(a.history or "")


def load(path: str) -> Record:
    """A record of which each run names a tensor once."""
    path = os.path.join(path, many.NAME) if os.path.isdir(path) else path
    rec = record.load(path)
    for i, r in enumerate(rec.runs):
        if len(tensors(r)) < len(r["tensors"]):
            raise Malformed(f"{path}: runs[{i}].tensors: a name is there twice")
    return rec


def factor(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 1 <= float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text}: must be a factor from 1 on")


def arguments(words: list[str]) -> argparse.Namespace:
    """`deltaproof compare --help` describes them (harness/commands/cmd_compare.c)."""
    p = argparse.ArgumentParser(prog="deltaproof compare", add_help=False)
    p.add_argument("--again", action="append", default=[])
    p.add_argument("--worse", type=factor, default=1.25)
    p.add_argument("--json")
    p.add_argument("--history")
    p.add_argument("--verbose", "-v", action="store_true")
    p.add_argument("records", nargs="*")
    return p.parse_args(words)


def main(argv: list[str]) -> int:
    forget(argv[1:])
    a = arguments(argv[1:])
    gc.disable()  # a record is a tree of millions of objects, and this process is short
    if a.history:
        return history.main(["history.py", "--", a.history, *a.records])
    if len(a.records) != 2:
        print("deltaproof: compare: name two records, OLD and NEW", file=sys.stderr)
        return 2
    to_file = a.json and a.json != "-"
    try:
        if to_file and not os.access(os.path.dirname(os.path.abspath(a.json)), os.W_OK):
            raise Malformed(f"{a.json}: cannot be written")
        old, new, *again = map(load, [*a.records, *a.again])
        return Comparison(old, new, again, a).run()
    except Malformed as e:
        print(f"deltaproof: compare: {e}", file=sys.stderr)
    except OSError as e:
        print(f"deltaproof: compare: {e.filename}: {e.strerror}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    many.end(main)
