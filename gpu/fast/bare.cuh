/* gpu/fast/bare.cuh - bare plans: what a chunk hands to the state pass where a head has one gate
 * and no one asks for anything but o and final_state.
 *
 * One decay for all channels multiplies sums, so that products with S need no decayed copies of k
 * and q. Of a tile T B and Aqk are made (chunks_one.cu); the pass (state_bare.cu) reads the rows of
 * k, q and v as they were given:
 *
 *   X = T B (V - of_k o K S)    S <- eC S + K' (to_end o X)    o = of_q o Q S + Aqk X
 *
 * w and u are those of math.md e.2, multiplied by S before they are added up: w S = T B (of_k o K
 * S), u = T B V. */
#ifndef DPG_BARE_CUH
#define DPG_BARE_CUH
#include "plan/paths.cuh"

/* Of the rows of a tile, for the states: decay from the chunk's start to a row times 1/norm of its
 * key; from the row to the chunk's end times 1/norm of its key; decay of the whole chunk. */
struct StateFactors {
    float of_k[DP_CHUNK], to_end[DP_CHUNK], chunk[4];
};
/* For o: decay from the chunk's start times 1/norm of the query and scale. */
struct BareFactors {
    StateFactors state;
    float of_q[DP_CHUNK];
};
/* Tiles, ROWS. */
struct BareOut {
    bf16 *TB, *Aqk;
    BareFactors *factors;
};
static inline BareOut bare_out(const Call &c) {
    return BareOut{at<bf16>(c, B_TB), at<bf16>(c, B_AQK), at<BareFactors>(c, B_FACTORS)};
}
#endif
