/* A shared library (harness/deltaproof_subject.h), run in processes of its own, and its calls made
 * again, with the same values and with others (subjects.h).
 */
#include "harness/simulated/calls.h"
#include "outputs.h"
#include "subjects.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- other values ---------------------------------------------------------------------------- */

/* x [outer][heads][each]: head h takes the place of h + by, and all change sign. */
static void turn(double *x, int64_t outer, int heads, int64_t each, int by, double sign) {
    DP_OWN double *row = dp_doubles(heads * each);
    for (int64_t i = 0; i < outer; i++) {
        double *at = x + i * heads * each;
        for (int h = 0; h < heads; h++)
            for (int64_t z = 0; z < each; z++)
                row[(h + by + heads) % heads * each + z] = sign * at[h * each + z];
        memcpy(at, row, sizeof *row * (size_t)(heads * each));
    }
}

/* The last numbers become the first of n, or (last < 0) the first become the last. */
static void rotate(double *x, int64_t n, int64_t last) {
    const int64_t front = last < 0 ? n + last : last;
    DP_OWN double *kept = dp_copy(x + (n - front), front);
    memmove(x + front, x, sizeof *x * (size_t)(n - front));
    memcpy(x, kept, sizeof *x * (size_t)front);
}

static int64_t outer_of(const dp_problem *p, dp_row_kind kind) {
    return kind == DP_OF_TOKENS ? p->T : kind == DP_OF_SEQUENCES ? p->Nseq : 1;
}

/* The last sequence is packed before all others: by how many of `outer` rows a tensor moves. */
static int64_t packed_by(const dp_problem *p, dp_row_kind kind) {
    return kind == DP_OF_TOKENS ? p->T - p->cu[p->Nseq - 1] : kind == DP_OF_SEQUENCES ? 1 : 0;
}

/* By how many of its own heads a tensor moves where query and key heads move by one. All value
 * heads of one key head are alike: they move by one. */
static int step(const dp_problem *p, int heads) { return heads == p->HV && p->H > 1 ? dp_G(p) : 1; }

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
    for (int n = 0; n + 1 < p->Nseq; n++)
        c.cu[n + 1] = p->cu[n] + packed_by(p, DP_OF_TOKENS);
    for (int i = 0; i < DP_NINPUTS; i++) {
        double *x = c.in[i];
        const int heads = dp_input_heads(p, i);
        const dp_row_kind kind = dp_input_fields[i].kind;
        const int64_t outer = outer_of(p, kind);
        if (!x || !outer) continue;
        const int64_t each = dp_input_count(p, i) / outer;
        turn(x, outer, heads, each / heads, step(p, heads), turns_input(p, i) ? -1 : 1);
        rotate(x, outer * each, packed_by(p, kind) * each);
    }
    return c;
}

