/* Kernels in shared libraries. The two examples of harness/subject pass, built by the command in
 * their own head. Every misbehaviour of a library is a verdict that says so, and never the end of
 * the program. */
#include "cases.h"
#include "harness/record/run.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CASE                                                                            \
    "reason = r\nsource = s\nop = kda\nT = 96\nH = 1\nHV = 2\nK = 8\nV = 4\ng_scale = " \
    "0.02\ns0_scale = 1\nranks = 1,4\nbase = fp32\nchain = fp32\n"

static char out[1 << 16];

typedef struct {
    dp_case c;
    dp_subject s;
    dp_runs runs;
} trial;

/* All runs of the case by the library; limit_s for each. */
static int run(int line, const char *bad, double limit_s, trial *t) {
    dp_err e = {0};
    setenv("BAD", bad, 1);
    const dp_run_options o = {
        .only[DP_ID_BACKEND] = {1, {DP_BACKEND_SUBJECT}}, .subject = &t->s, .limit_s = limit_s};
    const dp_status st = dp_case_run(&t->c, &o, &t->runs, &e);
    unsetenv("BAD");
    if (st) gt_fail(__FILE__, line, bad, "%s", e.msg);
    return !st;
}

static int try(int line, const char *lib, const char *text, const char *bad, double limit_s,
               trial *t) {
    dp_err e = {0};
    memset(t, 0, sizeof *t);
    if (dp_subject_open(lib, 0, 0, &t->s, &e)) {
        gt_fail(__FILE__, line, lib, "%s", e.msg);
        return 0;
    }
    return gt_parse_case(text, &t->c) && run(line, bad, limit_s, t);
}
#define TRY(...) \
    if (!try(__LINE__, __VA_ARGS__)) return

static void done(trial *t) { dp_runs_free(&t->runs), dp_case_free(&t->c), dp_subject_close(&t->s); }

DP_TEST(subject, the_example_passes_forward_and_backward_on_every_form_of_gate_beta_and_keys) {
    const char *lib = gt_library("subject/example_subject.c", "example.so");
    const char *forms[] = {
        "op = kda\nH = 2\nHV = 4\ngate = softplus\nbeta = sigmoid\nl2norm = yes\ng_mean = -4\n",
        "op = gdn\nH = 2\ngate = softplus\nbeta = sigmoid2\nl2norm = yes\ng_mean = -4\n",
        "op = kda\nH = 1\ngate = lower_bound\nlower_bound = -5\ncu_seqlens = 0,7,7,70,100\n",
        "op = mkda\nR = 2\nH = 1\nHV = 2\ng_scale = 0.02\ns0_scale = 1\ndstate = yes\nbeta_hi = "
        "0.5\n"};
    for (int i = 0; i < 4; i++) {
        trial t;
        char text[512];
        snprintf(text, sizeof text,
                 "reason = r\nsource = s\nT = 100\nK = 16\nV = 8\nranks = 1,2\nbase = fp32\n%s",
                 forms[i]);
        TRY(lib, text, "", 20, &t);
        CHECK(t.runs.n == 1 && t.runs.run[0].verdict == DP_PASS, "form %d: %d runs: %s", i,
              t.runs.n, t.runs.run[0].why); /* one rank: it says that it has no more */
        CHECK(t.runs.run[0].ntensor >= 7 && !strcmp(t.runs.run[0].outcome, "returned") &&
                  !strcmp(t.runs.run[0].path, "example"),
              "form %d: %d tensors", i, t.runs.run[0].ntensor);
        for (int j = 0; j < t.runs.run[0].ntensor; j++)
            CHECK(t.runs.run[0].tensor[j].rel_fro < 1e-5, "form %d: %s off by %g", i,
                  t.runs.run[0].tensor[j].name, t.runs.run[0].tensor[j].rel_fro);
        done(&t);
    }
}

/* A step recurrence rounds its state at every token, the pipeline once a chunk: more error in the
 * same formats, and as right. */
DP_TEST(subject, a_step_recurrence_in_fp32_is_right) {
    const char *lib = gt_library("tests/data/step_subject.c", "step.so"),
               *names[] = {"lower-bound", "smoke-gdn", "packed-empty"};
    for (int i = 0; i < 3; i++) {
        trial t = {0};
        dp_err e = {0};
        REQUIRE(!dp_subject_open(lib, 0, 0, &t.s, &e) && gt_open_case(names[i], &t.c), "%s", e.msg);
        t.c.backward = 0;
        if (!run(__LINE__, "", 20, &t)) return;
        CHECK(t.runs.n == 1 && t.runs.run[0].verdict == DP_PASS, "%s: %s", names[i],
              t.runs.n ? t.runs.run[0].why : "no run");
        done(&t);
    }
}

