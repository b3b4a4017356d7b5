/* gpu/decode/inputs.cuh - what the decode kernels share: a call's arguments, where its states lie,
 * and the inputs of a token as the recurrence takes them. */
#ifndef DPG_INPUTS_CUH
#define DPG_INPUTS_CUH
#include "decode/packed.cuh"
#include "decode/slots.cuh"
#include "dp_decode.h"
#include "plan/launch.cuh"
#include "plan/paths.cuh"

struct DecodeArgs {
    dpg_decode d;
    dpg_decode_tensors t;
    Dims gates;  /* what gate_value and beta_value read */
    float share; /* H / HV */
};

static inline __host__ __device__ int form_of(const dpg_decode &d) {
    return d.packed ? IN_F16 + d.packed : d.sdtype;
}

/* heads.cu: whole heads of 128 x 128 one by one. */
bool dpg_takes_heads(const Device &dev, const dpg_decode &d);
dp_status dpg_decode_heads(const Device &dev, const DecodeArgs &a, cudaStream_t s, dp_err *e);
/* columns.cu: states [V][K]. */
bool dpg_takes_columns(const Device &dev, const DecodeArgs &a);
dp_status dpg_decode_columns(const Device &dev, const DecodeArgs &a, cudaStream_t s, dp_err *e);

static inline int64_t heads_of(const dpg_decode &d) { return (int64_t)d.B * d.HV; }
/* Columns of a block, heads, requests: in the order of memory (reports/device/decode.txt). */
static inline dim3 tiles_of(const dpg_decode &d, int columns) {
    return dim3((unsigned)(d.V / columns), (unsigned)d.HV, (unsigned)d.B);
}

/* Blocks later than a block that asks L2 for their states: as many as have 32 KB a multiprocessor.
 * bytes: of a block's state. 0: none, as the device holds most blocks at once. */
static inline int blocks_ahead(const Device &dev, int64_t blocks, int bytes) {
    const int ahead = dev.sms * (32 << 10) / bytes;
    return dev.major >= 9 && blocks > 6 * ahead ? ahead : 0;
}

/* Facts of a call that its kernel knows. OneToken: one token of a layer in bf16, 128 x 128. Its
 * kernels have half of the instructions. */
struct AnyCall {
    enum { TOKENS = DPG_DECODE_TOKENS };
    static __host__ __device__ void tell(DecodeArgs &) {}
};
template <dp_gate GATE, int KG> struct OneToken {
    enum { TOKENS = 1 };
    static __host__ __device__ void tell(DecodeArgs &a) {
        dpg_decode &d = a.d;
        d.T = d.kept = d.R = d.l2norm = 1;
        d.K = d.V = 128;
        d.Kg = KG;
        d.gate = GATE;
        d.dtype = d.gdtype = d.odtype = DPG_BF16;
        d.A_dtype = d.bias_dtype = DPG_F32;
        a.gates.beta_form = DP_BETA_SIGMOID;
        a.t.accepted = a.t.length = NULL;
    }
};
static inline bool is_one_token(const DecodeArgs &a) {
    const dpg_decode &d = a.d;
    return d.T == 1 && d.R == 1 && d.l2norm && d.K == 128 && d.V == 128 &&
           (d.gate == DP_GATE_SOFTPLUS || d.gate == DP_GATE_LOWER_BOUND) && d.dtype == DPG_BF16 &&
           d.gdtype == DPG_BF16 && d.odtype == DPG_BF16 && d.A_dtype == DPG_F32 &&
           d.bias_dtype == DPG_F32 && d.beta_form == DP_BETA_SIGMOID && !a.t.length;
}
/* f(what is known) of a call of one token. */
template <class F> static dp_status with_one_token(const dpg_decode &d, F f) {
    if (d.gate == DP_GATE_SOFTPLUS)
        return d.Kg > 1 ? f(OneToken<DP_GATE_SOFTPLUS, 128>()) : f(OneToken<DP_GATE_SOFTPLUS, 1>());
    return d.Kg > 1 ? f(OneToken<DP_GATE_LOWER_BOUND, 128>())
                    : f(OneToken<DP_GATE_LOWER_BOUND, 1>());
}

#ifdef __CUDACC__
enum { COLS = 4 }; /* of a state, neighbours, in a thread */

/* Group j of the four groups of rows of term n. A sum over rows adds eight terms two by two, a term
 * its groups two by two, a group its rows one by one. */
