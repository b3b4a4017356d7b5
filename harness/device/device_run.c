#define _GNU_SOURCE /* pthread_tryjoin_np */
#include "device_run.h"

const char *const dp_backend_names[DP_NBACKENDS] = {"sim",    "cuda", "nccl",
                                                    "lapack", "file", "subject"};

static double limit_s = 8;
void dp_cuda_limit(double seconds) { limit_s = seconds; }

const char *const dp_cuda_way_names[DP_NCUDA_WAYS] = {
    "plain",    "dh-only",          "pair-dg", "save-all",
    "segments", "segments-dh-only", "windows", "windows-dh-only"};

#ifndef DP_HAVE_CUDA

const char *dp_cuda_unavailable(dp_backend b, int N) {
    (void)N;
    return b == DP_BACKEND_SIM ? NULL : "this build has no CUDA kernels: nvcc was not found";
}
const char *dp_cuda_device(void) { return "none"; }
dp_status dp_cuda_run(const dp_problem *p, int bf16_inputs, dp_base base, dp_format chain, int N,
                      dp_backend b, int backward, dp_cuda_way way, dp_cuda_result *out, dp_err *e) {
    (void)p;
    (void)bf16_inputs;
    (void)base;
    (void)chain;
    (void)backward;
    (void)way;
    (void)out;
    return dp_fail(e, DP_EDEVICE, "%s", dp_cuda_unavailable(b, N));
}
void dp_cuda_result_free(dp_cuda_result *r, int HV) { (void)r, (void)HV; }
const dp_truth_device *dp_cuda_truth(const dp_problem *p) {
    (void)p;
    return NULL;
}

#else

#include "gpu/dp_gpu.h"
#include "gpu/dp_truth_gpu.h"
#include "ref/vocabulary/context.h"

#include "device_procs.h"
#include "harness/base/clock.h"

#include <cuda_runtime_api.h>
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LARGE (1 << 20)    /* entries from which conversions use all cores */
#define MOST DP_PROCS_MOST /* ranks over NCCL; devices */
#define LEAVE_S \
    5.0 /* once a rank has failed, the others end within this time or are left behind \
         */

const char *dp_cuda_unavailable(dp_backend b, int N) {
    static char why[400];
    int n = 0;
    if (b == DP_BACKEND_SIM) return NULL;
    const cudaError_t rc = cudaGetDeviceCount(&n);
    if (rc != cudaSuccess || n == 0) {
        cudaGetLastError();
        snprintf(why, sizeof why, "no CUDA device: %s",
                 rc != cudaSuccess ? cudaGetErrorString(rc) : "none was found");
        return why;
    }
    if (!dpg_device_runs(why, sizeof why)) return why;
    if (b == DP_BACKEND_NCCL && n < N && !dp_cuda_processes(b, N)) {
        snprintf(why, sizeof why,
                 "%d ranks over NCCL: %d device%s, and no processes that could share %s (at most "
                 "%d can)",
                 N, n, n == 1 ? "" : "s", n == 1 ? "it" : "them", DP_PROCS_MOST);
        return why;
    }
    return NULL;
}

const char *dp_cuda_device(void) {
    static char name[320];
    struct cudaDeviceProp prop;
    int driver = 0;
    if (cudaGetDeviceProperties(&prop, 0) != cudaSuccess) return "none";
    cudaDriverGetVersion(&driver);
    snprintf(name, sizeof name, "%s, CUDA driver %d.%d", prop.name, driver / 1000,
             driver % 1000 / 10);
    return name;
}

/* ---- the truth on a device ------------------------------------------------------------------- */

static dp_status truth_open(void **s, int64_t Kp, int64_t R, int64_t W, int64_t len, dp_err *e) {
    return dpg_truth_open((dpg_truth **)s, Kp, R, W, len, e);
}
static void truth_close(void *s) { dpg_truth_close(s); }
static dp_status truth_set(void *s, const double *S, dp_err *e) { return dpg_truth_set(s, S, e); }
static dp_status truth_get(void *s, double *S, dp_err *e) { return dpg_truth_get(s, S, e); }
static dp_status truth_forward(void *s, const tr_dd_rows *b, const tr_dd_cols *c, dp_err *e) {
    return dpg_truth_forward(s, b, c, e);
}

