/* The additions of CUDA C++ to C++, for kernels that translate.py has made plain functions (cpu.cc
 * runs them). */
#ifndef CPU_CUDA_RUNTIME_H
#define CPU_CUDA_RUNTIME_H
#include "cuda_runtime_api.h"
#include <algorithm>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct uint3 {
    unsigned x, y, z;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
    return {x, y, z, w};
}
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

#define __noinline__ __attribute__((noinline))
#define __align__(n) alignas(n)
#define __restrict__ __restrict
#define __grid_constant__

#include "../machine.h"
namespace cpu {
extern thread_local uint3 thread, block;
extern thread_local dim3 block_size, grid_size;
/* A call with its arguments, for as long as anyone holds it. Not std::function, whose header takes
 * a third of a second in each file. */
class Call {
    struct Any {
        int holders = 1;
        virtual void run() = 0;
        virtual ~Any() {}
    } * any;
    template <class F> struct Of : Any {
        F f;
        Of(const F &x) : f(x) {}
        void run() override { f(); }
    };

  public:
    template <class F> Call(const F &f) : any(new Of<F>(f)) {}
    Call(const Call &x) : any(x.any) { any->holders++; }
    Call &operator=(const Call &) = delete;
    ~Call() {
        if (!--any->holders) delete any;
    }
    void operator()() const { any->run(); }
};
/* A kernel with its arguments. */
struct Work {
    Call run;
    const void *kernel;
};
void launch(dim3 grid, dim3 block, size_t shared, const Work &work);
/* Calls of cudaFuncSetAttribute. */
int attributes_set();
namespace {
/* A kernel, called with its arguments, which it keeps by value, as a launch does. A type of each
 * file's own: two of them may call other arguments by one name. */
template <class... P> struct Kernel {
    void (*f)(P...);
    Work operator()(P... p) const {
        return {Call([f = f, p...] { f(p...); }), (const void *)f};
    }
};
template <class... P> Kernel<P...> kernel(void (*f)(P...)) { return {f}; }
} // namespace
void *shared();
void sync_block();
int sync_block_or(int x);
} // namespace cpu
enum { cudaLaunchAttributeProgrammaticStreamSerialization = 6 };
struct cudaLaunchAttribute {
    int id;
    struct {
        int programmaticStreamSerializationAllowed;
    } val;
};
struct cudaLaunchConfig_t {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
    cudaLaunchAttribute *attrs;
    unsigned numAttrs;
};
#define threadIdx cpu::thread
#define blockIdx cpu::block
#define blockDim cpu::block_size
#define gridDim cpu::grid_size
#define __syncthreads cpu::sync_block
#define __syncthreads_or cpu::sync_block_or
#define __threadfence_system __sync_synchronize
static inline unsigned atomicInc(unsigned *x, unsigned last) {
    unsigned was = *x; /* blocks of a launch come one after the other */
    *x = was >= last ? 0 : was + 1;
    return was;
}
static inline unsigned long long atomicMin(unsigned long long *x, unsigned long long y) {
    const unsigned long long was = *x; /* as above */
    *x = was < y ? was : y;
    return was;
}
static inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t *x, cudaGraph_t g, unsigned) {
    *x = (cudaGraphExec_t)g;
    return cudaSuccess;
}
template <class F> static inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *a, F) {
    a->ptxVersion = 90;
    return cudaSuccess;
}
static inline void __syncwarp() { cpu::warp(cpu::sync_warp, NULL); }
template <class T> static inline T shuffle(T x, int from) {
    cpu::Shuffle s = {(double)x, from};
    cpu::warp(cpu::exchange, &s);
    return (T)s.x;
}
template <class T> static inline T __shfl_xor_sync(unsigned, T x, int mask) {
    return shuffle(x, (int)(cpu::thread.x % 32) ^ mask);
}
template <class T> static inline T __shfl_sync(unsigned, T x, int lane) { return shuffle(x, lane); }
template <class T> static inline T __shfl_up_sync(unsigned, T x, int by) {
    return shuffle(x, (int)(cpu::thread.x % 32) - by);
}
template <class T> static inline T __shfl_down_sync(unsigned, T x, int by) {
    return shuffle(x, (int)(cpu::thread.x % 32) + by);
}
static inline int __any_sync(unsigned, int x) {
    cpu::warp(cpu::vote_any, &x);
    return x;
}
static inline float __uint_as_float(unsigned u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static inline unsigned __float_as_uint(float f) {
    unsigned u;
    memcpy(&u, &f, 4);
    return u;
}
static inline long long __double_as_longlong(double x) {
    long long i;
    memcpy(&i, &x, 8);
    return i;
}
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float rsqrtf(float a) { return (float)(1 / sqrt((double)a)); }
template <class T> static inline T __ldg(const T *p) { return *p; }
static inline float __frcp_rn(float a) { return 1 / a; }
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned which) {
    const unsigned long long both = (unsigned long long)y << 32 | x;
    unsigned z = 0;
    for (int i = 0; i < 4; i++)
        z |= (unsigned)(both >> 8 * (which >> 4 * i & 7) & 0xff) << 8 * i;
    return z;
}
using std::max;
using std::min;
template <class T> static inline cudaError_t cudaMalloc(T **p, size_t n) {
    return cudaMalloc((void **)p, n);
}
template <class... P>
static inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *c, void (*f)(P...), P... p) {
    cpu::launch(c->grid, c->block, c->shared, cpu::kernel(f)(p...));
    return cudaSuccess;
}
#endif
