/* A shared library (harness/deltaproof_subject.h), run in processes of its own, and its calls made
 * again, with the same values and with others (subjects.h).
 */
#include "harness/simulated/calls.h"
#include "limits.h"
#include "subjects.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- other values, and where results differ -------------------------------------------------- */

/* ---- other values ---------------------------------------------------------------------------- */

/* x [outer][heads][each]: head h takes the place of h + by, and all change sign. */
static void turn(double *x, int64_t outer, int heads, int64_t each, int by, double sign) {
    double *row = dp_doubles(heads * each);
    for (int64_t i = 0; i < outer; i++) {
        double *at = x + i * heads * each;
        for (int h = 0; h < heads; h++)
            for (int64_t z = 0; z < each; z++)
                row[(h + by + heads) % heads * each + z] = sign * at[h * each + z];
        memcpy(at, row, sizeof *row * (size_t)(heads * each));
    }
    free(row);
}

static int64_t outer_of(const dp_problem *p, dp_row_kind kind) {
    return kind == DP_OF_TOKENS ? p->T : kind == DP_OF_SEQUENCES ? p->Nseq : 1;
}

/* By how many of its own heads a tensor moves where query and key heads move by one. */
static int step(const dp_problem *p, int heads) { return heads == p->HV ? dp_G(p) : 1; }

/* q and do change sign, and k and v, of which a user's own rows may need others to do so, too. */
static int turns_input(const dp_problem *p, int i) {
    return i == DP_INPUT_Q || i == DP_INPUT_DO ||
           ((i == DP_INPUT_K || i == DP_INPUT_V) && p->model != DP_USER);
}
static int turns_result(const dp_problem *p, int f) {
    return f == DP_RESULT_O || f == DP_RESULT_DQ ||
           ((f == DP_RESULT_DK || f == DP_RESULT_DV) && p->model != DP_USER);
}

dp_problem dp_other_values(const dp_problem *p) {
    dp_problem c = *p;
    dp_inputs_copy(&c, p, dp_copy);
    c.cu = dp_cu_copy(p);
    for (int i = 0; i < DP_NINPUTS; i++) {
        double *x = *dp_input_at(&c, i);
        const int heads = dp_input_heads(p, i);
        const int64_t outer = outer_of(p, dp_input_fields[i].kind);
        if (x && outer)
            turn(x, outer, heads, dp_input_count(p, i) / outer / heads, step(p, heads),
                 turns_input(p, i) ? -1 : 1);
    }
    return c;
}

void dp_other_values_undo(const dp_problem *p, dp_result *r) {
    for (int f = 0; f < DP_NRESULTS; f++) {
        double *x = *dp_result_at(r, f);
        const int heads = dp_result_heads(p, f);
        const int64_t outer = outer_of(p, dp_result_fields[f].kind);
        int64_t rows, width;
        dp_result_shape(p, f, &rows, &width);
        if (x && outer && rows)
            turn(x, outer, heads, rows * width / outer / heads, -step(p, heads),
                 turns_result(p, f) ? -1 : 1);
    }
}

/* ---- where results differ -------------------------------------------------------------------- */

static void row_text(const dp_problem *p, int f, int64_t row, char *text, size_t size) {
    const int heads = dp_result_heads(p, f), per = dp_result_rows_per_token(p, f);
    const dp_row_kind kind = dp_result_fields[f].kind;
    if (kind == DP_OF_HEADS)
        snprintf(text, size, "head %lld", (long long)row);
    else if (kind == DP_OF_SEQUENCES)
        snprintf(text, size, "sequence %lld, head %lld", (long long)(row / p->HV),
                 (long long)(row % p->HV));
    else
        snprintf(text, size, "token %lld, head %lld", (long long)(row / per / heads),
                 (long long)(row / per % heads));
}

