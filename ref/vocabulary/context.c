/* Which rank owns which part of which packed sequence (math.md g.2).
 *
 * Token t belongs to sequence i with cu[i] <= t < cu[i+1]; empty sequences contain no token. A rank
 * owns tokens a .. b-1, at least one. f is the sequence of token a, l the sequence of token b-1.
 * The earlier ranks that hold tokens of f begin with the owner of cu[f]. The later ranks that hold
 * tokens of l end with the owner of its last token cu[l+1]-1.
 */
#include "context.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

int dp_sequence_of(const int64_t *cu, int Nseq, int64_t t) {
    int lo = 0, hi = Nseq - 1;
    while (lo < hi) {
        const int mid = lo + (hi - lo) / 2;
        if (cu[mid + 1] > t)
            hi = mid;
        else
            lo = mid + 1;
    }
    return lo;
}

int64_t dp_longest_sequence(const int64_t *cu, int Nseq) {
    int64_t most = 0;
    for (int n = 0; n < Nseq; n++)
        if (cu[n + 1] - cu[n] > most) most = cu[n + 1] - cu[n];
    return most;
}

static dp_status check_split(const int64_t *cu, int Nseq, dp_own own, int N, dp_err *e) {
    const int64_t T = cu[Nseq];
    if (N < 1) return dp_fail(e, DP_EINPUT, "ranks = %d: must be at least 1", N);
    if (T < N)
        return dp_fail(e, DP_EINPUT, "T = %lld: fewer tokens than ranks = %d", (long long)T, N);
    if (own == DP_OWN_EVEN && T % N)
        return dp_fail(e, DP_EINPUT, "T = %lld: must be a multiple of ranks = %d", (long long)T, N);
    return DP_OK;
}

static void fill_local(const int64_t *cu, int f, int l, dp_context *c) {
    c->local_cu = dp_calloc((size_t)(l - f) + 2, sizeof *c->local_cu);
    c->local_seq = dp_calloc((size_t)(l - f) + 1, sizeof *c->local_seq);
    c->nlocal = 0;
    for (int i = f; i <= l; i++) {
        const int64_t end = (cu[i + 1] < c->b ? cu[i + 1] : c->b) - c->a;
        if (end == c->local_cu[c->nlocal]) continue; /* empty */
        c->local_seq[c->nlocal++] = i;
        c->local_cu[c->nlocal] = end;
    }
}

dp_status dp_context_build(const int64_t *cu, int Nseq, int N, int rank, dp_context *c, dp_err *e) {
    return dp_context_owned(cu, Nseq, DP_OWN_EVEN, N, rank, c, e);
}

dp_status dp_context_of(const dp_problem *p, int N, int rank, dp_context *c, dp_err *e) {
    return dp_context_owned(p->cu, p->Nseq, p->own.kind, N, rank, c, e);
}

dp_status dp_context_owned(const int64_t *cu, int Nseq, dp_own own, int N, int rank, dp_context *c,
                           dp_err *e) {
    const int64_t T = cu[Nseq];
    memset(c, 0, sizeof *c);
    const dp_status s = check_split(cu, Nseq, own, N, e);
    if (s) return s;
    assert(rank >= 0 && rank < N && cu[0] == 0);
    c->rank = rank;
    c->N = N;
    c->a = dp_own_cut(own, T, N, rank);
    c->b = dp_own_cut(own, T, N, rank + 1);
    c->L = c->b - c->a;
    const int f = dp_sequence_of(cu, Nseq, c->a), l = dp_sequence_of(cu, Nseq, c->b - 1);
    fill_local(cu, f, l, c);
    c->pre_num_ranks = rank - dp_own_part_of(own, T, N, cu[f]);
    c->post_num_ranks = dp_own_part_of(own, T, N, cu[l + 1] - 1) - rank;
    c->is_first = c->pre_num_ranks == 0;
    c->is_last = c->post_num_ranks == 0;
    c->pre_num_conv_tokens = c->a - cu[f];
    return DP_OK;
}

void dp_context_free(dp_context *c) {
    free(c->local_cu);
    free(c->local_seq);
    c->local_cu = NULL;
    c->local_seq = NULL;
}
