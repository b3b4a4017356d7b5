/* harness/run/run_bounds.h - the bounds of a run by its design: of results, of what ranks exchange,
 * of stages.
 *
 * Bounds come from the fp64 reference of a sharding, and are read from the cache where they are
 * known. Kernels that go token by token (design `recurrent`) have those of chunks of one token.
 */
#pragma once
#include "harness/bound/error_bound.h"
#include "harness/case/session.h"
#include "harness/record/run.h"
#include "judge.h"
#include "ref/vocabulary/design.h"
#include "standard.h"

/* Are the bounds of error_bound.h those of this design? Chunks may have any length. Outputs in a
 * wider format than the base's are within them; operands of scores may carry their decay in
 * bf16. */
int dp_bounds_are_derived(const dp_design *design);
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
    int decides;   /* 0: bounds of results, and of what ranks exchange, are shown alone */
    int derived;   /* 0: those of stages are */
    int by_tokens; /* dp_tokens_are_bounded */
    double storage[DP_NRESULTS]; /* unit roundoff of the design's own store of a result */
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
/* The bounds of r, made once; with errors of the formats that results lie in (NULL: none). */
const dp_known_bound *dp_bounds_of_run(dp_sharding *sp, dp_bound_bases *w, const dp_run *r,
                                       const dp_stored_results *stored);
/* Results [rows][width] are within `bound` of `want`. Stored with unit roundoff u and spacing 2
 * tiny among subnormals they are off by u |x| + tiny an entry. The value before is x, |x| <= |want|
 * + bound. */
void dp_bound_widen(double *bound, const double *want, int64_t rows, int64_t width, double u,
                    double tiny);

/* ---- bounds of stages ------------------------------------------------------------------------ */

/* Rows of the stages of tokens and chunks that are there, else 0. Bounds [rows] of the subject's
 * errors, and of those of the fp64 reference. */
typedef struct {
    int64_t rows[DP_NSTAGE_TENSORS], width[DP_NSTAGE_TENSORS];
    double *bound[DP_NSTAGE_TENSORS], *rad[DP_NSTAGE_TENSORS];
} dp_stage_errors;
/* stage [DP_NSTAGE_TENSORS]: not NULL where it is there. */
void dp_stage_errors_make(dp_sharding *sp, const dp_run *run, double *const *stage,
                          dp_bound_bases *w, dp_stage_errors *x);
/* Frees what it holds; the struct is the caller's. */
void dp_stage_errors_free(dp_stage_errors *x);