int dp_results_differ(const dp_problem *p, const dp_result *a, const dp_result *b, char *text,
                      size_t size) {
    int differ = 0;
    for (int f = 0; f < DP_NRESULTS; f++) {
        const double *x = *dp_result_at((dp_result *)a, f), *y = *dp_result_at((dp_result *)b, f);
        int64_t rows, width, n = 0, first = 0, from = INT64_MAX, to = -1;
        char at[64], columns[100] = "";
        dp_result_shape(p, f, &rows, &width);
        for (int64_t i = 0; x && y && i < rows * width; i++) {
            if (x[i] == y[i] || (isnan(x[i]) && isnan(y[i]))) continue;
            if (!n++) first = i;
            if (i % width < from) from = i % width;
            if (i % width > to) to = i % width;
        }
        if (!n || differ++) continue;
        row_text(p, f, first / width, at, sizeof at);
        if (to - from + 1 < width && n > 1)
            snprintf(columns, sizeof columns, ", all in columns %lld to %lld of 0 to %lld",
                     (long long)from, (long long)to, (long long)width - 1);
        snprintf(text, size, "%lld of %lld entries of %s%s, the first at %s: %.9g, then %.9g",
                 (long long)n, (long long)(rows * width), dp_result_fields[f].name, columns, at,
                 x[first], y[first]);
    }
    return differ;
}

/* ---- the library ----------------------------------------------------------------------------- */

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
    dp_conv_front front; /* of a case with convolutions before the recurrence; else all NULL */
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

static dp_status run_step(void *who, const dp_problem *call, const dp_state_pool *pool,
                          const dp_conv_states *before, dp_call_result *out, dp_err *e) {
    in_calls *x = who;
    dp_subject_call how = *x->how;
    how.pool = x->lib->writes_pool ? pool : NULL;
    dp_conv_front front = x->front;
    front.before = before;
    how.front = &front;
    return make_call(x, call, &how, out, e);
}

/* A session's tensors beside its results. */
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
    const int takes_pool = x.lib->writes_pool;
    if (step && !x.lib->command) {
        s->outcome = DP_SUBJECT_REFUSED;
        snprintf(s->why, sizeof s->why,
                 "a library gets no convolutions in front; a program does (--run)");
        return DP_OK;
    }
    const int drafts = takes_pool && !step && x.lib->writes_drafts && sp->c->session.slots;
    if (drafts && !dp_session_drafts(&sp->c->session, sp->c->p.Nseq, s->why, sizeof s->why)) {
        s->outcome = DP_SUBJECT_REFUSED;
        return DP_OK;
    }
    const dp_problem p = dp_step_before(sp->c, &made->seen.front);
    memcpy(x.front.conv, made->seen.front.conv, sizeof x.front.conv);
    const dp_caller by = {.run = run_one_call,
                          .who = &x,
                          .drafts = &made->seen.drafts,
                          .far = &made->seen.far,
                          .pool = takes_pool ? &made->seen.pool : NULL,
                          .run_in = takes_pool ? run_in : NULL,
                          .drafts_in = drafts,
                          .trees = drafts && x.lib->takes_trees,
                          .replays = takes_pool && !step && x.lib->writes_ring,
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

static dp_subject_call call_of(const dp_sharding *sp, const dp_how *how) {
    const double limit = sp->std->o->limit_s;
    return (dp_subject_call){.input_format = dp_formats[sp->c->input_dtype].name,
                             .N = sp->N,
                             .base = how->base,
                             .chain = how->chain,
                             .backward = sp->c->backward,
                             .limit_s = limit > 0 ? limit : DP_SUBJECT_LIMIT_S};
}

static void note_failure(const dp_subject_result *s, dp_run *r, double from) {
    r->verdict = s->outcome == DP_SUBJECT_REFUSED ? DP_SKIPPED : DP_FAIL;
    r->seconds = dp_now() - from;
    snprintf(r->why, sizeof r->why, "%s", s->why);
}

/* Numbers that are exact in bf16 leave the range of fp16. */
static int leaves_range(const dp_case *c, const dp_design *d) {
    const dp_format kept[] = {d->factors, d->state, d->dstate};
    int fp16 = 0;
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++)
        fp16 |= kept[i] == DP_FP16;
    for (int i = 0; i < DP_NRESULTS; i++)
        fp16 |= d->out[i] == DP_FP16;
    return fp16 && dp_case_is_exact(c);
}

/* An answer to one call, and to those that were made behind it in its process. */
typedef struct dp_asked {
    int N, nagain;
    dp_how how;
    calls_made made;
    dp_subject_result s, again[DP_SUBJECT_MOST_CALLS - 1];
    double from;
} asked;

