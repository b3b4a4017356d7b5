/* Causal depthwise conv1d over packed sequences, split over simulated ranks (math.md h).
 *
 * Each rank owns L rows of x and dx and works on m + L rows: m = min(W-1, pre_num_conv_tokens) halo
 * rows come first. The halo is copied from the ranks that own its tokens, ceil(m / L) of them. Its
 * gradient is added to the same owners' rows. Only local sub-sequence 0 sees the halo. Channels
 * never meet, so blocks of channels run in parallel and results do not depend on the number of
 * threads.
 */
#include "conv.h"
#include "ref/arithmetic/elementary.h"
#include "ref/vocabulary/context.h"
#include "ref/vocabulary/formats.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- its tensors ----------------------------------------------------------------------------- */

#define INPUT(FIELD, ROLE) .name = #FIELD, .role = ROLE
#define RESULT(FIELD) .name = #FIELD
#define TOKENS .kind = DP_OF_TOKENS, .axis = {DP_AXIS_T, DP_AXIS_D}
#define TAPS .kind = DP_OF_HEADS, .axis = {DP_AXIS_D, DP_AXIS_W}
#define CHANNELS .kind = DP_OF_HEADS, .axis = {DP_AXIS_D}

const dp_tensor_field dp_conv_input_fields[DP_CONV_NINPUTS] = {
    [DP_CONV_X] = {INPUT(x, DP_ROLE_REQUIRED), TOKENS},
    [DP_CONV_WEIGHT] = {INPUT(w, DP_ROLE_REQUIRED), TAPS, .parameter = 1, .alias = "weight"},
    [DP_CONV_BIAS] = {INPUT(bias, DP_ROLE_BIAS), CHANNELS, .parameter = 1},
    [DP_CONV_DY] = {INPUT(dy, DP_ROLE_INCOMING), TOKENS, .backward = 1},
};

const dp_tensor_field dp_conv_result_fields[DP_CONV_NRESULTS] = {
    [DP_CONV_Y] = {RESULT(y), .role = DP_ROLE_OUTPUT, TOKENS},
    [DP_CONV_DX] = {RESULT(dx), .role = DP_ROLE_GRADIENT, .backward = 1, TOKENS},
    [DP_CONV_DW] = {RESULT(dw), .role = DP_ROLE_GRADIENT, .backward = 1, TAPS},
    [DP_CONV_DBIAS] = {RESULT(dbias), .role = DP_ROLE_GRADIENT, .backward = 1, CHANNELS},
};

dp_dims dp_conv_dims(const dp_conv *c) {
    return (dp_dims){
        {[DP_AXIS_T] = c->T, [DP_AXIS_NSEQ] = c->Nseq, [DP_AXIS_D] = c->D, [DP_AXIS_W] = c->W}};
}

int64_t dp_conv_count(const dp_conv *c, const dp_tensor_field *f, int64_t L) {
    dp_dims d = dp_conv_dims(c);
    int64_t shape[DP_MAX_AXES], n = 1;
    d.of[DP_AXIS_T] = L;
    for (int i = dp_field_axes(f, &d, shape); i > 0; i--)
        n *= shape[i - 1];
    return n;
}

int dp_conv_result_exists(const dp_conv *c, int result) {
    return result == DP_CONV_Y || (c->dy && (result != DP_CONV_DBIAS || c->bias));
}

void dp_conv_result_shape(const dp_conv *c, int result, int64_t *rows, int *width) {
    const dp_dims d = dp_conv_dims(c);
    int64_t shape[DP_MAX_AXES];
    const int n = dp_field_axes(&dp_conv_result_fields[result], &d, shape);
    *rows = shape[0];
    *width = n > 1 ? (int)shape[1] : 1;
}

/* ---- a rank's tokens ------------------------------------------------------------------------- */

/* Rows of D numbers of the rank's parts: from all of them to own, or back. Returns how many. */
static int64_t own_rows(const dp_conv *c, int N, int rank, double *all, double *own, int back) {
    const int parts = c->own.kind ? dp_own_parts(c->own.kind, c->T, N) : N;
    int64_t rows = 0;
    for (int i = 0; i < parts; i++) {
        const int64_t a = dp_own_cut(c->own.kind, c->T, parts, i);
        const int64_t n = dp_own_cut(c->own.kind, c->T, parts, i + 1) - a;
        if (dp_own_rank(c->own, parts, i) != rank) continue;
        double *x = all + a * c->D, *y = own + rows * c->D;
        memcpy(back ? x : y, back ? y : x, sizeof *x * (size_t)(n * c->D));
        rows += n;
    }
    return rows;
}

