/* The double-double recurrence on vector lanes (truth_dd.h). */
#include "ref/arithmetic/isa.h"
#include "truth_dd.h"

#include <string.h>

#define PASTE_(a, b) a##_##b
#define PASTE(a, b) PASTE_(a, b)

#if defined(__x86_64__)
#include <immintrin.h>
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx2,fma")
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx2,fma"))), \
                             apply_to = function)
#define VL 8
#define N(x) PASTE(x, v8)
#define EXACT_ERROR(a, b, p) (vd) _mm512_fmsub_pd((__m512d)(a), (__m512d)(b), (__m512d)(p))
#define TR_DD_NAME "avx512"
#include "truth_dd_lanes.inc"
#pragma clang attribute pop
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#define VL 4
#define N(x) PASTE(x, v4)
#define EXACT_ERROR(a, b, p) (vd) _mm256_fmsub_pd((__m256d)(a), (__m256d)(b), (__m256d)(p))
#define TR_DD_NAME "avx2"
#include "truth_dd_lanes.inc"
#pragma clang attribute pop
#pragma GCC pop_options
#endif

/* Any CPU: the error of a product after Dekker 1971 and Veltkamp, exact barring overflow and
 * underflow. */
static inline __attribute__((always_inline)) double split_high(double a) {
    const double c = 134217729.0 * a;
    return c - (c - a);
}
static inline __attribute__((always_inline)) double dekker(double a, double b, double p) {
    const double ah = split_high(a), bh = split_high(b), al = a - ah, bl = b - bh;
    return ((ah * bh - p) + ah * bl + al * bh) + al * bl;
}
#define EACH(a, b, p)                                   \
    ({                                                  \
        vd e_;                                          \
        for (int i_ = 0; i_ < VL; i_++)                 \
            e_[i_] = dekker((a)[i_], (b)[i_], (p)[i_]); \
        e_;                                             \
    })
#define VL 2
#define N(x) PASTE(x, v2)
#define EXACT_ERROR(a, b, p) EACH(a, b, p)
#define TR_DD_NAME "plain"
#include "truth_dd_lanes.inc"
/* As wide as AVX-512 on any CPU: tests of the order of sums, never the choice of a run. */
#pragma GCC diagnostic ignored "-Wpsabi"
#define VL 8
#define N(x) PASTE(x, wide)
#define EXACT_ERROR(a, b, p) EACH(a, b, p)
#define TR_DD_NAME "wide"
#include "truth_dd_lanes.inc"

const tr_dd_lanes *tr_dd_choose(const char *name) {
    const tr_dd_lanes *all[] = {
#if defined(__x86_64__)
        dp_isa_here(DP_ISA_AVX512) && (name || dp_isa_chosen() >= DP_ISA_AVX512) ? &lanes_v8 : NULL,
        dp_isa_here(DP_ISA_AVX2) && (name || dp_isa_chosen() >= DP_ISA_AVX2) ? &lanes_v4 : NULL,
#endif
        &lanes_v2,
        &lanes_wide
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i] && (!name || !strcmp(name, all[i]->name))) return all[i];
    return NULL;
}
