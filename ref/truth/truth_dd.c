/* ref/truth/truth_dd.c - the truth in double-double arithmetic (ref/truth/truth_dd.h): blocks of
 * tokens, heads, columns.
 *
 * The order is as in truth.c: the forward runs block by block, the adjoint from the checkpoints at
 * block starts. A task has TR_DD_COLS columns; the sums of tasks are added in task order. Activated
 * rows are made block by block and never kept for a whole sequence. truth_bound.c proves the radii,
 * with u = TR_DD_U. */
#include "truth_dd.h"
#include "ref/arithmetic/elementary.h"
#include "truth_impl.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TR_DD_SLACK (1 + 0x1p-30) /* norms of activated rows are taken in double */

/* One value head in one block: [all], the block's tokens and b->pad more on both sides. unit: rows
 * of keys but k, over their norm. An entry k, and a strength beta, has no array. dx, dA, db: NULL
 * forward only. */
typedef struct {
    tr_head norms;
    double *d, *dx, *dA, *beta, *db;
    double *unit[DP_NINPUTS], *rstd[DP_NINPUTS], *factor[DP_NFACTORS]; /* of the gate */
    double *entry[DP_MAX_ENTRIES], *strength, *values; /* [all][n][2], [all][n][2][V] */
    double *sum_dt, *sum_A, *sum_angle;                /* rows; [P][2] */
    double a[2];                                       /* exp(A_log) */
} tr_dd_head;

/* One q/k head in one block. */
typedef struct {
    tr_qk norms;
    double *q, *k, *rstd_q, *rstd_k, *turn; /* rotations [T][P][4] */
} tr_dd_qk;

/* Columns v0 .. v0+w-1 of a value head. Behind gradients of a block's tokens stand those of the pad
 * tokens after it. */
typedef struct {
    int head, v0, w, is_M; /* head: index in the batch */
    /* S2, G2 [T][G]: squares of the state after each of a token's G groups of rows and of the
     * adjoint before it */
    double *S, *ckpt, *tape, *E, *S2, *G2;
    double *dphi; /* [len][P][2] of a head's first task */
    void *device; /* holds the state while it is not NULL */
    tr_dd_grads y;
} tr_dd_task;

/* Heads h0 .. h0+n-1 of q and k, with their value heads and tasks. */
typedef struct {
    tr_run *r;
    const tr_dd_lanes *op;
    tr_dd_norm norm;
    int h0, n, ncb, ntask, nM, rows, entries, groups; /* of a token; entries: one a key */
    int64_t Kp, row, len, pad, all;                   /* row = 2 Kp, all = len + 2 pad */
    double *bias, *in;                                /* [HV][Kp], [Kp] */
    int in_entries[DP_NINPUTS];                       /* is the input a factor of any? */
    tr_dd_qk *qk;                                     /* [n] */
    tr_dd_head *head;                                 /* [n][G] */
    tr_dd_task *task; /* [n][G][ncb], then the columns of M: [n][G][column blocks of K] */
} tr_dd_batch;

/* ---- numbers --------------------------------------------------------------------------------- */

typedef struct {
    double h, l;
} num;

static num plus(num a, num b) {
    const double s = a.h + b.h, z = s - a.h, t = ((a.h - (s - z)) + (b.h - z)) + (a.l + b.l),
                 h = s + t;
    return (num){h, t - (h - s)};
}
static num times(num a, num b) {
    const double p = a.h * b.h;
    return plus((num){0, 0}, (num){p, __builtin_fma(a.h, b.h, -p) + (a.h * b.l + a.l * b.h)});
}
static num minus(num a, num b) { return plus(a, (num){-b.h, -b.l}); }
static num pair(const double *x) { return (num){x[0], x[1]}; }
static void add_pair(double *to, num y) {
    const num sum = plus(pair(to), y);
    to[0] = sum.h;
    to[1] = sum.l;
}
static num channel(const double *x, int64_t Kp, int64_t k) { return (num){x[k], x[Kp + k]}; }
static void set_channel(double *x, int64_t Kp, int64_t k, num y) {
    x[k] = y.h;
    x[Kp + k] = y.l;
}
static void fill_row(double *x, int64_t Kp, num y) {
    for (int64_t k = 0; k < Kp; k++)
        set_channel(x, Kp, k, y);
}

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

static int has_gradient_rows(const tr_run *r, int e) { /* an entry with an array of its own */
    const dp_entry x = r->rows.of[e];
    return !dp_entry_is(x, DP_INPUT_K) || dp_entry_rotated(dp_recurrence_of(r->p), x) >= 0;
}

static void rows_open(const tr_dd_batch *b, tr_dd_head *a) {
    const tr_run *r = b->r;
    const dp_recurrence *of = dp_recurrence_of(r->p);
    const int64_t n = r->p->T * b->rows;
    for (int i = 0; i < DP_NINPUTS; i++) {
        if (!tr_is_given(i) || !dp_input_of(r->p, i)) continue;
        a->unit[i] = rows_alloc(b->all * b->row);
        a->rstd[i] = rows_alloc(b->all * 2);
        if (dp_is_normed(r->p, i))
            a->norms.unit[i].rstd_up = dp_calloc((size_t)r->p->T, sizeof(ld));
    }
    for (int f = 0; f < DP_NFACTORS; f++)
        if (tr_has_factor(r->p, f)) a->factor[f] = rows_alloc(b->all * b->row);
    for (int e = 0; e < r->rows.n; e++) {
        if (!has_gradient_rows(r, e)) continue;
        a->entry[e] = rows_alloc(b->all * r->p->R * b->row);
        a->norms.entry_norm[e] = dp_calloc((size_t)(r->p->T * r->p->R), sizeof(ld));
    }
    if (tr_has_products(r->p)) a->values = rows_alloc(b->all * b->rows * 2 * r->p->V);
    if (of->n == 1 && dp_entry_is(of->row[0].strength, DP_INPUT_BETA)) return;
    a->strength = rows_alloc(b->all * b->rows * 2);
    a->norms.strength_up = dp_calloc((size_t)n, sizeof(ld));
}

