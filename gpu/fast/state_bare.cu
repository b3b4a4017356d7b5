/* gpu/fast/state_bare.cu - the state pass of a bare plan with one gate a head (bare.cuh), from rows
 * of k, q and v as they were given:
 *
 *   Z' = S' k'      R' = v' - of_k o Z'      X' = R' (T B)'
 *   S' <- eC S' + (to_end o X') k            o' = of_q o S' q' + X' Aqk'
 *
 * Two warpgroups share 64 columns of v, 16 a warp: one has the states, the other makes o of a chunk
 * from the S q' and X that the first left, one or two chunks behind. Each has a ring, which four
 * warps fill: rows of k, q, v by copies of 16 bytes, T B, Aqk and factors by the copy engine.
 * Phases of a chunk, and what shared memory holds:
 *
 *   states   Z     S rounded to fragments; Z, S q'          k, q
 *            X     R = v - of_k Z; X = T B R                v, T B, factors
 *            S     S <- eC S + k' (to_end X)                k, factors; O[buf], X[buf]
 *   o        o     of_q S q' + Aqk X                        O[buf], X[buf]; Aqk, of_q */
#include "fast/bare.cuh"
#include "fast/state.cuh"

namespace {

#define BLOCK_V (16 * SLICES_OF_SCAN) /* columns of v that a block owns */

/* What comes for a chunk, ROWS: for the states, for o. */
template <int K> struct StateStage { bf16 k[C * K], q[C * K], v[C * BLOCK_V], TB[C * C]; };
struct OutStage {
    bf16 Aqk[C * C];
};
/* The stages of both rings lie behind it, on multiples of 1,024 bytes; their factors here. */
struct BareSmem {
    Ring in, out;
    uint64_t ready[2], taken[2]; /* S q' and X of a chunk are there; are read */
    StateFactors factors[MOST_STAGES];
    float of_q[MOST_STAGES][C];
    uint4 O[2][8][128], X[2][4][128]; /* S q', X: fragments, a lane's words together */
    bf16 o[SLICES_OF_SCAN][C * 16];
};
struct BareArgs {
    StateArgs a;
    BareOut b;
    const bf16 *k, *q, *v;
};

/* ---- producers, four warps ------------------------------------------------------------------- */

/* One of four warps: a quarter of the rows. The first also has what the copy engine brings for the
 * states, the last what it brings for o, in a stage of the other ring. */
template <int K, int V>
__device__ __forceinline__ void produce_rows(BareSmem &sm, StateStage<K> *in, OutStage *out,
                                             const Dims &d, const BareArgs &a, Run run, int hv,
                                             int v0, int part, int lane) {
    int h = hv / d.G;
    Turn turn(a.a.depth);
    Chunk next = d.chunk[run.c0];
    for (int i = 0; i < run.n; i++, turn.next()) {
        uint64_t *full = &sm.in.full[turn.slot], *also = &sm.out.full[turn.slot];
        int64_t tile = (int64_t)(run.c0 + i) * d.HV + hv;
        StateStage<K> &s = in[turn.slot];
        Chunk c = next;
        if (i + 1 < run.n) next = d.chunk[run.c0 + i + 1];
        turn.wait_empty(sm.in);
        if (part == 0) {
            fill_begin(full, C * C * 2 + (int)sizeof(StateFactors), lane);
            fill(s.TB, a.b.TB + tile * C * C, C * C * 2, full, lane);
            fill(&sm.factors[turn.slot], &a.b.factors[tile].state, sizeof(StateFactors), full,
                 lane);
        }
        fill_rows<K>(s.k, a.k + (c.t0 * d.H + h) * K, d.H * K, c.len, part, lane);
        fill_rows<BLOCK_V>(s.v, a.v + (c.t0 * d.HV + hv) * V + v0, d.HV * V, c.len, part, lane);
        fill_rows<K>(s.q, a.q + (c.t0 * d.H + h) * K, d.H * K, c.len, part, lane);
        fill16_end(full, lane);
        if (part < 3) continue;
        turn.wait_empty(sm.out);
        fill_begin(also, C * C * 2 + C * 4, lane);
        fill(out[turn.slot].Aqk, a.b.Aqk + tile * C * C, C * C * 2, also, lane);
        fill(sm.of_q[turn.slot], a.b.factors[tile].of_q, C * 4, also, lane);
        fill_end(also, lane);
    }
}

/* ---- the warps of 16 columns ----------------------------------------------------------------- */

/* What multiplies a lane's tokens of 64, which are columns of X'. */
struct ByToken {
    float2 f[8];
    __device__ __forceinline__ ByToken(const float *from, int lane) {
#pragma unroll
        for (int j = 0; j < 8; j++)
            f[j] = *(const float2 *)(from + j * 8 + lane % 4 * 2);
    }
    __device__ __forceinline__ void times(float x[8][4]) const {
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                x[j][e] *= e % 2 ? f[j].y : f[j].x;
    }
};

/* A warp's 16 columns, of either warpgroup. */
template <int K, int V> struct BareWarp {
    const Dims &d;
    const BareArgs &a;
    BareSmem &sm;
    Run run;
    int row, hv, warp, slice, lane; /* row: of the run in Dims.seq; slice: of the head's columns */

    __device__ __forceinline__ void free(Ring &ring, const Turn &turn) {
        __syncwarp();
        bar_arrive_warp(&ring.empty[turn.slot], lane);
    }
    /* Everything that a product does not make is asked for before the wait for one. */
    __device__ __forceinline__ void state_chunk(float S[K / 8][4], const StateStage<K> &st,
                                                const StateFactors &f, int i, const Turn &turn) {
        int buf = i % 2, thread = warp * 32 + lane;
        uint32_t sa[K / 16][4], ra[4][4], xa[4][4], xe[4][4];
        float z[8][4], o[8][4], x[8][4] = {}, y[K / 64][8][4];
        round_state<K>(sa, S);
        turn.wait_full(sm.in);
        drain_fence(); /* rows came by copies of lanes */
        wg_fence();
        wg_times_rows<K>(z, sa, rows_desc(st.k, 1));
        wg_times_rows<K>(o, sa, rows_desc(st.q, 1));
        Walk<> v(st.v, across_row(lane), across_p(lane));
        float decay = FAULT(BARE_DECAY) ? sm.factors[turn.before(i)].chunk[0] : f.chunk[0];
        ByToken of_k(f.of_k, lane), to_end(f.to_end, lane);
#pragma unroll
        for (int p = 0; p < 4; p++)
            ldsm4t(ra[p], v.at(warp, p));
        wg_wait<1>(z);
        of_k.times(z);
#pragma unroll
        for (int p = 0; p < 4; p++) {
            take_from(z + 2 * p, ra[p]);
            fragment(ra[p], z[2 * p], z[2 * p + 1]);
        }
        times_Aqk<4>(x, st.TB, 0, lane, [&](int p) { return ra[p]; });
#pragma unroll
        for (int p = 0; p < 4; p++)
            fragment(xa[p], x[2 * p], x[2 * p + 1]);
        to_end.times(x);
#pragma unroll
        for (int p = 0; p < 4; p++)
            fragment(xe[p], x[2 * p], x[2 * p + 1]);
        wg_wait<0>(o);
        wg_fence();
        wg_times_kg<K>(y, xe, rows_desc(st.k, 64));
        if (i >= 2) bar_wait(&sm.taken[buf], (i / 2 - 1) & 1);
        leave<4>(sm.X[buf], xa, thread);
        leave_sums(sm.O[buf], o, thread);
        bar_arrive(&sm.ready[buf]);
#pragma unroll
        for (int j = 0; j < K / 64; j++) {
            if (j + 1 < K / 64)
                wg_wait<1>(y[j]);
            else
                wg_wait<0>(y[j]);
#pragma unroll
            for (int n = 0; n < 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    S[8 * j + n][e] = fmaf(decay, S[8 * j + n][e], y[j][n][e]);
        }
        free(sm.in, turn);
    }
    __device__ __forceinline__ void states(StateStage<K> *stages) {
        const float *init = initial(d, a.a, run.starts, run.gseq, run.part, hv);
        int v0 = slice * 16;
        float S[K / 8][4];
        each<K / 8>(S, lane,
                    [&](int k, int v, float &s) { s = init ? init[k * V + v0 + v] : 0.f; });
        Turn turn(a.a.depth);
        for (int i = 0; i < run.n; i++, turn.next())
            state_chunk(S, stages[turn.slot], sm.factors[turn.slot], i, turn);
        each<K / 8>(S, lane, [&](int k, int v, float &s) {
            last_state<false>(d, a.a, run, hv, k, v0 + v, s);
        });
        leave_spoilt<K, V>(d, a.a, row, hv, v0, S, lane);
    }
    __device__ __forceinline__ void outputs(OutStage *stages) {
        Turn turn(a.a.depth);
        Chunk next = d.chunk[run.c0];
        for (int i = 0; i < run.n; i++, turn.next()) {
            const OutStage &st = stages[turn.slot];
            int buf = i % 2, thread = warp * 32 + lane;
            uint32_t xa[4][4];
            float o[8][4];
            Chunk c = next;
            if (i + 1 < run.n) next = d.chunk[run.c0 + i + 1];
            turn.wait_full(sm.out);
            ByToken of_q(sm.of_q[turn.slot], lane);
            bar_wait(&sm.ready[buf], i / 2 & 1);
            take_sums(o, sm.O[buf], thread);
            take<4>(xa, sm.X[buf], thread);
            bar_arrive(&sm.taken[buf]);
            of_q.times(o);
            times_Aqk<4>(o, st.Aqk, 0, lane, [&](int p) { return xa[p]; });
            free(sm.out, turn);
            store_o<4>(d, a.a.o, o, sm.o[warp], c, 0, hv, slice * 16, lane);
        }
    }
};

#define BARE_THREADS 384 /* a warpgroup for states, one for o, one that loads */
template <int K, int V>
__global__ void __launch_bounds__(BARE_THREADS, 1)
    k_scan_bare(const __grid_constant__ Dims d, const __grid_constant__ BareArgs a) {
    extern __shared__ __align__(1024) char raw[];
    BareSmem &sm = *(BareSmem *)raw;
    auto *in = stages_behind<StateStage<K>>(raw, sm);
    auto *out = (OutStage *)(in + a.a.depth);
    const int blocks = V / BLOCK_V;
    int first = blockIdx.x % blocks * SLICES_OF_SCAN, hv = blockIdx.x / blocks % d.HV;
    int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, part = threadIdx.x / 128;
    int row = a.a.seq0 + blockIdx.x / blocks / d.HV;
    Run run = run_of(d.seq[row]);
    if (threadIdx.x == 0)
        for (int i = 0; i < 2; i++) {
            bar_init(&sm.ready[i], 128);
            bar_init(&sm.taken[i], 128);
        }
    ring_init(sm.in, 4, FULL_COUNT_16(4));
    ring_init(sm.out, 4);
    __syncthreads();
    BareWarp<K, V> w = {d, a, sm, run, row, hv, warp, first + warp, lane};
    if (part == 0) {
        take_registers<232>();
        w.states(in);
    } else if (part == 1) {
        w.outputs(out);
    } else {
        give_registers<56>();
        produce_rows<K, V>(sm, in, out, d, a, run, hv, first * 16, warp, lane);
    }
}

/* ---- host ------------------------------------------------------------------------------------ */

template <int K, int V> struct BarePass {
    static dp_status run(const Call &c, BareArgs a) {
        auto kernel = k_scan_bare<K, V>;
        int bytes =
            ring_bytes(c.p, &a.a, sizeof(BareSmem), sizeof(StateStage<K>) + sizeof(OutStage));
        unsigned blocks = (unsigned)c.p->nrow * c.p->d.HV * (V / BLOCK_V);
        CK(c.e, allow_shared(kernel, bytes));
        kernel<<<blocks, BARE_THREADS, bytes, c.s>>>(c.p->d, a);
        CK_LAUNCH(c.e, "k_scan_bare");
        return DP_OK;
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
    return by_widths<BarePass>(c, a);
}
