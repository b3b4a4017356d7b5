/* What comes of what is sent in a recurrent design (drawn_sent.h). */
#include "drawn_sent.h"
#include "ref/arithmetic/mm.h"
#include "ref/chunk/payload.h"
#include "ref/vocabulary/context.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

int dp_drawn_rounds(dp_sending x) {
    const dp_payload_info *p = &dp_payloads[x.payload];
    const int drawn = x.exchange == DP_EXCHANGE_ALLGATHER || x.exchange == DP_EXCHANGE_RING ||
                      x.exchange == DP_EXCHANGE_SERIAL;
    return drawn && (p->u > dp_payloads[DP_PAYLOAD_FP32].u || p->tolerance > 0);
}

/* One head, in one direction. */
typedef struct {
    const dp_problem *p;
    dp_sending sending;
    double *const *M, *const *H; /* of all ranks; M NULL: no rank passes a state on */
    int hv;
} way;

static int gathers(const way *w) { return w->sending.exchange == DP_EXCHANGE_ALLGATHER; }

/* S <- M S + H of rank j, as it is computed of what arrives. */
static void step(const way *w, int j, double *S) {
    const int K = w->p->K, V = w->p->V, z = j * w->p->HV + w->hv;
    const int64_t KV = (int64_t)K * V;
    if (!w->M || !w->M[z] || !w->H || !w->H[z]) return; /* it has no tokens */
    double *M = dp_copy(w->M[z], (int64_t)K * K), *H = dp_copy(w->H[z], KV), *y = dp_doubles(KV);
    if (gathers(w)) {
        dp_payload_M(w->sending.payload, DP_BASE_FP32, K, M);
        dp_payload_state(w->sending.payload, KV, H);
    }
    dp_mm(DP_FP32, 0, 0, K, V, K, M, S, y);
    for (int64_t i = 0; i < KV; i++)
        S[i] = (float)(y[i] + H[i]);
    if (!gathers(w)) dp_payload_state(w->sending.payload, KV, S);
    free(M);
    free(H);
    free(y);
}

/* What comes behind the n ranks from `far` on, in steps of `by`; left: what leaves the first. */
static void fold(const way *w, int far, int n, int by, const double *left, double *to) {
    const int64_t KV = (int64_t)w->p->K * w->p->V;
    double *S = dp_copy(left, KV);
    dp_payload_state(w->sending.payload, KV, S);
    for (int i = 1; i < n; i++)
        step(w, far + i * by, S);
    memcpy(to, S, sizeof *S * (size_t)KV);
    free(S);
}

static dp_context context_of(const dp_problem *p, int N, int r) {
    dp_context c;
    const dp_status st = dp_context_of(p, N, r, &c, NULL);
    assert(!st); /* the caller has split it so */
    (void)st;
    return c;
}

/* What leaves a rank stands at the boundary behind it, backward at its own; the ranks whose sum is
 * longest come first, so that what they start from is there in full. */
static void all_heads(const dp_problem *p, dp_sending x, int N, const dp_drawn_pairs *pairs,
                      int back, double *S) {
    const int64_t KV = (int64_t)p->K * p->V;
    for (int i = 0; i < N; i++) {
        const int r = back ? i : N - 1 - i, by = back ? -1 : 1;
        dp_context c = context_of(p, N, r);
        const int n = back ? c.post_num_ranks : c.pre_num_ranks, far = r - by * n;
        for (int hv = 0; n > 0 && hv < p->HV; hv++) {
            const way w = {p, x, pairs->of[back ? DP_RANK_DM : DP_RANK_M],
                           pairs->of[back ? DP_RANK_DH : DP_RANK_H], hv};
            const int64_t from = back ? far : far + 1, to = back ? r + 1 : r;
            fold(&w, far, n, by, S + (from * p->HV + hv) * KV, S + (to * p->HV + hv) * KV);
        }
        dp_context_free(&c);
    }
}

void dp_drawn_arrives(const dp_problem *p, dp_sending x, int N, const dp_drawn_pairs *pairs,
                      double *S, double *dS) {
    all_heads(p, x, N, pairs, 0, S);
    if (dS) all_heads(p, x, N, pairs, 1, dS);
}
