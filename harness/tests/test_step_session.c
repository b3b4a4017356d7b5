/* Sessions with convolutions before q, k and v: the last inputs go from call to call beside the
 * state. */
#include "harness/case/case.h"
#include "harness/record/run.h"
#include "harness/simulated/calls.h"
#include "runs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define HEAD "reason = r\nsource = s\n"
#define LAYER                                                                                 \
    HEAD "op = step\nT = 70\ncu_seqlens = 0,30,30,70\nH = 1\nHV = 2\nK = 8\ng_scale = 0.05\n" \
         "bias = yes\n"

typedef struct {
    dp_base base;
    const dp_conv *conv[DP_NQKV];
} layer;

static dp_status one_step(void *who, const dp_problem *call, const dp_state_pool *pool,
                          const dp_conv_states *before, dp_call_result *out, dp_err *e) {
    (void)pool;
    const layer *x = who;
    dp_problem y = *call;
    dp_sim s;
    for (int i = 0; i < DP_NQKV; i++) {
        double **const q = &y.in[dp_qkv_input(i)];
        if (!x->conv[i]) continue;
        dp_conv_states_run(x->conv[i], x->base, *q, call->cu, before->of[i], &out->y[i],
                           &out->conv.of[i]);
        *q = out->y[i];
    }
    const dp_status st = dp_sim_new(&s, &y, x->base, 1, DP_FAULT_NONE, e);
    if (!st) dp_calls_of_sim(&s, out);
    return st;
}

/* y of all tokens at once against those of the calls. */
static int same_rows(const dp_conv *v, dp_base base, const double *got) {
    dp_conv all = *v;
    dp_conv_result r;
    all.dy = NULL;
    dp_conv_result_alloc(&r, &all);
    if (dp_conv_ranks(&all, 1, base, &r, NULL)) return 0;
    const int same = !memcmp(r.y, got, sizeof *got * (size_t)(v->T * v->D));
    dp_conv_result_free(&r);
    return same;
}

static void check_bits(const dp_case *c, dp_base base, const char *text) {
    layer x = {.base = base};
    dp_conv_calls front = {0};
    dp_problem p = c->p;
    dp_result got;
    p.input_error = 0;
    for (int i = 0; i < DP_NQKV; i++)
        if (c->step.on[i]) {
            front.conv[i] = x.conv[i] = &c->step.conv[i];
            p.in[dp_qkv_input(i)] = c->step.conv[i].x;
        }
    const dp_caller by = {.who = &x, .front = &front, .run_step = one_step};
    REQUIRE(!dp_calls_run(&p, &c->session, DP_FAULT_NONE, &by, &got, NULL, NULL), "calls");
    CHECK(!front.wrong, "%s: %lld calls hand on other inputs", text, (long long)front.wrong);
    for (int i = 0; i < DP_NQKV; i++)
        CHECK(!x.conv[i] || same_rows(x.conv[i], base, front.y[i]), "%s, base %s: other %s", text,
              dp_base_names[base], dp_qkv_name(i));
    dp_result_free(&got);
    dp_calls_seen_free(&(dp_calls_seen){.front = front});
}

DP_TEST(step_session, calls_have_the_bits_of_the_whole_convolution) {
    static const char *const AS[] = {
        "W = 4\nsession = 1\n", "W = 7\nsession = 12,4-2,1,3-0,2\n", "W = 1\nsession = 5\n",
        "W = 4\nsession = 8,4-3,1\nsession_slots = 5\n", "W = 3\nconv = k\nsession = 2-1,9\n"};
    for (size_t k = 0; k < sizeof AS / sizeof *AS; k++)
        for (dp_base b = 0; b < DP_NBASES; b++) {
            char text[512];
            dp_case c;
            snprintf(text, sizeof text, LAYER "%s", AS[k]);
            if (!gt_parse_case(text, &c)) return;
            check_bits(&c, b, AS[k]);
            dp_case_free(&c);
        }
}

