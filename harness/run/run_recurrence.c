/* gdn, kda, mkda, step: truth, reference, simulated ranks, bounds, judgement. */
#include "harness/bound/error_bound.h"
#include "harness/record/run.h"
#include "harness/verdict/expectations.h"
#include "harness/verdict/row_map.h"
#include "harness/verdict/source.h"
#include "harness/verdict/stage_bound.h"
#include "harness/verdict/sums.h"
#include "judge.h"
#include "ref/arithmetic/elementary.h"
#include "ref/arithmetic/mm.h"
#include "ref/truth/truth.h"
#include "step.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- which tokens the truth keeps states at -------------------------------------------------- */

static int compare_i64(const void *a, const void *b) {
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

int64_t *dp_case_cuts(const dp_case *c, int *n) {
    const dp_problem *p = &c->p;
    int cap = 64, m = 0;
    for (int i = 0; i < c->nranks; i++)
        cap += c->ranks[i] + 64;
    int64_t *x = dp_calloc((size_t)cap, sizeof *x);
    for (int i = 0; i < c->nranks; i++) {
        const int N = c->ranks[i];
        const int64_t L = p->T / N, a = N >= 3 ? L : 0;
        if (p->T % N || N == 1) continue;
        for (int r = 1; r < N; r++)
            x[m++] = r * L;
        if (p->Nseq == 1 && p->HV == 1)
            for (int64_t s = DP_CHUNK; s < L; s *= 2)
                x[m++] = a + s; /* prefixes of that rank's chain */
    }
    qsort(x, (size_t)m, sizeof *x, compare_i64);
    *n = 0;
    for (int i = 0; i < m; i++)
        if (x[i] > 0 && x[i] < p->T && (*n == 0 || x[i] != x[*n - 1])) x[(*n)++] = x[i];
    return x;
}

/* ---- places ---------------------------------------------------------------------------------- */

typedef struct {
    const dp_problem *p;
    int64_t L;
    int field;
    const int *chunk_of;
} places; /* chunk_of [T]: index of the chunk that holds a token */

static int sequence_of(const dp_problem *p, int64_t t) {
    int i = 0;
    while (i < p->Nseq - 1 && p->cu[i + 1] <= t)
        i++;
    return i;
}

static void place_token_row(const void *ctx, int64_t row, dp_place *at) {
    const places *x = ctx;
    const dp_problem *p = x->p;
    const int heads = dp_result_heads(p, x->field), per = dp_result_rows_per_token(p, x->field);
    at->token = row / ((int64_t)heads * per);
    at->head = (int)(row / per % heads);
    at->rank = (int)(at->token / x->L);
    at->sequence = sequence_of(p, at->token);
    at->chunk = x->chunk_of[at->token];
}

static void place_state_row(const void *ctx, int64_t row, dp_place *at) { /* [Nseq][HV] */
    const places *x = ctx;
    const dp_problem *p = x->p;
    const int seq = (int)(row / p->HV);
    int64_t t = x->field == DP_RESULT_FINAL_STATE ? p->cu[seq + 1] - 1 : p->cu[seq];
    if (t < 0) t = 0;
    if (t >= p->T) t = p->T - 1;
    *at = (dp_place){.rank = (int)(t / x->L),
                     .head = (int)(row % p->HV),
                     .sequence = seq,
                     .chunk = -1,
                     .token = -1};
}

static void place_head_row(const void *ctx, int64_t row, dp_place *at) {
    (void)ctx;
    *at = (dp_place){.rank = 0, .head = (int)row, .sequence = -1, .chunk = -1, .token = -1};
}

static void place_rank_row(const void *ctx, int64_t row,
                           dp_place *at) { /* list of (rank, head) that exist */
    const int *z = ctx;
    *at = (dp_place){
        .rank = z[row] >> 16, .head = z[row] & 0xffff, .sequence = -1, .chunk = -1, .token = -1};
}

/* ---- judging one run ------------------------------------------------------------------------- */

typedef struct {
    const dp_case *c;
    const dp_truth *truth;
    int N;
    dp_truth_rank *at; /* [N*HV] */
    double **traj;     /* [DP_MAX_TRAJ] true M over 2^i chunks of the recorded rank; NULL: none */
    dp_windows windows;
    dp_sim *ref; /* the fp64 reference, run when the first bound that is not cached asks for it */
    int have_ref;
    dp_error_bound_base
        fp64; /* worst case of that reference itself, for stages, which have no other truth */
    int have_fp64;
    double radius;
    dp_truth_note note;
    dp_condition cond;
    dp_expectations *expect; /* of the case, on any number of ranks */
    const dp_step_run *step; /* op step: what the subject's convolutions made of the inputs; NULL:
                                it gets the problem as it is */
} split;

static void note_truth(const split *sp, dp_run *r) {
    r->truth_kind = dp_truth_kind_names[sp->truth->kind];
    r->truth_bits = sp->truth->bits;
    r->truth_cached = sp->note.cached;
    r->truth_device = sp->note.device;
    r->truth_audit = sp->note.audit;
    r->truth_radius = sp->radius;
    r->cond = sp->cond;
}

static void judge_one(const split *sp, const dp_compare_in *in, dp_run *run) {
    dp_judgement *j = &run->tensor[run->ntensor++];
    dp_source s;
    dp_compare(in, j);
    if (!run->exact || j->rel_fro == 0) return;
    dp_source_find(&sp->c->p, in, &s);
    memcpy(j->source, s.says, sizeof s.says);
}

static dp_claim claim_of(const dp_run *r) {
    return (dp_claim){r->ranks, r->design, r->chain, r->undeclared, 0};
}

static const dp_expected *expected_of(const split *sp, const dp_run *r) {
    const dp_claim claim = claim_of(r);
    return dp_expectations_find(sp->expect, &claim, r->set);
}

/* Who computes, and how much of what draws cannot show is his (reports/verdicts.md): the pipeline
 * that was drawn; the same with other orders of summation; kernels that declare their design;
 * others. */
typedef enum { DRAWN, OTHER_SUMS, DECLARED, UNDECLARED, NWHO } who;
static const dp_allowance ALLOWANCE[NWHO][2] = {
    /* arithmetic fp32 or fp64; bf16 */
    [DRAWN] = {{1.2, 0.1}, {1.2, 0.1}},
    [OTHER_SUMS] = {{1.5, 0.15}, {1.4, 0.1}},
    [DECLARED] = {{2, 0.3}, {1.4, 0.15}},
    [UNDECLARED] = {{4, 0.6}, {2, 0.3}},
};

static dp_allowance allowance_of(const dp_run *r) {
    const int drawn = r->backend == DP_BACKEND_SIM && r->base != DP_BASE_FP64;
    const int foreign =
        r->other_design || r->backend == DP_BACKEND_LAPACK; /* its solves, too, go another way */
    const who w = r->undeclared ? UNDECLARED : foreign ? DECLARED : drawn ? DRAWN : OTHER_SUMS;
    return ALLOWANCE[w][r->base == DP_BASE_BF16];
}

/* Are the bounds of error_bound.h those of this design? Chunks may have any length; outputs that
 * leave in a wider format than the base's are within them; operands of scores may carry their decay
 * in bf16. */
static int bounds_are_derived(const dp_design *design) {
    const dp_design plain = dp_design_of(design->base);
    dp_design d = *design;
    d.chunk = plain.chunk;
    if (design->base == DP_BASE_BF16) d.gated = plain.gated;
    if (d.out == DP_FP32) d.out = plain.out;
    return design->chunk && dp_design_same(&d, &plain);
}

static int bounded(const dp_run *r) { return !r->undeclared && bounds_are_derived(&r->design); }

static double arithmetic(dp_base b) { return b == DP_BASE_FP64 ? 0x1p-53 : 0x1p-24; }
/* What a result held in a coarser format (u: its spacing at 1) adds to every error: the rms of one
 * rounding. That is known, so nobody is allowed more of it than the pipeline that was drawn: limits
 * grow with the allowance, this does not. */
static double storing(const dp_run *run, double u) {
    return u / sqrt(12) * ALLOWANCE[DRAWN][0].factor / allowance_of(run).factor;
}

static double smallest(dp_base b, int K) { return K * (b == DP_BASE_FP64 ? 0x1p-1022 : 0x1p-126); }

static dp_judgement *judgement_of(const dp_run *run, const char *name) {
    for (int i = 0; i < run->ntensor; i++)
        if (!strcmp(run->tensor[i].name, name)) return &run->tensor[i];
    return NULL;
}

static void judge_sums(const split *sp, const dp_result *result, const dp_run *run) {
    const dp_sums_in in = {&sp->c->p,
                           result,
                           arithmetic(run->base),
                           judgement_of(run, "dg"),
                           judgement_of(run, "dA_log"),
                           judgement_of(run, "ddt_bias")};
    dp_sums_judge(&in);
}

/* u, tiny [fields]: formats that results are held in, coarser than the base's own; NULL: none. */
static void judge_fields(const split *sp, dp_result *result, const dp_error_bound *b,
                         const double *u, const double *tiny, dp_run *run) {
    const dp_problem *p = &sp->c->p;
    const dp_expected *x = expected_of(sp, run);
    for (int i = 0; i < DP_NRESULTS; i++) {
        int64_t rows, width;
        dp_result_shape(p, i, &rows, &width);
        const dp_ball *want = &sp->truth->field[i];
        double *got = *dp_result_at(result, i);
        if (!rows || !got || !want->rows) continue;
        assert(want->rows == rows && want->width == width);
        places pl = {.p = p, .L = p->T / sp->N, .field = i, .chunk_of = sp->windows.window_of};
        const dp_result_kind kind = dp_result_fields[i].kind;
        const int state = kind == DP_OF_SEQUENCES, head = kind == DP_OF_HEADS;
        const dp_compare_in in = {.name = dp_result_fields[i].name,
                                  .N = sp->N,
                                  .heads = dp_result_heads(p, i),
                                  .rows = rows,
                                  .width = width,
                                  .got = got,
                                  .want = want->hi,
                                  .want_lo = want->lo,
                                  .rad = want->rad,
                                  .bound = b->row[i],
                                  .place = state  ? place_state_row
                                           : head ? place_head_row
                                                  : place_token_row,
                                  .ctx = &pl,
                                  .tokens = state || head ? 0 : p->T,
                                  .split = state ? p->K : 1,
                                  .draws = x && x->field[i].err2 ? &x->field[i] : NULL,
                                  .allowance = allowance_of(run),
                                  .bound_shown = !bounded(run),
                                  .unit =
                                      dp_hypot(arithmetic(run->base), u ? storing(run, u[i]) : 0),
                                  .tiny = dp_hypot(smallest(run->base, p->K), tiny ? tiny[i] : 0)};
        judge_one(sp, &in, run);
    }
    if (!run->exact) judge_sums(sp, result, run);
}

/* One per-rank tensor (S_in, M, ...; which: in dp_expected): collects the (rank, head) pairs that
 * have it. Offsets are into dp_truth_rank. all: a pair without a value counts as NaN; else it is
 * left out (kernels form M only where it can matter, math.md g.1). */
static void judge_rank_tensor(const split *sp, int all, const char *name, int which, double **got,
                              size_t has, size_t value, size_t rad, int64_t width,
                              const double *bound, double u, double tiny, dp_run *run) {
    const dp_expected *x = expected_of(sp, run);
    const int HV = sp->c->p.HV, nr = sp->N * HV;
    int n = 0, *place = dp_calloc((size_t)nr, sizeof *place);
    double *g = dp_doubles(nr * width), *w = dp_doubles(nr * width), *r = dp_doubles(nr),
           *b = dp_doubles(nr);
    for (int i = 0; i < nr; i++) {
        const char *t = (const char *)&sp->at[i];
        if (!*(const int *)(t + has) || (!all && !got[i])) continue;
        if (got[i])
            memcpy(g + n * width, got[i], sizeof(double) * (size_t)width);
        else
            for (int64_t x = 0; x < width; x++)
                g[n * width + x] = NAN;
        memcpy(w + n * width, *(double *const *)(t + value), sizeof(double) * (size_t)width);
        r[n] = *(const double *)(t + rad) +
               0x1p-53 *
                   dp_norm_fro(width, w + n * width); /* the truth comes rounded to double here */
        b[n] = bound[i];
        place[n++] = (i / HV) << 16 | i % HV;
    }
    if (n) {
        int *row = dp_calloc((size_t)n, sizeof *row);
        for (int i = 0; i < n; i++)
            row[i] = (place[i] >> 16) * HV + (place[i] & 0xffff);
        dp_draws draws = {0};
        if (x && x->rank[which].err2) draws = dp_draws_of_rows(&x->rank[which], n, row);
        const dp_compare_in in = {.name = name,
                                  .N = sp->N,
                                  .heads = HV,
                                  .rows = n,
                                  .width = width,
                                  .got = g,
                                  .want = w,
                                  .rad = r,
                                  .bound = b,
                                  .place = place_rank_row,
                                  .ctx = place,
                                  .split = sp->c->p.K,
                                  .draws = draws.err2 ? &draws : NULL,
                                  .allowance = allowance_of(run),
                                  .bound_shown = !bounded(run),
                                  .unit = dp_hypot(arithmetic(run->base), storing(run, u)),
                                  .tiny = dp_hypot(smallest(run->base, sp->c->p.K), tiny)};
        judge_one(sp, &in, run);
        dp_draws_free(&draws);
        free(row);
    }
    free(place);
    free(g);
    free(w);
    free(r);
    free(b);
}

enum { AT_S_in, AT_M, AT_H, AT_dS_out, AT_dM, AT_dH }; /* as in dp_expected */
#define RANK_TENSOR(ALL, HAS, FIELD, WIDTH)                                                        \
    judge_rank_tensor(sp, ALL, #FIELD, AT_##FIELD, s->FIELD, offsetof(dp_truth_rank, HAS),         \
                      offsetof(dp_truth_rank, FIELD), offsetof(dp_truth_rank, FIELD##_rad), WIDTH, \
                      b->FIELD, 0, 0, run)

static double effect(const double *dM, const double *S, int K, int V) { /* |dM S|_F / |S|_F */
    double *x = dp_doubles((int64_t)K * V);
    dp_mm(DP_FP64, 0, 0, K, V, K, dM, S, x);
    const double e = dp_norm_fro((int64_t)K * V, x), n = dp_norm_fro((int64_t)K * V, S);
    free(x);
    return n > 0 ? e / n : NAN;
}

static void add_point(const split *sp, dp_run *run, int rank, int chunks, const double *got,
                      const double *want, double bound) {
    const dp_problem *p = &sp->c->p;
    const int64_t KK = (int64_t)p->K * p->K;
    double *d = dp_doubles(KK);
    for (int64_t i = 0; i < KK; i++)
        d[i] = got[i] - want[i];
    const double err = dp_norm_fro(KK, d), norm = dp_norm_fro(KK, want);
    const dp_truth_rank *t = &sp->at[rank * p->HV];
    run->point = realloc(run->point, sizeof *run->point * (size_t)(run->npoint + 1));
    if (!run->point) abort();
    run->point[run->npoint++] =
        (dp_chain_point){.rank = rank,
                         .chunks = chunks,
                         .rel = norm > 0 ? err / norm : NAN,
                         .abs = err,
                         .norm = norm,
                         .bound = norm > 0 ? bound / norm : NAN,
                         .effect = t->has_S_in ? effect(d, t->S_in, p->K, p->V) : NAN};
    free(d);
}

/* M of every rank, and its growth along the prefixes of one rank (problems of one head). */
static void chain_points(const split *sp, const dp_sim *s, const dp_error_bound *b, dp_run *run) {
    if (s->p->HV != 1) return;
    if (sp->traj)
        for (int i = 0; i < s->ntraj; i++)
            if (sp->traj[i])
                add_point(sp, run, s->traj_rank, s->traj_chunks[i], s->traj[i], sp->traj[i],
                          b->traj[i]);
    for (int r = 0; r < sp->N; r++) {
        const dp_context *c = &s->ctx[r];
        if (!sp->at[r].has_MH || !s->M[r]) continue;
        const int chunks = s->first[r][c->nlocal] - s->first[r][c->nlocal - 1];
        int have = 0;
        for (int i = 0; i < run->npoint; i++)
            have |= run->point[i].rank == r && run->point[i].chunks == chunks;
        if (!have) add_point(sp, run, r, chunks, s->M[r], sp->at[r].M, b->M[r]);
    }
}

static double largest_radius(const dp_truth *t) {
    double top = 0;
    for (int i = 0; i < DP_NRESULTS; i++) {
        const dp_ball *b = &t->field[i];
        if (!b->rows) continue;
        const double n = dp_norm_fro(b->rows * b->width, b->hi), r = dp_norm_fro(b->rows, b->rad);
        if (n > 0 && !(r / n <= top)) top = r / n;
    }
    return top;
}

static void judge_step(const split *sp, const dp_result *out, const dp_error_bound *b,
                       dp_run *run) {
    const dp_step_expected x = {expected_of(sp, run), sp->windows.window_of, allowance_of(run),
                                arithmetic(run->base), smallest(run->base, sp->c->p.K)};
    dp_err e = {0};
    const dp_status st =
        sp->step ? dp_step_judge(sp->c, sp->truth, sp->step, out, b, &x, run, &e) : DP_OK;
    if (st) {
        fprintf(stderr, "deltaproof: %s: %s\n", sp->c->name, e.msg);
        exit(2);
    }
    /* the convolution ran before: a device that died since */
}

static void judge(const split *sp, dp_sim *s, const dp_error_bound *b, dp_run *run) {
    const dp_problem *p = s->p;
    const int64_t KK = (int64_t)p->K * p->K, KV = (int64_t)p->K * p->V;
    run->tensor = dp_calloc((size_t)DP_NRESULTS + 6 + DP_STEP_TENSORS, sizeof *run->tensor);
    judge_fields(sp, &s->out, b, NULL, NULL, run);
    judge_step(sp, &s->out, b, run);
    RANK_TENSOR(1, has_S_in, S_in, KV);
    RANK_TENSOR(1, has_MH, M, KK);
    RANK_TENSOR(1, has_MH, H, KV);
    if (sp->truth->backward) {
        RANK_TENSOR(1, has_dS_out, dS_out, KV);
        RANK_TENSOR(1, has_dMH, dM, KK);
        RANK_TENSOR(1, has_dMH, dH, KV);
    }
    chain_points(sp, s, b, run);
}

/* ---- one split over N ranks ------------------------------------------------------------------ */

/* ranks: also what each rank must see, which takes a truth with states at the rank boundaries. */
static dp_status split_truth(split *sp, int ranks, dp_err *e) {
    const dp_problem *p = &sp->c->p;
    const int nr = sp->N * p->HV;
    if (ranks) sp->at = dp_calloc((size_t)nr, sizeof *sp->at);
    for (int r = 0; r < sp->N; r++) {
        dp_context c;
        const dp_status st = dp_context_build(p->cu, p->Nseq, sp->N, r, &c, e);
        if (st) return st;
        for (int hv = 0; ranks && hv < p->HV; hv++)
            dp_truth_at_rank(sp->truth, p, &c, hv, &sp->at[r * p->HV + hv]);
        dp_context_free(&c);
    }
    sp->windows = dp_windows_of(p, sp->N);
    return DP_OK;
}

/* M over the first 2^i chunks of the rank that dp_sim records, from the truth's segments (products
 * in fp64 of truths: good to 1e-15); sp->traj[i] is NULL where the truth keeps no such state. */
static void split_prefixes(split *sp) {
    const dp_truth *t = sp->truth;
    const dp_problem *p = &sp->c->p;
    if (p->HV != 1 || p->Nseq != 1 || !t->M_seg.rows) return;
    const int64_t KK = (int64_t)p->K * p->K, L = p->T / sp->N, a = sp->N >= 3 ? L : 0;
    double *P = NULL, *Q = dp_doubles(KK);
    sp->traj = dp_calloc(DP_MAX_TRAJ, sizeof *sp->traj);
    for (int i = 0; i + 1 < t->nmark; i++) {
        if (t->mark[i] < a || t->mark[i] >= a + L) continue;
        if (!P)
            P = dp_copy(t->M_seg.hi + (int64_t)i * KK, KK);
        else {
            dp_mm(DP_FP64, 0, 0, p->K, p->K, p->K, t->M_seg.hi + (int64_t)i * KK, P, Q);
            double *z = P;
            P = Q;
            Q = z;
        }
        for (int x = 0; x < DP_MAX_TRAJ; x++)
            if (a + ((int64_t)DP_CHUNK << x) == t->mark[i + 1]) sp->traj[x] = dp_copy(P, KK);
    }
    free(P);
    free(Q);
}

static void split_free(split *sp) {
    for (int i = 0; sp->at && i < sp->N * sp->c->p.HV; i++)
        dp_truth_rank_free(&sp->at[i]);
    for (int i = 0; sp->traj && i < DP_MAX_TRAJ; i++)
        free(sp->traj[i]);
    if (sp->have_fp64) dp_error_bound_base_free(&sp->fp64);
    dp_windows_free(&sp->windows);
    free(sp->at);
    free(sp->traj);
}

/* ---- bounds, cached -------------------------------------------------------------------------- */

typedef struct {
    int ready;
    dp_error_bound_base sound, probable;
} budget_bases;

static void reference(split *sp) {
    if (sp->have_ref) return;
    dp_err e = {0};
    const dp_status st = dp_sim_new(sp->ref, &sp->c->p, DP_BASE_FP64, sp->N, DP_FAULT_NONE, &e);
    assert(!st);
    (void)st;
    dp_sim_run(sp->ref, DP_FP64, DP_MERGE_ALLGATHER, sp->c->backward);
    sp->have_ref = 1;
}

/* What bounds follow from besides the problem. */
static void *with_given(const void *what, size_t n, const dp_problem *p, const dp_given_error *g,
                        size_t *size) {
    const double *part[] = {g ? g->q : NULL, g ? g->k : NULL, g ? g->v : NULL};
    const size_t len[] = {sizeof(double) * (size_t)(p->T * p->H * p->K),
                          sizeof(double) * (size_t)(p->T * p->H * p->R * p->K),
                          sizeof(double) * (size_t)(p->T * p->HV * p->R * p->V)};
    char *all = dp_calloc(n + len[0] + len[1] + len[2] + 3, 1);
    memcpy(all, what, n);
    *size = n;
    for (int i = 0; g && i < 3; i++) {
        all[(*size)++] = part[i] != NULL;
        if (part[i]) {
            memcpy(all + *size, part[i], len[i]);
            *size += len[i];
        }
    }
    return all;
}

/* The same pipeline in chunks of another length: with a reference of its own. */
static void budget_of_chunks(split *sp, const dp_design *design, dp_format chain,
                             const dp_given_error *given, dp_error_bound *out) {
    const int backward = sp->c->backward;
    dp_design exact = dp_design_of(DP_BASE_FP64);
    dp_error_bound worst;
    dp_sim ref;
    exact.chunk = design->chunk;
    const dp_status st = dp_sim_new_design(&ref, &sp->c->p, &exact, sp->N, NULL);
    assert(!st);
    (void)st;
    dp_sim_run(&ref, DP_FP64, DP_MERGE_ALLGATHER, backward);
    for (int p = 2; p >= 1; p--) {
        dp_error_bound_base w;
        dp_error_bound_base_given(&w, &ref, design, p, backward, given);
        dp_error_bound_run(&w, chain, backward, p == 2 ? out : &worst);
        dp_error_bound_base_free(&w);
    }
    dp_error_bound_min(&sp->c->p, sp->N, out, &worst);
    dp_error_bound_free(&worst);
    dp_sim_free(&ref);
}

static void budget(const dp_run_options *o, split *sp, const dp_design *design, dp_format chain,
                   budget_bases *w, dp_error_bound *out) {
    const dp_design plain = dp_design_of(design->base);
    const dp_case *c = sp->c;
    if (!bounds_are_derived(design)) design = &plain;
    const int32_t what[] = {sp->N, design->base, chain, c->backward, design->chunk, design->gated};
    const dp_given_error *given = sp->step ? &sp->step->err : NULL;
    dp_part part[DP_ERROR_BOUND_PARTS];
    dp_error_bound worst;
    dp_key key = {{0}};
    dp_error_bound_alloc(&c->p, sp->N, c->backward, given != NULL, out);
    if (o->cache) {
        size_t size;
        void *more = with_given(what, sizeof what, &c->p, given, &size);
        key = dp_problem_key(&c->p, more, size);
        free(more);
        if (dp_cache_load(o->cache, DP_CACHE_BOUND, key, part,
                          dp_error_bound_parts(&c->p, sp->N, out, part)))
            return;
    }
    dp_error_bound_free(out);
    if (design->chunk != DP_CHUNK || design->gated) {
        budget_of_chunks(sp, design, chain, given, out);
        if (o->cache)
            dp_cache_save(o->cache, DP_CACHE_BOUND, key, part,
                          dp_error_bound_parts(&c->p, sp->N, out, part));
        return;
    }
    reference(sp);
    if (!w->ready) {
        dp_error_bound_base_given(&w->sound, sp->ref, design, 1, c->backward, given);
        dp_error_bound_base_given(&w->probable, sp->ref, design, 2, c->backward, given);
        w->ready = 1;
    }
    dp_error_bound_run(&w->probable, chain, c->backward, out);
    dp_error_bound_run(&w->sound, chain, c->backward, &worst);
    dp_error_bound_min(&c->p, sp->N, out, &worst);
    dp_error_bound_free(&worst);
    if (o->cache)
        dp_cache_save(o->cache, DP_CACHE_BOUND, key, part,
                      dp_error_bound_parts(&c->p, sp->N, out, part));
}

/* Does anything but the tensors of ranks need draws of its own? */
static int inner_stages(double *const *stage) {
    int any = 0;
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++)
        any |= stage[i] && dp_stage_tensors[i].kind != DP_PER_RANK;
    return any;
}

/* Inputs on which nothing rounds have no draws. */
static int nothing_rounds(const dp_case *c) { return c->spec.keys == DP_KEYS_EXACT && !c->data; }

static void expect_run(split *sp, int stages, const dp_run *r) {
    dp_claim claim = claim_of(r);
    claim.stages = stages;
    if (!nothing_rounds(sp->c)) dp_expectations_want(sp->expect, r->set, 1, &claim);
}

/* ---- stages of a subject --------------------------------------------------------------------- */

static void needs_bases(split *sp, dp_base base, budget_bases *w) {
    reference(sp);
    if (w->ready) return;
    dp_error_bound_base_init(&w->sound, sp->ref, base, 1, sp->c->backward);
    dp_error_bound_base_init(&w->probable, sp->ref, base, 2, sp->c->backward);
    w->ready = 1;
}

/* What is judged of stages that are not of ranks: bounds of the subject's errors, and of those of
 * the fp64 reference itself. NULL: not judged. */
typedef struct {
    double *bound[DP_NSTAGE_TENSORS], *rad[DP_NSTAGE_TENSORS];
} stage_errors;

static double *stage_bound(dp_error_bound_base *w, dp_format chain, int backward, int stage) {
    dp_error_bound b;
    if (stage == DP_STATE || stage == DP_V_NEW || stage == DP_DSTATE ||
        stage == DP_DV_NEW) { /* errors that enter the ranks */
        dp_error_bound_run(w, chain, backward, &b);
        dp_error_bound_free(&b);
    }
    return dp_stage_bound(w, stage);
}

/* A stage that is kept short by base bf16 has that store in its bound. */
static double own_storage(dp_base base, int stage) {
    return base == DP_BASE_FP64 ? 0x1p-53
           : base == DP_BASE_BF16 && stage != DP_GCUM && dp_stage_tensors[stage].kind != DP_PER_RANK
               ? 0x1p-8
               : 0x1p-24;
}

static int inner(double *const *stage, int i) {
    return stage[i] && dp_stage_tensors[i].kind != DP_PER_RANK;
}

static void make_stage_errors(split *sp, dp_base base, dp_format chain, budget_bases *w,
                              double *const *stage, stage_errors *x) {
    const int back = sp->c->backward;
    needs_bases(sp, base, w);
    if (!sp->have_fp64) {
        dp_error_bound_base_init(&sp->fp64, sp->ref, DP_BASE_FP64, 1, back);
        sp->have_fp64 = 1;
    }

    for (int i = 0; i < DP_NSTAGE_TENSORS; i++) {
        int64_t rows, width;
        if (!inner(stage, i)) continue;
        double *probable = stage_bound(&w->probable, chain, back, i),
               *sound = stage_bound(&w->sound, chain, back, i),
               *rad = stage_bound(&sp->fp64, DP_FP64, back, i);
        dp_stage_tensor_rows(&sp->c->p, sp->N, i, &rows, &width);
        for (int64_t r = 0; r < rows; r++)
            x->bound[i][r] = fmin(probable[r], sound[r]);
        memcpy(x->rad[i], rad, sizeof *rad * (size_t)rows);
        free(probable);
        free(sound);
        free(rad);
    }
}

/* From the cache, or made. */
static void stage_errors_of(const dp_run_options *o, split *sp, dp_base base, dp_format chain,
                            budget_bases *w, double *const *stage, stage_errors *x) {
    int32_t what[5 + DP_NSTAGE_TENSORS] = {sp->N, base, chain, sp->c->backward, 0x73746167};
    dp_part part[2 * DP_NSTAGE_TENSORS];
    int n = 0;
    *x = (stage_errors){{NULL}, {NULL}};
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++) {
        int64_t rows, width;
        if (!inner(stage, i)) continue;
        dp_stage_tensor_rows(&sp->c->p, sp->N, i, &rows, &width);
        what[5 + i] = 1;
        x->bound[i] = dp_doubles(rows);
        x->rad[i] = dp_doubles(rows);
        part[n++] = (dp_part){x->bound[i], sizeof(double) * (size_t)rows};
        part[n++] = (dp_part){x->rad[i], sizeof(double) * (size_t)rows};
    }
    const dp_key key = o->cache ? dp_problem_key(&sp->c->p, what, sizeof what) : (dp_key){{0}};
    if (!n || (o->cache && dp_cache_load(o->cache, DP_CACHE_STAGES, key, part, n))) return;
    make_stage_errors(sp, base, chain, w, stage, x);
    if (o->cache) dp_cache_save(o->cache, DP_CACHE_STAGES, key, part, n);
}

