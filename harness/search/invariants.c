/* The list of invariants, and all of them on one problem (invariants.h). */
#include "invariants_work.h"
#include "ref/vocabulary/recurrence.h"
#include "ref/vocabulary/text.h"

#include <stdio.h>
#include <string.h>

/* ---- factors and signs ----------------------------------------------------------------------- */

/* The factor of each result; 0: not compared. */
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

/* Inputs of a row, the first bit of a set that of the first. */
static const dp_input_id ROWS_OF[] = {DP_INPUT_V,      DP_INPUT_K,     DP_INPUT_WRITE,
                                      DP_INPUT_ERASE,  DP_INPUT_LR_A,  DP_INPUT_LR_B,
                                      DP_INPUT_VALUE3, DP_INPUT_VALUE4};
enum { NROWS_OF = sizeof ROWS_OF / sizeof *ROWS_OF };

static int times_in(dp_entry e, int set) {
    int n = 0;
    for (int i = 0; i < NROWS_OF; i++)
        n += set >> i & 1 ? dp_entry_has(e, ROWS_OF[i]) + dp_entry_has(e, ROWS_OF[i] | DP_PREVIOUS)
                          : 0;
    return n;
}

/* The first set of inputs, that of `least` among them, of which each row is as the check needs it;
 * 0: there is none. */
static int first_set(const dp_problem *p, int least, int (*holds)(const dp_token_row *r, int set)) {
    const dp_recurrence *a = dp_recurrence_of(p);
    for (int set = least; set < 1 << NROWS_OF; set++) {
        int all = (set & least) == least;
        for (int j = 0; j < a->n && all; j++)
            all = holds(&a->row[j], set);
        if (all) return set;
    }
    return 0;
}

static int is_linear(const dp_token_row *r, int set) {
    return !times_in(r->write, set) && !times_in(r->read, set) &&
           (!r->value.sign || times_in(r->value, set) == 1);
}

static int keeps_signs(const dp_token_row *r, int set) {
    const int n = times_in(r->write, set);
    return !(r->read.sign && (n + times_in(r->read, set)) % 2) &&
           !(r->value.sign && (n + times_in(r->value, set)) % 2);
}

/* A difference means nothing where a multiple of the right results, or of states behind them,
 * overflows. */
static void unless_it_overflows(dp_check_work *w) {
    const double room = w->s->base == DP_BASE_FP64 ? 0x1p900 : 0x1p90;
    char why[96];
    if (w->c->verdict != DP_FAIL) return;
    const double most = dp_check_largest(w);
    if (most <= room) return;
    snprintf(why, sizeof why, "right results of up to %.3g may overflow when they are scaled",
             most);
    dp_check_skip(w, why);
}

/* Inputs of the set times c, and more of them; their gradients are as `by` has them, times own. */
static dp_status times_set(dp_check_work *w, int set, int more, double c, double own, factors *by) {
    int input[NROWS_OF + 1], n = 0;
    if (!set) {
        dp_check_skip(w, "the rows of this recurrence have no such inputs");
        return DP_OK;
    }
    for (int i = 0; i < NROWS_OF; i++)
        if (set >> i & 1) input[n++] = ROWS_OF[i];
    if (more >= 0) input[n++] = more;
    for (int f = 0; f < DP_NRESULTS; f++)
        for (int i = 0; i < n; i++)
            if (dp_result_fields[f].role == DP_ROLE_GRADIENT &&
                (int)dp_result_fields[f].of == input[i])
                by->of[f] = own;
    const dp_status st =
        dp_check_factor(w, input, n, c, by->of, c < 0 ? 0 : dp_check_underflow(w, c));
    if (!st && c > 1) unless_it_overflows(w);
    return st;
}

static dp_status scale_v(dp_check_work *w) {
    factors by = all_times(8);
    int set = first_set(w->p, 1, is_linear);
    if (!set) set = first_set(w->p, 4, is_linear);
    return times_set(w, set, DP_INPUT_S0, 8, 1, &by);
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
    factors by = all_times(1);
    int set = first_set(w->p, 3, keeps_signs);
    if (!set) set = first_set(w->p, 1, keeps_signs);
    return times_set(w, set, -1, -1, -1, &by);
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

/* Repeats a failed check of foreign code, with the run that it compares with. It stops when a
 * repetition fails with the same message. It also stops, with *differ = 1, when a repetition
 * passes, or when a kernel that claims equal bits fails with another message. The number of
 * repetitions goes to *tries. */
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
