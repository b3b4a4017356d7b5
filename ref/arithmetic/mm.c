/* Matrix products in a number format (ref/arithmetic/mm.h). */
#include "mm.h"
#include "ref/vocabulary/formats_core.h"
#include "ref/vocabulary/problem.h"

#include <stdlib.h>

DP_NOT_SO("-Wanalyzer-null-dereference") /* callers of tf32x3 have lo */
/* The operand as the format sees it; lo (tf32x3 only) is what the leading part leaves over. */
static void round_operand(dp_format f, const double *x, int64_t n, float *hi, float *lo) {
    switch (f) {
    case DP_TF32:
        for (int64_t i = 0; i < n; i++)
            hi[i] = dp_tf32_core((float)x[i]);
        break;
    case DP_TF32RZ:
        for (int64_t i = 0; i < n; i++)
            hi[i] = dp_tf32rz_core((float)x[i]);
        break;
    case DP_BF16:
        for (int64_t i = 0; i < n; i++)
            hi[i] = dp_bf16_core((float)x[i]);
        break;
    case DP_FP16:
        for (int64_t i = 0; i < n; i++)
            hi[i] = dp_fp16_from_bits(dp_fp16_bits(x[i]));
        break;
    case DP_TF32X3:
        for (int64_t i = 0; i < n; i++) {
            hi[i] = dp_tf32_core((float)x[i]);
            lo[i] = dp_tf32_core((float)x[i] - hi[i]);
        }
        break;
    default:
        for (int64_t i = 0; i < n; i++)
            hi[i] = (float)x[i];
    }
}

/* tf32x3: small terms first, hi*hi last. |lo| <= 2^-11 |x|, so the additions to C and the sums of
 * small terms stay inside dp_eta. */
static void mul_x3(const dp_linear *by, dp_shape s, const double *A, const double *B, float *c) {
    const int64_t na = (int64_t)s.m * s.k, nb = (int64_t)s.k * s.n;
    DP_OWN float *a = dp_alloc((size_t)(2 * (na + nb)), sizeof *a);
    float *al = a + na, *b = al + na, *bl = b + nb;
    round_operand(DP_TF32X3, A, na, a, al);
    round_operand(DP_TF32X3, B, nb, b, bl);
    by->mul_f32(s, al, b, c);
    by->add_mul_f32(s, 1, a, bl, c);
    by->add_mul_f32(s, 1, a, b, c);
}

static void mul_rounded(const dp_linear *by, dp_format f, dp_shape s, const double *A,
                        const double *B, float *c) {
    const int64_t na = (int64_t)s.m * s.k, nb = (int64_t)s.k * s.n;
    DP_OWN float *a = dp_alloc((size_t)(na + nb), sizeof *a);
    float *b = a + na;
    round_operand(f, A, na, a, NULL);
    round_operand(f, B, nb, b, NULL);
    by->mul_f32(s, a, b, c);
}

void dp_mm_by(const dp_linear *by, dp_format f, dp_shape s, const double *A, const double *B,
              double *C) {
    if (f == DP_FP64) {
        by->mul_f64(s, A, B, C);
        return;
    }
    const int64_t n = (int64_t)s.m * s.n;
    DP_OWN float *c = dp_alloc((size_t)n, sizeof *c);
    if (f == DP_TF32X3)
        mul_x3(by, s, A, B, c);
    else
        mul_rounded(by, f, s, A, B, c);
    for (int64_t i = 0; i < n; i++)
        C[i] = f == DP_BF16ST ? dp_bf16_core(c[i]) : c[i];
}

void dp_mm(dp_format f, int ta, int tb, int m, int n, int k, const double *A, const double *B,
           double *C) {
    dp_mm_by(&dp_linear_own, f, (dp_shape){ta, tb, m, n, k}, A, B, C);
}
