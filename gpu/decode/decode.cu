/* gpu/decode/decode.cu - the recurrence token by token on states in slots (dp_decode.h): one pass
 * over the state in memory, whatever T is. Columns of the delta rule do not meet, so that blocks
 * need not.
 *
 * A block has a tile of a state in its registers (tile.cuh): all rows of 32 columns, or a whole
 * head. With every token:
 *
 *   S <- diag(exp g) S, shares of k S to shared memory                                    barrier
 *   w = beta (v - k S); o of the token before                                             barrier
 *   S += k' w, shares of S' q to shared memory; S to its slot
 *
 * k_decode        a block 32 columns of a request's head. Few requests, any shape.
 * k_decode_ring   a block some heads of 128 x 128, one by one. One more warp reads slots, starts
 *                 copies of the next states to shared memory and activates inputs. */
#include "decode/slots.cuh"
#include "decode/tile.cuh"
#include "fast/ring.cuh"
#include "plan/paths.cuh"
#include "plan/shared.cuh"
#include <type_traits>

#ifndef DECODE_BLOCKS
#define DECODE_BLOCKS 2 /* of a ring on a multiprocessor */
#endif
#ifndef DECODE_STAGED
#define DECODE_STAGED 65536 /* bytes of states that come while a block computes */
#endif
#ifndef DECODE_RING_FROM
#define DECODE_RING_FROM 1 /* heads a multiprocessor */
#endif
#define COMPUTE 1 /* named barrier */

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

/* ---- 32 columns a block ---------------------------------------------------------------------- */

/* f(form) with the form as a constant. */
template <bool PACKED, class F> static __device__ __forceinline__ void by_form(int form, F f) {
    if constexpr (!PACKED) {
        if (form == IN_F32)
            f(std::integral_constant<int, IN_F32>());
        else
            f(std::integral_constant<int, IN_BF16>());
    } else
        switch (form) {
        case IN_E4M3: return f(std::integral_constant<int, IN_E4M3>());
        case IN_E5M2: return f(std::integral_constant<int, IN_E5M2>());
        case IN_INT8: return f(std::integral_constant<int, IN_INT8>());
        case IN_INT8_LEFT: return f(std::integral_constant<int, IN_INT8_LEFT>());
        default: return f(std::integral_constant<int, IN_FP16>());
        }
}

#define INPUT_BYTES 24576 /* in shared memory, as many tokens as fit */
static __host__ __device__ int form_of(const dpg_decode &d) {
    return d.packed ? 1 + d.packed : d.sdtype == DPG_BF16 ? IN_BF16 : IN_F32;
}

template <int K, bool VK, int R, bool PACKED>
__global__ void __launch_bounds__(THREADS) k_decode(DecodeArgs a, int staged) {
    constexpr int COLS = 4, C = 8 * COLS;
    using P = Place<K, COLS, VK, -1>;
    extern __shared__ __align__(16) char room[];
    __shared__ Sums<R, C> sums;
    Input<K, R, C> *in = (Input<K, R, C> *)room;
    const dpg_decode &d = a.d;
    const int tiles = d.V / C, first = (int)(blockIdx.x % tiles) * C, warp = threadIdx.x / 32;
    const int hv = (int)(blockIdx.x / tiles % d.HV), b = (int)(blockIdx.x / tiles / d.HV);
    const Slots slots = slots_of(a);
    Tile<P, R, COLS, PACKED> S;
    await_grid();
    const int64_t from = slots.read(b);
    const int n = from < 0 ? 0 : slots.tokens(b), form = form_of(d);
    if (warp == 0) clear_rest<C>(a, b, n, hv, first);
    if (n == 0) return;
    by_form<PACKED>(form, [&](auto f) {
        constexpr int FORM = decltype(f)::value;
        S.template load<K, VK, FORM>(start_at(a, FORM, from, hv, K * d.V), d.V, first);
    });
    int64_t row = -1;
    for (int t = 0; t < n; t++) {
        const Input<K, R, C> &x = in[t % staged];
        if (t % staged == 0) {
            __syncthreads();
            for (int i = warp; i < staged && t + i < n; i += DECODE_WARPS)
                activate(a, b, t + i, hv, first, in[i]);
            __syncthreads();
        }
        const int64_t to = slots.write(b, t, n);
        S.decay(x, sums);
        __syncthreads();
        sum_up<P>(a, &x, sums, row, first);
        __syncthreads();
        S.write(x, sums);
        row = x.row;
        if (to >= 0)
            by_form<PACKED>(form, [&](auto f) {
                constexpr int FORM = decltype(f)::value;
                S.template store<K, VK, FORM>(head_at(a, FORM, to, hv, K * d.V), d.V, first);
            });
    }
    __syncthreads();
    sum_up<P, Input<K, R, C>>(a, NULL, sums, row, first);
}

