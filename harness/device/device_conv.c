#include "device_conv.h"

#ifndef DP_HAVE_CUDA

dp_status dp_cuda_conv_parts(const dp_conv *const *c, int parts, int bf16, int N, dp_backend b,
                             dp_conv_result *const *r, dp_err *e) {
    (void)c;
    (void)parts;
    (void)bf16;
    (void)r;
    return dp_fail(e, DP_EDEVICE, "%s", dp_cuda_unavailable(b, N));
}

#else

#include "device_procs.h"
#include "gpu/dp_conv.h"

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    const dp_conv *const *c;
    int parts, bf16, rank, N;
    dpg_comm *comm;
    dp_conv_result *const *out;
    volatile dp_rank_state state;
    dp_status status;
    dp_err err;
    void *dev[8 * DPG_CONV_PARTS + 1];
    int ndev;
    dpg_conv *plan;
    cudaStream_t stream;
} conv_job;

#define CUDA(j, call)                                                                           \
    do {                                                                                        \
        const cudaError_t rc_ = (call);                                                         \
        if (rc_ != cudaSuccess)                                                                 \
            return dp_fail(&(j)->err, DP_EDEVICE, "%s:%d: rank %d: %s: %s", __FILE__, __LINE__, \
                           (j)->rank, #call, cudaGetErrorString(rc_));                          \
    } while (0)

/* Device memory of `bytes`, filled with NaN bits: what is not written shows. */
static dp_status memory(conv_job *j, size_t bytes, void **x) {
    CUDA(j, cudaMalloc(x, bytes));
    j->dev[j->ndev++] = *x;
    CUDA(j, cudaMemset(*x, 0xff, bytes));
    return DP_OK;
}

static dp_status upload(conv_job *j, const double *x, int64_t n, int bf16, void **dev) {
    const size_t bytes = (size_t)n * (bf16 ? 2 : 4);
    void *host = dp_calloc(bytes, 1);
    for (int64_t i = 0; i < n; i++)
        if (bf16)
            ((uint16_t *)host)[i] = dp_bf16_bits((float)x[i]);
        else
            ((float *)host)[i] = (float)x[i];
    const dp_status st = memory(j, bytes, dev);
    const cudaError_t rc = st ? cudaSuccess : cudaMemcpy(*dev, host, bytes, cudaMemcpyHostToDevice);
    free(host);
    CUDA(j, rc);
    return st;
}

static dp_status download(conv_job *j, const void *dev, int64_t n, int bf16, double *x) {
    const size_t bytes = (size_t)n * (bf16 ? 2 : 4);
    void *host = dp_calloc(bytes, 1);
    const cudaError_t rc = cudaMemcpy(host, dev, bytes, cudaMemcpyDeviceToHost);
    for (int64_t i = 0; i < n; i++)
        x[i] = bf16 ? dp_bf16_from_bits(((uint16_t *)host)[i]) : ((float *)host)[i];
    free(host);
    CUDA(j, rc);
    return DP_OK;
}

/* One part's tensors, from and to the host. */
static dp_status part_up(conv_job *j, int i, int64_t L, dpg_conv_tensors *t) {
    const dp_conv *c = j->c[i];
    const int b = j->bf16;
    const int64_t n = L * c->D, at = j->rank * n, nw = (int64_t)c->D * c->W;
    const size_t size = b ? 2 : 4;
    dp_status st = DP_OK;
    void *x;
#define UP(field, from, count, bf)           \
    if (!st && (from)) {                     \
        st = upload(j, from, count, bf, &x); \
        t->field = x;                        \
    }
#define OUT(field, bytes)          \
    if (!st) {                     \
        st = memory(j, bytes, &x); \
        t->field = x;              \
    }
    UP(x, c->x + at, n, b)
    UP(w, c->w, nw, 0)
    UP(bias, c->bias, c->D, 0)
    OUT(y, (size_t)n * size)
    if (c->dy) {
        UP(dy, c->dy + at, n, b)
        OUT(dx, (size_t)n * size)
        OUT(dw, (size_t)nw * 4)
        OUT(dbias, (size_t)c->D * 4)
    }
#undef UP
#undef OUT
    return st;
}

static dp_status part_down(conv_job *j, int i, int64_t L, const dpg_conv_tensors *t) {
    const dp_conv *c = j->c[i];
    dp_conv_result *out = j->out[i];
    const int b = j->bf16;
    const int64_t n = L * c->D, at = j->rank * n, nw = (int64_t)c->D * c->W;
    dp_status st = download(j, t->y, n, b, out->y + at);
    if (!st && c->dy) st = download(j, t->dx, n, b, out->dx + at);
    if (!st && c->dy && !j->rank) st = download(j, t->dw, nw, 0, out->dw);
    if (!st && c->dy && !j->rank && c->bias) st = download(j, t->dbias, c->D, 0, out->dbias);
    return st;
}

static dp_status rank_body(conv_job *j) {
    const dp_conv *c = j->c[0];
    dpg_conv_problem p = {.T = c->T,
                          .W = c->W,
                          .silu = c->silu,
                          .parts = j->parts,
                          .Nseq = c->Nseq,
                          .cu = c->cu,
                          .dtype = j->bf16 ? DPG_BF16 : DPG_F32};
    dpg_conv_tensors t[DPG_CONV_PARTS] = {0};
    void *ws;
    for (int i = 0; i < j->parts; i++)
        p.D[i] = j->c[i]->D;
    CUDA(j, cudaSetDevice(j->comm ? j->comm->device : 0));
    CUDA(j, cudaStreamCreate(&j->stream));
    dp_status st = dpg_conv_create(&j->plan, &p, j->rank, j->N, &j->err);
    if (st) return st;
    const int64_t L = dpg_conv_tokens(j->plan);
    for (int i = 0; i < j->parts && !st; i++)
        st = part_up(j, i, L, &t[i]);
    if (!st) st = memory(j, dpg_conv_workspace_bytes(j->plan), &ws);
    if (!st) st = dpg_conv_forward(j->plan, t, ws, j->comm, j->stream, &j->err);
    if (!st && c->dy) st = dpg_conv_backward(j->plan, t, ws, j->comm, j->stream, &j->err);
    if (!st && j->comm) st = j->comm->wait(j->comm, j->stream, &j->err);
    if (st) return st;
    CUDA(j, cudaStreamSynchronize(j->stream));
    for (int i = 0; i < j->parts && !st; i++)
        st = part_down(j, i, L, &t[i]);
    return st;
}

static void *rank_main(void *arg) {
    conv_job *j = arg;
    j->status = rank_body(j);
    j->state = j->status ? DP_RANK_FAILED : DP_RANK_ENDED;
    if (j->status && j->comm) j->comm->abort(j->comm, j->err.msg);
    for (int i = 0; i < j->ndev; i++)
        cudaFree(j->dev[i]);
    dpg_conv_destroy(j->plan);
    if (j->stream) cudaStreamDestroy(j->stream);
    return NULL;
}

static void rank_process(void *jobs, int rank, dpg_comm *c, const dp_err *why) {
    conv_job *j = (conv_job *)jobs + rank;
    j->comm = c;
    if (c)
        rank_main(j);
    else {
        j->err = *why;
        j->status = why->code;
        j->state = DP_RANK_FAILED;
    }
}

/* Copies that processes see, and back. */
static const dp_conv *share_part(const dp_conv *c) {
    dp_conv *s = dp_procs_alloc(sizeof *s);
    const size_t cu = (size_t)(c->Nseq + 1) * sizeof *c->cu;
    *s = *c;
    s->cu = memcpy(dp_procs_alloc(cu), c->cu, cu);
    s->x = dp_procs_copy(c->x, c->T * c->D);
    s->w = dp_procs_copy(c->w, (int64_t)c->D * c->W);
    s->bias = dp_procs_copy(c->bias, c->D);
    s->dy = dp_procs_copy(c->dy, c->T * c->D);
    return s;
}

static dp_conv_result *share_result(const dp_conv *c, const dp_conv_result *r) {
    dp_conv_result *s = dp_procs_alloc(sizeof *s);
    *s =
        (dp_conv_result){dp_procs_copy(r->y, c->T * c->D), dp_procs_copy(r->dx, c->T * c->D),
                         dp_procs_copy(r->dw, (int64_t)c->D * c->W), dp_procs_copy(r->dbias, c->D)};
    return s;
}

static void fetch(double *to, const double *from, int64_t n) {
    if (to) memcpy(to, from, (size_t)n * sizeof *to);
}

dp_status dp_cuda_conv_parts(const dp_conv *const *c, int parts, int bf16, int N, dp_backend b,
                             dp_conv_result *const *r, dp_err *e) {
    const int procs = dp_cuda_processes(b, N);
    conv_job *job =
        procs ? dp_procs_alloc((size_t)N * sizeof *job) : dp_calloc((size_t)N, sizeof *job);
    const dp_conv **part = procs ? dp_procs_alloc(DPG_CONV_PARTS * sizeof *part) : NULL;
    dp_conv_result **out = procs ? dp_procs_alloc(DPG_CONV_PARTS * sizeof *out) : NULL;
    dpg_comm *comm = NULL;
    pthread_t *thread = dp_calloc((size_t)N, sizeof *thread);
    volatile dp_rank_state **state = dp_calloc((size_t)N, sizeof *state);
    int left = -1;
    for (int i = 0; i < parts && procs; i++) {
        part[i] = share_part(c[i]);
        out[i] = share_result(c[i], r[i]);
    }
    dp_status st = procs ? DP_OK : dp_cuda_comms(b, N, &comm, e);
    if (!st) {
        for (int i = 0; i < N; i++) {
            state[i] = &job[i].state;
            job[i] = (conv_job){.c = procs ? part : c,
                                .parts = parts,
                                .bf16 = bf16,
                                .rank = i,
                                .N = N,
                                .comm = comm ? &comm[i] : NULL,
                                .out = procs ? out : r};
        }
        for (int i = 0; i < N && !procs; i++)
            pthread_create(&thread[i], NULL, rank_main, &job[i]);
        if (procs)
            st = dp_procs_run(N, rank_process, job, state, dp_cuda_limit_s(), &left, e);
        else
            left = dp_cuda_join(thread, state, N);
        for (int i = 0; i < N; i++)
            if (job[i].state == DP_RANK_FAILED && !st)
                st = dp_fail(e, job[i].status, "%s", job[i].err.msg);
        if (left >= 0 && !procs) return st; /* its thread still uses what would be freed below */
        if (left >= 0 && !st) st = dp_fail(e, DP_EDEVICE, "rank %d: its process has ended", left);
        dp_cuda_comms_end(b, N, comm, st != DP_OK);
        for (int i = 0; i < parts && procs && !st; i++) {
            const int64_t n = c[i]->T * c[i]->D, nw = (int64_t)c[i]->D * c[i]->W;
            fetch(r[i]->y, out[i]->y, n);
            fetch(r[i]->dx, out[i]->dx, n);
            fetch(r[i]->dw, out[i]->dw, nw);
            fetch(r[i]->dbias, out[i]->dbias, c[i]->D);
        }
    }
    if (procs)
        dp_procs_end(st != DP_OK);
    else
        free(job);
    free(thread);
    free(state);
    return st;
}

#endif

dp_status dp_cuda_conv_run(const dp_conv *c, int bf16, int N, dp_backend b, dp_conv_result *r,
                           dp_err *e) {
    return dp_cuda_conv_parts(&c, 1, bf16, N, b, &r, e);
}
