/* gpu/fast/pre.cu - the pre-process of the fast path: (M, H) of segments, K and V in {64, 128}, by
 * warpgroup products (wgmma, compute capability 9.0).
 *
 *   M <- eC o M - kg' (w M)         from the identity: augmented columns, fp32-grade
 *   H <- eC o H + kg' (u - w H)     from the initial state: bf16 operands, as the state pass
 *
 * One block of max(K, V) / 64 warpgroups a segment and head; a warpgroup has 64 columns of M, which
 * stay in registers, and of H, which stay in shared memory as they stand in registers (K != V: the
 * second warpgroup has columns of the wider one alone). Written transposed, S' [64 columns][K] and
 * X' [64 columns][64 tokens] are the A operands from registers (a warp has 16 columns), w and kg
 * the B operands from shared memory, whose layout (ROWS) is the 128-byte swizzle of the tensor
 * cores. Tiles come in STAGES stages on mbarriers; M and H share them.
 *
 * w and kg are bf16 as they stand; M and its X go in three bf16 pieces, so that all operands are
 * exact to 2^-24, for 3 products instead of 1. The accumulator of a tensor core rounds toward zero:
 * the leading products of every two k-steps start from zero and are added on the CUDA cores while
 * the two small ones, where that does not matter, add up in the tensor core.
 *
 * Phases of a chunk, and what shared memory holds:
 *
 *   look    every 8 chunks: is anything left of M                  H
 *   M       X = w M in three pieces, M <- eC M - kg' X             w kg eC of the stage
 *   load    warp 0: the chunk STAGES - 1 ahead                     the stage of the chunk before
 *   H       H read at once, X = u - w H, H <- eC H + kg' X         w kg u eC; H written again */
#include "fast/fast.cuh"
#include "fast/inverse.cuh"
#include <limits.h>

namespace {

#define STAGES 3

struct PreArgs {
    const bf16 *w, *kg, *u;
    const float *eC, *s0;
    /* keep: M alone once more, [segment - m_from][HV][D][D], for the backward; or NULL */
    float *hm, *keep;
    int seq0, m_from; /* the first segment in Dims.seq; segments from m_from on make M, but those
                       * in which a sequence starts */
};

template <int K, int V> struct PreSmem {
    bf16 w[STAGES][C * K], kg[STAGES][C * K]; /* 1,024-byte aligned, as the swizzle wants */
    bf16 u[STAGES][C * V];
    /* a thread's own words of H: n-tile j of its fragments at [j][thread] */
    float4 H[V / 64][K / 8][128];
    float eC[STAGES][K];
    uint64_t full[STAGES], empty[STAGES];
};

/* ---- M --------------------------------------------------------------------------------------- */

/* An A fragment (n-tiles a, b of an accumulator) in three pieces. */
__device__ __forceinline__ void split_fragment(uint32_t f[3][4], const float a[4],
                                               const float b[4]) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const float *z = e < 2 ? a + 2 * e : b + 2 * e - 4;
        split3(z[0], z[1], f[0][e], f[1][e], f[2][e]);
    }
}

/* The products of two k-steps, one call each (odd: the second): the leading ones add up in z, then
 * sum += z (= if first); A in three pieces. `between` is done while the tensor cores work. On
 * return the small sums are on their way. */
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
 * with reflect factors, error of M after 1,024 chunks (K = 64) and 512 (K = 128), giving back
 * 1.1e-8: 2.1e-5 and 8.6e-6, 1.6e-8: 1.3e-5 and 5.5e-6, 2.1e-8: 4.9e-6 and 2.9e-6, 2.6e-8: 7.1e-6
 * and 2.7e-6: a drift linear in the chunks whose zero lies at 2.3e-8 for both (4.1e-6 and 2.7e-6).
 * It was at 1.1e-8 where every leading product started from zero. Less than the tf32 products of
 * chain/factors.cu lose: products of bf16 are short, and their sums often exact. */
