#!/usr/bin/env python3
"""Times of the public kernels of kernels.py and of ours, one after the other on one GPU:
DIR/speed.json, and a table.

    python3 speed.py DIR BENCH_BWD [--runs 20] [--configs N] [--limit SECONDS]

K = V = 128, bf16, random inputs, medians of many runs after warm-up (CUDA events). Lower-bound gate
of -5 with bias -4 (-0.09 a token) or 0 (-2.5), norms and beta's
sigmoid in the kernel; where a kernel's contract lacks those (cuDNN's backward) it gets log gates of
the same size, plain beta and unit keys, and the row says so.
FLA's autotuner times at most N configurations of each kernel (default: 2), compiled in this run.

Floor: every input read once and every output written once (a backward's inputs are the forward's
and do; nothing that is kept between or recomputed), bf16, at the speed of a copy of 2 GiB, bytes
read and bytes written, measured in this run. Each time is also given as a multiple of it.
"""

import fcntl
import json
import pathlib
import re
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import bench_fla

SHAPES = bench_fla.SHAPES
BIASES = (-4.0, 0.0)
CONTRACT = "lower-bound gate, norms, sigmoid in the kernel"


def random_inputs(T, HV, bias, log=False):
    """log: gates and betas as the kernel's own activation would make them, q and k of length 1."""
    import torch

    x = bench_fla.random_inputs(T, HV, bias)
    if log:
        x["q"], x["k"] = (
            torch.nn.functional.normalize(x[n].float(), dim=-1).bfloat16() for n in ("q", "k")
        )
        x["g"] = -5 * torch.sigmoid(x["g"].float() + bias)
        x["beta"] = torch.sigmoid(x["beta"].float())
    return x


def cudnn_forward(T, HV, bias, plan=None):
    import torch
    from cudnn.linear_attention.ops import kimi_delta_attention

    from kernels import CUDNN_PLAN

    x = random_inputs(T, HV, bias)
    cu = torch.tensor([0, T], device="cuda", dtype=torch.int32)
    t = {n: x[n] for n in ("q", "k", "v")} | {"g": x["g"].float(), "beta": x["beta"].float()}

    def run():
        kimi_delta_attention(
            **t,
            cu_seqlens=cu,
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            safe_gate=True,
            gate_lower_bound=-5.0,
            a_log=x["A_log"],
            dt_bias=x["dt_bias"],
            output_final_state=True,
            plan_name=plan or CUDNN_PLAN,
        )

    return run, None, CONTRACT + "; fp32 g, beta"


def cudnn_dsl_forward(T, HV, bias):
    from kernels import CUDNN_DSL_PLAN

    return cudnn_forward(T, HV, bias, CUDNN_DSL_PLAN)


def cudnn_backward(T, HV, bias):
    import torch
    from cudnn.linear_attention.ops import kimi_delta_attention

    from kernels import CUDNN_PLAN

    x = random_inputs(T, HV, bias, log=True)
    leaves = [x[n].requires_grad_(True) for n in ("q", "k", "v", "g", "beta")]
    cu = torch.tensor([0, T], device="cuda", dtype=torch.int32)

    def forward():
        return kimi_delta_attention(*leaves, cu_seqlens=cu, plan_name=CUDNN_PLAN)[0]

    o = forward()
    return (
        forward,
        lambda: torch.autograd.grad(o, leaves, x["do"], retain_graph=True),
        "log gates, plain beta, unit keys; fp32 g, beta",
    )


def flashkda_forward(T, HV, bias):
    import torch

    from kernels import flashkda

    fwd = flashkda()
    x = random_inputs(T, HV, bias)
    one = {n: x[n].unsqueeze(0) for n in ("q", "k", "v", "g", "beta")}
    out = torch.empty_like(one["v"])
    return (
        lambda: fwd(
            **one,
            scale=128**-0.5,
            out=out,
            A_log=x["A_log"],
            dt_bias=x["dt_bias"],
            lower_bound=-5.0,
        ),
        None,
        CONTRACT,
    )


def fla_chunk(T, HV, bias):
    forward, backward, _ = bench_fla.fla_functions(T, HV, bias)
    o = forward()
    return forward, lambda: backward(o), CONTRACT


def fla_recurrent(T, HV, bias):
    from fla.ops.kda import fused_recurrent_kda

    tensors, options, _ = bench_fla.fla_arguments(T, HV, bias)
    return lambda: fused_recurrent_kda(**tensors, **options), None, CONTRACT


