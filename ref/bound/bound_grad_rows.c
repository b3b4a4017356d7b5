/* Errors of X, dZ, E and dE, the rows that a chunk's gradients are made of (bound_grad_rows.h; the
 * formulas stand in bound_grads.c). */
#include "bound_grad_rows.h"
#include "bound_parts.h"

#include <math.h>
#include <stdlib.h>

/* Shared by the steps: p-th powers and absolute values of the chunk's matrices, dZ and L. */
typedef struct {
    const dp_chunk_bound *b;
    const dp_grad_input_error *in;
    int64_t nV, nK, nn, KV;
    double gn;               /* sum_error(n + 1) */
    double *pT, *pL, *aL;    /* [n][n] */
    double *dZv, *pdX, *pdZ; /* [n][V] */
} row_work;

static row_work work_new(const dp_chunk_bound *b, const dp_grad_input_error *in) {
    const dp_chunk *ch = b->ch;
    const dp_rounding *r = &b->r;
    const int n = ch->n, K = ch->K, V = ch->V;
    row_work w = {.b = b,
                  .in = in,
                  .nV = (int64_t)n * V,
                  .nK = (int64_t)n * K,
                  .nn = (int64_t)n * n,
                  .KV = (int64_t)K * V,
                  .gn = dp_sum_error(r, n + 1)};
    w.pT = dp_bound_pwof(r, ch->Akk, w.nn);
    w.pL = dp_bound_pwof(r, ch->L, w.nn);
    w.aL = dp_bound_absof(ch->L, w.nn);
    w.dZv = dp_bound_product(1, 0, n, V, n, ch->Akk, ch->dv_new);
    w.pdX = dp_bound_pwof(r, ch->dv_new, w.nV);
    w.pdZ = dp_bound_pwof(r, w.dZv, w.nV);
    return w;
}

static void work_free(row_work *w) {
    double *a[] = {w->pT, w->pL, w->aL, w->dZv, w->pdX, w->pdZ};
    for (size_t i = 0; i < sizeof a / sizeof *a; i++)
        free(a[i]);
}

static void rows_X(const row_work *w, dp_grad_rows *g) {
    const dp_chunk *ch = w->b->ch;
    const dp_rounding *r = &w->b->r;
    g->aX = dp_bound_absof(ch->v_new, w->nV);
    g->pX = dp_bound_pwof(r, ch->v_new, w->nV);
    g->X = dp_copy(w->in->DX, w->nV);
    g->X1 = dp_doubles(w->nV);
    dp_bound_propagate(r, ch->w, ch->n, ch->K, ch->V, w->in->eS, g->X);
    dp_bound_propagate(r, ch->w, ch->n, ch->K, ch->V, w->in->eS + w->KV, g->X1);
}

/* dZ = T' dv_new by the stored inverse: its error goes to D, that of its operand to t. */
static void multiply_rounding(const row_work *w, double *D, double *t) {
    const dp_chunk *ch = w->b->ch;
    const dp_rounding *r = &w->b->r;
    const int n = ch->n, V = ch->V;
    double *aT = dp_bound_absof(ch->Akk, w->nn), *adX = dp_bound_absof(ch->dv_new, w->nV);
    dp_bound_addmm(1, 1, 0, n, V, n, w->b->DT, w->pdX, D);
    dp_bound_add_sum(r, w->gn, 1, 0, n, V, n, aT, adX, D);
    dp_bound_add_scaled(r, r->uo, ch->dv_new, w->nV, t);
    free(aT);
    free(adX);
}

/* dZ by substitution: its backward error goes to t. */
static void solve_rounding(const row_work *w, const double *adZ, double *t) {
    const dp_chunk *ch = w->b->ch;
    const int n = ch->n, V = ch->V;
    double *A = dp_doubles(w->nn);
    for (int i = 0; i < n; i++)
        for (int j = 0; j < n; j++)
            A[(int64_t)i * n + j] = i == j ? 1 : fabs(ch->beta[i]) * w->aL[(int64_t)i * n + j];
    dp_bound_addmm(1, 1, 0, n, V, n, w->b->DA, w->pdZ, t);
    dp_bound_add_sum(&w->b->r, w->gn, 1, 0, n, V, n, A, adZ, t);
    free(A);
}

static void rows_dZ(const row_work *w, dp_grad_rows *g) {
    const dp_chunk *ch = w->b->ch;
    const dp_rounding *r = &w->b->r;
    const int n = ch->n, K = ch->K, V = ch->V;
    double *t = dp_copy(w->in->DdX, w->nV);
    g->adZ = dp_bound_absof(w->dZv, w->nV);
    g->dZ = dp_doubles(w->nV);
    g->dZ1 = dp_doubles(w->nV);
    if (r->inverse)
        multiply_rounding(w, g->dZ, t);
    else
        solve_rounding(w, g->adZ, t);
    dp_bound_addmm(1, 1, 0, n, V, n, w->pT, t, g->dZ);
    double *sens = dp_bound_product(1, 0, n, K, n, ch->Akk, ch->kg);
    dp_bound_propagate(r, sens, n, K, V, w->in->edS, g->dZ);
    dp_bound_propagate(r, sens, n, K, V, w->in->edS + w->KV, g->dZ1);
    free(sens);
    free(t);
}

