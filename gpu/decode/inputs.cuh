/* gpu/decode/inputs.cuh - what the decode kernels share: a call's arguments, where its states lie,
 * and the inputs of a token as the recurrence takes them. */
#ifndef DPG_INPUTS_CUH
#define DPG_INPUTS_CUH
#include "decode/packed.cuh"
#include "decode/slots.cuh"
#include "dp_decode.h"
#include "plan/paths.cuh"
#include "plan/shared.cuh"

struct DecodeArgs {
    dpg_decode d;
    dpg_decode_tensors t;
    Dims gates; /* what gate_value and beta_value read */
};

static inline __host__ __device__ int form_of(const dpg_decode &d) {
    return d.packed ? 1 + d.packed : d.sdtype == DPG_BF16 ? IN_BF16 : IN_F32;
}

/* heads.cu: whole heads of 128 x 128 one by one. */
bool dpg_takes_heads(const Device &dev, const dpg_decode &d);
dp_status dpg_decode_heads(const Device &dev, const DecodeArgs &a, cudaStream_t s, dp_err *e);

/* Blocks may start while the kernel before ends: await_grid() waits for its stores. */
template <class... P>
static dp_status launch(const Device &dev, void (*kernel)(P...), int64_t blocks, int threads,
                        size_t shared, cudaStream_t stream, dp_err *e, P... args) {
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    const cudaLaunchConfig_t c = {
        dim3((unsigned)blocks), dim3((unsigned)threads), shared, stream, &early, dev.major >= 9};
    if (blocks > INT32_MAX) return dpg_fail(e, DP_EINPUT, "dpg_decode: too many requests");
    CK(e, cudaLaunchKernelEx(&c, kernel, args...));
    return DP_OK;
}

#ifdef __CUDACC__
enum { COLS = 4 }; /* of a state, neighbours, in a thread */

/* Group j of the four groups of rows of term n. A sum over rows adds eight terms two by two, a term
 * its groups two by two, a group its rows one by one. */
template <bool VK> static __device__ __forceinline__ int group_of(int n, int j) {
    return VK ? 16 * (n / 4) + n % 4 + 4 * j : 4 * n + j;
}
/* scale y to four columns of o from `at` on. */
static __device__ __forceinline__ void put_columns(const DecodeArgs &a, int64_t at,
                                                   const float y[COLS]) {
    alignas(16) float x[COLS];
#pragma unroll
    for (int n = 0; n < COLS; n++)
        x[n] = a.d.scale * y[n];
    if (a.d.odtype == DPG_BF16) {
        alignas(8) uint32_t words[2] = {pack2(x[0], x[1]), pack2(x[2], x[3])};
        copy<8>((bf16 *)a.t.o + at, words);
    } else
        copy<16>((float *)a.t.o + at, x);
}

static __device__ Slots slots_of(const DecodeArgs &a) {
    return {a.d.T, a.d.kept, a.d.slots, a.t.slot, a.t.accepted, a.t.length};
}
/* Head hv of a slot; n = K V. */
static __device__ HeadAt head_at(const DecodeArgs &a, int form, int64_t slot, int hv, int n) {
    return {(char *)a.t.states + (slot * a.d.HV + hv) * head_bytes(form, n), n, (int64_t)hv * n};
}
/* From where it is read. */
static __device__ HeadAt start_at(DecodeArgs a, int form, int64_t slot, int hv, int n) {
    if (a.t.start) a.t.states = (void *)a.t.start;
    return head_at(a, form, slot, hv, n);
}
/* o of tokens that are none, by a warp. */
template <int C>
static __device__ void clear_rest(const DecodeArgs &a, int b, int n, int hv, int first) {
    for (int t = n; t < a.d.T; t++)
        for (int c = threadIdx.x % 32; c < C; c += 32)
            stx(a.t.o, (((int64_t)b * a.d.T + t) * a.d.HV + hv) * a.d.V + first + c,
                a.d.odtype == DPG_BF16, 0.f);
}

/* A token as the recurrence takes it, C of its values. */
template <int K, int R, int C> struct alignas(16) Input {
    alignas(16) float q[K], k[R][K], decay[K], v[R][C], beta[4];
    int64_t row;   /* of o [B][T][HV]; -1: no more tokens */
    int64_t slot;  /* to which the state goes; -1: none */
    int hv, loads; /* loads: the state comes from memory */
};

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

/* Parts of a token that different warps may load: q, gates, values and beta, keys from here on. */
enum { PART_Q, PART_GATES, PART_VALUES, PART_KEYS };

/* Token t of request b: load(), all loads at once; put(), as the recurrence takes it. Bits say
 * which parts. */
template <int K, int R, int C> struct RawToken {
    static constexpr int N = K / 32, PARTS = PART_KEYS + R, ALL = (1 << PARTS) - 1;
    Raw<N> q, k[R], g, bias;
    Raw<C / 32> v[R];
    uint32_t A_log, one_bias;
    float one, beta;
    int64_t row;

    __device__ __forceinline__ void load(const DecodeArgs &a, int b, int t, int hv, int first,
                                         int parts = ALL) {
        const dpg_decode &d = a.d;
        const int lane = threadIdx.x % 32, bf = d.dtype == DPG_BF16, gbf = d.gdtype == DPG_BF16;
        const int64_t token = (int64_t)b * d.T + t;
        const int64_t key = token * d.H + hv / (d.HV / d.H);
        const bool each = d.Kg > 1;
        row = token * d.HV + hv;
        if (parts >> PART_GATES & 1) {
            A_log = param_word(a.t.A_log, hv, d.A_dtype);
            one_bias = param_word(each ? NULL : a.t.dt_bias, hv, d.bias_dtype);
            if (each) g.load(a.t.g, row * K, gbf);
            if (each && a.t.dt_bias)
                bias.load(a.t.dt_bias, (int64_t)hv * K, d.bias_dtype != DPG_F32);
            one = each ? 0.f : ldx(a.t.g, row, gbf);
        }
        if (parts >> PART_Q & 1) q.load(a.t.q, key * K, bf);
#pragma unroll
        for (int r = 0; r < R; r++)
            if (parts >> (PART_KEYS + r) & 1) k[r].load(a.t.k, (key * R + r) * K, bf);
        if (parts >> PART_VALUES & 1) {
#pragma unroll
            for (int r = 0; r < R; r++)
                v[r].load(a.t.v, (row * R + r) * d.V + first, bf);
            beta = lane < R ? ldx(a.t.beta, row * R + lane, gbf) : 0.f;
        }
    }
    __device__ __forceinline__ void put(const DecodeArgs &a, Input<K, R, C> &to,
                                        int parts = ALL) const {
        const dpg_decode &d = a.d;
        const int lane = threadIdx.x % 32, bf = d.dtype == DPG_BF16, gbf = d.gdtype == DPG_BF16;
        const bool each = d.Kg > 1;
        if (parts >> PART_GATES & 1) {
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
        }
        if (parts >> PART_Q & 1) put_row(q, bf, d.l2norm, to.q);
#pragma unroll
        for (int r = 0; r < R; r++)
            if (parts >> (PART_KEYS + r) & 1) put_row(k[r], bf, d.l2norm, to.k[r]);
        if (parts >> PART_VALUES & 1) {
#pragma unroll
            for (int r = 0; r < R; r++)
                for (int i = 0; i < C / 32; i++)
                    to.v[r][lane * (C / 32) + i] = v[r](i, bf);
            if (lane < R) to.beta[lane] = beta_value(a.gates, beta);
            if (lane == 0) to.row = row;
        }
    }
};
#endif
#endif
