/* Bounds of the state passes and of the output (bound.h). */
#include "bound_parts.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- state and output ---------------------------------------------------------------------------
 * X = u - w S, S_c = eC o S + kg' X
 *   =>  error of S_c = M_c (error of S) + F, and the error of X = -w (error of S) + local DX with
 *   DX  = Du + Dw |S| + uo |w||S| (operands) + (sum_error(K) + u) |w||S| + (u + us) |X|
 *   F   = DeC |S| + 2u eC |S| + Dkg' |X| + |kg|' DX
 *         + sum_error(n) |kg|'|X| + u |S_c|                                        (math.md j.6)
 * so  e_c[v] = mu e[v] + |F[:,v]|_2  column by column (p = 1),
 *     e_c = M_c^2 e + F  entry by entry, and, summed over columns, the covariance of its rows
 *     C_c = M_c C M_c' + kg' diag(sum_v DX) kg + diag(sum_v of the rest of F) (p = 2): entries that
 *     a row of kg ties together do not forget that, so M_c^2 alone takes too little of them where
 *     M_c projects on few directions. */
/* F [K][V]: the whole addition of a chunk. D [n][V] of it comes through A (kg, backward w); rest
 * [K] are the sums of the other squares of each row. */
typedef struct {
    const double *F, *A, *D, *rest;
} chunk_added;

static void carry(const dp_chunk_bound *b, int trans, chunk_added x, double *e) {
    const int K = b->ch->K, V = b->ch->V, n = b->ch->n;
    if (b->r.p == 1) {
        for (int v = 0; v < V; v++)
            e[v] = b->mu * e[v] + dp_bound_column_norm(x.F, K, V, v);
        return;
    }
    const int64_t KV = (int64_t)K * V;
    DP_OWN double *old = dp_copy(e, 2 * KV), *pM = dp_bound_pwof(&b->r, b->M, (int64_t)K * K),
                  *s = dp_doubles(n);
    memcpy(e, x.F, sizeof(double) * KV);
    memset(e + KV, 0, sizeof(double) * KV);
    for (int part = 0; part < 2; part++)
        dp_bound_addmm(1, trans, 0, K, V, K, pM, old + part * KV, e + part * KV);
    for (int64_t i = 0; i < (int64_t)n * V; i++)
        s[i / V] += x.D[i];
    dp_bound_covariance(K, trans, b->M, n, x.A, s, x.rest, e + 2 * KV);
}

/* Sums of the rows of D [K][V], to be freed. */
static double *row_sums(int K, int V, const double *D) {
    double *y = dp_doubles(K);
    for (int64_t i = 0; i < (int64_t)K * V; i++)
        y[i / V] += D[i];
    return y;
}

void dp_bound_state(const dp_chunk_bound *b, const double *S, double *e, double *DXout) {
    const dp_chunk *ch = b->ch;
    const dp_rounding *r = &b->r;
    const int n = ch->n, K = ch->K, V = ch->V;
    const int64_t nV = (int64_t)n * V, KV = (int64_t)K * V;
    DP_OWN double *X = dp_doubles(nV), *Sc = dp_copy(S, KV), *DX = dp_copy(b->Du, nV),
                  *F = dp_doubles(KV), *pkg = dp_bound_pwof(r, ch->kg, (int64_t)n * K);
    dp_chunk_state(ch, Sc, X);
    dp_bound_add_product(r, 1, (dp_shape){0, 0, n, V, K}, ch->w, b->Dw, S, NULL, r->uo,
                         dp_sum_error(r, K) + r->u, DX);
    dp_bound_add_scaled(r, r->u + r->us, X, nV, DX);
    dp_bound_add_const(dp_pw(r, (K + 2) * r->tiny), nV, DX);
    for (int x = 0; x < K; x++)
        for (int v = 0; v < V; v++) {
            const int64_t z = (int64_t)x * V + v;
            F[z] = b->DeC_held[x] * dp_pw(r, S[z]) + dp_pw(r, 2 * r->u * ch->eC[x] * S[z]) +
                   dp_pw(r, r->u * Sc[z]) + dp_pw(r, (n + 2) * r->tiny);
        }
    dp_bound_add_product(r, 1, (dp_shape){1, 0, K, V, n}, ch->kg, b->Dkg, X, NULL, -1,
                         dp_sum_error(r, n), F);
    DP_OWN double *rest = row_sums(K, V, F);
    dp_bound_addmm(1, 1, 0, K, V, n, pkg, DX, F);
    carry(b, 0, (chunk_added){F, ch->kg, DX, rest}, e);
    if (DXout) memcpy(DXout, DX, sizeof(double) * nV);
}

void dp_bound_propagate(const dp_rounding *r, const double *sens, int n, int K, int V,
                        const double *e, double *D) {
    DP_OWN double *p = dp_bound_pwof(r, sens, (int64_t)n * K);
    dp_bound_addmm(1, 0, 0, n, V, K, p, e, D);
}

/* o = scale qg S + Aqk X: through the state its error is (scale qg - Aqk w) dS, the rest is local.
 */
