/* harness/run/limits.h - a run's limits by its design: its claim, the allowance on top of the
 * draws, bounds of errors in results and stages.
 *
 * Bounds come from the fp64 reference of a sharding, and are read from the cache where they are
 * known. Kernels that go token by token (design `recurrent`) have those of chunks of one token. */
#ifndef DP_LIMITS_H
#define DP_LIMITS_H
#include "harness/bound/error_bound.h"
#include "harness/case/session.h"
#include "harness/record/run.h"
#include "harness/verdict/compare.h"
#include "harness/verdict/expected.h"
#include "ref/vocabulary/design.h"
#include "standard.h"

dp_allowance dp_run_allowance(const dp_run *r);

/* Are the bounds of error_bound.h those of this design? Chunks may have any length. Outputs in a
 * wider format than the base's are within them; operands of scores may carry their decay in
 * bf16. */
int dp_bounds_are_derived(const dp_design *design);
/* The same of results and of what ranks exchange, where a recurrent design has bounds, too. */
int dp_run_results_bounded(const dp_run *r, const dp_problem *p);
/* The share of a state that no rounding of one call comes near: 0.005, of operands in bf16 or fp16
 * 0.05. At least twice the unit roundoff of a state that leaves shorter. */
double dp_state_far(const dp_design *design);
/* Has the recurrent design bounds of its own, and can they be had of this problem
 * within about 20 s of one core? A state in a short format has them, but for
 * gradients of rows of their own (dp_by_rows). */
int dp_tokens_are_bounded(const dp_design *design, const dp_problem *p);

/* The comparison of a result (field; -1: of another tensor) of a run, as far as the run decides:
 * ranks, allowance, arithmetic. A file may store the tensor in a coarser format, with unit roundoff
 * u and smallest numbers tiny apart; else both are 0. */
dp_compare_in dp_run_comparing(const dp_run *r, const dp_sharding *sp, int field, double u,
                               double tiny);

/* Unit roundoff of the base's arithmetic. */
double dp_base_roundoff(dp_base b);
/* Unit roundoff of the design's own store of a result, which its bounds and draws have. For others
 * than o and the gradients of inputs: of its arithmetic. */
double dp_own_storage(const dp_design *d, dp_result_id field);
/* The rms of one rounding that a result in a coarser format (u: its unit roundoff) adds to every
 * error. That is known, so nobody is allowed more of it than the pipeline that was drawn: limits
 * grow with the allowance, this does not. */
double dp_run_storing(const dp_run *r, double u);
/* The rms of one rounding of a number of size 1 in the format of the chain of M. */
double dp_run_chain_rounding(const dp_run *r);

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

/* Adds the errors of stored states (store_bound.h), between calls of a session and between chunks
 * or tokens of the design. `first_of_call` [T] may be NULL: no session. A sequence that ends
 * early is stored behind its end. The last store of final_state is dp_bounds_store's. */
void dp_bounds_keep(const dp_problem *p, int N, const unsigned char *first_of_call,
                    const dp_session *session, const dp_design *design, dp_error_bound *b);

/* ---- bounds of all results ------------------------------------------------------------------- */

/* Bounds of one base on one sharding. The first that is not cached fills the part that no chain
 * format changes. The last run's are kept (judge_run.c). Starts as zeros. */
typedef struct {
    int ready;
    dp_error_bounds of;
    int bounded;
    dp_design design;
    dp_format chain;
    dp_error_bound bound;
} dp_bound_bases;
void dp_bound_bases_free(dp_bound_bases *w);

/* Bounds of all results and of what ranks exchange, into *out, to be freed. A design without bounds
 * of its own gets those of the plain one of its base: they are shown, and do not decide
 * (dp_run_results_bounded). */
void dp_run_bounds(dp_sharding *sp, const dp_design *design, dp_format chain, dp_bound_bases *w,
                   dp_error_bound *out);

#endif
