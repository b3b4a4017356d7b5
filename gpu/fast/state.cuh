/* gpu/fast/state.cuh - states through chunks, forward and backward: shared by the passes of
 * state.cu and state_bwd.cu.
 *
 * S' = [16 v][K k] of 16 columns stays in registers in fp32, of one warp or a quarter of its k in
 * each of 4. Written transposed, the accumulators of one product are the A operands of the next, so
 * that warps with columns of their own never exchange anything. The sum over tokens of an update
 * starts from zero and is added in fp32. The accumulator of a tensor core rounds toward zero, and S
 * must not see that once per chunk. */
#ifndef DPG_STATE_CUH
#define DPG_STATE_CUH
#include "fast/fast.cuh"
#include "fast/ring.cuh"
#include "fast/tile.cuh"
#include "fault.cuh"
#include "ref/vocabulary/segments.h"
#include <algorithm>

/* NULL: not wanted, or zeros. */
struct StateArgs {
    const bf16 *w, *u, *kg, *qg, *Aqk;
    const float *eC;
    const float *given, *merged; /* states to start from: [Nseq][HV][K][V] of the caller,
                                  * [parts][HV] [K][V] of the merge; forward and backward */
    void *o;                     /* forward */
    float *end;                  /* [Nseq][HV][K][V]: final_state, ds0 */
    bf16 *states, *news;         /* h and X, or dh and dv_new, SLICES */
    float *hm;                   /* the last state of a segment, for H or dH: rows of `row` words */
    bool goes_on;                /* hm: not of sequences that end there */
    const int *reach;            /* backward, for dH of parts: of how many first chunks; or NULL */
    unsigned *ready;             /* backward (ready.cuh); or NULL */
    bool beside;                 /* backward: the pass forward runs beside it */
    int *spoilt;                 /* B_SPOILT of a plan without w and u; or NULL */
    int row, seq0, parts; /* seq0: the first row of Dims.seq; parts: segments of all that are cut,
                           * 1: whole to the backward */
    int depth;            /* stages of the ring */
    int heads;            /* whole.cuh: heads of all rows */
};

/* Chunks of a pass: a segment, or a whole local sub-sequence, whose segments lie behind each other.
 */
struct Run {
    int c0, n, gseq, starts, ends, part;
};
__device__ __forceinline__ Run run_of(const Seq &s) {
    return Run{s.c0, s.c1 - s.c0, s.gseq, s.starts, s.ends, s.part};
}

/* State of one head that a pass starts from. */
__device__ __forceinline__ const float *initial(const Dims &d, const StateArgs &a, bool given,
                                                int gseq, int part, int hv) {
    const float *from = given ? a.given : a.merged;
    return from ? from + ((int64_t)(given ? gseq : part) * d.HV + hv) * d.K * d.V : NULL;
}

/* Whether the state behind row `row` of Dims.seq is finite, of the warp's 16 columns from v0 on. */
template <int K, int V>
__device__ __forceinline__ void leave_spoilt(const Dims &d, const StateArgs &a, int row, int hv,
                                             int v0, float S[K / 8][4], int lane) {
    if (!a.spoilt) return;
    int odd[2] = {}, *to = a.spoilt + ((int64_t)row * d.HV + hv) * V + v0;
    each<K / 8>(S, lane, [&](int, int v, float &s) { odd[v / 8] |= s - s != 0.f; });
#pragma unroll
    for (int half = 0; half < 2; half++) {
        odd[half] |= __shfl_xor_sync(~0u, odd[half], 1);
        odd[half] |= __shfl_xor_sync(~0u, odd[half], 2);
        if (lane % 4 == 0) to[half * 8 + lane / 4] = odd[half];
    }
}

/* The state of 16 columns as A fragments, rounded. */
template <int K>
__device__ __forceinline__ void round_state(uint32_t sa[K / 16][4], const float S[K / 8][4]) {
#pragma unroll
    for (int j = 0; j < K / 16; j++)
        fragment(sa[j], S[2 * j], S[2 * j + 1]);
}

/* acc += S' B' for B = [64 tokens][K] (ROWS): n-tiles of 8 tokens. */
template <int K>
__device__ __forceinline__ void times_rows(float acc[8][4], const uint32_t sa[K / 16][4],
                                           const bf16 *B, int lane) {
    Walk<> b = walk_across(B, 0, lane);
#pragma unroll
    for (int j = 0; j < K / 16; j++)
#pragma unroll
        for (int n = 0; n < 4; n++) {
            uint32_t r[4];
            ldsm4(r, b.at(j, n));
            two(acc[2 * n], acc[2 * n + 1], sa[j], r);
        }
}

