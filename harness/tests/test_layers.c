/* The folders of ref/ and harness/ use only those before them (scripts/layers). */
#include "gt.h"

#include <stdio.h>

static char out[1 << 14];

static int layers(const char *root) {
    char cmd[2100];
    snprintf(cmd, sizeof cmd, "python3 '%s/scripts/layers'", root);
    return gt_run(cmd, out, sizeof out);
}

DP_TEST(layers, no_folder_uses_one_that_comes_after_it) {
    char root[512];
    snprintf(root, sizeof root, "%s/..", gt_cases());
    CHECK(layers(root) == 0, "%s", out);
}

DP_TEST(layers, an_include_that_goes_up_is_named) {
    char cmd[2048];
    snprintf(cmd, sizeof cmd,
             "cd '%s' && mkdir -p tree/scripts && cp -r '%s/../Makefile' '%s/../ref' "
             "'%s/../harness' tree && cp '%s/../scripts/layers' tree/scripts && "
             "echo '#include \"harness/run/step.h\"' >>tree/ref/chunk/gate.h",
             gt_tmpdir(), gt_cases(), gt_cases(), gt_cases(), gt_cases());
    REQUIRE(gt_run(cmd, out, sizeof out) == 0, "%s", out);
    snprintf(cmd, sizeof cmd, "%s/tree", gt_tmpdir());
    CHECK(layers(cmd) == 1, "%s", out);
}