dp_conv dp_conv_part(const dp_conv *c, int N, int rank) {
    dp_conv part = *c;
    part.x = dp_doubles(c->T * c->D);
    part.T = own_rows(c, N, rank, c->x, part.x, 0);
    if (!c->dy) return part;
    part.dy = dp_doubles(c->T * c->D);
    own_rows(c, N, rank, c->dy, part.dy, 0);
    return part;
}

void dp_conv_part_free(dp_conv *part) {
    free(part->x);
    free(part->dy);
}

void dp_conv_place(const dp_conv *c, int N, int rank, const double *own, double *all) {
    own_rows(c, N, rank, all, (double *)own, 1);
}

typedef struct {
    dp_context ctx;
    int64_t at;         /* its first token in the arrays of the convolution */
    int64_t m;          /* halo rows */
    double *x, *dx;     /* [m+L][D] */
    double *dw, *dbias; /* [D][W], [D]: this rank's share of the sums */
} conv_rank;

typedef struct {
    const dp_conv *c;
    dp_base pol;
    int N;
    conv_rank *rank; /* [N] */
    dp_conv_result *out;
    const dp_peers *peers; /* NULL: all ranks are here */
} conv_sim;

void dp_conv_free(dp_conv *c) {
    for (int i = 0; i < DP_CONV_NINPUTS; i++) {
        free(c->in[i]);
        c->in[i] = NULL;
    }
    free(c->cu);
    c->cu = NULL;
}

static double *nans(int64_t n) {
    double *x = dp_doubles(n);
    for (int64_t i = 0; i < n; i++)
        x[i] = NAN;
    return x;
}

void dp_conv_result_alloc(dp_conv_result *r, const dp_conv *c) {
    memset(r, 0, sizeof *r);
    for (int i = 0; i < DP_CONV_NRESULTS; i++) {
        int64_t rows;
        int width;
        dp_conv_result_shape(c, i, &rows, &width);
        if (dp_conv_result_exists(c, i)) r->out[i] = nans(rows * width);
    }
}

void dp_conv_result_free(dp_conv_result *r) {
    for (int i = 0; i < DP_CONV_NRESULTS; i++)
        free(r->out[i]);
    memset(r, 0, sizeof *r);
}

/* One rounding to the format of the arithmetic. Sums and products of two floats, computed in double
 * and rounded to float, equal the float operation (53 >= 2*24 + 2). So fp32 needs no code of its
 * own. */
static inline double rnd(dp_base pol, double x) {
    return pol == DP_BASE_FP64 ? x : (double)(float)x;
}
static inline double stored(dp_base pol, double x) {
    return pol == DP_BASE_BF16 ? dp_bf16((float)x) : x;
}

/* Sigmoid in double, one rounding to the format; see conv_bound.c for what is assumed of exp. */
static inline double sigmoid(dp_base pol, double p) { return rnd(pol, 1 / (1 + dp_exp(-p))); }

/* s (1 + p (1 - s)), every operation rounded */
static inline double silu_slope(dp_base pol, double p, double s) {
    return rnd(pol, s * rnd(pol, 1 + rnd(pol, p * rnd(pol, 1 - s))));
}

/* Are the tokens of rank r (of part r) here; who has them? */
static int has(const conv_sim *s, int r) { return dp_peers_have(s->peers, s->c->own, s->N, r); }
static int process_of(const conv_sim *s, int r) {
    return dp_peers_owner(s->peers, s->c->own, s->N, r);
}

static dp_status rank_open(const conv_sim *s, int r, dp_err *e) {
    const dp_conv *c = s->c;
    conv_rank *k = &s->rank[r];
    const dp_status st = dp_context_owned(c->cu, c->Nseq, c->own.kind, s->N, r, &k->ctx, e);
    if (st) return st;
    k->m = k->ctx.pre_num_conv_tokens < c->W - 1 ? k->ctx.pre_num_conv_tokens : c->W - 1;
    k->at = s->peers ? 0 : k->ctx.a;
    for (int i = 0; i < r && s->peers; i++) /* parts of this process lie one behind the other */
        if (has(s, i)) k->at += s->rank[i].ctx.L;
    k->dw = dp_doubles((int64_t)c->D * c->W);
    k->dbias = dp_doubles(c->D);
    if (!has(s, r)) return DP_OK;
    k->x = dp_doubles((k->m + k->ctx.L) * c->D);
    k->dx = dp_doubles((k->m + k->ctx.L) * c->D);
    for (int64_t i = 0; i < k->ctx.L * c->D; i++)
        k->x[k->m * c->D + i] = rnd(s->pol, c->x[k->at * c->D + i]);
    return DP_OK;
}

