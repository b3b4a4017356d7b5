/* harness/run/limits.h - a run's limits by its design: its claim, and the allowance on top of the
 * draws. Also whether bounds are derived for its design, and one rounding of its base.
 */
#ifndef DP_LIMITS_H
#define DP_LIMITS_H
#include "harness/record/run.h"
#include "harness/verdict/expectations.h"

/* Without intermediates. */
dp_claim dp_run_claim(const dp_run *r);
dp_allowance dp_run_allowance(const dp_run *r);

/* Are the bounds of error_bound.h those of this design? Chunks may have any length. Outputs in a
 * wider format than the base's are within them; operands of scores may carry their decay in
 * bf16. */
int dp_bounds_are_derived(const dp_design *design);
/* The words of a design that bounds read, all else the default of its base. Designs that agree in
 * them have the same bounds. */
dp_design dp_bound_design(const dp_design *design);
/* The same of a run's design. */
int dp_run_bounded(const dp_run *r);
/* The same of results and of what ranks exchange, where a recurrent design has bounds, too. */
int dp_run_results_bounded(const dp_run *r, const dp_problem *p);
/* Adds to a the allowance of units whose error a short state makes. kept: the format in which a
 * session keeps its state. */
void dp_allow_stored(const dp_run *r, dp_format kept, dp_result_id field, dp_allowance *a);
/* The share of a state that no rounding of one call comes near: 0.005, of operands in bf16 or fp16
 * 0.05. At least twice the unit roundoff of a state that leaves shorter. */
double dp_state_far(const dp_design *design);
/* Has the recurrent design bounds of its own (token_bounds.h), and can they be had of this problem
 * within about 20 s of one core? Has one of chunks? A state in a short format has them, but for
 * gradients of rows of their own (dp_by_rows). */
int dp_tokens_are_bounded(const dp_design *design, const dp_problem *p);
int dp_chunks_are_bounded(const dp_design *design, const dp_problem *p);

/* Unit roundoff of the base's arithmetic; smallest normal number of it, times K. */
double dp_base_roundoff(dp_base b);
double dp_base_smallest(dp_base b, int K);
/* Unit roundoff of the design's own store of a result, which its bounds and draws have. For others
 * than o and the gradients of inputs: of its arithmetic. */
double dp_own_storage(const dp_design *d, dp_result_id field);
/* The rms of one rounding that a result in a coarser format (u: its unit roundoff) adds to every
 * error. That is known, so nobody is allowed more of it than the pipeline that was drawn: limits
 * grow with the allowance, this does not. */
double dp_run_storing(const dp_run *r, double u);
/* The rms of one rounding of a number of size 1 in the format of the chain of M. */
double dp_run_chain_rounding(const dp_run *r);

#endif
