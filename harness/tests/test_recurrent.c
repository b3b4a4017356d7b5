/* The recurrence in fp32 is the recurrence: against the truth, forward and backward, within fp32's
 * roundings. Its states are those of the ranks that begin there.
 */
#include "cases.h"
#include "harness/case/case.h"
#include "harness/run/outputs.h"
#include "harness/verdict/expected.h"
#include "ref/arithmetic/elementary.h"
#include "ref/chunk/recurrent.h"
#include "ref/truth/truth.h"
#include "ref/vocabulary/recurrence.h"

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
        const double *got = r.out[i];
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
    REQUIRE(!dp_design_parse("recurrent,dq=bf16", DP_BASE_FP32, &out, &e), "%s", e.msg);
    against_truth("smoke-kda", &out, 4e-3, DP_RESULT_DQ, 1e-4);
    REQUIRE(!dp_design_parse("recurrent,out=bf16,o=fp32", DP_BASE_FP32, &out, &e), "%s", e.msg);
    CHECK(out.out[DP_RESULT_O] == DP_FP32 && out.out[DP_RESULT_DK] == DP_BF16, "o or dk");
}

DP_TEST(recurrent, designs_are_read_written_and_refused) {
    static const char *const text[] = {"",
                                       "recurrent",
                                       "chunk=128",
                                       "factors=fp16",
                                       "factors=tf32",
                                       "factors=tf32rz,scores=gated",
                                       "state=bf16,dstate=bf16,out=fp32",
                                       "recurrent,state=bf16,read=kept",
                                       "chunk=16,scores=gated",
                                       "recurrent,exp=fast,inputs=stored",
                                       "decays=bf16,scores=gated,keys=scored",
                                       "inverse=solve",
                                       "state=e4m3-block",
                                       "recurrent,final_state=int8-tensor",
                                       "undeclared,final_state=fp16sr",
                                       "scores=gated,beta=inverse",
                                       "o=fp32",
                                       "recurrent,o=fp32,dlr_b=fp16",
                                       "undeclared",
                                       "undeclared,out=fp32",
                                       "undeclared,o=fp32,dv=fp64",
                                       "chunk=16,chunks=8:16:512",
                                       "chunk=32,chunk_backward=64",
                                       "chunk_backward=16"};
    static const char *const wrong[] = {"chunk=7",
                                        "chunk=x",
                                        "chunk",
                                        "state=fp8",
                                        "state=tf32",
                                        "state=bf16,read=kept",
                                        "recurrent,read=stored",
                                        "undeclared,read=kept",
                                        "out=tf32rz",
                                        "dq=tf32",
                                        "final_state=fp8",
                                        "state=e4m3-tensor",
                                        "undeclared,recurrent",
                                        "factors=tf",
                                        "factors=",
                                        "recurrent=1",
                                        "scores=maybe",
                                        "keys=twice",
                                        "decays=tf32",
                                        "speed=high",
                                        "exp=slow",
                                        "inputs=fp32",
                                        "beta=keys",
                                        "inverse=solve,beta=inverse",
                                        "recurrent,beta=inverse",
                                        "chunk=1000",
                                        "chunks=16:24",
                                        "chunks=",
                                        "chunks=1024",
                                        "chunk_backward=4",
                                        "recurrent,chunk_backward=64",
                                        "chunk_backward=16,chunks=16:32"};
    dp_design d;
    for (size_t i = 0; i < sizeof text / sizeof *text; i++) {
        char back[DP_DESIGN_TEXT];
        dp_err e = {0};
        CHECK(!dp_design_parse(text[i], DP_BASE_BF16, &d, &e), "%s: %s", text[i], e.msg);
        dp_design_text(&d, back);
        CHECK(!strcmp(back, text[i]), "'%s' comes back as '%s'", text[i], back);
    }
    REQUIRE(!dp_design_parse("chunk=32,chunk_backward=32", DP_BASE_BF16, &d, NULL), "equal");
    CHECK(d.chunk == 32 && !d.chunk_backward, "equal chunks are one length");
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        dp_err e = {0};
        CHECK(dp_design_parse(wrong[i], DP_BASE_BF16, &d, &e) == DP_EINPUT &&
                  strstr(e.msg, "design"),
              "'%s' is taken", wrong[i]);
    }
}

