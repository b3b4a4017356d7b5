/* ref/inputs.h - (spec, seed) -> exact bits, the same on every machine: integer generator, then only IEEE + - * / sqrt.
 *
 * Nothing here calls libm's log, exp or cos: their last bit differs between library versions.
 */
#ifndef DP_INPUTS_H
#define DP_INPUTS_H
#include "problem.h"
#include "formats.h"
#ifdef __cplusplus
extern "C" {
#endif

typedef struct { uint64_t s[4]; } dp_rng;                        /* xoshiro256**, seeded by splitmix64 */
void dp_rng_seed(dp_rng *r, uint64_t seed, uint64_t stream);     /* stream: one per tensor, so that shapes do not shift others */
double dp_rng_uniform(dp_rng *r);                                /* [0, 1), 53 bits */
double dp_rng_normal(dp_rng *r);                                 /* mean 0, variance 1 (sum of uniforms: exact arithmetic) */
double dp_rng_exponential(dp_rng *r);                            /* mean 1; logarithm by our own series */

typedef enum { DP_KEYS_RANDOM, DP_KEYS_CORRELATED, DP_KEYS_SUBSPACE } dp_keys;
typedef struct {
    uint64_t seed;
    dp_format dtype;             /* DP_BF16 or DP_FP32 (or DP_FP64): every tensor is rounded to it */
    dp_keys keys;                /* unit rows unless l2norm; correlated: sqrt(K)*common + 0.1*noise, normalised (math.md j.5 corr) */
    double g_scale;              /* DP_GATE_LOG: g = -g_scale * exponential; raw gates: g_raw = g_mean + g_scale * normal */
    double g_mean;
    double g_uniform;            /* > 0: g uniform in (-g_uniform, 0) instead (DP_GATE_LOG) */
    double g_head_spread;        /* head h's decay rate is multiplied by spread^h: a different gate per head */
    double g_channel_spread;     /* decades over which channels' rates are spread (0: none; 6 for 'mixed') */
    double beta_lo, beta_hi;     /* plain beta uniform in [lo, hi); raw beta: normal * beta_hi + beta_lo */
    double s0_scale;             /* > 0: initial state normal * s0_scale */
} dp_inputs_spec;
/* p's shapes, cu, forms set and arrays allocated. Fills q k v g beta (A_log, dt_bias, s0, dout, dstate where allocated). */
void dp_inputs_fill(dp_problem *p, const dp_inputs_spec *s);

/* M-chain factors of math.md j.5: each M_c is the product of 64 token steps, built in double, rounded to fp32.
 * M [n][K][K] exact fp32 values; mu [n] proven upper bound of |M_c|_2 (closed form of math.md j.2 plus the rounding of the entries). */
typedef enum { DP_REGIME_SUBSPACE, DP_REGIME_REFLECT, DP_REGIME_SLOW, DP_REGIME_MIXED, DP_REGIME_CORR, DP_REGIME_MILD, DP_REGIME_STRONG,
               DP_NREGIMES } dp_regime;
extern const char *const dp_regime_names[DP_NREGIMES];
void dp_inputs_chain(dp_regime regime, int n, int K, uint64_t seed, float *M, double *mu);

#ifdef __cplusplus
}
#endif
#endif
