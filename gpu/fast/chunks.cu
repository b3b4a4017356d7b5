/* gpu/fast/chunks.cu - a chunk of one value head with a gate a channel: gate, norms, k k' and q k'
 * with decay, T = (I + A)^-1, then w u kg qg Aqk to memory.
 *
 * One block of 8 warps a tile, 2 blocks a multiprocessor (3 with 80 registers: spills, slower).
 * Phases, and what shared memory holds:
 *
 *   rows      warp: 8 rows, lane: K / 32 channels. Gate, sums, norms and decayed rows in registers
 *             (rows.cuh); kg and qg go out.       anchors, sums; then ka qa kd kb far
 *   products  warp (I, m): rows 16 I .. of k k' or q k'
 *   emit      A, L, Aqk                            ka, A, beta; v, do on their way
 *   invert    4 warps                              ka, T, v, do
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
        Operands<K> o;
        struct {
            Solve<K, V> s;
            bf16 dos[C * V]; /* SLICES, on its way out */
        };
    } x;
    float before[4][K]; /* the gate from the chunk's start to the anchors, log2 units */
    float own[C];       /* q k' of a token's own key */
    float rk[C], rq[C];
    int wide[4][K / 32]; /* does any of 32 channels of a block need the pairwise sums */
};

/* ---- rows ------------------------------------------------------------------------------------ */

/* What a lane multiplies its channels by, the same in all rows. */
template <int E> struct Factors {
    float start[E]; /* chunk's start to the anchor: qg */
    float end[E];   /* next anchor to the chunk's end: kg */
    float far[E];   /* block 0: anchor 1 to 2; block 3: anchor 2 to 3 */
};

/* A lane's channels of one row: normalised, and the gate from the block's anchor to it. */
template <int E> struct Row { float k[E], q[E], gam[E]; };

/* All that is made of a row; offset: of the lane's channels in ROWS; next: the gate from the
 * block's anchor to the next one, last: to the block's last row. */
template <int K, int V>
__device__ __forceinline__ void write_row(ChunkSmem<K, V> &sm, bf16 *kg, bf16 *qg, unsigned offset,
                                          const Row<K / 32> &x, const float next[K / 32],
                                          const float last[K / 32], bool wide, int I,
                                          const Factors<K / 32> &f) {
    const int E = K / 32;
    float down[E], up[E], on[E], y[E];
    uint32_t out[E / 2];
#pragma unroll
    for (int e = 0; e < E; e++) {
        down[e] = ex2(x.gam[e]);
        up[e] = ex2(-x.gam[e]);
        on[e] = ex2(next[e] - x.gam[e]);
        if (FAULT(ANCHOR)) up[e] = on[e] * ex2(-next[e]);
    }
    if (wide)
#pragma unroll
        for (int e = 0; e < E; e++)
            if (is_far(FAULT(BLOCK_PAIRS) ? last[e] : x.gam[e])) up[e] = 0.f;
    scaled<E>(out, x.k, down);
    store_pairs<E>(sm.ka + offset, out);
    scaled<E>(out, x.q, down);
    store_pairs<E>(sm.x.o.qa + offset, out);
    scaled<E>(out, x.k, up);
    store_pairs<E>(sm.x.o.kd + offset, out);
    scaled<E>(out, x.k, on);
    if (I < 3) store_pairs<E>(sm.x.o.kb + offset, out);
#pragma unroll
    for (int e = 0; e < E; e++)
        y[e] = on[e] * f.end[e];
    scaled<E>(out, x.k, y);
    store_pairs<E>(kg + offset, out);
#pragma unroll
    for (int e = 0; e < E; e++)
        y[e] = down[e] * f.start[e];
    scaled<E>(out, x.q, y);
    store_pairs<E>(qg + offset, out);
    if (I == 0) {
#pragma unroll
        for (int e = 0; e < E; e++)
            y[e] = on[e] * f.far[e];
        scaled<E>(out, x.k, y);
        store_pairs<E>(sm.x.o.kb + offset + 48 * 64, out);
    }
    if (I == 3) { /* rows 48 .. of 64 become rows 0 .. of 32 */
        unsigned at = offset - 48 * 64 - offset / (C * 64) * (32 * 64);
#pragma unroll
        for (int e = 0; e < E; e++)
            y[e] = down[e] * f.far[e];
        scaled<E>(out, x.q, y);
        store_pairs<E>(sm.x.o.far + at, out);
        scaled<E>(out, x.k, y);
        store_pairs<E>(sm.x.o.far + at + 16 * 64, out);
    }
}

