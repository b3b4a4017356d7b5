/* Simulated ranks, in this process or each in one of its own: every base, chain format and merge
 * order of a case, judged. */
#include "harness/mpi/mpi_ranks.h"
#include "harness/simulated/calls.h"
#include "subjects.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- what there is to run -------------------------------------------------------------------- */

/* Ranks of N parts of the tokens. */
static int ranks_of(const dp_case *c, int N) { return c->p.own.kind ? c->p.own.ranks : N; }

static void add(const dp_subject_kind *k, const dp_case *c, int N, dp_base base, dp_format chain,
                dp_sending way, dp_plan *plan) {
    dp_planned *x = dp_plan_add(plan, k, N, base, chain);
    const char *no = dp_exchange_refuses(way.exchange, ranks_of(c, N), c->p.HV);
    x->design.sending = dp_sending_of(way.exchange, way.payload, N);
    x->design.pair_rows = c->pair_rows;
    x->way = way;
    x->says_way = 1;
    x->claimed = !no;
    if (no) snprintf(x->no, sizeof x->no, "%s", no);
}

/* One row for a number of ranks that there are not enough processes for. */
static void add_unavailable(const dp_subject_kind *k, int N, dp_base base, const char *no,
                            dp_plan *plan) {
    dp_planned *x = dp_plan_add(plan, k, N, base, DP_FP32);
    x->bare = 1;
    snprintf(x->no, sizeof x->no, "%s", no);
}

/* A session exchanges nothing. */
static dp_ways way_of_calls(const dp_case *c, const dp_run_options *o) {
    dp_ways w = {0};
    int merge;
    w.n = dp_select(1, (const int *)c->merge, &o->only[DP_ID_MERGE], &merge);
    if (w.n) w.way[0].exchange = (dp_exchange)merge;
    return w;
}

/* Every base, chain format and merge order of a case. */
static dp_status plan(const dp_subject_kind *k, const dp_asked *a, dp_plan *to,
                      DP_UNUSED dp_err *e) {
    const dp_case *c = a->c;
    const char *no = dp_unavailable(k->backend, ranks_of(c, a->N));
    if (no && a->nbase) add_unavailable(k, a->N, a->base[0], no, to);
    for (int i = 0; i < a->nbase * a->few && !no; i++) {
        const int f = i % a->few;
        const dp_ways w = dp_case_session(c) ? way_of_calls(c, a->o) : dp_ways_of(c, a->o, f);
        for (int z = 0; z < w.n; z++)
            add(k, c, a->N, a->base[i / a->few], a->chain[f], w.way[z], to);
    }
    return DP_OK;
}

/* ---- ranks ----------------------------------------------------------------------------------- */

/* One base, with each of its chains and exchanges. */
typedef struct {
    dp_step_run front; /* op step */
    dp_sim s;
} ranks;

static dp_status open_ranks(const dp_planned *x, const dp_sharding *sp, ranks *w, dp_err *e) {
    const dp_case *c = sp->c;
    const dp_backend be = x->kind->backend;
    const dp_fault fault = sp->std->o->fault;
    const int step = c->op->has_front;
    dp_status st = step ? dp_step_forward(c, be, x->N, x->base, fault, &w->front, e) : DP_OK;
    const dp_problem *p = step ? &w->front.p : &c->p;
    if (!st)
        st = dp_backends[be].peers ? dp_mpi_sim_open(&w->s, p, x->base, x->N, e)
                                   : dp_sim_new(&w->s, p, x->base, x->N, fault, e);
    if (st && step) dp_step_run_free(c, &w->front);
    return st;
}

static void close_ranks(const dp_planned *x, const dp_case *c, void *kept) {
    ranks *w = kept;
    (dp_backends[x->kind->backend].peers ? dp_mpi_sim_close : dp_sim_free)(&w->s);
    if (c->op->has_front) dp_step_run_free(c, &w->front);
    free(w);
}

static dp_status compute_ranks(const dp_planned *x, dp_sharding *sp, void **kept, dp_made *m,
                               dp_err *e) {
    const int backward = sp->truth->backward;
    ranks *w = *kept;
    if (!w) {
        w = dp_calloc(1, sizeof *w);
        const dp_status st = open_ranks(x, sp, w, e);
        if (st) {
            free(w);
            return st;
        }
        *kept = w;
        dp_sharding_prefixes(sp);
    }
    w->s.payload = x->way.payload;
    w->s.design.pair_rows = x->design.pair_rows;
    (dp_backends[x->kind->backend].peers ? dp_mpi_sim_run : dp_sim_run)(&w->s, x->chain,
                                                                        x->way.exchange, backward);
    m->front = sp->c->op->has_front ? &w->front : NULL;
    m->out = (dp_outputs){.results = &w->s.out, .forms_all_pairs = 1, .sim = &w->s};
    for (int i = 0; i < (backward ? DP_RANK_TENSORS : DP_RANK_DS_OUT); i++)
        if (dp_exchange_makes(x->way.exchange, i)) m->out.rank[i] = w->s.rank[i];
    return m->front && backward ? dp_step_backward(sp->c, &w->s.out, &w->front, e) : DP_OK;
}

