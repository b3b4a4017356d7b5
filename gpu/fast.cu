/* gpu/fast.cu - the forward on tensor cores: K and V in {64, 128}, R in {1, 2, 4}, base bf16. Two kernels:
 *
 *   k_chunks  one block of 8 warps per tile: gate, cumsum, norms, A and Aqk, T = A^-1, then w u kg qg Aqk to memory.
 *   k_scan    (k_team: few heads) one warp per 16 columns of a state, chunk after chunk; S' = [16 v][K k] stays in registers in fp32. Written transposed,
 *             the accumulators of one product are the A operands of the next, so that warps never exchange anything:
 *                 X' = u' - S' w'      S' <- eC o S' + X' kg      o' = scale S' qg' + X' Aqk'
 *             Tiles arrive by bulk copies (mbarrier, 3 stages) from a producer warp.
 *
 * Memory layout of tiles: rows of K bf16 in 16-byte pieces, piece c of row r stored at c ^ (r & 7), so that plain bulk copies land in
 * shared memory free of bank conflicts. u: [V/16][64][16], pieces c ^ (r >> 2 & 1). tile_at() of internal.cuh gives both.
 *
 * R keys a token (MKDA): a tile has 64 rows (token, key), so 64 / R tokens. All keys of a token share its gate, query and row of o; A couples rows of
 * different tokens alone, Aqk reads all keys of its own token.
 *
 * Exponents (log2 units, gam) are anchored (math.md e.1): every off-diagonal 16 x 16 block has its anchor between its rows, both factors
 * <= 1. Diagonal blocks are anchored at their first row; terms of a row i and channel that lies more than 2^110 below it are summed
 * pairwise in fp32. So a term depends on rows up to its own alone, and o of a token has the same bits whatever comes after it. q and k of one token meet in
 * fp32: no decay lies between them, and where they are nearly orthogonal rounded factors would leave an error of the size of |q| |k|. */
#include "mma.cuh"
#include "fault.cuh"

#define C DP_CHUNK
#define LOG2E 1.4426950408889634f

/* log(1 + e) / e on [0, 1], degree 8, relative error 3.1e-8: softplus of slow gates keeps its digits (math.md c, fp32 notes). */
__device__ __forceinline__ float log1p_over(float e)
{
    float p = 5.253457797e-03f;
    p = fmaf(p, e, -2.958850739e-02f);
    p = fmaf(p, e, 7.836166802e-02f);
    p = fmaf(p, e, -1.367476971e-01f);
    p = fmaf(p, e, 1.911143108e-01f);
    p = fmaf(p, e, -2.484436989e-01f);
    p = fmaf(p, e, 3.331927134e-01f);
    p = fmaf(p, e, -4.999950152e-01f);
    return fmaf(p, e, 9.999999705e-01f);
}

/* gate_value of internal.cuh with ex2; a = exp(A_log). */
template <int GATE> __device__ __forceinline__ float gate_fast(float graw, float a, float bias, float lb)
{
    if (GATE == DP_GATE_LOG)
        return graw;
    float x = graw + bias;
    if (GATE == DP_GATE_SOFTPLUS) {
        float e = ex2(-fabsf(x) * LOG2E);
        return -a * fmaf(e, log1p_over(e), fmaxf(x, 0.f));
    }
    return __fdividef(lb, 1.f + ex2(-a * x * LOG2E));
}

struct FastOut { bf16 *w, *u, *kg, *qg, *Aqk, *Akk, *L; float *eC, *gcum; };   /* Akk, L and gcum NULL unless kept; plain */

/* ---- k_chunks -------------------------------------------------------------------------------------------------------------------- */

#define THREADS 256                                         /* threads: warp w owns rows 16 (w % 4) .. and the channels of half w / 4 */
#define TS 68                                            /* row stride of A and T, fp32 words */
#define TBS 72                                           /* row stride of T in bf16 */

template <int K, int V> struct Smem {
    static const int RS = K + 8, VS = V + 8;             /* row strides: of gam (words) and the bf16 tiles of K columns, of those of V columns (elements) */
    union {
        float gam[C * RS];
        float ex[8][32][32];                             /* partial sums that the two channel halves exchange */
        struct { float A[C * TS], T[C * TS]; } s;
        struct { bf16 w[C * RS], u[C * VS]; } out;
    } x;
    bf16 q[C * RS], k[C * RS], v[C * VS];
    union { bf16 g[C * RS], kb[C * RS], T[C * TBS]; } y;
    float tab[13][K];                                    /* exponentials, see fill_tables; before that, the totals of cumsum_gate */
    float rk[C], rq[C], beta[C], own[C];                 /* own: a key and its token's query, before norms */
    int wide[4];                                         /* does any channel of block I need the pairwise sums */
};
#define TAB_G(I) (I)
#define TAB_F(I, J) (4 + (I) * ((I) - 1) / 2 + (J))
#define TAB_X(I) (10 + (I))

/* A tile of C rows of W bf16, row (token s, key j) at src + s * step + j * key elements; rows past `rows` become zeros. */
template <int W> __device__ __forceinline__ void load_tile(bf16 *dst, const bf16 *src, int64_t step, int key, int lr, int rows)
{
    const int P = W / 8, ROWS_AT_ONCE = THREADS / P;
    int r = threadIdx.x / P, p = threadIdx.x % P * 8;
    const bf16 *from = src + (r >> lr) * step + (r & ((1 << lr) - 1)) * key + p;
    step *= ROWS_AT_ONCE >> lr;
    dst += r * (W + 8) + p;
#pragma unroll
    for (int i = 0; i < C / ROWS_AT_ONCE; i++)
        cp16(dst + i * ROWS_AT_ONCE * (W + 8), r + i * ROWS_AT_ONCE < rows ? from + i * step : src, r + i * ROWS_AT_ONCE < rows);
}

/* The same of an input of either type from element `at` on; fp32 is rounded on its way through registers, and then norm (unless NULL) gets 1/norms of the rows as given. */
template <int W> __device__ __forceinline__ void load_input(const Dims &d, bf16 *dst, const void *src, int64_t at, int64_t step, int key, int lr, int rows, float *norm)
{
    if (d.in_bf16) {
        load_tile<W>(dst, (const bf16 *)src + at, step, key, lr, rows);
        return;
    }
    const int P = W / 8;
#pragma unroll
    for (int i = 0; i < C * P / THREADS; i++) {
        int r = (threadIdx.x + i * THREADS) / P, p = threadIdx.x % P;
        uint4 y = make_uint4(0, 0, 0, 0);
        float ss = 0.f;
        if (r < rows)
            y = load8_bf16(src, at + (r >> lr) * step + (r & ((1 << lr) - 1)) * key + p * 8, false, ss);
        *(uint4 *)(dst + r * (W + 8) + p * 8) = y;
        if (norm) {
#pragma unroll
            for (int m = P / 2; m; m /= 2)
                ss += __shfl_xor_sync(~0u, ss, m);
            if (p == 0)
                norm[r] = d.l2norm ? rsqrtf(ss + (float)DP_L2_EPS) : 1.f;
        }
    }
}

