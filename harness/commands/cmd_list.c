/* deltaproof list: the cases with their reasons, the keys of a case file, the deliberate faults,
 * the names of tensors. Also recurrences, the fields of a record, exchanges with their prices. Exit
 * status 0, 2: a case file is refused. */
#include "commands.h"
#include "harness/record/record_schema.h"
#include "harness/run/blame.h"
#include "options.h"
#include "ref/chunk/exchange_price.h"
#include "ref/chunk/stages.h"
#include "ref/files/output.h"
#include "ref/vocabulary/problem.h"
#include "ref/vocabulary/recurrence.h"
#include "ref/vocabulary/segments.h"
#include "ref/vocabulary/text.h"

#include <argp.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    int HV, K, V, one_gate, sms;
    int64_t tokens;   /* of a rank */
    const int *ranks; /* [nranks]; nranks 0: 2, 4, 8, 64, 1,024 */
    int nranks;
    const char *lengths; /* tokens of sequences, commas between */
} dp_priced;

/* ---- prices of exchanges and of segments, as JSON (reports/prices.py) ------------------------ */

/* One row: all ranks' messages and bytes, a rank's buffer, the longest chain, its share outside the
 * exchange, and the exchange's share. */
static json_t *price(dp_exchange x, const dp_exchange_size *s) {
    const dp_exchange_price p = dp_exchange_price_of(x, s, &dp_exchange_usual);
    json_t *row = json_pack("{si ss ss sb}", "ranks", s->N, "exchange", dp_exchange_names[x],
                            "payload", dp_payload_names[s->payload], "possible", p.possible);
    if (p.possible)
        json_object_update_new(row,
                               json_pack("{sf sf sf sf sf sf}", "messages", p.messages, "bytes",
                                         p.bytes, "buffer_bytes", dp_exchange_buffer_bytes(x, s),
                                         "path_s", p.path_s, "compute_s", p.compute_s,
                                         "communication_to_computing", p.path_s / p.compute_s - 1));
    return row;
}

/* The same tokens and heads over N ranks: along tokens alone, or along heads too. */
static json_t *meshes(const dp_priced *x, int N) {
    const dp_exchange_size s = {.HV = x->HV, .K = x->K, .V = x->V, .payload = DP_PAYLOAD_FP32};
    json_t *rows = json_array();
    for (int tp = 1; tp <= N && N % tp == 0; tp *= 2) {
        const dp_mesh_price p = dp_mesh_price_of(N / tp, tp, x->tokens * N, &s, &dp_exchange_usual);
        if (!p.possible) continue;
        json_array_append_new(rows, json_pack("{si si sf sf sf sf sf}", "cp", N / tp, "tp", tp,
                                              "states_bytes", p.states_bytes, "tp_bytes",
                                              p.tp_bytes, "exchange_s", p.exchange_s, "reduce_s",
                                              p.reduce_s, "compute_s", p.compute_s));
    }
    return rows;
}

/* Serial with micro-batches behind each other. */
static json_t *pipelines(dp_exchange_size s, int N) {
    json_t *rows = json_array();
    s.N = N;
    s.payload = DP_PAYLOAD_FP32;
    for (int micro = 1; micro <= 64; micro *= 4)
        json_array_append_new(
            rows, json_pack("{si sf}", "micro_batches", micro, "s_each",
                            dp_exchange_pipeline_s(&s, micro, &dp_exchange_usual) / micro));
    return rows;
}

