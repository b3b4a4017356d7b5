/* ref/truth/truth_dd_impl.h - what the files of the truth in double-double share (truth_dd.h):
 *   truth_dd_batch.c     heads that are computed at once: allocation;
 *   truth_dd_activate.c  activated rows of a block, and the norms that the radii need;
 *   truth_dd_chain.c     chain rule back to the raw inputs;
 *   truth_dd.c           columns, and the run. */
#ifndef DP_TRUTH_DD_IMPL_H
#define DP_TRUTH_DD_IMPL_H
#include "truth_dd.h"
#include "truth_impl.h"

#define TR_DD_SLACK (1 + 0x1p-30) /* norms of activated rows are taken in double */

/* One value head in one block. dx, dA, db: NULL forward only. */
typedef struct {
    tr_head norms;
    double *d, *dx, *dA, *beta, *db;
    double *sum_dt, *sum_A; /* rows */
    double a[2];            /* exp(A_log) */
} tr_dd_head;

/* One q/k head in one block. */
typedef struct {
    tr_qk norms;
    double *q, *k, *rstd_q, *rstd_k;
} tr_dd_qk;

/* Columns v0 .. v0+w-1 of a value head. */
typedef struct {
    int head, v0, w, is_M; /* head: index in the batch */
    double *S, *ckpt, *tape, *E, *S2,
        *G2; /* S2, G2 [T]: squares of the state after each token and of the adjoint before it */
    void *device; /* holds the state while it is not NULL */
    tr_dd_grads y;
} tr_dd_task;

/* Heads h0 .. h0+n-1 of q and k, with their value heads and tasks. */
typedef struct {
    tr_run *r;
    const tr_dd_lanes *op;
    int h0, n, ncb, ntask, nM;
    int64_t Kp, row, len; /* row = 2 Kp */
    double *bias, *in;    /* [HV][Kp], [Kp] */
    tr_dd_qk *qk;         /* [n] */
    tr_dd_head *head;     /* [n][G] */
    tr_dd_task *task;     /* [n][G][ncb], then the columns of M: [n][G][column blocks of K] */
} tr_dd_batch;

/* Allocates n heads of q and k from h0 on, everything zero; a device's failure goes to the run. */
tr_dd_batch tr_dd_batch_open(tr_run *r, const tr_dd_lanes *op, int h0, int n);
/* Frees them. */
void tr_dd_batch_close(tr_dd_batch *b);

/* Activates a block's tokens for all heads, with their norms; inside a parallel region. */
void tr_dd_activate_block(const tr_dd_batch *b, const tr_block *k);

/* Stores h + l as entry `at`. */
void tr_dd_put(dp_ball *b, int64_t at, double h, double l);
/* Gradients of token `at` of a block by the raw inputs of head i, from the sums of its tasks. */
void tr_dd_chain_token(const tr_dd_batch *b, int i, const tr_block *k, int64_t at);
/* Adds a block's tokens, last to first, to value head i's ddt_bias and dA_log. */
void tr_dd_accumulate_gate(const tr_dd_batch *b, int i, const tr_block *k);
/* Stores ddt_bias and dA_log of all heads. */
void tr_dd_store_gate_sums(const tr_dd_batch *b);
/* Allocates and fills the norms of the states and adjoints of value head i. */
void tr_dd_measured_norms(const tr_dd_batch *b, int i);
#endif
