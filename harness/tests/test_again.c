/* Calls that are made again (harness/run/subjects.h). The first one of a process is judged, one
 * with the same inputs has the same bits. One with other values at the same addresses is right. */
#include "attack.h"
#include "cases.h"
#include "harness/run/subjects.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static dp_status results_of(const dp_subject *lib, const dp_case *c, const dp_problem *p,
                            dp_subject_result *r, dp_err *e) {
    const dp_subject_call call = {.input_format = dp_formats[c->input_dtype].name,
                                  .N = 1,
                                  .base = lib->base,
                                  .chain = lib->chain,
                                  .backward = c->backward,
                                  .limit_s = 60};
    return dp_subject_run(lib, p, &call, r, e);
}

/* Results without sums over all sequences, or over the value heads of one key head. */
static dp_result without_sums(const dp_problem *p, const dp_result *r) {
    dp_result kept = *r;
    for (int f = 0; f < DP_NRESULTS; f++)
        if (dp_result_fields[f].kind == DP_OF_HEADS) kept.out[f] = NULL;
    if (p->H == 1) kept.dq = kept.dk = NULL;
    return kept;
}

/* Every recurrence, gradients too: to the bit, as each head is computed alike and signs commute
 * with rounding. Some sums are made in another order. */
DP_TEST(again, results_of_other_values_say_what_the_first_must_be) {
    static const char *const names[] = {
        "smoke-kda", "smoke-gdn", "smoke-mkda2",    "gdn2-packed", "deltaproduct-weak",
        "smoke-gla", "smoke-ssd", "many-heads-gdn", "weak-packed", "lower-bound"};
    const char *lib = gt_library("subject/example_subject.c", "again-example.so");
    dp_err e = {0};
    dp_subject s;
    REQUIRE(!dp_subject_open(lib, 0, 0, &s, &e), "%s", e.msg);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        dp_case c;
        dp_subject_result a = {0}, b = {0};
        char text[240] = "";
        if (!gt_open_case(names[i], &c)) continue;
        dp_problem other = dp_other_values(&c.p);
        const int bad = results_of(&s, &c, &c.p, &a, &e) || results_of(&s, &c, &other, &b, &e) ||
                        a.outcome || b.outcome;
        CHECK(!bad, "%s: %s %s %s", names[i], e.msg, a.why, b.why);
        CHECK(dp_results_differ(&c.p, &a.r, &b.r, text, sizeof text), "%s: same", names[i]);
        CHECK(c.p.Nseq == 1 || memcmp(other.cu, c.p.cu, sizeof *c.p.cu * (size_t)c.p.Nseq),
              "%s: packed alike", names[i]);
        dp_other_values_undo(&c.p, &b.r);
        const dp_result x = c.p.Nseq > 1 ? without_sums(&c.p, &a.r) : a.r;
        CHECK(!dp_results_differ(&c.p, &x, &b.r, text, sizeof text), "%s: %s", names[i], text);
        for (int v = 3; v < 6; v++)
            b.r.o[v] += 1; /* columns that a kernel has not written */
        CHECK(dp_results_differ(&c.p, &a.r, &b.r, text, sizeof text) && strstr(text, "3 of") &&
                  strstr(text, " of o, all in columns 3 to 5 of 0 to "),
              "%s: %s", names[i], text);
        dp_subject_result_free(&a);
        dp_subject_result_free(&b);
        dp_problem_free(&other);
        dp_case_free(&c);
    }
    dp_subject_close(&s);
}

#define SMALL                                                                           \
    "reason = r\nsource = s\nop = kda\nT = 96\nH = 1\nHV = 2\nK = 8\nV = 4\ng_scale = " \
    "0.02\ns0_scale = 1\nranks = 1,4\nbase = fp32\nchain = fp32\n"

static char dir[512];

static void set_up(const char *name) {
    snprintf(dir, sizeof dir, "%s", at_dir(name));
    at_write(at_text("%s/small.case", dir), SMALL);
}

typedef struct {
    const char *bad, *options;
    int status;
    const char *says, *not ;
} trial;

/* Each in the folder, by a command that ends in this subject. */
static void expect(const trial *t, int n, const char *subject) {
    for (int i = 0; i < n; i++) {
        const int got = at_sh(dir, 60,
                              "export BAD=%s EXAMPLE=$C/../harness/subject; $P run small.case "
                              "--cache ../cache-of-again %s %s",
                              t[i].bad, t[i].options, subject);
        CHECK(got == t[i].status && strstr(at_out, t[i].says) &&
                  (!t[i].not || !strstr(at_out, t[i].not )),
              "%s %s: status %d: %.900s", t[i].bad, t[i].options, got, at_out);
    }
}

DP_TEST(again, a_library_is_called_again_in_its_process) {
    static const trial of[] = {
        {"", "", 0, "2 passed", "repeat"},
        {"second-call", "--ranks 1", 1,
         "(not repeatable, 1 of 1 call with the same inputs: 1 of 768 "
         "entries of o, the first at token 0, head 1: ",
         NULL},
        {"second-call", "--ranks 4", 1, "(not repeatable, 1 of 1 call", NULL},
        {"second-call", "--ranks 1 --again 0", 0, "1 passed", "repeat"},
        {"second-bit", "--ranks 1", 0, "not repeatable, 1 of 1 call", NULL},
        {"second-dies", "--ranks 1", 1, "called again with the same inputs: crashed: SIGABRT",
         NULL},
        {"second-dies", "--ranks 4", 1, "called again with the same inputs: rank ", NULL},
        {"remembers", "--ranks 1", 1, "(called again with other values at the same addresses; ",
         NULL},
        {"remembers-gates", "--ranks 1", 1,
         "(called again with other values at the same addresses; ", NULL},
        {"remembers", "--ranks 4", 1, "(called again with other values at the same addresses; ",
         NULL},
        {"unsteady", "--ranks 1 --again 0", 0, "1 passed", "repeat"},
        {"wrong-head", "--ranks 4", 1, "(o: error is", "repeat"},
    };
    set_up("again-library");
    char subject[700];
    snprintf(subject, sizeof subject, "--subject '%s'",
             gt_library("tests/data/bad_subject.c", "again-bad.so"));
    expect(of, sizeof of / sizeof *of, subject);
}

DP_TEST(again, the_first_call_of_a_program_is_judged_and_the_next_ones_too) {
    static const trial of[] = {
        {"", "--base fp32", 0, "1 passed", "repeat"},
        {"first", "", 1, "(not repeatable, 1 of 1 call with the same inputs: ", NULL},
        {"second", "--base fp32", 1, "(not repeatable, 1 of 1 call with the same inputs: ", NULL},
        {"stale", "--base fp32", 1, "(called again with other values at the same addresses; ",
         NULL},
        {"late", "--base fp32", 1, "(o: ", "repeat"},
    };
    set_up("again-program");
    if (!getenv("DP_PYTHON")) setenv("DP_PYTHON", "python3", 1);
    if (at_sh(dir, 30, "\"$DP_PYTHON\" -c 'import numpy'")) SKIP("numpy is not installed");
    expect(of, sizeof of / sizeof *of,
           "--ranks 1 --serve \"$DP_PYTHON $C/../harness/tests/data/bad_program.py\"");
}
