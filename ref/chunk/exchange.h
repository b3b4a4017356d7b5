/* ref/chunk/exchange.h - what brings every rank the state that enters it: each exchange with its
 * messages, its words and its critical path, and the states that it makes of the ranks' pairs
 * (M, H), in fp64, counted message by message (math.md g.1, g.3).
 *
 *   allgather  every rank gets all pairs (a ring of N - 1 steps) and folds those before it
 *   windows    every rank reads the pairs before it where they lie, all at once
 *   ring       the state is handed from rank to rank, each puts M S + H in its place
 *   scan       Hillis-Steele: pairs are combined over distances 1, 2, 4 .., then one is handed on
 *   serial     no M: a rank runs its own state pass when the state has come
 *   heads      all-to-all before and after: a rank has all tokens of HV / N heads, and no state is
 *              exchanged at all (what Megatron does by default)
 *   grid       ring over the parts of --exact-cp: a rank folds each of its parts of 128 tokens
 *
 * What a pair is sent as:
 *   fp32; bf16; bf16x2 (a sum of two bf16); m-i (M - I in bf16); low-rank (M as the singular values
 *   above a tolerance, fp32); diagonal (GLA, SSD: K numbers)
 */
#ifndef DP_EXCHANGE_H
#define DP_EXCHANGE_H
#include "affine.h"
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
    DP_EXCHANGE_ALLGATHER,
    DP_EXCHANGE_WINDOWS,
    DP_EXCHANGE_RING,
    DP_EXCHANGE_SCAN,
    DP_EXCHANGE_SERIAL,
    DP_EXCHANGE_HEADS,
    DP_EXCHANGE_GRID,
    DP_NEXCHANGES
} dp_exchange;
extern const char *const dp_exchange_names[DP_NEXCHANGES];

typedef enum {
    DP_PAYLOAD_FP32,
    DP_PAYLOAD_BF16,
    DP_PAYLOAD_BF16X2,
    DP_PAYLOAD_LESS_I,
    DP_PAYLOAD_LOW_RANK,
    DP_PAYLOAD_DIAGONAL,
    DP_NPAYLOADS
} dp_payload;
extern const char *const dp_payload_names[DP_NPAYLOADS];
/* Bytes of M [K][K], of which low-rank keeps `rank` singular values, and of H [K][V]. */
int64_t dp_payload_M_bytes(dp_payload p, int K, int rank);
int64_t dp_payload_H_bytes(dp_payload p, int K, int V);

/* ---- what it costs --------------------------------------------------------------------------- */

/* One sequence over N ranks with L tokens each, in one direction; chunks of 64 tokens. */
typedef struct {
    int N, HV, K, V;
    int64_t L;
    dp_payload payload;
    int rank; /* of low-rank */
} dp_exchange_size;

/* Of a link and a card. */
typedef struct {
    double latency_s, bytes_per_s, flops_per_s;
} dp_exchange_machine;

typedef struct {
    int possible;           /* 0: heads with more ranks than heads */
    double messages, bytes; /* of all ranks together */
    double path_s,
        compute_s; /* the longest chain, and what of it is no exchange: pre-scan and pass */
} dp_exchange_price;
dp_exchange_price dp_exchange_price_of(dp_exchange x, const dp_exchange_size *s,
                                       const dp_exchange_machine *m);

/* ---- what it makes --------------------------------------------------------------------------- */

typedef struct {
    int64_t messages, bytes;
} dp_traffic;

/* Of one head: pair[r] of N ranks of one sequence that begins with rank 0 from zeros; S [N][K][V]
 * gets the state that enters each, S[0] = 0. tolerance: of low-rank, relative to 1. bound [N], or
 * NULL: of |S - exact|_F by what low-rank leaves out of each M in the fold of an all-gather
 * (math.md j.6; 0 for others). Of the exchanges that send pairs or states: allgather, windows,
 * ring, scan. *t is added to. */
void dp_exchange_states(dp_exchange x, dp_payload payload, double tolerance, int N,
                        const dp_affine *pair, double *S, double *bound, dp_traffic *t);

/* U [K][r] and W [r][K] with |M - U W|_2 <= tolerance (1 + 2^-40), r as small as the singular
 * values allow; both are to be freed. Returns r. */
int dp_low_rank(const double *M, int K, double tolerance, double **U, double **W);

#ifdef __cplusplus
}
#endif
#endif
