/* Derivation. u = 2^-53. two_prod and two_sum are error-free, so a term a b = p + e + (ah bl + al bh) + al bl; dropping al bl and rounding the
 * cross terms and their sum loses at most 8 u^2 |a||b|. Adding a term to the accumulator (s, t) by two_sum on the leading parts, plain additions
 * below and one renormalisation loses at most 8 u^2 (|s| + |p|) (the plain additions are on quantities below 2 u of those). |s| never exceeds
 * (1 + small) |A||B|, so k terms lose at most 16 k u^2 |A||B| = k 2^-102 |A||B|; the header promises four times that. */
#include "dd.h"

#include <stdint.h>

static inline void two_prod(double a, double b, double *p, double *e) {          /* Dekker 1971: needs no fused operation */
    const double S = 134217729.0, ca = S * a, cb = S * b, ah = ca - (ca - a), bh = cb - (cb - b), al = a - ah, bl = b - bh;
    *p = a * b;
    *e = ((ah * bh - *p) + ah * bl + al * bh) + al * bl;
}

/* row (h, l) += (ah + al) * (bh + bl) */
__attribute__((target_clones("avx2", "default"))) static void add_row(int n, double ah, double al, const double *bh, const double *bl, double *h, double *l) {
#pragma omp simd
    for (int j = 0; j < n; j++) {
        double p, e;
        two_prod(ah, bh[j], &p, &e);
        e += ah * bl[j] + al * bh[j];
        const double s = h[j] + p, z = s - h[j], t = (h[j] - (s - z)) + (p - z) + (l[j] + e);
        h[j] = s + t;
        l[j] = t - (h[j] - s);
    }
}

void dp_dd_mm(int m, int n, int k, const double *Ah, const double *Al, const double *Bh, const double *Bl, double *Ch, double *Cl) {
    double zero[n];
    for (int j = 0; j < n; j++) zero[j] = 0;
#pragma omp parallel for schedule(static)
    for (int i = 0; i < m; i++) {
        double *h = Ch + (int64_t)i * n, *l = Cl + (int64_t)i * n;
        for (int j = 0; j < n; j++) h[j] = l[j] = 0;
        for (int x = 0; x < k; x++)
            add_row(n, Ah[(int64_t)i * k + x], Al ? Al[(int64_t)i * k + x] : 0, Bh + (int64_t)x * n, Bl ? Bl + (int64_t)x * n : zero, h, l);
    }
}
