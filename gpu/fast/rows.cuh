/* gpu/fast/rows.cuh - the element-wise part of a tile: decayed rows of q and k, made in registers.
 *
 * A warp owns N rows of a tile, a lane E = K / 32 channels of them. So one warp reads, writes and
 * sums a row. The gate's sums are local to the N rows. The parts before and after them come from
 * sums that the warps leave in shared memory (Anchors). */
#ifndef DPG_ROWS_CUH
#define DPG_ROWS_CUH
#include "fast/gate.cuh"
#include "fault.cuh"

/* Which tile a block works on. */
struct Place {
    int64_t tile;
    unsigned zero;       /* 0, but not to the compiler */
    int hv, h, lr, rows; /* value head, query head, log2 R, rows that are not padding */
    Chunk c;
    int64_t at_h, at_hv; /* its first token among rows of query heads, of value heads */
};
__device__ __forceinline__ Place place_of(const Dims &d, unsigned chunk, unsigned hv) {
    Place p;
    p.tile = (int64_t)chunk * d.HV + hv;
    p.hv = (int)hv;
    p.h = d.G == 1 ? p.hv : p.hv / d.G;
    p.lr = d.lr;
    p.c = d.chunk[chunk];
    p.rows = p.c.len << p.lr;
    p.zero = (unsigned)p.rows >> 31;
    p.at_h = p.c.t0 * d.H + p.h;
    p.at_hv = p.c.t0 * d.HV + p.hv;
    return p;
}

__device__ __forceinline__ Place place_of(const Dims &d, unsigned tile) {
    return place_of(d, tile / (unsigned)d.HV, tile % (unsigned)d.HV);
}

/* A tile's anchors, the first rows of its blocks of 16, by channel; log2 units. The warps leave the
 * sums of their N rows and the gates of first rows here. One thread a channel makes the rest of
 * them (solve). Differences are sums of what lies between, not differences of sums from the chunk's
 * start.
 */
template <int K, int N> struct Anchors {
    float here[C / N][K]; /* sum of a group of rows; later the gate from the block's anchor to the
                           * row before the group. That gate is added to the group's sums */
    float first[4][K];    /* gate of the blocks' first rows */
    float next[4][K];     /* from an anchor to the next one, from the last to the chunk's end */

    /* before: from the chunk's start to each anchor, and to the chunk's end. Bit b of the value:
     * does block b need sums over pairs, or its decay to the next anchor in one exponential. */
    __device__ __forceinline__ int solve(int ch, float before[5]) {
        const int G = 16 / N; /* groups of a block */
        float run = 0.f;
        int wide = 0;
#pragma unroll
        for (int b = 0; b < 4; b++) {
            float f = first[b][ch], sum = 0.f, all = 0.f;
            if (FAULT(GATE_BACK))
                for (int g = 0; g < G; g++)
                    all += here[b * G + g][ch];
#pragma unroll
            for (int g = 0; g < G; g++) {
                float x = here[b * G + g][ch];
                here[b * G + g][ch] = (FAULT(GATE_BACK) ? all - (all - sum) : sum) - f;
                sum += x;
            }
            before[b] = run + f;
            run += sum;
            float on = sum - f + (b < 3 ? first[b + 1][ch] : 0.f);
            next[b][ch] = on;
            wide |= (is_far(sum - f) || is_lost(on)) << b;
        }
        before[4] = run;
        return wide;
    }
};

/* Does one of 32 N channels need them. */
template <int N> __device__ __forceinline__ bool is_wide(const int wide[N]) {
    int any = 0;
#pragma unroll
    for (int i = 0; i < N; i++)
        any |= wide[i];
    return any;
}
/* One thread a channel, whole warps: anchors, and by block and 32 channels whether pairs need sums.
 * Returns the gate of the whole chunk. */
template <int K, int N>
__device__ __forceinline__ float solve_anchors(Anchors<K, N> &anchors, float before[][K],
                                               int wide[4][K / 32], int ch) {
    float x[5];
    int bits = anchors.solve(ch, x);
#pragma unroll
    for (int b = 0; b < 4; b++) {
        before[b][ch] = x[b];
        int any = __any_sync(~0u, bits >> b & 1);
        if (ch % 32 == 0) wide[b][ch / 32] = any;
    }
    return x[4];
}

