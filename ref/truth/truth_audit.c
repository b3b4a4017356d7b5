/* ref/truth/truth_audit.c - random columns of the state, computed again in MPFR.
 *
 * A column of one value head and one sequence is a problem of its own with V = 1. Its o, dv,
 * final_state and ds0 are columns of the audited truth. Both must agree within the sum of their
 * radii (an entry is off by no more than its row). Gradients that sum over columns have no such
 * part: for these the same arithmetic runs on the column's own problem. Backward quantities need
 * the sequence to its end: where the audit stops before, they are compared on the problem that ends
 * there. */
#include "ref/vocabulary/recurrence.h"
#include "truth_impl.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

typedef struct {
    const dp_problem *p;
    const dp_truth *t;
    int hv, seq, col;
    int64_t n; /* tokens */
    dp_problem y;
    dp_truth m; /* of y, in MPFR */
    dp_truth_audit *a;
    uint64_t seed;
    dp_err *e;
} audit;

static uint64_t draw(uint64_t *s) { /* splitmix64 */
    uint64_t z = *s += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static double *slice(const double *x, int64_t first, int64_t rows, int64_t step,
                     int64_t width) { /* rows of `width`, `step` apart; NULL stays */
    if (!x) return NULL;
    double *y = dp_doubles(rows * width);
    for (int64_t i = 0; i < rows; i++)
        memcpy(y + i * width, x + first + i * step, sizeof *y * (size_t)width);
    return y;
}

/* Column `col` of rows of V numbers: `own` of n tokens from t0 on, from row `first` of a token's
 * `rows` on; NULL stays. */
static double *column(const double *x, int64_t t0, int64_t n, int64_t rows, int64_t first,
                      int64_t own, int64_t V, int64_t col) {
    if (!x) return NULL;
    double *y = dp_doubles(n * own);
    for (int64_t i = 0; i < n * own; i++)
        y[i] = x[((t0 + i / own) * rows + first + i % own) * V + col];
    return y;
}

static void column_problem(audit *u) {
    const dp_problem *p = u->p;
    const int64_t K = p->K, V = p->V, hv = u->hv, t0 = p->cu[u->seq], n = u->n,
                  row = u->seq * p->HV + hv;
    const int whole = t0 + n == p->cu[u->seq + 1];
    u->y = *p;
    u->y.T = n;
    u->y.H = u->y.HV = u->y.V = u->y.Nseq = 1;
    u->y.cu = dp_calloc(2, sizeof *u->y.cu);
    u->y.cu[1] = n;
    for (int i = 0; i < DP_NINPUTS; i++) {
        const double *x = dp_input_of(p, i);
        const int64_t heads = dp_input_heads(p, i), head = heads == p->H ? hv / dp_G(p) : hv,
                      width = dp_input_width(p, i), each = width / heads;
        u->y.in[i] = (i == DP_INPUT_DO || i == DP_INPUT_DSTATE) && !u->t->backward ? NULL
                     : i == DP_INPUT_DSTATE && !whole                              ? NULL
                     : i == DP_INPUT_S0 || i == DP_INPUT_DSTATE
                         ? slice(x, row * K * V + u->col, K, V, 1)
                     : dp_input_fields[i].kind == DP_OF_HEADS ? slice(x, hv * each, 1, each, each)
                     : dp_is_value(i) || i == DP_INPUT_DO
                         ? column(x, t0, n, width / V, hv * each / V, each / V, V, u->col)
                         : slice(x, t0 * width + head * each, n, width, each);
    }
}

/* One number against one of MPFR, both with their radii. */
static dp_status hold(audit *u, const char *name, const dp_ball *x, int64_t xi, const dp_ball *y,
                      int64_t yi, int64_t token) {
    /* NOLINTNEXTLINE(*DivideZero): a ball has a width */
    const double rad = x->rad[xi / x->width] + y->rad[yi / y->width];
    const double off = fabs((double)(((ld)x->hi[xi] - y->hi[yi]) + ((ld)x->lo[xi] - y->lo[yi])));
    if (isinf(rad)) return DP_OK;
    if (off <= rad) {
        u->a->worst = fmax(u->a->worst, off > 0 ? off / rad : 0);
        return DP_OK;
    }
    char at[64] = "";
    if (token >= 0) snprintf(at, sizeof at, ", token %lld", (long long)token);
    return dp_fail(u->e, DP_EIO,
                   "audit of the %s truth (seed %llu): %s, head %d, sequence %d%s, state column "
                   "%d: %.17g + %.3g, MPFR %.17g + %.3g, off by %.3g where both radii allow %.3g",
                   dp_truth_kind_names[u->t->kind], (unsigned long long)u->seed, name, u->hv,
                   u->seq, at, u->col, x->hi[xi], x->lo[xi], y->hi[yi], y->lo[yi], off, rad);
}

/* o and, for a whole sequence, dv, final_state, ds0: the column of the truth itself. */
static dp_status hold_column(audit *u) {
    const dp_problem *p = u->p;
    const dp_ball *f = u->t->field, *g = u->m.field;
    const int64_t t0 = p->cu[u->seq], row = (int64_t)u->seq * p->HV + u->hv;
    const int whole = t0 + u->n == p->cu[u->seq + 1];
    dp_status st = DP_OK;
    for (int64_t t = 0; t < u->n && !st; t++) {
        st = hold(u, "o", &f[DP_RESULT_O], ((t0 + t) * p->HV + u->hv) * p->V + u->col,
                  &g[DP_RESULT_O], t, t0 + t);
        for (int i = 0; i < DP_NRESULTS && whole; i++) {
            const int64_t n = dp_result_rows_per_token(p, i);
            if (!dp_is_value(dp_result_fields[i].of)) continue;
            for (int64_t j = 0; j < n && !st && f[i].rows; j++)
                st = hold(u, dp_result_fields[i].name, &f[i],
                          (((t0 + t) * p->HV + u->hv) * n + j) * p->V + u->col, &g[i], t * n + j,
                          t0 + t);
        }
    }
    for (int64_t k = 0; k < p->K && !st && whole; k++) {
        const int64_t at = (row * p->K + k) * p->V + u->col;
        st =
            hold(u, "final_state", &f[DP_RESULT_FINAL_STATE], at, &g[DP_RESULT_FINAL_STATE], k, -1);
        if (!st && f[DP_RESULT_DS0].rows && g[DP_RESULT_DS0].rows)
            st = hold(u, "ds0", &f[DP_RESULT_DS0], at, &g[DP_RESULT_DS0], k, -1);
    }
    return st;
}

/* Every tensor of the column's problem, by the arithmetic under audit. */
static dp_status hold_problem(audit *u) {
    dp_truth x;
    const dp_truth_request rq = {.kind = u->t->kind, .backward = u->t->backward};
    dp_status st = dp_truth_run(&u->y, &rq, &x, u->e);
    if (st) return st;
    for (int i = 0; i < DP_NRESULTS && !st; i++)
        for (int64_t k = 0; k < x.field[i].rows * x.field[i].width && !st; k++) {
            const int per_token = i != DP_RESULT_FINAL_STATE && i != DP_RESULT_DS0 &&
                                  i != DP_RESULT_DA_LOG && i != DP_RESULT_DDT_BIAS;
            st = hold(u, dp_result_fields[i].name, &x.field[i], k, &u->m.field[i], k,
                      per_token ? u->p->cu[u->seq] + k * u->n / (x.field[i].rows * x.field[i].width)
                                : -1);
        }
    dp_truth_free(&x);
    return st;
}

dp_status dp_truth_audit_columns(const dp_problem *p, const dp_truth *t, uint64_t seed, int columns,
                                 int64_t tokens, dp_truth_audit *a, dp_err *e) {
    *a = (dp_truth_audit){.seed = seed};
    dp_status st = DP_OK;
    uint64_t rng = seed;
    for (int i = 0; i < columns && !st; i++) {
        audit u = {.p = p,
                   .t = t,
                   .a = a,
                   .e = e,
                   .seed = seed,
                   .hv = (int)(draw(&rng) % (uint64_t)p->HV),
                   .col = (int)(draw(&rng) % (uint64_t)p->V)};
        const int64_t token = (int64_t)(draw(&rng) % (uint64_t)p->T);
        while (p->cu[u.seq + 1] <= token)
            u.seq++;
        u.n = p->cu[u.seq + 1] - p->cu[u.seq] < tokens ? p->cu[u.seq + 1] - p->cu[u.seq] : tokens;
        column_problem(&u);
        const dp_truth_request rq = {.bits = 128, .backward = t->backward};
        st = dp_truth_run(&u.y, &rq, &u.m, e);
        if (!st) {
            st = hold_column(&u);
            if (!st) st = hold_problem(&u);
            dp_truth_free(&u.m);
            a->columns++;
            a->tokens += u.n;
        }
        dp_problem_free(&u.y);
    }
    return st;
}
