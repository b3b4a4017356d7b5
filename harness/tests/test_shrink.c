/* shrink: the smallest case is far smaller, fails for the same reason when its file is read again,
 * and passes without the fault. */
#include "cases.h"
#include "harness/search/bisect.h"
#include "harness/search/shrink.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char out[1 << 17];

#define SHAPE "reason = r\nsource = s\nop = kda\nH = 2\nHV = 4\nK = 8\nV = 8\n"
#define RAW "gate = softplus\nbeta = sigmoid\nl2norm = yes\ng_mean = -4\n"

/* most: numbers that may be left. T, N: tokens and ranks that the fault needs to act at all (0: not
 * looked at). */
static const struct {
    dp_fault fault;
    const char *text;
    int ranks;
    dp_base base;
    const char *stage, *tensor;
    int64_t most;
    int T, N;
} ROWS[] = {
    {DP_FAULT_MERGE_SCALED, SHAPE "T = 48\ng_scale = 0.02\nranks = 4\n", 4, DP_BASE_FP32,
     "merge_fwd", "S_in", 12, 2, 2},
    {DP_FAULT_MERGE_NEAREST_FIRST, SHAPE "T = 48\ng_scale = 0.02\nranks = 4\n", 4, DP_BASE_BF16,
     "merge_fwd", "S_in", 15, 3, 3},
    {DP_FAULT_BWD_LAST_SUBSEQ,
     SHAPE "T = 48\ng_scale = 0.02\ncu_seqlens = 0,5,28,40,48\nranks = 4\n", 4, DP_BASE_FP32,
     "pre_process_bwd", "dM", 40, 0, 2},
    {DP_FAULT_GATE_GRAD_PARTIAL, SHAPE RAW "T = 48\nranks = 4\n", 4, DP_BASE_FP32, "gate_bwd",
     "dA_log", 20, 2, 2},
    {DP_FAULT_STATE_TRANSPOSED, SHAPE "T = 48\ng_scale = 0.02\ns0_scale = 1\nranks = 2\n", 2,
     DP_BASE_BF16, "merge_fwd", "S_in", 30, 2, 2},
    {DP_FAULT_GRID_AXIS, SHAPE "T = 16\n", 1, DP_BASE_FP32, "output", "o", 16, 1, 1},
    {DP_FAULT_STALE_LANES, SHAPE "T = 66\n", 1, DP_BASE_FP32, "wy_bwd", "dbeta", 500, 49, 1},
    {DP_FAULT_ORDER_BY_RUN, "reason = r\nsource = s\nop = kda\nHV = 4\nK = 8\nV = 8\nT = 16\n", 1,
     DP_BASE_FP32, NULL, NULL, 100, 0, 0},
    {DP_FAULT_HALO_LEAK, NULL, 4, DP_BASE_FP32, "", "y", 8, 0, 0},
};

DP_TEST(shrink, what_is_left_fails_for_the_same_reason_and_is_twenty_times_smaller) {
    for (size_t i = 0; i < sizeof ROWS / sizeof *ROWS; i++) {
        const char *name = dp_faults[ROWS[i].fault].name;
        dp_case c, again;
        dp_shrunk s;
        dp_err e = {0};
        dp_failure f;
        char path[600];
        if (!(ROWS[i].text ? gt_parse_case(ROWS[i].text, &c) : gt_open_case("conv-packed", &c)))
            continue;
        const dp_shrink_options o = {.run = {.N = ROWS[i].ranks,
                                             .base = ROWS[i].base,
                                             .chain = DP_FP32,
                                             .merge = c.merge[0],
                                             .fault = ROWS[i].fault},
                                     .max_tries = 5000};
        REQUIRE(!dp_shrink(&c, &o, &s, &e), "%s: %s", name, e.msg);
        CHECK(s.before.kind && dp_failure_same(&s.before, &s.after), "%s: %s %s, then %s %s", name,
              s.before.stage, s.before.tensor, s.after.stage, s.after.tensor);
        if (ROWS[i].stage)
            CHECK(!strcmp(s.after.stage, ROWS[i].stage) && !strcmp(s.after.tensor, ROWS[i].tensor),
                  "%s: %s %s", name, s.after.stage, s.after.tensor);
        CHECK(s.numbers * 20 <= s.numbers_before && s.numbers <= ROWS[i].most &&
                  s.nonzero <= s.numbers,
              "%s: %lld of %lld numbers left", name, (long long)s.numbers,
              (long long)s.numbers_before);
        CHECK((!ROWS[i].T || s.c.p.T == ROWS[i].T) && (!ROWS[i].N || s.c.ranks[0] == ROWS[i].N),
              "%s: T %lld on %d ranks", name, (long long)s.c.p.T, s.c.ranks[0]);
        /* as a file */
        snprintf(path, sizeof path, "%s/%s.case", gt_tmpdir(), name);
        REQUIRE(!dp_case_write(&s.c, "r", "s", path, &e) && !dp_case_load(path, &again, &e),
                "%s: %s", name, e.msg);
        CHECK(dp_case_numbers(&again, NULL) == s.numbers && again.nranks == 1 &&
                  again.ranks[0] == s.c.ranks[0],
              "%s: read again it has %lld numbers", name, (long long)dp_case_numbers(&again, NULL));
        const int runs = s.before.kind == DP_FAILS_UNSTEADY ? DP_BISECT_RUNS : 1;
        const dp_shrink_options with = {.run.fault = ROWS[i].fault}, clean = {0};
        CHECK(!dp_failure_of(&again, &with, runs, 1, &f, &e) && dp_failure_same(&s.before, &f),
              "%s: read again: %s %s", name, f.stage, f.tensor);
        CHECK(!dp_failure_of(&again, &clean, runs, 1, &f, &e) && !f.kind && !f.red,
              "%s: without the fault: %s %s", name, f.stage, f.tensor);
        dp_case_free(&again);
        dp_shrink_free(&s);
        dp_case_free(&c);
    }
}

