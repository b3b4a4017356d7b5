/* ref/vocabulary/stored.h - states as they are stored between the calls of a server.
 *
 *   fp16sr          one of the two neighbours in fp16, by chance: the mean of what is read is what
 *                   was written. Chance is a hash of the number and its place, so that the same
 *                   state is stored alike every time
 *   F-S             a number is s f(x / s), read in fp32: f rounds to nearest even in the format F,
 *                   s is the largest |x| of its share S over the largest number of F, in fp32
 *   F: e4m3         3 stored fraction bits, least normal 2^-6, largest 448; no infinity
 *      e5m2         2 stored fraction bits, least normal 2^-14, largest 57344
 *      int8         integers from -127 to 127
 *   S: tensor       all heads of a state
 *      head         one head
 *      row          the V entries of a row, one channel of a key
 *      block        32 columns of a row
 * A state that is stored once stays as it is when it is stored again, if its scales are normal
 * numbers of fp32. Smaller ones lose bits, and numbers beyond the largest of F become that. A scale
 * that would be 0 is 1, so that its share becomes zeros. A share that is not finite stays.
 */
#pragma once
#include "formats.h"
DP_C_BEGIN

/* Stores a state S [heads][K][V]; f may be any format of storage, DP_FP64 leaves it. */
void dp_store_state(dp_format f, int heads, int K, int V, double *S);

/* The scale of a share whose largest number is `most`, `number` that of the format. */
double dp_stored_scale(double most, double number);

/* Is its scale that of all heads? */
int dp_stored_by_tensor(dp_format f);
/* Are numbers kept over a scale: fp8, int8? */
int dp_stored_has_scale(dp_format f);

/* Bound of |x stored - x| of head h, as a Frobenius norm, of a state x within `off` [heads] of S in
 * that norm. INFINITY where the format overflows. Each entry errs by at most u |x| + t: the unit
 * roundoff u, and half the spacing t of subnormals or integers. Stochastic rounding doubles both. A
 * scale multiplies t: c times the largest entry of the share.
 * For a state S + E the norm of a share of n entries is at most
 *     u (|S| + |E|) + sqrt(n) c (max |S| + |E|)
 * and shares add in squares. u is 2^-22 larger: scale, quotient and product round in fp32. A
 * subnormal scale is off by 2^-150 at most, times the largest number of F. */
double dp_stored_error(dp_format f, int heads, int K, int V, const double *S, const double *off,
                       int h);

DP_C_END
