/* ref/arithmetic/product.h - matrix products in fp64 and fp32, in an order of operations that is
 * part of the definition.
 *
 * C [m][n] = op(A) op(B), row-major and dense: A is [m][k] (or [k][m] when ta), B [k][n] (or [n][k]
 * when tb). Every entry of C is one running sum over k from first to last, started at +0: s <- fl(s
 * + fl(A[i][x] B[x][j])),  x = 0 .. k-1          one rounding a product, one a sum, nothing fused
 *     dp_mul_*      C = s
 *     dp_add_mul_*  C = fl(C + fl(alpha s))
 * So the bits depend on neither the CPU, nor blocking, nor threads. Guarantee, barring underflow:
 * |s - op(A) op(B)| <= gamma_k |op(A)||op(B)| (Higham, Accuracy and Stability, 3.5). C must not
 * overlap A or B. Each of m, n, k may be 0.
 */
#pragma once
#include "ref/vocabulary/linkage.h"
DP_C_BEGIN

typedef struct {
    int ta, tb, m, n, k;
} dp_shape;

/* C = s; every entry of C is written. */
void dp_mul_f64(dp_shape s, const double *A, const double *B, double *C);
/* C = fl(C + fl(alpha s)). */
void dp_add_mul_f64(dp_shape s, double alpha, const double *A, const double *B, double *C);
/* The same in fp32. */
void dp_mul_f32(dp_shape s, const float *A, const float *B, float *C);
/* The same in fp32. */
void dp_add_mul_f32(dp_shape s, float alpha, const float *A, const float *B, float *C);

DP_C_END
