"""Reads a truth pack of deltaproof, version 1 (NAME.pack), and checks results against it. Copy me:
numpy alone. `check(read("case.pack"), "o", result)` returns what is broken, [] if nothing is."""

import numpy as np


def read(path):
    """{name: array of doubles}."""
    with open(path, "rb") as f:
        data = f.read()
    if data[:8] != b"DPPACK01":
        raise ValueError(f"{path}: no truth pack of version 1")
    out = {}
    for i in range(int.from_bytes(data[8:16], "little")):
        entry = data[16 + 104 * i : 16 + 104 * (i + 1)]
        name = entry[:48].rstrip(b"\0").decode()
        axes, *dims, offset = (int(x) for x in np.frombuffer(entry[48:], "<u8"))
        n = int(np.prod(dims[:axes], dtype=np.int64))
        out[name] = np.frombuffer(data, "<f8", n, offset).reshape(dims[:axes])
    return out


def check(pack, name, result):
    """["LEVEL at INDEX: TIMES times its limit", ..] of one tensor."""
    want = pack[f"truth.{name}"]
    got = np.asarray(result, np.float64)
    if got.size != want.size:
        return [f"{name} has {got.size} numbers, must have {want.size}"]
    with np.errstate(all="ignore"):
        err = (got.reshape(want.shape) - want) - pack[f"truth.{name}.lo"]
        return [x for level, e2, most in _levels(pack, name, err) for x in _over(level, e2, most)]


def _levels(pack, name, err):
    """(level, squared errors of its units, their limits)."""

    def limit(n):
        return pack.get(f"limit.{name}.{n}", np.zeros(0))

    def squares(n):
        return (err.reshape(n, -1) ** 2).sum(axis=1) if n else np.zeros(0)

    bound, row, window, unit = (limit(n) for n in ("bound", "row", "window", "unit"))
    parts = squares(len(row))
    looked = np.where(window >= 0, parts, 0)
    yield "bound", squares(len(bound)), bound
    yield "row", parts, row
    for level, of in (("window", window), ("unit", unit)):
        most = limit(f"{level}_most")
        sums = np.zeros(len(most))
        np.add.at(sums, of[of >= 0].astype(int), parts[of >= 0])
        yield level, sums, most
    yield "tensor", looked.sum(keepdims=True)[: len(limit("tensor_most"))], limit("tensor_most")


def _over(level, e2, most):
    bad = np.flatnonzero(~(np.sqrt(e2) <= most))
    if len(bad):
        worst = bad[np.argmax(np.nan_to_num(e2[bad] / most[bad] ** 2, nan=np.inf))]
        yield f"{level} {worst}: {np.sqrt(e2[worst]) / most[worst]:.3g} times its limit"