/* x = u' - x of 16 tokens, u' as a transposed matrix load gives it. */
__device__ __forceinline__ void take_from(float x[2][4], const uint32_t r[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float2 y = unpack2(r[i]);
        float *xx = x[i / 2] + i % 2 * 2;
        xx[0] = y.x - xx[0];
        xx[1] = y.y - xx[1];
    }
}
/* From the lane's place in their rows of a slice of u. */
__device__ __forceinline__ void take_from_u(float x[2][4], uint32_t u_at) {
    uint32_t r[4];
    ldsm4t(r, u_at);
    take_from(x, r);
}

/* acc += X' B of NJ n-tiles of 8 channels for B = [64 tokens][K] (ROWS), from channel k0 on; f(p):
 * A fragment of 16 tokens. */
template <int NJ, class F>
__device__ __forceinline__ void times_columns(float acc[NJ][4], const Walk<> &b, int j0, F f) {
#pragma unroll
    for (int p = 0; p < 4; p++) {
        const uint32_t *a = f(p);
#pragma unroll
        for (int n = 0; n < NJ; n += 2) {
            uint32_t r[4];
            ldsm4t(r, b.at((j0 + n) / 2, p));
            two(acc[n], acc[n + 1], a, r);
        }
    }
}

/* The decays of NJ n-tiles of 8 channels, of those that a lane has. */
template <int NJ>
__device__ __forceinline__ void take_decays(float2 e[NJ], const float *eC, int lane) {
#pragma unroll
    for (int n = 0; n < NJ; n++)
        e[n] = *(const float2 *)(eC + n * 8 + lane % 4 * 2);
}
/* S <- eC o S + acc, NJ n-tiles from channel 8 j0 on; e: asked for before. */
template <int NJ>
__device__ __forceinline__ void decay_and_add(float (*S)[4], const float (*acc)[4],
                                              const float2 e[NJ]) {
#pragma unroll
    for (int n = 0; n < NJ; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            S[n][i] = fmaf(i % 2 ? e[n].y : e[n].x, S[n][i], acc[n][i]);
}
template <int NJ>
__device__ __forceinline__ void decay_and_add(float (*S)[4], const float (*acc)[4], const float *eC,
                                              int lane) {
    float2 e[NJ];
    take_decays<NJ>(e, eC, lane);
    decay_and_add<NJ>(S, acc, e);
}

/* Kept states leave through shared memory, slice by slice: a fragment to rows row0 .. of a slice.
 */
__device__ __forceinline__ void keep_fragment(bf16 *slice, int row0, const uint32_t a[4],
                                              int lane) {
    stsm4t(slice_across(slice, row0, lane), a);
}

/* o' += X' Aqk' of 16 P tokens from block p0 on; Aqk is lower triangular in blocks of 16. */
template <int P, class F>
__device__ __forceinline__ void times_Aqk(float o[2 * P][4], const bf16 *Aqk, int p0, int lane,
                                          F f) {
    Walk<> b = walk_across(Aqk, 0, lane);
#pragma unroll
    for (int p = 0; p < 4; p++) {
        const uint32_t *a = f(p);
#pragma unroll
        for (int n = 0; n < P; n++) {
            if (p > p0 + n) continue;
            uint32_t r[4];
            ldsm4(r, b.at(p, p0 + n));
            two(o[2 * n], o[2 * n + 1], a, r);
        }
    }
}

/* Stores 16 P rows of o from row s0 of a chunk, 16 columns; only the first row of each token. A
 * bf16 o goes through 512 P bytes of shared memory, so that whole rows are written. */
template <int P>
__device__ __forceinline__ void store_o(const Dims &d, void *out, float (*o)[4], bf16 *stage,
                                        Chunk c, int s0, int hv, int v0, int lane) {
    int64_t base = ((c.t0 + (s0 >> d.lr)) * d.HV + hv) * d.V + v0, step = (int64_t)d.HV * d.V;
    int rows = (c.len << d.lr) - s0, other = d.R - 1;
    if (!d.o_bf16) {
        each<2 * P>(o, lane, [&](int s, int v, float &y) {
            if (s < rows && !(s & other)) ((float *)out)[base + (s >> d.lr) * step + v] = y;
        });
        return;
    }
#pragma unroll
    for (int n = 0; n < P; n++) {
        uint32_t r[4];
        fragment(r, o[2 * n], o[2 * n + 1]);
        keep_fragment(stage, 16 * n, r, lane);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < P; i++) {
        int s = i * 16 + lane / 2, p = lane % 2;
        if (s < rows && !(s & other))
            *(uint4 *)((bf16 *)out + base + (s >> d.lr) * step + p * 8) =
                *(uint4 *)(stage + piece_at(C, 0, s, p));
    }
    __syncwarp();
}

/* State S and X of a chunk, fragments of a warp's 16 columns, to memory through its buffers. */
template <int K, int V>
__device__ __forceinline__ void keep_chunk(const StateArgs &a, int64_t tile, int slice, bf16 *S,
                                           bf16 *X, const uint32_t sa[K / 16][4],
                                           const uint32_t xa[4][4], int lane) {
    drain_wait(lane);
    __syncwarp();
#pragma unroll
    for (int j = 0; j < K / 16; j++)
        keep_fragment(S, 16 * j, sa[j], lane);
#pragma unroll
    for (int p = 0; p < 4; p++)
        keep_fragment(X, 16 * p, xa[p], lane);
    drain_fence();
    __syncwarp();
    drain(a.states + (tile * (V / 16) + slice) * K * 16, S, K * 32, lane);
    drain(a.news + (tile * (V / 16) + slice) * C * 16, X, C * 32, lane);
    drain_commit(lane);
}

/* Word (k, v) of the result of a pass: final_state where the sequence ends, ds0 (BACK) where it
 * starts. H or dH where other ranks or segments ask. */
template <bool BACK>
__device__ __forceinline__ void last_state(const Dims &d, const StateArgs &a, const Run &r, int hv,
                                           int k, int v, float s) {
    if (a.end && (BACK ? r.starts : r.ends))
        a.end[(((int64_t)r.gseq * d.HV + hv) * d.K + k) * d.V + v] = s;
    if (a.hm && !(a.goes_on && r.ends))
        a.hm[(((int64_t)r.part * d.HV + hv) * d.K + k) * a.row + v] = s;
}

/* Chunks beyond a segment's reach are zero to it. */
__device__ __forceinline__ Run run_at(const Dims &d, const StateArgs &a, int seq, int hv) {
    Run r = run_of(d.seq[seq]);
    int reach = a.reach ? a.reach[r.part * d.HV + hv] : r.n;
    if (reach < r.n) {
        r.n = reach;
        r.ends = 0;
    }
    return r;
}
__device__ __forceinline__ const float *initial_bwd(const Dims &d, const StateArgs &a, const Run &r,
                                                    int hv) {
    int part = FAULT(PARTS_TURNED) ? r.part : a.parts - 1 - r.part;
    return initial(d, a, r.ends, r.gseq, part, hv);
}

/* do of 16 columns as A fragments, 16 tokens each. */
__device__ __forceinline__ void load_do(uint32_t oa[4][4], const bf16 *dos, int lane) {
#pragma unroll
    for (int p = 0; p < 4; p++)
        ldsm4t(oa[p], slice_across(dos, 16 * p, lane));
}

/* x += do' Aqk, dv_local, of 16 P tokens from block n0 on; Aqk is lower triangular in blocks of 16.
 */
template <int P>
__device__ __forceinline__ void add_dv_local(float x[2 * P][4], const uint32_t oa[4][4],
                                             const bf16 *Aqk, int n0, int lane) {
    Walk<> b = walk_down(Aqk, 0, lane);
#pragma unroll
    for (int p = 0; p < 4; p++)
#pragma unroll
        for (int n = 0; n < P; n++) {
            if (p < n0 + n) continue;
            uint32_t r[4];
            ldsm4t(r, b.at(n0 + n, p));
            two(x[2 * n], x[2 * n + 1], oa[p], r);
        }
}

/* Stages lie behind what else a block keeps in shared memory, on a multiple of what products of
 * warpgroups ask of tiles. */
#define STAGES_AT 1024
template <class STAGE, class SMEM>
__device__ __forceinline__ STAGE *stages_behind(char *raw, const SMEM &) {
    return (STAGE *)(raw + (sizeof(SMEM) + STAGES_AT - 1) / STAGES_AT * STAGES_AT);
}

/* Rows 16 part .. of W numbers to ROWS, from a tensor whose rows lie `stride` apart; zeros behind
 * `rows`. */
template <int W>
__device__ __forceinline__ void fill_rows(bf16 *to, const bf16 *from, unsigned stride, int rows,
                                          int part, int lane) {
    const int PIECES = W / 8, STEP = 32 / PIECES; /* rows at once */
    int row = part * 16 + lane / PIECES, piece = lane % PIECES;
    const bf16 *x = from + row * stride + piece * 8;
    unsigned at = rows_at(row, piece) * 2;
#pragma unroll
    for (int i = 0; i < 16; i += STEP)
        fill16((char *)to + (at ^ i % 8 * 16) + i * 128, x + i * stride, row + i < rows);
}
/* ---- teams: 4 warps have the state of 16 columns --------------------------------------------- */

__device__ __forceinline__ void team_sync() { sync_part(1, 128); }
__device__ __forceinline__ uint4 pack4(const uint32_t r[4]) {
    return make_uint4(r[0], r[1], r[2], r[3]);
}
__device__ __forceinline__ void unpack4(uint32_t r[4], uint4 x) {
    r[0] = x.x;
    r[1] = x.y;
    r[2] = x.z;
    r[3] = x.w;
}
/* X of a chunk, A fragments that the warps of a team left. */
__device__ __forceinline__ void load_x(uint32_t xa[4][4], const uint4 X[4][32], int lane) {
#pragma unroll
    for (int p = 0; p < 4; p++)
        unpack4(xa[p], X[p][lane]);
}

/* ---- two warpgroups: one has the states, the other makes o ----------------------------------- */

/* N fragments to and from where both warpgroups find them. */
template <int N>
__device__ __forceinline__ void leave(uint4 to[N][128], const uint32_t (*x)[4], int thread) {
#pragma unroll
    for (int i = 0; i < N; i++)
        to[i][thread] = pack4(x[i]);
}
template <int N>
__device__ __forceinline__ void take(uint32_t (*x)[4], const uint4 from[N][128], int thread) {
#pragma unroll
    for (int i = 0; i < N; i++)
        unpack4(x[i], from[i][thread]);
}
__device__ __forceinline__ void leave_sums(uint4 to[8][128], const float x[8][4], int thread) {
#pragma unroll
    for (int i = 0; i < 8; i++)
        *(float4 *)&to[i][thread] = make_float4(x[i][0], x[i][1], x[i][2], x[i][3]);
}
__device__ __forceinline__ void take_sums(float x[8][4], const uint4 from[8][128], int thread) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float4 y = *(const float4 *)&from[i][thread];
        x[i][0] = y.x;
        x[i][1] = y.y;
        x[i][2] = y.z;
        x[i][3] = y.w;
    }
}

