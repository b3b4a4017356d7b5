/* What CUDA C++ adds to C++, for kernels that translate.py has turned into plain functions (cpu.cc runs them). */
#ifndef CPU_CUDA_RUNTIME_H
#define CPU_CUDA_RUNTIME_H
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <algorithm>
#include <functional>
#include "cuda_runtime_api.h"

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct uint3 { unsigned x, y, z; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

namespace cpu {
extern thread_local uint3 thread, block;
extern thread_local dim3 block_size, grid_size;
void launch(dim3 grid, dim3 block, size_t shared, const std::function<void()> &kernel);
void *shared();
void sync_block();
float shuffle_xor(float x, int mask);
double shuffle_xor(double x, int mask);
float tf32_rna(float x);
void mma_tf32(float c[4], const float a[4], const float b[2]);
void mma_bf16(float c[4], const uint32_t a[4], const uint32_t b[2]);
}
#define threadIdx cpu::thread
#define blockIdx cpu::block
#define blockDim cpu::block_size
#define gridDim cpu::grid_size
#define __syncthreads cpu::sync_block
#define __threadfence_system __sync_synchronize
#define __shfl_xor_sync(members, x, mask) cpu::shuffle_xor(x, mask)
#define cudaFuncSetAttribute(...) cudaSuccess
static inline float __uint_as_float(unsigned u) { float f; memcpy(&f, &u, 4); return f; }
static inline unsigned __float_as_uint(float f) { unsigned u; memcpy(&u, &f, 4); return u; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __frcp_rn(float a) { return 1 / a; }
using std::max;
using std::min;
template <class T> static inline cudaError_t cudaMalloc(T **p, size_t n) { return cudaMalloc((void **)p, n); }
#endif
