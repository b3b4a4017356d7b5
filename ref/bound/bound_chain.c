/* Bounds of the chain of M and of the merge (bound.h). */
#include "bound_parts.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- the chain and the merge ----------------------------------------------------------------- */

dp_factor_error dp_factor_error_of(const dp_chunk_bound *b, int trans) {
    const dp_chunk *ch = b->ch;
    return trans ? (dp_factor_error){ch->n, 1, ch->w, ch->kg, b->Dw, b->Dkg, b->DF}
                 : (dp_factor_error){ch->n, 0, ch->kg, ch->w, b->Dkg, b->Dw, b->DF};
}

/* |x_i|_2^2 of the rows of x [n][width], to be freed. */
static double *row_squares(int n, int width, const double *x) {
    double *y = dp_doubles(n);
    for (int i = 0; i < n; i++)
        for (int k = 0; k < width; k++)
            y[i] += x[(int64_t)i * width + k] * x[(int64_t)i * width + k];
    return y;
}

void dp_bound_covariance(int K, int trans, const double *M, int n, const double *A, const double *s,
                         const double *d, double *C) {
    const int64_t KK = (int64_t)K * K;
    DP_OWN double *MC = dp_bound_product(trans, 0, K, K, K, M, C),
                  *next = dp_bound_product(0, !trans, K, K, K, MC, M),
                  *sA = dp_doubles((int64_t)n * K);
    for (int64_t i = 0; i < (int64_t)n * K; i++)
        sA[i] = s[i / K] * A[i];
    if (n) dp_bound_addmm(1, 1, 0, K, K, n, A, sA, next);
    for (int x = 0; x < K; x++)
        next[(int64_t)x * K + x] += d[x];
    memcpy(C, next, sizeof(double) * KK);
}

/* (M + dM)(P + dP) with dM = dD - dA' B - A' dB. Its sources are the entries of dA, dB and the
 * rest. A source of dB acts in all rows that A gives it. d [K]: the rounding that the product adds
 * to each row; changed. */
static void chain_covariance(int K, const double *M, const dp_factor_error *x, const double *P,
                             double *d, double *C) {
    DP_OWN double *P2 = row_squares(K, K, P), *BP = dp_bound_product(0, 0, x->n, K, K, x->B, P),
                  *BP2 = row_squares(x->n, K, BP), *s = dp_doubles(x->n);
    for (int m = 0; m < x->n; m++)
        for (int k = 0; k < K; k++) {
            s[m] += x->DB[(int64_t)m * K + k] * P2[k];
            d[k] += x->DA[(int64_t)m * K + k] * BP2[m];
        }
    for (int i = 0; i < K; i++)
        for (int k = 0; k < K; k++)
            d[i] += x->DF[x->trans ? (int64_t)k * K + i : (int64_t)i * K + k] * P2[k];
    dp_bound_covariance(K, 0, M, x->n, x->A, s, d, C);
}

static void sound_step(dp_format f, int K, const double *M, const double *DM, double mu,
                       const double *P, double *b) {
    const int64_t KK = (int64_t)K * K;
    const double tiny = f == DP_FP64 ? 0x1p-1022 : 0x1p-126, eta = dp_eta(f, K),
                 grow = *b > 0 ? eta * dp_norm_abs2_up(K, K, M) + dp_norm_fro(KK, DM) : 0;
    DP_OWN double *E = dp_doubles(KK), *aP = dp_bound_absof(P, KK), *aM = dp_bound_absof(M, KK);
    dp_bound_addmm(1, 0, 0, K, K, K, DM, aP, E);
    dp_bound_addmm(eta, 0, 0, K, K, K, aM, aP, E);
    *b = (mu + grow) * *b + dp_norm_fro(KK, E) + 3.0 * K * K * tiny;
}

