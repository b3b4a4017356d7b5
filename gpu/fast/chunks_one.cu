/* gpu/fast/chunks_one.cu - a chunk of one value head whose channels share one gate (GDN): the same
 * outputs as chunks.cu. Decay multiplies whole sums, so that operands are k and q as they stand,
 * exact in bf16, and T B has what decays the rows of k for w in its columns.
 *
 * One block of 8 warps a tile, 3 blocks a multiprocessor. Phases, and what shared memory holds:
 *
 *   rows      warp: 8 rows of k and q; norms; kg and qg go out      gam, k, q; do on its way
 *   products  warp (I, m): rows 16 I .. of k k' or q k'             k, q; do on its way out
 *   emit      A, L, Aqk                                             k, A; v on its way
 *   invert    4 warps                                               k, T, v
 *   w, u      warp (I, m)                                           k, T B, T B decay, v, rows on
 *                                                                   their way out */
#include "fast/chunks.cuh"
#include "fast/fast.cuh"

namespace {

template <int K, int V> struct OneSmem {
    bf16 k[C * K]; /* ROWS, as given */
    union {
        struct {
            bf16 q[C * K], dos[C * V]; /* dos: SLICES, on its way out */
        } first;
        struct {
            Solve<K, V> s;
            bf16 TG[C * C]; /* T B with 1/norm and decay of the rows of k in its columns */
        } after;
    } x;
    float gam[C]; /* sums of the gate, log2 units */
    float rk[C], rq[C], own[C];
};

/* Four rows of k and q to shared memory unless they lie there, norms; kg and qg go out. gam: the
 * gate's sums to rows 2 lane, 2 lane + 1. */
template <int K, int V, bool COPIED>
__device__ __forceinline__ void write_rows(OneSmem<K, V> &sm, const ChunkOut &o, const Place &p,
                                           const KeyRows<K, 4> &x, float2 gam, int row0, int lane) {
    const int E = K / 32;
    int ch = lane * E, mine = row0 + lane / 8;
    if (lane % 8 == 0) {
        sm.rk[mine] = x.rk;
        sm.rq[mine] = x.rq;
        sm.own[mine] = x.own;
    }
    float even = __shfl_sync(~0u, gam.x, mine / 2), odd = __shfl_sync(~0u, gam.y, mine / 2);
    float all = __shfl_sync(~0u, gam.y, 31), own = mine % 2 ? odd : even;
    float to_end = x.rk * ex2(all - own), from_start = x.rq * ex2(own);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float fk = __shfl_sync(~0u, to_end, i * 8), fq = __shfl_sync(~0u, from_start, i * 8);
        int at = rows_at(row0 + i, ch / 8) + ch % 8;
        uint32_t kg[E / 2], qg[E / 2];
        if (!COPIED) store_pairs<E>(sm.k + at, x.k[i]);
        if (!COPIED) store_pairs<E>(sm.x.first.q + at, x.q[i]);
#pragma unroll
        for (int e = 0; e < E / 2; e++) {
            float2 a = unpack2(x.k[i][e]), b = unpack2(x.q[i][e]);
            kg[e] = pack2(a.x * fk, a.y * fk);
            qg[e] = pack2(b.x * fq, b.y * fq);
        }
        store_pairs<E>(o.kg + p.tile * C * K + at, kg);
        store_pairs<E>(o.qg + p.tile * C * K + at, qg);
    }
}

/* A warp's 8 rows of k and q to shared memory, zeros behind the end. */
template <int K, int V>
__device__ __forceinline__ void copy_rows(OneSmem<K, V> &sm, const Dims &d, const dpg_tensors &t,
                                          const Place &p, int row0, int lane) {
    const int PIECES = K / 8;
    int64_t first = row_at(p.c.t0, d.H, p.h, 0, 0) * K;
#pragma unroll
    for (int i = 0; i < PIECES / 4; i++) {
        int x = lane + 32 * i, r = row0 + x / PIECES, piece = x % PIECES, to = rows_at(r, piece);
        int64_t at = first + row_in(d.H, r < p.rows ? r : 0, 0) * K + piece * 8;
        cp16(sm.k + to, (const bf16 *)t.k + at, r < p.rows);
        cp16(sm.x.first.q + to, (const bf16 *)t.q + at, r < p.rows);
    }
    cp_commit();
}