/* gam = cumsum of the gate over tokens in log2 units, the same in all rows of a token. A thread takes two channels and TL tokens, then adds the totals of the tokens before. */
template <int GATE, int K, int V> __device__ void cumsum_gate(const Dims &d, const dpg_tensors &t, Smem<K, V> &sm, Chunk c, int hv, int lr, bool staged)
{
    const int GROUPS = THREADS / (K / 2), TL = C / GROUPS;
    int k = threadIdx.x % (K / 2) * 2, group = threadIdx.x / (K / 2), s0 = group * TL, k0 = d.Kg == 1 ? 0 : k, k1 = d.Kg == 1 ? 0 : k + 1;
    float *tot = &sm.tab[0][0];
    float a = t.A_log ? expf(t.A_log[hv]) : 1.f, b0 = t.dt_bias ? t.dt_bias[hv * d.Kg + k0] : 0.f, b1 = t.dt_bias ? t.dt_bias[hv * d.Kg + k1] : 0.f;
    float2 sum[TL], run = make_float2(0.f, 0.f);
#pragma unroll
    for (int s = 0; s < TL; s++) {
        float2 g;
        if (staged) {
            g = unpack2(lds32(sm.y.g + (s0 + s) * Smem<K, V>::RS + k));
        } else {
            int64_t at = ((c.t0 + min((s0 + s) >> lr, c.len - 1)) * d.HV + hv) * d.Kg;
            g = make_float2(ldx(t.g, at + k0, d.g_bf16), ldx(t.g, at + k1, d.g_bf16));
        }
        if (s0 + s < c.len << lr && ((s0 + s) & ((1 << lr) - 1)) == 0) {
            run.x += gate_floor(gate_fast<GATE>(g.x, a, b0, d.lower_bound));
            run.y += gate_floor(gate_fast<GATE>(g.y, a, b1, d.lower_bound));
        }
        sum[s] = run;
    }
    *(float2 *)(tot + group * K + k) = run;
    __syncthreads();
    float2 before = make_float2(0.f, 0.f);
    for (int i = 0; i < group; i++) {
        float2 y = *(float2 *)(tot + i * K + k);
        before.x += y.x, before.y += y.y;
    }
    if (FAULT(GATE_BACK)) {
        float2 all = before, after = make_float2(0.f, 0.f);
        for (int i = group; i < GROUPS; i++)
            all.x += tot[i * K + k], all.y += tot[i * K + k + 1];
        for (int i = GROUPS - 1; i > group; i--)
            after.x += tot[i * K + k], after.y += tot[i * K + k + 1];
        before = make_float2(all.x - after.x - run.x, all.y - after.y - run.y);
    }
#pragma unroll
    for (int s = 0; s < TL; s++)
        *(float2 *)(sm.x.gam + (s0 + s) * Smem<K, V>::RS + k) = make_float2((sum[s].x + before.x) * LOG2E, (sum[s].y + before.y) * LOG2E);
}

/* Of 8 rows per warp q k', and 1/norms unless the loads made them. */
template <int K, int V> __device__ void norms(const Dims &d, Smem<K, V> &sm, int warp, int lane)
{
    const int P = K / 8;
#pragma unroll
    for (int i = 0; i < 8 * P / 32; i++) {
        int r = warp * 8 + i * (32 / P) + lane / P, at = r * Smem<K, V>::RS + lane % P * 8;
        uint4 k8 = *(uint4 *)(sm.k + at), q8 = *(uint4 *)(sm.q + at);
        float sk = sumsq8(k8), sq = sumsq8(q8), own = dot8(k8, q8);
#pragma unroll
        for (int m = P / 2; m; m /= 2) {
            sk += __shfl_xor_sync(~0u, sk, m);
            sq += __shfl_xor_sync(~0u, sq, m);
            own += __shfl_xor_sync(~0u, own, m);
        }
        if (lane % P == 0)
            sm.own[r] = own;
        if (lane % P == 0 && d.in_bf16) {
            sm.rk[r] = d.l2norm ? rsqrtf(sk + (float)DP_L2_EPS) : 1.f;
            sm.rq[r] = d.l2norm ? rsqrtf(sq + (float)DP_L2_EPS) : 1.f;
        }
    }
}

/* Gates are <= 0: the last row is the lowest. */
template <int K, int V> __device__ void find_wide(Smem<K, V> &sm, int I, int lane)
{
    bool wide = false;
    const float *g = sm.x.gam + I * 16 * Smem<K, V>::RS;
    for (int k = lane; k < K; k += 32)
        wide |= g[k] - g[15 * Smem<K, V>::RS + k] > NEAR;
    wide = __any_sync(~0u, wide);
    if (lane == 0)
        sm.wide[I] = wide;
}

/* exp2 of differences of gam rows: G(I) at the first row of block I, its anchor; F(I, J<I) from there back to the first row after block J; X(I) from
 * the first row after block I to the chunk end; the last one is eC and goes to memory. Also gcum, if kept. */
template <int K, int V> __device__ void fill_tables(Smem<K, V> &sm, const FastOut &o, int64_t tile, int Kg)
{
    const int RS = Smem<K, V>::RS;
    int k = threadIdx.x % K, part = threadIdx.x / K;
    const float *g = sm.x.gam + k;
    if (part == 0) {
        float last = g[63 * RS];
#pragma unroll
        for (int I = 0; I < 4; I++)
            sm.tab[TAB_G(I)][k] = ex2(g[16 * I * RS]);
#pragma unroll
        for (int I = 0; I < 3; I++)
            sm.tab[TAB_X(I)][k] = ex2(last - g[16 * (I + 1) * RS]);
        o.eC[tile * K + k] = ex2(last);
    } else if (part == 1) {
#pragma unroll
        for (int I = 1; I < 4; I++)
#pragma unroll
            for (int J = 0; J < I; J++)
                sm.tab[TAB_F(I, J)][k] = ex2(g[16 * I * RS] - g[16 * (J + 1) * RS]);
    }
    if (o.gcum)
        for (int x = threadIdx.x; x < C * Kg; x += THREADS)
            o.gcum[tile * C * Kg + x] = sm.x.gam[x / Kg * RS + x % Kg];
}

/* kb_i = k_i exp(gam at the first row after i's block - gam_i) for the off-diagonal products, and kg to memory; 8 rows per warp. */
template <int K, int V> __device__ void stage_kb(Smem<K, V> &sm, bf16 *kg, int warp, int lane)
{
    const int P = K / 8, RS = Smem<K, V>::RS;
    int p = lane % P, J = warp / 2, ref = J < 3 ? 16 * (J + 1) : 63;
#pragma unroll
    for (int i = 0; i < 8 * P / 32; i++) {
        int r = warp * 8 + i * (32 / P) + lane / P;
        uint4 k4 = *(uint4 *)(sm.k + r * RS + p * 8), kb, out;
        const uint32_t *ks = (const uint32_t *)&k4;
        uint32_t *kbs = (uint32_t *)&kb, *outs = (uint32_t *)&out;
        float rk = sm.rk[r];
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
            int ch = p * 8 + 2 * j;
            float4 g = *(float4 *)(sm.x.gam + r * RS + ch), a = *(float4 *)(sm.x.gam + ref * RS + ch);
            float4 xx = J < 3 ? *(float4 *)&sm.tab[TAB_X(J)][ch] : make_float4(1.f, 1.f, 1.f, 1.f);
            float2 y = unpack2(ks[j]), z = unpack2(ks[j + 1]);
            y.x *= ex2(a.x - g.x), y.y *= ex2(a.y - g.y);
            z.x *= ex2(a.z - g.z), z.y *= ex2(a.w - g.w);
            kbs[j] = pack2(y.x, y.y), kbs[j + 1] = pack2(z.x, z.y);
            outs[j] = pack2(y.x * xx.x * rk, y.y * xx.y * rk), outs[j + 1] = pack2(z.x * xx.z * rk, z.y * xx.w * rk);
        }
        *(uint4 *)(sm.y.kb + r * RS + p * 8) = kb;
        *(uint4 *)(kg + r * K + (p ^ (r & 7)) * 8) = out;
    }
}

/* Sums of one warp: kk and qk [block][n-tile][fragment], block 3 is the diagonal one. */
struct Sums { float kk[4][2][4], qk[4][2][4]; };

