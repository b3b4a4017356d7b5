/* harness/verdict/row_freedom.h - how many degrees of freedom the error of a row has at most, by
 * count.
 *
 * A row of o or dq sums vectors over the tokens before it and itself, one of dk or dv over the
 * tokens from itself on. Much of its error is that of each vector's factor, a product of two rows:
 * one number a token. So the error of a sequence's first row of dq, or its last one of dk, is
 * little more than one number a value head, which a few draws do not tell from one of many.
 */
#ifndef DP_ROW_FREEDOM_H
#define DP_ROW_FREEDOM_H
#include "ref/vocabulary/problem.h"
#ifdef __cplusplus
extern "C" {
#endif

/* [T][heads][rows of a token] of a result field, to be freed: tokens that it sums over, times what
 * every token has, its keys and, of what value heads add up to, these. NULL: no limit, since a
 * state that is given comes into every row, or the field sums otherwise. */
double *dp_row_freedom_new(const dp_problem *p, dp_result_id field);

#ifdef __cplusplus
}
#endif
#endif