#define RZ_LOSS 2.3e-8f
__device__ __forceinline__ float whole_sum(float sum, float small) {
    return sum + fmaf(sum, RZ_LOSS, small);
}
/* One chunk of M. */
template <int K>
__device__ __forceinline__ void step_m(float S[K / 8][4], const bf16 *w, const bf16 *kg,
                                       const float *eC, int lane) {
    uint64_t wd = rows_desc(w, 1), kd = rows_desc(kg, 64);
    uint32_t xa[4][3][4];
    {
        float x[8][4], xs[8][4], z[8][4];
        uint32_t a[2][3][4];
        split_fragment(a[0], S[0], S[1]);
#pragma unroll
        for (int kk = 0; kk < K / 16; kk++)
            mul3<0>(x, z, xs, a[kk % 2], wd + kk / 4 * HALF + kk % 4 * 2, kk < 2, kk % 2, [&] {
                if (kk + 1 < K / 16) {
                    wg_wait<2>(); /* the products that read a[(kk + 1) % 2] */
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

/* ---- H --------------------------------------------------------------------------------------- */

/* One chunk of H, the thread's words of which are 128 apart; u: the warp's slice of 16 columns.
 * They are read at once and stay in registers for the chunk: read one by one where they are used,
 * each waits for itself. The sum over tokens starts from zero and is added in fp32. */
template <int K>
__device__ __forceinline__ void step_h(float4 *H, const bf16 *w, const bf16 *kg, const bf16 *u,
                                       const float *eC, int lane) {
    uint64_t wd = rows_desc(w, 1), kd = rows_desc(kg, 64);
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
    wg_times_rows<K>(x, a, wd);
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
    wg_times_kg<K>(y, xa, kd);
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
            H[(8 * j + n) * 128] =
                make_float4(fmaf(f[n].x, s.x, y[j][n][0]), fmaf(f[n].y, s.y, y[j][n][1]),
                            fmaf(f[n].x, s.z, y[j][n][2]), fmaf(f[n].y, s.w, y[j][n][3]));
        }
    }
}

/* ---- the kernel ------------------------------------------------------------------------------ */

/* Word (k, v) of the thread's i-th, v within the warp's 16 columns. */
template <int K, class F> __device__ __forceinline__ void words(int lane, F f) {
#pragma unroll
    for (int j = 0; j < K / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            f(j, e, j * 8 + lane % 4 * 2 + e % 2, lane / 4 + e / 2 * 8);
}

/* Words of M below 2^-126 become zero, and when nothing else is left, which is asked every 8
 * chunks, its products end: M of a head that forgets costs little. */
#define PRE_THREADS(K, V) (2 * ((K) > (V) ? (K) : (V)))
/* Chunk i of a segment by warp 0; n of them. */
template <int K, int V>
__device__ __forceinline__ void load_chunk(PreSmem<K, V> &sm, const Dims &d, const PreArgs &a,
                                           const Seq &seq, int hv, int i, int lane) {
    int to = i % STAGES;
    int64_t tile = (int64_t)(seq.c0 + i) * d.HV + hv;
    uint64_t *full = &sm.full[to];
    if (i >= STAGES) bar_wait(&sm.empty[to], (i / STAGES - 1) & 1);
    fill_begin(full, (2 * K + V) * C * 2 + K * 4, lane);
    fill(sm.w[to], a.w + tile * C * K, C * K * 2, full, lane);
    fill(sm.kg[to], a.kg + tile * C * K, C * K * 2, full, lane);
    fill(sm.u[to], a.u + tile * C * V, C * V * 2, full, lane);
    fill(sm.eC[to], a.eC + tile * K, K * 4, full, lane);
    fill_end(full, lane);
}

template <int K, int V>
__global__ void __launch_bounds__(PRE_THREADS(K, V), 1) k_pre(Dims d, PreArgs a) {
    extern __shared__ __align__(1024) char raw[];
    PreSmem<K, V> &sm = *(PreSmem<K, V> *)raw;
    int hv = blockIdx.x % d.HV, warp = threadIdx.x / 32, lane = threadIdx.x % 32, v0 = warp * 16;
    Seq seq = d.seq[a.seq0 + blockIdx.x / d.HV];
    bool has_m = K >= V || warp < K / 16, has_h = V >= K || warp < V / 16;
    bool on = seq.part >= a.m_from && !seq.starts, m = has_m && on;
    float4 *H = &sm.H[has_h ? threadIdx.x / 128 : 0][0][threadIdx.x % 128];
    float S[K / 8][4];
    int n = seq.c1 - seq.c0;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            bar_init(&sm.full[i], FULL_COUNT);
            bar_init(&sm.empty[i], EMPTY_COUNT(PRE_THREADS(K, V) / 32));
        }
        bar_init_end();
    }
    __syncthreads();
    for (int i = 0; warp == 0 && i < STAGES - 1 && i < n; i++)
        load_chunk<K, V>(sm, d, a, seq, hv, i, lane);
    const float *init =
        seq.starts && a.s0 ? a.s0 + ((int64_t)seq.gseq * d.HV + hv) * K * V + v0 : NULL;
    words<K>(lane, [&](int j, int e, int k, int v) {
        if (has_h) ((float *)&H[j * 128])[e] = init ? init[k * V + v] : 0.f;
        S[j][e] = k == v0 + v; /* zeros where the warpgroup has none of M */
    });
    for (int i = 0; i < n; i++) {
        int at = i % STAGES;
        if (i % 8 == 0 && on) {
            uint32_t bits = 0;
            words<K>(lane, [&](int j, int e, int, int) { bits |= __float_as_uint(S[j][e]) << 1; });
            on = __syncthreads_or(bits != 0);
        }
        bar_wait(&sm.full[at], i / STAGES & 1);
        if (on && has_m) step_m<K>(S, sm.w[at], sm.kg[at], sm.eC[at], lane);
        /* here the other warpgroup is likely to be done with the chunk before, whose stage this
         * takes */
        if (warp == 0 && i + STAGES - 1 < n)
            load_chunk<K, V>(sm, d, a, seq, hv, i + STAGES - 1, lane);
        __syncwarp();
        if (has_h) step_h<K>(H, sm.w[at], sm.kg[at], sm.u[at] + warp * C * 16, sm.eC[at], lane);
        __syncwarp();
        bar_arrive_warp(&sm.empty[at], lane);
    }
    int64_t head = (int64_t)seq.part * d.HV + hv;
    float *out = a.hm + head * K * (V + K) + v0;
    float *keep = a.keep ? a.keep + (head - (int64_t)a.m_from * d.HV) * K * K + v0 : NULL;
    words<K>(lane, [&](int j, int e, int k, int v) {
        if (has_h) out[k * (V + K) + v] = ((const float *)&H[j * 128])[e];
        if (m) out[k * (V + K) + V + v] = S[j][e];
        if (m && keep) keep[k * K + v] = S[j][e];
    });
}

/* ---- host ------------------------------------------------------------------------------------ */

template <int K, int V> struct Pre {
    static dp_status run(const Call &c, PreArgs a, int nseg) {
        auto kernel = k_pre<K, V>;
        int bytes = (int)sizeof(PreSmem<K, V>);
        CK(c.e, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
        kernel<<<(unsigned)nseg * c.p->d.HV, PRE_THREADS(K, V), bytes, c.s>>>(c.p->d, a);
        CK_LAUNCH(c.e, "k_pre");
        return DP_OK;
    }
};

} // namespace

/* Code for 9.0a must be there, which a driver does not make of PTX for older devices. */
int fast_augments(const Device *dev) {
    cudaFuncAttributes a;
    return dev->major == 9 && cudaFuncGetAttributes(&a, k_pre<64, 64>) == cudaSuccess &&
           a.ptxVersion >= 90;
}

/* H, and M by augmented columns if it is this path that makes it, of every segment whose end state
 * or M is read: all, but the last one where nothing follows, and M not of the segment that starts
 * the sequence. */
dp_status fast_pre(const Call &c) {
    if (!fast_augments(&c.p->device)) return fast_pre_states(c);
    const dpg_plan *p = c.p;
    PreArgs a = {};
    a.w = at<bf16>(c, B_W);
    a.kg = at<bf16>(c, B_KG);
    a.u = at<bf16>(c, B_U);
    a.eC = at<float>(c, B_EC);
    a.s0 = c.t->s0;
    a.hm = at<float>(c, p->nseg > 1 ? B_SEG : B_HM);
    a.keep = p->saved_parts && c.t->saved ? saved_part_m(p, c.t) : NULL;
    a.seq0 = p->pre0;
    a.m_from = p->opt.chain_how == DPG_CHAIN_AUGMENTED ? p->whole : INT_MAX;
    return by_widths<Pre>(c, a, p->npre);
}
