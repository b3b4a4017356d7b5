/* bisect precision: the smallest set and the cheapest policy, against trying policies one by one.
 */
#include "gt.h"
#include "harness/case/case.h"
#include "harness/search/precision.h"

#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <string.h>

static double error_of_o(const dp_problem *p, const double *want, const dp_precision *r,
                         unsigned raised_to_top, int N) {
    dp_base at[DP_NSTAGES];
    dp_format chain = DP_BF16;
    dp_sim s;
    double d = 0, n = 0;
    for (int i = 0; i < DP_NSTAGES; i++)
        at[i] = DP_BASE_BF16;
    for (int u = 0; u < r->nunit; u++) {
        const int top = r->unit[u].format[r->unit[u].nlevel - 1];
        if (!(raised_to_top >> u & 1)) continue;
        if (r->unit[u].stage == DP_NSTAGES)
            chain = top;
        else
            at[r->unit[u].stage] = top;
    }
    const dp_design design = dp_design_of(at[0]);
    const dp_sim_options stages = {.at = at};
    if (dp_sim_open(&s, p, &design, N, &stages, NULL)) return NAN;
    dp_sim_run(&s, chain, DP_EXCHANGE_ALLGATHER, 0);
    for (int64_t i = 0; i < p->T * p->HV * p->V; i++) {
        d += (s.out.o[i] - want[i]) * (s.out.o[i] - want[i]);
        n += want[i] * want[i];
    }
    dp_sim_free(&s);
    return sqrt(d / n);
}

DP_TEST(precision, no_smaller_set_will_do) {
    char path[512];
    dp_case c;
    dp_err e = {0};
    dp_precision r;
    dp_sim ref;
    const int threads = omp_get_max_threads();
    omp_set_num_threads(1);
    snprintf(path, sizeof path, "%s/kda-reflect.case", gt_cases());
    REQUIRE(!dp_case_load(path, &c, &e), "%s", e.msg);
    dp_precision_request rq = {.p = &c.p,
                               .N = 4,
                               .from = DP_BASE_BF16,
                               .to = DP_BASE_FP32,
                               .chain_from = DP_BF16,
                               .chain_to = DP_FP32,
                               .max_tries = 2000};
    for (int i = 0; i < 10; i++)
        rq.need[i] = NAN;
    rq.need[0] = 1e-2;
    REQUIRE(!dp_precision_search(&rq, &r, &e), "%s", e.msg);
    REQUIRE(!r.from_passes && r.to_passes && r.smallest.found && r.cheapest.found, "from %d to %d",
            r.from_passes, r.to_passes);
    CHECK(r.smallest.error[0] <= rq.need[0] && r.cheapest.error[0] <= rq.need[0] &&
              r.from_error[0] > rq.need[0],
          "%g %g %g", r.smallest.error[0], r.cheapest.error[0], r.from_error[0]);
    CHECK(r.smallest.proven && r.cheapest.proven, "not proven after %d policies", r.tries);
    CHECK(r.cheapest.cost.seconds <= r.smallest.cost.seconds &&
              r.smallest.cost.seconds < r.to_cost.seconds && r.smallest.raised <= r.cheapest.raised,
          "%g %g %g", r.cheapest.cost.seconds, r.smallest.cost.seconds, r.to_cost.seconds);
    CHECK(r.smallest.raised >= 2 && r.smallest.raised <= 5, "%d raised: no longer a test",
          r.smallest.raised);
    dp_sim_new(&ref, &c.p, DP_BASE_FP64, 4, DP_FAULT_NONE, &e);
    dp_sim_run(&ref, DP_FP64, DP_EXCHANGE_ALLGATHER, 0);
    int tried = 0;
    for (unsigned set = 0; set < 1u << r.nunit; set++) {
        if (__builtin_popcount(set) != r.smallest.raised - 1) continue;
        const double x = error_of_o(&c.p, ref.out.o, &r, set, 4);
        CHECK(!(x <= rq.need[0]), "%d units are enough (set %x: %g), not %d", r.smallest.raised - 1,
              set, x, r.smallest.raised);
        tried++;
    }
    CHECK(tried > 5, "%d sets tried", tried);
    unsigned all =
        0; /* the unit that is reported to cost most when it stays is the one that does */
    int top = 0;
    for (int u = 0; u < r.nunit; u++)
        all |= 1u << u;
    for (int u = 0; u < r.nunit; u++)
        if (r.unit[u].alone[0] > r.unit[top].alone[0]) top = u;
    const double x = error_of_o(&c.p, ref.out.o, &r, all & ~(1u << top), 4);
    CHECK(fabs(x - r.unit[top].alone[0]) <= 1e-6 * x, "%s: %g, reported %g", r.unit[top].name, x,
          r.unit[top].alone[0]);
    dp_sim_free(&ref);
    dp_case_free(&c);
    omp_set_num_threads(threads);
}

static int program(const char *args, char *out, int size) {
    char cmd[2048];
    snprintf(cmd, sizeof cmd, "OMP_NUM_THREADS=1 %s bisect precision smoke-gdn --cases %s %s 2>&1",
             gt_program(), gt_cases(), args);
    return gt_run(cmd, out, size);
}

DP_TEST(precision, the_verdict_of_the_wide_policy_can_be_the_need) {
    char out[4096];
    int rc = program("--ranks 2", out, sizeof out);
    CHECK(rc == 0 && strstr(out, "all as --to                  will do") &&
              strstr(out, "SMALLEST SET"),
          "status %d: %s", rc, out);
    rc = program("--ranks 2 --need o=1e-12", out, sizeof out);
    CHECK(rc == 1 && strstr(out, "NOT EVEN"), "status %d: %s", rc, out);
    rc = program("--from fp32 --to bf16", out, sizeof out);
    CHECK(rc == 2 && strstr(out, "from must be the coarser one"), "status %d: %s", rc, out);
    rc = program("--need p=1", out, sizeof out);
    CHECK(rc == 2 && strstr(out, "'p' is no tensor"), "status %d: %s", rc, out);
}
