/* Convolutions before a recurrence, judged end to end over N ranks (step.h). */
#include "step.h"
#include "harness/device/device_conv.h"
#include "harness/mpi/mpi_ranks.h"
#include "ref/arithmetic/elementary.h"
#include "ref/arithmetic/norms.h"
#include "ref/vocabulary/context.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static double **error_of(dp_raw_error *e, int i) {
    double **const at[DP_NQKV] = {[DP_QKV_Q] = &e->q, [DP_QKV_K] = &e->k, [DP_QKV_V] = &e->v};
    return at[i];
}

dp_front dp_step_front(const dp_case *c) {
    dp_front f = {{NULL}};
    for (int i = 0; i < DP_NQKV; i++)
        if (c->step.on[i]) f.conv[i] = &c->step.conv[i];
    return f;
}

/* ---- the subject ----------------------------------------------------------------------------- */

static void conv_bound(const dp_conv *v, const dp_step_run *s, dp_conv_result *b) {
    (dp_backends[s->be].simulated || s->base == DP_BASE_FP64
         ? dp_conv_bound
         : dp_conv_bound_sigmoid32)(v, s->base, s->N, b);
}

/* Marks every row of `width` that the fault changed. */
static void mark(const dp_case *c, const dp_step_run *s, int i, const double *was,
                 const double *is) {
    const dp_problem *p = &c->p;
    const int heads = dp_qkv_heads(p, i), width = dp_qkv_width(p, i), each = p->HV / heads;
    for (int64_t r = 0; was && r < p->T * heads; r++)
        if (memcmp(was + r * width, is + r * width, sizeof(double) * (size_t)width))
            memset(s->hit + r / heads / (p->T / s->N) * p->HV + r % heads * each, 1, (size_t)each);
}

static void apply_fault(const dp_case *c, const dp_step_run *s, int i, const dp_conv *v,
                        dp_conv_result *r) {
    double *y = dp_copy(r->y, v->T * v->D), *dx = r->dx ? dp_copy(r->dx, v->T * v->D) : NULL;
    dp_effect_conv(s->fault, v, s->N, s->base, r);
    mark(c, s, i, y, r->y);
    mark(c, s, i, dx, r->dx);
    free(y);
    free(dx);
}

static dp_status on_cpu(const dp_conv *const *c, int n, dp_base base, int N, dp_backend b,
                        dp_conv_result *const *r, dp_err *e) {
    dp_status st = DP_OK;
    for (int i = 0; i < n && !st; i++)
        st = (dp_backends[b].peers ? dp_mpi_conv : dp_conv_ranks)(c[i], N, base, r[i], e);
    return st;
}

dp_status dp_convolve(const dp_conv *const *c, int n, dp_base base, int N, dp_backend b,
                      dp_conv_result *const *r, dp_err *e) {
    return (dp_backends[b].on_device ? dp_cuda_conv : on_cpu)(c, n, base, N, b, r, e);
}

/* All of them at once, with these dy (NULL: forward only). r[i] is allocated where there is one. */
static dp_status convolve(const dp_case *c, const dp_step_run *s, const double *const dy[3],
                          dp_conv_result r[3], dp_err *e) {
    dp_conv v[3];
    const dp_conv *part[3];
    dp_conv_result *out[3];
    int n = 0;
    memset(r, 0, 3 * sizeof *r);
    for (int i = 0; i < DP_NQKV; i++) {
        if (!c->step.on[i]) continue;
        v[i] = c->step.conv[i];
        v[i].dy = dy ? (double *)dy[i] : NULL;
        dp_conv_result_alloc(&r[i], &v[i]);
        part[n] = &v[i];
        out[n++] = &r[i];
    }
    const dp_status st = dp_convolve(part, n, s->base, s->N, s->be, out, e);
    for (int i = 0; i < DP_NQKV && !st && dp_fault_of_conv(s->fault); i++)
        if (c->step.on[i]) apply_fault(c, s, i, &v[i], &r[i]);
    return st;
}

