/* Ranks over NCCL as processes of mpirun or torchrun (device_apart.h). */
#include "device_apart.h"

int dp_cuda_apart(dp_backend b) { return dp_backends[b].processes && dp_mpi_size() > 1; }

#ifndef DP_HAVE_CUDA

static void nothing(const void *message, size_t bytes) { (void)message, (void)bytes; }
const dp_mpi_worker dp_apart_worker = {DP_MPI_DEVICE, 0, nothing},
                    dp_apart_conv_worker = {DP_MPI_DEVICE_CONV, 0, nothing};

#else

#include "apart_rank.h"
#include "device_job.h"
#include "device_ranks.h"
#include "harness/mpi/mpi_ranks.h"
#include "harness/simulated/rank_part.h"
#include "ref/vocabulary/context.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The message to a rank: shapes of p, and its arrays. */
typedef struct {
    int what;
    dp_ticket ticket;
    dp_cuda_how how;
    dp_mpi_rows rows;
    dp_problem p; /* last, where a test changes it */
} order;

/* Its message after a run without an error, before its results. */
typedef struct {
    char path[32];
    int segments, fast, tokens, chunk, pair_rows;
    size_t saved, kept;
} report;

/* The parts of a rank, in their order. */
typedef struct {
    int rank, n, *part;
    dp_own_table table;
} rank_parts;

static rank_parts parts_of(const dp_problem *p, int N, int rank) {
    rank_parts x = {.rank = rank, .table = dp_own_table_of(p->own, p->T, N)};
    x.part = dp_calloc((size_t)x.table.parts + 1, sizeof *x.part);
    for (int i = 0; i < x.table.parts; i++)
        if (x.table.owner[i] == rank) x.part[x.n++] = i;
    return x;
}
static void parts_free(rank_parts *x) {
    free(x->part);
    dp_own_table_free(&x->table);
}

/* The part of a rank in the results of all. */
static void each_list(dp_cuda_result *out, const dp_rank_job *job, const rank_parts *x,
                      dp_rank_list_fn *f) {
    const dp_problem *p = job->p;
    int rank = x->rank;
    for (int k = 0; k < x->n; k++) {
        dp_context c;
        dp_context_of(p, x->table.parts, x->part[k], &c, NULL); /* it was split so before */
        dp_rank_each_result(p, &out->out, &c, job->opt.backward, f, &rank);
        dp_context_free(&c);
        for (int i = 0; i < DP_RANK_TENSORS * p->HV; i++) {
            double *y = out->rank[i / p->HV][x->part[k] * p->HV + i % p->HV];
            if (y) f(y, dp_rank_width(p, i / p->HV), &rank);
        }
    }
}

/* Which tensors each part of a rank has, [parts of the rank][DP_RANK_TENSORS]. */
static size_t has_bytes(const rank_parts *x) { return (size_t)x->n * DP_RANK_TENSORS; }

static void give(double *x, int64_t n, DP_UNUSED void *rank) { dp_mpi_send_numbers(0, x, n); }
static void take(double *x, int64_t n, void *rank) {
    dp_mpi_receive_numbers(*(int *)rank, x, n, "the results");
}

static size_t gate_bytes(const dp_problem *p) {
    return sizeof(float) * (size_t)p->HV * (size_t)(1 + dp_Kg(p));
}

/* ---- another process than the first ---------------------------------------------------------- */

/* As large as all ranks', with the tokens of this one; pages that nobody touches are not there. */
static void receive_problem(dp_problem *p, const rank_parts *x) {
    for (int i = 0; i < DP_NINPUTS; i++) {
        const int64_t each = dp_input_width(p, i);
        const int tokens = dp_input_fields[i].kind == DP_OF_TOKENS;
        if (!dp_input_of(p, i)) continue;
        double *all = p->in[i] = dp_doubles(dp_input_count(p, i));
        const int64_t n = tokens ? dp_own_tokens(&x->table, x->rank) * each : dp_input_count(p, i);
        double *own = tokens ? dp_doubles(n) : all;
        dp_mpi_receive_numbers(0, own, n, dp_input_fields[i].name);
        if (tokens) dp_own_copy(&x->table, x->rank, each, all, own, 1);
        if (tokens) free(own);
    }
}

static void send_report(const dp_rank_job *job, dp_cuda_result *out, const rank_parts *x) {
    report r = {.segments = job->segments,
                .fast = job->fast,
                .tokens = job->tokens,
                .chunk = job->chunk,
                .pair_rows = job->pair_rows,
                .saved = job->saved,
                .kept = job->kept};
    dp_apart_say(&job->rank);
    if (job->rank.status) return;
    snprintf(r.path, sizeof r.path, "%s", job->path ? job->path : "");
    char *has = dp_calloc(has_bytes(x) + 1, 1);
    for (int i = 0; i < x->n * DP_RANK_TENSORS; i++)
        has[i] = out->rank[i % DP_RANK_TENSORS][x->part[i / DP_RANK_TENSORS] * job->p->HV] != NULL;
    dp_mpi_send(0, DP_MPI_NUMBERS, &r, sizeof r);
    dp_mpi_send(0, DP_MPI_NUMBERS, has, has_bytes(x));
    free(has);
    each_list(out, job, x, give);
    if (job->opt.backward) dp_mpi_send(0, DP_MPI_NUMBERS, job->gate, gate_bytes(job->p));
}

