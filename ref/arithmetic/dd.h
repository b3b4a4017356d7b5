/* ref/arithmetic/dd.h - matrix products in double-double arithmetic (an unevaluated sum hi + lo,
 * about 106 bits).
 *
 * C = A B, row-major: A [m][k], B [k][n]; Al or Bl NULL: exact doubles. C must not overlap. Bits do
 * not depend on threads or CPU.
 * Guarantee, barring underflow and overflow:
 *   |Ch + Cl - A B| <= (k + 2) 2^-100 |A||B|   (derivation in dd.c)
 */
#pragma once
#define DP_DD_ETA(k) (((k) + 2) * 0x1p-100)
/* C = A B as above; every array is the caller's. */
void dp_dd_mm(int m, int n, int k, const double *Ah, const double *Al, const double *Bh,
              const double *Bl, double *Ch, double *Cl);
