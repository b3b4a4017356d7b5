/* harness/library/tensor_files.h - the tensors of one call in safetensors files: inputs as they are
 * written for another program, outputs as they are read from it. Names, shapes and layouts:
 * harness/run/judge.h. */
#ifndef DP_TENSOR_FILES_H
#define DP_TENSOR_FILES_H
#include "harness/base/complaints.h"
#include "harness/simulated/conv_states.h"
#include "harness/simulated/slots.h"
#include "harness/simulated/stage_tensor.h"
#include "ref/files/safetensors.h"
#include "ref/vocabulary/design.h"
#ifdef __cplusplus
extern "C" {
#endif

/* Axes of an input or a result in a file; returns how many. As the field lays it out: none for one
 * key a token, nor for the one gate of a head (but for K = 1, where it is a channel's as well). */
int dp_file_shape(const dp_problem *p, const dp_tensor_field *f, int64_t shape[DP_MAX_AXES]);

/* Adds the inputs of a problem, cu_seqlens of several sequences, and as metadata the forms of gate
 * and beta, l2norm, scale, lower_bound. input_dtype: of all that are no parameters; a tensor that
 * it does not hold as it is gets the next wider one that does. backward 0: do and dht are left
 * out. */
void dp_inputs_add(dp_tensorfile *f, const dp_problem *p, dp_format input_dtype, int backward);

/* Adds a pool of states (fp32, or fp64 where that does not hold them) and the slots that the
 * sequences of the problem read and write in it. */
void dp_pool_add(dp_tensorfile *f, const dp_problem *p, const dp_state_pool *pool);

/* Adds the convolutions in front of a problem: x_q .. [T,D] in place of q, w_q [D,W], bias_q [D],
 * conv_state_q [Nseq,W-1,D] or, with a pool, conv_pool_q [slots,W-1,D], and as metadata their
 * activation. */
void dp_front_add(dp_tensorfile *f, const dp_problem *p, const dp_conv_front *front,
                  const dp_state_pool *pool, dp_format input_dtype);
/* States [Nseq][n] in the slots that sequences read, to be freed; NaN in all others. */
double *dp_conv_pool(const dp_state_pool *pool, int Nseq, int64_t n, const double *states);

/* Names inside FLA's code: h0, db, dA, dbias become initial_state, dbeta, dA_log, ddt_bias. */
void dp_tensors_rename(dp_tensorfile *f, int by_gates);

/* [..,V,K] -> [..,K,V]; the shape follows when it ends in those two axes. What is no whole number
 * of states is left to the check of shapes. */
void dp_states_transpose(dp_tensor *t, int64_t K, int64_t V);

/* FLA's names of DPLR: where `in` has both a and b, those of it are lr_a and lr_b, and da and db of
 * `out` their gradients; elsewhere nothing. */
void dp_factors_rename(dp_tensorfile *in, dp_tensorfile *out);

/* Keys as tokens, as FLA stores those of Gated DeltaProduct: tensors that should have an axis of
 * keys, and have R times as many tokens as q and no such axis, get it: [..,T R,H,K] ->
 * [..,T,H,R,K], [..,T R,HV] -> [..,T,HV,R]. All others stay. */
void dp_keys_of_tokens(dp_tensorfile *f, const dp_tensor *q, int64_t R);

/* Results that another program computed: r and stage point into their file. u, tiny: unit roundoff
 * and smallest half spacing of the format that each was stored in. same_design 1: computed stage by
 * stage as the simulated ranks do. design: how they were computed, in the case's base; NULL: by the
 * default design where same_design, else not known. explained: not said, but this one is it. */
typedef struct {
    dp_result r;
    double u[DP_NRESULTS], tiny[DP_NRESULTS], *stage[DP_NSTAGE_TENSORS], stage_u[DP_NSTAGE_TENSORS],
        stage_tiny[DP_NSTAGE_TENSORS];
    int same_design;
    const dp_design *design, *explained;
} dp_stored_results;

/* What `deltaproof truth` writes beside each result, in a file with metadata `truth`: what fp64
 * does not hold of it, and its radius. Neither is judged. */
#define DP_TRUTH_LOW ".lo"
#define DP_TRUTH_RADIUS ".radius"

/* Results and stages, once each, of floating types, gradients only where `in` has do; what is wrong
 * is added to *all. Returns whether some are gradients. */
int dp_outputs_check_names(const dp_tensorfile *in, const dp_tensorfile *out, dp_complaints *all);
/* Shapes of tensors whose names were checked; states [..,V,K] (vk) are turned. in: its path, for
 * messages. */
dp_status dp_outputs_load(const dp_tensorfile *in, dp_tensorfile *out, const dp_problem *p, int N,
                          int vk, dp_stored_results *g, dp_err *e);

#ifdef __cplusplus
}
#endif
#endif
