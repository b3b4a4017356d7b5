/* harness/verdict/drawn_sent.h - what comes to the ranks of a recurrent design where what is sent
 * is rounded (payload.h): of pairs that are gathered, or of states that go from rank to rank.
 *
 * A rank in which the sequence begins (ends) sends the state (the gradient) that leaves it; every
 * other one M S + H in fp32, of pairs as they arrive, or of a state that arrived so itself.
 */
#ifndef DP_DRAWN_SENT_H
#define DP_DRAWN_SENT_H
#include "drawn_pairs.h"
#ifdef __cplusplus
extern "C" {
#endif

/* Does a payload change what comes, by an exchange that is drawn here. A scan rounds composed
 * pairs, level by level: no. */
int dp_drawn_rounds(dp_sending x);

/* S and dS at the boundaries of N ranks, [N][HV][K][V] as dp_recurrent_keep has them, in full, to
 * those that come; dS may be NULL. */
void dp_drawn_arrives(const dp_problem *p, dp_sending x, int N, const dp_drawn_pairs *pairs,
                      double *S, double *dS);

#ifdef __cplusplus
}
#endif
#endif
