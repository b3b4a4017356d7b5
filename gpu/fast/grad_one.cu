/* gpu/fast/grad_one.cu - the gradients of one tile whose channels share one gate (GDN): the same as
 * grad.cu. Decay multiplies whole sums, so that k and q themselves are operands, exact in bf16. The
 * decay and the 1/norms of the rows multiply dP and dL.
 *
 * One block a multiprocessor, 4 K threads, tile after tile. The copy engine loads the next tile
 * while this one ends; the next rows are requested then too (Ahead). A warp (I, cq) has rows 16 I
 * .. and channels 32 cq .. (of v: its part of the columns). Phases, and what shared memory holds:
 *
 *   rows     gates, norms; dg of the tile before        k q; X do dv_new h dh T L Aqk on their way
 *   solve    dZ = T' dv_new, E = V - Kgam S_0 - L X     dE for dv_new
 *   states   dP = scale do X', dL = -dE X'; do S_0', dE S_0', X dS_c'      weights (of dP, dL)
 *   ends     pairs, L2 norm, sums of dg                 X do dv_new h dh T L Aqk of the next tile;
 *                                                       dq, dk on their way out for weights
 *
 * SOLVED (`bare.cuh`) means that E and dE are loaded, not X, dv_new and T. There is no phase
 * `solve`. dP and dL lack beta of their columns.
 *
 * Products with states, dP and dL as in grad.cu.
 *
 * A pair of tokens s > i counts c = dP_si Aqk_si / scale + dL_si L_si in dg: at +s and at -i. */
#include "fast/grad.cuh"
#include <algorithm>