static void head_open(const tr_dd_batch *b, int hv, tr_dd_head *a) {
    const dp_problem *p = b->r->p;
    const int backward = b->r->t->backward;
    *a = (tr_dd_head){.d = rows_alloc(b->all * b->row), .beta = rows_alloc(b->all * p->R * 2)};
    tr_norms_alloc(b->r, NULL, &a->norms);
    rows_open(b, a);
    exp_of(p->A_log ? p->A_log[hv] : 0, &a->a[0], &a->a[1]);
    if (!backward) return;
    a->dx = rows_alloc(b->all * b->row);
    a->dA = rows_alloc(b->all * b->row);
    a->db = rows_alloc(b->all * p->R * 2);
    a->sum_dt = rows_alloc(b->row);
    a->sum_A = rows_alloc(b->row);
    if (p->angle) a->sum_angle = rows_alloc((int64_t)dp_pairs(p) * 2);
}

static void task_open(const tr_dd_batch *b, tr_dd_task *c) {
    tr_run *r = b->r;
    const int64_t size = TR_DD_COLS * b->row, n = b->len + b->pad;
    c->S = rows_alloc(r->device ? c->w * b->row : size);
    if (r->device && !r->status)
        r->status =
            r->device->open(&c->device, b->Kp, b->rows, b->entries, c->w, b->len, &b->r->err);
    if (!r->t->backward || c->is_M) return;
    c->S2 = rows_alloc(r->p->T * b->groups);
    c->G2 = rows_alloc(r->p->T * b->groups);
    c->ckpt = rows_alloc(r->nblock * size);
    c->tape = rows_alloc((b->len * b->groups + 1) * size);
    c->E = rows_alloc(b->len * b->rows * 2 * TR_DD_COLS);
    if (r->p->angle && !c->v0) c->dphi = rows_alloc(b->len * dp_pairs(r->p) * 2);
    c->y = (tr_dd_grads){.dq = rows_alloc(b->len * b->row),
                         .dg = rows_alloc(b->len * b->row),
                         .dentry = rows_alloc(n * b->entries * b->row),
                         .dstrength = rows_alloc(n * b->rows * 2),
                         .dvalue = rows_alloc(n * b->rows * 2 * TR_DD_COLS)};
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
                     .rows = dp_rows(p),
                     .entries = r->rows.n * p->R,
                     .groups = dp_rows(p) / dp_keys_at_once(p),
                     .len = r->len,
                     .norm = {dp_norm_of(p)->power, dp_norm_mean(p), dp_norm_eps(p)},
                     .pad = dp_recurrence_looks_back(dp_recurrence_of(p)) ? dp_lag(p) : 0};
    b.Kp = (p->K + TR_DD_LANES - 1) / TR_DD_LANES * TR_DD_LANES;
    b.row = 2 * b.Kp;
    b.all = b.len + 2 * b.pad;
    for (int e = 0; e < r->rows.n; e++)
        for (int m = 0; m < r->rows.of[e].n; m++)
            if (dp_factor_input(r->rows.of[e].of[m]) < DP_NINPUTS)
                b.in_entries[dp_factor_input(r->rows.of[e].of[m])] = 1;
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
        b.qk[i] = (tr_dd_qk){.q = rows_alloc(b.all * b.row),
                             .k = rows_alloc(b.all * p->R * b.row),
                             .rstd_q = rows_alloc(b.all * 2),
                             .rstd_k = rows_alloc(b.all * p->R * 2)};
        tr_norms_alloc(r, &b.qk[i].norms, NULL);
        if (!p->angle) continue;
        b.qk[i].turn = rows_alloc(p->T * dp_pairs(p) * 4);
        tr_sum_angles(r, h0 + i, NULL, b.qk[i].turn);
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

static void free_all(double *const *x, size_t n) {
    for (size_t i = 0; i < n; i++)
        free(x[i]);
}
#define FREE_ALL(...) \
    free_all((double *[]){__VA_ARGS__}, sizeof(double *[]){__VA_ARGS__} / sizeof(double *))

/* Frees them. */
static void dd_batch_close(tr_dd_batch *b) {
    for (int i = 0; i < b->ntask + b->nM; i++) {
        tr_dd_task *c = &b->task[i];
        if (c->device) b->r->device->close(c->device);
        FREE_ALL(c->S, c->S2, c->G2, c->ckpt, c->tape, c->E, c->dphi, c->y.dq, c->y.dg, c->y.dentry,
                 c->y.dstrength, c->y.dvalue);
    }
    for (int i = 0; i < b->n; i++) {
        FREE_ALL(b->qk[i].q, b->qk[i].k, b->qk[i].rstd_q, b->qk[i].rstd_k, b->qk[i].turn);
        tr_free_qk(&b->qk[i].norms);
    }
    for (int i = 0; i < b->n * dp_G(b->r->p); i++) {
        tr_dd_head *a = &b->head[i];
        FREE_ALL(a->d, a->dx, a->dA, a->beta, a->db, a->strength, a->values, a->sum_dt, a->sum_A,
                 a->sum_angle);
        free_all(a->unit, DP_NINPUTS);
        free_all(a->factor, DP_NFACTORS);
        free_all(a->rstd, DP_NINPUTS);
        free_all(a->entry, DP_MAX_ENTRIES);
        tr_free_head(&a->norms);
    }
    DP_FREE(b->bias, b->in, b->qk, b->head, b->task);
}

/* ---- activated rows -------------------------------------------------------------------------- */

/* The place of token t in the arrays of a block that begins at t0. */
static int64_t place(const tr_dd_batch *b, int64_t t0, int64_t t) { return t - t0 + b->pad; }

/* >= the 2-norm of K numbers, which are good to 2^-40. */
static ld row_norm(int K, const double *y) {
    return sqrt(dp_squares(y, K)) * TR_DD_SLACK + 0x1p-500; /* squares that underflowed */
}

/* rstd_up: NULL: no norm */
static void activate_row(const tr_dd_batch *b, const double *x, double *y, double *rstd, ld *norm,
                         ld *rstd_up) {
    const dp_problem *p = b->r->p;
    /* NOLINTNEXTLINE(clang-analyzer-core.VLASize): Kp is 8 to 1,024 */
    double in[b->Kp] __attribute__((aligned(64)));
    memset(in, 0, sizeof in);
    memcpy(in, x, sizeof *x * (size_t)p->K);
    if (rstd_up) {
        b->op->over_norm(b->Kp, &b->norm, in, y, rstd);
        *rstd_up = rstd[0] * TR_DD_SLACK;
    } else {
        memcpy(y, in, sizeof in);
        memset(y + b->Kp, 0, sizeof in);
    }
    *norm = row_norm(p->K, y);
}

