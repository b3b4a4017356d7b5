/* Shrinks a failing case for as long as it fails for the same reason (shrink.h). */
#include "bisect.h"
#include "harness/base/clock.h"
#include "shrink_work.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- trying ---------------------------------------------------------------------------------- */

int dp_shrink_spent(const dp_shrink_work *w) {
    return w->st || (w->o->max_tries && w->tries >= w->o->max_tries) ||
           (w->o->max_s && dp_now() - w->start >= w->o->max_s);
}

/* Does it fail for the same reason, and not without the fault? */
static int fails_alike(dp_shrink_work *w, const dp_case *c) {
    dp_failure f;
    dp_err e = {0};
    w->tries++;
    if (dp_op_of(c)->has_problem && dp_problem_check(&c->p, c->allow_nonfinite, &e)) return 0;
    if (dp_failure_of(c, &w->small, w->runs, 0, &f, &e))
        return 0; /* a library may leave a run out: no failure */
    if (w->want->red && !f.red && dp_op_of(c)->has_stages && !w->o->subject) {
        dp_failure g = f;
        g.red = 1;
        if (!dp_failure_same(w->want, &g) || dp_failure_of(c, &w->small, w->runs, 1, &f, &e))
            return 0;
    }
    if (!dp_failure_same(w->want, &f)) return 0;
    if (!w->o->fault || !dp_op_of(c)->has_stages) return 1;
    dp_failure clean = {.stage = ""};
    const dp_shrink_options none = {0};
    return !dp_failure_of(c, &none, 1, 0, &clean, &e) && !clean.kind;
}

void dp_shrink_report(const dp_shrink_work *w, const char *fmt, ...) {
    char what[200];
    va_list ap;
    if (!w->o->step) return;
    va_start(ap, fmt);
    vsnprintf(what, sizeof what, fmt, ap);
    va_end(ap);
    w->o->step(what, w->c, w->c->ranks[0], dp_case_numbers(w->c, NULL), w->tries, w->o->arg);
}

/* The candidate is taken in place of the problem, or freed. */
int dp_shrink_offer(dp_shrink_work *w, dp_case *cand) {
    const int yes = fails_alike(w, cand);
    dp_case *loser = yes ? w->c : cand;
    dp_shrink_copy_free(loser);
    if (yes) *w->c = *cand;
    return yes;
}
dp_status dp_shrink(const dp_case *c, const dp_shrink_options *o, dp_shrunk *out, dp_err *e) {
    if (!dp_op_of(c)->shrinks)
        return dp_fail(e, DP_EINPUT,
                       "%s: op = %s cannot be shrunk: shrink the recurrence or the convolution "
                       "that fails in it",
                       c->name, dp_op_of(c)->name);
    *out = (dp_shrunk){.c = dp_shrink_copy(c), .numbers_before = dp_case_numbers(c, NULL)};
    dp_case *s = &out->c;
    s->ranks[0] = o->ranks;
    s->base[0] = o->base;
    s->chain[0] = o->chain;
    s->merge[0] = o->merge;
    s->payload[0] = o->payload;
    s->nranks = s->nbase = s->nchain = s->nmerge = s->npayload = 1;
    dp_shrink_work w = {.o = o,
                        .small = *o,
                        .c = s,
                        .want = &out->before,
                        .runs = DP_BISECT_RUNS,
                        .start = dp_now(),
                        .e = e};
    w.small.cache = NULL;
    w.st = dp_failure_of(s, o, DP_BISECT_RUNS, 1, &out->before, e);
    if (!w.st && !out->before.kind && out->before.why[0])
        w.st =
            dp_fail(e, DP_EINPUT, "%s: not run with %d ranks, base %s, chain %s: %s", c->name,
                    o->ranks, dp_base_names[o->base], dp_formats[o->chain].name, out->before.why);
    else if (!w.st && !out->before.kind)
        w.st = dp_fail(
            e, DP_EINPUT, "%s: %s with %d ranks, base %s, chain %s: there is nothing to shrink",
            c->name, dp_op_of(c)->has_stages && !o->subject ? "no stage is wrong" : "nothing fails",
            o->ranks, dp_base_names[o->base], dp_formats[o->chain].name);
    if (out->before.kind != DP_FAILS_UNSTEADY) w.runs = 1;
    if (!w.st && dp_op_of(c)->has_ranks && !c->data && c->text) w.laws = dp_strdup(c->text);
    dp_shrink_by_laws(&w);
    out->laws = w.laws;
    out->law_numbers = dp_case_numbers(s, NULL);
    for (int more = 1; more && !dp_shrink_spent(&w);) {
        more = dp_shrink_shape(&w);
        if (dp_case_numbers(s, NULL) <= 1 << 16) more |= dp_shrink_simplify_all(&w);
    }
    out->numbers = dp_case_numbers(s, &out->nonzero);
    out->tries = w.tries;
    if (!w.st) w.st = dp_failure_of(s, &w.small, w.runs, 1, &out->after, e);
    if (w.st) dp_shrink_free(out);
    return w.st;
}

void dp_shrink_free(dp_shrunk *s) {
    dp_shrink_copy_free(&s->c);
    free(s->laws);
    s->laws = NULL;
}

int dp_shrunk_by_laws(const dp_shrunk *s) { return s->laws && !dp_shrink_fits_text(&s->c); }

dp_status dp_shrunk_write(const dp_shrunk *s, const char *reason, const char *source,
                          const char *path, dp_err *e) {
    return dp_shrunk_by_laws(s) ? dp_shrink_write_laws(s->laws, reason, source, path, e)
                                : dp_case_write(&s->c, reason, source, path, e);
}