dp_status dp_step_forward(const dp_case *c, dp_backend be, int N, dp_base base, dp_fault fault,
                          dp_step_run *s, dp_err *e) {
    *s = (dp_step_run){.p = c->p,
                       .base = base,
                       .be = be,
                       .N = N,
                       .fault = fault,
                       .hit = dp_calloc((size_t)N * c->p.HV, 1)};
    s->p.input_error = 0;
    dp_conv_result y[3];
    if (dp_backends[be].on_device && base == DP_BASE_BF16 && c->input_dtype != DP_BF16)
        return dp_fail(e, DP_EINPUT,
                       "the kernels store y in the format of x, which is wider than bf16 here");
    const dp_status st = convolve(c, s, NULL, y, e);
    for (int i = 0; i < DP_NQKV; i++) {
        const dp_conv *v = &c->step.conv[i];
        dp_conv_result b;
        if (!c->step.on[i]) continue;
        dp_conv_result_alloc(&b, v);
        conv_bound(v, s, &b);
        *dp_qkv_at(&s->p, i) = y[i].y;
        *error_of(&s->err, i) = b.y;
    }
    return st;
}

void dp_step_run_free(const dp_case *c, dp_step_run *s) {
    for (int i = 0; i < DP_NQKV; i++)
        if (c->step.on[i] && *dp_qkv_at(&s->p, i) != *dp_qkv_at((dp_problem *)&c->p, i)) {
            free(*dp_qkv_at(&s->p, i));
            free(*error_of(&s->err, i));
        }
    free(s->hit);
    *s = (dp_step_run){0};
}

dp_problem dp_step_before(const dp_case *c, dp_conv_calls *calls) {
    dp_problem p = c->p;
    p.input_error = 0;
    for (int i = 0; i < DP_NQKV; i++)
        if (c->step.on[i]) {
            calls->conv[i] = &c->step.conv[i];
            *dp_qkv_at(&p, i) = c->step.conv[i].x;
        }
    return p;
}

dp_status dp_step_of_calls(const dp_case *c, dp_backend be, dp_base base,
                           const dp_conv_calls *calls, dp_step_run *s, dp_err *e) {
    const dp_status st = dp_step_forward(c, be, 1, base, DP_FAULT_NONE, s, e);
    for (int i = 0; i < DP_NQKV && !st; i++)
        if (c->step.on[i])
            memcpy(*dp_qkv_at(&s->p, i), calls->y[i],
                   sizeof(double) * (size_t)(c->p.T * c->step.conv[i].D));
    return st;
}

/* ---- judging --------------------------------------------------------------------------------- */

typedef struct {
    const dp_case *c;
    int N, i;
    const dp_step_expected *x;
} place_ctx;

static void place_token(const void *ctx, int64_t row, dp_place *at) {
    const place_ctx *x = ctx;
    const dp_problem *p = &x->c->p;
    const int heads = dp_qkv_heads(p, x->i);
    at->token = row / heads;
    at->head = (int)(row % heads);
    at->sequence = dp_sequence_of(p->cu, p->Nseq, at->token);
    at->rank = (int)(at->token / (p->T / x->N));
    at->chunk = x->x->chunk_of[at->token];
}

static void place_head(const void *ctx, int64_t row, dp_place *at) { /* rows [taps][heads] */
    const place_ctx *x = ctx;
    *at = (dp_place){.rank = 0,
                     .head = (int)(row % dp_qkv_heads(&x->c->p, x->i)),
                     .sequence = -1,
                     .chunk = -1,
                     .token = -1};
}

