/* gpu/decode/columns.cu - the recurrence of decode.cu on states [V][K]. A warp has C columns of
 * a request's head, a lane the same K / 32 rows of each. Keys, queries and gates stay in registers.
 * No warp waits for another. */
#include "decode/inputs.cuh"

/* Lanes that add their sums, one step behind the other, in the order of group_of<true>. */
static __host__ __device__ constexpr int mask_of(int step) {
    return step == 0 ? 4 : step == 1 ? 8 : step == 4 ? 16 : step - 1;
}
/* Sums of C columns over the lanes of a warp: each lane ends with one, of column_of<C>(). A lane
 * keeps half of its columns with every step, the other lane the other half. */
template <int C, int STEP = 0> static __device__ __forceinline__ float sum_lanes(float *y) {
    if constexpr (STEP == 5)
        return y[0];
    else {
        constexpr int M = mask_of(STEP), HALF = C / 2;
        if constexpr (C == 1) y[0] += __shfl_xor_sync(~0u, y[0], M);
#pragma unroll
        for (int n = 0; n < HALF; n++) {
            const bool upper = threadIdx.x & M;
            const float mine = upper ? y[n + HALF] : y[n], other = upper ? y[n] : y[n + HALF];
            y[n] = mine + __shfl_xor_sync(~0u, other, M);
        }
        return sum_lanes < C == 1 ? 1 : HALF, STEP + 1 > (y);
    }
}
template <int C, int STEP = 0> static __device__ __forceinline__ int column_of() {
    if constexpr (C == 1)
        return 0;
    else
        return (threadIdx.x & mask_of(STEP) ? C / 2 : 0) + column_of<C / 2, STEP + 1>();
}
/* The first lane of a column. */
template <int C> static __device__ __forceinline__ bool first_of_column() {
    int others = 0;
#pragma unroll
    for (int step = 0; step < 5; step++)
        if (C >> step <= 1) others |= mask_of(step);
    return !(threadIdx.x & others);
}

/* A lane's rows of C columns from `first` on. */
template <int K, int FORM, int C> struct Columns {
    static constexpr int N = K / 32, QUAD = N < 4 ? N : 4;
    alignas(16) float s[C][N];

    /* f(column, row) */
    template <class F> static __device__ __forceinline__ void each(F f) {
#pragma unroll
        for (int j = 0; j < C; j++)
#pragma unroll
            for (int i = 0; i < N; i++)
                f(j, i);
    }
    static __device__ int at(int j, int i) { return j * K + threadIdx.x % 32 * N + i; }
    __device__ __forceinline__ void load(const HeadAt &from, int first) {
#pragma unroll
        for (int j = 0; j < C; j++)
#pragma unroll
            for (int i = 0; i < N; i += QUAD)
                get_raw<FORM, QUAD>(from, first * K + at(j, i), s[j] + i);
    }
    __device__ __forceinline__ void open() {
#pragma unroll
        for (int j = 0; j < C; j++)
#pragma unroll
            for (int i = 0; i < N; i += QUAD)
                open_raw<FORM, QUAD>(s[j] + i);
    }
    __device__ __forceinline__ void store(const HeadAt &to, int first) const {
#pragma unroll
        for (int j = 0; j < C; j++)
#pragma unroll
            for (int i = 0; i < N; i += QUAD)
                put_numbers<FORM, QUAD>(to, first * K + at(j, i), s[j] + i, NULL);
    }
};

