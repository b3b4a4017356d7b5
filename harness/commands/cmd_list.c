/* deltaproof list: the cases with their reasons, the keys of a case file, the deliberate faults,
 * the names of tensors. Also recurrences, the fields of a record, exchanges with their prices. Exit
 * status 0, 2: a case file is refused. */
#include "commands.h"
#include "harness/record/record_schema.h"
#include "options.h"
#include "ref/chunk/exchange_price.h"
#include "ref/chunk/stages.h"
#include "ref/files/output.h"
#include "ref/vocabulary/pieces.h"
#include "ref/vocabulary/problem.h"
#include "ref/vocabulary/recurrence.h"
#include "ref/vocabulary/segments.h"
#include "ref/vocabulary/text.h"

#include <argp.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DP_DEVICE_WORDS "a100 h100 h200 b200 gb200"

typedef struct {
    int HV, K, V, one_gate;
    int64_t tokens;   /* of a rank */
    const int *ranks; /* [nranks]; nranks 0: 2, 4, 8, 64, 1,024 */
    int nranks;
    const char *lengths; /* tokens of sequences, commas between */
    const char *device;  /* a name, or multiprocessors */
    const char *json;    /* in place of tables; NULL: tables */
} dp_priced;

/* ---- prices of exchanges and of pieces inside a card ----------------------------------------- */

static dp_status finish(json_t *all, const char *path, dp_err *e) {
    if (path) return dp_json_write(all, path, 17, e);
    json_decref(all);
    return DP_OK;
}

/* ---- exchanges ------------------------------------------------------------------------------- */

/* One row: all ranks' messages and bytes, a rank's buffer, the longest chain, its share outside the
 * exchange, and the exchange's share. */
static json_t *price(dp_exchange x, const dp_exchange_size *s, int shown) {
    const dp_exchange_price p = dp_exchange_price_of(x, s, &dp_exchange_usual);
    const double ratio = p.path_s / p.compute_s - 1, buffer = dp_exchange_buffer_bytes(x, s);
    if (shown) printf("%6d  %-10s %-9s ", s->N, dp_exchange_names[x], dp_payload_names[s->payload]);
    if (shown && p.possible)
        printf("%9.0f %12.4g %10.4g %10.4f %10.4f %9.3f\n", p.messages, p.bytes / 1e6, buffer / 1e6,
               p.path_s * 1e3, p.compute_s * 1e3, ratio);
    else if (shown)
        printf("%9s %12s %10s %10s %10s %9s\n", "-", "-", "-", "-", "-", "-");
    json_t *row = json_pack("{si ss ss sb}", "ranks", s->N, "exchange", dp_exchange_names[x],
                            "payload", dp_payload_names[s->payload], "possible", p.possible);
    if (p.possible)
        json_object_update_new(row, json_pack("{sf sf sf sf sf sf}", "messages", p.messages,
                                              "bytes", p.bytes, "buffer_bytes", buffer, "path_s",
                                              p.path_s, "compute_s", p.compute_s,
                                              "communication_to_computing", ratio));
    return row;
}

/* The same tokens and heads over N ranks: along tokens alone, or along heads too. */
static json_t *meshes(const dp_priced *x, int N, int shown) {
    const dp_exchange_size s = {.HV = x->HV, .K = x->K, .V = x->V, .payload = DP_PAYLOAD_FP32};
    json_t *rows = json_array();
    for (int tp = 1; tp <= N; tp *= 2) {
        if (N % tp) break;
        const dp_mesh_price p = dp_mesh_price_of(N / tp, tp, x->tokens * N, &s, &dp_exchange_usual);
        if (!p.possible) continue;
        const double sum = p.exchange_s + p.reduce_s + p.compute_s;
        if (shown)
            printf("%4d x %-4d %12.4g %12.4g %10.4f %10.4f %10.4f %10.4f\n", N / tp, tp,
                   p.states_bytes / 1e6, p.tp_bytes / 1e6, p.exchange_s * 1e3, p.reduce_s * 1e3,
                   p.compute_s * 1e3, sum * 1e3);
        json_array_append_new(rows, json_pack("{si si sf sf sf sf sf}", "cp", N / tp, "tp", tp,
                                              "states_bytes", p.states_bytes, "tp_bytes",
                                              p.tp_bytes, "exchange_s", p.exchange_s, "reduce_s",
                                              p.reduce_s, "compute_s", p.compute_s));
    }
    return rows;
}