static void asked_free(asked *x) {
    dp_calls_seen_free(&x->made.seen);
    dp_subject_result_free(&x->s);
    for (int i = 0; i < x->nagain; i++)
        dp_subject_result_free(&x->again[i]);
}

enum { MOST_AGAIN = 1 << 24 }; /* numbers of v, of a problem that is called again */

/* Sessions are not: their calls have other inputs each. */
static int may_repeat(const dp_sharding *sp) {
    const dp_problem *p = &sp->c->p;
    return sp->std->o->again && !sp->first_of_call && !dp_op_of(sp->c)->has_front &&
           dp_input_count(p, DP_INPUT_V) <= MOST_AGAIN;
}

/* One call; of the first runs that are served two more, one with the same inputs and one with
 * others. */
static dp_status call(const dp_sharding *sp, asked *x, dp_err *e) {
    const dp_subject_call one = call_of(sp, &x->how);
    const dp_problem *p = &sp->c->p;
    x->made.seen.far.from = dp_state_far(&x->how.design);
    if (sp->first_of_call) return run_calls(sp, &one, &x->made, &x->s, e);
    dp_subject_result r[DP_SUBJECT_MOST_CALLS] = {{0}};
    const int repeats = may_repeat(sp) && *sp->std->o->again > 0;
    dp_problem other = repeats ? dp_other_values(p) : (dp_problem){0};
    const dp_problem *const of[] = {p, p, &other};
    int made;
    const dp_status st =
        dp_subject_run_calls(sp->std->o->subject, repeats ? 3 : 1, of, &one, r, &made, e);
    x->s = r[0];
    x->nagain = made > 1 ? made - 1 : 0;
    memcpy(x->again, r + 1, sizeof x->again);
    if (repeats) dp_problem_free(&other);
    if (made == 3 && r[2].outcome == DP_SUBJECT_RETURNED) dp_other_values_undo(p, &x->again[1].r);
    return st;
}

static const char *declared(const dp_run_options *o) {
    return o->design ? o->design : o->subject->design;
}

/* In the format and chain that are asked for; the design is the one declared for that base. */
static dp_status ask(const dp_sharding *sp, dp_base base, dp_format chain, asked *x, dp_err *e) {
    const char *design = declared(sp->std->o);
    *x = (asked){.N = sp->N,
                 .how = {.backend = DP_BACKEND_SUBJECT, .base = base, .chain = chain},
                 .from = dp_now()};
    dp_status st = dp_design_parse(design ? design : "", base, &x->how.design, e);
    if (!st && leaves_range(sp->c, &x->how.design))
        x->s = (dp_subject_result){
            .outcome = DP_SUBJECT_REFUSED,
            .why = "keys = exact: its numbers leave the range of fp16, which the design keeps"};
    else if (!st)
        st = call(sp, x, e);
    if (st) dp_calls_seen_free(&x->made.seen);
    return st;
}

/* The answer that was had before there was a truth, where it is to this call. */
static int take_asked(dp_standard *std, int N, dp_base base, dp_format chain, asked *x) {
    const asked *had = std->asked;
    if (!had || had->N != N || had->how.base != base || had->how.chain != chain) return 0;
    *x = *had;
    free(std->asked);
    std->asked = NULL;
    return 1;
}

void dp_library_forget(dp_standard *std) {
    if (std->asked) asked_free(std->asked);
    free(std->asked);
    std->asked = NULL;
}

static dp_run *record(const dp_sharding *sp, const asked *x, dp_runs *out) {
    const dp_run_options *o = sp->std->o;
    dp_run *r = dp_sharding_record(sp, &x->how, out);
    r->other_design = 1;
    r->undeclared = !declared(o) || x->how.design.undeclared;
    r->path = o->subject->name;
    r->outcome = dp_subject_outcomes[x->s.outcome];
    if (r->rollback && x->made.states) r->rollback = "states of every token";
    return r;
}

/* ---- calls that were made again -------------------------------------------------------------- */

static const char *const AGAIN[] = {"again with the same inputs", "then with other values at the "
                                                                  "same addresses"};