/* Entry (s, i) of a diagonal block's k k' and q k' over the channels of a half in which i is far below the block's first row: safe for any gate. */
template <int K, int V> __device__ __noinline__ float2 diagonal_pairwise(const Smem<K, V> &sm, int half, int s, int i, int lr)
{
    const int RS = Smem<K, V>::RS;
    float2 z = make_float2(0.f, 0.f);
    for (int c = half * K / 2; c < (half + 1) * K / 2 && i >> lr <= s >> lr; c++) {
        float g = sm.x.gam[i * RS + c];
        if (sm.x.gam[i / 16 * 16 * RS + c] - (FAULT(BLOCK_PAIRS) ? sm.x.gam[(i | 15) * RS + c] : g) <= NEAR)
            continue;
        float y = (float)sm.k[i * RS + c] * ex2(sm.x.gam[s * RS + c] - g);
        z.x = fmaf((float)sm.k[s * RS + c], y, z.x);
        z.y = fmaf((float)sm.q[s * RS + c], y, z.y);
    }
    return z;
}

/* Rows 16 I .. of k k' and q k' with decay, over a half's channels; replaces the warp's part of sm.k by k exp(gam) / |k| and of sm.q by
 * qg, both rounded. */
template <int K, int V> __device__ __forceinline__ void products(Smem<K, V> &sm, int I, int half, int lane, int lr, Sums &z)
{
    const int RS = Smem<K, V>::RS;
    int gr = lane / 4, tc = lane % 4, r0 = I * 16 + gr, an = I * 16;
    bool wide = sm.wide[I];
    float rk0 = sm.rk[r0], rk1 = sm.rk[r0 + 8], rq0 = sm.rq[r0], rq1 = sm.rq[r0 + 8];
    if (wide) {
#pragma unroll
        for (int x = 0; x < 8; x++) {
            float2 y = diagonal_pairwise(sm, half, r0 + x % 4 / 2 * 8, an + 8 * (x / 4) + 2 * tc + x % 2, lr);
            z.kk[3][x / 4][x % 4] = y.x, z.qk[3][x / 4][x % 4] = y.y;
        }
        __syncwarp();
    }
#pragma unroll 1
    for (int kk = half * K / 32; kk < (half + 1) * K / 32; kk++) {
        float fk[8], fq[8], G[4];
        float2 an2[2];
#pragma unroll
        for (int hc = 0; hc < 2; hc++) {
            int ch = kk * 16 + 2 * tc + 8 * hc;
            float2 a = an2[hc] = *(float2 *)(sm.x.gam + an * RS + ch);
            *(float2 *)(G + 2 * hc) = *(float2 *)&sm.tab[TAB_G(I)][ch];
#pragma unroll
            for (int row = 0; row < 2; row++) {
                int at = (r0 + 8 * row) * RS + ch, f = hc * 4 + row * 2;
                float2 g = *(float2 *)(sm.x.gam + at), k2 = unpack2(lds32(sm.k + at)), q2 = unpack2(lds32(sm.q + at));
                float ex = ex2(g.x - a.x), ey = ex2(g.y - a.y);
                fk[f] = k2.x * ex, fk[f + 1] = k2.y * ey;
                fq[f] = q2.x * ex, fq[f + 1] = q2.y * ey;
            }
        }
        {
            uint32_t ak[4], aq[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                ak[i] = pack2(fk[2 * i], fk[2 * i + 1]), aq[i] = pack2(fq[2 * i], fq[2 * i + 1]);
            if (FAULT(ANCHOR))
                for (int i = 0; i < 4; i++) {
                    const float *mid = sm.x.gam + (an + 8) * RS + kk * 16 + 2 * tc + 8 * (i / 2);
                    float x = ex2(an2[i / 2].x - mid[0]), y = ex2(an2[i / 2].y - mid[1]);      /* channels that need no pairwise sums: no overflow */
                    x = isinf(near(an2[i / 2].x - mid[7 * RS])) ? 1.f : x, y = isinf(near(an2[i / 2].y - mid[7 * RS + 1])) ? 1.f : y;
                    ak[i] = pack2(fk[2 * i] * x, fk[2 * i + 1] * y), aq[i] = pack2(fq[2 * i] * x, fq[2 * i + 1] * y);
                }
#pragma unroll
            for (int nt = 0; nt < 2; nt++) {
                uint32_t b[2];
#pragma unroll
                for (int hc = 0; hc < 2; hc++) {
                    int at = (I * 16 + nt * 8 + gr) * RS + kk * 16 + 2 * tc + 8 * hc;
                    float2 g = *(float2 *)(sm.x.gam + at), k2 = unpack2(lds32(sm.k + at));
                    float x = an2[hc].x - g.x, y = an2[hc].y - g.y;
                    if (wide)
                        x = near(x), y = near(y);
                    const float *other = sm.x.gam + (an + 8) * RS + kk * 16 + 2 * tc + 8 * hc;
                    if (FAULT(ANCHOR)) {
                        x += isinf(near(an2[hc].x - other[7 * RS])) ? 0.f : other[0] - an2[hc].x;
                        y += isinf(near(an2[hc].y - other[7 * RS + 1])) ? 0.f : other[1] - an2[hc].y;
                    }
                    if (FAULT(BLOCK_PAIRS) && wide)
                        x = isinf(near(an2[hc].x - other[7 * RS])) ? -INFINITY : x, y = isinf(near(an2[hc].y - other[7 * RS + 1])) ? -INFINITY : y;
                    b[hc] = pack2(k2.x * ex2(x), k2.y * ex2(y));
                }
                mma(z.kk[3][nt], ak, b[0], b[1]);
                mma(z.qk[3][nt], aq, b[0], b[1]);
            }
        }
#pragma unroll
        for (int J = 0; J < 3; J++)
            if (J < I) {
                const float *F = sm.tab[TAB_F(I, J)] + kk * 16 + 2 * tc;
                float2 f0 = *(float2 *)F, f1 = *(float2 *)(F + 8);
                uint32_t ak[4] = {pack2(fk[0] * f0.x, fk[1] * f0.y), pack2(fk[2] * f0.x, fk[3] * f0.y), pack2(fk[4] * f1.x, fk[5] * f1.y),
                                  pack2(fk[6] * f1.x, fk[7] * f1.y)};
                uint32_t aq[4] = {pack2(fq[0] * f0.x, fq[1] * f0.y), pack2(fq[2] * f0.x, fq[3] * f0.y), pack2(fq[4] * f1.x, fq[5] * f1.y),
                                  pack2(fq[6] * f1.x, fq[7] * f1.y)};
#pragma unroll
                for (int nt = 0; nt < 2; nt++) {
                    const bf16 *b = sm.y.kb + (16 * J + nt * 8 + gr) * RS + kk * 16 + 2 * tc;
                    mma(z.kk[J][nt], ak, lds32(b), lds32(b + 8));
                    mma(z.qk[J][nt], aq, lds32(b), lds32(b + 8));
                }
            }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int at = (r0 + 8 * (i % 2)) * RS + kk * 16 + 2 * tc + 8 * (i / 2);
            float gx = G[i / 2 * 2], gy = G[i / 2 * 2 + 1], rk = i % 2 ? rk1 : rk0, rq = i % 2 ? rq1 : rq0;
            *(uint32_t *)(sm.k + at) = pack2(fk[2 * i] * gx * rk, fk[2 * i + 1] * gy * rk);
            *(uint32_t *)(sm.q + at) = pack2(fq[2 * i] * gx * rq, fq[2 * i + 1] * gy * rq);
        }
        __syncwarp();
    }
}

/* Half 0 gets the full sums of k k', half 1 those of q k', each in `mine`. */
template <int K, int V> __device__ __forceinline__ void exchange(Smem<K, V> &sm, int I, int half, int lane, const Sums &z, float mine[4][2][4])
{
#pragma unroll
    for (int x = 0; x < 32; x++)
        sm.x.ex[half * 4 + I][x][lane] = half ? z.kk[x / 8][x / 4 % 2][x % 4] : z.qk[x / 8][x / 4 % 2][x % 4];
    __syncthreads();
#pragma unroll
    for (int x = 0; x < 32; x++) {
        float y = half ? z.qk[x / 8][x / 4 % 2][x % 4] : z.kk[x / 8][x / 4 % 2][x % 4];
        mine[x / 8][x / 4 % 2][x % 4] = y + sm.x.ex[(1 - half) * 4 + I][x][lane];
    }
    __syncthreads();
}