/* A lane's channels of its rows. */
template <int K, int N> struct GateRows {
    static const int E = K / 32;
    float sum[N][E];         /* from the first of the rows to each, log2 units; raw gates before */
    uint32_t A_log, bias[E]; /* parameters as they stand in memory */

    /* From the raw gate. A row behind the end, or of a key that is not its token's first, adds
     * nothing. */
    template <int GATE>
    __device__ __forceinline__ void activate(const Dims &d, const Place &p, int row0) {
        float a = expf(param_value(A_log, d.A_type)), lower = d.lower_bound * LOG2E;
        float run[E] = {}, bias2[E];
#pragma unroll
        for (int e = 0; e < E; e++)
            bias2[e] = param_value(bias[e], d.bias_type) * LOG2E;
#pragma unroll
        for (int i = 0; i < N; i++) {
            bool adds = row0 + i < p.rows && ((row0 + i) & ((1 << p.lr) - 1)) == 0;
#pragma unroll
            for (int e = 0; e < E; e++) {
                float g = gate_fast<GATE>(sum[i][e], a, bias2[e], lower);
                run[e] += adds ? g : 0.f;
                sum[i][e] = run[e];
            }
        }
    }
    /* Raw gates as they stand in memory, pairs of bf16 in the first half of a row's words: nothing
     * waits for them here. */
    __device__ __forceinline__ void fetch(const Dims &d, const dpg_tensors &t, const Place &p,
                                          int row0, int ch) {
        TileRows rows(t.g, p.at_hv, d.HV, 0, K, ch, d.g_bf16);
        A_log = param_word(t.A_log, p.hv, d.A_type);
#pragma unroll
        for (int e = 0; e < E; e++)
            bias[e] = param_word(t.dt_bias, p.hv * K + ch + e, d.bias_type);
#pragma unroll
        for (int i = 0; i < N; i++) {
            const char *g = rows[min(row0 + i, p.rows - 1) >> p.lr];
            if (!d.g_bf16)
                load_values<E>(sum[i], g, 0, false);
            else if (E == 4)
                *(float2 *)sum[i] = *(const float2 *)g;
            else
                sum[i][0] = *(const float *)g;
        }
    }
    __device__ __forceinline__ void finish(const Dims &d, const Place &p, int row0) {
        if (d.g_bf16)
#pragma unroll
            for (int i = 0; i < N; i++)
#pragma unroll
                for (int e = E / 2 - 1; e >= 0; e--)
                    *(float2 *)(sum[i] + 2 * e) = unpack2(__float_as_uint(sum[i][e]));
        if (d.gate == DP_GATE_LOG)
            activate<DP_GATE_LOG>(d, p, row0);
        else if (d.gate == DP_GATE_SOFTPLUS)
            activate<DP_GATE_SOFTPLUS>(d, p, row0);
        else
            activate<DP_GATE_LOWER_BOUND>(d, p, row0);
    }
};

