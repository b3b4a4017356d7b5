/* gpu/fast_bwd.cu - the backward on tensor cores (math.md f, c, g.1): K and V in {64, 128}, base bf16. Order:
 *
 *   k_chunks (fast.cu)  w u kg qg Aqk Akk L eC gcum of every tile
 *   k_pass<0>           forward states: h (before a chunk), v_new
 *   k_dav               dvl = Aqk' do, and do laid out by columns
 *   k_pass<1>           dX = dvl + kg dS, dS <- eC dS + scale qg' do - w' dX, last chunk to first: dh (after a chunk), dX
 *   k_wy                dZ = T' dX, dE = B dZ = dv, E, dbeta, dL = -dE X', dP = scale do X'
 *   k_intra             dq dk dg of 64 channels of a tile, dg through the gate
 *   k_norm, k_sums      groups summed, L2 norm; dA_log and ddt_bias over the rank's chunks
 *
 * Passes keep S' = [16 v][K k] of a warp (or a quarter of its k of each of 4 warps) in registers, as the scans of fast.cu. Tensors that meet a product along V are
 * laid out by columns: SLICES(rows) = [V/16][rows][16], 16-byte pieces at p ^ (row >> 2 & 1): conflict-free for ldmatrix, transposed or not, and
 * contiguous for whoever owns 16 columns.
 *
 * R keys a token: the 64 rows of a tile are those of fast.cu, (token, key) of 64 / R tokens. do stands in the first row of a token and zeros in the others, so
 * that dq, dP and dgam of those rows are zero or belong to a key; masks that ask which of two rows is earlier ask for their tokens. Of a token's own keys
 * dP keeps one entry a row, apart in fp32 (pdiag), as for R = 1 its diagonal; dq of a token is the sum over its rows.
 *
 * One gate a head (GDN): its channels have the same decay, dg is the sum over them, which k_intra leaves per 64 of them and k_gate_one ends. Kernels of ANY take both,
 * and R; the others R = 1 and a gate a channel.
 *
 * Every operand of a product is rounded to bf16 once (what harness/budget.c counts: do, h, dh, X, dX, dvl, Kgam, L, dE, dP, dL, and q or k with their decay),
 * everything is summed in fp32. Exponents are anchored as in fast.cu, at the first row of a block, terms too far below it pairwise. No atomics. */
#include "mma.cuh"
#include "fault.cuh"

#define C DP_CHUNK
#define LOG2E 1.4426950408889634f

