/* harness/simulated/drafts.h - results of the verify windows of a session for all their tokens,
 * rejected ones too. They are problems of their own: each window of each slot is a packed sequence
 * that begins from the state which that call got. So o of rejected tokens and states within a call
 * have a truth, though nothing that follows depends on them.
 *
 *   window   the drafted tokens of a window; o, and the state after the last of them
 *   within   for each token of a window (the last one where another state than the final one is
 *            shown behind it): the tokens up to it; the state after it. Only of subjects that show
 *            the state after every token
 */
#ifndef DP_DRAFTS_H
#define DP_DRAFTS_H
#include "ref/vocabulary/problem.h"
#include "ref/vocabulary/tensors.h"

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

/* Adds sequence i of a call to `window` and, with states [T][HV][K][V], to `within`. The problem
 * `call` has the right states. If o or states is NULL, it must be NULL in every call. */
void dp_drafts_take(dp_drafts *d, const dp_problem *call, int i, const dp_draft_place *at,
                    const dp_result *made, const double *states);
void dp_drafts_free(dp_drafts *d);
#endif
