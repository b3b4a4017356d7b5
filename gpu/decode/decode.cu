/* gpu/decode/decode.cu - the recurrence token by token on states in slots (dp_decode.h): one pass
 * over the state in memory, whatever T is.
 *
 * A block owns 32 columns (of V) of one request's state of one head, all K rows of them in its
 * registers. Columns of the delta rule do not meet, so that blocks do not.
 *
 *   load     32 columns of the state to registers; meanwhile
 *   stage    q, k normed, exp(g), beta of all tokens to shared memory                     barrier
 *   token    S <- diag(exp g) S;  E = v - k S;                              barrier (layout [K][V])
 *            S += k' (beta E);  o = scale S' q;  S to its slot              barrier (layout [K][V])
 *
 * Registers and sums over rows by layout:
 *   [K][V]   a thread has 4 columns of every 16th row; shuffles, then 4 warps in shared memory
 *   [V][K]   a thread has 2 columns of 4 rows in 32; shuffles alone
 * Loads and stores are 16 bytes a thread (8 for bf16 states, 4 for packed ones). The 8 threads of a
 * row make the scale of a packed state. */
#include "decode/packed.cuh"
#include "decode/slots.cuh"
#include "dp_decode.h"
#include "plan/shared.cuh"
#include "plan/values.cuh"

#define COLUMNS 32
#define THREADS 128
#define WARPS (THREADS / 32)

struct DecodeArgs {
    dpg_decode d;
    dpg_decode_tensors t;
    Dims gates; /* what gate_value and beta_value read */
};

/* ---- a block's columns of a state ------------------------------------------------------------ */

template <int K, bool VK> struct Tile {
    static constexpr int ROWS = VK ? K / 8 : K / 16, COLS = VK ? 2 : 4;
    float s[ROWS][COLS];

    static __device__ int part() { return threadIdx.x / 8; } /* of 16 */
    static __device__ int quad() { return threadIdx.x % 8 * 4; }
    static __device__ int row(int i) {
        return VK ? quad() + 32 * (i / 4) + i % 4 : part() + 16 * i;
    }
    static __device__ int col(int j) { return VK ? part() + 16 * j : quad() + j; }

    /* Four neighbours in memory: of rows 4 i .. in column j, or of columns in row i. */
    template <class F> __device__ void quads(int V, F f) {
        if constexpr (VK)
            for (int i = 0; i < ROWS; i += 4)
                for (int j = 0; j < COLS; j++)
                    f((int64_t)col(j) * K + row(i), s[i][j], s[i + 1][j], s[i + 2][j], s[i + 3][j]);
        else
            for (int i = 0; i < ROWS; i++)
                f((int64_t)row(i) * V + col(0), s[i][0], s[i][1], s[i][2], s[i][3]);
    }
    /* at: the tile's first number among those of the array of states. */
    __device__ void load(const void *states, int64_t at, int V, int is_bf16) {
        quads(V, [&](int64_t x, float &a, float &b, float &c, float &d) {
            if (is_bf16) {
                uint2 r = *(const uint2 *)((const bf16 *)states + at + x);
                float2 low = unpack2(r.x), high = unpack2(r.y);
                a = low.x;
                b = low.y;
                c = high.x;
                d = high.y;
            } else {
                float4 r = *(const float4 *)((const float *)states + at + x);
                a = r.x;
                b = r.y;
                c = r.z;
                d = r.w;
            }
        });
    }
    __device__ void store(void *states, int64_t at, int V, int is_bf16) {
        quads(V, [&](int64_t x, float a, float b, float c, float d) {
            if (is_bf16)
                *(uint2 *)((bf16 *)states + at + x) = make_uint2(pack2(a, b), pack2(c, d));
            else
                *(float4 *)((float *)states + at + x) = make_float4(a, b, c, d);
        });
    }

    /* The thread's share of x' S, summed over what its warp holds of each column. */
    __device__ void warp_sums(const float *x, float y[COLS]) const {
        for (int j = 0; j < COLS; j++)
            y[j] = 0.f;
        for (int i = 0; i < ROWS; i++)
            for (int j = 0; j < COLS; j++)
                y[j] = fmaf(x[row(i)], s[i][j], y[j]);
        for (int j = 0; j < COLS; j++)
            for (int m = VK ? 1 : 8; m < (VK ? 8 : 32); m *= 2)
                y[j] += __shfl_xor_sync(~0u, y[j], m);
    }
    /* y[r] = x[r]' S of the thread's columns, for n vectors x of K numbers; sums: of all warps. */
    template <int n>
    __device__ void column_sums(const float *x, float y[n][COLS],
                                float (*sums)[WARPS][COLUMNS]) const {
        for (int r = 0; r < n; r++)
            warp_sums(x + r * K, y[r]);
        if constexpr (!VK) {
            for (int r = 0; r < n && threadIdx.x % 32 < 8; r++)
                for (int j = 0; j < COLS; j++)
                    sums[r][threadIdx.x / 32][col(j)] = y[r][j];
            __syncthreads();
            for (int r = 0; r < n; r++)
                for (int j = 0; j < COLS; j++) {
                    y[r][j] = sums[r][0][col(j)];
                    for (int w = 1; w < WARPS; w++)
                        y[r][j] += sums[r][w][col(j)];
                }
        }
    }
};

