/* gpu/fast/state.cu - the state pass forward, chunk after chunk:
 *
 *   X' = u' - S' w'      S' <- eC o S' + X' kg      o' = scale S' qg' + X' Aqk'
 *
 * OUT: o is wanted. KEEP: the states before each chunk and X are, for the backward's recomputation
 * or for stages to be read. Two kernels:
 *
 *   k_scan  many heads: one warp per 16 columns, 4 in a block share the tiles, a fifth loads them
 *   k_team  few heads: 4 warps per 16 columns, 4 more for o, one loads
 *
 * Shared memory is a ring of chunks (Stage) and data that a block's warps exchange or order before
 * they are written. Phases of a chunk, and what shared memory holds:
 *
 *   k_scan, each warp by itself:
 *     X       S rounded to fragments; X = u - w S           the chunk: w kg qg Aqk u eC
 *     keep    S and X go out by the copy engine             S, X of each warp
 *     S       S <- eC S + kg' X                             kg, eC
 *     o       scale qg S + Aqk X                            qg, Aqk; o of each warp; then the
 *                                                           stage is the producer's again
 *   k_team, warp t of 4:
 *     hand    S of its channels to fragments                S[buf], of all warps behind the barrier
 *     X       X of tokens 16 t ..; kg, eC to registers      w, u, kg, eC; X[buf] behind the barrier
 *     S       S <- eC S + kg' X                             X[buf]; S and X to memory (KEEP)
 *   and warp t of the 4 for o, a chunk behind at most:
 *     o       scale qg S + Aqk X of tokens 16 t ..          qg, Aqk; S[buf], X[buf] */
#include "fast/state.cuh"