const dp_truth_device *dp_cuda_truth(const dp_problem *p) {
    static const dp_truth_device device = {truth_open, truth_close, truth_set, truth_get,
                                           truth_forward};
    return dpg_truth_takes((p->K + TR_DD_LANES - 1) / TR_DD_LANES * TR_DD_LANES, p->R) &&
                   !dp_cuda_unavailable(DP_BACKEND_CUDA, 1)
               ? &device
               : NULL;
}

/* ---- one rank -------------------------------------------------------------------------------- */

/* Ranks that share a device use one stream of it, in turns. */
struct in_order {
    volatile int turn, failed;
    cudaStream_t stream[MOST];
};

typedef struct {
    const dp_problem *p;
    dpg_problem g;
    dpg_options opt;
    int N, rank;
    int by_windows;
    struct in_order *order; /* of forwards by windows */
    dpg_comm *comm;
    dp_cuda_result *out;
    int shared;  /* a process: results are left where all see them (device_procs.h) */
    float *gate; /* [HV] dA_log, [HV][Kg] ddt_bias as this rank got them; NULL without backward */
    size_t saved, kept;
    int segments;
    const char *path;
    volatile dp_rank_state state;
    dp_status status;
    dp_err err;
    void *dev[32]; /* device memory of this rank */
    int ndev;
    dpg_plan *plan;
    cudaStream_t stream;
} rank_job;

