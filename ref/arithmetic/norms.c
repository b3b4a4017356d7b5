/* Norms of matrices, and proven upper bounds of them (norms.h). */
#include "norms.h"
#include "product.h"
#include "ref/vocabulary/formats.h"
#include "ref/vocabulary/problem.h"
#include "spectral.h"

#include <math.h>

double dp_norm_fro(int64_t n, const double *A) {
    double scale = 0, s = 0;
    for (int64_t i = 0; i < n; i++) {
        if (!isfinite(A[i])) return fabs(A[i]);
        scale = fmax(scale, fabs(A[i]));
    }
    if (scale == 0) return 0;
    for (int64_t i = 0; i < n; i++)
        s += (A[i] / scale) * (A[i] / scale);
    return scale * sqrt(s);
}

double dp_norm_up(int64_t n, const double *x) {
    return sqrt(dp_squares(x, n)) * (1 + (double)(n + 4) * 0x1p-52);
}

double *dp_norms_up(const double *x, int64_t rows, int width) {
    double *n = dp_doubles(rows);
    for (int64_t r = 0; r < rows; r++)
        n[r] = dp_norm_up(width, x + r * width);
    return n;
}

double dp_norm_max(int64_t n, const double *x) {
    double most = 0;
    for (int64_t i = 0; i < n; i++)
        most = fmax(most, fabs(x[i]));
    return most;
}

double dp_norm_abs2_up(int m, int n, const double *A) {
    DP_OWN double *col = dp_doubles(n);
    double inf = 0, one = 0;
    for (int i = 0; i < m; i++) {
        double s = 0;
        for (int j = 0; j < n; j++) {
            s += fabs(A[(int64_t)i * n + j]);
            col[j] += fabs(A[(int64_t)i * n + j]);
        }
        inf = fmax(inf, s);
    }
    for (int j = 0; j < n; j++)
        one = fmax(one, col[j]);
    return sqrt(inf * one) * (1 + 0x1p-40);
}

/* |A|_2^2 is the largest eigenvalue of A'A. The computed G is within gamma_m |A|'|A| of it, whose
 * 2-norm is |A|_F^2 at most. A is scaled by a power of two to |A|_F about 1: nothing that counts
 * underflows in the square. */
double dp_norm2_up(int m, int n, const double *A) {
    const double f = dp_norm_fro((int64_t)m * n, A);
    if (!isfinite(f) || f == 0) return f;
    int exponent;
    frexp(f, &exponent);
    DP_OWN double *As = dp_copy(A, (int64_t)m * n), *G = dp_doubles((int64_t)n * n);
    for (int64_t i = 0; i < (int64_t)m * n; i++)
        As[i] = ldexp(As[i], -exponent);
    dp_mul_f64((dp_shape){1, 0, n, n, m}, As, As, G);
    const double fro2 =
        ldexp(f, -exponent) * ldexp(f, -exponent) * (1 + 2 * dp_gamma(m * n + 8, 0x1p-53));
    const double top = fmin(fro2, dp_eigenvalue_up(n, G) + dp_gamma(m + 2, 0x1p-53) * fro2);
    return ldexp(sqrt(top) * (1 + 0x1p-48), exponent);
}
