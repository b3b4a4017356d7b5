/* harness/commands/run_cases.h - many cases, side by side where the subjects allow it, and shared
 * out over the processes of one mpirun. */
#ifndef DP_RUN_CASES_H
#define DP_RUN_CASES_H
#include "harness/record/run.h"

typedef struct {
    dp_run_options run;        /* of every case; done and arg are set for each */
    int named;                 /* cases were named: one that offers no run is an error */
    int verbose;               /* a line for every run */
    FILE *table;               /* where lines go */
    const char *resume;        /* folder of finished cases (run_cases.c); NULL: none */
    const char *kernel_commit; /* NULL: not said */
    int shared;                /* the other processes take cases, too */
} dp_batch;

/* Appends the runs in the order of the cases; returns how many cases could not be judged, each
 * with its reason on standard error. */
int dp_run_cases(const dp_batch *b, int n, dp_case *const *cases, dp_runs *runs);
/* In another process than the first, which has the same cases: runs those that the first one
 * assigns. */
void dp_run_given_cases(const dp_batch *b, int n, dp_case *const *cases);

/* Counts of one case while it runs. */
typedef struct dp_tally {
    const char *case_name;
    FILE *table; /* where its lines go */
    int verbose; /* 1: a line for every run, 0: for those that fail */
    int n[DP_NVERDICTS], runs;
    struct dp_tally *next; /* of those that run beside it */
} dp_tally;

/* How far `run` has come, for what a signal that ends the program finds finished. After `read` of
 * `cases` the case at this path is loaded; NULL: none any more. */
void dp_progress_loading(const char *path, int read, int cases);
/* For dp_on_interrupt; arg: the FILE. */
void dp_progress_say(void *file);

#endif