/* ---- whole heads one by one ------------------------------------------------------------------ */

enum { SIDE = 128, TOKENS_AHEAD = 2 };

template <int FORM> struct Stages {
    static constexpr int BYTES =
        SIDE * SIDE * code_bytes(FORM) + (is_scaled(FORM) ? SIDE * SIDE / SCALE_COLUMNS * 4 : 0);
    static constexpr int FIT = DECODE_STAGED / BYTES;
    static constexpr int N = FIT < 1 ? 1 : FIT > MOST_STAGES ? MOST_STAGES : FIT;
};
template <int FORM> struct Room {
    char stage[Stages<FORM>::N][Stages<FORM>::BYTES];
    Input<SIDE, 1, SIDE> in[TOKENS_AHEAD];
    Sums<1, SIDE> sums;
};

/* The warp that feeds the others. */
template <int FORM>
static __device__ void feed(const DecodeArgs &a, Room<FORM> &room, Ring &states, Ring &inputs) {
    const dpg_decode &d = a.d;
    const int lane = threadIdx.x % 32;
    const Slots slots = slots_of(a);
    Turn stage(Stages<FORM>::N), token(TOKENS_AHEAD);
    for (unsigned x = blockIdx.x; x < (unsigned)d.B * d.HV; x += gridDim.x) {
        const int b = (int)(x / d.HV), hv = (int)(x % d.HV);
        const int64_t from = slots.read(b);
        const int n = from < 0 ? 0 : slots.tokens(b);
        clear_rest<SIDE>(a, b, n, hv, 0);
        if (n == 0) continue;
        uint64_t *full = open_stage(states, stage, Stages<FORM>::BYTES, lane);
        fill(room.stage[stage.slot], start_at(a, FORM, from, hv, SIDE * SIDE).codes,
             Stages<FORM>::BYTES, full, lane);
        fill_end(full, lane);
        stage.next();
        for (int t = 0; t < n; t++, token.next()) {
            Input<SIDE, 1, SIDE> &in = room.in[token.slot];
            const int64_t to = slots.write(b, t, n);
            token.wait_empty(inputs);
            activate(a, b, t, hv, 0, in);
            in.slot = to;
            in.hv = hv;
            in.loads = t == 0;
            bar_arrive(&inputs.full[token.slot]);
        }
    }
    token.wait_empty(inputs);
    room.in[token.slot].row = -1;
    bar_arrive(&inputs.full[token.slot]);
}

