/* Results that another program computed and wrote to files (judge.h). */
#include "limits.h"
#include "ref/arithmetic/elementary.h"
#include "subjects.h"

#include <math.h>

/* A result may be stored in a format with unit roundoff u and spacing 2 tiny among its subnormals.
 * It is then off by u |x| + tiny an entry, x the value before: |x| <= |want| + bound for the row.
 * Only a format coarser than the base's own adds to it. */
void dp_widen_for_storage(const dp_sharding *sp, const dp_design *d, const dp_stored_results *g,
                          dp_error_bound *b) {
    const dp_problem *p = &sp->c->p;
    for (int i = 0; i < DP_NRESULTS; i++) {
        const double u = g->u[i] > dp_own_storage(d, i) ? g->u[i] : 0;
        const double *want = sp->truth->field[i].hi;
        int64_t rows, width;
        dp_result_shape(p, i, &rows, &width);
        if (!b->row[i] || !*dp_result_at((dp_result *)&g->r, i)) continue;
        for (int64_t r = 0; r < rows; r++)
            b->row[i][r] += u * (dp_norm_fro(width, want + r * width) + b->row[i][r]) +
                            sqrt((double)width) * g->tiny[i];
    }
}

static void judge(dp_sharding *sp, const dp_stored_results *g, dp_run *r, double from) {
    dp_bound_bases bases = {0};
    const dp_outputs outputs = {.results = &g->r, .stage = g->stage, .stored = g};
    dp_judge_outputs(sp, &bases, &outputs, r, from);
    dp_bound_bases_free(&bases);
}

/* Is anything there that ranks exchange? */
static int exchanged(const dp_stored_results *g) {
    int any = 0;
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++)
        any |= g->stage[i] && dp_stage_tensors[i].kind == DP_PER_RANK;
    return any;
}

static void run_given(dp_sharding *sp, const dp_stored_results *g, dp_runs *out, double from) {
    const dp_case *c = sp->c;
    const dp_run_options *o = sp->std->o;
    const dp_how how = {DP_BACKEND_FILE, c->base[0], c->chain[0],
                        g->design ? *g->design : dp_design_of(c->base[0])};
    dp_run *r = dp_sharding_record(sp, &how, out);
    r->other_design = !g->same_design;
    r->undeclared = g->explained || how.design.undeclared || (!g->design && !g->same_design);
    dp_sharding_note_truth(sp, r);
    r->id = dp_run_id(r);
    judge(sp, g, r, from);
    if (o->done) o->done(r, o->arg);
}

dp_status dp_run_stored(const dp_case *c, const dp_run_options *o, const dp_stored_results *g,
                        dp_runs *out, dp_err *e) {
    const double from = dp_now();
    const int boundaries = exchanged(g);
    dp_standard std;
    dp_sharding sp;
    dp_status st = dp_standard_open(&std, c, o, boundaries, e);
    if (!st) {
        st = dp_sharding_open(&sp, &std, c->ranks[0], boundaries, e);
        if (!st) run_given(&sp, g, out, from);
        dp_sharding_close(&sp);
    }
    dp_standard_close(&std);
    return st;
}
