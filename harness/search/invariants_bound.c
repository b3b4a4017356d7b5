/* The allowed difference of two runs of a right kernel: the sum of both bounds
 * (invariants_work.h). */
#include "harness/run/limits.h"
#include "harness/verdict/stage_bound.h"
#include "invariants_work.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>

/* Seconds of one core that the fp64 reference and its bounds take, about. */
static double reference_seconds(const dp_problem *p) {
    return 2e-8 * (double)p->T * p->HV * p->R * p->R * (DP_CHUNK + p->K) * (p->K + p->V);
}

#define AFFORDABLE 60 /* seconds */

int dp_check_bounds_there(const dp_check_subject *s, const dp_problem *p, char *why, size_t size) {
    const dp_design design = dp_check_design(s, p);
    const int tokens = dp_token_design_is_bounded(&design);
    const double cost = tokens ? dp_token_bounds_seconds(p) : reference_seconds(p);
    if (!tokens && !dp_bounds_are_derived(&design))
        snprintf(why, size, "no bound is derived for the design of this kernel");
    else if (cost > AFFORDABLE)
        snprintf(why, size, "the fp64 reference that bounds are taken from would take about %.0f s",
                 cost);
    else
        return 1;
    return 0;
}

int dp_check_bounded(const dp_check_work *w, char *why, size_t size) {
    return dp_check_bounds_there(w->s, w->p, why, size);
}

double dp_check_largest(const dp_check_work *w) {
    dp_design exact = dp_design_of(DP_BASE_FP64);
    dp_sim ref;
    dp_err e = {0};
    double most = 0;
    if (reference_seconds(w->p) > AFFORDABLE) return 0;
    dp_problem here = dp_check_at_hand(w->p);
    if (dp_sim_new_design(&ref, &here, &exact, w->N, &e)) {
        dp_problem_free(&here);
        return 0;
    }
    dp_sim_run(&ref, DP_FP64, DP_EXCHANGE_ALLGATHER, 0);
    for (int f = DP_RESULT_O; f <= DP_RESULT_FINAL_STATE; f++) {
        const double *x = *dp_result_at(&ref.out, f);
        int64_t rows, width;
        dp_result_shape(w->p, f, &rows, &width);
        for (int64_t i = 0; x && i < rows * width; i++)
            most = isnan(x[i]) ? INFINITY : fmax(most, fabs(x[i]));
    }
    dp_sim_free(&ref);
    dp_problem_free(&here);
    return most;
}

dp_design dp_check_design(const dp_check_subject *s, const dp_problem *p) {
    dp_design d = dp_design_of(s->base);
    if (s->library && s->library->design) dp_design_parse(s->library->design, s->base, &d, NULL);
    const dp_sending asked = {.exchange = s->merge, .payload = s->payload};
    if (!s->library && dp_backends[s->backend].simulated)
        d.sending = dp_sending_of(s->merge, s->payload, DP_SENDERS);
    if (!s->library && dp_backends[s->backend].on_device)
        d.sending = dp_cuda_sending(asked, DP_SENDERS);
    if (!s->library && dp_backends[s->backend].on_device && dp_cuda_by_tokens(p)) d.chunk = 0;
    d.drop = 0;
    if (s->chunk) d.chunk = s->chunk;
    return d;
}

/* Adds one store of each result in the format that it leaves in. */
static void add_store(const dp_problem *p, const dp_design *bounded, const dp_design *own,
                      dp_result *r, dp_error_bound *b) {
    const double *want[DP_NRESULTS];
    for (int i = 0; i < DP_NRESULTS; i++)
        want[i] = *dp_result_at(r, i);
    dp_bounds_store(p, bounded, own, want, b);
}

void dp_check_bounds_make(const dp_check_subject *s, const dp_problem *there, int N, int backward,
                          double *const *of, dp_error_bound *b, double **stage) {
    dp_problem here = dp_check_at_hand(there);
    const dp_problem *p = &here;
    dp_sim ref;
    dp_error_bound_base base;
    dp_design exact = dp_design_of(DP_BASE_FP64);
    const dp_design own = dp_check_design(s, p), design = own.chunk ? own : dp_token_design(&own);
    exact.chunk = design.chunk;
    if (design.sending.exchange == DP_EXCHANGE_HEADS) N = 1; /* computes as one rank does */
    const dp_status st = dp_sim_new_design(&ref, p, &exact, N, NULL);
    assert(!st); /* it was run on these ranks */
    (void)st;
    dp_sim_run(&ref, DP_FP64, DP_EXCHANGE_ALLGATHER, backward);
    dp_error_bound_base_inexact(&base, &ref, &design, 2, backward, NULL);
    dp_error_bound_run(&base, s->chain, backward, b);
    for (int i = 0; of && i < DP_NSTAGE_TENSORS; i++)
        if (of[i] && dp_stage_tensors[i].kind != DP_PER_RANK) stage[i] = dp_stage_bound(&base, i);
    const dp_design plain = dp_design_of(design.base);
    add_store(p, &plain, &own, &ref.out, b);
    dp_error_bound_base_free(&base);
    dp_sim_free(&ref);
    dp_problem_free(&here);
}

const dp_error_bound *dp_check_bounds_of(dp_check_work *w) {
    const int i = w->p != w->whole;
    dp_check_bounds *b = w->bounds;
    if (b->made[i] && (!i || b->made[i] == w->c)) return &b->of[i];
    if (b->made[i]) dp_error_bound_free(&b->of[i]);
    dp_check_bounds_make(w->s, w->p, w->N, w->backward, NULL, &b->of[i], NULL);
    b->made[i] = w->c;
    return &b->of[i];
}

void dp_check_bounds_free(dp_check_bounds *b) {
    for (int i = 0; i < 2; i++)
        if (b->made[i]) dp_error_bound_free(&b->of[i]);
}
