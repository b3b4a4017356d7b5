/* harness/record/record_read.c - reads and checks records (record_read.h). */
#define _GNU_SOURCE
#include "record_read.h"
#include "ref/files/input.h"
#include "ref/vocabulary/text.h"
#include "run.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define BY_NAME "tensors by name" /* what dp_old_tensors returns, kept in the run */
#define MAX_RANKS 4096

typedef struct {
    const char *path;
    dp_err *e;
    char at[64]; /* "runs[3].tensors[0]." */
} place;

static dp_status refuse(const place *p, const char *field, const char *why) {
    return dp_fail(p->e, DP_EINPUT, "%s: %s%s: %s", p->path, p->at, field, why);
}

const char *dp_old_text(const json_t *object, const char *key) {
    const char *s = json_string_value(json_object_get(object, key));
    return s ? s : "";
}

/* ---- checks ---------------------------------------------------------------------------------- */

static dp_status check_text(const place *p, const json_t *o, const char *key, int required) {
    const json_t *x = json_object_get(o, key);
    if (!x || json_is_null(x)) return required ? refuse(p, key, "missing") : DP_OK;
    if (!json_is_string(x)) return refuse(p, key, "must be a text");
    const size_t n = json_string_length(x);
    if (dp_text_good(json_string_value(x), n, 0) < n) return refuse(p, key, "a control character");
    return DP_OK;
}

static dp_status check_texts(const place *p, const json_t *o, const char *const *keys) {
    for (; *keys; keys++) {
        const dp_status s = check_text(p, o, *keys, 0);
        if (s) return s;
    }
    return DP_OK;
}

static dp_status check_verdict(const place *p, const json_t *o) {
    const dp_status s = check_text(p, o, "verdict", 1);
    const char *verdict = dp_old_text(o, "verdict");
    if (s) return s;
    for (int i = 0; i < DP_NVERDICTS; i++)
        if (!strcmp(verdict, dp_verdict_names[i])) return DP_OK;
    return refuse(p, "verdict", "is none of pass, fail, skipped, unjudged");
}

static int is_number(const json_t *x) {
    const char *s = json_string_value(x);
    if (s) return !strcmp(s, "nan") || !strcmp(s, "inf") || !strcmp(s, "-inf");
    return !x || json_is_null(x) || json_is_number(x);
}

static dp_status check_errors(const place *p, const json_t *t) {
    const json_t *ranks = json_object_get(t, "per_rank");
    if (!is_number(json_object_get(t, "rel_fro"))) return refuse(p, "rel_fro", "must be a number");
    if (!ranks || json_is_null(ranks)) return DP_OK;
    if (!json_is_array(ranks)) return refuse(p, "per_rank", "must be a list");
    if (json_array_size(ranks) > MAX_RANKS) return refuse(p, "per_rank", "has over 4096 ranks");
    for (size_t i = 0; i < json_array_size(ranks); i++)
        if (!is_number(json_array_get(ranks, i))) return refuse(p, "per_rank", "must hold numbers");
    return DP_OK;
}

static dp_status check_tensor(const place *p, json_t *t) {
    static const char *const texts[] = {"why", "tier", NULL};
    if (!json_is_object(t)) return refuse(p, "", "must be an object");
    dp_status s = check_text(p, t, "name", 1);
    if (!s) s = check_texts(p, t, texts);
    if (!s) s = check_verdict(p, t);
    return s ? s : check_errors(p, t);
}

static dp_status check_tensors(place *p, size_t run, json_t *r) {
    json_t *list = json_object_get(r, "tensors"), *by_name = json_object();
    dp_status s = DP_OK;
    json_object_set_new(r, BY_NAME, by_name);
    if (!list || json_is_null(list)) return DP_OK;
    if (!json_is_array(list)) return refuse(p, "tensors", "must be a list");
    for (size_t i = 0; i < json_array_size(list) && !s; i++) {
        json_t *t = json_array_get(list, i);
        snprintf(p->at, sizeof p->at, "runs[%zu].tensors[%zu].", run, i);
        s = check_tensor(p, t);
        const char *name = dp_old_text(t, "name");
        if (!s && json_object_get(by_name, name)) s = refuse(p, "name", "is there twice");
        if (!s) json_object_set(by_name, name, t);
    }
    return s;
}

static dp_status check_run(place *p, size_t i, json_t *r) {
    static const char *const texts[] = {"case", "op", "backend", "why", NULL};
    snprintf(p->at, sizeof p->at, "runs[%zu].", i);
    if (!json_is_object(r)) return refuse(p, "", "must be an object");
    dp_status s = check_text(p, r, "id", 1);
    if (!s) s = check_texts(p, r, texts);
    if (!s) s = check_verdict(p, r);
    return s ? s : check_tensors(p, i, r);
}

