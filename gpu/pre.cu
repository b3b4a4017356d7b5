/* gpu/pre.cu - the pre-process of the fast path: (M, H) of segments, K and V in {64, 128}, by warpgroup products (wgmma).
 *
 *   M <- eC o M - kg' (w M)         from the identity: augmented columns, fp32-grade
 *   H <- eC o H + kg' (u - w H)     from the initial state: bf16 operands, as the state pass of fast.cu
 *
 * One block of max(K, V) / 64 warpgroups a segment and head; a warpgroup has 64 columns of M, which stay in registers, and of H, which stay in shared memory as
 * they stand in registers (K != V: the second warpgroup has columns of the wider one alone). Written transposed, S' [64 columns][K] and X' [64 columns][64 tokens]
 * are the A operands from registers (a warp has 16 columns, in the fragments of mma.cuh), w and kg the B operands from shared memory in the 128-byte swizzle,
 * [K/64][64 tokens][64 channels]: the rows of a tile lie in global memory in that swizzle half by half (tile_at), and a tensor map takes the halves apart.
 * Tiles come in STAGES stages on mbarriers; M and H share them.
 *
 * w and kg are bf16 as they stand; M and its X go in three bf16 pieces, so that all operands are exact to 2^-24, for 3 products instead of 1. The
 * accumulator of a tensor core rounds toward zero: the leading products of every two k-steps start from zero and are added on the CUDA cores while the two
 * small ones, where that does not matter, add up in the tensor core. */
#include <cuda.h>
#include <cudaTypedefs.h>
#include "mma.cuh"

#define C DP_CHUNK
#define STAGES 3
#define HALF (C * 128 / 16)                              /* 64 tokens of 64 channels, in units of 16 bytes */

struct PreArgs {
    const bf16 *w, *kg, *u;
    const float *eC, *s0;
    float *hm, *keep;                                    /* keep: M alone once more, [segment - m_from][HV][D][D], for the backward; or NULL */
    int seq0, m_from;                                    /* the first segment in Dims.seq; segments from m_from on make M */
};

template <int K, int V> struct PreSmem {
    bf16 w[STAGES][C * K], kg[STAGES][C * K];            /* 1,024-byte aligned, as the swizzle wants */
    bf16 u[STAGES][C * V];
    float4 H[V / 64][K / 8][128];                        /* a thread's own words of H: n-tile j of its fragments at [j][thread] */
    float eC[STAGES][K];
    uint64_t full[STAGES], empty[STAGES];
};

/* ---- warpgroup instructions --------------------------------------------------------------------------------------------------------- */

/* Descriptor of 64 rows of 128 bytes, 128-byte swizzle; `lead` matters to no product of 64 columns. */
__device__ __forceinline__ uint64_t tile_desc(const bf16 *tile, int lead)
{
    return (uint64_t)(saddr(tile) >> 4) | (uint64_t)lead << 16 | (uint64_t)64 << 32 | (uint64_t)1 << 62;
}
__device__ __forceinline__ void wg_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wg_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wg_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory"); }

#define R4(x) "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])
#define R32(d) R4(d[0]), R4(d[1]), R4(d[2]), R4(d[3]), R4(d[4]), R4(d[5]), R4(d[6]), R4(d[7])

/* All but the last N groups have ended, and d may be read: as operands its words cannot be read before. */
template <int N> __device__ __forceinline__ void wg_wait(float (*d)[4])
{
    wg_wait<N>();
    asm volatile("" : R32(d) :: "memory");
}
/* d = A B if first, else d += A B: 64 rows, 64 columns, 16 deep. T: B is [16][64] in memory, else [64][16]. */
template <int T> __device__ __forceinline__ void wg_mul(float (*d)[4], const uint32_t a[4], uint64_t b, bool first)
{
    asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, %38, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, p, 1, 1, %37;\n}"
        : R32(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(T), "r"((int)first));
}

