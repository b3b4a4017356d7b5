/* Ranks over NCCL as processes of mpirun or torchrun (device_apart.h). */
#include "device_apart.h"

int dp_cuda_apart(dp_backend b) { return dp_backends[b].processes && dp_mpi_size() > 1; }

#ifndef DP_HAVE_CUDA

void dp_apart_work(const void *message, size_t bytes) { (void)message, (void)bytes; }

#else

#include "device_job.h"
#include "ref/vocabulary/context.h"
#include "ref/vocabulary/number.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* What a rank is told: shapes of p, which arrays there are; NCCL's id where it has no communicator
 * of so many ranks yet. */
typedef struct {
    int what, fresh;
    double limit;
    char id[DPG_COMM_ID];
    dp_cuda_how how;
    dp_problem p;
} order;

/* What it says when it is done; its results follow where status is DP_OK. */
typedef struct {
    dp_status status;
    char why[sizeof((dp_err *)0)->msg];
    char path[32];
    int segments, has[DP_RANK_TENSORS];
    size_t saved, kept;
} report;

static void send_numbers(int to, const double *x, int64_t n) {
    dp_mpi_send(to, DP_MPI_NUMBERS, x, sizeof *x * (size_t)n);
}
static void receive_numbers(int from, double *x, int64_t n, const char *what) {
    dp_mpi_receive(from, DP_MPI_NUMBERS, x, sizeof *x * (size_t)n, what);
}

/* ---- the communicator of this process -------------------------------------------------------- */

static struct {
    int N; /* 0: none */
    dpg_comm comm;
} joined;

static void leave(void) {
    if (joined.N) joined.comm.destroy(&joined.comm);
    joined.N = 0;
}

/* LOCAL_RANK as torchrun sets it, or as MPI libraries do. Ranks that share a device are hosts of
 * their own for NCCL, which refuses them else. */
static int device_of(int rank) {
    static const char *const names[] = {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
                                        "MPI_LOCALRANKID", "SLURM_LOCALID"};
    int64_t local = rank;
    int n = 1;
    char host[128];
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (getenv(names[i]) && dp_number_int(getenv(names[i]), 0, 4096, &local) == DP_NUMBER_OK)
            break;
    if (cudaGetDeviceCount(&n) != cudaSuccess || n < 1) n = 1;
    if (local >= n || getenv("NCCL_HOSTID")) {
        gethostname(host, sizeof host - 1);
        snprintf(host + strnlen(host, 100), 24, "-%lld", (long long)local / n);
        setenv("NCCL_HOSTID", host, 0);
        setenv("NCCL_NET", "Socket", 0);
        setenv("NCCL_MNNVL_ENABLE", "0", 0);
    }
    setenv("NCCL_NVLS_ENABLE", "0", 0);
    return (int)local % n;
}

static dp_status join(const order *o, dp_err *e) {
    if (o->how.N == 1 || !o->fresh) return DP_OK;
    leave();
    const dp_status st = dpg_comm_apart(&joined.comm, o->id, dp_mpi_rank(), o->how.N,
                                        device_of(dp_mpi_rank()), dp_cuda_limit_s(), e);
    if (!st) joined.N = o->how.N;
    return st;
}

/* ---- one rank -------------------------------------------------------------------------------- */

static dp_status run_own(const order *o, dp_rank_job *job) {
    dp_rank *x = &job->rank;
    x->dev.rank = dp_mpi_rank();
    x->status = join(o, &x->dev.err);
    x->comm = o->how.N > 1 ? &joined.comm : NULL;
    if (!x->status) {
        x->status = dp_rank_job_run(job);
        if (x->status && x->comm) x->comm->abort(x->comm, x->dev.err.msg);
        dp_device_close(&x->dev);
        dp_rank_job_end(job);
    }
    if (x->status) leave();
    return x->status;
}

/* Rows of a rank in the results of all: of its tokens, of the sequences that end or begin in them.
 */
