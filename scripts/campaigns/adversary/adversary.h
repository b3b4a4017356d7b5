/* adversary.h - kernels and faults written apart from deltaproof, to measure its verdicts.
 *
 * Nothing here comes from ref/ or harness/ but the interface, deltaproof_subject.h; the formulas
 * are those of ref/math.md, sections b to f. The files, in the order of the data:
 *
 *   format.c     short number formats, emulated by rounding fp32 numbers
 *   design.c     the designs: what is rounded where, in which order sums are made
 *   product.c    matrix products of rounded operands in those orders
 *   fault.c      the faults: knobs that the arithmetic reads, and changes of finished tensors
 *   activate.c   gate, beta, L2 norm, and their gradients
 *   state.c      how a state is kept from token to token
 *   recurrent.c  one head token by token;   pairs.c, inverse.c, chunk.c   one head in chunks
 *   reference.c  the same problem in fp64, token by token, for the self-check and for faults in
 *                units of the error
 *   kernels.c    the functions of the plug-in
 *   check.c      self-check: the reference against the complex step, designs against the reference
 *
 * Environment of the plug-in: ADVERSARY_DESIGN=NAME[,key=value..],
 * ADVERSARY_FAULT=NAME[.TENSOR]:SIZE, ADVERSARY_SEED=N (noise and places).
 * ADVERSARY_EXPECTED=o=4e-3,dq=..: the unit of sizes in expected errors, relative to their tensors
 * (else the design's own). ADVERSARY_DECLARED=0: the library does not declare its design.
 */
#pragma once
#include "deltaproof_subject.h"
#include <stddef.h>

typedef deltaproof_subject_problem problem;
enum { MAX_K = 1024 };

/* ---- format.c: every function takes and gives fp32 numbers; NaN and Inf stay what they are ----
 */

/* Format tf32 has 10 stored bits, nearest with ties away; tf32rz truncates. Format bf16 has 7
 * stored bits, nearest even. Format fp16 rounds to nearest even, keeps subnormals, and overflows to
 * Inf. */
typedef enum { FP32, TF32, TF32RZ, BF16, FP16, FORMATS } format;
extern const char *const format_names[FORMATS];
int format_find(const char *name); /* -1: unknown */
float round_to(format f, float x);
float truncate_to(format f, float x);                   /* toward zero */
float stochastic_to(format f, float x, double uniform); /* up with the probability of the rest */
float ulp_of(format f, float x);                        /* distance to the next number outward */
double unit_roundoff(format f);
void round_all(format f, float *x, int64_t n);

/* Random numbers that depend on their arguments alone. */
double uniform01(uint64_t seed, uint64_t counter);
double gaussian(uint64_t seed, uint64_t counter);

/* ---- design.c ---- */

/* MERGED: blocks of 16 by substitution, the rest from products of them, operands in the
 * format of factors (bf16 where that is fp32) */
typedef enum { SUBSTITUTION, EXPLICIT, NEUMANN, DOUBLING, MERGED, INVERSES } inverse_kind;
typedef enum { IN_ORDER, REVERSED, PAIRWISE, ORDERS } sum_order;

typedef struct {
    const char *name;
    const char *base; /* what it claims: "fp32" or "bf16" */
    int chunk;        /* tokens of a chunk; 0: token by token */
    format factors;   /* operands w u kg qg, the inverse and the scores of pairs */
    format values;    /* operands S X do V E and their gradients, and q, k after their norm */
    int stored;       /* 1: they are kept in these formats; 0: rounded as operands alone */
    format scores;    /* operands of sums over pairs of tokens; fp32: decays pair by pair, else
                             q exp(g_s - a) and k exp(a - g_i) with an anchor a */
    format decays;    /* what q and k are multiplied with for their decay */
    int scored; /* kg is the rounded k exp(g_1 - g), g_1 the chunk's first, once more decayed */
    inverse_kind inverse; /* of I + B L; substitution: never formed */
    int folded;           /* w, u of the inverse times B, rounded so, not of B k and B v */
    format inputs;        /* q and k as they come in, whatever is made of them */
    sum_order sums;
    format state;    /* the state is rounded to it .. */
    int state_every; /* .. every that many tokens (in chunks: after every chunk) */
    int stochastic;  /* .. at random */
    int both_states; /* .. and so is its gradient */
    format output;   /* tensors of tokens, where the inputs are bf16; fp32 elsewhere */
    int fast;        /* gates are rounded and added up in log2 units, powers are of 2 */
} design;

