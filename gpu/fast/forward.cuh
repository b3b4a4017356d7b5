/* gpu/fast/forward.cuh - a forward in one kernel, where whole sequences and heads fill the device.
 * It reads rows once, and writes o and the last states alone.
 *
 * A block has a sequence and head, or 64 columns of one, then the next. A step is 32 tokens, its
 * data a slot of a ring.
 * One warp loads rows and says which tokens of which head they are. Makers compute operands of
 * the states from them. Every other warp has 16 columns of a state:
 *
 *   Z' = S' k'   R' = v' - Z'   X' = R' (T B)'   S' <- decay S' + X' k   o' = S' q' + X' Aqk'
 *
 * Formulas and roundings are those of `bare.cuh` with chunks of 32 tokens. A half of a step without
 * tokens has rows of zeros, and no triangles are made of it. */
#ifndef DPG_FORWARD_CUH
#define DPG_FORWARD_CUH
#include "fast/bare.cuh"
#include "fast/inverse.cuh"
#include "fast/rows.cuh"
#include "fast/state.cuh"
#include "fast/whole.cuh"

#define STEP 32
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
/* Barriers of slots: a step's rows are there; are operands or have their factors; all operands are
 * made; nobody reads them any more. */
struct SlotBars {
    uint64_t loaded[MOST_SLOTS], scaled[MOST_SLOTS], made[MOST_SLOTS], empty[MOST_SLOTS];
    /* By one thread; scaled_by: warps that arrive; columns: warps of columns. */
    __device__ __forceinline__ void init(int depth, int scaled_by, int columns) {
        for (int i = 0; i < depth; i++) {
            bar_init(&loaded[i], FULL_COUNT_16(1));
            bar_init(&scaled[i], EMPTY_COUNT(scaled_by));
            bar_init(&made[i], EMPTY_COUNT(2));
            bar_init(&empty[i], EMPTY_COUNT(columns));
        }
        bar_init_end();
    }
};
/* Rows of a tensor: a step's, or half of them, by one copy of 64 columns. */
struct Mapped {
    const bf16 *x;
    CUtensorMap step, half;
};
struct SingleArgs {
    StateArgs a;
    Mapped k, q, v;
    __device__ __forceinline__ void ask_for_maps() const {
        ask_for_map(k.step);
        ask_for_map(q.step);
        ask_for_map(v.step);
    }
};

/* A kernel's SLOT has K and V, its widths, of the OF columns of a head, and
 *   kq        rows of k over rows of q, ROWS; operands of Z and S q' at last
 *   v         ROWS of 32
 *   HALVES_OF_O                       of 16 tokens, that o passes through shared memory at once
 *   ROOMY                             registers of both halves of an update at once
 *   TB, Aqk   triangles
 *   step      its tokens
 *   await_rows(bars, turn)            waits until kq is such operands
 *   Factors f                         of a lane's tokens, once all operands are made
 *   times_keys(z)                     what kq leaves out of Z'
 *   times_queries(slot, o, lane)      likewise of S' q'
 *   of_update(x, xa, to)              X' as an operand of the update: xa, or made in `to`
 *   update_rows(j)                    the update's other operand, channels 64 j ..
 *   decay(S, y, j)                    S <- decay S + y, the same channels */

/* ---- the warp that loads --------------------------------------------------------------------- */

