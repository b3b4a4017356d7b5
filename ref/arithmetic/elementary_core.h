/* ref/arithmetic/elementary_core.h - exp without a branch, to be inlined into loops that run on
 * vectors; shared by elementary.c and the hot loops of ref/. A loop over it gives the bits of
 * dp_exp and dp_expf, since every lane is computed by itself.
 *
 * x = n ln 2 + r, |r| <= 0.34658; exp(x) = 2^n exp(r). n is rounded to nearest by adding and
 * subtracting 1.5 * 2^52. LN2_HI has 41 bits and |n| < 2^11, so n LN2_HI is exact. So is x - n
 * LN2_HI: both are multiples of the smaller's last place, and the difference is below 0.35.
 *
 * double: r + rl holds the reduced argument to 2^-86 (Fast2Sum). Let p be the Taylor sum of (exp(r)
 * - 1 - r) / r^2 to r^11/13!. Truncation leaves 0.34658^14 / 14! = 4.1e-18 = 2^-57.8, at most 0.05
 * ulp of a result in [0.707, 1.415). The sum y = 1 + r and its error d = r - (y - 1) are a
 * Fast2Sum, hence exact together. The term d + (rl (1 + r) + r^2 p) is below 0.07. Its evaluation
 * errs by less than 2^-57 (four roundings of quantities below 2^-3.8): 0.0625 ulp of a result below
 * 1. The last addition adds 0.5. In all below 0.65 ulp. Two factors apply 2^n. The first product is
 *    exact; the second rounds only where the result is subnormal. It rounds by half of that ulp,
 *    where the 0.65 has become at most 0.33: below 0.83 ulp.
 *
 * The float form computes in double, with the Taylor sum to r^9/9!. Truncation leaves 0.34658^10 /
 * 10! = 2^-37.1 relative, 2^-36.6 of the result. That adds 2^-12 ulp of a float to its one
 * rounding. 2^n is an exact factor in double, so subnormal floats are rounded once as well.
 */
#pragma once
#include <stdint.h>
#include <string.h>

#define DP_INLINE static inline __attribute__((always_inline))
#define DP_LN2_HI 0x1.62e42fefa3p-1     /* ln 2 in 41 bits */
#define DP_LN2_LO 0x1.3de6af278ece6p-42 /* ln 2 - DP_LN2_HI, rounded */
#define DP_INV_LN2 0x1.71547652b82fep+0
#define DP_TO_INTEGER 0x1.8p52

DP_INLINE uint64_t dp_bits_of(double x) {
    uint64_t b;
    memcpy(&b, &x, sizeof b);
    return b;
}

DP_INLINE double dp_of_bits(uint64_t b) {
    double x;
    memcpy(&x, &b, sizeof x);
    return x;
}

/* 2^k for an integer -1022 <= k <= 1023; any double for a NaN. */
DP_INLINE double dp_power_of_two(double k) {
    return dp_of_bits((dp_bits_of(k + DP_TO_INTEGER) - dp_bits_of(DP_TO_INTEGER) + 1023) << 52);
}

/* exp(x) = 2^n (y + tail) */
typedef struct {
    double n, y, tail;
} dp_exp_parts;

DP_INLINE dp_exp_parts dp_exp_split(double x) {
    /* exp(-746) < 2^-1076 is rounded to 0, exp(710) to infinity; a NaN passes both comparisons */
    const double low = x < -746 ? -746 : x, c = low > 710 ? 710 : low;
    const double n = (c * DP_INV_LN2 + DP_TO_INTEGER) - DP_TO_INTEGER;
    const double t = c - n * DP_LN2_HI, s = n * DP_LN2_LO, r = t - s, rl = (t - r) - s;
    double p = 1.0 / 6227020800;
    p = p * r + 1.0 / 479001600;
    p = p * r + 1.0 / 39916800;
    p = p * r + 1.0 / 3628800;
    p = p * r + 1.0 / 362880;
    p = p * r + 1.0 / 40320;
    p = p * r + 1.0 / 5040;
    p = p * r + 1.0 / 720;
    p = p * r + 1.0 / 120;
    p = p * r + 1.0 / 24;
    p = p * r + 1.0 / 6;
    p = p * r + 0.5;
    const double y = 1 + r, d = r - (y - 1);
    return (dp_exp_parts){n, y, d + ((rl + rl * r) + r * r * p)};
}

DP_INLINE double dp_exp_core(double x) {
    const dp_exp_parts e = dp_exp_split(x);
    const double half = (e.n * 0.5 + DP_TO_INTEGER) - DP_TO_INTEGER;
    return (e.y + e.tail) * dp_power_of_two(half) * dp_power_of_two(e.n - half);
}

/* exp(x) to 2^-36, relative, for |x| <= 700 */
DP_INLINE double dp_exp_near(double x) {
    const double n = (x * DP_INV_LN2 + DP_TO_INTEGER) - DP_TO_INTEGER;
    const double r = (x - n * DP_LN2_HI) - n * DP_LN2_LO;
    double p = 1.0 / 362880;
    p = p * r + 1.0 / 40320;
    p = p * r + 1.0 / 5040;
    p = p * r + 1.0 / 720;
    p = p * r + 1.0 / 120;
    p = p * r + 1.0 / 24;
    p = p * r + 1.0 / 6;
    p = p * r + 0.5;
    return (1 + (r + r * r * p)) * dp_power_of_two(n);
}

DP_INLINE float dp_expf_core(float x) {
    /* exp(-104) < 2^-150 is rounded to 0, exp(89) to infinity */
    const double low = x < -104 ? -104 : x;
    return (float)dp_exp_near(low > 89 ? 89 : low);
}
