/* harness/simulated/slots.h - the pool of slots in which a server keeps the states of a session
 * (key session_slots): which slot each sequence reads and writes in a call, and what must keep its
 * bits.
 *
 * Slots are numbered from 0. Sequence i begins in the i-th from the end, so that no index of the
 * batch is one of the pool. In a call a sequence reads the slot that it owns and writes the same
 * one or, in every second of its calls and in all verify windows, the next one that no sequence
 * owns: then it owns that, and the one it has read stays as it is and is free from the next call
 * on. The slot of a shared prefix is read by all sequences in the call behind it, and never written
 * again.
 *
 * A kernel that rolls back by itself (drafts) has slots for drafted tokens: sequence i owns as many
 * as the longest window has tokens, and is told all of them in every call, with how many tokens of
 * its last call were accepted. It begins from the slot of the last of those. In a call of as many
 * tokens or less it writes the state of each into that token's slot, in a longer one the last state
 * into the first slot. In a tree tokens of a window have parents: one goes on from the state behind
 * its parent, and what is accepted is the way to one of them.
 *
 * A kernel that replays tokens from a ring writes no state in most calls. Slots behind those of the
 * session hold rings, one a sequence, with numbers of the kernel's own. While a call's tokens fit
 * in the ring beside those that it holds, write is -1 and the pool's states stay. The kernel begins
 * from the state that it reads and the ring's tokens. In another call, and in the last of a
 * sequence, the state is written, and the ring is empty then. An empty ring is NaN.
 *
 * A sequence that brings no tokens is padding: it reads and writes slot -1, and one token that
 * means nothing stands for it in the batch. What is free is NaN before the call.
 */
#ifndef DP_SLOTS_H
#define DP_SLOTS_H
#include "fault.h"
#include "harness/case/session.h"
#ifdef __cplusplus
extern "C" {
#endif

/* The pool as a call gets it; everything is borrowed. */
typedef struct {
    int64_t slots;
    const int64_t *read, *write; /* [Nseq]; -1, both: padding */
    double *state;               /* [slots][HV][K][V], written in place */
    /* A kernel that rolls back by itself: slots of drafted tokens [Nseq][drafts], -1: padding;
     * tokens accepted of the last call [Nseq], in a tree the place of the last one, from 1 on. 0,
     * NULL: the caller rolls back. */
    int64_t drafts;
    const int64_t *draft, *accepted;
    /* [T]: place in its window of the token before, -1: the state before the call; NULL: chains */
    const int64_t *parent;
    /* A kernel that replays: [Nseq] slot of the ring, -1: padding, and the tokens that it holds.
     * NULL: no rings */
    const int64_t *ring, *held;
} dp_state_pool;

enum { DP_SLOT_FREE = -1, DP_SLOT_OF_PREFIX = -2 };

/* What happened to slots that were not to be written: was and is hold a slot that was, before and
 * after the first call that did, and are alike elsewhere. */
typedef struct {
    int64_t slots, overwritten, width; /* width: K*V */
    double *was, *is;                  /* [slots][HV][K][V]; NULL: nobody has run a pool */
    int64_t slot, call;                /* of the first; call 0 on */
    int owner;                         /* of that slot: a sequence, or one of the two above */
} dp_pool_seen;
/* Frees what it holds; the struct is the caller's. */
void dp_pool_seen_free(dp_pool_seen *s);

typedef struct dp_slots dp_slots;
/* A pool that holds the initial states of p; drafts: with slots for a window's tokens, 0: none;
 * rings: with those. NULL: the session has none. */
dp_slots *dp_slots_new(const dp_problem *p, const dp_session *s, int64_t drafts, int rings);
/* After the plan of a call: tokens that each sequence brings to it [Nseq], and whose last it is. */
void dp_slots_replay(dp_slots *s, const int64_t *tokens, const unsigned char *last);
void dp_slots_free(dp_slots *s);

/* Before a call. S [Nseq][HV][K][V] goes to the slots of those who own one. idle [Nseq]: padding;
 * window: the call rejects tokens. */
void dp_slots_plan(dp_slots *s, const double *S, const unsigned char *idle, int window);
/* The slots that a fault takes instead: 1: others than it should. */
int dp_slots_spoil(dp_slots *s, dp_fault fault);
/* With drafts: tokens that each sequence brings to the call [Nseq], and whose have slots; parent:
 * of the tokens, borrowed. */
void dp_slots_draft(dp_slots *s, const int64_t *tokens, const unsigned char *window,
                    const int64_t *parent);
/* The states behind all tokens of the call, 0 where one has no slot of its own, to be freed; NULL:
 * none has. */
double *dp_slots_drafted(const dp_slots *s);
/* Sequence i goes on from its token at `place` of a window. */
void dp_slots_accept(dp_slots *s, int i, int64_t place);
/* The runs of the call are of those sequences alone that have tokens [Nseq]: the others neither
 * read nor write. Again: of all of them, as planned. */
void dp_slots_only(dp_slots *s, const int64_t *tokens);
void dp_slots_again(dp_slots *s);

/* One run of the call. The pool, remembered as it is. */
dp_state_pool dp_slots_begin(dp_slots *s);
/* s0 and final_state [Nseq][HV][K][V], for one that computes from those: what stands in the slots
 * that are read (padding: 0), what goes to those that are written. */
void dp_slots_read(const dp_slots *s, double *s0);
void dp_slots_write(dp_slots *s, const double *final_state);
/* What stands in those afterwards, as such a final_state, to be freed. */
double *dp_slots_written(const dp_slots *s);
/* Slots that were not to be written, into *seen (NULL: nobody asks). */
void dp_slots_look(const dp_slots *s, int64_t call, dp_pool_seen *seen);

/* Between the runs of a call: the slot that sequence i reads is as it was, S; that it writes gets
 * a state. */
void dp_slots_restore(dp_slots *s, const double *S);
void dp_slots_put(dp_slots *s, int i, const double *state);

/* After a call: who wrote owns what he wrote, and S is what the slots hold. */
void dp_slots_take(dp_slots *s, double *S);
/* The slot of the first sequence is that of the prefix, from which all go on. */
void dp_slots_share(dp_slots *s);

#ifdef __cplusplus
}
#endif
#endif
