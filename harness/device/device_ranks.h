/* harness/device/device_ranks.h - one host thread per rank on CUDA devices: their communicators,
 * and their end when one of them never comes back. */
#ifndef DP_CUDA_RANKS_H
#define DP_CUDA_RANKS_H
#include "device_run.h"
#include "gpu/dp_gpu.h"

#include <pthread.h>

typedef enum { DP_RANK_RUNS, DP_RANK_ENDED, DP_RANK_FAILED } dp_rank_state;

/* c[N], or NULL with one rank. Those of NCCL, which take 1.5 s to make, come back with every later
 * call of as many ranks, unless a run on them failed. */
dp_status dp_cuda_comms(dp_backend b, int N, dpg_comm **c, dp_err *e);
void dp_cuda_comms_end(dp_backend b, int N, dpg_comm *c, int failed);
/* Are these ranks processes (device_procs.h): more over NCCL than there are devices. */
int dp_cuda_processes(dp_backend b, int N);
double dp_cuda_limit_s(void); /* of dp_cuda_limit */
/* Joins the threads of N ranks, which set their state as soon as they know it. -1, or a rank that
 * has not come back some seconds after another one failed: its device hangs, and all that it may
 * still touch must stay. */
int dp_cuda_join(const pthread_t *thread, volatile dp_rank_state *const *state, int N);
#endif