/* A lane's channels of N rows of k and q, rounded to bf16, and 1/norms of the rows. */
template <int K, int N> struct KeyRows {
    static const int E = K / 32;
    uint32_t k[N][E / 2], q[N][E / 2];
    float sk[N], sq[N]; /* sums of squares of the inputs before rounding, until finish() */
    float rk, rq, own;  /* of row lane / (32 / N); own: q k' of normalised rows */

    /* All loads before anything that waits for one; a row behind the end reads the last one. */
    template <int BF16>
    __device__ __forceinline__ void read(const Dims &d, const dpg_tensors &t, const Place &p,
                                         int row0, int ch) {
        TileRows ks(t.k, p.at_h << p.lr, d.H, p.lr, K, ch, BF16);
        TileRows qs(t.q, p.at_h, d.H, 0, K, ch, BF16);
#pragma unroll
        for (int i = 0; i < N; i++) {
            int r = min(row0 + i, p.rows - 1);
            sk[i] = sq[i] = 0.f;
            load_pairs<E>(k[i], ks[r], 0, BF16, sk[i]);
            load_pairs<E>(q[i], qs[r >> p.lr], 0, BF16, sq[i]);
            if (BF16) sk[i] = sq[i] = 0.f; /* finish() adds them: nothing here waits for a load */
        }
    }
    __device__ __forceinline__ void fetch(const Dims &d, const dpg_tensors &t, const Place &p,
                                          int row0, int ch) {
        if (d.in_bf16)
            read<1>(d, t, p, row0, ch);
        else
            read<0>(d, t, p, row0, ch);
    }
    /* Values that follow from fetched rows. */
    __device__ __forceinline__ void finish(const Dims &d, const Place &p, int row0, int lane) {
        float dot[N];
        if (row0 + N > p.rows)
#pragma unroll
            for (int i = 0; i < N; i++) {
                bool here = row0 + i < p.rows;
                sk[i] = here ? sk[i] : 0.f;
                sq[i] = here ? sq[i] : 0.f;
#pragma unroll
                for (int e = 0; e < E / 2; e++) {
                    k[i][e] = here ? k[i][e] : 0u;
                    q[i][e] = here ? q[i][e] : 0u;
                }
            }
#pragma unroll
        for (int i = 0; i < N; i++) {
            dot[i] = 0.f;
#pragma unroll
            for (int e = 0; e < E / 2; e++) {
                float2 a = unpack2(k[i][e]), b = unpack2(q[i][e]);
                dot[i] = fmaf(a.x, b.x, fmaf(a.y, b.y, dot[i]));
                if (d.in_bf16) {
                    sk[i] = fmaf(a.y, a.y, fmaf(a.x, a.x, sk[i]));
                    sq[i] = fmaf(b.y, b.y, fmaf(b.x, b.x, sq[i]));
                }
            }
        }
        float nk = row_sums<N>(sk, lane), nq = row_sums<N>(sq, lane);
        rk = d.l2norm ? rsqrtf(nk + (float)DP_L2_EPS) : 1.f;
        rq = d.l2norm ? rsqrtf(nq + (float)DP_L2_EPS) : 1.f;
        own = row_sums<N>(dot, lane) * rk * rq;
    }
    /* Row i, normalised. zero: 0, which the compiler cannot know: it would keep the pairs unpacked
     * since the sums above, twice the registers. */
    __device__ __forceinline__ void normed(float ky[E], float qy[E], int i, unsigned zero) const {
        float nk = __shfl_sync(~0u, rk, lane_of(i)), nq = __shfl_sync(~0u, rq, lane_of(i));
#pragma unroll
        for (int e = 0; e < E; e += 2) {
            float2 a = unpack2(k[i][e / 2] ^ zero), b = unpack2(q[i][e / 2] ^ zero);
            ky[e] = a.x * nk;
            ky[e + 1] = a.y * nk;
            qy[e] = b.x * nq;
            qy[e + 1] = b.y * nq;
        }
    }
    /* The lane whose norms are those of row i. */
    static __device__ __forceinline__ int lane_of(int i) { return i * (32 / N); }
};

/* A warp's 8 rows of bf16 to shared memory (ROWS), zeros behind the end; a lane's pieces lie
 * constant steps apart. */
template <int K> struct CopiedRows {
    static const int PIECES = K / 8, STEP = 32 / PIECES; /* rows at once */
    int row, piece;
    unsigned at; /* of the first, in bytes */
    __device__ __forceinline__ CopiedRows(int row0, int lane)
        : row(row0 + lane / PIECES), piece(lane % PIECES), at(rows_at(row, piece) * 2) {}
    /* from: row 0 of the tile. Rows outside the tile are not read. */
    __device__ __forceinline__ void copy(bf16 *to, const bf16 *from, int heads, int rows) const {
        const bf16 *x = from + (unsigned)(row * heads * K + piece * 8);
        unsigned step = STEP * heads * K;
#pragma unroll
        for (int i = 0; i < 8 / STEP; i++)
            cp16((char *)to + (at ^ i * STEP * 16) + i * STEP * 128, x + i * step,
                 row + i * STEP < rows);
    }
};

/* 1/norms and q k' of 8 rows of bf16 in shared memory (ROWS), zeros behind the end, by a warp on
 * tensor cores. Their products are exact. A sum loses 2^-22 of |q| |k|, far below a rounding of o.
 * One matrix load has both operands: rows k over q are A, k or q alone are B. */
struct KeyNorms {
    float rk, rq, own; /* of row lane / 4, in the lane that is_here */

    static __device__ __forceinline__ int lane_of(int row) { return row * 4 + row / 2; }
    static __device__ __forceinline__ bool is_here(int lane) { return lane == lane_of(lane / 4); }
    template <int K>
    __device__ __forceinline__ void take(const Dims &d, const bf16 *k, const bf16 *q, int row0,
                                         int lane) {
        Walk<> at(lane / 8 % 2 ? q : k, row0 + lane % 8, lane / 16);
        float by_k[2][4] = {}, by_q[2][4] = {}; /* two chains of half the length */
#pragma unroll
        for (int j = 0; j < K / 16; j++) {
            uint32_t a[4];
            ldsm4(a, at.at(j));
            mma(by_k[j % 2], a, a[0], a[2]);
            mma(by_q[j % 2], a, a[1], a[3]);
        }
        bool odd = lane / 4 % 2;
        auto diagonal = [&](const float x[2][4], int i) {
            return odd ? x[0][i + 1] + x[1][i + 1] : x[0][i] + x[1][i];
        };
        rk = d.l2norm ? rsqrtf(diagonal(by_k, 0) + (float)DP_L2_EPS) : 1.f;
        rq = d.l2norm ? rsqrtf(diagonal(by_q, 2) + (float)DP_L2_EPS) : 1.f;
        own = diagonal(by_k, 2) * rk * rq;
    }
};