namespace {

/* dP and dL with decay from i to s, ROWS. The read part is multiplied by 1/norm of key i, the write
 * part by 1/norm of query or key s. */
struct Weights {
    bf16 P_read[C * C], L_read[C * C], P_write[C * C], L_write[C * C];
};

template <int K, int V> struct OneSmem {
    bf16 h[K * V], dh[K * V];             /* SLICES */
    bf16 X[C * V], dos[C * V], dE[C * V]; /* SLICES; dE: dv_new when it comes */
    bf16 T[C * C], L[C * C], Aqk[C * C];  /* ROWS */
    union {
        Weights w;
        struct {
            bf16 dq[C * K], dk[C * K];
        } out; /* ROWS */
    } x;
    bf16 k[C * K], q[C * K]; /* ROWS */
    float gam[C], rk[C], rq[C], beta[C], own[C];
    RawWord raw_beta[C];
    float db[K / 32 + 2][C]; /* terms of dbeta; SOLVED: those of pairs, and of its own, too */
    float dot[2][K / 32][C];
    float dg[K / 32][C];                    /* of the states: terms of dg */
    float all[K / 8];                       /* by warp: what all of the chunk's tokens see of it */
    float of_row[2][4][C], of_col[2][4][C]; /* pairs: sums of a block (I, J) of dP, dL, by J and
                                             * row;  by I and column */
    float sum[C];                           /* dg of a row by itself */
    Place place[3];                         /* of this tile, of those before and behind it */
    uint64_t came[2];
};

/* By warp 0. 0: dv_new, T, h, X, L; 1: do, dh, Aqk. SOLVED: dE, h, E, L. */
template <bool SOLVED, int K, int V>
__device__ __forceinline__ void load(OneSmem<K, V> &sm, const GradArgs &a, int64_t tile,
                                     const Place &p, int lane) {
    const int CV = C * V * 2, KV = K * V * 2, CC = C * C * 2;
    fill_begin(&sm.came[0], 2 * CV + KV + (SOLVED ? 1 : 2) * CC, lane);
    fill(sm.dE, a.news.left + tile * C * V, CV, &sm.came[0], lane);
    if (!SOLVED) fill(sm.T, a.T + tile * C * C, CC, &sm.came[0], lane);
    fill(sm.h, a.h + tile * K * V, KV, &sm.came[0], lane);
    fill(sm.X, a.X + tile * C * V, CV, &sm.came[0], lane);
    fill(sm.L, a.L + tile * C * C, CC, &sm.came[0], lane);
    fill_end(&sm.came[0], lane);
    fill_begin(&sm.came[1], CV + KV + CC, lane);
    fill_do<V, V / 16>(sm.dos, a.rows, p.c, p.hv, tile, 0, &sm.came[1], lane);
    fill(sm.dh, a.dh + tile * K * V, KV, &sm.came[1], lane);
    fill(sm.Aqk, a.Aqk + tile * C * C, CC, &sm.came[1], lane);
    fill_end(&sm.came[1], lane);
}

/* Requests for the next tile while this one ends. */
template <int K> struct Ahead {
    KeyRows<K, 512 / K> x;
    HeadGate gate; /* warp 1 */
    RawWord beta;
    __device__ __forceinline__ void load(const Dims &d, const dpg_tensors &t, const Place &p,
                                         const Lane &l) {
        x.fetch(d, t, p, l.warp * (512 / K), l.lane * (K / 32));
        gate = {};
        if (l.warp == 1) gate.load(d, t, p, l.lane);
        beta = load_beta(d, t, p, l.thread());
    }
};

/* Rows of k and q to shared memory, their norms; beta, the gate's sums. */
template <int K, int V>
__device__ __forceinline__ void make_rows(OneSmem<K, V> &sm, const Dims &d, const GradArgs &a,
                                          const Place &p, Ahead<K> &ahead, const Lane &l) {
    const int E = K / 32, N = 512 / K;
    int row0 = l.warp * N, ch = l.lane * E;
    KeyRows<K, N> &x = ahead.x;
    if (l.thread() < C) {
        sm.beta[l.thread()] = beta_of(d, ahead.beta, p, l.thread());
        sm.raw_beta[l.thread()] = ahead.beta;
    }
    if (l.warp == 1) *(float2 *)(sm.gam + l.lane * 2) = ahead.gate.sums(d, p, l.lane);
    x.finish(d, p, row0, l.lane);
#pragma unroll
    for (int i = 0; i < N; i++) {
        int at = rows_at(row0 + i, ch / 8) + ch % 8;
        store_pairs<E>(sm.k + at, x.k[i]);
        store_pairs<E>(sm.q + at, x.q[i]);
    }
    if (l.lane % (32 / N)) return;
    int r = row0 + l.lane / (32 / N);
    sm.rk[r] = x.rk;
    sm.rq[r] = x.rq;
    if (a.norm) a.norm[p.tile * 2 * C + r] = x.rk;
    if (a.norm) a.norm[p.tile * 2 * C + C + r] = x.rq;
}

/* One block of dP or dL: weights, and its pairs' terms of dg; by_entry: of the entries of Aqk or L.
 */
template <bool SOLVED, int K, int V>
__device__ __forceinline__ void store_weights(OneSmem<K, V> &sm, const Block &block, int lr,
                                              const float acc[2][4], float by_entry,
                                              const Lane &l) {
    int is_L = block.is_L, I = block.I, J = block.J;
    Weights &w = sm.x.w;
    float row[2] = {0.f, 0.f}, col[4] = {0.f, 0.f, 0.f, 0.f};
    uint32_t entries[4], read[4], write[4]; /* [row half][n] */
    ldsm4(entries, walk_across(is_L ? sm.L : sm.Aqk, 16 * I, l.lane).of_64(J));
#pragma unroll
    for (int n = 0; n < 2; n++) {
        int i = 16 * J + 8 * n + 2 * l.tc;
        float2 gi = *(const float2 *)(sm.gam + i), rk = *(const float2 *)(sm.rk + i);
        const float2 beta = *(const float2 *)(sm.beta + i);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int s = 16 * I + l.gr + 8 * r, end = pairs_end(s, lr);
            float x = i < end ? acc[n][2 * r] : 0.f, y = i + 1 < end ? acc[n][2 * r + 1] : 0.f;
            float gs = sm.gam[s], by = is_L ? sm.rk[s] : sm.rq[s];
            float2 m = unpack2(entries[2 * r + n]);
            if (SOLVED && !is_L && I == J && (i == s || i + 1 == s)) /* no decay, so not of dg */
                sm.db[K / 32 + 1][s] =
                    by_entry * (i == s ? acc[n][2 * r] * m.x : acc[n][2 * r + 1] * m.y);
            m.x *= x * by_entry;
            m.y *= y * by_entry;
            col[2 * n] += m.x;
            col[2 * n + 1] += m.y;
            if (SOLVED) {
                x *= beta.x;
                y *= beta.y;
                row[r] = fmaf(m.x, beta.x, fmaf(m.y, beta.y, row[r]));
            } else {
                row[r] += m.x + m.y;
            }
            float ex = x * ex2(fminf(gs - gi.x, 0.f)), ey = y * ex2(fminf(gs - gi.y, 0.f));
            read[2 * r + n] = pack2(ex * rk.x, ey * rk.y);
            write[2 * r + n] = pack2(ex * by, ey * by);
        }
    }
    stsm4(walk_across(is_L ? w.L_read : w.P_read, 16 * I, l.lane).of_64(J), read);
    stsm4(walk_across(is_L ? w.L_write : w.P_write, 16 * I, l.lane).of_64(J), write);
    halve_sums<2>(col, l.lane, 4);
    halve_sums<1>(col, l.lane, 8);
    col[0] += __shfl_xor_sync(~0u, col[0], 16);
    halve_sums<1>(row, l.lane, 1);
    row[0] += __shfl_xor_sync(~0u, row[0], 2);
    if (l.gr < 4) sm.of_col[is_L][I][16 * J + 8 * (l.gr % 2) + 2 * l.tc + l.gr / 2] = col[0];
    if (l.tc < 2) sm.of_row[is_L][J][16 * I + l.gr + 8 * l.tc] = row[0];
}

