"""FLA's kernels compiled in parallel before anything is timed.

Each of FLA's kernels chooses among up to some twenty configurations and would compile them one
after the other. Here one process for each configuration runs the work once, so that Triton's cache
has all of them; the timed process then chooses among all."""

import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peers"))
from bench_fla import cut_configs


def only(config):
    """Autotuners made from now on have that one of their configurations alone."""
    cut_configs(0, config)


def compile_fla(script, kinds, configs, limit):
    """Starts `script --compile KIND I` for each, as many at once as there are cores; after `limit`
    seconds those that still run end. Returns how many came to their end."""
    until = time.monotonic() + limit
    jobs = [(kind, str(i)) for i in range(configs) for kind in kinds]
    running, done = [], 0
    while (jobs or running) and time.monotonic() < until:
        ended = [p for p in running if p.poll() is not None]
        done += sum(p.returncode == 0 for p in ended)
        running = [p for p in running if p not in ended]
        while jobs and len(running) < len(os.sched_getaffinity(0)):
            command = [sys.executable, script, "--compile", *jobs.pop(0)]
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            running.append(subprocess.Popen(command, **quiet))
        time.sleep(0.05)
    for p in running:
        p.kill()
    return done
