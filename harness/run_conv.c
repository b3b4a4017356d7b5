/* op conv: causal conv1d over simulated ranks against its MPFR truth. */
#include "../ref/context.h"
#include "damage.h"
#include "run.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void place_token(const void *ctx, int64_t row, dp_place *at) {
    const struct { const dp_conv *c; int N; } *x = ctx;
    int seq = 0;
    while (seq < x->c->Nseq - 1 && x->c->cu[seq + 1] <= row) seq++;
    *at = (dp_place){.rank = (int)(row / (x->c->T / x->N)), .head = 0, .sequence = seq, .chunk = (int)(row / DP_CHUNK), .token = row};
}

static void place_channel(const void *ctx, int64_t row, dp_place *at) {
    (void)ctx, (void)row;
    *at = (dp_place){.rank = 0, .head = 0, .sequence = -1, .chunk = -1, .token = -1};
}

/* Row bounds are 2-norms of the entrywise ones. */
static double *row_norms(const double *x, int64_t rows, int64_t width) {
    double *r = dp_doubles(rows);
    for (int64_t i = 0; i < rows; i++) {
        double s = 0;
        for (int64_t j = 0; j < width; j++) s += x[i * width + j] * x[i * width + j];
        r[i] = sqrt(s) * (1 + (double)(width + 4) * 0x1p-52);
    }
    return r;
}

static void judge(const dp_conv *c, int N, const char *name, const double *got, const double *want, const double *rad, const double *bound, int64_t rows, int64_t width, dp_run *r) {
    if (!got || !want) return;
    const struct { const dp_conv *c; int N; } ctx = {c, N};
    double *rr = row_norms(rad, rows, width), *b = row_norms(bound, rows, width);
    const int tokens = rows == c->T;
    const dp_compare_in in = {.name = name, .N = N, .heads = 1, .rows = rows, .width = width, .got = got, .want = want, .rad = rr, .bound = b, .place = tokens ? place_token : place_channel,
                              .ctx = &ctx, .tokens = tokens ? rows : 0};
    dp_compare(&in, &r->tensor[r->ntensor++]);
    free(rr), free(b);
}

dp_status dp_run_conv(const dp_case *c, const dp_run_options *o, dp_runs *out, dp_err *e) {
    const dp_conv *v = &c->conv;
    int bases[DP_NBASES], ranks[16];
    const int nb = dp_select(c->nbase, (const int *)c->base, o->nbase, (const int *)o->base, bases), nr = dp_select(c->nranks, c->ranks, o->nranks, o->ranks, ranks);
    dp_conv_result truth, rad;
    dp_conv_result_alloc(&truth, v), dp_conv_result_alloc(&rad, v);
    dp_conv_truth(v, c->bits, &truth, &rad);
    dp_status st = DP_OK;
    for (int i = 0; i < nr && !st; i++)
        for (int j = 0; j < nb && !st; j++) {
            const double t0 = dp_now();
            const dp_conv_policy pol = bases[j] == DP_BASE_FP64 ? DP_CONV_FP64 : bases[j] == DP_BASE_FP32 ? DP_CONV_FP32 : DP_CONV_BF16;
            dp_conv_result got, bound;
            char id[256];
            dp_conv_result_alloc(&got, v), dp_conv_result_alloc(&bound, v);
            st = dp_conv_ranks(v, ranks[i], pol, &got, e);
            if (!st) {
                if (o->fault == DP_FAULT_HALO_LEAK) dp_damage_conv(v, ranks[i], pol, &got);
                dp_conv_bound(v, pol, ranks[i], &bound);
                dp_run *r = dp_runs_add(out, c);
                r->ranks = ranks[i], r->base = bases[j], r->has_base = 1, r->truth_bits = c->bits, r->fault = o->fault;
                snprintf(id, sizeof id, "%s:ranks=%d,base=%s%s%s", c->name, ranks[i], dp_base_names[bases[j]], o->fault ? ",fault=" : "", o->fault ? dp_faults[o->fault].name : "");
                r->id = strdup(id);
                r->tensor = dp_calloc(4, sizeof *r->tensor);
                judge(v, ranks[i], "y", got.y, truth.y, rad.y, bound.y, v->T, v->D, r);
                if (v->dy) {
                    judge(v, ranks[i], "dx", got.dx, truth.dx, rad.dx, bound.dx, v->T, v->D, r);
                    judge(v, ranks[i], "dw", got.dw, truth.dw, rad.dw, bound.dw, v->D, v->W, r);
                    if (v->bias) judge(v, ranks[i], "dbias", got.dbias, truth.dbias, rad.dbias, bound.dbias, v->D, 1, r);
                }
                dp_run_close(r, dp_now() - t0);
                if (o->done) o->done(r, o->arg);
            }
            dp_conv_result_free(&got), dp_conv_result_free(&bound);
        }
    dp_conv_result_free(&truth), dp_conv_result_free(&rad);
    return st;
}
