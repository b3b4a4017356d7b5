/* What ranks hand over in a recurrent design (drawn_pairs.h). */
#include "drawn_pairs.h"
#include "drawn_sent.h"
#include "ref/chunk/recurrent.h"
#include "ref/vocabulary/context.h"

#include <assert.h>
#include <stdlib.h>

typedef struct {
    const dp_problem *p;
    const dp_design *design;
    int backward;
    const dp_context *rank;
    dp_drawn_pairs *out;
} work;

/* Local sub-sequence i as a problem of its own that starts from zeros; cu [2] becomes its own. What
 * else it points to is p's. */
static dp_problem sub_sequence(const work *w, int i, int64_t *cu) {
    const int64_t from = w->rank->a + w->rank->local_cu[i];
    const int64_t to = w->rank->a + w->rank->local_cu[i + 1];
    dp_problem q = *w->p;
    for (int k = 0; k < DP_NINPUTS; k++)
        if (dp_input_of(w->p, k) && dp_input_fields[k].kind == DP_OF_TOKENS)
            *dp_input_at(&q, k) += from * dp_input_width(w->p, k);
    q.s0 = q.dstate = NULL;
    q.own = (dp_owners){0};
    q.T = cu[1] = to - from;
    q.cu = cu;
    q.Nseq = 1;
    cu[0] = 0;
    return q;
}

static void keep_in(const work *w, double ***list, int64_t each, const double *x) {
    if (!*list) *list = dp_calloc((size_t)w->out->n, sizeof **list);
    for (int hv = 0; hv < w->p->HV; hv++)
        (*list)[w->rank->rank * w->p->HV + hv] = dp_copy(x + hv * each, each);
}
static void keep(const work *w, int tensor, const double *x) {
    keep_in(w, &w->out->of[tensor], dp_rank_width(w->p, tensor), x);
}

static double *identities(const dp_problem *p) {
    double *x = dp_doubles((int64_t)p->HV * p->K * p->K);
    for (int64_t i = 0; i < (int64_t)p->HV * p->K; i++)
        x[i * p->K + i % p->K] = 1;
    return x;
}

/* M of local sub-sequence i, backward dM, too, as final_state and ds0: V = K, no values. */
static dp_result of_identities(const work *w, int i, int backward) {
    int64_t cu[2];
    dp_result got;
    dp_problem q = sub_sequence(w, i, cu);
    q.V = q.K;
    double **const zero[] = {&q.v, &q.write, &q.dout};
    for (int k = 0; k < 3; k++)
        if (*zero[k]) *zero[k] = dp_doubles(q.T * q.HV * q.R * q.K);
    q.s0 = identities(&q);
    if (backward) q.dstate = q.s0;
    dp_recurrent_run(&q, w->design, backward, NULL, &got);
    for (int k = 0; k < 3; k++)
        free(*zero[k]);
    free(q.s0);
    return got;
}

static void products(const work *w) {
    dp_result got = of_identities(w, 0, w->backward);
    keep(w, DP_RANK_M, got.final_state);
    if (w->backward) keep(w, DP_RANK_DM, got.ds0);
    dp_result_free(&got);
}

/* Of a rank that does not pass on what comes to it. */
static void first_products(const work *w) {
    const int64_t each = (int64_t)w->p->K * w->p->K;
    if (dp_drawn_from_pair(w->p, w->design->sending, 0) && dp_context_runs_pre_fwd(w->rank)) {
        dp_result got = of_identities(w, w->rank->nlocal - 1, 0);
        keep_in(w, &w->out->begins[0], each, got.final_state);
        dp_result_free(&got);
    }
    if (!w->backward || !dp_drawn_from_pair(w->p, w->design->sending, 1)) return;
    if (!dp_context_runs_pre_bwd(w->rank)) return;
    dp_result got = of_identities(w, 0, 1);
    keep_in(w, &w->out->begins[1], each, got.ds0);
    dp_result_free(&got);
}

static void sums(const work *w, int i, int tensor) {
    int64_t cu[2];
    dp_result got;
    const dp_problem q = sub_sequence(w, i, cu);
    dp_recurrent_run(&q, w->design, tensor == DP_RANK_DH, NULL, &got);
    keep(w, tensor, tensor == DP_RANK_DH ? got.ds0 : got.final_state);
    dp_result_free(&got);
}

static void of_rank(const work *w) {
    dp_context_passes_fwd(w->rank) ? products(w) : first_products(w);
    if (dp_context_runs_pre_fwd(w->rank)) sums(w, w->rank->nlocal - 1, DP_RANK_H);
    if (w->backward && dp_context_runs_pre_bwd(w->rank)) sums(w, 0, DP_RANK_DH);
}

void dp_drawn_pairs_make(dp_drawn_pairs *x, const dp_problem *p, const dp_design *design, int N,
                         int backward) {
    *x = (dp_drawn_pairs){.n = N * p->HV};
    for (int r = 0; r < N && N > 1; r++) {
        dp_context c;
        const dp_status st = dp_context_of(p, N, r, &c, NULL);
        assert(!st); /* the caller has split it so */
        (void)st;
        of_rank(&(work){p, design, backward, &c, x});
        dp_context_free(&c);
    }
}

static void free_list(const dp_drawn_pairs *x, double **list) {
    for (int i = 0; list && i < x->n; i++)
        free(list[i]);
    free(list);
}

void dp_drawn_pairs_free(dp_drawn_pairs *x) {
    for (int k = 0; k < DP_RANK_TENSORS; k++)
        free_list(x, x->of[k]);
    for (int back = 0; back < 2; back++)
        free_list(x, x->begins[back]);
    *x = (dp_drawn_pairs){0};
}