/* Puts the text before what the run says. */
static void say_first(dp_run *r, const char *text) {
    char why[sizeof r->why];
    const size_t n = (size_t)snprintf(why, sizeof why, "%.300s%s", text, r->why[0] ? "; " : "");
    memcpy(why + n, r->why, sizeof why - n);
    why[sizeof why - 1] = 0;
    memcpy(r->why, why, sizeof why);
}

/* The run fails where the results of the which-th further call, as the first's, are wrong. */
static dp_status judge_again(dp_sharding *sp, const asked *x, int which, dp_bound_bases *bases,
                             dp_run *r, dp_err *e) {
    dp_runs own = {0};
    const dp_subject_result *s = &x->again[which];
    const dp_outputs outputs = {.results = &s->r, .stage = which ? NULL : s->stage};
    dp_run *of = record(sp, x, &own);
    dp_sharding_note_truth(sp, of);
    of->id = dp_run_id(of);
    const dp_status st = dp_judge_calls(sp, &outputs, &x->made.seen, bases, of, x->from, e);
    if (!st && of->verdict == DP_FAIL) {
        const dp_run was = *r;
        *r = *of;
        *of = was;
        if (which) say_first(r, "called again with other values at the same addresses");
    }
    dp_runs_free(&own);
    return st;
}

/* A further call that did not return, in a process whose first did. */
static int did_not_return(const asked *x, int which, dp_run *r) {
    const dp_subject_result *s = &x->again[which];
    if (s->outcome == DP_SUBJECT_RETURNED) return 0;
    r->verdict = DP_FAIL;
    r->outcome = dp_subject_outcomes[s->outcome];
    /* NOLINTNEXTLINE(*CallAndMessage): which is 0 or 1 */
    snprintf(r->why, sizeof r->why, "called %s: %.480s", AGAIN[which], s->why);
    return 1;
}

/* A run that failed: two more calls of a process of their own, before a cause is looked for. */
static dp_status call_failed_again(const dp_sharding *sp, asked *x, dp_err *e) {
    const dp_subject_call one = call_of(sp, &x->how);
    const dp_problem *const same[] = {&sp->c->p, &sp->c->p};
    return dp_subject_run_calls(sp->std->o->subject, 2, same, &one, x->again, &x->nagain, e);
}

/* Among calls with the same inputs: those that differ from the first, reported before anything
 * else. The first of them is judged, too. */
static dp_status judge_same(dp_sharding *sp, const asked *x, int n, dp_bound_bases *bases,
                            dp_run *r, dp_err *e) {
    char text[240], where[200], first[200] = "";
    int differ = 0, which = 0, made = 0;
    for (int i = 0; i < n; i++) {
        if (x->again[i].outcome != DP_SUBJECT_RETURNED) continue;
        made++;
        if (!dp_results_differ(&sp->c->p, &x->s.r, &x->again[i].r, where, sizeof where)) continue;
        if (differ++) continue;
        which = i;
        memcpy(first, where, sizeof first);
    }
    if (!differ) return DP_OK;
    dp_status st = DP_OK;
    if (r->verdict != DP_FAIL && !which) st = judge_again(sp, x, 0, bases, r, e);
    snprintf(text, sizeof text, "not repeatable, %d of %d call%s with the same inputs: %s", differ,
             made, made == 1 ? "" : "s", first);
    say_first(r, text);
    return st;
}

static dp_status judge_calls_again(dp_sharding *sp, asked *x, dp_bound_bases *bases, dp_run *r,
                                   dp_err *e) {
    char text[200];
    dp_status st = DP_OK;
    const int failed = r->verdict == DP_FAIL && !x->nagain;
    if (!may_repeat(sp)) return DP_OK;
    if (x->nagain) --*sp->std->o->again;
    if (failed) st = call_failed_again(sp, x, e);
    if (!st) st = judge_same(sp, x, failed ? x->nagain : x->nagain > 0, bases, r, e);
    if (st || failed || r->verdict == DP_FAIL) return st;
    for (int i = 0; i < x->nagain; i++)
        if (did_not_return(x, i, r)) return DP_OK;
    if (x->nagain < 2 || !dp_results_differ(&sp->c->p, &x->s.r, &x->again[1].r, text, sizeof text))
        return DP_OK;
    return judge_again(sp, x, 1, bases, r, e);
}

