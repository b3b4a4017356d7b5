/* Checks without a truth: all hold for the simulated ranks, and each is seen red by a fault that
 * breaks what it promises. */
#include "cases.h"
#include "harness/case/case.h"
#include "harness/search/invariants.h"

#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int check(const char *name, dp_base base, int N, dp_fault fault, const char *only,
                 dp_checks *out) {
    dp_case c;
    dp_err e = {0};
    const int threads = omp_get_max_threads();
    if (!gt_open_case(name, &c)) return 0;
    const dp_check_subject s = {.backend = DP_BACKEND_SIM,
                                .run = {.base = base, .chain = DP_FP32, .fault = fault}};
    omp_set_num_threads(1);
    const int ok = !dp_checks_run(&c.p, &s, N, 1, only, out, &e);
    omp_set_num_threads(threads);
    if (!ok) gt_fail(__FILE__, __LINE__, name, "%s", e.msg);
    dp_case_free(&c);
    return ok;
}

DP_TEST(invariants, all_hold_for_the_simulated_ranks) {
    static const struct {
        const char *name;
        dp_base base;
        int N, skipped;
    } x[] = {{"smoke-kda", DP_BASE_BF16, 4, 0},   {"packed-across", DP_BASE_FP32, 8, 0},
             {"smoke-mkda2", DP_BASE_FP64, 3, 0}, {"smoke-gdn", DP_BASE_FP32, 4, 0},
             {"t1", DP_BASE_FP32, 1, 8},          {"kda-corr", DP_BASE_BF16, 4, 0},
             {"smoke-ssd", DP_BASE_BF16, 4, 0},   {"smoke-dplr", DP_BASE_FP64, 4, 0}};
    for (size_t i = 0; i < sizeof x / sizeof *x; i++) {
        dp_checks r;
        int skipped = 0;
        if (!check(x[i].name, x[i].base, x[i].N, DP_FAULT_NONE, NULL, &r)) continue;
        CHECK(r.n == DP_NCHECKS, "%s: %d checks", x[i].name, r.n);
        for (int k = 0; k < r.n; k++) {
            const dp_check *c = &r.c[k];
            CHECK(c->verdict != DP_FAIL, "%s, %s: %s", x[i].name, c->name, c->why);
            CHECK(c->verdict == DP_SKIPPED ? c->why[0] != 0 : c->compared > 0,
                  "%s, %s: %s after %lld entries", x[i].name, c->name, dp_verdict_names[c->verdict],
                  (long long)c->compared);
            skipped += c->verdict == DP_SKIPPED;
        }
        CHECK(skipped == x[i].skipped, "%s: %d skipped, not %d", x[i].name, skipped, x[i].skipped);
    }
}

DP_TEST(invariants, each_is_red_under_a_fault_that_breaks_it) {
    static const struct {
        const char *check;
        dp_fault fault;
        const char *name;
        dp_base base;
        int N;
        const char *says;
    } x[] = {
        {"repeat", DP_FAULT_RACE, "smoke-kda", DP_BASE_FP32, 4, "state_fwd, rank 3, head 1"},
        {"causality-chunk", DP_FAULT_ANCHOR_LEAK, "smoke-kda", DP_BASE_FP32, 2,
         "of its chunk changed"},
        {"causality", DP_FAULT_ZIGZAG, "smoke-kda", DP_BASE_FP32, 4, "o: rank"},
        {"causality", DP_FAULT_TAIL_UNMASKED, "packed-across", DP_BASE_BF16, 1, ""},
        {"anticausality", DP_FAULT_STALE_ACCUMULATOR, "no-decay", DP_BASE_FP32, 2, "rank 1"},
        {"anticausality", DP_FAULT_ZIGZAG, "smoke-kda", DP_BASE_FP32, 4, ""},
        {"heads", DP_FAULT_GATE_OF_HEAD0, "weak-heads", DP_BASE_BF16, 4, "after head 0 changed"},
        {"head-order", DP_FAULT_GATE_OF_HEAD0, "weak-heads", DP_BASE_BF16, 4,
         "where the last of 4 comes first"},
        {"packed", DP_FAULT_TAIL_UNMASKED, "smoke-kda", DP_BASE_FP32, 1, ""},
        {"packed", DP_FAULT_GRID_AXIS, "packed-across", DP_BASE_FP32, 1,
         "o: rank 0, head 0, token 35"},
        {"sequence-order", DP_FAULT_GRID_AXIS, "packed-across", DP_BASE_FP32, 1,
         "o: rank 0, head 0, token 0"},
        {"sequence-order", DP_FAULT_STRIDE_IGNORED, "smoke-kda", DP_BASE_FP32, 1, "o: rank 0"},
        {"prefix", DP_FAULT_STALE_ACCUMULATOR, "no-decay", DP_BASE_FP32, 1, "token 128"},
        {"scale-v", DP_FAULT_LINEAR_GATE, "smoke-kda", DP_BASE_FP32, 1, ""},
        {"scale-do", DP_FAULT_LINEAR_GATE, "smoke-kda", DP_BASE_FP32, 1, ""},
        {"chunk-size", DP_FAULT_DECAY_BEFORE_USE, "smoke-kda", DP_BASE_FP32, 1,
         "chunks of 16 and of 64 differ by"},
        {"chunk-size", DP_FAULT_STATE_BF16, "weak-heads", DP_BASE_FP32, 4, "both bounds allow"},
        {"chunk-size", DP_FAULT_HALF_CHUNK, "packed-across", DP_BASE_FP32, 1, "dk: rank 0, head"},
        {"ranks", DP_FAULT_MERGE_NEAREST_FIRST, "smoke-kda", DP_BASE_BF16, 4, "rank"},
        {"ranks", DP_FAULT_FWD_FIRST_SUBSEQ, "packed-across", DP_BASE_BF16, 4, "rank"},
        {"transpose", DP_FAULT_CU_DIVIDED, "packed-across", DP_BASE_FP32, 8, "dM: rank"},
        {"ranks-bound", DP_FAULT_CHAIN_BF16, "weak-heads", DP_BASE_FP32, 4, "differ by"},
    };
    for (size_t i = 0; i < sizeof x / sizeof *x; i++) {
        dp_checks bad, good;
        const char *fault = dp_faults[x[i].fault].name;
        if (!check(x[i].name, x[i].base, x[i].N, x[i].fault, x[i].check, &bad) ||
            !check(x[i].name, x[i].base, x[i].N, DP_FAULT_NONE, x[i].check, &good))
            continue;
        CHECK(good.n == 1 && good.c[0].verdict == DP_PASS, "%s, %s without %s: %s", x[i].name,
              x[i].check, fault, good.c[0].why);
        CHECK(bad.n == 1 && bad.c[0].verdict == DP_FAIL, "%s, %s with %s: %s", x[i].name,
              x[i].check, fault, dp_verdict_names[bad.c[0].verdict]);
        CHECK(strstr(bad.c[0].why, x[i].says), "%s, %s with %s: %s", x[i].name, x[i].check, fault,
              bad.c[0].why);
    }
}