#define CUDA(j, call)                                                                           \
    do {                                                                                        \
        const cudaError_t rc_ = (call);                                                         \
        if (rc_ != cudaSuccess)                                                                 \
            return dp_fail(&(j)->err, DP_EDEVICE, "%s:%d: rank %d: %s: %s", __FILE__, __LINE__, \
                           (j)->rank, #call, cudaGetErrorString(rc_));                          \
    } while (0)

static dp_status device_memory(rank_job *j, size_t bytes, void **x) {
    CUDA(j, cudaMalloc(x, bytes ? bytes : 1));
    j->dev[j->ndev++] = *x;
    return DP_OK;
}

/* n doubles -> device, as fp32 or bf16 (each value is representable, or is rounded once). NULL
 * stays NULL. */
static dp_status upload(rank_job *j, const double *x, int64_t n, dpg_dtype d, const void **dev) {
    void *mem, *host;
    *dev = NULL;
    if (!x) return DP_OK;
    const size_t bytes = (size_t)n * (d == DPG_BF16 ? 2 : 4);
    host = dp_calloc(bytes, 1);
#pragma omp parallel for if (n > LARGE)
    for (int64_t i = 0; i < n; i++) {
        if (d == DPG_BF16)
            ((uint16_t *)host)[i] = dp_bf16_bits((float)x[i]);
        else
            ((float *)host)[i] = (float)x[i];
    }
    dp_status st = device_memory(j, bytes, &mem);
    const cudaError_t rc = st ? cudaSuccess : cudaMemcpy(mem, host, bytes, cudaMemcpyHostToDevice);
    free(host);
    CUDA(j, rc);
    *dev = mem;
    return st;
}

/* n words whose bits are NaN in both formats: what is not written shows. */
static dp_status nan_memory(rank_job *j, int64_t n, dpg_dtype d, void **x) {
    const size_t bytes = (size_t)n * (d == DPG_BF16 ? 2 : 4);
    const dp_status st = device_memory(j, bytes, x);
    if (!st) CUDA(j, cudaMemset(*x, 0xff, bytes));
    return st;
}

static dp_status download(rank_job *j, const void *dev, int64_t n, dpg_dtype d, double *to) {
    void *host = dp_calloc((size_t)n, d == DPG_BF16 ? 2 : 4);
    const cudaError_t rc =
        cudaMemcpy(host, dev, (size_t)n * (d == DPG_BF16 ? 2 : 4), cudaMemcpyDeviceToHost);
#pragma omp parallel for if (n > LARGE)
    for (int64_t i = 0; i < (rc == cudaSuccess ? n : 0); i++)
        to[i] = d == DPG_BF16 ? dp_bf16_from_bits(((uint16_t *)host)[i]) : ((float *)host)[i];
    free(host);
    CUDA(j, rc);
    return DP_OK;
}

/* States [Nseq][HV][K][V] of the sequences that end (or start) on this rank. */
static dp_status download_states(rank_job *j, const dp_context *c, const float *dev, int starts,
                                 double *to) {
    const dp_problem *p = j->p;
    const int64_t n = (int64_t)p->HV * p->K * p->V;
    dp_status st = DP_OK;
    for (int sub = 0; sub < c->nlocal && !st; sub++) {
        const int64_t seq = c->local_seq[sub];
        if (starts ? sub == 0 && !c->is_first : sub == c->nlocal - 1 && !c->is_last) continue;
        st = download(j, dev + seq * n, n, DPG_F32, to + seq * n);
    }
    return st;
}

static dp_status read_stage(rank_job *j, const dpg_tensors *t, const void *ws, const char *name,
                            int64_t each, double **slot) {
    const int HV = j->p->HV;
    double *x = dp_doubles(each * HV);
    const dp_status st = dpg_stage_read(j->plan, t, ws, name, x, &j->err);
    for (int hv = 0; hv < HV && !st; hv++)
        slot[j->rank * HV + hv] = (j->shared ? dp_procs_copy : dp_copy)(x + hv * each, each);
    free(x);
    return st;
}

static dp_status read_forward(rank_job *j, const dp_context *c, const dpg_tensors *t,
                              const void *ws) {
    const dp_problem *p = j->p;
    const int64_t KK = (int64_t)p->K * p->K, KV = (int64_t)p->K * p->V;
    dp_status st = DP_OK;
    if (j->N > 1 && c->nlocal == 1 && !c->is_first && !c->is_last)
        st = read_stage(j, t, ws, "M", KK, j->out->M);
    if (!st && !c->is_last && !p->s0) st = read_stage(j, t, ws, "H", KV, j->out->H);
    if (!st && !c->is_first) st = read_stage(j, t, ws, "S_in", KV, j->out->S_in);
    return st;
}

static dp_status read_backward(rank_job *j, const dp_context *c, const dpg_tensors *t,
                               const void *ws) {
    const dp_problem *p = j->p;
    const int64_t KK = (int64_t)p->K * p->K, KV = (int64_t)p->K * p->V;
    dp_status st = DP_OK;
    if (j->N > 1 && c->nlocal == 1 && !c->is_first && !c->is_last && !j->opt.send_dh_only)
        st = read_stage(j, t, ws, "dM", KK, j->out->dM);
    if (!st && !c->is_first && !p->dstate) st = read_stage(j, t, ws, "dH", KV, j->out->dH);
    if (!st && !c->is_last) st = read_stage(j, t, ws, "dS_out", KV, j->out->dS_out);
    return st;
}

static dp_status finish(rank_job *j, cudaStream_t stream) {
    const dp_status st = j->comm ? j->comm->wait(j->comm, stream, &j->err) : DP_OK;
    if (!st) CUDA(j, cudaStreamSynchronize(stream));
    return st;
}

/* A forward whose states go through windows: enqueued behind those of the ranks before. */
static dp_status forward_in_turn(rank_job *j, const dpg_tensors *t, void *ws) {
    struct in_order *o = j->order;
    if (!o) return dp_fail(&j->err, DP_EINPUT, "windows: ranks that are processes have none");
    cudaStream_t *stream = &o->stream[j->comm->device];
    int there = 0;
    CUDA(j, cudaGetDeviceCount(&there));
    j->comm->in_order = there < j->N;
    dp_status st = dpg_plan_connect(j->plan, j->comm, &j->err);
    if (!st && !dpg_plan_connected(j->plan))
        st = dp_fail(&j->err, DP_EINPUT,
                     j->comm->in_order && j->opt.send_dh_only
                         ? "windows: ranks that share a device cannot keep M of later ranks"
                         : "windows: the ranks' devices do not reach each other's memory");
    while (!st && o->turn < j->rank && !o->failed)
        usleep(20);
    if (!st && !*stream) CUDA(j, cudaStreamCreate(stream));
    if (!st) st = dpg_forward(j->plan, t, ws, j->comm, *stream, &j->err);
    if (st) o->failed = 1;
    o->turn++;
    return st ? st : finish(j, *stream);
}

/* The tokens of this rank in a tensor of `per` words a token. */
typedef struct {
    double *x;
    int64_t per;
    dpg_dtype d;
    void **dev;
} token_tensor;

static dp_status backward(rank_job *j, const dp_context *c, const dpg_tensors *t, void *ws) {
    const dp_problem *p = j->p;
    const int64_t L = c->L, HV = p->HV, HVR = HV * p->R, KV = HV * p->K * p->V, Kg = dp_Kg(p);
    const dpg_dtype dd = j->g.ddtype, dgd = j->g.dgdtype;
    dp_result *r = &j->out->out;
    dpg_grads g = {0};
    void *ds0, *gate;
    const token_tensor to[] = {{r->dq, p->H * p->K, dd, &g.dq},
                               {r->dk, (int64_t)p->H * p->R * p->K, dd, &g.dk},
                               {r->dv, HVR * p->V, dd, &g.dv},
                               {r->dg, HV * Kg, dgd, &g.dg},
                               {r->dbeta, HVR, dgd, &g.dbeta}};
    dp_status st = upload(j, p->dout + c->a * HV * p->V, L * HV * p->V, dd, &g.dout);
    if (!st) st = upload(j, p->dstate, p->Nseq * KV, DPG_F32, (const void **)&g.dfinal_state);
    for (size_t i = 0; i < sizeof to / sizeof *to && !st; i++)
        st = nan_memory(j, L * to[i].per, to[i].d, to[i].dev);
    if (!st) st = nan_memory(j, p->Nseq * KV, DPG_F32, &ds0);
    if (!st) st = nan_memory(j, HV * (1 + Kg), DPG_F32, &gate);
    if (st) return st;
    g.ds0 = ds0;
    if (p->A_log) g.dA_log = gate;
    if (p->dt_bias) g.ddt_bias = (float *)gate + HV;
    if (j->opt.save == DPG_SAVE_STATE) CUDA(j, cudaMemset(ws, 0xff, dpg_workspace_bytes(j->plan)));
    CUDA(j, cudaMemset(t->o, 0xff, (size_t)(L * HV * p->V) * (j->g.odtype == DPG_BF16 ? 2 : 4)));
    CUDA(j, cudaDeviceSynchronize());
    st = dpg_backward(j->plan, t, &g, ws, j->comm, j->stream, &j->err);
    if (!st) st = finish(j, j->stream);
    for (size_t i = 0; i < sizeof to / sizeof *to && !st; i++)
        st = download(j, *to[i].dev, L * to[i].per, to[i].d, to[i].x + c->a * to[i].per);
    if (!st) st = download_states(j, c, ds0, 1, r->ds0);
    const size_t ngate = (size_t)(HV * (1 + Kg));
    if (!st)
        CUDA(j, cudaMemcpy(j->gate = j->shared ? dp_procs_alloc(ngate * sizeof *j->gate)
                                               : dp_calloc(ngate, sizeof *j->gate),
                           gate, (size_t)(HV * (1 + Kg)) * 4, cudaMemcpyDeviceToHost));
    if (!st) st = read_backward(j, c, t, ws);
    return st;
}

static dp_status rank_body(rank_job *j) {
    const dp_problem *p = j->p;
    const int Kg = dp_Kg(p);
    dp_context c;
    dpg_tensors t = {0};
    void *ws, *final_state;
    dp_status st = dp_context_build(p->cu, p->Nseq, j->N, j->rank, &c, &j->err);
    if (st) return st;
    CUDA(j, cudaSetDevice(j->comm ? j->comm->device : 0));
    CUDA(j, cudaStreamCreate(&j->stream));
    st = dpg_plan_create(&j->plan, &j->g, &j->opt, j->rank, j->N, &j->err);
    const int64_t L = c.L, a = c.a, KV = (int64_t)p->K * p->V;
    const struct {
        const double *x;
        int64_t from, n;
        dpg_dtype d;
        const void **to;
    } in[] = {{p->q, a * p->H * p->K, L * p->H * p->K, j->g.dtype, &t.q},
              {p->k, a * p->H * p->R * p->K, L * p->H * p->R * p->K, j->g.dtype, &t.k},
              {p->v, a * p->HV * p->R * p->V, L * p->HV * p->R * p->V, j->g.dtype, &t.v},
              {p->g, a * p->HV * Kg, L * p->HV * Kg, j->g.gdtype, &t.g},
              {p->beta, a * p->HV * p->R, L * p->HV * p->R, j->g.gdtype, &t.beta},
              {p->A_log, 0, p->HV, DPG_F32, (const void **)&t.A_log},
              {p->dt_bias, 0, (int64_t)p->HV * Kg, DPG_F32, (const void **)&t.dt_bias},
              {p->s0, 0, p->Nseq * p->HV * KV, DPG_F32, (const void **)&t.s0}};
    for (size_t i = 0; i < sizeof in / sizeof *in && !st; i++)
        st = upload(j, in[i].x ? in[i].x + in[i].from : NULL, in[i].n, in[i].d, in[i].to);
    if (!st) st = nan_memory(j, L * p->HV * p->V, j->g.odtype, &t.o);
    if (!st) st = nan_memory(j, p->Nseq * p->HV * KV, DPG_F32, &final_state);
    if (!st) st = nan_memory(j, (int64_t)dpg_workspace_bytes(j->plan) / 4, DPG_F32, &ws);
    if (!st) st = nan_memory(j, (int64_t)dpg_saved_bytes(j->plan) / 4, DPG_F32, &t.saved);
    if (!st) CUDA(j, cudaDeviceSynchronize());
    t.final_state = st ? NULL : final_state;
    if (!st && j->by_windows)
        st = forward_in_turn(j, &t, ws);
    else if (!st) {
        st = dpg_forward(j->plan, &t, ws, j->comm, j->stream, &j->err);
        if (!st) st = finish(j, j->stream);
    }
    if (!st) st = download(j, t.o, L * p->HV * p->V, j->g.odtype, j->out->out.o + a * p->HV * p->V);
    if (!st) st = download_states(j, &c, t.final_state, 0, j->out->out.final_state);
    if (!st) st = read_forward(j, &c, &t, ws);
    if (!st && j->opt.backward) st = backward(j, &c, &t, ws);
    dp_context_free(&c);
    return st;
}

static const char *path_name(const dpg_plan *plan, int backward) {
    const int f = dpg_plan_path(plan) == DPG_PATH_FAST,
              b = dpg_plan_bwd_path(plan) == DPG_PATH_FAST;
    return !backward ? f ? "fast" : "simple"
           : f       ? b ? "fast/fast" : "fast/simple"
           : b       ? "simple/fast"
                     : "simple/simple";
}

static void *rank_main(void *arg) {
    rank_job *j = arg;
    j->status = rank_body(j);
    if (j->plan) {
        j->saved = dpg_saved_bytes(j->plan);
        j->kept = dpg_kept_bytes(j->plan);
        j->segments = dpg_plan_segments(j->plan);
        j->path = path_name(j->plan, j->opt.backward);
    }
    j->state = j->status ? DP_RANK_FAILED : DP_RANK_ENDED;
    if (j->status && j->order) j->order->failed = 1;
    if (j->status && j->comm) j->comm->abort(j->comm, j->err.msg);
    for (int i = 0; i < j->ndev; i++)
        cudaFree(j->dev[i]);
    if (j->stream) cudaStreamDestroy(j->stream);
    if (j->plan) dpg_plan_destroy(j->plan);
    return NULL;
}

static void rank_process(void *jobs, int rank, dpg_comm *c, const dp_err *why) {
    rank_job *j = (rank_job *)jobs + rank;
    j->comm = c;
    if (c)
        rank_main(j);
    else {
        j->err = *why;
        j->status = why->code;
        j->state = DP_RANK_FAILED;
    }
}

/* ---- all ranks ------------------------------------------------------------------------------- */

static dpg_comm *kept[MOST + 1];
static pid_t keeper;

static void destroy(int N, dpg_comm *c) {
    for (int r = 0; r < N && c; r++)
        c[r].destroy(&c[r]);
    free(c);
}
static void destroy_kept(void) {
    for (int N = 0; N <= MOST && getpid() == keeper; N++)
        destroy(N, kept[N]);
}

dp_status dp_cuda_comms(dp_backend b, int N, dpg_comm **c, dp_err *e) {
    const int nccl = b == DP_BACKEND_NCCL;
    int devices[MOST];
    *c = NULL;
    if (N == 1) return DP_OK;
    int there = 1;
    if (!nccl && (cudaGetDeviceCount(&there) != cudaSuccess || there < 1)) there = 1;
    if (nccl && N > MOST)
        return dp_fail(e, DP_EINPUT, "%d ranks over NCCL: at most %d here", N, MOST);
    if (nccl && kept[N]) {
        *c = kept[N];
        kept[N] = NULL;
        return DP_OK;
    }
    *c = dp_calloc((size_t)N, sizeof **c);
    for (int i = 0; i < N && i < MOST; i++)
        devices[i] = nccl ? i : i % there;
    const dp_status st = nccl       ? dpg_comm_nccl(*c, N, devices, limit_s, e)
                         : N > MOST ? dpg_comm_shared(*c, N, 0, limit_s, e)
                                    : dpg_comm_devices(*c, N, devices, limit_s, e);
    if (st) {
        free(*c);
        *c = NULL;
    }
    return st;
}

void dp_cuda_comms_end(dp_backend b, int N, dpg_comm *c, int failed) {
    if (!c || b != DP_BACKEND_NCCL || failed) {
        destroy(N, c);
        return;
    }
    if (!keeper) {
        keeper = getpid();
        atexit(destroy_kept);
    }
    kept[N] = c;
}

double dp_cuda_limit_s(void) { return limit_s; }

int dp_cuda_processes(dp_backend b, int N) {
    int n = 0;
    return b == DP_BACKEND_NCCL && dp_procs_started() && N <= MOST &&
           cudaGetDeviceCount(&n) == cudaSuccess && n < N;
}

int dp_cuda_join(const pthread_t *thread, volatile dp_rank_state *const *state, int N) {
    double since = 0;
    for (int r = 0; r < N; r++)
        while (pthread_tryjoin_np(thread[r], NULL) == EBUSY) {
            for (int i = 0; i < N && !since; i++)
                if (*state[i] == DP_RANK_FAILED) since = dp_now();
            if (since && dp_now() - since > LEAVE_S) return r;
            usleep(100);
        }
    return -1;
}

static dpg_problem device_problem(const dp_problem *p, int bf16_inputs, dp_base base) {
    return (dpg_problem){.T = p->T,
                         .H = p->H,
                         .HV = p->HV,
                         .K = p->K,
                         .V = p->V,
                         .R = p->R,
                         .Kg = dp_Kg(p),
                         .Nseq = p->Nseq,
                         .cu = p->cu,
                         .scale = p->scale,
                         .gate = p->gate,
                         .lower_bound = p->lower_bound,
                         .beta_form = p->beta_form,
                         .l2norm = p->l2norm,
                         .dtype = bf16_inputs ? DPG_BF16 : DPG_F32,
                         .gdtype = bf16_inputs ? DPG_BF16 : DPG_F32,
                         .odtype = base == DP_BASE_BF16 ? DPG_BF16 : DPG_F32,
                         .ddtype = bf16_inputs && base == DP_BASE_BF16 ? DPG_BF16 : DPG_F32,
                         .dgdtype = bf16_inputs && base == DP_BASE_BF16 ? DPG_BF16 : DPG_F32};
}

/* Sequences without tokens hand their initial state on, and the gradient of the final state back;
 * no rank owns them. */
static void empty_sequences(const dp_problem *p, dp_result *r) {
    const int64_t n = (int64_t)p->HV * p->K * p->V;
    for (int i = 0; i < p->Nseq; i++)
        for (int64_t x = 0; p->cu[i + 1] == p->cu[i] && x < n; x++) {
            r->final_state[i * n + x] = p->s0 ? p->s0[i * n + x] : 0;
            if (r->ds0) r->ds0[i * n + x] = p->dstate ? p->dstate[i * n + x] : 0;
        }
}

/* dA_log and ddt_bias: every rank must hold the same bits. */
static dp_status gate_gradients(const dp_problem *p, const rank_job *job, int N, dp_result *r,
                                dp_err *e) {
    const int Kg = dp_Kg(p), n = p->HV * (1 + Kg);
    for (int i = 1; i < N; i++)
        for (int x = 0; x < n; x++)
            if (memcmp(&job[i].gate[x], &job[0].gate[x], sizeof(float)))
                return dp_fail(e, DP_EDEVICE, "%s[%d]: rank %d has %a, rank 0 %a",
                               x < p->HV ? "dA_log" : "ddt_bias", x < p->HV ? x : x - p->HV, i,
                               job[i].gate[x], job[0].gate[x]);
    for (int x = 0; x < p->HV && r->dA_log; x++)
        r->dA_log[x] = job[0].gate[x];
    for (int x = 0; x < p->HV * Kg && r->ddt_bias; x++)
        r->ddt_bias[x] = job[0].gate[p->HV + x];
    return DP_OK;
}

static double ***rank_tensor(dp_cuda_result *r, int i) {
    double ***a[] = {&r->S_in, &r->M, &r->H, &r->dS_out, &r->dM, &r->dH};
    return a[i];
}

/* Copies that processes see. */
static const dp_problem *share_problem(const dp_problem *p) {
    dp_problem *q = dp_procs_alloc(sizeof *q);
    const int64_t HV = p->HV, Kg = dp_Kg(p), states = p->Nseq * HV * p->K * p->V;
    *q = *p;
    q->cu = memcpy(dp_procs_alloc((size_t)(p->Nseq + 1) * sizeof *p->cu), p->cu,
                   (size_t)(p->Nseq + 1) * sizeof *p->cu);
    q->q = dp_procs_copy(p->q, p->T * p->H * p->K);
    q->k = dp_procs_copy(p->k, p->T * p->H * p->R * p->K);
    q->v = dp_procs_copy(p->v, p->T * HV * p->R * p->V);
    q->g = dp_procs_copy(p->g, p->T * HV * Kg);
    q->beta = dp_procs_copy(p->beta, p->T * HV * p->R);
    q->A_log = dp_procs_copy(p->A_log, HV);
    q->dt_bias = dp_procs_copy(p->dt_bias, HV * Kg);
    q->s0 = dp_procs_copy(p->s0, states);
    q->dout = dp_procs_copy(p->dout, p->T * HV * p->V);
    q->dstate = dp_procs_copy(p->dstate, states);
    return q;
}

static dp_cuda_result *share_result(dp_cuda_result *r, const dp_problem *p) {
    dp_cuda_result *s = dp_procs_alloc(sizeof *s);
    *s = *r;
    for (int i = 0; i < DP_NRESULTS; i++) {
        int64_t rows, width;
        dp_result_shape(p, i, &rows, &width);
        *dp_result_at(&s->out, i) = dp_procs_copy(*dp_result_at(&r->out, i), rows * width);
    }
    for (int i = 0; i < 6; i++)
        *rank_tensor(s, i) = dp_procs_alloc((size_t)(r->N * p->HV) * sizeof(double *));
    return s;
}

/* What processes left there. */
static void fetch_result(dp_cuda_result *r, dp_cuda_result *s, const dp_problem *p) {
    for (int i = 0; i < DP_NRESULTS; i++) {
        int64_t rows, width;
        dp_result_shape(p, i, &rows, &width);
        if (*dp_result_at(&r->out, i))
            memcpy(*dp_result_at(&r->out, i), *dp_result_at(&s->out, i),
                   (size_t)(rows * width) * sizeof(double));
    }
    for (int i = 0; i < 6; i++)
        for (int x = 0; x < r->N * p->HV; x++)
            (*rank_tensor(r, i))[x] =
                dp_copy((*rank_tensor(s, i))[x], (int64_t)p->K * (i == 1 || i == 4 ? p->K : p->V));
}

dp_status dp_cuda_run(const dp_problem *p, int bf16_inputs, dp_base base, dp_format chain, int N,
                      dp_backend b, int backward, dp_cuda_way way, dp_cuda_result *out, dp_err *e) {
    const int segments = way >= DP_CUDA_SEGMENTS,
              windows = way == DP_CUDA_WINDOWS || way == DP_CUDA_WINDOWS_DH_ONLY;
    const dpg_options opt = {.base = base,
                             .chain = chain,
                             .path = segments ? DPG_PATH_FAST : DPG_PATH_AUTO,
                             .chain_how = segments ? DPG_CHAIN_AUGMENTED : DPG_CHAIN_DENSE,
                             .backward = backward,
                             .send_dh_only = way == DP_CUDA_DH_ONLY ||
                                             way == DP_CUDA_SEGMENTS_DH_ONLY ||
                                             way == DP_CUDA_WINDOWS_DH_ONLY,
                             .pair_dg = way == DP_CUDA_PAIR_DG,
                             .bwd_path = way == DP_CUDA_PAIR_DG ? DPG_PATH_SIMPLE : DPG_PATH_AUTO,
                             .save = way == DP_CUDA_SAVE_ALL ? DPG_SAVE_ALL : DPG_SAVE_STATE};
    *out = (dp_cuda_result){.N = N, .path = ""};
    dp_result_alloc(&out->out, p, backward);
    for (int i = 0; i < 6; i++)
        *rank_tensor(out, i) = dp_calloc((size_t)N * p->HV, sizeof(double *));
    empty_sequences(p, &out->out);

    const int procs = dp_cuda_processes(b, N);
    const dp_problem *q = procs ? share_problem(p) : p;
    dp_cuda_result *res = procs ? share_result(out, p) : out;
    const dpg_problem g = device_problem(q, bf16_inputs, base);
    struct in_order *order = dp_calloc(1, sizeof *order);
    rank_job *job =
        procs ? dp_procs_alloc((size_t)N * sizeof *job) : dp_calloc((size_t)N, sizeof *job);
    dpg_comm *comm = NULL;
    dpg_plan *trial = NULL;
    pthread_t *thread = dp_calloc((size_t)N, sizeof *thread);
    volatile dp_rank_state **state = dp_calloc((size_t)N, sizeof *state);
    int left = -1;
    dp_status st = dpg_plan_create(&trial, &g, &opt, 0, N,
                                   e); /* what the kernels do not take costs no communicator */
    const int taken = !st;
    if (taken) dpg_plan_destroy(trial);
    if (!st && !procs) st = dp_cuda_comms(b, N, &comm, e);
    if (!st) {
        for (int r = 0; r < N; r++) {
            state[r] = &job[r].state;
            job[r] = (rank_job){.p = q,
                                .g = g,
                                .opt = opt,
                                .N = N,
                                .rank = r,
                                .by_windows = N > 1 && windows,
                                .order = procs ? NULL : order,
                                .comm = comm ? &comm[r] : NULL,
                                .out = res,
                                .shared = procs};
        }
        for (int r = 0; r < N && !procs; r++)
            pthread_create(&thread[r], NULL, rank_main, &job[r]);
        if (procs)
            st = dp_procs_run(N, rank_process, job, state, limit_s, &left, e);
        else
            left = dp_cuda_join(thread, state, N);
        for (int r = 0; r < N; r++)
            if (job[r].state == DP_RANK_FAILED && !st)
                st = dp_fail(e, job[r].status, "%s", job[r].err.msg);
        if (left >= 0 && !procs) return st; /* its thread still uses what would be freed below */
        if (left >= 0 && !st) st = dp_fail(e, DP_EDEVICE, "rank %d: its process has ended", left);
        for (int i = 0; i < MOST; i++)
            if (order->stream[i]) cudaStreamDestroy(order->stream[i]);
        dp_cuda_comms_end(b, N, comm, st != DP_OK);
        if (!st && backward) st = gate_gradients(p, job, N, &res->out, e);
        if (!st && procs) fetch_result(out, res, p);
        for (int r = 0; r < N && !st; r++) {
            out->saved = job[r].saved > out->saved ? job[r].saved : out->saved;
            out->kept = job[r].kept > out->kept ? job[r].kept : out->kept;
            out->segments = job[r].segments > out->segments ? job[r].segments : out->segments;
            out->path = job[r].path;
        }
    }
    for (int r = 0; r < N && !procs; r++)
        free(job[r].gate);
    if (procs)
        dp_procs_end(taken && st);
    else
        free(job);
    free(thread);
    free(state);
    free(order);
    if (st) dp_cuda_result_free(out, p->HV);
    return st;
}

void dp_cuda_result_free(dp_cuda_result *r, int HV) {
    for (int i = 0; i < 6; i++) {
        double **a = *rank_tensor(r, i);
        for (int x = 0; a && x < r->N * HV; x++)
            free(a[x]);
        free(a);
    }
    dp_result_free(&r->out);
    *r = (dp_cuda_result){0};
}

#endif