/* One tile of rows, whose halves of 64 channels go apart. */
template <int K> __device__ __forceinline__ void copy_tile(bf16 *dst, const CUtensorMap *map, const bf16 *tiles, int64_t tile, uint64_t *full)
{
#ifdef DPG_PLAIN_LOADS
    for (int x = 0; x < C * K / 8; x++)
        ((uint4 *)dst)[(x % (K / 8) / 8 * C + x / (K / 8)) * 8 + x % 8] = ((const uint4 *)(tiles + tile * C * K))[x];
    async_fence();
#else
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %2, %2, %3}], [%4];"
                 :: "r"(saddr(dst)), "l"(map), "r"(0), "r"((int)tile), "r"(saddr(full)) : "memory");
#endif
}

/* ---- M ------------------------------------------------------------------------------------------------------------------------------ */

/* x = hi + mid + lo, each bf16, of a pair; exact to 2^-24 or better. */
__device__ __forceinline__ void split3(float a, float b, uint32_t &h, uint32_t &m, uint32_t &l)
{
    h = pack2(a, b);
    float2 y = unpack2(h);
    a -= y.x, b -= y.y;
    m = pack2(a, b);
    y = unpack2(m);
    l = pack2(a - y.x, b - y.y);
}

/* An A fragment (n-tiles a, b of an accumulator) in three pieces. */
__device__ __forceinline__ void split_fragment(uint32_t f[3][4], const float a[4], const float b[4])
{
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const float *z = e < 2 ? a + 2 * e : b + 2 * e - 4;
        split3(z[0], z[1], f[0][e], f[1][e], f[2][e]);
    }
}

/* The products of two k-steps, one call each (odd: the second): the leading ones add up in z, then sum += z (= if first); A in three pieces. `between` is done while the tensor cores
 * work. On return the small sums are on their way. */
template <int T, class F> __device__ __forceinline__ void mul3(float (*sum)[4], float (*z)[4], float (*small)[4], const uint32_t a[3][4], uint64_t b, bool first, bool odd, F between)
{
    wg_fence();
    wg_mul<T>(z, a[0], b, !odd);
    wg_commit();
    wg_mul<T>(small, a[1], b, first && !odd);
    wg_mul<T>(small, a[2], b, false);
    wg_commit();
    between();
    if (!odd)
        return;
    wg_wait<1>(z);
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            sum[n][e] = first ? z[n][e] : sum[n][e] + z[n][e];
}

/* The mean of what rounding toward zero took from the sums, relative to them. Measured on an H200 with reflect factors, error of M after 1,024 chunks (K = 64) and 512 (K = 128), giving back
 * 1.1e-8: 2.1e-5 and 8.6e-6, 1.6e-8: 1.3e-5 and 5.5e-6, 2.1e-8: 4.9e-6 and 2.9e-6, 2.6e-8: 7.1e-6 and 2.7e-6: a drift linear in the chunks whose zero lies at 2.3e-8 for both (4.1e-6
 * and 2.7e-6). It was at 1.1e-8 where every leading product started from zero. Less than the tf32 products of chain.cu lose: products of bf16 are short, and their sums often exact. */
#define RZ_LOSS 2.3e-8f
__device__ __forceinline__ float whole_sum(float sum, float small) { return sum + fmaf(sum, RZ_LOSS, small); }
__device__ __forceinline__ float fma_ftz(float a, float b, float c)
{
    float y;
    asm("fma.rn.ftz.f32 %0, %1, %2, %3;" : "=f"(y) : "f"(a), "f"(b), "f"(c));
    return y;
}