/* ---- its bounds ------------------------------------------------------------------------------ */

/* The largest error of a row over its bound, of every result; a row of zeros without error: 0. */
static void over_bounds(const dp_truth *t, const dp_result *got, const dp_error_bound *b,
                        double most[DP_NRESULTS]) {
    for (int f = 0; f < DP_NRESULTS; f++) {
        const dp_ball *want = &t->field[f];
        const double *x = got->out[f];
        most[f] = -1;
        for (int64_t r = 0; x && b->row[f] && r < want->rows; r++) {
            double err = 0;
            for (int64_t i = r * want->width; i < (r + 1) * want->width; i++)
                err = dp_hypot(err, x[i] - want->hi[i]);
            most[f] = fmax(most[f], err > 0 ? err / b->row[f][r] : 0);
        }
    }
}

/* The case c on N ranks in a design; frees c. 0: there are no bounds. */
static int ratios_of(dp_case c, int N, const dp_design *bounded, const dp_design *computed,
                     double most[DP_NRESULTS]) {
    dp_standard std;
    dp_sharding sp;
    dp_drawn_run x;
    dp_error_bound b;
    dp_err e = {0};
    const dp_conv none[3] = {{0}};
    const dp_run_options o = {.cache = gt_tmpdir()};
    if (dp_standard_open(&std, &c, &o, N, &e) || dp_sharding_open(&sp, &std, N, &e)) {
        gt_fail(__FILE__, __LINE__, c.name, "%s", e.msg);
        return 0;
    }
    dp_bound_bases w = {0};
    dp_run_bounds(&sp, bounded, DP_FP32, &w, &b);
    dp_drawn_open(&x, computed, &c.p, none, NULL, N, c.backward);
    dp_drawn_all(&x, DP_FP32);
    over_bounds(sp.truth, dp_drawn_results(&x), &b, most);
    dp_drawn_close(&x);
    dp_error_bound_free(&b);
    dp_bound_bases_free(&w);
    dp_sharding_close(&sp);
    dp_standard_close(&std);
    dp_case_free(&c);
    return 1;
}

static int ratios(const char *name, const dp_design *bounded, const dp_design *computed,
                  double most[DP_NRESULTS]) {
    dp_case c;
    dp_err e = {0};
    char path[512];
    snprintf(path, sizeof path, "%s/%s.case", gt_cases(), name);
    if (!dp_case_load(path, &c, &e)) return ratios_of(c, 1, bounded, computed, most);
    gt_fail(__FILE__, __LINE__, name, "%s", e.msg);
    return 0;
}

/* The recurrence in fp32 keeps to the bounds of chunks of one token. Rows that are no sums over all
 * tokens come within a factor of 250. */
DP_TEST(recurrent, keeps_to_the_bounds_of_chunks_of_one_token) {
    static const char *const names[] = {
        "smoke-kda",     "smoke-gdn",    "smoke-mkda2", "smoke-gdn2",  "smoke-gla",
        "smoke-ssd",     "smoke-dplr",   "dplr-strong", "packed-ones", "smoke-deltaproduct",
        "initial-state", "packed-empty", "lower-bound", "no-decay",    "negative-eigenvalues",
        "beta-zero",     "t63",          "gdn2-packed", "dplr-weak",   "weak-heads"};
    for (size_t i = 0; i < 2 * sizeof names / sizeof *names; i++) {
        dp_design d = dp_design_of(i % 2 ? DP_BASE_BF16 : DP_BASE_FP32);
        double most[DP_NRESULTS], top = 0;
        d.chunk = 0;
        if (!ratios(names[i / 2], &d, &d, most)) continue;
        for (int f = 0; f < DP_NRESULTS; f++) {
            CHECK(most[f] <= 1, "%s, %s, %s: %.3g of its bound", names[i / 2],
                  dp_base_names[d.base], dp_result_fields[f].name, most[f]);
            top = fmax(top, most[f]);
        }
        CHECK(top > 0.004, "%s, %s: %.3g of its bound at most", names[i / 2], dp_base_names[d.base],
              top);
    }
}

/* Errors of states in short formats keep to their bounds, on ranks and in gradients. dq and dg are
 * not far below. */
