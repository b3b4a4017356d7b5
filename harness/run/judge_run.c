/* The judgement of one run: its parts in order, and a second set of draws where it is marginal. */
#include "limits.h"
#include "outputs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Does anything but the tensors of ranks need draws of its own? */
static int inner_stages(const dp_outputs *out) {
    int any = 0;
    for (int i = 0; out->stage && i < DP_NSTAGE_TENSORS; i++)
        any |= dp_stage_is_inner(out->stage, i);
    return any;
}

static void judge_step(const dp_judging *j, dp_run *r) {
    const dp_sharding *sp = j->sp;
    const dp_step_expected x = {dp_sharding_expected(sp, r), sp->windows.window_of,
                                dp_run_allowance(r), dp_base_roundoff(r->base),
                                dp_base_smallest(r->base, sp->c->p.K)};
    dp_err e = {0};
    if (!sp->step) return;
    if (!dp_step_judge(sp->c, sp->truth, sp->step, j->out->results, j->bound, &x, r, &e)) return;
    fprintf(stderr, "deltaproof: %s: %s\n", sp->c->name, e.msg);
    exit(2); /* the convolution ran before: a device that died since */
}

static void judge_all(const dp_judging *j, dp_run *r) {
    const int most = DP_NRESULTS + DP_STEP_TENSORS + DP_RANK_TENSORS + DP_NSTAGE_TENSORS;
    r->tensor = dp_calloc((size_t)most, sizeof *r->tensor);
    dp_judge_results(j, r);
    judge_step(j, r);
    dp_judge_ranks(j, r);
    dp_chain_growth(j, r);
    if (!j->out->stage) return;
    dp_judge_stages(j, r);
    dp_name_flaws(j, r);
}

/* ---- settling what is marginal --------------------------------------------------------------- */

static int marginal_failure(const dp_run *r) {
    int any = 0;
    for (int i = 0; i < r->ntensor; i++) {
        const dp_judgement *t = &r->tensor[i];
        if (t->verdict != DP_FAIL) continue;
        if (strcmp(t->tier, "expected") || !dp_judgement_marginal(t)) return 0;
        any = 1;
    }
    return any;
}

/* Failed judgements give way to those of the second set, and keep what the first one said. */
static void replace_failures(dp_run *r, dp_run *again) {
    for (int i = 0; i < r->ntensor; i++) {
        dp_judgement *now = &r->tensor[i], *later = &again->tensor[i];
        if (now->verdict != DP_FAIL) continue;
        const dp_judgement first = *now;
        *now = *later;
        *later = first;
        now->before = first.expected;
    }
}

/* Where a run fails by draws alone, each time within DP_MARGIN of its limit, a second, independent
 * set of draws decides. Both stay in the record. */
static void settle(const dp_judging *j, int stages, dp_run *r) {
    if (r->exact || !marginal_failure(r)) return;
    dp_run again = *r;
    again.tensor = NULL;
    again.ntensor = 0;
    again.point = NULL;
    again.npoint = 0;
    again.set = 1;
    dp_sharding_expect(j->sp, stages, &again);
    judge_all(j, &again);
    replace_failures(r, &again);
    for (int i = 0; i < again.ntensor; i++)
        dp_judgement_free(&again.tensor[i]);
    free(again.tensor);
    free(again.point);
    r->settled = 1;
}

void dp_judge_run(const dp_judging *j, dp_run *r, double from) {
    const int stages = inner_stages(j->out);
    dp_sharding_expect(j->sp, stages, r);
    judge_all(j, r);
    settle(j, stages, r);
    dp_run_close(r, dp_now() - from);
}
