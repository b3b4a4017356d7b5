#include "expected.h"
#include "tap.h"
#include "../ref/inputs.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- nearby problems ------------------------------------------------------------------------------------------------------------- */

/* x (1 + d), d uniform in +-2^-7, about one unit of bf16 on average; rounded to the format again. Zeros, infinities and NaN stay. */
static double *moved(const double *x, int64_t n, dp_format f, uint64_t draw, uint64_t stream) {
    if (!x) return NULL;
    dp_rng r;
    double *y = dp_doubles(n);
    dp_rng_seed(&r, 0x6472617773ull + draw, stream);
    for (int64_t i = 0; i < n; i++) {
        const double z = x[i] * (1 + (2 * dp_rng_uniform(&r) - 1) * 0x1p-7);
        y[i] = !isfinite(z) ? x[i] : f == DP_BF16 ? dp_bf16d(z) : f == DP_FP64 ? z : (double)dp_fp32(z);
    }
    return y;
}

/* The narrowest format that holds all of x: weights stay as short as they are. */
static dp_format narrowest(const double *x, int64_t n) {
    dp_format f = DP_BF16;
    for (int64_t i = 0; i < n && f != DP_FP64; i++) {
        if (f == DP_BF16 && dp_bf16d(x[i]) != x[i]) f = DP_FP32;
        if (f == DP_FP32 && (double)dp_fp32(x[i]) != x[i]) f = DP_FP64;
    }
    return f;
}

/* Convolutions of a draw: x, w and bias moved, no dy. */
static void nearby_front(const dp_front *front, dp_format dtype, int draw, dp_conv y[3]) {
    for (int i = 0; i < 3; i++) {
        const dp_conv *v = front && front->conv[i] ? front->conv[i] : NULL;
        y[i] = (dp_conv){0};
        if (!v) continue;
        y[i] = *v, y[i].dy = NULL;
        y[i].cu = dp_calloc((size_t)v->Nseq + 1, sizeof *v->cu);
        memcpy(y[i].cu, v->cu, sizeof *v->cu * ((size_t)v->Nseq + 1));
        y[i].x = moved(v->x, v->T * v->D, dtype, (uint64_t)draw, 10 + (uint64_t)i);
        y[i].w = moved(v->w, (int64_t)v->D * v->W, narrowest(v->w, (int64_t)v->D * v->W), (uint64_t)draw, 13 + (uint64_t)i);
        y[i].bias = moved(v->bias, v->D, v->bias ? narrowest(v->bias, v->D) : DP_BF16, (uint64_t)draw, 16 + (uint64_t)i);
    }
}

dp_problem dp_expected_nearby(const dp_problem *p, dp_format dtype, int draw) {
    dp_problem y = *p;
    const dp_format par = dtype == DP_FP64 ? DP_FP64 : DP_FP32;
    const int64_t KV = (int64_t)p->Nseq * p->HV * p->K * p->V;
    y.cu = dp_calloc((size_t)p->Nseq + 1, sizeof *y.cu);
    memcpy(y.cu, p->cu, sizeof *y.cu * ((size_t)p->Nseq + 1));
    const struct { double **to; const double *x; int64_t n; dp_format f; } a[] = {{&y.q, p->q, p->T * p->H * p->K, dtype}, {&y.k, p->k, p->T * p->H * p->R * p->K, dtype},
        {&y.v, p->v, p->T * p->HV * p->R * p->V, dtype}, {&y.g, p->g, p->T * p->HV * dp_Kg(p), dtype}, {&y.beta, p->beta, p->T * p->HV * p->R, dtype},
        {&y.dout, p->dout, p->T * p->HV * p->V, dtype}, {&y.A_log, p->A_log, p->HV, par}, {&y.dt_bias, p->dt_bias, (int64_t)p->HV * dp_Kg(p), par}, {&y.s0, p->s0, KV, par},
        {&y.dstate, p->dstate, KV, par}};
    for (size_t i = 0; i < sizeof a / sizeof *a; i++) *a[i].to = moved(a[i].x, a[i].n, a[i].f, (uint64_t)draw, i);
    for (int64_t i = 0; p->beta_form == DP_BETA_PLAIN && i < p->T * p->HV * p->R; i++)
        if (p->beta[i] <= 2 && y.beta[i] > 2) y.beta[i] = 2;     /* a contraction stays one */
    return y;
}

