/* ref/arithmetic/spectral.h - a proven upper bound of the largest eigenvalue of a symmetric matrix,
 * with the same bits everywhere. */
#pragma once

/* G [n][n] and its bits are symmetric. The result is at least lambda, and for G = A'A at most
 * lambda (1 + 4 (n + 2)^2 2^-52). It is an estimate (Householder tridiagonalisation, bisection)
 * that a Cholesky factorisation then proves (derivation in spectral.c). Where that fails, which has
 * not been seen, the largest row sum of |G|. Not finite: infinity. n = 0: 0. */
double dp_eigenvalue_up(int n, const double *G);
