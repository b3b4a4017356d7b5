/* gpu/fast/chunks.cuh - A, L, Aqk, T, w and u of a tile from its sums k k', q k'. Both kernels of a
 * chunk include it (chunks.cu: a gate a channel, chunks_one.cu: one a head).
 *
 * There are 8 warps (I, m). A warp has the sums of rows 16 I .. with all columns up to the
 * diagonal. These are k k' for m = 0, q k' for m = 1. Block (I, J) is z[J], the diagonal one
 * z[3]. */
#ifndef DPG_CHUNKS_CUH
#define DPG_CHUNKS_CUH
#include "fast/inverse.cuh"
#include "fast/rows.cuh"
#include "fault.cuh"
#include "plan/paths.cuh"
#include <algorithm>

#define CHUNK_THREADS 256

/* A block a tile: value heads, chunks, and as many times more as a grid is high. */
#define GRID_HEIGHT 32768
static inline dim3 chunk_grid(const dpg_plan *p) {
    int high = std::min(p->d.NT, GRID_HEIGHT);
    return dim3((unsigned)p->d.HV, (unsigned)high, (unsigned)((p->d.NT + high - 1) / high));
}
/* From the last one on, since states begin with the first, which is in the cache then; NT or more:
 * none. */
__device__ __forceinline__ unsigned chunk_of_block(const Dims &d) {
    return d.NT - 1 - (blockIdx.z * GRID_HEIGHT + blockIdx.y);
}

/* Words of a tile in B_ODD: is something not finite. */
enum { ODD_W, ODD_U, ODD_DO, ODDS };

/* Tiles; T, L, dos and gcum NULL unless kept. dos: do by columns (SLICES), made by chunks_one.cu or
 * columns.cu; others ROWS, u SLICES. */
struct ChunkOut {
    bf16 *w, *u, *kg, *qg, *Aqk, *T, *L, *dos;
    bf16 *kgam, *TB;         /* of a plan without w and u */
    float *eC, *gcum, *beta; /* beta: of a backward without w and u */
    int *odd;                /* NULL unless asked for: ODDS words a tile */
};

/* Data after the sums, in the place of their operands: T, and w and u where they are wanted. */
struct Inverse {
    static const bool MAKES_W = false;
    union {
        float A[C * TS];      /* then T */
        bf16 out[8][16 * 64]; /* a warp's 16 rows of w or u to be written, 64 columns at a time */
    } x;
    bf16 TB[C * C]; /* T B, ROWS; before: Aqk until it is written */
    float beta[C];
};
template <int K, int V> struct Solve : Inverse {
    static const bool MAKES_W = true;
    bf16 v[C * V]; /* ROWS */
};

/* Mask of entry (s, i) of a sum, row and column of one tile. It is 0 where i is not earlier than s
 * (A, L), or is later (Aqk). */
struct Mask {
    int lr, of_q;
    __device__ __forceinline__ int end(int s) const {
        int first = s >> lr << lr, next = ((s >> lr) + 1) << lr;
        if (FAULT(KEYS_COUPLED) && !of_q) return s;
        if (FAULT(KEYS_LATER) && of_q) return first + 1;
        return of_q ? next : first;
    }
};

/* The sums of a warp through f(s, i, value of column i, of i + 1, is the block diagonal, place of
 * both in [2][4]). Whole tokens lie between the rows and columns of other blocks: nothing of them
 * is masked. */
template <bool DIAGONAL, class F>
__device__ __forceinline__ void emit_block(int I, int J, int lane, Mask mask, const float z[2][4],
                                           F f) {
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int s = I * 16 + lane / 4 + 8 * r, i = 16 * J + 8 * n + lane % 4 * 2;
            int end = DIAGONAL ? mask.end(s) : C;
            f(s, i, i < end ? z[n][2 * r] : 0.f, i + 1 < end ? z[n][2 * r + 1] : 0.f, DIAGONAL,
              n * 4 + 2 * r);
        }
}
template <class Z, class F>
__device__ __forceinline__ void emit_rows(int I, int lane, Mask mask, const Z &z, F f) {
#pragma unroll
    for (int J = 0; J < 3; J++)
        if (J < I) emit_block<false>(I, J, lane, mask, z[J], f);
    emit_block<true>(I, I, lane, mask, z[3], f);
}

