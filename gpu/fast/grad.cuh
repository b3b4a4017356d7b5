/* gpu/fast/grad.cuh - dE, dv, dbeta, dP, dL of a tile from data in shared memory. Both gradient
 * kernels include it (grad.cu: a gate a channel, grad_one.cu: one a head). */
#ifndef DPG_GRAD_CUH
#define DPG_GRAD_CUH
#include "fast/columns.cuh"
#include "fast/fast.cuh"
#include "fast/ready.cuh"
#include "fast/rows.cuh"

/* A tile's warps: (I, cq) of 4 x K / 32, rows 16 I .. and the cq-th part of the columns. */
#define GRAD_THREADS(K) (4 * (K))

struct GradArgs {
    const bf16 *T, *L, *Aqk, *X, *h, *dh;
    DoRows rows, news; /* do; dv_new, or dE */
    float *dq, *dk;    /* by value head, fp32, where the groups' sums or a token's keys follow; */
    int whole;         /* else 1: dq and dk of the caller are written here, through the L2 norm */
    float *norm;       /* 1/norms of the rows of k, then of q, for what follows; or NULL */
    float *part;       /* terms of dA_log, ddt_bias: [tile][2][Kg] */
};

/* state_bwd.cu: tiles whose gradients start while the pass runs, none if ready is NULL. */
TileRange tiles_beside(const Call &c);
/* All tiles in one launch or in two: f(range). */
template <class F> static inline dp_status over_tiles(const Call &c, F f) {
    const TileRange beside = tiles_beside(c);
    if (beside.ready) TRY(f(beside));
    return f({0, beside.from, std::min(beside.from, (unsigned)c.p->device.sms), NULL, 0});
}

/* Where the plan keeps what the gradients of a tile read and write. */
GradArgs grad_args(const Call &c);

/* Where a lane stands in its warp's tiles. Every phase makes it again from two numbers, which alone
 * are in registers between. */
struct Thread {
    int warp, lane;
};
struct Lane : Thread {
    int I, cq, gr, tc;
    __device__ __forceinline__ explicit Lane(const Thread &t) : Thread(t) {
        lane = made_number(lane) % 32;
        I = warp % 4;
        cq = warp / 4;
        gr = lane / 4;
        tc = lane % 4;
    }
    __device__ __forceinline__ unsigned thread() const { return warp * 32 + lane; }
    __device__ __forceinline__ int row(int r) const { return 16 * I + gr + 8 * r; }
};

/* The warp's rows of a tile in shared memory (ROWS), its channels 16 h .. The lane's word x is
 * [n][row half, e]. */
__device__ __forceinline__ void own_rows(uint32_t y[4], const bf16 *tile, int h, const Lane &l) {
    ldsm4(y, walk_across(tile, 16 * l.I, l.lane).at(2 * l.cq + h));
}
__device__ __forceinline__ float own_word(const uint32_t y[4], int x) {
    float2 f = unpack2(y[x / 4 + x % 4 / 2 * 2]);
    return x % 2 ? f.y : f.x;
}
/* All of its channels; at(): the lane's of n-tile n, row half r. */
struct OwnRows {
    uint32_t y[2][4];
    __device__ __forceinline__ OwnRows(const bf16 *tile, const Lane &l) {
        own_rows(y[0], tile, 0, l);
        own_rows(y[1], tile, 1, l);
    }
    __device__ __forceinline__ float2 at(int n, int r) const {
        return unpack2(y[n / 2][n % 2 + 2 * r]);
    }
};

/* N (8 or 16) values of the 8 lanes that share columns: their sums over these lanes, N / 8 of them
 * in each. Lane gr gets those from column_sums_at<N>(gr) on: each step halves what a lane still
 * holds. */
