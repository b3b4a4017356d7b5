/* gpu/fast/whole.cuh - rows of a chunk as the passes without w and u read and write them. The copy
 * engine moves those of a whole chunk, lanes those of a shorter one. */
#ifndef DPG_WHOLE_CUH
#define DPG_WHOLE_CUH
#include "fast/maps.cuh"
#include "fast/state.cuh"
#include <algorithm>
#include <vector>

/* Heads of rows of Dims.seq that a block works on, one after the other. Its rings and loads go on
 * from one to the next. SEVERAL: more than one. */
template <bool SEVERAL> struct HeadsOf {
    const Dims &d;
    int seq0, count, item, step;
    bool begun = false;
    Run run;
    __device__ __forceinline__ HeadsOf(const Dims &d, const StateArgs &a, int blocks)
        : d(d), seq0(a.seq0), count(a.heads), item(blockIdx.x / blocks), step(gridDim.x / blocks),
          run(run_at(item)) {}
    __device__ __forceinline__ int row() const { return seq0 + item / d.HV; }
    __device__ __forceinline__ int hv() const { return item % d.HV; }
    __device__ __forceinline__ bool more() const { return SEVERAL ? item < count : !begun; }
    __device__ __forceinline__ Run run_at(int i) const { return run_of(d.seq[seq0 + i / d.HV]); }
    /* The run of the next head, to be asked for while this one's is worked on. */
    __device__ __forceinline__ Run ahead() const {
        return SEVERAL ? run_at(min(item + step, count - 1)) : run;
    }
    __device__ __forceinline__ void next(const Run &ahead) {
        begun = true;
        item += step;
        run = ahead;
    }
};

/* Blocks of a pass with `each` blocks a head: as many as run at once, or one a head. Shares that
 * are fixed in advance may end later than blocks that start where others end. Such a block waits
 * for its first tiles for the time of some two chunks. */
static inline int share_heads(const dpg_plan *p, int heads, int each) {
    const int HV = p->d.HV, at_once = std::max(1, p->device.sms / each);
    if (heads <= at_once) return heads * each;
    std::vector<int> share(at_once);
    int64_t all = 0;
    int longest = 0;
    for (int x = 0; x < heads; x++) {
        const Seq &s = p->seqs_h[x / HV];
        share[x % at_once] += s.c1 - s.c0;
        all += s.c1 - s.c0 + 2;
        longest = std::max(longest, s.c1 - s.c0);
    }
    const bool even = *std::max_element(share.begin(), share.end()) <= all / at_once + longest;
    return (even ? at_once : heads) * each;
}
/* The plan keeps their number. */
static inline unsigned pass_blocks(dpg_plan *p, StateArgs *a, int each) {
    a->heads = p->nrow * p->d.HV;
    if (!p->pass_blocks) p->pass_blocks = share_heads(p, a->heads, each);
    return (unsigned)p->pass_blocks;
}

/* Does a chunk go by the engine. */
__device__ __forceinline__ bool is_whole(const Chunk &c) { return MAPPED_TILES && c.len == C; }

/* By a producer warp: W columns from x0 on of the rows of a chunk, ROWS. whole: is_whole(c). */
template <int W>
__device__ __forceinline__ void fill_chunk(bf16 *to, const CUtensorMap &map, const bf16 *from,
                                           int heads, int head, int width, int x0, const Chunk &c,
                                           bool whole, uint64_t *full, int lane) {
    if (whole)
        for (int x = 0; x < W; x += 64)
            fill_tile(to + x * C, map, x0 + x, head, c.t0, full, lane);
    else
        for (int part = 0; part < 4; part++)
            fill_rows<W>(to, from + (c.t0 * heads + head) * width + x0, heads * width, c.len, part,
                         lane);
}

#define OUT_BARRIER 2 /* of the warpgroup's 128 threads */

/* How a warpgroup writes its 64 columns of o of a chunk: through shared memory. */
struct OutTile {
    const Dims &d;
    const CUtensorMap &map;
    bf16 *to;
    bf16 *stage; /* [64 tokens][64 columns], ROWS, on a multiple of 1,024 bytes */
    int hv, v0, warp, lane;

    /* o' of the warp's 16 columns. */
    __device__ __forceinline__ void store(float o[8][4], const Chunk &c) {
        if (!d.o_bf16) return store_words(o, c);
        if (warp == 0) drain_wait(lane);
        sync_part(OUT_BARRIER, 128);
        uint32_t at = saddr(stage + rows_at(across_row(lane), warp * 2 + across_p(lane)));
#pragma unroll
        for (int n = 0; n < 4; n++) {
            uint32_t r[4];
            fragment(r, o[2 * n], o[2 * n + 1]);
            stsm4t(at + n * 2048, r);
        }
        drain_fence();
        sync_part(OUT_BARRIER, 128);
        if (is_whole(c)) {
            if (warp == 0) {
                drain_tile(map, v0, hv, c.t0, stage, lane);
                drain_commit(lane);
            }
            return;
        }
        int row = warp * 4 + lane / 8, piece = lane % 8;
        bf16 *x = to + ((c.t0 + row) * d.HV + hv) * d.V + v0 + piece * 8;
        for (; row < c.len; row += 16, x += (int64_t)16 * d.HV * d.V)
            *(uint4 *)x = *(const uint4 *)(stage + rows_at(row, piece));
    }
    __device__ __forceinline__ void store_words(float (*o)[4], const Chunk &c) const {
        Dims words = known<BF16>(d);
        words.o_bf16 = 0;
        store_o<4>(words, to, o, stage, c, 0, hv, v0 + warp * 16, lane);
    }
    /* Before the block ends. */
    __device__ __forceinline__ void end() const {
        if (warp == 0) drain_wait(lane);
    }
};

/* The warpgroup that writes o calls `make` for each chunk c of the block; i is its number there. */
template <bool SEVERAL, class F>
__device__ __forceinline__ void each_out(const Dims &d, const StateArgs &a, int blocks,
                                         OutTile &out, F &&make) {
    Turn turn(a.depth);
    int i = 0;
    for (HeadsOf<SEVERAL> x(d, a, blocks); x.more();) {
        const Run run = x.run, ahead = x.ahead();
        out.hv = x.hv();
        Chunk next = d.chunk[run.c0];
        for (int at = 0; at < run.n; at++, i++, turn.next()) {
            Chunk c = next;
            if (at + 1 < run.n) next = d.chunk[run.c0 + at + 1];
            make(turn, i, c);
        }
        x.next(ahead);
    }
    out.end();
}
#endif