static void stage_errors_free(stage_errors *x) {
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++) {
        free(x->bound[i]);
        free(x->rad[i]);
    }
}

static void judge_stage(split *sp, dp_base base, const stage_errors *errors, int stage,
                        const double *got, double u, double tiny, dp_run *run) {
    int64_t rows, width;
    double *bound = errors->bound[stage];
    reference(sp);
    double *want =
        u > own_storage(base, stage) || tiny > 0 ? dp_stage_tensor_value(sp->ref, stage) : NULL;
    dp_stage_tensor_rows(&sp->c->p, sp->N, stage, &rows, &width);
    if (u <= own_storage(base, stage)) u = 0;
    for (int64_t i = 0; want && i < rows; i++)
        bound[i] +=
            u * (dp_norm_fro(width, want + i * width) + bound[i]) + sqrt((double)width) * tiny;
    /* the simulated ranks form Akk in base bf16 alone: elsewhere its draws would be those of an
     * inverse in fp64 */
    const dp_expected *x = stage == DP_AKK && base != DP_BASE_BF16 ? NULL : expected_of(sp, run);
    const dp_stage_judge_in in = {.stage = stage,
                                  .got = got,
                                  .bound = bound,
                                  .rad = errors->rad[stage],
                                  .bound_shown = x && !bounded(run),
                                  .draws = x && x->stage[stage].err2 ? &x->stage[stage] : NULL,
                                  .allowance = allowance_of(run),
                                  .unit = dp_hypot(arithmetic(base), storing(run, u)),
                                  .tiny = dp_hypot(smallest(base, sp->c->p.K), tiny)};
    dp_stage_judge(sp->ref, &in, &run->tensor[run->ntensor++]);
    free(want);
}

