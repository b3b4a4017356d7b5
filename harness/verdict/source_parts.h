/* harness/verdict/source_parts.h - what the readings of wrong rows share (source.h): rows looked up
 * by content, and the counting of the places that they come from. */
#ifndef DP_SOURCE_PARTS_H
#define DP_SOURCE_PARTS_H
#include "source.h"

#define DP_SOURCE_LOOK \
    64 /* wrong rows looked at in each place; two values in one row are looked for in a quarter */

/* ---- rows by content (source.c) ---- */

/* A row's hash and its number. */
typedef struct {
    uint64_t hash;
    int64_t i;
} dp_source_row;
/* Rows in the order of their hashes. */
typedef struct {
    int64_t n;
    dp_source_row *at;
} dp_source_book;

/* Orders rows by hash, then number (qsort). */
int dp_source_by_hash(const void *a, const void *b);
/* Hash of n numbers; -0 and 0 are one. scale: they are first divided by *lead, the first that is
 * not zero (0: all are). */
uint64_t dp_source_hash(const double *x, int64_t n, int scale, double *lead);
/* The first row with that hash; NULL: none. */
const dp_source_row *dp_source_lookup(const dp_source_book *b, uint64_t h);
/* How many numbers are not zero. */
int dp_source_nonzero(const double *x, int64_t n);
/* Are all numbers equal? */
int dp_source_equal(const double *a, const double *b, int64_t n);

/* ---- counting places (source.c) ---- */

/* A place that rows come from, and an example of them. shift: rows of one source lie that many
 * tokens away. */
typedef struct {
    dp_source_place from;
    int rows;
    int64_t token, for_token, shift;
    int for_rank, for_head, distinct;
    uint64_t seen[3];
} dp_source_candidate; /* token: an example's own */
/* All places that were counted. */
typedef struct {
    int n;
    dp_source_candidate at[64];
} dp_source_tally;

/* Counts one row that comes from a place, at a token, and what should stand there instead; content:
 * of the row. */
void dp_source_count(dp_source_tally *t, dp_source_place from, int64_t token,
                     dp_source_place instead, int64_t shift, uint64_t content);
/* The place that most rows come from; NULL: none was counted. */
const dp_source_candidate *dp_source_most(const dp_source_tally *t);
/* Are these rows at least two, and a quarter of those looked at? */
int dp_source_enough(int rows, int of);
/* Rank, head, sequence and token of a row. */
dp_source_place dp_source_place_at(const dp_compare_in *in, int64_t row);
/* Writes "rank 1, head 2" and, where there are several, the sequence; returns the length. */
int dp_source_place_text(char *s, size_t n, const dp_problem *p, dp_source_place x);

/* ---- readings: each returns 1 when it has found the source of the wrong rows ---- */

/* Wrong rows of one place. */
typedef struct {
    const dp_problem *p;
    const dp_compare_in *in;
    const int64_t *row;
    int n;
    dp_source *out;
} dp_wrong_rows;

/* The rows of v and of the initial state, by content (source_values.c). */
typedef struct dp_source_values dp_source_values;
/* Collects them for a problem on N ranks; to be freed with dp_source_values_close. */
dp_source_values *dp_source_values_open(const dp_problem *p, int N);
/* Frees them; NULL: nothing. */
void dp_source_values_close(dp_source_values *w);
/* Rows of v or of the initial state that stand in rows of o, or (states) in states. */
int dp_source_whose_values(const dp_wrong_rows *x, const dp_source_values *w, int states);
/* Does M, H, dM or dH contain the decays of another rank or head (source_values.c)? The sources go
 * to x->out.
 *   back    1: of the backward
 *   state   1: H, dH
 *   limit   most places with equal decays that are all named */
int dp_source_whose_decays(const dp_wrong_rows *x, int back, int state, int limit);
#endif