/* Where a lane's sums of row r wait while k and q need its registers: in what the row's ka and qa
 * take. */
template <int K, int V>
__device__ __forceinline__ float *stash(ChunkSmem<K, V> &sm, int r, int lane) {
    const int E = K / 32, LANES = 32 / E; /* of a piece of 128 bytes */
    int piece = lane / LANES;
    bf16 *tile = piece < K / 64 ? sm.ka : sm.x.o.qa;
    return (float *)(tile + (piece % (K / 64) * C + r) * 64) + lane % LANES * E;
}

/* The phase `rows`. */
template <int K, int V>
__device__ __forceinline__ void make_rows(const Dims &d, const dpg_tensors &t, const ChunkOut &o,
                                          ChunkSmem<K, V> &sm, const Place &p, int warp, int lane) {
    const int E = K / 32;
    int row0 = warp * 8, ch = lane * E, I = row0 / 16;
    Anchors<K, 8> &anchors = *(Anchors<K, 8> *)sm.x.o.kd;
    KeyRows<K, 8> x;
    x.fetch(d, t, p, row0, ch);
    {
        GateRows<K, 8> g;
        g.fetch(d, t, p, row0, ch);
        g.finish(d, p, row0);
        g.publish(anchors, row0, ch);
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
            for (int e = 0; e < E; e += 2)
                *(float2 *)(stash(sm, row0 + i, lane) + e) =
                    make_float2(g.sum[i][e], g.sum[i][e + 1]);
    }
    x.finish(d, p, row0, lane);
    if (lane % 4 == 0) {
        int r = row0 + lane / 4;
        sm.own[r] = x.own;
        sm.rk[r] = x.rk;
        sm.rq[r] = x.rq;
    }
    __syncthreads();
    if (threadIdx.x < K) {
        float all = solve_anchors(anchors, sm.before, sm.wide, threadIdx.x);
        o.eC[p.tile * K + threadIdx.x] = ex2(all);
    }
    __syncthreads();
    float here[E], next[E], last[E];
    Factors<E> f;
    load_words<E>(here, anchors.here[warp] + ch);
    load_words<E>(next, anchors.next[I] + ch);
    load_words<E>(f.start, sm.before[I] + ch);
    load_words<E>(f.far, anchors.next[I == 0 ? 1 : 2] + ch);
#pragma unroll
    for (int e = 0; e < E; e++) {
        float behind = 0.f;
        for (int b = I + 1; b < 4; b++)
            behind += anchors.next[b][ch + e];
        last[e] = next[e] - (I < 3 ? anchors.first[I + 1][ch + e] : 0.f);
        f.start[e] = ex2(f.start[e]);
        f.end[e] = ex2(behind);
        f.far[e] = ex2(f.far[e]);
    }
    bool wide = is_wide<K / 32>(sm.wide[I]);
    unsigned offset = rows_at(row0, ch / 8) + ch % 8;
    bf16 *kg = o.kg + (int64_t)p.tile * C * K, *qg = o.qg + (int64_t)p.tile * C * K;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 8; i++) {
        Row<E> row;
        float *sum = stash(sm, row0 + i, lane);
        load_words<E>(row.gam, sum);
        __syncwarp();
        x.normed(row.k, row.q, i, p.zero);
#pragma unroll
        for (int e = 0; e < E; e++) {
            row.gam[e] += here[e];
            if (o.gcum)
                o.gcum[((int64_t)p.tile * C + row0 + i) * K + ch + e] =
                    row.gam[e] + sm.before[I][ch + e];
        }
        write_row(sm, kg, qg, (offset ^ i * 8) + i * 64, row, next, last, wide, I, f);
    }
}

