/* ref/truth/truth_rank.c - what a rank must see, from the snapshots of the truth
 * (math.md g.1, g.2).
 *
 * A matrix with radius: X = centre + error, |error|_F <= rad; centres in binary128 (ld),
 * uq = 2^-113. A snapshot's hi + lo is rounded to that: uq |X~|.
 *     product      |XY - fl(X~ Y~)|_F <= |X~| ry + rx |Y~| + rx ry
 *                                         + (eta_dd(K) + 4 2^-106) |X~||Y~|
 *                  Frobenius norms; products run in double-double (ref/arithmetic/dd.h), to which
 *                  the factors are rounded first: a product in binary128 is ten times slower.
 *                  Underflow there: fewer than 40 roundings a term, each below
 *                  2^-1074 (1 + |x|)(1 + |y|)
 *     difference   rx + ry + uq |X~ - Y~|
 *     to double    2^-53 |X~| + 2^-1074 sqrt(entries)
 * Norms are upper bounds (tr_norm_up of the leading doubles); radii are binary128 to nearest, few
 * operations deep, hence the factor of tr_up at the end.
 */
#include "ref/arithmetic/dd.h"
#include "truth_impl.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    int rows, cols;
    ld *x;
    ld rad;
} matrix;

static matrix matrix_new(int rows, int cols) {
    return (matrix){rows, cols, dp_calloc((size_t)rows * cols, sizeof(ld)), 0};
}

static ld norm(const matrix *m) {
    const int64_t n = (int64_t)m->rows * m->cols;
    DP_OWN double *x = dp_alloc((size_t)n, sizeof *x);
    for (int64_t i = 0; i < n; i++)
        x[i] = (double)m->x[i];
    return tr_norm_up(x, n) * (1 + 0x1p-50);
}

static matrix from_ball(const dp_ball *b, int64_t row, int rows, int cols) {
    matrix m = matrix_new(rows, cols);
    assert(b->width == (int64_t)rows * cols && row < b->rows);
    for (int64_t i = 0; i < b->width; i++)
        m.x[i] = (ld)b->hi[row * b->width + i] + b->lo[row * b->width + i];
    m.rad = b->rad[row] + TR_LD_U * norm(&m);
    return m;
}

static matrix from_doubles(const double *x, int rows, int cols) { /* NULL: zeros */
    matrix m = matrix_new(rows, cols);
    for (int64_t i = 0; i < (int64_t)rows * cols && x; i++)
        m.x[i] = x[i];
    return m;
}

static void split(const matrix *a, double *hi, double *lo) { /* loses 2^-106 relative */
    for (int64_t i = 0; i < (int64_t)a->rows * a->cols; i++) {
        hi[i] = (double)a->x[i];
        lo[i] = (double)(a->x[i] - hi[i]);
    }
}

static matrix product(const matrix *a, const matrix *b) {
    const int64_t na_ = (int64_t)a->rows * a->cols, nb_ = (int64_t)b->rows * b->cols,
                  nc = (int64_t)a->rows * b->cols;
    matrix c = matrix_new(a->rows, b->cols);
    DP_OWN double *w = dp_doubles(2 * (na_ + nb_ + nc));
    double *al = w + na_, *bh = al + na_, *bl = bh + nb_, *ch = bl + nb_, *cl = ch + nc;
    split(a, w, al);
    split(b, bh, bl);
    dp_dd_mm(a->rows, b->cols, a->cols, w, al, bh, bl, ch, cl);
    for (int64_t i = 0; i < nc; i++)
        c.x[i] = (ld)ch[i] + cl[i];
    const ld na = norm(a), nb = norm(b), g = DP_DD_ETA(a->cols) + 0x1p-104;
    c.rad = na * b->rad + a->rad * nb + a->rad * b->rad + g * na * nb +
            (a->cols + 2) * tr_sqrt(nc) * (1 + na) * (1 + nb) * 0x1p-1068;
    return c;
}

static void subtract(matrix *a, const matrix *b) {
    for (int64_t i = 0; i < (int64_t)a->rows * a->cols; i++)
        a->x[i] -= b->x[i];
    a->rad += b->rad + TR_LD_U * norm(a);
}

static matrix transposed(const matrix *a) {
    matrix c = matrix_new(a->cols, a->rows);
    for (int i = 0; i < a->rows; i++)
        for (int j = 0; j < a->cols; j++)
            c.x[(int64_t)j * c.cols + i] = a->x[(int64_t)i * a->cols + j];
    c.rad = a->rad;
    return c;
}

/* Frees the matrix. */
static dp_truth_rank_tensor to_doubles(matrix m, int there) {
    const int64_t n = (int64_t)m.rows * m.cols;
    dp_truth_rank_tensor y = {.x = dp_doubles(n), .there = there};
    for (int64_t i = 0; i < n; i++)
        y.x[i] = (double)m.x[i];
    y.rad = tr_up(m.rad + 0x1p-53 * norm(&m) + 0x1p-1074 * tr_sqrt(n));
    free(m.x);
    return y;
}

