/* The pairwise loops of the bounds (ref/bound/bound_pair.h). */
#include "bound_pair.h"
#include "ref/arithmetic/elementary_core.h"
#include "ref/arithmetic/isa.h"

#include <assert.h>
#include <math.h>

static inline __attribute__((always_inline)) double square(double x) { return x * x; }

/* dp_exp_near errs by 2^-36 */
static inline __attribute__((always_inline)) double exp_up(double d) {
    const double low = d < -700 ? -700 : d, x = low > 700 ? 700 : low;
    return d < -700 ? 1e-304 : dp_exp_near(x) * (d > 700 ? INFINITY : 1 + 0x1p-30);
}

double dp_exp_up(double d) { return exp_up(d); }

#define DP_ISA_BODY "ref/bound/bound_pair_body.inc"
#include "ref/arithmetic/isa_each.inc"

void dp_bound_pair(const dp_chunk_bound *b, int s, int i, double *e, double *error) {
    DP_ISA_OF(pair)(b, s, i, e, error);
}

void dp_bound_pairs(const dp_chunk_bound *b, const dp_pair_grads *a, dp_pair_bounds *o) {
    assert(b->r.p == 2);
    DP_ISA_OF(pairs)(b, a, o);
}
