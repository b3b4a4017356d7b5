/* The ownership of tokens: parts cover all tokens once, results agree with those of one rank for
 * any ownership. On a grid every bit is the same for any number of ranks. */
#include "gt.h"
#include "harness/simulated/ranks.h"
#include "oracle.h"
#include "ref/chunk/conv.h"
#include "ref/vocabulary/context.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 64 };

static void check_parts(dp_own kind, int64_t T, int N) {
    const int n = dp_own_parts(kind, T, N);
    const dp_owners o = {kind, N};
    const char *name = dp_own_names[kind];
    if (!n) return;
    CHECK(dp_own_cut(kind, T, n, 0) == 0 && dp_own_cut(kind, T, n, n) == T, "%s: T = %lld", name,
          (long long)T);
    int64_t tokens[MOST] = {0};
    for (int i = 0; i < n; i++) {
        const int64_t a = dp_own_cut(kind, T, n, i), b = dp_own_cut(kind, T, n, i + 1);
        const int rank = dp_own_rank(o, n, i);
        CHECK(a < b, "%s: part %d of %d is empty", name, i, n);
        CHECK(dp_own_part_of(kind, T, n, a) == i && dp_own_part_of(kind, T, n, b - 1) == i,
              "%s: part %d of %d", name, i, n);
        REQUIRE(rank >= 0 && rank < N, "%s: rank %d of %d", name, rank, N);
        tokens[rank] += b - a;
    }
    for (int r = 0; r < N; r++) {
        if (kind == DP_OWN_EMPTY) CHECK((tokens[r] == 0) == r % 2, "%s: rank %d", name, r);
        if (kind == DP_OWN_ZIGZAG && T % (2 * N) == 0)
            CHECK(tokens[r] == T / N, "%s: rank %d of %d owns %lld of %lld", name, r, N,
                  (long long)tokens[r], (long long)T);
    }
}

DP_TEST(own, parts_cover_every_token_once) {
    for (int kind = 0; kind < DP_NOWNS; kind++)
        for (int64_t T = 1; T < 700; T += T < 40 ? 1 : 13)
            for (int N = 1; N <= 16; N++)
                check_parts((dp_own)kind, T, N);
    CHECK(dp_own_parts(DP_OWN_EVEN, 10, 3) == 0, "3 ranks do not divide 10");
    CHECK(dp_own_parts(DP_OWN_ZIGZAG, 5, 3) == 0, "6 parts of 5 tokens");
    CHECK(dp_own_rank((dp_owners){DP_OWN_ZIGZAG, 4}, 8, 7) == 0, "the last part is the first's");
    CHECK(dp_own_rank((dp_owners){DP_OWN_CYCLIC, 3}, 8, 7) == 1, "dealt out in turn");
}

static const int64_t CU[] = {0, 70, 70, 75, 331};
static oracle_spec packed(void) {
    oracle_spec s = oracle_packed(DP_KDA, 8, CU, 73);
    s.beta = DP_BETA_SIGMOID;
    return s;
}

/* The pipeline of N ranks that own the tokens so; *p stays as it was. */
static void run(const dp_problem *p, dp_owners own, dp_base base, dp_exchange merge, dp_sim *s,
                dp_problem *y) {
    *y = *p;
    y->own = own;
    dp_err e = {0};
    const int parts = dp_own_parts(own.kind, p->T, own.ranks);
    REQUIRE(!dp_sim_new(s, y, base, parts, DP_FAULT_NONE, &e), "%s", e.msg);
    dp_sim_run(s, base == DP_BASE_FP64 ? DP_FP64 : DP_FP32, merge, 1);
}

DP_TEST(own, results_do_not_depend_on_the_owner) {
    dp_problem p, y[2];
    dp_sim one, s;
    const oracle_spec spec = packed();
    oracle_problem(&p, &spec);
    run(&p, (dp_owners){DP_OWN_EVEN, 1}, DP_BASE_FP64, DP_EXCHANGE_RING, &one, &y[0]);
    for (int kind = DP_OWN_EVEN + 1; kind < DP_NOWNS; kind++)
        for (int N = 2; N <= 5; N++) {
            run(&p, (dp_owners){(dp_own)kind, N}, DP_BASE_FP64, N % 2, &s, &y[1]);
            for (int f = 0; f < DP_NRESULTS; f++) {
                int64_t rows, width;
                dp_result_shape(&p, f, &rows, &width);
                if (!rows) continue;
                const double e = oracle_maxrel(s.out.out[f], one.out.out[f], rows * width);
                CHECK(e <= 1e-12, "%s, %d ranks, %s: %.2e", dp_own_names[kind], N,
                      dp_result_fields[f].name, e);
            }
            dp_sim_free(&s);
        }
    dp_sim_free(&one);
    dp_problem_free(&p);
}

static int64_t bits_that_differ(const dp_problem *p, dp_result *a, dp_result *b) {
    int64_t n = 0;
    for (int f = 0; f < DP_NRESULTS; f++) {
        int64_t rows, width;
        dp_result_shape(p, f, &rows, &width);
        if (rows) n += memcmp(a->out[f], b->out[f], sizeof(double) * (size_t)(rows * width)) != 0;
    }
    return n;
}