template <int N> __device__ __forceinline__ int column_sums_at(int gr) {
    return (gr % 2 * 4 + gr / 2 % 2 * 2 + gr / 4) * (N / 8);
}
template <int N> __device__ __forceinline__ void halve_sums(float *x, int lane, int m) {
    bool upper = lane & m;
#pragma unroll
    for (int i = 0; i < N; i++) {
        float send = upper ? x[i] : x[i + N], keep = upper ? x[i + N] : x[i];
        x[i] = keep + __shfl_xor_sync(~0u, send, m);
    }
}
template <int N> __device__ __forceinline__ void column_sums(float x[N], int lane) {
    halve_sums<N / 2>(x, lane, 4);
    halve_sums<N / 4>(x, lane, 8);
    halve_sums<N / 8>(x, lane, 16);
}

/* Sum over the 8 lanes that share columns: over 16 rows, if both halves were added before. */
__device__ __forceinline__ float column_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 4);
    x += __shfl_xor_sync(~0u, x, 8);
    return x + __shfl_xor_sync(~0u, x, 16);
}
/* Over the 4 lanes that share a row. */
__device__ __forceinline__ float row_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

/* Gradient of the raw gate and its terms of dA_log and ddt_bias, by ex2 (gate_grad of values.cuh).
 */
template <int GATE>
__device__ __forceinline__ GateGrad gate_grad_fast(float dg, float graw, float a, float bias,
                                                   float lower) {
    GateGrad y = {dg, 0.f, 0.f};
    if (GATE == DP_GATE_LOG) return y;
    float x = graw + bias, z = GATE == DP_GATE_SOFTPLUS ? x * LOG2E : x * (a * LOG2E);
    float e = ex2(-fabsf(z)), over = rcp(1.f + e);
    if (GATE == DP_GATE_SOFTPLUS) {
        y.raw = -dg * a * (x < 0 ? e * over : over);
        y.dA_log = -dg * a * fmaf(e * LN2, log2_1p_over(e), fmaxf(x, 0.f));
    } else {
        y.raw = dg * (e * over * over * (lower * a));
        y.dA_log = y.raw * x;
    }
    y.ddt_bias = y.raw;
    return y;
}
__device__ __forceinline__ GateGrad gate_grad_of(const Dims &d, float dg, float graw, float a,
                                                 float bias) {
    return d.gate == DP_GATE_LOG ? gate_grad_fast<DP_GATE_LOG>(dg, graw, a, bias, d.lower_bound)
           : d.gate == DP_GATE_SOFTPLUS
               ? gate_grad_fast<DP_GATE_SOFTPLUS>(dg, graw, a, bias, d.lower_bound)
               : gate_grad_fast<DP_GATE_LOWER_BOUND>(dg, graw, a, bias, d.lower_bound);
}
/* f<GATE>() for the plan's gate: asked once, not for every element. */
#define FOR_GATE(d, f, ...)                      \
    do {                                         \
        if ((d).gate == DP_GATE_LOG)             \
            f<DP_GATE_LOG>(__VA_ARGS__);         \
        else if ((d).gate == DP_GATE_SOFTPLUS)   \
            f<DP_GATE_SOFTPLUS>(__VA_ARGS__);    \
        else                                     \
            f<DP_GATE_LOWER_BOUND>(__VA_ARGS__); \
    } while (0)

/* Factors of the triangular solve of a tile's rows in the backward, in shared memory. left: Kgam,
 * or k where its decay multiplies whole rows. */
struct Solved {
    const bf16 *T, *dv_new, *left, *h, *L, *X;
};

/* E = left S_0 of a warpgroup's columns, enqueued. */
template <int K, int NT>
__device__ __forceinline__ void wg_left(float E[NT][4], const Solved &s, int slice) {
    wg_fence();
#pragma unroll
    for (int j = 0; j < K / 16; j++)
#pragma unroll
        for (int n = 0; n < NT; n += 4)
            wg_mul_32<1>(E + n, rows_desc(s.left, 1) + j / 4 * (C * 128 / 16) + j % 4 * 2,
                         slice_desc(s.h + (slice + n / 2) * K * 16, 16 * j, K), j == 0);
    wg_commit();
}

