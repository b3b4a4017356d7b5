/* gpu/chain/segments.cu - elements (M, H) of a rank's segments (augmented chain, K and V in {64,
 * 128}). They are composed to the rank's and merged over ranks; then come the states that segments
 * start from.
 *
 * Phases of a block, 32 columns of a head, and what shared memory holds:
 *
 *   await     with windows: states of the rank before                   nothing
 *   put       a state, or columns of an element, split in (hi, lo)      P
 *             (k_compose: neither, nor a product, where M is gone)
 *   product   M P + add; M straight to registers                        P
 *   store     to memory, or (push) by rows to other ranks' windows      the block's words in order:
 *                                                                       in P's place (k_compose),
 *                                                                       behind it (k_states) */
#include "chain/chain.cuh"
#include "chain/panel.cuh"
#include "plan/marks.cuh"
#include "plan/paths.cuh"
#include "plan/sending.cuh"
#include "plan/shared.cuh"

struct SegArgs {
    const float *seg, *hm; /* elements of this rank's segments; of the ranks */
    /* elements of the segments up to i, i >= 1, of all of them; initial states */
    float *pre, *own, *sin;
    const float *came; /* the rank's state, where it was handed over; else NULL */
    const int *reach;  /* of segments */
    const Seq *seq;    /* of all segments */
    const Cut *cut;
    int HV, V, whole, is_last; /* is_last: nobody asks for the element of all segments */
    int from, to, groups;      /* ranks [from, to) precede */
    RankWindow w;              /* states come by it, or merges are made of gathered elements */
    dpg_marks marks;
    /* w: the state goes on to the next rank; M of so many later ranks lie in the window */
    int pass, kept;
};

/* Stores a block's K x 32 words from a tile in shared memory into the windows of ranks [first,
 * last]. Each row of ld words gets 128 bytes. Then stores the forward's number. The arguments `to`
 * and `number` return the places in a rank's window. */
template <int K, class To, class Number>
__device__ __forceinline__ void push(const RankWindow &w, int first, int last, float *tile,
                                     Panel<K> &p, const float c[4][4], int ld, uint32_t n, To to,
                                     Number number) {
    const int LD = 36;
    __syncthreads();
    p.store(c, tile, LD);
    __syncthreads();
    for (int r = first; r <= last; r++)
        for (int x = threadIdx.x; x < K * 8; x += 2 * K)
            *(float4 *)(to(w.peer[r]) + (int64_t)(x / 8) * ld + x % 8 * 4) =
                *(const float4 *)(tile + x / 8 * LD + x % 8 * 4);
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system();
        for (int r = first; r <= last; r++)
            *(volatile uint32_t *)number(w.peer[r]) = n;
    }
}

/* States into the window of the next rank. */
template <int K>
__device__ __forceinline__ void push_state(const RankWindow &w, float *tile, Panel<K> &p,
                                           const float c[4][4], int hv, int c0, uint32_t n) {
    push<K>(
        w, w.rank + 1, w.rank + 1, tile, p, c, w.V, n,
        [&](float *x) { return w.s(x, n) + (int64_t)hv * K * w.V + c0; },
        [&](float *x) { return w.s_came(x) + (hv * w.V + c0) / 32; });
}

/* A cut: the element of segments 0 .. i, for i = 1 .. steps, where the states of the segments need
 * it. The last is that of all of them, the rank's element. Block: a cut, one head, 32 columns; of H
 * alone if the segments start from H_0 alone. With windows H goes to the next rank, and M to the
 * earlier ones that keep it for their backward. */
