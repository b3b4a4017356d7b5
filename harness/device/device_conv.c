/* The convolutions of gpu/ as a subject (device_run.h). */
#include "device_run.h"

#ifdef DP_HAVE_CUDA
#include "apart_rank.h"
#include "device_apart.h"
#include "device_procs.h"
#include "device_ranks.h"
#include "gpu/dp_conv.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    dp_rank rank;
    const dp_conv *const *c;
    int parts, bf16, N;
    dp_conv_result *const *out;
    dpg_conv *plan;
    dp_own_table own; /* who owns which tokens */
} conv_job;

/* x and y and their gradients are in the format of the job, parameters and theirs in fp32. */
static dpg_dtype dtype_of(const conv_job *j, const dp_tensor_field *f) {
    return f->kind == DP_OF_TOKENS && j->bf16 ? DPG_BF16 : DPG_F32;
}

/* One part's tensors, from and to the host. */
static dp_status part_up(conv_job *j, int i, int64_t L, dpg_conv_tensors *t) {
    const dp_conv *c = j->c[i];
    const void **const in[DP_CONV_NINPUTS] = {[DP_CONV_X] = (const void **)&t->x,
                                              [DP_CONV_WEIGHT] = (const void **)&t->w,
                                              [DP_CONV_BIAS] = (const void **)&t->bias,
                                              [DP_CONV_DY] = (const void **)&t->dy};
    void **const out[DP_CONV_NRESULTS] = {[DP_CONV_Y] = (void **)&t->y,
                                          [DP_CONV_DX] = (void **)&t->dx,
                                          [DP_CONV_DW] = (void **)&t->dw,
                                          [DP_CONV_DBIAS] = (void **)&t->dbias};
    dp_status st = DP_OK;
    for (int k = 0; k < DP_CONV_NINPUTS && !st; k++) {
        const dp_tensor_field *f = &dp_conv_input_fields[k];
        const int64_t n = dp_conv_count(c, f, L);
        double *x = c->in[k], *own = NULL;
        if (x && f->kind == DP_OF_TOKENS)
            dp_own_copy(&j->own, j->rank.dev.rank, dp_conv_count(c, f, 1), x, own = dp_doubles(n),
                        0);
        st = dp_device_upload(&j->rank.dev, own ? own : x, n, dtype_of(j, f), in[k]);
        free(own);
    }
    for (int k = 0; k < DP_CONV_NRESULTS && !st; k++) {
        const dp_tensor_field *f = &dp_conv_result_fields[k];
        if (!f->backward || c->dy)
            st = dp_device_blank(&j->rank.dev, dp_conv_count(c, f, L), dtype_of(j, f), out[k]);
    }
    return st;
}

static dp_status part_down(conv_job *j, int i, int64_t L, const dpg_conv_tensors *t) {
    const dp_conv *c = j->c[i];
    const void *const from[DP_CONV_NRESULTS] = {
        [DP_CONV_Y] = t->y, [DP_CONV_DX] = t->dx, [DP_CONV_DW] = t->dw, [DP_CONV_DBIAS] = t->dbias};
    const int rank = j->rank.dev.rank;
    dp_status st = DP_OK;
    for (int k = 0; k < DP_CONV_NRESULTS && !st; k++) {
        const dp_tensor_field *f = &dp_conv_result_fields[k];
        const int tokens = f->kind == DP_OF_TOKENS;
        const int64_t n = dp_conv_count(c, f, L);
        if (!dp_conv_result_exists(c, k) || (!tokens && rank)) continue;
        double *x = j->out[i]->out[k], *own = tokens ? dp_doubles(n) : NULL;
        st = dp_device_download(&j->rank.dev, from[k], n, dtype_of(j, f), own ? own : x);
        if (own && !st) dp_own_copy(&j->own, rank, dp_conv_count(c, f, 1), x, own, 1);
        free(own);
    }
    return st;
}

