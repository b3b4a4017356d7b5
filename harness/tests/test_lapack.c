/* The backend lapack. The chunk solver over LAPACKE and CBLAS is a subject of its own, every result
 * and every intermediate by name. It is another arithmetic than that of the simulated ranks. */
#include "harness/record/run.h"
#include "ref/arithmetic/linear.h"
#include "runs.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char CASE[] = "reason = r\nsource = s\nop = mkda\nT = 200\nH = 1\nHV = 2\nK = 24\nV = "
                           "20\nR = 2\ngate = softplus\nbeta = sigmoid\nl2norm = yes\n"
                           "g_mean = -2\ng_scale = 0.5\ns0_scale = 1\nranks = 1,4\nbase = "
                           "fp64,fp32,bf16\nchain = tf32,fp32\n";

static dp_case load(void) {
    dp_case c;
    dp_err e = {0};
    if (dp_case_parse(CASE, strlen(CASE), "x.case", 1, &c, &e)) {
        gt_fail(__FILE__, __LINE__, "case", "%s", e.msg);
        abort();
    }
    return c;
}

static void every_name_passes(const dp_case *c, const dp_run *r) {
    CHECK(r->verdict == DP_PASS, "%s: %s", r->id, r->why);
    CHECK(r->path && *r->path, "%s: which kernels?", r->id);
    for (int i = 0; i < DP_NRESULTS; i++) {
        int64_t rows, width;
        dp_result_shape(&c->p, i, &rows, &width);
        CHECK(!rows || gt_tensor(r, dp_result_fields[i].name), "%s: no %s", r->id,
              dp_result_fields[i].name);
    }
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++) {
        const dp_judgement *j = gt_tensor(r, dp_stage_tensors[i].name);
        if (dp_stage_tensors[i].kind == DP_PER_RANK && r->ranks == 1) continue;
        CHECK(j, "%s: no %s", r->id, dp_stage_tensors[i].name);
        const int drawn = i != DP_AKK; /* the simulated ranks form that in base bf16 alone */
        CHECK(!j || !drawn || !strcmp(j->tier, "expected"), "%s: %s is judged by '%s'", r->id,
              j->name, j->tier);
    }
}

DP_TEST(lapack, every_result_and_every_intermediate_is_judged_by_name) {
    dp_case c = load();
    const dp_backend be = DP_BACKEND_LAPACK;
    const char *const ids[] = {"x:backend=lapack,ranks=1,base=fp64,chain=fp32",
                               "x:backend=lapack,ranks=1,base=fp32,chain=fp32",
                               "x:backend=lapack,ranks=4,base=fp64,chain=fp32",
                               "x:backend=lapack,ranks=4,base=fp32,chain=fp32"};
    for (int again = 0; again < 2; again++) { /* the second time from the cache */
        const dp_run_options o = {.only[DP_ID_BACKEND] = {1, {(int)be}}, .cache = gt_tmpdir()};
        dp_runs runs = {0};
        dp_err e = {0};
        REQUIRE(!dp_case_run(&c, &o, &runs, &e), "%s", e.msg);
        CHECK(runs.n == 4, "%d runs", runs.n);
        for (int i = 0; i < runs.n && i < 4; i++) {
            CHECK(!strcmp(runs.run[i].id, ids[i]), "%s, not %s", runs.run[i].id, ids[i]);
            every_name_passes(&c, &runs.run[i]);
        }
        dp_runs_free(&runs);
    }
    dp_case_free(&c);
}

/* Were it the simulated ranks again, nothing would be said by its passing. How a BLAS sums is its
 * own affair, and another on every CPU: without fused products (Nehalem, Prescott) dv_local comes
 * out in our order. Most tensors do not. */
DP_TEST(lapack, sums_in_another_order_than_the_simulated_ranks) {
    dp_case c = load();
    dp_sim own, other;
    dp_err e = {0};
    const dp_design design = dp_design_of(DP_BASE_FP32);
    const dp_sim_options lapack = {.linear = &dp_linear_lapack};
    REQUIRE(!dp_sim_new(&own, &c.p, DP_BASE_FP32, 4, DP_FAULT_NONE, &e) &&
                !dp_sim_open(&other, &c.p, &design, 4, &lapack, &e),
            "%s", e.msg);
    dp_sim_run(&own, DP_FP32, DP_EXCHANGE_ALLGATHER, 1);
    dp_sim_run(&other, DP_FP32, DP_EXCHANGE_ALLGATHER, 1);
    int products = 0, moved = 0;
    char same[256] = "";
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++) {
        if (i == DP_GCUM || i == DP_AQK || i == DP_KG || i == DP_QG)
            continue; /* no products of matrices in these */
        double *a = dp_stage_tensor_value(&own, i), *b = dp_stage_tensor_value(&other, i);
        const int64_t n = dp_stage_tensor_size(&c.p, 4, i);
        int differ = 0;
        for (int64_t x = 0; x < n; x++)
            differ |= a[x] != b[x] && !(isnan(a[x]) && isnan(b[x]));
        products++;
        moved += differ;
        const size_t used = strlen(same);
        if (!differ) snprintf(same + used, sizeof same - used, " %s", dp_stage_tensors[i].name);
        free(a);
        free(b);
    }
    CHECK(products > 10 && 4 * moved >= 3 * products, "%d of %d have our bits:%s", products - moved,
          products, same);
    dp_sim_free(&own);
    dp_sim_free(&other);
    dp_case_free(&c);
}

