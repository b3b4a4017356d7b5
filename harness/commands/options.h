/* harness/commands/options.h - the options that several commands take: parsed, refused and
 * explained in one place.
 *
 * A command puts the rows of its options into its argp table, and passes every unknown key to
 * dp_option. A bad value ends the program with exit status 2; the message names the option, the
 * value and the allowed values.
 */
#pragma once
#include "harness/record/record.h"
#include "harness/record/run.h"
#include "ref/vocabulary/text.h"
#include <argp.h>

enum { DP_AGAIN_WORDS = 20 };
typedef struct {
    const char *recurrence;                /* a name or a file; NULL: none */
    const char *cases_dir, *cache;         /* cases_dir NULL: the program's; cache NULL: none */
    const char *subject, *command, *serve; /* a library, a program; one of them at most */
    const char *writes;                    /* by the program; NULL: o */
    const char *out_dir, *json, *output;   /* folder and files to write */
    const char *outputs, *layout; /* tensors that another program computed, axes of its states */
    int tries;                    /* of a search; 0: not set */
    double seconds;               /* of a search; 0: not set */
    const char *design;           /* of the subject; NULL: as it declares */
    int drop;                     /* bits of --claim-drop; 0: not set */
    const char *unjudged;         /* names of tensors that may be unjudged; NULL: none */
    dp_provenance provenance;     /* its label, commit and notes */
    int one;  /* ranks, base, chain, merge and backend take one value, not a list */
    int most; /* cases that may be named */
    int nname;
    const char *name[256];
    dp_values only[DP_ID_FAULT]; /* by key; n 0: not set */
    dp_fault fault;
    double limit_s; /* 0: not set */
    int64_t memory; /* bytes; 0: not set */
    int has_truth;  /* 0: truth is not set */
    dp_truth_pick truth;
    int nagain; /* words of the options without which a run is not repeated: option, value, .. */
    const char *again[DP_AGAIN_WORDS];
} dp_options;

enum {
    DP_OPT_CASES = 'c',
    DP_OPT_OUTPUT = 'o',
    DP_OPT_RANKS = 1024,
    DP_OPT_BASE,
    DP_OPT_CHAIN,
    DP_OPT_MERGE,
    DP_OPT_PAYLOAD,
    DP_OPT_OWN,
    DP_OPT_EXACT_CP,
    DP_OPT_BACKEND,
    DP_OPT_FAULT,
    DP_OPT_SUBJECT,
    DP_OPT_RUN,
    DP_OPT_SERVE,
    DP_OPT_WRITES,
    DP_OPT_LIMIT,
    DP_OPT_MEMORY,
    DP_OPT_CACHE,
    DP_OPT_OUT,
    DP_OPT_JSON,
    DP_OPT_TRUTH,
    DP_OPT_DESIGN,
    DP_OPT_CLAIM_DROP,
    DP_OPT_UNJUDGED,
    DP_OPT_RECURRENCE,
    DP_OPT_LABEL,
    DP_OPT_KERNEL_COMMIT,
    DP_OPT_NOTE,
    DP_OPT_OUTPUTS,
    DP_OPT_STATE_LAYOUT,
    DP_OPT_TRIES,
    DP_OPT_SECONDS,
    DP_OPT_TEXT = 1 << 20, /* and up: rows of DP_TEXT, DP_FLAG */
    DP_OPT_FLAG = 1 << 21
};

/* A row of a command's table of options. */
#define DP_ROW(NAME, KEY, VALUE, WHAT) \
    { NAME, KEY, VALUE, 0, WHAT, 0 }
/* One that is taken as it stands, or sets 1: a field of the command's own struct `options`. */
#define DP_TEXT(NAME, FIELD, VALUE, WHAT) \
    DP_ROW(NAME, DP_OPT_TEXT + (int)offsetof(options, FIELD), VALUE, WHAT)
#define DP_FLAG(NAME, FIELD, WHAT) \
    DP_ROW(NAME, DP_OPT_FLAG + (int)offsetof(options, FIELD), 0, WHAT)
#define DP_ROW_CASES                                                                       \
    DP_ROW("cases", DP_OPT_CASES, "DIR", "folder of case files (default: the program's)"), \
        DP_ROW("recurrence", DP_OPT_RECURRENCE, "FILE",                                    \
               "run the cases as rwkv7, comba, mamba3, oja, or the rows of this file "     \
               "(harness/README.md)")
#define DP_ROW_CACHE                     \
    DP_ROW("cache", DP_OPT_CACHE, "DIR", \
           "folder of truths (default: build/cache, installed ~/.cache/deltaproof), or none")