DP_TEST(recurrent, short_states_keep_to_their_bounds_on_ranks_and_with_gradients) {
    static const char *const ops[] = {"kda",
                                      "gdn\ngate = softplus\nl2norm = yes\nbeta = sigmoid\nHV = 4",
                                      "mkda\nR = 2\ngate = lower_bound\nlower_bound = -5",
                                      "gdn2\nl2norm = yes\nHV = 4",
                                      "gla",
                                      "ssd",
                                      "gated-deltaproduct\nR = 2\nbeta = sigmoid2"};
    static const char *const words[] = {"recurrent,state=e4m3-row",
                                        "recurrent,state=fp16sr",
                                        "recurrent,state=int8-block,payload=bf16x2",
                                        "recurrent,state=e5m2-head,payload=bf16x2,exchange=scan",
                                        "state=e4m3-row,chunk=16",
                                        "state=bf16,chunk=8"};
    for (size_t i = 0; i < sizeof ops / sizeof *ops; i++)
        for (size_t k = 0; k < 2 * (sizeof words / sizeof *words); k++) {
            char text[512];
            dp_case c;
            dp_design d;
            dp_err e = {0};
            double most[DP_NRESULTS], top = 0;
            snprintf(text, sizeof text,
                     "reason = r\nsource = s\nop = %s\nT = 48\nH = 2\nK = 16\nV = 24\n"
                     "cu_seqlens = 0,20,20,48\ns0_scale = 0.5\ndstate = yes\nranks = 1,3\n",
                     ops[i]);
            REQUIRE(!dp_design_parse(words[k / 2], DP_BASE_FP32, &d, &e), "%s", e.msg);
            if (!gt_parse_case(text, &c) || !ratios_of(c, k % 2 ? 3 : 1, &d, &d, most)) continue;
            for (int f = 0; f < DP_NRESULTS; f++) {
                CHECK(most[f] <= 1, "%s, %s, %d, %s: %.3g of its bound", ops[i], words[k / 2],
                      (int)k % 2, dp_result_fields[f].name, most[f]);
                top = fmax(top, f == DP_RESULT_DQ || f == DP_RESULT_DG ? most[f] : 0);
            }
            CHECK(top > 0.004, "%s, %s, %d: %.3g of its bound at most", ops[i], words[k / 2],
                  (int)k % 2, top);
        }
}

/* Rounded where the design does not say so it is beyond them. */
DP_TEST(recurrent, a_state_kept_short_breaks_its_bounds) {
    static const char *const names[] = {"smoke-kda", "smoke-gdn2", "smoke-dplr", "smoke-ssd"};
    const dp_design plain = dp_design_of(DP_BASE_FP32);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        dp_design d = plain, as_bf16 = plain;
        double most[DP_NRESULTS];
        d.chunk = as_bf16.chunk = 0;
        as_bf16.state = DP_BF16;
        if (!ratios(names[i], &d, &as_bf16, most)) continue;
        CHECK(most[DP_RESULT_FINAL_STATE] > 10 && most[DP_RESULT_O] > 10,
              "%s: final_state %.3g, o %.3g of the bound", names[i], most[DP_RESULT_FINAL_STATE],
              most[DP_RESULT_O]);
    }
}

/* Designs and sizes that have none. */
DP_TEST(recurrent, designs_of_an_affordable_size_have_bounds) {
    dp_problem p = {.T = 256, .HV = 2, .K = 64, .V = 64};
    dp_design d = dp_design_of(DP_BASE_BF16);
    CHECK(!dp_tokens_are_bounded(&d, &p), "chunks have their own");
    d.chunk = 0;
    CHECK(dp_tokens_are_bounded(&d, &p), "a small problem");
    p.T = 1 << 20;
    CHECK(!dp_tokens_are_bounded(&d, &p), "a million tokens");
    p.T = 256;
    d.state = DP_BF16;
    CHECK(dp_tokens_are_bounded(&d, &p), "a state in bf16");
    p.dout = &p.scale;
    CHECK(dp_tokens_are_bounded(&d, &p), "gradients of a state in bf16");
    p.model = DP_DPLR;
    CHECK(dp_tokens_are_bounded(&d, &p), "of rows of their own");
    dp_recurrences[DP_DPLR].rotated = 1U << DP_INPUT_K;
    CHECK(!dp_tokens_are_bounded(&d, &p), "of rotated keys");
    dp_recurrences[DP_DPLR].rotated = 0;
}