/* ---- inputs of all tokens -------------------------------------------------------------------- */

/* A token in shared memory: q, R keys, exp(g), K numbers each. */
template <int K, int R> struct Staged {
    float *at;
    __device__ float *of(int t) const { return at + (int64_t)t * (R + 2) * K; }
    __device__ float *q(int t) const { return of(t); }
    __device__ float *k(int t) const { return of(t) + K; }
    __device__ float *decay(int t) const { return of(t) + (R + 1) * K; }
};

/* One row of q or k by one warp. */
template <int K>
static __device__ void stage_row(const void *x, int64_t from, int is_bf16, int l2norm, float *to) {
    float v[K / 32], squares = 0.f;
    for (int i = 0; i < K / 32; i++) {
        v[i] = ldx(x, from + threadIdx.x % 32 + 32 * i, is_bf16);
        squares = fmaf(v[i], v[i], squares);
    }
    for (int m = 16; m; m /= 2)
        squares += __shfl_xor_sync(~0u, squares, m);
    const float norm = l2norm ? sqrtf(squares + (float)DP_L2_EPS) : 1.f;
    for (int i = 0; i < K / 32; i++)
        to[threadIdx.x % 32 + 32 * i] = l2norm ? v[i] / norm : v[i];
}

template <int K, int R>
static __device__ void stage(const DecodeArgs &a, int b, int hv, int n, Staged<K, R> to,
                             float (*beta)[R]) {
    const dpg_decode &d = a.d;
    const int h = hv / (d.HV / d.H), bf = d.dtype == DPG_BF16, gbf = d.gdtype == DPG_BF16;
    const float A = a.t.A_log ? expf(a.t.A_log[hv]) : 1.f;
    for (int x = threadIdx.x / 32; x < n * (R + 1); x += WARPS) {
        const int t = x / (R + 1), r = x % (R + 1) - 1;
        const int64_t token = (int64_t)b * d.T + t;
        if (r < 0)
            stage_row<K>(a.t.q, (token * d.H + h) * K, bf, d.l2norm, to.q(t));
        else
            stage_row<K>(a.t.k, ((token * d.H + h) * R + r) * K, bf, d.l2norm, to.k(t) + r * K);
    }
    for (int x = threadIdx.x; x < n * K; x += THREADS) {
        const int t = x / K, kg = d.Kg == 1 ? 0 : x % K;
        const int64_t at = (((int64_t)b * d.T + t) * d.HV + hv) * d.Kg + kg;
        const float bias = a.t.dt_bias ? a.t.dt_bias[hv * d.Kg + kg] : 0.f;
        to.decay(t)[x % K] = expf(gate_value(a.gates, ldx(a.t.g, at, gbf), A, bias));
    }
    for (int x = threadIdx.x; x < n * R; x += THREADS) {
        const int64_t at = (((int64_t)b * d.T + x / R) * d.HV + hv) * R + x % R;
        beta[x / R][x % R] = beta_value(a.gates, ldx(a.t.beta, at, gbf));
    }
}

/* ---- one token ------------------------------------------------------------------------------- */

template <int K, bool VK> static __device__ void decay_state(Tile<K, VK> &S, const float *decay) {
    for (int i = 0; i < S.ROWS; i++)
        for (int j = 0; j < S.COLS; j++)
            S.s[i][j] *= decay[S.row(i)];
}

