/* harness/commands/cmd_bisect.h - what `deltaproof bisect` was asked, and the three answers that it
 * gives. Each prints what it finds; 0 nothing wrong, 1 something, 2 could not tell (*e says
 * why). */
#ifndef DP_CMD_BISECT_H
#define DP_CMD_BISECT_H
#include "options.h"

typedef struct {
    dp_options of;
    int verbose, runs, have_need;
    dp_base from, to;
    int chain_from, chain_to; /* -1: that of the base */
    double need[DP_NRESULTS];
} dp_bisect_options;

/* bisect_ranks.c: the simulated ranks, each stage on true inputs. */
int dp_bisect_ranks(const dp_bisect_options *o, const dp_case *c, dp_err *e);
/* bisect_shown.c: a shared library, or tensors in a file: the stages that they show. c has the one
 * run that is judged. */
int dp_bisect_shown(const dp_bisect_options *o, dp_case *c, dp_err *e);
/* bisect_precision.c: which stages need a wider format. */
int dp_bisect_precision(const dp_bisect_options *o, const dp_case *c, dp_err *e);

#endif