/* E channels of a row times f, rounded. */
template <int E>
__device__ __forceinline__ void scaled(uint32_t y[E / 2], const float x[E], const float f[E]) {
#pragma unroll
    for (int e = 0; e < E; e += 2)
        y[e / 2] = pack2(x[e] * f[e], x[e + 1] * f[e + 1]);
}

/* E neighbouring words. */
template <int E> __device__ __forceinline__ void load_words(float y[E], const float *x) {
    if (E == 1) y[0] = x[0];
#pragma unroll
    for (int e = 0; e + 1 < E; e += 2)
        *(float2 *)(y + e) = *(const float2 *)(x + e);
}
template <int E> __device__ __forceinline__ void put_words(float *x, const float y[E]) {
    if (E == 1) x[0] = y[0];
#pragma unroll
    for (int e = 0; e + 1 < E; e += 2)
        *(float2 *)(x + e) = make_float2(y[e], y[e + 1]);
}

/* Parameters of the gates of a lane's E channels, as they stand in memory. */
template <int E> struct GateOf {
    uint32_t A_log, bias[E];
    __device__ __forceinline__ void load(const Dims &d, const dpg_tensors &t, int hv, int lane) {
        A_log = param_word(t.A_log, hv, d.A_type);
#pragma unroll
        for (int e = 0; e < E; e++)
            bias[e] = param_word(t.dt_bias, hv * (E * 32) + lane * E + e, d.bias_type);
    }
};
/* One gate a head: a lane's rows 2 lane, 2 lane + 1. */
struct HeadGate {
    RawWord raw[2];
    uint32_t A_log, bias; /* as they stand in memory */
    __device__ __forceinline__ bool adds(const Place &p, int r) const {
        return r < p.rows && (r & ((1 << p.lr) - 1)) == 0;
    }
    __device__ __forceinline__ void load(const Dims &d, const dpg_tensors &t, const Place &p,
                                         int lane) {
        A_log = param_word(t.A_log, p.hv, d.A_type);
        bias = param_word(t.dt_bias, p.hv, d.bias_type);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int r = lane * 2 + i;
            raw[i].load(t.g, row_at(p.c.t0, d.HV, p.hv, adds(p, r) ? r >> p.lr : 0, 0), d.g_bf16);
        }
    }
    /* Sums from the chunk's start to the two rows, by a whole warp; log2 units. */
    __device__ __forceinline__ float2 sums(const Dims &d, const Place &p, int lane) const {
        float g[2], a = expf(param_value(A_log, d.A_type));
        const float b = param_value(bias, d.bias_type);
#pragma unroll
        for (int i = 0; i < 2; i++)
            g[i] = adds(p, lane * 2 + i)
                       ? gate_floor(gate_value(d, raw[i].get(d.g_bf16), a, b)) * LOG2E
                       : 0.f;
        float sum = g[0] + g[1];
#pragma unroll
        for (int m = 1; m < 32; m *= 2) {
            float x = __shfl_up_sync(~0u, sum, m);
            if (lane >= m) sum += x;
        }
        float before = __shfl_up_sync(~0u, sum, 1);
        if (lane == 0) before = 0.f;
        return make_float2(before + g[0], before + g[0] + g[1]);
    }
};

/* beta of a row [L][HV], 1 where nothing is erased. */
__device__ __forceinline__ RawWord load_strength(const Dims &d, const dpg_tensors &t, int64_t row) {
    RawWord beta = {};
    if (d.erases) beta.load(t.beta, row, d.g_bf16);
    return beta;
}
__device__ __forceinline__ float strength_of(const Dims &d, RawWord beta) {
    return d.erases ? beta_value(d, beta.get(d.g_bf16)) : 1.f;
}
/* The same of row r of a tile, 0 behind the end. */
__device__ __forceinline__ RawWord load_beta(const Dims &d, const dpg_tensors &t, const Place &p,
                                             int r) {
    if (r >= C) return RawWord{};
    return load_strength(d, t, row_at(p.c.t0, d.HV, p.hv, r < p.rows ? r : 0, p.lr));
}
__device__ __forceinline__ float beta_of(const Dims &d, RawWord beta, const Place &p, int r) {
    return r < p.rows ? strength_of(d, beta) : 0.f;
}
#endif