namespace {

/* ---- addresses ------------------------------------------------------------------------------------------------------------------------- */

/* Element offset of 16-byte piece p of a row, 64-column tiles: pieces at p ^ (row & 7); and of SLICES(rows), slice sl, p in {0, 1}. */
template <int W> __device__ __forceinline__ int rows_at(int row, int p) { return row * W + (p ^ (row & 7)) * 8; }
__device__ __forceinline__ int piece_at(int rows, int sl, int row, int p) { return ((sl * rows + row) * 2 + (p ^ (row >> 2 & 1))) * 8; }
/* The two ways a warp's lanes name the rows of a 16 x 16 block for ldmatrix. DOWN: A as it stands, or B = [k][n] with .trans. ACROSS: B = [n][k] as it
 * stands, or A' with .trans. */
__device__ __forceinline__ int down_row(int lane) { return lane % 16; }
__device__ __forceinline__ int down_p(int lane) { return lane / 16; }
__device__ __forceinline__ int across_row(int lane) { return lane % 8 + lane / 16 * 8; }
__device__ __forceinline__ int across_p(int lane) { return lane / 8 % 2; }

__device__ __forceinline__ void two(float c0[4], float c1[4], const uint32_t a[4], const uint32_t b[4])
{
    mma(c0, a, b[0], b[1]);
    mma(c1, a, b[2], b[3]);
}

/* Row (token t0 + r >> lr, head, key) of a tensor of `heads` heads of 1 << lr keys. */
__device__ __forceinline__ int64_t row_at(int64_t t0, int heads, int head, int r, int lr) { return ((t0 + (r >> lr)) * heads + head << lr) + (r & ((1 << lr) - 1)); }

struct Tiles {                                           /* of the backward's plan */
    const bf16 *w, *u, *kg, *qg, *Aqk, *Akk, *L;
    const float *eC, *gcum, *s0, *sin, *dfinal, *dsout;
    bf16 *h, *X, *dvl, *dos, *dh, *dX, *dE, *dP, *dL;
    float *pdiag, *norm, *dq, *dk, *part, *ds0, *dhm, *dg_sum;       /* dg_sum: one gate a head, [tile][K/64][C] */
    int row, seq0, nseg, parts;                          /* words in a row of dhm; first local sub-sequence; segments that the last one was cut in, 1: whole to the backward */
};

/* ---- k_dav ----------------------------------------------------------------------------------------------------------------------------- */

template <int V> struct DavSmem { bf16 P[C * C], o[C * V]; };

/* A tile of C rows of W bf16 or fp32 to bf16 rows in shared memory, pieces at p ^ (row & 7): tokens in the first of their 1 << lr rows, zeros in the others and past
 * `rows`. */
template <int W, int THREADS> __device__ __forceinline__ void load_rows(bf16 *dst, const void *src, int64_t at, int64_t step, int lr, int rows, int is_bf16)
{
    for (int x = threadIdx.x; x < C * W / 8; x += THREADS) {
        int r = x / (W / 8), p = x % (W / 8);
        bool here = r < rows && ((r >> lr << lr) == r || FAULT(DO_KEYS));
        int64_t from = at + (here ? r >> lr : 0) * step + p * 8;
        if (is_bf16)
            cp16(dst + rows_at<W>(r, p), (const bf16 *)src + from, here);
        else {
            const float *f = (const float *)src + from;
            uint4 y = make_uint4(pack2(f[0], f[1]), pack2(f[2], f[3]), pack2(f[4], f[5]), pack2(f[6], f[7]));
            *(uint4 *)(dst + rows_at<W>(r, p)) = here ? y : make_uint4(0, 0, 0, 0);
        }
    }
}

/* 8 warps: rows 16 I .. of dvl, half of the columns. */
template <int V, bool ANY> __global__ void __launch_bounds__(256) k_dav(Dims d, dpg_grads g, Tiles a)
{
    extern __shared__ __align__(128) char raw[];
    DavSmem<V> &sm = *(DavSmem<V> *)raw;
    int64_t tile = blockIdx.x;
    int hv = tile % d.HV, warp = threadIdx.x / 32, lane = threadIdx.x % 32, I = warp % 4, half = warp / 4, lr = ANY ? d.lr : 0;
    Chunk c = d.chunk[tile / d.HV];
    for (int x = threadIdx.x; x < C * C / 8; x += 256)
        cp16(sm.P + x * 8, a.Aqk + tile * C * C + x * 8, true);
    load_rows<V, 256>(sm.o, g.dout, (c.t0 * d.HV + hv) * V, (int64_t)d.HV * V, lr, c.len << lr, d.d_bf16);
    cp_commit();
    cp_wait<0>();
    __syncthreads();
    float acc[V / 16][4] = {};
    for (int J = I; J < 4; J++) {                        /* dvl_i = sum over s >= i of Aqk[s][i] do_s */
        uint32_t A[4], B[4];
        ldsm4t(A, saddr(sm.P + rows_at<C>(16 * J + across_row(lane), 2 * I + across_p(lane))));
#pragma unroll
        for (int n = 0; n < V / 32; n++) {
            ldsm4t(B, saddr(sm.o + rows_at<V>(16 * J + down_row(lane), half * (V / 16) + 2 * n + down_p(lane))));
            two(acc[2 * n], acc[2 * n + 1], A, B);
        }
    }
    bf16 *dvl = a.dvl + tile * C * V;
#pragma unroll
    for (int n = 0; n < V / 16; n++)
#pragma unroll
        for (int r = 0; r < 2; r++)
            *(uint32_t *)(dvl + piece_at(C, half * (V / 32) + n / 2, 16 * I + lane / 4 + 8 * r, n % 2) + lane % 4 * 2) = pack2(acc[n][2 * r], acc[n][2 * r + 1]);
    for (int x = threadIdx.x; x < C * V / 8; x += 256) { /* consecutive threads write one slice */
        int p = x % 2, r = x / 2 % C, sl = x / 2 / C;
        *(uint4 *)(a.dos + tile * C * V + piece_at(C, sl, r, p)) = *(uint4 *)(sm.o + rows_at<V>(r, 2 * sl + p));
    }
}

/* ---- k_pass ---------------------------------------------------------------------------------------------------------------------------- */

#define ST 3
template <int K, int NW, int BWD> struct PassStage {
    bf16 a[C * K], b[C * K];                             /* forward w, kg; backward kg, w */
    bf16 q[BWD ? C * K : 8];
    bf16 u[NW * C * 16], o[BWD ? NW * C * 16 : 8];       /* u or dvl; do */
    float eC[K];
};
template <int K, int NW, int BWD> struct PassPipe {
    PassStage<K, NW, BWD> st[ST];
    uint64_t full[ST], empty[ST];
};

template <class P> __device__ void pass_init(P &pipe, int readers)
{
    if (threadIdx.x == 0)
        for (int i = 0; i < ST; i++) {
            bar_init(&pipe.full[i], 1);
            bar_init(&pipe.empty[i], WARPS(readers));
        }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncthreads();
}

/* Chunks of a pass: a segment, or the whole local sub-sequence, whose segments lie behind each other in the table. */
struct Run { int c0, n, gseq, starts, ends, part; };
__device__ __forceinline__ Run run_of(const Dims &d, int seq, int nseg)
{
    Seq a = d.seq[seq], z = seq == d.nseq - 1 ? d.seq[seq + nseg - 1] : a;
    return Run{a.c0, z.c1 - a.c0, a.gseq, a.starts, z.ends, 0};
}
/* Segments side by side: in the forward if it left their states, in the backward if it left their M. */
template <int BWD> __device__ __forceinline__ Run run_at(const Dims &d, const Tiles &a, int seq)
{
    if (BWD && a.parts == 1)
        return run_of(d, seq, a.nseg);
    Seq s = d.seq[seq];
    return Run{s.c0, s.c1 - s.c0, s.gseq, s.starts, s.ends, s.part};
}
template <int BWD> __device__ __forceinline__ int chunk_at(const Run &r, int i) { return BWD ? r.c0 + r.n - 1 - i : r.c0 + i; }

template <int K, int V, int NW, int BWD> __device__ void produce(const Dims &d, const Tiles &a, PassPipe<K, NW, BWD> &pipe, Run run, int hv, int slice)
{
    const int T2 = C * K * 2, U = NW * C * 32, bytes = 2 * T2 + U + K * 4 + (BWD ? T2 + U : 0);
    for (int i = 0; i < run.n; i++) {
        int64_t tile = (int64_t)chunk_at<BWD>(run, i) * d.HV + hv;
        PassStage<K, NW, BWD> &s = pipe.st[i % ST];
        uint64_t *full = &pipe.full[i % ST];
        if (i >= ST)
            bar_wait(&pipe.empty[i % ST], (i / ST - 1) & 1);
        bar_expect(full, bytes);
        bulk(s.a, (BWD ? a.kg : a.w) + tile * C * K, T2, full);
        bulk(s.u, (BWD ? a.dvl : a.u) + tile * C * V + slice * NW * C * 16, U, full);
        if (BWD) {
            bulk(s.q, a.qg + tile * C * K, T2, full);
            bulk(s.o, a.dos + tile * C * V + slice * NW * C * 16, U, full);
        }
        bulk(s.b, (BWD ? a.w : a.kg) + tile * C * K, T2, full);
        bulk(s.eC, a.eC + tile * K, K * 4, full);
        bar_loaded(full);
    }
}

/* State that a pass starts from, [K][V] fp32, or NULL: zeros. */
template <int BWD> __device__ __forceinline__ const float *initial(const Dims &d, const Tiles &a, const Run &run, int hv)
{
    int64_t kv = (int64_t)d.K * d.V;
    if (BWD)
        return run.ends ? (a.dfinal ? a.dfinal + ((int64_t)run.gseq * d.HV + hv) * kv : NULL) : a.dsout ? a.dsout + ((int64_t)(FAULT(PARTS_TURNED) ? run.part : a.parts - 1 - run.part) * d.HV + hv) * kv : NULL;
    return run.starts ? (a.s0 ? a.s0 + ((int64_t)run.gseq * d.HV + hv) * kv : NULL) : a.sin + ((int64_t)run.part * d.HV + hv) * kv;
}

/* Element (k, v) of a state from its transposed fragments, as in fast.cu. */
template <int TILES, class F> __device__ __forceinline__ void each(float (*S)[4], int lane, F f)
{
#pragma unroll
    for (int j = 0; j < TILES; j++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            f(j * 8 + lane % 4 * 2 + e % 2, lane / 4 + e / 2 * 8, S[j][e]);
}

template <int BWD> __device__ __forceinline__ void last_state(const Dims &d, const Tiles &a, const Run &run, int hv, int k, int v, float s)
{
    if (!BWD)
        return;
    if (a.ds0 && run.starts)
        a.ds0[(((int64_t)run.gseq * d.HV + hv) * d.K + k) * d.V + v] = s;
    if (a.dhm)
        a.dhm[(((int64_t)run.part * d.HV + hv) * d.K + k) * a.row + v] = s;
}

/* X' = u' - S' w' or dvl' + S' kg' from x = S' a', 16 tokens (n-tiles x[0], x[1]) from token s0 of a slice. */
template <int BWD> __device__ __forceinline__ void add_u(float x[2][4], const bf16 *u, int s0, int lane)
{
    uint32_t r[4];
    ldsm4t(r, saddr(u + piece_at(C, 0, s0 + across_row(lane), across_p(lane))));
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float2 y = unpack2(r[i]);
        float *xx = x[i / 2] + i % 2 * 2;
        xx[0] = BWD ? y.x + xx[0] : y.x - xx[0];
        xx[1] = BWD ? y.y + xx[1] : y.y - xx[1];
    }
}

__device__ __forceinline__ void fragment(uint32_t r[4], const float a[4], const float b[4])
{
    r[0] = pack2(a[0], a[1]), r[1] = pack2(a[2], a[3]), r[2] = pack2(b[0], b[1]), r[3] = pack2(b[2], b[3]);
}

/* Where stmatrix .trans puts a 16 x 16 block of transposed fragments (rows k or tokens, 16 columns v). */
__device__ __forceinline__ uint32_t slice_block(const bf16 *to, int row0, int lane) { return saddr(to + piece_at(C, 0, row0 + across_row(lane), across_p(lane))); }

#define NEGATE 0x80008000u

/* S' <- eC o S' + X' kg, or eC o S' + (scale do' qg - X' w), n-tiles of 8 channels from k0 on; xa and oa: A fragments of X' and do'. */
template <int K, int NJ, int BWD, class STAGE> __device__ __forceinline__ void update(float S[NJ][4], uint32_t xa[4][4], const STAGE &st, int k0, float scale, int lane)
{
    const int STEP = NJ < 4 ? NJ : 4;
#pragma unroll
    for (int j = 0; j < NJ; j += STEP) {
        float acc[STEP][4] = {};
        if (BWD) {
#pragma unroll
            for (int p = 0; p < 4; p++) {
                uint32_t oa[4];
                ldsm4t(oa, saddr(st.o + piece_at(C, 0, 16 * p + across_row(lane), across_p(lane))));
#pragma unroll
                for (int n = 0; n < STEP; n += 2) {
                    uint32_t b[4];
                    ldsm4t(b, saddr(st.q + rows_at<K>(16 * p + down_row(lane), (k0 / 8) + j + n + down_p(lane))));
                    two(acc[n], acc[n + 1], oa, b);
                }
            }
#pragma unroll
            for (int n = 0; n < STEP; n++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    acc[n][e] *= scale;
        }
#pragma unroll
        for (int p = 0; p < 4; p++)
#pragma unroll
            for (int n = 0; n < STEP; n += 2) {
                uint32_t b[4];
                ldsm4t(b, saddr(st.b + rows_at<K>(16 * p + down_row(lane), (k0 / 8) + j + n + down_p(lane))));
                two(acc[n], acc[n + 1], xa[p], b);
            }
#pragma unroll
        for (int n = 0; n < STEP; n++) {
            float2 e = *(const float2 *)(st.eC + k0 + (j + n) * 8 + lane % 4 * 2);
#pragma unroll
            for (int i = 0; i < 4; i++)
                S[j + n][i] = fmaf(i % 2 ? e.y : e.x, S[j + n][i], acc[n][i]);
        }
    }
}

/* A view of one warp's slice of a stage. */
template <int K> struct View { const bf16 *a, *b, *q, *u, *o; const float *eC; };

/* Many heads: one warp per 16 columns, NW of them in a block share the tiles; one more warp loads. */
template <int K, int NW, int BWD> struct PassSmem { PassPipe<K, NW, BWD> pipe; bf16 S[NW][K * 16], X[NW][C * 16]; };
template <int K, int V, int NW, int BWD> __global__ void __launch_bounds__(NW * 32 + 32, 1) k_pass(Dims d, Tiles a)
{
    extern __shared__ __align__(128) char raw[];
    PassSmem<K, NW, BWD> &sm = *(PassSmem<K, NW, BWD> *)raw;
    const int SL = V / 16 / NW;
    int slice = blockIdx.x % SL, hv = blockIdx.x / SL % d.HV, seq = a.seq0 + blockIdx.x / SL / d.HV, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Run run = run_at<BWD>(d, a, seq);
    pass_init(sm.pipe, NW);
    if (warp == NW) {
        if (lane == 0)
            produce<K, V, NW, BWD>(d, a, sm.pipe, run, hv, slice);
        return;
    }
    int sl = slice * NW + warp;
    float S[K / 8][4];
    const float *init = initial<BWD>(d, a, run, hv);
    bf16 *hs = sm.S[warp], *xs = sm.X[warp], *h = BWD ? a.dh : a.h, *X = BWD ? a.dX : a.X;
    each<K / 8>(S, lane, [&](int k, int v, float &s) { s = init ? init[k * V + sl * 16 + v] : 0.f; });
    for (int i = 0; i < run.n; i++) {
        int64_t tile = (int64_t)chunk_at<BWD>(run, i) * d.HV + hv;
        PassStage<K, NW, BWD> &st = sm.pipe.st[i % ST];
        View<K> view = {st.a, st.b, st.q, st.u + warp * C * 16, st.o + (BWD ? warp * C * 16 : 0), st.eC};
        float x[8][4] = {};
        uint32_t xa[4][4];
        if (lane == 0)
            bulk_read_all();
        __syncwarp();
        bar_wait(&sm.pipe.full[i % ST], i / ST & 1);
#pragma unroll
        for (int kk = 0; kk < K / 16; kk++) {
            uint32_t sa[4];
            fragment(sa, S[2 * kk], S[2 * kk + 1]);
            if (h)
                stsm4t(slice_block(hs, 16 * kk, lane), sa);
#pragma unroll
            for (int n = 0; n < 4; n++) {
                uint32_t b[4];
                ldsm4(b, saddr(view.a + rows_at<K>(16 * n + across_row(lane), 2 * kk + across_p(lane))));
                two(x[2 * n], x[2 * n + 1], sa, b);
            }
        }
#pragma unroll
        for (int n = 0; n < 4; n++) {
            add_u<BWD>(x + 2 * n, view.u, 16 * n, lane);
            fragment(xa[n], x[2 * n], x[2 * n + 1]);
            if (X)
                stsm4t(slice_block(xs, 16 * n, lane), xa[n]);
            for (int e = 0; BWD && e < 4; e++)
                xa[n][e] ^= NEGATE;
        }
        async_fence();
        __syncwarp();
        if (lane == 0) {
            if (h)
                bulk_out(h + tile * K * V + sl * K * 16, hs, K * 32);
            if (X)
                bulk_out(X + tile * C * V + sl * C * 16, xs, C * 32);
            bulk_commit();
        }
        update<K, K / 8, BWD>(S, xa, view, 0, d.scale, lane);
        __syncwarp();
        bar_arrive_warp(&sm.pipe.empty[i % ST], lane);
    }
    each<K / 8>(S, lane, [&](int k, int v, float &s) { last_state<BWD>(d, a, run, hv, k, sl * 16 + v, s); });
    if (lane == 0)
        bulk_read_all();
}

/* Few heads: a team of 4 warps per 16 columns; warp t makes X of tokens 16 t .. and S of its K / 4 channels. Fragments pass through shared memory. */
template <int K, int BWD> struct TeamSmem {
    PassPipe<K, 1, BWD> pipe;
    uint4 S[2][K / 16][32], X[2][4][32];
    bf16 hs[2][K * 16], xs[2][C * 16];
};
__device__ __forceinline__ void team_sync() { asm volatile("bar.sync 1, 128;" ::: "memory"); }

template <int K, int V, int BWD> __global__ void __launch_bounds__(160, 1) k_team_pass(Dims d, Tiles a)
{
    extern __shared__ __align__(128) char raw[];
    TeamSmem<K, BWD> &sm = *(TeamSmem<K, BWD> *)raw;
    const int NJ = K / 32;
    int sl = blockIdx.x % (V / 16), hv = blockIdx.x / (V / 16) % d.HV, seq = a.seq0 + blockIdx.x / (V / 16) / d.HV, t = threadIdx.x / 32, lane = threadIdx.x % 32;
    Run run = run_at<BWD>(d, a, seq);
    pass_init(sm.pipe, 4);
    if (t == 4) {
        if (lane == 0)
            produce<K, V, 1, BWD>(d, a, sm.pipe, run, hv, sl);
        return;
    }
    int k0 = t * NJ * 8;
    float S[NJ][4];
    const float *init = initial<BWD>(d, a, run, hv);
    bf16 *h = BWD ? a.dh : a.h, *X = BWD ? a.dX : a.X;
    each<NJ>(S, lane, [&](int k, int v, float &s) { s = init ? init[(k0 + k) * V + sl * 16 + v] : 0.f; });
    for (int i = 0; i < run.n; i++) {
        int64_t tile = (int64_t)chunk_at<BWD>(run, i) * d.HV + hv;
        int buf = i % 2;
        PassStage<K, 1, BWD> &st = sm.pipe.st[i % ST];
        View<K> view = {st.a, st.b, st.q, st.u, st.o, st.eC};
        float x[2][2][4] = {};
        uint32_t xa[4][4];
#pragma unroll
        for (int j = 0; j < NJ; j += 2) {
            uint32_t r[4];
            fragment(r, S[j], S[j + 1]);
            sm.S[buf][(t * NJ + j) / 2][lane] = make_uint4(r[0], r[1], r[2], r[3]);
            stsm4t(slice_block(sm.hs[buf], k0 + j * 8, lane), r);
        }
        async_fence();
        bar_wait(&sm.pipe.full[i % ST], i / ST & 1);
        uint32_t b[K / 16][4];
#pragma unroll
        for (int kk = 0; kk < K / 16; kk++)
            ldsm4(b[kk], saddr(view.a + rows_at<K>(16 * t + across_row(lane), 2 * kk + across_p(lane))));
        team_sync();
        if (h && threadIdx.x == 0)
            bulk_out(h + tile * K * V + sl * K * 16, sm.hs[buf], K * 32);
#pragma unroll
        for (int kk = 0; kk < K / 16; kk++) {            /* even and odd k-steps apart: shorter chains */
            uint4 f = sm.S[buf][kk][lane];
            uint32_t sa[4] = {f.x, f.y, f.z, f.w};
            two(x[kk % 2][0], x[kk % 2][1], sa, b[kk]);
        }
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                x[0][n][e] += x[1][n][e];
        add_u<BWD>(x[0], view.u, 16 * t, lane);
        uint32_t r[4];
        fragment(r, x[0][0], x[0][1]);
        stsm4t(slice_block(sm.xs[buf], 16 * t, lane), r);
        for (int e = 0; BWD && e < 4; e++)
            r[e] ^= NEGATE;
        sm.X[buf][t][lane] = make_uint4(r[0], r[1], r[2], r[3]);
        async_fence();
        if (threadIdx.x == 0)
            bulk_read_all();                             /* of the chunk before: its buffers are written again after this barrier */
        team_sync();
        if (threadIdx.x == 0) {
            if (X)
                bulk_out(X + tile * C * V + sl * C * 16, sm.xs[buf], C * 32);
            bulk_commit();
        }
#pragma unroll
        for (int p = 0; p < 4; p++) {
            uint4 f = sm.X[buf][p][lane];
            xa[p][0] = f.x, xa[p][1] = f.y, xa[p][2] = f.z, xa[p][3] = f.w;
        }
        update<K, NJ, BWD>(S, xa, view, k0, d.scale, lane);
        __syncwarp();
        bar_arrive_warp(&sm.pipe.empty[i % ST], lane);
    }
    each<NJ>(S, lane, [&](int k, int v, float &s) { last_state<BWD>(d, a, run, hv, k0 + k, sl * 16 + v, s); });
    if (threadIdx.x == 0)
        bulk_read_all();
}

/* ---- k_wy ------------------------------------------------------------------------------------------------------------------------------ */

template <int K, int V> struct WySmem {
    bf16 T[C * C], L[C * C];                             /* 64-column rows, pieces at p ^ (row & 7) */
    bf16 dX[C * V], X[C * V], o[C * V];                  /* by columns; dE replaces dX */
    bf16 h[K * V], kgam[C * K];
    float beta[C], row[2][C];
};

/* `pieces` 16-byte pieces as they stand. */
template <int THREADS> __device__ __forceinline__ void load_flat(bf16 *dst, const bf16 *src, int pieces)
{
    for (int x = threadIdx.x; x < pieces; x += THREADS)
        cp16(dst + x * 8, src + x * 8, true);
}
/* A plain 64 x 64 tile into swizzled rows. */
template <int THREADS> __device__ __forceinline__ void load_square(bf16 *dst, const bf16 *src)
{
    for (int x = threadIdx.x; x < C * C / 8; x += THREADS)
        cp16(dst + rows_at<C>(x / 8, x % 8), src + x * 8, true);
}

/* Kgam = exp(gam) k / |k| to shared memory, 1/norms of the rows of k and q to memory. */
template <bool BF16, bool ANY, int K, int V> __device__ void stage_kgam(const Dims &d, const dpg_tensors &t, const Tiles &a, WySmem<K, V> &sm, Chunk c, int64_t tile, int h, int lr)
{
    const int P = K / 8;
    for (int x = threadIdx.x; x < C * P; x += 256) {     /* the P lanes of a row are neighbours */
        int r = x / P, p = x % P;
        bool here = r < c.len << lr;
        int64_t from = row_at(c.t0, d.H, h, here ? r : 0, lr) * K + p * 8, token = row_at(c.t0, d.H, h, here ? r >> lr : 0, 0) * K + p * 8;
        float sk, sq;
        uint4 k4 = load8_bf16(t.k, from, BF16, sk), out;
        load8_bf16(t.q, token, BF16, sq);
#pragma unroll
        for (int m = P / 2; m; m /= 2) {
            sk += __shfl_xor_sync(~0u, sk, m);
            sq += __shfl_xor_sync(~0u, sq, m);
        }
        float rk = d.l2norm ? rsqrtf(sk + (float)DP_L2_EPS) : 1.f, rq = d.l2norm ? rsqrtf(sq + (float)DP_L2_EPS) : 1.f;
        if (p == 0)
            a.norm[tile * 2 * C + r] = rk, a.norm[tile * 2 * C + C + r] = rq;
        bool one = ANY && d.Kg == 1;
        const float *g = a.gcum + (one ? tile * C + r : (tile * C + r) * K + p * 8);
        const uint32_t *ks = (const uint32_t *)&k4;
        uint32_t *os = (uint32_t *)&out;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float2 y = unpack2(ks[j]);
            os[j] = here ? pack2(y.x * rk * ex2(g[one ? 0 : 2 * j]), y.y * rk * ex2(g[one ? 0 : 2 * j + 1])) : 0u;
        }
        *(uint4 *)(sm.kgam + rows_at<K>(r, p)) = out;
    }
}

/* BF16: the type of q, k, v; asked inside the kernels it costs 2% of the backward. */
template <int K, int V, bool ANY, bool BF16> __global__ void __launch_bounds__(256, 2) k_wy(Dims d, dpg_tensors t, dpg_grads g, Tiles a)
{
    extern __shared__ __align__(128) char raw[];
    WySmem<K, V> &sm = *(WySmem<K, V> *)raw;
    const int NT = V / 16;                               /* n-tiles of half the columns */
    int64_t tile = blockIdx.x;
    int hv = tile % d.HV, warp = threadIdx.x / 32, lane = threadIdx.x % 32, gr = lane / 4, tc = lane % 4, I = warp % 4, half = warp / 4, lr = ANY ? d.lr : 0;
    Chunk c = d.chunk[tile / d.HV];
    int rows = c.len << lr;
    load_square<256>(sm.T, a.Akk + tile * C * C);
    load_flat<256>(sm.dX, a.dX + tile * C * V, C * V / 8);
    cp_commit();
    load_square<256>(sm.L, a.L + tile * C * C);
    load_flat<256>(sm.X, a.X + tile * C * V, C * V / 8);
    load_flat<256>(sm.h, a.h + tile * K * V, K * V / 8);
    load_flat<256>(sm.o, a.dos + tile * C * V, C * V / 8);
    cp_commit();
    if (threadIdx.x < C)
        sm.beta[threadIdx.x] = threadIdx.x < rows ? beta_value(d, ldx(t.beta, row_at(c.t0, d.HV, hv, threadIdx.x, lr), d.g_bf16)) : 0.f;
    stage_kgam<BF16, ANY>(d, t, a, sm, c, tile, hv / d.G, lr);
    cp_wait<1>();
    __syncthreads();
    float dZ[NT][4] = {}, E[NT][4] = {};
    for (int M = I; M < 4; M++) {                        /* dZ_i = sum over m >= i of T[m][i] dX_m */
        uint32_t A[4], B[4];
        ldsm4t(A, saddr(sm.T + rows_at<C>(16 * M + across_row(lane), 2 * I + across_p(lane))));
#pragma unroll
        for (int n = 0; n < NT / 2; n++) {
            ldsm4t(B, saddr(sm.dX + piece_at(C, half * (NT / 2) + n, 16 * M + down_row(lane), down_p(lane))));
            two(dZ[2 * n], dZ[2 * n + 1], A, B);
        }
    }
    cp_wait<0>();
    __syncthreads();
    for (int kk = 0; kk < K / 16; kk++) {                /* Kgam S_0 */
        uint32_t A[4], B[4];
        ldsm4(A, saddr(sm.kgam + rows_at<K>(16 * I + down_row(lane), 2 * kk + down_p(lane))));
#pragma unroll
        for (int n = 0; n < NT / 2; n++) {
            ldsm4t(B, saddr(sm.h + piece_at(K, half * (NT / 2) + n, 16 * kk + down_row(lane), down_p(lane))));
            two(E[2 * n], E[2 * n + 1], A, B);
        }
    }
    for (int J = 0; J <= I; J++) {                       /* L X */
        uint32_t A[4], B[4];
        ldsm4(A, saddr(sm.L + rows_at<C>(16 * I + down_row(lane), 2 * J + down_p(lane))));
#pragma unroll
        for (int n = 0; n < NT / 2; n++) {
            ldsm4t(B, saddr(sm.X + piece_at(C, half * (NT / 2) + n, 16 * J + down_row(lane), down_p(lane))));
            two(E[2 * n], E[2 * n + 1], A, B);
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int s = 16 * I + gr + 8 * r;
        float sum = 0.f, b = sm.beta[s];
        int64_t at = row_at(c.t0, d.HV, hv, s < rows || FAULT(DV_TAIL) && s >> lr == c.len && c.t0 + c.len < d.L ? s : 0, lr) * V + half * (V / 2) + 2 * tc;
#pragma unroll
        for (int n = 0; n < NT; n++) {
            float2 y = BF16 ? unpack2(*(const uint32_t *)((const bf16 *)t.v + at + n * 8)) : *(const float2 *)((const float *)t.v + at + n * 8);
            sum = fmaf(dZ[n][2 * r], y.x - E[n][2 * r], sum);
            sum = fmaf(dZ[n][2 * r + 1], y.y - E[n][2 * r + 1], sum);
            float x0 = b * dZ[n][2 * r], x1 = b * dZ[n][2 * r + 1];
            *(uint32_t *)(sm.dX + piece_at(C, half * (NT / 2) + n / 2, s, n % 2) + 2 * tc) = pack2(x0, x1);
            if (!d.d_bf16 && (s < rows || (FAULT(DV_TAIL) && s >> lr == c.len && c.t0 + c.len < d.L)))
                *(float2 *)((float *)g.dv + at + n * 8) = make_float2(x0, x1);
        }
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (tc == 0)
            sm.row[half][s] = sum;
    }
    __syncthreads();
    if (threadIdx.x < rows) {
        int64_t at = row_at(c.t0, d.HV, hv, threadIdx.x, lr);
        float db = sm.row[0][threadIdx.x] + sm.row[1][threadIdx.x];
        if (d.beta_form != DP_BETA_PLAIN) {
            float e = expf(-fabsf(ldx(t.beta, at, d.g_bf16)));
            db *= (d.beta_form == DP_BETA_SIGMOID ? 1.f : 2.f) * (e / (1.f + e) / (1.f + e));
        }
        if (d.dg_bf16)
            ((bf16 *)g.dbeta)[at] = __float2bfloat16_rn(db);
        else
            ((float *)g.dbeta)[at] = db;
    }
    for (int x = threadIdx.x; x < C * V / 8; x += 256) { /* dE to memory as it lies; dv is the same numbers in token order */
        *(uint4 *)(a.dE + tile * C * V + x * 8) = *(uint4 *)(sm.dX + x * 8);
        int r = x / (V / 8), p = x % (V / 8);
        if (d.d_bf16 && (r < rows || (FAULT(DV_TAIL) && r >> lr == c.len && c.t0 + c.len < d.L)))
            *(uint4 *)((bf16 *)g.dv + row_at(c.t0, d.HV, hv, r, lr) * V + p * 8) = *(uint4 *)(sm.dX + piece_at(C, p / 2, r, p % 2));
    }
    float acc[4][2][4] = {};                             /* half 0: dE X' -> dL, half 1: do X' -> dP, blocks J <= I */
    const bf16 *left = half ? sm.o : sm.dX;
    for (int vv = 0; vv < V / 16; vv++) {
        uint32_t A[4], B[4];
        ldsm4(A, saddr(left + piece_at(C, vv, 16 * I + down_row(lane), down_p(lane))));
#pragma unroll
        for (int J = 0; J < 4; J++)
            if (J <= I) {
                ldsm4(B, saddr(sm.X + piece_at(C, vv, 16 * J + across_row(lane), across_p(lane))));
                two(acc[J][0], acc[J][1], A, B);
            }
    }
    bf16 *to = (half ? a.dP : a.dL) + tile * C * C;
    float f = half ? d.scale : -1.f;
#pragma unroll
    for (int J = 0; J < 4; J++)
        if (J <= I)
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    int s = 16 * I + gr + 8 * r, i = 16 * J + 8 * n + 2 * tc;
                    float x0 = f * acc[J][n][2 * r], x1 = f * acc[J][n][2 * r + 1];
                    int first = s >> lr << lr;           /* the first row of the token */
                    int end = FAULT(PAIR_KEYS) ? s : FAULT(PAIR_OWN) ? s + 1 : FAULT(PAIR_SHORT) ? first - 1 : FAULT(PAIR_ALL) ? C : first;
                    *(uint32_t *)(to + s * C + i) = pack2(i < end ? x0 : 0.f, i + 1 < end ? x1 : 0.f);
                    if (half && s == first && i >> lr == s >> lr)
                        a.pdiag[tile * C + i] = FAULT(OWN_KEY) && i > s ? 0.f : x0;
                    if (half && s == first && (i + 1) >> lr == s >> lr)
                        a.pdiag[tile * C + i + 1] = FAULT(OWN_KEY) && i + 1 > s ? 0.f : x1;
                }
}

/* ---- k_intra: 64 channels of a tile ------------------------------------------------------------------------------------------------------- */

#define CH 64
#define GS 72                                            /* row stride of gam, words: rows 8 banks apart */
template <int V> struct IntraSmem {
    union {
        struct { bf16 o[C * V], dE[C * V], X[C * V], h[CH * V], dh[CH * V]; } a;         /* by columns */
        struct { bf16 ka[C * CH], qa[C * CH], kb[C * CH], kd[C * CH], k[C * CH], q[C * CH], dP[C * C], dL[C * C]; } b;
    } x;
    float gam[C * GS];
    float F[6][CH];                                      /* F(I, J): from the first row after block J to the first of I */
    float z[CH], total[4][CH], write[4][CH], sum_a[4][CH], sum_b[4][CH];
    float rk[C], rq[C], p[C];
    int wide[4];                                         /* does any channel of block I need the pairwise sums */
};
__device__ __forceinline__ int f_at(int I, int J) { return I * (I - 1) / 2 + J; }

/* The diagonal block's terms of dq, dk read and dk write of row r and a channel whose key is far below the block's first row: safe for any gate. */
template <int V> __device__ __noinline__ float3 diagonal_pairwise(const IntraSmem<V> &sm, int r, int ch)
{
    int first = r / 16 * 16;
    float top = sm.gam[first * GS + ch], g = sm.gam[r * GS + ch];
    float3 z = make_float3(0.f, 0.f, 0.f);
    auto P = [&](const bf16 *m, int s, int i) { return (float)m[rows_at<C>(s, i / 8) + i % 8]; };
    auto row = [&](const bf16 *m, int s) { return (float)m[rows_at<CH>(s, ch / 8) + ch % 8]; };
    for (int i = first; i < r - FAULT(FAR_SHORT); i++) {
        if (top - sm.gam[i * GS + ch] <= NEAR)
            continue;
        float e = ex2(g - sm.gam[i * GS + ch]) * sm.rk[i] * row(sm.x.b.k, i);
        z.x = fmaf(P(sm.x.b.dP, r, i), e, z.x);
        z.y = fmaf(P(sm.x.b.dL, r, i), e, z.y);
    }
    for (int s = r + 1 + FAULT(FAR_SHORT); s < first + 16 && top - g > NEAR; s++) {
        float e = ex2(sm.gam[s * GS + ch] - g);
        z.z = fmaf(P(sm.x.b.dP, s, r), e * sm.rq[s] * row(sm.x.b.q, s), z.z);
        z.z = fmaf(P(sm.x.b.dL, s, r), e * sm.rk[s] * row(sm.x.b.k, s), z.z);
    }
    return z;
}

/* Raw gradient of the gate and its terms of dA_log and ddt_bias (math.md c). */
__device__ __forceinline__ float gate_bwd(const Dims &d, float dg, float graw, float A, float bias, float &sum_a, float &sum_b)
{
    float raw = dg, x = graw + bias;
    if (d.gate == DP_GATE_SOFTPLUS) {
        float e = expf(-fabsf(x));
        raw = -dg * (A * (x < 0 ? e / (1.f + e) : 1.f / (1.f + e)));
        sum_a += dg * -(A * (fmaxf(x, 0.f) + log1pf(e)));
    } else if (d.gate == DP_GATE_LOWER_BOUND) {
        float e = expf(-fabsf(A * x));
        raw = dg * (d.lower_bound * (e / (1.f + e) / (1.f + e)) * A);
        sum_a += raw * x;
    }
    if (d.gate != DP_GATE_LOG)
        sum_b += raw;
    return raw;
}

/* Sum over a thread's column of 16 rows: over the 8 lanes that share it. */
__device__ __forceinline__ float column_sum(float x)
{
    x += __shfl_xor_sync(~0u, x, 4);
    x += __shfl_xor_sync(~0u, x, 8);
    return x + __shfl_xor_sync(~0u, x, 16);
}

/* Warp (I, cq): rows 16 I .., channels 32 cq .. of the block's 64. */
template <int K, int V, bool ANY, bool BF16> __global__ void __launch_bounds__(256, 2) k_intra(Dims d, dpg_tensors t, dpg_grads g, Tiles a)
{
    extern __shared__ __align__(128) char raw[];
    IntraSmem<V> &sm = *(IntraSmem<V> *)raw;
    const int NB = K / CH;
    int64_t tile = blockIdx.x / NB;
    int ch0 = blockIdx.x % NB * CH, hv = tile % d.HV, hq = hv / d.G, warp = threadIdx.x / 32, lane = threadIdx.x % 32, gr = lane / 4, tc = lane % 4, I = warp % 4, c0 = warp / 4 * 32, lr = ANY ? d.lr : 0;
    Chunk c = d.chunk[tile / d.HV];
    int rows = c.len << lr;
    auto &A = sm.x.a;
    auto &B = sm.x.b;
    load_flat<256>(A.o, a.dos + tile * C * V, C * V / 8);
    load_flat<256>(A.dE, a.dE + tile * C * V, C * V / 8);
    load_flat<256>(A.X, a.X + tile * C * V, C * V / 8);
    for (int x = threadIdx.x; x < CH * V / 8; x += 256) {                  /* rows ch0 .. of every slice */
        int sl = x / (CH * 2), y = x % (CH * 2) * 8;
        cp16(A.h + sl * CH * 16 + y, a.h + tile * K * V + (sl * K + ch0) * 16 + y, true);
        cp16(A.dh + sl * CH * 16 + y, a.dh + tile * K * V + (sl * K + ch0) * 16 + y, true);
    }
    const bool one = ANY && d.Kg == 1;
    for (int x = threadIdx.x; x < C * CH / 4; x += 256)
        if (one) {
            float y = a.gcum[tile * C + x / 16];
            *(float4 *)(sm.gam + x / 16 * GS + x % 16 * 4) = make_float4(y, y, y, y);
        } else
            cp16(sm.gam + x / 16 * GS + x % 16 * 4, a.gcum + (tile * C + x / 16) * K + ch0 + x % 16 * 4, true);
    cp_commit();
    uint4 k4[2], q4[2];                                  /* 8 channels of two rows of k and q; they wait in registers */
    int p8 = threadIdx.x % 8;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int r = threadIdx.x / 8 + 32 * i;
        k4[i] = q4[i] = make_uint4(0, 0, 0, 0);
        float unused;
        if (r < rows) {
            k4[i] = load8_bf16(t.k, row_at(c.t0, d.H, hq, r, lr) * K + ch0 + p8 * 8, BF16, unused);
            q4[i] = load8_bf16(t.q, row_at(c.t0, d.H, hq, r >> lr, 0) * K + ch0 + p8 * 8, BF16, unused);
        }
    }
    if (threadIdx.x < C) {
        sm.rk[threadIdx.x] = a.norm[tile * 2 * C + threadIdx.x];
        sm.rq[threadIdx.x] = a.norm[tile * 2 * C + C + threadIdx.x];
        sm.p[threadIdx.x] = a.pdiag[tile * C + threadIdx.x];
    }
    cp_wait<0>();
    __syncthreads();
    float dq[4][4] = {}, dr[4][4] = {}, dw[4][4] = {};   /* S_0 do, S_0 dE, dS_c X */
#pragma unroll 2
    for (int vv = 0; vv < V / 16; vv++) {
        uint32_t fo[4], fe[4], fx[4], bh[4], bd[4];
        int at = piece_at(C, vv, 16 * I + down_row(lane), down_p(lane));
        ldsm4(fo, saddr(A.o + at));
        ldsm4(fe, saddr(A.dE + at));
        ldsm4(fx, saddr(A.X + at));
#pragma unroll
        for (int n = 0; n < 2; n++) {
            int b = piece_at(CH, vv, c0 + 16 * n + across_row(lane), across_p(lane));
            ldsm4(bh, saddr(A.h + b));
            ldsm4(bd, saddr(A.dh + b));
            two(dq[2 * n], dq[2 * n + 1], fo, bh);
            two(dr[2 * n], dr[2 * n + 1], fe, bh);
            two(dw[2 * n], dw[2 * n + 1], fx, bd);
        }
    }
    {                                                    /* z = eC o rowsum(S_0 o dS_c): 4 threads a channel */
        int ch = threadIdx.x / 4, part = threadIdx.x % 4;
        float sum = 0.f;
        for (int x = part; x < V / 8; x += 4) {
            uint4 y = *(uint4 *)(A.h + piece_at(CH, x / 2, ch, x % 2)), w = *(uint4 *)(A.dh + piece_at(CH, x / 2, ch, x % 2));
            const uint32_t *ys = (const uint32_t *)&y, *ws = (const uint32_t *)&w;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float2 m = unpack2(ys[j]), n = unpack2(ws[j]);
                sum = fmaf(m.x, n.x, fmaf(m.y, n.y, sum));
            }
        }
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (part == 0)
            sm.z[ch] = a.eC[tile * K + ch0 + ch] * sum;
    }
    if (warp < 4) {
        bool wide = false;
        const float *gm = sm.gam + warp * 16 * GS;
        for (int k = lane; k < CH; k += 32)
            wide |= gm[k] - gm[15 * GS + k] > NEAR;
        wide = __any_sync(~0u, wide);
        if (lane == 0)
            sm.wide[warp] = wide;
    }
    __syncthreads();                                     /* the states' operands make way */
    load_square<256>(B.dP, a.dP + tile * C * C);
    load_square<256>(B.dL, a.dL + tile * C * C);
    cp_commit();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int r = threadIdx.x / 8 + 32 * i, J = r / 16, at = rows_at<CH>(r, p8);
        const float *gm = sm.gam + r * GS + p8 * 8, *an = sm.gam + 16 * J * GS + p8 * 8, *ref = sm.gam + (J < 3 ? 16 * (J + 1) : 63) * GS + p8 * 8;
        float rk = sm.rk[r], rq = sm.rq[r];
        const uint32_t *ks = (const uint32_t *)&k4[i], *qs = (const uint32_t *)&q4[i];
        uint32_t ka[4], qa[4], kb[4], kd[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float2 k = unpack2(ks[j]), q = unpack2(qs[j]);
            k.x *= rk, k.y *= rk, q.x *= rq, q.y *= rq;
            float x = ex2(gm[2 * j] - an[2 * j]), y = ex2(gm[2 * j + 1] - an[2 * j + 1]);
            ka[j] = pack2(k.x * x, k.y * y), qa[j] = pack2(q.x * x, q.y * y);
            kd[j] = pack2(k.x * ex2(near(an[2 * j] - gm[2 * j])), k.y * ex2(near(an[2 * j + 1] - gm[2 * j + 1])));
            kb[j] = pack2(k.x * ex2(ref[2 * j] - gm[2 * j]), k.y * ex2(ref[2 * j + 1] - gm[2 * j + 1]));
        }
        *(uint4 *)(B.ka + at) = *(uint4 *)ka, *(uint4 *)(B.qa + at) = *(uint4 *)qa, *(uint4 *)(B.kb + at) = *(uint4 *)kb, *(uint4 *)(B.kd + at) = *(uint4 *)kd;
        *(uint4 *)(B.k + at) = k4[i], *(uint4 *)(B.q + at) = q4[i];
    }
    for (int x = threadIdx.x; x < 6 * CH; x += 256) {
        int pair = x / CH, ch = x % CH, i = pair < 1 ? 1 : pair < 3 ? 2 : 3, j = pair - i * (i - 1) / 2;
        sm.F[pair][ch] = ex2(sm.gam[16 * i * GS + ch] - sm.gam[16 * (j + 1) * GS + ch]);
    }
    cp_wait<0>();
    __syncthreads();

    bool wide = sm.wide[I];
    float pq[4][4] = {}, pr[4][4] = {}, pw[4][4] = {};   /* pair terms, anchored at the first row; pw: at the first row after the block */
    for (int J = 0; J < I; J++) {
        float y[4][4] = {}, z[4][4] = {};
        uint32_t fp[4], fl[4], b[4];
        ldsm4(fp, saddr(B.dP + rows_at<C>(16 * I + down_row(lane), 2 * J + down_p(lane))));
        ldsm4(fl, saddr(B.dL + rows_at<C>(16 * I + down_row(lane), 2 * J + down_p(lane))));
#pragma unroll
        for (int n = 0; n < 2; n++) {
            ldsm4t(b, saddr(B.kb + rows_at<CH>(16 * J + down_row(lane), c0 / 8 + 2 * n + down_p(lane))));
            two(y[2 * n], y[2 * n + 1], fp, b);
            two(z[2 * n], z[2 * n + 1], fl, b);
        }
#pragma unroll
        for (int n = 0; n < 4; n++) {
            float2 f = *(float2 *)&sm.F[f_at(I, J)][c0 + 8 * n + 2 * tc];
#pragma unroll
            for (int e = 0; e < 4; e++)
                pq[n][e] = fmaf(e % 2 ? f.y : f.x, y[n][e], pq[n][e]), pr[n][e] = fmaf(e % 2 ? f.y : f.x, z[n][e], pr[n][e]);
        }
    }
    for (int M = I + 1; M < 4; M++) {
        float y[4][4] = {};
        uint32_t fp[4], fl[4], b[4];
        ldsm4t(fp, saddr(B.dP + rows_at<C>(16 * M + across_row(lane), 2 * I + across_p(lane))));
        ldsm4t(fl, saddr(B.dL + rows_at<C>(16 * M + across_row(lane), 2 * I + across_p(lane))));
#pragma unroll
        for (int n = 0; n < 2; n++) {
            int at = rows_at<CH>(16 * M + down_row(lane), c0 / 8 + 2 * n + down_p(lane));
            ldsm4t(b, saddr(B.qa + at));
            two(y[2 * n], y[2 * n + 1], fp, b);
            ldsm4t(b, saddr(B.ka + at));
            two(y[2 * n], y[2 * n + 1], fl, b);
        }
#pragma unroll
        for (int n = 0; n < 4; n++) {
            float2 f = *(float2 *)&sm.F[f_at(M, I)][c0 + 8 * n + 2 * tc];
#pragma unroll
            for (int e = 0; e < 4; e++)
                pw[n][e] = fmaf(e % 2 ? f.y : f.x, y[n][e], pw[n][e]);
        }
    }
    float xd[4][4] = {};                                 /* the diagonal block's part of pw, anchored at the first row */
    {
        uint32_t fp[4], fl[4], b[4];
        ldsm4(fp, saddr(B.dP + rows_at<C>(16 * I + down_row(lane), 2 * I + down_p(lane))));
        ldsm4(fl, saddr(B.dL + rows_at<C>(16 * I + down_row(lane), 2 * I + down_p(lane))));
#pragma unroll
        for (int n = 0; n < 2; n++) {
            ldsm4t(b, saddr(B.kd + rows_at<CH>(16 * I + down_row(lane), c0 / 8 + 2 * n + down_p(lane))));
            two(pq[2 * n], pq[2 * n + 1], fp, b);
            two(pr[2 * n], pr[2 * n + 1], fl, b);
        }
        ldsm4t(fp, saddr(B.dP + rows_at<C>(16 * I + across_row(lane), 2 * I + across_p(lane))));
        ldsm4t(fl, saddr(B.dL + rows_at<C>(16 * I + across_row(lane), 2 * I + across_p(lane))));
#pragma unroll
        for (int n = 0; n < 2; n++) {
            int at = rows_at<CH>(16 * I + down_row(lane), c0 / 8 + 2 * n + down_p(lane));
            ldsm4t(b, saddr(B.qa + at));
            two(xd[2 * n], xd[2 * n + 1], fp, b);
            ldsm4t(b, saddr(B.ka + at));
            two(xd[2 * n], xd[2 * n + 1], fl, b);
        }
    }

    int ref = I < 3 ? 16 * (I + 1) : 63;
    float dg[4][4];
