#!/usr/bin/env python3
"""A small language model of FLA's modules, trained with FLA's kernels and with deltaproof.ops.

    python3 scripts/campaigns/ops/train.py --out DIR [--limit SECONDS] [--steps 300] [--size small]

Models: FLA's KDAForCausalLM and GatedDeltaNetForCausalLM on bytes of this repository's files, bf16
autocast, AdamW. `fla` is FLA's as they are, `fla-again` the same once more, for the scatter of
losses. `ours` has chunk_* and causal_conv1d of deltaproof.ops, and else FLA's. Seed and batches are
the same. DIR/runs.json gets losses, tokens a second behind the first 30 steps and the peak of
memory. A later call makes the runs that are not there. FLA's kernels are compiled before and tuned
in the first steps. FLA's GDN needs Triton from 3.7.1 on or tilelang on Hopper. Without a device:
--size tiny, by Triton's interpreter, `ours` alone."""

import argparse
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from compiling import CONFIGS, compile_fla, keep

MODELS, RUNS, WARM = ("kda", "gdn"), ("fla", "ours", "fla-again"), 30
SIZES = {
    "small": {"hidden": 1024, "layers": 12, "heads": 8, "head_dim": 128, "B": 8, "T": 2048},
    "tiny": {"hidden": 32, "layers": 1, "heads": 2, "head_dim": 16, "B": 1, "T": 32},
}


def model_of(kind, size):
    import torch
    from fla.models import (
        GatedDeltaNetConfig,
        GatedDeltaNetForCausalLM,
        KDAConfig,
        KDAForCausalLM,
    )

    torch.manual_seed(1)
    common = {
        "hidden_size": size["hidden"],
        "num_hidden_layers": size["layers"],
        "num_heads": size["heads"],
        "head_dim": size["head_dim"],
        "expand_v": 1,
        "vocab_size": 256,
        "use_cache": False,
        "fuse_cross_entropy": False,
        "fuse_linear_cross_entropy": False,
        "fuse_swiglu": False,
    }
    if kind == "kda":
        return KDAForCausalLM(KDAConfig(**common))
    return GatedDeltaNetForCausalLM(GatedDeltaNetConfig(**common))


def batches(size, device):
    """Pieces of the repository's text, the same for every run."""
    import torch

    top = HERE.parents[2]
    files = sorted(p for e in ("*.c", "*.h", "*.md", "*.py") for p in top.glob(f"*/**/{e}"))
    files = [p for p in files if "build" not in p.parts]
    text = b"".join(p.read_bytes() for p in files)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    draw = torch.Generator().manual_seed(2)
    while True:
        at = torch.randint(len(data) - size["T"] - 1, (size["B"],), generator=draw)
        rows = torch.stack([data[i : i + size["T"] + 1] for i in at.tolist()])
        yield rows.long().to(device)


def loss_of(model, rows, kind):
    import torch
    import torch.nn.functional as F

    with torch.autocast(kind, dtype=torch.bfloat16):
        logits = model(input_ids=rows[:, :-1]).logits
    return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


