/* A shared library (harness/deltaproof_subject.h), run in processes of its own. */
#include "harness/simulated/calls.h"
#include "subjects.h"

#include <stdio.h>
#include <string.h>

int dp_library_offers(const dp_subject_kind *k, const dp_case *c, const dp_run_options *o, int N) {
    (void)k;
    (void)c;
    (void)N;
    return o->subject != NULL;
}

/* ---- sessions: a run of the library for every call ------------------------------------------- */

typedef struct {
    const dp_subject *lib;
    const dp_subject_call *how;
    dp_subject_result *last; /* what its outcome says of the call that ended the session */
    int64_t calls;
    int states; /* 1: it showed those of every token */
    double seconds;
    dp_conv_front front; /* of a case that has convolutions in front; else all NULL */
} in_calls;

static int64_t entries(const dp_problem *p, const dp_state_pool *pool) {
    return pool->slots * p->HV * p->K * p->V;
}

/* One call, its outcome noted. DP_EINPUT: it ends the session. */
static dp_status make_call(in_calls *x, const dp_problem *call, const dp_subject_call *how,
                           dp_call_result *out, dp_err *e) {
    dp_subject_result s;
    const dp_status st = dp_subject_run(x->lib, call, how, &s, e);
    if (st) return st;
    x->calls++;
    x->seconds += s.seconds;
    x->last->outcome = s.outcome;
    snprintf(x->last->why, sizeof x->last->why, "%.480s", s.why);
    if (s.outcome == DP_SUBJECT_RETURNED && !how->pool && !s.r.final_state) {
        x->last->outcome = DP_SUBJECT_REFUSED;
        snprintf(x->last->why, sizeof x->last->why,
                 "it writes no final_state, which calls hand on");
    }
    const int returned = x->last->outcome == DP_SUBJECT_RETURNED;
    x->states |= returned && s.states;
    if (returned) {
        if (how->pool)
            memcpy(how->pool->state, s.pool, sizeof *s.pool * (size_t)entries(call, how->pool));
        *out = (dp_call_result){.out = s.r, .states = s.states, .conv = s.conv};
        memcpy(out->y, s.y, sizeof s.y);
        memset(s.y, 0, sizeof s.y);
        s.conv = (dp_conv_states){{NULL}};
        s.r = (dp_result){0};
        s.states = NULL;
    }
    dp_subject_result_free(&s);
    return returned ? DP_OK : DP_EINPUT;
}

/* pool: where states lie; NULL: it gets and returns them. */
static dp_status run_in(void *who, const dp_problem *call, const dp_state_pool *pool, int states,
                        dp_call_result *out, dp_err *e) {
    in_calls *x = who;
    dp_subject_call how = *x->how;
    how.states = states;
    how.pool = pool;
    return make_call(x, call, &how, out, e);
}

static dp_status run_one_call(void *who, const dp_problem *call, int states, dp_call_result *out,
                              dp_err *e) {
    return run_in(who, call, NULL, states, out, e);
}

static dp_status run_step(void *who, const dp_problem *call, const dp_conv_states *before,
                          dp_call_result *out, dp_err *e) {
    in_calls *x = who;
    dp_subject_call how = *x->how;
    dp_conv_front front = x->front;
    front.before = before;
    how.front = &front;
    return make_call(x, call, &how, out, e);
}

/* What a session has beside its results. */
typedef struct {
    int states; /* 1: the library showed those of every token */
    dp_calls_seen seen;
} calls_made;

/* DP_OK also where the library ended the session: s says how, and holds no results then. */
static dp_status run_calls(const dp_sharding *sp, const dp_subject_call *how, calls_made *made,
                           dp_subject_result *s, dp_err *e) {
    *s = (dp_subject_result){0};
    const int step = dp_op_of(sp->c)->has_front;
    in_calls x = {.lib = sp->std->o->subject, .how = how, .last = s};
    const int takes_pool = x.lib->writes_pool && !step;
    if (step && !x.lib->command) {
        s->outcome = DP_SUBJECT_REFUSED;
        snprintf(s->why, sizeof s->why,
                 "a library gets no convolutions in front; a program does (--run)");
        return DP_OK;
    }
    const dp_problem p = dp_step_before(sp->c, &made->seen.front);
    memcpy(x.front.conv, made->seen.front.conv, sizeof x.front.conv);
    const dp_caller by = {.run = run_one_call,
                          .who = &x,
                          .drafts = &made->seen.drafts,
                          .pool = takes_pool ? &made->seen.pool : NULL,
                          .run_in = takes_pool ? run_in : NULL,
                          .front = step ? &made->seen.front : NULL,
                          .run_step = run_step};
    const dp_status st = dp_calls_run(&p, &sp->c->session, DP_FAULT_NONE, &by, &s->r, NULL, e);
    made->states = x.states;
    s->seconds = x.seconds;
    if (st != DP_EINPUT) return st;
    const size_t n = strlen(s->why);
    snprintf(s->why + n, sizeof s->why - n, " (call %lld)", (long long)x.calls);
    return DP_OK;
}

