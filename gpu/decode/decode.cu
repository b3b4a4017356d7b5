/* gpu/decode/decode.cu - the recurrence token by token on states in slots (dp_decode.h): one pass
 * over the state in memory, whatever T is. Columns of the delta rule do not meet, so that blocks
 * need not.
 *
 * k_decode: a block has C columns of a request's head in its registers (tile.cuh): 32, or all
 * where one token comes to many heads. With every token:
 *
 *   S <- diag(exp g) S, terms of k S to shared memory                       barrier
 *   o of the token before; w = beta (v - k S), S += k' w, terms of S' q; S to its slot
 *
 * Windows and packed states of many heads of 128 x 128 take the kernel of heads.cu, with the same
 * bits. States [V][K] take that of columns.cu. */
#include "decode/tile.cuh"
#include <type_traits>

/* ---- columns of a block ---------------------------------------------------------------------- */

/* f(form) with the form as a constant. */
template <bool PACKED, class F> static __device__ __forceinline__ void by_form(int form, F f) {
    if constexpr (!PACKED) {
        switch (form) {
        case IN_F32: return f(std::integral_constant<int, IN_F32>());
        case IN_BF16: return f(std::integral_constant<int, IN_BF16>());
        default: return f(std::integral_constant<int, IN_F16>());
        }
    } else
        switch (form) {
        case IN_E4M3: return f(std::integral_constant<int, IN_E4M3>());
        case IN_E5M2: return f(std::integral_constant<int, IN_E5M2>());
        case IN_INT8: return f(std::integral_constant<int, IN_INT8>());
        case IN_INT8_LEFT: return f(std::integral_constant<int, IN_INT8_LEFT>());
        default: return f(std::integral_constant<int, IN_CHANCE>());
        }
}

/* w of a thread's columns, from terms of k S. A thread adds those of its columns, or of one alone
 * where a block has many, and then all ask for theirs. */
template <int R, int C, class In>
static __device__ __forceinline__ void residuals(const In &x, Terms<C> *terms, int first,
                                                 float w[R][COLS]) {
    constexpr int N = C > 32 ? 1 : COLS;
    const int col = C > 32 ? (int)threadIdx.x : first;
    for (int r = 0; r < R && col < C; r++) {
        add_terms<N>(w[r], terms[r], col);
        for (int j = 0; j < N; j++)
            w[r][j] = x.beta[r] * (x.v[r][col + j] - w[r][j]);
        if (C > 32) terms[r].of[0][col] = w[r][0];
    }
    if (C == 32) return;
    __syncthreads();
    for (int r = 0; r < R; r++)
        copy<4 * COLS>(w[r], &terms[r].of[0][first]);
}

/* A row of o from its terms, by a warp. */
template <int C>
static __device__ void put_terms(const DecodeArgs &a, int64_t row, const Terms<C> &terms,
                                 int first) {
    const int col = COLS * (threadIdx.x % 32);
    float y[COLS];
    if (col >= C) return;
    add_terms<COLS>(y, terms, col);
    put_columns(a, row * a.d.V + first + col, y);
}

template <int K, int R, bool PACKED, class Known, int C>
__global__ void __launch_bounds__(THREADS, C > 32               ? 2
                                           : K <= 128 && R == 1 ? 3
                                                                : 1)
    k_decode(DecodeArgs a, int staged, int ahead) {
    Known::tell(a);
    if (Known::TOKENS == 1) staged = 1;
    using P = Place<K, C>;
    using Token = RawToken<K, R, C / 32>;
    extern __shared__ __align__(16) char room[];
    __shared__ Terms<C> terms[2][R + 1]; /* of this token and the one before */
    Input<K, R, C> *in = (Input<K, R, C> *)room;
    const dpg_decode &d = a.d;
    const int b = blockIdx.z, hv = blockIdx.y, h = key_head(a, hv), first = blockIdx.x * C;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t row = (int64_t)b * d.T * d.HV + hv; /* of o, of the first token */
    const Slots slots = slots_of(a);
    Tile<P, R, PACKED> S;
    Token raw;
    await_grid();
    /* A warp loads a part of a token, or a token where there are more parts than warps: the first
     * ones while slots are read. */
    const int parts = staged * Token::PARTS <= DECODE_WARPS ? Token::PARTS : 1;
    const int mine = warp / parts, part = parts > 1 ? 1 << warp % parts : Token::ALL;
    const int value = first + lane * (C / 32);
    const int32_t slot = slots.named(b);
    if (mine < staged) raw.load(a, b, mine, h, hv, value, part);
    const int64_t from = slots.read(slot);
    const int all = from < 0 ? 0 : slots.tokens(b), n = Known::TOKENS == 1 ? 1 : all;
    const int form = form_of(d);
    if (warp == 0 && all < d.T) clear_rest<C>(a, b, all, hv, first);
    if (all == 0) return;
    by_form<PACKED>(form, [&](auto f) {
        constexpr int FORM = decltype(f)::value;
        S.template load<FORM>(start_at(a, FORM, from, hv, K * d.V), d.V, first);
    });
    if (C > 32 && threadIdx.x == THREADS - 1) ask_ahead(a, form, C, ahead);
    for (int t = 0; t < n; t++) {
        const Input<K, R, C> &x = in[t % staged];
        if (t % staged == 0) {
            const int here = n - t < staged ? n - t : staged;
            if (t) __syncthreads();
            if (mine < here) {
                if (t) raw.load(a, b, t + mine, h, hv, value, part);
                raw.put(a, in[mine], part);
            }
            __syncthreads();
        }
        if (!PACKED && t == 0)
            by_form<PACKED>(form, [&](auto f) { S.template open<decltype(f)::value>(); });
        const int64_t to = slots.write(b, t, n);
        Terms<C> *now = terms[t % 2], *last = terms[(t + 1) % 2];
        alignas(16) float w[R][COLS], y[COLS];
        S.decay(x, w);
        for (int r = 0; r < R; r++)
            add_lanes(w[r], now[r]);
        __syncthreads();
        if (t && warp == DECODE_WARPS - 1) put_terms(a, row + (t - 1) * d.HV, last[R], first);
        residuals<R>(x, now, P::col(0), w);
        S.write(x, w, y);
        if (to >= 0)
            by_form<PACKED>(form, [&](auto f) {
                constexpr int FORM = decltype(f)::value;
                S.template store<FORM>(head_at(a, FORM, to, hv, K * d.V), d.V, first);
            });
        add_lanes(y, now[R]);
    }
    __syncthreads();
    if (warp == 0) put_terms(a, row + (n - 1) * d.HV, terms[(n - 1) % 2][R], first);
}

