/* Finished cases in files (finished.h). */
#define _GNU_SOURCE
#include "finished.h"
#include "harness/record/run_json.h"
#include "harness/record/schema.h"
#include "ref/files/input.h"
#include "ref/files/output.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

/* ---- what the runs of a case follow from ----------------------------------------------------- */

static void add(XXH3_state_t *s, const void *x, size_t n) { XXH3_128bits_update(s, x, n); }
static void add_text(XXH3_state_t *s, const char *x) { add(s, x ? x : "", x ? strlen(x) + 1 : 1); }
static void add_list(XXH3_state_t *s, int n, const void *x, size_t each) {
    add(s, &n, sizeof n);
    if (n) add(s, x, each * (size_t)n);
}

static void add_file(XXH3_state_t *s, const char *path) {
    char *bytes;
    size_t n;
    dp_err e;
    add_text(s, path);
    if (!path || dp_input_read(path, dp_input_most(), &bytes, &n, &e)) return;
    add(s, bytes, n);
    free(bytes);
}

static void add_conv(XXH3_state_t *s, dp_conv *c) {
    for (int i = 0; i < DP_CONV_NINPUTS; i++) {
        const double *x = *dp_conv_input_at(c, i);
        const int64_t n = dp_conv_count(c, &dp_conv_input_fields[i], c->T);
        if (x) add(s, x, sizeof *x * (size_t)n);
    }
}

static void add_case(XXH3_state_t *s, const dp_case *c) {
    dp_case *x = (dp_case *)c;
    add_text(s, c->name);
    add_file(s, c->path);
    if (dp_op_of(c)->has_problem) {
        const dp_key key = dp_problem_key(&c->p, NULL, 0);
        add(s, &key, sizeof key);
    }
    if (dp_op_of(c)->has_conv) add_conv(s, &x->conv);
    for (int i = 0; dp_op_of(c)->has_front && i < DP_NQKV; i++)
        if (c->step.on[i]) add_conv(s, &x->step.conv[i]);
}

static void add_options(XXH3_state_t *s, const dp_run_options *o) {
    add_list(s, o->nranks, o->ranks, sizeof *o->ranks);
    add_list(s, o->nbase, o->base, sizeof *o->base);
    add_list(s, o->nchain, o->chain, sizeof *o->chain);
    add_list(s, o->nmerge, o->merge, sizeof *o->merge);
    add_list(s, o->npayload, o->payload, sizeof *o->payload);
    add_list(s, o->nown, o->own, sizeof *o->own);
    add_list(s, o->nbackend, o->backend, sizeof *o->backend);
    add_list(s, o->nvariant, o->variant, sizeof *o->variant);
    add_list(s, o->truth != NULL, o->truth, sizeof *o->truth);
    add(s, &o->fault, sizeof o->fault);
    add(s, &o->drop, sizeof o->drop);
    add(s, &o->limit_s, sizeof o->limit_s);
    add_text(s, o->design);
    add_text(s, dp_unavailable(DP_BACKEND_CUDA, 1));
    if (!o->subject) return;
    add_file(s, o->subject->path); /* of a program its command, which is no file */
    add(s, &o->subject->base, sizeof o->subject->base);
    add(s, &o->subject->chain, sizeof o->subject->chain);
}

dp_key dp_finished_key(const dp_case *c, const dp_run_options *o) {
    dp_key key;
    XXH128_canonical_t as;
    XXH3_state_t *s = XXH3_createState();
    XXH3_128bits_reset(s);
    add_text(s, dp_cache_sources(DP_CACHE_EXPECTED));
    add_case(s, c);
    add_options(s, o);
    XXH128_canonicalFromHash(&as, XXH3_128bits_digest(s));
    memcpy(key.byte, as.digest, sizeof key.byte);
    XXH3_freeState(s);
    return key;
}

/* ---- files ----------------------------------------------------------------------------------- */

/* A file: its form, its owner, and the number of its runs. So a file that was cut or changed by
 * accident is detected before it is used. */
typedef struct {
    const char *schema, *sources, *key, *case_name, *check;
    int version;
} head;
#define SCHEMA "deltaproof-finished"
#define VERSION 1
#define AT(M) .offset = offsetof(head, M), .size = sizeof(((head *)0)->M)
#define TEXT(NAME, M) \
    { NAME, .kind = DP_KIND_TEXT, .need = DP_FIELD_REQUIRED, AT(M) }
