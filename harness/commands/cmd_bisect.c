/* deltaproof bisect stage CASE: which stage is wrong, of the simulated ranks (bisect.h), or of a
 * shared library or tensors in a file (blame.h). Exit status 0: every stage keeps to its bound, 1:
 * one does not, 2: could not tell. The other form, deltaproof bisect precision CASE: which stages
 * need a wider format (precision.h). Exit status 0: found, 1: not even the wide policy will do, 2:
 * bad input. */
#define _GNU_SOURCE
#include "cmd_bisect.h"
#include "commands.h"
#include "harness/search/bisect.h"
#include "parse.h"
#include "ref/vocabulary/number.h"

#include <argp.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OPT_RUNS = 256, OPT_FROM, OPT_TO, OPT_CHAIN_FROM, OPT_CHAIN_TO, OPT_NEED };

static const struct argp_option STAGE_OPTIONS[] = {
    DP_ROWS_ONE_RUN,
    {"own", DP_OPT_OWN, "NAME", 0,
     "which of the simulated ranks owns which tokens: " DP_OWN_WORDS " (default: even)", 0},
    DP_ROW_MEMORY,
    DP_ROW_CACHE,
    DP_ROW_SUBJECT(DP_LIBRARY " instead of the simulated ranks; base and chain: what it claims"),
    DP_ROWS_PROGRAM,
    DP_ROW_DESIGN,
    DP_ROW_OUTPUTS("tensors that another program computed from the case's inputs (deltaproof "
                   "inputs CASE -o IN): results and stages as in `judge`"),
    DP_ROW_STATE_LAYOUT("OUT"),
    {"runs", OPT_RUNS, "N", 0,
     "how often each stage, or the subject, runs on the same inputs (default: 3)", 0},
    {"verbose", 'v', 0, 0, "try every stage, not only up to the first wrong one", 0},
    {0}};

static const struct argp_option PRECISION_OPTIONS[] = {
    DP_ROW_CASES,
    DP_ROW_RANKS,
    DP_ROW_MERGE,
    {"from", OPT_FROM, "NAME", 0, "base policy that is too coarse: bf16 (default), fp32", 0},
    {"to", OPT_TO, "NAME", 0, "base policy that stages may be raised to: fp32 (default), fp64", 0},
    {"chain-from", OPT_CHAIN_FROM, "FORMAT", 0,
     "format of the M chain with it (default: that of --from)", 0},
    {"chain-to", OPT_CHAIN_TO, "FORMAT", 0,
     "format that the M chain may be raised to (default: that of --to)", 0},
    {"need", OPT_NEED, "LIST", 0,
     "what is needed: TENSOR=ERROR,..., relative errors of whole tensors, e.g. o=1e-3,dk=5e-3 "
     "(default: every row within the bound of the policy --to)",
     0},
    DP_ROW_TRIES("policies to try at most in each search for a better one (default: 2000)"),
    {0}};

static void parse_need(struct argp_state *st, const char *text, dp_bisect_options *o) {
    char *copy = dp_strdup(text), *save;
    for (int i = 0; i < DP_NRESULTS; i++)
        o->need[i] = NAN;
    for (char *t = strtok_r(copy, ",", &save); t; t = strtok_r(NULL, ",", &save)) {
        char *v = strchr(t, '=');
        int f = -1;
        if (v) *v++ = 0;
        for (int i = 0; i < DP_NRESULTS; i++)
            if (!strcmp(t, dp_result_fields[i].name)) f = i;
        if (f < 0 || !v) argp_error(st, "--need %s: '%s' is no tensor with =ERROR", text, t);
        if (!isnan(o->need[f])) argp_error(st, "--need %s: %s is given twice", text, t);
        if (dp_number_real(v, 0, HUGE_VAL, &o->need[f]) != DP_NUMBER_OK || o->need[f] == 0)
            argp_error(st, "--need %s: '%s' is not a positive number", text, v);
        o->have_need = 1;
    }
    if (!o->have_need) argp_error(st, "--need: the list is empty");
    free(copy);
}