typedef void list_fn(double *x, int64_t n, int rank);
static void each_list(dp_cuda_result *out, const dp_problem *p, const dp_context *c, list_fn *f) {
    const int64_t KV = (int64_t)p->HV * p->K * p->V;
    for (int i = 0; i < DP_NRESULTS; i++) {
        double *x = *dp_result_at(&out->out, i);
        int64_t rows, width;
        if (!x || dp_result_fields[i].kind != DP_OF_TOKENS) continue;
        dp_result_shape(p, i, &rows, &width);
        f(x + c->a * (rows / p->T * width), c->L * (rows / p->T * width), c->rank);
    }
    for (int sub = 0; sub < c->nlocal; sub++) {
        const int64_t at = c->local_seq[sub] * KV;
        if (sub < c->nlocal - 1 || c->is_last) f(out->out.final_state + at, KV, c->rank);
        if (out->out.ds0 && (sub || c->is_first)) f(out->out.ds0 + at, KV, c->rank);
    }
    for (int w = 0; w < DP_RANK_TENSORS; w++)
        for (int hv = 0; hv < p->HV; hv++) {
            double *x = out->rank[w][c->rank * p->HV + hv];
            if (x) f(x, dp_rank_width(p, w), c->rank);
        }
}

static void give(double *x, int64_t n, int rank) {
    (void)rank;
    send_numbers(0, x, n);
}
static void take(double *x, int64_t n, int rank) { receive_numbers(rank, x, n, "the results"); }

static size_t gate_bytes(const dp_problem *p) {
    return sizeof(float) * (size_t)p->HV * (size_t)(1 + dp_Kg(p));
}

/* ---- another process than the first ---------------------------------------------------------- */

/* As large as all ranks', with the tokens of this one; pages that nobody touches are not there. */
static void receive_problem(dp_problem *p, const dp_context *c) {
    for (int i = 0; i < DP_NINPUTS; i++) {
        const int64_t each = dp_input_width(p, i);
        const int tokens = dp_input_fields[i].kind == DP_OF_TOKENS;
        if (!dp_input_of(p, i)) continue;
        double *x = *dp_input_at(p, i) = dp_doubles(dp_input_count(p, i));
        receive_numbers(0, tokens ? x + c->a * each : x,
                        tokens ? c->L * each : dp_input_count(p, i), dp_input_fields[i].name);
    }
}

static void send_report(const dp_rank_job *job, dp_cuda_result *out, const dp_context *c) {
    report r = {.status = job->rank.status,
                .segments = job->segments,
                .saved = job->saved,
                .kept = job->kept};
    snprintf(r.why, sizeof r.why, "%s", job->rank.dev.err.msg);
    snprintf(r.path, sizeof r.path, "%s", job->path ? job->path : "");
    for (int w = 0; w < DP_RANK_TENSORS; w++)
        r.has[w] = out->rank[w][c->rank * job->p->HV] != NULL;
    dp_mpi_send(0, DP_MPI_NUMBERS, &r, sizeof r);
    if (r.status) return;
    each_list(out, job->p, c, give);
    if (job->opt.backward) dp_mpi_send(0, DP_MPI_NUMBERS, job->gate, gate_bytes(job->p));
}

void dp_apart_work(const void *message, size_t bytes) {
    order o;
    dp_context c;
    dp_cuda_result out;
    memcpy(&o, message, bytes);
    dp_problem *p = &o.p;
    dp_cuda_limit(o.limit);
    p->cu = dp_calloc((size_t)p->Nseq + 1, sizeof *p->cu);
    dp_mpi_receive(0, DP_MPI_NUMBERS, p->cu, sizeof *p->cu * ((size_t)p->Nseq + 1), "cu");
    dp_context_build(p->cu, p->Nseq, o.how.N, dp_mpi_rank(), &c, NULL); /* the first has done so */
    receive_problem(p, &c);
    dp_cuda_result_alloc(&out, p, o.how.N, o.how.backward);
    dp_rank_job job = dp_rank_job_of(p, &o.how, &out);
    run_own(&o, &job);
    send_report(&job, &out, &c);
    free(job.gate);
    dp_cuda_result_free(&out, p->HV);
    dp_context_free(&c);
    dp_problem_free(p);
}

/* ---- the first process ----------------------------------------------------------------------- */