/* ---- the call -------------------------------------------------------------------------------- */

static dp_status check(const dpg_decode *d, const dpg_decode_tensors *t, dp_err *e) {
    const int known = d->K == 32 || d->K == 64 || d->K == 128 || d->K == 256;
    const char *what = NULL;
    if (d->B < 0 || d->B > 65535)
        what = "B";
    else if (d->T < 1 || d->T > DPG_DECODE_TOKENS)
        what = "T";
    else if (!known)
        what = "K";
    else if (d->V < 32 || d->V % 32)
        what = "V";
    else if (d->R != 1 && d->R != 2 && d->R != 4)
        what = "R";
    else if (d->H < 1 || d->HV % d->H || d->HV > 65535)
        what = "HV";
    else if (d->Kg != 1 && d->Kg != d->K)
        what = "Kg";
    else if (d->kept != 1 && d->kept != d->T)
        what = "kept";
    else if (d->sdtype < DPG_F32 || d->sdtype > DPG_F16)
        what = "sdtype";
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

#define INPUT_BYTES 24576 /* in shared memory, as many tokens as fit */

template <int K, int R, bool PACKED, class Known = AnyCall, int C = 32>
static dp_status launch_tiles(const Device &dev, const DecodeArgs &a, cudaStream_t s, dp_err *e) {
    const int each = (int)sizeof(Input<K, R, C>), fit = INPUT_BYTES / each;
    const int staged = a.d.T < fit ? a.d.T : fit;
    const int ahead = blocks_ahead(dev, heads_of(a.d), K * C * code_bytes(form_of(a.d)));
    return launch({dev, s, e, false}, "k_decode", k_decode<K, R, PACKED, Known, C>,
                  tiles_of(a.d, C), THREADS, (size_t)staged * each, a, staged, ahead);
}
template <int K, bool PACKED>
static dp_status launch_keys(const Device &dev, const DecodeArgs &a, cudaStream_t s, dp_err *e) {
    return a.d.R == 1   ? launch_tiles<K, 1, PACKED>(dev, a, s, e)
           : a.d.R == 2 ? launch_tiles<K, 2, PACKED>(dev, a, s, e)
                        : launch_tiles<K, 4, PACKED>(dev, a, s, e);
}
template <bool PACKED>
static dp_status launch_one(const Device &dev, const DecodeArgs &a, cudaStream_t s, dp_err *e) {
    return with_one_token(a.d, [&](auto known) {
        using Known = decltype(known);
        if (!PACKED && heads_of(a.d) >= dev.sms)
            return launch_tiles<128, 1, false, Known, 128>(dev, a, s, e);
        return launch_tiles<128, 1, PACKED, Known>(dev, a, s, e);
    });
}
template <int K>
static dp_status launch_of(const Device &dev, const DecodeArgs &a, cudaStream_t s, dp_err *e) {
    return a.d.packed ? launch_keys<K, true>(dev, a, s, e) : launch_keys<K, false>(dev, a, s, e);
}

extern "C" dp_status dpg_decode_run(const dpg_decode *d, const dpg_decode_tensors *t, void *stream,
                                    dp_err *e) {
    TRY(check(d, t, e));
    DecodeArgs a = {*d, *t, {}, (float)d->H / d->HV};
    Device dev = {};
    cudaStream_t s = (cudaStream_t)stream;
    a.gates.gate = d->gate;
    a.gates.lower_bound = d->lower_bound;
    a.gates.beta_form = d->beta_form;
    if (d->B == 0) return DP_OK;
    TRY(ask_device(&dev, e));
    FAULT_TO_DEVICE(e, s);
    if (dpg_takes_columns(dev, a)) return dpg_decode_columns(dev, a, s, e);
    if (is_one_token(a) && !d->packed) return launch_one<false>(dev, a, s, e);
    if (dpg_takes_heads(dev, *d)) return dpg_decode_heads(dev, a, s, e);
    if (is_one_token(a)) return launch_one<true>(dev, a, s, e);
    switch (d->K) {
    case 32: return launch_of<32>(dev, a, s, e);
    case 64: return launch_of<64>(dev, a, s, e);
    case 128: return launch_of<128>(dev, a, s, e);
    default: return launch_of<256>(dev, a, s, e);
    }
}
