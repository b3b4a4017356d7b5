/* Every deliberate fault must turn a verdict red where it lives, and the same runs without it must be green. */
#include "../case.h"
#include "../fault.h"
#include "../run.h"
#include "gt.h"

#include <stdio.h>
#include <string.h>

typedef struct {
    dp_fault fault;
    const char *case_name;
    int ranks;
    dp_base base;
    dp_format chain;
    const char *tensor;          /* must fail */
    const char *healthy;         /* must still pass: the fault is where it should be (NULL: nothing said) */
    int not_head;                /* head that must not be the worst one (-1: any) */
} expectation;

static const expectation EXPECT[] = {
    {DP_FAULT_MERGE_NEAREST_FIRST, "weak-heads", 4, DP_BASE_FP32, DP_FP32, "S_in", "M", -1},
    {DP_FAULT_MERGE_NEAREST_FIRST, "weak-heads", 4, DP_BASE_BF16, DP_BF16ST, "dS_out", "dH", -1},
    {DP_FAULT_FWD_FIRST_SUBSEQ, "packed-across", 4, DP_BASE_FP32, DP_FP32, "H", "dH", -1},
    {DP_FAULT_BWD_LAST_SUBSEQ, "packed-across", 4, DP_BASE_FP32, DP_FP32, "dH", "o", -1},
    {DP_FAULT_DECAY_BEFORE_USE, "weak-heads", 3, DP_BASE_FP32, DP_FP32, "o", "H", -1},
    {DP_FAULT_GATE_OF_HEAD0, "weak-heads", 4, DP_BASE_BF16, DP_FP32, "dH", "o", 0},
    {DP_FAULT_GATE_OF_HEAD0, "weak-heads", 4, DP_BASE_FP32, DP_FP32, "dk", "o", -1},
    {DP_FAULT_LAST_INDEX, "weak-heads", 3, DP_BASE_FP32, DP_FP32, "final_state", NULL, -1},
    {DP_FAULT_TAIL_UNMASKED, "packed-inside", 2, DP_BASE_FP32, DP_FP32, "final_state", NULL, -1},
    {DP_FAULT_CHAIN_BF16, "smoke-chain", 1, DP_BASE_FP32, DP_FP32, "M", NULL, -1},
    {DP_FAULT_CHAIN_TF32RZ, "smoke-chain", 1, DP_BASE_FP32, DP_TF32X3, "M", NULL, -1},
    {DP_FAULT_CHAIN_TF32RZ, "kda-reflect", 4, DP_BASE_FP64, DP_FP32, "M", "H", -1},
    {DP_FAULT_STATE_LOST, "weak-heads", 3, DP_BASE_BF16, DP_FP32, "dq", "o", -1},
    {DP_FAULT_STATE_LATE, "packed-across", 4, DP_BASE_FP32, DP_FP32, "dq", "o", -1},
    {DP_FAULT_MERGE_HALF_V, "weak-heads", 2, DP_BASE_BF16, DP_FP32, "S_in", "H", -1},
    {DP_FAULT_STATE_TRANSPOSED, "weak-heads", 2, DP_BASE_BF16, DP_FP32, "S_in", "H", -1},
    {DP_FAULT_EXP2_GATE, "weak-heads", 1, DP_BASE_FP32, DP_FP32, "o", NULL, -1},
    {DP_FAULT_MERGE_SCALED, "weak-heads", 4, DP_BASE_FP32, DP_FP32, "S_in", "M", -1},
    {DP_FAULT_GATE_GRAD_PARTIAL, "smoke-kda", 4, DP_BASE_FP32, DP_FP32, "dA_log", "dg", -1},
    {DP_FAULT_GATE_GRAD_PARTIAL, "smoke-kda", 4, DP_BASE_BF16, DP_FP32, "ddt_bias", "dg", -1},
    {DP_FAULT_DG_NO_BOUNDARY, "weak-heads", 2, DP_BASE_FP32, DP_FP32, "dg", "dk", -1},
};

