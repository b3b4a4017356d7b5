/* gpu/fast/grad.cu - dq dk dv dg dbeta of one tile with a gate a channel (math.md f, c), from
 * states, X, do and their gradients.
 *
 * One block a multiprocessor, 4 K threads, tile after tile. The copy engine loads the next tile
 * while this one's pairs are summed. The next tile's rows of q, k and gates go to registers while
 * this one's gradients are written (Ahead). A warp (I, cq) has rows 16 I .. and channels 32 cq ..
 * (of v: its part of the columns). Phases, and what shared memory holds:
 *
 *   rows     decayed rows of q and k; gates, q and k to fragments
 *            ka qa kb kd kgam; X do dv_new h dh T L on their way
 *   solve    dZ = T' dv_new, E = V - Kgam S_0 - L X, dE = B dZ, dv, dbeta
 *            dE for dv_new
 *   states   dP = scale do X', dL = -dE X'; do S_0', dE S_0', X dS_c'
 *            dP, dL for T, L; gates for kgam
 *   pairs    dP and dL with ka qa kb kd
 *            rows of q and k for X and do; h dh of the next tile
 *   ends     dq, dk through the L2 norm, dg through the gate
 *            X do dv_new T L of the next tile; dq dk dg for ka qa kb
 *
 * dg is a reverse sum in which a pair of tokens s > i counts +c at s and -c at i. Both are the same
 * product of rounded operands. So a pair leaves no more than the fp32 sums between tokens that see
 * both, however slow the gates. Every operand of a product is rounded to bf16 once (what
 * harness/bound/error_bound.c counts), everything is summed in fp32. No atomics.
 *
 * Warpgroups, where a device has them, form Kgam S_0, dP, dL and the products with states, straight
 * from shared memory and beside other work. Elsewhere mma.sync does.
 *
 * SOLVED (`bare.cuh`) means that E and dE are loaded, not X, dv_new, T and L. There is no phase
 * `solve` and no kgam. kb and kd have the factor beta, which dP and dL lack.
 *
 * TIGHT: devices whose blocks have less shared memory. The decayed rows are made twice and take the
 * place of h and dh, and nothing is loaded ahead. */
#include "fast/far.cuh"
#include "fast/grad.cuh"
#include <algorithm>