#pragma unroll
    for (int n = 0; n < 4; n++) {
        int ch = c0 + 8 * n + 2 * tc;
        float2 an = *(float2 *)(sm.gam + 16 * I * GS + ch), rf = *(float2 *)(sm.gam + ref * GS + ch), end = *(float2 *)(sm.gam + 63 * GS + ch);
        float2 written = make_float2(0.f, 0.f);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int s = 16 * I + gr + 8 * r;
            int here = rows_at<CH>(s, ch / 8) + ch % 8;
            float2 gm = *(float2 *)(sm.gam + s * GS + ch), k = unpack2(lds32(B.k + here)), q = unpack2(lds32(B.q + here));
            /* A pair's term enters dg at both of its tokens with opposite signs: there it is the same product of rounded operands, so that it leaves no more
             * than the fp32 sums between tokens that see both, however slow the gates. */
            float out_q[2], out_k[2], p = sm.p[s];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int i = 2 * r + e;
                float pairs = (float)B.qa[here + e] * pq[n][i] + (float)B.ka[here + e] * pr[n][i] - (float)B.kb[here + e] * pw[n][i] - (float)B.kd[here + e] * xd[n][i];
                float gs = e ? gm.y : gm.x, ea = ex2(gs - (e ? an.y : an.x)), eg = ex2(gs), kn = (e ? k.y : k.x) * sm.rk[s], qn = (e ? q.y : q.x) * sm.rq[s];
                float own = ex2((e ? end.y : end.x) - gs) * dw[n][i];
                float w = own + ex2((e ? rf.y : rf.x) - gs) * pw[n][i] + ex2(near((e ? an.y : an.x) - gs)) * xd[n][i];
                float qq = fmaf(d.scale * eg, dq[n][i], ea * pq[n][i]), rr = fmaf(-eg, dr[n][i], ea * pr[n][i]);
                float apart = fmaf(qn, d.scale * eg * dq[n][i], kn * (-eg * dr[n][i] - own));
                if (wide) {
                    float3 z = diagonal_pairwise(sm, s, ch + e);
                    qq += z.x, rr += z.y, w += z.z;
                    apart = fmaf(qn, z.x, fmaf(kn, z.y - z.z, apart));
                }
                dg[n][i] = apart + pairs;
                (e ? written.y : written.x) += kn * own;
                out_q[e] = fmaf(p, kn, qq), out_k[e] = rr + fmaf(p, qn, w);
            }
            int64_t at = (tile * C + s) * K + ch0 + ch;
            *(float2 *)(a.dq + at) = make_float2(out_q[0], out_q[1]);
            *(float2 *)(a.dk + at) = make_float2(out_k[0], out_k[1]);
        }
        /* sums over the rows from each on, inside the warp's 16 */
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float lo = dg[n][e], hi = dg[n][2 + e];
#pragma unroll
            for (int m = 4; m < 32; m *= 2) {
                float x = __shfl_down_sync(~0u, lo, m), y = __shfl_down_sync(~0u, hi, m);
                if (lane + m < 32)
                    lo += x, hi += y;
            }
            lo += __shfl_sync(~0u, hi, tc);
            dg[n][e] = lo, dg[n][2 + e] = hi;
            float wr = column_sum(e ? written.y : written.x);
            if (gr == 0)
                sm.total[I][ch + e] = lo, sm.write[I][ch + e] = wr;
        }
    }
    __syncthreads();
    float Ah = t.A_log ? expf(t.A_log[hv]) : 1.f, over[2] = {0.f, 0.f};    /* over: the warp's channels */
