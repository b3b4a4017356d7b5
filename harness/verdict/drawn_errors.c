/* Errors of one drawn run beside its fp64 reference, summed by rows, windows and directions. */
#include "expected_impl.h"

#include <stdlib.h>
#include <string.h>

/* err = scale (got - want); where there is no got, nothing is expected. */
static void add(const dp_drawn_pair *a, const dp_row_map *map, const double *got,
                const double *want, dp_draws *d) {
    const int64_t n = map->rows * map->width;
    double *err = dp_doubles(n);
    for (int64_t i = 0; i < n; i++)
        err[i] = a->scale * (got[i] - want[i]);
    const dp_error_sums to = dp_draws_at(d, a->draw);
    dp_sum_errors(map, err, want, &to);
    free(err);
}

static void add_ranks(const dp_drawn_pair *a, int tensor) {
    const dp_row_map *map = &a->l->rank[tensor];
    double *got = dp_doubles(map->rows * map->width);
    double *want = dp_doubles(map->rows * map->width);
    for (int64_t z = 0; z < map->rows; z++) {
        const double *g = dp_drawn_rank_value(a->one, tensor, z);
        const double *w = dp_sim_rank_list(a->ref->sim, tensor)[z];
        if (!g || !w) continue;
        memcpy(got + z * map->width, g, sizeof *got * (size_t)map->width);
        memcpy(want + z * map->width, w, sizeof *want * (size_t)map->width);
    }
    add(a, map, got, want, &a->x->rank[tensor]);
    free(got);
    free(want);
}

/* dw [D][W] as rows of a tap and head: [W][D]. */
static double *by_tap(const dp_conv *v, const double *dw) {
    double *y = dp_doubles((int64_t)v->D * v->W);
    for (int d = 0; d < v->D; d++)
        for (int j = 0; j < v->W; j++)
            y[(int64_t)j * v->D + d] = dw[(int64_t)d * v->W + j];
    return y;
}

static void add_front(const dp_drawn_pair *a, int i) {
    const dp_conv_result *g = &a->one->front[i];
    const dp_conv_result *w = &a->ref->one.front[i];
    const dp_conv *v = &a->one->conv[i];
    if (!v->x) return;
    add(a, &a->l->step[DP_CONV_Y][i], g->y, w->y, &a->x->step[DP_CONV_Y][i]);
    if (!a->l->rq->backward) return;
    double *dw = by_tap(v, g->dw);
    double *want = by_tap(v, w->dw);
    add(a, &a->l->step[DP_CONV_DX][i], g->dx, w->dx, &a->x->step[DP_CONV_DX][i]);
    add(a, &a->l->step[DP_CONV_DW][i], dw, want, &a->x->step[DP_CONV_DW][i]);
    if (v->bias)
        add(a, &a->l->step[DP_CONV_DBIAS][i], g->dbias, w->dbias, &a->x->step[DP_CONV_DBIAS][i]);
    free(dw);
    free(want);
}

/* What each window of tokens adds to the errors of dA_log (slope dg/dA_log) or ddt_bias (dg/dx). */
static void add_shares(const dp_drawn_pair *a, const double *slope, dp_draws *d) {
    const dp_problem *p = &a->one->p;
    const double *got = dp_drawn_dg(a->one);
    const double *want = dp_drawn_dg(&a->ref->one);
    const int Kg = dp_Kg(p);
    double *part = d->part + (int64_t)a->draw * d->parts * d->rows * d->width;
    for (int64_t i = 0; i < p->T * p->HV * Kg; i++) {
        const int64_t t = i / (p->HV * Kg);
        const int64_t head = i / Kg % p->HV;
        const int64_t at = (a->l->windows.window_of[t] * d->rows + head) * d->width;
        part[at + (d->width == 1 ? 0 : i % Kg)] += a->scale * (got[i] - want[i]) * slope[i];
    }
}

static void add_sums(const dp_drawn_pair *a) {
    for (int i = 0; i < DP_NRESULTS; i++)
        if (a->x->field[i].part)
            add_shares(a, a->ref->slope[!strcmp(dp_result_fields[i].name, "dA_log")],
                       &a->x->field[i]);
}

static void add_stages(const dp_drawn_pair *a) {
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++) {
        if (!a->x->stage[i].err2) continue;
        double *got = dp_stage_tensor_value(&a->one->sim, i);
        double *want = dp_stage_tensor_value(a->ref->sim, i);
        add(a, &a->l->stage[i], got, want, &a->x->stage[i]);
        free(got);
        free(want);
    }
}

void dp_drawn_add(const dp_drawn_pair *a) {
    for (int i = 0; i < DP_NRESULTS; i++)
        if (a->x->field[i].err2)
            add(a, &a->l->field[i], *dp_result_at(dp_drawn_results(a->one), i),
                *dp_result_at(dp_drawn_results(&a->ref->one), i), &a->x->field[i]);
    for (int i = 0; i < DP_RANK_TENSORS; i++)
        if (a->x->rank[i].err2) add_ranks(a, i);
    for (int i = 0; i < 3; i++)
        add_front(a, i);
    if (a->l->rq->backward) add_sums(a);
    if (a->one->design.chunk == DP_CHUNK && a->one->design.sending.exchange != DP_EXCHANGE_HEADS)
        add_stages(a);
}
