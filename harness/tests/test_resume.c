/* run --resume: what a killed command has finished is not run again, and nothing else is taken for
 * it. */
#include "gt.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int run(const char *before, const char *args, char *out, int size) {
    char cmd[4096];
    snprintf(cmd, sizeof cmd,
             "cd '%s' && %s '%s' run --cases '%s' %s --chain fp32 --backend sim --cache none "
             "--resume again",
             gt_tmpdir(), before, gt_program(), gt_cases(), args);
    return gt_run(cmd, out, size);
}

static const char *after(const char *out, const char *word) {
    const char *at = strstr(out, word);
    return at ? at : "";
}

/* The lines from the digest on. */
static void same_end(const char *a, const char *b) {
    CHECK(*after(a, "digest: ") && !strcmp(after(a, "digest: "), after(b, "digest: ")),
          "%.2000s\nand then\n%.2000s", a, b);
}

/* Case smoke-mkda2 took no time: it was not run. */
static int kept(const char *out) {
    const char *line = after(out, "smoke-mkda2 ");
    const char *end = strchr(line, '\n');
    return end && end - line > 7 && !strncmp(end - 7, "(0.0 s)", 7);
}

DP_TEST(resume, finished_cases_are_not_run_again) {
    char first[1 << 14], out[1 << 14];
    const char *const both = "smoke-mkda2 packed-across --base fp32 --ranks 1";
    REQUIRE(run("", both, first, sizeof first) == 0 && !kept(first), "%.4000s", first);
    REQUIRE(run("", both, out, sizeof out) == 0 && kept(out), "%.4000s", out);
    same_end(first, out);
    /* Half a file, another byte: each is run again, and kept again. */
    REQUIRE(run("for f in again/*.runs; do truncate -s 1000 $f; done;", both, out, sizeof out) == 0,
            "%.4000s", out);
    CHECK(!kept(out) && strstr(out, ": damaged, its case is run again"), "%.4000s", out);
    same_end(first, out);
    REQUIRE(run("for f in again/*.runs; do printf x | dd of=$f bs=1 seek=200 conv=notrunc "
                "2>/dev/null; done;",
                both, out, sizeof out) == 0,
            "%.4000s", out);
    CHECK(!kept(out) && strstr(out, ": damaged, its case is run again"), "%.4000s", out);
    REQUIRE(run("", both, out, sizeof out) == 0 && kept(out), "%.4000s", out);
}

DP_TEST(resume, other_options_and_other_inputs_are_run) {
    char out[1 << 14], cmd[2048];
    REQUIRE(run("rm -rf again;", "smoke-mkda2 --base fp32 --ranks 1", out, sizeof out) == 0 &&
                !kept(out),
            "%.4000s", out);
    REQUIRE(run("", "smoke-mkda2 --base fp32 --ranks 1", out, sizeof out) == 0 && kept(out),
            "%.4000s", out);
    CHECK(run("", "smoke-mkda2 --base fp32 --ranks 3", out, sizeof out) == 0 && !kept(out),
          "%.4000s", out);
    CHECK(run("", "smoke-mkda2 --base fp64 --ranks 1", out, sizeof out) == 0 && !kept(out),
          "%.4000s", out);
    snprintf(cmd, sizeof cmd, "sed '$a seed = 4711' '%s/smoke-mkda2.case' >'%s/smoke-mkda2.case'",
             gt_cases(), gt_tmpdir());
    REQUIRE(gt_run(cmd, out, sizeof out) == 0, "%s", out);
    CHECK(run("", "smoke-mkda2 --cases . --base fp32 --ranks 1", out, sizeof out) == 0 &&
              !kept(out),
          "%.4000s", out);
}

/* Killed after the first of three: that one is there. */
DP_TEST(resume, a_killed_command_goes_on) {
    char cmd[4096], out[1 << 14], whole[1 << 14];
    const char *const args = "smoke-mkda2 packed-across smoke-step --base fp64 --ranks 1";
    snprintf(cmd, sizeof cmd,
             "cd '%s' && rm -rf again; '%s' run %s --cases '%s' --chain fp32 --backend sim --cache "
             "none --resume again >said 2>&1 & p=$!\n"
             "cd '%s'; for i in $(seq 2400); do ls again/*.runs >/dev/null 2>&1 && break; sleep "
             "0.02; done; kill -KILL $p; wait $p 2>/dev/null; ls again/*.runs",
             gt_tmpdir(), gt_program(), args, gt_cases(), gt_tmpdir());
    REQUIRE(gt_run(cmd, out, sizeof out) == 0, "%.4000s", out);
    REQUIRE(run("", args, out, sizeof out) == 0 && strstr(out, "(0.0 s)"), "%.4000s", out);
    REQUIRE(run("rm -rf again;", args, whole, sizeof whole) == 0, "%.4000s", whole);
    same_end(whole, out);
}