/* ---- tensors of a draw --------------------------------------------------------------------------------------------------------------- */

int dp_expected_count(const dp_problem *p) {
    const double size = (double)p->T * p->HV * p->R * p->K * p->V;
    return size <= 2e6 ? 8 : size <= 2e7 ? 6 : size <= 5e7 ? 4 : 3;
}

static double **rank_list(const dp_sim *s, int i) {
    double **a[] = {s->S_in, s->M, s->H, s->dS_out, s->dM, s->dH};
    return a[i];
}

static int per_token(int field) { return field == 0 || (field >= 2 && field <= 6); }
static int heads_of(const dp_problem *p, int field) { return field == 2 || field == 3 ? p->H : p->HV; }

static int64_t step_cells(const dp_problem *p, const dp_conv *v, int kind, int i, int chunks, int backward) {
    const int heads = heads_of(p, 2 + i);
    if (!v || (kind != DP_STEP_Y && !backward) || (kind == DP_STEP_DBIAS && !v->bias)) return 0;
    return kind == DP_STEP_DW ? (int64_t)v->W * heads : kind == DP_STEP_DBIAS ? heads : (int64_t)chunks * heads;
}

static dp_draws *part_of(dp_expected *x, int i) {
    dp_draws *const list[] = {x->field, x->rank, x->step[0], x->stage};
    const int n[] = {10, 6, 3 * DP_STEP_KINDS, DP_MAX_STAGES};
    int k = 0;
    while (i >= n[k]) i -= n[k++];
    return &list[k][i];
}

void dp_expected_alloc(const dp_problem *p, const dp_front *front, int N, int chunks, int backward, int stages, dp_expected *x) {
    const int D = dp_expected_count(p);
    *x = (dp_expected){0};
    for (int i = 0; i < dp_result_nfields; i++) {
        int64_t rows, width;
        dp_result_shape(p, i, &rows, &width);
        if (!rows || (dp_result_fields[i].backward && !backward)) continue;
        x->field[i].ndraw = D, x->field[i].n = per_token(i) ? (int64_t)chunks * heads_of(p, i) : rows;
    }
    for (int i = 0; i < (backward ? 6 : 3); i++) x->rank[i].ndraw = D, x->rank[i].n = (int64_t)N * p->HV;
    for (int k = 0; k < DP_STEP_KINDS; k++)
        for (int i = 0; front && i < 3; i++) x->step[k][i].ndraw = D, x->step[k][i].n = step_cells(p, front->conv[i], k, i, chunks, backward);
    for (int i = 0; stages && i < DP_NTAPS; i++)
        if (dp_taps[i].kind != DP_PER_RANK && (backward || !dp_taps[i].backward)) x->stage[i].ndraw = D, x->stage[i].n = (int64_t)chunks * p->HV;
    for (int i = 0; i < DP_EXPECTED_PARTS; i++) {
        dp_draws *d = part_of(x, i);
        if (d->n) d->e2 = dp_doubles(D * d->n);
    }
}

int dp_expected_parts(dp_expected *x, dp_part *part) {
    int n = 0;
    for (int i = 0; i < DP_EXPECTED_PARTS; i++) {
        const dp_draws *d = part_of(x, i);
        if (d->e2) part[n++] = (dp_part){d->e2, sizeof(double) * (size_t)(d->ndraw * d->n)};
    }
    return n;
}

void dp_expected_free(dp_expected *x) {
    for (int i = 0; i < DP_EXPECTED_PARTS; i++) free(part_of(x, i)->e2);
    *x = (dp_expected){0};
}

/* |got - want|^2. Where the reference is not finite nothing is expected; a draw that overflows where it is finite allows anything. */
static double distance2(const double *got, const double *want, int64_t n) {
    double s = 0;
    for (int64_t i = 0; i < n; i++) {
        const double d = got[i] - want[i];
        if (isfinite(want[i])) s += isfinite(d) ? d * d : INFINITY;
    }
    return s;
}

