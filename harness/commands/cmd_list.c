/* deltaproof list: the cases with their reasons, the keys of a case file, the deliberate faults.
 * Exit status 0, 2: a case file is refused. */
#define _GNU_SOURCE
#include "commands.h"
#include "options.h"

#include <argp.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct {
    dp_options of;
    int keys, faults;
} options;

enum { OPT_KEYS = 256, OPT_FAULTS };

static const struct argp_option OPTIONS[] = {
    DP_ROW_CASES,
    {"keys", OPT_KEYS, 0, 0, "print the keys of a case file", 0},
    {"faults", OPT_FAULTS, 0, 0, "print the deliberate faults", 0},
    {0}};

static error_t parse(int key, char *arg, struct argp_state *st) {
    options *o = st->input;
    switch (key) {
    case OPT_KEYS: o->keys = 1; break;
    case OPT_FAULTS: o->faults = 1; break;
    default: return dp_option(key, arg, st, &o->of);
    }
    return 0;
}

static void print_faults(void) {
    for (int i = 1; i < DP_NFAULTS; i++)
        printf("%-20s %-16s %s [%s]\n", dp_faults[i].name, dp_faults[i].stage, dp_faults[i].what,
               dp_faults[i].source);
}

static int print_case(const char *path) {
    dp_case c;
    dp_err e = {0};
    if (dp_case_open(path, 0, &c, &e)) return dp_refuse(&e);
    printf("%-24s %-6s %s\n", c.name, c.op_name, c.reason);
    dp_case_free(&c);
    return 0;
}

static int print_cases(const dp_options *o) {
    dp_err e = {0};
    char **paths;
    int n, rc = 0;
    if (dp_case_find_all(o->cases_dir, &paths, &n, &e)) return dp_refuse(&e);
    for (int i = 0; i < n; i++) {
        rc |= print_case(paths[i]);
        free(paths[i]);
    }
    free(paths);
    return rc;
}

int dp_cmd_list(int argc, char **argv) {
    options o = {.of = dp_options_new(0, 0)};
    const struct argp a = {.options = OPTIONS,
                           .parser = parse,
                           .args_doc = "",
                           .doc = "List the cases with their reasons.\vExit status 2 when a case "
                                  "file is refused."};
    argp_parse(&a, argc, argv, 0, NULL, &o);
    if (o.keys)
        dp_case_print_keys(stdout);
    else if (o.faults)
        print_faults();
    else
        return print_cases(&o.of);
    return 0;
}
