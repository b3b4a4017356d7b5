/* gpu/fast/chunks.cu - a chunk of one value head with a gate a channel: gate, norms, k k' and q k'
 * with decay, T = (I + A)^-1, then w u kg qg Aqk to memory.
 *
 * One block of 8 warps a tile, 3 blocks a multiprocessor. Phases, and what shared memory holds:
 *
 *   rows      warp: 8 rows, lane: K / 32 channels. Gate, sums, norms and decayed rows in registers
 *             (rows.cuh); kg and qg go out.       Totals, then the operands ka qa kd kb far
 *   products  warp (I, m): rows 16 I .. of k k' or q k'
 *   emit      A, L, Aqk                            ka, A, beta; v on its way
 *   invert    4 warps                              ka, T, v
 *   w, u      warp (I, m)                          ka, T B, v, rows on their way out
 *
 * Operands, rows x channels, each rounded once: ka, qa = k, q exp(gam - anchor of the block);
 * kd = k exp(anchor - gam), the other side of a diagonal block; kb = k exp(next anchor - gam).
 * Blocks (1, 0) and (3, 2) meet at the anchor between them; rows 32 .. and 0 .. 31 meet at the
 * anchor of row 32, for which block 3 has rows `far` and block 0 a second kb. ka serves w as well:
 * T B times it, times the anchors' decay, block column by block column. */
#include "fast/chunks.cuh"
#include "fast/far.cuh"
#include "fast/fast.cuh"

