/* gpu/dp_conv.h - causal depthwise conv1d over packed sequences (math.md h), forward and backward,
 * one CUDA device per rank, C11-callable.
 *
 *   pre_t = bias + sum_j w_j o x_(t-(W-1)+j), zeros before the sequence;   y = silu(pre) or pre
 *
 * One plan is one rank's share. It holds up to DPG_CONV_PARTS convolutions over the same tokens (q,
 * k and v), which share every message:
 *
 *   forward   the last W-1 rows of x of each part, gathered from all ranks; a halo may span several
 *   backward  the first W-1 rows of the gradient of pre of each, in fp32; then each rank's dw and
 *             dbias, summed in rank order (by_part: each part's, in the order of the parts)
 *
 * A part is what a rank owns, or one of several (dpg_owners).
 *
 * Every dx is one sum in token order, wherever its terms come from: y and dx are the same bits for
 * any number of ranks. Nothing is added by atomics: dw and dbias are the same bits from run to run.
 */
#ifndef DP_CONV_GPU_H
#define DP_CONV_GPU_H
#include "dp_gpu.h"
#ifdef __cplusplus
extern "C" {
#endif

#define DPG_CONV_PARTS 4

/* The whole problem, the same on every rank. cu is host memory, [Nseq+1], sequences may be empty.
 */
typedef struct {
    int64_t T;
    int W, silu, parts, D[DPG_CONV_PARTS], Nseq; /* 2 <= W <= 8 */
    const int64_t *cu;
    dpg_dtype dtype; /* of x y dy dx */
    dpg_owners own;
    dpg_dtype wdtype; /* of w bias dw dbias */
} dpg_conv_problem;

/* One part, device pointers, the rank's own tokens: x y dy dx [L][D], w dw [D][W], bias dbias [D].
 * A NULL bias is 0, a NULL dbias is not written. dw and dbias are the sums over all ranks, on every
 * rank. */
typedef struct {
    const void *x, *dy;
    const void *w, *bias;
    void *y, *dx, *dw, *dbias;
} dpg_conv_tensors;

typedef struct dpg_conv dpg_conv;
/* *c is to be destroyed. DP_EINPUT: the kernels do not take this, e says why. */
dp_status dpg_conv_create(dpg_conv **c, const dpg_conv_problem *p, int rank, int N, dp_err *e);
/* NULL is allowed. */
void dpg_conv_destroy(dpg_conv *c);
/* Tokens of this rank. */
int64_t dpg_conv_tokens(const dpg_conv *c);
/* Bytes of `ws`, which must be aligned to 256 bytes. */
size_t dpg_conv_workspace_bytes(const dpg_conv *c);
/* Enqueue on a stream; no allocation. ws: device memory, 256-byte aligned. The backward reads the
 * halo that the forward left there. comm may be NULL when N == 1. */
dp_status dpg_conv_forward(dpg_conv *c, const dpg_conv_tensors *t, void *ws, dpg_comm *comm,
                           void *stream, dp_err *e);
/* The same backwards, after a forward with this ws. */
dp_status dpg_conv_backward(dpg_conv *c, const dpg_conv_tensors *t, void *ws, dpg_comm *comm,
                            void *stream, dp_err *e);

#ifdef __cplusplus
}
#endif
#endif