/* ---- sessions -------------------------------------------------------------------------------- */

/* Results of its calls, and where a fault acted. */
typedef struct {
    const dp_case *c;
    dp_base base;
    dp_result got; /* o and the last state */
    unsigned char *hit;
} in_calls;

static dp_status one_call(void *who, const dp_problem *call, DP_UNUSED int states,
                          dp_call_result *out, dp_err *e) {
    dp_sim s;
    const dp_status st = dp_sim_new(&s, call, ((const in_calls *)who)->base, 1, DP_FAULT_NONE, e);
    if (!st) dp_calls_of_sim(&s, out);
    return st;
}

/* The same with convolutions before the recurrence, which begin from the inputs of earlier
 * calls. */
static dp_status one_step(void *who, const dp_problem *call, DP_UNUSED const dp_state_pool *pool,
                          const dp_conv_states *before, dp_call_result *out, dp_err *e) {
    const in_calls *x = who;
    const dp_case *c = x->c;
    dp_problem y = *call;
    dp_sim s;
    for (int i = 0; i < DP_NQKV; i++) {
        double **const q = &y.in[dp_qkv_input(i)];
        if (!c->step.on[i]) continue;
        dp_conv_states_run(&c->step.conv[i], x->base, *q, call->cu, before->of[i], &out->y[i],
                           &out->conv.of[i]);
        *q = out->y[i];
    }
    const dp_status st = dp_sim_new(&s, &y, x->base, 1, DP_FAULT_NONE, e);
    if (!st) dp_calls_of_sim(&s, out);
    return st;
}

static dp_status compute_calls(const dp_planned *x, dp_sharding *sp, dp_made *m, dp_err *e) {
    const dp_case *c = sp->c;
    const dp_fault fault = sp->std->o->fault;
    in_calls *w = m->own = dp_calloc(1, sizeof *w);
    const dp_caller by = {.run = one_call,
                          .who = w,
                          .drafts = &m->seen.drafts,
                          .pool = &m->seen.pool,
                          .front = c->op->has_front ? &m->seen.front : NULL,
                          .run_step = one_step};
    const dp_problem p = dp_step_before(c, &m->seen.front);
    *w = (in_calls){.c = c, .base = x->base, .hit = dp_calloc((size_t)c->p.HV, 1)};
    m->out.results = &w->got;
    return dp_calls_run(&p, &c->session, dp_fault_of_calls(fault) ? fault : DP_FAULT_NONE, &by,
                        &w->got, w->hit, e);
}

static void free_calls(DP_UNUSED const dp_case *c, dp_made *m) {
    in_calls *w = m->own;
    dp_result_free(&w->got);
    free(w->hit);
    free(w);
}

/* ---- both ------------------------------------------------------------------------------------ */

static dp_status compute(const dp_planned *x, dp_sharding *sp, void **kept, dp_made *m, dp_err *e) {
    return sp->first_of_call ? compute_calls(x, sp, m, e) : compute_ranks(x, sp, kept, m, e);
}

static void note(const dp_sharding *sp, DP_UNUSED const dp_made *m, dp_run *r) {
    r->fault = sp->std->o->fault;
}

/* Where the fault acted, in the recurrence or in the convolutions before and after it. */
static dp_status note_hits(DP_UNUSED const dp_planned *x, dp_sharding *sp, dp_made *m,
                           DP_UNUSED dp_bound_bases *bases, dp_run *r, DP_UNUSED dp_err *e) {
    const in_calls *calls = m->own;
    if (!r->fault) return DP_OK;
    r->nhit = sp->N * sp->c->p.HV;
    r->hit = dp_calloc((size_t)r->nhit, 1);
    for (int i = 0; i < r->nhit; i++)
        r->hit[i] = calls ? calls->hit[i] : m->out.sim->hit[i] | (m->front ? m->front->hit[i] : 0);
    return DP_OK;
}

#define RANKS(BACKEND)                                                                        \
    .backend = BACKEND, .plan = plan, .compute = compute, .close = close_ranks, .note = note, \
    .after = note_hits, .free = free_calls
const dp_subject_kind dp_on_simulated = {RANKS(DP_BACKEND_SIM)};
const dp_subject_kind dp_on_processes = {RANKS(DP_BACKEND_MPI), .absent = dp_unavailable};
