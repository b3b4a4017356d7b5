/* gpu/fast/chunks.cu - a chunk of one value head with a gate a channel. It computes gate, norms,
 * k k' and q k' with decay and T = (I + A)^-1, and stores w u kg qg Aqk. A plan without w and u
 * (`bare.cuh`) stores Kgam kg qg T B Aqk (k_decayed).
 *
 * One block of 8 warps a tile, 3 blocks a multiprocessor of 80 registers a thread. A lane's inputs
 * of a row and its results have one place in shared memory. Phases, and what shared memory holds:
 *
 *   rows      warp: 8 rows, lane: K / 32 channels. Gates, sums, norms (rows.cuh), then decayed
 *             rows; kg and qg go out.        k q g as loaded; gate sums for g; ka qa kd kb far
 *   products  warp (I, m): rows 16 I .. of k k' or q k'
 *   emit      m = 0: A, L, then T; m = 1:    ka, A, then T; beta, v, Aqk on its way
 *             Aqk, what w and u need
 *   w, u      warp (I, m)                    ka, T B, v, rows on their way out
 *
 * Operands, rows x channels, each rounded once: ka, qa = k, q exp(gam - anchor of the block). Then
 * kd = k exp(anchor - gam), the other side of a diagonal block, and kb = k exp(next anchor - gam).
 * Blocks (1, 0) and (3, 2) meet at the anchor between them; rows 32 .. and 0 .. 31 meet at the
 * anchor of row 32, for which block 3 has rows `far` and block 0 a second kb. Operand ka serves w
 * as well: T B times it, times the anchors' decay, block column by block column. */
#include "fast/chunks.cuh"
#include "fast/far.cuh"
#include "fast/fast.cuh"

