/* The table of deliberate faults (fault.h, faults.inc). */
#include "fault.h"
#include "harness/case/operations.h"

#include <string.h>

#define FLA "fla-org/flash-linear-attention"
#define SPECULATIVE "vllm-project/vllm#39273, #53912, #51812, #45477"
#define HALF_STATES \
    "NVIDIA/TensorRT-Model-Connect#725, vllm-project/tpu-inference#2408, kekzl/imp#1776"
#define INT8_STATES "vllm-project/vllm#55196, sgl-project/sglang#40706, #28185"
#define WRONG_TOKEN "sgl-project/sglang#37836, #39342, vllm-project/vllm#52627"
#define DEBUG_MD FLA ", tests/context_parallel/debug.md"

#define ROW(ID, ...) [DP_FAULT_##ID] = {__VA_ARGS__},
const dp_fault_info dp_faults[DP_NFAULTS] = {
#include "faults.inc"
};

dp_payload dp_fault_payload(dp_fault f, dp_payload asked) {
    return dp_faults[f].payload ? dp_faults[f].payload : asked;
}

dp_exchange dp_fault_exchange(dp_fault f, dp_exchange asked) {
    return dp_faults[f].exchange ? dp_faults[f].exchange : asked;
}

dp_own dp_fault_own(dp_fault f, dp_own asked) { return asked ? asked : dp_faults[f].own; }

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

int dp_fault_by_run(dp_fault f) { return dp_fault_kind(f) == DP_FAULTS_OF_REPEATS; }
int dp_fault_of_calls(dp_fault f) { return dp_fault_kind(f) == DP_FAULTS_OF_CALLS; }
