/* harness/run/calls_again.h - a call made again. With the same inputs its results must have the
 * same bits; with others, results that follow from the first.
 *
 * The other inputs need no truth of their own. Each value head takes the place of the next of its
 * group, with the query and key head that it reads. The tensors q, k, v and do change sign. Then o,
 * dq, dk and dv change sign, all else stays, and every result moves with its head.
 */
#ifndef DP_CALLS_AGAIN_H
#define DP_CALLS_AGAIN_H
#include "harness/library/subject.h"
#ifdef __cplusplus
extern "C" {
#endif

/* Runs of a command that are called again, the first that its subject serves; those that fail are,
 * too. */
#define DP_RUNS_CALLED_AGAIN 2

/* To be freed by dp_problem_free. */
dp_problem dp_other_values(const dp_problem *p);
/* Results of dp_other_values(p) become what p's must be. */
void dp_other_values_undo(const dp_problem *p, dp_result *r);
/* In how many results do numbers differ (NaN is NaN)? text: how many entries of the first of those,
 * and where. */
int dp_results_differ(const dp_problem *p, const dp_result *a, const dp_result *b, char *text,
                      size_t size);

#ifdef __cplusplus
}
#endif
#endif
