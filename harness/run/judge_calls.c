/* A session judged: its results, and what its calls handed on (outputs.h). */
#include "outputs.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- drafts ---------------------------------------------------------------------------------- */

/* The tensors of the two sets by their name in the session's run. */
static const char *const NAMES[2][2] = {{"o", "o_drafted"}, {"final_state", "state_drafted"}};
#define WITHIN "state_within"

static const char *name_of(const char *result, int within) {
    for (int i = 0; i < 2 && !within; i++)
        if (!strcmp(result, NAMES[i][0])) return NAMES[i][1];
    return WITHIN;
}

/* The set as a case of the recurrence; it borrows all. */
static dp_case case_of(const dp_case *c, const dp_draft_set *s, const dp_run *r) {
    dp_case x = *c;
    x.op = &dp_operations[DP_OP_RECURRENCE];
    x.session = (dp_session){0};
    x.p = s->p;
    x.nbase = x.nchain = 1;
    x.base[0] = r->base;
    x.chain[0] = r->chain;
    x.spec.keys = DP_KEYS_RANDOM; /* negated values round: no case in which nothing does */
    return x;
}

/* The place of a row as the session has it: slot, and the token that would stand there. */
static void place_in_session(const dp_problem *p, const dp_draft_set *s, dp_place *at) {
    if (at->sequence < 0 || at->rank < 0) return;
    const dp_draft_place *x = &s->place[at->sequence];
    const int64_t end = p->cu[x->slot + 1] - 1;
    if (at->token >= 0) {
        at->token += x->from - s->p.cu[at->sequence];
        if (at->token > end) at->token = end;
        at->chunk = (int)(at->token / DP_CHUNK);
    }
    at->sequence = x->slot;
}

/* Says which token of which call failed. */
static void name_draft(const dp_draft_set *s, dp_judgement *t) {
    const dp_place *at = &t->failed.at;
    const size_t n = strlen(t->why);
    if (t->verdict != DP_FAIL || at->rank < 0 || at->sequence < 0) return;
    const dp_draft_place *x = &s->place[at->sequence];
    const int64_t token = at->token < 0 ? x->tokens : at->token - s->p.cu[at->sequence] + 1;
    snprintf(t->why + n, sizeof t->why - n,
             "; token %lld of the window in call %lld, of which %lld %s accepted", (long long)token,
             (long long)x->call + 1, (long long)x->passed, x->passed == 1 ? "is" : "are");
}

static void take(const dp_case *c, const dp_draft_set *s, int within, dp_judgement *from,
                 dp_run *r) {
    dp_judgement *t = &r->tensor[r->ntensor++];
    *t = *from;
    *from = (dp_judgement){0};
    snprintf(t->name, sizeof t->name, "%s", name_of(t->name, within));
    name_draft(s, t);
    dp_row *const rows[] = {&t->worst, &t->over, &t->first, &t->last, &t->failed};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        place_in_session(&c->p, s, &rows[i]->at);
}

static dp_status judge_set(const dp_sharding *sp, const dp_draft_set *s, int within, dp_run *r,
                           dp_err *e) {
    const dp_case c = case_of(sp->c, s, r);
    const dp_run_options o = {
        .cache = sp->std->o->cache, .truth = sp->std->o->truth, .drop = sp->std->o->drop};
    const dp_stored_results g = {.r = s->out,
                                 .design = r->undeclared ? NULL : &r->design,
                                 .explained = r->undeclared ? &r->explained : NULL,
                                 .same_design = !r->other_design};
    dp_runs made = {0};
    const dp_status st = s->p.Nseq ? dp_run_stored(&c, &o, &g, &made, e) : DP_OK;
    const int n = made.n ? made.run[0].ntensor : 0;
    if (n) r->tensor = dp_realloc(r->tensor, sizeof *r->tensor * (size_t)(r->ntensor + n));
    for (int i = 0; i < n; i++)
        take(sp->c, s, within, &made.run[0].tensor[i], r);
    dp_runs_free(&made);
    return st;
}

/* The run fails by this tensor, which is closed already. */
static void let_speak(int tensor, dp_run *r) {
    const dp_judgement *bad = &r->tensor[tensor];
    const dp_place *at = &bad->failed.at;
    r->verdict = DP_FAIL;
    r->tier = bad->tier;
    r->speaks = tensor;
    const int n = snprintf(r->why, sizeof r->why, "%s: %s", bad->name, bad->why);
    if (at->sequence >= 0 && n >= 0 && n < (int)sizeof r->why)
        snprintf(r->why + n, sizeof r->why - (size_t)n, " (sequence %d, head %d)", at->sequence,
                 at->head);
}