static json_t *exchanges(const dp_priced *x) {
    static const int usual[] = {2, 4, 8, 64, 1024};
    const int *ranks = x->nranks ? x->ranks : usual;
    const int n = x->nranks ? x->nranks : (int)(sizeof usual / sizeof *usual);
    const dp_exchange_machine *m = &dp_exchange_usual;
    dp_exchange_size s = {.HV = x->HV, .K = x->K, .V = x->V, .L = x->tokens, .rank = x->K / 8};
    if (s.rank < 1) s.rank = 1;
    const dp_exchange_saved kept = dp_exchange_saved_of(&s);
    json_t *rows = json_array(), *mesh = json_object(), *pipeline = json_object();
    for (int i = 0; i < n; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d", ranks[i]);
        s.N = ranks[i];
        s.payload = DP_PAYLOAD_FP32;
        for (int k = 0; k < DP_NEXCHANGES; k++)
            json_array_append_new(rows, price((dp_exchange)k, &s));
        for (int p = DP_PAYLOAD_FP32 + 1; p < DP_NPAYLOADS; p++) {
            if (p == DP_PAYLOAD_LOWER_RANK) continue; /* as many singular values cost the same */
            s.payload = (dp_payload)p;
            json_array_append_new(rows, price(DP_EXCHANGE_ALLGATHER, &s));
        }
        if (ranks[i] <= 64) json_object_set_new(mesh, name, meshes(x, ranks[i]));
        json_object_set_new(pipeline, name, pipelines(s, ranks[i]));
    }
    return json_pack("{si si si sI si sf sf sf sI sI so so so}", "HV", s.HV, "K", s.K, "V", s.V,
                     "tokens", (json_int_t)s.L, "rank", s.rank, "latency_s", m->latency_s,
                     "bytes_per_s", m->bytes_per_s, "flops_per_s", m->flops_per_s,
                     "saved_entering_bytes", (json_int_t)kept.entering, "saved_chunks_bytes",
                     (json_int_t)kept.chunks, "exchanges", rows, "meshes", mesh, "pipelines",
                     pipeline);
}

#define MOST_SEQUENCES 4096

/* By our kernels' rule; times of everything. */
static json_t *rule(const dp_priced *x, const int *chunks, int n, int backward) {
    const dp_segments_case c = {.HV = x->HV,
                                .K = x->K,
                                .V = x->V,
                                .one_gate = x->one_gate,
                                .bare = 1,
                                .sms = x->sms,
                                .backward = backward};
    const int most = dp_segments_most(&c, chunks, n);
    const dp_segments_time whole = dp_segments_time_of(&c, chunks, n, 0),
                           cut = dp_segments_time_of(&c, chunks, n, most);
    int segments = 0;
    for (int i = 0; i < n; i++)
        segments += dp_segments_of(chunks[i], most);
    return json_pack("{si si sf sf}", "most_chunks", most, "segments", segments, "whole_ms",
                     1e-9 * (double)(whole.cut + whole.rest), "ms",
                     1e-9 * (double)(cut.cut + cut.rest));
}

/* For sequences "16384,1024". NULL: *e says why. */
static json_t *segments(const dp_priced *x, dp_err *e) {
    DP_OWN int *chunks = dp_calloc(MOST_SEQUENCES, sizeof *chunks);
    DP_OWN char *all = dp_strdup(x->lengths);
    char *rest = all, *word;
    int64_t length;
    int n = 0;
    while ((word = strsep(&rest, ","))) {
        if (n == MOST_SEQUENCES)
            dp_fail(e, DP_EINPUT, "--pieces: more than %d sequences", MOST_SEQUENCES);
        else if (dp_number_int(word, 1, (int64_t)1 << 30, &length) != DP_NUMBER_OK)
            dp_fail(e, DP_EINPUT, "--pieces '%.40s': must be tokens, 1 to 2^30, commas between",
                    word);
        if (e->code) return NULL;
        chunks[n++] = (int)((length + DP_CHUNK - 1) / DP_CHUNK);
    }
    if (x->K % 64 || x->V % 64 || x->K < 64 || x->V < 64) {
        dp_fail(e, DP_EINPUT, "--pieces: K = %d, V = %d: the rule knows 64, 128, 192, 256", x->K,
                x->V);
        return NULL;
    }
    return json_pack("{so so}", "forward", rule(x, chunks, n, 0), "backward",
                     rule(x, chunks, n, 1));
}

/* ---- formulas of recurrences ----------------------------------------------------------------- */

static const char *const TITLES[DP_NMODELS] = {[DP_GDN] = "Gated DeltaNet",
                                               [DP_KDA] = "Kimi Delta Attention",
                                               [DP_MKDA] = "KDA with R keys a token, which read "
                                                           "one state",
                                               [DP_GDN2] = "Gated DeltaNet-2",
                                               [DP_GLA] = "Gated Linear Attention",
                                               [DP_SSD] = "Mamba-2's state-space duality",
                                               [DP_DELTAPRODUCT] = "Gated DeltaProduct: R keys a "
                                                                   "token, one after the other",
                                               [DP_DPLR] = "diagonal plus low rank, RWKV-7"};

