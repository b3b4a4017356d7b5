/* Judgement of a subject's intermediates. First S_in, M, H and their gradients of every rank and
 * head, and M along the chunks of one rank. Then all stages that the subject shows, by name
 * (harness/simulated/stage_tensor.h). */
#include "harness/verdict/stage_bound.h"
#include "limits.h"
#include "outputs.h"
#include "ref/arithmetic/elementary.h"
#include "ref/arithmetic/mm.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- what ranks exchange --------------------------------------------------------------------- */

static int is_product(int which) { return which == DP_RANK_M || which == DP_RANK_DM; }

/* The value that rank * HV + head has in truth, with its width and a bound of its error; NULL: it
 * has none. */
static const double *true_value(const dp_sharding *sp, int which, int pair, int64_t *width,
                                double *radius) {
    const dp_truth_rank_tensor *t = &sp->at[pair].of[which];
    *width = dp_rank_width(&sp->c->p, which);
    if (!t->there) return NULL;
    *radius = t->rad;
    return t->x;
}

/* ---- one tensor of ranks --------------------------------------------------------------------- */

/* One tensor that ranks exchange. */
typedef struct {
    int which;           /* DP_RANK_S_IN .. */
    double *const *got;  /* [N*HV] */
    const double *bound; /* [N*HV] */
    int absent_fails;    /* 1: a pair without a value counts as NaN; 0: it is left out */
    double u, tiny;      /* unit roundoff and half spacing of the format it lies in, where that is
                            coarser than the base's own; else 0 */
} rank_values;

/* The pairs of rank and head that have it, one a row. */
typedef struct {
    int n, *pair;
    int64_t width;
    double *got, *want, *radius, *bound;
} rows;

/* Rows that are some of the (rank, head) pairs: which pair each row is. */
typedef struct {
    int HV;
    const int *pair; /* [rows]: rank * HV + head */
} pair_places;

static void place_pair(const void *ctx, int64_t row, dp_place *at) {
    const pair_places *x = ctx;
    *at = (dp_place){.rank = x->pair[row] / x->HV,
                     .head = x->pair[row] % x->HV,
                     .sequence = -1,
                     .chunk = -1,
                     .token = -1};
}

static rows rows_new(int64_t most, int64_t width) {
    return (rows){.pair = dp_calloc((size_t)most, sizeof(int)),
                  .width = width,
                  .got = dp_doubles(most * width),
                  .want = dp_doubles(most * width),
                  .radius = dp_doubles(most),
                  .bound = dp_doubles(most)};
}

static void rows_free(rows *x) {
    free(x->pair);
    free(x->got);
    free(x->want);
    free(x->radius);
    free(x->bound);
}

/* got NULL: not a number. radius: of want, before it was rounded to double. */
static void rows_add(rows *x, int pair, const double *got, const double *want, double radius,
                     double bound) {
    double *row = x->got + x->n * x->width;
    for (int64_t i = 0; i < x->width; i++)
        row[i] = got ? got[i] : NAN;
    memcpy(x->want + x->n * x->width, want, sizeof(double) * (size_t)x->width);
    x->radius[x->n] = radius + 0x1p-53 * dp_norm_fro(x->width, want);
    x->bound[x->n] = bound;
    x->pair[x->n++] = pair;
}

static void judge_rows(const dp_judging *j, const rank_values *x, const rows *z, dp_run *run) {
    const dp_sharding *sp = j->sp;
    const dp_expected *e = j->expected;
    const pair_places places = {sp->c->p.HV, z->pair};
    dp_draws draws = {0};
    if (e && e->rank[x->which].err2) draws = dp_draws_of_rows(&e->rank[x->which], z->n, z->pair);
    dp_compare_in in = dp_run_comparing(run, sp, -1, x->u, x->tiny);
    in.name = dp_rank_name(x->which);
    in.heads = sp->c->p.HV;
    in.rows = z->n;
    in.width = z->width;
    in.got = z->got;
    in.want = z->want;
    in.rad = z->radius;
    in.bound = z->bound;
    in.place = place_pair;
    in.ctx = &places;
    in.subrows = sp->c->p.K;
    in.draws = draws.err2 ? &draws : NULL;
    in.rounding = is_product(x->which) ? dp_run_chain_rounding(run) : 0;
    in.bound_shown = !dp_run_results_bounded(run, &sp->c->p);
    in.file_unit = x->u;
    in.may_vanish = 1;
    dp_judge_tensor(j, &in, run);
    dp_draws_free(&draws);
}

