/* ref/vocabulary/formats_core.h - roundings of floats to shorter formats, to be inlined into loops
 * that run on vectors; ref/vocabulary/formats.c makes functions of them.
 *
 * The encodings of finite floats of one sign are ordered like their magnitudes and evenly spaced
 * within a binade. Rounding the magnitude is therefore integer arithmetic on the encoding. A carry
 * moves to the next binade, from subnormal to normal, or to Inf. */
#pragma once
#include <stdint.h>
#include <string.h>

static inline __attribute__((always_inline)) uint32_t dp_float_bits(float x) {
    uint32_t b;
    memcpy(&b, &x, sizeof b);
    return b;
}

static inline __attribute__((always_inline)) float dp_bits_float(uint32_t b) {
    float x;
    memcpy(&x, &b, sizeof x);
    return x;
}

static inline __attribute__((always_inline)) float dp_tf32_core(float x) {
    const uint32_t b = dp_float_bits(x), r = (b + 0x1000u) & ~0x1fffu;
    return dp_bits_float((b & 0x7f800000u) == 0x7f800000u ? b : r);
}

static inline __attribute__((always_inline)) float dp_tf32rz_core(float x) {
    const uint32_t b = dp_float_bits(x), r = b & ~0x1fffu;
    return dp_bits_float((b & 0x7f800000u) == 0x7f800000u ? b : r);
}

/* A NaN becomes quiet, and stays one when its payload sat in the lower half. */
static inline __attribute__((always_inline)) float dp_bf16_core(float x) {
    const uint32_t b = dp_float_bits(x), r = b + 0x7fffu + (b >> 16 & 1u);
    return dp_bits_float(((b & 0x7fffffffu) > 0x7f800000u ? b | 0x400000u : r) & 0xffff0000u);
}
