/* gpu/comm.cu - two communicators behind one interface: ranks that share a device, and NCCL ranks.
 *
 * Shared: one host thread per rank. A gather publishes the send pointer with an event, meets the other ranks at a timed barrier, makes
 * its own stream wait for their events and copies their words; a second event per rank, waited for at the next gather, keeps a
 * sender from overwriting words that a peer still copies. No host thread waits for the device. */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
#include <dlfcn.h>
#include <nccl.h>
#include "internal.cuh"

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

/* Waits for a stream without the chance to hang: polls until it is idle, an error shows, `stop` is set or the limit passes. */
static dp_status wait_stream(cudaStream_t s, int rank, double limit_s, const volatile int *stop, const char *call, dp_err *e)
{
    for (double t0 = now_s();; usleep(50)) {
        cudaError_t err = cudaStreamQuery(s);
        if (err == cudaSuccess)
            return DP_OK;
        if (err != cudaErrorNotReady)
            return dpg_fail(e, DP_EDEVICE, "%s:%d: rank %d: %s: %s", __FILE__, __LINE__, rank, call, cudaGetErrorString(err));
        if (*stop)
            return dpg_fail(e, DP_EDEVICE, "%s:%d: rank %d: %s: another rank failed", __FILE__, __LINE__, rank, call);
        if (now_s() - t0 > limit_s)
            return dpg_fail(e, DP_EDEVICE, "%s:%d: rank %d: %s: no end after %.1f s", __FILE__, __LINE__, rank, call, limit_s);
    }
}

/* ---- ranks on one device --------------------------------------------------------------------------------------------------------- */

typedef struct {
    int N, users, device;
    volatile int aborted;
    char why[256];
    double limit_s;
    pthread_mutex_t lock;
    pthread_cond_t arrived;
    int waiting;
    int64_t round;
    char *here;                                          /* [N] who has arrived in this round */
    const float **send;                                  /* [N] */
    cudaEvent_t *ready, *copied;                         /* [N] send buffer filled; all peers' words copied by rank i */
} Shared;

static dp_status barrier(Shared *g, int rank, const char *call, dp_err *e)
{
    struct timespec until;
    dp_status st = DP_OK;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += (time_t)g->limit_s + 1;
    pthread_mutex_lock(&g->lock);
    int64_t round = g->round;
    g->here[rank] = 1;
    if (++g->waiting == g->N) {
        g->waiting = 0;
        g->round++;
        memset(g->here, 0, g->N);
        pthread_cond_broadcast(&g->arrived);
    }
    while (g->round == round && !g->aborted)
        if (pthread_cond_timedwait(&g->arrived, &g->lock, &until) == ETIMEDOUT && g->round == round) {
            int missing = 0;
            while (missing < g->N - 1 && g->here[missing])
                missing++;
            snprintf(g->why, sizeof g->why, "rank %d did not reach %s within %.0f s", missing, call, g->limit_s);
            g->aborted = 1;
            pthread_cond_broadcast(&g->arrived);
        }
    if (g->aborted)
        st = dpg_fail(e, DP_EDEVICE, "%s:%d: rank %d: %s: %s", __FILE__, __LINE__, rank, call, g->why);
    pthread_mutex_unlock(&g->lock);
    return st;
}

static dp_status shared_all_gather(dpg_comm *c, const float *send, float *recv, size_t count, void *stream, dp_err *e)
{
    Shared *g = (Shared *)c->self;
    cudaStream_t s = (cudaStream_t)stream;
    g->send[c->rank] = send;
    CK(e, cudaEventRecord(g->ready[c->rank], s));
    TRY(barrier(g, c->rank, "all_gather", e));
    for (int r = 0; r < g->N; r++) {
        CK(e, cudaStreamWaitEvent(s, g->ready[r], 0));
        CK(e, cudaMemcpyAsync(recv + r * count, g->send[r], count * sizeof(float), cudaMemcpyDeviceToDevice, s));
    }
    CK(e, cudaEventRecord(g->copied[c->rank], s));
    TRY(barrier(g, c->rank, "all_gather (leaving)", e));
    for (int r = 0; r < g->N; r++)
        CK(e, cudaStreamWaitEvent(s, g->copied[r], 0));
    return DP_OK;
}