/* q k' of a token's own keys, which no decay enters, in fp32. Where q and k of a token are nearly
 * orthogonal, rounded factors would leave an error of the size of |q| |k|. */
__device__ __forceinline__ void own_keys(const float *own, int lr, int s, int i, float &a,
                                         float &b) {
    int first = s >> lr << lr, end = Mask{lr, 1}.end(s);
    if (i >= first) a = i < end ? own[i] : 0.f;
    if (i + 1 >= first) b = i + 1 < end ? own[i + 1] : 0.f;
}

__device__ __forceinline__ void store_pair(bf16 *tile, int s, int i, float a, float b) {
    *(uint32_t *)(tile + rows_at(s, i / 8) + i % 8) = pack2(a, b);
}

/* Stores rows 16 I .. of Aqk through shared memory (ROWS); blocks right of the diagonal are zeros.
 * Calls f(s, i, a, b) with the sums of columns i, i + 1. The caller calls drain_wait() before it
 * writes to `stage` again. */
template <class Z, class F>
__device__ __forceinline__ void emit_queries(bf16 *stage, bf16 *Aqk, const float *own, float scale,
                                             int lr, int I, int lane, const Z &z, F f) {
    Walk<> to = walk_across(stage, I * 16, lane);
    Mask mask = {lr, 1};
    float x[2][4];
    auto keep = [&](int s, int i, float a, float b, bool diagonal, int y) {
        f(s, i, a, b);
        if (diagonal) own_keys(own, lr, s, i, a, b);
        x[y / 4][y % 4] = scale * a;
        x[y / 4][y % 4 + 1] = scale * b;
    };
#pragma unroll
    for (int J = 0; J < 3; J++) {
        if (J >= I) continue;
        emit_block<false>(I, J, lane, mask, z[J], keep);
        store_16x16(to.at(J), x[0], x[1]);
    }
    emit_block<true>(I, I, lane, mask, z[3], keep);
    store_16x16(to.at(I), x[0], x[1]);
    const uint32_t zeros[4] = {};
    for (int J = I + 1; J < 4; J++)
        stsm4(to.at(J), zeros);
    drain_fence();
    __syncwarp();
    drain(Aqk + I * 16 * C, stage + I * 16 * C, 16 * C * 2, lane);
    drain_commit(lane);
}

/* v of a tile to ROWS in shared memory, by the warps of m = 1. */
template <int V>
__device__ __forceinline__ void load_v(bf16 *to, const Dims &d, const dpg_tensors &t,
                                       const Place &p) {
    int thread = threadIdx.x - CHUNK_THREADS / 2;
    int64_t first = row_at(p.c.t0, d.HV, p.hv, 0, p.lr) * V;
    if (d.in_bf16 && d.R == 1) {
        for (int row0 = thread / 32 * 8; row0 < C; row0 += 32)
            CopiedRows<V>(row0, thread % 32).copy(to, (const bf16 *)t.v + first, d.HV, p.rows);
        cp_commit();
        return;
    }
    for (int x = thread; x < C * V / 8; x += CHUNK_THREADS / 2) {
        int r = x / (V / 8), piece = x % (V / 8);
        bool here = r < p.rows;
        int64_t at = row_at(p.c.t0, d.HV, p.hv, here ? r : 0, p.lr) * V + piece * 8;
        bf16 *dst = to + rows_at(r, piece);
        if (d.in_bf16) {
            cp16(dst, (const bf16 *)t.v + at, here);
            continue;
        }
        uint32_t y[4];
        float unused = 0.f;
        load_pairs<4>(y, t.v, at, false, unused);
        load_pairs<4>(y + 2, t.v, at + 4, false, unused);
        *(uint4 *)dst = here ? make_uint4(y[0], y[1], y[2], y[3]) : make_uint4(0, 0, 0, 0);
    }
    cp_commit();
}

