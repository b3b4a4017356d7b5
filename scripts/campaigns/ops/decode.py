#!/usr/bin/env python3
"""A decode loop of transformers' Qwen3-Next code, random weights, with deltaproof.ops.

    python3 scripts/campaigns/ops/decode.py [--out FILE] [--steps 128] [--size small]

Prompts are read in one call, then tokens come one by one, greedily, from transformers' cache. Three
runs: `torch` (transformers' own functions in PyTorch), `fla`, `ours` (chunk_gated_delta_rule for
prompts, fused_recurrent_gated_delta_rule for each token). The second and third read the tokens
that the first chose, so that logits compare token by token. Printed: how far logits are from those
of `torch` in fp32, of the largest, how many tokens would be chosen alike, and milliseconds. Without
a device: --size tiny, without fla. FLA's kernels choose between two configurations each."""

import argparse
import inspect
import time
from pathlib import Path

import torch
from compiling import keep
from rows import add

ON_DEVICE = torch.cuda.is_available()
DEVICE = "cuda" if ON_DEVICE else "cpu"
SIZES = {
    "small": {"hidden": 1024, "layers": 8, "heads": 16, "dim": 128, "B": 16, "prompt": 1024},
    "tiny": {"hidden": 64, "layers": 4, "heads": 2, "dim": 32, "B": 2, "prompt": 70},
}


def model_of(size):
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(1)
    config = Qwen3NextConfig(
        vocab_size=4096, hidden_size=size["hidden"], intermediate_size=2 * size["hidden"],
        num_hidden_layers=size["layers"], num_attention_heads=8, num_key_value_heads=2,
        head_dim=64, linear_num_key_heads=size["heads"] // 2, linear_num_value_heads=size["heads"],
        linear_key_head_dim=size["dim"], linear_value_head_dim=size["dim"], num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=size["hidden"] // 2,
        shared_expert_intermediate_size=size["hidden"] // 2,
    )  # fmt: skip
    return Qwen3NextForCausalLM(config).eval().to(DEVICE)


def functions(whose, module):
    """(chunk, recurrent) for `module`, transformers' code of Qwen3-Next."""
    names = "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"
    if whose == "torch":
        return tuple(getattr(vars(module)[n], "__wrapped__", vars(module)[n]) for n in names)
    if whose == "fla":
        from fla.ops.gated_delta_rule import (
            chunk_gated_delta_rule,
            fused_recurrent_gated_delta_rule,
        )
    else:
        from deltaproof.ops import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
    return chunk_gated_delta_rule, fused_recurrent_gated_delta_rule


def taking(function):
    """Without the words that it does not know."""
    known = inspect.signature(function).parameters

    def called(*args, **kwargs):
        return function(*args, **{n: x for n, x in kwargs.items() if n in known})

    return called


def wait():
    if ON_DEVICE:
        torch.cuda.synchronize()
    return time.perf_counter()


@torch.no_grad()
def decode(model, prompt, steps, given=None):
    """Logits [steps, B, vocabulary], the tokens chosen, ms of the prompt and of a token."""
    cache, ids, logits, tokens, times = None, prompt, [], [], []
    for n in range(steps):
        start = wait()
        out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        times.append((wait() - start) * 1e3)
        cache = out.past_key_values
        logits.append(out.logits[:, -1].float())
        tokens.append(logits[-1].argmax(-1))
        ids = (tokens[-1] if given is None else given[n]).unsqueeze(1)
    later = sorted(times[1:])
    return torch.stack(logits), torch.stack(tokens), times[0], later[len(later) // 2]


def main():
    a = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    a.add_argument("--out", type=Path, help="file that rows are added to")
    a.add_argument("--steps", type=int, default=128)
    a.add_argument("--size", choices=SIZES, default="small")
    args = a.parse_args()
    from transformers import __version__
    from transformers.models.qwen3_next import modeling_qwen3_next as module

    size = SIZES[args.size]
    model = model_of(size)
    prompt = torch.randint(4096, (size["B"], size["prompt"]), device=DEVICE)
    if ON_DEVICE:
        keep(2)
    runs = ("torch", "fla", "ours") if ON_DEVICE else ("torch", "ours")
    sides = {whose: tuple(map(taking, functions(whose, module))) for whose in runs}

    def turn(whose):
        module.torch_chunk_gated_delta_rule, module.torch_recurrent_gated_delta_rule = sides[whose]

    turn("torch")
    truth, chosen, *_ = decode(model, prompt, args.steps)
    name = torch.cuda.get_device_name() if ON_DEVICE else "CPU"
    add(
        args.out,
        f"{name}, PyTorch {torch.__version__}, transformers {__version__}; {size['B']} prompts of "
        f"{size['prompt']} tokens, then {args.steps} tokens each; {size['layers']} layers",
    )
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype)
        for whose in runs:
            turn(whose)
            try:
                decode(model, prompt, 3, chosen)
                logits, tokens, first, each = decode(model, prompt, args.steps, chosen)
            except Exception as e:
                why = str(e).splitlines()[0][:90]
                add(args.out, f"{dtype} {whose}: {type(e).__name__}: {why}")
                continue
            off = ((logits - truth).abs().max() / truth.abs().max()).item()
            alike = (tokens == chosen).float().mean().item()
            add(
                args.out,
                f"{str(dtype)[6:]:9} {whose:6} logits off by {off:.1e}, {alike:7.2%} of tokens "
                f"alike; prompt {first:8.2f} ms, a token {each:7.3f} ms",
            )


if __name__ == "__main__":
    main()
