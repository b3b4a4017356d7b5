/* gpu/fast/forward_one.cu - the forward of plans with one gate a head in one kernel, where whole
 * sequences and heads fill the device (fast_is_single). Rows are read once. Only o and the last
 * states are written.
 *
 * A block has a sequence and head, then the next. A step is 32 tokens, its data a slot of a ring:
 *
 *   loader   1 warp                   rows of k, q, v; which tokens of which head
 *   keys     4 warps, a step each     T B as an operand, factors of rows
 *   queries  3 warps, a step each     Aqk likewise
 *   columns  a warp 16 columns of v   Z' = S' k'   R' = v' - of_k o Z'   X' = R' (T B)'
 *                                     S' <- decay S' + (to_end o X') k
 *                                     o' = of_q o S' q' + X' Aqk'
 *
 * Formulas and roundings are those of chunks_one.cu and state_bare.cu with chunks of 32 tokens. A
 * half of a step without tokens has rows of zeros, and no triangles are made of it. */
#include "fast/bare.cuh"
#include "fast/inverse.cuh"
#include "fast/rows.cuh"
#include "fast/state.cuh"
#include "fast/whole.cuh"

namespace {

#define STEP 32
/* Warps of a block by work. */
#define KEY_WARPS 4
#define QUERY_WARPS 3
#define FIRST_COLUMNS (1 + KEY_WARPS + QUERY_WARPS)
#define SINGLE_THREADS(V) ((FIRST_COLUMNS + (V) / 16) * 32)
#define MOST_SLOTS 8

/* Which tokens of a head; are they the last ones of its sequence. len < 0: there are no more
 * steps. */
struct Step {
    int64_t t0;
    int len, hv, gseq, last;
};
/* Blocks (0, 0), (1, 0), (1, 1) of 16 x 16 as operands B': a lane's words together. */
struct Lower {
    uint4 block[3][32];
};
template <int K, int V> struct alignas(1024) Slot {
    bf16 kq[2 * STEP * K]; /* ROWS, k over q */
    bf16 v[STEP * V];      /* ROWS of 32 */
    Lower TB, Aqk;
    float of_k[STEP], to_end[STEP], of_q[STEP], gam[STEP], rk[STEP], decay;
    Step step;
};
struct SingleSmem {
    /* a step's rows are there; gam and rk; all of it; nobody reads it any more */
    uint64_t loaded[MOST_SLOTS], scaled[MOST_SLOTS], made[MOST_SLOTS], empty[MOST_SLOTS];
    float by_row[KEY_WARPS + QUERY_WARPS][2][STEP];      /* of a maker: beta, factors of rows */
    alignas(16) float A[(KEY_WARPS + 1) / 2][STEP * TS]; /* of two makers, side by side; then T */
    alignas(16) bf16 o[8][STEP * 16];
};
struct SingleArgs {
    StateArgs a;
    const bf16 *k, *q, *v;
    CUtensorMap k_map, q_map, v_map;
};

/* ---- the warp that loads --------------------------------------------------------------------- */

template <int K, int V> struct Loader {
    const Dims &d;
    const SingleArgs &a;
    SingleSmem &sm;
    Slot<K, V> *slots;
    int lane;
    Turn turn;

    /* A half of the step's rows of W numbers to a tile, from row `row0` on. The copy engine moves
     * whole halves. */
    template <int W, int ROWS>
    __device__ __forceinline__ void rows(bf16 *to, int row0, const CUtensorMap &map,
                                         const bf16 *from, int heads, int head, const Step &s,
                                         int half, bool whole, uint64_t *full) {
        row0 += half * 16;
        if (whole) {
#pragma unroll 1
            for (int x = 0; x < W; x += 64)
                fill_tile(to + (x / 64 * ROWS + row0) * 64, map, x, head, s.t0 + half * 16, full,
                          lane);
            return;
        }
        const int PIECES = W / 8, AT_ONCE = 32 / PIECES;
#pragma unroll 2
        for (int i = lane / PIECES; i < 16; i += AT_ONCE) {
            int row = row0 + i, token = half * 16 + i, p = lane % PIECES;
            bool here = token < s.len;
            fill16(to + ((p / 8 * ROWS + row) * 8 + (p % 8 ^ (row & 7))) * 8,
                   from + ((s.t0 + (here ? token : 0)) * heads + head) * W + p * 8, here);
        }
    }
    __device__ __forceinline__ void load(const Step &s) {
        Slot<K, V> &slot = slots[turn.slot];
        uint64_t *full = &sm.loaded[turn.slot];
        if (turn.round) bar_wait(&sm.empty[turn.slot], (turn.round - 1) & 1);
        int whole = MAPPED_TILES ? max(s.len, 0) / 16 : 0, h = s.hv / d.G;
        if (lane == 0) slot.step = s;
        fill_begin(full, whole * 16 * (2 * K + V) * 2, lane);
#pragma unroll 1
        for (int half = 0; half < 2 && s.len >= 0; half++) {
            bool all = half < whole;
            rows<K, 2 * STEP>(slot.kq, 0, a.k_map, a.k, d.H, h, s, half, all, full);
            rows<K, 2 * STEP>(slot.kq, STEP, a.q_map, a.q, d.H, h, s, half, all, full);
            rows<V, STEP>(slot.v, 0, a.v_map, a.v, d.HV, s.hv, s, half, all, full);
        }
        fill16_end_for_products(full, lane);
        turn.next();
    }
    /* The tokens of 32 heads of the block at once, one a lane. */
    __device__ __forceinline__ void all() {
        const int by = gridDim.x;
        for (int item = blockIdx.x; item < a.a.heads; item += 32 * by) {
            int mine = min(item + lane * by, a.a.heads - 1);
            Seq seq = d.seq[a.a.seq0 + mine / d.HV];
            Chunk last = d.chunk[seq.c1 - 1];
            int64_t t0 = d.chunk[seq.c0].t0;
            int len = (int)(last.t0 + last.len - t0);
            for (int l = 0; l < 32 && item + l * by < a.a.heads; l++) {
                Step s;
                s.t0 = ((int64_t)__shfl_sync(~0u, (int)(t0 >> 32), l) << 32) |
                       (uint32_t)__shfl_sync(~0u, (int)t0, l);
                s.gseq = __shfl_sync(~0u, seq.gseq, l);
                s.hv = (item + l * by) % d.HV;
                int left = __shfl_sync(~0u, len, l);
                for (; left > 0; left -= STEP, s.t0 += STEP) {
                    s.len = min(left, STEP);
                    s.last = left <= STEP;
                    load(s);
                }
            }
        }
#pragma unroll 1
        for (int l = 0; l < KEY_WARPS; l++)
            load(Step{0, -1, 0, 0, 0});
    }
};

/* ---- makers ---------------------------------------------------------------------------------- */

/* Blocks (0, 0), (1, 0), (1, 1) of 16 x 16, in loops that are never unrolled. The code of all warps
 * must fit the instruction cache. */
__device__ __forceinline__ int row_of_block(int b) { return (b + 1) / 2 * 16; }
__device__ __forceinline__ int column_of_block(int b) { return b / 2 * 16; }
#define EACH_BLOCK(b, len) _Pragma("unroll 1") for (int b = 0; b < ((len) > 16 ? 3 : 1); b++)

/* Data and steps that keys and queries share. */
template <int K, int V> struct Maker {
    const Dims &d;
    SingleSmem &sm;
    int number, lane;

    /* make(slot, step) of every `by`th step from the `first` on. */
    template <class F>
    __device__ __forceinline__ void each_step(Slot<K, V> *slots, int depth, int first, int by,
                                              F make) {
        Turn turn(depth);
        for (int skip = first;; skip = by) {
            turn.slot += skip;
            turn.round += turn.slot >= depth;
            turn.slot -= turn.slot >= depth ? depth : 0;
            Slot<K, V> &slot = slots[turn.slot];
            bar_wait(&sm.loaded[turn.slot], turn.round & 1);
            const Step s = slot.step;
            if (s.len < 0) return;
            make(slot, s, turn);
            __syncwarp();
            bar_arrive_warp(&sm.made[turn.slot], lane);
        }
    }
    /* c = rows from a0 on times rows from b0 on, 16 each. */
    __device__ __forceinline__ void product(float c[2][4], const bf16 *kq, int a0, int b0) const {
        Walk<> a = walk_down(kq, a0, lane), b = walk_across(kq, b0, lane);
#pragma unroll
        for (int i = 0; i < 8; i++)
            c[i / 4][i % 4] = 0.f;
#pragma unroll
        for (int j = 0; j < K / 16; j++) {
            uint32_t x[4], y[4];
            ldsm4(x, a.at(j));
            ldsm4(y, b.at(j));
            two(c[0], c[1], x, y);
        }
    }
    __device__ __forceinline__ float norm(float square) const {
        return d.l2norm ? rsqrtf(square + (float)DP_L2_EPS) : 1.f;
    }
    /* f(half, n, row, column) of a lane's pairs of a block. */
    template <class F> __device__ __forceinline__ void pairs(int b, F f) const {
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int n = 0; n < 2; n++)
                f(half, n, row_of_block(b) + half * 8 + lane / 4,
                  column_of_block(b) + n * 8 + lane % 4 * 2);
    }
    /* Norms of the columns and decay to the row. */
    __device__ __forceinline__ float2 decays(const Slot<K, V> &slot, int s, int i) const {
        float2 g = *(const float2 *)(slot.gam + i), rk = *(const float2 *)(slot.rk + i);
        float gam = slot.gam[s];
        return make_float2(rk.x * ex2(fminf(gam - g.x, 0.f)), rk.y * ex2(fminf(gam - g.y, 0.f)));
    }
    /* A block as B', nothing right of the diagonal. */
    __device__ __forceinline__ void keep(Lower &to, int b, float x[2][4]) const {
        pairs(b, [&](int half, int n, int s, int i) {
            if (i > s) x[n][2 * half] = 0.f;
            if (i + 1 > s) x[n][2 * half + 1] = 0.f;
        });
        to.block[b][lane] = make_uint4(pack2(x[0][0], x[0][1]), pack2(x[1][0], x[1][1]),
                                       pack2(x[0][2], x[0][3]), pack2(x[1][2], x[1][3]));
    }
    __device__ __forceinline__ void no_second_half(Lower &to, int len) const {
        if (len <= 16) to.block[1][lane] = to.block[2][lane] = make_uint4(0, 0, 0, 0);
    }
};

