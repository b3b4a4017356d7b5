/* States from pairs, exchange by exchange (exchange.h). */
#include "exchange.h"
#include "ref/arithmetic/low_rank.h"
#include "ref/arithmetic/mm.h"
#include "ref/arithmetic/norms.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

static double sent(dp_payload p, double x) {
    switch (p) {
    case DP_PAYLOAD_BF16:
    case DP_PAYLOAD_LESS_I: return dp_bf16d(x);
    case DP_PAYLOAD_BF16X2: {
        const double hi = dp_bf16d(x);
        return hi + dp_bf16d(x - hi);
    }
    default: return dp_fp32(x);
    }
}

/* A pair as it arrives; its singular values kept, or 0. */
static int received(dp_payload p, double tolerance, const dp_affine *from, dp_affine *to) {
    const int K = from->K, V = from->V;
    int rank = 0;
    dp_affine_init(to, K, V);
    for (int64_t i = 0; i < (int64_t)K * V; i++)
        to->H[i] = sent(p, from->H[i]);
    if (p == DP_PAYLOAD_LOW_RANK) {
        double *U, *W;
        rank = dp_low_rank(from->M, K, tolerance, &U, &W);
        for (int i = 0; i < K * rank; i++) {
            U[i] = sent(p, U[i]);
            W[i] = sent(p, W[i]);
        }
        dp_mm(DP_FP64, 0, 0, K, K, rank, U, W, to->M);
        free(U);
        free(W);
        return rank;
    }
    for (int i = 0; i < K * K; i++) {
        const double one = i / K == i % K && p == DP_PAYLOAD_LESS_I;
        const int out = p == DP_PAYLOAD_DIAGONAL && i / K != i % K;
        to->M[i] = out ? 0 : one + sent(p, from->M[i] - one);
    }
    return rank;
}

typedef struct {
    dp_payload payload;
    double tolerance;
    int N, K, V;
    dp_traffic *t;
} exchange;

static void count(const exchange *x, int pairs, int rank) {
    x->t->messages++;
    x->t->bytes += dp_payload_H_bytes(x->payload, x->K, x->V);
    if (pairs) x->t->bytes += dp_payload_M_bytes(x->payload, x->K, rank);
}

/* Every rank folds what came of the pairs before it. all: each goes to all ranks, not to later ones
 * alone. */
static void fold_all(const exchange *x, const dp_affine *pair, int all, double *S) {
    const int64_t KV = (int64_t)x->K * x->V;
    dp_affine got[x->N];
    for (int j = 0; j < x->N; j++) {
        const int rank = received(x->payload, x->tolerance, &pair[j], &got[j]);
        for (int r = all ? 0 : j + 1; r < x->N; r++)
            if (r != j) count(x, 1, rank);
    }
    for (int r = 1; r < x->N; r++)
        dp_affine_merge(got, 0, r, 1, S + r * KV);
    for (int j = 0; j < x->N; j++)
        dp_affine_free(&got[j]);
}

static void hand_on(const exchange *x, const double *from, double *to) {
    count(x, 0, 0);
    for (int64_t i = 0; i < (int64_t)x->K * x->V; i++)
        to[i] = sent(x->payload, from[i]);
}

static void ring(const exchange *x, const dp_affine *pair, double *S) {
    const int64_t KV = (int64_t)x->K * x->V;
    double *out = dp_doubles(KV);
    for (int r = 0; r + 1 < x->N; r++) {
        dp_affine_apply(&pair[r], S + r * KV, out);
        hand_on(x, out, S + (r + 1) * KV);
    }
    free(out);
}

static void scan(const exchange *x, const dp_affine *pair, double *S) {
    const int64_t KV = (int64_t)x->K * x->V;
    dp_affine own[x->N], got;
    for (int r = 0; r < x->N; r++) {
        dp_affine_init(&own[r], x->K, x->V);
        dp_affine_compose(&own[r], &pair[r]);
    }
    for (int d = 1; d < x->N; d *= 2)
        /* the last first: its source is still of the round before */
        for (int r = x->N - 1; r >= d; r--) {
            count(x, 1, received(x->payload, x->tolerance, &own[r - d], &got));
            dp_affine_compose(&own[r], &got);
            dp_affine_free(&got);
        }
    for (int r = 0; r + 1 < x->N; r++)
        hand_on(x, own[r].H, S + (r + 1) * KV);
    for (int r = 0; r < x->N; r++)
        dp_affine_free(&own[r]);
}

/* e_(r+1) = |M_r|_2 e_r + tolerance |S_r|, of states as they came. */
static void carry_bound(const exchange *x, const dp_affine *pair, const double *S, double *bound) {
    const int64_t KV = (int64_t)x->K * x->V;
    bound[0] = 0;
    for (int r = 0; r + 1 < x->N; r++) {
        const double left = x->payload == DP_PAYLOAD_LOW_RANK ? x->tolerance : 0;
        bound[r + 1] = dp_norm2_up(x->K, x->K, pair[r].M) * bound[r] +
                       left * (1 + 0x1p-20) * dp_norm_fro(KV, S + r * KV);
    }
}

void dp_exchange_states(dp_exchange which, dp_payload payload, double tolerance, int N,
                        const dp_affine *pair, double *S, double *bound, dp_traffic *t) {
    const exchange x = {payload, tolerance, N, pair->K, pair->V, t};
    memset(S, 0, sizeof *S * (size_t)((int64_t)N * x.K * x.V));
    switch (which) {
    case DP_EXCHANGE_ALLGATHER: fold_all(&x, pair, 1, S); break;
    case DP_EXCHANGE_WINDOWS: fold_all(&x, pair, 0, S); break;
    case DP_EXCHANGE_RING: ring(&x, pair, S); break;
    case DP_EXCHANGE_SCAN: scan(&x, pair, S); break;
    default: assert(!"an exchange that sends neither pairs nor states");
    }
    if (bound) carry_bound(&x, pair, S, bound);
}
