/* Generated inputs: moments, exact bits, laws of keys and gates; chain factors against an
 * independent product and an SVD. */
#include "gt.h"
#include "ref/inputs/inputs.h"

#include <lapacke.h>
#include <math.h>
#include <mpfr.h>
#include <stdlib.h>
#include <string.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

static double ulps(double got, mpfr_t exact) {
    mpfr_t d;
    int e;
    mpfr_init2(d, 200);
    mpfr_sub_d(d, exact, got, MPFR_RNDN);
    frexp(got, &e);
    const double u = fabs(mpfr_get_d(d, MPFR_RNDN)) / ldexp(1, e - 53);
    mpfr_clear(d);
    return u;
}

DP_TEST(inputs, exp_and_log_are_good_to_a_few_ulp) {
    dp_rng r;
    dp_rng_seed(&r, 3, 1);
    mpfr_t x, y;
    mpfr_inits2(200, x, y, (mpfr_ptr)0);
    double we = 0, wl = 0;
    for (int i = 0; i < 60000; i++) {
        const double a = (dp_rng_uniform(&r) - 0.5) * (i % 3 ? 2 : 1399),
                     b = ldexp(1 + dp_rng_uniform(&r),
                               i % 3 ? -(i % 2) : (int)(2000 * dp_rng_uniform(&r)) - 1000);
        mpfr_set_d(x, a, MPFR_RNDN);
        mpfr_exp(y, x, MPFR_RNDN);
        we = fmax(we, ulps(dp_exp_exact_bits(a), y));
        mpfr_set_d(x, b, MPFR_RNDN);
        mpfr_log(y, x, MPFR_RNDN);
        if (b != 1) wl = fmax(wl, ulps(dp_log_exact_bits(b), y));
    }
    mpfr_clears(x, y, (mpfr_ptr)0);
    CHECK(we <= 2, "exp: %g ulp", we);
    CHECK(wl <= 3, "log: %g ulp", wl);
    CHECK(dp_exp_exact_bits(0) == 1 && dp_exp_exact_bits(-701) == 0 && dp_log_exact_bits(1) == 0,
          "ends");
}

/* Sample moments of n draws lie within 5 standard deviations of the sample moment (probability of a
 * false alarm below 1e-6). */
DP_TEST(inputs, moments) {
    enum { N = 200000 };
    dp_rng r;
    double u = 0, u2 = 0, m = 0, m2 = 0, e = 0, e2 = 0;
    dp_rng_seed(&r, 1, 2);
    for (int i = 0; i < N; i++) {
        const double a = dp_rng_uniform(&r), b = dp_rng_normal(&r), c = dp_rng_exponential(&r);
        CHECK(a >= 0 && a < 1 && c >= 0 && fabs(b) <= 6, "range: %a %a %a", a, b, c);
        u += a / N;
        u2 += a * a / N;
        m += b / N;
        m2 += b * b / N;
        e += c / N;
        e2 += c * c / N;
    }
    const double s = 5 / sqrt(N);
    CHECK(fabs(u - 0.5) < s * sqrt(1 / 12.0) && fabs(u2 - 1 / 3.0) < s * sqrt(4 / 45.0),
          "uniform %g %g", u, u2);
    CHECK(fabs(m) < s && fabs(m2 - 1) < s * sqrt(2), "normal %g %g", m, m2);
    CHECK(fabs(e - 1) < s && fabs(e2 - 2) < s * sqrt(20), "exponential %g %g", e, e2);
}

DP_TEST(inputs, streams_and_seeds_differ) {
    dp_rng a, b, c;
    dp_rng_seed(&a, 1, 1);
    dp_rng_seed(&b, 1, 2);
    dp_rng_seed(&c, 2, 1);
    int equal = 0;
    for (int i = 0; i < 1000; i++) {
        const double x = dp_rng_uniform(&a), y = dp_rng_uniform(&b), z = dp_rng_uniform(&c);
        equal += x == y || x == z || y == z;
    }
    CHECK(!equal, "%d equal draws", equal);
}

static dp_problem problem(dp_model m, int64_t T, int H, int HV, int K, int V, int R, dp_gate gate,
                          int params) {
    dp_problem p = {.model = m,
                    .T = T,
                    .H = H,
                    .HV = HV,
                    .K = K,
                    .V = V,
                    .R = R,
                    .gate = gate,
                    .scale = 1,
                    .lower_bound = -5};
    dp_problem_alloc(&p);
    p.dout = dp_doubles(T * HV * V);
    p.s0 = dp_doubles((int64_t)HV * K * V);
    if (params) {
        p.A_log = dp_doubles(HV);
        p.dt_bias = dp_doubles((int64_t)HV * dp_Kg(&p));
    }
    return p;
}