static dp_status run_job(void *job) {
    conv_job *j = job;
    dp_device *dev = &j->rank.dev;
    dpg_comm *comm = j->rank.comm;
    const dp_conv *c = j->c[0];
    dpg_conv_problem p = {.T = c->T,
                          .W = c->W,
                          .silu = c->silu,
                          .parts = j->parts,
                          .Nseq = c->Nseq,
                          .cu = c->cu,
                          .dtype = j->bf16 ? DPG_BF16 : DPG_F32};
    j->own = dp_own_table_of(c->own, c->T, j->N);
    p.own = dp_own_for_kernels(&j->own, c->own);
    dpg_conv_tensors t[DPG_CONV_PARTS] = {0};
    void *ws;
    for (int i = 0; i < j->parts; i++)
        p.D[i] = j->c[i]->D;
    DP_CUDA(dev, cudaSetDevice(comm ? comm->device : 0));
    DP_CUDA(dev, cudaStreamCreate(&dev->stream));
    dp_status st = dpg_conv_create(&j->plan, &p, dev->rank, j->N, &dev->err);
    if (st) return st;
    const int64_t L = dpg_conv_tokens(j->plan);
    for (int i = 0; i < j->parts && !st; i++)
        st = part_up(j, i, L, &t[i]);
    if (!st)
        st = dp_device_blank(dev, (int64_t)(dpg_conv_workspace_bytes(j->plan) + 3) / 4, DPG_F32,
                             &ws);
    if (!st) st = dpg_conv_forward(j->plan, t, ws, comm, dev->stream, &dev->err);
    if (!st && c->dy) st = dpg_conv_backward(j->plan, t, ws, comm, dev->stream, &dev->err);
    if (!st && comm) st = comm->wait(comm, dev->stream, &dev->err);
    if (st) return st;
    DP_CUDA(dev, cudaStreamSynchronize(dev->stream));
    for (int i = 0; i < j->parts && !st; i++)
        st = part_down(j, i, L, &t[i]);
    return st;
}

static void end_job(void *job) {
    conv_job *j = job;
    dpg_conv_destroy(j->plan);
    dp_own_table_free(&j->own);
}

/* Copies that processes see, and back. */
static const dp_conv *share_part(const dp_conv *c) {
    dp_conv *s = dp_procs_alloc(sizeof *s);
    const size_t cu = (size_t)(c->Nseq + 1) * sizeof *c->cu;
    *s = *c;
    s->cu = memcpy(dp_procs_alloc(cu), c->cu, cu);
    for (int i = 0; i < DP_CONV_NINPUTS; i++)
        s->in[i] = dp_procs_copy(c->in[i], dp_conv_count(c, &dp_conv_input_fields[i], c->T));
    return s;
}

static dp_conv_result *share_result(const dp_conv *c, dp_conv_result *r) {
    dp_conv_result *s = dp_procs_alloc(sizeof *s);
    for (int i = 0; i < DP_CONV_NRESULTS; i++)
        s->out[i] = dp_procs_copy(r->out[i], dp_conv_count(c, &dp_conv_result_fields[i], c->T));
    return s;
}

static void fetch_result(const dp_conv *c, dp_conv_result *r, dp_conv_result *shared) {
    for (int i = 0; i < DP_CONV_NRESULTS; i++) {
        const size_t n = (size_t)dp_conv_count(c, &dp_conv_result_fields[i], c->T);
        if (r->out[i]) memcpy(r->out[i], shared->out[i], n * sizeof(double));
    }
}

/* ---- ranks that are processes of mpirun or torchrun ------------------------------------------ */

/* The message to a rank: shapes, and its arrays. */
typedef struct {
    int what, parts, bf16;
    dp_ticket ticket;
    dp_conv c[DPG_CONV_PARTS];
} conv_order;

/* A tensor to process `to`, or from it: the tokens of a rank, or all of it where it is none of
 * tokens. */
static void pass(double *x, const dp_conv *c, const dp_tensor_field *f, int N, int rank, int other,
                 int give) {
    DP_FREED(dp_own_table_free) dp_own_table t = dp_own_table_of(c->own, c->T, N);
    const int tokens = f->kind == DP_OF_TOKENS;
    const int64_t each = dp_conv_count(c, f, 1), n = tokens ? dp_own_tokens(&t, rank) * each : each;
    double *own = tokens ? dp_doubles(n) : x;
    if (tokens && give) dp_own_copy(&t, rank, each, x, own, 0);
    if (give)
        dp_mpi_send_numbers(other, own, n);
    else
        dp_mpi_receive_numbers(other, own, n, f->name);
    if (tokens && !give) dp_own_copy(&t, rank, each, x, own, 1);
    if (tokens) free(own);
}

static void send_conv(conv_order *o, const dp_conv *const *c, int r) {
    for (int i = 0; i < o->parts; i++)
        o->c[i] = *c[i];
    dp_mpi_send(r, DP_MPI_JOB, o, sizeof *o);
    dp_mpi_send_cu(r, c[0]->cu, c[0]->Nseq);
    for (int i = 0; i < o->parts; i++)
        for (int k = 0; k < DP_CONV_NINPUTS; k++) {
            double *x = o->c[i].in[k];
            if (x) pass(x, c[i], &dp_conv_input_fields[k], o->ticket.N, r, r, 1);
        }
}

/* As large as all ranks', with the tokens of this one. */
static void receive_conv(dp_conv *c, int64_t *cu, int N) {
    c->cu = cu;
    for (int k = 0; k < DP_CONV_NINPUTS; k++) {
        const dp_tensor_field *f = &dp_conv_input_fields[k];
        double **x = &c->in[k];
        if (!*x) continue;
        *x = dp_doubles(dp_conv_count(c, f, c->T));
        pass(*x, c, f, N, dp_mpi_rank(), 0, 0);
    }
}

