/* ref/arithmetic/linear.h - who multiplies matrices and solves triangular systems: tables of the
 * same operations.
 *
 *   dp_linear_own     ref/arithmetic/product.h and ref/arithmetic/triangle.h: the same bits
 *                     everywhere. What simulated ranks, draws, bounds and references use.
 *   dp_linear_lapack  CBLAS and LAPACKE: orders of summation, and so the last bits, are those of
 *                     the BLAS at hand and the CPU. What the backend `lapack` uses, a subject that
 *                     is judged like any other.
 * Every function of either keeps the guarantees of product.h and triangle.h, but for the order of
 * operations.
 */
#pragma once
#include "product.h"
DP_C_BEGIN

typedef struct {
    const char *name;
    void (*mul_f64)(dp_shape s, const double *A, const double *B, double *C);
    void (*mul_f32)(dp_shape s, const float *A, const float *B, float *C);
    void (*add_mul_f32)(dp_shape s, float alpha, const float *A, const float *B, float *C);
    void (*solve_f64)(int n, int cols, int trans, const double *L, double *X);
    void (*solve_f32)(int n, int cols, int trans, const float *L, float *X);
    void (*invert_f64)(int n, const double *L, double *T);
    void (*invert_f32)(int n, const float *L, float *T);
} dp_linear;
extern const dp_linear dp_linear_own, dp_linear_lapack;

DP_C_END
