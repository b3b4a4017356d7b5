/* op conv: causal conv1d over simulated ranks, and the CUDA kernels, against its MPFR truth. */
#include "harness/device/device_conv.h"
#include "harness/mpi/mpi_ranks.h"
#include "harness/record/run.h"
#include "harness/simulated/fault_effect.h"
#include "ref/vocabulary/context.h"
#include "subjects.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void place_token(const void *ctx, int64_t row, dp_place *at) {
    const struct {
        const dp_conv *c;
        int N;
    } *x = ctx;
    int seq = 0;
    while (seq < x->c->Nseq - 1 && x->c->cu[seq + 1] <= row)
        seq++;
    *at = (dp_place){.rank = dp_own_part_of(x->c->own.kind, x->c->T, x->N, row),
                     .head = 0,
                     .sequence = seq,
                     .chunk = (int)(row / DP_CHUNK),
                     .token = row};
}

static void place_channel(const void *ctx, int64_t row, dp_place *at) {
    (void)ctx;
    (void)row;
    *at = (dp_place){.rank = 0, .head = 0, .sequence = -1, .chunk = -1, .token = -1};
}

/* Row bounds are 2-norms of the entrywise ones. */
static double *row_norms(const double *x, int64_t rows, int64_t width) {
    double *r = dp_doubles(rows);
    for (int64_t i = 0; i < rows; i++) {
        double s = 0;
        for (int64_t j = 0; j < width; j++)
            s += x[i * width + j] * x[i * width + j];
        r[i] = sqrt(s) * (1 + (double)(width + 4) * 0x1p-52);
    }
    return r;
}

typedef struct {
    const dp_conv *v;
    dp_conv_result truth, rad;
} conv_truth;

/* Result i of the table, where the subject has it. */
static void judge(const conv_truth *t, int N, int i, dp_conv_result *got, dp_conv_result *bound,
                  dp_run *r) {
    conv_truth *x = (conv_truth *)t;
    const dp_tensor_field *f = &dp_conv_result_fields[i];
    const int tokens = f->kind == DP_OF_TOKENS;
    const struct {
        const dp_conv *c;
        int N;
    } ctx = {t->v, N};
    int64_t rows;
    int width;
    dp_conv_result_shape(t->v, i, &rows, &width);
    double *rad = row_norms(*dp_conv_result_at(&x->rad, i), rows, width);
    double *b = row_norms(*dp_conv_result_at(bound, i), rows, width);
    const dp_compare_in in = {.name = f->name,
                              .N = N,
                              .heads = 1,
                              .rows = rows,
                              .width = width,
                              .got = *dp_conv_result_at(got, i),
                              .want = *dp_conv_result_at(&x->truth, i),
                              .rad = rad,
                              .bound = b,
                              .place = tokens ? place_token : place_channel,
                              .ctx = &ctx,
                              .tokens = tokens ? rows : 0};
    dp_compare(&in, &r->tensor[r->ntensor++]);
    free(rad);
    free(b);
}

static dp_run *record(const dp_case *c, dp_backend be, int N, dp_base base, dp_fault fault,
                      dp_runs *out) {
    dp_run *r = dp_runs_add(out, c);
    r->backend = be;
    r->ranks = N;
    r->own = c->conv.own.kind;
    if (r->own && N) {
        r->ranks = c->conv.own.ranks;
        r->parts = N;
    }
    r->base = base;
    r->has_base = N > 0;
    r->fault = fault;
    r->id = dp_run_id(r);
    return r;
}

/* The reason why the kernels cannot run this: they read and write one format, and have no fp64. */
static const char *unfit(const dp_case *c, dp_backend be, dp_base base) {
    if (dp_backends[be].on_device && base == DP_BASE_BF16 && c->input_dtype != DP_BF16)
        return "the kernels store y and dx in the format of x and dy, which is wider than bf16 "
               "here";
    return NULL;
}

static dp_status subject(const dp_case *c, dp_backend be, int N, dp_base base, dp_conv_policy pol,
                         dp_conv_result *got, dp_conv_result *bound, dp_err *e) {
    const int sim = dp_backends[be].simulated;
    const dp_status st = dp_backends[be].peers ? dp_mpi_conv(&c->conv, N, pol, got, e)
                         : sim                 ? dp_conv_ranks(&c->conv, N, pol, got, e)
                               : dp_cuda_conv_run(&c->conv, base == DP_BASE_BF16, N, be, got, e);
    if (!st) (sim ? dp_conv_bound : dp_conv_bound_sigmoid32)(&c->conv, pol, N, bound);
    return st;
}