/* The factors of an entry; those with an axis R get the key's index. */
static void put_entry(FILE *f, dp_entry e, int keys) {
    if (e.sign < 0) fputc('-', f);
    for (int i = 0; i < e.n; i++) {
        const int of = dp_factor_input(e.of[i]);
        const int indexed = keys && (of == DP_INPUT_K || of == DP_INPUT_V || of == DP_INPUT_BETA);
        fprintf(f, "%s%s%s", i ? " o " : "", dp_input_fields[of].name, indexed ? "_j" : "");
    }
}

/* " + write' strength (value - read S)"; the sign of an entry that reads alone is turned round. */
static void put_row(FILE *f, const dp_token_row *r, int keys) {
    dp_entry read = r->read;
    put_entry(f, r->write, keys);
    fputs("' ", f);
    if (!dp_entry_is_one(r->strength)) {
        put_entry(f, r->strength, keys);
        fputc(' ', f);
    }
    fputs(read.sign ? "(" : "", f);
    put_entry(f, r->value, keys);
    if (read.sign) {
        if (r->value.sign)
            fputs(" - ", f);
        else
            read.sign = (signed char)-read.sign;
        fputs(read.n > 1 ? "(" : "", f);
        put_entry(f, read, keys);
        fputs(read.n > 1 ? ") S)" : " S)", f);
    }
}

static void put_formula(FILE *f, dp_model m) {
    const dp_recurrence *r = &dp_recurrences[m];
    const int keys = dp_models[m].many_keys;
    fprintf(f, "  S <- %s S", dp_models[m].one_gate ? "exp(g)" : "diag(exp g)");
    if (!r->before) fputs("\n  S <- S + ", f);
    if (keys && !r->in_turn) fputs("sum over j = 1 .. R of ", f);
    for (int i = 0; i < r->n; i++) {
        if (i || r->before) fputs(" + ", f);
        put_row(f, &r->row[i], keys);
    }
    fputs(r->in_turn ? "   for j = 1 .. R in turn\n" : "\n", f);
    fputs("  o = scale S' q\n", f);
}

static void put_inputs(FILE *f, dp_model m) {
    for (int i = 0; i < DP_NINPUTS; i++) {
        const dp_tensor_field *t = &dp_input_fields[i];
        dp_axis axis[DP_MAX_AXES] = {0};
        char axes[40];
        int n = 0;
        if (t->role != DP_ROLE_REQUIRED || !dp_model_has(m, i)) continue;
        for (int a = 0; a < DP_MAX_AXES && t->axis[a]; a++) {
            const int drop = (t->axis[a] == DP_AXIS_R && !dp_models[m].many_keys) ||
                             (t->axis[a] == DP_AXIS_KG && dp_models[m].one_gate);
            if (!drop) axis[n++] = t->axis[a] == DP_AXIS_KG ? DP_AXIS_K : t->axis[a];
        }
        dp_axes_text(axis, axes, sizeof axes);
        fprintf(f, "  %-6s [%s]\n", t->name, axes);
    }
}

/* Prints each recurrence: name, title, the formula of one token, its inputs with their shapes. */
static void list_recurrences(FILE *f) {
    for (int m = 0; m < DP_NMODELS; m++) {
        fprintf(f, "%s%s: %s\n", m ? "\n" : "", dp_models[m].name, TITLES[m]);
        put_formula(f, (dp_model)m);
        put_inputs(f, (dp_model)m);
    }
}

/* ---- the command ----------------------------------------------------------------------------- */

typedef struct {
    dp_options of;
    int keys, faults, tensors, recurrences, schema, exchanges;
    dp_priced of_what;
} options;

enum { OPT_TOKENS = 256, OPT_HEADS, OPT_K, OPT_V, OPT_DEVICE, OPT_SMS };

