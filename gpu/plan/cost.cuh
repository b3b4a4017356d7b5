/* gpu/plan/cost.cuh - into how many chunks at most the sequences of a batch on one rank are cut, by
 * what it is expected to take: a pure function of their lengths, sizes, what is wanted and the
 * number of multiprocessors. Integers alone: the same answer on every machine.
 *
 * A batch is cut by one number, the chunks that no segment exceeds: a sequence of n has ceil(n /
 * most) segments, alike to a chunk. A pass (state.cu, state_bwd.cu, pre.cu) runs a block for some
 * columns of a segment and head, whole sequences first, each on the first multiprocessor that is
 * free:
 *
 *   pass       launch + max(when the last block ends, one of n chunks taking block + n chunk;
 *              tile x tiles of the pass)
 *   products   launch + step x the most in a row + work x HV x all of them      (segments.cu,
 *              merge.cu: one a segment, but the first and, forward, the last)
 *   states     launch + copy x HV x segments
 *   whole      state; backward: + state (recomputed) + gradients
 *   cut        the same over segments + (M, H) of segments + products + states; backward: +
 *              gradients of segments from zero + products
 *   either     + w and u, unless the plan is bare (fast/bare.cuh)
 *
 * Cut where cut + MARGIN of everything < whole, everything being whole and what a cut does not
 * change. Nothing that is forgotten is counted on: then (M, H) take less (pre.cu).
 *
 * Constants, picoseconds: K = V = 128 on an H200 (132 multiprocessors), fitted to 1,300 runs whose
 * steps `bench_split steps` prints; median error of passes 1 to 4%, of products 6%
 * (reports/device/split.txt). Other widths by the same: a chunk takes (K + 128) / 256 of it, of (M,
 * H) K / 128, bytes (K + V + 32) / 288, products K / 128. On another device what a multiprocessor
 * does takes as long, and bytes are divided among as many as there are. Under save_all the state
 * pass, which then also keeps, counts as one that does not. */
#ifndef DPG_COST_CUH
#define DPG_COST_CUH
#include <algorithm>
#include <queue>
#include <stdint.h>
#include <vector>

struct SplitCase {
    int HV, K, V;
    bool one_gate;           /* a gate a head, else one a channel */
    bool bare;               /* the forward takes fast/bare.cuh, if there are states enough */
    bool backward, save_all; /* follows; finds what the forward made */
    int sms;
};

/* From so many blocks of 64 columns on a bare plan (fast/bare.cuh) is the faster one (132
 * multiprocessors, T 8,192, K = V = 128, ms: one gate a head 0.26 against 0.33 with 48, 0.23
 * against 0.19 with 32; a gate a channel 0.30 against 0.36, 0.26 against 0.21). */
static inline bool fills_bare(int64_t blocks, int sms) { return blocks >= 44 * sms / 132; }

namespace split {
typedef int64_t ps;

const int CARD = 132; /* multiprocessors of the card that was measured */
const int LEAST = 4;  /* chunks of a segment */
/* Percent of everything. At 5 two of 161 batches that were cut took 1.02 of whole sequences on an
 * H100, whose memory is slower for a multiprocessor. */
const int MARGIN = 8;
const ps SURE = 10000000; /* and so much in any case: launches vary */
const int MANY = 64; /* blocks a multiprocessor from which on nothing is looked at: it is full */

struct Pass {
    ps launch, block, chunk, tile;
};
/* Few blocks: 4 warps have 16 columns (teams); many: a warp (scan). */
struct PassBy {
    Pass team, scan;
};
const PassBy STATE = {{7000000, 1700000, 793000, 4700}, {7200000, 8600000, 1335000, 23500}},
             RECOMPUTED = {{10000000, 1100000, 650000, 4700}, {10000000, 7200000, 1022000, 23800}},
             GRADIENTS = {{7000000, 2000000, 920000, 4700}, {10000000, 5100000, 1774000, 34200}},
             FROM_ZERO = {{11200000, 2300000, 846000, 11300}, {10000000, 5800000, 1276000, 20600}};
const Pass BARE = {1000000, 5300000, 1115000, 23500}, /* scan, without w and u */
    SEGMENTS = {1200000, 20100000, 3344000, 0}, SEGMENTS_BARE = {1200000, 20100000, 4000000, 0};

struct Products {
    ps launch, step, work;
};
const Products FORWARD = {5800000, 3800000, 72000}, BACKWARD = {1900000, 3800000, 116000};
const ps STATES = 8800000, COPIED = 67000;
/* Of a tile: chunks (bare plans: no w and u; from bench_bwd forward); backward in all. */
const ps CHUNKS = 45000, CHUNKS_GATED = 37400, CHUNKS_ONE = 37000, CHUNKS_BARE = 19700,
         BACK = 214000, BACK_ONE = 148000;
static inline ps chunks_of(const SplitCase &c, bool bare) {
    if (c.one_gate) return bare ? CHUNKS_BARE : CHUNKS_ONE;
    return bare ? CHUNKS_GATED : CHUNKS;
}

/* What was measured at K = V = 128 on CARD multiprocessors, here. */
static inline ps bytes_here(const SplitCase &c, ps x) {
    return x * (c.K + c.V + 32) / 288 * CARD / c.sms;
}
static inline Pass here(const SplitCase &c, const Pass &p) {
    return {p.launch, p.block, p.chunk * (c.K + 128) / 256, bytes_here(c, p.tile)};
}

/* Segments of a pass, in the order of their blocks. */
typedef std::vector<int> Rows;

/* When the last of the blocks ends, `blocks` a segment, each on the first multiprocessor that is
 * free. */
static inline ps last_end(const SplitCase &c, const Rows &rows, int blocks, const Pass &p) {
    std::priority_queue<ps, std::vector<ps>, std::greater<ps>> busy;
    ps end = 0;
    for (int n : rows)
        for (int i = 0; i < blocks && n; i++) {
            ps from = 0;
            if ((int)busy.size() >= c.sms) {
                from = busy.top();
                busy.pop();
            }
            ps to = from + p.block + n * p.chunk;
            busy.push(to);
            end = std::max(end, to);
        }
    return end;
}
static inline ps pass(const SplitCase &c, const Rows &rows, int blocks, const Pass &p) {
    int64_t chunks = 0;
    for (int n : rows)
        chunks += n;
    return p.launch + std::max(last_end(c, rows, blocks, p), p.tile * chunks * c.HV);
}
static inline bool takes_teams(const SplitCase &c, int64_t rows) { /* fast/state.cuh: by_teams */
    return rows * c.HV * (c.V / 64) < 100 * c.sms / 132;
}
static inline bool takes_bare(const SplitCase &c, int64_t rows) { /* fast/path.cu: is_bare */
    return c.bare && fills_bare(rows * c.HV * (c.V / 64), c.sms);
}
static inline ps pass(const SplitCase &c, const Rows &rows, const PassBy &by) {
    bool team = takes_teams(c, (int64_t)rows.size());
    return pass(c, rows, c.HV * (team ? c.V / 16 : c.V / 64), here(c, team ? by.team : by.scan));
}

/* A batch cut so: segments of passes over all, of (M, H), of gradients from zero. */
struct Batch {
    Rows all, first, later;
    int most = 1, segments = 0, cuts = 0; /* most: segments of a sequence */
};
} // namespace split