template <int K> __global__ void __launch_bounds__(2 * K, 2) k_compose(SegArgs a) {
    __shared__ float4 P[K / 2 * Panel<K>::PITCH];
    int V = a.V, row = V + K, blocks = (a.whole ? V : row) / 32, hv = blockIdx.x / blocks % a.HV,
        c0 = blockIdx.x % blocks * 32;
    Cut cut = a.cut[blockIdx.x / blocks / a.HV];
    int steps = cut.n - 1 - a.is_last;
    auto at = [&](int i) { return ((int64_t)(cut.first + i) * a.HV + hv) * K * row; };
    Panel<K> p(P, row);
    float c[4][4];
    if (steps > 0) p.begin(a.seg + at(1) + V);
    p.load(c, a.seg + at(0) + c0, row);
    for (int i = 1; i <= steps; i++) {
        const float *h = c0 < V ? a.seg + at(i) + c0 : NULL;
        const float *next = i < steps ? a.seg + at(i + 1) + V : NULL;
        const int part = cut.first + i;
        if (is_gone(a.reach, HALVES_OF_M, part, a.HV, hv, a.seq[part]) && p.is_finite(c)) {
            p.only(c, h);
            if (next) p.begin(next);
        } else {
            p.put(c);
            p.product(c, a.seg + at(i) + V, h, next);
        }
        p.store(c, (i < cut.n - 1 ? a.pre + at(i) : a.own + (int64_t)hv * K * row) + c0, row);
    }
    if (!a.w.mine || a.is_last) return;
    uint32_t n = a.w.ended() + 1;
    if (a.whole && c0 < V && a.w.later) {
        if (threadIdx.x == 0) await(a.w.used(a.w.mine, a.w.rank + 1), n - SLOTS, a.marks.stop);
        push_state<K>(a.w, (float *)P, p, c, hv, c0, n);
    } else if (c0 >= V && a.w.earlier) {
        for (int r = a.w.rank - a.w.earlier + (int)threadIdx.x; r < a.w.rank; r += 2 * K)
            await(a.w.used(a.w.mine, r), n - SLOTS, a.marks.stop);
        push<K>(
            a.w, a.w.rank - a.w.earlier, a.w.rank - 1, (float *)P, p, c, K, n,
            [&](float *x) { return a.w.ms(x, a.w.rank, n) + (int64_t)hv * K * K + c0 - V; },
            [&](float *x) { return a.w.m_came(x, a.w.rank) + (hv * K + c0 - V) / 32; });
    }
}

/* With windows: until the rank's states have come; readers and writers of the watcher's marks and
 * of `used`. Returns the number of the forward. */
template <int K> __device__ __forceinline__ uint32_t receive(const SegArgs &a, int hv, int c0) {
    const RankWindow &w = a.w;
    const bool marks = blockIdx.x == 0 && threadIdx.x == 0;
    const uint32_t n = w.ended() + 1;
    if (blockIdx.x == 0) {
        if (marks) begin_call(a.marks);
        for (int r = w.rank - 1 + (int)threadIdx.x; r <= w.rank + a.kept; r += 2 * K)
            if (r != w.rank && (r > w.rank || a.from < a.to))
                *(volatile uint32_t *)w.used(w.peer[r], w.rank) = n - 1;
    }
    if (threadIdx.x == 0 && a.from < a.to)
        await(w.s_came(w.mine) + (hv * w.V + c0) / 32, n, a.marks.stop);
    if (threadIdx.x == 32 && a.pass) await(w.used(w.mine, w.rank + 1), n - SLOTS, a.marks.stop);
    __threadfence_system();
    __syncthreads();
    if (marks) end_call(a.marks);
    if (threadIdx.x == 64) w.end(n);
    return n;
}

/* S = S_in: for ranks from .. to-1, farthest first, S <- M_j S + H_j; with windows it comes, and M
 * S + H of the rank goes on. The initial state of segment 0 is S, of segment i > 0 M S + H with the
 * element of segments 0 .. i-1. Block: a cut, one head, 32 columns, every groups-th segment. */