/* One 16 x 16 block: of A to shared memory and of L to memory if it is kept (half 0), or of Aqk to memory (half 1). */
template <int K, int V> __device__ __forceinline__ void emit_block(Smem<K, V> &sm, int I, int half, int lane, int lr, int J, float scale, const float z[2][4], bf16 *Aqk, bf16 *L)
{
    int gr = lane / 4, tc = lane % 4;
#pragma unroll
    for (int nt = 0; nt < 2; nt++)
#pragma unroll
        for (int row = 0; row < 2; row++) {
            int s = I * 16 + gr + 8 * row, i = 16 * J + 8 * nt + 2 * tc, end = FAULT(KEYS_COUPLED) && !half ? s : FAULT(KEYS_LATER) && half ? (s >> lr << lr) + 1 : ((s >> lr) + half) << lr;
            float f = half ? scale * sm.rq[s] : sm.beta[s] * sm.rk[s];
            float z0 = z[nt][2 * row], z1 = z[nt][2 * row + 1];
            if (half && i >> lr == s >> lr)
                z0 = sm.own[i];
            if (half && (i + 1) >> lr == s >> lr)
                z1 = sm.own[i + 1];
            float y0 = i < end ? z0 * f * sm.rk[i] : 0.f, y1 = i + 1 < end ? z1 * f * sm.rk[i + 1] : 0.f;
            if (half)
                *(uint32_t *)(Aqk + s * C + ((i / 8) ^ (s & 7)) * 8 + i % 8) = pack2(y0, y1);
            else {
                *(float2 *)(sm.x.s.A + s * TS + i) = make_float2(y0, y1);
                if (L)
                    *(uint32_t *)(L + s * C + i) = pack2(i < end ? z[nt][2 * row] * sm.rk[s] * sm.rk[i] : 0.f, i + 1 < end ? z[nt][2 * row + 1] * sm.rk[s] * sm.rk[i + 1] : 0.f);
            }
        }
}

/* Y[row][col..col+4) = sign * sum_(m<N) P[row][m] Q[m][col..]; row strides TS. */
template <int N> __device__ __forceinline__ void small_product(float *Y, float sign, const float *P, const float *Q, int row, int col)
{
    float4 acc = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int m = 0; m < N; m += 4) {
        float4 p4 = *(const float4 *)(P + row * TS + m);
        const float p[4] = {p4.x, p4.y, p4.z, p4.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float4 q = *(const float4 *)(Q + (m + i) * TS + col);
            acc.x = fmaf(p[i], q.x, acc.x);
            acc.y = fmaf(p[i], q.y, acc.y);
            acc.z = fmaf(p[i], q.z, acc.z);
            acc.w = fmaf(p[i], q.w, acc.w);
        }
    }
    *(float4 *)(Y + row * TS + col) = make_float4(sign * acc.x, sign * acc.y, sign * acc.z, sign * acc.w);
}

/* T = (I + A)^-1, A strictly lower 64 x 64 in fp32: forward substitution in the 16 x 16 diagonal blocks, then twice
 * T21 = -T22 A21 T11. The product A21 T11 waits in the upper triangle of T. */
__device__ __forceinline__ void invert(const float *A, float *T, int warp, int lane)
{
    if (warp < 4) {
        const float *a = A + warp * 16 * TS + warp * 16;
        float x[16];
        int j = lane % 16;
        x[0] = j == 0;
#pragma unroll
        for (int i = 1; i < 16; i++) {
            float sum = 0.f;
#pragma unroll
            for (int m = 0; m < i; m++)
                sum = fmaf(a[i * TS + m], x[m], sum);
            x[i] = (j == i ? 1.f : 0.f) - sum;
        }
        if (lane < 16)
#pragma unroll
            for (int i = 0; i < 16; i++)
                T[(warp * 16 + i) * TS + warp * 16 + j] = x[i];
    }
    __syncthreads();
    int b = warp / 2 * 32, t = threadIdx.x % 64, row = t / 4, col = t % 4 * 4;
    float *Tb = T + b * TS + b;
    if (warp < 4)
        small_product<16>(Tb + 16, 1.f, A + (b + 16) * TS + b, Tb, row, col);
    __syncthreads();
    if (warp < 4)
        small_product<16>(Tb + 16 * TS, -1.f, Tb + 16 * TS + 16, Tb + 16, row, col);
    __syncthreads();
    if (warp < 4)
        *(float4 *)(Tb + 16 + row * TS + col) = make_float4(0, 0, 0, 0);
    __syncthreads();
    row = threadIdx.x / 8, col = threadIdx.x % 8 * 4;
    small_product<32>(T + 32, 1.f, A + 32 * TS, T, row, col);
    __syncthreads();
    small_product<32>(T + 32 * TS, -1.f, T + 32 * TS + 32, T + 32, row, col);
    __syncthreads();
}

/* Rows 16 I .. of T * B (B: rows of W + 8 bf16) to the same rows of dst. T is lower triangular. */
template <int W> __device__ __forceinline__ void times_T(const bf16 *T, const bf16 *B, bf16 *dst, int I, int lane)
{
    const int RS = W + 8;
    float acc[W / 8][4] = {};
    for (int J = 0; J <= I; J++) {
        uint32_t a[4], b[4];
        ldsm4(a, saddr(T + (I * 16 + lane % 16) * TBS + 16 * J + lane / 16 * 8));
#pragma unroll
        for (int n = 0; n < W / 16; n++) {
            ldsm4t(b, saddr(B + (16 * J + lane % 16) * RS + n * 16 + lane / 16 * 8));
            mma(acc[2 * n], a, b[0], b[1]);
            mma(acc[2 * n + 1], a, b[2], b[3]);
        }
    }
    bf16 *to = dst + (I * 16 + lane / 4) * RS + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < W / 8; n++) {
        *(uint32_t *)(to + n * 8) = pack2(acc[n][0], acc[n][1]);
        *(uint32_t *)(to + 8 * RS + n * 8) = pack2(acc[n][2], acc[n][3]);
    }
}

/* `rows` rows from r0 of a tile in shared memory to a swizzled tile, by one warp; SLICED: the layout of u. */
template <int W, bool SLICED> __device__ __forceinline__ void store_rows(bf16 *dst, const bf16 *src, int r0, int rows, int lane)
{
    const int P = W / 8, RS = W + 8;
    int p = lane % P;
    for (int r = r0 + lane / P; r < r0 + rows; r += 32 / P)
        *(uint4 *)(dst + (SLICED ? ((p / 2 * C + r) * 2 + (p % 2 ^ (r >> 2 & 1))) * 8 : r * W + (p ^ (r & 7)) * 8)) = *(uint4 *)(src + r * RS + p * 8);
}

/* T to bf16 with B folded in: w = T B Kgam and u = T B V round T B once and leave Kgam and V as they are. */
template <int K, int V> __device__ void round_T(Smem<K, V> &sm, bf16 *Akk)
{
    for (int x = threadIdx.x; x < C * C / 2; x += THREADS) {
        int r = x / 32, col = x % 32 * 2;
        float2 y = *(float2 *)(sm.x.s.T + r * TS + col), b = *(float2 *)(sm.beta + col);
        if (col > r)
            y.x = 0.f;
        if (col + 1 > r)
            y.y = 0.f;
        *(uint32_t *)(sm.y.T + r * TBS + col) = pack2(y.x * b.x, y.y * b.y);
        if (Akk)
            *(uint32_t *)(Akk + r * C + col) = pack2(y.x, y.y);
    }
}

