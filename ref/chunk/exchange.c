/* Exchanges: prices, and states from pairs (exchange.h). */
#include "exchange.h"
#include "ref/arithmetic/mm.h"
#include "ref/arithmetic/norms.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define C 64     /* tokens a chunk */
#define PART 128 /* tokens a part of grid */

const char *const dp_exchange_names[DP_NEXCHANGES] = {"allgather", "windows", "ring", "scan",
                                                      "serial",    "heads",   "grid"};
const char *const dp_payload_names[DP_NPAYLOADS] = {"fp32", "bf16",     "bf16x2",
                                                    "m-i",  "low-rank", "diagonal"};

int64_t dp_payload_M_bytes(dp_payload p, int K, int rank) {
    const int64_t KK = (int64_t)K * K;
    switch (p) {
    case DP_PAYLOAD_BF16:
    case DP_PAYLOAD_LESS_I: return 2 * KK;
    case DP_PAYLOAD_LOW_RANK: return 8 * (int64_t)K * rank;
    case DP_PAYLOAD_DIAGONAL: return 4 * (int64_t)K;
    default: return 4 * KK;
    }
}

int64_t dp_payload_H_bytes(dp_payload p, int K, int V) {
    return (p == DP_PAYLOAD_BF16 || p == DP_PAYLOAD_LESS_I ? 2 : 4) * (int64_t)K * V;
}

/* ---- what it costs --------------------------------------------------------------------------- */

/* Flops of one product with M. */
static double product(const dp_exchange_size *s, double columns) {
    const double K = s->K;
    if (s->payload == DP_PAYLOAD_DIAGONAL) return K * columns;
    if (s->payload == DP_PAYLOAD_LOW_RANK) return 4 * K * s->rank * columns;
    return 2 * K * K * columns;
}

dp_exchange_price dp_exchange_price_of(dp_exchange x, const dp_exchange_size *s,
                                       const dp_exchange_machine *m) {
    const double N = s->N, HV = s->HV, K = s->K, V = s->V, chunks = ceil((double)s->L / C),
                 pass = chunks * 4 * C * K * V * HV / m->flops_per_s,
                 chain = s->payload == DP_PAYLOAD_DIAGONAL
                             ? 0
                             : chunks * (2 * C * K * K + 2 * K * K * K) * HV / m->flops_per_s,
                 pre = pass + chain,
                 state = HV * (double)dp_payload_H_bytes(s->payload, s->K, s->V),
                 pair = state + HV * (double)dp_payload_M_bytes(s->payload, s->K, s->rank),
                 fold = product(s, V) * HV / m->flops_per_s,
                 combine = (product(s, K) + product(s, V)) * HV / m->flops_per_s,
                 hop = m->latency_s + state / m->bytes_per_s,
                 hop2 = m->latency_s + pair / m->bytes_per_s;
    dp_exchange_price p = {.possible = 1};
    switch (x) {
    case DP_EXCHANGE_ALLGATHER:
        p = (dp_exchange_price){1, N * (N - 1), N * (N - 1) * pair,
                                pre + (N - 1) * (hop2 + fold) + pass, pre + pass};
        break;
    case DP_EXCHANGE_WINDOWS: /* one latency, since no read waits for another */
        p = (dp_exchange_price){
            1, N * (N - 1) / 2, N * (N - 1) / 2 * pair,
            pre + m->latency_s + (N - 1) * (pair / m->bytes_per_s + fold) + pass, pre + pass};
        break;
    case DP_EXCHANGE_RING:
        p = (dp_exchange_price){1, N - 1, (N - 1) * state, pre + (N - 1) * (hop + fold) + pass,
                                pre + pass};
        break;
    case DP_EXCHANGE_SCAN:
        p.messages = N - 1;
        p.bytes = (N - 1) * state;
        p.compute_s = pre + pass;
        p.path_s = p.compute_s + (N > 1 ? hop : 0);
        for (int d = 1; d < s->N; d *= 2) {
            p.messages += N - d;
            p.bytes += (N - d) * pair;
            p.path_s += hop2 + combine;
        }
        break;
    case DP_EXCHANGE_SERIAL:
        p = (dp_exchange_price){1, N - 1, (N - 1) * state, N * pass + (N - 1) * hop, N * pass};
        break;
    case DP_EXCHANGE_HEADS: /* q k v g beta there, o back, in bf16; the pass is as long in flops */
        p.possible = s->N <= s->HV;
        p.messages = 2 * N * (N - 1);
        p.bytes = 2.0 * (double)s->L * (N - 1) * HV * (3 * K + 2 * V + 1);
        p.compute_s = pass;
        p.path_s = pass + (N > 1 ? 2 * m->latency_s : 0) + p.bytes / N / m->bytes_per_s;
        break;
    case DP_EXCHANGE_GRID: {
        const double parts = ceil((double)s->L / PART);
        p = (dp_exchange_price){1, N - 1, (N - 1) * state,
                                pre + (N - 1) * hop + (N * parts - 1) * fold + pass, pre + pass};
        break;
    }
    default: assert(0);
    }
    return p;
}

/* ---- low rank -------------------------------------------------------------------------------- */

/* One-sided Jacobi: columns of A [K][K] turned until they are orthogonal, Q' the same turns of I,
 * so that M = A Q with orthogonal rows in Q. */
static void orthogonalise(double *A, double *Q, int K) {
    int turned = 1;
    for (int sweep = 0; sweep < 60 && turned; sweep++) {
        turned = 0;
        for (int a = 0; a < K; a++)
            for (int b = a + 1; b < K; b++) {
                double aa = 0, bb = 0, ab = 0;
                for (int i = 0; i < K; i++) {
                    aa += A[i * K + a] * A[i * K + a];
                    bb += A[i * K + b] * A[i * K + b];
                    ab += A[i * K + a] * A[i * K + b];
                }
                if (fabs(ab) <= 0x1p-50 * sqrt(aa * bb) || ab == 0) continue;
                turned = 1;
                const double z = (bb - aa) / (2 * ab),
                             t = (z >= 0 ? 1 : -1) / (fabs(z) + sqrt(1 + z * z)),
                             c = 1 / sqrt(1 + t * t), s = c * t;
                for (int i = 0; i < K; i++) {
                    const double x = A[i * K + a], y = A[i * K + b], u = Q[a * K + i],
                                 v = Q[b * K + i];
                    A[i * K + a] = c * x - s * y;
                    A[i * K + b] = s * x + c * y;
                    Q[a * K + i] = c * u - s * v;
                    Q[b * K + i] = s * u + c * v;
                }
            }
    }
}

int dp_low_rank(const double *M, int K, double tolerance, double **U, double **W) {
    double *A = dp_copy(M, (int64_t)K * K), *Q = dp_doubles((int64_t)K * K);
    int keep[K], r = 0;
    for (int i = 0; i < K; i++)
        Q[i * K + i] = 1;
    orthogonalise(A, Q, K);
    for (int a = 0; a < K; a++) {
        double s = 0;
        for (int i = 0; i < K; i++)
            s += A[i * K + a] * A[i * K + a];
        if (sqrt(s) > tolerance) keep[r++] = a;
    }
    *U = dp_doubles((int64_t)K * r);
    *W = dp_doubles((int64_t)r * K);
    for (int z = 0; z < r; z++)
        for (int i = 0; i < K; i++) {
            (*U)[i * r + z] = A[i * K + keep[z]];
            (*W)[z * K + i] = Q[keep[z] * K + i];
        }
    free(A);
    free(Q);
    return r;
}

/* ---- what it makes --------------------------------------------------------------------------- */

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
