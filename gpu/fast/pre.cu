/* gpu/fast/pre.cu - the pre-process of the fast path: (M, H) of segments, K and V in {64, 128}, by
 * warpgroup products (wgmma, compute capability 9.0).
 *
 * From the last chunk of a segment to the first, P the product of the factors behind the chunk:
 *
 *   X = P kg'      H <- H + X u      P <- P o eC - X w      from P = I, H = 0; then M = P
 *
 * and H <- H + P s0 where a sequence starts with a state. Words of P below 2^-126 become zero. If P
 * is zero, which is checked every LOOK chunks, earlier chunks contribute nothing. Then M = 0, H is
 * complete, and those chunks are not read. An exception is a number that is not finite, since 0
 * times it is not zero. The kernels of a chunk mark it (`odd`), and all chunks are read.
 *
 * A plan without w and u (`bare.cuh`) multiplies X by T B, and uses Kgam for w and v for u. With
 * one gate a head it has no Kgam and kg either: both are made from raw rows of k.
 *
 * One block of K / 64 warpgroups a segment and head. A warpgroup has 64 rows of P, which stay in
 * registers. Its 64 rows of H stay in shared memory in the order of registers. A operands are rows
 * of P and X from registers (a warp has 16). B operands are w, kg and u from shared memory, in
 * swizzled layouts of the tensor cores. Tiles arrive in STAGES stages on mbarriers.
 *
 * w and kg are bf16. P and X go in three bf16 pieces, so that all operands are exact to 2^-24, for
 * 3 products instead of 1. Only X of H is rounded. The accumulator of a tensor core rounds toward
 * zero. The leading products of every two k-steps start from zero and are added on the CUDA cores.
 * The two small ones, where that does not matter, are added in the tensor core.
 *
 * Phases of a chunk, and what shared memory holds:
 *
 *   look    every LOOK chunks: is anything left of P       H
 *   keys    (bare, one gate) of_k o K, to_end o K          k; Kgam for k, kg
 *   X       P kg' in three pieces                          kg of the stage
 *   T       (bare) X T B in three pieces, in place of X    T B
 *   load    first warps: the chunk STAGES - 1 on           the stage of the chunk before
 *   H       H + X u, 64 columns at a time                  u; H read and written again
 *   P       P o eC - X w                                   w eC
 *
 * Chunks of a plan without w and u mark nothing of v, since they do not read it. On one rank
 * spoil.cu, after the pass, brings values that are not finite from skipped chunks to later
 * segments. On several ranks the message must hold them, and the skipped rows of v are checked
 * here, once. */
#include "fast/pre.cuh"
#include <limits.h>

namespace {

#define STAGES 3

/* Data of a plan without w and u alone: T B of a chunk and of the next, on barriers of their own;
 * factors. */
template <Form FORM> struct Extra {
    bf16 TB[2][C * C];
    uint64_t full[2];
};
template <> struct Extra<MADE> {};
template <> struct Extra<GIVEN> : Extra<DECAYED> { StateFactors factors[STAGES]; };
template <int K, int V, Form FORM> struct PreSmem {
    static const int DECAYS = FORM == GIVEN ? 2 : STAGES; /* made, or they come */
    bf16 w[STAGES][C * K], kg[STAGES][C * K]; /* 1,024-byte aligned, as the swizzle wants */
    bf16 u[STAGES][C * V];                    /* SLICES; in a plan without w and u ROWS */
    Extra<FORM> bare;
    float4 H[V / 8][2 * K]; /* a thread's own words: n-tile n of its fragments at [n][thread] */
    float eC[DECAYS][K];    /* of chunk i at [i % DECAYS] */
    uint64_t full[STAGES], empty[STAGES];
};

/* ---- P --------------------------------------------------------------------------------------- */

/* An A fragment (n-tiles a, b of an accumulator) in three pieces. */
__device__ __forceinline__ void split_fragment(uint32_t f[3][4], const float a[4],
                                               const float b[4]) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const float *z = e < 2 ? a + 2 * e : b + 2 * e - 4;
        split3(z[0], z[1], f[0][e], f[1][e], f[2][e]);
    }
}

/* The products of two k-steps, one call each (`odd`: the second). The leading ones are added in z,
 * then sum += z (= if first); A is in three pieces. The call of between() overlaps with the tensor
 * cores. On return the small sums may still be running. */