static void judge_rank_tensor(const dp_judging *j, const rank_values *x, dp_run *run) {
    const int pairs = j->sp->N * j->sp->c->p.HV;
    int64_t width;
    double radius;
    true_value(j->sp, x->which, 0, &width, &radius);
    rows z = rows_new(pairs, width);
    for (int i = 0; i < pairs; i++) {
        const double *want = true_value(j->sp, x->which, i, &width, &radius);
        if (want && (x->got[i] || x->absent_fails))
            rows_add(&z, i, x->got[i], want, radius, x->bound[i]);
    }
    if (z.n) judge_rows(j, x, &z, run);
    rows_free(&z);
}

static void judge_ranks(const dp_judging *j, dp_run *run) {
    for (int i = 0; i < DP_RANK_TENSORS; i++) {
        const rank_values x = {.which = i,
                               .got = j->out->rank[i],
                               .bound = j->bound->rank[i],
                               .absent_fails = dp_rank_is_state(i) || j->out->forms_all_pairs};
        if (x.got) judge_rank_tensor(j, &x, run);
    }
}

/* ---- M of every rank, and along the prefixes of one rank's chain ----------------------------- */

/* M of `chunks` chunks of a rank: got and true [K][K], bound of the error. */
typedef struct {
    int rank, chunks;
    const double *got, *want;
    double bound;
} product;

/* |dM S|_F / |S|_F */
static double effect(const double *dM, const double *S, int K, int V) {
    double *x = dp_doubles((int64_t)K * V);
    dp_mm(DP_FP64, 0, 0, K, V, K, dM, S, x);
    const double e = dp_norm_fro((int64_t)K * V, x), n = dp_norm_fro((int64_t)K * V, S);
    free(x);
    return n > 0 ? e / n : NAN;
}

static void add_point(const dp_sharding *sp, const product *m, dp_run *run) {
    const dp_problem *p = &sp->c->p;
    const int64_t KK = (int64_t)p->K * p->K;
    double *d = dp_doubles(KK);
    for (int64_t i = 0; i < KK; i++)
        d[i] = m->got[i] - m->want[i];
    const double err = dp_norm_fro(KK, d), norm = dp_norm_fro(KK, m->want);
    const dp_truth_rank_tensor *S_in = &sp->at[m->rank * p->HV].of[DP_RANK_S_IN];
    run->point = dp_realloc(run->point, sizeof *run->point * (size_t)(run->npoint + 1));
    run->point[run->npoint++] =
        (dp_chain_point){.rank = m->rank,
                         .chunks = m->chunks,
                         .rel = norm > 0 ? err / norm : NAN,
                         .abs = err,
                         .norm = norm,
                         .bound = norm > 0 ? m->bound / norm : NAN,
                         .effect = S_in->there ? effect(d, S_in->x, p->K, p->V) : NAN};
    free(d);
}

static void add_prefixes(const dp_judging *j, dp_run *run) {
    const dp_sim *s = j->out->sim;
    const dp_sharding *sp = j->sp;
    for (int i = 0; sp->traj && i < s->ntraj; i++) {
        const product m = {s->traj_rank, s->traj_chunks[i], s->traj[i], sp->traj[i],
                           j->bound->traj[i]};
        if (m.want) add_point(sp, &m, run);
    }
}

/* Chunks that M of a rank runs over: simulated ranks count those of the last sub-sequence, the
 * kernels' record those of all its tokens. */
