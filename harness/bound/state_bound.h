/* harness/bound/state_bound.h - errors of states that are stored in a short format
 * (ref/vocabulary/stored.h) between calls, chunks or tokens.
 *
 * All norms are Frobenius norms, and nothing is assumed of the errors. A token lengthens an error
 * by at most a = dp_carried_grows. A store adds d = dp_stored_error:
 *
 *     token   off <- a off              store   off <- off + d
 *     rank    off <- the larger one of off and (|M| + off_M) off + off_M |S| + off_H
 *
 * The last row is for exchanges of pairs. off_H and off_M belong to the recurrences from zeros and
 * from the identity, over one rank's tokens. The product of a bounds |M|.
 *
 * The gradient G of the state does not depend on the state. Neither do dU = k G and dE = beta dU.
 * With G as the keys of a token meet it, and off behind the token:
 *
 *     o        |scale q| off              dq     |scale do| off     (of read: off + d)
 *     dbeta    |dU||e| off                dv     0
 *     dk       |G||beta e| off as it is written along, |dE| off as it is read along
 *     dg       largest |G_x| off over channels x, one gate a head: |G| off; G before the decay
 *
 * Where rows are a recurrence's own (ref/vocabulary/recurrence.h), entries have errors like dk, and
 * the strength like dbeta. Products carry them to their factors, exp(+-g) among those: by the
 * largest of the other factors, for a number by the norm of those. Nothing is
 * derived where a factor is the previous token's, or rotated.
 *
 * Activations carry these errors to the raw inputs (math.md c). Sums over tokens and heads add
 * them. All results are linear in S, so no terms of second order are dropped.
 */
#pragma once
#include "error_bound.h"
#include "ref/chunk/gate.h"
#include "ref/vocabulary/recurrence.h"

/* Stores in `format` before the marked tokens and behind the marked sequences. An initial state is
 * stored where its first token is marked. With of_pairs and of_M the H and M of a rank are stored,
 * too. With `read` o and dq of a token read the state as it is stored behind that token. */
typedef struct {
    dp_format format;
    const unsigned char *before, *behind; /* marks: [T], [Nseq] */
    int of_pairs, of_M, read;
} dp_stores;

/* Errors of the gradients of a row's entries. */
typedef struct {
    double write, read, strength;
} dp_row_errors;
/* Are there bounds of gradients? */
int dp_store_has_gradients(const dp_problem *p);

/* Adds the errors of all stores to the bounds b, of p over N ranks and their exchange. backward:
 * gradients, too, where dp_store_has_gradients. */
void dp_store_bounds(const dp_problem *p, int N, dp_sending sending, int n, const dp_stores *at,
                     int backward, dp_error_bound *b);