template <int K, int V> struct Keys : Maker<K, V> {
    typedef Slot<K, V> S;
    using Maker<K, V>::d;
    using Maker<K, V>::sm;
    using Maker<K, V>::number;
    using Maker<K, V>::lane;
    const dpg_tensors &t;
    __device__ __forceinline__ Keys(const Dims &d, const dpg_tensors &t, SingleSmem &sm, int number,
                                    int lane)
        : Maker<K, V>{d, sm, number, lane}, t(t) {}

    /* Gates and beta of the step's rows, a row a lane, as they stand in memory. */
    struct Raw {
        RawWord g, beta;
        uint32_t A_log, bias;
    };
    __device__ __forceinline__ Raw ask(const Step &s) const {
        Raw x;
        int64_t at = (s.t0 + (lane < s.len ? lane : 0)) * d.HV + s.hv;
        x.g.load(t.g, at, d.g_bf16);
        x.beta.load(t.beta, at, d.g_bf16);
        x.A_log = param_word(t.A_log, s.hv, d.A_type);
        x.bias = param_word(t.dt_bias, s.hv, d.bias_type);
        return x;
    }
    /* Factors of rows, a row a lane. */
    __device__ __forceinline__ void factors(S &slot, const Raw &x, int len, float square) {
        float a = expf(param_value(x.A_log, d.A_type)), b = param_value(x.bias, d.bias_type);
        float raw = x.g.get(d.g_bf16), beta = x.beta.get(d.g_bf16);
        float gam = lane < len ? gate_floor(gate_value(d, raw, a, b)) * LOG2E : 0.f;
#pragma unroll
        for (int m = 1; m < 32; m *= 2) {
            float y = __shfl_up_sync(~0u, gam, m);
            if (lane >= m) gam += y;
        }
        float all = __shfl_sync(~0u, gam, 31), rk = this->norm(square);
        beta = lane < len ? beta_value(d, beta) : 0.f;
        slot.gam[lane] = gam;
        slot.rk[lane] = rk;
        slot.of_k[lane] = rk * ex2(gam);
        slot.to_end[lane] = rk * ex2(all - gam);
        if (lane == 0) slot.decay = ex2(all);
        sm.by_row[number][0][lane] = beta;
        sm.by_row[number][1][lane] = beta * rk;
    }
    __device__ __forceinline__ void make(S &slot, const Step &s, const Turn &turn) {
        const float *beta = sm.by_row[number][0], *left = sm.by_row[number][1];
        float *A = sm.A[number / 2] + number % 2 * STEP;
        Raw raw = ask(s);
        EACH_BLOCK(b, s.len) {
            float c[2][4];
            this->product(c, slot.kq, row_of_block(b), column_of_block(b));
            this->pairs(b, [&](int half, int n, int s, int i) {
                *(float2 *)(A + s * TS + i) = make_float2(c[n][2 * half], c[n][2 * half + 1]);
            });
        }
        __syncwarp();
        factors(slot, raw, s.len, lane < 16 || s.len > 16 ? A[lane * TS + lane] : 0.f);
        __syncwarp();
        bar_arrive_warp(&sm.scaled[turn.slot], lane);
        EACH_BLOCK(b, s.len)
        this->pairs(b, [&](int, int, int s, int i) {
            float2 f = this->decays(slot, s, i), &x = *(float2 *)(A + s * TS + i);
            x = make_float2(i >= s ? 0.f : x.x * (left[s] * f.x),
                            i + 1 >= s ? 0.f : x.y * (left[s] * f.y));
        });
        __syncwarp();
        if (s.len > 16)
            invert_half(A, 0, lane);
        else
            substitute(A + lane / 16 * (16 * TS + 16), lane % 16);
        __syncwarp();
        EACH_BLOCK(b, s.len) {
            float x[2][4];
            this->pairs(b, [&](int half, int n, int s, int i) {
                float2 y = *(const float2 *)(A + s * TS + i), z = *(const float2 *)(beta + i);
                x[n][2 * half] = y.x * z.x;
                x[n][2 * half + 1] = y.y * z.y;
            });
            this->keep(slot.TB, b, x);
        }
        this->no_second_half(slot.TB, s.len);
    }
};