static const struct argp_option OPTIONS[] = {
    DP_ROW_CASES,
    DP_FLAG("keys", keys, "print the keys of a case file"),
    DP_FLAG("faults", faults, "print the deliberate faults"),
    DP_FLAG("tensors", tensors, "print the names of inputs, results and stages"),
    DP_FLAG("recurrences", recurrences,
            "print the formula of each recurrence, and its inputs with their shapes"),
    DP_FLAG(
        "exchanges", exchanges,
        "print what each exchange costs: messages, bytes, buffers, time, and cp against cp x tp"),
    DP_TEXT(
        "pieces", of_what.lengths, "T,..",
        "print into how many pieces a card cuts sequences of so many tokens, by cuLA's guards and "
        "by our kernels' rule"),
    DP_ROW("tokens", OPT_TOKENS, "T", "for --exchanges: tokens of a rank (default 8192)"),
    DP_ROW("ranks", DP_OPT_RANKS, "N,..",
           "for --exchanges: numbers of ranks (default 2,4,8,64,1024)"),
    DP_ROW("heads", OPT_HEADS, "HV", "value heads (default 32 for --exchanges, 8 for --pieces)"),
    DP_ROW("K", OPT_K, "K", "channels of a key (default 128)"),
    DP_ROW("V", OPT_V, "V", "channels of a value (default 128)"),
    DP_ROW("device", OPT_DEVICE, "NAME",
           "for --pieces: a card, a100 h100 h200 b200 gb200, or its number of multiprocessors "
           "(default h200)"),
    {"multiprocessors", OPT_SMS, "N", OPTION_HIDDEN, "", 0}, /* for reports/prices.py */
    DP_FLAG("one-gate", of_what.one_gate, "for --pieces: one gate a head (GDN), not one a channel"),
    DP_ROW_JSON_OF("write cases, --faults, --tensors (as the pipeline makes them), --exchanges or "
                   "--pieces there; - for standard output"),
    DP_FLAG("schema", schema, "print the fields of a record as JSON Schema"),
    {0}};

/* Arguments that the list would not read. */
static void refuse_unread(const options *o, struct argp_state *st) {
    const int texts = o->keys + o->recurrences + o->schema,
              lists = texts + o->faults + o->tensors + o->exchanges + !!o->of_what.lengths;
    if (lists > 1) argp_error(st, "one list at a time");
    if (lists && o->of.nname) argp_error(st, "%s: is part of a case's name", o->of.name[0]);
    if (texts && o->of.json)
        argp_error(st, "--json %s: goes without --keys, --recurrences, --schema", o->of.json);
}

static error_t parse(int key, char *arg, struct argp_state *st) {
    options *o = st->input;
    dp_priced *x = &o->of_what;
    switch (key) {
    case OPT_TOKENS: x->tokens = dp_option_number(st, "tokens", arg, 1, (int64_t)1 << 30); break;
    case OPT_HEADS: x->HV = (int)dp_option_number(st, "heads", arg, 1, 4096); break;
    case OPT_K: x->K = (int)dp_option_number(st, "K", arg, 1, 256); break;
    case OPT_V: x->V = (int)dp_option_number(st, "V", arg, 1, 256); break;
    case OPT_DEVICE: break; /* the script reads it */
    case OPT_SMS: x->sms = (int)dp_option_number(st, "multiprocessors", arg, 1, 4096); break;
    case ARGP_KEY_END: refuse_unread(o, st); break;
    default: return dp_option(key, arg, st, &o->of);
    }
    return 0;
}

/* With the stages of each, / between, and the kinds of cases that can show it (operations.h). */
static json_t *json_of_faults(void) {
    json_t *all = json_array();
    for (int i = 1; i < DP_NFAULTS; i++) {
        const dp_fault_info *f = &dp_faults[i];
        json_array_append_new(all, json_pack("{ss si ss ss ss si sb}", "name", f->name, "bug",
                                             f->bug, "stage", f->stage, "what", f->what, "source",
                                             f->source, "kind", (int)dp_fault_kind((dp_fault)i),
                                             "by_run", dp_fault_by_run((dp_fault)i)));
    }
    return all;
}

static json_t *json_of_case(const dp_case *c) {
    return json_pack("{ss ss sI sb sb sb sb si}", "name", c->name, "op", c->op_name, "T",
                     (json_int_t)dp_case_tokens(c), "data", c->data != NULL, "factors",
                     c->op->has_factors, "stages", c->op->has_stages, "recurrence",
                     c->op->is_recurrence, "kinds", (int)c->op->faults);
}

static void print_faults(void) {
    for (int i = 1; i < DP_NFAULTS; i++)
        printf("%-20s %-16s %s [%s]\n", dp_faults[i].name, dp_faults[i].stage, dp_faults[i].what,
               dp_faults[i].source);
}

