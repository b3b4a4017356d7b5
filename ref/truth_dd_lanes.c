#include "truth_dd.h"

#include <string.h>

#define PASTE_(a, b) a##_##b
#define PASTE(a, b) PASTE_(a, b)

#if defined(__x86_64__)
#include <immintrin.h>
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx2,fma")
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx2,fma"))), apply_to = function)
#define VL 8
#define N(x) PASTE(x, v8)
#define EXACT_ERROR(a, b, p) (vd)_mm512_fmsub_pd((__m512d)(a), (__m512d)(b), (__m512d)(p))
#define TR_DD_NAME "avx512"
#include "truth_dd_lanes.inc"
#pragma clang attribute pop
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#define VL 4
#define N(x) PASTE(x, v4)
#define EXACT_ERROR(a, b, p) (vd)_mm256_fmsub_pd((__m256d)(a), (__m256d)(b), (__m256d)(p))
#define TR_DD_NAME "avx2"
#include "truth_dd_lanes.inc"
#pragma clang attribute pop
#pragma GCC pop_options
#endif

/* Any CPU: the error of a product after Dekker 1971 and Veltkamp, exact barring overflow and underflow. */
static inline __attribute__((always_inline)) double split_high(double a) {
    const double c = 134217729.0 * a;
    return c - (c - a);
}
typedef double pair __attribute__((vector_size(16)));
static inline pair dekker(pair a, pair b, pair p) {
    pair e;
    for (int i = 0; i < 2; i++) {
        const double ah = split_high(a[i]), bh = split_high(b[i]), al = a[i] - ah, bl = b[i] - bh;
        e[i] = ((ah * bh - p[i]) + ah * bl + al * bh) + al * bl;
    }
    return e;
}
#define VL 2
#define N(x) PASTE(x, v2)
#define EXACT_ERROR(a, b, p) dekker(a, b, p)
#define TR_DD_NAME "plain"
#include "truth_dd_lanes.inc"

const tr_dd_lanes *tr_dd_choose(const char *name) {
    const tr_dd_lanes *all[] = {
#if defined(__x86_64__)
        __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") ? &lanes_v8 : NULL,
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &lanes_v4 : NULL,
#endif
        &lanes_v2};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i] && (!name || !strcmp(name, all[i]->name))) return all[i];
    return NULL;
}
