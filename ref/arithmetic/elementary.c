/* Elementary functions with the same bits everywhere (ref/arithmetic/elementary.h); exp is in
 * elementary_core.h. */
#include "elementary.h"
#include "elementary_core.h"
#include "isa.h"

#include <math.h>

double dp_exp(double x) { return dp_exp_core(x); }
float dp_expf(float x) { return dp_expf_core(x); }

/* ---- logarithms ---------------------------------------------------------------------------------
 * x = 2^k (1 + f), sqrt(1/2) <= 1 + f < sqrt(2), f exact. Let s = f / (2 + f), h = f^2 / 2 and R =
 * 2 (s^2/3 + s^4/5 + ...). Then log(1 + f) = 2 artanh(s) = 2s + s R, and 2s = f - h + s h, since s
 * (2 + f) = f. So log(1 + f) = f - (h - s (h + R)). f is exact. h <= 0.086 and s (h + R) <= 0.02
 * err by less than 2^-56 together. That is below 0.3 ulp wherever |log(1 + f)| >= 0.25, and shrinks
 * like f^2 below. R ends at s^20: |s| <= 0.1716 leaves 1e-18 of s. k LN2_HI is exact and k LN2_LO
 * below 2^-31. Each result is rounded once at full size: in all below 1 ulp. */

typedef struct {
    double f, s, h, R;
} log_parts;

DP_INLINE log_parts log_parts_of(double f) {
    const double s = f / (2 + f), z = s * s;
    double p = 2.0 / 21;
    for (int i = 19; i >= 3; i -= 2)
        p = p * z + 2.0 / i;
    return (log_parts){f, s, 0.5 * f * f, p * z};
}

/* k ln 2 + log(1 + f) + c, |c| below an ulp of 1 + f */
static double log_sum(int k, double f, double c) {
    const log_parts a = log_parts_of(f);
    if (!k) return f - (a.h - (a.s * (a.h + a.R) + c));
    return k * DP_LN2_HI - ((a.h - (a.s * (a.h + a.R) + (k * DP_LN2_LO + c))) - f);
}

/* x = 2^k m, sqrt(1/2) <= m < sqrt(2), for finite x > 0 */
static double split(double x, int *k) {
    int low = 0;
    if (x < 0x1p-1022) {
        x *= 0x1p54;
        low = 54;
    }
    const uint64_t fraction = dp_bits_of(x) & ((UINT64_C(1) << 52) - 1);
    const int large = fraction >= UINT64_C(0x6a09e667f3bcd); /* of sqrt(2) */
    *k = (int)(dp_bits_of(x) >> 52) - 1023 + large - low;
    return dp_of_bits(fraction | (uint64_t)(1023 - large) << 52);
}

/* The value at 0, infinity, NaN and below 0 */
static double log_special(double x) { return x == 0 ? -INFINITY : x < 0 ? NAN : x; }

double dp_log(double x) {
    int k;
    if (!(x > 0 && x < INFINITY)) return log_special(x);
    const double m = split(x, &k);
    return log_sum(k, m - 1, 0);
}

/* 1 + x = u + lost exactly; lost / u is what it adds to log(u). */
double dp_log1p(double x) {
    int k;
    if (!(x > -1 && x < INFINITY)) return x < -1 ? NAN : x == -1 ? -INFINITY : x;
    if (x > -0.29 && x < 0.41) return x == 0 ? x : log_sum(0, x, 0);
    const double u = 1 + x, lost = x >= 1 ? 1 - (u - x) : x - (u - 1), m = split(u, &k);
    return log_sum(k, m - 1, lost / u);
}

float dp_log1pf(float x) { return (float)dp_log1p(x); }

/* dp_log1p of 0 <= x <= 1 without a branch. 0 ln 2 adds nothing to log_sum's other form. */
DP_INLINE double log1p_of_unit(double x) {
    const double u = 1 + x, lost = x >= 1 ? 1 - (u - x) : x - (u - 1);
    const int small = x < 0.41, large = u >= 0x1.6a09e667f3bcdp0; /* sqrt(2) */
    const double k = !small && large ? 1 : 0, m = large ? 0.5 * u : u;
    const double c = small ? 0 : lost / u;
    const log_parts a = log_parts_of(small ? x : m - 1);
    return k * DP_LN2_HI - ((a.h - (a.s * (a.h + a.R) + (k * DP_LN2_LO + c))) - a.f);
}

#define DP_ISA_BODY "ref/arithmetic/elementary_body.inc"
#include "isa_each.inc"

void dp_exp_row(int n, const double *x, double *y) { DP_ISA_OF(exp_row)(n, x, y); }
void dp_log1p_row(int n, const double *x, double *y) { DP_ISA_OF(log1p_row)(n, x, y); }

