/* harness/bound/error_bound_impl.h - what the files of the error bounds share (error_bound.h):
 *   error_bound.c   the arrays of a bound, activated inputs, chunks, errors of H and dH; gradients,
 *                   through the activations; then the chain of M, state passes, outputs, states:
 *                   all of one chain format;
 *   state_bound.c   states that ranks hand to each other, or that are stored in a short format. */
#pragma once
#include "error_bound.h"
#include "ref/vocabulary/recurrence.h"

#include <math.h>
#include <stdlib.h>

/* e, an error of the state S that enters a chunk, through that chunk; backward of its gradient from
 * behind. S NULL: the reference's own. DX: gets the errors of its X (dX), NULL: not wanted. */
void dp_error_bound_step(const dp_error_bound_base *w, int back, int g, int hv, const double *S,
                         double *e, double *DX);
/* The error of H, backward of dH, to be freed; NULL of a rank that sends none. */
double *dp_error_bound_H(const dp_error_bound_base *w, int back, int r, int hv);
/* The i-th chunk of a local sub-sequence in the order of a pass. */
int dp_error_bound_turn(const dp_sim *s, int back, int r, int sub, int i);

/* The slope of beta at a raw one, and its error in units of u, as kernels compute it. */
typedef struct {
    double slope, error;
} dp_slope;
dp_slope dp_error_bound_beta(const dp_problem *p, double raw);

/* Row bounds of gradients where those of activated inputs are exact, but for strengths. Allocates
 * and fills *out. It reads b, in and Dphi of w. */
void dp_error_bound_activations(const dp_error_bound_base *w, dp_error_bound *out);

/* Errors of the sums of angles, [T][HV][P]: each angle on entry, then their sum. */
double *dp_error_bound_angles(const dp_problem *p, dp_base base, const dp_rounding *r);
/* The error that a row's rotation adds, relative to its 2-norm, from the angles of token t and head
 * hv. With dphi NULL or t < 0 there is none. */
double dp_turned_norm(const dp_problem *p, const double *dphi, int64_t t, int hv, double u);
/* Error of M after a chain. Truncation adds a worst case to a probable bound: bias is divided by
 * lambda, since everything is multiplied by it at the end. */
typedef struct {
    double *b, bias, fro;
} dp_chain_error;
/* Which chain: groups [g0, g1) of a head, in a format; trans: over the transposed factors, last to
 * first, as the adjoint chain runs. */
typedef struct {
    int g0, g1, hv, trans;
    dp_format format;
} dp_chain_span;
/* Error of the chain's product; traj (NULL: not wanted): Frobenius bounds after 1, 2, 4 ...
 * factors. */
dp_chain_error dp_chain_error_of(const dp_error_bound_base *w, dp_chain_span span, double *traj);
/* Errors of S_in of every rank (dir = +1) or dS_out (dir = -1) by the exchange of w. Returns
 * [N*HV] state errors, NULL where no state arrives, to be freed.
 *   chain   format of products of M
 *   fro     [N*HV], gets their Frobenius bounds; NULL: not wanted */
double **dp_exchange_errors(const dp_error_bound_base *w, int dir, dp_format chain,
                            const dp_chain_error *bM, double **eH, double *fro);
