/* gpu/comm.cu - two communicators behind one interface: ranks that share a device, and NCCL ranks. One process, one host thread per rank.
 *
 * Both gather in the same order: a mark on the stream, all host threads meet, the words move, a mark, all meet again. So no collective is
 * enqueued before every rank has come to it, and no rank goes on to a call that may wait for a device (the first launch of a kernel does) before all
 * have enqueued theirs. Who is missing is known by name: a host thread by the meeting, a device by its marks, words in pinned memory that the
 * stream writes. A watcher thread, which makes no call that waits for a device, ends everybody: peers see `aborted` at every poll, NCCL's kernels
 * are told by ncclCommAbort, each call of it in a thread of its own that is left behind if it hangs. No host thread waits without a limit.
 *
 * Shared: a gather publishes the send pointer with an event and copies all ranks' words; a second event per rank, waited for behind the second
 * meeting, keeps a sender from overwriting words that a peer still copies. */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
#include <dlfcn.h>
#include <nccl.h>
#include "fault.cuh"
#include "internal.cuh"

#define MAX_RANKS 1024
#define CREATE_S 30.0                                    /* the creation of an NCCL communicator; seconds */
#define RECLAIM_S 2.0                                    /* its destruction or abortion */

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static struct {
    ncclResult_t (*InitAll)(ncclComm_t *, int, const int *);
    ncclResult_t (*AllGather)(const void *, void *, size_t, ncclDataType_t, ncclComm_t, cudaStream_t);
    ncclResult_t (*AsyncError)(ncclComm_t, ncclResult_t *);
    ncclResult_t (*Abort)(ncclComm_t);
    ncclResult_t (*Destroy)(ncclComm_t);
    const char *(*String)(ncclResult_t);
} nccl;

typedef struct {
    int N, users, is_nccl, device[MAX_RANKS];
    const char *call;                                    /* what a gather is called in messages */
    double limit_s;
    volatile int aborted, stop;
    char why[256];                                       /* valid once aborted is set */
    pthread_mutex_t lock;
    pthread_cond_t arrived;
    int waiting, watched;
    int64_t round;
    char here[MAX_RANKS];                                       /* who has arrived in this round */
    volatile int entered[MAX_RANKS];                            /* gathers that the host thread of a rank has begun */
    volatile int *reached, *ended;                       /* [N] pinned: gathers that its stream has come to, has behind it */
    pthread_t watcher;
    const float *send[MAX_RANKS];                               /* shared */
    cudaEvent_t ready[MAX_RANKS], copied[MAX_RANKS];                   /* shared: send buffer filled; all peers' words copied by rank i */
    ncclComm_t comm[MAX_RANKS];
    int reclaimed;
} Group;

__global__ void k_mark(volatile int *to, int n) { *to = n; }

/* The first reason stays. */
static void __attribute__((format(printf, 2, 3))) group_fail(Group *g, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    pthread_mutex_lock(&g->lock);
    if (!g->aborted)
        vsnprintf(g->why, sizeof g->why, fmt, ap);
    g->aborted = 1;
    pthread_cond_broadcast(&g->arrived);
    pthread_mutex_unlock(&g->lock);
    va_end(ap);
}

static dp_status failed(const Group *g, int rank, const char *call, dp_err *e)
{
    return dpg_fail(e, DP_EDEVICE, "%s:%d: rank %d: %s: %s", __FILE__, __LINE__, rank, call, g->why);
}

/* Which device holds a gather up: the first that has not come to it, if any. */
static int late_device(const Group *g, int *gather)
{
    int late = -1;
    *gather = 0;
    for (int r = 0; r < g->N; r++)
        if (g->reached[r] < g->entered[r] && (late < 0 || g->reached[r] < g->reached[late]))
            late = r, *gather = g->reached[r] + 1;
    return late;
}

static void fail_slow_gather(Group *g)
{
    int n, late = late_device(g, &n);
    if (late >= 0)
        group_fail(g, "the device of rank %d did not come to %s %d within %.1f s", late, g->call, n, g->limit_s);
    for (int r = 0; r < g->N; r++)
        if (g->ended[r] < g->entered[r])
            group_fail(g, "%s %d did not end on rank %d within %.1f s, although all devices had come to it", g->call, g->ended[r] + 1, r, g->limit_s);
}

