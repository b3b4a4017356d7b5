"""All problems in one run of the program: what their errors show together."""

import json
import os
import subprocess

from plugin import Stop
from runs import KEY, LIMIT


def pooled_of(runner, problems, design, declared, fault="", size=0.0, ranks=1):
    """(exit status, runs that fail alone, rows of the record's `pooled` for the plug-in)."""
    declared = bool(declared and runner.plugin.declares(design) is not None)
    values = {"design": design, "declared": declared, "fault": fault, "size": size, "seed": 1}
    command = [runner.a.program, "run", "--base", runner.plugin.base(design)]
    command += [os.path.join(p.folder, p.name + ".case") for p in problems]
    command += ["--ranks", str(ranks), "--chain", "fp32", "--subject", runner.plugin.library]
    command += ["--limit", str(LIMIT), "--json", "-"]
    if runner.a.cache:
        command += ["--cache", runner.a.cache]
    env = runner.environment(tuple(values.get(k) for k in KEY), {})
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    try:
        record = json.loads(done.stdout)
    except ValueError:
        raise Stop("together: %s" % (done.stderr.strip().split("\n") or [""])[-1][:300]) from None
    failed = [r["id"] for r in record["runs"] if r["verdict"] == "fail"]
    rows = [p for p in record.get("pooled", []) if p["backend"] == "subject"]
    return done.returncode, failed, rows


def show(design, fault, size, status, failed, rows, file):
    what = "%s:%g" % (fault, size) if fault else "right"
    print("%s %s: status %d, %d runs fail alone" % (design, what, status, len(failed)), file=file)
    for p in rows:
        print(
            "  %-4s %-12s %3d cases, %6.0f degrees of freedom: %.2f times expected, by chance"
            " %.1e; %.2f times these errors would fail"
            % (
                p["verdict"],
                p["tensor"],
                p["cases"],
                p["freedom"],
                p["ratio"],
                p["chance"],
                float(p["detects"]),
            ),
            file=file,
        )
