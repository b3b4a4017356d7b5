/* Rounding-error bounds of the causal convolution, and its MPFR truth with a radius from the same
 * derivation.
 *
 * Model. Without overflow every product, quotient and sum of the format satisfies
 *   fl(x op y) = (x op y)(1 + d) + z, |d| <= u,
 * with |z| <= eta for products and quotients that underflow and z = 0 for sums. gamma_n = n u / (1
 * - n u) holds for any order of summation, with or without FMA (Higham, Accuracy and Stability of
 * Numerical Algorithms, Lemma 3.1). Hats are computed values. Operands that the format cannot hold
 * are rounded first. The errors ex, ew, eb, ed of x, w, bias, dy are known (0 when they fit).
 *
 *   pre     W products and W additions, each term passes at most W + 1 roundings:
 *             |pre^ - pre| <= gamma_(W+1) (|b^| + sum |w^||x^|) + eb + sum (|w^| ex + ew |x|)
 *                             + 2 W eta                                                        =: P
 *   sigmoid computed in double from p^, then one rounding to the format:
 *             s^ = s(p^)(1 + t) + z, |t| <= es, |z| <= zs.
 *           exp within 1 ulp (2 u64 relative) gives 1 + exp within 2 u64, its rounding u64, the
 *           quotient u64: gamma_4(u64); when exp overflows or is subnormal, s or its error is below
 *           2^-1022.
 *           dp_exp errs by at most 1 ulp (ref/arithmetic/elementary.h; measured in
 *           test_elementary).
 *   y       |silu'| <= 1.1 (its maximum is 1.09984), |silu''| <= 1/2 (at 0). p^ lies within R of
 *           the anchor a (pre in double, error A), so |silu'| <= min(1.1, |silu'(a)| + R/2) between
 *           p and p^:
 *             |y^ - y| <= that * P + |p^| s(p^) ((1 + es)(1 + u) - 1) + |p^| zs (1 + u) + eta
 *   silu'   s (1 + p (1 - s)) operation by operation, with |1 - s| <= 1 and
 *           |1 + p (1 - s)| <= 1 + |p|; see slope_eval. Then moving from p^ to p costs P/2.
 *   dpre    |dpre^ - dpre| <= |dy^|(1 + u) (error of silu') + |silu'(p)| (|dy^| u + ed) + eta  =: E
 *   dx      W terms:
 *             sum |w^| E (1 + gamma_W) + gamma_W sum |w^||dpre| + sum ew |dpre| + 2 W eta.
 *           The halo adds no rounding beyond the W - 1 additions of the unsplit sum: it only
 *           regroups them (adding to 0 is exact).
 *   dw      L terms a rank in any order, then N partial sums in any order:
 *           a term passes at most n = 1 + (L - 1) + (N - 1) roundings:
 *             sum |x^| E (1 + gamma_n) + gamma_n sum |x^||dpre| + sum ex |dpre| + 2 T eta;
 *           dbias likewise with x = 1
 *   store   |value^| ust + eta_store, |value^| <= |value| + bound so far
 *
 * All terms are non-negative. Evaluating them in double loses at most a few hundred plus 2T
 * roundings; the result is multiplied by 1 + gamma of that. A bound that is not finite, or depends
 * on a NaN, is infinity.
 */
#include <assert.h>
#include <float.h>
#include <math.h>
#include <mpfr.h>
#include <stdlib.h>

#include "ref/arithmetic/elementary.h"
#include "ref/chunk/conv.h"
#include "ref/vocabulary/formats.h"

#define U64 0x1p-53
#define MAX_SLOPE 1.1

typedef struct {
    double u, eta, es, zs;
    int f32;
} rule;

static const double gamma4_u64 = 4 * U64 / (1 - 4 * U64) * (1 + 0x1p-50);

static rule rule_of(dp_base pol) {
    const double es32 = (1 + gamma4_u64) * (1 + 0x1p-24) - 1 + 0x1p-52;
    if (pol == DP_BASE_FP64) return (rule){U64, DBL_TRUE_MIN, gamma4_u64, DBL_MIN, 0};
    return (rule){0x1p-24, FLT_TRUE_MIN, es32, FLT_TRUE_MIN, 1};
}

