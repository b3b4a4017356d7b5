/* harness/run/outputs.h - the outputs of a subject of any kind, and their judgement.
 *
 * A driver (subjects.h) fills dp_outputs and a record, and calls dp_judge_calls. The order is
 * results, op step's convolutions, tensors that ranks exchange, growth of M, stages, flaws.
 */
#ifndef DP_OUTPUTS_H
#define DP_OUTPUTS_H
#include "harness/bound/error_bound.h"
#include "harness/case/session.h"
#include "harness/record/run.h"
#include "harness/simulated/calls.h"
#include "harness/verdict/compare.h"
#include "harness/verdict/expected.h"
#include "judge.h"
#include "ref/vocabulary/design.h"
#include "standard.h"

/* ---- limits of a run ------------------------------------------------------------------------- */

/* A run's limits by its design: its claim, the allowance on top of the draws, bounds of errors in
 * results and stages.
 *
 * Bounds come from the fp64 reference of a sharding, and are read from the cache where they are
 * known. Kernels that go token by token (design `recurrent`) have those of chunks of one token. */

dp_allowance dp_run_allowance(const dp_run *r);

/* Are the bounds of error_bound.h those of this design? Chunks may have any length. Outputs in a
 * wider format than the base's are within them; operands of scores may carry their decay in
 * bf16. */
int dp_bounds_are_derived(const dp_design *design);
/* The share of a state that no rounding of one call comes near: 0.005, of operands in bf16 or fp16
 * 0.05. At least twice the unit roundoff of a state that leaves shorter. */
double dp_state_far(const dp_design *design);
/* Has the recurrent design bounds of its own, and can they be had of this problem
 * within about 20 s of one core? A state in a short format has them, but for
 * gradients of rows of their own (dp_by_rows). */
int dp_tokens_are_bounded(const dp_design *design, const dp_problem *p);

/* ---- kernels that go token by token ---------------------------------------------------------- */

/* Are there bounds of this recurrent design: states in fp32, nothing leaves in fp16? */
int dp_token_design_is_bounded(const dp_design *design);
/* Seconds of one core that they take, about. */
double dp_token_bounds_seconds(const dp_problem *p);
/* The design in chunks of one token whose bounds hold for it, but for how results leave it. */
dp_design dp_token_design(const dp_design *recurrent);
/* Adds to b, the bounds of design `bounded`, the errors of the formats that results have in
 * `design`. Results are `want` [rows][width] within b (NULL: none). */
void dp_bounds_store(const dp_problem *p, const dp_design *bounded, const dp_design *design,
                     const double *const want[DP_NRESULTS], dp_error_bound *b);

/* Adds the errors of stored states (state_bound.h), between calls of a session and between chunks
 * or tokens of the design. `first_of_call` [T] may be NULL: no session. A sequence that ends
 * early is stored behind its end. The last store of final_state is dp_bounds_store's. */
void dp_bounds_keep(const dp_problem *p, int N, const unsigned char *first_of_call,
                    const dp_session *session, const dp_design *design, dp_error_bound *b);

/* ---- bounds of all results ------------------------------------------------------------------- */

/* Bounds of one base on one sharding. The first that is not cached fills the part that no chain
 * format changes. The bounds of runs are kept. Starts as zeros. */
typedef struct {
    dp_design design;
    dp_format chain;
    dp_error_bound bound;
} dp_known_bound;
typedef struct {
    int ready, n;
    dp_error_bounds of;
    dp_known_bound **known;
} dp_bound_bases;
void dp_bound_bases_free(dp_bound_bases *w);

/* Bounds of all results and of what ranks exchange, into *out, to be freed. A design without bounds
 * of its own gets those of the plain one of its base: they are shown, and do not decide. */
void dp_run_bounds(dp_sharding *sp, const dp_design *design, dp_format chain, dp_bound_bases *w,
                   dp_error_bound *out);

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
#endif
