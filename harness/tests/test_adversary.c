/* scripts/campaigns/adversary: kernels and faults written apart from this program, and the tables
 * of what its verdicts make of them. */
#include "gt.h"
#include <stdio.h>
#include <string.h>

static char out[1 << 17]; /* tables of all results in the folder, whichever test made them */

/* scripts/campaigns/adversary/run with these arguments, its results in that folder; returns its
 * exit status. */
static int adversary_in(const char *folder, const char *arguments) {
    char cmd[2048];
    snprintf(cmd, sizeof cmd,
             "'%s/../scripts/campaigns/adversary/run' %s --program '%s' --out '%s/%s' "
             "--cache '%s'",
             gt_cases(), arguments, gt_program(), gt_tmpdir(), folder, gt_cache());
    return gt_run(cmd, out, sizeof out);
}
static int adversary(const char *arguments) { return adversary_in("adversary", arguments); }

static int says(const char *text) { return strstr(out, text) != NULL; }

DP_TEST(adversary, designs_agree_with_an_fp64_recurrence_and_that_with_the_complex_step) {
    CHECK(adversary("check --designs recurrent,fast=1 chunk16-gated-bf16 "
                    "chunk64-bf16,inverse=merged,fast=1") == 0,
          "%s", out);
    CHECK(says("self-check: all right"), "%s", out);
}

DP_TEST(adversary, a_right_design_passes_and_faults_fail_in_the_tensor_that_they_are_in) {
    const int status = adversary("one --cases t63 --designs chunk64 --faults '' scale.o:5 "
                                 "row.dv:50 state-boundary:0 noise.dg:20");
    CHECK(status == 1, "exit status %d: %s", status, out);
    CHECK(says("pass     t63 chunk64 right"), "%s", out);
    CHECK(says("fail     t63 chunk64 scale.o:5  (o: "), "%s", out);
    CHECK(says("fail     t63 chunk64 row.dv:50  (dv: "), "%s", out);
    CHECK(says("fail     t63 chunk64 noise.dg:20  (dg: "), "%s", out);
    CHECK(says("skipped  t63 chunk64 state-boundary:0  (the fault acts nowhere here)"), "%s", out);
}

/* Through files: right kernels of three recurrences pass, zeros of no tensor do. */
DP_TEST(adversary, kernels_of_every_recurrence_are_judged_as_files) {
    CHECK(adversary("files --recurrences gdn2 gated-deltaproduct dplr ssd --formats bf16 "
                    "--designs chunk64 --wrong too") == 0,
          "%s", out);
    CHECK(says("all: 0 failed, 0 not judged, of 8") && says("zeros       bf16      declared   -"),
          "%s", out);
}

/* A state in bf16 makes more than the default of its base: said, it is right; unsaid, a fault. */
DP_TEST(adversary, a_design_is_judged_by_the_words_that_it_declares) {
    const char *arguments = "one --cases near-symmetric --designs recurrent-state-bf16";
    char undeclared[128];
    snprintf(undeclared, sizeof undeclared, "%s --undeclared", arguments);
    CHECK(adversary(arguments) == 0 && says("pass     near-symmetric"), "%s", out);
    CHECK(adversary(undeclared) == 1 && says("fail     near-symmetric"), "%s", out);
}

/* So do products of operands in tf32, by more than a thousand times what fp32 makes. */
DP_TEST(adversary, products_in_tf32_are_judged_as_what_they_are) {
    const char *tf32 = "one --cases t63 --designs chunk64-tf32-out-fp32 chunk64-tf32rz-out-fp32";
    char undeclared[160];
    snprintf(undeclared, sizeof undeclared, "%s --undeclared", tf32);
    CHECK(adversary(tf32) == 0 && says("pass     t63 chunk64-tf32-out-fp32"), "%s", out);
    CHECK(adversary(undeclared) == 1 && says("fail     t63 chunk64-tf32-out-fp32") &&
              says("fail     t63 chunk64-tf32rz-out-fp32"),
          "%s", out);
}