template <int K, int V> struct Queries : Maker<K, V> {
    typedef Slot<K, V> S;
    using Maker<K, V>::d;
    using Maker<K, V>::sm;
    using Maker<K, V>::number;
    using Maker<K, V>::lane;
    __device__ __forceinline__ Queries(const Dims &d, SingleSmem &sm, int number, int lane)
        : Maker<K, V>{d, sm, number, lane} {}

    __device__ __forceinline__ void make(S &slot, const Step &s, const Turn &turn) {
        float *left = sm.by_row[KEY_WARPS + number][0];
#pragma unroll 1
        for (int row0 = 0; row0 < STEP; row0 += 16) {
            float c[2][4];
            this->product(c, slot.kq, STEP + row0, STEP + row0);
            if (!KeyNorms::is_here(lane)) continue;
            bool odd = lane / 4 % 2;
            left[row0 + lane / 4] = odd ? c[0][1] : c[0][0];
            left[row0 + 8 + lane / 4] = odd ? c[1][3] : c[1][2];
        }
        __syncwarp();
        bar_wait(&sm.scaled[turn.slot], turn.round & 1);
        float rq = d.scale * this->norm(left[lane]);
        slot.of_q[lane] = rq * ex2(slot.gam[lane]);
        left[lane] = rq;
        __syncwarp();
        EACH_BLOCK(b, s.len) {
            float c[2][4];
            this->product(c, slot.kq, STEP + row_of_block(b), column_of_block(b));
            this->pairs(b, [&](int half, int n, int s, int i) {
                float2 f = this->decays(slot, s, i);
                c[n][2 * half] *= left[s] * f.x;
                c[n][2 * half + 1] *= left[s] * f.y;
            });
            this->keep(slot.Aqk, b, c);
        }
        this->no_second_half(slot.Aqk, s.len);
    }
};

