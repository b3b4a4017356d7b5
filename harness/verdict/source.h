/* harness/verdict/source.h - the place whose data stands in a wrong row of an exact case
 * (ref/inputs/inputs_exact.c). Every input there carries the signature of its head, sequence and
 * token, and nothing rounds. Five readings, the first that fits names the source; none is guessed
 * from sizes of errors:
 *   whole rows       the row is, bit for bit, what another row of the same tensor should be
 *   values           in the basis of the keys a row of a state, or o, is one or two rows of v or of
 *                    the initial state times powers of two: those rows are found
 *   exponents        numbers of a state's gradient lie 9 binary places apart between sequences
 *   decays           M, H, dM or dH is what the chunks make with the decays to the chunk's end of
 *                    another rank or head
 *   nothing          every wrong entry is zero, or NaN
 * The sentence names one wrong place (rank, head) and the source of most of its wrong rows. These
 * are at least two rows and a quarter of those looked at. Whole rows: three of different content,
 * the same number of tokens away. */
#pragma once
#include "compare.h"
#include "ref/vocabulary/problem.h"

typedef enum { DP_ROWS, DP_ROWS_OF_V, DP_STATES_OF_V, DP_STATES_OF_DO, DP_DECAYS } dp_source_kind;

typedef struct {
    int rank, head, sequence;
    int64_t token;
} dp_source_place; /* -1: not said */
typedef struct {
    dp_source_place at, from; /* the wrong place; whose data it holds */
    int rows, of; /* wrong rows that come from there, of those looked at; 0: no source found */
    int nothing;  /* zeros or NaN alone, and no source */
    char says[320];
} dp_source;
/* in: as compared; p: a problem of exact inputs. */
void dp_source_find(const dp_problem *p, const dp_compare_in *in, dp_source *out);

/* The state that a row lacks, of any case. Writes text and returns 1 where a missing state explains
 * nine tenths of the row's error, else 0.
 *   field   DP_RESULT_O or DP_RESULT_FINAL_STATE
 *   row     the failed one
 *   got     the whole tensor
 *   drop    bits that are claimed, 0: none */
int dp_lost_state(const dp_problem *p, int field, const dp_row *row, const double *got, int drop,
                  char *text, size_t size);
