/* A case over N ranks: what each rank must see, its fp64 reference, and the records of runs on it.
 */
#include "limits.h"
#include "ref/arithmetic/elementary.h"
#include "ref/arithmetic/mm.h"
#include "standard.h"

#include <assert.h>
#include <stdlib.h>

static dp_status true_ranks(dp_sharding *sp, int boundaries, dp_err *e) {
    const dp_problem *p = &sp->c->p;
    if (boundaries) sp->at = dp_calloc((size_t)sp->N * p->HV, sizeof *sp->at);
    for (int r = 0; r < sp->N; r++) {
        dp_context c;
        const dp_status st = dp_context_of(p, sp->N, r, &c, e);
        if (st) return st;
        for (int hv = 0; boundaries && hv < p->HV; hv++)
            dp_truth_at_rank(sp->truth, p, &c, hv, &sp->at[r * p->HV + hv]);
        dp_context_free(&c);
    }
    return DP_OK;
}

dp_status dp_sharding_open(dp_sharding *sp, dp_standard *std, int N, int boundaries, dp_err *e) {
    *sp = (dp_sharding){.std = std, .c = std->c, .truth = &std->truth, .N = N};
    const dp_status st = true_ranks(sp, boundaries, e);
    if (st) return st;
    sp->windows = dp_windows_of(&sp->c->p, N);
    const dp_session *session = dp_case_session(sp->c);
    if (session) {
        sp->first_of_call = dp_calloc((size_t)sp->c->p.T, 1);
        dp_session_firsts(session, sp->c->p.cu, sp->c->p.Nseq, sp->first_of_call);
        return DP_OK; /* the systems of its chunks are none of those that the condition is of */
    }
    return dp_condition_cached(&sp->c->p, N, NULL, std->o->cache, &sp->cond, e);
}

void dp_sharding_close(dp_sharding *sp) {
    for (int i = 0; sp->at && i < sp->N * sp->c->p.HV; i++)
        dp_truth_rank_free(&sp->at[i]);
    for (int i = 0; sp->traj && i < DP_MAX_TRAJ; i++)
        free(sp->traj[i]);
    if (sp->have_fp64) dp_error_bound_base_free(&sp->fp64);
    if (sp->have_ref) dp_sim_free(&sp->ref);
    dp_windows_free(&sp->windows);
    free(sp->at);
    free(sp->traj);
    free(sp->first_of_call);
}

/* ---- the fp64 reference ---------------------------------------------------------------------- */

dp_sim *dp_sharding_reference(dp_sharding *sp) {
    if (sp->have_ref) return &sp->ref;
    dp_sharding_reference_of(sp, DP_CHUNK, &sp->ref);
    sp->have_ref = 1;
    return &sp->ref;
}

void dp_sharding_reference_of(const dp_sharding *sp, int chunk, dp_sim *ref) {
    dp_design exact = dp_design_of(DP_BASE_FP64);
    exact.chunk = chunk;
    const dp_status st = sp->first_of_call
                             ? dp_sim_new_calls(ref, &sp->c->p, &exact, sp->first_of_call, NULL)
                             : dp_sim_new_design(ref, &sp->c->p, &exact, sp->N, NULL);
    assert(!st);
    (void)st;
    dp_sim_run(ref, DP_FP64, DP_EXCHANGE_ALLGATHER, sp->c->backward);
}

dp_error_bound_base *dp_sharding_fp64(dp_sharding *sp) {
    if (!sp->have_fp64)
        dp_error_bound_base_init(&sp->fp64, dp_sharding_reference(sp), DP_BASE_FP64, 1,
                                 sp->c->backward);
    sp->have_fp64 = 1;
    return &sp->fp64;
}

void dp_sharding_prefixes(dp_sharding *sp) {
    const dp_truth *t = sp->truth;
    const dp_problem *p = &sp->c->p;
    if (sp->traj || p->own.kind || p->HV != 1 || p->Nseq != 1 || !t->M_seg.rows) return;
    const int64_t KK = (int64_t)p->K * p->K, L = p->T / sp->N, a = sp->N >= 3 ? L : 0;
    double *P = NULL, *Q = dp_doubles(KK);
    sp->traj = dp_calloc(DP_MAX_TRAJ, sizeof *sp->traj);
    for (int i = 0; i + 1 < t->nmark; i++) {
        const double *segment = t->M_seg.hi + (int64_t)i * KK;
        if (t->mark[i] < a || t->mark[i] >= a + L) continue;
        if (P) {
            dp_mm(DP_FP64, 0, 0, p->K, p->K, p->K, segment, P, Q);
            double *was = P;
            P = Q;
            Q = was;
        } else {
            P = dp_copy(segment, KK);
        }
        for (int x = 0; x < DP_MAX_TRAJ; x++)
            if (a + ((int64_t)DP_CHUNK << x) == t->mark[i + 1]) sp->traj[x] = dp_copy(P, KK);
    }
    free(P);
    free(Q);
}

/* ---- runs on it ------------------------------------------------------------------------------ */

void dp_sharding_expect(dp_sharding *sp, int stages, const dp_run *r) {
    dp_claim claim = dp_run_claim(r);
    claim.stages = stages;
    dp_standard_expect(sp->std, r->set, 1, &claim);
}

const dp_expected *dp_sharding_expected(const dp_sharding *sp, const dp_run *r) {
    const dp_claim claim = dp_run_claim(r);
    return dp_expectations_find(&sp->std->expect, &claim, r->set);
}

dp_run *dp_sharding_record(const dp_sharding *sp, const dp_how *how, dp_runs *out) {
    dp_run *r = dp_runs_add(out, sp->c);
    r->backend = how->backend;
    r->ranks = sp->N;
    r->own = sp->c->p.own.kind;
    if (r->own) {
        r->ranks = sp->c->p.own.ranks;
        r->parts = sp->N;
    }
    r->base = how->base;
    r->chain = how->chain;
    r->design = how->design;
    if (sp->std->o->drop) r->design.drop = sp->std->o->drop;
    r->let_unjudged = sp->std->o->unjudged;
    r->has_base = r->has_chain = 1;
    if (sp->first_of_call && dp_session_rolls_back(&sp->c->session))
        r->rollback = "accepted tokens run again";
    return r;
}

void dp_sharding_note_truth(const dp_sharding *sp, dp_run *r) {
    const dp_truth_note *note = &sp->std->note;
    r->truth_kind = dp_truth_kind_names[sp->truth->kind];
    r->truth_bits = sp->truth->bits;
    r->truth_cached = note->cached;
    r->truth_device = note->device;
    r->truth_audit = note->audit;
    r->truth_radius = sp->std->radius;
    r->cond = sp->cond;
}