namespace {

enum Form { ROOMY, TIGHT, SOLVED };

template <int K, int V> struct States { bf16 h[K * V], dh[K * V]; };
template <int K> struct Decayed {
    bf16 ka[C * K], qa[C * K], kb[C * K], kd[C * K]; /* chunks.cu */
};
/* The states and the decayed rows, apart or in one place. */
template <int K, int V, Form W> struct Apart {
    States<K, V> s;
    Decayed<K> r;
    __device__ __forceinline__ States<K, V> &states() { return s; }
    __device__ __forceinline__ Decayed<K> &rows() { return r; }
};
template <int K, int V> struct Apart<K, V, TIGHT> {
    union {
        States<K, V> s;
        Decayed<K> r;
    };
    __device__ __forceinline__ States<K, V> &states() { return s; }
    __device__ __forceinline__ Decayed<K> &rows() { return r; }
};

/* SLICES; dE: dv_new when it comes. */
template <int V> struct Operands { bf16 X[C * V], dos[C * V], dE[C * V]; };

template <int K, int V, Form W> struct GradSmem {
    Apart<K, V, W> big;
    union {
        Operands<V> o;
        uint4 given[K / 8][4][32]; /* by warp: rows of k and q while pairs are summed, then dg */
    };
    bf16 T[C * C], L[C * C]; /* ROWS; then dP and dL */
    union {
        bf16 kgam[C * K];
        float group[K / 8][K];             /* gates of the rows of a warp in the phase `rows` */
        float gam[16 * K];                 /* far.cuh */
        float4 parked[3][GRAD_THREADS(K)]; /* gates while pairs are summed */
        struct {
            float a[4][K], b[4][K];
        } sum; /* dA_log, ddt_bias by block of rows */
    } x;
    float anchor[5][K]; /* of the blocks, from the chunk's start; the chunk's end */
    float z[K];
    union {
        struct { /* dg of a block's rows; its part from what the chunk writes */
            float total[4][K], written[4][K];
        } dg;
        struct { /* gates of a block's rows; of its first one */
            float all[4][K], first[4][K];
        } gate;
    } of_block;
    float rk[C], rq[C], beta[C], own[C];
    RawWord raw_beta[C];
    union {
        float db[K / 32][C];     /* solve */
        float dot[2][K / 32][C]; /* ends */
    } of_row;
    int wide[4];            /* have blocks sums over pairs (far.cuh) */
    Place place[2];         /* of this tile and the next */
    uint64_t came[3], left; /* left: all warps have read what a tile wrote */
};

/* ---- loads ----------------------------------------------------------------------------------- */

/* By three warps, each with its own barrier. 0: dv_new, T; 1: h, X, L; 2: do, dh. SOLVED: 0: dE;
 * 1: h, E. `late` loads what
 * lies where the phase `pairs` still works. */
template <int K, int V, Form W> struct Loader {
    GradSmem<K, V, W> &sm;
    const GradArgs &a;
    int warp, lane;
    /* warp: made again, since the compiler would keep what is asked of it in local memory. */
    __device__ __forceinline__ Loader(GradSmem<K, V, W> &sm, const GradArgs &a, const Lane &l)
        : sm(sm), a(a), warp(made_number(l.warp)), lane(l.lane) {}
    __device__ __forceinline__ void early(int64_t tile) {
        const int SQUARE = W == SOLVED ? 0 : C * C * 2;
        const int bytes[3] = {C * V * 2 + SQUARE, K * V * 2 + C * V * 2 + SQUARE,
                              C * V * 2 + K * V * 2};
#pragma unroll
        for (int i = 0; i < 3; i++)
            if (warp == i) fill_begin(&sm.came[i], bytes[i], lane);
        if (W != TIGHT) states(tile);
    }
    __device__ __forceinline__ void states(int64_t tile) {
        States<K, V> &s = sm.big.states();
        if (warp == 1) fill(s.h, a.h + tile * K * V, K * V * 2, &sm.came[1], lane);
        if (warp == 2) fill(s.dh, a.dh + tile * K * V, K * V * 2, &sm.came[2], lane);
    }
    /* p: its place */
    __device__ __forceinline__ void late(int64_t tile, const Place &p) {
        if (W == TIGHT) states(tile);
        if (warp == 0) {
            if (W != SOLVED) fill(sm.T, a.T + tile * C * C, C * C * 2, &sm.came[0], lane);
            fill_do<V, V / 16>(sm.o.dE, a.news, p.c, p.hv, tile, 0, &sm.came[0], lane);
            fill_end(&sm.came[0], lane);
        } else if (warp == 1) {
            fill(sm.o.X, a.X + tile * C * V, C * V * 2, &sm.came[1], lane);
            if (W != SOLVED) fill(sm.L, a.L + tile * C * C, C * C * 2, &sm.came[1], lane);
            fill_end(&sm.came[1], lane);
        } else if (warp == 2) {
            fill_do<V, V / 16>(sm.o.dos, a.rows, p.c, p.hv, tile, 0, &sm.came[2], lane);
            fill_end(&sm.came[2], lane);
        }
    }
};

/* ---- rows ------------------------------------------------------------------------------------ */

/* A lane's gates, 16 rows by 32 channels of its warp, from the block's anchor; log2 units. */
typedef float Gates[4][4];

/* Most of them lie in shared memory while products and sums of pairs need the registers. The
 * compiler's own spills go to local memory, past the little L1 that is left beside 226 KB. */
template <int K> struct Parked {
    float4 (*at)[GRAD_THREADS(K)];
    int thread;
    __device__ __forceinline__ void put(const Gates g) {
#pragma unroll
        for (int n = 0; n < 3; n++)
            at[n][thread] = make_float4(g[n][0], g[n][1], g[n][2], g[n][3]);
    }
    /* Reads those of n-tile n, one by one as registers allow. */
    __device__ __forceinline__ void get(Gates g, int n) const {
        if (n == 3) return;
        compiler_fence();
        *(float4 *)g[n] = at[n][thread];
    }
};

/* A warp's rows of a tile as they stand in memory; asked for while the tile before ends. */
template <int K> struct Ahead {
    static const int E = K / 32, N = 512 / K;
    KeyRows<K, N> x;
    GateRows<K, N> g;
    RawWord beta;
    __device__ __forceinline__ void fetch(const Dims &d, const dpg_tensors &t, const Place &p,
                                          const Lane &l) {
        x.fetch(d, t, p, 16 * l.I + N * l.cq, l.lane * E);
        g.fetch(d, t, p, 16 * l.I + N * l.cq, l.lane * E);
        beta = load_beta(d, t, p, l.thread());
    }
};

/* Zeros for what ka, qa and kd leave to far_terms, of a lane's channels of a row at `offset`. It
 * makes kb again, since 2^-gam may be no number. */
template <int K>
__device__ __forceinline__ void leave_far(Decayed<K> &out, const float k[K / 32],
                                          const float gam[K / 32], const float next[K / 32],
                                          int offset) {
#pragma unroll
    for (int e = 0; e < K / 32; e++) {
        out.kb[offset + e] = __float2bfloat16_rn(k[e] * ex2(next[e] - gam[e]));
        if (is_far(gam[e])) out.kd[offset + e] = __float2bfloat16_rn(0.f);
        if (is_low(gam[e])) out.ka[offset + e] = out.qa[offset + e] = __float2bfloat16_rn(0.f);
    }
}

/* Writes a lane's channels of the warp's rows: ka, qa, kb, kd, and in the first or only round kgam
 * (TIGHT has two rounds).
 *   before   gates from the chunk's start to the block's anchor
 *   next     gates from the block's anchor to the next one */
template <int K, int V, Form W>
__device__ __forceinline__ void write_rows(GradSmem<K, V, W> &sm, Ahead<K> &ahead, const Place &p,
                                           int row0, int ch, const float *before, const float *next,
                                           bool wide, bool first) {
    const int E = K / 32, N = 512 / K;
    Decayed<K> &out = sm.big.rows();
    GateRows<K, N> &g = ahead.g;
    float start[E], step[E];
#pragma unroll
    for (int e = 0; e < E; e++) {
        start[e] = ex2(before[e]);
        step[e] = ex2(next[e]);
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        int r = row0 + i, offset = rows_at(r, ch / 8) + ch % 8;
        float k[E], q[E], f[E], y[E];
        uint32_t w[E / 2];
        ahead.x.normed(k, q, i, p.zero);
#pragma unroll
        for (int e = 0; e < E; e++) {
            f[e] = ex2(g.sum[i][e]);
            y[e] = f[e] * start[e];
        }
        if (W == ROOMY || (W == TIGHT && first)) {
            scaled<E>(w, k, y);
            store_pairs<E>(sm.x.kgam + offset, w);
        }
        if (W == TIGHT && first) continue;
        scaled<E>(w, k, f);
        store_pairs<E>(out.ka + offset, w);
        scaled<E>(w, q, f);
        store_pairs<E>(out.qa + offset, w);
#pragma unroll
        for (int e = 0; e < E && W == SOLVED; e++)
            k[e] *= sm.beta[r];
#pragma unroll
        for (int e = 0; e < E; e++) {
            f[e] = ex2(-g.sum[i][e]);
            y[e] = f[e] * step[e];
        }
        scaled<E>(w, k, y);
        store_pairs<E>(out.kb + offset, w);
        scaled<E>(w, k, f);
        store_pairs<E>(out.kd + offset, w);
        if (wide) leave_far<K>(out, k, g.sum[i], next, offset);
    }
}

/* Place of channel ch of row r in rows of 32 words between rows and fragments. The pieces of 16
 * bytes are permuted: neither have a bank twice. */
__device__ __forceinline__ unsigned mixed_at(unsigned r, unsigned ch) {
    return r * 32 + (ch ^ r % 4 * 8);
}
/* Where gates of 32 channels from ch on become fragments, in place of kb and kd. */
template <int K> __device__ __forceinline__ float *gate_at(Decayed<K> &rows, unsigned ch) {
    return (float *)rows.kb + ch / 32 * (C * 32);
}

/* A lane's raw rows of k and q, pairs of channels of its fragments. */
struct alignas(16) Given {
    uint32_t k[4][2], q[4][2];
    static __device__ __forceinline__ void read(uint32_t y[4][2], const bf16 *tile, const Lane &l) {
        OwnRows rows(tile, l);
#pragma unroll
        for (int i = 0; i < 8; i++)
            y[i / 2][i % 2] = rows.y[i / 4][i / 2 % 2 + i % 2 * 2];
    }
};

/* The warps of a 16 x K block meet. */
template <int K> __device__ __forceinline__ void meet_block(const Lane &l) {
    meet_part(1 + l.I, K);
}

/* The decayed rows, or (TIGHT, first) kgam alone; gates and, first, rows of k and q to fragments.
 * Begins and ends with all warps together. */
template <int K, int V, Form W>
__device__ __forceinline__ void make_rows(GradSmem<K, V, W> &sm, const Dims &d,
                                          const dpg_tensors &t, const GradArgs &a, const Place &p,
                                          const Lane &l, Ahead<K> &ahead, bool first, Gates gam,
                                          Given &given, int phase) {
    const int E = K / 32, N = 512 / K, GROUPS = 16 / N;
    int row0 = 16 * l.I + N * l.cq, ch = l.lane * E;
    auto &of = sm.of_block.gate;
    GateRows<K, N> &g = ahead.g;
    KeyRows<K, N> &x = ahead.x;
    if (l.thread() < C) {
        sm.beta[l.thread()] = beta_of(d, ahead.beta, p, l.thread());
        sm.raw_beta[l.thread()] = ahead.beta;
    }
    g.finish(d, p, row0);
    if (first) bar_wait(&sm.left, phase ^ 1);
    put_words<E>(sm.x.group[row0 / N] + ch, g.sum[N - 1]);
    if (l.cq == 0) put_words<E>(of.first[l.I] + ch, g.sum[0]);
    x.finish(d, p, row0, l.lane);
    if (l.lane % (32 / N) == 0) {
        int r = row0 + l.lane / (32 / N);
        sm.rk[r] = x.rk;
        sm.rq[r] = x.rq;
        if (a.norm) a.norm[p.tile * 2 * C + r] = x.rk;
        if (a.norm) a.norm[p.tile * 2 * C + C + r] = x.rq;
    }
    meet_block<K>(l);
    float here[E] = {}, all[E] = {}, one[E], two[E];
    load_words<E>(one, of.first[l.I] + ch);
#pragma unroll
    for (int n = 0; n < GROUPS; n++) {
        load_words<E>(two, sm.x.group[l.I * GROUPS + n] + ch);
#pragma unroll
        for (int e = 0; e < E; e++) {
            if (n == l.cq) here[e] = all[e] - one[e];
            all[e] += two[e];
        }
    }
    if (FAULT(GATE_BACK))
        for (int e = 0; e < E; e++)
            here[e] = all[e] - (all[e] - (here[e] + one[e])) - one[e];
    if (l.cq == 0) put_words<E>(of.all[l.I] + ch, all);
#pragma unroll
    for (int i = 0; i < N; i++) {
#pragma unroll
        for (int e = 0; e < E; e++)
            g.sum[i][e] += here[e];
        put_words<E>(gate_at(sm.big.rows(), ch) + mixed_at(row0 + i, ch % 32), g.sum[i]);
        if (!first) continue;
        int at = rows_at(row0 + i, ch / 8) + ch % 8;
        store_pairs<E>(sm.big.rows().ka + at, x.k[i]);
        store_pairs<E>(sm.big.rows().qa + at, x.q[i]);
    }
    __syncthreads();
    unsigned at = mixed_at(l.row(0), 2 * l.tc);
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
        for (int r = 0; r < 2; r++)
            *(float2 *)(gam[n] + 2 * r) =
                *(const float2 *)(gate_at(sm.big.rows(), 32 * l.cq) + (at ^ 8 * n) + 256 * r);
    if (first) Given::read(given.k, sm.big.rows().ka, l);
    if (first) Given::read(given.q, sm.big.rows().qa, l);
    float before[E] = {}, next[E] = {};
    bool wide = false;
    for (int b = 0; b < l.I; b++) {
        load_words<E>(two, of.all[b] + ch);
#pragma unroll
        for (int e = 0; e < E; e++)
            before[e] += two[e];
    }
    if (l.I < 3) load_words<E>(next, of.first[l.I + 1] + ch);
    float end[E];
#pragma unroll
    for (int e = 0; e < E; e++) {
        end[e] = before[e] + all[e];
        before[e] += one[e];
        float in = all[e] - one[e];
        next[e] += in;
        wide |= is_far(in) || is_lost(next[e]);
    }
    wide = __any_sync(~0u, wide);
    if (l.cq == 0) {
        put_words<E>(sm.anchor[l.I] + ch, before);
        if (l.I == 3) put_words<E>(sm.anchor[4] + ch, end);
        if (l.lane == 0) sm.wide[l.I] = wide;
    }
    meet_block<K>(l);
    write_rows(sm, ahead, p, row0, ch, before, next, wide, first);
}

/* ---- pairs ----------------------------------------------------------------------------------- */

/* Decay of a lane's 8 columns from one anchor to another. */
template <int K>
__device__ __forceinline__ void move_anchor(float acc[4][4], const float *from, const float *to,
                                            const Lane &l) {
#pragma unroll
    for (int n = 0; n < 4; n++) {
        int ch = 32 * l.cq + 8 * n + 2 * l.tc;
        float2 a = *(const float2 *)(from + ch), b = *(const float2 *)(to + ch);
        float fx = ex2(b.x - a.x), fy = ex2(b.y - a.y);
#pragma unroll
        for (int e = 0; e < 4; e++)
            acc[n][e] *= e % 2 ? fy : fx;
    }
}

/* acc += a B for 16 rows from 16 * row of B (ROWS), the warp's 32 channels. */
__device__ __forceinline__ void add_columns(float acc[4][4], const uint32_t a[4], const Walk<> &b,
                                            int row, const Lane &l) {
    uint32_t f[4];
    ldsm4t(f, b.at(2 * l.cq, row));
    two(acc[0], acc[1], a, f);
    ldsm4t(f, b.at(2 * l.cq + 1, row));
    two(acc[2], acc[3], a, f);
}

/* Pair sums of rows 16 I .. with channels 32 cq ..: of dq (dP) and of what dk reads (dL), anchored
 * at the block's first row. */
template <int K, int V, Form W>
__device__ __forceinline__ void read_pairs(GradSmem<K, V, W> &sm, const Lane &l, float sq[4][4],
                                           float sr[4][4]) {
    Decayed<K> &b = sm.big.rows();
    Walk<> P = walk_down(sm.T, 16 * l.I, l.lane), L = walk_down(sm.L, 16 * l.I, l.lane);
    Walk<> kb = walk_down(b.kb, 0, l.lane), kd = walk_down(b.kd, 0, l.lane);
    uint32_t fp[4], fl[4];
    for (int J = 0; J < l.I; J++) {
        if (J) {
            move_anchor<K>(sq, sm.anchor[J], sm.anchor[J + 1], l);
            move_anchor<K>(sr, sm.anchor[J], sm.anchor[J + 1], l);
        }
        ldsm4(fp, P.of_64(J));
        ldsm4(fl, L.of_64(J));
        add_columns(sq, fp, kb, J, l);
        add_columns(sr, fl, kb, J, l);
    }
    ldsm4(fp, P.of_64(l.I));
    ldsm4(fl, L.of_64(l.I));
    add_columns(sq, fp, kd, l.I, l);
    add_columns(sr, fl, kd, l.I, l);
}

/* The write part of dk: with later blocks, anchored at the next block's first row; with the rows of
 * its own, at their first. */
template <int K, int V, Form W>
__device__ __forceinline__ void write_pairs(GradSmem<K, V, W> &sm, const Lane &l, float sw[4][4],
                                            float sx[4][4]) {
    Decayed<K> &b = sm.big.rows();
    Walk<> P = walk_across(sm.T, 0, l.lane), L = walk_across(sm.L, 0, l.lane);
    Walk<> ka = walk_down(b.ka, 0, l.lane), qa = walk_down(b.qa, 0, l.lane);
    uint32_t fp[4], fl[4];
    for (int M = 3; M > l.I; M--) {
        if (M < 3) move_anchor<K>(sw, sm.anchor[M], sm.anchor[M + 1], l);
        ldsm4t(fp, P.of_64(l.I, M));
        ldsm4t(fl, L.of_64(l.I, M));
        add_columns(sw, fp, qa, M, l);
        add_columns(sw, fl, ka, M, l);
    }
    ldsm4t(fp, P.of_64(l.I, l.I));
    ldsm4t(fl, L.of_64(l.I, l.I));
    add_columns(sx, fp, qa, l.I, l);
    add_columns(sx, fl, ka, l.I, l);
}

/* Computes in fp32 the terms of block b that kd, or ka and qa, do not contain. They are dq, dk
 * read, dk write, [3][16][K], and replace kb and kd. All threads call it; it begins and ends with a
 * barrier. */
template <int K, int V, Form W>
__device__ __noinline__ void far_terms(GradSmem<K, V, W> &sm, const Dims &d, const dpg_tensors &t,
                                       Place p, int b) {
    float *out = (float *)sm.big.rows().kb;
    auto pair = [&](const bf16 *m, int s, int i) { return (float)m[rows_at(s, i / 8) + i % 8]; };
    __syncthreads();
    block_gates<K>(sm.x.gam, d, t, p, b);
    __syncthreads();
    for (int x = threadIdx.x; x < 16 * K; x += GRAD_THREADS(K)) {
        int r = x / K, ch = x % K, R = 16 * b + r;
        const float *gam = sm.x.gam + ch;
        auto key = [&](int s) {
            if (s >= p.rows) return 0.f;
            int64_t at = row_at(p.c.t0, d.H, p.h, s, p.lr) * K + ch;
            return sm.rk[s] * rbf(ldx(t.k, at, d.in_bf16));
        };
        auto query = [&](int s) {
            if (s >= p.rows) return 0.f;
            int64_t at = row_at(p.c.t0, d.H, p.h, s >> p.lr, 0) * K + ch;
            return sm.rq[s] * rbf(ldx(t.q, at, d.in_bf16));
        };
        auto written = [&](int s) { return W == SOLVED ? sm.beta[s] * key(s) : key(s); };
        float g = gam[r * K], q = 0.f, read = 0.f, write = 0.f;
#pragma unroll 1
        for (int i = 0; i < r - FAULT(FAR_SHORT); i++) {
            if (!is_far(gam[i * K]) && !is_low(g)) continue;
            float e = ex2(g - gam[i * K]) * written(16 * b + i);
            q = fmaf(pair(sm.T, R, 16 * b + i), e, q);
            read = fmaf(pair(sm.L, R, 16 * b + i), e, read);
        }
#pragma unroll 1
        for (int s = r + 1 + FAULT(FAR_SHORT); s < 16; s++) {
            if (!is_far(g) && !is_low(gam[s * K])) continue;
            float e = ex2(gam[s * K] - g);
            write = fmaf(pair(sm.T, 16 * b + s, R), e * query(16 * b + s), write);
            write = fmaf(pair(sm.L, 16 * b + s, R), e * key(16 * b + s), write);
        }
        out[x] = q;
        out[16 * K + x] = read;
        out[32 * K + x] = write;
    }
    __syncthreads();
}

/* ---- one tile -------------------------------------------------------------------------------- */

/* A lane's data from phase to phase: 16 rows by 32 channels of its warp. */
struct Carried {
    Gates gam; /* from the block's anchor */
    float dq[4][4], dk[4][4], dg[4][4];
    float db[2]; /* SOLVED: terms of dbeta of its rows */
};
/* They lie in shared memory while sums of pairs need the registers. */
struct Kept {
    uint4 (*given)[4][32];
    __device__ __forceinline__ void put(const Given &x, const Lane &l) {
        const uint32_t *w = x.k[0];
        uint4 *to = given[l.warp][0] + l.lane;
#pragma unroll
        for (int n = 0; n < 4; n++)
            to[32 * n] = make_uint4(w[4 * n], w[4 * n + 1], w[4 * n + 2], w[4 * n + 3]);
    }
    /* Rows of k of n-tile n. */
    __device__ __forceinline__ uint2 keys(int n, const Lane &l) const {
        return ((const uint2 *)(given[l.warp][n / 2] + l.lane))[n % 2];
    }
    __device__ __forceinline__ void get(Given &x, const Lane &l) const {
        compiler_fence();
        uint32_t *w = x.k[0];
        const uint4 *from = given[l.warp][0] + l.lane;
#pragma unroll
        for (int n = 0; n < 4; n++)
            *(uint4 *)(w + 4 * n) = from[32 * n];
    }
};

template <int K, int V, Form W>
__device__ __forceinline__ float beta_of_row(const GradSmem<K, V, W> &sm, const Lane &l, int r) {
    return W == SOLVED ? sm.beta[l.row(r)] : 1.f;
}

/* From the plain products S_0 do, S_0 dE, dS_c X to the states' part of dq, dk, dg. Also the column
 * sums of the chunk's writes. */
template <int K, int V, Form W>
__device__ __forceinline__ void
states_part(GradSmem<K, V, W> &sm, Carried &c, const Parked<K> &parked, const Given &x,
            const float dr[4][4], const float dw[4][4], float scale, const Lane &l) {
    float rk[2] = {sm.rk[l.row(0)], sm.rk[l.row(1)]}, rq[2] = {sm.rq[l.row(0)], sm.rq[l.row(1)]};
    float written[8] = {}; /* [n][e] */
    const float beta[2] = {beta_of_row(sm, l, 0), beta_of_row(sm, l, 1)};
#pragma unroll
    for (int n = 0; n < 4; n++) {
        int ch = 32 * l.cq + 8 * n + 2 * l.tc;
        parked.get(c.gam, n);
        float2 an = *(const float2 *)(sm.anchor[l.I] + ch),
               end = *(const float2 *)(sm.anchor[4] + ch);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int r = i / 2, e = i % 2;
            float2 k2 = unpack2(x.k[n][r]), q2 = unpack2(x.q[n][r]);
            float k = (e ? k2.y : k2.x) * rk[r], q = (e ? q2.y : q2.x) * rq[r];
            float from = (e ? an.y : an.x) + c.gam[n][i], down = ex2(from);
            float own = ex2((e ? end.y : end.x) - from) * dw[n][i], read = -down * dr[n][i];
            if (W == SOLVED) {
                c.db[r] = fmaf(k, own, c.db[r]);
                own *= beta[r];
            }
            c.dq[n][i] *= scale * down;
            c.dk[n][i] = read + own;
            c.dg[n][i] = fmaf(q, c.dq[n][i], k * (read - own));
            written[2 * n + e] = fmaf(k, own, written[2 * n + e]);
        }
    }
    column_sums<8>(written, l.lane);
    int at = column_sums_at<8>(l.gr);
    sm.of_block.dg.written[l.I][32 * l.cq + 8 * (at / 2) + 2 * l.tc + at % 2] = written[0];
}

