/* ref/vocabulary/segments.h - into how many chunks at most the CUDA kernels cut the sequences of a
 * batch on one rank, by the expected time. It is a pure function of their lengths, sizes, the
 * wanted results and the number of multiprocessors. Integers alone: the same answer on every
 * machine. Guards of others, on lengths: reports/prices.py.
 *
 * A batch is cut by one number, the chunks that no segment exceeds: a sequence of n has ceil(n /
 * most) segments, alike to a chunk. A pass (state.cu, state_bwd.cu, pre_own.cu) runs a block for
 * some columns, or rows, of a segment and head, whole sequences first. Each block runs on the first
 * free multiprocessor:
 *
 *   pass       launch + max(when the last block ends, one of n chunks taking block + n chunk;
 *              tile x tiles of the pass)
 *   products   launch + step x the most in a row + work x HV x all of them      (pre_own.cu,
 *              merge.cu: one a segment, but the first)
 *   whole      state; backward: + state (recomputed) + gradients - what passes that solve save
 *              (fast/state_kept.cu). The forward may then be cut alone
 *   cut        the same over segments + (M, H) of segments + products; backward: + gradients of
 *              segments from zero + products
 *   either     + w and u, unless the plan is bare (fast/bare.cuh)
 *   whole      backward: both passes side by side where there is room
 *   one whole  some chunks are made beside the pass; backward: gradients of the last ones likewise
 *
 * Cut where cut + MARGIN of everything < whole, everything being whole and what a cut does not
 * change. Nothing that is forgotten is counted on: then (M, H) take less.
 *
 * Constants are picoseconds for K = V = 128 on an H200 (132 multiprocessors). They are fitted to
 * 8,600 times of whole plans that `bench_split times` prints (6% rms), then to which number of
 * segments is the fastest (reports/device/split.txt). Other widths scale them.
 * A chunk takes (K + 128) / 256 of it, that of (M, H) K / 128, bytes (K + V + 32) / 288, products
 * K / 128. On another device what a multiprocessor does takes as long, and bytes are divided
 * among as many as there are. Under save_all the state pass, which then also keeps, counts as one
 * that does not. */
#pragma once
#include "linkage.h"
#include <stdint.h>
DP_C_BEGIN

#define DP_SEGMENT_LEAST 4       /* chunks of a segment */
#define DP_SEGMENTS_MARGIN 5     /* percent of everything */
#define DP_SEGMENTS_SURE 2000000 /* ps, and so much in any case: launches vary */

typedef struct {
    int HV, K, V;
    int one_gate;           /* a gate a head, else one a channel */
    int bare;               /* the forward stores no w and u, if there are enough states */
    int backward, save_all; /* follows; finds what the forward made */
    int sms;
} dp_segments_case;

/* 1 if there are enough blocks of 64 columns for a plan without stored w and u (`fast/bare.cuh`) to
 * be the faster one. Measured on 132 multiprocessors, T 8,192, K = V = 128, in ms, without against
 * with stored w and u:
 *   one gate a head      0.26 against 0.33 with 48 blocks, 0.23 against 0.19 with 32
 *   one gate a channel   0.30 against 0.36 with 48 blocks, 0.26 against 0.21 with 32 */
static inline int dp_segments_fill_bare(int64_t blocks, int sms) {
    return blocks >= 44 * sms / 132;
}
/* 1 if a pass over so many segments x heads goes by teams (fast/state.cuh): a block has 16 columns,
 * and a multiprocessor of its own. Else a block has 64. */
static inline int dp_segments_by_teams(int64_t states, int V, int sms) {
    return states * (V / 16) <= sms;
}
/* 1 if a pass without w and u over one whole sequence goes in spans (fast/path.cu). Its blocks, of
 * 64 columns, leave multiprocessors to later chunks; with fewer chunks the launches take what that
 * saves (reports/device/cp-windows.txt). */
static inline int dp_segments_in_spans(int chunks, int64_t blocks, int sms) {
    return chunks >= 192 && 3 * blocks <= 2 * sms;
}

/* The most chunks of a segment; 0: nothing is cut. Then the forward of a recomputing backward may
 * be cut as if it were alone. chunks [n]: of each sequence of the rank. */
int dp_segments_most(const dp_segments_case *c, const int *chunks, int n);
/* Segments of a sequence of which none has more than `most` chunks; 0: whole. */
static inline int dp_segments_of(int chunks, int most) {
    return most > 0 ? (chunks + most - 1) / most : 1;
}

/* Expected picoseconds of a batch cut so, and of what no cut changes. */
typedef struct {
    int64_t cut, rest;
} dp_segments_time;
dp_segments_time dp_segments_time_of(const dp_segments_case *c, const int *chunks, int n, int most);

DP_C_END