#pragma unroll
    for (int n = 0; n < 4; n++) {
        int ch = c0 + 8 * n + 2 * tc;
        float sa[2] = {0.f, 0.f}, sb[2] = {0.f, 0.f}, from[2], bias[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {                    /* rowsum(dS_c o S_c) and the later blocks */
            from[e] = sm.z[ch + e] + ((sm.write[0][ch + e] + sm.write[1][ch + e]) + (sm.write[2][ch + e] + sm.write[3][ch + e]));
            for (int M = 3; M > I; M--)
                from[e] += sm.total[M][ch + e];
            bias[e] = t.dt_bias && !one ? t.dt_bias[hv * K + ch0 + ch + e] : 0.f;
            over[0] += dg[n][e] + from[e], over[1] += dg[n][2 + e] + from[e];
        }
        if (one)
            continue;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int s = 16 * I + gr + 8 * r;
            if ((s >= rows && !(FAULT(DG_TAIL) && s >> lr == c.len && c.t0 + c.len < d.L)) || ((s >> lr << lr) != s && !FAULT(DG_KEYS)))
                continue;
            int64_t at = row_at(c.t0, d.HV, hv, s >> lr, 0) * K + ch0 + ch;
            float2 x = d.g_bf16 ? unpack2(*(const uint32_t *)((const bf16 *)t.g + at)) : *(const float2 *)((const float *)t.g + at);
            float y0 = gate_bwd(d, dg[n][2 * r] + from[0], x.x, Ah, bias[0], sa[0], sb[0]), y1 = gate_bwd(d, dg[n][2 * r + 1] + from[1], x.y, Ah, bias[1], sa[1], sb[1]);
            if (d.dg_bf16)
                *(uint32_t *)((bf16 *)g.dg + at) = pack2(y0, y1);
            else
                *(float2 *)((float *)g.dg + at) = make_float2(y0, y1);
        }
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float x = column_sum(sa[e]), y = column_sum(sb[e]);
            if (gr == 0)
                sm.sum_a[I][ch + e] = x, sm.sum_b[I][ch + e] = y;
        }
    }
    if (one) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            over[r] += __shfl_xor_sync(~0u, over[r], 1);
            over[r] += __shfl_xor_sync(~0u, over[r], 2);
            if (tc == 0)
                sm.sum_a[c0 / 32][16 * I + gr + 8 * r] = over[r];
        }
    }
    __syncthreads();
    if (one) {
        if (threadIdx.x < C)
            a.dg_sum[blockIdx.x * C + threadIdx.x] = sm.sum_a[0][threadIdx.x] + (FAULT(GATE_HALF) ? 0.f : sm.sum_a[1][threadIdx.x]);
        return;
    }
    if (threadIdx.x < 2 * CH) {
        int ch = threadIdx.x % CH, b = threadIdx.x / CH;
        float (*s)[CH] = b ? sm.sum_b : sm.sum_a;
        a.part[(tile * 2 + b) * K + ch0 + ch] = (s[0][ch] + s[1][ch]) + (s[2][ch] + s[3][ch]);
    }
}

