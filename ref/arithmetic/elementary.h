/* ref/arithmetic/elementary.h - exp, log and their like with the same bits on every machine.
 *
 * They are built from + - * / sqrt, each one IEEE operation, and integer operations on encodings;
 * no table, no libm, no fused operation. A libm chooses among its versions by the CPU (glibc: with
 * and without FMA), whose last bits differ.
 *
 * Guarantees (proofs beside the code, measured against MPFR by harness/tests/test_elementary.c):
 *   double    at most 1 ulp from the exact value; subnormal results too (ulp 2^-1074)
 *   float     at most 0.501 ulp: computed in double, rounded once
 * Special values are those of C (Annex F): NaN stays NaN, exp(-inf) = 0, exp(inf) = inf, log(0) =
 * -inf, log(x < 0) = NaN. Likewise log1p(-1) = -inf, log1p(-0) = -0, cbrt(-x) = -cbrt(x),
 * hypot(inf, NaN) = inf. The value of errno and the floating-point flags mean nothing.
 */
#pragma once

/* Each within the guarantees above. */
double dp_exp(double x);
double dp_log(double x);
double dp_log1p(double x);
double dp_log2(double x); /* exact for powers of two */
/* The real cube root, of either sign. */
double dp_cbrt(double x);
double dp_hypot(double x, double y); /* no intermediate overflow nor underflow */
/* The same in float: computed in double, rounded once. */
float dp_expf(float x);
/* cos and sin of x, |x| up to 2^20, each within 2^-51. */
void dp_cos_sin(double x, double y[2]);
void dp_exp_row(int n, const double *x, double *y); /* y_i = dp_exp(x_i); y may be x */
/* y_i = dp_log1p(x_i), 0 <= x_i <= 1; y may be x */
void dp_log1p_row(int n, const double *x, double *y);
/* log(1 + x) in float, as dp_expf. */
float dp_log1pf(float x);