#define RANKED(HAS, FIELD)                                                        \
    {                                                                             \
        AT_##FIELD, offsetof(dp_truth_rank, HAS), offsetof(dp_truth_rank, FIELD), \
            offsetof(dp_truth_rank, FIELD##_rad), offsetof(dp_error_bound, FIELD) \
    }
static const struct {
    int at;
    size_t has, value, rad, bound;
} RANK_STAGES[DP_NSTAGE_TENSORS] = {
    [DP_S_IN] = RANKED(has_S_in, S_in), [DP_M] = RANKED(has_MH, M),
    [DP_H] = RANKED(has_MH, H),         [DP_DS_OUT] = RANKED(has_dS_out, dS_out),
    [DP_DM] = RANKED(has_dMH, dM),      [DP_DH] = RANKED(has_dMH, dH)};

/* M and dM may be left unwritten (NaN) where no state passes through the rank (math.md g.1). */
static int may_be_absent(const split *sp, int stage, int r) {
    dp_context c;
    if ((stage != DP_M && stage != DP_DM) ||
        dp_context_build(sp->c->p.cu, sp->c->p.Nseq, sp->N, r, &c, NULL))
        return 0;
    const int passes = stage == DP_M ? dp_context_passes_fwd(&c) : dp_context_passes_bwd(&c);
    dp_context_free(&c);
    return !passes;
}

static void judge_rank_stage(const split *sp, const dp_error_bound *b, dp_base base, int stage,
                             double *got, double u, double tiny, dp_run *run) {
    const int HV = sp->c->p.HV, nr = sp->N * HV;
    const double *bound = *(double *const *)((const char *)b + RANK_STAGES[stage].bound);
    double **x = dp_calloc((size_t)nr, sizeof *x), *wide = dp_copy(bound, nr);
    int64_t rows, width;
    dp_stage_tensor_rows(&sp->c->p, sp->N, stage, &rows, &width);
    for (int i = 0; i < nr; i++) {
        const char *t = (const char *)&sp->at[i];
        int blank = 1;
        x[i] = got + i * width;
        for (int64_t z = 0; z < width && blank; z++)
            blank = isnan(x[i][z]);
        if (blank && may_be_absent(sp, stage, i / HV)) x[i] = NULL;
        if (*(const int *)(t + RANK_STAGES[stage].has)) {
            const double norm =
                dp_norm_fro(width, *(double *const *)(t + RANK_STAGES[stage].value));
            if (u > own_storage(base, stage)) wide[i] += u * (norm + wide[i]);
            wide[i] += sqrt((double)width) * tiny;
        }
    }
    judge_rank_tensor(sp, 0, dp_stage_tensors[stage].name, RANK_STAGES[stage].at, x,
                      RANK_STAGES[stage].has, RANK_STAGES[stage].value, RANK_STAGES[stage].rad,
                      width, wide, u > own_storage(base, stage) ? u : 0, tiny, run);
    free(x);
    free(wide);
}

/* The stages of stage_tensor.h are those of 64-token chunks. */
static int r_stages_differ(const dp_run *run) {
    return !run->undeclared && run->design.chunk != DP_CHUNK;
}

static void unjudged_stage(const split *sp, int stage, dp_run *run) {
    dp_judgement *j = &run->tensor[run->ntensor++];
    *j = (dp_judgement){.N = sp->N,
                        .heads = sp->c->p.HV,
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
    snprintf(j->name, sizeof j->name, "%s", dp_stage_tensors[stage].name);
    snprintf(j->why, sizeof j->why,
             "stages are those of chunks of %d tokens, this design has others", DP_CHUNK);
    j->per_rank = dp_doubles(sp->N);
    j->per_head = dp_doubles((int64_t)sp->N * sp->c->p.HV);
}

/* All stages that are there; u, tiny NULL: held in double. */
static void judge_stages(const dp_run_options *o, split *sp, const dp_error_bound *b, dp_base base,
                         dp_format chain, budget_bases *w, double *const *stage, const double *u,
                         const double *tiny, dp_run *run) {
    stage_errors errors;
    stage_errors_of(o, sp, base, chain, w, stage, &errors);
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++) {
        if (!stage[i]) continue;
        if (dp_stage_tensors[i].kind != DP_PER_RANK && r_stages_differ(run))
            unjudged_stage(sp, i, run);
        else if (dp_stage_tensors[i].kind == DP_PER_RANK)
            judge_rank_stage(sp, b, base, i, stage[i], u ? u[i] : 0, tiny ? tiny[i] : 0, run);
        else
            judge_stage(sp, base, &errors, i, stage[i], u ? u[i] : 0, tiny ? tiny[i] : 0, run);
    }
    stage_errors_free(&errors);
}

static void free_bases(budget_bases *w) {
    if (w->ready) {
        dp_error_bound_base_free(&w->sound);
        dp_error_bound_base_free(&w->probable);
    }
}

/* ---- settling what is marginal --------------------------------------------------------------- */

/* Judges the results of one subject into r->tensor; reads r->set. */
typedef void judge_fn(split *sp, const void *subject, dp_run *r);

static int marginal_failure(const dp_run *r) {
    int any = 0;
    for (int i = 0; i < r->ntensor; i++) {
        const dp_judgement *j = &r->tensor[i];
        if (j->verdict != DP_FAIL) continue;
        if (strcmp(j->tier, "expected") || !dp_judgement_marginal(j)) return 0;
        any = 1;
    }
    return any;
}

/* Where a run fails by draws alone, each time within DP_MARGIN of its limit, a second, independent
 * set of draws decides. Both stay in the record. */
static void settle(split *sp, judge_fn *judge, const void *subject, int stages, dp_run *r) {
    if (r->exact || !marginal_failure(r)) return;
    dp_run again = *r;
    again.tensor = NULL;
    again.ntensor = 0;
    again.point = NULL;
    again.npoint = 0;
    again.set = 1;
    expect_run(sp, stages, &again);
    judge(sp, subject, &again);
    for (int i = 0; i < r->ntensor; i++) {
        dp_judgement *j = &r->tensor[i], *k = &again.tensor[i];
        if (j->verdict != DP_FAIL) continue;
        const dp_judgement first = *j;
        *j = *k;
        *k = first;
        j->before = first.expected;
    }
    for (int i = 0; i < again.ntensor; i++)
        dp_judgement_free(&again.tensor[i]);
    free(again.tensor);
    free(again.point);
    r->settled = 1;
}

/* ---- simulated ranks ------------------------------------------------------------------------- */

typedef struct {
    dp_sim *s;
    const dp_error_bound *b;
} simulated;

static void judge_simulated(split *sp, const void *subject, dp_run *r) {
    const simulated *x = subject;
    judge(sp, x->s, x->b, r);
}

static void one_run(const dp_run_options *o, split *sp, dp_sim *s, const dp_error_bound *b,
                    dp_format chain, dp_merge merge, dp_runs *out) {
    const double t0 = dp_now();
    const simulated x = {s, b};
    dp_run *r = dp_runs_add(out, sp->c);
    r->ranks = sp->N;
    r->base = s->base;
    r->chain = chain;
    r->merge = merge;
    r->fault = o->fault;
    r->design = dp_design_of(s->base);
    r->has_chain = r->has_base = r->has_merge = 1;
    note_truth(sp, r);
    r->id = dp_run_id(r);
    dp_sim_run(s, chain, merge, sp->truth->backward);
    if (o->fault) {
        r->nhit = sp->N * s->p->HV;
        r->hit = dp_calloc((size_t)r->nhit, 1);
        memcpy(r->hit, s->hit, (size_t)r->nhit);
    }
    judge_simulated(sp, &x, r);
    settle(sp, judge_simulated, &x, 0, r);
    for (int i = 0; r->hit && sp->step && i < sp->N * s->p->HV; i++)
        r->hit[i] |= sp->step->hit[i];
    dp_run_close(r, dp_now() - t0);
    if (o->done) o->done(r, o->arg);
}

/* ---- a shared library ------------------------------------------------------------------------ */

/* Entries that were never written, or are NaN, are named as that in the verdict on their tensor. */
static void name_flaws(const split *sp, const dp_result *result, double *const *stage_of,
                       dp_run *run) {
    const dp_problem *p = &sp->c->p;
    for (int t = 0; t < run->ntensor; t++) {
        dp_judgement *j = &run->tensor[t];
        const double *x = NULL;
        char text[sizeof j->why];
        int64_t rows, width, n = 0;
        int partial = 0;
        for (int i = 0; i < DP_NRESULTS; i++)
            if (!strcmp(j->name, dp_result_fields[i].name)) {
                dp_result_shape(p, i, &rows, &width);
                x = *dp_result_at((dp_result *)result, i);
                n = rows * width;
            }

        const int stage = x ? -1 : dp_stage_tensor_find(j->name);
        if (stage >= 0) {
            x = stage_of[stage];
            n = dp_stage_tensor_size(p, sp->N, stage);
            partial =
                stage == DP_AKK || stage == DP_AQK || dp_stage_tensors[stage].kind == DP_PER_RANK;
        }

        if (!x) continue;
        dp_subject_flaws(x, n, text, sizeof text);
        if (!*text || (j->verdict != DP_FAIL && (partial || !strstr(text, "never written"))))
            continue;
        j->verdict = DP_FAIL;
        snprintf(j->why, sizeof j->why, "%s", text);
    }
}

typedef struct {
    dp_result *r;
    const dp_run_options *o;
    const dp_error_bound *b;
    double *const *stage;
    budget_bases *w;
    const double *u, *tiny, *stage_u, *stage_tiny;
} foreign;

/* Results and stages of a library or of files. */
static void judge_foreign(split *sp, const void *subject, dp_run *r) {
    const foreign *x = subject;
    r->tensor = dp_calloc((size_t)DP_NRESULTS + DP_NSTAGE_TENSORS, sizeof *r->tensor);
    judge_fields(sp, x->r, x->b, x->u, x->tiny, r);
    judge_stages(x->o, sp, x->b, r->base, r->chain, x->w, x->stage, x->stage_u, x->stage_tiny, r);
    name_flaws(sp, x->r, x->stage, r);
}

static dp_status subject_run(const dp_run_options *o, split *sp, dp_base base, dp_format chain,
                             budget_bases *w, dp_runs *out, dp_err *e) {
    const dp_case *c = sp->c;
    const double t0 = dp_now();
    dp_subject_result s;
    dp_error_bound b;
    dp_design design;
    const char *declared = o->design ? o->design : o->subject->design;
    dp_status st = dp_design_parse(declared ? declared : "", base, &design, e);
    if (!st)
        st = dp_subject_run(o->subject, &c->p, dp_formats[c->input_dtype].name, sp->N, base, chain,
                            c->backward, o->limit_s > 0 ? o->limit_s : DP_SUBJECT_LIMIT_S, &s, e);
    if (st) return st;
    dp_run *r = dp_runs_add(out, c);
    r->backend = DP_BACKEND_SUBJECT;
    r->other_design = 1;
    r->path = o->subject->name;
    r->outcome = dp_subject_outcomes[s.outcome];
    r->ranks = sp->N;
    r->base = base;
    r->chain = chain;
    r->has_base = r->has_chain = 1;
    r->design = design;
    r->undeclared = !declared;
    note_truth(sp, r);
    r->id = dp_run_id(r);
    if (s.outcome == DP_SUBJECT_RETURNED) {
        const int stages = inner_stages(s.stage);
        budget(o, sp, &design, chain, w, &b);
        expect_run(sp, stages, r);
        const foreign x = {&s.r, o, &b, s.stage, w, NULL, NULL, NULL, NULL};
        judge_foreign(sp, &x, r);
        settle(sp, judge_foreign, &x, stages, r);
        dp_error_bound_free(&b);
        dp_run_close(r, dp_now() - t0);
    } else {
        r->verdict = s.outcome == DP_SUBJECT_REFUSED ? DP_SKIPPED : DP_FAIL;
        r->seconds = dp_now() - t0;
        snprintf(r->why, sizeof r->why, "%s", s.why);
    }
    if (o->done) o->done(r, o->arg);
    dp_subject_result_free(&s);
    return DP_OK;
}

/* What the options name, else what the library claims. One rank forms no M: one chain format will
 * do. */
static dp_status subject_split(const dp_run_options *o, split *sp, dp_runs *out, dp_err *e) {
    const dp_subject *s = o->subject;
    dp_status st = DP_OK;
    if (sp->N > s->max_ranks) return DP_OK;
    for (int i = 0; i < (o->nbase ? o->nbase : 1) && !st; i++) {
        budget_bases w = {0};
        for (int j = 0; j < (o->nchain && sp->N > 1 ? o->nchain : 1) && !st; j++)
            st = subject_run(o, sp, o->nbase ? o->base[i] : s->base,
                             o->nchain ? o->chain[j] : s->chain, &w, out, e);
        free_bases(&w);
    }
    return st;
}

static int wants(const dp_run_options *o, dp_backend b) {
    for (int i = 0; i < o->nbackend; i++)
        if (o->backend[i] == b) return 1;
    return !o->nbackend && b != DP_BACKEND_NCCL;
}

/* Bases in which the chunk solver runs over LAPACKE, too: recurrences alone, and unless it is asked
 * for on the largest number of ranks. */
static int lapack_bases(const dp_case *c, const dp_run_options *o, int N, int *bases) {
    int all[DP_NBASES], ranks[16], n = 0;
    const int nr = dp_select(c->nranks, c->ranks, o->nranks, o->ranks, ranks);
    for (int i = 0; i < nr; i++)
        if (!o->nbackend && ranks[i] > N) return 0;
    const int nb = dp_select(c->nbase, (const int *)c->base, o->nbase, (const int *)o->base, all);
    for (int i = 0; i < nb && c->op == DP_OP_RECURRENCE && !o->fault && wants(o, DP_BACKEND_LAPACK);
         i++)
        if (all[i] != DP_BASE_BF16) bases[n++] = all[i];
    return n;
}

/* One chain format is enough for it, the widest of the case: what is looked at is the solver.
 * DP_NFORMATS: none is left. */
static dp_format lapack_chain(const dp_case *c, const dp_run_options *o) {
    int chains[DP_NFORMATS];
    const int n =
        dp_select(c->nchain, (const int *)c->chain, o->nchain, (const int *)o->chain, chains);
    int widest = DP_NFORMATS;
    for (int i = 0; i < n; i++)
        if (chains[i] < widest) widest = chains[i];
    return (dp_format)widest;
}

/* What all simulated ranks of a case and the backend lapack are held against: asked for at once, so
 * that every draw is made once. claim: room for (DP_NBASES + 1) * DP_NFORMATS; returns how many
 * there are. */
static int claims_on(const dp_case *c, const dp_run_options *o, int N, dp_claim *claim) {
    int bases[DP_NBASES], chains[DP_NFORMATS], exact[DP_NBASES];
    const int nb = wants(o, DP_BACKEND_SIM) ? dp_select(c->nbase, (const int *)c->base, o->nbase,
                                                        (const int *)o->base, bases)
                                            : 0;
    const int nl = lapack_bases(c, o, N, exact);
    const int nc = dp_case_chains(c, N, o->nchain, (const int *)o->chain, chains);
    const dp_format widest = lapack_chain(c, o);
    int n = 0;
    for (int i = 0; i < nb * nc; i++)
        claim[n++] =
            (dp_claim){N, dp_design_of((dp_base)bases[i / nc]), (dp_format)chains[i % nc], 0, 0};
    for (int k = 0; k < nl && nc; k++) {
        const dp_claim whole = {N, dp_design_of((dp_base)exact[k]), widest, 0, 1};
        int i = 0;
        while (i < n && (claim[i].design.base != whole.design.base ||
                         (N > 1 && claim[i].chain != whole.chain)))
            i++;
        claim[i] = whole; /* the same draws serve both */
        n += i == n;
    }
    return n;
}

static dp_expectations expectations_of(const dp_case *c, const dp_run_options *o,
                                       const dp_front *front) {
    return (dp_expectations){
        .request = {.p = &c->p, .front = front, .dtype = c->input_dtype, .backward = c->backward},
        .cache = o->cache};
}

static dp_status can_be_split(const dp_problem *p, int N, dp_err *e) {
    dp_context x;
    const dp_status st = dp_context_build(p->cu, p->Nseq, N, 0, &x, e);
    if (!st) dp_context_free(&x);
    return st;
}

static void expect_all(const dp_case *c, const dp_run_options *o, int nr, const int *ranks,
                       dp_expectations *x) {
    const int most = (DP_NBASES + 1) * DP_NFORMATS;
    dp_claim *claim = dp_calloc((size_t)nr * most, sizeof *claim);
    int n = 0;
    for (int i = 0; i < nr; i++)
        n += claims_on(c, o, ranks[i], claim + n);
    if (!nothing_rounds(c)) dp_expectations_want(x, 0, n, claim);
    free(claim);
}

static dp_status runs_of_split(const dp_run_options *o, split *sp, dp_runs *out, dp_err *e) {
    const dp_case *c = sp->c;
    int bases[DP_NBASES], chains[DP_NFORMATS], merges[DP_NMERGES];
    const int nb = dp_select(c->nbase, (const int *)c->base, o->nbase, (const int *)o->base, bases);
    const int nc = dp_case_chains(c, sp->N, o->nchain, (const int *)o->chain, chains);
    const int nm =
        dp_select(c->nmerge, (const int *)c->merge, o->nmerge, (const int *)o->merge, merges);
    for (int i = 0; i < nb; i++) {
        dp_sim s;
        budget_bases w = {0};
        dp_step_run given = {0};
        dp_status st = c->op == DP_OP_STEP ? dp_step_forward(c, DP_BACKEND_SIM, sp->N, bases[i],
                                                             o->fault, &given, e)
                                           : DP_OK;
        if (!st)
            st = dp_sim_new(&s, c->op == DP_OP_STEP ? &given.p : &c->p, bases[i], sp->N, o->fault,
                            e);
        if (st) return st;
        sp->step = c->op == DP_OP_STEP ? &given : NULL;
        for (int j = 0; j < nc; j++) {
            dp_error_bound b;
            const dp_design design = dp_design_of(bases[i]);
            budget(o, sp, &design, chains[j], &w, &b);
            for (int k = 0; k < nm; k++)
                one_run(o, sp, &s, &b, chains[j], merges[k], out);
            dp_error_bound_free(&b);
        }
        free_bases(&w);
        dp_sim_free(&s);
        dp_step_run_free(c, &given);
        sp->step = NULL;
    }
    return DP_OK;
}

/* ---- the chunk solver over LAPACKE ----------------------------------------------------------- */

extern char *openblas_get_corename(void);

/* Every result and every intermediate by name, judged like those of any subject of this pipeline
 * that sums in another order. Its numbers are those of the machine. */
static dp_status lapack_run(const dp_run_options *o, split *sp, dp_base base, dp_format chain,
                            budget_bases *w, dp_runs *out, dp_err *e) {
    const dp_case *c = sp->c;
    const double t0 = dp_now();
    double *stage[DP_NSTAGE_TENSORS] = {NULL};
    dp_sim s;
    dp_error_bound b;
    const dp_status st = dp_sim_new_lapack(&s, &c->p, base, sp->N, e);
    if (st) return st;
    dp_sim_run(&s, chain, DP_MERGE_ALLGATHER, sp->truth->backward);
    dp_run *r = dp_runs_add(out, c);
    r->backend = DP_BACKEND_LAPACK;
    r->path = openblas_get_corename();
    r->ranks = sp->N;
    r->base = base;
    r->chain = chain;
    r->has_base = r->has_chain = 1;
    r->design = dp_design_of(base);
    note_truth(sp, r);
    r->id = dp_run_id(r);
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++)
        if (sp->truth->backward || !dp_stage_tensors[i].backward)
            stage[i] = dp_stage_tensor_value(&s, i);
    budget(o, sp, &r->design, chain, w, &b);
    expect_run(sp, 1, r);
    const foreign x = {&s.out, o, &b, stage, w, NULL, NULL, NULL, NULL};
    judge_foreign(sp, &x, r);
    settle(sp, judge_foreign, &x, 1, r);
    dp_run_close(r, dp_now() - t0);
    dp_error_bound_free(&b);
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++)
        free(stage[i]);
    dp_sim_free(&s);
    if (o->done) o->done(r, o->arg);
    return DP_OK;
}

