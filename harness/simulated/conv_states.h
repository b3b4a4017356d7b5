/* harness/simulated/conv_states.h - the convolutions before q, k and v in the calls of a session.
 * Beside the recurrence's state a call gets and returns the last W-1 inputs of every sequence,
 * zeros before its first. Nothing is computed for them: they must have the bits of the inputs,
 * whatever bounds allow.
 */
#ifndef DP_CONV_STATES_H
#define DP_CONV_STATES_H
#include "fault.h"
#include "ref/chunk/conv.h"

/* [Nseq][W-1][D], oldest first, of each convolution; NULL: there is none. */
typedef struct {
    double *of[DP_NQKV];
} dp_conv_states;
void dp_conv_states_free(dp_conv_states *s);

/* The convolutions of one call: shapes, weights and biases, and what they begin from. */
typedef struct {
    const dp_conv *conv[DP_NQKV]; /* NULL: none there */
    const dp_conv_states *before;
} dp_conv_front;

/* The convolutions of a session, and what its calls made of them. */
typedef struct {
    const dp_conv *conv[DP_NQKV]; /* with the x of all tokens; NULL: none there */
    double *y[DP_NQKV];           /* [T][D] of accepted tokens */
    /* States after the first call that handed wrong ones on, or after the last one. */
    dp_conv_states got, want;
    int64_t wrong, call; /* calls that did; the first of them, 0 on */
} dp_conv_calls;
/* Frees what calls made. */
void dp_conv_calls_free(dp_conv_calls *c);
/* Room for y; states before the first token. */
void dp_conv_calls_begin(dp_conv_calls *c, dp_conv_states *first);

/* Numbers of a state: of one sequence, of all. */
int64_t dp_conv_state_size(const dp_conv *c);
/* The states that a call gets instead of `before`; 1: they differ. at: as above. */
int dp_conv_states_spoil(const dp_conv_calls *c, dp_fault fault, const int64_t *at,
                         dp_conv_states *before);
/* States after a call whose sequences have tokens up to at[i]. */
void dp_conv_states_look(dp_conv_calls *c, const int64_t *at, int64_t call,
                         const dp_conv_states *after);

/* Convolution i of a call: x [T][D] of its packed sequences (cu [Nseq+1]) after the states before.
 * It makes y [T][D] and the states after, to be freed. On one rank of the simulated pipeline. */
void dp_conv_states_run(const dp_conv *shape, dp_base policy, const double *x, const int64_t *cu,
                        const double *before, double **y, double **after);
#endif