static void judge(const place_ctx *x, int kind, int64_t rows, const double *got, const double *want,
                  const double *rad, const double *bound, dp_run *run) {
    const dp_problem *p = &x->c->p;
    const dp_draws *d = x->x->x ? &x->x->x->step[kind][x->i] : NULL;
    const dp_tensor_field *field = &dp_conv_result_fields[kind];
    const int tokens = field->kind == DP_OF_TOKENS;
    char name[24];
    if (kind == DP_CONV_Y) /* the recurrence's own q, k or v */
        snprintf(name, sizeof name, "%s", dp_qkv_name(x->i));
    else
        snprintf(name, sizeof name, "%s_%s", field->name, dp_qkv_name(x->i));
    dp_compare_in in = x->x->like;
    in.name = name;
    in.N = x->N;
    in.heads = dp_qkv_heads(p, x->i);
    in.rows = rows;
    in.width = dp_qkv_width(p, x->i);
    in.got = got;
    in.want = want;
    in.rad = rad;
    in.bound = bound;
    in.place = tokens ? place_token : place_head;
    in.ctx = x;
    in.tokens = tokens ? p->T : 0;
    in.draws = d && d->err2 ? d : NULL;
    dp_compare(&in, &run->tensor[run->ntensor++]);
}

static double *transposed(const double *x, int D, int W) { /* [D][W] -> [W][D] */
    double *y = dp_doubles((int64_t)D * W);
    for (int64_t d = 0; d < D; d++)
        for (int64_t j = 0; j < W; j++)
            y[j * D + d] = x[d * W + j];
    return y;
}

/* |silu'(pre)| of every token and channel, upward; 1 without silu. */
static double *slopes(const dp_conv *v) {
    double *s = dp_doubles(v->T * v->D);
#pragma omp parallel for schedule(static)
    for (int d = 0; d < v->D; d++)
        for (int q = 0; q < v->Nseq; q++)
            for (int64_t t = v->cu[q]; t < v->cu[q + 1]; t++) {
                double pre = v->bias ? v->bias[d] : 0;
                for (int j = 0; j < v->W; j++) {
                    const int64_t from = t - (v->W - 1) + j;
                    if (from >= v->cu[q]) pre += v->w[d * v->W + j] * v->x[from * v->D + d];
                }
                const double sig = 1 / (1 + dp_exp(-pre));
                s[t * v->D + d] = v->silu ? fabs(sig * (1 + pre * (1 - sig))) + 0x1p-40 : 1;
            }
    return s;
}

/* Errors of the rows of dq (dk, dv). If E is NULL, D [T][heads] are norms, which are added.
 * Otherwise E holds squares of the entries' errors, D squares of the errors of rows as a whole. */
typedef struct {
    const double *E, *D;
} row_errors;

/* The errors of a row scaled by |a_d b_d|, channel by channel. */
static double scaled(const row_errors *e, int64_t row, const double *a, int64_t stride_a,
                     const double *b, int width) {
    double top = 0, sum = 0;
    for (int d = 0; d < width; d++) {
        const double x = fabs(a[d * stride_a] * b[d]);
        top = fmax(top, x);
        if (e->E) sum += x * x * e->E[row * width + d];
    }
    return e->E ? sum + top * top * e->D[row] : top * e->D[row];
}

/* The errors of dx [T][heads], dw [W][heads] and dbias [heads] from them. Squares are multiplied by
 * DP_LAMBDA in the end. */
typedef struct {
    double *dx, *dw, *dbias;
} sums;
static void propagate(const dp_conv *v, const double *slope, row_errors e, int heads, int width,
                      sums *to) {
    const int W = v->W;
    double *dw = dp_doubles((int64_t)(W + 1) * heads), one = 1;
    for (int q = 0; q < v->Nseq; q++)
        for (int64_t t = v->cu[q], n = 0; t < v->cu[q + 1]; t++) {
            for (int h = 0; h < heads; h++) {
                const int64_t at = t * v->D + (int64_t)h * width, row = t * heads + h;
                for (int j = 0; j < W; j++) {
                    const int64_t from = t - (W - 1) + j;
                    if (from < v->cu[q]) continue;
                    to->dx[from * heads + h] +=
                        scaled(&e, row, v->w + (int64_t)h * width * W + j, W, slope + at, width);
                    dw[j * heads + h] += scaled(&e, row, v->x + from * v->D + (int64_t)h * width, 1,
                                                slope + at, width);
                }
                dw[W * heads + h] += scaled(&e, row, &one, 0, slope + at, width);
            }
            if (++n % DP_CHUNK && t + 1 < v->cu[q + 1]) continue;
            for (int i = 0; i < (W + 1) * heads; i++) {
                *(i < W * heads ? &to->dw[i] : &to->dbias[i - W * heads]) +=
                    e.E ? DP_LAMBDA * sqrt(dw[i]) : dw[i];
                dw[i] = 0;
            }
        }
    for (int64_t i = 0; e.E && i < v->T * heads; i++)
        to->dx[i] = DP_LAMBDA * sqrt(to->dx[i]);
    free(dw);
}

