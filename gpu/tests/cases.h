/* gpu/tests/cases.h - the problems of test_gpu and test_gpu_bwd, a row each. Sizes: H HV K V R,
 * gate of a head, token offsets of the sequences. Inputs: gate, its typical size, beta, L2 norm,
 * initial state, type, how alike neighbouring keys are, seed. Then tests (Case), tokens between
 * resets, recurrence. */
#ifndef DPG_TESTS_CASES_H
#define DPG_TESTS_CASES_H
#include "ref64.h"

namespace case_rows {
static const dp_gate LOG = DP_GATE_LOG, SOFT = DP_GATE_SOFTPLUS, LOWER = DP_GATE_LOWER_BOUND;
static const dp_beta PLAIN = DP_BETA_PLAIN, SIGM = DP_BETA_SIGMOID, SIGM2 = DP_BETA_SIGMOID2;
static const dpg_dtype F32 = DPG_F32, BF16 = DPG_BF16;
typedef std::vector<int64_t> Tokens;
static const Tokens one = {0, 192}, packed = {0, 5, 6, 70, 130, 130, 192}, ragged = {0, 200},
                    inside = {0, 96, 192};
static const Tokens to240 = {0, 240}, to384 = {0, 384}, to768 = {0, 768}, to960 = {0, 960},
                    to1536 = {0, 1536}, to3072 = {0, 3072};
static const std::vector<Case> rows = {
    {"kda_weak", 2, 4, 32, 48, 1, 0, one, LOG, 0.005, PLAIN, 1, 0, F32, 0, 1, "FB"},
    {"kda_packed", 2, 2, 48, 32, 1, 0, packed, LOG, 0.02, PLAIN, 1, 0, F32, 0, 2, "FB"},
    {"gdn_packed_s0", 1, 3, 32, 64, 1, 1, packed, SOFT, 0.05, SIGM, 1, 1, BF16, 0, 3, "FB"},
    {"mkda_r2", 1, 2, 32, 16, 2, 0, one, LOG, 0.01, PLAIN, 1, 0, F32, 0, 4, "FB"},
    {"fast128_packed", 2, 4, 128, 128, 1, 0, packed, SOFT, 0.02, SIGM, 1, 1, BF16, 0, 5, "Fb"},
    {"fast64", 1, 2, 64, 64, 1, 0, one, LOWER, 0.05, SIGM, 1, 0, BF16, 0, 6, "FB"},
    {"fast64_many_heads", 2, 24, 64, 64, 1, 0, packed, SOFT, 0.01, SIGM, 1, 1, BF16, 0, 7, "F"},
    {"fast64_gdn_many_heads", 2, 24, 64, 64, 1, 1, packed, SOFT, 0.01, SIGM, 1, 1, BF16, 0, 8, "F"},
    {"reset", 1, 2, 32, 48, 1, 0, one, LOG, 0.02, PLAIN, 1, 1, F32, 0, 41, "F", 37},
    {"fast64_reset", 1, 2, 64, 64, 1, 0, one, LOG, 0.02, SIGM, 1, 1, BF16, 0, 42, "F", 37},
    {"fast64_gdn_reset", 1, 2, 64, 64, 1, 1, one, LOG, 0.02, SIGM, 1, 1, BF16, 0, 43, "F", 50},
    {"fast64_mkda2", 1, 3, 64, 64, 2, 0, packed, SOFT, 0.01, PLAIN, 1, 1, BF16, 0, 26, "F"},
    {"fast128x64", 1, 4, 128, 64, 1, 0, packed, SOFT, 0.01, SIGM, 1, 1, BF16, 0, 61, "FB"},
    {"fast64x128", 2, 4, 64, 128, 1, 0, packed, LOG, 0.01, SIGM, 1, 1, BF16, 0, 62, "FB"},
    {"fast64x128_fp32", 1, 2, 64, 128, 1, 0, packed, SOFT, 0.02, SIGM, 1, 1, F32, 0, 71, "Fb"},
    {"fast64_cut", 2, 4, 64, 64, 1, 0, to960, SOFT, 0.005, SIGM, 1, 1, BF16, 0, 32, "F"},
    {"fast128x64_cut", 1, 2, 128, 64, 1, 0, to960, SOFT, 0.005, SIGM, 1, 1, BF16, 0, 33, "F"},
    {"kda_ragged", 2, 4, 64, 32, 1, 0, ragged, SOFT, 0.02, SIGM2, 1, 1, F32, 0, 11, "fb"},
    {"mkda_r4", 1, 2, 32, 48, 4, 0, packed, LOG, 0.01, PLAIN, 1, 0, F32, 0, 12, "fb"},
    {"mkda_r2_bf16", 2, 2, 64, 64, 2, 0, inside, SOFT, 0.02, PLAIN, 1, 0, BF16, 0, 13, "f"},
    {"k256_v16", 1, 1, 256, 16, 1, 0, one, LOG, 0.01, PLAIN, 1, 0, F32, 0, 14, "fb"},
    {"k16_v256", 1, 1, 16, 256, 1, 0, one, LOG, 0.01, PLAIN, 1, 0, F32, 0, 15, "fb"},
    {"lower_bound_strong", 1, 2, 32, 32, 1, 0, one, LOWER, 2.5, SIGM, 1, 0, F32, 0, 16, "f"},
    {"no_l2norm", 1, 2, 32, 32, 1, 0, packed, LOG, 0.02, PLAIN, 0, 0, F32, 0, 17, "fb"},
    {"alike_keys", 1, 2, 64, 64, 1, 0, one, LOG, 0.005, SIGM, 1, 0, F32, 0.9, 18, "f"},
    {"fast128_pre", 4, 16, 128, 128, 1, 0, to384, SOFT, 0.002, SIGM, 1, 0, BF16, 0, 24, "f"},
    {"fast64_pre", 2, 30, 64, 64, 1, 0, to240, SOFT, 0.002, SIGM, 1, 0, BF16, 0, 25, "f"},
    {"fast128_many_heads", 2, 12, 128, 128, 1, 0, packed, SOFT, 0.005, SIGM, 1, 0, BF16, 0, 23,
     "f"},
    {"fast128_weak", 1, 2, 128, 128, 1, 0, to768, LOG, 0.002, SIGM, 1, 0, BF16, 0.5, 19, "fb"},
    {"fast128_strong", 1, 1, 128, 128, 1, 0, one, LOG, 6, SIGM, 1, 0, BF16, 0, 20, "f"},
    {"fast128_mkda4", 2, 2, 128, 128, 4, 0, inside, LOG, 0.01, PLAIN, 1, 0, BF16, 0, 27, "f"},
    {"fast64_mkda2_many", 2, 24, 64, 64, 2, 0, one, LOWER, 0.02, SIGM, 1, 0, BF16, 0, 28, "f"},
    {"fast64_mkda4_strong", 1, 1, 64, 64, 4, 0, one, LOG, 6, PLAIN, 1, 0, BF16, 0, 29, "f"},
    {"fast128_fp32", 2, 4, 128, 128, 1, 0, inside, LOG, 0.02, PLAIN, 0, 1, F32, 0, 72, "fb"},
    {"fast64_fp32_mkda2", 1, 2, 64, 64, 2, 0, packed, SOFT, 0.02, PLAIN, 1, 0, F32, 0, 73, "f"},
    {"fast128x64_pre", 2, 16, 128, 64, 1, 0, to384, SOFT, 0.002, SIGM, 1, 0, BF16, 0, 63, "f"},
    {"fast64x128_pre", 2, 16, 64, 128, 1, 0, to384, SOFT, 0.002, SIGM, 1, 0, BF16, 0, 64, "f"},
    {"fast128x64_many_heads", 2, 24, 128, 64, 1, 0, packed, LOWER, 0.005, SIGM, 1, 0, BF16, 0, 65,
     "f"},
    {"fast64x128_many_heads", 2, 24, 64, 128, 1, 0, packed, SOFT, 0.005, SIGM, 1, 1, BF16, 0, 66,
     "f"},
    {"fast128x64_mkda2", 1, 2, 128, 64, 2, 0, inside, SOFT, 0.01, PLAIN, 1, 1, BF16, 0, 67, "f"},
    {"fast64x128_mkda4", 1, 2, 64, 128, 4, 0, packed, LOG, 0.01, PLAIN, 1, 0, BF16, 0, 68, "f"},
    {"fast64x128_gdn", 1, 2, 64, 128, 1, 1, packed, LOWER, 0.02, SIGM, 1, 0, BF16, 0, 69, "f"},
    {"fast128x64_strong", 1, 1, 128, 64, 1, 0, one, LOG, 6, SIGM, 1, 0, BF16, 0, 70, "f"},
    {"fast128_gdn", 1, 2, 128, 128, 1, 1, packed, SOFT, 0.02, SIGM, 1, 0, BF16, 0, 21, "fb"},
    {"fast128_gdn_many_heads", 2, 12, 128, 128, 1, 1, packed, LOWER, 0.01, SIGM, 1, 1, BF16, 0, 9,
     "f"},
    {"fast128x64_gdn_many_heads", 2, 24, 128, 64, 1, 1, packed, LOG, 0.5, SIGM, 0, 0, BF16, 0, 10,
     "f"},
    {"fast64x128_gdn_many_heads", 24, 24, 64, 128, 1, 1, packed, SOFT, 2, SIGM, 1, 0, BF16, 0.9, 11,
     "f"},
    {"fast64_packed", 2, 4, 64, 64, 1, 0, packed, SOFT, 0.02, PLAIN, 0, 1, BF16, 0, 22, "f"},
    {"fast128x256", 2, 4, 128, 256, 1, 0, packed, SOFT, 0.02, SIGM, 1, 1, BF16, 0, 74, "fb"},
    {"fast128x256_gdn", 1, 2, 128, 256, 1, 1, packed, LOWER, 0.02, SIGM, 1, 0, BF16, 0, 75, "fb"},
    {"fast64x192_mkda2", 1, 2, 64, 192, 2, 0, inside, SOFT, 0.01, PLAIN, 1, 1, BF16, 0, 76, "fb"},
    {"fast64_strong", 1, 2, 64, 64, 1, 0, packed, LOG, 6, SIGM, 1, 1, BF16, 0, 67, "B"},
    {"fast64_mkda2_strong", 1, 1, 64, 64, 2, 0, packed, LOG, 12, SIGM, 1, 0, BF16, 0, 68, "B"},
    {"fast64_mkda2", 1, 2, 64, 64, 2, 0, packed, SOFT, 0.01, PLAIN, 1, 1, BF16, 0, 69, "B"},
    {"fast64_mkda2_one_gate", 1, 2, 64, 64, 2, 1, packed, SOFT, 0.01, PLAIN, 1, 1, BF16, 0, 73,
     "B"},
    {"kda_inside", 1, 3, 32, 32, 1, 0, inside, LOG, 0.005, PLAIN, 1, 1, F32, 0, 26, "b"},
    {"fast64_segments", 1, 2, 64, 64, 1, 0, to3072, LOG, 0.0002, SIGM, 1, 0, BF16, 0.995, 27, "b"},
    {"fast128_segments", 1, 1, 128, 128, 1, 0, to1536, LOG, 0.0005, SIGM, 1, 0, BF16, 0.99, 28,
     "b"},
    {"fast128x64_segments", 1, 2, 128, 64, 1, 0, to1536, LOG, 0.0005, SIGM, 1, 0, BF16, 0.99, 63,
     "b"},
    {"fast64x128_segments", 1, 1, 64, 128, 1, 0, to1536, LOG, 0.0005, SIGM, 1, 0, BF16, 0.99, 64,
     "b"},
    {"fast64x128_many_heads", 2, 52, 64, 128, 1, 0, one, LOWER, 0.01, SIGM, 1, 1, BF16, 0, 65, "b"},
    {"fast128x64_many_heads", 2, 52, 128, 64, 1, 0, inside, SOFT, 0.01, SIGM, 1, 0, BF16, 0, 66,
     "b"},
    {"gdn2", 2, 4, 48, 40, 1, 0, packed, SOFT, 0.02, PLAIN, 1, 1, F32, 0, 81, "FB", 0, DP_GDN2},
    {"gdn2_128", 1, 2, 128, 128, 1, 0, one, LOG, 0.01, PLAIN, 1, 0, BF16, 0, 82, "fb", 0, DP_GDN2},
    {"gla", 1, 2, 64, 24, 1, 0, packed, LOG, 0.02, PLAIN, 0, 1, F32, 0, 83, "FB", 0, DP_GLA},
    {"ssd", 1, 3, 32, 64, 1, 1, ragged, LOG, 0.02, PLAIN, 0, 0, BF16, 0, 84, "FB", 0, DP_SSD},
    {"deltaproduct3", 1, 2, 48, 32, 3, 1, packed, SOFT, 0.02, SIGM2, 1, 1, F32, 0, 85, "FB", 0,
     DP_DELTAPRODUCT},
    {"deltaproduct2_128", 1, 2, 128, 64, 2, 1, one, LOG, 0.01, SIGM2, 1, 0, BF16, 0, 86, "fb", 0,
     DP_DELTAPRODUCT},
    {"dplr", 2, 4, 64, 32, 1, 0, packed, SOFT, 0.02, PLAIN, 1, 1, F32, 0, 87, "FB", 0, DP_DPLR},
    {"dplr_256", 1, 1, 256, 16, 1, 0, one, LOG, 0.01, PLAIN, 1, 0, BF16, 0, 88, "fb", 0, DP_DPLR}};
} // namespace case_rows

/* The cases of test f (forward) or b (backward); small: those of its small set alone. */
static inline std::vector<Case> cases(char test, bool small) {
    std::vector<Case> taken;
    for (const Case &c : case_rows::rows)
        if (strchr(c.tests, toupper(test)) || (!small && strchr(c.tests, test))) taken.push_back(c);
    return taken;
}

/* Does the fast path have kernels for it. */
static inline bool fast_widths(const Case &c) {
    return !c.alone() && (c.K == 64 || c.K == 128) && c.V % 64 == 0;
}
#endif
