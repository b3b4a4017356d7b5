/* harness/run/subjects.h - who computes a case: simulated ranks, in one process or several, a
 * library, the chunk solver over LAPACKE, CUDA devices. Convolutions and chains of M have their
 * own. An operation has a list of subjects (dp_subjects). One driver (driver.c) plans their runs
 * and walks them. Files of results that another program wrote are judged by dp_run_stored
 * (judge.h).
 */
#pragma once
#include "outputs.h"

#define DP_MAX_RANK_COUNTS 16

/* ---- the plan -------------------------------------------------------------------------------- */

typedef struct dp_subject_kind dp_subject_kind;
typedef struct dp_made dp_made;
/* A case as far as options leave it, on one number of ranks. */
typedef struct {
    const dp_case *c;
    const dp_run_options *o;
    int N, most; /* ranks; the most that are asked for */
    int nbase, nchain;
    int few; /* formats of the chain that run on N ranks: one rank forms no M */
    dp_base base[DP_NBASES];
    dp_format chain[DP_NFORMATS];
} dp_asked;
/* A run that case and options ask for, before it is made. */
typedef struct {
    const dp_subject_kind *kind;
    int N;
    dp_base base;
    dp_format chain;
    dp_design design; /* as far as it is known before the run */
    dp_sending way;   /* exchange and payload that were asked for */
    int says_way;     /* 1: the record has them */
    dp_cuda_variant variant;
    int claimed;   /* 1: its draws are made together with those of all others */
    int stages;    /* 1: those of intermediates, too */
    int bare;      /* 1: its record has no chain */
    char no[256];  /* why it is not made; empty: it is */
    dp_made *made; /* its result, where it is computed already; else NULL */
} dp_planned;
typedef struct {
    int n, cap;
    dp_planned *row;
} dp_plan;
/* Appends a run of N ranks in that base, with its default design; the rest is the caller's. */
dp_planned *dp_plan_add(dp_plan *plan, const dp_subject_kind *k, int N, dp_base base,
                        dp_format chain);

/* ---- what a subject makes of a row ----------------------------------------------------------- */

struct dp_made {
    dp_outputs out;
    dp_calls_seen seen;       /* a session */
    const dp_step_run *front; /* op step: what its convolutions made */
    dp_design design;         /* as it computed; at first that of the plan */
    dp_verdict verdict;       /* where there is nothing to judge: skipped or failed, */
    char why[640];            /* and why; else empty */
    double from;              /* omp_get_wtime() before it */
    void *own;                /* the subject's, freed by its `free` */
};

/* A subject: which runs there are, and how one computes. The driver walks them: truth, bounds,
 * compute, judge, record. All but plan and compute may be NULL. */
struct dp_subject_kind {
    dp_backend backend;
    int side_by_side; /* 1: threads compute its rows at once; it keeps nothing and does not fail */
    /* Why N ranks of it cannot run here, or NULL: a row says so where it is asked for. */
    const char *(*absent)(dp_backend b, int N);
    /* The device that it offers for the truth of a problem, or NULL. */
    const dp_truth_device *(*truth)(const dp_problem *p);
    /* Appends its runs of a case that it computes, where it is asked for and can run. */
    dp_status (*plan)(const dp_subject_kind *k, const dp_asked *a, dp_plan *plan, dp_err *e);
    /* *kept: what it keeps between runs of one N and base, NULL before the first. m is freed by
     * the caller whatever it returns. */
    dp_status (*compute)(const dp_planned *x, dp_sharding *sp, void **kept, dp_made *m, dp_err *e);
    void (*close)(const dp_planned *x, const dp_case *c, void *kept); /* frees it */
    /* Adds its own words to the record; m NULL: the run is not made. */
    void (*note)(const dp_sharding *sp, const dp_made *m, dp_run *r);
    /* Judges and closes the run; NULL: as of a recurrence (outputs.h). */
    void (*judge)(const dp_sharding *sp, dp_made *m, dp_run *r);
    /* After the judgement of a recurrence. */
    dp_status (*after)(const dp_planned *x, dp_sharding *sp, dp_made *m, dp_bound_bases *bases,
                       dp_run *r, dp_err *e);
    void (*free)(const dp_case *c, dp_made *m); /* m->own, not NULL */
};
/* subject_simulated.c: in this process, or a process a rank. subject_cuda.c: one device, or NCCL
 * between devices. */
extern const dp_subject_kind dp_on_simulated, dp_on_processes, dp_on_lapack, dp_on_library,
    dp_on_cuda, dp_on_nccl;

/* The subjects of an operation, in the order in which they run. */
typedef struct {
    const dp_subject_kind *subject[8]; /* then NULL */
    /* The truth of an operation that is no recurrence, and what frees it; NULL: dp_standard's. */
    void *(*truth)(const dp_case *c);
    void (*close)(void *truth);
} dp_subjects;
/* subject_conv.c, subject_chain.c */
extern const dp_subjects dp_subjects_of_conv, dp_subjects_of_chain;

/* The record of a row, with its ID; m NULL: it is not made. */
dp_run *dp_planned_record(const dp_planned *x, const dp_sharding *sp, const dp_made *m,
                          dp_runs *out);

/* The exchanges and payloads that run with the which-th format of the chain: those of the options,
 * else of the case. Without M one format is enough, without a sent state one payload. */
typedef struct {
    int n;
    dp_sending way[DP_NRUN_EXCHANGES * DP_NRUN_PAYLOADS];
} dp_ways;
dp_ways dp_ways_of(const dp_case *c, const dp_run_options *o, int which);

/* The selection of one list: what the case offers, cut down to what the options name; returns the
 * count. */
int dp_select(int ncase, const int *in_case, const dp_values *want, int *out);

/* ---- a call made again (subject_library.c) ---- */

/* With the same inputs its results must have the same bits; with others, results that follow from
 * the first. The other inputs need no truth of their own. Each value head takes the place of the
 * same one of the next group, with the query and key head that it reads. The heads of a single
 * group take each other's. The last sequence is packed before all others. The tensors q, k, v and
 * do change sign. Then o, dq, dk and dv change sign, all else stays, and every result moves with
 * its head and sequence. */

/* Runs of a command that are called again: the first of one sequence that its subject serves, and
 * as many of packed sequences. Failing runs are, too. */
#define DP_RUNS_CALLED_AGAIN 2

/* To be freed by dp_problem_free. */
dp_problem dp_other_values(const dp_problem *p);
/* Results of dp_other_values(p) become what p's must be. */
void dp_other_values_undo(const dp_problem *p, dp_result *r);
/* In how many results do numbers differ (NaN is NaN)? text: how many entries of the first of those,
 * and where. */
int dp_results_differ(const dp_problem *p, const dp_result *a, const dp_result *b, char *text,
                      size_t size);
