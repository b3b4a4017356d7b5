#include "fault.h"

#include <string.h>

const dp_fault_info dp_faults[DP_NFAULTS] = {
    [DP_FAULT_NONE] = {"none", "", "", ""},
    [DP_FAULT_MERGE_NEAREST_FIRST] = {"merge-nearest-first", "merge", "merges start at the nearest rank", "a printed description of the merge; needs 3 ranks to show"},
    [DP_FAULT_FWD_FIRST_SUBSEQ] = {"fwd-first-subseq", "pre_process_fwd", "forward pre-process takes the first local sub-sequence", "a printed description of the pre-process"},
    [DP_FAULT_BWD_LAST_SUBSEQ] = {"bwd-last-subseq", "pre_process_bwd", "backward pre-process takes the last local sub-sequence", "mirror of fwd-first-subseq"},
    [DP_FAULT_DECAY_BEFORE_USE] = {"decay-before-use", "state_fwd", "the state is decayed before it is used in u - w S", "printed stage listings; invisible at strong decay"},
    [DP_FAULT_GATE_OF_HEAD0] = {"gate-of-head0", "pre_process_bwd", "the backward pre-process reads the gate of head 0 for every head", "fla-org/flash-linear-attention#1115, #781"},
    [DP_FAULT_LAST_INDEX] = {"last-index", "wy", "the decay to the chunk end is taken from the token before the last", "flashinfer-ai/flashinfer#3156"},
    [DP_FAULT_TAIL_UNMASKED] = {"tail-unmasked", "wy", "a partial last chunk takes in the tokens behind its end", "fla-org/flash-linear-attention#794"},
    [DP_FAULT_CHAIN_BF16] = {"chain-bf16", "pre_process_fwd", "the M chain is rounded to bf16 between chunks whatever was asked", "fla-org/flash-linear-attention#740"},
    [DP_FAULT_CHAIN_TF32RZ] = {"chain-tf32rz", "pre_process_fwd", "the M chain runs through truncated tf32 whatever was asked", "fla-org/flash-linear-attention#1180"},
    [DP_FAULT_STATE_LOST] = {"state-lost", "recompute", "the merged initial state is lost between forward and backward", "fla-org/flash-linear-attention, tests/context_parallel/debug.md"},
    [DP_FAULT_STATE_LATE] = {"state-late", "recompute", "the compressed state is put back after the recomputation of ranks with several sub-sequences", "the same file"},
    [DP_FAULT_MERGE_HALF_V] = {"merge-half-v", "merge_fwd", "the upper half of the V columns of the merge is never written", "the same file"},
    [DP_FAULT_STATE_TRANSPOSED] = {"state-transposed", "merge_fwd", "the merged state is stored [V,K] and read [K,V]", "vllm-project/vllm#41292"},
    [DP_FAULT_EXP2_GATE] = {"exp2-gate", "gate", "exp2 applied to a natural-log gate", "sgl-project/sglang#31904"},
    [DP_FAULT_MERGE_SCALED] = {"merge-scaled", "merge_fwd", "the state carried over the last rank boundary is scaled by 0.99", "passed a whole-tensor cosine > 0.9999"},
    [DP_FAULT_GATE_GRAD_PARTIAL] = {"gate-grad-partial", "gate_bwd", "dA_log and ddt_bias stay partial sums of one rank", "math.md l, trap 10"},
    [DP_FAULT_DG_NO_BOUNDARY] = {"dg-no-boundary", "intra_bwd", "the chunk-end term of dg is missing", "fla-org/flash-linear-attention#889, #924"},
};

int dp_fault_find(const char *name) {
    for (int i = 0; i < DP_NFAULTS; i++)
        if (!strcmp(dp_faults[i].name, name)) return i;
    return -1;
}