extern const design designs[];
extern const int ndesign;
/* NAME[,key=value..]; 0, or -1 with the reason in why. */
int design_parse(const char *text, design *d, char why[256]);
/* The design in the words of deltaproof_subject_design: "recurrent", "chunk=16,scores=gated"; "" is
 * the default of its base. 0: there are no words for it. */
int design_declares(const design *d, char *text, size_t size);
/* A log gate in the design's units, and the power of it that multiplies a state. A fast design
 * takes powers of 2, off by up to 2^-23 and alike for equal gates; of 0 it is 1. */
float units_of(const design *d, float g);
float power_of(const design *d, float g);
/* The same, as an operand is multiplied with it. */
float decay_by(const design *d, float g);
/* Largest unit roundoff of what it rounds. */
double design_roundoff(const design *d);

/* ---- product.c ---- */

/* Element (i, j) of a matrix is x[i * row + j * col], rounded to f before it is used. */
typedef struct {
    const float *x;
    int64_t row, col;
    format f;
} operand;

/* c [m][n] = a [m][k] b [k][n], accumulated in fp32. */
void product(sum_order order, int m, int n, int k, operand a, operand b, float *c);
float sum_of(sum_order order, int64_t n, const float *x);
static inline operand by_rows(const float *x, int64_t width, format f) {
    return (operand){x, width, 1, f};
}
static inline operand transposed(const float *x, int64_t width, format f) {
    return (operand){x, 1, width, f};
}

/* ---- fault.c ---- */

/* Parameters of the arithmetic; the neutral values stand in fault.c. A share mixes the right value
 * (0) with the wrong one (1). */
typedef struct {
    float beta_gain, gate_gain, bias_gain, scale_gain, s0_gain, dstate_gain;
    float carry_gain, dcarry_gain; /* state, its gradient: at one boundary in the middle */
    float boundary_gain;           /* rowsum(dS o S) at the end of a chunk, in dg */
    float tail_gain;               /* beta of the last token of a ragged sequence */
    float last_head_gain;          /* of the last value head of a group, in dq and dk */
    float l2_eps;
    float naive_softplus;   /* share: log(1 + exp x) */
    float neighbour_gate;   /* share: the gate of the token before */
    float rounded_gate;     /* share: log gate in bf16 */
    float rounded_decay;    /* share: exp(gate) in bf16 */
    float rounded_A_log;    /* share: in bf16 */
    float rounded_cumsum;   /* share: running sum of gates in bf16 */
    float rounded_state;    /* share: state in bf16 after every chunk of 64 */
    float rounded_E;        /* share: dbeta from a residual in bf16 */
    float rounded_y;        /* share: gradient of the norm from its result in bf16 */
    float state_boundary;   /* share: rowsum(dS o S) from the states, not from terms of dk */
    float end_decay;        /* share: decay to the chunk's end taken from the token before it */
    float decayed_first;    /* share: u - w S reads the state decayed to the chunk's end */
    float rounded_dq;       /* share: dg from dq and dk in bf16 */
    float undecayed;        /* share: the residual reads the state before its decay */
    float swapped_heads;    /* share: q and k of head hv % H instead of hv / (HV / H) */
    float leak;             /* share of the state of the sequence before that enters */
    float micro_steps;      /* share: the keys of a token see each other */
    float plain_dv;         /* share: dv without beta */
    float plain_dbeta;      /* share: raw dbeta without the derivative of the sigmoid */
    float cut_series;       /* share: the last factor of the Neumann product is missing */
    float transposed_state; /* share: the state that enters is read [V][K] (where V = K) */
} knobs;