template <int FORM, bool VK>
__global__ void __launch_bounds__(THREADS + 32, DECODE_BLOCKS) k_decode_ring(DecodeArgs a) {
    constexpr int COLS = 16;
    using P = Place<SIDE, COLS, VK, FORM>;
    extern __shared__ __align__(16) char words[];
    __shared__ Ring states, inputs;
    Room<FORM> &room = *(Room<FORM> *)words;
    const int lane = threadIdx.x % 32;
    ring_init(states, DECODE_WARPS);
    ring_init(inputs, DECODE_WARPS, 32);
    __syncthreads();
    await_grid();
    if (threadIdx.x >= THREADS) {
        feed<FORM>(a, room, states, inputs);
        return;
    }
    Tile<P, 1, COLS, false> S;
    Turn stage(Stages<FORM>::N), token(TOKENS_AHEAD);
    int64_t row = -1;
    for (;; token.next()) {
        const Input<SIDE, 1, SIDE> &in = room.in[token.slot];
        token.wait_full(inputs);
        if (in.row < 0) break;
        if (in.loads) {
            stage.wait_full(states);
            S.template load<SIDE, VK, FORM>({room.stage[stage.slot], SIDE * SIDE, 0}, SIDE, 0);
            __syncwarp();
            bar_arrive_warp(&states.empty[stage.slot], lane);
            stage.next();
        }
        S.decay(in, room.sums);
        sync_part(COMPUTE, THREADS);
        sum_up<P>(a, &in, room.sums, row, 0);
        sync_part(COMPUTE, THREADS);
        S.write(in, room.sums);
        row = in.row;
        if (in.slot >= 0)
            S.template store<SIDE, VK, FORM>(head_at(a, FORM, in.slot, in.hv, SIDE * SIDE), SIDE,
                                             0);
        __syncwarp();
        bar_arrive_warp(&inputs.empty[token.slot], lane);
    }
    sync_part(COMPUTE, THREADS);
    sum_up<P, Input<SIDE, 1, SIDE>>(a, NULL, room.sums, row, 0);
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
    else if (d->V < 32 || d->V % 32)
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

template <int FORM, bool VK>
static dp_status launch_ring(const Device &dev, const DecodeArgs &a, cudaStream_t s, dp_err *e) {
    const int64_t heads = (int64_t)a.d.B * a.d.HV, most = (int64_t)DECODE_BLOCKS * dev.sms;
    CK(e, allow_shared(k_decode_ring<FORM, VK>, (int)sizeof(Room<FORM>)));
    return launch(dev, k_decode_ring<FORM, VK>, heads < most ? heads : most, THREADS + 32,
                  sizeof(Room<FORM>), s, e, a);
}
static dp_status launch_rings(const Device &dev, const DecodeArgs &a, cudaStream_t s, dp_err *e) {
    const bool vk = a.d.layout == DPG_STATE_VK;
    switch (form_of(a.d)) {
    case IN_F32:
        return vk ? launch_ring<IN_F32, true>(dev, a, s, e)
                  : launch_ring<IN_F32, false>(dev, a, s, e);
    case IN_BF16:
        return vk ? launch_ring<IN_BF16, true>(dev, a, s, e)
                  : launch_ring<IN_BF16, false>(dev, a, s, e);
    case IN_E4M3: return launch_ring<IN_E4M3, false>(dev, a, s, e);
    case IN_E5M2: return launch_ring<IN_E5M2, false>(dev, a, s, e);
    case IN_INT8: return launch_ring<IN_INT8, false>(dev, a, s, e);
    default: return launch_ring<IN_FP16, false>(dev, a, s, e);
    }
}
/* Blocks of a ring fit a multiprocessor of compute capability 9.0 alone. */
static bool takes_ring(const Device &dev, const dpg_decode &d) {
    return d.K == SIDE && d.V == SIDE && d.R == 1 && form_of(d) != IN_INT8_LEFT &&
           dev.shared >= 200 << 10 && (int64_t)d.B * d.HV >= (int64_t)DECODE_RING_FROM * dev.sms;
}

template <int K, bool VK, int R, bool PACKED>
static dp_status launch_tiles(const Device &dev, const DecodeArgs &a, cudaStream_t s, dp_err *e) {
    const int each = (int)sizeof(Input<K, R, 32>), fit = INPUT_BYTES / each;
    const int staged = a.d.T < fit ? a.d.T : fit;
    return launch(dev, k_decode<K, VK, R, PACKED>, (int64_t)a.d.B * a.d.HV * (a.d.V / 32), THREADS,
                  (size_t)staged * each, s, e, a, staged);
}
template <int K, bool VK, bool PACKED>
static dp_status launch_keys(const Device &dev, const DecodeArgs &a, cudaStream_t s, dp_err *e) {
    return a.d.R == 1   ? launch_tiles<K, VK, 1, PACKED>(dev, a, s, e)
           : a.d.R == 2 ? launch_tiles<K, VK, 2, PACKED>(dev, a, s, e)
                        : launch_tiles<K, VK, 4, PACKED>(dev, a, s, e);
}
template <int K>
static dp_status launch_of(const Device &dev, const DecodeArgs &a, cudaStream_t s, dp_err *e) {
    return a.d.packed                   ? launch_keys<K, false, true>(dev, a, s, e)
           : a.d.layout == DPG_STATE_VK ? launch_keys<K, true, false>(dev, a, s, e)
                                        : launch_keys<K, false, false>(dev, a, s, e);
}

extern "C" dp_status dpg_decode_run(const dpg_decode *d, const dpg_decode_tensors *t, void *stream,
                                    dp_err *e) {
    TRY(check(d, t, e));
    DecodeArgs a = {*d, *t, {}};
    Device dev = {};
    cudaStream_t s = (cudaStream_t)stream;
    a.gates.gate = d->gate;
    a.gates.lower_bound = d->lower_bound;
    a.gates.beta_form = d->beta_form;
    if (d->B == 0) return DP_OK;
    TRY(ask_device(&dev, e));
    FAULT_TO_DEVICE(e, s);
    if (takes_ring(dev, *d)) return launch_rings(dev, a, s, e);
    switch (d->K) {
    case 32: return launch_of<32>(dev, a, s, e);
    case 64: return launch_of<64>(dev, a, s, e);
    case 128: return launch_of<128>(dev, a, s, e);
    default: return launch_of<256>(dev, a, s, e);
    }
}
