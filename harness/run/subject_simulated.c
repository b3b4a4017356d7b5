/* Simulated ranks, in this process or each in one of its own: every base, chain format and merge
 * order of a case, judged. */
#include "harness/mpi/mpi_ranks.h"
#include "harness/simulated/calls.h"
#include "subjects.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int dp_simulated_offers(const dp_subject_kind *k, const dp_case *c, const dp_run_options *o,
                        int N) {
    (void)N;
    return dp_options_want(o, k->backend) && dp_case_on(c, k->backend) &&
           (dp_backends[k->backend].faulty || !o->fault) && !dp_unavailable(k->backend, 1);
}

/* Ranks of N parts of the tokens. */
static int ranks_of(const dp_case *c, int N) { return c->p.own.kind ? c->p.own.ranks : N; }

static dp_design design_of(dp_base base, dp_sending x, int N) {
    dp_design d = dp_design_of(base);
    d.sending = dp_sending_of(x.exchange, x.payload, N);
    return d;
}

void dp_simulated_claims(const dp_case *c, const dp_run_options *o, int N, dp_claims *list) {
    int bases[DP_NBASES], chains[DP_NFORMATS];
    const int nb = dp_bases_of(c, o, bases);
    const int nc = dp_case_chains(c, N, o->nchain, (const int *)o->chain, chains);
    for (int i = 0; i < nb * nc; i++) {
        const dp_ways w = dp_ways_of(c, o, i % nc);
        for (int k = 0; k < w.n; k++) {
            const dp_claim claim = {N, design_of((dp_base)bases[i / nc], w.way[k], N),
                                    (dp_format)chains[i % nc], 0};
            if (!dp_exchange_refuses(w.way[k].exchange, ranks_of(c, N), c->p.HV))
                dp_claims_add(list, &claim);
        }
    }
}

/* Simulated ranks in one base, with one bound for all exchanges that round alike. */
typedef struct {
    dp_sharding *sp;
    dp_backend backend;
    dp_base base;
    dp_sim *s; /* of a session none: each call has its own */
    dp_bound_bases bases;
    dp_format chain;
    dp_sending sending; /* that bound is of */
    int bounded;        /* is there any */
    dp_error_bound bound;
} in_one_base;

static dp_run *record(const in_one_base *x, dp_sending way, dp_runs *out) {
    const dp_how how = {x->backend, x->base, x->chain, design_of(x->base, way, x->sp->N)};
    dp_run *r = dp_sharding_record(x->sp, &how, out);
    r->merge = way.exchange;
    r->payload = way.payload;
    r->has_merge = 1;
    r->fault = x->sp->std->o->fault;
    dp_sharding_note_truth(x->sp, r);
    r->id = dp_run_id(r);
    return r;
}

/* Where the fault acted, in the recurrence or in the convolutions before and after it. */
static void note_hits(const in_one_base *x, dp_run *r) {
    const dp_step_run *step = x->sp->step;
    r->nhit = x->sp->N * x->s->p->HV;
    r->hit = dp_calloc((size_t)r->nhit, 1);
    for (int i = 0; i < r->nhit; i++)
        r->hit[i] = x->s->hit[i] | (step ? step->hit[i] : 0);
}

static void bound(in_one_base *x, const dp_design *design) {
    const int same = !memcmp(&x->sending, &design->sending, sizeof x->sending);
    if (x->bounded && same) return;
    if (x->bounded) dp_error_bound_free(&x->bound);
    dp_run_bounds(x->sp, design, x->chain, &x->bases, &x->bound);
    x->sending = design->sending;
    x->bounded = 1;
}

