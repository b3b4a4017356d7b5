/* gpu/exchange/gather.cu - the calls of a communicator: gather, wait, peer memory (group.cuh). */
#include "exchange/group.cuh"
#include "fault.cuh"
#include <stdio.h>
#include <unistd.h>

__global__ void k_mark(volatile int *to, int n) { *to = n; }

/* ---- gather ---------------------------------------------------------------------------------- */

#define CN(e, expr)                                                                      \
    do {                                                                                 \
        ncclResult_t r_ = (expr);                                                        \
        if (r_ != ncclSuccess)                                                           \
            return dpg_fail(e, DP_EDEVICE, "%s:%d: rank %d: %s: %s", __FILE__, __LINE__, \
                            g->first_rank + rank, #expr, nccl.String(r_));               \
    } while (0)

static dp_status move_words(Group *g, int rank, const float *send, float *recv, size_t count,
                            cudaStream_t s, dp_err *e) {
    if (g->is_nccl) CN(e, nccl.AllGather(send, recv, count, ncclFloat, g->comm[rank], s));
    for (int r = 0; r < g->N && !g->is_nccl; r++) {
        CK(e, cudaStreamWaitEvent(s, g->ready[r], 0));
        CK(e, cudaMemcpyAsync(recv + (FAULT(GATHER_SLOT) && rank == 1 && r < 2 ? 1 - r : r) * count,
                              g->send[r], count * sizeof(float), cudaMemcpyDeviceToDevice, s));
    }
    if (!g->is_nccl) CK(e, cudaEventRecord(g->copied[rank], s));
    return DP_OK;
}

static dp_status gather_steps(Home *h, int rank, const float *send, float *recv, size_t count,
                              cudaStream_t s, dp_err *e) {
    Group *g = h->g;
    int n = g->entered[rank] + 1;
    char call[64];
    snprintf(call, sizeof call, "%s %d", g->call, n);
    k_mark<<<1, 1, 0, s>>>(h->marks + rank, n);
    CK_LAUNCH(e, "k_mark");
    if (!g->is_nccl) CK(e, cudaEventRecord(g->ready[rank], s));
    g->send[rank] = send;
    TRY(meet(g, rank, call, g->limit_s, e));
    g->by_windows[rank] = 0;
    g->entered[rank] = n;
    TRY(move_words(g, rank, send, recv, count, s, e));
    k_mark<<<1, 1, 0, s>>>(h->marks + g->N + rank, n);
    CK_LAUNCH(e, "k_mark");
    TRY(meet(g, rank, call, g->limit_s, e));
    for (int r = 0; r < g->N && !g->is_nccl; r++)
        CK(e, cudaStreamWaitEvent(s, g->copied[r], 0));
    return DP_OK;
}

dp_status group_all_gather(dpg_comm *c, const float *send, float *recv, size_t count, void *stream,
                           dp_err *e) {
    Home *h = (Home *)c->self;
    Group *g = h->g;
    dp_err own = {DP_OK, ""};
    dp_status st =
        g->aborted ? failed(g, place_of(g, c), g->call, &own)
                   : gather_steps(h, place_of(g, c), send, recv, count, (cudaStream_t)stream, &own);
    if (st != DP_OK) {
        group_fail(g, "%s", own.msg);
        dpg_fail(e, st, "%s", own.msg);
    }
    return st;
}

/* ---- peer memory ----------------------------------------------------------------------------- */

/* Do kernels on the device of `rank` reach what lies on the other's. Asked for once in a process;
 * NCCL may have done so before. */
static int reaches(const Group *g, int rank, int other) {
    static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
    static char enabled[MAX_DEVICES][MAX_DEVICES];
    int can = 0, here = g->device[rank], there = g->device[other];
    if (here == there) return 1;
    if (here >= MAX_DEVICES || there >= MAX_DEVICES ||
        cudaDeviceCanAccessPeer(&can, here, there) != cudaSuccess || !can)
        return 0;
    pthread_mutex_lock(&once);
    if (!enabled[here][there]) {
        cudaError_t err = cudaDeviceEnablePeerAccess(there, 0);
        enabled[here][there] = err == cudaSuccess || err == cudaErrorPeerAccessAlreadyEnabled;
        cudaGetLastError();
    }
    can = enabled[here][there];
    pthread_mutex_unlock(&once);
    return can;
}

static dp_status exchange_steps(Group *g, int rank, int in_order, void *mine, void **at,
                                dp_err *e) {
    g->mine[rank] = mine;
    g->apart |= is_apart(g);
    for (int r = 0; r < g->N; r++)
        if (g->procs || !reaches(g, rank, r) ||
            (r != rank && g->device[r] == g->device[rank] && !in_order))
            g->apart = 1;
    TRY(meet(g, rank, "exchange", g->limit_s, e));
    for (int r = 0; r < g->ranks; r++)
        at[r] = g->apart ? NULL : g->mine[r];
    return meet(g, rank, "exchange", g->limit_s, e);
}

dp_status group_exchange(dpg_comm *c, void *mine, void **at, dp_err *e) {
    Group *g = ((Home *)c->self)->g;
    dp_err own = {DP_OK, ""};
    dp_status st = g->aborted ? failed(g, place_of(g, c), "exchange", &own)
                              : exchange_steps(g, place_of(g, c), c->in_order, mine, at, &own);
    if (st != DP_OK) {
        group_fail(g, "%s", own.msg);
        dpg_fail(e, st, "%s", own.msg);
    }
    return st;
}

dp_status group_enter(dpg_comm *c, dpg_marks *m, dp_err *e) {
    Group *g = ((Home *)c->self)->g;
    const int rank = place_of(g, c);
    if (g->aborted) return failed(g, rank, "stores into windows", e);
    *m = (dpg_marks){reached(g) + rank, ended(g) + rank, halt(g), g->entered[rank] + 1};
    g->by_windows[rank] = 1;
    g->entered[rank] = m->n;
    return DP_OK;
}

/* ---- wait ------------------------------------------------------------------------------------ */

static dp_status wait_steps(Group *g, int rank, cudaStream_t s, dp_err *e) {
    ncclResult_t async = ncclSuccess;
    cudaError_t err;
    for (double t0 = now_s(); (err = cudaStreamQuery(s)) == cudaErrorNotReady && !g->aborted;
         usleep(50))
        if (now_s() - t0 > g->limit_s) {
            fail_slow_gather(g);
            group_fail(g, "the device of rank %d had not done its work after %.1f s",
                       g->first_rank + rank, g->limit_s);
        }
    if (g->aborted) return failed(g, rank, "wait", e);
    CK(e, err);
    if (g->is_nccl) CN(e, nccl.AsyncError(g->comm[rank], &async));
    if (async != ncclSuccess)
        return dpg_fail(e, DP_EDEVICE, "%s:%d: rank %d: ncclCommGetAsyncError: %s", __FILE__,
                        __LINE__, g->first_rank + rank, nccl.String(async));
    return meet(g, rank, "wait", g->limit_s, e);
}

dp_status group_wait(dpg_comm *c, void *stream, dp_err *e) {
    Group *g = ((Home *)c->self)->g;
    dp_err own = {DP_OK, ""};
    dp_status st = wait_steps(g, place_of(g, c), (cudaStream_t)stream, &own);
    if (st != DP_OK) {
        group_fail(g, "%s", own.msg);
        dpg_fail(e, st, "%s", own.msg);
    }
    return st;
}