/* Adds the parts of pairs: of what a row reads; of what it writes. */
template <int K, int V, Form W>
__device__ __forceinline__ void add_read(GradSmem<K, V, W> &sm, Carried &c, const Parked<K> &parked,
                                         float sq[4][4], float sr[4][4], const Lane &l) {
    Decayed<K> &b = sm.big.rows();
    if (sm.wide[l.I])
#pragma unroll
        for (int x = 0; x < 16; x++) {
            if (x % 4 == 0) parked.get(c.gam, x / 4);
            if (is_low(c.gam[x / 4][x % 4])) sq[x / 4][x % 4] = sr[x / 4][x % 4] = 0.f;
        }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        uint32_t ka[4], qa[4];
        own_rows(ka, b.ka, h, l);
        own_rows(qa, b.qa, h, l);
#pragma unroll
        for (int x = 0; x < 8; x++) {
            int n = 2 * h + x / 4, i = x % 4;
            if (i == 0) parked.get(c.gam, n);
            float down = ex2(c.gam[n][i]);
            c.dq[n][i] = fmaf(down, sq[n][i], c.dq[n][i]);
            c.dk[n][i] = fmaf(down, sr[n][i], c.dk[n][i]);
            c.dg[n][i] += own_word(qa, x) * sq[n][i] + own_word(ka, x) * sr[n][i];
        }
    }
}
/* WIDE: the block has decays whose inverse is no number. */
template <bool WIDE, int K, int V, Form W>
__device__ __forceinline__ void add_write(GradSmem<K, V, W> &sm, Carried &c,
                                          const Parked<K> &parked, const float sw[4][4],
                                          float sx[4][4], const Lane &l) {
    Decayed<K> &b = sm.big.rows();
    const float beta[2] = {beta_of_row(sm, l, 0), beta_of_row(sm, l, 1)};
    float sum[2] = {};
#pragma unroll
    for (int h = 0; h < 2; h++) {
        uint32_t kb[4], kd[4];
        own_rows(kb, b.kb, h, l);
        own_rows(kd, b.kd, h, l);
#pragma unroll
        for (int m = 0; m < 2; m++) {
            int n = 2 * h + m, ch = 32 * l.cq + 8 * n + 2 * l.tc;
            parked.get(c.gam, n);
            float2 an = *(const float2 *)(sm.anchor[l.I] + ch);
            float2 to = *(const float2 *)(sm.anchor[l.I + 1] + ch);
            float next[2] = {to.x - an.x, to.y - an.y}, step[2] = {ex2(next[0]), ex2(next[1])};
            uint32_t k2[2];
            if (W == SOLVED) *(uint2 *)k2 = Kept{sm.given}.keys(n, l);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float g = c.gam[n][i];
                if (WIDE && is_far(g)) sx[n][i] = 0.f;
                float up = ex2(WIDE ? fminf(-g, NEAR) : -g);
                float on = WIDE ? ex2(next[i % 2] - g) : up * step[i % 2];
                const float y = fmaf(on, sw[n][i], up * sx[n][i]);
                if (W == SOLVED) {
                    float2 k = unpack2(k2[i / 2]);
                    sum[i / 2] = fmaf(i % 2 ? k.y : k.x, y, sum[i / 2]);
                    c.dk[n][i] = fmaf(beta[i / 2], y, c.dk[n][i]);
                } else {
                    c.dk[n][i] += y;
                }
                c.dg[n][i] -=
                    own_word(kb, 4 * m + i) * sw[n][i] + own_word(kd, 4 * m + i) * sx[n][i];
            }
        }
    }
