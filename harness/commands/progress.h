/* harness/commands/progress.h - how far `run` has come: lines while it runs, and what a signal that
 * ends the program finds finished. */
#ifndef DP_PROGRESS_H
#define DP_PROGRESS_H
#include "harness/record/run.h"

/* Counts of one case while it runs. */
typedef struct dp_tally {
    const char *case_name;
    FILE *table; /* where its lines go */
    int verbose; /* 1: a line for every run, 0: for those that fail */
    int n[DP_NVERDICTS], runs;
    struct dp_tally *next; /* of those that run beside it */
} dp_tally;

/* After `read` of `cases` the case at this path is loaded; NULL: none any more. */
void dp_progress_loading(const char *path, int read, int cases);
/* For dp_on_interrupt; arg: the FILE. */
void dp_progress_say(void *file);

#endif