/* dZ = T' dv_new, then E = left S_0, between(), E += L X: of rows 16 I .., NT n-tiles of columns
 * from `slice` on. WG: left S_0 by warpgroups. */
template <int K, int NT, bool WG, class F>
__device__ __forceinline__ void solve_back(float dZ[NT][4], float E[NT][4], const Solved &s, int I,
                                           int slice, int lane, F between) {
    Walk<> t = walk_across(s.T, 0, lane), g = walk_down(s.left, 16 * I, lane),
           l = walk_down(s.L, 16 * I, lane);
    uint32_t dv_at = slice_down(s.dv_new + slice * C * 16, 0, lane);
    uint32_t h_at = slice_down(s.h + slice * K * 16, 0, lane);
    uint32_t x_at = slice_down(s.X + slice * C * 16, 0, lane);
    uint32_t a[4], b[4];
    const bool wg = WG && NT % 4 == 0 && has_warpgroups();
    if (wg) wg_left<K, NT>(E, s, slice);
    for (int M = I; M < 4; M++) { /* dZ_i = sum over m >= i of T[m][i] dv_new_m */
        ldsm4t(a, t.of_64(I, M));
#pragma unroll
        for (int n = 0; n < NT / 2; n++) {
            ldsm4t(b, dv_at + n * C * 32 + M * 512);
            two(dZ[2 * n], dZ[2 * n + 1], a, b);
        }
    }
    if (wg) wg_wait<0>();
    for (int n = 0; n < NT && wg; n += 4)
        wg_done(E + n);
#pragma unroll
    for (int j = 0; j < K / 16 && !wg; j++) {
        ldsm4(a, g.at(j));
#pragma unroll
        for (int n = 0; n < NT / 2; n++) {
            ldsm4t(b, h_at + n * K * 32 + j * 512);
            two(E[2 * n], E[2 * n + 1], a, b);
        }
    }
    between();
    for (int J = 0; J <= I; J++) {
        ldsm4(a, l.of_64(J));
#pragma unroll
        for (int n = 0; n < NT / 2; n++) {
            ldsm4t(b, x_at + n * C * 32 + J * 512);
            two(E[2 * n], E[2 * n + 1], a, b);
        }
    }
}

/* Does a row of v, dv, dbeta belong to the tile. */
__device__ __forceinline__ bool row_here(const Dims &d, const Place &p, int s) {
    return s < p.rows || (FAULT(DV_TAIL) && s >> p.lr == p.c.len && p.c.t0 + p.c.len < d.L);
}

/* A lane's rows of v, NT n-tiles of columns from its warp's first on; asked for before the products
 * that it waits for anyway. */
template <int V, int NT> struct Values {
    RawPair x[2][NT];
    __device__ __forceinline__ void load(const Dims &d, const dpg_tensors &t, const Place &p,
                                         const Lane &l) {
        TileRows rows(t.v, p.at_hv << p.lr, d.HV, p.lr, V, l.cq * NT * 8 + 2 * l.tc, d.in_bf16);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const char *from = rows[row_here(d, p, l.row(r)) ? l.row(r) : 0];
#pragma unroll
            for (int n = 0; n < NT; n++)
                x[r][n].load(from, n * 8, d.in_bf16);
        }
    }
};

/* dE = B dZ to shared memory (SLICES, in place of dv_new), and to dv where it is fp32. Terms of
 * dbeta, sum over the columns of dZ o (v - E), to db [cq][C]. */