/* [K][K] squares of what rounding the product M P costs; truncation's worst case into *bias. */
static double *product_rounding(const dp_rounding *r, dp_format f, int K, const double *M,
                                double mu, const double *P, double *bias) {
    const int64_t KK = (int64_t)K * K;
    const dp_format_info *fi = &dp_formats[f];
    const double tiny = f == DP_FP64 ? 0x1p-1022 : 0x1p-126,
                 op = fi->truncates   ? 0
                      : fi->two_parts ? 3 * 0x1p-23
                                      : fi->u_op,
                 sum = sqrt(K / 3.0 + 1) * fi->u_acc;
    DP_OWN double *aP = dp_bound_absof(P, KK), *aM = dp_bound_absof(M, KK),
                  *pP = dp_bound_pwof(r, P, KK), *pM = dp_bound_pwof(r, M, KK),
                  *S = dp_bound_product(0, 0, K, K, K, aM, aP),
                  *MP = dp_bound_product(0, 0, K, K, K, M, P);
    double *E = dp_doubles(KK);
    dp_bound_addmm(2 * op * op, 0, 0, K, K, K, pM, pP, E);
    dp_bound_add_scaled(r, sum, S, KK, E);
    dp_bound_add_scaled(r, fi->u_store, MP, KK, E);
    dp_bound_add_const(dp_pw(r, 3.0 * K * tiny), KK, E);
    if (fi->truncates) *bias = mu * *bias + 2 * fi->u_op * dp_norm_fro(KK, S);
    return E;
}

static void probable_step(const dp_rounding *r, dp_format f, int K, const double *M,
                          const double *DM, const dp_factor_error *x, double mu, const double *P,
                          double *b, double *bias) {
    const int64_t KK = (int64_t)K * K;
    DP_OWN double *E = product_rounding(r, f, K, M, mu, P, bias), *d = dp_doubles(K),
                  *pP = dp_bound_pwof(r, P, KK), *pM = dp_bound_pwof(r, M, KK),
                  *old = dp_copy(b, KK);
    for (int64_t i = 0; i < KK; i++)
        d[i / K] += E[i];
    chain_covariance(K, M, x, P, d, b + KK);
    dp_bound_addmm(1, 0, 0, K, K, K, DM, pP, E);
    memcpy(b, E, sizeof(double) * KK);
    dp_bound_addmm(1, 0, 0, K, K, K, pM, old, b);
}

void dp_bound_chain_step(const dp_rounding *r, dp_format f, int K, const double *M,
                         const double *DM, const dp_factor_error *x, double mu, const double *P,
                         double *b, double *bias) {
    if (r->p == 1)
        sound_step(f, K, M, DM, mu, P, b);
    else
        probable_step(r, f, K, M, DM, x, mu, P, b, bias);
}

static void sound_compose(dp_format f, int K, const dp_computed_product *M, const double *P,
                          double *b) {
    const int64_t KK = (int64_t)K * K;
    const double tiny = f == DP_FP64 ? 0x1p-1022 : 0x1p-126, eta = dp_eta(f, K), dM = *M->b;
    DP_OWN double *aM = dp_bound_absof(M->M, KK), *aP = dp_bound_absof(P, KK),
                  *MP = dp_bound_product(0, 0, K, K, K, aM, aP);
    const double rounded = dp_norm_fro(KK, MP) + dp_norm_abs2_up(K, K, M->M) * *b +
                           dp_norm_abs2_up(K, K, P) * dM + dM * *b;
    *b = (M->mu + dM) * *b + dp_norm2_up(K, K, P) * dM + eta * rounded + 3.0 * K * K * tiny;
}

static void probable_compose(const dp_rounding *r, dp_format f, int K, const dp_computed_product *M,
                             const double *P, double *b, double *bias) {
    const int64_t KK = (int64_t)K * K;
    const double P2 = dp_norm2_up(K, K, P);
    DP_OWN double *E = product_rounding(r, f, K, M->M, M->mu, P, bias), *d = dp_doubles(K),
                  *pM = dp_bound_pwof(r, M->M, KK), *pP = dp_bound_pwof(r, P, KK),
                  *old = dp_copy(b, KK);
    if (!dp_formats[f].truncates) *bias *= M->mu; /* else product_rounding did */
    *bias += P2 * M->bias;
    for (int64_t i = 0; i < KK; i++)
        d[i / K] += E[i];
    dp_bound_covariance(K, 0, M->M, 0, NULL, NULL, d, b + KK);
    for (int64_t i = 0; i < KK; i++)
        b[KK + i] += P2 * P2 * M->b[KK + i];
    memcpy(b, E, sizeof(double) * KK);
    dp_bound_addmm(1, 0, 0, K, K, K, pM, old, b);
    dp_bound_addmm(1, 0, 0, K, K, K, M->b, pP, b);
}

