/* The table of operations (operations.h). */
#include "operations.h"
#include "case_parts.h"

#define ON(B) (1u << DP_BACKEND_##B)
#define ON_RANKS (ON(SIM) | ON(MPI) | ON(CUDA) | ON(NCCL))
#define TENSORS(FIELDS, N, PART)                                                     \
    .inputs = FIELDS, .ninputs = N, .base = offsetof(dp_case, PART), .has_ranks = 1, \
    .T = offsetof(dp_case, PART.T), .Nseq = offsetof(dp_case, PART.Nseq),            \
    .cu = offsetof(dp_case, PART.cu)
#define PROBLEM                                                                            \
    .has_problem = 1, TENSORS(dp_input_fields, DP_NINPUTS, p), .dims = dp_recurrence_dims, \
    .fill = dp_recurrence_fill, .fill_gradients = dp_recurrence_fill_gradients
#define AT_ONCE                                                                        \
    .has_stages = 1, .shape = dp_recurrence_shape, .describe = dp_recurrence_describe, \
    .write = dp_recurrence_write

const dp_operation dp_operations[DP_NOPS] = {
    [DP_OP_RECURRENCE] = {.name = "recurrence",
                          .what = "recurrence",
                          .bit = DP_CF_REC,
                          .keys = DP_CF_REC,
                          .backends = ON_RANKS | ON(LAPACK) | ON(FILE) | ON(SUBJECT),
                          .faults = DP_FAULTS_OF_STAGES | DP_FAULTS_OF_CHAIN | DP_FAULTS_OF_REPEATS,
                          .is_recurrence = 1,
                          .shrinks = 1,
                          PROBLEM,
                          AT_ONCE,
                          .finish = dp_recurrence_finish},
    [DP_OP_CHAIN] = {.name = "chain",
                     .what = "product of M factors alone",
                     .bit = DP_CF_CHAIN,
                     .keys = DP_CF_CHAIN,
                     .backends = ON(SIM) | ON(FILE),
                     .why_none = "op = chain multiplies its factors on the CPU: it has no ranks "
                                 "and no kernels",
                     .faults = DP_FAULTS_OF_CHAIN,
                     .has_factors = 1,
                     .shrinks = 1,
                     .dims = dp_chain_dims,
                     .shape = dp_chain_shape,
                     .describe = dp_chain_describe,
                     .write = dp_chain_write},
    [DP_OP_CONV] = {.name = "conv",
                    .what = "causal convolution",
                    .bit = DP_CF_CONV,
                    .keys = DP_CF_CONV,
                    .backends = ON_RANKS,
                    .faults = DP_FAULTS_OF_CONV,
                    .has_conv = 1,
                    .shrinks = 1,
                    TENSORS(dp_conv_input_fields, DP_CONV_NINPUTS, conv),
                    .dims = dp_convolution_dims,
                    .shape = dp_convolution_shape,
                    .fill = dp_convolution_fill,
                    .fill_gradients = dp_convolution_fill_gradients,
                    .describe = dp_convolution_describe,
                    .write = dp_convolution_write},
    /* Repeated runs are of the recurrence behind it, which has cases of its own. */
    [DP_OP_STEP] = {.name = "step",
                    .what = "a training step: convolutions, then KDA",
                    .bit = DP_CF_STEP,
                    .keys = DP_CF_REC | DP_CF_STEP,
                    .model = DP_KDA,
                    .backends = ON_RANKS,
                    .faults = DP_FAULTS_OF_STAGES | DP_FAULTS_OF_CHAIN | DP_FAULTS_OF_CONV,
                    .has_front = 1,
                    PROBLEM,
                    AT_ONCE,
                    .finish = dp_step_finish},
    /* Faults of stages have cases of their own; so has what can be shrunk. */
    [DP_OP_SESSION] = {.name = "session",
                       .what = "with the key session in calls that hand the state on",
                       .bit = DP_CF_SESSION,
                       .keys = DP_CF_REC | DP_CF_SESSION,
                       .backends = ON(SIM) | ON(LAPACK) | ON(CUDA) | ON(SUBJECT),
                       .why_none = "a session is computed by the simulated ranks, the chunk solver "
                                   "over LAPACKE, a library or the CUDA kernels on one device",
                       .faults = DP_FAULTS_OF_CALLS,
                       .is_recurrence = 1,
                       PROBLEM,
                       .shape = dp_session_shape,
                       .describe = dp_session_describe,
                       .write = dp_session_write,
                       .finish = dp_session_finish},
    [DP_OP_STEP_SESSION] =
        {.name = "step session",
         .what = "with the key session in calls that hand the state on",
         .bit = DP_CF_STEP_SESSION,
         .keys = DP_CF_REC | DP_CF_STEP | DP_CF_SESSION | DP_CF_STEP_SESSION,
         .model = DP_KDA,
         .backends = ON(SIM) | ON(SUBJECT),
         .why_none =
             "a session with convolutions in front is computed by the simulated ranks or a program",
         .faults = DP_FAULTS_OF_CALLS,
         .has_front = 1,
         PROBLEM,
         .shape = dp_session_shape,
         .describe = dp_session_describe,
         .write = dp_session_write,
         .finish = dp_step_session_finish},
};

dp_packing dp_case_packing(dp_case *c) {
    const dp_operation *op = dp_op_of(c);
    char *at = (char *)c;
    if (!op->has_ranks) return (dp_packing){0};
    return (dp_packing){.T = (int64_t *)(at + op->T),
                        .cu = (int64_t **)(at + op->cu),
                        .Nseq = (int *)(at + op->Nseq)};
}

int64_t dp_case_tokens(const dp_case *c) {
    const dp_dims d = dp_op_of(c)->dims(c);
    return dp_op_of(c)->has_ranks ? d.of[DP_AXIS_T] : d.of[DP_AXIS_CHUNKS] * DP_CHUNK;
}