static dp_inputs_spec spec(dp_format dtype) {
    return (dp_inputs_spec){.seed = 7,
                            .dtype = dtype,
                            .g_scale = 0.1,
                            .g_head_spread = 1,
                            .beta_lo = 0.2,
                            .beta_hi = 0.9,
                            .s0_scale = 0.5};
}

static uint64_t hash_problem(const dp_problem *p) {
    const struct {
        const double *x;
        int64_t n;
    } a[] = {{p->q, p->T * p->H * p->K},
             {p->k, p->T * p->H * p->R * p->K},
             {p->v, p->T * p->HV * p->R * p->V},
             {p->g, p->T * p->HV * dp_Kg(p)},
             {p->beta, p->T * p->HV * p->R},
             {p->dout, p->T * p->HV * p->V},
             {p->s0, (int64_t)p->HV * p->K * p->V},
             {p->A_log, p->HV},
             {p->dt_bias, (int64_t)p->HV * dp_Kg(p)}};
    uint64_t h = 0;
    for (size_t i = 0; i < sizeof a / sizeof *a; i++)
        if (a[i].x) h = XXH3_64bits_withSeed(a[i].x, (size_t)a[i].n * 8, h);
    return h;
}

/* The promise of the header: the same bits on every machine, compiler and optimisation level. A
 * change of these constants means that every stored result and replay ID changes its meaning. */
DP_TEST(inputs, bits_are_pinned) {
    dp_problem a = problem(DP_KDA, 33, 2, 4, 16, 8, 1, DP_GATE_LOG, 0),
               b = problem(DP_MKDA, 17, 1, 2, 8, 12, 3, DP_GATE_SOFTPLUS, 1);
    dp_inputs_spec s = spec(DP_BF16);
    s.g_channel_spread = 6;
    dp_inputs_fill(&a, &s);
    s.dtype = DP_FP32;
    s.keys = DP_KEYS_SUBSPACE;
    dp_inputs_fill(&b, &s);
    CHECK(hash_problem(&a) == 0xca0367c68d59d568u, "kda: %#llx",
          (unsigned long long)hash_problem(&a));
    CHECK(hash_problem(&b) == 0xee07f674fad98b80u, "mkda: %#llx",
          (unsigned long long)hash_problem(&b));
    float M[3 * 20 * 20];
    double mu[3];
    uint64_t h = 0;
    for (int g = 0; g < DP_NREGIMES; g++) {
        dp_inputs_chain((dp_regime)g, 3, 20, 5, M, mu);
        h = XXH3_64bits_withSeed(M, sizeof M, XXH3_64bits_withSeed(mu, sizeof mu, h));
    }
    CHECK(h == 0x59e6c148c83e9c3bu, "chain: %#llx", (unsigned long long)h);
    dp_problem_free(&a);
    dp_problem_free(&b);
}

DP_TEST(inputs, one_tensor_does_not_shift_another) {
    dp_problem a = problem(DP_KDA, 10, 1, 1, 8, 8, 1, DP_GATE_LOG, 0),
               b = problem(DP_KDA, 20, 1, 1, 8, 16, 1, DP_GATE_LOG, 0);
    dp_inputs_spec s = spec(DP_FP32);
    dp_inputs_fill(&a, &s);
    dp_inputs_fill(&b, &s);
    CHECK(!memcmp(a.q, b.q, 80 * 8) && !memcmp(a.k, b.k, 80 * 8) && !memcmp(a.g, b.g, 80 * 8) &&
              !memcmp(a.beta, b.beta, 10 * 8),
          "prefix of a longer T");
    dp_problem_free(&a);
    dp_problem_free(&b);
}

static double norm(const double *x, int n) {
    double s = 0;
    for (int i = 0; i < n; i++)
        s += x[i] * x[i];
    return sqrt(s);
}

