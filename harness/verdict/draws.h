/* harness/verdict/draws.h - errors of correct runs: what a design makes of inputs like these.
 *
 * A draw is one run of the declared design on a nearby problem, minus the fp64 reference of that
 * same problem (expected.h). A tensor is [rows][width]; rows are grouped in windows: the rows of
 * one head in one 64-token window of a rank and sequence, or one state, or one row that has no
 * token. All errors of D draws are kept as sums, by row and by window:
 *
 *   err2   |got - want|^2 of each row
 *   along  <got - want, d> of each window, d the vector of a direction, and |d|^2
 *   part   for sums over tokens (dA_log, ddt_bias): the share that each window of tokens has in the
 *          error of the sum
 */
#ifndef DP_DRAWS_H
#define DP_DRAWS_H
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

/* Directions in which errors of correct kernels are nearly balanced and those of some wrong ones
 * are not: along the tensor itself (a factor), along one sign (an offset), and against the sign of
 * each entry by its spacing (truncation in place of rounding). */
typedef enum { DP_ALONG_VALUE, DP_ALONG_OFFSET, DP_ALONG_ZERO, DP_NDIRECTIONS } dp_direction;
extern const char *const dp_direction_names[DP_NDIRECTIONS]; /* factor, offset, truncation */

typedef struct {
    int ndraw;
    int64_t rows, windows, parts; /* parts: shares of every row; 0: not a sum over tokens */
    int width;
    double *err2;    /* [ndraw][rows]; NULL: the tensor does not exist here */
    double *along;   /* [ndraw][DP_NDIRECTIONS][windows] <err, d>, d not of unit length */
    double *length2; /* the same, |d|^2: of which windows a tensor consists is known to its judge */
    double *part;    /* [ndraw][parts][rows][width]; NULL when parts is 0 */
} dp_draws;

/* How the rows of a tensor [rows][width] are looked at: each is cut into `subrows` (a state
 * into its K rows), and belongs to a window. */
typedef struct {
    int64_t rows, windows;
    int width, subrows;
    const int32_t *window; /* [rows] */
} dp_row_map;

/* Zeros. parts: of every row, 0: not a sum over tokens. */
void dp_draws_alloc(dp_draws *d, int ndraw, const dp_row_map *map, int64_t parts);
/* Frees what it holds; the struct is the caller's. */
void dp_draws_free(dp_draws *d);

/* Sums of one error: err2 [rows * subrows] and along [DP_NDIRECTIONS][windows] are added to,
 * length2 likewise [..] is set (both NULL: not wanted). err, want: [rows][width]. An entry where
 * either is not finite makes its row infinite, and counts in no direction. */
void dp_sum_errors(const dp_row_map *map, const double *err, const double *want, double *err2,
                   double *along, double *length2);

/* The entry of a direction's vector (not yet of unit length) where the tensor is `want`. Spacing is
 * that of bf16 for every format: only its relation between entries counts. */
double dp_direction_entry(dp_direction d, double want);

#ifdef __cplusplus
}
#endif
#endif