static int index_of(const int64_t *x, int n, int64_t v) {
    for (int i = 0; i < n; i++)
        if (x[i] == v) return i;
    assert(!"a rank boundary is not among the cuts of the truth");
    return -1;
}

/* M over tokens from..until-1, both marks. */
static matrix M_between(const dp_truth *t, const dp_problem *p, int64_t from, int64_t until,
                        int hv) {
    int s = index_of(t->mark, t->nmark, from);
    const int end = index_of(t->mark, t->nmark, until);
    matrix M = from_ball(&t->M_seg, (int64_t)s * p->HV + hv, p->K, p->K);
    for (s++; s < end; s++) {
        matrix next = from_ball(&t->M_seg, (int64_t)s * p->HV + hv, p->K, p->K),
               both = product(&next, &M);
        free(next.x);
        free(M.x);
        M = both;
    }
    return M;
}

/* State entering token `at`, or its gradient; `initial` serves a sequence that starts (ends) there.
 */
static matrix state_at(const dp_truth *t, const dp_problem *p, const dp_ball *cuts, int64_t at,
                       int seq, int boundary, const double *initial, int hv) {
    const int64_t row = (int64_t)seq * p->HV + hv, KV = (int64_t)p->K * p->V;
    if (boundary) return from_doubles(initial ? initial + row * KV : NULL, p->K, p->V);
    return from_ball(cuts, (int64_t)index_of(t->cut, t->ncut, at) * p->HV + hv, p->K, p->V);
}

static int is_zero(const matrix *m) {
    for (int64_t i = 0; i < (int64_t)m->rows * m->cols; i++)
        if (m->x[i] != 0) return 0;
    return m->rad == 0;
}

static int is_finite(const matrix *m) {
    for (int64_t i = 0; i < (int64_t)m->rows * m->cols; i++)
        if (!isfinite((double)m->x[i])) return 0;
    return 1;
}

/* to - M from, without touching M when `from` is exactly zero. */
static matrix remainder_of(matrix to, const matrix *M, matrix from) {
    if (!is_zero(&from)) {
        matrix y = product(M, &from);
        subtract(&to, &y);
        free(y.x);
    }
    free(from.x);
    return to;
}

static void forward_pair(const dp_truth *t, const dp_problem *p, const dp_context *c, int hv,
                         dp_truth_rank *out) {
    const int seq = c->local_seq[c->nlocal - 1];
    const int64_t from = c->a + c->local_cu[c->nlocal - 1];
    matrix M = M_between(t, p, from, c->b, hv);
    matrix S = state_at(t, p, &t->S_cut, from, seq, from == p->cu[seq], p->s0, hv);
    const int finite = is_finite(&S);
    matrix H = remainder_of(state_at(t, p, &t->S_cut, c->b, seq, 0, NULL, hv), &M, S);
    out->of[DP_RANK_M] = to_doubles(M, 1);
    out->of[DP_RANK_H] = to_doubles(H, finite);
}

static void backward_pair(const dp_truth *t, const dp_problem *p, const dp_context *c, int hv,
                          dp_truth_rank *out) {
    const int seq = c->local_seq[0];
    const int64_t until = c->a + c->local_cu[1];
    matrix M = M_between(t, p, c->a, until, hv), dM = transposed(&M);
    matrix dS = state_at(t, p, &t->dS_cut, until, seq, until == p->cu[seq + 1], p->dstate, hv);
    const int finite = is_finite(&dS);
    matrix dH = remainder_of(state_at(t, p, &t->dS_cut, c->a, seq, 0, NULL, hv), &dM, dS);
    out->of[DP_RANK_DM] = to_doubles(dM, 1);
    out->of[DP_RANK_DH] = to_doubles(dH, finite);
    free(M.x);
}

void dp_truth_at_rank(const dp_truth *t, const dp_problem *p, const dp_context *c, int hv,
                      dp_truth_rank *out) {
    *out = (dp_truth_rank){0};
    if (!c->is_first)
        out->of[DP_RANK_S_IN] = to_doubles(state_at(t, p, &t->S_cut, c->a, 0, 0, NULL, hv), 1);
    if (!c->is_last && t->backward)
        out->of[DP_RANK_DS_OUT] = to_doubles(state_at(t, p, &t->dS_cut, c->b, 0, 0, NULL, hv), 1);
    if (!t->M_seg.rows) return;
    if (!c->is_last) forward_pair(t, p, c, hv, out);
    if (!c->is_first && t->backward) backward_pair(t, p, c, hv, out);
}

void dp_truth_rank_free(dp_truth_rank *r) {
    for (int i = 0; i < DP_RANK_TENSORS; i++)
        free(r->of[i].x);
    *r = (dp_truth_rank){0};
}
