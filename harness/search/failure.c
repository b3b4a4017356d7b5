/* Why a case fails, as something that two cases have in common (shrink.h). */
#include "bisect.h"
#include "harness/run/blame.h"
#include "shrink.h"

#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <string.h>

/* ---- why it fails ---------------------------------------------------------------------------- */

int dp_failure_same(const dp_failure *a, const dp_failure *b) {
    return a->kind && a->kind == b->kind &&
           (a->kind != DP_FAILS_OUTCOME ||
            (a->outcome == b->outcome && !strcmp(a->error, b->error))) &&
           !strcmp(a->stage, b->stage) && !strcmp(a->tensor, b->tensor) && a->red <= b->red;
}

void dp_failure_error(const char *why, char *out, size_t size) {
    const char *last = strstr(why, ": ");
    size_t n = 0;
    last = last ? last + 2 : "";
    for (const char *next; (next = strstr(last, " | "));)
        last = next + 3;
    for (size_t i = 0, end = strcspn(last, ":("); i < end && n + 1 < size; i++)
        if (last[i] < '0' || last[i] > '9') out[n++] = last[i];
    out[n] = 0;
}

void dp_failure_text(const dp_failure *f, char *out, size_t size) {
    static const char *const kind[] = {"nothing fails", "over its bound",
                                       "not finite",    "not the same in every run",
                                       "not written",   ""};
    const char *what =
        f->kind == DP_FAILS_OUTCOME ? dp_subject_outcomes[f->outcome] : kind[f->kind];
    snprintf(out, size, "%s%s%s%s%s%s%s", f->stage, *f->stage ? ": " : "", f->tensor,
             *f->tensor ? " " : "", what, *f->error ? ": " : "", f->error);
    if (f->rank >= 0) dp_text_add(out, size, ", rank %d", f->rank);
    if (f->head >= 0) dp_text_add(out, size, ", head %d", f->head);
}

static dp_failure_kind kind_of(const dp_judgement *t) {
    if (t->flaw == DP_FLAW_UNWRITTEN) return DP_FAILS_UNWRITTEN;
    return t->flaw || !isfinite(t->ratio) ? DP_FAILS_NOT_FINITE : DP_FAILS_OVER;
}

static dp_status one_run(const dp_case *c, const dp_shrink_options *o, dp_fault fault,
                         const char *cache, dp_runs *runs, dp_err *e) {
    const int backend = o->subject ? DP_BACKEND_SUBJECT : DP_BACKEND_SIM;
    const dp_run_options ro = {.only = {[DP_ID_BACKEND] = {1, {backend}},
                                        [DP_ID_BASE] = dp_values_of(c->nbase, c->base),
                                        [DP_ID_CHAIN] = dp_values_of(c->nchain, c->chain)},
                               .fault = fault,
                               .subject = o->subject,
                               .limit_s = o->limit_s,
                               .cache = cache};
    const dp_status st = dp_case_run(c, &ro, runs, e);
    return st || runs->n
               ? st
               : dp_fail(e, DP_EINPUT, "%s: no run with %d ranks, base %s, chain %s", c->name,
                         c->ranks[0], dp_base_names[c->base[0]], dp_formats[c->chain[0]].name);
}

/* By the verdict alone: the outcome, and the first tensor that fails. */
static void from_run(const dp_run *r, int program, dp_failure *f) {
    f->red = r->verdict == DP_FAIL;
    if (r->verdict == DP_SKIPPED) snprintf(f->why, sizeof f->why, "%.199s", r->why);
    if (!f->red) return;
    const dp_judgement *t = dp_first_failing(r, &f->stage);
    f->kind = DP_FAILS_OUTCOME;
    f->outcome = DP_SUBJECT_RETURNED;
    for (int i = 0; r->outcome && i < DP_SUBJECT_NOUTCOMES; i++)
        if (!strcmp(r->outcome, dp_subject_outcomes[i])) f->outcome = (dp_subject_outcome)i;
    if (f->outcome != DP_SUBJECT_RETURNED || !t) {
        f->stage = "";
        if (program) dp_failure_error(r->why, f->error, sizeof f->error);
        snprintf(f->why, sizeof f->why, "%.199s", r->why);
        return;
    }
    f->kind = kind_of(t);
    f->ratio = t->ratio;
    f->rank = dp_judgement_row(t)->at.rank;
    f->head = dp_judgement_row(t)->at.head;
    snprintf(f->tensor, sizeof f->tensor, "%s", t->name);
}

static dp_status from_bisect(const dp_case *c, dp_fault fault, int runs, dp_failure *f, dp_err *e) {
    DP_FREED(dp_bisect_free) dp_bisect b = {0};
    dp_sim_policy how = {c->ranks[0], c->base[0],  c->chain[0],  c->merge[0],
                         fault,       c->backward, c->payload[0]};
    const dp_problem p = dp_bisect_owned(&c->p, dp_faults[fault].own, c->ranks[0], &how.N);
    if (!how.N)
        return dp_fail(e, DP_EINPUT, "%s: %d ranks cannot own its tokens so: %s", c->name,
                       c->ranks[0], dp_own_names[dp_faults[fault].own]);
    const dp_status st = dp_bisect_sim(&p, &how, runs, 0, &b, e);
    if (st) return st;
    if (b.first >= 0) {
        const dp_bisect_row *x = &b.stage[b.first];
        f->kind = x->unsteady == x->fails                      ? DP_FAILS_UNSTEADY
                  : isnan(x->first.got) || isinf(x->first.got) ? DP_FAILS_NOT_FINITE
                                                               : DP_FAILS_OVER;
        f->stage = dp_stage_names[b.first];
        f->ratio = x->ratio;
        f->rank = x->first.at.rank;
        f->head = x->first.at.head;
        snprintf(f->tensor, sizeof f->tensor, "%s", x->tensor);
    }
    return st;
}

static dp_status failure_of(const dp_case *c, const dp_shrink_options *o, int runs, int red,
                            dp_failure *f, dp_err *e) {
    DP_FREED(dp_runs_free) dp_runs all = {0};
    *f = (dp_failure){.stage = "", .rank = -1, .head = -1, .ratio = NAN};
    if (c->op->has_stages && !o->subject) {
        dp_status st = from_bisect(c, o->run.fault, runs, f, e);
        if (st || !red || !f->kind) return st;
        st = one_run(c, o, o->run.fault, o->cache, &all, e);
        for (int i = 0; i < all.n; i++)
            f->red |= all.run[i].verdict == DP_FAIL;
        return st;
    }
    const dp_status st = one_run(c, o, o->run.fault, o->cache, &all, e);
    if (!st) from_run(&all.run[0], o->subject && o->subject->command, f);
    return st;
}

dp_status dp_failure_of(const dp_case *c, const dp_shrink_options *o, int runs, int red,
                        dp_failure *f, dp_err *e) {
    const int threads = omp_get_max_threads();
    if (dp_case_numbers(c, NULL) < 1 << 15)
        omp_set_num_threads(1); /* thousands of loops of microseconds each */
    const dp_status st = failure_of(c, o, runs, red, f, e);
    omp_set_num_threads(threads);
    return st;
}
