"""A folder of captured calls, judged: `deltaproof judge DIR`, and two folders beside each other:
`deltaproof differ DIR DIR`."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from safetensors import safe_open

from .capturing import fewer_heads
from .fresh import share, with_batch
from .judging import Judgement, judge
from .records import FAIL, NOT_JUDGED, PASS
from .tensors import load, save

END = ".capture"
OUTLIER = 3.0  # times the median of all layers
SETTINGS = ("gate", "beta", "state_layout")


@dataclass(frozen=True)
class Captured:
    name: str
    inputs: dict[str, Any]
    outputs: dict[str, Any]
    told: dict[str, str]


def read(path: str) -> Captured:
    """ValueError: it is no capture."""
    try:
        with safe_open(path, "numpy") as f:
            told = f.metadata() or {}
        arrays = load(path)
    except Exception as e:
        raise ValueError(f"{path}: no capture: {e}") from e
    parts: dict[str, dict[str, Any]] = {"in": {}, "out": {}}
    for n, x in arrays.items():
        side, _, name = n.partition(".")
        if side not in parts or not name:
            raise ValueError(f"{path}: {n}: a capture has in.NAME and out.NAME alone")
        parts[side][name] = x
    if not {"q", "k", "v"} <= set(parts["in"]) or not parts["out"]:
        raise ValueError(f"{path}: lacks q, k, v or results")
    return Captured(os.path.basename(path)[: -len(END)], parts["in"], parts["out"], told)


def folder(path: str) -> list[Captured]:
    names = sorted(n for n in os.listdir(path) if n.endswith(END))
    if not names:
        raise ValueError(f"{path}: no file *{END}")
    return [read(os.path.join(path, n)) for n in names]


def judged(x: Captured, base: str | None, **more: Any) -> Judgement:
    """base: None: by the format of q."""
    base = base or {"bfloat16": "bf16", "float16": "fp16"}.get(x.inputs["q"].dtype.name, "fp32")
    told: dict[str, Any] = {n: x.told[n] for n in SETTINGS if n in x.told}
    told["l2norm"] = x.told.get("l2norm") == "1"
    told |= {n: float(x.told[n]) for n in ("scale", "lower_bound") if n in x.told}
    inputs = dict(x.inputs)
    cu = inputs.pop("cu_seqlens", None)
    inputs, outputs = _flat(inputs), _flat(x.outputs)
    rows = len(x.inputs["q"])
    if rows > 1 and cu is None:
        cu = np.arange(rows + 1) * x.inputs["q"].shape[1]
    if len(inputs["q"]) == 1:
        inputs, outputs = with_batch(inputs), with_batch(outputs)
    seqlens = None if cu is None else [int(n) for n in cu]
    return judge(inputs, outputs, base=base, cu_seqlens=seqlens, **told, **more)


def _flat(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Rows of a batch behind each other."""
    whole = ("A_log", "dt_bias", "initial_state", "final_state")
    return {n: x if n in whole else x.reshape(-1, *x.shape[2:]) for n, x in arrays.items()}


def worst(found: Judgement) -> float:
    return max((share(t) for t in found.tensors.values()), default=float("nan"))


def smaller(x: Captured, found: Judgement, base: str | None) -> Captured | None:
    """The failing head up to the failing token alone, if that fails, too."""
    at = [t["failed"] for t in found.tensors.values() if t["verdict"] == "fail" and t.get("failed")]
    if not at or len(x.inputs["q"]) > 1 or "cu_seqlens" in x.inputs:
        return None
    group = x.inputs["v"].shape[2] // x.inputs["k"].shape[2]
    head, token = max(at[0].get("head", 0), 0) // group, max(at[0].get("token", 0), 0)
    inputs, outputs = fewer_heads(x.inputs, {"o": x.outputs["o"]}, 0, [head])
    last = min(token + 1, inputs["q"].shape[1])
    cut = {n: y[:, :last] for n, y in inputs.items() if n in ("q", "k", "v", "g", "beta")}
    own = Captured(f"{x.name}.small", {**inputs, **cut}, {"o": outputs["o"][:, :last]}, x.told)
    return own if judged(own, base).status == FAIL else None


