/* The recurrence in fp32 is the recurrence: against the truth, forward and backward, within what
 * fp32 rounds; and its states are those of the ranks that begin there.
 */
#include "gt.h"
#include "harness/case/case.h"
#include "ref/chunk/recurrent.h"
#include "ref/truth/truth.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static double distance(const dp_ball *want, const double *got) {
    double err = 0;
    double size = 0;
    for (int64_t i = 0; i < want->rows * want->width; i++) {
        err += (got[i] - want->hi[i]) * (got[i] - want->hi[i]);
        size += want->hi[i] * want->hi[i];
    }
    return size > 0 ? sqrt(err / size) : err;
}

/* Errors of every result are below `most`, those of `rounded` above `least` too. */
static void against_truth(const char *name, const dp_design *design, double most, int rounded,
                          double least) {
    char path[512];
    dp_case c;
    dp_err e = {0};
    dp_truth t;
    dp_result r;
    snprintf(path, sizeof path, "%s/%s.case", gt_cases(), name);
    REQUIRE(!dp_case_load(path, &c, &e), "%s", e.msg);
    const dp_truth_request rq = {.bits = 128, .backward = 1};
    REQUIRE(!dp_truth_run(&c.p, &rq, &t, &e), "%s", e.msg);
    dp_recurrent_run(&c.p, design, 1, NULL, &r);
    for (int i = 0; i < DP_NRESULTS; i++) {
        const double *got = *dp_result_at(&r, i);
        if (!got || !t.field[i].rows) continue;
        const double x = distance(&t.field[i], got);
        CHECK(x < most, "%s %s: %.3g", name, dp_result_fields[i].name, x);
        CHECK(x > (i == rounded ? least : 0), "%s %s: %.3g: nothing was rounded", name,
              dp_result_fields[i].name, x);
    }
    dp_result_free(&r);
    dp_truth_free(&t);
    dp_case_free(&c);
}

DP_TEST(recurrent, is_the_recurrence_in_fp32) {
    static const char *const names[] = {"smoke-kda",    "smoke-gdn",         "smoke-mkda2",
                                        "packed-ones",  "initial-state",     "gdn-raw",
                                        "packed-empty", "smoke-deltaproduct"};
    const dp_design d = dp_design_of(DP_BASE_FP32);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        against_truth(names[i], &d, 2e-5, DP_RESULT_O, 0);
}

/* A state kept in bf16 loses what 8 bits lose, a result stored in bf16 no more than that. */
DP_TEST(recurrent, states_and_results_are_stored_as_the_design_says) {
    dp_design state, dstate, out;
    dp_err e = {0};
    REQUIRE(!dp_design_parse("recurrent,state=bf16", DP_BASE_FP32, &state, &e), "%s", e.msg);
    REQUIRE(!dp_design_parse("recurrent,dstate=bf16", DP_BASE_FP32, &dstate, &e), "%s", e.msg);
    REQUIRE(!dp_design_parse("recurrent,out=bf16", DP_BASE_FP32, &out, &e), "%s", e.msg);
    against_truth("smoke-kda", &state, 0.2, DP_RESULT_O, 1e-4);
    against_truth("smoke-kda", &dstate, 0.2, DP_RESULT_DK, 1e-4);
    against_truth("smoke-kda", &out, 4e-3, DP_RESULT_O, 1e-4);
}

DP_TEST(recurrent, designs_are_read_written_and_refused) {
    static const char *const text[] = {"",
                                       "recurrent",
                                       "chunk=128",
                                       "factors=fp16",
                                       "factors=tf32",
                                       "factors=tf32rz,scores=gated",
                                       "state=bf16,dstate=bf16,out=fp32",
                                       "chunk=16,scores=gated",
                                       "decays=bf16,scores=gated,keys=scored",
                                       "inverse=solve",
                                       "chunk=16,chunks=8:16:512"};
    static const char *const wrong[] = {
        "chunk=7",    "chunk=x",    "chunk",        "state=fp8",    "state=tf32", "out=tf32rz",
        "factors=tf", "factors=",   "recurrent=1",  "scores=maybe", "keys=twice", "decays=tf32",
        "speed=high", "chunk=1000", "chunks=16:24", "chunks=",      "chunks=1024"};
    dp_design d;
    for (size_t i = 0; i < sizeof text / sizeof *text; i++) {
        char back[DP_DESIGN_TEXT];
        dp_err e = {0};
        CHECK(!dp_design_parse(text[i], DP_BASE_BF16, &d, &e), "%s: %s", text[i], e.msg);
        dp_design_text(&d, back);
        CHECK(!strcmp(back, text[i]), "'%s' comes back as '%s'", text[i], back);
    }
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        dp_err e = {0};
        CHECK(dp_design_parse(wrong[i], DP_BASE_BF16, &d, &e) == DP_EINPUT &&
                  strstr(e.msg, "design"),
              "'%s' is taken", wrong[i]);
    }
}
