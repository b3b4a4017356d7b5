/* gpu/decode/columns.cu - the recurrence of decode.cu on states [V][K]. A warp has C columns of
 * a request's head, a lane the same K / 32 rows of each. Keys, queries and gates stay in registers.
 * No warp waits for another. */
#include "decode/inputs.cuh"

/* Sums over the lanes of a warp, in the order of group_of<true>. */
template <int N> static __device__ __forceinline__ void sum_lanes(float *y) {
    constexpr int MASK[5] = {4, 8, 1, 2, 16};
#pragma unroll
    for (int i = 0; i < 5; i++)
#pragma unroll
        for (int n = 0; n < N; n++)
            y[n] += __shfl_xor_sync(~0u, y[n], MASK[i]);
}

/* A lane's rows of C columns from `first` on. */
template <int K, int FORM, int C> struct Columns {
    static constexpr int N = K / 32, QUAD = N < 4 ? N : 4;
    float s[C][N];

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
                get_numbers<FORM, QUAD>(from, first * K + at(j, i), s[j] + i);
    }
    __device__ __forceinline__ void store(const HeadAt &to, int first) const {
#pragma unroll
        for (int j = 0; j < C; j++)
#pragma unroll
            for (int i = 0; i < N; i += QUAD)
                put_numbers<FORM, QUAD>(to, first * K + at(j, i), s[j] + i, NULL);
    }
};

/* Blocks of 32 columns. */
template <int K, int FORM, int R, int C, class Known>
__global__ void __launch_bounds__(1024 / C) k_columns(DecodeArgs a) {
    constexpr int N = K / 32;
    Known::tell(a);
    const dpg_decode &d = a.d;
    const int b = blockIdx.z, hv = blockIdx.y;
    const int h = key_head(a, hv), first = 32 * blockIdx.x + C * (threadIdx.x / 32);
    const Slots slots = slots_of(a);
    Columns<K, FORM, C> S;
    RawToken<K, R, C> raw;
    await_grid();
    const int32_t slot = slots.named(b);
    raw.load(a, b, 0, h, hv, first);
    const int64_t from = slots.read(slot);
    const int n = from < 0 ? 0 : slots.tokens(b);
    if (n < d.T) clear_rest<C>(a, b, n, hv, first);
    if (n == 0) return;
    S.load(start_at(a, FORM, from, hv, K * d.V), first);
    for (int t = 0; t < n; t++) {
        const int64_t to = slots.write(b, t, n), row = raw.row;
        float x[1 + R][N], decay[N], w[R][C], y[C] = {}, e[R][C] = {};
        rows_of<1 + R>(raw.of, d.dtype == DPG_BF16, d.l2norm, x);
        raw.decays(a, decay);
        const float beta = beta_value(a.gates, raw.beta);
        S.each([&](int j, int i) {
            S.s[j][i] *= decay[i];
            for (int r = 0; r < R; r++)
                e[r][j] = fmaf(x[1 + r][i], S.s[j][i], e[r][j]);
        });
        sum_lanes<R * C>(e[0]);
        for (int r = 0; r < R; r++)
            for (int j = 0; j < C; j++)
                w[r][j] = (R > 1 ? __shfl_sync(~0u, beta, r) : beta) *
                          (raw.v[r](j, d.dtype == DPG_BF16) - e[r][j]);
        if (t + 1 < n) raw.load(a, b, t + 1, h, hv, first);
        S.each([&](int j, int i) {
            for (int r = 0; r < R; r++)
                S.s[j][i] = fmaf(x[1 + r][i], w[r][j], S.s[j][i]);
            y[j] = fmaf(x[0][i], S.s[j][i], y[j]);
        });
        if (to >= 0) S.store(head_at(a, FORM, to, hv, K * d.V), first);
        sum_lanes<C>(y);
        for (int j = 0; j < C && threadIdx.x % 32 == 0; j += COLS)
            put_columns(a, row * d.V + first + j, y + j);
    }
}

template <int K, int FORM, int R, int C, class Known = AnyCall>
static dp_status launch_columns(const Device &dev, const DecodeArgs &a, cudaStream_t s, dp_err *e) {
    return launch(dev, k_columns<K, FORM, R, C, Known>, tiles_of(a.d), 1024 / C, 0, s, e, a);
}
template <int FORM, int C>
static dp_status launch_one(const Device &dev, const DecodeArgs &a, cudaStream_t s, dp_err *e) {
    return with_one_token(a.d, [&](auto known) {
        return launch_columns<128, FORM, 1, C, decltype(known)>(dev, a, s, e);
    });
}
template <int K, int FORM>
static dp_status launch_keys(const Device &dev, const DecodeArgs &a, cudaStream_t s, dp_err *e) {
    return a.d.R == 1   ? launch_columns<K, FORM, 1, COLS>(dev, a, s, e)
           : a.d.R == 2 ? launch_columns<K, FORM, 2, COLS>(dev, a, s, e)
                        : launch_columns<K, FORM, 4, COLS>(dev, a, s, e);
}
template <int FORM>
static dp_status launch_form(const Device &dev, const DecodeArgs &a, cudaStream_t s, dp_err *e) {
    constexpr int MANY = FORM == IN_F32 ? 8 : 16; /* columns of a warp where heads are many */
    const int64_t heads = (int64_t)a.d.B * a.d.HV, few = (FORM == IN_F32 ? 4 : 1) * dev.sms;
    if (is_one_token(a))
        return heads < few ? launch_one<FORM, COLS>(dev, a, s, e)
                           : launch_one<FORM, MANY>(dev, a, s, e);
    switch (a.d.K) {
    case 32: return launch_keys<32, FORM>(dev, a, s, e);
    case 64: return launch_keys<64, FORM>(dev, a, s, e);
    case 128: return launch_keys<128, FORM>(dev, a, s, e);
    default: return launch_keys<256, FORM>(dev, a, s, e);
    }
}
bool dpg_takes_columns(const Device &dev, const DecodeArgs &a) {
    const dpg_decode &d = a.d;
    const bool one =
        is_one_token(a) && (form_of(d) == IN_F32 || (int64_t)d.B * d.HV < (int64_t)48 * dev.sms);
    return d.layout == DPG_STATE_VK && (one || !dpg_takes_heads(dev, d));
}
dp_status dpg_decode_columns(const Device &dev, const DecodeArgs &a, cudaStream_t s, dp_err *e) {
    return form_of(a.d) == IN_F32 ? launch_form<IN_F32>(dev, a, s, e)
                                  : launch_form<IN_BF16>(dev, a, s, e);
}
