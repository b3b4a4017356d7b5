/* deltaproof differ CASE SUBJECT SUBJECT: two kernels on the same inputs, without a truth
 * (harness/search/differ.h). If they differ by more than both bounds, or a bound is missing, each
 * is compared with the truth, if that is affordable. Exit status 0: the same bits, or within the
 * bounds, 1: not, 2: could not judge. */
#include "commands.h"
#include "harness/base/terminal.h"
#include "harness/record/run.h"
#include "harness/run/judge.h"
#include "harness/search/differ.h"
#include "large_problem.h"
#include "options.h"
#include "ref/files/output.h"
#include "write_record.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One answer. truth: a run of each judged against the truth, or NULL: there was no need, or
 * no_truth says why not. */
typedef struct {
    const char *case_name;
    const dp_problem *p;
    int N;
    const dp_check_subject *s; /* [2] */
    const dp_differ *d;
    const dp_run *truth[2];
    char no_truth[200];
    int status; /* the exit status that it makes */
} dp_differ_answer;

/* ---- as text and as JSON --------------------------------------------------------------------- */

/* --json: a list, an object for each case:
 *   case T HV K V ranks, verdict (dp_differ_names, or "no result", "refused": then side and why),
 *   status (the exit status), first_beyond (a name, where one is), no_truth (why it was not asked)
 *   A, B      name, claim, seconds; no_bounds (why); truth (its verdict), why
 *   tensors   name, kind (result, stage), made_by (both, A, B), entries, different, verdict;
 *             where they differ: relative (of the tensor), largest (difference, a, b, index and
 *             place), worst_row (difference, allowed, share of what both bounds allow, place)
 * A place is rank, sequence, chunk, token, head, -1 where there is none.
 */

/* "python mine.py", "sim"; "base bf16, chain fp32, design recurrent" */
static const char *differ_name(const dp_check_subject *s) {
    return s->library ? s->library->name : dp_backend_names[s->backend];
}

static void differ_claim(const dp_check_subject *s, char *out, size_t size) {
    const char *design = s->library ? s->library->design : "";
    snprintf(out, size, "base %s, chain %s%s%s%s%s", dp_base_names[s->run.base],
             dp_formats[s->run.chain].name,
             !design   ? ", design not declared: taken as the default of its base"
             : *design ? ", design "
                       : "",
             design ? design : "", s->run.fault ? ", fault " : "",
             s->run.fault ? dp_faults[s->run.fault].name : "");
}

static void place_text(const dp_place *at, char *out, size_t size) {
    const struct {
        const char *name;
        long long value;
    } part[] = {{"rank", at->rank},
                {"sequence", at->sequence},
                {"chunk", at->chunk},
                {"token", at->token},
                {"head", at->head}};
    *out = 0;
    for (size_t i = 0; i < sizeof part / sizeof *part; i++)
        if (part[i].value >= 0)
            dp_text_add(out, size, "%s%s %lld", *out ? ", " : "", part[i].name, part[i].value);
}

static void print_tensor(const dp_differ_tensor *t, FILE *f) {
    char at[128];
    if (t->only) {
        fprintf(f, "%-11s %-11s made by %c alone\n", "-", t->name, t->only == 1 ? 'A' : 'B');
        return;
    }
    dp_put(f,
           t->kind == DP_DIFFER_BEYOND      ? DP_BAD
           : t->kind == DP_DIFFER_UNBOUNDED ? DP_DOUBTFUL
                                            : DP_GOOD,
           dp_differ_names[t->kind], -11);
    fprintf(f, " %-11s", t->name);
    if (!t->different) {
        fprintf(f, " %lld entries\n", (long long)t->entries);
        return;
    }
    fprintf(f, " %lld of %lld entries differ", (long long)t->different, (long long)t->entries);
    if (isfinite(t->relative)) fprintf(f, ", by %.2g of the tensor", t->relative);
    if (!isnan(t->share)) {
        place_text(&t->worst, at, sizeof at);
        fprintf(f, "; a row by %.3g, %.2g of what both bounds allow (%s)", t->off, t->share, at);
    }
    place_text(&t->at, at, sizeof at);
    fprintf(f, "\n              largest: %s, entry %lld: A %.9g (%a), B %.9g (%a)\n", at,
            (long long)t->index, t->a, t->a, t->b, t->b);
}

static void print_truth(const dp_differ_answer *a, FILE *f) {
    for (int k = 0; k < 2; k++) {
        const dp_run *r = a->truth[k];
        if (!r) continue;
        fprintf(f, "  %c against the truth: %s%s%s\n", 'A' + k, dp_verdict_names[r->verdict],
                *r->why ? ": " : "", r->why);
    }
    if (*a->no_truth) fprintf(f, "  not held against the truth: %s\n", a->no_truth);
}

