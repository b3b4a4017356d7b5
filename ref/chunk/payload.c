/* The data that arrive of a payload (payload.h). */
#include "payload.h"
#include "chunk.h"
#include "ref/arithmetic/low_rank.h"
#include "ref/arithmetic/mm.h"

dp_format dp_chain_format(const dp_problem *p, dp_base base, dp_format chain) {
    if (dp_erases(p)) return chain;
    return base == DP_BASE_FP64 ? DP_FP64 : DP_FP32;
}

static double sent(dp_payload p, double x) {
    switch (p) {
    case DP_PAYLOAD_FULL: return x;
    case DP_PAYLOAD_BF16:
    case DP_PAYLOAD_LESS_I: return dp_bf16d(x);
    case DP_PAYLOAD_BF16X2: {
        const double hi = dp_bf16d(x);
        return hi + dp_bf16d(x - hi);
    }
    default: return dp_fp32(x);
    }
}

void dp_payload_state(dp_payload p, int64_t n, double *x) {
    for (int64_t i = 0; p && i < n; i++)
        x[i] = sent(p, x[i]);
}

/* M as U W, each of rank rows or columns. */
static int low_rank(dp_payload p, dp_base b, int K, double *M) {
    DP_OWN double *U, *W;
    const int rank = dp_low_rank(M, K, dp_payloads[p].tolerance, &U, &W);
    dp_payload_state(p, (int64_t)K * rank, U);
    dp_payload_state(p, (int64_t)K * rank, W);
    dp_mm(b == DP_BASE_FP64 ? DP_FP64 : DP_FP32, 0, 0, K, K, rank, U, W, M);
    return rank;
}

int dp_payload_M(dp_payload p, dp_base b, int K, double *M) {
    if (dp_payloads[p].tolerance > 0) return low_rank(p, b, K, M);
    for (int64_t i = 0; p && i < (int64_t)K * K; i++) {
        const double one = dp_payloads[p].less_i && i / K == i % K;
        M[i] = dp_round_arith(b, one + sent(p, dp_round_arith(b, M[i] - one)));
    }
    return K;
}
