/* Formats of stored states (stored.h). */
#include "stored.h"
#include "design.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 32 /* columns of a share */

typedef enum { A_TENSOR, A_HEAD, A_ROW, A_BLOCK } share;
typedef enum { E4M3, E5M2, INT8 } element;
static const struct {
    int fraction, least; /* stored bits, exponent of the least normal number */
    double most;
} OF[] = {[E4M3] = {3, -6, 448}, [E5M2] = {2, -14, 57344}, [INT8] = {0, 0, 127}};

int dp_stored_has_scale(dp_format f) { return f >= DP_E4M3_TENSOR && f < DP_NSTORED; }
static element element_of(dp_format f) { return (element)((f - DP_E4M3_TENSOR) / 4); }
static share share_of(dp_format f) { return (share)((f - DP_E4M3_TENSOR) % 4); }
int dp_stored_by_tensor(dp_format f) { return dp_stored_has_scale(f) && share_of(f) == A_TENSOR; }

/* ---- one number ------------------------------------------------------------------------------ */

/* Half the spacing of the least numbers of a format. */
static double least_half(element e) {
    return e == INT8 ? 0.5 : ldexp(1, OF[e].least - OF[e].fraction - 1);
}

static double rounded(element e, double x) {
    int exponent = 0;
    if (e == INT8) return fmax(-127, fmin(127, nearbyint(x)));
    frexp(x, &exponent); /* |x| from 2^(exponent-1) on */
    if (exponent - 1 < OF[e].least) exponent = OF[e].least + 1;
    const double spacing = ldexp(1, exponent - 1 - OF[e].fraction);
    return fmax(-OF[e].most, fmin(OF[e].most, nearbyint(x / spacing) * spacing));
}

/* In [0, 1), of a number and its place. */
static double chance(double x, int64_t at) {
    uint64_t z;
    memcpy(&z, &x, sizeof z);
    z += 0x9e3779b97f4a7c15u * (uint64_t)(at + 1);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return ldexp((double)((z ^ z >> 31) >> 11), -53);
}

static double by_chance(double x, int64_t at) {
    int exponent;
    if (!isfinite(x)) return x;
    frexp(x, &exponent);
    const double spacing = ldexp(1, (exponent < -13 ? -13 : exponent) - 11);
    const double down = floor(x / spacing) * spacing;
    const double y = chance(x, at) < (x - down) / spacing ? down + spacing : down;
    return fabs(y) > 65504 ? copysign(INFINITY, y) : y;
}

/* ---- shares ---------------------------------------------------------------------------------- */

static double largest(const double *x, int64_t n) {
    double most = 0;
    for (int64_t i = 0; i < n; i++)
        if (isnan(x[i]))
            return NAN;
        else
            most = fmax(most, fabs(x[i]));
    return most;
}

/* Is x what the scale s stores already? */
static int is_stored(element e, double s, const double *x, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (dp_fp32(s * rounded(e, x[i] / s)) != x[i]) return 0;
    return 1;
}

double dp_stored_scale(double most, double number) {
    const double s = dp_fp32(most / number);
    return s == 0 ? 1 : s;
}

static void store_share(element e, double *x, int64_t n) {
    const double most = largest(x, n), s = dp_stored_scale(most, OF[e].most);
    if (!(most < INFINITY)) return;
    /* reading rounds the largest number, from which the scale may come out one off, by little if
     * it is normal */
    if (is_stored(e, s, x, n) || (s >= 0x1p-125 && is_stored(e, nextafterf((float)s, 0), x, n)) ||
        (s >= 0x1p-125 && is_stored(e, nextafterf((float)s, INFINITY), x, n)))
        return;
    for (int64_t i = 0; i < n; i++)
        x[i] = dp_fp32(s * rounded(e, x[i] / s));
}

/* Entries of a share, from entry `at` of a row of V on. */
static int64_t entries(share s, int heads, int K, int V, int64_t at) {
    if (s == A_TENSOR) return (int64_t)heads * K * V;
    if (s == A_HEAD) return (int64_t)K * V;
    if (s == A_ROW) return V;
    return V - at % V < BLOCK ? V - at % V : BLOCK;
}

void dp_store_state(dp_format f, int heads, int K, int V, double *S) {
    const int64_t all = (int64_t)heads * K * V;
    for (int64_t i = 0; i < all && !dp_stored_has_scale(f); i++)
        S[i] = f == DP_FP16SR ? by_chance(S[i], i) : dp_store(f, S[i]);
    for (int64_t i = 0, n; i < all && dp_stored_has_scale(f); i += n) {
        n = entries(share_of(f), heads, K, V, i);
        store_share(element_of(f), S + i, n);
    }
}

/* ---- errors ---------------------------------------------------------------------------------- */

static double most_of_all(int heads, int64_t KV, const double *S, const double *off) {
    double most = 0;
    for (int h = 0; h < heads; h++)
        most = fmax(most, largest(S + h * KV, KV) + off[h]);
    return most;
}

/* The error that the spacing of the least numbers adds, of a head. */
static double of_spacing(dp_format f, int heads, int K, int V, const double *S, const double *off,
                         int h) {
    const int64_t KV = (int64_t)K * V;
    const element e = element_of(f);
    const double c = least_half(e) / OF[e].most;
    double sum = 0, widest = 0;
    if (share_of(f) == A_TENSOR) return sqrt((double)KV) * c * most_of_all(heads, KV, S, off);
    for (int64_t i = 0, n; i < KV; i += n) {
        n = entries(share_of(f), heads, K, V, i);
        const double most = largest(S + h * KV + i, n);
        sum += (double)n * most * most;
        widest = fmax(widest, (double)n);
    }
    return c * (sqrt(sum) + sqrt(widest) * off[h]);
}

double dp_stored_error(dp_format f, int heads, int K, int V, const double *S, const double *off,
                       int h) {
    const int64_t KV = (int64_t)K * V;
    const double size = sqrt(dp_squares(S + h * KV, KV)) + off[h], all = sqrt((double)KV);
    if (f == DP_FP64) return 0;
    if (dp_stored_has_scale(f)) {
        const element e = element_of(f);
        const double u = e == INT8 ? 0 : ldexp(1, -OF[e].fraction - 1);
        return (u + 0x1p-22) * size + of_spacing(f, heads, K, V, S, off, h) +
               all * (OF[e].most + 1) * 0x1p-150;
    }
    if (f == DP_FP16 || f == DP_FP16SR) {
        const double u = f == DP_FP16 ? 0x1p-11 : 0x1p-10;
        if (largest(S + h * KV, KV) + off[h] >= 65504) return INFINITY;
        return u * size + all * u * 0x1p-14;
    }
    return ldexp(1, -(int)dp_formats[f].bits) * size + all * 0x1p-134;
}
