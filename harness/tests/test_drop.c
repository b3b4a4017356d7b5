/* The allowed loss of a kernel that drops attenuated states. It is never less than the real loss,
 * and through the judge (`--claim-drop`) neither more nor less than the claim. */
#include "gt.h"
#include "harness/record/run.h"
#include "harness/simulated/ranks.h"
#include "ref/arithmetic/elementary.h"
#include "ref/bound/drop.h"
#include "ref/inputs/inputs.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { T = 48, CUT = 20, BITS = 10 };

typedef struct {
    dp_model model;
    int R;
    dp_gate gate;
    dp_beta beta;
    int l2norm;
} shape;

/* Token CUT forgets all channels by e^-12 or more, so that what crosses it may be dropped. */
static dp_problem problem(const shape *s) {
    dp_problem p = {.model = s->model,
                    .T = T,
                    .H = 1,
                    .HV = 2,
                    .K = 8,
                    .V = 6,
                    .R = s->R,
                    .scale = 0.5,
                    .gate = s->gate,
                    .lower_bound = -14,
                    .beta_form = s->beta,
                    .l2norm = s->l2norm};
    const int64_t states = (int64_t)p.HV * p.K * p.V;
    dp_problem_alloc(&p);
    p.dout = dp_doubles(T * p.HV * p.V);
    p.s0 = dp_doubles(states);
    p.dstate = dp_doubles(states);
    if (s->gate != DP_GATE_LOG) {
        p.A_log = dp_doubles(p.HV);
        p.dt_bias = dp_doubles((int64_t)p.HV * dp_Kg(&p));
    }
    const dp_inputs_spec spec = {.seed = 5,
                                 .dtype = DP_FP64,
                                 .g_scale = s->gate == DP_GATE_LOG ? 0.05 : 1,
                                 .g_mean = -4,
                                 .g_head_spread = 1,
                                 .beta_lo = s->beta == DP_BETA_PLAIN ? 0.2 : 0,
                                 .beta_hi = s->R > 1 ? 0.5 : 0.9,
                                 .s0_scale = 1};
    dp_inputs_fill(&p, &spec);
    for (int h = 0; p.A_log && h < p.HV; h++)
        p.A_log[h] = 0;
    for (int i = 0; i < p.HV * dp_Kg(&p); i++)
        p.g[(int64_t)CUT * p.HV * dp_Kg(&p) + i] = s->gate == DP_GATE_LOG ? -12 : 14;
    return p;
}

/* In fp64. A split problem has two sequences. The second one's state and the first one's gradient
 * start from zeros, as in a kernel that drops both at CUT. */
static dp_result solve(const dp_problem *p, int split) {
    int64_t cu[] = {0, split ? CUT : T, T};
    const int64_t states = (int64_t)p->HV * p->K * p->V;
    dp_problem q = *p;
    dp_sim s;
    q.Nseq = 1 + split;
    q.cu = cu;
    q.s0 = dp_doubles(q.Nseq * states);
    q.dstate = dp_doubles(q.Nseq * states);
    memcpy(q.s0, p->s0, sizeof(double) * (size_t)states);
    memcpy(q.dstate + split * states, p->dstate, sizeof(double) * (size_t)states);
    if (dp_sim_new(&s, &q, DP_BASE_FP64, 1, DP_FAULT_NONE, NULL)) abort();
    dp_sim_run(&s, DP_FP64, DP_EXCHANGE_ALLGATHER, 1);
    dp_result r = {0};
    for (int i = 0; i < DP_NRESULTS; i++) {
        int64_t rows, width;
        dp_result_shape(&q, i, &rows, &width);
        const double *x = s.out.out[i];
        if (rows) r.out[i] = dp_copy(x, rows * width);
    }
    if (split) /* the state that leaves is that of the second sequence */
        memcpy(r.final_state, r.final_state + states, sizeof(double) * (size_t)states);
    dp_sim_free(&s);
    free(q.s0);
    free(q.dstate);
    return r;
}

static void check_field(const dp_problem *p, int field, const dp_result *whole,
                        const dp_result *split, const double *may, const char *what) {
    int64_t rows, width;
    double used = 0, most = 0;
    dp_result_shape(p, field, &rows, &width);
    for (int64_t z = 0; z < rows; z++) {
        double lost = 0;
        for (int64_t i = z * width; i < (z + 1) * width; i++) {
            const double d = (split->out[field])[i] - (whole->out[field])[i];
            lost += d * d;
        }
        lost = sqrt(lost);
        CHECK(lost <= may[z] * (1 + 1e-9) + 1e-11, "%s: %s row %lld loses %.3g, may lose %.3g",
              what, dp_result_fields[field].name, (long long)z, lost, may[z]);
        used = fmax(used, lost);
        most = fmax(most, may[z]);
    }
    CHECK(used > 0 && used > 1e-4 * most, "%s: %s loses %.3g and may lose %.3g", what,
          dp_result_fields[field].name, used, most);
}

