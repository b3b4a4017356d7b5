#!/usr/bin/env python3
"""Judge what outputs.py wrote, and write reports/field.md and reports/field.json. Runs anywhere
with the deltaproof program.

    python3 judge.py DIR --program build/deltaproof --reports FOLDER [--jobs N] [--notes FILE]

Existing files DIR/judged/KERNEL.CASE.json are not judged again. The page quotes --notes, JSON
{kernel: text}, below the table (default: notes.json beside this). With --only-times nothing is
judged: the verdicts of FOLDER/field.json stay, and DIR/speed.json replaces its times.

Kernels of FOLDER/field.json that DIR has no results of keep their rows.
"""

import argparse
import collections
import concurrent.futures
import datetime
import json
import math
import os
import pathlib
import re
import statistics
import struct
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import tables
from claims import KERNELS

GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias", "ds0")


def tokens_of(path):
    """Axis 0 of the query: a file with one token of two heads reads like two tokens of one, so
    `judge` is told."""
    data = path.read_bytes()
    head = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    return head["r" if "r" in head else "q"]["shape"][0]


def judge(args, kernel, op, case):
    given = args.folder / "in" / f"{case}.safetensors"
    out = args.folder / "judged" / f"{kernel}.{case}.json"
    if not out.is_file():
        out.parent.mkdir(exist_ok=True)
        subprocess.run(
            [
                args.program,
                "judge",
                "--inputs",
                str(given),
                "--tokens",
                str(tokens_of(given)),
                "--recurrence",
                op,
                "--outputs",
                str(args.folder / "out" / kernel / f"{case}.safetensors"),
                "--cache",
                str(args.folder / "cache"),
                "--why",
                "0",
                "--json",
                str(out),
            ],
            capture_output=True,
            text=True,
        )
    runs = json.loads(out.read_text())["runs"] if out.is_file() else []
    return (
        {
            "case": case,
            "verdict": runs[0]["verdict"],
            "tensors": [of_tensor(t) for t in runs[0]["tensors"]],
        }
        if runs
        else {"case": case, "verdict": "not judged", "tensors": []}
    )


def of_tensor(t):
    expected = (t.get("expected") or {}).get("rel")
    expected = expected if isinstance(expected, float) else None  # "inf": a draw is not finite
    x = {
        "name": t["name"],
        "error": t["rel_fro"],
        "over_expected": t["rel_fro"] / expected if expected else None,
        "of_bound": t.get("ratio"),
        "verdict": t.get("verdict"),
    }
    if t.get("verdict") == "fail":
        x |= {
            "row": {
                k: t["failed"][k]
                for k in ("sequence", "token", "head", "index")
                if k in (t.get("failed") or {})
            },
            "why": t.get("why", ""),
        }
    return x


def of_ours(folder):
    """Our kernels' records, judged where they ran: {case: judgement}."""
    got = {}
    for path in sorted(folder.glob("ours-*.json")):
        for r in json.loads(path.read_text())["runs"]:
            if r["verdict"] in ("pass", "fail", "unjudged"):
                got[r["case"]] = {
                    "case": r["case"],
                    "verdict": r["verdict"],
                    "tensors": [of_tensor(t) for t in r["tensors"]],
                }
    return got


def numbers(judged, names):
    """Median error, effective bits and error over expected of these tensors over the cases that
    passed."""
    t = [
        x
        for j in judged
        if j["verdict"] == "pass"
        for x in j["tensors"]
        if x["name"] in names and x["error"]
    ]
    if not t:
        return "-"
    error, over = (
        statistics.median(x["error"] for x in t),
        [x["over_expected"] for x in t if x["over_expected"]],
    )
    return (
        f"{-math.log2(error):.1f} / {statistics.median(over):.2f}"
        if over
        else f"{-math.log2(error):.1f} / -"
    )


def reasons(cases):
    count = collections.Counter(
        why.split(" (")[0][:110] for status, why in cases.values() if status != "served"
    )
    return "; ".join(f"{why} ({n})" for why, n in count.most_common(6)) or "-"


# kernels of claims.py -> whose times: kernel of timed.py, recurrence, rows given, parts
TIMES = {
    "fla-chunk-kda": ("fla", "kda", False, ("forward", "backward")),
    "fla-chunk-gdn-forward": ("fla", "gdn", False, ("forward",)),
    "fla-chunk-gdn": ("fla", "gdn", False, ("forward", "backward")),
    "flashqla-gdn-forward": ("flashqla", "gdn", False, ("forward",)),
    "flashinfer-gdn-forward": ("flashinfer", "gdn", False, ("forward",)),
    "flashinfer-cp-gdn-forward": ("flashinfer-cp", "gdn", False, ("forward",)),
    "jla-kda": ("jax-linear-attention", "kda", False, ("forward", "backward")),
    "jla-gdn": ("jax-linear-attention", "gdn", False, ("forward", "backward")),
    "cudnn-hopper-forward": ("cudnn-hopper", "kda", False, ("forward",)),
    "cudnn-hopper-dsl-forward": ("cudnn-hopper-dsl", "kda", False, ("forward",)),
    "cudnn-hopper-backward": ("cudnn-hopper", "kda", True, ("forward", "backward")),
    "flashkda-forward": ("flashkda", "kda", False, ("forward",)),
    "deltaproof-kda": ("deltaproof", "kda", False, ("forward", "backward")),
}
NO_TIMES = {"8192": "- / -", "131072": "- / -"}