/* ---- k_norm, k_sums ------------------------------------------------------------------------------------------------------------------------ */

/* dq and dk of one chunk and query head: the group's value heads summed in order, then dx = (dy - y <y, dy>) / |x|. 16 (K = 128) or 8 lanes a row. */
template <int K, bool ANY, bool BF16> __global__ void __launch_bounds__(256) k_norm(Dims d, dpg_tensors t, dpg_grads g, Tiles a)
{
    const int P = K / 8;
    int ch = blockIdx.x / d.H, hq = blockIdx.x % d.H, lr = ANY ? d.lr : 0;
    int64_t tile0 = (int64_t)ch * d.HV + hq * d.G;
    Chunk c = d.chunk[ch];
    for (int x = threadIdx.x; x < 2 * C * P; x += 256) {
        int isq = x / (C * P), r = x / P % C, p = x % P;
        bool live = r < c.len << lr && (!isq || (r >> lr << lr) == r);
        int64_t at = row_at(c.t0, d.H, hq, live ? isq ? r >> lr : r : 0, isq ? 0 : lr) * K + p * 8;
        float rn = a.norm[tile0 * 2 * C + (isq ? C : 0) + r], dy[8] = {}, y[8], dot = 0.f;
        load8(y, isq ? t.q : t.k, at, BF16);
        for (int m = 0; m < d.G << (isq ? lr : 0); m += isq && FAULT(DQ_KEY) ? 1 << lr : 1) {    /* a query's rows of every value head */
            const float *from = (isq ? a.dq : a.dk) + ((tile0 + (isq ? m >> lr : m)) * C + r + (isq && live ? m & ((1 << lr) - 1) : 0)) * K + p * 8;
            float4 lo = *(const float4 *)from, hi = *(const float4 *)(from + 4);
            dy[0] += lo.x, dy[1] += lo.y, dy[2] += lo.z, dy[3] += lo.w, dy[4] += hi.x, dy[5] += hi.y, dy[6] += hi.z, dy[7] += hi.w;
        }
#pragma unroll
        for (int j = 0; j < 8; j++) {
            y[j] *= rn;
            dot = fmaf(y[j], dy[j], dot);
        }
#pragma unroll
        for (int m = P / 2; m; m /= 2)
            dot += __shfl_xor_sync(~0u, dot, m);
        if (!live)
            continue;
#pragma unroll
        for (int j = 0; d.l2norm && j < 8; j++)
            dy[j] = (dy[j] - y[j] * dot) * rn;
        void *to = isq ? g.dq : g.dk;
        if (d.d_bf16)
            *(uint4 *)((bf16 *)to + at) = make_uint4(pack2(dy[0], dy[1]), pack2(dy[2], dy[3]), pack2(dy[4], dy[5]), pack2(dy[6], dy[7]));
        else
            *(float4 *)((float *)to + at) = *(float4 *)dy, *(float4 *)((float *)to + at + 4) = *(float4 *)(dy + 4);
    }
}

