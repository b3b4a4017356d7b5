/* gpu/fast/chunks_one.cu - a chunk of one value head whose channels share one gate (GDN): the same
 * outputs as chunks.cu. Decay multiplies whole sums, so operands are k and q themselves, exact in
 * bf16. T B has the decay of k's rows for w in its columns. A plan without w and u (`bare.cuh`)
 * makes T B and Aqk alone: k_triangles, 4 blocks a multiprocessor of 64 registers a thread. Value
 * heads of one key head share a block there, which makes their k k' and q k' once.
 *
 * One block of 8 warps a tile, 3 blocks a multiprocessor. Phases, and what shared memory holds:
 *
 *   rows      warp: 8 rows of k and q; norms; kg and qg go out      gam, k, q; do on its way
 *   products  warp (I, m): rows 16 I .. of k k' or q k'             k, q; do on its way out
 *   emit      m = 0: A, L, then T; m = 1: Aqk                       k, A, then T; beta, v, Aqk on
 *                                                                   its way
 *   w, u      warp (I, m)                                           k, T B, T B decay, v, rows on
 *                                                                   their way out */
#include "fast/bare.cuh"
#include "fast/chunks.cuh"
#include "fast/fast.cuh"

namespace {

/* Factors of sums of rows. */
struct RowScalars {
    float gam[C]; /* sums of the gate, log2 units */
    float rk[C], rq[C], own[C];
};
template <int K, int V> struct OneSmem {
    bf16 k[C * K]; /* ROWS, raw */
    union {
        struct {
            bf16 q[C * K], dos[C * V]; /* dos: SLICES, to be written */
        } first;
        struct {
            Solve<K, V> s;
            bf16 TG[C * C]; /* T B with 1/norm and decay of the rows of k in its columns */
        } after;
    } x;
    RowScalars rows;
};

/* Row r of kg and qg: raw k and q times the decay to the chunk's end, and from its start. */
template <int K>
__device__ __forceinline__ void send_row(const ChunkOut &o, const Place &p, int r, int ch,
                                         const uint32_t k[K / 64], const uint32_t q[K / 64],
                                         float to_end, float from_start) {
    const int E = K / 32;
    uint32_t kg[E / 2], qg[E / 2];
#pragma unroll
    for (int e = 0; e < E / 2; e++) {
        float2 a = unpack2(k[e]), b = unpack2(q[e]);
        kg[e] = pack2(a.x * to_end, a.y * to_end);
        qg[e] = pack2(b.x * from_start, b.y * from_start);
    }
    int64_t at = p.tile * C * K + rows_at(r, ch / 8) + ch % 8;
    store_pairs<E>(o.kg + at, kg);
    store_pairs<E>(o.qg + at, qg);
}
/* Stores the norms of row `mine` in shared memory and returns the factors of its k and q. The
 * argument gam holds the gate's sums to rows 2 lane, 2 lane + 1. */
template <class NORMS>
__device__ __forceinline__ float2 keep_norms(RowScalars &rows, const NORMS &x, float2 gam, int mine,
                                             bool here) {
    if (here) {
        rows.rk[mine] = x.rk;
        rows.rq[mine] = x.rq;
        rows.own[mine] = x.own;
    }
    float even = __shfl_sync(~0u, gam.x, mine / 2), odd = __shfl_sync(~0u, gam.y, mine / 2);
    float all = __shfl_sync(~0u, gam.y, 31), own = mine % 2 ? odd : even;
    return make_float2(x.rk * ex2(all - own), x.rq * ex2(own));
}

/* A warp's 8 rows, which lie in shared memory: norms; kg and qg go out. */
template <int K, int V>
__device__ __forceinline__ void take_rows(OneSmem<K, V> &sm, const Dims &d, const ChunkOut &o,
                                          const Place &p, float2 gam, int row0, int lane) {
    const int E = K / 32;
    KeyNorms x;
    x.take<K>(d, sm.k, sm.x.first.q, row0, lane);
    float2 f = keep_norms(sm.rows, x, gam, row0 + lane / 4, x.is_here(lane));
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float fk = __shfl_sync(~0u, f.x, x.lane_of(i)), fq = __shfl_sync(~0u, f.y, x.lane_of(i));
        int ch = lane * E, at = rows_at(row0 + i, ch / 8) + ch % 8;
        uint32_t k[E / 2], q[E / 2];
        copy_pairs<E>(k, sm.k + at);
        copy_pairs<E>(q, sm.x.first.q + at);
        send_row<K>(o, p, row0 + i, ch, k, q, fk, fq);
    }
}
/* Loads four rows. */
template <int K, int V>
__device__ __forceinline__ void fetch_rows(OneSmem<K, V> &sm, const Dims &d, const dpg_tensors &t,
                                           const ChunkOut &o, const Place &p, float2 gam, int row0,
                                           int lane) {
    const int E = K / 32;
    int ch = lane * E;
    KeyRows<K, 4> x;
    x.fetch(d, t, p, row0, ch);
    x.finish(d, p, row0, lane);
    float2 f = keep_norms(sm.rows, x, gam, row0 + lane / 8, lane % 8 == 0);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float fk = __shfl_sync(~0u, f.x, i * 8), fq = __shfl_sync(~0u, f.y, i * 8);
        int at = rows_at(row0 + i, ch / 8) + ch % 8;
        store_pairs<E>(sm.k + at, x.k[i]);
        store_pairs<E>(sm.x.first.q + at, x.q[i]);
        send_row<K>(o, p, row0 + i, ch, x.k[i], x.q[i], fk, fq);
    }
}

