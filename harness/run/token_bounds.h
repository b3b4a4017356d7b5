/* harness/run/token_bounds.h - bounds of kernels that go token by token (design `recurrent`), from
 * those of chunks of one token. */
#ifndef DP_TOKEN_BOUNDS_H
#define DP_TOKEN_BOUNDS_H
#include "harness/bound/error_bound.h"
#include "harness/case/session.h"
#include "ref/vocabulary/design.h"

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

#endif
