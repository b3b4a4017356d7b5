/* gpu/fast/state_bwd.cu - the gradients of the states, last chunk to first, with dv_local inside:
 *
 *   dv_new' = do' Aqk + dS' kg'      dS' <- eC o dS' + scale do' qg - dv_new' w
 *
 * The undecayed dS is what meets kg. Kept: dS after each chunk (dh) and dv_new. Two kernels as in
 * state.cu: k_scan_bwd, one warp per 16 columns, 4 in a block; k_team_bwd, few heads, 4 warps per
 * 16 columns. Phases of a chunk, and what shared memory holds:
 *
 *   k_scan_bwd, each warp by itself:
 *     dv_new  dS rounded; do' Aqk + dS' kg'                 the chunk: kg w qg Aqk do eC
 *     keep    dS and dv_new go out by the copy engine       S, X of each warp
 *     dS      eC dS + scale do' qg - dv_new' w              qg, w, eC; then the stage is free
 *   k_team_bwd, warp t of 4:
 *     hand    dS of its channels to fragments               S[buf], hs[buf] behind the barrier
 *     dv_new  of tokens 16 t ..; dh goes out                kg, Aqk, do; X[buf], xs[buf] behind the
 *                                                           barrier
 *     dS      of its channels; dv_new goes out              X[buf]; qg, w, eC */
#include "fast/columns.cuh"
#include "fast/grad.cuh"
#include "fast/state.cuh"

