/* harness/simulated/slots.h - the pool of slots in which a server keeps the states of a session
 * (key session_slots). The walk of calls.c plans the slots that each sequence reads and writes in a
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
#endif