/* more.load(step, lane) loads what else a step has. Steps without tokens end each role: `ends`. */
template <class SLOT, class MORE> struct Loader {
    static const int K = SLOT::K, V = SLOT::V, PARTS = SLOT::OF / V;
    const Dims &d;
    const SingleArgs &a;
    SlotBars &bars;
    SLOT *slots;
    MORE &more;
    int ends;
    int lane;
    Turn turn;

    /* Rows of W numbers to a tile. The copy engine brings a whole step, or a half of it. */
    template <int W, int ROWS>
    __device__ __forceinline__ void load_step(bf16 *to, const Mapped &from, int x0, int head,
                                              const Step &s, uint64_t *full) {
#pragma unroll
        for (int x = 0; x < W; x += 64)
            fill_tile(to + x * ROWS, from.step, x0 + x, head, s.t0, full, 0);
    }
    template <int W, int ROWS>
    __device__ __forceinline__ void load_half(bf16 *to, int row0, const Mapped &from, int x0,
                                              int width, int heads, int head, const Step &s,
                                              int half, bool whole, uint64_t *full) {
        row0 += half * 16;
        if (whole) {
#pragma unroll 1
            for (int x = 0; x < W; x += 64)
                fill_tile(to + x * ROWS + row0 * 64, from.half, x0 + x, head, s.t0 + half * 16,
                          full, lane);
            return;
        }
        const int PIECES = W / 8, AT_ONCE = 32 / PIECES;
#pragma unroll 2
        for (int i = lane / PIECES; i < 16; i += AT_ONCE) {
            int row = row0 + i, token = half * 16 + i, p = lane % PIECES;
            bool here = token < s.len;
            fill16(to + ((p / 8 * ROWS + row) * 8 + (p % 8 ^ (row & 7))) * 8,
                   from.x + ((s.t0 + (here ? token : 0)) * heads + head) * width + x0 + p * 8,
                   here);
        }
    }
    __device__ __forceinline__ void load(const Step &s) {
        SLOT &slot = slots[turn.slot];
        uint64_t *full = &bars.loaded[turn.slot];
        more.load(s, lane);
        if (turn.round) bar_wait(&bars.empty[turn.slot], (turn.round - 1) & 1);
        int whole = MAPPED_TILES ? max(s.len, 0) / 16 : 0, h = s.hv / d.G;
        const int v0 = blockIdx.x % PARTS * V;
        if (lane == 0) slot.step = s;
        if (whole == 2) {
            if (elected(lane)) {
                fill_begin(full, STEP * (2 * K + V) * 2, 0);
                load_step<K, 2 * STEP>(slot.kq, a.k, 0, h, s, full);
                load_step<K, 2 * STEP>(slot.kq + STEP * 64, a.q, 0, h, s, full);
                load_step<V, STEP>(slot.v, a.v, v0, s.hv, s, full);
            }
            fill16_end(full, lane); /* no lane copies any of these rows */
            return turn.next();
        }
        fill_begin(full, whole * 16 * (2 * K + V) * 2, lane);
#pragma unroll 1
        for (int i = 0; i < 2 && s.len >= 0; i++) {
            bool all = i < whole;
            load_half<K, 2 * STEP>(slot.kq, 0, a.k, 0, K, d.H, h, s, i, all, full);
            load_half<K, 2 * STEP>(slot.kq, STEP, a.q, 0, K, d.H, h, s, i, all, full);
            load_half<V, STEP>(slot.v, 0, a.v, v0, SLOT::OF, d.HV, s.hv, s, i, all, full);
        }
        fill16_end_for_products(full, lane);
        turn.next();
    }
    /* The tokens of 32 heads of the block at once, one a lane. */
    __device__ __forceinline__ void all() {
        const int by = gridDim.x / PARTS;
        for (int item = blockIdx.x / PARTS; item < a.a.heads; item += 32 * by) {
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
        for (int l = 0; l < ends; l++)
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
template <class SLOT> struct Maker {
    static const int K = SLOT::K;
    const Dims &d;
    SlotBars &bars;
    int number, lane; /* of the warps that do the same work */

    /* Calls `make(slot, step, turn, number of the step)` for this warp's step, then `by` on. */
    template <class F>
    __device__ __forceinline__ void each_step(SLOT *slots, int depth, int by, F make) {
        Turn turn(depth);
        for (int n = number, skip = number;; skip = by, n += by) {
            turn.slot += skip;
            turn.round += turn.slot >= depth;
            turn.slot -= turn.slot >= depth ? depth : 0;
            SLOT &slot = slots[turn.slot];
            bar_wait(&bars.loaded[turn.slot], turn.round & 1);
            const Step s = slot.step;
            if (s.len < 0) return;
            make(slot, s, turn, n);
            __syncwarp();
            bar_arrive_warp(&bars.made[turn.slot], lane);
        }
    }
    /* c = 16 rows times 16 rows, at(j) of either: where 16 channels lie. */
    template <class A, class B>
    __device__ __forceinline__ void product(float c[2][4], const A &a, const B &b) const {
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
    /* The first N blocks of rows `left` and `right` on of a tile, side by side. */
    template <int N>
    __device__ __forceinline__ void products(float c[N][2][4], const bf16 *tile, int left,
                                             int right) const {
        const int HALVES = N > 1 ? 2 : 1;
        uint32_t x[HALVES][4], y[HALVES][4];
#pragma unroll
        for (int i = 0; i < N * 8; i++)
            c[i / 8][i / 4 % 2][i % 4] = 0.f;
#pragma unroll
        for (int j = 0; j < K / 16; j++) {
#pragma unroll
            for (int h = 0; h < HALVES; h++) {
                ldsm4(x[h], walk_down(tile, left + 16 * h, lane).at(j));
                ldsm4(y[h], walk_across(tile, right + 16 * h, lane).at(j));
            }
#pragma unroll
            for (int b = 0; b < N; b++)
                two(c[b][0], c[b][1], x[row_of_block(b) / 16], y[column_of_block(b) / 16]);
        }
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
    /* The diagonal of a block of squares. */
    __device__ __forceinline__ void diagonal(const float c[2][4], float *to) const {
        bool odd = lane / 4 % 2;
        if (!KeyNorms::is_here(lane)) return;
        to[lane / 4] = odd ? c[0][1] : c[0][0];
        to[8 + lane / 4] = odd ? c[1][3] : c[1][2];
    }
    /* T of a strictly lower A with rows TS apart, in its place. */
    __device__ __forceinline__ void invert(float *A, int len) const {
        if (len > 16)
            invert_half(A, 0, lane);
        else
            substitute(A + lane / 16 * (16 * TS + 16), lane % 16);
        __syncwarp();
    }
    /* A block of T B. */
    __device__ __forceinline__ void take_TB(float x[2][4], int b, const float *T,
                                            const float *beta) const {
        pairs(b, [&](int half, int n, int s, int i) {
            float2 y = *(const float2 *)(T + s * TS + i), z = *(const float2 *)(beta + i);
            x[n][2 * half] = y.x * z.x;
            x[n][2 * half + 1] = y.y * z.y;
        });
    }
};

/* ---- states ---------------------------------------------------------------------------------- */

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

template <class SLOT> struct Columns {
    static const int K = SLOT::K, V = SLOT::OF; /* of the tensors */
    static const bool ROOMY = SLOT::ROOMY;
    const Dims &d;
    const SingleArgs &a;
    SlotBars &bars;
    bf16 *stage;    /* [16 HALVES_OF_O][16], the warp's */
    int warp, lane; /* of these warps */
    int v0;         /* the warp's first column of the head */

    /* S' rows' of 32 rows. */
    __device__ __forceinline__ void times_step(float z[4][4], const uint32_t sa[K / 16][4],
                                               uint64_t rows) {
#pragma unroll
        for (int j = 0; j < K / 16; j++)
            wg_mul_32<0>(z, sa[j], rows + j / 4 * HALF + j % 4 * 2, j == 0);
        wg_commit();
    }
    /* 64 channels of X' k. */
    __device__ __forceinline__ void times_k(float y[8][4], const uint32_t (*xe)[4], uint64_t rows) {
        wg_mul<1>(y, xe[0], rows, true);
        wg_mul<1>(y, xe[1], rows + HALF / 4, false);
        wg_commit();
    }
    /* Returns the step that follows: its words come while products are made. */
    __device__ __forceinline__ Step step(float S[K / 8][4], const SLOT *slots, const Step &s,
                                         Turn &turn) {
        const int HALVES = K / 64, AT_ONCE = ROOMY ? HALVES : 1;
        const SLOT &slot = slots[turn.slot];
        uint64_t *empty = &bars.empty[turn.slot];
        uint32_t sa[K / 16][4], ra[2][4], xa[2][4], of_update[2][4];
        float z[8][4], x[4][4] = {}, y[AT_ONCE][8][4], (*o)[4] = z + 4; /* S' k', S' q' */
        round_state<K>(sa, S);
        slot.await_rows(bars, turn);
        wg_fence();
        if (ROOMY) {
            times_step(z, sa, rows_desc(slot.kq, 1));
            times_step(o, sa, rows_desc(slot.kq, 1) + HALF / 2);
        } else {
            wg_times_rows<K>(z, sa, rows_desc(slot.kq, 1));
        }
        Walk<STEP> v(slot.v, across_row(lane), across_p(lane));
        ldsm4t(ra[0], v.at(warp, 0));
        ldsm4t(ra[1], v.at(warp, 1));
        bar_wait(&bars.made[turn.slot], turn.round & 1);
        wg_wait<ROOMY>();
        wg_done(z);
        if (!ROOMY) wg_done(o);
        const typename SLOT::Factors f(slot, lane);
        f.times_keys(z);
#pragma unroll
        for (int p = 0; p < 2; p++) {
            take_from(z + 2 * p, ra[p]);
            fragment(ra[p], z[2 * p], z[2 * p + 1]);
        }
        times_lower(x, ra, slot.TB, lane);
#pragma unroll
        for (int p = 0; p < 2; p++)
            fragment(xa[p], x[2 * p], x[2 * p + 1]);
        const uint32_t(*xe)[4] = f.of_update(x, xa, of_update);
        wg_fence();
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
            times_k(y[j], xe, slot.update_rows(j));
        if (ROOMY) {
            wg_wait<AT_ONCE>();
            wg_done(o);
        }
        f.times_queries(slot, o, lane);
        times_lower(o, xa, slot.Aqk, lane);
        wg_wait<AT_ONCE - 1>(y[0]);
        f.decay(slot, S, y[0], 0, lane);
        if (HALVES > AT_ONCE) {
            wg_fence();
            times_k(y[0], xe, slot.update_rows(1));
        }
        turn.next();
        const Step after = next(slots, turn);
        store(o, s);
        if (HALVES > 1) {
            wg_wait<0>(y[AT_ONCE - 1]);
            f.decay(slot, S + K / 8 - 8, y[AT_ONCE - 1], 1, lane);
        }
        __syncwarp();
        bar_arrive_warp(empty, lane);
        return after;
    }
    /* 16 columns of o through shared memory. A barrier of the warp follows. */
    __device__ __forceinline__ void store(float o[4][4], const Step &s) {
        const int AT_ONCE = SLOT::HALVES_OF_O;
        bf16 *to = (bf16 *)a.a.o + ((s.t0 + lane / 2) * d.HV + s.hv) * V + v0 + lane % 2 * 8;
#pragma unroll
        for (int first = 0; first < 2; first += AT_ONCE) {
            if (first) __syncwarp();
#pragma unroll
            for (int n = first; n < first + AT_ONCE; n++) {
                uint32_t r[4];
                fragment(r, o[2 * n], o[2 * n + 1]);
                keep_fragment(stage + n % AT_ONCE * 256, 0, r, lane);
            }
            __syncwarp();
            const bf16 *from = stage + piece_at(C, 0, lane / 2, lane % 2);
            const uint4 upper = *(const uint4 *)from;
            const uint4 lower = *(const uint4 *)(from + (AT_ONCE - 1) * 256);
            if (first * 16 + lane / 2 < s.len) *(uint4 *)(to + first * 16 * d.HV * V) = upper;
            if (AT_ONCE > 1 && 16 + lane / 2 < s.len) *(uint4 *)(to + 16 * d.HV * V) = lower;
        }
    }
    /* The tokens of a slot, once they are loaded. */
    __device__ __forceinline__ Step next(const SLOT *slots, const Turn &turn) {
        bar_wait(&bars.loaded[turn.slot], turn.round & 1);
        return slots[turn.slot].step;
    }
    __device__ __forceinline__ void all(const SLOT *slots) {
        float S[K / 8][4];
        Turn turn(a.a.depth);
        for (Step s = next(slots, turn); s.len >= 0;) {
            const int64_t head = ((int64_t)s.gseq * d.HV + s.hv) * K * V + v0;
            const float *init = a.a.given ? a.a.given + head : NULL;
            each<K / 8>(S, lane, [&](int k, int v, float &y) { y = init ? init[k * V + v] : 0.f; });
            for (bool last = false; !last;) {
                last = s.last;
                s = step(S, slots, s, turn);
            }
            if (!a.a.end) continue;
            each<K / 8>(S, lane, [&](int k, int v, float &y) { a.a.end[head + k * V + v] = y; });
        }
    }
};

/* ---- host ------------------------------------------------------------------------------------ */

static inline dp_status mapped(const Call &c, Mapped *to, MappedRows which, const void *x,
                               int heads, int width) {
    to->x = (const bf16 *)x;
    TRY(map_rows(c, &to->step, which, x, heads, width, STEP));
    return map_rows(c, &to->half, (MappedRows)(which + HALVES), x, heads, width, STEP / 2);
}
static inline dp_status single_args(const Call &c, SingleArgs *a) {
    const Dims &d = c.p->d;
    *a = SingleArgs();
    a->a = forward_args(c);
    TRY(mapped(c, &a->k, ROWS_OF_K, c.t->k, d.H, d.K));
    TRY(mapped(c, &a->q, ROWS_OF_Q, c.t->q, d.H, d.K));
    return mapped(c, &a->v, ROWS_OF_V, c.t->v, d.HV, d.V);
}
/* The first column of a head that a warp of columns has. */
template <class SLOT> __device__ __forceinline__ int first_column(int warp) {
    return blockIdx.x % (SLOT::OF / SLOT::V) * SLOT::V + warp * 16;
}
/* Blocks of a kernel, and bytes of each: as many slots of SLOT as stand behind a SMEM. */
template <class SMEM, class SLOT>
static inline unsigned single_blocks(const Call &c, SingleArgs *a, int *bytes) {
    const size_t rest = (sizeof(SMEM) + STAGES_AT - 1) / STAGES_AT * STAGES_AT;
    a->a.depth = std::min((int)((c.p->device.shared - rest) / sizeof(SLOT)), MOST_SLOTS);
    *bytes = (int)(rest + a->a.depth * sizeof(SLOT));
    return pass_blocks(c.p, &a->a, SLOT::OF / SLOT::V);
}
#endif