/* One chunk of M. */
template <int K> __device__ __forceinline__ void step_m(float S[K / 8][4], const bf16 *w, const bf16 *kg, const float *eC, int lane)
{
    uint64_t wd = tile_desc(w, 1), kd = tile_desc(kg, 64);
    uint32_t xa[4][3][4];
    {
        float x[8][4], xs[8][4], z[8][4];
        uint32_t a[2][3][4];
        split_fragment(a[0], S[0], S[1]);
#pragma unroll
        for (int kk = 0; kk < K / 16; kk++)
            mul3<0>(x, z, xs, a[kk % 2], wd + kk / 4 * HALF + kk % 4 * 2, kk < 2, kk % 2, [&] {
                if (kk + 1 < K / 16) {
                    wg_wait<2>();                        /* the products that read a[(kk + 1) % 2] */
                    split_fragment(a[(kk + 1) % 2], S[2 * kk + 2], S[2 * kk + 3]);
                }
            });
        wg_wait<0>(xs);
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                x[n][e] = whole_sum(x[n][e], xs[n][e]);
#pragma unroll
        for (int p = 0; p < 4; p++)
            split_fragment(xa[p], x[2 * p], x[2 * p + 1]);
    }
#pragma unroll
    for (int j = 0; j < K / 64; j++) {
        float y[8][4], ys[8][4], z[8][4];
#pragma unroll
        for (int p = 0; p < 4; p++)
            mul3<1>(y, z, ys, xa[p], kd + j * HALF + p * (HALF / 4), p < 2, p % 2, [] {});
        wg_wait<0>(ys);
#pragma unroll
        for (int n = 0; n < 8; n++) {
            float2 f = *(const float2 *)(eC + (8 * j + n) * 8 + lane % 4 * 2);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float &s = S[8 * j + n][e];
                s = fma_ftz(e % 2 ? f.y : f.x, s, -whole_sum(y[n][e], ys[n][e]));
            }
        }
    }
}

/* ---- H ------------------------------------------------------------------------------------------------------------------------------ */

/* One chunk of H, the thread's words of which are 128 apart; u: the warp's slice of 16 columns. They are read at once and stay in registers for the chunk: read
 * one by one where they are used, each waits for itself. The sum over tokens starts from zero and is added in fp32. */
template <int K> __device__ __forceinline__ void step_h(float4 *H, const bf16 *w, const bf16 *kg, const bf16 *u, const float *eC, int lane)
{
    uint64_t wd = tile_desc(w, 1), kd = tile_desc(kg, 64);
    uint32_t a[K / 16][4], xa[4][4], r[4][4];
    float4 h[K / 8];
    float x[8][4], y[K / 64][8][4];
    int row = lane / 16 * 8 + lane % 8, piece = lane / 8 % 2 ^ (row >> 2 & 1);
#pragma unroll
    for (int j = 0; j < K / 8; j++)
        h[j] = H[j * 128];
#pragma unroll
    for (int j = 0; j < K / 8; j++) {
        a[j / 2][j % 2 * 2] = pack2(h[j].x, h[j].y);
        a[j / 2][j % 2 * 2 + 1] = pack2(h[j].z, h[j].w);
    }
    wg_fence();
#pragma unroll
    for (int kk = 0; kk < K / 16; kk++)
        wg_mul<0>(x, a[kk], wd + kk / 4 * HALF + kk % 4 * 2, kk == 0);
    wg_commit();
#pragma unroll
    for (int p = 0; p < 4; p++)
        ldsm4t(r[p], saddr(u + (p * 16 + row) * 16 + piece * 8));
    wg_wait<0>(x);
#pragma unroll
    for (int p = 0; p < 4; p++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float2 v = unpack2(r[p][e]);
            const float *xx = x[2 * p + e / 2] + e % 2 * 2;
            xa[p][e] = pack2(v.x - xx[0], v.y - xx[1]);
        }
    wg_fence();
#pragma unroll
    for (int j = 0; j < K / 64; j++) {
#pragma unroll
        for (int p = 0; p < 4; p++)
            wg_mul<1>(y[j], xa[p], kd + j * HALF + p * (HALF / 4), p == 0);
        wg_commit();
    }
#pragma unroll
    for (int j = 0; j < K / 64; j++) {
        float2 f[8];
#pragma unroll
        for (int n = 0; n < 8; n++)
            f[n] = *(const float2 *)(eC + (8 * j + n) * 8 + lane % 4 * 2);
        if (j + 1 < K / 64)
            wg_wait<1>(y[j]);
        else
            wg_wait<0>(y[j]);
#pragma unroll
        for (int n = 0; n < 8; n++) {
            float4 s = h[8 * j + n];
            H[(8 * j + n) * 128] = make_float4(fmaf(f[n].x, s.x, y[j][n][0]), fmaf(f[n].y, s.y, y[j][n][1]), fmaf(f[n].x, s.z, y[j][n][2]), fmaf(f[n].y, s.w, y[j][n][3]));
        }
    }
}