/* Rotates a row by the angles of token t, or back. */
static void turn_row(const tr_dd_batch *b, const tr_dd_qk *a, int64_t t, int back, double *row) {
    const int64_t P = dp_pairs(b->r->p);
    for (int64_t i = 0; i < P; i++) {
        const double *at = a->turn + (t * P + i) * 4;
        const dp_pair z = dp_pair_at(b->r->p, i);
        const num x = channel(row, b->Kp, z.first), y = channel(row, b->Kp, z.second), c = pair(at),
                  s = {back ? -at[2] : at[2], back ? -at[3] : at[3]};
        set_channel(row, b->Kp, z.first, minus(times(x, c), times(y, s)));
        set_channel(row, b->Kp, z.second, plus(times(x, s), times(y, c)));
    }
}

static void activate_qk(const tr_dd_batch *b, int i, int64_t t0, int64_t t) {
    const dp_problem *p = b->r->p;
    tr_dd_qk *a = &b->qk[i];
    tr_qk *n = &a->norms;
    const int64_t h = b->h0 + i, R = p->R, at = place(b, t0, t), K = p->K;
    activate_row(b, p->q + (t * p->H + h) * K, a->q + at * b->row, a->rstd_q + at * 2,
                 &n->q_norm[t], n->rstd_q_up ? &n->rstd_q_up[t] : NULL);
    if (a->turn) turn_row(b, a, t, 0, a->q + at * b->row);
    for (int64_t j = 0; j < R; j++)
        activate_row(b, p->k + ((t * p->H + h) * R + j) * K, a->k + (at * R + j) * b->row,
                     a->rstd_k + (at * R + j) * 2, &n->k_norm[t * R + j],
                     n->rstd_k_up ? &n->rstd_k_up[t * R + j] : NULL);
}

static void activate_beta(const tr_dd_batch *b, int hv, tr_dd_head *a, int64_t t, int64_t at) {
    const dp_problem *p = b->r->p;
    const int64_t R = p->R;
    const dp_beta_info *form = &dp_betas[p->beta_form];
    if (!p->beta) return;
    const double *raw = p->beta + (t * p->HV + hv) * R;
    for (int64_t j = 0; j < R; j += TR_DD_LANES) {
        double x[TR_DD_LANES] __attribute__((aligned(64))) = {0},
                              y[2][2 * TR_DD_LANES] __attribute__((aligned(64)));
        for (int64_t i = j; i < R && i < j + TR_DD_LANES; i++)
            x[i - j] = raw[i];
        b->op->curve8(form->curve, x, y[0], y[1]);
        for (int64_t i = j; i < R && i < j + TR_DD_LANES; i++) {
            double v[4];
            for (int m = 0; m < 4; m++)
                v[m] = form->times * y[m / 2][m % 2 * TR_DD_LANES + i - j];
            memcpy(a->beta + (at * R + i) * 2, v, 2 * sizeof *v);
            if (a->db) memcpy(a->db + (at * R + i) * 2, v + 2, 2 * sizeof *v);
            a->norms.beta_up[t * R + i] = fabs(v[0]) * TR_DD_SLACK;
            a->norms.db_up[t * R + i] = fabs(v[2]) * TR_DD_SLACK;
        }
    }
}

/* Factors of the gate. One that could underflow has no relative error, one above 2^30 no bound. */
static void gate_factors(const tr_dd_batch *b, const tr_dd_head *a, int64_t at, ld eg,
                         tr_gate_norms *n, const tr_dd_gate *gate) {
    const int K = b->r->p->K;
    double most_of_d = 0;
    for (int k = 0; k < K; k++)
        most_of_d = fmax(most_of_d, fabs(dp_log(gate->d[k])));
    const double g = most_of_d * TR_DD_SLACK;
    n->rel = g <= 300 ? tr_rho(g * tr_rho(eg)) + tr_gamma(b->r, 2) : INFINITY;
    for (int f = 0; f < DP_NFACTORS; f++) {
        double *row = a->factor[f] ? a->factor[f] + at * b->row : gate->d, most = 0;
        if (a->factor[f]) b->op->power(gate, DP_FACTOR_RATE(DP_NINPUTS + f), row);
        for (int k = 0; k < K; k++)
            most = fmax(most, row[k]);
        n->factor[f] = most <= 0x1p30 ? most * TR_DD_SLACK : INFINITY;
    }
}

static void activate_head(const tr_dd_batch *b, int i, int64_t t0, int64_t t) {
    const tr_run *r = b->r;
    const dp_problem *p = r->p;
    tr_dd_head *a = &b->head[i];
    const int hv = b->h0 * dp_G(p) + i;
    const int64_t at = place(b, t0, t), Kg = dp_Kg(p);
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
    /* eps_x of truth_gate.c; the sum raw + dt_bias is exact here. Inside: |y| = |a x| <= |a|
     * |raw + bias| */
    const dp_curve_info *f = &dp_curves[dp_gates[p->gate].curve];
    const int inside = dp_gate_inside(p), raw_gate = p->gate != DP_GATE_LOG;
    double top = 0;
    for (int64_t k = 0; k < p->K && inside; k++)
        top = fmax(top, fabs(raw[k] + g.bias[k]));
    const ld dy = tr_rho(f->steep * a->a[0] * top * TR_DD_SLACK * tr_gamma(r, 3)),
             eg = raw_gate ? dy + tr_gamma(r, f->exact[0] + 4) : 0,
             ex = raw_gate ? dy + tr_gamma(r, f->exact[1] + (inside ? 2 : 4)) : 0,
             ea = raw_gate ? dy + tr_gamma(r, f->exact[inside] + 4) : 0;
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
    if (dp_recurrence_has_gates(dp_recurrence_of(p))) gate_factors(b, a, at, eg, n, &g);
    activate_beta(b, hv, a, t, at);
    for (int in = 0; in < DP_NINPUTS; in++) {
        ld none, *up = a->norms.unit[in].rstd_up;
        if (a->unit[in])
            activate_row(b, dp_input_of(p, in) + (t * p->HV + hv) * p->K, a->unit[in] + at * b->row,
                         a->rstd[in] + at * 2, &none, up ? &up[t] : NULL);
    }
}