static dp_status run_one(dp_sharding *sp, dp_base base, dp_format chain, dp_bound_bases *bases,
                         dp_runs *out, dp_err *e) {
    const dp_run_options *o = sp->std->o;
    asked x;
    dp_status st = DP_OK;
    if (!take_asked(sp->std, sp->N, base, chain, &x)) st = ask(sp, base, chain, &x, e);
    if (st) return st;
    dp_run *r = record(sp, &x, out);
    dp_sharding_note_truth(sp, r);
    r->id = dp_run_id(r);
    if (x.s.outcome == DP_SUBJECT_RETURNED) {
        const dp_outputs outputs = {.results = &x.s.r, .stage = x.s.stage};
        st = dp_judge_calls(sp, &outputs, &x.made.seen, bases, r, x.from, e);
        if (!st) st = judge_calls_again(sp, &x, bases, r, e);
    } else {
        note_failure(&x.s, r, x.from);
    }
    dp_run_done(r, o);
    asked_free(&x);
    return st;
}

/* Bases and formats of the chain that are asked for on N ranks. */
typedef struct {
    int nbase, nchain;
    dp_base base[DP_NBASES];
    dp_format chain[DP_NFORMATS];
} asked_for;
static asked_for formats_of(const dp_run_options *o, int N) {
    asked_for f = {.nbase = o->nbase ? o->nbase : 1, .nchain = o->nchain && N > 1 ? o->nchain : 1};
    for (int i = 0; i < f.nbase; i++)
        f.base[i] = o->nbase ? o->base[i] : o->subject->base;
    for (int j = 0; j < f.nchain; j++)
        f.chain[j] = o->nchain ? o->chain[j] : o->subject->chain;
    return f;
}

/* 1: served, and kept; 0: refused, with a row. */
static int serves(dp_sharding *sp, dp_base base, dp_format chain, dp_runs *out, dp_status *st,
                  dp_err *e) {
    asked *x = dp_calloc(1, sizeof *x);
    if ((*st = ask(sp, base, chain, x, e)) || x->s.outcome != DP_SUBJECT_REFUSED) {
        sp->std->asked = *st ? NULL : x;
        if (*st) free(x);
        return 1;
    }
    dp_run *r = record(sp, x, out);
    r->id = dp_run_id(r);
    note_failure(&x->s, r, x->from);
    asked_free(x);
    free(x);
    return 0;
}

int dp_library_refuses(dp_standard *std, int n, const int *ranks, dp_runs *out, dp_status *st,
                       dp_err *e) {
    const dp_run_options *o = std->o;
    dp_runs refused = {0};
    int served = 0;
    unsigned char *session = dp_case_session(std->c) ? dp_calloc(1, 1) : NULL; /* that it is one */
    for (int i = 0; i < n && !served; i++) {
        dp_sharding sp = {.std = std, .c = std->c, .N = ranks[i], .first_of_call = session};
        const asked_for f = formats_of(o, ranks[i]);
        for (int j = 0; j < f.nbase * f.nchain && !served && ranks[i] <= o->subject->max_ranks; j++)
            served = serves(&sp, f.base[j / f.nchain], f.chain[j % f.nchain], &refused, st, e);
    }
    free(session);
    for (int i = 0; i < refused.n && !served; i++)
        dp_run_done(&refused.run[i], o);
    if (served)
        dp_runs_free(&refused);
    else
        dp_runs_move(out, &refused);
    return !served || *st;
}

/* The claims of the options, else of the library. One rank forms no M: one chain format will do. */
dp_status dp_library_run(const dp_subject_kind *k, dp_sharding *sp, dp_runs *out, dp_err *e) {
    const dp_run_options *o = sp->std->o;
    const dp_subject *lib = o->subject;
    const asked_for f = formats_of(o, sp->N);
    dp_status st = DP_OK;
    (void)k;
    if (sp->N > lib->max_ranks) return DP_OK;
    for (int i = 0; i < f.nbase && !st; i++) {
        dp_bound_bases bases = {0};
        for (int j = 0; j < f.nchain && !st; j++)
            st = run_one(sp, f.base[i], f.chain[j], &bases, out, e);
        dp_bound_bases_free(&bases);
    }
    return st;
}
