/* The double-double recurrence on vectors of 8 doubles, AVX-512 (truth_dd.h). */
#include "truth_dd.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#pragma GCC target("avx512f,avx512dq,avx2,fma")
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx2,fma"))), \
                             apply_to = function)
#define VL 8
#define LANES tr_dd_avx512
#define TR_DD_NAME "avx512"
#define EXACT_ERROR(a, b, p) (vd) _mm512_fmsub_pd((__m512d)(a), (__m512d)(b), (__m512d)(p))
#include "truth_dd_lanes.inc"
#pragma clang attribute pop
#endif
