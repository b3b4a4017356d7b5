/* The table of deliberate faults (fault.h). */
#include "fault.h"
#include "harness/case/operations.h"
#include "ref/vocabulary/text.h"

#include <string.h>

#define FLA "fla-org/flash-linear-attention"
#define SPECULATIVE "vllm-project/vllm#39273, #53912, #51812, #45477"
#define HALF_STATES \
    "NVIDIA/TensorRT-Model-Connect#725, vllm-project/tpu-inference#2408, kekzl/imp#1776"
#define INT8_STATES "vllm-project/vllm#55196, sgl-project/sglang#40706, #28185"
#define WRONG_TOKEN "sgl-project/sglang#37836, #39342, vllm-project/vllm#52627"
#define DEBUG_MD FLA ", tests/context_parallel/debug.md"

const dp_fault_info dp_faults[DP_NFAULTS] = {
    [DP_FAULT_NONE] = {"none", 0, "", "", ""},
    [DP_FAULT_MERGE_NEAREST_FIRST] = {"merge-nearest-first", 31, "merge_fwd",
                                      "merges start at the nearest rank",
                                      "a printed description of the merge; needs 3 ranks to show"},
    [DP_FAULT_FWD_FIRST_SUBSEQ] = {"fwd-first-subseq", 32, "pre_process_fwd",
                                   "forward pre-process takes the first local sub-sequence",
                                   "a printed description of the pre-process"},
    [DP_FAULT_BWD_LAST_SUBSEQ] = {"bwd-last-subseq", 0, "pre_process_bwd",
                                  "backward pre-process takes the last local sub-sequence",
                                  "mirror of fwd-first-subseq"},
    [DP_FAULT_DECAY_BEFORE_USE] = {"decay-before-use", 33, "state_fwd",
                                   "the state is decayed before it is used in u - w S",
                                   "printed stage listings; invisible at strong decay"},
    [DP_FAULT_GATE_OF_HEAD0] = {"gate-of-head0", 1, "pre_process_bwd",
                                "the backward pre-process reads the gate of head 0 for every head",
                                FLA "#1115, #781"},
    [DP_FAULT_LAST_INDEX] = {"last-index", 12, "wy",
                             "the decay to the chunk end is taken from the token before the last",
                             "flashinfer-ai/flashinfer#3156"},
    [DP_FAULT_TAIL_UNMASKED] = {"tail-unmasked", 21, "wy",
                                "a partial last chunk takes in the tokens behind its end",
                                FLA "#794"},
    [DP_FAULT_CHAIN_BF16] = {"chain-bf16", 2, "pre_process_fwd",
                             "the M chain is rounded to bf16 between chunks whatever was asked",
                             FLA "#740", .kind = DP_FAULTS_OF_CHAIN},
    [DP_FAULT_CHAIN_TF32RZ] = {"chain-tf32rz", 3, "pre_process_fwd",
                               "the M chain runs through truncated tf32 whatever was asked",
                               FLA "#1180", .kind = DP_FAULTS_OF_CHAIN},
    [DP_FAULT_STATE_LOST] = {"state-lost", 4, "recompute",
                             "the merged initial state is lost between forward and backward",
                             DEBUG_MD},
    [DP_FAULT_STATE_LATE] = {"state-late", 5, "recompute",
                             "the compressed state is put back after the recomputation of ranks "
                             "with several sub-sequences",
                             DEBUG_MD},
    [DP_FAULT_MERGE_HALF_V] = {"merge-half-v", 6, "merge_fwd",
                               "the upper half of the V columns of the merge is never written",
                               DEBUG_MD},
    [DP_FAULT_STATE_TRANSPOSED] = {"state-transposed", 9, "merge_fwd",
                                   "the merged state is stored [V,K] and read [K,V]",
                                   "vllm-project/vllm#41292"},
    [DP_FAULT_EXP2_GATE] = {"exp2-gate", 10, "gate", "exp2 applied to a natural-log gate",
                            "sgl-project/sglang#31904"},
    [DP_FAULT_MERGE_SCALED] = {"merge-scaled", 35, "merge_fwd",
                               "the state carried over the last rank boundary is scaled by 0.99",
                               "passed a whole-tensor cosine > 0.9999"},
    [DP_FAULT_GATE_GRAD_PARTIAL] = {"gate-grad-partial", 36, "gate_bwd",
                                    "dA_log and ddt_bias stay partial sums of one rank",
                                    "math.md l, trap 10"},
    [DP_FAULT_DG_NO_BOUNDARY] = {"dg-no-boundary", 23, "intra_bwd",
                                 "the chunk-end term of dg is missing", FLA "#889, #924"},
    [DP_FAULT_GATE_NO_OFFSET] =
        {"gate-no-offset", 1, "pre_process_bwd",
         "the backward pre-process reads the gate of rank 0's tokens on every rank",
         FLA "#1115, #781"},
    [DP_FAULT_MERGE_TF32RZ] = {"merge-tf32rz", 3, "merge_fwd",
                               "the merge runs through truncated tf32", FLA "#1180"},
    [DP_FAULT_CU_DIVIDED] = {"cu-divided", 7, "intra",
                             "cu_seqlens are divided by the number of ranks instead of cut",
                             "ISEEKYAN/Megatron-LM#111", .even = 1},
    [DP_FAULT_ZIGZAG] = {"zigzag", 8, "gate",
                         "ranks hold zigzag shards that the kernel takes for contiguous ones",
                         "radixark/miles#885", .even = 1},
    [DP_FAULT_LINEAR_GATE] = {"linear-gate", 11, "gate", "a linear gate is taken for a log gate",
                              "flashinfer-ai/flashinfer#2490"},
    [DP_FAULT_NEUMANN_INVERSE] = {"neumann-inverse", 13, "solve",
                                  "the triangular inverse is summed as a Neumann series in fp32",
                                  "NVIDIA/cudnn-frontend#1051, #1124, vllm-project/FlashKDA#10"},
    [DP_FAULT_DOUBLING_INVERSE] =
        {"doubling-inverse", 14, "solve",
         "the triangular inverse is a product (I - N)(I + N^2)(I + N^4).. in fp32",
         "tenstorrent/tt-metal#54813"},
    [DP_FAULT_FACTORED_EXP] =
        {"factored-exp", 16, "intra",
         "pair decays are formed as exp(cumsum) exp(-cumsum) over a whole chunk in fp32",
         "NVIDIA/cudnn-frontend#1017, flashserve/flash-linear-attention-npu#448"},
    [DP_FAULT_FACTORED_EXP_CLAMPED] = {"factored-exp-clamped", 16, "intra",
                                       "the same with exponents clamped to 88, wrong without NaN",
                                       "NVIDIA/cudnn-frontend#1017"},
    [DP_FAULT_STALE_LANES] =
        {"stale-lanes", 17, "wy_bwd",
         "dbeta and dg of a chunk's last 16 tokens are those of 16 tokens before",
         FLA "#640 (stand-in: the compiler's doing is not known, its symptom is)"},
    [DP_FAULT_HALF_CHUNK] = {"half-chunk", 18, "wy_bwd",
                             "dk and dbeta of a chunk's second half are those of its first",
                             FLA
                             "#984 (stand-in: the compiler's doing is not known, its symptom is)"},
    [DP_FAULT_OFFSET_WRAPS] = {"offset-wraps", 19, "wy", "offsets into v wrap at 2^14 entries",
                               FLA "#911, #1082 (2^14 stands for 2^31)"},
    [DP_FAULT_GRID_AXIS] = {"grid-axis", 20, "output",
                            "(sequence, head) pairs from the third on are not computed",
                            FLA "#1077 (2 stands for 65,535)"},
    [DP_FAULT_STALE_ACCUMULATOR] =
        {"stale-accumulator", 22, "wy_bwd",
         "without a gate dk and dbeta start from what the chunk before left", FLA "#863"},
    [DP_FAULT_DIAGONAL_TF32] =
        {"diagonal-tf32", 24, "intra_bwd",
         "the diagonal of dg's pair terms is cancelled in tf32 instead of left out",
         "meta-pytorch/attention-gym#461, QwenLM/FlashQLA#28"},
    [DP_FAULT_L2_ROUNDED] = {"l2-rounded", 25, "gate_bwd",
                             "the L2 norm's backward reads its output rounded to bf16",
                             "meta-pytorch/attention-gym#463"},
    [DP_FAULT_DECAY_BF16] = {"decay-bf16", 26, "gate", "the decay is rounded to bf16",
                             "osaurus-ai/vmlx-swift#433"},
    [DP_FAULT_RACE] =
        {"race", 27, "state_fwd",
         "every third run the last head's last chunk overwrites half of v_new too early",
         "vllm-project/vllm-xpu-kernels#411", .kind = DP_FAULTS_OF_REPEATS},
    [DP_FAULT_ORDER_BY_RUN] = {"order-by-run", 28, "intra_bwd/gate_bwd",
                               "heads and ranks add up in an order that changes from run to run",
                               "flashinfer-ai/flashinfer#4704", .kind = DP_FAULTS_OF_REPEATS},
    [DP_FAULT_STATE_BF16] =
        {"state-bf16", 29, "state_fwd",
         "the carried state is stored in bf16 after every chunk whatever was asked",
         "NVIDIA/TensorRT-LLM#14600"},
    [DP_FAULT_DROP_CHANNEL_SUM] = {"drop-channel-sum", 0, "state_fwd",
                                   "a state is dropped after a chunk whose largest channel sum of "
                                   "gates is below 2^-12",
                                   "NVIDIA/cudnn-frontend 1.32, kda_fused_sm90.cu, split_k.py"},
    [DP_FAULT_DROP_HORIZON] = {"drop-horizon", 0, "state_fwd",
                               "a state is dropped after a chunk over which the largest gates of "
                               "its tokens sum to below 2^-12; right under --claim-drop 12",
                               "FlashQLA's warm-up (one gate a head)"},
    [DP_FAULT_ANCHOR_LEAK] =
        {"anchor-leak", 30, "intra",
         "pair decays go through an anchor at the chunk's end, so later gates reach earlier tokens",
         FLA "#1242, #1240, #1244"},
    [DP_FAULT_GATE_BF16] = {"gate-bf16", 56, "gate", "the log gate is stored in bf16",
                            "NVIDIA/cudnn-frontend#1130"},
    [DP_FAULT_BETA_BF16] = {"beta-bf16", 42, "gate", "beta is rounded to bf16 after its sigmoid",
                            "vllm-project/vllm#53877, #51779, #51797, sgl-project/sglang#36014"},
    [DP_FAULT_SHORT_NAN] = {"short-nan", 48, "intra",
                            "the scores of a sequence shorter than a chunk are NaN",
                            "ROCm/ATOM#1750"},
    [DP_FAULT_BLOCKS_NAN] = {"blocks-nan", 50, "intra",
                             "the scores of (chunk, head) blocks from the ninth on are NaN",
                             FLA "#913 (8 stands for 1,024)"},
    [DP_FAULT_STRIDE_IGNORED] = {"stride-ignored", 55, "wy",
                                 "rows of v are padded, and read as if they were not",
                                 "NVIDIA/cudnn-frontend#1056, #1061"},
    [DP_FAULT_CONTEXT_LOST] = {"context-lost", 52, "merge_fwd",
                               "every rank but the first starts from zero", FLA "#1004"},
    [DP_FAULT_RESIDUAL_BF16] =
        {"residual-bf16", 39, "state_fwd",
         "what the state holds of a value is rounded to bf16 before it is subtracted",
         "meta-pytorch/attention-gym, cudnn_fe/WORKLOG.md B6"},
    [DP_FAULT_STATE_FP16] = {"state-fp16", 40, "state_fwd",
                             "the carried state passes through fp16, infinite above 65,504",
                             "NVIDIA/cudnn-frontend#916, meta-pytorch/attention-gym#464"},
    [DP_FAULT_OUTPUT_FP16] = {"output-fp16", 41, "output",
                              "o passes through fp16 whatever was asked",
                              "vllm-project/vllm#54308, #54146"},
    [DP_FAULT_DBETA_DIVIDED] = {"dbeta-divided", 38, "wy_bwd",
                                "dbeta is recovered by dividing by beta: 0 where beta is 0",
                                "meta-pytorch/attention-gym, cudnn_fe/WORKLOG.md B7"},
    [DP_FAULT_SATURATED_NAN] = {"saturated-nan", 60, "gate_bwd",
                                "the gradient of a saturated raw gate is 0 times infinity",
                                FLA "#1007"},
    [DP_FAULT_ERASE_MEAN] = {"erase-mean", 0, "gate",
                             "all channels of a key erase by the mean of their gates, as by a beta",
                             "a kernel of KDA given GDN-2"},
    [DP_FAULT_ERASE_WRITES] = {"erase-writes", 0, "wy",
                               "the key that writes is gated like the one that erases",
                               "fla/ops/gdn2/wy_fast.py: kg is of k, not of b o k"},
    [DP_FAULT_DK_UNERASED] = {"dk-unerased", 0, "gate_bwd",
                              "what reaches dk through the erasing key is not gated by erase",
                              "the product rule of b o k"},
    [DP_FAULT_TURNS_MISTAKEN] = {"turns-mistaken", 0, "intra",
                                 "keys of a token that should read one state read in turn, those "
                                 "that should read in turn read one",
                                 "math b: two recurrences that differ in one mask"},
    [DP_FAULT_READ_DECAYED] = {"read-decayed", 0, "gate", "lr_a reads the state after its decay",
                               "math b, i: as the delta rule does"},
    [DP_FAULT_READ_UNDECAYED] = {"read-undecayed", 0, "intra",
                                 "the residual of a key reads the state before its decay",
                                 "printed recurrences; fades as gates weaken"},
    [DP_FAULT_HALO_LEAK] = {"halo-leak", 34, "conv_fwd",
                            "the halo leaks into sequences that start inside the rank",
                            "a fault of halo exchanges; shows in the first W-1 tokens", .even = 1},
    [DP_FAULT_HALO_GRAD_LOST] = {"halo-grad-lost", 0, "conv_bwd",
                                 "gradients of the halo are not sent back to the ranks that own it",
                                 "math h; shows in dx of a rank's last W-1 tokens", .even = 1},
    [DP_FAULT_HALO_GRAD_SHIFTED] =
        {"halo-grad-shifted", 51, "conv_bwd",
         "gradients of the halo land W-1-L tokens late where a rank has L < W-1 tokens",
         FLA "#1140, #1141", .even = 1},
    [DP_FAULT_REJECTED_STAY] = {"rejected-stay", 45, "calls",
                                "tokens that a verify window rejects stay in the state",
                                SPECULATIVE},
    [DP_FAULT_ROLLBACK_EARLY] = {"rollback-early", 46, "calls",
                                 "the state goes back to the token before the last accepted one",
                                 WRONG_TOKEN},
    [DP_FAULT_ROLLBACK_LATE] = {"rollback-late", 46, "calls",
                                "the state goes back to the first rejected token", WRONG_TOKEN},
    [DP_FAULT_ROLLBACK_SKIPS] = {"rollback-skips", 0, "calls",
                                 "the first token after a rollback is not written to the state",
                                 "a fault of rollbacks; o of that token is right"},
    [DP_FAULT_SLOT_OF_OTHER] = {"slot-of-other", 46, "calls",
                                "a later call reads the state of the next sequence of the batch",
                                "sgl-project/sglang#37836, #39342"},
    [DP_FAULT_SLOT_TRANSPOSED] = {"slot-transposed", 59, "calls",
                                  "the state that calls hand on is stored [V,K] and read [K,V]",
                                  "vllm-project/vllm#41292, gittensor-ai-lab/sparkinfer#615"},
    [DP_FAULT_CALL_GATE] = {"call-gate", 45, "calls",
                            "the first token of a later call decays by the gates of the one before",
                            SPECULATIVE},
    [DP_FAULT_DRAFT_GATE] = {"draft-gate", 45, "calls",
                             "drafted tokens that are rejected decay by the gates of the last "
                             "accepted one; nothing after the window depends on it",
                             SPECULATIVE},
    [DP_FAULT_PADDING_WRITES] =
        {"padding-writes", 47, "calls",
         "a sequence that has ended writes its first token again in every call after",
         "huggingface/transformers#46873"},
    [DP_FAULT_SLOT_UNWRITTEN] = {"slot-unwritten", 46, "calls",
                                 "the last of several sequences never gets its state written",
                                 "sgl-project/sglang#39342, vllm-project/vllm#52627"},
    [DP_FAULT_SLOT_NEIGHBOUR] = {"slot-neighbour", 46, "calls",
                                 "the state is read from the slot behind the one that is named",
                                 WRONG_TOKEN},
    [DP_FAULT_SLOT_IN_PLACE] = {"slot-in-place", 46, "calls",
                                "the state is written to the slot that it was read from, though "
                                "another one is named",
                                "a fault of copies on write; prefixes and windows need the old "
                                "state"},
    [DP_FAULT_PADDING_LAST_SLOT] = {"padding-last-slot", 47, "calls",
                                    "the slot -1 of padding is taken for the last one of the pool",
                                    "an index from the end; huggingface/transformers#46873"},
    [DP_FAULT_PREFIX_OVERWRITTEN] = {"prefix-overwritten", 46, "calls",
                                     "the first sequence that goes on from the state of a shared "
                                     "prefix writes into it, and the "
                                     "others begin there",
                                     ""},
    [DP_FAULT_CONV_OF_OTHER] = {"conv-of-other", 46, "calls",
                                "a later call's convolutions begin from the inputs of the next "
                                "sequence of the batch",
                                "sgl-project/sglang#37836, #39342"},
    [DP_FAULT_CONV_ZEROED] = {"conv-zeroed", 0, "calls",
                              "every call's convolutions begin from zeros",
                              "a state of the recurrence is handed on, that of the convolution "
                              "is not"},
    [DP_FAULT_CONV_LATE] = {"conv-late", 46, "calls",
                            "a later call's convolutions begin from the inputs before the last "
                            "token",
                            WRONG_TOKEN},
    [DP_FAULT_KEPT_BF16] = {"kept-bf16", 43, "calls",
                            "the state is kept in bf16 between calls whatever was asked",
                            HALF_STATES},
    [DP_FAULT_KEPT_INT8] =
        {"kept-int8", 44, "calls",
         "the state is kept in int8 with a scale a row between calls, nothing fed back",
         INT8_STATES},
    [DP_FAULT_SCAN_MISSES_LEVEL] = {"scan-misses-level", 0, "merge_fwd",
                                    "a scan over ranks ends one distance early",
                                    "a loop to N / 2; needs 4 ranks to show", DP_EXCHANGE_SCAN},
    [DP_FAULT_SCAN_SWAPPED] = {"scan-swapped", 0, "merge_fwd",
                               "a scan over ranks composes the later pair before the earlier one",
                               "composition is not commutative", DP_EXCHANGE_SCAN},
    [DP_FAULT_SERIAL_LATE] = {"serial-late", 0, "merge_fwd",
                              "a rank hands on the state that came to it, not the one that it made",
                              "the send stands before the pass; needs 3 ranks to show",
                              DP_EXCHANGE_SERIAL},
    [DP_FAULT_HEADS_SWAPPED] = {"heads-swapped", 0, "output",
                                "the all-to-all gives rank 1 the outputs of two ranks' heads "
                                "interchanged",
                                "an order of ranks that both sides do not share", DP_EXCHANGE_HEADS,
                                .even = 1},
    [DP_FAULT_PAYLOAD_TRUNCATED] = {"payload-truncated", 0, "merge_fwd",
                                    "pairs are sent as the upper 16 bits of fp32, not rounded",
                                    "a cast by shifting", .payload = DP_PAYLOAD_BF16},
    [DP_FAULT_PAYLOAD_LOW_LOST] = {"payload-low-lost", 0, "merge_fwd",
                                   "of two bf16 for a number the second one never arrives",
                                   "a buffer half as long as what is sent",
                                   .payload = DP_PAYLOAD_BF16X2},
    [DP_FAULT_PAYLOAD_TWICE] = {"payload-twice", 0, "merge_fwd",
                                "M is rounded to bf16 before I is taken off and again behind it",
                                "a cast where M is stored; shows where M is nearly I",
                                .payload = DP_PAYLOAD_LESS_I},
    [DP_FAULT_RANK_LARGEST] = {"rank-largest", 0, "merge_fwd",
                               "of a low-rank M the largest singular value is left out",
                               "singular values in ascending order taken for descending ones",
                               .payload = DP_PAYLOAD_LOW_RANK},
    [DP_FAULT_PARTS_BY_RANK] = {"parts-by-rank", 0, "merge_fwd",
                                "parts are merged rank by rank, not in the order of their tokens",
                                "a merge over ranks that own several parts", .own = DP_OWN_ZIGZAG},
    [DP_FAULT_PART_FIRST_M] = {"part-first-m", 0, "merge_fwd",
                               "of a rank that owns several parts the merge applies M of the first "
                               "to all of them",
                               "one M a rank kept where there are several", .own = DP_OWN_ZIGZAG},
};