template <int T, class F>
__device__ __forceinline__ void mul3(float (*sum)[4], float (*z)[4], float (*small)[4],
                                     const uint32_t a[3][4], uint64_t b, bool first, bool odd,
                                     F between) {
    wg_fence();
    wg_mul<T>(z, a[0], b, !odd);
    wg_commit();
    wg_mul<T>(small, a[1], b, first && !odd);
    wg_mul<T>(small, a[2], b, false);
    wg_commit();
    between();
    if (!odd) return;
    wg_wait<1>(z);
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            sum[n][e] = first ? z[n][e] : sum[n][e] + z[n][e];
}

/* The mean of what rounding toward zero took from the sums, relative to them. Measured on an H200
 * with reflect factors: the error of M after 1,024 chunks (K = 64) and 512 (K = 128). A correction
 * of 1.1e-8 gives 2.1e-5 and 8.6e-6, of 1.6e-8 1.3e-5 and 5.5e-6. A correction of 2.1e-8 gives
 * 4.9e-6 and 2.9e-6, of 2.6e-8 7.1e-6 and 2.7e-6. The drift is linear in the chunks, and its zero
 * lies at 2.3e-8 for both (4.1e-6 and 2.7e-6). It was at 1.1e-8 where every leading product started
 * from zero. Less than the tf32 products of chain/factors.cu lose: products of bf16 are short, and
 * their sums often exact. */
#define RZ_LOSS 2.3e-8f
__device__ __forceinline__ float whole_sum(float sum, float small) {
    return sum + fmaf(sum, RZ_LOSS, small);
}
/* 16 rows of sums for 64 tokens, made whole, as A fragments in three pieces. */
__device__ __forceinline__ void split_sums(uint32_t xa[4][3][4], float y[8][4],
                                           const float ys[8][4]) {
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            y[n][e] = whole_sum(y[n][e], ys[n][e]);
#pragma unroll
    for (int p = 0; p < 4; p++)
        split_fragment(xa[p], y[2 * p], y[2 * p + 1]);
}
/* xa, 16 rows of X for 64 tokens, A fragments in three pieces, times T B (ROWS), in place. */
__device__ __forceinline__ void times_T(uint32_t xa[4][3][4], const bf16 *TB) {
    uint64_t td = rows_desc(TB, 64);
    float y[8][4], ys[8][4], z[8][4];
#pragma unroll
    for (int p = 0; p < 4; p++)
        mul3<1>(y, z, ys, xa[p], td + p * (HALF / 4), p < 2, p % 2, [] {});
    wg_wait<0>(ys);
    split_sums(xa, y, ys);
}
/* One chunk: P <- P o eC - X w of 16 rows of a warp. First with_x(X) may replace X, A fragments of
 * 16 tokens in three pieces. */
template <int K, class F>
__device__ __forceinline__ void step_p(float P[K / 8][4], const bf16 *kg, const bf16 *w,
                                       const float *eC, int lane, F with_x) {
    uint64_t kd = rows_desc(kg, 1), wd = rows_desc(w, 64);
    uint32_t xa[4][3][4];
    {
        float x[8][4], xs[8][4], z[8][4];
        uint32_t a[2][3][4];
        split_fragment(a[0], P[0], P[1]);
#pragma unroll
        for (int kk = 0; kk < K / 16; kk++)
            mul3<0>(x, z, xs, a[kk % 2], kd + kk / 4 * HALF + kk % 4 * 2, kk < 2, kk % 2, [&] {
                if (kk + 1 < K / 16) {
                    wg_wait<2>(); /* the products that read a[(kk + 1) % 2] */
                    split_fragment(a[(kk + 1) % 2], P[2 * kk + 2], P[2 * kk + 3]);
                }
            });
        wg_wait<0>(xs);
        split_sums(xa, x, xs);
    }
    with_x(xa);
#pragma unroll
    for (int j = 0; j < K / 64; j++) {
        float y[8][4], ys[8][4], z[8][4];
#pragma unroll
        for (int p = 0; p < 4; p++)
            mul3<1>(y, z, ys, xa[p], wd + j * HALF + p * (HALF / 4), p < 2, p % 2, [] {});
        wg_wait<0>(ys);
#pragma unroll
        for (int n = 0; n < 8; n++) {
            float2 f = *(const float2 *)(eC + (8 * j + n) * 8 + lane % 4 * 2);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float &s = P[8 * j + n][e];
                s = fma_ftz(e % 2 ? f.y : f.x, s, -whole_sum(y[n][e], ys[n][e]));
            }
        }
    }
}

