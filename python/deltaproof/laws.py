"""Laws of random problems: which keys a case has, and from which values each is drawn. They are
read and drawn with Python's own modules alone: scripts/soak does so, too.

A law is a file NAME.law with a line a key, in the order in which they are drawn; `#` begins a
comment:

    KEY = VALUE              that value
    KEY: A | B | C           one of them
    .. 1..300                as a value: a whole number, both ends among them
    .. H * 4                 a multiple of what an earlier line says
    .. cut 3                 of T: 0, three places inside of it, T
    .. if OTHER in a b       where an earlier line says a or b; `not in`: where it says neither
    .. with 0.4              in so many of all draws; it stands last
    include NAME             the lines of that file, of the same folder

If several lines define one key, the first that holds counts. A key that begins with _ is no key of
a case; lines below may ask for it. A file whose name begins so is no law of its own.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "laws")
LINE = re.compile(
    r"(?P<key>\w+)\s*(?P<kind>[=:])\s*(?P<value>.*?)"
    r"(?:\s+if\s+(?P<other>\w+)\s+(?P<no>not\s+)?in\s+(?P<words>[^|]*?))?"
    r"(?:\s+with\s+(?P<chance>[0-9.]+))?"
)
RANGE, CUT = re.compile(r"(\d+)\.\.(\d+)"), re.compile(r"cut (\d+)")
TIMES = re.compile(r"(\w+) \* (\d+)")


@dataclass(frozen=True)
class Line:
    key: str
    values: tuple[str, ...]
    drawn: bool
    where: str  # file and line, for messages
    other: str = ""
    words: tuple[str, ...] = ()
    unless: bool = False
    chance: float | None = None

    def holds(self, keys: Mapping[str, str]) -> bool:
        return not self.other or (keys.get(self.other) in self.words) != self.unless


@dataclass(frozen=True)
class Law:
    name: str
    lines: tuple[Line, ...]

    def draw(self, rng: random.Random, given: Mapping[str, object] | None = None) -> dict[str, str]:
        """The keys of a case. Keys with a value are not drawn."""
        keys = {k: str(x) for k, x in (given or {}).items()}
        done = set(keys)
        for line in self.lines:
            if line.key in done or not line.holds(keys):
                continue
            done.add(line.key)
            if line.chance is None or rng.random() < line.chance:
                try:
                    keys[line.key] = _value(line, keys, rng)
                except KeyError as e:
                    lacks = f"{line.where}: {line.key}: no earlier line says {e.args[0]}"
                    raise ValueError(lacks) from e
                except ValueError as e:
                    raise ValueError(f"{line.where}: {line.key}: {e}") from e
        return keys


def _value(line: Line, keys: Mapping[str, str], rng: random.Random) -> str:
    word = rng.choice(line.values) if line.drawn else line.values[0]
    if m := RANGE.fullmatch(word):
        return str(rng.randint(int(m[1]), int(m[2])))
    if m := CUT.fullmatch(word):
        T = int(keys["T"])
        places = sorted(rng.sample(range(1, T), min(int(m[1]), T - 1)))
        return ",".join(map(str, [0, *places, T]))
    if not (m := TIMES.fullmatch(word)):
        return word
    return str(int(keys[m[1]]) * int(m[2]))


def parse(text: str, name: str, above: tuple[str, ...] = ()) -> Law:
    """above: files that include this one. ValueError: file and line of what is no such line."""
    lines: list[Line] = []
    for i, raw in enumerate(text.splitlines(), 1):
        said, where = raw.split("#")[0].strip(), f"{name}:{i}"
        if said.startswith("include "):
            lines += read(said.split()[1], os.path.dirname(name), (*above, name)).lines
            continue
        m = LINE.fullmatch(said)
        if said and (not m or not m["value"]):
            raise ValueError(f"{where}: {said!r}: must be KEY = VALUE or KEY: VALUES")
        if m:
            drawn = m["kind"] == ":"
            values = tuple(x.strip() for x in m["value"].split("|")) if drawn else (m["value"],)
            chance = _chance(m["chance"], where) if m["chance"] else None
            words = tuple((m["words"] or "").split())
            more = (m["other"] or "", words, bool(m["no"]), chance)
            lines.append(Line(m["key"], values, drawn, where, *more))
    return Law(os.path.basename(name).removesuffix(".law"), tuple(lines))


def _chance(text: str, where: str) -> float:
    if not re.fullmatch(r"0|1|1?\.0*|0?\.\d+", text):
        raise ValueError(f"{where}: with {text}: must be from 0 to 1")
    return float(text)


def read(name: str, folder: str = FOLDER, above: tuple[str, ...] = ()) -> Law:
    """A law of that folder by its name, or a file. ValueError: what there is."""
    path = name if os.path.isfile(name) else os.path.join(folder, f"{name}.law")
    if not os.path.isfile(path):
        there = " ".join(names(folder))
        raise ValueError(f"law {name}: no such file, and in {folder} are {there}")
    if path in above:
        raise ValueError(f"{path}: includes itself")
    try:
        with open(path, encoding="utf-8") as f:
            return parse(f.read(), path, above)
    except UnicodeDecodeError as e:
        raise ValueError(f"{path}: is no UTF-8") from e


def names(folder: str = FOLDER) -> list[str]:
    return sorted(x[:-4] for x in os.listdir(folder) if x.endswith(".law") and x[0] != "_")


def read_all(asked: str | Sequence[str]) -> list[Law]:
    """Laws by name, by file, and all of a folder."""
    out = []
    for x in [asked] if isinstance(asked, str) else asked:
        out += [read(n, x) for n in names(x)] if os.path.isdir(x) else [read(x)]
    if not out:
        raise ValueError(f"laws={asked!r}: no law")
    return out


def case_text(keys: Mapping[str, str]) -> str:
    return "".join(f"{k} = {x}\n" for k, x in keys.items() if not k.startswith("_"))
