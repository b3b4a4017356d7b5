/* gpu/decode/heads.cu - the recurrence of decode.cu on many heads of 128 x 128: a block has some of
 * them, one by one. The copy engine brings states to a ring of stages in shared memory and takes
 * them to their slots from there. Warps need no barrier of the block:
 *
 *   four or eight that compute   A lane has 32 rows, or 16, of 4 columns. Sums over rows are sums
 *                                of lanes (group_of)
 *   loader                       reads slots and starts the copies to the next stages
 *   storer                       starts the copy to a slot, and frees the stage behind it
 *   two for inputs               tokens in turn */
#include "decode/inputs.cuh"
#include "fast/ring.cuh"

enum { SIDE = 128, STRIPS = SIDE / 32, FEEDERS = 2, HELPERS = 2 + FEEDERS };
enum { TOKENS_AHEAD = 4, MOST = 4 };

/* How the codes of a form lie in a stage and who computes with them. */
template <int FORM, bool VK> struct Plan {
    static constexpr int BYTES = code_bytes(FORM);
    static constexpr int BLOCKS = FORM == IN_F32 ? 1 : 2; /* on a multiprocessor */
    static constexpr int SHARE = FORM <= IN_F16 ? 1 : 2;  /* warps of 32 columns */
    static constexpr int READERS = STRIPS * SHARE, THREADS = 32 * (READERS + HELPERS);
    static constexpr int STAGES = BYTES > 1 ? 3 : MOST;
    /* Pieces of 16 rows, or of 4 columns; apart, so that the lanes of a warp meet no bank twice. */
    static constexpr int PIECES = VK ? 32 : 8, PIECE = SIDE * SIDE * BYTES / PIECES;
    static constexpr int EACH = PIECE + (VK ? 16 * BYTES : 32 * BYTES % 128);
    static constexpr int SCALES = is_scaled(FORM) ? 16 * STRIPS : 0; /* of 16 rows */
    static constexpr int SCALES_EACH = SCALES + 4;
    static constexpr int COMES = SIDE * SIDE * BYTES + 8 * 4 * SCALES;
};
template <int FORM, bool VK> struct Stage {
    using P = Plan<FORM, VK>;
    char codes[P::PIECES * P::EACH];
    float scales[SIDE / 16 * P::SCALES_EACH];

    __device__ float &scale(int row, int strip) {
        return scales[row / 16 * P::SCALES_EACH + row % 16 * STRIPS + strip];
    }
};
template <int FORM, bool VK> struct Room {
    alignas(16) Stage<FORM, VK> stage[Plan<FORM, VK>::STAGES];
    Input<SIDE, 1, SIDE> in[TOKENS_AHEAD];
    alignas(16) float sums[2][2][SIDE];    /* of half the rows: k S, S' q */
    alignas(16) float below[STRIPS][SIDE]; /* of the rows' scales (all_codes) */
};
struct Rings {
    RingOf<MOST> states;
    RingOf<TOKENS_AHEAD> inputs;
    uint64_t done[MOST]; /* computed: may go to its slot */
};

/* ---- 32 columns of a warp, or of two that have half of the rows each ------------------------- */

