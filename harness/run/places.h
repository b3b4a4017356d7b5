/* harness/run/places.h - where a row of a result stands: rank, head, sequence, chunk, token. */
#ifndef DP_PLACES_H
#define DP_PLACES_H
#include "harness/verdict/compare.h"
#include "ref/vocabulary/problem.h"

/* Context of dp_place_of_field's functions. */
typedef struct {
    const dp_problem *p;
    dp_result_id field;
    int heads, per;      /* rows of a token: [heads][per] */
    int N;               /* ranks */
    const int *chunk_of; /* [T]: index of the chunk that holds a token */
} dp_field_places;
/* The function that maps a row of the result to rank, head, sequence and token. */
dp_place_fn *dp_place_of_field(dp_result_id field);

/* Rows that are some of the (rank, head) pairs: ctx says of each row which pair it is. */
typedef struct {
    int HV;
    const int *pair; /* [rows]: rank * HV + head */
} dp_rank_places;
dp_place_fn dp_place_rank_row;

#endif
