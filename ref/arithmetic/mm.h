/* ref/arithmetic/mm.h - matrix products in a number format.
 *
 * C [m][n] = op(A) op(B), row-major and dense: A is [m][k] (or [k][m] when ta), B [k][n] (or [n][k]
 * when tb). Values are doubles. For every format but fp64 the operands are rounded to the format
 * (fp32, bf16st: to fp32), multiplied and accumulated in fp32. Products of bf16 or tf32 operands
 * are exact in fp32. The result is a double that holds an fp32 number (a bf16 number for bf16st).
 * Guarantee: |C - op(A)op(B)| <= dp_eta(f, k) |op(A)||op(B)|  barring underflow (math.md j.1) C
 * must not overlap A or B.
 *
 * Sums of dp_mm have the order of ref/arithmetic/product.h, so its bits are the same everywhere. In
 * tf32x3 it makes three such sums: lo*hi and hi*lo are added first, hi*hi to them. The function
 * dp_mm_by does the same by one of ref/arithmetic/linear.h.
 */
#pragma once
#include "linear.h"
#include "ref/vocabulary/formats.h"
DP_C_BEGIN

/* C in the order of operations that is the same everywhere. */
void dp_mm(dp_format f, int ta, int tb, int m, int n, int k, const double *A, const double *B,
           double *C);
/* C by that library: within the same bound, its bits are its own. */
void dp_mm_by(const dp_linear *by, dp_format f, dp_shape s, const double *A, const double *B,
              double *C);

DP_C_END