static dp_status lapack_split(const dp_run_options *o, split *sp, dp_runs *out, dp_err *e) {
    const dp_case *c = sp->c;
    int bases[DP_NBASES];
    const int nb = lapack_bases(c, o, sp->N, bases);
    const dp_format chain = lapack_chain(c, o);
    dp_status st = DP_OK;
    if (chain == DP_NFORMATS) return DP_OK;
    for (int i = 0; i < nb && !st; i++) {
        budget_bases w = {0};
        st = lapack_run(o, sp, bases[i], chain, &w, out, e);
        free_bases(&w);
    }
    return st;
}

/* ---- the CUDA kernels ------------------------------------------------------------------------ */

static void judge_cuda(const split *sp, dp_cuda_result *s, const dp_error_bound *b, dp_run *run) {
    const dp_problem *p = &sp->c->p;
    const int64_t KK = (int64_t)p->K * p->K, KV = (int64_t)p->K * p->V;
    run->tensor = dp_calloc((size_t)DP_NRESULTS + 6 + DP_STEP_TENSORS, sizeof *run->tensor);
    judge_fields(sp, &s->out, b, NULL, NULL, run);
    judge_step(sp, &s->out, b, run);
    RANK_TENSOR(1, has_S_in, S_in, KV);
    RANK_TENSOR(0, has_MH, M, KK);
    RANK_TENSOR(0, has_MH, H, KV);
    if (s->out.dq) {
        RANK_TENSOR(1, has_dS_out, dS_out, KV);
        RANK_TENSOR(0, has_dMH, dM, KK);
        RANK_TENSOR(0, has_dMH, dH, KV);
    }
    for (int i = 0; p->HV == 1 && i < sp->N; i++)
        if (sp->at[i].has_MH && s->M[i])
            add_point(sp, run, i, (int)((p->T / sp->N + DP_CHUNK - 1) / DP_CHUNK), s->M[i],
                      sp->at[i].M, b->M[i]);
}