/* A warp's 8 rows, four at a time. Every warp sums the gate: nobody waits for another. COPIED: they
 * lie in shared memory, behind all groups of copies but the last. */
template <int K, int V, bool COPIED>
__device__ __forceinline__ void make_rows(OneSmem<K, V> &sm, const Dims &d, const dpg_tensors &t,
                                          const ChunkOut &o, const Place &p, const HeadGate &gate,
                                          int warp, int lane) {
    float2 gam;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row0 = warp * 8 + half * 4;
        KeyRows<K, 4> x;
        if (!COPIED) x.fetch(d, t, p, row0, lane * (K / 32));
        if (half == 0) gam = gate.sums(d, p, lane);
        if (COPIED && half == 0) {
            cp_wait<1>();
            __syncwarp();
        }
        if (COPIED) x.take(sm.k, sm.x.first.q, row0, lane * (K / 32));
        x.finish(d, p, row0, lane);
        write_rows<K, V, COPIED>(sm, o, p, x, gam, row0, lane);
    }
    if (warp == 0) *(float2 *)(sm.gam + lane * 2) = gam;
}

/* Rows 16 I .. of k k' or q k' without decay. */
template <int K>
__device__ __forceinline__ void products(const bf16 *left, const bf16 *k, int I, int lane,
                                         float z[4][2][4]) {
    Walk<> a = walk_down(left, I * 16, lane), b = walk_across(k, 0, lane);
#pragma unroll
    for (int j = 0; j < K / 16; j++) {
        uint32_t fa[4], fb[4];
        ldsm4(fa, a.at(j));
#pragma unroll
        for (int J = 0; J < 3; J++) {
            if (J >= I) continue;
            ldsm4(fb, b.at(j, J));
            two(z[J][0], z[J][1], fa, fb);
        }
        ldsm4(fb, b.at(j, I));
        two(z[3][0], z[3][1], fa, fb);
    }
}

template <int K, int V>
__device__ __forceinline__ void emit(OneSmem<K, V> &sm, const Dims &d, const ChunkOut &o,
                                     const Place &p, int I, int m, int lane,
                                     const float z[4][2][4]) {
    bf16 *Aqk = o.Aqk + p.tile * C * C, *L = o.L ? o.L + p.tile * C * C : NULL;
    Solve<K, V> &after = sm.x.after.s;
    emit_rows(I, lane, Mask{p.lr, m}, z, [&](int s, int i, float a, float b, bool diagonal) {
        float2 gi = *(const float2 *)(sm.gam + i), rk = *(const float2 *)(sm.rk + i);
        float gs = sm.gam[s], f = m ? sm.rq[s] : sm.rk[s];
        a *= f * rk.x * ex2(fminf(gs - gi.x, 0.f));
        b *= f * rk.y * ex2(fminf(gs - gi.y, 0.f));
        if (!m) {
            float beta = after.beta[s];
            *(float2 *)(after.x.A + s * TS + i) = make_float2(beta * a, beta * b);
            if (L) store_pair(L, s, i, a, b);
            return;
        }
        if (diagonal) own_keys(sm.own, p.lr, s, i, a, b);
        store_pair(Aqk, s, i, d.scale * a, d.scale * b);
    });
    if (m) zero_upper(Aqk, I, lane);
}