/* Rows that are rounded on input miss the bound of rows that are not, by 2.6 times. Bounds are kept
 * for later runs by all words of a design that they read. */
DP_TEST(adversary, a_rounding_that_is_declared_has_bounds_of_its_own) {
    CHECK(adversary("one --cases fp32-rows,parallel-keys --designs chunk64-bf16 "
                    "chunk64-inputs-bf16 chunk64-folded-bf16") == 0,
          "%s", out);
    CHECK(says("pass     fp32-rows chunk64-inputs-bf16") &&
              says("pass     parallel-keys chunk64-folded-bf16"),
          "%s", out);
}

/* bf16 operands of scores miss the bound of pairwise scores here, by 1.2 times in o. */
DP_TEST(adversary, scores_from_gated_operands_are_within_the_bound_of_such_scores) {
    const char *one = "one --cases strong-uniform --designs chunk16-gated-bf16";
    CHECK(adversary(one) == 0 && says("pass     strong-uniform"), "%s", out);
}

/* This kernel writes the state with keys that the scores have already rounded. One row's error is
 * 2.6 times the limit of a kernel that rounds keys once (reports/verdicts.md). */
DP_TEST(adversary, keys_that_are_rounded_twice_pass_as_what_they_are) {
    const struct {
        const char *design, *verdict;
    } as[] = {{"chunk=16,scores=gated", "VERDICT: FAIL"},
              {"chunk=16,scores=gated,keys=scored", "VERDICT: PASS"}};
    char cmd[4096];
    REQUIRE(adversary("one --cases t1 --designs chunk16-scored-bf16") == 0, "%s", out);
    for (int i = 0; i < 2; i++) {
        snprintf(cmd, sizeof cmd,
                 "ADVERSARY_DESIGN=chunk16-scored-bf16 ADVERSARY_DECLARED=0 '%s' run "
                 "field-log-survivor --cases '%s/../scripts/campaigns/peers/field/cases' "
                 "--base bf16 "
                 "--subject '%s/adversary/libadversary.so' --design %s --cache '%s'",
                 gt_program(), gt_cases(), gt_tmpdir(), as[i].design, gt_cache());
        gt_run(cmd, out, sizeof out);
        CHECK(says(as[i].verdict), "%s: %s", as[i].design, out);
    }
}

/* Every text is read by the program, or the run would end without a verdict. */
DP_TEST(adversary, every_design_that_has_words_is_understood) {
    CHECK(adversary("alarms --cases t1 --declared --jobs 2") == 0, "%s", out);
    CHECK(says("declared  ") && says("bf16 chunk16-gated-bf16"), "%s", out);
    CHECK(!says("\nerror "), "%s", out);
}

DP_TEST(adversary, power_finds_the_size_that_fails_and_runs_nothing_twice) {
    const char *arguments = "power --cases t63 --designs chunk64 --faults scale.o";
    CHECK(adversary(arguments) == 0, "%s", out);
    CHECK(says("base fp32, design chunk64") && says("\nscale.o "), "%s", out);
    CHECK(says("faults: 1 of 1 done, ") && !says("faults: 1 of 1 done, 0 new"), "%s", out);
    CHECK(adversary(arguments) == 0 && says("faults: 1 of 1 done, 0 new runs"), "%s", out);
}

/* A session has tensors that no fault is in: o of rejected tokens. */
DP_TEST(adversary, a_session_is_searched_in_units_of_the_tensors_that_it_knows) {
    CHECK(adversary_in("session",
                       "power --cases session-verify --designs chunk64 --faults scale.o") == 0,
          "%s", out);
    CHECK(says("faults: 1 of 1 done") && !says("ended without a record"), "%s", out);
    CHECK(says("\nscale.o                     1   100%"), "%s", out);
}