DP_TEST(invariants, the_program_checks_another_size_in_blocks_of_heads) {
    char cmd[2048], out[8192];
    /* blocks share the checks, or each takes all */
    snprintf(cmd, sizeof cmd,
             "%s check --cases %s smoke-kda --tokens 256 --heads 3 --block 2 --ranks 4 --base fp32 "
             "--json %s/check.json",
             gt_program(), gt_cases(), gt_tmpdir());
    int rc = gt_run(cmd, out, sizeof out);
    CHECK(rc == 0 && strstr(out, "T = 256, heads 0 to 1 of 3") &&
              strstr(out, "heads 2 to 2 of 3") &&
              strstr(out, "CHECK: PASS (19 held, 0 did not, 1 skipped)"),
          "exit status %d: %s", rc, out);
    snprintf(cmd, sizeof cmd,
             "%s check --cases %s smoke-kda --every --tokens 256 --heads 3 --block 2 --ranks 4 "
             "--base fp32 --json %s/check.json",
             gt_program(), gt_cases(), gt_tmpdir());
    rc = gt_run(cmd, out, sizeof out);
    CHECK(rc == 0 && strstr(out, "T = 256, heads 0 to 1 of 3") &&
              strstr(out, "heads 2 to 2 of 3") &&
              strstr(out, "CHECK: PASS (38 held, 0 did not, 2 skipped)"),
          "exit status %d: %s", rc, out);
    snprintf(cmd, sizeof cmd,
             "%s check --cases %s smoke-kda --fault merge-nearest-first --only ranks", gt_program(),
             gt_cases());
    rc = gt_run(cmd, out, sizeof out);
    CHECK(rc == 1 && strstr(out, "fail     ranks") && strstr(out, "CHECK: FAIL"),
          "exit status %d: %s", rc, out);
    snprintf(cmd, sizeof cmd, "%s check --cases %s smoke-conv", gt_program(), gt_cases());
    CHECK(gt_run(cmd, out, sizeof out) == 2 && strstr(out, "op = conv"), "%s", out);
    snprintf(cmd, sizeof cmd, "%s check --cases %s smoke-kda --only nothing", gt_program(),
             gt_cases());
    CHECK(gt_run(cmd, out, sizeof out) == 2 && strstr(out, "nothing"), "%s", out);
}