dp_payload dp_fault_payload(dp_fault f, dp_payload asked) {
    return dp_faults[f].payload ? dp_faults[f].payload : asked;
}

dp_exchange dp_fault_exchange(dp_fault f, dp_exchange asked) {
    return dp_faults[f].exchange ? dp_faults[f].exchange : asked;
}

dp_own dp_fault_own(dp_fault f, dp_own asked) { return asked ? asked : dp_faults[f].own; }

const dp_bug dp_bugs[DP_NBUGS + 1] = {
    [1] = {"gate of head 0 read for every head in the backward pre-process, and the sequence "
           "offset missing",
           "two faults, one each"},
    [2] = {"M chain rounded to bf16 between chunks", ""},
    [3] = {"M chain and merge through truncating tf32", "two faults, one each"},
    [4] = {"merged initial state lost between forward and backward", ""},
    [5] = {"compressed state put back after the recomputation instead of before", ""},
    [6] = {"half of the V columns of the merge never written", ""},
    [7] = {"cu_seqlens divided by the number of ranks instead of cut", ""},
    [8] = {"zigzag shards fed to a contiguous kernel", ""},
    [9] = {"state stored [V,K] and read [K,V]", ""},
    [10] = {"exp2 applied to a natural-log gate", ""},
    [11] = {"linear gate taken for a log gate", ""},
    [12] = {"decay to the chunk end taken from another token", ""},
    [13] = {"triangular inverse by Neumann series fails on nearly equal keys", ""},
    [14] = {"inverse by doubling loses digits", ""},
    [15] = {"an inverse that is large because the problem is ill-conditioned",
            "not a kernel fault: nothing to switch on. The case ill-conditioned has such an "
            "inverse and must pass, with its condition in the record"},
    [16] = {"exponent span of exp(-cumsum) over a chunk",
            "two faults: with NaN, and clamped without"},
    [17] = {"compiler version breaks dbeta and dg only",
            "which instructions went wrong is not known: a stand-in damages the same two tensors"},
    [18] = {"miscompiled chunk-64 kernel",
            "which instructions went wrong is not known: a stand-in damages the same two tensors"},
    [19] = {"int32 offsets",
            "the simulation wraps at 2^14 entries, so that small problems show it"},
    [20] = {"grid axis above 65,535",
            "the simulation stops after 2 (sequence, head) pairs, so that small problems show it"},
    [21] = {"tail of a partial chunk not masked", ""},
    [22] = {"uninitialised accumulator when there is no gate", ""},
    [23] = {"boundary term of dg missing", ""},
    [24] = {"diagonal of the pair terms cancelled in tf32", ""},
    [25] = {"L2-norm backward from the rounded output",
            "in base bf16 the normalised rows are stored in bf16, as FLA does: there it is the "
            "policy, not a fault"},
    [26] = {"decay rounded to bf16", ""},
    [27] = {"race in shared memory",
            "arithmetic has no race: every third run of the simulation stands for the unlucky one"},
    [28] = {"run-to-run differences",
            "below every bound; seen by the bitwise comparison of repeated runs"},
    [29] = {"carried state stored in bf16 whatever was asked", ""},
    [30] = {"a later token's gate leaks into earlier outputs through an anchor", ""},
    [31] = {"merge starts at the nearest rank instead of the farthest", ""},
    [32] = {"forward pre-process takes the first local sub-sequence instead of the last", ""},
    [33] = {"state decayed before it is used in u - w S", ""},
    [34] = {"halo of the convolution leaks into a sequence that starts inside the rank", ""},
    [35] = {"carried state scaled by 0.99 at one rank boundary", ""},
    [36] = {"A_log and dt_bias gradients left as per-rank partial sums", ""},
    [37] = {"gradient of strong gates cancelled, A_log and dt_bias with it; gradients behind "
            "cu_seqlens[-1] unwritten",
            "QwenLM/FlashQLA#28: the fault of 24. Cases end where their last sequence does; what a "
            "subject leaves unwritten of its arrays fails"},
    [38] = {"dbeta recovered by dividing by beta", ""},
    [39] = {"v - k S with k S rounded to bf16 first", ""},
    [40] = {"state decayed in an fp16 product",
            "the forward half: 65,536 becomes infinite. Gradients below 2^-24 are not made 0"},
    [41] = {"readout stored in fp16", ""},
    [42] = {"beta rounded to bf16 after its sigmoid",
            "a fault where fp32 is claimed, below every bound where bf16 is"},
    [43] = {"state in fp16 or bf16 between steps", "over 100,000 steps: deltaproof carry"},
    [44] = {"state in fp8 or int8 between steps",
            "int8 without feedback; the others, over 100,000 steps: deltaproof carry"},
    [45] = {"speculative decoding: rejected tokens, gates of other tokens", "three faults"},
    [46] = {"cached state of another token or request, or never written", "nine faults"},
    [47] = {"padding of the last piece updates the state", "two faults"},
    [48] = {"NaN below one chunk, state layout of another kernel",
            "two faults: the layout is that of 59"},
    [49] = {"results depend on the batch; trainer and rollout differ",
            "vllm-project/vllm#48613, #42960, #45819, fla-org/flash-linear-attention#1003, "
            "meta-pytorch/attention-gym#338, PrimeIntellect-ai/prime-rl#3214: within the bounds of "
            "one run; deltaproof check --bitwise and differ show it"},
    [50] = {"silent NaN from 1,024 blocks on", "the simulation has 8 of them, so that small "
                                               "problems show it; at size: check --tokens"},
    [51] = {"gradients of a convolution in pieces shorter than W - 1",
            "pieces are ranks; the convolution's own final state is no tensor here"},
    [52] = {"context of the other ranks swallowed", ""},
    [53] = {"later gate leaks through the anchor, again",
            "fla-org/flash-linear-attention#1240, #1244: the fault of 30"},
    [54] = {"NaN at lower bound -5, at head width 32, in gradients of a chunked KDA",
            "flashserve/flash-linear-attention-npu#448, NVIDIA/cudnn-frontend#994, "
            "huggingface/transformers#48455: the fault of 16 for the first; cases have widths from "
            "16 to 128 and gradients"},
    [55] = {"strides ignored, padded rows read", "padding of 8 numbers a row, read as 0"},
    [56] = {"fp32 gate stored in 16 bit", ""},
    [57] = {"Neumann inverse on nearly equal keys, again",
            "NVIDIA/cudnn-frontend#1124: the fault of 13"},
    [58] = {"gradient of saturated gates looks wrong and is not",
            "ml-explore/mlx-lm#1389: not a kernel fault. The case gate-saturated must pass"},
    [59] = {"transposed state handed to one of two decode kernels", ""},
    [60] = {"saturated gate gives 0 times infinity; A_log optional",
            "fla-org/flash-linear-attention#1107: gate-no-params runs without A_log"},
};

int dp_fault_find(const char *name) {
    for (int i = 0; i < DP_NFAULTS; i++)
        if (!strcmp(dp_faults[i].name, name)) return i;
    return -1;
}

unsigned dp_fault_kind(dp_fault f) {
    const char *stage = dp_faults[f].stage;
    if (!strcmp(stage, "calls")) return DP_FAULTS_OF_CALLS;
    if (!strncmp(stage, "conv_", 5)) return DP_FAULTS_OF_CONV;
    return dp_faults[f].kind ? dp_faults[f].kind : DP_FAULTS_OF_STAGES;
}

int dp_fault_of_conv(dp_fault f) { return dp_fault_kind(f) == DP_FAULTS_OF_CONV; }
int dp_fault_by_run(dp_fault f) { return dp_fault_kind(f) == DP_FAULTS_OF_REPEATS; }
int dp_fault_of_calls(dp_fault f) { return dp_fault_kind(f) == DP_FAULTS_OF_CALLS; }

/* One of several: "intra_bwd/gate_bwd". */
int dp_fault_lives_in(dp_fault f, const char *stage) {
    return stage && dp_is_listed(stage, dp_faults[f].stage, '/');
}
