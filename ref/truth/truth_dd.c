/* ref/truth/truth_dd.c - the truth in double-double arithmetic (ref/truth/truth_dd.h): blocks of
 * tokens, heads, columns.
 *
 * The order is as in truth.c: the forward runs block by block, the adjoint from the checkpoints at
 * block starts. A task has TR_DD_COLS columns; the sums of tasks are added in task order. Activated
 * rows are made block by block and never kept for a whole sequence. truth_bound.c proves the radii,
 * with u = TR_DD_U. */
#include "truth_dd.h"
#include "truth_impl.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TR_DD_SLACK (1 + 0x1p-30) /* norms of activated rows are taken in double */

/* One value head in one block. dx, dA, db: NULL forward only. */
typedef struct {
    tr_head norms;
    double *d, *dx, *dA, *beta, *db;
    double *sum_dt, *sum_A; /* rows */
    double a[2];            /* exp(A_log) */
} tr_dd_head;

/* One q/k head in one block. */
typedef struct {
    tr_qk norms;
    double *q, *k, *rstd_q, *rstd_k;
} tr_dd_qk;

/* Columns v0 .. v0+w-1 of a value head. */
typedef struct {
    int head, v0, w, is_M; /* head: index in the batch */
    double *S, *ckpt, *tape, *E, *S2,
        *G2; /* S2, G2 [T]: squares of the state after each token and of the adjoint before it */
    void *device; /* holds the state while it is not NULL */
    tr_dd_grads y;
} tr_dd_task;

/* Heads h0 .. h0+n-1 of q and k, with their value heads and tasks. */
typedef struct {
    tr_run *r;
    const tr_dd_lanes *op;
    int h0, n, ncb, ntask, nM;
    int64_t Kp, row, len; /* row = 2 Kp */
    double *bias, *in;    /* [HV][Kp], [Kp] */
    tr_dd_qk *qk;         /* [n] */
    tr_dd_head *head;     /* [n][G] */
    tr_dd_task *task;     /* [n][G][ncb], then the columns of M: [n][G][column blocks of K] */
} tr_dd_batch;

/* ---- heads at once --------------------------------------------------------------------------- */

static double *rows_alloc(int64_t n) { /* n doubles, zero, aligned for vectors */
    const size_t size = ((size_t)(n > 0 ? n : 1) * sizeof(double) + 63) / 64 * 64;
    double *x = aligned_alloc(64, size);
    if (!x) {
        fprintf(stderr, "deltaproof: out of memory (%zu bytes)\n", size);
        exit(2);
    }
    return memset(x, 0, size);
}

static void exp_of(double x, double *h, double *l) {
    mpfr_t y;
    mpfr_init2(y, 192);
    mpfr_set_d(y, x, MPFR_RNDN);
    mpfr_exp(y, y, MPFR_RNDN);
    *h = mpfr_get_d(y, MPFR_RNDN);
    mpfr_sub_d(y, y, *h, MPFR_RNDN);
    *l = mpfr_get_d(y, MPFR_RNDN);
    mpfr_clear(y);
}

static void head_open(const tr_dd_batch *b, int hv, tr_dd_head *a) {
    const dp_problem *p = b->r->p;
    const int backward = b->r->t->backward;
    *a = (tr_dd_head){.d = rows_alloc(b->len * b->row), .beta = rows_alloc(b->len * p->R * 2)};
    tr_norms_alloc(b->r, NULL, &a->norms);
    exp_of(p->A_log ? p->A_log[hv] : 0, &a->a[0], &a->a[1]);
    if (!backward) return;
    a->dx = rows_alloc(b->len * b->row);
    a->dA = rows_alloc(b->len * b->row);
    a->db = rows_alloc(b->len * p->R * 2);
    a->sum_dt = rows_alloc(b->row);
    a->sum_A = rows_alloc(b->row);
}

static void task_open(const tr_dd_batch *b, tr_dd_task *c) {
    tr_run *r = b->r;
    const int64_t size = TR_DD_COLS * b->row, R = r->p->R;
    c->S = rows_alloc(r->device ? c->w * b->row : size);
    if (r->device && !r->status)
        r->status = r->device->open(&c->device, b->Kp, R, c->w, b->len, &b->r->err);
    if (!r->t->backward || c->is_M) return;
    c->S2 = rows_alloc(r->p->T);
    c->G2 = rows_alloc(r->p->T);
    c->ckpt = rows_alloc(r->nblock * size);
    c->tape = rows_alloc((b->len + 1) * size);
    c->E = rows_alloc(b->len * R * 2 * TR_DD_COLS);
    c->y = (tr_dd_grads){.dq = rows_alloc(b->len * b->row),
                         .dk = rows_alloc(b->len * R * b->row),
                         .dg = rows_alloc(b->len * b->row),
                         .dbeta = rows_alloc(b->len * R * 2)};
}