static const dp_record_field HEAD[] = {
    TEXT("schema", schema),
    {"schema_version", .kind = DP_KIND_INTEGER, .need = DP_FIELD_REQUIRED, AT(version)},
    TEXT("sources", sources),
    TEXT("key", key),
    TEXT("case", case_name),
    TEXT("check", check)};
static const dp_object_schema HEAD_OF = {
    .name = "finished", .field = HEAD, .n = sizeof HEAD / sizeof *HEAD, .size = sizeof(head)};

static void hex_of(const unsigned char byte[16], char hex[33]) {
    for (int i = 0; i < 16; i++)
        snprintf(hex + 2 * i, 3, "%02x", byte[i]);
}

static void check_of(const json_t *runs, char hex[33]) {
    char *text = json_dumps(runs, JSON_COMPACT);
    XXH128_canonical_t as;
    XXH128_canonicalFromHash(&as, XXH3_128bits(text ? text : "", text ? strlen(text) : 0));
    hex_of(as.digest, hex);
    free(text);
}

static char *path_of(const char *dir, const char *key) {
    char *path;
    if (asprintf(&path, "%s/%s.json", dir, key) < 0) abort();
    return path;
}

/* The required head of a file. */
static dp_status check_head(const head *h, const char *path, const char *key, const char *case_name,
                            const char *check, dp_err *e) {
    const struct {
        const char *field, *is, *must;
    } rows[] = {{"schema", h->schema, SCHEMA},
                {"sources", h->sources, dp_cache_sources(DP_CACHE_EXPECTED)},
                {"key", h->key, key},
                {"case", h->case_name, case_name},
                {"check", h->check, check}};
    if (h->version != VERSION)
        return dp_fail(e, DP_EINPUT, "%s: schema_version %d, this program reads %d", path,
                       h->version, VERSION);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (strcmp(rows[i].is, rows[i].must))
            return dp_fail(e, DP_EINPUT, "%s: %s: is '%.60s', must be '%.60s'", path, rows[i].field,
                           rows[i].is, rows[i].must);
    return DP_OK;
}

static dp_status load(const char *path, const char *key, const char *case_name, dp_runs *runs,
                      dp_err *e) {
    char *bytes, check[33];
    size_t n;
    json_error_t je;
    head h = {0};
    dp_status st = dp_input_read(path, dp_input_most(), &bytes, &n, e);
    if (st) return st;
    json_t *all = json_loadb(bytes, n, JSON_REJECT_DUPLICATES, &je);
    free(bytes);
    if (!all) return dp_fail(e, DP_EINPUT, "%s:%d: not JSON: %s", path, je.line, je.text);
    st = dp_schema_read(&HEAD_OF, all, &h, path, "", e);
    check_of(json_object_get(all, "runs"), check);
    if (!st) st = check_head(&h, path, key, case_name, check, e);
    if (!st) st = dp_runs_from_json(json_object_get(all, "runs"), path, case_name, runs, e);
    if (!st && !runs->n) st = dp_fail(e, DP_EINPUT, "%s: runs: there is none", path);
    json_decref(all);
    return st;
}

int dp_finished_load(const char *dir, dp_key key, const char *case_name, dp_runs *runs) {
    char hex[33];
    dp_err e = {0};
    hex_of(key.byte, hex);
    char *path = path_of(dir, hex);
    const int there = !access(path, F_OK);
    if (there && load(path, hex, case_name, runs, &e))
        fprintf(stderr, "deltaproof: --resume: %s; its case is run again\n", e.msg);
    free(path);
    return there && !e.code;
}

void dp_finished_save(const char *dir, dp_key key, const char *case_name, const dp_runs *runs) {
    char hex[33], check[33];
    dp_err e = {0};
    dp_output out;
    hex_of(key.byte, hex);
    char *path = path_of(dir, hex);
    json_t *list = dp_runs_json(runs);
    check_of(list, check);
    const head h = {SCHEMA, dp_cache_sources(DP_CACHE_EXPECTED), hex, case_name, check, VERSION};
    json_t *all = dp_schema_write(&HEAD_OF, &h);
    json_object_set_new(all, "runs", list);
    if (!dp_output_replace(&out, path, &e))
        dp_output_close(&out, json_dumpf(all, out.f, JSON_INDENT(1)) != 0, &e);
    if (e.code) fprintf(stderr, "deltaproof: --resume: %s\n", e.msg);
    json_decref(all);
    free(path);
}