/* exp (2 u), the sum and the quotient (u each) in fp32: gamma_4(u). Where exp overflows, s is 0 and
 * was below 2^-126. */
static rule rule_sigmoid32(dp_base pol) {
    rule r = rule_of(pol);
    r.es = 4 * 0x1p-24 / (1 - 4 * 0x1p-24) * (1 + 0x1p-50);
    r.zs = FLT_MIN;
    return r;
}

/* MPFR's exponent range makes underflow irrelevant beside DBL_TRUE_MIN; exp, 1 + exp and the
 * quotient are correctly rounded. */
static rule rule_mpfr(int prec) {
    const double u = ldexp(1, -(prec < 1000 ? prec : 1000));
    return (rule){u, DBL_TRUE_MIN, dp_gamma(4, u), DBL_TRUE_MIN, 0};
}

/* An operand as the format sees it: largest magnitude, and error of rounding it. */
typedef struct {
    double mag, err;
} operand;

static operand op(const rule *r, double x) {
    const double f = r->f32 ? (double)(float)x : x;
    return (operand){fmax(fabs(x), fabs(f)), x == f ? 0 : fabs(x - f)};
}

typedef struct {
    double anchor, anchor_err, err;
} pre_bound;

static pre_bound pre_at(const dp_conv *c, const rule *r, int64_t lo, int64_t t, int d) {
    const operand b = op(r, c->bias ? c->bias[d] : 0);
    double a = c->bias ? c->bias[d] : 0, sum = b.mag, lost = b.err;
    for (int j = 0; j < c->W; j++) {
        const int64_t from = t - (c->W - 1) + j;
        if (from < lo) continue;
        const double wj = c->w[d * c->W + j], xf = c->x[from * c->D + d];
        const operand w = op(r, wj), x = op(r, xf);
        a += wj * xf;
        sum += w.mag * x.mag;
        lost += w.mag * x.err + w.err * x.mag;
    }
    return (pre_bound){a, dp_gamma(c->W + 1, U64) * sum + 2 * c->W * DBL_TRUE_MIN,
                       dp_gamma(c->W + 1, r->u) * sum + lost + 2 * c->W * r->eta};
}

/* |computed silu'(p) - silu'(p)| for |p| <= pm, sigmoid(p) <= sm */
static double slope_eval(const rule *r, double pm, double sm) {
    const double u = r->u;
    const double e1 = (sm * r->es + r->zs) * (1 + u) + u;  /* 1 - s */
    const double e2 = pm * e1 * (1 + u) + pm * u + r->eta; /* p (1 - s) */
    const double e3 = e2 * (1 + u) + (1 + pm) * u;         /* 1 + p (1 - s) */
    const double es = sm * ((1 + r->es) * (1 + u) - 1) + r->zs * (1 + u);
    return (sm * (1 + r->es) + r->zs) * (1 + u) * e3 + (1 + pm) * es + r->eta;
}

/* y_err; slope_mag >= |silu'(p)|; slope_err >= |computed silu' - silu'(p)| */
typedef struct {
    double y_err, slope_mag, slope_err;
} act_bound;

static act_bound act_at(const rule *r, int silu, pre_bound p) {
    if (!silu) return (act_bound){p.err, 1, 0};
    const rule fp64 = rule_of(DP_BASE_FP64);
    const double R = p.anchor_err + p.err, pm = fabs(p.anchor) + R;
    const double s = 1 / (1 + dp_exp(-p.anchor)), sm = fmin(1, s * (1 + 0x1p-50) + DBL_MIN + R / 4);
    const double slope = fabs(s * (1 + p.anchor * (1 - s))) + slope_eval(&fp64, pm, sm);
    const double eval = pm * sm * ((1 + r->es) * (1 + r->u) - 1) + pm * r->zs * (1 + r->u) + r->eta;
    return (act_bound){fmin(MAX_SLOPE, slope + R / 2) * p.err + eval,
                       fmin(MAX_SLOPE, slope + p.anchor_err / 2),
                       slope_eval(r, pm, sm) + p.err / 2};
}

