/* harness/simulated/calls.h - runs the calls of a session (harness/case/session.h) through any
 * function that computes one call.
 *
 * Each call is a problem of its own: the next tokens of every sequence packed, with the initial
 * states that earlier calls left. A sequence that has ended is an empty one, whose state stays. A
 * verify window contributes o of its accepted tokens and the state after the last of them. If a
 * call returns the state after every token, the state is taken from these. Otherwise the accepted
 * tokens are run again from the state before the window. Results of rejected tokens, and states
 * within a call, are kept apart (dp_drafts).
 *
 * Rejected tokens are other tokens of the problem with their values negated. Their numbers obey the
 * law of the inputs. Their key or value differs from the accepted token's, unless all tokens have
 * one key and zeros for values.
 *
 * Before the end of a shared prefix only the first sequence brings tokens. Then all others copy its
 * state and its rows of o.
 *
 * If the states lie in a pool (dp_state_pool), each call gets the slots. A sequence without tokens
 * is then padding and brings one meaningless token. A caller without pools gets the states of the
 * slots to read. The states that it returns go to the slots to write.
 *
 * If rows look back or rotate, each call gets the token before it (dp_problem.before).
 *
 * With convolutions before q, k and v each call also gets the last inputs of every sequence from
 * earlier calls (dp_conv_states). The results of a window are kept with the outputs of the
 * convolutions as inputs.
 *
 * The faults of calls (fault.h) act here. A fault reports the heads at which it changed the inputs
 * or results of a call.
 */
#pragma once
#include "fault.h"
#include "harness/case/session.h"
#include "ranks.h"
#include "ref/chunk/conv.h"
#include "ref/vocabulary/problem.h"
#include "ref/vocabulary/tensors.h"

/* Results of the verify windows of a session for all their tokens, rejected ones too. They are
 * problems of their own: each window of each slot is a packed sequence that begins from the state
 * which that call got. So o of rejected tokens and states within a call have a truth, though
 * nothing that follows depends on them.
 *
 *   window   the drafted tokens of a window; o, and the state after the last of them
 *   within   for each token of a window (the last one where another state than the final one is
 *            shown behind it): the tokens up to it; the state after it. Only of subjects that show
 *            the state after every token
 */

/* Where a sequence of such a problem comes from. */
typedef struct {
    int slot;               /* the sequence of the session's problem */
    int64_t call;           /* 0 on */
    int64_t from;           /* the session's token that its first one is */
    int64_t tokens, passed; /* of the sequence; those of the window that are accepted */
} dp_draft_place;

typedef struct {
    dp_problem p; /* Nseq 0: nothing was taken */
    dp_result out;
    dp_draft_place *place; /* [Nseq] */
} dp_draft_set;

typedef struct {
    dp_draft_set window, within;
    int windows; /* of the session; those beyond what is affordable are left out of both */
} dp_drafts;

/* The convolutions before q, k and v in the calls of a session.
 * Beside the recurrence's state a call gets and returns the last W-1 inputs of every sequence,
 * zeros before its first. Nothing is computed for them: they must have the bits of the inputs,
 * whatever bounds allow.
 */

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

/* Numbers of a state: of one sequence, of all. */
int64_t dp_conv_state_size(const dp_conv *c);

/* Convolution i of a call: x [T][D] of its packed sequences (cu [Nseq+1]) after the states before.
 * It makes y [T][D] and the states after, to be freed. On one rank of the simulated pipeline. */
void dp_conv_states_run(const dp_conv *shape, dp_base policy, const double *x, const int64_t *cu,
                        const double *before, double **y, double **after);

/* The pool of slots in which a server keeps the states of a session (key session_slots). The walk
 * plans the slots that each sequence reads and writes in a
 * call, and checks that all others keep their bits.
 *
 * Slots are numbered from 0. Sequence i begins in the i-th slot from the end, so that no index of
 * the batch is its index in the pool. A call reads the slot that a sequence owns. It writes the
 * same slot or, in every second call of the sequence and in all verify windows, the next free one.
 * The sequence then owns the written slot. The slot that it has read keeps its bits and is free
 * from the next call on. The call after a shared prefix reads the prefix's slot in all sequences.
 * No later call writes it.
 *
 * A kernel that rolls back by itself (drafts) has slots for drafted tokens. Sequence i owns as many
 * as the longest window has tokens. Every call gets all of them, and the number of accepted tokens
 * of the sequence's last call. The sequence begins from the slot of the last accepted token. A call
 * of at most so many tokens writes the state after each token into that token's slot. A longer call
 * writes the last state into the first slot. In a tree the tokens of a window have parents. A token
 * continues from the state after its parent, and the path to one token is accepted.
 *
 * A kernel that replays tokens from a ring writes no state in most calls. Slots behind those of the
 * session hold rings, one a sequence; the kernel chooses their contents. While a call's tokens fit
 * into the ring, write is -1 and the pool's states stay. The kernel begins from the state that it
 * reads and the ring's tokens. Any other call, and the last call of a sequence, writes the state
 * and empties the ring. An empty ring is NaN.
 *
 * A sequence that brings no tokens is padding: it reads and writes slot -1, and has one meaningless
 * token in the batch. Free slots are NaN before the call.
 */