/* Tensors of a case without laws, and those of its text. */
DP_TEST(shrink, parts_that_a_case_may_do_without_go) {
    for (int laws = 0; laws < 2; laws++) {
        dp_case c;
        dp_shrunk s;
        dp_err e = {0};
        const dp_shrink_options o = {
            .run = {.N = 2, .base = DP_BASE_FP32, .fault = DP_FAULT_EXP2_GATE}, .max_tries = 300};
        REQUIRE(gt_parse_case(SHAPE RAW "T = 16\ns0_scale = 1\ndstate = yes\nscale = 0.5\n"
                                        "cu_seqlens = 0,5,16\nranks = 2\n",
                              &c),
                "a case with all of them");
        REQUIRE(c.p.s0 && c.p.dstate && c.p.A_log && c.backward && c.p.Nseq == 2, "it has them");
        char *text = c.text;
        if (!laws) c.text = NULL;
        REQUIRE(!dp_shrink(&c, &o, &s, &e), "%s", e.msg);
        c.text = text;
        const dp_problem *p = &s.c.p;
        CHECK(!p->s0 && !p->dstate && !p->dout && !p->A_log && !p->dt_bias && !p->l2norm &&
                  !s.c.backward && p->scale == 1 && p->Nseq == 1,
              "laws %d: s0 %d, dstate %d, do %d, A_log %d, l2norm %d, backward %d, scale %g, %d "
              "sequences",
              laws, !!p->s0, !!p->dstate, !!p->dout, !!p->A_log, p->l2norm, s.c.backward, p->scale,
              p->Nseq);
        dp_shrink_free(&s);
        dp_case_free(&c);
    }
}

static int64_t bytes_of(const char *path) {
    FILE *f = fopen(path, "r");
    if (!f) return -1;
    fseek(f, 0, SEEK_END);
    const int64_t n = ftell(f);
    fclose(f);
    return n;
}

