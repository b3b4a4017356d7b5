#!/usr/bin/env python3
"""chain.py IN OUT: error of M and of merged states over chunks and ranks, by who computed them.

With OUT .json, IN is a folder of records; their errors are kept. They are CASE.sim.json and
CASE.cuda.json of `deltaproof run`, CASE.fla8.json of `deltaproof judge --ranks 8`, CASE.chain2.json
of a chain of M. With OUT .png, .svg or .pdf, IN is the .json. Columns are cases. Upper row:
relative error of M after so many chunks; lower row: of the state that enters each of 8 ranks. Exit
status 0, or 2 when a file cannot be read.
"""

import json
import os
import re
import sys
from typing import Any

# Where this program's own modules are: -I leaves that out.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from matplotlib.figure import Figure

from draw.style import plt
from read.checks import Malformed
from read.record import load

RANKS = 8  # of the lower row
NAMES = {"fla": "FLA 0.6", "chain": "FLA, of its own w and kg"}
COLOURS = {"FLA": "#d55e00", "cuda": "#0072b2", "sim": "#666666"}


def errors_of(run: dict[str, Any], tensor: str) -> tuple[float | None, list[Any]]:
    """Errors of all ranks, and of each; None: the run has no such tensor."""
    for t in run["tensors"]:
        if t["name"] == tensor:
            return t["rel_fro"], t.get("per_rank") or []
    return None, []


def series_of(kind: str, run: dict[str, Any]) -> str:
    """The name of the line that a run belongs to."""
    chain = run["policy"].get("chain", "")
    return NAMES.get(kind) or f"{kind} {chain}"


def read_folder(folder: str, tokens: int = 2048, chunk: int = 64) -> dict[str, Any]:
    """{case: {"M": {series: {chunks: error}}, "S_in": {series: errors by rank}}}"""
    found: dict[str, Any] = {}
    for name in sorted(os.listdir(folder)):
        m = re.fullmatch(r"(.+)\.(sim|cuda|fla|chain)(\d*)\.json", name)
        if not m:
            continue
        case, kind, _ = m.groups()
        of = found.setdefault(case, {"M": {}, "S_in": {}})
        for run in load(os.path.join(folder, name)).runs:
            series = series_of(kind, run)
            if kind == "chain":
                points = {p["chunks"]: p["rel"] for p in run["chain"] if p["rel"] > 0}
                of["M"][series] = of["M"].get(series, {}) | points
                continue
            M, _ = errors_of(run, "M")
            _, states = errors_of(run, "S_in")
            if M is not None:
                of["M"].setdefault(series, {})[tokens // chunk // run["ranks"]] = M
            if run["ranks"] == RANKS and states:
                of["S_in"][series] = states
    return found


def look_of(series: str) -> dict[str, str]:
    colour = COLOURS[series.split()[0].rstrip(",")]
    dash = {"fp32": "-", "tf32x3": "-", "tf32": "--", "tf32rz": "-.", "bf16": ":"}
    return {"color": colour, "linestyle": dash.get(series.split()[-1], "-"), "marker": "."}


def figure(found: dict[str, Any]) -> Figure:
    fig, axes = plt.subplots(
        2, len(found), figsize=(11, 5.6), sharey="row", squeeze=False, layout="constrained"
    )
    for column, (case, of) in enumerate(found.items()):
        upper, lower = axes[0][column], axes[1][column]
        for series, points in of["M"].items():
            at = sorted((int(n), x) for n, x in points.items())
            upper.plot(*zip(*at, strict=True), label=series, **look_of(series))
        for series, states in of["S_in"].items():
            at = [(r, x) for r, x in enumerate(states) if x]
            lower.plot(*zip(*at, strict=True), label=series, **look_of(series))
        upper.set(title=case, xlabel="chunks of 64 tokens in M", yscale="log")
        upper.set_xscale("log", base=2)
        upper.set_xticks([2, 4, 8, 16], ["2", "4", "8", "16"])
        lower.set(xlabel=f"rank of {RANKS}", yscale="log")
        for ax in (upper, lower):
            ax.yaxis.set_major_formatter(lambda y, _: f"{y:.0e}")
            ax.yaxis.set_minor_formatter(lambda y, _: "")
    axes[0][0].set_ylabel("relative error of M")
    axes[1][0].set_ylabel("relative error of S_in")
    handles = {}
    for ax in axes[0]:
        handles |= dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    fig.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5)
    return fig


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        if sys.argv[2].endswith(".json"):
            found = read_folder(sys.argv[1])
            if not found:
                raise Malformed(f"{sys.argv[1]}: no record of a chain")
            with open(sys.argv[2], "w", encoding="utf-8") as f:
                json.dump(found, f, indent=1, sort_keys=True)
                f.write("\n")
        else:
            with open(sys.argv[1], encoding="utf-8") as f:
                figure(json.load(f)).savefig(sys.argv[2], dpi=110)
    except (OSError, ValueError, Malformed) as e:
        print(f"chain.py: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
