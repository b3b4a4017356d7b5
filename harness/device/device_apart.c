/* Ranks over NCCL as processes of mpirun or torchrun (device_apart.h). */
#include "device_apart.h"

int dp_cuda_apart(dp_backend b) { return dp_backends[b].processes && dp_mpi_size() > 1; }

#ifndef DP_HAVE_CUDA

void dp_apart_work(const void *message, size_t bytes) { (void)message, (void)bytes; }
void dp_apart_work_conv(const void *message, size_t bytes) { (void)message, (void)bytes; }

#else

#include "apart_rank.h"
#include "device_job.h"
#include "harness/simulated/rank_part.h"
#include "ref/vocabulary/context.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What a rank is told: shapes of p, which arrays there are. */
typedef struct {
    int what;
    dp_ticket ticket;
    dp_cuda_how how;
    dp_problem p;
} order;

/* What it says when it has run without an error, before its results. */
typedef struct {
    char path[32];
    int segments, fast, tokens, has[DP_RANK_TENSORS];
    size_t saved, kept;
} report;

/* What a rank has in the results of all. */
static void each_list(dp_cuda_result *out, const dp_rank_job *job, const dp_context *c,
                      dp_rank_list_fn *f) {
    const dp_problem *p = job->p;
    int rank = c->rank;
    dp_rank_each_result(p, &out->out, c, job->opt.backward, f, &rank);
    for (int w = 0; w < DP_RANK_TENSORS; w++)
        for (int hv = 0; hv < p->HV; hv++) {
            double *x = out->rank[w][rank * p->HV + hv];
            if (x) f(x, dp_rank_width(p, w), &rank);
        }
}

static void give(double *x, int64_t n, void *rank) {
    (void)rank;
    dp_mpi_send_numbers(0, x, n);
}
static void take(double *x, int64_t n, void *rank) {
    dp_mpi_receive_numbers(*(int *)rank, x, n, "the results");
}

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
        dp_mpi_receive_numbers(0, tokens ? x + c->a * each : x,
                               tokens ? c->L * each : dp_input_count(p, i),
                               dp_input_fields[i].name);
    }
}

static void send_report(const dp_rank_job *job, dp_cuda_result *out, const dp_context *c) {
    report r = {.segments = job->segments,
                .fast = job->fast,
                .tokens = job->tokens,
                .saved = job->saved,
                .kept = job->kept};
    dp_apart_say(&job->rank);
    if (job->rank.status) return;
    snprintf(r.path, sizeof r.path, "%s", job->path ? job->path : "");
    for (int w = 0; w < DP_RANK_TENSORS; w++)
        r.has[w] = out->rank[w][c->rank * job->p->HV] != NULL;
    dp_mpi_send(0, DP_MPI_NUMBERS, &r, sizeof r);
    each_list(out, job, c, give);
    if (job->opt.backward) dp_mpi_send(0, DP_MPI_NUMBERS, job->gate, gate_bytes(job->p));
}

void dp_apart_work(const void *message, size_t bytes) {
    order o;
    dp_context c;
    dp_cuda_result out;
    memcpy(&o, message, bytes);
    dp_problem *p = &o.p;
    p->cu = dp_mpi_receive_cu(p->Nseq);
    dp_context_build(p->cu, p->Nseq, o.how.N, dp_mpi_rank(), &c, NULL); /* the first has done so */
    receive_problem(p, &c);
    dp_cuda_result_alloc(&out, p, o.how.N, o.how.backward);
    dp_rank_job job = dp_rank_job_of(p, &o.how, &out);
    dp_apart_run_own(&o.ticket, &job, dp_rank_job_run, dp_rank_job_end);
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
    dp_mpi_send_cu(r, p->cu, p->Nseq);
    for (int i = 0; i < DP_NINPUTS; i++) {
        const double *x = dp_input_of(p, i);
        const int64_t each = dp_input_width(p, i);
        const int tokens = dp_input_fields[i].kind == DP_OF_TOKENS;
        if (x)
            dp_mpi_send_numbers(r, tokens ? x + c.a * each : x,
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
    dp_apart_hear(r, &job->rank, e);
    if (job->rank.status) return;
    dp_mpi_receive(r, DP_MPI_NUMBERS, &got, sizeof got, "the end of its run");
    memcpy(path, got.path, sizeof path);
    job->path = path;
    job->segments = got.segments;
    job->fast = got.fast;
    job->tokens = got.tokens;
    job->saved = got.saved;
    job->kept = got.kept;
    for (int w = 0; w < DP_RANK_TENSORS; w++)
        for (int hv = 0; hv < p->HV && got.has[w]; hv++)
            out->rank[w][r * p->HV + hv] = dp_doubles(dp_rank_width(p, w));
    dp_context_build(p->cu, p->Nseq, job->N, r, &c, NULL);
    each_list(out, job, &c, take);
    dp_context_free(&c);
    if (!job->opt.backward) return;
    job->gate = dp_calloc(gate_bytes(p), 1);
    dp_mpi_receive(r, DP_MPI_NUMBERS, job->gate, gate_bytes(p), "dA_log and ddt_bias");
}

static dp_status run_all(order *o, const dp_problem *p, dp_rank_job *job, dp_cuda_result *out,
                         dp_err *e) {
    const int N = o->how.N;
    if (dp_ticket_make(&o->ticket, N, e)) return e->code;
    for (int r = 1; r < N; r++)
        send_order(o, p, r);
    dp_apart_run_own(&o->ticket, &job[0], dp_rank_job_run, dp_rank_job_end);
    if (job[0].rank.status) dp_fail(e, job[0].rank.status, "%s", job[0].rank.dev.err.msg);
    const double limit = dp_apart_hurry(&job[0].rank);
    for (int r = 1; r < N; r++)
        receive_report(&job[r], out, r, e);
    dp_apart_done(limit, e->code != DP_OK);
    return e->code ? e->code : dp_rank_jobs_note(job, N, out, e);
}

dp_status dp_apart_run(const dp_problem *p, const dp_cuda_how *how, dp_cuda_result *out,
                       dp_err *e) {
    const int N = how->N;
    order o = {.what = DP_MPI_DEVICE, .how = *how};
    dp_err own = {0};
    dp_cuda_result_alloc(out, p, N, how->backward);
    dp_rank_job *job = dp_calloc((size_t)N, sizeof *job);
    for (int r = 0; r < N; r++)
        job[r] = dp_rank_job_of(p, how, out);
    dp_status st = p->own.kind
                       ? dp_fail(&own, DP_EINPUT, "ranks that are processes own T / N tokens each")
                   : job[0].by_windows
                       ? dp_fail(&own, DP_EINPUT, "windows: ranks that are processes have none")
                       : dp_rank_job_try(&job[0], &own);
    if (!st) st = run_all(&o, p, job, out, &own);
    for (int r = 0; r < N; r++)
        free(job[r].gate);
    free(job);
    if (st) dp_cuda_result_free(out, p->HV);
    return st ? dp_fail(e, st, "%s", own.msg) : DP_OK;
}
#endif
