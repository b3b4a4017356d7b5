/* harness/verdict/row_map.h - which window each row of a tensor belongs to.
 *
 * Windows of tokens are the 64-token chunks of a rank and sequence, whatever the chunks of a design
 * are. They restart at every local sub-sequence and count rank by rank.
 */
#ifndef DP_ROW_MAP_H
#define DP_ROW_MAP_H
#include "draws.h"
#include "ref/vocabulary/problem.h"
#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    const dp_problem *p;
    int N, windows;
    int *window_of; /* [T] */
} dp_windows;

/* N divides T (dp_context_build). */
dp_windows dp_windows_of(const dp_problem *p, int N);
/* Frees what it holds; the struct is the caller's. */
void dp_windows_free(dp_windows *w);

/* Rows of tokens: [T][heads][per][width]. To be freed with dp_row_map_free, like the others. */
dp_row_map dp_map_tokens(const dp_windows *w, int heads, int per, int width);
/* n rows that are windows of their own. */
dp_row_map dp_map_rows(int64_t n, int width);
/* n states [K][V], windows of their own, looked at by their K rows. */
dp_row_map dp_map_states(int64_t n, int K, int V);
/* Frees what it holds; the struct is the caller's. */
void dp_row_map_free(dp_row_map *m);

/* The map of result field `field` (dp_result_fields); rows 0: it does not exist here. */
dp_row_map dp_map_field(const dp_windows *w, int field);

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

#ifdef __cplusplus
}
#endif
#endif