DP_TEST(lapack, is_part_of_a_plain_run_and_refused_where_it_has_no_meaning) {
    char cmd[2048], out[8192];
    snprintf(cmd, sizeof cmd, "'%s' run smoke-kda --cases '%s' --cache '%s' --ranks 2 --chain fp32",
             gt_program(), gt_cases(), gt_tmpdir());
    CHECK(gt_run(cmd, out, sizeof out) == 0 &&
              strstr(out, "smoke-kda:backend=lapack,ranks=2,base=fp32,chain=fp32") &&
              strstr(out, "backend=lapack,ranks=2,base=fp64"),
          "%s", out);
    snprintf(cmd, sizeof cmd,
             "'%s' run --id smoke-kda:backend=lapack,ranks=2,base=fp32,chain=fp32 --cases '%s' "
             "--cache '%s'",
             gt_program(), gt_cases(), gt_tmpdir());
    CHECK(gt_run(cmd, out, sizeof out) == 0 && strstr(out, "1 passed, 0 failed, 0 skipped"), "%s",
          out);
    snprintf(cmd, sizeof cmd,
             "'%s' run smoke-conv smoke-chain --cases '%s' --cache none --backend lapack",
             gt_program(), gt_cases());
    CHECK(gt_run(cmd, out, sizeof out) == 2 && strstr(out, "skipped  smoke-conv:backend=lapack") &&
              strstr(out, "computes the recurrence, and no more"),
          "%s", out);
    snprintf(cmd, sizeof cmd, "'%s' check smoke-kda --cases '%s' --backend lapack", gt_program(),
             gt_cases());
    CHECK(gt_run(cmd, out, sizeof out) == 2 &&
              strstr(out, "--backend lapack: check knows sim, mpi, cuda and nccl"),
          "%s", out);
}

/* The form that the note on chunkwise MKDA prints, at one gate for all steps. It is right until
 * exp(-gcum) overflows in fp32, at -88.72 after 64 steps of -1.386, and NaN from there on. */
DP_TEST(lapack, the_factored_form_is_right_until_it_overflows) {
    static const struct {
        const char *gate, *base, *says;
        int status;
    } rows[] = {
        {"0.01", "fp32", "1 passed, 0 failed", 0},
        {"1.36", "fp32", "1 passed, 0 failed", 0},
        {"1.40", "fp32", "NaN or Inf, the first is entry 1008 (rank 0, sequence 0, token 63", 1},
        {"1.40", "fp64", "1 passed, 0 failed", 0},
        {"11.0", "fp64", "1 passed, 0 failed", 0},
        {"11.15", "fp64", "NaN or Inf, the first is entry 1008 (rank 0, sequence 0, token 63", 1}};
    char cmd[1200], out[8192];
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        snprintf(
            cmd, sizeof cmd,
            "printf 'reason = r\\nsource = s\\nop = mkda\\nT = 128\\nH = 1\\nHV = 1\\nK = 16\\nV "
            "= 16\\nR = 2\\ng_scale = 0\\ng_least = %s\\nranks = 1\\nbase = %s\\nchain = fp32\\n' "
            ">'%s/factored.case' && '%s' run '%s/factored.case' --cache none --backend lapack "
            "--design scores=factored",
            rows[i].gate, rows[i].base, gt_tmpdir(), gt_program(), gt_tmpdir());
        const int rc = gt_run(cmd, out, sizeof out);
        CHECK(rc == rows[i].status && strstr(out, rows[i].says), "%s, %s: status %d: %s",
              rows[i].gate, rows[i].base, rc, out);
    }
    snprintf(cmd, sizeof cmd,
             "'%s' run mkda4 weak-heads --cases '%s' --cache none --backend lapack --ranks 1,4 "
             "--design scores=factored",
             gt_program(), gt_cases());
    CHECK(!gt_run(cmd, out, sizeof out), "gradients and ranks: %s", out);
    snprintf(cmd, sizeof cmd, "'%s' run mkda4 --cases '%s' --backend lapack --design state=bf16",
             gt_program(), gt_cases());
    CHECK(gt_run(cmd, out, sizeof out) == 2 && strstr(out, "knows scores=factored and chunk=N"),
          "%s", out);
}
