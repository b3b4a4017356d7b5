/* Effective bits of the M chain (math.md j.7): formats are recognised from their errors, and a
 * chain that claims another one fails by name. */
#include "cases.h"
#include "harness/case/case.h"
#include "harness/record/run.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int run_text(int K, int n, int seed, const char *regime, const char *chains, dp_fault fault,
                    dp_runs *out) {
    char text[512];
    dp_case c;
    dp_err e = {0};
    snprintf(text, sizeof text,
             "reason = r\nsource = s\nop = chain\nregime = %s\nchunks = %d\nK = %d\nseed = "
             "%d\nchain = %s\n",
             regime, n, K, seed, chains);
    if (!gt_parse_case(text, &c)) return 0;
    const dp_run_options o = {.fault = fault};
    const int ok = dp_case_run(&c, &o, out, &e) == DP_OK;
    if (!ok) gt_fail(__FILE__, __LINE__, chains, "%s", e.msg);
    dp_case_free(&c);
    return ok;
}

#define ALL "fp64,fp32,tf32x3,tf32,tf32rz,bf16,bf16st"
static const struct {
    dp_format f, like;
    dp_bits_model model;
    double bits;
} LAW[] = {
    {DP_FP64, DP_FP64, DP_BITS_ACCUMULATE, 53},     {DP_FP32, DP_FP32, DP_BITS_ACCUMULATE, 24},
    {DP_TF32X3, DP_FP32, DP_BITS_ACCUMULATE, 23.8}, {DP_TF32, DP_TF32, DP_BITS_OPERAND, 11},
    {DP_TF32RZ, DP_TF32RZ, DP_BITS_OPERAND, 11},    {DP_BF16, DP_BF16, DP_BITS_OPERAND, 8},
    {DP_BF16ST, DP_BF16ST, DP_BITS_STORE, 8}};

DP_TEST(bits, each_format_is_recovered_within_three_tenths_at_every_length) {
    for (int seed = 1; seed <= 8; seed++) {
        dp_runs r = {0};
        if (!run_text(32, 256, seed, "reflect", ALL, DP_FAULT_NONE, &r)) return;
        REQUIRE(r.n == DP_NFORMATS, "%d runs", r.n);
        for (size_t i = 0; i < sizeof LAW / sizeof *LAW; i++) {
            const dp_run *x = &r.run[i];
            const dp_bits *b = &x->bits;
            REQUIRE((int)x->chain == (int)LAW[i].f && b->npoint == 5 && b->chunks[0] == 16 &&
                        b->chunks[2] == 64 && b->chunks[4] == 256,
                    "%s: %d lengths", x->id, b->npoint);
            const int biased = LAW[i].f == DP_TF32RZ;
            for (int k = 0; k < 5 && !biased; k += 2)
                CHECK(fabs(b->at[k][LAW[i].model] - LAW[i].bits) <= 0.3,
                      "seed %d, %s, %d chunks: %.2f bits", seed, dp_formats[x->chain].name,
                      b->chunks[k], b->at[k][LAW[i].model]);
            CHECK(b->model == LAW[i].model && b->like == (int)LAW[i].like &&
                      fabs(b->effective - LAW[i].bits) <= 0.3,
                  "seed %d, %s: %s", seed, dp_formats[x->chain].name, b->says);
            CHECK(b->biased == biased && fabs(b->slope - (biased ? 1 : 0.5)) < 0.1 &&
                      (isnan(b->truncated) == 0) == biased,
                  "seed %d, %s: slope %.3f", seed, dp_formats[x->chain].name, b->slope);
            CHECK(!b->wrong && x->verdict == DP_PASS, "seed %d, %s: %s", seed,
                  dp_formats[x->chain].name, x->why);
        }
        dp_runs_free(&r);
    }
}

/* Truncated and rounded tf32 have the same width; slope and shrinkage tell them apart, and the
 * readings of the truncated one fall with n. */
DP_TEST(bits, truncation_is_told_from_rounding) {
    dp_runs r = {0};
    if (!run_text(32, 256, 3, "reflect", "tf32,tf32rz", DP_FAULT_NONE, &r)) return;
    const dp_bits *n = &r.run[0].bits, *z = &r.run[1].bits;
    CHECK(fabs(n->at[0][DP_BITS_OPERAND] - n->at[4][DP_BITS_OPERAND]) < 0.3 &&
              z->at[0][DP_BITS_OPERAND] - z->at[4][DP_BITS_OPERAND] > 1.5,
          "%.2f %.2f, %.2f %.2f", n->at[0][1], n->at[4][1], z->at[0][1], z->at[4][1]);
    CHECK(strstr(z->says, "truncated tf32") && !strstr(n->says, "truncated") &&
              strstr(n->says, "nearest"),
          "%s | %s", n->says, z->says);
    dp_runs_free(&r);
}

