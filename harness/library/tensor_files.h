/* harness/library/tensor_files.h - the tensors of one call in safetensors files: inputs as they are
 * written for another program, outputs as they are read from it. Names, shapes and layouts:
 * harness/run/judge.h. */
#pragma once
#include "harness/base/terminal.h"
#include "harness/simulated/calls.h"
#include "ref/chunk/stages.h"
#include "ref/files/safetensors.h"
#include "ref/vocabulary/design.h"

/* Axes of an input or a result in a file; returns their number. They are the field's axes, with two
 * exceptions. One key a token has no axis of keys. One gate a head has no axis of channels, nor has
 * any gate if K = 1. */
int dp_file_shape(const dp_problem *p, const dp_tensor_field *f, int64_t shape[DP_MAX_AXES]);

/* Adds the inputs of a problem, cu_seqlens if there are several sequences, and as metadata the
 * forms of gate and beta, l2norm, scale, lower_bound.
 *   input_dtype   format of all inputs but parameters; a tensor that it does not hold exactly gets
 *                 the next wider format that does
 *   backward      0: do and dht are left out */
void dp_inputs_add(dp_tensorfile *f, const dp_problem *p, dp_format input_dtype, int backward);

/* Adds a pool of states (fp32, or fp64 where fp32 does not hold them) and the slots that the
 * sequences read and write in it. */
void dp_pool_add(dp_tensorfile *f, const dp_problem *p, const dp_state_pool *pool);

/* Adds the convolutions before a problem: x_q .. [T,D] in place of q, w_q [D,W], bias_q [D]. Their
 * states are conv_state_q [Nseq,W-1,D] or, with a pool, conv_pool_q [slots,W-1,D]. Metadata: their
 * activation. */
void dp_front_add(dp_tensorfile *f, const dp_problem *p, const dp_conv_front *front,
                  const dp_state_pool *pool, dp_format input_dtype);
/* States [Nseq][n] in the slots that sequences read, to be freed; NaN in all others. */
double *dp_conv_pool(const dp_state_pool *pool, int Nseq, int64_t n, const double *states);

/* Names inside FLA's code: h0, db, dA, dbias become initial_state, dbeta, dA_log, ddt_bias. */
void dp_tensors_rename(dp_tensorfile *f, int by_gates);

/* [..,V,K] -> [..,K,V]; the shape follows when it ends in those two axes. A size that is no whole
 * number of states is left to the check of shapes. */
void dp_states_transpose(dp_tensor *t, int64_t K, int64_t V);

/* FLA's names of DPLR. Where `in` has both a and b, they become lr_a and lr_b, and da and db of
 * `out` their gradients. */
void dp_factors_rename(dp_tensorfile *in, dp_tensorfile *out);

/* Keys as tokens, as FLA stores those of Gated DeltaProduct. A tensor that lacks its axis of keys,
 * and has R times as many tokens as q, gets it: [..,T R,H,K] -> [..,T,H,R,K], [..,T R,HV] ->
 * [..,T,HV,R]. All others stay. */
void dp_keys_of_tokens(dp_tensorfile *f, const dp_tensor *q, int64_t R);

/* Results of another program.
 *   r, stage      point into their file
 *   u, tiny       unit roundoff and smallest half spacing of each tensor's stored format
 *   same_design   1: computed stage by stage like the simulated ranks
 *   design        the declared design, in the case's base. NULL: the default design if same_design,
 *                 else unknown
 *   explained     a design that explains the results of a program that declares none */
typedef struct {
    dp_result r;
    double u[DP_NRESULTS], tiny[DP_NRESULTS], *stage[DP_NSTAGE_TENSORS], stage_u[DP_NSTAGE_TENSORS],
        stage_tiny[DP_NSTAGE_TENSORS];
    int same_design;
    const dp_design *design, *explained;
} dp_stored_results;

/* `deltaproof truth` writes this beside each result, in a file with metadata `truth`: the part that
 * fp64 does not hold, and the radius. Neither is judged. */
#define DP_TRUTH_LOW ".lo"
#define DP_TRUTH_RADIUS ".radius"

/* Results and stages, once each, of floating types, gradients only where `in` has do; what is wrong
 * is added to *all. Returns whether some are gradients. */
int dp_outputs_check_names(const dp_tensorfile *in, const dp_tensorfile *out, dp_complaints *all);
/* Shapes of tensors whose names were checked; states [..,V,K] (vk) are turned. in: its path, for
 * messages. */
dp_status dp_outputs_load(const dp_tensorfile *in, dp_tensorfile *out, const dp_problem *p, int N,
                          int vk, dp_stored_results *g, dp_err *e);
