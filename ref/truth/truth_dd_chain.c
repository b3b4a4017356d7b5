/* Chain rule in double-double: sums over tasks, then back to the raw inputs (truth_dd_impl.h). */
#include "truth_dd_impl.h"

#include <math.h>
#include <stdlib.h>

void tr_dd_put(dp_ball *b, int64_t at, double h, double l) {
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
        tr_dd_put(to, row * to->width + k, x[k], x[b->Kp + k]);
}

void tr_dd_chain_token(const tr_dd_batch *b, int i, const tr_block *k, int64_t at) {
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
            tr_dd_put(&f[DP_RESULT_DBETA], (t * p->HV + hv) * R + j, y[0], y[1]);
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

void tr_dd_accumulate_gate(const tr_dd_batch *b, int i, const tr_block *k) {
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

void tr_dd_store_gate_sums(const tr_dd_batch *b) {
    const dp_problem *p = b->r->p;
    const int64_t Kg = dp_Kg(p);
    for (int i = 0; i < b->n * dp_G(p); i++) {
        const tr_dd_head *a = &b->head[i];
        const int64_t hv = (int64_t)b->h0 * dp_G(p) + i;
        double h = 0, l = 0;
        for (int64_t c = 0; c < Kg; c++)
            add(&h, &l, a->sum_A[c], a->sum_A[b->Kp + c]);
        if (p->A_log) tr_dd_put(&b->r->t->field[DP_RESULT_DA_LOG], hv, h, l);
        for (int64_t c = 0; c < Kg && p->dt_bias; c++)
            tr_dd_put(&b->r->t->field[DP_RESULT_DDT_BIAS], hv * Kg + c, a->sum_dt[c],
                      a->sum_dt[b->Kp + c]);
    }
}

/* Norms of the computed states and adjoints: every column is in one task, and the low parts are
 * below 2^-52 of the leading ones. */
void tr_dd_measured_norms(const tr_dd_batch *b, int i) {
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
