/* ref/inputs/inputs_large.h - laws of inputs by number, for large problems: an entry follows from a
 * seed and its index alone. One text for the host and for kernels (gpu/arrays), which are compiled
 * without contraction: the same bits. */
#pragma once
#include "ref/vocabulary/memory.h"
#include "rng.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef enum {
    DP_LARGE_NORMAL,  /* a + b N, N nearly normal */
    DP_LARGE_UNIFORM, /* a + b U, U uniform in [0, 1) */
    DP_LARGE_UNIT,    /* rows of N, over their norm */
    DP_LARGE_LOG      /* b log(1 - U); the host's alone */
} dp_large_kind;
struct dp_large_law {
    dp_large_kind kind;
    uint64_t seed;
    int64_t width; /* of a row */
    double a, b;
    int bf16; /* rounded to bf16, else to fp32 */
};

/* splitmix64 */
DP_BOTH uint64_t dp_large_mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* Sum of four 16-bit uniforms, mean 0, variance 1: near enough to normal where only the size
 * matters. */
DP_BOTH double dp_large_normal(uint64_t seed, uint64_t i) {
    const uint64_t h = dp_large_mix(seed ^ dp_large_mix(i));
    return ((double)((h & 0xffff) + (h >> 16 & 0xffff) + (h >> 32 & 0xffff) + (h >> 48)) -
            2 * 65535.0) /
           (65536 * 0.57735026918962576);
}

DP_BOTH double dp_large_uniform(uint64_t seed, uint64_t i) {
    return (double)(dp_large_mix(seed ^ dp_large_mix(i)) >> 11) * 0x1p-53;
}

/* One rounding to nearest even, of 0 and of normal numbers of both formats. */
DP_BOTH double dp_large_rounded(double x, int bf16) {
    uint64_t b;
    if (!bf16) return (float)x;
    memcpy(&b, &x, sizeof b);
    b += ((UINT64_C(1) << 44) - 1) + (b >> 45 & 1);
    b &= ~((UINT64_C(1) << 45) - 1);
    memcpy(&x, &b, sizeof x);
    return x;
}

/* The divisor of entries of a row. */
DP_BOTH double dp_large_norm(const dp_large_law *l, int64_t row) {
    double n = 0;
    if (l->kind != DP_LARGE_UNIT) return 1;
    for (int64_t i = row * l->width; i < (row + 1) * l->width; i++) {
        const double y = dp_large_normal(l->seed, (uint64_t)i);
        n += y * y;
    }
    return sqrt(n);
}

/* Entry i of any law but DP_LARGE_LOG, in a row of that norm. */
DP_BOTH double dp_large_entry(const dp_large_law *l, int64_t i, double norm) {
    const double y =
        (l->kind == DP_LARGE_UNIFORM ? dp_large_uniform : dp_large_normal)(l->seed, (uint64_t)i);
    return dp_large_rounded(l->kind == DP_LARGE_UNIT ? y / norm : l->a + l->b * y, l->bf16);
}

DP_BOTH void dp_large_row(const dp_large_law *l, int64_t row, double *x) {
    const double norm = dp_large_norm(l, row);
    for (int64_t i = 0; i < l->width; i++)
        x[i] = dp_large_entry(l, row * l->width + i, norm);
}

/* An entry y edited; `mirrored` is the entry that DP_EDIT_MIRRORED takes. */
DP_BOTH double dp_edited(dp_edit e, double y, double mirrored) {
    return e == DP_EDIT_SIGN       ? -y
           : e == DP_EDIT_MIRRORED ? mirrored
           : y == 0                ? -0.5
                                   : (e == DP_EDIT_GATE ? 2 : 0.5) * y;
}