/* Shapes with which arrays are as large as the first one says; cu comes in between. */
static void receive_shapes(order *o) {
    dp_problem *p = &o->p;
    dp_err e = {0};
    dp_mpi_install(&o->rows);
    p->user = NULL; /* it is the installed one here */
    if ((int)p->model < 0 || p->model >= DP_NMODELS + (o->rows.there != 0))
        dp_mpi_refuse(0, "a recurrence", p->model);
    if (p->Nseq < 1) dp_mpi_refuse(0, "a number of sequences", p->Nseq);
    p->cu = dp_mpi_receive_cu(p->Nseq);
    const int N = dp_cuda_ranks(p, o->how.N);
    if (N < 1 || N > dp_mpi_size()) dp_mpi_refuse(0, "a number of ranks", N);
    if (!dp_problem_check(p, 1, &e)) return;
    fprintf(stderr, "deltaproof: %s\n", e.msg);
    dp_mpi_refuse(0, "shapes that do not fit, T =", p->T);
}

static void work_order(const void *message, size_t bytes) {
    order o;
    dp_cuda_result out;
    memcpy(&o, message, bytes);
    dp_problem *p = &o.p;
    receive_shapes(&o);
    rank_parts x = parts_of(p, dp_cuda_ranks(p, o.how.N), dp_mpi_rank());
    receive_problem(p, &x);
    dp_cuda_result_alloc(&out, p, o.how.N, o.how.backward);
    dp_rank_job job = dp_rank_job_of(p, &o.how, &out);
    dp_apart_run_own(&o.ticket, &job, dp_rank_job_run, dp_rank_job_end);
    send_report(&job, &out, &x);
    free(job.gate);
    dp_cuda_result_free(&out, p->HV);
    parts_free(&x);
    dp_problem_free(p);
}
const dp_mpi_worker dp_apart_worker = {DP_MPI_DEVICE, sizeof(order), work_order};

/* ---- the first process ----------------------------------------------------------------------- */

static void send_order(order *o, const dp_problem *p, int r) {
    DP_FREED(parts_free) rank_parts x = parts_of(p, dp_cuda_ranks(p, o->how.N), r);
    o->p = *p;
    dp_mpi_send(r, DP_MPI_JOB, o, sizeof *o);
    dp_mpi_send_cu(r, p->cu, p->Nseq);
    for (int i = 0; i < DP_NINPUTS; i++) {
        double *all = p->in[i];
        const int64_t each = dp_input_width(p, i);
        const int tokens = dp_input_fields[i].kind == DP_OF_TOKENS;
        if (!all) continue;
        const int64_t n = tokens ? dp_own_tokens(&x.table, r) * each : dp_input_count(p, i);
        double *own = tokens ? dp_doubles(n) : all;
        if (tokens) dp_own_copy(&x.table, r, each, all, own, 0);
        dp_mpi_send_numbers(r, own, n);
        if (tokens) free(own);
    }
}

/* Where they ran without an error: their results, in out. */
static void receive_report(dp_rank_job *job, dp_cuda_result *out, int r, dp_err *e) {
    static char path[32];
    const dp_problem *p = job->p;
    report got;
    dp_apart_hear(r, &job->rank, e);
    if (job->rank.status) return;
    dp_mpi_receive(r, DP_MPI_NUMBERS, &got, sizeof got, "the end of its run");
    snprintf(path, sizeof path, "%.*s", (int)sizeof got.path, got.path);
    job->path = path;
    job->segments = got.segments;
    job->fast = got.fast;
    job->tokens = got.tokens;
    job->chunk = got.chunk;
    job->pair_rows = got.pair_rows;
    job->saved = got.saved;
    job->kept = got.kept;
    rank_parts x = parts_of(p, job->N, r);
    char *has = dp_calloc(has_bytes(&x) + 1, 1);
    dp_mpi_receive(r, DP_MPI_NUMBERS, has, has_bytes(&x), "what it has");
    for (int i = 0; i < x.n * DP_RANK_TENSORS * p->HV; i++) {
        const int part = x.part[i / p->HV / DP_RANK_TENSORS], w = i / p->HV % DP_RANK_TENSORS;
        if (has[i / p->HV])
            out->rank[w][part * p->HV + i % p->HV] = dp_doubles(dp_rank_width(p, w));
    }
    each_list(out, job, &x, take);
    free(has);
    parts_free(&x);
    if (!job->opt.backward) return;
    job->gate = dp_calloc(gate_bytes(p), 1);
    dp_mpi_receive(r, DP_MPI_NUMBERS, job->gate, gate_bytes(p), "dA_log and ddt_bias");
}

static dp_status run_all(order *o, const dp_problem *p, dp_rank_job *job, dp_cuda_result *out,
                         dp_err *e) {
    const int N = job->N;
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
    const int N = dp_cuda_ranks(p, how->N);
    order o = {.what = DP_MPI_DEVICE, .how = *how, .rows = dp_mpi_rows_here(p)};
    dp_err own = {0};
    dp_cuda_result_alloc(out, p, how->N, how->backward);
    dp_rank_job *job = dp_calloc((size_t)N, sizeof *job);
    for (int r = 0; r < N; r++)
        job[r] = dp_rank_job_of(p, how, out);
    dp_status st = dp_rank_job_try(&job[0], &own);
    if (!st) st = run_all(&o, p, job, out, &own);
    for (int r = 0; r < N; r++)
        free(job[r].gate);
    free(job);
    if (st) dp_cuda_result_free(out, p->HV);
    return st ? dp_fail(e, st, "%s", own.msg) : DP_OK;
}
#endif
