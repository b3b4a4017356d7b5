/* Where a row of a result stands (places.h). */
#include "places.h"

static int sequence_of(const dp_problem *p, int64_t t) {
    int i = 0;
    while (i < p->Nseq - 1 && p->cu[i + 1] <= t)
        i++;
    return i;
}

static void token_row(const void *ctx, int64_t row, dp_place *at) {
    const dp_field_places *x = ctx;
    at->token = row / ((int64_t)x->heads * x->per);
    at->head = (int)(row / x->per % x->heads);
    at->rank = dp_own_part_of(x->p->own.kind, x->p->T, x->N, at->token);
    at->sequence = sequence_of(x->p, at->token);
    at->chunk = x->chunk_of[at->token];
}

/* [Nseq][HV]: on the rank of the sequence's last token, ds0 on that of its first. */
static void state_row(const void *ctx, int64_t row, dp_place *at) {
    const dp_field_places *x = ctx;
    const dp_problem *p = x->p;
    const int seq = (int)(row / p->HV);
    int64_t t = x->field == DP_RESULT_FINAL_STATE ? p->cu[seq + 1] - 1 : p->cu[seq];
    if (t < 0) t = 0;
    if (t >= p->T) t = p->T - 1;
    *at = (dp_place){.rank = dp_own_part_of(p->own.kind, p->T, x->N, t),
                     .head = (int)(row % p->HV),
                     .sequence = seq,
                     .chunk = -1,
                     .token = -1};
}

static void head_row(const void *ctx, int64_t row, dp_place *at) {
    (void)ctx;
    *at = (dp_place){.rank = 0, .head = (int)row, .sequence = -1, .chunk = -1, .token = -1};
}

dp_field_places dp_field_places_of(const dp_problem *p, int N, dp_result_id field,
                                   const int *chunk_of) {
    return (dp_field_places){.p = p,
                             .field = field,
                             .heads = dp_result_heads(p, field),
                             .per = dp_result_rows_per_token(p, field),
                             .N = N,
                             .chunk_of = chunk_of};
}

dp_place_fn *dp_place_of_field(dp_result_id field) {
    static dp_place_fn *const of[] = {
        [DP_OF_TOKENS] = token_row, [DP_OF_SEQUENCES] = state_row, [DP_OF_HEADS] = head_row};
    return of[dp_result_fields[field].kind];
}

void dp_place_rank_row(const void *ctx, int64_t row, dp_place *at) {
    const dp_rank_places *x = ctx;
    *at = (dp_place){.rank = x->pair[row] / x->HV,
                     .head = x->pair[row] % x->HV,
                     .sequence = -1,
                     .chunk = -1,
                     .token = -1};
}
