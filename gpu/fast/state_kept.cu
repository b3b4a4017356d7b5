/* gpu/fast/state_kept.cu - the state passes of a backward without w and u (`bare.cuh`), forward
 * once more and backward. One gate a head; in brackets a gate a channel (GATED), where Kgam, kg and
 * qg are decayed rows:
 *
 *   E = U (V - of_k o K S)                      S <- eC S + K' (to_end o E)
 *   dE = U' (beta o Aqk' do + to_end o K dS)    dS <- eC dS + Q' (of_q o do) - K' (of_k o dE)
 *
 *  [E = U (V - Kgam S)                          S <- eC o S + kg' (beta o E)
 *   dE = U' (beta o (Aqk' do + kg dS))          dS <- eC o dS + scale qg' do - Kgam' dE]
 *
 * Kept are S before each chunk, dS behind it, E and dE. With a gate a channel whole chunks of dE
 * go to dv. With one a head gradients of tiles would be slower by those rows. ALL: the forward is
 * wanted, too. Its o is scale q S + Aqk (beta o E).
 *
 * A warp has 16 columns, four a block; another one loads. Under ALL four more make o, a chunk
 * behind at most. Phases of a chunk, and what shared memory holds:
 *
 *   rows    S or dS rounded; K S or K dS            the chunk; ALL: S to the warps of o
 *   solve   E or dE                                 ALL: beta o E likewise
 *   update  S or dS; both and E or dE go out        S, X of each warp */
#include "fast/bare.cuh"
#include "fast/columns.cuh"
#include "fast/ready.cuh"
#include "fast/state.cuh"
#include "fast/whole.cuh"

