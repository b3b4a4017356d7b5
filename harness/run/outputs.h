/* harness/run/outputs.h - the outputs of a subject of any kind, and their judgement.
 *
 * A driver (subjects.h) fills dp_outputs and a record, and calls dp_judge_calls. The order is
 * results, op step's convolutions, tensors that ranks exchange, growth of M, stages, flaws.
 */
#pragma once
#include "harness/case/session.h"
#include "harness/record/run.h"
#include "harness/simulated/calls.h"
#include "harness/verdict/compare.h"
#include "harness/verdict/expected.h"
#include "judge.h"
#include "run_bounds.h"
#include "standard.h"

/* ---- limits of a run ------------------------------------------------------------------------- */

/* The claim of a run, and its allowance on top of the draws. */
dp_allowance dp_run_allowance(const dp_run *r);

/* The share of a state that no rounding of one call comes near: 0.005, of operands in bf16 or fp16
 * 0.05. At least twice the unit roundoff of a state that leaves shorter. */
double dp_state_far(const dp_design *design);
/* Are they NaN, all of them: what nobody wrote? */
int dp_is_blank(const double *x, int64_t n);

/* ---- outputs --------------------------------------------------------------------------------- */

/* Everything is borrowed. */
typedef struct {
    const dp_result *results;
    /* By DP_RANK_S_IN and so on: [N*HV] states, NULL where a pair of rank and head has none. NULL:
     * this subject returns it among stages only, or not at all. */
    double *const *rank[DP_RANK_TENSORS];
    int forms_all_pairs;  /* 0: M, H and their gradients only where they matter (math.md g.1) */
    double *const *stage; /* [DP_NSTAGE_TENSORS], NULL where it has none; NULL: none at all */
    const dp_stored_results
        *stored;       /* formats that results and stages lie in; NULL: none is coarser than
                               the base's own */
    const dp_sim *sim; /* of simulated ranks: M along the recorded rank; else NULL */
} dp_outputs;

/* Makes the bounds, judges all outputs into r and closes r. The draws of set 0 decide, and if the
 * result is marginal, the draws of set 1. On entry r has everything that dp_run_id needs, and
 * design, undeclared, other_design.
 *
 * A run that does not declare its design is compared with the common designs (dp_design_common), or
 * those that its files name. The first design that explains every tensor is r->explained. If none
 * does, the nearest design gives the verdict. */
void dp_judge_outputs(dp_sharding *sp, dp_bound_bases *bases, const dp_outputs *out, dp_run *r);

/* dp_judge_outputs, and whatever else a session returns (step.c). */
dp_status dp_judge_calls(dp_sharding *sp, const dp_outputs *out, const dp_calls_seen *seen,
                         dp_bound_bases *bases, dp_run *r, dp_err *e);