/* Allocates n heads of q and k from h0 on, everything zero; a device's failure goes to the run. */
static tr_dd_batch dd_batch_open(tr_run *r, const tr_dd_lanes *op, int h0, int n) {
    const dp_problem *p = r->p;
    const int G = dp_G(p), Kg = dp_Kg(p), ncb = r->ncb, wM = r->device ? p->K : TR_DD_COLS,
              nMcb = (p->K + wM - 1) / wM, wide = r->device ? p->V : TR_DD_COLS;
    tr_dd_batch b = {.r = r,
                     .op = op,
                     .h0 = h0,
                     .n = n,
                     .ncb = ncb,
                     .ntask = n * G * ncb,
                     .nM = r->want_M ? n * G * nMcb : 0,
                     .len = r->len};
    b.Kp = (p->K + TR_DD_LANES - 1) / TR_DD_LANES * TR_DD_LANES;
    b.row = 2 * b.Kp;
    b.bias = rows_alloc(p->HV * b.Kp);
    b.in = rows_alloc(b.Kp);
    for (int k = 0; k < p->K; k++) {
        b.in[k] = 1;
        for (int hv = 0; hv < p->HV && p->dt_bias; hv++)
            b.bias[hv * b.Kp + k] = p->dt_bias[hv * Kg + (Kg > 1 ? k : 0)];
    }
    b.qk = dp_calloc((size_t)n, sizeof *b.qk);
    b.head = dp_calloc((size_t)(n * G), sizeof *b.head);
    b.task = dp_calloc((size_t)(b.ntask + b.nM), sizeof *b.task);
    for (int i = 0; i < n; i++) {
        b.qk[i] = (tr_dd_qk){.q = rows_alloc(b.len * b.row),
                             .k = rows_alloc(b.len * p->R * b.row),
                             .rstd_q = rows_alloc(b.len * 2),
                             .rstd_k = rows_alloc(b.len * p->R * 2)};
        tr_norms_alloc(r, &b.qk[i].norms, NULL);
    }
    for (int i = 0; i < n * G; i++)
        head_open(&b, h0 * G + i, &b.head[i]);
    for (int i = 0; i < b.ntask + b.nM; i++) {
        const int is_M = i >= b.ntask, j = is_M ? i - b.ntask : i, cb = is_M ? nMcb : ncb,
                  width = is_M ? p->K : p->V, w = is_M ? wM : wide, v0 = j % cb * w;
        b.task[i] = (tr_dd_task){
            .head = j / cb, .v0 = v0, .w = width - v0 < w ? width - v0 : w, .is_M = is_M};
        task_open(&b, &b.task[i]);
    }
    return b;
}

/* Frees them. */
static void dd_batch_close(tr_dd_batch *b) {
    for (int i = 0; i < b->ntask + b->nM; i++) {
        tr_dd_task *c = &b->task[i];
        if (c->device) b->r->device->close(c->device);
        double *x[] = {c->S, c->S2,   c->G2,   c->ckpt, c->tape,
                       c->E, c->y.dq, c->y.dk, c->y.dg, c->y.dbeta};
        for (size_t j = 0; j < sizeof x / sizeof *x; j++)
            free(x[j]);
    }
    for (int i = 0; i < b->n; i++) {
        double *x[] = {b->qk[i].q, b->qk[i].k, b->qk[i].rstd_q, b->qk[i].rstd_k};
        for (size_t j = 0; j < sizeof x / sizeof *x; j++)
            free(x[j]);
        tr_free_qk(&b->qk[i].norms);
    }
    for (int i = 0; i < b->n * dp_G(b->r->p); i++) {
        tr_dd_head *a = &b->head[i];
        double *x[] = {a->d, a->dx, a->dA, a->beta, a->db, a->sum_dt, a->sum_A};
        for (size_t j = 0; j < sizeof x / sizeof *x; j++)
            free(x[j]);
        tr_free_head(&a->norms);
    }
    free(b->bias);
    free(b->in);
    free(b->qk);
    free(b->head);
    free(b->task);
}

