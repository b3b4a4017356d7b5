/* The chunk solver, stage by stage: every named intermediate against its definition (math.md e, f),
 * the identities of math.md g.1, and both forms of dg. The problem as a whole is tested in
 * test_ranks.c (long double recurrence) and here against the MPFR truth. */
#include "gt.h"
#include "harness/simulated/ranks.h"
#include "oracle.h"
#include "ref/arithmetic/mm.h"
#include "ref/chunk/chunk.h"
#include "ref/truth/truth.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static uint64_t rng = 88172645463325252u;
static double rnd(void) {
    rng ^= rng << 13;
    rng ^= rng >> 7;
    rng ^= rng << 17;
    return (double)(int64_t)rng * 0x1p-63;
}
static double *random_array(int64_t n, double a) {
    double *x = dp_doubles(n);
    for (int64_t i = 0; i < n; i++)
        x[i] = a * rnd();
    return x;
}

static void prepare(dp_chunk *ch, dp_base base, int c, int R, int K, int V, double scale,
                    const dp_chunk_in *in) {
    dp_chunk_begin(ch, base, c, R, K, V, scale, in);
    dp_chunk_intra(ch, in);
    dp_chunk_solve(ch);
    dp_chunk_wy(ch);
}

/* A chunk of c tokens with unit keys and decay of about g a step. */
static void make_chunk(dp_chunk *ch, dp_base base, int c, int R, int K, int V, double g) {
    double *q = random_array((int64_t)c * K, 1), *k = random_array((int64_t)c * R * K, 1),
           *v = random_array((int64_t)c * R * V, 1), *gate = random_array((int64_t)c * K, g),
           *b = random_array((int64_t)c * R, 1);
    for (int i = 0; i < c * R; i++) {
        double n = 0;
        for (int x = 0; x < K; x++)
            n += k[(int64_t)i * K + x] * k[(int64_t)i * K + x];
        for (int x = 0; x < K; x++)
            k[(int64_t)i * K + x] /= sqrt(n);
        b[i] = fabs(b[i]) * (R > 2 ? 2.0 / R : 1);
    }
    for (int64_t i = 0; i < (int64_t)c * K; i++)
        gate[i] = -fabs(gate[i]);
    const dp_chunk_in in = {.q = q,
                            .k = k,
                            .v = v,
                            .g = gate,
                            .beta = b,
                            .sq = K,
                            .sk = (int64_t)R * K,
                            .sv = (int64_t)R * V,
                            .sg = K,
                            .sb = R,
                            .Kg = K};
    prepare(ch, base, c, R, K, V, 0.3, &in);
    free(q);
    free(k);
    free(v);
    free(gate);
    free(b);
}

static void fill_state(dp_chunk *ch) {
    for (int64_t i = 0; i < (int64_t)ch->K * ch->V; i++)
        ch->h[i] = rnd();
}

static const int SHAPES[][4] = {
    {64, 1, 16, 8}, {1, 1, 8, 8}, {37, 2, 8, 12}, {64, 4, 16, 16}, {63, 1, 32, 4}}; /* c R K V */

DP_TEST(chunk, L_and_Aqk_are_masked_pair_sums) {
    for (size_t s = 0; s < sizeof SHAPES / sizeof *SHAPES; s++) {
        dp_chunk ch;
        make_chunk(&ch, DP_BASE_FP64, SHAPES[s][0], SHAPES[s][1], SHAPES[s][2], SHAPES[s][3], 2);
        double err = 0;
        for (int i = 0; i < ch.n; i++)
            for (int j = 0; j < ch.n; j++) {
                double l = 0, p = 0;
                for (int x = 0; x < ch.K; x++) {
                    const double d =
                        ch.gcum[(i / ch.R) * ch.K + x] - ch.gcum[(j / ch.R) * ch.K + x];
                    if (i / ch.R > j / ch.R)
                        l += ch.k[(int64_t)i * ch.K + x] * exp(d) * ch.k[(int64_t)j * ch.K + x];
                    if (i / ch.R >= j / ch.R)
                        p += 0.3 * ch.q[(i / ch.R) * ch.K + x] * exp(d) *
                             ch.k[(int64_t)j * ch.K + x];
                }
                err = fmax(err, fabs(l - ch.L[(int64_t)i * ch.n + j]));
                err = fmax(err, fabs(p - ch.Aqk[(int64_t)(i / ch.R) * ch.n + j]));
            }
        CHECK(err < 1e-14, "shape %zu: %.2e", s, err);
        dp_chunk_free(&ch);
    }
}