static void run_merge(in_one_base *x, dp_sending way, dp_runs *out) {
    const dp_run_options *o = x->sp->std->o;
    const int backward = x->sp->truth->backward;
    const double from = dp_now();
    dp_sim *s = x->s;
    dp_run *r = record(x, way, out);
    bound(x, &r->design);
    s->payload = way.payload;
    (dp_backends[x->backend].peers ? dp_mpi_sim_run : dp_sim_run)(s, x->chain, way.exchange,
                                                                  backward);
    dp_outputs outputs = {.results = &s->out, .forms_all_pairs = 1, .sim = s};
    for (int i = 0; i < (backward ? DP_RANK_TENSORS : DP_RANK_DS_OUT); i++)
        if (dp_exchange_makes(way.exchange, i)) outputs.rank[i] = dp_sim_rank_list(s, i);
    const dp_judging j = {x->sp, &x->bases, &x->bound, &outputs};
    dp_judge_run(&j, r, from);
    if (o->fault) note_hits(x, r);
    dp_run_done(r, o);
}

/* Why these ranks cannot exchange so; NULL: they can. */
static const char *refuses(const in_one_base *x, dp_exchange merge) {
    return dp_exchange_refuses(merge, ranks_of(x->sp->c, x->sp->N), x->sp->c->p.HV);
}

static void run_all(in_one_base *x, dp_runs *out) {
    const dp_case *c = x->sp->c;
    const dp_run_options *o = x->sp->std->o;
    int chains[DP_NFORMATS];
    const int nc = dp_case_chains(c, x->sp->N, o->nchain, (const int *)o->chain, chains);
    for (int i = 0; i < nc; i++) {
        const dp_ways w = dp_ways_of(c, o, i);
        x->chain = (dp_format)chains[i];
        for (int k = 0; k < w.n; k++) {
            const char *no = refuses(x, w.way[k].exchange);
            if (no)
                dp_run_skip(record(x, w.way[k], out), no, o);
            else
                run_merge(x, w.way[k], out);
        }
        if (x->bounded) dp_error_bound_free(&x->bound);
        x->bounded = 0;
    }
}

/* ---- sessions -------------------------------------------------------------------------------- */

static dp_status one_call(void *who, const dp_problem *call, int states, dp_call_result *out,
                          dp_err *e) {
    (void)states;
    dp_sim s;
    const dp_status st =
        dp_sim_new(&s, call, ((const in_one_base *)who)->base, 1, DP_FAULT_NONE, e);
    if (!st) dp_calls_of_sim(&s, out);
    return st;
}

/* The same with convolutions before the recurrence, which begin from the inputs of earlier
 * calls. */
static dp_status one_step(void *who, const dp_problem *call, const dp_state_pool *pool,
                          const dp_conv_states *before, dp_call_result *out, dp_err *e) {
    (void)pool;
    const in_one_base *x = who;
    const dp_case *c = x->sp->c;
    dp_problem y = *call;
    dp_sim s;
    for (int i = 0; i < DP_NQKV; i++) {
        double **const q = dp_qkv_at(&y, i);
        if (!c->step.on[i]) continue;
        dp_conv_states_run(&c->step.conv[i], dp_step_policy(x->base), *q, call->cu, before->of[i],
                           &out->y[i], &out->conv.of[i]);
        *q = out->y[i];
    }
    const dp_status st = dp_sim_new(&s, &y, x->base, 1, DP_FAULT_NONE, e);
    if (!st) dp_calls_of_sim(&s, out);
    return st;
}

/* Results of the calls of a session, and where a fault acted. */
typedef struct {
    dp_result got; /* o and the last state */
    dp_calls_seen seen;
    unsigned char *hit;
} calls_made;

static dp_status compute_calls(in_one_base *x, calls_made *made, dp_err *e) {
    const dp_case *c = x->sp->c;
    const dp_fault fault = x->sp->std->o->fault;
    const int step = dp_op_of(c)->has_front;
    const dp_caller by = {.run = one_call,
                          .who = x,
                          .drafts = &made->seen.drafts,
                          .pool = &made->seen.pool,
                          .front = step ? &made->seen.front : NULL,
                          .run_step = one_step};
    const dp_problem p = dp_step_before(c, &made->seen.front);
    made->hit = dp_calloc((size_t)c->p.HV, 1);
    return dp_calls_run(&p, &c->session, dp_fault_of_calls(fault) ? fault : DP_FAULT_NONE, &by,
                        &made->got, made->hit, e);
}

