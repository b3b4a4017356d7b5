/* Op conv: causal conv1d over simulated ranks, and the CUDA kernels, against its MPFR truth
 * (subjects.h). */
#include "ref/arithmetic/norms.h"
#include "ref/vocabulary/context.h"
#include "subjects.h"

#include <stdlib.h>
#include <string.h>

static void place_token(const void *ctx, int64_t row, dp_place *at) {
    const dp_sharding *sp = ctx;
    const dp_conv *v = &sp->c->conv;
    *at = (dp_place){.rank = dp_own_part_of(v->own.kind, v->T, sp->N, row),
                     .head = 0,
                     .sequence = dp_sequence_of(v->cu, v->Nseq, row),
                     .chunk = (int)(row / DP_CHUNK),
                     .token = row};
}

static void place_channel(DP_UNUSED const void *ctx, DP_UNUSED int64_t row, dp_place *at) {
    *at = dp_place_of(0, 0, -1);
}

/* ---- what there is to run -------------------------------------------------------------------- */

/* The reason why the kernels cannot run this: they read and write one format, and have no fp64. */
static const char *unfit(const dp_case *c, dp_backend be, dp_base base) {
    if (dp_backends[be].on_device && base == DP_BASE_BF16 && c->input_dtype != DP_BF16)
        return "the kernels store y and dx in the format of x and dy, which is wider than bf16 "
               "here";
    return NULL;
}

/* Every base; the devices have no fp64. */
static dp_status plan(const dp_subject_kind *k, const dp_asked *a, dp_plan *to,
                      DP_UNUSED dp_err *e) {
    const dp_case *c = a->c;
    const dp_backend be = k->backend;
    const int ranks = c->conv.own.kind ? c->conv.own.ranks : a->N;
    for (int i = 0; i < a->nbase; i++) {
        const dp_base base = a->base[i];
        if (dp_backends[be].on_device && base == DP_BASE_FP64) continue;
        dp_planned *x = dp_plan_add(to, k, a->N, base, DP_FP32);
        const char *no = unfit(c, be, base) ? unfit(c, be, base) : dp_unavailable(be, ranks);
        x->bare = 1;
        if (no) snprintf(x->no, sizeof x->no, "%s", no);
    }
    return DP_OK;
}

static void note(const dp_sharding *sp, DP_UNUSED const dp_made *m, dp_run *r) {
    r->fault = sp->std->o->fault;
    r->truth_bits = sp->c->bits;
}

/* ---- one run --------------------------------------------------------------------------------- */

/* Results, entry by entry: two of them. */
typedef struct {
    dp_conv_result is, radius; /* of a truth */
} conv_truth;
typedef struct {
    dp_conv_result got, bound;
} answer;

static void *open_truth(const dp_case *c) {
    conv_truth *t = dp_calloc(1, sizeof *t);
    dp_conv_result_alloc(&t->is, &c->conv);
    dp_conv_result_alloc(&t->radius, &c->conv);
    dp_conv_truth(&c->conv, c->bits, &t->is, &t->radius);
    return t;
}

static void close_truth(void *truth) {
    conv_truth *t = truth;
    dp_conv_result_free(&t->is);
    dp_conv_result_free(&t->radius);
    free(t);
}

static dp_status compute(const dp_planned *x, dp_sharding *sp, DP_UNUSED void **kept, dp_made *m,
                         dp_err *e) {
    const dp_conv *v = &sp->c->conv;
    const dp_backend be = x->kind->backend;
    const int N = x->N;
    answer *y = m->own = dp_calloc(1, sizeof *y);
    dp_conv_result_alloc(&y->got, v);
    dp_conv_result_alloc(&y->bound, v);
    dp_conv_result *const got = &y->got;
    const dp_status st = dp_convolve(&v, 1, x->base, N, be, &got, e);
    if (st) return st;
    (dp_backends[be].simulated ? dp_conv_bound : dp_conv_bound_sigmoid32)(v, x->base, N, &y->bound);
    dp_sim_convolved(sp->std->o->fault, NULL, x->base, N, NULL,
                     (dp_sim_place){.conv = v, .convolved = &y->got});
    return DP_OK;
}

/* Result i of the table, where the subject has it. */
static void judge_result(const dp_sharding *sp, int i, answer *y, dp_run *r) {
    conv_truth *t = sp->std->other;
    const dp_conv *v = &sp->c->conv;
    const dp_tensor_field *f = &dp_conv_result_fields[i];
    const int tokens = f->kind == DP_OF_TOKENS;
    int64_t rows;
    int width;
    dp_conv_result_shape(v, i, &rows, &width);
    DP_OWN double *radius = dp_norms_up(t->radius.out[i], rows, width);
    DP_OWN double *bound = dp_norms_up(y->bound.out[i], rows, width);
    const dp_compare_in in = {.name = f->name,
                              .N = sp->N,
                              .heads = 1,
                              .rows = rows,
                              .width = width,
                              .got = y->got.out[i],
                              .want = t->is.out[i],
                              .rad = radius,
                              .bound = bound,
                              .place = tokens ? place_token : place_channel,
                              .ctx = sp,
                              .tokens = tokens ? rows : 0};
    dp_compare(&in, &r->tensor[r->ntensor++]);
}

static void judge(const dp_sharding *sp, dp_made *m, dp_run *r) {
    r->tensor = dp_calloc(DP_CONV_NRESULTS, sizeof *r->tensor);
    for (int i = 0; i < DP_CONV_NRESULTS; i++)
        if (dp_conv_result_exists(&sp->c->conv, i)) judge_result(sp, i, m->own, r);
    dp_run_close(r);
}

static void free_answer(DP_UNUSED const dp_case *c, dp_made *m) {
    answer *y = m->own;
    dp_conv_result_free(&y->got);
    dp_conv_result_free(&y->bound);
    free(y);
}

#define CONV(BACKEND)                                                                   \
    {                                                                                   \
        .backend = BACKEND, .absent = dp_unavailable, .plan = plan, .compute = compute, \
        .note = note, .judge = judge, .free = free_answer                               \
    }
static const dp_subject_kind ON_SIMULATED = CONV(DP_BACKEND_SIM), ON_CUDA = CONV(DP_BACKEND_CUDA),
                             ON_NCCL = CONV(DP_BACKEND_NCCL), ON_PROCESSES = CONV(DP_BACKEND_MPI);
const dp_subjects dp_subjects_of_conv = {
    {&ON_SIMULATED, &ON_CUDA, &ON_NCCL, &ON_PROCESSES}, .truth = open_truth, .close = close_truth};