DP_TEST(chunk, solution_solves_the_block_triangular_system) {
    for (size_t s = 0; s < sizeof SHAPES / sizeof *SHAPES; s++) {
        dp_chunk ch;
        make_chunk(&ch, DP_BASE_FP64, SHAPES[s][0], SHAPES[s][1], SHAPES[s][2], SHAPES[s][3], 0.05);
        fill_state(&ch);
        double *S = dp_copy(ch.h, (int64_t)ch.K * ch.V), err = 0;
        dp_chunk_state(&ch, S, ch.v_new);
        for (int i = 0; i < ch.n; i++) /* (I + B L) X = B (V - Kgam S_0) */
            for (int v = 0; v < ch.V; v++) {
                double lhs = ch.v_new[(int64_t)i * ch.V + v], rhs = ch.v[(int64_t)i * ch.V + v];
                for (int j = 0; j < ch.n; j++)
                    lhs +=
                        ch.beta[i] * ch.L[(int64_t)i * ch.n + j] * ch.v_new[(int64_t)j * ch.V + v];
                for (int x = 0; x < ch.K; x++)
                    rhs -= ch.kgam[(int64_t)i * ch.K + x] * ch.h[(int64_t)x * ch.V + v];
                err = fmax(err, fabs(lhs - ch.beta[i] * rhs));
            }
        CHECK(err < 1e-13, "shape %zu: residual %.2e", s, err);
        dp_chunk_inverse(&ch);
        for (int i = 0; i < ch.n; i++) /* w = T B Kgam */
            for (int x = 0; x < ch.K; x++) {
                double w = 0;
                for (int j = 0; j < ch.n; j++)
                    w +=
                        ch.Akk[(int64_t)i * ch.n + j] * ch.beta[j] * ch.kgam[(int64_t)j * ch.K + x];
                err = fmax(err, fabs(w - ch.w[(int64_t)i * ch.K + x]));
            }
        CHECK(err < 1e-13, "shape %zu: inverse and solve differ by %.2e", s, err);
        free(S);
        dp_chunk_free(&ch);
    }
}

/* The same pair by rows (design pair=rows). */
static void check_rows(const dp_chunk *ch, const double *M, const double *H) {
    const int64_t KK = (int64_t)ch->K * ch->K, KV = (int64_t)ch->K * ch->V;
    DP_OWN double *P = dp_doubles(KK), *sum = dp_doubles(KV);
    for (int x = 0; x < ch->K; x++)
        P[(int64_t)x * ch->K + x] = 1;
    dp_chunk_pair(ch, P, sum);
    CHECK(oracle_maxrel(P, M, KK) < 1e-13 && oracle_maxrel(sum, H, KV) < 1e-13,
          "by rows: M %.2e, H %.2e", oracle_maxrel(P, M, KK), oracle_maxrel(sum, H, KV));
}

