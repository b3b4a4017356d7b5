/* harness/excess.h - is an error more than these formats make of these inputs? The statistics of the expected tier.
 *
 * A tensor's error is looked at on four levels: cell by cell (a chunk of a head, one state; expected.h), rank and head by rank and head, as a whole,
 * and over all cells alike: a fault behind one boundary in one chunk and a small excess everywhere are both seen. On each level a unit's error
 * |err|_F is divided by its expected size E and held against k:
 *
 *   E^2 = weighted mean of the unit's own mean |err|_F^2 over the draws, and of what its size |want|_F lets expect of it (the tensor's mean of
 *         |err|^2 / |want|^2), which counts as 8 degrees of freedom more; + floor^2, one rounding of the result itself and of
 *         its head's typical row
 *   every  the mean over cells of (|err| / E)^(2/3), to the power 3/2, against what the draws have: no large cell outweighs the others, so it has more degrees of
 *         freedom than the whole tensor where cells differ in size (dg, dbeta: 2 to 3 times as many)
 *   k   = a factor times the larger of sqrt(F quantile at DP_EXCESS_Z standard deviations, DP_EXCESS_Z_WHOLE where a tensor has one unit, for nu and D nu degrees of
 *         freedom) and the largest ratio that one of the draws shows against the others; at most DP_EXCESS_MOST (8 draws of one number do not say
 *         how rare 10 times is, but 60 times is no rounding)
 *   factor  for what the draws cannot show, heavier tails and other orders of summation; by who computes (scripts/soak, reports/device/soak.txt):
 *         DP_EXCESS_SAME   the pipeline that was drawn, in the base that was drawn: of 10,000 runs the largest error is 0.98 times the rest of k
 *         DP_EXCESS_SHORT_SUMS  the same pipeline with sums in another order, in base bf16, where rounding to bf16 outweighs it: the CUDA kernels
 *         reach 1.15 times the rest of k (S_in of an initial state: gpu/NOTES.md says why)
 *         DP_EXCESS_SUMS   the same in fp32, 1.31 times (dk of kda-corr); and base fp64, which is drawn in fp32, 1.3 times
 *         Where how the subject computes is not known (a library, a file): DP_EXCESS_SHORT in base bf16 (FLA: 0.9 to 1.1 of what is expected; dg,
 *         whose pair products it makes in tf32, 4.4 in one window of 128, where the draws alone would allow 4.5), and DP_EXCESS_OTHER elsewhere: a
 *         step recurrence rounds its state at every token, the pipeline once a chunk, which is C = 64 times as many independent roundings, 8 times
 *         the error (one in fp32 has an o at 1.53 over the tensor)
 *   nu  = degrees of freedom of a unit's |err|^2, from how much the draws differ among themselves (2 mean^2 / variance), apart for units of few rows: many where rounding errors are
 *         independent, few where they are correlated (a truncated chain of M, a sum that is one number). A unit has fewer where its own draws differ more than those
 *         of the others, and a rank no more than its windows have together (few where one short window of correlated errors outweighs the rest)
 */
#ifndef DP_EXCESS_H
#define DP_EXCESS_H
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

#define DP_EXCESS_Z 6.0
#define DP_EXCESS_Z_WHOLE 5.5    /* some 60 such units a run, against thousands of cells */
#define DP_EXCESS_SAME 1.2
#define DP_EXCESS_SHORT_SUMS 1.4
#define DP_EXCESS_SUMS 1.5
#define DP_EXCESS_SHORT 3.0
#define DP_EXCESS_OTHER 8.0      /* sqrt(DP_CHUNK) */
#define DP_EXCESS_MOST 60.0

enum { DP_LEVEL_CELL, DP_LEVEL_RANK, DP_LEVEL_TENSOR, DP_LEVEL_EVERY, DP_NLEVELS };
extern const char *const dp_level_names[DP_NLEVELS], *const dp_level_what[DP_NLEVELS];

typedef struct {
    int ndraw;
    int64_t n;                   /* cells; those without rows have err2 = want2 = 0 and belong = -1 */
    const double *e2;            /* [ndraw][n] */
    const double *err2, *want2, *floor2;  /* [n] sums of squares */
    const double *rows;          /* [n] rows of each cell; NULL: as many in each */
    const int *belong;           /* [n] rank * heads + head */
    int nbelong;
    double safety;               /* the factor */
} dp_excess_in;

typedef struct { double ratio, median, limit, nu, draw; int64_t at; int units; } dp_excess_level;   /* |err| / E: the largest, of unit `at`, and the median; draw: the largest of a draw against the others */
typedef struct {
    double expected;             /* E of the whole tensor over |want|_F */
    double excess;               /* largest ratio / limit over the levels; NAN: nothing to judge */
    int level;                   /* where */
    int64_t cell;                /* a cell of that unit: for DP_LEVEL_RANK and up the one with the largest error against its E */
    dp_excess_level at[DP_NLEVELS];
} dp_excess;
void dp_excess_judge(const dp_excess_in *in, dp_excess *out);

#ifdef __cplusplus
}
#endif
#endif