/* The states' part of dq and dk from plain products, and their terms of dg. Adds to `all` the
 * lane's part that all tokens of the chunk see. */
template <bool SOLVED, int K, int V>
__device__ __forceinline__ void states_part(OneSmem<K, V> &sm, float dq[4][4], float dk[4][4],
                                            const float dw[4][4], float scale, float &all,
                                            const Lane &l) {
    OwnRows ks(sm.k, l), qs(sm.q, l);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int s = l.row(r);
        float down = ex2(sm.gam[s]), to_end = ex2(sm.gam[C - 1] - sm.gam[s]);
        float q_sum = 0.f, k_sum = 0.f, w_sum = 0.f;
        const float beta = SOLVED ? sm.beta[s] : 1.f;
#pragma unroll
        for (int n = 0; n < 4; n++) {
            float2 k = ks.at(n, r), q = qs.at(n, r);
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int i = 2 * r + e;
                float read = -down * dk[n][i], own = to_end * dw[n][i];
                w_sum = fmaf(e ? k.y : k.x, own, w_sum);
                if (SOLVED) own *= beta;
                dq[n][i] *= scale * down;
                dk[n][i] = read + own;
                q_sum = fmaf(e ? q.y : q.x, dq[n][i], q_sum);
                k_sum = fmaf(e ? k.y : k.x, read - own, k_sum);
            }
        }
        float dg = row_sum(fmaf(sm.rq[s], q_sum, sm.rk[s] * k_sum));
        if (l.tc == 0) sm.dg[l.cq][s] = dg;
        w_sum *= sm.rk[s];
        all = fmaf(w_sum, beta, all);
        if (!SOLVED) continue;
        w_sum = row_sum(w_sum);
        if (l.tc == 0) sm.db[l.cq][s] = w_sum;
    }
}

/* dq += dP k, dk += dL k + dP' q + dL' k, weighted. */
template <int K, int V>
__device__ __forceinline__ void pairs_part(OneSmem<K, V> &sm, float dq[4][4], float dk[4][4],
                                           const Lane &l) {
    const Weights &w = sm.x.w;
    Walk<> k = walk_down(sm.k, 0, l.lane), q = walk_down(sm.q, 0, l.lane);
    Walk<> P = walk_down(w.P_read, 16 * l.I, l.lane), L = walk_down(w.L_read, 16 * l.I, l.lane);
    Walk<> Pw = walk_across(w.P_write, 0, l.lane), Lw = walk_across(w.L_write, 0, l.lane);
    uint32_t a[4], b[4], f[4], y[4];
    for (int J = 0; J <= l.I; J++) {
        ldsm4(a, P.at(J));
        ldsm4(b, L.at(J));
#pragma unroll
        for (int n = 0; n < 2; n++) {
            ldsm4t(f, k.at(2 * l.cq + n, J));
            two(dq[2 * n], dq[2 * n + 1], a, f);
            two(dk[2 * n], dk[2 * n + 1], b, f);
        }
    }
    for (int M = l.I; M < 4; M++) {
        ldsm4t(a, Pw.at(l.I, M));
        ldsm4t(b, Lw.at(l.I, M));
#pragma unroll
        for (int n = 0; n < 2; n++) {
            ldsm4t(f, q.at(2 * l.cq + n, M));
            ldsm4t(y, k.at(2 * l.cq + n, M));
            two(dk[2 * n], dk[2 * n + 1], a, f);
            two(dk[2 * n], dk[2 * n + 1], b, y);
        }
    }
}