typedef struct {
    dp_cuda_result *res;
    const dp_error_bound *b;
} on_device;

static void judge_on_device(split *sp, const void *subject, dp_run *r) {
    const on_device *x = subject;
    judge_cuda(sp, x->res, x->b, r);
}

static dp_run *cuda_record(const dp_case *c, dp_backend be, int ranks, dp_base base,
                           dp_format chain, dp_cuda_way way, const char *skip, dp_runs *out) {
    dp_run *r = dp_runs_add(out, c);
    r->backend = be;
    r->ranks = ranks;
    r->base = base;
    r->chain = chain;
    r->way = way;
    r->has_base = r->has_chain = ranks > 0;
    r->design = dp_design_of(base);
    r->id = dp_run_id(r);
    if (skip) {
        r->verdict = DP_SKIPPED;
        snprintf(r->why, sizeof r->why, "%.600s", skip);
    }

    return r;
}

/* gpu/fast: chunks of 64 rows, scores from operands that carry their decay. One of the two
 * directions suffices. */
static dp_design design_of_path(dp_base base, const char *path, int R) {
    dp_design d = dp_design_of(base);
    if (!strstr(path, "fast")) return d;
    d.gated = 1;
    d.chunk = DP_CHUNK / R;
    return d;
}

/* One way of one (base, chain): judged, or skipped with the kernels' own reason. */
static dp_status cuda_run(const dp_run_options *o, split *sp, dp_backend be, dp_base base,
                          dp_format f, dp_cuda_way way, budget_bases *w, dp_runs *out, dp_err *e) {
    const dp_case *c = sp->c;
    const double t0 = dp_now();
    dp_cuda_result res;
    dp_error_bound b;
    dp_err why = {0};
    const char *no = dp_cuda_unavailable(be, sp->N);
    dp_step_run given = {0};
    const int step = c->op == DP_OP_STEP,
              bf16 = step ? base == DP_BASE_BF16 : c->input_dtype == DP_BF16;
    dp_status st = no     ? DP_EINPUT
                   : step ? dp_step_forward(c, be, sp->N, base, DP_FAULT_NONE, &given, &why)
                          : DP_OK;
    if (!st)
        st = dp_cuda_run(step ? &given.p : &c->p, bf16, base, f, sp->N, be, sp->truth->backward,
                         way, &res, &why);
    sp->step = step ? &given : NULL;
    if (st && st != DP_EINPUT)
        return dp_fail(e, st, "%s: %s, %d ranks: %s", c->name, dp_backend_names[be], sp->N,
                       why.msg);
    dp_run *r = cuda_record(c, be, sp->N, base, f, way, st ? (no ? no : why.msg) : NULL, out);
    if (!st) {
        r->design = design_of_path(base, res.path, c->p.R);
        budget(o, sp, &r->design, f, w, &b);
        expect_run(sp, 0, r);
        r->path = res.path;
        r->segments = res.segments;
        r->saved = res.saved;
        r->kept = res.kept;
        note_truth(sp, r);
        const on_device x = {&res, &b};
        judge_on_device(sp, &x, r);
        settle(sp, judge_on_device, &x, 0, r);
        dp_run_close(r, dp_now() - t0);
        dp_error_bound_free(&b);
        dp_cuda_result_free(&res, c->p.HV);
    }
    dp_step_run_free(c, &given);
    sp->step = NULL;
    if (o->done) o->done(r, o->arg);
    return DP_OK;
}

