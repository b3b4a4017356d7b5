/* harness/verdict/bits.h - effective number of bits of an M chain (math.md j.7): which format its
 * error behaves like, and whether it is biased.
 *
 * Only for factors that forget nothing (regime `reflect`): elsewhere errors are forgotten, stall or
 * repeat. The subject's error is read after 16, 32, .. 256 factors and the width of the numbers
 * that it stores; the yardstick A_n (math.md j.4) comes from the factors alone:
 *
 *   A_n^2 = sum of all entries of V_n,
 *           for rounding of the stored product, of the operands, or inside the accumulation
 *   u_eff = |err|_F / (0.425 A_n),   bits = -log2 u_eff,
 *   slope = d log |err| / d log n: 0.5 unbiased rounding, 1 biased
 *
 * 0.425 = sqrt(1/(8 ln 2)): rms of round to nearest over u for log-uniform significands.
 */
#pragma once
#include "ref/vocabulary/formats.h"

typedef enum { DP_BITS_STORE, DP_BITS_OPERAND, DP_BITS_ACCUMULATE, DP_NBITMODELS } dp_bits_model;
extern const char *const dp_bits_models[DP_NBITMODELS];
#define DP_BITS_POINTS 5
#define DP_BITS_MARGIN \
    0.5 /* bits below the claim that fail; spread of readings over seeds: test_bits.c */

/* Yardsticks of one list of factors, from the factors and fp64 products alone. */
typedef struct {
    int K, npoint, chunks[DP_BITS_POINTS];
    double A[DP_BITS_POINTS][DP_NBITMODELS];
    double *P[DP_BITS_POINTS]; /* [K][K] fp64 products */
} dp_bits_scale;
/* M [n][K][K]; npoint = 0 when n < 16 */
void dp_bits_scale_init(dp_bits_scale *s, int n, int K, const double *M);
void dp_bits_scale_free(dp_bits_scale *s);

typedef struct {
    int npoint, chunks[DP_BITS_POINTS];
    double at[DP_BITS_POINTS][DP_NBITMODELS]; /* readings, one a length */
    double bits[DP_NBITMODELS];               /* their means */
    /* bits of truncated operands that shrink M as fast (math.md j.4); NAN when the error is not
     * along -M */
    double truncated;
    int width;    /* significant bits of the widest number in the results: what the chain stores */
    double slope; /* NAN with fewer than 3 lengths */
    int biased;   /* slope above 0.75, midway between the two laws */
    dp_bits_model model; /* where the rounding happens */
    double effective;    /* truncated where it applies, else bits[model] */
    int like;            /* dp_format with that law, -1: none within the margin */
    int wrong; /* 1: fewer bits than the claim less the margin, or biased against the claim */
    char says[240];
} dp_bits;
/* err, got: [npoint][K*K] error and result after chunks[i] factors. A result without any error
 * leaves npoint = 0. */
void dp_bits_read(const dp_bits_scale *s, const double *err, const double *got, dp_format claimed,
                  dp_bits *out);