/* The warps of m = 0 meet, MEETINGS times in invert(). In plain builds those of m = 1 come, too. */
#define MEETINGS 3
__device__ __forceinline__ void meet_keys() { meet_part(1, CHUNK_THREADS / 2); }
__device__ __forceinline__ void meet_as_well() {
#ifdef DPG_PLAIN_LOADS
    for (int i = 0; i < MEETINGS; i++)
        __syncthreads();
#endif
}
/* T in place of A, by the warps of m = 0. */
__device__ __forceinline__ void invert(Inverse &sm, int warp, int lane) {
    meet_keys();
    if (warp < 2) invert_half(sm.x.A, warp, lane);
    meet_keys();
    invert_rest_first(sm.x.A, warp, lane);
    meet_keys();
    invert_rest_second(sm.x.A, warp, lane);
}

/* beta of the rows that a lane needs: of m = 0 those of its sums, of m = 1 one a lane for all. */
struct Betas {
    static const bool OF_COLUMNS = false;
    RawWord raw[2];
    int row[2];
    __device__ __forceinline__ void rows(int I, int m, int lane) {
        row[0] = m ? I * 32 + lane : I * 16 + lane / 4;
        row[1] = m ? C : row[0] + 8;
    }
    __device__ __forceinline__ void load(const Dims &d, const dpg_tensors &t, const Place &p, int I,
                                         int m, int lane) {
        rows(I, m, lane);
#pragma unroll
        for (int r = 0; r < 2; r++)
            raw[r] = load_beta(d, t, p, row[r]);
    }
    /* From words of 16 bits in shared memory. */
    __device__ __forceinline__ void take(const uint16_t *from, int I, int m, int lane) {
        rows(I, m, lane);
#pragma unroll
        for (int r = 0; r < 2; r++)
            raw[r].w = row[r] < C ? from[row[r]] : 0;
    }
    __device__ __forceinline__ float get(const Dims &d, const Place &p, int r) const {
        return beta_of(d, raw[r], p, row[r]);
    }
    __device__ __forceinline__ float2 at(int) const { return {}; }
};

/* B L to where A is inverted, zeros where nothing is erased. By the warps of m = 0, which keep L if
 * it is asked for; f as of emit_queries. */
template <class BETAS, class Z, class F>
__device__ __forceinline__ void emit_keys(Inverse &sm, const Dims &d, const ChunkOut &o,
                                          const Place &p, const BETAS &betas, int I, int lane,
                                          const Z &z, F f) {
    bf16 *L = o.L ? o.L + p.tile * C * C : NULL;
    float beta[2] = {};
#pragma unroll
    for (int r = 0; r < 2 && d.erases && !BETAS::OF_COLUMNS; r++)
        beta[r] = betas.get(d, p, r);
    emit_rows(I, lane, Mask{p.lr, 0}, z, [&](int s, int i, float a, float b, bool, int y) {
        float2 by = make_float2(beta[y % 4 / 2], beta[y % 4 / 2]);
        if (BETAS::OF_COLUMNS && d.erases) by = betas.at(i);
        f(s, i, a, b);
        *(float2 *)(sm.x.A + s * TS + i) = make_float2(by.x * a, by.y * b);
        if (L) store_pair(L, s, i, a, b);
    });
}

/* Stores T, if it is kept, and makes T B in bf16. So w = T B Kgam and u = T B V round T B once and
 * leave Kgam and V exact. */
