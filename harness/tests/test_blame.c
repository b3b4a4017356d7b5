/* The command `bisect stage` for a program whose stages cannot be run one by one. Tensors of the
 * simulated ranks with a fault replace the program's. */
#include "cases.h"
#include "harness/run/blame.h"
#include "harness/run/judge.h"
#include "sanitized.h"

#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define HEAD "reason = r\nsource = s\nop = kda\nH = 2\nHV = 4\nK = 8\nV = 8\nbase = fp32\n"
#define WEAK HEAD "T = 48\ng_scale = 0.02\nranks = 4\n"
#define LONG HEAD "T = 132\ng_scale = 0.02\nranks = 2\n"
#define RAW HEAD "T = 48\ngate = softplus\nbeta = sigmoid\nl2norm = yes\ng_mean = -4\nranks = 4\n"
#define PACKED HEAD "T = 48\ng_scale = 0.02\ncu_seqlens = 0,5,28,40,48\nranks = 4\n"

static char out[1 << 16];

/* The tensors of a run: results, and the stages that `shown` names ("*": all). */
static void give(const dp_case *c, dp_sim *s, const char *shown, dp_stored_results *g) {
    *g = (dp_stored_results){.r = s->out};
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++) {
        char name[32];
        snprintf(name, sizeof name, " %s ", dp_stage_tensors[i].name);
        if ((*shown == '*' || strstr(shown, name)) &&
            (c->backward || !dp_stage_tensors[i].backward))
            g->stage[i] = dp_stage_tensor_value(s, i);
    }
}

static dp_blame blame(const dp_case *c, dp_fault fault, const char *shown, dp_runs *runs) {
    dp_sim s;
    dp_stored_results g;
    dp_err e = {0};
    const dp_run_options o = {0};
    if (dp_sim_new(&s, &c->p, c->base[0], c->ranks[0], fault, &e))
        return gt_fail(__FILE__, __LINE__, "sim", "%s", e.msg), (dp_blame){0};
    dp_sim_run(&s, c->chain[0], c->merge[0], c->backward);
    give(c, &s, shown, &g);
    if (dp_run_stored(c, &o, &g, runs, &e)) gt_fail(__FILE__, __LINE__, "run", "%s", e.msg);
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++)
        free(g.stage[i]);
    dp_sim_free(&s);
    return runs->n ? dp_blame_run(&runs->run[runs->n - 1]) : (dp_blame){0};
}

/* stage: that of the blamed tensor. gate: q, k and beta after their activations are in no tensor,
 * so tensors made of them show it. */
static const struct {
    dp_fault fault;
    const char *text, *tensor;
    dp_stage stage;
} ROWS[] = {
    {DP_FAULT_EXP2_GATE, WEAK, "gcum", DP_STAGE_GATE},
    {DP_FAULT_LAST_INDEX, WEAK, "kg", DP_STAGE_WY},
    {DP_FAULT_MERGE_NEAREST_FIRST, WEAK, "S_in", DP_STAGE_MERGE_FWD},
    {DP_FAULT_MERGE_SCALED, WEAK, "S_in", DP_STAGE_MERGE_FWD},
    {DP_FAULT_FWD_FIRST_SUBSEQ, PACKED, "M", DP_STAGE_PRE_FWD},
    {DP_FAULT_BWD_LAST_SUBSEQ, PACKED, "dM", DP_STAGE_PRE_BWD},
    {DP_FAULT_DECAY_BEFORE_USE, WEAK, "v_new", DP_STAGE_STATE_FWD},
    {DP_FAULT_GRID_AXIS, WEAK, "o", DP_STAGE_OUTPUT},
    {DP_FAULT_GATE_NO_OFFSET, LONG, "dH", DP_STAGE_PRE_BWD},
    {DP_FAULT_HALF_CHUNK, LONG, "dbeta", DP_STAGE_WY_BWD},
    {DP_FAULT_DG_NO_BOUNDARY, WEAK, "dg", DP_STAGE_INTRA_BWD},
    {DP_FAULT_GATE_GRAD_PARTIAL, RAW, "dA_log", DP_STAGE_GATE_BWD},
};