DP_TEST(bits, a_chain_that_claims_more_than_it_has_fails_with_the_sentence) {
    const struct {
        const char *claim;
        dp_fault fault;
        const char *says;
    } row[] = {
        {"fp32", DP_FAULT_CHAIN_TF32RZ,
         "claims fp32 but behaves like truncated tf32: 11.0 bits truncated, biased"},
        {"tf32x3", DP_FAULT_CHAIN_TF32RZ, "claims 3xTF32 but behaves like truncated tf32"},
        {"tf32", DP_FAULT_CHAIN_TF32RZ,
         "claims tf32 rounded to nearest but behaves like truncated tf32"},
        {"bf16", DP_FAULT_CHAIN_TF32RZ, "claims bf16 operands but behaves like truncated tf32"},
        {"fp32", DP_FAULT_CHAIN_BF16,
         "claims fp32 but behaves like bf16 storage between steps: 8.0 bits"},
        {"tf32", DP_FAULT_CHAIN_BF16,
         "claims tf32 rounded to nearest but behaves like bf16 storage between steps: 8.0 bits"}};
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        dp_runs r = {0};
        if (!run_text(32, 256, 20, "reflect", row[i].claim, row[i].fault, &r)) return;
        CHECK(r.run[0].verdict == DP_FAIL &&
                  !strncmp(r.run[0].why, row[i].says, strlen(row[i].says)),
              "%s with %s: %s (%s)", row[i].claim, dp_faults[row[i].fault].name, r.run[0].why,
              r.run[0].bits.says);
        dp_runs_free(&r);
    }
}

/* The worst-case bound of tf32 has room for a truncated chain at these lengths: only the bits see
 * it. */
DP_TEST(bits, the_bound_alone_would_pass_truncated_for_rounded_tf32) {
    dp_runs r = {0};
    if (!run_text(32, 256, 20, "reflect", "tf32", DP_FAULT_CHAIN_TF32RZ, &r)) return;
    CHECK(r.run[0].tensor[0].verdict != DP_FAIL && r.run[0].verdict == DP_FAIL, "M: %s, run: %s",
          dp_verdict_names[r.run[0].tensor[0].verdict], dp_verdict_names[r.run[0].verdict]);
    dp_runs_free(&r);
}

/* A better chain than claimed is no fault; regimes that forget or stall and short chains have no
 * reading. */
DP_TEST(bits, no_reading_where_none_is_sound) {
    dp_runs r = {0};
    if (!run_text(32, 256, 1, "slow", "fp32,bf16st", DP_FAULT_NONE, &r) ||
        !run_text(32, 15, 1, "reflect", "fp32", DP_FAULT_NONE, &r) ||
        !run_text(128, 256, 1, "reflect", "fp64,bf16", DP_FAULT_NONE, &r))
        return;
    for (int i = 0; i < 3; i++)
        CHECK(!r.run[i].bits.npoint && r.run[i].verdict != DP_FAIL, "%s: %s", r.run[i].id,
              r.run[i].bits.says);
    CHECK(r.run[3].bits.npoint == 5 && fabs(r.run[3].bits.effective - 53) < 0.3,
          "fp64, K = 128: %s", r.run[3].bits.says);
    CHECK(r.run[4].bits.npoint == 5 && fabs(r.run[4].bits.effective - 8) < 0.1, "K = 128: %s",
          r.run[4].bits.says);
    dp_runs_free(&r);
}

DP_TEST(bits, the_record_carries_them) {
    char cmd[1024], path[512], out[4096];
    snprintf(path, sizeof path, "%s/bits.json", gt_tmpdir());
    snprintf(cmd, sizeof cmd,
             "printf 'reason = r\\nsource = s\\nop = chain\\nregime = reflect\\nchunks = 256\\nK = "
             "32\\n' >'%s/bits.case'",
             gt_tmpdir());
    CHECK(!gt_run(cmd, out, sizeof out), "%s", out);
    snprintf(cmd, sizeof cmd,
             "'%s' run '%s/bits.case' --chain fp32 --fault chain-tf32rz --json '%s'", gt_program(),
             gt_tmpdir(), path);
    CHECK(gt_run(cmd, out, sizeof out) == 1 &&
              strstr(out, "claims fp32 but behaves like truncated tf32"),
          "%s", out);
    json_t *d = json_load_file(path, 0, NULL), *run = json_array_get(json_object_get(d, "runs"), 0),
           *b = json_object_get(run, "bits");
    REQUIRE(b, "no bits in %s", path);
    CHECK(json_is_true(json_object_get(b, "biased")) && json_is_true(json_object_get(b, "wrong")),
          "%s", "biased, wrong");
    CHECK(fabs(json_number_value(json_object_get(b, "effective")) - 11) < 0.1, "effective %g",
          json_number_value(json_object_get(b, "effective")));
    const char *like = json_string_value(json_object_get(b, "like")),
               *model = json_string_value(json_object_get(b, "model"));
    CHECK(like && !strcmp(like, "tf32rz") && model && !strcmp(model, "operand"), "%s %s",
          like ? like : "-", model ? model : "-");
    json_decref(d);
}
