/* ref/chunk/recurrent.h - the recurrence token by token: how a recurrent kernel rounds.
 *
 * One operation of math.md b and d is one operation in fp32, or in fp64 for base fp64. Sums over
 * K and V run in index order. Exp is that of the type, or (design->fast_decays) the fast kernels'
 * form (gate.h). With stored_inputs q and k are rounded to design->factors first. The state is
 * rounded to design->state after each token. o and dq read the state before, or (read_kept) after
 * that rounding. The final state is rounded to
 * design->final_state, o and the gradients of inputs to design->out. Ranks do not matter: the
 * state goes through all tokens, but where the caller says what comes in its place.
 */
#pragma once
#include "ref/vocabulary/design.h"
#include "ref/vocabulary/problem.h"

/* Further results that a caller wants. States at tokens t[0 .. n), [n][HV][K][V], of their own
 * sequence. S is the state before that token (math.md b), dS the gradient of the state after token
 * t - 1. Untouched where a sequence starts (ends) there. dg: gradient of the log decay [T][HV][Kg].
 * The caller allocates them; S, dS and dg may be NULL. S_in, dS_in: states that replace S and dS
 * there, where ranks exchange them; NULL: S and dS go on. */
typedef struct {
    int n;
    const int64_t *t;
    double *S, *dS, *dg;
    const double *S_in, *dS_in;
} dp_recurrent_keep;

/* out is allocated (dp_result_free). backward needs p->dout. keep may be NULL. Bits do not depend
 * on the number of threads. */
void dp_recurrent_run(const dp_problem *p, const dp_design *design, int backward,
                      const dp_recurrent_keep *keep, dp_result *out);

/* Its two bodies (recurrent_fp.inc). */
void dp_recurrent_run_f32(const dp_problem *p, const dp_design *design, int backward,
                          const dp_recurrent_keep *keep, dp_result *out);
void dp_recurrent_run_f64(const dp_problem *p, const dp_design *design, int backward,
                          const dp_recurrent_keep *keep, dp_result *out);

/* States [Nseq][HV][K][V] as they leave a call: in design->final_state. */
void dp_leave_states(const dp_problem *p, const dp_design *design, double *S);
