/* deltaproof judge --inputs IN --outputs OUT: tensors that another program computed (judge.h). Exit
 * status 0 pass, 1 a verdict failed, 2 could not judge. */
#include "commands.h"
#include "harness/run/hypotheses.h"
#include "harness/run/judge.h"
#include "options.h"
#include "print_failures.h"
#include "print_run.h"
#include "write_record.h"

#include <argp.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct {
    dp_options of;
    dp_judge_options judge;
    double why_s;
    const char *limits; /* NULL: not asked for */
} options;

enum { OPT_TOKENS = 256, OPT_WHY };

static const struct argp_option OPTIONS[] = {
    DP_TEXT(
        "inputs", judge.inputs, "IN",
        "safetensors file: q k v g beta (without g nothing decays), and optionally A_log dt_bias "
        "initial_state do dht cu_seqlens"),
    DP_ROW_OUTPUTS("safetensors file: any of o final_state dq dk dv dg dbeta dA_log ddt_bias ds0, "
                   "and stages: gcum Akk Aqk w u kg qg M H S_in h v_new dv_local dS_out dM dH dh "
                   "dv_new"),
    DP_ROW(
        "ranks", DP_OPT_RANKS, "N",
        "ranks of OUT (default: its metadata, else 1); what no rank receives, as the last M and H, "
        "is not judged"),
    DP_TEXT(
        "base", judge.base, "NAME",
        "formats that the kernel claims for everything but the M chain: bf16 fp16 fp32 fp64 (fp16: "
        "base bf16 with --design factors=fp16,out=fp16; judged by draws alone)"),
    DP_TEXT("claim", judge.claim, "FORMAT",
            "format that it claims for the M chain: " DP_FORMAT_WORDS "; needed from 3 ranks on"),
    DP_ROW_DESIGN_OF(DP_DESIGN),
    DP_ROW_CLAIM_DROP,
    DP_ROW_UNJUDGED,
    DP_TEXT("gate", judge.gate, "FORM", DP_GATES(DP_FORM) "exp: g is the decay, 0 or more"),
    DP_TEXT(
        "gate-dtype", judge.gate_dtype, "FORMAT",
        "format in which the kernel reads g: fp32 bf16 fp16 (default: IN's); g is rounded to it "
        "once"),
    DP_TEXT("lower-bound", judge.lower_bound, "X", "the lower_bound of a gate"),
    DP_TEXT("beta", judge.beta, "FORM", DP_BETAS(DP_FORM) "none: nothing is erased (GLA, SSD)"),
    DP_TEXT("l2norm", judge.l2norm, "0|1", "1: the kernel normalises q and k itself"),
    DP_TEXT("scale", judge.scale, "X", "factor of q in the output (default: K^-1/2)"),
    DP_TEXT("cu-seqlens", judge.cu_seqlens, "LIST",
            "first tokens of packed sequences, then T (default: tensor or metadata of IN, else one "
            "sequence)"),
    DP_ROW_STATE_LAYOUT("both files"),
    DP_TEXT(
        "layout", judge.layout, "fla|mamba",
        "names of tensors (default: metadata, else fla); mamba: x dt A B C, out or y, final_states "
        "(harness/run/judge.h)"),
    DP_TEXT("recurrence", judge.recurrence, "NAME|FILE",
            DP_MODEL_WORDS
            " (default: metadata, else as the shapes say), or a file of your own: rows as "
            "text, with the names that its inputs have in both files (harness/README.md)"),
    DP_ROW("tokens", OPT_TOKENS, "T", "judge OUT as the result of the first T tokens of IN"),
    DP_TEXT("limits", limits, "FILE",
            "write the limits of rows, windows, heads and tensors as safetensors "
            "(harness/verdict/compare.h)"),
    DP_ROW("why", OPT_WHY, "SECONDS",
           "if a tensor fails, try common mistakes for so many seconds and print those that fit "
           "(default: 20; 0: none)"),
    DP_ROW_OUT,
    DP_ROW_JSON,
    DP_ROW_TRUTH,
    DP_ROW_CACHE,
    DP_ROWS_PROVENANCE,
    {0}};

static error_t parse(int key, char *arg, struct argp_state *st) {
    options *o = st->input;
    switch (key) {
    case OPT_TOKENS: o->judge.tokens = dp_option_number(st, "tokens", arg, 1, 1 << 24); break;
    case OPT_WHY: o->why_s = (double)dp_option_number(st, "why", arg, 0, 86400); break;
    default: return dp_option(key, arg, st, &o->of);
    }
    return 0;
}

static int check_usage(const options *o) {
    const char *what = !o->judge.inputs ? "give --inputs IN.safetensors"
                       : !o->of.outputs ? "give --outputs OUT.safetensors"
                                        : NULL;
    if (what) fprintf(stderr, "deltaproof: judge: %s\n", what);
    return what ? 2 : 0;
}

