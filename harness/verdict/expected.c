/* Draws: nearby problems, run by the design and by the fp64 reference (expected.h). */
#include "expected.h"
#include "ref/chunk/chunk_gated.h"
#include "ref/chunk/gate.h"

#include <assert.h>
#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

/* ---- the arrays of a request: shapes, allocation, cache parts -------------------------------- */

#define FEW_DRAWS 6
#define MANY_DRAWS 8
#define LARGE 2e7 /* entries of states passed through, above which draws are dear */

int dp_expected_count(const dp_problem *p) {
    const double size = (double)p->T * p->HV * p->R * p->K * p->V;
    return size <= LARGE ? MANY_DRAWS : FEW_DRAWS;
}

/* Shapes of a request on N ranks, made once: maps of all tensors. */
typedef struct {
    const dp_expected_request *rq;
    int N;
    dp_windows windows;
    dp_row_map field[DP_NRESULTS], rank[DP_RANK_TENSORS];
    dp_row_map step[DP_CONV_NRESULTS][3], stage[DP_NSTAGE_TENSORS];
} shapes;

static dp_row_map map_step(const shapes *l, int kind, int i) {
    const dp_conv *v = l->rq->front ? l->rq->front->conv[i] : NULL;
    const int heads = dp_qkv_heads(l->rq->p, i);
    if (!v || (kind != DP_CONV_Y && !l->rq->backward)) return (dp_row_map){.subrows = 1};
    if (kind == DP_CONV_DBIAS && !v->bias) return (dp_row_map){.subrows = 1};
    if (kind == DP_CONV_DW) return dp_map_rows((int64_t)v->W * heads, v->D / heads);
    if (kind == DP_CONV_DBIAS) return dp_map_rows(heads, v->D / heads);
    return dp_map_tokens(&l->windows, heads, 1, v->D / heads);
}

static dp_row_map map_stage(const shapes *l, int stage) {
    const dp_problem *p = l->rq->p;
    int64_t rows, width;
    dp_stage_tensor_rows(p, l->N, stage, &rows, &width);
    if (dp_stage_tensors[stage].kind == DP_PER_CHUNK) return dp_map_states(rows, p->K, p->V);
    return dp_map_tokens(&l->windows, p->HV, (int)(rows / (p->T * p->HV)), (int)width);
}

