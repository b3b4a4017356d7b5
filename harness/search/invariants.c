/* The list of invariants, and all of them on one problem (invariants.h). */
#include "invariants_work.h"
#include "ref/vocabulary/text.h"

#include <stdio.h>
#include <string.h>

/* ---- factors and signs ----------------------------------------------------------------------- */

/* What each result is multiplied by; 0: not compared. */
typedef struct {
    double of[DP_NRESULTS];
} factors;
static factors all_times(double c) {
    factors f;
    for (int i = 0; i < DP_NRESULTS; i++)
        f.of[i] = c;
    return f;
}

static int has_gradients(dp_check_work *w) {
    const int has = w->backward && (dp_backends[w->s->backend].simulated || w->base->r.dq);
    if (!has) dp_check_skip(w, "no gradients");
    return has;
}

static dp_status scale_v(dp_check_work *w) {
    static const int input[] = {DP_INPUT_V, DP_INPUT_S0};
    factors by = all_times(8);
    by.of[DP_RESULT_DV] = by.of[DP_RESULT_DS0] = 1;
    return dp_check_factor(w, input, 2, 8, by.of, dp_check_underflow(w, 8));
}

static dp_status scale_do(dp_check_work *w) {
    static const int input[] = {DP_INPUT_DO, DP_INPUT_DSTATE};
    factors by = all_times(8);
    by.of[DP_RESULT_O] = by.of[DP_RESULT_FINAL_STATE] = 1;
    if (!has_gradients(w)) return DP_OK;
    return dp_check_factor(w, input, 2, 8, by.of, dp_check_underflow(w, 8));
}

static dp_status sign_q(dp_check_work *w) {
    static const int input[] = {DP_INPUT_Q};
    factors by = all_times(w->p->dstate ? 0 : -1);
    by.of[DP_RESULT_O] = -1;
    by.of[DP_RESULT_FINAL_STATE] = by.of[DP_RESULT_DQ] = 1;
    return dp_check_factor(w, input, 1, -1, by.of, 0);
}

static dp_status sign_kv(dp_check_work *w) {
    static const int input[] = {DP_INPUT_K, DP_INPUT_V};
    factors by = all_times(1);
    by.of[DP_RESULT_DK] = by.of[DP_RESULT_DV] = -1;
    return dp_check_factor(w, input, 2, -1, by.of, 0);
}

/* ---- the others ------------------------------------------------------------------------------ */

static dp_status causality(dp_check_work *w) {
    return dp_check_edits(w, DP_ROLE_REQUIRED, dp_check_keep_before);
}

static dp_status anticausality(dp_check_work *w) {
    return has_gradients(w) ? dp_check_edits(w, DP_ROLE_INCOMING, dp_check_keep_behind) : DP_OK;
}

static dp_status ranks(dp_check_work *w) { return dp_check_ranks(w, 0); }

static dp_status transpose(dp_check_work *w) { return dp_check_ranks(w, 1); }

/* ---- the list -------------------------------------------------------------------------------- */

#define BITS "bitwise"
#define BITS_BUT_UNDERFLOW "bitwise but for underflow"
#define BITS_EXACT "bitwise: nothing rounds"
#define BOUNDS "sum of both bounds"

#define NAME(name, promise, run) name,
#define ROW(name, promise, run) {promise, run},
const char *const dp_check_names[DP_NCHECKS] = {DP_CHECKS(NAME)};
static const struct {
    const char *promise;
    dp_status (*run)(dp_check_work *w);
} CHECKS[DP_NCHECKS] = {DP_CHECKS(ROW)};

/* A library's refusal skips a check, its death fails it; what else goes wrong ends the checks. */
static dp_status settle(dp_status st, const dp_check_subject *s, dp_check *c, dp_err *e) {
    if (!s->library || (st != DP_EINPUT && st != DP_EDEVICE)) return st;
    c->verdict = st == DP_EINPUT ? DP_SKIPPED : DP_FAIL;
    snprintf(c->why, sizeof c->why, "%.300s", e->msg);
    *e = (dp_err){0};
    return DP_OK;
}

/* The i-th check, as w is set up for it. */
static dp_status run_check(int i, dp_check_work w, dp_check *c) {
    *c = (dp_check){.name = dp_check_names[i], .promise = CHECKS[i].promise, .verdict = DP_PASS};
    w.c = c;
    const dp_status st = settle(CHECKS[i].run(&w), w.s, c, w.e);
    if (!st && c->verdict == DP_PASS && !c->compared)
        dp_check_skip(&w, "nothing of this problem could be compared");
    return st;
}

