/* harness/commands/finished.h - cases that are finished, kept in a folder (run --resume DIR), so
 * that the same command goes on where it was ended.
 *
 * A file a case, named by the inputs of its runs. They are this program's sources, the case with
 * its inputs, the options that choose runs, the bytes of a library. For a program (--run, --serve)
 * its command stands for the bytes. A file is JSON (harness/record/run_json.h), checked by the
 * table of its fields and by rules that hold for every run. A file that fails is named with the
 * field, and its case is run again.
 */
#ifndef DP_FINISHED_H
#define DP_FINISHED_H
#include "harness/record/run.h"
#include "ref/files/cache.h"

dp_key dp_finished_key(const dp_case *c, const dp_run_options *o);
/* 1: its runs are appended. */
int dp_finished_load(const char *dir, dp_key key, const char *case_name, dp_runs *runs);
/* A failure is said on standard error: it costs the next command its time. */
void dp_finished_save(const char *dir, dp_key key, const char *case_name, const dp_runs *runs);

#endif
