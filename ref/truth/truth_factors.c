/* ref/truth/truth_factors.c - the truth of a token whose decay gets a product of two vectors
 * (DPLR), as that of two keys a token: lr_b, whose value is what lr_a reads of the state before its
 * decay, and k, which reads nothing.
 *
 *   S <- diag(exp g) S + lr_b' (lr_a S) + k' v
 *
 * dlr_b and dk are the gradients of those keys, dv that of the second value. Radii are those of the
 * rows there. */
#include "truth_impl.h"

#include <string.h>

/* [rows][2][n] of x and y; x NULL: zeros. */
static double *pairs(const double *x, const double *y, int64_t rows, int64_t n) {
    double *z = dp_doubles(rows * 2 * n);
    for (int64_t i = 0; i < rows; i++) {
        if (x) memcpy(z + 2 * i * n, x + i * n, sizeof *z * (size_t)n);
        memcpy(z + (2 * i + 1) * n, y + i * n, sizeof *z * (size_t)n);
    }
    return z;
}

/* Row 2 i + at of each pair, as row i. */
static void rows_of(const dp_ball *from, int at, dp_ball *to) {
    const size_t size = sizeof(double) * (size_t)to->width;
    for (int64_t i = 0; i < to->rows; i++) {
        memcpy(to->hi + i * to->width, from->hi + (2 * i + at) * to->width, size);
        memcpy(to->lo + i * to->width, from->lo + (2 * i + at) * to->width, size);
        to->rad[i] = from->rad[2 * i + at];
    }
}

static void take(dp_ball *from, dp_ball *to) {
    dp_ball_free(to);
    *to = *from;
    *from = (dp_ball){0};
}

static void gather(dp_truth *from, dp_truth *to) {
    dp_ball *x = from->field, *y = to->field;
    if (to->backward) {
        rows_of(&x[DP_RESULT_DK], 0, &y[DP_RESULT_DLR_B]);
        rows_of(&x[DP_RESULT_DK], 1, &y[DP_RESULT_DK]);
        rows_of(&x[DP_RESULT_DV], 1, &y[DP_RESULT_DV]);
    }
    for (int i = 0; i < DP_NRESULTS; i++)
        if (y[i].rows && i != DP_RESULT_DLR_B && i != DP_RESULT_DK && i != DP_RESULT_DV)
            take(&x[i], &y[i]);
    take(&from->S_cut, &to->S_cut);
    take(&from->dS_cut, &to->dS_cut);
    take(&from->M_seg, &to->M_seg);
}

dp_status tr_truth_of_factors(const dp_problem *p, const dp_truth_request *rq, dp_truth *t,
                              dp_err *e) {
    dp_status s = tr_truth_alloc(p, rq, t, e);
    if (s) return s;
    dp_problem y = *p;
    dp_truth x;
    y.R = 2;
    y.k = pairs(p->lr_b, p->k, p->T * p->H, p->K);
    y.v = pairs(NULL, p->v, p->T * p->HV, p->V);
    s = dp_truth_run(&y, rq, &x, e);
    if (s) {
        dp_truth_free(t);
    } else {
        gather(&x, t);
        dp_truth_free(&x);
    }
    free(y.k);
    free(y.v);
    return s;
}
