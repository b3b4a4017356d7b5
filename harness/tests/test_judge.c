/* `deltaproof judge`: what it accepts, what it refuses and how it says so, and that it judges by
 * the same truth and bounds as a run. The outputs of "another program" are those of the simulated
 * ranks, and a recorded o of FLA's CUDA kernels. */
#include "harness/run/judge.h"
#include "harness/simulated/ranks.h"
#include "ref/arithmetic/mm.h"
#include "runs.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* 3 ranks of one chunk each, HV = 2, state entering and leaving, raw gate with its parameters. */
#define CASE(KV)                                                                             \
    "reason = r\nsource = s\nop = kda\nT = 192\nHV = 2\n" KV                                 \
    "gate = softplus\nbeta = sigmoid\nl2norm = yes\ng_mean = -4\ng_scale = 0.5\ns0_scale = " \
    "1\ndstate = yes\n"                                                                      \
    "dtype = bf16\nranks = 3\nbase = bf16\nchain = tf32rz\n"
static const char WIDE[] = CASE("K = 16\nV = 8\n"), SQUARE[] = CASE("K = 8\nV = 8\n");
static const char ONE_HEAD[] =
    "reason = r\nsource = s\nop = kda\nT = 192\nK = 16\nV = 8\ngate = softplus\nbeta = "
    "sigmoid\nl2norm = yes\ng_mean = -4\nranks = 3\nbase = bf16\nchain = tf32rz\n";

typedef struct {
    dp_case c;
    dp_sim s;
} subject;

static void simulate(const char *text, subject *x) {
    dp_err e = {0};
    if (!gt_parse_case(text, &x->c)) abort();
    if (dp_sim_new(&x->s, &x->c.p, x->c.base[0], x->c.ranks[0], DP_FAULT_NONE, &e)) {
        gt_fail(__FILE__, __LINE__, "sim", "%s", e.msg);
        abort();
    }
    dp_sim_run(&x->s, x->c.chain[0], DP_EXCHANGE_ALLGATHER, x->c.backward);
}

static void forget(subject *x) { dp_sim_free(&x->s), dp_case_free(&x->c); }

static const char *in_path(void) {
    static char b[512];
    snprintf(b, sizeof b, "%s/in.safetensors", gt_tmpdir());
    return b;
}
static const char *out_path(void) {
    static char b[512];
    snprintf(b, sizeof b, "%s/out.safetensors", gt_tmpdir());
    return b;
}

typedef struct {
    const char *name;
    const double *x;
    int ndim;
    int64_t shape[4];
} entry;

/* axes: 3 [T,H,K], 4 [1,T,H,K], 2 [T,K] where there is one head. */
static void add(dp_tensorfile *f, const entry *t, int axes, const char *dtype) {
    int64_t s[8], n = 0;
    const int tokens = t->ndim >= 3 && t->shape[0] > 100;
    if (tokens && axes == 4) s[n++] = 1;
    for (int i = 0; i < t->ndim; i++)
        if (!(t->ndim >= 3 && axes == 2 && t->shape[i] == 1)) s[n++] = t->shape[i];
    if (t->x) dp_tensorfile_add(f, t->name, dtype, (int)n, s, t->x);
}

static double *turned(const double *x, int64_t states, int K, int V) {
    double *y = dp_doubles(states * K * V);
    for (int64_t i = 0; i < states * K * V; i++)
        y[i / (K * V) * K * V + i % V * K + i / V % K] = x[i];
    return y;
}

static void write_file(const char *path, const entry *t, int n, int axes, const char *dtype,
                       const char *const *meta) {
    dp_tensorfile f = {0};
    dp_err e = {0};
    for (int i = 0; i < n; i++)
        add(&f, &t[i], axes, dtype);
    for (; meta && *meta; meta += 2)
        dp_tensorfile_add_meta(&f, meta[0], meta[1]);
    if (dp_safetensors_write(path, &f, &e)) gt_fail(__FILE__, __LINE__, path, "%s", e.msg);
    dp_tensorfile_free(&f);
}

static const char *const SAID[] = {"gate", "-exp(A_log)*softplus(g+dt_bias)",
                                   "beta", "sigmoid(beta)",
                                   "qk",   "l2norm inside kernel",
                                   NULL};

static void write_inputs(const dp_problem *p, int axes, int vk, const char *const *meta) {
    double *s0 = p->s0 && vk ? turned(p->s0, p->Nseq * p->HV, p->K, p->V) : NULL,
           *ds = p->dstate && vk ? turned(p->dstate, p->Nseq * p->HV, p->K, p->V) : NULL;
    const int k = vk ? p->V : p->K, v = vk ? p->K : p->V;
    const entry t[] = {{"q", p->q, 3, {p->T, p->H, p->K}},
                       {"k", p->k, p->R > 1 ? 4 : 3, {p->T, p->H, p->R > 1 ? p->R : p->K, p->K}},
                       {"v", p->v, p->R > 1 ? 4 : 3, {p->T, p->HV, p->R > 1 ? p->R : p->V, p->V}},
                       {"g", p->g, dp_Kg(p) == 1 ? 2 : 3, {p->T, p->HV, dp_Kg(p)}},
                       {"beta", p->beta, p->R > 1 ? 3 : 2, {p->T, p->HV, p->R}},
                       {"A_log", p->A_log, 1, {p->HV}},
                       {"dt_bias", p->dt_bias, 1, {(int64_t)p->HV * dp_Kg(p)}},
                       {"initial_state", s0 ? s0 : p->s0, 4, {p->Nseq, p->HV, k, v}},
                       {"do", p->dout, 3, {p->T, p->HV, p->V}},
                       {"dht", ds ? ds : p->dstate, 4, {p->Nseq, p->HV, k, v}}};
    write_file(in_path(), t, sizeof t / sizeof *t, axes, "F64", meta);
    free(s0);
    free(ds);
}