/* A token's own keys; terms of <y, dy>. */
template <bool SOLVED, int K, int V>
__device__ __forceinline__ void own_and_dots(OneSmem<K, V> &sm, float dq[4][4], float dk[4][4],
                                             const Lane &l) {
    OwnRows ks(sm.k, l), qs(sm.q, l);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int s = l.row(r);
        float rk = sm.rk[s], rq = sm.rq[s], own = sm.own[s], dot_q = 0.f, dot_k = 0.f;
        if (SOLVED) own *= sm.beta[s];
#pragma unroll
        for (int n = 0; n < 4; n++) {
            float2 k = ks.at(n, r), q = qs.at(n, r);
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int i = 2 * r + e;
                float x = e ? k.y : k.x, y = e ? q.y : q.x;
                dq[n][i] = fmaf(own * rk, x, dq[n][i]);
                dk[n][i] = fmaf(own * rq, y, dk[n][i]);
                dot_q = fmaf(y, dq[n][i], dot_q);
                dot_k = fmaf(x, dk[n][i], dot_k);
            }
        }
        dot_q = row_sum(dot_q) * rq;
        dot_k = row_sum(dot_k) * rk;
        if (l.tc == 0) sm.dot[0][l.cq][s] = dot_q;
        if (l.tc == 0) sm.dot[1][l.cq][s] = dot_k;
    }
}

/* dx = (dy - y <y, dy>) / |x|. */
template <int K>
__device__ __forceinline__ void through_norm(float dx[4][4], const bf16 *x, const float dot[][C],
                                             const float *norm, const Lane &l) {
    OwnRows ys(x, l);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int s = l.row(r);
        float sum = 0.f, n1 = norm[s];
        for (int i = 0; i < K / 32; i++)
            sum += dot[i][s];
        sum *= -n1;
#pragma unroll
        for (int n = 0; n < 4; n++) {
            float2 y = ys.at(n, r);
            dx[n][2 * r] = fmaf(y.x, sum, dx[n][2 * r]) * n1;
            dx[n][2 * r + 1] = fmaf(y.y, sum, dx[n][2 * r + 1]) * n1;
        }
    }
}

/* dg of a row by itself, 8 lanes a row: what states and pairs give it and take from it. Terms are
 * asked for before the products of pairs, summed behind them. */
template <int K> struct RowSums {
    static const int N = 128 / K; /* rows of a lane, K / 2 apart */
    float state[N], row[N], col[N];
    template <int V> __device__ __forceinline__ void load(const OneSmem<K, V> &sm, const Lane &l) {
        int part = l.lane % 8, m = part / 4, J = part % 4;
#pragma unroll
        for (int i = 0; i < N; i++) {
            int s = l.warp * 4 + l.lane / 8 + i * (K / 2), I = s / 16;
            state[i] =
                part < K / 32 && !(FAULT(GATE_HALF) && part % 2) ? sm.dg[part % (K / 32)][s] : 0.f;
            row[i] = J <= I ? sm.of_row[m][J][s] : 0.f;
            col[i] = J >= I ? sm.of_col[m][J][s] : 0.f;
        }
    }
    template <bool SOLVED, int V>
    __device__ __forceinline__ void store(OneSmem<K, V> &sm, const Lane &l) const {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int s = l.warp * 4 + l.lane / 8 + i * (K / 2);
            float x = row_sum(SOLVED ? state[i] + row[i] : state[i] + row[i] - col[i]);
            x += __shfl_xor_sync(~0u, x, 4);
            if (SOLVED) {
                float y = row_sum(col[i]);
                y += __shfl_xor_sync(~0u, y, 4);
                x = fmaf(-sm.beta[s], y, x);
                if (l.lane % 8 == 0) sm.db[K / 32][s] = y;
            }
            if (l.lane % 8 == 0) sm.sum[s] = x;
        }
    }
};