void dp_bound_output(const dp_chunk_bound *b, const double *e, const double *DX, double *row) {
    const dp_chunk *ch = b->ch;
    const dp_rounding *r = &b->r;
    const int c = ch->c, n = ch->n, K = ch->K, V = ch->V;
    assert(r->p == 2);
    const int64_t cV = (int64_t)c * V, cK = (int64_t)c * K, KV = (int64_t)K * V;
    DP_OWN double *D = dp_doubles(cV), *sens = dp_bound_product(0, 0, c, K, n, ch->Aqk, ch->w),
                  *o = dp_doubles(cV);
    for (int64_t i = 0; i < cK; i++)
        sens[i] = ch->scale * ch->qg[i] - sens[i];
    dp_chunk_output(ch, o);
    dp_bound_add_product(r, ch->scale, (dp_shape){0, 0, c, V, K}, ch->qg, b->Dqg, ch->h, NULL,
                         r->uo, dp_sum_error(r, K) + 3 * r->u, D);
    dp_bound_add_product(r, 1, (dp_shape){0, 0, c, V, n}, ch->Aqk, b->DAqk, ch->v_new, DX, -1,
                         dp_sum_error(r, n), D);
    dp_bound_add_scaled(r, r->u + r->us, o, cV, D);
    dp_bound_add_const(dp_pw(r, (K + n + 3) * r->tiny), cV, D);
    dp_bound_propagate(r, sens, c, K, V, e, D);
    dp_bound_propagate(r, sens, c, K, V, e + KV, D);
    for (int s = 0; s < c; s++)
        row[s] = dp_bound_error_norm(r, D + (int64_t)s * V, V);
}

/* ---- backward state -----------------------------------------------------------------------------
 * dv_new = dv_local + kg dS, dS_0 = eC o dS + scale qg' do - w' dv_new:
 *   the error of dS_0 is M_c' (error of dS) + G, that of dv_new kg (error of dS) + DdX:
 *   DdX = DAqk' |do| + (uo, sum_error(c)) |Aqk|'|do| + us |dv_local|
 *         + Dkg |dS| + (uo, sum_error(K) + u) |kg||dS| + (u + us) |dv_new|
 *   G   = DeC |dS| + 2u eC |dS| + scale (Dqg'|do| + (uo, sum_error(c) + 3u) |qg|'|do|)
 *         + Dw'|dv_new| + |w|'DdX + sum_error(n) |w|'|dv_new| + 2u |dS_0| */
void dp_bound_state_bwd(const dp_chunk_bound *b, const double *dout, const double *dS, double *e,
                        double *DdXout) {
    const dp_chunk *ch = b->ch;
    const dp_rounding *r = &b->r;
    const int c = ch->c, n = ch->n, K = ch->K, V = ch->V;
    const int64_t nV = (int64_t)n * V, KV = (int64_t)K * V;
    DP_OWN double *dv_new = dp_doubles(nV), *d0 = dp_copy(dS, KV), *D = dp_doubles(nV),
                  *G = dp_doubles(KV), *pwv = dp_bound_pwof(r, ch->w, (int64_t)n * K);
    dp_chunk_state_bwd(ch, dout, d0, dv_new);
    dp_bound_add_product(r, 1, (dp_shape){1, 0, n, V, c}, ch->Aqk, b->DAqk, dout, NULL, r->uo,
                         dp_sum_error(r, c), D);
    dp_bound_add_scaled(r, r->us, ch->dv_local, nV, D);
    dp_bound_add_product(r, 1, (dp_shape){0, 0, n, V, K}, ch->kg, b->Dkg, dS, NULL, r->uo,
                         dp_sum_error(r, K) + r->u, D);
    dp_bound_add_scaled(r, r->u + r->us, dv_new, nV, D);
    dp_bound_add_const(dp_pw(r, (K + c + 2) * r->tiny), nV, D);
    for (int x = 0; x < K; x++)
        for (int v = 0; v < V; v++) {
            const int64_t z = (int64_t)x * V + v;
            G[z] = b->DeC_held[x] * dp_pw(r, dS[z]) + dp_pw(r, 2 * r->u * ch->eC[x] * dS[z]) +
                   dp_pw(r, 2 * r->u * d0[z]) + dp_pw(r, (n + c + 3) * r->tiny);
        }
    dp_bound_add_product(r, ch->scale, (dp_shape){1, 0, K, V, c}, ch->qg, b->Dqg, dout, NULL, r->uo,
                         dp_sum_error(r, c) + 3 * r->u, G);
    dp_bound_add_product(r, 1, (dp_shape){1, 0, K, V, n}, ch->w, b->Dw, dv_new, NULL, -1,
                         dp_sum_error(r, n), G);
    DP_OWN double *rest = row_sums(K, V, G);
    dp_bound_addmm(1, 1, 0, K, V, n, pwv, D, G);
    carry(b, 1, (chunk_added){G, ch->w, D, rest}, e);
    if (DdXout) memcpy(DdXout, D, sizeof(double) * nV);
}