static const char *verdict_of(const dp_differ_answer *a) {
    const int kind = a->d->kind;
    if (!a->d->compared) return "NOTHING COMPARED";
    if (kind == DP_DIFFER_SAME) return "SAME BITS";
    if (kind == DP_DIFFER_WITHIN) return "WITHIN BOTH BOUNDS";
    if (kind == DP_DIFFER_BEYOND) return "BEYOND BOTH BOUNDS";
    return a->status == 0   ? "EACH WITHIN ITS OWN LIMITS"
           : a->status == 1 ? "NOT BOTH WITHIN THEIR LIMITS"
                            : "COULD NOT JUDGE";
}

static void print_blame(const dp_differ_answer *a, FILE *f) {
    const int broken[2] = {a->truth[0] && a->truth[0]->verdict == DP_FAIL,
                           a->truth[1] && a->truth[1]->verdict == DP_FAIL};
    if (broken[0] && broken[1])
        fprintf(f, ": both break their own");
    else if (broken[0] || broken[1])
        fprintf(f, ": %s breaks its own", broken[0] ? "A" : "B");
    else if (a->truth[0] && a->d->kind == DP_DIFFER_BEYOND)
        fprintf(f, ": neither breaks its own by itself");
}

static void differ_print(const dp_differ_answer *a, FILE *f) {
    const dp_differ *d = a->d;
    char claim[400];
    fprintf(f, "%s: T = %lld, HV = %d, K = %d, V = %d, %d ranks\n", a->case_name,
            (long long)a->p->T, a->p->HV, a->p->K, a->p->V, a->N);
    for (int k = 0; k < 2; k++) {
        differ_claim(&a->s[k], claim, sizeof claim);
        fprintf(f, "  %c: %s, %s (%.2f s)\n", 'A' + k, differ_name(&a->s[k]), claim, d->seconds[k]);
    }
    for (int i = 0; i < d->n; i++)
        print_tensor(&d->t[i], f);
    for (int k = 0; k < 2; k++)
        if (*d->unbounded[k]) fprintf(f, "  no bounds of %c: %s\n", 'A' + k, d->unbounded[k]);
    if (d->first >= 0) {
        const int stage = d->t[d->first].stage;
        fprintf(f, "  first beyond: %s%s%s\n", d->t[d->first].name, stage < 0 ? "" : ", made by ",
                stage < 0 ? "" : dp_stage_names[dp_stage_tensors[stage].made_by]);
    }
    print_truth(a, f);
    fprintf(f, "DIFFER: ");
    dp_put(f, a->status == 0 ? DP_GOOD : a->status == 1 ? DP_BAD : DP_DOUBTFUL, verdict_of(a), 0);
    print_blame(a, f);
    fputc('\n', f);
}

/* ---- JSON ------------------------------------------------------------------------------------ */

static json_t *place_json(const dp_place *at) {
    return json_pack("{si si si sI si}", "rank", at->rank, "sequence", at->sequence, "chunk",
                     at->chunk, "token", (json_int_t)at->token, "head", at->head);
}

static json_t *tensor_json(const dp_differ_tensor *t) {
    static const char *const made[] = {"both", "A", "B"};
    json_t *x = json_pack("{ss ss ss sI sI}", "name", t->name, "kind",
                          t->stage < 0 ? "result" : "stage", "made_by", made[t->only], "entries",
                          (json_int_t)t->entries, "different", (json_int_t)t->different);
    if (t->only) return x;
    json_object_set_new(x, "verdict", json_string(dp_differ_names[t->kind]));
    if (!t->different) return x;
    json_t *most = place_json(&t->at), *row = place_json(&t->worst);
    json_object_update_new(most, json_pack("{sI so so so}", "index", (json_int_t)t->index,
                                           "difference", dp_json_number(t->most), "a",
                                           dp_json_number(t->a), "b", dp_json_number(t->b)));
    json_object_update_new(row, json_pack("{so so so}", "share", dp_json_number(t->share),
                                          "difference", dp_json_number(t->off), "allowed",
                                          dp_json_number(t->allowed)));
    json_object_update_new(
        x, json_pack("{so so}", "relative", dp_json_number(t->relative), "largest", most));
    if (isnan(t->share))
        json_decref(row);
    else
        json_object_set_new(x, "worst_row", row);
    return x;
}

static json_t *side_json(const dp_differ_answer *a, int k) {
    char claim[400];
    differ_claim(&a->s[k], claim, sizeof claim);
    const dp_run *r = a->truth[k];
    return json_pack("{ss ss sf ss* ss* ss*}", "name", differ_name(&a->s[k]), "claim", claim,
                     "seconds", a->d->seconds[k], "no_bounds",
                     *a->d->unbounded[k] ? a->d->unbounded[k] : NULL, "truth",
                     r ? dp_verdict_names[r->verdict] : NULL, "why", r ? r->why : NULL);
}

static json_t *differ_json(const dp_differ_answer *a) {
    json_t *list = json_array();
    for (int i = 0; i < a->d->n; i++)
        json_array_append_new(list, tensor_json(&a->d->t[i]));
    return json_pack("{ss sI si si si si ss si so so so ss* ss*}", "case", a->case_name, "T",
                     (json_int_t)a->p->T, "HV", a->p->HV, "K", a->p->K, "V", a->p->V, "ranks", a->N,
                     "verdict", dp_differ_names[a->d->kind], "status", a->status, "A",
                     side_json(a, 0), "B", side_json(a, 1), "tensors", list, "first_beyond",
                     a->d->first >= 0 ? a->d->t[a->d->first].name : NULL, "no_truth",
                     *a->no_truth ? a->no_truth : NULL);
}