/* ---- activated rows -------------------------------------------------------------------------- */

static void activate_row(const tr_dd_batch *b, const double *x, double *y, double *rstd, ld *norm,
                         ld *rstd_up) {
    const dp_problem *p = b->r->p;
    double in[b->Kp] __attribute__((aligned(64))), ss = 0;
    memset(in, 0, sizeof in);
    memcpy(in, x, sizeof *x * (size_t)p->K);
    if (p->l2norm) {
        b->op->l2(b->Kp, in, y, rstd);
        *rstd_up = rstd[0] * TR_DD_SLACK;
    } else {
        memcpy(y, in, sizeof in);
        memset(y + b->Kp, 0, sizeof in);
    }
    for (int i = 0; i < p->K; i++)
        ss += y[i] * y[i];
    *norm = sqrt(ss) * TR_DD_SLACK + 0x1p-500; /* squares that underflowed */
}

static void activate_qk(const tr_dd_batch *b, int i, int64_t t0, int64_t t) {
    const dp_problem *p = b->r->p;
    tr_dd_qk *a = &b->qk[i];
    const int64_t h = b->h0 + i, R = p->R, at = t - t0, K = p->K;
    ld none;
    activate_row(b, p->q + (t * p->H + h) * K, a->q + at * b->row, a->rstd_q + at * 2,
                 &a->norms.q_norm[t], p->l2norm ? &a->norms.rstd_q_up[t] : &none);
    for (int64_t j = 0; j < R; j++)
        activate_row(b, p->k + ((t * p->H + h) * R + j) * K, a->k + (at * R + j) * b->row,
                     a->rstd_k + (at * R + j) * 2, &a->norms.k_norm[t * R + j],
                     p->l2norm ? &a->norms.rstd_k_up[t * R + j] : &none);
}

static void activate_beta(const tr_dd_batch *b, int hv, tr_dd_head *a, int64_t t, int64_t at) {
    const dp_problem *p = b->r->p;
    const int64_t R = p->R;
    const double *raw = p->beta + (t * p->HV + hv) * R,
                 z = p->beta_form == DP_BETA_SIGMOID2 ? 2 : 1;
    for (int64_t j = 0; j < R; j += TR_DD_LANES) {
        double x[TR_DD_LANES] __attribute__((aligned(64))) = {0},
                              y[2][2 * TR_DD_LANES] __attribute__((aligned(64)));
        for (int64_t i = j; i < R && i < j + TR_DD_LANES; i++)
            x[i - j] = raw[i];
        if (p->beta_form != DP_BETA_PLAIN) b->op->sigmoid8(x, y[0], y[1]);
        for (int64_t i = j; i < R && i < j + TR_DD_LANES; i++) {
            double v[4] = {raw[i], 0, 1, 0};
            if (p->beta_form != DP_BETA_PLAIN)
                for (int m = 0; m < 4; m++)
                    v[m] = z * y[m / 2][m % 2 * TR_DD_LANES + i - j];
            memcpy(a->beta + (at * R + i) * 2, v, 2 * sizeof *v);
            if (a->db) memcpy(a->db + (at * R + i) * 2, v + 2, 2 * sizeof *v);
            a->norms.beta_up[t * R + i] = fabs(v[0]) * TR_DD_SLACK;
            a->norms.db_up[t * R + i] = v[2] * TR_DD_SLACK;
        }
    }
}

/* A token that does not decay: 1, and nothing for its gate. */
static void no_gate(const tr_dd_batch *b, tr_dd_head *a, tr_gate_norms *n, int64_t at) {
    const size_t size = sizeof(double) * (size_t)b->row;
    for (int64_t k = 0; k < b->Kp; k++) {
        a->d[at * b->row + k] = 1;
        a->d[at * b->row + b->Kp + k] = 0;
    }
    if (a->dx) memset(a->dx + at * b->row, 0, size);
    if (a->dA) memset(a->dA + at * b->row, 0, size);
    *n = (tr_gate_norms){.d = 1};
}

