/* Draws: nearby problems, run by the design and by the fp64 reference, and their differences
 * summed.
 */
#include "expected.h"
#include "../../ref/gate.h"
#include "../../ref/inputs.h"
#include "../../ref/recurrent.h"
#include "../tap.h"
#include "row_map.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define FEW_DRAWS 6
#define MANY_DRAWS 8
#define LARGE 2e7             /* entries of states passed through, above which draws are dear */
#define FP32_FOR_FP64 0x1p-29 /* fp64's unit roundoff over fp32's */

int dp_expected_count(const dp_problem *p) {
    const double size = (double)p->T * p->HV * p->R * p->K * p->V;
    return size <= LARGE ? MANY_DRAWS : FEW_DRAWS;
}

/* ---- nearby problems ---------------------------------------------------------------------- */

typedef struct {
    uint64_t draw;
    dp_format dtype;
} mover;

/* x (1 + d), d uniform in +-2^-7, about one unit of bf16 on average, rounded to the format again.
 * Zeros, infinities and NaN stay. */
static double *moved(const mover *m, const double *x, int64_t n, dp_format f, uint64_t stream) {
    if (!x) return NULL;
    dp_rng r;
    double *y = dp_doubles(n);
    dp_rng_seed(&r, 0x6472617773ull + m->draw, stream);
    for (int64_t i = 0; i < n; i++) {
        const double z = x[i] * (1 + (2 * dp_rng_uniform(&r) - 1) * 0x1p-7);
        y[i] = isfinite(z) ? dp_store(f, z) : x[i];
    }
    return y;
}

/* The narrowest format that holds all of x: weights stay as short as they are. */
static dp_format narrowest(const double *x, int64_t n) {
    dp_format f = DP_BF16;
    for (int64_t i = 0; i < n && f != DP_FP64; i++) {
        if (f == DP_BF16 && dp_store(DP_BF16, x[i]) != x[i]) f = DP_FP32;
        if (f == DP_FP32 && dp_store(DP_FP32, x[i]) != x[i]) f = DP_FP64;
    }
    return f;
}

/* Convolutions of a draw: x, w and bias moved, no dy. */
static void nearby_front(const dp_front *front, const mover *m, dp_conv y[3]) {
    for (int i = 0; i < 3; i++) {
        const dp_conv *v = front ? front->conv[i] : NULL;
        const uint64_t stream = 10 + (uint64_t)i;
        y[i] = (dp_conv){0};
        if (!v) continue;
        const int64_t nw = (int64_t)v->D * v->W;
        y[i] = *v;
        y[i].dy = NULL;
        y[i].cu = dp_calloc((size_t)v->Nseq + 1, sizeof *v->cu);
        memcpy(y[i].cu, v->cu, sizeof *v->cu * ((size_t)v->Nseq + 1));
        y[i].x = moved(m, v->x, v->T * v->D, m->dtype, stream);
        y[i].w = moved(m, v->w, nw, narrowest(v->w, nw), stream + 3);
        y[i].bias =
            moved(m, v->bias, v->D, v->bias ? narrowest(v->bias, v->D) : DP_BF16, stream + 6);
    }
}

dp_problem dp_expected_nearby(const dp_problem *p, dp_format dtype, int draw) {
    const mover m = {(uint64_t)draw, dtype};
    const dp_format wide = dtype == DP_FP64 ? DP_FP64 : DP_FP32;
    const int64_t KV = (int64_t)p->Nseq * p->HV * p->K * p->V;
    dp_problem y = *p;
    y.cu = dp_calloc((size_t)p->Nseq + 1, sizeof *y.cu);
    memcpy(y.cu, p->cu, sizeof *y.cu * ((size_t)p->Nseq + 1));
    y.q = moved(&m, p->q, p->T * p->H * p->K, dtype, 0);
    y.k = moved(&m, p->k, p->T * p->H * p->R * p->K, dtype, 1);
    y.v = moved(&m, p->v, p->T * p->HV * p->R * p->V, dtype, 2);
    y.g = moved(&m, p->g, p->T * p->HV * dp_Kg(p), dtype, 3);
    y.beta = moved(&m, p->beta, p->T * p->HV * p->R, dtype, 4);
    y.dout = moved(&m, p->dout, p->T * p->HV * p->V, dtype, 5);
    y.A_log = moved(&m, p->A_log, p->HV, wide, 6);
    y.dt_bias = moved(&m, p->dt_bias, (int64_t)p->HV * dp_Kg(p), wide, 7);
    y.s0 = moved(&m, p->s0, KV, wide, 8);
    y.dstate = moved(&m, p->dstate, KV, wide, 9);
    for (int64_t i = 0; p->beta_form == DP_BETA_PLAIN && i < p->T * p->HV * p->R; i++)
        if (p->beta[i] <= 2 && y.beta[i] > 2) y.beta[i] = 2; /* a contraction stays one */
    return y;
}