DP_TEST(subject, ranks_that_share_an_all_gather_pass_with_their_stages) {
    const char *lib = gt_library("subject/example_ranks.c", "ranks.so");
    const char *cases[] = {
        CASE,
        "reason = r\nsource = s\nop = gdn\nT = 120\nHV = 2\nH = 1\nK = 8\nV = 4\ng_scale = "
        "0.02\ncu_seqlens = 0,5,5,95,100,120\nranks = 1,2,3,8\nbase = fp32\n",
        "reason = r\nsource = s\nop = kda\nkeys = exact\nT = 192\nH = 1\nHV = 2\nK = 16\nV = "
        "8\nranks = 1,3\nbase = fp32\n"};
    const int runs[] = {2, 4, 2};
    for (int i = 0; i < 3; i++) {
        trial t;
        TRY(lib, cases[i], "", 20, &t);
        CHECK(t.runs.n == runs[i], "%d runs", t.runs.n);
        for (int j = 0; j < t.runs.n; j++) {
            const dp_run *r = &t.runs.run[j];
            CHECK(r->verdict == DP_PASS, "%s: %s", r->id, r->why);
            CHECK(r->ntensor == (r->ranks == 1 ? 2 : 5), "%s: %d tensors", r->id, r->ntensor);
        }
        done(&t);
    }
}

DP_TEST(subject, what_goes_wrong_is_reported_as_what_it_is) {
    const struct {
        const char *bad, *outcome;
        dp_verdict verdict;
        const char *says[3];
    } what[] = {
        {"crash", "crashed", DP_FAIL, {"rank 3 crashed: SIGSEGV at address 0x0", "bad.so+0x"}},
        {"abort", "crashed", DP_FAIL, {"rank 3 crashed: SIGABRT"}},
        {"hang",
         "hung",
         DP_FAIL,
         {"did not return within 3 s", "rank 0 returned", "rank 3 computes"}},
        {"exit", "exited", DP_FAIL, {"rank 3 ended its process with exit status 3"}},
        {"nan",
         "returned",
         DP_FAIL,
         {"o: 4 of 768 entries are NaN or Inf, the first is entry 7", "rank 0"}},
        {"past-by-one", "out of bounds", DP_FAIL, {"past the end of o"}},
        {"past-by-many",
         "out of bounds",
         DP_FAIL,
         {"wrote 40000 bytes past the end of o", "bad.so+0x"}},
        {"before",
         "out of bounds",
         DP_FAIL,
         {"before the beginning of o: 8 bytes there are changed"}},
        {"before-by-many",
         "out of bounds",
         DP_FAIL,
         {"wrote 40000 bytes before the beginning of o"}},
        {"read-past", "out of bounds", DP_FAIL, {"read 8192 bytes past the end of o"}},
        {"read-before", "returned", DP_FAIL, {"NaN or Inf, the first is entry 0"}},
        {"input", "out of bounds", DP_FAIL, {"wrote to the input q"}},
        {"fails", "failed", DP_FAIL, {"failed: returned 5: no luck on rank"}},
        {"unwritten",
         "returned",
         DP_FAIL,
         {"o: 4 of 768 entries were never written, the first is entry 9"}},
        {"blank", "returned", DP_FAIL, {"rows of 0, as if never written: 4"}},
        {"desert",
         "hung",
         DP_FAIL,
         {"would wait for ever: rank 0 returned after 0 calls of all_gather"}},
        {"sizes", "failed", DP_FAIL, {"all_gather number 1 of different sizes"}},
        {"wrong-head",
         "returned",
         DP_FAIL,
         {"o: error is", "(rank 1, sequence 0, token 29, head 1)"}},
        {"wrong-stage", "returned", DP_FAIL, {"H: error is", "(rank 1, head 0)"}},
        {"talks", "returned", DP_PASS, {NULL}}};
    const char *lib = gt_library("tests/data/bad_subject.c", "bad.so");
    char one_count[512];
    snprintf(one_count, sizeof one_count, "%sbackward = no\n", CASE);
    char *four = strstr(one_count, "ranks = 1,4");
    trial t;
    memcpy(four, "ranks = 4  ", 11);
    TRY(lib, one_count, "", 20, &t);
    for (size_t i = 0; i < sizeof what / sizeof *what; i++) {
        dp_runs_free(&t.runs);
        if (!run(__LINE__, what[i].bad, strcmp(what[i].bad, "hang") ? 20 : 3, &t)) break;
        REQUIRE(t.runs.n == 1, "%s: %d runs", what[i].bad, t.runs.n);
        const dp_run *r = &t.runs.run[0];
        CHECK(r->verdict == what[i].verdict && !strcmp(r->outcome, what[i].outcome),
              "%s: %s, %s: %s", what[i].bad, dp_verdict_names[r->verdict], r->outcome, r->why);
        for (int j = 0; j < 3 && what[i].says[j]; j++)
            CHECK(strstr(r->why, what[i].says[j]), "%s: '%s' not in '%s'", what[i].bad,
                  what[i].says[j], r->why);
        const int whole = !strncmp(what[i].bad, "wrong", 5); /* every entry is a number, not 0 */
        CHECK(!strstr(r->why, "condition") == !whole, "'%s'", r->why);
    }
    done(&t);
}