/* ---- the command ----------------------------------------------------------------------------- */

typedef struct {
    dp_options of;      /* of both */
    dp_options side[2]; /* of each: what names it, and its claims */
    dp_subject subject[2];
    dp_check_subject s[2];
    int n, heads, forward, bitwise, no_truth;
    int64_t tokens;
} options;

enum { OPT_TOKENS = 256, OPT_HEADS };

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
    DP_ROW("backend", DP_OPT_BACKEND, "NAME", "sim: the simulated ranks; mpi, cuda or nccl"),
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
    DP_FLAG("bitwise", bitwise, "both kernels claim equal bits: any difference fails"),
    DP_ROW("truth", DP_OPT_TRUTH, "KIND",
           "arithmetic of that truth: mpfr, dd or auto, whatever it costs (default: auto where it "
           "takes about a minute)"),
    DP_FLAG("no-truth", no_truth, "make no truth to decide whose bound is broken"),
    DP_FLAG("forward", forward, "forward only, no gradients"),
    DP_ROW("tokens", OPT_TOKENS, "T", "that many tokens instead of the case's, one sequence"),
    DP_ROW("heads", OPT_HEADS, "HV", "that many heads (the law of inputs as in the case, H = HV)"),
    DP_ROW_JSON_OF("results; -: standard output"),
    {0}};

/* ---- the two --------------------------------------------------------------------------------- */

static dp_status open_side(options *o, int k, dp_err *e) {
    dp_options *of = &o->side[k];
    of->only[DP_ID_RANKS] = o->of.only[DP_ID_RANKS];
    of->limit_s = o->of.limit_s;
    of->memory = o->of.memory;
    if (of->only[DP_ID_BACKEND].n) {
        const dp_backend b = (dp_backend)of->only[DP_ID_BACKEND].of[0];
        const char *no = dp_unavailable(b, dp_option_first(&o->of, DP_ID_RANKS, 1));
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
    o->s[k].run = dp_options_one(&o->side[k], c, o->s[k].library);
    o->s[k].limit_s = o->of.limit_s;
    o->s[k].input_dtype = c->input_dtype;
    o->s[k].shows = 1;
    return o->s[k].run.N;
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
    dp_case_only(&c, &s->run);
    c.ranks[0] = N;
    c.backward = backward;
    const dp_run_options ro = {.only[DP_ID_BACKEND] = {1, {(int)s->backend}},
                               .fault = s->run.fault,
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
    FILE *f = dp_options_table(&o->of);
    fprintf(f, "%s: %c, %s: %s\n", c->name, 'A' + who, differ_name(&o->s[who]), e->msg);
    fprintf(f, "DIFFER: %s\n", status == 1 ? "ONE HAS NO RESULT" : "COULD NOT JUDGE");
    return status;
}

/* The exit status that it makes; *e: it could not be asked. */
static int differ(options *o, const dp_case *c, int N, json_t *list, dp_err *e) {
    const int backward = c->backward && !o->forward && c->p.dout;
    dp_runs runs[2] = {{0}, {0}};
    DP_OWN dp_differ *d = dp_calloc(1, sizeof *d);
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
        differ_print(&a, dp_options_table(&o->of));
        json_array_append_new(list, differ_json(&a));
    }
    dp_runs_free(&runs[0]);
    dp_runs_free(&runs[1]);
    return rc;
}

static int is_file(const char *name) {
    const char *end = strrchr(name, '.');
    return end && !strcmp(end, ".safetensors");
}

/* A case, or inputs in a file as `judge --inputs` reads them. */
static dp_status load(const options *o, const char *name, dp_case *c, dp_err *e) {
    if (is_file(name)) return dp_judge_load_inputs(&(dp_judge_options){.inputs = name}, c, e);
    DP_OWN char *path = dp_case_path(dp_options_folder(&o->of), name);
    dp_status st = dp_case_load(path, c, e);
    if (st || c->op->is_recurrence) return st;
    st = dp_fail(e, DP_EINPUT, "%s: op = %s: only recurrences are compared", name, c->op->name);
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
    dp_parse_writing(&a, argc, argv, &o);
    dp_old_outputs_remove(NULL, o.of.json);
    dp_status st = dp_output_check(o.of.json, &e);
    for (int k = 0; k < 2 && !st; k++)
        st = open_side(&o, k, &e);
    for (int i = 0; i < o.of.nname && !st && !e.code; i++) {
        const int one = one_case(&o, o.of.name[i], list, &e);
        if (one > rc) rc = one;
    }
    dp_json_write(list, e.code ? NULL : o.of.json, 17, &e);
    for (int k = 0; k < 2; k++)
        dp_subject_close(&o.subject[k]);
    return e.code ? dp_refuse(&e) : rc;
}
