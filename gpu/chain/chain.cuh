/* gpu/chain/chain.cuh - steps of chain/ that its files share. */
#ifndef DPG_CHAIN_CUH
#define DPG_CHAIN_CUH
#include "plan/plan.cuh"

/* B_HMALL to B_SIN where M is a dense chain, whole sequences. */
dp_status merge_elements(const Call &c);
/* factors.cu: M of two elements in rows of `row` words, later by earlier, to M of a third. */
dp_status chain_product(const Call &c, dp_format f, const float *later, const float *earlier,
                        float *to, int row);

#ifdef __CUDACC__
__device__ __forceinline__ void add4(float c[4], const float x[4]) {
    for (int i = 0; i < 4; i++)
        c[i] += x[i];
}

/* Is all that a block has seen finite, so that zero times it is zero. */
struct Finite {
    float zero = 0.f;
    __device__ __forceinline__ void see(float x) { zero = fmaf(x, 0.f, zero); }
    __device__ __forceinline__ bool by_block() const { return !__syncthreads_or(zero != 0.f); }
};
#endif
#endif