static void free_calls(calls_made *made) {
    dp_result_free(&made->got);
    dp_calls_seen_free(&made->seen);
    free(made->hit);
}

static dp_status run_calls(dp_sharding *sp, dp_backend be, dp_base base, dp_runs *out, dp_err *e) {
    const dp_run_options *o = sp->std->o;
    const double from = dp_now();
    int chains[DP_NFORMATS], merge;
    calls_made made = {0};
    in_one_base x = {.sp = sp, .backend = be, .base = base};
    if (!dp_case_chains(sp->c, 1, o->nchain, (const int *)o->chain, chains) ||
        !dp_select(1, (const int *)sp->c->merge, o->nmerge, (const int *)o->merge, &merge))
        return DP_OK;
    dp_status st = compute_calls(&x, &made, e);
    if (!st) {
        x.chain = (dp_format)chains[0];
        dp_run *r = record(&x, (dp_sending){.exchange = (dp_exchange)merge}, out);
        const dp_outputs outputs = {.results = &made.got};
        st = dp_judge_calls(sp, &outputs, &made.seen, &x.bases, r, from, e);
        dp_bound_bases_free(&x.bases);
        if (o->fault) {
            r->nhit = sp->c->p.HV;
            r->hit = made.hit;
            made.hit = NULL;
        }
        dp_run_done(r, o);
    }
    free_calls(&made);
    return st;
}

static dp_status open_ranks(in_one_base *x, const dp_problem *p, dp_err *e) {
    const int N = x->sp->N;
    return dp_backends[x->backend].peers ? dp_mpi_sim_open(x->s, p, x->base, N, e)
                                         : dp_sim_new(x->s, p, x->base, N, x->sp->std->o->fault, e);
}

static dp_status run_base(dp_sharding *sp, dp_backend be, dp_base base, dp_runs *out, dp_err *e) {
    const dp_case *c = sp->c;
    const dp_fault fault = sp->std->o->fault;
    const int step = dp_op_of(c)->has_front;
    dp_step_run front = {0};
    dp_sim s;
    in_one_base x = {.sp = sp, .backend = be, .base = base, .s = &s};
    dp_status st = step ? dp_step_forward(c, be, sp->N, base, fault, &front, e) : DP_OK;
    if (!st) st = open_ranks(&x, step ? &front.p : &c->p, e);
    if (!st) {
        sp->step = step ? &front : NULL;
        run_all(&x, out);
        sp->step = NULL;
        dp_bound_bases_free(&x.bases);
        (dp_backends[be].peers ? dp_mpi_sim_close : dp_sim_free)(&s);
    }
    if (step) dp_step_run_free(c, &front);
    return st;
}

/* One row for a number of ranks that there are not enough processes for. */
static void skip_ranks(const dp_sharding *sp, dp_backend be, const char *why, dp_runs *out) {
    const dp_run_options *o = sp->std->o;
    int bases[DP_NBASES];
    if (!dp_bases_of(sp->c, o, bases)) return;
    const dp_how how = {be, (dp_base)bases[0], DP_FP32, dp_design_of((dp_base)bases[0])};
    dp_run *r = dp_sharding_record(sp, &how, out);
    r->has_chain = 0;
    dp_run_skip(r, why, o);
}

dp_status dp_simulated_run(const dp_subject_kind *k, dp_sharding *sp, dp_runs *out, dp_err *e) {
    int bases[DP_NBASES];
    const int nb = dp_bases_of(sp->c, sp->std->o, bases);
    const char *no = dp_unavailable(k->backend, ranks_of(sp->c, sp->N));
    dp_status st = DP_OK;
    if (no) {
        skip_ranks(sp, k->backend, no, out);
        return DP_OK;
    }
    dp_sharding_prefixes(sp);
    for (int i = 0; i < nb && !st; i++)
        st = (sp->first_of_call ? run_calls : run_base)(sp, k->backend, (dp_base)bases[i], out, e);
    return st;
}