/* ---- host ------------------------------------------------------------------------------------ */

#define SLICES_OF_SCAN 4 /* of 16 columns, a warp each, in a block of k_scan and k_scan_bwd */
#define SCAN_THREADS (32 * (SLICES_OF_SCAN + 1))

/* Where a forward's states come from; and what it is for. */
static inline StateArgs start_args(const Call &c) {
    StateArgs a = {};
    a.given = c.t->s0;
    a.merged = at<float>(c, B_SIN);
    return a;
}
static inline StateArgs forward_args(const Call &c) {
    const dpg_plan *p = c.p;
    StateArgs a = start_args(c);
    a.o = c.t->o;
    a.end = c.t->final_state;
    a.goes_on = true;
    if (p->span) a.seq0 = p->span0 + p->span - 1;
    if (p->span && p->span < p->spans) { /* what the next span starts from */
        a.hm = at<float>(c, B_SIN);
        a.row = p->d.V;
    } else if (p->leads) {
        a.hm = at<float>(c, B_HM);
        a.row = p->d.V + p->d.K;
    }
    return a;
}

/* Bytes of shared memory of a block: `rest`, then a ring of as many stages as the device holds. */
static inline int ring_bytes(const dpg_plan *p, StateArgs *a, size_t rest, size_t stage) {
    rest = (rest + STAGES_AT - 1) / STAGES_AT * STAGES_AT;
    a->depth = std::min((int)((p->device.shared - rest) / stage), MOST_STAGES);
    return (int)(rest + a->depth * stage);
}
/* Slices that share a block share the tiles it reads, and need no barriers. Teams finish a chunk
 * sooner, where each has a multiprocessor. With `by_part` the choice may not depend on a rank's own
 * tokens, where heads are exchanged not on its heads. */
static inline bool by_teams(const dpg_plan *p, int nseq) {
    return !p->by_part && dp_segments_by_teams((int64_t)nseq * p->all_heads, p->d.V, p->device.sms);
}
static inline unsigned pass_blocks_of(const dpg_plan *p, int nseq) {
    const int columns = by_teams(p, nseq) ? 16 : 16 * SLICES_OF_SCAN;
    return (unsigned)nseq * p->d.HV * (p->d.V / columns);
}
#endif