/* These options differ from command to command in their text; their name and value do not. */
#define DP_ROW_SUBJECT(WHAT) DP_ROW("subject", DP_OPT_SUBJECT, "LIB", WHAT)
#define DP_ROW_OUTPUTS(WHAT) DP_ROW("outputs", DP_OPT_OUTPUTS, "OUT", WHAT)
#define DP_ROW_STATE_LAYOUT(WHERE)                       \
    DP_ROW("state-layout", DP_OPT_STATE_LAYOUT, "kv|vk", \
           "last axes of states in " WHERE " (default: metadata, else kv)")
#define DP_ROW_TRIES(WHAT) DP_ROW("tries", DP_OPT_TRIES, "N", WHAT)
#define DP_ROW_SECONDS(WHAT) DP_ROW("seconds", DP_OPT_SECONDS, "S", WHAT)
#define DP_ROW_JSON_OF(WHAT) DP_ROW("json", DP_OPT_JSON, "FILE", WHAT)
#define DP_LIBRARY "a kernel in a shared library (harness/deltaproof_subject.h)"
#define DP_ROW_FAULT                      \
    DP_ROW("fault", DP_OPT_FAULT, "NAME", \
           "a deliberate fault in the simulated ranks (list --faults)")
#define DP_ROWS_PROGRAM_OF(RUN, SERVE)                                                          \
    DP_ROW("run", DP_OPT_RUN, "COMMAND", RUN), DP_ROW("serve", DP_OPT_SERVE, "COMMAND", SERVE), \
        DP_ROW("writes", DP_OPT_WRITES, "NAMES",                                                \
               "outputs and stages that every OUT must hold (default: o)")
/* `run --help` explains both, and the words of a design. */
#define DP_ROWS_PROGRAM \
    DP_ROWS_PROGRAM_OF("a program, started for each call (run --help)", "a program, started once")
#define DP_ROW_LIMIT                                                                        \
    DP_ROW("limit", DP_OPT_LIMIT, "SECONDS",                                                \
           "most seconds of a run of the subject, or of loading it (default: 60); on CUDA " \
           "devices, of a rank's silence (default: 8)")
#define DP_ROW_MEMORY                      \
    DP_ROW("memory", DP_OPT_MEMORY, "GIB", \
           "most private memory of a process of the subject (default: the machine's)")
#define DP_ROW_RANKS \
    DP_ROW("ranks", DP_OPT_RANKS, "N", "ranks (default: the case's largest number)")
#define DP_ROW_MERGE                                                                               \
    DP_ROW("exchange", DP_OPT_MERGE, "NAME",                                                       \
           "how states get from rank to rank: " DP_EXCHANGE_WORDS " (default: the case's first)"), \
    {                                                                                              \
        "merge", 0, 0, OPTION_ALIAS, 0, 0                                                          \
    }
#define DP_ROW_PAYLOAD                        \
    DP_ROW("payload", DP_OPT_PAYLOAD, "NAME", \
           "format of sent pairs and states: " DP_PAYLOAD_WORDS " (default: the case's first)")
#define DP_ROW_BASE                     \
    DP_ROW("base", DP_OPT_BASE, "NAME", \
           "base policy: fp64 fp32 bf16 (default: the case's first; with --subject its claim)")
#define DP_ROW_CHAIN                                 \
    DP_ROW("chain", DP_OPT_CHAIN, "FORMAT",          \
           "format of the M chain: " DP_FORMAT_WORDS \
           " (default: the case's first; with --subject its claim)")
#define DP_ROW_TRUTH                                                                              \
    DP_ROW("truth", DP_OPT_TRUTH, "KIND",                                                         \
           "arithmetic of the truth: mpfr; dd: double-double, audited by MPFR; auto: MPFR where " \
           "cheap (default: the case's)")
#define DP_ROW_OUT \
    DP_ROW("out", DP_OPT_OUT, "DIR", "write results.json, junit.xml, summary.md, report.html there")
#define DP_ROW_JSON DP_ROW_JSON_OF("write the record there; - for standard output")
#define DP_ROW_DESIGN_OF(WHAT) DP_ROW("design", DP_OPT_DESIGN, "WORDS", WHAT)
#define DP_DESIGN                                                                             \
    "how the kernel computes, if not as its base does (ref/vocabulary/design.h), words with " \
    "commas between: " DP_DESIGN_WORDS
#define DP_ROW_DESIGN DP_ROW_DESIGN_OF("how the kernel computes (words: run --help)")
#define DP_ROW_CLAIM_DROP                                                                      \
    DP_ROW("claim-drop", DP_OPT_CLAIM_DROP, "E",                                               \
           "the kernel drops states that gates have attenuated below E: a number below 1, or " \
           "bits (20 is 2^-20; ref/bound/drop.h)")
#define DP_ROW_UNJUDGED                          \
    DP_ROW("unjudged", DP_OPT_UNJUDGED, "NAMES", \
           "tensors that may be unjudged; any other one makes the exit status 2")