template <int FORM, bool VK> struct Strip {
    using P = Plan<FORM, VK>;
    using S = Stage<FORM, VK>;
    static constexpr int TERMS = 2 / P::SHARE, ROWS = 16 * TERMS;
    float s[ROWS][COLS]; /* row top(t, j) + i at 16 t + 4 j + i; columns col() and behind */
    int strip, half, four, part;

    __device__ Strip() {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        strip = warp % STRIPS;
        half = warp / STRIPS;
        four = VK ? lane % 4 : lane / 8;
        part = VK ? lane / 4 : lane % 8;
    }
    __device__ int col() const { return 32 * strip + COLS * part; }
    __device__ int term(int t) const { return four + 4 * (P::SHARE > 1 ? half : t); }
    __device__ int top(int t, int j) const { return 4 * group_of<VK>(term(t), j); }
    /* Four codes: of row top(t, j) + i, or of column i of four rows. */
    __device__ char *codes(S &stage, int t, int j, int i) const {
        const int piece = VK ? col() / 4 : term(t);
        const int at = VK ? i * SIDE + top(t, j) : (4 * j + i) * SIDE + col();
        return stage.codes + piece * P::EACH + at * P::BYTES;
    }
    /* f(t, j) of groups of four rows. */
    template <class F> static __device__ __forceinline__ void each_group(F f) {
#pragma unroll
        for (int t = 0; t < TERMS; t++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                f(t, j);
    }

    __device__ void load(S &stage) {
        each_group([&](int t, int j) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                alignas(16) uint32_t words[words_of(FORM, 4)];
                float x[4];
                copy<4 * P::BYTES>(words, codes(stage, t, j, i));
                numbers_of<FORM, 4>(words,
                                    is_scaled(FORM) ? stage.scale(top(t, j) + i, strip) : 1.f, x);
#pragma unroll
                for (int n = 0; n < 4; n++)
                    s[16 * t + 4 * j + (VK ? n : i)][VK ? i : n] = x[n];
            }
        });
    }

    /* f(row, a number, x of the row, sum) of all; sums of columns over all rows. */
    template <class F>
    __device__ __forceinline__ void sum_up(const float *x, const float *z, float (*other)[SIDE],
                                           F f, float y[COLS]) {
        float of[TERMS][2][COLS];
        each_group([&](int t, int j) {
            alignas(16) float a[4], b[4];
            float sum[COLS] = {};
            copy<16>(a, x + top(t, j));
            copy<16>(b, z + top(t, j));
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int n = 0; n < COLS; n++)
                    f(s[16 * t + 4 * j + i][n], a[i], b[i], n, sum[n]);
#pragma unroll
            for (int n = 0; n < COLS; n++)
                of[t][j / 2][n] = j % 2 ? of[t][j / 2][n] + sum[n] : sum[n];
        });
