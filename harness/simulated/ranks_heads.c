/* The exchange of heads: ranks that have all tokens of HV / N value heads (ranks_stages.h).
 *
 * What a head makes does not depend on which rank has it, so one pipeline over all tokens computes
 * all of them; who has a head shows in faults alone. Gradients of q and k go back a value head each
 * and are added, in the order of heads, by the rank that owns the token, as on one rank. A rank
 * that is a process computes its own heads, which come by messages (heads_sent.c).
 */
#include "ranks_stages.h"

#include <stdlib.h>
#include <string.h>

struct dp_sim_heads {
    dp_problem p; /* owned by one rank; where ranks are processes, its own */
    dp_sim sim;
};

void dp_sim_free_heads(dp_sim *s) {
    if (!s->heads) return;
    dp_sim_free(&s->heads->sim);
    if (s->peers) dp_problem_free(&s->heads->p);
    free(s->heads);
    s->heads = NULL;
}

static int ranks_of(const dp_sim *s) { return s->p->own.kind ? s->p->own.ranks : s->N; }

static void open_heads(dp_sim *s) {
    s->heads = dp_calloc(1, sizeof *s->heads);
    s->heads->p = s->peers ? dp_sim_receive_heads(s) : *s->given;
    s->heads->p.own = (dp_owners){0};
    dp_sim_open_whole(s, &s->heads->p, &s->heads->sim);
    s->heads->sim.sharers = ranks_of(s);
}

/* Which rank has a value head. */
static int rank_of(const dp_sim *s, int hv) { return (int)((int64_t)hv * ranks_of(s) / s->p->HV); }

static void take_results(dp_sim *s, int backward) {
    const dp_sim *one = &s->heads->sim;
    const int HV = s->p->HV;
    for (int i = 0; i < DP_NRESULTS; i++) {
        int64_t rows, width;
        double *to = *dp_result_at(&s->out, i);
        dp_result_shape(s->p, i, &rows, &width);
        if (to)
            memcpy(to, *dp_result_at((dp_result *)&one->out, i),
                   sizeof *to * (size_t)(rows * width));
    }
    if (backward) dp_sim_replace(&s->dg, dp_copy(one->dg, s->p->T * HV * dp_Kg(s->p)));
    for (int hv = 0; hv < HV; hv++)
        if (rank_of(s, hv) < s->N) s->hit[rank_of(s, hv) * HV + hv] |= one->hit[hv];
}

void dp_sim_run_heads(dp_sim *s, int backward) {
    if (!s->heads) open_heads(s);
    dp_sim_run(&s->heads->sim, s->chain, DP_EXCHANGE_ALLGATHER, backward);
    if (s->peers)
        dp_sim_return_heads(s, &s->heads->sim, backward);
    else
        take_results(s, backward);
    s->have_forward = s->have_backward = 0; /* results of other exchanges are no longer there */
    s->runs++;
}