static error_t parse(int key, char *arg, struct argp_state *st) {
    dp_bisect_options *o = st->input;
    switch (key) {
    case 'v': o->verbose = 1; break;
    case OPT_FROM:
        o->from = (dp_base)dp_option_name(st, "from", arg, dp_base_names, DP_NBASES);
        break;
    case OPT_TO: o->to = (dp_base)dp_option_name(st, "to", arg, dp_base_names, DP_NBASES); break;
    case OPT_CHAIN_FROM: o->chain_from = dp_option_format(st, "chain-from", arg); break;
    case OPT_CHAIN_TO: o->chain_to = dp_option_format(st, "chain-to", arg); break;
    case OPT_NEED: parse_need(st, arg, o); break;
    case OPT_RUNS: o->runs = (int)dp_option_number(st, "runs", arg, 1, 1000); break;
    case ARGP_KEY_END:
        if (!o->of.nname) argp_error(st, "name a case");
        if (dp_options_idle_design(&o->of) && !o->of.outputs)
            argp_error(st, DP_IDLE_DESIGN ", or of --outputs");
        break;
    default: return dp_option(key, arg, st, &o->of);
    }
    return 0;
}

static const struct argp STAGE = {
    .options = STAGE_OPTIONS,
    .parser = parse,
    .args_doc = "CASE",
    .doc = "Which stage of the pipeline is wrong. Simulated ranks: each stage is run on true "
           "inputs and judged by its own bound. --subject, --outputs: every stage that "
           "the program shows is judged by the bound of all stages up to it; those that could "
           "have made the first wrong one are named.\v"
           "Exit status 0 every stage keeps to its bound, 1 one does not, 2 could not tell."};
static const struct argp PRECISION = {
    .options = PRECISION_OPTIONS,
    .parser = parse,
    .args_doc = "CASE",
    .doc = "Which stages need a wider format: the smallest set that must be raised and the "
           "cheapest policy that will do.\v"
           "Times are flops and bytes at the peak rates of an H200: an order, no prediction. "
           "Exit status 0 found, 1 not even --to will do, 2 bad input."};

static int usage(int argc, char **argv) {
    const int help = argc >= 2 && (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h"));
    fprintf(help ? stdout : stderr,
            "Usage: deltaproof bisect stage CASE [OPTION...]\n"
            "           which stage of the pipeline is wrong\n"
            "       deltaproof bisect precision CASE [OPTION...]\n"
            "           which stages need a wider format\n"
            "--help behind stage or precision describes the options.\n\n%s%s",
            help ? "Examples:\n" : "", help ? dp_examples() : "");
    return help ? 0 : 2;
}

/* The question about a case that is loaded; path: its file. */
static int ask(const dp_bisect_options *o, int stage, dp_case *c, const char *path, dp_err *e) {
    const int shown = dp_options_foreign(&o->of) || o->of.outputs;
    const dp_operation *op = dp_op_of(c);
    if (!op->has_stages || (op->has_front && (!stage || shown)))
        dp_fail(e, DP_EINPUT, "bisect: %s: op = %s has no stages", path, op->name);
    else if (stage && dp_options_foreign(&o->of) + !!o->of.outputs + (o->of.fault > 0) > 1)
        dp_fail(
            e, DP_EINPUT,
            "bisect stage: --fault, --subject (--run, --serve) and --outputs exclude each other");
    else if (o->of.nown && (shown || op->has_front))
        dp_fail(e, DP_EINPUT,
                "bisect stage: --own is said of the simulated ranks of one recurrence");
    else if (!dp_fault_own(o->of.fault, o->of.nown ? o->of.own[0] : DP_OWN_EVEN))
        dp_options_split(&o->of, c, 0, e);
    if (e->code) return 2;
    if (shown) return dp_bisect_shown(o, c, e);
    return stage ? dp_bisect_ranks(o, c, e) : dp_bisect_precision(o, c, e);
}

int dp_cmd_bisect(int argc, char **argv) {
    const int stage = argc >= 2 && !strcmp(argv[1], "stage");
    dp_bisect_options o = {.of = dp_options_new(1, 1),
                           .runs = DP_BISECT_RUNS,
                           .from = DP_BASE_BF16,
                           .to = DP_BASE_FP32,
                           .chain_from = -1,
                           .chain_to = -1};
    dp_err e = {0};
    dp_case c;
    int rc = 2;
    if (!stage && (argc < 2 || strcmp(argv[1], "precision"))) return usage(argc, argv);
    argv[1] = (char *)(stage ? "deltaproof bisect stage" : "deltaproof bisect precision");
    dp_parse(stage ? &STAGE : &PRECISION, argc - 1, argv + 1, &o);
    char *path = dp_case_path(dp_options_folder(&o.of), o.of.name[0]);
    if (!dp_case_load(path, &c, &e)) {
        rc = ask(&o, stage, &c, path, &e);
        dp_case_free(&c);
    }
    free(path);
    return e.code ? dp_refuse(&e) : rc;
}
