/* harness/tests/runs.h - runs of a case for tests: judged from its text, and what they hold. */
#pragma once
#include "cases.h"
#include "harness/record/run.h"

/* The runs of a case's text on the simulated ranks with a fault, or on a library; to be freed, the
 * case too. 0: refused, and the test has failed with the message. */
static inline int gt_judge_case(const char *text, dp_fault fault, const dp_subject *lib, dp_case *c,
                                dp_runs *runs) {
    dp_err e = {0};
    const dp_run_options o = {
        .only[DP_ID_BACKEND] = {1, {lib ? DP_BACKEND_SUBJECT : DP_BACKEND_SIM}},
        .subject = lib,
        .limit_s = 20,
        .fault = fault,
        .cache = gt_tmpdir()};
    *runs = (dp_runs){0};
    if (!gt_parse_case(text, c)) return 0;
    if (!dp_case_run(c, &o, runs, &e)) return 1;
    gt_fail(__FILE__, __LINE__, text, "%s", e.msg);
    return 0;
}

/* NULL: no run, or it has no such tensor. */
static inline const dp_judgement *gt_tensor(const dp_run *r, const char *name) {
    for (int i = 0; r && i < r->ntensor; i++)
        if (!strcmp(r->tensor[i].name, name)) return &r->tensor[i];
    return NULL;
}

/* Did the run's fault change anything? */
static inline int gt_acted(const dp_run *r) { return r->hit && memchr(r->hit, 1, (size_t)r->nhit); }