/* ---- what is kept of each tensor ---------------------------------------------------------- */

/* Shapes of a request, made once: maps of all tensors. */
typedef struct {
    const dp_expected_request *rq;
    dp_windows windows;
    dp_row_map field[DP_FIELDS], rank[DP_RANK_TENSORS];
    dp_row_map step[DP_STEP_KINDS][3], stage[DP_MAX_STAGES];
} layout;

static const int RANK_IS_KK[DP_RANK_TENSORS] = {0, 1, 0, 0, 1, 0};

static int heads_of(const dp_problem *p, int conv) { return conv < 2 ? p->H : p->HV; }

static dp_row_map map_step(const layout *l, int kind, int i) {
    const dp_conv *v = l->rq->front ? l->rq->front->conv[i] : NULL;
    const int heads = heads_of(l->rq->p, i);
    if (!v || (kind != DP_STEP_Y && !l->rq->backward)) return (dp_row_map){.split = 1};
    if (kind == DP_STEP_DBIAS && !v->bias) return (dp_row_map){.split = 1};
    if (kind == DP_STEP_DW) return dp_map_rows((int64_t)v->W * heads, v->D / heads);
    if (kind == DP_STEP_DBIAS) return dp_map_rows(heads, v->D / heads);
    return dp_map_tokens(&l->windows, heads, 1, v->D / heads);
}

static dp_row_map map_stage(const layout *l, int stage) {
    const dp_problem *p = l->rq->p;
    int64_t rows, width;
    dp_tap_rows(p, l->rq->N, stage, &rows, &width);
    if (dp_taps[stage].kind == DP_PER_CHUNK) return dp_map_states(rows, p->K, p->V);
    return dp_map_tokens(&l->windows, p->HV, (int)(rows / (p->T * p->HV)), (int)width);
}

static layout layout_of(const dp_expected_request *rq) {
    const dp_problem *p = rq->p;
    const int64_t ranks = (int64_t)rq->N * p->HV;
    layout l = {.rq = rq, .windows = dp_windows_of(p, rq->N)};
    for (int i = 0; i < DP_FIELDS; i++)
        if (rq->backward || !dp_result_fields[i].backward) l.field[i] = dp_map_field(&l.windows, i);
    for (int i = 0; i < (rq->backward ? DP_RANK_TENSORS : DP_RANK_TENSORS / 2); i++)
        l.rank[i] = dp_map_states(ranks, p->K, RANK_IS_KK[i] ? p->K : p->V);
    for (int k = 0; k < DP_STEP_KINDS; k++)
        for (int i = 0; i < 3; i++)
            l.step[k][i] = map_step(&l, k, i);
    for (int i = 0; i < DP_NTAPS; i++)
        if (dp_taps[i].kind != DP_PER_RANK && (rq->backward || !dp_taps[i].backward))
            l.stage[i] = map_stage(&l, i);
    return l;
}

static void layout_free(layout *l) {
    for (int i = 0; i < DP_FIELDS; i++)
        dp_row_map_free(&l->field[i]);
    for (int i = 0; i < DP_RANK_TENSORS; i++)
        dp_row_map_free(&l->rank[i]);
    for (int i = 0; i < 3 * DP_STEP_KINDS; i++)
        dp_row_map_free(&l->step[i / 3][i % 3]);
    for (int i = 0; i < DP_MAX_STAGES; i++)
        dp_row_map_free(&l->stage[i]);
    dp_windows_free(&l->windows);
}

