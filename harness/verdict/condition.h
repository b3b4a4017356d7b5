/* harness/verdict/condition.h - how ill-conditioned the triangular systems of a problem are, by
 * themselves: A = I + B L of every chunk and head (math.md e), in fp64.
 *
 * inverse: largest 1-norm of A^(-1); entry: largest entry of any inverse; condition: largest |A|_1
 * |A^(-1)|_1. They are computed from the inverse of the fp64 reference, whose own relative error is
 * at most about condition * 2^-53. Beyond 1e16 the numbers are no more than sizes. A solve in
 * arithmetic of unit roundoff u loses about log10(condition) digits, whatever the kernel does; the
 * bounds know that (ref/bound/bound.c). A problem is called ill-conditioned where half of the
 * digits are gone: condition >= u^(-1/2). That word changes no verdict. */
#ifndef DP_CONDITION_H
#define DP_CONDITION_H
#include "compare.h"
#include "harness/simulated/ranks.h"

typedef struct {
    double inverse, entry, condition;
    int rank, head;
    int64_t token;
} dp_condition; /* place: chunk with the largest condition, its first token */

/* ref: the problem's simulated ranks in base fp64, as dp_sim_new makes them. */
void dp_condition_of(const dp_sim *ref, dp_condition *c);
/* cache: folder, NULL: none. Makes the reference itself when nothing is cached. */
dp_status dp_condition_cached(const dp_problem *p, int N, const char *cache, dp_condition *c,
                              dp_err *e);
int dp_ill_conditioned(const dp_condition *c, dp_base b);
/* Appends to why [size] what the condition says about a verdict: that the problem is
 * ill-conditioned, or that it does not explain a failure. */
void dp_condition_explain(const dp_condition *c, dp_base b, dp_verdict v, char *why, size_t size);
/* "; the state grows: .." where keys or gates make it grow, or "". */
void dp_growth_explain(const dp_problem *p, char *text, size_t size);
#endif
