/* harness/device/device_procs.h - ranks over NCCL as processes, for more ranks than there are
 * devices. They are started before this process calls CUDA, and wait for runs. A run's inputs and
 * results lie in memory that all map at the same address.
 */
#pragma once
#include "device_ranks.h"

enum { DP_PROCS_MOST = 64 };

/* Has dp_procs_start (device_run.h) been called? */
int dp_procs_started(void);
/* Zeros that every rank sees, by any of them, until dp_procs_end. */
void *dp_procs_alloc(size_t bytes);
double *dp_procs_copy(const double *x, int64_t n); /* NULL for NULL */
/* Runs body(jobs, rank, c, why) in the process of every rank; jobs is memory of dp_procs_alloc. If
 * there is no communicator, c is NULL, and why has the reason. A body sets *state[rank] before it
 * returns. *left becomes -1, or a rank whose process is gone or returns too late after another
 * failed. Returns an error in e if there are no processes or no communicators. */
typedef void (*dp_procs_body)(void *jobs, int rank, dpg_comm *c, const dp_err *why);
dp_status dp_procs_run(int N, dp_procs_body body, void *jobs, volatile dp_rank_state *const *state,
                       double limit_s, int *left, dp_err *e);
/* Behind every run. failed: its processes end, the next run gets new ones. */
void dp_procs_end(int failed);
