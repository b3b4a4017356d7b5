/* ref/arithmetic/low_rank.h - a matrix as the singular values above a tolerance, in fp64. */
#pragma once

/* U [K][r] and W [r][K] with |M - U W|_2 <= tolerance (1 + 2^-40), r as small as the singular
 * values allow; both are to be freed. Returns r. */
int dp_low_rank(const double *M, int K, double tolerance, double **U, double **W);
