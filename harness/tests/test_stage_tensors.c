/* Intermediates under judgement. Simulated ranks pass in every base, one wrong row of
 * any of them fails at its place and alone. Files hold them as FLA does. */
#include "harness/run/judge.h"
#include "runs.h"

#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define HEAD "reason = r\nsource = s\ndtype = bf16\nseed = 3\n"
static const char *const CASES[] = {
    HEAD "op = kda\nT = 144\nH = 1\nHV = 2\nK = 8\nV = 16\ngate = softplus\nbeta = sigmoid\nl2norm "
         "= yes\ng_mean = -4\nbeta_lo = -3\ng_scale = 0.5\ns0_scale = 1\ndstate = yes\n",
    HEAD "op = gdn\nT = 100\nH = 2\nK = 8\nV = 4\ng_scale = 0.02\ncu_seqlens = 0,6,80,80,100\n",
    HEAD "op = mkda\nR = 2\nT = 96\nH = 1\nHV = 2\nK = 16\nV = 8\ng_scale = 0.02\nbeta_hi = 0.5\n"};

typedef struct {
    dp_case c;
    dp_sim s;
    dp_stored_results g;
    dp_runs runs;
} trial;

static void start(const char *text, const char *base, int N, trial *t) {
    dp_err e = {0};
    char all[1024];
    memset(t, 0, sizeof *t);
    omp_set_num_threads(1); /* problems this small only wait for each other */
    snprintf(all, sizeof all, "%sbase = %s\nranks = %d\nchain = %s\n", text, base, N,
             strcmp(base, "fp64") ? "tf32" : "fp64");
    if (dp_case_parse(all, strlen(all), "x.case", 1, &t->c, &e) ||
        dp_sim_new(&t->s, &t->c.p, t->c.base[0], N, DP_FAULT_NONE, &e)) {
        gt_fail(__FILE__, __LINE__, "case", "%s", e.msg);
        abort();
    }
    dp_sim_run(&t->s, t->c.chain[0], DP_EXCHANGE_ALLGATHER, t->c.backward);
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++)
        if (t->c.backward || !dp_stage_tensors[i].backward)
            t->g.stage[i] = dp_stage_tensor_value(&t->s, i);
}

static const dp_run *judge(trial *t) {
    const dp_run_options o = {.cache = gt_tmpdir()};
    dp_err e = {0};
    dp_runs_free(&t->runs);
    if (dp_run_stored(&t->c, &o, &t->g, &t->runs, &e)) {
        gt_fail(__FILE__, __LINE__, "dp_run_stored", "%s", e.msg);
        abort();
    }
    return &t->runs.run[0];
}

static void end(trial *t) {
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++)
        free(t->g.stage[i]);
    dp_runs_free(&t->runs);
    dp_sim_free(&t->s);
    dp_case_free(&t->c);
    omp_set_num_threads(omp_get_num_procs());
}

DP_TEST(stage_tensors, stages_of_a_clean_run_pass_in_every_base) {
    const char *bases[] = {"fp64", "fp32", "bf16"};
    for (int i = 0; i < 3; i++)
        for (int b = 0; b < 3; b++) {
            trial t;
            start(CASES[i], bases[b], i == 1 ? 4 : 3, &t);
            const dp_run *r = judge(&t);
            CHECK(r->ntensor == DP_NSTAGE_TENSORS && r->verdict == DP_PASS,
                  "case %d, %s: %d tensors: %s", i, bases[b], r->ntensor, r->why);
            for (int j = 0; j < r->ntensor; j++) {
                const dp_judgement *x = &r->tensor[j];
                CHECK(x->verdict == DP_PASS, "case %d, %s: %s: %s", i, bases[b], x->name, x->why);
                CHECK(x->ratio > (b == 0 || !strcmp(x->name, "gcum") ? -1 : 1e-4) &&
                          x->bound < (b == 0   ? 1e-9
                                      : b == 1 ? 1e-2
                                               : 1),
                      "case %d, %s: %s: %g of bound %g", i, bases[b], x->name, x->ratio, x->bound);
            }
            end(&t);
        }
}

