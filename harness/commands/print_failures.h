/* harness/commands/print_failures.h - the failures of many runs by their cause, at the end. */
#pragma once
#include "harness/record/record.h"

/* Runs of one case in which the same tensor fails by the same kind of limit are one entry. It has
 * their number, the first one's place and reason, and the commands that show it again and explain
 * it. Nothing where nothing failed. */
typedef struct {
    const char *own, *subject; /* options behind a blank, or "": of the project's ranks, of a
                                * subject's runs */
    const char *record;        /* as a shell takes it, where the runs will be; NULL: nowhere */
    const char *call;          /* of a subject's caller, who has no command: a line in which {case}
                                * stands for the case; NULL: a command does */
} dp_again;
void dp_print_failures(const dp_runs *runs, const dp_again *again, FILE *f);
/* The first row of a failing tensor beyond its bound, if it has one. Prints also whether a chunk of
 * 64 begins there, and how many rows are beyond. */
void dp_print_begins(const dp_judgement *t, int indent, FILE *f);
/* "deltaproof explain" of that run, as a line for a shell. */
void dp_print_explain(const char *id, const char *record, const char *options, FILE *f);
/* The tensors that fail over many cases together, a line each. */
void dp_print_pooled(const dp_record *rec, FILE *f);