namespace {

#define NEGATE 0x80008000u

template <int K, int SL> struct Stage {
    bf16 kg[C * K], w[C * K], qg[C * K], Aqk[C * C], dos[SL * C * 16];
    float eC[K];
};

template <int K, int V, int SL>
__device__ __forceinline__ void load_chunks(Ring &r, Stage<K, SL> *stages, const Dims &d,
                                            const StateArgs &a, const DoRows &rows, Run run, int hv,
                                            int slice, int lane) {
    const int T2 = C * K * 2, bytes = 3 * T2 + C * C * 2 + SL * C * 32 + K * 4;
    Turn turn(a.depth);
    auto chunk = [&](int i) { return d.chunk[run.c0 + max(run.n - 1 - i, 0)]; };
    Chunk next = chunk(0);
    produce(r, turn, run.n, bytes, lane, [&](int slot, int i, uint64_t *full) {
        Stage<K, SL> &s = stages[slot];
        const Chunk c = next;
        next = chunk(i + 1);
        int64_t tile = (int64_t)(run.c0 + run.n - 1 - i) * d.HV + hv;
        fill(s.kg, a.kg + tile * C * K, T2, full, lane);
        fill(s.Aqk, a.Aqk + tile * C * C, C * C * 2, full, lane);
        fill_do<V, SL>(s.dos, rows, c, hv, tile, slice, full, lane);
        fill(s.qg, a.qg + tile * C * K, T2, full, lane);
        fill(s.w, a.w + tile * C * K, T2, full, lane);
        fill(s.eC, a.eC + tile * K, K * 4, full, lane);
    });
}

/* For NJ n-tiles of 8 channels from 8 j0 on; xa: of -dv_new. */
template <int K, int NJ, class STAGE>
__device__ __forceinline__ void update(float S[NJ][4], const uint32_t oa[4][4],
                                       const uint32_t xa[4][4], const STAGE &st, int j0,
                                       float scale, int lane) {
    const int STEP = NJ < 4 ? NJ : 4;
    Walk<> qg = walk_down(st.qg, 0, lane), w = walk_down(st.w, 0, lane);
#pragma unroll
    for (int j = 0; j < NJ; j += STEP) {
        float acc[STEP][4] = {};
        times_columns<STEP>(acc, qg, j0 + j, [&](int p) { return oa[p]; });
#pragma unroll
        for (int n = 0; n < STEP; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                acc[n][e] *= scale;
        times_columns<STEP>(acc, w, j0 + j, [&](int p) { return xa[p]; });
        decay_and_add<STEP>(S + j, acc, st.eC + (j0 + j) * 8, lane);
    }
}

/* ---- many heads ------------------------------------------------------------------------------ */

template <int K> struct ScanSmem {
    Ring ring;
    bf16 S[SLICES_OF_SCAN][K * 16], X[SLICES_OF_SCAN][C * 16];
};

template <int K, int V>
__global__ void TOGETHER(V / 16 / SLICES_OF_SCAN) __launch_bounds__(SCAN_THREADS, 1)
    k_scan_bwd(Dims d, StateArgs a, const __grid_constant__ DoRows rows) {
    extern __shared__ __align__(1024) char raw[];
    ScanSmem<K> &sm = *(ScanSmem<K> *)raw;
    auto *stages = stages_behind<Stage<K, SLICES_OF_SCAN>>(raw, sm);
    const int blocks = V / 16 / SLICES_OF_SCAN;
    int first = blockIdx.x % blocks * SLICES_OF_SCAN, hv = blockIdx.x / blocks % d.HV;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    ring_init(sm.ring, SLICES_OF_SCAN);
    begin_beside(a.beside);
    Run run = run_at(d, a, a.seq0 + blockIdx.x / blocks / d.HV, hv);
    __syncthreads();
    if (warp == SLICES_OF_SCAN) {
        load_chunks<K, V, SLICES_OF_SCAN>(sm.ring, stages, d, a, rows, run, hv, first, lane);
        return end_beside(a.beside);
    }
    int slice = first + warp;
    float S[K / 8][4];
    const float *init = initial_bwd(d, a, run, hv);
    each<K / 8>(S, lane,
                [&](int k, int v, float &s) { s = init ? init[k * V + slice * 16 + v] : 0.f; });
    Turn turn(a.depth);
    for (int i = 0; i < run.n; i++, turn.next()) {
        int64_t tile = (int64_t)(run.c0 + run.n - 1 - i) * d.HV + hv;
        const Stage<K, SLICES_OF_SCAN> &st = stages[turn.slot];
        float x[8][4] = {};
        uint32_t sa[K / 16][4], oa[4][4], xa[4][4];
        round_state<K>(sa, S);
        turn.wait_full(sm.ring);
        load_do(oa, st.dos + warp * C * 16, lane);
        add_dv_local<4>(x, oa, st.Aqk, 0, lane);
        times_rows<K>(x, sa, st.kg, lane);
#pragma unroll
        for (int p = 0; p < 4; p++)
            fragment(xa[p], x[2 * p], x[2 * p + 1]);
        if (a.states) keep_chunk<K, V>(a, tile, slice, sm.S[warp], sm.X[warp], sa, xa, lane);
#pragma unroll
        for (int e = 0; e < 16; e++)
            xa[e / 4][e % 4] ^= NEGATE;
        update<K, K / 8>(S, oa, xa, st, 0, d.scale, lane);
        __syncwarp();
        bar_arrive_warp(&sm.ring.empty[turn.slot], lane);
        count_ready(a.ready, i + 1, run.n, lane);
    }
    each<K / 8>(S, lane, [&](int k, int v, float &s) {
        last_state<true>(d, a, run, hv, k, slice * 16 + v, s);
    });
    drain_wait(lane);
    end_beside(a.beside);
}

/* ---- few heads ------------------------------------------------------------------------------- */

/* Warp t makes dv_new of tokens 16 t .. and dS of its K / 4 channels. */
template <int K> struct TeamSmem {
    Ring ring;
    uint4 S[2][K / 16][32], X[2][4][32];
    bf16 hs[2][K * 16], xs[2][C * 16];
};

/* Warp t of a team. */
template <int K, int V> struct TeamWarp {
    static const int NJ = K / 32;
    const Dims &d;
    const StateArgs &a;
    TeamSmem<K> &sm;
    Run run;
    int hv, slice, t, lane, k0;

    /* Phase `hand`: its channels of dS. */
    __device__ __forceinline__ void hand(const float S[NJ][4], int buf) {
        uint32_t r[4];
#pragma unroll
        for (int j = 0; j < NJ; j += 2) {
            fragment(r, S[j], S[j + 1]);
            sm.S[buf][(t * NJ + j) / 2][lane] = pack4(r);
            keep_fragment(sm.hs[buf], k0 + j * 8, r, lane);
        }
        drain_fence();
    }
    /* x += dS' kg' of its tokens; even and other k-steps apart: shorter chains. */
    __device__ __forceinline__ void add_states(float x[2][2][4], const uint32_t b[K / 16][4],
                                               int buf) {
#pragma unroll
        for (int j = 0; j < K / 16; j++) {
            uint4 f = sm.S[buf][j][lane];
            uint32_t sa[4] = {f.x, f.y, f.z, f.w};
            two(x[j % 2][0], x[j % 2][1], sa, b[j]);
        }
#pragma unroll
        for (int e = 0; e < 8; e++)
            x[0][e / 4][e % 4] += x[1][e / 4][e % 4];
    }
    /* dv_new of its tokens, and -dv_new for the others. */
    __device__ __forceinline__ void leave_dv_new(const float x[2][4], int buf) {
        uint32_t r[4];
        fragment(r, x[0], x[1]);
        keep_fragment(sm.xs[buf], 16 * t, r, lane);
#pragma unroll
        for (int e = 0; e < 4; e++)
            r[e] ^= NEGATE;
        sm.X[buf][t][lane] = pack4(r);
        drain_fence();
    }
    __device__ __forceinline__ void chunk(float S[NJ][4], int64_t tile, int buf,
                                          const Stage<K, 1> &st, const Turn &turn) {
        float x[2][2][4] = {};
        uint32_t oa[4][4], xa[4][4], b[K / 16][4];
        hand(S, buf);
        turn.wait_full(sm.ring);
        Walk<> kg = walk_across(st.kg, 16 * t, lane);
#pragma unroll
        for (int j = 0; j < K / 16; j++)
            ldsm4(b[j], kg.at(j));
        load_do(oa, st.dos, lane);
        add_dv_local<1>(x[0], oa, st.Aqk, t, lane);
        team_sync();
        if (a.states && t == 0)
            drain(a.states + (tile * (V / 16) + slice) * K * 16, sm.hs[buf], K * 32, lane);
        add_states(x, b, buf);
        leave_dv_new(x[0], buf);
        if (t == 0) drain_wait(lane); /* of the chunk before: written again behind the barrier */
        team_sync();
        if (a.states && t == 0) {
            drain(a.news + (tile * (V / 16) + slice) * C * 16, sm.xs[buf], C * 32, lane);
            drain_commit(lane);
        }
        load_x(xa, sm.X[buf], lane);
        update<K, NJ>(S, oa, xa, st, k0 / 8, d.scale, lane);
        __syncwarp();
        bar_arrive_warp(&sm.ring.empty[turn.slot], lane);
    }
    __device__ __forceinline__ void pass(const Stage<K, 1> *stages) {
        float S[NJ][4];
        const float *init = initial_bwd(d, a, run, hv);
        each<NJ>(S, lane, [&](int k, int v, float &s) {
            s = init ? init[(k0 + k) * V + slice * 16 + v] : 0.f;
        });
        Turn turn(a.depth);
        for (int i = 0; i < run.n; i++, turn.next())
            chunk(S, (int64_t)(run.c0 + run.n - 1 - i) * d.HV + hv, i % 2, stages[turn.slot], turn);
        each<NJ>(S, lane, [&](int k, int v, float &s) {
            last_state<true>(d, a, run, hv, k0 + k, slice * 16 + v, s);
        });
        if (t == 0) drain_wait(lane);
    }
};

#define TEAM_THREADS 160
template <int K, int V>
__global__ void __launch_bounds__(TEAM_THREADS, 1)
    k_team_bwd(Dims d, StateArgs a, const __grid_constant__ DoRows rows) {
    extern __shared__ __align__(1024) char raw[];
    TeamSmem<K> &sm = *(TeamSmem<K> *)raw;
    auto *stages = stages_behind<Stage<K, 1>>(raw, sm);
    int slice = blockIdx.x % (V / 16), hv = blockIdx.x / (V / 16) % d.HV;
    int t = threadIdx.x / 32, lane = threadIdx.x % 32;
    ring_init(sm.ring, 4);
    begin_beside(a.beside);
    Run run = run_at(d, a, a.seq0 + blockIdx.x / (V / 16) / d.HV, hv);
    __syncthreads();
    if (t == 4) {
        load_chunks<K, V, 1>(sm.ring, stages, d, a, rows, run, hv, slice, lane);
        return end_beside(a.beside);
    }
    TeamWarp<K, V> warp = {d, a, sm, run, hv, slice, t, lane, t * (K / 4)};
    warp.pass(stages);
    end_beside(a.beside);
}

/* ---- host ------------------------------------------------------------------------------------ */

template <int K, int V> struct PassBwd {
    static Queue queue(const Call &c, const StateArgs &a) {
        return a.beside ? queue_of(c) : queue_of_pass(c);
    }
    static dp_status scan(const Call &c, StateArgs a, const DoRows &rows, int nseq) {
        auto kernel = k_scan_bwd<K, V>;
        int bytes = ring_bytes(c.p, &a, sizeof(ScanSmem<K>), sizeof(Stage<K, SLICES_OF_SCAN>));
        return launch(queue(c, a), "k_scan_bwd", kernel, pass_blocks_of(c.p, nseq), SCAN_THREADS,
                      bytes, c.p->d, a, rows);
    }
    static dp_status team(const Call &c, StateArgs a, const DoRows &rows, int nseq) {
        auto kernel = k_team_bwd<K, V>;
        int bytes = ring_bytes(c.p, &a, sizeof(TeamSmem<K>), sizeof(Stage<K, 1>));
        return launch(queue(c, a), "k_team_bwd", kernel, pass_blocks_of(c.p, nseq), TEAM_THREADS,
                      bytes, c.p->d, a, rows);
    }
    static dp_status run(const Call &c, StateArgs a, int nseq) {
        DoRows rows;
        TRY(do_rows(c, &rows));
        return by_teams(c.p, nseq) ? team(c, a, rows, nseq) : scan(c, a, rows, nseq);
    }
};

} // namespace

static StateArgs state_args(const Call &c) {
    StateArgs a = {};
    a.w = at<bf16>(c, B_W);
    a.kg = at<bf16>(c, B_KG);
    a.qg = at<bf16>(c, B_QG);
    a.Aqk = at<bf16>(c, B_AQK);
    a.eC = at<float>(c, B_EC);
    a.given = c.g->dfinal_state;
    a.parts = c.p->owned ? state_parts(c.p) : c.p->parts;
    return a;
}

/* Both passes read what the chunk kernel has made; side by side where there is room for both. */
static bool passes_beside(const Call &c) {
    const dpg_plan *p = c.p;
    return c.overlaps && !saves_all(p) && p->parts == 1 && p->device.major >= 9 &&
           2 * pass_blocks_of(p, p->d.nseq) <= (unsigned)p->device.sms;
}

/* A tile takes as long as STEPS steps of the pass beside it (reports/device/speed.txt). */
TileRange tiles_beside(const Call &c) {
    const dpg_plan *p = c.p;
    const Dims &d = p->d;
    const int STEPS = d.Kg == 1 ? 7 : 10, sms = p->device.sms, pass = (int)pass_blocks_of(p, 1);
    const int tiles = (int)tile_count(p), one = c.overlaps && d.nseq == 1 && p->parts == 1;
    if (!one || p->device.major < 9 || by_teams(p, 1) || pass >= sms || passes_beside(c))
        return {(unsigned)tiles, (unsigned)tiles, 0, NULL, 0};
    const int free = sms - pass;
    auto chunks = [&](int each) { return (free * each + d.HV - 1) / d.HV; };
    auto turns = [&](int each) { return (tiles - free * each + sms - 1) / sms; };
    int most = 0, each = 0;
    while (chunks(most + 1) + READY + (most + 1) * STEPS <= d.NT)
        most++;
    while (turns(each) > turns(most))
        each++;
    const int from = tiles - free * each, group = (chunks(each) - 1) / READY;
    const unsigned *ready = each ? at<unsigned>(c, B_READY) + group : NULL;
    return {(unsigned)from, (unsigned)tiles, (unsigned)free, ready,
            (unsigned)pass * SLICES_OF_SCAN};
}

dp_status fast_bwd_state(const Call &c) {
    FAULT_TO_DEVICE(c.e, c.s);
    StateArgs a = state_args(c);
    a.merged = at<float>(c, B_DSOUT);
    a.end = c.g->ds0;
    a.states = at<bf16>(c, B_DH);
    a.news = at<bf16>(c, B_DV_NEW);
    if (tiles_beside(c).ready) {
        a.ready = at<unsigned>(c, B_READY);
        CK(c.e, cudaMemsetAsync(a.ready, 0, c.p->buf[B_READY].bytes, c.s));
    }
    a.beside = passes_beside(c);
    /* segments side by side if the forward left their M */
    a.seq0 = c.p->parts > 1 ? 0 : c.p->whole0;
    const int nseq = c.p->parts > 1 ? c.p->nrow : c.p->d.nseq;
    return c.p->bare ? fast_kept_bwd(c, a, nseq) : by_widths<PassBwd>(c, a, nseq);
}

dp_status fast_bwd_pre(const Call &c) {
    FAULT_TO_DEVICE(c.e, c.s);
    const dpg_plan *p = c.p;
    StateArgs a = state_args(c);
    a.merged = came(c);
    a.hm = at<float>(c, B_DHM);
    a.row = dh_row(p);
    a.seq0 = p->bwd0;
    auto pass = [&](int nseq) {
        return p->bare ? fast_kept_bwd(c, a, nseq) : by_widths<PassBwd>(c, a, nseq);
    };
    if (p->parts == 1) return pass(p->nbwd);
    /* nobody asks for dH of the first part of a sequence */
    a.hm = at<float>(c, B_SEG);
    a.row = p->d.V;
    a.seq0 = p->nwhole + p->is_first;
    int *reach = at<int>(c, B_REACH);
    if (p->bare) /* all of each */
        CK(c.e, cudaMemsetAsync(reach, 0x7f, p->buf[B_REACH].bytes, c.s));
    else
        TRY(fast_reach(c, reach));
    a.reach = reach;
    return pass(p->parts - p->is_first);
}
