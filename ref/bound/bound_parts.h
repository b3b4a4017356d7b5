/* ref/bound/bound_parts.h - the parts of the bounds of the chunk form, and what they share. */
#pragma once
#include "bound.h"

/* bound.c */
/* From a p-th power to the number. */
double dp_bound_root(const dp_rounding *r, double x);
/* |x|, n numbers, to be freed. */
double *dp_bound_absof(const double *x, int64_t n);
/* |x|^p, n numbers, to be freed. */
double *dp_bound_pwof(const dp_rounding *r, const double *x, int64_t n);
/* C += a op(A) op(B), all non-negative. */
void dp_bound_addmm(double a, int ta, int tb, int m, int n, int k, const double *A, const double *B,
                    double *C);
/* op(A) op(B) [m][n], to be freed. */
double *dp_bound_product(int ta, int tb, int m, int n, int k, const double *A, const double *B);
/* D += (a |x|)^p. */
void dp_bound_add_scaled(const dp_rounding *r, double a, const double *x, int64_t n, double *D);
/* D += (a |A||B|)^p: what summation costs. */
void dp_bound_add_sum(const dp_rounding *r, double a, int ta, int tb, int m, int n, int k,
                      const double *aA, const double *aB, double *D);
/* D += what by op(A) op(B) costs: the errors DA and DB (NULL: none), the roundings uo of both as
 * operands (below 0: none). Then those of the sum, relative to that of absolute values. */
void dp_bound_add_product(const dp_rounding *r, double by, dp_shape s, const double *A,
                          const double *DA, const double *B, const double *DB, double uo,
                          double sum, double *D);
/* D += a. */
void dp_bound_add_const(double a, int64_t n, double *D);
/* 2-norm of n numbers. */
double dp_bound_norm2(const double *x, int n);
/* 2-norm of column j of A [m][n]. */
double dp_bound_column_norm(const double *A, int m, int n, int j);
/* p-th power of the 2-norm of a vector of errors whose p-th powers are D. */
double dp_bound_error_norm(const dp_rounding *r, const double *D, int64_t n);

/* bound_state.c */
/* D[i][v] += what an error e of the state adds to sens * state; p = 2. */
void dp_bound_propagate(const dp_rounding *r, const double *sens, int n, int K, int V,
                        const double *e, double *D);
