/* gpu/fast/state_bare.cu - the state pass of a plan without w and u (`bare.cuh`). With one gate a
 * head k, q and v are the caller's rows:
 *
 *   Z' = S' k'      R' = v' - of_k o Z'      X' = R' (T B)'
 *   S' <- eC S' + (to_end o X') k            o' = of_q o S' q' + X' Aqk'
 *
 * With a gate a channel (GATED) rows of k and q are decayed, and v is the caller's:
 *
 *   X' = (v' - S' Kgam') (T B)'      S' <- eC o S' + X' kg      o' = scale S' qg' + X' Aqk'
 *
 * Two warpgroups share 64 columns of v, 16 a warp. One has the states. The other makes o of a chunk
 * from S q' and X of the first, one or two chunks later. One warp loads what the first reads,
 * another what the second does. Each part of a stage is its own again as soon as it was read. The
 * chain of chunks takes the time. So it contains no request that can be made before, and S q' is
 * made when X has gone into S. Phases of a chunk, and what shared memory holds; in brackets GATED:
 *
 *   states   Z     S rounded to fragments; Z                k [Kgam]
 *            X     R = v - of_k Z; X = T B R                v, T B, factors
 *            S     S <- eC S + k' (to_end X)                k, factors [kg, eC]; X[buf]
 *            S q'  of S before the chunk                    q [qg]; O[buf]
 *   o        o     of_q S q' + Aqk X                        O[buf], X[buf]; Aqk, of_q [Aqk] */
#include "fast/bare.cuh"
#include "fast/state.cuh"
#include "fast/whole.cuh"