/* v: of the token and head [R][V], from the block's first column on. */
template <int K, bool VK, int R>
static __device__ void write_state(Tile<K, VK> &S, const DecodeArgs &a, const float *k,
                                   const float *beta, int64_t v, float (*sums)[WARPS][COLUMNS]) {
    float E[R][Tile<K, VK>::COLS];
    S.template column_sums<R>(k, E, sums);
    for (int r = 0; r < R; r++)
        for (int j = 0; j < S.COLS; j++) {
            const float x = ldx(a.t.v, v + (int64_t)r * a.d.V + S.col(j), a.d.dtype == DPG_BF16);
            E[r][j] = beta[r] * (x - E[r][j]);
        }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < S.ROWS; i++)
            for (int j = 0; j < S.COLS; j++)
                S.s[i][j] = fmaf(k[r * K + S.row(i)], E[r][j], S.s[i][j]);
}

/* to: the block's first column of o. */
template <int K, bool VK>
static __device__ void read_state(const Tile<K, VK> &S, const DecodeArgs &a, const float *q,
                                  int64_t to, float (*sums)[WARPS][COLUMNS]) {
    float y[1][Tile<K, VK>::COLS];
    S.template column_sums<1>(q, y, sums);
    const bool mine = VK ? threadIdx.x % 8 == 0 : threadIdx.x < 8;
    for (int j = 0; j < S.COLS && mine; j++)
        stx(a.t.o, to + S.col(j), a.d.odtype == DPG_BF16, a.d.scale * y[0][j]);
}

/* ---- a request ------------------------------------------------------------------------------- */

/* Tile and what it left out, from and to a slot. */
template <int K, bool VK, bool PACKED> struct Kept {
    Tile<K, VK> S;
    LeftOut<PACKED ? K / 16 : 1> left;

    __device__ void load(const DecodeArgs &a, int64_t head, int first) {
        const int64_t in_slot = VK ? (int64_t)first * K : first;
        const void *from = a.t.start ? a.t.start : a.t.states;
        if constexpr (PACKED)
            load_packed(S, left, PackedHead((void *)from, head, a.d), a.d, first);
        else
            S.load(from, head * K * a.d.V + in_slot, a.d.V, a.d.sdtype == DPG_BF16);
    }
    __device__ void store(const DecodeArgs &a, int64_t head, int first) {
        const int64_t in_slot = VK ? (int64_t)first * K : first;
        if constexpr (PACKED)
            store_packed(S, left, PackedHead(a.t.states, head, a.d), a.d, first);
        else
            S.store(a.t.states, head * K * a.d.V + in_slot, a.d.V, a.d.sdtype == DPG_BF16);
    }
};

template <int K, bool VK, int R, bool PACKED>
__global__ void __launch_bounds__(THREADS) k_decode(DecodeArgs a) {
    extern __shared__ float staged[];
    __shared__ float beta[DPG_DECODE_TOKENS][R], sums[R + 1][WARPS][COLUMNS];
    const dpg_decode &d = a.d;
    const int tiles = d.V / COLUMNS, first = (int)(blockIdx.x % tiles) * COLUMNS;
    const int hv = (int)(blockIdx.x / tiles % d.HV), b = (int)(blockIdx.x / tiles / d.HV);
    const Slots slots = {d.T, d.kept, d.slots, a.t.slot, a.t.accepted, a.t.length};
    const int64_t from = slots.read(b);
    const int n = from < 0 ? 0 : slots.tokens(b);
    const Staged<K, R> in = {staged};
    Kept<K, VK, PACKED> kept;
    for (int t = n; t < d.T; t++)
        if (threadIdx.x < COLUMNS)
            stx(a.t.o, (((int64_t)b * d.T + t) * d.HV + hv) * d.V + first + threadIdx.x,
                d.odtype == DPG_BF16, 0.f);
    if (n == 0) return;
    kept.load(a, from * d.HV + hv, first);
    stage<K, R>(a, b, hv, n, in, beta);
    __syncthreads();
    for (int t = 0; t < n; t++) {
        const int64_t row = ((int64_t)b * d.T + t) * d.HV + hv;
        decay_state(kept.S, in.decay(t));
        write_state<K, VK, R>(kept.S, a, in.k(t), beta[t], row * R * d.V + first, sums);
        read_state(kept.S, a, in.q(t), row * d.V + first, sums + R);
        const int64_t to = slots.write(b, t, n);
        if (to >= 0) kept.store(a, to * d.HV + hv, first);
    }
}

