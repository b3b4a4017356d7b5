/* deltaproof list: the cases with their reasons, the keys of a case file, the deliberate faults,
 * the names of tensors. Also recurrences, the fields of a record, exchanges with their prices. Exit
 * status 0, 2: a case file is refused. */
#define _GNU_SOURCE
#include "commands.h"
#include "harness/record/record_schema.h"
#include "harness/simulated/stage_tensor.h"
#include "list_prices.h"
#include "list_recurrences.h"
#include "options.h"
#include "parse.h"
#include "ref/files/output.h"

#include <argp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    dp_options of;
    int keys, faults, tensors, recurrences, schema, exchanges;
    dp_priced of_what;
} options;

enum {
    OPT_KEYS = 256,
    OPT_FAULTS,
    OPT_TENSORS,
    OPT_RECURRENCES,
    OPT_SCHEMA,
    OPT_EXCHANGES,
    OPT_PIECES,
    OPT_TOKENS,
    OPT_HEADS,
    OPT_K,
    OPT_V,
    OPT_DEVICE,
    OPT_ONE_GATE
};

static const struct argp_option OPTIONS[] = {
    DP_ROW_CASES,
    {"keys", OPT_KEYS, 0, 0, "print the keys of a case file", 0},
    {"faults", OPT_FAULTS, 0, 0, "print the deliberate faults", 0},
    {"tensors", OPT_TENSORS, 0, 0, "print the names of inputs, results and stages", 0},
    {"recurrences", OPT_RECURRENCES, 0, 0,
     "print the formula of each recurrence, and its inputs with their shapes", 0},
    {"exchanges", OPT_EXCHANGES, 0, 0,
     "print what each exchange costs: messages, bytes, buffers, time, and cp against cp x tp", 0},
    {"pieces", OPT_PIECES, "T,..", 0,
     "print into how many pieces a card cuts sequences of so many tokens, by cuLA's guards and "
     "by our kernels' rule",
     0},
    {"tokens", OPT_TOKENS, "T", 0, "for --exchanges: tokens of a rank (default 8192)", 0},
    {"ranks", DP_OPT_RANKS, "N,..", 0, "for --exchanges: numbers of ranks (default 2,4,8,64,1024)",
     0},
    {"heads", OPT_HEADS, "HV", 0, "value heads (default 32 for --exchanges, 8 for --pieces)", 0},
    {"K", OPT_K, "K", 0, "channels of a key (default 128)", 0},
    {"V", OPT_V, "V", 0, "channels of a value (default 128)", 0},
    {"device", OPT_DEVICE, "NAME", 0,
     "for --pieces: a card, " DP_DEVICE_WORDS ", or its number of multiprocessors (default h200)",
     0},
    {"one-gate", OPT_ONE_GATE, 0, 0, "for --pieces: one gate a head (GDN), not one a channel", 0},
    DP_ROW_JSON_OF("for --exchanges and --pieces: write the numbers there; - for standard output"),
    {"schema", OPT_SCHEMA, 0, 0, "print the fields of a record as JSON Schema", 0},
    {0}};

static error_t parse(int key, char *arg, struct argp_state *st) {
    options *o = st->input;
    dp_priced *x = &o->of_what;
    switch (key) {
    case OPT_KEYS: o->keys = 1; break;
    case OPT_FAULTS: o->faults = 1; break;
    case OPT_TENSORS: o->tensors = 1; break;
    case OPT_RECURRENCES: o->recurrences = 1; break;
    case OPT_SCHEMA: o->schema = 1; break;
    case OPT_EXCHANGES: o->exchanges = 1; break;
    case OPT_PIECES: o->of_what.lengths = arg; break;
    case OPT_TOKENS: x->tokens = dp_option_number(st, "tokens", arg, 1, (int64_t)1 << 30); break;
    case OPT_HEADS: x->HV = (int)dp_option_number(st, "heads", arg, 1, 4096); break;
    case OPT_K: x->K = (int)dp_option_number(st, "K", arg, 1, 256); break;
    case OPT_V: x->V = (int)dp_option_number(st, "V", arg, 1, 256); break;
    case OPT_DEVICE: x->device = arg; break;
    case OPT_ONE_GATE: x->one_gate = 1; break;
    default: return dp_option(key, arg, st, &o->of);
    }
    return 0;
}

static void print_faults(void) {
    for (int i = 1; i < DP_NFAULTS; i++)
        printf("%-20s %-16s %s [%s]\n", dp_faults[i].name, dp_faults[i].stage, dp_faults[i].what,
               dp_faults[i].source);
}