#pragma unroll
    for (int r = 0; r < 2 && W == SOLVED; r++)
        c.db[r] = fmaf(sum[r], sm.rk[l.row(r)], c.db[r]);
}

/* Adds what they leave out of the warp's block. */
template <int K, int V, Form W>
__device__ __forceinline__ void add_far(GradSmem<K, V, W> &sm, Carried &c, const Given &x,
                                        const Lane &l) {
    const float *far = (const float *)sm.big.rows().kb;
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int r = i / 2, at = (l.gr + 8 * r) * K + 32 * l.cq + 8 * n + 2 * l.tc + i % 2;
            float2 k2 = unpack2(x.k[n][r]), q2 = unpack2(x.q[n][r]);
            float k = (i % 2 ? k2.y : k2.x) * sm.rk[l.row(r)];
            float q = (i % 2 ? q2.y : q2.x) * sm.rq[l.row(r)];
            float write = far[32 * K + at];
            if (W == SOLVED) {
                c.db[r] = fmaf(k, write, c.db[r]);
                write *= sm.beta[l.row(r)];
            }
            c.dq[n][i] += far[at];
            c.dk[n][i] += far[16 * K + at] + write;
            c.dg[n][i] += fmaf(q, far[at], k * (far[16 * K + at] - write));
        }
}