#pragma unroll
        for (int n = 0; n < COLS; n++) {
#pragma unroll
            for (int t = 0; t < TERMS; t++) {
                float x = of[t][0][n] + of[t][1][n];
                x += __shfl_xor_sync(~0u, x, VK ? 1 : 8);
                x += __shfl_xor_sync(~0u, x, VK ? 2 : 16);
                y[n] = t ? y[n] + x : x;
            }
        }
        if constexpr (P::SHARE > 1) {
            alignas(16) float more[COLS];
            if (four == 0) copy<16>(other[half] + col(), y);
            sync_part(1 + strip, 64);
            copy<16>(more, other[!half] + col());
#pragma unroll
            for (int n = 0; n < COLS; n++)
                y[n] += more[n];
        }
    }
    /* S <- diag(decay) S; k S. */
    __device__ void decay(const Input<SIDE, 1, SIDE> &in, float (*other)[SIDE], float y[COLS]) {
        sum_up(
            in.decay, in.of[1], other,
            [](float &number, float d, float k, int, float &sum) {
                number *= d;
                sum = fmaf(k, number, sum);
            },
            y);
    }
    /* S += k' w; S' q. */
    __device__ void write(const Input<SIDE, 1, SIDE> &in, const float w[COLS], float (*other)[SIDE],
                          float y[COLS]) {
        sum_up(
            in.of[1], in.of[0], other,
            [&](float &number, float k, float q, int n, float &sum) {
                number = fmaf(k, w[n], number);
                sum = fmaf(q, number, sum);
            },
            y);
    }

    /* The lane keeps the larger numbers of itself and of another lane, for half of the rows. */
    template <int N, int MASK> __device__ void exchange(float *most) const {
        const bool upper = part & MASK;
#pragma unroll
        for (int i = 0; i < N; i++) {
            const float mine = upper ? most[i + N] : most[i];
            const float other = upper ? most[i] : most[i + N];
            most[i] = max_or_nan(mine, __shfl_xor_sync(~0u, other, MASK));
        }
        if constexpr (MASK > 1) exchange<N / 2, MASK / 2>(most);
    }
    /* Scales of a lane's rows to the stage, what all_codes() multiplies by to the room. The
     * largest numbers of its rows are exchanged by halves among eight lanes, and in the end each
     * has those of some. Returns whether one is below LEAST_SCALE. */
    __device__ bool put_scales(S &stage, float *below) const {
        float most[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; i++)
            most[i] = max_or_nan(max_or_nan(fabsf(s[i][0]), fabsf(s[i][1])),
                                 max_or_nan(fabsf(s[i][2]), fabsf(s[i][3])));
        exchange<ROWS / 2, 4>(most);
        const int first = ROWS / 8 * part, row = 16 * term(first / 16) + first % 16;
        bool tiny = false;
#pragma unroll
        for (int i = 0; i < ROWS / 8; i++) {
            const float scale = unit_of<FORM>(most[i]);
            stage.scale(row + i, strip) = scale;
            below[row + i] = rcp(scale) * BELOW;
            tiny |= scale < LEAST_SCALE;
        }
        return __any_sync(~0u, tiny);
    }
    /* place: of the head's first number among those of the slot. */
    __device__ void store(S &stage, float *below, int64_t place) const {
        bool tiny = false;
        if constexpr (is_scaled(FORM)) {
            tiny = put_scales(stage, below);
            __syncwarp();
        }
        each_group([&](int t, int j) {
            alignas(16) uint32_t words[4][words_of(FORM, 4)];
            const float(*x)[COLS] = s + 16 * t + 4 * j;
            if constexpr (is_scaled(FORM)) {
                alignas(16) float low[4];
                copy<16>(low, below + top(t, j));
                all_codes<FORM, 16>(
                    x[0], low, [&](int i) { return stage.scale(top(t, j) + i, strip); }, tiny,
                    words[0]);
            } else {
                float y[4][4];
#pragma unroll
                for (int i = 0; i < 16; i++)
                    y[i / 4][i % 4] = VK ? x[i % 4][i / 4] : x[i / 4][i % 4];
                codes_of<FORM, 16>(y[0], salt_of(place + top(t, j) * SIDE + col()), SIDE, words[0]);
            }
#pragma unroll
            for (int i = 0; i < 4; i++)
                copy<4 * P::BYTES>(codes(stage, t, j, i), words[i]);
        });
    }
};

/* ---- the other warps ------------------------------------------------------------------------- */

/* f(b, hv, slot to read, tokens) of the block's heads. */
template <class F> static __device__ __forceinline__ void each_head(const DecodeArgs &a, F f) {
    const Slots slots = slots_of(a);
    for (unsigned x = blockIdx.x; x < (unsigned)a.d.B * a.d.HV; x += gridDim.x) {
        const int b = (int)(x / a.d.HV);
        const int64_t from = slots.read(slots.named(b));
        f(b, (int)(x % a.d.HV), from, from < 0 ? 0 : slots.tokens(b));
    }
}
/* A token has a stage if its state comes or goes: f(token, slot to which it goes). */
template <class F>
static __device__ __forceinline__ void each_stage(const DecodeArgs &a, int b, int n, F f) {
    for (int t = 0; t < n; t++) {
        const int64_t to = slots_of(a).write(b, t, n);
        if (t == 0 || to >= 0) f(t, to);
    }
}

