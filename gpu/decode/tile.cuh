/* gpu/decode/tile.cuh - columns of a state in the registers of a block, and what a token does with
 * them. The order of a sum over rows is that of every tile: rows of a thread, groups g, g + 4, ..
 * of threads, these four. */
#ifndef DPG_TILE_CUH
#define DPG_TILE_CUH
#include "decode/packed.cuh"
#include "dp_decode.h"

#ifndef DECODE_WARPS
#define DECODE_WARPS 8 /* that compute; or 4 */
#endif
#define THREADS (32 * DECODE_WARPS)
#define GROUPS (THREADS / 8)

struct DecodeArgs {
    dpg_decode d;
    dpg_decode_tensors t;
    Dims gates; /* what gate_value and beta_value read */
};

#ifdef __CUDACC__
/* Which numbers a thread has: some rows of COLS columns. NEAR of them are neighbours in memory. */
template <int K, int COLS, bool VK, int FORM> struct Place {
    static constexpr int ROWS = K / GROUPS, QUAD = ROWS < 4 ? ROWS : 4, C = 8 * COLS;
    static constexpr int WIDE = FORM < 0 ? 4 : 16 / code_bytes(FORM); /* FORM < 0: any */
    static constexpr int NEAR = VK ? QUAD : WIDE < COLS ? WIDE : COLS;
    static_assert(COLS % NEAR == 0 && ROWS > 0, "columns of a thread");

    static __device__ int group() { return VK ? threadIdx.x % GROUPS : threadIdx.x / 8; }
    static __device__ int part() { return VK ? threadIdx.x / GROUPS : threadIdx.x % 8; }
    static __device__ int row(int i) { return QUAD * (group() + GROUPS * (i / QUAD)) + i % QUAD; }
    static __device__ int col_of(int part, int j) {
        return VK ? part + 8 * j : NEAR * (part + 8 * (j / NEAR)) + j % NEAR;
    }
    static __device__ int col(int j) { return col_of(part(), j); }
    /* Columns in the order of sums: quads of all parts. */
    static __device__ int spot(int j) { return j / 4 * 32 + part() * 4 + j % 4; }
    static __device__ int col_at(int spot) {
        return col_of(spot % 32 / 4, spot / 32 * 4 + spot % 4);
    }
    /* A thread's rows of a vector in shared memory. */
    static __device__ void rows(const float *x, float *y) {
#pragma unroll
        for (int i = 0; i < ROWS; i += QUAD)
            copy<4 * QUAD>(y + i, x + row(i));
    }
};

/* Shared by the threads that compute. */
template <int R, int C> struct Sums {
    alignas(16) float of[R + 1][GROUPS][C + 4]; /* of R keys, of the query */
    alignas(16) float write[R][C];              /* beta (v - k S) */

    __device__ float total(int r, int spot) const {
        float x[4];
        for (int n = 0; n < 4; n++)
            x[n] = of[r][n][spot];
#pragma unroll 4
        for (int g = 4; g < GROUPS; g += 4)
            for (int n = 0; n < 4; n++)
                x[n] += of[r][g + n][spot];
        return (x[0] + x[1]) + (x[2] + x[3]);
    }
};

/* A token as the recurrence takes it, C of its values. */
template <int K, int R, int C> struct alignas(16) Input {
    alignas(16) float q[K], k[R][K], decay[K], v[R][C], beta[4];
    int64_t row;   /* of o [B][T][HV]; -1: no more tokens */
    int64_t slot;  /* to which the state goes; -1: none */
    int hv, loads; /* loads: the state comes from memory */
};