static int run_case(const char *name, dp_fault fault, int ranks, dp_base base, dp_format chain, dp_runs *out) {
    char path[512];
    dp_case c;
    dp_err e = {0};
    snprintf(path, sizeof path, "%s/%s.case", gt_cases(), name);
    if (dp_case_load(path, &c, &e)) {
        gt_fail(__FILE__, __LINE__, name, "%s", e.msg);
        return 0;
    }
    if (c.op == DP_OP_RECURRENCE) {                              /* also what the case file does not list */
        c.nranks = 1, c.ranks[0] = ranks;
        c.nbase = 1, c.base[0] = base;
        c.nchain = 1, c.chain[0] = chain;
        c.nmerge = 1, c.merge[0] = DP_MERGE_ALLGATHER;
    }
    const dp_run_options o = {.nchain = 1, .chain = &chain, .fault = fault, .cache = gt_tmpdir()};
    const int ok = dp_case_run(&c, &o, out, &e) == DP_OK && out->n > 0;
    if (!ok) gt_fail(__FILE__, __LINE__, name, "%s", e.msg);
    dp_case_free(&c);
    return ok;
}

static const dp_judgement *tensor(const dp_run *r, const char *name) {
    for (int i = 0; i < r->ntensor; i++)
        if (!strcmp(r->tensor[i].name, name)) return &r->tensor[i];
    return NULL;
}

DP_TEST(faults, each_one_turns_its_tensor_red_and_is_green_without) {
    for (size_t i = 0; i < sizeof EXPECT / sizeof *EXPECT; i++) {
        const expectation *x = &EXPECT[i];
        const char *fault = dp_faults[x->fault].name;
        dp_runs bad = {0}, good = {0};
        if (!run_case(x->case_name, x->fault, x->ranks, x->base, x->chain, &bad) || !run_case(x->case_name, DP_FAULT_NONE, x->ranks, x->base, x->chain, &good)) continue;
        const dp_judgement *t = tensor(&bad.run[0], x->tensor), *h = x->healthy ? tensor(&bad.run[0], x->healthy) : NULL;
        CHECK(good.run[0].verdict == DP_PASS, "%s without %s: %s", good.run[0].id, fault, good.run[0].why);
        CHECK(bad.run[0].verdict == DP_FAIL, "%s: %s (%s)", bad.run[0].id, dp_verdict_names[bad.run[0].verdict], bad.run[0].why);
        CHECK(t && t->verdict == DP_FAIL, "%s: %s is %s at %.3g of its bound", bad.run[0].id, x->tensor, t ? dp_verdict_names[t->verdict] : "absent", t ? t->ratio : 0);
        if (x->healthy) CHECK(h && h->verdict != DP_FAIL, "%s: %s should not suffer, but is at %.3g of its bound", bad.run[0].id, x->healthy, h ? h->ratio : 0);
        if (x->not_head >= 0 && t) CHECK(t->worst.head != x->not_head, "%s: worst head is %d", bad.run[0].id, t->worst.head);
        dp_runs_free(&bad), dp_runs_free(&good);
    }
}

DP_TEST(faults, every_fault_of_the_table_is_tested) {
    for (int f = 1; f < DP_NFAULTS; f++) {
        int n = 0;
        for (size_t i = 0; i < sizeof EXPECT / sizeof *EXPECT; i++) n += (int)EXPECT[i].fault == f;
        CHECK(n > 0, "%s", dp_faults[f].name);
    }
}

/* With 2 ranks M is never used (architecture.md): a wrong chain must not show in o, and must show with 3. */
DP_TEST(faults, two_ranks_cannot_see_the_chain_in_o_and_three_can) {
    double err[2];
    for (int i = 0; i < 2; i++) {
        dp_runs r = {0};
        if (!run_case("kda-reflect", DP_FAULT_CHAIN_BF16, i ? 4 : 2, DP_BASE_FP64, DP_FP64, &r)) return;
        const dp_judgement *o = tensor(&r.run[0], "o");
        REQUIRE(o, "no o");
        err[i] = o->rel_fro;
        CHECK(tensor(&r.run[0], "M")->verdict == DP_FAIL, "M passes");
        dp_runs_free(&r);
    }
    CHECK(err[0] < 1e-13 && err[1] > 1e-6, "o with 2 ranks %.2e, with 4 ranks %.2e", err[0], err[1]);
}