static dp_status run_one(const dp_case *c, const dp_run_options *o, const conv_truth *t,
                         dp_backend be, int N, dp_base base, dp_runs *out, dp_err *e) {
    const dp_conv *v = t->v;
    const double t0 = dp_now();
    const dp_conv_policy pol = base == DP_BASE_FP64   ? DP_CONV_FP64
                               : base == DP_BASE_FP32 ? DP_CONV_FP32
                                                      : DP_CONV_BF16;
    const int ranks = v->own.kind ? v->own.ranks : N;
    const char *no = unfit(c, be, base) ? unfit(c, be, base) : dp_unavailable(be, ranks);
    dp_conv_result got, bound;
    dp_conv_result_alloc(&got, v);
    dp_conv_result_alloc(&bound, v);
    const dp_status st = no ? DP_OK : subject(c, be, N, base, pol, &got, &bound, e);
    if (!st) {
        dp_effect_conv(o->fault, v, N, pol, &got);
        dp_run *r = record(c, be, N, base, o->fault, out);
        r->truth_bits = c->bits;
        if (no) {
            dp_run_skip(r, no, o);
        } else {
            r->tensor = dp_calloc(DP_CONV_NRESULTS, sizeof *r->tensor);
            for (int i = 0; i < DP_CONV_NRESULTS; i++)
                if (dp_conv_result_exists(v, i)) judge(t, N, i, &got, &bound, r);
            dp_run_close(r, dp_now() - t0);
            dp_run_done(r, o);
        }
    }
    dp_conv_result_free(&got);
    dp_conv_result_free(&bound);
    return st;
}

static int has_even(const int *own, int n) {
    for (int i = 0; i < n; i++)
        if (own[i] == DP_OWN_EVEN) return 1;
    return 0;
}

/* Is a run on this backend asked for, and possible? The devices have no fp64. */
static int runs_here(const dp_run_options *o, dp_backend be, dp_base base) {
    return dp_options_want(o, be) && !dp_unavailable(be, 1) &&
           (!o->fault || dp_backends[be].faulty) &&
           !(dp_backends[be].on_device && base == DP_BASE_FP64);
}

/* Ranks with another ownership of tokens. */
static dp_status run_owned(const dp_case *c, const dp_run_options *o, const conv_truth *t,
                           dp_own kind, int N, dp_runs *out, dp_err *e) {
    int bases[DP_NBASES];
    const int nb = dp_bases_of(c, o, bases), parts = dp_own_parts(kind, c->conv.T, N);
    dp_case x = *c;
    conv_truth owned = *t;
    dp_status st = DP_OK;
    x.conv.own = (dp_owners){kind, N};
    owned.v = &x.conv;
    if (dp_faults[o->fault].even) {
        dp_skip_owned(c, o, kind, DP_FAULT_IS_EVEN, out);
        return DP_OK;
    }
    if (dp_owns_nothing(c, o, kind, c->conv.T, N, out)) return DP_OK;
    for (int i = 0; i < DP_NBACKENDS * nb && !st; i++) {
        const dp_backend be = (dp_backend)(i / nb);
        const dp_base base = (dp_base)bases[i % nb];
        if (dp_backends[be].owns && runs_here(o, be, base))
            st = run_one(&x, o, &owned, be, parts, base, out, e);
    }
    return st;
}

dp_status dp_run_conv(const dp_case *c, const dp_run_options *o, dp_runs *out, dp_err *e) {
    int bases[DP_NBASES], ranks[16];
    const int nb = dp_select(c->nbase, (const int *)c->base, o->nbase, (const int *)o->base, bases),
              nr = dp_select(c->nranks, c->ranks, o->nranks, o->ranks, ranks);
    conv_truth t = {.v = &c->conv};
    dp_conv_result_alloc(&t.truth, t.v);
    dp_conv_result_alloc(&t.rad, t.v);
    dp_conv_truth(t.v, c->bits, &t.truth, &t.rad);
    int own[DP_NOWNS];
    const int nown = dp_owns_of(c, o, own);
    dp_status st = DP_OK;
    for (int z = 0; z < nown * nr && !st; z++)
        if (own[z / nr]) st = run_owned(c, o, &t, (dp_own)own[z / nr], ranks[z % nr], out, e);
    for (int be = 0; be < DP_NBACKENDS && has_even(own, nown); be++)
        for (int i = 0; i < nr && dp_op_on(dp_op_of(c), be); i++)
            for (int j = 0; j < nb && !st; j++) {
                if (!runs_here(o, be, (dp_base)bases[j])) continue;
                st = run_one(c, o, &t, be, ranks[i], bases[j], out, e);
            }
    for (int be = 0; be < DP_NBACKENDS && !st; be++) { /* one row that says why none ran */
        const char *no = dp_op_on(dp_op_of(c), be) ? dp_options_absent(o, be) : NULL;
        if (no) dp_run_skip(record(c, be, 0, 0, 0, out), no, o);
    }
    dp_conv_result_free(&t.truth);
    dp_conv_result_free(&t.rad);
    return st;
}