/* which: ONLY(..) of results, or several. */
#define ONLY(RESULT) (1u << DP_RESULT_##RESULT)
static void write_outputs(const dp_problem *p, const dp_result *r, unsigned which, int axes, int vk,
                          const char *dtype) {
    const int K = p->K, V = p->V, R = p->R, k = vk ? V : K, v = vk ? K : V, m = R > 1;
    double *s[2] = {r->final_state && vk ? turned(r->final_state, p->Nseq * p->HV, K, V) : NULL,
                    r->ds0 && vk ? turned(r->ds0, p->Nseq * p->HV, K, V) : NULL};
    const entry all[10] = {{"o", r->o, 3, {p->T, p->HV, V}},
                           {"final_state", s[0] ? s[0] : r->final_state, 4, {p->Nseq, p->HV, k, v}},
                           {"dq", r->dq, 3, {p->T, p->H, K}},
                           {"dk", r->dk, 3 + m, {p->T, p->H, m ? R : K, K}},
                           {"dv", r->dv, 3 + m, {p->T, p->HV, m ? R : V, V}},
                           {"dg", r->dg, 3, {p->T, p->HV, dp_Kg(p)}},
                           {"dbeta", r->dbeta, 3, {p->T, p->HV, R}},
                           {"dA_log", r->dA_log, 1, {p->HV}},
                           {"ddt_bias", r->ddt_bias, 1, {(int64_t)p->HV * dp_Kg(p)}},
                           {"dh0", s[1] ? s[1] : r->ds0, 4, {p->Nseq, p->HV, k, v}}};
    entry t[10];
    int n = 0;
    for (int i = 0; i < 10; i++)
        if (which >> i & 1) t[n++] = all[i];
    write_file(out_path(), t, n, axes, dtype, NULL);
    free(s[0]);
    free(s[1]);
}

#define ALL ((1u << DP_NRESULTS) - 1)
static dp_judge_options options(void) {
    return (dp_judge_options){
        .inputs = in_path(), .outputs = out_path(), .ranks = 3, .base = "bf16", .claim = "tf32rz"};
}

typedef struct {
    dp_case c;
    dp_runs runs;
    const dp_run *run;
} judged;

static int judge(int line, const dp_judge_options *o, judged *j) {
    dp_err e = {0};
    memset(j, 0, sizeof *j);
    const dp_status st = dp_judge(o, &j->c, &j->runs, &e);
    if (st) gt_fail(__FILE__, line, "dp_judge", "refused: %s", e.msg);
    j->run = st ? NULL : &j->runs.run[0];
    return !st;
}
#define JUDGE(o, j) \
    if (!judge(__LINE__, o, j)) return

static void done(judged *j) { dp_runs_free(&j->runs), dp_case_free(&j->c); }

static void refuse(int line, const dp_judge_options *o, const char *const *words) {
    dp_case c;
    dp_runs runs = {0};
    dp_err e = {0};
    const dp_status st = dp_judge(o, &c, &runs, &e);
    CHECK(st == DP_EINPUT && !runs.n, "line %d: status %d, %d runs", line, st, runs.n);
    for (; *words; words++)
        CHECK(strstr(e.msg, *words), "line %d: '%s' not in: %s", line, *words, e.msg);
    if (!st) dp_case_free(&c);
    dp_runs_free(&runs);
}
#define REFUSE(o, ...) refuse(__LINE__, o, (const char *const[]){__VA_ARGS__, NULL})

/* Field by field: what lies between them has no meaning. */
static int same_row(const dp_row *a, const dp_row *b) {
    const int place = a->at.rank == b->at.rank && a->at.head == b->at.head &&
                      a->at.sequence == b->at.sequence && a->at.chunk == b->at.chunk &&
                      a->at.token == b->at.token;
    return place && a->index == b->index && !memcmp(&a->got, &b->got, 5 * sizeof a->got);
}

static void same_judgement(int line, const dp_judgement *a, const dp_judgement *b) {
    REQUIRE(a && b && a->N == b->N, "line %d: a tensor is missing", line);
    CHECK(a->rel_fro == b->rel_fro && a->bound == b->bound && a->ratio == b->ratio &&
              a->verdict == b->verdict,
          "line %d: %s: %.17g %.17g %.17g, %.17g %.17g %.17g", line, a->name, a->rel_fro, a->bound,
          a->ratio, b->rel_fro, b->bound, b->ratio);
    CHECK(same_row(&a->worst, &b->worst), "line %d: %s: worst place", line, a->name);
    for (int r = 0; r < a->N; r++)
        CHECK(a->per_rank[r] == b->per_rank[r] || (isnan(a->per_rank[r]) && isnan(b->per_rank[r])),
              "line %d: %s: rank %d: %g, %g", line, a->name, r, a->per_rank[r], b->per_rank[r]);
}

static void same_run(int line, const dp_run *a, const dp_run *b) {
    CHECK(a->ntensor == b->ntensor, "line %d: %d tensors, %d", line, a->ntensor, b->ntensor);
    for (int i = 0; i < a->ntensor; i++)
        same_judgement(line, &a->tensor[i], gt_tensor(b, a->tensor[i].name));
}

DP_TEST(judge, judges_ten_tensors_of_three_ranks_exactly_as_the_run_that_made_them) {
    subject x;
    judged j;
    dp_runs run = {0};
    dp_err e = {0};
    const dp_run_options ro = {.only[DP_ID_BACKEND] = {1, {DP_BACKEND_SIM}}};
    simulate(WIDE, &x);
    write_inputs(&x.c.p, 3, 0, SAID);
    write_outputs(&x.c.p, &x.s.out, ALL, 3, 0, "F64");
    REQUIRE(!dp_case_run(&x.c, &ro, &run, &e) && run.n == 1, "%s", e.msg);
    dp_judge_options o = options();
    JUDGE(&o, &j);
    CHECK(j.run->ntensor == 10, "%d tensors", j.run->ntensor);
    for (int i = 0; i < j.run->ntensor; i++)
        same_judgement(__LINE__, &j.run->tensor[i], gt_tensor(&run.run[0], j.run->tensor[i].name));
    CHECK(j.run->verdict == DP_PASS && j.run->backend == DP_BACKEND_FILE, "verdict %s, backend %d",
          dp_verdict_names[j.run->verdict], j.run->backend);
    CHECK(!strcmp(j.run->id, "judge:out.safetensors:ranks=3,base=bf16,chain=tf32rz"), "%s",
          j.run->id);
    for (int i = 0; i < 7; i++) {
        const dp_judgement *t = &j.run->tensor[i];
        for (int r = 0; i != 1 && r < 3; r++)
            CHECK(t->per_rank[r] > 0, "%s: rank %d: %g", t->name, r, t->per_rank[r]);
    }
    done(&j);
    dp_runs_free(&run);
    forget(&x);
}

