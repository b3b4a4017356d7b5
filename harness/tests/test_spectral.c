/* ref/spectral: never below what LAPACK's eigenvector proves, never far above it, the same bits on
 * every instruction set. */
#include "gt.h"
#include "ref/arithmetic/isa.h"
#include "ref/arithmetic/product.h"
#include "ref/arithmetic/spectral.h"
#include "ref/inputs/inputs.h"

#include <lapacke.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

typedef enum { RANDOM, NEAR_IDENTITY, RANK_ONE, CLUSTERED, GRADED, NKINDS } kind;

/* G = A'A in fp64, symmetric to the bit. */
static double *gram(dp_rng *r, kind what, int n, double scale) {
    double *A = dp_doubles((int64_t)n * n), *G = dp_doubles((int64_t)n * n);
    for (int i = 0; i < n; i++)
        for (int j = 0; j < n; j++) {
            const double x = dp_rng_normal(r), one = i == j;
            const double a[NKINDS] = {x, one + 1e-9 * x, i ? 0 : x,
                                      one * (i < n / 2 ? 1 : 0.5) + 1e-3 * x,
                                      one * ldexp(1, -i) + 1e-12 * x};
            A[(int64_t)i * n + j] = scale * a[what];
        }
    dp_mul_f64((dp_shape){1, 0, n, n, n}, A, A, G);
    free(A);
    return G;
}

/* x'G x / x'x in long double for the eigenvector that LAPACK finds: no eigenvalue bound may lie
 * below it. */
static long double rayleigh(int n, const double *G) {
    double *V = dp_copy(G, (int64_t)n * n), *w = dp_doubles(n);
    LAPACKE_dsyev(LAPACK_ROW_MAJOR, 'V', 'U', n, V, n, w);
    long double top = 0, norm = 0;
    for (int i = 0; i < n; i++) {
        long double s = 0;
        for (int j = 0; j < n; j++)
            s += (long double)G[(int64_t)i * n + j] * V[(int64_t)j * n + n - 1];
        top += s * V[(int64_t)i * n + n - 1];
        norm += (long double)V[(int64_t)i * n + n - 1] * V[(int64_t)i * n + n - 1];
    }
    free(V);
    free(w);
    return top / norm;
}

DP_TEST(spectral, bounds_lapacks_largest_eigenvalue_from_just_above) {
    static const int sizes[] = {1, 2, 3, 5, 8, 16, 31, 64, 128};
    static const double scales[] = {1, 0x1p-300, 0x1p300};
    dp_rng r;
    double worst = 0;
    dp_rng_seed(&r, 31, 1);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int what = 0; what < NKINDS; what++)
            for (int s = 0; s < 3; s++) {
                const int n = sizes[i];
                double *G = gram(&r, what, n, scales[s]);
                const double up = dp_eigenvalue_up(n, G);
                const long double low = rayleigh(n, G);
                const double over = (double)((up - low) / low),
                             allowed = 4 * (n + 2.0) * (n + 2) * 0x1p-52;
                CHECK(up >= low, "n %d, kind %d, scale %g: bound %.17g below %.17Lg", n, what,
                      scales[s], up, low);
                CHECK(over <= allowed, "n %d, kind %d, scale %g: bound is %g above, allowed %g", n,
                      what, scales[s], over, allowed);
                worst = fmax(worst, over / allowed);
                free(G);
            }
    printf("    largest excess over the eigenvalue: %.2f of what is allowed\n", worst);
}

DP_TEST(spectral, has_the_same_bits_on_every_instruction_set) {
    dp_rng r;
    dp_rng_seed(&r, 32, 1);
    for (int i = 0; i < 40; i++) {
        const int n = 1 + (int)(100 * dp_rng_uniform(&r));
        double *G = gram(&r, (kind)(i % NKINDS), n, 1), want = 0;
        for (int isa = 0; isa < DP_NISAS; isa++) {
            if (!dp_isa_here(isa)) continue;
            dp_isa_choose(dp_isa_names[isa], NULL);
            const double got = dp_eigenvalue_up(n, G);
            CHECK(isa == DP_ISA_PLAIN || got == want, "n %d: %a on %s, %a on plain", n, got,
                  dp_isa_names[isa], want);
            if (isa == DP_ISA_PLAIN) want = got;
        }
        free(G);
    }
    dp_isa_choose(NULL, NULL);
}

DP_TEST(spectral, matrices_that_are_not_positive_and_numbers_that_are_none) {
    const double negative[] = {-3, 0, 0, -2}, swap[] = {0, 2, 2, 0}, zero[4] = {0},
                 inf[] = {1, INFINITY, INFINITY, 1}, nan[] = {1, NAN, NAN, 1};
    CHECK(dp_eigenvalue_up(2, negative) >= -2, "at least the largest");
    CHECK(dp_eigenvalue_up(2, swap) >= 2 && dp_eigenvalue_up(2, swap) <= 2 + 1e-13,
          "eigenvalues 2 and -2: %.17g", dp_eigenvalue_up(2, swap));
    CHECK(dp_eigenvalue_up(2, zero) == 0 && dp_eigenvalue_up(0, zero) == 0, "nothing");
    CHECK(isinf(dp_eigenvalue_up(2, inf)) && isinf(dp_eigenvalue_up(2, nan)), "not finite");
}
