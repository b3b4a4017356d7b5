/* Exchanges: what each of them makes of the ranks' pairs is what folding them makes; what is sent
 * is what the table of prices says; what a shorter payload changes keeps to its bound. */
#include "gt.h"
#include "harness/simulated/ranks.h"
#include "oracle.h"
#include "ref/arithmetic/low_rank.h"
#include "ref/chunk/exchange.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 9 };

/* Pairs of N ranks of one sequence, so many tokens each: of 2 tokens M forgets next to nothing, so
 * that a pair too many or too few shows; of 16 it has small singular values. */
static int pairs_of(int N, int tokens, int K, int V, dp_affine *pair) {
    const oracle_spec spec = {.model = DP_KDA,
                              .T = tokens * N,
                              .H = 1,
                              .HV = 1,
                              .K = K,
                              .V = V,
                              .R = 1,
                              .gate = DP_GATE_LOG,
                              .beta = DP_BETA_PLAIN,
                              .l2norm = 1,
                              .backward = 1,
                              .g_scale = 0.02,
                              .seed = 75};
    dp_problem p;
    dp_sim s;
    oracle_problem(&p, &spec);
    if (dp_sim_new(&s, &p, DP_BASE_FP64, N, DP_FAULT_NONE, NULL)) return 0;
    dp_sim_run(&s, DP_FP64, DP_EXCHANGE_ALLGATHER, 0);
    for (int r = 0; r < N; r++) {
        dp_affine_init(&pair[r], K, V);
        if (!s.M[r]) continue; /* the last rank sends nothing that is used */
        memcpy(pair[r].M, s.M[r], sizeof(double) * (size_t)(K * K));
        memcpy(pair[r].H, s.H[r], sizeof(double) * (size_t)(K * V));
    }
    dp_sim_free(&s);
    dp_problem_free(&p);
    return 1;
}

static void free_pairs(dp_affine *pair, int N) {
    for (int r = 0; r < N; r++)
        dp_affine_free(&pair[r]);
}

static double distance(const double *a, const double *b, int64_t n) {
    double s = 0;
    for (int64_t i = 0; i < n; i++)
        s += (a[i] - b[i]) * (a[i] - b[i]);
    return sqrt(s);
}

/* States without any rounding of what is sent. */
static double *exact_states(const dp_affine *pair, int N, int KV) {
    double *S = dp_doubles((int64_t)N * KV);
    for (int r = 1; r < N; r++)
        dp_affine_merge(pair, 0, r, 1, S + r * KV);
    return S;
}

DP_TEST(exchange, each_makes_the_states_and_sends_what_its_price_says) {
    const int K = 8, V = 6, KV = K * V;
    const dp_exchange_machine m = {1e-6, 1e11, 1e14};
    for (int N = 1; N <= MOST; N++) {
        dp_affine pair[MOST];
        REQUIRE(pairs_of(N, 2, K, V, pair), "%d ranks", N);
        double *want = exact_states(pair, N, KV), *S = dp_doubles((int64_t)N * KV);
        for (int x = 0; x < DP_NEXCHANGES; x++)
            for (int p = 0; p <= DP_PAYLOAD_LESS_I; p++) {
                if (x == DP_EXCHANGE_SERIAL || x == DP_EXCHANGE_HEADS || x == DP_EXCHANGE_GRID)
                    continue;
                static const double off[] = {0x1p-22, 0x1p-6, 0x1p-14, 0x1p-6};
                const dp_exchange_size size = {
                    .N = N, .HV = 1, .K = K, .V = V, .L = 2, .payload = (dp_payload)p};
                const dp_exchange_price price = dp_exchange_price_of((dp_exchange)x, &size, &m);
                dp_traffic t = {0, 0};
                dp_exchange_states((dp_exchange)x, (dp_payload)p, 0, N, pair, S, NULL, &t);
                const char *who = dp_exchange_names[x], *as = dp_payload_names[p];
                CHECK((double)t.messages == price.messages && (double)t.bytes == price.bytes,
                      "%s, %s, %d ranks: %lld messages of %lld bytes, predicted %g of %g", who, as,
                      N, (long long)t.messages, (long long)t.bytes, price.messages, price.bytes);
                const double e = distance(S, want, (int64_t)N * KV);
                CHECK(e <= off[p] * N * 8, "%s, %s, %d ranks: %.2e", who, as, N, e);
                CHECK(N < 3 || e > 0, "%s, %s, %d ranks: nothing was rounded", who, as, N);
            }
        free(want);
        free(S);
        free_pairs(pair, N);
    }
}