/* A search that ends before the values are few leaves a text that draws a smaller failing case. */
DP_TEST(shrink, what_fits_no_text_is_written_by_its_laws) {
    static const struct {
        const char *text;
        dp_fault fault;
        int ranks, tries;
    } CUT[] = {
        {SHAPE "T = 96\ng_scale = 0.02\nranks = 2,4\nbase = bf16,fp32\n# a remark\n",
         DP_FAULT_MERGE_SCALED, 4, 3},
        {SHAPE RAW "T = 96\nranks = 4\nown = even\nsmoke = yes\n", DP_FAULT_GATE_GRAD_PARTIAL, 4,
         4},
        {SHAPE "T = 96\ng_scale = 0.02\ncu_seqlens = 0,5,5,28,80,96\nranks = 4\n",
         DP_FAULT_BWD_LAST_SUBSEQ, 4, 3},
    };
    for (size_t i = 0; i < sizeof CUT / sizeof *CUT; i++) {
        dp_case c, again;
        dp_shrunk s;
        dp_failure f;
        dp_err e = {0};
        char path[600], data[600];
        if (!gt_parse_case(CUT[i].text, &c)) continue;
        const dp_shrink_options o = {.run = {.N = CUT[i].ranks,
                                             .base = DP_BASE_FP32,
                                             .chain = DP_FP32,
                                             .merge = c.merge[0],
                                             .fault = CUT[i].fault},
                                     .max_tries = CUT[i].tries};
        REQUIRE(!dp_shrink(&c, &o, &s, &e), "row %zu: %s", i, e.msg);
        REQUIRE(dp_shrunk_by_laws(&s) && s.law_numbers < s.numbers_before, "row %zu: %lld numbers",
                i, (long long)s.law_numbers);
        snprintf(path, sizeof path, "%s/laws%zu.case", gt_tmpdir(), i);
        snprintf(data, sizeof data, "%s/laws%zu.safetensors", gt_tmpdir(), i);
        REQUIRE(!dp_shrunk_write(&s, "r", "s", path, &e) && !dp_case_load(path, &again, &e),
                "row %zu: %s", i, e.msg);
        CHECK(bytes_of(path) < 400 && bytes_of(data) < 0, "row %zu: %lld bytes", i,
              (long long)bytes_of(path));
        CHECK(dp_case_numbers(&again, NULL) == s.law_numbers && again.nranks == 1 &&
                  again.ranks[0] == s.c.ranks[0] && again.nbase == 1 && again.p.T < c.p.T,
              "row %zu: %lld numbers, not %lld", i, (long long)dp_case_numbers(&again, NULL),
              (long long)s.law_numbers);
        const dp_shrink_options with = {.run.fault = CUT[i].fault};
        CHECK(!dp_failure_of(&again, &with, 1, 1, &f, &e) && dp_failure_same(&s.before, &f),
              "row %zu: read again: %s %s", i, f.stage, f.tensor);
        dp_case_free(&again);
        dp_shrink_free(&s);
        dp_case_free(&c);
    }
}

/* However many numbers a case has: those that are alike take no room in its text. */
DP_TEST(shrink, few_values_among_many_are_text) {
    dp_case c, d;
    dp_err e = {0};
    char path[600], data[600];
    if (!gt_parse_case(SHAPE "T = 400\n", &c)) return;
    const int64_t nv = c.p.T * c.p.HV * c.p.V, nk = c.p.T * c.p.H * c.p.K;
    for (int64_t i = 0; i < nv; i++)
        c.p.v[i] = i % 1000 == 7 ? (double)(i % 251) : -0.0;
    for (int64_t i = 0; i < nk; i++)
        c.p.k[i] = c.p.q[i] = 0.5;
    for (int64_t i = 0; i < c.p.T * c.p.HV * dp_Kg(&c.p); i++)
        c.p.g[i] = i == 3 ? 0 : -1;
    for (int64_t i = 0; i < c.p.T * c.p.HV; i++)
        c.p.beta[i] = 1;
    for (int64_t i = 0; i < nv; i++)
        c.p.dout[i] = 0;
    snprintf(path, sizeof path, "%s/few.case", gt_tmpdir());
    snprintf(data, sizeof data, "%s/few.safetensors", gt_tmpdir());
    REQUIRE(!dp_case_write(&c, "r", "s", path, &e) && !dp_case_load(path, &d, &e), "%s", e.msg);
    CHECK(bytes_of(data) < 0 && bytes_of(path) < 2000, "%lld bytes", (long long)bytes_of(path));
    CHECK(!memcmp(c.p.v, d.p.v, sizeof(double) * (size_t)nv) &&
              !memcmp(c.p.k, d.p.k, sizeof(double) * (size_t)nk) && d.p.g[3] == 0 && d.p.g[4] == -1,
          "other values");
    dp_case_free(&c);
    dp_case_free(&d);
}

/* Another stage, another tensor, another kind or a verdict that no longer fails is another failure.
 */
DP_TEST(shrink, reasons_are_the_same_when_all_of_them_is) {
    const dp_failure a = {.kind = DP_FAILS_OVER,
                          .stage = "merge_fwd",
                          .tensor = "S_in",
                          .red = 1,
                          .rank = 3,
                          .ratio = 9};
    dp_failure b[7];
    for (int i = 0; i < 7; i++)
        b[i] = a;
    b[0].rank = 1;
    b[0].ratio = 2; /* where and how much may change */
    b[1].stage = "state_fwd";
    b[2].tensor[0] = 'H';
    b[3].kind = DP_FAILS_NOT_FINITE;
    b[4].red = 0;
    b[5].kind = DP_FAILS_NOT;
    CHECK(dp_failure_same(&a, &b[0]), "rank and ratio");
    for (int i = 1; i < 6; i++)
        CHECK(!dp_failure_same(&a, &b[i]), "change %d makes no other reason", i);
    dp_failure x = {.kind = DP_FAILS_OUTCOME, .outcome = DP_SUBJECT_CRASHED, .stage = ""}, y = x;
    CHECK(dp_failure_same(&x, &y), "crashed both times");
    y.outcome = DP_SUBJECT_HUNG;
    CHECK(!dp_failure_same(&x, &y), "crashed, then hung");
    CHECK(!dp_failure_same(&b[5], &b[5]), "what does not fail has no reason");
}

