/* ref/elementary against MPFR: random arguments over the whole range, special values, and loops
 * over vectors; ref/arithmetic/mp_three against MPFR's own products and sums. */
#include "gt.h"
#include "ref/arithmetic/elementary.h"
#include "ref/arithmetic/elementary_core.h"
#include "ref/arithmetic/mp_three.h"
#include "ref/inputs/inputs.h"

#include <float.h>
#include <math.h>
#include <mpfr.h>
#include <stdio.h>

enum { N = 40000 };

/* Distance of got from the exact value, in units of the last place of the exact value. The format
 * has `digits` bits and the smallest spacing 2^least. */
static double ulps(double got, mpfr_srcptr exact, int digits, int least) {
    mpfr_t d;
    const mpfr_exp_t e = mpfr_zero_p(exact) ? least : mpfr_get_exp(exact) - digits;
    mpfr_init2(d, 200);
    mpfr_sub_d(d, exact, got, MPFR_RNDN);
    mpfr_mul_2si(d, d, -(e > least ? e : least), MPFR_RNDN);
    const double u = fabs(mpfr_get_d(d, MPFR_RNDN));
    mpfr_clear(d);
    return u;
}

typedef double one(double);
typedef int exact_one(mpfr_ptr, mpfr_srcptr, mpfr_rnd_t);
static double expf_(double x) { return dp_expf((float)x); }
static double log1pf_(double x) { return dp_log1pf((float)x); }

/* Where arguments come from: uniform in [lo, hi], or any encoding of that sign pattern. */
typedef struct {
    const char *name;
    one *f;
    exact_one *exact;
    double lo, hi, most; /* lo = hi: encodings at random, negative ones too where lo < 0 */
    int is_float;
} law;

static double argument(const law *l, dp_rng *r) {
    if (l->lo < l->hi) return l->lo + (l->hi - l->lo) * dp_rng_uniform(r);
    const double x = ldexp(1 + dp_rng_uniform(r), (int)(2100 * dp_rng_uniform(r)) - 1075);
    return l->lo < 0 && dp_rng_uniform(r) < 0.5 ? -x : x;
}

static double worst(const law *l, double *at) {
    dp_rng r;
    mpfr_t x, y;
    double top = 0;
    dp_rng_seed(&r, 17, 1);
    mpfr_inits2(120, x, y, (mpfr_ptr)0);
    for (int i = 0; i < N; i++) {
        const double drawn = argument(l, &r), a = l->is_float ? (double)(float)drawn : drawn;
        const double largest = l->is_float ? FLT_MAX : DBL_MAX;
        mpfr_set_d(x, a, MPFR_RNDN);
        l->exact(y, x, MPFR_RNDN);
        const double got = l->f(a);
        if (!isfinite(a) || mpfr_nan_p(y) || mpfr_inf_p(y) || mpfr_cmpabs_ui(y, 0) < 0) continue;
        if (isinf(got) && fabs(mpfr_get_d(y, MPFR_RNDN)) >= largest) continue;
        const double u = ulps(got, y, l->is_float ? 24 : 53, l->is_float ? -149 : -1074);
        if (!(u <= top)) {
            top = u;
            *at = a;
        }
    }
    mpfr_clears(x, y, (mpfr_ptr)0);
    return top;
}