DP_TEST(judge, names_rank_head_and_token_of_a_row_that_is_wrong_on_any_rank) {
    subject x;
    simulate(WIDE, &x);
    write_inputs(&x.c.p, 3, 0, SAID);
    dp_judge_options o = options();
    for (int r = 0; r < 3; r++)
        for (int hv = 0; hv < 2; hv++) {
            judged j;
            const int64_t t = r * 64 + 63, row = t * 2 + hv;
            double *o8 = x.s.out.o + row * 8, kept[8];
            memcpy(kept, o8, sizeof kept);
            for (int i = 0; i < 8; i++)
                o8[i] = o8[i] * 1.5 + 1;
            write_outputs(&x.c.p, &x.s.out, ONLY(O), 3, 0, "F64");
            memcpy(o8, kept, sizeof kept);
            JUDGE(&o, &j);
            const dp_judgement *w = gt_tensor(j.run, "o");
            CHECK(j.run->verdict == DP_FAIL && w->verdict == DP_FAIL && w->worst.at.rank == r &&
                      w->worst.at.head == hv && w->worst.at.token == t,
                  "rank %d head %d: %s at rank %d head %d token %lld", r, hv,
                  dp_verdict_names[w->verdict], w->worst.at.rank, w->worst.at.head,
                  (long long)w->worst.at.token);
            for (int i = 0; i < 3; i++)
                CHECK((w->per_rank_ratio[i] > 1) == (i == r), "rank %d: ratio %g", i,
                      w->per_rank_ratio[i]);
            done(&j);
        }
    forget(&x);
}

/* A row whose error is large among all rows need not be the one that its bound forbids. A small
 * row, 30% off, fails and is named. */
DP_TEST(judge, the_reason_names_the_row_that_exceeds_its_bound) {
    static const char FORGETS[] =
        "reason = r\nsource = s\nop = kda\nT = 192\nK = 16\nV = 8\noverride = v[70,*,*,*] 0x1p-20, "
        "g[70,*,*] -200\ng_uniform = 1\nranks = 3\nbase = bf16\nchain = bf16\n";
    subject x;
    judged j;
    dp_judge_options o = options();
    static const char *const LOG[] = {"gate", "log", "beta", "plain", "l2norm", "0", NULL};
    o.claim = "bf16";
    o.design = ""; /* the default: its bounds decide */
    simulate(FORGETS, &x);
    for (int i = 0; i < 8; i++)
        x.s.out.o[70 * 8 + i] *= 1.3;
    write_inputs(&x.c.p, 3, 0, LOG);
    write_outputs(&x.c.p, &x.s.out, ONLY(O), 3, 0, "F64");
    JUDGE(&o, &j);
    const dp_judgement *t = gt_tensor(j.run, "o");
    CHECK(t->verdict == DP_FAIL && t->over.at.token == 70 && t->worst.at.token != 70,
          "%s: over %lld, worst %lld", dp_verdict_names[t->verdict], (long long)t->over.at.token,
          (long long)t->worst.at.token);
    CHECK(strstr(j.run->why, "token 70"), "%s", j.run->why);
    done(&j);
    forget(&x);
}

DP_TEST(judge, nan_and_inf_fail_and_say_where) {
    subject x;
    simulate(WIDE, &x);
    write_inputs(&x.c.p, 3, 0, SAID);
    dp_judge_options o = options();
    for (int inf = 0; inf < 2; inf++) {
        judged j;
        const double kept = x.s.out.dv[(130 * 2 + 1) * 8 + 3];
        x.s.out.dv[(130 * 2 + 1) * 8 + 3] = inf ? INFINITY : NAN;
        write_outputs(&x.c.p, &x.s.out, ONLY(O) | ONLY(DV), 3, 0, "F32");
        x.s.out.dv[(130 * 2 + 1) * 8 + 3] = kept;
        JUDGE(&o, &j);
        const dp_judgement *w = gt_tensor(j.run, "dv");
        CHECK(w->verdict == DP_FAIL && w->worst.at.token == 130 && w->worst.at.rank == 2 &&
                  w->worst.at.head == 1 && w->worst.index == 3,
              "%s at token %lld", dp_verdict_names[w->verdict], (long long)w->worst.at.token);
        CHECK(strstr(j.run->why, "dv: 1 of 3072 entries are NaN or Inf, the first is entry 2091"),
              "%s", j.run->why);
        CHECK(gt_tensor(j.run, "o")->verdict == DP_PASS && j.run->verdict == DP_FAIL, "o %s",
              dp_verdict_names[gt_tensor(j.run, "o")->verdict]);
        done(&j);
    }
    forget(&x);
}

DP_TEST(judge, axes_of_length_one_and_single_heads_change_nothing) {
    const char *const text[] = {ONE_HEAD, WIDE};
    dp_judge_options o = options();
    for (int one = 0; one < 2; one++) {
        subject x;
        judged j[3];
        simulate(text[one], &x);
        for (int axes = 4; axes >= 3 - !one; axes--) {
            write_inputs(&x.c.p, axes, 0, SAID);
            write_outputs(&x.c.p, &x.s.out, one ? ALL : ALL & ~ONLY(DS0), axes, 0, "F64");
            JUDGE(&o, &j[4 - axes]);
            CHECK(j[4 - axes].run->verdict == DP_PASS, "%d axes: %s", axes, j[4 - axes].run->why);
            same_run(__LINE__, j[0].run, j[4 - axes].run);
        }
        for (int i = 0; i < 2 + !one; i++)
            done(&j[i]);
        forget(&x);
    }
}

