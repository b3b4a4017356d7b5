#!/usr/bin/env python3
"""KDA forward and backward: our kernels and FLA's chunk_kda on one GPU, one after the other. Prints
a table of times, and of bytes kept for the backward.

    python3 scripts/campaigns/peers/bench_fla.py build/gpu/bench_bwd [--runs 20] [--configs N] \\
        [--limit SECONDS]

Medians of many runs after warm-up (CUDA events, calls queued ahead). K = V = 128, bf16, lower-bound
gate, beta and L2 norm in the kernel. Every input is larger than L2. Our times are those of
`bench_bwd kda`, which this starts. FLA's need PyTorch and FLA (pip install flash-linear-attention);
without them their column says why it is empty.

FLA's kernels choose among up to some twenty configurations each, for every number of heads, and
compile them all first. They are compiled here in parallel, on few tokens (no key of theirs holds
the number of tokens). Option --configs N compiles at most N of each kernel's configurations, spread
over its list; the table says so.
"""

import argparse
import os
import re
import subprocess
import sys
import time

from clocks import by_queue

SHAPES = ((8192, 64), (131072, 8))


def cut_configs(limit, only):
    """Autotuners made from now on keep at most `limit` configurations, or the one at `only` among
    those."""
    from triton.runtime import autotuner

    make = autotuner.Autotuner.__init__

    def init(self, fn, arg_names, configs, *a, **k):
        configs = list(configs or [])
        if limit and len(configs) > limit:
            configs = [configs[i * len(configs) // limit] for i in range(limit)]
        if only is not None and configs:
            configs = [configs[only % len(configs)]]
        make(self, fn, arg_names, configs, *a, **k)

    autotuner.Autotuner.__init__ = init


def random_inputs(T, HV, bias):
    """Inputs of KDA's kernels, K = V = 128, [T, HV, ..], and do; bias: the bias of every gate."""
    import torch

    torch.manual_seed(1)
    x = {
        n: torch.randn(T, HV, 128, device="cuda", dtype=torch.bfloat16)
        for n in ("q", "k", "v", "g", "do")
    }
    x["beta"] = torch.randn(T, HV, device="cuda", dtype=torch.bfloat16)
    x["A_log"], x["dt_bias"] = (
        torch.zeros(HV, device="cuda"),
        torch.full((HV, 128), bias, device="cuda"),
    )
    return x


def fla_arguments(T, HV, bias):
    """Tensors and options of FLA's KDA: gate, norms and beta's sigmoid in the kernel; do."""
    x = random_inputs(T, HV, bias)
    tensors = {n: x[n].unsqueeze(0) for n in ("q", "k", "v", "g", "beta")}
    tensors |= {"A_log": x["A_log"], "dt_bias": x["dt_bias"].flatten()}
    options = {
        "use_gate_in_kernel": True,
        "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "lower_bound": -5.0,
    }
    return tensors, options, x["do"].unsqueeze(0)


def fla_functions(T, HV, bias):
    """forward() -> o, backward(o), and kept()."""
    import torch
    from fla.ops.kda import chunk_kda

    x, options, do = fla_arguments(T, HV, bias)
    x = {n: t.requires_grad_(True) for n, t in x.items()}

    def forward():
        return chunk_kda(**x, **options, safe_gate=True)[0]

    def kept():
        """Bytes that wait for the backward beside the inputs."""
        own, bytes_at = {t.untyped_storage().data_ptr() for t in x.values()}, {}

        def pack(t):
            s = t.untyped_storage()
            if t.is_cuda and s.data_ptr() not in own:
                bytes_at[s.data_ptr()] = s.nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            o = forward()
            return sum(bytes_at.values()) if o.requires_grad else None

    return forward, lambda o: torch.autograd.grad(o, list(x.values()), do, retain_graph=True), kept


def median(f, runs):
    """ms of a call, the host ahead of the device: no gap between launches counts."""
    import torch

    return 1e3 * by_queue(torch, f, runs)


def child(args):
    """compile T HV I: configuration I of every kernel, on few tokens. time T HV: prints both
    medians."""
    what, T, HV = args.child[0], int(args.child[1]), int(args.child[2])
    cut_configs(args.configs, int(args.child[3]) if what == "compile" else None)
    import torch

    forward, backward, kept = fla_functions(T, HV, -4.0)
    backward(forward())
    torch.cuda.synchronize()
    if what == "time":
        with torch.no_grad():
            f = median(forward, args.runs)
        o = forward()
        print(f"fla {f} {median(lambda: backward(o), args.runs)} {kept()}")


def start(args, command, *what):
    """Starts a process of `command` (a file and its required arguments) that computes `what`."""
    own = ("--runs", args.runs, "--configs", args.configs, "--child", *what)
    return subprocess.Popen(
        [sys.executable, *map(str, command), *map(str, own)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(p, deadline):
    try:
        out, err = p.communicate(timeout=max(0.1, deadline - time.monotonic()))
        return out if p.returncode == 0 else "", err.strip().splitlines()[
            -1
        ] if p.returncode and err.strip() else ""
    except subprocess.TimeoutExpired:
        p.kill()
        p.communicate()
        return "", "not finished in time"


def time_fla(args):
    """{(T, HV): (forward, backward, bytes kept) or why not}, and what to call it."""
    try:
        import fla
        import torch
        import triton
    except ImportError as e:
        return {}, f"FLA (none: {e})"
    some = f"at most {args.configs}" if args.configs else "all"
    name = (
        f"FLA {fla.__version__}, {some} configurations a kernel, Triton {triton.__version__}, "
        f"PyTorch {torch.__version__}"
    )
    deadline = args.start + args.limit
    jobs = [(HV, i) for HV in sorted({HV for _, HV in SHAPES}) for i in range(args.configs or 24)]
    width = len(os.sched_getaffinity(0))
    running = []
    for job in jobs:  # compile: at most one process a core
        while len(running) >= width:
            running = [p for p in running if p.poll() is None]
            time.sleep(0.1)
        running.append(start(args, (__file__, args.program), "compile", 1024, *job))
    for p in running:
        finish(p, deadline - 0.3 * args.limit)
    print(f"FLA's kernels compiled, {time.monotonic() - args.start:.0f} s", file=sys.stderr)
    got = {}
    for T, HV in SHAPES:
        out, why = finish(start(args, (__file__, args.program), "time", T, HV), deadline)
        m = re.search(r"^fla (\S+) (\S+) (\d+)$", out, re.M)
        got[T, HV] = (float(m[1]), float(m[2]), int(m[3])) if m else why or "no result"
    return got, name


def options(doc, configs):
    """The common options of both programs; configs: how many of each kernel of FLA, 0: all."""
    a = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    a.add_argument("--runs", type=int, default=20)
    a.add_argument(
        "--configs",
        type=int,
        default=configs,
        help=f"of each kernel of FLA (0: all; default: {configs or 'all'})",
    )
    a.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    return a


def main():
    a = options(__doc__, 0)
    a.add_argument("program", metavar="BENCH_BWD")
    a.add_argument(
        "--limit",
        type=float,
        default=1200,
        help="seconds after which FLA's columns stay empty (default: 1200)",
    )
    args = a.parse_args()
    args.start = time.monotonic()
    if args.child:
        return child(args)
    p = subprocess.run([args.program, "kda", str(args.runs)], capture_output=True, text=True)
    if p.returncode:
        print(f"kernels not timed: {p.stderr.strip() or p.returncode}")
        return 0 if "no CUDA device" in p.stderr else 1
    ours = {
        (int(m[1]), int(m[2])): (float(m[3]), float(m[4]), int(m[5]))
        for m in re.finditer(
            r"^kda +T=(\d+) +HV=(\d+) +K=128 +V=128 +R=1 +bf16 +fast, fast gates +\d+ segments "
            r"+forward +(\S+) +backward +(\S+) ms.* kept (\d+) B",
            p.stdout,
            re.M,
        )
    }
    theirs, name = time_fla(args)
    print(f"{p.stdout.splitlines()[0]}; ms, medians of {args.runs}; {name}")
    print(f"{'KDA, K = V = 128, bf16':34} {'ours':>8} {'FLA':>8} {'FLA / ours':>11}")
    for T, HV in SHAPES:
        for i, part in enumerate(("forward", "backward")):
            t = theirs.get((T, HV), "-")
            right = (
                f"{t[i]:8.3f} {t[i] / ours[T, HV][i]:11.2f}" if isinstance(t, tuple) else f"{t:>8}"
            )
            print(f"{part:8} T = {T:7,}, HV = {HV:2}       {ours[T, HV][i]:8.3f} {right}")
    print("kept between forward and backward beside the inputs, MB")
    for T, HV in SHAPES:
        t = theirs.get((T, HV), "-")
        print(
            f"         T = {T:7,}, HV = {HV:2}       {ours[T, HV][2] / 1e6:8.1f} "
            f"{t[2] / 1e6 if isinstance(t, tuple) else t:>8{'.1f' if isinstance(t, tuple) else ''}}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
