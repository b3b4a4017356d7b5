/* The options that several commands take, and the command line as a record has it (options.h). */
#include "options.h"
#include "commands.h"
#include "harness/base/home.h"
#include "harness/base/terminal.h"
#include "harness/library/command.h"
#include "harness/record/run_id.h"
#include "ref/vocabulary/text.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int dp_refuse(const dp_err *e) {
    fprintf(stderr, "deltaproof: %s\n", e->msg);
    return 2;
}

dp_options dp_options_new(int one, int most) {
    return (dp_options){.cache = dp_home_cache(), .one = one, .most = most};
}

const char *dp_options_folder(const dp_options *o) {
    return o->cases_dir ? o->cases_dir : dp_home("cases");
}

static int64_t whole(const char *s, int64_t least,
                     int64_t most) { /* least - 1: not a number from least to most */
    int64_t n;
    return dp_number_int(s, least, most, &n) == DP_NUMBER_OK ? n : least - 1;
}

int64_t dp_option_number(struct argp_state *st, const char *opt, const char *arg, int64_t least,
                         int64_t most) {
    const int64_t n = whole(arg, least, most);
    if (n < least)
        argp_error(st, "--%s %s: must be a number from %lld to %lld", opt, arg, (long long)least,
                   (long long)most);
    return n;
}

static void unknown(struct argp_state *st, const char *opt, const char *arg, const char *value,
                    const char *const *names, int n) {
    char all[512] = "";
    for (int k = 0; k < n; k++)
        dp_text_add(all, sizeof all, " %s", names[k]);
    argp_error(st, "--%s %s: '%s' is not known; one of%s", opt, arg, value, all);
}

int dp_option_name(struct argp_state *st, const char *opt, const char *arg,
                   const char *const *names, int n) {
    const int i = dp_find_name(arg, names, n);
    if (i < 0) unknown(st, opt, arg, arg, names, n);
    return i;
}

static const char *const *format_names(void) {
    static const char *names[DP_NFORMATS];
    for (int i = 0; i < DP_NFORMATS; i++)
        names[i] = dp_formats[i].name;
    return names;
}

dp_format dp_option_format(struct argp_state *st, const char *opt, const char *arg) {
    return (dp_format)dp_option_name(st, opt, arg, format_names(), DP_NFORMATS);
}

void dp_option_list(struct argp_state *st, const char *opt, const char *arg,
                    const char *const *names, int nnames, int most, dp_values *out) {
    DP_OWN char *copy = dp_strdup(arg);
    char *save;
    out->n = 0;
    for (char *t = strtok_r(copy, ",", &save); t; t = strtok_r(NULL, ",", &save)) {
        const int v = names ? dp_find_name(t, names, nnames) : dp_find_ranks(t);
        if (v < 0 && names)
            unknown(st, opt, arg, t, names, nnames);
        else if (v < 0)
            argp_error(st, "--%s %s: '%s' is not a number from 1 to %d", opt, arg, t, DP_MAX_RANKS);
        if (out->n == most)
            argp_error(st,
                       most == 1 ? "--%s %s: takes one value here" : "--%s %s: more than %d values",
                       opt, arg, most);
        out->of[out->n++] = v;
    }
    if (!out->n) argp_error(st, "--%s: the list is empty", opt);
}

static double seconds(struct argp_state *st, const char *opt, const char *arg) {
    double s = 0;
    if (dp_number_real(arg, 0, 86400, &s) != DP_NUMBER_OK || s == 0)
        argp_error(st, "--%s %s: must be seconds, above 0 and up to 86400", opt, arg);
    return s;
}

static int64_t gibibytes(struct argp_state *st, const char *opt, const char *arg) {
    double x = 0;
    if (dp_number_real(arg, 0.0625, 1 << 20, &x) != DP_NUMBER_OK)
        argp_error(st, "--%s %s: must be GiB, from 0.0625 to 1048576", opt, arg);
    return (int64_t)(x * 0x1p30);
}

static void add_note(struct argp_state *st, const char *arg, dp_provenance *p) {
    if (*arg == '=' || !strchr(arg, '=')) argp_error(st, "--note %s: must be KEY=VALUE", arg);
    if (p->nnote == DP_MAX_NOTES) argp_error(st, "--note: more than %d", DP_MAX_NOTES);
    p->note[p->nnote++] = arg;
}