/* ---- the rows of a token --------------------------------------------------------------------- */

/* A token of a head: what makes its rows, and the chain rule from them. */
typedef struct {
    const tr_dd_batch *b;
    const tr_dd_qk *qk;
    tr_dd_head *a;
    const tr_dd_task *c; /* of the gradients */
    int64_t hv, t0;      /* where the block begins */
} rows_of_head;

static rows_of_head head_at(const tr_dd_batch *b, int i, int64_t t0) {
    const int G = dp_G(b->r->p);
    return (rows_of_head){
        b, &b->qk[i / G], &b->head[i], b->task + (int64_t)i * b->ncb, (int64_t)b->h0 * G + i, t0};
}

/* The row that a factor of K channels is at token t; NULL: it is a number. */
static const double *factor_row(const rows_of_head *x, int of, int64_t t, int64_t key) {
    const int64_t at = place(x->b, x->t0, t), row = x->b->row;
    const int f = of - DP_NINPUTS;
    return f >= 0             ? (x->a->factor[f] ? x->a->factor[f] : x->a->d) + at * row
           : of == DP_INPUT_K ? x->qk->k + (at * x->b->r->p->R + key) * row
           : tr_is_given(of)  ? x->a->unit[of] + at * row
                              : NULL;
}

/* A factor of an entry of token `now` at channel 0. */
static num factor_number(const rows_of_head *x, int factor, int64_t now, int64_t key) {
    const dp_problem *p = x->b->r->p;
    const int64_t t = dp_factor_token(p, factor, now);
    const int of = dp_factor_input(factor);
    if (t < 0) return (num){0, 0};
    const double *row = factor_row(x, of, t, key);
    if (row) return channel(row, x->b->Kp, 0);
    if (of == DP_INPUT_NUMBER) return (num){p->number[t * p->HV + x->hv], 0};
    return pair(x->a->beta + (place(x->b, x->t0, t) * p->R + key) * 2);
}

/* The product of an entry's factors at channel 0 but number `but` (-1: with all). */
static num product_number(const rows_of_head *x, dp_entry e, int but, int64_t t, int64_t key) {
    num y = {e.sign, 0};
    for (int m = 0; m < e.n; m++)
        if (m != but) y = times(y, factor_number(x, e.of[m], t, key));
    return y;
}

/* The same as a row. */
static void product_row(const rows_of_head *x, dp_entry e, int but, int64_t t, int64_t key,
                        double *y) {
    const tr_dd_batch *b = x->b;
    double number[b->row] __attribute__((aligned(64)));
    fill_row(y, b->Kp, (num){e.sign, 0});
    for (int m = 0; m < e.n; m++) {
        const int64_t now = dp_factor_token(b->r->p, e.of[m], t);
        const double *row = now < 0 ? NULL : factor_row(x, dp_factor_input(e.of[m]), now, key);
        if (m == but) continue;
        if (!row) fill_row(number, b->Kp, factor_number(x, e.of[m], t, key));
        b->op->mul_rows(b->Kp, y, y, row ? row : number);
    }
    for (int64_t k = b->r->p->K; k < b->Kp; k++)
        set_channel(y, b->Kp, k, (num){0, 0});
}

/* The next token of the sequence, if any row looks back to t; -1: none. */
static int64_t after(const tr_dd_batch *b, int64_t t) {
    return b->pad ? dp_token_after(b->r->p, t) : -1;
}

/* The token of the angles that rotate entry e of token t; -1: it is not rotated. */
static int64_t turned_at(const dp_problem *p, dp_entry e, int64_t t) {
    const int key = dp_entry_rotated(dp_recurrence_of(p), e);
    return key < 0 ? -1 : dp_factor_token(p, key, t);
}

static void make_entry(const rows_of_head *x, int e, int64_t t, int64_t key) {
    const tr_run *r = x->b->r;
    const int64_t R = r->p->R, at = place(x->b, x->t0, t), turn = turned_at(r->p, r->rows.of[e], t);
    double *y = x->a->entry[e] + (at * R + key) * x->b->row;
    product_row(x, r->rows.of[e], -1, t, key, y);
    x->a->norms.entry_norm[e][t * R + key] =
        tr_exact_up(row_norm(r->p->K, y), tr_entry_rel(r, &x->a->norms, r->rows.of[e], -1, t));
    if (turn >= 0) turn_row(x->b, x->qk, turn, 0, y);
}

/* The products of the values of row j of token t. */
static void make_value(const rows_of_head *x, int64_t j, int64_t t, double *h, double *l) {
    const dp_problem *p = x->b->r->p;
    const dp_entry e = dp_row_of(p, j)->value;
    for (int v = 0; v < p->V; v++) {
        num y = {e.sign, 0};
        for (int m = 0; m < e.n; m++)
            y = times(y, (num){tr_value_of(p, (int)x->hv, t, j, e.of[m], v), 0});
        h[v] = y.h;
        l[v] = y.l;
    }
}

/* Entries, values and strengths of token t, with their bounds. room: tr_step_room numbers */
static void make_rows(const rows_of_head *x, int64_t t, double *room) {
    const tr_dd_batch *b = x->b;
    const tr_run *r = b->r;
    const int64_t R = r->p->R, n = b->rows, at = place(b, x->t0, t);
    tr_head *norms = &x->a->norms;
    /* NOLINTNEXTLINE(clang-analyzer-core.VLASize): a token has 1 to 64 rows */
    double strength[n];
    tr_step s = {.ld = b->row, .strength = strength, .d = x->a->d + at * b->row};
    for (int e = 0; e < r->rows.n; e++) {
        for (int64_t key = 0; key < R && x->a->entry[e]; key++)
            make_entry(x, e, t, key);
        s.entry[e] = (x->a->entry[e] ? x->a->entry[e] : x->qk->k) + at * R * b->row;
    }
    for (int64_t j = 0; j < n; j++) {
        const dp_entry of = dp_row_of(r->p, j)->strength;
        const num y = product_number(x, of, -1, t, dp_row_key(r->p, j));
        strength[j] = y.h;
        if (x->a->values)
            make_value(x, j, t, x->a->values + (at * n + j) * 2 * r->p->V,
                       x->a->values + ((at * n + j) * 2 + 1) * r->p->V);
        if (!x->a->strength) continue;
        x->a->strength[(at * n + j) * 2] = y.h;
        x->a->strength[(at * n + j) * 2 + 1] = y.l;
        norms->strength_up[t * n + j] =
            tr_exact_up(fabs(y.h) * TR_DD_SLACK, tr_entry_rel(r, norms, of, -1, t));
    }
    if (norms->nu[t * b->groups] > 0) return; /* of the pass before */
    tr_row_norms(r, (int)x->hv, t, norms);
    tr_step_norms(r, t, &x->qk->norms, norms, &s, room);
}

