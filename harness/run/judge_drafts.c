/* What a session made of the tokens of its windows, rejected ones too (harness/simulated/drafts.h):
 * judged like any packed problem, by the bounds and draws of the session's own run, and added to
 * that run under names of their own. */
#include "limits.h"
#include "outputs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
    x.op = DP_OP_RECURRENCE;
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
    if (n) r->tensor = realloc(r->tensor, sizeof *r->tensor * (size_t)(r->ntensor + n));
    for (int i = 0; i < n; i++)
        take(sp->c, s, within, &made.run[0].tensor[i], r);
    dp_runs_free(&made);
    return st;
}

void dp_judge_speak(int tensor, dp_run *r) {
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

/* The worst of the new tensors speaks where nothing had failed before. */
static void speak(int from, dp_run *r) {
    int worst = -1;
    for (int i = from; i < r->ntensor; i++)
        if (r->tensor[i].verdict == DP_FAIL &&
            dp_judgement_says_more(worst < 0 ? NULL : &r->tensor[worst], &r->tensor[i]))
            worst = i;
    if (worst >= 0 && r->verdict != DP_FAIL) dp_judge_speak(worst, r);
    for (int i = from; i < r->ntensor && r->verdict == DP_PASS; i++) {
        if (r->tensor[i].verdict != DP_UNJUDGED) continue;
        r->verdict = DP_UNJUDGED;
        snprintf(r->why, sizeof r->why, "%s: %s", r->tensor[i].name, r->tensor[i].why);
    }
}

dp_status dp_judge_drafts(const dp_sharding *sp, const dp_drafts *d, dp_run *r, dp_err *e) {
    const double from = dp_now();
    const int before = r->ntensor;
    r->windows = d->windows;
    if (r->fault && r->verdict == DP_FAIL) return DP_OK; /* a deliberate fault that was seen */
    dp_status st = judge_set(sp, &d->window, 0, r, e);
    if (!st) st = judge_set(sp, &d->within, 1, r, e);
    speak(before, r);
    r->windows_judged = d->window.p.Nseq;
    r->seconds += dp_now() - from;
    return st;
}
