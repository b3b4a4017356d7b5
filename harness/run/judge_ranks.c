/* Judgement of what ranks exchange: S_in, M, H and their gradients, of every rank and head. */
#include "limits.h"
#include "outputs.h"
#include "places.h"
#include "ref/arithmetic/elementary.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Where each lies in the structs of truth and bounds; pairs: M, H and their gradients belong to
 * neighbours, S_in and dS_out to one rank. */
#define ROW(FIELD, HAS, PAIRS)                                                                 \
    {                                                                                          \
        .has = offsetof(dp_truth_rank, HAS), .value = offsetof(dp_truth_rank, FIELD),          \
        .rad = offsetof(dp_truth_rank, FIELD##_rad), .bound = offsetof(dp_error_bound, FIELD), \
        .pairs = PAIRS,                                                                        \
    }
static const struct {
    size_t has, value, rad, bound;
    int pairs;
} ROWS[DP_RANK_TENSORS] = {
    [DP_RANK_S_IN] = ROW(S_in, has_S_in, 0), [DP_RANK_M] = ROW(M, has_MH, 1),
    [DP_RANK_H] = ROW(H, has_H, 1),          [DP_RANK_DS_OUT] = ROW(dS_out, has_dS_out, 0),
    [DP_RANK_DM] = ROW(dM, has_dMH, 1),      [DP_RANK_DH] = ROW(dH, has_dH, 1)};

static int is_product(int which) { return which == DP_RANK_M || which == DP_RANK_DM; }

const double *dp_rank_bound(const dp_error_bound *b, int which) {
    return *(double *const *)((const char *)b + ROWS[which].bound);
}

const double *dp_true_rank_value(const dp_sharding *sp, int which, int pair, int64_t *width,
                                 double *radius) {
    const char *at = (const char *)&sp->at[pair];
    *width = dp_rank_width(&sp->c->p, which);
    if (!*(const int *)(at + ROWS[which].has)) return NULL;
    const double *value = *(double *const *)(at + ROWS[which].value);
    *radius = *(const double *)(at + ROWS[which].rad);
    return value;
}

/* ---- one tensor ------------------------------------------------------------------------------ */

/* The pairs of rank and head that have it, one a row. */
typedef struct {
    int n, *pair;
    int64_t width;
    double *got, *want, *radius, *bound;
} rows;

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

static void judge_rows(const dp_judging *j, const dp_rank_values *x, const rows *z, dp_run *run) {
    const dp_sharding *sp = j->sp;
    const dp_expected *e = dp_sharding_expected(sp, run);
    const dp_rank_places places = {sp->c->p.HV, z->pair};
    dp_draws draws = {0};
    if (e && e->rank[x->which].err2) draws = dp_draws_of_rows(&e->rank[x->which], z->n, z->pair);
    const dp_compare_in in = {.name = dp_rank_name(x->which),
                              .N = sp->N,
                              .heads = sp->c->p.HV,
                              .rows = z->n,
                              .width = z->width,
                              .got = z->got,
                              .want = z->want,
                              .rad = z->radius,
                              .bound = z->bound,
                              .place = dp_place_rank_row,
                              .ctx = &places,
                              .subrows = sp->c->p.K,
                              .draws = draws.err2 ? &draws : NULL,
                              .allowance = dp_run_allowance(run),
                              .rounding = is_product(x->which) ? dp_run_chain_rounding(run) : 0,
                              .bound_shown = !dp_run_results_bounded(run, &sp->c->p),
                              .unit = dp_base_roundoff(run->base),
                              .store = dp_run_storing(run, x->u),
                              .file_unit = x->u,
                              .may_vanish = 1,
                              .tiny = dp_hypot(dp_base_smallest(run->base, sp->c->p.K), x->tiny)};
    dp_judge_tensor(j, &in, run);
    dp_draws_free(&draws);
}

void dp_judge_rank_tensor(const dp_judging *j, const dp_rank_values *x, dp_run *run) {
    const int pairs = j->sp->N * j->sp->c->p.HV;
    int64_t width;
    double radius;
    dp_true_rank_value(j->sp, x->which, 0, &width, &radius);
    rows z = rows_new(pairs, width);
    for (int i = 0; i < pairs; i++) {
        const double *want = dp_true_rank_value(j->sp, x->which, i, &width, &radius);
        if (want && (x->got[i] || x->absent_fails))
            rows_add(&z, i, x->got[i], want, radius, x->bound[i]);
    }
    if (z.n) judge_rows(j, x, &z, run);
    rows_free(&z);
}

void dp_judge_ranks(const dp_judging *j, dp_run *run) {
    for (int i = 0; i < DP_RANK_TENSORS; i++) {
        const dp_rank_values x = {.which = i,
                                  .got = j->out->rank[i],
                                  .bound = dp_rank_bound(j->bound, i),
                                  .absent_fails = !ROWS[i].pairs || j->out->forms_all_pairs};
        if (x.got) dp_judge_rank_tensor(j, &x, run);
    }
}
