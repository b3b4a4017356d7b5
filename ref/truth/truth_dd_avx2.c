/* The double-double recurrence on vectors of 4 doubles, AVX2 (truth_dd.h). */
#include "truth_dd.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#pragma GCC target("avx2,fma")
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#define VL 4
#define LANES tr_dd_avx2
#define TR_DD_NAME "avx2"
#define EXACT_ERROR(a, b, p) (vd) _mm256_fmsub_pd((__m256d)(a), (__m256d)(b), (__m256d)(p))
#include "truth_dd_lanes.inc"
#pragma clang attribute pop
#endif