/* [T,H K] of several heads would be taken for one head. */
DP_TEST(judge, a_tensor_that_lacks_an_axis_is_refused_by_file_name_and_shape) {
    dp_judge_options o = options();
    subject x;
    simulate(WIDE, &x);
    const dp_problem *p = &x.c.p;
    const entry in[] = {{"q", p->q, 2, {192, 16}},
                        {"k", p->k, 2, {192, 16}},
                        {"v", p->v, 2, {192, 16}},
                        {"g", p->g, 2, {192, 32}},
                        {"beta", p->beta, 2, {192, 2}}},
                o2 = {"o", x.s.out.o, 2, {192, 16}};
    write_file(in_path(), in, 5, 3, "F64", SAID);
    write_file(out_path(), &o2, 1, 3, "F64", NULL);
    REFUSE(&o, "in.safetensors: tensor q: shape [192,16], must be [T,H,K]: axes of length 1",
           "in.safetensors: tensor v: shape [192,16], must be [T,HV,V]",
           "out.safetensors: tensor o: shape [192,16], must be [T,HV,V]");
    write_file(in_path(), in, 4, 3, "F64", SAID); /* GLA has no beta, and nothing else to tell */
    o.beta = "none";
    REFUSE(&o, "in.safetensors: tensor q: shape [192,16], must be [T,H,K]");
    forget(&x);
}

DP_TEST(judge, transposed_states_are_recognised_by_option_only) {
    subject x;
    judged plain, j;
    simulate(SQUARE, &x); /* K = V: shapes say nothing */
    dp_judge_options o = options(), vk = o;
    vk.state_layout = "vk";
    write_inputs(&x.c.p, 3, 0, SAID);
    write_outputs(&x.c.p, &x.s.out, ALL, 3, 0, "F64");
    JUDGE(&o, &plain);
    CHECK(plain.run->verdict == DP_PASS, "%s", plain.run->why);
    write_inputs(&x.c.p, 3, 1, SAID);
    write_outputs(&x.c.p, &x.s.out, ALL, 3, 1, "F64");
    JUDGE(&vk, &j);
    same_run(__LINE__, plain.run, j.run);
    done(&j);
    write_inputs(&x.c.p, 3, 0, SAID);
    JUDGE(&o, &j);
    CHECK(gt_tensor(j.run, "final_state")->verdict == DP_FAIL &&
              gt_tensor(j.run, "o")->verdict == DP_PASS,
          "final_state %s", dp_verdict_names[gt_tensor(j.run, "final_state")->verdict]);
    done(&j);
    done(&plain);
    forget(&x);
    simulate(WIDE, &x); /* K = 16, V = 8: a transposed state is refused, with the option */
    write_inputs(&x.c.p, 3, 0, SAID);
    write_outputs(&x.c.p, &x.s.out, ONLY(FINAL_STATE), 3, 1, "F64");
    REFUSE(&o, "final_state", "[1,2,8,16]", "[1,2,16,8]", "--state-layout vk");
    write_inputs(&x.c.p, 3, 1, SAID);
    JUDGE(&vk, &j);
    CHECK(j.run->verdict == DP_PASS, "%s", j.run->why);
    done(&j);
    write_outputs(&x.c.p, &x.s.out, ONLY(FINAL_STATE), 3, 0, "F64");
    REFUSE(&vk, "final_state", "[1,2,16,8]", "--state-layout kv");
    forget(&x);
}

DP_TEST(judge, shapes_and_names_that_do_not_fit_are_refused_by_name) {
    subject x;
    simulate(WIDE, &x);
    dp_judge_options o = options();
    write_inputs(&x.c.p, 3, 0, SAID);
    const struct {
        entry t;
        const char *dtype;
        const char *says[4];
    } bad[] = {
        {{"o", x.s.out.o, 3, {192, 1, 8}},
         "F32",
         {"out.safetensors: tensor o: shape [192,1,8]", "in.safetensors calls for [192,2,8]"}},
        {{"o", x.s.out.o, 3, {96, 2, 8}}, "F32", {"tensor o: shape [96,2,8]", "[192,2,8]"}},
        {{"dq", x.s.out.dq, 3, {192, 2, 8}}, "F32", {"tensor dq: shape [192,2,8]", "[192,1,16]"}},
        {{"final_state", x.s.out.final_state, 3, {16, 2, 8}},
         "F32",
         {"tensor final_state: shape [16,2,8]", "[1,2,16,8]"}},
        {{"O", x.s.out.o, 3, {192, 2, 8}},
         "F32",
         {"out.safetensors: tensor O is not known",
          "o final_state (or ht) dq dk dv dg dbeta dA_log ddt_bias ds0"}},
        {{"S_out", x.s.out.o, 1, {8}},
         "F32",
         {"tensor S_out is not known", "stages gcum Akk Aqk w u"}},
        {{"S_in", x.s.out.o, 1, {8}},
         "F32",
         {"tensor S_in: shape [8]", "calls for [3,2,16,8]", "3 ranks"}},
        {{"o", (const double[]){1, 2}, 1, {2}}, "I32", {"tensor o: dtype I32", "floating"}}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        write_file(out_path(), &bad[i].t, 1, 3, bad[i].dtype, NULL);
        refuse(__LINE__, &o, bad[i].says);
    }
    const entry twice[] = {{"ht", x.s.out.final_state, 4, {1, 2, 16, 8}},
                           {"final_state", x.s.out.final_state, 4, {1, 2, 16, 8}}};
    write_file(out_path(), twice, 2, 3, "F32", NULL);
    REFUSE(&o, "final_state is there twice");
    write_file(out_path(), twice, 0, 3, "F32", NULL);
    REFUSE(&o, "out.safetensors: has no tensors");
    write_outputs(&x.c.p, &x.s.out, ONLY(O), 3, 0, "F64");
    const dp_problem *p = &x.c.p;
    const entry in[] = {{"q", p->q, 3, {192, 1, 16}},   {"k", p->k, 3, {192, 1, 16}},
                        {"v", p->v, 3, {192, 2, 8}},    {"g", p->g, 3, {192, 2, 16}},
                        {"beta", p->beta, 2, {192, 2}}, {"bias", p->beta, 1, {1}},
                        {"k", p->k, 2, {96, 16}}};
    write_file(in_path(), in, 6, 3, "F64", SAID);
    REFUSE(&o, "in.safetensors: tensor bias is not an input", "initial_state");
    write_file(in_path(), in, 4, 3, "F64", SAID);
    REFUSE(&o, "in.safetensors: tensor beta is missing");
    o.beta = "none"; /* none is wanted then, and one that is there is too many */
    write_file(in_path(), in, 5, 3, "F64", SAID);
    REFUSE(&o, "tensor beta is no input of op = gla");
    o.beta = NULL;
    entry short_k[5] = {in[0], in[6], in[2], in[3], in[4]};
    write_file(in_path(), short_k, 5, 3, "F64", SAID);
    REFUSE(&o, "in.safetensors", "tensor k: shape [96,16]", "must be [T,H,K]");
    const entry batch[] = {{"q", p->q, 3, {1, 192, 16}}, in[1], in[2], in[3], in[4]};
    write_file(in_path(), batch, 5, 3, "F64", SAID);
    REFUSE(&o, "[1,192,16]", "[1,T,H,K]");
    forget(&x);
}

