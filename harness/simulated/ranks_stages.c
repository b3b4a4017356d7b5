/* The table of stages, and one of them (ranks_stages.h). */
#include "ranks_stages.h"

const char *const dp_stage_names[DP_NSTAGES] = {
    "gate",      "intra",  "solve",     "wy",      "pre_process_fwd", "merge_fwd",
    "state_fwd", "output", "recompute", "dAv",     "pre_process_bwd", "merge_bwd",
    "state_bwd", "wy_bwd", "intra_bwd", "gate_bwd"};

static void merge_fwd(dp_sim *s) { dp_sim_exchange(s, 0); }
static void merge_bwd(dp_sim *s) { dp_sim_exchange(s, 1); }

/* A stage runs for each chunk and head, or once for all. */
static const struct {
    dp_sim_stage_fn *chunk;
    void (*all)(dp_sim *s);
} STAGES[DP_NSTAGES] = {
    [DP_STAGE_GATE] = {.all = dp_sim_activate},
    [DP_STAGE_INTRA] = {dp_sim_intra},
    [DP_STAGE_SOLVE] = {dp_sim_solve},
    [DP_STAGE_WY] = {dp_sim_wy},
    [DP_STAGE_PRE_FWD] = {.all = dp_sim_pre_fwd},
    [DP_STAGE_MERGE_FWD] = {.all = merge_fwd},
    [DP_STAGE_STATE_FWD] = {.all = dp_sim_states_fwd},
    [DP_STAGE_OUTPUT] = {dp_sim_output},
    [DP_STAGE_RECOMPUTE] = {.all = dp_sim_recompute},
    [DP_STAGE_DAV] = {dp_sim_dAv},
    [DP_STAGE_PRE_BWD] = {.all = dp_sim_pre_bwd},
    [DP_STAGE_MERGE_BWD] = {.all = merge_bwd},
    [DP_STAGE_STATE_BWD] = {.all = dp_sim_states_bwd},
    [DP_STAGE_WY_BWD] = {.all = dp_sim_all_grads},
    [DP_STAGE_INTRA_BWD] = {0}, /* computed with wy_bwd */
    [DP_STAGE_GATE_BWD] = {.all = dp_sim_gate_bwd},
};

void dp_sim_do(dp_sim *s, dp_stage stage) {
    if (!STAGES[stage].chunk) {
        if (STAGES[stage].all) STAGES[stage].all(s);
        dp_sim_after(s, (int)stage, (dp_sim_place){0});
        return;
    }
    dp_sim_each_chunk(s, STAGES[stage].chunk);
#pragma omp parallel for schedule(dynamic, 1) if (s->after[stage])
    for (int i = 0; i < s->ngroup * s->p->HV; i++)
        dp_sim_after(s, (int)stage, (dp_sim_place){.at = i / s->p->HV, .hv = i % s->p->HV});
}