DP_TEST(drop, covers_what_dropping_loses_in_every_result) {
    static const shape SHAPES[] = {{DP_KDA, 1, DP_GATE_LOG, DP_BETA_PLAIN, 0},
                                   {DP_KDA, 1, DP_GATE_LOWER_BOUND, DP_BETA_SIGMOID, 1},
                                   {DP_GDN, 1, DP_GATE_SOFTPLUS, DP_BETA_SIGMOID, 1},
                                   {DP_MKDA, 2, DP_GATE_LOG, DP_BETA_PLAIN, 0},
                                   {DP_DELTAPRODUCT, 3, DP_GATE_LOG, DP_BETA_PLAIN, 0},
                                   {DP_DELTAPRODUCT, 2, DP_GATE_SOFTPLUS, DP_BETA_SIGMOID, 1},
                                   {DP_GDN2, 1, DP_GATE_LOG, DP_BETA_PLAIN, 0},
                                   {DP_GDN2, 1, DP_GATE_LOWER_BOUND, DP_BETA_PLAIN, 1},
                                   {DP_GLA, 1, DP_GATE_LOG, DP_BETA_PLAIN, 0}};
    for (size_t i = 0; i < sizeof SHAPES / sizeof *SHAPES; i++) {
        dp_problem p = problem(&SHAPES[i]);
        dp_result whole = solve(&p, 0), split = solve(&p, 1);
        dp_drop may;
        char what[32];
        snprintf(what, sizeof what, "shape %zu", i);
        dp_drop_allowance(&p, BITS, 1, &may);
        for (int f = 0; f < DP_NRESULTS; f++)
            if (may.row[f]) check_field(&p, f, &whole, &split, may.row[f], what);
        for (int64_t z = 0; z < CUT * p.HV; z++)
            CHECK(may.row[DP_RESULT_O][z] == 0, "o of token %lld may lose %g before the cut",
                  (long long)(z / p.HV), may.row[DP_RESULT_O][z]);
        dp_drop_free(&may);
        dp_result_free(&whole);
        dp_result_free(&split);
        dp_problem_free(&p);
    }
}

/* Keys that move the state: the largest channel sum says 2^-28, and nothing may be lost. */
DP_TEST(drop, allows_nothing_where_some_channel_is_always_open) {
    dp_problem p = {.model = DP_KDA, .T = 64, .H = 1, .HV = 1, .K = 16, .V = 4, .R = 1, .scale = 1};
    dp_problem_alloc(&p);
    p.dout = dp_doubles(64 * 4);
    const dp_inputs_spec spec = {
        .seed = 3, .dtype = DP_BF16, .keys = DP_KEYS_MOVED, .beta_lo = 0.9, .beta_hi = 0.99};
    dp_drop may;
    dp_inputs_fill(&p, &spec);
    const dp_activated in = {.k = p.k, .g = p.g};
    const dp_attenuation a = dp_attenuation_of(&p, &in, 0, 8, 24);
    CHECK(a.bound == 0 && a.channel < -28, "2^%g, channel sums 2^%g", a.bound, a.channel);
    dp_drop_allowance(&p, 1, 1, &may);
    for (int f = 0; f < DP_NRESULTS; f++) {
        int64_t rows, width;
        dp_result_shape(&p, f, &rows, &width);
        for (int64_t z = 0; may.row[f] && z < rows; z++)
            CHECK(may.row[f][z] == 0, "%s may lose %g", dp_result_fields[f].name, may.row[f][z]);
    }
    dp_drop_free(&may);
    dp_problem_free(&p);
}

/* A step that lengthens a state ends what may be dropped before it. */
DP_TEST(drop, allows_nothing_across_a_step_that_is_no_contraction) {
    const shape s = {DP_KDA, 1, DP_GATE_LOG, DP_BETA_PLAIN, 0};
    dp_problem p = problem(&s);
    dp_drop may;
    for (int h = 0; h < p.HV; h++)
        p.beta[(int64_t)CUT * p.HV + h] = 2.5;
    dp_drop_allowance(&p, BITS, 1, &may);
    for (int64_t z = 0; z < T * p.HV; z++)
        CHECK(may.row[DP_RESULT_O][z] == 0, "o of token %lld may lose %g", (long long)(z / p.HV),
              may.row[DP_RESULT_O][z]);
    dp_drop_free(&may);
    dp_problem_free(&p);
}

/* A step of GDN-2 may enlarge a state: e^-6.935 is below 2^-10, with its growth it is above. A step
 * of GLA is its decay alone. */
DP_TEST(drop, counts_by_how_much_a_step_may_grow) {
    static const dp_model MODELS[] = {DP_GLA, DP_GDN2};
    for (int i = 0; i < 2; i++) {
        const shape s = {MODELS[i], 1, DP_GATE_LOG, DP_BETA_PLAIN, 0};
        dp_problem p = problem(&s);
        dp_drop may;
        double most = 0;
        for (int64_t z = 0; z < p.T * p.HV * p.K; z++)
            p.g[z] = z / (p.HV * p.K) == CUT ? -6.935 : 0;
        dp_drop_allowance(&p, BITS, 1, &may);
        for (int64_t z = 0; z < p.T * p.HV; z++)
            most = fmax(most, may.row[DP_RESULT_O][z]);
        CHECK((most > 0) == (MODELS[i] == DP_GLA), "model %d: a row of o may lose %g", i, most);
        dp_drop_free(&may);
        dp_problem_free(&p);
    }
}