static int chunks_of(const dp_judging *j, int rank) {
    const dp_sim *s = j->out->sim;
    if (!s) return (int)((j->sp->c->p.T / j->sp->N + DP_CHUNK - 1) / DP_CHUNK);
    const int n = s->ctx[rank].nlocal;
    return s->first[rank][n] - s->first[rank][n - 1];
}

static int known(const dp_run *run, int rank, int chunks) {
    int have = 0;
    for (int i = 0; i < run->npoint; i++)
        have |= run->point[i].rank == rank && run->point[i].chunks == chunks;
    return have;
}

static void judge_growth(const dp_judging *j, dp_run *run) {
    const dp_sharding *sp = j->sp;
    double *const *M = j->out->rank[DP_RANK_M];
    if (sp->c->p.HV != 1 || !M) return;
    if (j->out->sim) add_prefixes(j, run);
    for (int r = 0; r < sp->N; r++) {
        const dp_truth_rank_tensor *want = &sp->at[r].of[DP_RANK_M];
        if (!want->there || !M[r]) continue;
        const product m = {r, chunks_of(j, r), M[r], want->x, j->bound->rank[DP_RANK_M][r]};
        if (!known(run, m.rank, m.chunks)) add_point(sp, &m, run);
    }
}

/* ---- bounds of stages ------------------------------------------------------------------------ */

int dp_stage_is_inner(double *const *stage, int i) {
    return stage[i] && dp_stage_tensors[i].kind != DP_PER_RANK;
}

/* Rows of the stages of tokens and chunks that are there, else 0. Bounds [rows] of the subject's
 * errors, and of those of the fp64 reference. */
typedef struct {
    int64_t rows[DP_NSTAGE_TENSORS], width[DP_NSTAGE_TENSORS];
    double *bound[DP_NSTAGE_TENSORS], *rad[DP_NSTAGE_TENSORS];
} stage_errors;

static double *bound_of(dp_error_bound_base *w, dp_format chain, int backward, int stage) {
    dp_error_bound b;
    if (dp_stage_tensors[stage].carried) { /* errors that enter the ranks */
        dp_error_bound_run(w, chain, backward, &b);
        dp_error_bound_free(&b);
    }
    return dp_stage_bound(w, stage);
}

static void make_one(dp_sharding *sp, dp_format chain, dp_bound_bases *w, int stage,
                     stage_errors *x) {
    const int back = sp->c->backward;
    double *probable = bound_of(&w->of.probable, chain, back, stage);
    double *sound = bound_of(&w->of.sound, chain, back, stage);
    double *rad = bound_of(dp_sharding_fp64(sp), DP_FP64, back, stage);
    for (int64_t r = 0; r < x->rows[stage]; r++)
        x->bound[stage][r] = fmin(probable[r], sound[r]);
    memcpy(x->rad[stage], rad, sizeof *rad * (size_t)x->rows[stage]);
    free(probable);
    free(sound);
    free(rad);
}

