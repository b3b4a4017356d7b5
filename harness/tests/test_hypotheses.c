/* Common mistakes that `judge` names for what failed (hypotheses.h): files of a wrong kernel, which
 * are those of simulated ranks with a fault. */
#include "harness/run/hypotheses.h"
#include "harness/simulated/ranks.h"
#include "ref/files/safetensors.h"
#include "runs.h"

#include <string.h>

static void keep(const char *text, void *all) {
    strcat(all, text);
    strcat(all, "\n");
}

/* Writes o and final_state of a run with the fault, stored as the base stores them. Only the share
 * `part` of the fault's difference is applied. */
static void write_forward(const dp_case *c, dp_base base, dp_fault fault, double part,
                          const char *path) {
    const dp_problem *p = &c->p;
    const int64_t o[] = {p->T, p->HV, p->V}, state[] = {p->Nseq, p->HV, p->K, p->V};
    dp_tensorfile f = {0};
    dp_sim s, right;
    dp_err e = {0};
    REQUIRE(!dp_sim_new(&s, p, base, 1, fault, &e), "%s", e.msg);
    dp_sim_run(&s, DP_FP32, DP_EXCHANGE_ALLGATHER, 0);
    if (part < 1) {
        REQUIRE(!dp_sim_new(&right, p, base, 1, DP_FAULT_NONE, &e), "%s", e.msg);
        dp_sim_run(&right, DP_FP32, DP_EXCHANGE_ALLGATHER, 0);
        for (int64_t i = 0; i < o[0] * o[1] * o[2]; i++)
            s.out.o[i] = part * s.out.o[i] + (1 - part) * right.out.o[i];
        for (int64_t i = 0; i < state[0] * state[1] * state[2] * state[3]; i++)
            s.out.final_state[i] =
                part * s.out.final_state[i] + (1 - part) * right.out.final_state[i];
        dp_sim_free(&right);
    }
    dp_tensorfile_add(&f, "o", base == DP_BASE_BF16 ? "BF16" : "F32", 3, o, s.out.o);
    dp_tensorfile_add(&f, "final_state", "F32", 4, state, s.out.final_state);
    CHECK(!dp_safetensors_write(path, &f, &e), "%s", e.msg);
    dp_tensorfile_free(&f);
    dp_sim_free(&s);
}

/* Judged as files that declare no design: 1, a verdict failed. All output of `seconds` of trials
 * stands in all. */
static int fails_in_part(const char *name, dp_base base, dp_fault fault, double part,
                         double seconds, char *all) {
    char in[512], out[512];
    dp_case written, c;
    dp_runs runs = {0};
    dp_err e = {0};
    int failed = 0;
    *all = 0;
    snprintf(in, sizeof in, "%s/in.safetensors", gt_tmpdir());
    snprintf(out, sizeof out, "%s/out.safetensors", gt_tmpdir());
    if (!gt_open_case(name, &written)) return 0;
    CHECK(!dp_judge_write_inputs(&written, in, &e), "%s", e.msg);
    write_forward(&written, base, fault, part, out);
    const dp_judge_options o = {.inputs = in,
                                .outputs = out,
                                .base = base == DP_BASE_BF16 ? "bf16" : "fp32",
                                .cache = gt_cache()};
    if (dp_judge(&o, &c, &runs, &e)) {
        gt_fail(__FILE__, __LINE__, name, "%s", e.msg);
    } else {
        failed = runs.run[0].verdict == DP_FAIL;
        if (failed) dp_hypotheses(&o, &c, &runs.run[0], seconds, keep, all);
        dp_case_free(&c);
    }
    dp_runs_free(&runs);
    dp_case_free(&written);
    return failed;
}

static int fails(const char *name, dp_base base, dp_fault fault, double seconds, char *all) {
    return fails_in_part(name, base, fault, 1, seconds, all);
}

/* Every case sees it where no design is declared, in the coarser base too. */
DP_TEST(hypotheses, a_read_before_the_decay_is_named_and_no_wider_format) {
    static const struct {
        const char *name;
        dp_base base;
        double seconds; /* the first is enough for the name */
    } runs[] = {{"undecayed-gdn", DP_BASE_BF16, 0.1},  {"undecayed-kda", DP_BASE_BF16, 0.1},
                {"undecayed-mkda", DP_BASE_BF16, 0.1}, {"undecayed-gdn", DP_BASE_FP32, 0.1},
                {"undecayed-kda", DP_BASE_FP32, 60},   {"smoke-mkda2", DP_BASE_FP32, 60}};
    char all[4096];
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
        CHECK(fails(runs[i].name, runs[i].base, DP_FAULT_READ_UNDECAYED, runs[i].seconds, all),
              "%s passes undeclared", runs[i].name);
        CHECK(strstr(all, "before its decay"), "%s: '%s'", runs[i].name, all);
        CHECK(!strstr(all, "--base"), "%s: '%s'", runs[i].name, all);
    }
    CHECK(!fails("undecayed-kda", DP_BASE_BF16, DP_FAULT_NONE, 0, all), "right, and fails");
}

/* A short format would hide the mistake too: nothing is said rather than the format. */
DP_TEST(hypotheses, an_error_that_follows_the_decay_is_no_wider_format) {
    char all[4096];
    CHECK(fails_in_part("weak-heads", DP_BASE_FP32, DP_FAULT_READ_UNDECAYED, 0.05, 60, all),
          "passes");
    CHECK(!*all, "'%s'", all);
    CHECK(fails("smoke-kda", DP_BASE_FP32, DP_FAULT_STATE_BF16, 60, all) && strstr(all, "--design"),
          "a rounding is one: '%s'", all);
}

DP_TEST(hypotheses, another_fault_is_not_called_a_read_before_the_decay) {
    char all[4096];
    CHECK(fails("smoke-kda", DP_BASE_FP32, DP_FAULT_STATE_BF16, 60, all), "passes");
    CHECK(!strstr(all, "before its decay"), "'%s'", all);
}