DP_TEST(own, on_a_grid_no_bit_depends_on_the_number_of_ranks) {
    static const int ranks[] = {1, 2, 3, 4, 8};
    static const int64_t cu[] = {0, 70, 70, 75, 700}; /* 6 parts: two ranks sum three each */
    oracle_spec spec = packed();
    spec.T = 700;
    spec.cu = cu;
    for (int base = DP_BASE_FP32; base < DP_NBASES; base++) {
        dp_problem p, y[3];
        dp_sim want, got, other;
        oracle_problem(&p, &spec);
        run(&p, (dp_owners){DP_OWN_GRID, 1}, (dp_base)base, DP_EXCHANGE_ALLGATHER, &want, &y[0]);
        for (int i = 1; i < 10; i++) {
            const dp_owners own = {DP_OWN_GRID, ranks[i % 5]};
            run(&p, own, (dp_base)base, i < 5 ? DP_EXCHANGE_ALLGATHER : DP_EXCHANGE_RING, &got,
                &y[1]);
            const int64_t n = bits_that_differ(&p, &want.out, &got.out);
            CHECK(n == 0, "%s, %d ranks: %lld tensors differ", dp_base_names[base], own.ranks,
                  (long long)n);
            dp_sim_free(&got);
        }
        run(&p, (dp_owners){DP_OWN_BALANCED, 2}, (dp_base)base, DP_EXCHANGE_RING, &other, &y[2]);
        CHECK(bits_that_differ(&p, &want.out, &other.out) > 4, "other cuts give other bits");
        dp_sim_free(&want);
        dp_sim_free(&other);
        dp_problem_free(&p);
    }
}

/* A convolution with numbers of no law. */
static dp_conv convolution(void) {
    dp_conv c = {.T = 700, .D = 6, .W = 5, .Nseq = 4, .silu = 1};
    c.cu = memcpy(dp_calloc(5, sizeof *c.cu), CU, sizeof CU);
    c.cu[4] = c.T;
    uint64_t state = 1;
    for (int i = 0; i < DP_CONV_NINPUTS; i++) {
        const int64_t n = dp_conv_count(&c, &dp_conv_input_fields[i], c.T);
        double *x = c.in[i] = dp_doubles(n);
        for (int64_t z = 0; z < n; z++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            x[z] = (float)((double)(state >> 40) * 0x1p-23 - 1);
        }
    }
    return c;
}

/* H of a part behind one with an infinite value is not known from S_out - M S_in, and is finite. */
DP_TEST(own, what_is_not_finite_stays_in_its_part) {
    char cmd[2048], out[4096];
    snprintf(
        cmd, sizeof cmd,
        "'%s' run inf nan --backend sim --base fp32 --chain fp32 --ranks 4 --own zigzag,cyclic "
        "--exchange allgather,scan --cases '%s' --cache none",
        gt_program(), gt_cases());
    const int rc = gt_run(cmd, out, sizeof out);
    CHECK(rc == 0 && strstr(out, "VERDICT: PASS (8 passed, 0 failed"), "%d: %s", rc, out);
}

DP_TEST(own, convolutions_take_their_halo_from_whoever_owns_it) {
    dp_conv c = convolution();
    dp_conv_result want, got, grid;
    dp_conv_result_alloc(&want, &c);
    dp_conv_result_alloc(&got, &c);
    dp_conv_result_alloc(&grid, &c);
    dp_conv_run(&c, &want);
    for (int kind = DP_OWN_EVEN + 1; kind < DP_NOWNS; kind++)
        for (int N = 1; N <= 80; N += N < 5 ? 1 : 25) {
            c.own = (dp_owners){(dp_own)kind, N};
            const int parts = dp_own_parts(c.own.kind, c.T, N);
            if (!parts) continue;
            REQUIRE(!dp_conv_ranks(&c, parts, DP_BASE_FP64, &got, NULL), "%d ranks", N);
            for (int f = 0; f < DP_CONV_NRESULTS; f++) {
                int64_t rows;
                int width;
                dp_conv_result_shape(&c, f, &rows, &width);
                const double e = oracle_maxrel(got.out[f], want.out[f], rows * width);
                CHECK(e <= 1e-13, "%s, %d ranks, %s: %.2e", dp_own_names[kind], N,
                      dp_conv_result_fields[f].name, e);
            }
        }
    for (int N = 1; N <= 8; N++) {
        c.own = (dp_owners){DP_OWN_GRID, N};
        dp_conv_result *to = N == 1 ? &grid : &got;
        REQUIRE(!dp_conv_ranks(&c, 6, DP_BASE_FP32, to, NULL), "%d ranks", N);
        for (int f = 0; N > 1 && f < DP_CONV_NRESULTS; f++) {
            int64_t rows;
            int width;
            dp_conv_result_shape(&c, f, &rows, &width);
            CHECK(!memcmp(got.out[f], grid.out[f], sizeof(double) * (size_t)(rows * width)),
                  "%d ranks: other bits of %s", N, dp_conv_result_fields[f].name);
        }
    }
    dp_conv_result_free(&want);
    dp_conv_result_free(&got);
    dp_conv_result_free(&grid);
    dp_conv_free(&c);
}