/* ---- failures that do not come again ------------------------------------------------------- */

enum { MOST_TRIES = 6 };

/* A check of foreign code that failed, with all its runs and the one that they are compared with
 * made again, until it fails to the letter as before, or does not: it holds or, of a kernel that
 * claims bits, has others. *tries: how many were made; *differ: of
 * how many that is so. */
static dp_status try_again(int i, dp_check_work w, const dp_check *c, int *differ, int *tries) {
    dp_status st = DP_OK;
    *differ = *tries = 0;
    for (int more = 1; more && !st && *tries < MOST_TRIES; ++*tries) {
        dp_check_outcome base;
        dp_check_bounds bounds = {0};
        dp_check again = {.verdict = DP_FAIL};
        w.base = &base;
        w.bounds = &bounds;
        st = dp_check_run_problem(w.s, w.p, w.N, w.backward, &base, w.e);
        if (!st) st = run_check(i, w, &again);
        const int other = strcmp(again.why, c->why) != 0;
        *differ = again.verdict != DP_FAIL || (w.s->bitwise && other);
        more = other && !*differ;
        dp_check_bounds_free(&bounds);
        dp_check_outcome_free(&base);
    }
    return settle(st, w.s, &(dp_check){0}, w.e);
}

/* Said on the check itself, or, where there is one, on `repeat`: the cause is not what the check
 * is about. */
static void blame_repeat(dp_check *c, dp_check *repeat, int differ, int tries) {
    char why[sizeof c->why];
    snprintf(why, sizeof why, "not repeatable, %d of %d: %s failed once: %.380s", differ, tries,
             c->name, c->why);
    if (repeat && repeat->verdict != DP_FAIL) {
        repeat->verdict = DP_FAIL;
        memcpy(repeat->why, why, sizeof why);
    }
    c->verdict = repeat ? DP_SKIPPED : DP_FAIL;
    memcpy(c->why, why, sizeof why);
}

/* The check that failed, a library's: is it the library that gives other results each time? */
static dp_status look_again(int i, const dp_check_work *w, dp_check *c, dp_check *repeat) {
    int differ, tries;
    if (c == repeat || !w->s->library) return DP_OK;
    if (repeat && repeat->verdict == DP_FAIL) {
        c->verdict = DP_SKIPPED;
        snprintf(c->why, sizeof c->why, "the same run does not give the same (repeat)");
        return DP_OK;
    }
    const dp_status st = try_again(i, *w, c, &differ, &tries);
    if (!st && differ) blame_repeat(c, repeat, differ, tries);
    return st;
}

dp_status dp_checks_run(const dp_problem *p, const dp_check_subject *s, int N, int backward,
                        const char *only, dp_checks *out, dp_err *e) {
    dp_check_outcome base;
    dp_check_bounds bounds = {0};
    *out = (dp_checks){0};
    dp_status st = dp_check_run_problem(s, p, N, backward, &base, e);
    if (st == DP_EDEVICE && s->library) { /* died on the problem itself: no check is needed */
        out->c[out->n++] = (dp_check){.name = dp_check_names[0], .promise = CHECKS[0].promise};
        return settle(st, s, &out->c[0], e);
    }
    for (int i = 0; i < DP_NCHECKS && !st; i++) {
        const double t0 = dp_now();
        if (only && !dp_is_listed(dp_check_names[i], only, ',')) continue;
        dp_check *c = &out->c[out->n++], *first = &out->c[0];
        const dp_check_work w = {.p = p,
                                 .whole = p,
                                 .s = s,
                                 .N = N,
                                 .backward = backward && p->dout,
                                 .base = &base,
                                 .bounds = &bounds,
                                 .e = e};
        st = run_check(i, w, c);
        if (!st && c->verdict == DP_FAIL)
            st = look_again(i, &w, c, first->name == dp_check_names[0] ? first : NULL);
        c->seconds = dp_now() - t0;
        if (s->progress)
            fprintf(stderr, "  %s: %s, %.2f s\n", c->name,
                    st ? "cannot be run" : dp_verdict_names[c->verdict], c->seconds);
    }
    dp_check_bounds_free(&bounds);
    dp_check_outcome_free(&base);
    return st;
}
