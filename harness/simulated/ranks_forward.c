/* The forward stages that ranks share: pre-process, merge, state, output (ranks_stages.h). */
#include "fault_effect.h"
#include "ranks_stages.h"

#include <stdlib.h>
#include <string.h>

/* ---- forward --------------------------------------------------------------------------------- */

static void pre_process_fwd(dp_sim *s, int r, int hv) {
    const dp_context *c = &s->ctx[r];
    const int i = r * s->p->HV + hv,
              sub = s->fault == DP_FAULT_FWD_FIRST_SUBSEQ ? 0 : c->nlocal - 1;
    if (c->is_last) return;
    if (sub != c->nlocal - 1) dp_effect_hit(s, r, hv);
    dp_sim_replace(&s->M[i],
                   dp_sim_chain(s, s->first[r][sub], s->first[r][sub + 1], hv,
                                dp_effect_chain(s, r, hv), 0, r == s->traj_rank && s->p->HV == 1));
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
        if (s->fault == DP_FAULT_DECAY_BEFORE_USE) {
            double *D = dp_copy(S, KV);
            for (int x = 0; x < p->K; x++)
                for (int v = 0; v < p->V; v++)
                    D[(int64_t)x * p->V + v] *= ch->eC[x];
            dp_chunk_state(
                ch, D,
                ch->v_new); /* X from the decayed state; the state itself still decays once */
            for (int x = 0; x < p->K; x++)
                for (int v = 0; v < p->V; v++)
                    D[(int64_t)x * p->V + v] +=
                        (1 - ch->eC[x]) * ch->eC[x] * S[(int64_t)x * p->V + v];
            memcpy(S, D, sizeof(double) * KV);
            free(D);
            dp_effect_hit(s, r, hv);
        } else
            dp_chunk_state(ch, S, ch->v_new);
        dp_sim_round_carried(s, DP_STAGE_STATE_FWD, S);
        dp_effect_state(s, g, hv, S);
    }
}

/* One local sub-sequence, from its initial state; h and v_new are kept in the chunks. lost: start
 * from zeros instead (a fault). */
static void state_fwd(dp_sim *s, int r, int hv, int sub, int lost) {
    const dp_problem *p = s->p;
    const int64_t KV = (int64_t)p->K * p->V;
    const double *start = dp_sim_start(s, r, sub);
    double *S = start ? dp_copy(start + hv * KV, KV) : dp_doubles(KV);
    dp_sim_round_arith_all(s->at[DP_STAGE_STATE_FWD], S, KV);
    if (!dp_sim_starts_here(s, r, sub) && lost) dp_effect_hit(s, r, hv);
    if (!dp_sim_starts_here(s, r, sub) && !lost)
        memcpy(S, s->S_in[r * p->HV + hv], sizeof(double) * KV);
    dp_sim_pass_fwd(s, r, hv, sub, S);
    if (dp_sim_ends_here(s, r, sub) && !lost)
        memcpy(s->out.final_state + (s->ctx[r].local_seq[sub] * (int64_t)p->HV + hv) * KV, S,
               sizeof(double) * KV);
    free(S);
}

void dp_sim_output(dp_sim *s, int gi, int hv) {
    const dp_problem *p = s->p;
    const dp_group *g = &s->group[gi];
    if (dp_effect_output(s, gi, hv)) return;
    double *o = dp_doubles((int64_t)g->c * p->V);
    dp_chunk_output(dp_sim_chunk_at(s, gi, hv, DP_STAGE_OUTPUT), o);
    dp_effect_stored(s, gi, hv, o);
    for (int t = 0; t < g->c; t++)
        memcpy(s->out.o + ((g->t0 + t) * p->HV + hv) * p->V, o + (int64_t)t * p->V,
               sizeof(double) * p->V);
    free(o);
}

void dp_sim_outputs(dp_sim *s) {
    dp_sim_each_chunk(s, dp_sim_output);
    dp_effect_outputs(s);
}

/* Sequences without tokens hand their initial state on; the gradient of the final state likewise.
 */
void dp_sim_empty_sequences(dp_sim *s) {
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

int dp_sim_same(double **a, double **b, int n, int64_t size) {
    for (int i = 0; i < n; i++) {
        if (!a[i] != !b[i]) return 0;
        if (a[i] && memcmp(a[i], b[i], sizeof(double) * (size_t)size)) return 0;
    }
    return 1;
}

double **dp_sim_copy_list(double **a, int n, int64_t size) {
    double **b = dp_calloc((size_t)n, sizeof *b);
    for (int i = 0; i < n; i++)
        b[i] = dp_copy(a[i], size);
    return b;
}

void dp_sim_states_fwd(dp_sim *s, int lost) {
    const int HV = s->p->HV;
#pragma omp parallel for schedule( \
    dynamic, 1) if (s->fault != DP_FAULT_CU_DIVIDED) /* several ranks own a sequence's end then */
    for (int i = 0; i < s->N * HV; i++)
        for (int sub = 0; dp_sim_has(s, i / HV) && sub < s->ctx[i / HV].nlocal; sub++) {
            const int drop = s->fault == DP_FAULT_STATE_LOST ||
                             (s->fault == DP_FAULT_STATE_LATE && s->ctx[i / HV].nlocal > 1);
            state_fwd(s, i / HV, i % HV, sub, lost && drop);
        }
}

void dp_sim_pre_fwd(dp_sim *s) {
    s->ntraj = 0;
    if (!dp_exchanges[s->merge].pairs) return;
#pragma omp parallel for schedule(dynamic, 1)
    for (int i = 0; i < s->N * s->p->HV; i++)
        if (dp_sim_has(s, i / s->p->HV)) pre_process_fwd(s, i / s->p->HV, i % s->p->HV);
}

void dp_sim_forward(dp_sim *s) {
    const int HV = s->p->HV, nr = s->N * HV;
    const int64_t KV = (int64_t)s->p->K * s->p->V;
    double **before = dp_sim_copy_list(s->S_in, nr, KV);
    dp_sim_pre_fwd(s);
    dp_sim_exchange(s, 0);
    if (!s->have_forward || !dp_sim_same(before, s->S_in, nr, KV) || s->fault) {
        dp_sim_states_fwd(s, 0);
        dp_sim_outputs(s);
        s->have_forward = 1;
        s->have_backward = 0;
    }
    dp_sim_free_list(before, nr);
}