/* Sums of dx, dw [W] and dbias by head, in one buffer that starts at dx. */
static sums sums_new(int64_t rows, int W, int heads) {
    double *at = dp_doubles(rows + (int64_t)(W + 1) * heads);
    return (sums){.dx = at, .dw = at + rows, .dbias = at + rows + W * heads};
}

/* A convolution's true results, their radii, and the bound of its own errors. */
typedef struct {
    dp_conv v;
    dp_conv_result is, radius, bound;
} conv_standard;

static conv_standard standard_new(const dp_case *c, const dp_step_run *s, int i, const double *dy) {
    conv_standard x = {.v = c->step.conv[i]};
    x.v.dy = (double *)dy;
    dp_conv_result_alloc(&x.is, &x.v);
    dp_conv_result_alloc(&x.radius, &x.v);
    dp_conv_result_alloc(&x.bound, &x.v);
    dp_conv_truth(&x.v, c->bits, &x.is, &x.radius);
    conv_bound(&x.v, s, &x.bound);
    return x;
}

static void standard_free(conv_standard *x) {
    dp_conv_result_free(&x->is);
    dp_conv_result_free(&x->radius);
    dp_conv_result_free(&x->bound);
}

/* A result as rows of heads: dw transposed. To be freed. */
static double *as_rows(const dp_conv *v, const dp_conv_result *r, int kind) {
    const double *x = *dp_conv_result_at((dp_conv_result *)r, kind);
    int64_t rows;
    int width;
    dp_conv_result_shape(v, kind, &rows, &width);
    return kind == DP_CONV_DW ? transposed(x, v->D, v->W) : dp_copy(x, rows * width);
}

static const double *sum_of(const sums *s, int kind) {
    return kind == DP_CONV_DX ? s->dx : kind == DP_CONV_DW ? s->dw : s->dbias;
}

/* A result beside its truth; returns its number of rows. By row, `through` (NULL: true inputs) adds
 * to the radius what comes of the truth's rest. To the bound it adds what comes of the subject's
 * bound of the recurrence's gradient. */
static int64_t judge_result(const place_ctx *x, const conv_standard *std, int kind,
                            const dp_conv_result *got, const sums through[2], dp_run *run) {
    const int heads = dp_qkv_heads(&x->c->p, x->i), width = dp_qkv_width(&x->c->p, x->i);
    const int64_t rows = kind == DP_CONV_DW      ? (int64_t)std->v.W * heads
                         : kind == DP_CONV_DBIAS ? heads
                                                 : std->v.T * heads;
    double *is = as_rows(&std->v, &std->is, kind), *radius = as_rows(&std->v, &std->radius, kind),
           *bound = as_rows(&std->v, &std->bound, kind), *made = as_rows(&std->v, got, kind);
    double *r = dp_norms_up(radius, rows, width), *b = dp_norms_up(bound, rows, width);
    for (int64_t z = 0; z < rows && through; z++) {
        r[z] += sum_of(&through[0], kind)[z];
        b[z] += sum_of(&through[1], kind)[z];
    }
    judge(x, kind, rows, made, is, r, b, run);
    double *all[] = {is, radius, bound, made, r, b};
    for (int i = 0; i < 6; i++)
        free(all[i]);
    return rows;
}

