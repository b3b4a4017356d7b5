/* ref/chunk/gate.h - gate, beta and L2 norm: values and derivatives (math.md c), in fp64 and
 * in fp32.
 *
 * Every function works on tokens t0 <= t < t1 of p. The activated arrays hold those t1 - t0 tokens
 * only: entry 0 is token t0.
 *
 *   q [.][H][K]   k [.][H][R][K]   g [.][HV][Kg]   beta [.][HV][R]
 *   rstd_q [.][H]   rstd_k [.][H][R]
 *
 *   l2norm   y = x * rstd, rstd = 1/norm (recurrence.h);  without l2norm y = x and rstd = 1.
 *            A user's rows have norms before all else (dp_units)
 *   gate     raw, or of x = raw + dt_bias (ref/vocabulary/activations.h)
 *   rotation x cos - y sin, x sin + y cos; the sum of angles token by token, its cos and sin those
 *            of ref/arithmetic/elementary.h, rounded to the type
 *   halo     tokens of dp_problem.halo have g and beta 0
 *   beta     a form of activations.h; 1 where there is none
 *   erasing  [.][HV][K] erase o k, values [.][HV][V] write o v: a token of such a recurrence is one
 *            of keys k, erasing keys, values and beta = 1 (dp_activate_writes). Where nothing is
 *            erased the erasing keys are zeros and the values v.
 *   rows     dp_by_rows: k, erasing, values and beta of each row (recurrence.h), products in the
 *            order of their factors; of rows that read the state before its decay erasing has
 *            exp(-g) on top (DPLR: k = (lr_b, k), erasing = (-lr_a exp(-g), 0), values = (0, v)).
 *            Where there is an exp(-g) the gate of a token has to be above DP_FACTORS_GATE, so that
 *            it is a number of every base
 * The form softplus(x) = max(x, 0) + log1p(exp(-|x|)), and sigmoid through exp(-|x|), has no
 * overflow and full relative accuracy at both ends (x = -80 and +80 alike). The scale is NOT
 * applied. NaN and Inf propagate.
 *
 * In _f32 the inputs are rounded to fp32 first, then every operation is one IEEE fp32 operation.
 * Exp and log1p are those of ref/arithmetic/elementary.h; sums run in index order; results are
 * widened. Without it everything is fp64.
 */
#pragma once
#include "ref/vocabulary/recurrence.h"
DP_C_BEGIN

/* A problem whose rows' query and keys were divided by their norms (dp_is_normed), and 1/norm of
 * each row; it has no norms itself. Other problems, and arrays without a norm, as they are. */
typedef struct {
    dp_problem p;
    double *rstd[DP_NINPUTS]; /* NULL: no norm */
} dp_units;
/* In fp64 and in fp32 arithmetic, widened; to be freed. */
dp_units dp_units_new(const dp_problem *p);
dp_units dp_units_new_f32(const dp_problem *p);
void dp_units_free(dp_units *u);
/* After the functions below of u->p at tokens t0 .. t1-1: gradients of rows over their norms become
 * those of the rows. */
void dp_units_bwd(const dp_units *u, int64_t t0, int64_t t1, dp_result *out);
void dp_units_bwd_f32(const dp_units *u, int64_t t0, int64_t t1, dp_result *out);

/* F, its slope, and F' / F of y = F(x) (ref/vocabulary/activations.h). */
double dp_curve_at(dp_curve curve, double x);
double dp_curve_slope(dp_curve curve, double x);
double dp_curve_ratio(dp_curve curve, double y);
float dp_curve_at_f32(dp_curve curve, float x);
float dp_curve_slope_f32(dp_curve curve, float x);
float dp_curve_ratio_f32(dp_curve curve, float y);
/* F' / F at x, y = F(x), with the digits that 1 - y lacks where y is near 1; -1: as above. */
double dp_curve_left(dp_curve curve, double x, double y);

/* The slope of beta at a raw one. */
double dp_beta_slope(const dp_problem *p, double raw);

/* In fp64; every array is written. */
void dp_activate(const dp_problem *p, int64_t t0, int64_t t1, double *q, double *k, double *g,
                 double *beta, double *rstd_q, double *rstd_k);
/* The same in fp32 arithmetic, widened. */
void dp_activate_f32(const dp_problem *p, int64_t t0, int64_t t1, double *q, double *k, double *g,
                     double *beta, double *rstd_q, double *rstd_k);

/* Zeros for erasing keys and values of all tokens; NULL where there are none. */
void dp_writes_new(const dp_problem *p, double **erasing, double **values);
/* Where dp_by_gates(p): erasing keys and values of tokens t0 .. t1-1, from their activated keys k;
 * one operation each. Elsewhere: nothing. */
void dp_activate_writes(const dp_problem *p, int64_t t0, int64_t t1, const double *k,
                        double *erasing, double *values);
void dp_activate_writes_f32(const dp_problem *p, int64_t t0, int64_t t1, const double *k,
                            double *erasing, double *values);

/* A factor of row `at` of tokens and heads at channel x (recurrence.h), and the product of an
 * entry's factors but one `of`. */
double dp_factor_at(const dp_problem *p, int of, int64_t at, int x);
double dp_entry_beside(const dp_problem *p, dp_entry e, int of, int64_t at, int x);

