/* gpu/fast/state_gated.cu - the state pass of a plan without w and u (`bare.cuh`) with a gate a
 * channel. It reads decayed rows of k and q and raw rows of v:
 *
 *   X' = (v' - S' Kgam') (T B)'      S' <- eC o S' + X' kg      o' = scale S' qg' + X' Aqk'
 *
 * Two warpgroups share 64 columns of v, 16 a warp. One has the states. The other makes o of a chunk
 * from S qg' and X of the first, one or two chunks later. One warp loads what the first reads,
 * another Aqk; each part of a stage is its own again as soon as it was read. The chain of chunks
 * takes the time. So it contains no request that can be made before, and S qg' is made when X has
 * gone into S. Phases of a chunk, and what shared memory holds:
 *
 *   states   Z     S rounded to fragments; Z                front: Kgam
 *            X     R = v - Z; X = T B R                     middle: v, T B
 *            S     S <- eC S + kg' X                        back: kg, eC; X[buf]
 *            S qg' of S before the chunk                    query: qg; O[buf]
 *   o        o     scale S qg' + Aqk X                      O[buf], X[buf]; last: Aqk */
#include "fast/bare.cuh"
#include "fast/state.cuh"
#include "fast/whole.cuh"

namespace {

#define BLOCK_V (16 * SLICES_OF_SCAN) /* columns of v that a block owns */

/* Data of a chunk, ROWS. */
template <int K> struct GatedStage {
    bf16 kgam[C * K], v[C * BLOCK_V], TB[C * C], kg[C * K], Aqk[C * C];
};
/* qg, which is read last and therefore has a ring of more stages. */
template <int K> struct QueryStage { bf16 qg[C * K]; };
/* The stages lie behind it, on multiples of 1,024 bytes. */
template <int K> struct GatedSmem {
    Ring front, middle, back, last; /* of parts of the same stages */
    Ring query;
    uint64_t ready[2], taken[2]; /* S qg' and X of a chunk are there; are read */
    float eC[MOST_STAGES][K];
    uint4 O[2][8][128], X[2][4][128];  /* S qg', X: fragments, a lane's words together */
    alignas(1024) bf16 o[C * BLOCK_V]; /* to be written, ROWS */
};
struct GatedArgs {
    StateArgs a;
    const bf16 *kgam, *TB, *v;
    CUtensorMap v_map, o_map;
};

template <int K, int V>
__device__ __forceinline__ void
produce_tiles(GatedSmem<K> &sm, GatedStage<K> *stages, QueryStage<K> *queries, const Dims &d,
              const GatedArgs &a, Run run, int hv, int v0, int lane, Turn &turn, Turn &query) {
    const int TILE = C * K * 2, SQUARE = C * C * 2;
    Chunk next = d.chunk[run.c0];
    for (int i = 0; i < run.n; i++, turn.next(), query.next()) {
        int64_t tile = (int64_t)(run.c0 + i) * d.HV + hv;
        GatedStage<K> &s = stages[turn.slot];
        Chunk c = next;
        if (i + 1 < run.n) next = d.chunk[run.c0 + i + 1];
        uint64_t *full = open_stage(sm.query, query, TILE, lane);
        fill(queries[query.slot].qg, a.a.qg + tile * C * K, TILE, full, lane);
        fill_end(full, lane);
        full = open_stage(sm.front, turn, TILE, lane);
        fill(s.kgam, a.kgam + tile * C * K, TILE, full, lane);
        fill_end(full, lane);
        bool whole = is_whole(c);
        full = open_stage(sm.middle, turn, SQUARE + whole * C * BLOCK_V * 2, lane);
        fill(s.TB, a.TB + tile * C * C, SQUARE, full, lane);
        fill_chunk<BLOCK_V>(s.v, a.v_map, a.v, d.HV, hv, V, v0, c, whole, full, lane);
        fill16_end(full, lane);
        full = open_stage(sm.back, turn, TILE + K * 4, lane);
        fill(s.kg, a.a.kg + tile * C * K, TILE, full, lane);
        fill(sm.eC[turn.slot], a.a.eC + tile * K, K * 4, full, lane);
        fill_end(full, lane);
    }
}
/* Another one's, since o is made behind the states. */
template <int K>
__device__ __forceinline__ void produce_Aqk(GatedSmem<K> &sm, GatedStage<K> *stages, const Dims &d,
                                            const GatedArgs &a, Run run, int hv, int lane,
                                            Turn &turn) {
    const int SQUARE = C * C * 2;
    produce(sm.last, turn, run.n, SQUARE, lane, [&](int slot, int i, uint64_t *full) {
        int64_t tile = (int64_t)(run.c0 + i) * d.HV + hv;
        fill(stages[slot].Aqk, a.a.Aqk + tile * C * C, SQUARE, full, lane);
    });
}

/* A warp's 16 columns, of either warpgroup; slice: of the head's columns. */
template <int K, int V, bool SEVERAL> struct GatedWarp {
    const Dims &d;
    const GatedArgs &a;
    GatedSmem<K> &sm;
    int warp, slice, lane;

    __device__ __forceinline__ void free(Ring &ring, const Turn &turn) {
        __syncwarp();
        bar_arrive_warp(&ring.empty[turn.slot], lane);
    }
    __device__ __forceinline__ void state_chunk(float S[K / 8][4], const GatedStage<K> &st,
                                                const QueryStage<K> &qs, int i, const Turn &turn,
                                                const Turn &query) {
        int buf = i % 2, thread = warp * 32 + lane;
        const float *eC = sm.eC[FAULT(BARE_DECAY) ? turn.before(i) : turn.slot];
        uint32_t sa[K / 16][4], ra[4][4], xa[4][4];
        float z[8][4], o[8][4], x[8][4], y[K / 64][8][4];
        round_state<K>(sa, S);
        turn.wait_full(sm.front);
        wg_fence();
        wg_times_rows<K>(z, sa, rows_desc(st.kgam, 1));
        turn.wait_full(sm.middle);
        if (i >= 2) bar_wait(&sm.taken[buf], (i / 2 - 1) & 1);
        Walk<> v(st.v, across_row(lane), across_p(lane));
#pragma unroll
        for (int p = 0; p < 4; p++)
            ldsm4t(ra[p], v.at(warp, p));
        wg_wait<0>(z);
        free(sm.front, turn);
#pragma unroll
        for (int p = 0; p < 4; p++) {
            take_from(z + 2 * p, ra[p]);
            fragment(ra[p], z[2 * p], z[2 * p + 1]);
        }
        wg_fence();
        wg_times_lower<false>(x, ra, rows_desc(st.TB, 1));
        turn.wait_full(sm.back);
        wg_wait<0>(x);
#pragma unroll
        for (int p = 0; p < 4; p++)
            fragment(xa[p], x[2 * p], x[2 * p + 1]);
        wg_fence();
        wg_times_kg<K>(y, xa, rows_desc(st.kg, 64));
        free(sm.middle, turn);
        leave<4>(sm.X[buf], xa, thread);
        query.wait_full(sm.query);
        update<K / 64 - 1>(S, y[0], eC);
        wg_fence();
        wg_times_rows<K>(o, sa, rows_desc(qs.qg, 1));
        if (K > 64) update<1>(S + K / 8 - 8, y[K / 64 - 1], eC + K - 64);
        free(sm.back, turn);
        wg_wait<0>(o);
        free(sm.query, query);
        leave_sums(sm.O[buf], o, thread);
        bar_arrive(&sm.ready[buf]);
    }
    /* 64 channels of S, once all groups but LEFT have ended. */
    template <int LEFT>
    __device__ __forceinline__ void update(float (*S)[4], float (*y)[4], const float *eC) {
        float2 e[8];
        take_decays<8>(e, eC, lane);
        wg_wait<LEFT>(y);
        decay_and_add<8>(S, y, e);
    }
    __device__ __forceinline__ void states(const GatedStage<K> *stages,
                                           const QueryStage<K> *queries) {
        int v0 = slice * 16;
        float S[K / 8][4];
        Turn turn(a.a.depth), query(MOST_STAGES);
        int i = 0; /* chunks of all heads so far */
        for (HeadsOf<SEVERAL> x(d, a.a, V / BLOCK_V); x.more();) {
            const Run run = x.run;
            const float *init = initial(d, a.a, run.starts, run.gseq, run.part, x.hv());
            each<K / 8>(S, lane,
                        [&](int k, int v, float &s) { s = init ? init[k * V + v0 + v] : 0.f; });
            for (int left = run.n; left; left--, i++, turn.next(), query.next())
                state_chunk(S, stages[turn.slot], queries[query.slot], i, turn, query);
            const Run ahead = x.ahead();
            each<K / 8>(S, lane, [&](int k, int v, float &s) {
                last_state<false>(d, a.a, run, x.hv(), k, v0 + v, s);
            });
            leave_spoilt<K, V>(d, a.a, x.row(), x.hv(), v0, S, lane);
            x.next(ahead);
        }
    }
    __device__ __forceinline__ void outputs(const GatedStage<K> *stages, int v0) {
        OutTile out = {d, a.o_map, (bf16 *)a.a.o, sm.o, 0, v0, warp, lane};
        each_out<SEVERAL>(d, a.a, V / BLOCK_V, out, [&](const Turn &turn, int i, const Chunk &c) {
            out_chunk(stages[turn.slot], turn, i, out, c);
        });
    }
    __device__ __forceinline__ void out_chunk(const GatedStage<K> &stage, const Turn &turn, int i,
                                              OutTile &out, const Chunk &c) {
        int buf = i % 2, thread = warp * 32 + lane;
        uint32_t xa[4][4];
        float o[8][4];
        turn.wait_full(sm.last);
        bar_wait(&sm.ready[buf], i / 2 & 1);
        take_sums(o, sm.O[buf], thread);
        take<4>(xa, sm.X[buf], thread);
        bar_arrive(&sm.taken[buf]);
#pragma unroll
        for (int e = 0; e < 32; e++)
            o[e / 4][e % 4] *= d.scale;
        wg_fence();
        wg_times_lower<true>(o, xa, rows_desc(stage.Aqk, 1));
        wg_wait<0>(o);
        free(sm.last, turn);
        out.store(o, c);
    }
};

#define GATED_THREADS 384 /* a warpgroup for states, one for o, one whose first two warps load */
template <int K, int V, bool SEVERAL>
__global__ void TOGETHER(V / BLOCK_V) __launch_bounds__(GATED_THREADS, 1)
    k_scan_gated(const __grid_constant__ Dims d, const __grid_constant__ GatedArgs a) {
    extern __shared__ __align__(1024) char raw[];
    GatedSmem<K> &sm = *(GatedSmem<K> *)raw;
    auto *stages = stages_behind<GatedStage<K>>(raw, sm);
    auto *queries = (QueryStage<K> *)(stages + a.a.depth);
    const int blocks = V / BLOCK_V;
    int first = blockIdx.x % blocks * SLICES_OF_SCAN;
    int warp = threadIdx.x / 32, lane = kept_lane();
    if (threadIdx.x == 0)
        for (int i = 0; i < 2; i++) {
            bar_init(&sm.ready[i], 128);
            bar_init(&sm.taken[i], 128);
        }
    ring_init(sm.front, 4);
    ring_init(sm.middle, 4, FULL_COUNT_16(1));
    ring_init(sm.back, 4);
    ring_init(sm.query, 4);
    ring_init(sm.last, 4);
    await_grid();
    __syncthreads();
    GatedWarp<K, V, SEVERAL> w = {d, a, sm, warp % 4, first + warp % 4, lane};
    if (warp < 4) {
        take_registers<240>();
        w.states(stages, queries);
    } else if (warp < 8) {
        w.outputs(stages, first * 16);
    } else {
        give_registers<96>();
        if (warp > 9) return;
        Turn turn(a.a.depth), query(MOST_STAGES);
        for (HeadsOf<SEVERAL> x(d, a.a, blocks); x.more();) {
            const Run run = x.run, ahead = x.ahead();
            if (warp == 8)
                produce_tiles<K, V>(sm, stages, queries, d, a, run, x.hv(), first * 16, lane, turn,
                                    query);
            if (warp == 9) produce_Aqk<K>(sm, stages, d, a, run, x.hv(), lane, turn);
            x.next(ahead);
        }
    }
}

/* ---- host ------------------------------------------------------------------------------------ */

template <int K, int V> struct GatedPass {
    static dp_status run(const Call &c, GatedArgs a) {
        int bytes =
            ring_bytes(c.p, &a.a, sizeof(GatedSmem<K>) + MOST_STAGES * sizeof(QueryStage<K>),
                       sizeof(GatedStage<K>));
        unsigned blocks = pass_blocks(c.p, &a.a, V / BLOCK_V);
        bool several = blocks < (unsigned)a.a.heads * (V / BLOCK_V);
        auto kernel = several ? k_scan_gated<K, V, true> : k_scan_gated<K, V, false>;
        return launch(queue_of(c), "k_scan_gated", kernel, blocks, GATED_THREADS, bytes, c.p->d, a);
    }
};

} // namespace

dp_status fast_state_gated(const Call &c) {
    FAULT_TO_DEVICE(c.e, c.s);
    GatedArgs a = {};
    a.a = forward_args(c);
    a.a.spoilt = at<int>(c, B_SPOILT);
    a.a.kg = at<bf16>(c, B_KG);
    a.a.qg = at<bf16>(c, B_QG);
    a.a.Aqk = at<bf16>(c, B_AQK);
    a.a.eC = at<float>(c, B_EC);
    a.kgam = at<bf16>(c, B_KGAM);
    a.TB = at<bf16>(c, B_TB);
    a.v = (const bf16 *)c.t->v;
    const Dims &d = c.p->d;
    TRY(map_rows(c, &a.v_map, ROWS_OF_V, c.t->v, d.HV, d.V));
    if (d.o_bf16) TRY(map_rows(c, &a.o_map, ROWS_OF_O, c.t->o, d.HV, d.V));
    return by_widths<GatedPass>(c, a);
}