template <int FORM, bool VK>
static __device__ void load_states(const DecodeArgs &a, Room<FORM, VK> &room, Rings &rings) {
    using P = Plan<FORM, VK>;
    const int lane = threadIdx.x % 32;
    Turn turn(P::STAGES);
    each_head(a, [&](int b, int hv, int64_t from, int tokens) {
        clear_rest<SIDE>(a, b, tokens, hv, 0);
        each_stage(a, b, tokens, [&](int t, int64_t) {
            uint64_t *full = open_stage(rings.states, turn, t ? 0 : P::COMES, lane);
            __syncwarp();
            if (t == 0) {
                Stage<FORM, VK> &stage = room.stage[turn.slot];
                const HeadAt head = start_at(a, FORM, from, hv, SIDE * SIDE);
                fill_pieces(stage.codes, P::EACH, head.codes, P::PIECE, P::PIECES, full, lane);
                if (P::SCALES)
                    fill_pieces(stage.scales, 4 * P::SCALES_EACH, head.scale(0), 4 * P::SCALES,
                                SIDE / 16, full, lane);
            }
            fill_end(full, lane);
            turn.next();
        });
    });
}

template <int FORM, bool VK>
static __device__ void store_states(const DecodeArgs &a, Room<FORM, VK> &room, Rings &rings) {
    using P = Plan<FORM, VK>;
    const int lane = threadIdx.x % 32;
    Turn turn(P::STAGES);
    each_head(a, [&](int b, int hv, int64_t, int tokens) {
        each_stage(a, b, tokens, [&](int, int64_t to) {
            Stage<FORM, VK> &stage = room.stage[turn.slot];
            bar_wait(&rings.done[turn.slot], turn.round & 1);
            if (to >= 0) {
                const HeadAt head = head_at(a, FORM, to, hv, SIDE * SIDE);
                if (P::SCALES)
                    drain_pieces(head.scale(0), 4 * P::SCALES, stage.scales, 4 * P::SCALES_EACH,
                                 SIDE / 16, lane);
                drain_pieces(head.codes, P::PIECE, stage.codes, P::EACH, P::PIECES, lane);
            }
            __syncwarp();
            bar_arrive_warp(&rings.states.empty[turn.slot], lane);
            turn.next();
        });
    });
}

template <int FORM, bool VK>
static __device__ void feed(const DecodeArgs &a, Room<FORM, VK> &room, Rings &rings, int mine) {
    const Slots slots = slots_of(a);
    Turn turn(TOKENS_AHEAD);
    int turns = 0;
    each_head(a, [&](int b, int hv, int64_t, int tokens) {
        for (int t = 0; t < tokens; t++, turn.next()) {
            if (turns++ % FEEDERS != mine) continue;
            Input<SIDE, 1, SIDE> &in = room.in[turn.slot];
            RawToken<SIDE, 1, SIDE / 32> raw;
            raw.load(a, b, t, key_head(a, hv), hv, threadIdx.x % 32 * (SIDE / 32));
            const int64_t to = slots.write(b, t, tokens);
            turn.wait_empty(rings.inputs);
            raw.put(a, in);
            in.slot = to;
            in.hv = hv;
            in.loads = t == 0;
            bar_arrive(&rings.inputs.full[turn.slot]);
        }
    });
    if (turns % FEEDERS != mine) return;
    turn.wait_empty(rings.inputs);
    room.in[turn.slot].row = -1;
    bar_arrive(&rings.inputs.full[turn.slot]);
}

template <int FORM, bool VK>
static __device__ void compute(const DecodeArgs &a, Room<FORM, VK> &room, Rings &rings) {
    const int lane = threadIdx.x % 32;
    Strip<FORM, VK> S;
    Turn stage(Plan<FORM, VK>::STAGES), token(TOKENS_AHEAD);
    for (;; token.next()) {
        const Input<SIDE, 1, SIDE> &in = room.in[token.slot];
        float y[COLS], w[COLS];
        token.wait_full(rings.inputs);
        if (in.row < 0) return;
        const bool loads = in.loads, stays = in.slot >= 0;
        const int64_t row = in.row;
        if (loads || stays) stage.wait_full(rings.states);
        if (loads) S.load(room.stage[stage.slot]);
        S.decay(in, room.sums[0], y);
#pragma unroll
        for (int n = 0; n < COLS; n++)
            w[n] = in.beta[0] * (in.v[0][S.col() + n] - y[n]);
        S.write(in, w, room.sums[1], y);
        if (stays)
            S.store(room.stage[stage.slot], room.below[S.strip], (int64_t)in.hv * SIDE * SIDE);
        drain_fence();
        __syncwarp();
        bar_arrive_warp(&rings.inputs.empty[token.slot], lane);
        if (loads || stays) {
            bar_arrive_warp(&rings.done[stage.slot], lane);
            stage.next();
        }
        if (S.four == 0 && S.half == 0) put_columns(a, row * SIDE + S.col(), y);
    }
}

