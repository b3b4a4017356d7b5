/* The chunk solver over LAPACKE. Every result and every intermediate is judged by name, like those
 * of any subject of this pipeline that sums in another order. Its numbers are those of the machine.
 */
#include "harness/simulated/calls.h"
#include "subjects.h"

#include <stdio.h>
#include <stdlib.h>

extern char *openblas_get_corename(void);

/* Recurrences alone, no faults, fp32 and fp64; and unless it is asked for on the largest number of
 * ranks. Returns how many bases are left. */
static int bases_of(const dp_case *c, const dp_run_options *o, int N, int bases[DP_NBASES]) {
    int all[DP_NBASES], ranks[DP_MAX_RANK_COUNTS], n = 0;
    const int nr = dp_ranks_of(c, o, ranks), nb = dp_bases_of(c, o, all);
    if (!dp_case_on(c, DP_BACKEND_LAPACK) || o->fault || !dp_options_want(o, DP_BACKEND_LAPACK))
        return 0;
    for (int i = 0; i < nr; i++)
        if (!o->nbackend && ranks[i] > N) return 0;
    for (int i = 0; i < nb; i++)
        if (all[i] != DP_BASE_BF16) bases[n++] = all[i];
    return n;
}

/* One chain format is enough, the widest of the case: what is looked at is the solver. DP_NFORMATS:
 * none is left. */
static dp_format widest_chain(const dp_case *c, const dp_run_options *o) {
    int chains[DP_NFORMATS];
    const int n =
        dp_select(c->nchain, (const int *)c->chain, o->nchain, (const int *)o->chain, chains);
    int widest = DP_NFORMATS;
    for (int i = 0; i < n; i++)
        if (chains[i] < widest) widest = chains[i];
    return (dp_format)widest;
}

/* The default of the base, or what --design says: scores=factored, chunk=N. */
static dp_status design_of(const dp_run_options *o, dp_base base, dp_design *d, dp_err *e) {
    *d = dp_design_of(base);
    if (!o->design) return DP_OK;
    dp_design known = *d;
    const dp_status st = dp_design_parse(o->design, base, d, e);
    if (st) return st;
    known.gated = d->gated == DP_SCORES_FACTORED ? d->gated : DP_SCORES_PAIRWISE;
    known.chunk = d->chunk ? d->chunk : DP_CHUNK;
    if (dp_design_same(&known, d)) return DP_OK;
    return dp_fail(e, DP_EINPUT,
                   "--design %.80s: the solver over LAPACKE knows scores=factored and chunk=N",
                   o->design);
}

int dp_lapack_offers(const dp_subject_kind *k, const dp_case *c, const dp_run_options *o, int N) {
    int bases[DP_NBASES];
    (void)k;
    return bases_of(c, o, N, bases) > 0;
}

void dp_lapack_claims(const dp_case *c, const dp_run_options *o, int N, dp_claims *list) {
    int bases[DP_NBASES];
    const int n = widest_chain(c, o) == DP_NFORMATS ? 0 : bases_of(c, o, N, bases);
    for (int i = 0; i < n; i++) {
        dp_claim claim = {N, {0}, widest_chain(c, o), !dp_case_session(c)};
        if (!design_of(o, (dp_base)bases[i], &claim.design, NULL)) dp_claims_add(list, &claim);
    }
}

static void judge(dp_sharding *sp, const dp_result *got, double *const *stage, dp_run *r,
                  double from) {
    dp_bound_bases bases = {0};
    const dp_outputs outputs = {.results = got, .stage = stage};
    dp_judge_outputs(sp, &bases, &outputs, r, from);
    dp_bound_bases_free(&bases);
}

static dp_run *record(const dp_sharding *sp, const dp_design *design, dp_format chain,
                      dp_runs *out) {
    const dp_how how = {DP_BACKEND_LAPACK, design->base, chain, *design};
    dp_run *r = dp_sharding_record(sp, &how, out);
    r->path = openblas_get_corename();
    dp_sharding_note_truth(sp, r);
    r->id = dp_run_id(r);
    return r;
}

static dp_status run_base(dp_sharding *sp, const dp_design *design, dp_format chain, dp_runs *out,
                          dp_err *e) {
    const double from = dp_now();
    double *stage[DP_NSTAGE_TENSORS] = {NULL};
    dp_sim s;
    const dp_status st = dp_sim_new_lapack(&s, &sp->c->p, design, sp->N, e);
    if (st) return st;
    dp_sim_run(&s, chain, DP_EXCHANGE_ALLGATHER, sp->truth->backward);
    dp_run *r = record(sp, design, chain, out);
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++)
        if (sp->truth->backward || !dp_stage_tensors[i].backward)
            stage[i] = dp_stage_tensor_value(&s, i);
    judge(sp, &s.out, stage, r, from);
    dp_run_done(r, sp->std->o);
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++)
        free(stage[i]);
    dp_sim_free(&s);
    return DP_OK;
}

static dp_status one_call(void *who, const dp_problem *call, int states, dp_call_result *out,
                          dp_err *e) {
    (void)states;
    dp_sim s;
    const dp_status st = dp_sim_new_lapack(&s, call, who, 1, e);
    if (!st) dp_calls_of_sim(&s, out);
    return st;
}

/* Counts the parts of a session in a pool that are not judged: this solver returns states. */
static void skip_pool(const dp_sharding *sp, const dp_design *design, dp_format chain,
                      dp_runs *out) {
    dp_run *r = record(sp, design, chain, out);
    free(r->id);
    r->has_chain = 0;
    r->id = NULL;
    dp_run_skip(r,
                "pool: the solver over LAPACKE keeps no states in slots; it was given those of the "
                "slots, and its results are judged in the run beside this one",
                sp->std->o);
}

static dp_status run_calls(dp_sharding *sp, const dp_design *design, dp_format chain, dp_runs *out,
                           dp_err *e) {
    const double from = dp_now();
    dp_drafts drafts = {0};
    const dp_caller by = {.run = one_call, .who = (void *)design, .drafts = &drafts};
    dp_result got;
    dp_status st = dp_calls_run(&sp->c->p, &sp->c->session, DP_FAULT_NONE, &by, &got, NULL, e);
    if (!st) {
        dp_run *r = record(sp, design, chain, out);
        judge(sp, &got, NULL, r, from);
        st = dp_judge_drafts(sp, &drafts, r, e);
        dp_run_done(r, sp->std->o);
        if (sp->c->session.slots) skip_pool(sp, design, chain, out);
        dp_result_free(&got);
    }
    dp_drafts_free(&drafts);
    return st;
}

dp_status dp_lapack_run(const dp_subject_kind *k, dp_sharding *sp, dp_runs *out, dp_err *e) {
    int bases[DP_NBASES];
    const int nb = bases_of(sp->c, sp->std->o, sp->N, bases);
    const dp_format chain = widest_chain(sp->c, sp->std->o);
    dp_status st = DP_OK;
    (void)k;
    for (int i = 0; i < nb && chain != DP_NFORMATS && !st; i++) {
        dp_design design;
        st = design_of(sp->std->o, (dp_base)bases[i], &design, e);
        if (!st) st = (sp->first_of_call ? run_calls : run_base)(sp, &design, chain, out, e);
    }
    return st;
}