/* dg of every token and the tile's terms of dA_log and ddt_bias, by one warp, 2 rows a lane. The
 * others make the rows of the next tile meanwhile. */
#define GATE_WARP 2
template <int K> struct GateSum {
    uint32_t A_log, bias;
    RawWord raw[2];
    __device__ __forceinline__ int64_t at(const Dims &d, const Place &p, int i) const {
        return row_at(p.c.t0, d.HV, p.hv, i < p.c.len ? i : 0, 0);
    }
    __device__ __forceinline__ void load(const Dims &d, const dpg_tensors &t, const Place &p,
                                         int lane) {
        A_log = param_word(t.A_log, p.hv, d.A_type);
        bias = param_word(t.dt_bias, p.hv, d.bias_type);
#pragma unroll
        for (int e = 0; e < 2; e++)
            raw[e].load(t.g, at(d, p, lane + 32 * e), d.g_bf16);
    }
    template <int V>
    __device__ __forceinline__ void run(OneSmem<K, V> &sm, const Dims &d, const dpg_grads &g,
                                        const GradArgs &a, const Place &p, int lane) const {
        float all = lane < K / 8 ? sm.all[lane] : 0.f;
        float2 x = *(const float2 *)(sm.sum + 2 * lane);
#pragma unroll
        for (int m = 16; m; m /= 2)
            all += __shfl_xor_sync(~0u, all, m);
        float sum = x.x + x.y;
#pragma unroll
        for (int m = 1; m < 32; m *= 2) {
            float y = __shfl_down_sync(~0u, sum, m);
            if (lane + m < 32) sum += y;
        }
        float after = __shfl_down_sync(~0u, sum, 1);
        if (lane == 31) after = 0.f;
        after += all;
        __syncwarp(); /* all have read */
        *(float2 *)(sm.sum + 2 * lane) = make_float2(x.x + x.y + after, x.y + after);
        __syncwarp(); /* from each row on */
        const float A = expf(param_value(A_log, d.A_type)), b = param_value(bias, d.bias_type);
        float sa = 0.f, sb = 0.f;
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int i = lane + 32 * e;
            if (i >= p.c.len) continue;
            float dg = sm.sum[FAULT(GATE_ROW) ? i : i << p.lr];
            GateGrad y = gate_grad_of(d, dg, raw[e].get(d.g_bf16), A, b);
            stx(g.dg, at(d, p, i), d.dg_bf16, y.raw);
            sa += y.dA_log;
            sb += y.ddt_bias;
        }
#pragma unroll
        for (int m = 16; m; m /= 2) {
            sa += __shfl_xor_sync(~0u, sa, m);
            sb += __shfl_xor_sync(~0u, sb, m);
        }
        if (lane == 0) *(float2 *)(a.part + p.tile * 2) = make_float2(sa, sb);
    }
};

