/* Which stage of the pipeline is wrong: all stages in their order (bisect.h). */
#include "bisect_work.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>

/* ---- all stages ------------------------------------------------------------------------------ */

void dp_bisect_judge_stage(dp_bisect_work *w) {
    switch (w->stage) {
    case DP_STAGE_GATE: dp_bisect_stage_gate(w); break;
    case DP_STAGE_INTRA: dp_bisect_stage_intra(w); break;
    case DP_STAGE_SOLVE: dp_bisect_stage_solve(w); break;
    case DP_STAGE_WY: dp_bisect_stage_wy(w); break;
    case DP_STAGE_PRE_FWD: dp_bisect_stage_pre(w, 0); break;
    case DP_STAGE_MERGE_FWD: dp_bisect_stage_merge(w, 0); break;
    case DP_STAGE_STATE_FWD: dp_bisect_stage_state(w, 0); break;
    case DP_STAGE_OUTPUT: dp_bisect_stage_output(w); break;
    case DP_STAGE_RECOMPUTE: dp_bisect_stage_state(w, 1); break;
    case DP_STAGE_DAV: dp_bisect_stage_dAv(w); break;
    case DP_STAGE_PRE_BWD: dp_bisect_stage_pre(w, 1); break;
    case DP_STAGE_MERGE_BWD: dp_bisect_stage_merge(w, 1); break;
    case DP_STAGE_STATE_BWD: dp_bisect_stage_state_bwd(w); break;
    case DP_STAGE_WY_BWD: dp_bisect_stage_grads(w); break;
    case DP_STAGE_INTRA_BWD: break; /* computed with wy_bwd */
    case DP_STAGE_GATE_BWD: dp_bisect_stage_gate_bwd(w); break;
    default: assert(0);
    }
}

static void bounds(dp_bisect_work *w) {
    const int64_t n = (int64_t)w->ref.ngroup * w->p->HV;
    w->intra = dp_calloc((size_t)n, sizeof *w->intra);
    w->own = dp_calloc((size_t)n, sizeof *w->own);
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t i = 0; i < n; i++) {
        const dp_input_error exact = {0};
        dp_chunk_inverse(&w->ref.ch[i]);
        dp_bound_intra(&w->intra[i], &w->ref.ch[i], w->r, &exact);
        dp_bound_own(&w->own[i], &w->ref.ch[i], w->r);
    }
}

/* Does the subject cut its tokens into the chunks that they must be cut into? If not, no later
 * stage can be compared. */
static int same_chunks(dp_bisect_work *w) {
    const int n = w->ref.ngroup < w->s.ngroup ? w->ref.ngroup : w->s.ngroup;
    w->stage = DP_STAGE_INTRA;
    for (int g = 0; g < n; g++) {
        const dp_group *a = &w->s.group[g], *b = &w->ref.group[g];
        const double got[2] = {(double)a->t0, a->c}, want[2] = {(double)b->t0, b->c};
        dp_bisect_judge(w, "chunks", dp_bisect_chunk_place(w, g, -1), -1, 2, got, want, NULL, 0);
    }
    if (w->ref.ngroup > n)
        dp_bisect_judge(w, "chunks", dp_bisect_chunk_place(w, n, -1), -1, 1, &(double){NAN},
                        &(double){(double)w->ref.group[n].t0}, NULL, 0);
    dp_bisect_row *x = &w->out->stage[DP_STAGE_INTRA];
    const int same = !x->fails;
    if (same) {
        x->judged = 0;
        x->tensor[0] = 0;
        w->first[DP_STAGE_INTRA].n = 0;
    }
    return same;
}

void dp_bisect_work_free(dp_bisect_work *w) {
    const int64_t n = (int64_t)w->ref.ngroup * w->p->HV;
    for (int64_t i = 0; w->own && i < n; i++) {
        dp_bound_free(&w->intra[i]);
        dp_bound_free(&w->own[i]);
    }
    free(w->intra);
    free(w->own);
    for (int i = 0; i < DP_NSTAGES; i++)
        free(w->first[i].hash);
    dp_sim_free(&w->s);
    dp_sim_free(&w->t);
    dp_sim_free(&w->ref);
}

