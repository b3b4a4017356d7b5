/* gpu/exchange/group.cuh - common data of the communicators: the group of all ranks, and the ranks
 * of one process.
 *
 *   group.cu    failures, barriers of hosts, the watcher that ends all ranks, the end of a group
 *   gather.cu   gather, `hand`, wait, peer memory
 *   create.cu   host threads on devices that they may share, or over NCCL
 *   procs.cu    a process a rank over NCCL, on one host
 *   ipc.cu      peer memory of processes
 *   apart.cu    a process a rank over NCCL, on any hosts
 *
 * All ranks make the same calls in the same order. A call has a mark on the stream, a barrier of
 * all hosts, the transfer, a second mark, and a second barrier. So no collective is enqueued before
 * every rank has reached it. No rank continues to a call that may wait for a device (the first
 * launch of a kernel does) before all have enqueued theirs.
 *
 * Messages name a missing rank. The barrier shows a missing host thread. Marks in pinned memory,
 * which the stream writes, show a hanging device. A lock that its watcher held shows a killed
 * process. A watcher thread, which makes no call that waits for a device, ends all ranks. Peers see
 * `aborted` at every poll. ncclCommAbort ends NCCL's kernels; each such call has a thread of its
 * own, which is abandoned if it hangs. No host thread waits without a limit.
 *
 * A CUDA graph makes its calls without a host. Its marks show that a device has reached them, not
 * that a host should have. A graph can only contain calls of NCCL and transfers through windows.
 *
 * Shared devices: a call publishes the send pointer with an event and copies the words of all
 * ranks, or of one. A second event per rank, waited for after the second barrier, keeps a sender
 * from overwriting words that a peer still copies. A failing call returns when no rank reads the
 * buffers of another any more, so that its caller may free them. */
#ifndef DPG_GROUP_CUH
#define DPG_GROUP_CUH
#include "exchange/nccl.cuh"
#include "plan/status.cuh"
#include <math.h>
#include <pthread.h>
#include <sys/types.h>
#include <time.h>

#define MAX_RANKS 1024
#define MAX_DEVICES 64 /* of a process */
#define CREATE_S 30.0  /* the creation of an NCCL communicator; seconds */
#define RECLAIM_S 2.0  /* its destruction or abortion */
#define LOOK_S 0.1     /* longest time between two polls of a waiting thread */

/* Seconds of a clock that never goes back. */
static inline double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

/* The limit of a thread that polls. A longer time without polls counts as LOOK_S: the machine was
 * suspended or busy, and the other ranks stood still, too. */
struct Patience {
    double left, looked = now_s();
    int is_over(void) {
        const double now = now_s();
        left -= fmin(now - looked, LOOK_S);
        looked = now;
        return left <= 0;
    }
};

enum { GATHERS, HANDS, ALL_TO_ALLS, STORES, REPLAYS, KINDS, CALLS = 1024 };

/* State that all ranks see. Ranks that are processes have it in shared memory, arrays of a single
 * rank's use included. */
typedef struct {
    int N, is_nccl, device[MAX_RANKS];
    /* A group whose other ranks are reached by NCCL alone has N = 1: number of its rank, and of all
     * ranks. Else 0 and N. */
    int first_rank, ranks;
    char call[KINDS][32]; /* names of calls in messages */
    double limit_s;
    volatile int aborted;
    char why[256]; /* valid once aborted is set */
    pthread_mutex_t lock;
    int64_t met[MAX_RANKS]; /* number of barriers that a rank has reached */
    /* changes when all have arrived, or aborted is set; earlier ranks wait for it */
    int bell;
    /* gathers, sends, or transfers through windows, that the host of a rank has begun */
    volatile int entered[MAX_RANKS];
    volatile char kind[CALLS];         /* of call n at n % CALLS: the same on all ranks */
    void *mine[MAX_RANKS];             /* exchange */
    volatile int apart;                /* some devices do not reach each other */
    volatile int *pinned;              /* threads: marks in pinned memory */
    const float *send[MAX_RANKS];      /* shared; of `hand` NULL: it sends nothing */
    const dpg_piece *gives[MAX_RANKS]; /* shared: of an all-to-all, [N] */
    int reading;                       /* shared: number of ranks that read buffers of others */
    /* shared: send buffer filled; all peers' words copied by rank i */
    cudaEvent_t ready[MAX_RANKS], copied[MAX_RANKS];
    ncclComm_t comm[MAX_RANKS];
    /* processes */
    int procs;
    pid_t creator;
    ncclUniqueId id;
    pthread_mutex_t alive[MAX_RANKS]; /* held by the watcher of a rank while watched[rank] */
    volatile char watched[MAX_RANKS];
    volatile double beat[MAX_RANKS]; /* time of its last poll */
    /* whole pages, which every process registers; no pointers: each may map them elsewhere */
    alignas(4096) volatile int marks[2 * MAX_RANKS + 1];
} Group;