DP_TEST(stage_tensors, one_wrong_row_of_a_stage_fails_at_its_place_and_alone) {
    trial t;
    int64_t rows, width;
    start(CASES[1], "bf16", 4, &t);
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++) {
        dp_stage_tensor_rows(&t.c.p, 4, i, &rows, &width);
        const int kind = dp_stage_tensors[i].kind; /* rank 1, head 1: token 27, which is the third
                                                      of its chunk; its chunk; its own matrix */
        const int64_t row = kind == DP_PER_TOKEN  ? (int64_t)27 * 2 + 1
                            : kind == DP_PER_RANK ? 3
                                                  : t.s.first[1][0] * 2 + 1;
        double *x = t.g.stage[i] + row * width, *kept = dp_copy(x, width);
        for (int64_t z = 0; z < width; z++)
            x[z] = x[z] * 1.5 + (z < 3);
        const dp_run *r = judge(&t);
        const dp_judgement *j = gt_tensor(r, dp_stage_tensors[i].name);
        CHECK(j->verdict == DP_FAIL && j->over.at.rank == 1 && j->over.at.head == 1 &&
                  j->over.at.token == (kind == DP_PER_RANK    ? -1
                                       : kind == DP_PER_TOKEN ? 27
                                                              : 25),
              "%s: %s at rank %d head %d token %lld", j->name, dp_verdict_names[j->verdict],
              j->over.at.rank, j->over.at.head, (long long)j->over.at.token);
        for (int k = 0; k < r->ntensor; k++)
            CHECK(&r->tensor[k] == j || r->tensor[k].verdict == DP_PASS, "%s fails with %s",
                  r->tensor[k].name, j->name);
        memcpy(x, kept, sizeof *x * (size_t)width);
        free(kept);
    }
    end(&t);
}

/* Entries above the diagonal of Akk and Aqk, and M of a rank through which no state passes, may be
 * anything or nothing. */
DP_TEST(stage_tensors, what_means_nothing_is_not_judged) {
    trial t;
    int64_t rows, width;
    start(CASES[1], "fp32", 4, &t);
    for (int i = DP_AKK; i <= DP_AQK; i++) {
        dp_stage_tensor_rows(&t.c.p, 4, i, &rows, &width);
        for (int64_t z = 3; z < width; z++)
            t.g.stage[i][(27 * 2 + 1) * width + z] = NAN;
    }
    for (int i = 0; i < 2 * 64; i++)
        t.g.stage[DP_M][i] = NAN; /* rank 0: first of its sequence */
    const dp_run *r = judge(&t);
    CHECK(r->verdict == DP_PASS && isnan(gt_tensor(r, "M")->per_rank[0]) &&
              gt_tensor(r, "M")->per_rank[1] > 0,
          "%s", r->why);
    for (int i = 0; i < 64; i++)
        t.g.stage[DP_M][2 * 64 + i] = NAN; /* rank 1 passes its state on: needed */
    r = judge(&t);
    CHECK(gt_tensor(r, "M")->verdict == DP_FAIL && gt_tensor(r, "M")->over.at.rank == 1, "%s",
          r->why);
    end(&t);
}

/* A step of -4096 (a reset) is what it is, though the chunk solver computes with a higher one. */
DP_TEST(stage_tensors, sums_of_gates_go_below_what_exp_can_show) {
    trial t;
    start(HEAD "op = kda\nkeys = exact\nT = 80\nH = 2\nHV = 4\nK = 8\nV = 4\nbackward = no\n",
          "fp64", 1, &t);
    double *x = t.g.stage[DP_GCUM], lowest = 0;
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++)
        if (i != DP_GCUM) {
            free(t.g.stage[i]);
            t.g.stage[i] = NULL;
        }
    for (int64_t i = 0; i < 80 * 4 * 8; i++) {
        x[i] = t.c.p.g[i] + (i / 32 % 64 ? x[i - 32] : 0);
        lowest = fmin(lowest, x[i]);
    }
    const dp_run *r = judge(&t);
    CHECK(lowest < -746 && r->verdict == DP_PASS && r->tensor[0].rel_fro == 0, "lowest %g: %s",
          lowest, r->why);
    end(&t);
}

/* A stage as a file has it: its name there, in which format, with a batch axis or not. */
typedef struct {
    int stage;
    const char *name, *dtype;
    int batch;
} stored;

/* vk: states as [V][K]. */
static void add(dp_tensorfile *f, const trial *t, const stored *w, int vk) {
    const int stage = w->stage, batch = w->batch;
    int64_t s[6] = {1}, rows, width;
    const int n = dp_stage_tensor_shape(&t->c.p, t->s.N, stage, s + batch) + batch, K = t->c.p.K,
              V = t->c.p.V;
    double *x = t->g.stage[stage], *y = NULL;
    dp_stage_tensor_rows(&t->c.p, t->s.N, stage, &rows, &width);
    if (vk && dp_stage_tensors[stage].state) {
        y = dp_doubles(rows * width);
        for (int64_t i = 0; i < rows * width; i++)
            y[i / width * width + i % V * K + i / V % K] = x[i];
        s[n - 2] = V;
        s[n - 1] = K;
    }
    dp_tensorfile_add(f, w->name, w->dtype, n, s, y ? y : x);
    free(y);
}

