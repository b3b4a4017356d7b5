/* The forward stages that ranks share: pre-process, merge, state, output (ranks_stages.h). */
#include "ranks_stages.h"

#include <stdlib.h>
#include <string.h>

void dp_sim_pair_fwd(dp_sim *s, int r, int hv, int sub, dp_format chain) {
    const int i = r * s->p->HV + hv, record = r == s->traj_rank && s->p->HV == 1;
    if (record) s->ntraj = 0;
    dp_sim_replace(&s->M[i],
                   dp_sim_chain(s, s->first[r][sub], s->first[r][sub + 1], hv, chain, 0, record));
    if (s->H[i]) return; /* does not depend on the chain's format */
    s->H[i] = dp_doubles((int64_t)s->p->K * s->p->V);
    for (int g = s->first[r][sub]; g < s->first[r][sub + 1]; g++) {
        dp_chunk_state(dp_sim_chunk_at(s, g, hv, DP_STAGE_PRE_FWD), s->H[i], NULL);
        dp_sim_round_carried(s, DP_STAGE_PRE_FWD, s->H[i]);
    }
}

void dp_sim_pass_fwd(dp_sim *s, int r, int hv, int sub, double *S) {
    const dp_problem *p = s->p;
    const int64_t KV = (int64_t)p->K * p->V;
    for (int g = s->first[r][sub]; g < s->first[r][sub + 1]; g++) {
        dp_chunk *ch = dp_sim_chunk_at(s, g, hv, DP_STAGE_STATE_FWD);
        memcpy(ch->h, S, sizeof(double) * KV);
        dp_chunk_state(ch, S, ch->v_new);
        dp_sim_round_carried(s, DP_STAGE_STATE_FWD, S);
        dp_sim_after(s, DP_AFTER_CHUNK, (dp_sim_place){.at = g, .hv = hv, .x = S});
    }
}

/* One local sub-sequence, from its initial state; h and v_new are kept in the chunks. */
static void state_fwd(dp_sim *s, int r, int hv, int sub, int again) {
    const dp_problem *p = s->p;
    const int64_t KV = (int64_t)p->K * p->V;
    const double *start = dp_sim_start(s, r, sub);
    double *S = start ? dp_copy(start + hv * KV, KV) : dp_doubles(KV);
    dp_sim_round_arith_all(s->at[DP_STAGE_STATE_FWD], S, KV);
    if (!dp_sim_starts_here(s, r, sub)) memcpy(S, s->S_in[r * p->HV + hv], sizeof(double) * KV);
    dp_sim_pass_fwd(s, r, hv, sub, S);
    if (dp_sim_ends_here(s, r, sub) && !again)
        memcpy(s->out.final_state + (s->ctx[r].local_seq[sub] * (int64_t)p->HV + hv) * KV, S,
               sizeof(double) * KV);
    free(S);
}

void dp_sim_output(dp_sim *s, int gi, int hv) {
    const dp_problem *p = s->p;
    const dp_group *g = &s->group[gi];
    double *o = dp_doubles((int64_t)g->c * p->V);
    dp_chunk_output(dp_sim_chunk_at(s, gi, hv, DP_STAGE_OUTPUT), o);
    for (int t = 0; t < g->c; t++)
        memcpy(s->out.o + ((g->t0 + t) * p->HV + hv) * p->V, o + (int64_t)t * p->V,
               sizeof(double) * p->V);
    free(o);
}

static void states_fwd(dp_sim *s, int again) {
    const int HV = s->p->HV;
#pragma omp parallel for schedule(dynamic, 1) if (!s->one_by_one)
    for (int i = 0; i < s->N * HV; i++)
        for (int sub = 0; dp_sim_has(s, i / HV) && sub < s->ctx[i / HV].nlocal; sub++)
            state_fwd(s, i / HV, i % HV, sub, again);
}

void dp_sim_states_fwd(dp_sim *s) { states_fwd(s, 0); }
void dp_sim_recompute(dp_sim *s) { states_fwd(s, 1); }

void dp_sim_pre_fwd(dp_sim *s) {
    s->ntraj = 0;
    if (!dp_exchanges[s->merge].pairs) return;
#pragma omp parallel for schedule(dynamic, 1)
    for (int i = 0; i < s->N * s->p->HV; i++)
        if (dp_sim_has(s, i / s->p->HV) && !s->ctx[i / s->p->HV].is_last)
            dp_sim_pair_fwd(s, i / s->p->HV, i % s->p->HV, s->ctx[i / s->p->HV].nlocal - 1,
                            s->chain);
}