/* Every (base, chain) that the kernels have, for one rank count. */
static dp_status cuda_split(const dp_run_options *o, split *sp, dp_backend be, dp_runs *out,
                            dp_err *e) {
    const dp_case *c = sp->c;
    int bases[DP_NBASES], chains[DP_NFORMATS];
    const dp_cuda_way plain = DP_CUDA_PLAIN, *way = o->nway ? o->way : &plain;
    const int nb = dp_select(c->nbase, (const int *)c->base, o->nbase, (const int *)o->base, bases),
              nway = o->nway ? o->nway : 1;
    const int nc = dp_case_chains(c, sp->N, o->nchain, (const int *)o->chain, chains);
    dp_status st = DP_OK;
    for (int i = 0; i < nb && !st; i++) {
        budget_bases w = {0};
        for (int j = 0; j < nc * nway && !st; j++) {
            const dp_format f = sp->N == 1 ? DP_FP32 : chains[j / nway];
            if (bases[i] == DP_BASE_FP64 || f == DP_FP64 || f == DP_BF16ST)
                continue; /* not among the kernels' formats */
            st = cuda_run(o, sp, be, bases[i], f, way[j % nway], &w, out, e);
        }
        free_bases(&w);
    }
    return st;
}

/* Is there anything to judge; else no truth is made. */
static int offers(const dp_case *c, const dp_run_options *o, int nr) {
    int bases[DP_NBASES], kernels = 0;
    const int nb = dp_select(c->nbase, (const int *)c->base, o->nbase, (const int *)o->base, bases);
    for (int i = 0; i < nb && !o->fault; i++)
        kernels |= bases[i] != DP_BASE_FP64;
    for (int be = DP_BACKEND_CUDA; be <= DP_BACKEND_NCCL && kernels && nr; be++)
        if (wants(o, be) && !dp_cuda_unavailable(be, 1)) return 1;
    for (int i = 0; i < nr; i++)
        if (lapack_bases(c, o, c->ranks[i], bases)) return 1;
    return nr && (wants(o, DP_BACKEND_SIM) || o->subject);
}