/* ---- the kernel --------------------------------------------------------------------------------------------------------------------- */

/* Word (k, v) of the thread's i-th, v within the warp's 16 columns. */
template <int K, class F> __device__ __forceinline__ void each(int lane, F f)
{
#pragma unroll
    for (int j = 0; j < K / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            f(j, e, j * 8 + lane % 4 * 2 + e % 2, lane / 4 + e / 2 * 8);
}

/* Words of M below 2^-126 become zero, and when nothing else is left, which is asked every 8 chunks, its products end: M of a head that forgets costs
 * little. */
#define PRE_THREADS(K, V) (2 * ((K) > (V) ? (K) : (V)))
template <int K, int V> __global__ void __launch_bounds__(PRE_THREADS(K, V), 1) k_pre(Dims d, PreArgs a, const __grid_constant__ CUtensorMap w, const __grid_constant__ CUtensorMap kg)
{
    extern __shared__ __align__(1024) char pre_raw[];
    PreSmem<K, V> &sm = *(PreSmem<K, V> *)pre_raw;
    const int BYTES = (2 * K + V) * C * 2 + K * 4;
    int hv = blockIdx.x % d.HV, warp = threadIdx.x / 32, lane = threadIdx.x % 32, v0 = warp * 16;
    Seq seq = d.seq[a.seq0 + blockIdx.x / d.HV];
    bool has_m = K >= V || warp < K / 16, has_h = V >= K || warp < V / 16, m = has_m && seq.part >= a.m_from, on = seq.part >= a.m_from;
    float4 *H = &sm.H[has_h ? threadIdx.x / 128 : 0][0][threadIdx.x % 128];
    float S[K / 8][4];
    int n = seq.c1 - seq.c0;
    auto feed = [&](int i) {
        int to = i % STAGES;
        int64_t tile = (int64_t)(seq.c0 + i) * d.HV + hv;
        if (i >= STAGES)
            bar_wait(&sm.empty[to], (i / STAGES - 1) & 1);
        bar_expect(&sm.full[to], BYTES);
        copy_tile<K>(sm.w[to], &w, a.w, tile, &sm.full[to]);
        copy_tile<K>(sm.kg[to], &kg, a.kg, tile, &sm.full[to]);
        bulk(sm.u[to], a.u + tile * C * V, C * V * 2, &sm.full[to]);
        bulk(sm.eC[to], a.eC + tile * K, K * 4, &sm.full[to]);
        bar_loaded(&sm.full[to]);
    };
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            bar_init(&sm.full[i], 1);
            bar_init(&sm.empty[i], WARPS(PRE_THREADS(K, V) / 32));
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        for (int i = 0; i < STAGES - 1 && i < n; i++)
            feed(i);
    }
    __syncthreads();
    const float *init = seq.starts && a.s0 ? a.s0 + ((int64_t)seq.gseq * d.HV + hv) * K * V + v0 : NULL;
    each<K>(lane, [&](int j, int e, int k, int v) {
        if (has_h)
            ((float *)&H[j * 128])[e] = init ? init[k * V + v] : 0.f;
        S[j][e] = k == v0 + v;                           /* zeros where the warpgroup has none of M */
    });
    for (int i = 0; i < n; i++) {
        int at = i % STAGES;
        if (i % 8 == 0 && on) {
            uint32_t bits = 0;
            each<K>(lane, [&](int j, int e, int, int) { bits |= __float_as_uint(S[j][e]) << 1; });
            on = __syncthreads_or(bits != 0);
        }
        bar_wait(&sm.full[at], i / STAGES & 1);
        if (on && has_m)
            step_m<K>(S, sm.w[at], sm.kg[at], sm.eC[at], lane);
        if (threadIdx.x == 0 && i + STAGES - 1 < n)      /* here the other warpgroup is likely to be done with the chunk before, whose stage this takes */
            feed(i + STAGES - 1);
        __syncwarp();
        if (has_h)
            step_h<K>(H, sm.w[at], sm.kg[at], sm.u[at] + warp * C * 16, sm.eC[at], lane);
        __syncwarp();
        bar_arrive_warp(&sm.empty[at], lane);
    }
    float *out = a.hm + ((int64_t)seq.part * d.HV + hv) * K * (V + K) + v0;
    float *keep = a.keep ? a.keep + ((int64_t)(seq.part - a.m_from) * d.HV + hv) * K * K + v0 : NULL;
    each<K>(lane, [&](int j, int e, int k, int v) {
        if (has_h)
            out[k * (V + K) + v] = ((const float *)&H[j * 128])[e];
        if (m)
            out[k * (V + K) + V + v] = S[j][e];
        if (m && keep)
            keep[k * K + v] = S[j][e];
    });
}

