/* gpu/conv/sigmoid.cuh - 1/(1 + e^-p) in fp32 as the convolution computes it. expf is within 1 ulp
 * (CUDA's documentation), sum and reciprocal are rounded to nearest. The relative error is hence at
 * most gamma_4(2^-24) for results above 2^-126. Below, where expf overflows, the result may be 0.
 * Exactly this is in ref/bound/conv_bound.c (DP_CONV_SIGMOID32); test_gpu_conv measures it on every
 * finite float. */
#ifndef DPG_SIGMOID_CUH
#define DPG_SIGMOID_CUH
#include <cuda_runtime.h>

__device__ __forceinline__ float sigmoid_f32(float p) {
    return __frcp_rn(__fadd_rn(1.f, expf(-p)));
}
#endif