namespace {

template <int K, int SL> struct Stage {
    bf16 w[C * K], kg[C * K], qg[C * K], Aqk[C * C], u[SL * C * 16];
};

/* Chunk c of one head; SL slices of u from `slice` on. */
template <int K, int V, int SL, bool OUT>
__device__ __forceinline__ void load_stage(Stage<K, SL> &s, float *eC, const Dims &d,
                                           const StateArgs &a, int c, int hv, int slice,
                                           uint64_t *full, int lane) {
    int64_t tile = (int64_t)c * d.HV + hv;
    fill(s.w, a.w + tile * C * K, C * K * 2, full, lane);
    fill(s.kg, a.kg + tile * C * K, C * K * 2, full, lane);
    fill(eC, a.eC + tile * K, K * 4, full, lane);
    fill(s.u, a.u + (tile * (V / 16) + slice) * C * 16, SL * C * 32, full, lane);
    if (!OUT) return;
    fill(s.qg, a.qg + tile * C * K, C * K * 2, full, lane);
    fill(s.Aqk, a.Aqk + tile * C * C, C * C * 2, full, lane);
}
template <int K, int V, int SL, bool OUT>
__device__ __forceinline__ void load_chunks(Ring &r, Stage<K, SL> *stages, float (*eC)[K],
                                            const Dims &d, const StateArgs &a, Run run, int hv,
                                            int slice, int lane) {
    const int bytes = 2 * C * K * 2 + K * 4 + SL * C * 32 + (OUT ? C * K * 2 + C * C * 2 : 0);
    Turn turn(a.depth);
    produce(r, turn, run.n, bytes, lane, [&](int slot, int i, uint64_t *full) {
        load_stage<K, V, SL, OUT>(stages[slot], eC[slot], d, a, run.c0 + i, hv, slice, full, lane);
    });
}

/* ---- many heads ------------------------------------------------------------------------------ */

template <int K, bool OUT, bool KEEP> struct ScanSmem {
    Ring ring;
    float eC[MOST_STAGES][K]; /* of the stages, whose tiles lie on multiples of 1,024 bytes */
    bf16 o[OUT ? SLICES_OF_SCAN : 1][OUT ? C * 16 : 8];
    bf16 S[KEEP ? SLICES_OF_SCAN : 1][KEEP ? K * 16 : 8],
        X[KEEP ? SLICES_OF_SCAN : 1][KEEP ? C * 16 : 8];
};

/* One warp's 16 columns, from v0 on. */
template <int K, int V, bool OUT, bool KEEP> struct ScanWarp {
    typedef ScanSmem<K, OUT, KEEP> Smem;
    typedef Stage<K, SLICES_OF_SCAN> St;
    const Dims &d;
    const StateArgs &a;
    Smem &sm;
    int hv, warp, slice, lane; /* slice: of the tile */
    float S[K / 8][4];

    /* free(): behind the last use of the stage. */
    template <class F>
    __device__ __forceinline__ void chunk(int c, const St &st, const float *eC, F free) {
        int64_t tile = (int64_t)c * d.HV + hv;
        uint32_t sa[K / 16][4], xa[4][4];
        float x[8][4] = {};
        round_state<K>(sa, S);
        times_rows<K>(x, sa, st.w, lane);
#pragma unroll
        for (int p = 0; p < 4; p++) {
            take_from_u(x + 2 * p, slice_across(st.u + warp * C * 16, 16 * p, lane));
            fragment(xa[p], x[2 * p], x[2 * p + 1]);
        }
        if (KEEP) keep_chunk<K, V>(a, tile, slice, sm.S[warp], sm.X[warp], sa, xa, lane);
        Walk<> kg = walk_down(st.kg, 0, lane);
#pragma unroll
        for (int j = 0; j < K / 8; j += 4) {
            float acc[4][4] = {};
            times_columns<4>(acc, kg, j, [&](int p) { return xa[p]; });
            decay_and_add<4>(S + j, acc, eC + j * 8, lane);
        }
        if (!OUT) return free();
        float o[8][4] = {};
        times_rows<K>(o, sa, st.qg, lane);
        add_Aqk(o, st, xa);
        free();
        store_o<4>(d, a.o, o, sm.o[warp], d.chunk[c], 0, hv, slice * 16, lane);
    }
    /* o of S alone, times scale, and the part of X, by warps. The blocks of Aqk above the diagonal
     * are skipped: zeros there would bring values that are not finite to earlier tokens. */
    __device__ __forceinline__ void add_Aqk(float o[8][4], const St &st, const uint32_t xa[4][4]) {
#pragma unroll
        for (int i = 0; i < 32; i++)
            o[i / 4][i % 4] *= d.scale;
        times_Aqk<4>(o, st.Aqk, 0, lane, [&](int p) { return xa[p]; });
    }
    /* The same by the warpgroup, which reads a tile once where four warps read it four times. The
     * products of S with w and qg run together, those of X with kg beside the rest of o. */
    template <class F>
    __device__ __forceinline__ void wg_chunk(int c, const St &st, const float *eC, F free) {
        int64_t tile = (int64_t)c * d.HV + hv;
        uint64_t wd = rows_desc(st.w, 1), kd = rows_desc(st.kg, 64), qd = rows_desc(st.qg, 1);
        uint32_t sa[K / 16][4], xa[4][4];
        float x[8][4], o[8][4], y[K / 64][8][4];
        round_state<K>(sa, S);
        wg_fence();
        wg_times_rows<K>(x, sa, wd);
        if (OUT)
            wg_times_rows<K>(o, sa, qd);
        else
            wg_commit();
        wg_wait<1>(x);
#pragma unroll
        for (int p = 0; p < 4; p++) {
            take_from_u(x + 2 * p, slice_across(st.u + warp * C * 16, 16 * p, lane));
            fragment(xa[p], x[2 * p], x[2 * p + 1]);
        }
        wg_fence();
        wg_times_kg<K>(y, xa, kd);
        if (KEEP) keep_chunk<K, V>(a, tile, slice, sm.S[warp], sm.X[warp], sa, xa, lane);
        if (OUT) {
            wg_wait<K / 64>(o);
            add_Aqk(o, st, xa);
        }
#pragma unroll
        for (int j = 0; j < K / 64; j++) {
            if (j + 1 < K / 64)
                wg_wait<1>(y[j]);
            else
                wg_wait<0>(y[j]);
            decay_and_add<8>(S + 8 * j, y[j], eC + j * 64, lane);
        }
        free();
        if (OUT) store_o<4>(d, a.o, o, sm.o[warp], d.chunk[c], 0, hv, slice * 16, lane);
    }
    __device__ __forceinline__ void run(Run r, St *stages) {
        const float *init = initial(d, a, r.starts, r.gseq, r.part, hv);
        int v0 = slice * 16;
        each<K / 8>(S, lane,
                    [&](int k, int v, float &s) { s = init ? init[k * V + v0 + v] : 0.f; });
        Turn turn(a.depth);
        for (int i = 0; i < r.n; i++, turn.next()) {
            turn.wait_full(sm.ring);
            auto free = [&] {
                __syncwarp();
                bar_arrive_warp(&sm.ring.empty[turn.slot], lane);
            };
            if (has_warpgroups())
                wg_chunk(r.c0 + i, stages[turn.slot], sm.eC[turn.slot], free);
            else
                chunk(r.c0 + i, stages[turn.slot], sm.eC[turn.slot], free);
        }
        if (KEEP) drain_wait(lane);
        each<K / 8>(S, lane,
                    [&](int k, int v, float &s) { last_state<false>(d, a, r, hv, k, v0 + v, s); });
    }
};

template <int K, int V, bool OUT, bool KEEP>
__global__ void TOGETHER(V / 16 / SLICES_OF_SCAN) __launch_bounds__(SCAN_THREADS, 1)
    k_scan(Dims d, StateArgs a) {
    extern __shared__ __align__(1024) char raw[];
    typedef ScanSmem<K, OUT, KEEP> Smem;
    Smem &sm = *(Smem *)raw;
    auto *stages = stages_behind<Stage<K, SLICES_OF_SCAN>>(raw, sm);
    const int blocks = V / 16 / SLICES_OF_SCAN;
    int first = blockIdx.x % blocks * SLICES_OF_SCAN, hv = blockIdx.x / blocks % d.HV;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    ring_init(sm.ring, SLICES_OF_SCAN);
    await_grid();
    Run run = run_of(d.seq[a.seq0 + blockIdx.x / blocks / d.HV]);
    __syncthreads();
    if (warp == SLICES_OF_SCAN) {
        load_chunks<K, V, SLICES_OF_SCAN, OUT>(sm.ring, stages, sm.eC, d, a, run, hv, first, lane);
        return;
    }
    ScanWarp<K, V, OUT, KEEP> w = {d, a, sm, hv, warp, first + warp, lane, {}};
    w.run(run, stages);
}

/* ---- few heads ------------------------------------------------------------------------------- */

/* Warp t computes X of tokens 16 t .. and S of its K / 4 channels. Fragments pass through shared
 * memory in the order of registers, with two barriers a chunk. Fragments of w and kg are loaded
 * before the barrier that their products wait for. Four more warps, a chunk behind at most, compute
 * o from the same fragments. */
template <int K> struct TeamSmem {
    Ring ring;
    float eC[MOST_STAGES][K];
    uint64_t ready[2],
        taken[2]; /* S and X of a chunk are complete; the output warps have read them */
    uint4 S[2][K / 16][32], X[2][4][32];
    bf16 o[C * 16], hs[2][K * 16], xs[2][C * 16];
};

/* x = S' B' for 16 tokens, B fragments loaded. Sums of even and of other k-steps are separate:
 * shorter chains. */
template <int K>
__device__ __forceinline__ void team_rows(float x[2][4], const uint4 S[K / 16][32],
                                          const uint32_t b[K / 16][4], int lane) {
    float acc[2][2][4] = {};
    uint4 f[K / 16];
#pragma unroll
    for (int j = 0; j < K / 16; j++)
        f[j] = S[j][lane];
#pragma unroll
    for (int j = 0; j < K / 16; j++) {
        uint32_t sa[4] = {f[j].x, f[j].y, f[j].z, f[j].w};
        two(acc[j % 2][0], acc[j % 2][1], sa, b[j]);
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        x[i / 4][i % 4] = acc[0][i / 4][i % 4] + acc[1][i / 4][i % 4];
}
template <int K>
__device__ __forceinline__ void load_rows(uint32_t b[K / 16][4], const bf16 *B, int t, int lane) {
    Walk<> w = walk_across(B, 16 * t, lane);
#pragma unroll
    for (int j = 0; j < K / 16; j++)
        ldsm4(b[j], w.at(j));
}

/* A team's 16 columns: `slice`. */
template <int K, int V, bool OUT, bool KEEP> struct Team {
    typedef Stage<K, 1> St;
    const Dims &d;
    const StateArgs &a;
    TeamSmem<K> &sm;
    Run run;
    int hv, slice, t, lane;

    __device__ __forceinline__ void keep_state(const float S[K / 32][4], int buf, int k0) {
#pragma unroll
        for (int j = 0; j < K / 32; j += 2) {
            uint32_t r[4];
            fragment(r, S[j], S[j + 1]);
            sm.S[buf][(k0 / 8 + j) / 2][lane] = pack4(r);
            if (KEEP) keep_fragment(sm.hs[buf], k0 + j * 8, r, lane);
        }
    }
    /* S and X of the chunk to memory, by the first warp; both lie in their buffers. */
    __device__ __forceinline__ void send_states(int64_t tile, int buf) {
        drain(a.states + (tile * (V / 16) + slice) * K * 16, sm.hs[buf], K * 32, lane);
        drain(a.news + (tile * (V / 16) + slice) * C * 16, sm.xs[buf], C * 32, lane);
        drain_commit(lane);
    }
    __device__ __forceinline__ void state(St *stages) {
        const int NJ = K / 32;
        int k0 = t * NJ * 8, v0 = slice * 16;
        const float *init = initial(d, a, run.starts, run.gseq, run.part, hv);
        float S[NJ][4];
        each<NJ>(S, lane,
                 [&](int k, int v, float &s) { s = init ? init[(k0 + k) * V + v0 + v] : 0.f; });
        Turn turn(a.depth);
        for (int i = 0; i < run.n; i++, turn.next()) {
            St &st = stages[turn.slot];
            int64_t tile = (int64_t)(run.c0 + i) * d.HV + hv;
            int buf = i % 2;
            float x[2][4], acc[NJ][4] = {};
            uint32_t b[K / 16][4], xa[4][4], kb[4][NJ / 2][4], f[4];
            if (OUT && i >= 2) bar_wait(&sm.taken[buf], (i / 2 - 1) & 1);
            keep_state(S, buf, k0);
            turn.wait_full(sm.ring);
            load_rows<K>(b, st.w, t, lane);
            team_sync();
            team_rows<K>(x, sm.S[buf], b, lane);
            take_from_u(x, slice_across(st.u, 16 * t, lane));
            fragment(f, x[0], x[1]);
            sm.X[buf][t][lane] = pack4(f);
            if (KEEP) {
                keep_fragment(sm.xs[buf], 16 * t, f, lane);
                drain_fence();
                if (t == 0)
                    drain_wait(lane); /* of the chunk before: written again behind the barrier */
            }
            Walk<> kg = walk_down(st.kg, 0, lane);
#pragma unroll
            for (int p = 0; p < 4; p++)
#pragma unroll
                for (int j = 0; j < NJ / 2; j++)
                    ldsm4t(kb[p][j], kg.at(k0 / 16 + j, p));
            float2 e[NJ];
#pragma unroll
            for (int j = 0; j < NJ; j++)
                e[j] = *(const float2 *)(sm.eC[turn.slot] + k0 + j * 8 + lane % 4 * 2);
            if (OUT) bar_arrive(&sm.ready[buf]);
            team_sync();
            if (KEEP && t == 0) send_states(tile, buf);
            load_x(xa, sm.X[buf], lane);
            __syncwarp();
            bar_arrive_warp(&sm.ring.empty[turn.slot], lane);
#pragma unroll
            for (int p = 0; p < 4; p++)
#pragma unroll
                for (int j = 0; j < NJ; j += 2)
                    two(acc[j], acc[j + 1], xa[p], kb[p][j / 2]);
#pragma unroll
            for (int j = 0; j < NJ; j++)
#pragma unroll
                for (int n = 0; n < 4; n++)
                    S[j][n] = fmaf(n % 2 ? e[j].y : e[j].x, S[j][n], acc[j][n]);
        }
        if (KEEP && t == 0) drain_wait(lane);
        each<NJ>(S, lane, [&](int k, int v, float &s) {
            last_state<false>(d, a, run, hv, k0 + k, v0 + v, s);
        });
    }
    /* o of tokens 16 t .. of every chunk: scale S' qg' + X' Aqk'. */
    __device__ __forceinline__ void output(St *stages) {
        Turn turn(a.depth);
        for (int i = 0; i < run.n; i++, turn.next()) {
            St &st = stages[turn.slot];
            uint32_t b[K / 16][4], xa[4][4], q[4][4];
            float o[2][4];
            turn.wait_full(sm.ring);
            load_rows<K>(b, st.qg, t, lane);
            Walk<> aqk = walk_across(st.Aqk, 16 * t, lane);
#pragma unroll
            for (int p = 0; p < 4; p++)
                ldsm4(q[p], aqk.at(p));
            __syncwarp();
            bar_arrive_warp(&sm.ring.empty[turn.slot], lane);
            bar_wait(&sm.ready[i % 2], i / 2 & 1);
            team_rows<K>(o, sm.S[i % 2], b, lane);
            load_x(xa, sm.X[i % 2], lane);
            bar_arrive(&sm.taken[i % 2]);
#pragma unroll
            for (int e = 0; e < 8; e++)
                o[e / 4][e % 4] *= d.scale;
#pragma unroll
            for (int p = 0; p < 4; p++)
                if (p <= t) two(o[0], o[1], xa[p], q[p]);
            store_o<1>(d, a.o, o, sm.o + t * 256, d.chunk[run.c0 + i], t * 16, hv, slice * 16,
                       lane);
        }
    }
};

#define TEAM_THREADS(OUT) ((OUT) ? 288 : 160) /* 4 warps of state, 4 of output, the producer */
template <int K, int V, bool OUT, bool KEEP>
__global__ void __launch_bounds__(TEAM_THREADS(OUT)) k_team(Dims d, StateArgs a) {
    extern __shared__ __align__(1024) char raw[];
    typedef TeamSmem<K> Smem;
    Smem &sm = *(Smem *)raw;
    auto *stages = stages_behind<Stage<K, 1>>(raw, sm);
    int slice = blockIdx.x % (V / 16), hv = blockIdx.x / (V / 16) % d.HV;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    await_grid();
    Run run = run_of(d.seq[a.seq0 + blockIdx.x / (V / 16) / d.HV]);
    if (threadIdx.x == 0)
        for (int i = 0; i < 2; i++) {
            bar_init(&sm.ready[i], 128);
            bar_init(&sm.taken[i], 128);
        }
    ring_init(sm.ring, OUT ? 8 : 4);
    __syncthreads();
    Team<K, V, OUT, KEEP> team = {d, a, sm, run, hv, slice, warp % 4, lane};
    if (warp < 4)
        team.state(stages);
    else if (OUT && warp < 8)
        team.output(stages);
    else
        load_chunks<K, V, 1, OUT>(sm.ring, stages, sm.eC, d, a, run, hv, slice, lane);
}

/* ---- host ------------------------------------------------------------------------------------ */

template <int K, int V, bool OUT, bool KEEP>
dp_status launch_team(const Call &c, StateArgs a, int nseq) {
    auto kernel = k_team<K, V, OUT, KEEP>;
    int bytes = ring_bytes(c.p, &a, sizeof(TeamSmem<K>), sizeof(Stage<K, 1>));
    return launch(queue_of_pass(c), "k_team", kernel, pass_blocks_of(c.p, nseq), TEAM_THREADS(OUT),
                  bytes, c.p->d, a);
}

template <int K, int V, bool OUT, bool KEEP>
dp_status launch_scan(const Call &c, StateArgs a, int nseq) {
    auto kernel = k_scan<K, V, OUT, KEEP>;
    int bytes =
        ring_bytes(c.p, &a, sizeof(ScanSmem<K, OUT, KEEP>), sizeof(Stage<K, SLICES_OF_SCAN>));
    return launch(queue_of_pass(c), "k_scan", kernel, pass_blocks_of(c.p, nseq), SCAN_THREADS,
                  bytes, c.p->d, a);
}

template <int K, int V> struct Pass {
    template <bool OUT, bool KEEP> static dp_status of(const Call &c, StateArgs a, int nseq) {
        return by_teams(c.p, nseq) ? launch_team<K, V, OUT, KEEP>(c, a, nseq)
                                   : launch_scan<K, V, OUT, KEEP>(c, a, nseq);
    }
    static dp_status run(const Call &c, StateArgs a, int nseq) {
        if (a.hm && !a.o) return of<false, false>(c, a, nseq);
        if (!a.o) return of<false, true>(c, a, nseq);
        return a.states ? of<true, true>(c, a, nseq) : of<true, false>(c, a, nseq);
    }
};

} // namespace

static StateArgs with_tiles(const Call &c, StateArgs a) {
    a.w = at<bf16>(c, B_W);
    a.u = at<bf16>(c, B_U);
    a.kg = at<bf16>(c, B_KG);
    a.qg = at<bf16>(c, B_QG);
    a.Aqk = at<bf16>(c, B_AQK);
    a.eC = at<float>(c, B_EC);
    a.states = at<bf16>(c, B_H);
    a.news = at<bf16>(c, B_VNEW);
    return a;
}

dp_status fast_state(const Call &c) {
    if (c.p->bare) return fast_kept_states(c, forward_args(c));
    return by_widths<Pass>(c, with_tiles(c, forward_args(c)), c.p->nrow);
}

dp_status fast_bwd_states(const Call &c) {
    if (c.p->bare) return fast_kept_states(c, start_args(c));
    return by_widths<Pass>(c, with_tiles(c, start_args(c)), c.p->nrow);
}

dp_status fast_pre_states(const Call &c) {
    StateArgs a = with_tiles(c, start_args(c));
    a.merged = came(c);
    a.states = a.news = NULL;
    a.hm = at<float>(c, B_HM);
    a.row = c.p->d.V + c.p->d.K;
    a.seq0 = c.p->pre0;
    return by_widths<Pass>(c, a, c.p->npre);
}