template <int FORM, bool VK>
__global__ void __launch_bounds__(Plan<FORM, VK>::THREADS, Plan<FORM, VK>::BLOCKS)
    k_heads(DecodeArgs a) {
    using P = Plan<FORM, VK>;
    extern __shared__ __align__(128) char words[];
    __shared__ Rings rings;
    Room<FORM, VK> &room = *(Room<FORM, VK> *)words;
    const int warp = threadIdx.x / 32, helper = warp - P::READERS;
    ring_init(rings.states, 1);
    ring_init(rings.inputs, P::READERS, 32);
    if (threadIdx.x == 0)
        for (int i = 0; i < MOST; i++)
            bar_init(&rings.done[i], EMPTY_COUNT(P::READERS));
    bar_init_end();
    __syncthreads();
    await_grid();
    if (helper < 0) {
        if (P::BLOCKS > 1) take_registers<P::SHARE == 1 ? 192 : 96>();
        compute<FORM, VK>(a, room, rings);
    } else {
        if (P::BLOCKS > 1) give_registers<P::SHARE == 1 ? 64 : 48>();
        if (helper == 0)
            load_states<FORM, VK>(a, room, rings);
        else if (helper == 1)
            store_states<FORM, VK>(a, room, rings);
        else
            feed<FORM, VK>(a, room, rings, helper - 2);
    }
}

/* ---- the call -------------------------------------------------------------------------------- */

/* Blocks fit a multiprocessor of compute capability 9.0 alone. */
bool dpg_takes_heads(const Device &dev, const dpg_decode &d) {
    return d.K == SIDE && d.V == SIDE && d.R == 1 && form_of(d) != IN_INT8_LEFT &&
           dev.shared >= 200 << 10 && heads_of(d) >= dev.sms;
}
template <int FORM, bool VK>
static dp_status launch_heads(const Device &dev, const DecodeArgs &a, cudaStream_t s, dp_err *e) {
    const int64_t heads = heads_of(a.d), most = Plan<FORM, VK>::BLOCKS * dev.sms;
    return launch({dev, s, e, false}, "k_heads", k_heads<FORM, VK>,
                  dim3((unsigned)(heads < most ? heads : most)), Plan<FORM, VK>::THREADS,
                  sizeof(Room<FORM, VK>), a);
}
/* States that are not packed have both layouts. */
template <int FORM>
static dp_status launch_layout(const Device &dev, const DecodeArgs &a, cudaStream_t s, dp_err *e) {
    return a.d.layout == DPG_STATE_VK ? launch_heads<FORM, true>(dev, a, s, e)
                                      : launch_heads<FORM, false>(dev, a, s, e);
}
dp_status dpg_decode_heads(const Device &dev, const DecodeArgs &a, cudaStream_t s, dp_err *e) {
    switch (form_of(a.d)) {
    case IN_F32: return launch_layout<IN_F32>(dev, a, s, e);
    case IN_BF16: return launch_layout<IN_BF16>(dev, a, s, e);
    case IN_F16: return launch_layout<IN_F16>(dev, a, s, e);
    case IN_E4M3: return launch_heads<IN_E4M3, false>(dev, a, s, e);
    case IN_E5M2: return launch_heads<IN_E5M2, false>(dev, a, s, e);
    case IN_INT8: return launch_heads<IN_INT8, false>(dev, a, s, e);
    default: return launch_heads<IN_CHANCE, false>(dev, a, s, e);
    }
}