static void rank_close(conv_rank *k) {
    dp_context_free(&k->ctx);
    DP_FREE(k->x, k->dx, k->dw, k->dbias);
}

/* The rank that owns token t, and the row there. */
static conv_rank *owner(const conv_sim *s, int64_t t, int64_t *row) {
    conv_rank *k = &s->rank[dp_own_part_of(s->c->own.kind, s->c->T, s->N, t)];
    *row = k->m + t - k->ctx.a;
    return k;
}

static void halo_gather(const conv_sim *s, conv_rank *k, int d0, int d1) {
    const int D = s->c->D;
    for (int64_t i = 0; i < k->m; i++) {
        int64_t row;
        const conv_rank *from = owner(s, k->ctx.a - k->m + i, &row);
        for (int d = d0; d < d1; d++)
            k->x[i * D + d] = from->x[row * D + d];
    }
}

static void halo_return(const conv_sim *s, const conv_rank *k, int d0, int d1) {
    const int D = s->c->D;
    for (int64_t i = 0; i < k->m; i++) {
        int64_t row;
        conv_rank *to = owner(s, k->ctx.a - k->m + i, &row);
        for (int d = d0; d < d1; d++)
            to->dx[row * D + d] = rnd(s->pol, to->dx[row * D + d] + k->dx[i * D + d]);
    }
}

static double pre_at(const conv_sim *s, const conv_rank *k, int64_t lo, int64_t i, int d) {
    const dp_conv *c = s->c;
    double p = c->bias ? rnd(s->pol, c->bias[d]) : 0;
    for (int j = 0; j < c->W; j++) {
        const int64_t from = i - (c->W - 1) + j;
        if (from >= lo)
            p = rnd(s->pol,
                    p + rnd(s->pol, rnd(s->pol, c->w[d * c->W + j]) * k->x[from * c->D + d]));
    }
    return p;
}

static void scatter(const conv_sim *s, conv_rank *k, int64_t lo, int64_t i, int d, double dpre) {
    const int D = s->c->D, W = s->c->W;
    k->dbias[d] = rnd(s->pol, k->dbias[d] + dpre);
    for (int j = 0; j < W; j++) {
        const int64_t from = i - (W - 1) + j;
        if (from < lo) continue;
        double *dx = &k->dx[from * D + d], *dw = &k->dw[d * W + j];
        *dx = rnd(s->pol, *dx + rnd(s->pol, rnd(s->pol, s->c->w[d * W + j]) * dpre));
        *dw = rnd(s->pol, *dw + rnd(s->pol, dpre * k->x[from * D + d]));
    }
}

/* One output, and what it sends back. lo: first row of its sequence that this rank can see. */
static void element(const conv_sim *s, conv_rank *k, int64_t lo, int64_t i, int d) {
    const dp_conv *c = s->c;
    const int64_t at = (k->at - k->m + i) * c->D + d;
    const double p = pre_at(s, k, lo, i, d), sig = c->silu ? sigmoid(s->pol, p) : 1;
    s->out->y[at] = stored(s->pol, c->silu ? rnd(s->pol, p * sig) : p);
    if (!c->dy) return;
    const double dy = rnd(s->pol, c->dy[at]);
    scatter(s, k, lo, i, d, c->silu ? rnd(s->pol, dy * silu_slope(s->pol, p, sig)) : dy);
}

static void rank_run(const conv_sim *s, conv_rank *k, int d0, int d1) {
    for (int q = 0; q < k->ctx.nlocal; q++) {
        const int64_t begin = k->m + k->ctx.local_cu[q], end = k->m + k->ctx.local_cu[q + 1];
        const int64_t lo = q ? begin : 0; /* the halo belongs to sub-sequence 0 alone */
        for (int64_t i = begin; i < end; i++)
            for (int d = d0; d < d1; d++)
                element(s, k, lo, i, d);
    }
}

static void collect(const conv_sim *s, const conv_rank *k, int d0, int d1) {
    const int D = s->c->D;
    for (int64_t t = 0; t < k->ctx.L; t++)
        for (int d = d0; d < d1; d++)
            s->out->dx[(k->at + t) * D + d] = stored(s->pol, k->dx[(k->m + t) * D + d]);
}