/* ---- host --------------------------------------------------------------------------------------------------------------------------- */

/* The tiles of a ROWS buffer as [tile][K/64][64 tokens][64 channels]. */
static dp_status tile_map(CUtensorMap *map, const bf16 *tiles, int64_t n, int K, dp_err *e)
{
    cudaDriverEntryPointQueryResult found;
    void *f = NULL;
    CK(e, cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found));
    if (found != cudaDriverEntryPointSuccess || !f)
        return dpg_fail(e, DP_EDEVICE, "%s:%d: the driver has no cuTensorMapEncodeTiled", __FILE__, __LINE__);
    cuuint64_t size[4] = {64, C, (cuuint64_t)K / 64, (cuuint64_t)n}, stride[3] = {(cuuint64_t)K * 2, 128, (cuuint64_t)C * K * 2};
    cuuint32_t box[4] = {64, C, (cuuint32_t)K / 64, 1}, step[4] = {1, 1, 1, 1};
    CUresult r = ((PFN_cuTensorMapEncodeTiled_v12000)f)(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, (void *)tiles, size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                                        CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return r == CUDA_SUCCESS ? DP_OK : dpg_fail(e, DP_EDEVICE, "%s:%d: cuTensorMapEncodeTiled: error %d", __FILE__, __LINE__, (int)r);
}

template <int K, int V> static dp_status pre(dpg_plan *p, PreArgs a, int nseg, cudaStream_t s, dp_err *e)
{
    CUtensorMap w, kg;
    int bytes = (int)sizeof(PreSmem<K, V>);
    int64_t tiles = (int64_t)p->d.NT * p->d.HV;
    TRY(tile_map(&w, a.w, tiles, K, e));
    TRY(tile_map(&kg, a.kg, tiles, K, e));
    CK(e, cudaFuncSetAttribute(k_pre<K, V>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    k_pre<K, V><<<(unsigned)nseg * p->d.HV, PRE_THREADS(K, V), bytes, s>>>(p->d, a, w, kg);
    CK_LAUNCH(e, "k_pre");
    return DP_OK;
}

/* H, and M by augmented columns if it is this path that makes it, of every segment whose end state or M is read: all, but the last one
 * where nothing follows, and M not of the segment that starts the sequence. */
dp_status fast_pre(dpg_plan *p, const dpg_tensors *t, void *ws, cudaStream_t s, dp_err *e)
{
    int n = p->nseg - p->is_last, m_from = p->opt.chain_how == DPG_CHAIN_AUGMENTED ? p->whole : n;
    PreArgs a = {at<bf16>(p, ws, B_W), at<bf16>(p, ws, B_KG), at<bf16>(p, ws, B_U), at<float>(p, ws, B_EC), t->s0, at<float>(p, ws, p->nseg > 1 ? B_SEG : B_HM),
                 p->saved_parts && t->saved ? saved_part_m(p, t) : NULL, p->d.nseq - 1, m_from};
    return BY_WIDTHS(pre, p, a, n, s, e);
}