/* T B again, each column with 1/norm of its key and the decay from the chunk's start to it. */
template <int K, int V>
__device__ __forceinline__ void round_TG(OneSmem<K, V> &sm, int warp, int lane) {
    int i = lane * 2;
    Solve<K, V> &s = sm.x.after.s;
    float2 b = *(const float2 *)(s.beta + i), rk = *(const float2 *)(sm.rk + i);
    float2 g = *(const float2 *)(sm.gam + i);
    b.x *= rk.x * ex2(g.x);
    b.y *= rk.y * ex2(g.y);
#pragma unroll
    for (int r = 0; r < 8; r++) {
        int row = warp * 8 + r;
        float2 y = *(const float2 *)(s.x.A + row * TS + i);
        store_pair(sm.x.after.TG, row, i, i > row ? 0.f : y.x * b.x, i + 1 > row ? 0.f : y.y * b.y);
    }
}

template <int K, int V, bool PLAIN>
__global__ void __launch_bounds__(CHUNK_THREADS, 3)
    k_chunks_one(const __grid_constant__ Dims plan, const __grid_constant__ dpg_tensors t,
                 const void *dout, const __grid_constant__ ChunkOut o) {
    extern __shared__ __align__(128) char raw[];
    OneSmem<K, V> &sm = *(OneSmem<K, V> *)raw;
    Solve<K, V> &after = sm.x.after.s;
    const Dims d = known<PLAIN>(plan);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, I = warp % 4, m = warp / 4;
    Place p = place_of(d, blockIdx.x);
    RawWord beta = load_beta(d, t, p);
    HeadGate gate;
    gate.load(d, t, p, lane);
    if (PLAIN) copy_rows(sm, d, t, p, warp * 8, lane);
    if (o.dos)
        fetch_do<V>(sm.x.first.dos, d, dout, p);
    else
        cp_commit();
    make_rows<K, V, PLAIN>(sm, d, t, o, p, gate, warp, lane);
    if (o.dos) {
        cp_wait<0>();
        drain_fence();
    }
    __syncthreads();
    if (o.dos && warp == 4) send_do<V>(o, sm.x.first.dos, p, lane);
    if (threadIdx.x < K) o.eC[p.tile * K + threadIdx.x] = ex2(sm.gam[C - 1]);
    if (o.gcum && threadIdx.x < C) o.gcum[p.tile * C + threadIdx.x] = sm.gam[threadIdx.x];
    float z[4][2][4] = {};
    products<K>(m ? sm.x.first.q : sm.k, sm.k, I, lane, z);
    drain_wait(lane);
    __syncthreads();
    if (threadIdx.x < C) after.beta[threadIdx.x] = beta_of(d, beta, p);
    load_v<V>(after.v, d, t, p);
    __syncthreads();
    emit(sm, d, o, p, I, m, lane, z);
    __syncthreads();
    invert(after, warp, lane);
    round_T(after, o.T ? o.T + p.tile * C * C : NULL, warp, lane);
    round_TG(sm, warp, lane);
    cp_wait<0>();
    __syncthreads();
    auto nothing = [](int, float(*)[4]) {};
    for (int group = 0; group < (m ? V : K) / 64; group++) {
        float acc[8][4] = {};
        bf16 *stage = after.x.out[warp];
        if (m) {
            times_TB(acc, after.TB, after.v, group, I, lane, nothing);
            send<true>(stage, acc, o.u + p.tile * C * V, I, group, lane);
        } else {
            times_TB(acc, sm.x.after.TG, sm.k, group, I, lane, nothing);
            send<false>(stage, acc, o.w + p.tile * C * K, I, group, lane);
        }
    }
    drain_wait(lane);
}

template <int K, int V> struct ChunksOne {
    static dp_status run(const Call &c) {
        auto kernel = is_plain(c.p->d) ? k_chunks_one<K, V, true> : k_chunks_one<K, V, false>;
        int bytes = (int)sizeof(OneSmem<K, V>);
        CK(c.e, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
        kernel<<<tile_count(c.p), CHUNK_THREADS, bytes, c.s>>>(c.p->d, *c.t, c.g ? c.g->dout : NULL,
                                                               chunk_out(c));
        CK_LAUNCH(c.e, "k_chunks_one");
        return DP_OK;
    }
};

} // namespace

dp_status fast_chunks_one(const Call &c) {
    FAULT_TO_DEVICE(c.e, c.s);
    return by_widths<ChunksOne>(c);
}
