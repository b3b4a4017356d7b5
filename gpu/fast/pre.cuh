/* gpu/fast/pre.cuh - what the kernels that make (M, H) of segments share (pre.cu, pre_own.cu). */
#ifndef DPG_PRE_CUH
#define DPG_PRE_CUH
#include "fast/bare.cuh"
#include "fast/chunks.cuh"
#include "fast/fast.cuh"
#include "fast/state.cuh"

#define LOOK 4

/* Outputs of a plan's chunks:
 *   MADE      w, kg, u
 *   DECAYED   Kgam, kg, T B (no w and u, a gate a channel)
 *   GIVEN     T B and factors of rows (no w and u, one gate a head) */
enum Form { MADE, DECAYED, GIVEN };

struct PreArgs {
    const bf16 *w, *kg, *u; /* DECAYED: Kgam, kg, raw v; `GIVEN`: raw k, NULL, v */
    const bf16 *TB;         /* of a plan without w and u */
    const BareFactors *factors;
    const float *eC, *s0;
    const int *odd;
    int *reach; /* of segments; or NULL */
    /* keep: M alone once more, [segment - m_from][HV][D][D], for the backward; or NULL */
    float *hm, *keep;
    int seq0, m_from; /* the first segment in Dims.seq; segments from m_from on make M, but those
                       * in which a sequence starts */
};
/* pre_own.cu: of segments whose (M, H) no other rank asks for, or in the pass's rounding. */
dp_status fast_pre_own(const Call &c, const PreArgs &a);

#ifdef __CUDACC__
/* Word (r, k) of the warp's 16 rows of P, j-th n-tile, e-th of the thread's words in it. */
template <int K, class F> __device__ __forceinline__ void words(int lane, F f) {
#pragma unroll
    for (int j = 0; j < K / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            f(j, e, lane / 4 + e / 2 * 8, j * 8 + lane % 4 * 2 + e % 2);
}
/* Is anything left of P, in the whole block. */
template <int K> __device__ __forceinline__ bool is_left(const float P[K / 8][4], int lane) {
    uint32_t bits = 0;
    words<K>(lane, [&](int j, int e, int, int) { bits |= __float_as_uint(P[j][e]) << 1; });
    return __syncthreads_or(bits != 0);
}
/* Is something not finite in chunks [c0, c1) of a head, by their first `words` words, or in a
 * state; by the whole block. */
__device__ __forceinline__ bool is_odd(const Dims &d, const int *odd, int words, int c0, int c1,
                                       int hv, const float *state) {
    bool any = false;
    for (int c = c0 + (int)threadIdx.x; c < c1; c += blockDim.x)
        for (int i = 0; i < words; i++)
            any |= odd[((int64_t)c * d.HV + hv) * ODDS + i] != 0;
    for (int i = threadIdx.x; state && i < d.K * d.V; i += blockDim.x)
        any |= state[i] - state[i] != 0.f;
    return __syncthreads_or(any);
}
/* The thread's share of raw rows of v in chunks [c0, c1) of a head: is something not finite. */
template <int V>
__device__ __noinline__ uint32_t odd_in_rows(const Dims &d, const bf16 *v, int c0, int c1, int hv,
                                             int threads) {
    const int PIECES = V / 8, step = threads / PIECES;
    int64_t t = d.chunk[c0].t0 + threadIdx.x / PIECES;
    const int64_t end = d.chunk[c1 - 1].t0 + d.chunk[c1 - 1].len;
    uint32_t odd = 0;
#pragma unroll 8
    for (; t < end; t += step) {
        const uint4 x = *(const uint4 *)(v + (t * d.HV + hv) * V + threadIdx.x % PIECES * 8);
        odd |= odd_halves(x.x) | odd_halves(x.y) | odd_halves(x.z) | odd_halves(x.w);
    }
    return odd;
}
#endif
#endif