/* Raw gradient of the one gate of a head and its terms of dA_log and ddt_bias: a thread a token, a block a tile. */
template <int K> __global__ void __launch_bounds__(C) k_gate_one(Dims d, dpg_tensors t, dpg_grads g, Tiles a)
{
    __shared__ float sum[2][2];
    int64_t tile = blockIdx.x;
    int hv = tile % d.HV, s = threadIdx.x;
    Chunk c = d.chunk[tile / d.HV];
    float sa = 0.f, sb = 0.f;
    if (s < c.len) {
        int64_t at = (c.t0 + s) * d.HV + hv;
        float dg = 0.f;
        for (int i = 0; i < K / CH; i++)
            dg += a.dg_sum[(tile * (K / CH) + i) * C + (FAULT(GATE_ROW) ? s : s << d.lr)];
        float y = gate_bwd(d, dg, ldx(t.g, at, d.g_bf16), t.A_log ? expf(t.A_log[hv]) : 1.f, t.dt_bias ? t.dt_bias[hv] : 0.f, sa, sb);
        if (d.dg_bf16)
            ((bf16 *)g.dg)[at] = __float2bfloat16_rn(y);
        else
            ((float *)g.dg)[at] = y;
    }
#pragma unroll
    for (int m = 16; m; m /= 2)
        sa += __shfl_xor_sync(~0u, sa, m), sb += __shfl_xor_sync(~0u, sb, m);
    if (s % 32 == 0)
        sum[0][s / 32] = sa, sum[1][s / 32] = sb;
    __syncthreads();
    if (s < 2)
        a.part[tile * 2 + s] = sum[s][0] + sum[s][1];
}