DP_TEST(inputs, tensors_are_representable_in_their_dtype) {
    dp_problem p = problem(DP_KDA, 50, 1, 2, 16, 8, 1, DP_GATE_SOFTPLUS, 1);
    dp_inputs_spec s = spec(DP_BF16);
    dp_inputs_fill(&p, &s);
    const struct {
        const char *name;
        const double *x;
        int n;
    } a[] = {{"q", p.q, 800},  {"k", p.k, 800},       {"v", p.v, 800},
             {"g", p.g, 1600}, {"beta", p.beta, 100}, {"do", p.dout, 800}};
    for (size_t i = 0; i < sizeof a / sizeof *a; i++) {
        int distinct = 0;
        for (int j = 0; j < a[i].n; j++) {
            CHECK(dp_bf16d(a[i].x[j]) == a[i].x[j], "%s[%d] = %a is not a bf16 number", a[i].name,
                  j, a[i].x[j]);
            distinct += j && a[i].x[j] != a[i].x[j - 1];
        }
        CHECK(distinct > a[i].n * 3 / 4, "%s is nearly constant", a[i].name);
    }
    for (int j = 0; j < 256; j++)
        CHECK((float)p.s0[j] == p.s0[j], "s0[%d] is fp32", j);
    dp_problem_free(&p);
}

DP_TEST(inputs, key_laws) {
    dp_problem p = problem(DP_KDA, 200, 2, 2, 32, 4, 1, DP_GATE_LOG, 0);
    dp_inputs_spec s = spec(DP_FP64);
    double cosine[3];
    for (int kind = 0; kind < 3; kind++) {
        s.keys = (dp_keys)kind;
        dp_inputs_fill(&p, &s);
        cosine[kind] = 0;
        for (int t = 0; t < 200; t++)
            for (int h = 0; h < 2; h++) {
                const double *k = p.k + (t * 2 + h) * 32;
                CHECK(fabs(norm(k, 32) - 1) < 1e-15 * 32, "|k| = %.17g", norm(k, 32));
                for (int i = 0; t && i < 32; i++)
                    cosine[kind] += k[i] * k[i - 64] / 398;
            }
    }
    CHECK(fabs(cosine[DP_KEYS_RANDOM]) < 5 / sqrt(398 * 32), "random keys: mean cosine %g",
          cosine[DP_KEYS_RANDOM]);
    CHECK(fabs(cosine[DP_KEYS_CORRELATED] - 1 / 1.01) < 0.01,
          "correlated keys: mean cosine %g, expected 1/1.01", cosine[DP_KEYS_CORRELATED]);
    /* subspace: 200 keys of one head have rank K/2 */
    double A[200 * 32], sv[32], junk[1];
    for (int t = 0; t < 200; t++)
        memcpy(A + t * 32, p.k + t * 64, 32 * 8);
    LAPACKE_dgesdd(LAPACK_ROW_MAJOR, 'N', 200, 32, A, 32, sv, junk, 200, junk, 32);
    CHECK(sv[15] > 1 && sv[16] < 1e-12, "singular values 16, 17: %g %g", sv[15], sv[16]);
    s.keys = DP_KEYS_RANDOM;
    p.l2norm = 1;
    dp_inputs_fill(&p, &s);
    CHECK(norm(p.k, 200 * 64) / sqrt(200 * 64) > 0.9,
          "raw keys are not normalised when l2norm does it");
    dp_problem_free(&p);
}

static double mean_gate(const dp_problem *p, int h) {
    const int Kg = dp_Kg(p);
    double s = 0;
    for (int64_t t = 0; t < p->T; t++)
        for (int i = 0; i < Kg; i++)
            s += p->g[(t * p->HV + h) * Kg + i] / (p->T * Kg);
    return s;
}

DP_TEST(inputs, gate_laws) {
    dp_problem p = problem(DP_KDA, 400, 1, 3, 32, 4, 1, DP_GATE_LOG, 0);
    dp_inputs_spec s = spec(DP_FP64);
    s.g_head_spread = 2;
    dp_inputs_fill(&p, &s);
    for (int h = 0; h < 3; h++)
        CHECK(fabs(mean_gate(&p, h) / (-0.1 * (1 << h)) - 1) < 5 / sqrt(12800),
              "head %d: mean gate %g", h, mean_gate(&p, h));
    s.g_uniform = 5;
    s.g_head_spread = 0;
    dp_inputs_fill(&p, &s);
    CHECK(fabs(mean_gate(&p, 2) / -2.5 - 1) < 0.03, "uniform gate: mean %g", mean_gate(&p, 2));
    for (int i = 0; i < 400 * 96; i++)
        CHECK(p.g[i] <= 0 && p.g[i] > -5, "g[%d] = %g", i, p.g[i]);
    dp_problem_free(&p);
    p = problem(DP_KDA, 400, 1, 2, 32, 4, 1, DP_GATE_SOFTPLUS, 1);
    s.g_head_spread = 4;
    s.g_mean = 1;
    dp_inputs_fill(&p, &s);
    CHECK(fabs(mean_gate(&p, 0) - 1) < 0.01, "raw gate: mean %g", mean_gate(&p, 0));
    CHECK(p.A_log[0] >= 0 && p.A_log[0] <= log(16) && p.A_log[1] >= log(4) - 1e-6 &&
              p.A_log[1] <= log(64),
          "A_log %g %g", p.A_log[0], p.A_log[1]);
    for (int i = 0; i < 64; i++)
        CHECK(p.dt_bias[i] >= -6.91 && p.dt_bias[i] <= -2.29, "dt_bias[%d] = %g", i, p.dt_bias[i]);
    dp_problem_free(&p);
}

