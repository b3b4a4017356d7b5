/* Which stage of a step is wrong: the convolutions are stages, too (bisect.h). */
#include "bisect.h"
#include "harness/run/step.h"

#include <stdio.h>
#include <stdlib.h>

/* The first tensor that fails, else the one closest to its bound. */
static void row_of(const dp_run *run, int backward, dp_bisect_row *x) {
    for (int i = 0; i < run->ntensor; i++) {
        const dp_judgement *t = &run->tensor[i];
        const dp_row *first = backward ? &t->last : &t->first;
        if (x->fails || (!t->nover && t->ratio <= x->ratio)) continue;
        snprintf(x->tensor, sizeof x->tensor, "%.15s", t->name);
        x->ratio = t->ratio;
        x->first.row = -1;
        if (!t->nover) continue;
        x->fails = (int)t->nover;
        x->first = (dp_bisect_entry){first->at,   -1,         first->index, first->got,
                                     first->want, first->err, first->bound};
        if (first->at.token < 0) x->first.at.rank = -1; /* sums over ranks */
        for (int r = 0; x->first.at.rank >= 0 && r < t->N; r++) {
            x->rank[r] = t->per_rank_ratio[r] > 1;
            x->nrank += x->rank[r];
        }
        x->head[first->at.head] = 1;
        x->nhead = 1;
    }
}

/* from: NULL, or the gradients that the backward begins from. */
static dp_status bisect_convs(const dp_case *c, const dp_sim_policy *how, const dp_result *from,
                              dp_bisect_row *x, dp_err *e) {
    dp_step_run s;
    dp_run run = {.tensor = dp_calloc(DP_STEP_TENSORS, sizeof *run.tensor)};
    dp_status st = dp_step_forward(c, DP_BACKEND_SIM, how->N, how->base, how->fault, &s, e);
    if (!st && from) st = dp_step_backward(c, from, &s, e);
    if (!st) dp_step_judge_alone(c, &s, from, &run, &x->judged);
    row_of(&run, from != NULL, x);
    for (int i = 0; i < run.ntensor; i++)
        dp_judgement_free(&run.tensor[i]);
    dp_step_run_free(c, &s);
    free(run.tensor);
    return st;
}

dp_status dp_step_bisect(const dp_case *c, const dp_sim_policy *how, int runs, int all,
                         dp_bisect *out, dp_err *e) {
    dp_status st = dp_bisect_sim(&c->p, how, runs, all, out, e);
    if (st || !c->op->has_front) return st;
    st = bisect_convs(c, how, NULL, &out->conv[0], e);
    if (!st && how->backward) {
        dp_sim ref;
        st = dp_sim_reference(&ref, &c->p, DP_CHUNK, how->N, NULL, 1, e);
        if (!st) {
            st = bisect_convs(c, how, &ref.out, &out->conv[1], e);
            dp_sim_free(&ref);
        }
    }
    if (st) dp_bisect_free(out);
    return st;
}
