/* ref/vocabulary/context.h - which rank owns which part of which packed sequence (math.md g.2,
 * exact for any cu, empty sequences too).
 *
 * T % N == 0 and T >= N are required. Rank r owns tokens [a, b), a = r L, b = a + L, L = T / N.
 * With another ownership of tokens (own.h) N is the number of parts, r a part.
 */
#pragma once
#include "problem.h"

/* The sequence of token t, the first one that ends behind t; of tokens behind all, the last one. */
int dp_sequence_of(const int64_t *cu, int Nseq, int64_t t);
/* Tokens of the longest sequence. */
int64_t dp_longest_sequence(const int64_t *cu, int Nseq);

typedef struct {
    int rank, N;
    int64_t L, a, b;
    int nlocal;        /* local sub-sequences, >= 1 */
    int64_t *local_cu; /* [nlocal+1], relative to a; empty sequences have vanished */
    int *local_seq;    /* [nlocal] index of the global sequence that each one belongs to */
    int pre_num_ranks, post_num_ranks;
    int is_first, is_last;
    int64_t pre_num_conv_tokens; /* tokens of local sub-sequence 0's sequence that lie before a */
} dp_context;

/* DP_EINPUT if N < 1, T % N != 0 or T < N; then *c is empty. cu is trusted: cu[0] = 0, not
 * decreasing (dp_problem_check). */
dp_status dp_context_build(const int64_t *cu, int Nseq, int N, int rank, dp_context *c, dp_err *e);
/* The same of the parts of a problem. */
dp_status dp_context_of(const dp_problem *p, int N, int rank, dp_context *c, dp_err *e);
/* The same of cu whose tokens are owned so. */
dp_status dp_context_owned(const int64_t *cu, int Nseq, dp_own own, int N, int rank, dp_context *c,
                           dp_err *e);
void dp_context_free(dp_context *c);

/* The tensors that ranks exchange, in the order of records; gradients from DP_RANK_DS_OUT on. */
enum {
    DP_RANK_S_IN,
    DP_RANK_M,
    DP_RANK_H,
    DP_RANK_DS_OUT,
    DP_RANK_DM,
    DP_RANK_DH,
    DP_RANK_TENSORS
};
/* Is it a state of one rank? Else it is of a pair (M, H), or (dM, dH). */
static inline int dp_rank_is_state(int which) {
    return which == DP_RANK_S_IN || which == DP_RANK_DS_OUT;
}

/* Who takes part. A rank that does not run a pre-process contributes zeros to the all-gather, which
 * every rank enters. */
static inline int dp_context_runs_pre_fwd(const dp_context *c) {
    return !c->is_last;
} /* on local sub-sequence nlocal-1 */
static inline int dp_context_runs_pre_bwd(const dp_context *c) {
    return !c->is_first;
} /* on local sub-sequence 0 */
/* Uniform elements of math.md g.3: does the state leaving the rank depend on the state entering it,
 * and so its adjoint? */
static inline int dp_context_passes(const dp_context *c) {
    return c->nlocal == 1 && !c->is_first && !c->is_last;
}