/* The worst of the new tensors represents the run if nothing had failed before. */
static void speak(int from, dp_run *r) {
    int worst = -1;
    for (int i = from; i < r->ntensor; i++)
        if (r->tensor[i].verdict == DP_FAIL &&
            dp_judgement_says_more(worst < 0 ? NULL : &r->tensor[worst], &r->tensor[i]))
            worst = i;
    if (worst >= 0 && r->verdict != DP_FAIL) let_speak(worst, r);
    for (int i = from; i < r->ntensor && r->verdict == DP_PASS; i++) {
        if (r->tensor[i].verdict != DP_UNJUDGED) continue;
        r->verdict = DP_UNJUDGED;
        snprintf(r->why, sizeof r->why, "%s: %s", r->tensor[i].name, r->tensor[i].why);
    }
}

/* The results of all tokens in a session's windows. */
static dp_status judge_drafts(const dp_sharding *sp, const dp_drafts *d, dp_run *r, dp_err *e) {
    const int before = r->ntensor;
    r->windows = d->windows;
    if (r->fault && r->verdict == DP_FAIL) return DP_OK; /* a deliberate fault that was seen */
    dp_status st = judge_set(sp, &d->window, 0, r, e);
    if (!st) st = judge_set(sp, &d->within, 1, r, e);
    speak(before, r);
    r->windows_judged = d->window.p.Nseq;
    return st;
}

/* ---- to the bit ------------------------------------------------------------------------------ */

/* Appends the judgement of a tensor that must be right to the bit; first: its first entry that is
 * another, -1: none. Returned for the words of its failure: it represents the run, and the other
 * failures follow from it. */
static dp_judgement *judge_bits(const dp_compare_in *in, int64_t first, dp_run *r) {
    r->tensor = dp_realloc(r->tensor, sizeof *r->tensor * (size_t)(r->ntensor + 1));
    dp_judgement *t = &r->tensor[r->ntensor++];
    dp_compare(in, t);
    t->verdict = first < 0 ? DP_PASS : DP_FAIL;
    t->tier = "exact";
    t->why[0] = 0;
    if (first < 0) return t;
    const double got = in->got[first], want = in->want[first];
    t->times = INFINITY;
    t->failed = (dp_row){.index = (int)(first % in->width),
                         .got = got,
                         .want = want,
                         .err = fabs(got - want),
                         .size = fabs(want)};
    in->place(in->ctx, first / in->width, &t->failed.at);
    return t;
}

/* The first entry that is another; -1: none. */
static int64_t first_other(const double *got, const double *want, int64_t n) {
    for (int64_t z = 0; z < n; z++)
        if (memcmp(got + z, want + z, sizeof *got)) return z;
    return -1;
}

/* ---- pools ----------------------------------------------------------------------------------- */

typedef struct {
    const dp_pool_seen *seen;
    int heads;
} pool_rows; /* a row: a head of a slot */

static void pool_place(const void *ctx, int64_t row, dp_place *at) {
    const pool_rows *x = ctx;
    const int first = x->seen->slot == row / x->heads, owner = x->seen->owner;
    *at = (dp_place){0, (int)(row % x->heads), first && owner >= 0 ? owner : -1, -1, -1};
}

static const char *whose(int owner, char text[64]) {
    if (owner == DP_SLOT_FREE) return "which no sequence owns";
    if (owner == DP_SLOT_OF_PREFIX) return "which holds the shared prefix";
    snprintf(text, 64, "which sequence %d owns", owner);
    return text;
}

static void say(const dp_pool_seen *s, dp_judgement *t) {
    const double was = t->failed.want, is = t->failed.got;
    char owner[64];
    snprintf(t->why, sizeof t->why,
             "slot %lld, %s, was overwritten in call %lld: entry %d of head %d was %g (%a), is %g "
             "(%a)%s",
             (long long)s->slot, whose(s->owner, owner), (long long)s->call + 1, t->failed.index,
             t->failed.at.head, was, was, is, is,
             s->overwritten > 1 ? "; it is not the only one" : "");
}

/* Results that are NaN where the inputs are not. */
static void say_unowned(const dp_sharding *sp, dp_run *r) {
    const size_t n = strlen(r->why);
    if (r->speaks < 0 || r->tensor[r->speaks].flaw != DP_FLAW_NOT_FINITE) return;
    if (sp->c->allow_nonfinite) return;
    snprintf(r->why + n, sizeof r->why - n,
             "; a slot that no sequence owns is NaN before a call: one was read");
}

/* Entries, 0 where a slot that nobody owns has kept its NaN. */
static double *without_nan(const dp_pool_seen *s, const double *x, int heads) {
    double *y = dp_copy(x, s->slots * heads * s->width);
    for (int64_t z = 0; z < s->slots * heads * s->width; z++)
        if (isnan(y[z]) && !memcmp(s->was + z, s->is + z, sizeof *y)) y[z] = 0;
    return y;
}