def _keep(x: Captured, path: str) -> str:
    named = {f"in.{n}": np.ascontiguousarray(y) for n, y in x.inputs.items()}
    named |= {f"out.{n}": np.ascontiguousarray(y) for n, y in x.outputs.items()}
    file = os.path.join(path, f"{x.name}.safetensors")
    save(file, named, x.told)
    return file


def _layers(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines: layers, and ranks where there are several, from the worst on, and which lie far from
    the others."""
    several = len({r["rank"] for r in rows}) > 1
    return [x for key in ("layer", "rank")[: 1 + several] for x in _worst_first(rows, key)]


def _worst_first(rows: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    by: dict[str, float] = {}
    for r in rows:
        if r["share"] == r["share"]:
            by[r[key]] = max(by.get(r[key], 0), r["share"])
    usual, word = median(by.values()) if by else 0, "rank " if key == "rank" else ""
    out = []
    for name in sorted(by, key=lambda n: -by[n]):
        far = by[name] > OUTLIER * usual and len(by) > 2
        out.append(f"{word}{name}: {by[name]:.3g} of its limit{'  outlier' if far else ''}")
    return out


def judge_folder(path: str, base: str | None = None) -> tuple[int, list[dict[str, Any]], list[str]]:
    """(status, a row a call, lines)."""
    rows: list[dict[str, Any]] = []
    lines = []
    for x in folder(path):
        found = judged(x, base)
        row: dict[str, Any] = {
            "name": x.name, "layer": x.told.get("layer", "none"), "status": found.status,
            "rank": x.told.get("rank", "0"), "share": worst(found),
        }  # fmt: skip
        word = ("pass", "fail", "unjudged")[found.status]
        why = "; ".join(found.failures()) or f"{row['share']:.3g} of its limit"
        if found.status == NOT_JUDGED:
            why = found.text.strip().splitlines()[0] if found.text.strip() else "not judged"
        lines.append(f"{word:<8} {x.name}  {why}")
        small = smaller(x, found, base) if found.status == FAIL else None
        if small:
            row["small"] = _keep(small, path)
            lines.append(f"small:   {row['small']}, {os.path.getsize(row['small']) / 1e3:.0f} kB")
        rows.append(row)
    statuses = {r["status"] for r in rows}
    status = FAIL if FAIL in statuses else NOT_JUDGED if NOT_JUDGED in statuses else PASS
    lines += _layers(rows)
    n = [sum(r["status"] == s for r in rows) for s in (PASS, FAIL, NOT_JUDGED)]
    word = ("PASS", "FAIL", "COULD NOT JUDGE")[status]
    lines.append(f"VERDICT: {word} ({n[0]} passed, {n[1]} failed, {n[2]} unjudged)")
    return status, rows, lines


def differ_folders(a: str, b: str, base: str | None = None) -> tuple[int, list[str]]:
    """Calls of the same layer and number: the same bits, both within their limits, or whose not."""
    sides = [{_same(x): x for x in folder(p)} for p in (a, b)]
    keys = sorted(set(sides[0]) & set(sides[1]))
    if not keys or any(_tokens(sides[0][k]) != _tokens(sides[1][k]) for k in keys):
        return _differ_sequences((a, b), [list(s.values()) for s in sides], base)
    status, lines = PASS, []
    for key in keys:
        x, y = (s[key] for s in sides)
        same_in = _equal(x.inputs, y.inputs)
        if same_in and _equal(x.outputs, y.outputs):
            lines.append(f"same bits  {key}")
            continue
        found = [judged(z, base).status for z in (x, y)]
        whose = [p for p, s in zip((a, b), found, strict=True) if s != PASS]
        status = max(status, FAIL if FAIL in found else status)
        said = f"beyond its limits in {', '.join(whose)}" if whose else "both within their limits"
        lines.append(f"{'' if same_in else 'other inputs, '}{said}  {key}")
    left = len(sides[0]) + len(sides[1]) - 2 * len(keys)
    return status, [*lines, f"{len(keys)} calls compared, {left} of one side alone"]


def _tokens(x: Captured) -> int:
    return int(x.inputs["q"].shape[1])


def _sequences(calls: Sequence[Captured]) -> dict[str, list[Captured]]:
    """Calls of a layer and rank one after the other: first those that have no state yet."""
    out: dict[str, list[Captured]] = {}
    for x in sorted(calls, key=lambda x: ("initial_state" in x.inputs, int(x.told.get("call", 0)))):
        out.setdefault(f"{x.told.get('layer', '')}-rank{x.told.get('rank', '0')}", []).append(x)
    return out


def _apart(x: Sequence[np.ndarray], y: Sequence[np.ndarray]) -> float:
    """By how much two sides' arrays of tokens differ, relative, over the tokens that both have."""
    a, b = (np.concatenate([z.astype(np.float64) for z in s], 1) for s in (x, y))
    n = min(a.shape[1], b.shape[1])
    return float(np.linalg.norm(a[:, :n] - b[:, :n]) / (np.linalg.norm(b[:, :n]) or 1))


def _differ_sequences(
    folders: Sequence[str], sides: Sequence[Sequence[Captured]], base: str | None
) -> tuple[int, list[str]]:
    """A sequence in calls that are cut elsewhere, as a trainer and a rollout have it. Every call is
    judged by itself, and the layers' inputs and outputs are compared by token."""
    one, two = (_sequences(s) for s in sides)
    keys = sorted(set(one) & set(two))
    if not keys:
        raise ValueError(f"{folders[0]}, {folders[1]}: no calls of the same layer and rank")
    status, lines = PASS, []
    for key in keys:
        found = [{judged(x, base).status for x in s[key]} for s in (one, two)]
        whose = [p for p, s in zip(folders, found, strict=True) if s != {PASS}]
        status = max(status, *(FAIL if FAIL in s else PASS for s in found))
        off = max(_apart(*([x.inputs[n] for x in s[key]] for s in (one, two))) for n in "qkv")
        o = _apart(*([x.outputs["o"] for x in s[key]] for s in (one, two)))
        said = f"beyond its limits in {', '.join(whose)}" if whose else "both within their limits"
        lines.append(f"{said}, inputs differ by {off:.1e}, o by {o:.1e}  {key}")
    return status, [*lines, f"{len(keys)} sequences compared, call by call"]


def _same(x: Captured) -> str:
    named = (x.told.get(n, "") for n in ("function", "layer", "rank", "call"))
    return re.sub(r"-+", "-", "-".join(named))


def _equal(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    same = (x.shape == b[n].shape and x.tobytes() == b[n].tobytes() for n, x in a.items() if n in b)
    return set(a) == set(b) and all(same)


def main(command: str, arguments: Sequence[str]) -> int:
    ap = argparse.ArgumentParser(f"deltaproof {command}", description=__doc__)
    ap.add_argument("folders", nargs=1 if command == "judge" else 2, metavar="DIR")
    ap.add_argument("--base", help="formats that the functions claim (default: as q's)")
    if command == "judge":
        ap.add_argument("--json", metavar="FILE", help="a row a call")
    a = ap.parse_args(arguments)
    try:
        if command == "differ":
            status, lines = differ_folders(a.folders[0], a.folders[1], a.base)
        else:
            status, rows, lines = judge_folder(a.folders[0], a.base)
            if a.json:
                with open(a.json, "w", encoding="utf-8") as f:
                    json.dump(rows, f, indent=1)
    except (ValueError, OSError) as e:
        print(f"deltaproof {command}: {e}", file=sys.stderr)
        return NOT_JUDGED
    print("\n".join(lines))
    return status