static void activate_head(const tr_dd_batch *b, int i, int64_t t0, int64_t t) {
    const tr_run *r = b->r;
    const dp_problem *p = r->p;
    tr_dd_head *a = &b->head[i];
    const int hv = b->h0 * dp_G(p) + i;
    const int64_t at = t - t0, Kg = dp_Kg(p), R = p->R;
    double raw[b->Kp] __attribute__((aligned(64)));
    memset(raw, 0, sizeof raw);
    for (int64_t k = 0; k < p->K; k++)
        raw[k] = p->g[(t * p->HV + hv) * Kg + (Kg > 1 ? k : 0)];
    tr_dd_gate g = {.Kp = b->Kp,
                    .form = p->gate,
                    .a = {a->a[0], a->a[1]},
                    .lower_bound = p->lower_bound,
                    .raw = raw,
                    .bias = b->bias + hv * b->Kp,
                    .in = b->in,
                    .d = a->d + at * b->row,
                    .dx = a->dx ? a->dx + at * b->row : NULL,
                    .dA = a->dA ? a->dA + at * b->row : NULL};
    b->op->gate(&g);
    /* eps_x of truth_gate.c; the sum raw + dt_bias is exact here. Lower bound: |y| = |a x| <= |a|
     * |raw + bias| */
    ld eg = 0, ex = 0, ea = 0;
    if (p->gate == DP_GATE_SOFTPLUS) eg = ex = ea = tr_gamma(r, 10);
    if (p->gate == DP_GATE_LOWER_BOUND) {
        double top = 0;
        for (int64_t k = 0; k < p->K; k++)
            top = fmax(top, fabs(raw[k] + g.bias[k]));
        const ld dy = tr_rho(a->a[0] * top * TR_DD_SLACK * tr_gamma(r, 3));
        eg = dy + tr_gamma(r, 10);
        ex = dy + tr_gamma(r, 12);
        ea = dy + tr_gamma(r, 14);
    }
    tr_gate_norms *n = &a->norms.norms[t];
    const ld d = g.top[0] * TR_DD_SLACK, x = g.top[2] * TR_DD_SLACK,
             A = sqrt(g.top[3] / (Kg > 1 ? 1 : p->K)) * TR_DD_SLACK + 0x1p-500;
    n->d = d;
    n->d_err = tr_rho(tr_rho(eg)) * g.top[1] * TR_DD_SLACK + tr_gamma(r, 2) * d +
               TR_DD_TINY; /* rho(|g| eps) <= |g| rho(rho(eps)) here */
    n->x = tr_exact_up(x, ex);
    n->x_err = n->x * ex + TR_DD_TINY;
    n->a = tr_exact_up(A, ea);
    n->a_err = n->a * ea + TR_DD_TINY;
    if (!tr_decays(p, t)) no_gate(b, a, n, at);
    activate_beta(b, hv, a, t, at);
    const tr_dd_qk *q = &b->qk[i / dp_G(p)];
    /* NOLINTNEXTLINE(clang-analyzer-core.VLASize): R is 1 to 64 */
    double beta[R];
    for (int64_t j = 0; j < R; j++)
        beta[j] = a->beta[(at * R + j) * 2];
    a->norms.nu[t] = tr_step_norm(r, (int)R, q->k + at * R * b->row, b->row,
                                  q->norms.k_norm + t * R, beta, a->norms.beta_up + t * R);
    tr_row_norms(r, hv, t, &a->norms);
}

/* Activates a block's tokens for all heads, with their norms; inside a parallel region. */
static void dd_activate_block(const tr_dd_batch *b, const tr_block *k) {
    const int G = dp_G(b->r->p);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < (k->t1 - k->t0) * b->n; i++) {
        const int h = (int)(i % b->n);
        const int64_t t = k->t0 + i / b->n;
        activate_qk(b, h, k->t0, t);
        for (int g = 0; g < G; g++)
            activate_head(b, h * G + g, k->t0, t);
    }
}

/* ---- chain rule ------------------------------------------------------------------------------ */

/* Stores h + l as entry `at`. */
static void dd_put(dp_ball *b, int64_t at, double h, double l) {
    const double s = h + l, z = s - h;
    b->hi[at] = s;
    b->lo[at] = isfinite(s) ? (h - (s - z)) + (l - z) : 0;
}

static void add(double *h, double *l, double bh, double bl) {
    const double s = *h + bh, z = s - *h, t = ((*h - (s - z)) + (bh - z)) + (*l + bl);
    *h = s + t;
    *l = t - (*h - s);
}

