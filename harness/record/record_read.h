/* harness/record/record_read.h - a record (record.h) that is read again: its form is checked, and
 * its runs and their tensors are found by name.
 *
 * Every text that a caller may print is text (ref/vocabulary/text.h). Verdicts are those of
 * record.h. Errors are numbers, "nan", "inf", "-inf", null or absent. A run names no tensor twice.
 * Fields that are not listed here are kept and not looked at.
 */
#pragma once
#include "ref/vocabulary/problem.h"
#include <jansson.h>

typedef struct {
    json_t *root;
    json_t *runs;        /* object: ID -> run; ID#2, ID#3 .. for those that come again */
    const char *commit;  /* "": not said */
    const char *digest;  /* of all results of simulated ranks (record.h); "": it has none */
    const char *verdict; /* "pass", "fail", "error" */
    int64_t errors;      /* cases that could not be judged */
} dp_old_record;

/* path: a file, or a folder that holds results.json. DP_EIO, DP_EINPUT: the message names file and
 * field; then nothing needs freeing. */
dp_status dp_old_record_read(const char *path, dp_old_record *r, dp_err *e);
dp_status dp_old_record_parse(const char *bytes, size_t n, const char *path, dp_old_record *r,
                              dp_err *e);
void dp_old_record_free(dp_old_record *r);

/* "" where there is none. */
const char *dp_old_text(const json_t *object, const char *key);

/* A tensor of a run by its name, or all of them (an object: name -> tensor); NULL: there is
 * none. */
const json_t *dp_old_tensor(const json_t *run, const char *name);
json_t *dp_old_tensors(const json_t *run);

/* The error of the whole tensor (rank -1) or of one rank; NAN where there is none. */
double dp_old_error(const json_t *tensor, int rank);
int dp_old_ranks(const json_t *tensor);
