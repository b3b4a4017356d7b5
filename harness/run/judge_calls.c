/* A session judged: its results, and what its calls handed on (outputs.h). */
#include "outputs.h"

#include <stdio.h>
#include <string.h>

void dp_calls_seen_free(dp_calls_seen *seen) {
    dp_drafts_free(&seen->drafts);
    dp_pool_seen_free(&seen->pool);
    dp_conv_calls_free(&seen->front);
}

/* Behind what failed: where the first wrong state comes from. */
static void say_far(const dp_states_seen *far, dp_run *r) {
    const size_t n = strlen(r->why);
    if (r->verdict != DP_FAIL || !(far->off > 0)) return;
    snprintf(
        r->why + n, sizeof r->why - n,
        "; call %lld is the first that leaves a wrong state: sequence %d, head %d, off by %.2g "
        "of what its inputs make",
        (long long)far->call + 1, far->sequence, far->head, far->off);
}

dp_status dp_judge_calls(dp_sharding *sp, const dp_outputs *out, const dp_calls_seen *seen,
                         dp_bound_bases *bases, dp_run *r, double from, dp_err *e) {
    const int step = dp_op_of(sp->c)->has_front;
    dp_step_run front = {0};
    dp_status st =
        step ? dp_step_of_calls(sp->c, r->backend, r->base, &seen->front, &front, e) : DP_OK;
    if (!st) {
        sp->step = step ? &front : NULL;
        dp_judge_outputs(sp, bases, out, r, from);
        sp->step = NULL;
        st = dp_judge_drafts(sp, &seen->drafts, r, e);
        dp_judge_pool(sp, &seen->pool, r);
        dp_judge_conv_states(&seen->front, r);
        say_far(&seen->far, r);
    }
    if (step) dp_step_run_free(sp->c, &front);
    return st;
}
