/* harness/commands/cmd_differ.h - what `deltaproof differ` found, shown.
 *
 * --json: a list, an object for each case:
 *   case T HV K V ranks, verdict (dp_differ_names, or "no result", "refused": then side and why),
 *   status (the exit status), first_beyond (a name, where one is), no_truth (why it was not asked)
 *   A, B      name, claim, seconds; no_bounds (why); truth (its verdict), why
 *   tensors   name, kind (result, stage), made_by (both, A, B), entries, different, verdict;
 *             where they differ: relative (of the tensor), largest (difference, a, b, index and
 *             place), worst_row (difference, allowed, share of what both bounds allow, place)
 * A place is rank, sequence, chunk, token, head, -1 where there is none.
 */
#ifndef DP_CMD_DIFFER_H
#define DP_CMD_DIFFER_H
#include "harness/record/run.h"
#include "harness/search/differ.h"
#include <jansson.h>
#include <stdio.h>

/* One answer. truth: a run of each judged against the truth, or NULL: there was no need, or
 * no_truth says why not. */
typedef struct {
    const char *case_name;
    const dp_problem *p;
    int N;
    const dp_check_subject *s; /* [2] */
    const dp_differ *d;
    const dp_run *truth[2];
    char no_truth[200];
    int status; /* the exit status that it makes */
} dp_differ_answer;

/* "python mine.py", "sim"; "base bf16, chain fp32, design recurrent" */
const char *dp_differ_name(const dp_check_subject *s);

void dp_differ_print(const dp_differ_answer *a, FILE *f);
json_t *dp_differ_json(const dp_differ_answer *a);

#endif