/* Activates a block's tokens for all heads, with their norms; inside a parallel region. Tokens
 * around the block are activated, too, where rows look back to them or they to the block. */
static void dd_activate_block(const tr_dd_batch *b, const tr_block *k) {
    const dp_problem *p = b->r->p;
    const int G = dp_G(p);
    const int64_t begin = p->cu[k->seq], end = p->cu[k->seq + 1],
                  from = k->t0 - b->pad < begin ? begin : k->t0 - b->pad,
                  to = k->t1 + b->pad > end ? end : k->t1 + b->pad;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < (to - from) * b->n; i++) {
        const int h = (int)(i % b->n);
        const int64_t t = from + i / b->n;
        activate_qk(b, h, k->t0, t);
        for (int g = 0; g < G; g++)
            activate_head(b, h * G + g, k->t0, t);
    }
    DP_OWN double *room = rows_alloc(tr_step_room(b->r));
#pragma omp for schedule(static)
    for (int64_t i = 0; i < (to - k->t0) * b->n * G; i++) {
        const rows_of_head x = head_at(b, (int)(i % (b->n * G)), k->t0);
        make_rows(&x, k->t0 + i / (b->n * G), room);
    }
}

/* ---- chain rule ------------------------------------------------------------------------------ */

/* Stores h + l as entry `at`. */
static void dd_put(dp_ball *b, int64_t at, double h, double l) {
    const double s = h + l, z = s - h;
    b->hi[at] = s;
    b->lo[at] = isfinite(s) ? (h - (s - z)) + (l - z) : 0;
}

static void put_row(const tr_dd_batch *b, dp_ball *to, int64_t row, const double *x) {
    for (int64_t k = 0; k < to->width; k++)
        /* NOLINTNEXTLINE(clang-analyzer-core.CallAndMessage): a group has one head or more */
        dd_put(to, row * to->width + k, x[k], x[b->Kp + k]);
}

static num sum_channels(const tr_dd_batch *b, const double *x) {
    num sum = channel(x, b->Kp, 0);
    for (int64_t k = 1; k < b->r->p->K; k++)
        sum = plus(sum, channel(x, b->Kp, k));
    return sum;
}

/* The gradient of entry e of key `key` of token t. */
static const double *entry_gradient(const rows_of_head *x, int e, int64_t t, int64_t key) {
    return x->c->y.dentry + ((t - x->t0) * x->b->entries + e * x->b->r->p->R + key) * x->b->row;
}
static const double *entry_row(const rows_of_head *x, int e, int64_t t, int64_t key) {
    const double *from = x->a->entry[e] ? x->a->entry[e] : x->qk->k;
    return from + (place(x->b, x->t0, t) * x->b->r->p->R + key) * x->b->row;
}

/* The gradient of `input` of a key of token t, a row: all that the entries say of it, those of the
 * token after too. A single product is kept bit for bit. */
static void sum_of(const rows_of_head *x, int input, int64_t t, int64_t key, double *sum) {
    const tr_dd_batch *b = x->b;
    const tr_run *r = b->r;
    const size_t size = sizeof(double) * (size_t)b->row;
    double d[b->row] __attribute__((aligned(64))), others[b->row] __attribute__((aligned(64)));
    int terms = 0;
    for (int back = 0; back < 2; back++) {
        const int64_t now = back ? after(b, t) : t;
        const int of = back ? input | DP_PREVIOUS : input;
        for (int e = 0; e < r->rows.n && now >= 0; e++)
            for (int m = 0; m < r->rows.of[e].n; m++) {
                if (r->rows.of[e].of[m] != of) continue;
                const int64_t turn = turned_at(r->p, r->rows.of[e], now);
                memcpy(d, entry_gradient(x, e, now, key), size);
                if (turn >= 0) turn_row(b, x->qk, turn, 1, d);
                product_row(x, r->rows.of[e], m, now, key, others);
                b->op->mul_rows(b->Kp, d, d, others);
                if (terms++)
                    b->op->add_rows(b->Kp, sum, d);
                else
                    memcpy(sum, d, size);
            }
    }
    if (!terms) memset(sum, 0, size);
}

/* The gradient of a number of a key: through strengths, and all channels of entries. */
static num sum_of_number(const rows_of_head *x, int input, int64_t t, int64_t key) {
    const tr_dd_batch *b = x->b;
    const dp_problem *p = b->r->p;
    double row[b->row] __attribute__((aligned(64)));
    num sum = {0, 0};
    for (int back = 0; back < 2; back++) {
        const int64_t now = back ? after(b, t) : t;
        for (int64_t j = 0; j < b->rows && now >= 0; j++) {
            const dp_entry s = dp_row_of(p, j)->strength;
            const double *d = x->c->y.dstrength + ((now - x->t0) * b->rows + j) * 2;
            for (int m = 0; m < s.n && dp_row_key(p, j) == key; m++)
                if (s.of[m] == (back ? input | DP_PREVIOUS : input))
                    sum = plus(sum, times(pair(d), product_number(x, s, m, now, key)));
        }
    }
    if (!b->in_entries[input]) return sum;
    sum_of(x, input, t, key, row);
    return plus(sum, sum_channels(b, row));
}

