/* harness/verdict/quantile.h - quantiles of Fisher's F distribution, for limits of the expected
 * tier.
 *
 * A mean of `top` squares of a normal variable over a mean of `bottom` others follows F(top,
 * bottom). With bottom infinite it is chi squared over its degrees of freedom; with top = 1 the
 * square of Student's t. Degrees of freedom may be any positive real numbers.
 */
#ifndef DP_QUANTILE_H
#define DP_QUANTILE_H
#ifdef __cplusplus
extern "C" {
#endif

/* P(F > x) for x >= 0, to about 1e-10 relative. */
double dp_f_tail(double x, double top, double bottom);

/* The x with P(F > x) = p, 1e-300 < p < 1, to 1e-9 relative; INFINITY when no x below 1e30 has it.
 */
double dp_f_quantile(double p, double top, double bottom);

#ifdef __cplusplus
}
#endif
#endif