/* SOLVED: terms of dbeta lie where the warp's own gates were. */
template <int K, int V, Form W>
__device__ __forceinline__ float &db_at(GradSmem<K, V, W> &sm, int cq, int s) {
    return (&sm.x.parked[2][(s / 16 + 4 * cq) * 32 + s % 8 * 4].x)[s / 8 % 2];
}

/* Adds a token's own keys. */
template <int K, int V, Form W>
__device__ __forceinline__ void add_own(GradSmem<K, V, W> &sm, Carried &c, const Given &x,
                                        const Lane &l) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int s = l.row(r);
        float own = sm.own[s], of_q = 0.f;
        if (W == SOLVED) own *= sm.beta[s];
        float pk = own * sm.rk[s], pq = own * sm.rq[s];
#pragma unroll
        for (int n = 0; n < 4; n++) {
            float2 k = unpack2(x.k[n][r]), q = unpack2(x.q[n][r]);
            c.dq[n][2 * r] = fmaf(pk, k.x, c.dq[n][2 * r]);
            c.dq[n][2 * r + 1] = fmaf(pk, k.y, c.dq[n][2 * r + 1]);
            c.dk[n][2 * r] = fmaf(pq, q.x, c.dk[n][2 * r]);
            c.dk[n][2 * r + 1] = fmaf(pq, q.y, c.dk[n][2 * r + 1]);
            if (W == SOLVED) of_q = fmaf(k.x, q.x, fmaf(k.y, q.y, of_q));
        }
        if (W != SOLVED) continue;
        float db = row_sum(fmaf(sm.own[s] * sm.rq[s], sm.rk[s] * of_q, c.db[r]));
        if (l.tc == 0) db_at(sm, l.cq, s) = db;
    }
}

/* Where a lane stands once dg lies by rows: its 4 rows and 4 channels of the warp's 16 x 32. */
struct RowLane {
    int part, row0, ch; /* rows row0 .. of the tile are part `part` of the warp's */
    __device__ __forceinline__ explicit RowLane(const Lane &l)
        : part(l.lane / 8), row0(16 * l.I + 4 * part), ch(32 * l.cq + l.lane % 8 * 4) {}
};
/* dg to [row][channel] of RowLane. Sums of it over the rows from each on, inside the warp's 16, and
 * their total. */
template <int K, int V, Form W>
__device__ __forceinline__ void sum_dg(GradSmem<K, V, W> &sm, Carried &c, const Lane &l) {
    RowLane at(l);
    float *mixed = (float *)sm.given[l.warp];
    __syncwarp(); /* all have read their rows of k and q */
    unsigned to = mixed_at(l.gr, 2 * l.tc), from = mixed_at(4 * at.part, at.ch % 32);
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int n = 0; n < 4; n++)
            *(float2 *)(mixed + (to ^ 8 * n) + 256 * r) =
                make_float2(c.dg[n][2 * r], c.dg[n][2 * r + 1]);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; i++)
        *(float4 *)c.dg[i] = *(const float4 *)(mixed + (from ^ 8 * i) + 32 * i);
#pragma unroll
    for (int e = 0; e < 4; e++) {
#pragma unroll
        for (int i = 2; i >= 0; i--)
            c.dg[i][e] += c.dg[i + 1][e];
        float one = __shfl_down_sync(~0u, c.dg[0][e], 8);
        if (at.part == 3) one = 0.f;
        float two = __shfl_down_sync(~0u, c.dg[0][e] + one, 16);
        if (at.part > 1) two = 0.f;
#pragma unroll
        for (int i = 0; i < 4; i++)
            c.dg[i][e] += one + two;
    }
    if (at.part == 0)
        *(float4 *)(sm.of_block.dg.total[l.I] + at.ch) =
            make_float4(c.dg[0][0], c.dg[0][1], c.dg[0][2], c.dg[0][3]);
}