dp_status dp_run_recurrence(const dp_case *c, const dp_run_options *o, dp_runs *out, dp_err *e) {
    dp_truth truth = {0};
    dp_truth_note note;
    int ncut, ranks[16];
    const int nr = dp_select(c->nranks, c->ranks, o->nranks, o->ranks, ranks);
    int64_t *cut = dp_case_cuts(c, &ncut);
    const dp_truth_request rq = {.bits = c->bits,
                                 .backward = c->backward,
                                 .ncut = ncut,
                                 .cut = cut,
                                 .want_M = ncut > 0,
                                 .progress = o->progress};
    dp_status st = offers(c, o, nr) ? dp_case_truth(c, rq, o->truth ? *o->truth : c->truth,
                                                    o->cache, &truth, &note, e)
                                    : DP_OK;
    if (st) {
        free(cut);
        return st;
    }
    const double radius = largest_radius(&truth);
    const dp_front front = dp_step_front(c);
    dp_expectations expect = expectations_of(c, o, &front);
    for (int i = 0; i < nr && truth.field[DP_RESULT_O].rows && !st; i++)
        st = can_be_split(&c->p, ranks[i], e);
    if (truth.field[DP_RESULT_O].rows && !st) expect_all(c, o, nr, ranks, &expect);
    for (int i = 0; i < nr && truth.field[DP_RESULT_O].rows && !st; i++) {
        dp_sim ref;
        split sp = {.c = c,
                    .truth = &truth,
                    .N = ranks[i],
                    .ref = &ref,
                    .note = note,
                    .radius = radius,
                    .expect = &expect};
        st = split_truth(&sp, 1, e);
        if (!st) st = dp_condition_cached(&c->p, ranks[i], NULL, o->cache, &sp.cond, e);
        split_prefixes(&sp);
        if (!st && wants(o, DP_BACKEND_SIM)) st = runs_of_split(o, &sp, out, e);
        if (!st) st = lapack_split(o, &sp, out, e);
        if (!st && o->subject) st = subject_split(o, &sp, out, e);
        for (int be = DP_BACKEND_CUDA; be <= DP_BACKEND_NCCL && !st; be++)
            if (wants(o, be) && !o->fault && !dp_cuda_unavailable(be, 1))
                st = cuda_split(o, &sp, be, out, e);
        split_free(&sp);
        if (sp.have_ref) dp_sim_free(&ref);
    }
    dp_expectations_free(&expect);
    for (int be = DP_BACKEND_CUDA; be <= DP_BACKEND_NCCL && !st;
         be++) { /* one row that says why none ran */
        const char *no = dp_cuda_unavailable(be, 1);
        const int whole = !o->nranks && !o->nbase && !o->nchain && !o->nmerge && !o->fault;
        if (!no || !wants(o, be) || !(whole || o->nbackend)) continue;
        dp_run *r = cuda_record(c, be, 0, 0, 0, 0, no, out);
        if (o->done) o->done(r, o->arg);
    }
    dp_truth_free(&truth);
    free(cut);
    return st;
}

