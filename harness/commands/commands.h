/* harness/commands/commands.h - the commands of the program. argv[0] is what
 * messages begin with, `deltaproof NAME`; each returns the exit status. */
#pragma once
#include "ref/vocabulary/problem.h"

int dp_cmd_list(int argc, char **argv);    /* cmd_list.c */
int dp_cmd_run(int argc, char **argv);     /* cmd_run.c */
int dp_cmd_judge(int argc, char **argv);   /* cmd_judge.c */
int dp_cmd_explain(int argc, char **argv); /* cmd_explain.c */
int dp_cmd_check(int argc, char **argv);   /* cmd_check.c */
int dp_cmd_carry(int argc, char **argv);   /* cmd_carry.c */
int dp_cmd_museum(int argc, char **argv);  /* cmd_museum.c */
int dp_cmd_bisect(int argc, char **argv);  /* cmd_bisect.c */
int dp_cmd_shrink(int argc, char **argv);  /* cmd_shrink.c */
int dp_cmd_compare(int argc, char **argv); /* cmd_compare.c */
int dp_cmd_inputs(int argc, char **argv);  /* cmd_truth.c */
int dp_cmd_differ(int argc, char **argv);  /* cmd_differ.c */
int dp_cmd_truth(int argc, char **argv);   /* cmd_truth.c */
int dp_cmd_report(int argc, char **argv);  /* cmd_report.c */
int dp_cmd_index(int argc, char **argv);   /* cmd_report.c */

/* cmd_run.c, in another process of mpirun than the first: runs the cases that this gives it;
 * message: what it was called with (DP_MPI_SWEEP). */
enum { DP_SWEEP_BYTES = 2 * sizeof(int) };
void dp_run_shared(int argc, char **argv, const void *message);

/* options.c: says on standard error why, and returns the exit status 2. */
int dp_refuse(const dp_err *e);

/* cmd_report.c: becomes, or runs, a script of the program's tree, or at an absolute path; `words`
 * end with NULL. Returns its exit status, 2 where it cannot be run or is killed. */
int dp_script_become(const char *script, char *const *words);
/* The same of a command's own words; before them this program's path, for a script that runs it. */
int dp_script_with_self(const char *script, char *const *argv);
int dp_script_run(const char *script, char *const *words);
/* Runs reports/report.py, or the script that DP_REPORT names, on the folder of a
 * record. Errors are printed on standard error. */
int dp_report_page(const char *folder);