/* Terms of <y, dy> of the rows of q and k over the lane's columns, summed over its warp's. */
template <int K, int V, Form W>
__device__ __forceinline__ void sum_dots(GradSmem<K, V, W> &sm, const Carried &c, const Given &x,
                                         const Lane &l) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float q = 0.f, k = 0.f;
#pragma unroll
        for (int n = 0; n < 4; n++) {
            float2 k2 = unpack2(x.k[n][r]), q2 = unpack2(x.q[n][r]);
            q = fmaf(q2.x, c.dq[n][2 * r], fmaf(q2.y, c.dq[n][2 * r + 1], q));
            k = fmaf(k2.x, c.dk[n][2 * r], fmaf(k2.y, c.dk[n][2 * r + 1], k));
        }
        q = row_sum(q);
        k = row_sum(k);
        if (l.tc) continue;
        sm.of_row.dot[0][l.cq][l.row(r)] = q * sm.rq[l.row(r)];
        sm.of_row.dot[1][l.cq][l.row(r)] = k * sm.rk[l.row(r)];
    }
}

/* dx = (dy - y <y, dy>) / |x| of the lane's rows. */
template <int K>
__device__ __forceinline__ void through_norm(float dx[4][4], const uint32_t given[4][2],
                                             const float dot[][C], const float *norm,
                                             const Lane &l) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = 0.f, n1 = norm[l.row(r)];
#pragma unroll
        for (int i = 0; i < K / 32; i++)
            sum += dot[i][l.row(r)];
        sum *= -n1;
#pragma unroll
        for (int n = 0; n < 4; n++) {
            float2 x = unpack2(given[n][r]);
            dx[n][2 * r] = fmaf(x.x, sum, dx[n][2 * r]) * n1;
            dx[n][2 * r + 1] = fmaf(x.y, sum, dx[n][2 * r + 1]) * n1;
        }
    }
}

/* Which rows of gates are a token's. */
struct GateRow {
    const Dims &d;
    const Place &p;
    int K;
    __device__ __forceinline__ bool here(int r) const {
        bool tail = FAULT(DG_TAIL) && r >> p.lr == p.c.len && p.c.t0 + p.c.len < d.L;
        return (r < p.rows || tail) && ((r >> p.lr << p.lr) == r || FAULT(DG_KEYS));
    }
    /* Number `at` of rows of x, raw gates or their gradients. */
    __device__ __forceinline__ TileRows of(const void *x, int at, int is_bf16) const {
        return TileRows(x, p.at_hv, d.HV, 0, K, at, is_bf16);
    }
};

/* Four neighbouring numbers of an input as they stand in memory. */
struct RawFour {
    RawPair x[2];
    __device__ __forceinline__ void load(const void *from, int is_bf16) {
        if (is_bf16)
            *(uint2 *)x[0].w = *(const uint2 *)from;
        else
            for (int i = 0; i < 2; i++)
                x[i].load(from, 2 * i, false);
    }
    __device__ __forceinline__ float get(int e, int is_bf16) const {
        float2 y = is_bf16 ? unpack2(x[0].w[e / 2]) : x[e / 2].get(false);
        return e % 2 ? y.y : y.x;
    }
};
/* A lane's raw gates and their parameters, asked for before the sums that they wait for anyway. */
struct RawGates {
    RawFour g[4];
    ParamPair bias[2];
    uint32_t A_log;
};
template <int K>
__device__ __forceinline__ void load_raw(RawGates &raw, const Dims &d, const dpg_tensors &t,
                                         const Place &p, const RowLane &l) {
    GateRow row = {d, p, K};
    TileRows rows = row.of(t.g, l.ch, d.g_bf16);
    raw.A_log = param_word(t.A_log, p.hv, d.A_type);
#pragma unroll
    for (int i = 0; i < 2; i++)
        raw.bias[i].load(t.dt_bias, p.hv * K + l.ch + 2 * i, d.bias_type);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int s = row.here(l.row0 + i) ? l.row0 + i : 0;
        raw.g[i].load(rows[s >> p.lr], d.g_bf16);
    }
}

/* dg of the log gate to that of the raw one, to memory; terms of dA_log and ddt_bias of the block's
 * rows. */
template <int GATE, int K, int V, Form W>
__device__ __forceinline__ void through_gate(GradSmem<K, V, W> &sm, const Dims &d, const Place &p,
                                             Carried &c, const RawGates &raw, const Lane &l) {
    RowLane at(l);
    float a = expf(param_value(raw.A_log, d.A_type)), sums[8] = {}; /* [dA_log, ddt_bias][e] */
    GateRow row = {d, p, K};
    float4 from = *(const float4 *)(sm.z + at.ch); /* with those of the later blocks */
    for (int M = 3; M > l.I; M--) {
        float4 later = *(const float4 *)(sm.of_block.dg.total[M] + at.ch);
        from = make_float4(from.x + later.x, from.y + later.y, from.z + later.z, from.w + later.w);
    }
    const float after[4] = {from.x, from.y, from.z, from.w};
    const float2 b[2] = {raw.bias[0].get(d.bias_type), raw.bias[1].get(d.bias_type)};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        bool mine = row.here(at.row0 + i);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float dg = mine ? c.dg[i][e] + after[e] : 0.f;
            GateGrad y = gate_grad_fast<GATE>(dg, raw.g[i].get(e, d.g_bf16), a,
                                              e % 2 ? b[e / 2].y : b[e / 2].x, d.lower_bound);
            c.dg[i][e] = y.raw;
            sums[e] += y.dA_log;
            sums[4 + e] += y.ddt_bias;
        }
    }
    if (GATE == DP_GATE_LOG) return;
    halve_sums<4>(sums, l.lane, 16);
    halve_sums<2>(sums, l.lane, 8);
    float *to = l.lane & 16 ? sm.x.sum.b[l.I] : sm.x.sum.a[l.I];
    *(float2 *)(to + at.ch + at.part % 2 * 2) = make_float2(sums[0], sums[1]);
}
template <int K>
__device__ __forceinline__ void store_dg(const Carried &c, const Dims &d, const dpg_grads &g,
                                         const Place &p, const RowLane &l) {
    GateRow row = {d, p, K};
    TileRows rows = row.of(g.dg, l.ch, d.dg_bf16);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float *y = c.dg[i];
        int r = l.row0 + i;
        if (!row.here(r)) continue;
        float2 *to = (float2 *)rows[r >> p.lr];
        if (d.dg_bf16)
            *(uint2 *)to = make_uint2(pack2(y[0], y[1]), pack2(y[2], y[3]));
        else
            for (int e = 0; e < 4; e += 2)
                to[e / 2] = make_float2(y[e], y[e + 1]);
    }
}

/* rowsum(dS_c o S_c) of every channel: with what the chunk writes, which all of its tokens see. */
template <int K, int V, Form W>
__device__ __forceinline__ void sum_written(GradSmem<K, V, W> &sm, int ch) {
    if (ch < K)
        sm.z[ch] += (sm.of_block.dg.written[0][ch] + sm.of_block.dg.written[1][ch]) +
                    (sm.of_block.dg.written[2][ch] + sm.of_block.dg.written[3][ch]);
}

