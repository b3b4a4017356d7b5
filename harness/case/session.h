/* harness/case/session.h - a session: the tokens of a recurrence in successive calls, each of which
 * continues from the state of the call before.
 *
 * The schedule is the text of the key session, calls with commas between. `N` is one call of N
 * tokens, `KxN` is K calls of N tokens. `N-n` is a verify window: N drafted tokens, of which the
 * first n are accepted, n < N. The next call continues from the state after token n. The accepted
 * tokens, in their order, are the tokens of the case.
 *
 * Every packed sequence is a slot of the batch, and each call brings the next tokens of each. The
 * last call of the schedule is repeated until all tokens are computed. The last call of a sequence
 * has only its remaining tokens. A sequence that has ended is empty in later calls.
 *
 * With session_stagger = n sequence i begins its schedule i*n calls after the first one. So one
 * call has prompts, windows and single tokens of different sequences.
 *
 * A prefix (key session_prefix) is the common begin of all sequences, from one initial state. The
 * calls up to its end compute it in the first sequence alone. All sequences continue from its
 * state, as requests with one cached prompt do.
 */
#pragma once
#include "ref/vocabulary/formats.h"
#include "ref/vocabulary/problem.h"

#define DP_SESSION_MOST_CALLS 65536
#define DP_SESSION_MOST_DRAFTED 1024 /* in one window: they are tokens beside those of the case */

typedef struct {
    int64_t drafted, accepted; /* equal: no window, all of them count */
} dp_session_call;

typedef struct {
    char *text;     /* the key's; NULL: no session */
    int n;          /* calls before the last is repeated */
    int rolls_back; /* 1: a token is drafted in vain */
    dp_session_call *call;
    dp_format kept;  /* the state is rounded to it between calls; DP_FP64: it stays as the subject
                       returned it */
    int64_t prefix;  /* tokens; 0: none */
    int64_t stagger; /* sequence i begins so many calls after the one before; 0: all at once */
    int64_t ring;    /* tokens since the last written state that a kernel replays; 0: none */
    int64_t slots;   /* of the pool that holds the states (harness/simulated/calls.h); 0: no pool */
} dp_session;

/* DP_EINPUT says which call is wrong. On failure nothing needs freeing. */
dp_status dp_session_parse(const char *text, dp_session *s, dp_err *e);
void dp_session_free(dp_session *s);

/* Does it end with the longest of these sequences? DP_EINPUT: calls are left when no token is, or
 * the last one accepts none and would be repeated for ever. */
dp_status dp_session_fits(const dp_session *s, const int64_t *cu, int Nseq, dp_err *e);

/* Is there a call that ends behind the prefix, and has every sequence more tokens? DP_EINPUT. */
dp_status dp_session_prefix_fits(const dp_session *s, const int64_t *cu, int Nseq, dp_err *e);

/* Has the pool a slot for every sequence and one that none owns? DP_EINPUT. */
dp_status dp_session_slots_fit(const dp_session *s, int Nseq, dp_err *e);

/* The word of the key session_state that stands for its format. */
const char *dp_session_kept(const dp_session *s);

/* Call i, 0 on. */
dp_session_call dp_session_at(const dp_session *s, int64_t i);
/* Slots a sequence for who rolls back by himself: the tokens of the longest window, 1 where there
 * is none. 0: the session is none for him (why says so): it has a prefix, a window of which nothing
 * is accepted, or too few slots. */
int64_t dp_session_drafts(const dp_session *s, int Nseq, char *why, size_t size);
/* The call in which a token of its sequence is accepted, counted from the sequence's first; c (may
 * be NULL) is that one. */
int64_t dp_session_call_of(const dp_session *s, int64_t token, dp_session_call *c);
/* Marks in first [cu[Nseq]] with 1 every token that is the first accepted one of a call. */
void dp_session_firsts(const dp_session *s, const int64_t *cu, int Nseq, unsigned char *first);
/* Marks in ended [Nseq] with 1 every sequence whose state passes unchanged through later calls. It
 * ends before the last call, or has no tokens in a session of several calls. */
void dp_session_ended(const dp_session *s, const int64_t *cu, int Nseq, unsigned char *ended);