DP_TEST(subject, libraries_that_are_none_are_refused) {
    const struct {
        const char *bad, *says;
    } what[] = {{"abi", "has version 7"},  {"claim", "claims chain 'fp17'"},
                {"writes", "writes 'dx'"}, {"ranks", "max_ranks 0"},
                {"null", "returned NULL"}, {"dies-at-once", "SIGABRT"}};
    const char *lib = gt_library("tests/data/bad_subject.c", "bad.so");
    dp_subject s;
    for (size_t i = 0; i < sizeof what / sizeof *what; i++) {
        dp_err e = {0};
        setenv("BAD", what[i].bad, 1);
        CHECK(dp_subject_open(lib, 0, 0, &s, &e) == DP_EINPUT && strstr(e.msg, what[i].says),
              "%s: %s", what[i].bad, e.msg);
        unsetenv("BAD");
    }
    dp_err a = {0}, b = {0};
    CHECK(dp_subject_open("/nowhere/x.so", 0, 0, &s, &a) == DP_EINPUT &&
              strstr(a.msg, "/nowhere/x.so: No such file"),
          "%s", a.msg);
    char path[600];
    snprintf(path, sizeof path, "%s/smoke-kda.case", gt_cases());
    CHECK(dp_subject_open(path, 0, 0, &s, &b) == DP_EINPUT && strstr(b.msg, "cannot be loaded"),
          "%s", b.msg);
}

DP_TEST(subject, the_program_runs_a_library_and_keeps_its_words_out_of_the_record) {
    char cmd[4096];
    const char *lib = gt_library("tests/data/bad_subject.c", "bad.so");
    snprintf(cmd, sizeof cmd,
             "BAD=talks '%s' run weak-heads --ranks 3 --cases '%s' --cache '%s/cache' --subject "
             "'%s' --json - 2>/dev/null",
             gt_program(), gt_cases(), gt_tmpdir(), lib);
    CHECK(gt_run(cmd, out, sizeof out) == 0 && out[0] == '{' &&
              strstr(out, "\"backend\":\"subject\"") && strstr(out, "\"outcome\":\"returned\"") &&
              !strstr(out, "not\": \"the record"),
          "%.600s", out);
    snprintf(cmd, sizeof cmd,
             "BAD=crash '%s' run --id weak-heads:backend=subject,ranks=4,base=fp32,chain=fp32 "
             "--cases '%s' --cache '%s/cache' --subject '%s'",
             gt_program(), gt_cases(), gt_tmpdir(), lib);
    CHECK(gt_run(cmd, out, sizeof out) == 1 && strstr(out, "rank 3 crashed: SIGSEGV"), "%s", out);
    snprintf(cmd, sizeof cmd,
             "'%s' run smoke-conv smoke-chain --cases '%s' --cache none --subject '%s'",
             gt_program(), gt_cases(), lib);
    CHECK(gt_run(cmd, out, sizeof out) == 2 && strstr(out, "2 skipped"), "%s", out);
    snprintf(cmd, sizeof cmd, "'%s' run weak-heads --cases '%s' --subject '%s' --limit never",
             gt_program(), gt_cases(), lib);
    CHECK(gt_run(cmd, out, sizeof out) == 2 && strstr(out, "--limit never"), "%s", out);
}