void dp_other_values_undo(const dp_problem *p, dp_result *r) {
    for (int f = 0; f < DP_NRESULTS; f++) {
        double *x = r->out[f];
        const int heads = dp_result_heads(p, f);
        const dp_row_kind kind = dp_result_fields[f].kind;
        const int64_t outer = outer_of(p, kind);
        const int64_t each = outer ? dp_result_count(p, f) / outer : 0;
        if (!x || !each) continue;
        rotate(x, outer * each, -packed_by(p, kind) * each);
        turn(x, outer, heads, each / heads, -step(p, heads), turns_result(p, f) ? -1 : 1);
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
        const double *x = a->out[f], *y = b->out[f];
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

/* The claims of the options, else of the library. One rank forms no M: one chain format will do. */
static dp_status plan(const dp_subject_kind *k, const dp_asked *a, dp_plan *to,
                      DP_UNUSED dp_err *e) {
    const dp_run_options *o = a->o;
    const dp_subject *lib = o->subject;
    const dp_values *base = &o->only[DP_ID_BASE], *chain = &o->only[DP_ID_CHAIN];
    const int nb = base->n ? base->n : 1, nc = chain->n && a->N > 1 ? chain->n : 1;
    for (int i = 0; lib && a->N <= lib->max_ranks && i < nb * nc; i++)
        dp_plan_add(to, k, a->N, base->n ? (dp_base)base->of[i / nc] : lib->base,
                    chain->n ? (dp_format)chain->of[i % nc] : lib->chain);
    return DP_OK;
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

/* An answer to one call, and to those that were made behind it in its process. */
typedef struct {
    int nagain;
    int states; /* 1: a session in which the library showed those of every token */
    dp_subject_result s, again[DP_SUBJECT_MOST_CALLS - 1];
} answer;

/* DP_OK also where the library ended the session: y->s says how, and holds no results then. */
static dp_status run_calls(const dp_sharding *sp, const dp_subject_call *how, dp_calls_seen *seen,
                           answer *y, dp_err *e) {
    dp_subject_result *s = &y->s;
    const int step = sp->c->op->has_front;
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
    const dp_problem p = dp_step_before(sp->c, &seen->front);
    memcpy(x.front.conv, seen->front.conv, sizeof x.front.conv);
    const dp_caller by = {.run = run_one_call,
                          .who = &x,
                          .drafts = &seen->drafts,
                          .far = &seen->far,
                          .pool = takes_pool ? &seen->pool : NULL,
                          .run_in = takes_pool ? run_in : NULL,
                          .drafts_in = drafts,
                          .trees = drafts && x.lib->takes_trees,
                          .halos = 1,
                          .replays = takes_pool && !step && x.lib->writes_ring,
                          .front = step ? &seen->front : NULL,
                          .run_step = run_step};
    const dp_status st = dp_calls_run(&p, &sp->c->session, DP_FAULT_NONE, &by, &s->r, NULL, e);
    y->states = x.states;
    s->seconds = x.seconds;
    if (st != DP_EINPUT) return st;
    dp_text_add(s->why, sizeof s->why, " (call %lld)", (long long)x.calls);
    return DP_OK;
}

/* ---- one run --------------------------------------------------------------------------------- */

static dp_subject_call call_of(const dp_planned *x, const dp_sharding *sp) {
    const double limit = sp->std->o->limit_s;
    return (dp_subject_call){.input_format = dp_formats[sp->c->input_dtype].name,
                             .N = sp->N,
                             .base = x->base,
                             .chain = x->chain,
                             .backward = sp->c->backward,
                             .limit_s = limit > 0 ? limit : DP_SUBJECT_LIMIT_S};
}

/* Numbers that are exact in bf16 leave the range of fp16. */
static int leaves_range(const dp_case *c, const dp_design *d) {
    const dp_format kept[] = {d->factors, d->state, d->dstate, d->final_state};
    int fp16 = 0;
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++)
        fp16 |= kept[i] == DP_FP16 || kept[i] == DP_FP16SR;
    for (int i = 0; i < DP_NRESULTS; i++)
        fp16 |= d->out[i] == DP_FP16 || d->out[i] == DP_FP16SR;
    return fp16 && dp_case_is_exact(c);
}

static void free_answer(DP_UNUSED const dp_case *c, dp_made *m) {
    answer *y = m->own;
    dp_subject_result_free(&y->s);
    for (int i = 0; i < y->nagain; i++)
        dp_subject_result_free(&y->again[i]);
    free(y);
}

enum { MOST_AGAIN = 1 << 24 }; /* numbers of v, of a problem that is called again */

/* Sessions are not: their calls have other inputs each. */
static int may_repeat(const dp_sharding *sp) {
    const dp_problem *p = &sp->c->p;
    return sp->std->o->again && !sp->first_of_call && !sp->c->op->has_front &&
           dp_input_count(p, DP_INPUT_V) <= MOST_AGAIN;
}

/* Packed sequences are counted by themselves. */
static int *again_of(const dp_sharding *sp) { return sp->std->o->again + (sp->c->p.Nseq > 1); }

/* One call; of the first runs that are served two more, one with the same inputs and one with
 * others. */
static dp_status call(const dp_planned *x, const dp_sharding *sp, dp_made *m, answer *y,
                      dp_err *e) {
    const dp_subject_call one = call_of(x, sp);
    const dp_problem *p = &sp->c->p;
    m->seen.far.from = dp_state_far(&m->design);
    if (sp->first_of_call) return run_calls(sp, &one, &m->seen, y, e);
    dp_subject_result r[DP_SUBJECT_MOST_CALLS] = {{0}};
    const int repeats = may_repeat(sp) && *again_of(sp) > 0;
    dp_problem other = repeats ? dp_other_values(p) : (dp_problem){0};
    const dp_problem *const of[] = {p, p, &other};
    int made;
    const dp_status st =
        dp_subject_run_calls(sp->std->o->subject, repeats ? 3 : 1, of, &one, r, &made, e);
    y->s = r[0];
    y->nagain = made > 1 ? made - 1 : 0;
    memcpy(y->again, r + 1, sizeof y->again);
    if (repeats) dp_problem_free(&other);
    if (made == 3 && r[2].outcome == DP_SUBJECT_RETURNED) dp_other_values_undo(p, &y->again[1].r);
    return st;
}

static const char *declared(const dp_run_options *o) {
    return o->design ? o->design : o->subject->design;
}

/* In the format and chain that are asked for; the design is the one declared for that base. */
static dp_status compute(const dp_planned *x, dp_sharding *sp, DP_UNUSED void **kept, dp_made *m,
                         dp_err *e) {
    const char *design = declared(sp->std->o);
    answer *y = m->own = dp_calloc(1, sizeof *y);
    dp_status st = dp_design_parse(design ? design : "", x->base, &m->design, e);
    if (!st && leaves_range(sp->c, &m->design))
        y->s = (dp_subject_result){
            .outcome = DP_SUBJECT_REFUSED,
            .why = "keys = exact: its numbers leave the range of fp16, which the design keeps"};
    else if (!st)
        st = call(x, sp, m, y, e);
    m->out = (dp_outputs){.results = &y->s.r, .stage = y->s.stage};
    m->verdict = y->s.outcome == DP_SUBJECT_REFUSED ? DP_SKIPPED : DP_FAIL;
    if (y->s.outcome != DP_SUBJECT_RETURNED) snprintf(m->why, sizeof m->why, "%s", y->s.why);
    return st;
}

static void note(const dp_sharding *sp, const dp_made *m, dp_run *r) {
    const dp_run_options *o = sp->std->o;
    const answer *y = m->own;
    r->other_design = 1;
    r->undeclared = !declared(o) || m->design.undeclared;
    r->path = o->subject->name;
    r->outcome = dp_subject_outcomes[y->s.outcome];
    if (r->rollback && y->states) r->rollback = "states of every token";
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
static dp_status judge_again(const dp_planned *x, dp_sharding *sp, const dp_made *m, int which,
                             dp_bound_bases *bases, dp_run *r, dp_err *e) {
    DP_FREED(dp_runs_free) dp_runs own = {0};
    const dp_subject_result *s = &((const answer *)m->own)->again[which];
    const dp_outputs outputs = {.results = &s->r, .stage = which ? NULL : s->stage};
    dp_run *of = dp_planned_record(x, sp, m, &own);
    const dp_status st = dp_judge_calls(sp, &outputs, &m->seen, bases, of, e);
    if (!st && of->verdict == DP_FAIL) {
        const dp_run was = *r;
        *r = *of;
        *of = was;
        if (which) say_first(r, "called again with other values at the same addresses");
    }
    return st;
}

/* A further call that did not return, in a process whose first did. */
static int did_not_return(const answer *y, int which, dp_run *r) {
    const dp_subject_result *s = &y->again[which];
    if (s->outcome == DP_SUBJECT_RETURNED) return 0;
    r->verdict = DP_FAIL;
    r->outcome = dp_subject_outcomes[s->outcome];
    /* NOLINTNEXTLINE(*CallAndMessage): which is 0 or 1 */
    snprintf(r->why, sizeof r->why, "called %s: %.480s", AGAIN[which], s->why);
    return 1;
}

/* A run that failed: two more calls of a process of their own, before a cause is looked for. */
static dp_status call_failed_again(const dp_planned *x, const dp_sharding *sp, answer *y,
                                   dp_err *e) {
    const dp_subject_call one = call_of(x, sp);
    const dp_problem *const same[] = {&sp->c->p, &sp->c->p};
    return dp_subject_run_calls(sp->std->o->subject, 2, same, &one, y->again, &y->nagain, e);
}

/* Among n calls with the same inputs: those that differ from the first, reported before anything
 * else. The first of them is judged, too. */
static dp_status judge_same(const dp_planned *x, dp_sharding *sp, const dp_made *m, int n,
                            dp_bound_bases *bases, dp_run *r, dp_err *e) {
    const answer *y = m->own;
    char text[240], where[200], first[200] = "";
    int differ = 0, which = 0, made = 0;
    for (int i = 0; i < n; i++) {
        if (y->again[i].outcome != DP_SUBJECT_RETURNED) continue;
        made++;
        if (!dp_results_differ(&sp->c->p, &y->s.r, &y->again[i].r, where, sizeof where)) continue;
        if (differ++) continue;
        which = i;
        memcpy(first, where, sizeof first);
    }
    if (!differ) return DP_OK;
    dp_status st = DP_OK;
    if (r->verdict != DP_FAIL && !which) st = judge_again(x, sp, m, 0, bases, r, e);
    snprintf(text, sizeof text, "not repeatable, %d of %d call%s with the same inputs: %s", differ,
             made, made == 1 ? "" : "s", first);
    say_first(r, text);
    return st;
}

static dp_status judge_calls_again(const dp_planned *x, dp_sharding *sp, dp_made *m,
                                   dp_bound_bases *bases, dp_run *r, dp_err *e) {
    answer *y = m->own;
    char text[200];
    dp_status st = DP_OK;
    const int failed = r->verdict == DP_FAIL && !y->nagain;
    if (!may_repeat(sp)) return DP_OK;
    if (y->nagain) --*again_of(sp);
    if (failed) st = call_failed_again(x, sp, y, e);
    if (!st) st = judge_same(x, sp, m, failed ? y->nagain : y->nagain > 0, bases, r, e);
    if (st || failed || r->verdict == DP_FAIL) return st;
    for (int i = 0; i < y->nagain; i++)
        if (did_not_return(y, i, r)) return DP_OK;
    if (y->nagain < 2 || !dp_results_differ(&sp->c->p, &y->s.r, &y->again[1].r, text, sizeof text))
        return DP_OK;
    return judge_again(x, sp, m, 1, bases, r, e);
}

const dp_subject_kind dp_on_library = {.backend = DP_BACKEND_SUBJECT,
                                       .plan = plan,
                                       .compute = compute,
                                       .note = note,
                                       .after = judge_calls_again,
                                       .free = free_answer};