static void put_row(const tr_dd_batch *b, dp_ball *to, int64_t row, const double *x) {
    for (int64_t k = 0; k < to->width; k++)
        dd_put(to, row * to->width + k, x[k], x[b->Kp + k]);
}

/* Gradients of token `at` of a block by the raw inputs of head i, from the sums of its tasks. */
static void dd_chain_token(const tr_dd_batch *b, int i, const tr_block *k, int64_t at) {
    const tr_run *r = b->r;
    const dp_problem *p = r->p;
    const int G = dp_G(p);
    const int64_t R = p->R, row = b->row, Kp = b->Kp, t = k->t0 + at, h = b->h0 + i;
    dp_ball *f = r->t->field;
    tr_dd_task *first = b->task + (int64_t)i * G * b->ncb;
    double *dq = first->y.dq + at * row, *dk = first->y.dk + at * R * row,
           raw[row] __attribute__((aligned(64)));
    for (int gv = 0; gv < G; gv++) {
        const int64_t hv = h * G + gv;
        tr_dd_task *c = first + gv * b->ncb;
        double *dg = c->y.dg + at * row, *dbeta = c->y.dbeta + at * R * 2;
        for (int m = 1; m < b->ncb; m++) {
            b->op->add_rows(Kp, c->y.dq + at * row, c[m].y.dq + at * row);
            b->op->add_rows(Kp, dg, c[m].y.dg + at * row);
            for (int64_t j = 0; j < R; j++) {
                b->op->add_rows(Kp, c->y.dk + (at * R + j) * row, c[m].y.dk + (at * R + j) * row);
                add(&dbeta[2 * j], &dbeta[2 * j + 1], c[m].y.dbeta[(at * R + j) * 2],
                    c[m].y.dbeta[(at * R + j) * 2 + 1]);
            }
        }
        if (dp_Kg(p) == 1) { /* one gate: the sum over channels; padding is zero */
            for (int64_t x = 1; x < p->K; x++)
                add(&dg[0], &dg[Kp], dg[x], dg[Kp + x]);
            for (int64_t x = 1; x < Kp; x++)
                dg[x] = dg[Kp + x] = 0;
        }
        b->op->mul_rows(Kp, raw, dg, b->head[i * G + gv].dx + at * row);
        put_row(b, &f[DP_RESULT_DG], t * p->HV + hv, raw);
        for (int64_t j = 0; j < R; j++) {
            const double *db = b->head[i * G + gv].db + (at * R + j) * 2;
            double x[2] = {dbeta[2 * j], dbeta[2 * j + 1]}, y[2] = {0, 0}, e[2];
            /* (x0 + x1)(db0 + db1), by the exact product of the leading parts */
            e[0] = x[0] * db[0];
            e[1] = __builtin_fma(x[0], db[0], -e[0]);
            e[1] += x[0] * db[1] + x[1] * db[0];
            add(&y[0], &y[1], e[0], e[1]);
            dd_put(&f[DP_RESULT_DBETA], (t * p->HV + hv) * R + j, y[0], y[1]);
        }
        if (!gv) continue;
        b->op->add_rows(Kp, dq, c->y.dq + at * row);
        for (int64_t j = 0; j < R; j++)
            b->op->add_rows(Kp, dk + j * row, c->y.dk + (at * R + j) * row);
    }
    const tr_dd_qk *q = &b->qk[i];
    if (p->l2norm) b->op->chain_l2(Kp, q->q + at * row, q->rstd_q + at * 2, dq);
    put_row(b, &f[DP_RESULT_DQ], t * p->H + h, dq);
    for (int64_t j = 0; j < R; j++) {
        if (p->l2norm)
            b->op->chain_l2(Kp, q->k + (at * R + j) * row, q->rstd_k + (at * R + j) * 2,
                            dk + j * row);
        put_row(b, &f[DP_RESULT_DK], (t * p->H + h) * R + j, dk + j * row);
    }
}