DP_TEST(elementary, within_an_ulp_of_mpfr_everywhere) {
    const law laws[] = {
        {"exp, all results", dp_exp, mpfr_exp, -746, 710, 1, 0},
        {"exp, small", dp_exp, mpfr_exp, -1, 1, 1, 0},
        {"exp, subnormal results", dp_exp, mpfr_exp, -745.2, -708.3, 1, 0},
        {"exp, any number", dp_exp, mpfr_exp, -1, -1, 1, 0},
        {"log, any number", dp_log, mpfr_log, 1, 1, 1, 0},
        {"log, near 1", dp_log, mpfr_log, 0.6, 1.6, 1, 0},
        {"log1p, any number", dp_log1p, mpfr_log1p, -1, -1, 1, 0},
        {"log1p, near 0", dp_log1p, mpfr_log1p, -0.99, 1.5, 1, 0},
        {"log2, any number", dp_log2, mpfr_log2, 1, 1, 1, 0},
        {"log2, near 1", dp_log2, mpfr_log2, 0.6, 1.6, 1, 0},
        {"cbrt, any number", dp_cbrt, mpfr_cbrt, -1, -1, 1, 0},
        {"cbrt, one octave of three", dp_cbrt, mpfr_cbrt, 1, 8, 1, 0},
        {"expf, all results", expf_, mpfr_exp, -104, 89, 0.501, 1},
        {"expf, small", expf_, mpfr_exp, -1, 1, 0.501, 1},
        {"expf, subnormal results", expf_, mpfr_exp, -103.98, -87.3, 0.501, 1},
        {"log1pf, any number", log1pf_, mpfr_log1p, -1, -1, 0.501, 1},
        {"log1pf, near 0", log1pf_, mpfr_log1p, -0.99, 1.5, 0.501, 1},
    };
    for (size_t i = 0; i < sizeof laws / sizeof *laws; i++) {
        double at = 0;
        const double u = worst(&laws[i], &at);
        printf("    %-26s largest error %.4f ulp, at %a\n", laws[i].name, u, at);
        CHECK(u <= laws[i].most, "%s: %.4f ulp at %a", laws[i].name, u, at);
    }
}

DP_TEST(elementary, hypot_is_within_an_ulp) {
    dp_rng r;
    mpfr_t x, y;
    double top = 0;
    dp_rng_seed(&r, 18, 1);
    mpfr_inits2(120, x, y, (mpfr_ptr)0);
    for (int i = 0; i < N; i++) {
        const int e = (int)(2090 * dp_rng_uniform(&r)) - 1070,
                  apart = (int)(60 * dp_rng_uniform(&r));
        const double a = ldexp(1 + dp_rng_uniform(&r), e),
                     b = ldexp(1 + dp_rng_uniform(&r), e - apart);
        mpfr_set_d(x, a, MPFR_RNDN);
        mpfr_set_d(y, b, MPFR_RNDN);
        mpfr_hypot(x, x, y, MPFR_RNDN);
        const double u = ulps(dp_hypot(i % 2 ? a : -b, i % 2 ? b : a), x, 53, -1074);
        CHECK(u <= 1, "hypot(%a, %a): %g ulp", a, b, u);
        top = fmax(top, u);
    }
    printf("    hypot                      largest error %.4f ulp\n", top);
    mpfr_clears(x, y, (mpfr_ptr)0);
}

static int is(double got, double want) {
    return isnan(want) ? isnan(got) : got == want && signbit(got) == signbit(want);
}

