/* gpu/fast/pre_own.cu - (M, H) of segments with the rounding of a pass, by warpgroup products. On
 * one rank the states follow that its segments start from; others get them with a chain in bf16.
 * The formulas are those of pre.cu:
 *
 *   X = P kg'      H <- H + X u      P <- P o eC - X w      from P = I, H = 0; then M = P
 *
 * The pass over a segment rounds its state before every product. P and X are rounded likewise, and
 * errors are much as those of a pass over whole sequences. Sums stay in the accumulators. With one
 * gate a head no rows are decayed: their factors multiply columns of X, k is read as it is.
 *
 * A warpgroup has 64 rows of P and of H, in registers, and waits for no other. A block has all rows
 * of a segment and head, or 64 of 128. One more warp loads chunks to a ring. Phases of a chunk, and
 * what shared memory holds:
 *
 *   look    every 2 LOOK chunks: is anything left of P     nothing
 *   X       P rounded; P kg'; meanwhile P o eC             kg (k)
 *   T       (no w and u) X rounded; X T B                  T B
 *   P, H    X rounded; P - X w; H + X u                    w (k), u (v) */
#include "fast/pre.cuh"
#include "fast/whole.cuh"

namespace {

#define OWN_THREADS(rows) ((rows)*2 + 128) /* warpgroups; the last one's first warp loads */

template <int K, int V, Form FORM> struct Tiles {
    static const int OF_KG = FORM == GIVEN ? 0 : C * K, OF_TB = FORM == MADE ? 0 : C * C;
    bf16 w[C * K], u[C * V], rest[OF_KG + OF_TB]; /* u: of a plan with w and u SLICES */
    __device__ __forceinline__ bf16 *kg() { return FORM == GIVEN ? w : rest; }
    __device__ __forceinline__ bf16 *TB() { return rest + OF_KG; }
};
template <int K, Form FORM> struct Ends { float chunk[K]; };
template <int K> struct Ends<K, GIVEN> : StateFactors {};
template <int K, int V, Form FORM> struct OwnSmem {
    static const int DEPTH = 4;
    Tiles<K, V, FORM> tiles[DEPTH]; /* on multiples of 1,024 bytes, as the swizzle wants */
    Ends<K, FORM> ends[DEPTH];
    RingOf<DEPTH> ring;
    int left[3], odd, stops; /* left: of looks; stops: no chunk is wanted any more */
};
struct OwnArgs {
    PreArgs a;
    CUtensorMap k_map, v_map;
    int halves;  /* blocks that share the rows of M */
    int message; /* words as other ranks read them, s0 in H; else as an Element */
};

/* An element: H as accumulators, then M as operands in two pieces, each by 16 rows and tiles of 8
 * or 16 columns. The words of a lane lie together. */
template <int K, int V> struct Element {
    float4 h[K / 16][V / 8][32];
    uint4 m[K / 16][K / 16][2][32];
};

/* ---- (M, H) ---------------------------------------------------------------------------------- */

/* A chunk by the loading warp; c: its tokens. */
template <int K, int V, Form FORM>
__device__ __forceinline__ void load_chunk(OwnSmem<K, V, FORM> &sm, const Dims &d, const OwnArgs &o,
                                           const Chunk &c, int64_t tile, int hv, int at, int lane) {
    const int KEYS = C * K * 2, VALUES = C * V * 2;
    const PreArgs &a = o.a;
    Tiles<K, V, FORM> &t = sm.tiles[at];
    uint64_t *full = &sm.ring.full[at];
    const bool whole = FORM != MADE && is_whole(c), raw_k = FORM == GIVEN;
    const int raw = VALUES + raw_k * KEYS; /* bytes of raw rows */
    fill_begin(full, sizeof(sm.tiles[0]) + sizeof(sm.ends[0]) - (FORM == MADE || whole ? 0 : raw),
               lane);
    if constexpr (FORM == GIVEN) {
        fill(&sm.ends[at], &a.factors[tile].state, sizeof(sm.ends[0]), full, lane);
    } else {
        fill(t.kg(), a.kg + tile * C * K, KEYS, full, lane);
        fill(t.w, a.w + tile * C * K, KEYS, full, lane);
        fill(&sm.ends[at], a.eC + tile * K, K * 4, full, lane);
    }
    if constexpr (FORM == MADE) {
        fill(t.u, a.u + tile * C * V, VALUES, full, lane);
        return fill_end(full, lane);
    }
    fill(t.TB(), a.TB + tile * C * C, C * C * 2, full, lane);
    if (raw_k) fill_chunk<K>(t.w, o.k_map, a.w, d.H, hv / d.G, K, 0, c, whole, full, lane);
    fill_chunk<V>(t.u, o.v_map, a.u, d.HV, hv, V, 0, c, whole, full, lane);
    if (whole)
        fill16_end(full, lane);
    else
        fill16_end_for_products(full, lane);
}
/* All chunks of a segment from its end, until no more are wanted. */
template <int K, int V, Form FORM>
__device__ __forceinline__ void load_chunks(OwnSmem<K, V, FORM> &sm, const Dims &d,
                                            const OwnArgs &o, const Seq &seq, int hv, int lane) {
    Turn turn(sm.DEPTH);
    Chunk next = d.chunk[seq.c1 - 1];
    int i = 0;
    for (; i < seq.c1 - seq.c0; i++, turn.next()) {
        const int at = seq.c1 - 1 - i;
        const Chunk c = next;
        if (at > seq.c0) next = d.chunk[at - 1];
        turn.wait_empty(sm.ring);
        if (*(volatile int *)&sm.stops) break;
        load_chunk(sm, d, o, c, (int64_t)at * d.HV + hv, hv, turn.slot, lane);
    }
    for (int x = max(i - sm.DEPTH, 0); x < i; x++) /* nothing comes behind the block's end */
        bar_wait(&sm.ring.full[x % sm.DEPTH], x / sm.DEPTH & 1);
}

/* sum += SIGN xa times a tile of W columns, `step` further on for every 16 tokens. */
template <int W, int SIGN>
__device__ __forceinline__ void add_products(float (*sum)[4], const uint32_t xa[4][4], uint64_t at,
                                             int step) {
#pragma unroll
    for (int p = 0; p < 4; p++)
        if (W == 128)
            wg_mul_128<1, SIGN>(sum, xa[p], desc_at(at, p * step), false);
        else
            wg_mul<1, SIGN>(sum, xa[p], desc_at(at, p * step), false);
    wg_commit();
}
template <int V> __device__ __forceinline__ void wait_all(float (*H)[4]) {
    wg_wait<0>(H);
    if (V > 64) wg_wait<0>(H + V / 8 - 8);
}

/* One chunk, of 16 rows a warp. before(): once the products of the chunk before have ended. */
template <int K, int V, Form FORM, class F>
__device__ __forceinline__ void step(float P[K / 8][4], float H[V / 8][4], Tiles<K, V, FORM> &t,
                                     const Ends<K, FORM> &ends, int lane, F before) {
    uint32_t pa[K / 16][4], xa[4][4], xw[4][4];
    float x[8][4];
    const uint64_t kd = rows_desc(t.kg(), 1);
    round_state<K>(pa, P);
    wg_fence();
#pragma unroll
    for (int j = 0; j < K / 16; j++)
        wg_mul<0>(x, pa[j], desc_at(kd, j / 4 * HALF + j % 4 * 2), j == 0);
    wg_commit();
#pragma unroll
    for (int j = 0; j < K / 8; j++) {
        float2 f = FORM == GIVEN ? make_float2(ends.chunk[0], ends.chunk[0])
                                 : *(const float2 *)(ends.chunk + j * 8 + lane % 4 * 2);
#pragma unroll
        for (int e = 0; e < 4; e++)
            P[j][e] = fma_ftz(e % 2 ? f.y : f.x, P[j][e], 0.f);
    }
    wg_wait<0>(x);
    before();
    if constexpr (FORM == GIVEN) OfTokens<8>(ends.to_end, lane).times(x);
    round_state<64>(xa, x);
    if (FORM != MADE && !FAULT(PRE_KGAM)) {
        const uint64_t td = rows_desc(t.TB(), 64);
        wg_fence();
#pragma unroll
        for (int p = 0; p < 4; p++)
            wg_mul<1>(x, xa[p], desc_at(td, p * (HALF / 4)), p == 0);
        wg_commit();
        wg_wait<0>(x);
        round_state<64>(xa, x);
    }
    if constexpr (FORM == GIVEN) {
        OfTokens<8>(ends.of_k, lane).times(x);
        round_state<64>(xw, x);
    }
    wg_fence();
    add_products<K, -1>(P, FORM == GIVEN ? xw : xa, rows_desc(t.w, HALF), HALF / 4);
    if (FORM == MADE)
        add_products<V, 1>(H, xa, slice_desc(t.u, 0, C), 32);
    else
        add_products<V, 1>(H, xa, rows_desc(t.u, HALF), HALF / 4);
    wg_wait<V / 128>(P); /* of V of 64 the compiler lets no sums of H run on */
    if (K > 64) wg_wait<V / 128>(P + K / 8 - 8);
}

/* Is anything left of P, in all warps of products, `threads` of the block; number: of the look. */
template <int K>
__device__ __forceinline__ bool is_left_of(const float P[K / 8][4], int *left, int number,
                                           int threads, int lane) {
    uint32_t bits = 0;
    words<K>(lane, [&](int j, int e, int, int) { bits |= __float_as_uint(P[j][e]) << 1; });
    bits = __any_sync(~0u, bits != 0);
    if (bits && lane == 0) left[number % 3] = 1;
    if (threadIdx.x == 0) left[(number + 1) % 3] = 0;
    sync_part(1, threads);
    return *(volatile int *)&left[number % 3];
}
/* The same of numbers that are not finite in chunks [c0, c1) of a head; of a message also in s0
 * and v (pre.cu). */
template <int V, bool RAW>
__device__ __forceinline__ bool is_odd_of(const Dims &d, const OwnArgs &o, const float *s0,
                                          int *found, int c0, int c1, int hv, int threads) {
    bool any = false;
    for (int c = c0 + (int)threadIdx.x; c < c1; c += threads)
        for (int i = 0; i < ODD_DO; i++)
            any |= o.a.odd[((int64_t)c * d.HV + hv) * ODDS + i] != 0;
    if (o.message) {
        for (int i = threadIdx.x; s0 && i < d.K * V; i += threads)
            any |= s0[i] - s0[i] != 0.f;
        if (RAW) any |= odd_in_rows<V>(d, o.a.u, c0, c1, hv, threads) != 0;
    }
    if (any) *found = 1;
    sync_part(1, threads);
    return *(volatile int *)found;
}

/* H += P s0 of the warp's 16 rows, in fp32; rows: those of P in shared memory. */
template <int K, int V>
__device__ __forceinline__ void add_start(float H[V / 8][4], const float *rows, const float *s0,
                                          int lane) {
    const float *row = rows + lane / 4 * K, *from = s0 + lane % 4 * 2;
#pragma unroll 1
    for (int k = 0; k < K; k++) {
        const float p = row[k], q = row[8 * K + k];
#pragma unroll
        for (int j = 0; j < V / 8; j++) {
            const float2 s = *(const float2 *)(from + k * V + j * 8);
            H[j][0] = fmaf(p, s.x, H[j][0]);
            H[j][1] = fmaf(p, s.y, H[j][1]);
            H[j][2] = fmaf(q, s.x, H[j][2]);
            H[j][3] = fmaf(q, s.y, H[j][3]);
        }
    }
}
/* 16 rows of N columns to rows of `pitch` words. */
template <int N>
__device__ __forceinline__ void store_rows(float *to, int pitch, const float X[N / 8][4],
                                           int lane) {
    words<N>(lane, [&](int j, int e, int r, int n) {
        if (e % 2 == 0) *(float2 *)(to + r * pitch + n) = make_float2(X[j][e], X[j][e + 1]);
    });
}

template <int K, int V, Form FORM>
__global__ void __launch_bounds__(384, 1)
    k_pre_own(const __grid_constant__ Dims d, const __grid_constant__ OwnArgs o) {
    extern __shared__ __align__(1024) char raw[];
    OwnSmem<K, V, FORM> &sm = *(OwnSmem<K, V, FORM> *)raw;
    const PreArgs &a = o.a;
    const int half = blockIdx.x % o.halves, hv = blockIdx.x / o.halves % d.HV;
    await_grid();
    const Seq seq = d.seq[a.seq0 + blockIdx.x / o.halves / d.HV];
    if (seq.ends) return; /* nobody asks */
    const int warp = kept_warp(), lane = kept_lane(), threads = blockDim.x - 128;
    if (threadIdx.x == 0) sm.left[0] = sm.left[1] = sm.left[2] = sm.odd = sm.stops = 0;
    ring_init(sm.ring, threads / 32, FORM == MADE ? FULL_COUNT : FULL_COUNT_16(1));
    __syncthreads();
    if (warp * 32 >= threads) {
        give_registers<24>();
        if (warp * 32 == threads) load_chunks(sm, d, o, seq, hv, lane);
        return;
    }
    take_registers<240>();
    const int row0 = half * 64 + warp * 16, n = seq.c1 - seq.c0;
    const float *s0 = seq.starts && a.s0 ? a.s0 + ((int64_t)seq.gseq * d.HV + hv) * K * V : NULL;
    float P[K / 8][4], H[V / 8][4];
    Turn turn(sm.DEPTH);
    int i = 0, look = 0;
    words<K>(lane, [&](int j, int e, int r, int k) { P[j][e] = k == row0 + r; });
    words<V>(lane, [&](int j, int e, int, int) { H[j][e] = 0.f; });
    for (bool looks = true; i < n;) {
        if (looks && i && !is_left_of<K>(P, sm.left, look++, threads, lane)) {
            if (!is_odd_of<V, FORM != MADE>(d, o, s0, &sm.odd, seq.c0, seq.c1 - i, hv, threads))
                break;
            looks = false;
        }
        for (const int end = min(i + (look ? 2 * LOOK : LOOK), n); i < end; i++, turn.next()) {
            turn.wait_full(sm.ring);
            step(P, H, sm.tiles[turn.slot], sm.ends[turn.slot], lane, [&] {
                if (!i) return;
                __syncwarp();
                bar_arrive_warp(&sm.ring.empty[turn.before(i)], lane);
            });
        }
        wait_all<V>(H);
    }
    if (i < n) { /* whoever loads waits for the last chunk's place at most */
        if (threadIdx.x == 0) *(volatile int *)&sm.stops = 1;
        sync_part(1, threads);
        bar_arrive_warp(&sm.ring.empty[turn.before(i)], lane);
    }
    const int64_t head = (int64_t)seq.part * d.HV + hv;
    if (a.reach && (int)threadIdx.x < HALVES_OF_M / o.halves)
        a.reach[head * HALVES_OF_M + half + threadIdx.x] = i;
    const bool has_m = seq.part >= a.m_from && !seq.starts;
    if (a.keep && has_m)
        store_rows<K>(a.keep + ((head - (int64_t)a.m_from * d.HV) * K + row0) * K, K, P, lane);
    if (o.message) {
        if (s0 && i == n) {
            float *rows = (float *)sm.tiles + warp * 16 * K;
            sync_part(1, threads); /* all are done with the last chunk */
            store_rows<K>(rows, K, P, lane);
            __syncwarp();
            add_start<K, V>(H, rows, s0, lane);
        }
        float *to = a.hm + (head * K + row0) * (V + K);
        store_rows<V>(to, V + K, H, lane);
        if (has_m) store_rows<K>(to + V, V + K, P, lane);
        return;
    }
    Element<K, V> &to = ((Element<K, V> *)a.hm)[head];
#pragma unroll
    for (int j = 0; j < V / 8; j++)
        to.h[row0 / 16][j][lane] = make_float4(H[j][0], H[j][1], H[j][2], H[j][3]);
    if (seq.starts && !a.s0) return;
#pragma unroll
    for (int j = 0; j < K / 16; j++) {
        uint32_t hi[4], lo[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float *z = P[2 * j + e / 2] + e % 2 * 2;
            hi[e] = pack2(z[0], z[1]);
            const float2 y = unpack2(hi[e]);
            lo[e] = pack2(z[0] - y.x, z[1] - y.y);
        }
        to.m[row0 / 16][j][0][lane] = pack4(hi);
        to.m[row0 / 16][j][1][lane] = pack4(lo);
    }
}

/* ---- the states that segments start from ----------------------------------------------------- */

struct StartArgs {
    const void *elements;
    const float *given; /* states of the caller's sequences; or NULL */
    float *sin;
    const int *reach;
    const Seq *seq; /* of all segments */
    const Cut *cut;
    int HV;
};

/* S of 8 N columns, row by row, in two pieces. */
template <int K, int N> struct StartSmem { bf16 S[2][K][8 * N + 8]; };

/* S <- M S + H from the caller's state, or zeros, over the segments of a cut, each one's initial
 * state stored. M and S in two pieces, of which the small ones are not multiplied by each other.
 * Block: a cut, one head, 8 N columns; a warp 16 rows. Phases of a segment, and what shared memory
 * holds:
 *
 *   put       S                                       S
 *   product   M S + H; the next M to registers        S */
template <int K, int V, int N> __global__ void __launch_bounds__(2 * K, 1) k_starts(StartArgs a) {
    extern __shared__ __align__(1024) char raw[];
    StartSmem<K, N> &sm = *(StartSmem<K, N> *)raw;
    const int blocks = V / (8 * N), hv = blockIdx.x / blocks % a.HV, j0 = blockIdx.x % blocks * N,
              warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    await_grid();
    const Cut cut = a.cut[blockIdx.x / blocks / a.HV];
    auto head = [&](int i) { return (int64_t)(cut.first + i) * a.HV + hv; };
    auto element = [&](int i) -> const Element<K, V> & {
        return ((const Element<K, V> *)a.elements)[head(i)];
    };
    const int64_t at = ((int64_t)warp * 16 + lane / 4) * V + j0 * 8 + lane % 4 * 2;
    auto words_of = [&](auto f) { /* f(number in S, place in rows of V words) */
#pragma unroll
                                  for (int n = 0; n < N; n++)
#pragma unroll
                                      for (int half = 0; half < 2; half++)
                                          f(n, half, at + half * 8 * V + n * 8);
    };
    float S[N][4] = {};
    uint4 m[K / 16][2];
    auto store = [&](int i) {
        float *to = a.sin + head(i) * K * V;
        words_of([&](int n, int half, int64_t x) {
            *(float2 *)(to + x) = make_float2(S[n][2 * half], S[n][2 * half + 1]);
        });
    };
    auto fetch = [&](int i, int j) {
#pragma unroll
        for (int piece = 0; piece < 2; piece++)
            m[j][piece] = element(i).m[warp][j][piece][lane];
    };
    auto fetch_h = [&](int i, float(*h)[4]) {
#pragma unroll
        for (int n = 0; n < N; n++)
            *(float4 *)h[n] = element(i).h[warp][j0 + n][lane];
    };
    struct Next {
        float h[N][4];
        int reach[HALVES_OF_M];
        Seq seq;
    } now;
    auto ask = [&](int i) {
        Next x;
        fetch_h(i, x.h);
        for (int j = 0; j < HALVES_OF_M; j++)
            x.reach[j] = a.reach[head(i) * HALVES_OF_M + j];
        x.seq = a.seq[cut.first + i];
        return x;
    };
    const float *given =
        a.given ? a.given + ((int64_t)a.seq[cut.first].gseq * a.HV + hv) * K * V : NULL;
    int i = !given;
    if (i < cut.n - 1) {
#pragma unroll
        for (int j = 0; j < K / 16; j++)
            fetch(i, j);
    }
    if (given)
        words_of([&](int n, int half, int64_t x) {
            *(float2 *)(S[n] + 2 * half) = *(const float2 *)(given + x);
        });
    store(0);
    if (!given) {
        fetch_h(0, S);
        store(1);
    }
    for (now = ask(min(i, cut.n - 2)); i < cut.n - 1; i++) {
        const int later = min(i + 1, cut.n - 2);
        const Next next = ask(later);
        float sum[N][4] = {}, low[2][N][4] = {};
        int finite = 1;
#pragma unroll
        for (int n = 0; n < 4 * N; n++)
            finite &= S[n / 4][n % 4] - S[n / 4][n % 4] == 0.f;
        const bool gone = max(now.reach[0], now.reach[1]) < now.seq.c1 - now.seq.c0;
        if (gone && !__syncthreads_or(!finite)) {
#pragma unroll
            for (int j = 0; j < K / 16; j++)
                fetch(later, j);
        } else {
            __syncthreads();
            words_of([&](int n, int half, int64_t) {
                const uint32_t hi = pack2(S[n][2 * half], S[n][2 * half + 1]);
                const float2 y = unpack2(hi);
                const int row = warp * 16 + lane / 4 + half * 8, column = n * 8 + lane % 4 * 2;
                *(uint32_t *)&sm.S[0][row][column] = hi;
                *(uint32_t *)&sm.S[1][row][column] =
                    pack2(S[n][2 * half] - y.x, S[n][2 * half + 1] - y.y);
            });
            __syncthreads();
#pragma unroll
            for (int j = 0; j < K / 16; j++) {
                uint32_t big[4], small[4];
                unpack4(big, m[j][0]);
                unpack4(small, m[j][1]);
#pragma unroll
                for (int n = 0; n < N; n += 2) {
                    uint32_t b[2][4];
#pragma unroll
                    for (int piece = 0; piece < 2; piece++)
                        ldsm4t(b[piece],
                               saddr(&sm.S[piece][j * 16 + lane % 16][n * 8 + lane / 16 * 8]));
                    two(sum[n], sum[n + 1], big, b[0]);
                    two(low[0][n], low[0][n + 1], small, b[0]);
                    two(low[1][n], low[1][n + 1], big, b[1]);
                }
                fetch(later, j);
            }
        }
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                S[n][e] = sum[n][e] + (low[0][n][e] + low[1][n][e]) + now.h[n][e];
        store(i + 1);
        now = next;
    }
}

/* ---- host ------------------------------------------------------------------------------------ */

template <int K, int V> struct Own {
    static_assert(sizeof(Element<K, V>) == K * (V + K) * sizeof(float), "an element of B_SEG");
    static dp_status run(const Call &c, const OwnArgs &o) {
        TRY(!c.p->bare       ? elements<MADE>(c, o)
            : c.p->d.Kg == 1 ? elements<GIVEN>(c, o)
                             : elements<DECAYED>(c, o));
        return o.message ? DP_OK : starts(c, o.a);
    }
    template <Form FORM> static dp_status elements(const Call &c, OwnArgs o) {
        auto kernel = k_pre_own<K, V, FORM>;
        const int bytes = (int)sizeof(OwnSmem<K, V, FORM>), heads = c.p->npre * c.p->d.HV;
        static_assert(sizeof(OwnSmem<K, V, FORM>) <= 227 * 1024, "a block on 9.0");
        o.halves = K > 64 && 2 * heads <= c.p->device.sms ? 2 : 1;
        return launch(queue_of(c), "k_pre_own", kernel, (unsigned)(heads * o.halves),
                      OWN_THREADS(K / o.halves), bytes, c.p->d, o);
    }
    static dp_status starts(const Call &c, const PreArgs &pre) {
        const dpg_plan *p = c.p;
        const int64_t slices = (int64_t)p->ncut * p->d.HV * (V / 16);
        const bool wide = slices > p->device.sms;
        const StartArgs a = {pre.hm,  pre.s0, at<float>(c, B_SIN), pre.reach, p->d.seq + p->nwhole,
                             p->cuts, p->d.HV};
        auto kernel = wide ? k_starts<K, V, 4> : k_starts<K, V, 2>;
        const size_t bytes = wide ? sizeof(StartSmem<K, 4>) : sizeof(StartSmem<K, 2>);
        return launch(queue_of(c), "k_starts", kernel, (unsigned)(wide ? slices / 2 : slices),
                      2 * K, bytes, a);
    }
};

} // namespace

dp_status fast_pre_own(const Call &c, const PreArgs &a) {
    const Dims &d = c.p->d;
    OwnArgs o = {};
    o.a = a;
    o.message = c.p->N > 1 || c.p->owned;
    if (c.p->bare) {
        TRY(map_rows(c, &o.k_map, ROWS_OF_K, c.t->k, d.H, d.K));
        TRY(map_rows(c, &o.v_map, ROWS_OF_V, c.t->v, d.HV, d.V));
    }
    return by_widths<Own>(c, o);
}
