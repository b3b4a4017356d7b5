/* harness/commands/write_record.h - what run and judge leave behind: the record where --json says
 * and in the folder of --out. There reports/report.py writes junit.xml, summary.md, page and
 * figures. */
#pragma once
#include "harness/record/record.h"
#include "options.h"

/* Can everything that the command will write be written? Asked before it; 0, or 2 after a message.
 * It also removes an earlier command's outputs in the folder of --out. */
int dp_outputs_check(const dp_options *o);

/* Writes, prints digest and verdict; the exit status of the command. */
int dp_record_finish(const dp_options *o, const dp_record *rec);

/* Outputs of an earlier command are removed before anything is computed, so that a program which
 * ends early leaves no older verdict. The folder (NULL: none) loses record, junit.xml, summary.md,
 * page, and the figures that the page shows. Nothing else in it is this program's. json: a file
 * that the command writes, or NULL. It stays if it is no record, no comparison, and no list of
 * `check`, `differ` or `carry`. */
void dp_old_outputs_remove(const char *folder, const char *json);
/* The same at the program's end, if that is a failure. The arguments, which may be wrong, name the
 * folder as --out, the file as --json, and a page as --history. */
void dp_old_outputs_expect(int argc, char **argv);
/* dp_parse with that, if it ends the program. */
void dp_parse_writing(const struct argp *a, int argc, char **argv, void *input);
/* The last value of an option, as --NAME=VALUE or --NAME VALUE, or of its first letters, which
 * commands take, too; NULL: it is not there. */
const char *dp_argument(const char *name, int argc, char **argv);