template <int V, int NT>
__device__ __forceinline__ void
finish_dE(const Dims &d, const Values<V, NT> &v, const dpg_grads &g, const Place &p, const Lane &l,
          float dZ[NT][4], const float E[NT][4], const float *beta, bf16 *dE, float *db) {
    int v0 = l.cq * NT * 8;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int s = l.row(r);
        float sum = 0.f, b = beta[s];
#pragma unroll
        for (int n = 0; n < NT; n++) {
            float2 x = v.x[r][n].get(d.in_bf16);
            sum = fmaf(dZ[n][2 * r], x.x - E[n][2 * r], sum);
            sum = fmaf(dZ[n][2 * r + 1], x.y - E[n][2 * r + 1], sum);
            dZ[n][2 * r] *= b;
            dZ[n][2 * r + 1] *= b;
        }
        sum = row_sum(sum);
        if (l.tc == 0) db[l.cq * C + s] = sum;
        if (d.d_bf16 || !row_here(d, p, s)) continue;
        int64_t at = row_at(p.c.t0, d.HV, p.hv, s, p.lr) * V + v0 + 2 * l.tc;
#pragma unroll
        for (int n = 0; n < NT; n++)
            *(float2 *)((float *)g.dv + at + n * 8) = make_float2(dZ[n][2 * r], dZ[n][2 * r + 1]);
    }
#pragma unroll
    for (int n = 0; n < NT / 2; n++)
        store_16x16(slice_across(dE + (v0 / 16 + n) * C * 16, 16 * l.I, l.lane), dZ[2 * n],
                    dZ[2 * n + 1]);
    drain_fence();
}

/* Rows of W bf16 of a tile in shared memory to those rows of x for which here(r), by all 4 K
 * threads. Piece p of row r lies at from(r, p). All pieces are read before the first is written, so
 * that no read waits for a store. */
template <int K, int W, class F, class H>
__device__ __forceinline__ void send_rows(void *x, int64_t first, int heads, int lr,
                                          unsigned thread, F from, H here) {
    const int PIECES = W / 8, STEP = GRAD_THREADS(K) / PIECES, N = C / STEP;
    int row = thread / PIECES, p = thread % PIECES;
    uint4 y[N];
#pragma unroll
    for (int i = 0; i < N; i++)
        y[i] = *(const uint4 *)from(row + i * STEP, p);
    TileRows to(x, first, heads, lr, W, p * 8, true);
#pragma unroll
    for (int i = 0; i < N; i++)
        if (here(row + i * STEP)) *(uint4 *)to[row + i * STEP] = y[i];
}

/* dbeta from N terms, by the warps of I = 0; beta: raw. */
template <int K, int N, class F>
__device__ __forceinline__ void store_dbeta(const Dims &d, const RawWord *beta, const dpg_grads &g,
                                            const Place &p, const Lane &l, F term) {
    const int ROWS = 2048 / K; /* of a warp */
    int s = l.cq * ROWS + l.lane;
    if (l.I || l.lane >= ROWS || s >= p.rows) return;
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < N; i++)
        sum += term(i, s);
    stx(g.dbeta, row_at(p.c.t0, d.HV, p.hv, s, p.lr), d.dg_bf16,
        sum * beta_slope(d, beta[s].get(d.g_bf16)));
}
/* dv in token order from dE. */
template <int K, int V>
__device__ __forceinline__ void store_dv(const Dims &d, const dpg_grads &g, const Place &p,
                                         const bf16 *dE, const Lane &l) {
    if (!d.d_bf16) return;
    send_rows<K, V>(
        g.dv, p.at_hv << p.lr, d.HV, p.lr, l.thread(),
        [&](int r, int x) { return dE + piece_at(C, x / 2, r, x % 2); },
        [&](int r) { return row_here(d, p, r); });
}

/* A warp's block of the 20 of dP = scale do X' (0 .. 9) and dL = -dE X' (10 .. 19) one, by a
 * warp. */