def train(kind, whose, args):
    import torch

    on_device = torch.cuda.is_available()
    import swap

    if on_device:
        keep(args.configs)
    else:
        swap.tiny_triton()
    size, device = SIZES[args.size], "cuda" if on_device else "cpu"
    model = model_of(kind, size).to(device).train()
    if whose == "ours":
        swap.swap()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=on_device)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1, (n + 1) / 20))
    losses, start = [], None

    def wait():
        if on_device:
            torch.cuda.synchronize()
        return time.perf_counter()

    for n, rows in enumerate(itertools.islice(batches(size, device), args.steps)):
        if n == min(WARM, args.steps // 2):
            start, warm = wait(), n
            if on_device:
                torch.cuda.reset_peak_memory_stats()
        loss = loss_of(model, rows, device)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    spent = wait() - start
    tokens = (args.steps - warm) * size["B"] * size["T"]
    return {
        "model": kind,
        "run": whose,
        "size": size,
        "parameters": sum(p.numel() for p in model.parameters()),
        "device": torch.cuda.get_device_name() if on_device else "cpu",
        "torch": torch.__version__,
        "losses": [round(x, 6) for x in torch.stack(losses).tolist()],
        "tokens_s": tokens / spent,
        "GB": torch.cuda.max_memory_allocated() / 1e9 if on_device else None,
    }


def compile_one(kind, config):
    size = SIZES["small"] | {"layers": 1, "B": 1, "T": 512}
    model = model_of(kind, size).cuda().train()
    loss_of(model, next(batches(size, "cuda")), "cuda").backward()


def far(a, b, after=0):
    return max(abs(x - y) for x, y in zip(a["losses"][after:], b["losses"][after:], strict=True))


def read(out):
    file = out / "runs.json"
    return json.loads(file.read_text()) if file.exists() else {}


def table(out):
    runs, lines = read(out), []
    for kind in MODELS:
        mine = {w: runs[f"{kind}-{w}"] for w in RUNS if f"{kind}-{w}" in runs}
        for whose, r in mine.items():
            n = len(r["losses"])
            at = [i for i in (0, 9, 29, 99, 199, n - 1) if i < n]
            curve = "  ".join(f"{i + 1}: {r['losses'][i]:.4f}" for i in at)
            last = r["losses"][-20:]
            memory = f", {r['GB']:.2f} GB at most" if r["GB"] else ""
            lines += [
                f"{kind} {whose:9} {r['parameters'] / 1e6:.1f} M parameters, {r['device']}: "
                f"{r['tokens_s']:.0f} tokens/s{memory}",
                f"    loss at step {curve}; mean of the last 20: {sum(last) / len(last):.4f}",
            ]
        for whose in ("ours", "fla-again"):
            if "fla" in mine and whose in mine:
                two = mine["fla"], mine[whose]
                lines.append(
                    f"    {whose} from fla: loss differs by at most {far(*two):.4f}"
                    f", in the last 100 steps {far(*two, -100):.4f}"
                )
    return "\n".join(lines) + "\n"


def main():
    a = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    a.add_argument("--out", type=Path, default=Path("build/train"))
    a.add_argument("--limit", type=float, default=500)
    a.add_argument("--steps", type=int, default=300)
    a.add_argument("--size", choices=SIZES, default="small")
    a.add_argument("--runs", nargs="+", choices=RUNS, default=RUNS)
    a.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    a.add_argument("--configs", type=int, default=CONFIGS, help="of each of FLA's kernels")
    a.add_argument("--compile", nargs=2)
    a.add_argument("--child", nargs=2)
    args = a.parse_args()
    if args.compile:
        keep(args.configs, int(args.compile[1]))
        return compile_one(*args.compile)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.child:
        known = read(args.out)
        known["-".join(args.child)] = train(*args.child, args)
        (args.out / "runs.json").write_text(json.dumps(known))
        return 0
    start, status = time.monotonic(), 0
    if args.size == "small":
        done = compile_fla(__file__, args.models, args.configs, args.limit * 0.4)
        jobs = len(args.models) * args.configs
        print(f"FLA compiled: {done} of {jobs}, {time.monotonic() - start:.0f} s")
    for whose, kind in itertools.product(args.runs, args.models):
        left = args.limit - (time.monotonic() - start)
        if f"{kind}-{whose}" in read(args.out) or left < 10:
            continue
        command = [sys.executable, __file__, "--out", str(args.out), "--steps", str(args.steps)]
        command += ["--size", args.size, "--configs", str(args.configs), "--child", kind, whose]
        try:
            done = subprocess.run(command, timeout=left, stderr=subprocess.PIPE, text=True)
        except subprocess.TimeoutExpired:
            print(f"{kind} {whose}: not done when the time was up: call again")
            continue
        if done.returncode:
            status = 1
            print(f"{kind} {whose}: failed:\n{done.stderr[-1500:]}")
    text = table(args.out)
    (args.out / "table.txt").write_text(text)
    print(text)
    return status


if __name__ == "__main__":
    sys.exit(main())
