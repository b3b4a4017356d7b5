/* The table of number formats and their roundings (formats.h). */
#include "formats.h"
#include "formats_core.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#define SCALED(FORMAT, name, rounding, scaled, its_bits)                                           \
    [FORMAT] = {                                                                                   \
        name "-" scaled, name ", an fp32 scale a " scaled, 0, 0x1p-24, rounding, .bits = its_bits, \
        .bytes = 1}
const dp_format_info dp_formats[DP_NSTORED] = {
    [DP_FP64] = {"fp64", "fp64", 0, 0x1p-53, 0, .bits = 53, .step = 1, .bytes = 8, .rate = 33.5e12},
    [DP_FP32] = {"fp32", "fp32", 0, 0x1p-24, 0, .bits = 24, .device = 1, .step = 1, .bytes = 4,
                 .rate = 67e12},
    /* u_op: what hi + lo leaves of an operand; eta has its own formula */
    [DP_TF32X3] = {"tf32x3", "3xTF32", 0x1p-22, 0x1p-24, 0, .bits = 23.75, .two_parts = 1,
                   .device = 1, .step = 1, .bytes = 4, .rate = 165e12},
    [DP_TF32] = {"tf32", "tf32 rounded to nearest", 0x1p-11, 0x1p-24, 0, .bits = 11, .device = 1,
                 .step = 1, .bytes = 4, .rate = 495e12},
    [DP_TF32RZ] = {"tf32rz", "truncated tf32", 0x1p-10, 0x1p-24, 0, .bits = 11, .truncates = 1,
                   .device = 1, .bytes = 4, .rate = 495e12},
    [DP_BF16] = {"bf16", "bf16 operands", 0x1p-8, 0x1p-24, 0, .bits = 8, .device = 1, .step = 1,
                 .bytes = 4, .rate = 989e12},
    [DP_BF16ST] = {"bf16st", "bf16 storage between steps", 0, 0x1p-24, 0x1p-8, .bits = 8,
                   .bytes = 2, .rate = 67e12},
    [DP_FP16] = {"fp16", "fp16", 0x1p-11, 0x1p-24, 0, .bits = 11, .bytes = 2, .rate = 989e12},
    [DP_FP16SR] = {"fp16sr", "fp16 with stochastic rounding", 0, 0x1p-24, 0x1p-10, .bits = 10,
                   .bytes = 2},
    SCALED(DP_E4M3_TENSOR, "e4m3", 0x1p-4, "tensor", 4),
    SCALED(DP_E4M3_HEAD, "e4m3", 0x1p-4, "head", 4),
    SCALED(DP_E4M3_ROW, "e4m3", 0x1p-4, "row", 4),
    SCALED(DP_E4M3_BLOCK, "e4m3", 0x1p-4, "block", 4),
    SCALED(DP_E5M2_TENSOR, "e5m2", 0x1p-3, "tensor", 3),
    SCALED(DP_E5M2_HEAD, "e5m2", 0x1p-3, "head", 3),
    SCALED(DP_E5M2_ROW, "e5m2", 0x1p-3, "row", 3),
    SCALED(DP_E5M2_BLOCK, "e5m2", 0x1p-3, "block", 3),
    SCALED(DP_INT8_TENSOR, "int8", 0x1p-8, "tensor", 7),
    SCALED(DP_INT8_HEAD, "int8", 0x1p-8, "head", 7),
    SCALED(DP_INT8_ROW, "int8", 0x1p-8, "row", 7),
    SCALED(DP_INT8_BLOCK, "int8", 0x1p-8, "block", 7),
};
const char *const dp_base_names[DP_NBASES] = {"fp64", "fp32", "bf16"};

static int find_below(int n, const char *name) {
    for (int i = 0; i < n; i++)
        if (!strcmp(name, dp_formats[i].name)) return i;
    return -1;
}
int dp_format_find(const char *name) { return find_below(DP_NFORMATS, name); }
int dp_format_find_stored(const char *name) { return find_below(DP_FP16 + 1, name); }

float dp_fp32(double x) { return (float)x; }
float dp_tf32(float x) { return dp_tf32_core(x); }
float dp_tf32rz(float x) { return dp_tf32rz_core(x); }
uint16_t dp_bf16_bits(float x) { return (uint16_t)(dp_float_bits(dp_bf16_core(x)) >> 16); }
float dp_bf16_from_bits(uint16_t b) { return dp_bits_float((uint32_t)b << 16); }
float dp_bf16(float x) { return dp_bf16_core(x); }

/* Truncates to fp32 and sets the last bit if anything was cut off (rounding to `odd`). At every
 * exponent fp32 has 16 more bits than bf16, subnormals included. So the last bit can only break or
 * keep a tie of the second rounding: both roundings together are one correct rounding. */
static float fp32_to_odd(double x) {
    const float f = (float)x;
    if (isnan(x) || (double)f == x) return f;
    return dp_bits_float((dp_float_bits(f) - (fabs((double)f) > fabs(x))) | 1u);
}

double dp_bf16d(double x) { return dp_bf16(fp32_to_odd(x)); }

float dp_fp16_from_bits(uint16_t h) {
    const uint32_t e = h >> 10 & 31u, m = h & 0x3ffu, sign = (uint32_t)(h & 0x8000u) << 16;
    if (e) return dp_bits_float(sign | (e == 31 ? 0xffu : e + 112) << 23 | m << 13);
    const float a = (float)m * 0x1p-24f;
    return sign ? -a : a;
}

/* The spacing of fp16 in the binade of |x| is q = 2^(e-10), and 2^-24 below 2^-14. The quotient
 * |x|/q is exact, and a sum with 2^52 rounds it once to an integer r <= 2^11. The encoding is the
 * exponent field times 2^10 plus r - 2^10. A carry makes r = 2^11 and subnormals right. */
uint16_t dp_fp16_bits(double x) {
    const uint16_t sign = signbit(x) ? 0x8000u : 0;
    const double a = fabs(x);
    if (isnan(x)) return sign | 0x7e00u;
    if (a >= 65536) return sign | 0x7c00u;
    uint64_t bits;
    memcpy(&bits, &a, 8);
    const int e = a >= 0x1p-14 ? (int)(bits >> 52) - 1023 : -14;
    bits = (uint64_t)(1033 - e) << 52; /* 2^(10-e) */
    double scale;
    memcpy(&scale, &bits, 8);
    const int r = (int)((a * scale + 0x1p52) - 0x1p52);
    return (uint16_t)(sign | (((e + 15) << 10) + r - 1024));
}

/* Upward evaluation: one IEEE operation errs by at most half a spacing, so the next double above is
 * an upper bound. An exact zero (zero operands only, at these sizes) stays zero. */
static double up(double x) { return x == 0 ? 0 : nextafter(x, INFINITY); }

double dp_gamma(int n, double u) {
    assert(n >= 0 && u >= 0);
    const double nu = up(n * u);
    if (nu >= 1) return INFINITY;
    return up(nu / nextafter(1 - nu, 0));
}

/* (1 + a)(1 + b) - 1 without cancellation */
static double compound(double a, double b) { return up(up(a + b) + up(a * b)); }

double dp_eta(dp_format f, int K) {
    const double u = dp_formats[f].u_acc, op = dp_formats[f].u_op, g = dp_gamma(K, u);
    if (f == DP_TF32X3)
        return compound(compound(3 * 0x1p-22 + 0x1p-43, dp_gamma(K + 2, u)), up(0x1p-10 * g));
    return compound(compound(compound(op, op), g), dp_formats[f].u_store);
}
