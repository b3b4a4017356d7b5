/* gpu/fast/gate.cuh - the gate and its exponentials in the kernels of the fast path.
 *
 * Exponents are in log2 units and anchored (math.md e.1). Every off-diagonal 16 x 16 block has its
 * anchor between its rows, so that both factors of a term are <= 1. Diagonal blocks are anchored at
 * their first row. Terms of a row i and channel more than 2^110 below it are summed pairwise in
 * fp32 (far.cuh). So a term depends on rows up to its own alone, and o of a token has the same bits
 * whatever comes after it. */
#ifndef DPG_FAST_GATE_CUH
#define DPG_FAST_GATE_CUH
#include "fast/tile.cuh"
#include "plan/values.cuh"

/* Rows of a diagonal 16 x 16 block further than this below its first row (a factor 2^110, which
 * bf16 holds) are summed pairwise. */
#define NEAR 110.f
/* gam: from the block's first row. */
__device__ __forceinline__ bool is_far(float gam) { return -gam > NEAR; }
/* Is a row so far below that its own factor is no number of bf16 with all its digits? The factor is
 * 2^gam times an entry of q or k. Its terms are summed pairwise, too, with rows that are not
 * far. */
__device__ __forceinline__ bool is_low(float gam) { return gam < -116.f; }
/* Is the decay of so much no normal number of fp32? */
__device__ __forceinline__ bool is_lost(float gam) { return gam < -126.f; }
#endif