/* ---- H --------------------------------------------------------------------------------------- */

/* H += X u of the thread's words, X rounded. The sum over tokens starts from zero and is added in
 * fp32. */
template <int V, bool IN_ROWS>
__device__ __forceinline__ void add_to_h(float4 *H, int pitch, const uint32_t xa[4][3][4],
                                         const bf16 *u) {
    float y[V / 64][8][4];
    wg_fence();
#pragma unroll
    for (int g = 0; g < V / 64; g++) {
#pragma unroll
        for (int p = 0; p < 4; p++)
            wg_mul<1>(y[g], xa[p][0],
                      IN_ROWS ? rows_desc(u, 64) + g * HALF + p * (HALF / 4)
                              : slice_desc(u + g * C * 64, 16 * p, C),
                      p == 0);
        wg_commit();
    }
#pragma unroll
    for (int g = 0; g < V / 64; g++) {
        float4 h[8];
#pragma unroll
        for (int n = 0; n < 8; n++)
            h[n] = H[(g * 8 + n) * pitch];
        if (g + 1 < V / 64)
            wg_wait<1>(y[g]);
        else
            wg_wait<0>(y[g]);
#pragma unroll
        for (int n = 0; n < 8; n++)
            H[(g * 8 + n) * pitch] = make_float4(h[n].x + y[g][n][0], h[n].y + y[g][n][1],
                                                 h[n].z + y[g][n][2], h[n].w + y[g][n][3]);
    }
}

/* H += P s0 of the thread's words, in fp32; rows: the warp's 16 of P in shared memory. */
template <int K, int V>
__device__ __forceinline__ void add_initial(float4 *H, int pitch, const float *rows,
                                            const float *s0, int lane) {
    const float *row = rows + lane / 4 * K, *from = s0 + lane % 4 * 2;
#pragma unroll 1
    for (int g = 0; g < V / 64; g++) {
        float4 h[8];
#pragma unroll
        for (int n = 0; n < 8; n++)
            h[n] = H[(g * 8 + n) * pitch];
#pragma unroll 1
        for (int k = 0; k < K; k++) {
            float p = row[k], q = row[8 * K + k];
#pragma unroll
            for (int n = 0; n < 8; n++) {
                const float *s = from + k * V + g * 64 + n * 8;
                h[n] = make_float4(fmaf(p, s[0], h[n].x), fmaf(p, s[1], h[n].y),
                                   fmaf(q, s[0], h[n].z), fmaf(q, s[1], h[n].w));
            }
        }
#pragma unroll
        for (int n = 0; n < 8; n++)
            H[(g * 8 + n) * pitch] = h[n];
    }
}

/* ---- w and u of a plan that stores none ------------------------------------------------------ */

/* Kgam in place of k, and kg, each a piece of 16 bytes a thread at once; eC in all channels. */
template <int K>
__device__ __forceinline__ void decay_keys(bf16 *k, bf16 *kg, float *eC, const StateFactors &f) {
    const int PIECES = K / 8;
#pragma unroll
    for (int x = threadIdx.x; x < C * PIECES; x += 2 * K) {
        int row = x / PIECES, at = rows_at(row, x % PIECES);
        float of_k = f.of_k[row], to_end = f.to_end[row];
        uint4 given = *(const uint4 *)(k + at), to_start, on;
        const uint32_t *from = (const uint32_t *)&given;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float2 y = unpack2(from[i]);
            ((uint32_t *)&to_start)[i] = pack2(y.x * of_k, y.y * of_k);
            ((uint32_t *)&on)[i] = pack2(y.x * to_end, y.y * to_end);
        }
        *(uint4 *)(k + at) = to_start;
        *(uint4 *)(kg + at) = on;
    }
    if (threadIdx.x < K) eC[threadIdx.x] = f.chunk[0];
    __syncthreads();
}
/* ---- the kernel ------------------------------------------------------------------------------ */

/* Warps that load a chunk. The first loads tiles; in a plan without w and u all of them load raw
 * rows.
 */