template <class P, int R, int COLS, bool LEFT> struct Tile {
    alignas(16) float s[P::ROWS][COLS];
    alignas(16) uint32_t left[LEFT ? P::ROWS : 1][COLS / 2];

    /* first: column of the tile in a state of V. */
    template <int K, bool VK, int FORM>
    __device__ __forceinline__ void load(const HeadAt &from, int V, int first) {
        if constexpr (VK) {
#pragma unroll
            for (int j = 0; j < COLS; j++)
#pragma unroll
                for (int i = 0; i < P::ROWS; i += P::QUAD) {
                    alignas(16) float x[P::QUAD];
                    get_numbers<FORM, P::QUAD>(from, (first + P::col(j)) * K + P::row(i), x);
                    for (int n = 0; n < P::QUAD; n++)
                        s[i + n][j] = x[n];
                }
        } else {
#pragma unroll
            for (int i = 0; i < P::ROWS; i++)
#pragma unroll
                for (int j = 0; j < COLS; j += P::NEAR) {
                    const int at = P::row(i) * V + first + P::col(j);
                    get_numbers<FORM, P::NEAR>(from, at, &s[i][j]);
                    if constexpr (FORM == IN_INT8_LEFT)
                        copy<2 * P::NEAR>(&left[i][j / 2], from.left(at));
                }
        }
    }
    template <int K, bool VK, int FORM>
    __device__ __forceinline__ void store(const HeadAt &to, int V, int first) const {
        if constexpr (VK) {
#pragma unroll
            for (int j = 0; j < COLS; j++)
#pragma unroll
                for (int i = 0; i < P::ROWS; i += P::QUAD) {
                    alignas(16) float x[P::QUAD];
                    for (int n = 0; n < P::QUAD; n++)
                        x[n] = s[i + n][j];
                    put_numbers<FORM, P::QUAD>(to, (first + P::col(j)) * K + P::row(i), x, NULL);
                }
        } else {
#pragma unroll
            for (int i = 0; i < P::ROWS; i++)
#pragma unroll
                for (int j = 0; j < COLS; j += P::NEAR)
                    put_numbers<FORM, P::NEAR>(to, P::row(i) * V + first + P::col(j), &s[i][j],
                                               &left[LEFT ? i : 0][j / 2]);
        }
    }

    /* S <- diag(decay) S; shares of k S. */
    template <class In, class S> __device__ __forceinline__ void decay(const In &in, S &sums) {
        alignas(16) float d[P::ROWS], k[R][P::ROWS];
        P::rows(in.decay, d);
        for (int r = 0; r < R; r++)
            P::rows(in.k[r], k[r]);
#pragma unroll
        for (int j = 0; j < COLS; j += 4) {
            alignas(16) float y[R][4] = {};
#pragma unroll
            for (int i = 0; i < P::ROWS; i++)
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    s[i][j + n] *= d[i];
                    for (int r = 0; r < R; r++)
                        y[r][n] = fmaf(k[r][i], s[i][j + n], y[r][n]);
                }
            for (int r = 0; r < R; r++)
                copy<16>(&sums.of[r][P::group()][P::spot(j)], y[r]);
        }
    }
    /* S += k' write; shares of S' q. */
    template <class In, class S> __device__ __forceinline__ void write(const In &in, S &sums) {
        alignas(16) float q[P::ROWS], k[R][P::ROWS];
        P::rows(in.q, q);
        for (int r = 0; r < R; r++)
            P::rows(in.k[r], k[r]);
#pragma unroll
        for (int j = 0; j < COLS; j += 4) {
            alignas(16) float w[R][4], y[4] = {};
            for (int r = 0; r < R; r++)
                copy<16>(w[r], &sums.write[r][P::spot(j)]);
#pragma unroll
            for (int i = 0; i < P::ROWS; i++)
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    for (int r = 0; r < R; r++)
                        s[i][j + n] = fmaf(k[r][i], w[r][n], s[i][j + n]);
                    y[n] = fmaf(q[i], s[i][j + n], y[n]);
                }
            copy<16>(&sums.of[R][P::group()][P::spot(j)], y);
        }
    }
};

/* Between the two: what is written, and o of the token before, `row` (-1: none). */
template <class P, class In, int R, int C>
static __device__ __forceinline__ void sum_up(const DecodeArgs &a, const In *in, Sums<R, C> &sums,
                                              int64_t row, int first) {
    for (int x = threadIdx.x + (in ? 0 : R * C); x < (R + 1) * C; x += THREADS) {
        const int r = x / C, spot = x % C, col = P::col_at(spot);
        if (r == R && row < 0) continue;
        const float y = sums.total(r, spot);
        if (r < R)
            sums.write[r][spot] = in->beta[r] * (in->v[r][col] - y);
        else
            stx(a.t.o, row * a.d.V + first + col, a.d.odtype == DPG_BF16, a.d.scale * y);
    }
}

