/* ref/arithmetic/norms.h - norms of matrices A [m][n] of doubles, with the same bits everywhere. */
#pragma once
#include <stdint.h>

/* Norm of n numbers, none of whose squares overflows or is lost. If one is not finite: that
 * number's size. */
double dp_norm_fro(int64_t n, const double *A);
/* |x|_2 of n numbers, rounded up. */
double dp_norm_up(int64_t n, const double *x);
/* The same of each row of `width`, to be freed: from bounds of entries those of rows. */
double *dp_norms_up(const double *x, int64_t rows, int width);
/* max |x_i| of n numbers; 0 of none, and NaN counts as 0 */
double dp_norm_max(int64_t n, const double *x);
/* Upper bound of the spectral norm, proven (spectral.h): at most 2 (n + 2)^2 2^-52
 * and 2 m 2^-52 |A|_F^2 / |A|_2^2 above it, relatively. */
double dp_norm2_up(int m, int n, const double *A);
/* sqrt(|A|_1 |A|_inf) >= | |A| |_2 */
double dp_norm_abs2_up(int m, int n, const double *A);