struct Block {
    int is_L, I, J;
    __device__ __forceinline__ Block(int is_L, int I, int J) : is_L(is_L), I(I), J(J) {}
    __device__ __forceinline__ explicit Block(int x) {
        int b = x % 10;
        is_L = x >= 10;
        I = b < 1 ? 0 : b < 3 ? 1 : b < 6 ? 2 : 3;
        J = b - I * (I + 1) / 2;
    }
};
template <int V>
__device__ __forceinline__ void pair_block(float acc[2][4], const bf16 *dos, const bf16 *dE,
                                           const bf16 *X, const Block &x, float scale, int lane) {
    uint32_t left = slice_down(x.is_L ? dE : dos, 16 * x.I, lane);
    uint32_t right = slice_across(X, 16 * x.J, lane), a[4], b[4];
    float by = x.is_L ? -1.f : scale, odd[2][4] = {}; /* two chains of half the length */
#pragma unroll
    for (int v = 0; v < V / 16; v++) {
        ldsm4(a, left + v * C * 32);
        ldsm4(b, right + v * C * 32);
        if (v % 2)
            two(odd[0], odd[1], a, b);
        else
            two(acc[0], acc[1], a, b);
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        acc[i / 4][i % 4] = (acc[i / 4][i % 4] + odd[i / 4][i % 4]) * by;
}

/* The same by warpgroups, products alone: warpgroup cq has 64 rows of dP or dL and 32 columns, with
 * K = 64 twice as many. */
template <int K> struct PairPart {
    static const int N = 128 / K; /* of 32 columns */
    int is_L, J;                  /* the first block of columns */
    __device__ __forceinline__ explicit PairPart(int cq)
        : is_L(cq * N / 2), J(N == 2 ? 0 : cq % 2 * 2) {}
    /* dE: C V numbers behind dos */
    template <int V>
    __device__ __forceinline__ void products(float acc[N][4][4], const bf16 *dos,
                                             const bf16 *X) const {
        uint64_t left = slice_desc(dos + is_L * C * V, 0, C), right = slice_desc(X, 16 * J, C);
#pragma unroll
        for (int v = 0; v < V / 16; v++)
#pragma unroll
            for (int n = 0; n < N; n++)
                wg_mul_32<0>(acc[n], desc_at(left, v * C * 2), desc_at(right, v * C * 2 + n * 64),
                             v == 0);
    }
    /* f(block, its sums) of the warp's blocks. */
    template <class F>
    __device__ __forceinline__ void each(float acc[N][4][4], float scale, int I, F f) const {
        float by = is_L ? -1.f : scale;
#pragma unroll
        for (int n = 0; n < 2 * N; n++) {
            float(*x)[4] = acc[n / 2] + n % 2 * 2;
            if (J + n > I) continue;
#pragma unroll
            for (int i = 0; i < 8; i++)
                x[i / 4][i % 4] *= by;
            f(Block(is_L, I, J + n), x);
        }
    }
};

/* Columns of row s that its pairs of dP and dL keep: those of earlier tokens. A token's own keys
 * are kept apart, in fp32 (own_pair). */
__device__ __forceinline__ int pairs_end(int s, int lr) {
    int first = s >> lr << lr;
    return FAULT(PAIR_KEYS)    ? s
           : FAULT(PAIR_OWN)   ? s + 1
           : FAULT(PAIR_SHORT) ? first - 1
           : FAULT(PAIR_ALL)   ? C
                               : first;
}
/* dP of a token's first row and its own keys, to the keys' rows. */
__device__ __forceinline__ void own_pairs(float *own, int lr, const Block &x, const float acc[2][4],
                                          const Lane &l) {
    if (x.is_L || x.I != x.J) return;
#pragma unroll
    for (int y = 0; y < 8; y++) {
        int s = 16 * x.I + l.gr + y % 4 / 2 * 8, i = 16 * x.J + y / 4 * 8 + 2 * l.tc + y % 2;
        if (s == s >> lr << lr && i >> lr == s >> lr)
            own[i] = FAULT(OWN_KEY) && i > s ? 0.f : acc[y / 4][y % 4];
    }
}

/* exp2(total) o rowsum(S_0 o dS_c) of the 16 channels of `block`, none if it is < 0, by a warp. It
 * is the diagonal of a product, whose terms are exact. */
template <int K, int V>
__device__ __forceinline__ void state_sums(float *z, const bf16 *h, const bf16 *dh,
                                           const float *total, int block, int lane) {
    if (block < 0) return;
    uint32_t h_at = slice_down(h, 16 * block, lane), dh_at = slice_across(dh, 16 * block, lane);
    float acc[2][2][4] = {}; /* two chains of half the length */
#pragma unroll
    for (int v = 0; v < V / 16; v++) {
        uint32_t a[4], b[4];
        ldsm4(a, h_at + v * K * 32);
        ldsm4(b, dh_at + v * K * 32);
        two(acc[v % 2][0], acc[v % 2][1], a, b);
    }
    int gr = lane / 4;
    if (lane % 4 != gr / 2) return;
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const float *x = acc[0][n] + 2 * n, *y = acc[1][n] + 2 * n;
        int ch = 16 * block + 8 * n + gr;
        z[ch] = ex2(total[ch]) * (gr % 2 ? x[1] + y[1] : x[0] + y[0]);
    }
}
/* Sum of S_0 o dS_c over 8 columns of a channel. */
__device__ __forceinline__ float piece_sum(const bf16 *h, const bf16 *dh) {
    uint4 y = *(const uint4 *)h, w = *(const uint4 *)dh;
    const uint32_t *ys = (const uint32_t *)&y, *ws = (const uint32_t *)&w;
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float2 a = unpack2(ys[j]), b = unpack2(ws[j]);
        sum = fmaf(a.x, b.x, fmaf(a.y, b.y, sum));
    }
    return sum;
}