/* All tokens of p after dp_activate, in the arrays named above; erasing: NULL where the keys erase,
 * values: NULL where v is written. */
typedef struct {
    double *q, *k, *g, *beta, *rstd_q, *rstd_k, *erasing, *values;
    dp_units units;
} dp_activated;

/* The keys that erase at token t in value head hv, [R][K]: the keys themselves (k, of all tokens)
 * where erasing is NULL. */
static inline const double *dp_erasing_at(const dp_problem *p, const double *k,
                                          const double *erasing, int64_t t, int hv) {
    return erasing ? erasing + (t * p->HV + hv) * dp_rows(p) * p->K
                   : k + (t * p->H + hv / dp_G(p)) * p->R * p->K;
}
/* The values of a token and value head, [R][V]. */
static inline const double *dp_values_at(const dp_problem *p, const double *values, int64_t t,
                                         int hv) {
    return values ? values + (t * p->HV + hv) * dp_rows(p) * p->V
                  : p->v + (t * p->HV + hv) * p->R * p->V;
}

/* Where dp_has_growth. */
#define DP_FACTORS_GATE (-80.0)

/* Allocated and computed in fp64; to be freed. */
dp_activated dp_activated_new(const dp_problem *p);
void dp_activated_free(dp_activated *a);

/* From the gradients of the activated values to the gradients of the raw inputs. The arrays dq and
 * dk are already summed over the value heads of a group; shapes as above. Arguments q, k, rstd_*
 * are those that dp_activate returned; raw gate and beta are read from p. It writes out->dq dk dg
 * dbeta at tokens t0..t1-1 of their full [T] arrays. The sums over these tokens are ADDED to
 * out->dA_log and out->ddt_bias (each may be NULL), so zero them first. Under context parallelism
 * they are partial sums. In _f32 that sum runs over tokens, then channels, in fp32 and is added
 * once. */
void dp_activate_bwd(const dp_problem *p, int64_t t0, int64_t t1, const double *q, const double *k,
                     const double *rstd_q, const double *rstd_k, const double *dq, const double *dk,
                     const double *dg, const double *dbeta, dp_result *out);
void dp_activate_bwd_f32(const dp_problem *p, int64_t t0, int64_t t1, const double *q,
                         const double *k, const double *rstd_q, const double *rstd_k,
                         const double *dq, const double *dk, const double *dg, const double *dbeta,
                         dp_result *out);

/* After dp_activate_bwd of all tokens, where there are angles. dangle [T][HV][P] holds what the
 * rotations of each token say. It becomes the gradient of the angles: the sum over a token and all
 * after it in its sequence. */
void dp_sum_angles(const dp_problem *p, double *dangle);
void dp_sum_angles_f32(const dp_problem *p, double *dangle);

/* The backward of erasing keys and values, before dp_activate_bwd. To dk [.][H][K] it ADDS the part
 * through the erasing keys of its value heads, in their order. It writes out->derase, dwrite and dv
 * at tokens t0 .. t1-1. With dp_by_rows it writes the gradients of all inputs of the rows. To dg
 * [.][HV][Kg] it ADDS the part through exp(g) and exp(-g), to dbeta that of write and read;
 * dp_activate_bwd adds the rest. Where rows look back, dk, derasing, dvalues and dbeta go on behind
 * token t1 - 1: they are those of all tokens. */
void dp_activate_writes_bwd(const dp_problem *p, int64_t t0, int64_t t1, const double *k,
                            const double *derasing, const double *dvalues, double *dk, double *dg,
                            dp_result *out);
void dp_activate_writes_bwd_f32(const dp_problem *p, int64_t t0, int64_t t1, const double *k,
                                const double *derasing, const double *dvalues, double *dk,
                                double *dg, dp_result *out);

/* Decays as fast kernels form them in fp32 (dp_design.fast_decays): 2^(g log2 e) in place of
 * exp(g). The product is rounded, and gates are added up in these units. The instruction itself is
 * off, too: expf and ex2.approx on an H100 by 1.5e-7 at most, 3e-8 to 6e-8 rms
 * (reports/verdicts.md). */
#define DP_LOG2_E 0x1.71547652b82fep0
#define DP_LN_2 0x1.62e42fefa39efp-1
/* The factor 1 +- 2^-23 that multiplies such an exp(g): a function of g as fp32, 1 where g is 0.
 * Its mean is 1 - 0.2 2^-23. An H200's ex2 errs by -0.12 to -0.34 units of the last place in the
 * mean (reports/device/decode.txt). A state that decays token by token sums that up. */
double dp_fast_decay_error(double g);

/* dg/dx and dg/dA_log of every gate, [T][HV][Kg] each, in fp64. */
void dp_gate_slopes(const dp_problem *p, double *dg_dx, double *dg_dA);

/* Number of log decays above 0, with which a state grows. */
int64_t dp_gates_above_0(const dp_problem *p);

/* The largest of a head's gates at one token. */
double dp_largest_gate(const dp_problem *p, const double *g);

/* (dg/dA_log) / (dg/dx) of gate `at` in [T][HV][Kg], without a quotient: softplus(x) / sigmoid(x)
 * stays near 1 where both vanish, x of a lower bound. Not for a log gate, which has neither. */
double dp_gate_ratio(const dp_problem *p, int64_t at);

DP_C_END
