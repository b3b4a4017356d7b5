/* harness/device/device_job.h - one rank of a run on devices: what it is told, what it leaves. */
#pragma once
#include "device_procs.h"
#include "device_ranks.h"

/* Ranks that share a device use one stream of it, one after another. */
struct dp_in_order {
    volatile int turn, failed;
    cudaStream_t stream[DP_PROCS_MOST];
};

typedef struct {
    dp_rank rank;
    const dp_problem *p;
    dpg_problem g;
    dpg_options opt;
    int N;
    int by_windows, results_only;
    struct dp_in_order *order; /* of forwards by windows */
    dp_cuda_result *out;
    int shared;  /* a process: results are left where all see them (device_procs.h) */
    float *gate; /* [HV] dA_log, [HV][Kg] ddt_bias as this rank got them; NULL without backward */
    size_t saved, kept;
    int segments, fast, tokens, chunk, pair_rows;
    const char *path;
    dpg_plan *plan;
} dp_rank_job;

/* One rank of a run, all alike but for the rank: q, its results and whatever processes share are
 * borrowed. */
dp_rank_job dp_rank_job_of(const dp_problem *q, const dp_cuda_how *how, dp_cuda_result *out);
/* The plan of a rank, with the table of who owns what. */
dp_status dp_rank_job_plan(const dp_rank_job *j, int rank, dpg_plan **plan, dp_err *e);
/* DP_EINPUT: the kernels do not take it. Costs no communicator. */
dp_status dp_rank_job_try(const dp_rank_job *one, dp_err *e);
/* Copies the notes of all ranks into out. Every rank must have the same dA_log and ddt_bias; they
 * go into those of the first job. */
dp_status dp_rank_jobs_note(const dp_rank_job *job, int N, dp_cuda_result *out, dp_err *e);
/* Room for the results of N ranks. */
void dp_cuda_result_alloc(dp_cuda_result *out, const dp_problem *p, int N, int backward);

/* Forward, and backward if its options say so; what stays then is freed (device_ranks.h). */
dp_status dp_rank_job_run(void *job);
void dp_rank_job_end(void *job);