/* dg += +-E dE of entries and strengths with exp(+-g). */
static void add_gates(const rows_of_head *x, int64_t t, double *dg) {
    const tr_dd_batch *b = x->b;
    const tr_run *r = b->r;
    double y[b->row] __attribute__((aligned(64))), n[b->row] __attribute__((aligned(64)));
    for (int e = 0; e < r->rows.n; e++)
        for (int64_t key = 0; key < r->p->R && dp_entry_gates(r->rows.of[e]) != 0; key++) {
            fill_row(n, b->Kp, (num){dp_entry_gates(r->rows.of[e]), 0});
            b->op->mul_rows(b->Kp, y, entry_row(x, e, t, key), entry_gradient(x, e, t, key));
            b->op->mul_rows(b->Kp, y, y, n);
            b->op->add_rows(b->Kp, dg, y);
        }
    for (int64_t j = 0; j < b->rows; j++) {
        const dp_entry s = dp_row_of(r->p, j)->strength;
        const double *d = x->c->y.dstrength + ((t - x->t0) * b->rows + j) * 2;
        if (dp_entry_gates(s) == 0) continue;
        const num y = times(times(pair(d), product_number(x, s, -1, t, dp_row_key(r->p, j))),
                            (num){dp_entry_gates(s), 0});
        set_channel(dg, b->Kp, 0, plus(channel(dg, b->Kp, 0), y));
    }
}

/* dphi += the gradient of the angles by which row x was turned, from d, that of x. */
static void add_turning(const tr_dd_batch *b, const double *x, const double *d, double *dphi) {
    for (int64_t i = 0; i < dp_pairs(b->r->p); i++) {
        const dp_pair z = dp_pair_at(b->r->p, i);
        const int64_t Kp = b->Kp, u = z.first, v = z.second;
        add_pair(dphi + 2 * i, minus(times(channel(x, Kp, u), channel(d, Kp, v)),
                                     times(channel(x, Kp, v), channel(d, Kp, u))));
    }
}

/* The gradient of the angles of token t, through its query, its rotated entries and those of the
 * token after. */
static void chain_angles(const rows_of_head *x, int64_t t, const double *dq) {
    const tr_dd_batch *b = x->b;
    const tr_run *r = b->r;
    const int64_t size = (int64_t)dp_pairs(r->p) * 2;
    double *to = x->c->dphi + (t - x->t0) * size;
    memset(to, 0, sizeof *to * (size_t)size);
    for (int e = 0; e < r->rows.n; e++) {
        const int key = dp_entry_rotated(dp_recurrence_of(r->p), r->rows.of[e]);
        const int64_t now = key >= 0 && key & DP_PREVIOUS ? after(b, t) : t;
        if (key >= 0 && now >= 0)
            add_turning(b, entry_row(x, e, now, 0), entry_gradient(x, e, now, 0), to);
    }
    add_turning(b, x->qk->q + place(b, x->t0, t) * b->row, dq, to);
}

/* Sums of token `at` over a head's tasks, in the first of them. */
static void dd_sum_tasks(const tr_dd_batch *b, int i, int64_t at) {
    tr_dd_task *c = b->task + (int64_t)i * b->ncb;
    const int64_t Kp = b->Kp, row = b->row;
    for (int m = 1; m < b->ncb; m++) {
        b->op->add_rows(Kp, c->y.dq + at * row, c[m].y.dq + at * row);
        b->op->add_rows(Kp, c->y.dg + at * row, c[m].y.dg + at * row);
        for (int64_t e = at * b->entries; e < (at + 1) * b->entries; e++)
            b->op->add_rows(Kp, c->y.dentry + e * row, c[m].y.dentry + e * row);
        for (int64_t j = at * b->rows; j < (at + 1) * b->rows; j++)
            add_pair(c->y.dstrength + 2 * j, pair(c[m].y.dstrength + 2 * j));
    }
}

/* Gradients of what value head x alone has. */
static void chain_head(const rows_of_head *x, int64_t t) {
    const tr_dd_batch *b = x->b;
    const dp_problem *p = b->r->p;
    dp_ball *f = b->r->t->field;
    const int64_t row = b->row, Kp = b->Kp, at = place(b, x->t0, t);
    double *dg = x->c->y.dg + (t - x->t0) * row, y[row] __attribute__((aligned(64)));
    add_gates(x, t, dg);
    if (dp_Kg(p) == 1) { /* one gate: the sum over channels */
        const num sum = sum_channels(b, dg);
        memset(dg, 0, sizeof *dg * (size_t)row);
        set_channel(dg, Kp, 0, sum);
    }
    b->op->mul_rows(Kp, y, dg, x->a->dx + at * row);
    put_row(b, &f[DP_RESULT_DG], t * p->HV + x->hv, y);
    for (int64_t j = 0; j < p->R && p->beta; j++) {
        const double *db = x->a->db + (at * p->R + j) * 2;
        const num d = times(sum_of_number(x, DP_INPUT_BETA, t, j), pair(db));
        dd_put(&f[DP_RESULT_DBETA], (t * p->HV + x->hv) * p->R + j, d.h, d.l);
    }
    if (p->number) {
        const num d = sum_of_number(x, DP_INPUT_NUMBER, t, 0);
        dd_put(&f[DP_RESULT_DNUMBER], t * p->HV + x->hv, d.h, d.l);
    }
    for (int i = 0; i < DP_NRESULTS; i++) {
        const dp_input_id of = dp_result_fields[i].of;
        if (dp_result_fields[i].role != DP_ROLE_GRADIENT || !f[i].rows || !tr_is_given(of))
            continue;
        sum_of(x, of, t, 0, y);
        if (dp_is_normed(p, of))
            b->op->chain_norm(Kp, &b->norm, x->a->unit[of] + at * row, x->a->rstd[of] + at * 2, y);
        put_row(b, &f[i], t * p->HV + x->hv, y);
    }
}

