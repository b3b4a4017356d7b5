#!/usr/bin/env python3
"""Times of the kernels of timed.py on the rows of rows.py.

    python3 speed.py DIR [--kernels NAME,...] [--rows REGEX] [--runs 20] [--configs N]
                         [--limit SECONDS]

Writes DIR/speed.jsonl, a line a kernel and row as it comes, and DIR/speed.json, and prints a table.
A run that was cut off goes on where it stopped.

K = V = 128, bf16, random inputs. A time is the median of replays of a CUDA graph of several calls.
The events around it are queued while the device sleeps, so that no gap between launches counts. A
call that cannot be captured is queued ahead behind such a sleep, and its row says so.

Each kernel has processes of its own. First all compile at once: Triton, TileLang, at most N
configurations of each autotuned kernel (default: 2). Then one process at a time has the device.

Floor: every input read once and every output written once, at the speed of a copy of 2 GiB.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import queue
import re
import subprocess
import sys
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import tables
import timed_jax
from rows import BY_NAME, ROWS, SETS
from timed import COMPILED, JAX, PEERS, WHEELS, of_wheel

SILENT = 75  # seconds without a row after which a process is given up
REFUSALS = ("NotServed", "NotImplementedError")  # final; what is not installed is tried again


def one_line(e):
    return f"{type(e).__name__}: {' '.join(str(e).split())[:200]}".removeprefix("NotServed: ")


# ---- in the process of one kernel
# --------------------------------------------------------------------------------------------------


def time_row(name, row, runs):
    """The entry of one kernel and row."""
    import clocks
    import torch

    entry = {"kernel": name, "row": row.name}
    try:
        call, contract = PEERS[name](row)
        spent, clock = clocks.seconds(torch, call, runs)
        return entry | {"us": round(spent * 1e6, 3), "clock": clock, "contract": contract}
    except Exception as e:  # whatever a kernel raises is its answer
        return entry | {"why": one_line(e), "refused": type(e).__name__ in REFUSALS}


def child(args):
    """Rows by name on standard input; an entry a line on standard output."""
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what kernels print is no entry
    rows = [BY_NAME[line.strip()] for line in sys.stdin if line.strip()]
    time_one = timed_jax.time_row if args.child == JAX else time_row
    if args.child in ("fla", "mamba-ssm"):  # Triton's autotuner
        from bench_fla import cut_configs

        cut_configs(args.configs, None)
    for row in rows:
        print(json.dumps({"started": row.name}), file=said, flush=True)
        if args.compile:
            (timed_jax.compile_row if args.child == JAX else compile_row)(args.child, row)
            continue
        entry = time_one(args.child, row, args.runs)
        print(json.dumps(entry), file=said, flush=True)
        if "CUDA error" in entry.get("why", "") or "AcceleratorError" in entry.get("why", ""):
            os._exit(3)  # this process's device is lost
        if args.child != JAX:
            import torch

            torch.cuda.empty_cache()
    os._exit(0)  # no teardown of graphs and libraries


def compile_row(name, row):
    import torch

    try:
        call, _ = PEERS[name](row.small())
        for step in call if isinstance(call, list) else [call]:
            step()
            break
        torch.cuda.synchronize()
    except Exception as e:
        print(one_line(e), file=sys.stderr)


# ---- the run
# --------------------------------------------------------------------------------------------------


def start(args, name, rows, *more):
    p = subprocess.Popen(
        [sys.executable, __file__, str(args.folder), "--child", name, *more]
        + ["--runs", str(args.runs), "--configs", str(args.configs)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | os.environ,
    )
    p.stdin.write("".join(f"{r.name}\n" for r in rows))
    p.stdin.close()
    return p


def reading(stream, put):
    for line in stream:
        put(line)
    put(None)


def lines_of(p, silent, deadline):
    """Lines of a process until it ends, is silent for long, or time is up; it is killed then."""
    got, errors = queue.Queue(), []
    threading.Thread(target=reading, args=(p.stdout, got.put), daemon=True).start()
    last_words = threading.Thread(target=reading, args=(p.stderr, errors.append), daemon=True)
    last_words.start()
    why = ""
    while True:
        wait = min(silent, deadline - time.monotonic())
        try:
            line = got.get(timeout=max(0.01, wait))
        except queue.Empty:
            why = f"not finished in {silent} s" if wait >= silent else "out of time"
            p.kill()
            break
        if line is None:
            break
        yield line
    p.wait()
    last_words.join(5)
    last = [x.strip() for x in errors if x and x.strip()][-1:] or [f"status {p.returncode}"]
    yield json.dumps({"ended": why or f"its process ended: {last[0][:200]}"})


def run_kernel(args, name, rows, put):
    """Entries of a kernel, in one process after another: one that ends costs its row alone. After
    three that ended with no row between them the rest waits for another run."""
    left, lost = list(rows), 0
    while left and lost < 3 and time.monotonic() < args.deadline:
        started = None
        for line in lines_of(start(args, name, left), args.silent, args.deadline):
            try:
                e = json.loads(line)
            except ValueError:
                continue
            if "started" in e:
                started = BY_NAME[e["started"]]
            elif "row" in e:
                put(e)
                left.remove(BY_NAME[e["row"]])
                started, lost = None, 0
            elif "ended" in e and left and e["ended"] != "out of time":
                row = started or left[0]
                put({"kernel": name, "row": row.name, "why": e["ended"]})
                left.remove(row)
                lost += 1


def compile_all(args, todo):
    """Runs what compiles just in time, everything at once; returns what had no time to begin."""
    jobs = []
    for name, ops in COMPILED.items():
        kinds = {r.compiled_as: r for r in todo.get(name, []) if r.op in ops}
        jobs += [(name, r) for r in sorted(kinds.values(), key=lambda r: r.part)]
    jobs += [(JAX, r) for r in todo.get(JAX, []) if r.part != "decode"]  # every shape is compiled
    running, until = [], min(args.deadline, time.monotonic() + args.compile_limit)
    cores = len(os.sched_getaffinity(0))
    while (jobs or running) and time.monotonic() < until:
        running = [p for p in running if p.poll() is None]
        while jobs and len(running) < cores:
            name, row = jobs.pop(0)
            p = start(args, name, [row], "--compile")
            for stream in (p.stdout, p.stderr):
                threading.Thread(target=reading, args=(stream, id), daemon=True).start()
            running.append(p)
        time.sleep(0.1)
    for p in running:
        p.kill()
        p.wait()
    return jobs


def about(args):
    """Device, versions and the speed of a copy, for the table."""
    import clocks
    import torch

    a = torch.empty(1 << 31, device="cuda", dtype=torch.int8)
    b = torch.empty_like(a)
    rate = 2 * a.numel() / clocks.by_queue(torch, lambda: b.copy_(a), 9)
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
    ).stdout.split("\n")[0]
    return {
        "copy_bytes_per_s": rate,
        "device": torch.cuda.get_device_name(),
        "driver": driver,
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "runs": args.runs,
        "configs": args.configs,
        "versions": {k: of_wheel(w) for k, w in WHEELS.items() if of_wheel(w)},
    }


def write(folder, versions):
    """speed.json of the lines that are there; its rows."""
    rows = tables.as_rows(
        tables.read_lines(folder / "speed.jsonl"), versions.get("copy_bytes_per_s")
    )
    (folder / "speed.json").write_text(json.dumps(versions | {"rows": rows}, indent=1) + "\n")
    return rows


def options():
    a = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    a.add_argument("folder", type=pathlib.Path)
    a.add_argument("--kernels", default=",".join(PEERS), help="default: all")
    a.add_argument("--rows", default="", help=f"{', '.join(SETS)}, or a regular expression")
    a.add_argument("--runs", type=int, default=20)
    a.add_argument("--configs", type=int, default=2)
    a.add_argument("--limit", type=float, default=900, help="seconds in all (default: 900)")
    a.add_argument("--compile-limit", type=float, default=240)
    a.add_argument("--silent", type=float, default=SILENT)
    a.add_argument("--child", help=argparse.SUPPRESS)
    a.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    return a


def fail(text):
    print(f"speed.py: {text}", file=sys.stderr)
    sys.exit(2)


def checked(args):
    """(names, rows) asked for, and the folder made; a clear error else."""
    names = args.kernels.split(",")
    for name in names:
        if name not in PEERS:
            fail(f"--kernels: no kernel {name} (there are {', '.join(PEERS)})")
    try:
        rows = SETS.get(args.rows) or [r for r in ROWS if re.search(args.rows, r.name)]
    except re.error as e:
        fail(f"--rows {args.rows}: {e}")
    if not rows:
        fail(f"--rows {args.rows}: no row has such a name")
    try:
        args.folder.mkdir(parents=True, exist_ok=True)
        (args.folder / "speed.jsonl").open("a").close()
    except OSError as e:
        fail(f"{args.folder}: {e.strerror}")
    if not importlib.util.find_spec("torch"):
        fail("needs PyTorch with a CUDA GPU")
    import torch

    if not torch.cuda.is_available():
        fail("PyTorch finds no CUDA GPU")
    return names, rows


def main():
    args = options().parse_args()
    if args.child:
        return child(args)
    args.deadline = time.monotonic() + args.limit
    names, rows = checked(args)
    path = args.folder / "speed.jsonl"
    done = tables.measured(tables.read_lines(path))
    todo = {n: [r for r in rows if (n, r.name) not in done] for n in names}
    versions = about(args)
    left = compile_all(args, todo)
    print(f"compiled, {len(left)} not begun", flush=True)
    with path.open("a") as f:

        def put(entry):
            f.write(json.dumps(entry) + "\n")
            f.flush()

        for name in names:
            begin = time.monotonic()
            run_kernel(args, name, todo[name], put)
            print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)
            table = write(args.folder, versions)
    print(f"{versions['device']}, copies {versions['copy_bytes_per_s'] / 1e12:.2f} TB/s")
    print("\n".join(tables.page_rows(table) + tables.contracts(table)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
