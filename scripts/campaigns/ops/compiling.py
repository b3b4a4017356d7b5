"""FLA's kernels compiled in parallel before anything is timed.

Each of FLA's kernels chooses among up to some twenty configurations. One of all kernels of a layer
takes a core a minute to compile. So at most CONFIGS of them stay, spread over each kernel's list.
One process for each runs the work once and fills Triton's cache. The timed process then chooses."""

import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peers"))
from bench_fla import cut_configs

CONFIGS = 6


def keep(configs, only=None):
    """Autotuners made from now on have that many of their configurations, or one of those."""
    cut_configs(configs, only)


def compile_fla(script, kinds, configs, limit):
    """Starts `script --configs N --compile KIND I` for each, as many at once as there are cores;
    after `limit` seconds those that still run end. Returns how many ended well."""
    until = time.monotonic() + limit
    jobs = [(kind, str(i)) for i in range(configs) for kind in kinds]
    running, done = [], 0
    while (jobs or running) and time.monotonic() < until:
        ended = [p for p in running if p.poll() is not None]
        done += sum(p.returncode == 0 for p in ended)
        running = [p for p in running if p not in ended]
        while jobs and len(running) < len(os.sched_getaffinity(0)):
            command = [sys.executable, script, "--configs", str(configs), "--compile"]
            command += jobs.pop(0)
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            running.append(subprocess.Popen(command, **quiet))
        time.sleep(0.05)
    for p in running:
        p.kill()
    return done
