#include "mm.h"
#include "problem.h"

#include <cblas.h>
#include <stdlib.h>

dp_format dp_base_format(dp_base b) { return b == DP_BASE_FP64 ? DP_FP64 : b == DP_BASE_FP32 ? DP_FP32 : DP_BF16; }

static void sgemm(int ta, int tb, int m, int n, int k, const float *A, const float *B, float beta, float *C) {
    cblas_sgemm(CblasRowMajor, ta ? CblasTrans : CblasNoTrans, tb ? CblasTrans : CblasNoTrans, m, n, k, 1.0f, A, ta ? m : k, B, tb ? k : n,
                beta, C, n);
}

/* The operand as the format sees it; lo (tf32x3 only) is what the leading part leaves over. */
static void round_operand(dp_format f, const double *x, int64_t n, float *hi, float *lo) {
    switch (f) {
    case DP_TF32: for (int64_t i = 0; i < n; i++) hi[i] = dp_tf32((float)x[i]); break;
    case DP_TF32RZ: for (int64_t i = 0; i < n; i++) hi[i] = dp_tf32rz((float)x[i]); break;
    case DP_BF16: for (int64_t i = 0; i < n; i++) hi[i] = dp_bf16((float)x[i]); break;
    case DP_FP16: for (int64_t i = 0; i < n; i++) hi[i] = dp_fp16_from_bits(dp_fp16_bits(x[i])); break;
    case DP_TF32X3:
        for (int64_t i = 0; i < n; i++) {
            hi[i] = dp_tf32((float)x[i]);
            lo[i] = dp_tf32((float)x[i] - hi[i]);
        }
        break;
    default: for (int64_t i = 0; i < n; i++) hi[i] = (float)x[i];
    }
}

void dp_mm(dp_format f, int ta, int tb, int m, int n, int k, const double *A, const double *B, double *C) {
    if (f == DP_FP64) {
        cblas_dgemm(CblasRowMajor, ta ? CblasTrans : CblasNoTrans, tb ? CblasTrans : CblasNoTrans, m, n, k, 1.0, A, ta ? m : k, B, tb ? k : n,
                    0.0, C, n);
        return;
    }
    const int64_t na = (int64_t)m * k, nb = (int64_t)k * n, nc = (int64_t)m * n;
    float *a = dp_calloc((size_t)(2 * na + 2 * nb + nc), sizeof *a), *al = a + na, *b = al + na, *bl = b + nb, *c = bl + nb;
    round_operand(f, A, na, a, al);
    round_operand(f, B, nb, b, bl);
    if (f == DP_TF32X3) {                                        /* small terms first */
        sgemm(ta, tb, m, n, k, al, b, 0, c);
        sgemm(ta, tb, m, n, k, a, bl, 1, c);
    }
    sgemm(ta, tb, m, n, k, a, b, f == DP_TF32X3, c);
    if (f == DP_BF16ST) for (int64_t i = 0; i < nc; i++) C[i] = dp_bf16(c[i]);
    else for (int64_t i = 0; i < nc; i++) C[i] = c[i];
    free(a);
}