namespace {

#define BLOCK_V (16 * SLICES_OF_SCAN) /* columns of v that a block owns */

/* Data of a chunk, ROWS, for the states; Behind: for o. GATED they are for S q', which is read last
 * and therefore has a ring of more stages. */
template <int K, bool GATED> struct Stage {
    bf16 k[C * K], q[C * K], v[C * BLOCK_V], TB[C * C];
    __device__ __forceinline__ const bf16 *to_end() const { return k; }
};
template <int K> struct Stage<K, true> {
    bf16 k[C * K], v[C * BLOCK_V], TB[C * C], kg[C * K], Aqk[C * C]; /* k: Kgam */
    __device__ __forceinline__ const bf16 *to_end() const { return kg; }
};
template <int K, bool GATED> struct Behind { bf16 Aqk[C * C]; };
template <int K> struct Behind<K, true> { bf16 q[C * K]; };
/* The stages of both rings lie behind it, on multiples of 1,024 bytes; their factors here. */
template <int K, bool GATED> struct Smem {
    Ring keys, middle, query, out; /* k; v, T B, factors; q; what o reads */
    uint64_t ready[2], taken[2];   /* S q' and X of a chunk are there; are read */
    StateFactors factors[MOST_STAGES];
    float of_q[MOST_STAGES][C];
    uint4 O[2][8][128], X[2][4][128];  /* S q', X: fragments, a lane's words together */
    alignas(1024) bf16 o[C * BLOCK_V]; /* to be written, ROWS */
    __device__ __forceinline__ void open() {
        ring_init(keys, 4, FULL_COUNT_16(1));
        ring_init(middle, 4, FULL_COUNT_16(1));
        ring_init(query, 4, FULL_COUNT_16(1));
        ring_init(out, 4);
    }
};
template <int K> struct Smem<K, true> {
    Ring keys, middle, back, out, query; /* Kgam; v, T B; kg, eC; Aqk; qg */
    uint64_t ready[2], taken[2];
    float eC[MOST_STAGES][K];
    uint4 O[2][8][128], X[2][4][128];
    alignas(1024) bf16 o[C * BLOCK_V];
    __device__ __forceinline__ void open() {
        ring_init(keys, 4);
        ring_init(middle, 4, FULL_COUNT_16(1));
        ring_init(back, 4);
        ring_init(query, 4);
        ring_init(out, 4);
    }
};
struct Args {
    StateArgs a;
    BareOut b;
    const bf16 *k, *q, *v; /* k: GATED Kgam */
    CUtensorMap k_map, q_map, v_map, o_map;
};

/* Shared memory of a block, and where its stages lie. */
template <int K, bool GATED> struct Held {
    Smem<K, GATED> &sm;
    Stage<K, GATED> *stages;
    Behind<K, GATED> *behind;
    __device__ __forceinline__ int queries(const Args &a) const { /* stages of their ring */
        return GATED ? MOST_STAGES : a.a.depth;
    }
    __device__ __forceinline__ const bf16 *q(const Turn &turn, const Turn &query) const {
        if constexpr (GATED)
            return behind[query.slot].q;
        else
            return stages[turn.slot].q;
    }
    __device__ __forceinline__ bf16 *Aqk(int slot) const {
        if constexpr (GATED)
            return stages[slot].Aqk;
        else
            return behind[slot].Aqk;
    }
};

/* ---- producers, two warps -------------------------------------------------------------------- */

/* Inputs of the states. */
template <int K, int V>
__device__ __forceinline__ void produce_states(const Held<K, false> &in, const Dims &d,
                                               const Args &a, Run run, int hv, int v0, int lane,
                                               Turn &turn, Turn &) {
    const int ROWS_OF_KEYS = C * K * 2, SQUARE = C * C * 2, FACTORS = (int)sizeof(StateFactors);
    int h = hv / d.G;
    auto &sm = in.sm;
    Chunk next = d.chunk[run.c0];
    for (int i = 0; i < run.n; i++, turn.next()) {
        int64_t tile = (int64_t)(run.c0 + i) * d.HV + hv;
        auto &s = in.stages[turn.slot];
        Chunk c = next;
        if (i + 1 < run.n) next = d.chunk[run.c0 + i + 1];
        bool whole = is_whole(c);
        uint64_t *keys = open_stage(sm.keys, turn, whole * ROWS_OF_KEYS, lane);
        fill_chunk<K>(s.k, a.k_map, a.k, d.H, h, K, 0, c, whole, keys, lane);
        if (whole) fill16_end_for_products(keys, lane);
        uint64_t *middle =
            open_stage(sm.middle, turn, SQUARE + FACTORS + whole * C * BLOCK_V * 2, lane);
        fill_chunk<BLOCK_V>(s.v, a.v_map, a.v, d.HV, hv, V, v0, c, whole, middle, lane);
        fill(s.TB, a.b.TB + tile * C * C, SQUARE, middle, lane);
        fill(&sm.factors[turn.slot], &a.b.factors[tile].state, FACTORS, middle, lane);
        fill16_end(middle, lane);
        uint64_t *query = open_stage(sm.query, turn, whole * ROWS_OF_KEYS, lane);
        fill_chunk<K>(s.q, a.q_map, a.q, d.H, h, K, 0, c, whole, query, lane);
        /* Lanes wait for what they copied: once for both. */
        if (!whole) fill16_end_for_products(keys, lane);
        fill16_end_for_products(query, lane);
    }
}
template <int K, int V>
__device__ __forceinline__ void produce_states(const Held<K, true> &in, const Dims &d,
                                               const Args &a, Run run, int hv, int v0, int lane,
                                               Turn &turn, Turn &query) {
    const int TILE = C * K * 2, SQUARE = C * C * 2;
    auto &sm = in.sm;
    Chunk next = d.chunk[run.c0];
    for (int i = 0; i < run.n; i++, turn.next(), query.next()) {
        int64_t tile = (int64_t)(run.c0 + i) * d.HV + hv;
        auto &s = in.stages[turn.slot];
        Chunk c = next;
        if (i + 1 < run.n) next = d.chunk[run.c0 + i + 1];
        uint64_t *full = open_stage(sm.query, query, TILE, lane);
        fill(in.behind[query.slot].q, a.a.qg + tile * C * K, TILE, full, lane);
        fill_end(full, lane);
        full = open_stage(sm.keys, turn, TILE, lane);
        fill(s.k, a.k + tile * C * K, TILE, full, lane);
        fill_end(full, lane);
        bool whole = is_whole(c);
        full = open_stage(sm.middle, turn, SQUARE + whole * C * BLOCK_V * 2, lane);
        fill(s.TB, a.b.TB + tile * C * C, SQUARE, full, lane);
        fill_chunk<BLOCK_V>(s.v, a.v_map, a.v, d.HV, hv, V, v0, c, whole, full, lane);
        fill16_end(full, lane);
        full = open_stage(sm.back, turn, TILE + K * 4, lane);
        fill(s.kg, a.a.kg + tile * C * K, TILE, full, lane);
        fill(sm.eC[turn.slot], a.a.eC + tile * K, K * 4, full, lane);
        fill_end(full, lane);
    }
}
/* Inputs of o; another warp loads them, since o is made after the states. */
template <int K, bool GATED>
__device__ __forceinline__ void produce_outs(const Held<K, GATED> &x, const Dims &d, const Args &a,
                                             Run run, int hv, int lane, Turn &turn) {
    const int SQUARE = C * C * 2, OF_Q = GATED ? 0 : C * 4;
    produce(x.sm.out, turn, run.n, SQUARE + OF_Q, lane, [&](int slot, int i, uint64_t *full) {
        int64_t tile = (int64_t)(run.c0 + i) * d.HV + hv;
        fill(x.Aqk(slot), a.b.Aqk + tile * C * C, SQUARE, full, lane);
        if constexpr (!GATED) fill(x.sm.of_q[slot], a.b.factors[tile].of_q, OF_Q, full, lane);
    });
}

/* ---- the warps of 16 columns ----------------------------------------------------------------- */

/* The factors of a chunk; they are asked for before the wait for a product. */
template <int K, bool GATED> struct Factors {
    float decay;
    OfTokens<8> of_k, to_end;
    __device__ __forceinline__ Factors(const Smem<K, false> &sm, int slot, int of_decay, int lane)
        : decay(sm.factors[of_decay].chunk[0]), of_k(sm.factors[slot].of_k, lane),
          to_end(sm.factors[slot].to_end, lane) {}
    /* 64 channels of S from k0 on, once all groups but LEFT have ended. */
    template <int LEFT>
    __device__ __forceinline__ void update(float (*S)[4], float (*y)[4], int, int) const {
        wg_wait<LEFT>(y);
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                S[n][e] = fmaf(decay, S[n][e], y[n][e]);
    }
};
template <int K> struct Factors<K, true> {
    const float *eC;
    __device__ __forceinline__ Factors(const Smem<K, true> &sm, int, int of_decay, int)
        : eC(sm.eC[of_decay]) {}
    template <int LEFT>
    __device__ __forceinline__ void update(float (*S)[4], float (*y)[4], int k0, int lane) const {
        float2 e[8];
        take_decays<8>(e, eC + k0, lane);
        wg_wait<LEFT>(y);
        decay_and_add<8>(S, y, e);
    }
};

/* The factors of S q' of a chunk's tokens, or the scale alone. */
template <bool GATED> struct OfQueries {
    OfTokens<8> f;
    template <class S>
    __device__ __forceinline__ OfQueries(const S &sm, int slot, const Dims &, int lane)
        : f(sm.of_q[slot], lane) {}
    __device__ __forceinline__ void times(float o[8][4]) const { f.times(o); }
};
template <> struct OfQueries<true> {
    float scale;
    template <class S>
    __device__ __forceinline__ OfQueries(const S &, int, const Dims &d, int) : scale(d.scale) {}
    __device__ __forceinline__ void times(float o[8][4]) const {
#pragma unroll
        for (int e = 0; e < 32; e++)
            o[e / 4][e % 4] *= scale;
    }
};

/* A warp's 16 columns, of either warpgroup. */
template <int K, int V, bool GATED, bool SEVERAL> struct ScanWarp {
    const Dims &d;
    const Args &a;
    const Held<K, GATED> in;
    int warp, slice, lane; /* slice: of the head's columns */

    __device__ __forceinline__ void free(Ring &ring, const Turn &turn) {
        __syncwarp();
        bar_arrive_warp(&ring.empty[turn.slot], lane);
    }
    __device__ __forceinline__ void state_chunk(float S[K / 8][4], int i, const Turn &turn,
                                                const Turn &query) {
        auto &sm = in.sm;
        const auto &st = in.stages[turn.slot];
        int buf = i % 2, thread = warp * 32 + lane;
        uint32_t sa[K / 16][4], ra[4][4], xa[4][4], xe[4][4];
        float z[8][4], o[8][4], x[8][4], y[K / 64][8][4];
        round_state<K>(sa, S);
        turn.wait_full(sm.keys);
        wg_fence();
        wg_times_rows<K>(z, sa, rows_desc(st.k, 1));
        turn.wait_full(sm.middle);
        if (i >= 2) bar_wait(&sm.taken[buf], (i / 2 - 1) & 1);
        Walk<> v(st.v, across_row(lane), across_p(lane));
        const Factors<K, GATED> f(sm, turn.slot, FAULT(BARE_DECAY) ? turn.before(i) : turn.slot,
                                  lane);
#pragma unroll
        for (int p = 0; p < 4; p++)
            ldsm4t(ra[p], v.at(warp, p));
        wg_wait<0>(z);
        if constexpr (GATED)
            free(sm.keys, turn);
        else
            f.of_k.times(z);
#pragma unroll
        for (int p = 0; p < 4; p++) {
            take_from(z + 2 * p, ra[p]);
            fragment(ra[p], z[2 * p], z[2 * p + 1]);
        }
        wg_fence();
        wg_times_lower<false>(x, ra, rows_desc(st.TB, 1));
        if constexpr (GATED) turn.wait_full(sm.back);
        wg_wait<0>(x);
#pragma unroll
        for (int p = 0; p < 4; p++)
            fragment(xa[p], x[2 * p], x[2 * p + 1]);
        if constexpr (!GATED) {
            f.to_end.times(x);
#pragma unroll
            for (int p = 0; p < 4; p++)
                fragment(xe[p], x[2 * p], x[2 * p + 1]);
        }
        wg_fence();
        wg_times_kg<K>(y, GATED ? xa : xe, rows_desc(st.to_end(), 64));
        free(sm.middle, turn);
        leave<4>(sm.X[buf], xa, thread);
        query.wait_full(sm.query);
        f.template update<K / 64 - 1>(S, y[0], 0, lane);
        wg_fence();
        wg_times_rows<K>(o, sa, rows_desc(in.q(turn, query), 1));
        if (K > 64) f.template update<1>(S + K / 8 - 8, y[K / 64 - 1], K - 64, lane);
        if constexpr (GATED)
            free(sm.back, turn);
        else
            free(sm.keys, turn);
        wg_wait<0>(o);
        free(sm.query, query);
        leave_sums(sm.O[buf], o, thread);
        bar_arrive(&sm.ready[buf]);
    }
    __device__ __forceinline__ void states() {
        int v0 = slice * 16;
        float S[K / 8][4];
        Turn turn(a.a.depth), query(in.queries(a));
        int i = 0; /* chunks of all heads so far */
        for (HeadsOf<SEVERAL> x(d, a.a, V / BLOCK_V); x.more();) {
            const Run run = x.run;
            const float *init = initial(d, a.a, run.starts, run.gseq, run.part, x.hv());
            each<K / 8>(S, lane,
                        [&](int k, int v, float &s) { s = init ? init[k * V + v0 + v] : 0.f; });
            for (int left = run.n; left; left--, i++, turn.next(), query.next())
                state_chunk(S, i, turn, GATED ? query : turn);
            const Run ahead = x.ahead();
            each<K / 8>(S, lane, [&](int k, int v, float &s) {
                last_state<false>(d, a.a, run, x.hv(), k, v0 + v, s);
            });
            leave_spoilt<K, V>(d, a.a, x.row(), x.hv(), v0, S, lane);
            x.next(ahead);
        }
    }
    __device__ __forceinline__ void outputs(int v0) {
        OutTile out = {d, a.o_map, (bf16 *)a.a.o, in.sm.o, 0, v0, warp, lane};
        each_out<SEVERAL>(d, a.a, V / BLOCK_V, out, [&](const Turn &turn, int i, const Chunk &c) {
            out_chunk(turn, i, out, c);
        });
    }
    __device__ __forceinline__ void out_chunk(const Turn &turn, int i, OutTile &out,
                                              const Chunk &c) {
        auto &sm = in.sm;
        int buf = i % 2, thread = warp * 32 + lane;
        uint32_t xa[4][4];
        float o[8][4];
        turn.wait_full(sm.out);
        const OfQueries<GATED> of_q(sm, turn.slot, d, lane);
        bar_wait(&sm.ready[buf], i / 2 & 1);
        take_sums(o, sm.O[buf], thread);
        take<4>(xa, sm.X[buf], thread);
        bar_arrive(&sm.taken[buf]);
        of_q.times(o);
        wg_fence();
        wg_times_lower<true>(o, xa, rows_desc(in.Aqk(turn.slot), 1));
        wg_wait<0>(o);
        free(sm.out, turn);
        out.store(o, c);
    }
};

#define BARE_THREADS 384 /* a warpgroup for states, one for o, one whose first two warps load */
template <int K, int V, bool GATED, bool SEVERAL>
__global__ void TOGETHER(V / BLOCK_V) __launch_bounds__(BARE_THREADS, 1)
    k_scan_bare(const __grid_constant__ Dims d, const __grid_constant__ Args a) {
    extern __shared__ __align__(1024) char raw[];
    auto &sm = *(Smem<K, GATED> *)raw;
    auto *stages = stages_behind<Stage<K, GATED>>(raw, sm);
    const Held<K, GATED> in = {sm, stages, (Behind<K, GATED> *)(stages + a.a.depth)};
    const int blocks = V / BLOCK_V;
    int first = blockIdx.x % blocks * SLICES_OF_SCAN;
    int warp = threadIdx.x / 32 % 4, lane = kept_lane(), part = threadIdx.x / 128;
    if (threadIdx.x == 0)
        for (int i = 0; i < 2; i++) {
            bar_init(&sm.ready[i], 128);
            bar_init(&sm.taken[i], 128);
        }
    sm.open();
    await_grid();
    __syncthreads();
    ScanWarp<K, V, GATED, SEVERAL> w = {d, a, in, warp, first + warp, lane};
    if (part == 0) {
        take_registers<240>();
        w.states();
    } else if (part == 1) {
        w.outputs(first * 16);
    } else {
        give_registers<96>();
        if (warp > 1) return;
        Turn turn(a.a.depth), query(in.queries(a));
        for (HeadsOf<SEVERAL> x(d, a.a, blocks); x.more();) {
            const Run run = x.run, ahead = x.ahead();
            if (warp == 0)
                produce_states<K, V>(in, d, a, run, x.hv(), first * 16, lane, turn, query);
            if (warp == 1) produce_outs(in, d, a, run, x.hv(), lane, turn);
            x.next(ahead);
        }
    }
}

/* ---- host ------------------------------------------------------------------------------------ */

template <int K, int V, bool GATED> struct Pass {
    static dp_status run(const Call &c, Args a) {
        const int behind = sizeof(Behind<K, GATED>);
        int bytes = ring_bytes(c.p, &a.a, sizeof(Smem<K, GATED>) + GATED * MOST_STAGES * behind,
                               sizeof(Stage<K, GATED>) + !GATED * behind);
        unsigned blocks = pass_blocks(c.p, &a.a, V / BLOCK_V);
        bool several = blocks < (unsigned)a.a.heads * (V / BLOCK_V);
        auto kernel = several ? k_scan_bare<K, V, GATED, true> : k_scan_bare<K, V, GATED, false>;
        return launch(queue_of(c), GATED ? "k_scan_gated" : "k_scan_bare", kernel, blocks,
                      BARE_THREADS, bytes, c.p->d, a);
    }
};
template <int K, int V> using BarePass = Pass<K, V, false>;
template <int K, int V> using GatedPass = Pass<K, V, true>;

} // namespace