DP_TEST(elementary, special_values) {
    const double inf = INFINITY, none = NAN;
    const struct {
        const char *what;
        double got, want;
    } a[] = {
        {"exp(0)", dp_exp(0), 1},
        {"exp(-0)", dp_exp(-0.0), 1},
        {"exp(inf)", dp_exp(inf), inf},
        {"exp(-inf)", dp_exp(-inf), 0},
        {"exp(NaN)", dp_exp(none), none},
        {"exp(709.8)", dp_exp(709.8), inf},
        {"exp(-745.14)", dp_exp(-745.14), 0},
        {"exp(-745.13)", dp_exp(-745.13), 0x1p-1074},
        {"exp(largest)", dp_exp(DBL_MAX), inf},
        {"exp(-largest)", dp_exp(-DBL_MAX), 0},
        {"expf(0)", dp_expf(0), 1},
        {"expf(inf)", dp_expf(INFINITY), inf},
        {"expf(-inf)", dp_expf(-INFINITY), 0},
        {"expf(NaN)", dp_expf(NAN), none},
        {"expf(88.73)", dp_expf(88.73f), inf},
        {"expf(-103.98)", dp_expf(-103.98f), 0},
        {"expf(-103.97)", dp_expf(-103.97f), 0x1p-149},
        {"log(0)", dp_log(0), -inf},
        {"log(-0)", dp_log(-0.0), -inf},
        {"log(-1)", dp_log(-1), none},
        {"log(-inf)", dp_log(-inf), none},
        {"log(inf)", dp_log(inf), inf},
        {"log(NaN)", dp_log(none), none},
        {"log(1)", dp_log(1), 0},
        {"log1p(-1)", dp_log1p(-1), -inf},
        {"log1p(-2)", dp_log1p(-2), none},
        {"log1p(0)", dp_log1p(0), 0},
        {"log1p(-0)", dp_log1p(-0.0), -0.0},
        {"log1p(inf)", dp_log1p(inf), inf},
        {"log1p(NaN)", dp_log1p(none), none},
        {"log1p(smallest)", dp_log1p(0x1p-1074), 0x1p-1074},
        {"log1pf(-1)", dp_log1pf(-1), -inf},
        {"log2(0)", dp_log2(0), -inf},
        {"log2(-1)", dp_log2(-1), none},
        {"log2(inf)", dp_log2(inf), inf},
        {"log2(NaN)", dp_log2(none), none},
        {"cbrt(0)", dp_cbrt(0), 0},
        {"cbrt(-0)", dp_cbrt(-0.0), -0.0},
        {"cbrt(-27)", dp_cbrt(-27), -3},
        {"cbrt(inf)", dp_cbrt(inf), inf},
        {"cbrt(-inf)", dp_cbrt(-inf), -inf},
        {"cbrt(NaN)", dp_cbrt(none), none},
        {"hypot(3, 4)", dp_hypot(3, 4), 5},
        {"hypot(-0, 0)", dp_hypot(-0.0, 0), 0},
        {"hypot(inf, NaN)", dp_hypot(inf, none), inf},
        {"hypot(NaN, 1)", dp_hypot(none, 1), none},
        {"hypot(smallest, 0)", dp_hypot(0x1p-1074, 0), 0x1p-1074},
        {"hypot(largest, largest)", dp_hypot(DBL_MAX, DBL_MAX), inf},
    };
    for (size_t i = 0; i < sizeof a / sizeof *a; i++)
        CHECK(is(a[i].got, a[i].want), "%s = %a, must be %a", a[i].what, a[i].got, a[i].want);
    for (int k = -1074; k <= 1023; k++)
        CHECK(dp_log2(ldexp(1, k)) == k, "log2(2^%d) = %a", k, dp_log2(ldexp(1, k)));
}

/* A loop that the compiler makes vectors of has the bits of single calls. */
DP_TEST(elementary, loops_over_vectors_have_the_bits_of_single_calls) {
    enum { M = 4099 };
    static double x[M], y[M];
    static float xf[M], yf[M];
    dp_rng r;
    dp_rng_seed(&r, 19, 1);
    for (int i = 0; i < M; i++) {
        x[i] = -760 + 1480 * dp_rng_uniform(&r);
        xf[i] = (float)(-110 + 205 * dp_rng_uniform(&r));
    }
    x[0] = xf[0] = NAN;
    x[1] = xf[1] = INFINITY;
    x[2] = xf[2] = -INFINITY;
    for (int i = 0; i < M; i++)
        y[i] = dp_exp_core(x[i]);
    for (int i = 0; i < M; i++)
        yf[i] = dp_expf_core(xf[i]);
    for (int i = 0; i < M; i++) {
        CHECK(is(y[i], dp_exp(x[i])), "exp(%a): %a and %a", x[i], y[i], dp_exp(x[i]));
        CHECK(is(yf[i], dp_expf(xf[i])), "expf(%a): %a and %a", xf[i], yf[i], dp_expf(xf[i]));
    }
}

/* Numbers of every size, and beside the places where log1p takes another form. */
DP_TEST(elementary, rows_of_log1p_have_the_bits_of_single_calls) {
    enum { M = 200001 };
    static const double edge[] = {0, 0.41, 0x1.6a09e667f3bcdp0 - 1, 1};
    static double x[M], y[M];
    dp_rng r;
    dp_rng_seed(&r, 24, 1);
    for (int i = 0; i < M; i++) {
        const double u = dp_rng_uniform(&r);
        x[i] = i % 4 == 0   ? u
               : i % 4 == 1 ? ldexp(u, -(int)(1074 * dp_rng_uniform(&r)))
                            : edge[i / 4 % 4] + (double)(i / 16 % 33 - 16) * 0x1p-53;
        x[i] = x[i] < 0 ? 0 : x[i] > 1 ? 1 : x[i];
    }
    x[0] = NAN;
    dp_log1p_row(M, x, y);
    for (int i = 0; i < M; i++)
        CHECK(is(y[i], dp_log1p(x[i])), "log1p(%a): %a and %a", x[i], y[i], dp_log1p(x[i]));
}