static const char *field_name(int i) { return dp_result_fields[i].name; }
static int is_sum(int i) {
    return !strcmp(field_name(i), "dA_log") || !strcmp(field_name(i), "ddt_bias");
}

static void draws_alloc(dp_draws *d, int D, const dp_row_map *map, int64_t parts) {
    *d = (dp_draws){0};
    if (map->rows) dp_draws_alloc(d, D, map, parts);
}

static void expected_alloc(const layout *l, const dp_expected_policy *policy, dp_expected *x) {
    const int D = dp_expected_count(l->rq->p);
    *x = (dp_expected){0};
    for (int i = 0; i < DP_FIELDS; i++)
        draws_alloc(&x->field[i], D, &l->field[i], is_sum(i) ? l->windows.windows : 0);
    for (int i = 0; i < DP_RANK_TENSORS; i++)
        draws_alloc(&x->rank[i], D, &l->rank[i], 0);
    for (int i = 0; i < 3 * DP_STEP_KINDS; i++)
        draws_alloc(&x->step[i / 3][i % 3], D, &l->step[i / 3][i % 3], 0);
    for (int i = 0; policy->stages && i < DP_MAX_STAGES; i++)
        draws_alloc(&x->stage[i], D, &l->stage[i], 0);
}

void dp_expected_alloc(const dp_expected_request *rq, const dp_expected_policy *policy,
                       dp_expected *x) {
    layout l = layout_of(rq);
    expected_alloc(&l, policy, x);
    layout_free(&l);
}

static dp_draws *tensor_of(dp_expected *x, int i) {
    dp_draws *const list[] = {x->field, x->rank, x->step[0], x->stage};
    const int n[] = {DP_FIELDS, DP_RANK_TENSORS, 3 * DP_STEP_KINDS, DP_MAX_STAGES};
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
        part[n++] = (dp_part){d->along, each * DP_NDIRECTIONS * (size_t)d->windows};
        if (d->part)
            part[n++] = (dp_part){d->part, each * (size_t)(d->parts * d->rows) * (size_t)d->width};
    }
    return n;
}

void dp_expected_free(dp_expected *x) {
    for (int i = 0; i < DP_EXPECTED_TENSORS; i++)
        dp_draws_free(tensor_of(x, i));
}

static void larger(double *x, const double *y, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (fabs(y[i]) > fabs(x[i])) x[i] = y[i];
}

static int is_finite(const double *x, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (!isfinite(x[i])) return 0;
    return 1;
}

/* A design that overflows on these inputs is not the subject's: it is left out. */
void dp_expected_larger(dp_expected *x, const dp_expected *y) {
    for (int i = 0; i < DP_EXPECTED_TENSORS; i++) {
        dp_draws *a = tensor_of(x, i);
        const dp_draws *b = tensor_of((dp_expected *)y, i);
        if (!a->err2 || !is_finite(b->err2, b->ndraw * b->rows)) continue;
        larger(a->err2, b->err2, a->ndraw * a->rows);
        larger(a->along, b->along, a->ndraw * DP_NDIRECTIONS * a->windows);
        if (a->part) larger(a->part, b->part, a->ndraw * a->parts * a->rows * a->width);
    }
}

dp_draws dp_draws_of_rows(const dp_draws *d, int n, const int *row) {
    const int64_t split = d->rows / d->windows;
    const dp_row_map map = {n, n, (int)split * d->width, (int)split, NULL};
    dp_draws y;
    dp_draws_alloc(&y, d->ndraw, &map, 0);
    for (int k = 0; k < d->ndraw; k++)
        for (int i = 0; i < n; i++) {
            memcpy(y.err2 + (k * n + i) * split, d->err2 + k * d->rows + row[i] * split,
                   sizeof *y.err2 * (size_t)split);
            for (int q = 0; q < DP_NDIRECTIONS; q++)
                y.along[(k * DP_NDIRECTIONS + q) * n + i] =
                    d->along[(k * DP_NDIRECTIONS + q) * d->windows + row[i]];
        }
    return y;
}

