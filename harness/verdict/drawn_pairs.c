/* What ranks hand over in a recurrent design (drawn_pairs.h). */
#include "drawn_pairs.h"
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

static void keep(const work *w, int tensor, const double *x) {
    const int64_t each = dp_rank_width(w->p, tensor);
    double **list = w->out->of[tensor];
    if (!list) list = w->out->of[tensor] = dp_calloc((size_t)w->out->n, sizeof *list);
    for (int hv = 0; hv < w->p->HV; hv++)
        list[w->rank->rank * w->p->HV + hv] = dp_copy(x + hv * each, each);
}

static double *identities(const dp_problem *p) {
    double *x = dp_doubles((int64_t)p->HV * p->K * p->K);
    for (int64_t i = 0; i < (int64_t)p->HV * p->K; i++)
        x[i * p->K + i % p->K] = 1;
    return x;
}

/* M and dM: V = K columns, no values. */
static void products(const work *w) {
    int64_t cu[2];
    dp_result got;
    dp_problem q = sub_sequence(w, 0, cu);
    q.V = q.K;
    double **const zero[] = {&q.v, &q.write, &q.dout};
    for (int i = 0; i < 3; i++)
        if (*zero[i]) *zero[i] = dp_doubles(q.T * q.HV * q.R * q.K);
    q.s0 = identities(&q);
    if (w->backward) q.dstate = q.s0;
    dp_recurrent_run(&q, w->design, w->backward, NULL, &got);
    keep(w, DP_RANK_M, got.final_state);
    if (w->backward) keep(w, DP_RANK_DM, got.ds0);
    dp_result_free(&got);
    for (int i = 0; i < 3; i++)
        free(*zero[i]);
    free(q.s0);
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
    if (dp_context_passes_fwd(w->rank)) products(w);
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

void dp_drawn_pairs_free(dp_drawn_pairs *x) {
    for (int k = 0; k < DP_RANK_TENSORS; k++) {
        for (int i = 0; x->of[k] && i < x->n; i++)
            free(x->of[k][i]);
        free(x->of[k]);
    }
    *x = (dp_drawn_pairs){0};
}
