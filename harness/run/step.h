/* harness/run/step.h - op step: causal convolutions before q, k and v of a KDA layer, forward and
 * backward over N ranks, judged end to end.
 *
 *   x_q x_k x_v --conv, activation--> q k v --gate, beta, L2 norm, KDA--> o
 *   do --KDA backward--> dq dk dv --conv backward--> dx_q .. dw_q .. dbias_q ..
 *
 * Truth. q, k, v are those of the convolution in MPFR, rounded to double. The rounding is
 * dp_problem.input_error, which the radius of every result carries. dx, dw and dbias follow in MPFR
 * from the true dq, dk, dv. Their radius (and rounding to double) is carried to them as below.
 * Bounds. The error of the convolution's output (rigorous, ref/bound/conv_bound.c, its store
 * included) enters the bounds of the recurrence entry by entry (dp_raw_error). The probable errors
 * of dq_t continue entry by entry (dp_error_bound.entry). Known errors of a whole row get the
 * largest factor of its channels:
 *     dx_t   squares of w_dj silu'(pre) times the error at t + W-1-j, summed over taps j and
 *            channels d
 *     dw_j   squares of x silu'(pre) times the error, summed over channels and 64 tokens, errors
 *            themselves from there on (as dA_log, error_bound.c); dbias likewise
 * and what the convolution's own arithmetic adds comes from ref/bound/conv_bound.c again.
 * First order.
 */
#pragma once
#include "harness/bound/error_bound.h"
#include "harness/case/case.h"
#include "harness/device/device_run.h"
#include "harness/record/run.h"
#include "harness/simulated/calls.h"
#include "harness/verdict/expected.h"
#include "ref/truth/truth.h"

/* One base on one backend: what its convolution makes of x, as a problem, and how far that may be
 * off. */
typedef struct {
    dp_problem p;
    dp_raw_error err;
    dp_conv_result d[DP_NQKV]; /* gradients, after dp_step_backward */
    dp_base base;
    dp_backend be;
    int N;
    dp_fault fault;     /* DP_BACKEND_SIM: one of a convolution acts */
    unsigned char *hit; /* [N*HV]: where it did */
} dp_step_run;
/* n convolutions on N ranks, over the same tokens, alike but for channels and data. On a device
 * they share every message. */
dp_status dp_convolve(const dp_conv *const *c, int n, dp_base base, int N, dp_backend b,
                      dp_conv_result *const *r, dp_err *e);
/* Convolutions over N ranks; *s holds their outputs and the problem behind them. */
dp_status dp_step_forward(const dp_case *c, dp_backend be, int N, dp_base base, dp_fault fault,
                          dp_step_run *s, dp_err *e);
/* The convolutions' backward on dq, dk and dv of `from`, into s->d. */
dp_status dp_step_backward(const dp_case *c, const dp_result *from, dp_step_run *s, dp_err *e);
/* For the calls of a session: returns the problem with the inputs of the convolutions as q, k and
 * v. Fills *calls (conv NULL: no convolutions). Both borrow all arrays. */
dp_problem dp_step_before(const dp_case *c, dp_conv_calls *calls);
void dp_step_run_free(const dp_case *c, dp_step_run *s);

/* How the tensors of the convolutions are judged.
 *   x      draws, NULL: none; their cells are the chunks chunk_of [T]
 *   like   what all of them have in common: allowance and arithmetic */
#define DP_STEP_TENSORS 12
typedef struct {
    const dp_expected *x;
    const int *chunk_of;
    dp_compare_in like;
} dp_step_expected;
/* Appends judgements to run->tensor, which must have room for DP_STEP_TENSORS more. They are of q k
 * v, and, if s has them, of the convolution's gradients, which began from dq dk dv. */
void dp_step_judge(const dp_case *c, const dp_truth *truth, const dp_step_run *s,
                   const dp_error_bound *b, const dp_step_expected *x, dp_run *run);
/* The convolutions by themselves: their outputs, or their gradients, which began from `from`.
 * Judges into run->tensor as above, by their own bounds; adds the number of judged rows to rows. */
void dp_step_judge_alone(const dp_case *c, const dp_step_run *s, const dp_result *from, dp_run *run,
                         int64_t *rows);