/* The recipe again, in __float128 and whole matrices, from the same draws: the factor must be its
 * fp32 rounding. The fp64 build errs by at most 64 steps * (1+beta)(K+8) u |A|_F = 64 * 2 * 16 *
 * 1.1e-16 * 3 < 1e-12. That is far below 2^-24 |M_ij| except for tiny entries. */
DP_TEST(inputs, factor_is_the_product_of_its_steps) {
    enum { K = 8 };
    float M[2 * K * K];
    double mu[2];
    dp_inputs_chain(DP_REGIME_MILD, 2, K, 9, M, mu);
    for (int c = 0; c < 2; c++) {
        __float128 A[K][K] = {{0}};
        for (int i = 0; i < K; i++)
            A[i][i] = 1;
        dp_rng r;
        dp_rng_seed(&r, 9, ((uint64_t)(DP_REGIME_MILD + 1) << 40) + 1 + (uint64_t)c);
        for (int s = 0; s < DP_CHUNK; s++) {
            double k[K], g[K];
            for (int i = 0; i < K; i++)
                k[i] = dp_rng_normal(&r);
            const double len = norm(k, K);
            for (int i = 0; i < K; i++)
                g[i] = -0.01 * dp_rng_exponential(&r);
            const double beta = 0.2 + 0.7 * dp_rng_uniform(&r);
            for (int j = 0; j < K; j++) {
                __float128 y = 0;
                for (int i = 0; i < K; i++) {
                    A[i][j] *= exp(g[i]);
                    y += k[i] / len * A[i][j];
                }
                for (int i = 0; i < K; i++)
                    A[i][j] -= beta * (k[i] / len) * y;
            }
        }
        for (int i = 0; i < K * K; i++) {
            const double want = (double)A[i / K][i % K], err = fabs(M[c * K * K + i] - want);
            CHECK(err <= 0x1p-24 * fabs(want) + 1e-12, "factor %d entry %d: %a, want %a", c, i,
                  M[c * K * K + i], want);
        }
    }
}

static double spectral_norm(const float *M, int K) {
    double *A = dp_doubles((int64_t)K * K), *s = dp_doubles(K), junk[1];
    for (int i = 0; i < K * K; i++)
        A[i] = M[i];
    LAPACKE_dgesdd(LAPACK_ROW_MAJOR, 'N', K, K, A, K, s, junk, K, junk, K);
    const double n = s[0];
    free(A);
    free(s);
    return n;
}

/* mu >= |M|_2 up to the SVD's own error, below K^2 u |M|_2; and not much above where the closed
 * form is attained. */
DP_TEST(inputs, mu_bounds_every_factor) {
    const int sizes[] = {1, 5, 32, 128};
    for (int k = 0; k < 4; k++) {
        const int K = sizes[k], n = K > 100 ? 4 : 24;
        float *M = dp_calloc((size_t)n * K * K, sizeof *M);
        double mu[24];
        for (int g = 0; g < DP_NREGIMES; g++) {
            dp_inputs_chain((dp_regime)g, n, K, 2, M, mu);
            for (int c = 0; c < n; c++) {
                const double s = spectral_norm(M + (int64_t)c * K * K, K);
                CHECK(s <= mu[c] * (1 + K * K * 0x1p-53), "%s K=%d factor %d: norm %.17g mu %.17g",
                      dp_regime_names[g], K, c, s, mu[c]);
                if (K > 1 && (g == DP_REGIME_REFLECT || g == DP_REGIME_SUBSPACE))
                    CHECK(mu[c] < 1 + 1e-6 && s > 1 - 1e-6, "%s K=%d: mu %.9g norm %.9g: not sharp",
                          dp_regime_names[g], K, mu[c], s);
            }
        }
        free(M);
    }
}

/* The purpose of the regimes: how fast each forgets (reports/growth.md, j.5, column |P|_F at n =
 * 16, K = 32). */
