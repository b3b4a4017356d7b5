/* The simulated ranks: all stages in their order, or one of them (ranks.h). */
#include "fault_effect.h"
#include "ranks_stages.h"
#include "ref/chunk/affine.h"

#include <assert.h>
#include <string.h>

const char *const dp_stage_names[DP_NSTAGES] = {
    "gate",      "intra",  "solve",     "wy",      "pre_process_fwd", "merge_fwd",
    "state_fwd", "output", "recompute", "dAv",     "pre_process_bwd", "merge_bwd",
    "state_bwd", "wy_bwd", "intra_bwd", "gate_bwd"};

static void clear(double **a, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        dp_sim_replace(&a[i], NULL);
}

/* What an exchange does not make is not there, whatever an earlier run left. */
static void clear_unmade(dp_sim *s) {
    const int64_t nr = (int64_t)s->N * s->p->HV;
    double **const pairs[] = {s->M, s->H, s->dM, s->dH}, **const states[] = {s->S_in, s->dS_out};
    for (int i = 0; i < 4 && !dp_exchanges[s->merge].pairs; i++)
        clear(pairs[i], nr);
    for (int i = 0; i < 2 && !dp_exchanges[s->merge].states; i++)
        clear(states[i], nr);
    if (!dp_exchanges[s->merge].pairs) s->ntraj = 0;
}

void dp_sim_begin(dp_sim *s, dp_format chain_format, dp_exchange merge, int with_backward) {
    assert(!with_backward || s->p->dout);
    s->chain = dp_chain_format(s->p, s->at[DP_STAGE_PRE_FWD], chain_format);
    s->merge = s->sharers ? merge : dp_fault_exchange(s->fault, merge);
    s->sent = (dp_traffic){0, 0};
    clear_unmade(s);
    if (s->fault != DP_FAULT_RACE && s->fault != DP_FAULT_ORDER_BY_RUN)
        memcpy(s->hit, s->hit_kept, (size_t)s->N * s->p->HV);
    if (!s->out.o || (with_backward && !s->out.dq)) {
        dp_result_free(&s->out);
        dp_result_alloc(&s->out, s->p, with_backward);
        s->have_forward = s->have_backward = 0;
    }
    dp_sim_empty_sequences(s);
}

void dp_sim_stage(dp_sim *s, dp_stage stage) {
    const int64_t nch = (int64_t)s->ngroup * s->p->HV, nr = (int64_t)s->N * s->p->HV;
    switch (stage) {
    case DP_STAGE_GATE: dp_sim_activate(s); break;
    case DP_STAGE_INTRA: dp_sim_each_chunk(s, dp_sim_intra); break;
    case DP_STAGE_SOLVE: dp_sim_each_chunk(s, dp_sim_solve); break;
    case DP_STAGE_WY: dp_sim_each_chunk(s, dp_sim_wy); break;
    case DP_STAGE_PRE_FWD:
        clear(s->factor, 2 * nch);
        clear(s->M, nr);
        clear(s->H, nr);
        dp_sim_pre_fwd(s);
        break;
    case DP_STAGE_MERGE_FWD: dp_sim_exchange(s, 0); break;
    case DP_STAGE_STATE_FWD: dp_sim_states_fwd(s, 0); break;
    case DP_STAGE_OUTPUT: dp_sim_outputs(s); break;
    case DP_STAGE_RECOMPUTE: dp_sim_states_fwd(s, 1); break;
    case DP_STAGE_DAV: dp_sim_each_chunk(s, dp_sim_dAv); break;
    case DP_STAGE_PRE_BWD:
        clear(s->factor, 2 * nch);
        clear(s->dM, nr);
        clear(s->dH, nr);
        dp_sim_pre_bwd(s);
        break;
    case DP_STAGE_MERGE_BWD: dp_sim_exchange(s, 1); break;
    case DP_STAGE_STATE_BWD: dp_sim_states_bwd(s); break;
    case DP_STAGE_WY_BWD: dp_sim_all_grads(s); break;
    case DP_STAGE_INTRA_BWD: break; /* came with wy_bwd */
    case DP_STAGE_GATE_BWD: dp_sim_gate_bwd(s); break;
    default: assert(0);
    }
    s->have_forward = s->have_backward = 0;
}

void dp_sim_run(dp_sim *s, dp_format chain_format, dp_exchange merge, int with_backward) {
    dp_sim_begin(s, chain_format, merge, with_backward);
    if (s->merge == DP_EXCHANGE_HEADS) {
        dp_sim_run_heads(s, with_backward);
        return;
    }
    dp_sim_forward(s);
    if (with_backward) dp_sim_backward(s);
    dp_effect_results(s);
}

void dp_sim_run_ranks(dp_sim *s, dp_format chain_format, dp_exchange merge, int with_backward) {
    dp_sim_begin(s, chain_format, merge, with_backward);
    if (!dp_exchanges[s->merge].states) return;
    dp_sim_pre_fwd(s);
    dp_sim_exchange(s, 0);
    if (!with_backward) return;
    dp_sim_each_chunk(s, dp_sim_dAv_once);
    dp_sim_pre_bwd(s);
    dp_sim_exchange(s, 1);
}