/* E = V - Kgam S_0 - L X, and what storing V and forming that difference adds to its error. */
static void E_values(const row_work *w, dp_grad_rows *g) {
    const dp_chunk *ch = w->b->ch;
    const dp_rounding *r = &w->b->r;
    const int n = ch->n, K = ch->K, V = ch->V;
    double *Ev = dp_bound_product(0, 0, n, V, K, ch->kgam, ch->h);
    g->E = dp_doubles(w->nV);
    dp_bound_addmm(1, 0, 0, n, V, n, ch->L, ch->v_new, Ev);
    for (int64_t i = 0; i < w->nV; i++) {
        g->E[i] = dp_pw(r, (w->b->ev[i] + 2 * r->u) * fabs(ch->v[i]) + 2 * r->u * fabs(Ev[i])) +
                  dp_pw(r, (K + n) * r->tiny);
        Ev[i] = ch->v[i] - Ev[i];
    }
    g->aE = dp_bound_absof(Ev, w->nV);
    free(Ev);
}

/* The part of the error of E from Kgam S_0: of Kgam, of the sum. */
static void E_read(const row_work *w, dp_grad_rows *g) {
    const dp_chunk_bound *b = w->b;
    const dp_chunk *ch = b->ch;
    const dp_rounding *r = &b->r;
    const int n = ch->n, K = ch->K, V = ch->V;
    const double u = r->u;
    double *akgam = dp_bound_absof(ch->kgam, w->nK), *Dkgam = dp_doubles(w->nK),
           *aS = dp_bound_absof(ch->h, w->KV), *pS = dp_bound_pwof(r, ch->h, w->KV);
    for (int i = 0; i < n; i++)
        for (int x = 0; x < K; x++)
            Dkgam[(int64_t)i * K + x] = dp_pw(
                r, akgam[(int64_t)i * K + x] * (b->Dexp[(i / ch->R) * K + x] +
                                                b->ee[(int64_t)i * K + x] + b->er + u + 2 * r->uo));
    dp_bound_addmm(1, 0, 0, n, V, K, Dkgam, pS, g->E);
    dp_bound_add_sum(r, dp_sum_error(r, K) + u, 0, 0, n, V, K, akgam, aS, g->E);
    free(akgam);
    free(Dkgam);
    free(aS);
    free(pS);
}

static void rows_E(const row_work *w, dp_grad_rows *g) {
    const dp_chunk *ch = w->b->ch;
    const dp_rounding *r = &w->b->r;
    const int n = ch->n, K = ch->K, V = ch->V;
    E_values(w, g);
    E_read(w, g);
    dp_bound_addmm(1, 0, 0, n, V, n, w->b->DL, g->pX, g->E);
    dp_bound_addmm(1, 0, 0, n, V, n, w->pL, w->in->DX, g->E);
    dp_bound_addmm(dp_pw(r, 2 * r->uo), 0, 0, n, V, n, w->pL, g->pX, g->E);
    dp_bound_add_sum(r, w->gn + r->u, 0, 0, n, V, n, w->aL, g->aX, g->E);
    double *sens = dp_bound_product(0, 0, n, K, n, ch->L, ch->w);
    for (int64_t i = 0; i < w->nK; i++)
        sens[i] = ch->kgam[i] - sens[i];
    g->E1 = dp_doubles(w->nV);
    dp_bound_propagate(r, sens, n, K, V, w->in->eS, g->E);
    dp_bound_propagate(r, sens, n, K, V, w->in->eS + w->KV, g->E1);
    free(sens);
}

static void rows_dE(const row_work *w, dp_grad_rows *g) {
    const dp_chunk *ch = w->b->ch;
    const dp_rounding *r = &w->b->r;
    const int V = ch->V;
    g->dE = dp_doubles(w->nV);
    g->dE1 = dp_doubles(w->nV);
    g->dEv = dp_doubles(w->nV);
    for (int i = 0; i < ch->n; i++)
        for (int v = 0; v < V; v++) {
            const int64_t z = (int64_t)i * V + v;
            g->dEv[z] = ch->beta[i] * w->dZv[z];
            g->dE[z] = dp_pw(r, ch->beta[i]) * g->dZ[z] + dp_pw(r, (w->b->eb + r->u) * g->dEv[z]) +
                       dp_pw(r, r->tiny);
            g->dE1[z] = dp_pw(r, ch->beta[i]) * g->dZ1[z];
        }
    g->adE = dp_bound_absof(g->dEv, w->nV);
}

void dp_bound_grad_rows(const dp_chunk_bound *b, const dp_grad_input_error *in, dp_grad_rows *g) {
    row_work w = work_new(b, in);
    rows_X(&w, g);
    rows_dZ(&w, g);
    rows_E(&w, g);
    rows_dE(&w, g);
    work_free(&w);
}

void dp_bound_grad_rows_free(dp_grad_rows *g) {
    double *a[] = {g->X,   g->dZ, g->E,  g->dE, g->X1,  g->dZ1, g->E1,
                   g->dE1, g->pX, g->aX, g->aE, g->adZ, g->adE, g->dEv};
    for (size_t i = 0; i < sizeof a / sizeof *a; i++)
        free(a[i]);
}