static dp_status check_top(const place *p, dp_old_record *r) {
    static const char *const texts[] = {"created", NULL}, *const program[] = {"commit", NULL},
                             *const digest[] = {"value", NULL};
    const json_t *o = r->root, *errors = json_object_get(o, "errors");
    const json_t *runs = json_object_get(o, "runs");
    const json_t *version = json_object_get(o, "schema_version");
    dp_status s = check_text(p, o, "schema", 1);
    if (!s && strcmp(dp_old_text(o, "schema"), "deltaproof-record"))
        return dp_fail(p->e, DP_EINPUT, "%s: schema is '%.60s', not deltaproof-record", p->path,
                       dp_old_text(o, "schema"));
    if (!s && (!json_is_integer(version) || json_integer_value(version) != 1))
        return dp_fail(p->e, DP_EINPUT, "%s: schema_version %lld, this program reads 1", p->path,
                       (long long)json_integer_value(version));
    if (!s && !json_is_array(runs)) s = refuse(p, "runs", "must be a list");
    if (!s) s = check_text(p, o, "verdict", 1);
    if (!s) s = check_texts(p, o, texts);
    if (!s) s = check_texts(p, json_object_get(o, "program"), program);
    if (!s) s = check_texts(p, json_object_get(o, "digest"), digest);
    if (s) return s;
    r->verdict = dp_old_text(o, "verdict");
    if (strcmp(r->verdict, "pass") && strcmp(r->verdict, "fail") && strcmp(r->verdict, "error"))
        return refuse(p, "verdict", "is none of pass, fail, error");
    if (errors && (!json_is_integer(errors) || json_integer_value(errors) < 0))
        return refuse(p, "errors", "must be a number from 0 on");
    r->errors = json_integer_value(errors);
    r->commit = dp_old_text(json_object_get(o, "program"), "commit");
    r->digest = dp_old_text(json_object_get(o, "digest"), "value");
    return DP_OK;
}

/* ---- reading --------------------------------------------------------------------------------- */

/* Runs that come again get a number; how often each ID came is counted, not searched for. */
static void index_run(dp_old_record *r, json_t *count, json_t *run) {
    const char *id = dp_old_text(run, "id");
    const json_int_t n = json_integer_value(json_object_get(count, id)) + 1;
    char *key;
    json_object_set_new(count, id, json_integer(n));
    if (n == 1)
        key = strdup(id);
    else if (asprintf(&key, "%s#%lld", id, (long long)n) < 0)
        abort();
    json_object_set(r->runs, key, run);
    free(key);
}

dp_status dp_old_record_parse(const char *bytes, size_t n, const char *path, dp_old_record *r,
                              dp_err *e) {
    json_error_t je;
    dp_err own = {0};
    place p = {.path = path, .e = e ? e : &own};
    *r = (dp_old_record){.root = json_loadb(bytes, n, JSON_REJECT_DUPLICATES, &je)};
    if (!r->root) return dp_fail(e, DP_EINPUT, "%s:%d: not JSON: %s", path, je.line, je.text);
    dp_status s = json_is_object(r->root) ? check_top(&p, r) : refuse(&p, "", "must be an object");
    json_t *count = json_object(), *list = json_object_get(r->root, "runs");
    r->runs = json_object();
    for (size_t i = 0; !s && i < json_array_size(list); i++) {
        s = check_run(&p, i, json_array_get(list, i));
        if (!s) index_run(r, count, json_array_get(list, i));
    }
    json_decref(count);
    if (s) dp_old_record_free(r);
    return s;
}

dp_status dp_old_record_read(const char *path, dp_old_record *r, dp_err *e) {
    struct stat st;
    char *file, *bytes;
    size_t n;
    const int folder = stat(path, &st) == 0 && S_ISDIR(st.st_mode);
    if (asprintf(&file, "%s%s", path, folder ? "/results.json" : "") < 0) abort();
    dp_status s = dp_input_read(file, dp_input_most(), &bytes, &n, e);
    if (!s) {
        s = dp_old_record_parse(bytes, n, file, r, e);
        free(bytes);
    }
    free(file);
    return s;
}

void dp_old_record_free(dp_old_record *r) {
    json_decref(r->runs);
    json_decref(r->root);
    *r = (dp_old_record){0};
}

/* ---- what stands in it ----------------------------------------------------------------------- */

json_t *dp_old_tensors(const json_t *run) { return json_object_get(run, BY_NAME); }

const json_t *dp_old_tensor(const json_t *run, const char *name) {
    return json_object_get(dp_old_tensors(run), name);
}

int dp_old_ranks(const json_t *tensor) {
    return (int)json_array_size(json_object_get(tensor, "per_rank"));
}

double dp_old_error(const json_t *tensor, int rank) {
    const json_t *x = rank < 0 ? json_object_get(tensor, "rel_fro")
                               : json_array_get(json_object_get(tensor, "per_rank"), (size_t)rank);
    const char *s = json_string_value(x);
    if (json_is_number(x)) return json_number_value(x);
    if (!s || !strcmp(s, "nan")) return NAN;
    return *s == '-' ? -INFINITY : INFINITY;
}
