/* ref/chunk/exchange.h - the states that an exchange makes of the ranks' pairs (M, H), in fp64,
 * counted message by message (math.md g.1, g.3).
 */
#ifndef DP_EXCHANGE_STATES_H
#define DP_EXCHANGE_STATES_H
#include "affine.h"
#include "exchange_price.h"
#ifdef __cplusplus
extern "C" {
#endif

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

#ifdef __cplusplus
}
#endif
#endif