DP_TEST(judge, gradients_need_what_they_are_gradients_of) {
    subject x;
    simulate(WIDE, &x);
    dp_judge_options o = options();
    const dp_problem *p = &x.c.p;
    const entry in[] = {{"q", p->q, 3, {192, 1, 16}},   {"k", p->k, 3, {192, 1, 16}},
                        {"v", p->v, 3, {192, 2, 8}},    {"g", p->g, 3, {192, 2, 16}},
                        {"beta", p->beta, 2, {192, 2}}, {"do", p->dout, 3, {192, 2, 8}}};
    write_file(in_path(), in, 5, 3, "F64", SAID);
    write_outputs(p, &x.s.out, ONLY(DQ), 3, 0, "F64");
    REFUSE(&o, "tensor dq is a gradient", "has no tensor do");
    write_file(in_path(), in, 6, 3, "F64", SAID);
    write_outputs(p, &x.s.out, ONLY(DA_LOG), 3, 0, "F64");
    REFUSE(&o, "tensor dA_log", "has no tensor A_log");
    forget(&x);
}

/* A setting that no file has and nobody knows. */
static const char *const ODD[] = {"gate", "linear", NULL};

DP_TEST(judge, a_setting_that_is_missing_or_unknown_is_refused_with_its_option) {
    subject x;
    simulate(WIDE, &x);
    write_outputs(&x.c.p, &x.s.out, ONLY(O), 3, 0, "F64");
    dp_judge_options o = options();
    static const char *const NOTHING[] = {NULL}, *const GATE[] = {"gate", "softplus", NULL},
                             *const TWO[] = {"gate", "softplus", "beta", "sigmoid", NULL};
    static const char *const LB[] = {"gate", "lower_bound", "beta", "sigmoid", "l2norm", "1", NULL};
    write_inputs(&x.c.p, 3, 0, NOTHING);
    REFUSE(&o, "in.safetensors", "--gate log|exp|softplus|lower_bound");
    write_inputs(&x.c.p, 3, 0, GATE);
    REFUSE(&o, "`beta`", "--beta plain|sigmoid|sigmoid2");
    write_inputs(&x.c.p, 3, 0, TWO);
    REFUSE(&o, "`l2norm`", "--l2norm 0|1");
    write_inputs(&x.c.p, 3, 0, ODD);
    REFUSE(&o, "metadata `gate` = 'linear' is not understood", "--gate");
    write_inputs(&x.c.p, 3, 0, LB);
    REFUSE(&o, "--lower-bound X");
    write_inputs(&x.c.p, 3, 0, SAID);
    dp_judge_options no = o;
    no.base = NULL;
    REFUSE(&no, "`base`", "--base bf16|fp16|fp32|fp64");
    no = o;
    no.claim = NULL;
    REFUSE(&no, "`claim`", "--claim");
    no = o;
    no.ranks = 5;
    REFUSE(&no, "ranks = 5", "192", "not divisible");
    no = o;
    no.gate = "sine";
    REFUSE(&no, "'sine' is not known", "--gate");
    no = o;
    no.gate_dtype = "fp8";
    REFUSE(&no, "'fp8' is not known", "--gate-dtype fp32|bf16|fp16");
    no = o;
    no.scale = "big";
    REFUSE(&no, "--scale");
    no = o;
    no.cu_seqlens = "0,7";
    REFUSE(&no, "cu_seqlens", "must end at T = 192");
    forget(&x);
}

DP_TEST(judge, a_setting_comes_from_its_option_then_from_metadata) {
    subject x;
    simulate(WIDE, &x);
    write_outputs(&x.c.p, &x.s.out, ONLY(O), 3, 0, "F64");
    write_inputs(&x.c.p, 3, 0, SAID);
    dp_judge_options o = options();
    judged a, b;
    JUDGE(&o, &a);
    write_inputs(&x.c.p, 3, 0, ODD); /* an option wins over what the file says */
    dp_judge_options all = o;
    all.gate = "softplus";
    all.beta = "sigmoid";
    all.l2norm = "1";
    all.scale = "0.25";
    all.cu_seqlens = "0,192";
    JUDGE(&all, &b);
    same_run(__LINE__, a.run, b.run);
    done(&b);
    all.gate_dtype = "fp32"; /* of gates in bf16: no other numbers */
    JUDGE(&all, &b);
    same_run(__LINE__, a.run, b.run);
    done(&b);
    all.scale = "0.5"; /* and means something */
    JUDGE(&all, &b);
    CHECK(b.run->verdict == DP_FAIL, "scale 0.5 instead of 0.25: %s",
          dp_verdict_names[b.run->verdict]);
    done(&b);
    all.scale = NULL;
    all.cu_seqlens = "0,64,192";
    REFUSE(&all, "tensor initial_state: shape [1,2,16,8]", "[2,2,16,8]");
    done(&a);
    forget(&x);
}

