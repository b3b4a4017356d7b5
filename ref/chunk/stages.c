/* The stages, the table of their tensors, and the shapes of these (stages.h). */
#include "stages.h"
#include "ref/vocabulary/own.h"

#include <assert.h>
#include <string.h>

const char *const dp_stage_names[DP_NSTAGES] = {
#define ROW(ID, NAME, ...) NAME,
#include "stages.inc"
};
const char dp_stage_sends[DP_NSTAGES] = {
#define ROW(ID, NAME, SENDS, ...) SENDS,
#include "stages.inc"
};

#define TOKENS(LAST) .kind = DP_PER_TOKEN, .axis = {DP_AXIS_T, DP_AXIS_HV, DP_AXIS_##LAST}
#define KEYED(LAST) .kind = DP_PER_TOKEN, .axis = {DP_AXIS_T, DP_AXIS_HV, DP_AXIS_R, DP_AXIS_##LAST}
#define CHUNKS .kind = DP_PER_CHUNK, .axis = {DP_AXIS_CHUNKS, DP_AXIS_HV, DP_AXIS_K, DP_AXIS_V}
#define RANKS(LAST) \
    .kind = DP_PER_RANK, .axis = {DP_AXIS_RANKS, DP_AXIS_HV, DP_AXIS_K, DP_AXIS_##LAST}
#define IN_CHUNK(FIELD) .array = DP_OF_CHUNK_##FIELD
#define OF_RANK(WHICH) .rank = DP_RANK_##WHICH
#define ALIAS(...) .alias = {__VA_ARGS__}
#define SHORT .stored_short = 1
#define STATE .state = 1
#define CARRIED .carried = 1
#define TENSOR(ID, NAME, STAGE, FROM, AXES, WHAT, ...)               \
    [DP_##ID] = {.name = NAME,                                       \
                 .made_by = DP_STAGE_##STAGE,                        \
                 .backward = DP_STAGE_##STAGE >= DP_STAGE_RECOMPUTE, \
                 AXES,                                               \
                 .what = WHAT,                                       \
                 __VA_ARGS__},
const dp_stage_tensor_info dp_stage_tensors[DP_NSTAGE_TENSORS] = {
#include "stages.inc"
};

const dp_stage_tensor dp_rank_stages[DP_RANK_TENSORS] = {
    [DP_RANK_S_IN] = DP_S_IN,     [DP_RANK_M] = DP_M,   [DP_RANK_H] = DP_H,
    [DP_RANK_DS_OUT] = DP_DS_OUT, [DP_RANK_DM] = DP_DM, [DP_RANK_DH] = DP_DH};

const char *dp_rank_name(int which) { return dp_stage_tensors[dp_rank_stages[which]].name; }

int dp_stage_tensor_find(const char *name) {
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++) {
        if (!strcmp(name, dp_stage_tensors[i].name)) return i;
        for (int j = 0; j < 3 && dp_stage_tensors[i].alias[j]; j++)
            if (!strcmp(name, dp_stage_tensors[i].alias[j])) return i;
    }
    return -1;
}

/* ---- shapes ---------------------------------------------------------------------------------- */

int dp_stage_tensor_chunks(const dp_problem *p, int N, int rank) {
    int64_t n = 0;
    for (int r = rank < 0 ? 0 : rank; r < (rank < 0 ? N : rank + 1); r++)
        for (int i = 0; i < p->Nseq; i++) {
            const int64_t from = dp_own_cut(p->own.kind, p->T, N, r),
                          to = dp_own_cut(p->own.kind, p->T, N, r + 1),
                          a = p->cu[i] > from ? p->cu[i] : from,
                          b = p->cu[i + 1] < to ? p->cu[i + 1] : to;
            if (b > a) n += (b - a + DP_CHUNK - 1) / DP_CHUNK;
        }
    return (int)n;
}

