/* gpu/plan/window.cuh - a rank's window: device memory into which kernels of other ranks store
 * the states that it starts from (exchange/window.cu). */
#ifndef DPG_WINDOW_CUH
#define DPG_WINDOW_CUH
#include <cuda_runtime.h>
#include <stdint.h>

/* States of SLOTS forwards, so that a rank may be ahead of those who read what it stores. */
#define SLOTS 3

/* Layout of a window, in words of 4 bytes:
 *   states [SLOTS][HV][K][V] that the rank starts from, then [HV][V/32]: one number for each block
 *     of 32 columns, the last forward whose words have come;
 *   if the backward wants the M of later ranks, by sender [N]: M [SLOTS][HV][K][K], then
 * [HV][K/32]; by receiver [N]: the last forward whose words it is through with;
 *   of this rank alone: forwards whose states have come, and blocks that know of the next. */
struct RankWindow {
    float *mine;      /* NULL: none, the communicator gathers */
    float **peer;     /* [N] all windows, as this device reaches them */
    int64_t state, m; /* words of the states and of M; m = 0: no M is sent */
    int HV, K, V, N, rank;
    int later, earlier; /* ranks that follow; M goes to ranks rank - earlier .. rank - 1 */

    /* Words rounded up to a float4. */
    __host__ __device__ int64_t round4(int64_t words) const { return (words + 3) / 4 * 4; }
    __host__ __device__ int64_t states() const { return SLOTS * state + round4(HV * V / 32); }
    __host__ __device__ int64_t ms() const { return m ? SLOTS * m + round4(HV * K / 32) : 0; }
    __host__ __device__ int64_t words() const { return states() + N * ms() + N + 2; }
    /* In forward n. */
    __host__ __device__ float *s(float *window, uint32_t n) const {
        return window + n % SLOTS * state;
    }
    __host__ __device__ uint32_t *s_came(float *window) const {
        return (uint32_t *)(window + SLOTS * state);
    }
    __host__ __device__ float *ms(float *window, int sender, uint32_t n) const {
        return window + states() + sender * ms() + n % SLOTS * m;
    }
    __host__ __device__ uint32_t *m_came(float *window, int sender) const {
        return (uint32_t *)(window + states() + sender * ms() + SLOTS * m);
    }
    __host__ __device__ uint32_t *used(float *window, int receiver) const {
        return (uint32_t *)(window + states() + N * ms()) + receiver;
    }
    __host__ __device__ uint32_t *number() const { return used(mine, N); }
#ifdef __CUDACC__
    /* Forwards whose states had come when the kernel began. */
    __device__ __forceinline__ uint32_t ended() const {
        return *(const volatile uint32_t *)number();
    }
    /* By one thread of every block of a kernel, behind its ended(): one more, once all know. */
    __device__ __forceinline__ void end(uint32_t n) const {
        if (atomicInc(number() + 1, gridDim.x - 1) == gridDim.x - 1)
            *(volatile uint32_t *)number() = n;
    }
#endif
};

#ifdef __CUDACC__
/* Returns once *number is n or more, or the communicator ends, which is asked rarely because the
 * word lies behind the bus. */
__device__ inline void await(const uint32_t *number, uint32_t n, const volatile int *stop) {
    for (int i = 1; (int32_t)(*(const volatile uint32_t *)number - n) < 0; i++)
        if (i % 1024 == 0 && *stop) return;
}
#endif
#endif
