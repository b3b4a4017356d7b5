/* gpu/fast/forward_one.cu - the forward of plans with one gate a head in one kernel
 * (fast/forward.cuh). Its makers:
 *
 *   keys      4 warps, a step each     T B as an operand, factors of rows
 *   queries   3 warps, a step each     Aqk likewise
 *
 * Heads that leave half of the device idle are two blocks each. A block of 64 columns has registers
 * for both halves of an update at once.
 *
 * Rows of k and q stay as they are. Factors of rows multiply products with them. */
#include "fast/forward.cuh"

namespace {

#define KEY_WARPS 4
#define QUERY_WARPS 3
#define FIRST_COLUMNS (1 + KEY_WARPS + QUERY_WARPS)
#define SINGLE_THREADS(V) ((FIRST_COLUMNS + (V) / 16) * 32)

template <int KEYS, int VALUES, int OF_ALL> struct alignas(1024) Slot {
    static const int K = KEYS, V = VALUES, OF = OF_ALL, HALVES_OF_O = 2;
    static const bool ROOMY = V <= 64;
    bf16 kq[2 * STEP * K], v[STEP * V];
    Lower TB, Aqk;
    float of_k[STEP], to_end[STEP], of_q[STEP], gam[STEP], rk[STEP], all;
    Step step;

    __device__ __forceinline__ void await_rows(SlotBars &, const Turn &) const {}
    struct Factors {
        OfTokens<STEP / 8> k, end;
        float by;
        __device__ __forceinline__ Factors(const Slot &slot, int lane)
            : k(slot.of_k, lane), end(slot.to_end, lane), by(FAULT(BARE_DECAY) ? 1.f : slot.all) {}
        __device__ __forceinline__ void times_keys(float z[4][4]) const { k.times(z); }
        __device__ __forceinline__ void times_queries(const Slot &slot, float o[4][4],
                                                      int lane) const {
            OfTokens<STEP / 8>(slot.of_q, lane).times(o);
        }
        __device__ __forceinline__ const uint32_t (*of_update(float x[4][4], const uint32_t (*)[4],
                                                              uint32_t to[2][4]) const)[4] {
            end.times(x);
#pragma unroll
            for (int p = 0; p < 2; p++)
                fragment(to[p], x[2 * p], x[2 * p + 1]);
            return to;
        }
        __device__ __forceinline__ void decay(const Slot &, float (*S)[4], const float y[8][4], int,
                                              int) const {
#pragma unroll
            for (int n = 0; n < 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    S[n][e] = fmaf(by, S[n][e], y[n][e]);
        }
    };
    __device__ __forceinline__ uint64_t update_rows(int j) const {
        return rows_desc(kq, 64) + j * HALF;
    }
};
struct SingleSmem {
    SlotBars bars;
    alignas(16) bf16 o[8][16 * 2 * 16];
    float by_row[KEY_WARPS + QUERY_WARPS][2][STEP];      /* of a maker: beta, factors of rows */
    alignas(16) float A[(KEY_WARPS + 1) / 2][STEP * TS]; /* of two makers, side by side; then T */
};
struct NothingMore {
    __device__ __forceinline__ void load(const Step &, int) const {}
};

/* 1/norm of a row of k or q. */
__device__ __forceinline__ float norm(const Dims &d, float square) {
    return d.l2norm ? rsqrtf(square + (float)DP_L2_EPS) : 1.f;
}
/* Norms of the columns and decay to the row. */
template <class SLOT> __device__ __forceinline__ float2 decays(const SLOT &slot, int s, int i) {
    float2 g = *(const float2 *)(slot.gam + i), rk = *(const float2 *)(slot.rk + i);
    float gam = slot.gam[s];
    return make_float2(rk.x * ex2(fminf(gam - g.x, 0.f)), rk.y * ex2(fminf(gam - g.y, 0.f)));
}

/* N blocks of products; left: factors of the rows. Loads of all precede whatever is stored. */
template <int N, class SLOT>
__device__ __forceinline__ void decay(const Maker<SLOT> &m, float c[N][2][4], const SLOT &slot,
                                      const float *left) {
#pragma unroll
    for (int b = 0; b < N; b++)
        m.pairs(b, [&](int half, int n, int s, int i) {
            float2 f = decays(slot, s, i);
            c[b][n][2 * half] *= left[s] * f.x;
            c[b][n][2 * half + 1] *= left[s] * f.y;
        });
}

template <class SLOT> struct Keys : Maker<SLOT> {
    using Maker<SLOT>::d;
    using Maker<SLOT>::number;
    using Maker<SLOT>::lane;
    const dpg_tensors &t;
    SingleSmem &sm;
    __device__ __forceinline__ Keys(const Dims &d, const dpg_tensors &t, SingleSmem &sm, int number,
                                    int lane)
        : Maker<SLOT>{d, sm.bars, number, lane}, t(t), sm(sm) {}

    /* Gates and beta of the step's rows, a row a lane, as they stand in memory. */
    struct Raw {
        RawWord g, beta;
        uint32_t A_log, bias;
    };
    __device__ __forceinline__ Raw ask(const Step &s) const {
        Raw x;
        int64_t at = (s.t0 + (lane < s.len ? lane : 0)) * d.HV + s.hv;
        x.g.load(t.g, at, d.g_bf16);
        x.beta = load_strength(d, t, at);
        x.A_log = param_word(t.A_log, s.hv, d.A_type);
        x.bias = param_word(t.dt_bias, s.hv, d.bias_type);
        return x;
    }
    /* Factors of rows, a row a lane. */
    __device__ __forceinline__ void factors(SLOT &slot, const Raw &x, int len, float square) {
        float a = expf(param_value(x.A_log, d.A_type)), b = param_value(x.bias, d.bias_type);
        float raw = x.g.get(d.g_bf16);
        float gam = lane < len ? gate_floor(gate_value(d, raw, a, b)) * LOG2E : 0.f;
#pragma unroll
        for (int m = 1; m < 32; m *= 2) {
            float y = __shfl_up_sync(~0u, gam, m);
            if (lane >= m) gam += y;
        }
        float all = __shfl_sync(~0u, gam, 31), rk = norm(d, square);
        const float beta = lane < len ? strength_of(d, x.beta) : 0.f;
        slot.gam[lane] = gam;
        slot.rk[lane] = rk;
        slot.of_k[lane] = d.erases * rk * ex2(gam);
        slot.to_end[lane] = rk * ex2(all - gam);
        if (lane == 0) slot.all = ex2(all);
        sm.by_row[number][0][lane] = beta;
        sm.by_row[number][1][lane] = d.erases * beta * rk;
    }
    /* N: blocks with tokens. */
    template <int N>
    __device__ __forceinline__ void make(SLOT &slot, const Step &s, const Turn &turn) {
        float *beta = sm.by_row[number][0], *left = sm.by_row[number][1];
        float *A = sm.A[number / 2] + number % 2 * STEP;
        float c[N][2][4];
        Raw raw = ask(s);
        this->template products<N>(c, slot.kq, 0, 0);
#pragma unroll
        for (int b = 0; b < N && d.l2norm; b += 2)
            this->diagonal(c[b], left + row_of_block(b));
        __syncwarp();
        factors(slot, raw, s.len, lane < 16 || N > 1 ? left[lane] : 0.f);
        __syncwarp();
        bar_arrive_warp(&sm.bars.scaled[turn.slot], lane);
        decay<N>(*this, c, slot, left);
#pragma unroll
        for (int b = 0; b < N; b++)
            this->pairs(b, [&](int half, int n, int s, int i) {
                const float *x = &c[b][n][2 * half];
                *(float2 *)(A + s * TS + i) =
                    make_float2(i >= s ? 0.f : x[0], i + 1 >= s ? 0.f : x[1]);
            });
        __syncwarp();
        this->invert(A, s.len);
#pragma unroll
        for (int b = 0; b < N; b++)
            this->take_TB(c[b], b, A, beta);
#pragma unroll
        for (int b = 0; b < N; b++)
            this->keep(slot.TB, b, c[b]);
        this->no_second_half(slot.TB, s.len);
    }
};

template <class SLOT> struct Queries : Maker<SLOT> {
    using Maker<SLOT>::d;
    using Maker<SLOT>::number;
    using Maker<SLOT>::lane;
    SingleSmem &sm;
    __device__ __forceinline__ Queries(const Dims &d, SingleSmem &sm, int number, int lane)
        : Maker<SLOT>{d, sm.bars, number, lane}, sm(sm) {}

    template <int N>
    __device__ __forceinline__ void make(SLOT &slot, const Step &s, const Turn &turn) {
        float *left = sm.by_row[KEY_WARPS + number][0];
        float c[N][2][4];
#pragma unroll 1
        for (int row0 = d.l2norm ? 0 : STEP; row0 < STEP; row0 += 16) {
            this->product(c[0], walk_down(slot.kq, STEP + row0, lane),
                          walk_across(slot.kq, STEP + row0, lane));
            this->diagonal(c[0], left + row0);
        }
        this->template products<N>(c, slot.kq, STEP, 0);
        __syncwarp();
        bar_wait(&sm.bars.scaled[turn.slot], turn.round & 1);
        float rq = d.scale * norm(d, left[lane]);
        slot.of_q[lane] = rq * ex2(slot.gam[lane]);
        left[lane] = rq;
        __syncwarp();
        decay<N>(*this, c, slot, left);
#pragma unroll
        for (int b = 0; b < N; b++)
            this->keep(slot.Aqk, b, c[b]);
        this->no_second_half(slot.Aqk, s.len);
    }
};

template <int K, int V, int OF>
__global__ void __launch_bounds__(SINGLE_THREADS(V), 1)
    k_forward_one(const __grid_constant__ Dims d, const __grid_constant__ dpg_tensors t,
                  const __grid_constant__ SingleArgs a) {
    typedef Slot<K, V, OF> S;
    extern __shared__ __align__(1024) char raw[];
    SingleSmem &sm = *(SingleSmem *)raw;
    auto *slots = stages_behind<S>(raw, sm);
    const int depth = a.a.depth;
    int warp = threadIdx.x / 32, lane = kept_lane();
    if (threadIdx.x == 0) {
        a.ask_for_maps();
        sm.bars.init(depth, 1, V / 16);
    }
    await_grid();
    __syncthreads();
    if (warp >= FIRST_COLUMNS) {
        take_registers<(S::ROOMY ? 240 : 152)>();
        const int mine = warp - FIRST_COLUMNS;
        Columns<S> x = {d, a, sm.bars, sm.o[mine], mine, lane, first_column<S>(mine)};
        return x.all(slots);
    }
    give_registers<(S::ROOMY ? 120 : 104)>();
    auto make = [&](auto &&x, int by) {
        x.each_step(slots, depth, by, [&](auto &slot, const Step &s, const Turn &turn, int) {
            if (s.len > STEP / 2)
                x.template make<3>(slot, s, turn);
            else
                x.template make<1>(slot, s, turn);
        });
    };
    if (warp == 0) {
        NothingMore nothing;
        Loader<S, NothingMore> x = {d, a, sm.bars, slots, nothing, KEY_WARPS, lane, Turn(depth)};
        x.all();
    } else if (warp <= KEY_WARPS) {
        make(Keys<S>(d, t, sm, warp - 1, lane), KEY_WARPS);
    } else {
        make(Queries<S>(d, sm, warp - 1 - KEY_WARPS, lane), QUERY_WARPS);
    }
}

template <int K, int V, int OF> static dp_status run_blocks(const Call &c, SingleArgs a) {
    typedef Slot<K, V, OF> S;
    int bytes;
    unsigned blocks = single_blocks<SingleSmem, S>(c, &a, &bytes);
    return launch(queue_of(c), "k_forward_one", k_forward_one<K, V, OF>, blocks, SINGLE_THREADS(V),
                  bytes, c.p->d, *c.t, a);
}
template <int K, int V> struct Single {
    static dp_status run(const Call &c, SingleArgs a) {
        return c.p->single > 1 ? run_blocks<K, 64, V>(c, a) : run_blocks<K, V, V>(c, a);
    }
};

} // namespace

dp_status fast_forward_one(const Call &c) {
    FAULT_TO_DEVICE(c.e, c.s);
    SingleArgs a;
    TRY(single_args(c, &a));
    return by_widths<Single>(c, a);
}