/* Their sums over the rank's chunks, in fp64: a warp a head, lanes in a fixed order. */
__global__ void __launch_bounds__(32) k_sums_one(Dims d, const float *part, float *gsum)
{
    double sa = 0, sb = 0;
    for (int c = threadIdx.x; c < d.NT; c += 32) {
        const float *p = part + ((int64_t)c * d.HV + blockIdx.x) * 2;
        sa += p[0], sb += p[1];
    }
#pragma unroll
    for (int m = 16; m; m /= 2)
        sa += __shfl_xor_sync(~0u, sa, m), sb += __shfl_xor_sync(~0u, sb, m);
    if (threadIdx.x == 0)
        gsum[blockIdx.x] = (float)sa, gsum[d.HV + blockIdx.x] = (float)sb;
}

/* Sums over the rank's chunks of part [chunk][HV][2][K]: 8 warps take every eighth chunk, in fp64, then theirs in order. Block: a value head, 32 channels;
 * over the channels of dA_log k_log_sum adds up. */
__global__ void k_sums(Dims d, const float *part, float *gsum, float *by_channel)
{
    __shared__ double sum[2][8][32];
    int hv = blockIdx.x / (d.K / 32), k = blockIdx.x % (d.K / 32) * 32 + threadIdx.x % 32, w = threadIdx.x / 32;
    double sa = 0, sb = 0;
#pragma unroll 4
    for (int c = w; c < d.NT; c += 8) {
        const float *p = part + ((int64_t)c * d.HV + hv) * 2 * d.K + k;
        sa += p[0], sb += p[d.K];
    }
    sum[0][w][threadIdx.x % 32] = sa, sum[1][w][threadIdx.x % 32] = sb;
    __syncthreads();
    if (w)
        return;
    for (int i = 1; i < 8; i++)
        sa += sum[0][i][threadIdx.x], sb += sum[1][i][threadIdx.x];
    by_channel[hv * d.K + k] = (float)sa;
    gsum[d.HV + hv * d.K + k] = (float)sb;
}
__global__ void k_log_sum(Dims d, const float *by_channel, float *gsum)
{
    int hv = blockIdx.x * blockDim.x + threadIdx.x;
    double s = 0;
    for (int k = 0; hv < d.HV && k < d.K; k++)
        s += by_channel[hv * d.K + k];
    if (hv < d.HV)
        gsum[hv] = (float)s;
}