/* ---- a run of a draw ---------------------------------------------------------------------- */

/* One nearby problem in one design: the pipeline, and with a front the convolutions around it. */
typedef struct {
    const dp_expected_request *rq;
    dp_design design;
    dp_problem p; /* behind the convolutions */
    dp_conv conv[3];
    dp_conv_result front[3];
    dp_sim sim;          /* chunk designs */
    dp_result out;       /* recurrent designs */
    double *S, *dS, *dg; /* of a recurrent design: at rank boundaries; of the log decay */
} run;

static dp_conv_policy conv_policy(dp_base base) {
    return base == DP_BASE_FP64 ? DP_CONV_FP64 : base == DP_BASE_FP32 ? DP_CONV_FP32 : DP_CONV_BF16;
}

/* q, k or v; with dy: the gradients, too. */
static void convolve(run *x, int i, double *dy) {
    dp_conv_result_free(&x->front[i]);
    x->conv[i].dy = dy;
    dp_conv_result_alloc(&x->front[i], &x->conv[i]);
    const dp_status st =
        dp_conv_ranks(&x->conv[i], x->rq->N, conv_policy(x->design.base), &x->front[i], NULL);
    assert(!st); /* the caller has split the problem this way already */
    (void)st;
}

static void run_open(run *x, const dp_expected_request *rq, const dp_design *design,
                     const dp_problem *y, const dp_conv conv[3]) {
    *x = (run){.rq = rq, .design = *design, .p = *y};
    double **const input[3] = {&x->p.q, &x->p.k, &x->p.v};
    for (int i = 0; i < 3; i++) {
        x->conv[i] = conv[i];
        if (!conv[i].x) continue;
        convolve(x, i, NULL);
        *input[i] = dp_copy(x->front[i].y, conv[i].T * conv[i].D);
    }
    if (!design->chunk) return;
    const dp_status st = dp_sim_new_design(&x->sim, &x->p, design, rq->N, NULL);
    assert(!st);
    (void)st;
}

static dp_result *results(run *x) { return x->design.chunk ? &x->sim.out : &x->out; }

static void run_recurrent(run *x) {
    const dp_problem *p = &x->p;
    const int64_t KV = (int64_t)p->K * p->V;
    const int N = x->rq->N;
    int64_t *cut = dp_calloc((size_t)N, sizeof *cut);
    for (int r = 1; r < N; r++)
        cut[r] = r * (p->T / N);
    x->S = dp_doubles(N * p->HV * KV);
    x->dS = dp_doubles(N * p->HV * KV);
    x->dg = dp_doubles(p->T * p->HV * dp_Kg(p));
    const dp_recurrent_keep keep = {N, cut, x->S, x->dS, x->dg};
    dp_recurrent_run(p, &x->design, x->rq->backward, &keep, &x->out);
    free(cut);
}

static void run_all(run *x, dp_format chain) {
    if (x->design.chunk)
        dp_sim_run(&x->sim, chain, DP_MERGE_ALLGATHER, x->rq->backward);
    else if (!x->out.o)
        run_recurrent(x);
    double *const dy[3] = {results(x)->dq, results(x)->dk, results(x)->dv};
    for (int i = 0; x->rq->backward && i < 3; i++)
        if (x->conv[i].x) convolve(x, i, dy[i]);
}

static void run_close(run *x) {
    double *const input[3] = {x->p.q, x->p.k, x->p.v};
    if (x->design.chunk)
        dp_sim_free(&x->sim);
    else
        dp_result_free(&x->out);
    free(x->S);
    free(x->dS);
    free(x->dg);
    for (int i = 0; i < 3; i++) {
        if (!x->conv[i].x) continue;
        free(input[i]);
        dp_conv_result_free(&x->front[i]);
    }
}

/* The state or matrix of one rank and head; NULL: it has none. */
static const double *rank_value(const run *x, int tensor, int64_t z) {
    const dp_sim *s = &x->sim;
    double **const list[] = {s->S_in, s->M, s->H, s->dS_out, s->dM, s->dH};
    const int64_t KV = (int64_t)x->p.K * x->p.V;
    const int64_t HV = x->p.HV;
    if (x->design.chunk) return list[tensor][z];
    if (tensor == 0) return x->S + z * KV;
    if (tensor == 3) return z / HV + 1 < x->rq->N ? x->dS + (z + HV) * KV : NULL;
    return NULL;
}

