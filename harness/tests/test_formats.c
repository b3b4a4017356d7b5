/* Roundings of ref/formats against MPFR. The value is rounded to the format's precision with the
 * format's exponent range emulated (mpfr_subnormalize), which shares nothing with the integer
 * arithmetic under test. */
#include "gt.h"
#include "ref/vocabulary/design.h"
#include "ref/vocabulary/formats.h"
#include "ref/vocabulary/problem.h"

#include <math.h>
#include <mpfr.h>
#include <stdlib.h>
#include <string.h>

/* p bits, largest exponent emax and smallest subnormal 2^(emin-1) in MPFR's convention (significand
 * in [1/2, 1)). */
typedef struct {
    int p, emin, emax;
} shape;
typedef enum { NEAREST_EVEN, NEAREST_AWAY, TO_ZERO } mode;

static double spacing_below(shape s, double a) { /* distance of neighbours in the binade of a > 0 */
    int e;
    frexp(a, &e);
    return ldexp(1, (e - s.p > s.emin - 1 ? e - s.p : s.emin - 1));
}

static double mpfr_rounded(double x, shape s, mpfr_rnd_t r) {
    const mpfr_exp_t lo = mpfr_get_emin(), hi = mpfr_get_emax();
    mpfr_t a, b;
    mpfr_init2(a, 53);
    mpfr_init2(b, s.p);
    mpfr_set_d(a, x, MPFR_RNDN);
    mpfr_set_emin(s.emin);
    mpfr_set_emax(s.emax);
    int t = mpfr_set(b, a, r);
    t = mpfr_check_range(b, t, r);
    mpfr_subnormalize(b, t, r);
    mpfr_set_emin(lo);
    mpfr_set_emax(hi);
    const double y = mpfr_get_d(b, MPFR_RNDN);
    mpfr_clears(a, b, (mpfr_ptr)0);
    return y;
}

/* Ties away has no MPFR mode. Take the truncated value and its outer neighbour, and compare the
 * distances, which are exact doubles here (x has at most 24 bits). Overflow: the largest finite
 * number plus half a spacing goes to Inf. */
static double rounded_away(double x, shape s) {
    if (isnan(x) || isinf(x) || x == 0) return x;
    const double a = fabs(x), z = fabs(mpfr_rounded(x, s, MPFR_RNDZ)),
                 q = z > 0 ? spacing_below(s, z) : ldexp(1, s.emin - 1);
    double y = a - z >= z + q - a ? z + q : z;
    if (y >= ldexp(1, s.emax)) y = INFINITY;
    return copysign(y, x);
}

static double oracle(double x, shape s, mode m) {
    if (m == NEAREST_AWAY) return rounded_away(x, s);
    return mpfr_rounded(x, s, m == TO_ZERO ? MPFR_RNDZ : MPFR_RNDN);
}

static int same(double a, double b) { return isnan(a) ? isnan(b) : !memcmp(&a, &b, sizeof a); }

static double via_bf16(double x) { return dp_bf16((float)x); }
static double via_tf32(double x) { return dp_tf32((float)x); }
static double via_tf32rz(double x) { return dp_tf32rz((float)x); }
static double via_fp32(double x) { return dp_fp32(x); }
static double via_fp16(double x) { return dp_fp16_from_bits(dp_fp16_bits(x)); }

static const struct {
    const char *name;
    double (*f)(double);
    shape s;
    mode m;
    int takes_double;
} ROUNDINGS[] = {{"dp_fp32", via_fp32, {24, -148, 128}, NEAREST_EVEN, 1},
                 {"dp_bf16d", dp_bf16d, {8, -132, 128}, NEAREST_EVEN, 1},
                 {"dp_fp16", via_fp16, {11, -23, 16}, NEAREST_EVEN, 1},
                 {"dp_bf16", via_bf16, {8, -132, 128}, NEAREST_EVEN, 0},
                 {"dp_tf32", via_tf32, {11, -135, 128}, NEAREST_AWAY, 0},
                 {"dp_tf32rz", via_tf32rz, {11, -135, 128}, TO_ZERO, 0}};
#define NROUNDINGS ((int)(sizeof ROUNDINGS / sizeof *ROUNDINGS))

static int wrong; /* reported at most 10 times a test */
static void expect(int i, double x) {
    if (!ROUNDINGS[i].takes_double) x = (float)x;
    const double got = ROUNDINGS[i].f(x), want = oracle(x, ROUNDINGS[i].s, ROUNDINGS[i].m);
    if (!same(got, want) && wrong++ < 10)
        CHECK(0, "%s(%a): got %a want %a", ROUNDINGS[i].name, x, got, want);
}

