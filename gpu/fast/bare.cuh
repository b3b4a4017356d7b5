/* gpu/fast/bare.cuh - bare plans: what a chunk hands to the state pass where no one asks for
 * anything but o and final_state. T B is multiplied by V and by what S gives of k in the pass, so
 * that no w and u are made, and nothing is rounded between.
 *
 * A gate a channel: of a tile T B, Aqk, and rows of k and q with their decay are made (k_decayed,
 * chunks.cu); the pass (state_gated.cu) reads them, and the rows of v as they were given:
 *
 *   X = T B (V - Kgam S)    S <- eC o S + kg' X    o = scale qg S + Aqk X
 *
 * One gate a head: its decay multiplies sums, so that products with S need no decayed copies. T B
 * and Aqk are made (k_triangles, chunks_one.cu); the pass (state_bare.cu) reads the rows of k, q
 * and v as they were given:
 *
 *   X = T B (V - of_k o K S)    S <- eC S + K' (to_end o X)    o = of_q o Q S + Aqk X
 *
 * w and u are those of math.md e.2, multiplied by S before they are added up: w S = T B (of_k o K
 * S), u = T B V. Where sequences are cut in segments, or ranks wait for (M, H), pre.cu multiplies
 * by T B, too, and looks, or has spoil.cu look, at what is not finite of v. */
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
    int *odd; /* NULL unless asked for: ODDS words a tile (chunks.cuh) */
};
static inline BareOut bare_out(const Call &c) {
    return BareOut{at<bf16>(c, B_TB), at<bf16>(c, B_AQK), at<BareFactors>(c, B_FACTORS),
                   at<int>(c, B_ODD)};
}
#endif