/* ---- states ---------------------------------------------------------------------------------- */

/* Factors of a lane's tokens of 32, which are columns of X'. */
__device__ __forceinline__ void times_tokens(float x[4][4], const float *f, int lane) {
#pragma unroll
    for (int n = 0; n < 4; n++) {
        float2 y = *(const float2 *)(f + n * 8 + lane % 4 * 2);
#pragma unroll
        for (int e = 0; e < 4; e++)
            x[n][e] *= e % 2 ? y.y : y.x;
    }
}
/* x' += a' B' of a lower triangle. */
__device__ __forceinline__ void times_lower(float x[4][4], const uint32_t a[2][4], const Lower &b,
                                            int lane) {
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int p = 0; p <= n; p++) {
            uint32_t r[4];
            unpack4(r, b.block[n + p][lane]);
            two(x[2 * n], x[2 * n + 1], a[p], r);
        }
}

template <int K, int V> struct Columns {
    const Dims &d;
    const SingleArgs &a;
    SingleSmem &sm;
    int warp, lane; /* of these warps */

    /* 64 channels of S <- decay S + (to_end o X') k. */
    __device__ __forceinline__ void times_k(float y[8][4], const uint32_t xe[2][4], const bf16 *k,
                                            int j) {
        uint64_t rows = rows_desc(k, 64) + j * HALF;
        wg_fence();
        wg_mul<1>(y, xe[0], rows, true);
        wg_mul<1>(y, xe[1], rows + HALF / 4, false);
        wg_commit();
    }
    __device__ __forceinline__ void update(float (*S)[4], float y[8][4], float decay) {
        wg_wait<0>(y);
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                S[n][e] = fmaf(decay, S[n][e], y[n][e]);
    }
    __device__ __forceinline__ void step(float S[K / 8][4], const Slot<K, V> &slot, const Step &s,
                                         const Turn &turn) {
        uint32_t sa[K / 16][4], ra[2][4], xa[2][4], xe[2][4];
        float z[8][4], x[4][4] = {}, y[8][4], (*o)[4] = z + 4; /* S' k', S' q' */
        round_state<K>(sa, S);
        wg_fence();
        wg_times_rows<K>(z, sa, rows_desc(slot.kq, 1));
        Walk<STEP> v(slot.v, across_row(lane), across_p(lane));
        ldsm4t(ra[0], v.at(warp, 0));
        ldsm4t(ra[1], v.at(warp, 1));
        bar_wait(&sm.made[turn.slot], turn.round & 1);
        float decay = FAULT(BARE_DECAY) ? 1.f : slot.decay;
        wg_wait<0>(z);
        times_tokens(z, slot.of_k, lane);
#pragma unroll
        for (int p = 0; p < 2; p++) {
            take_from(z + 2 * p, ra[p]);
            fragment(ra[p], z[2 * p], z[2 * p + 1]);
        }
        times_lower(x, ra, slot.TB, lane);
#pragma unroll
        for (int p = 0; p < 2; p++)
            fragment(xa[p], x[2 * p], x[2 * p + 1]);
        times_tokens(x, slot.to_end, lane);
#pragma unroll
        for (int p = 0; p < 2; p++)
            fragment(xe[p], x[2 * p], x[2 * p + 1]);
        times_k(y, xe, slot.kq, 0);
        times_tokens(o, slot.of_q, lane);
        times_lower(o, xa, slot.Aqk, lane);
        update(S, y, decay);
        if (K > 64) times_k(y, xe, slot.kq, 1);
        store(o, s);
        if (K > 64) update(S + K / 8 - 8, y, decay);
        __syncwarp();
        bar_arrive_warp(&sm.empty[turn.slot], lane);
    }
    /* 16 columns of o through shared memory. */
    __device__ __forceinline__ void store(float o[4][4], const Step &s) {
        bf16 *stage = sm.o[warp];
#pragma unroll
        for (int n = 0; n < 2; n++) {
            uint32_t r[4];
            fragment(r, o[2 * n], o[2 * n + 1]);
            keep_fragment(stage, 16 * n, r, lane);
        }
        __syncwarp();
        int row = lane / 2, piece = lane % 2;
        bf16 *to = (bf16 *)a.a.o + ((s.t0 + row) * d.HV + s.hv) * V + warp * 16 + piece * 8;
        if (row < s.len) *(uint4 *)to = *(const uint4 *)(stage + piece_at(C, 0, row, piece));
        row += 16;
        to += 16 * d.HV * V;
        if (row < s.len) *(uint4 *)to = *(const uint4 *)(stage + piece_at(C, 0, row, piece));
        __syncwarp();
    }
    /* The tokens of a slot, once they are loaded. */
    __device__ __forceinline__ Step next(const Slot<K, V> *slots, const Turn &turn) {
        bar_wait(&sm.loaded[turn.slot], turn.round & 1);
        return slots[turn.slot].step;
    }
    __device__ __forceinline__ void all(const Slot<K, V> *slots) {
        const int v0 = warp * 16;
        float S[K / 8][4];
        Turn turn(a.a.depth);
        for (Step s = next(slots, turn); s.len >= 0; s = next(slots, turn)) {
            const int64_t head = ((int64_t)s.gseq * d.HV + s.hv) * K * V + v0;
            const float *init = a.a.given ? a.a.given + head : NULL;
            each<K / 8>(S, lane, [&](int k, int v, float &y) { y = init ? init[k * V + v] : 0.f; });
            for (;; s = next(slots, turn)) {
                step(S, slots[turn.slot], s, turn);
                turn.next();
                if (s.last) break;
            }
            if (!a.a.end) continue;
            each<K / 8>(S, lane, [&](int k, int v, float &y) { a.a.end[head + k * V + v] = y; });
        }
    }
};