namespace {

template <int K> struct Operands {
    bf16 qa[C * K], kd[C * K];
    bf16 kb[C * K]; /* 16 rows each: of block 0, 1, 2 at the next anchor; of block 0 at row 32's */
    bf16 far[32 * K]; /* rows 48 .. of q and of k at the anchor of row 32 */
};
template <int K, int V> struct ChunkSmem {
    bf16 ka[C * K];
    union {
        Totals<K, 8> totals;
        Operands<K> o;
        Solve<K, V> s;
    } x;
    float step[4][K]; /* decay from the anchor before to that of block I, I = 0: from the start */
    float own[C];     /* q k' of a token's own key */
    float rk[C], rq[C];
    int wide[4]; /* does any channel of block I need the pairwise sums */
};

/* ---- rows ----------------------------------------------------------------------------------- */

/* What a lane multiplies its channels by, the same in all rows. */
template <int E> struct Factors {
    float start[E]; /* chunk's start to the anchor: qg */
    float end[E];   /* next anchor to the chunk's end: kg */
    float far[E];   /* block 0: anchor 1 to 2; block 3: anchor 2 to 3 */
};

/* All that is made of a row; offset: of the lane's channels in ROWS. */
template <int K, int V>
__device__ __forceinline__ void
write_row(ChunkSmem<K, V> &sm, const ChunkOut &o, int64_t tile, int r, int offset,
          const float k[K / 32], const float q[K / 32], const float x[K / 32],
          const Anchored<K, 8> &at, bool wide, const Factors<K / 32> &f) {
    const int E = K / 32;
    float down[E], up[E], on[E], y[E];
    uint32_t out[E / 2];
    int I = r / 16;
#pragma unroll
    for (int e = 0; e < E; e++) {
        down[e] = ex2(x[e]);
        up[e] = ex2(-x[e]);
        on[e] = ex2(at.next[e] - x[e]);
        if (FAULT(ANCHOR)) up[e] = on[e] * ex2(-at.next[e]);
    }
    if (wide)
#pragma unroll
        for (int e = 0; e < E; e++)
            if (is_far(FAULT(BLOCK_PAIRS) ? at.last[e] : x[e])) up[e] = 0.f;
    scaled<E>(out, k, down);
    store_pairs<E>(sm.ka + offset, out);
    scaled<E>(out, q, down);
    store_pairs<E>(sm.x.o.qa + offset, out);
    scaled<E>(out, k, up);
    store_pairs<E>(sm.x.o.kd + offset, out);
    scaled<E>(out, k, on);
    if (I < 3) store_pairs<E>(sm.x.o.kb + offset, out);
#pragma unroll
    for (int e = 0; e < E; e++)
        y[e] = on[e] * f.end[e];
    scaled<E>(out, k, y);
    store_pairs<E>(o.kg + tile * C * K + offset, out);
#pragma unroll
    for (int e = 0; e < E; e++)
        y[e] = down[e] * f.start[e];
    scaled<E>(out, q, y);
    store_pairs<E>(o.qg + tile * C * K + offset, out);
    if (I == 0) {
#pragma unroll
        for (int e = 0; e < E; e++)
            y[e] = on[e] * f.far[e];
        scaled<E>(out, k, y);
        store_pairs<E>(sm.x.o.kb + offset + 48 * 64, out);
    }
    if (I == 3) {
        int at = offset % (C * 64) - 48 * 64 + offset / (C * 64) * (32 * 64);
#pragma unroll
        for (int e = 0; e < E; e++)
            y[e] = down[e] * f.far[e];
        scaled<E>(out, q, y);
        store_pairs<E>(sm.x.o.far + at, out);
        scaled<E>(out, k, y);
        store_pairs<E>(sm.x.o.far + at + 16 * 64, out);
    }
}

/* The phase `rows`. */
template <int K, int V>
__device__ __forceinline__ void make_rows(const Dims &d, const dpg_tensors &t, const ChunkOut &o,
                                          ChunkSmem<K, V> &sm, const Place &p, int warp, int lane) {
    const int E = K / 32;
    int row0 = warp * 8, ch = lane * E, I = row0 / 16;
    GateRows<K, 8> g;
    KeyRows<K, 8> x;
    g.load(d, t, p, row0, ch);
    x.load(d, t, p, row0, ch, lane);
    g.publish(sm.x.totals, row0, ch);
    if (lane % 4 == 0) {
        int r = row0 + lane / 4;
        sm.own[r] = x.own;
        sm.rk[r] = x.rk;
        sm.rq[r] = x.rq;
    }
    __syncthreads();
    Anchored<K, 8> at(sm.x.totals, row0, ch);
    Factors<E> f;
    bool wide = false;
#pragma unroll
    for (int e = 0; e < E; e++) {
        f.start[e] = ex2(at.before[e]);
        f.end[e] = ex2(at.behind[e]);
        f.far[e] = ex2(I == 0 ? at.d1[e] : at.d2[e]);
        wide |= is_far(g.sum[7][e] + at.here[e]);
        if (warp == 0) sm.step[0][ch + e] = f.start[e];
        if (warp == 0) o.eC[p.tile * K + ch + e] = ex2(at.before[e] + at.next[e] + at.behind[e]);
        if (row0 % 16 == 0 && I < 3) sm.step[I + 1][ch + e] = ex2(at.next[e]);
    }
    wide = __any_sync(~0u, wide);
    if (lane == 0 && row0 % 16) sm.wide[I] = wide;
    __syncthreads();
    wide = sm.wide[I];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int r = row0 + i, offset = rows_at(r, ch / 8) + ch % 8;
        float rk = __shfl_sync(~0u, x.rk, x.lane_of(i)), rq = __shfl_sync(~0u, x.rq, x.lane_of(i));
        float k[E], q[E], here[E];
        normed<E>(k, x.k[i], rk);
        normed<E>(q, x.q[i], rq);
#pragma unroll
        for (int e = 0; e < E; e++)
            here[e] = g.sum[i][e] + at.here[e];
        write_row<K, V>(sm, o, p.tile, r, offset, k, q, here, at, wide, f);
        if (o.gcum)
#pragma unroll
            for (int e = 0; e < E; e++)
                o.gcum[(p.tile * C + r) * K + ch + e] = g.sum[i][e] + at.start[e];
    }
}

