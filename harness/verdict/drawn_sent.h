/* harness/verdict/drawn_sent.h - what comes to the ranks of a recurrent design where what is sent
 * is rounded (payload.h): of pairs that are gathered, of states that go from rank to rank, or of
 * pairs that a scan composes.
 *
 * A rank in which the sequence begins (ends) sends the state (the gradient) that leaves it, or in
 * an all-gather of begins=pair its pair, which is applied to the initial state when it has come;
 * every other one M S + H in fp32, of pairs as they arrive, or a state that arrived so itself; in
 * a scan the pair of twice as many ranks at each level, its products in fp32, its own as it is.
 */
#ifndef DP_DRAWN_SENT_H
#define DP_DRAWN_SENT_H
#include "drawn_pairs.h"
#ifdef __cplusplus
extern "C" {
#endif

/* Does a payload change what comes. */
int dp_drawn_rounds(dp_sending x);

/* Does a rank in which a sequence begins (back: ends) send its pair, to be applied to a state. */
int dp_drawn_from_pair(const dp_problem *p, dp_sending x, int back);

/* S and dS at the boundaries of N ranks, [N][HV][K][V] as dp_recurrent_keep has them, in full, to
 * those that come; dS may be NULL. */
void dp_drawn_arrives(const dp_problem *p, dp_sending x, int N, const dp_drawn_pairs *pairs,
                      double *S, double *dS);

#ifdef __cplusplus
}
#endif
#endif
