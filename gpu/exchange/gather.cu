/* gpu/exchange/gather.cu - the calls of a communicator (group.cuh): gather, `hand`, all-to-all,
 * wait, peer memory. */
#include "exchange/group.cuh"
#include "fault.cuh"
#include "plan/marks.cuh"
#include <stdio.h>
#include <unistd.h>

__global__ void k_mark(dpg_marks m, int begins) { begins ? begin_call(m) : end_call(m); }

/* Is what is enqueued on a stream kept for a CUDA graph. */
static int is_captured(cudaStream_t s) {
    cudaStreamCaptureStatus st = cudaStreamCaptureStatusNone;
    return cudaStreamIsCapturing(s, &st) == cudaSuccess && st == cudaStreamCaptureStatusActive;
}

/* ---- gather, states to a neighbour, all-to-all ----------------------------------------------- */

#define CN(e, expr)                                                                      \
    do {                                                                                 \
        ncclResult_t r_ = (expr);                                                        \
        if (r_ != ncclSuccess)                                                           \
            return dpg_fail(e, DP_EDEVICE, "%s:%d: rank %d: %s: %s", __FILE__, __LINE__, \
                            g->first_rank + rank, #expr, nccl.String(r_));               \
    } while (0)

/* Words of a call: of `hand` to rank + by, from rank - by; of an all-to-all the pieces of both
 * sides. */
struct Words {
    int kind;
    const float *send;
    float *recv;
    size_t count;
    int by;
    const dpg_piece *gives, *gets;
};

static dp_status gather_words(Group *g, int rank, const Words &w, cudaStream_t s, dp_err *e) {
    if (g->is_nccl) CN(e, nccl.AllGather(w.send, w.recv, w.count, ncclFloat, g->comm[rank], s));
    for (int r = 0; r < g->N && !g->is_nccl; r++) {
        CK(e, cudaStreamWaitEvent(s, g->ready[r], 0));
        int slot = FAULT(GATHER_SLOT) && rank == 1 && r < 2 ? 1 - r : r;
        CK(e, cudaMemcpyAsync(w.recv + slot * w.count, g->send[r], w.count * sizeof(float),
                              cudaMemcpyDeviceToDevice, s));
    }
    return DP_OK;
}

static dp_status hand_by_nccl(Group *g, int rank, const Words &w, cudaStream_t s, dp_err *e) {
    const int here = g->first_rank + rank;
    CN(e, nccl.GroupStart());
    if (w.send) CN(e, nccl.Send(w.send, w.count, ncclFloat, here + w.by, g->comm[rank], s));
    if (w.recv) CN(e, nccl.Recv(w.recv, w.count, ncclFloat, here - w.by, g->comm[rank], s));
    CN(e, nccl.GroupEnd());
    return DP_OK;
}

static dp_status hand_words(Group *g, int rank, const Words &w, cudaStream_t s, dp_err *e) {
    const int from = rank - w.by;
    if (g->is_nccl) return w.send || w.recv ? hand_by_nccl(g, rank, w, s, e) : DP_OK;
    if (!w.recv) return DP_OK;
    if (!g->send[from])
        return dpg_fail(e, DP_EINPUT, "%s:%d: rank %d is to get words that rank %d does not give",
                        __FILE__, __LINE__, rank, from);
    CK(e, cudaStreamWaitEvent(s, g->ready[from], 0));
    CK(e, cudaMemcpyAsync(w.recv, g->send[from], w.count * sizeof(float), cudaMemcpyDeviceToDevice,
                          s));
    return DP_OK;
}

static dp_status copy(const Words &w, size_t to, const float *from, size_t n, cudaStream_t s,
                      dp_err *e) {
    if (n)
        CK(e, cudaMemcpyAsync(w.recv + to, from, n * sizeof(float), cudaMemcpyDeviceToDevice, s));
    return DP_OK;
}

static dp_status give_all_by_nccl(Group *g, int rank, const Words &w, cudaStream_t s, dp_err *e) {
    const int here = g->first_rank + rank;
    CN(e, nccl.GroupStart());
    for (int r = 0; r < g->ranks; r++) {
        const dpg_piece out = w.gives[r], in = w.gets[r];
        if (r != here && out.n)
            CN(e, nccl.Send(w.send + out.at, out.n, ncclFloat, r, g->comm[rank], s));
        if (r != here && in.n)
            CN(e, nccl.Recv(w.recv + in.at, in.n, ncclFloat, r, g->comm[rank], s));
    }
    CN(e, nccl.GroupEnd());
    return copy(w, w.gets[here].at, w.send + w.gives[here].at, w.gets[here].n, s, e);
}

static dp_status give_all(Group *g, int rank, const Words &w, cudaStream_t s, dp_err *e) {
    if (g->is_nccl) return give_all_by_nccl(g, rank, w, s, e);
    for (int r = 0; r < g->N; r++) {
        const dpg_piece from = g->gives[r][rank], to = w.gets[r];
        if (from.n != to.n)
            return dpg_fail(e, DP_EINPUT,
                            "%s:%d: rank %d is to get %zu words, of which rank %d gives %zu",
                            __FILE__, __LINE__, rank, to.n, r, from.n);
        CK(e, cudaStreamWaitEvent(s, g->ready[r], 0));
        TRY(copy(w, to.at, g->send[r] + from.at, to.n, s, e));
    }
    return DP_OK;
}

/* Is `other` a rank, where that matters. */
static int is_there(const Group *g, const void *words, int other) {
    return !words || (other >= 0 && other < g->ranks);
}

static dp_status check_words(const Group *g, int rank, const Words &w, dp_err *e) {
    const int here = g->first_rank + rank;
    if (w.kind != HANDS) return DP_OK;
    if (is_there(g, w.send, here + w.by) && is_there(g, w.recv, here - w.by)) return DP_OK;
    return dpg_fail(e, DP_EINPUT, "%s:%d: rank %d hands over by %d, among %d ranks", __FILE__,
                    __LINE__, here, w.by, g->ranks);
}

/* Behind the meeting of all: what this rank is to get. */
static dp_status get_words(Group *g, int rank, const Words &w, cudaStream_t s, dp_err *e) {
    if (w.kind == HANDS) return hand_words(g, rank, w, s, e);
    if (w.kind == ALL_TO_ALLS) return give_all(g, rank, w, s, e);
    return gather_words(g, rank, w, s, e);
}

/* No rank begins to read once the group has failed (leave). */
static dp_status get_or_stop(Group *g, int rank, const Words &w, cudaStream_t s, dp_err *e) {
    __atomic_add_fetch(&g->reading, 1, __ATOMIC_SEQ_CST);
    dp_status st = g->aborted ? failed(g, rank, g->call[w.kind], e) : get_words(g, rank, w, s, e);
    __atomic_sub_fetch(&g->reading, 1, __ATOMIC_SEQ_CST);
    return st;
}

/* Nobody overwrites words that a peer still copies. */
static dp_status wait_for_copies(Group *g, int rank, const Words &w, cudaStream_t s, dp_err *e) {
    for (int r = 0; r < g->N && !g->is_nccl; r++)
        if (w.kind != HANDS || (w.send && r == rank + w.by))
            CK(e, cudaStreamWaitEvent(s, g->copied[r], 0));
    return DP_OK;
}

static dp_status mark(const Home *h, int rank, int begins, cudaStream_t s, dp_err *e) {
    k_mark<<<1, 1, 0, s>>>(marks_of(h, rank), begins);
    CK_LAUNCH(e, "k_mark");
    return DP_OK;
}

static dp_status move_words(Home *h, int rank, const Words &w, cudaStream_t s, dp_err *e) {
    Group *g = h->g;
    const int captured = is_captured(s);
    if (captured && !g->is_nccl)
        return dpg_fail(e, DP_EINPUT,
                        "%s:%d: rank %d: a graph holds no %s of host threads, which copy what the "
                        "streams of others have ready; NCCL's it may hold, and windows",
                        __FILE__, __LINE__, rank, g->call[w.kind]);
    const int n = captured ? begun(g, rank) + 1 : next_call(g, rank, w.kind);
    char call[64];
    snprintf(call, sizeof call, "%s %d", g->call[w.kind], n);
    TRY(check_words(g, rank, w, e));
    TRY(mark(h, rank, 1, s, e));
    if (!g->is_nccl) CK(e, cudaEventRecord(g->ready[rank], s));
    g->send[rank] = w.send;
    g->gives[rank] = w.gives;
    TRY(meet(g, rank, call, g->limit_s, e));
    if (!captured) g->entered[rank] = n;
    TRY((g->is_nccl ? get_words : get_or_stop)(g, rank, w, s, e));
    if (!g->is_nccl) CK(e, cudaEventRecord(g->copied[rank], s));
    TRY(mark(h, rank, 0, s, e));
    TRY(meet(g, rank, call, g->limit_s, e));
    return wait_for_copies(g, rank, w, s, e);
}

/* From a call that failed: what this rank points to is gone behind it. */
static void leave(const Group *g) {
    Patience patience = {g->limit_s};
    while (__atomic_load_n(&g->reading, __ATOMIC_SEQ_CST) && !patience.is_over())
        usleep(50);
}

/* Where it fails, all end with its reason. */
static dp_status move_or_fail(dpg_comm *c, const Words &w, void *stream, dp_err *e) {
    Home *h = (Home *)c->self;
    Group *g = h->g;
    const int rank = place_of(g, c);
    dp_err own = {DP_OK, ""};
    dp_status st = g->aborted ? failed(g, rank, g->call[w.kind], &own)
                              : move_words(h, rank, w, (cudaStream_t)stream, &own);
    if (st != DP_OK) {
        group_fail(g, "%s", own.msg);
        dpg_fail(e, st, "%s", own.msg);
        leave(g);
    }
    return st;
}

dp_status group_all_gather(dpg_comm *c, const float *send, float *recv, size_t count, void *stream,
                           dp_err *e) {
    return move_or_fail(c, Words{GATHERS, send, recv, count}, stream, e);
}

dp_status group_all_to_all(dpg_comm *c, const float *send, const dpg_piece *gives, float *recv,
                           const dpg_piece *gets, void *stream, dp_err *e) {
    return move_or_fail(c, Words{ALL_TO_ALLS, send, recv, 0, 0, gives, gets}, stream, e);
}

dp_status group_hand(dpg_comm *c, const float *send, float *recv, size_t count, int by,
                     void *stream, dp_err *e) {
    if (!by)
        return dpg_fail(e, DP_EINPUT, "%s:%d: rank %d hands over to itself", __FILE__, __LINE__,
                        c->rank);
    return move_or_fail(c, Words{HANDS, send, recv, count, by}, stream, e);
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
    for (int r = 0; r < g->N; r++)
        if (!reaches(g, rank, r) || (r != rank && g->device[r] == g->device[rank] && !in_order))
            g->apart = 1; /* |= could lose what another rank has written */
    TRY(meet(g, rank, "exchange", g->limit_s, e));
    for (int r = 0; r < g->N; r++)
        at[r] = g->apart ? NULL : g->mine[r];
    return meet(g, rank, "exchange", g->limit_s, e);
}

dp_status group_exchange(dpg_comm *c, void *mine, void **at, dpg_marks *m, dp_err *e) {
    const Home *h = (Home *)c->self;
    Group *g = h->g;
    dp_err own = {DP_OK, ""};
    dp_status st = g->aborted   ? failed(g, place_of(g, c), "exchange", &own)
                   : by_rank(g) ? ipc_exchange(c, mine, at, &own)
                                : exchange_steps(g, place_of(g, c), c->in_order, mine, at, &own);
    if (st != DP_OK) {
        group_fail(g, "%s", own.msg);
        dpg_fail(e, st, "%s", own.msg);
    }
    if (st == DP_OK && at[0]) *m = marks_of(h, place_of(g, c));
    return st;
}

dp_status group_enter(dpg_comm *c, void *stream, dp_err *e) {
    Group *g = ((Home *)c->self)->g;
    const int rank = place_of(g, c);
    if (g->aborted) return failed(g, rank, g->call[STORES], e);
    if (!is_captured((cudaStream_t)stream)) g->entered[rank] = next_call(g, rank, STORES);
    return DP_OK;
}

/* ---- wait ------------------------------------------------------------------------------------ */

static dp_status wait_steps(Group *g, int rank, cudaStream_t s, dp_err *e) {
    ncclResult_t async = ncclSuccess;
    cudaError_t err;
    Patience patience = {g->limit_s};
    for (; (err = cudaStreamQuery(s)) == cudaErrorNotReady && !g->aborted; usleep(50))
        if (patience.is_over()) {
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