static shapes shapes_of(const dp_expected_request *rq, int N) {
    const dp_problem *p = rq->p;
    const int64_t ranks = (int64_t)N * p->HV;
    shapes l = {.rq = rq, .N = N, .windows = dp_windows_of(p, N)};
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

static void shapes_free(shapes *l) {
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

static void shapes_alloc(const shapes *l, const dp_expected_policy *policy, dp_expected *x) {
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
    shapes l = shapes_of(rq, policy->N);
    shapes_alloc(&l, policy, x);
    shapes_free(&l);
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

/* ---- errors of draws ------------------------------------------------------------------------- */

/* The fp64 reference of a nearby problem. Its results are those on one rank, whatever ranks they
 * are compared on: what N changes in fp64 is no error that is looked at. */
typedef struct {
    dp_drawn_run one;
    dp_sim apart;      /* on N ranks, where those cut other chunks */
    const dp_sim *sim; /* on N ranks: what ranks hold, and intermediates */
    double *slope[2];  /* dg/dx and dg/dA_log */
} reference;

/* One run beside its reference. */
typedef struct {
    const shapes *l;
    dp_drawn_run *one;
    reference *ref;
    double scale;
    int draw;
    dp_expected *x;
} drawn_pair;

/* err = scale (got - want); where there is no got, nothing is expected. */
static void add(const drawn_pair *a, const dp_row_map *map, const double *got, const double *want,
                dp_draws *d) {
    const int64_t n = map->rows * map->width;
    double *err = dp_doubles(n);
    for (int64_t i = 0; i < n; i++)
        err[i] = a->scale * (got[i] - want[i]);
    const dp_error_sums to = dp_draws_at(d, a->draw);
    dp_sum_errors(map, err, want, &to);
    free(err);
}

static void add_ranks(const drawn_pair *a, int tensor) {
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

static void add_front(const drawn_pair *a, int i) {
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

/* Each window's share in the errors of dA_log (slope dg/dA_log) or ddt_bias (dg/dx). */
static void add_shares(const drawn_pair *a, const double *slope, dp_draws *d) {
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

static void add_sums(const drawn_pair *a) {
    for (int i = 0; i < DP_NRESULTS; i++)
        if (a->x->field[i].part)
            add_shares(a, a->ref->slope[!strcmp(dp_result_fields[i].name, "dA_log")],
                       &a->x->field[i]);
}

static void add_stages(const drawn_pair *a) {
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++) {
        if (!a->x->stage[i].err2) continue;
        double *got = dp_stage_tensor_value(&a->one->sim, i);
        double *want = dp_stage_tensor_value(a->ref->sim, i);
        add(a, &a->l->stage[i], got, want, &a->x->stage[i]);
        free(got);
        free(want);
    }
}

/* Adds the errors of a run to the draws of its policy. */
static void add_drawn(const drawn_pair *a) {
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

/* ---- expected -------------------------------------------------------------------------------- */

#define MEMORY 4e9            /* bytes that draws made at once may hold */
#define FP32_FOR_FP64 0x1p-29 /* fp64's unit roundoff over fp32's */

static void reference_open(reference *r, const dp_problem *y, const dp_conv conv[3], int backward) {
    const dp_design exact = dp_design_of(DP_BASE_FP64);
    const int64_t n = y->T * y->HV * dp_Kg(y);
    *r = (reference){.sim = &r->one.sim};
    dp_drawn_open(&r->one, &exact, y, conv, 1, backward);
    dp_drawn_all(&r->one, DP_FP64);
    if (!backward) return;
    for (int i = 0; i < 2; i++)
        r->slope[i] = dp_doubles(n);
    dp_gate_slopes(&r->one.p, r->slope[0], r->slope[1]);
}

static void reference_leave(reference *r) {
    if (r->sim == &r->apart) dp_sim_free(&r->apart);
    r->sim = &r->one.sim;
}

static void reference_split(reference *r, int N, int stages) {
    const int backward = r->one.backward;
    reference_leave(r);
    if (dp_sim_split(&r->one.sim, N)) {
        dp_sim_run_ranks(&r->one.sim, DP_FP64, DP_EXCHANGE_ALLGATHER, backward);
        return;
    }
    const dp_status st = dp_sim_new_design(&r->apart, &r->one.p, &r->one.design, N, NULL);
    assert(!st);
    (void)st;
    r->sim = &r->apart;
    if (stages)
        dp_sim_run(&r->apart, DP_FP64, DP_EXCHANGE_ALLGATHER, backward);
    else
        dp_sim_run_ranks(&r->apart, DP_FP64, DP_EXCHANGE_ALLGATHER, backward);
}

static void reference_close(reference *r) {
    reference_leave(r);
    dp_drawn_close(&r->one);
    free(r->slope[0]);
    free(r->slope[1]);
}

/* The same design with fp32 in place of fp64. */
static dp_design in_fp32(dp_design d) {
    d.base = DP_BASE_FP32;
    if (d.factors == DP_FP64) d.factors = DP_FP32;
    if (d.state == DP_FP64) d.state = DP_FP32;
    if (d.dstate == DP_FP64) d.dstate = DP_FP32;
    for (int i = 0; i < DP_NRESULTS; i++)
        if (d.out[i] == DP_FP64) d.out[i] = DP_FP32;
    if (d.decays == DP_FP64) d.decays = DP_FP32;
    return d;
}

/* All that is asked for. Every design runs once a draw and number of ranks for each format of the
 * chain that some policy has. Designs in fp64 also run in fp32. */
typedef struct {
    const dp_expected_request *rq;
    int npolicy, nlayout, ndesign;
    const dp_expected_policy *policy;
    dp_expected *out;
    shapes *layout; /* by number of ranks */
    dp_design *design;
} drawing;

static void add_design(drawing *a, dp_design d) {
    for (int i = 0; i < a->ndesign; i++)
        if (dp_design_same(&a->design[i], &d)) return;
    a->design[a->ndesign++] = d;
}

static void add_layout(drawing *a, int N) {
    for (int i = 0; i < a->nlayout; i++)
        if (a->layout[i].N == N) return;
    a->layout[a->nlayout++] = shapes_of(a->rq, N);
}

static const shapes *layout_at(const drawing *a, int N) {
    int i = 0;
    while (a->layout[i].N != N)
        i++;
    return &a->layout[i];
}

/* Is this run part of what a policy is made of, and how much does its error count? A design in fp64
 * is its own reference. Its roundings are drawn in fp32 and scaled, and added to those of another
 * format of the chain. 0: no part. */
static double part_of(const dp_expected_policy *y, const dp_design *design, dp_format chain) {
    const int exact = y->design.base == DP_BASE_FP64;
    const dp_design narrow = in_fp32(y->design);
    if (exact && chain == DP_FP32 && dp_design_same(&narrow, design)) return FP32_FOR_FP64;
    if (exact && chain == DP_FP64 && !y->design.sending.payload) return 0;
    return y->chain == chain && dp_design_same(&y->design, design);
}

static int is_asked_for(const drawing *a, int N, const dp_design *design, dp_format chain) {
    for (int i = 0; i < a->npolicy; i++)
        if (a->policy[i].N == N && part_of(&a->policy[i], design, chain)) return 1;
    return 0;
}

/* Where kernels anchor the decays of a block is nothing that they declare: every draw has another.
 */
static dp_design of_draw(const dp_design *design, int d) {
    dp_design mine = *design;
    mine.anchor = d % DP_ANCHORS;
    return mine;
}

/* One design on N ranks: opens *one when nothing did. The bounds of slopes include 1 - s, too
 * (grad_bound.c, input_bound.c). */
static void run_design(const drawing *a, const shapes *l, const dp_design *design, reference *ref,
                       const dp_conv conv[3], int d, dp_drawn_run *one) {
    const dp_design mine = of_draw(design, d);
    dp_problem own = ref->one.p;
    own.rounded_slopes = 1;
    for (int f = 0; f < DP_NFORMATS; f++) {
        if (!is_asked_for(a, l->N, design, (dp_format)f)) continue;
        if (!one->N && a->rq->session)
            dp_drawn_open_calls(one, &mine, &own, conv, a->rq->session);
        else if (!one->N)
            dp_drawn_open(one, &mine, &own, conv, l->N, a->rq->backward);
        dp_drawn_split(one, l->N);
        dp_drawn_all(one, (dp_format)f);
        for (int i = 0; i < a->npolicy; i++) {
            const double scale = part_of(&a->policy[i], design, (dp_format)f);
            if (a->policy[i].N != l->N || scale == 0) continue;
            add_drawn(&(drawn_pair){l, one, ref, scale, d, &a->out[i]});
        }
    }
}

static int wants_stages(const drawing *a, int N) {
    for (int i = 0; i < a->npolicy; i++)
        if (a->policy[i].N == N && a->policy[i].stages) return 1;
    return 0;
}

static void one_draw(const drawing *a, int d) {
    const dp_expected_request *rq = a->rq;
    const int D = dp_expected_count(rq->p);
    const dp_format wide = rq->dtype == DP_FP64 ? DP_FP64 : DP_FP32;
    const dp_mover m = {(uint64_t)(rq->set * D + d), rq->dtype,
                        rq->set == DP_SET_OFF_LATTICE ? wide : rq->dtype};
    dp_problem y = dp_nearby_problem(rq->p, &m);
    dp_drawn_run *one = dp_calloc((size_t)a->ndesign, sizeof *one);
    dp_conv conv[3];
    reference ref;
    dp_nearby_front(rq->front, &m, conv);
    reference_open(&ref, &y, conv, rq->backward);
    for (int i = 0; i < a->nlayout; i++) {
        reference_split(&ref, a->layout[i].N, wants_stages(a, a->layout[i].N));
        for (int k = 0; k < a->ndesign; k++)
            run_design(a, &a->layout[i], &a->design[k], &ref, conv, d, &one[k]);
    }
    for (int k = 0; k < a->ndesign; k++)
        if (one[k].N) dp_drawn_close(&one[k]);
    free(one);
    reference_close(&ref);
    for (int i = 0; i < 3; i++)
        dp_conv_free(&conv[i]);
    dp_problem_free(&y);
}

/* How many draws are made at once: each holds the chunks of its reference and of every design. */
static int draws_at_once(const drawing *a) {
    const dp_problem *p = a->rq->p;
    const double n = (double)DP_CHUNK * dp_rows(p);
    const double chunk = n * (10. * p->K + 8. * p->V + 4 * n) + p->K * (4. * p->V + 2. * p->K);
    const double chunks = ((double)p->T / DP_CHUNK + p->Nseq) * p->HV;
    const double bytes = sizeof(double) * chunk * chunks * (a->ndesign + 1);
    const int threads = omp_get_max_threads();
    const int D = dp_expected_count(p);
    int most = threads < D ? threads : D;
    while (most > 1 && most * bytes > MEMORY)
        most--;
    return most;
}

void dp_expected_run(const dp_expected_request *rq, int n, const dp_expected_policy *policy,
                     dp_expected *out) {
    drawing a = {.rq = rq, .npolicy = n, .policy = policy, .out = out};
    a.layout = dp_calloc((size_t)n, sizeof *a.layout);
    a.design = dp_calloc(2 * (size_t)n, sizeof *a.design);
    for (int i = 0; i < n; i++) {
        add_layout(&a, policy[i].N);
        add_design(&a, policy[i].design);
        if (policy[i].design.base == DP_BASE_FP64) add_design(&a, in_fp32(policy[i].design));
        shapes_alloc(layout_at(&a, policy[i].N), &policy[i], &out[i]);
    }
    const int D = dp_expected_count(rq->p);
    const int outer = draws_at_once(&a);
    const int inner = omp_get_max_threads() / outer;
#pragma omp parallel num_threads(outer)
    {
        omp_set_num_threads(inner);
#pragma omp for schedule(dynamic, 1)
        for (int d = 0; d < D; d++)
            one_draw(&a, d);
    }
    for (int i = 0; i < a.nlayout; i++)
        shapes_free(&a.layout[i]);
    free(a.layout);
    free(a.design);
}
