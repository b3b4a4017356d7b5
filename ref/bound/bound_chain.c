/* Bounds of the chain of M and of the merge (bound.h). */
#include "bound_parts.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- the chain and the merge ----------------------------------------------------------------- */

void dp_bound_chain_step(const dp_rounding *r, dp_format f, int K, const double *M,
                         const double *DM, double mu, const double *P, double *b, double *bias) {
    const int64_t KK = (int64_t)K * K;
    const dp_format_info *fi = &dp_formats[f];
    const double tiny = f == DP_FP64 ? 0x1p-1022 : 0x1p-126;
    double *E = dp_doubles(KK), *aP = dp_bound_absof(P, KK), *pP = dp_bound_pwof(r, P, KK),
           *aM = dp_bound_absof(M, KK);
    dp_bound_addmm(1, 0, 0, K, K, K, DM, pP, E);
    if (r->p == 1) {
        const double eta = dp_eta(f, K),
                     grow = *b > 0 ? eta * dp_norm_abs2_up(K, K, M) + dp_norm_fro(KK, DM) : 0;
        dp_bound_addmm(eta, 0, 0, K, K, K, aM, aP, E);
        *b = (mu + grow) * *b + dp_norm_fro(KK, E) + 3.0 * K * K * tiny;
    } else {
        double *pM = dp_bound_pwof(r, M, KK), *S = dp_bound_product(0, 0, K, K, K, aM, aP),
               *MP = dp_bound_product(0, 0, K, K, K, M, P), *old = dp_copy(b, KK);
        const double op = fi->truncates ? 0
                          : fi->split   ? 3 * 0x1p-23
                                        : fi->u_op,
                     sum = sqrt(K / 3.0 + 1) * fi->u_acc;
        dp_bound_addmm(2 * op * op, 0, 0, K, K, K, pM, pP, E);
        dp_bound_add_scaled(r, sum, S, KK, E);
        dp_bound_add_scaled(r, fi->u_store, MP, KK, E);
        dp_bound_add_const(dp_pw(r, 3.0 * K * tiny), KK, E);
        memcpy(b, E, sizeof(double) * KK);
        dp_bound_addmm(1, 0, 0, K, K, K, pM, old, b);
        if (fi->truncates) *bias = mu * *bias + 2 * fi->u_op * dp_norm_fro(KK, S);
        free(pM);
        free(S);
        free(MP);
        free(old);
    }
    free(E);
    free(aP);
    free(pP);
    free(aM);
}

/* p = 1: |d'| <= |M|_2 |d| + |dM|_2 |S_hat| + |dH| + sum_error | |M_hat||S_hat| | + u (| |M||S| | +
 * |H|), S_hat <= S + d, column by column. p = 2: e' = M^2 e + b S^2 + eH + (sum_error |M||S|)^2 +
 * (u H)^2 entry by entry, products of two errors dropped like everywhere else. */
void dp_bound_merge_step(const dp_rounding *r, int K, int V, const double *M, double mu,
                         const double *b, double bias, const double *S, const double *H,
                         const double *eH, double *e) {
    const int64_t KK = (int64_t)K * K, KV = (int64_t)K * V;
    double *aM = dp_bound_absof(M, KK), *aS = dp_bound_absof(S, KV),
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
        double *pM = dp_bound_pwof(r, M, KK), *pS = dp_bound_pwof(r, S, KV),
               *old = dp_copy(e, 2 * KV), *shared = e + KV;
        memcpy(e, eH, sizeof(double) * 2 * KV);
        for (int part = 0; part < 2; part++)
            dp_bound_addmm(1, 0, 0, K, V, K, pM, old + part * KV, e + part * KV);
        dp_bound_addmm(1, 0, 0, K, V, K, b, pS, shared);
        dp_bound_add_scaled(r, s, MS, KV, e);
        dp_bound_add_scaled(r, r->u, H, KV, e);
        dp_bound_add_const(dp_pw(r, (K + 1.0) * r->tiny), KV, e);
        for (int v = 0; v < V && bias > 0; v++) {
            const double total = dp_pw(r, bias * dp_bound_column_norm(S, K, V, v)),
                         norm = dp_pw(r, dp_bound_column_norm(MS, K, V, v));
            for (int x = 0; x < K; x++)
                shared[(int64_t)x * V + v] +=
                    total * (1.0 / K + (norm > 0 ? dp_pw(r, MS[(int64_t)x * V + v]) / norm : 0));
        }
        free(pM);
        free(pS);
        free(old);
    }
    free(aM);
    free(aS);
    free(MS);
}
