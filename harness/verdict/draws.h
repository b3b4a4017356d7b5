/* harness/verdict/draws.h - errors of correct runs: what a design makes of inputs like these.
 *
 * A draw is one run of the declared design on a nearby problem, minus the fp64 reference of that
 * same problem (expected.h). A tensor is [rows][width]; rows are grouped in windows. A window is
 * the rows of one head in one 64-token window of a rank and sequence. It may also be one state, or
 * one row that has no token. All errors of D draws are kept as sums, by row and by window:
 *
 *   err2   |got - want|^2 of each row
 *   column2  the same of each channel of a head (of a state: of each of its columns), over its rows
 *   along  <got - want, d> of each window, d the vector of a direction, and |d|^2
 *   part   for sums over tokens (dA_log, ddt_bias): the share that each window of tokens has in the
 *          error of the sum
 */
#pragma once
#include "ref/vocabulary/problem.h"
#include <stdint.h>

/* Directions in which errors of correct kernels are nearly balanced, and those of some wrong ones
 * are not. They are along the tensor itself (a factor), along one sign (an offset), and against the
 * sign of each entry by its spacing (truncation). */
typedef enum { DP_ALONG_VALUE, DP_ALONG_OFFSET, DP_ALONG_ZERO, DP_NDIRECTIONS } dp_direction;

typedef struct {
    int ndraw;
    int64_t rows, windows, parts; /* parts: shares of every row; 0: not a sum over tokens */
    int64_t columns;              /* groups of rows * width; 0: not looked at by columns */
    int width;
    double *err2;    /* [ndraw][rows]; NULL: the tensor does not exist here */
    double *blank;   /* [ndraw][rows] entries without an error: they count nowhere */
    double *column2; /* [ndraw][columns] */
    double *along;   /* [ndraw][DP_NDIRECTIONS][windows] <err, d>, d not of unit length */
    double *length2; /* the same, |d|^2: of which windows a tensor consists is known to its judge */
    double *part;    /* [ndraw][parts][rows][width]; NULL when parts is 0 */
} dp_draws;

/* The division of a tensor [rows][width]: each row is cut into `subrows` (a state into its K rows),
 * and belongs to a window. */
typedef struct {
    int64_t rows, windows;
    int width, subrows;
    /* row r is of group r / per % groups (a head; a state), by which columns are summed; 0: none */
    int64_t groups, per;
    const int32_t *window; /* [rows] */
} dp_row_map;

/* Where the sums of one error go, in the shapes of a draw. Each NULL: not wanted, but along and
 * length2 together. */
typedef struct {
    double *err2, *blank, *column2, *along, *length2;
} dp_error_sums;

/* Zeros. parts: of every row, 0: not a sum over tokens. */
void dp_draws_alloc(dp_draws *d, int ndraw, const dp_row_map *map, int64_t parts);
void dp_draws_free(dp_draws *d);

/* The sums of draw k of d. */
dp_error_sums dp_draws_at(const dp_draws *d, int k);

/* Sums of one error: err2 [rows * subrows], column2 and along [DP_NDIRECTIONS][windows] are added
 * to, blank and length2 are set. err, want: [rows][width]. An entry where one of them is not finite
 * is blank, and counts nowhere else. */
void dp_sum_errors(const dp_row_map *map, const double *err, const double *want,
                   const dp_error_sums *to);

/* The entry of a direction's vector (not yet of unit length) where the tensor is `want`. Spacing is
 * that of bf16 for every format: only its relation between entries counts. */
double dp_direction_entry(dp_direction d, double want);

/* ---- which window each row belongs to ------------------------------------------------- */

/* Windows of tokens are the 64-token chunks of a rank and sequence, whatever the chunks of a design
 * are. They restart at every local sub-sequence and count rank by rank. */
typedef struct {
    const dp_problem *p;
    int N, windows;
    int *window_of; /* [T] */
} dp_windows;

/* N divides T (dp_context_build). */
dp_windows dp_windows_of(const dp_problem *p, int N);
void dp_windows_free(dp_windows *w);

/* n states [K][V], windows of their own, looked at by their K rows. */
dp_row_map dp_map_states(int64_t n, int K, int V);
void dp_row_map_free(dp_row_map *m);

/* How many degrees of freedom the error of a row has at most, by count.
 *
 * A row of o or dq sums vectors over the tokens up to itself. A row of dk or dv sums over the
 * tokens from itself on. Much of its error is that of each vector's factor, a product of two rows:
 * one number a token. So the error of a sequence's first row of dq, or its last one of dk, is
 * little more than one number a value head. A few draws cannot tell it from one of many.
 */
/* [T][heads][rows of a token] of a result field, to be freed. Tokens that it sums over, times the
 * numbers of a token: its keys and, if value heads are added up, these. NULL: no limit, since an
 * initial state enters every row, or the field sums otherwise. */
double *dp_row_freedom_new(const dp_problem *p, dp_result_id field);
