/* gpu/fast/gate.cuh - the gate and its exponentials in the kernels of the fast path.
 *
 * Exponents are in log2 units and anchored (math.md e.1): every off-diagonal 16 x 16 block has its
 * anchor between its rows, so that both factors of a term are <= 1. Diagonal blocks are anchored at
 * their first row; terms of a row i and channel that lies more than 2^110 below it are summed
 * pairwise in fp32 (far.cuh). So a term depends on rows up to its own alone, and o of a token has
 * the same bits whatever comes after it. */
#ifndef DPG_FAST_GATE_CUH
#define DPG_FAST_GATE_CUH
#include "fast/tile.cuh"
#include "plan/values.cuh"

/* Rows of a diagonal 16 x 16 block further than this below its first row (a factor 2^110, which
 * bf16 holds) are summed pairwise. */
#define NEAR 110.f
/* gam: from the block's first row. */
__device__ __forceinline__ bool is_far(float gam) { return -gam > NEAR; }

/* log(1 + e) / e on [0, 1], degree 8, relative error 3.1e-8: softplus of slow gates keeps its
 * digits (math.md c, fp32 notes). */
__device__ __forceinline__ float log1p_over(float e) {
    float p = 5.253457797e-03f;
    p = fmaf(p, e, -2.958850739e-02f);
    p = fmaf(p, e, 7.836166802e-02f);
    p = fmaf(p, e, -1.367476971e-01f);
    p = fmaf(p, e, 1.911143108e-01f);
    p = fmaf(p, e, -2.484436989e-01f);
    p = fmaf(p, e, 3.331927134e-01f);
    p = fmaf(p, e, -4.999950152e-01f);
    return fmaf(p, e, 9.999999705e-01f);
}

/* gate_value of plan/values.cuh with ex2 and gate_floor, in log2 units. a, lower: exp(A_log), the
 * lower bound, times log2(e). */
template <int GATE>
__device__ __forceinline__ float gate_fast(float graw, float a, float bias, float lower) {
    float g, x = graw + bias;
    if (GATE == DP_GATE_LOG) {
        g = graw * LOG2E;
    } else if (GATE == DP_GATE_SOFTPLUS) {
        float e = ex2(-fabsf(x) * LOG2E);
        g = -a * fmaf(e, log1p_over(e), fmaxf(x, 0.f));
    } else {
        g = lower * rcp(1.f + ex2(-a * x));
    }
    return g < GATE_FLOOR * LOG2E ? GATE_FLOOR * LOG2E : g;
}
#endif
