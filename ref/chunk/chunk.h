/* ref/chunk/chunk.h - the chunkwise block-triangular solver for general R, forward and backward
 * (math.md e, f). It uses the project's own products and solves, or LAPACKE and CBLAS (`linear`;
 * ref/arithmetic/linear.h).
 *
 * One dp_chunk is one chunk of one value head: c <= 64 tokens, n = c R rows, row (s, j) = s R + j.
 * Every intermediate is a named row-major array of doubles. Under base fp32 they hold fp32 numbers.
 * Under base bf16 those that FLA stores in bf16 hold bf16 numbers (see dp_base in formats.h).
 * Exponents are pairwise, masked before exp: of any g <= 0 nothing exceeds 1 (math.md e.1). The
 * gate of GDN is expanded to K equal channels; the caller sums dg over them. `erasing` holds the
 * erasing keys where a token erases along other keys than it writes. GDN-2: erase o k, with values
 * write o v and beta = 1. L, Kgam and w are of the erasing keys, Aqk and kg of the keys.
 */
#pragma once
#include "ref/arithmetic/linear.h"
#include "ref/vocabulary/design.h"
#include "ref/vocabulary/formats.h"
#include "ref/vocabulary/problem.h"

/* Its arrays, and how many numbers each has: cK is [c][K].
 *   q .. beta   inputs, activated: copied in by dp_chunk_begin; erasing NULL: k
 *   gcum        inclusive cumsum of g, restarts in every chunk; eC = exp(gcum of the last token)
 *   L           k_s o exp(gcum_s - gcum_i) . k_i, strictly block lower; if keys read one after
 *               another, strictly lower
 *   Aqk         P of math.md, scale and diagonal included
 *   kgam        exp(gcum) o k
 *   h, v_new    S_0, state before the chunk, in the accumulator's format; X = u - w S_0
 *   Akk, AkkB   (I + B L)^(-1); when by_inverse, else NULL until dp_chunk_inverse. That times B,
 *               rounded so; NULL but for design.fold_beta (by_inverse alone)
 *   dh          dS_c, gradient of the state after the chunk
 *   dv_local    Aqk' do
 * dp_chunk_begin makes those up to v_new. */
#define DP_CHUNK_ARRAYS(X) \
    DP_CHUNK_MADE(X) X(Akk, nn) X(AkkB, nn) X(dh, KV) X(dv_local, nV) X(dv_new, nV)
#define DP_CHUNK_MADE(X) \
    DP_CHUNK_INPUTS(X)   \
    X(L, nn)             \
    X(Aqk, cn) X(kgam, nK) X(w, nK) X(u, nV) X(kg, nK) X(qg, cK) X(eC, K) X(h, KV) X(v_new, nV)
#define DP_CHUNK_INPUTS(X) X(q, cK) X(k, nK) X(erasing, nK) X(v, nV) X(beta, n) X(gcum, cK)
#define DP_ID(FIELD, ...) DP_OF_CHUNK_##FIELD,
typedef enum { DP_CHUNK_ARRAYS(DP_ID) DP_NCHUNK_ARRAYS } dp_chunk_array;
#undef DP_ID

typedef struct {
    dp_base base;
    dp_design design; /* the default of base, unless changed after dp_chunk_begin */
    dp_format kept;   /* its factors as stored */
    int c, R, K, V, n;
    int in_turn; /* 1: each key of a token reads those before it */
    double scale;
    const dp_linear *linear; /* NULL: dp_linear_own */
    int by_inverse;          /* 1: w, u, dZ are products with the stored inverse Akk (base bf16); 0:
                                triangular solves */
    union {
        double *array[DP_NCHUNK_ARRAYS];
        struct {
#define DP_FIELD(FIELD, ...) double *FIELD;
            DP_CHUNK_ARRAYS(DP_FIELD)
        };
    };
    float *decay; /* gcum in fp32 [c][K], then exp(gcum_s - gcum_i) [c (c + 1) / 2][K]: kept by
                     whoever needs them first; NULL: formed anew each time */
} dp_chunk;
/* Numbers of such an array. */
int64_t dp_chunk_numbers(const dp_chunk *ch, dp_chunk_array array);

/* Fills all intra fields. Strides are in doubles: q token stride sq, and so on. Rows of k and v of
 * one token are contiguous over j with [R][K] and [R][V]; beta [R]. Kg is 1 for GDN. Allocates;
 * free with dp_chunk_free. */