/* Products over V of rows 16 I .. with channels 32 cq ..: dq += do S_0', dr += dE S_0', dw += X
 * dS_c'. */
template <int K, int V>
__device__ __forceinline__ void state_products(float dq[4][4], float dr[4][4], float dw[4][4],
                                               const bf16 *dos, const bf16 *dE, const bf16 *X,
                                               const bf16 *h, const bf16 *dh, const Lane &l) {
    uint32_t o_at = slice_down(dos, 16 * l.I, l.lane), e_at = slice_down(dE, 16 * l.I, l.lane);
    uint32_t x_at = slice_down(X, 16 * l.I, l.lane);
    uint32_t h_at = slice_across(h, 32 * l.cq, l.lane), dh_at = slice_across(dh, 32 * l.cq, l.lane);
#pragma unroll 2
    for (int v = 0; v < V / 16; v++) {
        uint32_t fo[4], fe[4], fx[4], b[4];
        ldsm4(fo, o_at + v * C * 32);
        ldsm4(fe, e_at + v * C * 32);
        ldsm4(fx, x_at + v * C * 32);
#pragma unroll
        for (int n = 0; n < 2; n++) {
            ldsm4(b, h_at + v * K * 32 + n * 512);
            two(dq[2 * n], dq[2 * n + 1], fo, b);
            two(dr[2 * n], dr[2 * n + 1], fe, b);
            ldsm4(b, dh_at + v * K * 32 + n * 512);
            two(dw[2 * n], dw[2 * n + 1], fx, b);
        }
    }
}

/* The same by warpgroups, from nothing. */
template <int K, int V>
__device__ __forceinline__ void wg_state_products(float dq[4][4], float dr[4][4], float dw[4][4],
                                                  const bf16 *dos, const bf16 *dE, const bf16 *X,
                                                  const bf16 *h, const bf16 *dh, int cq) {
    uint64_t od = slice_desc(dos, 0, C), ed = slice_desc(dE, 0, C), xd = slice_desc(X, 0, C);
    uint64_t hd = slice_desc(h, 32 * cq, K), dhd = slice_desc(dh, 32 * cq, K);
#pragma unroll
    for (int v = 0; v < V / 16; v++) {
        wg_mul_32<0>(dq, desc_at(od, v * C * 2), desc_at(hd, v * K * 2), v == 0);
        wg_mul_32<0>(dr, desc_at(ed, v * C * 2), desc_at(hd, v * K * 2), v == 0);
        wg_mul_32<0>(dw, desc_at(xd, v * C * 2), desc_at(dhd, v * K * 2), v == 0);
    }
}
/* Waits for them. */
__device__ __forceinline__ void wg_state_wait(float dq[4][4], float dr[4][4], float dw[4][4]) {
    wg_wait<0>();
    wg_done(dq);
    wg_done(dr);
    wg_done(dw);
}
/* Both, from sums that are zeros, and of the pairs f(block, its sums). The products with states go
 * on while f works: behind it wg_state_wait. */