template <int K, int V, bool SOLVED> struct GradOne {
    static const int NT = V / (K / 32) / 8;
    OneSmem<K, V> &sm;
    const Dims &d;
    const dpg_tensors &t;
    const dpg_grads &g;
    const GradArgs &a;
    const Thread thread;

    /* before: of the tile before, NULL if there is none. */
    __device__ __forceinline__ void rows(const Place &p, Ahead<K> &ahead, const GateSum<K> &gate,
                                         const Place *before) {
        Lane l(thread);
        make_rows(sm, d, a, p, ahead, l);
        if (before && l.warp == GATE_WARP) gate.run(sm, d, g, a, *before, l.lane);
        drain_fence(); /* k */
        __syncthreads();
    }
    __device__ __forceinline__ void solve(const Place &p, const Values<V, NT> &v, int phase) {
        Lane l(thread);
        float dZ[NT][4] = {}, E[NT][4] = {};
        bar_wait(&sm.came[0], phase);
        Solved s = {sm.T, sm.dE, sm.k, sm.h, sm.L, sm.X};
        solve_back<K, NT, true>(dZ, E, s, l.I, l.cq * NT / 2, l.lane, [&] {
#pragma unroll
            for (int i = 0; i < 4 * NT; i++) {
                int row = l.row(i % 4 / 2);
                E[i / 4][i % 4] *= sm.rk[row] * ex2(sm.gam[row]);
            }
        });
        meet_part(1 + l.cq, 128); /* who reads these columns of dv_new */
        finish_dE<V, NT>(d, v, g, p, l, dZ, E, sm.beta, sm.dE, sm.db[0]);
        __syncthreads();
        store_dv<K, V>(d, g, p, sm.dE, l);
    }
    /* f of the lane's pieces of the states where warpgroups have the pairs. K = 128: of 32 parts of
     * a half of them a warp with no block takes 10, with one 6, with two none. */
    template <class F> __device__ __forceinline__ void each_piece(const Lane &l, F f) {
        const int ALL = K * V / 8;
        int first = 0, end = ALL, step = GRAD_THREADS(K), at = l.warp * 32 + l.lane;
        if (K == 128) {
            int part = l.cq % 2 ? l.I * 10 : 26, n = l.cq % 2 ? (l.I < 2 ? 10 : 6) : 6;
            bool none = l.cq % 2 ? l.I == 3 : l.I > 0;
            first = (l.cq / 2 * 32 + part) * (ALL / 64);
            end = none ? 0 : first + n * (ALL / 64);
            step = 32;
            at = l.lane;
        }
        for (int x = first + at; x < end; x += step)
            f(x);
    }
    /* next: a place for that of tile `after`. */
    __device__ __forceinline__ void states(const Place &p, float dq[4][4], float dk[4][4],
                                           Place *next, unsigned after, int phase) {
        Lane l(thread);
        float dw[4][4] = {}, all = 0.f;
        auto pairs = [&](const Block &b, const float(*acc)[4]) {
            own_pairs(sm.own, p.lr, b, acc, l);
            /* Aqk has `scale`, as dP has */
            store_weights<SOLVED>(sm, b, p.lr, acc, b.is_L ? 1.f : 1.f / d.scale, l);
        };
        /* S_0 o dS_c, by the warps that had fewer blocks of pairs */
        auto piece = [&](int x) { all += piece_sum(sm.h + 8 * x, sm.dh + 8 * x); };
        auto terms = [&](int i, int s) { return sm.db[i][s]; };
        auto little = [&] {
            if (SOLVED)
                store_dv<K, V>(d, g, p, sm.dE, l);
            else
                store_dbeta<K, K / 32>(d, sm.raw_beta, g, p, l, terms);
            if (l.warp == K / 8 - 1 && l.lane == 0) *next = place_of(d, after);
        };
        if (SOLVED) bar_wait(&sm.came[0], phase);
        bar_wait(&sm.came[1], phase);
        if (has_warpgroups()) {
            wg_states<K, V>(dq, dk, dw, sm.dos, sm.dE, sm.X, sm.h, sm.dh, d.scale, l, pairs);
            each_piece(l, piece);
            little();
            wg_state_wait(dq, dk, dw);
        } else {
            little();
            for (int x = l.warp; x < 20; x += K / 8) {
                float acc[2][4] = {};
                pair_block<V>(acc, sm.dos, sm.dE, sm.X, Block(x), d.scale, l.lane);
                pairs(Block(x), acc);
            }
            state_products<K, V>(dq, dk, dw, sm.dos, sm.dE, sm.X, sm.h, sm.dh, l);
            const int more = 20 % (K / 8), rest = K / 8 - more;
            for (int x = threadIdx.x - 32 * more; x >= 0 && x < K * V / 8; x += 32 * rest)
                piece(x);
        }
        all *= ex2(sm.gam[C - 1]);
        states_part<SOLVED>(sm, dq, dk, dw, d.scale, all, l);
#pragma unroll
        for (int m = 16; m; m /= 2)
            all += __shfl_xor_sync(~0u, all, m);
        if (l.lane == 0) sm.all[l.warp] = all;
    }
    /* Writes dq and dk: final ones, or by value head for the sums over groups and keys. Leaves sums
     * and raw gates of dg for the phase `rows` of the next tile. */
    __device__ __forceinline__ void ends(const Place &p, float dq[4][4], float dk[4][4],
                                         GateSum<K> &gate) {
        Lane l(thread);
        gate = {};
        if (l.warp == GATE_WARP) gate.load(d, t, p, l.lane);
        RowSums<K> sums;
        sums.load(sm, l);
        pairs_part(sm, dq, dk, l);
        sums.template store<SOLVED>(sm, l);
        own_and_dots<SOLVED>(sm, dq, dk, l);
        __syncthreads();
        if (SOLVED)
            store_dbeta<K, K / 32 + 2>(d, sm.raw_beta, g, p, l,
                                       [&](int i, int s) { return sm.db[i][s]; });
        if (a.whole && d.l2norm) {
            through_norm<K>(dq, sm.q, sm.dot[0], sm.rq, l);
            through_norm<K>(dk, sm.k, sm.dot[1], sm.rk, l);
        }
        store_q_and_k<K>(
            d, g, a, [&] { return p; }, dq, dk, sm.x.out.dq, sm.x.out.dk, l, [] {});
    }
};

