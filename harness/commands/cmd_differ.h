/* harness/commands/cmd_differ.h - what `deltaproof differ` found, shown. */
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
void dp_differ_claim(const dp_check_subject *s, char *out, size_t size);

void dp_differ_print(const dp_differ_answer *a, FILE *f);
json_t *dp_differ_json(const dp_differ_answer *a);

#endif
