/* Judgement of a subject's intermediates by name (harness/simulated/stage_tensor.h). */
#include "harness/verdict/stage_bound.h"
#include "limits.h"
#include "outputs.h"
#include "ref/arithmetic/elementary.h"
#include "run_bounds.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- bounds ---------------------------------------------------------------------------------- */

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

/* stage [DP_NSTAGE_TENSORS]: not NULL where it is there. */
static void stage_errors_make(dp_sharding *sp, const dp_run *run, double *const *stage,
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

/* Frees what it holds; the struct is the caller's. */
static void stage_errors_free(dp_stage_errors *x) {
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++) {
        free(x->bound[i]);
        free(x->rad[i]);
    }
}

/* ---- judgement ------------------------------------------------------------------------------- */

/* Format that stage i lies in: u 0 where it is none coarser than the base's own store, which is in
 * the bound. */
typedef struct {
    double u, tiny;
} storage;

static double own_storage(dp_base base, int stage) {
    if (base == DP_BASE_BF16 && dp_stage_tensors[stage].stored_short) return 0x1p-8;
    return base == DP_BASE_FP64 ? 0x1p-53 : 0x1p-24;
}

static storage storage_of(const dp_judging *j, dp_base base, int stage) {
    const dp_stored_results *stored = j->out->stored;
    if (!stored) return (storage){0, 0};
    const double u = stored->stage_u[stage];
    return (storage){u > own_storage(base, stage) ? u : 0, stored->stage_tiny[stage]};
}

/* ---- stages of tokens and chunks ------------------------------------------------------------- */

static void widen(const dp_judging *j, storage s, int stage, double *bound) {
    int64_t rows, width;
    if (!(s.u > 0 || s.tiny > 0)) return;
    double *want = dp_stage_tensor_value(dp_sharding_reference(j->sp), stage);
    dp_stage_tensor_rows(&j->sp->c->p, j->sp->N, stage, &rows, &width);
    for (int64_t i = 0; i < rows; i++)
        bound[i] +=
            s.u * (dp_norm_fro(width, want + i * width) + bound[i]) + sqrt((double)width) * s.tiny;
    free(want);
}

static void judge_inner(const dp_judging *j, const dp_stage_errors *errors, int stage,
                        dp_run *run) {
    const dp_sharding *sp = j->sp;
    const storage s = storage_of(j, run->base, stage);
    widen(j, s, stage, errors->bound[stage]);
    /* the simulated ranks form Akk in base bf16 alone: elsewhere its draws would be those of an
     * inverse in fp64 */
    const int drawn = stage != DP_AKK || run->base == DP_BASE_BF16;
    const dp_expected *x = drawn ? dp_sharding_expected(sp, run) : NULL;
    const dp_stage_judge_in in = {.stage = stage,
                                  .got = j->out->stage[stage],
                                  .bound = errors->bound[stage],
                                  .rad = errors->rad[stage],
                                  .bound_shown = x && !dp_run_bounded(run),
                                  .draws = x && x->stage[stage].err2 ? &x->stage[stage] : NULL,
                                  .allowance = dp_run_allowance(run),
                                  .unit = dp_base_roundoff(run->base),
                                  .store = dp_run_storing(run, s.u),
                                  .tiny =
                                      dp_hypot(dp_base_smallest(run->base, sp->c->p.K), s.tiny)};
    dp_stage_judge(dp_sharding_reference(j->sp), &in, &run->tensor[run->ntensor++]);
}

/* The stages of stage_tensor.h are those of 64-token chunks. */
static int other_chunks(const dp_run *run) {
    return !run->undeclared && run->design.chunk != DP_CHUNK;
}

static void unjudged(const dp_judging *j, int stage, dp_run *run) {
    const int N = j->sp->N, HV = j->sp->c->p.HV;
    dp_judgement *t = &run->tensor[run->ntensor++];
    *t = (dp_judgement){.N = N,
                        .heads = HV,
                        .rel_fro = NAN,
                        .bound = NAN,
                        .ratio = NAN,
                        .times = NAN,
                        .tier = "",
                        .verdict = DP_UNJUDGED,
                        .expected = {.excess = NAN},
                        .before = {.excess = NAN},
                        .worst.at.rank = -1,
                        .over.at.rank = -1,
                        .failed.at.rank = -1};
    snprintf(t->name, sizeof t->name, "%s", dp_stage_tensors[stage].name);
    snprintf(t->why, sizeof t->why,
             "stages are those of chunks of %d tokens, this design has others", DP_CHUNK);
    t->per_rank = dp_doubles(N);
    t->per_head = dp_doubles((int64_t)N * HV);
}

/* ---- stages of ranks ------------------------------------------------------------------------- */

/* M and dM may be left unwritten (NaN) where no state passes through the rank (math.md g.1). */
static int may_be_absent(const dp_sharding *sp, int stage, int rank) {
    const dp_problem *p = &sp->c->p;
    dp_context c;
    if (stage != DP_M && stage != DP_DM) return 0;
    if (dp_context_of(p, sp->N, rank, &c, NULL)) return 0;
    const int passes = stage == DP_M ? dp_context_passes_fwd(&c) : dp_context_passes_bwd(&c);
    dp_context_free(&c);
    return !passes;
}

static int blank(const double *x, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (!isnan(x[i])) return 0;
    return 1;
}

static void judge_exchanged(const dp_judging *j, int stage, dp_run *run) {
    const dp_sharding *sp = j->sp;
    const int HV = sp->c->p.HV, pairs = sp->N * HV, which = dp_rank_of_stage(stage);
    const storage s = storage_of(j, run->base, stage);
    double **got = dp_calloc((size_t)pairs, sizeof *got);
    double *bound = dp_copy(dp_rank_bound(j->bound, which), pairs);
    for (int i = 0; i < pairs; i++) {
        int64_t width;
        double radius;
        const double *want = dp_true_rank_value(sp, which, i, &width, &radius);
        got[i] = j->out->stage[stage] + i * width;
        if (blank(got[i], width) && may_be_absent(sp, stage, i / HV)) got[i] = NULL;
        if (want) bound[i] += s.u * (dp_norm_fro(width, want) + bound[i]);
        if (want) bound[i] += sqrt((double)width) * s.tiny;
    }
    const dp_rank_values x = {.which = which, .got = got, .bound = bound, .u = s.u, .tiny = s.tiny};
    dp_judge_rank_tensor(j, &x, run);
    free(got);
    free(bound);
}

void dp_judge_stages(const dp_judging *j, dp_run *run) {
    dp_stage_errors errors;
    stage_errors_make(j->sp, run, j->out->stage, j->bases, &errors);
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++) {
        if (!j->out->stage[i]) continue;
        if (dp_stage_tensors[i].kind == DP_PER_RANK)
            judge_exchanged(j, i, run);
        else if (other_chunks(run))
            unjudged(j, i, run);
        else
            judge_inner(j, &errors, i, run);
    }
    stage_errors_free(&errors);
}
