/* `gpu/fast/bare.cuh` - plans that store no w and u, used where only o and final_state are wanted.
 * The header has the data that a chunk passes to the state pass. The pass multiplies T B by V and
 * by S k. So no w and u are made, and nothing is rounded between.
 *
 * A gate a channel: a tile makes T B, Aqk, and rows of k and q with their decay (k_decayed,
 * chunks.cu). The pass (state_bare.cu) reads them, and the rows of v:
 *
 *   X = T B (V - Kgam S)    S <- eC o S + kg' X    o = scale qg S + Aqk X
 *
 * One gate a head: its decay multiplies sums, so that products with S need no decayed copies. The
 * tile makes T B and Aqk (k_triangles, chunks_one.cu). The pass (state_bare.cu) reads the rows of
 * k, q and v:
 *
 *   X = T B (V - of_k o K S)    S <- eC S + K' (to_end o X)    o = of_q o Q S + Aqk X
 *
 * w and u are those of math.md e.2, multiplied by S before they are added. So w S = T B (of_k o K
 * S), and u = T B V. Where sequences are cut in segments, or ranks wait for (M, H), pre.cu
 * multiplies by T B, too. It, or spoil.cu, looks for entries of v that are not finite.
 *
 * A backward has U = (I + L B)^-1 = B^-1 T B in place of T B, as has a forward that saves all.
 * With E = V - Kgam S - L X (math.md f) is X = B E, so
 *
 *   E = U (V - Kgam S)    dE = U' B dX = dV    dB_i = E_i (dX - L' dE)_i
 *
 * Both passes solve a triangle (state_kept.cu), and gradients of a tile none (SOLVED of grad.cu and
 * grad_one.cu). They multiply by E where others do by X. Token i writes into dk what, before its
 * beta, is dB_i once it is multiplied by k_i. */
#ifndef DPG_BARE_CUH
#define DPG_BARE_CUH
#include "plan/paths.cuh"

/* Factors of the rows of a tile, for the states: decay from the chunk's start to a row times 1/norm
 * of its key. From the row to the chunk's end times 1/norm of its key; decay of the whole chunk. */
struct StateFactors {
    float of_k[DP_CHUNK], to_end[DP_CHUNK], chunk[4];
};
/* For o: decay from the chunk's start times 1/norm of the query and scale. */
struct BareFactors {
    StateFactors state;
    float of_q[DP_CHUNK], beta[DP_CHUNK];
};
/* Tiles, ROWS. */
struct BareOut {
    bf16 *TB, *Aqk, *L; /* TB: U, and L, where states are kept */
    BareFactors *factors;
    int *odd; /* NULL unless asked for: ODDS words a tile (chunks.cuh) */
};
static inline BareOut bare_out(const Call &c) {
    return BareOut{at<bf16>(c, B_TB), at<bf16>(c, B_AQK), at<bf16>(c, B_L),
                   at<BareFactors>(c, B_FACTORS), at<int>(c, B_ODD)};
}

#ifdef __CUDACC__
/* Factors of a lane's tokens of 8 N, which are columns of a result's transpose. */
template <int N> struct OfTokens {
    float2 y[N];
    __device__ __forceinline__ OfTokens(const float *f, int lane) {
#pragma unroll
        for (int n = 0; n < N; n++)
            y[n] = *(const float2 *)(f + n * 8 + lane % 4 * 2);
    }
    __device__ __forceinline__ void times(float x[N][4]) const {
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                x[n][e] *= e % 2 ? y[n].y : y[n].x;
    }
};
#endif
#endif