/* Adds a block's tokens, last to first, to value head i's ddt_bias and dA_log. */
static void dd_accumulate_gate(const tr_dd_batch *b, int i, const tr_block *k) {
    tr_dd_head *a = &b->head[i];
    const tr_dd_task *c = &b->task[(int64_t)i * b->ncb];
    double x[b->row] __attribute__((aligned(64)));
    if (b->r->p->gate == DP_GATE_LOG) return;
    for (int64_t at = k->t1 - k->t0 - 1; at >= 0; at--) {
        b->op->mul_rows(b->Kp, x, c->y.dg + at * b->row, a->dx + at * b->row);
        b->op->add_rows(b->Kp, a->sum_dt, x);
        b->op->mul_rows(b->Kp, x, c->y.dg + at * b->row, a->dA + at * b->row);
        b->op->add_rows(b->Kp, a->sum_A, x);
    }
}

/* Stores ddt_bias and dA_log of all heads. */
static void dd_store_gate_sums(const tr_dd_batch *b) {
    const dp_problem *p = b->r->p;
    const int64_t Kg = dp_Kg(p);
    for (int i = 0; i < b->n * dp_G(p); i++) {
        const tr_dd_head *a = &b->head[i];
        const int64_t hv = (int64_t)b->h0 * dp_G(p) + i;
        double h = 0, l = 0;
        for (int64_t c = 0; c < Kg; c++)
            add(&h, &l, a->sum_A[c], a->sum_A[b->Kp + c]);
        if (p->A_log) dd_put(&b->r->t->field[DP_RESULT_DA_LOG], hv, h, l);
        for (int64_t c = 0; c < Kg && p->dt_bias; c++)
            dd_put(&b->r->t->field[DP_RESULT_DDT_BIAS], hv * Kg + c, a->sum_dt[c],
                   a->sum_dt[b->Kp + c]);
    }
}

/* Norms of the computed states and adjoints: every column is in one task, and the low parts are
 * below 2^-52 of the leading ones. */
static void dd_measured_norms(const tr_dd_batch *b, int i) {
    const tr_dd_task *c = &b->task[(int64_t)i * b->ncb];
    tr_head *a = &b->head[i].norms;
    a->S_up = dp_calloc((size_t)b->r->p->T, sizeof(ld));
    a->G_up = dp_calloc((size_t)b->r->p->T, sizeof(ld));
    for (int64_t t = 0; t < b->r->p->T; t++) {
        double s = 0, g = 0;
        for (int m = 0; m < b->ncb; m++) {
            s += c[m].S2[t];
            g += c[m].G2[t];
        }
        a->S_up[t] = sqrt(s) * TR_DD_SLACK + 0x1p-500;
        a->G_up[t] = sqrt(g) * TR_DD_SLACK + 0x1p-500;
    }
}

/* ---- the run --------------------------------------------------------------------------------- */

const char *tr_dd_only;

static tr_dd_rows rows_of(const tr_dd_batch *b, int i, const tr_block *k) {
    const tr_dd_qk *q = &b->qk[i / dp_G(b->r->p)];
    const tr_dd_head *a = &b->head[i];
    return (tr_dd_rows){b->Kp, b->r->p->R, k->t1 - k->t0, q->q, q->k, a->d, a->beta};
}

static tr_dd_cols cols_of(const tr_dd_batch *b, const tr_dd_task *c, const tr_block *k) {
    const dp_problem *p = b->r->p;
    const dp_ball *o = &b->r->t->field[DP_RESULT_O];
    const int64_t hv = b->h0 * dp_G(p) + c->head, at = (k->t0 * p->HV + hv) * p->V + c->v0;
    tr_dd_cols y = {.w = c->w,
                    .scale = p->scale,
                    .S = c->S,
                    .V = p->V,
                    .ldv = (int64_t)p->HV * p->R * p->V,
                    .ldo = (int64_t)p->HV * p->V};
    if (!c->is_M) {
        y.v = p->v + (k->t0 * p->HV + hv) * p->R * p->V + c->v0;
        y.oh = o->hi + at;
        y.ol = o->lo + at;
    }
    return y;
}

/* The first failure ends up in the run; what follows it is thrown away. */
static void on_device(const tr_dd_batch *b, dp_status st) {
    if (st && !b->r->status) b->r->status = st;
}

static void load_state(const tr_dd_batch *b, const tr_dd_task *c, const double *x, int64_t row) {
    const dp_problem *p = b->r->p;
    memset(c->S, 0, sizeof(double) * (size_t)(c->w * b->row));
    for (int v = 0; v < c->w && x; v++)
        for (int64_t k = 0; k < p->K; k++)
            c->S[v * b->row + k] = x[(row * p->K + k) * p->V + c->v0 + v];
    on_device(b, c->device ? b->r->device->set(c->device, c->S, &b->r->err) : DP_OK);
}

