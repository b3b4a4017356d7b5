/* run --resume: what a killed command has finished is not run again, and nothing else is taken for
 * it. */
#include "gt.h"

#include <jansson.h>
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

static json_t *runs_of(const char *name) {
    char path[600];
    json_error_t e;
    snprintf(path, sizeof path, "%s/%s", gt_tmpdir(), name);
    json_t *j = json_load_file(path, 0, &e), *runs = json_incref(json_object_get(j, "runs")), *r;
    size_t i;
    json_array_foreach(runs, i, r) json_object_del(r, "seconds");
    json_decref(j);
    return runs;
}

/* A kept run has every field of the one that was made: a member of dp_run that run_bytes.c does not
 * know would be missing here. */
DP_TEST(resume, kept_runs_have_every_field) {
    char out[1 << 14];
    const char *const args = "initial-state session-verify chain-reflect-k32 exact-kda --base bf16 "
                             "--ranks 1,2 --fault state-late --json ";
    for (int i = 0; i < 2; i++) {
        char with[400];
        snprintf(with, sizeof with, "%s%s", args, i ? "kept.json" : "made.json");
        const int rc = run(i ? "" : "rm -rf again;", with, out, sizeof out);
        REQUIRE(rc == 1 || rc == 0, "%.4000s", out);
    }
    json_t *made = runs_of("made.json"), *kept_runs = runs_of("kept.json");
    CHECK(json_array_size(made) > 3, "%zu runs", json_array_size(made));
    for (size_t i = 0; i < json_array_size(made); i++)
        CHECK(json_equal(json_array_get(made, i), json_array_get(kept_runs, i)), "run %zu: %.300s",
              i, json_string_value(json_object_get(json_array_get(made, i), "id")));
    json_decref(made);
    json_decref(kept_runs);
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