__device__ __forceinline__ void round_T(Inverse &sm, bf16 *T, int warp, int lane) {
    int i = lane * 2;
    float2 b = *(const float2 *)(sm.beta + i);
#pragma unroll
    for (int r = 0; r < 8; r++) {
        int s = warp * 8 + r;
        float2 y = *(const float2 *)(sm.x.A + s * TS + i);
        if (i > s) y.x = 0.f;
        if (i + 1 > s) y.y = 0.f;
        store_pair(sm.TB, s, i, y.x * b.x, y.y * b.y);
        if (T) store_pair(T, s, i, y.x, y.y);
    }
}

/* A warp's 8 rows of T B to memory; behind round_T, nothing else of the block is. */
__device__ __forceinline__ void send_TB(const Inverse &sm, bf16 *TB, const Place &p, int warp,
                                        int lane) {
    drain_fence();
    __syncwarp();
    drain(TB + p.tile * C * C + warp * 8 * C, sm.TB + warp * 8 * C, 8 * C * 2, lane);
    drain_commit(lane);
    drain_wait(lane);
}

/* 64 columns of 16 rows from accumulators to shared memory, then out by the warp. */
__device__ __forceinline__ void send(bool sliced, bf16 *stage, const float acc[8][4], bf16 *tile,
                                     int I, int group, int lane) {
    drain_wait(lane);
    __syncwarp();
#pragma unroll
    for (int n = 0; n < 4; n++) {
        uint32_t row = across_row(lane), p = across_p(lane);
        int at =
            sliced ? n * 256 + piece_at(16, 0, row, p) : (row * 8 + ((2 * n + p) ^ (row & 7))) * 8;
        store_16x16(saddr(stage + at), acc[2 * n], acc[2 * n + 1]);
    }
    drain_fence();
    __syncwarp();
    if (sliced) {
        for (int n = 0; n < 4; n++)
            drain(tile + ((group * 4 + n) * C + I * 16) * 16, stage + n * 256, 512, lane);
    } else {
        drain(tile + (group * C + I * 16) * 64, stage, 2048, lane);
    }
    drain_commit(lane);
}

/* Is any source of a tile's w (m = 0), or of its u or q (m = 1), not finite? The rows of the last
 * warp's sums depend on every source, and 0 times such a number is not zero. The argument own is
 * q k' of all rows. */
struct Odd {
    bool asked;
    float sum;
    __device__ __forceinline__ void take(const float acc[8][4]) {
        if (!asked) return;
#pragma unroll
        for (int n = 0; n < 8; n++)
            sum = fmaf(acc[n][0], 0.f, fmaf(acc[n][1], 0.f, sum));
    }
    __device__ __forceinline__ void leave(int *odd, int64_t tile, const float *own, int m,
                                          int lane) const {
        if (!asked) return;
        float x = m ? fmaf(own[lane], 0.f, own[lane + 32] * 0.f) : 0.f;
        int any = __any_sync(~0u, sum + x != 0.f);
        if (lane == 0) odd[tile * ODDS + (m ? ODD_U : ODD_W)] = any;
    }
};

/* Is a word's lower or upper bf16 not finite: the upper bit of that half. */
__device__ __forceinline__ uint32_t odd_halves(uint32_t x) {
    return ((x & 0x7f807f80u) + 0x00800080u) & 0x80008000u;
}
/* Stores the marks of a tile without w and u, after round_T. If an entry of keys, beta or channel
 * gates is not finite, neither is the last row of T B. The reason: 0 times such a number is not
 * zero. No v was read: `bare.cuh` names the kernel that checks it.
 *   own    q k' of all rows
 *   gate   sum of the gate, if a head has one */
