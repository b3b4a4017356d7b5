/* The chunk solver over LAPACKE. Every result and every intermediate is judged by name, like those
 * of any subject of this pipeline that sums in another order. Its numbers are those of the machine.
 */
#include "harness/simulated/calls.h"
#include "subjects.h"

#include <stdio.h>
#include <stdlib.h>

extern char *openblas_get_corename(void);

/* One chain format is enough, the widest of the case: what is looked at is the solver. */
static dp_format widest_chain(const dp_asked *a) {
    dp_format widest = a->chain[0];
    for (int i = 1; i < a->nchain; i++)
        if (a->chain[i] < widest) widest = a->chain[i];
    return widest;
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

/* fp32 and fp64, and unless it is asked for on the largest number of ranks. */
static dp_status plan(const dp_subject_kind *k, const dp_asked *a, dp_plan *to, dp_err *e) {
    const dp_case *c = a->c;
    const int none = !a->nchain || (!a->o->only[DP_ID_BACKEND].n && a->most > a->N);
    dp_status st = DP_OK;
    for (int i = 0; i < a->nbase && !none && !st; i++) {
        if (a->base[i] == DP_BASE_BF16) continue;
        dp_planned *x = dp_plan_add(to, k, a->N, a->base[i], widest_chain(a));
        st = design_of(a->o, x->base, &x->design, e);
        x->claimed = 1;
        x->stages = !dp_case_session(c);
        if (!c->session.slots || !dp_case_session(c)) continue;
        x = dp_plan_add(to, k, a->N, a->base[i], widest_chain(a));
        x->bare = 1;
        snprintf(x->no, sizeof x->no,
                 "pool: the solver over LAPACKE keeps no states in slots; it was given those of "
                 "the slots, and its results are judged in the run beside this one");
    }
    return st;
}

/* ---- what it computes ------------------------------------------------------------------------ */

typedef struct {
    dp_sim s; /* no session */
    double *stage[DP_NSTAGE_TENSORS];
    dp_result got; /* a session */
} made;

static const dp_sim_options OVER_LAPACK = {.linear = &dp_linear_lapack};

static dp_status compute_ranks(const dp_planned *x, dp_sharding *sp, dp_made *m, dp_err *e) {
    made *w = dp_calloc(1, sizeof *w);
    const dp_status st = dp_sim_open(&w->s, &sp->c->p, &x->design, x->N, &OVER_LAPACK, e);
    if (st) {
        free(w);
        return st;
    }
    m->own = w;
    dp_sim_run(&w->s, x->chain, DP_EXCHANGE_ALLGATHER, sp->truth->backward);
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++)
        if (sp->truth->backward || !dp_stage_tensors[i].backward)
            w->stage[i] = dp_stage_tensor_value(&w->s, i);
    m->out = (dp_outputs){.results = &w->s.out, .stage = w->stage};
    return DP_OK;
}

static dp_status one_call(void *who, const dp_problem *call, DP_UNUSED int states,
                          dp_call_result *out, dp_err *e) {
    dp_sim s;
    const dp_status st = dp_sim_open(&s, call, who, 1, &OVER_LAPACK, e);
    if (!st) dp_calls_of_sim(&s, out);
    return st;
}

static dp_status compute(const dp_planned *x, dp_sharding *sp, DP_UNUSED void **kept, dp_made *m,
                         dp_err *e) {
    const dp_caller by = {.run = one_call, .who = (void *)&x->design, .drafts = &m->seen.drafts};
    if (!sp->first_of_call) return compute_ranks(x, sp, m, e);
    made *w = m->own = dp_calloc(1, sizeof *w);
    m->out.results = &w->got;
    return dp_calls_run(&sp->c->p, &sp->c->session, DP_FAULT_NONE, &by, &w->got, NULL, e);
}

static void note(DP_UNUSED const dp_sharding *sp, DP_UNUSED const dp_made *m, dp_run *r) {
    r->path = openblas_get_corename();
}

static void free_own(DP_UNUSED const dp_case *c, dp_made *m) {
    made *w = m->own;
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++)
        free(w->stage[i]);
    if (w->s.p) dp_sim_free(&w->s);
    dp_result_free(&w->got);
    free(w);
}

const dp_subject_kind dp_on_lapack = {
    .backend = DP_BACKEND_LAPACK, .plan = plan, .compute = compute, .note = note, .free = free_own};