DP_TEST(blame, faults_of_a_program_that_shows_its_stages_are_named) {
    const int threads = omp_get_max_threads();
    omp_set_num_threads(1); /* thousands of loops of microseconds each */
    for (size_t i = 0; i < sizeof ROWS / sizeof *ROWS; i += GT_SANITIZED ? 4 : 1) {
        const char *name = dp_faults[ROWS[i].fault].name;
        dp_case c;
        dp_runs runs = {0};
        if (!gt_parse_case(ROWS[i].text, &c)) continue;
        dp_blame b = blame(&c, DP_FAULT_NONE, "*", &runs);
        CHECK(!b.tensor && !b.nsuspect, "%s: blamed without a fault: %s", name,
              b.tensor ? b.tensor->name : "");
        b = blame(&c, ROWS[i].fault, "*", &runs);
        REQUIRE(b.tensor, "%s: nothing is blamed: %s", name, runs.run[1].why);
        CHECK(!strcmp(b.tensor->name, ROWS[i].tensor) && b.stage == ROWS[i].stage, "%s: %s of %s",
              name, b.tensor->name, dp_stage_names[b.stage]);
        CHECK(b.nsuspect == 1 && !b.shows[0], "%s: %d suspects although all is shown: %s", name,
              b.nsuspect, b.shows);
        CHECK(b.tensor->nover > 0 && b.tensor->first.err > b.tensor->first.bound &&
                  b.tensor->last.err > b.tensor->last.bound,
              "%s: no row", name);
        dp_runs_free(&runs);
        dp_case_free(&c);
    }
    omp_set_num_threads(threads);
}

/* One tensor that fails alone is blamed on a stage, whichever it is. */
DP_TEST(blame, every_result_and_stage_tensor_of_every_recurrence_has_a_stage) {
    for (int i = 0; i < DP_NRESULTS + DP_NSTAGE_TENSORS; i++) {
        const char *name =
            i < DP_NRESULTS ? dp_result_fields[i].name : dp_stage_tensors[i - DP_NRESULTS].name;
        const int backward = i < DP_NRESULTS ? dp_result_fields[i].backward
                                             : dp_stage_tensors[i - DP_NRESULTS].backward;
        dp_judgement t = {.verdict = DP_FAIL};
        const dp_run r = {.ntensor = 1, .tensor = &t};
        snprintf(t.name, sizeof t.name, "%s", name);
        const dp_blame b = dp_blame_run(&r);
        CHECK(b.tensor == &t && b.suspect[b.stage] && b.backward == backward, "%s: %s", name,
              b.tensor ? dp_stage_names[b.stage] : "no stage");
    }
}

/* lr_a reads and lr_b writes inside a chunk: with all shown, a wrong gradient of either is that
 * stage's. */
DP_TEST(blame, wrong_gradients_of_factors_are_of_intra_bwd) {
    static const dp_result_id WRONG[] = {DP_RESULT_DLR_A, DP_RESULT_DLR_B};
    dp_case c;
    dp_runs runs = {0};
    dp_sim s;
    dp_stored_results g;
    dp_err e = {0};
    const dp_run_options o = {0};
    if (!gt_parse_case("reason = r\nsource = s\nop = dplr\nH = 2\nK = 8\nV = 8\nbase = fp32\n"
                       "T = 48\ng_scale = 0.02\nranks = 4\n",
                       &c))
        return;
    REQUIRE(!dp_sim_new(&s, &c.p, c.base[0], c.ranks[0], DP_FAULT_NONE, &e), "%s", e.msg);
    dp_sim_run(&s, c.chain[0], c.merge[0], 1);
    for (int i = 0; i < 2; i++) {
        double *x = s.out.out[WRONG[i]] + (13 * 2 + 1) * 8 + 5;
        *x += 1;
        give(&c, &s, "*", &g);
        REQUIRE(!dp_run_stored(&c, &o, &g, &runs, &e), "%s", e.msg);
        const dp_blame b = dp_blame_run(&runs.run[i]);
        CHECK(b.tensor && !strcmp(b.tensor->name, dp_result_fields[WRONG[i]].name) &&
                  b.stage == DP_STAGE_INTRA_BWD && b.nsuspect == 1,
              "%s: %s, %d suspects", dp_result_fields[WRONG[i]].name,
              b.tensor ? dp_stage_names[b.stage] : "no stage", b.nsuspect);
        *x -= 1;
        for (int k = 0; k < DP_NSTAGE_TENSORS; k++)
            free(g.stage[k]);
    }
    dp_runs_free(&runs);
    dp_sim_free(&s);
    dp_case_free(&c);
}

/* The fault is in wy. With less shown there are more suspects, never fewer, and what would tell
 * them apart is named. */
