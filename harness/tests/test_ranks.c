/* The chunk solver and the simulated ranks in fp64 against the long double step recurrence: every
 * model, layout and rank count. */
#include "gt.h"
#include "harness/bound/error_bound.h"
#include "harness/simulated/ranks.h"
#include "oracle.h"
#include "ref/chunk/chunk_gated.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const int64_t CU_PACKED[] = {0, 70, 70, 75, 76, 200, 240}, CU_CROSS[] = {0, 5, 130, 240},
                     CU_ALIGNED[] = {0, 80, 160, 240};

static const struct {
    const char *name;
    oracle_spec s;
} SPECS[] = {
    {"gdn",
     {DP_GDN, 240, 2, 2, 16, 8, 1, 0, NULL, DP_GATE_SOFTPLUS, DP_BETA_SIGMOID, 1, 0, 1, 0.1, 1}},
    {"kda",
     {DP_KDA, 240, 1, 2, 8, 16, 1, 0, NULL, DP_GATE_SOFTPLUS, DP_BETA_SIGMOID2, 1, 1, 1, 0.1, 2}},
    {"kda weak decay, gva 4, packed",
     {DP_KDA, 240, 1, 4, 12, 8, 1, 6, CU_PACKED, DP_GATE_LOG, DP_BETA_PLAIN, 0, 1, 1, 0.01, 3}},
    {"kda lower bound, crossing",
     {DP_KDA, 240, 2, 2, 8, 8, 1, 3, CU_CROSS, DP_GATE_LOWER_BOUND, DP_BETA_SIGMOID, 1, 0, 1, 0.02,
      4}},
    {"kda strong decay",
     {DP_KDA, 240, 1, 2, 16, 8, 1, 0, NULL, DP_GATE_LOG, DP_BETA_PLAIN, 1, 0, 1, 20, 8}},
    {"mkda R=2, aligned",
     {DP_MKDA, 240, 1, 2, 16, 8, 2, 3, CU_ALIGNED, DP_GATE_LOG, DP_BETA_PLAIN, 0, 1, 1, 0.02, 5}},
    {"mkda R=4",
     {DP_MKDA, 240, 1, 1, 16, 12, 4, 0, NULL, DP_GATE_SOFTPLUS, DP_BETA_SIGMOID, 1, 0, 1, 0.05, 6}},
    {"gdn2",
     {DP_GDN2, 240, 1, 2, 16, 8, 1, 0, NULL, DP_GATE_SOFTPLUS, DP_BETA_PLAIN, 1, 1, 1, 0.1, 9}},
    {"gdn2 weak decay, packed",
     {DP_GDN2, 240, 2, 4, 8, 12, 1, 6, CU_PACKED, DP_GATE_LOG, DP_BETA_PLAIN, 0, 1, 1, 0.05, 10}},
    {"gla weak decay, packed",
     {DP_GLA, 240, 2, 4, 8, 12, 1, 6, CU_PACKED, DP_GATE_LOG, DP_BETA_PLAIN, 0, 1, 1, 0.05, 11}},
    {"ssd",
     {DP_SSD, 240, 1, 2, 16, 8, 1, 0, NULL, DP_GATE_SOFTPLUS, DP_BETA_PLAIN, 1, 1, 1, 0.1, 12}},
    {"deltaproduct R=3",
     {DP_DELTAPRODUCT, 240, 1, 2, 16, 8, 3, 0, NULL, DP_GATE_SOFTPLUS, DP_BETA_SIGMOID2, 1, 1, 1,
      0.05, 13}},
    {"deltaproduct R=2, packed",
     {DP_DELTAPRODUCT, 240, 2, 4, 8, 12, 2, 6, CU_PACKED, DP_GATE_LOG, DP_BETA_PLAIN, 0, 1, 1, 0.05,
      14}},
    {"mkda R=2, packed",
     {DP_MKDA, 240, 2, 4, 8, 4, 2, 6, CU_PACKED, DP_GATE_SOFTPLUS, DP_BETA_SIGMOID, 1, 1, 1, 0.01,
      7}},
};

static double worst_field(const dp_problem *p, dp_result *got, dp_result *want,
                          const char **field) {
    double w = 0;
    for (int i = 0; i < DP_NRESULTS; i++) {
        int64_t rows, width;
        dp_result_shape(p, i, &rows, &width);
        if (!rows || !want->out[i]) continue;
        const double e = oracle_maxrel(got->out[i], want->out[i], rows * width);
        if (e >= w) {
            w = e;
            *field = dp_result_fields[i].name;
        }
    }
    return w;
}