DP_TEST(exchange, low_rank_keeps_to_its_tolerance_and_its_bound) {
    const int K = 12, V = 6, KV = K * V, N = 6;
    dp_affine pair[MOST];
    int fewest = K;
    REQUIRE(pairs_of(N, 16, K, V, pair), "pairs");
    double *want = exact_states(pair, N, KV), *S = dp_doubles((int64_t)N * KV), bound[MOST];
    for (double tolerance = 1e-6; tolerance < 1; tolerance *= 10) {
        dp_traffic t = {0, 0};
        for (int r = 0; r < N; r++) {
            double *U, *W, off[K * K];
            const int rank = dp_low_rank(pair[r].M, K, tolerance, &U, &W);
            fewest = rank < fewest ? rank : fewest;
            for (int i = 0; i < K * K; i++) {
                off[i] = pair[r].M[i];
                for (int z = 0; z < rank; z++)
                    off[i] -= U[i / K * rank + z] * W[z * K + i % K];
            }
            double most = 0;
            for (int c = 0; c < K; c++) { /* columns: each is at most |.|_2 */
                double s = 0;
                for (int i = 0; i < K; i++)
                    s += off[i * K + c] * off[i * K + c];
                most = fmax(most, sqrt(s));
            }
            CHECK(most <= tolerance * (1 + 1e-12), "rank %d: left out %.3g, tolerance %.3g", r,
                  most, tolerance);
            free(U);
            free(W);
        }
        dp_exchange_states(DP_EXCHANGE_ALLGATHER, DP_PAYLOAD_LOW_RANK, tolerance, N, pair, S, bound,
                           &t);
        for (int r = 0; r < N; r++) {
            const double e = distance(S + r * KV, want + r * KV, KV);
            CHECK(e <= bound[r] + 1e-5, "tolerance %.0e, rank %d: %.3g, bound %.3g", tolerance, r,
                  e, bound[r]);
        }
    }
    CHECK(fewest < K, "no tolerance left anything out");
    free(want);
    free(S);
    free_pairs(pair, N);
}

/* The formulas at the ends: two ranks, one rank, more ranks than heads. */
DP_TEST(exchange, prices_at_the_ends) {
    const dp_exchange_machine m = {5e-6, 1e11, 1e14};
    dp_exchange_size s = {.N = 1, .HV = 4, .K = 128, .V = 128, .L = 8192};
    for (int x = 0; x < DP_NEXCHANGES; x++) {
        const dp_exchange_price p = dp_exchange_price_of((dp_exchange)x, &s, &m);
        CHECK(p.messages == 0 && p.bytes == 0, "%s, one rank: %g messages", dp_exchange_names[x],
              p.messages);
    }
    s.N = 8;
    CHECK(!dp_exchange_price_of(DP_EXCHANGE_HEADS, &s, &m).possible, "8 ranks of 4 heads");
    const dp_exchange_price scan = dp_exchange_price_of(DP_EXCHANGE_SCAN, &s, &m),
                            ring = dp_exchange_price_of(DP_EXCHANGE_RING, &s, &m),
                            grid = dp_exchange_price_of(DP_EXCHANGE_GRID, &s, &m);
    CHECK(scan.messages == 7 + 6 + 4 + 7, "scan: %g messages", scan.messages); /* math.md g.3 */
    CHECK(scan.bytes == 4.0 * 4 * 671744, "scan: %g bytes", scan.bytes);
    CHECK(ring.messages == grid.messages && ring.bytes == grid.bytes && ring.path_s < grid.path_s,
          "a grid sends what a ring sends and folds more");
    s.payload = DP_PAYLOAD_DIAGONAL;
    CHECK(dp_exchange_price_of(DP_EXCHANGE_ALLGATHER, &s, &m).bytes ==
              8 * 7 * 4.0 * 4 * (128 + 128 * 128),
          "K numbers in place of K x K");
}