/* The pool as a call gets it; everything is borrowed. */
typedef struct {
    int64_t slots;
    const int64_t *read, *write; /* [Nseq]; -1, both: padding */
    double *state;               /* [slots][HV][K][V], written in place */
    /* A kernel that rolls back by itself; 0, NULL: the caller rolls back.
     *   draft      [Nseq][drafts] slots of drafted tokens, -1: padding
     *   accepted   [Nseq] accepted tokens of the last call; in a tree the place of the last one,
     *              counted from 1 */
    int64_t drafts;
    const int64_t *draft, *accepted;
    /* [T]: place of a token's parent in its window, -1: the state before the call; NULL: chains */
    const int64_t *parent;
    /* A kernel that replays: [Nseq] slot of the ring, -1: padding, and its number of tokens. NULL:
     * no rings */
    const int64_t *ring, *held;
} dp_state_pool;

/* Its lists that are there, as libraries and programs get them. */
enum { DP_POOL_LISTS = 7 };
typedef struct {
    const char *name;
    const int64_t *x;
    int64_t shape[2]; /* the second 0: one axis */
} dp_pool_list;
int dp_pool_lists(const dp_state_pool *pool, const dp_problem *p, dp_pool_list out[DP_POOL_LISTS]);

enum { DP_SLOT_FREE = -1, DP_SLOT_OF_PREFIX = -2 };

/* Wrong writes: slots that a call changed and was not to write. A changed slot is in `was` as
 * before and in `is` as after the first such call. Elsewhere both are alike. */
typedef struct {
    int64_t slots, overwritten, width; /* width: K*V */
    double *was, *is;                  /* [slots][HV][K][V]; NULL: no pool was run */
    int64_t slot, call;                /* of the first; call 0 on */
    int owner;                         /* of that slot: a sequence, or one of the two above */
} dp_pool_seen;
void dp_pool_seen_free(dp_pool_seen *s);

/* ---- calls ----------------------------------------------------------------------------------- */

/* Results of one call.
 *   out      o and final_state, allocated by the callee (dp_result_free); without o the session has
 *            no o
 *   states   S after every token [T][HV][K][V], to be freed; NULL: not returned */
typedef struct {
    dp_result out;
    double *states;
    /* with convolutions before q, k, v: their outputs [T][D], and their states after the call */
    double *y[DP_NQKV];
    dp_conv_states conv;
} dp_call_result;

/* The first call that left a state far from the fp64 result for the call's inputs. `off` is the
 * error relative to that state's norm, 0: no such call. It locates an error and judges nothing. */
typedef struct {
    double from; /* least relative error to report, well above the rounding errors of a call */
    double off;
    int64_t call; /* 0 on */
    int sequence, head;
} dp_states_seen;

/* Results of the calls of a session beside o and their last state. */
typedef struct {
    dp_drafts drafts;
    dp_pool_seen pool;
    dp_states_seen far;
    dp_conv_calls front;
} dp_calls_seen;
void dp_calls_seen_free(dp_calls_seen *seen);

/* The function that computes a call, and its abilities. */
typedef struct {
    /* Runs a call, forward only. states = 1: states of every token are wanted if available. An
     * error ends the session. */
    dp_status (*run)(void *who, const dp_problem *call, int states, dp_call_result *out, dp_err *e);
    void *who;
    dp_drafts *drafts;   /* gets the windows; NULL: not wanted */
    dp_pool_seen *pool;  /* gets wrong writes to slots; NULL: not wanted */
    dp_states_seen *far; /* gets the first wrong state; NULL: not wanted */
    /* Runs a call with the states in a pool, which it reads and writes; returns no final_state.
     * NULL: pools are not supported. */
    dp_status (*run_in)(void *who, const dp_problem *call, const dp_state_pool *pool, int states,
                        dp_call_result *out, dp_err *e);
    /* 1: it rolls back by itself where the session allows it (dp_session_drafts); trees:
     * also in windows that are trees. */
    int drafts_in, trees;
    int replays; /* 1: from rings, where the session has them */
    int halos;   /* 1: it takes dp_problem.before; else these are tokens before a call's own */
    /* Convolutions before q, k and v, NULL: none. Their inputs are q, k, v of p and of a call. */
    dp_conv_calls *front;
    /* Runs a call with convolutions, from their states before it. pool: NULL, or the states of the
     * recurrence; it returns no final_state then. */
    dp_status (*run_step)(void *who, const dp_problem *call, const dp_state_pool *pool,
                          const dp_conv_states *before, dp_call_result *out, dp_err *e);
} dp_caller;

/* Runs a session.
 *   p     the whole problem, without gradients
 *   out   o and final_state of the session, to be freed
 *   hit   [HV], 1 where the fault acted; may be NULL
 * On failure nothing needs freeing. */
dp_status dp_calls_run(const dp_problem *p, const dp_session *s, dp_fault fault,
                       const dp_caller *by, dp_result *out, unsigned char *hit, dp_err *e);

/* Runs the simulation s of a call (one rank), fills *out and frees s. */
void dp_calls_of_sim(dp_sim *s, dp_call_result *out);