/* [N] Number of gathers that the stream of a rank has reached, and has completed. */
static inline volatile int *reached(const Group *g) {
    return g->procs ? (volatile int *)g->marks : g->pinned;
}
static inline volatile int *ended(const Group *g) { return reached(g) + g->N; }
/* Tells kernels that wait for each other to end. */
static inline volatile int *halt(const Group *g) { return ended(g) + g->N; }
/* Are there ranks outside of this group's memory? */
static inline int is_apart(const Group *g) { return g->ranks != g->N; }
/* Is each rank a process? */
static inline int by_rank(const Group *g) { return g->procs || is_apart(g); }
/* The last known call of a rank, by its host or its stream: a CUDA graph makes calls without a
 * host. */
static inline int begun(const Group *g, int rank) {
    int n = reached(g)[rank];
    return n > g->entered[rank] ? n : g->entered[rank];
}
/* Index of a communicator's rank in the arrays. */
static inline int place_of(const Group *g, const dpg_comm *c) { return c->rank - g->first_rank; }
/* Stores the kind of call n, for messages. */
static inline void note_call(Group *g, int n, int kind) { g->kind[n % CALLS] = (char)kind; }
/* The number of the next call of a rank's host. */
static inline int next_call(Group *g, int rank, int kind) {
    const int n = begun(g, rank) + 1, last = g->entered[rank];
    for (int i = n - last > CALLS ? n - CALLS : last + 1; i < n; i++)
        note_call(g, i, REPLAYS);
    note_call(g, n, kind);
    return n;
}
static inline const char *call_of(const Group *g, int n) {
    int noted = 0; /* else no host has made it */
    for (int r = 0; r < g->N; r++)
        noted |= n <= g->entered[r];
    return g->call[noted ? (int)g->kind[n % CALLS] : REPLAYS];
}

/* The ranks of one process: all, or one. */
typedef struct {
    Group *g;
    int first, count, users, watched;
    volatile int stop, reclaimed;
    pthread_t watcher;
    int *marks;            /* of the group, device pointer; processes: NULL until registered */
    int *calls[MAX_RANKS]; /* on the device of a rank: calls that its stream has reached */
} Home;

/* The marks of a rank's stream. */
static inline dpg_marks marks_of(const Home *h, int rank) {
    return dpg_marks{h->marks + rank, h->marks + h->g->N + rank, h->marks + 2 * h->g->N,
                     h->calls[rank]};
}

/* group.cu. The first reason of a failure stays. */
void group_fail(Group *g, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
dp_status failed(const Group *g, int rank, const char *call, dp_err *e);
void fail_slow_gather(Group *g);
dp_status meet(Group *g, int rank, const char *call, double limit_s, dp_err *e);
void group_abort(dpg_comm *c, const char *why);
void group_destroy(dpg_comm *c);
void home_free(Home *h); /* by the last rank of a process, or for a group that did not come about */
dp_status home_watch(Home *h, dp_err *e);

/* gather.cu: the calls of a dpg_comm. */
dp_status group_all_gather(dpg_comm *c, const float *send, float *recv, size_t count, void *stream,
                           dp_err *e);
dp_status group_hand(dpg_comm *c, const float *send, float *recv, size_t count, int by,
                     void *stream, dp_err *e);
dp_status group_all_to_all(dpg_comm *c, const float *send, const dpg_piece *gives, float *recv,
                           const dpg_piece *gets, void *stream, dp_err *e);
dp_status group_wait(dpg_comm *c, void *stream, dp_err *e);
dp_status group_exchange(dpg_comm *c, void *mine, void **at, dpg_marks *m, dp_err *e);
dp_status group_enter(dpg_comm *c, void *stream, dp_err *e);

/* ipc.cu: exchange of a dpg_comm whose ranks are processes, and the end of what it opened; at[rank]
 * is the rank's own. */
dp_status ipc_exchange(dpg_comm *c, void *mine, void **at, dp_err *e);
void ipc_close(void **at, int N, int rank);

/* create.cu */
void group_init(Group *g, int N, double limit_s, const char *call);
dp_status check_ranks(int N, dp_err *e);
Home *home_new(Group *g, int first, int count, dp_err *e);
/* The word in which a rank's stream counts its calls, on the current device. */
dp_status home_counter(Home *h, int rank, dp_err *e);
/* All ranks of the group in this process. */
Home *home_of_all(int N, const int *devices, double limit_s, const char *call, dp_err *e);
void home_comms(const Home *h, dpg_comm *c);
dp_status nccl_load(dp_err *e);
dp_status nccl_create(Home *h, dp_err *e);
#endif
