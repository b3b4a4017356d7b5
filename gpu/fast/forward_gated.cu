/* gpu/fast/forward_gated.cu - the forward of plans with a gate a channel in one kernel
 * (fast/forward.cuh). Its makers:
 *
 *   rows      4 warps, 8 rows each     decayed rows of k and q, operands of triangles
 *   keys      2 warps, a step each     norms of rows; T B
 *   queries   1 warp                   Aqk
 *
 * Gates have a ring of their own. Rows of gates become sums, then operands (Gates). With gam from
 * the step's start, a the gate at row 16, n at the step's end, a slot and its gates hold
 *
 *   kq   k, q exp(gam)                   kg   k exp(n - gam)
 *   rows 0 ..    k exp(-gam)             k exp(a - gam)
 *   rows 16 ..   k, q exp(gam - a)       near: k exp(a - gam)
 *
 * Block (1, 0) of a triangle has factors <= 1. Both others are anchored before their first row, or
 * at it. From the first row on that lies too far below its anchor (`first_far`) sums are pairwise,
 * in fp32. So o of a token has the same bits whatever comes after it. */
#include "fast/forward.cuh"
#include "fault.cuh"

namespace {

#define ROW_WARPS 4
#define EACH (STEP / ROW_WARPS) /* rows of a warp */
#define KEY_WARPS 2
#define FIRST_COLUMNS (1 + ROW_WARPS + KEY_WARPS + 1)
#define GATED_THREADS(V) ((FIRST_COLUMNS + (V) / 16) * 32)
#define ROWS_BARRIER 1
#define GATE_STEPS 3

template <int KEYS, int VALUES> struct alignas(1024) Slot {
    static const int K = KEYS, V = VALUES, OF = V, HALVES_OF_O = 1;
    static const bool ROOMY = false;
    bf16 kq[2 * STEP * K], kg[STEP * K], v[STEP * V];
    Lower TB, Aqk;
    float all[K];       /* the step's decay */
    float2 norm[STEP];  /* of rows of k; of q, times scale */
    float own[STEP];    /* q k' of a row */
    int far[ROW_WARPS]; /* bits: does row EACH w + i lie too far below its anchor */
    Step step;

    __device__ __forceinline__ void await_rows(SlotBars &bars, const Turn &turn) const {
        bar_wait(&bars.scaled[turn.slot], turn.round & 1);
    }
    struct Factors { /* kq has them */
        __device__ __forceinline__ Factors(const Slot &, int) {}
        __device__ __forceinline__ void times_keys(float (*)[4]) const {}
        __device__ __forceinline__ void times_queries(const Slot &, float (*)[4], int) const {}
        __device__ __forceinline__ const uint32_t (*of_update(float (*)[4], const uint32_t (*xa)[4],
                                                              uint32_t (*)[4]) const)[4] {
            return xa;
        }
        __device__ __forceinline__ void decay(const Slot &slot, float (*S)[4], const float y[8][4],
                                              int j, int lane) const {
            float2 e[8];
            take_decays<8>(e, slot.all + j * 64, lane);
#pragma unroll
            for (int n = 0; n < 8 && FAULT(BARE_DECAY); n++)
                e[n] = make_float2(1.f, 1.f);
            decay_and_add<8>(S, y, e);
        }
    };
    __device__ __forceinline__ uint64_t update_rows(int j) const {
        return rows_desc(kg, 64) + j * (HALF / 2);
    }
    __device__ __forceinline__ bool any_far() const {
        return first_far(0) < 16 || first_far(1) < 16;
    }
    /* Row of 16 of block b from which on sums are pairwise; 16: none. */
    __device__ __forceinline__ int first_far(int b) const {
        const int *of = far + b * ROW_WARPS / 2;
        int bits = 0;
#pragma unroll
        for (int w = 0; w < ROW_WARPS / 2; w++)
            bits |= of[w] << w * EACH;
        int first = bits ? 0 : 16;
        while (first < 16 && !(bits >> first & 1))
            first++;
        return first;
    }
};

/* Gates of a step: raw, then sums of a warp's rows, fp32; then in each row two rows of operands. */
template <int K> struct alignas(128) Gates {
    float row[STEP][K];
    bf16 near[16 * K]; /* ROWS of 16 */
    Step step;
    /* Rows of bf16 come to the second halves. */
    __device__ __forceinline__ const bf16 *raw(int r) const { return (const bf16 *)row[r] + K; }
};
/* The lane's row of such an operand, or of rows of 16; as Walk. */
struct Apart {
    uint32_t a, half;
    template <int K>
    static __device__ __forceinline__ Apart of(const Gates<K> &g, int x, int row, int p) {
        return Apart{saddr((const bf16 *)g.row[row] + x * K) + ((p ^ (row & 7)) << 4), 128};
    }
    template <int K>
    static __device__ __forceinline__ Apart near(const Gates<K> &g, int row, int p) {
        return Apart{saddr(g.near) + row * 128 + ((p ^ (row & 7)) << 4), 16 * 128};
    }
    static __device__ __forceinline__ Apart rows(const bf16 *kq, int row, int p) {
        return Apart{saddr(kq) + row * 128 + ((p ^ (row & 7)) << 4), C * 128};
    }
    __device__ __forceinline__ uint32_t at(int j) const { return (a ^ j % 4 * 32) + j / 4 * half; }
};

template <int K> struct SingleSmem {
    SlotBars bars;
    alignas(16) bf16 o[8][16 * 16];
    uint64_t full[GATE_STEPS], empty[GATE_STEPS]; /* of gates */
    uint64_t normed[MOST_SLOTS];
    float beta[KEY_WARPS][STEP];
    float far[16][16];              /* of queries */
    float total[2][ROW_WARPS][K];   /* gates of a warp's rows, of every other step */
    float first[2][K];              /* at row 16 */
    alignas(16) float A[STEP * TS]; /* of two keys, side by side; then T */
    Gates<K> gates[GATE_STEPS];
};

/* The warp that loads brings gates, too. */
template <int K> struct GateLoader {
    const Dims &d;
    const void *g;
    SingleSmem<K> &sm;
    Turn turn;

    /* PIECES of 16 bytes a row; those of bf16 to the second half. */
    template <int PIECES, class T>
    __device__ __forceinline__ void rows(const T *g, Gates<K> &to, const Step &s, int lane) const {
        const int AT_ONCE = 32 / PIECES;
        const T *from = g + ((s.t0 + lane / PIECES) * d.HV + s.hv) * K;
        char *place = (char *)to.row[lane / PIECES] + K * (4 - (int)sizeof(T));
#pragma unroll 4
        for (int i = 0; i < s.len; i += AT_ONCE)
            fill16(place + i * K * 4 + lane % PIECES * 16,
                   from + (int64_t)i * d.HV * K + lane % PIECES * (16 / (int)sizeof(T)),
                   i + lane / PIECES < s.len);
    }
    __device__ __forceinline__ void load(const Step &s, int lane) {
        Gates<K> &to = sm.gates[turn.slot];
        uint64_t *full = &sm.full[turn.slot];
        if (turn.round) bar_wait(&sm.empty[turn.slot], (turn.round - 1) & 1);
        if (lane == 0) to.step = s;
        fill_begin(full, 0, lane);
        if (d.g_bf16)
            rows<K / 8>((const bf16 *)g, to, s, lane);
        else
            rows<K / 4>((const float *)g, to, s, lane);
        fill16_end(full, lane);
        turn.next();
    }
};

/* ---- rows ------------------------------------------------------------------------------------ */

/* E channels of fp32. */
template <int E> __device__ __forceinline__ void load_sums(float y[E], const float *x) {
    if (E == 4)
        *(float4 *)y = *(const float4 *)x;
    else
        load_words<E>(y, x);
}

/* A warp's EACH rows; a lane has K / 32 channels of each. */
template <class SLOT> struct Rows {
    static const int K = SLOT::K, E = K / 32;
    const Dims &d;
    const dpg_tensors &t;
    SingleSmem<K> &sm;
    int warp, lane;

    __device__ __forceinline__ int ch() const { return lane * E; }
    __device__ __forceinline__ int row0() const { return warp * EACH; }

    /* Sums of gates from the warp's first row on, log2 units. Rows behind the end add nothing. */
    template <int GATE>
    __device__ __forceinline__ void sum(Gates<K> &g, const GateOf<E> &of, int len, float run[E],
                                        float least[E]) const {
        float a = expf(param_value(of.A_log, d.A_type)), lower = d.lower_bound * LOG2E, bias[E];
#pragma unroll
        for (int e = 0; e < E; e++)
            bias[e] = param_value(of.bias[e], d.bias_type) * LOG2E;
#pragma unroll 1
        for (int i = 0; i < EACH; i++) {
            int r = row0() + i;
            float raw[E];
            if (d.g_bf16)
                load_values<E>(raw, g.raw(r) + ch(), 0, true);
            else
                load_sums<E>(raw, g.row[r] + ch());
#pragma unroll
            for (int e = 0; e < E; e++) {
                float x = gate_fast<GATE>(raw[e], a, bias[e], lower);
                run[e] += r < len ? x : 0.f;
            }
            __syncwarp();
            put_sums(g.row[r] + ch(), run);
#pragma unroll
            for (int e = 0; e < E && GATE == DP_GATE_LOG; e++) /* they may be positive */
                least[e] = fminf(least[e], run[e]);
        }
#pragma unroll
        for (int e = 0; e < E && GATE != DP_GATE_LOG; e++)
            least[e] = run[e];
    }
    static __device__ __forceinline__ void put_sums(float *to, const float x[E]) {
        if (E == 4)
            *(float4 *)to = make_float4(x[0], x[1], x[2], x[3]);
        else
            put_words<E>(to, x);
    }
    __device__ __forceinline__ void sums(Gates<K> &g, const GateOf<E> &of, const Step &s, int odd,
                                         float least[E]) const {
        float run[E] = {};
        if (d.gate == DP_GATE_LOG)
            sum<DP_GATE_LOG>(g, of, s.len, run, least);
        else if (d.gate == DP_GATE_SOFTPLUS)
            sum<DP_GATE_SOFTPLUS>(g, of, s.len, run, least);
        else
            sum<DP_GATE_LOWER_BOUND>(g, of, s.len, run, least);
        put_sums(sm.total[odd][warp] + ch(), run);
        if (warp != ROW_WARPS / 2) return;
        load_sums<E>(run, g.row[row0()] + ch());
        put_sums(sm.first[odd] + ch(), run);
    }

    /* A lane's factors of its channels, the same in all rows; gates in log2 units. */
    struct Factors {
        float here[E];     /* gate from the block's anchor to the row before the warp's */
        float next[E];     /* from that row to row 16 (block 0), to the end (block 1) */
        float to_end[E];   /* block 0: decay from row 16 to the end; else 1 */
        float to_start[E]; /* block 1: decay from the start to row 16; else 1 */
    };
    /* sum += gates of warps from .. to - 1. */
    __device__ __forceinline__ void add_totals(float sum[E], int odd, int from, int to) const {
#pragma unroll
        for (int w = 0; w < ROW_WARPS; w++) {
            float x[E];
            if (w < from || w >= to) continue;
            load_sums<E>(x, sm.total[odd][w] + ch());
#pragma unroll
            for (int e = 0; e < E; e++)
                sum[e] += x[e];
        }
    }
    __device__ __forceinline__ Factors factors(SLOT &slot, int odd) const {
        const int HALF_OF = ROW_WARPS / 2;
        const bool second = warp >= HALF_OF;
        float first[E], other[E] = {}, all[E];
        Factors f = {};
        load_sums<E>(first, sm.first[odd] + ch());
        add_totals(f.here, odd, second ? HALF_OF : 0, warp);
        add_totals(f.next, odd, warp, second ? ROW_WARPS : HALF_OF);
        add_totals(other, odd, second ? 0 : HALF_OF, second ? HALF_OF : ROW_WARPS);
#pragma unroll
        for (int e = 0; e < E; e++) {
            all[e] = ex2(f.next[e] + other[e]);
            float by = ex2(second ? other[e] + first[e] : other[e] - first[e]);
            f.to_start[e] = second ? by : 1.f;
            f.to_end[e] = second ? 1.f : by;
            f.here[e] -= second ? first[e] : 0.f;
            f.next[e] += second ? 0.f : first[e];
        }
        if (warp == 0) put_sums(slot.all + ch(), all);
        return f;
    }
    /* Where the lane's channels of the warp's first row lie, bytes from the start of shared memory;
     * those of row i: at(). */
    struct Places {
        unsigned k, kg, near, operand, sums;
    };
    __device__ __forceinline__ Places places(const SLOT &slot, const Gates<K> &g) const {
        const int x = ch() / 8 % 8 ^ (row0() & 7), inside = x * 16 + ch() % 8 * 2, half = ch() / 64;
        auto from = [&](const void *p) { return (unsigned)((const char *)p - (const char *)&sm); };
        return Places{from(slot.kq) + (half * C + row0()) * 128 + inside,
                      from(slot.kg) + (half * STEP + row0()) * 128 + inside,
                      from(g.near) + (half * 16 + row0() - 16) * 128 + inside,
                      from(g.row[row0()]) + half * 128 + inside, from(g.row[row0()] + ch())};
    }
    __device__ __forceinline__ bf16 *at(unsigned place, int i, int row) const {
        return (bf16 *)((char *)&sm + ((place ^ i * 16) + i * row));
    }
    __device__ __forceinline__ const float *sums_at(const Places &at, int i) const {
        return (const float *)((const char *)&sm + (at.sums + i * K * 4));
    }
    /* A row of a lane's channels. */
    struct Row {
        float gam[E], k[E], q[E];
        float2 norm;
    };
    __device__ __forceinline__ Row load(const SLOT &slot, const Places &p, int i) const {
        Row x;
        const bf16 *k = at(p.k, i, 128);
        load_sums<E>(x.gam, sums_at(p, i));
        load_values<E>(x.k, k, 0, true);
        load_values<E>(x.q, k + STEP * 64, 0, true);
        x.norm = slot.norm[row0() + i];
        return x;
    }
    /* Row i of the warp's, in place of what it is made of. SLOW: some factor is too large or too
     * small to be made from another one. One piece of code for both blocks, since that of all warps
     * must fit the instruction cache. */
    template <bool SLOW>
    __device__ __forceinline__ void decay(const Places &p, const Factors &f, Row x, int i) const {
        const bool second = warp >= ROW_WARPS / 2;
        float down[E], up[E], on[E], other[E];
#pragma unroll
        for (int e = 0; e < E; e++) {
            float gam = x.gam[e] + f.here[e];
            x.k[e] *= x.norm.x;
            down[e] = ex2(gam);
            x.q[e] *= x.norm.y * down[e];
            down[e] *= x.k[e];
            up[e] = x.k[e] * ex2(-gam);
            on[e] = SLOW ? x.k[e] * ex2(f.next[e] - x.gam[e]) : up[e] * f.next[e];
            other[e] = second ? x.q[e] : on[e];
        }
        bf16 *k = at(p.k, i, 128), *operand = at(p.operand, i, K * 4);
        store<E>(k, down, f.to_start);
        store<E>(k + STEP * 64, x.q, f.to_start);
        store<E>(second ? at(p.near, i, 128) : operand, up);
        if (second) store<E>(operand, down);
        store<E>(operand + K, other);
        store<E>(at(p.kg, i, 128), on, f.to_end);
    }
    template <bool SLOW>
    __device__ __forceinline__ void decay_all(const SLOT &slot, const Places &at,
                                              const Factors &f) const {
#pragma unroll 1
        for (int i = 0; i < EACH; i++) {
            Row x = load(slot, at, i);
            __syncwarp();
            decay<SLOW>(at, f, x, i);
        }
    }
    /* Bits of the warp's rows: are they too far below the anchor. */
    __device__ __forceinline__ int far_rows(const Places &at, const Factors &f, float limit) const {
        int far = 0;
#pragma unroll 1
        for (int i = 0; i < EACH; i++) {
            float gam[E];
            load_sums<E>(gam, sums_at(at, i));
            int any = 0;
            for (int e = 0; e < E; e++)
                any |= gam[e] + f.here[e] < -limit;
            far |= (__any_sync(~0u, any) != 0) << i;
        }
        return far;
    }
    template <int N> static __device__ __forceinline__ void store(bf16 *to, const float x[N]) {
        uint32_t y[N / 2];
#pragma unroll
        for (int e = 0; e < N; e += 2)
            y[e / 2] = pack2(x[e], x[e + 1]);
        store_pairs<N>(to, y);
    }
    template <int N>
    static __device__ __forceinline__ void store(bf16 *to, const float x[N], const float f[N]) {
        uint32_t y[N / 2];
        scaled<N>(y, x, f);
        store_pairs<N>(to, y);
    }
    __device__ __forceinline__ void make(SLOT &slot, Gates<K> &g, int odd,
                                         const float least[E]) const {
        Factors f = factors(slot, odd);
        Places at = places(slot, g);
        const float limit = d.l2norm ? 116.f : NEAR; /* keys of norm 1 leave more room */
        bool far = false, lost = false;
#pragma unroll
        for (int e = 0; e < E; e++) {
            far |= least[e] + f.here[e] < -limit;
            lost |= is_lost(f.here[e] + f.next[e]);
        }
        far = __any_sync(~0u, far);
        if (lane == 0) slot.far[warp] = 0;
        if (far || __any_sync(~0u, lost)) {
            int rows = far ? far_rows(at, f, limit) : 0;
            if (lane == 0) slot.far[warp] = rows;
            return decay_all<true>(slot, at, f);
        }
#pragma unroll
        for (int e = 0; e < E; e++)
            f.next[e] = ex2(f.here[e] + f.next[e]);
        decay_all<false>(slot, at, f);
    }
    __device__ __forceinline__ void all(SLOT *slots, int depth) const {
        Turn turn(depth), gate(GATE_STEPS);
        GateOf<E> of = {};
        int hv = -1; /* whose `of` is */
        for (int odd = 0;; odd ^= 1, turn.next(), gate.next()) {
            Gates<K> &g = sm.gates[gate.slot];
            bar_wait(&sm.full[gate.slot], gate.round & 1);
            const Step s = g.step;
            if (s.len < 0) return;
            if (s.hv != hv) of.load(d, t, s.hv, lane);
            hv = s.hv;
            float least[E] = {};
            sums(g, of, s, odd, least);
            bar_wait(&sm.bars.loaded[turn.slot], turn.round & 1);
            bar_wait(&sm.normed[turn.slot], turn.round & 1);
            sync_part(ROWS_BARRIER, ROW_WARPS * 32);
            make(slots[turn.slot], g, odd, least);
            drain_fence();
            __syncwarp();
            bar_arrive_warp(&sm.bars.scaled[turn.slot], lane);
        }
    }
};

/* ---- triangles ------------------------------------------------------------------------------- */

/* Sums over channels in fp32, of all pairs of rows i < s of 16 from row `first` on, of raw rows:
 * to[s][i]. Gates are made again from the inputs. */
template <int K>
__device__ __noinline__ void far_sums(float *to, int stride, const Dims &d, const dpg_tensors &t,
                                      const void *left, const Step &s, int row0, int first,
                                      int lane) {
    const int E = K / 32;
    float gam[16 * E], run[E] = {}, a = expf(param(t.A_log, s.hv, d.A_type));
    const int rows = min(s.len - row0, 16), h = s.hv / d.G;
    for (int i = 0; i < rows; i++)
        for (int e = 0; e < E; e++) {
            int ch = lane * E + e;
            float x = ldx(t.g, ((s.t0 + row0 + i) * d.HV + s.hv) * K + ch, d.g_bf16);
            float bias = param(t.dt_bias, s.hv * K + ch, d.bias_type);
            run[e] += i ? gate_floor(gate_value(d, x, a, bias)) * LOG2E : 0.f;
            gam[i * E + e] = run[e];
        }
    for (int y = first; y < 16; y++)
        for (int i = 0; i < y; i++) {
            float sum = 0.f;
            for (int e = 0; e < E && y < rows; e++) {
                int64_t ch = lane * E + e, at = ((s.t0 + row0) * d.H + h) * K + ch;
                float k = ldx(t.k, at + (int64_t)i * d.H * K, 1);
                float x = ldx(left, at + (int64_t)y * d.H * K, 1);
                sum = fmaf(x * k, ex2(gam[y * E + e] - gam[i * E + e]), sum);
            }
            for (int m = 1; m < 32; m *= 2)
                sum += __shfl_xor_sync(~0u, sum, m);
            if (lane == 0) to[y * stride + i] = sum;
        }
    __syncwarp();
}

/* A maker of triangles. */
template <class SLOT> struct Triangle : Maker<SLOT> {
    static const int K = SLOT::K;
    using Maker<SLOT>::d;
    using Maker<SLOT>::lane;
    using Maker<SLOT>::number;
    const dpg_tensors &t;
    SingleSmem<K> &sm;
    __device__ __forceinline__ Triangle(const Dims &d, const dpg_tensors &t, SingleSmem<K> &sm,
                                        int number, int lane)
        : Maker<SLOT>{d, sm.bars, number, lane}, t(t), sm(sm) {}

    /* Block b of k k' (m = 0), q k' (m = 1). */
    __device__ __forceinline__ void block(float c[2][4], const SLOT &slot, const Gates<K> &g, int b,
                                          int m) const {
        Apart left = b ? Apart::of(g, m, 16 + down_row(lane), down_p(lane))
                       : Apart::rows(slot.kq, m * STEP + down_row(lane), down_p(lane));
        Apart right = b == 2 ? Apart::near(g, across_row(lane), across_p(lane))
                             : Apart::of(g, b, across_row(lane), across_p(lane));
        this->product(c, left, right);
    }
    /* Calls `first(slot, turn)` for each of these steps, then `make_one(slot, step, gates)` behind
     * the rows' warps. */
    template <class FIRST, class F>
    __device__ __forceinline__ void all(SLOT *slots, int depth, int by, FIRST first, F make_one) {
        this->each_step(slots, depth, by, [&](SLOT &slot, const Step &s, const Turn &turn, int n) {
            Gates<K> &g = sm.gates[n % GATE_STEPS];
            first(slot, turn);
            bar_wait(&sm.bars.scaled[turn.slot], turn.round & 1);
            make_one(slot, s, g);
            __syncwarp();
            bar_arrive_warp(&sm.empty[n % GATE_STEPS], lane);
        });
    }
};

template <class SLOT> struct Keys : Triangle<SLOT> {
    static const int K = SLOT::K;
    using Triangle<SLOT>::Triangle;
    using Maker<SLOT>::d;
    using Maker<SLOT>::lane;
    using Maker<SLOT>::number;
    using Triangle<SLOT>::sm;
    using Triangle<SLOT>::t;

    /* 1/norms of all rows. */
    __device__ __forceinline__ void norms(SLOT &slot, const Turn &turn) const {
#pragma unroll 1
        for (int row0 = 0; row0 < STEP; row0 += 8) {
            KeyNorms x;
            x.take<K>(d, slot.kq, slot.kq + STEP * 64, row0, lane);
            if (!x.is_here(lane)) continue;
            slot.norm[row0 + lane / 4] = make_float2(x.rk, x.rq * d.scale);
            slot.own[row0 + lane / 4] = x.own * d.scale;
        }
        __syncwarp();
        bar_arrive_warp(&sm.normed[turn.slot], lane);
    }
    __device__ __forceinline__ void far(SLOT &slot, const Step &s, float *A,
                                        const float *beta) const {
        for (int b = 0; b < 2; b++) {
            int first = slot.first_far(b), row0 = b * 16;
            float *to = A + row0 * (TS + 1);
            if (first == 16) continue;
            far_sums<K>(to, TS, d, t, t.k, s, row0, first, lane);
            for (int x = lane; x < 256; x += 32) {
                int y = x / 16, i = x % 16;
                if (y >= first && i < y)
                    to[y * TS + i] *=
                        beta[row0 + y] * slot.norm[row0 + y].x * slot.norm[row0 + i].x;
            }
            __syncwarp();
        }
    }
    __device__ __forceinline__ void make(SLOT &slot, const Step &s, const Gates<K> &g) const {
        float *beta = sm.beta[number], *A = sm.A + number * STEP;
        RawWord raw;
        raw.load(t.beta, (s.t0 + (lane < s.len ? lane : 0)) * d.HV + s.hv, d.g_bf16);
        EACH_BLOCK(b, s.len) {
            float c[2][4];
            this->block(c, slot, g, b, 0);
            if (b == 0) {
                beta[lane] = lane < s.len ? beta_value(d, raw.get(d.g_bf16)) : 0.f;
                __syncwarp();
            }
            this->pairs(b, [&](int half, int n, int y, int i) {
                float by = beta[y];
                *(float2 *)(A + y * TS + i) = make_float2(
                    i >= y ? 0.f : by * c[n][2 * half], i + 1 >= y ? 0.f : by * c[n][2 * half + 1]);
            });
        }
        __syncwarp();
        if (slot.any_far()) far(slot, s, A, beta);
        this->invert(A, s.len);
        EACH_BLOCK(b, s.len) {
            float x[2][4];
            this->take_TB(x, b, A, beta);
            this->keep(slot.TB, b, x);
        }
        this->no_second_half(slot.TB, s.len);
    }
};

template <class SLOT> struct Queries : Triangle<SLOT> {
    static const int K = SLOT::K;
    using Triangle<SLOT>::Triangle;
    using Maker<SLOT>::d;
    using Maker<SLOT>::lane;
    using Triangle<SLOT>::sm;
    using Triangle<SLOT>::t;

    /* A diagonal block from row0 on: pairs of far rows; a row with itself, which no decay enters.
     */
    __device__ __forceinline__ void diagonal(const SLOT &slot, const Step &s, int row0,
                                             float c[2][4]) const {
        int first = slot.first_far(row0 / 16), y = lane / 4;
        if (first < 16) {
            far_sums<K>(sm.far[0], 16, d, t, t.q, s, row0, first, lane);
#pragma unroll
            for (int x = 0; x < 8; x++) {
                int r = y + x % 4 / 2 * 8, i = x / 4 * 8 + lane % 4 * 2 + x % 2;
                if (r >= first && i < r)
                    c[x / 4][x % 4] = sm.far[r][i] * slot.norm[row0 + r].y * slot.norm[row0 + i].x;
            }
            __syncwarp();
        }
        if (!KeyNorms::is_here(lane)) return;
        const bool odd = y % 2;
        float upper = slot.own[row0 + y], lower = slot.own[row0 + 8 + y];
        c[0][0] = odd ? c[0][0] : upper;
        c[0][1] = odd ? upper : c[0][1];
        c[1][2] = odd ? c[1][2] : lower;
        c[1][3] = odd ? lower : c[1][3];
    }
    __device__ __forceinline__ void make(SLOT &slot, const Step &s, const Gates<K> &g) const {
        EACH_BLOCK(b, s.len) {
            float c[2][4];
            this->block(c, slot, g, b, 1);
            if (b != 1) diagonal(slot, s, row_of_block(b), c);
            this->keep(slot.Aqk, b, c);
        }
        this->no_second_half(slot.Aqk, s.len);
    }
};

/* ---- the kernel ------------------------------------------------------------------------------ */

template <int K, int V>
__global__ void __launch_bounds__(GATED_THREADS(V), 1)
    k_forward_gated(const __grid_constant__ Dims d, const __grid_constant__ dpg_tensors t,
                    const __grid_constant__ SingleArgs a) {
    typedef Slot<K, V> S;
    extern __shared__ __align__(1024) char raw[];
    SingleSmem<K> &sm = *(SingleSmem<K> *)raw;
    auto *slots = stages_behind<S>(raw, sm);
    const int depth = a.a.depth;
    int warp = threadIdx.x / 32, lane = kept_lane();
    if (threadIdx.x == 0) {
        for (int i = 0; i < GATE_STEPS; i++) {
            bar_init(&sm.full[i], FULL_COUNT_16(1));
            bar_init(&sm.empty[i], EMPTY_COUNT(2));
        }
        for (int i = 0; i < depth; i++)
            bar_init(&sm.normed[i], EMPTY_COUNT(1));
        sm.bars.init(depth, ROW_WARPS, V / 16);
    }
    await_grid();
    __syncthreads();
    if (warp >= FIRST_COLUMNS) {
        if (V > 64) take_registers<152>();
        const int mine = warp - FIRST_COLUMNS;
        Columns<S> x = {d, a, sm.bars, sm.o[mine], mine, lane, mine * 16};
        return x.all(slots);
    }
    if (V > 64) give_registers<104>();
    if (warp == 0) {
        GateLoader<K> gates = {d, t.g, sm, Turn(GATE_STEPS)};
        Loader<S, GateLoader<K>> x = {d, a, sm.bars, slots, gates, KEY_WARPS, lane, Turn(depth)};
        x.all();
    } else if (warp <= ROW_WARPS) {
        Rows<S> x = {d, t, sm, warp - 1, lane};
        x.all(slots, depth);
    } else if (warp <= ROW_WARPS + KEY_WARPS) {
        Keys<S> x(d, t, sm, warp - 1 - ROW_WARPS, lane);
        x.all(
            slots, depth, KEY_WARPS, [&](auto &slot, const Turn &turn) { x.norms(slot, turn); },
            [&](auto &slot, const Step &s, auto &g) { x.make(slot, s, g); });
    } else {
        Queries<S> x(d, t, sm, 0, lane);
        x.all(
            slots, depth, 1, [](auto &, const Turn &) {},
            [&](auto &slot, const Step &s, auto &g) { x.make(slot, s, g); });
    }
}

template <int K, int V> struct Single {
    static dp_status run(const Call &c, SingleArgs a) {
        int bytes;
        unsigned blocks = single_blocks<SingleSmem<K>, Slot<K, V>>(c, &a, &bytes);
        return launch(queue_of(c), "k_forward_gated", k_forward_gated<K, V>, blocks,
                      GATED_THREADS(V), bytes, c.p->d, *c.t, a);
    }
};

} // namespace

dp_status fast_forward_gated(const Call &c) {
    FAULT_TO_DEVICE(c.e, c.s);
    SingleArgs a;
    TRY(single_args(c, &a));
    return by_widths<Single>(c, a);
}