/* S_c = M S_0 + H, dS_0 = M' dS_c + dH, for the same M. */
DP_TEST(chunk, M_is_the_affine_map_of_both_directions) {
    for (size_t s = 0; s < sizeof SHAPES / sizeof *SHAPES; s++) {
        dp_chunk ch;
        make_chunk(&ch, DP_BASE_FP64, SHAPES[s][0], SHAPES[s][1], SHAPES[s][2], SHAPES[s][3], 0.05);
        fill_state(&ch);
        const int64_t KV = (int64_t)ch.K * ch.V;
        double *M = dp_doubles((int64_t)ch.K * ch.K), *S = dp_copy(ch.h, KV), *H = dp_doubles(KV),
               *want = dp_doubles(KV), *dout = random_array((int64_t)ch.c * ch.V, 1);
        double *dS = random_array(KV, 1), *dS0 = dp_copy(dS, KV), *dH = dp_doubles(KV);
        dp_chunk_M(&ch, M);
        dp_chunk_state(&ch, S, NULL);
        dp_chunk_state(&ch, H, NULL);
        check_rows(&ch, M, H);
        dp_mm(DP_FP64, 0, 0, ch.K, ch.V, ch.K, M, ch.h, want);
        for (int64_t i = 0; i < KV; i++)
            want[i] += H[i];
        CHECK(oracle_maxrel(S, want, KV) < 1e-13, "shape %zu forward %.2e", s,
              oracle_maxrel(S, want, KV));
        dp_chunk_dAv(&ch, dout);
        dp_chunk_state_bwd(&ch, dout, dS0, NULL);
        dp_chunk_state_bwd(&ch, dout, dH, NULL);
        dp_mm(DP_FP64, 1, 0, ch.K, ch.V, ch.K, M, dS, want);
        for (int64_t i = 0; i < KV; i++)
            want[i] += dH[i];
        CHECK(oracle_maxrel(dS0, want, KV) < 1e-13, "shape %zu backward %.2e", s,
              oracle_maxrel(dS0, want, KV));
        free(M);
        free(S);
        free(H);
        free(want);
        free(dout);
        free(dS);
        free(dS0);
        free(dH);
        dp_chunk_free(&ch);
    }
}

/* Nearly equal keys, no decay, beta near 1: A is as ill-conditioned as possible for R = 1 (math.md
 * b, stability). R = 4 with unscaled beta has an inverse of 1e27. The solver must stay within the
 * condition number times the roundoff, not blow up on its own. */
DP_TEST(chunk, error_stays_within_the_condition_number) {
    for (int R = 1; R <= 4; R += 3) {
        const int c = 64, K = 16, V = 4, n = c * R;
        double *common = random_array(K, 1), *q = random_array((int64_t)c * K, 1),
               *k = dp_doubles((int64_t)n * K), *v = random_array((int64_t)n * V, 1),
               *g = dp_doubles((int64_t)c * K), *b = dp_doubles(n);
        for (int i = 0; i < n; i++) {
            double s = 0;
            for (int x = 0; x < K; x++) {
                k[(int64_t)i * K + x] = common[x] + 0.01 * rnd();
                s += k[(int64_t)i * K + x] * k[(int64_t)i * K + x];
            }
            for (int x = 0; x < K; x++)
                k[(int64_t)i * K + x] /= sqrt(s);
            b[i] = 0.95;
        }
        const dp_chunk_in in = {.q = q,
                                .k = k,
                                .v = v,
                                .g = g,
                                .beta = b,
                                .sq = K,
                                .sk = (int64_t)R * K,
                                .sv = (int64_t)R * V,
                                .sg = K,
                                .sb = R,
                                .Kg = K};
        dp_chunk ch;
        prepare(&ch, DP_BASE_FP64, c, R, K, V, 1, &in);
        dp_chunk_inverse(&ch);
        long double err = 0, top = 0, cond = 0, *x = dp_calloc((size_t)n * V, sizeof *x);
        for (int i = 0; i < n; i++) { /* forward substitution in long double */
            long double row = 0;
            for (int j = 0; j < n; j++)
                row += fabsl(ch.Akk[(int64_t)i * n + j]);
            cond = fmaxl(cond, row);
            for (int z = 0; z < V; z++) {
                long double s = (long double)b[i] * v[(int64_t)i * V + z];
                for (int j = 0; j < (i / R) * R; j++)
                    s -= (long double)b[i] * ch.L[(int64_t)i * n + j] * x[(int64_t)j * V + z];
                x[(int64_t)i * V + z] = s;
                err = fmaxl(err, fabsl(s - ch.u[(int64_t)i * V + z]));
                top = fmaxl(top, fabsl(s));
            }
        }
        const double rel = (double)(err / top), allowed = (double)(2 * n * cond * n * 0x1p-53L);
        CHECK(rel <= allowed && (R > 1 || rel < 1e-12),
              "R = %d: relative error %.2e, |inverse| %.2Le", R, rel, cond);
        if (R == 4)
            CHECK(cond > 1e20L, "the R = 4 system should be ill-conditioned, |inverse| %.2Le",
                  cond);
        free(common);
        free(q);
        free(k);
        free(v);
        free(g);
        free(b);
        free(x);
        dp_chunk_free(&ch);
    }
}