dp_status fast_state_bare(const Call &c) {
    FAULT_TO_DEVICE(c.e, c.s);
    const Dims &d = c.p->d;
    Args a = {};
    a.a = forward_args(c);
    a.a.spoilt = at<int>(c, B_SPOILT);
    a.b = bare_out(c);
    a.v = (const bf16 *)c.t->v;
    TRY(map_rows(c, &a.v_map, ROWS_OF_V, c.t->v, d.HV, d.V));
    if (d.o_bf16) TRY(map_rows(c, &a.o_map, ROWS_OF_O, c.t->o, d.HV, d.V));
    if (d.Kg > 1) {
        a.a.kg = at<bf16>(c, B_KG);
        a.a.qg = at<bf16>(c, B_QG);
        a.a.eC = at<float>(c, B_EC);
        a.k = at<bf16>(c, B_KGAM);
        return by_widths<GatedPass>(c, a);
    }
    a.k = (const bf16 *)c.t->k;
    a.q = (const bf16 *)c.t->q;
    TRY(map_rows(c, &a.k_map, ROWS_OF_K, c.t->k, d.H, d.K));
    TRY(map_rows(c, &a.q_map, ROWS_OF_Q, c.t->q, d.H, d.K));
    return by_widths<BarePass>(c, a);
}