static uint64_t draw(uint64_t *s) { /* splitmix64, the test's own */
    uint64_t z = *s += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static float float_from(uint32_t b) {
    float x;
    memcpy(&x, &b, 4);
    return x;
}

DP_TEST(formats, random_patterns_against_mpfr) {
    uint64_t s = 1;
    wrong = 0;
    for (int n = 0; n < 350000; n++) {
        const uint64_t r = draw(&s);
        const float f = float_from((uint32_t)r);
        double d; /* exponent of a float, all 52 fraction bits: double rounding shows */
        const uint64_t wide =
            (r & 0x800fffffffffffffu) | (uint64_t)(1023 - 160 + (int)(draw(&s) % 300)) << 52;
        memcpy(&d, &wide, 8);
        for (int i = 0; i < NROUNDINGS; i++)
            expect(i, n & 1 && ROUNDINGS[i].takes_double ? d : f);
    }
    CHECK(!wrong, "%d of %d", wrong, 350000 * NROUNDINGS);
}

/* Around every representable boundary: v = representable, v + half a spacing (the tie), and both
 * neighbours of the tie. At every exponent, for both values of the last bit, on both signs. */
DP_TEST(formats, ties_at_every_exponent) {
    wrong = 0;
    for (int i = 0; i < NROUNDINGS; i++) {
        const shape s = ROUNDINGS[i].s;
        const int fine = ROUNDINGS[i].takes_double ? 53 : 24;
        for (int e = s.emin - 4; e <= s.emax + 1; e++)
            for (int frac = 0; frac < 6; frac++) {
                const double lead = ldexp(frac < 3 ? 0.5 : 1 - ldexp(1, -s.p), e),
                             q = lead > 0 ? spacing_below(s, lead) : 0;
                const double v = lead + (frac % 3) * q;
                const double eps =
                    ldexp(1, (int)fmax(e - fine, ROUNDINGS[i].takes_double ? -1074 : -149));
                const double near[] = {v,           v + q / 2, v + q / 2 - eps, v + q / 2 + eps,
                                       v + q - eps, v + eps};
                for (int k = 0; k < 6; k++) {
                    expect(i, near[k]);
                    expect(i, -near[k]);
                }
            }
    }
    CHECK(!wrong, "%d wrong", wrong);
}

DP_TEST(formats, special_values) {
    const double x[] = {0.0,
                        -0.0,
                        INFINITY,
                        -INFINITY,
                        NAN,
                        0x1p-149,
                        0x1p-150,
                        0x1.8p-150,
                        0x1p-133,
                        0x1p-134,
                        0x1.8p-134,
                        0x1.000002p-134,
                        0x1p-136,
                        0x1p-137,
                        0x1p-126,
                        0x1.fffffep127,
                        0x1.fep127,
                        0x1.ffp127,
                        0x1.ffcp127,
                        0x1.ffep127,
                        0x1.ffdffep127,
                        0x1.ffffffp127,
                        0x1p128,
                        0x1p-24,
                        0x1p-25,
                        0x1.0000000000001p-25,
                        65504,
                        65519.99,
                        65520,
                        0x1p-1074,
                        0x1.fffffffffffffp1023};
    wrong = 0;
    for (int i = 0; i < NROUNDINGS; i++)
        for (size_t k = 0; k < sizeof x / sizeof *x; k++) {
            expect(i, x[k]);
            expect(i, -x[k]);
        }
    CHECK(!wrong, "%d wrong", wrong);
    for (uint32_t payload = 1; payload < 0x800000u; payload <<= 1) {
        const float n = float_from(0x7f800000u | payload), m = float_from(0xff800000u | payload);
        CHECK(isnan(dp_bf16(n)) && isnan(dp_tf32(n)) && isnan(dp_tf32rz(n)) && isnan(dp_bf16d(m)),
              "NaN with payload %x", payload);
    }
    CHECK(isinf(dp_tf32(0x1.fffffep127f)), "to nearest overflows to Inf");
    CHECK(dp_tf32rz(0x1.fffffep127f) == 0x1.ffcp127f,
          "truncation stays at the largest finite number, got %a", dp_tf32rz(0x1.fffffep127f));
}

DP_TEST(formats, sixteen_bit_round_trip) {
    int bad = 0;
    for (int b = 0; b < 65536; b++) {
        const float h = dp_fp16_from_bits((uint16_t)b), f = dp_bf16_from_bits((uint16_t)b);
        const int e = b >> 10 & 31, m = b & 1023;
        const double want = copysign(e == 31 ? (m ? NAN : INFINITY)
                                     : e     ? ldexp(1024 + m, e - 25)
                                             : ldexp(m, -24),
                                     b & 0x8000 ? -1 : 1);
        bad += isnan(want) ? !isnan(h) : !same(h, want);
        bad += isnan(h) ? (dp_fp16_bits(h) & 0x7c00) != 0x7c00 || !(dp_fp16_bits(h) & 1023)
                        : dp_fp16_bits(h) != b;
        bad += isnan(f) ? !isnan(dp_bf16(f)) : dp_bf16_bits(f) != b;
        const double eb =
            (b >> 7 & 255) ? ldexp(128 + (b & 127), (b >> 7 & 255) - 134) : ldexp(b & 127, -133);
        if ((b >> 7 & 255) != 255) bad += !same(f, copysign(eb, b & 0x8000 ? -1 : 1));
    }
    CHECK(!bad, "%d wrong", bad);
}

/* A value already in the format stays; one rounding errs by at most u_op (math.md j.1) on normal
 * numbers. */
DP_TEST(formats, roundoff_constants_are_sharp) {
    uint64_t s = 7;
    double worst[NROUNDINGS] = {0};
    for (int n = 0; n < 200000; n++) {
        const float x = 1 + (float)(draw(&s) >> 41) * 0x1p-23f;
        for (int i = 0; i < NROUNDINGS; i++) {
            const double y = ROUNDINGS[i].f(x), e = fabs(y - x) / x;
            CHECK(ROUNDINGS[i].f(y) == y, "%s not idempotent at %a", ROUNDINGS[i].name, y);
            if (e > worst[i]) worst[i] = e;
        }
    }
    const struct {
        int i;
        dp_format f;
        double u;
    } u[] = {{3, DP_BF16, 0x1p-8}, {4, DP_TF32, 0x1p-11}, {5, DP_TF32RZ, 0x1p-10}};
    for (int k = 0; k < 3; k++) {
        CHECK(dp_formats[u[k].f].u_op == u[k].u, "u_op of %s", dp_formats[u[k].f].name);
        CHECK(worst[u[k].i] <= u[k].u && worst[u[k].i] > 0.95 * u[k].u, "%s: worst %g, u %g",
              dp_formats[u[k].f].name, worst[u[k].i], u[k].u);
    }
    CHECK(dp_formats[DP_BF16ST].u_op == 0 && dp_formats[DP_BF16ST].u_store == 0x1p-8, "bf16st");
}

static void check_words(const char *what, const char *words, const char *(*name)(int), int n) {
    char all[200] = "";
    for (int i = 0; i < n; i++) {
        strcat(all, i ? "|" : "");
        strcat(all, name(i));
    }
    CHECK(!strcmp(all, words), "%s: %s, but the texts say %s", what, all, words);
}
static const char *format_name(int i) { return dp_formats[i].name; }
static const char *base_name(int i) { return dp_base_names[i]; }
static const char *merge_name(int i) { return dp_exchange_names[i]; }
static const char *model_name(int i) { return dp_models[i].name; }
static const char *gate_word(int i) { return dp_gates[i].word; }
static const char *beta_word(int i) { return dp_betas[i].word; }

/* Case files and help texts use the names of the tables. */
DP_TEST(formats, names_in_texts_are_those_of_the_tables) {
    check_words("formats", DP_FORMAT_WORDS, format_name, DP_NFORMATS);
    check_words("bases", DP_BASE_WORDS, base_name, DP_NBASES);
    check_words("merges", DP_EXCHANGE_WORDS, merge_name, DP_NRUN_EXCHANGES);
    check_words("models", DP_MODEL_WORDS, model_name, DP_NMODELS);
    check_words("gates", DP_GATE_WORDS, gate_word, DP_NGATES);
    check_words("betas", DP_BETA_WORDS, beta_word, DP_NBETAS);
    dp_design d;
    dp_err e = {0};
    CHECK(dp_design_parse("?", DP_BASE_FP32, &d, &e) == DP_EINPUT &&
              !strcmp(e.msg, "design: ?: not one of " DP_DESIGN_WORDS),
          "%s", e.msg);
    for (int i = 0; i < DP_NFORMATS; i++)
        CHECK(dp_formats[i].bits > 0 && dp_formats[i].bytes > 0 && dp_formats[i].rate > 0 &&
                  dp_formats[i].words,
              "%s: a row with a gap", dp_formats[i].name);
}

/* hi = tf32(a), lo = tf32(a - hi) leaves at most 2^-22 |a|. */
DP_TEST(formats, tf32x3_split_leaves_22_bits) {
    uint64_t s = 11;
    double worst = 0;
    for (int n = 0; n < 1000000; n++) {
        const float a = 1 + (float)(draw(&s) >> 41) * 0x1p-23f, hi = dp_tf32(a),
                    lo = dp_tf32(a - hi);
        worst = fmax(worst, fabs((double)a - hi - lo) / a);
    }
    CHECK(worst <= dp_formats[DP_TF32X3].u_op, "worst %g", worst);
}

/* MPFR at 400 bits, exact products: the double must not lie below, and not more than a few spacings
 * above. */
static double eta_exact(dp_format f, int K, double *slack) {
    mpfr_t g, g2, x, y;
    mpfr_inits2(400, g, g2, x, y, (mpfr_ptr)0);
    const double u = dp_formats[f].u_acc;
    const int n[] = {K, K + 2};
    mpfr_ptr out[] = {g, g2};
    for (int i = 0; i < 2; i++) {
        mpfr_set_d(x, u, MPFR_RNDN);
        mpfr_mul_si(x, x, n[i], MPFR_RNDU);
        mpfr_ui_sub(y, 1, x, MPFR_RNDD);
        mpfr_div(out[i], x, y, MPFR_RNDU);
    }
    mpfr_set_d(x, 1, MPFR_RNDN);
    double factor[3] = {dp_formats[f].u_op, dp_formats[f].u_op, dp_formats[f].u_store};
    if (f == DP_TF32X3) {
        factor[0] = 3 * 0x1p-22 + 0x1p-43;
        factor[1] = factor[2] = 0;
        mpfr_mul_d(y, g, 0x1p-10, MPFR_RNDU);
        mpfr_add_ui(y, y, 1, MPFR_RNDU);
        mpfr_mul(x, x, y, MPFR_RNDU);
        mpfr_set(g, g2, MPFR_RNDU);
    }
    mpfr_add_ui(g, g, 1, MPFR_RNDU);
    mpfr_mul(x, x, g, MPFR_RNDU);
    for (int i = 0; i < 3; i++) {
        mpfr_set_d(y, factor[i], MPFR_RNDN);
        mpfr_add_ui(y, y, 1, MPFR_RNDN);
        mpfr_mul(x, x, y, MPFR_RNDU);
    }
    mpfr_sub_ui(x, x, 1, MPFR_RNDU);
    const double got = dp_eta(f, K), want = mpfr_get_d(x, MPFR_RNDU);
    mpfr_d_sub(y, got, x, MPFR_RNDD); /* got - exact: negative means rounded down */
    *slack = mpfr_get_d(y, MPFR_RNDD) / want;
    mpfr_clears(g, g2, x, y, (mpfr_ptr)0);
    return want;
}

DP_TEST(formats, eta_and_gamma_never_round_down) {
    for (int f = 0; f < DP_NFORMATS; f++)
        for (int K = 1; K <= 4096; K = K < 40 ? K + 1 : K * 3 / 2) {
            double slack;
            const double want = eta_exact(f, K, &slack);
            CHECK(slack >= 0 && slack < 0x1p-48, "%s K=%d: eta %g, relative slack %g",
                  dp_formats[f].name, K, want, slack);
        }
    const struct {
        dp_format f;
        double k32, k128;
    } table[] = {{DP_FP32, 1.9e-6, 7.6e-6},   {DP_TF32, 9.8e-4, 9.8e-4},
                 {DP_TF32RZ, 2.0e-3, 2.0e-3}, {DP_TF32X3, 2.7e-6, 8.5e-6},
                 {DP_BF16, 7.8e-3, 7.8e-3},   {DP_BF16ST, 3.9e-3, 3.9e-3},
                 {DP_FP64, 3.6e-15, 1.4e-14}};
    for (int i = 0; i < 7; i++) { /* the printed table of math.md j.1, two digits */
        CHECK(fabs(dp_eta(table[i].f, 32) / table[i].k32 - 1) < 0.03, "%s K=32: %g",
              dp_formats[table[i].f].name, dp_eta(table[i].f, 32));
        CHECK(fabs(dp_eta(table[i].f, 128) / table[i].k128 - 1) < 0.03, "%s K=128: %g",
              dp_formats[table[i].f].name, dp_eta(table[i].f, 128));
    }
    CHECK(isinf(dp_gamma(1 << 24, 0x1p-24)), "n u = 1 has no bound");
    CHECK(dp_gamma(0, 0x1p-24) == 0, "nothing to round");
}

DP_TEST(formats, names) {
    for (int f = 0; f < DP_NFORMATS; f++)
        CHECK(dp_format_find(dp_formats[f].name) == f, "%s", dp_formats[f].name);
    CHECK(dp_format_find("bf17") == -1 && dp_format_find("") == -1, "unknown names");
}