typedef struct {
    const double *q, *k, *v, *g, *beta;
    const double *erasing; /* NULL: the keys; else as k, stride se */
    int64_t sq, sk, sv, sg, sb, se;
    int Kg;
    int in_turn; /* each key of a token reads those before it */
} dp_chunk_in;
/* Sets the design that later stages compute by. */
void dp_chunk_set_design(dp_chunk *ch, const dp_design *design);
/* The stages, each in the formats of ch->base at the time of the call. *ch needs no initial value.
 *   begin   allocates, copies the inputs, zeroes the other arrays
 *   intra   writes gcum, L, Aqk
 *   solve   writes Akk, if by_inverse
 *   wy      writes eC, kgam, kg, qg, w, u */
void dp_chunk_begin(dp_chunk *ch, dp_base base, int c, int R, int K, int V, double scale,
                    const dp_chunk_in *in);
void dp_chunk_intra(dp_chunk *ch, const dp_chunk_in *in);
void dp_chunk_solve(dp_chunk *ch);
void dp_chunk_keep_inverse(dp_chunk *ch); /* rounds Akk to its stored format; AkkB is of the
                                             unrounded Akk */
void dp_chunk_wy(dp_chunk *ch);
void dp_chunk_free(dp_chunk *ch);
void dp_chunk_inverse(dp_chunk *ch); /* fills Akk when it is NULL: in fp64, over LAPACKE in the
                                        arithmetic of the base */

/* v_new = u - w S0, S <- eC o S0 + kg' v_new. S is S0 on entry and S_c on return. v_new NULL: it is
 * not kept. */
void dp_chunk_state(const dp_chunk *ch, double *S, double *v_new);
/* o [c][V] = scale qg h + Aqk v_new, stored in fp32/fp64 or bf16 by the base. Reads ch->h and
 * ch->v_new. */
void dp_chunk_output(const dp_chunk *ch, double *o);
/* A pair by rows, from the last chunk to the first (design pair=rows), with X = P kg':
 *   H <- H + X u, P <- P eC - X w.
 * P [K][K] is I and H [K][V] 0 behind the last chunk, M and H before the first one. */
void dp_chunk_pair(const dp_chunk *ch, double *P, double *H);
/* M_c = diag(eC) - kg' w  [K][K], in the accumulator format of the base. */
void dp_chunk_M(const dp_chunk *ch, double *M);

/* Aqk' do -> ch->dv_local. */
void dp_chunk_dAv(dp_chunk *ch, const double *dout);
/* dv_new = dv_local + kg dS, dS <- eC o dS + scale qg' do - w' dv_new. dv_new NULL: it is not
 * kept. */
void dp_chunk_state_bwd(const dp_chunk *ch, const double *dout, double *dS, double *dv_new);
/* All input gradients of the chunk from h, v_new, dh, dv_new, in their shapes; dg by the
 * reverse cumulative sum. Without erasing keys derasing is NULL; with them dk is of the writes
 * alone. S_c: state after the chunk [K][V]. */
typedef union {
    double *of[DP_OF_CHUNK_gcum + 1]; /* by the array that it is a gradient of; dg: of gcum */
    struct {
        double *dq, *dk, *derasing, *dv, *dbeta, *dg;
    };
} dp_chunk_grad;
void dp_chunk_grads(const dp_chunk *ch, const double *dout, dp_chunk_grad *g);
void dp_chunk_wy_bwd(const dp_chunk *ch, dp_chunk_grad *g); /* its first stage: dv, dbeta */
/* its second: dq, dk, dg, from dv too */
void dp_chunk_intra_bwd(const dp_chunk *ch, const double *dout, dp_chunk_grad *g);
/* Arrays of zeros in the shapes of the chunk. */
void dp_chunk_grad_alloc(dp_chunk_grad *g, const dp_chunk *ch);
void dp_chunk_grad_free(dp_chunk_grad *g);

/* Does key `row` read what key `other` wrote, both of [n]? */
static inline int dp_chunk_reads(const dp_chunk *ch, int row, int other) {
    return other < (ch->in_turn ? row : row / ch->R * ch->R);
}

/* The first key of token s that reads what key m of token i wrote, i <= s; R: none of them. */
static inline int dp_chunk_reader(const dp_chunk *ch, int s, int i, int m) {
    return i < s ? 0 : ch->in_turn ? m + 1 : ch->R;
}

/* The keys that erase, [n][K]. */
static inline const double *dp_chunk_erasing(const dp_chunk *ch) {
    return ch->erasing ? ch->erasing : ch->k;
}

/* One rounding to the arithmetic format of the base (fp64: none; fp32, bf16: fp32), and to its
 * storage format (bf16: bf16). */
double dp_round_arith(dp_base b, double x);
double dp_round_store(dp_base b, double x);

/* Below it exp of a gate is 0 in the arithmetic of a base: steps far below are raised to it. */
double dp_gate_floor(dp_base b);
