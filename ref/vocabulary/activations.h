/* ref/vocabulary/activations.h - what makes gates and betas of raw ones (math.md c), as tables.
 * Arithmetics, bounds, laws of inputs and lists of words follow from them. A new form is a row, and
 * a row of the first table for a function that is not there.
 *
 * Functions are texts over DP_SIGMOID, DP_DSIGMOID (its slope), DP_SOFTPLUS and the operations
 * below. Each arithmetic defines those: fp32 and fp64 in ref/chunk/gate.c, MPFR in
 * ref/truth/truth_gate.c, double-double in truth_dd_lanes.inc, CUDA in gpu/plan/values.cuh. */
#pragma once

/* Functions F >= 0: id, F(x), F'(x). F' / F of y = F(x), by which kernels multiply y; -1: they do
 * not. Roundings of F and F' in the truth (a sigmoid 6, a slope 10, a softplus 6), and in a kernel.
 * The most of |d log F / dx| and |d log F' / dx|. */
#define DP_CURVES(X)                                                                       \
    X(DP_IDENTITY, x, DP_CONST(1), -1, 0, 0, 0, 0, 0)                                      \
    X(DP_LOGISTIC, DP_SIGMOID(x), DP_DSIGMOID(x), DP_SUB(DP_CONST(1), y), 6, 10, 6, 10, 1) \
    X(DP_SOFT, DP_SOFTPLUS(x), DP_SIGMOID(x), -1, 6, 6, 8, 8, 1)
/* Gates of x = g_raw + dt_bias and a = exp(A_log): id, word, the same as metadata says it, F.
 * Inside, 1: g = lower_bound F(a x), 0: g = -a F(x). Laws of a and of dt_bias, uniform between two
 * numbers. The log gate is g itself; above 0 a step grows. */
#define DP_GATES(X)                                                                             \
    X(DP_GATE_LOG, "log", "log(decay)", DP_IDENTITY, 0, 1, 1, 0, 0)                             \
    X(DP_GATE_SOFTPLUS, "softplus", "-exp(A_log)*softplus(g+dt_bias)", DP_SOFT, 0, 1, 16, -6.9, \
      -2.3)                                                                                     \
    X(DP_GATE_LOWER_BOUND, "lower_bound", "lower_bound*sigmoid(exp(A_log)*(g+dt_bias))",        \
      DP_LOGISTIC, 1, 0.5, 2, -1, 1)
#define DP_RAW_GATE_WORDS "softplus|lower_bound"
#define DP_GATE_WORDS "log|" DP_RAW_GATE_WORDS
/* Betas: id, word, the same as metadata says it, F and its factor, a power of 2. */
#define DP_BETAS(X)                                                \
    X(DP_BETA_PLAIN, "plain", "beta", DP_IDENTITY, 1)              \
    X(DP_BETA_SIGMOID, "sigmoid", "sigmoid(beta)", DP_LOGISTIC, 1) \
    X(DP_BETA_SIGMOID2, "sigmoid2", "2*sigmoid(beta)", DP_LOGISTIC, 2)
#define DP_BETA_WORDS "plain|sigmoid|sigmoid2"
/* A form in a text of help. */
#define DP_FORM(ID, WORD, SAID, ...) WORD ": " SAID "; "

#ifndef DP_OWN_OPERATIONS /* of numbers with operators */
#define DP_ABS(x) ((x) < 0 ? -(x) : (x))
#define DP_NEG(x) (-(x))
#define DP_ADD(a, b) ((a) + (b))
#define DP_SUB(a, b) ((a) - (b))
#define DP_MUL(a, b) ((a) * (b))
#define DP_DIV(a, b) ((a) / (b))
#define DP_CONST(x) (x)
#endif

#define DP_ID(ID, ...) ID,
typedef enum { DP_CURVES(DP_ID) DP_NCURVES } dp_curve;
typedef enum { DP_GATES(DP_ID) DP_NGATES } dp_gate;
typedef enum { DP_BETAS(DP_ID) DP_NBETAS } dp_beta;
#undef DP_ID

/* Is F inside? Programs with kernels alone have no libref.a, and so no dp_gates. */
#define DP_INSIDE(ID, WORD, SAID, CURVE, INSIDE, ...) gate == ID ? INSIDE:
static inline int dp_gate_has_inside(dp_gate gate) { return DP_GATES(DP_INSIDE) 0; }
#undef DP_INSIDE

typedef struct {
    int exact[2], rounded[2]; /* roundings of F and F' */
    double steep;
} dp_curve_info;
typedef struct {
    const char *word, *said;
    dp_curve curve;
    double a_lo, a_hi, bias_lo, bias_hi;
} dp_gate_info;
typedef struct {
    const char *word, *said;
    dp_curve curve;
    double times;
} dp_beta_info;
extern const dp_curve_info dp_curves[DP_NCURVES]; /* problem.c */
extern const dp_gate_info dp_gates[DP_NGATES];
extern const dp_beta_info dp_betas[DP_NBETAS];