#define DP_ROWS_PROVENANCE                                             \
    DP_ROW("label", DP_OPT_LABEL, "TEXT", "written into the record"),  \
        DP_ROW("kernel-commit", DP_OPT_KERNEL_COMMIT, "ID",            \
               "commit of the kernel that is judged, for the record"), \
        DP_ROW("note", DP_OPT_NOTE, "KEY=VALUE", "anything else for the record, up to 64 times")
#define DP_ROW_SAFETENSORS DP_ROW("output", DP_OPT_OUTPUT, "FILE", "safetensors file to write")
#define DP_ROWS_ONE_RUN                                                                  \
    DP_ROW_CASES, DP_ROW_RANKS, DP_ROW_BASE, DP_ROW_CHAIN, DP_ROW_MERGE, DP_ROW_PAYLOAD, \
        DP_ROW_FAULT, DP_ROW_LIMIT

/* The folders of this program. */
dp_options dp_options_new(int one, int most);
/* ARGP_ERR_UNKNOWN: none of these options. */
error_t dp_option(int key, char *arg, struct argp_state *st, dp_options *o);
/* The parser of a command without options of its own, whose input are dp_options. */
error_t dp_option_alone(int key, char *arg, struct argp_state *st);

/* Values of options, refused as above. */
int64_t dp_option_number(struct argp_state *st, const char *opt, const char *arg, int64_t least,
                         int64_t most);
/* Its index in names. */
int dp_option_name(struct argp_state *st, const char *opt, const char *arg,
                   const char *const *names, int n);
dp_format dp_option_format(struct argp_state *st, const char *opt, const char *arg);
/* Indices in names (NULL: numbers of ranks) of a list with commas between; at most `most`. */
void dp_option_list(struct argp_state *st, const char *opt, const char *arg,
                    const char *const *names, int nnames, int most, dp_values *out);

/* The first value of a list that is set, else the other. */
static inline int dp_option_first(const dp_options *o, dp_id_key key, int other) {
    return o->only[key].n ? o->only[key].of[0] : other;
}

/* Is the subject a library or a program, or is an option set that concerns these alone? */
int dp_options_foreign(const dp_options *o);
/* Is --design set although only simulated ranks compute, whose design is their base's? */
int dp_options_idle_design(const dp_options *o);
#define DP_IDLE_DESIGN \
    "--design is said of --subject, --run and --serve; run --backend lapack takes it, too"
/* Opens the subject with the claims of --base, --chain and --design, or its own if these are not
 * set. DP_EINPUT: as dp_subject_open and dp_command_open; more than one subject; a program without
 * --base. */
dp_status dp_options_open(const dp_options *o, dp_subject *s, dp_err *e);
/* " --cases DIR --subject ./libmine.so --limit 5", as a shell takes it, or "": the options that
 * repeat a run, beside its ID. Without foreign: of the project's own ranks. To be freed. */
char *dp_options_again_text(const dp_options *o, int foreign);
/* " DIR/results.json" or the file of --json, quoted for a shell; NULL: no file gets the record. To
 * be freed. */
char *dp_options_record(const dp_options *o);
/* argv[0] as it is and the arguments as a shell takes them; before argp changes their order. To be
 * freed. */
char *dp_command_line(int argc, char *const *argv);
/* The folder of the case files. */
const char *dp_options_folder(const dp_options *o);

/* The arithmetic of --truth; NULL: the case's. */
const dp_truth_pick *dp_options_truth(const dp_options *o);
/* The stream of printed tables: standard error if the record goes to standard output. */
FILE *dp_options_table(const dp_options *o);
/* The files of the named cases, each once, or of all cases; each and the list to be freed. */
dp_status dp_options_cases(const dp_options *o, char ***paths, int *n, dp_err *e);

/* The single run of options with `one`. Settings without an option are the library's claims, else
 * the case's first that the backend has, and its largest number of ranks. */
dp_sim_policy dp_options_one(const dp_options *o, const dp_case *c, const dp_subject *lib);
/* Do `tokens` tokens of the case (0: all of its own) split over --ranks? DP_EINPUT names the case's
 * file, or --tokens. */
dp_status dp_options_split(const dp_options *o, const dp_case *c, int64_t tokens, dp_err *e);

/* argp, with -h, examples at the end of --help, and the nearest name of an unknown option.
 */

/* Lines of the form "  deltaproof ..", printed at the end of --help by the next dp_parse. */
void dp_parse_examples(const char *lines);

/* The examples; "" before any were set. */
const char *dp_examples(void);

/* argp_parse(a, argc, argv, 0, NULL, input); a usage that is wrong ends the program with status
 * 2. */
void dp_parse(const struct argp *a, int argc, char **argv, void *input);