def speed_of(speed, kernel):
    """Cells of the two standard shapes."""
    return tables.standard(speed.get("rows", []), *TIMES[kernel]) if kernel in TIMES else NO_TIMES


def times_of(speed):
    """The table of times, and the contract of each kernel."""
    rows = [r for r in speed.get("rows", []) if "times" in r]
    if not rows:
        return []
    return [
        "## Times, row by row",
        "",
        "Medians of CUDA graphs, the fastest in bold; a time with * is by events with the queue "
        "filled ahead. Each kernel has processes of its own and nothing compiles meanwhile.",
        "",
        *tables.page_rows(rows),
        "",
        *tables.contracts(rows),
        "",
    ]


def page(table, speed, notes, left_out):
    lines = [
        "# The field, judged",
        "",
        f"{speed.get('date', '')}, {speed.get('device', '')}, driver {speed.get('driver', '')}, "
        f"PyTorch {speed.get('torch', '')}. {speed.get('where', 'One run')}. Public kernels and "
        "ours on every case of cases/ and scripts/campaigns/peers/field/cases that they serve, one "
        "rank, judged by the same program. A case is failed where a tensor exceeds its derived "
        "bound or what right kernels of the declared design make of nearby inputs "
        "(reports/verdicts.md). Bits and error over expected: medians over the "
        "cases passed. Times: medians of 20, K = V = 128, bf16. Brackets: multiples of the "
        "floor, which reads every input and writes every output once at the speed of a copy "
        f"({speed.get('copy_bytes_per_s', 0) / 1e12:.2f} TB/s). Inputs of each kernel: "
        "scripts/campaigns/peers/field/rows.py.",
        "",
        "    scripts/campaigns/peers/run_field.sh --out build/field && "
        "scripts/campaigns/peers/run_field.sh --judge build/field",
        "",
        "| kernel | version | judged | declared | served | passed | failed | not judged | o: bits "
        "/ error over expected | gradients | T 8,192 HV 64: forward / backward ms "
        "| T 131,072 HV 8 |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for k in table:
        s = k["speed"]
        lines.append(
            f"| {k['kernel']} | {k['version']} | {k['date']} | {k['declared']} | {k['served']} "
            f"| {k['passed']} "
            f"| {len(k['failed'])} | {k['served'] - k['passed'] - len(k['failed'])} | "
            f"{numbers(k['judged'], ('o',))} | {numbers(k['judged'], GRADIENTS)} | {s['8192']} | "
            f"{s['131072']} |"
        )
    reasons = collections.Counter(left_out.values()).most_common()
    lines += [
        "",
        f"Cases that no public kernel was asked: {len(left_out)}.",
        "",
        *(f"- {why}: {n}" for why, n in reasons),
        "",
        *times_of(speed),
    ]
    for k in table:
        lines += [f"## {k['kernel']}", "", "Not served:", ""]
        lines += [*(f"- {why}" for why in k["reasons"].split("; ")), ""]
        if k["kernel"] in notes:
            lines += [notes[k["kernel"]], ""]
        for j in k["failed"]:
            for t in j["tensors"]:
                if t["verdict"] == "fail":
                    row = ", ".join(f"{a} {b}" for a, b in t["row"].items())
                    lines.append(
                        f"- `{j['case']}`: {t['name']}, relative error {t['error']:.2e} ({row}). "
                        f"{t['why'][:1].upper()}{t['why'][1:]}."
                    )
            lines += [
                f"  `build/deltaproof inputs {j['case']} -c FOLDER -o in.safetensors; "
                "build/deltaproof judge --inputs in.safetensors --outputs "
                f"out/{k['kernel']}/{j['case']}.safetensors`"
            ]
            lines += [x for x in [shrunk(k["kernel"], j["case"])] if x]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def shrunk(kernel, case):
    """The size and path of the case that `shrink` found for the kernel (shrink.py)."""
    path = HERE / "shrunk" / f"{kernel}.{case}.case"
    if not path.is_file():
        return ""
    left = re.search(r"\((\d+) of its (\d+) numbers\)", path.read_text())
    return (
        f"  Shrunk on the kernel to {int(left[1]):,} of {int(left[2]):,} numbers: "
        f"`{path.relative_to(HERE.parents[3])}`, {path.stat().st_size:,} bytes."
    )


def row_of(args, pool, kernel, speed):
    info = json.loads((args.folder / "out" / f"{kernel.name}.json").read_text())
    served = [c for c, (status, _) in info["cases"].items() if status == "served"]
    judged = list(pool.map(lambda c: judge(args, kernel.name, kernel.op, c), served))
    return {
        "kernel": kernel.name,
        "version": f"{kernel.project} {info['version']}",
        "date": f"{datetime.date.today()}",
        "declared": ", ".join(w for c in kernel.claims.values() for w in c.split(",")),
        "served": len(served),
        "judged": judged,
        "passed": sum(j["verdict"] == "pass" for j in judged),
        "failed": [j for j in judged if j["verdict"] == "fail"],
        "reasons": reasons(info["cases"]),
        "speed": speed_of(speed, kernel.name),
    }


def options():
    a = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    a.add_argument("folder", type=pathlib.Path)
    a.add_argument("--program", help="deltaproof; needed but with --only-times")
    a.add_argument("--only-times", action="store_true")
    a.add_argument("--reports", type=pathlib.Path, required=True)
    a.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    a.add_argument("--notes", type=pathlib.Path, default=HERE / "notes.json")
    return a


def fail(text):
    print(f"judge.py: {text}", file=sys.stderr)
    sys.exit(2)


def checked(args):
    """Refuses what would leave reports with less than they have."""
    for folder in (args.folder, args.reports):
        if not folder.is_dir():
            fail(f"{folder}: no such folder")
    for name in ("speed.json",) if args.only_times else ("out", "left_out.json"):
        if not (args.folder / name).exists():
            fail(f"{args.folder / name}: is not there, and the reports stay as they are")
    if args.only_times and not (args.reports / "field.json").is_file():
        fail(f"{args.reports / 'field.json'}: is not there: --only-times keeps its verdicts")


def read_json(path):
    return json.loads(path.read_text()) if path.is_file() else {}


def main():
    a = options()
    args = a.parse_args()
    if not (args.program or args.only_times):
        a.error("--program is missing")
    checked(args)
    have = read_json(args.reports / "field.json")
    timed = read_json(args.folder / "speed.json")
    speed = timed or have.get("speed", {})
    if args.only_times:
        return only_times(args, speed, have)
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        table = [
            row_of(args, pool, k, speed)
            for k in KERNELS
            if (args.folder / "out" / f"{k.name}.json").is_file()
        ]
    if ours := list(of_ours(args.folder).values()):
        table.append(row_of_ours(ours, speed))
    every = kept(table, have, bool(timed))
    write(args, every, speed, read_json(args.folder / "left_out.json"))
    return 0


def row_of_ours(ours, speed):
    return {
        "kernel": "deltaproof-kda",
        "version": "this repository (gpu/)",
        "date": f"{datetime.date.today()}",
        "declared": "bf16",
        "served": len(ours),
        "judged": ours,
        "passed": sum(j["verdict"] == "pass" for j in ours),
        "failed": [j for j in ours if j["verdict"] == "fail"],
        "reasons": "op and shapes that its fast and simple paths lack",
        "speed": speed_of(speed, "deltaproof-kda"),
    }


def kept(table, have, timed):
    """The table in the order of claims.py, with the old rows of kernels that were not run. Not
    timed: with their old times."""
    old = {k["kernel"]: k for k in have.get("kernels", [])}
    for k in table:
        if not timed and k["kernel"] in old:
            k["speed"] = old[k["kernel"]]["speed"]
    every = old | {k["kernel"]: k for k in table}
    order = [k.name for k in KERNELS] + ["deltaproof-kda"]
    return sorted(every.values(), key=lambda k: order.index(k["kernel"]))


def only_times(args, speed, have):
    """Verdicts as they stand, new times."""
    speed["where"] = (
        re.sub(r",? times [^.]*", "", have["speed"].get("where", "one run"))
        + f", times {speed.pop('times', 'one run')} of {speed['date']}"
    )
    for k in have["kernels"]:
        k["speed"] = speed_of(speed, k["kernel"])
    write(args, have["kernels"], speed, have["left_out"])
    return 0


def write(args, table, speed, left_out):
    """Both reports, and a line a kernel."""
    notes = json.loads(args.notes.read_text()) if args.notes.is_file() else {}
    (args.reports / "field.json").write_text(
        json.dumps(
            {
                "schema": "deltaproof-field",
                "schema_version": 1,
                "speed": speed,
                "left_out": left_out,
                "notes": notes,
                "kernels": table,
            },
            indent=1,
        )
        + "\n"
    )
    (args.reports / "field.md").write_text(page(table, speed, notes, left_out))
    for k in table:
        print(
            f"{k['kernel']:26} {k['served']:3} served, {k['passed']:3} passed, "
            f"{len(k['failed']):3} failed"
        )


if __name__ == "__main__":
    sys.exit(main())