/* A kernel in a library: bits where it claims them, else the bounds of its design. */
DP_TEST(invariants, a_library_is_held_to_bits_or_to_its_bounds) {
    static const struct {
        const char *bad, *options;
        int status;
        const char *says[3];
    } rows[] = {
        {"",
         "--ranks 4",
         0,
         {"CHECK: PASS (15 held, 0 did not, 5 skipped)", "skipped  chunk-size",
          "names no other length of chunks"}},
        {"", "--design chunks=16:32 --only chunk-size", 0, {"largest difference 0 of"}},
        {"chunk",
         "--design chunks=16:32:64 --only chunk-size",
         1,
         {"fail     chunk-size", "token 16: chunks of 32 and of 64 differ by"}},
        {"second", "--only sequence-order", 1, {"fail     sequence-order", "both bounds allow"}},
        {"stateless", "--only no-state", 1, {"fail     no-state", "both bounds allow"}},
        {"", "--design chunks=24", 2, {"powers of two from 8 to 512"}},
        {"unsteady", "", 0, {"not bitwise (o: rank 0, head 0, token 0", "within bounds, at most"}},
        {"unsteady",
         "--bitwise",
         1,
         {"fail     repeat", "not repeatable, 2 of 2: o: rank 0", "skipped  causality "}},
        {"unsteady", "--bitwise --only causality", 1, {"not repeatable, 1 of 1: causality failed"}},
        {"", "--tokens 64 --heads 16 --ranks 1 --only heads", 0, {"heads 0 to 15 of 16", "1 held"}},
        {"leak",
         "--only causality-chunk",
         1,
         {"fail     causality-chunk", "both bounds allow", "changed"}},
        {"leak",
         "--design recurrent --only causality-chunk",
         1,
         {"fail     causality-chunk", "both bounds allow"}},
        {"leak", "--design recurrent,state=bf16", 0, {"no bound is derived for the design"}},
        {"doubles", "", 1, {"fail     reference", "token 0: the fp64 reference and it differ"}},
        {"second-call", "--only repeat", 1, {"fail     repeat", "both bounds allow"}},
        {"second-dies", "--only repeat", 1, {"fail     repeat", "crashed: SIGABRT"}},
        {"remembers",
         "--ranks 1",
         1,
         {"fail     scale-v", "called with the problem itself before"}},
        {"crash", "", 1, {"fail     repeat", "(0 held, 1 did not, 0 skipped)"}},
        {"fails", "", 1, {"no luck on rank"}},
        {"", "--cases \"$CASES\" smoke-kda", 2, {"example-ranks refuses it: takes the log decay"}},
        {"refuses-packed", "--only packed", 2, {"skipped  packed"}},
        {"", "--design chunk=0.5", 2, {"chunk"}},
        {"", "--backend sim", 2, {"go without --backend"}},
    };
    char cmd[2048], out[16384];
    snprintf(
        cmd, sizeof cmd,
        "cc -O1 -fPIC -shared -ffp-contract=off -I'%s/../harness' "
        "'%s/../harness/tests/data/bad_subject.c' -o '%s/checked.so' -lm && "
        "printf 'reason = r\\nsource = s\\nop = kda\\nT = 160\\nH = 1\\nHV = 2\\nK = 8\\nV = 4\\n"
        "g_scale = 0.02\\ns0_scale = 1\\nranks = 1,4\\nbase = fp32\\nchain = fp32\\n' "
        ">'%s/checked.case'",
        gt_cases(), gt_cases(), gt_tmpdir(), gt_tmpdir());
    REQUIRE(gt_run(cmd, out, sizeof out) == 0, "%s", out);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        snprintf(
            cmd, sizeof cmd,
            "export BAD='%s' CASES='%s'; '%s' check %s/checked.case --subject %s/checked.so %s",
            rows[i].bad, gt_cases(), gt_program(), gt_tmpdir(), gt_tmpdir(), rows[i].options);
        const int rc = gt_run(cmd, out, sizeof out);
        CHECK(rc == rows[i].status, "%s %s: exit status %d: %s", rows[i].bad, rows[i].options, rc,
              out);
        for (int k = 0; k < 3 && rows[i].says[k]; k++)
            CHECK(strstr(out, rows[i].says[k]), "%s %s: nothing of '%s' in: %s", rows[i].bad,
                  rows[i].options, rows[i].says[k], out);
    }
}

/* Squares of its numbers leave the range of doubles: its later rows have no bound. */
DP_TEST(invariants, rows_whose_bound_overflows_are_left_out) {
    char cmd[2048], out[16384];
    snprintf(cmd, sizeof cmd,
             "printf 'reason = r\\nsource = s\\nop = kda\\nT = 192\\nH = 1\\nK = 8\\nV = 4\\n"
             "g_scale = 6\\ng_least = -6\\nbackward = no\\nranks = 1\\nbase = fp64\\n"
             "chain = fp32\\n' >'%s/grows.case' && '%s' check grows --cases '%s' && "
             "{ '%s' run grows --cases '%s' --backend sim --cache none; [ $? = 2 ]; }",
             gt_tmpdir(), gt_program(), gt_tmpdir(), gt_program(), gt_tmpdir());
    CHECK(gt_run(cmd, out, sizeof out) == 0, "%s", out);
    CHECK(strstr(out, "rows lie under no limit") && !strstr(out, "nan"), "%s", out);
    CHECK(strstr(out, " rows have no bound: it overflowed"), "%s", out);
}

/* The case has gradients, the check leaves them out. */
DP_TEST(invariants, a_case_with_gradients_is_checked_forward) {
    char cmd[2048], out[16384];
    snprintf(cmd, sizeof cmd, "'%s' check smoke-kda --cases '%s' --forward", gt_program(),
             gt_cases());
    CHECK(gt_run(cmd, out, sizeof out) == 0 && strstr(out, "\npass     heads ") &&
              strstr(out, "(17 held, 0 did not, 3 skipped)"),
          "%s", out);
}