static dp_status meet(Group *g, int rank, const char *call, dp_err *e)
{
    struct timespec until;
    double limit = now_s() + g->limit_s;
    until.tv_sec = (time_t)limit, until.tv_nsec = (long)((limit - (double)until.tv_sec) * 1e9);
    pthread_mutex_lock(&g->lock);
    int64_t round = g->round;
    int missing = -1;
    g->here[rank] = 1;
    if (++g->waiting == g->N && !g->aborted) {
        g->waiting = 0;
        g->round++;
        memset(g->here, 0, g->N);
        pthread_cond_broadcast(&g->arrived);
    }
    while (g->round == round && !g->aborted && missing < 0)
        if (pthread_cond_timedwait(&g->arrived, &g->lock, &until) == ETIMEDOUT && g->round == round)
            for (missing = 0; missing < g->N - 1 && g->here[missing];)
                missing++;
    pthread_mutex_unlock(&g->lock);
    if (missing >= 0)
        group_fail(g, "rank %d did not reach %s within %.1f s", missing, call, g->limit_s);
    return g->aborted ? failed(g, rank, call, e) : DP_OK;
}

/* ---- the end of a group ---------------------------------------------------------------------------------------------------------- */

typedef struct { Group *g; int rank, abort; } Reclaim;

static void *reclaim_rank(void *arg)
{
    Reclaim *x = (Reclaim *)arg;
    Group *g = x->g;
    cudaSetDevice(g->device[x->rank]);
    x->abort ? nccl.Abort(g->comm[x->rank]) : nccl.Destroy(g->comm[x->rank]);
    free(x);
    __sync_fetch_and_add(&g->reclaimed, 1);
    return NULL;
}

/* All ranks at once, as NCCL wants it. A device that hangs keeps its call from returning: the communicator is left behind then. */
static void reclaim(Group *g, int abort)
{
    for (int r = 0; r < g->N; r++) {
        pthread_t t;
        Reclaim *x = (Reclaim *)malloc(sizeof *x);
        x->g = g, x->rank = r, x->abort = abort;
        if (pthread_create(&t, NULL, reclaim_rank, x) == 0)
            pthread_detach(t);
    }
    for (double t0 = now_s(); *(volatile int *)&g->reclaimed < g->N && now_s() - t0 < RECLAIM_S;)
        usleep(1000);
}

/* Ends the group when a gather is begun and no mark moves for limit_s; tells NCCL when anybody ended it. */
static void *watch(void *arg)
{
    Group *g = (Group *)arg;
    double since = now_s();
    int64_t last = -1;
    for (; !g->stop && !g->aborted; usleep(5000)) {
        int64_t sum = 0;
        int pending = 0;
        for (int r = 0; r < g->N; r++) {
            sum += g->reached[r] + g->ended[r];
            pending |= g->ended[r] < g->entered[r];
        }
        if (sum != last || !pending)
            since = now_s(), last = sum;
        else if (now_s() - since > g->limit_s)
            fail_slow_gather(g);
    }
    if (g->aborted && g->is_nccl)
        reclaim(g, 1);
    return NULL;
}

/* Called by the last rank, or for a group that did not come about. */
static void group_free(Group *g)
{
    g->stop = 1;
    if (g->watched)
        pthread_join(g->watcher, NULL);
    if (g->is_nccl && !g->aborted)
        reclaim(g, 0);
    if (g->is_nccl && *(volatile int *)&g->reclaimed < g->N)
        return;                                          /* a thread that was left behind still reads it */
    for (int r = 0; r < g->N && !g->is_nccl; r++) {
        if (g->ready[r])
            cudaEventDestroy(g->ready[r]);
        if (g->copied[r])
            cudaEventDestroy(g->copied[r]);
    }
    if (!g->aborted)
        cudaFreeHost((void *)g->reached);                /* else a device may still hang, and this would wait for it */
    pthread_cond_destroy(&g->arrived);
    pthread_mutex_destroy(&g->lock);
    free(g);
}

static void group_abort(dpg_comm *c, const char *why)
{
    group_fail((Group *)c->self, "rank %d aborted: %s", c->rank, why);
}

static void group_destroy(dpg_comm *c)
{
    Group *g = (Group *)c->self;
    pthread_mutex_lock(&g->lock);
    int last = --g->users == 0;
    pthread_mutex_unlock(&g->lock);
    if (last)
        group_free(g);
    c->self = NULL;
}

/* ---- gather and wait ------------------------------------------------------------------------------------------------------------- */

