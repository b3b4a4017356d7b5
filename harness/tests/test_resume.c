/* run --resume: what a killed command has finished is not run again, and nothing else is taken for
 * it. */
#include "gt.h"
#include "harness/record/run_pack.h"

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

/* The case took no time: it was not run. */
static int kept_case(const char *out, const char *name) {
    const char *line = after(out, name);
    const char *end = strchr(line, '\n');
    return end && end - line > 7 && !strncmp(end - 7, "(0.0 s)", 7);
}
static int kept(const char *out) { return kept_case(out, "smoke-mkda2 "); }

/* A record without what differs from one time to the next. */
static json_t *record_of(const char *name) {
    char path[600];
    json_error_t e;
    snprintf(path, sizeof path, "%s/%s", gt_tmpdir(), name);
    json_t *j = json_load_file(path, 0, &e), *r;
    size_t i;
    json_object_del(json_object_get(j, "program"), "command");
    json_object_del(j, "created");
    json_object_del(j, "seconds");
    json_array_foreach(json_object_get(j, "runs"), i, r) json_object_del(r, "seconds");
    return j;
}

static json_t *runs_of(const char *name) {
    json_t *j = record_of(name), *runs = json_incref(json_object_get(j, "runs"));
    json_decref(j);
    return runs;
}

/* A kept run has every field of the one that was made. */
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
    CHECK(!kept(out) && strstr(out, "its case is run again"), "%.4000s", out);
    same_end(first, out);
    REQUIRE(run("for f in again/*.runs; do printf x | dd of=$f bs=1 seek=200 conv=notrunc "
                "2>/dev/null; done;",
                both, out, sizeof out) == 0,
            "%.4000s", out);
    CHECK(!kept(out) && strstr(out, "its case is run again"), "%.4000s", out);
    REQUIRE(run("", both, out, sizeof out) == 0 && kept(out), "%.4000s", out);
}

/* Runs that no backend made are kept like others. */
DP_TEST(resume, a_case_with_skipped_runs_is_not_run_again) {
    char cmd[4096], out[1 << 14];
    snprintf(cmd, sizeof cmd,
             "cd '%s' && '%s' run --cases '%s' smoke-kda --base fp32 --chain fp32 --ranks 1 "
             "--backend sim,cuda --cache none --resume skipped",
             gt_tmpdir(), gt_program(), gt_cases());
    for (int i = 0; i < 2; i++) {
        const int rc = gt_run(cmd, out, sizeof out);
        CHECK(rc == 0 && kept_case(out, "smoke-kda ") == i && !strstr(out, "is run again"),
              "%d: %.4000s", rc, out);
    }
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

/* A program whose code another file has: its name says nothing of that. */
DP_TEST(resume, a_program_is_run_again_but_where_its_commit_is_named) {
    char out[1 << 14];
    static const struct {
        const char *before, *with;
        int status, kept;
    } row[] = {
        {"cp $E prog.py; rm -rf again;", "", 0, 0},
        {"sed -i 's/^def forward(.*/&\\n    x = {**x, \"v\": 2 * x[\"v\"]}/' prog.py;", "", 1, 0},
        {"cp $E prog.py;", "--kernel-commit a", 0, 0},
        {"", "--kernel-commit a", 0, 1},
        {"", "--kernel-commit a --again 0", 0, 0},
        {"", "--kernel-commit b", 0, 0}};
    if (!getenv("DP_PYTHON")) setenv("DP_PYTHON", "python3", 1);
    if (gt_run("\"$DP_PYTHON\" -c 'import numpy'", out, sizeof out)) SKIP("numpy is not installed");
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        char cmd[4096];
        snprintf(cmd, sizeof cmd,
                 "cd '%s' && E='%s/../harness/subject/example_program.py' && %s echo 'import prog; "
                 "prog.serve()' >kernel.py && '%s' run --cases '%s' smoke-kda --base fp32 "
                 "--cache none --resume again --serve \"$DP_PYTHON kernel.py\" %s",
                 gt_tmpdir(), gt_cases(), row[i].before, gt_program(), gt_cases(), row[i].with);
        const int rc = gt_run(cmd, out, sizeof out);
        CHECK(rc == row[i].status && kept_case(out, "smoke-kda  ") == row[i].kept,
              "%zu: %d: %.3000s", i, rc, out);
        CHECK(!!strstr(out, "may have changed") == !*row[i].with, "%zu: %.3000s", i, out);
    }
}

/* Killed after the first of three: that one is there. */
DP_TEST(resume, a_killed_command_goes_on) {
    char cmd[4096], out[1 << 14], whole[1 << 14];
    const char *const args = "smoke-mkda2 packed-across smoke-step --base fp32 --ranks 1";
    snprintf(cmd, sizeof cmd,
             "cd '%s' && rm -rf again; '%s' run %s --cases '%s' --chain fp32 --backend sim --cache "
             "none --resume again >said 2>&1 & p=$!\n"
             "cd '%s'; for i in $(seq 2400); do ls again/*.runs >/dev/null 2>&1 && break; sleep "
             "0.02; done; kill -KILL $p; wait $p 2>/dev/null; ls again/*.runs",
             gt_tmpdir(), gt_program(), args, gt_cases(), gt_tmpdir());
    REQUIRE(gt_run(cmd, out, sizeof out) == 0, "%.4000s", out);
    snprintf(cmd, sizeof cmd, "%s --json went-on.json", args);
    REQUIRE(run("", cmd, out, sizeof out) == 0 && strstr(out, "(0.0 s)"), "%.4000s", out);
    snprintf(cmd, sizeof cmd, "%s --json whole.json", args);
    REQUIRE(run("rm -rf again;", cmd, whole, sizeof whole) == 0, "%.4000s", whole);
    same_end(whole, out);
    json_t *a = record_of("went-on.json"), *b = record_of("whole.json");
    CHECK(json_object_get(b, "pooled") && json_equal(a, b), "the records differ");
    json_decref(a);
    json_decref(b);
}

/* Runs that are cut, or of another case, are refused whole. */
DP_TEST(resume, packed_runs_that_are_cut_are_refused) {
    DP_FREED(dp_case_free) dp_case c;
    DP_FREED(dp_runs_free) dp_runs r = {0}, got = {0};
    dp_err e = {0};
    char path[600];
    static const int ranks = 1;
    const dp_base base = DP_BASE_FP32;
    const dp_run_options o = {
        .only = {[DP_ID_RANKS] = {1, {ranks}}, [DP_ID_BASE] = {1, {(int)base}}}};
    snprintf(path, sizeof path, "%s/smoke-mkda2.case", gt_cases());
    REQUIRE(!dp_case_load(path, &c, &e) && !dp_case_run(&c, &o, &r, &e), "%s", e.msg);
    REQUIRE(r.n > 0, "no run");
    size_t n;
    DP_OWN char *packed = dp_runs_pack(&r, &n);
    CHECK(!dp_runs_unpack(packed, n, "smoke-mkda2", &got, &e) && got.n == r.n, "%s", e.msg);
    CHECK(dp_runs_unpack(packed, n, "smoke-kda", &got, &e) && got.n == r.n, "of another case");
    for (size_t cut = 1; cut < n; cut += 1 + n / 400) {
        DP_OWN char *part = dp_alloc(1, cut); /* its end is the block's */
        memcpy(part, packed, cut);
        DP_FREED(dp_runs_free) dp_runs some = {0};
        CHECK(dp_runs_unpack(part, cut, "smoke-mkda2", &some, &e) ? !some.n : some.n < r.n, "%zu",
              cut);
    }
}