static dp_status shared_wait(dpg_comm *c, void *stream, dp_err *e)
{
    Shared *g = (Shared *)c->self;
    return wait_stream((cudaStream_t)stream, c->rank, g->limit_s, &g->aborted, "wait", e);
}

static void shared_abort(dpg_comm *c, const char *why)
{
    Shared *g = (Shared *)c->self;
    pthread_mutex_lock(&g->lock);
    if (!g->aborted)
        snprintf(g->why, sizeof g->why, "rank %d aborted: %s", c->rank, why);
    g->aborted = 1;
    pthread_cond_broadcast(&g->arrived);
    pthread_mutex_unlock(&g->lock);
}

static void shared_free(Shared *g)
{
    for (int r = 0; r < g->N; r++) {
        if (g->ready && g->ready[r])
            cudaEventDestroy(g->ready[r]);
        if (g->copied && g->copied[r])
            cudaEventDestroy(g->copied[r]);
    }
    pthread_cond_destroy(&g->arrived);
    pthread_mutex_destroy(&g->lock);
    free(g->here);
    free(g->send);
    free(g->ready);
    free(g->copied);
    free(g);
}

static void shared_destroy(dpg_comm *c)
{
    Shared *g = (Shared *)c->self;
    pthread_mutex_lock(&g->lock);
    int last = --g->users == 0;
    pthread_mutex_unlock(&g->lock);
    if (last)
        shared_free(g);
    c->self = NULL;
}

dp_status dpg_comm_shared(dpg_comm *c, int N, int device, double limit_s, dp_err *e)
{
    Shared *g = (Shared *)calloc(1, sizeof *g);
    if (!g)
        return dpg_fail(e, DP_ENOMEM, "%s:%d: communicator", __FILE__, __LINE__);
    g->N = g->users = N, g->device = device, g->limit_s = limit_s;
    pthread_mutex_init(&g->lock, NULL);
    pthread_cond_init(&g->arrived, NULL);
    g->here = (char *)calloc(N, 1);
    g->send = (const float **)calloc(N, sizeof *g->send);
    g->ready = (cudaEvent_t *)calloc(N, sizeof *g->ready);
    g->copied = (cudaEvent_t *)calloc(N, sizeof *g->copied);
    cudaError_t err = cudaSetDevice(device);
    for (int r = 0; r < N && err == cudaSuccess; r++) {
        err = cudaEventCreateWithFlags(&g->ready[r], cudaEventDisableTiming);
        if (err == cudaSuccess)
            err = cudaEventCreateWithFlags(&g->copied[r], cudaEventDisableTiming);
    }
    if (err != cudaSuccess) {
        shared_free(g);
        return dpg_fail(e, DP_EDEVICE, "%s:%d: events of %d ranks: %s", __FILE__, __LINE__, N, cudaGetErrorString(err));
    }
    for (int r = 0; r < N; r++) {
        dpg_comm x = {g, r, N, device, shared_all_gather, shared_wait, shared_abort, shared_destroy};
        c[r] = x;
    }
    return DP_OK;
}

/* ---- NCCL ------------------------------------------------------------------------------------------------------------------------ */

static struct {
    ncclResult_t (*InitAll)(ncclComm_t *, int, const int *);
    ncclResult_t (*AllGather)(const void *, void *, size_t, ncclDataType_t, ncclComm_t, cudaStream_t);
    ncclResult_t (*AsyncError)(ncclComm_t, ncclResult_t *);
    ncclResult_t (*Abort)(ncclComm_t);
    ncclResult_t (*Destroy)(ncclComm_t);
    const char *(*String)(ncclResult_t);
} nccl;

static dp_status nccl_load(dp_err *e)
{
    static const struct { const char *name; void **fn; } table[] = {
        {"ncclCommInitAll", (void **)&nccl.InitAll}, {"ncclAllGather", (void **)&nccl.AllGather},
        {"ncclCommGetAsyncError", (void **)&nccl.AsyncError}, {"ncclCommAbort", (void **)&nccl.Abort},
        {"ncclCommDestroy", (void **)&nccl.Destroy}, {"ncclGetErrorString", (void **)&nccl.String}};
    void *lib = dlopen("libnccl.so.2", RTLD_NOW | RTLD_GLOBAL);
    if (!lib)
        return dpg_fail(e, DP_EDEVICE, "%s:%d: %s", __FILE__, __LINE__, dlerror());
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (!(*table[i].fn = dlsym(lib, table[i].name)))
            return dpg_fail(e, DP_EDEVICE, "%s:%d: libnccl.so.2 has no %s", __FILE__, __LINE__, table[i].name);
    return DP_OK;
}