/* by_inverse: even if the fault does not ask for it. */
dp_status dp_bisect_work_new(dp_bisect_work *w, const dp_problem *p, const dp_sim_policy *how,
                             int by_inverse, dp_err *e) {
    const dp_exchange merge = dp_fault_exchange(how->fault, how->merge);
    const int shared = merge == DP_EXCHANGE_HEADS, N = shared ? 1 : how->N;
    w->p = p;
    w->base = how->base;
    w->r = dp_rounding_of(how->base, 2);
    dp_status st = dp_sim_new(&w->ref, p, DP_BASE_FP64, N, DP_FAULT_NONE, e);
    if (st) return st;
    st = dp_sim_new(&w->t, p, DP_BASE_FP64, N, DP_FAULT_NONE, e);
    if (!st) st = dp_sim_new(&w->s, p, how->base, N, how->fault, e);
    assert(!st);
    w->s.by_inverse |= by_inverse;
    w->t.by_inverse = w->s.by_inverse;
    w->r.inverse |= w->s.by_inverse;
    dp_sim_run(&w->ref, DP_FP64, DP_EXCHANGE_ALLGATHER, how->backward);
    if (shared) w->s.sharers = how->N;
    w->s.payload = shared ? DP_PAYLOAD_FULL : dp_fault_payload(how->fault, how->payload);
    dp_sim_begin(&w->t, DP_FP64, shared ? DP_EXCHANGE_ALLGATHER : merge, how->backward);
    dp_sim_begin(&w->s, how->chain, shared ? DP_EXCHANGE_ALLGATHER : merge, how->backward);
    bounds(w);
    return st;
}

dp_problem dp_bisect_owned(const dp_problem *p, dp_own kind, int ranks, int *parts) {
    dp_problem q = *p;
    *parts = ranks;
    if (!kind) return q;
    q.own = (dp_owners){kind, ranks};
    *parts = dp_own_parts(kind, p->T, ranks);
    return q;
}

dp_status dp_bisect_sim(const dp_problem *p, const dp_sim_policy *how, int runs, int all,
                        dp_bisect *out, dp_err *e) {
    const int N = how->N;
    dp_bisect_work w = {.out = out};
    *out = (dp_bisect){.first = -1, .N = N, .HV = p->HV};
    const dp_status st = dp_bisect_work_new(&w, p, how, 0, e);
    if (st) return st;
    for (int i = 0; i < DP_NSTAGES; i++) {
        out->stage[i].rank = dp_calloc((size_t)N, 1);
        out->stage[i].head = dp_calloc((size_t)p->HV, 1);
    }
    for (int i = 0; i < 2; i++) {
        out->conv[i].rank = dp_calloc((size_t)N, 1);
        out->conv[i].head = dp_calloc((size_t)p->HV, 1);
    }
    const int64_t nch = (int64_t)w.ref.ngroup * p->HV;
    const int last = same_chunks(&w) ? how->backward ? DP_NSTAGES : DP_STAGE_RECOMPUTE : 0;
    for (int i = 0; i < last; i++) {
        if (i == DP_STAGE_PRE_FWD)
            for (int64_t z = 0; z < nch; z++)
                dp_bound_exact(&w.own[z]);
        for (w.run = 0; w.run < runs; w.run++) {
            w.stage = i;
            w.s.runs = w.run;
            w.first[i].at = 0;
            w.first[i + (i == DP_STAGE_WY_BWD)].at = 0;
            dp_sim_stage(&w.s, w.stage);
            dp_sim_stage(&w.t, w.stage);
            dp_bisect_judge_stage(&w);
        }
        if (out->stage[i].fails && !all) break;
    }
    for (int i = DP_NSTAGES - 1; i >= 0; i--) {
        dp_bisect_row *x = &out->stage[i];
        if (x->fails) out->first = i;
        if (w.s.sharers) x->at.rank = -1; /* who has a head, not who has a token */
        for (int r = 0; r < N; r++)
            x->nrank += x->rank[r];
        for (int h = 0; h < p->HV; h++)
            x->nhead += x->head[h];
    }
    dp_bisect_work_free(&w);
    return DP_OK;
}

const char *const dp_bisect_conv_names[2] = {"conv_fwd", "conv_bwd"};

const dp_bisect_row *dp_bisect_first(const dp_bisect *b, const char **name) {
    const int conv = b->conv[0].fails ? 0 : b->first < 0 && b->conv[1].fails ? 1 : -1;
    *name = conv >= 0       ? dp_bisect_conv_names[conv]
            : b->first >= 0 ? dp_stage_names[b->first]
                            : NULL;
    return conv >= 0 ? &b->conv[conv] : b->first >= 0 ? &b->stage[b->first] : NULL;
}

void dp_bisect_free(dp_bisect *b) {
    for (int i = 0; i < DP_NSTAGES; i++) {
        free(b->stage[i].rank);
        free(b->stage[i].head);
    }
    for (int i = 0; i < 2; i++) {
        free(b->conv[i].rank);
        free(b->conv[i].head);
    }
    *b = (dp_bisect){.first = -1};
}
