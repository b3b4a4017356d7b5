/* The arrays of a request's draws: shapes, allocation, cache parts. */
#include "expected_impl.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define FEW_DRAWS 6
#define MANY_DRAWS 8
#define LARGE 2e7 /* entries of states passed through, above which draws are dear */

int dp_expected_count(const dp_problem *p) {
    const double size = (double)p->T * p->HV * p->R * p->K * p->V;
    return size <= LARGE ? MANY_DRAWS : FEW_DRAWS;
}

static dp_row_map map_step(const dp_expected_layout *l, int kind, int i) {
    const dp_conv *v = l->rq->front ? l->rq->front->conv[i] : NULL;
    const int heads = dp_qkv_heads(l->rq->p, i);
    if (!v || (kind != DP_CONV_Y && !l->rq->backward)) return (dp_row_map){.subrows = 1};
    if (kind == DP_CONV_DBIAS && !v->bias) return (dp_row_map){.subrows = 1};
    if (kind == DP_CONV_DW) return dp_map_rows((int64_t)v->W * heads, v->D / heads);
    if (kind == DP_CONV_DBIAS) return dp_map_rows(heads, v->D / heads);
    return dp_map_tokens(&l->windows, heads, 1, v->D / heads);
}

static dp_row_map map_stage(const dp_expected_layout *l, int stage) {
    const dp_problem *p = l->rq->p;
    int64_t rows, width;
    dp_stage_tensor_rows(p, l->N, stage, &rows, &width);
    if (dp_stage_tensors[stage].kind == DP_PER_CHUNK) return dp_map_states(rows, p->K, p->V);
    return dp_map_tokens(&l->windows, p->HV, (int)(rows / (p->T * p->HV)), (int)width);
}

dp_expected_layout dp_expected_layout_of(const dp_expected_request *rq, int N) {
    const dp_problem *p = rq->p;
    const int64_t ranks = (int64_t)N * p->HV;
    dp_expected_layout l = {.rq = rq, .N = N, .windows = dp_windows_of(p, N)};
    for (int i = 0; i < DP_NRESULTS; i++)
        if (rq->backward || !dp_result_fields[i].backward) l.field[i] = dp_map_field(&l.windows, i);
    for (int i = 0; i < (rq->backward ? DP_RANK_TENSORS : DP_RANK_DS_OUT); i++)
        l.rank[i] = dp_map_states(ranks, p->K, (int)(dp_rank_width(p, i) / p->K));
    for (int k = 0; k < DP_CONV_NRESULTS; k++)
        for (int i = 0; i < 3; i++)
            l.step[k][i] = map_step(&l, k, i);
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++)
        if (dp_stage_tensors[i].kind != DP_PER_RANK &&
            (rq->backward || !dp_stage_tensors[i].backward))
            l.stage[i] = map_stage(&l, i);
    return l;
}

void dp_expected_layout_free(dp_expected_layout *l) {
    for (int i = 0; i < DP_NRESULTS; i++)
        dp_row_map_free(&l->field[i]);
    for (int i = 0; i < DP_RANK_TENSORS; i++)
        dp_row_map_free(&l->rank[i]);
    for (int i = 0; i < 3 * DP_CONV_NRESULTS; i++)
        dp_row_map_free(&l->step[i / 3][i % 3]);
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++)
        dp_row_map_free(&l->stage[i]);
    dp_windows_free(&l->windows);
}

static int is_sum(int i) { return dp_result_fields[i].kind == DP_OF_HEADS; }

static void draws_alloc(dp_draws *d, int D, const dp_row_map *map, int64_t parts) {
    *d = (dp_draws){0};
    if (map->rows) dp_draws_alloc(d, D, map, parts);
}

