#!/usr/bin/env python3
"""Dump inputs and outputs of a PyTorch function as safetensors, for `deltaproof judge`.

Two uses:

  * In any program:    from fla_dump import dump; dump(my_kernel, inputs, "in.safetensors",
                       "out.safetensors", grads=("q", "k"), do=do)
  * As a command, for chunk_kda of flash-linear-attention (FLA) on one or several GPUs, and where
    g has one number a head for chunk_gated_delta_rule:

        python3 fla_dump.py IN.safetensors OUT.safetensors
        torchrun --nproc-per-node 4 fla_dump.py IN.safetensors OUT.safetensors \\
            (scripts/campaigns/peers/run_fla.sh does it and judges)

    More processes than GPUs share them; they then talk through gloo, as NCCL takes one process a
    GPU. It NEEDS A MACHINE WITH CUDA GPUs, PyTorch, safetensors AND FLA (pip install
    flash-linear-attention); nothing else of deltaproof does. IN is read; its
    first axis is split over the processes as FLA splits a sequence over ranks; OUT gets o and all
    gradients of the whole sequence, and from several processes what they hand to each other: M, H,
    S_in, dM, dH, dS_out of every rank (deltaproof/exchanges.py).
"""

import argparse
import os
import sys

import torch
from safetensors import safe_open
from safetensors.torch import save_file


def save(path, tensors, metadata=None):
    """Write {name: tensor} as safetensors, by rename, so there is never half a file."""
    copies = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    save_file(
        copies, f"{path}.tmp", {str(k): str(v) for k, v in metadata.items()} if metadata else None
    )
    os.replace(f"{path}.tmp", path)


def load(path):
    """({name: tensor}, metadata) of a safetensors file."""
    with safe_open(path, framework="pt") as f:
        names = f.keys()  # f itself is no iterable
        return {name: f.get_tensor(name) for name in names}, dict(f.metadata() or {})


def dump(function, inputs, in_path, out_path, do=None, dht=None, grads=(), metadata=None):
    """Call function(**inputs) -> o or (o, final_state). Write its inputs and results, and the
    gradients of the inputs named in grads (they need do, the gradient of o). The metadata are gate,
    beta, l2norm, scale ... as `deltaproof judge --help` names them. Returns the written outputs."""
    given = {k: v.detach().clone().requires_grad_(k in grads) for k, v in inputs.items()}
    result = function(**given)
    o, state = result if isinstance(result, tuple) else (result, None)
    if grads:
        got = (o,) if dht is None else (o, state)
        torch.autograd.backward(got, (do,) if dht is None else (do, dht))
    out = {"o": o} | ({} if state is None else {"final_state": state})
    out |= {"dh0" if k == "initial_state" else f"d{k}": given[k].grad for k in grads}
    extra = {k: v for k, v in (("do", do), ("dht", dht)) if v is not None and grads}
    save(in_path, dict(inputs) | extra, metadata)
    save(out_path, out)
    return out


# ---- FLA's chunk_kda, over the processes that torchrun started
# ---------------------------------------------------------------------

TOKENS = ("q", "k", "v", "g", "beta", "b", "w", "do")  # b, w: of GDN-2
GRADIENTS = {"initial_state": "dh0", "b": "derase", "w": "dwrite"}  # others: d and the name


def with_batch(t, T, want):
    """[T,K], [T,H,K], [1,T,H,K] -> [1,T,H,K] for want = 3; [T], [T,H] -> [1,T,H] for 2."""
    t = t.reshape(t.shape[1:]) if t.dim() > want and t.shape[0] == 1 and T != 1 else t
    return (t.unsqueeze(1) if t.dim() < want else t).unsqueeze(0)


def batched(tensors, T):
    """Arrays of tokens with a batch axis. A gate as wide as beta is one number a head."""
    given = {n: tensors[n] for n in TOKENS if n in tensors}
    beta = given["beta"].dim() if "beta" in given else 0
    return {n: with_batch(t, T, 2 + (t.dim() > beta)) for n, t in given.items()}


