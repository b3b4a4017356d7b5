/* dA_log and ddt_bias against the sums of the dg beside them: numbers that underflow are explained,
 * and larger differences are not. */
#include "gt.h"
#include "harness/verdict/compare.h"
#include "oracle.h"

#include <math.h>
#include <stdlib.h>

/* ddt_bias of channel 0 off by `off`, where every dg is `each`. */
static dp_verdict judged(double each, double off, double tiny) {
    dp_problem p;
    dp_result r;
    const oracle_spec spec = {.model = DP_KDA,
                              .T = 40,
                              .H = 1,
                              .HV = 1,
                              .K = 4,
                              .V = 4,
                              .R = 1,
                              .Nseq = 1,
                              .gate = DP_GATE_SOFTPLUS,
                              .backward = 1,
                              .g_scale = 1,
                              .seed = 3};
    oracle_problem(&p, &spec);
    dp_result_alloc(&r, &p, 1);
    for (int64_t i = 0; i < p.T * p.K; i++)
        r.dg[i] = each;
    for (int c = 0; c < p.K; c++)
        r.ddt_bias[c] = (double)p.T * each + (c ? 0 : off);
    dp_judgement dg = {.verdict = DP_PASS}, bias = {.verdict = DP_PASS};
    const dp_sums_in in = {.p = &p,
                           .got = &r,
                           .arithmetic = 0x1p-24,
                           .tiny_dg = tiny,
                           .tiny_ddt_bias = tiny,
                           .dg = &dg,
                           .ddt_bias = &bias};
    dp_sums_judge(&in);
    dp_result_free(&r);
    dp_problem_free(&p);
    return bias.verdict;
}

DP_TEST(sums, what_underflows_is_explained_and_no_more) {
    static const struct {
        double each, off;
        dp_verdict verdict;
        double tiny;
    } rows[] = {
        {0x1p-149, 0x1p-140, DP_PASS, 0}, /* many-heads-wide: off by 4e-43 where none was allowed */
        {0, 0x1p-126, DP_PASS, 0},        /* a term that was flushed to zero */
        {0x1p-149, 0x1p-119, DP_FAIL, 0}, /* 40 terms cannot lose so much */
        {1, 0x1p-20, DP_PASS, 0},         /* fp32 of 40 terms */
        {1, 1, DP_FAIL, 0},               /* a term is missing */
        {0x1p-24, 0x1p-21, DP_PASS, 0x1p-25}, /* files of fp16; the terms fit bf16, too */
        {0x1p-24, 0x1p-18, DP_FAIL, 0x1p-25},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        CHECK(judged(rows[i].each, rows[i].off, rows[i].tiny) == rows[i].verdict,
              "%g, off by %g: not %s", rows[i].each, rows[i].off,
              dp_verdict_names[rows[i].verdict]);
}
