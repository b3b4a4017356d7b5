/* gpu/exchange/create.cu - groups of host threads, on devices that they may share or over NCCL
 * (group.cuh). */
#include "exchange/group.cuh"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

Nccl nccl;

void group_init(Group *g, int N, double limit_s, const char *call) {
    pthread_mutexattr_t m;
    pthread_mutexattr_init(&m);
    pthread_mutexattr_setpshared(&m, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&m, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&g->lock, &m);
    for (int r = 0; r < N; r++)
        pthread_mutex_init(&g->alive[r], &m);
    pthread_mutexattr_destroy(&m);
    g->N = g->ranks = N;
    g->limit_s = limit_s;
    const int is_nccl = !strncmp(call, "nccl", 4);
    const char *const calls[KINDS] = {call, is_nccl ? "ncclSend" : "hand",
                                      is_nccl ? "ncclSend to all" : "all_to_all",
                                      "stores into windows", "call of a graph"};
    for (int i = 0; i < KINDS; i++)
        snprintf(g->call[i], sizeof g->call[i], "%s", calls[i]);
}

dp_status check_ranks(int N, dp_err *e) {
    return N >= 1 && N <= MAX_RANKS
               ? DP_OK
               : dpg_fail(e, DP_EINPUT, "%s:%d: communicator of %d ranks", __FILE__, __LINE__, N);
}

Home *home_new(Group *g, int first, int count, dp_err *e) {
    Home *h = g ? (Home *)calloc(1, sizeof *h) : NULL;
    if (!h)
        dpg_fail(e, DP_ENOMEM, "%s:%d: communicator", __FILE__, __LINE__);
    else {
        h->g = g;
        h->first = first;
        h->count = h->users = count;
    }
    return h;
}

dp_status home_counter(Home *h, int rank, dp_err *e) {
    CK(e, cudaMalloc(&h->calls[rank], sizeof(int)));
    CK(e, cudaMemset(h->calls[rank], 0, sizeof(int)));
    CK(e, cudaDeviceSynchronize());
    return DP_OK;
}

/* Counters of all ranks; the current device is the first one's again. */
static dp_status home_counters(Home *h, dp_err *e) {
    const Group *g = h->g;
    for (int r = g->N - 1; r >= 0; r--) {
        CK(e, cudaSetDevice(g->device[r]));
        TRY(home_counter(h, r, e));
    }
    return DP_OK;
}

Home *home_of_all(int N, const int *devices, double limit_s, const char *call, dp_err *e) {
    void *marks = NULL;
    if (check_ranks(N, e) != DP_OK) return NULL;
    Group *g = (Group *)aligned_alloc(4096, sizeof *g);
    if (g) {
        memset(g, 0, sizeof *g);
        group_init(g, N, limit_s, call);
    }
    Home *h = home_new(g, 0, N, e);
    if (!h) return NULL;
    for (int r = 0; r < N; r++)
        g->device[r] = devices[r];
    cudaError_t err = cudaSetDevice(devices[0]);
    if (err == cudaSuccess)
        err = cudaHostAlloc(&marks, (2 * N + 1) * sizeof(int),
                            cudaHostAllocPortable | cudaHostAllocMapped);
    if (err != cudaSuccess) {
        dpg_fail(e, DP_EDEVICE, "%s:%d: marks of %d ranks: %s", __FILE__, __LINE__, N,
                 cudaGetErrorString(err));
        home_free(h);
        return NULL;
    }
    memset(marks, 0, (2 * N + 1) * sizeof(int));
    h->marks = (int *)marks;
    g->pinned = h->marks;
    if (home_counters(h, e) == DP_OK) return h;
    home_free(h);
    return NULL;
}

void home_comms(const Home *h, dpg_comm *c) {
    const Group *g = h->g;
    for (int r = h->first; r < h->first + h->count; r++) {
        dpg_comm x = {(void *)h,
                      g->first_rank + r,
                      g->ranks,
                      g->device[r],
                      0,
                      group_all_gather,
                      group_hand,
                      group_all_to_all,
                      group_wait,
                      group_abort,
                      group_destroy,
                      group_exchange,
                      group_enter,
                      by_rank(g) ? ipc_close : NULL};
        *c++ = x;
    }
}

dp_status dpg_comm_shared(dpg_comm *c, int N, int device, double limit_s, dp_err *e) {
    int devices[MAX_RANKS];
    for (int &d : devices)
        d = device;
    return dpg_comm_devices(c, N, devices, limit_s, e);
}