DP_TEST(judge, packed_sequences_gdn_and_many_keys_are_recognised) {
    static const char PACKED[] =
        "reason = r\nsource = s\nop = kda\nT = 192\nK = 16\nV = 8\ncu_seqlens = "
        "0,50,50,150,192\nranks = 3\nbase = fp32\nchain = fp32\n";
    static const char GDN[] = "reason = r\nsource = s\nop = gdn\nT = 192\nHV = 2\nK = 16\nV = "
                              "8\nranks = 3\nbase = fp32\nchain = fp32\n";
    static const char MKDA[] = "reason = r\nsource = s\nop = mkda\nT = 192\nHV = 2\nK = 16\nV = "
                               "8\nR = 2\nranks = 3\nbase = fp32\nchain = fp32\n";
    static const char *const LOG[] = {"gate", "log", "beta", "plain", "l2norm", "0", NULL},
                             *const CU[] = {"gate",   "log", "beta",       "plain",
                                            "l2norm", "0",   "cu_seqlens", "0,50,50,150,192",
                                            NULL};
    const struct {
        const char *text;
        dp_model model;
        int R, Nseq;
        const char *const *meta;
    } c[] = {{PACKED, DP_KDA, 1, 4, CU}, {GDN, DP_GDN, 1, 1, LOG}, {MKDA, DP_MKDA, 2, 1, LOG}};
    for (int i = 0; i < 3; i++) {
        subject x;
        judged j;
        dp_judge_options o = options();
        o.base = o.claim = "fp32";
        simulate(c[i].text, &x);
        write_inputs(&x.c.p, 3, 0, c[i].meta);
        write_outputs(&x.c.p, &x.s.out, ALL & ~(ONLY(DA_LOG) | ONLY(DDT_BIAS) | ONLY(DS0)), 3, 0,
                      "F32");
        JUDGE(&o, &j);
        CHECK(j.c.p.model == c[i].model && j.c.p.R == c[i].R && j.c.p.Nseq == c[i].Nseq,
              "%d: model %d, R %d, Nseq %d", i, j.c.p.model, j.c.p.R, j.c.p.Nseq);
        CHECK(j.run->verdict == DP_PASS && j.run->ntensor == 7, "%d: %s", i, j.run->why);
        done(&j);
        o.cu_seqlens = "0,192"; /* an option wins, and means something */
        write_outputs(&x.c.p, &x.s.out, ONLY(O), 3, 0, "F32");
        JUDGE(&o, &j);
        CHECK(j.run->verdict == (i ? DP_PASS : DP_FAIL), "%d: one sequence: %s", i,
              dp_verdict_names[j.run->verdict]);
        done(&j);
        forget(&x);
    }
}

DP_TEST(judge, no_gate_is_a_gate_of_zeros_and_an_axis_of_one_key_is_taken) {
    static const char TEXT[] = "reason = r\nsource = s\nop = gdn\nT = 192\nH = 2\nHV = 2\nK = 16\n"
                               "V = 8\ng_scale = 0\nranks = 3\nbase = fp32\nchain = fp32\n";
    static const char *const NO_GATE[] = {"beta", "plain", "l2norm", "0", NULL};
    subject x;
    judged j, k;
    dp_judge_options o = options();
    o.base = o.claim = "fp32";
    simulate(TEXT, &x);
    const dp_problem *p = &x.c.p;
    const entry in[] = {{"q", p->q, 3, {192, 2, 16}},   {"k", p->k, 4, {192, 2, 1, 16}},
                        {"v", p->v, 4, {192, 2, 1, 8}}, {"beta", p->beta, 3, {192, 2, 1}},
                        {"g", p->g, 2, {192, 2}},       {"A_log", p->beta, 1, {2}}};
    write_outputs(p, &x.s.out, ONLY(O) | ONLY(FINAL_STATE), 3, 0, "F32");
    write_file(in_path(), in, 5, 3, "F64",
               (const char *const[]){"gate", "log", "beta", "plain", "l2norm", "0", NULL});
    JUDGE(&o, &j);
    CHECK(j.run->verdict == DP_PASS && !j.c.nwarn, "%s", j.run->why);
    write_file(in_path(), in, 4, 3, "F64", NO_GATE);
    JUDGE(&o, &k);
    same_run(__LINE__, j.run, k.run);
    CHECK(k.c.p.model == DP_GDN && k.c.nwarn == 1 && strstr(k.c.warn[0], "have no g"), "%d, %s",
          k.c.p.model, k.c.nwarn ? k.c.warn[0] : "no warning");
    done(&k);
    o.recurrence = "mkda"; /* the same where keys are one, with a gate a channel */
    JUDGE(&o, &k);
    CHECK(k.run->verdict == DP_PASS && k.c.p.model == DP_MKDA && k.c.p.g[192 * 2 * 16 - 1] == 0,
          "%s", k.run->why);
    done(&k);
    o.recurrence = NULL;
    o.gate = "softplus";
    REFUSE(&o, "tensor g is missing");
    o.gate = NULL;
    const entry raw[] = {in[0], in[1], in[2], in[3], in[5]};
    write_file(in_path(), raw, 5, 3, "F64", NO_GATE);
    REFUSE(&o, "tensor g is missing");
    const entry two[] = {{"q", p->q, 3, {96, 2, 16}},
                         {"k", p->k, 4, {96, 2, 2, 16}},
                         {"v", p->v, 4, {96, 2, 2, 8}},
                         {"beta", p->beta, 3, {96, 2, 2}}};
    write_file(in_path(), two, 4, 3, "F64", NO_GATE);
    REFUSE(&o, "tensor g is missing", "--recurrence mkda|gated-deltaproduct");
    const entry made[] = {{"o", x.s.out.o, 3, {192, 2, 8}}, {"dg", p->g, 2, {192, 2}}};
    const entry before[] = {in[0], in[1], in[2], in[3], {"do", x.s.out.o, 3, {192, 2, 8}}};
    write_file(in_path(), before, 5, 3, "F64", NO_GATE);
    write_file(out_path(), made, 2, 3, "F32", NULL);
    REFUSE(&o, "has dg, but", "has no g");
    done(&j);
    forget(&x);
}

DP_TEST(judge, results_stored_in_bf16_get_that_one_rounding_and_no_more) {
    static const char FP32[] =
        "reason = r\nsource = s\nop = kda\nT = 192\nK = 16\nV = 8\ngate = softplus\nbeta = "
        "sigmoid\nl2norm = yes\ng_mean = -4\ng_scale = 0.5\nranks = 3\nbase = fp32\nchain = fp32\n";
    subject x;
    judged j;
    dp_judge_options o = options();
    o.base = o.claim = "fp32";
    simulate(FP32, &x);
    write_inputs(&x.c.p, 3, 0, SAID);
    write_outputs(&x.c.p, &x.s.out, ONLY(O) | ONLY(FINAL_STATE), 3, 0, "BF16");
    JUDGE(&o, &j);
    CHECK(j.run->verdict == DP_PASS && gt_tensor(j.run, "o")->rel_fro > 1e-3, "%s, o %g",
          j.run->why, gt_tensor(j.run, "o")->rel_fro);
    CHECK(gt_tensor(j.run, "o")->bound > 0x1p-8 && gt_tensor(j.run, "o")->bound < 1.1 * 0x1p-8,
          "bound %g", gt_tensor(j.run, "o")->bound);
    done(&j);
    for (int64_t i = 0; i < 192 * 8; i++)
        x.s.out.o[i] = dp_bf16d(x.s.out.o[i]);
    write_outputs(&x.c.p, &x.s.out, ONLY(O) | ONLY(FINAL_STATE), 3, 0,
                  "F32"); /* the same values, but the file says fp32: a
   rounding that the claim has no room for */
    JUDGE(&o, &j);
    CHECK(gt_tensor(j.run, "o")->verdict == DP_FAIL &&
              gt_tensor(j.run, "final_state")->verdict == DP_PASS,
          "o %s", dp_verdict_names[gt_tensor(j.run, "o")->verdict]);
    done(&j);
    forget(&x);
}