static const double *log_decay_gradient(const run *x) {
    return x->design.chunk ? x->sim.dg : x->dg;
}

/* ---- errors of a draw --------------------------------------------------------------------- */

typedef struct {
    const layout *l;
    run *one, *ref;
    double scale;
    int draw;
    dp_expected *x;
} draw;

/* err = scale (got - want); where there is no got, nothing is expected. */
static void add(const draw *a, const dp_row_map *map, const double *got, const double *want,
                dp_draws *d) {
    const int64_t n = map->rows * map->width;
    double *err = dp_doubles(n);
    for (int64_t i = 0; i < n; i++)
        err[i] = a->scale * (got[i] - want[i]);
    dp_sum_errors(map, err, want, d->err2 + a->draw * d->rows,
                  d->along + (int64_t)a->draw * DP_NDIRECTIONS * d->windows);
    free(err);
}

static void add_ranks(const draw *a, int tensor) {
    const dp_row_map *map = &a->l->rank[tensor];
    double *got = dp_doubles(map->rows * map->width);
    double *want = dp_doubles(map->rows * map->width);
    for (int64_t z = 0; z < map->rows; z++) {
        const double *g = rank_value(a->one, tensor, z);
        const double *w = rank_value(a->ref, tensor, z);
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

static void add_front(const draw *a, int i) {
    const dp_conv_result *g = &a->one->front[i];
    const dp_conv_result *w = &a->ref->front[i];
    const dp_conv *v = &a->one->conv[i];
    if (!v->x) return;
    add(a, &a->l->step[DP_STEP_Y][i], g->y, w->y, &a->x->step[DP_STEP_Y][i]);
    if (!a->l->rq->backward) return;
    double *dw = by_tap(v, g->dw);
    double *want = by_tap(v, w->dw);
    add(a, &a->l->step[DP_STEP_DX][i], g->dx, w->dx, &a->x->step[DP_STEP_DX][i]);
    add(a, &a->l->step[DP_STEP_DW][i], dw, want, &a->x->step[DP_STEP_DW][i]);
    if (v->bias)
        add(a, &a->l->step[DP_STEP_DBIAS][i], g->dbias, w->dbias, &a->x->step[DP_STEP_DBIAS][i]);
    free(dw);
    free(want);
}

/* What each window of tokens adds to the errors of dA_log (slope dg/dA_log) or ddt_bias (dg/dx). */
static void add_shares(const draw *a, const double *slope, dp_draws *d) {
    const dp_problem *p = &a->one->p;
    const double *got = log_decay_gradient(a->one);
    const double *want = log_decay_gradient(a->ref);
    const int Kg = dp_Kg(p);
    double *part = d->part + (int64_t)a->draw * d->parts * d->rows * d->width;
    for (int64_t i = 0; i < p->T * p->HV * Kg; i++) {
        const int64_t t = i / (p->HV * Kg);
        const int64_t head = i / Kg % p->HV;
        const int64_t at = (a->l->windows.window_of[t] * d->rows + head) * d->width;
        part[at + (d->width == 1 ? 0 : i % Kg)] += a->scale * (got[i] - want[i]) * slope[i];
    }
}

static void add_sums(const draw *a) {
    const dp_problem *p = &a->one->p;
    const int64_t n = p->T * p->HV * dp_Kg(p);
    double *slope[2] = {dp_doubles(n), dp_doubles(n)};
    dp_gate_slopes(p, slope[0], slope[1]);
    for (int i = 0; i < DP_FIELDS; i++)
        if (a->x->field[i].part)
            add_shares(a, slope[!strcmp(field_name(i), "dA_log")], &a->x->field[i]);
    free(slope[0]);
    free(slope[1]);
}

static void add_stages(const draw *a) {
    for (int i = 0; i < DP_NTAPS; i++) {
        if (!a->x->stage[i].err2) continue;
        double *got = dp_tap_value(&a->one->sim, i);
        double *want = dp_tap_value(&a->ref->sim, i);
        add(a, &a->l->stage[i], got, want, &a->x->stage[i]);
        free(got);
        free(want);
    }
}

static void add_draw(const draw *a) {
    for (int i = 0; i < DP_FIELDS; i++)
        if (a->x->field[i].err2)
            add(a, &a->l->field[i], *dp_result_at(results(a->one), i),
                *dp_result_at(results(a->ref), i), &a->x->field[i]);
    for (int i = 0; i < DP_RANK_TENSORS; i++)
        if (a->x->rank[i].err2) add_ranks(a, i);
    for (int i = 0; i < 3; i++)
        add_front(a, i);
    if (a->l->rq->backward) add_sums(a);
    if (a->one->design.chunk == DP_CHUNK) add_stages(a);
}

/* ---- all draws ---------------------------------------------------------------------------- */

/* The same design with fp32 in place of fp64. */
static dp_design in_fp32(dp_design d) {
    d.base = DP_BASE_FP32;
    if (d.factors == DP_FP64) d.factors = DP_FP32;
    if (d.state == DP_FP64) d.state = DP_FP32;
    if (d.out == DP_FP64) d.out = DP_FP32;
    return d;
}

/* One draw of every policy of one design: they share what no chain changes. The reference of a
 * design in fp64 is the same arithmetic, so what its roundings make is drawn in fp32 and scaled,
 * and added to what another format of the chain makes. */
static void draw_design(const draw *a, const dp_design *design, int n,
                        const dp_expected_policy *policy, const dp_conv conv[3], dp_expected *out) {
    const int exact = design->base == DP_BASE_FP64;
    draw d = *a;
    run one;
    d.one = &one;
    if (exact) {
        const dp_design narrow = in_fp32(*design);
        run_open(&one, a->l->rq, &narrow, &a->ref->p, conv);
        run_all(&one, DP_FP32);
        d.scale = FP32_FOR_FP64;
        for (int i = 0; i < n; i++) {
            d.x = &out[i];
            if (dp_design_same(&policy[i].design, design)) add_draw(&d);
        }
        run_close(&one);
    }
    run_open(&one, a->l->rq, design, &a->ref->p, conv);
    d.scale = 1;
    for (int i = 0; i < n; i++) {
        d.x = &out[i];
        if (!dp_design_same(&policy[i].design, design)) continue;
        if (exact && policy[i].chain == DP_FP64) continue;
        run_all(&one, policy[i].chain);
        add_draw(&d);
    }
    run_close(&one);
}

static void draw_policies(const draw *a, int n, const dp_expected_policy *policy,
                          const dp_conv conv[3], dp_expected *out) {
    for (int i = 0; i < n; i++) {
        int seen = 0;
        for (int j = 0; j < i; j++)
            seen |= dp_design_same(&policy[i].design, &policy[j].design);
        if (!seen) draw_design(a, &policy[i].design, n, policy, conv, out);
    }
}

void dp_expected_run(const dp_expected_request *rq, int n, const dp_expected_policy *policy,
                     dp_expected *out) {
    const dp_design exact = dp_design_of(DP_BASE_FP64);
    const int D = dp_expected_count(rq->p);
    layout l = layout_of(rq);
    for (int i = 0; i < n; i++)
        expected_alloc(&l, &policy[i], &out[i]);
    for (int d = 0; d < D; d++) {
        const mover m = {(uint64_t)(rq->set * D + d), rq->dtype};
        dp_problem y = dp_expected_nearby(rq->p, rq->dtype, (int)m.draw);
        dp_conv conv[3];
        run ref;
        nearby_front(rq->front, &m, conv);
        run_open(&ref, rq, &exact, &y, conv);
        run_all(&ref, DP_FP64);
        draw_policies(&(draw){.l = &l, .ref = &ref, .draw = d}, n, policy, conv, out);
        run_close(&ref);
        for (int i = 0; i < 3; i++)
            dp_conv_free(&conv[i]);
        dp_problem_free(&y);
    }
    layout_free(&l);
}
