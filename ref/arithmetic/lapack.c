/* Products and solves over CBLAS and LAPACKE as a table (ref/arithmetic/linear.h). */
#include "linear.h"

#include <cblas.h>
#include <lapacke.h>
#include <stdint.h>

static CBLAS_TRANSPOSE op(int trans) { return trans ? CblasTrans : CblasNoTrans; }

static void mul_f64(dp_shape s, const double *A, const double *B, double *C) {
    cblas_dgemm(CblasRowMajor, op(s.ta), op(s.tb), s.m, s.n, s.k, 1, A, s.ta ? s.m : s.k, B,
                s.tb ? s.k : s.n, 0, C, s.n);
}

static void sgemm(dp_shape s, float alpha, const float *A, const float *B, float beta, float *C) {
    cblas_sgemm(CblasRowMajor, op(s.ta), op(s.tb), s.m, s.n, s.k, alpha, A, s.ta ? s.m : s.k, B,
                s.tb ? s.k : s.n, beta, C, s.n);
}
static void mul_f32(dp_shape s, const float *A, const float *B, float *C) {
    sgemm(s, 1, A, B, 0, C);
}
static void add_mul_f32(dp_shape s, float alpha, const float *A, const float *B, float *C) {
    sgemm(s, alpha, A, B, 1, C);
}

/* CBLAS reads neither the diagonal nor the upper half. */
static void solve_f64(int n, int cols, int trans, const double *L, double *X) {
    cblas_dtrsm(CblasRowMajor, CblasLeft, CblasLower, op(trans), CblasUnit, n, cols, 1, L, n, X,
                cols);
}
static void solve_f32(int n, int cols, int trans, const float *L, float *X) {
    cblas_strsm(CblasRowMajor, CblasLeft, CblasLower, op(trans), CblasUnit, n, cols, 1, L, n, X,
                cols);
}

/* LAPACKE without its NaN check, since a NaN must come out again. It leaves the diagonal and the
 * upper half alone. */
static void invert_f64(int n, const double *L, double *T) {
    for (int i = 0; i < n; i++)
        for (int j = 0; j < n; j++)
            T[(int64_t)i * n + j] = j < i ? L[(int64_t)i * n + j] : i == j;
    LAPACKE_dtrtri_work(LAPACK_ROW_MAJOR, 'L', 'U', n, T, n);
}
static void invert_f32(int n, const float *L, float *T) {
    for (int i = 0; i < n; i++)
        for (int j = 0; j < n; j++)
            T[(int64_t)i * n + j] = j < i ? L[(int64_t)i * n + j] : (float)(i == j);
    LAPACKE_strtri_work(LAPACK_ROW_MAJOR, 'L', 'U', n, T, n);
}

const dp_linear dp_linear_lapack = {"lapack",  mul_f64,   mul_f32,    add_mul_f32,
                                    solve_f64, solve_f32, invert_f64, invert_f32};
