/* harness/simulated/slots.h - the pool of slots in which a server keeps the states of a session
 * (key session_slots). The module plans the slots that each sequence reads and writes in a call,
 * and checks that all others keep their bits.
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
#ifndef DP_SLOTS_H
#define DP_SLOTS_H
#include "fault.h"
#include "harness/case/session.h"

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

typedef struct dp_slots dp_slots;
/* A pool that holds the initial states of p. NULL: the session has no pool.
 *   drafts   slots for a window's tokens, 0: none
 *   rings    1: with slots for rings */
dp_slots *dp_slots_new(const dp_problem *p, const dp_session *s, int64_t drafts, int rings);
/* After the plan of a call, with rings: the number of tokens that each sequence brings [Nseq], and
 * the sequences whose last call it is. */
void dp_slots_replay(dp_slots *s, const int64_t *tokens, const unsigned char *last);
void dp_slots_free(dp_slots *s);

/* Before a call: chooses the slots to read and write, and stores S [Nseq][HV][K][V] in the slots
 * that sequences own.
 *   idle [Nseq]   1: padding
 *   window        1: the call rejects tokens */
void dp_slots_plan(dp_slots *s, const double *S, const unsigned char *idle, int window);
/* Applies a fault to the planned slots; returns 1 if it changed them. */
int dp_slots_spoil(dp_slots *s, dp_fault fault);
/* With drafts: the number of tokens that each sequence brings to the call [Nseq], and the sequences
 * whose tokens get slots. The tokens' parents are borrowed. */
void dp_slots_draft(dp_slots *s, const int64_t *tokens, const unsigned char *window,
                    const int64_t *parent);
/* The states after all tokens of the call, 0 where a token has no slot, to be freed. NULL: no token
 * has a slot. */
double *dp_slots_drafted(const dp_slots *s);
/* Sequence i continues from its token at `place` of a window. */
void dp_slots_accept(dp_slots *s, int i, int64_t place);
/* Restricts the next runs of the call to sequences with tokens [Nseq]; the others neither read nor
 * write. dp_slots_again ends the restriction. */
void dp_slots_only(dp_slots *s, const int64_t *tokens);
void dp_slots_again(dp_slots *s);

/* Begins one run of the call: keeps a copy of the pool and returns the pool. */
dp_state_pool dp_slots_begin(dp_slots *s);
/* For a caller without pools: copies the slots to read into s0 (padding: 0), and final_state into
 * the slots to write, [Nseq][HV][K][V]. */
void dp_slots_read(const dp_slots *s, double *s0);
void dp_slots_write(dp_slots *s, const double *final_state);
/* The contents of the written slots as a final_state, to be freed. */
double *dp_slots_written(const dp_slots *s);
/* Adds wrong writes of the run to *seen (NULL: not wanted). */
void dp_slots_look(const dp_slots *s, int64_t call, dp_pool_seen *seen);

/* Between the runs of a call: restores the slots that are read to S; stores a state in the slot
 * that sequence i writes. */
void dp_slots_restore(dp_slots *s, const double *S);
void dp_slots_put(dp_slots *s, int i, const double *state);

/* After a call: every sequence owns the slot that it wrote. S gets the contents of the slots. */
void dp_slots_take(dp_slots *s, double *S);
/* The slot of the first sequence becomes the prefix's, from which all sequences continue. */
void dp_slots_share(dp_slots *s);
#endif
