/* Bounds of the gradients of a chunk (bound.h). */
#include "bound.h"
#include "bound_pair.h"
#include "bound_parts.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* The errors that enter a chunk: of its state, of its state's gradient, of X and of dv_new. */
typedef struct {
    const double *eS, *edS, *DX, *DdX;
} dp_grad_input_error;

/* [n][V] each. X, dZ, E, dE: p-th powers of their errors. X1, dZ1, E1, dE1: parts from shared
 * errors of eS and edS, which count linearly in sums over v. The others: pX, aX, aE, adZ, adE are
 * p-th powers and absolute values, dEv is dE itself. */
typedef struct {
    double *X, *dZ, *E, *dE, *X1, *dZ1, *E1, *dE1, *pX, *aX, *aE, *adZ, *adE, *dEv;
} dp_grad_rows;

/* ---- rows ------------------------------------------------------------------------------------ */

/* Shared by the steps: p-th powers and absolute values of the chunk's matrices, dZ and L. */
typedef struct {
    const dp_chunk_bound *b;
    const dp_grad_input_error *in;
    int64_t nV, nK, nn, KV;
    double gn;   /* sum_error(n + 1) */
    double *pT;  /* [n][n] */
    double *dZv; /* [n][V] */
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
    w.dZv = dp_bound_product(1, 0, n, V, n, ch->Akk, ch->dv_new);
    return w;
}

static void work_free(row_work *w) {
    free(w->pT);
    free(w->dZv);
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
    dp_bound_add_product(r, 1, (dp_shape){1, 0, n, V, n}, ch->Akk, w->b->DT, ch->dv_new, NULL, -1,
                         w->gn, D);
    dp_bound_add_scaled(r, r->uo, ch->dv_new, w->nV, t);
}

/* dZ by substitution: its backward error goes to t. */
static void solve_rounding(const row_work *w, double *t) {
    const dp_chunk *ch = w->b->ch;
    const int n = ch->n, V = ch->V;
    DP_OWN double *A = dp_doubles(w->nn);
    for (int i = 0; i < n; i++)
        for (int j = 0; j < n; j++)
            A[(int64_t)i * n + j] = i == j ? 1 : ch->beta[i] * ch->L[(int64_t)i * n + j];
    dp_bound_add_product(&w->b->r, 1, (dp_shape){1, 0, n, V, n}, A, w->b->DA, w->dZv, NULL, -1,
                         w->gn, t);
}

static void rows_dZ(const row_work *w, dp_grad_rows *g) {
    const dp_chunk *ch = w->b->ch;
    const dp_rounding *r = &w->b->r;
    const int n = ch->n, K = ch->K, V = ch->V;
    DP_OWN double *t = dp_copy(w->in->DdX, w->nV);
    g->adZ = dp_bound_absof(w->dZv, w->nV);
    g->dZ = dp_doubles(w->nV);
    g->dZ1 = dp_doubles(w->nV);
    if (r->inverse)
        multiply_rounding(w, g->dZ, t);
    else
        solve_rounding(w, t);
    dp_bound_addmm(1, 1, 0, n, V, n, w->pT, t, g->dZ);
    DP_OWN double *sens = dp_bound_product(1, 0, n, K, n, ch->Akk, ch->kg);
    dp_bound_propagate(r, sens, n, K, V, w->in->edS, g->dZ);
    dp_bound_propagate(r, sens, n, K, V, w->in->edS + w->KV, g->dZ1);
}

/* E = V - Kgam S_0 - L X, and what storing V and forming that difference adds to its error. */
static void E_values(const row_work *w, dp_grad_rows *g) {
    const dp_chunk *ch = w->b->ch;
    const dp_rounding *r = &w->b->r;
    const int n = ch->n, K = ch->K, V = ch->V;
    DP_OWN double *Ev = dp_bound_product(0, 0, n, V, K, ch->kgam, ch->h);
    g->E = dp_doubles(w->nV);
    dp_bound_addmm(1, 0, 0, n, V, n, ch->L, ch->v_new, Ev);
    for (int64_t i = 0; i < w->nV; i++) {
        g->E[i] = dp_pw(r, (w->b->ev[i] + 2 * r->u) * fabs(ch->v[i]) + 2 * r->u * fabs(Ev[i])) +
                  dp_pw(r, (K + n) * r->tiny);
        Ev[i] = ch->v[i] - Ev[i];
    }
    g->aE = dp_bound_absof(Ev, w->nV);
}

