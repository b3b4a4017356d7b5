/* Derivation. u = 2^-53. two_prod and two_sum are error-free, so a term is a b = p + e + (ah bl +
 * al bh) + al bl. Dropping al bl and rounding the cross terms and their sum loses at most 8 u^2
 * |a||b|. A term is added to the accumulator (s, t) by two_sum on the leading parts, plain
 * additions below and one renormalisation. This step loses at most 8 u^2 (|s| + |p|): the plain
 * additions are on quantities below 2 u |s| and 2 u |p|. As |s| never exceeds (1 + small) |A||B|, k
 * terms lose at most 16 k u^2 |A||B| = k 2^-102 |A||B|. The header promises four times this. */
#include "dd.h"
#include "isa.h"

#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

INLINE void two_prod(double a, double b, double *p,
                     double *e) { /* Dekker 1971: needs no fused operation */
    const double S = 134217729.0, ca = S * a, cb = S * b, ah = ca - (ca - a), bh = cb - (cb - b),
                 al = a - ah, bl = b - bh;
    *p = a * b;
    *e = ((ah * bh - *p) + ah * bl + al * bh) + al * bl;
}

/* row (h, l) += (ah + al) * (bh + bl). fma: the error of a product by one fused operation, the same
 * bits. */
INLINE void add_row(int fma, int n, double ah, double al, const double *bh, const double *bl,
                    double *h, double *l) {
#pragma omp simd
    for (int j = 0; j < n; j++) {
        double p, e;
        if (fma) {
            p = ah * bh[j];
            e = __builtin_fma(ah, bh[j], -p);
        } else
            two_prod(ah, bh[j], &p, &e);
        e += ah * bl[j] + al * bh[j];
        const double s = h[j] + p, z = s - h[j], t = (h[j] - (s - z)) + (p - z) + (l[j] + e);
        h[j] = s + t;
        l[j] = t - (h[j] - s);
    }
}

typedef void row_fn(int n, double ah, double al, const double *bh, const double *bl, double *h,
                    double *l);
static void row_plain(int n, double ah, double al, const double *bh, const double *bl, double *h,
                      double *l) {
    add_row(0, n, ah, al, bh, bl, h, l);
}
#if defined(__x86_64__)
__attribute__((target("avx512f,avx512dq,avx2,fma"))) static void
row_avx512(int n, double ah, double al, const double *bh, const double *bl, double *h, double *l) {
    add_row(1, n, ah, al, bh, bl, h, l);
}
__attribute__((target("avx2,fma"))) static void
row_avx2(int n, double ah, double al, const double *bh, const double *bl, double *h, double *l) {
    add_row(1, n, ah, al, bh, bl, h, l);
}
#endif

#if defined(__x86_64__)
static row_fn *const rows[DP_NISAS] = {row_plain, row_avx2, row_avx512};
#else
static row_fn *const rows[DP_NISAS] = {row_plain};
#endif

void dp_dd_mm(int m, int n, int k, const double *Ah, const double *Al, const double *Bh,
              const double *Bl, double *Ch, double *Cl) {
    double zero[n];
    row_fn *const row = rows[dp_isa_chosen()];
    for (int j = 0; j < n; j++)
        zero[j] = 0;
#pragma omp parallel for schedule(static)
    for (int i = 0; i < m; i++) {
        double *h = Ch + (int64_t)i * n, *l = Cl + (int64_t)i * n;
        for (int j = 0; j < n; j++)
            h[j] = l[j] = 0;
        for (int x = 0; x < k; x++)
            row(n, Ah[(int64_t)i * k + x], Al ? Al[(int64_t)i * k + x] : 0, Bh + (int64_t)x * n,
                Bl ? Bl + (int64_t)x * n : zero, h, l);
    }
}
