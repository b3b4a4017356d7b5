/* Bounds of what a payload rounds (bound.h). */
#include "bound_parts.h"

#include <math.h>

#define TINY 0x1p-133 /* absolute, of a number below what the short formats hold in full */

void dp_bound_sent_state(const dp_rounding *r, dp_payload p, int K, int V, const double *S,
                         double *e) {
    const double u = dp_payloads[p].u;
    const int64_t KV = (int64_t)K * V;
    if (!p) return;
    if (r->p == 1) {
        for (int v = 0; v < V; v++)
            e[v] += u * (dp_bound_column_norm(S, K, V, v) + e[v]) + K * TINY;
        return;
    }
    for (int64_t i = 0; i < KV; i++) {
        const double x = dp_pw(r, u * S[i]) + dp_pw(r, TINY);
        e[i] += x;
        e[2 * KV + i / V * (K + 1)] += x;
    }
}

/* The rounding of each entry of M, [K][K]. */
static double *rounded(const dp_rounding *r, const dp_payload_info *p, int K, const double *M) {
    double *x = dp_doubles((int64_t)K * K);
    for (int64_t i = 0; i < (int64_t)K * K; i++) {
        const double one = p->less_i && i / K == i % K, low = p->tolerance > 0,
                     row = low ? dp_bound_norm2(M + i / K * K, K) : 0;
        x[i] = p->u * fabs(M[i] - one) + TINY;
        if (one > 0) x[i] += r->u * (fabs(M[i] - one) + fabs(M[i]));
        if (low) x[i] = (2 * p->u + dp_sum_error(r, K)) * row + TINY;
    }
    return x;
}

void dp_bound_sent_M(const dp_rounding *r, dp_payload p, int K, const double *M, double *b) {
    const dp_payload_info *info = &dp_payloads[p];
    const int64_t KK = (int64_t)K * K;
    if (!p) return;
    DP_OWN double *x = rounded(r, info, K, M);
    if (r->p == 1) {
        /* share of the computed M's error: a full entry is rounded like one of M, one of low rank
         * like all of its row */
        const double again =
            info->tolerance > 0 ? (2 * info->u + dp_sum_error(r, K)) * sqrt(K) : info->u + 2 * r->u;
        *b += dp_norm_fro(KK, x) + again * *b + info->tolerance;
    } else {
        const double left = dp_pw(r, info->tolerance / DP_LAMBDA);
        for (int64_t i = 0; i < KK; i++) {
            b[i] += dp_pw(r, x[i]) + left;
            b[KK + i / K * (K + 1)] += dp_pw(r, x[i]);
        }
        for (int i = 0; i < K; i++)
            b[KK + (int64_t)i * (K + 1)] += left;
    }
}
