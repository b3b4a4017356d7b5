/* gpu/fast/state_bare.cu - the state pass of a plan without w and u with one gate a head
 * (`bare.cuh`), from raw rows of k, q and v:
 *
 *   Z' = S' k'      R' = v' - of_k o Z'      X' = R' (T B)'
 *   S' <- eC S' + (to_end o X') k            o' = of_q o S' q' + X' Aqk'
 *
 * Two warpgroups share 64 columns of v, 16 a warp. One has the states. The other makes o of a chunk
 * from S q' and X of the first, one or two chunks later. One warp loads what the first reads,
 * another what the second does. Phases of a chunk, as in state_gated.cu, and what shared memory
 * holds:
 *
 *   states   Z     S rounded to fragments; Z                k
 *            X     R = v - of_k Z; X = T B R                v, T B, factors
 *            S     S <- eC S + k' (to_end X)                k, factors; X[buf]
 *            S q'  of S before the chunk                    q; O[buf]
 *   o        o     of_q S q' + Aqk X                        O[buf], X[buf]; Aqk, of_q */
#include "fast/bare.cuh"
#include "fast/state.cuh"
#include "fast/whole.cuh"

namespace {

#define BLOCK_V (16 * SLICES_OF_SCAN) /* columns of v that a block owns */

/* Data of a chunk, ROWS: for the states, for o. */
template <int K> struct StateStage { bf16 k[C * K], q[C * K], v[C * BLOCK_V], TB[C * C]; };
struct OutStage {
    bf16 Aqk[C * C];
};
/* The stages of both rings lie behind it, on multiples of 1,024 bytes; their factors here. */
struct BareSmem {
    Ring keys, middle, query, out; /* k; v, T B, factors; q; what o reads */
    uint64_t ready[2], taken[2];   /* S q' and X of a chunk are there; are read */
    StateFactors factors[MOST_STAGES];
    float of_q[MOST_STAGES][C];
    uint4 O[2][8][128], X[2][4][128];  /* S q', X: fragments, a lane's words together */
    alignas(1024) bf16 o[C * BLOCK_V]; /* to be written, ROWS */
};
struct BareArgs {
    StateArgs a;
    BareOut b;
    const bf16 *k, *q, *v;
    CUtensorMap k_map, q_map, v_map, o_map;
};

/* ---- producers, two warps -------------------------------------------------------------------- */

/* Inputs of the states. */
template <int K, int V>
__device__ __forceinline__ void produce_rows(BareSmem &sm, StateStage<K> *in, const Dims &d,
                                             const BareArgs &a, Run run, int hv, int v0, int lane,
                                             Turn &turn) {
    const int ROWS_OF_KEYS = C * K * 2, SQUARE = C * C * 2, FACTORS = (int)sizeof(StateFactors);
    int h = hv / d.G;
    Chunk next = d.chunk[run.c0];
    for (int i = 0; i < run.n; i++, turn.next()) {
        int64_t tile = (int64_t)(run.c0 + i) * d.HV + hv;
        StateStage<K> &s = in[turn.slot];
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
/* Inputs of o; another warp loads them, since o is made after the states. */
__device__ __forceinline__ void produce_outs(BareSmem &sm, OutStage *out, const Dims &d,
                                             const BareArgs &a, Run run, int hv, int lane,
                                             Turn &turn) {
    const int SQUARE = C * C * 2;
    produce(sm.out, turn, run.n, SQUARE + C * 4, lane, [&](int slot, int i, uint64_t *full) {
        int64_t tile = (int64_t)(run.c0 + i) * d.HV + hv;
        fill(out[slot].Aqk, a.b.Aqk + tile * C * C, SQUARE, full, lane);
        fill(sm.of_q[slot], a.b.factors[tile].of_q, C * 4, full, lane);
    });
}

/* ---- the warps of 16 columns ----------------------------------------------------------------- */

/* A warp's 16 columns, of either warpgroup. */
template <int K, int V, bool SEVERAL> struct BareWarp {
    const Dims &d;
    const BareArgs &a;
    BareSmem &sm;
    int warp, slice, lane; /* slice: of the head's columns */

    __device__ __forceinline__ void free(Ring &ring, const Turn &turn) {
        __syncwarp();
        bar_arrive_warp(&ring.empty[turn.slot], lane);
    }
    /* Everything that a product does not make is asked for before the wait for one. */
    __device__ __forceinline__ void state_chunk(float S[K / 8][4], const StateStage<K> &st,
                                                const StateFactors &f, int i, const Turn &turn) {
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
        float decay = FAULT(BARE_DECAY) ? sm.factors[turn.before(i)].chunk[0] : f.chunk[0];
        OfTokens<8> of_k(f.of_k, lane), to_end(f.to_end, lane);
#pragma unroll
        for (int p = 0; p < 4; p++)
            ldsm4t(ra[p], v.at(warp, p));
        wg_wait<0>(z);
        of_k.times(z);
#pragma unroll
        for (int p = 0; p < 4; p++) {
            take_from(z + 2 * p, ra[p]);
            fragment(ra[p], z[2 * p], z[2 * p + 1]);
        }
        wg_fence();
        wg_times_lower<false>(x, ra, rows_desc(st.TB, 1));
        wg_wait<0>(x);
#pragma unroll
        for (int p = 0; p < 4; p++)
            fragment(xa[p], x[2 * p], x[2 * p + 1]);
        to_end.times(x);
#pragma unroll
        for (int p = 0; p < 4; p++)
            fragment(xe[p], x[2 * p], x[2 * p + 1]);
        wg_fence();
        wg_times_kg<K>(y, xe, rows_desc(st.k, 64));
        free(sm.middle, turn);
        leave<4>(sm.X[buf], xa, thread);
        turn.wait_full(sm.query);
        update<K / 64 - 1>(S, y[0], decay);
        wg_fence();
        wg_times_rows<K>(o, sa, rows_desc(st.q, 1));
        if (K > 64) update<1>(S + K / 8 - 8, y[K / 64 - 1], decay);
        free(sm.keys, turn);
        wg_wait<0>(o);
        free(sm.query, turn);
        leave_sums(sm.O[buf], o, thread);
        bar_arrive(&sm.ready[buf]);
    }
    /* 64 channels of S, once all groups but LEFT have ended. */
    template <int LEFT>
    __device__ __forceinline__ void update(float (*S)[4], float (*y)[4], float decay) {
        wg_wait<LEFT>(y);
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                S[n][e] = fmaf(decay, S[n][e], y[n][e]);
    }
    __device__ __forceinline__ void states(StateStage<K> *stages) {
        int v0 = slice * 16;
        float S[K / 8][4];
        Turn turn(a.a.depth);
        int i = 0; /* chunks of all heads so far */
        for (HeadsOf<SEVERAL> x(d, a.a, V / BLOCK_V); x.more();) {
            const Run run = x.run;
            const float *init = initial(d, a.a, run.starts, run.gseq, run.part, x.hv());
            each<K / 8>(S, lane,
                        [&](int k, int v, float &s) { s = init ? init[k * V + v0 + v] : 0.f; });
            for (int left = run.n; left; left--, i++, turn.next())
                state_chunk(S, stages[turn.slot], sm.factors[turn.slot], i, turn);
            const Run ahead = x.ahead();
            each<K / 8>(S, lane, [&](int k, int v, float &s) {
                last_state<false>(d, a.a, run, x.hv(), k, v0 + v, s);
            });
            leave_spoilt<K, V>(d, a.a, x.row(), x.hv(), v0, S, lane);
            x.next(ahead);
        }
    }
    __device__ __forceinline__ void outputs(OutStage *stages, int v0) {
        OutTile out = {d, a.o_map, (bf16 *)a.a.o, sm.o, 0, v0, warp, lane};
        each_out<SEVERAL>(d, a.a, V / BLOCK_V, out, [&](const Turn &turn, int i, const Chunk &c) {
            out_chunk(stages[turn.slot], turn, i, out, c);
        });
    }
    __device__ __forceinline__ void out_chunk(const OutStage &stage, const Turn &turn, int i,
                                              OutTile &out, const Chunk &c) {
        int buf = i % 2, thread = warp * 32 + lane;
        uint32_t xa[4][4];
        float o[8][4];
        turn.wait_full(sm.out);
        OfTokens<8> of_q(sm.of_q[turn.slot], lane);
        bar_wait(&sm.ready[buf], i / 2 & 1);
        take_sums(o, sm.O[buf], thread);
        take<4>(xa, sm.X[buf], thread);
        bar_arrive(&sm.taken[buf]);
        of_q.times(o);
        wg_fence();
        wg_times_lower<true>(o, xa, rows_desc(stage.Aqk, 1));
        wg_wait<0>(o);
        free(sm.out, turn);
        out.store(o, c);
    }
};

#define BARE_THREADS 384 /* a warpgroup for states, one for o, one whose first two warps load */
template <int K, int V, bool SEVERAL>
__global__ void TOGETHER(V / BLOCK_V) __launch_bounds__(BARE_THREADS, 1)
    k_scan_bare(const __grid_constant__ Dims d, const __grid_constant__ BareArgs a) {
    extern __shared__ __align__(1024) char raw[];
    BareSmem &sm = *(BareSmem *)raw;
    auto *in = stages_behind<StateStage<K>>(raw, sm);
    auto *out = (OutStage *)(in + a.a.depth);
    const int blocks = V / BLOCK_V;
    int first = blockIdx.x % blocks * SLICES_OF_SCAN;
    int warp = threadIdx.x / 32 % 4, lane = kept_lane(), part = threadIdx.x / 128;
    if (threadIdx.x == 0)
        for (int i = 0; i < 2; i++) {
            bar_init(&sm.ready[i], 128);
            bar_init(&sm.taken[i], 128);
        }
    ring_init(sm.keys, 4, FULL_COUNT_16(1));
    ring_init(sm.middle, 4, FULL_COUNT_16(1));
    ring_init(sm.query, 4, FULL_COUNT_16(1));
    ring_init(sm.out, 4);
    await_grid();
    __syncthreads();
    BareWarp<K, V, SEVERAL> w = {d, a, sm, warp, first + warp, lane};
    if (part == 0) {
        take_registers<240>();
        w.states(in);
    } else if (part == 1) {
        w.outputs(out, first * 16);
    } else {
        give_registers<96>();
        if (warp > 1) return;
        Turn turn(a.a.depth);
        for (HeadsOf<SEVERAL> x(d, a.a, blocks); x.more();) {
            const Run run = x.run, ahead = x.ahead();
            if (warp == 0) produce_rows<K, V>(sm, in, d, a, run, x.hv(), first * 16, lane, turn);
            if (warp == 1) produce_outs(sm, out, d, a, run, x.hv(), lane, turn);
            x.next(ahead);
        }
    }
}

/* ---- host ------------------------------------------------------------------------------------ */

template <int K, int V> struct BarePass {
    static dp_status run(const Call &c, BareArgs a) {
        int bytes =
            ring_bytes(c.p, &a.a, sizeof(BareSmem), sizeof(StateStage<K>) + sizeof(OutStage));
        unsigned blocks = pass_blocks(c.p, &a.a, V / BLOCK_V);
        bool several = blocks < (unsigned)a.a.heads * (V / BLOCK_V);
        auto kernel = several ? k_scan_bare<K, V, true> : k_scan_bare<K, V, false>;
        return launch(queue_of(c), "k_scan_bare", kernel, blocks, BARE_THREADS, bytes, c.p->d, a);
    }
};

} // namespace

dp_status fast_state_bare(const Call &c) {
    FAULT_TO_DEVICE(c.e, c.s);
    BareArgs a = {};
    a.a = forward_args(c);
    a.a.spoilt = at<int>(c, B_SPOILT);
    a.b = bare_out(c);
    a.k = (const bf16 *)c.t->k;
    a.q = (const bf16 *)c.t->q;
    a.v = (const bf16 *)c.t->v;
    const Dims &d = c.p->d;
    TRY(map_rows(c, &a.k_map, ROWS_OF_K, c.t->k, d.H, d.K));
    TRY(map_rows(c, &a.q_map, ROWS_OF_Q, c.t->q, d.H, d.K));
    TRY(map_rows(c, &a.v_map, ROWS_OF_V, c.t->v, d.HV, d.V));
    if (d.o_bf16) TRY(map_rows(c, &a.o_map, ROWS_OF_O, c.t->o, d.HV, d.V));
    return by_widths<BarePass>(c, a);
}