namespace {

template <int K> struct Operands {
    bf16 qa[C * K], kd[C * K];
    bf16 kb[48 * K];    /* of block 0, 1, 2 at the next anchor */
    bf16 far_q[16 * K]; /* rows 48 .. at the anchor of row 32 */
    bf16 far_k[16 * K];
    bf16 kb0[16 * K]; /* block 0 at row 32's anchor */
    /* until the decayed rows are made */
    __device__ __forceinline__ Anchors<K, 8> &anchors() { return *(Anchors<K, 8> *)far_k; }
};
/* AFTER the products: Solve, or Inverse in a plan without w and u. */
template <int K, class AFTER> struct ChunkSmem {
    bf16 ka[C * K];
    union {
        Operands<K> o;
        AFTER s;
    } x;
    float before[4][K];  /* the gate from the chunk's start to the anchors, log2 units; behind the
                          * products, where w is made: the decay from the anchor before */
    float own[C];        /* q k' of a token's own key */
    float2 norm[C];      /* 1/norms of the rows of k and q */
    int wide[4][K / 32]; /* does any of 32 channels of a block need the pairwise sums */
    uint16_t beta[C];    /* of a plan without w and u: raw, bf16 */
};

/* ---- rows ------------------------------------------------------------------------------------ */

/* A warp's 8 rows. The members row, high and side are places of a lane's K / 32 channels in row 0,
 * in bytes from ka on. The place in row i is at(place, i). Loops over rows are not unrolled further
 * than they say: a block's code must fit the instruction cache. */
template <int K> struct Own {
    static const int TILE = C * K * 2, QA = TILE, KD = 2 * TILE, KB = 3 * TILE;
    static const int FAR_Q = KB + 96 * K, FAR_K = FAR_Q + 32 * K, KB0 = FAR_K + 32 * K;
    int row0, ch, I, lane;
    unsigned row;  /* in ka, qa, kd (+ QA, + KD) */
    unsigned high; /* in kb; of block 3: in far_q */
    unsigned side; /* of block 0: in kb0; of block 3: in far_k */
    __device__ __forceinline__ Own(int warp, int lane)
        : row0(warp * 8), ch(lane * (K / 32)), I(warp / 2), lane(lane),
          row((rows_at(warp * 8, ch / 8) + ch % 8) * 2) {
        unsigned half = ch / 64;
        high = I < 3 ? KB + row - half * 2048 : FAR_Q + row - 6144 - half * 6144;
        side = (I < 3 ? KB0 : FAR_K - 6144) + row - half * 6144;
    }
    static __device__ __forceinline__ unsigned at(unsigned x, int i) {
        return (x ^ i * 16) + i * 128;
    }
};
template <class T, int K, class AFTER>
__device__ __forceinline__ T *place(ChunkSmem<K, AFTER> &sm, unsigned bytes) {
    return (T *)((char *)sm.ka + bytes);
}

/* The gate's words of row i are kept in two halves until the row is decayed. One half lies in the
 * place of kd, the other in the place of kb or of the far row of q. */
template <int K, class AFTER>
__device__ __forceinline__ void get_gates(float x[K / 32], ChunkSmem<K, AFTER> &sm,
                                          const Own<K> &own, int i) {
    load_words<K / 64>(x, place<float>(sm, own.at(own.row, i) + own.KD));
    load_words<K / 64>(x + K / 64, place<float>(sm, own.at(own.high, i)));
}
template <int K, class AFTER>
__device__ __forceinline__ void put_gates(ChunkSmem<K, AFTER> &sm, const Own<K> &own, int i,
                                          const float x[K / 32]) {
    put_words<K / 64>(place<float>(sm, own.at(own.row, i) + own.KD), x);
    put_words<K / 64>(place<float>(sm, own.at(own.high, i)), x + K / 64);
}

/* Raw rows to the place of ka, qa and kd, g of bf16 first; zeros behind the end. */
template <int K, class AFTER>
__device__ __forceinline__ void copy_rows(ChunkSmem<K, AFTER> &sm, const Dims &d,
                                          const dpg_tensors &t, const Place &p, int row0,
                                          int lane) {
    CopiedRows<K> rows(row0, lane);
    int64_t k0 = row_at(p.c.t0, d.H, p.h, 0, 0) * K, g0 = row_at(p.c.t0, d.HV, p.hv, 0, 0) * K;
    if (d.g_bf16) rows.copy(sm.x.o.kd, (const bf16 *)t.g + g0, d.HV, p.rows);
    cp_commit();
    rows.copy(sm.ka, (const bf16 *)t.k + k0, d.H, p.rows);
    rows.copy(sm.x.o.qa, (const bf16 *)t.q + k0, d.H, p.rows);
    cp_commit();
}

/* The same of raw gates in other formats, in fp32. */
template <int K, class AFTER>
__device__ __forceinline__ void fetch_gates(ChunkSmem<K, AFTER> &sm, const Dims &d,
                                            const dpg_tensors &t, const Place &p,
                                            const Own<K> &own) {
    const int E = K / 32;
    int64_t first = row_at(p.c.t0, d.HV, p.hv, 0, 0) * K + own.ch;
    float g[8][E];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int r = min(own.row0 + i, p.rows - 1);
        load_values<E>(g[i], t.g, first + row_in(d.HV, r >> p.lr, 0) * K, d.g_bf16);
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        put_gates(sm, own, i, g[i]);
}

/* From raw gates to their sums from the warp's first row on, log2 units. A row behind the end, or
 * of a key that is not its token's first, adds nothing. */
template <int GATE, bool COPIED, int K, class AFTER>
__device__ __forceinline__ void sum_gates(ChunkSmem<K, AFTER> &sm, const Dims &d,
                                          const GateOf<K / 32> &of, const Place &p,
                                          const Own<K> &own) {
    const int E = K / 32;
    float a = expf(param_value(of.A_log, d.A_type)), lower = d.lower_bound * LOG2E;
    float run[E] = {}, bias[E];
#pragma unroll
    for (int e = 0; e < E; e++)
        bias[e] = param_value(of.bias[e], d.bias_type) * LOG2E;
    if (COPIED) {
        cp_wait<1>();
        __syncwarp();
    }
#pragma unroll 2
    for (int i = 0; i < 8; i++) {
        float raw[E];
        if (COPIED)
            load_values<E>(raw, place<bf16>(sm, own.at(own.row, i) + own.KD), 0, true);
        else
            get_gates(raw, sm, own, i);
        bool adds = own.row0 + i < p.rows && ((own.row0 + i) & ((1 << p.lr) - 1)) == 0;
        if (adds)
#pragma unroll
            for (int e = 0; e < E; e++)
                run[e] += gate_fast<GATE>(raw[e], a, bias[e], lower);
        put_gates(sm, own, i, run);
    }
    Anchors<K, 8> &anchors = sm.x.o.anchors();
    put_words<E>(anchors.here[own.row0 / 8] + own.ch, run);
    get_gates(run, sm, own, 0);
    if (own.row0 % 16 == 0) put_words<E>(anchors.first[own.I] + own.ch, run);
}
template <bool COPIED, int K, class AFTER>
__device__ __forceinline__ void gates(ChunkSmem<K, AFTER> &sm, const Dims &d,
                                      const GateOf<K / 32> &of, const Place &p, const Own<K> &own) {
    if (d.gate == DP_GATE_LOG)
        sum_gates<DP_GATE_LOG, COPIED>(sm, d, of, p, own);
    else if (d.gate == DP_GATE_SOFTPLUS)
        sum_gates<DP_GATE_SOFTPLUS, COPIED>(sm, d, of, p, own);
    else
        sum_gates<DP_GATE_LOWER_BOUND, COPIED>(sm, d, of, p, own);
}

/* Norms of the warp's rows, which lie in shared memory. */
template <int K, class AFTER>
__device__ __forceinline__ void norm_rows(ChunkSmem<K, AFTER> &sm, const Dims &d,
                                          const Own<K> &own) {
    KeyNorms x;
    x.take<K>(d, sm.ka, sm.x.o.qa, own.row0, own.lane);
    if (!x.is_here(own.lane)) return;
    sm.own[own.row0 + own.lane / 4] = x.own;
    sm.norm[own.row0 + own.lane / 4] = make_float2(x.rk, x.rq);
}
/* The same for four rows. */
template <int K, class AFTER>
__device__ __forceinline__ void fetch_rows(ChunkSmem<K, AFTER> &sm, const Dims &d,
                                           const dpg_tensors &t, const Place &p, const Own<K> &own,
                                           int half) {
    const int E = K / 32;
    int row0 = own.row0 + half * 4, mine = row0 + own.lane / 8;
    KeyRows<K, 4> x;
    x.fetch(d, t, p, row0, own.ch);
    x.finish(d, p, row0, own.lane);
    if (own.lane % 8 == 0) {
        sm.own[mine] = x.own;
        sm.norm[mine] = make_float2(x.rk, x.rq);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        unsigned row = own.at(own.row, half * 4 + i);
        store_pairs<E>(place<bf16>(sm, row), x.k[i]);
        store_pairs<E>(place<bf16>(sm, row + own.QA), x.q[i]);
    }
}

/* One thread a channel, in place of the gates of first rows: the decay from the next anchor to the
 * chunk's end. */
template <int K> __device__ __forceinline__ void leave_ends(Anchors<K, 8> &anchors, int ch) {
    float behind = 0.f;
#pragma unroll
    for (int b = 3; b >= 0; b--) {
        anchors.first[b][ch] = ex2(behind);
        behind += anchors.next[b][ch];
    }
}

/* A lane's factors of its channels, the same in all rows; gates in log2 units. */
template <int E> struct Factors {
    float here[E];  /* gate from the block's anchor to the row before the warp's */
    float next[E];  /* from the anchor to the next one */
    float start[E]; /* chunk's start to the anchor: qg */
    float end[E];   /* next anchor to the chunk's end: kg */
    float far[E];   /* block 0: anchor 1 to 2; block 3: anchor 2 to 3 */
    float last[E];  /* FAULT(BLOCK_PAIRS): gate from the anchor to the block's last row */

    template <int K, class AFTER>
    __device__ __forceinline__ void load(ChunkSmem<K, AFTER> &sm, const Own<K> &own) {
        const Anchors<K, 8> &anchors = sm.x.o.anchors();
        int I = own.I, ch = own.ch;
        load_words<E>(here, anchors.here[own.row0 / 8] + ch);
        load_words<E>(next, anchors.next[I] + ch);
        load_words<E>(start, sm.before[I] + ch);
        load_words<E>(end, anchors.first[I] + ch);
        load_words<E>(far, anchors.next[I == 0 ? 1 : 2] + ch);
#pragma unroll
        for (int e = 0; e < E; e++) {
            start[e] = ex2(start[e]);
            far[e] = ex2(far[e]);
        }
        if (FAULT(BLOCK_PAIRS)) {
            get_gates(last, sm, Own<K>(own.row0 / 8 | 1, own.lane), 7);
            for (int e = 0; e < E; e++)
                last[e] += anchors.here[own.row0 / 8 | 1][ch + e];
        }
    }
};

/* E channels of a row, rounded; of x times f. */
template <int E> __device__ __forceinline__ void put(bf16 *to, const float x[E]) {
    uint32_t y[E / 2];
#pragma unroll
    for (int e = 0; e < E; e += 2)
        y[e / 2] = pack2(x[e], x[e + 1]);
    store_pairs<E>(to, y);
}
template <int E> __device__ __forceinline__ void put(bf16 *to, const float x[E], const float f[E]) {
    uint32_t y[E / 2];
    scaled<E>(y, x, f);
    store_pairs<E>(to, y);
}

/* The same, without what is left to the pairwise sums. */
template <bool WIDE, int E>
__device__ __forceinline__ void put_near(bf16 *to, const float x[E], const float gam[E]) {
    float y[E];
#pragma unroll
    for (int e = 0; e < E; e++)
        y[e] = WIDE && is_low(gam[e]) ? 0.f : x[e];
    put<E>(to, y);
}

/* Destinations of rows of a tile; kgam of a plan without w and u. */
struct RowsOut {
    char *kg, *qg, *kgam;
};

/* Row i of the warp's 8, in place of what it is made of: ka qa kd kb, far; kg and qg go out. WIDE:
 * some entries of kd, ka, qa are left to the pairwise sums. Else f.next is the decay to the next
 * anchor itself, and kb is kd times it (Anchors::solve). The blocks share the code: with some of
 * their own, 12% of the stalls were waits for instructions. */
template <bool WIDE, int K, class AFTER>
__device__ __forceinline__ void decay_row(ChunkSmem<K, AFTER> &sm, const RowsOut &out,
                                          const Own<K> &own, const Factors<K / 32> &f, int i) {
    const int E = K / 32;
    unsigned row = own.at(own.row, i), high = own.at(own.high, i), side = own.at(own.side, i);
    float gam[E], k[E], q[E], down[E], up[E], on[E];
    get_gates(gam, sm, own, i);
    load_values<E>(k, place<bf16>(sm, row), 0, true);
    load_values<E>(q, place<bf16>(sm, row + own.QA), 0, true);
    float2 norm = sm.norm[own.row0 + i];
#pragma unroll
    for (int e = 0; e < E; e++) {
        gam[e] += f.here[e];
        down[e] = ex2(gam[e]);
        k[e] *= norm.x;
        q[e] *= norm.y * down[e];
        down[e] *= k[e];
        up[e] = ex2(-gam[e]);
        if (WIDE) {
            on[e] = ex2(f.next[e] - gam[e]);
            if (FAULT(ANCHOR)) up[e] = on[e] * ex2(-f.next[e]);
            if (is_far(FAULT(BLOCK_PAIRS) ? f.last[e] : gam[e])) up[e] = 0.f;
            up[e] *= k[e];
            on[e] *= k[e];
        } else {
            if (FAULT(ANCHOR)) up[e] = up[e] * f.next[e] * rcp(f.next[e]);
            up[e] *= k[e];
            on[e] = up[e] * f.next[e];
        }
    }
    put_near<WIDE, E>(place<bf16>(sm, row), down, gam);
    put_near<WIDE, E>(place<bf16>(sm, row + own.QA), q, gam);
    put<E>(place<bf16>(sm, row + own.KD), up);
    if (own.I < 3)
        put<E>(place<bf16>(sm, high), on);
    else
        put<E>(place<bf16>(sm, high), q, f.far);
    if (own.I == 0)
        put<E>(place<bf16>(sm, side), on, f.far);
    else if (own.I == 3)
        put<E>(place<bf16>(sm, side), down, f.far);
    put<E>((bf16 *)(out.kg + row), on, f.end);
    put<E>((bf16 *)(out.qg + row), q, f.start);
    if (!AFTER::MAKES_W) put<E>((bf16 *)(out.kgam + row), down, f.start);
}
template <int K, class AFTER>
__device__ __forceinline__ void decay_rows(ChunkSmem<K, AFTER> &sm, const ChunkOut &o,
                                           const Place &p, const Own<K> &own,
                                           const Factors<K / 32> &f) {
    int64_t tile = p.tile * C * K;
    RowsOut out = {(char *)(o.kg + tile), (char *)(o.qg + tile), (char *)(o.kgam + tile)};
    if (is_wide<K / 32>(sm.wide[own.I])) {
#pragma unroll 1
        for (int i = 0; i < 8; i++)
            decay_row<true>(sm, out, own, f, i);
        return;
    }
    Factors<K / 32> g = f;
#pragma unroll
    for (int e = 0; e < K / 32; e++)
        g.next[e] = ex2(f.next[e]);
#pragma unroll 1
    for (int i = 0; i < 8; i++)
        decay_row<false>(sm, out, own, g, i);
}

/* The gate's sums from the chunk's start, to be read as a stage. */
template <int K, class AFTER>
__device__ __forceinline__ void keep_gcum(ChunkSmem<K, AFTER> &sm, float *gcum, int64_t tile,
                                          const Own<K> &own, const Factors<K / 32> &f) {
    const int E = K / 32;
#pragma unroll 1
    for (int i = 0; i < 8; i++) {
        float gam[E];
        get_gates(gam, sm, own, i);
        for (int e = 0; e < E; e++)
            gcum[(tile * C + own.row0 + i) * K + own.ch + e] =
                gam[e] + f.here[e] + sm.before[own.I][own.ch + e];
    }
}

/* The phase `rows`. COPIED: bf16, a key a token: copies to shared memory are enqueued. WIDE: but
 * gates are fp32. */
template <int K, bool COPIED, bool WIDE, class AFTER>
__device__ __forceinline__ void make_rows(const Dims &d, const dpg_tensors &t, const ChunkOut &o,
                                          ChunkSmem<K, AFTER> &sm, const Place &p,
                                          const GateOf<K / 32> &of, int warp, int lane) {
    Own<K> own(warp, lane);
    if (!COPIED || WIDE) fetch_gates(sm, d, t, p, own);
    gates<COPIED && !WIDE>(sm, d, of, p, own);
    if (COPIED) {
        cp_wait<0>();
        __syncwarp();
        norm_rows(sm, d, own);
    } else {
#pragma unroll 1
        for (int half = 0; half < 2; half++)
            fetch_rows(sm, d, t, p, own, half);
    }
    __syncthreads();
    if (threadIdx.x < K) {
        float all = solve_anchors(sm.x.o.anchors(), sm.before, sm.wide, threadIdx.x);
        leave_ends(sm.x.o.anchors(), threadIdx.x);
        o.eC[p.tile * K + threadIdx.x] = ex2(all);
    }
    __syncthreads();
    Factors<K / 32> f;
    f.load(sm, own);
    if (o.gcum) keep_gcum(sm, o.gcum, p.tile, own, f);
    __syncthreads();
    decay_rows(sm, o, p, own, f);
}

/* ---- products -------------------------------------------------------------------------------- */

/* Rows 16 I .. of k k' (m = 0) or q k' (m = 1). All reads of a step are requested before any of
 * them is waited for. */
template <int I, int K, class AFTER>
__device__ __forceinline__ void products_of_rows(const ChunkSmem<K, AFTER> &sm, int m, int lane,
                                                 float z[4][2][4]) {
    const Operands<K> &o = sm.x.o;
    Walk<> a = walk_down(m ? o.qa : sm.ka, I * 16, lane), b = walk_across(o.kd, I * 16, lane);
    Walk<48> kb(o.kb, across_row(lane), across_p(lane));
    Walk<16> kb0(o.kb0, across_row(lane), across_p(lane));
    Walk<16> far(m ? o.far_q : o.far_k, down_row(lane), down_p(lane));
#pragma unroll
    for (int j = 0; j < K / 16; j++) {
        uint32_t fa[4], fb[4], from_far[4], b0[4], b1[4], b2[4];
        ldsm4(fa, a.at(j));
        ldsm4(fb, b.at(j));
        if (I == 1) ldsm4(b0, kb.at(j, 0));
        if (I == 3) ldsm4(b2, kb.at(j, 2));
        if (I == 3) ldsm4(from_far, far.at(j));
        if (I >= 2) ldsm4(b0, kb0.at(j));
        if (I >= 2) ldsm4(b1, kb.at(j, 1));
        two(z[3][0], z[3][1], fa, fb);
        if (I == 3) two(z[2][0], z[2][1], fa, b2);
        if (I >= 1) two(z[0][0], z[0][1], I == 3 ? from_far : fa, b0);
        if (I >= 2) two(z[1][0], z[1][1], I == 3 ? from_far : fa, b1);
    }
}
template <int K, class AFTER>
__device__ __forceinline__ void products(const ChunkSmem<K, AFTER> &sm, int I, int m, int lane,
                                         float z[4][2][4]) {
    switch (I) {
    case 0: products_of_rows<0>(sm, m, lane, z); break;
    case 1: products_of_rows<1>(sm, m, lane, z); break;
    case 2: products_of_rows<2>(sm, m, lane, z); break;
    default: products_of_rows<3>(sm, m, lane, z);
    }
}

/* The fp32 part of a diagonal block: the terms that `kd`, or `ka` and `qa`, leave out. In the place
 * of the operands. */
template <int K, class AFTER>
__device__ __noinline__ void far_products(ChunkSmem<K, AFTER> &sm, const Dims &d,
                                          const dpg_tensors &t, Place p, int I, int m, int lane,
                                          float z[2][4]) {
    float *gam = (float *)&sm.x;
    for (int b = 0; b < 4; b++) {
        if (!is_wide<K / 32>(sm.wide[b])) continue;
        __syncthreads();
        block_gates<K>(gam, d, t, p, b);
        __syncthreads();
        for (int x = 0; x < 8 && b == I; x++) {
            int s = lane / 4 + x % 4 / 2 * 8, i = 8 * (x / 4) + lane % 4 * 2 + x % 2,
                S = 16 * I + s;
            if (i >> p.lr > s >> p.lr || S >= p.rows) continue;
            int64_t ki = row_at(p.c.t0, d.H, p.h, 16 * I + i, p.lr) * K;
            int64_t ks = row_at(p.c.t0, d.H, p.h, S, p.lr) * K;
            int64_t qs = row_at(p.c.t0, d.H, p.h, S >> p.lr, 0) * K;
            float sum = 0.f;
            for (int c = 0; c < K; c++) {
                float g = gam[i * K + c];
                if (!is_far(FAULT(BLOCK_PAIRS) ? gam[15 * K + c] : g) && !is_low(gam[s * K + c]))
                    continue;
                float left = rbf(m ? ldx(t.q, qs + c, d.in_bf16) : ldx(t.k, ks + c, d.in_bf16));
                sum = fmaf(left * rbf(ldx(t.k, ki + c, d.in_bf16)), ex2(gam[s * K + c] - g), sum);
            }
            z[x / 4][x % 4] += sum * sm.norm[16 * I + i].x * (m ? sm.norm[S].y : sm.norm[S].x);
        }
    }
}

template <int K, class AFTER>
__device__ __forceinline__ void add_far(ChunkSmem<K, AFTER> &sm, const Dims &d,
                                        const dpg_tensors &t, const Place &p, int I, int m,
                                        int lane, float z[4][2][4]) {
    if (!is_wide<K / 8>(sm.wide[0])) return;
    float far[2][4] = {};
    far_products<K>(sm, d, t, p, I, m, lane, far);
#pragma unroll
    for (int x = 0; x < 8; x++)
        z[3][x / 4][x % 4] += far[x / 4][x % 4];
    __syncthreads();
}

/* ---- w and u --------------------------------------------------------------------------------- */

/* From anchors to the decay between them, a thread of m = 1 a channel. The first one multiplies all
 * of w, and is 0 where nothing is erased. */
template <int K, int V>
__device__ __forceinline__ void step_anchors(ChunkSmem<K, Solve<K, V>> &sm, const Dims &d) {
    int ch = threadIdx.x - CHUNK_THREADS / 2;
    if (ch >= K) return;
    float from = 0.f;
#pragma unroll
    for (int J = 0; J < 4; J++) {
        float to = sm.before[J][ch];
        sm.before[J][ch] = J || d.erases ? ex2(to - from) : 0.f;
        from = to;
    }
}

/* Rows 16 I .. of w = T B ka (m = 0) or of u = T B v. Block columns of w are multiplied by the
 * decay between anchors. */
template <int K, int V>
__device__ __forceinline__ void make_w_and_u(ChunkSmem<K, Solve<K, V>> &sm, const ChunkOut &o,
                                             int64_t tile, Odd &odd, int I, int m, int lane) {
    Solve<K, V> &s = sm.x.s;
#pragma unroll 1
    for (int group = 0; group < (m ? V : K) / 64; group++) {
        float acc[8][4] = {};
        auto decay = [&](int J, float(*acc)[4]) {
            if (m) return;
#pragma unroll
            for (int n = 0; n < 8; n++) {
                float2 f = *(const float2 *)&sm.before[J][group * 64 + n * 8 + lane % 4 * 2];
#pragma unroll
                for (int e = 0; e < 4; e++)
                    acc[n][e] *= e % 2 ? f.y : f.x;
            }
        };
        times_TB(acc, s.TB, m ? s.v : sm.ka, group, I, lane,
                 [&](int J, float(*acc)[4]) { decay(J + 1, acc); });
        decay(0, acc);
        odd.take(acc);
        send(m, s.x.out[4 * m + I], acc, m ? o.u + tile * C * V : o.w + tile * C * K, I, group,
             lane);
    }
}

/* ---- the kernel ------------------------------------------------------------------------------ */

template <int K, int V, Formats F>
__global__ void __launch_bounds__(CHUNK_THREADS, 3)
    k_chunks(const __grid_constant__ Dims plan, const __grid_constant__ dpg_tensors t,
             const __grid_constant__ ChunkOut o) {
    extern __shared__ __align__(128) char raw[];
    ChunkSmem<K, Solve<K, V>> &sm = *(ChunkSmem<K, Solve<K, V>> *)raw;
    const Dims d = known<F>(plan);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, I = warp % 4, m = warp / 4;
    await_grid();
    unsigned chunk = chunk_of_block(d);
    if (chunk >= (unsigned)d.NT) return;
    Place p = place_of(d, chunk, blockIdx.x);
    Betas betas;
    betas.load(d, t, p, I, m, lane);
    if (F != ANY) copy_rows<K>(sm, d, t, p, warp * 8, lane);
    GateOf<K / 32> of;
    of.load(d, t, p.hv, lane);
    make_rows<K, F != ANY, F == WIDE_GATES>(d, t, o, sm, p, of, warp, lane);
    __syncthreads();
    float z[4][2][4] = {};
    products<K>(sm, I, m, lane, z);
    __syncthreads();
    add_far<K>(sm, plan, t, p, I, m, lane, z);
    if (m) {
        load_v<V>(sm.x.s.v, d, t, p);
        if (betas.row[0] < C) sm.x.s.beta[betas.row[0]] = betas.get(d, p, 0);
        step_anchors(sm, d);
        emit_queries(sm.x.s.TB, o.Aqk + p.tile * C * C, sm.own, d.scale, p.lr, I, lane, z,
                     [&](int, int, float &, float &) {});
        drain_wait(lane);
        cp_wait<0>();
        meet_as_well();
    } else {
        emit_keys(sm.x.s, d, o, p, betas, I, lane, z, [](int, int, float &, float &) {});
        invert(sm.x.s, warp, lane);
    }
    __syncthreads();
    round_T(sm.x.s, o.T ? o.T + p.tile * C * C : NULL, warp, lane);
    __syncthreads();
    Odd odd = {o.odd && I == 3, 0.f};
    make_w_and_u(sm, o, p.tile, odd, I, m, lane);
    odd.leave(o.odd, p.tile, sm.own, m, lane);
    drain_wait(lane);
}

/* Beta of columns: two of them a lane, which others ask for. */
struct ColumnBetas {
    static const bool OF_COLUMNS = true;
    float mine[2];
    __device__ __forceinline__ float get(const Dims &, const Place &, int) const { return 0.f; }
    __device__ __forceinline__ float2 at(int i) const {
        const float x = mine[i / 32];
        return make_float2(__shfl_sync(~0u, x, i % 32), __shfl_sync(~0u, x, i % 32 + 1));
    }
};

/* Chunks of a plan without w and u (`bare.cuh`): the same phases up to T. No v, w and u. */
template <int K, bool KEEPS, Formats F>
__global__ void __launch_bounds__(CHUNK_THREADS, 3)
    k_decayed(const __grid_constant__ Dims plan, const __grid_constant__ dpg_tensors t,
              const __grid_constant__ ChunkOut o) {
    extern __shared__ __align__(128) char raw[];
    ChunkSmem<K, Inverse> &sm = *(ChunkSmem<K, Inverse> *)raw;
    Inverse &after = sm.x.s;
    const Dims d = known<F>(plan);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, m = warp / 4;
    int I = m ? 3 - warp % 4 : warp; /* a scheduler has much and little of the products */
    await_grid();
    unsigned chunk = chunk_of_block(d);
    if (chunk >= (unsigned)d.NT) return;
    Place p = place_of(d, chunk, blockIdx.x);
    copy_rows<K>(sm, d, t, p, warp * 8, lane);
    GateOf<K / 32> of;
    of.load(d, t, p.hv, lane);
    RawWord beta = {};
    if (F == BF16 && threadIdx.x < C) beta = load_beta(d, t, p, threadIdx.x);
    make_rows<K, true, F == WIDE_GATES>(d, t, o, sm, p, of, warp, lane);
    if (F == BF16 && threadIdx.x < C) sm.beta[threadIdx.x] = (uint16_t)beta.w;
    __syncthreads();
    float z[4][2][4] = {};
    products<K>(sm, I, m, lane, z);
    __syncthreads();
    add_far<K>(sm, plan, t, p, I, m, lane, z);
    Betas betas;
    if (F == WIDE_GATES) /* shared memory has no room for them */
        betas.load(d, t, p, I, m, lane);
    else
        betas.take(sm.beta, I, m, lane);
    if (m) {
        if (betas.row[0] < C) {
            const float own = betas.get(d, p, 0);
            after.beta[betas.row[0]] = KEEPS ? 1.f : own;
            if (KEEPS) o.beta[p.tile * C + betas.row[0]] = own;
        }
        emit_queries(after.TB, o.Aqk + p.tile * C * C, sm.own, d.scale, p.lr, I, lane, z,
                     [&](int, int, float &, float &) {});
        drain_wait(lane);
        meet_as_well();
    } else {
        ChunkOut nothing = {};
        auto none = [](int, int, float &, float &) {};
        if constexpr (KEEPS) {
            ColumnBetas columns;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int row = lane + 32 * r;
                RawWord x;
                if (F == WIDE_GATES)
                    x = load_beta(d, t, p, row);
                else
                    x.w = sm.beta[row];
                columns.mine[r] = beta_of(d, x, p, row);
            }
            emit_keys(after, d, nothing, p, columns, I, lane, z, none);
        } else {
            emit_keys(after, d, nothing, p, betas, I, lane, z, none);
        }
        invert(after, warp, lane);
    }
    __syncthreads();
    round_T(after, NULL, warp, lane);
    if (o.odd) leave_odd(after, o.odd, p.tile, sm.own, 0.f, warp, lane);
    send_TB(after, o.TB, p, warp, lane);
}

