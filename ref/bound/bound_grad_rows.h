/* ref/bound/bound_grad_rows.h - values and errors of the rows of a chunk that the gradients are
 * made of (derived in bound_grads.c). Used by the bounds of the gradients alone. */
#ifndef DP_BOUND_GRAD_ROWS_H
#define DP_BOUND_GRAD_ROWS_H
#include "bound.h"

/* The errors that enter a chunk: of its state, of its state's gradient, of X and of dv_new. */
typedef struct {
    const double *eS, *edS, *DX, *DdX;
} dp_grad_input_error;

/* [n][V] each. X, dZ, E, dE: p-th powers of their errors. X1, dZ1, E1, dE1: parts from shared
 * errors of eS and edS, which count linearly in sums over v. The others: pX, aX, aE, adZ, adE are
 * p-th powers and absolute values, dEv is dE itself. */
typedef struct {
    double *X, *dZ, *E, *dE, *X1, *dZ1, *E1, *dE1, *pX, *aX, *aE, *adZ, *adE, *dEv;
} dp_grad_rows;

/* Fills *g, to be freed with dp_bound_grad_rows_free. */
void dp_bound_grad_rows(const dp_chunk_bound *b, const dp_grad_input_error *in, dp_grad_rows *g);
/* Frees what dp_bound_grad_rows filled. */
void dp_bound_grad_rows_free(dp_grad_rows *g);
#endif