/* ---- inputs of a token, by one warp ---------------------------------------------------------- */

/* N neighbours for each lane, as they lie in memory: their loads wait for none. */
template <int N> struct Raw {
    alignas(16) uint32_t words[N] = {};

    __device__ __forceinline__ void load(const void *x, int64_t at, int is_bf16) {
        at += threadIdx.x % 32 * N;
        if (is_bf16)
            copy<2 * N>(words, (const bf16 *)x + at);
        else
            copy<4 * N>(words, (const float *)x + at);
    }
    __device__ __forceinline__ uint32_t word(int i, int type) const {
        return type == DPG_F32 ? words[i] : words[i / 2] >> i % 2 * 16 & 0xffff;
    }
    __device__ __forceinline__ float operator()(int i, int is_bf16) const {
        return !is_bf16 ? __uint_as_float(words[i])
               : i % 2  ? unpack2(words[i / 2]).y
                        : unpack2(words[i / 2]).x;
    }
};

/* Normed if norm, to a row in shared memory. */
template <int N>
static __device__ __forceinline__ void put_row(const Raw<N> &x, int is_bf16, int norm, float *to) {
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < N; i++)
        squares = fmaf(x(i, is_bf16), x(i, is_bf16), squares);
#pragma unroll
    for (int m = 16; m; m /= 2)
        squares += __shfl_xor_sync(~0u, squares, m);
    const float by = norm ? 1.f / sqrtf(squares + (float)DP_L2_EPS) : 1.f;
#pragma unroll
    for (int i = 0; i < N; i++)
        to[threadIdx.x % 32 * N + i] = x(i, is_bf16) * by;
}

/* Token t of request b. All loads first. */
template <int K, int R, int C>
static __device__ __forceinline__ void activate(const DecodeArgs &a, int b, int t, int hv,
                                                int first, Input<K, R, C> &to) {
    const dpg_decode &d = a.d;
    constexpr int N = K / 32;
    const int lane = threadIdx.x % 32, bf = d.dtype == DPG_BF16, gbf = d.gdtype == DPG_BF16;
    const int64_t token = (int64_t)b * d.T + t, row = token * d.HV + hv;
    const int64_t key = token * d.H + hv / (d.HV / d.H);
    const bool each = d.Kg > 1;
    Raw<N> q, k[R], g, bias;
    Raw<C / 32> v[R];
    const uint32_t A_log = param_word(a.t.A_log, hv, d.A_dtype);
    const uint32_t one_bias = param_word(each ? NULL : a.t.dt_bias, hv, d.bias_dtype);
    if (each) g.load(a.t.g, row * K, gbf);
    if (each && a.t.dt_bias) bias.load(a.t.dt_bias, (int64_t)hv * K, d.bias_dtype != DPG_F32);
    q.load(a.t.q, key * K, bf);
    for (int r = 0; r < R; r++)
        k[r].load(a.t.k, (key * R + r) * K, bf);
    for (int r = 0; r < R; r++)
        v[r].load(a.t.v, (row * R + r) * d.V + first, bf);
    const float one = each ? 0.f : ldx(a.t.g, row, gbf);
    const float beta = lane < R ? ldx(a.t.beta, row * R + lane, gbf) : 0.f;
    const float A = expf(param_value(A_log, d.A_dtype));
    float gate = 0.f;
#pragma unroll
    for (int i = 0; i < N; i++) {
        if (each || i == 0)
            gate = expf(gate_value(
                a.gates, each ? g(i, gbf) : one, A,
                param_value(each ? bias.word(i, d.bias_dtype) : one_bias, d.bias_dtype)));
        to.decay[lane * N + i] = gate;
    }
    put_row(q, bf, d.l2norm, to.q);
    for (int r = 0; r < R; r++)
        put_row(k[r], bf, d.l2norm, to.k[r]);
    for (int r = 0; r < R; r++)
        for (int i = 0; i < C / 32; i++)
            to.v[r][lane * (C / 32) + i] = v[r](i, bf);
    if (lane < R) to.beta[lane] = beta_value(a.gates, beta);
    if (lane == 0) to.row = row;
}
#endif
#endif