/* Rows of `each` numbers of every token and head. */
static void add_tokens(const dp_sim *s, const double *got, const double *want, int heads, int64_t each, double scale2, double *e2) {
    for (int g = 0; g < s->ngroup; g++)
        for (int64_t t = s->group[g].t0; t < s->group[g].t0 + s->group[g].c; t++)
            for (int h = 0; h < heads; h++) e2[dp_cell(g, heads, h, 0)] += scale2 * distance2(got + (t * heads + h) * each, want + (t * heads + h) * each, each);
}

static void add_field(const dp_sim *s, const dp_sim *ref, int field, double scale2, double *e2) {
    const dp_problem *p = s->p;
    int64_t rows, width;
    const double *got = *dp_result_at((dp_result *)&s->out, field), *want = *dp_result_at((dp_result *)&ref->out, field);
    dp_result_shape(p, field, &rows, &width);
    if (!per_token(field)) {
        for (int64_t r = 0; r < rows; r++) e2[r] += scale2 * distance2(got + r * width, want + r * width, width);
        return;
    }
    const int heads = heads_of(p, field);
    add_tokens(s, got, want, heads, rows / (p->T * heads) * width, scale2, e2);
}

static void add_stage(const dp_sim *s, const dp_sim *ref, int stage, double scale2, double *e2) {
    const dp_problem *p = s->p;
    int64_t rows, width;
    double *got = dp_tap_value(s, stage), *want = dp_tap_value(ref, stage);
    dp_tap_rows(p, s->N, stage, &rows, &width);
    for (int g = 0; g < s->ngroup; g++)
        for (int hv = 0; hv < p->HV; hv++) {
            const int64_t z = (int64_t)g * p->HV + hv, each = rows / (p->T * p->HV) * width;
            if (dp_taps[stage].kind == DP_PER_CHUNK) e2[z] += scale2 * distance2(got + z * width, want + z * width, width);
            else for (int64_t t = s->group[g].t0; t < s->group[g].t0 + s->group[g].c; t++) e2[z] += scale2 * distance2(got + (t * p->HV + hv) * each, want + (t * p->HV + hv) * each, each);
        }
    free(got), free(want);
}

/* ---- draws --------------------------------------------------------------------------------------------------------------------------- */

/* One nearby problem in one base: the simulated ranks, and with a front the convolutions before and after them. */
typedef struct { dp_problem p; dp_conv conv[3]; dp_conv_result front[3]; dp_conv_policy pol; int N; dp_sim s; } drawn;

static void convolve(drawn *x, int i, double *dy) {              /* q, k or v; with dy: the gradients, too */
    dp_conv_result_free(&x->front[i]);
    x->conv[i].dy = dy;
    dp_conv_result_alloc(&x->front[i], &x->conv[i]);
    const dp_status st = dp_conv_ranks(&x->conv[i], x->N, x->pol, &x->front[i], NULL);
    assert(!st);                                                 /* the caller has split the problem itself this way already */
    (void)st;
}

static void drawn_open(drawn *x, const dp_problem *y, const dp_conv conv[3], dp_base base, int N) {
    double **const input[3] = {&x->p.q, &x->p.k, &x->p.v};
    dp_err e = {0};
    *x = (drawn){.p = *y, .pol = base == DP_BASE_FP64 ? DP_CONV_FP64 : base == DP_BASE_FP32 ? DP_CONV_FP32 : DP_CONV_BF16, .N = N};
    for (int i = 0; i < 3; i++) {
        x->conv[i] = conv[i];
        if (!conv[i].x) continue;
        convolve(x, i, NULL);
        *input[i] = dp_copy(x->front[i].y, conv[i].T * conv[i].D);
    }
    const dp_status st = dp_sim_new(&x->s, &x->p, base, N, DP_FAULT_NONE, &e);
    assert(!st);
    (void)st;
}

static void drawn_run(drawn *x, dp_format chain, int backward) {
    dp_sim_run(&x->s, chain, DP_MERGE_ALLGATHER, backward);
    double *const dy[3] = {x->s.out.dq, x->s.out.dk, x->s.out.dv};
    for (int i = 0; backward && i < 3; i++) if (x->conv[i].x) convolve(x, i, dy[i]);
}

static void drawn_close(drawn *x) {
    double *const input[3] = {x->p.q, x->p.k, x->p.v};
    dp_sim_free(&x->s);
    for (int i = 0; i < 3; i++) if (x->conv[i].x) free(input[i]), dp_conv_result_free(&x->front[i]);
}