/* Lengths of all axes; returns their number. */
static int axes(const dp_problem *p, int N, int stage, int64_t shape[DP_MAX_AXES]) {
    dp_dims d = dp_problem_dims(p);
    d.of[DP_AXIS_R] = dp_rows(p);
    d.of[DP_AXIS_KEYS] = (int64_t)DP_CHUNK * dp_rows(p);
    int n = 0;
    d.of[DP_AXIS_RANKS] = N;
    if (dp_stage_tensors[stage].kind == DP_PER_CHUNK)
        d.of[DP_AXIS_CHUNKS] = dp_stage_tensor_chunks(p, N, -1);
    for (; n < DP_MAX_AXES && dp_stage_tensors[stage].axis[n]; n++)
        shape[n] = d.of[dp_stage_tensors[stage].axis[n]];
    return n;
}

int dp_stage_tensor_keyed(int stage) {
    for (int i = 0; i < DP_MAX_AXES; i++)
        if (dp_stage_tensors[stage].axis[i] == DP_AXIS_R) return 1;
    return 0;
}

void dp_stage_tensor_token_row(const dp_problem *p, int stage, int *per, int64_t *width) {
    int64_t shape[DP_MAX_AXES];
    const int n = axes(p, 1, stage, shape);
    *per = dp_stage_tensor_keyed(stage) ? dp_rows(p) : 1;
    /* NOLINTNEXTLINE(clang-analyzer-core.uninitialized.Assign): every stage has an axis */
    *width = shape[n - 1];
}

int dp_stage_tensor_shape(const dp_problem *p, int N, int stage, int64_t s[DP_MAX_AXES]) {
    int64_t all[DP_MAX_AXES];
    const int of = axes(p, N, stage, all);
    int n = 0;
    for (int i = 0; i < of; i++)
        if (dp_stage_tensors[stage].axis[i] != DP_AXIS_R || dp_rows(p) > 1) s[n++] = all[i];
    return n;
}

int64_t dp_stage_tensor_size(const dp_problem *p, int N, int stage) {
    int64_t s[DP_MAX_AXES], n = 1;
    for (int i = dp_stage_tensor_shape(p, N, stage, s); i > 0; i--)
        n *= s[i - 1];
    return n;
}

void dp_stage_tensor_rows(const dp_problem *p, int N, int stage, int64_t *rows, int64_t *width) {
    int64_t s[DP_MAX_AXES];
    const int n = dp_stage_tensor_shape(p, N, stage, s);
    const int row_axes = dp_stage_tensors[stage].kind == DP_PER_TOKEN ? 1 : 2;
    *width = 1;
    for (int i = n - row_axes; i < n; i++)
        /* NOLINTNEXTLINE(clang-analyzer-core.uninitialized.Assign): every stage has as many axes */
        *width *= s[i];
    *rows = dp_stage_tensor_size(p, N, stage) / *width;
}

int dp_exchange_makes(dp_exchange x, int which) {
    const int state = which == DP_RANK_S_IN || which == DP_RANK_DS_OUT;
    return state ? dp_exchanges[x].states : dp_exchanges[x].pairs;
}

int64_t dp_rank_width(const dp_problem *p, int which) {
    int64_t rows, width;
    dp_stage_tensor_rows(p, 1, dp_rank_stages[which], &rows, &width);
    return width;
}

/* ---- values ---------------------------------------------------------------------------------- */

const double *dp_stage_tensor_in_chunk(const dp_chunk *ch, int stage) {
    assert(dp_stage_tensors[stage].kind != DP_PER_RANK);
    return ch->array[dp_stage_tensors[stage].array];
}

/* Columns of row (token s of the chunk) in the chunk's own array, and how many of them count: up to
 * the block diagonal. */
void dp_stage_tensor_columns(const dp_chunk *ch, int stage, int s, int64_t width, int64_t *stride,
                             int64_t *used) {
    const int square = stage == DP_AKK || stage == DP_AQK;
    *stride = square ? ch->n : stage == DP_GCUM ? ch->K : width;
    *used = square ? (int64_t)(s + 1) * ch->R : width;
}