static void say_note(const char *text) { fprintf(stderr, "deltaproof: note: %s\n", text); }

/* The values of options that it shares with other commands. */
static dp_judge_options request(const options *o) {
    dp_judge_options q = o->judge;
    q.outputs = o->of.outputs;
    q.state_layout = o->of.layout;
    q.ranks = dp_option_first(&o->of, DP_ID_RANKS, 0);
    q.design = o->of.design;
    q.drop = o->of.drop;
    q.unjudged = o->of.unjudged;
    q.cache = o->of.cache;
    q.truth = dp_options_truth(&o->of);
    q.progress = isatty(2);
    q.note = say_note;
    return q;
}

static void print_judged(const dp_case *c, const dp_run *r, FILE *table) {
    for (int i = 0; i < c->nwarn; i++)
        fprintf(stderr, "deltaproof: warning: %s\n", c->warn[i]);
    for (int i = 0; i < r->ntensor; i++)
        dp_print_tensor(&r->tensor[i], table);
    dp_print_run(r, table);
    for (int i = 0; i < r->ntensor; i++)
        dp_print_begins(&r->tensor[i], 0, table);
    if (r->bits.npoint) fprintf(table, "bits: %s\n", r->bits.says);
}

typedef struct {
    FILE *table;
    char all[600]; /* for the record, which is written afterwards */
} fits;
static void say_fit(const char *text, void *arg) {
    fits *x = arg;
    fprintf(x->table, "fits: %s\n", text);
    fflush(x->table);
    dp_text_add(x->all, sizeof x->all, "%s%s", x->all[5] ? "; " : "", text);
}

/* Where a tensor failed: which common mistake would explain it; where all passed: a claim that says
 * more. */
static void say_why(options *o, const dp_judge_options *q, const dp_case *c, const dp_run *r,
                    fits *said) {
    FILE *table = dp_options_table(&o->of);
    dp_hypotheses_count n = {0};
    char claim[300];
    if (o->why_s > 0 && dp_tighter_claim(q, r, claim, sizeof claim))
        fprintf(table, "tighter claim: %s\n", claim);
    if (r->verdict != DP_FAIL) return;
    fflush(table);
    said->table = table;
    snprintf(said->all, sizeof said->all, "fits=");
    if (o->why_s > 0) n = dp_hypotheses(q, c, r, o->why_s, say_fit, said);
    dp_provenance *p = &o->of.provenance;
    if (n.fit && p->nnote < DP_MAX_NOTES) p->note[p->nnote++] = said->all;
    if (n.left)
        fprintf(table, "of %d common mistakes %d were tried in %g s (--why SECONDS), %d fit\n",
                n.tried + n.left, n.tried, o->why_s, n.fit);
    DP_OWN char *record = dp_options_record(&o->of);
    if (record) dp_print_explain(r->id, record, "", table);
}

static int judge(options *o, const char *command) {
    dp_err e = {0};
    dp_runs runs = {0};
    dp_case c, *cases[1] = {&c};
    dp_record rec = {
        .runs = &runs, .cases = cases, .command = command, .provenance = &o->of.provenance};
    const dp_judge_options q = request(o);
    fits said = {0};
    const double t0 = omp_get_wtime();
    dp_provenance_file(&o->of.provenance, "inputs", q.inputs);
    dp_provenance_file(&o->of.provenance, "outputs", q.outputs);
    if (o->limits) dp_limits_keep(0);
    if (dp_judge(&q, &c, &runs, &e) || (o->limits && dp_limits_write(o->limits, &e))) {
        rec.errors++;
        dp_refuse(&e);
    } else {
        rec.ncase = 1;
        print_judged(&c, &runs.run[0], dp_options_table(&o->of));
        say_why(o, &q, &c, &runs.run[0], &said);
    }
    rec.seconds = omp_get_wtime() - t0;
    const int rc = dp_record_finish(&o->of, &rec);
    if (rec.ncase) dp_case_free(&c);
    dp_runs_free(&runs);
    /* NOLINTNEXTLINE(*StackAddressEscape): nobody reads the options' notes after this */
    return rc;
}

int dp_cmd_judge(int argc, char **argv) {
    options o = {.of = dp_options_new(1, 0), .why_s = 20};
    const struct argp a = {
        .options = OPTIONS,
        .parser = parse,
        .args_doc = "--inputs IN --outputs OUT",
        .doc = "Judge tensors that another program computed; both files in safetensors, FLA's "
               "layouts.\vSettings without an option come from the files' metadata. Exit status 0 "
               "pass, 1 a verdict failed, 2 could not judge."};
    DP_OWN char *command = dp_command_line(argc, argv);
    dp_parse_writing(&a, argc, argv, &o);
    return dp_outputs_check(&o.of) || check_usage(&o) ? 2 : judge(&o, command);
}