typedef struct {
    ncclComm_t comm;
    double limit_s;
    volatile int *aborted;                               /* shared by the ranks of the process */
    int *users;
    pthread_mutex_t *lock;
    int gone;                                            /* comm already aborted by this rank */
} NcclRank;

#define CN(e, expr) do { ncclResult_t r_ = (expr); if (r_ != ncclSuccess) \
    return dpg_fail(e, DP_EDEVICE, "%s:%d: rank %d: %s: %s", __FILE__, __LINE__, c->rank, #expr, nccl.String(r_)); } while (0)

static void nccl_abort(dpg_comm *c, const char *why)
{
    NcclRank *n = (NcclRank *)c->self;
    (void)why;
    *n->aborted = 1;
    if (!n->gone)
        nccl.Abort(n->comm);
    n->gone = 1;
}

static dp_status nccl_all_gather(dpg_comm *c, const float *send, float *recv, size_t count, void *stream, dp_err *e)
{
    NcclRank *n = (NcclRank *)c->self;
    if (*n->aborted)
        return dpg_fail(e, DP_EDEVICE, "%s:%d: rank %d: ncclAllGather: another rank failed", __FILE__, __LINE__, c->rank);
    CN(e, nccl.AllGather(send, recv, count, ncclFloat, n->comm, (cudaStream_t)stream));
    return DP_OK;
}

/* A peer that died or stalls leaves this rank's kernel spinning: after limit_s the communicator is aborted, which ends the kernel. */
static dp_status nccl_wait(dpg_comm *c, void *stream, dp_err *e)
{
    NcclRank *n = (NcclRank *)c->self;
    ncclResult_t async = ncclSuccess;
    dp_status st = wait_stream((cudaStream_t)stream, c->rank, n->limit_s, n->aborted, "ncclAllGather or later", e);
    if (st == DP_OK)
        CN(e, nccl.AsyncError(n->comm, &async));
    if (st == DP_OK && async != ncclSuccess)
        st = dpg_fail(e, DP_EDEVICE, "%s:%d: rank %d: ncclCommGetAsyncError: %s", __FILE__, __LINE__, c->rank, nccl.String(async));
    if (st != DP_OK)
        nccl_abort(c, "wait");
    return st;
}

static void nccl_destroy(dpg_comm *c)
{
    NcclRank *n = (NcclRank *)c->self;
    if (!n->gone && *n->aborted)
        nccl.Abort(n->comm);
    else if (!n->gone)
        nccl.Destroy(n->comm);
    pthread_mutex_lock(n->lock);
    int last = --*n->users == 0;
    pthread_mutex_unlock(n->lock);
    if (last) {
        pthread_mutex_destroy(n->lock);
        free(n->lock);
        free((void *)n->aborted);
        free(n->users);
    }
    free(n);
    c->self = NULL;
}

dp_status dpg_comm_nccl(dpg_comm *c, int N, const int *devices, double limit_s, dp_err *e)
{
    ncclComm_t comms[64];
    if (N < 1 || N > 64)
        return dpg_fail(e, DP_EINPUT, "dpg_comm_nccl: %d ranks", N);
    TRY(nccl_load(e));
    ncclResult_t r = nccl.InitAll(comms, N, devices);
    if (r != ncclSuccess)
        return dpg_fail(e, DP_EDEVICE, "%s:%d: ncclCommInitAll of %d ranks: %s", __FILE__, __LINE__, N, nccl.String(r));
    volatile int *aborted = (volatile int *)calloc(1, sizeof(int));
    int *users = (int *)calloc(1, sizeof(int));
    pthread_mutex_t *lock = (pthread_mutex_t *)calloc(1, sizeof *lock);
    pthread_mutex_init(lock, NULL);
    *users = N;
    for (int i = 0; i < N; i++) {
        NcclRank *n = (NcclRank *)calloc(1, sizeof *n);
        n->comm = comms[i], n->limit_s = limit_s, n->aborted = aborted, n->users = users, n->lock = lock;
        dpg_comm x = {n, i, N, devices[i], nccl_all_gather, nccl_wait, nccl_abort, nccl_destroy};
        c[i] = x;
    }
    return DP_OK;
}