/* log(1 + f) = hi + lo, hi of 26 bits; 1/ln 2 = INV_HI + INV_LO, INV_HI of 26 bits. So hi INV_HI is
 * exact, and k + hi INV_HI is a Fast2Sum, k being 0 or the larger. The rest is below 2^-24 and errs
 * by 2^-76. */
#define INV_HI 0x1.7154760000000p+0
#define INV_LO 0x1.4ae0bf85ddf44p-26

double dp_log2(double x) {
    int k;
    if (!(x > 0 && x < INFINITY)) return log_special(x);
    const log_parts a = log_parts_of(split(x, &k) - 1);
    const double hi = dp_of_bits(dp_bits_of(a.f - a.h) & ~((UINT64_C(1) << 27) - 1));
    const double lo = ((a.f - hi) - a.h) + a.s * (a.h + a.R);
    const double top = hi * INV_HI, sum = k + top, lost = k ? top - (sum - k) : 0;
    return sum + (lost + ((lo + hi) * INV_LO + lo * INV_HI));
}

/* ---- roots --------------------------------------------------------------------------------------
 * |x| = 2^(3q) m, 1 <= m < 8. Newton's iteration squares its relative error. From a linear guess
 * with 12 % it is 0.014, 2e-4, 4e-8, 2e-15. The last step starts from t of 26 bits, whose square is
 * exact. It adds less than 2^-25 of it with a relative error of a few 2^-53: half an ulp and a
 * small rest. */
double dp_cbrt(double x) {
    if (!(fabs(x) > 0 && fabs(x) < INFINITY)) return x;
    int e;
    const double y = frexp(fabs(x), &e);
    const int third = (e - 1 + 3 * 400) / 3 - 400; /* floor((e - 1) / 3) */
    const double m = ldexp(y, e - 3 * third);
    double t = 0.9 + 0.155 * m;
    for (int i = 0; i < 4; i++)
        t = (2 * t + m / (t * t)) / 3;
    t = dp_of_bits(dp_bits_of(t) & ~((UINT64_C(1) << 27) - 1));
    const double r = m / (t * t);
    return copysign(ldexp(t + t * ((r - t) / (2 * t + r)), third), x);
}

/* a^2 = p + e exactly (Dekker 1971), |a| <= 2 */
static double square(double a, double *e) {
    const double p = a * a, c = 134217729.0 * a, h = c - (c - a), l = a - h;
    *e = ((h * h - p) + 2 * h * l) + l * l;
    return p;
}

/* The larger is scaled to [1/2, 1). r = sqrt(fl(x^2 + y^2)) is off by an ulp or less. The residual
 * x^2 + y^2 - r^2, formed from exact squares, corrects it: (x^2 - r^2) is exact where y is small.
 */
double dp_hypot(double x, double y) {
    const double a = fabs(x), b = fabs(y);
    if (a == INFINITY || b == INFINITY) return INFINITY;
    if (isnan(a) || isnan(b) || a == 0 || b == 0) return a + b;
    int e;
    double ea, eb, er;
    frexp(a > b ? a : b, &e);
    const double p = ldexp(a > b ? a : b, -e), q = ldexp(a > b ? b : a, -e),
                 r = sqrt(p * p + q * q);
    const double pp = square(p, &ea), qq = square(q, &eb), rr = square(r, &er);
    return ldexp(r + (((pp - rr) + qq) + ((ea - er) + eb)) / (2 * r), e);
}

/* ---- angles -------------------------------------------------------------------------------------
 *
 * x = n pi/2 + r, |r| <= pi/4 + 2^-31. Four numbers add up to pi/2, three of them of 33 bits. Their
 * products with n of 20 bits are exact, and the rest is below 2^-130. The differences err by 2^-52
 * in all.
 * Taylor's series up to r^17 and r^16 leave 1e-19 and 3e-18. Horner's steps err by less than an
 * ulp: their terms shrink by r^2 / 6 <= 0.11. */
void dp_cos_sin(double x, double y[2]) {
    static const double P[4] = {0x1.921fb54400000p+0, 0x1.0b4611a600000p-34, 0x1.3198a2e000000p-69,
                                0x1.b839a252049c1p-104};
    const double n = nearbyint(x * 0x1.45f306dc9c883p-1);
    double r = x;
    for (int i = 0; i < 4; i++)
        r = r - n * P[i];
    const double z = r * r;
    double s = 1, c = 1;
    for (int i = 17; i > 1; i -= 2)
        s = 1 - s * z / (i * (i - 1.0));
    for (int i = 16; i > 0; i -= 2)
        c = 1 - c * z / (i * (i - 1.0));
    s = r * s;
    const int quarter = (int)(n - 4 * floor(n / 4));
    y[0] = quarter == 0 ? c : quarter == 1 ? -s : quarter == 2 ? -c : s;
    y[1] = quarter == 0 ? s : quarter == 1 ? c : quarter == 2 ? -s : -c;
}
