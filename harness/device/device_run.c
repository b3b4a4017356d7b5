/* The kernels of gpu/ as a subject: one run on N ranks, each a thread or a process
 * (device_run.h). */
#include "device_run.h"

const char *const dp_cuda_variant_names[DP_NCUDA_VARIANTS] = {
    "plain",           "dh-only",          "pair-dg",           "save-all",
    "segments",        "segments-dh-only", "segments-save-all", "windows",
    "windows-dh-only", "windows-save-all"};

int dp_cuda_by_tokens(const dp_problem *p) { return !dp_has_beta(p) || dp_in_turn(p); }

dp_sending dp_cuda_sending(dp_sending asked, int N) {
    dp_sending s = dp_sending_of(asked.exchange, asked.payload, N);
    s.begins = s.payload && s.exchange == DP_EXCHANGE_ALLGATHER;
    return s;
}

#ifdef DP_HAVE_CUDA
#include "device_apart.h"
#include "device_arrays.h"
#include "device_job.h"
#include "gpu/dp_truth_gpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *dp_cuda_unavailable(dp_backend b, int N) {
    static char why[400];
    int n = 0;
    if (!dp_backends[b].on_device) return NULL;
    const cudaError_t rc = cudaGetDeviceCount(&n);
    if (rc != cudaSuccess || n == 0) {
        cudaGetLastError();
        snprintf(why, sizeof why, "no CUDA device: %s",
                 rc != cudaSuccess ? cudaGetErrorString(rc) : "none was found");
        return why;
    }
    if (!dpg_device_runs(why, sizeof why)) return why;
    if (dp_cuda_apart(b)) {
        snprintf(why, sizeof why, "%d ranks over NCCL: %d processes were started", N,
                 dp_mpi_size());
        return N > dp_mpi_size() ? why : NULL;
    }
    if (dp_backends[b].processes && n < N && !dp_cuda_processes(b, N)) {
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

static dpg_problem device_problem(const dp_problem *p, int bf16_inputs, dp_base base) {
    return (dpg_problem){.T = p->T,
                         .H = p->H,
                         .HV = p->HV,
                         .K = p->K,
                         .V = p->V,
                         .R = p->R,
                         .Kg = dp_Kg(p),
                         .Nseq = p->Nseq,
                         .model = p->model,
                         .rows = p->model == DP_USER ? dp_recurrence_of(p) : NULL,
                         .pairs = dp_pairs(p),
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

/* States n from entry `at` on; from NULL: zeros, to NULL: nothing. */
static void pass_through(const dp_problem *p, const double *from, double *to, int64_t at,
                         int64_t n) {
    DP_OWN double *none = from || !to ? NULL : dp_doubles(n);
    if (to && from) dp_memory_move(p->memory, to + at, from + at, n);
    if (none) dp_memory_put(p->memory, to + at, none, n);
}

/* Sequences without tokens pass their initial state through, and the gradient of the final state
 * back; no rank owns them. */
static void empty_sequences(const dp_problem *p, dp_result *r) {
    const int64_t n = (int64_t)p->HV * p->K * p->V;
    for (int i = 0; i < p->Nseq; i++)
        if (p->cu[i + 1] == p->cu[i]) {
            pass_through(p, p->s0, r->final_state, i * n, n);
            pass_through(p, p->dstate, r->ds0, i * n, n);
        }
}

/* dA_log and ddt_bias: every rank must hold the same bits. */
static dp_status gate_gradients(const dp_problem *p, const dp_rank_job *job, int N, dp_result *r,
                                dp_err *e) {
    const int Kg = dp_Kg(p), n = p->HV * (1 + Kg);
    for (int i = 1; i < N; i++)
        for (int x = 0; x < n; x++)
            if (memcmp(&job[i].gate[x], &job[0].gate[x], sizeof(float)))
                return dp_fail(e, DP_EDEVICE, "%s[%d]: rank %d has %a, rank 0 %a",
                               x < p->HV ? "dA_log" : "ddt_bias", x < p->HV ? x : x - p->HV, i,
                               job[i].gate[x], job[0].gate[x]);
    DP_OWN double *all = dp_doubles(n);
    for (int x = 0; x < n; x++)
        all[x] = job[0].gate[x];
    if (r->dA_log) dp_memory_put(p->memory, r->dA_log, all, p->HV);
    if (r->ddt_bias) dp_memory_put(p->memory, r->ddt_bias, all + p->HV, n - p->HV);
    return DP_OK;
}

/* Copies that processes see. */
static const dp_problem *share_problem(const dp_problem *p) {
    dp_problem *q = dp_procs_alloc(sizeof *q);
    *q = *p;
    q->cu = memcpy(dp_procs_alloc((size_t)(p->Nseq + 1) * sizeof *p->cu), p->cu,
                   (size_t)(p->Nseq + 1) * sizeof *p->cu);
    dp_inputs_copy(q, p, dp_procs_copy);
    return q;
}

static dp_cuda_result *share_result(dp_cuda_result *r, const dp_problem *p) {
    dp_cuda_result *s = dp_procs_alloc(sizeof *s);
    *s = *r;
    for (int i = 0; i < DP_NRESULTS; i++)
        s->out.out[i] = dp_procs_copy(r->out.out[i], dp_result_count(p, i));
    for (int i = 0; i < DP_RANK_TENSORS; i++)
        s->rank[i] = dp_procs_alloc((size_t)(r->N * p->HV) * sizeof(double *));
    return s;
}

/* Results that processes left there. */
static void fetch_result(dp_cuda_result *r, dp_cuda_result *s, const dp_problem *p) {
    for (int i = 0; i < DP_NRESULTS; i++) {
        if (r->out.out[i])
            memcpy(r->out.out[i], s->out.out[i], (size_t)dp_result_count(p, i) * sizeof(double));
    }
    for (int i = 0; i < DP_RANK_TENSORS; i++)
        for (int x = 0; x < r->N * p->HV; x++)
            r->rank[i][x] = dp_copy(s->rank[i][x], dp_rank_width(p, i));
}

/* The cut of one rank, or of a rank alone with its heads, for long sequences. Also for those of the
 * tests, and T tokens at most 16 times. */
static int segment_chunks(int64_t T) {
    const int64_t chunks = T / DP_CHUNK / 16;
    return chunks < 2 ? 2 : (int)chunks;
}

static dpg_options options_of(const dp_problem *p, const dp_cuda_how *how) {
    const int ranks = dp_cuda_ranks(p, how->N);
    const int grid = p->own.kind == DP_OWN_GRID; /* one rank sends itself what many send */
    const dp_sending sending = ranks > 1 || grid ? how->sending : (dp_sending){0};
    const dp_cuda_variant variant = how->variant;
    const int segments = variant >= DP_CUDA_SEGMENTS;
    const int alone = ranks == 1 || sending.exchange == DP_EXCHANGE_HEADS;
    const int dh_only = variant == DP_CUDA_DH_ONLY || variant == DP_CUDA_SEGMENTS_DH_ONLY ||
                        variant == DP_CUDA_WINDOWS_DH_ONLY;
    const int all = variant == DP_CUDA_SAVE_ALL || variant == DP_CUDA_SEGMENTS_SAVE_ALL ||
                    variant == DP_CUDA_WINDOWS_SAVE_ALL;
    return (dpg_options){.base = how->base,
                         .chain = how->chain,
                         .path = segments ? DPG_PATH_FAST : DPG_PATH_AUTO,
                         .chain_how = segments ? DPG_CHAIN_AUGMENTED : DPG_CHAIN_DENSE,
                         .backward = how->backward,
                         .exchange = sending.exchange,
                         .payload = sending.payload,
                         .segment_chunks = segments && alone ? segment_chunks(p->T) : 0,
                         .send_dh_only = dh_only,
                         .pair_dg = variant == DP_CUDA_PAIR_DG,
                         .bwd_path = variant == DP_CUDA_PAIR_DG ? DPG_PATH_SIMPLE : DPG_PATH_AUTO,
                         .save = all ? DPG_SAVE_ALL : DPG_SAVE_STATE};
}

dp_status dp_rank_job_try(const dp_rank_job *one, dp_err *e) {
    dpg_plan *trial = NULL;
    const dp_status st = dp_rank_job_plan(one, 0, &trial, e);
    if (!st) dpg_plan_destroy(trial);
    return st;
}

static void note_jobs(const dp_rank_job *job, int N, dp_cuda_result *out) {
    for (int r = 0; r < N; r++) {
        out->saved = job[r].saved > out->saved ? job[r].saved : out->saved;
        out->kept = job[r].kept > out->kept ? job[r].kept : out->kept;
        out->segments = job[r].segments > out->segments ? job[r].segments : out->segments;
        out->path = job[r].path;
        out->fast = job[r].fast;
        out->tokens = job[r].tokens;
        out->chunk = job[r].chunk;
        out->pair_rows = job[r].pair_rows;
    }
}

dp_status dp_rank_jobs_note(const dp_rank_job *job, int N, dp_cuda_result *out, dp_err *e) {
    dp_status st = DP_OK;
    if (job->opt.backward) st = gate_gradients(job->p, job, N, &job->out->out, e);
    if (!st) note_jobs(job, N, out);
    return st;
}

/* All ranks as `one` says, into res (processes: that which they see) and out. *left as in
 * dp_ranks_run. */
static dp_status run_jobs(const dp_rank_job *one, dp_rank_job *job, dp_backend b,
                          dp_cuda_result *out, int *left, dp_err *e) {
    const int N = one->N, procs = one->shared;
    struct dp_in_order *order = dp_calloc(1, sizeof *order);
    const dp_ranks ranks = {.N = N,
                            .procs = procs,
                            .backend = b,
                            .jobs = job,
                            .size = sizeof *job,
                            .body = dp_rank_job_run,
                            .end = dp_rank_job_end};
    for (int r = 0; r < N; r++) {
        job[r] = *one;
        job[r].order = procs ? NULL : order;
    }
    dp_status st = dp_ranks_run(&ranks, left, e);
    if (*left >= 0 && !procs) return st;
    for (int i = 0; i < DP_PROCS_MOST; i++)
        if (order->stream[i]) cudaStreamDestroy(order->stream[i]);
    free(order);
    if (!st) st = dp_rank_jobs_note(job, N, out, e);
    if (!st && procs) fetch_result(out, one->out, one->p);
    for (int r = 0; r < N && !procs; r++)
        free(job[r].gate);
    return st;
}

/* A window holds states as they are computed. */
static dp_status check_windows(const dp_cuda_how *how, int N, dp_err *e) {
    const dp_sending s = how->sending;
    if (N == 1 || how->variant < DP_CUDA_WINDOWS || (!s.exchange && !s.payload)) return DP_OK;
    return dp_fail(e, DP_EINPUT, "windows: of states as they are, not --exchange %s --payload %s",
                   dp_exchange_names[s.exchange], dp_payload_names[s.payload]);
}

dp_rank_job dp_rank_job_of(const dp_problem *q, const dp_cuda_how *how, dp_cuda_result *out) {
    const int windows = how->variant >= DP_CUDA_WINDOWS;
    return (dp_rank_job){.rank.dev.there = q->memory != NULL,
                         .p = q,
                         .g = device_problem(q, how->bf16_inputs, how->base),
                         .opt = options_of(q, how),
                         .N = dp_cuda_ranks(q, how->N),
                         .by_windows = dp_cuda_ranks(q, how->N) > 1 && windows,
                         .results_only = how->results_only,
                         .out = out};
}

void dp_cuda_result_alloc(dp_cuda_result *out, const dp_problem *p, int N, int backward) {
    *out = (dp_cuda_result){.N = N, .path = ""};
    dp_result_alloc(&out->out, p, backward);
    for (int i = 0; i < DP_RANK_TENSORS; i++)
        out->rank[i] = dp_calloc((size_t)N * p->HV, sizeof(double *));
    empty_sequences(p, &out->out);
}

/* Where a thread hangs it keeps these arrays. */
static dp_status run_filled(const dp_problem *p, const dp_cuda_how *how, dp_cuda_result *out,
                            dp_err *e) {
    dp_problem *wide = dp_calloc(1, sizeof *wide);
    dp_cuda_result *made = dp_calloc(1, sizeof *made);
    *wide = dp_fill_problem(p);
    const dp_status st = dp_cuda_run(wide, how, made, e);
    if (!st) dp_fill_results(p, wide, how->backward, made, out);
    if (st && st != DP_EINPUT) return st;
    dp_fill_free(wide);
    free(wide);
    free(made);
    return st;
}

dp_status dp_cuda_run(const dp_problem *p, const dp_cuda_how *how, dp_cuda_result *out, dp_err *e) {
    if (dp_fill_needed(p)) return run_filled(p, how, out, e);
    const int N = dp_cuda_ranks(p, how->N);
    if (check_windows(how, N, e)) return e->code;
    if (dp_cuda_apart(how->backend)) return dp_apart_run(p, how, out, e);
    dp_cuda_result_alloc(out, p, how->N, how->backward);
    const int procs = dp_cuda_processes(how->backend, N);
    const dp_problem *q = procs ? share_problem(p) : p;
    dp_rank_job one = dp_rank_job_of(q, how, procs ? share_result(out, p) : out);
    one.shared = procs;
    dp_rank_job *job = dp_ranks_alloc(procs, N, sizeof *job);
    int left = -1;
    dp_status st = dp_rank_job_try(&one, e);
    const int taken = !st;
    if (!st) st = run_jobs(&one, job, how->backend, out, &left, e);
    if (left >= 0 && !procs) return st; /* its thread still uses out and job */
    dp_ranks_free(procs, job, taken && st);
    if (st) dp_cuda_result_free(out, p->HV);
    return st;
}

void dp_cuda_result_free(dp_cuda_result *r, int HV) {
    for (int i = 0; i < DP_RANK_TENSORS; i++) {
        double **a = r->rank[i];
        for (int x = 0; a && x < r->N * HV; x++)
            free(a[x]);
        free(a);
    }
    dp_result_free(&r->out);
    *r = (dp_cuda_result){0};
}

/* ---- the truth on a device ------------------------------------------------------------------- */

static dp_status truth_open(void **s, int64_t Kp, int rows, int entries, int64_t W, int64_t len,
                            dp_err *e) {
    return dpg_truth_open((dpg_truth **)s, Kp, rows, entries, W, len, e);
}
static void truth_close(void *s) { dpg_truth_close(s); }
static dp_status truth_set(void *s, const double *S, dp_err *e) { return dpg_truth_set(s, S, e); }
static dp_status truth_get(void *s, double *S, dp_err *e) { return dpg_truth_get(s, S, e); }
static dp_status truth_forward(void *s, const tr_dd_rows *b, const tr_dd_cols *c, dp_err *e) {
    return dpg_truth_forward(s, b, c, e);
}

const dp_truth_device *dp_cuda_truth(const dp_problem *p) {
    static const dp_truth_device device = {truth_open, truth_close,   truth_set,
                                           truth_get,  truth_forward, dp_cuda_device};
    return dpg_truth_takes((p->K + TR_DD_LANES - 1) / TR_DD_LANES * TR_DD_LANES, dp_rows(p),
                           dp_truth_entries(p)) &&
                   !dp_cuda_unavailable(DP_BACKEND_CUDA, 1)
               ? &device
               : NULL;
}
#endif
