/* ref/inputs/inputs.h - (spec, seed) -> exact bits, the same on every machine: integer generator,
 * then only IEEE + - * / sqrt.
 *
 * Nothing here calls libm's log, exp or cos: their last bit differs between library versions. Build
 * with contraction off.
 */
#pragma once
#include "inputs_laws.h"
#include "ref/chunk/conv.h"
#include "ref/vocabulary/formats.h"
#include "ref/vocabulary/problem.h"
#include "rng.h"
DP_C_BEGIN

void dp_rng_seed(dp_rng *r, uint64_t seed,
                 uint64_t stream); /* stream: one per tensor, so that shapes do not shift others */
double dp_rng_normal(dp_rng *r); /* mean 0, variance 1 (12 uniforms of 32 bits: exact arithmetic) */
double dp_rng_exponential(dp_rng *r); /* mean 1; logarithm by our own series */
double dp_exp_exact_bits(
    double x); /* exp within 2 ulp for |x| <= 700, below 2^-1009 = 0; same bits everywhere */
double dp_log_exact_bits(double x); /* log within 3 ulp for normal x > 0; same bits everywhere */

typedef enum {
    DP_KEYS_RANDOM,
    DP_KEYS_CORRELATED,
    DP_KEYS_SUBSPACE,
    DP_KEYS_EXACT,
    DP_KEYS_MOVED
} dp_keys;
typedef struct {
    uint64_t seed;
    dp_format dtype; /* DP_BF16, DP_FP32 or DP_FP64: q k v g beta do x dy are rounded to it.
                        Parameters and states (A_log, dt_bias, s0, dstate, conv w and bias) are fp32
                        as kernels hold them, fp64 when dtype is */
    dp_keys keys;    /* unit rows unless l2norm; correlated: sqrt(K)*common + 0.1*noise, normalised
                        (math.md j.5 corr);    exact: every tensor as ref/inputs/inputs_exact.c says
                        (log    gate, plain beta, no l2norm); only seed and s0_scale > 0 count;
                        moved: q, k and g are those of ref/inputs/inputs_moved.c (KDA, one key a
                        token, K even) */
    double g_scale;  /* DP_GATE_LOG: g = -g_scale * exponential; raw gates: g_raw = g_mean + g_scale
                      * normal */
    double g_mean;
    double g_least;       /* every log gate is this much stronger, below 0 weaker (DP_GATE_LOG) */
    double g_uniform;     /* > 0: g uniform in (-g_uniform, 0] instead (DP_GATE_LOG) */
    double g_head_spread; /* > 0: head h's decay rate is multiplied by spread^h, a different gate
                                per head (raw gates: through A_log) */
    double g_channel_spread; /* decades over which channels' rates are spread (0: none; 6 for
                                'mixed'; DP_GATE_LOG) */
    double beta_lo,
        beta_hi;         /* plain beta uniform in [lo, hi); raw beta: normal * beta_hi + beta_lo;
                            erase and write as plain beta, entry by entry */
    double s0_scale;     /* > 0: initial state normal * s0_scale */
    dp_inputs_laws laws; /* laid over all of it */
} dp_inputs_spec;
/* p's shapes, cu, forms set and arrays allocated. Fills q k v g beta or erase and write (A_log,
 * dt_bias, s0, dout, dstate where allocated).
 * A_log, dt_bias: softplus gate log U(1,16) and U(-6.9,-2.3), as trained layers start; lower-bound
 * gate log U(1/2,2) and U(-1,1). */
void dp_inputs_fill(dp_problem *p, const dp_inputs_spec *s);
/* The same by the law of keys = exact. */
void dp_inputs_fill_exact(dp_problem *p, const dp_inputs_spec *s);
/* Why the rows of p have no such inputs; NULL: they have. */
const char *dp_inputs_exact_refuses(const dp_problem *p);
#define DP_STREAM_MOVED 96 /* stream of its random numbers, beside those of inputs.c */
void dp_inputs_move_state(dp_problem *p, uint64_t seed); /* not rounded */
/* dout and dstate alone, the same bits. */
void dp_inputs_fill_exact_gradients(dp_problem *p, const dp_inputs_spec *s);
int dp_inputs_exact_log2(
    const dp_problem *p, int sequence,
    int hv); /* v and s0 of a sequence and head are small integers times 2^this */
int dp_inputs_exact_log2_do(const dp_problem *p, int sequence,
                            int hv); /* do is +-2^this or 0, dstate half of that */
double dp_inputs_exact_basis(
    int K, int a, int x); /* entry x of basis vector a, one of K that all keys are, up to sign */
void dp_inputs_fill_gradients(dp_problem *p,
                              const dp_inputs_spec *s); /* dout and dstate alone, the same bits */
/* Shapes, cu and arrays set: x normal, w normal / sqrt(W), bias normal / 2, dy normal (where
 * allocated). */
void dp_inputs_fill_conv(dp_conv *c, const dp_inputs_spec *s);
/* dy alone, the same bits. */
void dp_inputs_fill_conv_dy(dp_conv *c, const dp_inputs_spec *s);

/* M-chain factors of math.md j.5: each M_c is the product of 64 token steps, built in double,
 * rounded to fp32.
 * M [n][K][K] exact fp32 values; mu [n] proven upper bound of |M_c|_2 (closed form of math.md j.2
 * plus the rounding of the entries).
 * Factor c depends on (regime, K, seed, c) alone, not on n or the number of threads. */
typedef enum {
    DP_REGIME_SUBSPACE,
    DP_REGIME_REFLECT,
    DP_REGIME_SLOW,
    DP_REGIME_MIXED,
    DP_REGIME_CORR,
    DP_REGIME_MILD,
    DP_REGIME_STRONG,
    DP_NREGIMES
} dp_regime;
extern const char *const dp_regime_names[DP_NREGIMES];
/* Fills M and mu; both are the caller's. */
void dp_inputs_chain(dp_regime regime, int n, int K, uint64_t seed, float *M, double *mu);

DP_C_END
