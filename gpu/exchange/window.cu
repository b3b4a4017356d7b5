/* gpu/exchange/window.cu - states from rank to rank through windows: memory that the kernels of the
 * rank before store into (dpg_plan_connect).
 *
 * If a sequence starts on a rank, k_compose sends its end state H. Every later rank waits for its
 * initial state, multiplies it by its own M and sends the product to the next rank. Both steps are
 * in k_states (chain/segments.cu), for 32 columns of a head at a time. So the states arrive after
 * as many products and messages as there are ranks before. The products are those of a merge of
 * gathered elements, and only states are sent. No host thread waits for another.
 *
 * A window holds the words of SLOTS forwards, so that a rank may be ahead of its readers. The words
 * of forward n replace those of forward n - SLOTS. Their readers have signalled in k_states of a
 * later forward that they need them no more. Ranks wait for earlier ranks, and for later ones to
 * finish with earlier forwards. A rank that keeps M for its backward waits for later ranks at the
 * very end of its forward. The waits form no cycle, unless one rank's kernels are queued behind
 * another's on one device.
 *
 * The number of a forward is a word of the window. The last block of k_states that reads it
 * increments it. No kernel has it as an argument, so that a forward can be replayed as a CUDA
 * graph. */
#include "plan/paths.cuh"
#include "plan/sending.cuh"
#include "plan/wide.cuh"
#include <stdlib.h>

#define THREADS 256

/* M of the ranks behind, once it has come, to [rank][HV][K][K]. Block: a rank, one head, 32
 * columns. Its forward's states have come. */
__global__ void __launch_bounds__(THREADS)
    k_keep_m(RankWindow w, const volatile int *stop, float *to) {
    int each = w.HV * w.K / 32, i = blockIdx.x / each, part = blockIdx.x % each,
        hv = part / (w.K / 32), sender = w.rank + 1 + i;
    int64_t at = (int64_t)hv * w.K * w.K + part % (w.K / 32) * 32;
    uint32_t n = w.ended();
    if (threadIdx.x == 0) {
        await(w.m_came(w.mine, sender) + part, n, stop);
        __threadfence_system();
    }
    __syncthreads();
    const float *from = w.ms(w.mine, sender, n) + at;
    to += i * w.m + at;
    for (int x = threadIdx.x; x < w.K * 8; x += THREADS)
        *(float4 *)(to + x / 8 * w.K + x % 8 * 4) =
            *(const float4 *)(from + x / 8 * w.K + x % 8 * 4);
}

dp_status window_keep(const Call &c) {
    const dpg_plan *p = c.p;
    const RankWindow &w = p->window;
    if (!p->saved_ms) return DP_OK;
    unsigned grid = (unsigned)p->saved_ms * w.HV * (w.K / 32);
    k_keep_m<<<grid, THREADS, 0, c.s>>>(w, p->marks.stop, saved_rank_m(p, c.t));
    CK_LAUNCH(c.e, "k_keep_m");
    return DP_OK;
}

/* The shape of a rank's window. */
static RankWindow window_of(const dpg_plan *p, int wants_m) {
    const Dims &d = p->d;
    RankWindow w = {};
    w.N = p->N;
    w.rank = p->rank;
    w.HV = d.HV;
    w.K = d.K;
    w.V = d.V;
    w.state = (int64_t)d.HV * d.K * d.V;
    w.m = wants_m ? (int64_t)d.HV * d.K * d.K : 0;
    w.later = p->post;
    w.earlier = wants_m && p->needs_m ? p->pre : 0;
    return w;
}

static dp_status all_meet(dpg_comm *comm, dp_err *e) {
    void **none = (void **)calloc(comm->N, sizeof *none);
    dpg_marks marks;
    dp_status st = comm->exchange(comm, NULL, none, &marks, e);
    free(none);
    return st;
}
/* Where the windows of all ranks lie, to the device. */
static dp_status exchange_windows(dpg_plan *p, RankWindow *w, dpg_comm *comm, dp_err *e) {
    void **at = p->windows_at;
    TRY(comm->exchange(comm, p->window_memory, at, &p->marks, e));
    if (at[0]) {
        CK(e, cudaMemcpy(w->peer, at, w->N * sizeof *at, cudaMemcpyHostToDevice));
        w->mine = (float *)p->window_memory;
        p->opened = comm->close ? comm : NULL;
    }
    /* no rank goes on before all have their tables: a copy could wait for a kernel that waits */
    return all_meet(comm, e);
}

dp_status dpg_plan_connect(dpg_plan *p, dpg_comm *comm, dp_err *e) {
    if (p->wide) p = p->wide->one;
    int windows = p->N > 1 && !p->owned && comm && comm->exchange && !p->heads &&
                  p->opt.path == DPG_PATH_FAST && p->opt.chain_how == DPG_CHAIN_AUGMENTED &&
                  !packed_words(p->opt.payload, 2) && !hands_on(&p->opt, p->sends);
    int wants_m = p->opt.backward && p->opt.send_dh_only;
    if (!windows || p->window_memory) return DP_OK; /* on every rank alike */
    /* M of a later rank on the same stream would come after the wait for it */
    if (wants_m && comm->in_order) return DP_OK;
    RankWindow w = window_of(p, wants_m);
    size_t bytes = 4 * (size_t)w.words();
    CK(e, cudaMalloc(&p->window_memory, bytes));
    CK(e, cudaMemset(p->window_memory, 0, bytes));
    CK(e, cudaMalloc(&p->window.peer, w.N * sizeof *w.peer));
    CK(e, cudaDeviceSynchronize());
    w.peer = p->window.peer;
    p->windows_at = (void **)calloc(w.N, sizeof *p->windows_at);
    dp_status st = exchange_windows(p, &w, comm, e);
    p->window = w;
    return st;
}

void window_destroy(dpg_plan *p) {
    dp_err e = {DP_OK, ""};
    /* else kernels of other ranks may still store into it */
    int ends = !p->marks.stop || !*p->marks.stop;
    if (ends && p->opened) {
        p->opened->close(p->windows_at, p->N, p->rank);
        ends = all_meet(p->opened, &e) == DP_OK;
    }
    if (ends) {
        cudaFree(p->window_memory);
        cudaFree(p->window.peer);
    }
    free(p->windows_at);
}

int dpg_plan_connected(const dpg_plan *p) {
    return (p->wide ? p->wide->one : p)->window.mine != NULL;
}