/* Gradients of token t by the raw inputs of query head i, from the sums of its tasks. */
static void dd_chain_token(const tr_dd_batch *b, int i, int64_t t0, int64_t t) {
    const tr_run *r = b->r;
    const dp_problem *p = r->p;
    const int G = dp_G(p);
    const int64_t R = p->R, row = b->row, Kp = b->Kp, at = place(b, t0, t), h = b->h0 + i;
    const tr_dd_qk *q = &b->qk[i];
    double dq[row] __attribute__((aligned(64))), dk[row] __attribute__((aligned(64))),
        more[row] __attribute__((aligned(64)));
    for (int g = 0; g < G; g++) {
        const rows_of_head x = head_at(b, i * G + g, t0);
        chain_head(&x, t);
        if (g)
            b->op->add_rows(Kp, dq, x.c->y.dq + (t - t0) * row);
        else
            memcpy(dq, x.c->y.dq + (t - t0) * row, sizeof dq);
        if (p->angle) chain_angles(&x, t, dq); /* a query head for each value head */
    }
    if (q->turn) turn_row(b, q, t, 1, dq);
    if (q->norms.rstd_q_up) {
        double rstd[2];
        ld norm, rstd_up;
        if (q->turn) /* from q itself: rotated back, a zero of it would have a sign */
            activate_row(b, p->q + (t * p->H + h) * p->K, more, rstd, &norm, &rstd_up);
        b->op->chain_norm(Kp, &b->norm, q->turn ? more : q->q + at * row, q->rstd_q + at * 2, dq);
    }
    put_row(b, &r->t->field[DP_RESULT_DQ], t * p->H + h, dq);
    for (int64_t j = 0; j < R; j++) {
        for (int g = 0; g < G; g++) {
            const rows_of_head x = head_at(b, i * G + g, t0);
            sum_of(&x, DP_INPUT_K, t, j, g ? more : dk);
            if (g) b->op->add_rows(Kp, dk, more);
        }
        if (q->norms.rstd_k_up)
            b->op->chain_norm(Kp, &b->norm, q->k + (at * R + j) * row, q->rstd_k + (at * R + j) * 2,
                              dk);
        put_row(b, &r->t->field[DP_RESULT_DK], (t * p->H + h) * R + j, dk);
    }
}

/* Adds a block's tokens, last to first, to a head's ddt_bias and dA_log, and stores dangle. */
static void dd_accumulate_gate(const tr_dd_batch *b, int i, const tr_block *k) {
    const dp_problem *p = b->r->p;
    tr_dd_head *a = &b->head[i];
    const tr_dd_task *c = &b->task[(int64_t)i * b->ncb];
    double x[b->row] __attribute__((aligned(64)));
    for (int64_t t = k->t1 - 1; t >= k->t0 && p->gate != DP_GATE_LOG; t--) {
        const double *dg = c->y.dg + (t - k->t0) * b->row;
        const int64_t at = place(b, k->t0, t) * b->row;
        b->op->mul_rows(b->Kp, x, dg, a->dx + at);
        b->op->add_rows(b->Kp, a->sum_dt, x);
        b->op->mul_rows(b->Kp, x, dg, a->dA + at);
        b->op->add_rows(b->Kp, a->sum_A, x);
    }
    const int64_t P = dp_pairs(p), hv = (int64_t)b->h0 * dp_G(p) + i;
    if (k->last_of_seq && p->angle) memset(a->sum_angle, 0, sizeof *a->sum_angle * (size_t)(2 * P));
    for (int64_t t = k->t1 - 1; t >= k->t0 && p->angle; t--)
        for (int64_t j = 0; j < P; j++) {
            double *sum = a->sum_angle + 2 * j, *d = c->dphi + ((t - k->t0) * P + j) * 2;
            const int reads = t % dp_lag(p) != 0; /* it only reads */
            add_pair(sum, pair(d));
            dd_put(&b->r->t->field[DP_RESULT_DANGLE], (t * p->HV + hv) * P + j, reads ? 0 : sum[0],
                   reads ? 0 : sum[1]);
        }
}

