/* What two runs of a right kernel may differ by: the sum of both bounds (invariants_work.h). */
#include "harness/run/limits.h"
#include "invariants_work.h"

#include <assert.h>
#include <stdio.h>

/* Seconds of one core that the fp64 reference and its bounds take, about. */
static double reference_seconds(const dp_problem *p) {
    return 2e-8 * (double)p->T * p->HV * p->R * p->R * (DP_CHUNK + p->K) * (p->K + p->V);
}

#define AFFORDABLE 60 /* seconds */

int dp_check_bounded(const dp_check_work *w, char *why, size_t size) {
    const dp_design design = dp_check_design(w->s);
    if (!dp_bounds_are_derived(&design)) {
        snprintf(why, size, "no bound is derived for the design of this kernel");
        return 0;
    }
    if (reference_seconds(w->p) <= AFFORDABLE) return 1;
    snprintf(why, size, "the fp64 reference that bounds are taken from would take about %.0f s",
             reference_seconds(w->p));
    return 0;
}

dp_design dp_check_design(const dp_check_subject *s) {
    dp_design d = dp_design_of(s->base);
    if (s->library && s->library->design) dp_design_parse(s->library->design, s->base, &d, NULL);
    d.drop = 0;
    return d;
}

static void make(const dp_check_work *w, dp_error_bound *b) {
    dp_sim ref;
    dp_error_bound_base base;
    dp_design exact = dp_design_of(DP_BASE_FP64);
    const dp_design design = dp_check_design(w->s);
    exact.chunk = design.chunk;
    const dp_status st = dp_sim_new_design(&ref, w->p, &exact, w->N, NULL);
    assert(!st); /* it was run on these ranks */
    (void)st;
    dp_sim_run(&ref, DP_FP64, DP_MERGE_ALLGATHER, w->backward);
    dp_error_bound_base_inexact(&base, &ref, &design, 2, w->backward, NULL);
    dp_error_bound_run(&base, w->s->chain, w->backward, b);
    dp_error_bound_base_free(&base);
    dp_sim_free(&ref);
}

const dp_error_bound *dp_check_bounds_of(dp_check_work *w) {
    const int i = w->p != w->whole;
    dp_check_bounds *b = w->bounds;
    if (b->made[i] && (!i || b->made[i] == w->c)) return &b->of[i];
    if (b->made[i]) dp_error_bound_free(&b->of[i]);
    make(w, &b->of[i]);
    b->made[i] = w->c;
    return &b->of[i];
}

void dp_check_bounds_free(dp_check_bounds *b) {
    for (int i = 0; i < 2; i++)
        if (b->made[i]) dp_error_bound_free(&b->of[i]);
}