/* Outputs and dpre of one channel. mag, err [T]: |dpre| and its error. */
static void bound_outputs(const dp_conv *c, const rule *r, int d, double *mag, double *err,
                          dp_conv_result *b) {
    for (int q = 0; q < c->Nseq; q++)
        for (int64_t t = c->cu[q]; t < c->cu[q + 1]; t++) {
            const act_bound a = act_at(r, c->silu, pre_at(c, r, c->cu[q], t, d));
            b->y[t * c->D + d] = a.y_err;
            if (!c->dy) continue;
            const operand dy = op(r, c->dy[t * c->D + d]);
            mag[t] = dy.mag * a.slope_mag;
            err[t] = c->silu ? dy.mag * (1 + r->u) * a.slope_err +
                                   a.slope_mag * (dy.mag * r->u + dy.err) + r->eta
                             : dy.err;
        }
}

static double bound_dx(const dp_conv *c, const rule *r, int64_t i, int64_t end, int d,
                       const double *mag, const double *err) {
    const double g = dp_gamma(c->W, r->u);
    double b = 2 * c->W * r->eta;
    for (int j = 0; j < c->W; j++) {
        const int64_t t = i + c->W - 1 - j;
        if (t >= end) continue;
        const operand w = op(r, c->w[d * c->W + j]);
        b += w.mag * err[t] * (1 + g) + (g * w.mag + w.err) * mag[t];
    }
    return b;
}

static double bound_dw(const dp_conv *c, const rule *r, int n, int d, int j, const double *mag,
                       const double *err) {
    const double g = dp_gamma(n, r->u);
    double b = 2 * (double)c->T * r->eta;
    for (int q = 0; q < c->Nseq; q++)
        for (int64_t t = c->cu[q] + c->W - 1 - j; t < c->cu[q + 1]; t++) {
            const operand x = op(r, c->x[(t - (c->W - 1) + j) * c->D + d]);
            b += x.mag * err[t] * (1 + g) + (g * x.mag + x.err) * mag[t];
        }
    return b;
}

static void bound_channel(const dp_conv *c, const rule *r, int n, int d, dp_conv_result *b) {
    DP_OWN double *mag = dp_doubles(c->T), *err = dp_doubles(c->T);
    bound_outputs(c, r, d, mag, err, b);
    if (c->dy) {
        for (int q = 0; q < c->Nseq; q++)
            for (int64_t i = c->cu[q]; i < c->cu[q + 1]; i++)
                b->dx[i * c->D + d] = bound_dx(c, r, i, c->cu[q + 1], d, mag, err);
        for (int j = 0; j < c->W; j++)
            b->dw[d * c->W + j] = bound_dw(c, r, n, d, j, mag, err);
        if (c->bias) {
            const double g = dp_gamma(n, r->u);
            b->dbias[d] = 0;
            for (int64_t t = 0; t < c->T; t++)
                b->dbias[d] += err[t] * (1 + g) + g * mag[t];
        }
    }
}

/* Everything but the store. n: roundings that a term of dw passes. */
static void bound_arithmetic(const dp_conv *c, const rule *r, int64_t n, dp_conv_result *b) {
    assert(n <= c->T && c->T <= INT32_MAX / 4);
#pragma omp parallel for schedule(static)
    for (int d = 0; d < c->D; d++)
        bound_channel(c, r, (int)n, d, b);
}

/* b <- (b + ust |v| + eta) upward, v may be NULL (no store). |v| >= |the computed value before its
 * store|, less b. */
static void finish(double *b, const double *v, int64_t n, int64_t T, double ust, double eta) {
    const double up = 1 + dp_gamma((int)(2 * T) + 400, U64);
    for (int64_t i = 0; b && i < n; i++) {
        if (v) b[i] += ust * (fabs(v[i]) + b[i]) + eta;
        b[i] *= up;
        if (!(b[i] < INFINITY)) b[i] = INFINITY;
    }
}

static void finish_all(const dp_conv *c, dp_conv_result *b, const dp_conv_result *v, int all,
                       double ust, double eta) {
    const int64_t n = c->T * c->D;
    finish(b->y, v ? v->y : NULL, n, c->T, ust, eta);
    finish(b->dx, v ? v->dx : NULL, n, c->T, ust, eta);
    finish(b->dw, v && all ? v->dw : NULL, (int64_t)c->D * c->W, c->T, ust, eta);
    finish(b->dbias, v && all ? v->dbias : NULL, c->D, c->T, ust, eta);
}