#define LOADERS(FORM) ((FORM) == MADE ? 1 : 4)
/* Tiles of chunk i of a segment from its end. */
template <int K, int V, Form FORM>
__device__ __forceinline__ void load_tiles(PreSmem<K, V, FORM> &sm, const PreArgs &a, int64_t tile,
                                           int i, uint64_t *full, int lane) {
    const int KEYS = C * K * 2, VALUES = C * V * 2, ENDS = K * 4, FACTORS = sizeof(StateFactors);
    int to = i % STAGES;
    fill_begin(full, FORM == GIVEN ? FACTORS : 2 * KEYS + ENDS + (FORM == MADE ? VALUES : 0), lane);
    if constexpr (FORM == GIVEN) {
        fill(&sm.bare.factors[to], &a.factors[tile].state, FACTORS, full, lane);
    } else {
        fill(sm.kg[to], a.kg + tile * C * K, KEYS, full, lane);
        fill(sm.w[to], a.w + tile * C * K, KEYS, full, lane);
        fill(sm.eC[to], a.eC + tile * K, ENDS, full, lane);
    }
    if constexpr (FORM == MADE) fill(sm.u[to], a.u + tile * C * V, VALUES, full, lane);
}
/* All of it but T B, by the first warps; its stage is free. */
template <int K, int V, Form FORM>
__device__ __forceinline__ void load_chunk(PreSmem<K, V, FORM> &sm, const Dims &d, const PreArgs &a,
                                           const Seq &seq, int hv, int i, int warp, int lane) {
    int to = i % STAGES, chunk = seq.c1 - 1 - i, h = hv / d.G;
    uint64_t *full = &sm.full[to];
    if (warp == 0) load_tiles(sm, a, (int64_t)chunk * d.HV + hv, i, full, lane);
    if (FORM == MADE) return fill_end(full, lane);
    Chunk c = d.chunk[chunk];
    fill_rows<V>(sm.u[to], a.u + (c.t0 * d.HV + hv) * V, d.HV * V, c.len, warp, lane);
    if (FORM == GIVEN)
        fill_rows<K>(sm.w[to], a.w + (c.t0 * d.H + h) * K, d.H * K, c.len, warp, lane);
    fill16_end(full, lane);
}
/* T B of chunk i, by warp 0; nobody reads that of chunk i - 2 any more. */
template <int K, int V, Form FORM>
__device__ __forceinline__ void load_TB(PreSmem<K, V, FORM> &sm, const Dims &d, const PreArgs &a,
                                        const Seq &seq, int hv, int i, int lane) {
    const int SQUARE = C * C * 2;
    uint64_t *full = &sm.bare.full[i % 2];
    fill_begin(full, SQUARE, lane);
    fill(sm.bare.TB[i % 2], a.TB + ((int64_t)(seq.c1 - 1 - i) * d.HV + hv) * C * C, SQUARE, full,
         lane);
    fill_end(full, lane);
}
/* Loads the chunk that replaces chunk i - 1, when all are done with that one. */
template <int K, int V, Form FORM>
__device__ __forceinline__ void load_behind(PreSmem<K, V, FORM> &sm, const Dims &d,
                                            const PreArgs &a, const Seq &seq, int hv, int i, int n,
                                            int warp, int lane) {
    if (i) bar_wait(&sm.empty[(i - 1) % STAGES], (i - 1) / STAGES & 1);
    if constexpr (FORM != MADE)
        if (warp == 0 && i + 1 < n) load_TB(sm, d, a, seq, hv, i + 1, lane);
    if (i + STAGES - 1 < n) load_chunk(sm, d, a, seq, hv, i + STAGES - 1, warp, lane);
}

