#!/usr/bin/env python3
"""Write the inputs of every case that a public kernel could be asked: DIR/in/CASE.safetensors,
DIR/cases.json {case: recurrence}, and DIR/left_out.json {case: why}.

python3 inputs.py DIR --program build/deltaproof --cases FOLDER...
"""

import argparse
import json
import pathlib
import subprocess
import sys

from claims import KERNELS

OPS = {k.op for k in KERNELS}


def settings(path):
    """key = value of a case file."""
    lines = (
        line.split("=", 1)
        for line in path.read_text().splitlines()
        if "=" in line and not line.startswith("#")
    )
    return {k.strip(): v.strip() for k, v in lines}


def left_out(s):
    """Why no public kernel is asked, or ''."""
    if s["op"] not in OPS:
        return f"op = {s['op']}"
    if s.get("dtype", "bf16") != "bf16":
        return f"inputs in {s['dtype']}"
    return "inputs that are not finite" if s.get("nonfinite") == "allow" else ""


def main():
    a = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    a.add_argument("folder", type=pathlib.Path)
    a.add_argument("--program", required=True)
    a.add_argument("--cases", nargs="+", type=pathlib.Path, required=True)
    args = a.parse_args()
    (args.folder / "in").mkdir(parents=True, exist_ok=True)
    asked, out = {}, {}
    for path in sorted(p for folder in args.cases for p in folder.glob("*.case")):
        s, name = settings(path), path.stem
        if why := left_out(s):
            out[name] = why
            continue
        own = s.get("recurrence")
        asked[name] = own or s["op"]
        p = subprocess.run(
            [
                args.program,
                "inputs",
                name,
                "--cases",
                str(path.parent),
                "-o",
                str(args.folder / "in" / f"{name}.safetensors"),
                *(["--recurrence", own] if own else []),
            ],
            capture_output=True,
            text=True,
        )
        if p.returncode:
            sys.exit(f"{name}: {p.stderr.strip()}")
    (args.folder / "cases.json").write_text(json.dumps(asked, indent=1) + "\n")
    (args.folder / "left_out.json").write_text(json.dumps(out, indent=1) + "\n")
    print(f"{len(asked)} cases, {len(out)} left out")
    return 0


if __name__ == "__main__":
    sys.exit(main())