/* ---- the kernel ------------------------------------------------------------------------------ */

template <int K, int V, Form W, Formats F> struct Grad {
    GradSmem<K, V, W> &sm;
    const Dims &d, &plan;
    const dpg_tensors &t;
    const dpg_grads &g;
    const GradArgs &a;
    const Thread thread;
    const unsigned end; /* behind the last tile */
    static const int NT = V / (K / 32) / 8;

    /* The place of this tile, or (phase ^ 1) of the next. */
    __device__ __forceinline__ Place place(int phase) const {
        Place p = sm.place[phase];
        if (F != ANY) p.lr = 0;
        return p;
    }
    __device__ __forceinline__ void solve(const Values<V, NT> &v, int phase) {
        Lane l(thread);
        Place p = place(phase);
        float dZ[NT][4] = {}, E[NT][4] = {};
        bar_wait(&sm.came[0], phase);
        bar_wait(&sm.came[1], phase);
        Solved s = {sm.T, sm.o.dE, sm.x.kgam, sm.big.states().h, sm.L, sm.o.X};
        solve_back<K, NT, W != TIGHT>(dZ, E, s, l.I, l.cq * NT / 2, l.lane, [] {});
        meet_part(5 + l.cq, 128); /* who reads these columns of dv_new */
        finish_dE<V, NT>(d, v, g, p, l, dZ, E, sm.beta, sm.o.dE, sm.of_row.db[0]);
        __syncthreads();
        store_dv<K, V>(d, g, p, sm.o.dE, l);
    }
    /* dP over T, dL over L. */
    __device__ __forceinline__ void store_pairs_block(bf16 *to, const Block &x, int lr,
                                                      const float acc[2][4], const Lane &l) {
        float y[2][4];
#pragma unroll
        for (int e = 0; e < 8; e++) {
            int s = 16 * x.I + l.gr + e % 4 / 2 * 8, i = 16 * x.J + e / 4 * 8 + 2 * l.tc + e % 2;
            y[e / 4][e % 4] = i < pairs_end(s, lr) ? acc[e / 4][e % 4] : 0.f;
        }
        store_16x16(walk_across(to, 16 * x.I, l.lane).of_64(x.J), y[0], y[1]);
    }
    /* next: the tile whose place is sought */
    __device__ __forceinline__ void states(Carried &c, const Given &x, unsigned next, int phase) {
        Lane l(thread);
        Place p = place(phase);
        float dr[4][4] = {}, dw[4][4] = {};
        Parked<K> parked = {sm.x.parked, thread.warp * 32 + thread.lane};
        parked.put(c.gam);
        States<K, V> &s = sm.big.states();
#pragma unroll
        for (int y = 0; y < 16; y++)
            c.dq[y / 4][y % 4] = 0.f;
        auto pairs = [&](const Block &x, const float(*acc)[4]) {
            own_pairs(sm.own, p.lr, x, acc, l);
            store_pairs_block(x.is_L ? sm.L : sm.T, x, p.lr, acc, l);
        };
        /* By warps that have few pairs, while products go on. */
        auto little = [&] {
            if (W == SOLVED && !lies_there(a.news, p.c)) store_dv<K, V>(d, g, p, sm.o.dE, l);
            if (W != SOLVED)
                store_dbeta<K, K / 32>(d, sm.raw_beta, g, p, l,
                                       [&](int i, int s) { return sm.of_row.db[i][s]; });
            if (l.warp == K / 8 - 3 && l.lane == 0) sm.place[phase ^ 1] = place_of(d, next);
        };
        c.db[0] = c.db[1] = 0.f;
        if (W == SOLVED) bar_wait(&sm.came[0], phase);
        if (W == SOLVED) bar_wait(&sm.came[1], phase);
        if (W != TIGHT && has_warpgroups()) {
            bar_wait(&sm.came[2], phase);
            wg_states<K, V>(c.dq, dr, dw, sm.o.dos, sm.o.dE, sm.o.X, s.h, s.dh, d.scale, l, pairs);
            little();
            /* by the warps that had fewer blocks of pairs */
            int part = K == 64 ? l.cq - 1 : l.cq % 2 ? l.cq / 2 : -1;
            state_sums<K, V>(sm.z, s.h, s.dh, sm.anchor[4], part * 4 + l.I, l.lane);
            wg_state_wait(c.dq, dr, dw);
        } else {
            little();
            bar_wait(&sm.came[2], phase);
            for (int i = l.warp; i < 20; i += K / 8) {
                float acc[2][4] = {};
                pair_block<V>(acc, sm.o.dos, sm.o.dE, sm.o.X, Block(i), d.scale, l.lane);
                pairs(Block(i), acc);
            }
            state_products<K, V>(c.dq, dr, dw, sm.o.dos, sm.o.dE, sm.o.X, s.h, s.dh, l);
            state_sums<K, V>(sm.z, s.h, s.dh, sm.anchor[4], l.warp - K / 16, l.lane);
        }
        states_part(sm, c, parked, x, dr, dw, d.scale, l);
    }
    __device__ __forceinline__ void pairs(Carried &c) {
        Parked<K> parked = {sm.x.parked, thread.warp * 32 + thread.lane};
        if (W == TIGHT) parked.put(c.gam);
        {
            Lane l(thread);
            float sq[4][4] = {}, sr[4][4] = {};
            read_pairs(sm, l, sq, sr);
            add_read(sm, c, parked, sq, sr, l);
        }
        Lane l(thread);
        float sw[4][4] = {}, sx[4][4] = {};
        write_pairs(sm, l, sw, sx);
        if (sm.wide[l.I])
            add_write<true>(sm, c, parked, sw, sx, l);
        else
            add_write<false>(sm, c, parked, sw, sx, l);
    }
    __device__ __forceinline__ void far(Carried &c, int phase) {
        Lane l(thread);
        Place p = place(phase);
        Given x;
        Kept{sm.given}.get(x, l);
        for (int b = 0; b < 4; b++) {
            if (!sm.wide[b]) continue;
            far_terms(sm, plan, t, p, b);
            if (b == l.I) add_far(sm, c, x, l);
        }
    }
    template <int GATE>
    __device__ __forceinline__ void gate(Carried &c, const RawGates &raw, int phase,
                                         const Lane &l) {
        through_gate<GATE>(sm, d, place(phase), c, raw, l);
    }
    __device__ __forceinline__ void ends(Carried &c, Ahead<K> &ahead, unsigned next, int phase) {
        Lane l(thread);
        Decayed<K> &out = sm.big.rows();
        Given x;
        Kept{sm.given}.get(x, l);
        sum_dg(sm, c, l);
        add_own(sm, c, x, l);
        if (a.whole) sum_dots(sm, c, x, l);
        drain_fence(); /* rows of k and q lie where operands come */
        __syncthreads();
        if (W == SOLVED)
            store_dbeta<K, K / 32>(d, sm.raw_beta, g, place(phase), l,
                                   [&](int i, int s) { return db_at(sm, i, s); });
        if (W != TIGHT && next < end) Loader<K, V, W>(sm, a, l).late(next, sm.place[phase ^ 1]);
        if (a.whole && d.l2norm) through_norm<K>(c.dq, x.q, sm.of_row.dot[0], sm.rq, l);
        compiler_fence(); /* only now are there registers */
        RawGates raw;
        load_raw<K>(raw, d, t, place(phase), RowLane(l));
        if (a.whole && d.l2norm) through_norm<K>(c.dk, x.k, sm.of_row.dot[1], sm.rk, l);
        FOR_GATE(d, gate, c, raw, phase, l);
        l = Lane(thread);
        store_dg<K>(c, d, g, place(phase), RowLane(l));
        store_q_and_k<K>(
            d, g, a, [&] { return place(phase); }, c.dq, c.dk, out.ka, out.qa, l,
            [&] {
                if (W != TIGHT) ahead.fetch(d, t, place(phase ^ 1), l);
            });
        int ch = l.thread() % K, b = l.thread() / K;
        if (b < 2) {
            float(*s)[K] = b ? sm.x.sum.b : sm.x.sum.a;
            float sum = (s[0][ch] + s[1][ch]) + (s[2][ch] + s[3][ch]);
            a.part[(place(phase).tile * 2 + b) * K + ch] = d.gate == DP_GATE_LOG ? 0.f : sum;
        }
        __syncwarp();
        bar_arrive_warp(&sm.left, l.lane);
    }
    /* next: `end` or more behind the last. */
    __device__ __forceinline__ void tile(unsigned i, unsigned next, int phase, Ahead<K> &ahead) {
        Carried c;
        Given x;
        {
            Place p = place(phase);
            Values<V, NT> v;
            Lane l(thread);
            Loader<K, V, W> load(sm, a, l);
            if (W == TIGHT) ahead.fetch(d, t, p, l);
            if (W != SOLVED) v.load(d, t, p, l);
            make_rows(sm, d, t, a, p, l, ahead, true, c.gam, x, phase);
            if (W == TIGHT) {
                drain_fence(); /* gates for fragments lay where the states are loaded */
                __syncthreads();
                load.early(i);
                load.late(i, sm.place[phase]);
            }
            if (W != SOLVED) drain_fence(); /* kgam */
            __syncthreads();
            if (W != SOLVED) solve(v, phase);
        }
        states(c, x, next < end ? next : i, phase);
        drain_fence(); /* dP and dL lie where T and L come */
        __syncthreads();
        Lane l(thread);
        Loader<K, V, W> load(sm, a, l);
        if (W == TIGHT) {
            Place p = place(phase);
            ahead.fetch(d, t, p, l);
            sum_written(sm, l.thread());
            __syncthreads(); /* what it has read is written anew */
            make_rows(sm, d, t, a, p, l, ahead, false, c.gam, x, phase);
            __syncthreads();
        } else if (next < end)
            load.early(next);
        Kept{sm.given}.put(x, l);
        if (W != TIGHT) sum_written(sm, l.thread());
        pairs(c);
        if (is_wide<4>(sm.wide)) far(c, phase);
        ends(c, ahead, next, phase);
        if (W == TIGHT) {
            drain_fence();
            __syncthreads();
        }
    }
};

