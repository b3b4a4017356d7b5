/* harness/tests/cases.h - cases for tests: by name from the cases folder, or from text. 0: refused,
 * and the test has failed with the message. */
#ifndef DP_TESTS_CASES_H
#define DP_TESTS_CASES_H
#include "gt.h"
#include "harness/case/case.h"
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
#endif
