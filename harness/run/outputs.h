/* harness/run/outputs.h - the outputs of a subject of any kind, and their judgement.
 *
 * A driver (subjects.h) fills dp_outputs and a record, and calls dp_judge_calls. The order is
 * results, op step's convolutions, tensors that ranks exchange, growth of M, stages, flaws. The
 * functions are declared below.
 */
#ifndef DP_OUTPUTS_H
#define DP_OUTPUTS_H
#include "harness/simulated/calls.h"
#include "judge.h"
#include "limits.h"

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

/* Arguments of a judgement. */
typedef struct {
    dp_sharding *sp;
    dp_bound_bases *bases;
    const dp_error_bound *bound;
    const dp_outputs *out;
    const dp_expected *expected; /* the draws of the run; NULL: none */
} dp_judging;

/* Makes the bounds, judges all outputs into r and closes r. The draws of set 0 decide, and if the
 * result is marginal, the draws of set 1. On entry r has everything that dp_run_id needs, and
 * design, undeclared, other_design.
 *
 * A run that does not declare its design is compared with the common designs (dp_design_common), or
 * those that its files name. The first design that explains every tensor is r->explained. If none
 * does, the nearest design gives the verdict. */
void dp_judge_outputs(dp_sharding *sp, dp_bound_bases *bases, const dp_outputs *out, dp_run *r);

/* dp_judge_outputs, and whatever else a session returns (judge_calls.c). */
dp_status dp_judge_calls(dp_sharding *sp, const dp_outputs *out, const dp_calls_seen *seen,
                         dp_bound_bases *bases, dp_run *r, dp_err *e);

/* ---- the parts, in their order; each adds to r->tensor, which has room ----------------------- */

/* judge_stages.c: what ranks exchange; error of M of every rank, and of the prefixes of one
 * (problems of one head); all stages that are there. */
void dp_judge_stages(const dp_judging *j, dp_run *r);

/* Adds the judgement of one tensor; exact cases: whose data stands there instead. */
void dp_judge_tensor(const dp_judging *j, const dp_compare_in *in, dp_run *r);
/* Is stage i there, and not one that ranks exchange? */
int dp_stage_is_inner(double *const *stage, int i);

#endif
