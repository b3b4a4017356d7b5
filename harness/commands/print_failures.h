/* harness/commands/print_failures.h - the failures of many runs by their cause, at the end. */
#ifndef DP_PRINT_FAILURES_H
#define DP_PRINT_FAILURES_H
#include "harness/record/record.h"

/* Runs of one case in which the same tensor fails by the same kind of limit are one entry: how
 * many, the first one's place and reason, and the commands that show it again and explain it.
 * subject: the option that names it, behind a blank, or "". Nothing where nothing failed. */
void dp_print_failures(const dp_runs *runs, const char *subject, FILE *f);
/* The tensors that fail over many cases together, a line each. */
void dp_print_pooled(const dp_record *rec, FILE *f);
/* Both as Markdown for the page of a CI job: verdict, totals, a table of causes. */
void dp_write_summary(const dp_record *rec, FILE *f);

#endif