/* ---- the call -------------------------------------------------------------------------------- */

static dp_status check(const dpg_decode *d, const dpg_decode_tensors *t, dp_err *e) {
    const int known = d->K == 32 || d->K == 64 || d->K == 128 || d->K == 256;
    const char *what = NULL;
    if (d->B < 0)
        what = "B";
    else if (d->T < 1 || d->T > DPG_DECODE_TOKENS)
        what = "T";
    else if (!known)
        what = "K";
    else if (d->V < COLUMNS || d->V % COLUMNS)
        what = "V";
    else if (d->R != 1 && d->R != 2 && d->R != 4)
        what = "R";
    else if (d->H < 1 || d->HV % d->H)
        what = "HV";
    else if (d->Kg != 1 && d->Kg != d->K)
        what = "Kg";
    else if (d->kept != 1 && d->kept != d->T)
        what = "kept";
    else if (d->packed && d->layout != DPG_STATE_KV)
        what = "packed states of layout [V][K]";
    if (what)
        return dpg_fail(e, DP_EINPUT,
                        "dpg_decode: %s: B = %d, T = %d, H = %d, HV = %d, K = %d, V = %d, R = %d, "
                        "Kg = %d, kept = %d (gpu/dp_decode.h says what is taken)",
                        what, d->B, d->T, d->H, d->HV, d->K, d->V, d->R, d->Kg, d->kept);
    if (!t->q || !t->k || !t->v || !t->g || !t->beta || !t->o || !t->states || !t->slot)
        return dpg_fail(e, DP_EINPUT, "dpg_decode: a tensor that every call needs is NULL");
    return DP_OK;
}

template <int K, bool VK, int R, bool PACKED>
static dp_status launch(const DecodeArgs &a, cudaStream_t stream, dp_err *e) {
    const dpg_decode &d = a.d;
    const size_t bytes = (size_t)d.T * (R + 2) * K * sizeof(float);
    const int64_t blocks = (int64_t)d.B * d.HV * (d.V / COLUMNS);
    if (blocks > INT32_MAX) return dpg_fail(e, DP_EINPUT, "dpg_decode: B = %d: too many", d.B);
    CK(e, allow_shared(k_decode<K, VK, R, PACKED>, (int)bytes));
    k_decode<K, VK, R, PACKED><<<(unsigned)blocks, THREADS, bytes, stream>>>(a);
    CK_LAUNCH(e, "k_decode");
    return DP_OK;
}

template <int K, bool VK, bool PACKED>
static dp_status launch_keys(const DecodeArgs &a, cudaStream_t s, dp_err *e) {
    return a.d.R == 1   ? launch<K, VK, 1, PACKED>(a, s, e)
           : a.d.R == 2 ? launch<K, VK, 2, PACKED>(a, s, e)
                        : launch<K, VK, 4, PACKED>(a, s, e);
}

template <int K> static dp_status launch_of(const DecodeArgs &a, cudaStream_t s, dp_err *e) {
    return a.d.packed                   ? launch_keys<K, false, true>(a, s, e)
           : a.d.layout == DPG_STATE_VK ? launch_keys<K, true, false>(a, s, e)
                                        : launch_keys<K, false, false>(a, s, e);
}

extern "C" dp_status dpg_decode_run(const dpg_decode *d, const dpg_decode_tensors *t, void *stream,
                                    dp_err *e) {
    TRY(check(d, t, e));
    DecodeArgs a = {*d, *t, {}};
    a.gates.gate = d->gate;
    a.gates.lower_bound = d->lower_bound;
    a.gates.beta_form = d->beta_form;
    cudaStream_t s = (cudaStream_t)stream;
    if (d->B == 0) return DP_OK;
    FAULT_TO_DEVICE(e, s);
    switch (d->K) {
    case 32: return launch_of<32>(a, s, e);
    case 64: return launch_of<64>(a, s, e);
    case 128: return launch_of<128>(a, s, e);
    default: return launch_of<256>(a, s, e);
    }
}