template <int K, int V, Form W, Formats F>
__global__ void __launch_bounds__(GRAD_THREADS(K), 1)
    k_grad(const __grid_constant__ Dims plan, const __grid_constant__ dpg_tensors t,
           const __grid_constant__ dpg_grads g, const __grid_constant__ GradArgs a,
           const TileRange x) {
    if (W == TIGHT && ROOMY_BLOCKS) return; /* never launched there: no code */
    extern __shared__ __align__(1024) char raw[];
    GradSmem<K, V, W> &sm = *(GradSmem<K, V, W> *)raw;
    const Dims d = known_bwd<F>(plan);
    Grad<K, V, W, F> grad = {sm, d, plan, t, g, a, {kept_warp(), kept_lane()}, x.to};
    begin_tiles(x);
    const unsigned first = x.from + blockIdx.x;
    if (threadIdx.x == 0) {
        sm.place[0] = place_of(d, first);
        for (int i = 0; i < 3; i++)
            bar_init(&sm.came[i], FULL_COUNT);
        bar_init(&sm.left, EMPTY_COUNT(K / 8));
        bar_init_end();
    }
    __syncthreads();
    Lane l(grad.thread);
    Loader<K, V, W> load(sm, a, l);
    if (W != TIGHT) {
        load.early(first);
        load.late(first, sm.place[0]);
    }
    Ahead<K> ahead;
    if (W != TIGHT) ahead.fetch(d, t, grad.place(0), l);
    int phase = 0;
    for (unsigned i = first; i < x.to; i += gridDim.x, phase ^= 1)
        grad.tile(i, i + gridDim.x, phase, ahead);
    end_beside(x.ready);
}

/* ---- host ------------------------------------------------------------------------------------ */

template <int K, int V> struct Gradients {
    template <Form W> static dp_status of(const Call &c, GradArgs a) {
        auto kernel = OF_FORMATS(formats_of_bwd(c.p->d), k_grad, K, V, W);
        int bytes = (int)sizeof(GradSmem<K, V, W>);
        return over_tiles(c, [&](TileRange x) {
            return launch(queue_of(c), "k_grad", kernel, x.blocks, GRAD_THREADS(K), bytes, c.p->d,
                          *c.t, *c.g, a, x);
        });
    }
    static dp_status run(const Call &c, GradArgs a) {
        if (c.p->bare) return of<SOLVED>(c, a);
        return sizeof(GradSmem<K, V, ROOMY>) <= c.p->device.shared ? of<ROOMY>(c, a)
                                                                   : of<TIGHT>(c, a);
    }
};

} // namespace

GradArgs grad_args(const Call &c) {
    auto b = [&](int slot) { return at<bf16>(c, slot); };
    GradArgs a = {};
    a.T = b(B_AKK);
    a.L = b(B_L);
    a.Aqk = b(B_AQK);
    a.X = b(B_VNEW);
    a.h = b(B_H);
    a.dh = b(B_DH);
    a.dq = at<float>(c, B_DQ);
    a.dk = at<float>(c, B_DKR);
    a.whole = grads_are_whole(c.p->d);
    a.norm = at<float>(c, B_NORM);
    a.part = at<float>(c, B_PART);
    return a;
}

dp_status fast_grad_channels(const Call &c) {
    FAULT_TO_DEVICE(c.e, c.s);
    GradArgs a = grad_args(c);
    TRY(do_rows(c, &a.rows));
    TRY(dE_rows(c, &a.news));
    return by_widths<Gradients>(c, a);
}

size_t fast_grad_bytes(int K, int V) {
    if (K == 64)
        return V == 64 ? sizeof(GradSmem<64, 64, TIGHT>) : sizeof(GradSmem<64, 128, TIGHT>);
    return V == 64 ? sizeof(GradSmem<128, 64, TIGHT>) : sizeof(GradSmem<128, 128, TIGHT>);
}
static_assert(sizeof(GradSmem<128, 128, ROOMY>) <= 232448, "more than a block has on 9.0");
static_assert(sizeof(GradSmem<128, 128, TIGHT>) <= 166912, "more than a block has on 8.0");