/* ---- products -------------------------------------------------------------------------------- */

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
                                          Place p, int I, int m, int lane, float z[2][4]) {
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
                if (!is_far(FAULT(BLOCK_PAIRS) ? gam[15 * K + c] : g)) continue;
                float left = rbf(m ? ldx(t.q, qs + c, d.in_bf16) : ldx(t.k, ks + c, d.in_bf16));
                sum = fmaf(left * rbf(ldx(t.k, ki + c, d.in_bf16)), ex2(gam[s * K + c] - g), sum);
            }
            z[x / 4][x % 4] += sum * sm.rk[16 * I + i] * (m ? sm.rq[S] : sm.rk[S]);
        }
    }
}

/* ---- emit ------------------------------------------------------------------------------------ */

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

/* ---- the kernel ------------------------------------------------------------------------------ */

template <int K, int V, bool PLAIN>
__global__ void __launch_bounds__(CHUNK_THREADS, 2)
    k_chunks(const __grid_constant__ Dims plan, const __grid_constant__ dpg_tensors t,
             const void *dout, const __grid_constant__ ChunkOut o) {
    extern __shared__ __align__(128) char raw[];
    ChunkSmem<K, V> &sm = *(ChunkSmem<K, V> *)raw;
    const Dims d = known<PLAIN>(plan);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, I = warp % 4, m = warp / 4;
    Place p = place_of(d, blockIdx.x);
    RawWord beta = load_beta(d, t, p);
    make_rows(d, t, o, sm, p, warp, lane);
    __syncthreads();
    float z[4][2][4] = {};
    products(sm, I, m, lane, z);
    __syncthreads();
    if (is_wide<K / 8>(sm.wide[0])) {
        float far[2][4] = {};
        far_products(sm, plan, t, p, I, m, lane, far);
#pragma unroll
        for (int x = 0; x < 8; x++)
            z[3][x / 4][x % 4] += far[x / 4][x % 4];
        __syncthreads();
    }
    if (threadIdx.x < C) sm.x.s.beta[threadIdx.x] = beta_of(d, beta, p);
    load_v<V>(sm.x.s.v, d, t, p);
    if (o.dos) fetch_do<V>(sm.x.dos, d, dout, p);
    __syncthreads();
    emit(sm, d, o, p, I, m, lane, z);
    __syncthreads();
    invert(sm.x.s, warp, lane);
    round_T(sm.x.s, o.T ? o.T + p.tile * C * C : NULL, warp, lane);
    cp_wait<0>();
    if (o.dos) drain_fence();
    __syncthreads();
    if (o.dos && warp == 4) send_do<V>(o, sm.x.dos, p, lane);
    for (int group = 0; group < (m ? V : K) / 64; group++) {
        float acc[8][4] = {};
        if (m) {
            times_TB(acc, sm.x.s.TB, sm.x.s.v, group, I, lane, [](int, float(*)[4]) {});
            send<true>(sm.x.s.x.out[warp], acc, o.u + p.tile * C * V, I, group, lane);
            continue;
        }
        /* from the anchor of block J to that of J - 1, of block 0: to the start */
        auto decay = [&](int J, float(*acc)[4]) {
#pragma unroll
            for (int n = 0; n < 8; n++) {
                int ch = group * 64 + n * 8 + lane % 4 * 2;
                float2 f = *(const float2 *)&sm.before[J][ch];
                float2 to = J ? *(const float2 *)&sm.before[J - 1][ch] : make_float2(0.f, 0.f);
                f.x = ex2(f.x - to.x);
                f.y = ex2(f.y - to.y);
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
    o.dos = b(B_DO);
    o.eC = at<float>(c, B_EC);
    o.gcum = at<float>(c, B_GCUM);
    return o;
}

namespace {
template <int K, int V> struct Chunks {
    static dp_status run(const Call &c) {
        auto kernel = is_plain(c.p->d) ? k_chunks<K, V, true> : k_chunks<K, V, false>;
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