static void store_state(const tr_dd_batch *b, const tr_dd_task *c, dp_ball *to, int64_t row) {
    on_device(b, c->device ? b->r->device->get(c->device, c->S, &b->r->err) : DP_OK);
    const int64_t K = b->r->p->K, width = to->width / K;
    for (int64_t k = 0; k < K; k++)
        for (int v = 0; v < c->w; v++)
            dd_put(to, (row * K + k) * width + c->v0 + v, c->S[v * b->row + k],
                   c->S[v * b->row + b->Kp + k]);
}

static void advance(const tr_dd_batch *b, tr_dd_task *c, const tr_dd_rows *rows,
                    const tr_dd_cols *cols) {
    if (c->device)
        on_device(b, b->r->device->forward(c->device, rows, cols, &b->r->err));
    else if (!b->r->device)
        b->op->forward(rows, cols);
}

static void forward_task(const tr_dd_batch *b, tr_dd_task *c, int at) {
    const tr_run *r = b->r;
    const dp_problem *p = r->p;
    const tr_block *k = &r->block[at];
    const int64_t hv = b->h0 * dp_G(p) + c->head, state_row = (int64_t)k->seq * p->HV + hv;
    const tr_dd_rows rows = rows_of(b, c->head, k);
    const tr_dd_cols cols = cols_of(b, c, k);
    if (c->is_M) {
        int seg = 0;
        while (r->t->mark[seg + 1] <= k->t0)
            seg++;
        if (r->t->mark[seg] == k->t0) {
            load_state(b, c, NULL, 0);
            for (int v = 0; v < c->w; v++)
                c->S[v * b->row + c->v0 + v] = 1;
            on_device(b, c->device ? r->device->set(c->device, c->S, &b->r->err) : DP_OK);
        }
        advance(b, c, &rows, &cols);
        if (r->t->mark[seg + 1] == k->t1)
            store_state(b, c, &r->t->M_seg, (int64_t)seg * p->HV + hv);
        return;
    }
    if (k->first_of_seq) load_state(b, c, p->s0, state_row);
    if (c->ckpt)
        memcpy(c->ckpt + at * TR_DD_COLS * b->row, c->S,
               sizeof(double) * (size_t)(TR_DD_COLS * b->row));
    if (k->cut >= 0) store_state(b, c, &r->t->S_cut, (int64_t)k->cut * p->HV + hv);
    advance(b, c, &rows, &cols);
    if (k->last_of_seq) store_state(b, c, &r->t->field[DP_RESULT_FINAL_STATE], state_row);
}

static void backward_task(const tr_dd_batch *b, tr_dd_task *c, int at) {
    const tr_run *r = b->r;
    const dp_problem *p = r->p;
    const tr_block *k = &r->block[at];
    const int64_t hv = b->h0 * dp_G(p) + c->head, state_row = (int64_t)k->seq * p->HV + hv,
                  size = TR_DD_COLS * b->row;
    const int64_t at_v = (k->t0 * p->HV + hv) * p->R * p->V + c->v0;
    const tr_dd_rows rows = rows_of(b, c->head, k);
    const tr_dd_cols cols = cols_of(b, c, k);
    memcpy(c->tape, c->ckpt + at * size, sizeof(double) * (size_t)size);
    b->op->rebuild(&rows, &cols, c->tape, c->E);
    for (int64_t i = 0; i < rows.n; i++)
        c->S2[k->t0 + i] = b->op->squares(b->Kp, c->w, c->tape + (i + 1) * size);
    c->y.G2 = c->G2 + k->t0;
    if (k->last_of_seq) load_state(b, c, p->dstate, state_row);
    c->y.dv_hi = r->t->field[DP_RESULT_DV].hi + at_v;
    c->y.dv_lo = r->t->field[DP_RESULT_DV].lo + at_v;
    b->op->backward(&rows, &cols, c->tape, c->E, p->dout + (k->t0 * p->HV + hv) * p->V + c->v0,
                    &c->y);
    if (k->cut >= 0) store_state(b, c, &r->t->dS_cut, (int64_t)k->cut * p->HV + hv);
    if (k->first_of_seq) store_state(b, c, &r->t->field[DP_RESULT_DS0], state_row);
}