__device__ __forceinline__ void leave_odd(const Inverse &sm, int *odd, int64_t tile,
                                          const float *own, float gate, int warp, int lane) {
    if (warp < CHUNK_THREADS / 32 - 1) return; /* another warp rounded that row */
    __syncwarp();
    uint32_t last = *(const uint32_t *)(sm.TB + rows_at(C - 1, lane / 4) + lane % 4 * 2);
    float sum = fmaf(own[lane], 0.f, fmaf(own[lane + 32], 0.f, gate * 0.f));
    int w = __any_sync(~0u, odd_halves(last) != 0), u = __any_sync(~0u, sum != 0.f);
    if (lane) return;
    odd[tile * ODDS + ODD_W] = w;
    odd[tile * ODDS + ODD_U] = u;
}

/* acc = rows 16 I .. of T B times the rows of B (ROWS), 64 columns from 64 * group on, a sum over
 * blocks J <= I. Calls between(J, acc) on the sum of blocks I .. J + 1 before it adds block J. */
template <class F>
__device__ __forceinline__ void times_TB(float acc[8][4], const bf16 *TB, const bf16 *B, int group,
                                         int I, int lane, F between) {
    Walk<> a = walk_down(TB, I * 16, lane), b = walk_down(B + group * C * 64, 0, lane);
#pragma unroll 1
    for (int J = I; J >= 0; J--) {
        uint32_t fa[4], fb[4];
        if (J < I) between(J, acc);
        ldsm4(fa, a.at(J));
#pragma unroll
        for (int n = 0; n < 4; n++) {
            ldsm4t(fb, b.at(n, J));
            two(acc[2 * n], acc[2 * n + 1], fa, fb);
        }
    }
}

/* do of a tile by columns to shared memory, zeros in the rows of a token's other keys and behind
 * the end. Four pieces of 8 rows a warp: 64 bytes of a row in memory, two slices here. */
template <int V>
__device__ __forceinline__ void fetch_do(bf16 *to, const Dims &d, const void *dout,
                                         const Place &p) {
    int64_t first = row_at(p.c.t0, d.HV, p.hv, 0, 0) * V;
#pragma unroll
    for (int x = threadIdx.x; x < C * V / 8; x += CHUNK_THREADS) {
        int r = x / 4 % C, piece = x / (4 * C) * 4 + x % 4;
        bool here = r < p.rows && ((r >> p.lr << p.lr) == r || FAULT(DO_KEYS));
        int64_t at = first + row_in(d.HV, here ? r >> p.lr : 0, 0) * V + piece * 8;
        bf16 *dst = to + piece_at(C, piece / 2, r, piece % 2);
        if (d.d_bf16) {
            cp16(dst, (const bf16 *)dout + at, here);
            continue;
        }
        uint32_t y[4];
        float unused = 0.f;
        load_pairs<4>(y, dout, at, false, unused);
        load_pairs<4>(y + 2, dout, at + 4, false, unused);
        *(uint4 *)dst = here ? make_uint4(y[0], y[1], y[2], y[3]) : make_uint4(0, 0, 0, 0);
    }
    cp_commit();
}
/* Whether some of it is not finite, where that is asked for; behind cp_wait and a barrier of all,
 * which call it. */
template <int V>
__device__ __forceinline__ void look_at_do(int *odd, const bf16 *dos, int64_t tile) {
    if (!odd) return;
    float sum = 0.f;
    for (int x = threadIdx.x; x < C * V / 2; x += CHUNK_THREADS) {
        float2 y = unpack2(((const uint32_t *)dos)[x]);
        sum = fmaf(y.x, 0.f, fmaf(y.y, 0.f, sum));
    }
    int any = __syncthreads_or(sum != 0.f);
    if (threadIdx.x == 0) odd[tile * ODDS + ODD_DO] = any;
}
/* On to memory by one warp, behind cp_wait, drain_fence and a barrier of all; drain_wait before its
 * place is written again. */
template <int V>
__device__ __forceinline__ void send_do(const ChunkOut &o, const bf16 *from, const Place &p,
                                        int lane) {
    drain(o.dos + p.tile * C * V, from, C * V * 2, lane);
    drain_commit(lane);
}
#endif