template <bool VK> static __device__ __forceinline__ int group_of(int n, int j) {
    return VK ? 16 * (n / 4) + n % 4 + 4 * j : 4 * n + j;
}
/* The key head of head hv < 65,536: a product is less than 1 / (2 HV / H) away. */
static __device__ __forceinline__ int key_head(const DecodeArgs &a, int hv) {
    return (int)((hv + 0.5f) * a.share);
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
/* Asks for the state of a later block of a grid as tiles_of(), whose blocks have neighbours in
 * memory, by one thread. So DRAM reads whole rows of them, in order. */
static __device__ __forceinline__ void ask_ahead(const DecodeArgs &a, int form, int columns,
                                                 int ahead) {
    if (ahead == 0) return;
    const unsigned parts = a.d.V / columns, heads = a.d.HV;
    const unsigned block = blockIdx.x + parts * (blockIdx.y + heads * blockIdx.z) + ahead;
    const unsigned head = block / parts, b = head / heads;
    if (b >= gridDim.z) return;
    const Slots slots = slots_of(a);
    const int64_t from = slots.read(slots.named((int)b));
    if (from < 0) return;
    const int bytes = a.d.K * columns * code_bytes(form);
    fetch_to_L2(start_at(a, form, from, (int)(head % heads), a.d.K * a.d.V).codes +
                    (int)(block % parts) * bytes,
                bytes);
}
/* o of tokens that are none, by a warp. */
template <int C>
static __device__ void clear_rest(const DecodeArgs &a, int b, int n, int hv, int first) {
#pragma unroll 1
    for (int t = n; t < a.d.T; t++)
        for (int c = threadIdx.x % 32; c < C; c += 32)
            stx(a.t.o, (((int64_t)b * a.d.T + t) * a.d.HV + hv) * a.d.V + first + c,
                a.d.odtype == DPG_BF16, 0.f);
}

/* A token as the recurrence takes it, C of its values. */
template <int K, int R, int C> struct alignas(16) Input {
    alignas(16) float of[1 + R][K], decay[K], v[R][C], beta[4]; /* of: q, keys */
    int64_t row;   /* of o [B][T][HV]; -1: no more tokens */
    int64_t slot;  /* to which the state goes; -1: none */
    int hv, loads; /* loads: the state comes from memory */
};

/* ---- inputs of a token, by one warp ---------------------------------------------------------- */

/* 1 / sqrt(x) of x > 0 to one unit of the last place: a step of Newton's behind the device's. */
static __device__ __forceinline__ float rsqrt_of(float x) {
    const float y = rsqrtf(x), off = fmaf(-x * y, y, 1.f);
    return y > 0.f ? fmaf(0.5f * y, off, y) : y;
}

/* N neighbours, as they lie in memory: their loads wait for none. */
template <int N> struct Raw {
    alignas(16) uint32_t words[N] = {};

    __device__ __forceinline__ void load(const void *x, int64_t at, int is_bf16) {
        if (is_bf16)
            copy<2 * N>(words, (const bf16 *)x + at);
        else
            copy<4 * N>(words, (const float *)x + at);
    }
    /* Numbers of a parameter, whose type may be fp16. */
    __device__ __forceinline__ void values(int type, float *to) const {
        if (type == DPG_F16)
#pragma unroll
            for (int i = 0; i < N; i++)
                to[i] = fp16_value(words[i / 2] >> i % 2 * 16 & 0xffff);
        else
#pragma unroll
            for (int i = 0; i < N; i++)
                to[i] = (*this)(i, type == DPG_BF16);
    }
    __device__ __forceinline__ float operator()(int i, int is_bf16) const {
        return !is_bf16 ? __uint_as_float(words[i])
               : i % 2  ? unpack2(words[i / 2]).y
                        : unpack2(words[i / 2]).x;
    }
};

/* A lane's N numbers of M rows that a warp has, normed if norm. */
template <int M, int N>
static __device__ __forceinline__ void rows_of(const Raw<N> *x, int is_bf16, int norm,
                                               float (*to)[N]) {
    float squares[M] = {};
#pragma unroll
    for (int r = 0; r < M; r++)
#pragma unroll
        for (int i = 0; i < N; i++) {
            to[r][i] = x[r](i, is_bf16);
            squares[r] = fmaf(to[r][i], to[r][i], squares[r]);
        }
    if (!norm) return;
#pragma unroll
    for (int m = 16; m; m /= 2)
#pragma unroll
        for (int r = 0; r < M; r++)
            squares[r] += __shfl_xor_sync(~0u, squares[r], m);
#pragma unroll
    for (int r = 0; r < M; r++) {
        const float by = rsqrt_of(squares[r] + (float)DP_L2_EPS);
#pragma unroll
        for (int i = 0; i < N; i++)
            to[r][i] *= by;
    }
}

/* Parts of a token that different warps may load: gates, values and beta, q and keys from here. */
enum { PART_GATES, PART_VALUES, PART_ROWS };

/* Token t of request b: load(), all loads at once; put(), as the recurrence takes it. Bits say
 * which parts. A lane has C of the values from `first` on. */
template <int K, int R, int C> struct RawToken {
    static constexpr int N = K / 32, PARTS = PART_ROWS + 1 + R, ALL = (1 << PARTS) - 1;
    Raw<N> of[1 + R], g, bias; /* of: q, keys */
    Raw<C> v[R];
    uint32_t A_log, one_bias;
    float one, beta;
    int64_t row;

    /* h: the head's key head. */
    __device__ __forceinline__ void load(const DecodeArgs &a, int b, int t, int h, int hv,
                                         int first, int parts = ALL) {
        const dpg_decode &d = a.d;
        const int lane = threadIdx.x % 32, bf = d.dtype == DPG_BF16, gbf = d.gdtype == DPG_BF16;
        const int64_t token = (int64_t)b * d.T + t;
        const int64_t key = token * d.H + h;
        const bool each = d.Kg > 1;
        const int mine = lane * N;
        row = token * d.HV + hv;
        if (parts >> PART_GATES & 1) {
            A_log = param_word(a.t.A_log, hv, d.A_dtype);
            one_bias = param_word(each ? NULL : a.t.dt_bias, hv, d.bias_dtype);
            if (each) g.load(a.t.g, row * K + mine, gbf);
            if (each && a.t.dt_bias)
                bias.load(a.t.dt_bias, (int64_t)hv * K + mine, d.bias_dtype != DPG_F32);
            one = each ? 0.f : ldx(a.t.g, row, gbf);
        }
        if (parts >> PART_ROWS & 1) of[0].load(a.t.q, key * K + mine, bf);
#pragma unroll
        for (int r = 0; r < R; r++)
            if (parts >> (PART_ROWS + 1 + r) & 1)
                of[1 + r].load(a.t.k, (key * R + r) * K + mine, bf);
        if (parts >> PART_VALUES & 1) {
#pragma unroll
            for (int r = 0; r < R; r++)
                v[r].load(a.t.v, (row * R + r) * d.V + first, bf);
            beta = ldx(a.t.beta, row * R + lane % R, gbf);
        }
    }
    /* Decays of the lane's rows. */
    __device__ __forceinline__ void decays(const DecodeArgs &a, float *to) const {
        switch (a.d.gate) {
        case DP_GATE_LOG: return decays_of<DP_GATE_LOG>(a.d, to);
        case DP_GATE_SOFTPLUS: return decays_of<DP_GATE_SOFTPLUS>(a.d, to);
        default: return decays_of<DP_GATE_LOWER_BOUND>(a.d, to);
        }
    }
    template <int GATE>
    __device__ __forceinline__ void decays_of(const dpg_decode &d, float *to) const {
        const float A = expf(param_value(A_log, d.A_dtype)), lower = d.lower_bound * LOG2E;
        const auto decay = [&](float x, float more) {
            return GATE == DP_GATE_LOG ? expf(x) : ex2(gate_fast<GATE>(x + more, A, 0.f, lower));
        };
        if (d.Kg == 1) {
            const float same = decay(one, param_value(one_bias, d.bias_dtype));
#pragma unroll
            for (int i = 0; i < N; i++)
                to[i] = same;
            return;
        }
        float biases[N];
        bias.values(d.bias_dtype, biases);
#pragma unroll
        for (int i = 0; i < N; i++)
            to[i] = decay(g(i, d.gdtype == DPG_BF16), biases[i]);
    }
    __device__ __forceinline__ void put(const DecodeArgs &a, Input<K, R, 32 * C> &to,
                                        int parts = ALL) const {
        const dpg_decode &d = a.d;
        const int lane = threadIdx.x % 32, bf = d.dtype == DPG_BF16;
        if (parts >> PART_GATES & 1) decays(a, to.decay + lane * N);
#pragma unroll
        for (int r = 0; r <= R; r++)
            if (parts >> (PART_ROWS + r) & 1)
                rows_of<1>(of + r, bf, d.l2norm, (float(*)[N])(to.of[r] + lane * N));
        if (parts >> PART_VALUES & 1) {
#pragma unroll
            for (int r = 0; r < R; r++)
                for (int i = 0; i < C; i++)
                    to.v[r][lane * C + i] = v[r](i, bf);
            if (lane < R) to.beta[lane] = beta_value(a.gates, beta);
            if (lane == 0) to.row = row;
        }
    }
};
#endif
#endif
