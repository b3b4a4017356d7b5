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
    return dp_exchanges[x.exchange].states &&
           (p->u > dp_payloads[DP_PAYLOAD_FP32].u || p->tolerance > 0);
}

int dp_drawn_from_pair(const dp_problem *p, dp_sending x, int back) {
    return x.exchange == DP_EXCHANGE_ALLGATHER && dp_drawn_rounds(x) && !x.begins &&
           (back ? p->dstate : p->s0);
}

/* One head, in one direction, over ranks in a row of which each hands on to the next. */
typedef struct {
    const dp_problem *p;
    dp_sending sending;
    double *const *M, *const *H; /* of all ranks; M NULL: no rank passes a state on */
    double *const *first; /* M of ranks in which the sequence begins; NULL: they send states */
    const double *start;  /* what the sequence begins with, where they do not */
    double *S;            /* at all boundaries */
    int hv, back;
    int far, n; /* the first rank; how many hand on */
} way;

/* The i-th rank of them; what comes to it: at its own boundary, backward at that behind it. */
static int rank_of(const way *w, int i) { return w->back ? w->far - i : w->far + i; }
static double *comes_to(const way *w, int i) {
    const int64_t KV = (int64_t)w->p->K * w->p->V;
    return w->S + ((int64_t)(rank_of(w, i) + w->back) * w->p->HV + w->hv) * KV;
}
static const double *of_rank(const way *w, double *const *list, int i) {
    return list[rank_of(w, i) * w->p->HV + w->hv];
}

static int gathers(const way *w) { return w->sending.exchange == DP_EXCHANGE_ALLGATHER; }

/* y <- M x + y in fp32, of so many columns. */
static void add_product(int K, int columns, const double *M, const double *x, double *y) {
    const int64_t n = (int64_t)K * columns;
    double *z = dp_doubles(n);
    dp_mm(DP_FP32, 0, 0, K, columns, K, M, x, z);
    for (int64_t i = 0; i < n; i++)
        y[i] = (float)(z[i] + y[i]);
    free(z);
}

/* ---- a fold, or a state from rank to rank ---------------------------------------------------- */

/* What comes behind the i-th rank, which has M of `list`, as it is computed of what arrives, from
 * state S before it. */
static void step(const way *w, int i, double *const *list, const double *S) {
    const int K = w->p->K, V = w->p->V;
    const int64_t KV = (int64_t)K * V;
    double *M = dp_copy(of_rank(w, list, i), (int64_t)K * K), *H = dp_copy(of_rank(w, w->H, i), KV);
    if (gathers(w)) {
        dp_payload_M(w->sending.payload, DP_BASE_FP32, K, M);
        dp_payload_state(w->sending.payload, KV, H);
    }
    add_product(K, V, M, S, H);
    if (!gathers(w)) dp_payload_state(w->sending.payload, KV, H);
    memcpy(comes_to(w, i + 1), H, sizeof *H * (size_t)KV);
    free(M);
    free(H);
}

static void fold(const way *w) {
    if (w->first)
        step(w, 0, w->first, w->start);
    else
        dp_payload_state(w->sending.payload, (int64_t)w->p->K * w->p->V, comes_to(w, 1));
    for (int i = 1; i < w->n; i++)
        step(w, i, w->M, comes_to(w, i));
}

/* ---- a scan ---------------------------------------------------------------------------------- */

/* Of so many ranks in a row up to one; M NULL: of all up to the first, which leave H. */
typedef struct {
    double *M, *H;
} element;

/* later <- later o earlier, of which comes what the payload leaves. */
static void compose(const way *w, element *later, const element *earlier) {
    const int K = w->p->K, V = w->p->V;
    double *M = earlier->M ? dp_copy(earlier->M, (int64_t)K * K) : NULL,
           *H = dp_copy(earlier->H, (int64_t)K * V);
    dp_payload_state(w->sending.payload, (int64_t)K * V, H);
    add_product(K, V, later->M, H, later->H);
    if (M) {
        double *MM = dp_doubles((int64_t)K * K);
        dp_payload_M(w->sending.payload, DP_BASE_FP32, K, M);
        dp_mm(DP_FP32, 0, 0, K, K, K, later->M, M, MM);
        free(M);
        M = MM;
    }
    free(later->M);
    free(H);
    later->M = M;
}

/* A level goes from the last rank down, so that what it reads is the last level's. */
static void scan(const way *w) {
    const int64_t KK = (int64_t)w->p->K * w->p->K, KV = (int64_t)w->p->K * w->p->V;
    element *e = dp_calloc((size_t)w->n, sizeof *e);
    e[0].H = dp_copy(comes_to(w, 1), KV);
    for (int i = 1; i < w->n; i++)
        e[i] = (element){dp_copy(of_rank(w, w->M, i), KK), dp_copy(of_rank(w, w->H, i), KV)};
    for (int d = 1; d < w->n; d *= 2)
        for (int i = w->n - 1; i >= d; i--)
            compose(w, &e[i], &e[i - d]);
    for (int i = 0; i < w->n; i++) {
        dp_payload_state(w->sending.payload, KV, e[i].H);
        memcpy(comes_to(w, i + 1), e[i].H, sizeof *e[i].H * (size_t)KV);
        free(e[i].M);
        free(e[i].H);
    }
    free(e);
}

/* ---- all ranks ------------------------------------------------------------------------------- */

static dp_context context_of(const dp_problem *p, int N, int r) {
    dp_context c;
    const dp_status st = dp_context_of(p, N, r, &c, NULL);
    assert(!st); /* the caller has split it so */
    (void)st;
    return c;
}

/* What the sequence that comes to a rank of context c begins (ends) with; NULL: zeros. */
static const double *start_of(const dp_problem *p, const dp_context *c, int hv, int back) {
    const double *all = back ? p->dstate : p->s0;
    const int64_t seq = c->local_seq[back ? c->nlocal - 1 : 0];
    return all ? all + (seq * p->HV + hv) * p->K * p->V : NULL;
}

/* Ranks in a row are met at the last one, from which their first is farthest. */
static void all_heads(const dp_problem *p, dp_sending x, int N, const dp_drawn_pairs *pairs,
                      int back, double *S) {
    int last = -1;
    for (int i = 0; i < N; i++) {
        const int r = back ? i : N - 1 - i;
        dp_context c = context_of(p, N, r);
        const int n = back ? c.post_num_ranks : c.pre_num_ranks, far = back ? r + n : r - n;
        for (int hv = 0; n > 0 && far != last && hv < p->HV; hv++) {
            const way w = {.p = p,
                           .sending = x,
                           .M = pairs->of[back ? DP_RANK_DM : DP_RANK_M],
                           .H = pairs->of[back ? DP_RANK_DH : DP_RANK_H],
                           .first = pairs->begins[back],
                           .start = start_of(p, &c, hv, back),
                           .S = S,
                           .hv = hv,
                           .back = back,
                           .far = far,
                           .n = n};
            x.exchange == DP_EXCHANGE_SCAN ? scan(&w) : fold(&w);
        }
        if (n > 0) last = far;
        dp_context_free(&c);
    }
}

void dp_drawn_arrives(const dp_problem *p, dp_sending x, int N, const dp_drawn_pairs *pairs,
                      double *S, double *dS) {
    all_heads(p, x, N, pairs, 0, S);
    if (dS) all_heads(p, x, N, pairs, 1, dS);
}