DP_TEST(inputs, regimes_forget_as_specified) {
    enum { K = 32, N = 16 };
    const struct {
        double lo, hi;
    } want[DP_NREGIMES] = {{3.9, 4.1}, {5.656, 5.658}, {5.3, 5.5}, {0, 5.6},
                           {3.9, 4.3}, {1e-11, 1e-7},  {0, 1e-30}};
    static float M[N * K * K];
    double mu[N], *P = dp_doubles(K * K), *X = dp_doubles(K * K);
    for (int g = 0; g < DP_NREGIMES; g++) {
        dp_inputs_chain((dp_regime)g, N, K, 1, M, mu);
        for (int i = 0; i < K * K; i++)
            P[i] = M[i];
        for (int c = 1; c < N; c++) {
            for (int i = 0; i < K * K; i++) {
                X[i] = 0;
                for (int l = 0; l < K; l++)
                    X[i] += M[c * K * K + i / K * K + l] * P[l * K + i % K];
            }
            memcpy(P, X, K * K * sizeof *P);
        }
        const double f = norm(P, K * K);
        CHECK(f >= want[g].lo && f <= want[g].hi, "%s: |P_16|_F = %g, expected %g..%g",
              dp_regime_names[g], f, want[g].lo, want[g].hi);
    }
    free(P);
    free(X);
}

DP_TEST(inputs, chain_does_not_depend_on_length) {
    enum { K = 16 };
    float A[5 * K * K], B[9 * K * K];
    double ma[5], mb[9];
    dp_inputs_chain(DP_REGIME_CORR, 5, K, 3, A, ma);
    dp_inputs_chain(DP_REGIME_CORR, 9, K, 3, B, mb);
    CHECK(!memcmp(A, B, sizeof A) && !memcmp(ma, mb, sizeof ma),
          "a longer chain starts with the shorter one");
}

DP_TEST(inputs, conv) {
    dp_conv c = {.T = 100, .D = 8, .W = 4, .Nseq = 1, .silu = 1};
    c.x = dp_doubles(800);
    c.w = dp_doubles(32);
    c.bias = dp_doubles(8);
    c.dy = dp_doubles(800);
    dp_inputs_spec s = spec(DP_BF16);
    dp_inputs_fill_conv(&c, &s);
    CHECK(fabs(norm(c.x, 800) - sqrt(800)) < 5, "x: norm %g", norm(c.x, 800));
    CHECK(norm(c.w, 32) > 1 && norm(c.bias, 8) > 0.3, "w %g bias %g", norm(c.w, 32),
          norm(c.bias, 8));
    double *dy = dp_copy(c.dy, 800);
    memset(c.dy, 0, 800 * sizeof *dy);
    dp_inputs_fill_conv_dy(&c, &s);
    CHECK(!memcmp(dy, c.dy, 800 * sizeof *dy) && memcmp(dy, c.x, 800 * sizeof *dy),
          "dy has its own stream");
    free(dy);
    free(c.x);
    free(c.w);
    free(c.bias);
    free(c.dy);
}

/* keys = moved: what each channel's gates sum to, and how much of a state is left, in 16 tokens. */
DP_TEST(inputs, moved_state_survives_gates_that_sum_to_minus_20) {
    enum { T = 64, K = 16, V = 1 };
    dp_problem p = problem(DP_KDA, T, 1, 1, K, V, 1, DP_GATE_LOG, 0);
    dp_inputs_spec s = spec(DP_FP64);
    double S[K] = {0}, before = 0;
    s.keys = DP_KEYS_MOVED;
    s.beta_lo = s.beta_hi = 1;
    dp_inputs_fill(&p, &s);
    for (int t = 0; t + 16 <= T; t++)
        for (int x = 0; x < K; x++) {
            double sum = 0;
            for (int i = t; i < t + 16; i++)
                sum += p.g[i * K + x];
            CHECK(sum == -20, "channel %d sums to %g in 16 tokens from %d", x, sum, t);
        }
    for (int x = 0; x < K / 2; x++) /* along b, what token 8 - 4 of head 0 leaves: angle 90 */
        S[K / 2 + x] = p.q[K / 2 + x];
    for (int t = 0; t < T; t++) {
        double along = 0, size = 0;
        for (int x = 0; x < K; x++)
            along += p.k[t * K + x] * (S[x] *= exp(p.g[t * K + x]));
        for (int x = 0; x < K; x++) {
            S[x] -= along * p.k[t * K + x];
            size += S[x] * S[x];
        }
        if (t == 15) before = sqrt(size);
        if (t == 31)
            CHECK(fabs(sqrt(size) / before - 0.53) < 0.01, "%g of the state is left",
                  sqrt(size) / before);
    }
    dp_problem_free(&p);
}
