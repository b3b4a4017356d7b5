/* harness/verdict/nearby.h - nearby problems: the same problem with other roundings.
 *
 * Every number of the inputs moves at random by about one unit of bf16 and is rounded to its format
 * again. So all roundings of a kernel change while the problem stays the same. In every second draw
 * equal numbers of an input (equal but for their sign) move alike. Their roundings are equal in the
 * problem, so their errors add up: gates of one value, or repeated keys. In the others every number
 * moves by itself: equal numbers may cancel to the last bit in one order of summation only. Zeros,
 * infinities and NaN stay; beta of a contraction stays at most 2.
 *
 * fp32 holds the sums of log gates of a short format exactly, but for ties, which few draws meet.
 * `gates` of a wider format takes them off that lattice: every sum is rounded then.
 */
#ifndef DP_NEARBY_H
#define DP_NEARBY_H
#include "ref/chunk/conv.h"
#include "ref/vocabulary/design.h"
#include "ref/vocabulary/problem.h"
#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    uint64_t draw;   /* 0, 1, ..: each other numbers */
    dp_format dtype; /* of the inputs */
    dp_format gates; /* of g: dtype, or a wider one */
} dp_mover;

/* The convolutions before q, k and v in a training step, without dy; NULL: none. */
typedef struct {
    const dp_conv *conv[3];
} dp_front;

/* To be freed. */
dp_problem dp_nearby_problem(const dp_problem *p, const dp_mover *m);

/* Convolutions of a draw: x, w and bias moved, no dy; each to be freed with dp_conv_free. NULL:
 * none. */
void dp_nearby_front(const dp_front *front, const dp_mover *m, dp_conv y[3]);

#ifdef __cplusplus
}
#endif
#endif