template <int K> __global__ void __launch_bounds__(2 * K, 2) k_states(SegArgs a) {
    extern __shared__ float smem[];
    float4 *P = (float4 *)smem;
    float *tile = smem + K / 2 * Panel<K>::PITCH * 4;
    int V = a.V, row = V + K, hv = blockIdx.x / a.groups / (V / 32) % a.HV,
        c0 = blockIdx.x / a.groups % (V / 32) * 32, first = blockIdx.x % a.groups;
    Cut cut = a.cut[blockIdx.x / a.groups / (V / 32) / a.HV];
    auto at = [&](int i) { return (int64_t)(cut.first + i) * a.HV + hv; };
    auto rank = [&](int j) {
        return a.hm + ((int64_t)(FAULT(MERGE_NEAREST) ? a.to - 1 - (j - a.from) : j) * a.HV + hv) *
                          K * row;
    };
    auto before = [&](int i) { return (i == 1 ? a.seg : a.pre) + at(i - 1) * K * row; };
    auto out = [&](int i) { return a.sin + at(i) * K * V + c0; };
    int start = first ? first : a.groups, pass = a.pass && !first,
        merges = a.w.mine ? 0 : max(a.to - a.from - 1, 0);
    int n = merges + pass + (a.whole || start >= cut.n ? 0 : (cut.n - 1 - start) / a.groups + 1);
    auto segment = [&](int j) { return start + (j - merges - pass) * a.groups; };
    auto element = [&](int j) {
        return j < merges          ? rank(a.from + 1 + j)
               : j < merges + pass ? a.own + (int64_t)hv * K * row
                                   : before(segment(j));
    };
    Panel<K> p(P, row);
    float c[4][4] = {};
    if (n) p.begin(element(0) + V);
    uint32_t forward = a.w.mine ? receive<K>(a, hv, c0) : 0;
    if (a.from < a.to && a.w.mine)
        p.load(c, a.w.s(a.w.mine, forward) + (int64_t)hv * K * V + c0, V);
    else if (a.from < a.to)
        p.load(c, rank(a.from) + c0, row);
    else if (a.came)
        p.load(c, a.came + (int64_t)hv * K * V + c0, V);
    for (int j = 0; j <= n; j++) {
        int is_own = j == merges && !first && !a.came; /* not what is there already */
        if (is_own && !(FAULT(MERGE_HALF) && c0 >= V / 2)) p.store(c, out(0), V);
        if (j == n) break;
        if (j <= merges) p.put(c);
        p.product(c, element(j) + V, element(j) + c0, j + 1 < n ? element(j + 1) + V : NULL);
        if (j >= merges + pass)
            p.store(c, out(segment(j)), V);
        else if (j >= merges)
            push_state<K>(a.w, tile, p, c, hv, c0, forward);
    }
    for (int i = start; a.whole && i < cut.n; i += a.groups) {
        p.load(c, before(i) + c0, row);
        p.store(c, out(i), V);
    }
}

static SegArgs seg_args(const Call &c) {
    const dpg_plan *p = c.p;
    const Dims &d = p->d;
    SegArgs a = {};
    a.reach = reaches(p, c.ws);
    a.seq = d.seq + p->nwhole;
    a.cut = p->cuts;
    a.seg = at<float>(c, p->nseg > 1 ? B_SEG : B_HM);
    a.hm = at<float>(c, B_HMALL);
    a.pre = at<float>(c, B_PREFIX);
    a.own = at<float>(c, B_HM);
    a.sin = at<float>(c, B_SIN);
    a.HV = d.HV;
    a.V = d.V;
    a.is_last = p->is_last;
    a.whole = p->whole;
    int hands = hands_on(&p->opt, p->sends);
    a.to = p->rank;
    a.from = hands ? a.to : a.to - p->pre;
    if (hands && !p->is_first) a.came = a.sin;
    a.w = p->window;
    a.marks = p->marks;
    a.pass = p->window.mine && p->post && !p->whole;
    a.kept = (int)p->saved_ms;
    a.groups = 1;
    int blocks = a.w.mine ? 256 : 128;
    while (a.groups < 4 && a.groups < p->nseg && p->ncut * d.HV * (d.V / 32) * a.groups < blocks)
        a.groups *= 2;
    return a;
}

dp_status chain_compose(const Call &c) {
    const Dims &d = c.p->d;
    if (c.p->N == 1) return DP_OK; /* pre_own.cu has made the states */
    SegArgs a = seg_args(c);
    unsigned grid = (unsigned)c.p->ncut * d.HV * ((d.V + (a.whole ? 0 : d.K)) / 32);
    int most = 0;
    for (int i = 0; i < c.p->ncut; i++)
        most = c.p->cuts_h[i].n > most ? c.p->cuts_h[i].n : most;
    if (most - 1 - a.is_last < (a.w.mine && !c.p->is_last ? 0 : 1)) return DP_OK;
    if (d.K == 64)
        k_compose<64><<<grid, 128, 0, c.s>>>(a);
    else
        k_compose<128><<<grid, 256, 0, c.s>>>(a);
    CK_LAUNCH(c.e, "k_compose");
    return DP_OK;
}

dp_status chain_merge(const Call &c) {
    const Dims &d = c.p->d;
    if (c.p->opt.chain_how == DPG_CHAIN_DENSE) return merge_elements(c);
    if (c.p->N == 1) return DP_OK;
    SegArgs a = seg_args(c);
    unsigned grid = (unsigned)c.p->ncut * d.HV * (d.V / 32) * a.groups;
    int bytes = d.K / 2 * Panel<64>::PITCH * 16 + d.K * 36 * 4;
    auto kernel = d.K == 64 ? k_states<64> : k_states<128>;
    CK(c.e, allow_shared(kernel, bytes));
    kernel<<<grid, 2 * d.K, bytes, c.s>>>(a);
    CK_LAUNCH(c.e, "k_states");
    return DP_OK;
}