/* ---- products ------------------------------------------------------------------------------- */

/* Rows 16 I .. of k k' (m = 0) or q k' (m = 1). */
template <int K, int V>
__device__ __forceinline__ void products(const ChunkSmem<K, V> &sm, int I, int m, int lane,
                                         float z[4][2][4]) {
    const Operands<K> &o = sm.x.o;
    Walk<> a = walk_down(m ? o.qa : sm.ka, I * 16, lane), b = walk_across(o.kd, I * 16, lane);
    Walk<> kb = walk_across(o.kb, 0, lane);
    Walk<32> far(o.far, (m ? 0 : 16) + down_row(lane), down_p(lane));
#pragma unroll
    for (int j = 0; j < K / 16; j++) {
        uint32_t fa[4], fb[4];
        ldsm4(fa, a.at(j));
        ldsm4(fb, b.at(j));
        two(z[3][0], z[3][1], fa, fb);
        if (I == 1) {
            ldsm4(fb, kb.at(j, 0));
            two(z[0][0], z[0][1], fa, fb);
        }
        if (I == 3) {
            ldsm4(fb, kb.at(j, 2));
            two(z[2][0], z[2][1], fa, fb);
            ldsm4(fa, far.at(j));
        }
        if (I >= 2) {
            ldsm4(fb, kb.at(j, 3));
            two(z[0][0], z[0][1], fa, fb);
            ldsm4(fb, kb.at(j, 1));
            two(z[1][0], z[1][1], fa, fb);
        }
    }
}

/* What fp32 sums add to a diagonal block: the terms that `kd` leaves out. In place of the operands.
 */
template <int K, int V>
__device__ __noinline__ void far_products(ChunkSmem<K, V> &sm, const Dims &d, const dpg_tensors &t,
                                          const Place &p, int I, int m, int lane, float z[2][4]) {
    float *gam = (float *)&sm.x;
    for (int b = 0; b < 4; b++) {
        if (!sm.wide[b]) continue;
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
                if (!is_far(FAULT(BLOCK_PAIRS) ? gam[15 * K + c] : g)) continue;
                float left = rbf(m ? ldx(t.q, qs + c, d.in_bf16) : ldx(t.k, ks + c, d.in_bf16));
                sum = fmaf(left * rbf(ldx(t.k, ki + c, d.in_bf16)), ex2(gam[s * K + c] - g), sum);
            }
            z[x / 4][x % 4] += sum * sm.rk[16 * I + i] * (m ? sm.rq[S] : sm.rk[S]);
        }
    }
}

/* ---- emit ----------------------------------------------------------------------------------- */

template <int K, int V>
__device__ __forceinline__ void emit(ChunkSmem<K, V> &sm, const Dims &d, const ChunkOut &o,
                                     const Place &p, int I, int m, int lane,
                                     const float z[4][2][4]) {
    bf16 *Aqk = o.Aqk + p.tile * C * C, *L = o.L ? o.L + p.tile * C * C : NULL;
    auto keys = [&](int s, int i, float a, float b) {
        float beta = sm.x.s.beta[s];
        *(float2 *)(sm.x.s.x.A + s * TS + i) = make_float2(beta * a, beta * b);
        if (L) store_pair(L, s, i, a, b);
    };
    auto queries = [&](int s, int i, float a, float b) {
        store_pair(Aqk, s, i, d.scale * a, d.scale * b);
    };
    emit_rows(I, lane, Mask{p.lr, m}, z, [&](int s, int i, float a, float b, bool diagonal) {
        if (!m) return keys(s, i, a, b);
        if (diagonal) own_keys(sm.own, p.lr, s, i, a, b);
        queries(s, i, a, b);
    });
    if (m) zero_upper(Aqk, I, lane);
}

/* ---- the kernel ----------------------------------------------------------------------------- */