static void add_front(const drawn *s, const drawn *ref, int kind, int i, double scale2, double *e2) {
    const dp_conv *v = &s->conv[i];
    const dp_conv_result *a = &s->front[i], *b = &ref->front[i];
    const int heads = heads_of(&s->p, 2 + i), width = v->D / heads;
    if (kind == DP_STEP_Y) add_tokens(&s->s, a->y, b->y, heads, width, scale2, e2);
    else if (kind == DP_STEP_DX) add_tokens(&s->s, a->dx, b->dx, heads, width, scale2, e2);
    else for (int d = 0; d < v->D; d++) {
        if (kind == DP_STEP_DBIAS) e2[d / width] += scale2 * distance2(a->dbias + d, b->dbias + d, 1);
        else for (int j = 0; j < v->W; j++) e2[j * heads + d / width] += scale2 * distance2(a->dw + d * v->W + j, b->dw + d * v->W + j, 1);
    }
}

/* Adds scale2 times the errors of one against those of ref to draw d. */
static void add_draw(const drawn *one, const drawn *other, double scale2, int d, dp_expected *x) {
    const dp_sim *s = &one->s, *ref = &other->s;
    const int64_t width[6] = {s->p->V, s->p->K, s->p->V, s->p->V, s->p->K, s->p->V};
    for (int i = 0; i < dp_result_nfields; i++)
        if (x->field[i].e2) add_field(s, ref, i, scale2, x->field[i].e2 + d * x->field[i].n);
    for (int i = 0; i < 6; i++)
        for (int64_t z = 0; x->rank[i].e2 && z < x->rank[i].n; z++)
            if (rank_list(s, i)[z] && rank_list(ref, i)[z]) x->rank[i].e2[d * x->rank[i].n + z] += scale2 * distance2(rank_list(s, i)[z], rank_list(ref, i)[z], s->p->K * width[i]);
    for (int k = 0; k < DP_STEP_KINDS; k++)
        for (int i = 0; i < 3; i++)
            if (x->step[k][i].e2) add_front(one, other, k, i, scale2, x->step[k][i].e2 + d * x->step[k][i].n);
    for (int i = 0; i < DP_NTAPS; i++)
        if (x->stage[i].e2) add_stage(s, ref, i, scale2, x->stage[i].e2 + d * x->stage[i].n);
}

void dp_expected_run(const dp_problem *p, const dp_front *front, dp_format dtype, int N, int backward, int stages, int n, const dp_base *base, const dp_format *chain, dp_expected *out) {
    int uses[DP_NBASES] = {0};
    for (int i = 0; i < n; i++) uses[base[i]] = 1, uses[DP_BASE_FP32] |= base[i] == DP_BASE_FP64;
    for (int d = 0; d < dp_expected_count(p); d++) {
        dp_problem y = dp_expected_nearby(p, dtype, d);
        dp_conv conv[3];
        drawn ref, s;
        nearby_front(front, dtype, d, conv);
        drawn_open(&ref, &y, conv, DP_BASE_FP64, N);
        drawn_run(&ref, DP_FP64, backward);
        for (int i = 0; d == 0 && i < n; i++) dp_expected_alloc(p, front, N, ref.s.ngroup, backward, stages, &out[i]);
        for (int b = 0; b < DP_NBASES; b++) {
            if (!uses[b]) continue;
            drawn_open(&s, &y, conv, (dp_base)b, N);
            if (b == DP_BASE_FP32 && uses[DP_BASE_FP64]) {
                drawn_run(&s, DP_FP32, backward);
                for (int i = 0; i < n; i++)
                    if (base[i] == DP_BASE_FP64) add_draw(&s, &ref, 0x1p-58, d, &out[i]);
            }
            for (int i = 0; i < n; i++) {
                if (base[i] != (dp_base)b || (base[i] == DP_BASE_FP64 && chain[i] == DP_FP64)) continue;
                drawn_run(&s, chain[i], backward);
                add_draw(&s, &ref, 1, d, &out[i]);
            }
            drawn_close(&s);
        }
        drawn_close(&ref);
        for (int i = 0; i < 3; i++) dp_conv_free(&conv[i]);
        dp_problem_free(&y);
    }
}