/* Stores ddt_bias and dA_log of all heads. */
static void dd_store_gate_sums(const tr_dd_batch *b) {
    const dp_problem *p = b->r->p;
    const int64_t Kg = dp_Kg(p);
    for (int i = 0; i < b->n * dp_G(p); i++) {
        const tr_dd_head *a = &b->head[i];
        const int64_t hv = (int64_t)b->h0 * dp_G(p) + i;
        num sum = {0, 0};
        for (int64_t c = 0; c < Kg; c++)
            sum = plus(sum, channel(a->sum_A, b->Kp, c));
        if (p->A_log) dd_put(&b->r->t->field[DP_RESULT_DA_LOG], hv, sum.h, sum.l);
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
    const int64_t n = b->r->p->T * b->groups;
    a->S_up = dp_calloc((size_t)n, sizeof(ld));
    a->G_up = dp_calloc((size_t)n, sizeof(ld));
    for (int64_t t = 0; t < n; t++) {
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
    const tr_run *r = b->r;
    const int R = r->p->R;
    const tr_dd_head *a = &b->head[i];
    const tr_dd_qk *q = &b->qk[i / dp_G(r->p)];
    tr_dd_rows y = {.Kp = b->Kp,
                    .n = k->t1 - k->t0,
                    .ld = R * b->row,
                    .rows = b->rows,
                    .entries = b->entries,
                    .at_once = dp_keys_at_once(r->p),
                    .before = dp_recurrence_of(r->p)->before,
                    .q = q->q + b->pad * b->row,
                    .d = a->d + b->pad * b->row,
                    .strength = (a->strength ? a->strength : a->beta) + b->pad * b->rows * 2};
    for (int j = 0; j < b->rows; j++) {
        const int key = (int)dp_row_key(r->p, j), read = tr_read_of(r, j);
        y.write[j] = tr_write_of(r, j) * R + key;
        y.read[j] = read < 0 ? -1 : read * R + key;
    }
    for (int e = 0; e < b->entries; e++)
        y.entry[e] = (a->entry[e / R] ? a->entry[e / R] : q->k) + (b->pad * R + e % R) * b->row;
    return y;
}

static tr_dd_cols cols_of(const tr_dd_batch *b, const tr_dd_task *c, const tr_block *k) {
    const dp_problem *p = b->r->p;
    const dp_ball *o = &b->r->t->field[DP_RESULT_O];
    const tr_dd_head *a = &b->head[c->head];
    const int64_t hv = b->h0 * dp_G(p) + c->head, at = (k->t0 * p->HV + hv) * p->V + c->v0;
    tr_dd_cols y = {.w = c->w, .scale = p->scale, .S = c->S, .ldo = (int64_t)p->HV * p->V};
    if (c->is_M) return y;
    for (int64_t j = 0; j < b->rows; j++) {
        const dp_entry value = dp_row_of(p, j)->value;
        if (dp_entry_is(value, DP_INPUT_V)) {
            const double *v =
                p->v + ((k->t0 * p->HV + hv) * p->R + dp_row_key(p, j)) * p->V + c->v0;
            y.value[j] = (tr_dd_value){v, NULL, (int64_t)p->HV * p->R * p->V};
        } else if (value.sign) {
            const double *v = a->values + (b->pad * b->rows + j) * 2 * p->V + c->v0;
            y.value[j] = (tr_dd_value){v, v + p->V, (int64_t)b->rows * 2 * p->V};
        }
    }
    y.oh = o->hi + at;
    y.ol = o->lo + at;
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

/* Gradients of the pad tokens after the block, from where the block after left them. */
static void keep_later(const tr_dd_batch *b, tr_dd_task *c, int64_t n) {
    const struct {
        double *x;
        int64_t size;
    } each[] = {{c->y.dentry, b->entries * b->row},
                {c->y.dstrength, b->rows * 2},
                {c->y.dvalue, (int64_t)b->rows * 2 * TR_DD_COLS}};
    for (int64_t i = b->pad - 1; i >= 0; i--)
        for (int a = 0; a < 3; a++)
            memcpy(each[a].x + (n + i) * each[a].size, each[a].x + i * each[a].size,
                   sizeof(double) * (size_t)each[a].size);
}

/* += the gradient of column v of factor `of` through row j of token t, from its dE. */
static num add_value_gradient(const tr_dd_batch *b, const tr_dd_task *c, int64_t hv, int64_t t,
                              int64_t j, int of, int v, const double *dE, num sum) {
    const dp_problem *p = b->r->p;
    const dp_entry e = dp_row_of(p, j)->value;
    const int left = dp_entry_has(e, of);
    num x = {dE[v], dE[TR_DD_COLS + v]};
    if (!left) return sum;
    x = times(x, (num){e.sign * left, 0});
    for (int m = 0, own = 1; m < e.n; m++)
        if (own && e.of[m] == of)
            own = 0;
        else
            x = times(x, (num){tr_value_of(p, (int)hv, t, j, e.of[m], c->v0 + v), 0});
    return plus(sum, x);
}

/* Gradients of what the values of token t are products of, each summed over its rows, and those of
 * the token after that look back. */
static void store_value_gradients(const tr_dd_batch *b, const tr_dd_task *c, int64_t t0,
                                  int64_t t) {
    const dp_problem *p = b->r->p;
    const int64_t hv = b->h0 * dp_G(p) + c->head, next = after(b, t);
    const int alone =
        dp_recurrence_of(p)->n == 1 && dp_entry_is(dp_row_of(p, 0)->value, DP_INPUT_V);
    for (int f = 0; f < DP_NRESULTS; f++) {
        dp_ball *to = &b->r->t->field[f];
        const int of = dp_result_fields[f].of;
        if (dp_result_fields[f].role != DP_ROLE_GRADIENT || !to->rows || !dp_is_value(of)) continue;
        for (int64_t i = 0; i < p->R * c->w; i++) {
            const int v = (int)(i % c->w);
            const int64_t key = i / c->w;
            num sum = {0, 0};
            for (int64_t j = 0; j < b->rows; j++) {
                const double *dE = c->y.dvalue + ((t - t0) * b->rows + j) * 2 * TR_DD_COLS,
                             *later = c->y.dvalue + ((next - t0) * b->rows + j) * 2 * TR_DD_COLS;
                if (dp_row_key(p, j) != key) continue;
                if (alone)
                    sum = (num){dE[v], dE[TR_DD_COLS + v]};
                else
                    sum = add_value_gradient(b, c, hv, t, j, of, v, dE, sum);
                if (next >= 0)
                    sum = add_value_gradient(b, c, hv, next, j, of | DP_PREVIOUS, v, later, sum);
            }
            dd_put(to, ((t * p->HV + hv) * p->R + key) * p->V + c->v0 + v, sum.h, sum.l);
        }
    }
}

static void backward_task(const tr_dd_batch *b, tr_dd_task *c, int at) {
    const tr_run *r = b->r;
    const dp_problem *p = r->p;
    const tr_block *k = &r->block[at];
    const int64_t hv = b->h0 * dp_G(p) + c->head, state_row = (int64_t)k->seq * p->HV + hv,
                  size = TR_DD_COLS * b->row, n = (k->t1 - k->t0) * b->groups;
    const tr_dd_rows rows = rows_of(b, c->head, k);
    const tr_dd_cols cols = cols_of(b, c, k);
    memcpy(c->tape, c->ckpt + at * size, sizeof(double) * (size_t)size);
    b->op->rebuild(&rows, &cols, c->tape, c->E);
    for (int64_t i = 0; i < n; i++)
        c->S2[k->t0 * b->groups + i] = b->op->squares(b->Kp, c->w, c->tape + (i + 1) * size);
    keep_later(b, c, k->t1 - k->t0);
    c->y.G2 = c->G2 + k->t0 * b->groups;
    if (k->last_of_seq) load_state(b, c, p->dstate, state_row);
    b->op->backward(&rows, &cols, c->tape, c->E, p->dout + (k->t0 * p->HV + hv) * p->V + c->v0,
                    &c->y);
    for (int64_t t = k->t0; t < k->t1; t++)
        store_value_gradients(b, c, k->t0, t);
    if (k->cut >= 0) store_state(b, c, &r->t->dS_cut, (int64_t)k->cut * p->HV + hv);
    if (k->first_of_seq) store_state(b, c, &r->t->field[DP_RESULT_DS0], state_row);
}

static void run_batch(tr_run *r, const tr_dd_lanes *op, int h0, int n) {
    const int G = dp_G(r->p);
    DP_FREED(dd_batch_close) tr_dd_batch b = dd_batch_open(r, op, h0, n);
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
            for (int64_t i = 0; i < len * n * G; i++)
                dd_sum_tasks(&b, (int)(i / len), i % len);
#pragma omp for schedule(static)
            for (int64_t i = 0; i < len * n; i++)
                dd_chain_token(&b, (int)(i / len), r->block[k].t0, r->block[k].t0 + i % len);
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
    if (dp_rows(p) > TR_DD_MAX_ROWS) return "a token has more than 64 rows";
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
