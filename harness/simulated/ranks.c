/* The simulated ranks: all stages in their order, or one of them (ranks.h). */
#include "ranks_stages.h"
#include "ref/chunk/payload.h"
#include "ref/chunk/recurrent.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

static void clear(double **a, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        dp_sim_replace(&a[i], NULL);
}

/* Clears results that an exchange does not make, whatever an earlier run left. */
static void clear_unmade(dp_sim *s) {
    const int64_t nr = (int64_t)s->N * s->p->HV;
    double **const pairs[] = {s->M, s->H, s->dM, s->dH}, **const states[] = {s->S_in, s->dS_out};
    for (int i = 0; i < 4 && !dp_exchanges[s->merge].pairs; i++)
        clear(pairs[i], nr);
    for (int i = 0; i < 2 && !dp_exchanges[s->merge].states; i++)
        clear(states[i], nr);
    if (!dp_exchanges[s->merge].pairs) s->ntraj = 0;
}

/* Sequences without tokens pass their initial state through; the gradient of the final state
 * likewise.
 */
static void empty_sequences(dp_sim *s) {
    const dp_problem *p = s->p;
    const int64_t n = (int64_t)p->HV * p->K * p->V;
    for (int i = 0; i < p->Nseq; i++) {
        if (p->cu[i + 1] > p->cu[i]) continue;
        for (int64_t z = 0; z < n; z++) {
            s->out.final_state[i * n + z] = p->s0 ? p->s0[i * n + z] : 0;
            if (s->out.ds0) s->out.ds0[i * n + z] = p->dstate ? p->dstate[i * n + z] : 0;
        }
    }
}

void dp_sim_begin(dp_sim *s, dp_format chain_format, dp_exchange merge, int with_backward) {
    assert(!with_backward || s->p->dout);
    s->chain = dp_chain_format(s->p, s->at[DP_STAGE_PRE_FWD], chain_format);
    s->merge = merge;
    s->sent = (dp_traffic){0, 0};
    dp_sim_after(s, DP_AFTER_BEGINNING, (dp_sim_place){0});
    clear_unmade(s);
    if (!s->out.o || (with_backward && !s->out.dq)) {
        dp_result_free(&s->out);
        dp_result_alloc(&s->out, s->p, with_backward);
        s->have_forward = s->have_backward = 0;
    }
    empty_sequences(s);
}

void dp_sim_stage(dp_sim *s, dp_stage stage) {
    const int64_t nch = (int64_t)s->ngroup * s->p->HV, nr = (int64_t)s->N * s->p->HV;
    if (stage == DP_STAGE_PRE_FWD || stage == DP_STAGE_PRE_BWD) {
        clear(s->factor, 2 * nch);
        clear(stage == DP_STAGE_PRE_FWD ? s->M : s->dM, nr);
        clear(stage == DP_STAGE_PRE_FWD ? s->H : s->dH, nr);
    }
    dp_sim_do(s, stage);
    s->have_forward = s->have_backward = 0;
}

/* Results of an earlier run stay where it left what enters ranks as it is, unless faults act. */
static int known(dp_sim *s, int have, double **before, double **now) {
    const int nr = s->N * s->p->HV;
    const int same = dp_sim_same(before, now, nr, (int64_t)s->p->K * s->p->V);
    dp_sim_free_list(before, nr);
    return have && same && !s->fault;
}

static void forward(dp_sim *s) {
    const int64_t KV = (int64_t)s->p->K * s->p->V;
    double **before = dp_sim_copy_list(s->S_in, s->N * s->p->HV, KV);
    dp_sim_do(s, DP_STAGE_PRE_FWD);
    dp_sim_do(s, DP_STAGE_MERGE_FWD);
    if (known(s, s->have_forward, before, s->S_in)) return;
    dp_sim_do(s, DP_STAGE_STATE_FWD);
    dp_sim_do(s, DP_STAGE_OUTPUT);
    dp_leave_states(s->p, &s->design, s->out.final_state);
    s->have_forward = 1;
    s->have_backward = 0;
}

/* Stage dAv, unless the chunk has its result. */
static void dAv_once(dp_sim *s, int gi, int hv) {
    if (!dp_sim_chunk(s, gi, hv)->dv_local) dp_sim_dAv(s, gi, hv);
}

static void backward(dp_sim *s) {
    const int64_t KV = (int64_t)s->p->K * s->p->V;
    double **before = dp_sim_copy_list(s->dS_out, s->N * s->p->HV, KV);
    dp_sim_after(s, DP_STAGE_RECOMPUTE, (dp_sim_place){0}); /* what it makes is there else */
    dp_sim_each_chunk(s, dAv_once);
    dp_sim_do(s, DP_STAGE_PRE_BWD);
    dp_sim_do(s, DP_STAGE_MERGE_BWD);
    if (known(s, s->have_backward, before, s->dS_out) && !s->peers) return; /* who wait for sums */
    dp_sim_do(s, DP_STAGE_STATE_BWD);
    dp_sim_do(s, DP_STAGE_WY_BWD);
    dp_sim_do(s, DP_STAGE_INTRA_BWD);
    dp_sim_do(s, DP_STAGE_GATE_BWD);
    s->have_backward = 1;
}

/* ---- heads ------------------------------------------------------------------------------------
 * Ranks that have all tokens of HV / N value heads. A head's results do not depend on its rank, so
 * one pipeline over all tokens computes all of them. The rank of a head shows in faults alone.
 * Gradients of q and k return a value head each. The rank that owns the token adds them, in the
 * order of heads, as on one rank. A rank that is a process computes its own heads, which come by
 * messages (heads_sent.c). */

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

static void run_heads(dp_sim *s, int backward) {
    if (!s->heads) open_heads(s);
    dp_sim_run(&s->heads->sim, s->chain, DP_EXCHANGE_ALLGATHER, backward);
    if (s->peers)
        dp_sim_return_heads(s, &s->heads->sim, backward);
    else
        take_results(s, backward);
    s->have_forward = s->have_backward = 0; /* results of other exchanges are no longer there */
    s->runs++;
}

/* ---- runs ------------------------------------------------------------------------------------ */

void dp_sim_run(dp_sim *s, dp_format chain_format, dp_exchange merge, int with_backward) {
    dp_sim_begin(s, chain_format, merge, with_backward);
    if (s->merge == DP_EXCHANGE_HEADS) {
        run_heads(s, with_backward);
        return;
    }
    forward(s);
    if (with_backward) backward(s);
    s->runs++;
    dp_sim_after(s, DP_AFTER_RUN, (dp_sim_place){0});
}

void dp_sim_run_ranks(dp_sim *s, dp_format chain_format, dp_exchange merge, int with_backward) {
    dp_sim_begin(s, chain_format, merge, with_backward);
    if (!dp_exchanges[s->merge].states) return;
    dp_sim_do(s, DP_STAGE_PRE_FWD);
    dp_sim_do(s, DP_STAGE_MERGE_FWD);
    if (!with_backward) return;
    dp_sim_each_chunk(s, dAv_once);
    dp_sim_do(s, DP_STAGE_PRE_BWD);
    dp_sim_do(s, DP_STAGE_MERGE_BWD);
}
