/* Activated rows of a block in double-double, and the norms that radii need (truth_dd_impl.h). */
#include "truth_dd_impl.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

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

void tr_dd_activate_block(const tr_dd_batch *b, const tr_block *k) {
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