static void add_inputs(dp_tensorfile *f, const dp_problem *p) {
    const struct {
        const char *name;
        const double *x;
        int n;
        int64_t s[4];
    } inputs[] = {{"q", p->q, 4, {1, 192, p->H, 16}}, {"k", p->k, 4, {1, 192, p->H, 16}},
                  {"v", p->v, 4, {1, 192, 2, 8}},     {"g", p->g, 4, {1, 192, 2, 16}},
                  {"beta", p->beta, 3, {1, 192, 2}},  {"do", p->dout, 4, {1, 192, 2, 8}}};
    for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++)
        dp_tensorfile_add(f, inputs[i].name, "BF16", inputs[i].n, inputs[i].s, inputs[i].x);
}

/* Writes the stages to a file in one layout of states, and judges the file by the layout of the
 * options. */
static dp_status judge_stored(const trial *t, const dp_judge_options *o, const stored *w, int n,
                              int vk, dp_case *c, dp_runs *runs, dp_err *e) {
    dp_tensorfile f = {0};
    for (int i = 0; i < n; i++)
        add(&f, t, &w[i], vk);
    *e = (dp_err){0};
    const dp_status written = dp_safetensors_write(o->outputs, &f, e);
    dp_tensorfile_free(&f);
    return written ? written : dp_judge(o, c, runs, e);
}

DP_TEST(stage_tensors, files_hold_them_with_a_batch_axis_in_bf16_and_states_in_either_layout) {
    static const stored ALL[] = {{DP_W, "w", "BF16", 1},          {DP_AKK, "A_inv", "BF16", 1},
                                 {DP_GCUM, "g_cumsum", "F32", 1}, {DP_STATE, "h", "BF16", 1},
                                 {DP_S_IN, "S_in", "F32", 0},     {DP_M, "M", "F32", 0},
                                 {DP_DSTATE, "dh", "BF16", 1},    {DP_DV_NEW, "du", "BF16", 1}};
    static const stored STATE = {DP_STATE, "h", "BF16", 1};
    static const char *const layout[] = {"kv", "vk"};
    char in[512], out[512];
    trial t;
    dp_err e = {0};
    dp_tensorfile f = {0};
    start(HEAD "op = kda\nT = 192\nHV = 2\nK = 16\nV = 8\ng_scale = 0.02\n", "bf16", 3, &t);
    snprintf(in, sizeof in, "%s/stages-in.safetensors", gt_tmpdir());
    snprintf(out, sizeof out, "%s/stages-out.safetensors", gt_tmpdir());
    add_inputs(&f, &t.c.p);
    REQUIRE(!dp_safetensors_write(in, &f, &e), "%s", e.msg);
    dp_tensorfile_free(&f);
    for (int vk = 0; vk < 2; vk++) {
        dp_case c;
        dp_runs runs = {0};
        dp_judge_options o = {.inputs = in,
                              .outputs = out,
                              .gate = "log",
                              .beta = "plain",
                              .l2norm = "0",
                              .base = "bf16",
                              .claim = "tf32",
                              .ranks = 3,
                              .state_layout = layout[vk]};
        const dp_status st = judge_stored(&t, &o, ALL, 8, vk, &c, &runs, &e);
        CHECK(!st && runs.run[0].verdict == DP_PASS && runs.run[0].ntensor == 8, "layout %d: %s",
              vk, st ? e.msg : runs.run[0].why);
        for (int i = 0; !st && i < 8; i++)
            CHECK(runs.run[0].tensor[i].verdict == DP_PASS, "layout %d: %s: %s", vk,
                  runs.run[0].tensor[i].name, runs.run[0].tensor[i].why);
        dp_runs_free(&runs);
        if (!st) dp_case_free(&c);
        o.state_layout = layout[!vk];
        CHECK(judge_stored(&t, &o, ALL, 8, vk, &c, &runs, &e) == DP_EINPUT &&
                  strstr(e.msg, "tensor S_in: shape [3,2,") &&
                  strstr(e.msg, "(first axis: 3 ranks)"),
              "%s", e.msg);
        o.state_layout = layout[vk];
        o.ranks = 2;
        CHECK(judge_stored(&t, &o, &STATE, 1, vk, &c, &runs, &e) == DP_EINPUT &&
                  strstr(e.msg, "calls for [4,2,") && strstr(e.msg, "4 chunks: they restart"),
              "%s", e.msg);
    }
    end(&t);
}