template <int K, int V, Form FORM>
__global__ void __launch_bounds__(2 * K, 1) k_pre(Dims d, PreArgs a) {
    extern __shared__ __align__(1024) char raw[];
    PreSmem<K, V, FORM> &sm = *(PreSmem<K, V, FORM> *)raw;
    int hv = blockIdx.x % d.HV, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    await_grid();
    Seq seq = d.seq[a.seq0 + blockIdx.x / d.HV];
    if (seq.ends) return; /* nobody asks */
    const float *s0 = seq.starts && a.s0 ? a.s0 + ((int64_t)seq.gseq * d.HV + hv) * K * V : NULL;
    float4 *H = &sm.H[0][threadIdx.x];
    float P[K / 8][4];
    int n = seq.c1 - seq.c0, i = 0;
    bool looks = true, loads = warp < LOADERS(FORM);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            bar_init(&sm.full[i], FORM == MADE ? FULL_COUNT : FULL_COUNT_16(LOADERS(FORM)));
            bar_init(&sm.empty[i], EMPTY_COUNT(K / 16));
        }
        if constexpr (FORM != MADE)
            for (int i = 0; i < 2; i++)
                bar_init(&sm.bare.full[i], FULL_COUNT);
        bar_init_end();
    }
    __syncthreads();
    for (int i = 0; loads && i < STAGES - 1 && i < n; i++)
        load_chunk(sm, d, a, seq, hv, i, warp, lane);
    if constexpr (FORM != MADE)
        if (warp == 0) load_TB(sm, d, a, seq, hv, 0, lane);
    words<K>(lane, [&](int j, int e, int r, int k) { P[j][e] = k == warp * 16 + r; });
#pragma unroll
    for (int n = 0; n < V / 8; n++)
        H[n * 2 * K] = make_float4(0.f, 0.f, 0.f, 0.f);
    for (; i < n; i++) {
        int at = i % STAGES;
        float *eC = sm.eC[i % sm.DECAYS];
        if (looks && i && i % LOOK == 0 && !is_left<K>(P, lane)) {
            int c1 = seq.c1 - i;
            bool odd = is_odd(d, a.odd, ODD_DO, seq.c0, c1, hv, s0);
            if (FORM != MADE && !odd)
                odd = __syncthreads_or(odd_in_rows<V>(d, a.u, seq.c0, c1, hv, 2 * K) != 0);
            if (!odd) break;
            looks = false;
        }
        bar_wait(&sm.full[at], i / STAGES & 1);
        if constexpr (FORM == GIVEN) decay_keys<K>(sm.w[at], sm.kg[at], eC, sm.bare.factors[at]);
        step_p<K>(P, sm.kg[at], sm.w[at], eC, lane, [&](uint32_t xa[4][3][4]) {
            if constexpr (FORM != MADE) {
                bar_wait(&sm.bare.full[i % 2], i / 2 & 1);
                if (!FAULT(PRE_KGAM)) times_T(xa, sm.bare.TB[i % 2]);
            }
            /* here the other warpgroup is likely to be done with the chunk before, whose stage
             * this takes */
            if (loads) load_behind(sm, d, a, seq, hv, i, n, warp, lane);
            __syncwarp();
            add_to_h<V, FORM != MADE>(H, 2 * K, xa, sm.u[at]);
        });
        __syncwarp();
        bar_arrive_warp(&sm.empty[at], lane);
    }
    for (int x = i; x < n && x < i + STAGES - 1; x++) /* still being loaded */
        bar_wait(&sm.full[x % STAGES], x / STAGES & 1);
    if constexpr (FORM != MADE)
        if (i < n) bar_wait(&sm.bare.full[i % 2], i / 2 & 1);
    if (i == n && s0) {
        float *rows = (float *)sm.w + warp * 16 * K;
        __syncthreads();
        words<K>(lane, [&](int j, int e, int r, int k) { rows[r * K + k] = P[j][e]; });
        __syncwarp();
        add_initial<K, V>(H, 2 * K, rows, s0, lane);
    }
    int64_t head = (int64_t)seq.part * d.HV + hv, row = head * K + warp * 16;
    if (a.reach && threadIdx.x < HALVES_OF_M) a.reach[head * HALVES_OF_M + threadIdx.x] = i;
    bool has_m = seq.part >= a.m_from && !seq.starts;
    float *out = a.hm + row * (V + K);
    float *keep = a.keep && has_m ? a.keep + (row - (int64_t)a.m_from * d.HV * K) * K : NULL;
    words<V>(lane, [&](int j, int e, int r, int v) {
        out[r * (V + K) + v] = ((const float *)&H[j * 2 * K])[e];
    });
    words<K>(lane, [&](int j, int e, int r, int k) {
        if (has_m) out[r * (V + K) + V + k] = P[j][e];
        if (keep) keep[r * K + k] = P[j][e];
    });
}

/* ---- how far back gradients reach ------------------------------------------------------------ */