/* Parts of one owner are added to the first of them, and left out then: 0 of one that is not. */
static int add_part(const conv_sim *s, int i, int d0, int d1) {
    const dp_owners o = s->c->own;
    const int W = s->c->W;
    int first = 0;
    while (o.kind && first < i && dp_own_sum(o, s->N, first) != dp_own_sum(o, s->N, i))
        first++;
    if (!o.kind || first == i) return 1;
    const conv_rank *from = &s->rank[i];
    conv_rank *to = &s->rank[first];
    for (int z = d0 * W; z < d1 * W; z++)
        to->dw[z] = rnd(s->pol, to->dw[z] + from->dw[z]);
    for (int d = d0; d < d1; d++)
        to->dbias[d] = rnd(s->pol, to->dbias[d] + from->dbias[d]);
    return 0;
}

static void add_sums(const conv_sim *s, const conv_rank *k, int d0, int d1) {
    const int W = s->c->W;
    for (int i = d0 * W; i < d1 * W; i++)
        s->out->dw[i] = rnd(s->pol, k->ctx.rank ? s->out->dw[i] + k->dw[i] : k->dw[i]);
    if (!s->out->dbias) return;
    for (int d = d0; d < d1; d++)
        s->out->dbias[d] = rnd(s->pol, k->ctx.rank ? s->out->dbias[d] + k->dbias[d] : k->dbias[d]);
}

static void run_channels(const conv_sim *s, int d0, int d1) {
    for (int r = 0; r < s->N; r++)
        halo_gather(s, &s->rank[r], d0, d1);
    for (int r = 0; r < s->N; r++)
        rank_run(s, &s->rank[r], d0, d1);
    if (!s->c->dy) return;
    for (int r = 0; r < s->N; r++)
        halo_return(s, &s->rank[r], d0, d1);
    unsigned char own[s->N]; /* sums of their own */
    for (int r = 0; r < s->N; r++)
        own[r] = (unsigned char)add_part(s, r, d0, d1);
    for (int r = 0; r < s->N; r++) {
        collect(s, &s->rank[r], d0, d1);
        if (own[r]) add_sums(s, &s->rank[r], d0, d1);
    }
}

/* ---- ranks that are processes ---------------------------------------------------------------- */

/* Rows of rank `of`'s tokens that lie in the halo of rank `to`. */
static int64_t shared(const conv_sim *s, int of, int to, int64_t *first) {
    const conv_rank *a = &s->rank[of], *b = &s->rank[to];
    const int64_t from = b->ctx.a - b->m > a->ctx.a ? b->ctx.a - b->m : a->ctx.a;
    const int64_t end = b->ctx.a < a->ctx.b ? b->ctx.a : a->ctx.b;
    *first = from;
    return of < to && end > from ? end - from : 0;
}

/* The row of token t in rank `of`'s x (back: dx), which begins with the halo of m rows. */
static double *rows_here(const conv_sim *s, int of, int64_t t, int back) {
    conv_rank *k = &s->rank[of];
    return (back ? k->dx : k->x) + (k->m + t - k->ctx.a) * s->c->D;
}

/* Both ends go through the halos in the same order: by who gets it, then by who gives it. */
static void halo_by_messages(const conv_sim *s) {
    const dp_peers *p = s->peers;
    const int D = s->c->D;
    int64_t t;
    for (int z = 0; z < s->N * s->N; z++) {
        const int to = z / s->N, of = z % s->N;
        const int64_t n = shared(s, of, to, &t);
        if (!n || !has(s, of)) continue;
        const double *x = rows_here(s, of, t, 0);
        if (has(s, to))
            memcpy(rows_here(s, to, t, 0), x, sizeof *x * (size_t)(n * D));
        else
            p->send(p->who, process_of(s, to), x, n * D);
    }
    for (int z = 0; z < s->N * s->N; z++) {
        const int to = z / s->N, of = z % s->N;
        const int64_t n = shared(s, of, to, &t);
        if (n && has(s, to) && !has(s, of))
            p->receive(p->who, process_of(s, of), rows_here(s, to, t, 0), n * D, "the halo");
    }
}

