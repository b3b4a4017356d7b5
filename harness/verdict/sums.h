/* harness/verdict/sums.h - are dA_log and ddt_bias the sums of the dg beside them?
 *
 * With x = dg of the raw gate, as the subject returned it (math.md c):
 *     ddt_bias[h,c] = sum_t x[t,h,c]          dA_log[h] = sum_(t,c) x[t,h,c] r[t,h,c]
 * r = (dg/dA_log) / (dg/dx) of the gate, from the inputs in fp64; r = 1 for ddt_bias. Earlier
 * errors of dg are in the sum, too, so only the roundings of the last stage count:
 *
 *     limit = lambda sqrt(sum ((u + 8 a) y)^2 + sum (a P)^2) + 16 a |sum y| + sum tiny |r| + tiny'
 *
 *   y       the terms: x, or x r
 *   P       the running sums
 *   u       unit roundoff of the narrowest format that holds every x
 *   a       unit roundoff of the arithmetic
 *   tiny    least number that dg's format holds in full (fp16: half its last place), which each
 *           term may lose by underflow or flush to zero; at least the loss in dg's file
 *   tiny'   the loss in the sum's own file
 *
 * Terms one by one: dg was rounded when it was stored, and its slopes err by 8 a each,
 * mean-independent (Azuma; DP_LAMBDA = 6 standard deviations). Additions follow. An error of
 * exp(A_log) is common to all terms. So one number a head is judged as sharply as thousands of
 * terms allow.
 */
#ifndef DP_SUMS_H
#define DP_SUMS_H
#include "compare.h"
#include "ref/vocabulary/problem.h"

/* Judgements of tensors `dA_log`, `ddt_bias` and `dg` of a subject; NULL: was not judged. If dg
 * passes, the other two fail (tier "sum") for wrong sums. A tensor that is otherwise unjudged
 * passes as sums of the judged dg, unless rounding explains half of it or more. The arithmetic has
 * unit roundoff `arithmetic`. */
typedef struct {
    const dp_problem *p;
    const dp_result *got;
    double arithmetic;
    double tiny_dg, tiny_dA_log, tiny_ddt_bias; /* what their files may take of a number */
    dp_judgement *dg, *dA_log, *ddt_bias;
} dp_sums_in;
/* Changes dA_log and ddt_bias alone. */
void dp_sums_judge(const dp_sums_in *in);
#endif
