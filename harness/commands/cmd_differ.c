/* deltaproof differ CASE SUBJECT SUBJECT: two kernels on the same inputs, without a truth
 * (harness/search/differ.h). If they differ by more than both bounds, or a bound is missing, each
 * is compared with the truth, if that is affordable. Exit status 0: the same bits, or within the
 * bounds, 1: not, 2: could not judge. */
#define _GNU_SOURCE
#include "cmd_differ.h"
#include "commands.h"
#include "harness/run/judge.h"
#include "large_problem.h"
#include "options.h"
#include "parse.h"
#include "ref/files/output.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    dp_options of;      /* of both */
    dp_options side[2]; /* of each: what names it, and its claims */
    dp_subject subject[2];
    dp_check_subject s[2];
    int n, heads, forward, bitwise, no_truth;
    int64_t tokens;
} options;

enum { OPT_TOKENS = 256, OPT_HEADS, OPT_FORWARD, OPT_BITWISE, OPT_NO_TRUTH };

/* Options that begin a subject, and those that belong to the one before them. */
static int begins(int key) {
    return key == DP_OPT_SUBJECT || key == DP_OPT_RUN || key == DP_OPT_SERVE ||
           key == DP_OPT_BACKEND;
}

static int belongs(int key) {
    return begins(key) || key == DP_OPT_BASE || key == DP_OPT_CHAIN || key == DP_OPT_DESIGN ||
           key == DP_OPT_WRITES || key == DP_OPT_FAULT || key == DP_OPT_MERGE;
}

static error_t parse(int key, char *arg, struct argp_state *st) {
    options *o = st->input;
    if (begins(key) && o->n == 2) argp_error(st, "%s: a third subject; two are compared", arg);
    if (begins(key)) o->side[o->n++] = dp_options_new(1, 0);
    if (belongs(key) && !o->n)
        argp_error(st, "%s: is said behind the subject that it is true of", arg);
    switch (key) {
    case OPT_TOKENS: o->tokens = dp_option_number(st, "tokens", arg, 1, (int64_t)1 << 30); break;
    case OPT_HEADS: o->heads = (int)dp_option_number(st, "heads", arg, 1, 1 << 20); break;
    case OPT_FORWARD: o->forward = 1; break;
    case OPT_BITWISE: o->bitwise = 1; break;
    case OPT_NO_TRUTH: o->no_truth = 1; break;
    case ARGP_KEY_END:
        if (!o->of.nname) argp_error(st, "name a case");
        if (o->n < 2)
            argp_error(st, "name two subjects, each by --subject, --run, --serve or --backend");
        break;
    default: return dp_option(key, arg, st, belongs(key) ? &o->side[o->n - 1] : &o->of);
    }
    return 0;
}

static const struct argp_option OPTIONS[] = {
    DP_ROW_SUBJECT(DP_LIBRARY),
    DP_ROWS_PROGRAM,
    {"backend", DP_OPT_BACKEND, "NAME", 0, "sim: the simulated ranks; mpi, cuda or nccl", 0},
    DP_ROW_BASE,
    DP_ROW_CHAIN,
    DP_ROW_DESIGN,
    DP_ROW_MERGE,
    DP_ROW_PAYLOAD,
    DP_ROW_FAULT,
    DP_ROW_CASES,
    DP_ROW_RANKS,
    DP_ROW_LIMIT,
    DP_ROW_MEMORY,
    DP_ROW_CACHE,
    {"bitwise", OPT_BITWISE, 0, 0, "both kernels claim equal bits: any difference fails", 0},
    {"truth", DP_OPT_TRUTH, "KIND", 0,
     "arithmetic of that truth: mpfr, dd or auto, whatever it costs (default: auto where it takes "
     "about a minute)",
     0},
    {"no-truth", OPT_NO_TRUTH, 0, 0, "make no truth to decide whose bound is broken", 0},
    {"forward", OPT_FORWARD, 0, 0, "forward only, no gradients", 0},
    {"tokens", OPT_TOKENS, "T", 0, "that many tokens instead of the case's, one sequence", 0},
    {"heads", OPT_HEADS, "HV", 0, "that many heads (the law of inputs as in the case, H = HV)", 0},
    DP_ROW_JSON_OF("write the results there"),
    {0}};

/* ---- the two --------------------------------------------------------------------------------- */