template <int K, int FORM, int R, int C, int WARPS, class Known>
__global__ void __launch_bounds__(32 * WARPS) k_columns(DecodeArgs a, int ahead) {
    constexpr int N = K / 32;
    struct alignas(16) Writes {
        float of[R][C];
    };
    __shared__ Writes writes[WARPS]; /* w, from the lanes of a column to all */
    Known::tell(a);
    const dpg_decode &d = a.d;
    const int b = blockIdx.z, hv = blockIdx.y, warp = threadIdx.x / 32;
    const int h = key_head(a, hv), first = C * (WARPS * blockIdx.x + warp);
    const int mine = column_of<C>();
    const Slots slots = slots_of(a);
    Columns<K, FORM, C> S;
    RawToken<K, R, 1> raw;
    await_grid();
    const int32_t slot = slots.named(b);
    raw.load(a, b, 0, h, hv, first + mine);
    const int64_t from = slots.read(slot);
    const int all = from < 0 ? 0 : slots.tokens(b), n = Known::TOKENS == 1 ? 1 : all;
    if (all < d.T) clear_rest<C>(a, b, all, hv, first);
    if (all == 0) return;
    S.load(start_at(a, FORM, from, hv, K * d.V), first);
    if (threadIdx.x == 0) ask_ahead(a, FORM, C * WARPS, ahead);
    for (int t = 0; t < n; t++) {
        const int64_t to = slots.write(b, t, n), row = raw.row;
        float x[1 + R][N], decay[N], y[C] = {}, e[R][C] = {};
        alignas(16) float w[R][C];
        rows_of<1 + R>(raw.of, d.dtype == DPG_BF16, d.l2norm, x);
        raw.decays(a, decay);
        const float beta = beta_value(a.gates, raw.beta);
        if (t == 0) S.open();
        S.each([&](int j, int i) {
            S.s[j][i] *= decay[i];
            for (int r = 0; r < R; r++)
                e[r][j] = fmaf(x[1 + r][i], S.s[j][i], e[r][j]);
        });
        for (int r = 0; r < R; r++)
            writes[warp].of[r][mine] = (R > 1 ? __shfl_sync(~0u, beta, r) : beta) *
                                       (raw.v[r](0, d.dtype == DPG_BF16) - sum_lanes<C>(e[r]));
        __syncwarp();
        for (int r = 0; r < R; r++)
            copy<4 * C>(w[r], writes[warp].of[r]);
        __syncwarp();
        if (t + 1 < n) raw.load(a, b, t + 1, h, hv, first + mine);
        S.each([&](int j, int i) {
            for (int r = 0; r < R; r++)
                S.s[j][i] = fmaf(x[1 + r][i], w[r][j], S.s[j][i]);
            y[j] = fmaf(x[0][i], S.s[j][i], y[j]);
        });
        if (to >= 0) S.store(head_at(a, FORM, to, hv, K * d.V), first);
        const float o = d.scale * sum_lanes<C>(y);
        if (first_of_column<C>()) stx(a.t.o, row * d.V + first + mine, d.odtype == DPG_BF16, o);
    }
}

template <int K, int FORM, int R, int C, int WARPS, class Known = AnyCall>
static dp_status launch_columns(const Device &dev, const DecodeArgs &a, cudaStream_t s, dp_err *e) {
    const dim3 tiles = tiles_of(a.d, C * WARPS);
    const int ahead = blocks_ahead(dev, tiles.x * heads_of(a.d), C * WARPS * K * code_bytes(FORM));
    return launch({dev, s, e, false}, "k_columns", k_columns<K, FORM, R, C, WARPS, Known>, tiles,
                  32 * WARPS, 0, a, ahead);
}
template <int K, int FORM>
static dp_status launch_keys(const Device &dev, const DecodeArgs &a, cudaStream_t s, dp_err *e) {
    return a.d.R == 1   ? launch_columns<K, FORM, 1, 4, 8>(dev, a, s, e)
           : a.d.R == 2 ? launch_columns<K, FORM, 2, 4, 8>(dev, a, s, e)
                        : launch_columns<K, FORM, 4, 4, 8>(dev, a, s, e);
}
template <int FORM>
static dp_status launch_form(const Device &dev, const DecodeArgs &a, cudaStream_t s, dp_err *e) {
    if (is_one_token(a))
        return with_one_token(a.d, [&](auto known) {
            constexpr int WARPS = FORM == IN_F32 ? 2 : 4;
            return launch_columns<128, FORM, 1, 16, WARPS, decltype(known)>(dev, a, s, e);
        });
    switch (a.d.K) {
    case 32: return launch_keys<32, FORM>(dev, a, s, e);
    case 64: return launch_keys<64, FORM>(dev, a, s, e);
    case 128: return launch_keys<128, FORM>(dev, a, s, e);
    default: return launch_keys<256, FORM>(dev, a, s, e);
    }
}
bool dpg_takes_columns(const Device &dev, const DecodeArgs &a) {
    return a.d.layout == DPG_STATE_VK && (is_one_token(a) || !dpg_takes_heads(dev, a.d));
}
dp_status dpg_decode_columns(const Device &dev, const DecodeArgs &a, cudaStream_t s, dp_err *e) {
    return a.d.sdtype == DPG_F32    ? launch_form<IN_F32>(dev, a, s, e)
           : a.d.sdtype == DPG_BF16 ? launch_form<IN_BF16>(dev, a, s, e)
                                    : launch_form<IN_F16>(dev, a, s, e);
}
