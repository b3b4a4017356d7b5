/* ref/chunk/stages.h - the stages of the pipeline, and intermediates under the names that the field
 * uses, laid out as FLA lays them out.
 *
 * Akk and Aqk have C = 64 R columns: column i R + j is key j of token i of the row's chunk. They
 * are judged up to the diagonal (block), and 0 above it. Axes R are left out for one key a token.
 * Chunks restart at every local sub-sequence and count rank by rank: [chunks] has
 * dp_stage_tensor_chunks entries, with one rank FLA's own. Rank tensors: what a rank does not have
 * (M, H of the last, S_in of the first, and so on, math.md g.2) is not judged.
 */
#pragma once
#include "chunk.h"
#include "ref/vocabulary/context.h"
#include "ref/vocabulary/exchange.h"
#include "ref/vocabulary/tensors.h"

/* The stages of stages.inc. Stage all_gather has no code of its own here: the merges read the pairs
 * of other ranks. Stage recompute repeats state_fwd for the backward (only where a fault makes that
 * differ). Stages wy_bwd and intra_bwd run together. */
typedef enum {
#define ROW(ID, ...) DP_STAGE_##ID,
#include "stages.inc"
    DP_NSTAGES
} dp_stage;
extern const char *const dp_stage_names[DP_NSTAGES];
extern const char dp_stage_sends[DP_NSTAGES]; /* 1: one rank has none of it */
/* The number of stages of a run, the forward ones first. */
static inline int dp_stages_of(int backward) { return backward ? DP_NSTAGES : DP_STAGE_RECOMPUTE; }
static inline int dp_stage_is_backward(int stage) { return stage >= dp_stages_of(0); }

typedef enum {
#define TENSOR(ID, ...) DP_##ID,
#include "stages.inc"
    DP_NSTAGE_TENSORS
} dp_stage_tensor;
typedef enum { DP_PER_TOKEN, DP_PER_CHUNK, DP_PER_RANK } dp_stage_tensor_kind;
typedef struct {
    const char *name, *alias[3];
    dp_stage_tensor_kind kind;
    dp_axis axis[DP_MAX_AXES]; /* as of the inputs and results (ref/vocabulary/tensors.h) */
    dp_stage made_by;
    int rank; /* DP_PER_RANK: DP_RANK_S_IN .. */
    int backward;
    int state;            /* 1: laid out [..,V,K] by those who lay states out so */
    int carried;          /* 1: the state that enters a chunk decides over it */
    int stored_short;     /* base bf16 stores it in bf16, or a kernel may */
    dp_chunk_array array; /* not DP_PER_RANK: where it lies in a chunk */
    const char *what;     /* what it is, from what */
} dp_stage_tensor_info;
extern const dp_stage_tensor_info dp_stage_tensors[DP_NSTAGE_TENSORS];
int dp_stage_tensor_find(const char *name); /* name or alias; -1 */

/* The stages that ranks exchange (ref/vocabulary/context.h). */
extern const dp_stage_tensor dp_rank_stages[DP_RANK_TENSORS];
/* Its name in files and records. */
const char *dp_rank_name(int which);
int dp_exchange_makes(dp_exchange x, int which); /* do ranks that exchange so make it? */
/* Entries of one, K K or K V. */
int64_t dp_rank_width(const dp_problem *p, int which);

int dp_stage_tensor_chunks(const dp_problem *p, int N,
                           int rank); /* of that rank, -1: of all; T % N == 0 */
int dp_stage_tensor_shape(const dp_problem *p, int N, int stage,
                          int64_t shape[DP_MAX_AXES]); /* returns the number of axes */
int64_t dp_stage_tensor_size(const dp_problem *p, int N, int stage); /* product of the shape */
/* Its rows, and the entries of one; both 0 where no rank has it. */
void dp_stage_tensor_rows(const dp_problem *p, int N, int stage, int64_t *rows, int64_t *width);

int dp_stage_tensor_keyed(int stage); /* does each key of a token have a row of its own? */
/* A stage of tokens: rows a token and head, and their width. */
void dp_stage_tensor_token_row(const dp_problem *p, int stage, int *per, int64_t *width);
/* Row `row` of such a stage in a chunk: distance of its entries, and how many of them count. */
void dp_stage_tensor_columns(const dp_chunk *ch, int stage, int row, int64_t width, int64_t *stride,
                             int64_t *used);
/* Where a stage that each chunk holds lies in it. */
const double *dp_stage_tensor_in_chunk(const dp_chunk *ch, int stage);