DP_TEST(blame, less_shown_means_more_suspects) {
    static const struct {
        const char *shown, *tensor;
        int n;
        const char *tell;
    } STEP[] = {{" gcum Akk Aqk w u kg qg M H S_in h v_new ", "kg", 1, ""},
                {" gcum Akk Aqk w u qg M H ", "M", 2, "kg"},
                {" M H ", "M", 5, "gcum Akk w kg"},
                {" ", "final_state", 7, "gcum Akk w u kg M H S_in h v_new"}};
    dp_case c;
    dp_runs runs = {0};
    if (!gt_parse_case(WEAK "backward = no\n", &c)) return;
    for (size_t i = 0; i < sizeof STEP / sizeof *STEP; i++) {
        const dp_blame b = blame(&c, DP_FAULT_LAST_INDEX, STEP[i].shown, &runs);
        REQUIRE(b.tensor, "nothing is blamed");
        CHECK(!strcmp(b.tensor->name, STEP[i].tensor) && b.suspect[DP_STAGE_WY] &&
                  b.nsuspect == STEP[i].n && !strcmp(b.shows, STEP[i].tell),
              "with%s: %s, %d suspects, show '%s'", STEP[i].shown, b.tensor->name, b.nsuspect,
              b.shows);
    }
    dp_runs_free(&runs);
    dp_case_free(&c);
}

/* Nothing is sent on one rank: M, H, S_in and the stages that make them are neither suspected nor
 * asked for. */
DP_TEST(blame, one_rank_is_not_asked_for_what_ranks_send) {
    dp_case c;
    dp_runs runs = {0};
    if (!gt_parse_case(HEAD "T = 132\ng_scale = 0.02\ndstate = yes\n", &c)) return;
    for (int shown = 0; shown < 2; shown++) {
        const dp_blame b = blame(&c, DP_FAULT_DECAY_BEFORE_USE, shown ? " h " : " ", &runs);
        REQUIRE(b.tensor, "nothing is blamed");
        CHECK(!b.suspect[DP_STAGE_PRE_FWD] && !b.suspect[DP_STAGE_MERGE_FWD], "%d suspects",
              b.nsuspect);
        CHECK(!strstr(b.shows, "M") && !strstr(b.shows, "S_in"), "show '%s'", b.shows);
    }
    dp_runs_free(&runs);
    dp_case_free(&c);
}

/* First row: the earliest token forward, the latest backward. */
DP_TEST(blame, the_first_row_is_the_first_that_was_computed) {
    dp_case c;
    dp_runs runs = {0};
    if (!gt_parse_case("reason = r\nsource = s\nop = kda\nHV = 2\nK = 4\nV = 4\nT = 96\nbase = "
                       "fp32\ng_scale = 0.02\n",
                       &c))
        return;
    dp_sim s;
    dp_stored_results g;
    dp_err e = {0};
    const dp_run_options o = {0};
    REQUIRE(!dp_sim_new(&s, &c.p, DP_BASE_FP32, 1, DP_FAULT_NONE, &e), "%s", e.msg);
    dp_sim_run(&s, DP_FP32, DP_EXCHANGE_ALLGATHER, 1);
    for (int t = 70; t < 80; t += 3) {
        s.out.o[(t * 2 + 1) * 4 + 2] += 1;
        s.out.dv[(t * 2 + 1) * 4 + 3] -= 1;
    }
    give(&c, &s, " ", &g);
    REQUIRE(!dp_run_stored(&c, &o, &g, &runs, &e), "%s", e.msg);
    for (int i = 0; i < runs.run[0].ntensor; i++) {
        const dp_judgement *t = &runs.run[0].tensor[i];
        if (strcmp(t->name, "o") && strcmp(t->name, "dv")) continue;
        CHECK(t->nover == 4 && t->first.at.token == 70 && t->last.at.token == 79 &&
                  t->first.at.head == 1 && t->first.at.chunk == 1 &&
                  t->first.index == (t->name[0] == 'o' ? 2 : 3),
              "%s: %lld rows, first token %lld, last %lld", t->name, (long long)t->nover,
              (long long)t->first.at.token, (long long)t->last.at.token);
        CHECK(fabs(fabs(t->first.got - t->first.want) - 1) < 1e-5 &&
                  fabs(t->first.err - 1) < 1e-5 && t->first.bound < 1e-3,
              "%s: %g, %g", t->name, t->first.got, t->first.want);
    }
    dp_runs_free(&runs);
    dp_sim_free(&s);
    dp_case_free(&c);
}

static int program(const char *before, const char *args) {
    char cmd[4096];
    snprintf(cmd, sizeof cmd,
             "cd %s && export OMP_NUM_THREADS=1 && %s '%s' bisect stage x.case --cache none %s",
             gt_tmpdir(), before, gt_program(), args);
    return gt_run(cmd, out, sizeof out);
}

/* A call's status and output. */
typedef struct {
    const char *before, *args;
    int rc;
    const char *says[3];
} call;

static void call_all(const call *c, int n) {
    for (int i = 0; i < n; i++) {
        CHECK(program(c[i].before, c[i].args) == c[i].rc, "%s %s: %s", c[i].before, c[i].args, out);
        for (int k = 0; k < 3 && c[i].says[k]; k++)
            CHECK(strstr(out, c[i].says[k]), "%s %s: '%s' not in %s", c[i].before, c[i].args,
                  c[i].says[k], out);
    }
}

