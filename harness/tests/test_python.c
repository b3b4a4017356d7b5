/* scripts/python/deltaproof.py, in a Python that has numpy. */
#include "gt.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char out[1 << 16];

static const char *python(void) {
    const char *p = getenv("DP_PYTHON");
    return p && *p ? p : "python3";
}

DP_TEST(python, assert_explained_passes_and_raises_as_its_text_says) {
    char cmd[3000];
    snprintf(cmd, sizeof cmd, "%s -c 'import numpy'", python());
    if (gt_run(cmd, out, sizeof out)) SKIP("%s cannot import numpy", python());
    snprintf(cmd, sizeof cmd,
             "PYTHONDONTWRITEBYTECODE=1 DELTAPROOF='%s' %s "
             "'%s/../harness/tests/data/assert_explained.py' '%s/cache'",
             gt_program(), python(), gt_cases(), gt_tmpdir());
    CHECK(gt_run(cmd, out, sizeof out) == 0 && strstr(out, "all as it should be"), "%s", out);
    snprintf(
        cmd, sizeof cmd,
        "cd '%s/../scripts/python' && PATH=/usr/bin:/bin DELTAPROOF= PYTHONDONTWRITEBYTECODE=1 %s "
        "-c 'import os, deltaproof as d; d.__file__ = \"/nowhere/a/b/c.py\"; d.program()'",
        gt_cases(), python());
    CHECK(gt_run(cmd, out, sizeof out) != 0 && strstr(out, "name it with the variable DELTAPROOF"),
          "%s", out);
}
