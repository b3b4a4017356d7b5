/* harness/record/run_pack.h - runs as bytes that the same build reads again, whole: for another
 * process of it, and for a later one (harness/commands/cmd_run.c).
 *
 * A dp_run as it stands in memory, then what its pointers lead to, one after another. A file of
 * them has a hash, and names this program's sources.
 */
#pragma once
#include "run.h"

/* To be freed. */
char *dp_runs_pack(const dp_runs *r, size_t *bytes);
/* Appends them. case_name: of the case that they must be of. DP_EINPUT: bytes are missing,
 * or runs are of another case; then nothing was appended. Words of a run that outlive it outlive
 * this, too. */
dp_status dp_runs_unpack(const char *from, size_t bytes, const char *case_name, dp_runs *r,
                         dp_err *e);