void dp_expected_alloc_layout(const dp_expected_layout *l, const dp_expected_policy *policy,
                              dp_expected *x) {
    const int D = dp_expected_count(l->rq->p);
    *x = (dp_expected){0};
    for (int i = 0; i < DP_NRESULTS; i++)
        draws_alloc(&x->field[i], D, &l->field[i], is_sum(i) ? l->windows.windows : 0);
    for (int i = 0; i < DP_RANK_TENSORS; i++)
        draws_alloc(&x->rank[i], D, &l->rank[i], 0);
    for (int i = 0; i < 3 * DP_CONV_NRESULTS; i++)
        draws_alloc(&x->step[i / 3][i % 3], D, &l->step[i / 3][i % 3], 0);
    for (int i = 0; policy->stages && i < DP_NSTAGE_TENSORS; i++)
        draws_alloc(&x->stage[i], D, &l->stage[i], 0);
}

void dp_expected_alloc(const dp_expected_request *rq, const dp_expected_policy *policy,
                       dp_expected *x) {
    dp_expected_layout l = dp_expected_layout_of(rq, policy->N);
    dp_expected_alloc_layout(&l, policy, x);
    dp_expected_layout_free(&l);
}

static dp_draws *tensor_of(dp_expected *x, int i) {
    dp_draws *const list[] = {x->field, x->rank, x->step[0], x->stage};
    const int n[] = {DP_NRESULTS, DP_RANK_TENSORS, 3 * DP_CONV_NRESULTS, DP_NSTAGE_TENSORS};
    int k = 0;
    while (i >= n[k])
        i -= n[k++];
    return &list[k][i];
}

int dp_expected_parts(dp_expected *x, dp_part *part) {
    int n = 0;
    for (int i = 0; i < DP_EXPECTED_TENSORS; i++) {
        const dp_draws *d = tensor_of(x, i);
        const size_t each = sizeof(double) * (size_t)d->ndraw;
        if (!d->err2) continue;
        part[n++] = (dp_part){d->err2, each * (size_t)d->rows};
        part[n++] = (dp_part){d->blank, each * (size_t)d->rows};
        if (d->columns) part[n++] = (dp_part){d->column2, each * (size_t)d->columns};
        part[n++] = (dp_part){d->along, each * DP_NDIRECTIONS * (size_t)d->windows};
        part[n++] = (dp_part){d->length2, each * DP_NDIRECTIONS * (size_t)d->windows};
        if (d->part)
            part[n++] = (dp_part){d->part, each * (size_t)(d->parts * d->rows) * (size_t)d->width};
    }
    return n;
}

void dp_expected_free(dp_expected *x) {
    for (int i = 0; i < DP_EXPECTED_TENSORS; i++)
        dp_draws_free(tensor_of(x, i));
}

dp_draws dp_draws_of_rows(const dp_draws *d, int n, const int *row) {
    const int64_t subrows = d->rows / d->windows, w = d->width;
    const dp_row_map map = {.rows = n,
                            .windows = n,
                            .width = (int)(subrows * w),
                            .subrows = (int)subrows,
                            .groups = d->columns ? n : 0,
                            .per = 1};
    dp_draws y;
    dp_draws_alloc(&y, d->ndraw, &map, 0);
    for (int k = 0; k < d->ndraw; k++) {
        const dp_error_sums to = dp_draws_at(&y, k), from = dp_draws_at(d, k);
        for (int i = 0; i < n; i++) {
            const size_t each = sizeof(double) * (size_t)subrows;
            memcpy(to.err2 + i * subrows, from.err2 + row[i] * subrows, each);
            memcpy(to.blank + i * subrows, from.blank + row[i] * subrows, each);
            if (d->columns)
                memcpy(to.column2 + i * w, from.column2 + row[i] * w, sizeof(double) * (size_t)w);
            for (int64_t q = 0; q < DP_NDIRECTIONS; q++) {
                to.along[q * n + i] = from.along[q * d->windows + row[i]];
                to.length2[q * n + i] = from.length2[q * d->windows + row[i]];
            }
        }
    }
    return y;
}
