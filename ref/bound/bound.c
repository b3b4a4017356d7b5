/* Roundings, norms, and sums of errors: what every bound is made of (bound.h). */
#include "bound_parts.h"

#include <math.h>

/* Conventions. Dx is the p-th power of a bound of |computed x - exact x|, entrywise, first order;
 * ax = |x|, px = |x|^p. Independent errors add in Dx: with p = 1 that is the triangle inequality,
 * with p = 2 the sum of squares of mean-independent errors (bound.h). A number's few relative
 * errors are added before the power is taken (an overestimate for p = 2).
 *
 * sum_error(n) is the error of a sum of n products relative to the sum of absolute values. It
 * multiplies |A||B| and is then raised to p. Operand roundings differ from entry to entry and
 * multiply |A|^p|B|^p. If an operand is stored in its short format, its rounding is part of its own
 * Dx. Operand terms with uo then count it once more, which is within a factor 2. */

dp_rounding dp_rounding_of(dp_base b, int p) {
    dp_rounding r = {.u = 0x1p-53, .tiny = 0x1p-1022, .p = p};
    if (b != DP_BASE_FP64) {
        r.u = 0x1p-24;
        r.tiny = 0x1p-126;
    }
    if (b == DP_BASE_BF16) {
        r.us = r.uo = 0x1p-8;
        r.inverse = 1;
    }
    return r;
}

dp_rounding dp_rounding_of_design(const dp_design *d, int p) {
    dp_rounding r = dp_rounding_of(d->base, p);
    if (d->decays != DP_FP32 && d->decays != DP_FP64) r.decay = dp_formats[d->decays].u_op;
    if (d->gated == DP_SCORES_TF32) r.uo = fmax(r.uo, dp_formats[DP_TF32].u_op);
    if (d->gated) r.pair = 2 * (r.uo + r.decay) * (1 + 0x1p-6);
    if (d->gated == DP_SCORES_FACTORED) { /* an exp and a product more in each: 3 u, once over */
        r.pair += 6 * r.u;
        r.key += 6 * r.u;
    }
    if (d->stored_inputs) r.input = r.us;
    if (d->scored) r.key += (r.us + r.decay) * (1 + 0x1p-6);
    return r;
}

int64_t dp_state_error_size(const dp_rounding *r, int K, int V) {
    return r->p == 1 ? V : 2 * (int64_t)K * V + (int64_t)K * K;
}
int64_t dp_chain_error_size(const dp_rounding *r, int K) {
    return r->p == 1 ? 1 : 2 * (int64_t)K * K;
}

/* The larger of what n entries and the covariance behind them say; NAN where either is no number
 * (an error that is relative to 0). */
static double norm_of_both(const dp_rounding *r, const double *D, int64_t n, int K) {
    double trace = 0;
    for (int x = 0; x < K; x++)
        trace += D[n + (int64_t)x * K + x];
    const double of_entries = dp_error_fro(r, D, n);
    if (isnan(of_entries) || isnan(trace)) return NAN;
    return fmax(of_entries, DP_LAMBDA * sqrt(fmax(0, trace)));
}

double dp_state_error_norm(const dp_rounding *r, int K, int V, const double *e) {
    return r->p == 1 ? dp_error_fro(r, e, V) : norm_of_both(r, e, 2 * (int64_t)K * V, K);
}

double dp_chain_error_norm(const dp_rounding *r, int K, const double *b) {
    return r->p == 1 ? dp_error_fro(r, b, 1) : norm_of_both(r, b, (int64_t)K * K, K);
}

double dp_error_fro(const dp_rounding *r, const double *D, int64_t n) {
    return dp_bound_final(r, dp_bound_error_norm(r, D, n));
}

double dp_sum_error(const dp_rounding *r, int n) {
    return r->p == 1 ? dp_gamma(n, r->u) : sqrt(n / 3.0 + 1) * r->u;
}

/* ---- small tools ----------------------------------------------------------------------------- */

double dp_bound_root(const dp_rounding *r, double x) { return r->p == 2 ? sqrt(x) : x; }

double *dp_bound_absof(const double *x, int64_t n) {
    double *y = dp_doubles(n);
    for (int64_t i = 0; i < n; i++)
        y[i] = fabs(x[i]);
    return y;
}

double *dp_bound_pwof(const dp_rounding *r, const double *x, int64_t n) {
    double *y = dp_doubles(n);
    for (int64_t i = 0; i < n; i++)
        y[i] = dp_pw(r, x[i]);
    return y;
}

void dp_bound_addmm(double a, int ta, int tb, int m, int n, int k, const double *A, const double *B,
                    double *C) {
    dp_add_mul_f64((dp_shape){ta, tb, m, n, k}, a, A, B, C);
}

double *dp_bound_product(int ta, int tb, int m, int n, int k, const double *A, const double *B) {
    double *C = dp_doubles((int64_t)m * n);
    dp_bound_addmm(1, ta, tb, m, n, k, A, B, C);
    return C;
}

void dp_bound_add_scaled(const dp_rounding *r, double a, const double *x, int64_t n, double *D) {
    for (int64_t i = 0; i < n; i++)
        D[i] += dp_pw(r, a * x[i]);
}

void dp_bound_add_sum(const dp_rounding *r, double a, int ta, int tb, int m, int n, int k,
                      const double *aA, const double *aB, double *D) {
    DP_OWN double *S = dp_bound_product(ta, tb, m, n, k, aA, aB);
    dp_bound_add_scaled(r, a, S, (int64_t)m * n, D);
}

void dp_bound_add_product(const dp_rounding *r, double by, dp_shape s, const double *A,
                          const double *DA, const double *B, const double *DB, double uo,
                          double sum, double *D) {
    const int64_t nA = (int64_t)s.m * s.k, nB = (int64_t)s.k * s.n;
    DP_OWN double *aA = dp_bound_absof(A, nA), *pA = dp_bound_pwof(r, A, nA),
                  *aB = dp_bound_absof(B, nB), *pB = dp_bound_pwof(r, B, nB);
    const double each = dp_pw(r, by);
    if (DA) dp_add_mul_f64(s, each, DA, pB, D);
    if (DB) dp_add_mul_f64(s, each, pA, DB, D);
    if (uo >= 0) dp_add_mul_f64(s, each * dp_pw(r, uo), pA, pB, D);
    dp_bound_add_sum(r, fabs(by) * sum, s.ta, s.tb, s.m, s.n, s.k, aA, aB, D);
}

void dp_bound_add_const(double a, int64_t n, double *D) {
    for (int64_t i = 0; i < n; i++)
        D[i] += a;
}

double dp_bound_norm2(const double *x, int n) { return sqrt(dp_squares(x, n)); }

double dp_bound_column_norm(const double *A, int m, int n, int j) {
    double s = 0;
    for (int i = 0; i < m; i++)
        s += A[(int64_t)i * n + j] * A[(int64_t)i * n + j];
    return sqrt(s);
}

double dp_bound_error_norm(const dp_rounding *r, const double *D, int64_t n) {
    double s = 0;
    for (int64_t i = 0; i < n; i++)
        s += r->p == 2 ? D[i] : D[i] * D[i];
    return r->p == 2 ? s : sqrt(s);
}