/* Upper bounds of |y| and |dx|: the fp64 result and its own bound. */
static void magnitudes(const dp_conv *c, dp_conv_result *v) {
    const rule fp64 = rule_of(DP_BASE_FP64);
    DP_FREED(dp_conv_result_free) dp_conv_result b;
    dp_conv_result_alloc(&b, c);
    dp_conv_result_alloc(v, c);
    dp_conv_run(c, v);
    bound_arithmetic(c, &fp64, c->T, &b);
    finish_all(c, &b, NULL, 0, 0, 0);
    for (int64_t i = 0; i < c->T * c->D; i++) {
        v->y[i] = fabs(v->y[i]) + b.y[i];
        if (c->dy) v->dx[i] = fabs(v->dx[i]) + b.dx[i];
    }
}

static void bound_of(const dp_conv *c, dp_base pol, rule r, int N, dp_conv_result *bound) {
    int64_t most = 0; /* tokens of one part */
    for (int i = 0; i < N; i++) {
        const int64_t n =
            dp_own_cut(c->own.kind, c->T, N, i + 1) - dp_own_cut(c->own.kind, c->T, N, i);
        most = n > most ? n : most;
    }
    assert(N >= 1 && (c->own.kind || c->T % N == 0));
    bound_arithmetic(c, &r, most + N - 1, bound);
    if (pol != DP_BASE_BF16) {
        finish_all(c, bound, NULL, 0, 0, 0);
        return;
    }
    DP_FREED(dp_conv_result_free) dp_conv_result v;
    magnitudes(c, &v);
    finish_all(c, bound, &v, 0, 0x1p-8, 0x1p-133);
}

void dp_conv_bound(const dp_conv *c, dp_base pol, int N, dp_conv_result *bound) {
    bound_of(c, pol, rule_of(pol), N, bound);
}

void dp_conv_bound_sigmoid32(const dp_conv *c, dp_base pol, int N, dp_conv_result *bound) {
    assert(pol != DP_BASE_FP64);
    bound_of(c, pol, rule_sigmoid32(pol), N, bound);
}

/* ---- truth --------------------------------------------------------------------------------------
 * The formulas of math.md h, every operation correctly rounded to prec bits, one channel at a
 * time. */

typedef struct {
    const dp_conv *c;
    dp_conv_result *out;
    mpfr_t x, t, p, s, sum; /* x: 53 bits, holds any double exactly */
    mpfr_t *dpre;           /* [T], at least 53 bits: without silu it is dy, exactly */
} channel;

static void add_product(channel *k, double a, double b) {
    mpfr_set_d(k->x, a, MPFR_RNDN);
    mpfr_mul_d(k->t, k->x, b, MPFR_RNDN);
    mpfr_add(k->sum, k->sum, k->t, MPFR_RNDN);
}

/* p <- pre_t */
static void truth_pre(channel *k, int64_t lo, int64_t t, int d) {
    const dp_conv *c = k->c;
    mpfr_set_zero(k->sum, 1);
    for (int j = 0; j < c->W; j++) {
        const int64_t from = t - (c->W - 1) + j;
        if (from >= lo) add_product(k, c->w[d * c->W + j], c->x[from * c->D + d]);
    }
    mpfr_add_d(k->p, k->sum, c->bias ? c->bias[d] : 0, MPFR_RNDN);
}

/* y_t and dpre_t from p */
static void truth_output(channel *k, int64_t t, int d) {
    const dp_conv *c = k->c;
    const int64_t at = t * c->D + d;
    if (c->silu) {
        mpfr_neg(k->s, k->p, MPFR_RNDN);
        mpfr_exp(k->s, k->s, MPFR_RNDN);
        mpfr_add_ui(k->s, k->s, 1, MPFR_RNDN);
        mpfr_ui_div(k->s, 1, k->s, MPFR_RNDN);
        mpfr_mul(k->t, k->p, k->s, MPFR_RNDN);
    }
    k->out->y[at] = mpfr_get_d(c->silu ? k->t : k->p, MPFR_RNDN);
    if (!c->dy) return;
    if (c->silu) {
        mpfr_ui_sub(k->t, 1, k->s, MPFR_RNDN);
        mpfr_mul(k->t, k->t, k->p, MPFR_RNDN);
        mpfr_add_ui(k->t, k->t, 1, MPFR_RNDN);
        mpfr_mul(k->t, k->t, k->s, MPFR_RNDN);
        mpfr_mul_d(k->dpre[t], k->t, c->dy[at], MPFR_RNDN);
    } else {
        mpfr_set_d(k->dpre[t], c->dy[at], MPFR_RNDN);
    }
}