/* Tensors that a call may write, in the order of deltaproof_subject.h. */
enum {
    T_O,
    T_FINAL,
    T_DQ,
    T_DK,
    T_DV,
    T_DG,
    T_DBETA,
    T_DA,
    T_DBIAS,
    T_DS0,
    T_DERASE,
    T_DWRITE,
    T_DLR_A,
    T_DLR_B,
    TENSORS
};
extern const char *const tensor_names[TENSORS];

/* One tensor of a call, before it is written: rows of tokens and heads, of sequences and heads
 * (states), or of heads (parameters). */
typedef struct {
    int which;
    int64_t rows, width;
    int heads; /* rows are [tokens or sequences][heads] */
    enum { OF_TOKENS, OF_STATES, OF_HEADS } kind;
    float *x; /* [rows][width], fp32 */
} tensor;

typedef struct {
    int row;    /* in the table of fault.c; -1: none */
    int tensor; /* T_..; -1: it acts in the arithmetic, not on a finished tensor */
    double size;
    uint64_t seed;
    double unit[TENSORS]; /* ADVERSARY_EXPECTED; 0: not set */
} fault;

/* From the environment. 0, or -1 with the reason in why. */
int fault_from_environment(fault *f, char why[256]);
extern knobs knob; /* of the present call: neutral, but for what a fault changes */
static inline float share(float s, float right, float wrong) {
    return s == 0 ? right : right + s * (wrong - right);
}
void knobs_set(const fault *f);
/* The fault scales errors by fp64 values of its tensor, or has no unit to be a multiple of. */
int fault_needs_reference(const fault *f);
/* Does the sum over tokens that makes dA_log or ddt_bias leave out token t? */
int fault_skips_token(const fault *f, int which, int64_t T, int64_t t);
/* Changes a tensor in fp32, as a kernel's accumulators hold it. A bias is counted in units of
 * `ulps`. The fp64 values are ref, or NULL. Prints the place of a fault, if it has one, to
 * stderr. */
void fault_before_rounding(const fault *f, const problem *p, format ulps, const double *ref,
                           tensor *t);
/* Rounds a tensor to its format. */
void fault_round(const fault *f, format to, format ulps, tensor *t);

/* Text tables for `run` in this folder: a line a design or fault, fields with tabs between. The
 * declaration is "-" if there are no words for it; "state": the design rounds that. */
const char *adversary_says(const char *text);
const char *adversary_designs(void);
const char *adversary_faults(void);

/* ---- one head of one sequence, activated, in fp32 ----
 *
 * All recurrences are one. Each of a token's R keys reads the state along e. Along k it adds the
 * rest of v, times beta:
 *     E = v - e S;   S <- S + k' beta E.
 *   GDN, KDA, MKDA    e = k
 *   Gated DeltaProduct  the same, each key a token of its own: only a token's first key has its
 *                     gate, only its last its q and do
 *   GDN-2             e = erase o k, v = write o v, beta = 1
 *   GLA, SSD          e = 0, beta = 1
 *   DPLR              two keys: lr_b reads along e = -lr_a, the state before its decay, and has
 *                     v = 0; k has e = 0; beta = 1 */
typedef struct {
    int64_t T;
    int64_t first, rank_tokens; /* of the whole problem: its first token, tokens of a rank */
    int K, V, R, one_gate, backward;
    int turns;     /* tokens here for one of the problem: R where its keys read one after another */
    int undecayed; /* e reads the state before its decay */
    float scale;
    float *q, *k, *v, *g, *beta; /* [T][K] [T][R][K] [T][R][V] [T][K] [T][R] */
    float *e;                    /* [T][R][K] */
    float *s0, *dout, *dstate;   /* [K][V] [T][V] [K][V] */
} head_in;

typedef struct {
    float *o, *state;                       /* [T][V] [K][V] */
    float *dq, *dk, *dv, *dg, *dbeta, *ds0; /* as their inputs; one_gate: dg in channel 0 */
    float *de;                              /* [T][R][K]; dk is that of what is written alone */
} head_out;

