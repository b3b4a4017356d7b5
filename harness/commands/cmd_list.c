/* deltaproof list: the cases with their reasons, the keys of a case file, the deliberate faults,
 * the names of tensors, the fields of a record, exchanges with their prices. Exit status 0, 2: a
 * case file is refused. */
#define _GNU_SOURCE
#include "commands.h"
#include "harness/record/record_schema.h"
#include "harness/simulated/stage_tensor.h"
#include "options.h"
#include "parse.h"
#include "ref/chunk/exchange_price.h"
#include "ref/files/output.h"

#include <argp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    dp_options of;
    int keys, faults, tensors, schema, exchanges;
    int64_t tokens; /* of a rank, for exchanges */
} options;

enum { OPT_KEYS = 256, OPT_FAULTS, OPT_TENSORS, OPT_SCHEMA, OPT_EXCHANGES, OPT_TOKENS };

static const struct argp_option OPTIONS[] = {
    DP_ROW_CASES,
    {"keys", OPT_KEYS, 0, 0, "print the keys of a case file", 0},
    {"faults", OPT_FAULTS, 0, 0, "print the deliberate faults", 0},
    {"tensors", OPT_TENSORS, 0, 0, "print the names of inputs, results and stages", 0},
    {"exchanges", OPT_EXCHANGES, 0, 0,
     "print what each exchange costs on 2, 4, 8, 64 and 1,024 ranks", 0},
    {"tokens", OPT_TOKENS, "T", 0, "of a rank, of exchanges (default 8192)", 0},
    {"schema", OPT_SCHEMA, 0, 0, "print the fields of a record as JSON Schema", 0},
    {0}};

static error_t parse(int key, char *arg, struct argp_state *st) {
    options *o = st->input;
    switch (key) {
    case OPT_KEYS: o->keys = 1; break;
    case OPT_FAULTS: o->faults = 1; break;
    case OPT_TENSORS: o->tensors = 1; break;
    case OPT_SCHEMA: o->schema = 1; break;
    case OPT_EXCHANGES: o->exchanges = 1; break;
    case OPT_TOKENS: o->tokens = dp_option_number(st, "tokens", arg, 1, (int64_t)1 << 30); break;
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

/* One row: all ranks' messages and bytes, the longest chain, and its share that is no exchange. */
static void print_price(dp_exchange x, const dp_exchange_size *s, const dp_exchange_machine *m) {
    const dp_exchange_price p = dp_exchange_price_of(x, s, m);
    printf("%6d  %-10s %-9s ", s->N, dp_exchange_names[x], dp_payload_names[s->payload]);
    if (p.possible)
        printf("%9.0f %12.4g %10.4f %10.4f\n", p.messages, p.bytes / 1e6, p.path_s * 1e3,
               p.compute_s * 1e3);
    else
        printf("%9s %12s %10s %10s\n", "-", "-", "-", "-");
}

static void print_exchanges(int64_t tokens) {
    static const int ranks[] = {2, 4, 8, 64, 1024};
    static const dp_exchange_machine m = {5e-6, 2e11, 4e14};
    dp_exchange_size s = {.HV = 32, .K = 128, .V = 128, .L = tokens, .rank = 16};
    printf(
        "One sequence, one direction; %lld tokens a rank, HV = %d, K = V = %d. Predicted, with\n"
        "%.0f us a message, %.0f GB/s a link, %.0f Tflop/s: messages and megabytes of all ranks;\n"
        "ms of the longest chain, and of what in it is no exchange (pre-scan and state pass).\n"
        "low-rank: %d of %d singular values. grid: --exact-cp. diagonal: GLA, SSD.\n\n"
        " ranks  exchange   payload    messages           MB    path ms computing\n",
        (long long)s.L, s.HV, s.K, m.latency_s * 1e6, m.bytes_per_s / 1e9, m.flops_per_s / 1e12,
        s.rank, s.K);
    for (int i = 0; i < (int)(sizeof ranks / sizeof *ranks); i++) {
        s.N = ranks[i];
        for (int x = 0; x < DP_NEXCHANGES; x++) {
            s.payload = DP_PAYLOAD_FP32;
            print_price((dp_exchange)x, &s, &m);
        }
        for (int p = DP_PAYLOAD_FP32 + 1; p < DP_NPAYLOADS; p++) {
            if (p == DP_PAYLOAD_LOWER_RANK) continue; /* as many singular values cost the same */
            s.payload = (dp_payload)p;
            print_price(DP_EXCHANGE_ALLGATHER, &s, &m);
        }
    }
}

static int print_case(const char *path) {
    dp_case c;
    dp_err e = {0};
    if (dp_case_open(path, 0, &c, &e)) return dp_refuse(&e);
    printf("%-24s %-6s %s\n", c.name, c.op_name, c.reason);
    dp_case_free(&c);
    return 0;
}

static int print_schema(void) {
    dp_err e = {0};
    json_t *schema = dp_schema_describe(&dp_record_schema);
    return dp_json_write(schema, "-", 17, &e) ? dp_refuse(&e) : 0;
}

static int print_cases(const dp_options *o) {
    dp_err e = {0};
    char **paths;
    int n, rc = 0;
    if (dp_case_find_all(dp_options_folder(o), &paths, &n, &e)) return dp_refuse(&e);
    for (int i = 0; i < n; i++) {
        rc |= print_case(paths[i]);
        free(paths[i]);
    }
    free(paths);
    return rc;
}

int dp_cmd_list(int argc, char **argv) {
    options o = {.of = dp_options_new(0, 0), .tokens = 8192};
    const struct argp a = {.options = OPTIONS,
                           .parser = parse,
                           .args_doc = "",
                           .doc = "List the cases with their reasons.\vExit status 2 when a case "
                                  "file is refused."};
    dp_parse(&a, argc, argv, &o);
    if (o.keys)
        dp_case_print_keys(stdout);
    else if (o.faults)
        print_faults();
    else if (o.tensors)
        print_tensors();
    else if (o.exchanges)
        print_exchanges(o.tokens);
    else if (o.schema)
        return print_schema();
    else
        return print_cases(&o.of);
    return 0;
}
