/* harness/verdict/pooled.h - one tensor of many cases together: an error that is too large in all
 * of them, but fails in none.
 *
 * Case c has the share (x, top, bottom) (levels.h). The probability of that error or more is
 *   p_c = P(F(top, bottom) > x / factor^2)
 * for a kernel whose errors are `factor` times the draws', which is allowed (dp_allowance). Then
 * -2 sum log p_c is chi squared with 2 n degrees of freedom (Fisher 1932), or less where errors are
 * smaller. A p_c below DP_POOLED_LEAST counts as DP_POOLED_LEAST, since one case alone is judged by
 * its own levels. Cases are taken as independent, as their inputs differ. Several runs of one case
 * are one share (dp_share_of_runs).
 *
 * Measured power and false alarms: reports/verdicts.md.
 */
#ifndef DP_POOLED_H
#define DP_POOLED_H
#include "levels.h"
#ifdef __cplusplus
extern "C" {
#endif

#define DP_POOLED_CASES 3    /* fewer are not pooled */
#define DP_POOLED_LEAST 1e-4 /* of p_c */

typedef struct {
    int cases;
    double ratio;   /* root mean square of error / expected, by degrees of freedom */
    double freedom; /* of all cases */
    double chance;  /* of a right kernel's showing as much; at most DP_ALARM fails */
    double detects; /* factor on every error of these runs at which chance is DP_ALARM */
} dp_pooled;

/* Runs of one case: their mean square, with the least degrees of freedom of one of them. */
dp_share dp_share_of_runs(int n, const dp_share *run);

/* n >= 1 cases, each with the factor that it is allowed. */
dp_pooled dp_pool(int n, const dp_share *of_case, const double *factor);

#ifdef __cplusplus
}
#endif
#endif