/* Results of tokens go from one to another; sums are the same on all. */
static void each_result(const dp_conv *c, dp_conv_result *r, int N, int rank, int give) {
    for (int k = 0; k < DP_CONV_NRESULTS; k++) {
        const dp_tensor_field *f = &dp_conv_result_fields[k];
        double *x = r->out[k];
        if (x && f->kind == DP_OF_TOKENS) pass(x, c, f, N, rank, give ? 0 : rank, give);
    }
}

static void work_conv(const void *message, size_t bytes) {
    conv_order o;
    dp_conv_result r[DPG_CONV_PARTS], *out[DPG_CONV_PARTS];
    const dp_conv *c[DPG_CONV_PARTS];
    memcpy(&o, message, bytes);
    if (o.parts < 1 || o.parts > DPG_CONV_PARTS) dp_mpi_refuse(0, "parts", o.parts);
    DP_OWN int64_t *cu = dp_mpi_receive_cu(o.c[0].Nseq);
    for (int i = 0; i < o.parts; i++) {
        receive_conv(&o.c[i], cu, o.ticket.N);
        dp_conv_result_alloc(&r[i], &o.c[i]);
        c[i] = &o.c[i];
        out[i] = &r[i];
    }
    conv_job job = {.c = c, .parts = o.parts, .bf16 = o.bf16, .N = o.ticket.N, .out = out};
    dp_apart_run_own(&o.ticket, &job, run_job, end_job);
    dp_apart_say(&job.rank);
    for (int i = 0; i < o.parts; i++) {
        if (!job.rank.status) each_result(c[i], out[i], o.ticket.N, dp_mpi_rank(), 1);
        o.c[i].cu = NULL;
        dp_conv_result_free(&r[i]);
        dp_conv_free(&o.c[i]);
    }
}
const dp_mpi_worker dp_apart_conv_worker = {DP_MPI_DEVICE_CONV, sizeof(conv_order), work_conv};

static dp_status run_apart(const dp_conv *const *c, int parts, int bf16, int N,
                           dp_conv_result *const *r, dp_err *e) {
    conv_order o = {.what = DP_MPI_DEVICE_CONV, .parts = parts, .bf16 = bf16};
    conv_job job = {.c = c, .parts = parts, .bf16 = bf16, .N = N, .out = r};
    dp_err own = {0};
    dp_rank other;
    if (dp_ticket_make(&o.ticket, N, &own)) return dp_fail(e, own.code, "%s", own.msg);
    for (int i = 1; i < N; i++)
        send_conv(&o, c, i);
    dp_apart_run_own(&o.ticket, &job, run_job, end_job);
    if (job.rank.status) dp_fail(&own, job.rank.status, "%s", job.rank.dev.err.msg);
    const double limit = dp_apart_hurry(&job.rank);
    for (int from = 1; from < N; from++) {
        dp_apart_hear(from, &other, &own);
        for (int i = 0; i < parts && !other.status; i++)
            each_result(c[i], r[i], N, from, 0);
    }
    dp_apart_done(limit, own.code != DP_OK);
    return own.code ? dp_fail(e, own.code, "%s", own.msg) : DP_OK;
}

/* ---- all of them ----------------------------------------------------------------------------- */

dp_status dp_cuda_conv(const dp_conv *const *c, int parts, dp_base base, int N, dp_backend b,
                       dp_conv_result *const *r, dp_err *e) {
    const int bf16 = base == DP_BASE_BF16;
    if (c[0]->own.kind) N = c[0]->own.ranks;
    if (dp_cuda_apart(b)) return run_apart(c, parts, bf16, N, r, e);
    const int procs = dp_cuda_processes(b, N);
    conv_job *job = dp_ranks_alloc(procs, N, sizeof *job);
    const dp_conv **part = procs ? dp_procs_alloc(DPG_CONV_PARTS * sizeof *part) : NULL;
    dp_conv_result **out = procs ? dp_procs_alloc(DPG_CONV_PARTS * sizeof *out) : NULL;
    const dp_ranks ranks = {N, procs, b, job, sizeof *job, run_job, end_job};
    int left;
    for (int i = 0; i < parts && procs; i++) {
        part[i] = share_part(c[i]);
        out[i] = share_result(c[i], r[i]);
    }
    for (int i = 0; i < N; i++)
        job[i] = (conv_job){
            .c = procs ? part : c, .parts = parts, .bf16 = bf16, .N = N, .out = procs ? out : r};
    const dp_status st = dp_ranks_run(&ranks, &left, e);
    if (left >= 0 && !procs) return st;
    for (int i = 0; i < parts && procs && !st; i++)
        fetch_result(c[i], r[i], out[i]);
    dp_ranks_free(procs, job, st != DP_OK);
    return st;
}

#endif