DP_TEST(step_session, continuations_of_a_prefix_begin_from_its_inputs) {
    for (dp_base b = 0; b < DP_NBASES; b++) {
        dp_case c;
        if (!gt_parse_case(HEAD "op = step\nT = 60\ncu_seqlens = 0,24,60\nK = 8\nW = 5\n"
                                "session = 4,4,1\nsession_prefix = 8\n",
                           &c))
            return;
        check_bits(&c, b, "prefix");
        dp_case_free(&c);
    }
}

/* ---- verdicts -------------------------------------------------------------------------------- */

DP_TEST(step_session, every_fault_of_its_calls_is_red_and_the_right_one_green) {
    static const struct {
        dp_fault fault;
        int of_conv;
    } F[] = {{DP_FAULT_NONE, 0},         {DP_FAULT_CONV_OF_OTHER, 1}, {DP_FAULT_CONV_ZEROED, 1},
             {DP_FAULT_CONV_LATE, 1},    {DP_FAULT_REJECTED_STAY, 1}, {DP_FAULT_ROLLBACK_EARLY, 1},
             {DP_FAULT_SLOT_OF_OTHER, 0}};
    for (size_t f = 0; f < sizeof F / sizeof *F; f++) {
        dp_case c;
        dp_runs runs;
        if (!gt_judge_case(LAYER "W = 4\nbase = bf16,fp32,fp64\nsession = 9,1,4-2,2\n", F[f].fault,
                           NULL, &c, &runs))
            return;
        CHECK(runs.n == 3, "%d runs", runs.n);
        for (int i = 0; i < runs.n; i++) {
            const dp_run *r = &runs.run[i];
            const dp_judgement *t = gt_tensor(r, "conv_state_k"), *k = gt_tensor(r, "k");
            REQUIRE(t && k, "%s: no conv_state_k, or no k", r->id);
            CHECK(!gt_acted(r) == !f && r->verdict == (f ? DP_FAIL : DP_PASS), "%s: %s, %s", r->id,
                  gt_acted(r) ? "acted" : "did not act", r->why);
            CHECK((t->verdict == DP_FAIL) == F[f].of_conv, "%s: %s", r->id, t->why);
            CHECK((k->verdict == DP_FAIL) == F[f].of_conv, "%s: k: %s", r->id, k->why);
            CHECK(!F[f].of_conv || (!strncmp(r->why, "conv_state_q: call ", 19) &&
                                    strstr(r->why, "returns another convolution input")),
                  "%s: %s", r->id, r->why);
        }
        dp_runs_free(&runs);
        dp_case_free(&c);
    }
}

/* Rejected tokens are judged, too, from the convolutions' outputs. A rejected token with another
 * token's gate changes no accepted result. */
DP_TEST(step_session, what_windows_make_of_rejected_tokens_is_judged) {
    static const dp_fault F[] = {DP_FAULT_NONE, DP_FAULT_DRAFT_GATE};
    for (int f = 0; f < 2; f++) {
        dp_case c;
        dp_runs runs;
        if (!gt_judge_case(LAYER "W = 4\nbase = bf16,fp32\nsession = 9,1,4-2,3-0,2\n", F[f], NULL,
                           &c, &runs))
            return;
        for (int i = 0; i < runs.n; i++) {
            const dp_run *r = &runs.run[i];
            const dp_judgement *o = gt_tensor(r, "o"), *drafted = gt_tensor(r, "o_drafted");
            REQUIRE(o && drafted && gt_tensor(r, "state_drafted"), "%s: no o_drafted", r->id);
            CHECK(o->verdict == DP_PASS && (drafted->verdict == DP_FAIL) == f, "%s: %s, %s", r->id,
                  o->why, drafted->why);
            CHECK(r->windows == 4 && r->windows_judged > 0, "%s: %d windows, %d judged", r->id,
                  (int)r->windows, (int)r->windows_judged);
        }
        dp_runs_free(&runs);
        dp_case_free(&c);
    }
}