/* ---- results that another program computed --------------------------------------------------- */

/* A result stored in a format with unit roundoff u and spacing 2 tiny among its subnormals is off
 * by u |x| + tiny an entry, x the value before: |x| <= |want| + bound for the row. The base's own
 * store (dp_sim rounds o and the gradients of inputs to it, the others to its arithmetic) is in the
 * bound already; only a coarser one adds to it. */
static void widen_for_storage(const dp_problem *p, const dp_truth *t, dp_base base,
                              const dp_given *g, dp_error_bound *b) {
    for (int i = 0; i < DP_NRESULTS; i++) {
        const int stored_short = dp_result_fields[i].stored_short;
        const double own = base == DP_BASE_FP64                   ? 0x1p-53
                           : base == DP_BASE_BF16 && stored_short ? 0x1p-8
                                                                  : 0x1p-24,
                     u = g->u[i] > own ? g->u[i] : 0;
        int64_t rows, width;
        dp_result_shape(p, i, &rows, &width);
        for (int64_t r = 0; b->row[i] && *dp_result_at((dp_result *)&g->r, i) && r < rows; r++)
            b->row[i][r] += u * (dp_norm_fro(width, t->field[i].hi + r * width) + b->row[i][r]) +
                            sqrt((double)width) * g->tiny[i];
    }
}

dp_status dp_run_given(const dp_case *c, const dp_run_options *o, const dp_given *g, dp_runs *out,
                       dp_err *e) {
    const double t0 = dp_now();
    dp_truth_note note;
    int ranked = 0, ncut;
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++)
        ranked |= g->stage[i] && dp_stage_tensors[i].kind == DP_PER_RANK;
    int64_t *cut = dp_case_cuts(c, &ncut);
    if (!ranked) ncut = 0;
    const dp_truth_request rq = {.bits = c->bits,
                                 .backward = c->backward,
                                 .ncut = ncut,
                                 .cut = cut,
                                 .want_M = ncut > 0,
                                 .progress = o->progress};
    dp_truth truth;
    dp_sim ref;
    dp_error_bound b;
    budget_bases w = {0};
    dp_status st =
        dp_case_truth(c, rq, o->truth ? *o->truth : c->truth, o->cache, &truth, &note, e);
    free(cut);
    if (st) return st;
    split sp = {.c = c,
                .truth = &truth,
                .N = c->ranks[0],
                .ref = &ref,
                .note = note,
                .radius = largest_radius(&truth)};
    const dp_front front = dp_step_front(c);
    dp_expectations expect = expectations_of(c, o, &front);
    sp.expect = &expect;
    st = split_truth(&sp, ranked, e);
    if (!st) st = dp_condition_cached(&c->p, sp.N, NULL, o->cache, &sp.cond, e);
    if (!st) {
        dp_run *r = dp_runs_add(out, c);
        r->backend = DP_BACKEND_FILE;
        r->other_design = !g->same_design;
        r->ranks = sp.N;
        r->base = c->base[0];
        r->chain = c->chain[0];
        r->has_base = r->has_chain = 1;
        note_truth(&sp, r);
        r->id = dp_run_id(r);
        const int stages = inner_stages(g->stage);
        r->design = g->design ? *g->design : dp_design_of(c->base[0]);
        r->undeclared = !g->design && !g->same_design;
        budget(o, &sp, &r->design, c->chain[0], &w, &b);
        expect_run(&sp, stages, r);
        widen_for_storage(&c->p, &truth, c->base[0], g, &b);
        const foreign x = {(dp_result *)&g->r, o, &b, g->stage, &w, g->u, g->tiny, g->stage_u,
                           g->stage_tiny};
        judge_foreign(&sp, &x, r);
        settle(&sp, judge_foreign, &x, stages, r);
        dp_run_close(r, dp_now() - t0);
        dp_error_bound_free(&b);
        free_bases(&w);
        if (o->done) o->done(r, o->arg);
    }
    split_free(&sp);
    dp_expectations_free(&expect);
    if (sp.have_ref) dp_sim_free(&ref);
    dp_truth_free(&truth);
    return st;
}