template <int K, int V, bool SOLVED, Formats F>
__global__ void __launch_bounds__(GRAD_THREADS(K), 1)
    k_grad_one(const __grid_constant__ Dims plan, const __grid_constant__ dpg_tensors t,
               const __grid_constant__ dpg_grads g, const __grid_constant__ GradArgs a,
               const TileRange x) {
    extern __shared__ __align__(1024) char raw[];
    OneSmem<K, V> &sm = *(OneSmem<K, V> *)raw;
    const Dims d = known_bwd<F>(plan);
    GradOne<K, V, SOLVED> grad = {sm, d, t, g, a, {kept_warp(), kept_lane()}};
    Lane l(grad.thread);
    begin_tiles(x);
    const unsigned first = x.from + blockIdx.x;
    if (threadIdx.x == 0) {
        sm.place[0] = place_of(d, first);
        for (int i = 0; i < 2; i++)
            bar_init(&sm.came[i], FULL_COUNT);
        bar_init_end();
    }
    __syncthreads();
    if (l.warp == 0) load<SOLVED>(sm, a, first, sm.place[0], l.lane);
    Ahead<K> ahead;
    ahead.load(d, t, sm.place[0], l);
    GateSum<K> gate = {};
    Place *now = sm.place, *next = now + 1, *before = NULL;
    int phase = 0;
    for (unsigned i = first; i < x.to; i += gridDim.x, phase ^= 1) {
        float dq[4][4] = {}, dk[4][4] = {};
        unsigned after = i + gridDim.x;
        Place p = *now;
        Values<V, decltype(grad)::NT> v;
        if (!SOLVED) v.load(d, t, p, l);
        grad.rows(p, ahead, gate, before);
        if (!SOLVED) grad.solve(p, v, phase);
        grad.states(p, dq, dk, next, after < x.to ? after : i, phase);
        drain_fence(); /* dE lies where dv_new comes */
        __syncthreads();
        if (l.warp == 0 && after < x.to) load<SOLVED>(sm, a, after, *next, l.lane);
        ahead.load(d, t, *next, l);
        grad.ends(p, dq, dk, gate);
        Place *free = before ? before : sm.place + 2;
        before = now;
        now = next;
        next = free;
        __syncthreads();
    }
    if (l.warp == GATE_WARP) gate.run(sm, d, g, a, *before, l.lane);
    end_beside(x.ready);
}

/* ---- host ------------------------------------------------------------------------------------ */

template <int K, int V> struct GradientsOne {
    static dp_status run(const Call &c, GradArgs a) {
        const Formats f = formats_of_bwd(c.p->d);
        auto kernel = c.p->bare ? OF_FORMATS(f, k_grad_one, K, V, true)
                                : OF_FORMATS(f, k_grad_one, K, V, false);
        int bytes = (int)sizeof(OneSmem<K, V>);
        return over_tiles(c, [&](TileRange x) {
            return launch(queue_of(c), "k_grad_one", kernel, x.blocks, GRAD_THREADS(K), bytes,
                          c.p->d, *c.t, *c.g, a, x);
        });
    }
};

} // namespace

dp_status fast_grad_one(const Call &c) {
    FAULT_TO_DEVICE(c.e, c.s);
    GradArgs a = grad_args(c);
    TRY(do_rows(c, &a.rows));
    TRY(dE_rows(c, &a.news));
    return by_widths<GradientsOne>(c, a);
}

size_t fast_grad_one_bytes(int K, int V) {
    if (K == 64) return V == 64 ? sizeof(OneSmem<64, 64>) : sizeof(OneSmem<64, 128>);
    return V == 64 ? sizeof(OneSmem<128, 64>) : sizeof(OneSmem<128, 128>);
}