/* Numbers that are exact in bf16 go beyond 65504: a design that says fp16 is not run on them. */
DP_TEST(adversary, exact_cases_are_no_cases_of_a_design_in_fp16) {
    CHECK(adversary("one --cases exact-kda --designs chunk64-fp16 chunk64-bf16") == 0, "%s", out);
    CHECK(says("skipped  exact-kda chunk64-fp16 right  (keys = exact: its numbers leave the range"),
          "%s", out);
    CHECK(says("pass     exact-kda chunk64-bf16 right"), "%s", out);
}

/* A design that says state=bf16 is right where every state of the case is a number of bf16. */
DP_TEST(adversary, exact_cases_have_states_that_bf16_keeps) {
    CHECK(adversary("one --cases exact-kda,exact-gdn,exact-residual --designs "
                    "recurrent-state-bf16 chunk64-bf16-state-bf16") == 0,
          "%s", out);
    CHECK(says("pass     exact-residual recurrent-state-bf16 right"), "%s", out);
}

/* Powers that cancel to an inverse take its bits with them: no right kernel makes it so there, and
 * such runs are counted apart. Elsewhere the same design is one of the right ones. */
DP_TEST(adversary, small_problems_tell_an_inverse_that_cancels_from_a_right_one) {
    /* its tables are of all results in the folder */
    CHECK(adversary_in("small",
                       "alarms --cases '' --generated 2 --small --seed 3 --declared --designs "
                       "chunk64 chunk16-neumann") == 0,
          "%s", out);
    CHECK(says("alarms: 4 of 4 done"), "%s", out);
    CHECK(says("\nfp32 chunk64                         2 "), "%s", out);
    CHECK(says("\nfp32 chunk16-neumann                 1 "), "%s", out);
    CHECK(says("\npowers that cancel ") && !says("failures:"), "%s", out);
}

/* dg of one token without a state cancels: kernels leave 1e-8 of it, draws nothing. */
DP_TEST(adversary, a_head_whose_dg_cancels_is_no_alarm) {
    CHECK(adversary_in("one",
                       "alarms --cases '' --generated 1 --seed 530208 --small --recurrences gdn "
                       "kda mkda gdn2 gla ssd gated-deltaproduct dplr --declared --designs "
                       "chunk16-gated-bf16 chunk64-fp16-out-fp16") == 0,
          "%s", out);
    CHECK(says("\nbf16 chunk16-gated-bf16              1       10       0 ") && !says("failures"),
          "%s", out); /* in fp16, without a bound, dg is unjudged */
}

/* Errors 1.5 times as large as they should be pass every case, and fail them together. */
DP_TEST(adversary, what_no_case_shows_fails_all_of_them_together) {
    const char *right =
        "together --cases t63,t64,beta-zero,strong-uniform,strong-keys,beta-decades,"
        "weak-heads,smoke-kda,smoke-gdn,kda-corr,small-norms,bf16-ties,lower-bound,"
        "cancelling --designs chunk64-bf16";
    char wrong[320];
    snprintf(wrong, sizeof wrong, "%s --faults grow.dk:1.5", right);
    CHECK(adversary(right) == 0 && says("right: status 0, 0 runs fail alone"), "%s", out);
    CHECK(says("  pass dk            14 cases"), "%s", out);
    CHECK(adversary(wrong) == 1 && says("status 1, 0 runs fail alone"), "%s", out);
    CHECK(says("  fail dk            14 cases") && !says("  fail o "), "%s", out);
}

DP_TEST(adversary, what_it_does_not_know_is_refused_with_status_2) {
    CHECK(adversary("one --cases t63 --faults scale.o:much") == 2, "%s", out);
    CHECK(says("'much' is no number"), "%s", out);
    CHECK(adversary("one --cases t63 --designs chunk63") == 2 && says("no design 'chunk63'"), "%s",
          out);
    CHECK(adversary("power --cases nowhere --faults scale.o") == 2 && says("nowhere.case"), "%s",
          out);
}