/* Where an option that is taken as it stands goes; NULL: it is none of those. */
static const char **text_of(dp_options *o, int key) {
    switch (key) {
    case DP_OPT_CASES: return &o->cases_dir;
    case DP_OPT_RECURRENCE: return &o->recurrence;
    case DP_OPT_SUBJECT: return &o->subject;
    case DP_OPT_RUN: return &o->command;
    case DP_OPT_SERVE: return &o->serve;
    case DP_OPT_WRITES: return &o->writes;
    case DP_OPT_OUT: return &o->out_dir;
    case DP_OPT_JSON: return &o->json;
    case DP_OPT_OUTPUT: return &o->output;
    case DP_OPT_OUTPUTS: return &o->outputs;
    case DP_OPT_STATE_LAYOUT: return &o->layout;
    case DP_OPT_DESIGN: return &o->design;
    case DP_OPT_UNJUDGED: return &o->unjudged;
    case DP_OPT_LABEL: return &o->provenance.label;
    case DP_OPT_KERNEL_COMMIT: return &o->provenance.kernel_commit;
    default: return NULL;
    }
}

/* Lists of names, of which a command may take one alone. 0: the option is none of them. */
static int take_list(int key, const char *arg, struct argp_state *st, dp_options *o) {
    const struct {
        int key;
        dp_id_key of;
        const char *name;
        const char *const *names;
        int nnames, most;
    } lists[] = {{DP_OPT_RANKS, DP_ID_RANKS, "ranks", NULL, 0, DP_MOST_VALUES},
                 {DP_OPT_BASE, DP_ID_BASE, "base", dp_base_names, DP_NBASES, DP_NBASES},
                 {DP_OPT_CHAIN, DP_ID_CHAIN, "chain", format_names(), DP_NFORMATS, DP_NFORMATS},
                 {DP_OPT_MERGE, DP_ID_MERGE, "exchange", dp_exchange_names, DP_NRUN_EXCHANGES,
                  DP_NRUN_EXCHANGES},
                 {DP_OPT_PAYLOAD, DP_ID_PAYLOAD, "payload", dp_payload_names, DP_NRUN_PAYLOADS,
                  DP_NRUN_PAYLOADS},
                 {DP_OPT_OWN, DP_ID_OWN, "own", dp_own_names, DP_NOWNS, DP_NOWNS},
                 {DP_OPT_BACKEND, DP_ID_BACKEND, "backend", dp_backend_names, DP_NCHOSEN_BACKENDS,
                  DP_NBACKENDS}};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
        if (lists[i].key == key) {
            dp_option_list(st, lists[i].name, arg, lists[i].names, lists[i].nnames,
                           o->one ? 1 : lists[i].most, &o->only[lists[i].of]);
            return 1;
        }
    return 0;
}

static void take_case(const char *name, struct argp_state *st, dp_options *o) {
    if (!o->most) argp_error(st, "%s: takes no case", name);
    if (o->nname == o->most)
        argp_error(st, o->most == 1 ? "%s: one case at a time" : "%s: more than %d cases", name,
                   o->most);
    o->name[o->nname++] = name;
}