template <int K, int V, class F>
__device__ __forceinline__ void
wg_states(float dq[4][4], float dr[4][4], float dw[4][4], const bf16 *dos, const bf16 *dE,
          const bf16 *X, const bf16 *h, const bf16 *dh, float scale, const Lane &l, F f) {
    PairPart<K> part(l.cq);
    float acc[PairPart<K>::N][4][4] = {};
    wg_fence();
    part.template products<V>(acc, dos, X);
    wg_commit();
    wg_state_products<K, V>(dq, dr, dw, dos, dE, X, h, dh, l.cq);
    wg_commit();
    wg_wait<1>();
#pragma unroll
    for (int n = 0; n < PairPart<K>::N; n++)
        wg_done(acc[n]);
    part.each(acc, scale, l.I, f);
}

/* ---- dq, dk, dg to memory ------------------------------------------------------------- */

/* A lane's words of rows of K fp32; row(r): where row r goes, or NULL. */
template <class F>
__device__ __forceinline__ void store_words(const float x[4][4], const Lane &l, F row) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float *to = row(l.row(r));
        if (!to) continue;
#pragma unroll
        for (int n = 0; n < 4; n++)
            *(float2 *)(to + 32 * l.cq + 8 * n + 2 * l.tc) =
                make_float2(x[n][2 * r], x[n][2 * r + 1]);
    }
}
/* The warp's 16 x 32 to a tile in shared memory (ROWS), rounded. */
__device__ __forceinline__ void stage(bf16 *tile, const float x[4][4], const Lane &l) {
    Walk<> to = walk_across(tile, 16 * l.I, l.lane);
    store_16x16(to.at(2 * l.cq), x[0], x[1]);
    store_16x16(to.at(2 * l.cq + 1), x[2], x[3]);
}

/* dq and dk: by value head to what sums groups and keys behind the tiles, or whole to the caller.
 * where(): the tile's place. One barrier; staged(): behind the last use of dq and dk, before it. */
template <int K, class W, class F>
__device__ __forceinline__ void
store_q_and_k(const Dims &d, const dpg_grads &g, const GradArgs &a, W where, const float dq[4][4],
              const float dk[4][4], bf16 *stage_q, bf16 *stage_k, const Lane &l, F staged) {
    auto own_row = [&](void *x) {
        return [&, x](int r) {
            Place p = where();
            return r < p.rows ? (float *)x + row_at(p.c.t0 + r, d.H, p.h, 0, 0) * K : NULL;
        };
    };
    auto head_row = [&](float *x) {
        return [&, x](int r) { return x + (where().tile * C + r) * K; };
    };
    if (!a.whole) {
        store_words(dq, l, head_row(a.dq));
        store_words(dk, l, head_row(a.dk));
    } else if (!d.d_bf16) {
        store_words(dq, l, own_row(g.dq));
        store_words(dk, l, own_row(g.dk));
    } else {
        stage(stage_q, dq, l);
        stage(stage_k, dk, l);
    }
    staged();
    __syncthreads();
    if (!a.whole || !d.d_bf16) return;
    Place p = where();
    auto send = [&](const bf16 *tile, void *to) {
        send_rows<K, K>(
            to, p.at_h, d.H, 0, l.thread(), [&](int r, int x) { return tile + rows_at(r, x); },
            [&](int r) { return r < p.rows; });
    };
    send(stage_q, g.dq);
    send(stage_k, g.dk);
}
#endif