/* The slots of a session's pool that were not to be written, as tensor `pool`, bit by bit. Does
 * nothing if no pool was run. */
static void judge_pool(const dp_sharding *sp, const dp_pool_seen *seen, dp_run *r) {
    const pool_rows x = {seen, sp->c->p.HV};
    if (!seen->was) return;
    const int64_t entries = x.heads * seen->width, from = seen->slot * entries;
    const int64_t wrong =
        seen->overwritten ? from + first_other(seen->was + from, seen->is + from, entries) : -1;
    double *was = without_nan(seen, seen->was, x.heads), *is = without_nan(seen, seen->is, x.heads);
    const dp_compare_in in = {.name = "pool",
                              .N = 1,
                              .heads = x.heads,
                              .rows = seen->slots * x.heads,
                              .width = seen->width,
                              .got = is,
                              .want = was,
                              .place = pool_place,
                              .ctx = &x};
    dp_judgement *t = judge_bits(&in, wrong, r);
    free(was);
    free(is);
    if (t->verdict != DP_FAIL) {
        say_unowned(sp, r);
        return;
    }
    say(seen, t);
    let_speak(r->ntensor - 1, r);
}

/* ---- convolutions ---------------------------------------------------------------------------- */

static void conv_place(const void *ctx, int64_t row, dp_place *at) {
    const int each = *(const int *)ctx; /* rows of a sequence */
    *at = (dp_place){0, 0, (int)(row / each), -1, -1};
}

static void judge_conv(const dp_conv_calls *c, int i, dp_run *r) {
    const dp_conv *v = c->conv[i];
    const int each = v->W - 1;
    const int64_t rows = (int64_t)v->Nseq * each;
    const int64_t wrong = first_other(c->got.of[i], c->want.of[i], rows * v->D);
    char name[24];
    snprintf(name, sizeof name, "conv_state_%s", dp_qkv_name(i));
    const dp_compare_in in = {.name = name,
                              .N = 1,
                              .heads = 1,
                              .rows = rows,
                              .width = v->D,
                              .got = c->got.of[i],
                              .want = c->want.of[i],
                              .place = conv_place,
                              .ctx = &each};
    dp_judgement *t = judge_bits(&in, wrong, r);
    if (t->verdict != DP_FAIL) return;
    const dp_row *f = &t->failed;
    snprintf(t->why, sizeof t->why,
             "call %lld returns another convolution input than that of the token %d before its "
             "next one: channel %d is %g (%a), was %g (%a)",
             (long long)c->call + 1, each - (int)(wrong / v->D % each), f->index, f->got, f->got,
             f->want, f->want);
    let_speak(r->ntensor - 1, r);
}

/* Judges the inputs that convolutions handed on, as tensors conv_state_q .., to the bit; none
 * without convolutions. */
static void judge_conv_states(const dp_conv_calls *c, dp_run *r) {
    for (int i = DP_NQKV - 1; i >= 0; i--)
        if (c->conv[i] && c->conv[i]->W > 1 && c->got.of[i]) judge_conv(c, i, r);
}

/* ---- all of it ------------------------------------------------------------------------------- */

/* Names, of a run that failed, the first call that left a wrong state. */
static void say_far(const dp_states_seen *far, dp_run *r) {
    const size_t n = strlen(r->why);
    if (r->verdict != DP_FAIL || !(far->off > 0)) return;
    snprintf(r->why + n, sizeof r->why - n,
             "; call %lld is the first that leaves a wrong state: sequence %d, head %d, error %.2g "
             "of the state that its inputs give",
             (long long)far->call + 1, far->sequence, far->head, far->off);
}

dp_status dp_judge_calls(dp_sharding *sp, const dp_outputs *out, const dp_calls_seen *seen,
                         dp_bound_bases *bases, dp_run *r, dp_err *e) {
    const int step = sp->first_of_call && sp->c->op->has_front;
    dp_step_run front = {0};
    dp_status st =
        step ? dp_step_of_calls(sp->c, r->backend, r->base, &seen->front, &front, e) : DP_OK;
    if (!st) {
        if (step) sp->step = &front;
        dp_judge_outputs(sp, bases, out, r);
        if (step) sp->step = NULL;
        st = judge_drafts(sp, &seen->drafts, r, e);
        judge_pool(sp, &seen->pool, r);
        judge_conv_states(&seen->front, r);
        say_far(&seen->far, r);
    }
    if (step) dp_step_run_free(sp->c, &front);
    return st;
}