/* The parts of a backward. m: their kept M, from part m_part on. */
struct ReachArgs {
    const bf16 *w, *kg;
    const float *eC, *m, *given;
    const int *odd;
    int *reach; /* [part][HV]: chunks from a part's first one on that its dH depends on */
    int seq0, m_part;
};
template <int K> struct ReachSmem {
    bf16 w[STAGES][C * K], kg[STAGES][C * K];
    float eC[STAGES][K];
    uint64_t full[STAGES], empty[STAGES];
};

/* Chunk i of a part by warp 0. */
template <int K>
__device__ __forceinline__ void load_factor(ReachSmem<K> &sm, const Dims &d, const ReachArgs &a,
                                            const Seq &seq, int hv, int i, int lane) {
    int to = i % STAGES;
    int64_t tile = (int64_t)(seq.c0 + i) * d.HV + hv;
    uint64_t *full = &sm.full[to];
    if (i >= STAGES) bar_wait(&sm.empty[to], (i / STAGES - 1) & 1);
    fill_begin(full, 2 * K * C * 2 + K * 4, lane);
    fill(sm.w[to], a.w + tile * C * K, C * K * 2, full, lane);
    fill(sm.kg[to], a.kg + tile * C * K, C * K * 2, full, lane);
    fill(sm.eC[to], a.eC + tile * K, K * 4, full, lane);
    fill_end(full, lane);
}

/* dH of a part is a sum over its chunks: each chunk's term times the factors before it, transposed.
 * P' <- eC o P' - (P' w') kg is the product of the factors from the first chunk on. If the product
 * is zero, which is checked every LOOK chunks, later chunks contribute nothing. The kernel tries
 * half of the chunks of a part if the forward found its M to be zero. A last part has no M; there M
 * of the part before decides. */
template <int K> __global__ void __launch_bounds__(2 * K, 1) k_reach(Dims d, ReachArgs a) {
    extern __shared__ __align__(1024) char raw[];
    ReachSmem<K> &sm = *(ReachSmem<K> *)raw;
    int hv = blockIdx.x % d.HV, warp = threadIdx.x / 32, lane = threadIdx.x % 32, i = 0;
    int at_seq = a.seq0 + blockIdx.x / d.HV;
    await_grid();
    Seq seq = d.seq[at_seq];
    if (seq.starts) { /* nobody asks */
        if (threadIdx.x == 0) a.reach[(int64_t)seq.part * d.HV + hv] = 0;
        return;
    }
    int n = seq.c1 - seq.c0, tried = n / 2, hint = seq.part - seq.ends - a.m_part;
    bool hints = !(seq.ends && d.seq[at_seq - 1].starts);
    const float *m = a.m + ((int64_t)hint * d.HV + hv) * K * K;
    bool there = false, left = true;
    for (int x = threadIdx.x; hints && x < K * K; x += 2 * K)
        there |= m[x] != 0.f;
    if (__syncthreads_or(there)) tried = 0;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            bar_init(&sm.full[i], FULL_COUNT);
            bar_init(&sm.empty[i], EMPTY_COUNT(K / 16));
        }
        bar_init_end();
    }
    __syncthreads();
    for (int i = 0; warp == 0 && i < STAGES - 1 && i < tried; i++)
        load_factor<K>(sm, d, a, seq, hv, i, lane);
    float P[K / 8][4];
    words<K>(lane, [&](int j, int e, int r, int k) { P[j][e] = k == warp * 16 + r; });
    for (; i < tried; i++) {
        int at = i % STAGES;
        if (i && i % LOOK == 0 && !(left = is_left<K>(P, lane))) break;
        bar_wait(&sm.full[at], i / STAGES & 1);
        step_p<K>(P, sm.w[at], sm.kg[at], sm.eC[at], lane, [&](uint32_t(*)[3][4]) {
            if (warp == 0 && i + STAGES - 1 < tried)
                load_factor<K>(sm, d, a, seq, hv, i + STAGES - 1, lane);
            __syncwarp();
        });
        __syncwarp();
        bar_arrive_warp(&sm.empty[at], lane);
    }
    for (int x = i; x < tried && x < i + STAGES - 1; x++)
        bar_wait(&sm.full[x % STAGES], x / STAGES & 1);
    if (left && tried) left = is_left<K>(P, lane);
    const float *given =
        seq.ends && a.given ? a.given + ((int64_t)seq.gseq * d.HV + hv) * K * d.V : NULL;
    if (left || is_odd(d, a.odd, ODDS, seq.c0 + i, seq.c1, hv, given)) i = n;
    if (threadIdx.x == 0) a.reach[(int64_t)seq.part * d.HV + hv] = i;
}