#define CN(e, expr) do { ncclResult_t r_ = (expr); if (r_ != ncclSuccess) \
    return dpg_fail(e, DP_EDEVICE, "%s:%d: rank %d: %s: %s", __FILE__, __LINE__, rank, #expr, nccl.String(r_)); } while (0)

static dp_status move_words(Group *g, int rank, const float *send, float *recv, size_t count, cudaStream_t s, dp_err *e)
{
    if (g->is_nccl)
        CN(e, nccl.AllGather(send, recv, count, ncclFloat, g->comm[rank], s));
    for (int r = 0; r < g->N && !g->is_nccl; r++) {
        CK(e, cudaStreamWaitEvent(s, g->ready[r], 0));
        CK(e, cudaMemcpyAsync(recv + (FAULT(GATHER_SLOT) && rank == 1 && r < 2 ? 1 - r : r) * count, g->send[r], count * sizeof(float), cudaMemcpyDeviceToDevice, s));
    }
    if (!g->is_nccl)
        CK(e, cudaEventRecord(g->copied[rank], s));
    return DP_OK;
}

static dp_status gather_steps(Group *g, int rank, const float *send, float *recv, size_t count, cudaStream_t s, dp_err *e)
{
    int n = g->entered[rank] + 1;
    char call[64];
    snprintf(call, sizeof call, "%s %d", g->call, n);
    k_mark<<<1, 1, 0, s>>>(g->reached + rank, n);
    CK_LAUNCH(e, "k_mark");
    if (!g->is_nccl)
        CK(e, cudaEventRecord(g->ready[rank], s));
    g->send[rank] = send;
    TRY(meet(g, rank, call, e));
    g->entered[rank] = n;
    TRY(move_words(g, rank, send, recv, count, s, e));
    k_mark<<<1, 1, 0, s>>>(g->ended + rank, n);
    CK_LAUNCH(e, "k_mark");
    TRY(meet(g, rank, call, e));
    for (int r = 0; r < g->N && !g->is_nccl; r++)
        CK(e, cudaStreamWaitEvent(s, g->copied[r], 0));
    return DP_OK;
}

static dp_status group_all_gather(dpg_comm *c, const float *send, float *recv, size_t count, void *stream, dp_err *e)
{
    Group *g = (Group *)c->self;
    dp_err own = {DP_OK, ""};
    dp_status st = g->aborted ? failed(g, c->rank, g->call, &own) : gather_steps(g, c->rank, send, recv, count, (cudaStream_t)stream, &own);
    if (st != DP_OK) {
        group_fail(g, "%s", own.msg);
        dpg_fail(e, st, "%s", own.msg);
    }
    return st;
}

static dp_status wait_steps(Group *g, int rank, cudaStream_t s, dp_err *e)
{
    ncclResult_t async = ncclSuccess;
    cudaError_t err;
    for (double t0 = now_s(); (err = cudaStreamQuery(s)) == cudaErrorNotReady && !g->aborted; usleep(50))
        if (now_s() - t0 > g->limit_s) {
            fail_slow_gather(g);
            group_fail(g, "the device of rank %d had not done its work after %.1f s", rank, g->limit_s);
        }
    if (g->aborted)
        return failed(g, rank, "wait", e);
    CK(e, err);
    if (g->is_nccl)
        CN(e, nccl.AsyncError(g->comm[rank], &async));
    if (async != ncclSuccess)
        return dpg_fail(e, DP_EDEVICE, "%s:%d: rank %d: ncclCommGetAsyncError: %s", __FILE__, __LINE__, rank, nccl.String(async));
    return meet(g, rank, "wait", e);
}

static dp_status group_wait(dpg_comm *c, void *stream, dp_err *e)
{
    Group *g = (Group *)c->self;
    dp_err own = {DP_OK, ""};
    dp_status st = wait_steps(g, c->rank, (cudaStream_t)stream, &own);
    if (st != DP_OK) {
        group_fail(g, "%s", own.msg);
        dpg_fail(e, st, "%s", own.msg);
    }
    return st;
}

/* ---- creation -------------------------------------------------------------------------------------------------------------------- */

static Group *group_new(int N, const int *devices, double limit_s, const char *call, dp_err *e)
{
    Group *g = N >= 1 && N <= MAX_RANKS ? (Group *)calloc(1, sizeof *g) : NULL;
    pthread_condattr_t clock;
    void *marks = NULL;
    if (!g) {
        dpg_fail(e, N >= 1 && N <= MAX_RANKS ? DP_ENOMEM : DP_EINPUT, "%s:%d: communicator of %d ranks", __FILE__, __LINE__, N);
        return NULL;
    }
    g->N = g->users = N, g->limit_s = limit_s, g->call = call;
    for (int r = 0; r < N; r++)
        g->device[r] = devices[r];
    pthread_mutex_init(&g->lock, NULL);
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&g->arrived, &clock);
    pthread_condattr_destroy(&clock);
    cudaError_t err = cudaSetDevice(devices[0]);
    if (err == cudaSuccess)
        err = cudaHostAlloc(&marks, 2 * N * sizeof(int), cudaHostAllocPortable | cudaHostAllocMapped);
    if (err != cudaSuccess) {
        dpg_fail(e, DP_EDEVICE, "%s:%d: marks of %d ranks: %s", __FILE__, __LINE__, N, cudaGetErrorString(err));
        group_free(g);
        return NULL;
    }
    memset(marks, 0, 2 * N * sizeof(int));
    g->reached = (volatile int *)marks, g->ended = g->reached + N;
    return g;
}