/* A warp's 8 rows of k and q to shared memory, zeros behind the end. */
template <int K>
__device__ __forceinline__ void copy_rows(bf16 *k, bf16 *q, const Dims &d, const dpg_tensors &t,
                                          const Place &p, int row0, int lane) {
    CopiedRows<K> rows(row0, lane);
    int64_t first = row_at(p.c.t0, d.H, p.h, 0, 0) * K;
    rows.copy(k, (const bf16 *)t.k + first, d.H, p.rows);
    rows.copy(q, (const bf16 *)t.q + first, d.H, p.rows);
    cp_commit();
}

/* A warp's 8 rows. Every warp sums the gate: nobody waits for another. COPIED: they lie in shared
 * memory, behind all groups of copies but the last. */
template <int K, int V, bool COPIED>
__device__ __forceinline__ void make_rows(OneSmem<K, V> &sm, const Dims &d, const dpg_tensors &t,
                                          const ChunkOut &o, const Place &p, const HeadGate &gate,
                                          int warp, int lane) {
    float2 gam = gate.sums(d, p, lane);
    if (COPIED) {
        cp_wait<1>();
        __syncwarp();
        take_rows(sm, d, o, p, gam, warp * 8, lane);
    } else {
#pragma unroll
        for (int half = 0; half < 2; half++)
            fetch_rows(sm, d, t, o, p, gam, warp * 8 + half * 4, lane);
    }
    if (warp == 0) *(float2 *)(sm.rows.gam + lane * 2) = gam;
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

/* Entries (s, i), (s, i + 1) of k k', q k': norms and decay. left: norms of the rows. */
__device__ __forceinline__ void decay_pair(const float *gam, const RowScalars &rows,
                                           const float *left, int s, int i, float &a, float &b) {
    float2 gi = *(const float2 *)(gam + i), rk = *(const float2 *)(rows.rk + i);
    float gs = gam[s], f = left[s];
    a *= f * rk.x * ex2(fminf(gs - gi.x, 0.f));
    b *= f * rk.y * ex2(fminf(gs - gi.y, 0.f));
}

/* T B again, each column with 1/norm of its key and the decay from the chunk's start to it; zeros
 * where nothing is erased. */
template <int K, int V>
__device__ __forceinline__ void round_TG(OneSmem<K, V> &sm, const Dims &d, int warp, int lane) {
    int i = lane * 2;
    Solve<K, V> &s = sm.x.after.s;
    float2 b = *(const float2 *)(s.beta + i), rk = *(const float2 *)(sm.rows.rk + i);
    float2 g = *(const float2 *)(sm.rows.gam + i);
    b.x *= d.erases * rk.x * ex2(g.x);
    b.y *= d.erases * rk.y * ex2(g.y);
#pragma unroll
    for (int r = 0; r < 8; r++) {
        int row = warp * 8 + r;
        float2 y = *(const float2 *)(s.x.A + row * TS + i);
        store_pair(sm.x.after.TG, row, i, i > row ? 0.f : y.x * b.x, i + 1 > row ? 0.f : y.y * b.y);
    }
}

template <int K, int V, Formats F>
__global__ void __launch_bounds__(CHUNK_THREADS, 3)
    k_chunks_one(const __grid_constant__ Dims plan, const __grid_constant__ dpg_tensors t,
                 const void *dout, const __grid_constant__ ChunkOut o) {
    extern __shared__ __align__(128) char raw[];
    OneSmem<K, V> &sm = *(OneSmem<K, V> *)raw;
    Solve<K, V> &after = sm.x.after.s;
    const Dims d = known<F>(plan);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, I = warp % 4, m = warp / 4;
    await_grid();
    unsigned chunk = chunk_of_block(d);
    if (chunk >= (unsigned)d.NT) return;
    Place p = place_of(d, chunk, blockIdx.x);
    Betas betas;
    betas.load(d, t, p, I, m, lane);
    HeadGate gate;
    gate.load(d, t, p, lane);
    if (F != ANY) copy_rows<K>(sm.k, sm.x.first.q, d, t, p, warp * 8, lane);
    if (o.dos)
        fetch_do<V>(sm.x.first.dos, d, dout, p);
    else
        cp_commit();
    make_rows<K, V, F != ANY>(sm, d, t, o, p, gate, warp, lane);
    if (o.dos) {
        cp_wait<0>();
        drain_fence();
    }
    __syncthreads();
    if (o.dos && warp == 4) send_do<V>(o, sm.x.first.dos, p, lane);
    if (o.dos) look_at_do<V>(o.odd, sm.x.first.dos, p.tile);
    if (threadIdx.x < K) o.eC[p.tile * K + threadIdx.x] = ex2(sm.rows.gam[C - 1]);
    if (o.gcum && threadIdx.x < C) o.gcum[p.tile * C + threadIdx.x] = sm.rows.gam[threadIdx.x];
    float z[4][2][4] = {};
    products<K>(m ? sm.x.first.q : sm.k, sm.k, I, lane, z);
    drain_wait(lane);
    __syncthreads();
    if (m) {
        load_v<V>(after.v, d, t, p);
        if (betas.row[0] < C) after.beta[betas.row[0]] = betas.get(d, p, 0);
        emit_queries(after.TB, o.Aqk + p.tile * C * C, sm.rows.own, d.scale, p.lr, I, lane, z,
                     [&](int s, int i, float &a, float &b) {
                         decay_pair(sm.rows.gam, sm.rows, sm.rows.rq, s, i, a, b);
                     });
        drain_wait(lane);
        cp_wait<0>();
        meet_as_well();
    } else {
        emit_keys(after, d, o, p, betas, I, lane, z, [&](int s, int i, float &a, float &b) {
            decay_pair(sm.rows.gam, sm.rows, sm.rows.rk, s, i, a, b);
        });
        invert(after, warp, lane);
    }
    __syncthreads();
    round_T(after, o.T ? o.T + p.tile * C * C : NULL, warp, lane);
    round_TG(sm, d, warp, lane);
    __syncthreads();
    auto nothing = [](int, float(*)[4]) {};
    Odd odd = {o.odd && I == 3, 0.f};
#pragma unroll 1
    for (int group = 0; group < (m ? V : K) / 64; group++) {
        float acc[8][4] = {};
        times_TB(acc, m ? after.TB : sm.x.after.TG, m ? after.v : sm.k, group, I, lane, nothing);
        odd.take(acc);
        send(m, after.x.out[warp], acc, m ? o.u + p.tile * C * V : o.w + p.tile * C * K, I, group,
             lane);
    }
    odd.leave(o.odd, p.tile, sm.rows.own, m, lane);
    drain_wait(lane);
}

/* ---- T B and Aqk alone ----------------------------------------------------------------------- */

/* k k' and q k' of the value heads of one key head: a warp's blocks, a lane's words together. */
struct Grams {
    float4 block[2][10][2][32];
};
/* A warp's sums there; [J] as those in registers. */
struct GramRow {
    float4 (*at)[2][32];
    int I, lane;
    __device__ __forceinline__ GramRow(Grams &x, int I, int m, int lane)
        : at(x.block[m] + I * (I + 1) / 2), I(I), lane(lane) {}
    typedef const float (*Sums)[4];
    struct Block {
        float x[2][4];
        __device__ __forceinline__ operator Sums() const { return x; }
    };
    __device__ __forceinline__ Block operator[](int J) const {
        Block y;
        for (int n = 0; n < 2; n++)
            *(float4 *)y.x[n] = at[J < 3 ? J : I][n][lane];
        return y;
    }
    __device__ __forceinline__ void keep(const float z[4][2][4]) const {
#pragma unroll
        for (int J = 0; J < 4; J++)
            if (J < I || J == 3)
                for (int n = 0; n < 2; n++)
                    at[J < 3 ? J : I][n][lane] = *(const float4 *)z[J][n];
    }
};
/* Behind the products. */
template <bool SHARED> struct TriangleAfter { Inverse of; };
template <> struct TriangleAfter<true> {
    Inverse of;
    Grams grams;
};

template <int K, bool SHARED> struct TriangleSmem {
    static const int HEADS = SHARED ? HEADS_OF_BLOCK : 1;
    union {
        struct {
            bf16 k[C * K], q[C * K]; /* ROWS, raw */
        } first;
        TriangleAfter<SHARED> after;
    } x;
    RowScalars rows;                     /* but gam */
    float gam[HEADS][C], beta[HEADS][C]; /* of the heads */
    static_assert(sizeof(TriangleAfter<SHARED>) % 16 == 0, "rows lie where pairs are loaded");
};
/* Values of beta in shared memory. COLUMNS: A is L B, so that its inverse is U. */
template <bool COLUMNS> struct MadeBetas {
    static const bool OF_COLUMNS = COLUMNS;
    const float *from;
    int first; /* the lane's first row */
    __device__ __forceinline__ float get(const Dims &, const Place &, int r) const {
        return from[first + 8 * r];
    }
    __device__ __forceinline__ float2 at(int i) const { return *(const float2 *)(from + i); }
};

/* Factors of the sums in fast/state_bare.cu, a thread a row. */
__device__ __forceinline__ void leave_factors(BareFactors &to, const float *gam,
                                              const RowScalars &rows, const Dims &d, int r,
                                              float beta) {
    float all = gam[C - 1], from_start = ex2(gam[r]);
    to.state.of_k[r] = d.erases * rows.rk[r] * from_start;
    to.of_q[r] = d.scale * rows.rq[r] * from_start;
    to.state.to_end[r] = beta * rows.rk[r] * ex2(all - gam[r]);
    to.beta[r] = beta;
    if (r < 4) to.state.chunk[r] = ex2(all);
}

/* A head's triangles from k k' and q k'. */
template <int K, bool SHARED, bool KEEPS, class Z>
__device__ __forceinline__ void finish_triangles(TriangleSmem<K, SHARED> &sm, const Dims &d,
                                                 const BareOut &o, const Place &p, int n, int warp,
                                                 int I, int m, int lane, const Z &z) {
    Inverse &after = sm.x.after.of;
    const float *gam = sm.gam[n], *beta = sm.beta[n];
    if (m) {
        if (threadIdx.x < CHUNK_THREADS / 2 + C) {
            const float own = beta[threadIdx.x % C];
            after.beta[threadIdx.x % C] = KEEPS ? 1.f : own;
            leave_factors(o.factors[p.tile], gam, sm.rows, d, threadIdx.x % C, KEEPS ? own : 1.f);
        }
        emit_queries(after.TB, o.Aqk + p.tile * C * C, sm.rows.own, d.scale, p.lr, I, lane, z,
                     [&](int s, int i, float &a, float &b) {
                         decay_pair(gam, sm.rows, sm.rows.rq, s, i, a, b);
                     });
        drain_wait(lane);
        meet_as_well();
    } else {
        ChunkOut kept = {};
        if (KEEPS) kept.L = o.L;
        const MadeBetas<KEEPS> betas = {beta, I * 16 + lane / 4};
        emit_keys(after, d, kept, p, betas, I, lane, z, [&](int s, int i, float &a, float &b) {
            decay_pair(gam, sm.rows, sm.rows.rk, s, i, a, b);
        });
        invert(after, warp, lane);
    }
    __syncthreads();
    round_T(after, NULL, warp, lane);
    if (o.odd) leave_odd(after, o.odd, p.tile, sm.rows.own, gam[C - 1], warp, lane);
    send_TB(after, o.TB, p, warp, lane);
}

/* A chunk of a plan without w and u (fast/state_bare.cu). The same phases up to T; nothing of v.
 * SHARED: of `heads` value heads of one key head, one after the other. */
template <int K, Formats F, bool SHARED, bool KEEPS>
__global__ void __launch_bounds__(CHUNK_THREADS, 4)
    k_triangles(const __grid_constant__ Dims plan, const __grid_constant__ dpg_tensors t,
                const BareOut o, int heads) {
    extern __shared__ __align__(128) char raw[];
    TriangleSmem<K, SHARED> &sm = *(TriangleSmem<K, SHARED> *)raw;
    const Dims d = known<F>(plan);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, I = warp % 4, m = warp / 4;
    await_grid();
    unsigned chunk = chunk_of_block(d);
    if (chunk >= (unsigned)d.NT) return;
    if (!SHARED) heads = 1;
    Place p = place_of(d, chunk, blockIdx.x * heads);
    auto of_head = [&](int n) {
        Place x = p;
        x.hv += n;
        return x;
    };
    copy_rows<K>(sm.x.first.k, sm.x.first.q, d, t, p, warp * 8, lane);
    const int row = threadIdx.x % C, of = threadIdx.x / C; /* whose beta it takes */
    RawWord beta = {};
    if (of < heads) beta = load_beta(d, t, of_head(of), row);
    HeadGate gate;
    if (m && I < heads) gate.load(d, t, of_head(I), lane);
    cp_wait<0>();
    __syncwarp();
    KeyNorms norms;
    norms.take<K>(d, sm.x.first.k, sm.x.first.q, warp * 8, lane);
    if (norms.is_here(lane)) {
        int mine = warp * 8 + lane / 4;
        sm.rows.rk[mine] = norms.rk;
        sm.rows.rq[mine] = norms.rq;
        sm.rows.own[mine] = norms.own;
    }
    if (of < heads) sm.beta[of][row] = beta_of(d, beta, p, row);
    __syncthreads();
    float z[4][2][4] = {};
    products<K>(m ? sm.x.first.q : sm.x.first.k, sm.x.first.k, I, lane, z);
    /* of one head by a warp whose rows have one block */
    if (m && I < heads) *(float2 *)(sm.gam[I] + lane * 2) = gate.sums(d, of_head(I), lane);
    __syncthreads();
    if constexpr (SHARED) {
        GramRow(sm.x.after.grams, I, m, lane).keep(z);
        for (int n = 0; n < heads; n++) {
            if (n) __syncthreads();
            /* else the compiler keeps addresses of words, and spills them */
            lane = (int)made_number(lane), I = (int)made_number(I);
            finish_triangles<K, SHARED, KEEPS>(sm, d, o, p, n, warp, I, m, lane,
                                               GramRow(sm.x.after.grams, I, m, lane));
            p.tile++;
        }
    } else {
        finish_triangles<K, SHARED, KEEPS>(sm, d, o, p, 0, warp, I, m, lane, z);
    }
}

template <int K, int V> struct Triangles {
    template <bool SHARED, bool KEEPS> static dp_status of(const Call &c, int heads) {
        auto kernel = c.p->d.g_bf16 ? k_triangles<K, BF16, SHARED, KEEPS>
                                    : k_triangles<K, WIDE_GATES, SHARED, KEEPS>;
        int bytes = (int)sizeof(TriangleSmem<K, SHARED>);
        dim3 grid = chunk_grid(c.p);
        grid.x /= heads;
        return launch(queue_of(c), "k_triangles", kernel, grid, CHUNK_THREADS, bytes, c.p->d, *c.t,
                      bare_out(c), heads);
    }
    static dp_status run(const Call &c) {
        const int heads = fast_heads_of_block(c.p);
        if (bare_out(c).L) return heads > 1 ? of<true, true>(c, heads) : of<false, true>(c, 1);
        return heads > 1 ? of<true, false>(c, heads) : of<false, false>(c, 1);
    }
};

template <int K, int V> struct ChunksOne {
    static dp_status run(const Call &c) {
        auto kernel = OF_FORMATS(formats_of(c.p->d), k_chunks_one, K, V);
        int bytes = (int)sizeof(OneSmem<K, V>);
        return launch(queue_of(c), "k_chunks_one", kernel, chunk_grid(c.p), CHUNK_THREADS, bytes,
                      c.p->d, *c.t, c.g ? c.g->dout : NULL, chunk_out(c));
    }
};

} // namespace

dp_status fast_chunks_one(const Call &c) {
    FAULT_TO_DEVICE(c.e, c.s);
    return c.p->bare ? by_widths<Triangles>(c) : by_widths<ChunksOne>(c);
}
