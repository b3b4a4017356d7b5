/* harness/record/run_json.h - runs as JSON that the same program reads again, whole: for another
 * process of it, and for a later one (harness/commands/cmd_run.c).
 *
 * Every member of dp_run is a row of a table (schema.h). Numbers are hexadecimal texts, so that a
 * reader gets them bit for bit. A reader checks the table, and then rules that hold for every run:
 * its ID describes its settings, its verdict follows from its tensors.
 */
#pragma once
#include "run.h"
#include "schema.h"
#include <jansson.h>

extern const dp_object_schema dp_run_members; /* of a dp_run: every member */

/* A list, of the caller's. */
json_t *dp_runs_json(const dp_runs *r);
/* Appends them. case_name: of the case that they must be of; NULL: any. DP_EINPUT: path, the run
 * and the field are named, and nothing was appended. Words of a run that outlive it outlive this,
 * too. */
dp_status dp_runs_from_json(const json_t *list, const char *path, const char *case_name, dp_runs *r,
                            dp_err *e);

/* The same as text, to be freed. */
char *dp_runs_pack(const dp_runs *r, size_t *bytes);
dp_status dp_runs_unpack(const char *from, size_t bytes, const char *path, const char *case_name,
                         dp_runs *r, dp_err *e);
