"""Names of the public kernels, and designs from their sources and papers: chunk lengths, gated
operands, tensors stored in bf16.

FlashKDA keeps its state in bf16 (docs/20260420-flashkda-v1-deep-dive.md, section 3). It multiplies
in bf16 by decays in bf16 (csrc/smxx/fwd_kernel1.cuh: decay_apply). The Hopper forward of cuDNN
forms scores from gated operands in chunks of 16 (kda_fused_sm90.cu). Both make the key that writes
the state of the rounded one of the scores. Triton's exp is ex2.approx of a rounded product, which
exp=fast declares. Standard library only.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Named:
    name: str
    project: str
    op: str  # which recurrence, by the word of case files
    claims: dict  # metadata of the output file: base, design


RECURRENT = {"base": "fp32", "design": "recurrent,exp=fast,out=bf16"}  # exp: 2^x of x log2 e
IN_FP32 = RECURRENT | {"design": RECURRENT["design"] + ",o=fp32"}  # as their queries are
FLA = (  # kernel after `fla-`, recurrence, claims
    ("chunk-kda", "kda", {"base": "bf16"}),
    ("fused-recurrent-kda", "kda", RECURRENT),
    ("chunk-gdn", "gdn", {"base": "bf16"}),
    ("chunk-gdn-forward", "gdn", {"base": "bf16"}),
    ("fused-recurrent-gdn", "gdn", RECURRENT),
    ("chunk-gdn2", "gdn2", {"base": "bf16"}),
    ("fused-recurrent-gdn2", "gdn2", RECURRENT),
    ("chunk-dplr", "dplr", {"base": "bf16"}),
    ("chunk-dplr-safe", "dplr", {"base": "bf16"}),
    ("fused-recurrent-dplr", "dplr", RECURRENT),
    ("chunk-rwkv7", "rwkv7", {"base": "bf16"}),
    ("fused-recurrent-rwkv7", "rwkv7", RECURRENT),
    ("chunk-comba-forward", "comba", {"base": "bf16"}),
    ("fused-recurrent-comba", "comba", RECURRENT),
    ("chunk-oja", "oja", {"base": "bf16"}),
    ("fused-recurrent-oja", "oja", RECURRENT),
    ("chunk-gla", "gla", {"base": "bf16"}),
    ("fused-recurrent-gla", "gla", IN_FP32),
    ("chunk-ssd-forward", "ssd", {"base": "bf16"}),
    ("fused-recurrent-ssd", "ssd", IN_FP32),
    ("chunk-deltaproduct-forward", "gated-deltaproduct", {"base": "bf16"}),
)
KERNELS = (
    *(Named(f"fla-{name}", "flash-linear-attention", op, claims) for name, op, claims in FLA),
    Named("flashqla-gdn", "FlashQLA", "gdn", {"base": "bf16"}),
    Named("flashqla-gdn-forward", "FlashQLA", "gdn", {"base": "bf16"}),
    Named(
        "cudnn-hopper-forward",
        "cuDNN frontend",
        "kda",
        {"base": "bf16", "design": "chunk=16,scores=gated,keys=scored"},
    ),
    Named(
        "cudnn-hopper-dsl-forward",
        "cuDNN frontend",
        "kda",
        {"base": "bf16", "design": "chunk=16,scores=gated,keys=scored"},
    ),
    Named("cudnn-hopper-backward", "cuDNN frontend", "kda", {"base": "bf16"}),
    Named(
        "flashkda-forward",
        "FlashKDA",
        "kda",
        {"base": "bf16", "design": "chunk=16,decays=bf16,scores=gated,keys=scored,state=bf16"},
    ),
    Named("flashinfer-gdn-forward", "FlashInfer", "gdn", {"base": "bf16"}),
    Named("flashinfer-cp-gdn-forward", "FlashInfer", "gdn", {"base": "bf16"}),
    Named("jla-kda", "jax-linear-attention", "kda", {"base": "bf16"}),
    Named("jla-gdn", "jax-linear-attention", "gdn", {"base": "bf16"}),
)
