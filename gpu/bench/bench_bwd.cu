/* gpu/bench/bench_bwd.cu - time of the backward and of the convolution: CUDA events, median of many runs after warm-up, random inputs larger than L2.
 *
 *   bench_bwd conv [runs]         the convolutions of q, k and v, forward and backward, against a copy of as many bytes in the same run
 */
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <algorithm>
#include <functional>
#include <vector>
#include "../dp_conv.h"

#define CUDA(x) do { cudaError_t e_ = (x); if (e_ != cudaSuccess) { \
    fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #x, cudaGetErrorString(e_)); exit(2); } } while (0)
#define DP(e, x) do { if ((x) != DP_OK) { fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #x, (e).msg); exit(2); } } while (0)

__global__ void fill(__nv_bfloat16 *x, int64_t n, float scale, uint32_t seed)
{
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        uint32_t h = (uint32_t)i * 2654435761u + seed, sum = 0;
        for (int j = 0; j < 4; j++) {
            h ^= h >> 16, h *= 0x85ebca6bu, h ^= h >> 13, h *= 0xc2b2ae35u;
            sum += h >> 8 & 0xffff;
        }
        x[i] = __float2bfloat16(scale * ((float)sum / 65536.f - 2.f) * 1.73f);
    }
}

static std::vector<void *> memory;
static void *room(size_t bytes)
{
    void *p;
    CUDA(cudaMalloc(&p, bytes));
    memory.push_back(p);
    return p;
}
static void release()
{
    for (void *p : memory)
        cudaFree(p);
    memory.clear();
}
static __nv_bfloat16 *input(int64_t n, float scale, uint32_t seed)
{
    __nv_bfloat16 *p = (__nv_bfloat16 *)room(n * 2);
    fill<<<1024, 256>>>(p, n, scale, seed);
    return p;
}

static double time_of(cudaStream_t s, int runs, const std::function<void()> &f)
{
    std::vector<float> ms(runs);
    cudaEvent_t a, b;
    CUDA(cudaEventCreate(&a));
    CUDA(cudaEventCreate(&b));
    for (int i = -3; i < runs; i++) {
        CUDA(cudaEventRecord(a, s));
        f();
        CUDA(cudaEventRecord(b, s));
        CUDA(cudaEventSynchronize(b));
        if (i >= 0)
            CUDA(cudaEventElapsedTime(&ms[i], a, b));
    }
    CUDA(cudaEventDestroy(a));
    CUDA(cudaEventDestroy(b));
    std::sort(ms.begin(), ms.end());
    return ms[runs / 2];
}

/* Forward: x read, y written; backward: x and dy read, dx written. Both with silu and bias. */
static void conv(int64_t T, int HV, int W, int runs)
{
    int D = HV * 128;
    int64_t cu[2] = {0, T}, n = T * D;
    dpg_conv_problem p = {T, W, 1, 3, {D, D, D}, 1, cu, DPG_BF16};
    dpg_conv_tensors t[3];
    dpg_conv *c;
    dp_err e = {DP_OK, ""};
    cudaStream_t s;
    CUDA(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    DP(e, dpg_conv_create(&c, &p, 0, 1, &e));
    for (int i = 0; i < 3; i++) {
        float *w = (float *)room((size_t)D * (W + 1) * 4);
        CUDA(cudaMemset(w, 0x3e, (size_t)D * (W + 1) * 4));          /* 0.186 everywhere */
        t[i] = {input(n, 1, i), input(n, 1, i + 9), w, w + (size_t)D * W, room(n * 2), room(n * 2), (float *)room((size_t)D * W * 4), (float *)room(D * 4)};
    }
    void *ws = room(dpg_conv_workspace_bytes(c));
    CUDA(cudaDeviceSynchronize());
    double fwd = time_of(s, runs, [&] { DP(e, dpg_conv_forward(c, t, ws, NULL, s, &e)); });
    double bwd = time_of(s, runs, [&] { DP(e, dpg_conv_backward(c, t, ws, NULL, s, &e)); });
    double copy = time_of(s, runs, [&] { for (int i = 0; i < 3; i++) CUDA(cudaMemcpyAsync(t[i].y, t[i].x, n * 2, cudaMemcpyDeviceToDevice, s)); });
    double f = 3.0 * n * 4, b = 3.0 * n * 6, rate = f / copy;
    printf("conv  T=%-7lld D=3x%-5d W=%d bf16 silu bias   forward %7.3f ms %5.2f TB/s (%2.0f%% of a copy)   backward %7.3f ms %5.2f TB/s (%2.0f%%)   copy %5.2f TB/s\n",
           (long long)T, D, W, fwd, f / fwd / 1e9, 100 * f / fwd / rate, bwd, b / bwd / 1e9, 100 * b / bwd / rate, rate / 1e9);
    fflush(stdout);
    dpg_conv_destroy(c);
    cudaStreamDestroy(s);
    release();
}

int main(int argc, char **argv)
{
    const char *mode = argc > 1 ? argv[1] : "conv";
    int runs = argc > 2 ? atoi(argv[2]) : 50;
    cudaDeviceProp prop;
    if (cudaGetDeviceProperties(&prop, 0) != cudaSuccess) {
        fprintf(stderr, "bench_bwd: no CUDA device\n");
        return 2;
    }
    printf("device %s\n", prop.name);
    if (!strcmp(mode, "conv"))
        for (int W : {4, 2, 8}) {
            conv(131072, 8, W, runs);
            conv(8192, 64, W, runs);
        }
    return 0;
}
