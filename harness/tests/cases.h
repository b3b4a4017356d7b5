/* harness/tests/cases.h - cases for tests: by name from the cases folder, or from text. 0: refused,
 * and the test has failed with the message. */
#pragma once
#include "gt.h"
#include "harness/case/case.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static inline int gt_open_case(const char *name, dp_case *c) {
    dp_err e = {0};
    char *path = dp_case_path(gt_cases(), name);
    const int ok = !dp_case_load(path, c, &e);
    if (!ok) gt_fail(__FILE__, __LINE__, name, "%s", e.msg);
    free(path);
    return ok;
}

static inline int gt_parse_case(const char *text, dp_case *c) {
    dp_err e = {0};
    const int ok = !dp_case_parse(text, strlen(text), "x.case", 1, c, &e);
    if (!ok) gt_fail(__FILE__, __LINE__, text, "%s", e.msg);
    return ok;
}

/* A library of harness/, built under this name; its path, until the next one. */
static inline const char *gt_library(const char *source, const char *name) {
    static char path[600];
    char cmd[2048], said[4096];
    snprintf(path, sizeof path, "%s/%s", gt_tmpdir(), name);
    snprintf(
        cmd, sizeof cmd,
        "cc -O1 -fPIC -shared -ffp-contract=off -I'%s/../harness' '%s/../harness/%s' -o '%s' -lm",
        gt_cases(), gt_cases(), source, path);
    if (gt_run(cmd, said, sizeof said)) gt_fail(__FILE__, __LINE__, source, "%s", said);
    return path;
}