static void print_name(const char *name, const char *const *alias, int n) {
    char all[64];
    int at = snprintf(all, sizeof all, "%s", name);
    for (int i = 0; i < n && alias[i]; i++)
        at += snprintf(all + at, sizeof all - (size_t)at, " or %s", alias[i]);
    printf("%-24s ", all);
}

static void print_fields(const dp_tensor_field *f, int n, const char *what) {
    for (int i = 0; i < n; i++) {
        char axes[40];
        dp_axes_text(f[i].axis, axes, sizeof axes);
        print_name(f[i].name, &f[i].alias, 1);
        printf("[%s]%*s %s\n", axes, 16 - (int)strlen(axes), "", what);
    }
}

/* Every tensor that a file, a library or a record may name. */
static void print_tensors(void) {
    print_fields(dp_input_fields, DP_NINPUTS, "input");
    print_fields(dp_result_fields, DP_NRESULTS, "result");
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++) {
        const dp_stage_tensor_info *t = &dp_stage_tensors[i];
        char axes[40];
        dp_axes_text(t->axis, axes, sizeof axes);
        print_name(t->name, t->alias, 3);
        printf("[%s]%*s stage of %s: %s\n", axes, 16 - (int)strlen(axes), "",
               dp_stage_names[t->made_by], t->what);
    }
}

/* Prints the case if its name has part (NULL: any), which is then counted. */
static int print_case(const char *path, const char *part, int *printed) {
    dp_case c;
    dp_err e = {0};
    if (dp_case_open(path, 0, &c, &e)) return dp_refuse(&e);
    if (!part || strstr(c.name, part)) {
        printf("%-24s %-6s %s\n", c.name, c.op_name, c.reason);
        ++*printed;
    }
    dp_case_free(&c);
    return 0;
}

/* One object a line. */
static int print_schema(void) {
    json_t *schema = dp_schema_describe(&dp_record_schema), *defs, *x;
    const char *name, *before = "";
    defs = json_incref(json_object_get(schema, "$defs"));
    json_object_del(schema, "$defs");
    char *root = json_dumps(schema, 0);
    printf("%.*s, \"$defs\": {\n", (int)strlen(root) - 1, root);
    json_object_foreach(defs, name, x) {
        char *one = json_dumps(x, 0);
        printf("%s\"%s\": %s", before, name, one);
        before = ",\n";
        free(one);
    }
    puts("}}");
    free(root);
    json_decref(defs);
    json_decref(schema);
    return 0;
}

static int print_cases(const dp_options *o) {
    dp_err e = {0};
    char **paths;
    int n, printed = 0, rc = 0;
    const char *part = o->nname ? o->name[0] : NULL;
    if (dp_case_find_all(dp_options_folder(o), &paths, &n, &e)) return dp_refuse(&e);
    for (int i = 0; i < n; i++) {
        rc |= print_case(paths[i], part, &printed);
        free(paths[i]);
    }
    free(paths);
    if (printed || rc || !part) return rc;
    dp_fail(&e, DP_EINPUT, "list: no case has %s in its name", part);
    return dp_refuse(&e);
}

static int print_prices(options *o) {
    dp_priced *x = &o->of_what;
    dp_err e = {0};
    x->json = o->of.json;
    x->ranks = o->of.ranks;
    x->nranks = o->of.nranks;
    if (!x->HV) x->HV = x->lengths ? 8 : 32;
    return (x->lengths ? dp_list_pieces : dp_list_exchanges)(x, &e) ? dp_refuse(&e) : 0;
}

int dp_cmd_list(int argc, char **argv) {
    options o = {.of = dp_options_new(0, 1),
                 .of_what = {.tokens = 8192, .K = 128, .V = 128, .device = "h200"}};
    const struct argp a = {.options = OPTIONS,
                           .parser = parse,
                           .args_doc = "[PART]",
                           .doc = "List cases (whose names have PART).\vExit status 2 "
                                  "when a case file is refused."};
    dp_parse(&a, argc, argv, &o);
    if (o.keys)
        dp_case_print_keys(stdout);
    else if (o.faults)
        print_faults();
    else if (o.tensors)
        print_tensors();
    else if (o.recurrences)
        dp_list_recurrences(stdout);
    else if (o.exchanges || o.of_what.lengths)
        return print_prices(&o);
    else if (o.schema)
        return print_schema();
    else
        return print_cases(&o.of);
    return 0;
}