template <int K, int V>
__global__ void __launch_bounds__(SINGLE_THREADS(V), 1)
    k_forward_one(const __grid_constant__ Dims d, const __grid_constant__ dpg_tensors t,
                  const __grid_constant__ SingleArgs a) {
    extern __shared__ __align__(1024) char raw[];
    SingleSmem &sm = *(SingleSmem *)raw;
    auto *slots = stages_behind<Slot<K, V>>(raw, sm);
    const int depth = a.a.depth;
    int warp = threadIdx.x / 32, lane = kept_lane();
    if (threadIdx.x == 0) {
        for (int i = 0; i < depth; i++) {
            bar_init(&sm.loaded[i], FULL_COUNT_16(1));
            bar_init(&sm.scaled[i], EMPTY_COUNT(1));
            bar_init(&sm.made[i], EMPTY_COUNT(2));
            bar_init(&sm.empty[i], EMPTY_COUNT(V / 16));
        }
        bar_init_end();
    }
    __syncthreads();
    if (warp >= FIRST_COLUMNS) {
        if (V > 64) take_registers<152>();
        Columns<K, V> x = {d, a, sm, warp - FIRST_COLUMNS, lane};
        return x.all(slots);
    }
    if (V > 64) give_registers<104>();
    if (warp == 0) {
        Loader<K, V> x = {d, a, sm, slots, lane, Turn(depth)};
        x.all();
    } else if (warp <= KEY_WARPS) {
        Keys<K, V> x(d, t, sm, warp - 1, lane);
        x.each_step(slots, depth, warp - 1, KEY_WARPS,
                    [&](auto &slot, const Step &s, const Turn &turn) { x.make(slot, s, turn); });
    } else {
        Queries<K, V> x(d, sm, warp - 1 - KEY_WARPS, lane);
        x.each_step(slots, depth, warp - 1 - KEY_WARPS, QUERY_WARPS,
                    [&](auto &slot, const Step &s, const Turn &turn) { x.make(slot, s, turn); });
    }
}

