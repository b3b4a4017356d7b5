/* harness/verdict/sums.h - are dA_log and ddt_bias the sums of the dg that came with them?
 *
 * With x = dg of the raw gate, as the subject returned it (math.md c):
 *     ddt_bias[h,c] = sum_t x[t,h,c]          dA_log[h] = sum_(t,c) x[t,h,c] r[t,h,c]
 * r = (dg/dA_log) / (dg/dx) of the gate, from the inputs in fp64. What dg carries of earlier errors
 * is in the sum, too, so only what the last stage rounds is left. Terms y (x, or x r), u the unit
 * roundoff of the narrowest format that holds every x, a that of the arithmetic, P the running
 * sums:
 *
 *     limit = lambda sqrt(sum ((u + 8 a) y)^2 + sum (a P)^2) + 16 a |sum y| + sum tiny |r| + tiny'
 *
 * tiny: the least number that dg's format holds in full (fp16: half its last place), which may be
 * gone of each term by underflow or flush to zero, and at least what dg's file may take; r = 1 for
 * ddt_bias. tiny': what the sum's own file may take.
 *
 * Terms one by one: dg was rounded when it was stored, and its slopes err by 8 a each,
 * mean-independent (Azuma; DP_LAMBDA = 6 standard deviations); additions; an error of exp(A_log) is
 * common to all terms. So one number a head is judged as sharply as thousands of terms allow.
 */
#ifndef DP_SUMS_H
#define DP_SUMS_H
#include "compare.h"
#include "ref/vocabulary/problem.h"
#ifdef __cplusplus
extern "C" {
#endif

/* Judgements of tensors `dA_log`, `ddt_bias` and `dg` of a subject; NULL: was not judged. Where dg
 * passes, the other two fail (tier "sum") for sums that are off, and where no limit of theirs is
 * below them they pass as sums of the dg that was judged, if rounding explains less than half of
 * them. a: unit roundoff of the arithmetic. */
typedef struct {
    const dp_problem *p;
    const dp_result *got;
    double arithmetic;
    double tiny_dg, tiny_dA_log, tiny_ddt_bias; /* what their files may take of a number */
    dp_judgement *dg, *dA_log, *ddt_bias;
} dp_sums_in;
/* Changes dA_log and ddt_bias alone. */
void dp_sums_judge(const dp_sums_in *in);

#ifdef __cplusplus
}
#endif
#endif