/* Values that a text cannot hold go into a tensors file, every one of them as it was. */
DP_TEST(shrink, cases_of_any_size_are_written_as_they_are) {
    static const char *const NAME[] = {
        "smoke-kda",   "initial-state", "gdn-raw", "mkda2",     "packed-empty",   "smoke-conv",
        "fp64-inputs", "lower-bound",   "nan",     "exact-kda", "gate-no-params", "smoke-chain"};
    for (size_t i = 0; i < sizeof NAME / sizeof *NAME; i++) {
        dp_case c, d;
        dp_err e = {0};
        char path[600];
        if (!gt_open_case(NAME[i], &c)) continue;
        c.nranks = c.nbase = c.nchain = c.nmerge = 1;
        snprintf(path, sizeof path, "%s/copy-of-%s.case", gt_tmpdir(), NAME[i]);
        REQUIRE(!dp_case_write(&c, "r", "s", path, &e) && !dp_case_load(path, &d, &e), "%s: %s",
                NAME[i], e.msg);
        int64_t a, b;
        CHECK(dp_case_numbers(&c, &a) == dp_case_numbers(&d, &b) && a == b,
              "%s: %lld numbers, %lld when read again", NAME[i],
              (long long)dp_case_numbers(&c, NULL), (long long)dp_case_numbers(&d, NULL));
        if (c.op->has_problem) {
            const int64_t n = c.p.T * c.p.HV * c.p.R * c.p.V, m = c.p.T * c.p.HV * dp_Kg(&c.p);
            CHECK(!memcmp(c.p.v, d.p.v, sizeof(double) * (size_t)n) &&
                      !memcmp(c.p.g, d.p.g, sizeof(double) * (size_t)m),
                  "%s: other values", NAME[i]);
            CHECK(c.p.scale == d.p.scale && c.p.gate == d.p.gate &&
                      c.p.lower_bound == d.p.lower_bound && c.p.l2norm == d.p.l2norm &&
                      c.p.beta_form == d.p.beta_form && c.p.Nseq == d.p.Nseq &&
                      c.backward == d.backward,
                  "%s: other settings", NAME[i]);
            CHECK(!memcmp(c.p.cu, d.p.cu, sizeof *c.p.cu * (size_t)(c.p.Nseq + 1)) &&
                      !c.p.s0 == !d.p.s0 && !c.p.dstate == !d.p.dstate && !c.p.A_log == !d.p.A_log,
                  "%s: other tensors", NAME[i]);
        }
        dp_case_free(&c);
        dp_case_free(&d);
    }
}

/* A library: the reason is the outcome, or the stage and tensor. The library bad.so is wrong in
 * head 1 of rank 1, or crashes on the last rank. */
DP_TEST(shrink, a_library_keeps_its_outcome_or_its_wrong_tensor) {
    static const struct {
        const char *bad, *says;
    } WHAT[] = {{"crash", "after:  crashed"},
                {"wrong-stage", "after:  pre_process_fwd: H over its bound, rank 1"},
                {"nan", "after:  output: o not finite"}};
    char cmd[4096];
    snprintf(cmd, sizeof cmd,
             "cc -O1 -fPIC -shared -ffp-contract=off -I'%s/../harness' "
             "'%s/../harness/tests/data/bad_subject.c' -o '%s/bad.so' -lm && printf 'reason = "
             "r\\nsource = s\\nop = kda\\nT = 24\\nHV = 2\\nK = 4\\nV = 4\\n"
             "g_scale = 0.02\\nbackward = no\\nranks = 3\\nbase = fp32\\n' >%s/lib.case",
             gt_cases(), gt_cases(), gt_tmpdir(), gt_tmpdir());
    REQUIRE(!gt_run(cmd, out, sizeof out), "%s", out);
    for (size_t i = 0; i < sizeof WHAT / sizeof *WHAT; i++) {
        snprintf(cmd, sizeof cmd,
                 "OMP_NUM_THREADS=1 BAD=%s '%s' shrink %s/lib.case --subject %s/bad.so --cache "
                 "none --tries 60 -o %s/lib.min.case",
                 WHAT[i].bad, gt_program(), gt_tmpdir(), gt_tmpdir(), gt_tmpdir());
        const int rc = gt_run(cmd, out, sizeof out);
        CHECK(rc == 0 && strstr(out, WHAT[i].says) && strstr(out, "written: "), "%s: status %d: %s",
              WHAT[i].bad, rc, out);
    }
    snprintf(cmd, sizeof cmd,
             "'%s' shrink smoke-kda --subject %s/bad.so --cache none -o %s/lib.min.case",
             gt_program(), gt_tmpdir(), gt_tmpdir());
    CHECK(gt_run(cmd, out, sizeof out) == 2 && strstr(out, "smoke-kda: not run with 4 ranks") &&
              strstr(out, "takes the log decay"),
          "a library that does not take the case: %s", out);
}