void dp_bound_compose(const dp_rounding *r, dp_format f, int K, const dp_computed_product *M,
                      const double *P, double *b, double *bias) {
    if (r->p == 1)
        sound_compose(f, K, M, P, b);
    else
        probable_compose(r, f, K, M, P, b, bias);
}

/* [K][V] squares of what the product and sum of a merge cost by themselves. */
static double *merge_rounding(const dp_rounding *r, int K, int V, const double *MS,
                              const double *H) {
    const int64_t KV = (int64_t)K * V;
    double *L = dp_doubles(KV);
    dp_bound_add_scaled(r, dp_sum_error(r, K) + r->u, MS, KV, L);
    dp_bound_add_scaled(r, r->u, H, KV, L);
    dp_bound_add_const(dp_pw(r, (K + 1.0) * r->tiny), KV, L);
    return L;
}

/* MS = |M||S| */
static void probable_merge(const dp_rounding *r, int K, int V, const double *M, const double *b,
                           double bias, const double *S, const double *H, const double *eH,
                           const double *MS, double *e) {
    const int64_t KK = (int64_t)K * K, KV = (int64_t)K * V;
    const double S2 = dp_norm2_up(K, V, S);
    DP_OWN double *pM = dp_bound_pwof(r, M, KK), *pS = dp_bound_pwof(r, S, KV),
                  *L = merge_rounding(r, K, V, MS, H), *old = dp_copy(e, 2 * KV),
                  *d = dp_doubles(K);
    double *shared = e + KV, *C = e + 2 * KV;
    memcpy(e, eH, sizeof(double) * 2 * KV);
    for (int part = 0; part < 2; part++)
        dp_bound_addmm(1, 0, 0, K, V, K, pM, old + part * KV, e + part * KV);
    dp_bound_addmm(1, 0, 0, K, V, K, b, pS, shared);
    for (int64_t i = 0; i < KV; i++)
        e[i] += L[i];
    for (int v = 0; v < V && bias > 0; v++) {
        const double total = dp_pw(r, bias * dp_bound_column_norm(S, K, V, v)),
                     norm = dp_pw(r, dp_bound_column_norm(MS, K, V, v));
        for (int x = 0; x < K; x++) {
            const int64_t z = (int64_t)x * V + v;
            const double part = total * (1.0 / K + (norm > 0 ? dp_pw(r, MS[z]) / norm : 0));
            shared[z] += part;
            d[x] += part;
        }
    }
    for (int64_t i = 0; i < KV; i++)
        d[i / V] += L[i];
    dp_bound_covariance(K, 0, M, 0, NULL, NULL, d, C);
    for (int64_t i = 0; i < KK; i++)
        C[i] += S2 * S2 * b[KK + i] + eH[2 * KV + i];
}

/* Products of two errors are dropped. p = 1, column by column, with S_hat <= S + d:
 *   |d'| <= |M|_2 |d| + |dM|_2 |S_hat| + |dH| + sum_error | |M_hat||S_hat| | + u (| |M||S| | + |H|)
 * p = 2, entry by entry:
 *   e' = M^2 e + b S^2 + eH + (sum_error |M||S|)^2 + (u H)^2 */
void dp_bound_merge_step(const dp_rounding *r, int K, int V, const double *M, double mu,
                         const double *b, double bias, const double *S, const double *H,
                         const double *eH, double *e) {
    const int64_t KK = (int64_t)K * K, KV = (int64_t)K * V;
    DP_OWN double *aM = dp_bound_absof(M, KK), *aS = dp_bound_absof(S, KV),
                  *MS = dp_bound_product(0, 0, K, V, K, aM, aS);
    const double s = dp_sum_error(r, K) + r->u;
    if (r->p == 1) {
        const double grow = *b + s * dp_norm_abs2_up(K, K, M);
        for (int v = 0; v < V; v++) {
            const double S2 = dp_bound_column_norm(S, K, V, v),
                         MS2 = dp_bound_column_norm(MS, K, V, v),
                         H2 = dp_bound_column_norm(H, K, V, v);
            e[v] = (mu + grow) * e[v] + *b * S2 + eH[v] + s * (MS2 + *b * S2) +
                   r->u * (H2 + eH[v]) + (K + 1.0) * K * r->tiny;
        }
    } else {
        probable_merge(r, K, V, M, b, bias, S, H, eH, MS, e);
    }
}
