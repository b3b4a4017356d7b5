/* ref/bound/bound_pair.h - the pairwise loops of the bounds (ref/bound/bound.h): what takes their
 * time. Used by the bounds of a chunk (bound_intra.c, bound_grads.c). */
#pragma once
#include "bound.h"

/* >= exp(d); above it by less than 2^-29, relatively, from 1e-304 to exp(700) */
double dp_exp_up(double d);

/* Pair (s, i), channel by channel. e >= exp(gcum_s - gcum_i); error: relative error of the exp that
 * a subject forms. */
void dp_bound_pair(const dp_chunk_bound *b, int s, int i, double *e, double *error);

/* In-chunk parts of dq, dk_read, dk_write, pair by pair, from the adjoints dL [n][n], dP [c][n] and
 * their errors; p = 2 alone. They are added to D of the three K-vector sums q [c][K], r, w [n][K].
 * For dg they are added to the pair sums at t, pair [c][K], and to the roundings made at a token,
 * round [c][K]. At most 2 c R + 2 terms each. A sum costs sum_error of the sum of absolute values,
 * added term by term. The terms' errors are independent. So is the error of summation, up to the
 * growth of the partial sum. Terms are added in the order s last to first, i, m, j. */
typedef struct {
    const double *dL, *DdL, *dP, *DdP;
} dp_pair_grads;
typedef struct {
    double *q, *r, *w, *pair, *round;
} dp_pair_bounds;
/* For probable bounds (p = 2). */
void dp_bound_pairs(const dp_chunk_bound *b, const dp_pair_grads *a, dp_pair_bounds *o);