def gdn_tensors(T, HV, bias):
    import torch

    x = random_inputs(T, HV, bias)
    g = (-5 * torch.sigmoid(x["g"][..., 0].float() + bias)).unsqueeze(0)
    return {n: x[n].unsqueeze(0) for n in ("q", "k", "v")} | {
        "g": g,
        "beta": torch.sigmoid(x["beta"].float()).unsqueeze(0),
    }


def fla_gdn(T, HV, bias):
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    t = gdn_tensors(T, HV, bias)
    return (
        lambda: chunk_gated_delta_rule(**t, use_qk_l2norm_in_kernel=True),
        None,
        "log gates, norms in the kernel",
    )


def flashqla_gdn(T, HV, bias):
    from kernels import flashqla

    chunk_gated_delta_rule = flashqla()
    t = gdn_tensors(T, HV, bias)
    return (
        lambda: chunk_gated_delta_rule(**t, use_qk_l2norm_in_kernel=True)[0],
        None,
        "log gates, norms in the kernel",
    )


def fla_gdn2(T, HV, bias):
    """Erase and write gates in (0, 1)."""
    import torch
    from fla.ops.gdn2 import chunk_gdn2

    x = random_inputs(T, HV, bias)
    t = {n: x[n].unsqueeze(0) for n in ("q", "k", "v")}
    t["g"] = (-5 * torch.sigmoid(x["g"].float() + bias)).bfloat16().unsqueeze(0)
    t |= {"b": torch.rand_like(t["k"]), "w": torch.rand_like(t["v"])}
    leaves = [y.requires_grad_(True) for y in t.values()]
    do = x["do"].unsqueeze(0)

    def forward():
        return chunk_gdn2(**t, use_qk_l2norm_in_kernel=True)[0]

    o = forward()
    return (
        forward,
        lambda: torch.autograd.grad(o, leaves, do, retain_graph=True),
        "log gates, norms in the kernel",
    )


# kernel of kernels.py -> what to time, and the parts that its table shows
TIMED = {
    "fla-chunk-kda": fla_chunk,
    "fla-fused-recurrent-kda": fla_recurrent,
    "fla-chunk-gdn-forward": fla_gdn,
    "fla-chunk-gdn2": fla_gdn2,
    "flashqla-gdn-forward": flashqla_gdn,
    "cudnn-hopper-forward": cudnn_forward,
    "cudnn-hopper-dsl-forward": cudnn_dsl_forward,
    "cudnn-hopper-backward": cudnn_backward,
    "flashkda-forward": flashkda_forward,
}


