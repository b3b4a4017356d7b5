/* ref/arithmetic/triangle.h - triangular systems and inverses in fp64 and fp32, in an order of
 * operations that is part of the definition.
 *
 * L [n][n] is unit lower triangular, row-major: only what lies strictly below its diagonal is read.
 * X [n][cols].
 *
 *   dp_solve_*          X <- L^(-1) X    x_i <- fl(x_i - fl(L[i][j] x_j)),  j = 0 .. i-1
 *                                        rows i = 0 .. n-1
 *   dp_solve_*, trans   X <- L^(-T) X    x_i <- fl(x_i - fl(L[j][i] x_j)),  j = n-1 .. i+1
 *                                        rows i = n-1 .. 0
 *   dp_invert_*         T [n][n] = L^(-1), column by column as dp_solve_* of the identity, zeros
 *                       above the diagonal
 *
 * One rounding a product, one a difference, nothing fused; the bits depend on neither the CPU nor
 * blocking. Guarantee, barring underflow: every column solves (L + dL) x = b with |dL| <= gamma_n
 * |L| (Higham, Accuracy and Stability, 8.5). Hence |L T - I| <= gamma_n |L||T| (14.2).
 */
#pragma once

/* X <- L^(-1) X, or L^(-T) X where trans; in place. */
void dp_solve_f64(int n, int cols, int trans, const double *L, double *X);
/* The same in fp32. */
void dp_solve_f32(int n, int cols, int trans, const float *L, float *X);
/* T = L^(-1), all n n entries; T must not overlap L. */
void dp_invert_f64(int n, const double *L, double *T);
/* The same in fp32. */
void dp_invert_f32(int n, const float *L, float *T);