def flags(metadata):
    """Arguments of chunk_kda for the metadata that `deltaproof judge` reads."""
    squeeze = {k: v.replace(" ", "") for k, v in metadata.items()}
    gate, beta, norm = (
        squeeze.get("gate", ""),
        squeeze.get("beta", ""),
        squeeze.get("l2norm", squeeze.get("qk", "")),
    )
    raw_gate = "softplus" in gate or "lower_bound" in gate
    out = {"use_gate_in_kernel": raw_gate}
    if "sigmoid" in beta:
        out |= {
            "use_beta_sigmoid_in_kernel": True,
            "allow_neg_eigval": beta in ("sigmoid2", "2*sigmoid(beta)"),
        }
    out |= {
        "use_qk_l2norm_in_kernel": norm in ("1", "yes", "l2norminsidekernel"),
    }
    if "lower_bound" in gate:
        out |= {"safe_gate": True, "lower_bound": float(squeeze["lower_bound"])}
    if squeeze.get("state_layout") == "vk":
        out["state_v_first"] = True
    if "scale" in squeeze:
        out["scale"] = float(squeeze["scale"])
    return out


def gather(t, ranks):
    """Parts of all ranks, along the token axis (1)."""
    if ranks == 1:
        return t
    parts = [torch.empty_like(t) for _ in range(ranks)]
    torch.distributed.all_gather(parts, t.contiguous())
    return torch.cat(parts, dim=1)


def reduce(t, ranks):
    """Sum over the ranks: each holds the part of a parameter's gradient that its tokens make."""
    if ranks > 1:
        torch.distributed.all_reduce(t)
    return t


def first_config_only():
    """Triton's autotuner takes the first configuration that runs instead of timing all of them:
    results do not depend on which, waiting does."""
    from triton.runtime.autotuner import Autotuner

    prune, bench = Autotuner.prune_configs, Autotuner._bench

    def prune_configs(self, *args, **kwargs):
        self.has_one = False
        return prune(self, *args, **kwargs)

    def _bench(self, *args, **kwargs):
        if self.has_one:
            return [float("inf")] * 3
        times = bench(self, *args, **kwargs)
        self.has_one = (times[0] if isinstance(times, (list, tuple)) else times) < float("inf")
        return times

    Autotuner.prune_configs, Autotuner._bench = prune_configs, _bench


def gather_flat():
    """gloo gathers [n] into [ranks n] alone; FLA gathers [1, ..] into [ranks, 1, ..], which is the
    same memory."""
    plain = torch.distributed.all_gather_into_tensor

    def all_gather_into_tensor(out, inp, *args, **kwargs):
        return plain(out.view(-1), inp.reshape(-1), *args, **kwargs)

    torch.distributed.all_gather_into_tensor = all_gather_into_tensor


def sequences(tensors, metadata, T):
    if "cu_seqlens" in tensors:
        return tensors["cu_seqlens"].long()
    return torch.tensor(
        [int(x) for x in metadata["cu_seqlens"].split(",")] if "cu_seqlens" in metadata else [0, T]
    )


def join_ranks():
    """(ranks, this one, its GPU chosen): those that torchrun started."""
    ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    gpus = torch.cuda.device_count()
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % gpus)
    if ranks > 1:
        shared = int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) > gpus
        torch.distributed.init_process_group("gloo" if shared else "nccl")
        if shared:
            gather_flat()
    return ranks, rank


def token_axis(tensors):
    """1 where the file has a batch axis of one sequence before its tokens, else 0."""
    if "beta" not in tensors:
        return int(tensors["q"].dim() > 3)
    beta = tensors["beta"]
    return int(beta.dim() > 1 and beta.shape[0] == 1)


def first_tokens(tensors, metadata, tokens, in_path):
    """(tensors, T), cut to the first `tokens` of them if that is not 0."""
    axis = token_axis(tensors)
    T = tensors["q"].shape[axis]
    if not tokens:
        return tensors, T
    if not 0 < tokens <= T or "cu_seqlens" in tensors or "cu_seqlens" in metadata:
        sys.exit(
            f"--tokens {tokens}: {in_path} has {T} tokens"
            + (" in packed sequences" if tokens <= T else "")
        )
    cut = {k: tensors[k].narrow(axis, 0, tokens) for k in TOKENS if k in tensors}
    return tensors | cut, tokens