/* x.case, weak gates on one rank and on four. */
static int write_case(void) {
    char cmd[2048];
    snprintf(cmd, sizeof cmd, "cd %s && printf '" WEAK "' | sed 's/ranks = 4/ranks = 1,4/' >x.case",
             gt_tmpdir());
    return gt_run(cmd, out, sizeof out);
}

DP_TEST(blame, the_program_bisects_libraries) {
    static const call CALLS[] = {
        {"", "--subject ./bad.so", 0, {"every tensor is within its bound"}},
        {"BAD=wrong-stage",
         "--subject ./bad.so",
         1,
         {"WRONG STAGE: pre_process_fwd",
          "first wrong row: H, rank 1, sequence 0, head 0, row 0, entry 3\n  got   0x1.",
          "\n  truth -0x1."}},
        {"BAD=wrong-head",
         "--subject ./bad.so",
         1,
         {"WRONG STAGE: one of intra wy output (to tell which, show Aqk qg)",
          "o, rank 1, sequence 0, head 1, chunk 1, token 17, entry 0"}},
        {"BAD=crash", "--subject ./bad.so", 1, {"NO STAGE: rank 3 crashed: SIGSEGV"}},
        {"BAD=unwritten", "--subject ./bad.so", 1, {"never written"}},
        {"BAD=unsteady",
         "--subject ./bad.so",
         1,
         {"NOT STEADY: o, entry 0 of 1536: ", "in run 2 of the same inputs"}},
        {"", "--subject ./bad.so --fault exp2-gate", 2, {"exclude each other"}},
        {"", "--outputs nowhere.safetensors", 2, {"nowhere.safetensors"}}};
    char cmd[2048];
    snprintf(cmd, sizeof cmd,
             "cd %s && cc -O1 -fPIC -shared -ffp-contract=off -I'%s/../harness' "
             "'%s/../harness/tests/data/bad_subject.c' -o bad.so -lm",
             gt_tmpdir(), gt_cases(), gt_cases());
    REQUIRE(!gt_run(cmd, out, sizeof out) && !write_case(), "%s", out);
    call_all(CALLS, (int)(sizeof CALLS / sizeof *CALLS));
}

/* Inputs written for another program; its results (here the truth) read back. */
DP_TEST(blame, the_program_bisects_files) {
    static const call CALLS[] = {
        {"",
         "--outputs out0.safetensors",
         0,
         {"ranks=4,base=fp32,chain=fp32: every tensor that it shows",
          "every tensor is within its bound"}},
        {"",
         "--outputs out1.safetensors",
         1,
         {"wy_bwd",
          "first wrong row: dv, rank 3, sequence 0, head 0, chunk 3, token 40, entry 5\n  got   "
          "0x1.cp+2"}}};
    char cmd[4096];
    REQUIRE(!write_case(), "%s", out);
    snprintf(cmd, sizeof cmd,
             "cd %s && '%s' inputs x.case -o in.safetensors && '%s' truth x.case --cache none -o "
             "truth.safetensors && python3 - <<'END'\n"
             "import json, struct\n"
             "b = open('truth.safetensors', 'rb').read(); n = struct.unpack('<Q', b[:8])[0]; h = "
             "json.loads(b[8:8 + n])\n"
             "for wrong in (0, 1):\n"
             "    head, data = {'__metadata__': {'ranks': '4', 'base': 'fp32', 'claim': 'fp32'}}, "
             "bytearray()\n"
             "    for name, shape in (('o', [48, 4, 8]), ('final_state', [1, 4, 8, 8]), ('dv', "
             "[48, 4, 8])):\n"
             "        a, e = h[name]['data_offsets']; x = bytearray(b[8 + n + a:8 + n + e])\n"
             "        if wrong and name == 'dv': x[8 * (40 * 32 + 5):8 * (40 * 32 + 6)] = "
             "struct.pack('<d', 7.0)\n"
             "        head[name] = {'dtype': 'F64', 'shape': shape, 'data_offsets': [len(data), "
             "len(data) + len(x)]}; data += x\n"
             "    t = json.dumps(head).encode(); open('out%%d.safetensors' %% wrong, "
             "'wb').write(struct.pack('<Q', len(t)) + t + data)\n"
             "END\n",
             gt_tmpdir(), gt_program(), gt_program());
    REQUIRE(!gt_run(cmd, out, sizeof out), "%s", out);
    call_all(CALLS, 2);
    snprintf(cmd, sizeof cmd,
             "cd %s && '%s' judge --inputs in.safetensors --outputs out0.safetensors --cache none",
             gt_tmpdir(), gt_program());
    CHECK(gt_run(cmd, out, sizeof out) == 0 && strstr(out, "VERDICT: PASS"), "%s", out);
}