static dp_status open_side(options *o, int k, dp_err *e) {
    dp_options *of = &o->side[k];
    memcpy(of->ranks, o->of.ranks, sizeof of->ranks);
    of->nranks = o->of.nranks;
    of->limit_s = o->of.limit_s;
    of->memory = o->of.memory;
    if (of->nbackend) {
        const dp_backend b = of->backend[0];
        const char *no = dp_unavailable(b, o->of.nranks ? o->of.ranks[0] : 1);
        o->s[k].backend = b;
        if (of->design || of->writes || b == DP_BACKEND_LAPACK)
            return dp_fail(e, DP_EINPUT,
                           "--backend %s: differ knows sim, mpi, cuda and nccl, and they "
                           "take no --design and no --writes",
                           dp_backend_names[b]);
        return no ? dp_fail(e, DP_EDEVICE, "--backend %s: %s", dp_backend_names[b], no) : DP_OK;
    }
    if (of->fault)
        return dp_fail(e, DP_EINPUT, "--fault %s: of --backend sim", dp_faults[of->fault].name);
    o->s[k].backend = DP_BACKEND_SUBJECT;
    o->s[k].library = &o->subject[k];
    return dp_options_open(of, &o->subject[k], e);
}

/* Its claims on a case, and the ranks that it would have where nobody says. */
static int claim_on(options *o, int k, const dp_case *c) {
    const dp_one_run r = dp_options_one(&o->side[k], c, o->s[k].library);
    o->s[k].base = r.base;
    o->s[k].chain = r.chain;
    o->s[k].merge = r.merge;
    o->s[k].payload = r.payload;
    o->s[k].fault = o->side[k].fault;
    o->s[k].limit_s = o->of.limit_s;
    o->s[k].input_dtype = c->input_dtype;
    o->s[k].shows = 1;
    return r.ranks;
}

/* ---- against the truth ----------------------------------------------------------------------- */

#define TRUTH_STEPS 2e8 /* entries of states: about a minute, with the draws of both */

static double truth_steps(const dp_problem *p, int backward) {
    return (double)p->T * p->HV * p->K * p->V * (backward ? 4 : 1);
}

static dp_status judge(const options *o, int k, const dp_case *of, int N, int backward,
                       dp_runs *runs, dp_err *e) {
    const dp_check_subject *s = &o->s[k];
    dp_case c = *of;
    c.nranks = c.nbase = c.nchain = c.nmerge = c.npayload = 1;
    c.ranks[0] = N;
    c.base[0] = s->base;
    c.chain[0] = s->chain;
    c.merge[0] = s->merge;
    c.payload[0] = s->payload;
    c.backward = backward;
    const dp_run_options ro = {.nbackend = 1,
                               .backend = &s->backend,
                               .fault = s->fault,
                               .subject = s->library,
                               .limit_s = s->limit_s,
                               .truth = dp_options_truth(&o->of),
                               .cache = o->of.cache};
    return dp_case_run(&c, &ro, runs, e);
}

/* Where it is asked and affordable; runs [2]. */
static dp_status ask_truth(const options *o, const dp_case *c, int backward, dp_differ_answer *a,
                           dp_runs *runs, dp_err *e) {
    if (a->d->kind < DP_DIFFER_UNBOUNDED) return DP_OK;
    if (o->no_truth)
        snprintf(a->no_truth, sizeof a->no_truth, "--no-truth");
    else if (!o->of.has_truth && truth_steps(a->p, backward) > TRUTH_STEPS)
        snprintf(a->no_truth, sizeof a->no_truth,
                 "it would take some %.1f minutes (--truth auto: asked all the same)",
                 truth_steps(a->p, backward) / TRUTH_STEPS);
    if (*a->no_truth) return DP_OK;
    for (int k = 0; k < 2; k++) {
        const dp_status st = judge(o, k, c, a->N, backward, &runs[k], e);
        if (st) return st;
        a->truth[k] = runs[k].n ? &runs[k].run[0] : NULL;
    }
    return DP_OK;
}

/* ---- one case -------------------------------------------------------------------------------- */

static int status_of(const options *o, const dp_differ_answer *a) {
    const int judged = a->truth[0] && a->truth[1];
    if (!a->d->compared) return 2;
    if (o->bitwise && a->d->kind != DP_DIFFER_SAME) return 1;
    if (a->d->kind < DP_DIFFER_UNBOUNDED) return 0;
    if (a->d->kind == DP_DIFFER_BEYOND) return 1;
    for (int k = 0; k < 2 && judged; k++)
        if (a->truth[k]->verdict == DP_FAIL) return 1;
    return judged && a->truth[0]->verdict == DP_PASS && a->truth[1]->verdict == DP_PASS ? 0 : 2;
}

/* One that does not come to its end is a finding, one that refuses the problem is none. */
static int say_no_end(const options *o, const dp_case *c, dp_status st, int who, const dp_err *e,
                      json_t *list) {
    const char side[] = {(char)('A' + who), 0};
    const int status = st == DP_EDEVICE ? 1 : 2;
    json_array_append_new(list, json_pack("{ss ss si ss ss}", "case", c->name, "verdict",
                                          status == 1 ? "no result" : "refused", "status", status,
                                          "side", side, "why", e->msg));
    printf("%s: %c, %s: %s\n", c->name, 'A' + who, dp_differ_name(&o->s[who]), e->msg);
    printf("DIFFER: %s\n", status == 1 ? "ONE HAS NO RESULT" : "COULD NOT JUDGE");
    return status;
}

