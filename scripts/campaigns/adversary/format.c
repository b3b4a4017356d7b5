/* Short number formats, emulated by rounding fp32 numbers, and random numbers for them. */
#include "adversary.h"
#include <math.h>

const char *const format_names[FORMATS] = {"fp32", "tf32", "tf32rz", "bf16", "fp16"};

int format_find(const char *name) {
    for (int i = 0; i < FORMATS; i++)
        if (!strcmp(name, format_names[i])) return i;
    return -1;
}

static uint32_t bits_of(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

static float from_bits(uint32_t u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}

/* Bits of the fp32 fraction that a format with the exponents of fp32 drops. */
static int dropped(format f) { return f == BF16 ? 16 : f == TF32 || f == TF32RZ ? 13 : 0; }

/* Spacing of fp16 around x: 2^-10 of its power of two, 2^-24 below 2^-14. */
static float fp16_step(float x) {
    int e;
    frexpf(x, &e);
    return ldexpf(1, e - 11 < -24 ? -24 : e - 11);
}

static float fp16_limit(float x) { return fabsf(x) > 65504 ? copysignf(INFINITY, x) : x; }

float round_to(format f, float x) {
    if (f == FP32 || !isfinite(x)) return x;
    if (f == TF32RZ) return truncate_to(f, x);
    if (f == FP16) {
        const float step = fp16_step(x);
        return fp16_limit(rintf(x / step) * step);
    }
    const uint32_t u = bits_of(x);
    const uint32_t half = 1u << (dropped(f) - 1);
    const uint32_t odd = u >> dropped(f) & 1;
    const uint32_t up = f == BF16 ? half - 1 + odd : half;
    return from_bits((u + up) & ~((1u << dropped(f)) - 1));
}

float truncate_to(format f, float x) {
    if (f == FP32 || !isfinite(x)) return x;
    if (f == FP16) {
        const float step = fp16_step(x);
        return fminf(fmaxf(truncf(x / step) * step, -65504), 65504);
    }
    return from_bits(bits_of(x) & ~((1u << dropped(f)) - 1));
}

float ulp_of(format f, float x) {
    if (!isfinite(x)) return 0;
    if (f == FP16) return fp16_step(x);
    const float a = fabsf(truncate_to(f, x));
    return from_bits(bits_of(a) + (1u << dropped(f))) - a;
}

float stochastic_to(format f, float x, double uniform) {
    if (f == FP32 || !isfinite(x)) return x;
    const float low = truncate_to(f, x);
    const float step = ulp_of(f, low);
    const int up = (double)fabsf(x - low) > uniform * (double)step;
    return up ? low + copysignf(step, x) : low;
}

double unit_roundoff(format f) {
    static const double u[FORMATS] = {0x1p-24, 0x1p-11, 0x1p-10, 0x1p-8, 0x1p-11};
    return u[f];
}

void round_all(format f, float *x, int64_t n) {
    for (int64_t i = 0; f != FP32 && i < n; i++)
        x[i] = round_to(f, x[i]);
}

/* splitmix64 (Steele, Lea, Flood, 2014) of seed and counter. */
static uint64_t mixed(uint64_t seed, uint64_t counter) {
    uint64_t z = seed * 0xD1342543DE82EF95u + (counter + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

double uniform01(uint64_t seed, uint64_t counter) {
    return ((double)(mixed(seed, counter) >> 11) + 0.5) * 0x1p-53;
}

double gaussian(uint64_t seed, uint64_t counter) {
    const double u = uniform01(seed, 2 * counter);
    const double v = uniform01(seed ^ 0x5bd1e995u, 2 * counter + 1);
    return sqrt(-2 * log(u)) * cos(6.283185307179586 * v);
}