/* ---- host ------------------------------------------------------------------------------------ */

} // namespace

ChunkOut chunk_out(const Call &c) {
    auto b = [&](int slot) { return at<bf16>(c, slot); };
    ChunkOut o = {};
    o.w = b(B_W);
    o.u = b(B_U);
    o.kg = b(B_KG);
    o.qg = b(B_QG);
    o.Aqk = b(B_AQK);
    o.T = b(B_AKK);
    o.L = b(B_L);
    o.dos = c.p->reads_do ? NULL : b(B_DO);
    o.eC = at<float>(c, B_EC);
    o.kgam = b(B_KGAM);
    o.TB = b(B_TB);
    o.gcum = at<float>(c, B_GCUM);
    o.odd = at<int>(c, B_ODD);
    o.beta = at<float>(c, B_FACTORS);
    return o;
}

namespace {
template <int K, int V> struct Chunks {
    static dp_status run(const Call &c) {
        auto kernel = OF_FORMATS(formats_of(c.p->d), k_chunks, K, V);
        int bytes = (int)sizeof(ChunkSmem<K, Solve<K, V>>);
        return launch(queue_of(c), "k_chunks", kernel, chunk_grid(c.p), CHUNK_THREADS, bytes,
                      c.p->d, *c.t, chunk_out(c));
    }
};

template <int K, int V> struct Decayed {
    static dp_status run(const Call &c) {
        const bool in_bf16 = c.p->d.g_bf16, keeps = at<float>(c, B_H) != NULL;
        auto kernel = keeps ? in_bf16 ? k_decayed<K, true, BF16> : k_decayed<K, true, WIDE_GATES>
                      : in_bf16 ? k_decayed<K, false, BF16>
                                : k_decayed<K, false, WIDE_GATES>;
        int bytes = (int)sizeof(ChunkSmem<K, Inverse>);
        return launch(queue_of(c), "k_decayed", kernel, chunk_grid(c.p), CHUNK_THREADS, bytes,
                      c.p->d, *c.t, chunk_out(c));
    }
};

static_assert(3 * (sizeof(ChunkSmem<128, Solve<128, 128>>) + 1024) <= 233472, "3 blocks on 9.0");

} // namespace

dp_status fast_chunks_channels(const Call &c) {
    FAULT_TO_DEVICE(c.e, c.s);
    return c.p->bare ? by_widths<Decayed>(c) : by_widths<Chunks>(c);
}