/* The exit status that it makes; *e: it could not be asked. */
static int differ(options *o, const dp_case *c, int N, json_t *list, dp_err *e) {
    const int backward = c->backward && !o->forward && c->p.dout;
    dp_runs runs[2] = {{0}, {0}};
    dp_differ *d = dp_calloc(1, sizeof *d);
    dp_differ_answer a = {.case_name = c->name, .p = &c->p, .N = N, .s = o->s, .d = d};
    dp_err why = {0};
    int who, rc = 2;
    const dp_status st = dp_differ_run(&c->p, o->s, N, backward, d, &who, &why);
    if (st == DP_EINPUT || st == DP_EDEVICE)
        rc = say_no_end(o, c, st, who, &why, list);
    else if (st)
        *e = why;
    else if (!ask_truth(o, c, backward, &a, runs, e)) {
        rc = a.status = status_of(o, &a);
        dp_differ_print(&a, stdout);
        json_array_append_new(list, dp_differ_json(&a));
    }
    dp_runs_free(&runs[0]);
    dp_runs_free(&runs[1]);
    free(d);
    return rc;
}

static int is_file(const char *name) {
    const char *end = strrchr(name, '.');
    return end && !strcmp(end, ".safetensors");
}

/* A case, or inputs in a file as `judge --inputs` reads them. */
static dp_status load(const options *o, const char *name, dp_case *c, dp_err *e) {
    if (is_file(name)) return dp_judge_load_inputs(&(dp_judge_options){.inputs = name}, c, e);
    char *path = dp_case_path(dp_options_folder(&o->of), name);
    dp_status st = dp_case_load(path, c, e);
    free(path);
    if (st || dp_op_of(c)->is_recurrence) return st;
    st = dp_fail(e, DP_EINPUT, "%s: op = %s: only recurrences are compared", name,
                 dp_op_of(c)->name);
    dp_case_free(c);
    return st;
}

static int one_case(options *o, const char *name, json_t *list, dp_err *e) {
    dp_case c, large;
    if (load(o, name, &c, e)) return 2;
    const int a = claim_on(o, 0, &c), b = claim_on(o, 1, &c), N = a < b ? a : b;
    int rc = 2;
    large = c;
    if (o->tokens || o->heads) {
        large.p =
            dp_large_problem(&c, o->tokens, o->heads ? o->heads : c.p.HV, !o->forward, 1000, NULL);
        large.spec.keys = DP_KEYS_RANDOM; /* nothing of it is exact */
    }
    if (large.p.T % N)
        dp_fail(e, DP_EINPUT, "%s: T = %lld is not divisible by %d ranks", name,
                (long long)large.p.T, N);
    else
        rc = differ(o, &large, N, list, e);
    if (o->tokens || o->heads) dp_problem_free(&large.p);
    dp_case_free(&c);
    return rc;
}

int dp_cmd_differ(int argc, char **argv) {
    options o = {.of = dp_options_new(1, 64)};
    const struct argp a = {
        .options = OPTIONS,
        .parser = parse,
        .args_doc = "CASE... SUBJECT SUBJECT",
        .doc = "Compare two kernels on the same inputs: where their results and stages differ, and "
               "whether by more than the bounds of both allow. --subject, --run, --serve and "
               "--backend begin a subject, A and then B; --base, --chain, --design, --writes, "
               "--exchange and --fault after it are its own. No truth is needed, so any size will "
               "do. If a bound is broken or missing, the truth decides whose, if it is affordable. "
               "CASE may be a file of inputs as `judge --inputs` reads it.\vExit status 0 the same "
               "bits, or within the bounds, 1 not, 2 could not judge."};
    dp_err e = {0};
    int rc = 0;
    json_t *list = json_array();
    dp_parse(&a, argc, argv, &o);
    dp_status st = dp_output_check(o.of.json, &e);
    for (int k = 0; k < 2 && !st; k++)
        st = open_side(&o, k, &e);
    for (int i = 0; i < o.of.nname && !st && !e.code; i++) {
        const int one = one_case(&o, o.of.name[i], list, &e);
        if (one > rc) rc = one;
    }
    if (!e.code && o.of.json) dp_json_write(json_incref(list), o.of.json, 17, &e);
    json_decref(list);
    for (int k = 0; k < 2; k++)
        dp_subject_close(&o.subject[k]);
    return e.code ? dp_refuse(&e) : rc;
}