/* First 2,048 tokens of o as FLA's chunk_kda wrote them on 4 H200 (they are rank 0 of 8,192
 * tokens). The error, measured independently of this code: 4.00e-3. */
DP_TEST(judge, recorded_output_of_fla_has_the_error_measured_elsewhere) {
    char in[512], out[512], cache[512];
    judged j;
    snprintf(in, sizeof in, "%s/data/kda-lm-layer3-long.safetensors", gt_cases());
    snprintf(out, sizeof out, "%s/data/kda-lm-layer3-long.fla-cp4-o.safetensors", gt_cases());
    snprintf(cache, sizeof cache, "%s/cache", gt_tmpdir());
    dp_judge_options o = {
        .inputs = in, .outputs = out, .tokens = 2048, .base = "bf16", .cache = cache};
    JUDGE(&o, &j);
    CHECK(j.run->verdict == DP_PASS && fabs(j.run->tensor[0].rel_fro - 4.00e-3) < 5e-6, "%s %.5g",
          dp_verdict_names[j.run->verdict], j.run->tensor[0].rel_fro);
    done(&j);
    o.tokens = 0;
    REFUSE(&o, "tensor o: shape [2048,128]", "[8192,1,128]");
}

/* All of what FLA wrote there (10 MB, not kept here: DP_FLA_OUTPUTS names the file), rank by rank,
 * against figures measured with another program. */
DP_TEST(judge, all_that_fla_wrote_on_four_ranks_has_the_errors_measured_elsewhere) {
    static const struct {
        const char *name;
        double all, rank[4];
    } FLA[] = {{"o", 4.070e-3, {4.00e-3, 4.12e-3, 3.84e-3, 4.42e-3}},
               {"dq", 3.322e-3, {3.07e-3, 3.06e-3, 3.02e-3, 4.22e-3}},
               {"dk", 4.487e-3, {4.15e-3, 5.12e-3, 4.03e-3, 4.10e-3}},
               {"dv", 4.705e-3, {4.58e-3, 5.23e-3, 4.45e-3, 3.89e-3}},
               {"dg", 5.233e-3, {4.70e-3, 6.19e-3, 5.36e-3, 3.72e-3}},
               {"dbeta", 3.535e-3, {4.09e-3, 3.99e-3, 3.09e-3, 2.93e-3}}};
    const char *file = getenv("DP_FLA_OUTPUTS");
    char in[512], cache[512];
    judged j;
    if (!file || !*file)
        SKIP("DP_FLA_OUTPUTS does not name the file of FLA's outputs (10 MB, not kept here)");
    snprintf(in, sizeof in, "%s/data/kda-lm-layer3-long.safetensors", gt_cases());
    snprintf(cache, sizeof cache, "%s/cache", gt_tmpdir());
    const dp_judge_options o = {.inputs = in,
                                .outputs = file,
                                .ranks = 4,
                                .base = "bf16",
                                .claim = "tf32rz",
                                .cache = cache};
    JUDGE(&o, &j);
    CHECK(j.run->verdict == DP_PASS, "%s", j.run->why);
    for (size_t i = 0; i < sizeof FLA / sizeof *FLA; i++) {
        const dp_judgement *t = gt_tensor(j.run, FLA[i].name);
        CHECK(fabs(t->rel_fro - FLA[i].all) < 5.1e-7, "%s: %.5g", FLA[i].name, t->rel_fro);
        for (int r = 0; r < 4; r++)
            CHECK(fabs(t->per_rank[r] - FLA[i].rank[r]) < 5.1e-6, "%s, rank %d: %.4g", FLA[i].name,
                  r, t->per_rank[r]);
    }
    done(&j);
}

static char said[1 << 16];

static int program(const char *args) {
    char cmd[4096];
    snprintf(cmd, sizeof cmd, "'%s' judge --inputs '%s' --outputs '%s' --cache none %s",
             gt_program(), in_path(), out_path(), args);
    return gt_run(cmd, said, sizeof said);
}

DP_TEST(judge, the_program_gives_status_verdict_and_record) {
    subject x;
    char a[1024];
    simulate(WIDE, &x);
    write_inputs(&x.c.p, 4, 0, SAID);
    write_outputs(&x.c.p, &x.s.out, ONLY(O) | ONLY(FINAL_STATE) | ONLY(DQ), 4, 0, "F32");
    snprintf(a, sizeof a, "--ranks 3 --base bf16 --claim tf32rz --json '%s/judge.json'",
             gt_tmpdir());
    CHECK(program(a) == 0, "%s", said);
    CHECK(strstr(said, "pass     o ") && strstr(said, "worst: rank") &&
              strstr(said, "VERDICT: PASS (1 passed, 0 failed, 0 skipped, 0 unjudged)"),
          "%s", said);
    snprintf(a, sizeof a, "%s/judge.json", gt_tmpdir());
    json_t *rec = json_load_file(a, 0, NULL),
           *run = json_array_get(json_object_get(rec, "runs"), 0);
    REQUIRE(run, "no record");
    CHECK(!strcmp(json_string_value(json_object_get(run, "backend")), "file") &&
              !strcmp(json_string_value(json_object_get(run, "id")),
                      "judge:out.safetensors:ranks=3,base=bf16,chain=tf32rz"),
          "%s", json_string_value(json_object_get(run, "id")));
    CHECK(json_array_size(json_object_get(run, "tensors")) == 3, "tensors");
    json_decref(rec);
    CHECK(program("--ranks 3 --base bf16 --claim tf32rz --scale 0.3") == 1 &&
              strstr(said, "VERDICT: FAIL") && strstr(said, "token"),
          "%s", said);
    CHECK(program("--ranks 3") == 2 && strstr(said, "--base") &&
              strstr(said, "VERDICT: COULD NOT JUDGE"),
          "%s", said);
    CHECK(program("--ranks 3,4 --base bf16") == 2 &&
              strstr(said, "--ranks 3,4: takes one value here"),
          "%s", said);
    CHECK(program("--tokens 0") == 2 && strstr(said, "--tokens 0"), "%s", said);
    snprintf(a, sizeof a, "'%s' run --id judge:out.safetensors:ranks=3", gt_program());
    CHECK(gt_run(a, said, sizeof said) == 2 && strstr(said, "deltaproof judge"), "%s", said);
    snprintf(a, sizeof a, "'%s' judge --inputs x", gt_program());
    CHECK(gt_run(a, said, sizeof said) == 2 && strstr(said, "--outputs"), "%s", said);
    snprintf(a, sizeof a, "'%s' run --backend file smoke-kda", gt_program());
    CHECK(gt_run(a, said, sizeof said) == 2 && strstr(said, "'file' is not known"), "%s", said);
    forget(&x);
}

