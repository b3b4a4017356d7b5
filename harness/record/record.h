/* harness/record/record.h - the record of a run: JSON of a versioned schema.
 *
 * Its fields, one by one: record_schema.c, or `deltaproof list --schema`. Readers must ignore
 * fields they do not know; a field never changes its meaning within one schema_version. Non-finite
 * numbers are the strings "nan", "inf", "-inf". Errors are relative to the truth's norm unless said
 * otherwise.
 */
#pragma once
#include "harness/verdict/levels.h"
#include "ref/vocabulary/problem.h"
#include "run.h"
#include "schema.h"
#include <jansson.h>

/* ---- provenance ------------------------------------------------------------------------------ */

/* The sources of a record's numbers: files by their hashes, the kernel's commit, a label, and a
 * caller's description of its surroundings. */
#define DP_MAX_NOTES 64
typedef struct {
    const char *label, *kernel_commit; /* NULL: not said */
    int nnote;
    const char *note[DP_MAX_NOTES]; /* KEY=VALUE, KEY not empty */
    int nfile;
    struct {
        const char *role, *path;
        int64_t bytes;
        char xxh128[33];
    } file[3];
} dp_provenance;

/* Hashes the file as it is now. path NULL, or a file that cannot be read (which its reader says):
 * nothing is added. */
void dp_provenance_file(dp_provenance *p, const char *role, const char *path);

/* The value of the note KEY; NULL: there is none. */
const char *dp_provenance_note(const dp_provenance *p, const char *key);

/* NULL: there is nothing to say. */
json_t *dp_provenance_json(const dp_provenance *p);
extern const dp_object_schema dp_provenance_schema; /* what it says */

/* ---- the record ------------------------------------------------------------------------------ */

/* One tensor of one kernel over all its cases (dp_over_cases). */
typedef struct {
    dp_backend backend;
    dp_cuda_variant variant;
    dp_base base;
    int undeclared;
    dp_fault fault;
    const char *tensor; /* of the runs */
    dp_pooled is;
    dp_verdict verdict;
} dp_pooled_row;

typedef struct {
    const dp_runs *runs;
    int ncase;
    dp_case *const *cases;
    double seconds;
    int errors;                      /* cases that could not be judged at all */
    int empty;                       /* ones that offer no run with these options */
    const char *command;             /* what made it; NULL: not said */
    const dp_provenance *provenance; /* NULL: not said */
    int npooled;
    dp_pooled_row *pooled;
} dp_record;

/* How many runs have each verdict. */
void dp_record_totals(const dp_record *r, int n[DP_NVERDICTS]);
/* Sets r->pooled, which dp_over_cases_free frees; r->runs must be set. A row for every
 * backend, variant, base and tensor that draws expect an error of in DP_POOLED_CASES cases or more.
 * Undeclared runs and those with a fault count apart. */
void dp_over_cases(dp_record *r);
void dp_over_cases_free(dp_record *r);
/* Rows of r->pooled that fail. */
int dp_record_pooled_failures(const dp_record *r);
/* Tensors of all runs that are unjudged, those that may be among them. */
int dp_record_unjudged(const dp_record *r);
/* Cases of which a run was judged. */
int dp_record_cases_run(const dp_record *r);
/* "fail": a run, or many together. "error": a run is unjudged, a case could not be judged, or fewer
 * than half of the cases ran. Else "pass". */
const char *dp_record_verdict(const dp_record *r);
/* A row in words, at most `size` characters: who, by how much, in how many cases. */
void dp_pooled_text(const dp_pooled_row *row, char *text, size_t size);
/* "-": stdout; else by rename */
dp_status dp_record_write_json(const dp_record *r, const char *path, dp_err *e);

/* ---- the digest ------------------------------------------------------------------------------ */

/* One number for all results that are the same on every machine.
 *
 * The digest covers runs of simulated ranks: recurrences, chains, convolutions, training steps.
 * They run in one process (backend sim) or each in one of its own (backend mpi, written as backend
 * sim: the same bits). Kernels, libraries, files and the chunk solver over LAPACKE have the bits of
 * their machine, and are left out. The digest is XXH3-128 of one text a run, sorted:
 *
 *     run ID VERDICT TRUTH BITS radius audit condition inverse entry slope
 *     tensor NAME VERDICT TIER error bound ratio worst expected excess, then ratio median limit
 *         freedom draw of each level of verdict/levels.h
 *     ranks error of each rank
 *     point rank chunks error effect bound abs norm
 *     bits store operand accumulate truncated
 *
 * Numbers are the 16 digits of their encoding as a double, -0 as 0, every NaN as `nan`. So it does
 * not depend on the order of execution, threads, time, or the cache.
 */

typedef struct {
    char hex[33];
    int runs; /* covered; 0: there is no digest */
} dp_digest;
/* The digest of those runs that are covered. */
dp_digest dp_digest_of(const dp_runs *r);