template <int K, int V> struct Single {
    static dp_status run(const Call &c, SingleArgs a) {
        const size_t slot = sizeof(Slot<K, V>), rest = (sizeof(SingleSmem) + 1023) / 1024 * 1024;
        a.a.depth = std::min((int)((c.p->device.shared - rest) / slot), MOST_SLOTS);
        int bytes = (int)(rest + a.a.depth * slot);
        unsigned blocks = pass_blocks(c.p, &a.a, 1);
        CK(c.e, allow_shared(k_forward_one<K, V>, bytes));
        k_forward_one<K, V><<<blocks, SINGLE_THREADS(V), bytes, c.s>>>(c.p->d, *c.t, a);
        CK_LAUNCH(c.e, "k_forward_one");
        return DP_OK;
    }
};

} // namespace

dp_status fast_forward_one(const Call &c) {
    FAULT_TO_DEVICE(c.e, c.s);
    SingleArgs a = {};
    a.a = forward_args(c);
    a.k = (const bf16 *)c.t->k;
    a.q = (const bf16 *)c.t->q;
    a.v = (const bf16 *)c.t->v;
    const Dims &d = c.p->d;
    TRY(map_rows(c, &a.k_map, ROWS_OF_K, c.t->k, d.H, d.K, 16));
    TRY(map_rows(c, &a.q_map, ROWS_OF_Q, c.t->q, d.H, d.K, 16));
    TRY(map_rows(c, &a.v_map, ROWS_OF_V, c.t->v, d.HV, d.V, 16));
    return by_widths<Single>(c, a);
}
