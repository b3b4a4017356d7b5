"""The faults that reached users, numbered from 1: what each was, and how a deliberate fault
reproduces it. Or which check shows it instead; then no fault has its number. From 37 on they are
threads of 2026 in the order of their discovery."""

BUGS = {
    1: (
        "gate of head 0 read for every head in the backward pre-process, and the sequence"
        " offset missing",
        "two faults, one each",
    ),
    2: ("M chain rounded to bf16 between chunks", ""),
    3: ("M chain and merge through truncating tf32", "two faults, one each"),
    4: ("merged initial state lost between forward and backward", ""),
    5: ("compressed state put back after the recomputation instead of before", ""),
    6: ("half of the V columns of the merge never written", ""),
    7: ("cu_seqlens divided by the number of ranks instead of cut", ""),
    8: ("zigzag shards fed to a contiguous kernel", ""),
    9: ("state stored [V,K] and read [K,V]", ""),
    10: ("exp2 applied to a natural-log gate", ""),
    11: ("linear gate taken for a log gate", ""),
    12: ("decay to the chunk end taken from another token", ""),
    13: ("triangular inverse by Neumann series fails on nearly equal keys", ""),
    14: ("inverse by doubling loses digits", ""),
    15: (
        "an inverse that is large because the problem is ill-conditioned",
        "not a kernel fault: nothing to switch on. The case ill-conditioned has such an "
        "inverse and must pass, with its condition in the record",
    ),
    16: ("exponent span of exp(-cumsum) over a chunk", "two faults: with NaN, and clamped without"),
    17: (
        "compiler version breaks dbeta and dg only",
        "which instructions went wrong is not known: a stand-in damages the same two tensors",
    ),
    18: (
        "miscompiled chunk-64 kernel",
        "which instructions went wrong is not known: a stand-in damages the same two tensors",
    ),
    19: ("int32 offsets", "the simulation wraps at 2^14 entries, so that small problems show it"),
    20: (
        "grid axis above 65,535",
        "the simulation stops after 2 (sequence, head) pairs, so that small problems show it",
    ),
    21: ("tail of a partial chunk not masked", ""),
    22: ("uninitialised accumulator when there is no gate", ""),
    23: ("boundary term of dg missing", ""),
    24: ("diagonal of the pair terms cancelled in tf32", ""),
    25: (
        "L2-norm backward from the rounded output",
        "in base bf16 the normalised rows are stored in bf16, as FLA does: there it is "
        "the policy, not a fault",
    ),
    26: ("decay rounded to bf16", ""),
    27: (
        "race in shared memory",
        "arithmetic has no race: every third run of the simulation stands for the unlucky one",
    ),
    28: (
        "run-to-run differences",
        "below every bound; seen by the bitwise comparison of repeated runs",
    ),
    29: ("carried state stored in bf16 whatever was asked", ""),
    30: ("a later token's gate leaks into earlier outputs through an anchor", ""),
    31: ("merge starts at the nearest rank instead of the farthest", ""),
    32: ("forward pre-process takes the first local sub-sequence instead of the last", ""),
    33: ("state decayed before it is used in u - w S", ""),
    34: ("halo of the convolution leaks into a sequence that starts inside the rank", ""),
    35: ("carried state scaled by 0.99 at one rank boundary", ""),
    36: ("A_log and dt_bias gradients left as per-rank partial sums", ""),
    37: (
        "gradient of strong gates cancelled, A_log and dt_bias with it; gradients behind "
        "cu_seqlens[-1] unwritten",
        "QwenLM/FlashQLA#28: the fault of 24. Cases end where their last sequence does; "
        "what a subject leaves unwritten of its arrays fails",
    ),
    38: ("dbeta recovered by dividing by beta", ""),
    39: ("v - k S with k S rounded to bf16 first", ""),
    40: (
        "state decayed in an fp16 product",
        "the forward half: 65,536 becomes infinite. Gradients below 2^-24 are not made 0",
    ),
    41: ("readout stored in fp16", ""),
    42: (
        "beta rounded to bf16 after its sigmoid",
        "a fault where fp32 is claimed, below every bound where bf16 is",
    ),
    43: ("state in fp16 or bf16 between steps", "over 100,000 steps: deltaproof carry"),
    44: (
        "state in fp8 or int8 between steps",
        "int8 without feedback; the others, over 100,000 steps: deltaproof carry",
    ),
    45: ("speculative decoding: rejected tokens, gates of other tokens", "three faults"),
    46: ("cached state of another token or request, or never written", "nine faults"),
    47: ("padding of the last piece updates the state", "two faults"),
    48: (
        "NaN below one chunk, state layout of another kernel",
        "two faults: the layout is that of 59",
    ),
    49: (
        "results depend on the batch; trainer and rollout differ",
        "vllm-project/vllm#48613, #42960, #45819, fla-org/flash-linear-attention#1003, "
        "meta-pytorch/attention-gym#338, PrimeIntellect-ai/prime-rl#3214: within the "
        "bounds of one run; deltaproof check --bitwise and differ show it",
    ),
    50: (
        "silent NaN from 1,024 blocks on",
        "the simulation has 8 of them, so that small problems show it; at size: check --tokens",
    ),
    51: (
        "gradients of a convolution in pieces shorter than W - 1",
        "pieces are ranks; the convolution's own final state is no tensor here",
    ),
    52: ("context of the other ranks swallowed", ""),
    53: (
        "later gate leaks through the anchor, again",
        "fla-org/flash-linear-attention#1240, #1244: the fault of 30",
    ),
    54: (
        "NaN at lower bound -5, at head width 32, in gradients of a chunked KDA",
        "flashserve/flash-linear-attention-npu#448, NVIDIA/cudnn-frontend#994, "
        "huggingface/transformers#48455: the fault of 16 for the first; cases have widths"
        " from 16 to 128 and gradients",
    ),
    55: ("strides ignored, padded rows read", "padding of 8 numbers a row, read as 0"),
    56: ("fp32 gate stored in 16 bit", ""),
    57: (
        "Neumann inverse on nearly equal keys, again",
        "NVIDIA/cudnn-frontend#1124: the fault of 13",
    ),
    58: (
        "gradient of saturated gates looks wrong and is not",
        "ml-explore/mlx-lm#1389: not a kernel fault. The case gate-saturated must pass",
    ),
    59: ("transposed state handed to one of two decode kernels", ""),
    60: (
        "saturated gate gives 0 times infinity; A_log optional",
        "fla-org/flash-linear-attention#1107: gate-no-params runs without A_log",
    ),
}
