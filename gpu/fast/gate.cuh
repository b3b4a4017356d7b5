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

/* log2(1 + e) / e on [0, 1], degree 8, relative error 3.1e-8: softplus of slow gates keeps its
 * digits (math.md c, fp32 notes). */
__device__ __forceinline__ float log2_1p_over(float e) {
    float p = 7.579137511e-03f;
    p = fmaf(p, e, -4.268719288e-02f);
    p = fmaf(p, e, 1.130519898e-01f);
    p = fmaf(p, e, -1.972852245e-01f);
    p = fmaf(p, e, 2.757196684e-01f);
    p = fmaf(p, e, -3.584284923e-01f);
    p = fmaf(p, e, 4.806954753e-01f);
    p = fmaf(p, e, -7.213403289e-01f);
    return fmaf(p, e, 1.442694998e+00f);
}
/* log2(1 + 2^y). */
__device__ __forceinline__ float softplus2(float y) {
    float e = ex2(-fabsf(y));
    return fmaf(e, log2_1p_over(e), fmaxf(y, 0.f));
}

/* gate_value of plan/values.cuh with ex2 and gate_floor, in log2 units. a: exp(A_log); bias, lower:
 * the bias, the lower bound times log2(e). */
template <int GATE>
__device__ __forceinline__ float gate_fast(float graw, float a, float bias, float lower) {
    float g, y = fmaf(graw, LOG2E, bias);
    if (GATE == DP_GATE_LOG)
        g = graw * LOG2E;
    else if (GATE == DP_GATE_SOFTPLUS)
        g = -a * softplus2(y);
    else
        g = lower * rcp(1.f + ex2(-a * y));
    return max_or_nan(g, GATE_FLOOR * LOG2E);
}
#endif
