/* op step: convolutions before a KDA layer, forward and backward. */
#include "harness/case/case.h"
#include "harness/record/run.h"
#include "harness/run/step.h"
#include "harness/search/bisect.h"
#include "oracle.h"
#include "runs.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int load(dp_case *c) {
    char path[512];
    dp_err e = {0};
    snprintf(path, sizeof path, "%s/smoke-step.case", gt_cases());
    if (dp_case_load(path, c, &e)) {
        gt_fail(__FILE__, __LINE__, "smoke-step", "%s", e.msg);
        return 0;
    }
    return 1;
}

static int run(const dp_case *c, dp_base base, int ranks, dp_runs *out) {
    dp_err e = {0};
    const dp_run_options o = {.only = {[DP_ID_RANKS] = {1, {ranks}},
                                       [DP_ID_BASE] = {1, {(int)base}},
                                       [DP_ID_BACKEND] = {1, {DP_BACKEND_SIM}}},
                              .cache = gt_tmpdir()};
    const int ok = dp_case_run(c, &o, out, &e) == DP_OK && out->n == 1;
    if (!ok) gt_fail(__FILE__, __LINE__, "run", "%s", e.msg);
    return ok;
}

static const char *const ALL[] = {
    "o", "dq",   "dk",   "dv",   "dg",   "dbeta", "dA_log", "ddt_bias", "q",       "k",
    "v", "dx_q", "dx_k", "dx_v", "dw_q", "dw_k",  "dw_v",   "dbias_q",  "dbias_k", "dbias_v"};

DP_TEST(step, every_gradient_is_judged_on_ranks) {
    dp_case c;
    if (!load(&c)) return;
    for (int base = DP_BASE_FP64; base <= DP_BASE_BF16; base++)
        for (int ranks = 1; ranks <= 4; ranks += 3) {
            dp_runs out = {0};
            if (!run(&c, (dp_base)base, ranks, &out)) continue;
            CHECK(out.run->verdict == DP_PASS, "%s: %s", out.run->id, out.run->why);
            for (size_t i = 0; i < sizeof ALL / sizeof *ALL; i++) {
                const dp_judgement *t = gt_tensor(out.run, ALL[i]);
                CHECK(t && t->verdict == DP_PASS && !strcmp(t->tier, "expected"), "%s: %s: %s",
                      out.run->id, ALL[i], t ? t->why : "not judged");
                const double ratio = t ? t->expected.at[DP_LEVEL_TENSOR].ratio
                                       : NAN; /* draws of a whole step predict its errors */
                CHECK(base != DP_BASE_BF16 ||
                          (ratio > (strcmp(ALL[i], "dA_log") ? 0.6 : 0.1) && ratio < 1.6),
                      "%s: %s is %g times expected", out.run->id, ALL[i],
                      ratio); /* dA_log: 2 numbers */
            }
            dp_runs_free(&out);
        }
    dp_case_free(&c);
}

/* A subject with another weight of one channel of k: k is wrong from there on, and so is what is
 * made from it. */
DP_TEST(step, a_wrong_weight_is_red_and_named) {
    static const char *const red[] = {"k", "dx_k"}, *const green[] = {"q", "v"};
    dp_case c;
    dp_runs out = {0};
    if (!load(&c)) return;
    c.step.conv[1].w[5] *= 1 + 0x1p-6;
    if (run(&c, DP_BASE_FP32, 2, &out)) {
        CHECK(out.run->verdict == DP_FAIL, "verdict %d", out.run->verdict);
        for (int i = 0; i < 2; i++) {
            const dp_judgement *r = gt_tensor(out.run, red[i]), *g = gt_tensor(out.run, green[i]);
            CHECK(r && r->verdict == DP_FAIL, "%s", red[i]);
            CHECK(g && g->verdict == DP_PASS, "%s", green[i]);
        }
    }
    dp_runs_free(&out);
    dp_case_free(&c);
}