def inputs_of(tensors, T, ranks, rank, s0):
    """Inputs of chunk_kda, of this rank's tokens, on its GPU; and do."""
    part = slice(rank * (T // ranks), (rank + 1) * (T // ranks))
    x = {k: t[:, part].contiguous().cuda() for k, t in batched(tensors, T).items()}
    x |= {k: tensors[k].flatten().cuda() for k in ("A_log", "dt_bias") if k in tensors}
    if s0 is not None:
        x["initial_state"] = s0.cuda()
    do = x.pop("do", None)
    for t in x.values():
        t.requires_grad_(do is not None)
    return x, do


def gradients_of(x, o, state, do, dht, ranks):
    torch.autograd.backward(
        (o,) if dht is None else (o, state), (do,) if dht is None else (do, dht.cuda())
    )
    return {
        GRADIENTS.get(k, f"d{k}"): (gather if k in TOKENS else reduce)(x[k].grad, ranks)
        for k in x
        if x[k].grad is not None
    }


def function_of(tensors):
    """FLA's function for these tensors and a gate of this width."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    if "b" in tensors:
        from fla.ops.gdn2 import chunk_gdn2

        return chunk_gdn2
    if tensors["g"].dim() > tensors["beta"].dim():
        return chunk_kda
    return chunk_gated_delta_rule


def run_fla(in_path, out_path, tokens=0, tune=False, chain=None):
    if not tune:
        first_config_only()
    import fla
    from fla.ops.cp import build_cp_context

    sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../../python"))
    from deltaproof.exchanges import exchanges

    ranks, rank = join_ranks()
    tensors, metadata = load(in_path)
    tensors, T = first_tokens(tensors, metadata, tokens, in_path)
    if T % ranks:
        sys.exit(f"{in_path}: {T} tokens do not split over {ranks} processes")
    s0, dht = (
        tensors.get(a, tensors.get(b)) for a, b in (("initial_state", "s0"), ("dht", "dstate"))
    )
    if ranks > 1 and (s0 is not None or dht is not None):
        sys.exit(
            f"{in_path}: FLA takes no initial state and gives no final state under context "
            "parallelism"
        )
    cu = sequences(tensors, metadata, T).cuda()
    x, do = inputs_of(tensors, T, ranks, rank, s0)
    where = {"cu_seqlens": cu, "output_final_state": True}
    if ranks > 1:
        context = build_cp_context(cu, group=torch.distributed.group.WORLD)
        where = {"cu_seqlens": context.cu_seqlens, "cp_context": context}
    function = function_of(tensors)
    with exchanges(chain=chain is not None) as kept:
        o, state = function(**x, **flags(metadata), **where)
        out = {"o": gather(o.detach(), ranks)}
        if state is not None:
            out["final_state"] = state
        if do is not None:
            out |= gradients_of(x, o, state, do, dht, ranks)
    if ranks > 1:
        out |= kept.of_all_ranks()
    if chain and rank == 0:
        save(f"{chain}.in.safetensors", {"factors": kept.chain["factors"]})
        save(f"{chain}.out.safetensors", {"M": kept.chain["M"]}, {"claim": "tf32x3"})
    if rank == 0:
        version = getattr(fla, "__version__", "unknown")
        said = {
            "producer": f"flash-linear-attention {version} {function.__name__}, "
            f"{torch.cuda.get_device_name()}",
            "ranks": ranks,
            "base": "bf16",
        }
        if "state_layout" in metadata:
            said["state_layout"] = metadata["state_layout"]
        save(out_path, out, said)
        print(f"wrote {out_path}: {' '.join(out)}")
    if ranks > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    a = argparse.ArgumentParser(
        description="Run chunk_kda or chunk_gated_delta_rule of FLA on IN and write OUT, for "
        "`deltaproof judge`. Needs CUDA GPUs, PyTorch and FLA.",
    )
    a.add_argument("inputs", metavar="IN.safetensors")
    a.add_argument("outputs", metavar="OUT.safetensors")
    a.add_argument(
        "--tokens",
        type=int,
        default=0,
        metavar="T",
        help="the first T tokens of IN alone (give `deltaproof judge` the same --tokens)",
    )
    a.add_argument(
        "--tune",
        action="store_true",
        help="let Triton time every configuration of a kernel (minutes), "
        "not take the first that runs",
    )
    a.add_argument(
        "--chain",
        metavar="STEM",
        help="write the chain of M of rank 0, head 0: STEM.in.safetensors, its factors, and "
        "STEM.out.safetensors, the kernel's M after each",
    )
    args = a.parse_args()
    run_fla(args.inputs, args.outputs, args.tokens, args.tune, args.chain)