/* ---- three limbs ----------------------------------------------------------------------------- */

static uint64_t any(dp_rng *r, uint64_t n) { return (uint64_t)(dp_rng_uniform(r) * (double)n); }
static uint64_t limb(dp_rng *r) {
    const uint64_t all = any(r, 1ull << 32) << 32 | any(r, 1ull << 32), at = any(r, 64);
    const uint64_t kind[] = {0, ~0ull, 1, 1ull << 63, ~0ull << at, all};
    return kind[any(r, 6)];
}
/* Long runs of zeros and ones, near exponents, and those at which a sum goes to MPFR. */
static void draw_limbs(mpfr_ptr x, dp_rng *r) {
    const uint64_t far[] = {any(r, 6), any(r, 6), any(r, 6), 60 + any(r, 8), 188 + any(r, 10)};
    mp_limb_t *m = mpfr_custom_get_significand(x);
    for (int i = 0; i < 3; i++)
        m[i] = limb(r) | (i == 2 ? 1ull << 63 : 0);
    const int minus = any(r, 2) ? -1 : 1, odd = (int)any(r, 100);
    mpfr_custom_init_set(x, minus * MPFR_REGULAR_KIND, (mpfr_exp_t)far[any(r, 5)], 192, m);
    if (odd == 0) mpfr_set_zero(x, minus);
    if (odd == 1) mpfr_set_inf(x, minus);
    if (odd == 2) mpfr_set_nan(x);
    if (odd == 3) mpfr_mul_2si(x, x, (long)MP_THREE_MOST * minus, MPFR_RNDN);
}
static int is_mpfr(mpfr_srcptr a, mpfr_srcptr b) {
    if (mpfr_nan_p(a) || mpfr_nan_p(b)) return mpfr_nan_p(a) && mpfr_nan_p(b);
    return mpfr_equal_p(a, b) && !mpfr_signbit(a) == !mpfr_signbit(b);
}

/* A product, and a product added to or subtracted from a number, are MPFR's bit for bit, the sign
 * of zero too. The number may cancel all but the last bits. */
DP_TEST(elementary, three_limbs_are_mpfr) {
    mpfr_t a, b, c, want, p, tmp;
    dp_rng r;
    dp_rng_seed(&r, 23, 1);
    mpfr_inits2(192, a, b, c, want, p, tmp, (mpfr_ptr)0);
    for (int i = 0; i < 300000; i++) {
        draw_limbs(a, &r);
        draw_limbs(b, &r);
        draw_limbs(c, &r);
        mpfr_mul(p, a, b, MPFR_RNDN);
        if (!any(&r, 4)) mpfr_set(c, p, MPFR_RNDN);
        if (!any(&r, 2) && mpfr_regular_p(c))
            ((mp_limb_t *)mpfr_custom_get_significand(c))[0] ^= any(&r, 4);
        mpfr_set(want, c, MPFR_RNDN);
        if (i % 2) {
            mp_sub_product(c, a, b, tmp);
            mpfr_sub(want, want, p, MPFR_RNDN);
        } else {
            mp_add_product(c, a, b, tmp);
            mpfr_add(want, want, p, MPFR_RNDN);
        }
        mp_mul(tmp, a, b);
        if (is_mpfr(tmp, p) && is_mpfr(c, want)) continue;
        char text[400];
        mpfr_snprintf(text, sizeof text, "%Ra %Ra", a, b);
        CHECK(0, "%d: %s: another product or sum than MPFR's", i, text);
        break;
    }
    mpfr_clears(a, b, c, want, p, tmp, (mpfr_ptr)0);
}