static void print_name(const char *name, const char *const *alias, int n) {
    char all[64];
    snprintf(all, sizeof all, "%s", name);
    for (int i = 0; i < n && alias[i]; i++)
        dp_text_add(all, sizeof all, " or %s", alias[i]);
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

/* The pipeline makes them in this order. */
static json_t *json_of_tensors(void) {
    json_t *all = json_array();
    dp_stage stage;
    const char *name;
    for (int i = 0; (name = dp_blame_tensor(i, &stage)); i++)
        json_array_append_new(all,
                              json_pack("{ss ss}", "name", name, "stage", dp_stage_names[stage]));
    return all;
}

/* Prints the case if its name has part (NULL: any), which is then counted; or adds it to `all`. */
static int print_case(const char *path, const char *part, json_t *all, int *printed) {
    DP_FREED(dp_case_free) dp_case c;
    dp_err e = {0};
    if (dp_case_open(path, 0, &c, &e)) return dp_refuse(&e);
    if (!part || strstr(c.name, part)) {
        if (all)
            json_array_append_new(all, json_of_case(&c));
        else
            printf("%-24s %-6s %s\n", c.name, c.op_name, c.reason);
        ++*printed;
    }
    return 0;
}

/* One object a line. */
static int print_schema(void) {
    json_auto_t *schema = dp_schema_describe(&dp_record_schema);
    json_auto_t *defs = json_incref(json_object_get(schema, "$defs"));
    json_t *x;
    const char *name, *before = "";
    json_object_del(schema, "$defs");
    DP_OWN char *root = json_dumps(schema, 0);
    printf("%.*s, \"$defs\": {\n", (int)strlen(root) - 1, root);
    json_object_foreach(defs, name, x) {
        DP_OWN char *one = json_dumps(x, 0);
        printf("%s\"%s\": %s", before, name, one);
        before = ",\n";
    }
    puts("}}");
    return 0;
}

static int print_cases(const dp_options *o) {
    dp_err e = {0};
    char **paths;
    int n, printed = 0, rc = 0;
    const char *part = o->nname ? o->name[0] : NULL;
    json_auto_t *all = o->json ? json_array() : NULL;
    if (dp_case_find_all(dp_options_folder(o), &paths, &n, &e)) return dp_refuse(&e);
    for (int i = 0; i < n; i++) {
        rc |= print_case(paths[i], part, all, &printed);
        free(paths[i]);
    }
    free(paths);
    if (all && !rc && dp_json_write(json_incref(all), o->json, 0, &e)) return dp_refuse(&e);
    if (printed || rc || !part) return rc;
    dp_fail(&e, DP_EINPUT, "list: no case has %s in its name", part);
    return dp_refuse(&e);
}

/* As JSON, for reports/prices.py, which this becomes where a person asks. */
static int print_prices(options *o, char **argv) {
    dp_priced *x = &o->of_what;
    dp_err e = {0};
    x->ranks = o->of.only[DP_ID_RANKS].of;
    x->nranks = o->of.only[DP_ID_RANKS].n;
    if (!x->HV) x->HV = x->lengths ? 8 : 32;
    if (x->lengths ? !x->sms : !o->of.json) return dp_script_with_self("reports/prices.py", argv);
    json_t *found = x->lengths ? segments(x, &e) : exchanges(x);
    return !found || dp_json_write(found, o->of.json, 17, &e) ? dp_refuse(&e) : 0;
}

int dp_cmd_list(int argc, char **argv) {
    options o = {.of = dp_options_new(0, 1), .of_what = {.tokens = 8192, .K = 128, .V = 128}};
    const struct argp a = {.options = OPTIONS,
                           .parser = parse,
                           .args_doc = "[PART]",
                           .doc = "List cases (whose names have PART).\vExit status 2 "
                                  "when a case file is refused."};
    dp_err e = {0};
    dp_parse(&a, argc, argv, &o);
    if (o.keys)
        dp_case_print_keys(stdout);
    else if (o.faults && o.of.json)
        return dp_json_write(json_of_faults(), o.of.json, 0, &e) ? dp_refuse(&e) : 0;
    else if (o.faults)
        print_faults();
    else if (o.tensors && o.of.json)
        return dp_json_write(json_of_tensors(), o.of.json, 0, &e) ? dp_refuse(&e) : 0;
    else if (o.tensors)
        print_tensors();
    else if (o.recurrences)
        list_recurrences(stdout);
    else if (o.exchanges || o.of_what.lengths)
        return print_prices(&o, argv);
    else if (o.schema)
        return print_schema();
    else
        return print_cases(&o.of);
    return 0;
}