template <int K, int V, bool KEYS>
__global__ void __launch_bounds__(CHUNK_THREADS, 3)
    k_chunks(Dims d, dpg_tensors t, const void *dout, ChunkOut o) {
    extern __shared__ __align__(128) char raw[];
    ChunkSmem<K, V> &sm = *(ChunkSmem<K, V> *)raw;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, I = warp % 4, m = warp / 4;
    Place p = place_of(d, blockIdx.x, KEYS);
    float beta = 0.f;
    if ((int)threadIdx.x < p.rows)
        beta = beta_value(d, ldx(t.beta, row_at(p.c.t0, d.HV, p.hv, threadIdx.x, p.lr), d.g_bf16));
    make_rows(d, t, o, sm, p, warp, lane);
    __syncthreads();
    float z[4][2][4] = {};
    products(sm, I, m, lane, z);
    __syncthreads();
    if (sm.wide[0] | sm.wide[1] | sm.wide[2] | sm.wide[3]) {
        float far[2][4] = {};
        far_products(sm, d, t, p, I, m, lane, far);
#pragma unroll
        for (int x = 0; x < 8; x++)
            z[3][x / 4][x % 4] += far[x / 4][x % 4];
        __syncthreads();
    }
    if (threadIdx.x < C) sm.x.s.beta[threadIdx.x] = beta;
    load_v<V>(sm.x.s.v, d, t, p);
    __syncthreads();
    emit(sm, d, o, p, I, m, lane, z);
    if (o.dos) copy_do<V>(o.dos, d, dout, p);
    __syncthreads();
    invert(sm.x.s, warp, lane);
    round_T(sm.x.s, o.T ? o.T + p.tile * C * C : NULL, warp, lane);
    cp_wait<0>();
    __syncthreads();
    for (int group = 0; group < (m ? V : K) / 64; group++) {
        float acc[8][4] = {};
        if (m) {
            times_TB(acc, sm.x.s.TB, sm.x.s.v, group, I, lane, [](int, float(*)[4]) {});
            send<true>(sm.x.s.x.out[warp], acc, o.u + p.tile * C * V, I, group, lane);
            continue;
        }
        auto decay = [&](int J,
                         float(*acc)[4]) { /* from the anchor of block J + 1 to that of J */
#pragma unroll
                                           for (int n = 0; n < 8; n++) {
                                               float2 f =
                                                   *(const float2 *)&sm
                                                        .step[J][group * 64 + n * 8 + lane % 4 * 2];
#pragma unroll
                                               for (int e = 0; e < 4; e++)
                                                   acc[n][e] *= e % 2 ? f.y : f.x;
                                           }
        };
        times_TB(acc, sm.x.s.TB, sm.ka, group, I, lane,
                 [&](int J, float(*acc)[4]) { decay(J + 1, acc); });
        decay(0, acc);
        send<false>(sm.x.s.x.out[warp], acc, o.w + p.tile * C * K, I, group, lane);
    }
    drain_wait(lane);
}

/* ---- host ----------------------------------------------------------------------------------- */

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
    o.dos = b(B_DO);
    o.eC = at<float>(c, B_EC);
    o.gcum = at<float>(c, B_GCUM);
    return o;
}

namespace {
template <int K, int V> struct Chunks {
    static dp_status run(const Call &c) {
        auto kernel = c.p->d.R > 1 ? k_chunks<K, V, true> : k_chunks<K, V, false>;
        int bytes = (int)sizeof(ChunkSmem<K, V>);
        CK(c.e, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
        kernel<<<tile_count(c.p), CHUNK_THREADS, bytes, c.s>>>(c.p->d, *c.t, c.g ? c.g->dout : NULL,
                                                               chunk_out(c));
        CK_LAUNCH(c.e, "k_chunks");
        return DP_OK;
    }
};

} // namespace

dp_status fast_chunks_channels(const Call &c) {
    FAULT_TO_DEVICE(c.e, c.s);
    return by_widths<Chunks>(c);
}