/* Serial with micro-batches behind each other. */
static json_t *pipelines(dp_exchange_size s, int N, int shown) {
    static const int micro[] = {1, 4, 16, 64};
    json_t *rows = json_array();
    s.N = N;
    s.payload = DP_PAYLOAD_FP32;
    if (shown) printf("%6d ", N);
    for (size_t i = 0; i < sizeof micro / sizeof *micro; i++) {
        const double each = dp_exchange_pipeline_s(&s, micro[i], &dp_exchange_usual) / micro[i];
        if (shown) printf(" %10.4f", each * 1e3);
        json_array_append_new(rows,
                              json_pack("{si sf}", "micro_batches", micro[i], "s_each", each));
    }
    if (shown) printf("\n");
    return rows;
}

static void explain_exchanges(const dp_exchange_size *s) {
    const dp_exchange_saved kept = dp_exchange_saved_of(s);
    printf(
        "One sequence, one direction; %lld tokens a rank, HV = %d, K = %d, V = %d. Predicted, "
        "with\n"
        "%.0f us a message, %.0f GB/s a link, %.0f Tflop/s: messages and megabytes of all ranks;\n"
        "megabytes of a rank's buffer; ms of the longest chain, and of what in it is no exchange\n"
        "(pre-scan and state pass); the exchange's share, for that computing.\n"
        "low-rank: %d of %d singular values. grid: --exact-cp. diagonal: GLA, SSD.\n"
        "A rank keeps for its backward: the state that enters, %.4g MB (fp32); where it "
        "recomputes\n"
        "nothing, the state before each chunk too, %.4g MB (bf16).\n\n"
        " ranks  exchange   payload    messages           MB  buffer MB    path ms  computing     "
        "share\n",
        (long long)s->L, s->HV, s->K, s->V, dp_exchange_usual.latency_s * 1e6,
        dp_exchange_usual.bytes_per_s / 1e9, dp_exchange_usual.flops_per_s / 1e12, s->rank, s->K,
        (double)kept.entering / 1e6, (double)kept.chunks / 1e6);
}

static dp_status list_exchanges(const dp_priced *x, dp_err *e) {
    static const int usual[] = {2, 4, 8, 64, 1024};
    const int *ranks = x->nranks ? x->ranks : usual, shown = !x->json;
    const int n = x->nranks ? x->nranks : (int)(sizeof usual / sizeof *usual);
    dp_exchange_size s = {.HV = x->HV, .K = x->K, .V = x->V, .L = x->tokens, .rank = x->K / 8};
    if (s.rank < 1) s.rank = 1;
    const dp_exchange_saved kept = dp_exchange_saved_of(&s);
    json_t *rows = json_array(), *mesh = json_object(), *pipeline = json_object();
    if (shown) explain_exchanges(&s);
    for (int i = 0; i < n; i++) {
        s.N = ranks[i];
        s.payload = DP_PAYLOAD_FP32;
        for (int k = 0; k < DP_NEXCHANGES; k++)
            json_array_append_new(rows, price((dp_exchange)k, &s, shown));
        for (int p = DP_PAYLOAD_FP32 + 1; p < DP_NPAYLOADS; p++) {
            if (p == DP_PAYLOAD_LOWER_RANK) continue; /* as many singular values cost the same */
            s.payload = (dp_payload)p;
            json_array_append_new(rows, price(DP_EXCHANGE_ALLGATHER, &s, shown));
        }
    }
    if (shown)
        printf(
            "\nThe same tokens and heads over cp x tp ranks: cp split the tokens (all-gather), "
            "tp the heads\n(an all-reduce of the layer's output in bf16): megabytes that a rank "
            "sends, ms.\n\n"
            "  cp x tp      states MB    reduce MB   exchange     reduce  computing        sum\n");
    for (int i = 0; i < n; i++) {
        char name[16];
        if (ranks[i] > 64) continue;
        snprintf(name, sizeof name, "%d", ranks[i]);
        json_object_set_new(mesh, name, meshes(x, ranks[i], shown));
    }
    if (shown)
        printf("\nserial over 1, 4, 16, 64 micro-batches behind each other, ms for each\n\n");
    for (int i = 0; i < n; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d", ranks[i]);
        json_object_set_new(pipeline, name, pipelines(s, ranks[i], shown));
    }
    return finish(json_pack("{si si si sI sI sI so so so}", "HV", s.HV, "K", s.K, "V", s.V,
                            "tokens", (json_int_t)s.L, "saved_entering_bytes",
                            (json_int_t)kept.entering, "saved_chunks_bytes",
                            (json_int_t)kept.chunks, "exchanges", rows, "meshes", mesh, "pipelines",
                            pipeline),
                  x->json, e);
}