/* ---- one run --------------------------------------------------------------------------------- */

static dp_status call(const dp_sharding *sp, const dp_how *how, calls_made *made,
                      dp_subject_result *s, dp_err *e) {
    const dp_case *c = sp->c;
    const dp_run_options *o = sp->std->o;
    const double limit = o->limit_s > 0 ? o->limit_s : DP_SUBJECT_LIMIT_S;
    const dp_subject_call one = {.input_format = dp_formats[c->input_dtype].name,
                                 .N = sp->N,
                                 .base = how->base,
                                 .chain = how->chain,
                                 .backward = c->backward,
                                 .limit_s = limit};
    return sp->first_of_call ? run_calls(sp, &one, made, s, e)
                             : dp_subject_run(o->subject, &c->p, &one, s, e);
}

static void note_failure(const dp_subject_result *s, dp_run *r, double from) {
    r->verdict = s->outcome == DP_SUBJECT_REFUSED ? DP_SKIPPED : DP_FAIL;
    r->seconds = dp_now() - from;
    snprintf(r->why, sizeof r->why, "%s", s->why);
}

/* What is exact in bf16 leaves the range of fp16. */
static int leaves_range(const dp_case *c, const dp_design *d) {
    const dp_format kept[] = {d->factors, d->state, d->dstate, d->out};
    int fp16 = 0;
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++)
        fp16 |= kept[i] == DP_FP16;
    return fp16 && dp_case_is_exact(c);
}

/* In the format and chain that are asked for; the design is the one declared for that base. */
static dp_status run_one(dp_sharding *sp, dp_base base, dp_format chain, dp_bound_bases *bases,
                         dp_runs *out, dp_err *e) {
    const dp_run_options *o = sp->std->o;
    const char *declared = o->design ? o->design : o->subject->design;
    const double from = dp_now();
    dp_how how = {.backend = DP_BACKEND_SUBJECT, .base = base, .chain = chain};
    dp_subject_result s;
    dp_status st = dp_design_parse(declared ? declared : "", base, &how.design, e);
    calls_made made = {0};
    if (!st && leaves_range(sp->c, &how.design))
        s = (dp_subject_result){
            .outcome = DP_SUBJECT_REFUSED,
            .why = "keys = exact: its numbers leave the range of fp16, which the design keeps"};
    else if (!st)
        st = call(sp, &how, &made, &s, e);
    if (st) {
        dp_calls_seen_free(&made.seen);
        return st;
    }
    dp_run *r = dp_sharding_record(sp, &how, out);
    r->other_design = 1;
    r->undeclared = !declared;
    r->path = o->subject->name;
    r->outcome = dp_subject_outcomes[s.outcome];
    if (r->rollback && made.states) r->rollback = "states of every token";
    dp_sharding_note_truth(sp, r);
    r->id = dp_run_id(r);
    if (s.outcome == DP_SUBJECT_RETURNED) {
        const dp_outputs outputs = {.results = &s.r, .stage = s.stage};
        st = dp_judge_calls(sp, &outputs, &made.seen, bases, r, from, e);
    } else {
        note_failure(&s, r, from);
    }
    if (o->done) o->done(r, o->arg);
    dp_calls_seen_free(&made.seen);
    dp_subject_result_free(&s);
    return st;
}

/* What the options name, else what the library claims. One rank forms no M: one chain format will
 * do. */
dp_status dp_library_run(const dp_subject_kind *k, dp_sharding *sp, dp_runs *out, dp_err *e) {
    const dp_run_options *o = sp->std->o;
    const dp_subject *lib = o->subject;
    const int nb = o->nbase ? o->nbase : 1, nc = o->nchain && sp->N > 1 ? o->nchain : 1;
    dp_status st = DP_OK;
    (void)k;
    if (sp->N > lib->max_ranks) return DP_OK;
    for (int i = 0; i < nb && !st; i++) {
        dp_bound_bases bases = {0};
        for (int j = 0; j < nc && !st; j++)
            st = run_one(sp, o->nbase ? o->base[i] : lib->base,
                         o->nchain ? o->chain[j] : lib->chain, &bases, out, e);
        dp_bound_bases_free(&bases);
    }
    return st;
}
