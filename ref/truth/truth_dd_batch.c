/* Heads that the truth in double-double computes at once: allocation (truth_dd_impl.h). */
#include "truth_dd_impl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

tr_dd_batch tr_dd_batch_open(tr_run *r, const tr_dd_lanes *op, int h0, int n) {
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

void tr_dd_batch_close(tr_dd_batch *b) {
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
