/* harness/simulated/calls.h - runs the calls of a session (harness/case/session.h) through any
 * function that computes one call.
 *
 * Each call is a problem of its own: the next tokens of every sequence packed, with the initial
 * states that earlier calls left. A sequence that has ended is an empty one, whose state stays. A
 * verify window contributes o of its accepted tokens and the state after the last of them. If a
 * call returns the state after every token, the state is taken from these. Otherwise the accepted
 * tokens are run again from the state before the window. Results of rejected tokens, and states
 * within a call, are kept apart (drafts.h).
 *
 * Rejected tokens are other tokens of the problem with their values negated. Their numbers obey the
 * law of the inputs. Their key or value differs from the accepted token's, unless all tokens have
 * one key and zeros for values.
 *
 * Before the end of a shared prefix only the first sequence brings tokens. Then all others copy its
 * state and its rows of o.
 *
 * If the states lie in a pool (slots.h), each call gets the slots. A sequence without tokens is
 * then padding and brings one meaningless token. A caller without pools gets the states of the
 * slots to read. The states that it returns go to the slots to write.
 *
 * If rows look back or rotate, each call gets the token before it (dp_problem.before).
 *
 * With convolutions before q, k and v each call also gets the last inputs of every sequence from
 * earlier calls (conv_states.h). The results of a window are kept with the outputs of the
 * convolutions as inputs.
 *
 * The faults of calls (fault.h) act here. A fault reports the heads at which it changed the inputs
 * or results of a call.
 */
#ifndef DP_CALLS_H
#define DP_CALLS_H
#include "conv_states.h"
#include "drafts.h"
#include "fault.h"
#include "harness/case/session.h"
#include "ranks.h"
#include "slots.h"

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
    /* 1: it rolls back by itself where the session allows it (dp_session_drafts, slots.h); trees:
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
#endif