/* The convolutions are stages before and after the layer's. */
DP_TEST(step, bisect_finds_the_stage_and_the_rank) {
    static const struct {
        dp_fault fault;
        const char *stage;
    } F[] = {{DP_FAULT_NONE, NULL},
             {DP_FAULT_HALO_LEAK, "conv_fwd"},
             {DP_FAULT_MERGE_SCALED, "merge_fwd"},
             {DP_FAULT_HALO_GRAD_LOST, "conv_bwd"}};
    dp_case c;
    if (!load(&c)) return;
    for (size_t i = 0; i < sizeof F / sizeof *F; i++)
        for (int base = DP_BASE_FP32; base <= DP_BASE_BF16; base++) {
            dp_bisect b;
            dp_err e = {0};
            const char *stage;
            const dp_sim_policy how = {
                4,          (dp_base)base, DP_FP32,        DP_EXCHANGE_ALLGATHER,
                F[i].fault, c.backward,    DP_PAYLOAD_FULL};
            REQUIRE(!dp_step_bisect(&c, &how, 1, 0, &b, &e), "%s", e.msg);
            const dp_bisect_row *x = dp_bisect_first(&b, &stage);
            CHECK(!x == !F[i].stage && (!x || !strcmp(stage, F[i].stage)), "%s: %s",
                  dp_faults[F[i].fault].name, x ? stage : "no stage");
            if (x && F[i].fault == DP_FAULT_HALO_LEAK)
                CHECK(x->first.at.rank == 1 && x->first.at.token == 50, "rank %d, token %lld",
                      x->first.at.rank, (long long)x->first.at.token); /* sequence 1 starts there */
            if (x && F[i].fault == DP_FAULT_MERGE_SCALED)
                CHECK(x->first.at.rank == 3, "rank %d", x->first.at.rank);
            if (x && F[i].fault == DP_FAULT_HALO_GRAD_LOST)
                CHECK(x->first.at.rank == 2 && x->first.at.token == 89 && !x->rank[3],
                      "rank %d, token %lld", x->first.at.rank,
                      (long long)x->first.at.token); /* its last */
            dp_bisect_free(&b);
        }
    dp_case_free(&c);
}

/* <do, o> of the whole step in fp64, with one input moved. */
static double loss(const dp_case *c) {
    dp_step_run s;
    dp_sim sim;
    dp_err e = {0};
    double sum = 0;
    CHECK(!dp_step_forward(c, DP_BACKEND_SIM, 1, DP_BASE_FP64, DP_FAULT_NONE, &s, &e) &&
              !dp_sim_new(&sim, &s.p, DP_BASE_FP64, 1, DP_FAULT_NONE, &e),
          "%s", e.msg);
    dp_sim_run(&sim, DP_FP64, DP_EXCHANGE_ALLGATHER, 0);
    for (int64_t i = 0; i < c->p.T * c->p.HV * c->p.V; i++)
        sum += c->p.dout[i] * sim.out.o[i];
    dp_sim_free(&sim);
    dp_step_run_free(c, &s);
    return sum;
}

/* Central differences of the loss by entries of x, w and bias of each convolution, against the
 * gradients that the judgement finds right. */
DP_TEST(step, gradients_are_those_of_the_whole_step) {
    dp_case c;
    dp_step_run s;
    dp_sim sim;
    dp_err e = {0};
    if (!load(&c)) return;
    CHECK(!dp_step_forward(&c, DP_BACKEND_SIM, 1, DP_BASE_FP64, DP_FAULT_NONE, &s, &e) &&
              !dp_sim_new(&sim, &s.p, DP_BASE_FP64, 1, DP_FAULT_NONE, &e),
          "%s", e.msg);
    dp_sim_run(&sim, DP_FP64, DP_EXCHANGE_ALLGATHER, 1);
    double *const dy[3] = {sim.out.dq, sim.out.dk, sim.out.dv};
    for (int i = 0; i < 3; i++) {
        dp_conv *v = &c.step.conv[i], b = *v;
        dp_conv_result g;
        b.dy = dy[i];
        dp_conv_result_alloc(&g, &b);
        dp_conv_run(&b, &g);
        const struct {
            const char *name;
            double *x;
            const double *d;
            int64_t n;
        } in[] = {{"x", v->x, g.dx, v->T * v->D},
                  {"w", v->w, g.dw, (int64_t)v->D * v->W},
                  {"bias", v->bias, g.dbias, v->D}};
        for (int k = 0; k < 3; k++)
            for (int64_t z = 3; z < in[k].n; z += in[k].n / 2 + 1) {
                const double at = in[k].x[z], h = 1e-5;
                in[k].x[z] = at + h;
                const double up = loss(&c);
                in[k].x[z] = at - h;
                const double d = (up - loss(&c)) / (2 * h);
                in[k].x[z] = at;
                CHECK(fabs(d - in[k].d[z]) <= 1e-6 * (1 + fabs(d)),
                      "%c, %s[%lld]: %.10g, by differences %.10g", "qkv"[i], in[k].name,
                      (long long)z, in[k].d[z], d);
            }
        dp_conv_result_free(&g);
    }
    dp_sim_free(&sim);
    dp_step_run_free(&c, &s);
    dp_case_free(&c);
}