/* No convolution, or one that reads a token alone: nothing is handed on, nothing to do wrong. */
DP_TEST(step_session, faults_of_what_is_not_there_do_not_act) {
    static const char *const TEXT[] = {
        HEAD "op = kda\nT = 30\nK = 8\nbase = fp32\nsession = 8,1\n",
        HEAD "op = step\nT = 30\nK = 8\nW = 1\nbase = fp32\nsession = 8,1\n"};
    static const dp_fault F[] = {DP_FAULT_CONV_OF_OTHER, DP_FAULT_CONV_ZEROED, DP_FAULT_CONV_LATE};
    for (int k = 0; k < 6; k++) {
        dp_case c;
        dp_runs runs;
        if (!gt_judge_case(TEXT[k % 2], F[k / 2], NULL, &c, &runs)) return;
        CHECK(!gt_acted(runs.run) && runs.run->verdict == DP_PASS &&
                  !gt_tensor(runs.run, "conv_state_k"),
              "%s: %s", runs.run->id, runs.run->why);
        dp_runs_free(&runs);
        dp_case_free(&c);
    }
}

/* A program gets x_q .., w_q .., conv_state_q .. and returns the new states; a library is
 * skipped. */
DP_TEST(step_session, a_program_runs_with_its_convolutions) {
    static const char *const ASK[][2] = {
        {"", "VERDICT: PASS"},
        {"zeros", "returns another convolution input"},
        {"late", "conv_state_k: call 1 returns another convolution input"},
        {"missing", "OUT: tensor conv_state_k is missing"}};
    char path[1024], cmd[4096], out[1 << 14];
    snprintf(path, sizeof path, "%s/layer.case", gt_tmpdir());
    FILE *f = fopen(path, "w");
    REQUIRE(f, "%s", path);
    fputs(LAYER "W = 4\nbase = fp32\nsession = 9,2,1,4-2,8\n", f);
    fclose(f);
    for (size_t i = 0; i < sizeof ASK / sizeof *ASK; i++) {
        snprintf(cmd, sizeof cmd,
                 "STEP=%s %s run %s --cache '%s' --base fp32 --writes o,final_state --serve "
                 "\"$DP_PYTHON %s/../harness/tests/data/step_program.py\" 2>&1",
                 ASK[i][0], gt_program(), path, gt_tmpdir(), gt_cases());
        const int rc = gt_run(cmd, out, sizeof out);
        CHECK(rc == (i > 0) && strstr(out, ASK[i][1]), "%s: status %d: %s", ASK[i][0], rc, out);
    }
    snprintf(cmd, sizeof cmd, "%s run %s --cache '%s' --subject '%s' 2>&1", gt_program(), path,
             gt_tmpdir(), gt_library("subject/example_subject.c", "layer.so"));
    const int rc = gt_run(cmd, out, sizeof out);
    CHECK(rc == 2 && strstr(out, "a library gets no convolutions in front"), "status %d: %s", rc,
          out);
}

/* With a pool the program gets it, and the states of its convolutions in the same slots. */
DP_TEST(step_session, a_program_runs_with_all_its_states_in_slots) {
    static const char *const ASK[][2] = {
        {"", "VERDICT: PASS"},
        {"slot", "OUT: conv_pool_k: slot "},
        {"dirty", "which the call is not to write, was overwritten"}};
    char path[1024], cmd[4096], out[1 << 14];
    snprintf(path, sizeof path, "%s/slots.case", gt_tmpdir());
    FILE *f = fopen(path, "w");
    REQUIRE(f, "%s", path);
    fputs(LAYER "W = 4\nbase = fp32\nsession = 9,2,1,4-2,8\nsession_slots = 5\n", f);
    fclose(f);
    for (size_t i = 0; i < sizeof ASK / sizeof *ASK; i++) {
        snprintf(cmd, sizeof cmd,
                 "STEP=%s %s run %s --cache '%s' --base fp32 --writes o,pool --serve "
                 "\"$DP_PYTHON %s/../harness/tests/data/step_program.py\" 2>&1",
                 ASK[i][0], gt_program(), path, gt_tmpdir(), gt_cases());
        const int rc = gt_run(cmd, out, sizeof out);
        CHECK(rc == (i > 0) && strstr(out, ASK[i][1]), "%s: status %d: %s", ASK[i][0], rc, out);
    }
}
