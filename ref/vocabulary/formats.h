/* ref/vocabulary/formats.h - number formats, each bit-exact in its rounding.
 *
 *   fp64    binary64                                                              u = 2^-53
 *   fp32    binary32, round to nearest even                                       u = 2^-24
 *   tf32    8-bit exponent, 10-bit stored fraction;
 *           cvt.rna: round to nearest, ties AWAY from zero                        u = 2^-11
 *   tf32rz  the same, truncated toward zero (what mma does to raw fp32 operands)  2u = 2^-10
 *   tf32x3  a = hi + lo, hi = tf32(a), lo = tf32(a - hi);
 *           products hi*hi + hi*lo + lo*hi                                        see math.md j.1
 *   bf16    8-bit exponent, 7-bit stored fraction, round to nearest even          u = 2^-8
 *   bf16st  the same as a storage format between steps (operands fp32)
 * States alone (stored.h) are kept in fp16 with stochastic rounding (fp16sr), and in e4m3, e5m2 and
 * int8 with an fp32 scale. A tensor, a head, a row, or a block of 32 columns of a row has one scale
 * (e4m3-row: a row). The exponent range of tf32 and bf16 is that of fp32, subnormals included. NaN
 * stays NaN, Inf stays Inf, zeros keep their sign. A rounding that overflows gives Inf (nearest) or
 * the largest finite number (tf32rz).
 */
#pragma once
#include "linkage.h"
#include <stdint.h>
DP_C_BEGIN

typedef enum {
    DP_FP64,
    DP_FP32,
    DP_TF32X3,
    DP_TF32,
    DP_TF32RZ,
    DP_BF16,
    DP_BF16ST,
    DP_NFORMATS,
    /* of operands and storage; no chain of M */
    DP_FP16 = DP_NFORMATS,
    /* of states (stored.h) */
    DP_FP16SR,
    DP_E4M3_TENSOR,
    DP_E4M3_HEAD,
    DP_E4M3_ROW,
    DP_E4M3_BLOCK,
    DP_E5M2_TENSOR,
    DP_E5M2_HEAD,
    DP_E5M2_ROW,
    DP_E5M2_BLOCK,
    DP_INT8_TENSOR,
    DP_INT8_HEAD,
    DP_INT8_ROW,
    DP_INT8_BLOCK,
    DP_NSTORED
} dp_format;

/* The names of the rows below, in their order, for case files and help texts. */
#define DP_FORMAT_WORDS "fp64|fp32|tf32x3|tf32|tf32rz|bf16|bf16st"
/* Words of the formats of states, from DP_FP16SR on. */
#define DP_STATE_WORDS                                                       \
    "fp16sr|e4m3-tensor|e4m3-head|e4m3-row|e4m3-block|e5m2-tensor|e5m2-head" \
    "|e5m2-row|e5m2-block|int8-tensor|int8-head|int8-row|int8-block"

/* A row holds all that the rest of the program knows of a format of the M chain; how it rounds is
 * in ref/arithmetic/mm.c. */
typedef struct {
    const char *name, *words; /* in a sentence: "behaves like truncated tf32" */
    /* Error constants of a product (math.md j.1): operands are rounded with u_op, K terms are
     * accumulated with u_acc, the result is stored with u_store. */
    double u_op, u_acc, u_store;
    /* Effective bits that a chain of products shows (harness/verdict/bits.h). 3xTF32 drops lo*lo:
     * two factors of rms 0.425 2^-11 give an error of rms 0.425 2^-23.2 in each product. For the
     * accumulate model at K = 16 that is 2^-24.7 (its A is twice that of products). For wider keys
     * it is less: 0.2 to 0.3 bits below fp32. Truncation to u = 2^-11: errors up to 2 u, of one
     * sign. */
    double bits;
    int truncates; /* 1: operands toward zero, errors of one sign */
    int two_parts; /* 1: operands in two parts, three products */
    int device;    /* 1: the CUDA kernels have it */
    int step;      /* 1: a search for the coarsest format takes it between two others */
    int bytes;     /* of a number that a chain stores */
    double rate;   /* flops a second of an H200, dense */
} dp_format_info;
extern const dp_format_info dp_formats[DP_NSTORED];
int dp_format_find(const char *name);        /* of a chain of M; -1: unknown */
int dp_format_find_stored(const char *name); /* of these or fp16; -1: unknown */

/* Base policies: what every stage except the M chain uses.
 *   fp64, fp32   operands, accumulators and stores all in that format
 *   bf16         operands and stores as FLA keeps them (math.md f, last paragraph): w u kg qg Aqk
 *                Akk h v_new bf16; cumsum, diagonal blocks, states, HM and gradient accumulators
 *                fp32 */
typedef enum { DP_BASE_FP64, DP_BASE_FP32, DP_BASE_BF16, DP_NBASES } dp_base;
#define DP_BASE_WORDS "fp64|fp32|bf16" /* their names, in their order */
extern const char *const dp_base_names[DP_NBASES];

float dp_fp32(double x); /* one rounding, to nearest even */
float dp_tf32(float x);  /* to nearest, ties away: cvt.rna.tf32.f32 */
/* Truncated toward zero. */
float dp_tf32rz(float x);
/* To nearest even. */
float dp_bf16(float x);
double dp_bf16d(double x); /* fp64 -> bf16 in ONE rounding (no double rounding) */
/* The 16 bits of dp_bf16(x). */
uint16_t dp_bf16_bits(float x);
/* The number that 16 bits of bf16 stand for, exactly. */
float dp_bf16_from_bits(uint16_t b);
/* The same of fp16. */
float dp_fp16_from_bits(uint16_t b);
uint16_t dp_fp16_bits(double x); /* one rounding, to nearest even */

/* eta of |fl(A B) - A B| <= eta |A||B| for inner length K, and gamma_n(u) = n u / (1 - n u), both
 * evaluated upward. */
double dp_eta(dp_format f, int K);
double dp_gamma(int n, double u);

DP_C_END
