/* harness/simulated/calls.h - the calls of a session (harness/case/session.h), around anyone who
 * computes one call.
 *
 * Each call is a problem of its own: the next tokens of every sequence packed, initial states those
 * that the calls before left. A sequence that has ended is an empty one, whose state stays. Of a
 * verify window o of the accepted tokens counts, and the state after the last of them: where a call
 * shows the state after every token it is taken from there, else the accepted tokens are run again
 * from the state before the window. What a call makes of rejected tokens, and states within it, are
 * kept apart (drafts.h).
 *
 * Rejected tokens are other tokens of the problem with their values negated: lawful numbers, and
 * another key or value than what stands there (unless all tokens have one key and zeros for
 * values).
 *
 * Before the end of a shared prefix only the first sequence brings tokens; then all others take its
 * state, and its rows of o.
 *
 * Where the states lie in a pool (slots.h), each call is told the slots; a sequence that brings no
 * token is padding then, which brings one that means nothing. Who takes no pool gets the states of
 * the slots that are read, and what it returns goes to those that are written.
 *
 * With convolutions in front each call gets the last inputs of every sequence, too, as the calls
 * before handed them on (conv_states.h). What a window made is
 * kept as what those gave its tokens makes.
 *
 * The faults of calls (fault.h) act here. A fault says where it acted: in what was handed to a
 * call, or taken from it, of that head.
 */
#ifndef DP_CALLS_H
#define DP_CALLS_H
#include "conv_states.h"
#include "drafts.h"
#include "fault.h"
#include "harness/case/session.h"
#include "ranks.h"
#include "slots.h"
#ifdef __cplusplus
extern "C" {
#endif

/* What one call returns. out: allocated here (dp_result_free), o and final_state; without o the
 * session has none. states: S after every token [T][HV][K][V], to be freed; NULL: not shown. */
typedef struct {
    dp_result out;
    double *states;
    /* with convolutions in front: what they gave [T][D], and the states that they hand on */
    double *y[DP_NQKV];
    dp_conv_states conv;
} dp_call_result;

/* The first call that left a state far from what fp64 makes of what the call was given: by `off` of
 * that state's norm. off 0: none did. It judges nothing: it says where to look. */
typedef struct {
    double from; /* from which share on; the caller says which no rounding of a call comes near */
    double off;
    int64_t call; /* 0 on */
    int sequence, head;
} dp_states_seen;

typedef struct {
    /* Forward only. states: those of every token are of use, where they can be had. DP_OK, or what
     * ends the session. */
    dp_status (*run)(void *who, const dp_problem *call, int states, dp_call_result *out, dp_err *e);
    void *who;
    dp_drafts *drafts;   /* gets the windows; NULL: nobody looks at them */
    dp_pool_seen *pool;  /* gets what happened to slots; NULL: nobody asks */
    dp_states_seen *far; /* gets the first wrong state; NULL: nobody asks */
    /* The same with the states in a pool, which it reads and writes; returns no final_state. NULL:
     * it takes none. */
    dp_status (*run_in)(void *who, const dp_problem *call, const dp_state_pool *pool, int states,
                        dp_call_result *out, dp_err *e);
    /* It rolls back by itself where the session allows it (dp_session_drafts, slots.h); trees: in
     * windows that are trees. */
    int drafts_in, trees;
    int replays; /* from rings, where the session has them */
    /* Convolutions in front of q, k and v: those of p and of a call are what goes into them. NULL:
     * none. */
    dp_conv_calls *front;
    /* The same with those; gets the states that were handed on. pool: NULL, or where those of the
     * recurrence lie: who takes it returns no final_state. */
    dp_status (*run_step)(void *who, const dp_problem *call, const dp_state_pool *pool,
                          const dp_conv_states *before, dp_call_result *out, dp_err *e);
} dp_caller;

/* p: all of it, without gradients. out: o and final_state of the session, to be freed. hit [HV]: 1
 * where the fault acted; may be NULL. On failure nothing needs freeing. */
dp_status dp_calls_run(const dp_problem *p, const dp_session *s, dp_fault fault,
                       const dp_caller *by, dp_result *out, unsigned char *hit, dp_err *e);

/* Who computes a call as the pipeline of one rank: runs a simulation that was made for it, and
 * frees it. */
void dp_calls_of_sim(dp_sim *s, dp_call_result *out);

#ifdef __cplusplus
}
#endif
#endif
