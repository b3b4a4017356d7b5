/* Bounds of a pair (M, H) by rows (bound.h). */
#include "bound_parts.h"
#include "ref/arithmetic/mm.h"

#include <stdlib.h>
#include <string.h>

dp_pair_error dp_pair_error_new(const dp_rounding *r, int K, int V) {
    const int64_t KK = (int64_t)K * K;
    dp_pair_error x = {dp_doubles(KK), dp_doubles((int64_t)K * V), dp_doubles(r->p == 1 ? K : KK),
                       dp_doubles(KK), dp_doubles(dp_state_error_size(r, K, V))};
    for (int i = 0; i < K; i++)
        x.P[(int64_t)i * K + i] = 1;
    return x;
}

void dp_pair_error_free(dp_pair_error *x) { DP_FREE(x->P, x->H, x->e, x->C, x->eH); }

/* [K][n] errors of X, from P. */
static double *rows_X(const dp_chunk_bound *b, const double *P, const double *X) {
    const dp_rounding *r = &b->r;
    const int n = b->ch->n, K = b->ch->K;
    const int64_t nK = (int64_t)n * K;
    double *D = dp_doubles(nK);
    dp_bound_add_product(r, 1, (dp_shape){0, 1, K, n, K}, P, NULL, b->ch->kg, NULL, r->uo,
                         dp_sum_error(r, K), D);
    dp_bound_add_scaled(r, r->u + r->us, X, nK, D);
    dp_bound_add_const(dp_pw(r, (K + 1) * r->tiny), nK, D);
    return D;
}

/* [K][K] errors of the next P [K][K] that do not come through X. */
static double *rows_P(const dp_chunk_bound *b, const double *P, const double *aX,
                      const double *next) {
    const dp_rounding *r = &b->r;
    const int n = b->ch->n, K = b->ch->K;
    const int64_t KK = (int64_t)K * K;
    DP_OWN double *aw = dp_bound_absof(b->ch->w, (int64_t)n * K);
    double *F = dp_doubles(KK);
    for (int64_t i = 0; i < KK; i++)
        F[i] = dp_pw(r, 2 * r->u * b->ch->eC[i % K] * P[i]);
    dp_bound_add_sum(r, dp_sum_error(r, n), 0, 0, K, K, n, aX, aw, F);
    dp_bound_add_scaled(r, r->u, next, KK, F);
    dp_bound_add_const(dp_pw(r, (n + 2) * r->tiny), KK, F);
    return F;
}

/* e and C of M over a chunk. */
static void carry(const dp_chunk_bound *b, const double *DX, const double *F, dp_pair_error *x) {
    const dp_rounding *r = &b->r;
    const int n = b->ch->n, K = b->ch->K;
    const int64_t KK = (int64_t)K * K;
    DP_OWN double *pw = dp_bound_pwof(r, b->ch->w, (int64_t)n * K), *next = dp_copy(F, KK),
                  *s = dp_doubles(n), *d = dp_doubles(K);
    dp_bound_addmm(1, 0, 0, K, K, n, DX, pw, next);
    if (r->p == 1) {
        for (int i = 0; i < K; i++)
            x->e[i] = b->mu * x->e[i] + dp_bound_norm2(next + (int64_t)i * K, K);
        return;
    }
    DP_OWN double *pM = dp_bound_pwof(r, b->M, KK);
    dp_bound_addmm(1, 0, 0, K, K, K, x->e, pM, next);
    memcpy(x->e, next, sizeof(double) * (size_t)KK);
    for (int64_t i = 0; i < (int64_t)K * n; i++)
        s[i % n] += DX[i];
    for (int64_t i = 0; i < KK; i++)
        d[i % K] += F[i];
    dp_bound_covariance(K, 1, b->M, n, b->ch->w, s, d, x->C);
}

/* eH over a chunk: shared [K][V] by all columns, own [K][V]. */
static void add_to_H(const dp_rounding *r, int K, int V, const double *shared, const double *own,
                     double *e) {
    const int64_t KV = (int64_t)K * V;
    DP_OWN double *both = dp_copy(shared, KV);
    for (int64_t i = 0; i < KV; i++)
        both[i] += own[i];
    if (r->p == 1) {
        for (int v = 0; v < V; v++)
            e[v] += dp_bound_column_norm(both, K, V, v);
        return;
    }
    for (int64_t i = 0; i < KV; i++) {
        e[i] += own[i];
        e[KV + i] += shared[i];
        e[2 * KV + i / V * (K + 1)] += both[i];
    }
}

void dp_bound_pair_rows(const dp_chunk_bound *b, const double *S, dp_pair_error *x) {
    const dp_chunk *ch = b->ch;
    const dp_rounding *r = &b->r;
    const int n = ch->n, K = ch->K, V = ch->V;
    const int64_t KK = (int64_t)K * K, KV = (int64_t)K * V, nV = (int64_t)n * V;
    DP_OWN double *X = dp_doubles((int64_t)K * n), *v_new = dp_doubles(nV), *Sc = dp_copy(S, KV),
                  *P = dp_copy(x->P, KK);
    dp_mm(DP_FP64, 0, 1, K, n, K, P, ch->kg, X);
    dp_chunk_pair(ch, x->P, x->H);
    dp_chunk_state(ch, Sc, v_new);
    DP_OWN double *DX = rows_X(b, P, X), *aX = dp_bound_absof(X, (int64_t)K * n),
                  *F = rows_P(b, P, aX, x->P), *shared = dp_doubles(KV), *own = dp_doubles(KV),
                  *pX = dp_bound_pwof(r, v_new, nV), *pS = dp_bound_pwof(r, S, KV),
                  *au = dp_bound_absof(ch->u, nV);
    carry(b, DX, F, x);
    dp_bound_addmm(1, 0, 0, K, V, n, DX, pX, shared);
    dp_bound_addmm(1, 0, 0, K, V, K, F, pS, shared);
    dp_bound_add_sum(r, dp_sum_error(r, n), 0, 0, K, V, n, aX, au, own);
    dp_bound_add_scaled(r, r->u, x->H, KV, own);
    dp_bound_add_const(dp_pw(r, (n + 1) * r->tiny), KV, own);
    add_to_H(r, K, V, shared, own, x->eH);
}

void dp_bound_add_pair(const dp_rounding *r, int K, int trans, const dp_pair_error *x, double *b) {
    const int64_t KK = (int64_t)K * K;
    if (r->p == 1) {
        *b += dp_bound_norm2(x->e, K);
        return;
    }
    for (int i = 0; i < K; i++)
        for (int k = 0; k < K; k++) {
            const double e = x->e[(int64_t)i * K + k];
            b[trans ? (int64_t)k * K + i : (int64_t)i * K + k] += e;
            if (!trans) b[KK + (int64_t)i * (K + 1)] += e; /* rows do not know of each other */
        }
    for (int64_t i = 0; trans && i < KK; i++)
        b[KK + i] += x->C[i];
}