static void truth_dx(channel *k, int64_t i, int64_t end, int d) {
    const dp_conv *c = k->c;
    mpfr_set_zero(k->sum, 1);
    for (int j = 0; j < c->W; j++) {
        const int64_t t = i + c->W - 1 - j;
        if (t >= end) continue;
        mpfr_mul_d(k->t, k->dpre[t], c->w[d * c->W + j], MPFR_RNDN);
        mpfr_add(k->sum, k->sum, k->t, MPFR_RNDN);
    }
    k->out->dx[i * c->D + d] = mpfr_get_d(k->sum, MPFR_RNDN);
}

static void truth_dw(channel *k, int d, int j) {
    const dp_conv *c = k->c;
    mpfr_set_zero(k->sum, 1);
    for (int q = 0; q < c->Nseq; q++)
        for (int64_t t = c->cu[q] + c->W - 1 - j; t < c->cu[q + 1]; t++) {
            mpfr_mul_d(k->t, k->dpre[t], c->x[(t - (c->W - 1) + j) * c->D + d], MPFR_RNDN);
            mpfr_add(k->sum, k->sum, k->t, MPFR_RNDN);
        }
    k->out->dw[d * c->W + j] = mpfr_get_d(k->sum, MPFR_RNDN);
}

static void truth_dbias(channel *k, int d) {
    mpfr_set_zero(k->sum, 1);
    for (int64_t t = 0; t < k->c->T; t++)
        mpfr_add(k->sum, k->sum, k->dpre[t], MPFR_RNDN);
    k->out->dbias[d] = mpfr_get_d(k->sum, MPFR_RNDN);
}

static void truth_channel(channel *k, int d) {
    const dp_conv *c = k->c;
    for (int q = 0; q < c->Nseq; q++)
        for (int64_t t = c->cu[q]; t < c->cu[q + 1]; t++) {
            truth_pre(k, c->cu[q], t, d);
            truth_output(k, t, d);
        }
    if (!c->dy) return;
    for (int q = 0; q < c->Nseq; q++)
        for (int64_t i = c->cu[q]; i < c->cu[q + 1]; i++)
            truth_dx(k, i, c->cu[q + 1], d);
    for (int j = 0; j < c->W; j++)
        truth_dw(k, d, j);
    if (c->bias) truth_dbias(k, d);
}

static void channel_open(channel *k, const dp_conv *c, int prec, dp_conv_result *out) {
    k->c = c;
    k->out = out;
    mpfr_init2(k->x, 53);
    mpfr_inits2(prec, k->t, k->p, k->s, k->sum, (mpfr_ptr)0);
    k->dpre = dp_calloc((size_t)c->T, sizeof *k->dpre);
    for (int64_t t = 0; t < c->T; t++)
        mpfr_init2(k->dpre[t], prec < 53 ? 53 : prec);
}

static void channel_close(channel *k) {
    mpfr_clears(k->x, k->t, k->p, k->s, k->sum, (mpfr_ptr)0);
    for (int64_t t = 0; t < k->c->T; t++)
        mpfr_clear(k->dpre[t]);
    free(k->dpre);
    mpfr_free_cache();
}

/* The last rounding errs by at most 2^-53 |v^| for the value v^ before it; |v^| <= |v| / (1 -
 * 2^-53), hence 2^-53 (1 + 2^-52). */
void dp_conv_truth(const dp_conv *c, int prec, dp_conv_result *r, dp_conv_result *radius) {
    assert(prec >= 2);
#pragma omp parallel
    {
        channel k;
        channel_open(&k, c, prec, r);
#pragma omp for schedule(dynamic)
        for (int d = 0; d < c->D; d++)
            truth_channel(&k, d);
        channel_close(&k);
    }
    const rule m = rule_mpfr(prec);
    bound_arithmetic(c, &m, c->T, radius);
    finish_all(c, radius, r, 1, U64 * (1 + 0x1p-52), DBL_TRUE_MIN);
}
