"""Names of the public kernels, and designs from their sources and papers: chunk lengths, gated
operands, tensors stored in bf16.

FlashKDA keeps its state in bf16 (docs/20260420-flashkda-v1-deep-dive.md, section 3). It multiplies
in bf16 by decays in bf16 (csrc/smxx/fwd_kernel1.cuh: decay_apply). The Hopper forward of cuDNN
forms scores from gated operands in chunks of 16 (kda_fused_sm90.cu). Both make the key that writes
the state of the rounded one of the scores. Standard library only.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Named:
    name: str
    project: str
    op: str  # which recurrence: kda or gdn
    claims: dict  # metadata of the output file: base, design


KERNELS = (
    Named("fla-chunk-kda", "flash-linear-attention", "kda", {"base": "bf16"}),
    Named(
        "fla-fused-recurrent-kda",
        "flash-linear-attention",
        "kda",
        {"base": "fp32", "design": "recurrent,out=bf16"},
    ),
    Named("fla-chunk-gdn", "flash-linear-attention", "gdn", {"base": "bf16"}),
    Named("fla-chunk-gdn-forward", "flash-linear-attention", "gdn", {"base": "bf16"}),
    Named("fla-chunk-gdn2", "flash-linear-attention", "gdn2", {"base": "bf16"}),
    Named(
        "fla-fused-recurrent-gdn2",
        "flash-linear-attention",
        "gdn2",
        {"base": "fp32", "design": "recurrent,out=bf16"},
    ),
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
