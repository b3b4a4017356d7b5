/* ref/chunk/conv.h - causal depthwise conv1d over packed sequences, and its split over ranks
 * (math.md h).
 *
 *   x, y, dy [T][D]   w [D][W]   bias [D] or NULL
 *   pre_t = bias + sum_j w_j o x_(t-(W-1)+j), zeros before the sequence
 *   y = silu(pre) or pre
 */
#pragma once
#include "ref/vocabulary/formats.h"
#include "ref/vocabulary/own.h"
#include "ref/vocabulary/problem.h"
DP_C_BEGIN

typedef enum { DP_CONV_X, DP_CONV_WEIGHT, DP_CONV_BIAS, DP_CONV_DY, DP_CONV_NINPUTS } dp_conv_input;
typedef enum { DP_CONV_Y, DP_CONV_DX, DP_CONV_DW, DP_CONV_DBIAS, DP_CONV_NRESULTS } dp_conv_output;
typedef struct {
    int64_t T;
    int D, W, Nseq, silu;
    int64_t *cu;
    union { /* NULL: the convolution has none; dy NULL: forward only */
        double *in[DP_CONV_NINPUTS];
        struct {
            double *x, *w, *bias, *dy;
        };
    };
    dp_owners own; /* as of a problem */
} dp_conv;
/* Shapes of x, x, w, bias. dx, dw: NULL without dy; dbias: NULL without dy or bias. Below, the
 * caller allocates every result. */
typedef union {
    double *out[DP_CONV_NRESULTS];
    struct {
        double *y, *dx, *dw, *dbias;
    };
} dp_conv_result;

/* The rows of the table of tensors (ref/vocabulary/tensors.h) for them. */
extern const dp_tensor_field dp_conv_input_fields[DP_CONV_NINPUTS];
extern const dp_tensor_field dp_conv_result_fields[DP_CONV_NRESULTS];
/* Lengths of its axes T, Nseq, D and W; all others are 0. */
dp_dims dp_conv_dims(const dp_conv *c);
/* Entries of row f of the tables of inputs and results, on L tokens. */
int64_t dp_conv_count(const dp_conv *c, const dp_tensor_field *f, int64_t L);
/* Is it there: gradients with dy, that of the bias with a bias? Rows (tokens, channels) and
 * entries in one. */
int dp_conv_result_exists(const dp_conv *c, int result);
void dp_conv_result_shape(const dp_conv *c, int result, int64_t *rows, int *width);

/* Rank `rank` of N: its tokens, parts one behind the other. It owns x and dy, which
 * dp_conv_part_free frees, and borrows the rest. */
dp_conv dp_conv_part(const dp_conv *c, int N, int rank);
void dp_conv_part_free(dp_conv *part);
/* Its rows of a result of one row a token, to their places in that of all. */
void dp_conv_place(const dp_conv *c, int N, int rank, const double *own, double *all);

void dp_conv_free(dp_conv *c); /* frees every array; c is the caller's */
void dp_conv_result_alloc(dp_conv_result *r, const dp_conv *c); /* NaN-filled */
void dp_conv_result_free(dp_conv_result *r);

void dp_conv_run(const dp_conv *c, dp_conv_result *r); /* fp64, unsplit */
/* Over N simulated ranks. The halo of m = min(W-1, pre_num_conv_tokens) tokens comes from as many
 * ranks as it spans. Only m rows of gradient flow back; dw and dbias are summed over ranks. Any
 * local length, also L < W-1. DP_EINPUT if T % N. With another ownership (own.h): N parts. Every
 * product and sum is rounded to the format, fp64 or fp32, operands first; bf16 is fp32 arithmetic
 * that stores y and dx in bf16. Results are the same bits for any number of threads. Every array of
 * *r that exists is written. */
dp_status dp_conv_ranks(const dp_conv *c, int N, dp_base pol, dp_conv_result *r, dp_err *e);
/* The rank of peers alone, with the same bits. `part` has its tokens (T of them) and the cu of all,
 * *r room for its tokens. Messages carry the halo, its gradient and the sums. */
dp_status dp_conv_rank(const dp_conv *part, const dp_peers *peers, dp_base pol, dp_conv_result *r,
                       dp_err *e);
/* MPFR truth at prec >= 2 bits, rounded to double, with an error radius per entry (includes that
 * last rounding; inf: nothing proven). */
void dp_conv_truth(const dp_conv *c, int prec, dp_conv_result *r, dp_conv_result *radius);
/* Rigorous bound of |computed - exact| per entry for a policy without overflow, N dividing T. It
 * holds for any order of summation, with or without FMA (derivation in conv_bound.c). It is inf
 * where an input is not finite or lies beyond the format's range. */
void dp_conv_bound(const dp_conv *c, dp_base pol, int N, dp_conv_result *bound);
/* The same for a sigmoid whose every operation is one of fp32 (exp within 1 ulp), as CUDA kernels
 * compute it; pol fp32 or bf16. */
void dp_conv_bound_sigmoid32(const dp_conv *c, dp_base pol, int N, dp_conv_result *bound);
/* dw [D][W] of a convolution as rows of a tap and head: [W][D]. To be freed. */
double *dp_conv_by_tap(const dp_conv *c, const double *dw);

DP_C_END