/* ---- pieces ---------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    int sms;
} DEVICES[] = {{"a100", 108}, {"h100", 132}, {"h200", 132}, {"b200", 148}, {"gb200", 152}};

static int multiprocessors(const char *device) {
    int64_t n = 0;
    for (size_t i = 0; i < sizeof DEVICES / sizeof *DEVICES; i++)
        if (!strcmp(device, DEVICES[i].name)) return DEVICES[i].sms;
    return dp_number_int(device, 1, 4096, &n) == DP_NUMBER_OK ? (int)n : 0;
}

#define CHUNK 64
#define MOST_SEQUENCES 4096

/* "16384,1024": returns how many. */
static dp_status lengths_of(const char *text, int64_t *length, int *n, dp_err *e) {
    DP_OWN char *all = dp_strdup(text);
    char *rest = all, *word;
    dp_status st = DP_OK;
    *n = 0;
    while ((word = strsep(&rest, ",")) && !st) {
        if (*n == MOST_SEQUENCES)
            st = dp_fail(e, DP_EINPUT, "--pieces: more than %d sequences", MOST_SEQUENCES);
        else if (dp_number_int(word, 1, (int64_t)1 << 30, &length[*n]) != DP_NUMBER_OK)
            st = dp_fail(e, DP_EINPUT,
                         "--pieces '%.40s': must be tokens, 1 to 2^30, commas between", word);
        else
            ++*n;
    }
    return st;
}

/* Words of a guard. */
static const char *const GUARDS[DP_NPIECES_WHYS] = {
    "cut", "whole: the sequences alone fill the card (guard 0)",
    "whole: the longest has fewer than 256 chunks (guard 1)",
    "whole: more than 10 long sequences times heads (guard 2)",
    "whole: the pieces would not run side by side (guard 3)"};

/* Why the rule of our kernels decides otherwise, where it does. */
static const char *const DIFFERENCE[DP_NPIECES_WHYS] = {
    "The guards fill the multiprocessors; the rule takes the number of segments that it expects to "
    "be fastest, and cuts only where that gains 9% of everything.",
    "Guard 0 counts blocks; the rule counts how long each runs, and cuts where a long one is alone "
    "when the others have ended.",
    "Guard 1 is a length, below which cuLA's pre-scan and merge cost more than they gain; the rule "
    "adds up the times of our own, which begin to pay earlier.",
    "Guard 2 counts long sequences times heads; the rule counts the time of each pass.",
    "Guard 3 wants all pieces side by side; the rule lets a block wait for a free multiprocessor, "
    "and counts that."};

typedef struct {
    int most, segments;
    double whole_ms, cut_ms; /* of everything */
} ruled;

static ruled rule(const dp_segments_case *c, const int *chunks, int n) {
    ruled r = {.most = dp_segments_most(c, chunks, n)};
    for (int i = 0; i < n; i++)
        r.segments += dp_segments_of(chunks[i], r.most);
    const dp_segments_time whole = dp_segments_time_of(c, chunks, n, 0),
                           cut = dp_segments_time_of(c, chunks, n, r.most);
    r.whole_ms = 1e-9 * (double)(whole.cut + whole.rest);
    r.cut_ms = 1e-9 * (double)(cut.cut + cut.rest);
    return r;
}

static void print_rule(const char *what, const ruled *r) {
    printf("our rule, %-14s ", what);
    if (r->most)
        printf("cut in %d segments of at most %d chunks: %.3f ms for %.3f\n", r->segments, r->most,
               r->cut_ms, r->whole_ms);
    else
        printf("whole: %.3f ms\n", r->whole_ms);
}

static json_t *json_of(const ruled *r) {
    return json_pack("{si si sf sf}", "most_chunks", r->most, "segments", r->segments, "whole_ms",
                     r->whole_ms, "ms", r->cut_ms);
}