DP_TEST(shrink, a_search_that_ends_early_writes_what_it_has) {
    char cmd[4096];
    snprintf(cmd, sizeof cmd,
             "cd %s && printf '" SHAPE RAW "T = 24\nranks = 2,4\n' >early.case && '%s' shrink "
             "early.case --cache none --ranks 4 --fault exp2-gate --seconds 1e-6",
             gt_tmpdir(), gt_program());
    const int rc = gt_run(cmd, out, sizeof out);
    CHECK(rc == 0 && strstr(out, " 1x smaller, 0 problems tried") &&
              strstr(out, "written: early.min.case"),
          "status %d: %s", rc, out);
}

DP_TEST(shrink, an_angle_keeps_a_number_for_each_pair_of_channels) {
    char cmd[2048];
    snprintf(cmd, sizeof cmd,
             "cd %s && '%s' shrink smoke-dplr --recurrence mamba3 --ranks 2 --base fp32 --fault "
             "merge-scaled -o angle.case",
             gt_tmpdir(), gt_program());
    const int rc = gt_run(cmd, out, sizeof out);
    CHECK(rc == 0 && strstr(out, "written: angle.case"), "status %d: %s", rc, out);
}

DP_TEST(shrink, the_program_writes_a_case_that_it_can_run) {
    char cmd[4096];
    snprintf(cmd, sizeof cmd,
             "cd %s && printf '" SHAPE RAW "T = 24\nranks = 2,4\n' >small.case && '%s' shrink "
             "small.case --cache none --ranks 4 --fault exp2-gate",
             gt_tmpdir(), gt_program());
    int rc = gt_run(cmd, out, sizeof out);
    CHECK(rc == 0 && strstr(out, "x smaller, ") && strstr(out, "after:  gate: g over its bound") &&
              strstr(out, "written: small.min.case") && strstr(out, "K "),
          "status %d: %s", rc, out);
    snprintf(cmd, sizeof cmd,
             "cd %s && '%s' bisect stage small.min.case --fault exp2-gate; test $? = 1 && '%s' run "
             "small.min.case --cache none --fault exp2-gate; test $? = 1 && '%s' run "
             "small.min.case --cache none --backend sim",
             gt_tmpdir(), gt_program(), gt_program(), gt_program());
    rc = gt_run(cmd, out, sizeof out);
    CHECK(rc == 0 && strstr(out, "WRONG STAGE: gate") && strstr(out, "VERDICT: FAIL") &&
              strstr(out, "VERDICT: PASS"),
          "status %d: %s", rc, out);
    const struct {
        const char *args, *says;
    } no[] = {{"small.case", "no stage is wrong with 4 ranks"},
              {"small.case --outputs x.safetensors", "give the program as a shared library"},
              {"", "name a case"},
              {"smoke-step", "op = step cannot be shrunk"},
              {"small.case --fault exp2-gate -o x.txt", "ends in .case"},
              {"no-such-case", "no-such-case"},
              {"small.case --fault nonsense", "nonsense"}};
    for (size_t i = 0; i < sizeof no / sizeof *no; i++) {
        snprintf(cmd, sizeof cmd, "cd %s && '%s' shrink %s --cases '%s' --cache none --ranks 4",
                 gt_tmpdir(), gt_program(), no[i].args, gt_cases());
        rc = gt_run(cmd, out, sizeof out);
        CHECK(rc == 2 && strstr(out, no[i].says), "%s: status %d: %s", no[i].args, rc, out);
    }
}
