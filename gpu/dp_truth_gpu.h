/* gpu/dp_truth_gpu.h - the forward state recurrence of the double-double truth
 * (ref/truth/truth_dd.h) on a device, C11-callable, for long sequences.
 *
 * The same operations in the same order as on the CPU: the same bits. All pointers are host memory;
 * every call returns when its results are there. */
#ifndef DP_TRUTH_GPU_H
#define DP_TRUTH_GPU_H
#include "ref/truth/truth_dd.h"
#include "ref/vocabulary/problem.h"
#ifdef __cplusplus
extern "C" {
#endif

#define DPG_TRUTH_MAX 4 /* rows of a token, entries of a token */

typedef struct dpg_truth dpg_truth;
/* Kp, K rounded up to a multiple of 8, one of 8 16 24 32 64 128. */
int dpg_truth_takes(int64_t Kp, int rows, int entries);
/* W state columns of Kp, tokens of as many rows and entries (tr_dd_rows), at most len a call. */
dp_status dpg_truth_open(dpg_truth **t, int64_t Kp, int rows, int entries, int64_t W, int64_t len,
                         dp_err *e);
void dpg_truth_close(dpg_truth *t);
/* Their state, [W][2][Kp]. */
dp_status dpg_truth_set(dpg_truth *t, const double *S, dp_err *e);
dp_status dpg_truth_get(dpg_truth *t, double *S, dp_err *e);
/* b->n tokens on; c as for the CPU, w = W, S not used. */
dp_status dpg_truth_forward(dpg_truth *t, const tr_dd_rows *b, const tr_dd_cols *c, dp_err *e);

#ifdef __cplusplus
}
#endif
#endif