static dp_status list_pieces(const dp_priced *x, dp_err *e) {
    const int sms = multiprocessors(x->device);
    DP_OWN int64_t *length = dp_calloc(MOST_SEQUENCES, sizeof *length);
    DP_OWN int *chunks = dp_calloc(MOST_SEQUENCES, sizeof *chunks);
    int n = 0;
    dp_status st = lengths_of(x->lengths, length, &n, e);
    if (!st && !sms)
        st = dp_fail(e, DP_EINPUT,
                     "--device '%.40s': must be one of " DP_DEVICE_WORDS
                     ", or a number of multiprocessors",
                     x->device);
    if (!st && (x->K % 64 || x->V % 64 || x->K < 64 || x->V < 64))
        st = dp_fail(e, DP_EINPUT, "--pieces: K = %d, V = %d: the rule knows 64, 128, 192, 256",
                     x->K, x->V);
    for (int i = 0; i < n; i++)
        chunks[i] = (int)((length[i] + CHUNK - 1) / CHUNK);
    if (!st) {
        dp_segments_case c = {
            .HV = x->HV, .K = x->K, .V = x->V, .one_gate = x->one_gate, .bare = 1, .sms = sms};
        const dp_pieces guards = dp_pieces_of(length, n, x->HV, sms, CHUNK);
        const ruled forward = rule(&c, chunks, n);
        c.backward = 1;
        const ruled backward = rule(&c, chunks, n);
        const int64_t cut = guards.why == DP_PIECES_CUT ? guards.total : n;
        const int differ = cut != forward.segments || cut != backward.segments;
        if (!x->json) {
            printf("%d sequences of %s tokens, HV = %d, K = %d, V = %d, a gate a %s, %d "
                   "multiprocessors.\nTimes are expected ones of our kernels, from constants of an "
                   "H200 (ref/vocabulary/segments.h).\n\n"
                   "published guards         %s",
                   n, x->lengths, x->HV, x->K, x->V, x->one_gate ? "head" : "channel", sms,
                   GUARDS[guards.why]);
            if (guards.why == DP_PIECES_CUT)
                printf(" in %lld pieces of at most %lld chunks", (long long)guards.total,
                       (long long)guards.chunks);
            printf("\n");
            print_rule("forward:", &forward);
            print_rule("with backward:", &backward);
            if (differ) printf("\n%s\n", DIFFERENCE[guards.why]);
        }
        st = finish(json_pack("{si s{ss ss sI sI} so so ss}", "multiprocessors", sms, "guards",
                              "why", dp_pieces_words[guards.why], "says", GUARDS[guards.why],
                              "pieces", (json_int_t)cut, "most_chunks",
                              (json_int_t)(guards.why == DP_PIECES_CUT ? guards.chunks : 0),
                              "forward", json_of(&forward), "backward", json_of(&backward),
                              "difference", differ ? DIFFERENCE[guards.why] : ""),
                    x->json, e);
    }
    return st;
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

enum { OPT_TOKENS = 256, OPT_HEADS, OPT_K, OPT_V };

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
    DP_TEXT("device", of_what.device, "NAME",
            "for --pieces: a card, " DP_DEVICE_WORDS
            ", or its number of multiprocessors (default h200)"),
    DP_FLAG("one-gate", of_what.one_gate, "for --pieces: one gate a head (GDN), not one a channel"),
    DP_ROW_JSON_OF("write cases, --faults, --exchanges or --pieces there; - for standard output"),
    DP_FLAG("schema", schema, "print the fields of a record as JSON Schema"),
    {0}};

static error_t parse(int key, char *arg, struct argp_state *st) {
    options *o = st->input;
    dp_priced *x = &o->of_what;
    switch (key) {
    case OPT_TOKENS: x->tokens = dp_option_number(st, "tokens", arg, 1, (int64_t)1 << 30); break;
    case OPT_HEADS: x->HV = (int)dp_option_number(st, "heads", arg, 1, 4096); break;
    case OPT_K: x->K = (int)dp_option_number(st, "K", arg, 1, 256); break;
    case OPT_V: x->V = (int)dp_option_number(st, "V", arg, 1, 256); break;
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

static int print_prices(options *o) {
    dp_priced *x = &o->of_what;
    dp_err e = {0};
    x->json = o->of.json;
    x->ranks = o->of.ranks;
    x->nranks = o->of.nranks;
    if (!x->HV) x->HV = x->lengths ? 8 : 32;
    return (x->lengths ? list_pieces : list_exchanges)(x, &e) ? dp_refuse(&e) : 0;
}

int dp_cmd_list(int argc, char **argv) {
    options o = {.of = dp_options_new(0, 1),
                 .of_what = {.tokens = 8192, .K = 128, .V = 128, .device = "h200"}};
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
    else if (o.tensors)
        print_tensors();
    else if (o.recurrences)
        list_recurrences(stdout);
    else if (o.exchanges || o.of_what.lengths)
        return print_prices(&o);
    else if (o.schema)
        return print_schema();
    else
        return print_cases(&o.of);
    return 0;
}