/* The options that repeat a run, beside its ID. */
static const char *repeated_name(int key) {
    static const struct {
        int key;
        const char *name;
    } rows[] = {{DP_OPT_CASES, "--cases"},       {DP_OPT_SUBJECT, "--subject"},
                {DP_OPT_RUN, "--run"},           {DP_OPT_SERVE, "--serve"},
                {DP_OPT_WRITES, "--writes"},     {DP_OPT_DESIGN, "--design"},
                {DP_OPT_LIMIT, "--limit"},       {DP_OPT_MEMORY, "--memory"},
                {DP_OPT_TRUTH, "--truth"},       {DP_OPT_CLAIM_DROP, "--claim-drop"},
                {DP_OPT_UNJUDGED, "--unjudged"}, {DP_OPT_RECURRENCE, "--recurrence"}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (rows[i].key == key) return rows[i].name;
    return NULL;
}

/* The last value of a repeated option counts. */
static void repeat(dp_options *o, int key, const char *arg) {
    const char *name = repeated_name(key);
    int i = 0;
    if (!name) return;
    while (i < o->nagain && strcmp(o->again[i], name))
        i += 2;
    if (i == o->nagain) o->nagain += 2;
    o->again[i] = name;
    o->again[i + 1] = arg;
}

/* All options are known. */
static void install(const struct argp_state *st, const dp_options *o) {
    dp_err e = {0};
    if (o->recurrence && dp_case_recurrence(o->recurrence, o->cases_dir, &e))
        argp_error(st, "--recurrence: %s", e.msg);
}

error_t dp_option(int key, char *arg, struct argp_state *st, dp_options *o) {
    char *own = st->input;
    if (key >= DP_OPT_TEXT && key < 2 * DP_OPT_FLAG) {
        if (key < DP_OPT_FLAG)
            *(const char **)(own + key - DP_OPT_TEXT) = arg;
        else
            *(int *)(own + key - DP_OPT_FLAG) = 1;
        return 0;
    }
    repeat(o, key, arg);
    if (text_of(o, key)) {
        *text_of(o, key) = arg;
        return 0;
    }
    if (take_list(key, arg, st, o)) return 0;
    switch (key) {
    case DP_OPT_EXACT_CP: o->only[DP_ID_OWN] = (dp_values){1, {DP_OWN_GRID}}; break;
    case DP_OPT_CACHE: o->cache = strcmp(arg, "none") ? arg : NULL; break;
    case DP_OPT_CLAIM_DROP:
        if (!(o->drop = dp_drop_bits(arg)))
            argp_error(st, "--claim-drop %s: must be a number below 1, or bits from 1 to %d", arg,
                       DP_DROP_BITS_MOST);
        break;
    case DP_OPT_NOTE: add_note(st, arg, &o->provenance); break;
    case DP_OPT_TRIES: o->tries = (int)dp_option_number(st, "tries", arg, 1, INT32_MAX); break;
    case DP_OPT_SECONDS: o->seconds = seconds(st, "seconds", arg); break;
    case DP_OPT_TRUTH:
        o->truth =
            (dp_truth_pick)dp_option_name(st, "truth", arg, dp_truth_pick_names, DP_NTRUTH_PICKS);
        o->has_truth = 1;
        break;
    case DP_OPT_LIMIT:
        o->limit_s = seconds(st, "limit", arg);
        dp_cuda_limit(o->limit_s);
        break;
    case DP_OPT_MEMORY: o->memory = gibibytes(st, "memory", arg); break;
    case DP_OPT_FAULT:
        if (dp_fault_find(arg) < 0)
            argp_error(st, "--fault %s: not known (see list --faults)", arg);
        o->fault = (dp_fault)dp_fault_find(arg);
        break;
    case ARGP_KEY_ARG: take_case(arg, st, o); break;
    case ARGP_KEY_SUCCESS: install(st, o); break;
    default: return ARGP_ERR_UNKNOWN;
    }
    return 0;
}

error_t dp_option_alone(int key, char *arg, struct argp_state *st) {
    return dp_option(key, arg, st, st->input);
}

int dp_options_foreign(const dp_options *o) {
    return o->subject || o->command || o->serve || o->writes;
}

int dp_options_idle_design(const dp_options *o) { return o->design && !dp_options_foreign(o); }

static dp_status open_program(const dp_options *o, dp_subject *s, dp_err *e) {
    const dp_command_claim q = {.text = o->serve ? o->serve : o->command,
                                .serve = o->serve != NULL,
                                .ranks = o->only[DP_ID_RANKS].n ? DP_SUBJECT_MAX_RANKS : 1,
                                .base = dp_option_first(o, DP_ID_BASE, DP_NBASES),
                                .chain = dp_option_first(o, DP_ID_CHAIN, DP_FP32),
                                .writes = o->writes,
                                .design = o->design,
                                .memory = o->memory,
                                .limit_s = o->limit_s};
    return dp_command_open(&q, s, e);
}

dp_status dp_options_open(const dp_options *o, dp_subject *s, dp_err *e) {
    *s = (dp_subject){0};
    if (!!o->subject + !!o->command + !!o->serve > 1)
        return dp_fail(e, DP_EINPUT, "--subject, --run and --serve exclude each other");
    if (o->writes && !o->command && !o->serve)
        return dp_fail(e, DP_EINPUT, "--writes goes with --run and --serve");
    if (!o->subject) return open_program(o, s, e);
    const dp_status st = dp_subject_open(o->subject, o->limit_s, o->memory, s, e);
    if (st || !o->design) return st;
    free(s->design);
    s->design = dp_strdup(o->design);
    return DP_OK;
}

char *dp_options_again_text(const dp_options *o, int foreign) {
    char *argv[1 + DP_AGAIN_WORDS] = {(char *)""};
    int n = 1;
    for (int i = 0; i < o->nagain; i += 2) {
        const int key = strcmp(o->again[i], "--cases") && strcmp(o->again[i], "--truth");
        if (key && !foreign) continue; /* they are of a subject */
        argv[n++] = (char *)o->again[i];
        argv[n++] = (char *)o->again[i + 1];
    }
    return dp_command_line(n, argv);
}

char *dp_options_record(const dp_options *o) {
    char path[4096], *argv[] = {(char *)"", path};
    if (!o->out_dir && (!o->json || !strcmp(o->json, "-"))) return NULL;
    snprintf(path, sizeof path, "%s%s", o->out_dir ? o->out_dir : o->json,
             o->out_dir ? "/results.json" : "");
    return dp_command_line(2, argv);
}

const dp_truth_pick *dp_options_truth(const dp_options *o) {
    return o->has_truth ? &o->truth : NULL;
}

FILE *dp_options_table(const dp_options *o) {
    return o->json && !strcmp(o->json, "-") ? stderr : stdout;
}

/* For a case that does not exist, the name that may be meant. */
static dp_status find_case(const char *dir, const char *name, char **path, dp_err *e) {
    dp_err none = {0};
    char **all;
    const char *names[512];
    int n, k = 0;
    *path = dp_case_path(dir, name);
    if (!access(*path, F_OK) || strchr(name, '/') || dp_case_find_all(dir, &all, &n, &none))
        return DP_OK;
    for (; k < n && k < 512; k++) {
        char *base = strrchr(all[k], '/') ? strrchr(all[k], '/') + 1 : all[k];
        base[strlen(base) - strlen(".case")] = 0;
        names[k] = base;
    }
    const char *near = dp_suggest(name, names, k);
    if (near) dp_fail(e, DP_EINPUT, "%s: no such case: did you mean %s?", *path, near);
    dp_free_list(all, n);
    return e->code;
}

/* Is path one of these files, by whatever name? */
static int is_among(char *const *paths, int n, const char *path) {
    struct stat a, b;
    for (int i = 0; i < n; i++)
        if (!stat(paths[i], &a) && !stat(path, &b) && a.st_dev == b.st_dev && a.st_ino == b.st_ino)
            return 1;
    return 0;
}

dp_status dp_options_cases(const dp_options *o, char ***paths, int *n, dp_err *e) {
    if (!o->nname) return dp_case_find_all(dp_options_folder(o), paths, n, e);
    *paths = dp_calloc((size_t)o->nname, sizeof **paths);
    *n = 0;
    for (int i = 0; i < o->nname; i++) {
        DP_OWN char *path = NULL;
        if (find_case(dp_options_folder(o), o->name[i], &path, e)) return e->code;
        if (is_among(*paths, *n, path)) continue;
        (*paths)[(*n)++] = path;
        path = NULL;
    }
    return DP_OK;
}

dp_sim_policy dp_options_one(const dp_options *o, const dp_case *c, const dp_subject *lib) {
    /* has no fp64 and no chain of bf16 states */
    const int cuda =
        o->only[DP_ID_BACKEND].n && !dp_backends[o->only[DP_ID_BACKEND].of[0]].simulated;
    int base = 0, chain = 0;
    while (cuda && base < c->nbase - 1 && c->base[base] == DP_BASE_FP64)
        base++;
    while (cuda && chain < c->nchain - 1 && !dp_formats[c->chain[chain]].device)
        chain++;
    return (dp_sim_policy){
        .N = dp_option_first(o, DP_ID_RANKS, dp_case_most_ranks(c, lib ? lib->max_ranks : INT_MAX)),
        .base = dp_option_first(o, DP_ID_BASE, (int)(lib ? lib->base : c->base[base])),
        .chain = dp_option_first(o, DP_ID_CHAIN, (int)(lib ? lib->chain : c->chain[chain])),
        .fault = o->fault,
        .backward = c->backward,
        .merge = dp_fault_exchange(o->fault, dp_option_first(o, DP_ID_MERGE, c->merge[0])),
        .payload = dp_fault_payload(o->fault, dp_option_first(o, DP_ID_PAYLOAD, c->payload[0]))};
}

dp_status dp_options_split(const dp_options *o, const dp_case *c, int64_t tokens, dp_err *e) {
    char where[1200];
    const int N = dp_option_first(o, DP_ID_RANKS, tokens ? dp_case_most_ranks(c, INT_MAX) : 1);
    const int64_t T = tokens ? tokens : c->op->has_ranks ? dp_case_tokens(c) : N;
    if (T % N == 0) return DP_OK;
    if (tokens)
        snprintf(where, sizeof where, "%s: --tokens %lld", c->path, (long long)T);
    else
        snprintf(where, sizeof where, "%s: T = %lld", c->path, (long long)T);
    return dp_fail(e, DP_EINPUT, "%s: must be a multiple of %s%d", where,
                   o->only[DP_ID_RANKS].n ? "--ranks " : "its largest number of ranks, ", N);
}

/* ---- the command line, quoted for a shell ---------------------------------------------------- */

#define PLAIN "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./:=,+-@%"

/* Appends one argument; returns the end of the text. */
static char *append(char *at, const char *arg) {
    const int plain = *arg && !arg[strspn(arg, PLAIN)];
    at += sprintf(at, plain ? " " : " '");
    for (const char *c = arg; *c; c++)
        at += *c == '\'' ? sprintf(at, "'\\''") : sprintf(at, "%c", *c);
    if (!plain) at += sprintf(at, "'");
    return at;
}

char *dp_command_line(int argc, char *const *argv) {
    size_t size = strlen(argv[0]) + 1;
    for (int i = 1; i < argc; i++)
        size += 4 * strlen(argv[i]) + 3;
    char *text = dp_calloc(size, 1);
    char *at = text + sprintf(text, "%s", argv[0]);
    for (int i = 1; i < argc; i++)
        at = append(at, argv[i]);
    return text;
}

/* ---- argp ------------------------------------------------------------------------------------ */

enum { MOST = 64 };
static const char *examples = "";

void dp_parse_examples(const char *lines) { examples = lines; }

const char *dp_examples(void) { return examples; }

static char *help_filter(int key, const char *text, DP_UNUSED void *input) {
    return key == ARGP_KEY_HELP_EXTRA && *examples ? dp_text_new("Examples:\n%s", examples)
                                                   : (char *)text;
}

/* The long options of a; returns their number. */
static int names_of(const struct argp *a, const char *names[MOST]) {
    int n = 0;
    for (const struct argp_option *o = a->options; o->name && n < MOST - 3; o++)
        names[n++] = o->name;
    names[n++] = "help";
    names[n++] = "usage";
    names[n++] = "version";
    return n;
}

/* getopt takes every beginning of a name, and refuses one that several have. */
static int begins_one(const char *word, size_t len, const char *const *names, int n) {
    for (int i = 0; i < n; i++)
        if (!strncmp(names[i], word, len)) return 1;
    return 0;
}

static int takes_value(const struct argp *a, const char *word) {
    for (const struct argp_option *o = a->options; o->name; o++)
        if (!strcmp(o->name, word)) return o->arg && !(o->flags & OPTION_ARG_OPTIONAL);
    return 0;
}

static void refuse_unknown(const struct argp *a, int argc, char **argv) {
    const char *names[MOST];
    const int n = names_of(a, names);
    for (int i = 1; i < argc && strcmp(argv[i], "--"); i++) {
        if (strncmp(argv[i], "--", 2)) continue;
        const char *word = argv[i] + 2;
        const size_t len = strcspn(word, "=");
        if (begins_one(word, len, names, n)) {
            i += !word[len] && takes_value(a, word);
            continue;
        }
        argv[i][2 + len] = 0;
        const char *near = dp_suggest(word, names, n);
        fprintf(stderr, "%s: --%s is not an option%s%s%s; --help lists them\n", argv[0], word,
                near ? ": did you mean --" : "", near ? near : "", near ? "?" : "");
        exit(argp_err_exit_status);
    }
}

void dp_parse(const struct argp *a, int argc, char **argv, void *input) {
    struct argp with = *a;
    with.help_filter = help_filter;
    for (int i = 1; i < argc && strcmp(argv[i], "--"); i++) {
        if (!strcmp(argv[i], "-h")) argv[i] = (char *)"--help";
        /* argp's note on arguments of short options says what `-o, --output=FILE` shows. */
        if (!strcmp(argv[i], "--help")) setenv("ARGP_HELP_FMT", "no-dup-args-note", 0);
    }
    refuse_unknown(a, argc, argv);
    argp_parse(&with, argc, argv, 0, NULL, input);
}