template <int K, int V, int GATE, bool KEYS> __global__ void __launch_bounds__(THREADS, 2) k_chunks(Dims d, dpg_tensors t, FastOut o)
{
    extern __shared__ __align__(16) char raw[];
    Smem<K, V> &sm = *(Smem<K, V> *)raw;
    int64_t tile = blockIdx.x;
    int hv = tile % d.HV, h = hv / d.G, warp = threadIdx.x / 32, lane = threadIdx.x % 32, I = warp % 4, half = warp / 4, lr = KEYS ? d.lr : 0, R = 1 << lr;
    Chunk c = d.chunk[tile / d.HV];
    int rows = c.len << lr;
    bool staged = d.g_bf16 && d.Kg == K;
    if (staged)
        load_tile<K>(sm.y.g, (const bf16 *)t.g + (c.t0 * d.HV + hv) * K, (int64_t)d.HV * K, 0, lr, rows);
    cp_commit();
    load_input<K>(d, sm.k, t.k, (c.t0 * d.H + h) * R * K, (int64_t)d.H * R * K, K, lr, rows, sm.rk);
    load_input<K>(d, sm.q, t.q, (c.t0 * d.H + h) * K, (int64_t)d.H * K, 0, lr, rows, sm.rq);
    load_input<V>(d, sm.v, t.v, (c.t0 * d.HV + hv) * R * V, (int64_t)d.HV * R * V, V, lr, rows, NULL);
    cp_commit();
    if (threadIdx.x < C)
        sm.beta[threadIdx.x] = threadIdx.x < rows ? beta_value(d, ldx(t.beta, ((c.t0 + (threadIdx.x >> lr)) * d.HV + hv) * R + (threadIdx.x & (R - 1)), d.g_bf16)) : 0.f;
    cp_wait<1>();
    __syncthreads();
    cumsum_gate<GATE>(d, t, sm, c, hv, lr, staged);
    cp_wait<0>();
    __syncthreads();
    norms(d, sm, warp, lane);
    if (warp < 4)
        find_wide(sm, warp, lane);
    __syncthreads();
    fill_tables(sm, o, tile, d.Kg);
    __syncthreads();
    stage_kb(sm, o.kg + tile * C * K, warp, lane);
    __syncthreads();
    Sums z = {};
    float mine[4][2][4];
    products(sm, I, half, lane, lr, z);
    __syncthreads();
    store_rows<K, false>(o.qg + tile * C * K, sm.q, warp * 8, 8, lane);
    exchange(sm, I, half, lane, z, mine);
    bf16 *Aqk = o.Aqk + tile * C * C, *L = o.L ? o.L + tile * C * C : NULL;
#pragma unroll
    for (int J = 0; J < 3; J++)
        if (J < I)
            emit_block(sm, I, half, lane, lr, J, d.scale, mine[J], Aqk, L);
    emit_block(sm, I, half, lane, lr, I, d.scale, mine[3], Aqk, L);
    for (int x = lane; half && x < 16 * (3 - I) * 2; x += 32) {
        int s = I * 16 + x % 16, piece = 2 * (I + 1) + x / 16;
        *(uint4 *)(Aqk + s * C + (piece ^ (s & 7)) * 8) = make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
    invert(sm.x.s.A, sm.x.s.T, warp, lane);
    round_T(sm, o.Akk ? o.Akk + tile * C * C : NULL);
    __syncthreads();
    if (half) {
        times_T<V>(sm.y.T, sm.v, sm.x.out.u, I, lane);
        __syncwarp();
        store_rows<V, true>(o.u + tile * C * V, sm.x.out.u, I * 16, 16, lane);
    } else {
        times_T<K>(sm.y.T, sm.k, sm.x.out.w, I, lane);
        __syncwarp();
        store_rows<K, false>(o.w + tile * C * K, sm.x.out.w, I * 16, 16, lane);
    }
}

/* ---- k_scan ---------------------------------------------------------------------------------------------------------------------- */

struct ScanArgs {
    const bf16 *w, *u, *kg, *qg, *Aqk;
    const float *eC, *s0, *sin;
    void *o;
    float *final_state;
    bf16 *h, *v_new;                                     /* NULL unless kept; plain row-major tiles */
};

#define STAGES 3                                         /* chunks on their way or in use */
template <int K, int NW> struct Stage {
    bf16 w[C * K], kg[C * K], qg[C * K], Aqk[C * C], u[NW * C * 16];
    float eC[K];
};
template <int K, int NW> struct Pipe {
    Stage<K, NW> st[STAGES];
    uint64_t full[STAGES], empty[STAGES];
};

template <int K, int NW> __device__ void pipe_init(Pipe<K, NW> &pipe, int readers)
{
    if (threadIdx.x == 0)
        for (int i = 0; i < STAGES; i++) {
            bar_init(&pipe.full[i], 1);
            bar_init(&pipe.empty[i], WARPS(readers));
        }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncthreads();
}

/* One thread loads chunk c, the i-th of a sub-sequence, of one head: NW column slices of u from `slice` * NW. */
template <int K, int V, int NW> __device__ void feed(const Dims &d, const ScanArgs &a, Pipe<K, NW> &pipe, int c, int i, int hv, int slice)
{
    const int ST = STAGES, T2 = C * K * 2, bytes = 3 * T2 + K * 4 + C * C * 2 + NW * C * 32;
    int64_t tile = (int64_t)c * d.HV + hv;
    Stage<K, NW> &s = pipe.st[i % ST];
    uint64_t *full = &pipe.full[i % ST];
    if (i >= ST)
        bar_wait(&pipe.empty[i % ST], (i / ST - 1) & 1);
    bar_expect(full, bytes);
    bulk(s.w, a.w + tile * C * K, T2, full);
    bulk(s.kg, a.kg + tile * C * K, T2, full);
    bulk(s.eC, a.eC + tile * K, K * 4, full);
    bulk(s.u, a.u + tile * C * V + slice * NW * C * 16, NW * C * 32, full);
    bulk(s.qg, a.qg + tile * C * K, T2, full);
    bulk(s.Aqk, a.Aqk + tile * C * C, C * C * 2, full);
    bar_loaded(full);
}

/* A producer warp's one thread feeds a whole sub-sequence. */
template <int K, int V, int NW> __device__ void produce(const Dims &d, const ScanArgs &a, Pipe<K, NW> &pipe, Seq seq, int hv, int slice)
{
    for (int c = seq.c0, i = 0; c < seq.c1; c++, i++)
        feed<K, V, NW>(d, a, pipe, c, i, hv, slice);
}

/* Initial state of a sub-sequence or segment: s0 where its sequence starts, else what the merge brought, else (NULL) zeros. */
__device__ __forceinline__ const float *initial(const Dims &d, const ScanArgs &a, Seq seq, int hv)
{
    int64_t kv = (int64_t)d.K * d.V;
    return seq.starts ? (a.s0 ? a.s0 + ((int64_t)seq.gseq * d.HV + hv) * kv : NULL) : a.sin ? a.sin + ((int64_t)seq.part * d.HV + hv) * kv : NULL;
}

/* Element (k, v) of a state or of X', TILES n-tiles of 8, from the transposed fragments, through f(k, v, float&). v counts within the warp's 16 columns. */
template <int TILES, class F> __device__ __forceinline__ void each(float (*S)[4], int lane, F f)
{
#pragma unroll
    for (int j = 0; j < TILES; j++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            f(j * 8 + lane % 4 * 2 + e % 2, lane / 4 + e / 2 * 8, S[j][e]);
}

/* acc[nt] += S' B' for B = [64 tokens][K] (swizzled): n-tiles of 8 tokens. */
template <int K> __device__ __forceinline__ void times_rows(float acc[8][4], const uint32_t sa[K / 16][4], const bf16 *B, int lane)
{
    int row = lane / 16 * 8 + lane % 8, half = lane / 8 % 2;
    uint32_t base = saddr(B) + row * K * 2;
#pragma unroll
    for (int kk = 0; kk < K / 16; kk++) {
        uint32_t at = base + ((2 * kk + half) ^ (row & 7)) * 16;
#pragma unroll
        for (int n = 0; n < 4; n++) {
            uint32_t b[4];
            ldsm4(b, at + n * 16 * K * 2);
            mma(acc[2 * n], sa[kk], b[0], b[1]);
            mma(acc[2 * n + 1], sa[kk], b[2], b[3]);
        }
    }
}

/* X = u - (S' w')' for the warp's 16 columns, transposed; x holds S' w' on entry. */
__device__ __forceinline__ void minus_from_u(float x[8][4], const bf16 *u, int lane)
{
    int row = lane / 16 * 8 + lane % 8, piece = lane / 8 % 2 ^ (row >> 2 & 1);
#pragma unroll
    for (int n = 0; n < 4; n++) {
        uint32_t r[4];
        ldsm4t(r, saddr(u + (n * 16 + row) * 16 + piece * 8));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float2 y = unpack2(r[i]);
            float *xx = x[2 * n + i / 2] + i % 2 * 2;
            xx[0] = y.x - xx[0];
            xx[1] = y.y - xx[1];
        }
    }
}

/* S' <- eC o S' + X' kg. The sum over tokens starts from zero and is added in fp32: the accumulator of a tensor core rounds toward
 * zero, and S must not see that once per chunk. */
template <int K> __device__ __forceinline__ void update(float S[K / 8][4], const uint32_t xa[4][4], const bf16 *kg, const float *eC, int lane)
{
    int row = lane % 16, tc = lane % 4;
    uint32_t base = saddr(kg) + row * K * 2;
#pragma unroll
    for (int j = 0; j < K / 8; j += 4) {
        float acc[4][4] = {};
#pragma unroll
        for (int p = 0; p < 4; p++)
#pragma unroll
            for (int jj = 0; jj < 4; jj += 2) {
                uint32_t b[4];
                ldsm4t(b, base + p * 16 * K * 2 + ((j + jj + lane / 16) ^ (row & 7)) * 16);
                mma(acc[jj], xa[p], b[0], b[1]);
                mma(acc[jj + 1], xa[p], b[2], b[3]);
            }
#pragma unroll
        for (int jj = 0; jj < 4; jj++) {
            float2 e = *(const float2 *)(eC + (j + jj) * 8 + 2 * tc);
            S[j + jj][0] = fmaf(e.x, S[j + jj][0], acc[jj][0]);
            S[j + jj][1] = fmaf(e.y, S[j + jj][1], acc[jj][1]);
            S[j + jj][2] = fmaf(e.x, S[j + jj][2], acc[jj][2]);
            S[j + jj][3] = fmaf(e.y, S[j + jj][3], acc[jj][3]);
        }
    }
}

/* o' += X' Aqk'; Aqk is lower triangular in blocks of 16. */
__device__ __forceinline__ void times_aqk(float o[8][4], const uint32_t xa[4][4], const bf16 *Aqk, int lane)
{
    int row = lane / 16 * 8 + lane % 8, half = lane / 8 % 2;
    uint32_t base = saddr(Aqk) + row * C * 2;
#pragma unroll
    for (int p = 0; p < 4; p++)
#pragma unroll
        for (int n = p; n < 4; n++) {
            uint32_t b[4];
            ldsm4(b, base + n * 16 * C * 2 + ((2 * p + half) ^ (row & 7)) * 16);
            mma(o[2 * n], xa[p], b[0], b[1]);
            mma(o[2 * n + 1], xa[p], b[2], b[3]);
        }
}

/* 16 PAIRS rows of o from row s0 of a chunk, 16 columns, of each token the first row; bf16 through 512 PAIRS bytes of shared memory, so that rows leave whole. */
template <int PAIRS> __device__ __forceinline__ void store_o(const Dims &d, void *out, float (*o)[4], bf16 *stage, Chunk c, int s0, int hv, int v0, int lane)
{
    int row = lane / 16 * 8 + lane % 8, piece = lane / 8 % 2 ^ (row >> 2 & 1);
    int64_t base = ((c.t0 + (s0 >> d.lr)) * d.HV + hv) * d.V + v0, step = (int64_t)d.HV * d.V;
    int rows = (c.len << d.lr) - s0, other = d.R - 1;
    if (!d.o_bf16) {
        each<2 * PAIRS>(o, lane, [&](int s, int v, float &y) {
            if (s < rows && !(s & other))
                ((float *)out)[base + (s >> d.lr) * step + v] = y;
        });
        return;
    }
#pragma unroll
    for (int n = 0; n < PAIRS; n++) {
        uint32_t r[4] = {pack2(o[2 * n][0], o[2 * n][1]), pack2(o[2 * n][2], o[2 * n][3]), pack2(o[2 * n + 1][0], o[2 * n + 1][1]),
                         pack2(o[2 * n + 1][2], o[2 * n + 1][3])};
        stsm4t(saddr(stage + (n * 16 + row) * 16 + piece * 8), r);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        int s = i * 16 + lane / 2, half = lane % 2;
        if (s < rows && !(s & other))
            *(uint4 *)((bf16 *)out + base + (s >> d.lr) * step + half * 8) = *(uint4 *)(stage + s * 16 + (half ^ (s >> 2 & 1)) * 8);
    }
    __syncwarp();
}

template <int K> __device__ __forceinline__ void split_state(uint32_t sa[K / 16][4], const float S[K / 8][4])
{
#pragma unroll
    for (int kk = 0; kk < K / 16; kk++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            sa[kk][i] = pack2(S[2 * kk + i / 2][i % 2 * 2], S[2 * kk + i / 2][i % 2 * 2 + 1]);
}

/* Many heads: one warp per 16 columns, NW of them in a block share the tiles. */
template <int K, int NW> struct ScanSmem { Pipe<K, NW> pipe; bf16 o[NW * C * 16]; };

template <int K, int V, int NW> __device__ void scan_warp(const Dims &d, const ScanArgs &a, ScanSmem<K, NW> &sm, Seq seq, int hv, int slice, int warp, int lane)
{
    const int ST = STAGES;
    int v0 = (slice * NW + warp) * 16;
    float S[K / 8][4];
    const float *init = initial(d, a, seq, hv);
    each<K / 8>(S, lane, [&](int k, int v, float &s) { s = init ? init[k * V + v0 + v] : 0.f; });
    for (int c = seq.c0, i = 0; c < seq.c1; c++, i++) {
        int64_t tile = (int64_t)c * d.HV + hv;
        Stage<K, NW> &st = sm.pipe.st[i % ST];
        float x[8][4] = {};
        uint32_t sa[K / 16][4], xa[4][4];
        bar_wait(&sm.pipe.full[i % ST], i / ST & 1);
        split_state<K>(sa, S);
        if (a.h)
            each<K / 8>(S, lane, [&](int k, int v, float &s) { a.h[(tile * K + k) * V + v0 + v] = __float2bfloat16_rn(s); });
        times_rows<K>(x, sa, st.w, lane);
        minus_from_u(x, st.u + warp * C * 16, lane);
#pragma unroll
        for (int p = 0; p < 4; p++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                xa[p][e] = pack2(x[2 * p + e / 2][e % 2 * 2], x[2 * p + e / 2][e % 2 * 2 + 1]);
        if (a.v_new)
            each<8>(x, lane, [&](int s, int v, float &y) { a.v_new[(tile * C + s) * V + v0 + v] = __float2bfloat16_rn(y); });
        update<K>(S, xa, st.kg, st.eC, lane);
        float o[8][4] = {};
        times_rows<K>(o, sa, st.qg, lane);
#pragma unroll
        for (int nt = 0; nt < 8; nt++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                o[nt][e] *= d.scale;
        times_aqk(o, xa, st.Aqk, lane);
        store_o<4>(d, a.o, o, sm.o + warp * C * 16, d.chunk[c], 0, hv, v0, lane);
        __syncwarp();
        bar_arrive_warp(&sm.pipe.empty[i % ST], lane);
    }
    if (a.final_state && seq.ends)
        each<K / 8>(S, lane, [&](int k, int v, float &s) { a.final_state[(((int64_t)seq.gseq * d.HV + hv) * K + k) * V + v0 + v] = s; });
}

/* NW warps of columns and a producer. */
#define SCAN_THREADS(NW) (((NW) + 1) * 32)
template <int K, int V, int NW> __global__ void __launch_bounds__(SCAN_THREADS(NW), 1) k_scan(Dims d, ScanArgs a)
{
    extern __shared__ __align__(128) char scan_raw[];
    ScanSmem<K, NW> &sm = *(ScanSmem<K, NW> *)scan_raw;
    const int slices = V / 16 / NW;
    int slice = blockIdx.x % slices, hv = blockIdx.x / slices % d.HV, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Seq seq = d.seq[blockIdx.x / slices / d.HV];
    pipe_init(sm.pipe, NW);
    if (warp < NW)
        scan_warp<K, V, NW>(d, a, sm, seq, hv, slice, warp, lane);
    else if (lane == 0)
        produce<K, V, NW>(d, a, sm.pipe, seq, hv, slice);
}

/* Few heads: a team of 4 warps per 16 columns. Warp t computes X of tokens 16 t .. and S of its K/4 channels;
 * operand fragments pass through shared memory as they stand in registers, with two barriers per chunk; fragments of w and kg are
 * loaded before the barrier that their products wait for. Four more warps, a chunk behind at most, compute o from the same fragments. */
template <int K> struct TeamSmem {
    Pipe<K, 1> pipe;
    uint4 S[2][K / 16][32], X[2][4][32];
    bf16 o[C * 16];
    uint64_t ready[2], taken[2];                         /* S and X of a chunk are complete; the output warps have read them: all 128 arrive */
};

__device__ __forceinline__ void team_sync() { asm volatile("bar.sync 1, 128;" ::: "memory"); }

/* One A fragment (n-tiles a, b of an accumulator), as bf16. */
__device__ __forceinline__ uint4 fragment(const float a[4], const float b[4])
{
    return make_uint4(pack2(a[0], a[1]), pack2(a[2], a[3]), pack2(b[0], b[1]), pack2(b[2], b[3]));
}

/* B fragments of 16 tokens (rows 16 t .. of a swizzled tile) over all K channels. */
template <int K> __device__ __forceinline__ void load_rows(uint32_t b[K / 16][4], const bf16 *B, int t, int lane)
{
    int row = t * 16 + lane / 16 * 8 + lane % 8, half = lane / 8 % 2;
    uint32_t base = saddr(B) + row * K * 2;
#pragma unroll
    for (int kk = 0; kk < K / 16; kk++)
        ldsm4(b[kk], base + ((2 * kk + half) ^ (row & 7)) * 16);
}

/* x = S' B' for 16 tokens. Even and odd k-steps keep separate sums: shorter chains. */
template <int K> __device__ __forceinline__ void team_rows(float x[2][4], const uint4 S[K / 16][32], const uint32_t b[K / 16][4], int lane)
{
    float acc[2][2][4] = {};
    uint4 f[K / 16];
#pragma unroll
    for (int kk = 0; kk < K / 16; kk++)
        f[kk] = S[kk][lane];
#pragma unroll
    for (int kk = 0; kk < K / 16; kk++) {
        uint32_t sa[4] = {f[kk].x, f[kk].y, f[kk].z, f[kk].w};
#pragma unroll
        for (int n = 0; n < 2; n++)
            mma(acc[kk % 2][n], sa, b[kk][2 * n], b[kk][2 * n + 1]);
    }
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            x[n][e] = acc[0][n][e] + acc[1][n][e];
}

__device__ __forceinline__ void load_x(uint32_t xa[4][4], const uint4 X[4][32], int lane)
{
#pragma unroll
    for (int p = 0; p < 4; p++) {
        uint4 f = X[p][lane];
        xa[p][0] = f.x, xa[p][1] = f.y, xa[p][2] = f.z, xa[p][3] = f.w;
    }
}

template <int K, int V> __device__ void team_state(const Dims &d, const ScanArgs &a, TeamSmem<K> &sm, Seq seq, int hv, int v0, int t, int lane)
{
    const int NJ = K / 32, ST = STAGES;
    const float *init = initial(d, a, seq, hv);
    int k0 = t * NJ * 8, urow = lane / 16 * 8 + lane % 8, upiece = lane / 8 % 2 ^ (urow >> 2 & 1), krow = lane % 16;
    float S[NJ][4];
    each<NJ>(S, lane, [&](int k, int v, float &s) { s = init ? init[(k0 + k) * V + v0 + v] : 0.f; });
    for (int c = seq.c0, i = 0; c < seq.c1; c++, i++) {
        int64_t tile = (int64_t)c * d.HV + hv;
        int buf = i % 2;
        Stage<K, 1> &st = sm.pipe.st[i % ST];
        float x[2][4], acc[NJ][4] = {};
        uint32_t b[K / 16][4], xa[4][4], kb[4][NJ / 2][4], u[4];
        float2 e[NJ];
        if (i >= 2)
            bar_wait(&sm.taken[buf], (i / 2 - 1) & 1);
#pragma unroll
        for (int j = 0; j < NJ; j += 2)
            sm.S[buf][(t * NJ + j) / 2][lane] = fragment(S[j], S[j + 1]);
        if (a.h)
            each<NJ>(S, lane, [&](int k, int v, float &s) { a.h[(tile * K + k0 + k) * V + v0 + v] = __float2bfloat16_rn(s); });
        bar_wait(&sm.pipe.full[i % ST], i / ST & 1);
        load_rows<K>(b, st.w, t, lane);
        ldsm4t(u, saddr(st.u + (t * 16 + urow) * 16 + upiece * 8));
        team_sync();
        team_rows<K>(x, sm.S[buf], b, lane);
#pragma unroll
        for (int r = 0; r < 4; r++) {
            float2 y = unpack2(u[r]);
            float *xx = x[r / 2] + r % 2 * 2;
            xx[0] = y.x - xx[0];
            xx[1] = y.y - xx[1];
        }
        sm.X[buf][t][lane] = fragment(x[0], x[1]);
        if (a.v_new)
            each<2>(x, lane, [&](int s, int v, float &y) { a.v_new[(tile * C + t * 16 + s) * V + v0 + v] = __float2bfloat16_rn(y); });
#pragma unroll
        for (int p = 0; p < 4; p++)
#pragma unroll
            for (int j = 0; j < NJ / 2; j++)
                ldsm4t(kb[p][j], saddr(st.kg) + (p * 16 + krow) * K * 2 + ((t * NJ + 2 * j + lane / 16) ^ (krow & 7)) * 16);
#pragma unroll
        for (int j = 0; j < NJ; j++)
            e[j] = *(const float2 *)(st.eC + k0 + j * 8 + lane % 4 * 2);
        bar_arrive(&sm.ready[buf]);
        team_sync();
        load_x(xa, sm.X[buf], lane);
        __syncwarp();
        bar_arrive_warp(&sm.pipe.empty[i % ST], lane);
#pragma unroll
        for (int p = 0; p < 4; p++)
#pragma unroll
            for (int j = 0; j < NJ; j++)
                mma(acc[j], xa[p], kb[p][j / 2][j % 2 * 2], kb[p][j / 2][j % 2 * 2 + 1]);
#pragma unroll
        for (int j = 0; j < NJ; j++) {
            S[j][0] = fmaf(e[j].x, S[j][0], acc[j][0]);
            S[j][1] = fmaf(e[j].y, S[j][1], acc[j][1]);
            S[j][2] = fmaf(e[j].x, S[j][2], acc[j][2]);
            S[j][3] = fmaf(e[j].y, S[j][3], acc[j][3]);
        }
    }
    if (a.final_state && seq.ends)
        each<NJ>(S, lane, [&](int k, int v, float &s) { a.final_state[(((int64_t)seq.gseq * d.HV + hv) * K + k0 + k) * V + v0 + v] = s; });
}

/* o of tokens 16 t .. of every chunk: scale S' qg' + X' Aqk'. */
template <int K, int V> __device__ void team_output(const Dims &d, const ScanArgs &a, TeamSmem<K> &sm, Seq seq, int hv, int v0, int t, int lane)
{
    const int ST = STAGES;
    int row = t * 16 + lane / 16 * 8 + lane % 8, half = lane / 8 % 2;
    for (int c = seq.c0, i = 0; c < seq.c1; c++, i++) {
        Stage<K, 1> &st = sm.pipe.st[i % ST];
        uint32_t b[K / 16][4], xa[4][4], q[4][4];
        float o[2][4];
        Chunk ch = d.chunk[c];
        bar_wait(&sm.pipe.full[i % ST], i / ST & 1);
        load_rows<K>(b, st.qg, t, lane);
#pragma unroll
        for (int p = 0; p < 4; p++)
            ldsm4(q[p], saddr(st.Aqk) + row * C * 2 + ((2 * p + half) ^ (row & 7)) * 16);
        __syncwarp();
        bar_arrive_warp(&sm.pipe.empty[i % ST], lane);
        bar_wait(&sm.ready[i % 2], i / 2 & 1);
        team_rows<K>(o, sm.S[i % 2], b, lane);
        load_x(xa, sm.X[i % 2], lane);
        bar_arrive(&sm.taken[i % 2]);
#pragma unroll
        for (int e = 0; e < 8; e++)
            o[e / 4][e % 4] *= d.scale;
#pragma unroll
        for (int p = 0; p < 4; p++)
            if (p <= t) {
                mma(o[0], xa[p], q[p][0], q[p][1]);
                mma(o[1], xa[p], q[p][2], q[p][3]);
            }
        store_o<1>(d, a.o, o, sm.o + t * 256, ch, t * 16, hv, v0, lane);
    }
}

#define TEAM_THREADS 288                                 /* 4 warps of state, then 4 of output, then the producer */
template <int K, int V> __global__ void __launch_bounds__(TEAM_THREADS) k_team(Dims d, ScanArgs a)
{
    extern __shared__ __align__(128) char scan_raw[];
    TeamSmem<K> &sm = *(TeamSmem<K> *)scan_raw;
    int slice = blockIdx.x % (V / 16), hv = blockIdx.x / (V / 16) % d.HV, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Seq seq = d.seq[blockIdx.x / (V / 16) / d.HV];
    if (threadIdx.x == 0)
        for (int i = 0; i < 2; i++) {
            bar_init(&sm.ready[i], 128);
            bar_init(&sm.taken[i], 128);
        }
    pipe_init(sm.pipe, 8);
    if (warp < 4)
        team_state<K, V>(d, a, sm, seq, hv, slice * 16, warp, lane);
    else if (warp < 8)
        team_output<K, V>(d, a, sm, seq, hv, slice * 16, warp - 4, lane);
    else if (lane == 0)
        produce<K, V, 1>(d, a, sm.pipe, seq, hv, slice);
}

/* ---- host ------------------------------------------------------------------------------------------------------------------------ */

int fast_supports(const dpg_problem *p, const dpg_options *o)
{
    return o->base == DP_BASE_BF16 && (p->K == 64 || p->K == 128) && (p->V == 64 || p->V == 128);
}

template <int K, int V, int GATE> static dp_status launch_chunks(dpg_plan *p, const dpg_tensors *t, void *ws, cudaStream_t s, dp_err *e)
{
    FastOut o = {at<bf16>(p, ws, B_W), at<bf16>(p, ws, B_U), at<bf16>(p, ws, B_KG), at<bf16>(p, ws, B_QG), at<bf16>(p, ws, B_AQK),
                 at<bf16>(p, ws, B_AKK), at<bf16>(p, ws, B_L), at<float>(p, ws, B_EC), at<float>(p, ws, B_GCUM)};
    auto kernel = p->d.R > 1 ? k_chunks<K, V, GATE, true> : k_chunks<K, V, GATE, false>;
    CK(e, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)sizeof(Smem<K, V>)));
    kernel<<<(unsigned)((int64_t)p->d.NT * p->d.HV), THREADS, sizeof(Smem<K, V>), s>>>(p->d, *t, o);
    CK_LAUNCH(e, "k_chunks");
    return DP_OK;
}

template <int K, int V> static dp_status chunks_of(dpg_plan *p, const dpg_tensors *t, void *ws, cudaStream_t s, dp_err *e)
{
    return p->d.gate == DP_GATE_LOG ? launch_chunks<K, V, DP_GATE_LOG>(p, t, ws, s, e)
        : p->d.gate == DP_GATE_SOFTPLUS ? launch_chunks<K, V, DP_GATE_SOFTPLUS>(p, t, ws, s, e) : launch_chunks<K, V, DP_GATE_LOWER_BOUND>(p, t, ws, s, e);
}

dp_status fast_chunks(dpg_plan *p, const dpg_tensors *t, void *ws, cudaStream_t s, dp_err *e)
{
    FAULT_TO_DEVICE(e, s);
    return BY_WIDTHS(chunks_of, p, t, ws, s, e);
}

template <int K, int V> static dp_status launch_team(dpg_plan *p, ScanArgs a, int nseq, cudaStream_t s, dp_err *e)
{
    int bytes = (int)sizeof(TeamSmem<K>);
    CK(e, cudaFuncSetAttribute(k_team<K, V>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    k_team<K, V><<<(unsigned)nseq * p->d.HV * (V / 16), TEAM_THREADS, bytes, s>>>(p->d, a);
    CK_LAUNCH(e, "k_team");
    return DP_OK;
}

template <int K, int V, int NW> static dp_status launch_scan(dpg_plan *p, ScanArgs a, int nseq, cudaStream_t s, dp_err *e)
{
    int bytes = (int)sizeof(ScanSmem<K, NW>);
    CK(e, cudaFuncSetAttribute(k_scan<K, V, NW>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    k_scan<K, V, NW><<<(unsigned)nseq * p->d.HV * (V / 16 / NW), SCAN_THREADS(NW), bytes, s>>>(p->d, a);
    CK_LAUNCH(e, "k_scan");
    return DP_OK;
}

/* Slices that share a block share the tiles it reads, and need no barriers; teams finish a chunk sooner. With fewer than about 100 blocks
 * of 4 slices the chain of chunks is what takes the time. */
template <int K, int V> static dp_status launch_out(dpg_plan *p, ScanArgs a, int nseq, cudaStream_t s, dp_err *e)
{
    return (int64_t)nseq * p->d.HV * (V / 64) < 100 ? launch_team<K, V>(p, a, nseq, s, e) : launch_scan<K, V, 4>(p, a, nseq, s, e);
}

dp_status fast_state(dpg_plan *p, const dpg_tensors *t, void *ws, cudaStream_t s, dp_err *e)
{
    ScanArgs a = {at<bf16>(p, ws, B_W), at<bf16>(p, ws, B_U), at<bf16>(p, ws, B_KG), at<bf16>(p, ws, B_QG), at<bf16>(p, ws, B_AQK), at<float>(p, ws, B_EC), t->s0,
                  at<float>(p, ws, B_SIN), t->o, t->final_state, at<bf16>(p, ws, B_H), at<bf16>(p, ws, B_VNEW)};
    int nseq = p->d.nseq - 1 + p->nseg;
    return BY_WIDTHS(launch_out, p, a, nseq, s, e);
}
