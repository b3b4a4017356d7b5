/* ref/inputs/rng.h - the generator of inputs, for the host and for kernels (gpu/arrays). */
#pragma once
#include <stdint.h>

#ifdef __CUDACC__
#define DP_BOTH static __host__ __device__ inline
#else
#define DP_BOTH static inline
#endif

typedef struct {
    uint64_t s[4];
} dp_rng; /* xoshiro256**, seeded by splitmix64 */

DP_BOTH uint64_t dp_rng_next(dp_rng *r) {
    uint64_t *s = r->s;
    const uint64_t five = s[1] * 5, out = (five << 7 | five >> 57) * 9, t = s[1] << 17;
    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= t;
    s[3] = s[3] << 45 | s[3] >> 19;
    return out;
}
/* [0, 1), 53 bits */
DP_BOTH double dp_rng_uniform(dp_rng *r) { return (double)(dp_rng_next(r) >> 11) * 0x1p-53; }