/* stage [DP_NSTAGE_TENSORS]: not NULL where it is there. */
static void stage_errors_make(dp_sharding *sp, const dp_run *run, double *const *stage,
                              dp_bound_bases *w, stage_errors *x) {
    enum { SETTINGS = 5, STAGE_ERRORS = 0x73746167 /* no other key of this length has it */ };
    const char *cache = sp->std->o->cache;
    int32_t what[SETTINGS + DP_NSTAGE_TENSORS] = {sp->N, run->base, run->chain, sp->c->backward,
                                                  STAGE_ERRORS};
    dp_part part[2 * DP_NSTAGE_TENSORS];
    int n = 0;
    *x = (stage_errors){.rows = {0}};
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++) {
        if (!dp_stage_is_inner(stage, i)) continue;
        dp_stage_tensor_rows(&sp->c->p, sp->N, i, &x->rows[i], &x->width[i]);
        what[SETTINGS + i] = 1;
        x->bound[i] = dp_doubles(x->rows[i]);
        x->rad[i] = dp_doubles(x->rows[i]);
        part[n++] = (dp_part){x->bound[i], sizeof(double) * (size_t)x->rows[i]};
        part[n++] = (dp_part){x->rad[i], sizeof(double) * (size_t)x->rows[i]};
    }
    const dp_key key = cache ? dp_problem_key(&sp->c->p, what, sizeof what) : (dp_key){{0}};
    if (!n || (cache && dp_cache_load(cache, DP_CACHE_STAGES, key, part, n))) return;
    const dp_design plain = dp_design_of(run->base);
    if (!w->ready)
        dp_error_bounds_init(&w->of, dp_sharding_reference(sp), &plain, sp->c->backward, NULL);
    w->ready = 1;
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++)
        if (dp_stage_is_inner(stage, i)) make_one(sp, run->chain, w, i, x);
    if (cache) dp_cache_save(cache, DP_CACHE_STAGES, key, part, n);
}

/* Frees what it holds; the struct is the caller's. */
static void stage_errors_free(stage_errors *x) {
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++) {
        free(x->bound[i]);
        free(x->rad[i]);
    }
}

/* ---- formats of stages ----------------------------------------------------------------------- */

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

static void widen(dp_sim *ref, storage s, int stage, const stage_errors *x) {
    const int64_t width = x->width[stage];
    double *bound = x->bound[stage];
    if (!(s.u > 0 || s.tiny > 0)) return;
    double *want = dp_stage_tensor_value(ref, stage);
    for (int64_t i = 0; i < x->rows[stage]; i++)
        bound[i] +=
            s.u * (dp_norm_fro(width, want + i * width) + bound[i]) + sqrt((double)width) * s.tiny;
    free(want);
}

static void judge_inner(const dp_judging *j, const stage_errors *errors, int stage, dp_run *run) {
    const dp_sharding *sp = j->sp;
    const storage s = storage_of(j, run->base, stage);
    dp_sim *ref = dp_sharding_reference(j->sp);
    widen(ref, s, stage, errors);
    /* the simulated ranks form Akk in base bf16 alone: elsewhere its draws would be those of an
     * inverse in fp64 */
    const int drawn = stage != DP_AKK || run->base == DP_BASE_BF16;
    const dp_expected *x = drawn ? j->expected : NULL;
    dp_compare_in in = dp_run_comparing(run, sp, -1, s.u, s.tiny);
    in.got = j->out->stage[stage];
    in.bound = errors->bound[stage];
    in.rad = errors->rad[stage];
    in.bound_shown = x && !dp_bounds_are_derived(&run->design);
    in.draws = x && x->stage[stage].err2 ? &x->stage[stage] : NULL;
    dp_stage_judge(ref, stage, in, &run->tensor[run->ntensor++]);
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
    const int passes = dp_context_passes(&c);
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
    double *bound = dp_copy(j->bound->rank[which], pairs);
    for (int i = 0; i < pairs; i++) {
        int64_t width;
        double radius;
        const double *want = true_value(sp, which, i, &width, &radius);
        got[i] = j->out->stage[stage] + i * width;
        if (blank(got[i], width) && may_be_absent(sp, stage, i / HV)) got[i] = NULL;
        if (want) bound[i] += s.u * (dp_norm_fro(width, want) + bound[i]);
        if (want) bound[i] += sqrt((double)width) * s.tiny;
    }
    const rank_values x = {.which = which, .got = got, .bound = bound, .u = s.u, .tiny = s.tiny};
    judge_rank_tensor(j, &x, run);
    free(got);
    free(bound);
}

/* All that are there, those of ranks included. */
static void judge_shown(const dp_judging *j, dp_run *run) {
    stage_errors errors;
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

void dp_judge_stages(const dp_judging *j, dp_run *run) {
    judge_ranks(j, run);
    judge_growth(j, run);
    if (j->out->stage) judge_shown(j, run);
}