namespace {

#define BLOCK_V (16 * SLICES_OF_SCAN) /* columns of v that a block owns */

struct Args {
    StateArgs a;
    const BareFactors *factors; /* GATED: beta of rows */
    const bf16 *U, *k, *q, *v;  /* k: GATED Kgam */
    CUtensorMap k_map, q_map, v_map;
    DoRows rows, news; /* BACK: do; where dE of whole chunks goes */
};

/* Factors of a chunk's tokens and of its channels. */
template <int K, bool GATED> struct Factors {
    BareFactors of;
    __device__ __forceinline__ const float *beta() const { return of.beta; }
};
template <int K> struct Factors<K, true> {
    float of_row[C], eC[K];
    __device__ __forceinline__ const float *beta() const { return of_row; }
};

/* STATES: E and S; ALL: and o; BACK: dE and dS. */
enum Kind { STATES, ALL, BACK };
#define NONE 512 /* numbers in place of a tile that a pass does not have */

/* Tiles of a chunk. k: GATED Kgam; v: BACK do, SLICES; q: GATED qg. Where shared memory has no room
 * for three chunks of all, those that are read late are in a ring of two. */
template <Kind W, bool GATED> constexpr bool IS_LATE = W == BACK &&GATED;
template <int K, Kind W, bool GATED> struct Stage {
    bf16 k[IS_LATE<W, GATED> ? NONE : C * K], U[C * C], v[C * BLOCK_V];
    bf16 q[W == STATES || IS_LATE<W, GATED> ? NONE : C * K];
    bf16 Aqk[W == STATES ? NONE : C * C], kg[GATED ? C * K : NONE];
    __device__ __forceinline__ const bf16 *writes() const { return GATED ? kg : k; }
};
#define LATE_STAGES 2
template <int K> struct LateStage { bf16 k[C * K], q[C * K]; };
/* ALL: S and X of a chunk from the warps of states to those of o. */
template <int K, Kind W> struct Handed {};
template <int K> struct Handed<K, ALL> {
    uint64_t ready[2], taken[2];
    __device__ __forceinline__ void open() {
        for (int i = 0; i < 2 && threadIdx.x == 0; i++) {
            bar_init(&ready[i], 128);
            bar_init(&taken[i], 128);
        }
    }
    uint4 S[2][K / 16][128], X[2][4][128];
    bf16 o[SLICES_OF_SCAN][C * 16];
};
template <int K, Kind W, bool GATED> struct Smem {
    Ring ring, late;
    Factors<K, GATED> factors[MOST_STAGES];
    alignas(256) bf16 S[SLICES_OF_SCAN][K * 16], X[SLICES_OF_SCAN][C * 16];
    Handed<K, W> handed;
};

template <int K, int V, Kind W, bool GATED>
__device__ __forceinline__ void load_chunks(Smem<K, W, GATED> &sm, Stage<K, W, GATED> *stages,
                                            LateStage<K> *lates, const Dims &d, const Args &a,
                                            Run run, int hv, int slice, int lane) {
    const int ROWS = C * K * 2, SQUARE = C * C * 2, COLUMNS = C * BLOCK_V * 2;
    const int OF_ROWS = (int)sizeof(Factors<K, GATED>), h = hv / d.G;
    constexpr bool LATE = IS_LATE<W, GATED>;
    Turn turn(a.a.depth), later(LATE_STAGES);
    auto number = [&](int i) { return run.c0 + (W == BACK ? run.n - 1 - i : i); };
    auto chunk = [&](int i) { return d.chunk[number(min(i, run.n - 1))]; };
    if (!run.n) return;
    Chunk next = chunk(0);
    for (int i = 0; i < run.n; i++, turn.next()) {
        auto &s = stages[turn.slot];
        auto &f = sm.factors[turn.slot];
        const Chunk c = next;
        next = chunk(i + 1);
        const bool whole = is_whole(c), by_engine = GATED || whole;
        int64_t tile = (int64_t)number(i) * d.HV + hv;
        int bytes = SQUARE + OF_ROWS + (by_engine + GATED - LATE) * ROWS;
        if (W != STATES) bytes += SQUARE + (by_engine && !LATE) * ROWS;
        bytes += (W == BACK || whole) * COLUMNS;
        uint64_t *full = open_stage(sm.ring, turn, bytes, lane);
        auto rows = [&](bf16 *to, const bf16 *from, const CUtensorMap &map) {
            if (GATED)
                fill(to, from + tile * C * K, ROWS, full, lane);
            else
                fill_chunk<K>(to, map, from, d.H, h, K, 0, c, whole, full, lane);
        };
        rows(GATED ? s.kg : s.k, GATED ? a.a.kg : a.k, a.k_map);
        if constexpr (GATED) {
            fill(f.of_row, (const float *)a.factors + tile * C, C * 4, full, lane);
            fill(f.eC, a.a.eC + tile * K, K * 4, full, lane);
        } else {
            fill(&f, a.factors + tile, OF_ROWS, full, lane);
        }
        if (W != STATES) fill(s.Aqk, a.a.Aqk + tile * C * C, SQUARE, full, lane);
        if (W == BACK)
            fill_do<V, SLICES_OF_SCAN>(s.v, a.rows, c, hv, tile, slice, full, lane);
        else
            fill_chunk<BLOCK_V>(s.v, a.v_map, a.v, d.HV, hv, V, slice * 16, c, whole, full, lane);
        if (W != STATES && !LATE) rows(s.q, GATED ? a.a.qg : a.q, a.q_map);
        fill(s.U, a.U + tile * C * C, SQUARE, full, lane);
        if (GATED && !LATE) rows(s.k, a.k, a.k_map);
        fill16_end_for_products(full, lane);
        if (!LATE) continue;
        full = open_stage(sm.late, later, 2 * ROWS, lane);
        rows(lates[later.slot].q, a.a.qg, a.q_map);
        rows(lates[later.slot].k, a.k, a.k_map);
        fill_end(full, lane);
        later.next();
    }
}

/* Fragments of the columns of 64 tokens. */
__device__ __forceinline__ void fragments(uint32_t a[4][4], const float x[8][4]) {
#pragma unroll
    for (int p = 0; p < 4; p++)
        fragment(a[p], x[2 * p], x[2 * p + 1]);
}
/* y [K / 64][64 channels] = SIGN rows' X, or += it, as wg_times_kg. */
template <int K, int SIGN, bool ADDS>
__device__ __forceinline__ void wg_add_rows(float (*y)[8][4], const uint32_t (*X)[4],
                                            uint64_t rows) {
#pragma unroll
    for (int j = 0; j < K / 64; j++) {
#pragma unroll
        for (int p = 0; p < 4; p++)
            wg_mul<1, SIGN>(y[j], X[p], rows + j * HALF + p * (HALF / 4), !ADDS && p == 0);
        wg_commit();
    }
}

/* A warp's 16 columns of states. */
template <int K, int V, Kind W, bool GATED> struct KeptWarp {
    typedef Factors<K, GATED> Of;
    typedef Stage<K, W, GATED> St;
    const Dims &d;
    const Args &args;
    const StateArgs &a;
    Smem<K, W, GATED> &sm;
    const St *stages;
    const LateStage<K> *lates;
    const Run run;
    int hv, warp, slice, lane;

    /* 64 channels of S <- eC o S + by y, once all groups but LEFT have ended. */
    template <int LEFT>
    __device__ __forceinline__ void update(float (*S)[4], float y[8][4], int j, const Of &f,
                                           float by) {
        float2 e[8];
        if constexpr (GATED) {
            take_decays<8>(e, f.eC + 64 * j, lane);
        } else {
            const float one = f.of.state.chunk[0];
#pragma unroll
            for (int n = 0; n < 8; n++)
                e[n] = make_float2(one, one);
        }
        wg_wait<LEFT>(y);
        if (W == BACK && GATED)
#pragma unroll
            for (int x = 0; x < 32; x++)
                y[x / 4][x % 4] *= by;
        decay_and_add<8>(S + 8 * j, y, e);
    }
    __device__ __forceinline__ void update(float (*S)[4], float y[K / 64][8][4], const Of &f,
                                           float by = 1.f) {
        if (K > 64) update<1>(S, y[0], 0, f, by);
        update<0>(S, y[K / 64 - 1], K / 64 - 1, f, by);
    }
    __device__ __forceinline__ void keep(const Chunk &at, int c, const uint32_t sa[K / 16][4],
                                         const uint32_t ea[4][4]) {
        const int64_t slice_of = ((int64_t)c * d.HV + hv) * (V / 16) + slice;
        if (!a.states) return;
        drain_wait(lane);
        __syncwarp();
#pragma unroll
        for (int j = 0; j < K / 16; j++)
            keep_fragment(sm.S[warp], 16 * j, sa[j], lane);
        fragments_to(sm.X[warp], ea);
        drain_fence();
        __syncwarp();
        drain(a.states + slice_of * K * 16, sm.S[warp], K * 32, lane);
        if (W == BACK && GATED && lies_there(args.news, at))
            drain_tile(args.news.map, slice * 16, hv, at.t0, sm.X[warp], lane);
        else
            drain(a.news + slice_of * C * 16, sm.X[warp], C * 32, lane);
        drain_commit(lane);
    }
    __device__ __forceinline__ void fragments_to(bf16 *to, const uint32_t ea[4][4]) {
#pragma unroll
        for (int p = 0; p < 4; p++)
            keep_fragment(to, 16 * p, ea[p], lane);
    }
    /* i: its number in the block. */
    __device__ __forceinline__ void forward(float S[K / 8][4], int i, int c, const St &st,
                                            const Of &f) {
        uint32_t sa[K / 16][4], ra[4][4], ea[4][4], xa[4][4];
        float z[8][4], x[8][4], y[K / 64][8][4];
        const int buf = i % 2, thread = warp * 32 + lane;
        round_state<K>(sa, S);
        wg_fence();
        wg_times_rows<K>(z, sa, rows_desc(st.k, 1));
        Walk<> v(st.v, across_row(lane), across_p(lane));
#pragma unroll
        for (int p = 0; p < 4; p++)
            ldsm4t(ra[p], v.at(warp, p));
        if constexpr (GATED) {
            wg_wait<0>(z);
        } else {
            const OfTokens<8> of_k(f.of.state.of_k, lane);
            wg_wait<0>(z);
            of_k.times(z);
        }
#pragma unroll
        for (int p = 0; p < 4; p++)
            take_from(z + 2 * p, ra[p]);
        fragments(ra, z);
        wg_fence();
        wg_times_lower<false>(x, ra, rows_desc(st.U, 1));
        wg_wait<0>(x);
        fragments(ea, x);
        if constexpr (GATED) {
            OfTokens<8>(f.of_row, lane).times(x);
            fragments(xa, x);
        } else {
            if (W == ALL) {
#pragma unroll
                for (int e = 0; e < 32; e++)
                    z[e / 4][e % 4] = x[e / 4][e % 4];
                OfTokens<8>(f.of.beta, lane).times(z);
                fragments(xa, z);
            }
            OfTokens<8>(f.of.state.to_end, lane).times(x);
            fragments(ra, x);
        }
        wg_fence();
        wg_add_rows<K, 1, false>(y, GATED ? xa : ra, rows_desc(st.writes(), 64));
        if constexpr (W == ALL) {
            if (i >= 2) bar_wait(&sm.handed.taken[buf], (i / 2 - 1) & 1);
            leave<K / 16>(sm.handed.S[buf], sa, thread);
            leave<4>(sm.handed.X[buf], xa, thread);
            bar_arrive(&sm.handed.ready[buf]);
        }
        keep({}, c, sa, ea);
        update(S, y, f);
    }
    /* o of a chunk, by warps of their own, a chunk behind at most. */
    __device__ __forceinline__ void output(int i, int c, const St &st, const Of &f) {
        uint32_t sa[K / 16][4], xa[4][4];
        float o[8][4], x[8][4];
        const int buf = i % 2, thread = warp * 32 + lane;
        bar_wait(&sm.handed.ready[buf], i / 2 & 1);
        take<K / 16>(sa, sm.handed.S[buf], thread);
        take<4>(xa, sm.handed.X[buf], thread);
        bar_arrive(&sm.handed.taken[buf]);
        wg_fence();
        wg_times_rows<K>(o, sa, rows_desc(st.q, 1));
        wg_times_lower<false>(x, xa, rows_desc(st.Aqk, 1));
        wg_wait<1>(o);
        if constexpr (GATED) {
#pragma unroll
            for (int e = 0; e < 32; e++)
                o[e / 4][e % 4] *= d.scale;
        } else {
            OfTokens<8>(f.of.of_q, lane).times(o);
        }
        wg_wait<0>(x);
#pragma unroll
        for (int e = 0; e < 32; e++)
            o[e / 4][e % 4] += x[e / 4][e % 4];
        store_o<4>(d, a.o, o, sm.handed.o[warp], d.chunk[c], 0, hv, slice * 16, lane);
    }
    __device__ __forceinline__ void backward(float S[K / 8][4], const Chunk &at, int c,
                                             const St &st, const Of &f, const LateStage<K> &late,
                                             const Turn &later) {
        uint32_t sa[K / 16][4], oa[4][4], ea[4][4], ya[4][4];
        float z[8][4], x[8][4] = {}, y[K / 64][8][4];
        round_state<K>(sa, S);
        wg_fence();
        wg_times_rows<K>(z, sa, rows_desc(st.writes(), 1));
        load_do(oa, st.v + warp * C * 16, lane);
        add_dv_local<4>(x, oa, st.Aqk, 0, lane);
        const OfTokens<8> beta(f.beta(), lane);
        if constexpr (GATED) {
            wg_wait<0>(z);
        } else {
            const OfTokens<8> to_end(f.of.state.to_end, lane);
            beta.times(x);
            wg_wait<0>(z);
            to_end.times(z);
        }
#pragma unroll
        for (int e = 0; e < 32; e++)
            x[e / 4][e % 4] += z[e / 4][e % 4];
        if (GATED) beta.times(x);
        fragments(ya, x);
        wg_fence();
        wg_times_upper(x, ya, rows_desc(st.U, 64));
        if constexpr (!GATED) {
            const OfTokens<8> of_q(f.of.of_q, lane);
#pragma unroll
            for (int p = 0; p < 4; p++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    float2 w = unpack2(oa[p][e]), by = of_q.y[2 * p + e / 2];
                    oa[p][e] = pack2(w.x * by.x, w.y * by.y);
                }
        }
        if (IS_LATE<W, GATED>) later.wait_full(sm.late);
        wg_fence();
        wg_add_rows<K, 1, false>(y, oa, rows_desc(IS_LATE<W, GATED> ? late.q : st.q, 64));
        if constexpr (GATED) {
            const float over = 1.f / d.scale; /* y is multiplied by scale */
            wg_wait<K / 64>(x);
            fragments(ea, x);
#pragma unroll
            for (int e = 0; e < 32; e++)
                x[e / 4][e % 4] *= over;
        } else {
            const OfTokens<8> of_k(f.of.state.of_k, lane);
            wg_wait<K / 64>(x);
            fragments(ea, x);
            of_k.times(x);
        }
        fragments(ya, x);
        wg_fence();
        wg_add_rows<K, -1, true>(y, ya, rows_desc(IS_LATE<W, GATED> ? late.k : st.k, 64));
        keep(at, c, sa, ea);
        update(S, y, f, d.scale);
    }
    __device__ __forceinline__ int number(int i) const { /* of the block's chunk i */
        return run.c0 + (W == BACK ? run.n - 1 - i : i);
    }
    __device__ __forceinline__ void free(Ring &ring, const Turn &turn) {
        __syncwarp();
        bar_arrive_warp(&ring.empty[turn.slot], lane);
    }
    __device__ __forceinline__ void states() {
        float S[K / 8][4];
        const float *init = W == BACK ? initial_bwd(d, a, run, hv)
                                      : initial(d, a, run.starts, run.gseq, run.part, hv);
        const int v0 = slice * 16;
        each<K / 8>(S, lane,
                    [&](int k, int v, float &s) { s = init ? init[k * V + v0 + v] : 0.f; });
        Turn turn(a.depth), later(LATE_STAGES);
        Chunk next = {};
        if (W == BACK && GATED && run.n) next = d.chunk[number(0)];
        for (int i = 0; i < run.n; i++, turn.next(), later.next()) {
            const St &st = stages[turn.slot];
            const Of &f = sm.factors[turn.slot];
            const Chunk c = next;
            if (W == BACK && GATED) next = d.chunk[number(min(i + 1, run.n - 1))];
            turn.wait_full(sm.ring);
            if constexpr (W == BACK)
                backward(S, c, number(i), st, f, lates[later.slot], later);
            else
                forward(S, i, number(i), st, f);
            free(sm.ring, turn);
            if (IS_LATE<W, GATED>) free(sm.late, later);
            if (W == BACK) count_ready(a.ready, i + 1, run.n, lane);
        }
        each<K / 8>(S, lane, [&](int k, int v, float &s) {
            last_state<W == BACK>(d, a, run, hv, k, v0 + v, s);
        });
        drain_wait(lane);
    }
    __device__ __forceinline__ void outputs() {
        Turn turn(a.depth);
        for (int i = 0; i < run.n; i++, turn.next()) {
            turn.wait_full(sm.ring);
            output(i, number(i), stages[turn.slot], sm.factors[turn.slot]);
            free(sm.ring, turn);
        }
    }
};

/* Warps of states, of o, one that loads. */
constexpr int THREADS_OF(Kind w) { return w == ALL ? 384 : SCAN_THREADS; }
template <int K, int V, Kind W, bool GATED>
__global__ void TOGETHER(V / BLOCK_V) __launch_bounds__(THREADS_OF(W), 1)
    k_kept(const __grid_constant__ Dims d, const __grid_constant__ Args args) {
    extern __shared__ __align__(1024) char raw[];
    auto &sm = *(Smem<K, W, GATED> *)raw;
    auto *stages = stages_behind<Stage<K, W, GATED>>(raw, sm);
    const StateArgs &a = args.a;
    auto *lates = (LateStage<K> *)(stages + a.depth);
    const int blocks = V / BLOCK_V;
    const bool beside = W == BACK && a.beside;
    int first = blockIdx.x % blocks * SLICES_OF_SCAN, hv = blockIdx.x / blocks % d.HV;
    const int part = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    ring_init(sm.ring, (W == ALL ? 2 : 1) * SLICES_OF_SCAN, FULL_COUNT_16(1));
    ring_init(sm.late, SLICES_OF_SCAN);
    if constexpr (W == ALL) sm.handed.open();
    begin_beside(beside);
    const int seq = a.seq0 + blockIdx.x / blocks / d.HV;
    const Run run = W == BACK ? run_at(d, a, seq, hv) : run_of(d.seq[seq]);
    __syncthreads();
    KeptWarp<K, V, W, GATED> w = {d, args, a, sm, stages, lates, run, hv, warp, first + warp, lane};
    if (part == 0) {
        if (W == ALL) take_registers<240>();
        w.states();
    } else if (W == ALL && part == 1) {
        if constexpr (W == ALL) w.outputs();
    } else {
        if (W == ALL) give_registers<96>();
        if (warp) return;
        load_chunks<K, V, W, GATED>(sm, stages, lates, d, args, run, hv, first, lane);
    }
    end_beside(beside);
}

/* ---- host ------------------------------------------------------------------------------------ */

template <int K, int V> struct Pass {
    template <Kind W, bool GATED> static dp_status of(const Call &c, Args a, int nseq) {
        const int late = IS_LATE<W, GATED> ? LATE_STAGES * (int)sizeof(LateStage<K>) : 0;
        int bytes =
            ring_bytes(c.p, &a.a, sizeof(Smem<K, W, GATED>) + late, sizeof(Stage<K, W, GATED>));
        const unsigned blocks = (unsigned)nseq * c.p->d.HV * (V / BLOCK_V);
        return launch(W == BACK && a.a.beside ? queue_of(c) : queue_of_pass(c),
                      W == BACK ? "k_kept_bwd" : "k_kept", k_kept<K, V, W, GATED>, blocks,
                      THREADS_OF(W), bytes, c.p->d, a);
    }
    static dp_status run(const Call &c, Args a, Kind w, int nseq) {
        if (c.p->d.Kg > 1)
            return w == BACK  ? of<BACK, true>(c, a, nseq)
                   : w == ALL ? of<ALL, true>(c, a, nseq)
                              : of<STATES, true>(c, a, nseq);
        return w == BACK  ? of<BACK, false>(c, a, nseq)
               : w == ALL ? of<ALL, false>(c, a, nseq)
                          : of<STATES, false>(c, a, nseq);
    }
};

dp_status args_of(const Call &c, Args *a) {
    const Dims &d = c.p->d;
    a->factors = at<BareFactors>(c, B_FACTORS);
    a->U = at<bf16>(c, B_TB);
    a->a.Aqk = at<bf16>(c, B_AQK);
    a->v = (const bf16 *)c.t->v;
    TRY(map_rows(c, &a->v_map, ROWS_OF_V, a->v, d.HV, d.V));
    if (d.Kg > 1) {
        a->k = at<bf16>(c, B_KGAM);
        a->a.kg = at<bf16>(c, B_KG);
        a->a.qg = at<bf16>(c, B_QG);
        a->a.eC = at<float>(c, B_EC);
        return DP_OK;
    }
    a->k = (const bf16 *)c.t->k;
    a->q = (const bf16 *)c.t->q;
    TRY(map_rows(c, &a->k_map, ROWS_OF_K, a->k, d.H, d.K));
    return map_rows(c, &a->q_map, ROWS_OF_Q, a->q, d.H, d.K);
}

} // namespace

dp_status fast_kept_states(const Call &c, StateArgs given) {
    FAULT_TO_DEVICE(c.e, c.s);
    Args a = {given};
    TRY(args_of(c, &a));
    a.a.states = at<bf16>(c, B_H);
    a.a.news = at<bf16>(c, B_VNEW);
    return by_widths<Pass>(c, a, given.o ? ALL : STATES, c.p->nrow);
}

dp_status fast_kept_bwd(const Call &c, StateArgs given, int nseq) {
    FAULT_TO_DEVICE(c.e, c.s);
    Args a = {given};
    TRY(args_of(c, &a));
    TRY(do_rows(c, &a.rows));
    TRY(dE_rows(c, &a.news));
    return by_widths<Pass>(c, a, BACK, nseq);
}