dp_status dpg_comm_devices(dpg_comm *c, int N, const int *devices, double limit_s, dp_err *e) {
    Home *h = home_of_all(N, devices, limit_s, "all_gather", e);
    if (!h) return e ? e->code : DP_EDEVICE;
    for (int r = 0; r < N; r++) {
        cudaError_t err = cudaSetDevice(devices[r]);
        if (err == cudaSuccess)
            err = cudaEventCreateWithFlags(&h->g->ready[r], cudaEventDisableTiming);
        if (err == cudaSuccess)
            err = cudaEventCreateWithFlags(&h->g->copied[r], cudaEventDisableTiming);
        if (err != cudaSuccess) {
            home_free(h);
            return dpg_fail(e, DP_EDEVICE, "%s:%d: events of %d ranks: %s", __FILE__, __LINE__, N,
                            cudaGetErrorString(err));
        }
    }
    TRY(home_watch(h, e));
    home_comms(h, c);
    return DP_OK;
}

/* ---- NCCL ------------------------------------------------------------------------------------ */

dp_status nccl_load(dp_err *e) {
    static const struct {
        const char *name;
        void **fn;
    } table[] = {{"ncclCommInitAll", (void **)&nccl.InitAll},
                 {"ncclGetUniqueId", (void **)&nccl.GetUniqueId},
                 {"ncclCommInitRank", (void **)&nccl.InitRank},
                 {"ncclAllGather", (void **)&nccl.AllGather},
                 {"ncclSend", (void **)&nccl.Send},
                 {"ncclRecv", (void **)&nccl.Recv},
                 {"ncclGroupStart", (void **)&nccl.GroupStart},
                 {"ncclGroupEnd", (void **)&nccl.GroupEnd},
                 {"ncclCommGetAsyncError", (void **)&nccl.AsyncError},
                 {"ncclCommAbort", (void **)&nccl.Abort},
                 {"ncclCommDestroy", (void **)&nccl.Destroy},
                 {"ncclGetErrorString", (void **)&nccl.String}};
    void *lib = dlopen("libnccl.so.2", RTLD_NOW | RTLD_GLOBAL);
    if (!lib) return dpg_fail(e, DP_EDEVICE, "%s:%d: %s", __FILE__, __LINE__, dlerror());
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (!(*table[i].fn = dlsym(lib, table[i].name)))
            return dpg_fail(e, DP_EDEVICE, "%s:%d: libnccl.so.2 has no %s", __FILE__, __LINE__,
                            table[i].name);
    return DP_OK;
}

typedef struct {
    Home *h;
    ncclResult_t result;
    volatile int done;
} Creation;

static void *create(void *arg) {
    Creation *x = (Creation *)arg;
    Group *g = x->h->g;
    int r = x->h->first;
    if (by_rank(g)) cudaSetDevice(g->device[r]);
    x->result = by_rank(g) ? nccl.InitRank(&g->comm[r], g->ranks, g->id, g->first_rank + r)
                           : nccl.InitAll(g->comm, g->N, g->device);
    __sync_synchronize();
    x->done = 1;
    return NULL;
}

/* In a thread that is left behind with h if it hangs. */
dp_status nccl_create(Home *h, dp_err *e) {
    Group *g = h->g;
    const char *what = by_rank(g) ? "ncclCommInitRank" : "ncclCommInitAll";
    pthread_t t;
    Creation *x = (Creation *)calloc(1, sizeof *x);
    x->h = h;
    if (pthread_create(&t, NULL, create, x))
        return dpg_fail(e, DP_ENOMEM, "%s:%d: thread of %s", __FILE__, __LINE__, what);
    for (double t0 = now_s(); !x->done; usleep(1000)) {
        if (g->aborted) return failed(g, h->first, what, e);
        if (now_s() - t0 > CREATE_S)
            return dpg_fail(e, DP_EDEVICE, "%s:%d: %s of %d ranks: no end after %.0f s", __FILE__,
                            __LINE__, what, g->ranks, CREATE_S);
    }
    pthread_join(t, NULL);
    ncclResult_t r = x->result;
    free(x);
    if (r != ncclSuccess) {
        dpg_fail(e, DP_EDEVICE, "%s:%d: %s of %d ranks: %s", __FILE__, __LINE__, what, g->ranks,
                 nccl.String(r));
        if (!g->procs) home_free(h);
        return DP_EDEVICE;
    }
    g->is_nccl = 1;
    return DP_OK;
}

dp_status dpg_comm_nccl(dpg_comm *c, int N, const int *devices, double limit_s, dp_err *e) {
    TRY(nccl_load(e));
    Home *h = home_of_all(N, devices, limit_s, "ncclAllGather", e);
    if (!h) return e ? e->code : DP_EDEVICE;
    TRY(nccl_create(h, e));
    TRY(home_watch(h, e));
    home_comms(h, c);
    return DP_OK;
}
