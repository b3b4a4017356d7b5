/* Judges the surroundings of a recurrence. First the convolutions of a training step, end to end
 * over N ranks (step.h). Then the calls of a session, with all that they passed on (outputs.h). */
#include "step.h"
#include "harness/device/device_run.h"
#include "harness/mpi/mpi_ranks.h"
#include "outputs.h"
#include "ref/arithmetic/elementary.h"
#include "ref/arithmetic/norms.h"
#include "ref/vocabulary/context.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- the subject ----------------------------------------------------------------------------- */

static void conv_bound(const dp_conv *v, const dp_step_run *s, dp_conv_result *b) {
    (dp_backends[s->be].simulated || s->base == DP_BASE_FP64
         ? dp_conv_bound
         : dp_conv_bound_sigmoid32)(v, s->base, s->N, b);
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

/* The gradient of convolution i's output; from NULL: none. */
static double *dy_of(const dp_result *from, int i) {
    return from ? from->out[dp_qkv_gradient(i)] : NULL;
}

/* All of them at once; from NULL: forward only. r[i] is allocated where there is one. */
static dp_status convolve(const dp_case *c, const dp_step_run *s, const dp_result *from,
                          dp_conv_result r[DP_NQKV], dp_err *e) {
    dp_conv v[DP_NQKV];
    const dp_conv *part[DP_NQKV];
    dp_conv_result *out[DP_NQKV];
    int n = 0;
    memset(r, 0, DP_NQKV * sizeof *r);
    for (int i = 0; i < DP_NQKV; i++) {
        if (!c->step.on[i]) continue;
        v[i] = c->step.conv[i];
        v[i].dy = dy_of(from, i);
        dp_conv_result_alloc(&r[i], &v[i]);
        part[n] = &v[i];
        out[n++] = &r[i];
    }
    const dp_status st = dp_convolve(part, n, s->base, s->N, s->be, out, e);
    for (int i = 0; i < DP_NQKV && !st; i++)
        if (c->step.on[i])
            dp_sim_convolved(s->fault, &c->p, s->base, s->N, s->hit,
                             (dp_sim_place){.at = i, .conv = &v[i], .convolved = &r[i]});
    return st;
}

/* Convolution i made y, which the run owns from here on; with its bound. */
static void put(const dp_case *c, int i, double *y, dp_step_run *s) {
    dp_conv_result b;
    dp_conv_result_alloc(&b, &c->step.conv[i]);
    conv_bound(&c->step.conv[i], s, &b);
    s->p.in[dp_qkv_input(i)] = y;
    s->err.of[i] = b.y;
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
    dp_conv_result y[DP_NQKV];
    if (dp_backends[be].on_device && base == DP_BASE_BF16 && c->input_dtype != DP_BF16)
        return dp_fail(e, DP_EINPUT,
                       "the kernels store y in the format of x, which is wider than bf16 here");
    const dp_status st = convolve(c, s, NULL, y, e);
    for (int i = 0; i < DP_NQKV; i++)
        if (c->step.on[i]) put(c, i, y[i].y, s);
    return st;
}

dp_status dp_step_backward(const dp_case *c, const dp_result *from, dp_step_run *s, dp_err *e) {
    for (int i = 0; i < DP_NQKV; i++)
        dp_conv_result_free(&s->d[i]);
    return convolve(c, s, from, s->d, e);
}

void dp_step_run_free(const dp_case *c, dp_step_run *s) {
    for (int i = 0; i < DP_NQKV; i++)
        dp_conv_result_free(&s->d[i]);
    for (int i = 0; i < DP_NQKV; i++)
        if (c->step.on[i] && s->p.in[dp_qkv_input(i)] != c->p.in[dp_qkv_input(i)]) {
            free(s->p.in[dp_qkv_input(i)]);
            free(s->err.of[i]);
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
            p.in[dp_qkv_input(i)] = c->step.conv[i].x;
        }
    return p;
}

/* As dp_step_forward on one rank, of the outputs that the calls made. */
static dp_step_run step_of_calls(const dp_case *c, dp_backend be, dp_base base,
                                 const dp_conv_calls *calls) {
    dp_step_run s = {.p = c->p, .base = base, .be = be, .N = 1};
    s.p.input_error = 0;
    for (int i = 0; i < DP_NQKV; i++)
        if (c->step.on[i]) put(c, i, dp_copy(calls->y[i], c->p.T * c->step.conv[i].D), &s);
    return s;
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
    *at = dp_place_of(0, (int)(row % dp_qkv_heads(&x->c->p, x->i)), -1);
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
    DP_OWN double *dw = dp_doubles((int64_t)(W + 1) * heads);
    double one = 1;
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

static conv_standard standard_new(const dp_case *c, const dp_step_run *s, int i, double *dy) {
    conv_standard x = {.v = c->step.conv[i]};
    x.v.dy = dy;
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
    const double *x = r->out[kind];
    int64_t rows;
    int width;
    dp_conv_result_shape(v, kind, &rows, &width);
    return kind == DP_CONV_DW ? dp_conv_by_tap(v, x) : dp_copy(x, rows * width);
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
    DP_FREE(is, radius, bound, made, r, b);
    return rows;
}

static void judge_backward(const place_ctx *x, const dp_truth *truth, const dp_step_run *s,
                           const dp_error_bound *b, dp_run *run) {
    const dp_problem *p = &x->c->p;
    const int i = x->i, heads = dp_qkv_heads(p, i), width = dp_qkv_width(p, i);
    const dp_ball *t = &truth->field[dp_qkv_gradient(i)];
    const int64_t rows = p->T * heads;
    DP_FREED(standard_free) conv_standard std = standard_new(x->c, s, i, t->hi);
    DP_OWN double *slope = slopes(&std.v), *open = dp_doubles(rows);
    /* of the truth's own rest, of the subject's bound */
    sums through[2] = {sums_new(rows, std.v.W, heads), sums_new(rows, std.v.W, heads)};
    for (int64_t r = 0; r < rows; r++)
        open[r] = t->rad[r] + dp_norm_up(width, t->lo + r * width);
    propagate(&std.v, slope, (row_errors){NULL, open}, heads, width, &through[0]);
    propagate(&std.v, slope, (row_errors){b->entry[i], b->rest[i]}, heads, width, &through[1]);
    for (int k = DP_CONV_DX; k < DP_CONV_NRESULTS; k++)
        if (dp_conv_result_exists(&std.v, k)) judge_result(x, &std, k, &s->d[i], through, run);
    free(through[0].dx);
    free(through[1].dx);
}

/* ---- the convolutions alone, on true inputs -------------------------------------------------- */

static void conv_alone(const place_ctx *x, const dp_step_run *s, double *dy, dp_run *run,
                       int64_t *rows) {
    DP_FREED(standard_free) conv_standard std = standard_new(x->c, s, x->i, dy);
    const dp_conv_result y = {.y = s->p.in[dp_qkv_input(x->i)]};
    for (int k = dy ? DP_CONV_DX : DP_CONV_Y; k < DP_CONV_NRESULTS; k++)
        if (dp_conv_result_exists(&std.v, k))
            *rows += judge_result(x, &std, k, dy ? &s->d[x->i] : &y, NULL, run);
}

void dp_step_judge_alone(const dp_case *c, const dp_step_run *s, const dp_result *from, dp_run *run,
                         int64_t *rows) {
    DP_OWN int *chunk_of = dp_calloc((size_t)c->p.T, sizeof *chunk_of);
    const dp_step_expected none = {.chunk_of = chunk_of};
    for (int64_t t = 0; t < c->p.T; t++)
        chunk_of[t] = (int)(t / DP_CHUNK);
    for (int i = 0; i < DP_NQKV; i++) {
        const place_ctx at = {c, s->N, i, &none};
        if (c->step.on[i]) conv_alone(&at, s, dy_of(from, i), run, rows);
    }
}

/* ---- judging a step -------------------------------------------------------------------------- */

void dp_step_judge(const dp_case *c, const dp_truth *truth, const dp_step_run *s,
                   const dp_error_bound *b, const dp_step_expected *x, dp_run *run) {
    const dp_problem *p = &c->p;
    for (int i = 0; i < DP_NQKV; i++) {
        const place_ctx at = {c, s->N, i, x};
        const int width = dp_qkv_width(p, i);
        if (!c->step.on[i]) continue;
        DP_OWN double *r = dp_norms_up(c->step.rad[i].y, p->T * dp_qkv_heads(p, i), width),
                      *bound = dp_norms_up(s->err.of[i], p->T * dp_qkv_heads(p, i), width);
        judge(&at, DP_CONV_Y, p->T * dp_qkv_heads(p, i), s->p.in[dp_qkv_input(i)],
              p->in[dp_qkv_input(i)], r, bound, run);
        if (s->d[i].dx) judge_backward(&at, truth, s, b, run);
    }
}

/* ---- drafts ---------------------------------------------------------------------------------- */

/* The tensors of the two sets by their name in the session's run. */
static const char *const NAMES[2][2] = {{"o", "o_drafted"}, {"final_state", "state_drafted"}};
#define WITHIN "state_within"

static const char *name_of(const char *result, int within) {
    for (int i = 0; i < 2 && !within; i++)
        if (!strcmp(result, NAMES[i][0])) return NAMES[i][1];
    return WITHIN;
}

/* The set as a case of the recurrence; it borrows all. */
static dp_case case_of(const dp_case *c, const dp_draft_set *s, const dp_run *r) {
    dp_case x = *c;
    x.op = &dp_operations[DP_OP_RECURRENCE];
    x.session = (dp_session){0};
    x.p = s->p;
    x.nbase = x.nchain = 1;
    x.base[0] = r->base;
    x.chain[0] = r->chain;
    x.spec.keys = DP_KEYS_RANDOM; /* negated values round: no case in which nothing does */
    return x;
}

/* The place of a row as the session has it: slot, and the token that would stand there. */
static void place_in_session(const dp_problem *p, const dp_draft_set *s, dp_place *at) {
    if (at->sequence < 0 || at->rank < 0) return;
    const dp_draft_place *x = &s->place[at->sequence];
    const int64_t end = p->cu[x->slot + 1] - 1;
    if (at->token >= 0) {
        at->token += x->from - s->p.cu[at->sequence];
        if (at->token > end) at->token = end;
        at->chunk = (int)(at->token / DP_CHUNK);
    }
    at->sequence = x->slot;
}

/* Says which token of which call failed. */
static void name_draft(const dp_draft_set *s, dp_judgement *t) {
    const dp_place *at = &t->failed.at;
    if (t->verdict != DP_FAIL || at->rank < 0 || at->sequence < 0) return;
    const dp_draft_place *x = &s->place[at->sequence];
    const int64_t token = at->token < 0 ? x->tokens : at->token - s->p.cu[at->sequence] + 1;
    dp_text_add(t->why, sizeof t->why,
                "; token %lld of the window in call %lld, of which %lld %s accepted",
                (long long)token, (long long)x->call + 1, (long long)x->passed,
                x->passed == 1 ? "is" : "are");
}

static void take_draft(const dp_case *c, const dp_draft_set *s, int within, dp_judgement *from,
                       dp_run *r) {
    dp_judgement *t = &r->tensor[r->ntensor++];
    *t = *from;
    *from = (dp_judgement){0};
    snprintf(t->name, sizeof t->name, "%s", name_of(t->name, within));
    name_draft(s, t);
    dp_row *const rows[] = {&t->worst, &t->over, &t->first, &t->last, &t->failed};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        place_in_session(&c->p, s, &rows[i]->at);
}

static dp_status judge_set(const dp_sharding *sp, const dp_draft_set *s, int within, dp_run *r,
                           dp_err *e) {
    const dp_case c = case_of(sp->c, s, r);
    const dp_run_options o = {
        .cache = sp->std->o->cache, .truth = sp->std->o->truth, .drop = sp->std->o->drop};
    const dp_stored_results g = {.r = s->out,
                                 .design = r->undeclared ? NULL : &r->design,
                                 .explained = r->undeclared ? &r->explained : NULL,
                                 .same_design = !r->other_design};
    DP_FREED(dp_runs_free) dp_runs made = {0};
    const dp_status st = s->p.Nseq ? dp_run_stored(&c, &o, &g, &made, e) : DP_OK;
    const int n = made.n ? made.run[0].ntensor : 0;
    if (n) r->tensor = dp_realloc(r->tensor, sizeof *r->tensor * (size_t)(r->ntensor + n));
    for (int i = 0; i < n; i++)
        take_draft(sp->c, s, within, &made.run[0].tensor[i], r);
    return st;
}

/* The run fails by this tensor, which is closed already. */
static void let_speak(int tensor, dp_run *r) {
    const dp_judgement *bad = &r->tensor[tensor];
    const dp_place *at = &bad->failed.at;
    r->verdict = DP_FAIL;
    r->tier = bad->tier;
    r->speaks = tensor;
    snprintf(r->why, sizeof r->why, "%s: %s", bad->name, bad->why);
    if (at->sequence >= 0)
        dp_text_add(r->why, sizeof r->why, " (sequence %d, head %d)", at->sequence, at->head);
}

/* The worst of the new tensors represents the run if nothing had failed before. */
static void let_worst_speak(int from, dp_run *r) {
    int worst = -1;
    for (int i = from; i < r->ntensor; i++)
        if (r->tensor[i].verdict == DP_FAIL &&
            dp_judgement_says_more(worst < 0 ? NULL : &r->tensor[worst], &r->tensor[i]))
            worst = i;
    if (worst >= 0 && r->verdict != DP_FAIL) let_speak(worst, r);
    for (int i = from; i < r->ntensor && r->verdict == DP_PASS; i++) {
        if (r->tensor[i].verdict != DP_UNJUDGED) continue;
        r->verdict = DP_UNJUDGED;
        snprintf(r->why, sizeof r->why, "%s: %s", r->tensor[i].name, r->tensor[i].why);
    }
}

/* The results of all tokens in a session's windows. */
static dp_status judge_drafts(const dp_sharding *sp, const dp_drafts *d, dp_run *r, dp_err *e) {
    const int before = r->ntensor;
    r->windows = d->windows;
    if (r->fault && r->verdict == DP_FAIL) return DP_OK; /* a deliberate fault that was seen */
    dp_status st = judge_set(sp, &d->window, 0, r, e);
    if (!st) st = judge_set(sp, &d->within, 1, r, e);
    let_worst_speak(before, r);
    r->windows_judged = d->window.p.Nseq;
    return st;
}

/* ---- to the bit ------------------------------------------------------------------------------ */

/* Appends the judgement of a tensor that must be right to the bit; first: its first entry that is
 * another, -1: none. Returned for the words of its failure: it represents the run, and the other
 * failures follow from it. */
static dp_judgement *judge_bits(const dp_compare_in *in, int64_t first, dp_run *r) {
    r->tensor = dp_realloc(r->tensor, sizeof *r->tensor * (size_t)(r->ntensor + 1));
    dp_judgement *t = &r->tensor[r->ntensor++];
    dp_compare(in, t);
    t->verdict = first < 0 ? DP_PASS : DP_FAIL;
    t->tier = "exact";
    t->why[0] = 0;
    if (first < 0) return t;
    const double got = in->got[first], want = in->want[first];
    t->times = INFINITY;
    t->failed = (dp_row){.index = (int)(first % in->width),
                         .got = got,
                         .want = want,
                         .err = fabs(got - want),
                         .size = fabs(want)};
    in->place(in->ctx, first / in->width, &t->failed.at);
    return t;
}

/* The first entry that is another; -1: none. */
static int64_t first_other(const double *got, const double *want, int64_t n) {
    for (int64_t z = 0; z < n; z++)
        if (memcmp(got + z, want + z, sizeof *got)) return z;
    return -1;
}

/* ---- pools ----------------------------------------------------------------------------------- */

typedef struct {
    const dp_pool_seen *seen;
    int heads;
} pool_rows; /* a row: a head of a slot */

static void pool_place(const void *ctx, int64_t row, dp_place *at) {
    const pool_rows *x = ctx;
    const int first = x->seen->slot == row / x->heads, owner = x->seen->owner;
    *at = dp_place_of(0, (int)(row % x->heads), first && owner >= 0 ? owner : -1);
}

static const char *whose(int owner, char text[64]) {
    if (owner == DP_SLOT_FREE) return "which no sequence owns";
    if (owner == DP_SLOT_OF_PREFIX) return "which holds the shared prefix";
    snprintf(text, 64, "which sequence %d owns", owner);
    return text;
}

static void say_slot(const dp_pool_seen *s, dp_judgement *t) {
    const double was = t->failed.want, is = t->failed.got;
    char owner[64];
    snprintf(t->why, sizeof t->why,
             "slot %lld, %s, was overwritten in call %lld: entry %d of head %d was %g (%a), is %g "
             "(%a)%s",
             (long long)s->slot, whose(s->owner, owner), (long long)s->call + 1, t->failed.index,
             t->failed.at.head, was, was, is, is,
             s->overwritten > 1 ? "; it is not the only one" : "");
}

/* Results that are NaN where the inputs are not. */
static void say_unowned(const dp_sharding *sp, dp_run *r) {
    if (r->speaks < 0 || r->tensor[r->speaks].flaw != DP_FLAW_NOT_FINITE) return;
    if (sp->c->allow_nonfinite) return;
    dp_text_add(r->why, sizeof r->why,
                "; a slot that no sequence owns is NaN before a call: one was read");
}

/* Entries, 0 where a slot that nobody owns has kept its NaN. */
static double *without_nan(const dp_pool_seen *s, const double *x, int heads) {
    double *y = dp_copy(x, s->slots * heads * s->width);
    for (int64_t z = 0; z < s->slots * heads * s->width; z++)
        if (isnan(y[z]) && !memcmp(s->was + z, s->is + z, sizeof *y)) y[z] = 0;
    return y;
}

/* The slots of a session's pool that were not to be written, as tensor `pool`, bit by bit. Does
 * nothing if no pool was run. */
static void judge_pool(const dp_sharding *sp, const dp_pool_seen *seen, dp_run *r) {
    const pool_rows x = {seen, sp->c->p.HV};
    if (!seen->was) return;
    const int64_t entries = x.heads * seen->width, from = seen->slot * entries;
    const int64_t wrong =
        seen->overwritten ? from + first_other(seen->was + from, seen->is + from, entries) : -1;
    DP_OWN double *was = without_nan(seen, seen->was, x.heads),
                  *is = without_nan(seen, seen->is, x.heads);
    const dp_compare_in in = {.name = "pool",
                              .N = 1,
                              .heads = x.heads,
                              .rows = seen->slots * x.heads,
                              .width = seen->width,
                              .got = is,
                              .want = was,
                              .place = pool_place,
                              .ctx = &x};
    dp_judgement *t = judge_bits(&in, wrong, r);
    if (t->verdict != DP_FAIL) {
        say_unowned(sp, r);
        return;
    }
    say_slot(seen, t);
    let_speak(r->ntensor - 1, r);
}

/* ---- convolutions ---------------------------------------------------------------------------- */

static void conv_place(const void *ctx, int64_t row, dp_place *at) {
    const int each = *(const int *)ctx; /* rows of a sequence */
    *at = dp_place_of(0, 0, (int)(row / each));
}

/* Judges the inputs that a convolution handed on, as tensor conv_state_q .., to the bit. */
static void judge_conv_state(const dp_conv_calls *c, int i, dp_run *r) {
    const dp_conv *v = c->conv[i];
    if (!v || v->W < 2 || !c->got.of[i]) return;
    const int each = v->W - 1;
    const int64_t rows = (int64_t)v->Nseq * each;
    const int64_t wrong = first_other(c->got.of[i], c->want.of[i], rows * v->D);
    char name[24];
    snprintf(name, sizeof name, "conv_state_%s", dp_qkv_name(i));
    const dp_compare_in in = {.name = name,
                              .N = 1,
                              .heads = 1,
                              .rows = rows,
                              .width = v->D,
                              .got = c->got.of[i],
                              .want = c->want.of[i],
                              .place = conv_place,
                              .ctx = &each};
    dp_judgement *t = judge_bits(&in, wrong, r);
    if (t->verdict != DP_FAIL) return;
    const dp_row *f = &t->failed;
    snprintf(t->why, sizeof t->why,
             "call %lld returns another convolution input than that of the token %d before its "
             "next one: channel %d is %g (%a), was %g (%a)",
             (long long)c->call + 1, each - (int)(wrong / v->D % each), f->index, f->got, f->got,
             f->want, f->want);
    let_speak(r->ntensor - 1, r);
}

/* ---- all of it ------------------------------------------------------------------------------- */

/* Names, of a run that failed, the first call that left a wrong state. */
static void say_far(const dp_states_seen *far, dp_run *r) {
    if (r->verdict != DP_FAIL || !(far->off > 0)) return;
    dp_text_add(
        r->why, sizeof r->why,
        "; call %lld is the first that leaves a wrong state: sequence %d, head %d, error %.2g "
        "of the state that its inputs give",
        (long long)far->call + 1, far->sequence, far->head, far->off);
}

dp_status dp_judge_calls(dp_sharding *sp, const dp_outputs *out, const dp_calls_seen *seen,
                         dp_bound_bases *bases, dp_run *r, dp_err *e) {
    const int step = sp->first_of_call && sp->c->op->has_front;
    dp_step_run front = {0};
    if (step) {
        front = step_of_calls(sp->c, r->backend, r->base, &seen->front);
        sp->step = &front;
    }
    dp_judge_outputs(sp, bases, out, r);
    if (step) {
        sp->step = NULL;
        dp_step_run_free(sp->c, &front);
    }
    const dp_status st = judge_drafts(sp, &seen->drafts, r, e);
    judge_pool(sp, &seen->pool, r);
    for (int i = DP_NQKV - 1; i >= 0; i--)
        judge_conv_state(&seen->front, i, r);
    say_far(&seen->far, r);
    return st;
}