/* In the order of the ranks that send it, as halo_return. */
static void gradient_by_messages(const conv_sim *s) {
    const dp_peers *p = s->peers;
    const int D = s->c->D;
    int64_t t;
    for (int z = 0; z < s->N * s->N; z++) {
        const int of = z / s->N, to = z % s->N;
        const int64_t n = shared(s, of, to, &t);
        if (n && has(s, to) && !has(s, of))
            p->send(p->who, process_of(s, of), rows_here(s, to, t, 1), n * D);
    }
    for (int z = 0; z < s->N * s->N; z++) {
        const int of = z / s->N, to = z % s->N;
        const int64_t n = shared(s, of, to, &t);
        if (!n || !has(s, of)) continue;
        DP_OWN double *got = dp_doubles(n * D);
        double *dx = rows_here(s, of, t, 1);
        if (!has(s, to))
            p->receive(p->who, process_of(s, to), got, n * D, "the gradient of the halo");
        else
            memcpy(got, rows_here(s, to, t, 1), sizeof *got * (size_t)(n * D));
        for (int64_t i = 0; i < n * D; i++)
            dx[i] = rnd(s->pol, dx[i] + got[i]);
    }
}

static void sums_by_messages(const conv_sim *s) {
    const int64_t n = (int64_t)s->c->D * s->c->W, D = s->c->D, all = n + D;
    DP_OWN double *x = dp_doubles(s->N * all);
    for (int r = 0; r < s->N; r++)
        if (has(s, r)) {
            memcpy(x + r * all, s->rank[r].dw, sizeof *x * (size_t)n);
            memcpy(x + r * all + n, s->rank[r].dbias, sizeof *x * (size_t)D);
        }
    dp_peers_gather(s->peers, s->c->own, s->N, x, all, "dw and dbias");
    /* NOLINTNEXTLINE(*VLASize): N is 1 to 4,096 */
    unsigned char own[s->N]; /* sums of their own */
    for (int r = 0; r < s->N; r++) {
        memcpy(s->rank[r].dw, x + r * all, sizeof *x * (size_t)n);
        memcpy(s->rank[r].dbias, x + r * all + n, sizeof *x * (size_t)D);
        own[r] = (unsigned char)add_part(s, r, 0, (int)D);
    }
    for (int r = 0; r < s->N; r++)
        if (own[r]) add_sums(s, &s->rank[r], 0, (int)D);
}

static void run_here(const conv_sim *s) {
    const int D = s->c->D;
    halo_by_messages(s);
#pragma omp parallel for schedule(static)
    for (int d = 0; d < D; d += 16)
        for (int r = 0; r < s->N; r++)
            if (has(s, r)) rank_run(s, &s->rank[r], d, d + 16 < D ? d + 16 : D);
    if (!s->c->dy) return;
    gradient_by_messages(s);
    for (int r = 0; r < s->N; r++)
        if (has(s, r)) collect(s, &s->rank[r], 0, D);
    sums_by_messages(s);
}

/* ---- all of it ------------------------------------------------------------------------------- */

static void run_all(const conv_sim *s) {
    const int D = s->c->D;
#pragma omp parallel for schedule(static)
    for (int d = 0; d < D; d += 16)
        run_channels(s, d, d + 16 < D ? d + 16 : D);
}

static dp_status run(const dp_conv *c, int N, const dp_peers *peers, dp_base pol, dp_conv_result *r,
                     dp_err *e) {
    conv_sim s = {c, pol, N, dp_calloc(N > 0 ? (size_t)N : 1, sizeof(conv_rank)), r, peers};
    dp_status st = N > 0 ? DP_OK : dp_fail(e, DP_EINPUT, "ranks = %d: must be at least 1", N);
    for (int i = 0; i < N && !st; i++)
        st = rank_open(&s, i, e);
    if (!st) (peers ? run_here : run_all)(&s);
    for (int i = 0; i < N; i++)
        rank_close(&s.rank[i]);
    free(s.rank);
    return st;
}

dp_status dp_conv_ranks(const dp_conv *c, int N, dp_base pol, dp_conv_result *r, dp_err *e) {
    return run(c, N, NULL, pol, r, e);
}

dp_status dp_conv_rank(const dp_conv *part, const dp_peers *peers, dp_base pol, dp_conv_result *r,
                       dp_err *e) {
    const int64_t T = part->cu[part->Nseq];
    const int N = part->own.kind ? dp_own_parts(part->own.kind, T, part->own.ranks) : peers->N;
    return run(part, N, peers, pol, r, e);
}

void dp_conv_run(const dp_conv *c, dp_conv_result *r) {
    const dp_status st = dp_conv_ranks(c, 1, DP_BASE_FP64, r, NULL);
    assert(st == DP_OK);
    (void)st;
}

double *dp_conv_by_tap(const dp_conv *c, const double *dw) {
    double *y = dp_doubles((int64_t)c->D * c->W);
    for (int d = 0; d < c->D; d++)
        for (int j = 0; j < c->W; j++)
            y[(int64_t)j * c->D + d] = dw[(int64_t)d * c->W + j];
    return y;
}