DP_TEST(drop, bits_of_a_claim) {
    static const struct {
        const char *text;
        int bits;
    } X[] = {{"20", 20},     {"1e-6", 19}, {"0x1p-20", 20}, {"0.5", 1},  {"0.9", 1}, {"1", 1},
             {"1000", 1000}, {"0", 0},     {"-3", 0},       {"1001", 0}, {"x", 0},   {"", 0}};
    for (size_t i = 0; i < sizeof X / sizeof *X; i++)
        CHECK(dp_drop_bits(X[i].text) == X[i].bits, "%s: %d", X[i].text, dp_drop_bits(X[i].text));
}

/* ---- through the judge ---------------------------------------------------------------------- */

static dp_verdict verdict_of(const char *name, dp_fault fault, int drop, char *why, size_t size) {
    const int ranks = 2;
    const dp_base base = DP_BASE_FP32;
    char path[512];
    dp_case c;
    dp_err e = {0};
    dp_runs out = {0};
    snprintf(path, sizeof path, "%s/%s.case", gt_cases(), name);
    *why = 0;
    if (dp_case_load(path, &c, &e)) return DP_NVERDICTS;
    const dp_run_options o = {.only = {[DP_ID_RANKS] = {1, {ranks}},
                                       [DP_ID_BASE] = {1, {(int)base}},
                                       [DP_ID_BACKEND] = {1, {DP_BACKEND_SIM}}},
                              .fault = fault,
                              .drop = drop,
                              .cache = gt_cache()};
    const dp_verdict v = dp_case_run(&c, &o, &out, &e) ? DP_NVERDICTS : out.run[0].verdict;
    for (int i = 0; v == DP_FAIL && i < out.run[0].ntensor; i++)
        if (!strcmp(out.run[0].tensor[i].name, "o"))
            snprintf(why, size, "%s", out.run[0].tensor[i].why);
    dp_runs_free(&out);
    dp_case_free(&c);
    return v;
}

typedef struct {
    const char *name;
    dp_fault fault;
    int drop;
    dp_verdict want;
} claimed;

static void check_claim(const claimed *x) {
    char why[512];
    const dp_verdict v = verdict_of(x->name, x->fault, x->drop, why, sizeof why);
    CHECK(v == x->want, "%s, %s, claimed %d: %s", x->name, dp_faults[x->fault].name, x->drop,
          v < DP_NVERDICTS ? dp_verdict_names[v] : "did not run");
    if (x->fault == DP_FAULT_DROP_CHANNEL_SUM && x->want == DP_FAIL)
        CHECK(strstr(why, "lacks the state before token") && strstr(why, "at most 2^") &&
                  !strstr(why, "2^-0.0"),
              "%s", why);
}

/* States dropped by the right criterion pass under their claim and under no smaller one. */
DP_TEST(drop, claim_decides_what_may_be_dropped) {
    static const claimed X[] = {
        {"dropped-gdn", DP_FAULT_DROP_HORIZON, 0, DP_FAIL},
        {"dropped-gdn", DP_FAULT_DROP_HORIZON, 12, DP_PASS},
        {"dropped-gdn", DP_FAULT_DROP_HORIZON, 24, DP_FAIL},
        {"dropped-gdn", DP_FAULT_DROP_CHANNEL_SUM, 12, DP_PASS}, /* one gate: the same */
    };
    for (size_t i = 0; i < sizeof X / sizeof *X; i++)
        check_claim(&X[i]);
}

/* States dropped by channel sums pass under no claim where keys have moved the state, and the
 * verdict names the missing part. */
DP_TEST(drop, channel_sums_fail_where_keys_move_the_state) {
    static const claimed X[] = {
        {"dropped-forgotten", DP_FAULT_DROP_HORIZON, 12, DP_PASS},
        {"dropped-forgotten", DP_FAULT_DROP_CHANNEL_SUM, 12, DP_PASS},
        {"dropped-survivor", DP_FAULT_DROP_CHANNEL_SUM, 12, DP_PASS}, /* keeps its state */
        {"dropped-moved", DP_FAULT_DROP_HORIZON, 12, DP_PASS},
        {"dropped-moved", DP_FAULT_DROP_CHANNEL_SUM, 0, DP_FAIL},
        {"dropped-moved", DP_FAULT_DROP_CHANNEL_SUM, 12, DP_FAIL},
        {"dropped-moved-norm", DP_FAULT_DROP_CHANNEL_SUM, 12, DP_FAIL},
    };
    for (size_t i = 0; i < sizeof X / sizeof *X; i++)
        check_claim(&X[i]);
}
