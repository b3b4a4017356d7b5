/* The problem's condition number: right on a system with a known inverse, recorded where it is
 * large. It is an excuse where it explains an error and none elsewhere. */
#include "cases.h"
#include "harness/case/case.h"
#include "harness/record/run.h"
#include "harness/run/standard.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Equal unit keys, no decay, one beta b: A_ij = b below the diagonal, (A^-1)_ij = -b (1 -
 * b)^(i-j-1). */
DP_TEST(condition, equals_the_closed_form_of_equal_keys) {
    static const double betas[] = {0.5, 1, 2.5};
    for (int z = 0; z < 3; z++) {
        const double b = betas[z];
        dp_problem p = {
            .model = DP_KDA, .T = 64, .H = 1, .HV = 1, .K = 4, .V = 4, .R = 1, .scale = 1};
        dp_sim s;
        dp_condition c;
        dp_err e = {0};
        dp_problem_alloc(&p);
        for (int t = 0; t < 64; t++) {
            p.k[4 * t] = p.q[4 * t] = 1;
            p.beta[t] = b;
        }
        REQUIRE(!dp_sim_new(&s, &p, DP_BASE_FP64, 1, DP_FAULT_NONE, &e), "%s", e.msg);
        dp_condition_of(&s, &c);
        double inverse = 1, entry = fmax(1, b);
        for (int m = 0; m < 63; m++) {
            inverse += b * pow(fabs(1 - b), m);
            entry = fmax(entry, b * pow(fabs(1 - b), m));
        }
        const double want = inverse * (1 + 63 * b);
        CHECK(fabs(c.condition / want - 1) < 1e-9 && fabs(c.inverse / inverse - 1) < 1e-9 &&
                  fabs(c.entry / entry - 1) < 1e-9,
              "beta %g: condition %g, inverse %g, entry %g; want %g, %g, %g", b, c.condition,
              c.inverse, c.entry, want, inverse, entry);
        CHECK(c.rank == 0 && c.head == 0 && c.token == 0, "rank %d, head %d, token %lld", c.rank,
              c.head, (long long)c.token);
        CHECK(dp_ill_conditioned(&c, DP_BASE_FP32) == (b > 2), "beta %g: condition %g", b,
              c.condition);
        dp_sim_free(&s);
        dp_problem_free(&p);
    }
}

static int run(const char *name, dp_base base, int ranks, dp_fault fault, dp_runs *out) {
    dp_case c;
    dp_err e = {0};
    const dp_run_options o = {.only = {[DP_ID_RANKS] = {1, {ranks}},
                                       [DP_ID_BASE] = {1, {(int)base}},
                                       [DP_ID_BACKEND] = {1, {DP_BACKEND_SIM}}},
                              .fault = fault,
                              .cache = gt_cache()};
    if (!gt_open_case(name, &c)) return 0;
    const int ok = !dp_case_run(&c, &o, out, &e) && out->n > 0;
    dp_case_free(&c);
    if (!ok) gt_fail(__FILE__, __LINE__, name, "%s", e.msg);
    return ok;
}

DP_TEST(condition, a_large_inverse_that_the_problem_demands_passes_and_says_so) {
    for (int b = 0; b < DP_NBASES; b++) {
        dp_runs r = {0};
        if (!run("ill-conditioned", (dp_base)b, 2, DP_FAULT_NONE, &r)) return;
        const dp_run *x = &r.run[0];
        CHECK(x->verdict == DP_PASS && x->cond.entry > 1e6, "%s: %s, entry %g: %s", x->id,
              dp_verdict_names[x->verdict], x->cond.entry, x->why);
        CHECK((strstr(x->why, "within what it explains") != NULL) ==
                  dp_ill_conditioned(&x->cond, x->base),
              "%s: condition %g: %s", x->id, x->cond.condition, x->why);
        CHECK(x->cond.rank >= 0 && x->cond.rank < 2 && x->cond.head >= 0 && x->cond.head < 2,
              "rank %d, head %d", x->cond.rank, x->cond.head);
        dp_runs_free(&r);
    }
    dp_runs one = {0};
    if (!run("ill-conditioned", DP_BASE_FP32, 1, DP_FAULT_NONE, &one)) return;
    CHECK(one.run[0].cond.entry > 1e10 && one.run[0].verdict == DP_PASS, "entry %g, %s",
          one.run[0].cond.entry, one.run[0].why);
    dp_runs_free(&one);
}

DP_TEST(condition, a_fault_is_not_excused) {
    static const struct {
        const char *name;
        dp_base base;
        int ranks;
        dp_fault fault;
        const char *says;
    } x[] = {
        {"kda-corr", DP_BASE_FP32, 1, DP_FAULT_NEUMANN_INVERSE,
         "the inputs are well-conditioned"}, /* a large inverse that is the kernel's own */
        {"kda-corr", DP_BASE_BF16, 1, DP_FAULT_DOUBLING_INVERSE, "the inputs are well-conditioned"},
        {"ill-conditioned", DP_BASE_FP32, 3, DP_FAULT_MERGE_SCALED,
         "more than it explains"}, /* another fault on an ill-conditioned problem */
    };
    for (size_t i = 0; i < sizeof x / sizeof *x; i++) {
        dp_runs r = {0};
        if (!run(x[i].name, x[i].base, x[i].ranks, x[i].fault, &r)) continue;
        CHECK(r.run[0].verdict == DP_FAIL && strstr(r.run[0].why, x[i].says), "%s: %s: %s",
              r.run[0].id, dp_verdict_names[r.run[0].verdict], r.run[0].why);
        dp_runs_free(&r);
    }
}