/* ---- a chain of M alone ---------------------------------------------------------------------- */

/* 128 factors that forget nothing, multiplied in a format; every product is written. */
static void write_chain(dp_format f, const int64_t *shape) {
    enum { N = 128, K = 32, KK = K * K };
    float *factors = dp_calloc(N * KK, sizeof *factors);
    double *x = dp_doubles(N * KK), *P = dp_doubles(N * KK), mu[N];
    const int64_t full[3] = {N, K, K};
    dp_inputs_chain(DP_REGIME_REFLECT, N, K, 7, factors, mu);
    for (int i = 0; i < N * KK; i++)
        x[i] = factors[i];
    memcpy(P, x, sizeof *P * KK);
    for (int j = 1; j < N; j++)
        dp_mm(f, 0, 0, K, K, K, x + j * KK, P + (j - 1) * KK, P + j * KK);
    const entry in = {"factors", x, 3, {N, K, K}}, out = {"M", P, 3, {0}};
    entry o = out;
    memcpy(o.shape, shape ? shape : full, sizeof full);
    write_file(in_path(), &in, 1, 3, "F32", NULL);
    write_file(out_path(), &o, 1, 3, "F32", NULL);
    free(factors);
    free(x);
    free(P);
}

DP_TEST(judge, a_chain_of_another_program_shows_its_bits_and_its_bias) {
    const struct {
        dp_format made;
        const char *claim;
        int pass;
        const char *says;
    } what[] = {{DP_FP32, "fp32", 1, "fp32"},
                {DP_TF32, "tf32", 1, "tf32"},
                {DP_TF32RZ, "tf32rz", 1, "truncated tf32"},
                {DP_BF16, "bf16", 1, "bf16"},
                {DP_TF32RZ, "fp32", 0, "truncated tf32"},
                {DP_TF32, "tf32x3", 0, "11.0 bits"},
                {DP_TF32RZ, "tf32", 0, "biased"}};
    for (size_t i = 0; i < sizeof what / sizeof *what; i++) {
        judged j;
        const dp_judge_options o = {
            .inputs = in_path(), .outputs = out_path(), .claim = what[i].claim};
        write_chain(what[i].made, NULL);
        JUDGE(&o, &j);
        CHECK(j.run->verdict == (what[i].pass ? DP_PASS : DP_FAIL) && j.run->bits.npoint == 4,
              "%s claimed as %s: %s (%s)", dp_formats[what[i].made].name, what[i].claim,
              dp_verdict_names[j.run->verdict], j.run->bits.says);
        CHECK(strstr(j.run->bits.says, what[i].says), "%s claimed as %s: '%s' not in '%s'",
              dp_formats[what[i].made].name, what[i].claim, what[i].says, j.run->bits.says);
        CHECK(!strcmp(j.run->op, "chain") && j.run->ntensor == 1 &&
                  !strcmp(j.run->tensor[0].name, "M"),
              "op %s", j.run->op);
        done(&j);
    }
    const dp_judge_options none = {.inputs = in_path(), .outputs = out_path()},
                           claim = {.inputs = in_path(), .outputs = out_path(), .claim = "fp32"};
    REFUSE(&none, "--claim");
    write_chain(DP_FP32, (const int64_t[]){32, 128, 32});
    REFUSE(&claim, "M [128,32,32]", "M [32,128,32]");
}

/* K = 1: a gate a channel and one a head have the same shape. */
DP_TEST(judge, the_recurrence_is_what_option_or_metadata_say) {
    static const struct {
        const char *option, *says;
        int status;
    } ASKED[] = {{"", "\"op\":\"gdn\"", 0},
                 {"--recurrence kda", "\"op\":\"kda\"", 0},
                 {"--recurrence gla", "tensor beta is no input of op = gla", 2},
                 {"--recurrence gal", "gal: ", 2}};
    char cmd[2000], out[1 << 14];
    snprintf(
        cmd, sizeof cmd,
        "cd '%s' && printf 'reason = r\\nsource = s\\nop = gdn\\nT = 9\\nK = 1\\nV = 4\\nranks "
        "= 1\\nbase = fp32\\nbackward = no\\n' >k1.case && '%s' inputs k1.case -o k1.in && '%s' "
        "truth k1.case -o k1.out",
        gt_tmpdir(), gt_program(), gt_program());
    REQUIRE(gt_run(cmd, out, sizeof out) == 0, "%s", out);
    for (size_t i = 0; i < sizeof ASKED / sizeof *ASKED; i++) {
        snprintf(cmd, sizeof cmd,
                 "cd '%s' && '%s' judge %s --inputs k1.in --outputs k1.out --base fp32 --json "
                 "k1.json 2>&1; s=$?; grep -o '\"op\":\"[a-z]*\"' k1.json; exit $s",
                 gt_tmpdir(), gt_program(), ASKED[i].option);
        const int status = gt_run(cmd, out, sizeof out);
        CHECK(status == ASKED[i].status && strstr(out, ASKED[i].says), "%s: status %d: %s",
              ASKED[i].option, status, out);
    }
}
