/* ref/context.h - which rank owns which part of which packed sequence (math.md g.2, exact for any cu, empty sequences too).
 *
 * T % N == 0 and T >= N are required. Rank r owns tokens [a, b), a = r L, b = a + L, L = T / N.
 */
#ifndef DP_CONTEXT_H
#define DP_CONTEXT_H
#include "problem.h"
#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    int rank, N;
    int64_t L, a, b;
    int nlocal;                  /* local sub-sequences, >= 1 */
    int64_t *local_cu;           /* [nlocal+1], relative to a; empty sequences have vanished */
    int *local_seq;              /* [nlocal] index of the global sequence that each one belongs to */
    int pre_num_ranks, post_num_ranks;
    int is_first, is_last;
    int64_t pre_num_conv_tokens; /* tokens of local sub-sequence 0's sequence that lie before a */
} dp_context;

/* DP_EINPUT if T % N != 0 or T < N. */
dp_status dp_context_build(const int64_t *cu, int Nseq, int N, int rank, dp_context *c, dp_err *e);
void dp_context_free(dp_context *c);

#ifdef __cplusplus
}
#endif
#endif