/* ---- host ------------------------------------------------------------------------------------ */

template <int K, int V> struct Pre {
    static dp_status run(const Call &c, PreArgs a, int nseg) {
        if (!c.p->bare) return of<MADE>(c, a, nseg);
        return c.p->d.Kg == 1 ? of<GIVEN>(c, a, nseg) : of<DECAYED>(c, a, nseg);
    }
    template <Form FORM> static dp_status of(const Call &c, const PreArgs &a, int nseg) {
        auto kernel = k_pre<K, V, FORM>;
        int bytes = (int)sizeof(PreSmem<K, V, FORM>);
        return launch(queue_of(c), "k_pre", kernel, (unsigned)nseg * c.p->d.HV, 2 * K, bytes,
                      c.p->d, a);
    }
};

static_assert(sizeof(PreSmem<128, 128, DECAYED>) <= 227 * 1024, "a block on 9.0");
static_assert(sizeof(PreSmem<128, 128, GIVEN>) <= 227 * 1024, "a block on 9.0");

template <int K> dp_status reach(const Call &c, const ReachArgs &a) {
    const dpg_plan *p = c.p;
    int bytes = (int)sizeof(ReachSmem<K>);
    return launch(queue_of(c), "k_reach", k_reach<K>, (unsigned)(p->parts - p->is_first) * p->d.HV,
                  2 * K, bytes, p->d, a);
}

} // namespace

/* Code for 9.0a must be there, which a driver does not make of PTX for older devices. */
int fast_augments(const Device *dev) {
    cudaFuncAttributes a;
    return dev->major == 9 && cudaFuncGetAttributes(&a, k_pre<64, 64, MADE>) == cudaSuccess &&
           a.ptxVersion >= 90;
}

/* H, and M if this path makes it, of every segment whose end state or M is read. These are all, but
 * the last one where nothing follows. M is not made of the segment that starts the sequence. */
dp_status fast_pre(const Call &c) {
    if (!fast_augments(&c.p->device) || came(c)) return fast_pre_states(c);
    const dpg_plan *p = c.p;
    FAULT_TO_DEVICE(c.e, c.s);
    PreArgs a = {};
    a.w = !p->bare ? at<bf16>(c, B_W) : p->d.Kg == 1 ? (const bf16 *)c.t->k : at<bf16>(c, B_KGAM);
    a.kg = at<bf16>(c, B_KG);
    a.u = p->bare ? (const bf16 *)c.t->v : at<bf16>(c, B_U);
    a.TB = at<bf16>(c, B_TB);
    a.factors = at<BareFactors>(c, B_FACTORS);
    a.eC = at<float>(c, B_EC);
    a.s0 = c.t->s0;
    a.odd = at<int>(c, B_ODD);
    a.reach = at<int>(c, B_REACH);
    a.hm = at<float>(c, p->nseg > 1 ? B_SEG : B_HM);
    a.keep = p->saved_parts && c.t->saved ? saved_part_m(p, c.t) : NULL;
    a.seq0 = p->pre0;
    a.m_from = p->opt.chain_how == DPG_CHAIN_AUGMENTED ? p->whole : INT_MAX;
    return pre_is_rounded(p) ? fast_pre_own(c, a) : by_widths<Pre>(c, a, p->npre);
}

/* All parts but the first one of a sequence, whose dH nobody asks for. */
dp_status fast_reach(const Call &c, int *to) {
    const dpg_plan *p = c.p;
    ReachArgs a = {};
    a.w = at<bf16>(c, B_W);
    a.kg = at<bf16>(c, B_KG);
    a.eC = at<float>(c, B_EC);
    a.m = saved_part_m(p, c.t);
    a.given = c.g->dfinal_state;
    a.odd = at<int>(c, B_ODD);
    a.reach = to;
    a.seq0 = p->nwhole + p->is_first;
    a.m_part = p->m_part;
    return p->d.K == 64 ? reach<64>(c, a) : reach<128>(c, a);
}