/* Segments of a sequence of which none has more than `most` chunks; 0: whole. */
static inline int split_segments(int chunks, int most) {
    return most > 0 ? (chunks + most - 1) / most : 1;
}

namespace split {
static inline Batch batch_of(const std::vector<int> &chunks, int most) {
    Batch b;
    for (int n : chunks)
        if (split_segments(n, most) == 1) b.all.push_back(n);
    for (int n : chunks) {
        int parts = split_segments(n, most);
        if (parts == 1) continue;
        for (int i = 0; i < parts; i++) {
            int part = (int)((int64_t)n * (i + 1) / parts - (int64_t)n * i / parts);
            b.all.push_back(part);
            b.first.push_back(i < parts - 1 ? part : 0);
            b.later.push_back(i ? part : 0);
        }
        b.most = std::max(b.most, parts);
        b.segments += parts;
        b.cuts++;
    }
    return b;
}

static inline ps products(const SplitCase &c, const Products &p, int in_a_row, int64_t all) {
    ps step = p.step * in_a_row, work = p.work * c.HV * all * CARD / c.sms;
    return in_a_row ? p.launch + (step + work) * c.K / 128 : 0;
}

/* What depends on how a batch is cut. */
static inline ps time_of(const SplitCase &c, const Batch &b, int64_t tiles) {
    bool cut = b.segments > 0, bare = takes_bare(c, (int64_t)b.all.size());
    ps t = bare ? pass(c, b.all, c.HV * (c.V / 64), here(c, BARE)) : pass(c, b.all, STATE);
    if (!bare) t += bytes_here(c, chunks_of(c, false) - chunks_of(c, true)) * tiles;
    if (c.backward) t += (c.save_all ? 0 : pass(c, b.all, RECOMPUTED)) + pass(c, b.all, GRADIENTS);
    if (!cut) return t;
    int64_t steps = b.segments - b.cuts;
    Pass elements = bare ? SEGMENTS_BARE : SEGMENTS;
    elements.chunk = elements.chunk * c.K / 128;
    t += pass(c, b.first, c.HV, elements) + products(c, FORWARD, b.most - 2, steps - b.cuts);
    t += STATES + COPIED * c.K * c.V / 16384 * c.HV * b.segments;
    if (c.backward) t += pass(c, b.later, FROM_ZERO) + products(c, BACKWARD, b.most - 1, steps);
    return t;
}

/* What does not. */
static inline ps rest_of(const SplitCase &c, int64_t tiles) {
    ps tile = chunks_of(c, true);
    if (c.backward) tile += c.one_gate ? BACK_ONE : BACK;
    return bytes_here(c, tile) * tiles;
}
} // namespace split

/* The most chunks of a segment; 0: nothing is cut. chunks: of each sequence of the rank. */
static inline int split_piece(const SplitCase &c, const std::vector<int> &chunks) {
    using namespace split;
    int64_t tiles = 0;
    int longest = 0, best = 0;
    for (int n : chunks) {
        tiles += (int64_t)n * c.HV;
        longest = std::max(longest, n);
    }
    if ((int64_t)chunks.size() * c.HV * (c.V / 64) > (int64_t)MANY * c.sms) return 0;
    ps whole = time_of(c, batch_of(chunks, 0), tiles);
    ps margin = std::max(SURE, (whole + rest_of(c, tiles)) * MARGIN / 100), least = whole - margin;
    for (int n : {3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20, 24, 28, 32, 40, 48, 64}) {
        int most = (longest + n - 1) / n;
        if (most < LEAST) break;
        ps t = time_of(c, batch_of(chunks, most), tiles);
        if (t >= least) continue;
        least = t;
        best = most;
    }
    return best;
}
#endif
