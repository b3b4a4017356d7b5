/* gpu/comm.cu - three communicators behind one interface: host threads as ranks on devices that they may share, host threads over NCCL, processes over NCCL.
 *
 * All gather in the same order: a mark on the stream, all hosts meet, the words move, a mark, all meet again. So no collective is
 * enqueued before every rank has come to it, and no rank goes on to a call that may wait for a device (the first launch of a kernel does) before all
 * have enqueued theirs. Who is missing is known by name: a host thread by the meeting, a device by its marks, words in pinned memory that the
 * stream writes, a process that was killed by the lock that its watcher held. A watcher thread, which makes no call that waits for a device, ends everybody: peers see `aborted` at every poll, NCCL's kernels
 * are told by ncclCommAbort, each call of it in a thread of its own that is left behind if it hangs. No host thread waits without a limit.
 *
 * Shared: a gather publishes the send pointer with an event and copies all ranks' words; a second event per rank, waited for behind the second
 * meeting, keeps a sender from overwriting words that a peer still copies. */
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <dlfcn.h>
#include <nccl.h>
#include "fault.cuh"
#include "internal.cuh"

#define MAX_RANKS 1024
#define MAX_DEVICES 64                                   /* of a process */
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
    ncclResult_t (*GetUniqueId)(ncclUniqueId *);
    ncclResult_t (*InitRank)(ncclComm_t *, int, ncclUniqueId, int);
    ncclResult_t (*AllGather)(const void *, void *, size_t, ncclDataType_t, ncclComm_t, cudaStream_t);
    ncclResult_t (*AsyncError)(ncclComm_t, ncclResult_t *);
    ncclResult_t (*Abort)(ncclComm_t);
    ncclResult_t (*Destroy)(ncclComm_t);
    const char *(*String)(ncclResult_t);
} nccl;

/* What all ranks see. Ranks that are processes have it in memory that they share; arrays that only a rank itself uses are there for all the same. */
typedef struct {
    int N, is_nccl, device[MAX_RANKS];
    char call[32];                                       /* what a gather is called in messages */
    double limit_s;
    volatile int aborted;
    char why[256];                                       /* valid once aborted is set */
    pthread_mutex_t lock;
    int64_t met[MAX_RANKS];                              /* meetings that a rank has come to */
    int bell;                                            /* moves when all have come, or aborted is set: what those wait for who came before */
    volatile int entered[MAX_RANKS];                     /* gathers, or transfers through windows, that the host of a rank has begun */
    volatile char by_windows[MAX_RANKS];                 /* its last one was such a transfer */
    void *mine[MAX_RANKS];                               /* exchange */
    volatile int apart;                                  /* some devices do not reach each other */
    volatile int *pinned;                                /* threads: marks in pinned memory */
    const float *send[MAX_RANKS];                        /* shared */
    cudaEvent_t ready[MAX_RANKS], copied[MAX_RANKS];     /* shared: send buffer filled; all peers' words copied by rank i */
    ncclComm_t comm[MAX_RANKS];
    /* processes */
    int procs;
    pid_t creator;
    ncclUniqueId id;
    pthread_mutex_t alive[MAX_RANKS];                    /* held by the watcher of a rank while watched[rank] */
    volatile char watched[MAX_RANKS];
    volatile double beat[MAX_RANKS];                     /* when it last looked */
    alignas(4096) volatile int marks[2 * MAX_RANKS + 1]; /* whole pages, which every process registers; no pointers: each may map them elsewhere */
} Group;

/* [N] Gathers that the stream of a rank has come to, has behind it. */
static volatile int *reached(const Group *g) { return g->procs ? (volatile int *)g->marks : g->pinned; }
static volatile int *ended(const Group *g) { return reached(g) + g->N; }
/* Tells kernels that wait for each other to end. */
static volatile int *halt(const Group *g) { return ended(g) + g->N; }
static const char *call_of(const Group *g, int rank) { return g->by_windows[rank] ? "stores into windows" : g->call; }

