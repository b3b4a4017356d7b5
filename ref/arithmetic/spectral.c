/* An upper bound of the largest eigenvalue (ref/arithmetic/spectral.h).
 *
 * Proof. Let B = fl(c I - G), off-diagonal entries exact. If Cholesky's algorithm completes on B,
 * then R'R = B + E with |E| <= gamma_(n+1) |R'||R|. The order of the sums is free (Higham, Accuracy
 * and Stability, Theorem 10.3). The 2-norm of |R'||R| is at most |R|_F^2 = tr(R'R), and (R'R)_ii <=
 * b_ii / (1 - gamma_(n+1)). Let x be a unit eigenvector of lambda. Then (Rump, BIT 46 (2006), 433)
 *
 *     0 <= x'R'R x <= x'B x + gamma_(n+1) / (1 - gamma_(n+1)) tr B
 *     x'B x <= c - lambda + u max |b_ii|
 *     lambda <= c + gamma_(n+2) / (1 - gamma_(n+2)) tr B
 *
 * The last gamma covers the rounding of the diagonal, too. G is scaled by a power of two so that
 * its largest entry is in [1/2, 1). Underflow is then below n^2 2^-1000 in all, which is added. The
 * bound itself is rounded upward by 1 + 2^-50. How c was found plays no part in the proof. */
#include "spectral.h"
#include "isa.h"
#include "ref/vocabulary/formats.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define DP_ISA_BODY "ref/arithmetic/spectral_body.inc"
#include "isa_each.inc"

/* Are all eigenvalues of the tridiagonal matrix (d, e) below x? Signs of the pivots of its LDL'
 * (Sturm). */
static int all_below(int n, const double *d, const double *e, double x) {
    double pivot = 1;
    for (int i = 0; i < n; i++) {
        pivot = d[i] - x - (i ? e[i - 1] * e[i - 1] / pivot : 0);
        if (!(pivot < 0)) return 0;
    }
    return 1;
}

static double row_sum_max(int n, const double *G) {
    double top = 0;
    for (int i = 0; i < n; i++) {
        double s = 0;
        for (int j = 0; j < n; j++)
            s += fabs(G[(int64_t)i * n + j]);
        top = fmax(top, s);
    }
    return top;
}

/* The largest eigenvalue to about n 2^-53 of the largest entry's size; A is destroyed. */
static double estimate(int n, double *A, double top) {
    DP_OWN double *d = dp_doubles(4 * (int64_t)n);
    double *e = d + n, low = -top, high = top;
    DP_ISA_OF(tridiagonal)(n, A, d, e, e + n);
    for (int i = 0; i < 80 && high - low > 0x1p-53 * top; i++) {
        const double x = 0.5 * (low + high);
        if (all_below(n, d, e, x))
            high = x;
        else
            low = x;
    }
    return high;
}

/* lambda <= the result if c I - G is positive definite to the eyes of Cholesky, else infinity. */
static double proven(int n, const double *G, double c, double *B) {
    const double g = dp_gamma(n + 2, 0x1p-53);
    double trace = 0;
    for (int64_t i = 0; i < (int64_t)n * n; i++)
        B[i] = -G[i];
    for (int i = 0; i < n; i++) {
        B[(int64_t)i * n + i] = c - G[(int64_t)i * n + i];
        trace += B[(int64_t)i * n + i];
    }
    if (!DP_ISA_OF(positive)(n, B)) return INFINITY;
    return (c + g / (1 - g) * trace * (1 + n * 0x1p-50) + n * (double)n * 0x1p-1000) *
           (1 + 0x1p-50);
}

double dp_eigenvalue_up(int n, const double *G) {
    double most = 0;
    int exponent;
    for (int64_t i = 0; i < (int64_t)n * n; i++) {
        if (!isfinite(G[i])) return INFINITY;
        most = fmax(most, fabs(G[i]));
    }
    if (most == 0) return 0;
    frexp(most, &exponent);
    DP_OWN double *S = dp_doubles(2 * (int64_t)n * n);
    double *B = S + (int64_t)n * n, up = INFINITY;
    for (int64_t i = 0; i < (int64_t)n * n; i++)
        S[i] = ldexp(G[i], -exponent);
    memcpy(B, S, sizeof *B * (size_t)n * (size_t)n);
    const double top = row_sum_max(n, S) * (1 + n * 0x1p-52), guess = estimate(n, B, top);
    /* NOLINTNEXTLINE(cert-flp30-c): powers of 2 */
    for (double slack = (n + 2) * 0x1p-52; isinf(up) && slack < 1; slack *= 4)
        up = proven(n, S, fabs(guess) * (1 + slack) + (n + 2) * 0x1p-60, B);
    return ldexp(fmin(up, top), exponent);
}
