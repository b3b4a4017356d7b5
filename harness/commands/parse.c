/* Extensions of argp (options.h). */
#include "harness/base/suggest.h"
#include "options.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 64 };
static const char *examples = "";

void dp_parse_examples(const char *lines) { examples = lines; }

const char *dp_examples(void) { return examples; }

static char *help_filter(int key, const char *text, void *input) {
    char *all = NULL;
    (void)input;
    if (key != ARGP_KEY_HELP_EXTRA || !*examples) return (char *)text;
    if (asprintf(&all, "Examples:\n%s", examples) < 0) abort();
    return all;
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
        char *name = strndup(word, len);
        const char *near = dp_suggest(name, names, n);
        fprintf(stderr, "%s: --%s is not an option%s%s%s; --help lists them\n", argv[0], name,
                near ? ": did you mean --" : "", near ? near : "", near ? "?" : "");
        free(name);
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