static dp_status group_start(Group *g, dpg_comm *c, dp_err *e)
{
    g->watched = pthread_create(&g->watcher, NULL, watch, g) == 0;
    if (!g->watched) {
        group_free(g);
        return dpg_fail(e, DP_ENOMEM, "%s:%d: thread of the communicator", __FILE__, __LINE__);
    }
    for (int r = 0; r < g->N; r++) {
        dpg_comm x = {g, r, g->N, g->device[r], group_all_gather, group_wait, group_abort, group_destroy};
        c[r] = x;
    }
    return DP_OK;
}

dp_status dpg_comm_shared(dpg_comm *c, int N, int device, double limit_s, dp_err *e)
{
    int devices[MAX_RANKS];
    for (int &d : devices)
        d = device;
    Group *g = group_new(N, devices, limit_s, "all_gather", e);
    if (!g)
        return e ? e->code : DP_EDEVICE;
    for (int r = 0; r < N; r++) {
        cudaError_t err = cudaEventCreateWithFlags(&g->ready[r], cudaEventDisableTiming);
        if (err == cudaSuccess)
            err = cudaEventCreateWithFlags(&g->copied[r], cudaEventDisableTiming);
        if (err != cudaSuccess) {
            group_free(g);
            return dpg_fail(e, DP_EDEVICE, "%s:%d: events of %d ranks: %s", __FILE__, __LINE__, N, cudaGetErrorString(err));
        }
    }
    return group_start(g, c, e);
}

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

typedef struct { Group *g; ncclResult_t result; volatile int done; } Creation;

static void *create(void *arg)
{
    Creation *x = (Creation *)arg;
    x->result = nccl.InitAll(x->g->comm, x->g->N, x->g->device);
    __sync_synchronize();
    x->done = 1;
    return NULL;
}

dp_status dpg_comm_nccl(dpg_comm *c, int N, const int *devices, double limit_s, dp_err *e)
{
    pthread_t t;
    TRY(nccl_load(e));
    Group *g = group_new(N, devices, limit_s, "ncclAllGather", e);
    if (!g)
        return e ? e->code : DP_EDEVICE;
    Creation *x = (Creation *)calloc(1, sizeof *x);
    x->g = g;
    if (pthread_create(&t, NULL, create, x))
        return dpg_fail(e, DP_ENOMEM, "%s:%d: thread of ncclCommInitAll", __FILE__, __LINE__);
    for (double t0 = now_s(); !x->done; usleep(1000))
        if (now_s() - t0 > CREATE_S)                     /* the thread is left behind with g and x */
            return dpg_fail(e, DP_EDEVICE, "%s:%d: ncclCommInitAll of %d ranks: no end after %.0f s", __FILE__, __LINE__, N, CREATE_S);
    pthread_join(t, NULL);
    ncclResult_t r = x->result;
    free(x);
    if (r != ncclSuccess) {
        group_free(g);
        return dpg_fail(e, DP_EDEVICE, "%s:%d: ncclCommInitAll of %d ranks: %s", __FILE__, __LINE__, N, nccl.String(r));
    }
    g->is_nccl = 1;
    return group_start(g, c, e);
}
