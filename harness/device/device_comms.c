/* Communicators of ranks on devices (device_ranks.h). */
#include "device_run.h"

static double limit_s = 8;
void dp_cuda_limit(double seconds) { limit_s = seconds; }

#ifdef DP_HAVE_CUDA
#include "device_procs.h"

#include <stdlib.h>
#include <unistd.h>

static dpg_comm *kept[DP_PROCS_MOST + 1];
static pid_t keeper;

static void destroy(int N, dpg_comm *c) {
    for (int r = 0; r < N && c; r++)
        c[r].destroy(&c[r]);
    free(c);
}
static void destroy_kept(void) {
    for (int N = 0; N <= DP_PROCS_MOST && getpid() == keeper; N++)
        destroy(N, kept[N]);
}

dp_status dp_cuda_comms(dp_backend b, int N, dpg_comm **c, dp_err *e) {
    const int nccl = b == DP_BACKEND_NCCL;
    int devices[DP_PROCS_MOST];
    *c = NULL;
    if (N == 1) return DP_OK;
    int there = 1;
    if (!nccl && (cudaGetDeviceCount(&there) != cudaSuccess || there < 1)) there = 1;
    if (nccl && N > DP_PROCS_MOST)
        return dp_fail(e, DP_EINPUT, "%d ranks over NCCL: at most %d here", N, DP_PROCS_MOST);
    if (nccl && kept[N]) {
        *c = kept[N];
        kept[N] = NULL;
        return DP_OK;
    }
    *c = dp_calloc((size_t)N, sizeof **c);
    for (int i = 0; i < N && i < DP_PROCS_MOST; i++)
        devices[i] = nccl ? i : i % there;
    const dp_status st = nccl                ? dpg_comm_nccl(*c, N, devices, limit_s, e)
                         : N > DP_PROCS_MOST ? dpg_comm_shared(*c, N, 0, limit_s, e)
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
    return dp_backends[b].processes && dp_procs_started() && N <= DP_PROCS_MOST &&
           cudaGetDeviceCount(&n) == cudaSuccess && n < N;
}
#endif