static void run_batch(tr_run *r, const tr_dd_lanes *op, int h0, int n) {
    const int G = dp_G(r->p);
    tr_dd_batch b = dd_batch_open(r, op, h0, n);
#pragma omp parallel num_threads(r->threads)
    {
        for (int k = 0; k < r->nblock; k++) {
            dd_activate_block(&b, &r->block[k]);
#pragma omp for schedule(dynamic, 1)
            for (int i = 0; i < b.ntask + b.nM; i++) {
                forward_task(&b, &b.task[i], k);
                tr_progress(r, (double)(r->block[k].t1 - r->block[k].t0) * b.task[i].w);
            }
        }
        for (int k = r->nblock - 1; k >= 0 && r->t->backward; k--) {
            const int64_t len = r->block[k].t1 - r->block[k].t0;
            if (k < r->nblock - 1) dd_activate_block(&b, &r->block[k]);
#pragma omp for schedule(dynamic, 1)
            for (int i = 0; i < b.ntask; i++) {
                backward_task(&b, &b.task[i], k);
                tr_progress(r, 3.0 * (double)len * b.task[i].w);
            }
#pragma omp for schedule(static)
            for (int64_t i = 0; i < len * n; i++)
                dd_chain_token(&b, (int)(i / len), &r->block[k], i % len);
#pragma omp for schedule(static)
            for (int i = 0; i < n * G; i++)
                dd_accumulate_gate(&b, i, &r->block[k]);
        }
    }
    if (r->t->backward) dd_store_gate_sums(&b);
#pragma omp parallel for schedule(dynamic, 1) num_threads(r->threads)
    for (int i = 0; i < n; i++) {
        tr_head heads[G];
        for (int g = 0; g < G && r->t->backward; g++)
            dd_measured_norms(&b, i * G + g);
        for (int g = 0; g < G; g++)
            heads[g] = b.head[i * G + g].norms;
        tr_bound_group(r, h0 + i, &b.qk[i].norms, heads);
    }
    dd_batch_close(&b);
}

void tr_run_dd(tr_run *r) {
    const dp_problem *p = r->p;
    const tr_dd_lanes *op = tr_dd_choose(tr_dd_only);
    const int tasks = dp_G(p) * r->ncb, n = (2 * r->threads + tasks - 1) / tasks;
    for (int h = 0; h < p->H && !r->status; h += n)
        run_batch(r, op, h, p->H - h < n ? p->H - h : n);
    for (int i = 0; i < DP_NRESULTS + 3; i++) {
        dp_ball *b = i < DP_NRESULTS        ? &r->t->field[i]
                     : i == DP_NRESULTS     ? &r->t->S_cut
                     : i == DP_NRESULTS + 1 ? &r->t->dS_cut
                                            : &r->t->M_seg;
        for (int64_t j = 0; j < b->rows; j++)
            b->rad[j] += TR_DD_FLOOR;
    }
}

static int too_large(const double *x, int64_t n) {
    for (int64_t i = 0; x && i < n; i++)
        if (!(fabs(x[i]) <= TR_DD_MAX)) return 1;
    return 0;
}

const char *dp_truth_dd_refuses(const dp_problem *p) {
    static const char LARGE[] = "a number is not finite or above 2^30";
    if (dp_by_gates(p)) return "erase and write stand in place of beta";
    if (dp_by_rows(p))
        return p->model == DP_DPLR ? "lr_a and lr_b stand in place of beta"
                                   : "a token has rows of its own in place of keys";
    if (!dp_erases(p)) return "nothing is erased";
    if (p->K > TR_DD_MAX_K || (int64_t)p->K * p->V > 1 << 20) return "K or V is too large for it";
    for (int i = 0; i < DP_NINPUTS; i++) /* A_log has a limit of its own */
        if (i != DP_INPUT_A_LOG && too_large(dp_input_of(p, i), dp_input_count(p, i))) return LARGE;
    if (too_large(&p->scale, 1) || too_large(&p->lower_bound, 1)) return LARGE;
    for (int64_t i = 0; p->gate == DP_GATE_LOG && i < dp_input_count(p, DP_INPUT_G); i++)
        if (p->g[i] > 20) return "a log decay is above 20";
    for (int h = 0; p->A_log && h < p->HV; h++)
        if (!(p->A_log[h] <= 20)) return "A_log is not finite or above 20";
    return NULL;
}