def median(f, runs):
    start = time.monotonic()
    bench_fla.median(f, 1)
    return bench_fla.median(f, runs if time.monotonic() - start < 1 else max(3, runs // 5))


def compile_on_few_tokens(name, HV, bias):
    """While another has the device: the number of tokens is no key of most compilers here."""
    forward, backward, _ = TIMED[name](1024, HV, bias)
    forward()
    if backward:
        backward()


def child(args):
    """NAME T HV BIAS: one row as JSON."""
    name, T, HV, bias = args.child[0], int(args.child[1]), int(args.child[2]), float(args.child[3])
    if name.startswith("fla-"):
        bench_fla.cut_configs(args.configs, None)
    import torch

    torch.zeros(1, device="cuda")
    compile_on_few_tokens(name, HV, bias)
    with open(args.folder / "speed.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of them has the device
        forward, backward, contract = TIMED[name](T, HV, bias)
        row = {"kernel": name, "T": T, "HV": HV, "bias": bias, "contract": contract}
        with torch.no_grad():
            row["forward_ms"] = round(median(forward, args.runs), 4)
        if backward:
            row["backward_ms"] = round(median(backward, args.runs), 4)
        torch.cuda.synchronize()
    print(json.dumps(row))


def start(args, *what):
    return bench_fla.start(args, (__file__, args.folder, "-"), *what)


def copy_rate():
    """Bytes a second of a copy of 2 GiB, those read and those written."""
    import torch

    a = torch.empty(1 << 31, device="cuda", dtype=torch.int8)
    b = torch.empty_like(a)
    return 2 * a.numel() / (bench_fla.median(lambda: b.copy_(a), 9) * 1e-3)


# bytes of a token and value head at K = V = 128: q k v, gates and beta (and erase and write)
GATES = {"kda": 258, "gdn": 6, "gdn2": 768}
ROWS = 3 * 256


def floors_ms(kernel, T, HV, rate):
    """Of a forward and of a backward."""
    gates = GATES["gdn2" if "gdn2" in kernel else "gdn" if "gdn" in kernel else "kda"]
    inputs, o = ROWS + gates, 256
    return {
        "forward": 1e3 * T * HV * (inputs + o) / rate,
        "backward": 1e3 * T * HV * (2 * inputs + o) / rate,
    }


def compile_fla(args):
    """Fill Triton's cache, all kernels and numbers of heads at once (the number of tokens is no key
    of theirs)."""
    running = [
        start(args, name, 1024, HV, BIASES[0])
        for name in TIMED
        if name.startswith("fla-")
        for HV in sorted({HV for _, HV in SHAPES})
    ]
    for p in running:
        bench_fla.finish(p, args.start + 0.6 * args.limit)


def row_of(deadline, p, name, T, HV, bias):
    out, why = bench_fla.finish(p, deadline)
    line = [x for x in out.splitlines() if x.startswith("{")]
    return (
        json.loads(line[-1])
        if line
        else {"kernel": name, "T": T, "HV": HV, "bias": bias, "why": (why or "no result")[:300]}
    )


def theirs(args):
    """All start at once, as a start takes longer than its times; then one after the other has the
    device."""
    compile_fla(args)
    what = [
        (name, T, HV, bias)
        for name in TIMED
        for T, HV in SHAPES
        for bias in (BIASES if name.startswith("cudnn") else BIASES[:1])
    ]
    running = [start(args, *w) for w in what]
    deadline = args.start + args.limit
    return [row_of(deadline, p, *w) for p, w in zip(running, what, strict=True)]


def ours(program, runs):
    """Rows of `bench_bwd table`."""
    bias_of = {"fast": -4.0, "gone": 0.0}  # gpu/bench/bench.h
    p = subprocess.run([program, "table", str(runs)], capture_output=True, text=True)
    return [
        {
            "kernel": f"deltaproof-{m[1]}" + ("-save-all" if m[4] else ""),
            "T": int(m[2]),
            "HV": int(m[3]),
            "bias": bias_of[m[5]],
            "forward_ms": float(m[7]),
            "backward_ms": float(m[8]),
            "contract": f"{CONTRACT}; {m[6]} segments; the backward with the gate's and the norms'",
        }
        for m in re.finditer(
            r"^(kda|gdn) +T=(\d+) +HV=(\d+) +K=128 +V=128 +R=1 +bf16 +fast(, save all)?, (\w+) "
            r"gates +(\d+) segments +forward +(\S+) +backward +(\S+)",
            p.stdout,
            re.M,
        )
    ]


def timed(row, part):
    """A time and its multiple of the floor, or a dash."""
    ms = row.get(f"{part}_ms")
    return "-" if ms is None else f"{ms:.3f} ({ms / row['floor_ms'][part]:.1f}x)"


def main():
    a = bench_fla.options(__doc__, 2)
    a.add_argument("folder", type=pathlib.Path)
    a.add_argument("program", metavar="BENCH_BWD")
    a.add_argument("--limit", type=float, default=900, help="seconds in all (default: 900)")
    args = a.parse_args()
    args.start = time.monotonic()
    if args.child:
        return child(args)
    import torch

    rate = copy_rate()
    rows = ours(args.program, args.runs) + theirs(args)
    for r in rows:
        r["floor_ms"] = {
            part: round(x, 4) for part, x in floors_ms(r["kernel"], r["T"], r["HV"], rate).items()
        }
    versions = {
        "copy_bytes_per_s": rate,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "runs": args.runs,
        "configs": args.configs,
    }
    versions["driver"] = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
    ).stdout.split("\n")[0]
    (args.folder / "speed.json").write_text(json.dumps(versions | {"rows": rows}, indent=1) + "\n")
    print(f"{versions['device']}, copies {rate / 1e12:.2f} TB/s; ms (multiple of the floor)")
    for r in rows:
        print(
            f"{r['kernel']:26} T {r['T']:7,} HV {r['HV']:2} bias {r['bias']:3.0f}  "
            f"{timed(r, 'forward'):>16} {timed(r, 'backward'):>16}  {r.get('why', '')}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
