"""A recurrence of your own, by the rows of its token and the names of its inputs."""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .program import put
from .vocabulary import INPUTS, OF_ROWS

# Where inputs lie in a problem: keys and values in this order (ref/vocabulary/recurrence_text.h).
KEYS = ("k", *(n for n in OF_ROWS if INPUTS[n].endswith("K")))
VALUES = ("v", *(n for n in OF_ROWS if INPUTS[n].endswith("V")))
NUMBERS = ("beta", "number")
GRADIENTS = {"b": "derase", "w": "dwrite"}
ENTRIES = ("write", "read", "value", "strength")


@dataclass(frozen=True)
class Recurrence:
    """State S [K,V] of each value head; every token, o = scale S' query:

        S <- diag(exp gate) S;   for each row   S <- S + write' strength (value - read S)

    - query: [T,H,K]; with along_values [T,H,V], and o [T,HV,K] is scale S query'.
    - gate: [T,HV,K], or [T,HV] with per_head.
    - keys: 1 to 4 inputs [T,HV,K]; values: 1 to 4 inputs [T,HV,V].
    - number: one or two names of [T,HV], optional.
    - rows: 1 to 8 of {"write": PRODUCT, "read": .., "value": .., "strength": ..}. A missing
      strength is 1, any other missing entry 0.
    - A PRODUCT has up to three factors, "kk*a", with an optional "-" before the first. Factors of
      write and read are keys, numbers, exp(gate), exp(-gate). Factors of value are values, of
      strength numbers. "prev(k)" is the previous token's k, zeros at a sequence's first token.
    - undecayed: rows read the state before its decay.
    - in_turn: each row reads the state after the rows before it; undecayed is of the first one.
    - norm: the query or keys whose rows x are x / sqrt(sum x^2 + eps) first; eps: 1e-6. Before
      them "rms" (mean x^2) or "l1" (x / (sum |x| + eps)).
    - angle: [T,HV,P], P up to K / 2. The sum of angle i over the sequence so far rotates pair i of
      channels, in the query and in the keys named in `turned`. A last "halves" in `turned` makes
      them channels i and i + P. Such a key may occur in write alone,
      with numbers and a gate per head.

    In calls of a session a kernel takes previous_NAME. These are inputs of the token before the
    call, [N] in place of [T], of an angle the sum so far. The text form is in harness/README.md.

        rwkv7 = Recurrence("rwkv7", query="r", gate="w", keys=("k", "kk", "a"), values=("v",),
                           rows=({"write": "kk*a", "read": "kk"}, {"write": "k", "value": "v"}),
                           undecayed=True)
        judge(dict(r=r, w=w, k=k, kk=kk, a=a, v=v, do=do), dict(o=o, dkk=dkk, da=da),
              recurrence=rwkv7, base="bf16", gate="log")
    """

    name: str
    query: str
    gate: str
    keys: Sequence[str]
    values: Sequence[str]
    rows: Sequence[Mapping[str, str]]
    number: str | Sequence[str] | None = None
    per_head: bool = False
    undecayed: bool = False
    in_turn: bool = False
    angle: str | None = None
    turned: Sequence[str] = ()
    norm: Sequence[str] = ()
    eps: float | None = None
    along_values: bool = False

    @property
    def numbers(self) -> tuple[str, ...]:
        """Its numbers, each by name."""
        return (self.number,) if isinstance(self.number, str) else tuple(self.number or ())

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of all inputs that have a gradient."""
        more = (self.angle,) if self.angle else ()
        return (self.query, self.gate, *self.keys, *self.values, *self.numbers, *more)

    @property
    def looks_back(self) -> bool:
        """Does a token need more of those before it than their state?"""
        return bool(self.angle) or any("prev(" in x for row in self.rows for x in row.values())

    def text(self) -> str:
        """As `deltaproof judge --recurrence` reads it. ValueError: a row has another entry, or eps
        is of no norm."""
        eps = "" if self.eps is None else f" eps {float(self.eps)!r}"
        if eps and not self.norm:
            raise ValueError(f"eps={self.eps!r}: goes with norm")
        lines = [
            f"recurrence {self.name}",
            f"query {self.query}{' along values' if self.along_values else ''}",
            f"gate {self.gate} per {'head' if self.per_head else 'channel'}",
            f"keys {' '.join(self.keys)}",
            f"values {' '.join(self.values)}",
            *([f"number {' '.join(self.numbers)}"] if self.numbers else []),
            *([f"angle {self.angle} turns {' '.join(self.turned)}"] if self.angle else []),
            *([f"norm {' '.join(self.norm)}{eps}"] if self.norm else []),
            *(["reads undecayed"] if self.undecayed else []),
            *(["rows in turn"] if self.in_turn else []),
        ]
        for row in self.rows:
            for entry in row:
                if entry not in ENTRIES:
                    raise ValueError(f"rows: {entry!r} is none of {', '.join(ENTRIES)}")
            entries = (f"{x}={row[x].replace(' ', '')}" for x in ENTRIES if x in row)
            lines.append(" ".join(("row", *entries)))
        return "\n".join(lines) + "\n"

    def names(self) -> dict[str, str]:
        """{name in a problem: name here} of inputs and results."""
        return self._given() | self._made()

    def in_problem(self) -> dict[str, str]:
        """{name here: name in a problem} of results."""
        return {x: n for n, x in self._made().items()}

    def _made(self) -> dict[str, str]:
        made = {GRADIENTS.get(n, f"d{n}"): f"d{x}" for n, x in self._own().items()}
        along = {"o": f"d{self.query}", "dq": "o"}  # ref/vocabulary/recurrence.h
        return made | (along if self.along_values else {})

    def _given(self) -> dict[str, str]:
        own = self._own()
        before = {f"previous_{n}": f"previous_{x}" for n, x in own.items()}
        along = {"do": self.query, "q": "do"}
        return own | before | (along if self.along_values else {})

    def _own(self) -> dict[str, str]:
        own = {"q": self.query, "g": self.gate}
        own |= dict(zip(KEYS, self.keys, strict=False))
        own |= dict(zip(VALUES, self.values, strict=False))
        own |= dict(zip(NUMBERS, self.numbers, strict=False))
        return own | ({"angle": self.angle} if self.angle else {})

    def wrapped(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """fn, whose parameters and results have names here, under those of a problem."""
        own, results = self._given(), self.in_problem()
        back = {x: n for n, x in own.items()}

        def under_names_of_a_problem(**given: Any) -> Any:
            made = fn(**{own.get(n, n): x for n, x in given.items()})
            named = isinstance(made, dict)
            return {results.get(n, n): x for n, x in made.items()} if named else made

        given = inspect.signature(fn).parameters.values()
        parameters = [
            x
            if x.kind is inspect.Parameter.VAR_KEYWORD
            else x.replace(name=back.get(x.name, x.name), kind=inspect.Parameter.KEYWORD_ONLY)
            for x in given
        ]
        under_names_of_a_problem.__name__ = getattr(fn, "__name__", "kernel")
        under_names_of_a_problem.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            parameters
        )
        under_names_of_a_problem.recurrence = self  # type: ignore[attr-defined]
        return under_names_of_a_problem

    def file(self, folder: str) -> str:
        """The path of its text below the folder, named after it."""
        text = self.text()
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        return put(os.path.join(folder, f"{digest}.recurrence"), text)
