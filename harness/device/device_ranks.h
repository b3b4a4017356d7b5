/* harness/device/device_ranks.h - the ranks of a run on CUDA devices, each a thread or a process.
 * It has their communicators, their start, and their end when one of them never returns. */
#pragma once
#include "device_memory.h"
#include "device_run.h"
#include "gpu/dp_gpu.h"
#include "ref/vocabulary/own.h"

typedef enum { DP_RANK_RUNS, DP_RANK_ENDED, DP_RANK_FAILED } dp_rank_state;

/* Fields that every rank has, whatever it runs: the first member of its job. */
typedef struct {
    dp_device dev;
    dpg_comm *comm; /* NULL with one rank */
    volatile dp_rank_state state;
    dp_status status;
} dp_rank;

typedef struct {
    int N, procs; /* procs: dp_cuda_processes; jobs lie where all processes see them then */
    dp_backend backend;
    void *jobs; /* [N] structs of `size` bytes that begin with a dp_rank */
    size_t size;
    dp_status (*body)(void *job); /* runs the rank; its error is in dev.err */
    void (*end)(void *job);       /* frees what it holds beside dev */
} dp_ranks;

/* Zeros for N jobs; dp_ranks_free. */
void *dp_ranks_alloc(int procs, int N, size_t size);
/* Runs all of them. The first failure, or DP_OK. *left: -1, or a rank whose thread has never
 * returned and still uses its job. Nothing of that job may be freed. */
dp_status dp_ranks_run(const dp_ranks *r, int *left, dp_err *e);
/* Behind every run, failed or not. jobs is freed. */
void dp_ranks_free(int procs, void *jobs, int failed);

/* Are these ranks processes (device_procs.h): more over NCCL than there are devices. */
int dp_cuda_processes(dp_backend b, int N);
double dp_cuda_limit_s(void); /* of dp_cuda_limit */

/* Which rank on a device owns which tokens, as a table for the kernels: of dp_owners, or T / N
 * tokens a rank. */
typedef struct {
    int parts;
    int64_t *cut;
    int *owner;
    dp_owners of; /* what both are of */
} dp_own_table;

/* To be freed; of a T that N does not divide it has no part. */
dp_own_table dp_own_table_of(dp_owners o, int64_t T, int N);
void dp_own_table_free(dp_own_table *t);
/* The kernels' form of the table; borrows it. */
dpg_owners dp_own_for_kernels(const dp_own_table *t, dp_owners o);
int64_t dp_own_tokens(const dp_own_table *t, int rank);
/* Copies the rank's tokens, `each` numbers a token, from `all` to `own`, one part after the other;
 * back: from `own` to `all`. */
void dp_own_copy(const dp_own_table *t, int rank, int64_t each, double *all, double *own, int back);