/* ---- host ---------------------------------------------------------------------------------------------------------------------------------- */

Tiles tiles_of(dpg_plan *p, const dpg_tensors *t, const dpg_grads *g, void *ws)
{
    auto b = [&](int slot) { return at<bf16>(p, ws, slot); };
    auto f = [&](int slot) { return at<float>(p, ws, slot); };
    Tiles a = {};
    a.w = b(B_W), a.u = b(B_U), a.kg = b(B_KG), a.qg = b(B_QG), a.Aqk = b(B_AQK), a.Akk = b(B_AKK), a.L = b(B_L);
    a.eC = f(B_EC), a.gcum = f(B_GCUM), a.s0 = t->s0, a.sin = f(B_SIN), a.dfinal = g->dfinal_state, a.dsout = f(B_DSOUT);
    a.h = b(B_H), a.X = b(B_VNEW), a.dvl = b(B_DVL), a.dos = b(B_DO), a.dh = b(B_DH), a.dX = b(B_DX), a.dE = b(B_E), a.dP = b(B_DP), a.dL = b(B_DL);
    a.pdiag = f(B_DBETA), a.norm = f(B_NORM), a.dq = f(B_DQ), a.dk = f(B_DKR), a.part = f(B_PART), a.dg_sum = f(B_DZ);
    a.ds0 = NULL, a.dhm = NULL, a.row = dh_row(p), a.nseg = p->nseg, a.parts = p->parts;
    return a;
}

template <class S, class K> dp_status allow(K kernel, dp_err *e)
{
    CK(e, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)sizeof(S)));
    return DP_OK;
}
unsigned tile_count(const dpg_plan *p) { return (unsigned)((int64_t)p->d.NT * p->d.HV); }

/* Teams finish a chunk sooner; one warp per 16 columns reads tiles once for 4 of them. As in fast.cu: teams below about 100 blocks of 4 slices. */
template <int K, int V, int BWD> dp_status launch_pass(dpg_plan *p, Tiles a, int nseq, cudaStream_t s, dp_err *e)
{
    if ((int64_t)nseq * p->d.HV * (V / 64) < 100) {
        typedef TeamSmem<K, BWD> S;
        TRY(allow<S>(k_team_pass<K, V, BWD>, e));
        k_team_pass<K, V, BWD><<<(unsigned)nseq * p->d.HV * (V / 16), 160, sizeof(S), s>>>(p->d, a);
        CK_LAUNCH(e, "k_team_pass");
    } else {
        typedef PassSmem<K, 4, BWD> S;
        TRY(allow<S>(k_pass<K, V, 4, BWD>, e));
        k_pass<K, V, 4, BWD><<<(unsigned)nseq * p->d.HV * (V / 64), 160, sizeof(S), s>>>(p->d, a);
        CK_LAUNCH(e, "k_pass");
    }
    return DP_OK;
}

template <int K, int V, bool ANY> struct Stages {
    static dp_status states(dpg_plan *p, const dpg_tensors *t, const dpg_grads *g, void *ws, cudaStream_t s, dp_err *e)
    {
        return launch_pass<K, V, 0>(p, tiles_of(p, t, g, ws), p->d.nseq - 1 + p->nseg, s, e);
    }
    static dp_status dAv(dpg_plan *p, const dpg_tensors *t, const dpg_grads *g, void *ws, cudaStream_t s, dp_err *e)
    {
        TRY(allow<DavSmem<V>>(k_dav<V, ANY>, e));
        k_dav<V, ANY><<<tile_count(p), 256, sizeof(DavSmem<V>), s>>>(p->d, *g, tiles_of(p, t, g, ws));
        CK_LAUNCH(e, "k_dav");
        return DP_OK;
    }
    static dp_status pre(dpg_plan *p, const dpg_tensors *t, const dpg_grads *g, void *ws, cudaStream_t s, dp_err *e)
    {
        Tiles a = tiles_of(p, t, g, ws);
        a.dhm = at<float>(p, ws, B_DHM), a.dsout = NULL, a.dh = a.dX = NULL;
        if (p->parts > 1)
            a.dhm = at<float>(p, ws, B_SEG), a.row = V, a.seq0 = p->is_first;      /* nobody asks for dH of the first part of a sequence */
        return launch_pass<K, V, 1>(p, a, p->parts > 1 ? p->parts - p->is_first : 1, s, e);
    }
    static dp_status state(dpg_plan *p, const dpg_tensors *t, const dpg_grads *g, void *ws, cudaStream_t s, dp_err *e)
    {
        Tiles a = tiles_of(p, t, g, ws);
        a.ds0 = g->ds0;
        return launch_pass<K, V, 1>(p, a, p->d.nseq - 1 + p->parts, s, e);
    }
    static dp_status intra(dpg_plan *p, const dpg_tensors *t, const dpg_grads *g, void *ws, cudaStream_t s, dp_err *e)
    {
        Tiles a = tiles_of(p, t, g, ws);
        auto wy = p->d.in_bf16 ? k_wy<K, V, ANY, true> : k_wy<K, V, ANY, false>;
        auto intra = p->d.in_bf16 ? k_intra<K, V, ANY, true> : k_intra<K, V, ANY, false>;
        TRY(allow<WySmem<K, V>>(wy, e));
        wy<<<tile_count(p), 256, sizeof(WySmem<K, V>), s>>>(p->d, *t, *g, a);
        CK_LAUNCH(e, "k_wy");
        TRY(allow<IntraSmem<V>>(intra, e));
        intra<<<tile_count(p) * (K / CH), 256, sizeof(IntraSmem<V>), s>>>(p->d, *t, *g, a);
        CK_LAUNCH(e, "k_intra");
        return DP_OK;
    }
    static dp_status sums(dpg_plan *p, const dpg_tensors *t, const dpg_grads *g, void *ws, cudaStream_t s, dp_err *e)
    {
        const Dims &d = p->d;
        Tiles a = tiles_of(p, t, g, ws);
        float *gsum = at<float>(p, ws, B_GSUM), *channel = at<float>(p, ws, B_DG);
        if (d.Kg == 1) {
            k_gate_one<K><<<tile_count(p), C, 0, s>>>(d, *t, *g, a);
            CK_LAUNCH(e, "k_gate_one");
            k_sums_one<<<(unsigned)d.HV, 32, 0, s>>>(d, a.part, gsum);
            CK_LAUNCH(e, "k_sums_one");
            return DP_OK;
        }
        k_sums<<<(unsigned)d.HV * (K / 32), 256, 0, s>>>(d, a.part, gsum, channel);
        CK_LAUNCH(e, "k_sums");
        k_log_sum<<<(d.HV + 127) / 128, 128, 0, s>>>(d, channel, gsum);
        CK_LAUNCH(e, "k_log_sum");
        return DP_OK;
    }
    static dp_status norm(dpg_plan *p, const dpg_tensors *t, const dpg_grads *g, void *ws, cudaStream_t s, dp_err *e)
    {
        auto norm = p->d.in_bf16 ? k_norm<K, ANY, true> : k_norm<K, ANY, false>;
        norm<<<(unsigned)((int64_t)p->d.NT * p->d.H), 256, 0, s>>>(p->d, *t, *g, tiles_of(p, t, g, ws));
        CK_LAUNCH(e, "k_norm");
        return DP_OK;
    }
};

#define STAGE(K, V, stage) (p->d.R == 1 && p->d.Kg == K ? Stages<K, V, false>::stage(p, t, g, ws, s, e) : Stages<K, V, true>::stage(p, t, g, ws, s, e))
#define BY_WIDTH(stage) dp_status stage(dpg_plan *p, const dpg_tensors *t, const dpg_grads *g, void *ws, cudaStream_t s, dp_err *e) \
    { return p->d.K == 64 ? p->d.V == 64 ? STAGE(64, 64, stage) : STAGE(64, 128, stage) : p->d.V == 64 ? STAGE(128, 64, stage) : STAGE(128, 128, stage); }
dp_status chunks(dpg_plan *p, const dpg_tensors *t, const dpg_grads *, void *ws, cudaStream_t s, dp_err *e) {
    FAULT_TO_DEVICE(e, s);
    return fast_chunks(p, t, ws, s, e);
}
BY_WIDTH(states)
BY_WIDTH(dAv)
BY_WIDTH(pre)
BY_WIDTH(state)
BY_WIDTH(intra)
BY_WIDTH(sums)
BY_WIDTH(norm)

} // namespace

int fast_bwd_supports(const dpg_problem *p, const dpg_options *o)
{
    return fast_supports(p, o) && o->save == DPG_SAVE_STATE && !o->pair_dg;
}

extern const BwdOps fast_bwd = {chunks, states, dAv, pre, state, intra, sums, norm};
