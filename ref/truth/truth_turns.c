/* ref/truth/truth_turns.c - the truth of keys that read one after another (Gated DeltaProduct), as
 * that of GDN over T R tokens of one key each.
 *
 * Key j of token t is token t R + j there. The first of a token's keys decays the state, the others
 * do not (dp_problem.decays_every); the query and do stand at the last, zeros elsewhere. So o and
 * dq are those of the last, dg that of the first, and dk, dv, dbeta those of each. States, M and
 * sums over tokens are the same. Every radius is that of a row there; a row of dbeta holds the keys
 * of a token, and has the sum of their radii.
 */
#include "truth_impl.h"

#include <string.h>

/* [T][heads][R][n] as [T R][heads][n]; NULL stays. */
static double *unrolled(const dp_problem *p, const double *x, int64_t heads, int64_t n) {
    const int64_t R = p->R;
    if (!x) return NULL;
    double *y = dp_doubles(p->T * heads * R * n);
    for (int64_t i = 0; i < p->T * heads; i++)
        for (int64_t j = 0; j < R; j++)
            memcpy(y + ((i / heads * R + j) * heads + i % heads) * n, x + (i * R + j) * n,
                   sizeof *y * (size_t)n);
    return y;
}

/* [T][n] at key `at` of each token, zeros at the others; NULL stays. */
static double *spread(const dp_problem *p, const double *x, int64_t at, int64_t n) {
    if (!x) return NULL;
    double *y = dp_doubles(p->T * p->R * n);
    for (int64_t t = 0; t < p->T; t++)
        memcpy(y + (t * p->R + at) * n, x + t * n, sizeof *y * (size_t)n);
    return y;
}

static dp_problem one_key_a_token(const dp_problem *p) {
    const int64_t last = p->R - 1;
    dp_problem y = *p;
    y.model = DP_GDN;
    y.T = p->T * p->R;
    y.R = 1;
    y.decays_every = p->R;
    y.cu = dp_cu_copy(p);
    for (int i = 0; i <= p->Nseq; i++)
        y.cu[i] *= p->R;
    y.q = spread(p, p->q, last, (int64_t)p->H * p->K);
    y.dout = spread(p, p->dout, last, (int64_t)p->HV * p->V);
    y.g = spread(p, p->g, 0, p->HV);
    y.k = unrolled(p, p->k, p->H, p->K);
    y.v = unrolled(p, p->v, p->HV, p->V);
    y.beta = unrolled(p, p->beta, p->HV, 1);
    return y;
}

static void one_key_free(dp_problem *y) {
    double *own[] = {y->q, y->dout, y->g, y->k, y->v, y->beta};
    for (size_t i = 0; i < sizeof own / sizeof *own; i++)
        free(own[i]);
    free(y->cu);
}

static void copy_row(dp_ball *to, int64_t row, const dp_ball *from, int64_t at) {
    const size_t size = sizeof(double) * (size_t)to->width;
    memcpy(to->hi + row * to->width, from->hi + at * from->width, size);
    memcpy(to->lo + row * to->width, from->lo + at * from->width, size);
    to->rad[row] = from->rad[at];
}

/* Key `at` of each token. */
static void rows_of_key(const dp_problem *p, int64_t heads, int64_t at, const dp_ball *from,
                        dp_ball *to) {
    for (int64_t i = 0; i < to->rows; i++)
        copy_row(to, i, from, (i / heads * p->R + at) * heads + i % heads);
}

static void rows_of_keys(const dp_problem *p, int64_t heads, const dp_ball *from, dp_ball *to) {
    for (int64_t i = 0; i < to->rows; i++) {
        const int64_t at = i / p->R;
        copy_row(to, i, from, (at / heads * p->R + i % p->R) * heads + at % heads);
    }
}

static void entries_of_keys(const dp_problem *p, const dp_ball *from, dp_ball *to) {
    for (int64_t i = 0; i < to->rows; i++) {
        double sum = 0;
        for (int64_t j = 0; j < p->R; j++) {
            const int64_t at = (i / p->HV * p->R + j) * p->HV + i % p->HV;
            to->hi[i * p->R + j] = from->hi[at];
            to->lo[i * p->R + j] = from->lo[at];
            sum += from->rad[at];
        }
        to->rad[i] = tr_up((ld)sum * (1 + p->R * 0x1p-50));
    }
}

static void take(dp_ball *from, dp_ball *to) {
    dp_ball_free(to);
    *to = *from;
    *from = (dp_ball){0};
}

static void gather(const dp_problem *p, dp_truth *from, dp_truth *to) {
    for (int i = 0; i < DP_NRESULTS; i++) {
        dp_ball *x = &from->field[i], *y = &to->field[i];
        const int heads = dp_result_heads(p, i);
        if (!y->rows) continue;
        if (i == DP_RESULT_O || i == DP_RESULT_DQ)
            rows_of_key(p, heads, p->R - 1, x, y);
        else if (i == DP_RESULT_DG)
            rows_of_key(p, heads, 0, x, y);
        else if (i == DP_RESULT_DK || i == DP_RESULT_DV)
            rows_of_keys(p, heads, x, y);
        else if (i == DP_RESULT_DBETA)
            entries_of_keys(p, x, y);
        else
            take(x, y);
    }
    take(&from->S_cut, &to->S_cut);
    take(&from->dS_cut, &to->dS_cut);
    take(&from->M_seg, &to->M_seg);
}

dp_status tr_truth_in_turn(const dp_problem *p, const dp_truth_request *rq, dp_truth *t,
                           dp_err *e) {
    dp_status s = tr_truth_alloc(p, rq, t, e);
    if (s) return s;
    dp_problem y = one_key_a_token(p);
    int64_t *cut = dp_calloc((size_t)rq->ncut, sizeof *cut);
    for (int i = 0; i < rq->ncut; i++)
        cut[i] = rq->cut[i] * p->R;
    dp_truth_request each = *rq;
    dp_truth x;
    each.cut = cut;
    s = dp_truth_run(&y, &each, &x, e);
    if (s) {
        dp_truth_free(t);
    } else {
        gather(p, &x, t);
        dp_truth_free(&x);
    }
    one_key_free(&y);
    free(cut);
    return s;
}
