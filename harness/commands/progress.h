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
/* The case runs, until dp_progress_end. */
void dp_progress_begin(dp_tally *t);
/* dp_run_options.done; arg: the tally. */
void dp_progress_run(const dp_run *r, void *arg);
/* Takes the case from those that run. */
void dp_progress_end(dp_tally *t);
/* For dp_on_interrupt; arg: the FILE. */
void dp_progress_say(void *file);

/* `cases` of this total cost are to be run; then each that is finished. On a terminal the status
 * line says how many, for how long, and about how long the rest will take. */
void dp_progress_expect(int cases, double cost);
void dp_progress_finished(double cost);

/* Whoever prints of a run holds this, so that lines stay whole. */
void dp_progress_lock(void);
void dp_progress_unlock(void);

#endif