/* By how much of its decay e is undone: the share of the fault, or all. */
static inline float undecayed_of(const head_in *in) { return in->undecayed ? 1 : knob.undecayed; }

void recurrent_head(const design *d, const head_in *in, head_out *out);
void chunk_head(const design *d, const head_in *in, head_out *out);

/* ---- state.c ---- */

/* Seed of stochastic rounding, before every head: it depends on seed, place and entry alone. */
void state_begin(uint64_t seed);
typedef struct {
    int rounds;    /* the design rounds the state here */
    int end;       /* a chunk ends here */
    int64_t place; /* its number, another one for every state and gradient of a head */
} keeping;
void keep_state(const design *d, keeping at, float *S, int64_t n);
void keep_gradient(const design *d, keeping at, float *dS, int64_t n);
/* Token before which the state is damaged by carry_gain; -1: the sequence has no boundary. */
int64_t carry_token(const design *d, int64_t T);

/* ---- pairs.c, inverse.c ---- */

/* Sums over the pairs (reader, writer) of a chunk: m readers [m][K] (q of c tokens, then n keys)
 * and n writers; gam [c][K]. A pair counts if the writer's token is before the reader's, or is the
 * reader's own and the reader is a q. */
typedef struct {
    const design *d;
    int c, R, K, m, n;
    const float *gam;
    const float *readers, *writers;
    float *decay; /* exp(gam_s - gam_i), i <= s: [c (c + 1) / 2][K] */
} pair_set;

void pair_decays(pair_set *p);
void pair_scores(const pair_set *p, float *score); /* [m][n], zeros where not allowed */
/* dreaders [m][K] and dwriters [n][K] of sum coef o score, without the pairs of one token. */
void pair_gradients(const pair_set *p, const float *coef, float *dreaders, float *dwriters);

/* inv [n][n] of I + N, N strictly lower. */
void inverse_of(const design *d, int n, const float *N, float *inv);
/* In the present call: the ratio of the powers of a NEUMANN series to the inverse that they cancel
 * to. Their rounding errors grow by the same ratio. 0: none was made. */
extern float powers_grown;
/* x [n][m] <- (I + N)^(-1) x, or of its transpose. */
void substitute(int n, int m, const float *N, int transpose, float *x);

/* ---- activate.c ---- */

void activate_head(const design *d, const problem *p, int seq, int hv, head_in *in);
/* Gradients of raw gate, raw beta and parameters' terms, from those of the activated ones. */
typedef struct {
    float *dg, *dbeta; /* [T][HV][Kg], [T][HV][R] of the whole problem */
    float *dA;         /* [T][HV]: what each token adds to dA_log */
} raw_gradients;
/* Gradients of a head's keys (before their norm) and values, and of the tensors in the place of
 * beta. */
typedef struct {
    float *dk, *dv;                         /* [T][R][K] [T][R][V] of the head */
    float *derase, *dwrite, *dlr_a, *dlr_b; /* [T][HV][K or V] of the whole problem */
} key_gradients;
void keys_back(const problem *p, int seq, int hv, const head_in *in, const head_out *out,
               key_gradients *to);
/* Rows [T][width] of x that belong to a token's last key, for keys that read one after another. */
void last_keys(const head_in *in, int64_t T, int width, float *x);
void activate_back(const problem *p, int seq, int hv, const head_in *in, const head_out *out,
                   raw_gradients *raw);
/* dx [n] of the raw vector from dy of its norm, in place. */
void norm_back(const design *d, const double *x, int n, float *dy);

/* ---- reference.c ---- */

/* All outputs in fp64, in arrays as deltaproof_subject.h has them, zeros before. */
typedef struct {
    double *x[TENSORS];
} reference;
void reference_run(const problem *p, reference *r);

/* n zeros; without memory they end the process with a message. */
float *floats(int64_t n);
double *doubles_of(int64_t n);