/* The ranks of one process: all, or one. */
typedef struct {
    Group *g;
    int first, count, users, watched;
    volatile int stop, reclaimed;
    pthread_t watcher;
    int *marks;                                          /* of the group, as the device calls them; processes: NULL until registered */
} Home;

__global__ void k_mark(volatile int *to, int n) { *to = n; }

/* A rank may be killed while it holds the lock. */
static void lock(Group *g)
{
    if (pthread_mutex_lock(&g->lock) == EOWNERDEAD)
        pthread_mutex_consistent(&g->lock);
}

static void ring(Group *g)
{
    __atomic_add_fetch(&g->bell, 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, &g->bell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* The first reason stays. */
static void __attribute__((format(printf, 2, 3))) group_fail(Group *g, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    lock(g);
    if (!g->aborted)
        vsnprintf(g->why, sizeof g->why, fmt, ap);
    g->aborted = 1;
    if (reached(g))
        *halt(g) = 1;
    pthread_mutex_unlock(&g->lock);
    ring(g);
    va_end(ap);
}

static dp_status failed(const Group *g, int rank, const char *call, dp_err *e)
{
    return dpg_fail(e, DP_EDEVICE, "%s:%d: rank %d: %s: %s", __FILE__, __LINE__, rank, call, g->why);
}

/* The first gather that has not ended everywhere, and the rank that has come least far of those whose device has not come to it: those that wait within an earlier one are not to blame. */
static int late_device(const Group *g, int *gather)
{
    int late = -1;
    *gather = INT_MAX;
    for (int r = 0; r < g->N; r++)
        if (ended(g)[r] < g->entered[r] && ended(g)[r] < *gather)
            *gather = ended(g)[r] + 1;
    for (int r = 0; r < g->N; r++)
        if (*gather < INT_MAX && reached(g)[r] < *gather && (late < 0 || reached(g)[r] < reached(g)[late]))
            late = r;
    return late;
}

/* A process that is stopped moves no words of NCCL's either: the marks alone would name those that wait for it. Windows make no host thread wait for another, so that it may be
 * one that has not come. */
static void fail_slow_gather(Group *g)
{
    int n, late = late_device(g, &n);
    for (int r = 0; r < g->N && g->procs; r++)
        if (now_s() - g->beat[r] > g->limit_s / 2)
            group_fail(g, "the process of rank %d has not run for %.1f s", r, now_s() - g->beat[r]);
    if (late >= 0)
        group_fail(g, g->entered[late] < n ? "rank %d did not reach %s %d within %.1f s" : "the device of rank %d did not come to %s %d within %.1f s", late, call_of(g, late), n, g->limit_s);
    for (int r = 0; r < g->N; r++)
        if (ended(g)[r] < g->entered[r])
            group_fail(g, "%s %d did not end on rank %d within %.1f s, although all devices had come to it", call_of(g, r), ended(g)[r] + 1, r, g->limit_s);
}

/* The first rank that has not come to meeting n, or -1. */
static int behind(const Group *g, int64_t n)
{
    for (int r = 0; r < g->N; r++)
        if (__atomic_load_n(&g->met[r], __ATOMIC_SEQ_CST) < n)
            return r;
    return -1;
}

/* No condition variable: one that a killed process waited for may block its next broadcast. */
static dp_status meet(Group *g, int rank, const char *call, double limit_s, dp_err *e)
{
    int64_t n = __atomic_add_fetch(&g->met[rank], 1, __ATOMIC_SEQ_CST);
    double limit = now_s() + limit_s, left;
    int bell = __atomic_load_n(&g->bell, __ATOMIC_SEQ_CST), missing = behind(g, n);
    if (missing < 0)
        ring(g);
    for (; missing >= 0 && !g->aborted; bell = __atomic_load_n(&g->bell, __ATOMIC_SEQ_CST), missing = behind(g, n)) {
        left = limit - now_s();
        if (left <= 0)
            group_fail(g, "rank %d did not reach %s within %.1f s", missing, call, limit_s);
        struct timespec t = {(time_t)fmax(left, 0), (long)(fmod(fmax(left, 0), 1) * 1e9)};
        syscall(SYS_futex, &g->bell, FUTEX_WAIT, bell, &t, NULL, 0);
    }
    return g->aborted ? failed(g, rank, call, e) : DP_OK;
}

/* ---- the end of a group ---------------------------------------------------------------------------------------------------------- */

typedef struct { Home *h; int rank, abort; } Reclaim;

static void *reclaim_rank(void *arg)
{
    Reclaim *x = (Reclaim *)arg;
    Group *g = x->h->g;
    cudaSetDevice(g->device[x->rank]);
    x->abort ? nccl.Abort(g->comm[x->rank]) : nccl.Destroy(g->comm[x->rank]);
    __sync_fetch_and_add(&x->h->reclaimed, 1);
    free(x);
    return NULL;
}

/* All ranks at once, as NCCL wants it. A device that hangs keeps its call from returning: the communicator is left behind then. */
static void reclaim(Home *h, int abort)
{
    for (int r = h->first; r < h->first + h->count; r++) {
        pthread_t t;
        if (!h->g->comm[r]) {                            /* its creation has not ended */
            __sync_fetch_and_add(&h->reclaimed, 1);
            continue;
        }
        Reclaim *x = (Reclaim *)malloc(sizeof *x);
        x->h = h, x->rank = r, x->abort = abort;
        if (pthread_create(&t, NULL, reclaim_rank, x) == 0)
            pthread_detach(t);
    }
    for (double t0 = now_s(); h->reclaimed < h->count && now_s() - t0 < RECLAIM_S;)
        usleep(1000);
}

/* A lock whose holder is dead is that of a process that was killed. */
static void find_dead(Group *g)
{
    for (int r = 0; r < g->N && g->procs && !g->aborted; r++) {
        int got = g->watched[r] ? pthread_mutex_trylock(&g->alive[r]) : EBUSY;
        if (got == EOWNERDEAD)
            group_fail(g, g->entered[r] ? "the process of rank %d has ended; its last call was %s %d" : "the process of rank %d has ended before its first %s", r, g->call, g->entered[r]);
        if (got == 0)
            pthread_mutex_unlock(&g->alive[r]);
    }
}

/* Ends the group when a gather is begun and no mark moves for limit_s, or a process is gone; tells NCCL when anybody ended it. */
static void *watch(void *arg)
{
    Home *h = (Home *)arg;
    Group *g = h->g;
    double since = now_s();
    int64_t last = -1;
    if (g->procs)
        pthread_mutex_lock(&g->alive[h->first]), g->watched[h->first] = 1;
    for (; !h->stop && !g->aborted; usleep(5000)) {
        int64_t sum = 0;
        int pending = 0;
        for (int r = 0; r < g->N; r++) {
            sum += reached(g)[r] + ended(g)[r];
            pending |= ended(g)[r] < g->entered[r];
        }
        find_dead(g);
        g->beat[h->first] = now_s();
        if (sum != last || !pending)
            since = now_s(), last = sum;
        else if (now_s() - since > g->limit_s)
            fail_slow_gather(g);
    }
    if (g->procs)
        g->watched[h->first] = 0, pthread_mutex_unlock(&g->alive[h->first]);
    if (g->aborted && g->is_nccl)
        reclaim(h, 1);
    return NULL;
}

/* Called by the last rank of a process, or for a group that did not come about. */
static void home_free(Home *h)
{
    Group *g = h->g;
    h->stop = 1;
    if (h->watched)
        pthread_join(h->watcher, NULL);
    if (h->watched && g->is_nccl && !g->aborted)
        reclaim(h, 0);
    if (h->watched && g->is_nccl && h->reclaimed < h->count)
        return;                                          /* a thread that was left behind still reads it */
    for (int r = 0; r < g->N && !g->is_nccl; r++) {
        if (g->ready[r])
            cudaEventDestroy(g->ready[r]);
        if (g->copied[r])
            cudaEventDestroy(g->copied[r]);
    }
    if (!g->aborted && h->marks)                         /* else a device may still hang, and this would wait for it */
        g->procs ? cudaHostUnregister((void *)g->marks) : cudaFreeHost(h->marks);
    if (!g->procs) {
        pthread_mutex_destroy(&g->lock);
        free(g);
    }
    free(h);
}

static void group_abort(dpg_comm *c, const char *why)
{
    group_fail(((Home *)c->self)->g, "rank %d aborted: %s", c->rank, why);
}

static void group_destroy(dpg_comm *c)
{
    Home *h = (Home *)c->self;
    c->self = NULL;
    if (__sync_sub_and_fetch(&h->users, 1) == 0)
        home_free(h);
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

static dp_status gather_steps(Home *h, int rank, const float *send, float *recv, size_t count, cudaStream_t s, dp_err *e)
{
    Group *g = h->g;
    int n = g->entered[rank] + 1;
    char call[64];
    snprintf(call, sizeof call, "%s %d", g->call, n);
    k_mark<<<1, 1, 0, s>>>(h->marks + rank, n);
    CK_LAUNCH(e, "k_mark");
    if (!g->is_nccl)
        CK(e, cudaEventRecord(g->ready[rank], s));
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

static dp_status group_all_gather(dpg_comm *c, const float *send, float *recv, size_t count, void *stream, dp_err *e)
{
    Home *h = (Home *)c->self;
    Group *g = h->g;
    dp_err own = {DP_OK, ""};
    dp_status st = g->aborted ? failed(g, c->rank, g->call, &own) : gather_steps(h, c->rank, send, recv, count, (cudaStream_t)stream, &own);
    if (st != DP_OK) {
        group_fail(g, "%s", own.msg);
        dpg_fail(e, st, "%s", own.msg);
    }
    return st;
}

/* ---- peer memory ----------------------------------------------------------------------------------------------------------------- */

/* Do kernels on the device of `rank` reach what lies on the other's. Asked for once in a process; NCCL may have done so before. */
static int reaches(const Group *g, int rank, int other)
{
    static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
    static char enabled[MAX_DEVICES][MAX_DEVICES];
    int can = 0, here = g->device[rank], there = g->device[other];
    if (here == there)
        return 1;
    if (here >= MAX_DEVICES || there >= MAX_DEVICES || cudaDeviceCanAccessPeer(&can, here, there) != cudaSuccess || !can)
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

static dp_status exchange_steps(Group *g, int rank, int in_order, void *mine, void **at, dp_err *e)
{
    g->mine[rank] = mine;
    for (int r = 0; r < g->N; r++)
        if (g->procs || !reaches(g, rank, r) || (r != rank && g->device[r] == g->device[rank] && !in_order))
            g->apart = 1;
    TRY(meet(g, rank, "exchange", g->limit_s, e));
    for (int r = 0; r < g->N; r++)
        at[r] = g->apart ? NULL : g->mine[r];
    return meet(g, rank, "exchange", g->limit_s, e);
}

static dp_status group_exchange(dpg_comm *c, void *mine, void **at, dp_err *e)
{
    Group *g = ((Home *)c->self)->g;
    dp_err own = {DP_OK, ""};
    dp_status st = g->aborted ? failed(g, c->rank, "exchange", &own) : exchange_steps(g, c->rank, c->in_order, mine, at, &own);
    if (st != DP_OK) {
        group_fail(g, "%s", own.msg);
        dpg_fail(e, st, "%s", own.msg);
    }
    return st;
}

static dp_status group_enter(dpg_comm *c, dpg_marks *m, dp_err *e)
{
    Group *g = ((Home *)c->self)->g;
    if (g->aborted)
        return failed(g, c->rank, "stores into windows", e);
    *m = (dpg_marks){reached(g) + c->rank, ended(g) + c->rank, halt(g), g->entered[c->rank] + 1};
    g->by_windows[c->rank] = 1;
    g->entered[c->rank] = m->n;
    return DP_OK;
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
    return meet(g, rank, "wait", g->limit_s, e);
}

static dp_status group_wait(dpg_comm *c, void *stream, dp_err *e)
{
    Group *g = ((Home *)c->self)->g;
    dp_err own = {DP_OK, ""};
    dp_status st = wait_steps(g, c->rank, (cudaStream_t)stream, &own);
    if (st != DP_OK) {
        group_fail(g, "%s", own.msg);
        dpg_fail(e, st, "%s", own.msg);
    }
    return st;
}

/* ---- creation -------------------------------------------------------------------------------------------------------------------- */

static void group_init(Group *g, int N, double limit_s, const char *call)
{
    pthread_mutexattr_t m;
    pthread_mutexattr_init(&m);
    pthread_mutexattr_setpshared(&m, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&m, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&g->lock, &m);
    for (int r = 0; r < N; r++)
        pthread_mutex_init(&g->alive[r], &m);
    pthread_mutexattr_destroy(&m);
    g->N = N, g->limit_s = limit_s;
    snprintf(g->call, sizeof g->call, "%s", call);
}

static dp_status check_ranks(int N, dp_err *e)
{
    return N >= 1 && N <= MAX_RANKS ? DP_OK : dpg_fail(e, DP_EINPUT, "%s:%d: communicator of %d ranks", __FILE__, __LINE__, N);
}

static Home *home_new(Group *g, int first, int count, dp_err *e)
{
    Home *h = g ? (Home *)calloc(1, sizeof *h) : NULL;
    if (!h)
        dpg_fail(e, DP_ENOMEM, "%s:%d: communicator", __FILE__, __LINE__);
    else
        h->g = g, h->first = first, h->count = h->users = count;
    return h;
}

/* All ranks in this process. */
static Home *home_of_all(int N, const int *devices, double limit_s, const char *call, dp_err *e)
{
    void *marks = NULL;
    if (check_ranks(N, e) != DP_OK)
        return NULL;
    Group *g = (Group *)aligned_alloc(4096, sizeof *g);
    if (g)
        memset(g, 0, sizeof *g), group_init(g, N, limit_s, call);
    Home *h = home_new(g, 0, N, e);
    if (!h)
        return NULL;
    for (int r = 0; r < N; r++)
        g->device[r] = devices[r];
    cudaError_t err = cudaSetDevice(devices[0]);
    if (err == cudaSuccess)
        err = cudaHostAlloc(&marks, (2 * N + 1) * sizeof(int), cudaHostAllocPortable | cudaHostAllocMapped);
    if (err != cudaSuccess) {
        dpg_fail(e, DP_EDEVICE, "%s:%d: marks of %d ranks: %s", __FILE__, __LINE__, N, cudaGetErrorString(err));
        home_free(h);
        return NULL;
    }
    memset(marks, 0, (2 * N + 1) * sizeof(int));
    h->marks = (int *)marks, g->pinned = h->marks;
    return h;
}

static dp_status home_watch(Home *h, dp_err *e)
{
    h->watched = pthread_create(&h->watcher, NULL, watch, h) == 0;
    if (h->watched)
        return DP_OK;
    home_free(h);
    return dpg_fail(e, DP_ENOMEM, "%s:%d: thread of the communicator", __FILE__, __LINE__);
}

static void home_comms(const Home *h, dpg_comm *c)
{
    const Group *g = h->g;
    for (int r = h->first; r < h->first + h->count; r++) {
        dpg_comm x = {(void *)h, r, g->N, g->device[r], 0, group_all_gather, group_wait, group_abort, group_destroy, group_exchange, group_enter};
        *c++ = x;
    }
}

dp_status dpg_comm_shared(dpg_comm *c, int N, int device, double limit_s, dp_err *e)
{
    int devices[MAX_RANKS];
    for (int &d : devices)
        d = device;
    return dpg_comm_devices(c, N, devices, limit_s, e);
}

dp_status dpg_comm_devices(dpg_comm *c, int N, const int *devices, double limit_s, dp_err *e)
{
    Home *h = home_of_all(N, devices, limit_s, "all_gather", e);
    if (!h)
        return e ? e->code : DP_EDEVICE;
    for (int r = 0; r < N; r++) {
        cudaError_t err = cudaSetDevice(devices[r]);
        if (err == cudaSuccess)
            err = cudaEventCreateWithFlags(&h->g->ready[r], cudaEventDisableTiming);
        if (err == cudaSuccess)
            err = cudaEventCreateWithFlags(&h->g->copied[r], cudaEventDisableTiming);
        if (err != cudaSuccess) {
            home_free(h);
            return dpg_fail(e, DP_EDEVICE, "%s:%d: events of %d ranks: %s", __FILE__, __LINE__, N, cudaGetErrorString(err));
        }
    }
    TRY(home_watch(h, e));
    home_comms(h, c);
    return DP_OK;
}

static dp_status nccl_load(dp_err *e)
{
    static const struct { const char *name; void **fn; } table[] = {
        {"ncclCommInitAll", (void **)&nccl.InitAll}, {"ncclGetUniqueId", (void **)&nccl.GetUniqueId}, {"ncclCommInitRank", (void **)&nccl.InitRank}, {"ncclAllGather", (void **)&nccl.AllGather},
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

typedef struct { Home *h; ncclResult_t result; volatile int done; } Creation;

static void *create(void *arg)
{
    Creation *x = (Creation *)arg;
    Group *g = x->h->g;
    int r = x->h->first;
    if (g->procs)
        cudaSetDevice(g->device[r]);
    x->result = g->procs ? nccl.InitRank(&g->comm[r], g->N, g->id, r) : nccl.InitAll(g->comm, g->N, g->device);
    __sync_synchronize();
    x->done = 1;
    return NULL;
}

/* In a thread that is left behind with h if it hangs. */
static dp_status nccl_create(Home *h, dp_err *e)
{
    Group *g = h->g;
    const char *what = g->procs ? "ncclCommInitRank" : "ncclCommInitAll";
    pthread_t t;
    Creation *x = (Creation *)calloc(1, sizeof *x);
    x->h = h;
    if (pthread_create(&t, NULL, create, x))
        return dpg_fail(e, DP_ENOMEM, "%s:%d: thread of %s", __FILE__, __LINE__, what);
    for (double t0 = now_s(); !x->done; usleep(1000)) {
        if (g->aborted)
            return failed(g, h->first, what, e);
        if (now_s() - t0 > CREATE_S)
            return dpg_fail(e, DP_EDEVICE, "%s:%d: %s of %d ranks: no end after %.0f s", __FILE__, __LINE__, what, g->N, CREATE_S);
    }
    pthread_join(t, NULL);
    ncclResult_t r = x->result;
    free(x);
    if (r != ncclSuccess) {
        dpg_fail(e, DP_EDEVICE, "%s:%d: %s of %d ranks: %s", __FILE__, __LINE__, what, g->N, nccl.String(r));
        if (!g->procs)
            home_free(h);
        return DP_EDEVICE;
    }
    g->is_nccl = 1;
    return DP_OK;
}

dp_status dpg_comm_nccl(dpg_comm *c, int N, const int *devices, double limit_s, dp_err *e)
{
    TRY(nccl_load(e));
    Home *h = home_of_all(N, devices, limit_s, "ncclAllGather", e);
    if (!h)
        return e ? e->code : DP_EDEVICE;
    TRY(nccl_create(h, e));
    TRY(home_watch(h, e));
    home_comms(h, c);
    return DP_OK;
}

/* ---- a process a rank ------------------------------------------------------------------------------------------------------------- */

size_t dpg_comm_procs_bytes(void) { return sizeof(Group); }

dp_status dpg_comm_procs_init(void *shared, int N, double limit_s, dp_err *e)
{
    Group *g = (Group *)shared;
    TRY(check_ranks(N, e));
    if ((uintptr_t)shared % 4096)
        return dpg_fail(e, DP_EINPUT, "%s:%d: memory of a communicator must start at a page", __FILE__, __LINE__);
    memset(g, 0, sizeof *g);
    group_init(g, N, limit_s, "ncclAllGather");
    g->procs = g->is_nccl = 1, g->creator = getpid();
    return DP_OK;
}

void dpg_comm_procs_abort(void *shared, const char *why) { group_fail((Group *)shared, "%s", why); }

/* NCCL refuses two ranks of one host on a device: those that would collide are hosts of their own, which talk through sockets. */
static void describe_host(const Group *g, int rank, int ndev)
{
    char host[64];
    snprintf(host, sizeof host, "deltaproof-%ld-%d", (long)g->creator, rank / ndev);
    setenv("NCCL_NVLS_ENABLE", "0", 0);
    setenv("NCCL_HOSTID", host, 1);
    if (g->N > ndev) {
        setenv("NCCL_SOCKET_IFNAME", "lo", 0);
        setenv("NCCL_NET", "Socket", 0);
        setenv("NCCL_MNNVL_ENABLE", "0", 0);
    }
}

static dp_status join_steps(Home *h, int rank, dp_err *e)
{
    Group *g = h->g;
    int ndev = 0;
    void *marks = NULL;
    TRY(nccl_load(e));
    CK(e, cudaGetDeviceCount(&ndev));
    g->device[rank] = rank % (ndev > 0 ? ndev : 1);
    describe_host(g, rank, ndev > 0 ? ndev : 1);
    CK(e, cudaSetDevice(g->device[rank]));
    CK(e, cudaHostRegister((void *)g->marks, sizeof g->marks, cudaHostRegisterPortable | cudaHostRegisterMapped));
    CK(e, cudaHostGetDevicePointer(&marks, (void *)g->marks, 0));
    h->marks = (int *)marks;
    if (rank == 0) {
        ncclResult_t r = nccl.GetUniqueId(&g->id);
        if (r != ncclSuccess)
            return dpg_fail(e, DP_EDEVICE, "%s:%d: rank 0: ncclGetUniqueId: %s", __FILE__, __LINE__, nccl.String(r));
    }
    return meet(g, rank, "ncclCommInitRank", CREATE_S, e);
}

dp_status dpg_comm_procs_join(dpg_comm *c, void *shared, int rank, dp_err *e)
{
    Group *g = (Group *)shared;
    dp_err own = {DP_OK, ""};
    if (rank < 0 || rank >= g->N)
        return dpg_fail(e, DP_EINPUT, "%s:%d: rank %d of %d", __FILE__, __LINE__, rank, g->N);
    Home *h = home_new(g, rank, 1, e);
    if (!h)
        return DP_ENOMEM;
    TRY(home_watch(h, e));
    dp_status st = join_steps(h, rank, &own);
    if (st == DP_OK)
        st = nccl_create(h, &own);
    if (st == DP_OK)
        st = meet(g, rank, "the end of ncclCommInitRank", CREATE_S, &own);
    home_comms(h, c);
    if (st != DP_OK) {                                   /* what is left stays to the end of the process */
        group_fail(g, "rank %d: %s", rank, own.msg);
        return dpg_fail(e, st, "%s", own.msg);
    }
    return st;
}