DP_TEST(ranks, fp64_agrees_with_the_step_recurrence_for_every_rank_count) {
    const int ranks[] = {1, 2, 3, 4, 8};
    for (size_t i = 0; i < sizeof SPECS / sizeof *SPECS; i++) {
        dp_problem p;
        dp_result want;
        oracle_problem(&p, &SPECS[i].s);
        dp_result_alloc(&want, &p, 1);
        oracle_run(&p, &want, 1);
        for (size_t n = 0; n < sizeof ranks / sizeof *ranks; n++)
            for (int merge = 0; merge < DP_NRUN_EXCHANGES; merge++) {
                dp_sim s;
                const char *field = "";
                REQUIRE(dp_sim_new(&s, &p, DP_BASE_FP64, ranks[n], DP_FAULT_NONE, NULL) == DP_OK,
                        "%s", SPECS[i].name);
                dp_sim_run(&s, DP_FP64, merge, 1);
                const double e = worst_field(&p, &s.out, &want, &field);
                CHECK(e <= 1e-12, "%s, %d ranks, merge %s: %s off by %.2e", SPECS[i].name, ranks[n],
                      dp_exchange_names[merge], field, e);
                dp_sim_free(&s);
            }
        dp_result_free(&want);
        dp_problem_free(&p);
    }
}

/* Every row of every field within its bound (probable: 6 standard deviations), and o not better
 * than its format allows. */
DP_TEST(ranks, base_fp32_and_bf16_are_as_wrong_as_their_formats) {
    for (size_t i = 0; i < sizeof SPECS / sizeof *SPECS; i++) {
        dp_problem p;
        dp_result want;
        dp_sim ref;
        oracle_problem(&p, &SPECS[i].s);
        dp_result_alloc(&want, &p, 1);
        oracle_run(&p, &want, 1);
        REQUIRE(dp_sim_new(&ref, &p, DP_BASE_FP64, 3, DP_FAULT_NONE, NULL) == DP_OK, "%s",
                SPECS[i].name);
        dp_sim_run(&ref, DP_FP64, DP_EXCHANGE_ALLGATHER, 1);
        /* fp32, bf16, bf16 with gated scores and each anchor, in tf32, paired */
        for (int k = 0; k < 4 + DP_ANCHORS; k++) {
            const dp_base base = k ? DP_BASE_BF16 : DP_BASE_FP32;
            const dp_format chain = base == DP_BASE_BF16 ? DP_BF16 : DP_FP32;
            dp_design design = dp_design_of(base);
            dp_sim s;
            dp_error_bound_base w;
            dp_error_bound b;
            design.gated = k < 2                ? DP_SCORES_PAIRWISE
                           : k < 2 + DP_ANCHORS ? DP_SCORES_GATED
                           : k < 3 + DP_ANCHORS ? DP_SCORES_TF32
                                                : DP_SCORES_PAIRED;
            design.anchor = k < 2 ? 0 : (k - 2) % DP_ANCHORS;
            design.late = k % 2 && dp_Kg(&p) == 1 && !dp_erases(&p);
            design.summed = k % 2;
            REQUIRE(dp_sim_open(&s, &p, &design, 3, NULL, NULL) == DP_OK, "%s", SPECS[i].name);
            dp_sim_run(&s, chain, DP_EXCHANGE_ALLGATHER, 1);
            dp_error_bound_base_init(&w, &ref, &design, 2, 1, NULL);
            dp_error_bound_run(&w, chain, 1, &b);
            for (int f = 0; f < DP_NRESULTS; f++) {
                int64_t rows, width;
                dp_result_shape(&p, f, &rows, &width);
                if (!rows) continue;
                const double *got = s.out.out[f], *exact = want.out[f];
                double top = 0, err = 0, norm = 0;
                for (int64_t r = 0; r < rows; r++) {
                    double e = 0;
                    for (int64_t x = r * width; x < (r + 1) * width; x++) {
                        e += (got[x] - exact[x]) * (got[x] - exact[x]);
                        norm += exact[x] * exact[x];
                    }
                    err += e;
                    top = fmax(top, e == 0 ? 0 : sqrt(e) / b.row[f][r]);
                }
                CHECK(top <= 1, "%s, base %s, gated %d: %s at %.3g of its bound", SPECS[i].name,
                      dp_base_names[base], design.gated, dp_result_fields[f].name, top);
                if (f == DP_RESULT_O)
                    CHECK(sqrt(err / norm) >= (base == DP_BASE_BF16 ? 0x1p-8 : 0x1p-24) / 16,
                          "%s, base %s: o is too good, %.2e", SPECS[i].name, dp_base_names[base],
                          sqrt(err / norm));
            }
            dp_error_bound_free(&b);
            dp_error_bound_base_free(&w);
            dp_sim_free(&s);
        }
        dp_sim_free(&ref);
        dp_result_free(&want);
        dp_problem_free(&p);
    }
}
