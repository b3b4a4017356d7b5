/* Bounds of the stages of a subject that are not of ranks, and their cache (run_bounds.h). */
#include "harness/verdict/stage_bound.h"
#include "run_bounds.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

int dp_stage_is_inner(double *const *stage, int i) {
    return stage[i] && dp_stage_tensors[i].kind != DP_PER_RANK;
}

static double *bound_of(dp_error_bound_base *w, dp_format chain, int backward, int stage) {
    dp_error_bound b;
    if (dp_stage_tensor_carried(stage)) { /* errors that enter the ranks */
        dp_error_bound_run(w, chain, backward, &b);
        dp_error_bound_free(&b);
    }
    return dp_stage_bound(w, stage);
}

static void ready(dp_sharding *sp, dp_base base, dp_bound_bases *w) {
    dp_sim *ref = dp_sharding_reference(sp);
    if (w->ready) return;
    dp_error_bound_base_init(&w->sound, ref, base, 1, sp->c->backward);
    dp_error_bound_base_init(&w->probable, ref, base, 2, sp->c->backward);
    w->ready = 1;
}

static void make_one(dp_sharding *sp, dp_format chain, dp_bound_bases *w, int stage,
                     dp_stage_errors *x) {
    const int back = sp->c->backward;
    int64_t rows, width;
    double *probable = bound_of(&w->probable, chain, back, stage);
    double *sound = bound_of(&w->sound, chain, back, stage);
    double *rad = bound_of(dp_sharding_fp64(sp), DP_FP64, back, stage);
    dp_stage_tensor_rows(&sp->c->p, sp->N, stage, &rows, &width);
    for (int64_t r = 0; r < rows; r++)
        x->bound[stage][r] = fmin(probable[r], sound[r]);
    memcpy(x->rad[stage], rad, sizeof *rad * (size_t)rows);
    free(probable);
    free(sound);
    free(rad);
}

void dp_stage_errors_make(dp_sharding *sp, const dp_run *run, double *const *stage,
                          dp_bound_bases *w, dp_stage_errors *x) {
    enum { SETTINGS = 5, STAGE_ERRORS = 0x73746167 /* no other key of this length has it */ };
    const char *cache = sp->std->o->cache;
    int32_t what[SETTINGS + DP_NSTAGE_TENSORS] = {sp->N, run->base, run->chain, sp->c->backward,
                                                  STAGE_ERRORS};
    dp_part part[2 * DP_NSTAGE_TENSORS];
    int n = 0;
    *x = (dp_stage_errors){{NULL}, {NULL}};
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++) {
        int64_t rows, width;
        if (!dp_stage_is_inner(stage, i)) continue;
        dp_stage_tensor_rows(&sp->c->p, sp->N, i, &rows, &width);
        what[SETTINGS + i] = 1;
        x->bound[i] = dp_doubles(rows);
        x->rad[i] = dp_doubles(rows);
        part[n++] = (dp_part){x->bound[i], sizeof(double) * (size_t)rows};
        part[n++] = (dp_part){x->rad[i], sizeof(double) * (size_t)rows};
    }
    const dp_key key = cache ? dp_problem_key(&sp->c->p, what, sizeof what) : (dp_key){{0}};
    if (!n || (cache && dp_cache_load(cache, DP_CACHE_STAGES, key, part, n))) return;
    ready(sp, run->base, w);
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++)
        if (dp_stage_is_inner(stage, i)) make_one(sp, run->chain, w, i, x);
    if (cache) dp_cache_save(cache, DP_CACHE_STAGES, key, part, n);
}

void dp_stage_errors_free(dp_stage_errors *x) {
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++) {
        free(x->bound[i]);
        free(x->rad[i]);
    }
}