/* The part of the error of E from Kgam S_0: of Kgam, of the sum. */
static void E_read(const row_work *w, dp_grad_rows *g) {
    const dp_chunk_bound *b = w->b;
    const dp_chunk *ch = b->ch;
    const dp_rounding *r = &b->r;
    const int n = ch->n, K = ch->K, V = ch->V;
    const double u = r->u;
    DP_OWN double *Dkgam = dp_doubles(w->nK);
    for (int i = 0; i < n; i++)
        for (int x = 0; x < K; x++)
            Dkgam[(int64_t)i * K + x] =
                dp_pw(r, ch->kgam[(int64_t)i * K + x] *
                             (b->Dexp[(i / ch->R) * K + x] + b->ee[(int64_t)i * K + x] + b->er + u +
                              2 * r->uo));
    dp_bound_add_product(r, 1, (dp_shape){0, 0, n, V, K}, ch->kgam, Dkgam, ch->h, NULL, -1,
                         dp_sum_error(r, K) + u, g->E);
}

static void rows_E(const row_work *w, dp_grad_rows *g) {
    const dp_chunk *ch = w->b->ch;
    const dp_rounding *r = &w->b->r;
    const int n = ch->n, K = ch->K, V = ch->V;
    E_values(w, g);
    E_read(w, g);
    dp_bound_add_product(r, 1, (dp_shape){0, 0, n, V, n}, ch->L, w->b->DL, ch->v_new, w->in->DX,
                         2 * r->uo, w->gn + r->u, g->E);
    DP_OWN double *sens = dp_bound_product(0, 0, n, K, n, ch->L, ch->w);
    for (int64_t i = 0; i < w->nK; i++)
        sens[i] = ch->kgam[i] - sens[i];
    g->E1 = dp_doubles(w->nV);
    dp_bound_propagate(r, sens, n, K, V, w->in->eS, g->E);
    dp_bound_propagate(r, sens, n, K, V, w->in->eS + w->KV, g->E1);
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

/* Fills *g, to be freed with bound_grad_rows_free. */
static void bound_grad_rows(const dp_chunk_bound *b, const dp_grad_input_error *in,
                            dp_grad_rows *g) {
    DP_FREED(work_free) row_work w = work_new(b, in);
    rows_X(&w, g);
    rows_dZ(&w, g);
    rows_E(&w, g);
    rows_dE(&w, g);
}

/* Frees what bound_grad_rows filled. */
static void bound_grad_rows_free(dp_grad_rows *g) {
    DP_FREE(g->X, g->dZ, g->E, g->dE, g->X1, g->dZ1, g->E1, g->dE1, g->pX, g->aX, g->aE, g->adZ,
            g->adE, g->dEv);
}

/* ---- gradients ------------------------------------------------------------------------------- */

/* ---- gradients ----------------------------------------------------------------------------------
 * With dS0 = error of h (columns bounded by eS) and ddS = error of dh (columns bounded by edS),
 * first order:
 *   X :  -w dS0 + DX
 *   dv_new: kg ddS + DdX
 *   dZ = T' dv_new:  (T' kg) ddS + |T|'(DdX + rounding) (+ DT'|dv_new|)
 *   E = V - Kgam S_0 - L X:  -(Kgam - L w) dS0 + DKgam|S_0| + (uo, sum_error) |Kgam||S_0|
 *                            + DL|X| + |L| DX + ...
 *   dbeta = sum_v dZ o E,  dE = B dZ,  dL = -dE X',  dP = scale do X':   product rule, entrywise
 *   dq_s  = scale exp(gcum) o (S_0 do) + sum dP pair k;   (error of S_0) do entry by entry from eS
 *   dk    = read + write parts likewise; where other keys erase, the read part is the gradient of
 *           those, and dk the write part.
 * dg is the reverse cumulative sum of q o dq + k o (dk_read - dk_write). Its pair terms c[s,i]
 * enter once with + at s and once with - at i. They are the SAME dP, dL, pair, q and k, so their
 * errors cancel there like the terms themselves. The rest is the error of (math.md f)
 *   dg_t  = sum_(i < t <= s) c[s,i] + sum_(s >= t) r_s + sum_(i < t) w_i + z
 * plus the errors that the terms at s and i do not share:
 *   the roundings of the two sums that c[s,i] enters,
 *   the roundings of their operands (uo: separate matrix products form q o dq and k o dk),
 *   the products with q and k, and u of each partial sum, which is dg itself. */

/* D of A B' over V, [m][n]: errors of A and B (NULL: none), operand roundings, the sum; a, b
 * absolute values. */
static double *outer_bound(const dp_rounding *r, int m, int n, int V, const double *a,
                           const double *Da, const double *b, const double *Db, double more) {
    double *D = dp_doubles((int64_t)m * n);
    dp_bound_add_product(r, 1, (dp_shape){0, 1, m, n, V}, a, Da, b, Db, 2 * r->uo,
                         dp_sum_error(r, V) + more, D);
    return D;
}

/* D [m][n] += (sum over v of sqrt(Da) b)^2: errors Da [m][V] shared over v against values b [n][V]
 * >= 0 */
static void add_shared(int m, int n, int V, const double *Da, const double *b, int transpose,
                       double *D) {
    DP_OWN double *a = dp_doubles((int64_t)m * V);
    DP_OWN double *S;
    for (int64_t i = 0; i < (int64_t)m * V; i++)
        /* NOLINTNEXTLINE(*NullDereference): callers have one */
        a[i] = sqrt(Da[i]);
    S = transpose ? dp_bound_product(0, 1, n, m, V, b, a) : dp_bound_product(0, 1, m, n, V, a, b);
    for (int64_t i = 0; i < (int64_t)m * n; i++)
        D[i] += S[i] * S[i];
}

/* Returns [rows][K]: squares of (error of the state) x_i, for rows x_i [V]. With own = 1 the error
 * is the part that differs from column to column, else the shared part. */
static double *through_state(const dp_rounding *r, int rows, int K, int V, const double *e,
                             const double *x, int own) {
    DP_OWN double *px =
        own ? dp_bound_pwof(r, x, (int64_t)rows * V) : dp_bound_absof(x, (int64_t)rows * V);
    double *out;
    if (own)
        out = dp_bound_product(0, 1, rows, K, V, px, e);
    else {
        out = dp_doubles((int64_t)rows * K);
        add_shared(K, rows, V, e + (int64_t)K * V, px, 1, out);
    }
    return out;
}

/* x S' for rows x [rows][V] and a state S [K][V]: values, and errors without those from the state's
 * own error. The state's have a part in each column, and a shared one. [rows][K] each. */
typedef struct {
    double *value, *D, *own, *shared;
} state_product;

typedef struct {
    const double *x, *ax, *Dx; /* value, absolute value, error (NULL: none) */
    int rows;
} row_operand;

typedef struct {
    const double *S, *aS, *e; /* value, absolute value, error */
} state_operand;

static state_product product_with_state(const dp_rounding *r, int K, int V, row_operand a,
                                        state_operand s) {
    return (state_product){.value = dp_bound_product(0, 1, a.rows, K, V, a.x, s.S),
                           .D = outer_bound(r, a.rows, K, V, a.ax, a.Dx, s.aS, NULL, 0),
                           .own = through_state(r, a.rows, K, V, s.e, a.x, 1),
                           .shared = through_state(r, a.rows, K, V, s.e, a.x, 0)};
}

static void product_free(state_product *p) { DP_FREE(p->value, p->D, p->own, p->shared); }

/* Shared by the steps below. */
typedef struct {
    const dp_chunk_bound *b;
    const double *dout;
    dp_grad_input_error in;
    dp_grad_rows g;
    dp_pair_bounds ib;               /* D of dq, dk_read, dk_write; of dg: pairs, roundings */
    dp_chunk_grad val;               /* reference values, for q o dq and k o (dkr - dkw) */
    double *ado, *aS, *adS;          /* absolute values of do, h, dh */
    state_product Sdo, SdE, SX;      /* S_0 do, S_0 dE, dS_c X */
    double *UX;                      /* operands of dS_c X rounded here and there [n][K] */
    const double *erasing;           /* [n][K] keys that erase */
    double *rs, *ws, *rs1, *ws1, *z; /* D of r_s, w_i [c][K] and z [K]; shared parts */
} grad_work;

/* D of dq, dk_read, dk_write and of the pair terms of dg, from what the pairs of a chunk add. */
static void pair_errors(grad_work *w) {
    const dp_chunk *ch = w->b->ch;
    const dp_rounding *r = &w->b->r;
    const dp_grad_rows *g = &w->g;
    const int c = ch->c, n = ch->n, V = ch->V;
    const int64_t cK = (int64_t)c * ch->K, nK = (int64_t)n * ch->K, cn = (int64_t)c * n;
    DP_OWN double *DdP = outer_bound(r, c, n, V, w->ado, NULL, g->aX, g->X, 2 * r->u),
                  *DdL = outer_bound(r, n, n, V, g->adE, g->dE, g->aX, g->X, 0);
    DP_OWN double *dP = dp_bound_product(0, 1, c, n, V, w->dout, ch->v_new),
                  *dL = dp_bound_product(0, 1, n, n, V, g->dEv, ch->v_new);
    add_shared(n, c, V, g->X1, w->ado, 1, DdP); /* dP = do X', dL = -dE X' */
    add_shared(n, n, V, g->X1, g->adE, 1, DdL);
    add_shared(n, n, V, g->dE1, g->aX, 0, DdL);
    for (int64_t i = 0; i < cn; i++) {
        dP[i] *= fabs(ch->scale);
        DdP[i] *= dp_pw(r, ch->scale);
    }
    w->ib = (dp_pair_bounds){.q = dp_doubles(cK),
                             .r = dp_doubles(nK),
                             .w = dp_doubles(nK),
                             .pair = dp_doubles(cK),
                             .round = dp_doubles(cK)};
    dp_bound_pairs(w->b, &(dp_pair_grads){dL, DdL, dP, DdP}, &w->ib);
}

static void state_products(grad_work *w) {
    const dp_chunk *ch = w->b->ch;
    const dp_rounding *r = &w->b->r;
    const dp_grad_rows *g = &w->g;
    const int n = ch->n, K = ch->K, V = ch->V;
    const state_operand S = {ch->h, w->aS, w->in.eS}, dS = {ch->dh, w->adS, w->in.edS};
    w->Sdo = product_with_state(r, K, V, (row_operand){w->dout, w->ado, NULL, ch->c}, S);
    w->SdE = product_with_state(r, K, V, (row_operand){g->dEv, g->adE, g->dE, n}, S);
    w->SX = product_with_state(r, K, V, (row_operand){ch->v_new, g->aX, g->X, n}, dS);
    add_shared(n, K, V, g->dE1, w->aS, 0, w->SdE.shared);
    add_shared(n, K, V, g->X1, w->adS, 0, w->SX.shared);
    DP_OWN double *pdS = dp_bound_pwof(r, ch->dh, (int64_t)K * V);
    w->UX = dp_doubles((int64_t)n * K);
    dp_bound_addmm(dp_pw(r, 2 * r->uo), 0, 1, n, K, V, g->pX, pdS, w->UX);
}

static void work_open(grad_work *w) {
    const dp_chunk *ch = w->b->ch;
    const int64_t cK = (int64_t)ch->c * ch->K, KV = (int64_t)ch->K * ch->V;
    w->erasing = dp_chunk_erasing(ch);
    bound_grad_rows(w->b, &w->in, &w->g);
    w->ado = dp_bound_absof(w->dout, (int64_t)ch->c * ch->V);
    w->aS = dp_bound_absof(ch->h, KV);
    w->adS = dp_bound_absof(ch->dh, KV);
    pair_errors(w);
    state_products(w);
    dp_chunk_grad_alloc(&w->val, ch);
    dp_chunk_grads(ch, w->dout, &w->val);
    w->rs = dp_doubles(cK);
    w->ws = dp_doubles(cK);
    w->rs1 = dp_doubles(cK);
    w->ws1 = dp_doubles(cK);
    w->z = dp_doubles(ch->K);
}

static void work_close(grad_work *w) {
    DP_FREE(w->ado, w->aS, w->adS, w->ib.q, w->ib.r, w->ib.w, w->ib.pair, w->ib.round, w->UX, w->rs,
            w->ws, w->rs1, w->ws1, w->z);
    product_free(&w->Sdo);
    product_free(&w->SdE);
    product_free(&w->SX);
    dp_chunk_grad_free(&w->val);
    bound_grad_rows_free(&w->g);
}

/* The part of dq and of r_s from S_0 do of token s. */
static void query_errors(grad_work *w, int s) {
    const dp_chunk_bound *b = w->b;
    const dp_chunk *ch = b->ch;
    const dp_rounding *r = &b->r;
    const int n = ch->n, K = ch->K, V = ch->V;
    const double u = r->u, *Sdo = w->Sdo.value;
    for (int x = 0; x < K; x++) {
        const int y = s * K + x;
        const double e = dp_exp_up(ch->gcum[y]),
                     own = dp_pw(r, ch->scale * e) * (w->Sdo.D[y] + w->Sdo.own[y]) +
                           dp_pw(r, ch->scale * e * Sdo[y] * (b->Dexp[y] + 4 * u));
        const double shared = dp_pw(r, ch->scale * e) * w->Sdo.shared[y];
        w->ib.q[y] += own + shared + dp_pw(r, u * w->val.dq[y]) + dp_pw(r, (V + n) * r->tiny);
        w->rs1[y] += dp_pw(r, ch->q[y]) * shared;
        w->rs[y] += dp_pw(r, ch->q[y]) * own +
                    dp_pw(r, (b->eq[y] + b->er + 2 * u) * ch->q[y] * ch->scale * e * Sdo[y]);
        w->ib.round[y] += dp_pw(r, (ch->erasing ? 3 : 2) * u * ch->q[y] * w->val.dq[y]) +
                          dp_pw(r, (V + n) * r->tiny);
    }
}

/* The parts of dk, r_s and w_i from S_0 dE (read) and dS_c X (write) of key i. */
static void key_errors(grad_work *w, int i) {
    const dp_chunk_bound *b = w->b;
    const dp_chunk *ch = b->ch;
    const dp_rounding *r = &b->r;
    const int n = ch->n, K = ch->K, V = ch->V, t = i / ch->R;
    const double u = r->u, *SdE = w->SdE.value, *SX = w->SX.value;
    for (int x = 0; x < K; x++) {
        const int y = t * K + x;
        const int64_t j = (int64_t)i * K + x;
        const double e = dp_exp_up(ch->gcum[y]),
                     end = dp_exp_up(ch->gcum[(ch->c - 1) * K + x] - ch->gcum[y]);
        const double read = dp_pw(r, e) * (w->SdE.D[j] + w->SdE.own[j]) +
                            dp_pw(r, e * SdE[j] * (b->Dexp[y] + 2 * u)),
                     write = dp_pw(r, end) * (w->SX.D[j] + w->SX.own[j]) +
                             dp_pw(r, end * SX[j] * (b->Dend[y] + 2 * u));
        const double read1 = dp_pw(r, e) * w->SdE.shared[j],
                     write1 = dp_pw(r, end) * w->SX.shared[j];
        const double tiny = dp_pw(r, 2 * (V + n) * r->tiny);
        if (ch->erasing) {
            w->ib.r[j] += read + read1 + dp_pw(r, u * w->val.derasing[j]) + tiny;
            w->ib.w[j] += write + write1 + dp_pw(r, u * w->val.dk[j]) + tiny;
        } else {
            w->ib.r[j] +=
                read + write + read1 + write1 + w->ib.w[j] + dp_pw(r, u * w->val.dk[j]) + tiny;
        }
        w->rs1[y] += dp_pw(r, w->erasing[j]) * read1;
        w->ws1[y] += dp_pw(r, ch->k[j]) * write1;
        w->rs[y] += dp_pw(r, w->erasing[j]) * read +
                    dp_pw(r, (b->ee[j] + b->er + 2 * u) * w->erasing[j] * e * SdE[j]);
        w->ws[y] += dp_pw(r, ch->k[j]) * write +
                    dp_pw(r, (b->ek[j] + b->er + 2 * u) * ch->k[j] * end * SX[j]);
        const double sums =
            !ch->erasing
                ? 3 * u * ch->k[j] *
                      (fabs(w->val.dk[j]) + 2 * e * fabs(SdE[j]) + 2 * end * fabs(SX[j]))
                : 3 * u *
                      (fabs(w->erasing[j]) * (fabs(w->val.derasing[j]) + 2 * e * fabs(SdE[j])) +
                       fabs(ch->k[j]) * (fabs(w->val.dk[j]) + 2 * end * fabs(SX[j])));
        w->ib.round[y] += dp_pw(r, ch->k[j] * end) * w->UX[j] + dp_pw(r, sums) + tiny;
    }
}

/* Row i of an error [.][n] as its norm, and entry by entry where those are wanted. */
static double row_error(const dp_rounding *r, const double *D, int64_t i, int n, double *entries) {
    if (entries) memcpy(entries + i * n, D + i * n, sizeof(double) * (size_t)n);
    return dp_bound_error_norm(r, D + i * n, n);
}

/* Errors of dbeta and dv of key i. */
static void value_errors(const grad_work *w, int i, dp_grad_bound *out) {
    const dp_rounding *r = &w->b->r;
    const dp_grad_rows *g = &w->g;
    const int V = w->b->ch->V;
    double db = 0, zE = 0, z1 = 0, E1 = 0;
    for (int64_t v = (int64_t)i * V; out->edv && v < (int64_t)(i + 1) * V; v++)
        out->edv[v] = g->dE[v] + g->dE1[v];
    for (int v = 0; v < V; v++) {
        const int64_t z = (int64_t)i * V + v;
        db += g->dZ[z] * dp_pw(r, g->aE[z]) + dp_pw(r, g->adZ[z]) * g->E[z];
        zE += g->adZ[z] * g->aE[z];
        z1 += sqrt(g->dZ1[z]) * g->aE[z];
        E1 += g->adZ[z] * sqrt(g->E1[z]);
    }
    out->dv[i] = dp_bound_error_norm(r, g->dE + (int64_t)i * V, V) +
                 dp_bound_error_norm(r, g->dE1 + (int64_t)i * V, V);
    out->dbeta[i] =
        db + z1 * z1 + E1 * E1 + dp_pw(r, dp_sum_error(r, V) * zE) + dp_pw(r, V * r->tiny);
}

/* z = eC o rowsum(S_0 o dS_c) of channel x; the chunk end also adds up z + sum_i w_i, and its
 * rounding reaches every token. */
static void end_errors(grad_work *w, int x) {
    const dp_chunk *ch = w->b->ch;
    const dp_rounding *r = &w->b->r;
    const int c = ch->c, R = ch->R, n = ch->n, K = ch->K, V = ch->V;
    const double *eS = w->in.eS, *edS = w->in.edS, *aS = w->aS, *adS = w->adS;
    const int64_t KV = (int64_t)K * V;
    double s = 0, D = 0, sum = 0, S1 = 0, dS1 = 0, operands = 0;
    for (int v = 0; v < V; v++) {
        const int64_t y = (int64_t)x * V + v;
        s += aS[y] * adS[y];
        operands += dp_pw(r, 2 * r->uo * ch->eC[x] * aS[y] * adS[y]);
        S1 += sqrt(eS[KV + y]) * adS[y];
        dS1 += sqrt(edS[KV + y]) * aS[y];
        D += eS[y] * dp_pw(r, adS[y]) + edS[y] * dp_pw(r, aS[y]);
    }
    w->z[x] = dp_pw(r, ch->eC[x]) *
                  (D + S1 * S1 + dS1 * dS1 + dp_pw(r, (dp_sum_error(r, V) + 3 * r->u) * s)) +
              w->b->DeC[x] * dp_pw(r, s);
    for (int i = 0; i < n; i++) {
        const int64_t j = (int64_t)i * K + x;
        const double end = dp_exp_up(ch->gcum[(c - 1) * K + x] - ch->gcum[(i / R) * K + x]);
        sum += fabs(ch->k[j] * w->SX.value[j]) * end;
        operands += dp_pw(r, ch->k[j] * end) * w->UX[j];
    }
    w->ib.round[(c - 1) * K + x] +=
        operands + dp_pw(r, dp_sum_error(r, n + 4) * (sum + ch->eC[x] * s));
}

/* dg of channel x, summed over the chunk's tokens. */
static void gate_errors(const grad_work *w, int x, double *dg) {
    const dp_chunk *ch = w->b->ch;
    const dp_rounding *r = &w->b->r;
    const int c = ch->c, K = ch->K;
    /* shared errors are the same at all tokens: they add up themselves */
    double from = 0, until = 0, from1 = 0, until1 = 0;
    for (int t = c - 1; t >= 0; t--) {
        const int y = t * K + x;
        from += w->rs[y] + w->ib.round[y] + dp_pw(r, r->u * w->val.dg[y]);
        from1 += sqrt(w->rs1[y]);
        dg[y] = w->ib.pair[y] + from + from1 * from1 + w->z[x];
    }
    for (int t = 0; t < c; t++) {
        const int y = t * K + x;
        dg[y] += until + until1 * until1;
        until += w->ws[y];
        until1 += sqrt(w->ws1[y]);
    }
}

/* The reference values that the caller scales its own roundings with. */
static void reference_values(const dp_chunk *ch, const dp_chunk_grad *val, dp_grad_bound *out) {
    const int K = ch->K, V = ch->V;
    for (int t = 0; t < ch->c; t++)
        out->ndq[t] = dp_bound_norm2(val->dq + (int64_t)t * K, K);
    for (int i = 0; i < ch->n; i++) {
        out->ndk[i] = dp_bound_norm2(val->dk + (int64_t)i * K, K);
        out->ndv[i] = dp_bound_norm2(val->dv + (int64_t)i * V, V);
        out->vdbeta[i] = val->dbeta[i];
    }
    memcpy(out->vdg, val->dg, sizeof(double) * (size_t)ch->c * K);
    if (out->vderasing) memcpy(out->vderasing, val->derasing, sizeof(double) * (size_t)ch->n * K);
    if (out->vdv) memcpy(out->vdv, val->dv, sizeof(double) * (size_t)ch->n * V);
}

dp_grad_bound dp_grad_bound_new(int c, int n, int K, int V, int each, int erasing, double **all) {
    dp_grad_bound b = {0};
    const int64_t cK = (int64_t)c * K, nK = (int64_t)n * K, nV = (int64_t)n * V;
    const struct {
        double **x;
        int64_t n;
    } part[] = {{&b.dq, c},
                {&b.ndq, c},
                {&b.dk, n},
                {&b.ndk, n},
                {&b.dv, n},
                {&b.ndv, n},
                {&b.dbeta, n},
                {&b.vdbeta, n},
                {&b.dg, cK},
                {&b.vdg, cK},
                {&b.edq, each ? cK : 0},
                {&b.edk, each ? nK : 0},
                {&b.edv, each || erasing ? nV : 0},
                {&b.vdv, erasing ? nV : 0},
                {&b.ederasing, erasing ? nK : 0},
                {&b.vderasing, erasing ? nK : 0}};
    int64_t size = 0;
    for (size_t i = 0; i < sizeof part / sizeof *part; i++)
        size += part[i].n;
    double *at = *all = dp_doubles(size);
    for (size_t i = 0; i < sizeof part / sizeof *part; i++) {
        *part[i].x = part[i].n ? at : NULL;
        at += part[i].n;
    }
    return b;
}

void dp_bound_grads(const dp_chunk_bound *b, const double *dout, const double *eS,
                    const double *edS, const double *DX, const double *DdX, dp_grad_bound *out) {
    const dp_chunk *ch = b->ch;
    const dp_rounding *r = &b->r;
    const int K = ch->K;
    DP_FREED(work_close) grad_work w = {.b = b, .dout = dout, .in = {eS, edS, DX, DdX}};
    assert(r->p == 2);
    work_open(&w);
    for (int s = 0; s < ch->c; s++) {
        query_errors(&w, s);
        out->dq[s] = row_error(r, w.ib.q, s, K, out->edq);
    }
    for (int i = 0; i < ch->n; i++) {
        key_errors(&w, i);
        out->dk[i] = row_error(r, ch->erasing ? w.ib.w : w.ib.r, i, K, out->edk);
        if (out->ederasing) row_error(r, w.ib.r, i, K, out->ederasing);
        value_errors(&w, i, out);
    }
    for (int x = 0; x < K; x++)
        end_errors(&w, x);
    for (int x = 0; x < K; x++)
        gate_errors(&w, x, out->dg);
    reference_values(ch, &w.val, out);
}
