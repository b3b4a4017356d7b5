/* harness/verdict/lost_state.h - does a wrong row of o or of final_state lack a state that
 * mattered?
 *
 * o of token t is a sum over the writes of all tokens before it. The state before token c is
 * missing where the row equals the sum from c on. That sum is made for every c (fp64, backwards
 * from t), and the c that leaves least of the error is named. Beside it stands the share of a state
 * that gates leave from c to t: at most, by the largest channel gate of each token. The largest
 * channel sum, which bounds nothing, is shown too (ref/bound/drop.h).
 */
#ifndef DP_LOST_STATE_H
#define DP_LOST_STATE_H
#include "compare.h"
#include "ref/vocabulary/problem.h"
#ifdef __cplusplus
extern "C" {
#endif

/* field: DP_RESULT_O or DP_RESULT_FINAL_STATE; row: the failed one of j; got: the whole tensor.
 * drop: bits that are claimed, 0: none. Writes text and returns 1 where a missing state explains
 * nine tenths of the row's error, else 0. */
int dp_lost_state_find(const dp_problem *p, int field, const dp_row *row, const double *got,
                       int drop, char *text, size_t size);

#ifdef __cplusplus
}
#endif
#endif