/* fp64 on one rank against the MPFR truth, and N ranks against one: every field, max-norm. */
DP_TEST(chunk, agrees_with_the_truth_to_1e_12_and_ranks_with_one_rank_to_1e_13) {
    static const int64_t cu[] = {0, 37, 37, 150, 240};
    const oracle_spec spec[] = {
        {DP_GDN, 240, 1, 2, 16, 8, 1, 4, cu, DP_GATE_SOFTPLUS, DP_BETA_SIGMOID, 1, 1, 1, 0.05, 31},
        {DP_KDA, 240, 2, 4, 16, 24, 1, 4, cu, DP_GATE_SOFTPLUS, DP_BETA_SIGMOID2, 1, 1, 1, 0.05,
         32},
        {DP_KDA, 240, 1, 2, 32, 16, 1, 0, NULL, DP_GATE_LOWER_BOUND, DP_BETA_SIGMOID, 1, 0, 1, 0.02,
         33},
        {DP_MKDA, 240, 1, 2, 16, 16, 2, 4, cu, DP_GATE_LOG, DP_BETA_PLAIN, 0, 1, 1, 0.02, 34},
        {DP_MKDA, 240, 1, 1, 16, 16, 4, 0, NULL, DP_GATE_LOG, DP_BETA_PLAIN, 0, 1, 1, 0.02, 35},
        {DP_GDN2, 240, 1, 2, 16, 24, 1, 4, cu, DP_GATE_SOFTPLUS, DP_BETA_PLAIN, 1, 1, 1, 0.05, 36},
        {DP_GLA, 240, 1, 2, 16, 24, 1, 4, cu, DP_GATE_SOFTPLUS, DP_BETA_PLAIN, 1, 1, 1, 0.05, 37}};
    for (size_t i = 0; i < sizeof spec / sizeof *spec; i++) {
        dp_problem p;
        dp_truth t;
        dp_sim one, many;
        oracle_problem(&p, &spec[i]);
        const dp_truth_request rq = {.bits = 128, .backward = 1};
        REQUIRE(dp_truth_run(&p, &rq, &t, NULL) == DP_OK, "truth %zu", i);
        REQUIRE(dp_sim_new(&one, &p, DP_BASE_FP64, 1, DP_FAULT_NONE, NULL) == DP_OK, "sim");
        dp_sim_run(&one, DP_FP64, DP_EXCHANGE_ALLGATHER, 1);
        const int ranks[] = {2, 3, 4, 8};
        for (int f = 0; f < DP_NRESULTS; f++)
            if (t.field[f].rows) {
                const double e = oracle_maxrel(one.out.out[f], t.field[f].hi,
                                               t.field[f].rows * t.field[f].width);
                CHECK(e <= 1e-12, "problem %zu, %s: %.2e", i, dp_result_fields[f].name, e);
            }
        for (size_t n = 0; n < 4; n++) {
            REQUIRE(dp_sim_new(&many, &p, DP_BASE_FP64, ranks[n], DP_FAULT_NONE, NULL) == DP_OK,
                    "sim");
            dp_sim_run(&many, DP_FP64, DP_EXCHANGE_ALLGATHER, 1);
            for (int f = 0; f < DP_NRESULTS; f++)
                if (t.field[f].rows) {
                    const double e = oracle_maxrel(many.out.out[f], one.out.out[f],
                                                   t.field[f].rows * t.field[f].width);
                    CHECK(e <= 1e-13, "problem %zu, %d ranks, %s: %.2e", i, ranks[n],
                          dp_result_fields[f].name, e);
                }
            dp_sim_free(&many);
        }
        dp_sim_free(&one);
        dp_truth_free(&t);
        dp_problem_free(&p);
    }
}