static void judge_backward(const place_ctx *x, const dp_truth *truth, const dp_step_run *s,
                           const dp_conv_result *got, const dp_error_bound *b, dp_run *run) {
    const dp_problem *p = &x->c->p;
    const int i = x->i, heads = dp_qkv_heads(p, i), width = dp_qkv_width(p, i);
    const dp_ball *t = &truth->field[dp_qkv_gradient(i)];
    const int64_t rows = p->T * heads;
    conv_standard std = standard_new(x->c, s, i, t->hi);
    double *slope = slopes(&std.v), *open = dp_doubles(rows);
    /* of the truth's own rest, of the subject's bound */
    sums through[2] = {sums_new(rows, std.v.W, heads), sums_new(rows, std.v.W, heads)};
    for (int64_t r = 0; r < rows; r++)
        open[r] = t->rad[r] + dp_norm_up(width, t->lo + r * width);
    propagate(&std.v, slope, (row_errors){NULL, open}, heads, width, &through[0]);
    propagate(&std.v, slope, (row_errors){b->entry[i], b->rest[i]}, heads, width, &through[1]);
    for (int k = DP_CONV_DX; k < DP_CONV_NRESULTS; k++)
        if (dp_conv_result_exists(&std.v, k)) judge_result(x, &std, k, got, through, run);
    free(slope);
    free(open);
    free(through[0].dx);
    free(through[1].dx);
    standard_free(&std);
}

/* ---- the convolutions alone, on true inputs -------------------------------------------------- */

static void conv_alone(const place_ctx *x, const dp_step_run *s, const double *dy,
                       const dp_conv_result *got, dp_run *run, int64_t *rows) {
    conv_standard std = standard_new(x->c, s, x->i, dy);
    for (int k = dy ? DP_CONV_DX : DP_CONV_Y; k < DP_CONV_NRESULTS; k++)
        if (dp_conv_result_exists(&std.v, k)) *rows += judge_result(x, &std, k, got, NULL, run);
    standard_free(&std);
}

dp_status dp_step_judge_alone(const dp_case *c, const dp_step_run *s, const double *const dy[3],
                              dp_run *run, int64_t *rows, dp_err *e) {
    int *chunk_of = dp_calloc((size_t)c->p.T, sizeof *chunk_of);
    const dp_step_expected none = {.chunk_of = chunk_of};
    dp_conv_result got[3];
    for (int64_t t = 0; t < c->p.T; t++)
        chunk_of[t] = (int)(t / DP_CHUNK);
    const dp_status st = convolve(c, s, dy, got, e);
    for (int i = 0; i < DP_NQKV && !st; i++) {
        const place_ctx at = {c, s->N, i, &none};
        if (c->step.on[i]) conv_alone(&at, s, dy ? dy[i] : NULL, &got[i], run, rows);
        dp_conv_result_free(&got[i]);
    }
    free(chunk_of);
    return st;
}

/* ---- judging a step -------------------------------------------------------------------------- */

dp_status dp_step_judge(const dp_case *c, const dp_truth *truth, const dp_step_run *s,
                        const dp_result *got, const dp_error_bound *b, const dp_step_expected *x,
                        dp_run *run, dp_err *e) {
    const dp_problem *p = &c->p;
    const double *const dy[3] = {got->dq, got->dk, got->dv};
    const int back = got->dq && truth->backward;
    dp_conv_result d[3] = {{0}};
    const dp_status st = back ? convolve(c, s, dy, d, e) : DP_OK;
    for (int i = 0; i < DP_NQKV && !st; i++) {
        const place_ctx at = {c, s->N, i, x};
        const int width = dp_qkv_width(p, i);
        if (!c->step.on[i]) continue;
        double *r = dp_norms_up(c->step.rad[i].y, p->T * dp_qkv_heads(p, i), width),
               *bound = dp_norms_up(*error_of((dp_raw_error *)&s->err, i),
                                    p->T * dp_qkv_heads(p, i), width);
        judge(&at, DP_CONV_Y, p->T * dp_qkv_heads(p, i), *dp_qkv_at((dp_problem *)&s->p, i),
              *dp_qkv_at((dp_problem *)p, i), r, bound, run);
        free(r);
        free(bound);
        if (back) judge_backward(&at, truth, s, &d[i], b, run);
    }
    for (int i = 0; i < DP_NQKV; i++)
        dp_conv_result_free(&d[i]);
    return st;
}
