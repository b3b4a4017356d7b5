/* harness/search/museum.h - every deliberate fault against every case that could show it: the
 * verdict that goes red, and its place. Beside it: whether the thresholds of FLA's tests would have
 * seen it on the same data.
 *
 * A run of a fault acts when the fault changed any number (dp_run.hit; op chain and conv: always).
 * It is red when its verdict fails. Faults of single runs (race, order) are compared with repeated
 * runs instead, bit for bit. Localisation is `deltaproof bisect stage`, on one red run of each
 * case. It is right if it names the fault's own stage, and the fault did act on that rank and head.
 * FLA: relative RMS error of a whole tensor above 5e-3 (o, final state), 8e-3 (gradients), 2e-2
 * (dg, dA_log, ddt_bias), or not finite. Runs above these without the fault do not count.
 *
 * museum.json:
 * {"schema": "deltaproof-museum", "schema_version": 1, "commit", "seconds", "cases",
 *   "clean": {"runs", "red"},
 *   "faults": [{"name", "bug", "stage", "what", "source", "runs", "acted", "red",
 *               "seen": {"id", "T", "ranks", "tensor", "tier", "ratio"} | null,
 *                         the red run of the smallest problem
 *               "ranks": smallest number of ranks that was red,
 *               "located": {"by", "stage", "tensor", "rank", "head", "right"} | null,
 *               "locations": {"right", "of", "astray"},
 *                         astray: first run located wrongly, and where; ""
 *               "fla": {"red", "of"}}],
 *                         of the red runs that FLA's own thresholds pass without the fault
 *   "bugs": [{"number", "what", "note", "faults": [names]}]}
 */
#pragma once
#include "harness/record/run.h"
#include <stdio.h>

typedef struct {
    int all;       /* every case, base, chain and merge; else small cases, chain fp32, all-gather */
    dp_fault only; /* one fault; DP_FAULT_NONE: all */
    int nlocate;   /* red runs of a fault that are localised */
    const char *cache;
    int quiet;
} dp_museum_options;

typedef struct {
    const char *by, *stage;
    char tensor[16];
    int rank, head, right;
} dp_museum_place; /* stage NULL: none found; rank, head -1: none */

typedef struct {
    dp_fault fault;
    int runs, acted, red, fla_red, fla_of, ranks, located, right;
    int64_t T; /* of the smallest red problem */
    char id[512], tensor[24];
    const char *tier;
    double ratio;
    dp_museum_place place;
    char astray[256]; /* the first run located wrongly, and where */
} dp_museum_row;

typedef struct {
    int ncase, clean_runs, clean_red;
    char clean_why[256]; /* first run that is red without a fault */
    dp_museum_row row[DP_NFAULTS];
    double seconds;
} dp_museum;

/* Every fault against every case at the paths; DP_OK although some are not seen. */
dp_status dp_museum_run(char *const *path, int npath, const dp_museum_options *o, dp_museum *m,
                        dp_err *e);
/* The table for people. */
void dp_museum_print(const dp_museum *m, const dp_museum_options *o, FILE *f);
/* museum.json, whole or not at all. */
dp_status dp_museum_write(const dp_museum *m, const char *path, dp_err *e);
/* single runs are within their bounds; it shows when they are repeated */
/* Did it act there? hit: [N*HV] (ranks.h). Sums over ranks have rank -1, what all heads share has
 * head -1, tensors of query heads count those. */
int dp_fault_acted(const dp_problem *p, const unsigned char *hit, int N, int rank, int head,
                   const char *tensor);
/* Does FLA's threshold see it? name as in dp_result_fields; 0 for tensors that its tests do not
 * compare. */
int dp_fla_sees(const char *name, double rel_fro);

/* ---- the CUDA kernels ---------------------------------------------------------------------------
 * Faults of gpu/fault.cuh, in the build of gpu/tests/cpu that can switch them on.
 *
 * Each fault runs in a process of its own through a list of small problems, smallest first, until
 * one is red. The field `right` says whether the first wrong tensor of the pipeline is one that can
 * show the fault first. Without a fault all problems must be green.
 *
 * kernels.json:
 * {"schema": "deltaproof-museum-kernels", "schema_version": 1, "commit", "seconds",
 *   "clean": {"runs", "red"},
 *   "faults": [{"name", "bug", "what", "shows", "runs", "red",
 *               "seen": {"id", "T", "ranks", "tensor", "tier", "rank", "head", "says",
 *                        "source"} | null,
 *               "right", "fla"}]}
 */
typedef struct {
    /* died: the signal that ended its process */
    int fault, runs, red, right, fla, ranks, rank, head, died;
    int64_t T;
    /* says: why it is red; source: whose data an exact case finds there (source.h) */
    char id[512], tensor[24], tier[16], says[400], source[400];
} dp_kernel_row;
#define DP_MOST_KERNEL_FAULTS 128 /* museum_kernels.c asserts that it is enough */
typedef struct {
    int n;
    dp_kernel_row row[DP_MOST_KERNEL_FAULTS];
    double seconds;
} dp_kernel_museum; /* row [0]: no fault */
/* DP_EINPUT: this build's kernels have no faults. only: NULL, or names, "a,b". */
dp_status dp_kernel_museum_run(const char *cases_dir, const char *cache, const char *only,
                               dp_kernel_museum *m, dp_err *e);
/* The table for people. */
void dp_kernel_museum_print(const dp_kernel_museum *m, FILE *f);
/* kernels.json, whole or not at all. */
dp_status dp_kernel_museum_write(const dp_kernel_museum *m, const char *path, dp_err *e);
/* faults not seen, and red runs without one */
int dp_kernel_museum_unseen(const dp_kernel_museum *m);