static void send_order(order *o, const dp_problem *p, int r) {
    dp_context c;
    dp_context_build(p->cu, p->Nseq, o->how.N, r, &c, NULL); /* it was split so before */
    o->p = *p;
    dp_mpi_send(r, DP_MPI_JOB, o, sizeof *o);
    dp_mpi_send(r, DP_MPI_NUMBERS, p->cu, sizeof *p->cu * ((size_t)p->Nseq + 1));
    for (int i = 0; i < DP_NINPUTS; i++) {
        const double *x = dp_input_of(p, i);
        const int64_t each = dp_input_width(p, i);
        const int tokens = dp_input_fields[i].kind == DP_OF_TOKENS;
        if (x)
            send_numbers(r, tokens ? x + c.a * each : x,
                         tokens ? c.L * each : dp_input_count(p, i));
    }
    dp_context_free(&c);
}

/* Where they ran without an error: their results, in out. */
static void receive_report(dp_rank_job *job, dp_cuda_result *out, int r, dp_err *e) {
    static char path[32];
    const dp_problem *p = job->p;
    report got;
    dp_context c;
    dp_mpi_receive(r, DP_MPI_NUMBERS, &got, sizeof got, "the end of its run");
    job->rank.status = got.status;
    if (got.status) {
        dp_fail(e, got.status, "%s", got.why);
        return;
    }
    memcpy(path, got.path, sizeof path);
    job->path = path;
    job->segments = got.segments;
    job->saved = got.saved;
    job->kept = got.kept;
    for (int w = 0; w < DP_RANK_TENSORS; w++)
        for (int hv = 0; hv < p->HV && got.has[w]; hv++)
            out->rank[w][r * p->HV + hv] = dp_doubles(dp_rank_width(p, w));
    dp_context_build(p->cu, p->Nseq, job->N, r, &c, NULL);
    each_list(out, p, &c, take);
    dp_context_free(&c);
    if (!job->opt.backward) return;
    job->gate = dp_calloc(gate_bytes(p), 1);
    dp_mpi_receive(r, DP_MPI_NUMBERS, job->gate, gate_bytes(p), "dA_log and ddt_bias");
}

static dp_status run_all(order *o, const dp_problem *p, dp_rank_job *job, dp_cuda_result *out,
                         dp_err *e) {
    const int N = o->how.N;
    const double limit = dp_mpi_limit_s();
    o->fresh = N > 1 && joined.N != N;
    if (o->fresh && dpg_comm_id(o->id, e)) return e->code;
    for (int r = 1; r < N; r++)
        send_order(o, p, r);
    if (run_own(o, &job[0])) {
        dp_fail(e, job[0].rank.status, "%s", job[0].rank.dev.err.msg);
        dp_mpi_limit(2 * dp_cuda_limit_s()); /* those that still run end by their own */
    }
    for (int r = 1; r < N; r++)
        receive_report(&job[r], out, r, e);
    dp_mpi_limit(limit);
    if (e->code) leave(); /* and so do those that failed */
    return e->code ? e->code : dp_rank_jobs_note(job, N, out, e);
}

dp_status dp_apart_run(const dp_problem *p, const dp_cuda_how *how, dp_cuda_result *out,
                       dp_err *e) {
    const int N = how->N;
    order o = {.what = DP_MPI_DEVICE, .limit = dp_cuda_limit_s(), .how = *how};
    dp_err own = {0};
    dp_cuda_result_alloc(out, p, N, how->backward);
    dp_rank_job *job = dp_calloc((size_t)N, sizeof *job);
    for (int r = 0; r < N; r++)
        job[r] = dp_rank_job_of(p, how, out);
    dp_status st = dp_rank_job_try(&job[0], &own);
    if (!st && job[0].by_windows)
        st = dp_fail(&own, DP_EINPUT, "windows: ranks that are processes have none");
    if (!st) st = run_all(&o, p, job, out, &own);
    for (int r = 0; r < N; r++)
        free(job[r].gate);
    free(job);
    if (st) dp_cuda_result_free(out, p->HV);
    return st ? dp_fail(e, st, "%s", own.msg) : DP_OK;
}
#endif
